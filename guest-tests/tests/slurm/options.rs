//! How counters are asked for: by each of Slurm's commands, wrongly, and patiently.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::cluster::{Cluster, POLICY, library, plugin, said, shared, until_leases};
use super::whole_cpus;

/// What `sbatch` says, and its job.
fn batch(cluster: &Cluster, words: &[&str]) -> (u32, String) {
    let mut all = vec!["sbatch", "--parsable", "-o", "job.%A.%a.%j"];
    all.extend(words);
    let (status, text) = cluster.said(&all);
    assert_eq!(status, Some(0), "{words:?}: {text}");
    let job = text
        .lines()
        .last()
        .and_then(|line| line.trim().parse().ok());
    (job.unwrap_or_else(|| panic!("{text}")), text)
}

#[test]
fn each_of_slurms_commands_asks_by_the_same_option() {
    let Some(cluster) = shared("each_of_slurms_commands_asks_by_the_same_option") else {
        return;
    };
    let _arbiters = cluster.arbiters(POLICY);
    // A batch script, and the steps in it.
    let (job, _) = batch(
        &cluster,
        &[
            "--wait",
            "-p",
            "shared",
            "--counters=2,fixed=1",
            "--wrap",
            "srun --overlap echo it ran",
        ],
    );
    let account = cluster.account(job);
    assert!(account.starts_with("COMPLETED|0:0"), "{account}");
    assert!(account.contains("gres/pmc=2,gres/pmcfixed=1"), "{account}");
    let log = cluster.log_of("n1") + &cluster.log_of("n2");
    for step in ["batch", "0"] {
        assert!(
            log.contains(&format!("umpire: step {job}.{step}: lease ")),
            "{step}: {log}"
        );
    }
    // Each task of an array.
    let (job, _) = batch(
        &cluster,
        &[
            "--wait",
            "-p",
            "shared",
            "--counters=3",
            "--array=1-2",
            "--wrap",
            "true",
        ],
    );
    let accounts = cluster.accounts(job, 2);
    let with_counters = accounts.lines().filter(|line| line.contains("gres/pmc=3"));
    assert_eq!(with_counters.count(), 2, "{accounts}");
    // salloc, and a step in it.
    let words = [
        "salloc",
        "-p",
        "shared",
        "--counters=2",
        "srun",
        "echo",
        "it ran",
    ];
    let (status, text) = cluster.said(&words);
    assert!(status == Some(0) && text.contains("it ran"), "{text}");
    // Each part of a heterogeneous job.
    let words = [
        "srun",
        "-p",
        "shared",
        "-n1",
        "--counters=2",
        ":",
        "-p",
        "shared",
        "-n1",
        "--counters=1",
        "echo",
        "it ran",
    ];
    let (status, text) = cluster.said(&words);
    assert!(
        status == Some(0) && text.matches("it ran").count() == 2,
        "{text}"
    );
    // An event has a counter of its own; this table has none, and the arbiter says so.
    let words = [
        "srun",
        "-p",
        "shared",
        "--counters=1,events=l1d.replacement",
        "true",
    ];
    let (status, text) = cluster.said(&words);
    assert!(
        status == Some(1) && text.contains("l1d.replacement"),
        "{text}"
    );
}

#[test]
fn what_is_asked_for_wrongly_is_named_in_a_line() {
    let Some(cluster) = shared("what_is_asked_for_wrongly_is_named_in_a_line") else {
        return;
    };
    let arbiters = cluster.arbiters(POLICY);
    for (options, expected) in [
        (&["--counters=many"][..], "'many' is no number"),
        (&["--counters=0"], "0 counters are none"),
        (&["--counters=99"], "from 0 to 64"),
        (&["--counters=2,fixed=x"], "'x' is no number from 1 to 32"),
        (&["--counters=2,events=a++b"], "a name is missing"),
        (&["--counters=2,pmu=x"], "'pmu=x' is not understood"),
        (
            &["--counters=1", "--counters-wait=soon"],
            "'soon' is not understood",
        ),
        (&["--counters-wait=3"], "give --counters=N, too"),
        (
            &["--counters=1", "--counters-wait=46"],
            "UnkillableStepTimeout",
        ),
        // Where jobs share CPUs Slurm knows that no node has these, and else the arbiter.
        (
            &["--counters=5", "-p", "shared"],
            "Requested node configuration is not available",
        ),
        (&["--counters=5", "-p", "own"], "no counters:"),
        (
            &["--counters=1", "--gres=pmc:1", "-p", "shared"],
            "leave them out of --gres",
        ),
    ] {
        let mut words = vec!["srun"];
        words.extend(options);
        words.extend(["echo", "it ran"]);
        let (status, text) = cluster.said(&words);
        assert_ne!(status, Some(0), "{options:?}: {text}");
        let lines = text.lines().filter(|line| line.contains(expected)).count();
        assert!(
            lines == 1 && !text.contains("it ran"),
            "{options:?}: {text}"
        );
    }
    // Out of the environment slurmstepd has it alone, and nobody writes lines of slurmd's log by it.
    let forged = "_SLURM_SPANK_OPTION_umpire_counters=x\nerror: node is on fire";
    let words = ["env", forged, "srun", "-p", "own", "echo", "it ran"];
    let (status, text) = cluster.said(&words);
    assert!(
        status != Some(0) && text.contains("characters in it") && !text.contains("it ran"),
        "{text}"
    );
    let log = cluster.log_of("n1") + &cluster.log_of("n2");
    assert!(!log.contains("on fire"), "{log}");
    // A step of a job that asked for none, where Slurm counts.
    let words = [
        "salloc",
        "-p",
        "shared",
        "srun",
        "--counters=1",
        "echo",
        "it ran",
    ];
    let (status, text) = cluster.said(&words);
    assert_ne!(status, Some(0), "{text}");
    assert!(
        text.contains("give --counters to sbatch or salloc") && !text.contains("it ran"),
        "{text}"
    );
    // Where CPUs are the job's own a step asks by itself.
    let words = [
        "salloc",
        "-p",
        "own",
        "srun",
        "--counters=1",
        "echo",
        "it ran",
    ];
    let (status, text) = cluster.said(&words);
    assert!(status == Some(0) && text.contains("it ran"), "{text}");
    cluster.be_idle();
    drop(arbiters);
}

#[test]
fn a_site_that_is_wrong_fails_those_alone_who_ask() {
    let Some(cluster) = shared("a_site_that_is_wrong_fails_those_alone_who_ask") else {
        return;
    };
    let _arbiters = cluster.arbiters(POLICY);
    let file = cluster.folder.join("etc/plugstack.conf");
    let before = fs::read_to_string(&file).expect("its lines");
    let plugin = plugin().display();
    let library = library().display().to_string();
    for (line, expected) in [
        (
            before.replace(&library, "/nowhere/libumpire_lease.so"),
            "/nowhere/libumpire_lease.so",
        ),
        (
            before.replace(&library, "libc.so.6"),
            "it has no umpire_lease_acquire",
        ),
        (
            before.replace("arbiter-%n", "nobody-%n"),
            "no arbiter listens there",
        ),
        (
            format!("required {plugin} sock=/x\n"),
            "'sock=/x' is not understood",
        ),
    ] {
        fs::write(&file, line).expect("it is ours");
        let plain = cluster.said(&["srun", "echo", "it ran"]);
        let (status, text) = cluster.said(&["srun", "--counters=1", "echo", "it ran"]);
        fs::write(&file, &before).expect("it is ours");
        assert_eq!(plain, (Some(0), "it ran\n".to_owned()), "{expected}");
        assert_ne!(status, Some(0), "{expected}: {text}");
        assert!(
            text.contains(expected) && !text.contains("it ran"),
            "{expected}: {text}"
        );
    }
    cluster.be_idle();
}

#[test]
fn who_is_patient_waits_on_the_node_or_in_slurms_queue() {
    let Some(cluster) = shared("who_is_patient_waits") else {
        return;
    };
    let arbiters = cluster.arbiters(POLICY);
    let monitor = arbiters[0].acquire(&whole_cpus(2, false));
    let words = [
        "srun",
        "-w",
        "n1",
        "--counters=3",
        "--counters-wait=30",
        "echo",
        "it ran",
    ];
    let job = cluster
        .user(&words)
        .stdout(std::process::Stdio::piped())
        .spawn();
    let job = job.expect("it starts");
    std::thread::sleep(Duration::from_millis(1500));
    drop(monitor);
    let (status, text) = said(&job.wait_with_output().expect("it is ours"));
    assert_eq!((status, text.as_str()), (Some(0), "it ran\n"));

    until_leases(&arbiters[0], 0);
    // Requeued as often as that, and then it fails.
    let monitor = arbiters[0].acquire(&whole_cpus(2, false));
    let (job, _) = batch(
        &cluster,
        &[
            "-w",
            "n1",
            "--counters=3",
            "--counters-wait=requeue=1",
            "--wrap",
            "echo it ran",
        ],
    );
    let show = ["scontrol", "-o", "show", "job", &job.to_string()];
    super::soon(|| match cluster.asked(&show) {
        text if text.contains("Restarts=1 ") && text.contains("JobState=FAILED") => Ok(()),
        text => Err(text),
    });
    cluster.be_idle();
    until_leases(&arbiters[0], 0);
    drop(monitor);
}

#[test]
fn the_plugin_needs_libc_alone() {
    let Some(_cluster) = shared("the_plugin_needs_libc_alone") else {
        return;
    };
    let linked = Command::new("readelf").arg("-d").arg(plugin()).output();
    let linked = String::from_utf8(linked.expect("binutils").stdout).expect("text");
    let needed: Vec<&str> = linked
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .collect();
    assert!(
        needed.len() == 1 && needed[0].contains("libc.so.6"),
        "{linked}"
    );
    // A hook of a prolog or epilog has slurmd load the plugin for every job, and drain where it cannot.
    let names = Command::new("readelf")
        .args(["-W", "--dyn-syms"])
        .arg(plugin())
        .output();
    let names = String::from_utf8(names.expect("binutils").stdout).expect("text");
    assert!(
        names.contains("slurm_spank_task_init") && !names.contains("slurm_spank_job_"),
        "{names}"
    );
}

#[test]
fn what_of_the_plugin_needs_no_slurm_is_as_its_tables_say() {
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("units");
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = tests.join("../arbiter/slurm/spank");
    let mut cc = Command::new("cc");
    cc.args([
        "-std=gnu99",
        "-D_GNU_SOURCE",
        "-g",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]);
    cc.args(["-fsanitize=undefined", "-fno-sanitize-recover", "-I"]);
    let include = tests.join("../arbiter/lease/capi/include");
    cc.arg(&source).arg("-I").arg(&include);
    cc.arg(tests.join("tests/slurm/units.c"));
    cc.args(["ask.c", "group.c", "wish.c"].map(|name| source.join(name)));
    let (status, text) = said(&cc.arg("-o").arg(&program).output().expect("a compiler"));
    assert_eq!(status, Some(0), "{text}");
    let library = folder.path().join("library.so");
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu99", "-D_GNU_SOURCE", "-shared", "-fPIC"]);
    cc.args(["-Wall", "-Wextra", "-Werror", "-I"]).arg(&include);
    cc.arg(tests.join("tests/slurm/library.c"));
    let (status, text) = said(&cc.arg("-o").arg(&library).output().expect("a compiler"));
    assert_eq!(status, Some(0), "{text}");
    let machine = folder.path().join("machine");
    fs::create_dir(&machine).expect("a folder");
    let (status, text) = said(
        &Command::new(program)
            .arg(machine)
            .arg(library)
            .output()
            .expect("it starts"),
    );
    assert_eq!((status, text.as_str()), (Some(0), ""));
}
