//! Signals of contexts with `PFM_FL_OVFL_NO_MSG` (3.3.7).
//!
//! Whatever made such a context's own socket signal would also have to be read from it. So
//! the VM has a second socket for it, its bell, and whoever is to be signalled for the
//! context is signalled for that. Nobody keeps a descriptor of it: what `fcntl` sets stays
//! with the socket, which the VM keeps.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use perfmon_abi::wire::Errno;
use perfmon_abi::wire::bell::BELL;
use rustix::io::{dup2, fcntl_dupfd_cloexec};
use umpire_perfmon::link::{Link, Packet, Question};

use crate::failure::{Failure, failure};
use crate::sys::owner;

/// How often a descriptor's place may be busy, which is for moments.
const TRIES: usize = 100;

/// Makes a new context's bell ready, with nobody to signal. A VM of before has none: its
/// contexts have empty records.
///
/// # Errors
/// The context could not be put back to its descriptor.
pub(crate) fn hang(
    link: &mut Link,
    packet: &mut Packet,
    context: &mut OwnedFd,
    handle: u32,
) -> Result<(), Failure> {
    let Some(bell) = ask(link, packet, handle) else {
        return Ok(());
    };
    // A signal tells the number at which signals were turned on (`si_fd`), and it is to be
    // the context's. Nobody knows this number yet, so the bell can have it for a moment.
    let Ok(kept) = fcntl_dupfd_cloexec(context.as_fd(), 0) else {
        return Ok(());
    };
    if dup2(&bell, context).is_ok() {
        owner::turn_on(context.as_fd());
        let back = (0..TRIES).any(|_| dup2(&kept, context).is_ok());
        if !back {
            return Err(failure(Errno::EMFILE, "the descriptor's place is busy"));
        }
    }
    Ok(())
}

/// The bell signals whom the context's descriptor would.
pub(crate) fn follow(link: &mut Link, packet: &mut Packet, context: BorrowedFd<'_>, handle: u32) {
    if let Some(bell) = ask(link, packet, handle) {
        owner::copy(context, bell.as_fd());
    }
}

fn ask(link: &mut Link, packet: &mut Packet, handle: u32) -> Option<OwnedFd> {
    let question = Question {
        context: handle,
        ..Question::plain(BELL)
    };
    let answer = link.exchange(question, packet).ok()?;
    let [bell, _] = answer.descriptors;
    bell.filter(|_| answer.reply.errno == 0)
}
