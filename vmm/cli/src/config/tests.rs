//! Tests of the merge and of every message.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use arbiter::{CounterId, Scheme};
use pmu_virt::{PmuModel, Sources, Vendor};
use tempfile::TempDir;
use vmm::config::{
    BootModule, CpuVendor, FollowsGrants, GuestCpu, HypervisorCounters, PcrChoice, PmuChoice,
    UnpackChoice,
};
use vmm::cpuid::Identity;
use vmm::vcpu::TrapMode;

use super::*;
use crate::exit::UserError;

/// A folder with the files that the configurations below name.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["kernel", "other", "initrd", "module"] {
        fs::write(folder.path().join(name), name).unwrap();
    }
    fs::create_dir(folder.path().join("dir")).unwrap();
    folder
}

/// Writes `toml` to run.toml in `folder` and gives flags that name it.
fn with_file(folder: &Path, toml: &str) -> RunFlags {
    let path = folder.join("run.toml");
    fs::write(&path, toml).unwrap();
    RunFlags {
        config: Some(path),
        ..RunFlags::default()
    }
}

const EVERYTHING: &str = r#"
kernel = "kernel"
initrd = "initrd"
cmdline = "console=ttyS0"
module = ["module,with words", "initrd"]
memory = 64
cpus = 3
pmu = "amd-k7"
counters = "step"
cpu-vendor = "amd"
cpu-model = "k8"
hide-feature = ["cx16"]
unpack = "never"
rdpmc-trap = "breakpoint"
pmi-floor = 250
pcr = "on"
scheme = "single"
policy = ["firmware:max=2", "kernel:min=2,lease=50"]
grace = 7
hypervisor-counters = "PMC3"
cpuid-follows-grants = "off"
audit = "audit"
timeout = 1.5
verbose = 1
log-file = "log"
"#;

#[test]
fn a_number_of_counters_may_be_a_number() {
    let folder = folder();
    for value in ["1", "'1'"] {
        let text = format!("kernel = 'kernel'\nhypervisor-counters = {value}\n");
        let config = load(&with_file(folder.path(), &text)).unwrap();
        let pcr = config.run.pcr.expect("reservations are on");
        assert_eq!(pcr.hypervisor, HypervisorCounters::Last(1), "{value}");
    }
}

#[test]
fn a_file_holds_every_option() {
    let folder = folder();
    let config = load(&with_file(folder.path(), EVERYTHING)).unwrap();
    let at = |name: &str| folder.path().join(name);
    assert_eq!(config.run.kernel, at("kernel"));
    assert_eq!(config.run.initrd, Some(at("initrd")));
    assert_eq!(config.run.cmdline.as_deref(), Some("console=ttyS0"));
    assert_eq!(
        config.run.modules,
        [
            BootModule {
                path: at("module"),
                cmdline: "with words".into()
            },
            BootModule {
                path: at("initrd"),
                cmdline: String::new()
            },
        ]
    );
    assert_eq!((config.run.memory_mib, config.run.cpus), (64, 3));
    assert!(matches!(&config.run.pmu, PmuChoice::Model(m) if m.name() == "amd-k7"));
    assert_eq!(config.run.counters.to_string(), "step");
    assert_eq!(config.run.cpu_vendor, CpuVendor::Amd);
    assert_eq!(config.run.cpu_model, Identity::parse("k8"));
    assert_eq!(config.run.hidden_features, ["cx16".parse().unwrap()]);
    assert_eq!(config.run.unpack, UnpackChoice::Never);
    assert_eq!(config.run.rdpmc_trap, TrapMode::Breakpoint);
    assert_eq!(config.run.pmi_floor, Some(Duration::from_micros(250)));
    let pcr = config.run.pcr.unwrap();
    assert_eq!(pcr.scheme, Scheme::SingleMaster);
    assert_eq!(pcr.policy.firmware.max.programmable, 2);
    assert_eq!(pcr.policy.kernel.min.programmable, 2);
    assert_eq!(pcr.policy.kernel.lease_ms, Some(50));
    assert_eq!(pcr.policy.grace_ms, 7);
    let pmc3 = CounterId::Programmable(3);
    assert_eq!(pcr.hypervisor, HypervisorCounters::These(vec![pmc3]));
    assert_eq!(pcr.follows_grants, FollowsGrants::Off);
    assert_eq!(config.run.audit, Some(at("audit")));
    assert!(!at("audit").exists(), "it is made when the guest starts");
    assert_eq!(config.run.timeout, Some(Duration::from_millis(1500)));
    assert_eq!(config.log.verbose, 1);
    assert_eq!(config.log.file, Some(at("log")));
}

#[test]
fn defaults() {
    let folder = folder();
    let config = load(&with_file(folder.path(), "kernel = 'kernel'")).unwrap();
    assert_eq!((config.run.memory_mib, config.run.cpus), (512, 1));
    assert!(matches!(config.run.pmu, PmuChoice::Auto));
    assert_eq!(config.run.counters, Sources::auto());
    assert_eq!(config.run.pmi_floor, None);
    assert_eq!(config.run.timeout, None);
    assert_eq!(
        (config.run.pcr, config.run.audit),
        (Some(PcrChoice::default()), None)
    );
    assert!(config.run.modules.is_empty() && config.run.hidden_features.is_empty());
}

#[test]
fn a_file_switches_with_words_of_its_own() {
    let folder = folder();
    let tools = |text: &str| {
        let text = format!("kernel = 'kernel'\ncontrol = 'sock'\n{text}");
        let settings = load(&with_file(folder.path(), &text)).unwrap();
        (settings.run.pcr.is_some(), settings.tools)
    };
    let (pcr, all) = tools("paused = true\nstat = true\npcr = true");
    assert!(pcr && all.paused && all.stat.is_some_and(|events| events.is_empty()));
    assert_eq!(
        tools("paused = false\nstat = false\npcr = false"),
        (false, StartTools::default())
    );
    let agent = |word: &str| {
        let text = format!("kernel = 'kernel'\n{word}");
        load(&with_file(folder.path(), &text)).unwrap().run.agent
    };
    assert!(agent("agent = true") && agent("agent = 'on'"));
    assert!(!agent("agent = false") && !agent(""));
    let (_, some) = tools("paused = 'on'\nstat = 'cycles'");
    assert!(some.paused && some.stat.is_some_and(|events| events.len() == 1));
    check_error(
        "kernel = 'kernel'\npaused = 3",
        &["run.toml:2:10: ", "true, false", "in `paused`"],
    );
}

#[test]
fn every_flag_wins_over_its_key() {
    fn check(set: impl Fn(&mut RunFlags, &Path), seen: impl Fn(&Settings, &Path) -> bool) {
        let folder = folder();
        let mut flags = with_file(folder.path(), EVERYTHING);
        let before = load(&flags).unwrap();
        assert!(!seen(&before, folder.path()), "the file says the same");
        set(&mut flags, folder.path());
        let after = load(&flags).unwrap();
        assert!(seen(&after, folder.path()), "{after:?}");
    }
    check(
        |f, d| f.kernel = Some(d.join("other")),
        |c, d| c.run.kernel == d.join("other"),
    );
    check(
        |f, d| f.initrd = Some(d.join("other")),
        |c, d| c.run.initrd == Some(d.join("other")),
    );
    check(
        |f, _| f.cmdline = Some("x".into()),
        |c, _| c.run.cmdline.as_deref() == Some("x"),
    );
    check(
        |f, d| f.module = Some(vec![d.join("other").display().to_string()]),
        |c, d| c.run.modules.len() == 1 && c.run.modules[0].path == d.join("other"),
    );
    check(|f, _| f.memory = Some(65), |c, _| c.run.memory_mib == 65);
    check(|f, _| f.cpus = Some(64), |c, _| c.run.cpus == 64);
    check(
        |f, _| f.cores = Some(2),
        |c, _| {
            c.run
                .cores
                .is_some_and(|plan| (plan.cores, plan.slice.as_millis()) == (2, 5))
        },
    );
    check(
        |f, _| (f.cores, f.slice) = (Some(1), Some(20)),
        |c, _| {
            c.run
                .cores
                .is_some_and(|plan| (plan.cores, plan.slice.as_millis()) == (1, 20))
        },
    );
    check(
        |f, _| f.counters = Some("clock".into()),
        |c, _| c.run.counters.to_string() == "clock",
    );
    check(
        |f, _| f.cpu_vendor = Some("intel".into()),
        |c, _| c.run.cpu_vendor == CpuVendor::Intel,
    );
    check(
        |f, _| f.cpu_model = Some("host".into()),
        |c, _| c.run.cpu_model.is_none(),
    );
    check(
        |f, _| f.hide_feature = Some(vec!["smap".into(), "smep".into()]),
        |c, _| c.run.hidden_features.len() == 2,
    );
    check(
        |f, _| f.unpack = Some("always".into()),
        |c, _| c.run.unpack == UnpackChoice::Always,
    );
    check(
        |f, _| f.rdpmc_trap = Some("patch".to_owned()),
        |c, _| c.run.rdpmc_trap == TrapMode::Patch,
    );
    check(
        |f, _| f.pmi_floor = Some(1),
        |c, _| c.run.pmi_floor == Some(Duration::from_micros(1)),
    );
    let pcr = |c: &Settings| c.run.pcr.clone().unwrap();
    check(
        |f, _| f.scheme = Some("interacting".into()),
        |c, _| pcr(c).scheme == Scheme::Interacting,
    );
    check(
        |f, _| f.policy = Some(vec!["kernel:min=5".into()]),
        |c, _| {
            let policy = pcr(c).policy;
            (policy.kernel.min.programmable, policy.kernel.lease_ms) == (5, None)
        },
    );
    check(|f, _| f.grace = Some(8), |c, _| pcr(c).policy.grace_ms == 8);
    check(
        |f, d| (f.firmware, f.firmware_delay) = (Some(d.join("other")), Some(7)),
        |c, _| c.run.firmware.delay_ms == 7,
    );
    check(
        |f, _| f.hypervisor_counters = Some("2".into()),
        |c, _| pcr(c).hypervisor == HypervisorCounters::Last(2),
    );
    check(
        |f, _| f.cpuid_follows_grants = Some("on".into()),
        |c, _| pcr(c).follows_grants == FollowsGrants::On,
    );
    check(
        |f, d| f.audit = Some(d.join("other")),
        |c, d| c.run.audit == Some(d.join("other")),
    );
    check(
        |f, _| f.timeout = Some(9.0),
        |c, _| c.run.timeout == Some(Duration::from_secs(9)),
    );
    check(|f, _| f.verbose = 3, |c, _| c.log.verbose == 3);
    check(
        |f, d| f.log_file = Some(d.join("l2")),
        |c, d| c.log.file == Some(d.join("l2")),
    );
}

fn check_error(toml: &str, parts: &[&str]) {
    let folder = folder();
    let error = load(&with_file(folder.path(), toml)).unwrap_err();
    let text = UserError::from(error).to_string();
    assert!(!text.contains('\n'), "{text}");
    for part in parts {
        assert!(text.contains(part), "{toml:?} lacks {part:?}: {text}");
    }
}

#[test]
fn malformed_files_are_named_with_line_column_and_key() {
    check_error(
        "kernel = 'kernel'\nmemroy = 5",
        &["run.toml:2:1: ", "`memroy`", "`memory`"],
    );
    check_error("cpus = 2\ncpus = 3", &["run.toml:2:1: ", "cpus"]);
    check_error(
        "\n  memory = \"much\"",
        &["run.toml:2:12: ", "much", "in `memory`"],
    );
    check_error(
        "module = 'one'",
        &["run.toml:1:10: ", "list", "in `module`"],
    );
    check_error("kernel = ", &["run.toml:1:"]);
    check_error("[run]\nkernel = 'k'", &["run.toml:1:2: ", "`run`"]);
    check_error("kernel = 'a", &["run.toml:1:"]);
}

#[test]
fn bad_values_are_named_with_what_is_possible() {
    let k = "kernel = 'kernel'\n";
    let with = |line: &str| format!("{k}{line}");
    check_error("", &["no kernel", "--kernel"]);
    check_error(
        "kernel = 'absent'",
        &["run.toml:1:10: kernel", "absent", "no such file"],
    );
    check_error("kernel = 'dir'", &["kernel", "a folder"]);
    check_error("kernel = '/dev/null'", &["kernel", "a device"]);
    check_error(
        &with("initrd = 'absent'"),
        &["run.toml:2:10: initrd", "no such file"],
    );
    check_error(
        &with("cmdline = \"a\\u0000\""),
        &["run.toml:2:11: cmdline", "NUL"],
    );
    check_error(
        &with("module = ['absent,x']"),
        &["module", "absent", "no such file"],
    );
    check_error(&with("module = [',x']"), &["module", "',x'", "FILE,WORDS"]);
    check_error(
        &with("memory = 15"),
        &["run.toml:2:10: memory", "15", "16 to 1048576 MiB"],
    );
    check_error(&with("memory = -1"), &["memory", "-1", "MiB"]);
    check_error(&with("memory = 1048577"), &["memory", "1048577"]);
    check_error(&with("cpus = 0"), &["cpus", "0", "1 to 64 vCPUs"]);
    check_error(&with("cpus = 65"), &["run.toml:2:8: cpus", "65"]);
    check_error(
        &with("cpus = 3\ncores = 4"),
        &["run.toml:3:9: cores", "4", "1 to 3 cores"],
    );
    check_error(&with("slice = 5"), &["slice", "add --cores M"]);
    check_error(
        &with("pin = '1-0'"),
        &["pin", "1-0", "ends before it begins"],
    );
    check_error(
        &with("pmu = 'k8'"),
        &["run.toml:2:7: pmu", "'k8'", "amd-core", "auto", "none"],
    );
    check_error(
        &with("pmu = 'intel-v2,counters=99'"),
        &["counters=99", "intel-v2"],
    );
    check_error(
        &with("pmu = 'auto,counters=4'"),
        &["'auto,counters=4'", "auto or none alone"],
    );
    check_error(
        &with("cpus = 'two'"),
        &["expected a whole number", "`cpus`"],
    );
    check_error(
        &with("counters = 'abacus'"),
        &["counters", "'abacus'", "clock", "step"],
    );
    check_error(
        &with("cpu-vendor = 'via'"),
        &["cpu-vendor", "'via'", "host, amd or intel"],
    );
    check_error(
        &with("cpu-model = 'pentium'"),
        &["cpu-model", "'pentium'", "host, nehalem,", "zen3 or zen4"],
    );
    check_error(
        &with("hide-feature = ['fpu']"),
        &["hide-feature", "'fpu'", "cx16"],
    );
    check_error(
        &with("unpack = 'maybe'"),
        &["unpack", "'maybe'", "auto, always or never"],
    );
    check_error(
        &with("rdpmc-trap = 'always'"),
        &["rdpmc-trap", "'always'", "auto, patch, breakpoint or none"],
    );
    check_error(
        &with("pmi-floor = 0"),
        &["pmi-floor", "1 to 1000000 microseconds"],
    );
    check_error(
        &with("pcr = 'maybe'"),
        &["run.toml:2:7: pcr", "'maybe'", "on or off"],
    );
    check_error(
        &with("scheme = 'double'"),
        &["scheme", "'double'", "single, independent or interacting"],
    );
    check_error(
        &with("policy = ['kernel:min=2,max=1']"),
        &["run.toml:2:10: policy", "at least 2", "lower the minimum"],
    );
    check_error(&with("policy = 'x'"), &["list", "`policy`"]);
    check_error(&with("policy = ['boot:min=1']"), &["'boot'", "firmware"]);
    check_error(&with("grace = 0"), &["grace", "1 to 60000 milliseconds"]);
    check_error(
        &with("firmware-delay = 5"),
        &["firmware-delay", "--firmware builtin"],
    );
    check_error(
        &with("firmware = 'other'\nfirmware-delay = 60001"),
        &["firmware-delay", "0 to 60000 milliseconds"],
    );
    check_error(
        &with("hypervisor-counters = 99"),
        &["hypervisor-counters", "'99'", "0 to 32"],
    );
    check_error(
        &with("hypervisor-counters = -1"),
        &["hypervisor-counters", "'-1'", "0 to 32"],
    );
    check_error(
        &with("hypervisor-counters = [1]"),
        &["a number or a string"],
    );
    check_error(
        &with("hypervisor-counters = 'PMC99'"),
        &["hypervisor-counters", "'PMC99'", "PMC3,FIXED0"],
    );
    check_error(
        &with("cpuid-follows-grants = 'never'"),
        &["cpuid-follows-grants", "'never'", "auto, on or off"],
    );
    check_error(&with("audit = 'dir'"), &["audit", "a folder"]);
    check_error(
        &with("audit = 'absent/file'"),
        &["audit", "cannot write", "absent/file"],
    );
    check_error(
        &with("pcr = 'off'\ngrace = 5"),
        &["run.toml:3:9: grace", "--pcr off", "leave one out"],
    );
    check_error(&with("pcr = 'off'\naudit = 'a'"), &["audit", "--pcr off"]);
    check_error(
        &with("pcr = 'off'\nfirmware = 'other'\nfirmware-counter = ['cycles']"),
        &["firmware-counter", "--pcr off"],
    );
    check_error(
        &with("pmu = 'none'\npolicy = ['kernel:min=2']"),
        &["policy", "--pmu none"],
    );
    check_error(&with("pmu = 'none'\npcr = 'on'"), &["pcr", "--pmu none"]);
    check_error(&with("timeout = 0"), &["timeout", "0", "seconds"]);
    check_error(&with("timeout = nan"), &["timeout", "NaN"]);
    check_error(&with("timeout = -3"), &["timeout", "-3"]);
    check_error(&with("timeout = inf"), &["timeout", "inf"]);
    check_error(&with("verbose = 4"), &["verbose", "0 to 3"]);
}

#[test]
fn without_a_pmu_or_on_request_there_are_no_reservations() {
    fn check(toml: &str) {
        let folder = folder();
        let toml = format!("kernel = 'kernel'\n{toml}");
        let config = load(&with_file(folder.path(), &toml)).unwrap();
        assert_eq!(config.run.pcr, None, "{toml}");
    }
    check("pcr = 'off'");
    check("pmu = 'none'");
    check("pmu = 'none'\npcr = 'off'");
}

#[test]
fn flags_are_named_as_flags() {
    let flags = RunFlags {
        kernel: Some("nowhere/at-all".into()),
        ..RunFlags::default()
    };
    let error = load(&flags).unwrap_err().to_string();
    assert_eq!(
        error,
        "--kernel: cannot open nowhere/at-all: there is no such file"
    );
    let flags = RunFlags {
        config: Some("nowhere.toml".into()),
        ..RunFlags::default()
    };
    let error = load(&flags).unwrap_err().to_string();
    assert_eq!(
        error,
        "configuration file nowhere.toml: there is no such file"
    );
}

#[test]
fn the_guests_cpu_and_pmu_agree() {
    use Vendor::{Amd, Intel};
    fn check(host: Vendor, cpu: &str, pmu: &str, expected: Option<(Vendor, Option<&str>)>) {
        let folder = folder();
        let flags = RunFlags {
            kernel: Some(folder.path().join("kernel")),
            cpu_vendor: Some(cpu.into()),
            pmu: Some(pmu.into()),
            ..RunFlags::default()
        };
        let guest = load(&flags).unwrap().run.guest_cpu(host);
        let seen = guest
            .as_ref()
            .ok()
            .map(|g| (g.vendor, g.pmu.as_ref().map(PmuModel::name)));
        assert_eq!(seen, expected, "{host} {cpu} {pmu}: {guest:?}");
    }
    check(Amd, "host", "auto", Some((Amd, Some("amd-core"))));
    check(Intel, "host", "auto", Some((Intel, Some("intel-v2"))));
    check(Amd, "intel", "auto", Some((Intel, Some("intel-v2"))));
    check(Amd, "intel", "intel-v1", Some((Intel, Some("intel-v1"))));
    check(Amd, "host", "none", Some((Amd, None)));
    check(Amd, "host", "intel-v2", None);
    check(Intel, "host", "amd-k7", None);
    check(Intel, "amd", "amd-k7", Some((Amd, Some("amd-k7"))));
}

/// The processor chooses the PMU model, and its codes go with whatever model is named.
#[test]
fn a_named_processor_has_its_pmu_and_its_event_codes() {
    use Vendor::{Amd, Intel};
    fn guest(host: Vendor, [vendor, model, pmu]: [&str; 3]) -> Result<GuestCpu, String> {
        let folder = folder();
        let flags = RunFlags {
            kernel: Some(folder.path().join("kernel")),
            cpu_vendor: Some(vendor.into()),
            cpu_model: Some(model.into()),
            pmu: Some(pmu.into()),
            ..RunFlags::default()
        };
        let run = load(&flags).unwrap().run;
        run.guest_cpu(host).map_err(|error| error.to_string())
    }
    let check = |host, words: [&str; 3], expected: &str| {
        let guest = guest(host, words).expect(expected);
        let pmu = guest.pmu.expect("a PMU").to_string();
        assert_eq!(
            pmu,
            PmuModel::parse(expected).unwrap().to_string(),
            "{words:?}"
        );
    };
    let nehalem = "intel-v3,full-width=off,perf-capabilities=on,events=nehalem";
    check(Intel, ["host", "nehalem", "auto"], nehalem);
    check(Amd, ["intel", "skylake", "auto"], "intel-v4,events=skylake");
    check(
        Amd,
        ["intel", "skylake", "intel-v2"],
        "intel-v2,events=skylake",
    );
    check(
        Intel,
        ["host", "ice-lake-server", "auto"],
        "intel-v5,events=ice-lake",
    );
    check(
        Intel,
        ["host", "skylake", "intel-v4,events=nehalem"],
        "intel-v4,events=nehalem",
    );
    check(Amd, ["host", "zen3", "auto"], "amd-core");
    check(Amd, ["host", "zen4", "amd-core"], "amd-core,events=zen4");
    check(Amd, ["host", "k8", "auto"], "amd-k7");
    check(Amd, ["host", "fam10h", "auto"], "amd-fam10h");
    check(Amd, ["host", "host", "auto"], "amd-core");
    assert!(
        guest(Intel, ["host", "skylake", "none"])
            .unwrap()
            .pmu
            .is_none()
    );

    let refused = |host, words, parts: &[&str]| {
        let error = guest(host, words).expect_err("not possible");
        for part in parts {
            assert!(error.contains(part), "no {part:?} in: {error}");
        }
        assert!(!error.contains('\n'));
    };
    refused(
        Intel,
        ["host", "zen2", "auto"],
        &[
            "--cpu-model zen2 is AMD's",
            "--cpu-vendor amd",
            "nehalem, skylake",
        ],
    );
    refused(
        Amd,
        ["intel", "zen2", "auto"],
        &["the guest's CPU is Intel's"],
    );
    refused(
        Amd,
        ["host", "zen2", "intel-v2"],
        &["intel-v2", "--cpu-vendor intel"],
    );
    refused(
        Amd,
        ["host", "k8", "amd-core"],
        &["--cpu-model k8", "amd-core do not fit", "choose amd-k7"],
    );
}

/// Where tools find the VM of `flags`, or what is wrong with them.
fn socket_of(flags: RunFlags, sockets: Option<&str>) -> String {
    let folder = folder();
    let flags = RunFlags {
        kernel: flags.kernel.clone().or(Some(folder.path().join("kernel"))),
        ..flags
    };
    let merge = Merge {
        flags: &flags,
        file: ConfigFile::default(),
        sockets: sockets.map(PathBuf::from),
    };
    match merge.into_settings() {
        Ok(settings) => settings.run.control.map_or_else(
            || "none".to_owned(),
            |control| control.socket.display().to_string(),
        ),
        Err(error) => error.to_string(),
    }
}

#[test]
fn tools_find_every_vm_by_its_name() {
    let named = |name: &str| RunFlags {
        name: Some(name.to_owned()),
        ..RunFlags::default()
    };
    let at = |control: &str| RunFlags {
        control: Some(control.into()),
        ..RunFlags::default()
    };
    assert_eq!(
        socket_of(named("web1.a-b_c"), Some("/s")),
        "/s/web1.a-b_c.sock"
    );
    let own = format!("/s/{}.sock", std::process::id());
    assert_eq!(socket_of(RunFlags::default(), Some("/s")), own);
    assert_eq!(socket_of(at("/a/b"), Some("/s")), "/a/b");
    assert_eq!(socket_of(at("none"), Some("/s")), "none");
    assert_eq!(socket_of(RunFlags::default(), None), "none");
    for (flags, wrong) in [
        (named("../web1"), "--name: '../web1' is no name for a VM"),
        (named(""), "--name: '' is no name for a VM"),
        (named(&"a".repeat(65)), "is no name for a VM"),
        (
            RunFlags {
                name: Some("web1".to_owned()),
                ..at("/a/b")
            },
            "--name: tools find a VM of --control by its socket",
        ),
        (
            RunFlags {
                name: Some("web1".to_owned()),
                ..at("none")
            },
            "--name: no host tools are served",
        ),
        (
            RunFlags {
                name: Some("web1".to_owned()),
                pmu: Some("none".to_owned()),
                ..RunFlags::default()
            },
            "--name: ",
        ),
        (
            RunFlags {
                control_mode: Some("660".to_owned()),
                ..at("none")
            },
            "--control-mode: no host tools are served",
        ),
    ] {
        let found = socket_of(flags, Some("/s"));
        assert!(found.contains(wrong), "{found}");
    }
    assert!(socket_of(named("web1"), None).contains("--name: no host tools are served"));
}
