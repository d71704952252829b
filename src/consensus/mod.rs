//! Runs this node's etcd member, and hands out clients to it.

pub mod client;
mod status;

pub use self::status::{Alarm, Member, MemberId, Standing, Status};
