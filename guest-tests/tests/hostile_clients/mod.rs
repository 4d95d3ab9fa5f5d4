//! Local users who attack the arbiter's sockets and those of a VM, and somebody honest beside
//! them: nobody takes a lease from him, or makes him wait.

mod attackers;
mod holder;
mod sys;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use guest_tests::umpire::{self, skipped_without_kvm};
use guest_tests::vm::Vm;
use perfmon_abi::wire::{Extension, Request};
use rustix::process::{Pid, Signal, kill_process, setpriority_process};
use rustix::thread::{Uid, set_thread_res_uid};
use serde_json::json;
use tempfile::TempDir;
use umpire_perfmon::Client;

use attackers::{LINGERS, NOBODY, Stock, Target, descriptors, open_folder};
use holder::{LONG, Line, is_not_kept_waiting};
use rustix::net::SocketType;

/// Most of the arbiter's memory that is resident, in KiB.
const MOST_RESIDENT: u64 = 40 * 1024;

/// One test at a time: others' attackers are not measured.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a test is skipped, as only root can become another user; says so.
fn skipped_without_root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("skipped: {test}: only root can attack as another user");
    }
    !root
}

/// The kernel that a server runs on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kernel {
    ThisOne,
    /// It cannot refuse descriptors.
    Before616,
}

/// Starts something on such a kernel.
fn on<T: Send>(kernel: Kernel, start: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let body = move || {
            if kernel == Kernel::Before616 {
                sys::forget_passrights().expect("root");
            }
            start()
        };
        scope.spawn(body).join().expect("it starts")
    })
}

/// An arbiter of which root has a tenant, and, if `mob` is set, user 65534 as well.
struct Daemon {
    folder: TempDir,
    child: Child,
}

impl Daemon {
    fn start(kernel: Kernel, mob: bool) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        open_folder(folder.path());
        let mut config = "[[tenant]]\nname = \"root\"\nusers = [0]\noperator = true\n\
                          opens-events = true\n"
            .to_owned();
        if mob {
            config += "[[tenant]]\nname = \"mob\"\nusers = [65534]\nmost-leases = 64\n\
                       opens-events = true\nmaximum = { programmable = 1 }\n";
        }
        fs::write(folder.path().join("arbiter.toml"), config).expect("a file");
        let log = File::create(folder.path().join("log")).expect("a log");
        let path = |name: &str| folder.path().join(name);
        let mut command = Command::new(umpire::path());
        command
            .args(["arbiterd", "--budget", "programmable=4,fixed=3"])
            .args(["--socket-mode", "0666", "--socket"])
            .arg(path("socket"))
            .arg("--metrics")
            .arg(path("metrics"))
            .arg("--config")
            .arg(path("arbiter.toml"))
            .arg("--state")
            .arg(path("state"))
            .stdin(Stdio::null())
            .stderr(log);
        let child = on(kernel, || command.spawn().expect("umpire starts"));
        let mut daemon = Daemon { folder, child };
        let begun = Instant::now();
        while UnixStream::connect(daemon.path("socket")).is_err() {
            let ended = daemon.child.try_wait().expect("it is ours");
            assert!(ended.is_none(), "it has ended: {}", daemon.log());
            assert!(
                begun.elapsed() < LONG,
                "it does not start: {}",
                daemon.log()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        daemon
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it is ours");
    }

    /// Its memory that is resident, in KiB.
    fn resident(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let status = status.expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let number = line.and_then(|line| line.split_whitespace().next());
        number.and_then(|text| text.parse().ok()).expect("a number")
    }

    /// All that others can send to.
    fn targets(&self) -> Vec<Target> {
        let call = |method: &str, parameters: &serde_json::Value| {
            let call = json!({ "method": method, "parameters": parameters });
            format!("{call}\0").into_bytes()
        };
        // A thread that has ended has such a number, or none has it.
        let dead = std::thread::spawn(|| rustix::thread::gettid().as_raw_nonzero().get());
        let dead = dead.join().expect("a number");
        let threads =
            json!({ "request": { "counters": [{}], "scope": "thread", "threads": [dead] } });
        let arbiter = "io.umpire.Arbiter";
        let messages = [
            call("org.varlink.service.GetInfo", &json!({})),
            call(&format!("{arbiter}.List"), &json!({})),
            call(&format!("{arbiter}.Acquire"), &threads),
            call(
                "org.varlink.service.GetInterfaceDescription",
                &json!({ "interface": arbiter }),
            ),
            call(&format!("{arbiter}.Renew"), &json!({ "lease": 1 })),
            call(&format!("{arbiter}.Release"), &json!({ "lease": 1 })),
            call(
                &format!("{arbiter}.Explain"),
                &json!({ "request": { "counters": [{}] } }),
            ),
            call(&format!("{arbiter}.Who"), &json!({})),
        ];
        let event = json!({ "lease": 1, "counter": 0, "thread": dead, "config": 196 });
        let events = [event.to_string().into_bytes(), b"{}".to_vec()];
        let metrics = [
            b"GET /metrics HTTP/1.1\r\nAccept: text/plain\r\n\r\n".to_vec(),
            b"GET / HTTP/1.1\r\n".to_vec(),
        ];
        let target = |name: &str, kind, messages: &[Vec<u8>]| Target {
            path: self.path(name),
            kind,
            messages: messages.to_vec(),
        };
        vec![
            target("socket", SocketType::STREAM, &messages),
            target("socket.events", SocketType::SEQPACKET, &events),
            target("metrics", SocketType::STREAM, &metrics),
        ]
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = self.log();
            let end = log.len().saturating_sub(4000);
            eprintln!(
                "the arbiter's log:\n{}",
                String::from_utf8_lossy(&log.as_bytes()[end..])
            );
        }
    }
}

fn arbiter_is_attacked(kernel: Kernel, mob: bool) {
    let daemon = Daemon::start(kernel, mob);
    // Other programs of this machine are not what is measured.
    setpriority_process(Some(Pid::from_child(&daemon.child)), -20).expect("root");
    let mut holder = Line::to(&daemon.path("socket"));
    let lease = holder.lease(Duration::from_secs(2));
    is_not_kept_waiting(&mut || holder.renew(lease), &daemon.targets());
    // Who comes now is served, too.
    Line::to(&daemon.path("socket")).ask("org.varlink.service.GetInfo", &json!({}));
    assert!(scrape(&daemon.path("metrics")).contains("umpire_arbiter_counters"));
    holder.renew(lease);
}

fn scrape(socket: &Path) -> String {
    let mut stream = UnixStream::connect(socket).expect("it listens");
    stream.set_read_timeout(Some(LONG)).expect("a socket");
    let request = b"GET /metrics HTTP/1.1\r\n\r\n";
    stream.write_all(request).expect("it reads");
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    answer
}

#[test]
fn nobody_makes_the_arbiter_wait() {
    let _alone = alone();
    if !skipped_without_root("nobody_makes_the_arbiter_wait") {
        arbiter_is_attacked(Kernel::ThisOne, true);
    }
}

/// Users without a tenant, where the kernel hands over what they send along.
#[test]
fn nobody_makes_the_arbiter_wait_where_descriptors_come() {
    let _alone = alone();
    if !skipped_without_root("nobody_makes_the_arbiter_wait_where_descriptors_come") {
        arbiter_is_attacked(Kernel::Before616, false);
    }
}

#[test]
fn nobody_makes_a_vm_wait_for_its_tools() {
    let _alone = alone();
    let test = "nobody_makes_a_vm_wait_for_its_tools";
    if skipped_without_root(test) || skipped_without_kvm(test) {
        return;
    }
    // Tools may send descriptors to it, whatever the kernel can refuse.
    let flags = ["--control-mode", "0666", "--control-connections", "4096"];
    let vm = Vm::boot_idle(
        &umpire::path(),
        "counters = 6\n[event.cycles]\nrate = 1000\n",
        &flags,
    );
    open_folder(&vm.path("."));
    let request = |command| {
        let request = Request {
            command,
            id: 7,
            context: 0,
            nargs: 0,
            payload: &[],
        };
        request.encode().expect("a request")
    };
    let commands = [
        Extension::Hello,
        Extension::Bind,
        Extension::List,
        Extension::Formats,
    ];
    let target = Target {
        path: vm.path("vm.sock"),
        kind: SocketType::SEQPACKET,
        messages: commands.map(|one| request(one.number())).to_vec(),
    };
    let client = Client::connect(vm.socket()).expect("it listens");
    let mut beat = || {
        client.hello().expect("an answer");
    };
    is_not_kept_waiting(&mut beat, &[target]);
}

/// A connection of user 65534, or of one near it.
fn connection_of(user: u32, socket: &Path) -> UnixStream {
    let socket = socket.to_owned();
    let connect = move || {
        let user = Uid::from_raw(user);
        set_thread_res_uid(user, user, user).expect("root");
        UnixStream::connect(socket).expect("it listens")
    };
    std::thread::spawn(connect).join().expect("a connection")
}

/// Calls that are never whole, and replies that nobody reads, of few users and of many.
#[test]
fn what_waits_for_others_takes_little_memory() {
    let _alone = alone();
    if skipped_without_root("what_waits_for_others_takes_little_memory") {
        return;
    }
    let describe = json!({
        "method": "org.varlink.service.GetInterfaceDescription",
        "parameters": { "interface": "io.umpire.Arbiter" },
    });
    let unread = format!("{describe}\0").repeat(600).into_bytes();
    let half = vec![b' '; 255 * 1024];
    for mob in [false, true] {
        let daemon = Daemon::start(Kernel::ThisOne, mob);
        let mut holder = Line::to(&daemon.path("socket"));
        let lease = holder.lease(Duration::from_secs(60));
        let mut all = Vec::new();
        for n in 0..512 {
            let user = NOBODY - n / 256;
            let mut stream = connection_of(user, &daemon.path("socket"));
            stream.set_nonblocking(true).expect("a socket");
            let mut rest = if n % 2 == 0 { &unread[..] } else { &half[..] };
            // What the arbiter does not take in now it does not have.
            for _ in 0..40 {
                match stream.write(rest) {
                    Ok(count) if count < rest.len() => rest = &rest[count..],
                    Ok(_) => break,
                    Err(_) => std::thread::sleep(Duration::from_millis(1)),
                }
            }
            all.push(stream);
        }
        holder.renew(lease);
        let resident = daemon.resident();
        println!("{resident} KiB, users of a tenant: {mob}");
        assert!(resident <= MOST_RESIDENT, "{resident} KiB");
        // Somebody who is like them, and honest, is served nevertheless.
        let mut honest = connection_of(NOBODY - 7, &daemon.path("socket"));
        honest.set_read_timeout(Some(LONG)).expect("a socket");
        let call = b"{\"method\":\"org.varlink.service.GetInfo\"}\0";
        honest.write_all(call).expect("it reads");
        assert!(matches!(honest.read(&mut [0; 64]), Ok(1..)));
        drop(all);
    }
}

/// The arbiter stands still, as it does when its host is short of time, and the holder's renewal
/// comes meanwhile, with much else.
#[test]
fn what_has_come_is_read_before_leases_end() {
    let _alone = alone();
    if skipped_without_root("what_has_come_is_read_before_leases_end") {
        return;
    }
    let daemon = Daemon::start(Kernel::ThisOne, true);
    let lasts = Duration::from_millis(300);
    let mut holder = Line::to(&daemon.path("socket"));
    let lease = holder.lease(lasts);
    let mut lost = Line::to(&daemon.path("socket"));
    let other = lost.lease(lasts);
    // One that connects before and one that does meanwhile; and behind calls of its own.
    for round in 0..6 {
        let explain = "{\"method\":\"io.umpire.Arbiter.Explain\",\"parameters\":\
                       {\"request\":{\"counters\":[{}]}}}\0";
        let mut crowd = Vec::new();
        for _ in 0..100 {
            crowd.push(connection_of(NOBODY, &daemon.path("socket")));
            holder.renew(lease);
        }
        daemon.signal(Signal::STOP);
        for mut stream in &crowd {
            stream
                .write_all(explain.repeat(10).as_bytes())
                .expect("there is room");
        }
        let mut late = Line::to(&daemon.path("socket"));
        let renews = if round % 2 == 0 {
            &mut holder
        } else {
            &mut late
        };
        let before = 20 * (round / 2);
        for _ in 0..before {
            renews.send("org.varlink.service.GetInfo", &json!({}));
        }
        renews.send("io.umpire.Arbiter.Renew", &json!({ "lease": lease }));
        std::thread::sleep(2 * lasts);
        daemon.signal(Signal::CONT);
        for n in 0..=before {
            let reply = renews.reply();
            assert!(reply.get("error").is_none(), "{round}, {n}: {reply}");
        }
    }
    // Who has sent nothing has lost his own, soon.
    lost.send("io.umpire.Arbiter.Renew", &json!({ "lease": other }));
    assert_eq!(lost.reply()["error"], "io.umpire.Arbiter.Refused");
    holder.renew(lease);
    let begun = Instant::now();
    while holder.ask("io.umpire.Arbiter.List", &json!({}))["leases"] != json!([]) {
        assert!(begun.elapsed() < LONG, "it does not end");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(begun.elapsed() < lasts + Duration::from_secs(2));
}

/// Who connects before the arbiter runs, at a socket of the service manager's, may have sent
/// anything, whatever the kernel can refuse.
#[test]
fn what_was_sent_before_the_start_is_not_waited_for() {
    let _alone = alone();
    let test = "what_was_sent_before_the_start_is_not_waited_for";
    if skipped_without_root(test) {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).expect("a socket");
    let target = Target {
        path: path.clone(),
        kind: SocketType::STREAM,
        messages: vec![b"{}\0".to_vec(), b"{\"method\":\"a.B\"}\0".to_vec()],
    };
    let mut stock = Stock::new();
    let sent = (0..40).filter(|turn| descriptors(&target, &mut stock, *turn));
    assert!(sent.count() > 0, "nobody has attacked");
    let script = "exec 3<&0 </dev/null; export LISTEN_FDS=1 LISTEN_PID=$$; exec \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh"]).arg(umpire::path());
    command.args(["arbiterd", "--budget", "programmable=4"]);
    command.stdin(OwnedFd::from(listener)).stderr(Stdio::null());
    let begun = Instant::now();
    let mut child = command.spawn().expect("a shell");
    let info = Line::to(&path).ask("org.varlink.service.GetInfo", &json!({}));
    let took = begun.elapsed();
    child.kill().expect("it is ours");
    child.wait().expect("it is ours");
    assert!(info.get("interfaces").is_some(), "{info}");
    println!("answered after {took:?}");
    assert!(took < LINGERS, "it was {took:?} before anybody was served");
}
