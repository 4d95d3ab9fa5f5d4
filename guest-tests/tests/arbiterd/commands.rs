//! What users type, and what they read.

use std::fs;
use std::time::{Duration, Instant};

use serde_json::Value;
use umpire_lease::{CallError, Next, Reason, Request, Standing, What};

use super::fixture::{Daemon, LONG, programmable};
use crate::golden::schemas::valid;

fn json(text: &str) -> Vec<Value> {
    text.lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

#[test]
fn a_command_runs_while_its_lease_is_held() {
    let daemon = Daemon::start();
    let socket = daemon.socket();
    let inner = format!(
        "UMPIRE_ARBITER={} {} leases -j; exit 7",
        socket.display(),
        guest_tests::umpire::path().display()
    );
    let output = daemon.umpire(&[
        "lease",
        "--counters",
        "2",
        "--fixed",
        "1",
        "--cpus",
        "0",
        "--label",
        "mine",
        "--",
        "sh",
        "-c",
        &inner,
    ]);
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    let leases = json(&String::from_utf8(output.stdout).expect("text"));
    assert_eq!(leases.len(), 1);
    assert_eq!(leases[0]["label"], "mine");
    assert_eq!(
        (&leases[0]["holds"], &leases[0]["state"]),
        (&3.into(), &"holds".into())
    );
    // It ends with the command.
    assert_eq!(daemon.out(&["leases", "-j"]), "");
}

#[test]
fn what_is_printed_for_programs_is_as_its_schema_says() {
    let daemon = Daemon::start();
    let held = daemon.acquire(&programmable(3));
    let socket = daemon.socket().display().to_string();
    valid("leases", &daemon.out(&["leases", "-j"]));
    valid("who", &daemon.out(&["who", "-j"]));
    for request in ["counters=1,cpus=0", "counters=4,cpus=0,wait"] {
        let explain = ["arbiterd", "--socket", &socket, "--explain", request, "-j"];
        valid("arbiterd", &daemon.out(&explain));
    }
    let id = held.lease().id.to_string();
    valid("revoke", &daemon.out(&["revoke", &id, "-j"]));
}

#[test]
fn who_is_refused_learns_who_holds_what() {
    let daemon = Daemon::start();
    let request = Request {
        label: Some("vm7".to_owned()),
        ..programmable(3)
    };
    let held = daemon.acquire(&request);
    let id = held.lease().id;
    let line = daemon.refused(&["lease", "--counters", "2", "--cpus", "0", "--", "true"]);
    assert!(line.contains(&format!("held by lease {id}")), "{line}");
    assert!(
        line.contains("--wait") && line.contains("umpire who 0"),
        "{line}"
    );
    let who = daemon.out(&["who", "0"]);
    assert!(who.contains("3 programmable  vm7"), "{who}");
    let who = json(&daemon.out(&["who", "vm7", "-j"]));
    assert_eq!(who[0]["places"].as_array().map(Vec::len), Some(1));
    let nobody = daemon.refused(&["who", "nobody"]);
    assert!(nobody.contains("nobody named 'nobody'"), "{nobody}");
    let explained = daemon.out(&[
        "arbiterd",
        "--socket",
        &daemon.socket().display().to_string(),
        "--explain",
        "counters=2,cpus=0",
    ]);
    assert!(explained.starts_with("It would be refused."), "{explained}");
    assert!(explained.contains("vm7"), "{explained}");
}

/// Processes, users and names of others are not for everybody; tenants and counters are.
#[test]
fn another_user_sees_tenants_and_counters_and_no_processes() {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    let me = rustix::process::geteuid().as_raw();
    if me != 0 {
        println!("skipped: another_user_sees_tenants_and_counters: not root");
        return;
    }
    const STRANGER: u32 = 65_534;
    let config = format!(
        "[[tenant]]\nname = \"mine\"\nusers = [0]\noperator = true\n\
         [[tenant]]\nname = \"other\"\nusers = [{STRANGER}]\nwhole-cpus = true\n"
    );
    let flags = ["--budget", "programmable=4", "--socket-mode", "0666"];
    let daemon = Daemon::with(&flags, &config);
    let open = fs::Permissions::from_mode(0o755);
    fs::set_permissions(daemon.folder.path(), open).expect("it is ours");
    let request = Request {
        label: Some("vm7".to_owned()),
        ..programmable(3)
    };
    let held = daemon.acquire(&request);
    // A copy, where every user may start it.
    let program = daemon.folder.path().join("umpire");
    guest_tests::umpire::copy_program(&guest_tests::umpire::path(), &program);
    let run = |arguments: &[&str]| {
        let mut command = std::process::Command::new(&program);
        command.args(arguments).uid(STRANGER).gid(STRANGER);
        command.env("UMPIRE_ARBITER", daemon.socket());
        let output = command.output().expect("it starts");
        String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr)
    };
    let pid = std::process::id().to_string();
    let socket = daemon.socket().display().to_string();
    let explain = [
        "arbiterd",
        "--socket",
        &socket,
        "--explain",
        "counters=2,cpus=0",
    ];
    for arguments in [
        &["who"][..],
        &["who", "-j"],
        &["who", "0", "-j"],
        &["leases", "-j"],
        &[&explain[..], &["-j"]].concat(),
        &explain,
        &["lease", "--counters", "2", "--cpus", "0", "--", "true"],
    ] {
        let seen = run(arguments);
        assert!(
            !seen.contains("vm7") && !seen.contains(&pid),
            "{arguments:?}: {seen}"
        );
    }
    let seen = json(&run(&["who", "0", "-j"]));
    let lease = &seen[0]["places"][0]["leases"][0];
    assert_eq!(
        (&lease["tenant"], &lease["holds"]),
        (&"mine".into(), &3.into())
    );
    let own = daemon.out(&["who", "0"]);
    assert!(own.contains("vm7") && own.contains(&pid), "{own}");
    drop(held);
}

#[test]
fn who_waits_is_served_when_the_counters_are_free() {
    let daemon = Daemon::start();
    let held = daemon.acquire(&programmable(3));
    let waits = Request {
        waits_ms: Some(-1),
        ..programmable(2)
    };
    let mut waiting = daemon.connect().acquire(&waits).expect("it waits");
    assert_eq!(
        (waiting.lease().holds, &waiting.lease().state),
        (0, &Standing::Waits)
    );
    drop(held);
    waiting.wait().expect("its turn comes");
    assert_eq!(waiting.lease().holds, 2);
    let soon = Request {
        waits_ms: Some(50),
        ..programmable(3)
    };
    let mut soon = daemon
        .connect()
        .acquire(&soon)
        .expect("it waits for a while");
    let ended = soon.wait();
    assert!(
        matches!(&ended, Err(CallError::Other(why)) if why.contains("as long as it said")),
        "{ended:?}"
    );
}

#[test]
fn a_revoked_holder_is_told_before() {
    let daemon = Daemon::start();
    let mut held = daemon.acquire(&programmable(4));
    let id = held.lease().id.to_string();
    let begun = Instant::now();
    let out = daemon.out(&["revoke", &id, "--grace", "300"]);
    assert!(
        out.contains("was told, and holds nothing in 300 ms"),
        "{out}"
    );
    let Ok(Next::Event(event)) = held.next(Some(LONG)) else {
        panic!("it was not told")
    };
    assert_eq!(
        (event.what, event.why),
        (What::Leaving, Some(Reason::Revoked))
    );
    assert!(begun.elapsed() < Duration::from_millis(300));
    let Ok(Next::Event(event)) = held.next(Some(LONG)) else {
        panic!("it did not end")
    };
    assert_eq!(event.what, What::Ended);
    assert!(begun.elapsed() >= Duration::from_millis(300));
    let gone = daemon.refused(&["revoke", &id]);
    assert!(gone.contains("no such lease"), "{gone}");
}

const TENANTS: &str = r#"
grace-ms = 20
[classes]
production = 5

[[pmu]]
programmable = 4
cpus = "0-1"
[pmu.events]
l1d = ["PMC0", "PMC1"]

[[tenant]]
name = "agent"
users = [0, UID]
class = "production"
operator = true

[[tenant]]
name = "guest"
users = [UID]
guaranteed = false
whole-cpus = true
longest-ms = 60000
"#;

fn tenants() -> String {
    TENANTS.replace("UID", &rustix::process::geteuid().as_raw().to_string())
}

#[test]
fn the_policy_decides_and_a_reload_drops_nothing() {
    let daemon = Daemon::with(&[], &tenants());
    let guest = Request {
        tenant: Some("guest".to_owned()),
        guaranteed: Some(false),
        lasts_ms: Some(60_000),
        waits_ms: Some(-1),
        ..programmable(4)
    };
    let mut effort = daemon.acquire(&guest);
    let refused = |arguments: &[&str]| daemon.refused(arguments);
    let line = refused(&["lease", "--tenant", "guest", "--for", "1s", "--", "true"]);
    assert!(line.contains("best effort only"), "{line}");
    let line = refused(&["lease", "--tenant", "guest", "--best-effort", "--", "true"]);
    assert!(line.contains("last for 60.000 s"), "{line}");
    let line = refused(&["lease", "--tenant", "nobody", "--", "true"]);
    assert!(
        line.contains("'nobody'") && line.contains("agent, guest"),
        "{line}"
    );
    let line = refused(&["lease", "--event", "l2", "--", "true"]);
    assert!(line.contains("it has: l1d"), "{line}");
    // Production takes what was best effort, after its notice.
    let firm = Request {
        counters: vec![umpire_lease::Counters {
            event: Some("l1d".to_owned()),
            ..Default::default()
        }],
        priority: Some(5),
        waits_ms: Some(-1),
        ..programmable(1)
    };
    let mut firm = daemon.connect().acquire(&firm).expect("it waits");
    firm.wait().expect("its turn comes");
    let Ok(Next::Event(event)) = effort.next(Some(LONG)) else {
        panic!("it was not told")
    };
    assert_eq!(
        (event.what, event.why),
        (What::Leaving, Some(Reason::Preempted))
    );

    let config = daemon.folder.path().join("arbiter.toml");
    fs::write(
        &config,
        tenants().replace("production = 5", "production = 2"),
    )
    .expect("a file");
    hang_up(&daemon);
    let until = Instant::now() + LONG;
    loop {
        let output = daemon.umpire(&["lease", "--priority", "3", "--cpus", "1", "--", "true"]);
        if String::from_utf8_lossy(&output.stderr).contains("priorities up to 2") {
            break;
        }
        assert!(Instant::now() < until, "{output:?}");
    }
    fs::write(&config, "tenants = 3").expect("a file");
    hang_up(&daemon);
    while !daemon.log().contains(":1:1:") {
        assert!(Instant::now() < until, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(
        json(&daemon.out(&["leases", "-j"])).len(),
        2,
        "nothing was dropped"
    );
}

/// Has the arbiter read its configuration again.
fn hang_up(daemon: &Daemon) {
    let pid = rustix::process::Pid::from_raw(daemon.pid()).expect("a pid");
    let signal = rustix::process::Signal::HUP;
    rustix::process::kill_process(pid, signal).expect("it is ours");
}

#[test]
fn a_wrong_configuration_is_named_by_line_and_column() {
    let daemon = Daemon::start();
    let path = daemon.folder.path().join("wrong.toml");
    let file = path.display().to_string();
    for (text, said) in [
        ("[[tenant]]\nname = 3\n", ":2:8:"),
        ("grace = 3\n", ":1:1:"),
        (
            "[[pmu]]\nprogrammable = 4\ncpus = \"3-1\"\n",
            "the range 3-1 ends before it begins",
        ),
        (
            "[[tenant]]\nname = \"a\"\n",
            "has no users, groups or cgroups",
        ),
        (
            "[[tenant]]\nname = \"a\"\nusers = [\"no such user\"]\n",
            "has no user 'no such user'",
        ),
        (
            "\n[[tenant]]\nname = \"a\"\nusers = [1]\nclass = \"x\"\n",
            ":2:",
        ),
        (
            "[[pmu]]\nprogrammable = 2\n[[tenant]]\nname = \"a\"\nusers = [1]\nminimum-cpu = { programmable = 3 }\n",
            "promise 3 programmable counters on CPU 0, which has 2",
        ),
    ] {
        fs::write(&path, text).expect("a file");
        let line = daemon.refused(&["arbiterd", "--config", &file, "--check-config"]);
        assert!(line.contains(said), "{text}: {line}");
    }
    fs::write(&path, tenants()).expect("a file");
    daemon.out(&["arbiterd", "--config", &file, "--check-config"]);
    // Without an arbiter: of one that begins with this configuration.
    let absent = daemon.folder.path().join("absent").display().to_string();
    let explained = daemon.out(&[
        "arbiterd",
        "--config",
        &file,
        "--socket",
        &absent,
        "--explain",
        "counters=2,cpus=0-1,tenant=agent",
    ]);
    assert!(
        explained.starts_with("It would be granted: 2 of 2 counters"),
        "{explained}"
    );
    let line = daemon.refused(&[
        "arbiterd",
        "--config",
        &file,
        "--socket",
        &absent,
        "--explain",
        "color=2",
    ]);
    assert!(line.contains("'color' is no part of a request"), "{line}");
}

#[test]
fn commands_without_an_arbiter_say_how_to_start_one() {
    let mut daemon = Daemon::start();
    daemon.kill();
    for command in [
        &["leases"][..],
        &["who"],
        &["revoke", "1"],
        &["lease", "--", "true"],
        &["hog", "1"],
    ] {
        let line = daemon.refused(command);
        assert!(line.contains("umpire arbiterd"), "{line}");
    }
    let taken = Daemon::start();
    let line = taken.refused(&[
        "arbiterd",
        "--budget",
        "programmable=1",
        "--socket",
        &taken.socket().display().to_string(),
    ]);
    assert!(
        line.contains("another arbiter serves this socket"),
        "{line}"
    );
}

/// The configuration of the operators' page can be used, on a host with its users.
#[test]
fn the_operators_page_has_a_policy_that_can_be_used() {
    let page = include_str!("../../../docs/guide/operators.md");
    let policy = page.split("```toml\n").nth(1).expect("a policy");
    let policy = policy.split("```").next().expect("its end");
    let policy = ["telemetry", "vm-blue", "vm-green"]
        .iter()
        .zip(1..)
        .fold(policy.to_owned(), |text, (user, uid)| {
            text.replace(&format!("\"{user}\""), &uid.to_string())
        });
    let daemon = Daemon::start();
    let path = daemon.folder.path().join("policy.toml");
    let check = |policy: String| {
        std::fs::write(&path, policy).expect("a file");
        let path = path.display().to_string();
        daemon.umpire(&["arbiterd", "--check-config", "--config", &path])
    };
    let checked = check(policy.clone());
    assert!(checked.status.success(), "{checked:?}");
    // Where the counters are known, so is what it promises.
    let stated = |count| format!("{policy}\n[[pmu]]\nname = \"cpu\"\nprogrammable = {count}\n");
    assert!(check(stated(6)).status.success());
    assert_eq!(check(stated(3)).status.code(), Some(2));
}
