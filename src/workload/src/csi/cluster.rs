//! The requests of the driver to the API server.
//!
//! Every change names the state that it was made for, or may be repeated: an object that
//! exists already, or is gone already, is what was wanted.

use http::Method;
use serde_json::{Value, json};

use super::claims::{self, Claim, Class, Refusal, Volume};
use super::names::{CAPACITIES, SELECTED_NODE};
use super::volume_id::VolumeId;
use crate::api::{Answer, Api, Error, MERGE_PATCH, parse};
use polis_wire::identity::NodeId;

pub(super) const VOLUMES: &str = "/api/v1/persistentvolumes";
pub(super) const CLASSES: &str = "/apis/storage.k8s.io/v1/storageclasses";

const JSON: &str = "application/json";

/// A server of the API. The node uses [`Api`].
pub(super) trait Server: Clone + Send + Sync + 'static {
    /// Makes one request; `content` is the type and the text of its body.
    fn ask(
        &self,
        method: Method,
        path: &str,
        content: Option<(&'static str, Value)>,
    ) -> impl Future<Output = Result<Answer, Error>> + Send;

    /// The error for an answer.
    fn refused(&self, answer: &Answer) -> Error;
}

impl Server for Api {
    async fn ask(
        &self,
        method: Method,
        path: &str,
        content: Option<(&'static str, Value)>,
    ) -> Result<Answer, Error> {
        let Some((kind, body)) = content else {
            return self.request(method, path, &[], Vec::new()).await;
        };
        let kind = [("content-type", kind)];
        self.request(method, path, &kind, body.to_string().into_bytes()).await
    }

    fn refused(&self, answer: &Answer) -> Error {
        Error::refused(self.address, answer.status, &answer.body)
    }
}

/// The requests of the driver.
#[derive(Clone, Debug)]
pub(super) struct Cluster<S>(pub(super) S);

impl<S: Server> Cluster<S> {
    /// The class of a claim; `None` for one of another driver, or that does not exist.
    pub(super) async fn class(&self, claim: &Claim) -> Result<Option<Class>, Error> {
        let Some(name) = claim.class() else { return Ok(None) };
        let object = self.get(&format!("{CLASSES}/{name}")).await?;
        Ok(object.as_ref().and_then(Class::read))
    }

    /// The object of a volume.
    pub(super) async fn volume(&self, id: &VolumeId) -> Result<Option<Value>, Error> {
        self.get(&format!("{VOLUMES}/{id}")).await
    }

    /// The UID of the claim with this label (`NAMESPACE/NAME`); `None` without one.
    pub(super) async fn claim_uid(&self, label: &str) -> Result<Option<String>, Error> {
        let Some((namespace, name)) = label.split_once('/') else { return Ok(None) };
        if !claims::is_name(namespace) || !claims::is_name(name) {
            return Ok(None);
        }
        let path = format!("/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}");
        let object = self.get(&path).await?;
        Ok(object.and_then(|object| object["metadata"]["uid"].as_str().map(str::to_owned)))
    }

    /// Makes the object of a volume, unless it exists.
    pub(super) async fn create(&self, volume: &Value) -> Result<(), Error> {
        let answer = self.0.ask(Method::POST, VOLUMES, Some((JSON, volume.clone()))).await?;
        self.accept(&answer, &[409])
    }

    /// Gives the object of a volume this size.
    pub(super) async fn resize(&self, volume: &Volume, bytes: u64) -> Result<(), Error> {
        let patch = json!({
            "metadata": {"resourceVersion": volume.resource_version},
            "spec": {"capacity": {"storage": claims::size(bytes)}},
        });
        let path = format!("{VOLUMES}/{}", volume.id);
        let answer = self.0.ask(Method::PATCH, &path, Some((MERGE_PATCH, patch))).await?;
        self.accept(&answer, &[])
    }

    /// Shows this size in the status of a claim.
    pub(super) async fn show_size(&self, claim: &Claim, bytes: u64) -> Result<(), Error> {
        let patch = json!({
            "metadata": {"uid": claim.id.claim()},
            "status": {"capacity": {"storage": claims::size(bytes)}},
        });
        let path = format!(
            "/api/v1/namespaces/{}/persistentvolumeclaims/{}/status",
            claim.namespace, claim.name
        );
        let answer = self.0.ask(Method::PATCH, &path, Some((MERGE_PATCH, patch))).await?;
        // A claim that is gone shows nothing.
        self.accept(&answer, &[404])
    }

    /// Takes the selected node off a claim, so that the scheduler selects one again.
    pub(super) async fn release(&self, claim: &Claim) -> Result<(), Error> {
        let patch = json!({"metadata": {
            "uid": claim.id.claim(),
            "resourceVersion": claim.resource_version,
            "annotations": {SELECTED_NODE: null},
        }});
        // The driver has no right to claims but to their status, whose requests may change the
        // metadata, too (`objects` has the policy).
        let path = format!(
            "/api/v1/namespaces/{}/persistentvolumeclaims/{}/status",
            claim.namespace, claim.name
        );
        let answer = self.0.ask(Method::PATCH, &path, Some((MERGE_PATCH, patch))).await?;
        // It is gone, or an event brings its newer state.
        self.accept(&answer, &[404, 409])
    }

    /// The room that this node shows for a class; `None` without an object.
    pub(super) async fn room(&self, node: NodeId, class: &str) -> Result<Option<u64>, Error> {
        let object = self.get(&capacity(node, class)).await?;
        Ok(object.as_ref().map(claims::shown))
    }

    /// Shows this room in the object of a class; returns whether there is one.
    pub(super) async fn show_room(
        &self,
        node: NodeId,
        class: &str,
        bytes: u64,
    ) -> Result<bool, Error> {
        let patch = Some((MERGE_PATCH, claims::room(bytes)));
        let answer = self.0.ask(Method::PATCH, &capacity(node, class), patch).await?;
        self.accept(&answer, &[404])?;
        Ok(answer.status != 404)
    }

    /// Makes the object of a class with this room; returns whether it did. It belongs to the Node,
    /// which kubelet may not have registered yet.
    pub(super) async fn create_room(
        &self,
        node: NodeId,
        class: &str,
        bytes: u64,
    ) -> Result<bool, Error> {
        let owner = self.get(&format!("/api/v1/nodes/{node}")).await?;
        let uid = owner.as_ref().and_then(|owner| owner["metadata"]["uid"].as_str());
        let Some(uid) = uid else { return Ok(false) };
        let object = claims::capacity(node, uid, class, bytes);
        let answer = self.0.ask(Method::POST, &capacities(), Some((JSON, object))).await?;
        self.accept(&answer, &[409])?;
        Ok(answer.status != 409)
    }

    /// Deletes the object of a volume: asks for its end, then takes the driver's finalizer
    /// away.
    pub(super) async fn delete(&self, volume: &Volume) -> Result<(), Error> {
        let path = format!("{VOLUMES}/{}", volume.id);
        if !volume.deleted {
            let this = json!({"preconditions": {"uid": volume.uid}});
            let answer = self.0.ask(Method::DELETE, &path, Some((JSON, this))).await?;
            // Another object has the name already.
            self.accept(&answer, &[404, 409])?;
        }
        self.forget(volume).await
    }

    /// Takes the driver's finalizer away from an object that is deleted.
    pub(super) async fn forget(&self, volume: &Volume) -> Result<(), Error> {
        let Some(finalizers) = volume.finalizers_of_others() else { return Ok(()) };
        let path = format!("{VOLUMES}/{}", volume.id);
        let patch = json!({"metadata": {"uid": volume.uid, "finalizers": finalizers}});
        let answer = self.0.ask(Method::PATCH, &path, Some((MERGE_PATCH, patch))).await?;
        self.accept(&answer, &[404, 409])
    }

    /// Tells the owner of a claim why it has no volume.
    pub(super) async fn report(
        &self,
        claim: &Claim,
        refusal: &Refusal,
        event: Value,
    ) -> Result<(), Error> {
        let path = format!("/api/v1/namespaces/{}/events", claim.namespace);
        tracing::info!(claim = claim.label(), why = refusal.message, "no volume");
        let answer = self.0.ask(Method::POST, &path, Some((JSON, event))).await?;
        // The namespace is being removed.
        self.accept(&answer, &[403, 404])
    }

    async fn get(&self, path: &str) -> Result<Option<Value>, Error> {
        let answer = self.0.ask(Method::GET, path, None).await?;
        if answer.status == 404 {
            return Ok(None);
        }
        self.accept(&answer, &[])?;
        Ok(parse(&answer.body).ok())
    }

    /// Fails unless the answer is a success, or one of these.
    fn accept(&self, answer: &Answer, also: &[u16]) -> Result<(), Error> {
        match (200..300).contains(&answer.status) || also.contains(&answer.status) {
            true => Ok(()),
            false => Err(self.0.refused(answer)),
        }
    }
}

/// Where the objects are that show the room of nodes.
fn capacities() -> String {
    format!("/apis/storage.k8s.io/v1/namespaces/{CAPACITIES}/csistoragecapacities")
}

fn capacity(node: NodeId, class: &str) -> String {
    format!("{}/{}", capacities(), claims::capacity_name(node, class))
}

#[cfg(test)]
#[path = "fake_server_tests.rs"]
pub(super) mod fake_server;
