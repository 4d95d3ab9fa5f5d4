//! The event names of libpfm4.

use std::ffi::CString;
use std::fmt;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use super::error::LibraryError;
use super::sys::{self, OpenError, Pfm};
use super::table::{
    Attribute, AttributeKind, EncodeError, Encoding, NameTable, NamedEvent, NoTables, PmuTable,
    TableKind,
};
use crate::text::one_line;

/// One more than the highest number of a PMU that is asked for. libpfm 4.13
/// has some 520, refuses those that it lacks, and has no way to ask for the highest.
const PMU_NUMBERS: i32 = 2048;

/// `pfm_pmu_type_t`.
const TYPE_CORE: i32 = 1;
const TYPE_UNCORE: i32 = 2;
const TYPE_OS: i32 = 3;
/// `pfm_attr_t`.
const ATTR_UMASK: i32 = 1;
const ATTR_FLAG: i32 = 2;
const ATTR_NUMBER: i32 = 3;
/// Error codes.
const ERR_NOT_FOUND: i32 = -4;
const ERR_FEATURES: i32 = -5;
const ERR_UMASK: i32 = -6;
const ERR_ATTR: i32 = -8;
const ERR_ATTR_VALUE: i32 = -9;
const ERR_ATTR_SET: i32 = -10;

/// The tables of the libpfm4 that is installed; none, with the reason, where it
/// is not.
///
/// Call it before the process has threads: libpfm reads an environment variable
/// when it starts, which is set here and cannot be set later. Where the variable
/// (`LIBPFM_ENCODE_INACTIVE`) is set already, it does not matter when.
pub fn names() -> Box<dyn NameTable> {
    static LIBRARY: OnceLock<Result<Loaded, LibraryError>> = OnceLock::new();
    match LIBRARY.get_or_init(load) {
        Ok(library) => Box::new(Libpfm(library)),
        Err(error) => Box::new(NoTables(error.clone())),
    }
}

fn load() -> Result<Loaded, LibraryError> {
    if !sys::ask_for_every_pmu() {
        return Err(LibraryError::TooLate);
    }
    let pfm = Pfm::open().map_err(|error| match error {
        OpenError::Load(reason) => LibraryError::Missing(one_line(&reason)),
        OpenError::Version(version) => LibraryError::Version {
            major: version >> 16,
            minor: version & 0xffff,
        },
        OpenError::Start(reason) => LibraryError::Start(one_line(&reason)),
    })?;
    let pmus: Vec<sys::PmuInfo> = (0..PMU_NUMBERS)
        .filter_map(|number| pfm.pmu(number))
        .collect();
    let tables = pmus.iter().map(table).collect();
    let first_events = pmus.iter().map(|pmu| pmu.first_event).collect();
    Ok(Loaded {
        version: pfm.version,
        tables,
        first_events,
        pfm: Mutex::new(pfm),
    })
}

fn table(pmu: &sys::PmuInfo) -> PmuTable {
    PmuTable {
        name: pmu.name.clone(),
        description: one_line(&pmu.description),
        kind: match pmu.kind {
            TYPE_CORE => TableKind::Core,
            TYPE_UNCORE => TableKind::Uncore,
            TYPE_OS => TableKind::Software,
            _ => TableKind::Other,
        },
        events: usize::try_from(pmu.events).unwrap_or(0),
        host: pmu.present,
    }
}

/// The library and its PMUs.
struct Loaded {
    version: u32,
    tables: Vec<PmuTable>,
    /// The first event of each table.
    first_events: Vec<i32>,
    /// libpfm keeps state of its own and has no locks: one thread at a time.
    pfm: Mutex<Pfm>,
}

struct Libpfm(&'static Loaded);

impl Libpfm {
    fn lock(&self) -> MutexGuard<'static, Pfm> {
        // Nothing here leaves the library in the middle of anything.
        self.0.pfm.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Libpfm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Libpfm")
            .field("version", &self.0.version)
            .field("tables", &self.0.tables.len())
            .finish()
    }
}

impl NameTable for Libpfm {
    fn missing(&self) -> Option<&LibraryError> {
        None
    }

    fn tables(&self) -> &[PmuTable] {
        &self.0.tables
    }

    fn events(&self, table: &str) -> Vec<NamedEvent> {
        let number = self.0.tables.iter().position(|one| one.name == table);
        let first = number.and_then(|number| self.0.first_events.get(number).copied());
        let pfm = self.lock();
        // Where a table has no events, the index is negative.
        std::iter::successors(first.filter(|first| *first >= 0), |event| {
            pfm.next_event(*event)
        })
        .filter_map(|event| describe(&pfm, event))
        .collect()
    }

    fn encode(&self, full_name: &str) -> Result<Encoding, EncodeError> {
        // A name with a NUL is in no table.
        let name = CString::new(full_name).map_err(|_| EncodeError::Unknown)?;
        let pfm = self.lock();
        let (codes, full_name) = pfm.encode(&name).map_err(|error| match error {
            ERR_NOT_FOUND => EncodeError::Unknown,
            ERR_UMASK => EncodeError::UnitMask,
            ERR_FEATURES | ERR_ATTR | ERR_ATTR_VALUE | ERR_ATTR_SET => EncodeError::Attribute,
            other => EncodeError::Other(one_line(&pfm.describe(other))),
        })?;
        Ok(Encoding { codes, full_name })
    }
}

fn describe(pfm: &Pfm, index: i32) -> Option<NamedEvent> {
    let event = pfm.event(index)?;
    let attributes = (0..event.attributes)
        .filter_map(|attribute| pfm.attribute(index, attribute))
        .filter_map(|attribute| {
            Some(Attribute {
                kind: match attribute.kind {
                    ATTR_UMASK => AttributeKind::UnitMask,
                    ATTR_FLAG => AttributeKind::Flag,
                    ATTR_NUMBER => AttributeKind::Number,
                    _ => return None,
                },
                name: attribute.name,
                description: one_line(&attribute.description),
                default: attribute.default,
            })
        })
        .collect();
    Some(NamedEvent {
        name: event.name,
        description: one_line(&event.description),
        alias_of: Some(event.equivalent).filter(|name| !name.is_empty()),
        attributes,
    })
}
