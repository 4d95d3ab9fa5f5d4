//! Boots a guest in the cached QEMU without KVM.

use std::io::Read;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use super::{COMMAND_LINE, Guest};
use crate::l1::tool::last_lines;
use crate::l1::{Cache, L1Error, Set, qemu_command, spawn_bound};

/// Starts QEMU on the guest and returns the console once it has powered off.
pub(super) fn boot(guest: &Guest, timeout: Duration) -> Result<String, L1Error> {
    let sets = Cache::of_user().fetch(&[Set::Qemu])?;
    let root = &sets[0].folder;
    let mut command = qemu_command(root, Vec::new());
    command
        .args([
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-no-reboot",
        ])
        .args([
            "-machine", "q35", "-accel", "tcg", "-cpu", "EPYC", "-smp", "2", "-m", "512",
        ])
        .arg("-L")
        .arg(root.join("usr/share/qemu"))
        .arg("-L")
        .arg(root.join("usr/share/seabios"))
        .arg("-kernel")
        .arg(guest.kernel())
        .arg("-initrd")
        .arg(guest.initrd())
        .args(["-append", COMMAND_LINE, "-serial", "stdio"])
        .stdout(Stdio::piped());
    let start = Instant::now();
    let mut child = spawn_bound(&mut command, Vec::new()).map_err(L1Error::file("start", root))?;
    let read = |stream: Option<Box<dyn Read + Send>>| {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            // A read error ends the log; what it lacks is seen by the caller.
            let _ = stream.map(|mut stream| stream.read_to_end(&mut bytes));
            String::from_utf8_lossy(&bytes).into_owned()
        })
    };
    let console = read(child.stdout.take().map(|stream| Box::new(stream) as Box<_>));
    let errors = read(child.stderr.take().map(|stream| Box::new(stream) as Box<_>));
    while start.elapsed() < timeout && matches!(child.try_wait(), Ok(None)) {
        thread::sleep(Duration::from_millis(10));
    }
    let ended = matches!(child.try_wait(), Ok(Some(status)) if status.success());
    // Both fail only for a process that is gone already.
    let _ = child.kill();
    let _ = child.wait();
    let (console, errors) = (
        console.join().unwrap_or_default(),
        errors.join().unwrap_or_default(),
    );
    if ended {
        return Ok(console);
    }
    Err(L1Error::Machine {
        after: start.elapsed(),
        reason: "the Linux guest did not power off".to_owned(),
        log: last_lines(&format!("{errors}\n{console}"), 25),
    })
}
