//! The guest's trapped accesses while a client floods the control socket.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread::scope;

use serde::Serialize;
use vmm::sys::{allowed_cpus, pin_this_thread};

use super::guest::measuring;
use super::hostile::{HOSTILE, QUIET};
use super::served_guest::{ServedGuest, Setting};
use super::traps::{TimesByAccess, TrapsRow};
use super::{Bench, progress};
use crate::error::BenchError;
use crate::guest::BATCH;
use crate::sources::first_countable;

/// Batches of each kind of access in a turn of the client.
const TURN: u32 = 5;
/// Connections that it has to have made at the end.
const CONNECTIONS: u64 = 10_000;

/// The guest beside both clients.
#[derive(Clone, Debug, Serialize)]
pub struct FloodReport {
    /// Host CPUs of the server and the client, and of the guest.
    pub cpus: [usize; 2],
    /// Connections that the hostile client asked for.
    pub connections: u64,
    /// Of these, those that the host refused because too many waited already;
    /// the server accepted the others and refused what was above its limit.
    pub not_queued: u64,
    /// Malformed packets that it could send.
    pub packets: u64,
    /// Accesses timed of each kind beside each client.
    pub accesses: u32,
    /// One for each kind of access.
    pub traps: Vec<TrapsRow>,
}

pub(super) fn measure(bench: &Bench<'_>) -> Result<FloodReport, BenchError> {
    let cpus = match allowed_cpus().map_err(BenchError::Signal)?[..] {
        [.., server, guest] => [server, guest],
        _ => return Err(BenchError::OneCpu),
    };
    let (source, fixture) = bench.clock()?;
    let event = first_countable(&fixture.model, source.open()?.as_ref());
    let event = event.map_err(|none| BenchError::Guest(none.reason))?;
    let setting = Setting {
        cpus: Some(cpus),
        ..Setting::measuring(bench, &source)
    };
    let guest = measuring(&fixture.model, event.code, 1)?;
    setting.play(bench.harness, &guest, |served| run(served, bench, cpus))
}

fn run(
    served: &ServedGuest,
    bench: &Bench<'_>,
    cpus: [usize; 2],
) -> Result<FloodReport, BenchError> {
    // Whether it is served at all.
    drop(served.client()?);
    let mut client = Hostile::new(&served.socket, cpus[0])?;
    let turns = bench.iterations.div_ceil(BATCH * TURN).max(1);
    let (mut quiet, mut flooded) = (TimesByAccess::default(), TimesByAccess::default());
    let mut done = 0;
    while done < turns || client.connections < CONNECTIONS {
        progress(&format!(
            "turn {} of {turns}, {} connections",
            done + 1,
            client.connections
        ));
        // Which comes first alternates.
        let mut order = [(QUIET, &mut quiet), (HOSTILE, &mut flooded)];
        if done % 2 == 1 {
            order.reverse();
        }
        for (what, series) in order {
            client.does(what)?;
            series.take(served, TURN)?;
        }
        client.does(QUIET)?;
        done += 1;
    }
    // Who is well-behaved is served again.
    served
        .client()?
        .hello()
        .map_err(|refusal| BenchError::refused("HELLO", refusal))?;
    Ok(FloodReport {
        cpus,
        connections: client.connections,
        not_queued: client.refused,
        packets: client.packets,
        accesses: done * TURN * BATCH,
        traps: flooded.against(quiet, bench.tsc_khz)?,
    })
}

/// The client's process.
struct Hostile {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
    does: &'static str,
    connections: u64,
    packets: u64,
    refused: u64,
}

impl Hostile {
    fn new(socket: &Path, cpu: usize) -> Result<Self, BenchError> {
        let program = std::env::current_exe().map_err(BenchError::Client)?;
        let mut command = Command::new(program);
        command.args(["bench", "perfmon", "--hostile"]).arg(socket);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        // A process begins on the CPUs of the thread that starts it.
        let mut child = scope(|scope| {
            let starter = scope.spawn(|| {
                pin_this_thread(cpu).map_err(BenchError::Signal)?;
                command.spawn().map_err(BenchError::Client)
            });
            let started = starter.join();
            started.map_err(|_| BenchError::Guest("a thread panicked".to_owned()))?
        })?;
        let (Some(orders), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(BenchError::Client(std::io::Error::other("it has no pipes")));
        };
        let mut hostile = Self {
            child,
            orders,
            answers: BufReader::new(answers),
            does: QUIET,
            connections: 0,
            packets: 0,
            refused: 0,
        };
        // It says that it is there.
        hostile.hear()?;
        Ok(hostile)
    }

    /// Returns when the client does so.
    fn does(&mut self, what: &'static str) -> Result<(), BenchError> {
        if std::mem::replace(&mut self.does, what) != what {
            writeln!(self.orders, "{what}").map_err(BenchError::Client)?;
            self.hear()?;
        }
        Ok(())
    }

    fn hear(&mut self) -> Result<(), BenchError> {
        let mut line = String::new();
        self.answers
            .read_line(&mut line)
            .map_err(BenchError::Client)?;
        let numbers: Vec<u64> = line
            .split(' ')
            .filter_map(|word| word.trim().parse().ok())
            .collect();
        let [_, connections, packets, refused] = numbers[..] else {
            let what = format!("it says {:?}", line.trim());
            return Err(BenchError::Client(std::io::Error::other(what)));
        };
        (self.connections, self.packets, self.refused) = (connections, packets, refused);
        Ok(())
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        // It is ours, and has nothing to lose.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
