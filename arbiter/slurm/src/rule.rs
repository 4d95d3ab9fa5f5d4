//! The rule by which `--counters` becomes a GRES, as the Lua that slurmctld runs.

/// Whether tasks run on the CPUs that Slurm gave their job, and on no others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Confined {
    /// `TaskPlugin` has `task/affinity`, or `task/cgroup` with `ConstrainCores=yes`, and Slurm
    /// gives out CPUs or cores (`SelectType=select/cons_tres` or `cons_res`).
    Yes,
    /// A job's CPUs are its own only where it has its nodes for itself.
    No,
}

/// `job_submit.lua`.
#[must_use]
pub fn job_submit(confined: Confined) -> String {
    let word = match confined {
        Confined::Yes => "true",
        Confined::No => "false",
    };
    include_str!("job_submit.lua").replace("@CONFINED@", word)
}

#[cfg(test)]
mod tests {
    use super::{Confined, job_submit};

    #[test]
    fn the_lua_says_which_way_it_was_printed() {
        for (confined, line) in [
            (Confined::Yes, "local confined = true\n"),
            (Confined::No, "local confined = false\n"),
        ] {
            let text = job_submit(confined);
            assert!(text.contains(line) && !text.contains('@'), "{text}");
        }
    }
}
