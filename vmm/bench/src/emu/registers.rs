//! What an access to a counter costs on the processor in software: a loop with it against the
//! same loop without.

use std::time::Duration;

use iced_x86::IcedError;
use iced_x86::code_asm::{CodeAssembler, dx, eax, ebx, ecx, edx, esi};
use pmu_virt::{CounterBackend, EmuBackend, EmuCycles, PmuModel, Vendor};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use vmm::micro::{KERNEL_CODE, MicroEngine, MicroGuest, MicroRun, Start, assemble};
use vmm::vcpu::{DebugQuirks, StepSupport, TrapMode, TrapPlan};

use crate::error::BenchError;

type Written = Result<(), IcedError>;

/// Accesses of a loop.
const ROUNDS: u32 = 200_000;
/// The fastest of so many loops counts.
const TURNS: u32 = 3;
/// Where the guest says how many ticks its loop took.
const TICKS: u16 = 0xe1;
const TEST_EXIT: u32 = 0xf4;
/// Instructions retired, both rings, on.
const SELECT: u32 = 0x186;
const INSTRUCTIONS: u32 = 0x43_00c0;
const GLOBAL_CONTROL: u32 = 0x38f;
const COUNTER: u32 = 0xc1;

/// What one access costs, beside the loop around it.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RegisterRow {
    /// RDPMC or RDMSR of a counter that counts instructions.
    pub access: &'static str,
    /// Ticks of the guest's TSC, which are virtual nanoseconds.
    pub guest_ticks: u64,
    /// Nanoseconds of the host's CPU time.
    pub host_ns: u64,
}

/// Both accesses, at CPL 0.
///
/// # Errors
/// The guest did not run.
pub(super) fn measure() -> Result<Vec<RegisterRow>, BenchError> {
    let (ticks, time) = fastest((0, |_| Ok(())))?;
    let row = |access, loop_of: LoopOf| -> Result<_, BenchError> {
        let (with_ticks, with_time) = fastest(loop_of)?;
        let nanos = with_time.saturating_sub(time).as_nanos();
        Ok(RegisterRow {
            access,
            guest_ticks: u64::from(with_ticks.saturating_sub(ticks) / ROUNDS),
            host_ns: u64::try_from(nanos).unwrap_or(u64::MAX) / u64::from(ROUNDS),
        })
    };
    Ok(vec![
        row("RDPMC", (0, |a| a.rdpmc()))?,
        row("RDMSR", (COUNTER, |a| a.rdmsr()))?,
    ])
}

/// ECX, and what a round does; it leaves ECX and EBX alone.
type LoopOf = (u32, fn(&mut CodeAssembler) -> Written);

/// Ticks of such a loop, and the process's CPU time for the guest around it.
fn fastest(loop_of: LoopOf) -> Result<(u32, Duration), BenchError> {
    let mut best = run(loop_of)?;
    for _ in 1..TURNS {
        best.1 = best.1.min(run(loop_of)?.1);
    }
    Ok(best)
}

fn run(loop_of: LoopOf) -> Result<(u32, Duration), BenchError> {
    let code = assemble(KERNEL_CODE, |a| guest(a, loop_of));
    let code = code.map_err(|error| BenchError::Guest(error.to_string()))?;
    let guest = MicroGuest::new()
        .code(KERNEL_CODE, code)
        .start(Start::at(KERNEL_CODE, 0));
    let model = PmuModel::default_for(Vendor::Intel);
    let run = MicroRun {
        model: Some(model.counted(|event| backend().plan(event).is_ok())),
        backend,
        quirks: DebugQuirks::default(),
        step: StepSupport::FULL,
        trap: TrapPlan {
            mode: TrapMode::None,
            obstacle: None,
        },
        pmi_floor_us: 0,
        timeout: Duration::from_secs(60),
        record: false,
        cores: None,
        pcr: None,
    };
    let before = cpu_time();
    let outcome = run.run(MicroEngine::Emu, &guest)?;
    let took = cpu_time().saturating_sub(before);
    match outcome.written_to(TICKS)[..] {
        [ticks] if !outcome.timed_out => Ok((ticks, took)),
        _ => {
            let ends = outcome.vcpus.iter().map(|vcpu| vcpu.end.to_string());
            Err(BenchError::Guest(ends.collect::<Vec<_>>().join("; ")))
        }
    }
}

fn backend() -> Box<dyn CounterBackend> {
    Box::new(EmuBackend::new(EmuCycles::Unavailable))
}

fn guest(a: &mut CodeAssembler, (index, body): LoopOf) -> Written {
    for (register, value) in [(SELECT, INSTRUCTIONS), (GLOBAL_CONTROL, 1)] {
        a.mov(ecx, register)?;
        a.mov(eax, value)?;
        a.xor(edx, edx)?;
        a.wrmsr()?;
    }
    a.rdtsc()?;
    a.mov(esi, eax)?;
    a.mov(ebx, ROUNDS)?;
    a.mov(ecx, index)?;
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    body(a)?;
    a.dec(ebx)?;
    a.jne(again)?;
    a.rdtsc()?;
    a.sub(eax, esi)?;
    a.mov(edx, u32::from(TICKS))?;
    a.out(dx, eax)?;
    a.xor(eax, eax)?;
    a.mov(edx, TEST_EXIT)?;
    a.out(dx, eax)?;
    a.hlt()
}

/// Of all threads: a guest has one of its own.
fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}
