//! The page that the kernel shares for an event: its count without a system
//! call (`struct perf_event_mmap_page` in `linux/perf_event.h`).

use std::arch::asm;
use std::ptr::{self, NonNull};
use std::sync::atomic::{Ordering, compiler_fence};

use perf_event_open_sys::bindings::perf_event_mmap_page;

/// Size of the mapping: the page without a data buffer.
const LENGTH: usize = 4096;

/// Attempts at a consistent picture; the kernel writes the page at scheduling
/// and at overflows, on this very CPU, so the second one succeeds.
const TRIES: usize = 4;

/// An event's mapped page.
#[derive(Debug)]
pub(super) struct PerfPage {
    base: NonNull<perf_event_mmap_page>,
}

// SAFETY: the mapping belongs to the process, not to a thread.
unsafe impl Send for PerfPage {}

/// What a reading of the page has come to.
enum Attempt {
    /// The kernel wrote meanwhile.
    Torn,
    /// RDPMC is not to be used.
    NotReadable,
    Counted(u64),
}

impl PerfPage {
    /// Maps the page of the event `fd`, or tells the `errno`.
    pub(super) fn map(fd: i32) -> Result<Self, i32> {
        // SAFETY: a new shared mapping at an address of the kernel's choice
        // touches no memory that anything else uses.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                LENGTH,
                libc::PROT_READ,
                libc::MAP_SHARED,
                fd,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            let error = std::io::Error::last_os_error();
            return Err(error.raw_os_error().unwrap_or(libc::EIO));
        }
        let base = NonNull::new(base.cast()).ok_or(libc::ENOMEM)?;
        Ok(PerfPage { base })
    }

    /// The count, if the event is on a counter that this thread may read and
    /// has been on it for all the time it was enabled.
    pub(super) fn count(&self) -> Option<u64> {
        for _ in 0..TRIES {
            match self.attempt() {
                Attempt::Torn => {}
                Attempt::NotReadable => return None,
                Attempt::Counted(count) => return Some(count),
            }
        }
        None
    }

    /// Whether the event is on a counter; `None` where the kernel names counters to
    /// nobody, because it lets nobody read them.
    pub(super) fn is_on_counter(&self) -> Option<bool> {
        let page = self.base.as_ptr();
        // SAFETY: the mapping holds the structure for as long as `self` lives;
        // the kernel writes it, so both fields are read volatile.
        let (capabilities, index) = unsafe {
            (
                (&raw const (*page).__bindgen_anon_1.__bindgen_anon_1).read_volatile(),
                (&raw const (*page).index).read_volatile(),
            )
        };
        (capabilities.cap_user_rdpmc() != 0).then_some(index != 0)
    }

    /// One reading under the page's sequence lock.
    fn attempt(&self) -> Attempt {
        let page = self.base.as_ptr();
        // SAFETY: the mapping holds the structure for as long as `self` lives;
        // the kernel writes it, so every field is read volatile.
        let before = unsafe { (&raw const (*page).lock).read_volatile() };
        compiler_fence(Ordering::SeqCst);
        // SAFETY: as above; the union is a word of capability bits.
        let (capabilities, index, offset, width, enabled, running) = unsafe {
            (
                (&raw const (*page).__bindgen_anon_1.__bindgen_anon_1).read_volatile(),
                (&raw const (*page).index).read_volatile(),
                (&raw const (*page).offset).read_volatile(),
                (&raw const (*page).pmc_width).read_volatile(),
                (&raw const (*page).time_enabled).read_volatile(),
                (&raw const (*page).time_running).read_volatile(),
            )
        };
        let readable = capabilities.cap_user_rdpmc() != 0
            && index != 0
            && (1..=64).contains(&width)
            && enabled == running;
        // SAFETY: the page says that this thread may execute RDPMC, and names
        // the counter, which `index` tells plus 1.
        let raw = readable.then(|| unsafe { rdpmc(index - 1) });
        compiler_fence(Ordering::SeqCst);
        // SAFETY: as for the first reading of the lock.
        let after = unsafe { (&raw const (*page).lock).read_volatile() };
        if before != after || before & 1 != 0 {
            return Attempt::Torn;
        }
        let Some(raw) = raw else {
            return Attempt::NotReadable;
        };
        let count = offset.wrapping_add_unsigned(sign_extended(raw, width));
        Attempt::Counted(count.cast_unsigned())
    }
}

impl Drop for PerfPage {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own and ends with it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), LENGTH) };
    }
}

/// The low `width` bits of a counter as the signed number that they are.
fn sign_extended(raw: u64, width: u16) -> u64 {
    let unused = 64 - u32::from(width);
    ((raw << unused).cast_signed() >> unused).cast_unsigned()
}

/// Reads a counter.
///
/// # Safety
/// RDPMC must be allowed to this thread for `counter`.
unsafe fn rdpmc(counter: u32) -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: the caller vouches that RDPMC does not fault; it writes EDX:EAX
    // and nothing else.
    unsafe {
        asm!(
            "rdpmc",
            in("ecx") counter,
            out("eax") low,
            out("edx") high,
            options(nostack, preserves_flags)
        );
    }
    u64::from(high) << 32 | u64::from(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_is_a_signed_number_of_its_width() {
        let check = |raw, width, expected: i64| {
            assert_eq!(sign_extended(raw, width), expected.cast_unsigned());
        };
        check(0x7fff_ffff_ffff, 48, 0x7fff_ffff_ffff);
        check(0xffff_ffff_ffff, 48, -1);
        check(0x8000_0000, 32, -0x8000_0000);
        check(5, 64, 5);
    }
}
