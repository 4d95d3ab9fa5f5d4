//! What C sees: the calls of `perfmon.h`.

mod descriptors;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;

use errno::set_errno;
use perfmon_abi::consts as pfm;
use perfmon_abi::wire::Errno;
use umpire_perfmon::c_calls;

use crate::failure::{Failure, failure};
use crate::sys::memory::User;
use crate::{calls, encode, sum};

/// What a call returns; -1 with `errno` if it fails.
fn call(work: impl FnOnce() -> Result<c_int, Failure>) -> c_int {
    c_calls::forget();
    work().unwrap_or_else(|failure| {
        set_errno(errno::Errno(failure.number));
        -1
    })
}

fn done(fd: c_int, command: c_int, argument: *mut c_void, nargs: c_int) -> c_int {
    call(|| calls::command(fd, command, User::new(argument), nargs).map(|()| 0))
}

/// 3.1. `argument` points to `nargs` structures of the command; an address that
/// is not the program's gives EFAULT.
#[unsafe(no_mangle)]
extern "C" fn perfmonctl(fd: c_int, command: c_int, argument: *mut c_void, nargs: c_int) -> c_int {
    done(fd, command, argument, nargs)
}

/// Why this thread's last call failed, as a C string.
#[unsafe(no_mangle)]
extern "C" fn pfm_strerror_last() -> *const c_char {
    c_calls::line()
}

/// What exactly was wrong with this thread's last call: `PFM_SUBCODE_*`.
#[unsafe(no_mangle)]
extern "C" fn pfm_subcode_last() -> c_int {
    c_calls::subcode().number().into()
}

/// Fills `n` elements at `pmcs` with what counts `event`; how many there are for it.
///
/// # Safety
/// `event` is NULL or a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pfm_event_encode(event: *const c_char, pmcs: *mut c_void, n: c_int) -> c_int {
    call(|| {
        if event.is_null() {
            return Err(failure(Errno::EFAULT, "there is no name of an event"));
        }
        // SAFETY: it is not NULL, so the caller's promise makes it a C string, which stays
        // while the call lasts.
        let event = unsafe { CStr::from_ptr(event) }.to_string_lossy();
        encode::encode(&event, User::new(pmcs), n)
    })
}

/// Reads `n` PMDs of each of `contexts` contexts, and leaves their sums.
#[unsafe(no_mangle)]
extern "C" fn pfm_read_pmds_sum(
    fds: *mut c_void,
    contexts: c_int,
    pmds: *mut c_void,
    n: c_int,
) -> c_int {
    call(|| sum::read(User::new(fds), contexts, User::new(pmds), n).map(|()| 0))
}

/// Calls of 6.1 for a context: with a vector, with one structure, with none.
macro_rules! calls {
    ($(vector $vector:ident $vector_command:ident;)* $(plain $plain:ident $plain_command:ident;)*
     $(free $free:ident $free_command:ident;)*) => {
        $(
            #[doc = concat!("6.1, as `", stringify!($vector_command), "`.")]
            #[unsafe(no_mangle)]
            extern "C" fn $vector(fd: c_int, vector: *mut c_void, n: c_int) -> c_int {
                done(fd, pfm::$vector_command.into(), vector, n)
            }
        )*
        $(
            #[doc = concat!("6.1, as `", stringify!($plain_command), "`.")]
            #[unsafe(no_mangle)]
            extern "C" fn $plain(fd: c_int) -> c_int {
                done(fd, pfm::$plain_command.into(), null_mut(), 0)
            }
        )*
        $(
            #[doc = concat!("6.1, as `", stringify!($free_command), "`.")]
            #[unsafe(no_mangle)]
            extern "C" fn $free(vector: *mut c_void, n: c_int) -> c_int {
                done(-1, pfm::$free_command.into(), vector, n)
            }
        )*
    };
}

calls! {
    vector pfm_write_pmcs PFM_WRITE_PMCS;
    vector pfm_write_pmds PFM_WRITE_PMDS;
    vector pfm_read_pmds PFM_READ_PMDS;
    vector pfm_create_evtsets PFM_CREATE_EVTSETS;
    vector pfm_delete_evtsets PFM_DELETE_EVTSETS;
    vector pfm_getinfo_evtsets PFM_GETINFO_EVTSETS;
    plain pfm_stop PFM_STOP;
    plain pfm_unload_context PFM_UNLOAD_CONTEXT;
    plain pfm_restart PFM_RESTART;
    free pfm_create_context PFM_CREATE_CONTEXT;
    free pfm_getinfo_pmcs PFM_GETINFO_PMCS;
    free pfm_getinfo_pmds PFM_GETINFO_PMDS;
    free pfm_getinfo_fmts PFM_GETINFO_FMTS;
}

/// 6.1.4. `start` may be NULL.
#[unsafe(no_mangle)]
extern "C" fn pfm_start(fd: c_int, start: *mut c_void) -> c_int {
    done(
        fd,
        pfm::PFM_START.into(),
        start,
        c_int::from(!start.is_null()),
    )
}

/// 6.1.5
#[unsafe(no_mangle)]
extern "C" fn pfm_load_context(fd: c_int, load: *mut c_void) -> c_int {
    done(fd, pfm::PFM_LOAD_CONTEXT.into(), load, 1)
}

/// 6.1.8
#[unsafe(no_mangle)]
extern "C" fn pfm_get_config(config: *mut c_void) -> c_int {
    done(-1, pfm::PFM_GET_CONFIG.into(), config, 1)
}

/// 6.1.8
#[unsafe(no_mangle)]
extern "C" fn pfm_set_config(config: *mut c_void) -> c_int {
    done(-1, pfm::PFM_SET_CONFIG.into(), config, 1)
}
