//! The guest-side arbiters against the real reservations, one unit for each CPU.
#![cfg(feature = "alloc")]

mod claims;
mod discovery;
mod faults;
mod leases;
mod locks;
mod machine;
mod model;
mod private;
