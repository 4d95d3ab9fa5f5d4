//! A second user of the counters: `perf stat` on the whole CPU. A CPU's pinned events
//! come before a thread's.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, Command, Stdio};

/// Holds counters of CPU 0 until it is dropped.
pub(crate) struct OtherUser {
    perf: Child,
    /// Without a reader `perf` ends at its next line, a tenth of a second later.
    lines: BufReader<ChildStderr>,
}

impl OtherUser {
    /// Has `counters` of them count `event`, pinned or not, before this returns.
    ///
    /// # Errors
    /// It got no counter that it can keep, with what it printed.
    pub(crate) fn start(event: &str, counters: usize, pinned: bool) -> Result<Self, String> {
        let event = format!("{event}{}", if pinned { ":D" } else { "" });
        let mut perf = Command::new("perf")
            .args(["stat", "-C", "0", "-x", ",", "-I", "100", "-e"])
            .arg(vec![event; counters].join(","))
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("perf: {error}"))?;
        let errors = perf.stderr.take().ok_or("perf has no stderr")?;
        let mut other = OtherUser {
            perf,
            lines: BufReader::new(errors),
        };
        // A line for each event, once a tenth of a second has been counted.
        for line in other.lines.by_ref().lines().take(counters) {
            let line = line.map_err(|error| format!("perf: {error}"))?;
            let count = line.split(',').nth(1).unwrap_or_default();
            if !count.parse().is_ok_and(|count: u64| count > 0) {
                return Err(format!("the other user got no counter: {line}"));
            }
        }
        Ok(other)
    }
}

impl Drop for OtherUser {
    fn drop(&mut self) {
        // Both fail only for a process that is gone already.
        let _ = self.perf.kill();
        let _ = self.perf.wait();
    }
}
