//! Keeps the cluster's own records in etcd.

pub mod store;

pub use self::store::{Founding, Store};
