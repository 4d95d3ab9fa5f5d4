//! What C sees of `libcpc.h`.

mod load;
mod report;
mod signals;
mod threads;

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::{null, null_mut};

use errno::{Errno, errno, set_errno};
use libc::{EINVAL, ENOMEM};
use umpire_perfmon::c_calls::{self, undisturbed};

use crate::event::Event;
use crate::failure::{Failure, Subcode, fail};
use crate::lwp::SIGNAL;
use crate::process;
use crate::processor::{self, Description};
use crate::spec::{self, OS, USR};

/// `CPC_VER_CURRENT`.
const VERSION: c_uint = 1;
/// `CPC_VER_NONE`.
const NONE: c_uint = 0;

/// What a call returns, and its failure where C looks for it.
fn done<T>(failed: T, work: impl FnOnce() -> Result<T, Failure>) -> T {
    let result = undisturbed(|| {
        c_calls::forget();
        work()
    });
    result.unwrap_or_else(|failure| {
        set_errno(Errno(failure.errno));
        failed
    })
}

/// As `done`, and a failure is reported.
fn reported<T>(function: &CStr, failed: T, work: impl FnOnce() -> Result<T, Failure>) -> T {
    let mut reason = None;
    let returned = done(failed, || {
        work().inspect_err(|failure| reason = Some(*failure))
    });
    if let Some(failure) = reason {
        report::report(function);
        set_errno(Errno(failure.errno));
    }
    returned
}

fn null_pointer(what: &str) -> Failure {
    fail(
        EINVAL,
        Subcode::InvalidEvent,
        format_args!("{what} is NULL"),
    )
}

/// The event that a pointer leads to.
///
/// # Safety
/// It is NULL, or leads to a `cpc_event_t`.
unsafe fn event(pointer: *const Event) -> Result<Event, Failure> {
    // SAFETY: by the caller's promise; `Event` has the layout of cpc_event_t, and every bit
    // pattern is one.
    let event = unsafe { pointer.as_ref() };
    event.copied().ok_or_else(|| null_pointer("the event"))
}

/// Puts an event where a pointer leads to.
///
/// # Safety
/// It is NULL, or leads to a `cpc_event_t` that may be written.
unsafe fn write(to: *mut Event, event: Event) -> Result<(), Failure> {
    if to.is_null() {
        return Err(null_pointer("the event"));
    }
    // SAFETY: by the caller's promise.
    unsafe { to.write(event) };
    Ok(())
}

#[unsafe(no_mangle)]
extern "C" fn cpc_version(version: c_uint) -> c_uint {
    match version {
        NONE | VERSION => VERSION,
        _ => NONE,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cpc_getcpuver() -> c_int {
    done(-1, process::cpuver)
}

/// A text about the processor of this number.
fn text(cpuver: c_int, pick: fn(&Description) -> &CStr) -> *const c_char {
    let found = undisturbed(|| process::about(cpuver, processor::description));
    found.map_or(null(), |description| pick(description).as_ptr())
}

#[unsafe(no_mangle)]
extern "C" fn cpc_getcciname(cpuver: c_int) -> *const c_char {
    text(cpuver, |it| &it.name)
}

#[unsafe(no_mangle)]
extern "C" fn cpc_getcpuref(cpuver: c_int) -> *const c_char {
    text(cpuver, |it| &it.reference)
}

#[unsafe(no_mangle)]
extern "C" fn cpc_getusage(cpuver: c_int) -> *const c_char {
    text(cpuver, |it| &it.usage)
}

#[unsafe(no_mangle)]
extern "C" fn cpc_getnpic(cpuver: c_int) -> c_uint {
    let pics = undisturbed(|| process::about(cpuver, processor::pics));
    c_uint::try_from(pics.unwrap_or(0)).unwrap_or(0)
}

/// `cpc_walk_names`'s function.
type Action = extern "C" fn(*mut c_void, c_int, *const c_char, u8);

#[unsafe(no_mangle)]
extern "C" fn cpc_walk_names(
    cpuver: c_int,
    regno: c_int,
    argument: *mut c_void,
    action: Option<Action>,
) {
    let names = |model: &_| match usize::try_from(regno) {
        Ok(pic) if pic < processor::pics(model) => spec::names(model).collect(),
        _ => Vec::new(),
    };
    let Some(action) = action else {
        return;
    };
    // The function may make calls.
    for (name, select) in undisturbed(|| process::about(cpuver, names)).unwrap_or_default() {
        if let Ok(name) = CString::new(name) {
            action(argument, regno, name.as_ptr(), select.to_le_bytes()[0]);
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn cpc_access() -> c_int {
    reported(c"access", -1, || process::access().map(|()| 0))
}

#[unsafe(no_mangle)]
extern "C" fn cpc_strtoevent(cpuver: c_int, text: *const c_char, to: *mut Event) -> c_int {
    reported(c"strtoevent", 1, || {
        if text.is_null() {
            return Err(null_pointer("the specification"));
        }
        // SAFETY: by the header it is a C string.
        let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
        let parsed = process::about(cpuver, |model| {
            spec::parse(cpuver, model, process::names().as_ref(), &text)
        });
        let event = parsed.unwrap_or_else(|| {
            let reason = format_args!("there is no processor {cpuver}; see cpc_getcpuver");
            Err(fail(EINVAL, Subcode::InvalidEvent, reason))
        })?;
        // SAFETY: by the header.
        unsafe { write(to, event) }.map(|()| 0)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cpc_eventtostr(of: *const Event) -> *mut c_char {
    done(null_mut(), || {
        // SAFETY: by the header.
        let event = unsafe { event(of) }?;
        let text = process::about(event.cpuver, |model| spec::write(&event, model)).flatten();
        let text = text.and_then(|text| CString::new(text).ok());
        let text = text.ok_or_else(|| {
            let reason = format_args!("the event is none that cpc_strtoevent made");
            fail(EINVAL, Subcode::InvalidEvent, reason)
        })?;
        // SAFETY: it is a C string. The caller frees the copy by free(3), as strdup(3) says.
        let copy = unsafe { libc::strdup(text.as_ptr()) };
        if copy.is_null() {
            return Err(fail(ENOMEM, Subcode::None, format_args!("out of memory")));
        }
        Ok(copy)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cpc_bind_event(of: *const Event, flags: c_int) -> c_int {
    let bound = done(-1, || {
        // SAFETY: by the header.
        let event = (!of.is_null()).then(|| unsafe { event(of) }).transpose()?;
        process::alone(signals::prepare);
        process::bind(event.as_ref(), flags).map(|()| 0)
    });
    if bound == 0 && flags & SIGNAL != 0 {
        signals::listen();
    }
    bound
}

#[unsafe(no_mangle)]
extern "C" fn cpc_take_sample(to: *mut Event) -> c_int {
    // SAFETY: by the header.
    done(-1, || unsafe { write(to, process::sample()?) }.map(|()| 0))
}

#[unsafe(no_mangle)]
extern "C" fn cpc_rele() -> c_int {
    done(-1, || process::release().map(|()| 0))
}

#[unsafe(no_mangle)]
extern "C" fn cpc_count_usr_events(enable: c_int) -> c_int {
    done(-1, || process::count_in(USR, enable != 0).map(|()| 0))
}

#[unsafe(no_mangle)]
extern "C" fn cpc_count_sys_events(enable: c_int) -> c_int {
    done(-1, || process::count_in(OS, enable != 0).map(|()| 0))
}

#[unsafe(no_mangle)]
extern "C" fn cpc_event_accum(sum: *mut Event, more: *const Event) {
    // SAFETY: by the header.
    done((), || unsafe {
        let mut total = event(sum)?;
        total.accumulate(&event(more)?);
        write(sum, total)
    });
}

#[unsafe(no_mangle)]
extern "C" fn cpc_event_diff(to: *mut Event, after: *const Event, before: *const Event) {
    // SAFETY: by the header.
    done((), || unsafe {
        write(to, event(after)?.since(&event(before)?))
    });
}

#[unsafe(no_mangle)]
extern "C" fn cpc_seterrfn(function: Option<report::ErrorFunction>) {
    report::set(function);
}

#[unsafe(no_mangle)]
extern "C" fn cpc_last_error() -> *const c_char {
    c_calls::line()
}

#[unsafe(no_mangle)]
extern "C" fn cpc_last_subcode() -> c_int {
    c_calls::subcode().number().into()
}

#[unsafe(no_mangle)]
extern "C" fn cpc_lwp_self() -> c_int {
    done(-1, || {
        Ok(c_int::try_from(process::lwp()?).unwrap_or(c_int::MAX))
    })
}

/// Programs print it beside the reason of a failure: it leaves both `errno` and the line.
#[unsafe(no_mangle)]
extern "C" fn _lwp_self() -> c_int {
    let before = errno();
    let lwp = c_calls::unheard(|| cpc_lwp_self());
    set_errno(before);
    lwp
}

#[unsafe(no_mangle)]
extern "C" fn cpc_lwp_switch(lwp: c_int) -> c_int {
    done(-1, || {
        process::switch_to(usize::try_from(lwp).unwrap_or(usize::MAX)).map(|()| 0)
    })
}
