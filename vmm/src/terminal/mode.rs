//! The modes of a terminal.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::termios::{
    ControlModes, InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr,
    tcsetattr,
};

/// The value of a special code that no key has.
const DISABLED: u8 = 0;

pub(super) fn mode(fd: BorrowedFd<'_>) -> io::Result<Termios> {
    Ok(tcgetattr(fd)?)
}

/// Sets the mode at once, without waiting for output to drain: a terminal whose
/// output is stopped must not keep the process from ending.
pub(super) fn set_mode(fd: BorrowedFd<'_>, mode: &Termios) -> io::Result<()> {
    Ok(tcsetattr(fd, OptionalActions::Now, mode)?)
}

/// The raw form of a mode: no line editing, echo, translation or flow control of
/// input; of the signal keys only the interrupt key stays.
pub(super) fn raw(mode: &Termios) -> Termios {
    let mut raw = mode.clone();
    raw.input_modes -= InputModes::IGNBRK
        | InputModes::BRKINT
        | InputModes::PARMRK
        | InputModes::ISTRIP
        | InputModes::INLCR
        | InputModes::IGNCR
        | InputModes::ICRNL
        | InputModes::IXON;
    raw.local_modes -=
        LocalModes::ECHO | LocalModes::ECHONL | LocalModes::ICANON | LocalModes::IEXTEN;
    raw.local_modes |= LocalModes::ISIG;
    raw.control_modes -= ControlModes::CSIZE | ControlModes::PARENB;
    raw.control_modes |= ControlModes::CS8;
    raw.special_codes[SpecialCodeIndex::VQUIT] = DISABLED;
    raw.special_codes[SpecialCodeIndex::VSUSP] = DISABLED;
    raw.special_codes[SpecialCodeIndex::VMIN] = 1;
    raw.special_codes[SpecialCodeIndex::VTIME] = 0;
    raw
}
