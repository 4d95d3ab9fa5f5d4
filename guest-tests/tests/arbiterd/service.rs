//! The arbiter below a service manager: a socket that is given, readiness, units.

use std::fs;
use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use umpire_lease::Arbiter;

use super::fixture::{Daemon, LONG, programmable};

/// sd_listen_fds(3): listens, and becomes the arbiter with the socket as descriptor 3.
const ACTIVATE: &str = r#"
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
os.dup2(listener.fileno(), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
os.execv(sys.argv[2], sys.argv[2:])
"#;

#[test]
fn a_socket_that_was_given_is_served_and_readiness_is_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let [socket, notify] = ["socket", "notify"].map(|name| folder.path().join(name));
    let ready = UnixDatagram::bind(&notify).expect("a socket");
    ready.set_read_timeout(Some(LONG)).expect("a socket");
    let mut command = Command::new("python3");
    command
        .arg("-c")
        .arg(ACTIVATE)
        .arg(&socket)
        .arg(guest_tests::umpire::path());
    command.args(["arbiterd", "--budget", "programmable=4", "--socket"]);
    command
        .arg(folder.path().join("another"))
        // Without a journal it would wait for holders of an arbiter before.
        .arg("--state")
        .arg(folder.path().join("state"))
        .env("NOTIFY_SOCKET", &notify);
    let child = command.stdin(Stdio::null()).spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => {
            println!(
                "skipped: a_socket_that_was_given_is_served_and_readiness_is_told: python3: {error}"
            );
            return;
        }
    };
    let mut told = [0; 64];
    let length = ready.recv(&mut told).expect("it is ready");
    assert!(
        told[..length].starts_with(b"READY=1"),
        "{:?}",
        &told[..length]
    );
    let held = Arbiter::connect(&socket)
        .expect("it listens")
        .acquire(&programmable(2));
    assert_eq!(held.expect("it can be had").lease().holds, 2);
    assert!(
        !folder.path().join("another").exists(),
        "it has the socket that was given"
    );
    // It leaves the socket to whoever made it.
    end_well(&mut child);
    assert!(socket.exists());
}

/// SIGTERM ends it, and that is no failure.
fn end_well(child: &mut Child) {
    let pid = i32::try_from(child.id())
        .ok()
        .and_then(rustix::process::Pid::from_raw);
    rustix::process::kill_process(pid.expect("a pid"), rustix::process::Signal::TERM)
        .expect("it is ours");
    let until = Instant::now() + LONG;
    let status = loop {
        if let Some(status) = child.try_wait().expect("it is ours") {
            break status;
        }
        assert!(Instant::now() < until, "it does not end");
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(status.success(), "{status}");
}

/// As a service manager does it: the arbiter starts with the first who connects.
#[test]
fn systemds_own_tool_activates_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("socket");
    let child = Command::new("systemd-socket-activate")
        .arg("-l")
        .arg(&socket)
        .arg(guest_tests::umpire::path())
        .args(["arbiterd", "--budget", "programmable=4", "--socket"])
        .arg(folder.path().join("another"))
        .arg("--state")
        .arg(folder.path().join("state"))
        .stdin(Stdio::null())
        .spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => {
            println!("skipped: systemds_own_tool_activates_it: systemd-socket-activate: {error}");
            return;
        }
    };
    let until = Instant::now() + LONG;
    let arbiter = loop {
        match Arbiter::connect(&socket) {
            Ok(arbiter) => break arbiter,
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let held = arbiter.acquire(&programmable(3)).expect("it can be had");
    assert_eq!(held.lease().holds, 3);
    drop(held);
    end_well(&mut child);
    assert!(socket.exists());
}

/// What a service manager is told, up to what has `end`.
fn told(socket: &UnixDatagram, end: &str) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    while !all.last().is_some_and(|last| last.contains(end)) {
        let mut bytes = [0; 4096];
        let length = socket.recv(&mut bytes);
        let length = length.unwrap_or_else(|error| panic!("no {end}: {error}; {all:?}"));
        all.push(String::from_utf8_lossy(&bytes[..length]).into_owned());
    }
    all
}

#[test]
fn the_manager_is_told_of_start_reload_and_end_wherever_it_listens() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("notify").display().to_string();
    let abstract_name = format!("umpire-test-{}", std::process::id());
    for name in [path, format!("@{abstract_name}/x")] {
        let address = match name.strip_prefix('@') {
            Some(name) => SocketAddr::from_abstract_name(name),
            None => SocketAddr::from_pathname(&name),
        };
        let manager = UnixDatagram::bind_addr(&address.expect("an address")).expect("a socket");
        manager.set_read_timeout(Some(LONG)).expect("a socket");
        let config = folder.path().join("c.toml");
        let good = "[[pmu]]\nprogrammable = 4\n[[tenant]]\nname = \"a\"\nusers = [0]\n";
        fs::write(&config, good).expect("a file");
        let mut command = Command::new(guest_tests::umpire::path());
        command.arg("arbiterd").arg("--config").arg(&config);
        command.arg("--socket").arg(folder.path().join("socket"));
        command
            .args(["--metrics"])
            .arg(folder.path().join("metrics"));
        // Half of it is soon over.
        command
            .env("NOTIFY_SOCKET", &name)
            .env("WATCHDOG_USEC", "400000");
        let mut child = command.stdin(Stdio::null()).spawn().expect("it starts");
        let hangup = || {
            let pid = i32::try_from(child.id())
                .ok()
                .and_then(rustix::process::Pid::from_raw);
            rustix::process::kill_process(pid.expect("a pid"), rustix::process::Signal::HUP)
                .expect("it is ours");
        };
        told(&manager, "READY=1");
        told(&manager, "WATCHDOG=1");
        for (text, status, stale) in [
            (good.to_owned(), "read again", "arbiter_config_stale 0"),
            (
                format!("{good}nonsense = [\n"),
                "c.toml:6:",
                "arbiter_config_stale 1",
            ),
            (
                format!("{good}groups = [\"nosuchgroup\"]\n"),
                "no group 'nosuchgroup'",
                "arbiter_config_stale 1",
            ),
            (good.to_owned(), "read again", "arbiter_config_stale 0"),
        ] {
            fs::write(&config, &text).expect("a file");
            hangup();
            let all = told(&manager, "READY=1");
            let all: Vec<&String> = all.iter().filter(|one| *one != "WATCHDOG=1").collect();
            let begins = |line: &str| line.starts_with("MONOTONIC_USEC=") && line.len() > 15;
            assert_eq!(all.len(), 2, "{all:?}");
            assert!(all[0].starts_with("RELOADING=1\n"), "{all:?}");
            assert!(all[0].lines().any(begins), "{all:?}");
            assert!(
                all[1].contains("STATUS=") && all[1].contains(status),
                "{all:?}"
            );
            let scraped = || {
                let socket = folder.path().join("metrics");
                let mut metrics = UnixStream::connect(socket).expect("it listens");
                metrics
                    .write_all(b"GET /metrics HTTP/1.0\r\n\r\n")
                    .expect("it reads");
                let mut said = String::new();
                metrics.read_to_string(&mut said).expect("it answers");
                said
            };
            let until = Instant::now() + LONG;
            // The text is made at most five times a second.
            while !scraped().contains(stale) {
                assert!(Instant::now() < until, "{stale}: {}", scraped());
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        end_well(&mut child);
        told(&manager, "STOPPING=1");
    }
}

#[test]
fn systemd_takes_the_units() {
    let name = "systemd_takes_the_units";
    let units = Path::new(env!("CARGO_MANIFEST_DIR")).join("../arbiter/daemon/systemd");
    let folder = tempfile::tempdir().expect("a folder");
    for unit in ["umpire-arbiterd.service", "umpire-arbiterd.socket"] {
        let text = std::fs::read_to_string(units.join(unit)).expect("a unit");
        // It is not installed here.
        let program = guest_tests::umpire::path().display().to_string();
        let text = text.replace("/usr/bin/umpire", &program);
        std::fs::write(folder.path().join(unit), text).expect("a file");
    }
    let mut command = Command::new("systemd-analyze");
    command
        .args(["verify", "--man=no"])
        .arg(folder.path().join("umpire-arbiterd.service"));
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => {
            println!("skipped: {name}: systemd-analyze: {error}");
            return;
        }
    };
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if said.contains("Failed to") && !said.contains("umpire") {
        println!(
            "skipped: {name}: systemd-analyze does not work here: {}",
            said.lines().next().unwrap_or_default()
        );
        return;
    }
    assert!(
        output.status.success() && !said.contains("umpire-arbiterd"),
        "{said}"
    );
}

#[test]
fn it_may_have_as_many_files_open_as_the_host_allows() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut daemon = Daemon::in_folder(folder, &["--budget", "programmable=4"], "");
    daemon.limited("ulimit -Sn 64; exec \"$0\" \"$@\"");
    let limits = fs::read_to_string(format!("/proc/{}/limits", daemon.pid()));
    let limits = limits.expect("the limits of a process of ours");
    let files = limits
        .lines()
        .find(|line| line.starts_with("Max open files"));
    let fields: Vec<&str> = files.expect("a line").split_whitespace().collect();
    assert_eq!(fields[3], fields[4], "{limits}");
    assert_ne!(fields[3], "64");
}
