//! What events cost that nobody counts.
//!
//! Two vCPUs of one VM take turns on one thread. Both have two events that the
//! source counts; one has five more that it does not. The guest times its exits,
//! and the host the switches of two PMUs that are programmed alike.

use std::sync::Arc;
use std::time::Instant;

use arbiter::{Caller, Grant, Layer};
use iced_x86::code_asm::{CodeAssembler, dword_ptr, dx, eax, ebx, ecx, edx, esi, r8, r9d, rdi};
use pmu_virt::{
    CorePmu, CountRequest, CounterBackend, EventCode, MsrIndex, OwnerId, PmuModel, VcpuPmu,
};
use serde::Serialize;
use vmm::micro::{KERNEL_CODE, MicroError, MicroGuest, SCRATCH, Solo, Start, assemble};
use vmm::vcpu::Silent;

use crate::error::BenchError;
use crate::guest::with_gp_handler;
use crate::harness::{self, BatchPort, DONE, Harness, PATIENCE, ratio};
use crate::registers::{PmuMsrs, Written, wrmsr};
use crate::sources::{INT, Source, USR_OS_ENABLE, countable};
use crate::stats::{median, percentiles};

/// Room for all of them, whatever the host is.
const MODEL: &str = "intel-v2,counters=8,fixed=0";
const LIVE: usize = 2;
const DEAD: usize = 5;
/// Samples that the guest takes before it reports.
const BATCH: u32 = 100;
/// A port that nobody listens to.
const QUIET_PORT: u16 = 0xe3;
const BEGIN_STRIDE: u64 = 0x1000;
const ENABLE: u32 = 1 << 22;
/// Switches whose time is taken at once.
const SWITCHES: u32 = 1_000;

/// What the guest does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FrozenAccess {
    /// OUT to a port that nobody listens to.
    Out,
    /// RDMSR of a counter that counts.
    ReadCounter,
    /// WRMSR to its event select, which starts or stops it in turn.
    WriteSelect,
    /// Another vCPU comes to the core; timed on the host.
    Switch,
}

impl FrozenAccess {
    const GUESTS: [Self; 3] = [Self::Out, Self::ReadCounter, Self::WriteSelect];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Out => "OUT",
            Self::ReadCounter => "RDMSR counter",
            Self::WriteSelect => "WRMSR event select",
            Self::Switch => "switch of vCPUs",
        }
    }
}

/// One of these with two events, and with five more that nobody counts.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct FrozenRow {
    /// What was done.
    pub access: FrozenAccess,
    /// Median nanoseconds with the two events that are counted.
    pub live_ns: u64,
    /// Median nanoseconds with all seven.
    pub all_ns: u64,
    /// The second to the first.
    pub ratio: f64,
}

/// One of the vCPUs: where its counters are, and what it measured.
#[derive(Debug)]
struct FrozenVcpu {
    solo: Solo,
    samples: [Vec<u32>; FrozenAccess::GUESTS.len()],
}

/// Measures with `source`; nothing if it counts every event of the model, or none.
pub(super) fn measure(
    harness: &Harness<'_>,
    source: &Source,
    rounds: u32,
) -> Result<Vec<FrozenRow>, BenchError> {
    let model = PmuModel::parse(MODEL).map_err(|error| BenchError::Guest(error.to_string()))?;
    let backend = source.open()?;
    let live = countable(&model, backend.as_ref());
    let dead = dead(&model, backend.as_ref());
    if live.is_empty() || dead.is_empty() {
        return Ok(Vec::new());
    }
    let live = live.iter().map(|event| event.code).cycle().take(LIVE);
    let events: Vec<u64> = live.chain(dead.into_iter().cycle().take(DEAD)).collect();
    let harness = &Harness {
        model,
        ..harness.clone()
    };
    let mut rows = in_guest(harness, source, &events, rounds)?;
    rows.push(switches(&harness.model, source, &events, rounds)?);
    Ok(rows)
}

/// One code of each event that the model knows and the backend does not count.
fn dead(model: &PmuModel, backend: &dyn CounterBackend) -> Vec<u64> {
    let (mut found, mut codes) = (Vec::new(), Vec::new());
    for code in 0..=0xffff {
        let request = CountRequest::decode(model.events(), code | USR_OS_ENABLE);
        let programmable = matches!(request.event, EventCode::Selected { .. });
        if let Some(known) = request.event.known()
            && programmable
            && !found.contains(&known)
            && backend.plan(&request).is_err()
        {
            found.push(known);
            codes.push(code);
        }
    }
    codes
}

fn in_guest(
    harness: &Harness<'_>,
    source: &Source,
    events: &[u64],
    rounds: u32,
) -> Result<Vec<FrozenRow>, BenchError> {
    let (vm, vcpus) = harness.build(&guest(&harness.model, events)?)?;
    let mut sides = Vec::new();
    for kvm in vcpus {
        let (port, silent) = (Arc::new(BatchPort), Box::new(Silent));
        sides.push(FrozenVcpu {
            solo: harness.solo(kvm, &vm, source.open()?, port, silent)?,
            samples: Default::default(),
        });
    }
    // The first round warms up; which side comes first alternates.
    for round in 0..=rounds {
        for access in 0..FrozenAccess::GUESTS.len() {
            for turn in 0..sides.len() {
                let number = (turn + usize::try_from(round).unwrap_or(0)) % sides.len();
                let side = &mut sides[number];
                harness::batch(&mut side.solo, PATIENCE)?;
                let ticks = harness::words(&vm, samples_at(number), BATCH)?;
                if round > 0 {
                    let ticks = ticks.into_iter().map(u32::from_le_bytes);
                    side.samples[access].extend(ticks);
                }
            }
        }
    }
    let rows = FrozenAccess::GUESTS.into_iter().enumerate();
    rows.map(|(place, access)| {
        let mut p50 = sides.iter_mut().map(|side| {
            let tsc_khz = side.solo.tsc_khz();
            percentiles(&mut side.samples[place], tsc_khz).map(|times| times.p50_ns)
        });
        let none = || BenchError::Guest("it took no samples".to_owned());
        let mut next = || p50.next().flatten().ok_or_else(none);
        Ok(row(access, next()?, next()?))
    })
    .collect()
}

fn row(access: FrozenAccess, live_ns: u64, all_ns: u64) -> FrozenRow {
    FrozenRow {
        access,
        live_ns,
        all_ns,
        ratio: ratio(all_ns, live_ns),
    }
}

/// Two vCPUs in turn on one core, programmed alike.
fn switches(
    model: &PmuModel,
    source: &Source,
    events: &[u64],
    rounds: u32,
) -> Result<FrozenRow, BenchError> {
    let mut times = [Vec::new(), Vec::new()];
    let mut pairs = Vec::new();
    for used in [&events[..LIVE], events] {
        let mut core = CorePmu::new(source.open()?);
        let pmus = [1, 2].map(|owner| programmed(model, used, OwnerId(owner), &mut core));
        pairs.push((core, pmus));
    }
    for _ in 0..=rounds {
        for (times, (core, pmus)) in times.iter_mut().zip(&mut pairs) {
            let begin = Instant::now();
            for _ in 0..SWITCHES {
                for pmu in pmus.iter_mut() {
                    pmu.attach(core);
                    pmu.park(core);
                }
            }
            let ns = begin.elapsed().as_nanos() / u128::from(2 * SWITCHES);
            times.push(u64::try_from(ns).unwrap_or(u64::MAX));
        }
    }
    let [live, all] = times.map(|mut times| median(&mut times).unwrap_or_default());
    Ok(row(FrozenAccess::Switch, live, all))
}

fn programmed(model: &PmuModel, events: &[u64], owner: OwnerId, core: &mut CorePmu) -> VcpuPmu {
    let msrs = PmuMsrs::of(model);
    let kernel = Caller::legacy(Layer::GuestKernel);
    let mut pmu = VcpuPmu::detached(owner, model.clone(), Grant::everything());
    pmu.attach(core);
    for (msr, code) in msrs.selects.iter().zip(events) {
        pmu.wrmsr(core, MsrIndex(*msr), code | USR_OS_ENABLE | INT, kernel);
    }
    if let Some(msr) = msrs.global_control {
        pmu.wrmsr(core, MsrIndex(msr), model.global_mask(), kernel);
    }
    pmu.park(core);
    pmu
}

/// Where vCPU `vcpu` leaves its samples: TSC ticks, 32 bits each.
fn samples_at(vcpu: usize) -> u64 {
    const STRIDE: u64 = 0x1000;
    SCRATCH + u64::try_from(vcpu).unwrap_or(0) * STRIDE
}

/// vCPU 0 has the live events, vCPU 1 all of them.
fn guest(model: &PmuModel, events: &[u64]) -> Result<MicroGuest, BenchError> {
    let msrs = PmuMsrs::of(model);
    let mut guest = with_gp_handler(MicroGuest::new())?;
    for (vcpu, used) in [&events[..LIVE], events].into_iter().enumerate() {
        let at = KERNEL_CODE + u64::try_from(vcpu).unwrap_or(0) * BEGIN_STRIDE;
        let code = assemble(at, |a| program(a, &msrs, used));
        let mut start = Start::at(at, 0);
        start.rdi = samples_at(vcpu);
        guest = guest.code(at, code.map_err(MicroError::from)?).start(start);
    }
    Ok(guest)
}

/// The dead ones want interrupts, and are as near to an overflow as can be.
fn program(a: &mut CodeAssembler, msrs: &PmuMsrs, events: &[u64]) -> Written {
    a.mov(r8, rdi)?;
    for (n, code) in events.iter().enumerate() {
        if n >= LIVE {
            wrmsr(a, msrs.counters[n], u64::from(u32::MAX))?;
        }
        wrmsr(a, msrs.selects[n], code | USR_OS_ENABLE | INT)?;
    }
    msrs.enable(a, u32::try_from(events.len()).unwrap_or(0))?;
    let (select, counter) = msrs.first();
    let control = u32::try_from(events[0] | USR_OS_ENABLE | INT).unwrap_or(0);
    a.mov(r9d, control)?;
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    for access in FrozenAccess::GUESTS {
        a.mov(rdi, r8)?;
        a.mov(ebx, BATCH)?;
        let mut next = a.create_label();
        a.set_label(&mut next)?;
        if access == FrozenAccess::WriteSelect {
            a.xor(r9d, ENABLE.cast_signed())?;
        }
        a.rdtsc()?;
        a.mov(esi, eax)?;
        match access {
            FrozenAccess::Out => {
                a.mov(dx, u32::from(QUIET_PORT))?;
                a.out(dx, eax)?;
            }
            FrozenAccess::ReadCounter => {
                a.mov(ecx, counter)?;
                a.rdmsr()?;
            }
            FrozenAccess::WriteSelect => {
                a.mov(ecx, select)?;
                a.mov(eax, r9d)?;
                a.xor(edx, edx)?;
                a.wrmsr()?;
            }
            FrozenAccess::Switch => {}
        }
        a.rdtsc()?;
        a.sub(eax, esi)?;
        a.mov(dword_ptr(rdi), eax)?;
        a.add(rdi, 4)?;
        a.dec(ebx)?;
        a.jne(next)?;
        a.xor(eax, eax)?;
        a.mov(dx, u32::from(DONE))?;
        a.out(dx, eax)?;
    }
    a.jmp(again)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pmu_virt::ClockBackend;

    #[test]
    fn the_clock_counts_two_events_and_leaves_five_others() {
        let model = PmuModel::parse(MODEL).unwrap();
        let clock = ClockBackend::new();
        assert_eq!(countable(&model, &clock).len(), LIVE);
        assert!(dead(&model, &clock).len() >= DEAD);
    }
}
