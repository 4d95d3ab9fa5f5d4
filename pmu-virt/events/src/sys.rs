//! libpfm4, loaded at run time.
//!
//! The declarations follow `perfmon/pfmlib.h` of libpfm 4; structures are
//! passed with their size, and the library refuses a size that it does not know.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr;

use libloading::Library;

/// The name under which distributions install the library.
const LIBRARY: &str = "libpfm.so.4";
/// Makes libpfm encode events of processors that it does not run on. It looks
/// for the variable in `pfm_initialize`; its value does not matter.
pub(super) const EVERY_PMU: &str = "LIBPFM_ENCODE_INACTIVE";

/// Bits of `dfl_plm`: CPL 0, and CPL 1 to 3.
const PLM0: c_int = 1;
const PLM3: c_int = 8;
/// `PFM_OS_NONE`: encode for the PMU itself.
const OS_NONE: c_int = 0;
/// More registers than any event needs.
const MOST_CODES: u8 = 8;

/// `pfm_pmu_info_t`.
#[repr(C)]
struct RawPmu {
    name: *const c_char,
    description: *const c_char,
    size: usize,
    pmu: c_int,
    kind: c_int,
    events: c_int,
    first_event: c_int,
    max_encoding: c_int,
    counters: c_int,
    fixed_counters: c_int,
    flags: c_uint,
}

/// `pfm_event_info_t`.
#[repr(C)]
struct RawEvent {
    name: *const c_char,
    description: *const c_char,
    equivalent: *const c_char,
    size: usize,
    code: u64,
    pmu: c_int,
    data_type: c_int,
    index: c_int,
    attributes: c_int,
    reserved: c_int,
    flags: c_uint,
}

/// `pfm_event_attr_info_t`.
#[repr(C)]
struct RawAttribute {
    name: *const c_char,
    description: *const c_char,
    equivalent: *const c_char,
    size: usize,
    code: u64,
    kind: c_int,
    index: c_int,
    control: c_int,
    flags: c_uint,
    default: u64,
}

/// `pfm_pmu_encode_arg_t`.
#[repr(C)]
struct RawEncoding {
    codes: *mut u64,
    full_name: *mut *mut c_char,
    size: usize,
    count: c_int,
    index: c_int,
}

// The sizes that version 4.0 published (PFM_PMU_INFO_ABI0 and its like).
const _: () = assert!(size_of::<RawPmu>() == 56);
const _: () = assert!(size_of::<RawEvent>() == 64);
const _: () = assert!(size_of::<RawAttribute>() == 64);
const _: () = assert!(size_of::<RawEncoding>() == 32);

/// A PMU as libpfm describes it.
pub(super) struct PmuInfo {
    pub(super) name: String,
    pub(super) description: String,
    /// `pfm_pmu_type_t`.
    pub(super) kind: c_int,
    pub(super) events: c_int,
    pub(super) first_event: c_int,
    pub(super) present: bool,
}

/// An event as libpfm describes it.
pub(super) struct EventInfo {
    pub(super) name: String,
    pub(super) description: String,
    pub(super) equivalent: String,
    pub(super) attributes: c_int,
}

/// An attribute as libpfm describes it.
pub(super) struct AttributeInfo {
    pub(super) name: String,
    pub(super) description: String,
    /// `pfm_attr_t`.
    pub(super) kind: c_int,
    pub(super) default: bool,
}

/// Entry points of the library. It is never unloaded, so they stay valid.
pub(super) struct Pfm {
    strerror: unsafe extern "C" fn(c_int) -> *const c_char,
    pmu_info: unsafe extern "C" fn(c_int, *mut RawPmu) -> c_int,
    event_next: unsafe extern "C" fn(c_int) -> c_int,
    event_info: unsafe extern "C" fn(c_int, c_int, *mut RawEvent) -> c_int,
    attribute_info: unsafe extern "C" fn(c_int, c_int, c_int, *mut RawAttribute) -> c_int,
    encode: unsafe extern "C" fn(*const c_char, c_int, c_int, *mut c_void) -> c_int,
    /// Major version in bits 31:16, minor in 15:0.
    pub(super) version: u32,
}

/// Why the library cannot be used.
pub(super) enum OpenError {
    /// It cannot be loaded.
    Load(String),
    /// It is another version.
    Version(u32),
    /// It refuses to start.
    Start(String),
}

/// Sets [`EVERY_PMU`] unless it is set; false if that cannot be done safely any
/// more, since the process has other threads.
pub(super) fn ask_for_every_pmu() -> bool {
    if std::env::var_os(EVERY_PMU).is_some() {
        return true;
    }
    if !is_single_threaded() {
        return false;
    }
    // SAFETY: the environment may be changed while no other thread can read it
    // or change it. This process has no other thread: /proc/self/task had one
    // entry, and only the running thread could have added a further one since.
    unsafe { std::env::set_var(EVERY_PMU, "1") };
    true
}

fn is_single_threaded() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1)
}

impl Pfm {
    /// Loads and starts the library. To be called once per process.
    pub(super) fn open() -> Result<Self, OpenError> {
        // SAFETY: loading runs the initialisers of the library that the system
        // installs under this name, as it would for a program linked to it;
        // libpfm's touch nothing of this program.
        let library = unsafe { Library::new(LIBRARY) };
        let library = library.map_err(|error| OpenError::Load(reason(&error)))?;
        // Leaked on purpose: the entry points below live as long as the process.
        let library: &'static Library = Box::leak(Box::new(library));
        macro_rules! entry {
            ($name:literal) => {{
                // SAFETY: the symbol is a function of libpfm 4 and has the type
                // that the header declares, which the field or variable repeats.
                let symbol = unsafe { library.get($name) };
                *symbol.map_err(|error| OpenError::Load(reason(&error)))?
            }};
        }
        let get_version: unsafe extern "C" fn() -> c_int = entry!(b"pfm_get_version\0");
        let initialize: unsafe extern "C" fn() -> c_int = entry!(b"pfm_initialize\0");
        // SAFETY: takes nothing and returns a constant, before initialisation too.
        let version = unsafe { get_version() };
        let version = u32::try_from(version).unwrap_or(0);
        if version >> 16 != 4 {
            return Err(OpenError::Version(version));
        }
        let pfm = Self {
            strerror: entry!(b"pfm_strerror\0"),
            pmu_info: entry!(b"pfm_get_pmu_info\0"),
            event_next: entry!(b"pfm_get_event_next\0"),
            event_info: entry!(b"pfm_get_event_info\0"),
            attribute_info: entry!(b"pfm_get_event_attr_info\0"),
            encode: entry!(b"pfm_get_os_event_encoding\0"),
            version,
        };
        // SAFETY: takes nothing, and is called once. It reads the environment,
        // which this crate changes only while there is one thread
        // (`ask_for_every_pmu`).
        match unsafe { initialize() } {
            0 => Ok(pfm),
            error => Err(OpenError::Start(pfm.describe(error))),
        }
    }

    /// The text of one of libpfm's (negative) error codes.
    pub(super) fn describe(&self, error: c_int) -> String {
        // SAFETY: returns a constant string for every number.
        unsafe { text((self.strerror)(error)) }
    }

    /// The PMU with number `pmu` of `pfm_pmu_t`, if the library knows it.
    pub(super) fn pmu(&self, pmu: c_int) -> Option<PmuInfo> {
        // SAFETY: all fields are integers and pointers, for which zero is valid.
        let mut raw: RawPmu = unsafe { std::mem::zeroed() };
        raw.size = size_of::<RawPmu>();
        // SAFETY: `raw` is writable and of the size that it carries; a number
        // out of range is refused.
        let error = unsafe { (self.pmu_info)(pmu, &mut raw) };
        if error != 0 {
            return None;
        }
        // SAFETY: on success both are null or constant strings of the library.
        let (name, description) = unsafe { (text(raw.name), text(raw.description)) };
        Some(PmuInfo {
            name,
            description,
            kind: raw.kind,
            events: raw.events,
            first_event: raw.first_event,
            // The other bits are left as they were on the library's stack.
            present: raw.flags & 1 != 0,
        })
    }

    /// The event after the one with index `event`.
    pub(super) fn next_event(&self, event: c_int) -> Option<c_int> {
        // SAFETY: takes any number; an index of no event gives -1.
        let next = unsafe { (self.event_next)(event) };
        (next >= 0).then_some(next)
    }

    /// The event with index `event`.
    pub(super) fn event(&self, event: c_int) -> Option<EventInfo> {
        // SAFETY: all fields are integers and pointers, for which zero is valid.
        let mut raw: RawEvent = unsafe { std::mem::zeroed() };
        raw.size = size_of::<RawEvent>();
        // SAFETY: `raw` is writable and of the size that it carries; an index
        // of no event is refused.
        let error = unsafe { (self.event_info)(event, OS_NONE, &mut raw) };
        if error != 0 {
            return None;
        }
        // SAFETY: on success each is null or a constant string of the library.
        let (name, description, equivalent) =
            unsafe { (text(raw.name), text(raw.description), text(raw.equivalent)) };
        Some(EventInfo {
            name,
            description,
            equivalent,
            attributes: raw.attributes,
        })
    }

    /// Attribute number `attribute` of the event with index `event`.
    pub(super) fn attribute(&self, event: c_int, attribute: c_int) -> Option<AttributeInfo> {
        // SAFETY: all fields are integers and pointers, for which zero is valid.
        let mut raw: RawAttribute = unsafe { std::mem::zeroed() };
        raw.size = size_of::<RawAttribute>();
        // SAFETY: `raw` is writable and of the size that it carries; indices
        // out of range are refused.
        let error = unsafe { (self.attribute_info)(event, attribute, OS_NONE, &mut raw) };
        if error != 0 {
            return None;
        }
        // SAFETY: on success both are null or constant strings of the library.
        let (name, description) = unsafe { (text(raw.name), text(raw.description)) };
        Some(AttributeInfo {
            name,
            description,
            kind: raw.kind,
            default: raw.flags & 1 != 0,
        })
    }

    /// The codes of a full name and the name written out, for both rings where
    /// it names none. The error is libpfm's.
    pub(super) fn encode(&self, name: &CString) -> Result<(Vec<u64>, String), c_int> {
        let mut codes = [0u64; MOST_CODES as usize];
        let mut full_name: *mut c_char = ptr::null_mut();
        let mut raw = RawEncoding {
            codes: codes.as_mut_ptr(),
            full_name: &mut full_name,
            size: size_of::<RawEncoding>(),
            count: c_int::from(MOST_CODES),
            index: 0,
        };
        // SAFETY: `name` ends with NUL; `raw` is what OS_NONE expects and points
        // to `count` codes and to one string pointer, all alive during the call.
        let error =
            unsafe { (self.encode)(name.as_ptr(), PLM0 | PLM3, OS_NONE, (&raw mut raw).cast()) };
        // SAFETY: null, or a string that the library made for us with malloc.
        let written_out = unsafe { text(full_name) };
        // SAFETY: null, or memory of malloc that is ours and used no more.
        unsafe { libc::free(full_name.cast()) };
        if error != 0 {
            return Err(error);
        }
        let count = usize::try_from(raw.count).unwrap_or(0).min(codes.len());
        Ok((codes[..count].to_vec(), written_out))
    }
}

/// What the loader said; the error itself only names the call.
fn reason(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => source.to_string(),
        None => error.to_string(),
    }
}

/// A copy of a C string; empty for null.
///
/// # Safety
/// `string` is null or points to a string that ends with NUL and that nobody
/// changes meanwhile.
unsafe fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: not null, and the caller vouches for the rest.
    let string = unsafe { CStr::from_ptr(string) };
    string.to_string_lossy().into_owned()
}
