//! From standard input to COM1.

use std::collections::VecDeque;
use std::io::stdin;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::outside::Attention;
use crate::devices::SharedPlatform;

/// Most bytes that wait here; the rest waits in the terminal or the pipe.
const MOST: usize = 4096;

/// Bytes on their way to the guest.
#[derive(Debug)]
pub(super) struct ConsoleInput {
    platform: Arc<SharedPlatform>,
    waiting: VecDeque<u8>,
    ended: bool,
    /// Who is to hear that there is no more.
    listener: Option<Arc<Attention>>,
}

impl ConsoleInput {
    pub(super) fn new(platform: Arc<SharedPlatform>) -> Self {
        Self {
            platform,
            waiting: VecDeque::new(),
            ended: false,
            listener: None,
        }
    }

    /// `listener` hears when the guest has taken all input that there will ever be.
    pub(super) fn tell_end(&mut self, listener: Arc<Attention>) {
        self.listener = Some(listener);
    }

    /// Takes what standard input has and hands the guest what it has room for.
    pub(super) fn serve(&mut self) {
        if self.waiting.is_empty() && !self.ended {
            let mut buffer = [0; MOST];
            match read_stdin(&mut buffer) {
                None => {}
                Some(Ok(0)) => self.ended = true,
                Some(Ok(len)) => self.waiting.extend(&buffer[..len]),
                Some(Err(error)) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Some(Err(error)) => {
                    log::warn!("standard input cannot be read: {error}");
                    self.ended = true;
                }
            }
        }
        let bytes = self.waiting.make_contiguous();
        let taken = self.platform.ports().enqueue(bytes);
        self.waiting.drain(..taken);
        // What finds no room has nobody who reads: a guest that would wake for input has been
        // told of the bytes before.
        let is_idle = self.waiting.is_empty() || taken == 0;
        if self.ended
            && is_idle
            && let Some(listener) = self.listener.take()
        {
            listener.end_input();
        }
    }

    /// True while bytes wait for room in the guest's receiver.
    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// True once there is no more input.
    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }
}

/// Reads what standard input has now, without waiting; `None` where nothing is
/// there.
fn read_stdin(buffer: &mut [u8]) -> Option<std::io::Result<usize>> {
    let stdin = stdin();
    let mut ready = [PollFd::new(&stdin, PollFlags::IN)];
    match poll(&mut ready, Some(&Timespec::default())) {
        Ok(1..) => Some(rustix::io::read(&stdin, buffer).map_err(std::io::Error::from)),
        Ok(0) | Err(_) => None,
    }
}
