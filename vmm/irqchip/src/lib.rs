//! The interrupt controllers of a PC and its PIT, as state machines in virtual time: a local
//! APIC for each CPU, an I/O APIC, the masks of the 8259s, an 8254 with port 61h.
//!
//! [`Chips`] owns them all and carries messages among them. Whoever runs the guest brings
//! registers' accesses and the time, in ticks of the TSC since the machine started; asks when
//! something will happen next ([`Chips::next_deadline`]); and takes at an instruction's
//! boundary what a CPU is to be given ([`Chips::pending`], [`Chips::acknowledge`]). Nothing
//! else goes in: what comes out depends on no host.
//!
//! What manuals leave to a model is as KVM's controllers have it, where they can be compared:
//! the same kernel runs on either.
#![forbid(unsafe_code)]

mod bits;
mod chips;
mod ioapic;
mod lapic;
mod message;
mod pic;
mod pit;
mod registers;
mod time;
mod timer;

pub use chips::{Answer, BadMachine, Chips, Machine};
pub use ioapic::{IoApicVersion, Line};
pub use lapic::{Activity, Delivery, Lint};
