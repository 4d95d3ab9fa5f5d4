//! The mode of a terminal: how it is read, set, and made raw.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::termios::{
    ControlModes, InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr,
    tcsetattr,
};

/// What a special character is set to where no key stands for it.
const NO_KEY: u8 = 0;

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
    raw.input_modes.remove(
        InputModes::IGNBRK
            | InputModes::BRKINT
            | InputModes::PARMRK
            | InputModes::ISTRIP
            | InputModes::INLCR
            | InputModes::IGNCR
            | InputModes::ICRNL
            | InputModes::IXON,
    );
    raw.local_modes
        .remove(LocalModes::ECHO | LocalModes::ECHONL | LocalModes::ICANON | LocalModes::IEXTEN);
    raw.local_modes.insert(LocalModes::ISIG);
    raw.control_modes
        .remove(ControlModes::CSIZE | ControlModes::PARENB);
    raw.control_modes.insert(ControlModes::CS8);
    raw.special_codes[SpecialCodeIndex::VQUIT] = NO_KEY;
    raw.special_codes[SpecialCodeIndex::VSUSP] = NO_KEY;
    raw.special_codes[SpecialCodeIndex::VMIN] = 1;
    raw.special_codes[SpecialCodeIndex::VTIME] = 0;
    raw
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::fd::OwnedFd;

    use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};

    use super::*;

    /// The two ends of a new pseudo terminal: the user's, the program's.
    pub(in super::super) fn open_pty() -> (OwnedFd, OwnedFd) {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY;
        let user = openpt(flags).expect("a pseudo terminal");
        grantpt(&user).expect("granted");
        unlockpt(&user).expect("unlocked");
        let program = ioctl_tiocgptpeer(&user, flags).expect("its other end");
        (user, program)
    }

    /// Everything that raw mode changes, to compare.
    pub(in super::super) fn parts(mode: &Termios) -> impl PartialEq + std::fmt::Debug + use<> {
        format!("{mode:?}")
    }
}
