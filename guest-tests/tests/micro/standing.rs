//! A guest whose counters are all off: whatever it has programmed it may read for ever, on
//! every vCPU, also when its #GP handler has moved since.

use std::time::Duration;

use anyhow::{Result, ensure};
use guest_tests::micro::{
    DATA, ENDBR64, Entry, FAULT, LOG, Lab, LabRun, Program, Setup, Test, Written, enter_user, exit,
    log_fault, log_value, spin_for, wrmsr,
};
use iced_x86::code_asm::{
    CodeAssembler, cr3, cr4, dr0, dr1, dr2, dr3, dr7, dword_ptr, eax, ecx, edx, qword_ptr, r12,
    r14, r15, rax, rcx, rdi, rsi, word_ptr,
};
use vmm::micro::{KERNEL_CODE, KERNEL_CS, Start, USER_CODE, USER_CS};
use vmm::sched::CorePlan;
use vmm::vcpu::{Armed, PatchRefusal, TrapEvent, TrapMode};

use crate::cores::tsc_khz;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "standing::reads_at_cpl_0_after_a_while",
        run: |lab| after_a_while(lab, 0),
    },
    Test {
        name: "standing::reads_at_cpl_3_after_a_while",
        run: |lab| after_a_while(lab, 3),
    },
    Test {
        name: "standing::a_gate_that_has_changed",
        run: gate_changed,
    },
    Test {
        name: "standing::an_idt_that_has_moved",
        run: idt_moved,
    },
    Test {
        name: "standing::other_page_tables",
        run: other_root,
    },
    Test {
        name: "standing::cr4_decides_at_cpl_3",
        run: pce,
    },
    Test {
        name: "standing::another_vcpu_reads",
        run: |lab| another_vcpu(lab, None),
    },
    Test {
        name: "standing::another_vcpu_of_the_core_reads",
        run: |lab| another_vcpu(lab, ONE_CORE),
    },
    Test {
        name: "standing::a_write_of_a_counter_is_enough",
        run: counter_write,
    },
    Test {
        name: "standing::nothing_before_the_first_write",
        run: before_any_write,
    },
    Test {
        name: "standing::a_guest_that_takes_all_four_and_gives_one_back",
        run: all_four,
    },
    Test {
        name: "standing::a_patch_that_was_given_up_meanwhile",
        run: patch_given_up,
    },
];

const ONE_CORE: Option<CorePlan> = Some(CorePlan {
    cores: 1,
    slice: Duration::from_millis(1),
});

const PCE: u64 = 1 << 8;
const COUNT: u64 = 0x1234_5678_9abc;
/// Of the second #GP handler, and what leads there.
const OTHER: u8 = 12;
const IDT: u64 = 0x6000;
const GATE: u64 = IDT + 16 * 13;
/// Longer than a guest without an exit is left alone, whichever way RDPMC is trapped.
const WHILE_MS: u64 = 400;

/// How the #GP handler begins, and how it is trapped.
#[derive(Clone, Copy, Debug)]
struct Way {
    mode: TrapMode,
    first: &'static [u8],
}

const WAYS: [Way; 3] = [
    Way {
        mode: TrapMode::Auto,
        first: &ENDBR64,
    },
    Way {
        mode: TrapMode::Auto,
        // PUSH RAX; POP RAX.
        first: &[0x50, 0x58],
    },
    Way {
        mode: TrapMode::Breakpoint,
        first: &ENDBR64,
    },
];

impl Way {
    fn setup(self) -> Setup {
        Setup {
            trap: self.mode,
            timeout: Duration::from_secs(60),
            ..Setup::clock("amd-core")
        }
    }

    /// With two #GP handlers that begin alike.
    fn program(self) -> Result<Program> {
        Program::new()?.gp_begins(self.first)?.handler(OTHER, |a| {
            a.db(self.first)?;
            log_fault(a, 13, true)
        })
    }

    fn check(self, ran: &LabRun, expected: &[Entry]) -> Result<()> {
        ensure!(ran.log == expected, "{self:x?}: {:x?}", ran.log);
        Ok(())
    }
}

/// Counter 0 holds [`COUNT`]; one was on, and none is.
fn stopped(a: &mut CodeAssembler) -> Written {
    wrmsr(a, 0xc001_0201, COUNT)?;
    wrmsr(a, 0xc001_0202, 0x43_0076)?;
    wrmsr(a, 0xc001_0202, 0)
}

/// Reads counter 0 and logs the value, or the #GP.
fn rdpmc(a: &mut CodeAssembler) -> Written {
    let (mut at, mut next) = (a.create_label(), a.create_label());
    a.lea(r14, qword_ptr(at))?;
    a.lea(r15, qword_ptr(next))?;
    a.xor(ecx, ecx)?;
    a.set_label(&mut at)?;
    a.rdpmc()?;
    log_value(a)?;
    a.set_label(&mut next)?;
    a.nop()
}

fn count() -> Entry {
    Entry::value(COUNT & 0xffff_ffff, COUNT >> 32)
}

fn gp(cs: u16) -> Entry {
    Entry {
        kind: FAULT + 13,
        a: 0,
        b: 0,
        c: cs.into(),
    }
}

fn armed(ran: &LabRun) -> Vec<Armed> {
    let events = ran.outcome.vcpus[0].events.iter();
    let armed = events.filter_map(|event| match event {
        TrapEvent::Armed(armed) => Some(*armed),
        _ => None,
    });
    armed.collect()
}

/// The second read follows the first by that while again.
fn after_a_while(lab: &Lab, cpl: u8) -> Result<()> {
    let khz = tsc_khz(lab)?;
    for way in WAYS {
        let body = |a: &mut CodeAssembler| -> Written {
            for _ in 0..2 {
                spin_for(a, WHILE_MS * khz)?;
                rdpmc(a)?;
            }
            Ok(())
        };
        let program = way.program()?.at_cpl(cpl, stopped, body)?;
        let ran = lab.run(&way.setup(), &program.start(PCE))?;
        way.check(&ran, &[count(), count()])?;
        ensure!(armed(&ran).len() == 1, "{way:x?}: {:?}", armed(&ran));
    }
    Ok(())
}

/// The gate leads elsewhere. It is looked at when the guest writes a counter, and without an
/// exit of its own after a while.
fn gate_changed(lab: &Lab) -> Result<()> {
    let khz = tsc_khz(lab)?;
    let other = u32::try_from(Program::handler_address(13) ^ Program::handler_address(OTHER))?;
    for way in WAYS {
        let program = way.program()?.kernel(|a| {
            stopped(a)?;
            spin_for(a, WHILE_MS * khz)?;
            rdpmc(a)?;
            a.xor(dword_ptr(GATE), other.cast_signed())?;
            wrmsr(a, 0xc001_0201, COUNT)?;
            rdpmc(a)?;
            a.xor(dword_ptr(GATE), other.cast_signed())?;
            spin_for(a, WHILE_MS * khz)?;
            rdpmc(a)?;
            exit(a)
        })?;
        let ran = lab.run(&way.setup(), &program.start(0))?;
        way.check(&ran, &[count(); 3])?;
    }
    Ok(())
}

/// LIDT, to a copy whose #GP gate leads elsewhere.
fn idt_moved(lab: &Lab) -> Result<()> {
    const COPY: u64 = DATA + 0x2000;
    const POINTER: u64 = DATA + 0x80;
    let khz = tsc_khz(lab)?;
    let other = u32::try_from(Program::handler_address(13) ^ Program::handler_address(OTHER))?;
    for way in WAYS {
        let program = way.program()?.kernel(|a| {
            stopped(a)?;
            a.mov(rsi, IDT)?;
            a.mov(rdi, COPY)?;
            a.mov(ecx, 0x200)?;
            a.rep().movsq()?;
            a.xor(dword_ptr(COPY + 16 * 13), other.cast_signed())?;
            a.mov(word_ptr(POINTER), 0xfff)?;
            a.mov(rax, COPY)?;
            a.mov(qword_ptr(POINTER + 2), rax)?;
            a.lidt(qword_ptr(POINTER))?;
            spin_for(a, WHILE_MS * khz)?;
            rdpmc(a)?;
            exit(a)
        })?;
        let ran = lab.run(&way.setup(), &program.start(0))?;
        way.check(&ran, &[count()])?;
    }
    Ok(())
}

/// CR3 changes, and with it the way to the IDT, at once and after a while.
fn other_root(lab: &Lab) -> Result<()> {
    const ROOT: u64 = DATA + 0x4000;
    const PDPT: u64 = 0x2007;
    let khz = tsc_khz(lab)?;
    for way in WAYS {
        let program = way.program()?.data(ROOT, PDPT.to_le_bytes().to_vec());
        let program = program.kernel(|a| {
            stopped(a)?;
            a.mov(rax, ROOT)?;
            a.mov(cr3, rax)?;
            rdpmc(a)?;
            spin_for(a, WHILE_MS * khz)?;
            rdpmc(a)?;
            exit(a)
        })?;
        let ran = lab.run(&way.setup(), &program.start(0))?;
        way.check(&ran, &[count(); 2])?;
    }
    Ok(())
}

/// CR4.PCE, set long after the counters were stopped, makes RDPMC legal for a program; until
/// then its #GP is the guest's.
fn pce(lab: &Lab) -> Result<()> {
    let khz = tsc_khz(lab)?;
    for (way, set) in WAYS.iter().flat_map(|way| [(*way, false), (*way, true)]) {
        let program = way.program()?.kernel(|a| {
            stopped(a)?;
            spin_for(a, WHILE_MS * khz)?;
            if set {
                a.mov(rax, cr4)?;
                a.or(eax, i32::try_from(PCE).unwrap_or(0))?;
                a.mov(cr4, rax)?;
            }
            enter_user(a, 0)
        })?;
        let program = program.user(|a| {
            rdpmc(a)?;
            a.ud2()
        })?;
        let ran = lab.run(&way.setup(), &program.start(0))?;
        let expected = if set { count() } else { gp(USER_CS) };
        way.check(&ran, &[expected])?;
    }
    Ok(())
}

/// A vCPU that runs all the time and has programmed nothing reads as soon as another one has
/// started a counter, and after all are off: at CPL 0, and where its own CR4.PCE lets it at
/// CPL 3.
fn another_vcpu(lab: &Lab, cores: Option<CorePlan>) -> Result<()> {
    const GO: u64 = DATA + 0x100;
    const DONE: u64 = DATA + 0x108;
    /// 1 for a value, 2 for a #GP; each with the round's number above.
    const RESULT: u64 = DATA + 0x110;
    let khz = tsc_khz(lab)?;
    let second = |a: &mut CodeAssembler| -> Written {
        let (mut end, mut faulted) = (a.create_label(), a.create_label());
        a.mov(r12, rdi)?;
        for round in 1..=2 {
            let mut again = a.create_label();
            a.set_label(&mut again)?;
            a.pause()?;
            a.cmp(qword_ptr(GO), round)?;
            a.jb(again)?;
            a.lea(r15, qword_ptr(faulted))?;
            a.xor(ecx, ecx)?;
            a.rdpmc()?;
            a.mov(qword_ptr(RESULT), 0x10 * round + 1)?;
            a.mov(qword_ptr(DONE), round)?;
        }
        a.jmp(end)?;
        a.set_label(&mut faulted)?;
        a.mov(qword_ptr(RESULT), 2)?;
        a.mov(qword_ptr(DONE), 9)?;
        a.set_label(&mut end)?;
        a.pause()?;
        a.jmp(end)
    };
    let wait = |a: &mut CodeAssembler, round: i32| -> Written {
        let mut again = a.create_label();
        a.mov(qword_ptr(GO), round)?;
        a.set_label(&mut again)?;
        a.pause()?;
        a.cmp(qword_ptr(DONE), round)?;
        a.jb(again)
    };
    for (way, (cpl, bits)) in WAYS
        .iter()
        .flat_map(|way| [(0, 0), (3, PCE), (3, 0)].map(|mode| (*way, mode)))
    {
        let program = way.program()?.kernel(|a| {
            // The other one is running by then.
            spin_for(a, 20 * khz)?;
            wrmsr(a, 0xc001_0202, 0x43_0076)?;
            wait(a, 1)?;
            wrmsr(a, 0xc001_0202, 0)?;
            spin_for(a, WHILE_MS * khz)?;
            wait(a, 2)?;
            exit(a)
        })?;
        let at = if cpl == 3 {
            USER_CODE
        } else {
            KERNEL_CODE + 0x1_0000
        };
        let guest = program.code(at, second)?.guest();
        let guest = guest.start(Start {
            rdi: LOG,
            ..Start::at(KERNEL_CODE, 0)
        });
        let guest = guest.start(Start {
            cr4: bits,
            rdi: LOG + 0x4000,
            ..Start::at(at, cpl)
        });
        let setup = Setup {
            cores,
            ..way.setup()
        };
        let ran = lab.run(&setup, &guest)?;
        let expected = if cpl == 3 && bits == 0 { 2 } else { 0x21 };
        let result = ran.word(RESULT)?;
        ensure!(
            result == expected,
            "{way:x?}, CPL {cpl}, CR4 {bits:#x}: {result:#x}"
        );
    }
    Ok(())
}

/// No control was ever written.
fn counter_write(lab: &Lab) -> Result<()> {
    let khz = tsc_khz(lab)?;
    for way in WAYS {
        let program = way.program()?.kernel(|a| {
            wrmsr(a, 0xc001_0201, COUNT)?;
            rdpmc(a)?;
            spin_for(a, WHILE_MS * khz)?;
            rdpmc(a)?;
            exit(a)
        })?;
        let ran = lab.run(&way.setup(), &program.start(0))?;
        way.check(&ran, &[count(); 2])?;
    }
    Ok(())
}

/// Reads of registers do not count as one.
fn before_any_write(lab: &Lab) -> Result<()> {
    let khz = tsc_khz(lab)?;
    for way in WAYS {
        let program = way.program()?.kernel(|a| {
            a.mov(ecx, 0xc001_0201u32)?;
            a.rdmsr()?;
            spin_for(a, 150 * khz)?;
            rdpmc(a)?;
            stopped(a)?;
            rdpmc(a)?;
            exit(a)
        })?;
        let ran = lab.run(&way.setup(), &program.start(0))?;
        way.check(&ran, &[gp(KERNEL_CS), count()])?;
    }
    Ok(())
}

/// Where a breakpoint is used there is none left, until the guest gives one back.
fn all_four(lab: &Lab) -> Result<()> {
    let khz = tsc_khz(lab)?;
    for way in WAYS {
        let program = way.program()?.kernel(|a| {
            stopped(a)?;
            spin_for(a, WHILE_MS * khz)?;
            a.mov(rax, DATA + 0x40)?;
            for register in [dr0, dr1, dr2, dr3] {
                a.mov(register, rax)?;
            }
            a.mov(eax, 0xdddd_0455u32)?;
            a.mov(dr7, rax)?;
            spin_for(a, WHILE_MS * khz)?;
            rdpmc(a)?;
            a.mov(eax, 0xdddd_0415u32)?;
            a.mov(dr7, rax)?;
            spin_for(a, WHILE_MS * khz)?;
            rdpmc(a)?;
            exit(a)
        })?;
        let ran = lab.run(&way.setup(), &program.start(0))?;
        let patched = matches!(armed(&ran).as_slice(), [Armed::Patch]);
        let first = if patched { count() } else { gp(KERNEL_CS) };
        way.check(&ran, &[first, count()])?;
        let told = ran.events(|event| *event == TrapEvent::DebugRegistersFull);
        ensure!(told.len() == usize::from(!patched), "{way:x?}: {told:?}");
    }
    Ok(())
}

/// All counters are off when the eighth store to the handler's page ends the patch: the
/// breakpoint takes over.
fn patch_given_up(lab: &Lab) -> Result<()> {
    const HERE: u64 = 0x10_0000 + 0x8_0000 + 0xf00;
    let khz = tsc_khz(lab)?;
    let way = WAYS[0];
    let program = way.program()?.kernel(|a| {
        stopped(a)?;
        spin_for(a, WHILE_MS * khz)?;
        for round in 0..10 {
            // The page is patched again by then.
            spin_for(a, 10 * khz)?;
            a.mov(rcx, HERE)?;
            a.mov(dword_ptr(rcx), round)?;
            a.xor(edx, edx)?;
        }
        spin_for(a, WHILE_MS * khz)?;
        rdpmc(a)?;
        exit(a)
    })?;
    let ran = lab.run(&way.setup(), &program.start(0))?;
    way.check(&ran, &[count()])?;
    let last = armed(&ran).last().copied();
    let given_up = Armed::Breakpoint(Some(PatchRefusal::Written(8)));
    ensure!(last == Some(given_up), "{:?}", armed(&ran));
    Ok(())
}
