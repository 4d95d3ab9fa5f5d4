//! What the standard library has no safe call for: perf events, the memory that the kernel
//! writes their records to, and the time stamp counter.
//!
//! This module is the only place of the crate with `unsafe` code.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};

use perf_event_open_sys::bindings as abi;
use perf_event_open_sys::{ioctls, perf_event_open};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::time::{ClockId, clock_gettime};

use crate::clock::Reading;
use crate::records::{self, HEAD};

const PAGE: usize = 4096;
/// Bytes of a processor's records: of some 4000 switches.
const RING: usize = 64 * PAGE;
/// The longest record is a mapping's, with a path of 4096 bytes. Where less room than for it, and
/// for what else the kernel is just writing, was left, the kernel may have dropped one.
const LARGEST: usize = 2 * PAGE;
/// Readings of the clocks of which the closest is taken.
const TRIES: usize = 4;

/// The records of a processor.
#[derive(Debug)]
pub(crate) struct Ring {
    event: OwnedFd,
    /// A page that describes them, and [`RING`] bytes.
    memory: *mut u8,
    /// For how long the event has run, in ns, when that was asked last.
    ran: u64,
    /// There were records since.
    recorded: bool,
}

/// An event cannot be opened.
#[derive(Debug)]
pub(crate) enum NoEvent {
    /// The kernel cannot record switches: it is older than 4.3.
    NoSwitches,
    /// Something else.
    Other(io::Error),
}

impl Ring {
    /// The kernel records from now on what happens on processor `cpu`.
    pub(crate) fn open(cpu: u32) -> Result<Self, NoEvent> {
        let event = event(cpu, true).map_err(|error| {
            let without = || event(cpu, false).is_ok();
            match error.raw_os_error() {
                Some(code) if code == rustix::io::Errno::INVAL.raw_os_error() && without() => {
                    NoEvent::NoSwitches
                }
                _ => NoEvent::Other(error),
            }
        })?;
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: no address is asked for, so that nothing of ours is replaced.
        let memory = unsafe { mmap(null_mut(), PAGE + RING, rights, MapFlags::SHARED, &event, 0) };
        let memory = memory.map_err(|errno| NoEvent::Other(errno.into()))?;
        let ring = Self {
            event,
            memory: memory.cast(),
            ran: 0,
            recorded: false,
        };
        // SAFETY: the descriptor is a perf event's, and the call takes no memory.
        match unsafe { ioctls::ENABLE(ring.event.as_raw_fd(), 0) } {
            0 => Ok(ring),
            _ => Err(NoEvent::Other(io::Error::last_os_error())),
        }
    }

    /// The event has run since this was asked last.
    pub(crate) fn has_run(&mut self) -> bool {
        // To ask disturbs the processor.
        if std::mem::take(&mut self.recorded) {
            return true;
        }
        // Its count, and its time.
        let mut fields = [0; 16];
        let read = rustix::io::read(&self.event, &mut fields);
        let time = fields
            .last_chunk()
            .map_or(0, |time| u64::from_le_bytes(*time));
        let before = std::mem::replace(&mut self.ran, time);
        read == Ok(fields.len()) && time > before
    }

    /// Hands `take` the records that are there, and makes room for others. False if there was so
    /// little room that some may be missing behind these.
    pub(crate) fn drain(&mut self, mut take: impl FnMut(&[u8])) -> bool {
        let (head, tail) = (self.position(false), self.position(true));
        let mut at = tail.load(Ordering::Relaxed);
        // The kernel writes records before it says where they end.
        let end = head.load(Ordering::Acquire);
        let had_room = end.wrapping_sub(at) <= (RING - LARGEST) as u64;
        let (mut record, mut any) = (Vec::new(), false);
        while end.wrapping_sub(at) >= HEAD as u64 {
            let mut first = [0; HEAD];
            self.copy(at, &mut first);
            let length = records::length(first).unwrap_or(RING);
            if length as u64 > end.wrapping_sub(at) {
                break;
            }
            record.resize(length, 0);
            self.copy(at, &mut record);
            take(&record);
            any = true;
            at = at.wrapping_add(length as u64);
        }
        // What was not understood would never be.
        tail.store(end, Ordering::Release);
        self.recorded |= any;
        had_room
    }

    /// Where the kernel writes next, or up to where was read.
    fn position(&self, of_reader: bool) -> &AtomicU64 {
        let page = self.memory.cast::<abi::perf_event_mmap_page>();
        // SAFETY: the mapping begins with such a page and lives as long as `self`; only the
        // address of a field is made.
        let field = unsafe {
            if of_reader {
                &raw mut (*page).data_tail
            } else {
                &raw mut (*page).data_head
            }
        };
        // SAFETY: the field is a u64, aligned, in that page; the kernel and this process only
        // access it whole.
        unsafe { AtomicU64::from_ptr(field) }
    }

    /// Copies what begins at `position`, around the end.
    fn copy(&self, position: u64, to: &mut [u8]) {
        for (offset, byte) in (0u64..).zip(to) {
            let place = position.wrapping_add(offset) % RING as u64;
            let place = usize::try_from(place).unwrap_or(0);
            // SAFETY: `place` is below `RING`, and that many bytes follow the first page. The
            // kernel does not write in front of the reader's position.
            *byte = unsafe { self.memory.add(PAGE + place).read() };
        }
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's, and nothing borrows from it any more.
        let _ = unsafe { munmap(self.memory.cast::<c_void>(), PAGE + RING) };
    }
}

/// An event that counts nothing and records what happens beside it.
fn event(cpu: u32, switches: bool) -> io::Result<OwnedFd> {
    let mut attr = abi::perf_event_attr::default();
    attr.type_ = abi::PERF_TYPE_SOFTWARE;
    attr.size = u32::try_from(size_of::<abi::perf_event_attr>()).unwrap_or(0);
    attr.config = abi::PERF_COUNT_SW_DUMMY.into();
    let tail = abi::PERF_SAMPLE_TID | abi::PERF_SAMPLE_TIME | abi::PERF_SAMPLE_CPU;
    attr.sample_type = tail.into();
    attr.read_format = abi::PERF_FORMAT_TOTAL_TIME_RUNNING.into();
    attr.clockid = ClockId::MonotonicRaw as i32;
    attr.__bindgen_anon_2.wakeup_watermark = u32::try_from(RING / 2).unwrap_or(0);
    attr.set_disabled(1);
    attr.set_watermark(1);
    attr.set_sample_id_all(1);
    attr.set_use_clockid(1);
    attr.set_task(1);
    attr.set_comm(1);
    attr.set_comm_exec(1);
    attr.set_mmap(1);
    attr.set_mmap2(1);
    attr.set_context_switch(u64::from(switches));
    let cpu = i32::try_from(cpu).unwrap_or(-1);
    // SAFETY: `attr` is initialised in full, its `size` is its own, and it outlives the call.
    let fd =
        unsafe { perf_event_open(&raw mut attr, -1, cpu, -1, abi::PERF_FLAG_FD_CLOEXEC.into()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made the descriptor, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Both clocks now.
pub(crate) fn now() -> Reading {
    let once = || {
        let before = tsc();
        let time = clock_gettime(ClockId::MonotonicRaw);
        let after = tsc();
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        let ns = seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0);
        let width = after.saturating_sub(before);
        let tsc = before + width / 2;
        (width, Reading { tsc, ns })
    };
    let mut best = once();
    for _ in 1..TRIES {
        let other = once();
        if other.0 <= best.0 {
            best = other;
        }
    }
    best.1
}

fn tsc() -> u64 {
    // SAFETY: every x86-64 processor has the instruction, and Linux lets programs use it.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, SeekFrom, memfd_create, seek};
    use rustix::mm::mmap_anonymous;

    /// A ring without a kernel behind it; its event is a file.
    fn ring(event: &[u8]) -> Ring {
        let create = |flags| memfd_create("event", MemfdFlags::CLOEXEC | flags);
        let made = create(MemfdFlags::NOEXEC_SEAL).or_else(|_| create(MemfdFlags::empty()));
        let file = made.expect("a file");
        rustix::io::write(&file, event).expect("room");
        seek(&file, SeekFrom::Start(0)).expect("a file");
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: no address is asked for, so that nothing of ours is replaced.
        let memory = unsafe { mmap_anonymous(null_mut(), PAGE + RING, rights, MapFlags::PRIVATE) };
        Ring {
            event: file,
            memory: memory.expect("memory").cast(),
            ran: 0,
            recorded: false,
        }
    }

    #[test]
    fn a_ring_that_was_full_says_so_at_once() {
        let mut ring = ring(&[]);
        // A head that says a length of 64 bytes.
        let record = [0, 0, 0, 0, 0, 0, 64, 0];
        for (place, byte) in (0..RING).zip(record.iter().cycle()) {
            let byte = if place % 64 < HEAD { *byte } else { 0 };
            // SAFETY: `place` is below `RING`, and that many bytes follow the first page.
            unsafe { ring.memory.add(PAGE + place).write(byte) };
        }
        let all = RING as u64;
        let mut head = 0;
        for (bytes, had_room) in [
            (0, true),
            (64, true),
            (all / 2, true),
            (all - 64, false),
            (all - 4160, false),
            (all, false),
            (128, true),
        ] {
            head += bytes;
            ring.position(false).store(head, Ordering::Release);
            let mut count = 0;
            assert_eq!(ring.drain(|_| count += 1), had_room, "{bytes}");
            assert_eq!(count, bytes / 64);
        }
        assert!(ring.has_run() && !ring.has_run(), "it had records");
    }

    #[test]
    fn an_event_whose_time_stands_still_is_gone() {
        let words = [0u64, 5, 0, 9, 0, 9, 0].map(u64::to_le_bytes).concat();
        let mut ring = ring(&words);
        let found = [(); 4].map(|()| ring.has_run());
        assert_eq!(found, [true, true, false, false]);
    }
}
