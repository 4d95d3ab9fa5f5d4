//! Time in which a vCPU does not run between entry and exit.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use guest_tests::micro::{
    DATA, Lab, Program, Setup, Test, Written, enter_user, exit, one_of_three, wrmsr,
};
use iced_x86::code_asm::{CodeAssembler, dx, eax, ecx, edx, qword_ptr, r8, r9, rax, rdx};
use pmu_virt::PmuModel;
use vm_memory::{Bytes, GuestAddress};
use vmm::devices::DeviceOutcome;
use vmm::devices::Platform;
use vmm::micro::{MicroGuest, MicroRun, RecordingPlatform};
use vmm::sys::{allowed_cpus, pin_this_thread, rdtsc, thread_cpu_time};

use crate::overflow::Apic;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "time::clock_does_not_count_what_the_host_ran_instead",
        run: |lab| one_of_three(lab, preempted),
    },
    Test {
        name: "time::clock_does_not_count_a_halt",
        run: |lab| one_of_three(lab, halted),
    },
];

/// The guest's own stopwatch: its thread's CPU time is noted at each write.
const STOPWATCH: u32 = 0xe7;
/// Where the guest leaves its count.
const COUNT: u64 = DATA;
/// Set by the timer's handler.
const WOKEN: u64 = DATA + 8;
const SELECT: u32 = 0x186;
const COUNTER: u32 = 0xc1;
/// Reference cycles at both rings.
const REF_CYCLES: u64 = 0x43_013c;

/// What the stopwatch noted: the time, and the CPU time of the vCPU's thread.
#[derive(Debug, Clone, Copy)]
struct Note {
    tsc: u64,
    at: Instant,
    cpu: Duration,
}

#[derive(Debug, Default)]
struct Stopwatch {
    notes: Mutex<Vec<Note>>,
    rest: RecordingPlatform,
}

impl Platform for Stopwatch {
    fn port_read(&self, port: u16, width: u8, data: &mut [u8]) {
        self.rest.port_read(port, width, data);
    }

    fn port_write(&self, port: u16, width: u8, data: &[u8]) -> DeviceOutcome {
        if u32::from(port) == STOPWATCH {
            let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
            notes.push(Note {
                tsc: rdtsc(),
                at: Instant::now(),
                cpu: thread_cpu_time(),
            });
        }
        self.rest.port_write(port, width, data)
    }

    fn mmio_read(&self, address: u64, data: &mut [u8]) {
        self.rest.mmio_read(address, data);
    }

    fn mmio_write(&self, address: u64, data: &[u8]) {
        self.rest.mmio_write(address, data);
    }
}

/// Nanoseconds that passed, that the thread was on a CPU, and that the guest
/// counted.
#[derive(Debug)]
struct Times {
    wall: u64,
    on_cpu: u64,
    counted: u64,
}

/// Runs `guest`, whose stopwatch is written to twice.
fn run(lab: &Lab, guest: &MicroGuest) -> Result<Times> {
    let setup = Setup::clock("intel-v2");
    let run = MicroRun {
        model: Some(PmuModel::parse(&setup.model)?),
        backend: setup.backend,
        quirks: lab.probe.quirks(),
        step: lab.probe.step_support(),
        trap: lab.probe.trap_plan(vmm::vcpu::TrapMode::Auto),
        pmi_floor_us: setup.pmi_floor_us,
        cores: None,
        pcr: None,
        timeout: Duration::from_secs(20),
        record: false,
    };
    let stopwatch = Arc::new(Stopwatch::default());
    let outcome = run.run_on(lab.host()?, guest, |_| Ok(stopwatch.clone()))?;
    let notes = stopwatch.notes.lock();
    let notes = notes.unwrap_or_else(PoisonError::into_inner).clone();
    let [begin, end] = notes[..] else {
        anyhow::bail!("{notes:?} of a guest that ended: {}", outcome.vcpus[0].end);
    };
    let wall = u64::try_from((end.at - begin.at).as_nanos())?;
    let counted: u64 = outcome.memory.read_obj(GuestAddress(COUNT))?;
    let counted = u128::from(counted) * u128::from(wall) / u128::from(end.tsc - begin.tsc);
    Ok(Times {
        wall,
        on_cpu: u64::try_from((end.cpu - begin.cpu).as_nanos())?,
        counted: u64::try_from(counted)?,
    })
}

fn stopwatch(a: &mut CodeAssembler) -> Written {
    a.mov(dx, STOPWATCH)?;
    a.out(dx, eax)
}

fn begin(a: &mut CodeAssembler) -> Written {
    stopwatch(a)?;
    wrmsr(a, SELECT, REF_CYCLES)
}

/// Leaves the count and ends the guest.
fn end(a: &mut CodeAssembler) -> Written {
    wrmsr(a, SELECT, 0)?;
    stopwatch(a)?;
    a.mov(ecx, COUNTER)?;
    a.rdmsr()?;
    a.shl(rdx, 32)?;
    a.or(rax, rdx)?;
    a.mov(qword_ptr(COUNT), rax)?;
    exit(a)
}

/// A program computes while another thread has its host CPU every other time
/// slice: its count is what its thread had of the CPU.
fn preempted(lab: &Lab) -> Result<()> {
    const TICKS: i64 = 700_000_000;
    let program = Program::new()?.handler(6, end)?;
    let program = program.kernel(|a| {
        begin(a)?;
        enter_user(a, 0)
    })?;
    let program = program.user(|a| {
        let mut again = a.create_label();
        a.rdtsc()?;
        a.shl(rdx, 32)?;
        a.lea(r8, qword_ptr(rax + rdx))?;
        a.mov(r9, TICKS)?;
        a.add(r8, r9)?;
        a.set_label(&mut again)?;
        a.rdtsc()?;
        a.shl(rdx, 32)?;
        a.or(rax, rdx)?;
        a.cmp(rax, r8)?;
        a.jb(again)?;
        a.ud2()
    })?;
    let guest = program.start(0);
    let cpu = *allowed_cpus()?.last().context("a thread has a host CPU")?;
    let over = AtomicBool::new(false);
    let times = std::thread::scope(|scope| {
        scope.spawn(|| {
            pin_this_thread(cpu).map(|()| {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
        });
        let guest = scope.spawn(|| {
            // The vCPU's thread inherits it.
            pin_this_thread(cpu)?;
            run(lab, &guest)
        });
        let times = guest.join();
        over.store(true, Ordering::Relaxed);
        times
    });
    let times = times.map_err(|_| anyhow::anyhow!("the guest's thread panicked"))??;
    let percent = |one: u64, other: u64| one * 100 / other.max(1);
    let share = percent(times.on_cpu, times.wall);
    ensure!(share <= 75, "nothing else ran on CPU {cpu}: {times:?}");
    // Exits and the VMM's part of them are on the CPU and not counted. One is a look at the vCPU,
    // each millisecond.
    let counted = percent(times.counted, times.on_cpu);
    let least = 85_u64.saturating_sub(lab.lost());
    ensure!(
        (least..=103).contains(&counted),
        "{counted} % of the CPU time were counted: {times:?}"
    );
    Ok(())
}

/// The counter stands still in a HLT of 50 ms.
fn halted(lab: &Lab) -> Result<()> {
    const VECTOR: u32 = 0x40;
    /// KVM's local APIC has a timer of 1 GHz.
    const NS: u32 = 50_000_000;
    const DIVIDE_BY_1: u32 = 0xb;
    let program = Program::new()?.handler(0x40, |a| {
        a.mov(qword_ptr(WOKEN), 1)?;
        Apic::X.end_of_interrupt(a)?;
        a.iretq()
    })?;
    let program = program.kernel(|a| {
        Apic::X.enable(a)?;
        Apic::X.write(a, 0x320, VECTOR)?;
        Apic::X.write(a, 0x3e0, DIVIDE_BY_1)?;
        begin(a)?;
        Apic::X.write(a, 0x380, NS)?;
        a.xor(edx, edx)?;
        a.sti()?;
        a.hlt()?;
        a.cli()?;
        end(a)
    })?;
    let times = run(lab, &program.start(0))?;
    ensure!(
        times.wall >= 45_000_000,
        "the guest did not halt: {times:?}"
    );
    // A halted vCPU is looked at each millisecond, too.
    let looks = 50 * u64::try_from(lab.exit_time().as_nanos())?;
    ensure!(
        times.counted < (15_000_000 + looks).min(40_000_000),
        "the halt was counted: {times:?}"
    );
    Ok(())
}
