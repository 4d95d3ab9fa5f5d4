//! Where failures are reported: stderr, or the program's function.

use std::ffi::{CStr, c_char, c_void};
use std::io::{Write, stderr};
use std::sync::{Mutex, MutexGuard, PoisonError};

use umpire_perfmon::c_calls::{self, undisturbed};

use crate::process::alone;

/// `va_list` of x86-64 (System V ABI, 3.5.7).
#[repr(C)]
pub(super) struct VaList {
    gp_offset: u32,
    fp_offset: u32,
    overflow_arg_area: *const c_void,
    reg_save_area: *const c_void,
}

/// Bytes of the register save area: none of it is left.
const NO_GENERAL: u32 = 48;
const NO_VECTOR: u32 = 304;

/// `cpc_errfn_t`.
pub(super) type ErrorFunction = extern "C" fn(*const c_char, *const c_char, *mut VaList);

static FUNCTION: Mutex<Option<ErrorFunction>> = Mutex::new(None);

fn lock() -> MutexGuard<'static, Option<ErrorFunction>> {
    FUNCTION.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reports go to `function` from now on, or to stderr again.
pub(super) fn set(function: Option<ErrorFunction>) {
    undisturbed(|| alone(|| *lock() = function));
}

/// Reports the calling thread's last failure.
pub(super) fn report(function: &CStr) {
    let to = undisturbed(|| alone(|| *lock()));
    let line = c_calls::line();
    match to {
        None => {
            // SAFETY: the line is a C string, which only this thread changes.
            let line = unsafe { CStr::from_ptr(line.cast()) }.to_string_lossy();
            let function = function.to_string_lossy();
            // Where nobody reads there is nothing to be done.
            undisturbed(|| {
                let _ = writeln!(stderr(), "libcpc: cpc_{function}(): {line}");
            });
        }
        Some(to) => {
            let arguments = [line];
            let mut list = VaList {
                gp_offset: NO_GENERAL,
                fp_offset: NO_VECTOR,
                // With no register left, arguments come from here, eight bytes each.
                overflow_arg_area: arguments.as_ptr().cast(),
                reg_save_area: std::ptr::null(),
            };
            to(function.as_ptr(), c"%s\n".as_ptr(), &raw mut list);
        }
    }
}
