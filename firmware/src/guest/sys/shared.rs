//! The work that the boot processor leaves for the others.

use core::cell::UnsafeCell;
use core::sync::atomic::{
    AtomicBool,
    Ordering::{Acquire, Release},
};

use crate::others::Work;

struct Place {
    there: AtomicBool,
    work: UnsafeCell<Option<Work>>,
}

// SAFETY: `work` is written once, by the boot processor, before `there` is set;
// who has seen `there` only reads.
unsafe impl Sync for Place {}

static PLACE: Place = Place {
    there: AtomicBool::new(false),
    work: UnsafeCell::new(None),
};

/// Leaves the work for the others; the first one stays.
pub(crate) fn share(work: Work) {
    if !PLACE.there.load(Acquire) {
        // SAFETY: nothing is there yet, so no other processor has been woken or
        // looks at it.
        unsafe { *PLACE.work.get() = Some(work) };
        PLACE.there.store(true, Release);
    }
}

/// What was left.
pub(crate) fn shared() -> Option<&'static Work> {
    if !PLACE.there.load(Acquire) {
        return None;
    }
    // SAFETY: `there` is set, so the work was written and is not written again.
    unsafe { (*PLACE.work.get()).as_ref() }
}
