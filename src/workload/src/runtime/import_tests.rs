//! The import, against a server that keeps what it is given as containerd does.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use futures::Stream;
use polis_proto::containerd::services::content::v1::WriteContentResponse;
use polis_proto::containerd::services::content::v1::content_server::{Content, ContentServer};
use polis_proto::containerd::services::images::v1::images_server::{Images, ImagesServer};
use polis_proto::containerd::services::images::v1::{
    CreateImageResponse, GetImageResponse, UpdateImageResponse,
};
use polis_proto::containerd::services::leases::v1::leases_server::{Leases, LeasesServer};
use polis_proto::containerd::services::leases::v1::{CreateResponse, DeleteResponse};
use sha2::{Digest as _, Sha256};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::Streaming;
use tonic::transport::{Endpoint, Server};

use super::super::layout;
use super::*;

/// The state of the server.
#[derive(Debug, Default)]
struct State {
    blobs: BTreeMap<String, (Vec<u8>, BTreeMap<String, String>)>,
    images: BTreeMap<String, Record>,
    leases: BTreeSet<String>,
    writes: usize,
    /// The request that never gets an answer.
    silent: Option<&'static str>,
}

#[derive(Clone, Debug, Default)]
struct Fake(Arc<Mutex<State>>);

impl Fake {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Returns if this request gets an answer. Else the clock of the test stops: with nothing to
    /// do, it goes on to the moment at which the other end has waited for too long.
    async fn answers(&self, request: &str) {
        if self.state().silent == Some(request) {
            tokio::time::pause();
            std::future::pending::<()>().await;
        }
    }

    /// A call outside of the namespace is a bug of the caller.
    fn check<T>(&self, request: &Request<T>) -> Result<(), Status> {
        let lease = request.metadata().get("containerd-lease").map(|it| it.to_str().unwrap());
        let leased = lease.is_none_or(|lease| self.state().leases.contains(lease));
        let namespace = request.metadata().get("containerd-namespace");
        match (namespace.map(|it| it.to_str().unwrap()), leased) {
            (Some("k8s.io"), true) => Ok(()),
            other => Err(Status::failed_precondition(format!("{other:?}"))),
        }
    }
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Content for Fake {
    type WriteStream = Answers<WriteContentResponse>;

    async fn write(
        &self,
        request: Request<Streaming<WriteContentRequest>>,
    ) -> Result<tonic::Response<Self::WriteStream>, Status> {
        self.check(&request)?;
        self.answers("write").await;
        let mut messages = request.into_inner();
        self.state().writes += 1;
        let mut content = Vec::new();
        let mut answers = Vec::new();
        while let Some(message) = messages.message().await? {
            if self.state().blobs.contains_key(&message.expected) {
                return Err(Status::already_exists(message.expected));
            }
            match usize::try_from(message.offset).unwrap() {
                0 => content.clear(),
                offset if offset == content.len() => {}
                offset => return Err(Status::out_of_range(offset.to_string())),
            }
            content.extend_from_slice(&message.data);
            if message.action == i32::from(WriteAction::Commit) {
                let hash = polis_base::hex::encode(&Sha256::digest(&content));
                if format!("sha256:{hash}") != message.expected
                    || number(content.len()) != message.total
                {
                    return Err(Status::failed_precondition("another digest"));
                }
                let blob = (std::mem::take(&mut content), message.labels);
                self.state().blobs.insert(message.expected, blob);
            }
            answers.push(Ok(WriteContentResponse::default()));
        }
        Ok(tonic::Response::new(Box::pin(futures::stream::iter(answers))))
    }
}

#[tonic::async_trait]
impl Images for Fake {
    async fn get(
        &self,
        request: Request<GetImageRequest>,
    ) -> Result<tonic::Response<GetImageResponse>, Status> {
        self.check(&request)?;
        self.answers("get").await;
        let name = request.into_inner().name;
        let image = self.state().images.get(&name).cloned();
        let image = image.ok_or_else(|| Status::not_found(name))?;
        Ok(tonic::Response::new(GetImageResponse { image: Some(image) }))
    }

    async fn create(
        &self,
        request: Request<CreateImageRequest>,
    ) -> Result<tonic::Response<CreateImageResponse>, Status> {
        self.check(&request)?;
        self.answers("create").await;
        let image = request.into_inner().image.unwrap();
        if self.state().images.contains_key(&image.name) {
            return Err(Status::already_exists(image.name));
        }
        self.state().images.insert(image.name.clone(), image.clone());
        Ok(tonic::Response::new(CreateImageResponse { image: Some(image) }))
    }

    async fn update(
        &self,
        request: Request<UpdateImageRequest>,
    ) -> Result<tonic::Response<UpdateImageResponse>, Status> {
        self.check(&request)?;
        self.answers("update").await;
        let image = request.into_inner().image.unwrap();
        self.state().images.insert(image.name.clone(), image.clone());
        Ok(tonic::Response::new(UpdateImageResponse { image: Some(image) }))
    }
}

#[tonic::async_trait]
impl Leases for Fake {
    async fn create(
        &self,
        request: Request<CreateRequest>,
    ) -> Result<tonic::Response<CreateResponse>, Status> {
        self.check(&request)?;
        self.answers("lease").await;
        let id = request.into_inner().id;
        match self.state().leases.insert(id.clone()) {
            true => Ok(tonic::Response::new(CreateResponse::default())),
            false => Err(Status::already_exists(id)),
        }
    }

    async fn delete(
        &self,
        request: Request<DeleteRequest>,
    ) -> Result<tonic::Response<DeleteResponse>, Status> {
        self.check(&request)?;
        self.answers("release").await;
        self.state().leases.remove(&request.into_inner().id);
        Ok(tonic::Response::new(DeleteResponse {}))
    }
}

/// A server on a socket in `folder`, and the way to it.
async fn served(fake: &Fake, folder: &tempfile::TempDir) -> Channel {
    let socket = folder.path().join("client.sock");
    let incoming = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
    let server = Server::builder()
        .add_service(ContentServer::new(fake.clone()))
        .add_service(ImagesServer::new(fake.clone()))
        .add_service(LeasesServer::new(fake.clone()))
        .serve_with_incoming(incoming);
    #[expect(clippy::disallowed_methods, reason = "a test has no supervisor")]
    let _server = tokio::spawn(server);
    let address = format!("unix://{}", socket.display());
    Endpoint::from_shared(address).unwrap().connect().await.unwrap()
}

/// The images of the builder, of programs with these contents.
fn images(folder: &tempfile::TempDir, demo: &[u8]) -> Vec<Image> {
    std::fs::write(folder.path().join("demo"), demo).unwrap();
    std::fs::write(folder.path().join("pause"), "pause").unwrap();
    let layout = polis_image::oci::layout(&polis_image::oci::IMAGES, folder.path()).unwrap();
    let place = folder.path().join("images");
    layout.lay_out(&place).unwrap();
    layout::read(&place).unwrap()
}

#[tokio::test]
async fn images_are_imported_whole_and_once() {
    let folder = tempfile::tempdir().unwrap();
    let fake = Fake::default();
    let channel = served(&fake, &folder).await;
    // More than one chunk, and not a whole number of them.
    let images = images(&folder, &vec![7; 2 * CHUNK + 5]);
    let ends = import(&channel, &images).await.unwrap();
    assert_eq!(ends, [Imported::Now, Imported::Now]);
    {
        let state = fake.state();
        assert_eq!(state.blobs.len(), 6);
        assert!(state.leases.is_empty());
        for image in &images {
            let record = &state.images[&image.reference];
            assert_eq!(record.target.as_ref().unwrap().digest, image.target.digest);
            assert_eq!(record.labels["io.cri-containerd.pinned"], "pinned");
            for blob in &image.blobs {
                let (content, labels) = &state.blobs[&blob.descriptor.digest];
                assert_eq!(*content, std::fs::read(&blob.path).unwrap());
                assert_eq!(labels.len(), blob.labels.len());
            }
        }
    }
    let writes = fake.state().writes;
    let ends = import(&channel, &images).await.unwrap();
    assert_eq!(ends, [Imported::Present, Imported::Present]);
    assert_eq!(fake.state().writes, writes);
}

#[tokio::test]
async fn a_newer_system_replaces_its_image_and_keeps_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let fake = Fake::default();
    let channel = served(&fake, &folder).await;
    import(&channel, &images(&folder, b"old")).await.unwrap();
    let newer = images(&folder, b"new");
    // The former import was cut off when it had its lease.
    fake.state().leases.insert(LEASE.to_owned());
    let ends = import(&channel, &newer).await.unwrap();
    assert_eq!(ends, [Imported::Now, Imported::Present]);
    let state = fake.state();
    let target = state.images[&newer[0].reference].target.clone().unwrap();
    assert_eq!(target.digest, newer[0].target.digest);
    assert!(state.leases.is_empty());
}

#[tokio::test]
async fn a_refusal_names_the_blob() {
    let folder = tempfile::tempdir().unwrap();
    let fake = Fake::default();
    let channel = served(&fake, &folder).await;
    let images = images(&folder, b"demo");
    // Not what its name says.
    std::fs::write(&images[0].blobs[0].path, "damaged").unwrap();
    let error = import(&channel, &images).await.unwrap_err();
    let digest = &images[0].blobs[0].descriptor.digest;
    assert_eq!(error.to_string(), format!("containerd does not take the blob {digest}"));
    assert!(fake.state().images.is_empty());
}

#[tokio::test]
async fn a_request_that_is_never_answered_ends_the_import_with_its_name() {
    let requests = [
        ("get", "show the image"),
        ("lease", "lease"),
        ("write", "take the blob"),
        ("create", "take the image"),
        ("update", "take the image"),
        ("release", "end the lease"),
    ];
    for (request, operation) in requests {
        let folder = tempfile::tempdir().unwrap();
        let fake = Fake::default();
        let channel = served(&fake, &folder).await;
        let images = images(&folder, b"demo");
        if request == "update" {
            let name = images[0].reference.clone();
            fake.state().images.insert(name.clone(), Record { name, ..Record::default() });
        }
        fake.state().silent = Some(request);
        let ended = timeout(REQUEST_MAX * 10, import(&channel, &images)).await;
        tokio::time::resume();
        let error = ended.unwrap().unwrap_err();
        let Error::Refused { operation: refused, source, .. } = &error else { panic!("{error}") };
        assert_eq!((*refused, source.message()), (operation, "no answer within 120 seconds"));
    }
}
