//! Claims, volumes and classes of Kubernetes as the provisioner reads them, and the objects
//! that it writes. Pure.
//!
//! Objects come from the API server, and people with few rights write claims: a field that is
//! missing or of another type reads as absent, sizes and UIDs are parsed strictly, and a
//! claim that this driver does not serve is a [`Refusal`] that says what is allowed.

use serde_json::{Value, json};

use super::mounting::Flags;
use super::names::{CAPACITIES, DRIVER, FINALIZER, NODE_LABEL, SELECTED_NODE};
use super::quantity;
use super::store::{UNIT, whole};
use super::volume_id::VolumeId;
use polis_wire::identity::NodeId;

/// The access modes of a volume on one node.
const ACCESS_MODES: [&str; 2] = ["ReadWriteOnce", "ReadWriteOncePod"];

/// Why a claim has no volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    /// One word for programs.
    pub(super) reason: &'static str,
    /// A sentence for people, with the next step.
    pub(super) message: String,
    /// The same without figures that change while the claim waits: one cause is reported once.
    pub(super) cause: String,
}

fn refusal(message: impl Into<String>) -> Refusal {
    let message = message.into();
    Refusal { reason: "ProvisioningFailed", cause: message.clone(), message }
}

/// A claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) id: VolumeId,
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) resource_version: String,
    /// The class that it names.
    class: String,
    /// The volume that it has.
    volume: Option<String>,
    selected_node: Option<String>,
    deleted: bool,
    /// The requested size, and the capacity by its status.
    request: String,
    capacity: Option<String>,
    access_modes: Vec<String>,
    volume_mode: Option<String>,
    /// It names a source to copy, or volumes to choose from.
    special: Option<&'static str>,
}

impl Claim {
    /// Reads a claim; `None` for what is none.
    pub(super) fn read(object: &Value) -> Option<Self> {
        let (metadata, spec) = (&object["metadata"], &object["spec"]);
        let special = ["dataSource", "dataSourceRef", "selector"];
        Some(Self {
            id: VolumeId::of_claim(metadata["uid"].as_str()?).ok()?,
            namespace: name(&metadata["namespace"])?,
            name: name(&metadata["name"])?,
            resource_version: metadata["resourceVersion"].as_str()?.to_owned(),
            class: spec["storageClassName"].as_str().unwrap_or_default().to_owned(),
            volume: text(&spec["volumeName"]),
            selected_node: text(&metadata["annotations"][SELECTED_NODE]),
            deleted: !metadata["deletionTimestamp"].is_null(),
            request: spec["resources"]["requests"]["storage"].as_str().unwrap_or_default().into(),
            capacity: text(&object["status"]["capacity"]["storage"]),
            access_modes: texts(&spec["accessModes"]),
            volume_mode: text(&spec["volumeMode"]),
            special: special.into_iter().find(|field| !spec[*field].is_null()),
        })
    }

    /// The step for it on this node.
    pub(super) fn action(&self, node: NodeId) -> Action {
        let selected = self.selected_node.as_deref() == Some(node.to_string().as_str());
        match self.volume.as_deref() {
            _ if self.deleted => Action::Nothing,
            None if selected => Action::Make,
            Some(volume) if volume == self.id.as_str() && selected => Action::Enlarge,
            None | Some(_) => Action::Nothing,
        }
    }

    /// The name of its class, for a path.
    pub(super) fn class(&self) -> Option<&str> {
        is_name(&self.class).then_some(self.class.as_str())
    }

    /// `NAMESPACE/NAME`.
    pub(super) fn label(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// The size that it asks for.
    pub(super) fn size(&self) -> Result<u64, Refusal> {
        quantity::bytes(&self.request).map(whole).map_err(|error| {
            let asked: String = self.request.chars().take(40).collect();
            refusal(format!("the size {asked:?} cannot be used: {error}"))
        })
    }

    /// Whether its status has less than this.
    pub(super) fn shows_less_than(&self, bytes: u64) -> bool {
        let shown = self.capacity.as_deref().and_then(|text| quantity::bytes(text).ok());
        shown.is_none_or(|shown| shown < bytes)
    }

    /// The volume for it, by its class.
    pub(super) fn wanted(&self, class: &Class) -> Result<Wanted, Refusal> {
        if self.volume_mode.as_deref().is_some_and(|mode| mode != "Filesystem") {
            return Err(refusal(format!(
                "{DRIVER} has no block volumes: ask for volumeMode Filesystem"
            )));
        }
        if let Some(field) = self.special {
            return Err(refusal(format!(
                "{DRIVER} makes empty volumes only: leave {field} out, and copy the data in a pod"
            )));
        }
        let other = self.access_modes.iter().find(|mode| !ACCESS_MODES.contains(&mode.as_str()));
        if let Some(mode) = other {
            let mode: String = mode.chars().take(40).collect();
            return Err(refusal(format!(
                "a volume of {DRIVER} is on one node: ask for ReadWriteOnce or \
                 ReadWriteOncePod, and not {mode}"
            )));
        }
        if let Some(parameter) = &class.parameter {
            let parameter: String = parameter.chars().take(60).collect();
            return Err(refusal(format!(
                "the class {} has the parameter {parameter:?}: {DRIVER} knows none",
                self.class
            )));
        }
        if let Err(option) = Flags::read(&class.mount_options) {
            return Err(refusal(format!("the class {} cannot be used: {option}", self.class)));
        }
        Ok(Wanted { bytes: self.size()? })
    }
}

/// The request of a claim to this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Nothing: it is not of this node, or has what it wants.
    Nothing,
    /// A volume.
    Make,
    /// Perhaps a larger one.
    Enlarge,
}

/// The volume that a claim asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) bytes: u64,
}

/// A class of this driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Class {
    /// `Delete` or `Retain`.
    policy: String,
    mount_options: Vec<String>,
    /// One of its parameters, of which the driver knows none.
    parameter: Option<String>,
}

impl Class {
    /// Reads a class; `None` for one of another driver.
    pub(super) fn read(object: &Value) -> Option<Self> {
        if object["provisioner"] != DRIVER {
            return None;
        }
        let parameters = object["parameters"].as_object();
        Some(Self {
            policy: object["reclaimPolicy"].as_str().unwrap_or("Delete").to_owned(),
            mount_options: texts(&object["mountOptions"]),
            parameter: parameters.and_then(|map| map.keys().next().cloned()),
        })
    }
}

/// A persistent volume of this driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Volume {
    pub(super) id: VolumeId,
    pub(super) uid: String,
    pub(super) resource_version: String,
    /// The claim that it belongs to.
    pub(super) claim: Option<VolumeId>,
    finalizers: Vec<String>,
    pub(super) deleted: bool,
    phase: String,
    policy: String,
    capacity: String,
}

impl Volume {
    /// Reads a volume; `None` for one of another driver or node. Its name, its handle and the
    /// node are all of the form in which this driver makes them.
    pub(super) fn read(object: &Value, node: NodeId) -> Option<Self> {
        let (metadata, spec) = (&object["metadata"], &object["spec"]);
        let id: VolumeId = metadata["name"].as_str()?.parse().ok()?;
        let csi = &spec["csi"];
        if csi["driver"] != DRIVER || csi["volumeHandle"] != id.as_str() {
            return None;
        }
        if spec["nodeAffinity"] != affinity(node) {
            return None;
        }
        Some(Self {
            id,
            uid: metadata["uid"].as_str()?.to_owned(),
            resource_version: metadata["resourceVersion"].as_str()?.to_owned(),
            claim: spec["claimRef"]["uid"].as_str().and_then(|uid| VolumeId::of_claim(uid).ok()),
            finalizers: texts(&metadata["finalizers"]),
            deleted: !metadata["deletionTimestamp"].is_null(),
            phase: object["status"]["phase"].as_str().unwrap_or_default().to_owned(),
            policy: spec["persistentVolumeReclaimPolicy"].as_str().unwrap_or_default().to_owned(),
            capacity: spec["capacity"]["storage"].as_str().unwrap_or_default().to_owned(),
        })
    }

    /// Whether its claim is gone and its content is to go, or its object is.
    pub(super) fn end(&self) -> Option<End> {
        match (self.phase.as_str(), self.policy.as_str()) {
            ("Released", "Delete") => Some(End::Remove),
            // An operator deletes the object of a volume that no claim has.
            ("Released" | "Available" | "Failed", policy) if self.deleted => {
                Some(if policy == "Delete" { End::Remove } else { End::Forget })
            }
            _ => None,
        }
    }

    /// Its size as other parts of Kubernetes see it; 0 for one that cannot be read.
    pub(super) fn bytes(&self) -> u64 {
        quantity::bytes(&self.capacity).unwrap_or(0)
    }

    /// Its finalizers without that of this driver; `None` if it has none of this driver.
    pub(super) fn finalizers_of_others(&self) -> Option<Vec<&str>> {
        let others: Vec<_> =
            self.finalizers.iter().map(String::as_str).filter(|one| *one != FINALIZER).collect();
        (others.len() < self.finalizers.len()).then_some(others)
    }
}

/// The fate of a volume without a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Its content goes, then its object.
    Remove,
    /// Its object goes, and its content stays (policy Retain).
    Forget,
}

/// The object of a volume of `bytes` on `node` for a claim.
pub(super) fn volume(claim: &Claim, class: &Class, node: NodeId, bytes: u64) -> Value {
    let id = claim.id.as_str();
    json!({
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {
            "name": id,
            "annotations": {"pv.kubernetes.io/provisioned-by": DRIVER},
            // The object is not gone before the content is.
            "finalizers": [FINALIZER],
        },
        "spec": {
            "accessModes": claim.access_modes,
            "capacity": {"storage": size(bytes)},
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": claim.namespace,
                "name": claim.name,
                "uid": claim.id.claim(),
            },
            "csi": {"driver": DRIVER, "volumeHandle": id},
            "mountOptions": class.mount_options,
            "nodeAffinity": affinity(node),
            "persistentVolumeReclaimPolicy": class.policy,
            "storageClassName": claim.class,
            "volumeMode": "Filesystem",
        },
    })
}

/// Where pods with a volume of `node` may run.
fn affinity(node: NodeId) -> Value {
    let here = json!({"key": NODE_LABEL, "operator": "In", "values": [node.to_string()]});
    json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}})
}

/// The name of the object that shows the room of `node` for volumes of a class; the policy
/// `polis-csi-capacities` holds a driver to it.
pub(super) fn capacity_name(node: NodeId, class: &str) -> String {
    format!("{node}.{class}")
}

/// The object that shows `bytes` of room; it goes with the Node of this UID.
pub(super) fn capacity(node: NodeId, uid: &str, class: &str, bytes: u64) -> Value {
    let mut object = room(bytes);
    object["apiVersion"] = json!("storage.k8s.io/v1");
    object["kind"] = json!("CSIStorageCapacity");
    object["metadata"] = json!({
        "name": capacity_name(node, class),
        "namespace": CAPACITIES,
        "ownerReferences": [
            {"apiVersion": "v1", "kind": "Node", "name": node.to_string(), "uid": uid},
        ],
    });
    object["nodeTopology"] = json!({"matchLabels": {NODE_LABEL: node.to_string()}});
    object["storageClassName"] = json!(class);
    object
}

/// Its fields that change: one volume may have all the room.
pub(super) fn room(bytes: u64) -> Value {
    json!({"capacity": size(bytes), "maximumVolumeSize": size(bytes)})
}

/// The room that an object shows; 0 for one that shows none.
pub(super) fn shown(object: &Value) -> u64 {
    object["capacity"].as_str().and_then(|text| quantity::bytes(text).ok()).unwrap_or(0)
}

/// A size as a quantity.
pub(super) fn size(bytes: u64) -> String {
    format!("{}Mi", bytes / UNIT)
}

/// An event about a claim; `at` is the time of now.
pub(super) fn event(claim: &Claim, refusal: &Refusal, node: NodeId, at: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": "csi-", "namespace": claim.namespace},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "namespace": claim.namespace,
            "name": claim.name,
            "uid": claim.id.claim(),
        },
        "type": "Warning",
        "reason": refusal.reason,
        "message": refusal.message,
        "source": {"component": DRIVER, "host": node.to_string()},
        "reportingComponent": DRIVER,
        "reportingInstance": node.to_string(),
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    })
}

/// A name that may be part of a path of the API: a DNS subdomain.
pub(super) fn is_name(text: &str) -> bool {
    let allowed = |c: u8| matches!(c, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.');
    let edge = |c: Option<&u8>| c.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    text.len() <= 253 && text.bytes().all(allowed) && edge(bytes.first()) && edge(bytes.last())
}

fn name(value: &Value) -> Option<String> {
    value.as_str().filter(|text| is_name(text)).map(str::to_owned)
}

fn text(value: &Value) -> Option<String> {
    value.as_str().filter(|text| !text.is_empty()).map(str::to_owned)
}

fn texts(value: &Value) -> Vec<String> {
    let list = value.as_array().into_iter().flatten();
    list.map(|one| one.as_str().unwrap_or_default().to_owned()).collect()
}

#[cfg(test)]
#[path = "claims_tests.rs"]
pub(super) mod tests;
