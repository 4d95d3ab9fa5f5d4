//! Looking at a machine changes nothing: budgets, decoded code that is dropped, tools, the log.

mod clocks;
mod looking;
mod saving;

use std::sync::Arc;

use arbiter::Grant;
use emu::Cpuid;
use iced_x86::IcedError;
use iced_x86::code_asm::{
    CodeAssembler, dword_ptr, dx, eax, ebx, ecx, edx, qword_ptr, rax, rbx, rcx, rdx,
};
use pmu_virt::{CorePmu, EmuBackend, EmuCycles, OwnerId, PmuModel, Reading, VcpuPmu};
use vm_memory::{Bytes, GuestAddress};

use super::{EmuVcpu, EmuVcpuParts, Lines, Nobody, Outside, Room, RoomParts, VirtualClock, Waited};
use crate::devices::GuestEnd;
use crate::micro::{KERNEL_CODE, LAPIC, MicroGuest, RecordingPlatform, SCRATCH, Start, assemble};
use crate::vcpu::{PmuLog, Silent, VcpuControl, VcpuEnd};

/// The PMU of each vCPU.
const MODEL: &str = "intel-v2";
const TIMER: u8 = 0x40;
const IPI: u8 = 0x41;
/// Where handlers lie.
const TIMER_HANDLER: u64 = KERNEL_CODE + 0x2000;
const IPI_HANDLER: u64 = KERNEL_CODE + 0x3000;
/// Where the second vCPU starts.
const SECOND: u64 = KERNEL_CODE + 0x4000;
/// Times that the timer expired, IPIs that came, and what the second vCPU has counted.
const EXPIRED: u64 = SCRATCH;
const CAME: u64 = SCRATCH + 8;
const COUNTED: u64 = SCRATCH + 16;
/// The last TSC that any vCPU has seen, and how often one saw an earlier one.
const LAST_TSC: u64 = SCRATCH + 24;
const WENT_BACK: u64 = SCRATCH + 32;
/// PMIs that came, each after so many instructions.
const PMIS: u64 = SCRATCH + 40;
const PERIOD: u64 = 41;
const PMI_HANDLER: u64 = KERNEL_CODE + 0x5000;
/// Code that the first vCPU rewrites, and both execute.
const REWRITTEN: u64 = SCRATCH + 0x4000;

/// How often the timer expires before the guest ends.
const ROUNDS: u32 = 20;

/// Enables the local APIC, with the timer in TSC deadline mode.
fn begin(a: &mut CodeAssembler) -> Result<(), IcedError> {
    const DEADLINE_MODE: u32 = 2 << 17;
    for (register, value) in [(0xf0, 0x1ff), (0x320, DEADLINE_MODE | u32::from(TIMER))] {
        a.mov(rax, LAPIC + register)?;
        a.mov(dword_ptr(rax), value)?;
    }
    Ok(())
}

/// The timer expires in `ticks`.
fn arm(a: &mut CodeAssembler, ticks: i32) -> Result<(), IcedError> {
    a.rdtsc()?;
    a.add(eax, ticks)?;
    a.adc(edx, 0)?;
    a.mov(ecx, 0x6e0)?;
    a.wrmsr()
}

fn end_of_interrupt(a: &mut CodeAssembler, counter: u64) -> Result<(), IcedError> {
    a.push(rax)?;
    a.mov(rax, counter)?;
    a.add(qword_ptr(rax), 1)?;
    a.mov(rax, LAPIC + 0xb0)?;
    a.mov(dword_ptr(rax), 0)?;
    a.pop(rax)?;
    a.iretq()
}

/// Looks whether time has gone back.
fn look_at_time(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut later = a.create_label();
    a.rdtsc()?;
    a.shl(rdx, 32)?;
    a.or(rax, rdx)?;
    a.mov(rbx, LAST_TSC)?;
    a.cmp(rax, qword_ptr(rbx))?;
    a.mov(qword_ptr(rbx), rax)?;
    a.jae(later)?;
    a.mov(rbx, WENT_BACK)?;
    a.add(qword_ptr(rbx), 1)?;
    a.set_label(&mut later)?;
    a.nop()
}

/// Counts its instructions, with a PMI every so often.
fn count_instructions(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(rax, LAPIC + 0x340)?;
    a.mov(dword_ptr(rax), 0x400)?;
    set_msr(a, 0x186, 0x53_00c0)?;
    set_msr(a, 0xc1, PERIOD.wrapping_neg())?;
    set_msr(a, 0x38f, 1)
}

/// As a driver does: clears the overflow, counts anew, and unmasks LVTPC.
fn handle_pmi(a: &mut CodeAssembler) -> Result<(), IcedError> {
    for register in [rax, rcx, rdx] {
        a.push(register)?;
    }
    a.mov(rax, PMIS)?;
    a.add(qword_ptr(rax), 1)?;
    set_msr(a, 0x390, 1)?;
    set_msr(a, 0xc1, PERIOD.wrapping_neg())?;
    a.mov(rax, LAPIC + 0x340)?;
    a.mov(dword_ptr(rax), 0x400)?;
    for register in [rdx, rcx, rax] {
        a.pop(register)?;
    }
    a.iretq()
}

/// Waits for its timer by HLT, sends the other an IPI, and rewrites code that it executes.
fn first(a: &mut CodeAssembler) -> Result<(), IcedError> {
    begin(a)?;
    count_instructions(a)?;
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    arm(a, 3_000)?;
    a.sti()?;
    a.hlt()?;
    a.cli()?;
    look_at_time(a)?;
    // A fixed IPI to APIC ID 1.
    a.mov(rax, LAPIC + 0x310)?;
    a.mov(dword_ptr(rax), 1 << 24)?;
    a.mov(rax, LAPIC + 0x300)?;
    a.mov(dword_ptr(rax), u32::from(IPI) | 1 << 14)?;
    // Another number in MOV EAX,n; RET.
    a.mov(rbx, EXPIRED)?;
    a.mov(eax, dword_ptr(rbx))?;
    a.mov(rbx, REWRITTEN + 1)?;
    a.mov(dword_ptr(rbx), eax)?;
    a.mov(rax, REWRITTEN)?;
    a.call(rax)?;
    a.cmp(eax, ROUNDS.cast_signed())?;
    a.jb(again)?;
    a.xor(eax, eax)?;
    a.mov(edx, 0xf4)?;
    a.out(dx, eax)?;
    a.hlt()
}

/// Works, spins by PAUSE, and adds up what the rewritten code gives.
fn second(a: &mut CodeAssembler) -> Result<(), IcedError> {
    begin(a)?;
    a.sti()?;
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    a.mov(rax, REWRITTEN)?;
    a.call(rax)?;
    a.mov(rbx, COUNTED)?;
    a.add(qword_ptr(rbx), rax)?;
    a.mov(ebx, 50)?;
    let mut work = a.create_label();
    a.set_label(&mut work)?;
    a.dec(ebx)?;
    a.jne(work)?;
    a.cli()?;
    look_at_time(a)?;
    a.sti()?;
    a.pause()?;
    a.jmp(again)
}

fn guest() -> MicroGuest {
    let code = |at, write: fn(&mut CodeAssembler) -> Result<(), IcedError>| {
        assemble(at, write).expect("code")
    };
    MicroGuest::new()
        .code(KERNEL_CODE, code(KERNEL_CODE, first))
        .code(SECOND, code(SECOND, second))
        .code(
            TIMER_HANDLER,
            code(TIMER_HANDLER, |a| end_of_interrupt(a, EXPIRED)),
        )
        .code(
            IPI_HANDLER,
            code(IPI_HANDLER, |a| end_of_interrupt(a, CAME)),
        )
        // MOV EAX,0; RET.
        .code(REWRITTEN, vec![0xb8, 0, 0, 0, 0, 0xc3])
        .code(PMI_HANDLER, code(PMI_HANDLER, handle_pmi))
        .handler(TIMER, TIMER_HANDLER)
        .handler(IPI, IPI_HANDLER)
        .handler(2, PMI_HANDLER)
        .start(Start::at(KERNEL_CODE, 0))
        .start(Start::at(SECOND, 0))
}

/// A machine with what is outside of it, and who stops it.
fn room(
    guest: &MicroGuest,
    outside: impl FnOnce(&Arc<VcpuControl>) -> Box<dyn Outside>,
) -> (Room, Arc<VcpuControl>) {
    room_with(guest, outside, |_, _| {})
}

/// The same, of vCPUs whose PMUs and counters were prepared.
fn room_with(
    guest: &MicroGuest,
    outside: impl FnOnce(&Arc<VcpuControl>) -> Box<dyn Outside>,
    prepare: impl Fn(&mut VcpuPmu, &mut CorePmu),
) -> (Room, Arc<VcpuControl>) {
    let control = Arc::new(VcpuControl::default());
    let (memory, states) = guest.emulated().expect("memory");
    let vcpus = (0..).zip(states).map(|(id, state)| {
        let backend = EmuBackend::new(EmuCycles::Simulated);
        let mut core = Box::new(CorePmu::new(Box::new(backend)));
        let model = PmuModel::parse(MODEL).expect("a model");
        let mut pmu = VcpuPmu::detached(OwnerId(id), model, Grant::everything());
        pmu.attach(&mut core);
        prepare(&mut pmu, &mut core);
        EmuVcpuParts {
            cpuid: Cpuid::implemented(),
            state: Some(state),
            pmu: Some(pmu),
            core: Some(core),
            observer: if id == 0 {
                Box::new(PmuLog)
            } else {
                Box::new(Silent)
            },
            host: None,
            guest: None,
        }
    });
    let room = Room::new(RoomParts {
        memory,
        vcpus: vcpus.collect(),
        platform: Arc::new(RecordingPlatform::default()),
        lines: Arc::new(Lines::default()),
        outside: outside(&control),
        control: control.clone(),
        clock: VirtualClock::beginning_at(0),
    });
    (room.expect("a machine"), control)
}

fn nobody(_: &Arc<VcpuControl>) -> Box<dyn Outside> {
    Box::new(Nobody)
}

fn word(room: &Room, at: u64) -> u64 {
    room.memory().read_obj(GuestAddress(at)).expect("inside")
}

/// Stops a machine at each turn.
#[derive(Debug)]
struct Stops(Arc<VcpuControl>);

impl Outside for Stops {
    fn turn_over(&mut self, now: u64) -> u64 {
        self.0.stop();
        now
    }

    fn idle(&mut self, now: u64, until: Option<u64>, held: bool) -> Waited {
        Nobody.idle(now, until, held)
    }
}

/// What [`guest`] has come to.
#[derive(Debug, PartialEq)]
struct Ended {
    /// Of its state.
    hash: u64,
    time: u64,
    /// Its own counts.
    counts: Vec<Reading>,
    /// Of each vCPU.
    exits: Vec<Option<u64>>,
}

/// The end of a run in pieces of `most` ticks; with `forgets` code is dropped at every so
/// many-th turn.
fn end(most: u64, forgets: Option<u64>) -> Ended {
    let guest = guest();
    let (mut room, control) = room(&guest, |control| match forgets {
        Some(_) => Box::new(Stops(control.clone())),
        None => Box::new(Nobody),
    });
    room.run_in_pieces(most);
    run_to_its_end(&mut room, &control, forgets)
}

/// Runs [`guest`], whatever stops it in between.
fn run_to_its_end(room: &mut Room, control: &VcpuControl, forgets: Option<u64>) -> Ended {
    let mut turns = 0;
    loop {
        match room.run().end {
            VcpuEnd::Stopped => control.resume(),
            other => {
                assert_eq!(other, VcpuEnd::Guest(GuestEnd::TestExit(0)));
                break;
            }
        }
        turns += 1;
        if forgets.is_some_and(|every| turns % every == 0) {
            room.forget_code();
        }
    }
    assert_eq!(word(room, EXPIRED), u64::from(ROUNDS));
    // The last one may not have come.
    assert!(
        word(room, CAME) >= u64::from(ROUNDS) - 1,
        "{}",
        word(room, CAME)
    );
    assert_eq!(word(room, WENT_BACK), 0);
    assert!(word(room, COUNTED) > 0);
    assert!(word(room, PMIS) > 5, "{} PMIs", word(room, PMIS));
    let vcpus = room.vcpus().iter();
    let reports = vcpus.filter_map(|vcpu| Some(vcpu.pmu()?.report(vcpu.core())));
    let counts = reports.flatten().map(|report| report.reading).collect();
    Ended {
        hash: room.state_hash(),
        time: room.now(),
        counts,
        exits: room.vcpus().iter().map(EmuVcpu::exits).collect(),
    }
}

#[test]
fn looking_changes_nothing() {
    let unbounded = end(u64::MAX, None);
    for most in [1, 7, 100] {
        assert_eq!(end(most, None), unbounded, "pieces of {most}");
    }
    for every in [1, 3] {
        assert_eq!(
            end(u64::MAX, Some(every)),
            unbounded,
            "code dropped at turn {every}"
        );
    }
    assert_eq!(end(7, Some(2)), unbounded);
}

#[test]
fn a_guest_that_nobody_wakes_sleeps_for_ever() {
    let code = assemble(KERNEL_CODE, CodeAssembler::hlt).expect("code");
    let guest = MicroGuest::new()
        .code(KERNEL_CODE, code)
        .start(Start::at(KERNEL_CODE, 0));
    let (mut room, _) = room(&guest, nobody);
    let end = room.run().end;
    assert_eq!(end, VcpuEnd::Asleep);
    assert!(end.to_string().contains("sleeps for ever"), "{end}");
}

#[test]
fn a_triple_fault_ends_the_machine() {
    // LIDT of nothing; UD2.
    let code = assemble(KERNEL_CODE, |a| {
        a.mov(rax, SCRATCH)?;
        a.lidt(qword_ptr(rax))?;
        a.ud2()
    })
    .expect("code");
    let guest = MicroGuest::new()
        .code(KERNEL_CODE, code)
        .start(Start::at(KERNEL_CODE, 0));
    let (mut room, _) = room(&guest, nobody);
    assert!(matches!(
        room.run().end,
        VcpuEnd::TripleFault { rip: Some(_) }
    ));
}

#[test]
fn a_machine_is_stopped_and_goes_on() {
    let guest = guest();
    let (mut room, control) = room(&guest, nobody);
    control.stop();
    assert_eq!(room.run().end, VcpuEnd::Stopped);
    assert_eq!(room.now(), 0);
    control.resume();
    assert_eq!(room.run().end, VcpuEnd::Guest(GuestEnd::TestExit(0)));
}

/// How a guest ends that executes this with its local APIC on.
fn end_of(write: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> (VcpuEnd, Room) {
    let code = assemble(KERNEL_CODE, |a| {
        begin(a)?;
        write(a)
    });
    let code_of = |at, counter| assemble(at, |a| end_of_interrupt(a, counter)).expect("code");
    let guest = MicroGuest::new()
        .code(KERNEL_CODE, code.expect("code"))
        .code(TIMER_HANDLER, code_of(TIMER_HANDLER, EXPIRED))
        .handler(TIMER, TIMER_HANDLER)
        .start(Start::at(KERNEL_CODE, 0));
    let (mut room, _) = room(&guest, nobody);
    (room.run().end, room)
}

fn set_msr(a: &mut CodeAssembler, msr: u32, value: u64) -> Result<(), IcedError> {
    let [low, high] =
        [value, value >> 32].map(|half| u32::try_from(half & 0xffff_ffff).unwrap_or(0));
    a.mov(ecx, msr)?;
    a.mov(eax, low)?;
    a.mov(edx, high)?;
    a.wrmsr()
}

#[test]
fn a_wrmsr_whose_fault_has_no_handler_is_a_triple_fault() {
    let (end, _) = end_of(|a| {
        a.mov(rax, SCRATCH + 0x100)?;
        a.lidt(qword_ptr(rax))?;
        set_msr(a, 0xdead, 1)
    });
    assert!(
        matches!(end, VcpuEnd::TripleFault { rip: Some(_) }),
        "{end}"
    );
}

#[test]
fn a_deadline_that_time_never_comes_to_is_none() {
    for deadline in [u64::MAX, u64::MAX - 20_000, 1 << 63] {
        let (end, room) = end_of(|a| {
            set_msr(a, 0x6e0, deadline)?;
            a.sti()?;
            a.hlt()
        });
        assert_eq!(end, VcpuEnd::Asleep, "{deadline:#x}");
        assert!(room.now() < 1_000_000, "{}", room.now());
    }
}

#[test]
fn a_deadline_goes_by_the_tsc_that_the_guest_has_set() {
    // TSC, deadline, TSC once more, and how much time may pass until the timer expires.
    let cases = [
        (1 << 40, 5, None, 0..2_000),
        (0, 50_000, None, 40_000..60_000),
        (1 << 40, (1 << 40) + 50_000, None, 40_000..60_000),
        // Set while the timer runs, the deadline stays where it is in the TSC.
        (0, 1 << 30, Some((1 << 30) - 50_000), 40_000..60_000),
    ];
    for (tsc, deadline, then, passes) in cases {
        let (end, room) = end_of(|a| {
            set_msr(a, 0x10, tsc)?;
            set_msr(a, 0x6e0, deadline)?;
            if let Some(tsc) = then {
                set_msr(a, 0x10, tsc)?;
            }
            a.sti()?;
            a.hlt()?;
            a.xor(eax, eax)?;
            a.mov(edx, 0xf4)?;
            a.out(dx, eax)
        });
        assert_eq!(
            end,
            VcpuEnd::Guest(GuestEnd::TestExit(0)),
            "{tsc:#x} {deadline:#x}"
        );
        assert_eq!(word(&room, EXPIRED), 1);
        assert!(
            passes.contains(&room.now()),
            "{tsc:#x} {deadline:#x}: {}",
            room.now()
        );
    }
}

#[test]
fn a_periodic_timer_that_nobody_lets_in_wakes_nobody() {
    let (end, _) = end_of(|a| {
        const PERIODIC: u32 = 1 << 17;
        for (register, value) in [
            (0x320, PERIODIC | u32::from(TIMER)),
            (0x3e0, 0xb),
            (0x380, 1_000),
        ] {
            a.mov(rax, LAPIC + register)?;
            a.mov(dword_ptr(rax), value)?;
        }
        a.cli()?;
        a.hlt()
    });
    assert_eq!(end, VcpuEnd::Asleep);
}
