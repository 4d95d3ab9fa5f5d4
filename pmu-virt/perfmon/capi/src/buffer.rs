//! Mapping the sampling buffer by the context's descriptor (3.5.4).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::SeqCst;

use perfmon_abi::wire::{Buffer, Errno, Extension};
use rustix::fs::fstat;
use umpire_perfmon::link::{Answer, Question};
use umpire_perfmon::maps::{self, FileId};

use crate::failure::{Failure, accepted, failure, malformed};
use crate::state::STATE;
use crate::sys::real;
use crate::table::{self, Slot};

/// Flags that the specification forbids.
const FORBIDDEN: i32 =
    libc::MAP_EXECUTABLE | libc::MAP_LOCKED | libc::MAP_GROWSDOWN | libc::MAP_ANONYMOUS;

/// What a caller of `mmap` wants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) size: usize,
    pub(crate) protection: i32,
    pub(crate) flags: i32,
    pub(crate) offset: i64,
}

/// The sampling buffer's file, if it may be mapped in this way.
///
/// # Errors
/// EINVAL: the context has no buffer, this process has mapped it already, or the
/// mapping is not one of all of it, for reading, shared.
pub(crate) fn file(open: BorrowedFd<'_>, wanted: Wanted) -> Result<OwnedFd, Failure> {
    STATE.with(|state| {
        let (slot, handle) = state.context(open)?;
        check(slot, wanted)?;
        let file = handed_over(state.exchange(Question {
            context: handle,
            ..Question::plain(Extension::GetBuffer.number())
        })?)?;
        let id = FileId::of(&fstat(&file)?);
        let mut mapped = false;
        // Without /proc, a second mapping goes unnoticed; it does no harm.
        let _ = maps::each(id, |_| mapped = true);
        if mapped {
            let reason = "this process has mapped the sampling buffer already";
            return Err(failure(Errno::EINVAL, reason));
        }
        slot.set_buffer_file(id);
        Ok(file)
    })
}

fn check(slot: &Slot, wanted: Wanted) -> Result<(), Failure> {
    let size = usize::try_from(slot.buffer_size.load(SeqCst)).unwrap_or(usize::MAX);
    let wrong = if size == 0 {
        "the context has no sampling buffer"
    } else if wanted.protection != libc::PROT_READ {
        "the sampling buffer is mapped with PROT_READ and nothing else"
    } else if wanted.flags & libc::MAP_TYPE != libc::MAP_SHARED || wanted.flags & FORBIDDEN != 0 {
        "the sampling buffer is mapped with MAP_SHARED"
    } else if wanted.offset != 0 || wanted.size != size {
        "the sampling buffer is mapped as a whole: offset 0, ctx_smpl_buf_size bytes"
    } else {
        return Ok(());
    };
    Err(failure(Errno::EINVAL, wrong))
}

/// The file that the VM has answered with.
fn handed_over(answer: Answer<'_>) -> Result<OwnedFd, Failure> {
    accepted(&answer.reply)?;
    let [file, _] = answer.descriptors;
    match (file, Buffer::from_bytes(answer.reply.payload)) {
        (Some(file), Ok(buffer)) => {
            // A file that is too short would end the program at the first access.
            let length = fstat(file.as_fd())?.st_size;
            let whole = u64::try_from(length).is_ok_and(|length| length >= buffer.size);
            whole.then_some(file).ok_or_else(malformed)
        }
        _ => Err(malformed()),
    }
}

/// A descriptor of a context is closed, or was: with the last one that this
/// process knows, its mapping of the buffer goes.
pub(crate) fn closed(fd: i32) {
    if let Some(file) = table::forget(fd) {
        let _ = maps::each(file, real::unmap);
    }
}
