//! The import of images into containerd, over its gRPC interface.
//!
//! ```text
//! Images.Get: the same target --> nothing to do
//!      | another, or none
//!      v
//! lease --> Content.Write, each blob, leaves first --> Images.Create or Update --> end of lease
//! ```
//!
//! containerd has [`REQUEST_MAX`] for each request; a silent one ends the import, and its run.
//!
//! The lease keeps the blobs from the collector until the image refers to them. The write of
//! a blob carries its digest, so containerd has it whole or not at all, and an import that
//! was interrupted begins again at the next start.
//!
//! What this module does not do: unpack. Kubernetes' side of containerd learns of the image
//! by an event, and unpacks it for the first container.
//!
//! The messages are this project's own subset (`proto/containerd`): the client crate of
//! containerd needs `protoc` on the build host, which nothing else here does, and brings
//! thirty services for three.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use polis_proto::containerd::services::content::v1::content_client::ContentClient;
use polis_proto::containerd::services::content::v1::{WriteAction, WriteContentRequest};
use polis_proto::containerd::services::images::v1::images_client::ImagesClient;
use polis_proto::containerd::services::images::v1::{
    CreateImageRequest, GetImageRequest, Image as Record, UpdateImageRequest,
};
use polis_proto::containerd::services::leases::v1::leases_client::LeasesClient;
use polis_proto::containerd::services::leases::v1::{CreateRequest, DeleteRequest};
use polis_proto::containerd::types;
use polis_runtime::supervisor::blocking;
use tokio::time::timeout;
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};
use tracing::info;

use super::layout::{Blob, Descriptor, Image};

/// Where Kubernetes looks for images.
const NAMESPACE: &str = "k8s.io";
/// One lease, which an import that was interrupted left to the next.
const LEASE: &str = "polis-system-images";
/// Bytes of a blob in one message; messages may have four times as many.
const CHUNK: usize = 1 << 20;
/// kubelet waits as long for containerd. A blob of some megabytes takes seconds on a busy disk.
const REQUEST_MAX: Duration = Duration::from_secs(2 * 60);
/// Labels of the image: Kubernetes' side of containerd manages it, and its collector of
/// images spares it.
const LABELS: [(&str, &str); 2] =
    [("io.cri-containerd.image", "managed"), ("io.cri-containerd.pinned", "pinned")];

/// Why an image is not imported.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// containerd refused.
    #[error("containerd does not {operation} {object}")]
    Refused {
        /// The request.
        operation: &'static str,
        /// The image, or the blob.
        object: String,
        /// Its error.
        source: Box<Status>,
    },
    /// The system's own file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Which one.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// How an import ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Imported {
    /// containerd had the image.
    Present,
    /// containerd has it now.
    Now,
}

/// Imports `images` by `channel`, and returns how each ended. May be repeated.
///
/// # Errors
///
/// The first image that containerd refuses.
pub async fn import(channel: &Channel, images: &[Image]) -> Result<Vec<Imported>, Error> {
    let mut missing = Vec::new();
    let mut ends = Vec::new();
    for image in images {
        let present = target(channel, &image.reference).await?;
        let same = present.is_some_and(|target| target.digest == image.target.digest);
        ends.push(if same { Imported::Present } else { Imported::Now });
        missing.extend((!same).then_some(image));
    }
    if missing.is_empty() {
        return Ok(ends);
    }
    lease(channel).await?;
    for image in missing {
        for blob in &image.blobs {
            write(channel, blob).await?;
        }
        name(channel, image).await?;
        info!(image = image.reference, "imported");
    }
    let mut client = LeasesClient::new(channel.clone());
    let ended = answered(client.delete(request(DeleteRequest { id: LEASE.to_owned() }))).await;
    ended.map_err(refused("end the lease", LEASE))?;
    Ok(ends)
}

/// The manifest that containerd has under this name.
async fn target(channel: &Channel, name: &str) -> Result<Option<types::Descriptor>, Error> {
    let asked = request(GetImageRequest { name: name.to_owned() });
    match answered(ImagesClient::new(channel.clone()).get(asked)).await {
        Ok(answer) => Ok(answer.into_inner().image.and_then(|image| image.target)),
        Err(status) if status.code() == Code::NotFound => Ok(None),
        Err(status) => Err(refused("show the image", name)(status)),
    }
}

async fn lease(channel: &Channel) -> Result<(), Error> {
    let wanted = CreateRequest { id: LEASE.to_owned(), ..CreateRequest::default() };
    match answered(LeasesClient::new(channel.clone()).create(request(wanted))).await {
        Ok(_made) => Ok(()),
        Err(status) if status.code() == Code::AlreadyExists => Ok(()),
        Err(status) => Err(refused("lease", LEASE)(status)),
    }
}

/// Writes one blob, unless containerd has it.
async fn write(channel: &Channel, blob: &Blob) -> Result<(), Error> {
    let path = blob.path.clone();
    let content = blocking(move || std::fs::read(path)).await;
    let content = content.map_err(|source| Error::Read { path: blob.path.clone(), source })?;
    match answered(send(channel, messages(blob, &content))).await {
        Ok(()) => Ok(()),
        // The call has added it to the lease.
        Err(status) if status.code() == Code::AlreadyExists => Ok(()),
        Err(status) => Err(refused("take the blob", &blob.descriptor.digest)(status)),
    }
}

async fn send(channel: &Channel, messages: Vec<WriteContentRequest>) -> Result<(), Status> {
    let messages = leased(futures::stream::iter(messages));
    let mut answers = ContentClient::new(channel.clone()).write(messages).await?.into_inner();
    // The last answer is that to the commit; a refusal ends the stream with its status.
    while answers.message().await?.is_some() {}
    Ok(())
}

/// The requests that write `content`: chunks, and the commit.
fn messages(blob: &Blob, content: &[u8]) -> Vec<WriteContentRequest> {
    let Descriptor { digest, .. } = &blob.descriptor;
    let total = number(content.len());
    let base = WriteContentRequest {
        action: WriteAction::Write.into(),
        r#ref: format!("polis-{digest}"),
        total,
        expected: digest.clone(),
        ..WriteContentRequest::default()
    };
    let mut messages = Vec::new();
    for (at, chunk) in content.chunks(CHUNK).enumerate() {
        // An offset of 0 also drops what an earlier import left of this blob.
        let offset = number(at * CHUNK);
        messages.push(WriteContentRequest { offset, data: chunk.to_vec(), ..base.clone() });
    }
    // With an offset of 0 the commit would drop all of it.
    let labels = blob.labels.iter().cloned().collect();
    let action = WriteAction::Commit.into();
    messages.push(WriteContentRequest { action, offset: total, labels, ..base });
    messages
}

fn number(length: usize) -> i64 {
    i64::try_from(length).unwrap_or(i64::MAX)
}

/// Gives the image its name, in place of one that had it.
async fn name(channel: &Channel, image: &Image) -> Result<(), Error> {
    let Descriptor { media_type, digest, size, .. } = &image.target;
    let target = types::Descriptor {
        media_type: media_type.clone(),
        digest: digest.clone(),
        size: i64::try_from(*size).unwrap_or(i64::MAX),
    };
    let labels = LABELS.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let record =
        Record { name: image.reference.clone(), labels: labels.into(), target: Some(target) };
    let mut client = ImagesClient::new(channel.clone());
    let create = CreateImageRequest { image: Some(record.clone()) };
    let made = match answered(client.create(leased(create))).await {
        Err(status) if status.code() == Code::AlreadyExists => {
            let update = UpdateImageRequest { image: Some(record) };
            answered(client.update(leased(update))).await.map(drop)
        }
        made => made.map(drop),
    };
    made.map_err(refused("take the image", &image.reference))
}

/// Waits for an answer as long as a request may take.
fn answered<T>(
    request: impl Future<Output = Result<T, Status>>,
) -> impl Future<Output = Result<T, Status>> {
    // On the heap: the futures of the client are large.
    let answer = timeout(REQUEST_MAX, Box::pin(request));
    async move {
        match answer.await {
            Ok(answer) => answer,
            Err(_elapsed) => {
                let seconds = REQUEST_MAX.as_secs();
                Err(Status::deadline_exceeded(format!("no answer within {seconds} seconds")))
            }
        }
    }
}

fn refused(operation: &'static str, object: &str) -> impl FnOnce(Status) -> Error {
    let object = object.to_owned();
    move |status| Error::Refused { operation, object, source: Box::new(status) }
}

/// A request in the namespace of Kubernetes.
fn request<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    let namespace = MetadataValue::from_static(NAMESPACE);
    request.metadata_mut().insert("containerd-namespace", namespace);
    request
}

/// The same, with everything that it makes in the lease.
fn leased<T>(message: T) -> Request<T> {
    let mut request = request(message);
    request.metadata_mut().insert("containerd-lease", MetadataValue::from_static(LEASE));
    request
}

#[cfg(test)]
#[path = "import_tests.rs"]
mod tests;
