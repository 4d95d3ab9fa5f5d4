//! The trap path of one VM while a neighbour on another host CPU does its worst.
//!
//! Two neighbours take turns beside the same subject: a quiet one that computes, and a
//! hostile one, which leaves its guest as often as it can, or whose tool loads and
//! unloads a context as fast as it can. Both keep their host CPU busy, so only what they
//! do differs.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use arbiter::{Policy, Scheme};
use pmu_virt::ClockBackend;
use serde::Serialize;
use vmm::audit::AuditTrail;
use vmm::devices::{Platform, SharedPlatform};
use vmm::devices::{PlatformParts, PortBus};
use vmm::kvm::KvmVm;
use vmm::micro::{MicroGuest, Solo};
use vmm::sys::{allowed_cpus, pin_this_thread};
use vmm::vcpu::Silent;

use super::beside::{Compared, Ratios, TARGET, write_compared};
use super::error::BenchError;
use super::guest::{Access, AccessSamples, BATCH, guest, samples_at};
use super::harness::{self, BatchPort, Harness, PATIENCE};
use super::pcr;
use super::perfmon::{self, Loader, Subject, TimesByAccess, TrapsRow};
use super::report::Report;
use super::sources::first_countable;
use super::stats::{Percentiles, percentiles};
use super::storm;

/// What the hostile neighbour does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Hostility {
    /// It leaves its guest on every way out.
    #[default]
    Exits,
    /// It reserves counters and gives them back.
    Reserving,
    /// A tool loads a context onto its vCPU and unloads it.
    Loading,
    /// The same, and it is another vCPU of the subject's own VM.
    LoadingBeside,
}

impl Hostility {
    /// All, in the order of declaration.
    pub const ALL: [Self; 4] = [
        Self::Exits,
        Self::Reserving,
        Self::Loading,
        Self::LoadingBeside,
    ];

    /// Its word on a command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exits => "exits",
            Self::Reserving => "reserving",
            Self::Loading => "loading",
            Self::LoadingBeside => "loading-beside",
        }
    }
}

/// How long a neighbour runs before it looks whether its turn is over.
const TURN: Duration = Duration::from_millis(5);

const QUIET: u8 = 0;
const HOSTILE: u8 = 1;

/// One kind of access beside both neighbours.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct NeighbourRow {
    /// What the subject did.
    pub access: Access,
    /// Beside the neighbour that computes.
    pub quiet: Percentiles,
    /// Beside the hostile neighbour.
    pub hostile: Percentiles,
    /// What the hostile one costs.
    #[serde(flatten)]
    pub ratios: Ratios,
}

/// The whole measurement.
#[derive(Clone, Debug, Serialize)]
pub struct NeighbourReport {
    /// The host's processor.
    pub processor: Option<String>,
    /// Guest CPL 0 runs in KVM's instruction emulator.
    pub slow_cpl0: bool,
    /// What the hostile neighbour did.
    pub hostility: Hostility,
    /// Samples of each kind beside each neighbour.
    pub iterations: u32,
    /// Host CPUs of the subject and of the neighbour.
    pub cpus: [usize; 2],
    /// How often the hostile neighbour went through all its ways out; each round
    /// is some 40 exits, two counters reserved and given back, or a context loaded and
    /// unloaded.
    pub storms: u64,
    /// One for each kind of access.
    pub rows: Vec<NeighbourRow>,
}

/// Measures `iterations` round trips of each kind beside each neighbour, rounded
/// up to whole batches of 100.
///
/// # Errors
/// A guest could not be made or run, or there is one host CPU only.
pub(super) fn measure(
    harness: &Harness<'_>,
    iterations: u32,
    hostility: Hostility,
) -> Result<NeighbourReport, BenchError> {
    let cpus = match allowed_cpus().map_err(BenchError::Signal)?[..] {
        [.., neighbour, subject] => [subject, neighbour],
        _ => return Err(BenchError::OneCpu),
    };
    let event = first_countable(&harness.model, &ClockBackend::new());
    let event = event.map_err(|none| BenchError::Guest(none.reason))?;
    let rounds = iterations.div_ceil(BATCH);
    let world = World {
        harness,
        event: event.code,
        hostility,
        trail: AuditTrail::new(1),
        wanted: AtomicU8::new(QUIET),
        running: AtomicU8::new(0),
        over: AtomicBool::new(false),
    };
    let (rows, storms) = match hostility {
        Hostility::LoadingBeside => perfmon::in_the_same_vm(harness, cpus, |loader, subject| {
            let rows = || world.subject_of_tool(subject, rounds);
            world.beside_each_other(|| world.load_in_turns(cpus[1], loader), rows)
        }),
        _ => world.beside_each_other(
            || world.take_turns(cpus[1]),
            || world.subject(cpus[0], rounds),
        ),
    }?;
    if storms < u64::from(rounds) {
        return Err(BenchError::Guest(format!(
            "the hostile neighbour came round {storms} times in {rounds} turns"
        )));
    }
    Ok(NeighbourReport {
        processor: harness::processor(),
        slow_cpl0: harness.probe.slow_cpl0(),
        hostility,
        iterations: rounds * BATCH,
        cpus,
        storms,
        rows,
    })
}

/// What both threads share.
#[derive(Debug)]
struct World<'a> {
    harness: &'a Harness<'a>,
    /// Code of the event that the subject counts.
    event: u64,
    hostility: Hostility,
    /// Where the hostile one's reservations are recorded.
    trail: AuditTrail,
    /// Whose turn it is.
    wanted: AtomicU8,
    /// Who has taken it, plus 1.
    running: AtomicU8,
    over: AtomicBool,
}

impl World<'_> {
    /// Runs the neighbours, on a thread of their own, until the subject is done: its rows,
    /// and the hostile neighbour's rounds.
    fn beside_each_other(
        &self,
        neighbours: impl FnOnce() -> Result<u64, BenchError> + Send,
        subject: impl FnOnce() -> Result<Vec<NeighbourRow>, BenchError>,
    ) -> Result<(Vec<NeighbourRow>, u64), BenchError> {
        std::thread::scope(|scope| {
            let neighbour = scope.spawn(|| {
                let result = neighbours();
                self.over.store(true, Ordering::Release);
                result
            });
            let rows = subject();
            self.over.store(true, Ordering::Release);
            let ended = neighbour.join();
            let storms = ended
                .map_err(|_| BenchError::Guest("the neighbour's thread panicked".to_owned()))??;
            Ok((rows?, storms))
        })
    }

    fn subject(&self, cpu: usize, rounds: u32) -> Result<Vec<NeighbourRow>, BenchError> {
        pin_this_thread(cpu).map_err(BenchError::Signal)?;
        let (vm, mut solo) = self.solo(
            &guest(&self.harness.model, self.event, 1)?,
            Arc::new(BatchPort),
        )?;
        let mut samples: [AccessSamples; 2] = Default::default();
        // The first round warms up.
        for round in 0..=rounds {
            for neighbour in turns(round) {
                self.give_to(neighbour)?;
                let series = &mut samples[usize::from(neighbour)];
                for (access, samples) in series.iter_mut().enumerate() {
                    let number = harness::batch(&mut solo, PATIENCE)?;
                    if usize::try_from(number) != Ok(access) {
                        let what = format!("it finished batch {number} instead of {access}");
                        return Err(BenchError::Guest(what));
                    }
                    let taken = harness::words(&vm, samples_at(0), BATCH)?;
                    let taken = taken.into_iter().map(u32::from_le_bytes);
                    if round > 0 {
                        samples.extend(taken);
                    }
                }
            }
        }
        rows(samples, solo.tsc_khz())
    }

    /// The subject in the VM that the tool looks at.
    fn subject_of_tool(
        &self,
        subject: &Subject<'_>,
        rounds: u32,
    ) -> Result<Vec<NeighbourRow>, BenchError> {
        let mut times: [TimesByAccess; 2] = Default::default();
        // The first round warms up.
        let mut warming = TimesByAccess::default();
        for round in 0..=rounds {
            for neighbour in turns(round) {
                self.give_to(neighbour)?;
                let series = &mut times[usize::from(neighbour)];
                subject.take(if round > 0 { series } else { &mut warming })?;
            }
        }
        let row = |row: TrapsRow| NeighbourRow {
            access: row.access,
            quiet: row.quiet,
            hostile: row.loaded,
            ratios: row.ratios,
        };
        Ok(subject.rows(times)?.into_iter().map(row).collect())
    }

    /// Waits until `neighbour` runs.
    fn give_to(&self, neighbour: u8) -> Result<(), BenchError> {
        self.wanted.store(neighbour, Ordering::Release);
        while self.running.load(Ordering::Acquire) != neighbour + 1 {
            if self.over.load(Ordering::Acquire) {
                return Err(BenchError::Guest("the neighbour ended".to_owned()));
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    /// Runs the neighbour whose turn it is until the measurement is over; the
    /// hostile one's rounds.
    fn take_turns(&self, cpu: usize) -> Result<u64, BenchError> {
        if self.hostility == Hostility::Loading {
            let act = |loader: &Loader| self.load_in_turns(cpu, loader);
            return perfmon::in_another_vm(self.harness, cpu, act);
        }
        pin_this_thread(cpu).map_err(BenchError::Signal)?;
        let hostile_devices = devices()?;
        let (_quiet_vm, mut quiet) = self.solo(&storm::quiet()?, devices()?)?;
        let (_hostile_vm, mut hostile) = match self.hostility {
            Hostility::Exits => self.solo(&storm::hostile()?, hostile_devices.clone())?,
            _ => self.reserving(hostile_devices.clone())?,
        };
        while !self.over.load(Ordering::Acquire) {
            let turn = self.wanted.load(Ordering::Acquire);
            self.running.store(turn + 1, Ordering::Release);
            let end = match turn {
                QUIET => quiet.run(TURN)?,
                _ => hostile.run(TURN)?,
            };
            if let Some(end) = end {
                return Err(BenchError::Guest(format!("the neighbour ended: {end}")));
            }
        }
        Ok(hostile_devices.ports().unclaimed() / storm::UNCLAIMED_PER_ROUND)
    }

    /// Has the tool load and unload when it is the hostile one's turn; the vCPU that it
    /// looks at computes all the while. How often it did.
    fn load_in_turns(&self, cpu: usize, loader: &Loader) -> Result<u64, BenchError> {
        pin_this_thread(cpu).map_err(BenchError::Signal)?;
        let mut rounds = 0;
        while !self.over.load(Ordering::Acquire) {
            let turn = self.wanted.load(Ordering::Acquire);
            self.running.store(turn + 1, Ordering::Release);
            if turn == QUIET {
                std::thread::sleep(TURN);
                continue;
            }
            let begun = Instant::now();
            while begun.elapsed() < TURN {
                loader.round()?;
                rounds += 1;
            }
        }
        Ok(rounds)
    }

    /// The neighbour that reserves.
    fn reserving(&self, platform: Arc<dyn Platform>) -> Result<(Arc<KvmVm>, Solo), BenchError> {
        let (vm, vcpus) = self.harness.build(&storm::reserving()?)?;
        let kvm = harness::only(vcpus)?;
        let reservations = pcr::reservations(
            self.harness,
            kvm.get_tsc_khz()?,
            &self.trail,
            (Policy::default(), Scheme::default()),
        )?;
        let backend = Box::new(ClockBackend::new());
        let (silent, reservations) = (Box::new(Silent), Some(reservations));
        let solo = self.harness;
        let solo = solo.solo_with(kvm, &vm, backend, platform, silent, reservations)?;
        Ok((vm, solo))
    }

    fn solo(
        &self,
        guest: &MicroGuest,
        platform: Arc<dyn Platform>,
    ) -> Result<(Arc<KvmVm>, Solo), BenchError> {
        let (vm, vcpus) = self.harness.build(guest)?;
        let backend = Box::new(ClockBackend::new());
        let (kvm, silent) = (harness::only(vcpus)?, Box::new(Silent));
        let solo = self.harness.solo(kvm, &vm, backend, platform, silent)?;
        Ok((vm, solo))
    }
}

/// The neighbours in the order of a round: which comes first alternates.
fn turns(round: u32) -> [u8; 2] {
    match round % 2 {
        0 => [QUIET, HOSTILE],
        _ => [HOSTILE, QUIET],
    }
}

fn rows(samples: [AccessSamples; 2], tsc_khz: u32) -> Result<Vec<NeighbourRow>, BenchError> {
    let none = || BenchError::Guest("it took no samples".to_owned());
    let [quiet, hostile] = samples;
    let pairs = quiet.into_iter().zip(hostile);
    Access::ALL
        .into_iter()
        .zip(pairs)
        .map(|(access, (mut quiet, mut hostile))| {
            let quiet = percentiles(&mut quiet, tsc_khz).ok_or_else(none)?;
            let hostile = percentiles(&mut hostile, tsc_khz).ok_or_else(none)?;
            Ok(NeighbourRow {
                access,
                quiet,
                hostile,
                ratios: Ratios::of(hostile, quiet),
            })
        })
        .collect()
}

/// The devices of `umpire run`, with the console's output dropped.
fn devices() -> Result<Arc<SharedPlatform>, BenchError> {
    let parts = PlatformParts::with_console(Box::new(std::io::sink()));
    let (parts, _irq) = parts.map_err(|error| BenchError::Guest(error.to_string()))?;
    Ok(Arc::new(SharedPlatform::new(PortBus::new(parts))))
}

impl Report for NeighbourReport {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let [subject, neighbour] = self.cpus;
        writeln!(
            out,
            "Round trips of trapped PMU accesses beside a neighbour ({} of each kind; hostile: {})\n\
             {}, subject on CPU {subject}, neighbour on CPU {neighbour}\n",
            self.iterations,
            self.hostility.name(),
            self.processor.as_deref().unwrap_or("unknown processor"),
        )?;
        let compared = |row: &NeighbourRow| Compared {
            access: row.access,
            quiet: row.quiet,
            loaded: row.hostile,
            ratios: row.ratios,
        };
        write_compared(["quiet", "hostile"], self.rows.iter().map(compared), out)?;
        writeln!(
            out,
            "\nwanted: ratio p99 <= {TARGET:.2}; the hostile neighbour went round {} times",
            self.storms
        )
    }
}
