//! What counters add to a step: inside of slurmstepd, and from end to end. For a second of steps
//! with and without in turn, or for as many of each as `UMPIRE_SLURM_SECONDS` says.

use std::num::NonZeroU64;

use super::cluster::{Cluster, POLICY, shared};

/// Steps begin and end in turns as long as this, so that what else the machine does hits both.
const MOST_TURN_S: u64 = 15;
/// `srun` in a job, for so many milliseconds, once without counters and once with; prints how many
/// steps there were.
const STEPS: &str = r#"
for counters in "" --counters=1; do
    until=$(($(date +%s%3N) + $1)) steps=0
    while [ "$(date +%s%3N)" -lt "$until" ]; do
        srun $counters true || exit 1
        steps=$((steps + 1))
    done
    echo $steps
done
"#;

/// How long slurmstepd took for the leases of its steps, in microseconds, by its log.
fn times_of_leases(cluster: &Cluster) -> Vec<u64> {
    let log = cluster.log_of("n1");
    let lines = log.lines().filter(|line| line.contains(": lease "));
    let times = lines.filter_map(|line| {
        let time = line.rsplit_once(", in ")?.1.strip_suffix(" us")?;
        time.parse().ok()
    });
    times.collect()
}

#[test]
fn what_counters_add_to_a_step_is_measured() {
    let Some(cluster) = shared("what_counters_add_to_a_step_is_measured") else {
        return;
    };
    let _arbiters = cluster.arbiters(POLICY);
    let seconds = std::env::var("UMPIRE_SLURM_SECONDS").ok();
    let seconds = seconds.map_or(1, |text| {
        let seconds: NonZeroU64 = text
            .parse()
            .expect("UMPIRE_SLURM_SECONDS is a number of seconds, 1 at least");
        seconds.get()
    });
    let turns = seconds.div_ceil(MOST_TURN_S).max(1);
    let turn_ms = (seconds * 1000 / turns).to_string();
    let before = times_of_leases(&cluster).len();
    let (mut without, mut with) = (0, 0);
    for _ in 0..turns {
        let words = [
            "salloc", "-Q", "-w", "n1", "sh", "-c", STEPS, "sh", &turn_ms,
        ];
        let (status, text) = cluster.said(&words);
        let steps: Vec<u64> = text.lines().filter_map(|line| line.parse().ok()).collect();
        let [first, second] = steps[..] else {
            panic!("{status:?}: {text}");
        };
        (without, with) = (without + first, with + second);
    }
    let mut times = times_of_leases(&cluster).split_off(before);
    times.sort_unstable();
    assert_eq!(times.len() as u64, with, "each step has a lease");
    assert!(without > 0 && with > 0);
    let at = |percent: usize| times[percent * (times.len() - 1) / 100];
    let end_to_end = |steps: u64| (seconds * 1000) as f64 / steps as f64;
    println!(
        "lease and group in slurmstepd, {with} steps: median {} us, p90 {} us, most {} us\n\
         {seconds} s of steps: {without} without counters, {:.1} ms each; {with} with, {:.1} ms \
         each; ratio {:.3}",
        at(50),
        at(90),
        at(100),
        end_to_end(without),
        end_to_end(with),
        with as f64 / without as f64
    );
}
