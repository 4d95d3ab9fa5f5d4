//! A micro-guest with a control socket, on threads of its own, while this thread
//! is the tool.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use pmu_virt::perfmon::HostPolicy;
use pmu_virt::{ClockBackend, CorePmu, PmuModel};
use umpire_perfmon::Client;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm::config::DEFAULT_PMI_FLOOR_US;
use vmm::micro::{MicroError, MicroGuest, MicroOutcome, MicroRun};
use vmm::sched::CorePlan;
use vmm::sys::pin_this_thread;
use vmm_control::ControlConfig;

use super::Bench;
use super::guest::words_of;
use super::reporter::{Batch, Reported, Reporter};
use crate::error::BenchError;
use crate::harness::{Harness, PATIENCE};
use crate::sources::Source;

/// Batches that wait to be looked at; further ones are dropped.
const MOST_BATCHES: usize = 64;
/// How long one turn of a busy guest is to take.
const TURN_MS: u64 = 20;
/// Rounds of its loop from which their time is found.
const TRIAL: u64 = 2_000_000;
/// How often the socket is looked for until it is there.
const LOOK: Duration = Duration::from_millis(5);

/// How a guest is run.
#[derive(Clone, Debug)]
pub(super) struct Setting<'a> {
    pub(super) model: &'a PmuModel,
    pub(super) source: &'a Source,
    pub(super) vcpus: usize,
    /// vCPUs share this many cores.
    pub(super) cores: Option<CorePlan>,
    /// What a batch of the guest is.
    pub(super) reports: Reported,
    /// Host CPUs of the server and of the guest's thread.
    pub(super) cpus: Option<[usize; 2]>,
    pub(super) timeout: Duration,
}

/// The guest that runs.
#[derive(Debug)]
pub(super) struct ServedGuest {
    pub(super) socket: PathBuf,
    memory: GuestMemoryMmap,
    batches: Receiver<Batch>,
    end: Instant,
    timeout: Duration,
}

impl<'a> Setting<'a> {
    /// One vCPU on a thread of its own, which reports the turns of its loop.
    pub(super) fn busy(bench: &'a Bench<'_>, source: &'a Source) -> Self {
        Self {
            model: &bench.model,
            source,
            vcpus: 1,
            cores: None,
            reports: Reported::Turns,
            cpus: None,
            timeout: bench.timeout,
        }
    }

    /// One vCPU on a thread of its own, which reports the times of accesses.
    pub(super) fn measuring(bench: &'a Bench<'_>, source: &'a Source) -> Self {
        Self {
            reports: Reported::Accesses,
            ..Self::busy(bench, source)
        }
    }

    /// Runs `guest` while `act` goes on; then it is stopped.
    ///
    /// # Errors
    /// Those of `act`; the guest or its server could not be run; the guest went
    /// astray.
    pub(super) fn play<T>(
        &self,
        harness: &Harness<'_>,
        guest: &MicroGuest,
        act: impl FnOnce(&ServedGuest) -> Result<T, BenchError>,
    ) -> Result<T, BenchError> {
        let folder = tempfile::tempdir().map_err(BenchError::Folder)?;
        let socket = folder.path().join("control");
        let control = ControlConfig {
            policy: HostPolicy::HostFirst,
            ..ControlConfig::at(socket.clone())
        };
        let backends = self
            .source
            .open_cores(self.cores.map_or(self.vcpus, |plan| plan.cores.into()))?;
        let cores = backends.into_iter().map(CorePmu::new).collect();
        let (sender, batches) = sync_channel(MOST_BATCHES);
        let (built, memory) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let reporter = Reporter::new(
            self.reports,
            sender,
            stop.clone(),
            self.cpus.map(|cpus| cpus[1]),
        );
        let ending = stop.clone();
        scope(|scope| {
            let runner = scope.spawn(move || {
                if let Some([server, _]) = self.cpus {
                    // Its threads begin where it is.
                    pin_this_thread(server).map_err(BenchError::Signal)?;
                }
                self.run(harness, guest, (&control, cores), (reporter, built))
            });
            let acted = self
                .served((socket, batches), &memory)
                .and_then(|served| act(&served));
            ending.store(true, Ordering::Release);
            let ran = runner.join();
            let ran = ran.map_err(|_| BenchError::Guest("its thread panicked".to_owned()))?;
            // What went wrong there is why nothing came here.
            match ran {
                Ok(outcome) => astray(&outcome, acted),
                Err(error) => Err(error),
            }
        })
    }

    fn run(
        &self,
        harness: &Harness<'_>,
        guest: &MicroGuest,
        (control, cores): (&ControlConfig, Vec<CorePmu>),
        (reporter, built): (Reporter, Sender<GuestMemoryMmap>),
    ) -> Result<MicroOutcome, BenchError> {
        let run = MicroRun {
            model: Some(self.model.clone()),
            // The cores have theirs.
            backend: || Box::new(ClockBackend::new()),
            quirks: harness.probe.quirks(),
            step: harness.probe.step_support(),
            trap: harness.probe.trap_plan(vmm::vcpu::TrapMode::Auto),
            pmi_floor_us: DEFAULT_PMI_FLOOR_US,
            timeout: self.timeout,
            record: false,
            cores: self.cores,
            pcr: None,
        };
        let served = run.run_counted(harness.host, guest, (Some(control), cores), |vm| {
            let memory = vm.memory().clone();
            // Nobody waits for it any more: the guest is stopped at once.
            let _ = built.send(memory.clone());
            Ok::<_, MicroError>(Arc::new(reporter.of(memory)))
        });
        Ok(served?)
    }

    fn served(
        &self,
        (socket, batches): (PathBuf, Receiver<Batch>),
        memory: &Receiver<GuestMemoryMmap>,
    ) -> Result<ServedGuest, BenchError> {
        let memory = memory.recv_timeout(PATIENCE);
        let memory = memory.map_err(|_| BenchError::Guest("it was not made".to_owned()))?;
        let begun = Instant::now();
        while !socket.exists() {
            if begun.elapsed() > PATIENCE {
                return Err(BenchError::Guest("its socket did not come".to_owned()));
            }
            sleep(LOOK);
        }
        Ok(ServedGuest {
            socket,
            memory,
            batches,
            end: begun + self.timeout,
            timeout: self.timeout,
        })
    }
}

/// A guest that was not stopped by us has gone astray.
fn astray<T>(outcome: &MicroOutcome, acted: Result<T, BenchError>) -> Result<T, BenchError> {
    if acted.is_ok() || matches!(acted, Err(BenchError::Refused { .. } | BenchError::Slow(_))) {
        return acted;
    }
    let end = outcome
        .vcpus
        .iter()
        .find(|vcpu| !Reporter::is_ours(&vcpu.end));
    match end {
        Some(vcpu) => Err(BenchError::Guest(vcpu.end.to_string())),
        None => acted,
    }
}

impl ServedGuest {
    /// A tool's connection.
    pub(super) fn client(&self) -> Result<Client, BenchError> {
        let client = Client::with_timeout(&self.socket, PATIENCE);
        client.map_err(|refusal| BenchError::refused("connecting", refusal))
    }

    /// Whether there is time left.
    pub(super) fn check_time(&self) -> Result<(), BenchError> {
        if Instant::now() < self.end {
            Ok(())
        } else {
            Err(BenchError::Slow(self.timeout.as_secs()))
        }
    }

    /// The next batch of the guest.
    pub(super) fn batch(&self) -> Result<Batch, BenchError> {
        // 64 vCPUs on a slow KVM take their time for a batch.
        let left = self.end.saturating_duration_since(Instant::now());
        match self.batches.recv_timeout(left) {
            Ok(batch) => Ok(batch),
            Err(RecvTimeoutError::Timeout) => Err(BenchError::Slow(self.timeout.as_secs())),
            Err(RecvTimeoutError::Disconnected) => Err(BenchError::Guest("it ended".to_owned())),
        }
    }

    /// A batch that has begun after this call.
    pub(super) fn fresh(&self) -> Result<Batch, BenchError> {
        while self.batches.try_recv().is_ok() {}
        // One may be under way.
        self.batch()?;
        self.batch()
    }

    /// Makes a turn of a busy guest's loop take [`TURN_MS`].
    pub(super) fn calibrate(&self, tsc_khz: u32) -> Result<(), BenchError> {
        self.write(words_of(0), TRIAL)?;
        // Those before are shorter.
        self.fresh()?;
        self.fresh()?;
        let batch = self.batch()?;
        let ticks = batch.ticks.first().copied().unwrap_or(0).max(1);
        let wanted = TURN_MS * u64::from(tsc_khz);
        let rounds = u128::from(TRIAL) * u128::from(wanted) / u128::from(ticks);
        self.write(
            words_of(0),
            u64::try_from(rounds).unwrap_or(u64::MAX).max(1),
        )?;
        self.fresh().map(|_| ())
    }

    /// Writes a word into the guest's memory.
    fn write(&self, address: u64, word: u64) -> Result<(), BenchError> {
        let written = self.memory.write_obj(word, GuestAddress(address));
        written.map_err(|error| BenchError::Guest(error.to_string()))
    }
}
