//! The `umpire` program.
fn main() {}
