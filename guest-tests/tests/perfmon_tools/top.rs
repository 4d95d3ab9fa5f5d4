//! `umpire top`: one frame as text, a VM that ends, and frames on a terminal of tmux.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use guest_tests::umpire::{self, skipped_without_kvm};
use guest_tests::vm::Vm;
use serde_json::Value;
use tempfile::TempDir;

use super::boot;
use super::lifecycle::{Named, await_listed};

/// How long anybody waits for anything.
const PATIENCE: Duration = Duration::from_secs(30);

/// A file with the symbols of the guest that spins.
fn symbols(vm: &Vm) -> String {
    let map = vm.path("System.map");
    let text = "0000000000100040 T hot_loop\n0000000000100080 T behind_it\n";
    std::fs::write(&map, text).expect("a file");
    map.display().to_string()
}

/// One frame of a VM, as JSON.
fn frame(vm: &Vm, flags: &[&str]) -> Value {
    let socket = vm.socket();
    let words = [
        &["top", "--once", "-j", "-d", "0.5", "--control", &socket],
        flags,
    ]
    .concat();
    let text = vm.printed(&words);
    assert_eq!(text.lines().count(), 1, "{text}");
    serde_json::from_str(&text).expect("JSON")
}

fn rate<'a>(frame: &'a Value, event: &str) -> &'a Value {
    let rates = frame["vcpus"][0]["rates"].as_array().expect("a list");
    let found = rates.iter().find(|rate| rate["event"] == event);
    found.unwrap_or_else(|| panic!("{event} in {frame}"))
}

/// Nobody is attached to a VM.
fn check_free(vm: &Vm) {
    let listed: Value = serde_json::from_str(&vm.printed(&["ls", "-j"])).expect("JSON");
    assert_eq!(listed["machine"]["contexts"], Value::Array(Vec::new()));
}

#[test]
fn a_frame_has_rates_holders_and_symbols() {
    if skipped_without_kvm("a_frame_has_rates") {
        return;
    }
    let vm = boot(8, &["--hypervisor-counters", "1"]);
    let map = symbols(&vm);
    let words = ["top", "--once", "-d", "0.5", "--symbols", &map];
    let text = vm.printed(&words);
    for part in [
        "VMs\nNAME",
        "vCPUs of vm: amd-core, counts from sim, host-first",
        "VCPU  STATE    CORE",
        "hot_loop",
        "this umpire top",
        "vCPU 0  hypervisor, by cookie only  PMC5",
        "not supported: cache-misses",
        "counts: cycles, instructions: simulated; vm-exits: exact; vm-run-ns: derived",
    ] {
        assert!(text.contains(part), "'{part}' in {text}");
    }
    assert!(!text.contains("not counted"), "{text}");
    check_free(&vm);

    let frame = frame(&vm, &["--symbols", &map, "-e", "branches", "-F", "200"]);
    assert_eq!(frame["standing"], "live");
    let per_second = |event| rate(&frame, event)["per_second"].as_f64().expect("a count");
    let ratio = per_second("cycles") / per_second("instructions");
    assert!((3.99..4.01).contains(&ratio), "{frame}");
    // 2000 a microsecond of its time.
    let ghz = per_second("cycles") / per_second("vm-run-ns");
    assert!((1.8..2.2).contains(&ghz), "{ghz} GHz in {frame}");
    assert_eq!(rate(&frame, "branches")["provenance"], "simulated");
    let missing = rate(&frame, "cache-misses");
    assert_eq!(missing["per_second"], Value::Null);
    assert_eq!(missing["missing"], "not supported");
    let samples = &frame["samples"];
    assert_eq!(samples["event"], "branches");
    let count = samples["samples"].as_u64().expect("a number");
    assert!((1..=200).contains(&count), "{frame}");
    let first = &samples["rows"][0]["symbol"];
    assert_eq!(first, "hot_loop", "{frame}");
    check_free(&vm);
}

#[test]
fn without_samples_there_are_rates() {
    if skipped_without_kvm("without_samples_there_are_rates") {
        return;
    }
    let vm = boot(8, &["--contexts-per-vcpu", "1"]);
    let told = frame(&vm, &["--no-samples"]);
    assert_eq!(told["samples"], Value::Null);
    assert!(rate(&told, "cycles")["per_second"].is_f64(), "{told}");
    // One context counts; there is none left for samples, and it says so.
    let told = frame(&vm, &[]);
    assert!(rate(&told, "cycles")["per_second"].is_f64(), "{told}");
    assert_eq!(told["samples"], Value::Null, "{told}");
    let notes = told["notes"].to_string();
    assert!(notes.contains("vCPU 0 cannot be sampled"), "{told}");
}

/// Where others hold all counters, top says so, and takes none from them.
#[test]
fn counters_of_others_are_theirs() {
    if skipped_without_kvm("counters_of_others_are_theirs") {
        return;
    }
    let vm = boot(2, &[]);
    let words = [
        "stat",
        "--log-fd",
        "1",
        "-j",
        "-e",
        "cycles,branches",
        "--for",
        "5s",
    ];
    let mut stat = vm.command(&words);
    let stat = stat.stdout(Stdio::piped()).spawn().expect("umpire");
    let began = Instant::now();
    while !vm.printed(&["ls"]).contains("counting") {
        assert!(began.elapsed() < PATIENCE, "stat counts");
        std::thread::sleep(Duration::from_millis(20));
    }
    let told = frame(&vm, &[]);
    assert_eq!(rate(&told, "cycles")["missing"], "not counted", "{told}");
    assert!(rate(&told, "vm-exits")["per_second"].is_f64(), "{told}");
    let holders = told["holders"].to_string();
    assert!(
        holders.contains(&format!("of process {}", stat.id())),
        "{told}"
    );
    assert!(
        told["notes"].to_string().contains("no counters for"),
        "{told}"
    );
    let output = stat.wait_with_output().expect("an end");
    let counts = String::from_utf8_lossy(&output.stdout);
    for row in counts.lines() {
        let row: Value = serde_json::from_str(row).expect("JSON");
        assert_eq!(row["pcnt-running"], 100.0, "{row}");
    }
}

#[test]
fn a_vm_that_ends_leaves_a_line() {
    if skipped_without_kvm("a_vm_that_ends_leaves_a_line") {
        return;
    }
    let mut vm = boot(8, &[]);
    let mut top = vm.command(&["top", "--once", "-d", "20"]);
    let top = top.stdout(Stdio::piped()).spawn().expect("umpire");
    let began = Instant::now();
    while !vm.printed(&["ls"]).contains("counting") {
        assert!(began.elapsed() < PATIENCE, "top counts");
        std::thread::sleep(Duration::from_millis(20));
    }
    vm.stop();
    let output = top.wait_with_output().expect("an end");
    assert!(began.elapsed() < Duration::from_secs(15), "at once");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("  has ended"),
        "{text}"
    );
}

fn refused(command: &mut Command, expected: &str) {
    let output: Output = command.stdin(Stdio::null()).output().expect("umpire");
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(told.contains(expected), "'{expected}' is not in: {told}");
    assert_eq!(told.lines().count(), 1, "{told}");
    assert!(output.stdout.is_empty());
}

#[test]
fn what_cannot_be_shown_is_refused() {
    let nobodys = tempfile::tempdir().expect("a folder");
    let top = |words: &[&str]| {
        let mut command = Command::new(umpire::path());
        command.arg("top").args(words).env_remove("UMPIRE_PERFMON");
        command.env("XDG_RUNTIME_DIR", nobodys.path());
        command
    };
    refused(&mut top(&[]), "umpire top --once prints one frame");
    refused(&mut top(&["--once", "--vm", "web1"]), "there is no VM web1");
    let none = "/nonexistent/vm.sock";
    refused(
        &mut top(&["--once", "--control", none]),
        "is the VM running",
    );
    refused(&mut top(&["--once", "-d", "0"]), "0.1 to 3600");
    refused(&mut top(&["-j"]), "--once");
    refused(&mut top(&["--once", "-e", "a,b"]), "samples one event");
    if skipped_without_kvm("what_cannot_be_shown_is_refused") {
        return;
    }
    let vm = boot(8, &[]);
    let of = |words: &[&str]| vm.command(&[&["top", "--once"], words].concat());
    refused(&mut of(&["--vm", "x"]), "there is no VM x");
    refused(&mut of(&["-e", "no-such-event"]), "no-such-event");
    refused(
        &mut of(&["--symbols", "/nonexistent/map"]),
        "/nonexistent/map",
    );
}

/// A terminal of tmux with a shell, which ends with the test.
struct Terminal {
    folder: TempDir,
}

impl Terminal {
    /// None where there is no tmux; says so.
    fn open(test: &str, runtime: &Path) -> Option<Self> {
        let found = Command::new("tmux").arg("-V").output();
        if found.is_err() {
            println!("skipped: {test}: tmux is missing; apt-get install tmux");
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let terminal = Self { folder };
        let shell = format!(
            "env -u UMPIRE_PERFMON PS1='$ ' XDG_RUNTIME_DIR={} sh",
            runtime.display()
        );
        let size = ["-x", "100", "-y", "40"];
        let words = [
            &["-f", "/dev/null", "new-session", "-d"],
            &size[..],
            &[&shell],
        ];
        terminal.tmux(&words.concat());
        Some(terminal)
    }

    fn tmux(&self, words: &[&str]) -> String {
        let output = Command::new("tmux")
            .args(["-S", &self.folder.path().join("tmux").display().to_string()])
            .args(words)
            .env_remove("TMUX")
            .output()
            .expect("tmux can be started");
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {told}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn keys(&self, keys: &[&str]) {
        self.tmux(&[&["send-keys", "-t", "0"], keys].concat());
    }

    fn resize(&self, columns: &str, lines: &str) {
        self.tmux(&["resize-window", "-t", "0", "-x", columns, "-y", lines]);
    }

    /// What is on it once it is as `is` wants it.
    fn shows(&self, what: &str, is: impl Fn(&str) -> bool) -> String {
        let began = Instant::now();
        loop {
            let text = self.tmux(&["capture-pane", "-p", "-t", "0"]);
            if is(&text) {
                return text;
            }
            assert!(began.elapsed() < PATIENCE, "{what}: {text}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until nobody reads keys but the shell.
    fn await_left(&self) {
        let began = Instant::now();
        let alternate = ["display-message", "-p", "-t", "0", "#{alternate_on}"];
        while self.tmux(&alternate).trim() != "0" {
            assert!(began.elapsed() < PATIENCE, "top leaves the terminal");
            std::thread::sleep(Duration::from_millis(50));
        }
        // It restores the mode behind that, which throws away what was typed.
        std::thread::sleep(Duration::from_millis(300));
    }

    /// Runs `umpire` with words; its status and the mode of the terminal before and after it
    /// are shown afterwards.
    fn umpire(&self, words: &str) {
        let umpire = umpire::path();
        let mode = "stty -g | tr -d '\\n'; echo";
        let line = format!(
            "clear; {mode} ' before'; {} {words}; echo status $?; {mode} ' after'",
            umpire.display()
        );
        self.keys(&[&line, "Enter"]);
    }

    /// It ended with this status, and left the terminal as it was.
    fn check_ended(&self, status: u8) -> String {
        let text = self.shows("the end", |text| text.contains(" after\n"));
        assert!(text.contains(&format!("status {status}\n")), "{text}");
        let mode = |word: &str| {
            let line = text.lines().find(|line| line.ends_with(word));
            line.and_then(|line| line.strip_suffix(word))
                .map(str::to_owned)
        };
        assert_eq!(mode(" before"), mode(" after"), "{text}");
        assert!(
            mode(" after").is_some_and(|mode| mode.contains(':')),
            "{text}"
        );
        let cursor = self.tmux(&["display-message", "-p", "-t", "0", "#{cursor_flag}"]);
        assert_eq!(cursor.trim(), "1", "the cursor is seen");
        let alternate = self.tmux(&["display-message", "-p", "-t", "0", "#{alternate_on}"]);
        assert_eq!(alternate.trim(), "0", "the screen is the one of before");
        text
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = Command::new("tmux")
            .args(["-S", &self.folder.path().join("tmux").display().to_string()])
            .arg("kill-server")
            .output();
    }
}

#[test]
fn a_terminal_shows_frames_of_any_size_and_is_restored() {
    if skipped_without_kvm("a_terminal_shows_frames") {
        return;
    }
    let vm = boot(8, &[]);
    let Some(terminal) = Terminal::open("a_terminal_shows_frames", Path::new("/nonexistent"))
    else {
        return;
    };
    let words = format!(
        "top -d 0.3 --symbols {} --control {}",
        symbols(&vm),
        vm.socket()
    );
    terminal.umpire(&words);
    let text = terminal.shows("symbols", |text| text.contains("hot_loop"));
    for part in ["umpire top - ", "vCPUs of vm", "this umpire top", "q quit"] {
        assert!(text.contains(part), "{text}");
    }
    for (columns, lines) in [("40", "12"), ("20", "5"), ("7", "2"), ("120", "50")] {
        terminal.resize(columns, lines);
        // A frame of this size, and no line of another one.
        let fits = |text: &str| {
            let first = text.lines().next().unwrap_or("");
            let last = text
                .lines()
                .nth(lines.parse::<usize>().expect("a number") - 1);
            let foot =
                lines.len() < 2 && lines < "4" || last.is_some_and(|it| it.contains("q quit"));
            first.starts_with("umpire") && foot
        };
        terminal.shows(columns, fits);
    }
    terminal.keys(&["h"]);
    terminal.shows("help", |text| {
        text.contains("Keys") && !text.contains("vCPUs of")
    });
    terminal.keys(&["h", "p"]);
    terminal.shows("a pause", |text| {
        text.contains(", paused") && text.contains("p go on")
    });
    terminal.keys(&["p", "d", "1", "Enter"]);
    terminal.shows("a delay", |text| text.contains("delay: 1 s"));
    // Suspended and continued as any program.
    terminal.keys(&["C-z"]);
    terminal.shows("the shell", |text| text.contains("Stopped"));
    terminal.keys(&["fg", "Enter"]);
    terminal.shows("a frame again", |text| {
        text.contains("q quit") && text.contains("hot_loop")
    });
    terminal.keys(&["q"]);
    terminal.await_left();
    terminal.keys(&["clear; echo o''ver", "Enter"]);
    terminal.shows("the shell", |text| text.contains("over\n"));
    check_free(&vm);

    // However it ends, the terminal is as it was, and counters are free.
    for (how, status) in [("q", 0), ("C-c", 0), ("-TERM", 0), ("-INT", 0), ("-HUP", 0)] {
        terminal.umpire(&words);
        terminal.shows("symbols", |text| text.contains("hot_loop"));
        if how.starts_with('-') {
            let listed: Value = serde_json::from_str(&vm.printed(&["ls", "-j"])).expect("JSON");
            let pid = listed["machine"]["contexts"][0]["pid"].to_string();
            let sent = Command::new("kill").args([how, &pid]).status();
            assert!(sent.is_ok_and(|sent| sent.success()));
        } else {
            terminal.keys(&[how]);
        }
        terminal.check_ended(status);
        check_free(&vm);
    }
    terminal.umpire(&format!("{words} -n 2"));
    terminal.check_ended(0);
}

/// What is killed leaves nothing reserved.
#[test]
fn a_killed_top_frees_what_it_had() {
    if skipped_without_kvm("a_killed_top_frees") {
        return;
    }
    let vm = boot(8, &[]);
    let mut top = vm.command(&["top", "--once", "-d", "60"]);
    let mut top = top.stdout(Stdio::null()).spawn().expect("umpire");
    let began = Instant::now();
    while !vm.printed(&["ls"]).contains("compact") {
        assert!(began.elapsed() < PATIENCE, "top samples");
        std::thread::sleep(Duration::from_millis(20));
    }
    top.kill().expect("a signal");
    top.wait().expect("an end");
    while !vm.printed(&["ls"]).contains("no contexts") {
        assert!(began.elapsed() < PATIENCE, "contexts are gone");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(vm.printed(&["ls"]).contains(" 8 free"));
}

#[test]
fn vms_come_and_end_while_they_are_watched() {
    if skipped_without_kvm("vms_come_and_end") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let runtime = folder.path();
    let Some(terminal) = Terminal::open("vms_come_and_end", runtime) else {
        return;
    };
    let kernel = guest_tests::vm::spinning();
    let run = |name| {
        let vm = Named::run(&kernel, runtime, &["--name", name]);
        await_listed(runtime, name);
        vm
    };
    let web1 = run("web1");
    terminal.umpire("top -d 0.3");
    terminal.shows("web1", |text| text.contains("vCPUs of web1"));
    // One that comes later is found.
    let db = run("db");
    let text = terminal.shows("db", |text| {
        text.contains(", 2 VMs") && text.contains("\ndb ")
    });
    assert!(text.contains("vCPUs of "), "{text}");
    terminal.keys(&["Up"]);
    terminal.shows("the first one", |text| text.contains("vCPUs of db"));
    terminal.keys(&["Tab"]);
    terminal.shows("the next one", |text| text.contains("vCPUs of web1"));
    drop(db);
    terminal.shows("an end", |text| {
        text.contains("  has ended") && text.contains("vCPUs of web1")
    });
    drop(web1);
    let text = terminal.check_ended(0);
    assert!(text.contains("umpire: all VMs have ended"), "{text}");
}
