//! Claims and volumes are read and written as Kubernetes has them.

use super::*;

pub(crate) const UID: &str = "0f3a51c2-7b1d-4c55-9a0e-2f6d1b8e4a77";

pub(crate) fn node() -> NodeId {
    NodeId::from_public_key(&[7; 32])
}

/// A claim for which the scheduler chose this node.
pub(crate) fn claim_object(size: &str) -> Value {
    json!({
        "metadata": {
            "uid": UID, "namespace": "default", "name": "data", "resourceVersion": "1",
            "annotations": {SELECTED_NODE: node().to_string()},
        },
        "spec": {
            "storageClassName": "local",
            "accessModes": ["ReadWriteOnce"],
            "volumeMode": "Filesystem",
            "resources": {"requests": {"storage": size}},
        },
        "status": {"phase": "Pending"},
    })
}

pub(crate) fn class_object() -> Value {
    json!({
        "metadata": {"name": "local"},
        "provisioner": DRIVER,
        "reclaimPolicy": "Delete",
        "volumeBindingMode": "WaitForFirstConsumer",
    })
}

fn with(mut object: Value, path: &str, value: Value) -> Value {
    let (parent, field) = path.rsplit_once('/').unwrap();
    object.pointer_mut(parent).unwrap()[field] = value;
    object
}

fn claim(path: &str, value: Value) -> Claim {
    Claim::read(&with(claim_object("1Gi"), path, value)).unwrap()
}

#[test]
fn a_claim_asks_the_selected_node_and_no_other() {
    let here = Claim::read(&claim_object("1Gi")).unwrap();
    assert_eq!(here.action(node()), Action::Make);
    let other = NodeId::from_public_key(&[8; 32]);
    assert_eq!(here.action(other), Action::Nothing);
    let bound = claim("/spec/volumeName", json!(format!("pvc-{UID}")));
    assert_eq!(bound.action(node()), Action::Enlarge);
    assert_eq!(bound.action(other), Action::Nothing);
    assert_eq!(claim("/spec/volumeName", json!("by-hand")).action(node()), Action::Nothing);
    assert_eq!(claim("/metadata/deletionTimestamp", json!("now")).action(node()), Action::Nothing);
    assert_eq!(claim("/metadata/annotations", json!({})).action(node()), Action::Nothing);
}

#[test]
fn hostile_claims_are_none() {
    for (path, value) in [
        ("/metadata/uid", json!("../../etc")),
        ("/metadata/uid", json!(7)),
        ("/metadata/uid", json!("")),
        ("/metadata/name", json!("a/../../secrets")),
        ("/metadata/name", json!("")),
        ("/metadata/namespace", json!("a?b")),
        ("/metadata/namespace", json!(null)),
    ] {
        assert_eq!(Claim::read(&with(claim_object("1Gi"), path, value.clone())), None, "{value}");
    }
    assert_eq!(Claim::read(&json!(null)), None);
    assert_eq!(Claim::read(&json!([])), None);
    assert_eq!(claim("/spec/storageClassName", json!("../pods")).class(), None);
    assert_eq!(claim("/spec/storageClassName", json!("a%2f")).class(), None);
}

#[test]
fn what_the_driver_has_not_is_refused_with_what_it_has() {
    let class = Class::read(&class_object()).unwrap();
    let wanted = |path, value| claim(path, value).wanted(&class);
    let said = |path, value| wanted(path, value).unwrap_err().message;
    assert_eq!(wanted("/spec/a", json!(1)), Ok(Wanted { bytes: 1 << 30 }));
    let tiny = wanted("/spec/resources", json!({"requests": {"storage": "1"}}));
    assert_eq!(tiny, Ok(Wanted { bytes: UNIT }), "sizes are whole units");
    assert!(said("/spec/volumeMode", json!("Block")).contains("ask for volumeMode Filesystem"));
    assert!(said("/spec/dataSource", json!({"name": "a"})).contains("leave dataSource out"));
    assert!(said("/spec/selector", json!({})).contains("leave selector out"));
    assert!(said("/spec/accessModes", json!(["ReadWriteMany"])).contains("not ReadWriteMany"));
    let size = |size: &str| said("/spec/resources", json!({"requests": {"storage": size}}));
    assert_eq!(size("-1Gi"), "the size \"-1Gi\" cannot be used: a size is larger than 0");
    assert!(size("much").contains("not a quantity"));
    assert!(size("9Ei").contains("larger than any disk"));
    let here = Claim::read(&claim_object("1Gi")).unwrap();
    let other = with(class_object(), "/parameters", json!({"fsType": "ext4"}));
    let other = Class::read(&other).unwrap();
    assert!(here.wanted(&other).unwrap_err().message.contains("the parameter \"fsType\""));
    let other = with(class_object(), "/mountOptions", json!(["ro", "dev"]));
    let other = Class::read(&other).unwrap();
    assert!(here.wanted(&other).unwrap_err().message.contains("\"dev\" is not allowed"));
    let foreign = with(class_object(), "/provisioner", json!("other"));
    assert_eq!(Class::read(&foreign), None);
}

#[test]
fn a_volume_is_read_as_it_was_made_and_in_no_other_form() {
    let here = Claim::read(&claim_object("1Gi")).unwrap();
    let class = Class::read(&class_object()).unwrap();
    let mut object = volume(&here, &class, node(), 1 << 30);
    insta::assert_snapshot!(
        format!("{object:#}").replace(&node().to_string(), "NODE").replace(UID, "UID")
    );
    object["metadata"]["uid"] = json!("u");
    object["metadata"]["resourceVersion"] = json!("1");
    let read = Volume::read(&object, node()).unwrap();
    assert_eq!((read.bytes(), read.end()), (1 << 30, None));
    assert_eq!(read.claim.as_ref(), Some(&here.id));
    assert_eq!(read.finalizers_of_others(), Some(Vec::new()));
    assert_eq!(Volume::read(&object, NodeId::from_public_key(&[8; 32])), None);
    let twice = json!([{"matchExpressions": []}, {"matchExpressions": []}]);
    for (path, value) in [
        ("/metadata/name", json!("other")),
        ("/spec/csi/driver", json!("other")),
        ("/spec/csi/volumeHandle", json!("pvc-../..")),
        ("/spec/csi", json!(null)),
        ("/spec/nodeAffinity", json!(null)),
        ("/spec/nodeAffinity/required/nodeSelectorTerms", twice),
    ] {
        assert_eq!(Volume::read(&with(object.clone(), path, value), node()), None, "{path}");
    }
}

#[test]
fn the_room_of_a_node_is_shown_for_it_alone_and_goes_with_it() {
    let node = node().to_string();
    let object = capacity(self::node(), "u", "local", 640 << 20);
    assert_eq!(object["metadata"]["name"], format!("{node}.local"));
    assert_eq!(object["nodeTopology"], json!({"matchLabels": {NODE_LABEL: node}}));
    assert_eq!(object["storageClassName"], "local");
    let owner = json!({"apiVersion": "v1", "kind": "Node", "name": node, "uid": "u"});
    assert_eq!(object["metadata"]["ownerReferences"], json!([owner]));
    assert_eq!(object["capacity"], "640Mi");
    assert_eq!(object["maximumVolumeSize"], "640Mi", "one volume may have all of it");
    assert_eq!(shown(&object), 640 << 20);
    // As the API server writes it.
    for (text, bytes) in [(json!("10Gi"), 10_u64 << 30), (json!("0"), 0), (json!(null), 0)] {
        assert_eq!(shown(&json!({"capacity": text})), bytes, "{text}");
    }
}

#[test]
fn only_a_released_volume_with_the_policy_delete_is_removed() {
    let here = Claim::read(&claim_object("1Gi")).unwrap();
    let class = Class::read(&class_object()).unwrap();
    let mut object = volume(&here, &class, node(), 1 << 30);
    object["metadata"]["uid"] = json!("u");
    object["metadata"]["resourceVersion"] = json!("1");
    let mut end = |phase: &str, policy: &str, deleted: bool| {
        object["status"] = json!({"phase": phase});
        object["spec"]["persistentVolumeReclaimPolicy"] = json!(policy);
        object["metadata"]["deletionTimestamp"] = if deleted { json!("now") } else { json!(null) };
        Volume::read(&object, node()).unwrap().end()
    };
    for phase in ["Pending", "Available", "Bound", "Failed", "", "Released "] {
        assert_eq!(end(phase, "Delete", false), None, "{phase}");
        assert_eq!(end(phase, "Retain", false), None, "{phase}");
    }
    assert_eq!(end("Bound", "Delete", true), None, "its claim still has it");
    assert_eq!(end("Released", "Delete", false), Some(End::Remove));
    assert_eq!(end("Released", "Delete", true), Some(End::Remove));
    assert_eq!(end("Available", "Delete", true), Some(End::Remove));
    assert_eq!(end("Released", "Retain", false), None);
    assert_eq!(end("Released", "Retain", true), Some(End::Forget));
    assert_eq!(end("Released", "Recycle", true), Some(End::Forget));
}
