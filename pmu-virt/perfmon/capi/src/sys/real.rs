//! The functions behind those that the library puts in front of them.

use std::ffi::{CStr, c_int, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use libc::{off_t, size_t, ssize_t};

/// A function of libc, or of another library that does the same as this one.
struct Next {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Next {
    const fn new(name: &'static CStr) -> Self {
        let address = AtomicPtr::new(std::ptr::null_mut());
        Next { name, address }
    }

    fn resolve(&self) -> *mut c_void {
        let known = self.address.load(Relaxed);
        if !known.is_null() {
            return known;
        }
        // SAFETY: the name is a C string.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.address.store(found, Relaxed);
        found
    }

    /// Its address; the program ends if there is none, for it could not go on.
    fn address(&self) -> *mut c_void {
        let found = self.resolve();
        if found.is_null() {
            // SAFETY: abort has no conditions.
            unsafe { libc::abort() };
        }
        found
    }
}

macro_rules! next {
    ($($table:ident $symbol:literal $name:ident ($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        $(
            static $table: Next = Next::new($symbol);

            /// The next function of this name.
            ///
            /// # Safety
            /// As the function's.
            pub(crate) unsafe fn $name($($argument: $type),*) -> $result {
                type Function = unsafe extern "C" fn($($type),*) -> $result;
                // SAFETY: this is the address of the function of that name, whose
                // type is this one.
                let function = unsafe { std::mem::transmute::<*mut c_void, Function>($table.address()) };
                // SAFETY: the caller's.
                unsafe { function($($argument),*) }
            }
        )*

        /// Looks all of them up, before a signal handler could be the first to.
        extern "C" fn resolve_all() {
            $($table.resolve();)*
            FCNTL.resolve();
            FCNTL64.resolve();
        }
    };
}

next! {
    READ c"read" read(fd: c_int, to: *mut c_void, size: size_t) -> ssize_t;
    READ_CHK c"__read_chk" read_chk(fd: c_int, to: *mut c_void, size: size_t, room: size_t) -> ssize_t;
    WRITE c"write" write(fd: c_int, from: *const c_void, size: size_t) -> ssize_t;
    LSEEK c"lseek" lseek(fd: c_int, offset: off_t, whence: c_int) -> off_t;
    MMAP c"mmap" mmap(address: *mut c_void, size: size_t, protection: c_int, flags: c_int, fd: c_int, offset: off_t) -> *mut c_void;
    CLOSE c"close" close(fd: c_int) -> c_int;
    DUP c"dup" dup(old: c_int) -> c_int;
    DUP2 c"dup2" dup2(old: c_int, new: c_int) -> c_int;
    DUP3 c"dup3" dup3(old: c_int, new: c_int, flags: c_int) -> c_int;
}

#[used]
#[unsafe(link_section = ".init_array")]
static RESOLVE_ALL: extern "C" fn() = resolve_all;

static FCNTL: Next = Next::new(c"fcntl");
static FCNTL64: Next = Next::new(c"fcntl64");

/// The next `fcntl`, or `fcntl64` where the program was compiled for it. What
/// the third argument is depends on the command; all of its kinds are a word.
///
/// # Safety
/// As the function's.
pub(crate) unsafe fn fcntl(large: bool, fd: c_int, command: c_int, argument: usize) -> c_int {
    type Function = unsafe extern "C" fn(c_int, c_int, ...) -> c_int;
    let next = if large { &FCNTL64 } else { &FCNTL };
    // SAFETY: this is the address of a function of this type.
    let function = unsafe { std::mem::transmute::<*mut c_void, Function>(next.address()) };
    // SAFETY: the caller's.
    unsafe { function(fd, command, argument) }
}

/// Removes the mapping of a sampling buffer.
pub(crate) fn unmap(range: Range<usize>) {
    let start = std::ptr::with_exposed_provenance_mut(range.start);
    // SAFETY: the kernel's list had the sampling buffer in this range. That close
    // takes the mapping away is the interface's rule (3.5.4), which callers have
    // to heed; Rust code has no reference into it.
    let _ = unsafe { rustix::mm::munmap(start, range.len()) };
}
