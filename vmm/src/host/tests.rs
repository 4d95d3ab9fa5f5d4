//! Tests on made-up system files.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;

use tempfile::TempDir;

use super::*;

/// Answers with this error number, or success.
struct Answer(Option<i32>);

impl PerfProbe for Answer {
    fn open_hardware_cycles(&self) -> io::Result<()> {
        match self.0 {
            None => Ok(()),
            Some(number) => Err(io::Error::from_raw_os_error(number)),
        }
    }
}

fn root(files: &[(&str, &str)]) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    root
}

fn cpuinfo(vendor: &str, flags: &str) -> String {
    format!(
        "processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: 6\nmodel\t\t: 94\n\
         model name\t: A: CPU\nflags\t\t: fpu {flags}\n\
         \nprocessor\t: 1\nvendor_id\t: Other\n"
    )
}

#[test]
fn an_empty_root_knows_nothing_and_claims_nothing() {
    let root = root(&[]);
    let facts = HostFacts::gather_from(root.path(), &Answer(Some(libc::ENOENT)));
    assert_eq!(facts.cpu, CpuFacts::default());
    assert_eq!(
        (facts.perf_event_paranoid, facts.nmi_watchdog),
        (None, None)
    );
    assert_eq!(facts.counter_holders, CounterHolders::default());
    assert!(matches!(facts.pmu, HardwarePmu::Absent { .. }));
    assert!(facts.kvm_modules.is_empty());
    assert!(matches!(facts.kvm, KvmAccess::Unusable { .. }));
}

#[test]
fn processors() {
    let root = root(&[("proc/cpuinfo", &cpuinfo("AuthenticAMD", "svm hypervisor"))]);
    let cpu = CpuFacts::read(root.path());
    assert_eq!(cpu.vendor.as_deref(), Some("AuthenticAMD"));
    assert_eq!(cpu.model_name.as_deref(), Some("A: CPU"));
    assert_eq!(cpu.signature, Some((6, 0x5e)));
    assert!(cpu.virtualisation && cpu.is_virtual);
}

#[test]
fn hardware_pmus() {
    fn check(device: bool, answer: Option<i32>, expected: &str) {
        let files = [("sys/bus/event_source/devices/cpu/type", "4")];
        let root = root(&files[..usize::from(device)]);
        let pmu = HardwarePmu::find(root.path(), &Answer(answer));
        let json = serde_json::to_value(&pmu).unwrap();
        assert_eq!(json["state"], expected, "{device} {answer:?}: {json}");
    }
    check(true, None, "usable");
    check(false, None, "usable");
    check(true, Some(libc::ENOENT), "absent");
    check(false, Some(libc::ENOENT), "absent");
    check(false, Some(libc::EOPNOTSUPP), "absent");
    check(false, Some(libc::ENOSYS), "absent");
    check(true, Some(libc::EACCES), "refused");
    check(true, Some(libc::EBUSY), "refused");
    check(false, Some(libc::EPERM), "unknown");
    check(true, Some(libc::EMFILE), "unknown");
}

#[test]
fn numbers() {
    fn check(paranoid: &str, expected: Option<i64>) {
        let root = root(&[("proc/sys/kernel/perf_event_paranoid", paranoid)]);
        let facts = HostFacts::gather_from(root.path(), &Answer(None));
        assert_eq!(facts.perf_event_paranoid, expected, "{paranoid:?}");
    }
    check("-1\n", Some(-1));
    check("4\n", Some(4));
    check("x", None);
}

#[test]
fn counter_holders() {
    fn check(watchdog: &str, pmu: Option<i32>, expected: &[CounterHolder]) {
        let root = root(&[
            ("proc/sys/kernel/nmi_watchdog", watchdog),
            ("proc/7/comm", "perf\n"),
            ("proc/9/comm", "other\n"),
            ("proc/9/fd/0", ""),
            ("proc/self/fd/0", ""),
        ]);
        let fds = root.path().join("proc/7/fd");
        fs::create_dir_all(&fds).unwrap();
        symlink("anon_inode:[perf_event]", fds.join("3")).unwrap();
        symlink("anon_inode:[perf_event]", fds.join("4")).unwrap();
        symlink("anon_inode:[eventfd]", fds.join("5")).unwrap();
        let facts = HostFacts::gather_from(root.path(), &Answer(pmu));
        assert_eq!(facts.counter_holders.seen, expected);
        // What the descriptor of 9 is cannot be read: that is not none.
        assert_eq!(facts.counter_holders.unreadable_processes, 1);
    }
    let process = CounterHolder::Process {
        pid: 7,
        name: "perf".into(),
        events: 2,
    };
    let watchdog = CounterHolder::NmiWatchdog;
    check("1\n", None, &[watchdog, process.clone()]);
    check("0\n", None, std::slice::from_ref(&process));
    // Without a PMU the watchdog's switch has no meaning.
    check("1\n", Some(libc::ENOENT), &[process]);
}

#[test]
fn modules() {
    let root = root(&[
        ("sys/module/kvm/parameters/enable_pmu", "N\n"),
        ("sys/module/kvm/parameters/halt_poll_ns", "200000\n"),
        ("sys/module/kvm_amd/parameters/nested", "1\n"),
        ("sys/module/kvmgt/parameters/pmu", "1\n"),
    ]);
    let seen: Vec<String> = KvmModule::find(root.path())
        .iter()
        .map(|m| format!("{} {:?}", m.name, m.parameters))
        .collect();
    assert_eq!(
        seen,
        [r#"kvm {"enable_pmu": "N"}"#, r#"kvm_amd {"nested": "1"}"#]
    );
}

#[test]
fn the_device_and_the_next_step() {
    fn check(cpu: &str, make: impl Fn(&Path), parts: &[&str]) {
        let root = root(&[("proc/cpuinfo", cpu)]);
        fs::create_dir_all(root.path().join("dev")).unwrap();
        make(&root.path().join("dev/kvm"));
        let error = KvmAccess::open(root.path(), &CpuFacts::read(root.path())).unwrap_err();
        let text = error.to_string();
        for part in parts {
            assert!(text.contains(part), "lacks {part:?}: {text}");
        }
        assert!(!text.contains('\n'));
    }
    let absent = |_: &Path| {};
    check(
        &cpuinfo("AuthenticAMD", "svm"),
        absent,
        &["no ", "modprobe kvm_amd"],
    );
    check(
        &cpuinfo("GenuineIntel", "vmx"),
        absent,
        &["modprobe kvm_intel"],
    );
    check(&cpuinfo("AuthenticAMD", "hypervisor"), absent, &["nested"]);
    check(&cpuinfo("AuthenticAMD", ""), absent, &["firmware"]);
    check("", |p| fs::write(p, "").unwrap(), &["not a device"]);
    check("", |p| symlink("nowhere", p).unwrap(), &["there is no"]);
    // A device of another driver opens, so what is not KVM shows at its ioctls.
    let root = root(&[]);
    fs::create_dir_all(root.path().join("dev")).unwrap();
    symlink("/dev/null", root.path().join("dev/kvm")).unwrap();
    assert_eq!(
        KvmAccess::check(root.path(), &CpuFacts::default()),
        KvmAccess::Usable
    );
}

#[test]
fn permission_is_named_with_the_group() {
    for (by_group, step) in [(true, "usermod -aG kvm"), (false, "chmod 660")] {
        let path = "/dev/kvm".into();
        let error = KvmAccessError::Permission { path, by_group };
        assert!(error.to_string().contains(step), "{error}");
    }
}

#[test]
fn the_running_host_has_facts() {
    let facts = HostFacts::gather();
    assert!(facts.cpu.vendor.is_some());
    let json = serde_json::to_value(&facts).unwrap();
    for key in [
        "cpu",
        "pmu",
        "perf_event_paranoid",
        "counter_holders",
        "kvm",
    ] {
        assert!(json.get(key).is_some(), "{key}");
    }
}

#[test]
fn names_are_bytes() {
    let root = root(&[
        ("proc/cpuinfo", &cpuinfo("AuthenticAMD", "svm hypervisor")),
        ("proc/sys/kernel/nmi_watchdog", "0\n"),
    ]);
    let mut text = b"model name\t: B\xfcro \xff\n".to_vec();
    text.extend(fs::read(root.path().join("proc/cpuinfo")).unwrap());
    fs::write(root.path().join("proc/cpuinfo"), text).unwrap();
    let facts = CpuFacts::read(root.path());
    assert!(facts.virtualisation && facts.is_virtual, "{facts:?}");
    assert_eq!(facts.model_name.as_deref(), Some("B\u{fffd}ro \u{fffd}"));
    let fds = root.path().join("proc/7/fd");
    fs::create_dir_all(&fds).unwrap();
    symlink("anon_inode:[perf_event]", fds.join("3")).unwrap();
    fs::write(root.path().join("proc/7/comm"), b"B\xfcro\n").unwrap();
    let facts = HostFacts::gather_from(root.path(), &Answer(None));
    let holder = CounterHolder::Process {
        pid: 7,
        name: "B\u{fffd}ro".to_owned(),
        events: 1,
    };
    assert_eq!(facts.counter_holders.seen, [holder]);
}
