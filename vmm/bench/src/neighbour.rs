//! The trap path of one VM while another VM on another host CPU does its worst.
//!
//! Two neighbours take turns beside the same subject: a quiet one that computes,
//! and a hostile one that leaves its guest as often as it can, on every way out.
//! Both keep their host CPU busy, so only what they do differs.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use arbiter::{Policy, Scheme};
use pmu_virt::ClockBackend;
use serde::Serialize;
use vmm::audit::AuditTrail;
use vmm::devices::{PlatformParts, PortBus};
use vmm::kvm::KvmVm;
use vmm::micro::{MicroGuest, Solo};
use vmm::sys::{allowed_cpus, pin_this_thread};
use vmm::vcpu::{Platform, SharedPlatform, Silent};

use super::beside::{Compared, Ratios, TARGET, write_compared};
use super::error::BenchError;
use super::guest::{Access, AccessSamples, BATCH, guest, samples_at};
use super::harness::{self, BatchPort, Harness, PATIENCE};
use super::pcr;
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
}

impl Hostility {
    /// All, in the order of declaration.
    pub const ALL: [Self; 2] = [Self::Exits, Self::Reserving];

    /// Its word on a command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exits => "exits",
            Self::Reserving => "reserving",
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
    /// is some 40 exits, or two counters reserved and given back.
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
    let world = &world;
    let (rows, storms) = std::thread::scope(|scope| {
        let neighbour = scope.spawn(move || world.neighbours(cpus[1]));
        let rows = world.subject(cpus[0], rounds);
        world.over.store(true, Ordering::Release);
        let ended = neighbour.join();
        let storms = ended
            .map_err(|_| BenchError::Guest("the neighbour's thread panicked".to_owned()))??;
        Ok::<_, BenchError>((rows?, storms))
    })?;
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
    fn subject(&self, cpu: usize, rounds: u32) -> Result<Vec<NeighbourRow>, BenchError> {
        pin_this_thread(cpu).map_err(BenchError::Signal)?;
        let (vm, mut solo) = self.solo(
            &guest(&self.harness.model, self.event, 1)?,
            Arc::new(BatchPort),
        )?;
        let mut samples: [AccessSamples; 2] = Default::default();
        // The first round warms up.
        for round in 0..=rounds {
            // Which comes first alternates.
            let turns = match round % 2 {
                0 => [QUIET, HOSTILE],
                _ => [HOSTILE, QUIET],
            };
            for neighbour in turns {
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
    fn neighbours(&self, cpu: usize) -> Result<u64, BenchError> {
        let result = self.take_turns(cpu);
        self.over.store(true, Ordering::Release);
        result
    }

    fn take_turns(&self, cpu: usize) -> Result<u64, BenchError> {
        pin_this_thread(cpu).map_err(BenchError::Signal)?;
        let hostile_devices = devices()?;
        let (_quiet_vm, mut quiet) = self.solo(&storm::quiet()?, devices()?)?;
        let (_hostile_vm, mut hostile) = match self.hostility {
            Hostility::Exits => self.solo(&storm::hostile()?, hostile_devices.clone())?,
            Hostility::Reserving => self.reserving(hostile_devices.clone())?,
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
            "Round trips of trapped PMU accesses beside another VM ({} of each kind; hostile: {})\n\
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
