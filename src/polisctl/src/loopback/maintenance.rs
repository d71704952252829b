//! The machine as one that shows a guru meditation.

use polis_proto::v1;
use polis_proto::v1::maintenance_server::Maintenance;
use tonic::{Request, Response, Status};

use super::UPTIME;
use super::served::{Answers, Served};

#[tonic::async_trait]
impl Maintenance for Served {
    async fn describe(
        &self,
        _request: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::DescribeResponse>, Status> {
        self.note("Describe");
        let disk = |name: &str, system| v1::MachineDisk {
            name: name.to_owned(),
            bytes: 3 << 30,
            model: "Ultra".to_owned(),
            serial: "S4EW".to_owned(),
            system,
        };
        Ok(Response::new(v1::DescribeResponse {
            code: "#0601.0000".to_owned(),
            stage: "parameters".to_owned(),
            causes: vec!["this machine has no node parameters".to_owned()],
            next: "put them there".to_owned(),
            version: "0.1.0".to_owned(),
            image: "5d41402abc4b2a76".to_owned(),
            slot: "A".to_owned(),
            addresses: vec!["192.0.2.1".to_owned()],
            disks: vec![disk("sda", false), disk("vda", true)],
            parameters: vec!["SMBIOS OEM string (type 11): absent".to_owned()],
            uptime_seconds: UPTIME,
            ..v1::DescribeResponse::default()
        }))
    }

    type ReadLogStream = Answers<v1::ReadLogResponse>;

    async fn read_log(
        &self,
        request: Request<v1::ReadLogRequest>,
    ) -> Result<Response<Self::ReadLogStream>, Status> {
        self.note(&format!("ReadLog {}", request.into_inner().log));
        let piece = v1::ReadLogResponse { text: "one\u{1b}[2J\n".to_owned() };
        Ok(Response::new(Box::pin(futures::stream::iter([Ok(piece)]))))
    }

    async fn give_parameters(
        &self,
        request: Request<v1::GiveParametersRequest>,
    ) -> Result<Response<v1::GiveParametersResponse>, Status> {
        let dry_run = request.into_inner().dry_run;
        self.note(if dry_run { "CheckParameters" } else { "GiveParameters" });
        Ok(Response::new(v1::GiveParametersResponse { replaced: vec!["the ESP".to_owned()] }))
    }

    async fn end(
        &self,
        request: Request<v1::EndRequest>,
    ) -> Result<Response<v1::EndResponse>, Status> {
        self.note(if request.into_inner().power_off { "End off" } else { "End" });
        Ok(Response::new(v1::EndResponse {}))
    }
}
