//! What a guest sees of its debug registers while some are ours is what it sees
//! without a PMU: each guest runs both ways, and writes the same log.
//!
//! That need not be what the manuals say: emulators differ.

use anyhow::{Context, Result, bail, ensure};
use guest_tests::micro::{
    ENDBR64, Entry, Lab, Program, Setup, Test, Written, enter_user, exit, log_fault, log_value,
    spin_for, tsc, wrmsr,
};
use iced_x86::code_asm::{
    CodeAssembler, CodeLabel, al, ax, byte_ptr, dr0, dr1, dr2, dr3, dr7, dword_ptr, eax, ecx, edi,
    edx, qword_ptr, r8, r9, r14, r15, rax, rdx, rsp, ss, word_ptr,
};
use vmm::micro::{KERNEL_CODE, KERNEL_CS, USER_CODE};
use vmm::vcpu::{TrapEvent, TrapMode};

use super::{SELECT, TF, WATCHED, debug_entry, log_debug, log_hit, setup, watch};
use crate::cores::tsc_khz;

/// Where a guest's body lies at CPL 0.
const BODY: u64 = KERNEL_CODE + 0x4000;
/// Instructions at both rings, on.
const INSTRUCTIONS: u64 = 0x43_00c0;

macro_rules! both_rings {
    ($($name:literal, $case:expr;)*) => {
        pub(crate) const TESTS: &[Test] = &[
            $(Test {
                name: concat!("debug::", $name, "_at_cpl_0"),
                run: |lab| $case.check(lab, 0),
            },
            Test {
                name: concat!("debug::", $name, "_at_cpl_3"),
                run: |lab| $case.check(lab, 3),
            },)*
            Test {
                name: "debug::general_detect",
                run: |lab| GENERAL_DETECT.check(lab, 0),
            },
            Test {
                name: "debug::breakpoint_set_without_an_exit_at_cpl_0",
                run: |lab| no_exit(lab, 0, false),
            },
            Test {
                name: "debug::breakpoint_set_without_an_exit_at_cpl_3",
                run: |lab| no_exit(lab, 3, false),
            },
            Test {
                name: "debug::breakpoint_set_when_nothing_counts_at_cpl_0",
                run: |lab| no_exit(lab, 0, true),
            },
            Test {
                name: "debug::breakpoint_set_when_nothing_counts_at_cpl_3",
                run: |lab| no_exit(lab, 3, true),
            },
            Test {
                name: "debug::four_breakpoints_and_a_counter",
                run: four_and_a_counter,
            },
            Test {
                name: "debug::a_guest_that_takes_all_four_later_is_told",
                run: all_four_later,
            },
            Test {
                name: "debug::the_watch_does_not_end_when_the_counters_stop",
                run: watched_for_good,
            },
            Test {
                name: "debug::registers_stay_ours_while_a_counter_is_on",
                run: stay_ours,
            },
        ];
    };
}

both_rings! {
    "data_breakpoints_of_every_kind", DATA_KINDS;
    "data_breakpoint_in_a_string_instruction", STRING;
    "four_data_breakpoints", FOUR;
    "execution_breakpoints_in_a_row", EXECUTION;
    "dr6_between_hits", STICKY;
    "step_onto_a_breakpoint", STEP_ONTO;
    "step_and_data_breakpoint_at_once", STEP_AND_DATA;
    "data_breakpoint_in_the_shadow_of_mov_ss", MOV_SS;
    "execution_breakpoint_in_the_shadow_of_mov_ss", SHADOWED;
    "step_in_the_shadow_of_mov_ss", STEP_MOV_SS;
    "int1", INT1;
    "breakpoint_on_an_int3", ON_INT3;
}

/// One guest: its debug registers are set at CPL 0, before ours are.
struct Case {
    /// DR0 to DR3; an address below [`BODY_BYTES`] is an offset in the body.
    registers: &'static [u64],
    control: u32,
    handler: fn(&mut CodeAssembler) -> Written,
    body: fn(&mut CodeAssembler) -> Written,
    /// Exceptions at least.
    least: usize,
}

const BODY_BYTES: u64 = 0x100;

impl Case {
    /// `ours`: what a counter's control holds while the body runs.
    fn guest(&self, cpl: u8, ours: Option<u64>) -> Result<Program> {
        let base = if cpl == 3 { USER_CODE } else { BODY };
        let program = Program::new()?
            .gp_begins(&ENDBR64)?
            .handler(1, self.handler)?
            .handler(3, |a| log_fault(a, 3, false))?
            .kernel(|a| {
                for (&at, register) in self.registers.iter().zip([dr0, dr1, dr2, dr3]) {
                    a.mov(rax, if at < BODY_BYTES { base + at } else { at })?;
                    a.mov(register, rax)?;
                }
                a.mov(eax, self.control)?;
                a.mov(dr7, rax)?;
                if let Some(select) = ours {
                    wrmsr(a, SELECT, select)?;
                }
                if cpl == 3 {
                    return enter_user(a, 0);
                }
                a.mov(rax, BODY)?;
                a.jmp(rax)
            })?;
        program.code(base, |a| {
            (self.body)(a)?;
            if cpl == 3 { a.ud2() } else { exit(a) }
        })
    }

    fn check(&self, lab: &Lab, cpl: u8) -> Result<()> {
        let see = |setup: &Setup, ours| lab.run(setup, &self.guest(cpl, ours)?.start(0));
        let mut none = setup();
        none.model = "none".to_owned();
        let reference = see(&none, None).context("without a PMU")?.log;
        ensure!(
            reference.len() >= self.least,
            "without a PMU: {reference:x?}"
        );
        for (which, setup, select) in [
            ("beside the breakpoint for RDPMC", setup(), 1 << 22),
            ("beside the patched handler", patched(), 1 << 22),
            ("stepped", Setup::step("amd-core"), INSTRUCTIONS),
        ] {
            let ran = see(&setup, Some(select)).context(which)?;
            super::check_log(&ran, &reference).context(which)?;
            let ours = ran.events(|event| matches!(event, TrapEvent::GuestDebug { .. }));
            let none = setup.trap != TrapMode::Patch || ours.is_empty();
            ensure!(none, "{which}: {ours:x?}");
        }
        Ok(())
    }
}

/// Does `one`, with R14 behind it.
fn touch(a: &mut CodeAssembler, one: impl FnOnce(&mut CodeAssembler) -> Written) -> Written {
    let mut after = a.create_label();
    a.lea(r14, qword_ptr(after))?;
    one(a)?;
    a.set_label(&mut after)?;
    a.nop()
}

/// The debug registers are all the guest's.
fn patched() -> Setup {
    Setup {
        trap: TrapMode::Patch,
        ..setup()
    }
}

fn set_tf(a: &mut CodeAssembler) -> Written {
    a.pushfq()?;
    a.or(dword_ptr(rsp), TF)?;
    a.popfq()
}

fn clears_tf(a: &mut CodeAssembler) -> Written {
    log_debug(a, false)
}

const DATA_KINDS: Case = Case {
    registers: &[WATCHED, WATCHED + 8, WATCHED + 17],
    // Slot 0: writes of 4 bytes; 1: accesses of 8; 2: writes of 1.
    control: 0x1bd_0415,
    handler: clears_tf,
    body: |a| {
        let accesses: [fn(&mut CodeAssembler) -> Written; 12] = [
            |a| a.mov(eax, dword_ptr(WATCHED)),
            |a| a.mov(dword_ptr(WATCHED), eax),
            |a| a.mov(byte_ptr(WATCHED + 3), al),
            |a| a.mov(byte_ptr(WATCHED + 4), al),
            |a| a.mov(dword_ptr(WATCHED - 2), eax),
            |a| a.mov(rax, qword_ptr(WATCHED + 8)),
            |a| a.mov(byte_ptr(WATCHED + 15), al),
            |a| a.mov(byte_ptr(WATCHED + 16), al),
            |a| a.mov(byte_ptr(WATCHED + 17), al),
            |a| a.mov(qword_ptr(WATCHED + 1), rax),
            |a| a.add(dword_ptr(WATCHED), 1),
            |a| a.xchg(qword_ptr(WATCHED + 8), rax),
        ];
        accesses.iter().try_for_each(|access| touch(a, access))
    },
    least: 9,
};

const STRING: Case = Case {
    registers: &[WATCHED],
    control: 0xd_0401,
    handler: clears_tf,
    body: |a| {
        a.mov(edi, u32::try_from(WATCHED).unwrap_or(0) + 3)?;
        touch(a, CodeAssembler::stosb)
    },
    least: 1,
};

/// None is left for ours.
const FOUR: Case = Case {
    registers: &[WATCHED, WATCHED + 8, WATCHED + 16, WATCHED + 24],
    control: 0xdddd_0455,
    handler: clears_tf,
    body: |a| {
        let mut slots = (0..4).map(|slot| WATCHED + 8 * slot);
        slots.try_for_each(|at| touch(a, |a| a.mov(byte_ptr(at + 1), al)))
    },
    least: 4,
};

/// RF lets one instruction pass, and no more.
const EXECUTION: Case = Case {
    registers: &[7, 8, 10],
    control: 0x415,
    handler: clears_tf,
    body: |a| {
        let mut after = a.create_label();
        a.lea(r14, qword_ptr(after))?; // 7 bytes
        a.nop()?;
        a.nop()?;
        a.nop()?;
        a.nop()?;
        a.set_label(&mut after)?;
        a.nop()
    },
    least: 3,
};

/// The handler leaves DR6 as it is: BS stays, B0 to B3 are those of the last hit.
const STICKY: Case = Case {
    registers: &[WATCHED, WATCHED + 8],
    control: 0xdd_0405,
    handler: |a| {
        a.push(rax)?;
        log_hit(a)?;
        a.and(dword_ptr(rsp + 24), !TF)?;
        a.pop(rax)?;
        a.iretq()
    },
    body: |a| {
        touch(a, |a| a.mov(dword_ptr(WATCHED), eax))?;
        touch(a, |a| a.mov(dword_ptr(WATCHED + 8), eax))?;
        set_tf(a)?;
        touch(a, |a| a.mov(dword_ptr(WATCHED), eax))
    },
    least: 4,
};

/// After the step, and before the instruction behind it, or both at once.
const STEP_ONTO: Case = Case {
    registers: &[0x11],
    control: 0x401,
    handler: clears_tf,
    body: |a| {
        let mut target = a.create_label();
        a.lea(r14, qword_ptr(target))?; // 7
        set_tf(a)?; // 1 + 7 + 1
        a.nop()?;
        a.set_label(&mut target)?;
        a.nop()
    },
    least: 1,
};

/// One #DB with both causes.
const STEP_AND_DATA: Case = Case {
    registers: &[WATCHED],
    control: 0xd_0401,
    handler: clears_tf,
    body: |a| {
        let mut after = a.create_label();
        a.lea(r14, qword_ptr(after))?;
        set_tf(a)?;
        a.mov(dword_ptr(WATCHED), eax)?;
        a.set_label(&mut after)?;
        a.nop()
    },
    least: 1,
};

/// The trap of a MOV SS waits for the instruction behind it.
const MOV_SS: Case = Case {
    registers: &[WATCHED],
    control: 0xf_0401,
    handler: clears_tf,
    body: |a| {
        a.mov(ax, ss)?;
        touch(a, |a| a.mov(word_ptr(WATCHED), ax))?;
        touch(a, |a| {
            a.mov(ss, word_ptr(WATCHED))?;
            a.nop()
        })
    },
    least: 2,
};

/// Nor does a breakpoint on that instruction fire; one on the next does.
const SHADOWED: Case = Case {
    registers: &[11, 12],
    control: 0x405,
    handler: clears_tf,
    body: |a| {
        let mut after = a.create_label();
        a.lea(r14, qword_ptr(after))?; // 7
        a.mov(eax, ss)?; // 2
        a.mov(ss, eax)?; // 2
        a.nop()?;
        a.set_label(&mut after)?;
        a.nop()
    },
    least: 1,
};

const STEP_MOV_SS: Case = Case {
    registers: &[],
    control: 0x400,
    handler: clears_tf,
    body: |a| {
        let mut after = a.create_label();
        a.lea(r14, qword_ptr(after))?;
        a.mov(eax, ss)?;
        set_tf(a)?;
        a.mov(ss, eax)?;
        a.nop()?;
        a.set_label(&mut after)?;
        a.nop()
    },
    least: 1,
};

/// A #DB without a cause.
const INT1: Case = Case {
    registers: &[WATCHED],
    control: 0xd_0401,
    handler: clears_tf,
    body: |a| touch(a, CodeAssembler::int1),
    least: 1,
};

/// First the breakpoint, then the #BP.
const ON_INT3: Case = Case {
    registers: &[14],
    control: 0x401,
    handler: clears_tf,
    body: |a| {
        let mut after = a.create_label();
        a.lea(r15, qword_ptr(after))?; // 7
        a.lea(r14, qword_ptr(after))?; // 7
        a.int3()?;
        a.set_label(&mut after)?;
        a.nop()
    },
    least: 2,
};

/// A MOV to or from a debug register, once the guest forbids them.
const GENERAL_DETECT: Case = Case {
    registers: &[WATCHED],
    control: 0xd_2401,
    handler: clears_tf,
    body: |a| {
        let mut before = a.create_label();
        a.lea(r14, qword_ptr(before))?;
        a.set_label(&mut before)?;
        a.mov(rdx, dr0)
    },
    least: 1,
};

/// RDPMC of counter 0; logs whether it came to something.
fn rdpmc_works(a: &mut CodeAssembler) -> Written {
    let (mut fault, mut next) = (a.create_label(), a.create_label());
    a.lea(r14, qword_ptr(fault))?;
    a.lea(r15, qword_ptr(next))?;
    a.xor(ecx, ecx)?;
    a.set_label(&mut fault)?;
    a.rdpmc()?;
    a.xor(eax, eax)?;
    a.xor(edx, edx)?;
    log_value(a)?;
    a.set_label(&mut next)?;
    a.nop()
}

/// The guest sets a breakpoint while ours is in use, and runs on without an exit:
/// on execution at CPL 0, on writes at CPL 3. A `quiet` guest's counters have been off for
/// so long that it is looked at less often.
fn no_exit(lab: &Lab, cpl: u8, quiet: bool) -> Result<()> {
    let khz = tsc_khz(lab)?;
    let met = |a: &mut CodeAssembler| -> Written {
        tsc(a)?;
        a.sub(rax, r8)?;
        a.xor(edx, edx)?;
        log_value(a)?;
        exit(a)
    };
    // Gives up after a second.
    let wait = |a: &mut CodeAssembler, mut target: CodeLabel| -> Written {
        let mut again = a.create_label();
        a.mov(r9, 1000 * khz)?;
        a.add(r9, r8)?;
        a.set_label(&mut again)?;
        tsc(a)?;
        a.cmp(rax, r9)?;
        a.set_label(&mut target)?;
        a.mov(dword_ptr(WATCHED), eax)?;
        a.jb(again)?;
        a.ud2()
    };
    let kernel = |a: &mut CodeAssembler, phase: u64| -> Written {
        let target = a.create_label();
        watch(a)?;
        if quiet {
            wrmsr(a, SELECT, 0)?;
            spin_for(a, 300 * khz)?;
        }
        spin_for(a, 3 * khz + phase * khz / 5)?;
        if cpl == 3 {
            a.mov(rax, WATCHED)?;
        } else {
            a.lea(rax, qword_ptr(target))?;
        }
        a.mov(dr0, rax)?;
        let control = if cpl == 3 {
            super::ON_WRITE
        } else {
            super::ON_EXECUTION
        };
        a.mov(eax, control)?;
        a.mov(dr7, rax)?;
        tsc(a)?;
        a.mov(r8, rax)?;
        if cpl == 3 {
            return enter_user(a, 0);
        }
        wait(a, target)
    };
    let mut best = u64::MAX;
    // A busy host may hold up one run.
    for phase in 0..5 {
        let program = Program::new()?.handler(1, met)?;
        let program = program.kernel(|a| kernel(a, phase))?.user(|a| {
            let target = a.create_label();
            wait(a, target)
        })?;
        let ran = lab.run(&setup(), &program.start(0))?;
        let [entry] = ran.log.as_slice() else {
            bail!("the breakpoint was not met: {:x?}", ran.log);
        };
        best = best.min(1000 * entry.a / khz);
    }
    // One or ten milliseconds, and what a busy host adds; without a kick it is never.
    ensure!(best < 50_000, "met after {best} µs at the earliest");
    Ok(())
}

/// Where the handler is patched, the guest has all four and its counters.
fn four_and_a_counter(lab: &Lab) -> Result<()> {
    let program = Program::new()?
        .gp_begins(&ENDBR64)?
        .handler(1, |a| log_debug(a, false))?
        .kernel(|a| {
            watch(a)?;
            let mut targets = [(); 4].map(|()| a.create_label());
            for (target, register) in targets.iter().zip([dr0, dr1, dr2, dr3]) {
                a.lea(rax, qword_ptr(*target))?;
                a.mov(register, rax)?;
            }
            a.mov(eax, 0x455)?;
            a.mov(dr7, rax)?;
            for target in &mut targets {
                rdpmc_works(a)?;
                a.lea(r14, qword_ptr(*target))?;
                a.set_label(target)?;
                a.nop()?;
            }
            exit(a)
        })?;
    let ran = lab.run(&patched(), &program.start(0))?;
    let hits = [1, 2, 4, 8].map(|slot| [WORKED, debug_entry(slot, 0, KERNEL_CS)]);
    super::check_log(&ran, hits.as_flattened())
}

/// With ours in place, and without an exit.
fn all_four_later(lab: &Lab) -> Result<()> {
    let khz = tsc_khz(lab)?;
    let program = Program::new()?.kernel(|a| {
        watch(a)?;
        a.mov(eax, 0xdddd_0455u32)?;
        a.mov(dr7, rax)?;
        spin_for(a, 50 * khz)?;
        exit(a)
    })?;
    let ran = lab.run(&setup(), &program.start(0))?;
    let told = ran.events(|event| *event == TrapEvent::DebugRegistersFull);
    ensure!(told.len() == 1, "told {} times", told.len());
    Ok(())
}

/// Counters stop, and after a while of running RDPMC reads as before, and the guest's next
/// breakpoint is met. (KVM drops none of its own in either case.)
fn watched_for_good(lab: &Lab) -> Result<()> {
    let khz = tsc_khz(lab)?;
    let program = Program::new()?
        .handler(1, |a| log_debug(a, false))?
        .kernel(|a| {
            let mut target = a.create_label();
            watch(a)?;
            wrmsr(a, SELECT, 0)?;
            rdpmc_works(a)?;
            spin_for(a, 1500 * khz)?;
            rdpmc_works(a)?;
            super::set_breakpoint(a, target, super::ON_EXECUTION)?;
            a.lea(r14, qword_ptr(target))?;
            spin_for(a, 50 * khz)?;
            a.set_label(&mut target)?;
            a.nop()?;
            rdpmc_works(a)?;
            watch(a)?;
            rdpmc_works(a)?;
            exit(a)
        })?;
    let ran = lab.run(&setup(), &program.start(0))?;
    let hit = debug_entry(1, 0, KERNEL_CS);
    super::check_log(&ran, &[WORKED, WORKED, hit, WORKED, WORKED])?;
    let foreign = ran.events(|event| *event == TrapEvent::ForeignGp);
    ensure!(foreign.is_empty(), "{foreign:x?}");
    Ok(())
}

fn stay_ours(lab: &Lab) -> Result<()> {
    let khz = tsc_khz(lab)?;
    let program = Program::new()?.kernel(|a| {
        watch(a)?;
        spin_for(a, 1000 * khz)?;
        rdpmc_works(a)?;
        exit(a)
    })?;
    let ran = lab.run(&setup(), &program.start(0))?;
    super::check_log(&ran, &[WORKED])
}

const WORKED: Entry = Entry::value(0, 0);
