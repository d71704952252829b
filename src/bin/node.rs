//! The node: every service of a machine under one supervision tree.

fn main() {}
