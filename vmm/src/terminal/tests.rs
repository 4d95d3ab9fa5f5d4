//! Tests on pseudo terminals.

use std::fs::File;
use std::io::{Read, Write};

use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};

use super::*;

/// The two ends of a new pseudo terminal: the user's, the program's.
fn open_pty() -> (OwnedFd, OwnedFd) {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY;
    let user = openpt(flags).unwrap();
    grantpt(&user).unwrap();
    unlockpt(&user).unwrap();
    let program = ioctl_tiocgptpeer(&user, flags).unwrap();
    (user, program)
}

/// Everything of a terminal's mode.
fn parts(fd: &OwnedFd) -> String {
    format!("{:?}", mode::mode(fd.as_fd()).unwrap())
}

/// `restore_all` and panics are global, so these tests take turns.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> std::sync::MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_raw(fd: &OwnedFd) -> bool {
    let mode = mode::mode(fd.as_fd()).unwrap();
    format!("{mode:?}") == format!("{:?}", mode::raw(&mode))
}

/// Runs `way_out` with a raw terminal and checks that its mode is the old one
/// afterwards.
fn check_restored(way_out: impl FnOnce(RawTerminal)) {
    let _turn = turn();
    let (_user, program) = open_pty();
    let before = parts(&program);
    let terminal = RawTerminal::enter(&program).unwrap().expect("a terminal");
    assert!(is_raw(&program));
    way_out(terminal);
    assert!(!is_raw(&program));
    assert_eq!(parts(&program), before);
}

#[test]
fn dropping_restores() {
    check_restored(drop);
}

#[test]
fn leaving_without_destructors_restores() {
    check_restored(|terminal| {
        std::mem::forget(terminal);
        restore_all();
    });
}

#[test]
fn a_panic_in_another_thread_restores() {
    check_restored(|terminal| {
        std::mem::forget(terminal);
        let thread = std::thread::spawn(|| panic!("expected by a test of the terminal"));
        assert!(thread.join().is_err());
    });
}

#[test]
fn restoring_twice_does_no_harm() {
    check_restored(|terminal| {
        restore_all();
        restore_all();
        drop(terminal);
    });
}

#[test]
fn a_terminal_that_went_away_is_no_error() {
    let _turn = turn();
    let (user, program) = open_pty();
    let terminal = RawTerminal::enter(&program).unwrap();
    drop(user);
    drop(terminal);
}

#[test]
fn what_is_not_a_terminal_is_left_alone() {
    let _turn = turn();
    let file = tempfile::tempfile().unwrap();
    assert!(RawTerminal::enter(&file).unwrap().is_none());
}

#[test]
fn keys_arrive_at_once_unchanged_and_without_echo() {
    let _turn = turn();
    let (user, program) = open_pty();
    let terminal = RawTerminal::enter(&program).unwrap();
    let (mut user, mut program) = (File::from(user), File::from(program));
    // Carriage return, Ctrl-D, Ctrl-Z, Ctrl-\, XOFF: all of them are the guest's.
    let keys = [b'a', b'\r', 0x04, 0x1a, 0x1c, 0x13];
    user.write_all(&keys).unwrap();
    let mut got = [0; 6];
    program.read_exact(&mut got).unwrap();
    assert_eq!(got, keys);
    // Output still starts new lines at the margin, and nothing was echoed.
    program.write_all(b"x\n").unwrap();
    let mut shown = [0; 3];
    user.read_exact(&mut shown).unwrap();
    assert_eq!(&shown, b"x\r\n");
    drop(terminal);
}
