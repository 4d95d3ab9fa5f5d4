//! A value that one processor leaves for the others.

use core::cell::UnsafeCell;
use core::sync::atomic::{
    AtomicBool,
    Ordering::{Acquire, Release},
};

/// A place for a value that the boot processor leaves, once, before it wakes any
/// other, and that all of them read afterwards.
pub(crate) struct Shared<T> {
    is_set: AtomicBool,
    value: UnsafeCell<Option<T>>,
}

// SAFETY: `value` is written once, by the boot processor, before `is_set` is set;
// who has seen `is_set` only reads, which `T: Sync` allows on every processor.
unsafe impl<T: Send + Sync> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub(crate) const fn new() -> Self {
        Self {
            is_set: AtomicBool::new(false),
            value: UnsafeCell::new(None),
        }
    }

    /// Leaves a value for the others; the first one stays. For the boot processor.
    pub(crate) fn set(&self, value: T) {
        if !self.is_set.load(Acquire) {
            // SAFETY: nothing was left yet, so no other processor has been woken or
            // looks at it.
            unsafe { *self.value.get() = Some(value) };
            self.is_set.store(true, Release);
        }
    }

    /// The value, once it was left.
    pub(crate) fn get(&self) -> Option<&T> {
        if !self.is_set.load(Acquire) {
            return None;
        }
        // SAFETY: `is_set` is set, so the value was written and is not written again.
        unsafe { (*self.value.get()).as_ref() }
    }
}
