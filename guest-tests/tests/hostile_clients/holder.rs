//! Somebody honest, and how late he gets his answers.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::setpriority_process;
use serde_json::{Value, json};

use super::attackers::{Attackers, Target};

/// Nothing here takes as long.
pub(crate) const LONG: Duration = Duration::from_secs(60);
const BEATS: u32 = 200;
const EVERY: Duration = Duration::from_millis(10);
/// So much later may one of a hundred answers come because of attackers.
const MOST_LATER: Duration = Duration::from_millis(50);
/// Other programs of this machine may disturb, but not each time.
const ROUNDS: usize = 4;

/// A connection to the arbiter.
pub(crate) struct Line {
    stream: UnixStream,
    received: Vec<u8>,
}

impl Line {
    pub(crate) fn to(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).expect("it listens");
        stream.set_read_timeout(Some(LONG)).expect("a socket");
        Line {
            stream,
            received: Vec::new(),
        }
    }

    pub(crate) fn send(&mut self, method: &str, parameters: &Value) {
        let call = json!({ "method": method, "parameters": parameters });
        self.stream
            .write_all(format!("{call}\0").as_bytes())
            .expect("it reads");
    }

    pub(crate) fn reply(&mut self) -> Value {
        let mut chunk = [0; 4096];
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == 0) {
                let reply: Vec<u8> = self.received.drain(..=end).collect();
                return serde_json::from_slice(&reply[..end]).expect("JSON");
            }
            let count = self.stream.read(&mut chunk).expect("a reply");
            assert!(count > 0, "the arbiter has hung up");
            self.received.extend_from_slice(&chunk[..count]);
        }
    }

    /// What a call returns that is not refused.
    pub(crate) fn ask(&mut self, method: &str, parameters: &Value) -> Value {
        self.send(method, parameters);
        let reply = self.reply();
        assert!(reply.get("error").is_none(), "{method}: {reply}");
        reply["parameters"].clone()
    }

    /// A lease that lasts so long without a renewal.
    pub(crate) fn lease(&mut self, lasts: Duration) -> u64 {
        let lasts = u64::try_from(lasts.as_millis()).expect("a short time");
        let request = json!({ "counters": [{ "count": 2 }], "cpus": "0", "lasts_ms": lasts });
        let held = self.ask("io.umpire.Arbiter.Acquire", &json!({ "request": request }));
        let lease = held["lease"]["id"].as_u64();
        lease.unwrap_or_else(|| panic!("no lease: {held}"))
    }

    /// Renews a lease, which is still there.
    pub(crate) fn renew(&mut self, lease: u64) {
        self.ask("io.umpire.Arbiter.Renew", &json!({ "lease": lease }));
    }
}

/// How late beats are done that are to be done evenly: all of them, in order.
fn lateness(beat: &mut dyn FnMut()) -> Vec<Duration> {
    let begun = Instant::now();
    let mut late: Vec<Duration> = (1..=BEATS)
        .map(|n| {
            let due = begun + EVERY * n;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            beat();
            due.elapsed()
        })
        .collect();
    late.sort_unstable();
    late
}

/// Measures how late somebody's beats are, without and with attackers: one of a hundred may be
/// so much later, and none fails.
pub(crate) fn is_not_kept_waiting(beat: &mut dyn FnMut(), targets: &[Target]) {
    let p99 = |late: &[Duration]| late[late.len() * 99 / 100];
    setpriority_process(None, -20).expect("root");
    let mut seen = Vec::new();
    for _ in 0..ROUNDS {
        let quiet = p99(&lateness(beat));
        let attackers = Attackers::start(targets);
        std::thread::sleep(Duration::from_millis(300));
        let attacked = p99(&lateness(beat));
        attackers.end(beat);
        println!("p99 without attackers {quiet:?}, with them {attacked:?}");
        if attacked <= quiet + MOST_LATER {
            return;
        }
        seen.push((quiet, attacked));
    }
    panic!("attackers make others wait; without and with them: {seen:?}");
}
