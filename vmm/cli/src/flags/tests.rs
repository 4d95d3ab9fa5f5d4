//! Tests of the command line.

use super::*;

fn args(words: &[&str]) -> Vec<OsString> {
    let mut all = vec![OsString::from("umpire")];
    all.extend(words.iter().map(OsString::from));
    all
}

fn run(words: &[&str]) -> RunFlags {
    let all: Vec<&str> = ["run"].iter().chain(words).copied().collect();
    match parse(args(&all)).unwrap().command {
        Command::Run(flags) => *flags,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_definition_is_consistent() {
    command().debug_assert();
}

#[test]
fn commands_parse() {
    fn check(words: &[&str], expected: &str) {
        let command = format!("{:?}", parse(args(words)).unwrap().command);
        assert!(command.starts_with(expected), "{words:?}: {command}");
    }
    check(&["doctor"], "Doctor(Output { json: false })");
    check(&["doctor", "-j"], "Doctor(Output { json: true })");
    check(
        &["demo", "--json"],
        "Demo(DemoFlags { scenario: None, events: [], engine: None, pmu: None, counters: None, output: Output { json: true } })",
    );
    check(
        &["demo", "--event", "cycles", "--event", "r5300c0:u"],
        "Demo(DemoFlags { scenario: None, events: [\"cycles\", \"r5300c0:u\"]",
    );
    check(
        &["events", "branch", "--pmu", "skl", "-j"],
        "Events(EventsFlags { pattern: Some(\"branch\"), pmu: Some(\"skl\"), vm: None, decode: None, json: true })",
    );
    check(
        &["bench", "traps", "-j", "--iterations", "500"],
        "Bench { what: Traps { measured: Measured { output: Output { json: true }, \
         counters: None }, iterations: 500, rdpmc_trap: \"auto\" } }",
    );
    check(
        &["bench", "pmi", "--counters", "clock", "--samples", "300"],
        "Bench { what: Pmi { measured: Measured { output: Output { json: false }, \
         counters: Some(\"clock\") }, samples: 300 } }",
    );
    check(
        &["bench", "perfmon", "--part", "sets,flood", "--rounds", "3"],
        "Bench { what: Perfmon(PerfmonFlags { measured: Measured { output: Output { json: false }, \
         counters: None }, part: [Sets, Flood], rounds: 3, ",
    );
    check(
        &[
            "bench",
            "arbiter",
            "--part",
            "core,restart",
            "--leases",
            "500",
        ],
        "Bench { what: Arbiter(ArbiterBenchFlags { output: Output { json: false }, \
         part: [Core, Restart], load: 5000, clients: 64, leases: 500, ",
    );
    for what in [
        "neighbour",
        "slowdown",
        "switch",
        "scale",
        "perfmon",
        "arbiter",
    ] {
        check(&["bench", what, "-j"], "Bench");
    }
    check(&["run", "--kernel", "k"], "Run(");
    check(
        &["report"],
        "Report(ReportOptions { profile: ProfileChoice { input: \"umpire.data\", symbols: None",
    );
    check(
        &["report", "--vmlinux", "v", "--kaslr-offset", "0x1a000000"],
        "Report(ReportOptions { profile: ProfileChoice { input: \"umpire.data\", \
         symbols: Some(\"v\"), kaslr_offset: Some(436207616)",
    );
    check(
        &["script", "-F", "time,ip", "-i", "-", "--vcpu", "0,2-3"],
        "Script(",
    );
    let choice = "Script(ScriptOptions { profile: ProfileChoice { input: \"umpire.data\"";
    check(
        &["script", "-F", "-cpu,+vm", "-F+ring", "-G", "--ns"],
        choice,
    );
    check(&["script", "-csh", "-C0", "-d", "a,b", "-S", "f"], choice);
    check(&["report", "--comm", "sh", "--time", "10%/2"], "Report(");
    check(&["annotate", "main", "-S", "f", "--pid", "1"], "Annotate(");
    check(
        &["top", "-n", "3", "-d", "0.5"],
        "Top(TopOptions { vm: VmChoice { vm: None, control: None }, delay: 500ms, frames: Some(3), \
         once: false, json: false, event: None, freq: 29, no_samples: false",
    );
    check(&["top", "--once", "-j", "--no-samples"], "Top(");
    for words in [
        "report --stdio -g caller -i x",
        "report -gcaller,0.5 -n -t, --header",
        "report -g -i x",
        "report --call-graph=fractal,2,callee,count --call-graph none -G",
        "report -F +period -s +cpu --percent-limit 0.5 --no-children",
        "report --header-only --symfs a --symfs 0:53=b",
        "annotate --vmlinux v --kaslr-offset 0x1000 main",
        "annotate --symbols System.map -M intel",
        "diff a b --vcpu 0 -s dso",
    ] {
        let words: Vec<&str> = words.split(' ').collect();
        assert!(parse(args(&words)).is_ok(), "{words:?}");
    }
    for words in [
        &["top", "--once", "-n", "3"][..],
        &["top", "-j"],
        &["top", "--no-samples", "-F", "99"],
        &["top", "--kaslr-offset", "0x1000"],
    ] {
        assert!(parse(args(words)).is_err(), "{words:?}");
    }
}

#[test]
fn run_flags_parse() {
    let flags = run(&[
        "--kernel=k",
        "--module",
        "a",
        "--module",
        "b,c d",
        "--hide-feature",
        "cx16",
        "--cmdline",
        "-x --y",
        "--memory",
        "-5",
        "-vv",
        "--timeout",
        "1.5",
    ]);
    assert_eq!(flags.kernel, Some("k".into()));
    assert_eq!(flags.module, Some(vec!["a".into(), "b,c d".into()]));
    assert_eq!(flags.hide_feature, Some(vec!["cx16".into()]));
    assert_eq!(flags.cmdline.as_deref(), Some("-x --y"));
    assert_eq!((flags.memory, flags.verbose), (Some(-5), 2));
    assert_eq!(flags.timeout, Some(1.5));
    let none = run(&[]);
    assert_eq!((none.verbose, none.module, none.cpus), (0, None, None));
}

#[test]
fn bad_arguments_are_one_line_with_status_2() {
    fn check(words: &[&str], parts: &[&str]) {
        let exit = parse(args(words)).unwrap_err();
        assert_eq!(exit.status, ExitStatus::BAD_INPUT, "{words:?}");
        assert!(!exit.text.contains('\n'), "{}", exit.text);
        for part in parts {
            assert!(exit.text.contains(part), "{words:?}: {}", exit.text);
        }
    }
    check(&[], &["no command", "umpire demo"]);
    check(&["rum"], &["'rum'", "'run'"]);
    check(&["run", "--memroy", "1"], &["--memroy", "--memory"]);
    check(&["run", "--cpus", "two"], &["'two'", "--cpus"]);
    check(&["run", "--kernel"], &["--kernel"]);
    check(&["run", "--kernel", "a", "--kernel", "b"], &["--kernel"]);
    check(&["bench"], &["umpire bench traps"]);
    check(&["bench", "traps", "--iterations", "1"], &["1", "100"]);
    check(&["doctor", "extra"], &["'extra'"]);
    check(
        &["report", "--sort", "symbol,cgroup"],
        &["'cgroup'", "--sort", "symbol (sym), vcpu"],
    );
    check(&["report", "--vcpu", "3-1"], &["'3-1'", "0,2-3"]);
    check(&["report", "--percent-limit", "NaN"], &["NaN", "0 to 100"]);
    check(&["report", "--kaslr-offset", "100"], &["--symbols"]);
    check(
        &["report", "--symbols", "f", "--kaslr-offset", "xyz"],
        &["'xyz'", "hexadecimal"],
    );
    check(&["report", "--folded", "-j"], &["--folded", "--json"]);
    check(&["report", "-g", "srcline"], &["'srcline'", "by function"]);
    check(&["report", "-gtree"], &["'tree'", "caller, callee"]);
    check(
        &["report", "-F", "overhead,colour"],
        &["'colour'", "sample"],
    );
    check(&["report", "-s", "period"], &["'period'", "--fields"]);
    check(&["report", "-t", ""], &["a character"]);
    check(&["report", "-t", "."], &["'.'", "a dot stands for it"]);
    check(
        &["report", "--percentage", "local"],
        &["local", "absolute", "relative"],
    );
    check(&["script", "-F", "hq:comm"], &["'hq:'", "hw:"]);
    check(
        &["report", "--hierarchy", "-F", "sym"],
        &["--hierarchy", "--fields"],
    );
    check(&["diff", "a", "b", "-i", "c"], &["--input", "<OLD>"]);
    check(
        &["report", "--weight", "tons"],
        &["tons", "samples", "events"],
    );
    check(&["script", "-F", "time,colour"], &["'colour'", "vm,vcpu"]);
    check(&["script", "-F", "+evnt"], &["'evnt'", "event?"]);
    check(&["script", "-F", "comm,+ip"], &["'comm,+ip'", "not both"]);
    check(&["script", "-F", "addr"], &["'addr'", "of perf's"]);
    check(
        &["script", "--time", "2,1"],
        &["--time", "before it begins"],
    );
    check(&["report", "--time", "soon"], &["'soon'", "10%/2"]);
    check(&["report", "--comms", "a,,b"], &["--comms", "empty"]);
}

#[test]
fn help_teaches() {
    fn check(words: &[&str], parts: &[&str]) {
        let exit = parse(args(words)).unwrap_err();
        assert_eq!(exit.status, ExitStatus::SUCCESS, "{words:?}");
        for part in parts {
            assert!(
                exit.text.contains(part),
                "{words:?} lacks {part}:\n{}",
                exit.text
            );
        }
    }
    check(&["--help"], &["run", "doctor", "demo", "bench", "Examples"]);
    check(&["--version"], &[env!("CARGO_PKG_VERSION")]);
    let models: Vec<&str> = pmu_virt::PmuModel::names().iter().map(|m| m.name).collect();
    let backends: Vec<&str> = pmu_virt::backend_names().iter().map(|b| b.name).collect();
    for flag in ["-h", "--help"] {
        check(&["run", flag], &models);
        check(&["run", flag], &backends);
        check(
            &["run", flag],
            &["MiB", "microseconds", "[default: 512]", "guest.toml"],
        );
        check(
            &["run", flag],
            &[
                "--policy LAYER:KEY=N",
                "min-fixed",
                "--audit audit.json",
                "docs/reference/pcr.md",
            ],
        );
    }
    check(&["doctor", "--help"], &["Exit status"]);
    check(&["demo", "--help"], &["--event", "<not supported>"]);
    check(
        &["events", "--help"],
        &["libpfm4", "r5300c0", "instructions:u", "Exit status"],
    );
    check(
        &["report", "--help"],
        &[
            "/proc/kallsyms",
            "KASLR",
            "--flamegraph",
            "[aliases:",
            "Exit status",
        ],
    );
    check(
        &["script", "--help"],
        &["-F", "period", "jq", "Exit status"],
    );
    for what in ["traps", "neighbour", "pmi", "switch", "scale", "arbiter"] {
        check(&["bench", what, "--help"], &["nanoseconds", "default"]);
    }
    check(&["bench", "slowdown", "--help"], &["100 times a second"]);
}
