//! From standard input to COM1.

use std::collections::VecDeque;
use std::sync::Arc;

use super::sys;
use crate::vcpu::SharedPlatform;

/// Most bytes that wait here; the rest waits in the terminal or the pipe.
const MOST: usize = 4096;

/// Bytes on their way to the guest.
#[derive(Debug)]
pub(super) struct ConsoleInput {
    platform: Arc<SharedPlatform>,
    waiting: VecDeque<u8>,
    ended: bool,
}

impl ConsoleInput {
    pub(super) fn new(platform: Arc<SharedPlatform>) -> Self {
        Self {
            platform,
            waiting: VecDeque::new(),
            ended: false,
        }
    }

    /// Takes what standard input has and hands the guest what it has room for.
    pub(super) fn serve(&mut self) {
        if self.waiting.is_empty() && !self.ended {
            let mut buffer = [0; MOST];
            match sys::read_stdin(&mut buffer) {
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
