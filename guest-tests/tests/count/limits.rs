//! A run ends when its time is over or somebody interrupts it, whatever the host does meanwhile.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use guest_tests::umpire;

use super::fetched;

/// Longer than any of these takes on a machine that has much else to do.
const LATEST: Duration = Duration::from_secs(60);

/// `yes`, whose output nobody reads.
fn unread(options: &[&str]) -> std::process::Child {
    fetched();
    Command::new(umpire::path())
        .arg("count")
        .args(options)
        .args(["--", "yes"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("umpire can be started")
}

/// Its status, without reading anything.
fn status(mut child: std::process::Child) -> Option<i32> {
    let began = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("it is ours") {
            return status.code();
        }
        if began.elapsed() > LATEST {
            child.kill().expect("it is ours");
            panic!("it does not end");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn an_output_that_nobody_reads_does_not_hold_a_run_up() {
    assert_eq!(status(unread(&["--timeout", "2s"])), Some(124));
    let child = unread(&[]);
    std::thread::sleep(Duration::from_secs(2));
    let number = i32::try_from(child.id()).expect("a process");
    // SIGINT, as of Ctrl-C.
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(number), nix::sys::signal::SIGINT)
        .expect("it is ours");
    assert_eq!(status(child), Some(130));
}
