//! Says what the VM behind a control socket is.
//!
//! `cargo run -p umpire-perfmon --example machine -- SOCKET`, while
//! `umpire run --control SOCKET` runs.

use std::path::Path;

use umpire_perfmon::Client;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let socket = std::env::args().nth(1).ok_or("give the socket")?;
    let client = Client::connect(Path::new(&socket))?;
    println!("{:#?}", client.hello()?);
    println!("{:#?}", client.list()?);
    Ok(())
}
