//! The arbiter as a process of its own, in a folder that ends with it; and many leases
//! there.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, park, scope, sleep};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use umpire_lease::{
    AcquireIn, AcquireOut, Arbiter, CallError, ClaimIn, Counters, LeaseScope, NoReply, ReleaseIn,
    Request,
};
use vmm::sys::pin_this_thread;

use super::{nanos, summary};
use crate::error::BenchError;
use crate::harness::PATIENCE;
use crate::stats::Percentiles;

/// CPUs that the arbiter is told of. They need not be there.
pub(super) const CPUS: u32 = 512;
/// CPUs on which each vCPU of the large host may run.
const VCPU_CPUS: u32 = 16;
/// How often it is asked whether it is there.
const LOOK: Duration = Duration::from_micros(200);
/// Connections over which leases are spread.
const CONNECTIONS: u32 = 64;
/// Where files are on a disk on most hosts; `/tmp` often is in memory.
const ON_DISK: &str = "/var/tmp";
/// Syncs of the disk that are timed.
const SYNCS: u32 = 100;
/// Of a thread that does nothing.
const LEAST_STACK: usize = 16 * 1024;
/// Clock ticks of proc(5) on x86.
const TICK: Duration = Duration::from_millis(10);

/// A running `umpire arbiterd`.
#[derive(Debug)]
pub(super) struct Daemon {
    folder: TempDir,
    cpu: Option<usize>,
    child: Child,
}

/// Many leases, as long as it is there.
#[derive(Debug)]
pub(super) struct Holders {
    connections: Vec<Arbiter>,
    /// The leases of each.
    ids: Vec<Vec<u64>>,
}

fn io_failed(error: io::Error) -> BenchError {
    BenchError::Arbiter(error.to_string())
}

/// A request of `what` failed.
pub(super) fn asked<T>(what: &'static str, answer: Result<T, CallError>) -> Result<T, BenchError> {
    answer.map_err(|error| BenchError::Arbiter(format!("{what}: {error}")))
}

impl Daemon {
    /// Starts it, on the host CPU `cpu` if one is given, and waits until it answers.
    pub(super) fn start(cpu: Option<usize>) -> Result<Self, BenchError> {
        let folder = tempfile::tempdir_in(ON_DISK)
            .or_else(|_| tempfile::tempdir())
            .map_err(BenchError::Folder)?;
        let user = rustix::process::geteuid().as_raw();
        // Nothing of the policy is to stand in the way.
        let config = format!(
            "claim-window-ms = 3600000\n\
             arrive-ms = 3600000\n\
             connections-per-user = 4096\n\
             requests-per-second = 1000000000\n\
             [[pmu]]\n\
             programmable = 6\n\
             fixed = 3\n\
             cpus = \"0-{}\"\n\
             [[tenant]]\n\
             name = \"bench\"\n\
             users = [{user}]\n\
             operator = true\n\
             most-leases = 1000000000\n",
            CPUS - 1
        );
        fs::write(folder.path().join("arbiter.toml"), config).map_err(io_failed)?;
        let child = spawn(&folder, cpu)?;
        let daemon = Self { folder, cpu, child };
        daemon.answers()?;
        Ok(daemon)
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// Kills it as the kernel does when memory is short.
    pub(super) fn kill(&mut self) -> Result<(), BenchError> {
        self.child.kill().map_err(io_failed)?;
        self.child.wait().map(|_| ()).map_err(io_failed)
    }

    /// Starts it anew, and returns at once.
    pub(super) fn start_anew(&mut self) -> Result<(), BenchError> {
        self.child = spawn(&self.folder, self.cpu)?;
        Ok(())
    }

    pub(super) fn connect(&self) -> Result<Arbiter, BenchError> {
        asked("connecting", Arbiter::connect(&self.socket()))
    }

    /// Waits until it answers; what it is asked changes nothing.
    pub(super) fn answers(&self) -> Result<(), BenchError> {
        self.until_it_answers(|mut arbiter| arbiter.call("Who", &NoReply {}).map(drop_value))
    }

    /// Does `ask` on a new connection as soon as there is one.
    pub(super) fn until_it_answers<T>(
        &self,
        mut ask: impl FnMut(Arbiter) -> Result<T, CallError>,
    ) -> Result<T, BenchError> {
        let until = Instant::now() + PATIENCE;
        loop {
            match Arbiter::connect(&self.socket()).and_then(&mut ask) {
                Ok(answer) => return Ok(answer),
                Err(error) if Instant::now() > until => {
                    let log = fs::read_to_string(self.folder.path().join("log"));
                    let log = log.unwrap_or_default();
                    let last = log.lines().last().unwrap_or_default();
                    return Err(BenchError::Arbiter(format!("{error} {last}")));
                }
                Err(_) => sleep(LOOK),
            }
        }
    }

    /// Its process, as proc(5) names it.
    pub(super) fn process(&self) -> String {
        self.child.id().to_string()
    }

    /// What a sync of the disk takes that it writes its journal to.
    pub(super) fn sync(&self) -> Result<Percentiles, BenchError> {
        let mut file = File::create(self.folder.path().join("sync")).map_err(io_failed)?;
        let mut times = Vec::new();
        for _ in 0..SYNCS {
            let begun = Instant::now();
            file.write_all(&[0; 4096]).map_err(io_failed)?;
            file.sync_data().map_err(io_failed)?;
            times.push(nanos(begun.elapsed()));
        }
        summary(&mut times)
    }
}

fn drop_value(_: serde_json::Value) {}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It is ours, and has nothing to lose.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(folder: &TempDir, cpu: Option<usize>) -> Result<Child, BenchError> {
    let program = std::env::current_exe().map_err(io_failed)?;
    let log = File::create(folder.path().join("log")).map_err(io_failed)?;
    let mut command = Command::new(program);
    command.arg("arbiterd");
    for (flag, name) in [
        ("--config", "arbiter.toml"),
        ("--state", "state"),
        ("--socket", "socket"),
    ] {
        command.arg(flag).arg(folder.path().join(name));
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    let Some(cpu) = cpu else {
        return command.spawn().map_err(io_failed);
    };
    // A process begins on the CPUs of the thread that starts it.
    let started = scope(|scope| {
        let starter = scope.spawn(|| {
            pin_this_thread(cpu).map_err(BenchError::Signal)?;
            command.spawn().map_err(io_failed)
        });
        starter.join()
    });
    started.map_err(|_| BenchError::Arbiter("a thread panicked".to_owned()))?
}

/// Runs `act` on so many threads at the same time, each with its number.
pub(super) fn at_once<T: Send>(
    count: u32,
    act: impl Fn(u32) -> Result<T, BenchError> + Sync,
) -> Result<Vec<T>, BenchError> {
    let act = &act;
    scope(|scope| {
        let threads: Vec<_> = (0..count).map(|n| scope.spawn(move || act(n))).collect();
        let done = threads.into_iter().map(|thread| match thread.join() {
            Ok(done) => done,
            Err(_) => Err(BenchError::Arbiter("a thread panicked".to_owned())),
        });
        // All of them end before the first failure counts.
        done.collect::<Vec<_>>().into_iter().collect()
    })
}

/// Two counters of one CPU, for whatever runs there.
pub(super) fn request(cpu: u32) -> Request {
    Request {
        counters: vec![Counters::programmable(2)],
        cpus: Some((cpu % CPUS).to_string()),
        ..Request::default()
    }
}

/// Two counters for a thread that runs on some CPUs: a vCPU.
fn vcpu(number: u32) -> Result<Request, BenchError> {
    let first = number * VCPU_CPUS % CPUS;
    Ok(Request {
        cpus: Some(format!("{first}-{}", first + VCPU_CPUS - 1)),
        scope: Some(LeaseScope::Thread),
        threads: Some(vec![thread(number).map_err(io_failed)?]),
        ..request(0)
    })
}

/// A thread that does nothing, for as long as this process lasts: leases are for such as are
/// there.
fn thread(number: u32) -> io::Result<u32> {
    static IDLE: Mutex<BTreeMap<u32, u32>> = Mutex::new(BTreeMap::new());
    let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(id) = idle.get(&number) {
        return Ok(*id);
    }
    let (tell, told) = channel();
    let body = move || {
        let _ = tell.send(
            rustix::thread::gettid()
                .as_raw_nonzero()
                .get()
                .unsigned_abs(),
        );
        loop {
            park();
        }
    };
    Builder::new().stack_size(LEAST_STACK).spawn(body)?;
    let id = told.recv().map_err(io::Error::other)?;
    idle.insert(number, id);
    Ok(id)
}

/// Acquires a lease of this connection.
pub(super) fn acquire(arbiter: &mut Arbiter, request: Request) -> Result<u64, BenchError> {
    let out: AcquireOut = asked("Acquire", arbiter.call("Acquire", &AcquireIn { request }))?;
    Ok(out.lease.id)
}

/// Gives a lease back.
pub(super) fn release(arbiter: &mut Arbiter, lease: u64) -> Result<(), BenchError> {
    let release = ReleaseIn {
        lease,
        generation: None,
        keep: None,
    };
    let NoReply {} = asked("Release", arbiter.call("Release", &release))?;
    Ok(())
}

/// Takes over a lease that was there before a restart.
fn claim(arbiter: &mut Arbiter, lease: u64) -> Result<(), CallError> {
    let claim = ClaimIn {
        lease,
        generation: None,
    };
    arbiter.call::<_, AcquireOut>("Claim", &claim).map(|_| ())
}

impl Holders {
    /// Has so many vCPUs hold leases.
    pub(super) fn fill(daemon: &Daemon, leases: u32) -> Result<Self, BenchError> {
        let each = at_once(CONNECTIONS, |n| {
            let mut arbiter = daemon.connect()?;
            let own = (0..leases).filter(|lease| lease % CONNECTIONS == n);
            let ids = own.map(|number| acquire(&mut arbiter, vcpu(number)?));
            let ids = ids.collect::<Result<Vec<u64>, _>>()?;
            Ok((arbiter, ids))
        })?;
        let (connections, ids) = each.into_iter().unzip();
        Ok(Self { connections, ids })
    }

    /// Has the first holder come back to an arbiter that was started anew, as soon as that
    /// answers.
    pub(super) fn claim_first(&mut self, daemon: &Daemon) -> Result<(), BenchError> {
        let first = self.ids.first().and_then(|ids| ids.first().copied());
        let first = first.ok_or(BenchError::NoSamples)?;
        let arbiter = daemon.until_it_answers(|mut arbiter| {
            claim(&mut arbiter, first)?;
            Ok(arbiter)
        })?;
        self.connections = vec![arbiter];
        Ok(())
    }

    /// Has the others come back, on connections of their own.
    pub(super) fn claim_others(&mut self, daemon: &Daemon) -> Result<(), BenchError> {
        let ids = &self.ids;
        let count = u32::try_from(ids.len()).unwrap_or(0);
        let others = at_once(count, |n| {
            let mut arbiter = daemon.connect()?;
            let own = usize::try_from(n).ok().and_then(|n| ids.get(n));
            let own = own.into_iter().flatten().skip(usize::from(n == 0));
            for &lease in own {
                asked("Claim", claim(&mut arbiter, lease))?;
            }
            Ok(arbiter)
        })?;
        self.connections.extend(others);
        Ok(())
    }
}

/// How long the threads of a process have run (proc(5)): `self`, or a number.
pub(super) fn cpu_time(process: &str) -> Option<Duration> {
    let stat = fs::read(format!("/proc/{process}/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    // The name may have any bytes; what is behind it is counted.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut ticks = fields.split_whitespace().skip(11);
    let mut next = || ticks.next()?.parse::<u32>().ok();
    Some(TICK * next()?.saturating_add(next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_run() {
        let begun = cpu_time("self").expect("proc");
        let mut word = 1_u64;
        while cpu_time("self").expect("proc") < begun + Duration::from_millis(20) {
            word = std::hint::black_box(word.rotate_left(7) ^ 3);
        }
        assert_eq!(cpu_time("0"), None);
    }

    #[test]
    fn all_threads_are_waited_for() {
        let wrong = |n| match n {
            1 => Err(BenchError::NoSamples),
            n => Ok(n),
        };
        assert!(matches!(at_once(3, wrong), Err(BenchError::NoSamples)));
        assert_eq!(at_once(3, Ok).expect("no thread fails"), [0, 1, 2]);
    }
}
