//! Boots a guest in the cached QEMU without KVM.

use std::ffi::OsString;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use object::{Object, ObjectSegment};

use super::{COMMAND_LINE, Guest};
use crate::l1::tool::{capture, last_lines};
use crate::l1::{Cache, L1Error, Set, qemu_command, spawn_bound};

/// A plugin of QEMU's that counts the instructions of one program.
const COUNTER: &str = include_str!("../../qemu/instructions.c");

/// Boots the guest on one processor, and counts: the instructions of each run of `program`, a
/// static one at addresses that no other program of the guest has, in their order.
pub(super) fn count(
    guest: &Guest,
    program: &[u8],
    timeout: Duration,
) -> Result<(String, Vec<u64>), L1Error> {
    let folder = tempfile::tempdir();
    let folder = folder.map_err(L1Error::file("create a folder in", std::env::temp_dir()))?;
    let [source, plugin, counts] =
        ["instructions.c", "instructions.so", "counts"].map(|name| folder.path().join(name));
    fs::write(&source, COUNTER).map_err(L1Error::file("write", &source))?;
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O2", "-o"]);
    compiler.arg(&plugin).arg(&source);
    let advice = "a C compiler is needed (Debian: gcc and libc6-dev)";
    capture(&mut compiler, "compiling a plugin for QEMU", advice)?;
    let (first, last, entry) = code_of(program, &source)?;
    let mut words = OsString::from(&plugin);
    words.push(format!(
        ",first={first:x},last={last:x},entry={entry:x},out="
    ));
    words.push(&counts);
    let arguments = ["-smp".into(), "1".into(), "-plugin".into(), words];
    let console = boot(guest, &arguments, timeout)?;
    let told = fs::read_to_string(&counts).map_err(L1Error::file("read", &counts))?;
    let runs = told.lines().filter_map(|line| line.parse().ok());
    Ok((console, runs.collect()))
}

/// The first and last address of a program's code, and its entry.
fn code_of(program: &[u8], file: &Path) -> Result<(u64, u64, u64), L1Error> {
    let parsed = object::File::parse(program).map_err(std::io::Error::other);
    let parsed = parsed.map_err(L1Error::file("read the program for", file))?;
    let entry = parsed.entry();
    let code = parsed
        .segments()
        .map(|segment| (segment.address(), segment.address() + segment.size()))
        .find(|(begin, end)| (*begin..*end).contains(&entry));
    let none = || std::io::Error::other("its entry is in no segment");
    let (begin, end) = code
        .ok_or_else(none)
        .map_err(L1Error::file("read the program for", file))?;
    Ok((begin, end - 1, entry))
}

/// Starts QEMU on the guest, with these arguments besides, and returns the console once it has
/// powered off.
pub(super) fn boot(
    guest: &Guest,
    arguments: &[OsString],
    timeout: Duration,
) -> Result<String, L1Error> {
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
        .args(arguments)
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
