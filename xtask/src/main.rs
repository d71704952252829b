//! The one door to building, running, testing and measuring Polis.

fn main() {}
