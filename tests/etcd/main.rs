//! Stories told against a real etcd, without a virtual machine.
//!
//! Each starts the services of `polis` as a node does, in one process, with
//! directories of its own and loopback addresses of its own, so that all of
//! them may run side by side. `cargo xtask test` provides etcd.
#![cfg(test)]

mod access;
mod bootstrap;
mod certificates;
mod clients;
mod cluster;
mod ctl;
mod curator;
mod curators;
mod damage;
mod enlisting;
mod full;
mod harness;
mod independent;
mod operating;
mod registering;
mod tls;
