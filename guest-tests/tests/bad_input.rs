//! Bad input: one clear line, exit status 2, nothing printed and nothing left
//! behind.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use guest_tests::kernel::{Kernel, Protocol, exit};
use guest_tests::umpire::{self, skipped_without_kvm};
use tempfile::TempDir;

/// A folder with inputs of every kind, which is also the program's own.
struct Desk {
    folder: TempDir,
}

impl Desk {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let desk = Self { folder };
        let kernel = |protocol| Kernel::image(protocol, |a, _| exit(a, 0)).expect("a kernel");
        let good = kernel(Protocol::Multiboot);
        desk.write("kernel", &good);
        desk.write("linux", &kernel(Protocol::Linux64));
        desk.write("truncated", &good[..0x1020]);
        desk.write("stub", &good[..20]);
        desk.write("empty", b"");
        desk.write("text", b"this is no kernel at all\n");
        desk.write("large", &with_memory_of_1_gib(good));
        desk.write("initrd", b"070701");
        desk.write("nothing.toml", b"[event.r0729]\nrate = 5\n");
        desk.write("broken.toml", b"kernel = 'kernel'\nmemory = \n");
        desk.write("unknown.toml", b"kernel = 'kernel'\n\nmemroy = 64\n");
        desk.write("type.toml", b"kernel = 'kernel'\ncpus = 'two'\n");
        desk.write("value.toml", b"kernel = 'kernel'\ncpus = 1000\n");
        fs::create_dir(desk.path("folder")).expect("a folder");
        // For the case that runs as another user.
        let open = fs::Permissions::from_mode(0o755);
        fs::set_permissions(desk.folder.path(), open).expect("permissions");
        desk
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path(name), bytes).expect("a file");
    }

    fn files(&self) -> BTreeSet<OsString> {
        let entries = fs::read_dir(self.folder.path()).expect("a folder");
        entries
            .map(|entry| entry.expect("an entry").file_name())
            .collect()
    }

    /// Runs `command` here and checks its answer for every part of `expected`.
    fn check(&self, mut command: Command, expected: &[&str]) {
        let before = self.files();
        let output = command
            .current_dir(self.folder.path())
            .env("TMPDIR", self.folder.path())
            .stdin(Stdio::null())
            .output()
            .expect("the program can be started");
        // All of its pipes are closed, so no child of it is left either.
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{command:?}: {told}");
        assert_eq!(told.lines().count(), 1, "{command:?}: {told}");
        assert!(told.starts_with("umpire: "), "{command:?}: {told}");
        for part in expected {
            assert!(told.contains(part), "{command:?}: no {part:?} in: {told}");
        }
        assert_eq!(output.stdout, b"", "{command:?}");
        assert_eq!(self.files(), before, "{command:?}");
    }

    fn check_flags(&self, flags: &[&str], expected: &[&str]) {
        let mut command = Command::new(umpire::path());
        command.args(flags);
        self.check(command, expected);
    }
}

/// The kernel with a segment of 1 GiB, nearly all of it zeros.
fn with_memory_of_1_gib(mut kernel: Vec<u8>) -> Vec<u8> {
    // p_memsz of the first program header of an ELF32 file.
    const P_MEMSZ: usize = 52 + 20;
    kernel[P_MEMSZ..P_MEMSZ + 4].copy_from_slice(&(1u32 << 30).to_le_bytes());
    kernel
}

#[test]
fn options_and_files() {
    let desk = Desk::new();
    type Case<'a> = (&'a [&'a str], &'a [&'a str]);
    let cases: &[Case] = &[
        // Options.
        (&[], &["no command"]),
        (&["walk"], &["walk"]),
        (&["run", "--kernel"], &["--kernel"]),
        (&["run", "--kernel", "kernel", "--speed", "3"], &["--speed"]),
        (
            &["run", "--kernel", "kernel", "--memory", "much"],
            &["--memory", "much"],
        ),
        (&["run"], &["no kernel", "--kernel FILE"]),
        (
            &["run", "--kernel", "kernel", "--cpus", "0"],
            &["--cpus", "1 to 64"],
        ),
        (
            &["run", "--kernel", "kernel", "--cpus", "65"],
            &["--cpus", "1 to 64"],
        ),
        (
            &["run", "--kernel", "kernel", "--cpus", "-1"],
            &["--cpus", "1 to 64"],
        ),
        (
            &["run", "--kernel", "kernel", "--cpus", "2", "--cores", "3"],
            &["--cores", "3", "1 to 2 cores", "--cpus"],
        ),
        (
            &["run", "--kernel", "kernel", "--cores", "0"],
            &["--cores", "0", "1 to 1"],
        ),
        (
            &["run", "--kernel", "kernel", "--cores", "1", "--slice", "0"],
            &["--slice", "1 to 1000 milliseconds"],
        ),
        (
            &["run", "--kernel", "kernel", "--slice", "5"],
            &["--slice", "--cores"],
        ),
        (
            &["run", "--kernel", "kernel", "--pin", "60000"],
            &["--pin", "CPU 60000", "it may use"],
        ),
        (
            &["run", "--kernel", "kernel", "--pin", "0,"],
            &["--pin", "''", "0,2-3"],
        ),
        (
            &["run", "--kernel", "kernel", "--pin", "-1"],
            &["--pin", "'-1'", "0,2-3"],
        ),
        (
            &["run", "--kernel", "kernel", "--pin", "3-1"],
            &["--pin", "3-1", "ends before it begins"],
        ),
        (
            &["run", "--kernel", "kernel", "--event-filter", "kernel"],
            &["--event-filter", "kernel", "UTF-8"],
        ),
        (
            &["run", "--kernel", "kernel", "--event-filter", "some"],
            &["--event-filter", "cannot open some"],
        ),
        (
            &["run", "--kernel", "kernel", "--memory", "1"],
            &["--memory", "MiB"],
        ),
        (
            &["run", "--kernel", "kernel", "--timeout", "-1"],
            &["--timeout"],
        ),
        (
            &["run", "--kernel", "kernel", "--pmu", "z80"],
            &["--pmu", "z80", "amd-core"],
        ),
        (
            &["run", "--kernel", "kernel", "--pmu", "intel-v2,colour=3"],
            &["--pmu", "colour"],
        ),
        (
            &["run", "--kernel", "kernel", "--pmu", "intel-v2,ibs=on"],
            &["--pmu", "'ibs'", "intel-v2", "always off"],
        ),
        (
            &["run", "--kernel", "kernel", "--pmu", "amd-core,ibs=2"],
            &["--pmu", "'ibs=2'", "on or off"],
        ),
        (
            &[
                "run",
                "--kernel",
                "kernel",
                "--cpu-vendor",
                "amd",
                "--pmu",
                "amd-core,ibs=on",
                "--counters",
                "sim=nothing.toml",
            ],
            &["ibs=on", "sim", "neither cycles nor instructions", "clock"],
        ),
        (
            &["run", "--kernel", "kernel", "--pmu", "amd-core,pebs=skid"],
            &["--pmu", "'pebs'", "amd-core", "always off"],
        ),
        (
            &[
                "run",
                "--kernel",
                "kernel",
                "--cpu-vendor",
                "intel",
                "--pmu",
                "intel-v4,pebs=exact",
                "--counters",
                "clock,step",
            ],
            &["pebs=exact", "clock,step", "--counters step", "pebs=skid"],
        ),
        (
            &["run", "--kernel", "kernel", "--pmu", "intel-v2,counters=x"],
            &["--pmu", "counters"],
        ),
        (
            &["run", "--kernel", "kernel", "--counters", "abacus"],
            &["--counters", "abacus", "clock"],
        ),
        (
            &["run", "--kernel", "kernel", "--cpu-vendor", "cyrix"],
            &["--cpu-vendor", "cyrix"],
        ),
        (
            &["run", "--kernel", "kernel", "--hide-feature", "fpu2"],
            &["--hide-feature", "fpu2"],
        ),
        // Firmware. Without the built-in one, 'builtin' itself is what is wrong.
        (
            &["run", "--kernel", "kernel", "--firmware", "bios"],
            &["--firmware", "bios", "no such file"],
        ),
        (
            &["run", "--kernel", "kernel", "--firmware-counter", "cycles"],
            &["--firmware-counter", "--firmware builtin"],
        ),
        (
            &[
                "run",
                "--kernel",
                "kernel",
                "--firmware",
                "text",
                "--firmware-counter",
                "cycles,kepe",
            ],
            &["--firmware-counter", "'kepe'", "keep"],
        ),
        // Counter reservations.
        (
            &["run", "--kernel", "kernel", "--pcr", "maybe"],
            &["--pcr", "'maybe'", "on or off"],
        ),
        (
            &["run", "--kernel", "kernel", "--policy", "user:min=1"],
            &["--policy", "'user'", "firmware, hypervisor or kernel"],
        ),
        (
            &[
                "run",
                "--kernel",
                "kernel",
                "--policy",
                "kernel:min=3,max=2",
            ],
            &["--policy", "at least 3", "at most 2"],
        ),
        (
            &["run", "--kernel", "kernel", "--hypervisor-counters", "-1"],
            &["--hypervisor-counters", "'-1'", "PMC3,FIXED0"],
        ),
        (
            &["run", "--kernel", "kernel", "--grace", "0"],
            &["--grace", "1 to 60000 milliseconds"],
        ),
        (
            &["run", "--kernel", "kernel", "--pcr", "off", "--audit", "a"],
            &["--audit", "--pcr off", "leave one out"],
        ),
        (
            &["run", "--kernel", "kernel", "--audit", "absent/audit"],
            &["--audit", "cannot write absent/audit"],
        ),
        (
            &["run", "--kernel", "kernel", "--audit", "/dev/null"],
            &["--audit", "a device"],
        ),
        // Files.
        (
            &["run", "--kernel", "absent"],
            &["--kernel", "absent", "no such file"],
        ),
        (
            &["run", "--kernel", "folder"],
            &["--kernel", "folder", "a folder"],
        ),
        (
            &["run", "--kernel", "/dev/zero"],
            &["--kernel", "/dev/zero", "a device"],
        ),
        (
            &["run", "--kernel", "kernel", "--initrd", "absent"],
            &["--initrd", "no such file"],
        ),
        (
            &["run", "--kernel", "kernel", "--module", "absent,a"],
            &["--module", "no such file"],
        ),
        (
            &["run", "--kernel", "kernel", "--module", ",a"],
            &["--module", "FILE"],
        ),
        (
            &["run", "--kernel", "kernel", "--log-file", "absent/log"],
            &["absent/log"],
        ),
        // The configuration file.
        (
            &["run", "--config", "absent.toml"],
            &["absent.toml", "no such file"],
        ),
        (&["run", "--config", "broken.toml"], &["broken.toml:2:"]),
        (
            &["run", "--config", "unknown.toml"],
            &["unknown.toml:3:", "memroy"],
        ),
        (&["run", "--config", "type.toml"], &["type.toml:2:"]),
        (
            &["run", "--config", "value.toml"],
            &["value.toml:2:", "1 to 64"],
        ),
        (&["run", "--config", "folder"], &["folder"]),
        // Other commands.
        (&["bench"], &["umpire bench traps"]),
        (&["bench", "traps", "--iterations", "1"], &["--iterations"]),
        (&["doctor", "now"], &["now"]),
        (&["events", "two", "words"], &["'words'"]),
        (&["events", "no such words"], &["'no such words'"]),
        (&["events", "--pmu", "z80"], &["'z80'"]),
        (&["demo", "--event"], &["--event"]),
        (
            &["demo", "--event", "cycels"],
            &["--event", "'cycels'", "cycles?"],
        ),
        (
            &["demo", "--event", "cycles:x"],
            &["'cycles:x'", "'x' is no modifier"],
        ),
        (&["demo", "--event", "r5300c0g"], &["'r5300c0g'"]),
        (
            &["demo", "--event", "r10053fff0", "--pmu", "amd-k7"],
            &["0x10053fff0", "amd-k7", "event select above 0xff"],
        ),
        (
            &["demo", "--event", "loads", "--pmu", "amd-k7"],
            &["loads", "amd-k7", "amd-core"],
        ),
        (
            &["demo", "--event", "cycles", "--pmu", "z80"],
            &["--pmu", "z80", "amd-core"],
        ),
        (
            &["demo", "--event", "cycles", "--counters", "abacus"],
            &["--counters", "abacus", "clock"],
        ),
        (
            &[
                "demo",
                "--event",
                "ref-cycles",
                "--event",
                "r530300",
                "--pmu",
                "intel-v2",
            ],
            &["ref-cycles", "r530300", "fixed counter 2"],
        ),
        (&["demo", "--counters", "step"], &["--event"]),
        (
            &["bench", "switch", "--counters", "sim=folder"],
            &["folder is a folder, not a file"],
        ),
        (
            &["bench", "scale", "--counters", "sim=/dev/zero"],
            &["/dev/zero is a device"],
        ),
        (
            &["bench", "emu", "--kernel", "no/such/kernel"],
            &["--kernel no/such/kernel", "No such file"],
        ),
    ];
    for (flags, expected) in cases {
        desk.check_flags(flags, expected);
    }
}

/// Two profiles, of which one is none, or is damaged from its beginning on.
#[test]
fn profiles_that_cannot_be_compared() {
    let desk = Desk::new();
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    let good = fs::read(corpus.join("tasks.data")).expect("a profile");
    desk.write("good", &good);
    desk.write(
        "other",
        &fs::read(corpus.join("guest.data")).expect("a profile"),
    );
    let changed = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    desk.write("version", &changed(8, 9));
    desk.write("header", &changed(16, b'x'));
    desk.write("long", &changed(15, 0xff));
    desk.write("head", &good[..20]);
    for (bad, expected) in [
        ("gone", "gone"),
        ("folder", "folder"),
        ("empty", "empty"),
        ("text", "no profile"),
        ("version", "version"),
        ("header", "header"),
        ("long", "header"),
        ("head", "head"),
    ] {
        desk.check_flags(&["diff", bad, "good"], &[expected]);
        desk.check_flags(&["diff", "good", bad], &[expected]);
    }
    desk.check_flags(&["diff", "good"], &["<NEW>"]);
    desk.check_flags(
        &["diff", "good", "other", "--event", "branches"],
        &["branches"],
    );
    desk.check_flags(&["diff", "good", "good", "--symbols", "gone"], &["gone"]);
    desk.check_flags(&["diff", "good", "good", "--symfs", "gone"], &["gone"]);
    desk.check_flags(&["diff", "good", "good", "--sort", "colour"], &["colour"]);
}

/// What comes before the damage is used. A recorder that was killed leaves a file that is cut
/// off: there is a warning, and it is no error.
#[test]
fn profiles_that_are_not_whole() {
    let desk = Desk::new();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/tasks.data");
    let good = fs::read(golden).expect("a profile");
    desk.write("good", &good);
    desk.write("cut", &good[..good.len() - 30]);
    desk.write("damaged", &[&good[..good.len() - 30], &[0xff; 30]].concat());
    for (file, status) in [("good", 0), ("cut", 0), ("damaged", 2)] {
        for command in [
            &["report", "-i", file][..],
            &["report", "-j", "-i", file],
            &["report", "--folded", "-i", file],
            &["report", "--perf-data", "perf.data", "-i", file],
            &["report", "--pprof", "pprof.gz", "-i", file],
            &["script", "-i", file],
            &["diff", file, "good"],
            &["diff", "good", file],
        ] {
            let output = Command::new(umpire::path())
                .args(command)
                .current_dir(desk.folder.path())
                .output()
                .expect("umpire can be started");
            let told = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(status), "{command:?}: {told}");
            let damage = format!("umpire: {file}: the file is damaged at byte ");
            let lines = told.lines().filter(|line| line.contains("damaged"));
            assert_eq!(
                lines.count(),
                usize::from(status == 2),
                "{command:?}: {told}"
            );
            let last = told.lines().last().unwrap_or_default();
            assert_eq!(
                last.starts_with(&damage),
                status == 2,
                "{command:?}: {told}"
            );
            let is_shown = !matches!(command[1], "--perf-data" | "--pprof");
            assert_eq!(!output.stdout.is_empty(), is_shown, "{command:?}: {told}");
        }
    }
}

/// Where nobody reads standard error, the status still tells.
#[test]
fn nobody_reads_the_error() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let mut command = Command::new(umpire::path());
    let status = command
        .arg("run")
        .stderr(writer)
        .status()
        .expect("the program can be started");
    assert_eq!(status.code(), Some(2));
}

#[test]
fn kernels_that_cannot_be_booted() {
    if skipped_without_kvm("kernels_that_cannot_be_booted") {
        return;
    }
    let desk = Desk::new();
    type Case<'a> = (&'a [&'a str], &'a [&'a str]);
    let cases: [Case; 13] = [
        (&["--kernel", "empty"], &["empty file", "bzImage"]),
        (&["--kernel", "text"], &["not a kernel", "bzImage"]),
        (&["--kernel", "truncated"], &["truncated", "ends at byte"]),
        (&["--kernel", "stub"], &["stub", "truncated"]),
        (&["--kernel", "large"], &["too large", "--memory"]),
        (
            &["--kernel", "linux", "--firmware", "text"],
            &["--firmware text", "flat image", "docs/guide/firmware.md"],
        ),
        (
            &["--kernel", "linux", "--firmware", "linux"],
            &["--firmware linux", "firmware's place is 0x80000-0x96000"],
        ),
        (
            &[
                "--kernel",
                "linux",
                "--firmware",
                "linux",
                "--firmware-counter",
                "cycles,on=PMC31",
            ],
            &["--firmware-counter", "'cycles,on=PMC31'", "no PMC31"],
        ),
        (
            &["--kernel", "kernel", "--initrd", "initrd"],
            &["initrd", "--module"],
        ),
        (
            &["--kernel", "linux", "--module", "initrd"],
            &["not a Multiboot kernel", "--initrd"],
        ),
        (
            &[
                "--kernel",
                "kernel",
                "--cpu-vendor",
                "amd",
                "--pmu",
                "intel-v2",
            ],
            &["intel-v2", "--cpu-vendor intel"],
        ),
        (
            &[
                "--kernel",
                "kernel",
                "--cpu-vendor",
                "intel",
                "--pmu",
                "amd-core",
            ],
            &["amd-core", "--cpu-vendor amd"],
        ),
        (&["--kernel", "initrd"], &["cpio", "--initrd"]),
    ];
    for (flags, expected) in cases {
        let all: Vec<&str> = ["run"].iter().chain(flags).copied().collect();
        desk.check_flags(&all, expected);
    }
}

/// True if this process may do what only root may.
fn is_root() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    ids.and_then(|ids| ids.split_whitespace().nth(1)) == Some("0")
}

/// `umpire` copied to where any user can run it.
fn copy_of_umpire(desk: &Desk) -> PathBuf {
    let copy = desk.path("umpire");
    umpire::copy_program(&umpire::path(), &copy);
    copy
}

/// A shell that prepares with `prepare`, then becomes `umpire run` with `words`.
fn after(prepare: &str, program: &Path, wrapper: &[&str], words: &str) -> Command {
    let mut command = Command::new(wrapper[0]);
    let script = format!("{prepare} && exec \"$0\" run {words} --kernel kernel");
    command
        .args(&wrapper[1..])
        .args(["sh", "-c"])
        .arg(script)
        .arg(program);
    command
}

/// Runs `true` the way that a case wants; the reason if that is impossible here.
fn possible(prepare: &str, wrapper: &[&str]) -> Result<(), String> {
    let output = Command::new(wrapper[0])
        .args(&wrapper[1..])
        .args(["sh", "-c", prepare])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{}: {error}", wrapper[0]))?;
    if output.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
    }
}

#[test]
fn kvm_that_is_missing_or_forbidden() {
    if skipped_without_kvm("kvm_that_is_missing_or_forbidden") {
        return;
    }
    let desk = Desk::new();
    let program = copy_of_umpire(&desk);
    // In a mount namespace of its own, /dev is an empty file system, or has
    // something else under the name.
    let namespace = if is_root() {
        ["unshare", "--mount"].as_slice()
    } else {
        ["unshare", "--map-root-user", "--mount"].as_slice()
    };
    let as_nobody = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
    ];
    let own = "test \"$(stat -c %a /dev/kvm)\" != 666";
    let cases: [(&str, &str, &[&str], &[&str]); 3] = [
        (
            "missing",
            "mount -t tmpfs none /dev",
            namespace,
            &["there is no /dev/kvm"],
        ),
        (
            "not a device",
            "mount -t tmpfs none /dev && touch /dev/kvm",
            namespace,
            &["/dev/kvm is not a device"],
        ),
        (
            "forbidden",
            own,
            &as_nobody,
            &["no permission to open /dev/kvm", "group"],
        ),
    ];
    for (name, prepare, wrapper, expected) in cases {
        match possible(prepare, wrapper) {
            Ok(()) => {
                desk.check(after(prepare, &program, wrapper, "--engine kvm"), expected);
                // An option that only KVM has leaves no other engine, and is named.
                let named = [expected, &["--counters clock needs KVM", "the engine emu"]].concat();
                let clock = after(prepare, &program, wrapper, "--counters clock");
                desk.check(clock, &named);
            }
            Err(why) => println!(
                "skipped: kvm_that_is_missing_or_forbidden: {name}: not possible here: {why}"
            ),
        }
    }
}

/// What only the other engine has is refused by name, with what to do.
#[test]
fn options_of_the_other_engine() {
    let desk = Desk::new();
    let emu: [(&[&str], &str); 12] = [
        (&["--counters", "perf"], "--counters perf"),
        (&["--counters", "emu,clock"], "--counters clock"),
        (&["--counters", "step"], "--counters step"),
        (&["--counters", "msr=0"], "--counters msr"),
        (&["--arbiter", "own"], "--arbiter own"),
        (&["--arbiter", "/tmp/arbiter"], "--arbiter /tmp/arbiter"),
        (&["--rdpmc-trap", "patch"], "--rdpmc-trap"),
        (&["--cpus", "4", "--cores", "2"], "--cores 2"),
        (&["--cpus", "2", "--cores", "1"], "--cores 1"),
        (&["--arbiter-shortage", "fewer"], "--arbiter-shortage"),
        (&["--arbiter-terms", "priority=3"], "--arbiter-terms"),
        (&["--firmware", "text"], "--firmware"),
    ];
    let kvm: [(&[&str], &str); 4] = [
        (&["--seed", "1"], "--seed"),
        (&["--cycles", "simulated"], "--cycles simulated"),
        (&["--real-time"], "--real-time"),
        (&["--counters", "emu"], "--counters emu"),
    ];
    let given = |engine: &str, flags: &[&str], words: &[&str]| {
        let all = ["run", "--kernel", "kernel", "--engine", engine];
        desk.check_flags(&[&all, flags].concat(), words);
    };
    for (flags, name) in emu {
        given("emu", flags, &[name, "leave it out", "--engine kvm"]);
    }
    for (flags, name) in kvm {
        given("kvm", flags, &[name, "leave it out", "--engine emu"]);
    }
    let both = ["--seed", "1", "--counters", "step"];
    given("auto", &both, &["no engine", "--seed", "--counters step"]);
    given("qemu", &[], &["--engine", "auto, kvm or emu"]);
    given(
        "emu",
        &["--cycles", "real"],
        &["--cycles", "none or simulated"],
    );
    given("emu", &["--seed", "-1"], &["--seed", "0 to"]);
    let real = ["--seed", "1", "--real-time"];
    given("emu", &real, &["--seed", "--real-time", "leave one out"]);
}

#[test]
fn a_kernel_that_may_not_be_read() {
    let desk = Desk::new();
    let forbidden = fs::Permissions::from_mode(0o000);
    fs::set_permissions(desk.path("kernel"), forbidden).expect("permissions");
    let program = copy_of_umpire(&desk);
    let wrapper: &[&str] = if is_root() {
        &[
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
        ]
    } else {
        &["env"]
    };
    match possible("true", wrapper) {
        Ok(()) => desk.check(
            after("true", &program, wrapper, "--engine kvm"),
            &["--kernel", "permission denied"],
        ),
        Err(why) => println!("skipped: a_kernel_that_may_not_be_read: not possible here: {why}"),
    }
}
