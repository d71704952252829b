//! What the compiler does not check: which file names items of which, in every crate, and
//! how event values are borrowed.
//!
//! [`sources`] reads the modules of a crate with `syn`, [`references`] finds the file
//! that defines each item that another file names, through re-exports, and three tests
//! read the result:
//!
//! - `circles`: no circle of files that name each other, except between a module and the
//!   modules inside it, which are one concept.
//! - `modules`: the tables of the modules of `src/machine`, `src/control` and `src/node`.
//! - `crates`: the arrows of the picture of the crates in `docs/architecture.md`.
//!
//! `borrows` reads the statements: none borrows an event value twice.
//!
//! Tests may name any file: code that is compiled for tests only is left out.

#[cfg(test)]
mod borrows;
#[cfg(test)]
mod circles;
#[cfg(test)]
mod crates;
#[cfg(test)]
mod modules;
#[cfg(test)]
mod references;
#[cfg(test)]
mod sources;
