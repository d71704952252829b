//! What a test changes of the cluster while it runs: the standing of its node, its answers, and
//! what the context of the operator knows of it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use polis_proto::v1;
use polis_proto::v1::cluster_update::State;
use polis_proto::v1::cluster_update::step::State as Progress;
use sha2::{Digest as _, Sha256};
use tonic::Status;

use super::records::update_of;
use super::{Cluster, NODE, PERSON, SNAPSHOT, Takes, crowd, kubernetes};
use crate::contexts::{self, Contexts};
use crate::testing::World;
use polis_wire::attestation::software::Software;
use polis_wire::pki::Template;
use polis_wire::rpc::testing::Running;
use polis_wire::rpc::{App, Limits, Role};
use polis_wire::s3;
use polis_wire::s3::testing::Store;
use polis_wire::snapshot::object::{self, Name};

impl Cluster {
    /// From now on the context is that of a user with this role.
    pub(crate) fn lets_in_as(&self, world: &World, role: Role) {
        let user = self.authority.user(role.as_str(), role, PERSON);
        let user = self.runtime.block_on(user);
        let contexts = Contexts::find(Some(world.path("polis")), |_name| None).unwrap();
        let mut context = contexts.load("home").unwrap();
        role.as_str().clone_into(&mut context.settings.user);
        context.certificate = Some(user.certificate);
        contexts.save(&context).unwrap();
    }

    /// The context is that of a user with this role, whose certificate has ended.
    pub(crate) fn ends_the_certificate(&self, world: &World, role: Role) {
        self.lets_in_as(world, role);
        let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let template = Template::User { role: role.as_str() };
        let name = format!("former-{}", role.as_str());
        let user = self.authority.sign(&name, template, PERSON, long_ago);
        let user = self.runtime.block_on(user);
        let contexts = Contexts::find(Some(world.path("polis")), |_name| None).unwrap();
        let mut context = contexts.load("home").unwrap();
        context.certificate = Some(user.certificate);
        contexts.save(&context).unwrap();
    }

    /// Another CA signs from now on, and the former one is not trusted.
    pub(crate) fn rotates(&self) {
        self.runtime.block_on(async {
            self.authority.rotate(1).await;
            self.authority.conclude().await;
        });
    }

    /// The node shows a certificate of the CA of now.
    pub(crate) fn shows_the_next_ca(&self) {
        let own = self.runtime.block_on(self.authority.curator(NODE));
        self.running.credentials.send_replace(Some(own));
    }

    /// Revokes the certificate that the curator shows. It goes on to show it.
    pub(crate) fn revokes_its_curator(&self) {
        let crl = self.runtime.block_on(self.authority.revoked_curator(NODE));
        *self.crl.lock().unwrap() = crl;
    }

    /// From now on something was added to the command line of its kernel.
    pub(crate) fn has_additions(&self) {
        self.tpm.lock().unwrap().registers.insert(12, [1; 32]);
    }

    /// From now on its machine has no TPM.
    pub(crate) fn has_no_tpm(&self) {
        self.tpm.lock().unwrap().software = None;
    }

    /// From now on it names the attestation key of another TPM as its own.
    pub(crate) fn pretends(&self) {
        let other = Software::default().keys().attestation;
        self.tpm.lock().unwrap().pretended = Some(other);
    }

    /// From now on its record has this proof of its TPM.
    pub(crate) fn has_proved(&self, proof: v1::TpmAttestation) {
        self.tpm.lock().unwrap().recorded = Some(proof);
    }

    /// From now on it asks for a new certificate, with this proof of its TPM.
    pub(crate) fn asks_for_a_certificate(&self, proof: v1::TpmAttestation) {
        self.tpm.lock().unwrap().returning = Some(proof);
    }

    /// From now on its leader takes changes of the configuration in this way.
    pub(crate) fn takes(&self, takes: Takes) {
        self.settings.lock().unwrap().takes = takes;
    }

    /// From now on, each look at its update to version 1.0.0 finds the next of these states of the
    /// update and of its only step, with a cause; later looks find the last one.
    pub(crate) fn update_goes_on(&self, looks: &[(State, Progress, &str)]) {
        let look = |(state, step, cause): &(State, Progress, &str)| {
            let bundle = v1::UpdateBundle {
                version: "1.0.0".to_owned(),
                image: "00".to_owned(),
                ..Default::default()
            };
            let mut update = update_of(bundle, *state);
            for it in &mut update.steps {
                it.set_state(*step);
                (*cause).clone_into(&mut it.cause);
            }
            update
        };
        self.update_looks.lock().unwrap().extend(looks.iter().map(look));
    }

    /// From now on there are nodes beside it, none of which answers, and users with the
    /// longest texts that a cluster accepts.
    pub(crate) fn has_a_crowd(&self, world: &World, closed: &str) {
        let contexts = Contexts::find(Some(world.path("polis")), |_name| None).unwrap();
        let mut context = contexts.load("home").unwrap();
        let ports = crowd::ports().into_iter().map(|port| (port, closed.to_owned()));
        context.settings.via.extend(ports);
        contexts.save(&context).unwrap();
        self.crowd.store(true, Ordering::Relaxed);
    }

    /// From now on the node is a Kubernetes controller, and the context knows the way.
    pub(crate) fn has_controller(&mut self, world: &World) {
        let app = App::Gateway(Arc::new(self.kubernetes.clone()));
        let node = self.authority.node(NODE);
        let running = self.runtime.block_on(async {
            Running::start(&self.authority, node.await, app, Limits::default()).await
        });
        let contexts = Contexts::find(Some(world.path("polis")), |_name| None).unwrap();
        let mut context = contexts.load("home").unwrap();
        let via = ("192.0.2.1:6444".to_owned(), running.address.to_string());
        context.settings.via.extend([via]);
        contexts.save(&context).unwrap();
        self.shown.lock().unwrap().push(running.credentials.clone());
        self.gateway = Some(running);
        self.kubernetes.there.store(true, Ordering::Relaxed);
    }

    /// The authority of its API servers, in PEM.
    pub(crate) fn authority_of_kubernetes(&self) -> &'static str {
        assert!(self.gateway.is_some(), "it has no controller");
        kubernetes::AUTHORITY
    }

    /// From now on there is a bucket with a snapshot, and its key in the file `bucket.key`.
    pub(crate) fn has_bucket(&mut self, world: &World) {
        let store = Store::start("127.0.0.1");
        let sha256 = Sha256::digest(SNAPSHOT).into();
        let name = Name { at: 1_795_694_400, revision: 1234, sha256 };
        let key = format!("polis/{}{name}", object::folder("cluster.internal", 0x0d2f));
        store.with(|state| state.objects.insert(key, SNAPSHOT.to_vec()));
        let ca = world.path("bucket.pem");
        std::fs::write(&ca, &store.ca).unwrap();
        let text = format!("{}\n{}\n", s3::testing::KEY, s3::testing::SECRET);
        contexts::write(&world.path("bucket.key"), text.as_bytes()).unwrap();
        let url = store.url(store.address.port(), "polis");
        let target = format!("{url},region={},ca={}", s3::testing::REGION, ca.display());
        self.bucket = Some((store, target));
    }

    /// From now on the node is a Kubernetes worker.
    pub(crate) fn has_worker(&self) {
        self.kubernetes.works.store(true, Ordering::Relaxed);
    }

    /// From now on a drain of the worker answers this.
    pub(crate) fn drains(&self, messages: Vec<Result<v1::DrainProgress, Status>>) {
        *self.kubernetes.drain.lock().unwrap() = messages;
    }

    /// The node is a worker too, whose kubelet ends again and again.
    pub(crate) fn has_worker_with_a_crash_loop(&self) {
        self.kubernetes.loops.store(true, Ordering::Relaxed);
    }

    /// From now on its API server waits for etcd.
    pub(crate) fn api_server_starts(&self) {
        self.kubernetes.starts.store(true, Ordering::Relaxed);
    }

    /// From now on the node reports a cluster without a leader.
    pub(crate) fn lose_the_leader(&self) {
        self.leads.store(false, Ordering::Relaxed);
    }

    /// After this time the node reports that it leads.
    pub(crate) fn leads_after(&self, wait: std::time::Duration) {
        let leads = Arc::clone(&self.leads);
        self.runtime.spawn(async move {
            tokio::time::sleep(wait).await;
            leads.store(true, Ordering::Relaxed);
        });
    }

    /// From now on its member of etcd does not answer.
    pub(crate) fn etcd_is_silent(&self) {
        self.answers.store(false, Ordering::Relaxed);
    }

    /// From now on this is the one line of its log.
    pub(crate) fn logs(&self, line: &str) {
        line.clone_into(&mut self.says.lock().unwrap());
    }

    /// From now on this is its audit log.
    pub(crate) fn has_audit(&self, head: v1::AuditHead, entries: Vec<v1::AuditEntry>) {
        *self.audit.lock().unwrap() = (head, entries);
    }

    /// The context knows these nodes, as a leader has reported them.
    pub(crate) fn knows(&self, world: &World, nodes: &[(&str, &str)]) {
        let contexts = Contexts::find(Some(world.path("polis")), |_name| None).unwrap();
        let mut context = contexts.load("home").unwrap();
        let entry = |(id, at): &(&str, &str)| ((*id).to_owned(), vec![(*at).to_owned()]);
        context.settings.nodes = nodes.iter().map(entry).collect();
        contexts.save(&context).unwrap();
    }
}
