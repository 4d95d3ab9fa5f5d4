//! What the arbiter does about its host: the NMI watchdog, and CPUs that come and go. The
//! kernel's files are made up.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use umpire_lease::{Arbiter, CallError, Counters, Event, Held, Next, Request, What};

use super::fixture::{Daemon, LONG, programmable};

const BOOT: &str = "3b0f4f5c-0d6e-4d0e-9a61-2f6f0b3d1c55";

/// A made-up host.
struct Root(TempDir);

impl Root {
    fn new(watchdog: &str) -> Self {
        let root = Root(tempfile::tempdir().expect("a folder"));
        for (path, text) in [
            ("proc/sys/kernel/random/boot_id", BOOT),
            ("proc/sys/kernel/nmi_watchdog", watchdog),
            ("proc/sys/kernel/watchdog_cpumask", "0-3"),
            ("sys/devices/system/cpu/present", "0-3"),
            ("sys/devices/system/cpu/online", "0-3"),
        ] {
            root.set(path, text);
        }
        root
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn set(&self, path: &str, text: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        // As the kernel does it: nobody sees half of it.
        let beside = path.with_extension("new");
        fs::write(&beside, format!("{text}\n")).expect("a file");
        fs::rename(beside, path).expect("a file");
    }

    fn watchdog(&self) -> String {
        let value = fs::read_to_string(self.path("proc/sys/kernel/nmi_watchdog"));
        value.expect("a file").trim().to_owned()
    }

    /// The watchdog is so, if not now then soon.
    fn is_soon(&self, value: &str) {
        let until = Instant::now() + LONG;
        while self.watchdog() != value {
            assert!(Instant::now() < until, "the watchdog is not {value}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn daemon(&self, config: &str) -> Daemon {
        let root = self.0.path().display().to_string();
        let budget = "programmable=4,fixed=2";
        Daemon::with(&["--budget", budget, "--host-root", &root], config)
    }
}

/// Fixed-function counters of CPU 0.
fn fixed(count: u32) -> Request {
    Request {
        counters: vec![Counters::fixed(count)],
        waits_ms: Some(-1),
        ..programmable(0)
    }
}

fn granted(daemon: &Daemon, request: &Request) -> Held {
    let mut held = daemon.connect().acquire(request).expect("it can be had");
    held.wait().expect("its turn comes");
    held
}

fn refused(daemon: &Daemon, request: &Request) -> String {
    let request = Request {
        waits_ms: None,
        ..request.clone()
    };
    match daemon.connect().acquire(&request) {
        Err(CallError::Refused(why)) => {
            let by = why.held_by.iter().map(|lease| lease.label.as_str());
            format!("{} {}", why.reason, by.collect::<String>())
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_watchdog_is_off_while_a_guaranteed_lease_needs_its_counter() {
    let root = Root::new("1");
    let config = "grace-ms = 20\nclaim-window-ms = 800\n[watchdog]\nkeep = false\n";
    let mut daemon = root.daemon(config);
    // One counter is enough for both.
    let small = granted(&daemon, &fixed(1));
    assert_eq!(root.watchdog(), "1");
    drop(small);
    let effort = Request {
        guaranteed: Some(false),
        ..fixed(2)
    };
    assert_eq!(refused(&daemon, &effort), "held nmi-watchdog");
    let held = granted(&daemon, &fixed(2));
    assert_eq!(root.watchdog(), "0", "it is off before anybody hears of it");
    let old = daemon.folder.path().join("state/nmi-watchdog");
    assert!(
        fs::read_to_string(&old)
            .expect("the old value")
            .contains(" 1 ")
    );
    // Whoever turns it on meanwhile does so in vain.
    root.set("proc/sys/kernel/nmi_watchdog", "1");
    root.is_soon("0");
    // The arbiter dies, and the holder counts on.
    let (id, generation) = (held.lease().id, held.lease().generation);
    daemon.kill();
    daemon.begin();
    let held = daemon.connect().claim(id, Some(generation));
    let held = held.expect("the lease is there");
    std::thread::sleep(Duration::from_millis(1200));
    assert_eq!(root.watchdog(), "0");
    drop(held);
    root.is_soon("1");
    assert!(!old.exists());
    // After a normal end, too, it stays off for who holds its counter.
    let held = granted(&daemon, &fixed(2));
    let (id, generation) = (held.lease().id, held.lease().generation);
    assert_eq!(root.watchdog(), "0");
    daemon.end();
    assert_eq!(root.watchdog(), "0");
    assert!(daemon.log().contains("stays off"), "{}", daemon.log());
    daemon.begin();
    let held = daemon.connect().claim(id, Some(generation));
    let held = held.expect("the lease is there");
    std::thread::sleep(Duration::from_millis(1200));
    assert_eq!(root.watchdog(), "0");
    drop(held);
    root.is_soon("1");
    // Nobody comes back to it.
    let held = granted(&daemon, &fixed(2));
    daemon.end();
    drop(held);
    assert_eq!(root.watchdog(), "0");
    daemon.begin();
    root.is_soon("1");
    // Its holder dies with the arbiter.
    let held = granted(&daemon, &fixed(2));
    assert_eq!(root.watchdog(), "0");
    daemon.kill();
    drop(held);
    assert_eq!(root.watchdog(), "0");
    daemon.begin();
    root.is_soon("1");
}

#[test]
fn the_watchdog_is_restored_whenever_the_arbiter_is_killed() {
    let root = Root::new("1");
    let config = "grace-ms = 0\nclaim-window-ms = 100\n[watchdog]\nkeep = false\n";
    let mut daemon = root.daemon(config);
    let socket = daemon.socket();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let held = Arbiter::connect(&socket).and_then(|one| one.acquire(&fixed(2)));
                if let Ok(mut held) = held {
                    let _ = held.wait();
                }
            }
        });
        for kill in 0..25 {
            std::thread::sleep(Duration::from_millis(10 + kill * 7 % 31));
            daemon.kill();
            daemon.begin();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    root.is_soon("1");
    let old = daemon.folder.path().join("state/nmi-watchdog");
    let until = Instant::now() + LONG;
    while old.exists() {
        assert!(
            Instant::now() < until,
            "what was kept is not needed any more"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn the_watchdogs_counter_is_kept_or_some_tenants() {
    let root = Root::new("1");
    let kept = root.daemon("[watchdog]\n");
    assert_eq!(refused(&kept, &fixed(2)), "held nmi-watchdog");
    drop(granted(&kept, &fixed(1)));
    let lease = kept.connect().leases().expect("it answers").remove(0);
    let error = kept.refused(&["revoke", &lease.id.to_string()]);
    assert!(error.contains("[watchdog]"), "{error}");
    drop(kept);
    // What is stated is taken at its word.
    let stated = root.daemon("");
    drop(granted(&stated, &fixed(2)));
    assert_eq!(root.watchdog(), "1");
    drop(stated);
    let me = rustix::process::geteuid().as_raw();
    let tenant = |name| format!("[[tenant]]\nname = \"{name}\"\nusers = [{me}]\noperator = true\n");
    let config = format!(
        "grace-ms = 20\n[watchdog]\nkeep = false\nfor = [\"blue\"]\n{}{}",
        tenant("green"),
        tenant("blue")
    );
    let some = root.daemon(&config);
    let of = |tenant: &str, waits_ms| Request {
        tenant: Some(tenant.to_owned()),
        waits_ms: Some(waits_ms),
        ..fixed(2)
    };
    let green = some.connect().acquire(&of("green", 300));
    let ended = green.expect("it waits").wait();
    assert!(ended.is_err(), "{ended:?}");
    let blue = granted(&some, &of("blue", -1));
    assert_eq!(root.watchdog(), "0");
    drop(blue);
    root.is_soon("1");
}

#[test]
fn a_watchdog_that_cannot_be_turned_off_breaks_the_lease() {
    let root = Root::new("1");
    let mut daemon = root.daemon("grace-ms = 0\n[watchdog]\nkeep = false\n");
    daemon.kill();
    // The old value cannot be kept, so the watchdog is not touched.
    let state = daemon.folder.path().join("state");
    fs::create_dir_all(state.join("nmi-watchdog.new")).expect("a folder");
    daemon.begin();
    let mut held = granted(&daemon, &fixed(2));
    let event = next_event(&mut held);
    assert_eq!(event.what, What::Broken, "{event:?}");
    assert_eq!(root.watchdog(), "1");
    assert!(
        daemon.log().contains("cannot be turned off"),
        "{}",
        daemon.log()
    );
    fs::remove_dir(state.join("nmi-watchdog.new")).expect("a folder");
    assert_eq!(next_event(&mut held).what, What::Mended);
    assert_eq!(root.watchdog(), "0");
}

fn next_event(held: &mut Held) -> Event {
    match held.next(Some(LONG)).expect("it lasts") {
        Next::Event(event) => *event,
        Next::Nothing => panic!("nothing happens"),
    }
}

#[test]
fn cpus_come_and_go() {
    let root = Root::new("0");
    root.set("sys/devices/system/cpu/online", "0-2");
    let daemon = root.daemon("");
    let on = |cpus: &str| Request {
        cpus: Some(cpus.to_owned()),
        ..programmable(1)
    };
    assert_eq!(refused(&daemon, &on("3")), "no-such-cpu ");
    let mut held = daemon.acquire(&on("1-2"));
    root.set("sys/devices/system/cpu/online", "0-1");
    let event = next_event(&mut held);
    assert_eq!(event.what, What::CpusGone, "{event:?}");
    assert!(event.message.contains("CPUs 2 "), "{event:?}");
    assert_eq!(event.lease.holds, 1);
    assert_eq!(refused(&daemon, &on("2")), "no-such-cpu ");
    root.set("sys/devices/system/cpu/online", "0-3");
    assert_eq!(next_event(&mut held).what, What::CpusBack);
    daemon.acquire(&on("3"));
}

#[test]
fn stated_cpus_are_there_by_their_word() {
    let root = Root::new("0");
    let path = root.0.path().display().to_string();
    let config = "[[pmu]]\nprogrammable = 4\ncpus = \"0-63\"\n";
    let daemon = Daemon::with(&["--host-root", &path], config);
    let on = |cpus: &str| Request {
        cpus: Some(cpus.to_owned()),
        ..programmable(1)
    };
    drop(daemon.acquire(&on("2-63")));
    root.set("sys/devices/system/cpu/online", "0-1");
    std::thread::sleep(Duration::from_millis(1200));
    drop(daemon.acquire(&on("4-63")));
    assert_eq!(refused(&daemon, &on("2")), "no-such-cpu ");
}

#[test]
fn a_watchdog_that_another_configuration_turned_off_is_restored() {
    let root = Root::new("1");
    let mut daemon = root.daemon("grace-ms = 0\n[watchdog]\nkeep = false\n");
    let held = granted(&daemon, &fixed(2));
    assert_eq!(root.watchdog(), "0");
    daemon.kill();
    drop(held);
    fs::write(daemon.folder.path().join("arbiter.toml"), "").expect("the configuration");
    daemon.begin();
    assert_eq!(root.watchdog(), "1");
}

#[test]
fn a_configuration_that_is_read_again_has_the_watchdog_looked_after() {
    let root = Root::new("1");
    let daemon = root.daemon("grace-ms = 0\n");
    let path = daemon.folder.path().join("arbiter.toml");
    drop(granted(&daemon, &fixed(2)));
    assert_eq!(
        root.watchdog(),
        "1",
        "counters are stated: it is left alone"
    );
    let reload = |config: &str| {
        fs::write(&path, config).expect("the configuration");
        let pid = rustix::process::Pid::from_raw(daemon.pid()).expect("a pid");
        rustix::process::kill_process(pid, rustix::process::Signal::HUP).expect("it is ours");
    };
    let until = |now: &dyn Fn() -> bool| {
        let began = Instant::now();
        while !now() {
            assert!(began.elapsed() < LONG, "{}", daemon.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let is_kept = || {
        let list = daemon.out(&["who", "0"]);
        list.contains("nmi-watchdog")
    };
    reload("grace-ms = 0\n[watchdog]\nkeep = false\n");
    until(&is_kept);
    let held = granted(&daemon, &fixed(2));
    assert_eq!(root.watchdog(), "0");
    reload("grace-ms = 0\n");
    until(&|| root.watchdog() == "1" && !is_kept());
    drop(held);
}
