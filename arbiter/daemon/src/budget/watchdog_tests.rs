//! The watchdog's value on made-up hosts: crashes, other boots, damage, refusals.

use std::os::unix::fs::symlink;

use super::*;

struct Host {
    root: tempfile::TempDir,
    state: tempfile::TempDir,
}

const BOOT: &str = "3b0f4f5c-0d6e-4d0e-9a61-2f6f0b3d1c55";

impl Host {
    fn new(value: &str) -> Self {
        let host = Host {
            root: tempfile::tempdir().expect("a folder"),
            state: tempfile::tempdir().expect("a folder"),
        };
        let random = host.root.path().join("proc/sys/kernel/random");
        fs::create_dir_all(&random).expect("a folder");
        fs::write(random.join("boot_id"), format!("{BOOT}\n")).expect("a file");
        host.set(value);
        host
    }

    fn switch(&self) -> PathBuf {
        self.root.path().join("proc/sys/kernel/nmi_watchdog")
    }

    fn set(&self, value: &str) {
        fs::write(self.switch(), value).expect("a file");
    }

    fn value(&self) -> String {
        fs::read_to_string(self.switch()).expect("a file")
    }

    fn kept(&self) -> Option<String> {
        fs::read_to_string(self.state.path().join(STATE)).ok()
    }

    fn keep(&self, content: impl AsRef<[u8]>) {
        fs::write(self.state.path().join(STATE), content).expect("a file");
    }

    fn watchdog(&self) -> Watchdog {
        Watchdog::new(self.root.path(), self.state.path())
    }

    fn recover(&self) -> Restored {
        Watchdog::recover(self.root.path(), self.state.path()).expect("recovered")
    }
}

#[test]
fn given_back_and_restored() {
    let host = Host::new("1\n");
    let watchdog = host.watchdog();
    assert_eq!(watchdog.give_back().expect("freed"), GivenBack::Freed);
    assert_eq!(host.value(), "0\n");
    assert_eq!(host.kept(), Some(format!("{MAGIC} 1 {BOOT}\n")));
    // Once more changes nothing, and forgets nothing.
    assert_eq!(watchdog.give_back().expect("off"), GivenBack::WasOff);
    assert_eq!(watchdog.restore().expect("restored"), Restored::Done);
    assert_eq!((host.value().as_str(), host.kept()), ("1\n", None));
    assert_eq!(watchdog.restore().expect("nothing"), Restored::Nothing);
    assert_eq!(host.value(), "1\n");
}

#[test]
fn its_cpus_are_told_while_it_is_on_and_while_it_is_given_back() {
    let host = Host::new("1\n");
    let cpus = host.switch().with_file_name("watchdog_cpumask");
    fs::write(cpus, "0-3\n").expect("a file");
    let all: CpuSet = "0-3".parse().expect("a list");
    let watchdog = host.watchdog();
    let look = || {
        let look = (watchdog.on(), watchdog.given_back());
        (look.0.expect("on"), look.1.expect("given back"))
    };
    assert_eq!(look(), (Some(all.clone()), None));
    watchdog.give_back().expect("freed");
    assert_eq!(look(), (None, Some(all)));
    host.keep(format!("{MAGIC} 1 another-boot\n"));
    assert_eq!(look(), (None, None));
    host.keep("damaged");
    assert_eq!(look(), (None, None));
    fs::remove_file(host.switch()).expect("removed");
    assert_eq!(look(), (None, None));
}

#[test]
fn nothing_to_give_back() {
    let host = Host::new("0\n");
    assert_eq!(host.watchdog().give_back().expect("off"), GivenBack::WasOff);
    assert_eq!(host.kept(), None);
    fs::remove_file(host.switch()).expect("removed");
    assert_eq!(
        host.watchdog().give_back().expect("none"),
        GivenBack::NoWatchdog
    );
    assert_eq!(host.recover(), Restored::Nothing);
}

#[test]
fn after_a_crash() {
    let host = Host::new("1\n");
    host.watchdog().give_back().expect("freed");
    assert_eq!(host.recover(), Restored::Done);
    assert_eq!((host.value().as_str(), host.kept()), ("1\n", None));
    // Before the change was made.
    host.keep(format!("{MAGIC} 1 {BOOT}\n"));
    assert_eq!(host.recover(), Restored::OnAlready);
    assert_eq!((host.value().as_str(), host.kept()), ("1\n", None));
    // In another boot, whose watchdog is off for a reason of its own.
    host.set("0\n");
    host.keep(format!("{MAGIC} 1 another\n"));
    assert_eq!(host.recover(), Restored::EarlierBoot);
    assert_eq!((host.value().as_str(), host.kept()), ("0\n", None));
}

#[test]
fn a_file_cut_at_each_byte() {
    let whole = format!("{MAGIC} 1 {BOOT}\n");
    for length in 0..=whole.len() {
        let host = Host::new("0\n");
        host.keep(&whole[..length]);
        let (restored, value) = if length == whole.len() {
            (Restored::Done, "1\n")
        } else {
            (Restored::Damaged, "0\n")
        };
        assert_eq!(host.recover(), restored, "{length}");
        assert_eq!((host.value().as_str(), host.kept()), (value, None));
    }
    for damage in [
        &b"\xff\xfe\n"[..],
        b"umpire-nmi-watchdog-2 1 x\n",
        b"umpire-nmi-watchdog-1 -1 x\n",
        b"umpire-nmi-watchdog-1 1 x y\n",
        b"umpire-nmi-watchdog-1 1\n",
    ] {
        let host = Host::new("0\n");
        host.keep(damage);
        assert_eq!(host.recover(), Restored::Damaged, "{damage:?}");
        assert_eq!(host.value(), "0\n");
    }
}

#[test]
fn what_cannot_be_kept_is_not_changed() {
    let host = Host::new("1\n");
    let nowhere = Watchdog::new(host.root.path(), &host.root.path().join("nowhere"));
    let error = nowhere.give_back().expect_err("no folder");
    assert_eq!((error.action, error.is_missing()), ("write", true));
    assert_eq!(host.value(), "1\n");
    // A boot without an id is one that nobody can tell from another.
    fs::remove_file(host.root.path().join("proc/sys/kernel/random/boot_id")).expect("removed");
    let error = host.watchdog().give_back().expect_err("no boot id");
    assert!(error.path.ends_with("random/boot_id"), "{error}");
    assert_eq!((host.value().as_str(), host.kept()), ("1\n", None));
    host.set("on\n");
    let error = host.watchdog().give_back().expect_err("no number");
    assert!(error.to_string().contains("\"on\""), "{error}");
}

/// A number of the kernel that nobody can write takes the watchdog's place.
#[test]
fn what_cannot_be_written_is_forgotten_or_kept() {
    let host = Host::new("1\n");
    fs::remove_file(host.switch()).expect("removed");
    symlink("/proc/sys/kernel/cap_last_cap", host.switch()).expect("a link");
    let error = host.watchdog().give_back().expect_err("not to be written");
    assert_eq!((error.action, &error.path), ("write", &host.switch()));
    assert_eq!(host.kept(), None);
    // Restoring is tried again.
    fs::remove_file(host.switch()).expect("removed");
    host.set("0\n");
    host.keep(format!("{MAGIC} 1 {BOOT}\n"));
    fs::remove_file(host.switch()).expect("removed");
    host.watchdog().restore().expect_err("no switch");
    assert!(host.kept().is_some());
    host.set("0\n");
    assert_eq!(host.recover(), Restored::Done);
}
