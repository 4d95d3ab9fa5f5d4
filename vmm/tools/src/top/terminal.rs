//! The user's terminal while frames are on it. However this program ends, short of SIGKILL,
//! the terminal is then as it was.

use std::io::{self, Stdin, Stdout, Write, stdin, stdout};
use std::os::unix::net::UnixStream;
use std::sync::Once;

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::{Hide, Show};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use rustix::process::{Signal, getpid, kill_process};
use signal_hook::SigId;
use signal_hook::consts::SIGWINCH;
use signal_hook::low_level::{pipe, unregister};

use super::frame::Frame;
use super::view::draw;

/// The terminal with frames on it, until this is dropped.
pub(super) struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
    /// Has a byte for each change of the size.
    resized: UnixStream,
    signal: SigId,
}

impl Screen {
    /// Clears the terminal, which sends keys at once from then on. A panic of any thread
    /// restores it before it says anything.
    ///
    /// # Errors
    /// The terminal refuses.
    pub(super) fn open() -> io::Result<Self> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let previous = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                leave();
                previous(info);
            }));
        });
        let (resized, signalled) = UnixStream::pair()?;
        resized.set_nonblocking(true)?;
        let signal = pipe::register(SIGWINCH, signalled)?;
        let terminal = enter().and_then(|()| Terminal::new(CrosstermBackend::new(stdout())));
        match terminal {
            Ok(terminal) => Ok(Self {
                terminal,
                resized,
                signal,
            }),
            Err(error) => {
                unregister(signal);
                leave();
                Err(error)
            }
        }
    }

    /// Has something to read when the size has changed.
    pub(super) fn resized(&self) -> &UnixStream {
        &self.resized
    }

    /// Where keys come from.
    pub(super) fn keyboard(&self) -> Stdin {
        stdin()
    }

    /// Shows a frame.
    ///
    /// # Errors
    /// The terminal takes no more.
    pub(super) fn show(&mut self, frame: &Frame) -> io::Result<()> {
        let drawn = self.terminal.draw(|screen| {
            let area = screen.area();
            draw(frame, area, screen.buffer_mut());
        });
        drawn.map(drop)
    }

    /// Forgets what is on the terminal: the next frame is drawn whole.
    ///
    /// # Errors
    /// The terminal takes no more.
    pub(super) fn clear(&mut self) -> io::Result<()> {
        self.terminal.clear()
    }

    /// Gives the terminal back and stops, as Ctrl-Z does elsewhere; goes on with it later.
    ///
    /// # Errors
    /// The terminal refuses.
    pub(super) fn suspend(&mut self) -> io::Result<()> {
        leave();
        kill_process(getpid(), Signal::TSTP)?;
        enter()?;
        self.clear()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        unregister(self.signal);
        leave();
    }
}

fn enter() -> io::Result<()> {
    enable_raw_mode()?;
    execute!(stdout(), EnterAlternateScreen, Hide)
}

/// A terminal that is gone needs nothing.
fn leave() {
    let _ = execute!(stdout(), LeaveAlternateScreen, Show);
    let _ = stdout().flush();
    let _ = disable_raw_mode();
}
