//! Guests and machines for the tests.

pub mod hostile;
pub mod kernel;
pub mod l1;
pub mod linux;
pub mod micro;
pub mod umpire;
