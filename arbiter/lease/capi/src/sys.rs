//! What C sees of `umpire_lease.h`.

mod memory;

use std::ffi::{c_char, c_int};
use std::os::fd::IntoRawFd;
use std::ptr::null_mut;
use std::time::Duration;

use errno::{Errno, set_errno};
use umpire_lease::{Counters, Event, EventRequest, Events, LeaseScope, Request, What};

use self::memory::{copy_in, copy_out, list, path, text, texts};
use crate::failure::{self, Failure};
use crate::handle::Handle;

const BEST_EFFORT: u32 = 1;
const PREEMPTIBLE: u32 = 2;
const FOR_OTHERS: u32 = 4;
/// Scopes by their numbers, from 1 on.
const SCOPES: [LeaseScope; 4] = [
    LeaseScope::Cpu,
    LeaseScope::Thread,
    LeaseScope::Cgroup,
    LeaseScope::Part,
];
/// There is no such time.
const NO_TIME: u64 = u64::MAX;
/// Events by their numbers, from 1 on.
const EVENTS: [What; 9] = [
    What::Waits,
    What::Holds,
    What::Leaving,
    What::Spared,
    What::Renewed,
    What::Claimed,
    What::Broken,
    What::Mended,
    What::Ended,
];

/// `struct umpire_lease_terms`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Terms {
    size: usize,
    programmable: u32,
    fixed: u32,
    events: *const *const c_char,
    event_count: usize,
    pmu: *const c_char,
    cpus: *const c_char,
    threads: *const u32,
    thread_count: usize,
    at_least: u32,
    flags: u32,
    priority: u32,
    reserved: u32,
    lasts_ms: u64,
    waits_ms: i64,
    tenant: *const c_char,
    label: *const c_char,
    cgroup: *const c_char,
    for_uid: u32,
    for_gid: u32,
    scope: u32,
    reserved2: u32,
}

/// `struct umpire_lease_state`.
#[repr(C)]
struct State {
    size: usize,
    id: u64,
    generation: u64,
    wants: u32,
    holds: u32,
    left_ms: u64,
    broken_ms: u64,
    blind_ms: u64,
    within: u64,
}

/// `struct umpire_lease_event`.
#[repr(C)]
struct EventOut {
    size: usize,
    what: i32,
    holds: u32,
    leaving_to: u32,
    reserved: u32,
    leaving_in_ms: u64,
    message: *const c_char,
}

const ON_CPU: u32 = 0x1;
const OWN_EVENT: u32 = 0x2;
const GUEST: u32 = 0x4;
const ALL_RINGS: u32 = 0x8;
const THREADS: u32 = 0x10;

/// `struct umpire_lease_perf`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Perf {
    size: usize,
    lease: u64,
    config: u64,
    period: u64,
    counter: u32,
    flags: u32,
    thread: u32,
    cpu: u32,
}

/// What a call returns, and its failure where C looks for it.
fn done<T>(failed: T, act: impl FnOnce() -> Result<T, Failure>) -> T {
    failure::forget();
    act().unwrap_or_else(|failure| {
        set_errno(Errno(failure.keep()));
        failed
    })
}

fn wrong(text: impl Into<String>) -> Failure {
    Failure::new(libc::EINVAL, text)
}

/// The lease behind a pointer of the caller.
fn lease<'a>(lease: *const Handle) -> Result<&'a Handle, Failure> {
    // SAFETY: by the header it is NULL or what `umpire_lease_acquire` returned and nobody
    // has freed, and no other thread uses it meanwhile.
    unsafe { lease.as_ref() }.ok_or_else(|| wrong("the lease is NULL"))
}

/// The same, to be changed.
fn lease_mut<'a>(lease: *mut Handle) -> Result<&'a mut Handle, Failure> {
    // SAFETY: as in `lease`; and no call returns a reference into it.
    unsafe { lease.as_mut() }.ok_or_else(|| wrong("the lease is NULL"))
}

fn timeout(ms: c_int) -> Option<Duration> {
    u64::try_from(ms).ok().map(Duration::from_millis)
}

/// For whom a lease is, by its number, or by what else was given.
fn scope_of(
    number: u32,
    has_group: bool,
    has_threads: bool,
) -> Result<Option<LeaseScope>, Failure> {
    match number.checked_sub(1) {
        None if has_group => Ok(Some(LeaseScope::Cgroup)),
        None => Ok(has_threads.then_some(LeaseScope::Thread)),
        Some(index) => match SCOPES.get(index as usize) {
            None => Err(wrong(format!("there is no scope {number}"))),
            known => Ok(known.cloned()),
        },
    }
}

/// What the terms ask for.
fn request(terms: *const Terms) -> Result<Request, Failure> {
    let terms: Terms = copy_in(terms)?;
    let unknown = terms.flags & !(BEST_EFFORT | PREEMPTIBLE | FOR_OTHERS);
    let reserved = terms.reserved | terms.reserved2;
    if unknown != 0 || reserved != 0 {
        return Err(wrong(format!(
            "flags {unknown:#x} and reserved {reserved} of the terms are not 0"
        )));
    }
    let pmu = text("pmu", terms.pmu)?;
    let of_pmu = |counters: Counters| Counters {
        pmu: pmu.clone(),
        ..counters
    };
    let mut counters = Vec::new();
    if terms.programmable > 0 {
        counters.push(of_pmu(Counters::programmable(terms.programmable)));
    }
    if terms.fixed > 0 {
        counters.push(of_pmu(Counters::fixed(terms.fixed)));
    }
    for event in texts("events", terms.events, terms.event_count)? {
        counters.push(of_pmu(Counters {
            event: Some(event),
            ..Counters::default()
        }));
    }
    let threads = list("threads", terms.threads, terms.thread_count)?;
    let cgroup = text("cgroup", terms.cgroup)?;
    let scope = scope_of(terms.scope, cgroup.is_some(), !threads.is_empty())?;
    let is_others = terms.for_uid != 0 || terms.for_gid != 0 || terms.flags & FOR_OTHERS != 0;
    let priority = u8::try_from(terms.priority);
    Ok(Request {
        counters,
        at_least: Some(terms.at_least).filter(|least| *least > 0),
        cpus: text("cpus", terms.cpus)?,
        scope,
        threads: Some(threads).filter(|threads| !threads.is_empty()),
        cgroup,
        for_uid: is_others.then_some(terms.for_uid),
        for_gid: is_others.then_some(terms.for_gid),
        guaranteed: Some(terms.flags & BEST_EFFORT == 0),
        priority: Some(priority.map_err(|_| wrong("the priority is not from 0 to 255"))?),
        preemptible: Some(terms.flags & PREEMPTIBLE != 0),
        lasts_ms: Some(terms.lasts_ms).filter(|ms| *ms > 0),
        waits_ms: Some(terms.waits_ms).filter(|ms| *ms != 0),
        tenant: text("tenant", terms.tenant)?,
        label: text("label", terms.label)?,
    })
}

#[unsafe(no_mangle)]
extern "C" fn umpire_lease_acquire(socket: *const c_char, terms: *const Terms) -> *mut Handle {
    done(null_mut(), || {
        let handle = Handle::acquire(path(socket), &request(terms)?)?;
        Ok(Box::into_raw(Box::new(handle)))
    })
}

#[unsafe(no_mangle)]
extern "C" fn umpire_lease_wait(of: *mut Handle, timeout_ms: c_int) -> c_int {
    done(-1, || {
        let holds = lease_mut(of)?.wait(timeout(timeout_ms))?;
        Ok(c_int::from(holds))
    })
}

#[unsafe(no_mangle)]
extern "C" fn umpire_lease_next(of: *mut Handle, timeout_ms: c_int, out: *mut EventOut) -> c_int {
    done(-1, || {
        let handle = lease_mut(of)?;
        let Some(event) = handle.next(timeout(timeout_ms))? else {
            return Ok(0);
        };
        if !out.is_null() {
            copy_out(out, event_out(handle, &event))?;
        }
        Ok(1)
    })
}

fn event_out(handle: &mut Handle, event: &Event) -> EventOut {
    let what = (1..).zip(EVENTS).find(|(_, what)| *what == event.what);
    let leaving = event.lease.leaving.as_ref();
    EventOut {
        size: 0,
        what: what.map_or(0, |(number, _)| number),
        holds: event.lease.holds,
        leaving_to: leaving.map_or(event.lease.holds, |leaving| leaving.to),
        reserved: 0,
        leaving_in_ms: leaving.map_or(NO_TIME, |leaving| leaving.in_ms),
        message: handle.keep_message(&event.message).as_ptr(),
    }
}

#[unsafe(no_mangle)]
extern "C" fn umpire_lease_fd(of: *const Handle) -> c_int {
    done(-1, || Ok(lease(of)?.fd()))
}

#[unsafe(no_mangle)]
extern "C" fn umpire_lease_get(of: *const Handle, out: *mut State) -> c_int {
    done(-1, || {
        let now = lease(of)?.lease();
        let state = State {
            size: 0,
            id: now.id,
            generation: now.generation,
            wants: now.wants,
            holds: now.holds,
            left_ms: now.left_ms.unwrap_or(NO_TIME),
            broken_ms: now.broken_ms.unwrap_or(NO_TIME),
            blind_ms: now.blind_ms,
            // Numbers of leases begin with 1.
            within: now.within.unwrap_or(0),
        };
        copy_out(out, state)?;
        Ok(0)
    })
}

#[unsafe(no_mangle)]
extern "C" fn umpire_lease_renew(of: *mut Handle) -> c_int {
    done(-1, || lease(of)?.renew().map(|()| 0))
}

#[unsafe(no_mangle)]
extern "C" fn umpire_lease_release(of: *mut Handle, keep: u32) -> c_int {
    done(-1, || lease(of)?.release(keep).map(|()| 0))
}

#[unsafe(no_mangle)]
extern "C" fn umpire_lease_claim(of: *mut Handle) -> c_int {
    done(-1, || lease_mut(of)?.claim().map(|()| 0))
}

#[unsafe(no_mangle)]
extern "C" fn umpire_lease_free(of: *mut Handle) {
    if !of.is_null() {
        // SAFETY: by the header it came from `umpire_lease_acquire`, which made it of a
        // box, and is used no more.
        drop(unsafe { Box::from_raw(of) });
    }
}

/// The event that is asked for.
fn event_request(perf: *const Perf) -> Result<EventRequest, Failure> {
    let perf: Perf = copy_in(perf)?;
    let has = |flag: u32| perf.flags & flag != 0;
    let unknown = perf.flags & !(ON_CPU | OWN_EVENT | GUEST | ALL_RINGS | THREADS);
    if unknown != 0 {
        return Err(wrong(format!("flags {unknown:#x} of the event are not 0")));
    }
    let rings = match (has(GUEST), has(ALL_RINGS)) {
        (true, true) => return Err(wrong("UMPIRE_PERF_GUEST and UMPIRE_PERF_ALL: give one")),
        (true, false) => Some("guest"),
        (false, true) => Some("all"),
        (false, false) => None,
    };
    Ok(EventRequest {
        lease: perf.lease,
        generation: None,
        counter: perf.counter,
        thread: Some(perf.thread).filter(|thread| *thread != 0),
        cpu: has(ON_CPU).then_some(perf.cpu),
        config: (!has(OWN_EVENT)).then_some(perf.config),
        rings: rings.map(str::to_owned),
        period: Some(perf.period).filter(|period| *period != 0),
        follows: has(THREADS).then(|| "threads".to_owned()),
    })
}

#[unsafe(no_mangle)]
extern "C" fn umpire_lease_open(socket: *const c_char, perf: *const Perf) -> c_int {
    done(-1, || {
        let request = event_request(perf)?;
        let socket = path(socket).unwrap_or_else(umpire_lease::default_socket);
        let event = Events::connect(&socket)?.open(&request)?;
        Ok(event.into_raw_fd())
    })
}

#[unsafe(no_mangle)]
extern "C" fn umpire_lease_error() -> *const c_char {
    failure::text()
}

#[unsafe(no_mangle)]
extern "C" fn umpire_lease_reason() -> *const c_char {
    failure::reason()
}
