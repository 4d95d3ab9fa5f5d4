//! Metrics, the dashboard that shows them, and the audit.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;
use umpire_lease::{
    AuditIn, CallError, Counters, Figure, LeaseScope, Next, NoReply, Reason, ReportIn, Request,
};

use guest_tests::umpire::{self, skipped_without_kvm};
use guest_tests::vm::Vm;

use super::fixture::{Daemon, LONG, programmable};
use super::groups::Slice;
use super::python::python;

/// Asks at a Unix socket, and returns all that comes; nothing if one is too many, who is closed
/// perhaps before the question.
fn ask(socket: &Path, request: &[u8]) -> String {
    let mut stream = UnixStream::connect(socket).expect("it listens");
    stream.set_read_timeout(Some(LONG)).expect("a socket");
    if let Err(error) = stream.write_all(request) {
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe, "it reads");
        return String::new();
    }
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    answer
}

fn metrics(daemon: &Daemon) -> String {
    // A text may be a fifth of a second old.
    std::thread::sleep(Duration::from_millis(250));
    let socket = daemon.folder.path().join("metrics");
    let answer = ask(&socket, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    assert!(head.contains("application/openmetrics-text"), "{head}");
    body.to_owned()
}

/// A value by the whole text before it.
fn value(text: &str, series: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(series));
    let line = line.unwrap_or_else(|| panic!("no {series} in:\n{text}"));
    line.trim().parse().expect("a number")
}

fn daemon(config: &str) -> Daemon {
    daemon_in(tempfile::tempdir().expect("a folder"), config)
}

fn daemon_in(folder: TempDir, config: &str) -> Daemon {
    let flags = ["--budget", "programmable=4,fixed=2", "--metrics"];
    let mut daemon = Daemon::in_folder(folder, &flags, config);
    let path = daemon.folder.path().join("metrics");
    daemon.add_flag(&path.display().to_string());
    daemon.begin();
    daemon
}

#[test]
fn figures_are_what_happened() {
    let daemon = daemon("grace-ms = 0\n");
    let held = daemon.acquire(&programmable(3));
    let lease = held.lease().id;
    let refused = daemon.connect().acquire(&programmable(2));
    assert!(matches!(refused, Err(CallError::Refused(_))), "{refused:?}");
    let waits = daemon.connect().acquire(&Request {
        waits_ms: Some(-1),
        ..programmable(2)
    });
    let report = |pmis| ReportIn {
        lease,
        figures: vec![Figure {
            name: "pmis".to_owned(),
            count: pmis,
        }],
    };
    let mut other = daemon.connect();
    for pmis in [5, 7, 3] {
        let NoReply {} = other.call("Report", &report(pmis)).expect("it is taken");
    }
    let text = metrics(&daemon);
    let here = "{pmu=\"cpu\",cpus=\"0\",kind=\"programmable\"}";
    let of = |name: &str, labels: &str| value(&text, &format!("umpire_{name}{labels}"));
    assert_eq!(of("arbiter_counters", here), 4.0);
    assert_eq!(of("arbiter_counters_held", here), 3.0);
    assert_eq!(of("arbiter_counters_free", here), 1.0);
    let tenant = "tenant=\"default\"";
    assert_eq!(
        of("arbiter_leases", &format!("{{{tenant},state=\"holds\"}}")),
        1.0
    );
    assert_eq!(
        of("arbiter_leases", &format!("{{{tenant},state=\"waits\"}}")),
        1.0
    );
    assert_eq!(of("arbiter_waiting", ""), 1.0);
    assert_eq!(of("arbiter_grants_total", &format!("{{{tenant}}}")), 1.0);
    let held_by = format!("{{{tenant},reason=\"held\"}}");
    assert_eq!(of("arbiter_denials_total", &held_by), 1.0);
    // It began anew at 3.
    let pmis = format!("{{{tenant},figure=\"pmis\"}}");
    assert_eq!(of("holder_total", &pmis), 10.0);
    let pmis = format!("{{{tenant},lease=\"{lease}\",figure=\"pmis\"}}");
    assert_eq!(of("lease_total", &pmis), 10.0);
    daemon.out(&["revoke", &lease.to_string()]);
    drop(waits);
    let text = metrics(&daemon);
    let revoked = format!("umpire_arbiter_losses_total{{{tenant},reason=\"revoked\"}}");
    assert_eq!(value(&text, &revoked), 1.0);
    assert!(!text.contains("umpire_lease_total"), "the lease has ended");
    let unknown = other.call::<_, NoReply>("Report", &report(1));
    let CallError::Refused(why) = unknown.expect_err("there is no lease") else {
        panic!("refused");
    };
    assert_eq!(why.reason, Reason::NoSuchLease);
    drop(held);
}

#[test]
fn leases_of_control_groups_have_figures_of_their_own() {
    let Some(mut slice) = Slice::new("leases_of_control_groups_have_figures") else {
        return;
    };
    let daemon = daemon("");
    let [job, step, _] = ["/job", "/job/step", "/other"].map(|name| slice.make(name));
    let thread = slice.start("/job/step", Command::new("cat")).id();
    let of_group = |path: &str, count| Request {
        counters: vec![Counters::programmable(count)],
        scope: Some(LeaseScope::Cgroup),
        cgroup: Some(path.to_owned()),
        ..Request::default()
    };
    let of = |text: &str, name: &str, labels: &str| {
        value(
            text,
            &format!("umpire_arbiter_{name}{{tenant=\"default\"{labels}}}"),
        )
    };
    assert_eq!(of(&metrics(&daemon), "groups", ""), 0.0);
    for (path, count) in [(&job, 3), (&job, 1), (&step, 2)] {
        drop(daemon.acquire(&of_group(path, count)));
    }
    let _held = daemon.acquire(&Request {
        scope: Some(LeaseScope::Thread),
        threads: Some(vec![thread]),
        ..programmable(1)
    });
    let text = metrics(&daemon);
    assert_eq!(of(&text, "groups", ""), 2.0);
    assert_eq!(of(&text, "leases_within", ",scope=\"cgroup\""), 1.0);
    assert_eq!(of(&text, "leases_within", ",scope=\"thread\""), 1.0);
    let child = slice.child(thread);
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    let until = Instant::now() + LONG;
    loop {
        let text = metrics(&daemon);
        if of(&text, "groups", "") == 0.0 {
            let lost = of(&text, "losses_total", ",reason=\"group-empty\"");
            assert!(lost >= 2.0, "{text}");
            for scope in ["cgroup", "thread", "part"] {
                let labels = format!(",scope=\"{scope}\"");
                assert_eq!(of(&text, "leases_within", &labels), 0.0);
            }
            return;
        }
        assert!(Instant::now() < until, "{text}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn scrapers_cannot_hold_it_up() {
    let daemon = daemon("");
    let socket = daemon.folder.path().join("metrics");
    let wrong = |request: &[u8], status: &str| {
        let answer = ask(&socket, request);
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{answer}"
        );
    };
    wrong(b"GET / HTTP/1.1\r\n\r\n", "404");
    wrong(b"POST /metrics HTTP/1.1\r\n\r\n", "405");
    wrong(b"\0nonsense\r\n\r\n", "400");
    wrong(&[b'a'; 20_000], "431");
    let leases = || {
        let begun = Instant::now();
        for _ in 0..50 {
            drop(daemon.acquire(&programmable(1)));
        }
        begun.elapsed()
    };
    let before = leases();
    // Those who say nothing are few, keep nobody from being served, and are left after a time.
    let mut silent: Vec<UnixStream> = (0..40)
        .filter_map(|_| UnixStream::connect(&socket).ok())
        .collect();
    let begun = Instant::now();
    let served = ask(&socket, b"GET /metrics HTTP/1.1\r\n\r\n");
    assert!(served.ends_with("# EOF\n"), "{served}");
    // Whoever waits for one of them waits for five seconds.
    let most = (before * 3 + Duration::from_secs(2)).min(Duration::from_secs(5));
    let beside = leases();
    assert!(
        beside < most,
        "{before:?} without them, {beside:?} beside them"
    );
    for one in &mut silent {
        one.set_read_timeout(Some(LONG)).expect("a socket");
        assert_eq!(one.read(&mut [0; 8]).expect("its end"), 0);
    }
    let last = begun.elapsed();
    assert!(
        (Duration::from_secs(4)..LONG).contains(&last),
        "they were left after {last:?}"
    );
    assert!(metrics(&daemon).ends_with("# EOF\n"));
}

#[test]
fn who_asks_for_prometheus_own_text_gets_it() {
    let daemon = daemon("");
    let socket = daemon.folder.path().join("metrics");
    let answer = ask(
        &socket,
        b"GET /metrics HTTP/1.1\r\nAccept: text/plain\r\n\r\n",
    );
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    assert!(
        head.contains("Content-Type: text/plain; version=0.0.4"),
        "{head}"
    );
    let counter = "# TYPE umpire_arbiter_connections_refused_total counter\n";
    assert!(body.contains(counter) && !body.contains("# EOF"), "{body}");
    assert!(
        body.contains("\numpire_arbiter_connections_refused_total "),
        "{body}"
    );
    // The same samples as in the other format.
    let samples = |text: &str| -> BTreeSet<String> {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        lines
            .filter_map(|line| Some(line.rsplit_once(' ')?.0.to_owned()))
            .collect()
    };
    assert_eq!(samples(body), samples(&metrics(&daemon)));
}

#[test]
fn a_port_is_of_this_host_only() {
    let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr());
    let port = port.expect("a port").port();
    let address = format!("127.0.0.1:{port}");
    let daemon = Daemon::with(&["--budget", "programmable=4", "--metrics", &address], "");
    let connect = || TcpStream::connect(&address).expect("it listens");
    let begun = Instant::now();
    // Nobody knows whose connections there are: all may be of one who says nothing.
    let silent: Vec<TcpStream> = (0..40).map(|_| connect()).collect();
    let mut stream = connect();
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\n\r\n")
        .expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    assert!(answer.ends_with("# EOF\n"), "{answer}");
    let took = begun.elapsed();
    assert!(
        took < Duration::from_secs(4),
        "it waited for them: {took:?}"
    );
    drop(silent);
    let error = daemon.refused(&[
        "arbiterd",
        "--budget",
        "programmable=4",
        "--metrics",
        "0.0.0.0:1",
    ]);
    assert!(error.contains("only loopback"), "{error}");
}

/// Names of metrics in the queries of a dashboard.
fn queried(dashboard: &Value, names: &mut BTreeSet<String>) {
    match dashboard {
        Value::Object(fields) => {
            for (field, value) in fields {
                if let ("expr" | "query", Some(query)) = (field.as_str(), value.as_str()) {
                    let words = query.split(|one: char| !one.is_alphanumeric() && one != '_');
                    let words = words.filter(|word| word.starts_with("umpire_"));
                    names.extend(words.map(str::to_owned));
                }
                queried(value, names);
            }
        }
        Value::Array(values) => values.iter().for_each(|value| queried(value, names)),
        _ => {}
    }
}

#[test]
fn the_dashboard_asks_for_what_there_is() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/grafana-arbiter.json");
    let text = fs::read_to_string(path).expect("the dashboard");
    let mut names = BTreeSet::new();
    queried(&serde_json::from_str(&text).expect("JSON"), &mut names);
    assert!(names.len() >= 12, "{names:?}");
    // Families that have a reason in their labels begin with the first.
    let daemon = daemon("grace-ms = 0\n");
    let held = daemon.acquire(&programmable(3));
    let lease = held.lease().id;
    assert!(daemon.connect().acquire(&programmable(2)).is_err());
    let other = daemon.acquire(&programmable(1));
    daemon.out(&["revoke", &other.lease().id.to_string()]);
    let report = ReportIn {
        lease,
        figures: vec![Figure {
            name: "traps".to_owned(),
            count: 1,
        }],
    };
    let NoReply {} = daemon
        .connect()
        .call("Report", &report)
        .expect("it is taken");
    let text = metrics(&daemon);
    let described: BTreeSet<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .collect();
    for name in &names {
        let ends = ["", "_total", "_bucket", "_sum", "_count"].into_iter();
        let mut ends = ends.filter_map(|end| name.strip_suffix(end));
        assert!(
            ends.any(|family| described.contains(family)),
            "{name} is not exported"
        );
    }
}

const PARSE: &str = r#"
import sys
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse
families = {family.name: family for family in parse(sys.stdin.read())}
assert families["umpire_arbiter_grants"].type == "counter", families
assert families["umpire_arbiter_blind_seconds"].unit == "seconds"
print(len(families))
"#;

#[test]
fn others_read_the_metrics() {
    let name = "others_read_the_metrics";
    let me = rustix::process::geteuid().as_raw();
    // A name that would be two labels if it were not escaped.
    let config = format!("[[tenant]]\nname = 'a\",b=\"\\'\nusers = [{me}]\noperator = true\n");
    let daemon = daemon(&config);
    drop(daemon.acquire(&programmable(2)));
    let text = metrics(&daemon);
    let site = match python(daemon.folder.path(), "prometheus_client") {
        Ok(site) => site,
        Err(why) => {
            println!("skipped: {name}: no prometheus_client for Python: {why}");
            return;
        }
    };
    let path = daemon.folder.path().join("text");
    fs::write(&path, text).expect("a file");
    let output = Command::new("timeout")
        .args(["60", "python3", "-c", PARSE])
        .env("PYTHONPATH", site)
        .stdin(fs::File::open(&path).expect("a file"))
        .output()
        .expect("python3");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
}

/// The records of the audit, oldest first.
fn records(daemon: &Daemon) -> Vec<Value> {
    let path = |number: u32| {
        let end = if number == 0 {
            String::new()
        } else {
            format!(".{number}")
        };
        daemon.folder.path().join(format!("audit{end}"))
    };
    let files = (0..=20).rev().map(path);
    let text: String = files
        .filter_map(|file| fs::read_to_string(file).ok())
        .collect();
    let parse = |line: &str| serde_json::from_str(line).expect("JSON");
    text.lines().map(parse).collect()
}

#[test]
fn decisions_and_lines_of_vms_are_in_one_audit() {
    let folder = tempfile::tempdir().expect("a folder");
    let audit = folder.path().join("audit").display().to_string();
    let config = format!("grace-ms = 0\naudit = \"{audit}\"\naudit-size = 4096\naudit-keep = 20\n");
    let flags = ["--budget", "programmable=4"];
    let mut daemon = Daemon::in_folder(folder, &flags, &config);
    daemon.begin();
    let held = daemon.acquire(&programmable(3));
    let lease = held.lease().id;
    assert!(daemon.connect().acquire(&programmable(2)).is_err());
    let lines = |lines: &[&str]| AuditIn {
        lease,
        lines: lines.iter().map(|line| (*line).to_owned()).collect(),
    };
    let mut vm = daemon.connect();
    let NoReply {} = vm
        .call(
            "Audit",
            &lines(&["{\"event\": \"taken\", \"vcpu\": 1}", "{}"]),
        )
        .expect("they are kept");
    for wrong in [&["[]"][..], &["{"], &["{} {}"], &["{}"; 65]] {
        let refused = vm.call::<_, NoReply>("Audit", &lines(wrong));
        assert!(matches!(refused, Err(CallError::Refused(_))), "{refused:?}");
    }
    daemon.out(&["revoke", &lease.to_string()]);
    drop(held);
    // The file rotates, and the arbiter dies: no number is missing.
    for _ in 0..40 {
        drop(daemon.acquire(&programmable(1)));
    }
    daemon.kill();
    daemon.begin();
    drop(daemon.acquire(&programmable(1)));
    daemon.end();
    let records = records(&daemon);
    let numbers: Vec<u64> = records
        .iter()
        .filter_map(|record| record["seq"].as_u64())
        .collect();
    assert_eq!(numbers, (1..=records.len() as u64).collect::<Vec<_>>());
    assert!(daemon.folder.path().join("audit.2").exists());
    let has = |event: &str, why: &str| {
        let mut same = records.iter();
        same.any(|record| record["event"] == event && (why.is_empty() || record["why"] == why))
    };
    assert!(has("holds", "granted") && has("refused", "held") && has("ended", "revoked"));
    assert!(has("refused", "wrong-request") && has("rotated", "") && has("follows", ""));
    let of_vm = records.iter().find(|record| record["event"] == "vm");
    let of_vm = of_vm.expect("a line of the VM");
    assert_eq!(
        (&of_vm["line"]["vcpu"], &of_vm["lease"]),
        (&1.into(), &lease.into())
    );
}

/// The number of the first record that says of this label's lease that it was granted.
fn evidence(records: &[Value]) -> Option<u64> {
    let is_it = |one: &&Value| one["label"] == "evidence" && one["why"] == "granted";
    records.iter().find(is_it)?["seq"].as_u64()
}

/// A tenant that asks and asks fills its own share of the audit; what another has done, what
/// users without a tenant were refused, and the last that the loud one did are all there.
#[test]
fn a_loud_tenant_displaces_its_own_records() {
    let folder = tempfile::tempdir().expect("a folder");
    let audit = folder.path().join("audit").display().to_string();
    let me = rustix::process::geteuid().as_raw();
    let config = format!(
        "grace-ms = 0\nclaim-window-ms = 500\naudit = \"{audit}\"\naudit-size = 32768\naudit-keep = 4\naudit-age-hours = 1\n\
         [[tenant]]\nname = \"quiet\"\nusers = [{me}]\noperator = true\n\
         [[tenant]]\nname = \"loud\"\nusers = [{me}]\noperator = true\n"
    );
    let mut daemon = Daemon::in_folder(folder, &["--budget", "programmable=4"], &config);
    daemon.begin();
    let of = |tenant: &str, label: &str| Request {
        tenant: Some(tenant.to_owned()),
        label: Some(label.to_owned()),
        // Others may take its counters: what becomes of it then is their doing.
        guaranteed: Some(tenant == "loud"),
        waits_ms: Some(-1),
        ..programmable(4)
    };
    let mut quiet = daemon.acquire(&of("quiet", "evidence"));
    let until = Instant::now() + LONG;
    let first = loop {
        match evidence(&records(&daemon)) {
            Some(seq) => break seq,
            None => assert!(Instant::now() < until, "its lease is in no record"),
        }
    };
    let flood = "x".repeat(128);
    for round in 0..1_200 {
        // It waits for a moment, until the other has left.
        let mut loud = daemon
            .connect()
            .acquire(&of("loud", &flood))
            .expect("it waits");
        loud.wait().expect("its turn comes");
        drop(loud);
        // It reads what it is told, or the arbiter leaves it; until the crash.
        while let Ok(Next::Event(_)) = quiet.next(Some(Duration::ZERO)) {}
        if round == 600 {
            // A crash in the middle of it.
            daemon.kill();
            daemon.begin();
        }
    }
    drop(quiet);
    drop(
        daemon
            .connect()
            .acquire(&of("loud", "the last"))
            .expect("it waits"),
    );
    daemon.end();
    let records = records(&daemon);
    let numbers: Vec<u64> = records
        .iter()
        .filter_map(|record| record["seq"].as_u64())
        .collect();
    assert!(numbers.is_sorted(), "{numbers:?}");
    let last = *numbers.last().expect("records");
    // How many there are of a round depends on who comes first, the loud one or the quiet one.
    let kept = numbers.len() as u64;
    assert!(last > 4 * kept, "there was room for {kept} of {last}");
    let has = |is: &dyn Fn(&Value) -> bool| records.iter().any(is);
    assert_eq!(evidence(&records), Some(first));
    assert!(has(&|one| one["label"] == "the last"));
    assert!(has(&|one| one["tenant"] == "quiet" && one["by"] == "loud"));
    let gone = records.iter().filter(|one| one["event"] == "displaced");
    let gone: Vec<&Value> = gone.collect();
    assert!(
        !gone.is_empty() && gone.iter().all(|one| one["of"] == "loud"),
        "{gone:?}"
    );
    let lengths = fs::read_dir(daemon.folder.path()).expect("a folder");
    let lengths = lengths.filter_map(|file| file.ok()).filter(|file| {
        let name = file.file_name();
        name.to_str().is_some_and(|name| name.starts_with("audit"))
    });
    let all: u64 = lengths
        .filter_map(|file| file.metadata().ok())
        .map(|file| file.len())
        .sum();
    // Some megabytes were written.
    assert!(all <= 1 << 20, "{all}");
}

#[test]
fn an_audit_that_cannot_be_written_stops_nobody() {
    let config = "audit = \"/dev/full\"\n";
    let folder = tempfile::tempdir().expect("a folder");
    let daemon = Daemon::in_folder(folder, &["--budget", "programmable=4"], config);
    let error = daemon.command().output().expect("it starts");
    let error = String::from_utf8_lossy(&error.stderr).into_owned();
    assert!(error.contains("audit /dev/full"), "{error}");
    // It is full later: a limit on the size of files.
    let folder = tempfile::tempdir().expect("a folder");
    let audit = folder.path().join("audit").display().to_string();
    let flags = ["--budget", "programmable=4"];
    let config = format!("audit = \"{audit}\"\n");
    let mut daemon = Daemon::in_folder(folder, &flags, &config).without_state();
    daemon.limited("trap '' XFSZ; ulimit -f 4; exec \"$0\" \"$@\"");
    let mut vm = daemon.acquire(&programmable(1));
    for _ in 0..40 {
        drop(daemon.acquire(&programmable(1)));
    }
    let lines = AuditIn {
        lease: vm.lease().id,
        lines: vec!["{}".to_owned()],
    };
    // One short line may have room where many records at once had none.
    let audit = || daemon.connect().call::<_, NoReply>("Audit", &lines);
    let failed = (0..100).find_map(|_| audit().err());
    let CallError::Refused(why) = failed.expect("it is full") else {
        panic!("refused");
    };
    assert_eq!(why.reason, Reason::AuditFailed);
    assert!(vm.next(Some(Duration::ZERO)).is_ok());
    assert!(
        daemon.log().contains("records of the audit are lost"),
        "{}",
        daemon.log()
    );
}

/// What a VM does is in the host's metrics, and what its guest was given and denied in the
/// host's audit.
#[test]
fn a_vm_is_in_the_metrics_and_the_audit_of_the_host() {
    if skipped_without_kvm("a_vm_is_in_the_metrics") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let audit = folder.path().join("audit");
    let config = format!("grace-ms = 0\naudit = \"{}\"\n", audit.display());
    let daemon = daemon_in(folder, &config);
    let socket = daemon.socket().display().to_string();
    let rates = "counters = 2\n[event.cycles]\nrate = 1000\n";
    let flags = [
        ["--arbiter", socket.as_str()],
        ["--arbiter-shortage", "fewer"],
        ["--audit", "arbiter"],
        ["--arbiter-terms", "preemptible,label=web"],
    ];
    let mut vm = Vm::boot(&umpire::path(), rates, &flags.concat());
    // The guest has made no access, but Umpire was asked for something: exits there are.
    let began = Instant::now();
    loop {
        let text = metrics(&daemon);
        let series = "umpire_holder_total{tenant=\"default\",figure=\"exits\"} ";
        let line = text.lines().find_map(|line| line.strip_prefix(series));
        if line.is_some_and(|count| count.trim().parse::<f64>().is_ok_and(|n| n > 0.0)) {
            break;
        }
        assert!(began.elapsed() < LONG, "{text}");
    }
    let request = Request {
        priority: Some(1),
        waits_ms: Some(-1),
        ..programmable(2)
    };
    let mut taken = daemon.connect().acquire(&request).expect("it waits");
    taken.wait().expect("it is served");
    // What comes back at once need not be noticed.
    let began = Instant::now();
    while !fs::read_to_string(&audit).is_ok_and(|audit| audit.contains("budget-set")) {
        assert!(began.elapsed() < LONG, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(taken);
    vm.stop();
    let audit = fs::read_to_string(audit).expect("the audit");
    // The end of the lease may just be written.
    let (audit, _) = audit.rsplit_once('\n').expect("lines");
    let lines = audit
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let of_vm: Vec<Value> = lines.filter(|line| line["event"] == "vm").collect();
    assert!(of_vm.iter().all(|line| line["label"] == "web"), "{audit}");
    assert_eq!(of_vm[0]["line"]["format"], "umpire-audit", "{audit}");
    let is_set = |line: &&Value| line["line"]["event"] == "budget-set";
    assert!(of_vm.iter().any(|line| is_set(&line)), "{audit}");
    assert_eq!(of_vm[of_vm.len() - 1]["line"]["end"], true, "{audit}");
}
