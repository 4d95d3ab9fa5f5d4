//! `umpire arbitrate --experiment` and `--replay`: their outputs, and one clear line
//! for what cannot be simulated or replayed.

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use umpire::arbitrate::report;
use umpire::exit::ExitStatus;
use umpire::flags::{Command, parse};

fn run(words: &[&str]) -> Result<String, String> {
    let all = ["umpire", "arbitrate"].iter().chain(words);
    let flags = match parse(all.map(OsString::from)).unwrap().command {
        Command::Arbitrate(flags) => flags,
        other => panic!("{other:?}"),
    };
    let mut out = Vec::new();
    match report(&flags, &mut out) {
        Ok(()) => Ok(String::from_utf8(out).unwrap()),
        Err(error) => {
            assert_eq!(error.status(), ExitStatus::BAD_INPUT);
            assert!(out.is_empty());
            Err(error.to_string())
        }
    }
}

const SMALL: &str = "
seeds = 3
schemes = ['independent', 'interacting']
[machine]
vcpus = 8
cores = 2
[workload]
seconds = 2
[workload.tools]
arrival = 0
[[policy]]
name = 'a'
[[policy]]
name = 'b'
rules = ['kernel:priority=1']
[cookies]
bits = [8, 48]
";

#[test]
fn an_experiment_as_table_json_csv_and_html() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let file = path("small.toml");
    fs::write(&file, SMALL).unwrap();
    let (csv, html) = (path("out.csv"), path("out.html"));
    let words = ["--experiment", &file, "--csv", &csv, "--html", &html];
    let table = run(&words).unwrap();
    assert_eq!(table.matches("\nscheme ").count(), 4, "{table}");
    assert!(table.contains("8 vCPUs on 2 cores"), "{table}");
    // Nobody asks as a tool, so there are no figures for tools, not even 0.
    let tools = table
        .lines()
        .find(|line| line.starts_with("tools"))
        .unwrap();
    assert!(!tools.contains('0') && tools.contains('-'), "{tools}");
    let rows = fs::read_to_string(&csv).unwrap();
    assert!(rows.starts_with("scheme,policy,who,cookie-bits,metric,mean,low,high,seeds,origin\n"));
    assert!(
        rows.lines().all(|row| row.split(',').count() == 10),
        "{rows}"
    );
    assert!(
        rows.contains("\nindependent,\"a\",tools,-,work,-,-,-,0,simulated\n"),
        "{rows}"
    );
    let computed = rows.lines().filter(|row| row.ends_with(",computed"));
    assert!(computed.clone().count() == 2 && computed.clone().all(|row| row.contains(",48,")));
    let page = fs::read_to_string(&html).unwrap();
    assert_eq!(page.matches("<svg").count(), 8);
    assert!(
        page.contains("±")
            && page.ends_with("</html>\n")
            && !page.contains("src=")
            && !page.contains("href=")
    );
    // The same figures again, and one for each row of the CSV file.
    let json = run(&["--experiment", &file, "-j"]).unwrap();
    assert_eq!(json.lines().count() + 1, rows.lines().count());
    let again = run(&["--experiment", &file, "-j", "--threads", "1"]).unwrap();
    assert_eq!(json, again);
    for line in json.lines() {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(row["mean"].is_number() || row["mean"].is_null());
    }
    let one = run(&[
        "--experiment",
        &file,
        "--scheme",
        "interacting",
        "--seeds",
        "1",
    ])
    .unwrap();
    assert!(
        one.contains("1 seeds") && !one.contains("independent"),
        "{one}"
    );
    assert!(!rows.contains("/fixed"), "{rows}");
    // A scheme that the file does not have.
    let other = run(&["--experiment", &file, "--scheme", "single"]).unwrap();
    assert_eq!(other.matches("\nscheme single").count(), 2, "{other}");
}

/// People see both kinds summed over classes, programs everything.
#[test]
fn figures_by_kind_where_there_are_fixed_counters() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (file, csv, html) = (path("fixed.toml"), path("out.csv"), path("out.html"));
    let fixed = SMALL.replace("cores = 2", "cores = 2\nfixed = 2");
    let fixed = fixed.replace(
        "[workload.tools]",
        "[workload.kernel]\narrival = 4\nfixed-share = 0.5\n[workload.tools]",
    );
    fs::write(&file, &fixed).unwrap();
    let words = ["--experiment", &file, "--csv", &csv, "--html", &html];
    let table = run(&words).unwrap();
    assert!(
        table.contains("4 counters and 2 fixed-function counters"),
        "{table}"
    );
    for who in ["\nall/programmable ", "\nall/fixed "] {
        assert_eq!(table.matches(who).count(), 4, "{table}");
    }
    assert!(!table.contains("kernel/fixed"), "{table}");
    let rows = fs::read_to_string(&csv).unwrap();
    let mean = |start: &str| {
        let row = rows.lines().find(|row| row.starts_with(start));
        row.unwrap_or_else(|| panic!("{start}: {rows}"))
            .split(',')
            .nth(5)
            .unwrap()
            .to_owned()
    };
    let of_kernel: f64 = mean("independent,\"a\",kernel/fixed,-,work,")
        .parse()
        .unwrap();
    let of_all: f64 = mean("independent,\"a\",all/fixed,-,work,").parse().unwrap();
    // Only the kernel demands fixed-function counters.
    assert!(of_kernel > 0.0 && (of_kernel - of_all).abs() < 1e-12);
    assert_eq!(mean("independent,\"a\",programs/fixed,-,work,"), "-");
    let page = fs::read_to_string(&html).unwrap();
    assert!(page.contains("all/fixed") && page.matches("<svg").count() == 8);
}

#[test]
fn experiments_that_cannot_be_simulated() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("some.toml").display().to_string();
    let check = |text: &str, parts: &[&str]| {
        fs::write(&file, text).unwrap();
        let shown = run(&["--experiment", &file]).unwrap_err();
        assert!(!shown.contains('\n'), "{shown}");
        for part in parts.iter().chain(&["some.toml"]) {
            assert!(shown.contains(part), "{shown}");
        }
    };
    check("seeds = \n", &["line 1"]);
    check("\nsedes = 3", &["line 2", "sedes"]);
    check("\nseeds = 0", &["line 2", "seeds = 0", "1 to 10000"]);
    check(
        "\n\nschemes = ['none']",
        &["line 3", "'none'", "independent"],
    );
    check("\nschemes = []", &["line 2", "schemes", "one at least"]);
    check(
        "schemes = ['single',\n'single']",
        &["line 2", "'single'", "already"],
    );
    check(
        "[machine]\nvcpus = 0",
        &["machine.vcpus = 0", "1 to 100000"],
    );
    check(
        "[workload.kernel]\nyields = 2",
        &["workload.kernel.yields = 2", "0 to 1"],
    );
    check(
        "[workload.firmware]\narrival = 1",
        &["firmware.arrival", "smm"],
    );
    check(
        "[workload.kernel]\nfixed-share = 0.5",
        &["workload.kernel.fixed-share = 0.5", "machine.fixed"],
    );
    check(
        "[machine]\nfixed = 2\n[workload]\nboot-fixed = 3",
        &["workload.boot-fixed = 3", "machine.fixed"],
    );
    check("[machine]\nfixed = 33", &["machine.fixed = 33", "0 to 32"]);
    check("[workload.kernle]\narrival = 1", &["line 1", "kernle"]);
    // Policies that contradict themselves, each other, or the machine.
    let policy = |rules: &str| format!("\n[[policy]]\nname = 'p'\nrules = [{rules}]\n");
    check(
        &policy("'kernel:min=3,max=2'"),
        &["line 2", "'p'", "at least 3", "at most 2"],
    );
    check(
        &policy("'kernel:min=3', 'kernel:max=3'"),
        &["line 2", "kernel", "already"],
    );
    check(
        &policy("'kernel:min=3', 'firmware:min=2'"),
        &["line 2", "5 programmable", "4"],
    );
    check(&policy("'users:min=3'"), &["line 2", "'users'"]);
    check(&policy("").repeat(2), &["line 6", "'p'", "already"]);
    check(
        &format!("{}grace-ms = 0", policy("")),
        &["line 2", "grace-ms"],
    );
    check("\n[cookies]\nbits = [49]", &["line 2", "49", "1 to 48"]);
    fs::write(&file, "").unwrap();
    let csv = folder.path().display().to_string();
    let shown = run(&["--experiment", &file, "--csv", &csv]).unwrap_err();
    assert!(
        shown.contains("--csv") && shown.contains("cannot write"),
        "{shown}"
    );
}

/// A run of one vCPU: the kernel gets two of four counters, then asks for three, then
/// gives one back. A decision is between them.
const TRAIL: [&str; 7] = [
    r#"{"format":"umpire-audit","version":1,"umpire":"0.1.0","started":"2026-01-01T00:00:00Z","vcpus":1,"pmu":"intel-v2","programmable":4,"fixed":3,"scheme":"independent","policy":["kernel:min=1,min-fixed=0,priority=0"],"grace_ms":100,"firmware":false,"smm":false}"#,
    r#"{"time_ns":100,"vcpu":0,"layer":"hypervisor","event":"requested","request":1,"what":"set-aside","counter":"PMC3","result":"done"}"#,
    r#"{"time_ns":900,"vcpu":0,"layer":"kernel","counter":"PMC1","event":"reserved"}"#,
    r#"{"time_ns":1000,"vcpu":0,"layer":"kernel","event":"requested","request":2,"what":"reserve","any":2,"cookie":"kernel","result":"granted","counters":["PMC1","PMC2"],"number":1}"#,
    r#"{"time_ns":2000000,"vcpu":0,"layer":"kernel","event":"requested","request":3,"what":"reserve","any":2,"cookie":"kernel","result":"refused","reason":"none-free","number":2}"#,
    r#"{"time_ns":3000000,"vcpu":0,"layer":"kernel","event":"requested","request":4,"what":"release","counter":"PMC2","cookie":"kernel","result":"granted","counters":["PMC2"],"number":3}"#,
    r#"{"end":true,"time_ns":4000000,"decisions":1,"lines":1,"requests":4}"#,
];

#[test]
fn a_trail_is_replayed_under_every_scheme() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("audit.json").display().to_string();
    fs::write(&file, TRAIL.join("\n")).unwrap();
    let table = run(&["--replay", &file]).unwrap();
    assert!(
        table.contains(
            "independent, as recorded: 4 requests, 3 granted, 1 denied, 0 pending, 0 unlike"
        ),
        "{table}"
    );
    // Here the hypervisor yields what the kernel is short of.
    let interacting = table
        .lines()
        .find(|line| line.starts_with("interacting:"))
        .unwrap();
    assert!(interacting.contains("4 granted, 0 denied") && interacting.contains("1 unlike"));
    let kept = ["--policy", "hypervisor:min=1", "--scheme", "interacting"];
    let kept = run(&[&["--replay", &file][..], &kept].concat()).unwrap();
    assert!(kept.contains("3 granted, 1 denied"), "{kept}");
    let json = run(&["--replay", &file, "-j"]).unwrap();
    let rows = json.lines().map(|line| serde_json::from_str(line).unwrap());
    let rows: Vec<serde_json::Value> = rows.collect();
    assert_eq!(rows.len(), 3 * 5);
    let same = rows.iter().filter(|row| row["scheme"] == "independent");
    assert!(
        same.filter(|row| row["event"] == "replayed")
            .all(|row| row["agrees"] == true)
    );
}

#[test]
fn damaged_trails() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("audit.json");
    let check = |lines: &[&str], parts: &[&str]| {
        fs::write(&path, lines.join("\n")).unwrap();
        let shown = run(&["--replay", &path.display().to_string()]).unwrap_err();
        assert!(!shown.contains('\n'), "{shown}");
        for part in parts.iter().chain(&["audit.json"]) {
            assert!(shown.contains(part), "{shown}");
        }
    };
    let without = |index: usize| {
        let mut lines = TRAIL.to_vec();
        lines.remove(index);
        lines
    };
    let with = |index: usize, from: &str, to: &str| {
        let mut lines = TRAIL.map(str::to_owned).to_vec();
        assert!(lines[index].contains(from));
        lines[index] = lines[index].replace(from, to);
        lines
    };
    let check_with = |index: usize, from: &str, to: &str, parts: &[&str]| {
        let lines = with(index, from, to);
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        check(&lines, parts);
    };
    check(&[], &["line 1", "no audit file"]);
    check(&without(0), &["line 1", "no audit file"]);
    // A missing decision is no gap: requests alone are replayed.
    fs::write(&path, without(2).join("\n")).unwrap();
    assert!(run(&["--replay", &path.display().to_string()]).is_ok());
    // What it says is passed over, but a run has written it.
    for (from, to) in [
        (r#""vcpu":0"#, r#""vcpu":"0""#),
        (r#""vcpu":0"#, r#""vcpu":256"#),
        (r#""time_ns":900"#, r#""time_ns":-900"#),
        (r#""counter":"PMC1""#, r#""counter":1"#),
        (r#""layer":"kernel""#, r#""layer":2"#),
        (r#""event""#, r#""lease_ms":"50","event""#),
    ] {
        check_with(2, from, to, &["line 3", "no line of an audit file"]);
    }
    check_with(
        0,
        r#""grace_ms":100"#,
        r#""grace_ms":"100""#,
        &["line 1", "no audit file"],
    );
    check(
        &without(3),
        &["line 4", "requests 2 to 2 of vCPU 0 are missing"],
    );
    check(&without(5), &["line 6", "had 4 requests", "has 3"]);
    check(&without(6), &["line 6", "cut off"]);
    check(
        &[&TRAIL[..], &TRAIL[2..3]].concat(),
        &["line 8", "after its last line"],
    );
    let again = [&TRAIL[..4], &TRAIL[3..]].concat();
    check(&again, &["line 5", "request 2 of vCPU 0 comes again"]);
    check(
        &[&TRAIL[..4], &["{\"time_ns\":10"], &TRAIL[6..]].concat(),
        &["line 5", "no line of an"],
    );
    check_with(
        0,
        "\"version\":1",
        "\"version\":2",
        &["line 1", "version 2"],
    );
    check_with(
        0,
        "\"scheme\":\"independent\",",
        "",
        &["line 1", "no reservations"],
    );
    check_with(0, "kernel:min=1", "kernle:min=1", &["line 1", "'kernle'"]);
    check_with(3, "\"vcpu\":0", "\"vcpu\":7", &["line 4", "vCPU 7"]);
    check_with(
        3,
        "\"layer\":\"kernel\"",
        "\"layer\":\"kernle\"",
        &["line 4", "'kernle'"],
    );
    check_with(3, "PMC1", "PMC99", &["line 4", "'PMC99'"]);
    check_with(4, "none-free", "nonfree", &["line 5", "'nonfree'"]);
    check_with(5, "\"release\"", "\"relaese\"", &["line 6", "'relaese'"]);
    fs::write(&path, b"\xff").unwrap();
    let shown = run(&["--replay", &path.display().to_string()]).unwrap_err();
    assert!(shown.contains("not UTF-8"), "{shown}");
}

#[test]
fn the_examples_are_experiments() {
    for name in ["experiment.toml", "fixed.toml", "large.toml"] {
        let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/examples");
        let example = examples.join(name).display().to_string();
        let words = [
            "--vcpus", "2", "--cores", "1", "--seeds", "1", "--scheme", "single",
        ];
        let table = run(&[&["--experiment", &example][..], &words].concat()).unwrap();
        assert!(table.contains("2 vCPUs on 1 cores"), "{table}");
    }
}

#[test]
fn flags_that_do_not_go_together() {
    for words in [
        &["--experiment", "a", "b.script"][..],
        &["--experiment", "a", "--replay", "b"],
        &["--replay", "a", "b.script"],
        &["--replay", "a", "--counters", "3"],
        &["--experiment", "a", "--policy", "kernel:min=1"],
        &["b.script", "--seeds", "3"],
        &["--experiment", "a", "--seeds", "0"],
        &[],
    ] {
        let all = ["umpire", "arbitrate"].iter().chain(words);
        let exit = parse(all.map(OsString::from)).unwrap_err();
        assert_eq!(exit.status, ExitStatus::BAD_INPUT, "{words:?}");
    }
}
