//! Holders on made-up hosts.

use std::os::unix::fs::symlink;

use super::*;

struct Host(tempfile::TempDir);

impl Host {
    fn new(watchdog: &[(&str, &str)]) -> Self {
        let host = Host(tempfile::tempdir().expect("a folder"));
        let kernel = host.0.path().join("proc/sys/kernel");
        fs::create_dir_all(&kernel).expect("a folder");
        for (name, content) in watchdog {
            fs::write(kernel.join(name), content).expect("a file");
        }
        host
    }

    fn process(&self, pid: &str, fds: &[&str]) {
        let folder = self.0.path().join("proc").join(pid);
        fs::create_dir_all(folder.join("fd")).expect("a folder");
        fs::write(folder.join("comm"), "pe\u{7}rf\n").expect("a file");
        fs::write(folder.join("status"), "Name:\tperf\nUid:\t1000\t0\t0\t0\n").expect("a file");
        for (fd, target) in fds.iter().enumerate() {
            symlink(target, folder.join("fd").join(fd.to_string())).expect("a link");
        }
    }

    fn remove(&self, path: &str) {
        let path = self.0.path().join("proc").join(path);
        fs::remove_file(&path)
            .or_else(|_| fs::remove_dir_all(&path))
            .expect("removed");
    }

    fn check(&self, ours: &[u32], expected: &[Holder]) {
        let seen = holders(self.0.path(), ours).expect("holders");
        assert_eq!(seen.found, expected);
        assert_eq!(seen.hidden, 0);
    }
}

fn perf(pid: u32, events: u32, msr: &[u32]) -> Holder {
    Holder::Process {
        pid,
        ancestors: Vec::new(),
        uid: 1000,
        comm: "pe\u{fffd}rf".into(),
        events,
        msr_cpus: msr.iter().copied().collect(),
    }
}

const EVENT: &str = "anon_inode:[perf_event]";

/// One that does not answer is not one that has nothing.
#[test]
fn who_cannot_be_looked_at_is_hidden() {
    let host = Host::new(&[]);
    host.process("7", &[EVENT]);
    host.process("8", &[]);
    // No link, which no rights can make one of.
    let odd = host.0.path().join("proc/8/fd/0");
    fs::write(odd, "").expect("a file");
    let seen = holders(host.0.path(), &[]).expect("holders");
    assert_eq!((seen.found.len(), seen.hidden), (1, 1));
    host.remove("7/status");
    // It has ended since its descriptors were seen.
    let seen = holders(host.0.path(), &[]).expect("holders");
    assert_eq!((seen.found.len(), seen.hidden), (0, 1));
}

#[test]
fn who_started_a_process() {
    let host = Host::new(&[]);
    for (pid, parent) in [("20", 9), ("9", 4), ("4", 1), ("30", 31), ("31", 30)] {
        host.process(
            pid,
            if pid == "20" || pid == "30" {
                &[EVENT]
            } else {
                &[]
            },
        );
        let status = format!("Name:\tsh\nPPid:\t{parent}\nUid:\t1000\t0\t0\t0\n");
        let path = host.0.path().join("proc").join(pid).join("status");
        fs::write(path, status).expect("a file");
    }
    let seen = holders(host.0.path(), &[]).expect("holders");
    let ancestors = |index: usize| match &seen.found[index] {
        Holder::Process { ancestors, .. } => ancestors.clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!(ancestors(0), [9, 4]);
    // A circle, which only a race can show, is left after a while.
    assert_eq!(ancestors(1)[..3], [31, 30, 31]);
}

#[test]
fn processes() {
    let host = Host::new(&[]);
    host.process("20", &["/dev/null", EVENT, "socket:[1]", EVENT]);
    host.process(
        "3",
        &[
            "/dev/cpu/1/msr",
            "/dev/cpu/0/msr",
            "/dev/cpu/x/msr",
            "/dev/cpu/0/cpuid",
        ],
    );
    host.process("4", &["/dev/null", "anon_inode:[eventfd]"]);
    host.process("5", &[EVENT]);
    host.process("self", &[EVENT]);
    host.check(&[5], &[perf(3, 0, &[0, 1]), perf(20, 2, &[])]);
    host.check(&[3, 5, 20], &[]);
    // They end while they are looked at.
    host.remove("20/status");
    host.remove("3/fd");
    host.remove("5/comm");
    host.check(&[], &[]);
}

#[test]
fn the_watchdog() {
    let cpus = "0-3".parse::<CpuSet>().expect("a list");
    let mask = ("watchdog_cpumask", "0-3\n");
    let on = [Holder::NmiWatchdog { cpus }];
    Host::new(&[("nmi_watchdog", "1\n"), mask]).check(&[], &on);
    for off in [
        &[][..],
        &[mask],
        &[("nmi_watchdog", "0\n"), mask],
        // Damaged.
        &[("nmi_watchdog", ""), mask],
        &[("nmi_watchdog", "yes"), mask],
        &[("nmi_watchdog", "1")],
        &[("nmi_watchdog", "1"), ("watchdog_cpumask", "f-0")],
    ] {
        Host::new(off).check(&[], &[]);
    }
}

#[test]
fn threads_of_the_kernel() {
    let folder = tempfile::tempdir().expect("a folder");
    for (stat, expected) in [
        ("2 (kthreadd) S 0 0 0 0 -1 2129984 0\n", true),
        ("7 (a) b) 1 2) S 2 0 0 0 -1 69238848 0\n", true),
        ("1 (sh) S 0 1 1 0 -1 4194560 0\n", false),
        ("1 (sh", false),
        ("", false),
    ] {
        fs::write(folder.path().join("stat"), stat).expect("a file");
        assert_eq!(is_kernel_thread(folder.path()), expected, "{stat:?}");
    }
    assert!(!is_kernel_thread(&folder.path().join("gone")));
}

#[test]
fn without_proc_nobody_is_seen() {
    let root = tempfile::tempdir().expect("a folder");
    let error = holders(root.path(), &[]).expect_err("an error");
    assert_eq!(error.path, root.path().join("proc"));
}

/// The real one: this process, with an event open if the kernel allows any.
#[test]
fn this_host() {
    let seen = holders(Path::new("/"), &[]).expect("holders");
    let pids = seen.found.iter().filter_map(|holder| match holder {
        Holder::Process { pid, .. } => Some(*pid),
        Holder::NmiWatchdog { .. } => None,
    });
    assert!(pids.is_sorted());
}

#[test]
fn deficits() {
    let check = |numbers: [u32; 4], expected: (u32, u32)| {
        let [capacity, free, leased, explained] = numbers;
        let found = unexplained(capacity, free, leased, explained);
        assert_eq!(
            (found.explained, found.unexplained),
            expected,
            "{numbers:?}"
        );
    };
    check([4, 4, 0, 0], (0, 0));
    check([4, 3, 0, 1], (1, 0));
    check([4, 1, 1, 1], (1, 1));
    check([4, 1, 3, 1], (0, 0));
    // More explained than missing, and numbers that cannot be.
    check([4, 3, 0, 9], (1, 0));
    check([4, 4, 4, 1], (0, 0));
    check([0, u32::MAX, u32::MAX, u32::MAX], (0, 0));
    check([u32::MAX, 0, 0, 0], (0, u32::MAX));
    assert_eq!(UNEXPLAINED, "firmware or unknown");
}
