//! Events by name: generic names, raw codes, and the tables of libpfm4.
//!
//! [`resolve()`] turns a name into a `pmu_model::CountRequest` for one PMU model.
//! The tables come through [`NameTable`]; [`names`] is libpfm4's, loaded at run
//! time, and [`NoTables`] what there is without it. [`list()`] finds events by a
//! pattern, [`identify()`] says what one name or code stands for, and [`decode()`] which names
//! a code has. Which backends can count an event the caller says, by a [`Backends`].
//! `docs/guide/events.md` says how names are written.

#![deny(unsafe_code)]

mod code;
mod counting;
mod entry;
mod error;
mod explain;
mod families;
mod generic;
mod identify;
mod letters;
mod libpfm;
mod list;
mod modifiers;
mod perf_form;
mod perf_names;
mod print;
mod resolve;
mod search;
mod suggest;
#[allow(unsafe_code)]
mod sys;
mod table;
mod text;
mod traced;
mod uncounted;

#[cfg(test)]
mod tests;

pub use code::printed as code_of;
pub use counting::{BackendUse, Backends, Use};
pub use entry::{
    CodeEntry, Entry, EventEntry, EventName, GenericEntry, Meaning, ModelsUse, QuantityEntry,
    TableEntry, UnitMask,
};
pub use error::{EventError, LibraryError};
pub use families::{family_of, models_of};
pub use generic::all_names as generic_names;
pub use identify::{decode, identify, is_code};
pub use letters::with_letters;
pub use libpfm::names;
pub use list::{Question, list, nothing_found};
pub use perf_form::{EventSampling, Extras, bare_name, extras, wants_one_ring};
pub use print::write_list;
pub use resolve::{NamedRequest, models_for, resolve};
pub use search::Pattern;
pub use suggest::{Likeness, likeness, nearest};
pub use table::{
    Attribute, AttributeKind, EncodeError, Encoding, NameTable, NamedEvent, NoTables, PmuTable,
    TableKind,
};
pub use text::{grouped, one_line};
pub use uncounted::Measured;
