//! The user's terminal while a guest owns it.
//!
//! In raw mode every key goes to the guest at once and without an echo, except
//! the interrupt key (Ctrl-C), which still raises SIGINT: it is how a guest is
//! stopped. Output processing stays on, so that the host's own lines begin at the
//! left margin.
//!
//! However the process ends, the terminal gets its old mode back: a
//! [`RawTerminal`] restores it when dropped; a panic in any thread restores it
//! before its message is printed; and whoever calls `exit` calls
//! [`restore_all`] first. Signals are the main loop's: it ends by dropping.

mod mode;

use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, Once, PoisonError};

use rustix::termios::Termios;
use thiserror::Error;

/// The terminal's mode cannot be changed.
#[derive(Debug, Error)]
#[error("cannot {action} the terminal: {source}")]
pub struct TerminalError {
    action: &'static str,
    source: io::Error,
}

/// A terminal in raw mode, until this is dropped.
#[derive(Debug)]
#[must_use = "the terminal leaves raw mode when this is dropped"]
pub struct RawTerminal {
    id: u64,
}

/// A terminal to restore, and the mode it had.
struct Saved {
    id: u64,
    fd: OwnedFd,
    mode: Termios,
}

/// Every terminal in raw mode, where a panic hook can find it.
static SAVED: Mutex<Vec<Saved>> = Mutex::new(Vec::new());
static NEXT_ID: AtomicU64 = AtomicU64::new(0);

impl RawTerminal {
    /// Puts `fd`, usually standard input, into raw mode. Does nothing and returns
    /// none if it is not a terminal.
    ///
    /// # Errors
    /// The terminal refuses, for example because it was just hung up.
    pub fn enter(fd: impl AsFd) -> Result<Option<Self>, TerminalError> {
        let fd = fd.as_fd();
        if !fd.is_terminal() {
            return Ok(None);
        }
        let failed = |action| move |source| TerminalError { action, source };
        let mode = mode::mode(fd).map_err(failed("read the mode of"))?;
        // A copy of its own: the caller may close what it gave.
        let copy = fd.try_clone_to_owned().map_err(failed("keep"))?;
        restore_on_panic();

        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let raw = mode::raw(&mode);
        let saved = Saved { id, fd: copy, mode };
        // It is on the list before it changes: no moment of raw mode is unguarded.
        list().push(saved);
        let terminal = Self { id };
        mode::set_mode(fd, &raw).map_err(failed("change the mode of"))?;
        Ok(Some(terminal))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        let mut list = list();
        if let Some(at) = list.iter().position(|saved| saved.id == self.id) {
            list.remove(at).restore();
        }
    }
}

/// Restores every terminal that is in raw mode. For the way out that runs no
/// destructors; harmless at any time.
pub fn restore_all() {
    for saved in list().drain(..) {
        saved.restore();
    }
}

impl Saved {
    fn restore(self) {
        if let Err(error) = mode::set_mode(self.fd.as_fd(), &self.mode) {
            // The terminal is gone: there is nothing left to restore.
            log::debug!("cannot restore the terminal: {error}");
        }
    }
}

fn list() -> std::sync::MutexGuard<'static, Vec<Saved>> {
    // The list is consistent between any two of its operations.
    SAVED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes panics restore the terminals before anything else happens.
fn restore_on_panic() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            // Never wait in a panic: if the panicking thread holds the list, its
            // unwinding drops the guard that restores.
            if let Ok(mut list) = SAVED.try_lock() {
                for saved in list.drain(..) {
                    saved.restore();
                }
            }
            previous(info);
        }));
    });
}

#[cfg(test)]
mod tests;
