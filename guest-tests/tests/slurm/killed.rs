//! What becomes of a job's lease when something is killed: it ends with the last of the job's
//! tasks, whatever else there is or is not.

use std::fs;
use std::process::{Child, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use super::cluster::{
    Cluster, POLICY, job_of, of_jobs, own, said, shared, soon, turn, until_leases,
};
use super::whole_cpus;

fn kill(pid: i32) {
    let pid = Pid::from_raw(pid).expect("a process");
    kill_process(pid, Signal::KILL).expect("it is there");
}

/// The processes of which this is true of the command line, with zero bytes for spaces.
fn processes(is_it: impl Fn(&str) -> bool) -> Vec<i32> {
    let entries = fs::read_dir("/proc").expect("processes").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| is_it(&line))
    })
    .collect()
}

/// The tasks that sleep for this time: neither srun nor what started that.
fn sleepers(seconds: &str) -> Vec<i32> {
    processes(|line| {
        let mut words = line.split('\0');
        words.next().is_some_and(|word| word.ends_with("/sleep")) && words.next() == Some(seconds)
    })
}

/// A job whose task sleeps for a time of its own, and that task.
fn sleeper(cluster: &Cluster, seconds: &str) -> (Child, i32) {
    let words = ["srun", "-w", "n1", "--counters=3", "sleep", seconds];
    let job = cluster.user(&words).spawn().expect("it starts");
    let mut task = 0;
    soon(|| {
        task = *sleepers(seconds).first().ok_or("no task runs")?;
        Ok(())
    });
    (job, task)
}

#[test]
fn the_lease_ends_with_the_step() {
    let Some(cluster) = shared("the_lease_ends_with_the_step") else {
        return;
    };
    let arbiters = cluster.arbiters(POLICY);
    let (mut job, _) = sleeper(&cluster, "4711");
    let leases = until_leases(&arbiters[0], 1);
    cluster.asked(&["scancel", &job_of(&leases[0].label).to_string()]);
    assert!(!job.wait().expect("it is ours").success());
    until_leases(&arbiters[0], 0);
    cluster.be_idle();
}

#[test]
fn a_step_that_is_cancelled_while_it_waits_has_nothing() {
    let Some(cluster) = shared("a_step_that_is_cancelled_while_it_waits_has_nothing") else {
        return;
    };
    let arbiters = cluster.arbiters(POLICY);
    // Others have the counters until after its end, or leave them when it is cancelled already.
    for leaves in [false, true] {
        let mut monitor = Some(arbiters[0].acquire(&whole_cpus(3, false)));
        let task = "echo it ran; sleep 600";
        let words = [
            "srun",
            "-w",
            "n1",
            "--counters=3",
            "--counters-wait=45",
            "sh",
            "-c",
            task,
        ];
        let mut job = cluster.user(&words);
        job.stdout(Stdio::piped()).stderr(Stdio::piped());
        let job = job.spawn().expect("it starts");
        let mut waits = None;
        soon(|| {
            let leases = arbiters[0].connect().leases().expect("it answers");
            let found = leases
                .into_iter()
                .find(|lease| lease.label.starts_with("slurm "));
            waits = Some(found.ok_or("nobody waits")?);
            Ok(())
        });
        let waits = waits.expect("it was found");
        assert_eq!((waits.holds, waits.uid), (0, 65534), "{waits:?}");
        cluster.asked(&["scancel", &job_of(&waits.label).to_string()]);
        if leaves {
            drop(monitor.take());
        }
        // Of a step that never began, srun's status says nothing: 0 if it does not end in 4 s.
        let (_, text) = said(&job.wait_with_output().expect("it is ours"));
        // Who has the counters after all may begin, until Slurm comes to kill it.
        assert!(leaves || !text.contains("it ran"), "{text}");
        drop(monitor.take());
        // Nothing is held, nobody waits, no group is left, and no node is drained.
        cluster.be_idle();
        soon(|| {
            let leases = arbiters[0].connect().leases().expect("it answers");
            let of_steps = leases.iter().any(|lease| lease.label.starts_with("slurm "));
            (!of_steps)
                .then_some(())
                .ok_or_else(|| format!("{leases:?}"))
        });
        let left = super::traces::groups_of_steps();
        assert!(left.is_empty(), "{left:?}");
        let account = cluster.account(job_of(&waits.label));
        assert!(account.starts_with("CANCELLED"), "{account}");
    }
    let (status, text) = cluster.said(&["srun", "-w", "n1", "--counters=3", "echo", "it ran"]);
    assert_eq!((status, text.as_str()), (Some(0), "it ran\n"));
}

#[test]
fn tasks_that_outlive_their_slurmstepd_keep_the_lease() {
    let name = "tasks_that_outlive_their_slurmstepd_keep_the_lease";
    let turn = turn();
    let Some(cluster) = own(&turn, name, "linuxproc") else {
        return;
    };
    let arbiters = cluster.arbiters(POLICY);
    let (mut job, task) = sleeper(&cluster, "4712");
    let lease = until_leases(&arbiters[0], 1).remove(0);
    let stepd = format!("slurmstepd: [{}]", lease.label.trim_start_matches("slurm "));
    let found = processes(|line| line.trim_end_matches('\0') == stepd);
    assert_eq!(found.len(), 1, "{stepd}");
    kill(found[0]);
    let _ = job.kill();
    let _ = job.wait();
    // Slurm's end of the job may or may not reach the task; as long as it runs, it has its lease.
    let is_there = || !sleepers("4712").is_empty();
    for _ in 0..20 {
        let held = of_jobs(&arbiters[0]).len();
        assert!(
            !is_there() || held == 1,
            "the task {task} runs, and there is no lease"
        );
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    if is_there() {
        kill(task);
    }
    until_leases(&arbiters[0], 0);
    // A later step takes away the group that nobody took away, once the dead slurmstepd was waited
    // for: until then its number is that of a process.
    cluster.asked(&["scancel", &job_of(&lease.label).to_string()]);
    soon(|| {
        let words = ["srun", "-w", "n1", "--immediate=5", "--counters=1", "true"];
        match (
            cluster.said(&words),
            super::traces::groups_of_steps().as_slice(),
        ) {
            ((Some(0), _), []) => Ok(()),
            ((status, text), left) => Err(format!("{status:?}: {text}; {left:?}")),
        }
    });
}

#[test]
fn a_slurmd_that_is_killed_changes_nothing() {
    let Some(mut cluster) = shared("a_slurmd_that_is_killed_changes_nothing") else {
        return;
    };
    let arbiters = cluster.arbiters(POLICY);
    let (mut job, task) = sleeper(&cluster, "4713");
    let before = until_leases(&arbiters[0], 1);
    kill(cluster.pid_of_slurmd("n1"));
    let held = of_jobs(&arbiters[0]);
    assert_eq!(held[0].id, before[0].id);
    cluster.start_slurmd("n1");
    kill(task);
    assert!(!job.wait().expect("it is ours").success());
    until_leases(&arbiters[0], 0);
    cluster.be_idle();
}

#[test]
fn an_arbiter_that_is_killed_knows_the_jobs_of_before() {
    let Some(cluster) = shared("an_arbiter_that_is_killed_knows_the_jobs_of_before") else {
        return;
    };
    let mut arbiters = cluster.arbiters(POLICY);
    let (mut first, task) = sleeper(&cluster, "4714");
    until_leases(&arbiters[0], 1);
    // One that ends while nobody hears of it, and one that goes on.
    let (mut second, other) = sleeper(&cluster, "4715");
    let leases = until_leases(&arbiters[0], 2);
    arbiters[0].kill();
    kill(task);
    assert!(!first.wait().expect("it is ours").success());
    arbiters[0].begin();
    let left = until_leases(&arbiters[0], 1);
    assert!(
        leases.iter().any(|lease| lease.id == left[0].id),
        "{left:?}"
    );
    kill(other);
    assert!(!second.wait().expect("it is ours").success());
    until_leases(&arbiters[0], 0);
}
