//! The names by which Kubernetes knows the driver and its volumes, for the driver and for the
//! objects of the cluster that speak of it.

/// The name of the driver.
pub const DRIVER: &str = "local.csi.polis.internal";

/// The class of its volumes, which a claim gets that names none.
pub(crate) const CLASS: &str = "local";

/// The node that the scheduler chose for the first pod of a claim.
pub(crate) const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";

/// The label of each Node object that kubelet sets, with the name of the node.
pub(crate) const NODE_LABEL: &str = "kubernetes.io/hostname";

/// The namespace of the objects that show the room of nodes. Operators and pods of others write
/// nothing there.
pub(crate) const CAPACITIES: &str = "kube-system";

/// Keeps the object of a volume while its content is there.
pub(crate) const FINALIZER: &str = "local.csi.polis.internal/content";
