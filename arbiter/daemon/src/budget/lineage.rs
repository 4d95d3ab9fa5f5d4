//! Whether there is anything left of what a thread has started.
//!
//! The kernel lists nobody who has inherited an event, and who started whom is lost when a process
//! ends. But of an event with a buffer `poll(2)` says when the thread that it is of and all who have
//! inherited it have ended. So an event that counts nothing is opened beside, which nobody else has;
//! all of these write to one buffer, in which there is never anything. A buffer needs a CPU: they
//! are of the first one, and are inherited wherever their threads run.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::budget::{Errno, Follows, sys};

/// What such events are opened with.
#[derive(Debug)]
pub struct Lineages {
    event: OwnedFd,
    /// It is there for as long as somebody has it mapped.
    _buffer: sys::MappedPage,
}

impl Lineages {
    /// Has the kernel make the buffer.
    ///
    /// # Errors
    /// What the kernel answered.
    pub fn new() -> Result<Self, Errno> {
        let event = sys::open_dummy(0, Follows::Nothing)?;
        Ok(Lineages {
            _buffer: sys::MappedPage::of(event.as_fd())?,
            event,
        })
    }

    /// Follows a thread, and what that starts from now on.
    ///
    /// # Errors
    /// What the kernel answered.
    pub fn follow(&self, thread: u32, follows: Follows) -> Result<Lineage, Errno> {
        let event = sys::open_dummy(thread, follows)?;
        sys::write_to(event.as_fd(), self.event.as_raw_fd())?;
        Ok(Lineage { event })
    }
}

/// A thread, and what it has started.
#[derive(Debug)]
pub struct Lineage {
    event: OwnedFd,
}

impl Lineage {
    /// Whether all of it has ended, or runs a program with other rights, which takes the kernel's
    /// events from it.
    pub fn has_ended(&self) -> bool {
        let mut event = [PollFd::new(&self.event, PollFlags::empty())];
        let polled = poll(&mut event, Some(&Timespec::default()));
        polled.is_ok() && event[0].revents().contains(PollFlags::HUP)
    }
}

impl From<Lineage> for OwnedFd {
    fn from(lineage: Lineage) -> OwnedFd {
        lineage.event
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    /// A shell that starts `cat` when it is told to, and ends.
    fn shell() -> Child {
        let command = "read go; cat <&3 & echo started";
        let mut shell = Command::new("sh");
        let shell = shell.args(["-c", &format!("exec 3<&0; {command}")]);
        let shell = shell.stdin(Stdio::piped()).stdout(Stdio::piped());
        shell.spawn().expect("sh starts")
    }

    #[test]
    fn a_lineage_has_ended_with_the_last_of_it() {
        let lineages = match Lineages::new() {
            Ok(lineages) => lineages,
            Err(error) => {
                println!("skipped: a_lineage_has_ended_with_the_last_of_it: {error}");
                return;
            }
        };
        let mut shell = shell();
        let all = [Follows::Children, Follows::Threads].map(|follows| {
            let lineage = lineages.follow(shell.id(), follows);
            lineage.expect("it can be followed")
        });
        let ended = || all.each_ref().map(Lineage::has_ended);
        assert_eq!(ended(), [false, false]);
        let mut stdin = shell.stdin.take().expect("a pipe");
        stdin.write_all(b"go\n").expect("it waits");
        let mut said = [0; 8];
        let stdout = shell.stdout.as_mut().expect("a pipe");
        stdout.read_exact(&mut said).expect("it has started one");
        shell.wait().expect("it is ours");
        // What the process has started runs on; of its threads none is left.
        assert_eq!(ended(), [false, true]);
        drop(stdin);
        let until = Instant::now() + Duration::from_secs(20);
        while ended() != [true, true] {
            assert!(Instant::now() < until);
            std::thread::sleep(Duration::from_millis(1));
        }
        let gone = lineages.follow(u32::MAX >> 1, Follows::Children);
        assert!(gone.is_err());
    }
}
