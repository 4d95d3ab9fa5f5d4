//! Guests whose counters are the host kernel's, and whose overflows are its signals.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use guest_tests::micro::{
    DATA, Lab, LabRun, Program, Setup, Test, Written, enter_user, exit, log_value, wrmsr,
};
use iced_x86::code_asm::{CodeAssembler, dword_ptr, eax, ecx, edx};
use pmu_virt::perf::{PerfBackend, probe};
use pmu_virt::{
    BackendEnv, CountPlan, CountRequest, CounterBackend, CounterId, EventCode, KnownEvent, OwnerId,
    Progress, Provenance, Reading, SlotIndex, SlotSet, SoftwareEvent, Tsc, Unavailable,
};
use vmm::sys::{kick_signal, rdtsc};
use vmm::vcpu::{PmiRoute, TrapEvent};

use super::overflow::{AMD, Apic, TAKEN, await_value, handler, lvtpc_of};
use super::rings::busy;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "perf::cycles_grow_with_the_time_in_the_guest",
        run: counts_grow,
    },
    Test {
        name: "perf::overflow_signals_become_pmis",
        run: overflows,
    },
    Test {
        name: "perf::an_overflow_interrupts_cpl_3",
        run: interrupts_user,
    },
];

/// Where a handler leaves the time at which it was entered.
const INTERRUPTED: u64 = DATA + 8;

/// TSC frequency as this machine's clock sees it: a micro-guest's factory of
/// backends is told nothing. A thousandth off is of no matter here.
fn tsc_khz() -> u32 {
    const WINDOW: Duration = Duration::from_millis(20);
    let (begin, ticks) = (Instant::now(), rdtsc());
    std::thread::sleep(WINDOW);
    let ticks = u128::from(rdtsc() - ticks);
    let micros = begin.elapsed().as_micros().max(1);
    u32::try_from(ticks * 1000 / micros).unwrap_or(u32::MAX)
}

/// A `perf` backend without hardware events of the guest's vendor.
fn backend() -> Box<dyn CounterBackend> {
    let env = BackendEnv {
        tsc_khz: tsc_khz(),
        host_vendor: None,
        host_events: None,
        overflow_signal: kick_signal(),
        steps_cpl3: true,
    };
    let perf = PerfBackend::new(&env).expect("the suite skips what perf refuses");
    match probe().hardware {
        Ok(()) => Box::new(perf),
        Err(_) => Box::new(Timed {
            perf,
            khz: env.tsc_khz.into(),
        }),
    }
}

/// Counts the kernel's task-clock where a guest wants cycles. No guest can ask for an
/// event of the kernel's software, and no other one signals without a PMU.
#[derive(Debug)]
struct Timed {
    perf: PerfBackend,
    khz: u64,
}

const NS_PER_MS: u64 = 1_000_000;

/// The task-clock in the place of cycles.
fn timed(request: &CountRequest) -> CountRequest {
    let cycles = [KnownEvent::CoreCycles, KnownEvent::RefCycles];
    let mut timed = *request;
    if request
        .event
        .known()
        .is_some_and(|event| cycles.contains(&event))
    {
        timed.event = EventCode::Software(SoftwareEvent::TaskClock);
    }
    timed
}

impl CounterBackend for Timed {
    fn name(&self) -> &'static str {
        self.perf.name()
    }

    fn capacity(&self) -> usize {
        self.perf.capacity()
    }

    fn plan(&self, request: &CountRequest) -> Result<CountPlan, Unavailable> {
        self.perf.plan(&timed(request))
    }

    fn program(
        &mut self,
        slot: SlotIndex,
        request: &CountRequest,
    ) -> Result<Provenance, Unavailable> {
        self.perf.program(slot, &timed(request))
    }

    fn release(&mut self, slot: SlotIndex) {
        self.perf.release(slot);
    }

    fn start(&mut self, slot: SlotIndex) {
        self.perf.start(slot);
    }

    fn stop(&mut self, slot: SlotIndex) {
        self.perf.stop(slot);
    }

    fn attach(&mut self, owner: OwnerId) {
        self.perf.attach(owner);
    }

    fn read(&self, slot: SlotIndex) -> Reading {
        match self.perf.read(slot) {
            Reading::Counted { value, provenance } => Reading::Counted {
                value: value * self.khz / NS_PER_MS,
                provenance,
            },
            no => no,
        }
    }

    /// Rounded up, so that no overflow is told before the count is there.
    fn arm(&mut self, slot: SlotIndex, after: Option<NonZeroU64>) {
        let time = |after: NonZeroU64| {
            let ns = (u128::from(after.get()) * u128::from(NS_PER_MS)).div_ceil(self.khz.into());
            NonZeroU64::new(u64::try_from(ns).unwrap_or(u64::MAX))
        };
        let after = after.and_then(time);
        self.perf.arm(slot, after);
    }

    fn observe(&mut self, progress: &Progress) {
        self.perf.observe(progress);
    }

    fn take_overflows(&mut self) -> SlotSet {
        self.perf.take_overflows()
    }

    fn deadline(&self) -> Option<Tsc> {
        self.perf.deadline()
    }
}

fn setup(model: &str) -> Setup {
    Setup {
        backend,
        ..Setup::clock(model)
    }
}

/// Stops every counter of `intel-v2`.
fn stop_all(a: &mut CodeAssembler) -> Written {
    a.mov(ecx, 0x38f)?;
    a.xor(eax, eax)?;
    a.xor(edx, edx)?;
    a.wrmsr()
}

/// A program that runs `ticks` at CPL 3 with two counters of cycles, and logs
/// the time before and after as well.
fn at_cpl_3(program: Program, select: u64, after: u64, ticks: u32) -> Result<Program> {
    let program = program.handler(6, |a| {
        stop_all(a)?;
        a.rdtsc()?;
        log_value(a)?;
        for msr in [0xc1u32, 0xc2] {
            a.mov(ecx, msr)?;
            a.rdmsr()?;
            log_value(a)?;
        }
        exit(a)
    })?;
    let program = program.kernel(|a| {
        Apic::X2.enable(a)?;
        Apic::X2.route(a, 0x400)?;
        wrmsr(a, 0x38f, 0)?;
        wrmsr(a, 0x4c1, (1 << 48) - after)?;
        wrmsr(a, 0x186, select)?;
        wrmsr(a, 0x187, 0x43_003c)?;
        a.rdtsc()?;
        log_value(a)?;
        wrmsr(a, 0x38f, 0b11)?;
        enter_user(a, 0)
    })?;
    program.user(|a| {
        busy(a, ticks)?;
        a.ud2()
    })
}

/// Time passed, and the two counts.
fn logged(ran: &LabRun) -> Result<(u64, u64, u64)> {
    let values: Vec<u64> = ran
        .log
        .iter()
        .map(|entry| entry.b << 32 | entry.a)
        .collect();
    let [begin, end, first, second] = values[..] else {
        anyhow::bail!("the guest logged {:x?}", ran.log);
    };
    Ok((end - begin, first, second))
}

fn counts_grow(lab: &Lab) -> Result<()> {
    const TICKS: u32 = 40_000_000;
    let program = at_cpl_3(Program::new()?, 0x43_013c, 1 << 48, TICKS)?;
    let ran = lab.run(&setup("intel-v2"), &program.start(0))?;
    let (passed, reference, core) = logged(&ran)?;
    for (counter, count) in [(0, reference), (1, core)] {
        // The host may take the CPU away, which is no time of the guest's; and
        // the clock is known to a thousandth.
        let most = passed + passed / 100;
        ensure!(
            (passed / 10..=most).contains(&count),
            "counter {counter}: {count} cycles in {passed} ticks"
        );
        let report = ran.report(0, CounterId::Programmable(counter))?;
        let label = matches!(
            report.reading,
            Reading::Counted {
                provenance: Provenance::Exact | Provenance::Hardware,
                ..
            }
        );
        ensure!(label, "counter {counter}: {:?}", report.reading);
    }
    Ok(())
}

fn nmis(ran: &LabRun) -> usize {
    ran.events(
        |event| matches!(event, TrapEvent::Pmi { delivery, .. } if delivery.route == PmiRoute::Nmi),
    )
    .len()
}

/// Each PMI's handler asks for the next one, far enough off for a signal.
fn overflows(lab: &Lab) -> Result<()> {
    const PMIS: i32 = 5;
    const AFTER: u64 = 2_000_000;
    let (lvtpc, vector) = lvtpc_of(PmiRoute::Nmi);
    let program = Program::new()?
        .handler(vector, |a| handler(a, None, |a| AMD.reload(a, AFTER)))?
        .kernel(|a| {
            Apic::X.enable(a)?;
            Apic::X.route(a, lvtpc)?;
            AMD.start(a, AFTER)?;
            await_value(a, TAKEN, PMIS)?;
            wrmsr(a, 0xc001_0200, 0)?;
            exit(a)
        })?;
    let ran = lab.run(&setup(AMD.model), &program.start(0))?;
    let (taken, sent) = (ran.word(TAKEN)?, nmis(&ran) as u64);
    // The last one may not have reached the handler.
    ensure!(
        taken >= 5 && (taken..=taken + 1).contains(&sent),
        "{taken} PMIs taken, {sent} sent"
    );
    Ok(())
}

/// Nothing but the signal takes this guest out of its loop.
fn interrupts_user(lab: &Lab) -> Result<()> {
    const TICKS: u32 = 60_000_000;
    const AFTER: u64 = 3_000_000;
    let program = Program::new()?.handler(2, |a| {
        handler(a, None, |a| {
            a.rdtsc()?;
            a.mov(dword_ptr(INTERRUPTED), eax)?;
            a.mov(dword_ptr(INTERRUPTED + 4), edx)
        })
    })?;
    let program = at_cpl_3(program, 0x53_013c, AFTER, TICKS)?;
    let ran = lab.run(&setup("intel-v2"), &program.start(0))?;
    let (passed, after_overflow, core) = logged(&ran)?;
    let begin = ran.log[0].b << 32 | ran.log[0].a;
    let interrupted = ran.word(INTERRUPTED)?.saturating_sub(begin);
    // The loop is the end of the time, behind what opening a perf event takes.
    let early = passed.saturating_sub(u64::from(TICKS) / 2);
    ensure!(
        (AFTER..early).contains(&interrupted),
        "due after {AFTER} of {passed} ticks, it came after {interrupted}"
    );
    ensure!(
        ran.word(TAKEN)? == 1,
        "{} PMIs in one overflow",
        ran.word(TAKEN)?
    );
    // Both started together: the wrapped one lacks what led to the overflow.
    let apart = core.saturating_sub(after_overflow);
    ensure!(
        (AFTER - AFTER / 100..=AFTER + AFTER / 100).contains(&apart),
        "the counts are {after_overflow} and {core}, not {AFTER} apart, in {passed} ticks"
    );
    Ok(())
}
