//! From the overflow of a counter to the first instruction of the guest's handler.
//!
//! The guest runs a loop at CPL 3 with one counter that overflows again and
//! again, and its NMI handler begins with RDTSC. The source of counts knew at
//! the entry when the overflow was due; that and the guest's TSC, brought to the
//! host's, give the time that the guest waited.

mod bare;
mod guest;

use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pmu_virt::{CounterBackend, CounterId};
use serde::Serialize;
use vmm::kvm::{KvmVcpu, VcpuId};
use vmm::sys::rdtsc;
use vmm::vcpu::{Observer, PmiRoute, TrapEvent};

use self::bare::BareLoop;
pub(super) use self::guest::{apic, enter_user, reload};
use self::guest::{guest, taken_at};
use super::error::BenchError;
use super::harness::{self, BatchPort, Harness, PATIENCE, ratio};
use super::registers::PmuMsrs;
use super::report::{Report, micros, pair, table, where_it_ran};
use super::sources::{Event, LeftOut, Source, first_countable, tells_when};
use super::stats::{Percentiles, percentiles};

/// Overflows in one batch.
const BATCH: u32 = 100;
/// Time from one overflow to the next.
const PERIOD_US: u32 = 1_000;
/// The vCPU in the real run loop, and the one in the bare loop.
const VCPUS: u8 = 2;
const SUBJECT: u8 = 0;
const BARE: u8 = 1;
/// The guest's TSC as an MSR (SDM vol. 4, table 2-2).
const IA32_TSC: u32 = 0x10;

/// The whole measurement.
#[derive(Clone, Debug, Serialize)]
pub struct PmiReport {
    /// The host's processor.
    pub processor: Option<String>,
    /// Guest CPL 0 runs in KVM's instruction emulator.
    pub slow_cpl0: bool,
    /// PMU model of the guest.
    pub model: &'static str,
    /// Ticks from one overflow to the next.
    pub period: u32,
    /// One for each source that overflows at a known time.
    pub rows: Vec<PmiRow>,
    /// Sources without figures.
    pub left_out: Vec<LeftOut>,
}

/// PMIs of one source.
#[derive(Clone, Debug, Serialize)]
pub struct PmiRow {
    /// Where the counts come from.
    pub backend: &'static str,
    /// What the counter counted.
    pub event: String,
    /// PMIs measured.
    pub samples: usize,
    /// From the TSC value at which the overflow was due to the handler's first
    /// instruction.
    pub handler: Percentiles,
    /// From there until the NMI was handed to KVM.
    pub sent: Percentiles,
    /// A loop that does nothing but queue an NMI at a time, in the same run.
    pub bare: BarePmi,
    /// `handler` against that of the bare loop, ratio of the medians.
    pub ratio_p50: f64,
    /// Ratio of the 99th percentiles.
    pub ratio_p99: f64,
    /// The guest's TSC is known this well on the host's scale, in nanoseconds.
    pub precision_ns: u64,
}

/// The floor: what a timer's signal, `KVM_NMI` and an entry take by themselves.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct BarePmi {
    /// From the TSC value for which the timer was set to the return of `KVM_RUN`.
    pub exit: Percentiles,
    /// From the first until the NMI was handed to KVM.
    pub sent: Percentiles,
    /// From the first to the handler's first instruction.
    pub handler: Percentiles,
}

/// Measures `samples` PMIs with each of `sources`, rounded up to whole batches
/// of 100.
pub(super) fn measure(
    harness: &Harness<'_>,
    sources: &[Source],
    mut left_out: Vec<LeftOut>,
    samples: u32,
) -> Result<PmiReport, BenchError> {
    let (mut rows, mut period) = (Vec::new(), 0);
    for source in sources {
        let backend = source.open()?;
        let event = match first_countable(&harness.model, backend.as_ref()) {
            Ok(event) => event,
            Err(none) => {
                left_out.push(none);
                continue;
            }
        };
        let tells = tells_when(&harness.model, event, source.open()?.as_mut());
        if let Some(reason) = match tells {
            Ok(true) => None,
            Ok(false) => Some("it does not know beforehand when a counter overflows".to_owned()),
            Err(unavailable) => Some(unavailable.to_string()),
        } {
            let source = source.name;
            left_out.push(LeftOut { source, reason });
            continue;
        }
        let mut subject = VcpuPair::new(harness, backend, event)?;
        period = subject.period;
        let waits = subject.collect(samples.div_ceil(BATCH))?;
        rows.push(subject.row(source.name, event, waits)?);
    }
    Ok(PmiReport {
        processor: harness::processor(),
        slow_cpl0: harness.probe.slow_cpl0(),
        model: harness.model.name(),
        period,
        rows,
        left_out,
    })
}

/// Ticks from an overflow's time to the handler, to the NMI's sending, and (known
/// of the bare loop) to the exit before.
#[derive(Debug, Default)]
struct Waits {
    handler: Vec<u64>,
    sent: Vec<u64>,
    exit: Vec<u64>,
}

/// The two vCPUs of one VM, which take turns on one thread.
#[derive(Debug)]
struct VcpuPair {
    vm: Arc<vmm::kvm::KvmVm>,
    solo: vmm::micro::Solo,
    sent: Sent,
    bare: BareLoop,
    /// Of both vCPUs.
    clocks: [GuestClock; 2],
    period: u32,
}

impl VcpuPair {
    fn new(
        harness: &Harness<'_>,
        backend: Box<dyn CounterBackend>,
        event: Event,
    ) -> Result<Self, BenchError> {
        let (vm, vcpus) = harness.build(&guest(&harness.model, event)?)?;
        let Ok([kvm, bare]) = <[_; 2]>::try_from(vcpus) else {
            return Err(BenchError::Guest("it must have two vCPUs".to_owned()));
        };
        let period = kvm.get_tsc_khz()? / 1000 * PERIOD_US;
        for kvm in [&kvm, &bare] {
            let mut regs = kvm.get_regs()?;
            regs.rsi = u64::from(period.wrapping_neg());
            kvm.set_regs(&regs)?;
        }
        let clocks = [GuestClock::of(&kvm)?, GuestClock::of(&bare)?];
        let (_, counter) = PmuMsrs::of(&harness.model).first();
        let us = Duration::from_micros(PERIOD_US.into());
        let sent = Sent::default();
        let observer = Box::new(sent.clone());
        let solo = harness.solo(kvm, &vm, backend, Arc::new(BatchPort), observer)?;
        Ok(Self {
            vm,
            solo,
            sent,
            bare: BareLoop::new(bare, counter, us, period.into())?,
            clocks,
            period,
        })
    }

    /// The waits of `batches` batches on each side after a first one that warms up;
    /// which side comes first alternates.
    fn collect(&mut self, batches: u32) -> Result<[Waits; 2], BenchError> {
        let mut waits = <[Waits; 2]>::default();
        for number in 0..=batches {
            let first = number % 2 == 0;
            for bare in [!first, first] {
                let taken = if bare { self.bare()? } else { self.solo()? };
                if number > 0 {
                    let waits = &mut waits[usize::from(bare)];
                    waits.handler.extend(taken.handler);
                    waits.sent.extend(taken.sent);
                    waits.exit.extend(taken.exit);
                }
            }
        }
        Ok(waits)
    }

    /// One batch through the real run loop.
    fn solo(&mut self) -> Result<Waits, BenchError> {
        harness::batch(&mut self.solo, PATIENCE)?;
        let sent = std::mem::take(&mut *self.sent.lock());
        let mut waits = Waits::default();
        for (pmi, taken) in sent.iter().zip(self.taken(SUBJECT, sent.len())?) {
            let unknown = || BenchError::Guest("an overflow was not due".to_owned());
            let due = pmi.due.ok_or_else(unknown)?;
            waits.handler.push(taken.saturating_sub(due));
            waits.sent.push(pmi.at.saturating_sub(due));
        }
        Ok(waits)
    }

    /// One batch through the bare loop.
    fn bare(&mut self) -> Result<Waits, BenchError> {
        let sent = self.bare.batch(PATIENCE)?;
        let mut waits = Waits::default();
        for (nmi, taken) in sent.iter().zip(self.taken(BARE, sent.len())?) {
            waits.handler.push(taken.saturating_sub(nmi.due));
            waits.sent.push(nmi.sent.saturating_sub(nmi.due));
            waits.exit.push(nmi.left.saturating_sub(nmi.due));
        }
        Ok(waits)
    }

    /// When `vcpu` took each NMI of a batch, of which `sent` were sent.
    fn taken(&self, vcpu: u8, sent: usize) -> Result<Vec<u64>, BenchError> {
        let taken = harness::words(&self.vm, taken_at(vcpu), BATCH)?;
        if sent != taken.len() {
            return Err(BenchError::Guest(format!(
                "{sent} NMIs were sent and {} taken",
                taken.len()
            )));
        }
        let clock = self.clocks[usize::from(vcpu)];
        let taken = taken.into_iter().map(u64::from_le_bytes);
        Ok(taken.map(|at| clock.host(at)).collect())
    }

    fn row(
        &self,
        backend: &'static str,
        event: Event,
        [mut umpire, mut bare]: [Waits; 2],
    ) -> Result<PmiRow, BenchError> {
        let tsc_khz = self.solo.tsc_khz();
        let figures = |ticks: &mut [u64]| {
            let none = || BenchError::Guest("it took no samples".to_owned());
            percentiles(ticks, tsc_khz).ok_or_else(none)
        };
        let handler = figures(&mut umpire.handler)?;
        let bare = BarePmi {
            exit: figures(&mut bare.exit)?,
            sent: figures(&mut bare.sent)?,
            handler: figures(&mut bare.handler)?,
        };
        let [one, other] = self.clocks;
        let precision = one.precision.max(other.precision);
        Ok(PmiRow {
            backend,
            event: event.known.to_string(),
            samples: umpire.handler.len(),
            handler,
            sent: figures(&mut umpire.sent)?,
            bare,
            ratio_p50: ratio(handler.p50_ns, bare.handler.p50_ns),
            ratio_p99: ratio(handler.p99_ns, bare.handler.p99_ns),
            precision_ns: precision * 1_000_000 / u64::from(tsc_khz.max(1)),
        })
    }
}

/// One PMI on its way.
#[derive(Clone, Copy, Debug)]
struct SentPmi {
    due: Option<u64>,
    at: u64,
}

/// Keeps the time of each NMI that was sent for the first counter.
#[derive(Clone, Debug, Default)]
struct Sent(Arc<Mutex<Vec<SentPmi>>>);

impl Sent {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<SentPmi>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Observer for Sent {
    fn event(&mut self, _: VcpuId, event: &TrapEvent) {
        let at = rdtsc();
        if let TrapEvent::Pmi {
            request,
            delivery,
            due,
        } = event
            && delivery.route == PmiRoute::Nmi
            && request.counters.contains(CounterId::Programmable(0))
        {
            self.lock().push(SentPmi {
                due: due.map(|due| due.0),
                at,
            });
        }
    }
}

/// What the guest's TSC is on the host's scale.
#[derive(Clone, Copy, Debug)]
struct GuestClock {
    /// Guest less host.
    offset: u64,
    /// Half of the time that the comparison took, in ticks.
    precision: u64,
}

impl GuestClock {
    /// Compares both some hundred times and keeps the closest comparison.
    fn of(kvm: &KvmVcpu) -> Result<Self, BenchError> {
        let mut best: Option<Self> = None;
        for _ in 0..500 {
            let before = rdtsc();
            let guest = kvm.read_msr(IA32_TSC)?;
            let precision = rdtsc().wrapping_sub(before) / 2;
            let guest = guest
                .ok_or_else(|| BenchError::Guest("KVM does not give the guest's TSC".to_owned()))?;
            if best.is_none_or(|best| precision < best.precision) {
                let offset = guest.wrapping_sub(before.wrapping_add(precision));
                best = Some(Self { offset, precision });
            }
        }
        best.ok_or_else(|| BenchError::Guest("its TSC was not compared".to_owned()))
    }

    fn host(self, guest: u64) -> u64 {
        guest.wrapping_sub(self.offset)
    }
}

impl Report for PmiReport {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "From a counter's overflow to the first instruction of the guest's NMI handler\n\
             {}, model {}, an overflow every {} ticks\n",
            where_it_ran(self.processor.as_deref(), self.slow_cpl0),
            self.model,
            self.period
        )?;
        let rows = self.rows.iter().flat_map(|row| {
            let umpire = [
                row.backend.to_string(),
                row.event.to_string(),
                row.samples.to_string(),
                pair(row.handler),
                pair(row.sent),
                String::new(),
                micros(row.precision_ns),
            ];
            let bare = [
                "  bare loop".to_owned(),
                format!("ratio {:.2} / {:.2}", row.ratio_p50, row.ratio_p99),
                row.samples.to_string(),
                pair(row.bare.handler),
                pair(row.bare.sent),
                pair(row.bare.exit),
                String::new(),
            ];
            [umpire, bare]
        });
        let titles = [
            "backend",
            "event",
            "PMIs",
            "handler p50 / p99 [us]",
            "sent p50 / p99 [us]",
            "exit p50 / p99 [us]",
            "+/- [us]",
        ];
        table(titles, 2..=6, rows, out)?;
        writeln!(
            out,
            "\nexit: until KVM_RUN returned; sent: until the NMI was handed to KVM, which is before the\n\
             entry that delivers it; bare loop: a timer set for the same time, the NMI, and nothing else"
        )?;
        LeftOut::text(&self.left_out, out)
    }
}
