//! The instructions. The house exempts this folder from its limits on length and casts: what
//! stands here are one family's handlers in one file, and truncation is what they are about.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "an instruction of a width takes the low bits of a register"
)]

mod alu;
mod bits;
mod branch;
mod core;
mod dispatch;
mod far;
mod image;
mod interrupt;
pub(crate) mod kinds;
mod legacy;
mod mem;
mod muldiv;
mod op;
pub(crate) mod operand;
mod rows;
mod segment;
mod shift;
mod slow;
mod strings;
mod system;
mod table;
pub(crate) mod vector;
mod x87;

pub(crate) use self::core::{Core, Fault, Spot, Stepping, Trap};
pub(crate) use self::dispatch::{Pick, execute};
pub(crate) use self::interrupt::{Delivery, deliver};
pub(crate) use self::kinds::is_hint;
pub(crate) use self::op::{Op, PAIR};
pub(crate) use self::operand as form;
pub use self::rows::is_known;
pub(crate) use self::rows::{moved, row};
pub(crate) use self::table::{K, Sets, extend};
pub(crate) use self::x87::is_slow;
