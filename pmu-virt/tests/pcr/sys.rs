//! An allocator that counts what each thread holds.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static HELD: Cell<i64> = const { Cell::new(0) };
    static MADE: Cell<u64> = const { Cell::new(0) };
}

/// How often this thread has allocated.
pub(crate) fn made() -> u64 {
    MADE.get()
}

/// Bytes that this thread has allocated and not given back. A block that
/// another thread frees is taken off that thread's.
pub(crate) fn held() -> i64 {
    HELD.get()
}

fn note(size: usize, sign: i64) {
    let size = i64::try_from(size).unwrap_or(i64::MAX);
    // A thread that is ending has none any more; nobody asks for its count.
    let _ = HELD.try_with(|held| held.set(held.get().wrapping_add(sign * size)));
}

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: every call is passed on to the system's allocator as it is, and the
// counters beside it allocate nothing: constant-initialised `Cell`s that need no
// destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size(), 1);
        let _ = MADE.try_with(|made| made.set(made.get() + 1));
        // SAFETY: the caller's promises are those that `System` wants.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        note(layout.size(), -1);
        // SAFETY: `block` came from `alloc` above, which is `System`'s, with
        // this layout, as the caller promises.
        unsafe { System.dealloc(block, layout) }
    }
}
