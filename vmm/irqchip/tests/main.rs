//! The chips against the tables of their manuals, against simpler models, and against any
//! access. Sections are those of the SDM, volume 3A.

mod any_access;
mod board;
mod ioapic;
mod ipi;
mod lapic;
mod model;
mod pit;
mod timer;
