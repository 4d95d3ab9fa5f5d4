//! The patched #GP handler: what the guest sees of it, what it may do to its page, and
//! when the byte comes back.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use guest_tests::micro::{
    DATA, DISPLACEABLE, ENDBR64, Entry, FAULT, LOG, Lab, LabRun, Program, Setup, Test, Written,
    enter_user, exit, log_value, spin_for, wrmsr,
};
use iced_x86::code_asm::{
    CodeAssembler, al, ax, byte_ptr, cr3, dr0, dr1, dr2, dr3, dr6, dr7, dword_ptr, eax, ecx, edx,
    qword_ptr, r12, r13, r14, r15, rax, rbx, rcx, rdi, rdx, rsi, rsp, word_ptr,
};
use vm_memory::{Bytes, GuestAddress};
use vmm::micro::{KERNEL_CODE, KERNEL_CS, KERNEL_SS, Start, USER_CODE, USER_CS};
use vmm::sched::CorePlan;
use vmm::vcpu::{Armed, PatchRefusal, TrapEvent, TrapMode};

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "patch::every_instruction_at_cpl_0",
        run: |lab| {
            DISPLACEABLE
                .iter()
                .try_for_each(|first| displaced(lab, first, 0))
        },
    },
    Test {
        name: "patch::every_instruction_at_cpl_3",
        run: |lab| {
            DISPLACEABLE
                .iter()
                .try_for_each(|first| displaced(lab, first, 3))
        },
    },
    Test {
        name: "patch::each_mode",
        run: modes,
    },
    Test {
        name: "patch::stores_at_cpl_0",
        run: |lab| stores(lab, 0),
    },
    Test {
        name: "patch::stores_at_cpl_3",
        run: |lab| stores(lab, 3),
    },
    Test {
        name: "patch::a_step_over_it_traps",
        run: stepped_by_the_guest,
    },
    Test {
        name: "patch::not_beside_what_the_processor_writes",
        run: beside_tables,
    },
    Test {
        name: "patch::an_old_patch_works",
        run: old_patch,
    },
    Test {
        name: "patch::a_gate_that_never_rests",
        run: restless,
    },
    Test {
        name: "patch::stays_when_no_counter_was_enabled_for_long",
        run: idle,
    },
    Test {
        name: "patch::a_crashed_kernel_is_as_it_was",
        run: |lab| another_kernel(lab, true),
    },
    Test {
        name: "patch::another_kernel_beside_one_that_reads",
        run: |lab| another_kernel(lab, false),
    },
    Test {
        name: "patch::another_vcpu_writes_to_the_page",
        run: |lab| two_vcpus(lab, None),
    },
    Test {
        name: "patch::another_vcpu_of_the_core_writes_to_the_page",
        run: |lab| two_vcpus(lab, ONE_CORE),
    },
    Test {
        name: "patch::nmis_in_the_handler",
        run: nmis,
    },
    Test {
        name: "patch::on_a_stack_of_its_own",
        run: own_stack,
    },
    Test {
        name: "patch::under_other_page_tables",
        run: other_page_tables,
    },
    Test {
        name: "patch::the_handler_serves_another_vector",
        run: shared_handler,
    },
    Test {
        name: "patch::an_rdpmc_right_before_it",
        run: before_the_handler,
    },
    Test {
        name: "patch::int_13_at_cpl_0",
        run: |lab| software_interrupt(lab, 0),
    },
    Test {
        name: "patch::int_13_at_cpl_3",
        run: |lab| software_interrupt(lab, 3),
    },
    Test {
        name: "patch::the_debug_registers_are_the_guests",
        run: debug_registers,
    },
    Test {
        name: "patch::a_breakpoint_right_behind_rdpmc_at_cpl_0",
        run: |lab| right_behind(lab, 0),
    },
    Test {
        name: "patch::a_breakpoint_right_behind_rdpmc_at_cpl_3",
        run: |lab| right_behind(lab, 3),
    },
    Test {
        name: "patch::a_guest_that_is_stepped",
        run: stepped,
    },
];

const PCE: u64 = 1 << 8;
const AC: u64 = 1 << 18;
const COUNT: u64 = 0x1234_5678_9abc;

const GP: u64 = 0x10_0000 + 0x8_0000 + 13 * 0x100;

/// Sets counter 0 to [`COUNT`], and with the write of a control has the #GP
/// handler watched.
fn set_counter(a: &mut CodeAssembler) -> Written {
    wrmsr(a, 0xc001_0201, COUNT)?;
    wrmsr(a, 0xc001_0200, 0)
}

/// The same, and counter 1 counts cycles, so that the watch does not end.
fn program_counter(a: &mut CodeAssembler) -> Written {
    set_counter(a)?;
    wrmsr(a, 0xc001_0202, 0x43_0076)
}

/// Reads it, and logs the value.
fn rdpmc(a: &mut CodeAssembler) -> Written {
    a.xor(ecx, ecx)?;
    let mut next = a.create_label();
    a.lea(r14, qword_ptr(next))?;
    a.lea(r15, qword_ptr(next))?;
    a.rdpmc()?;
    a.set_label(&mut next)?;
    log_value(a)
}

/// An RDMSR of no register, or at CPL 3 of any.
fn foreign_gp(a: &mut CodeAssembler) -> Written {
    let (mut fault, mut next) = (a.create_label(), a.create_label());
    a.lea(r14, qword_ptr(fault))?;
    a.lea(r15, qword_ptr(next))?;
    a.mov(ecx, 0x1234_5678)?;
    a.set_label(&mut fault)?;
    a.rdmsr()?;
    a.set_label(&mut next)?;
    a.nop()
}

fn setup() -> Setup {
    Setup::clock("amd-core")
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
    let armed = ran.outcome.vcpus[0]
        .events
        .iter()
        .filter_map(|event| match event {
            TrapEvent::Armed(armed) => Some(*armed),
            _ => None,
        });
    armed.collect()
}

/// The first bytes of the #GP handler, when the guest has ended.
fn handler_bytes(ran: &LabRun) -> Result<[u8; 4]> {
    Ok(ran.outcome.memory.read_obj(GuestAddress(GP))?)
}

/// `body` in a ring, whose #GP handler begins with `first`, after the counter was
/// programmed.
fn guest(
    first: &[u8],
    cpl: u8,
    body: impl Fn(&mut CodeAssembler) -> Written,
) -> Result<vmm::micro::MicroGuest> {
    let program = Program::new()?.gp_begins(first)?;
    let program = program.at_cpl(cpl, program_counter, body)?;
    Ok(program.start(PCE))
}

fn cs(cpl: u8) -> u16 {
    if cpl == 3 { USER_CS } else { KERNEL_CS }
}

/// RDPMC is emulated, and any other #GP finds its handler as it should: the
/// instruction under the patch is executed.
fn displaced(lab: &Lab, first: &'static [u8], cpl: u8) -> Result<()> {
    let ac = i32::try_from(AC)?;
    let clac = first == [0x0f, 0x01, 0xca];
    // A handler that logs the interrupted AC and its own.
    let program = Program::new()?.handler(13, |a| {
        a.db(first)?;
        a.push(rax)?;
        a.pushfq()?;
        a.pop(qword_ptr(DATA))?;
        a.pop(rax)?;
        guest_tests::micro::log_fault(a, 13, true)
    })?;
    let body = |a: &mut CodeAssembler| -> Written {
        rdpmc(a)?;
        a.pushfq()?;
        a.or(qword_ptr(rsp), ac)?;
        a.popfq()?;
        foreign_gp(a)?;
        rdpmc(a)
    };
    let program = program.at_cpl(cpl, program_counter, body)?;
    let guest = program.start(PCE);
    let ran = lab.run(&setup(), &guest)?;
    ensure!(
        ran.log == [count(), gp(cs(cpl)), count()],
        "{first:x?}: {:x?}",
        ran.log
    );
    ensure!(
        armed(&ran) == [Armed::Patch],
        "{first:x?}: {:?}",
        armed(&ran)
    );
    // Not every KVM hands AC over to a handler.
    let inside = ran.word(DATA)? & AC;
    let expected = if clac {
        0
    } else {
        let watched = Setup {
            trap: TrapMode::Breakpoint,
            ..setup()
        };
        lab.run(&watched, &guest)?.word(DATA)? & AC
    };
    ensure!(
        inside == expected,
        "{first:x?}: AC is {inside:x} in the handler"
    );
    let bytes = handler_bytes(&ran)?;
    ensure!(bytes[..first.len()] == *first, "{bytes:x?} at the end");
    let foreign = ran.events(|event| *event == TrapEvent::ForeignGp).len();
    ensure!(foreign == 1, "{foreign} foreign #GPs");
    Ok(())
}

/// What each `--rdpmc-trap` comes to, for a handler that can be patched and for one
/// that cannot; and what the guest sees of its own text.
fn modes(lab: &Lab) -> Result<()> {
    const PUSH: &[u8] = &[0x50, 0x58];
    let check = |mode, first: &'static [u8], expected: &[Armed], read: bool, byte: u8| {
        let guest = guest(first, 0, |a| {
            rdpmc(a)?;
            a.movzx(eax, byte_ptr(GP))?;
            a.xor(edx, edx)?;
            log_value(a)
        })?;
        let setup = Setup {
            trap: mode,
            ..setup()
        };
        let ran = lab.run(&setup, &guest)?;
        let byte = Entry::value(byte.into(), 0);
        let faulted = Entry {
            // The RDPMC lies before the place to go on at.
            b: 2u64.wrapping_neg(),
            ..gp(KERNEL_CS)
        };
        let told = format!("{mode:?} {first:x?}: {:x?} {:?}", ran.log, armed(&ran));
        let right = match ran.log.as_slice() {
            [value, seen] if read => *value == count() && *seen == byte,
            [fault, _, seen] if !read => *fault == faulted && *seen == byte,
            _ => false,
        };
        ensure!(right && armed(&ran) == expected, "{told}");
        let bytes = handler_bytes(&ran)?;
        ensure!(bytes[..first.len()] == *first, "{told}: {bytes:x?}");
        Ok(())
    };
    let refused = PatchRefusal::Instruction([0x50, 0x58, 0x50, 0x49]);
    let endbr = &ENDBR64;
    check(TrapMode::Auto, endbr, &[Armed::Patch], true, 0xe6)?;
    check(
        TrapMode::Auto,
        PUSH,
        &[Armed::Breakpoint(Some(refused))],
        true,
        0x50,
    )?;
    check(TrapMode::Patch, endbr, &[Armed::Patch], true, 0xe6)?;
    check(TrapMode::Patch, PUSH, &[], false, 0x50)?;
    check(
        TrapMode::Breakpoint,
        endbr,
        &[Armed::Breakpoint(None)],
        true,
        0xf3,
    )?;
    check(TrapMode::None, endbr, &[], false, 0xf3)
}

/// An RDPMC whose next instruction is the handler goes on into it, as into any code. (A
/// KVM that stopped at the OUT would move RIP behind it.)
fn before_the_handler(lab: &Lab) -> Result<()> {
    const ERROR: i32 = 7;
    let program = Program::new()?.gp_begins(&ENDBR64)?;
    let program = program.data(GP - 2, vec![0x0f, 0x33]).kernel(|a| {
        program_counter(a)?;
        let mut next = a.create_label();
        // The handler returns through a frame, as after a #GP.
        a.mov(rax, rsp)?;
        a.push(i32::from(KERNEL_SS))?;
        a.push(rax)?;
        a.pushfq()?;
        a.push(i32::from(KERNEL_CS))?;
        a.lea(r14, qword_ptr(next))?;
        a.mov(r15, r14)?;
        a.push(r14)?;
        a.push(ERROR)?;
        a.xor(ecx, ecx)?;
        a.mov(rbx, GP - 2)?;
        a.jmp(rbx)?;
        a.set_label(&mut next)?;
        log_value(a)?;
        exit(a)
    })?;
    let guest = program.start(PCE);
    let entered = Entry {
        a: ERROR.unsigned_abs().into(),
        ..gp(KERNEL_CS)
    };
    for trap in [TrapMode::Patch, TrapMode::Breakpoint] {
        let setup = Setup { trap, ..setup() };
        let log = lab.run(&setup, &guest)?.log;
        ensure!(log == [entered, count()], "{trap:?}: {log:x?}");
    }
    Ok(())
}

type Store = fn(&mut CodeAssembler) -> Written;

/// Stores of every kind to the handler's page take place, and RDPMC is trapped all
/// the time. The last one makes too many of them.
fn stores(lab: &Lab, cpl: u8) -> Result<()> {
    /// In the page of the handler, and at its end.
    const HERE: u64 = (GP & !0xfff) + 0xf00;
    const END: u64 = (GP & !0xfff) + 0x1000;
    let stores: [(&str, Store, u64); 9] = [
        ("a byte", |a| a.mov(byte_ptr(HERE), al), 0x88),
        ("a word", |a| a.mov(word_ptr(HERE), ax), 0x7788),
        ("a doubleword", |a| a.mov(dword_ptr(HERE), eax), 0x5566_7788),
        (
            "a quadword",
            |a| a.mov(qword_ptr(HERE), rax),
            0x1122_3344_5566_7788,
        ),
        (
            "add",
            |a| a.add(qword_ptr(HERE), rax),
            0x1122_3344_5566_7788,
        ),
        (
            "xchg",
            |a| {
                a.mov(rbx, HERE)?;
                a.xchg(qword_ptr(rbx), rax)
            },
            0x1122_3344_5566_7788,
        ),
        (
            "lock add",
            |a| a.lock().add(qword_ptr(HERE), rax),
            0x1122_3344_5566_7788,
        ),
        (
            "a string",
            |a| {
                a.mov(rdi, HERE)?;
                a.mov(ecx, 6)?;
                a.rep().stosb()
            },
            0x8888_8888_8888,
        ),
        (
            "across the page's end",
            |a| a.mov(qword_ptr(END - 3), rax),
            0x66_7788 << 40,
        ),
    ];
    for (name, store, expected) in stores {
        let body = |a: &mut CodeAssembler| -> Written {
            rdpmc(a)?;
            a.mov(rax, 0x1122_3344_5566_7788u64)?;
            store(a)?;
            rdpmc(a)?;
            foreign_gp(a)
        };
        let ran = lab.run(&setup(), &guest(&ENDBR64, cpl, body)?)?;
        let log = [count(), count(), gp(cs(cpl))];
        let events = &ran.outcome.vcpus[0].events;
        ensure!(ran.log == log, "{name}: {:x?}\n{events:x?}", ran.log);
        let at = if name == "across the page's end" {
            END - 8
        } else {
            HERE
        };
        let stored = ran.word(at)?;
        ensure!(stored == expected, "{name}: {stored:x}");
        if at != HERE {
            let beyond = ran.word(END)?;
            ensure!(
                beyond == 0x11_2233_4455,
                "{name}: {beyond:x} in the next page"
            );
        }
        let written = ran
            .events(|event| *event == TrapEvent::HandlerWritten)
            .len();
        ensure!(written > 0, "{name} went unnoticed");
    }
    // The eighth write ends it.
    let ran = lab.run(
        &setup(),
        &guest(&ENDBR64, cpl, |a| {
            for round in 0..12u32 {
                // The page is patched again by then.
                spin_for(a, 10_000_000)?;
                rdpmc(a)?;
                a.mov(dword_ptr(HERE), round)?;
                rdpmc(a)?;
            }
            Ok(())
        })?,
    )?;
    ensure!(ran.log == [count(); 24], "{:x?}", ran.log);
    let last = armed(&ran).last().copied();
    let given_up = Armed::Breakpoint(Some(PatchRefusal::Written(8)));
    ensure!(last == Some(given_up), "{:?}", armed(&ran));
    ensure!(ran.word(HERE)? == 11, "the last store is missing");
    ensure!(handler_bytes(&ran)? == ENDBR64, "the byte stays");
    Ok(())
}

/// A patch that is there before anything was programmed, as in a guest that woke from
/// hibernation: the handler runs, RDPMC reads, and the byte comes back at the end.
fn old_patch(lab: &Lab) -> Result<()> {
    const OLD: [u8; 4] = [0xe6, 0x0f, 0x1e, 0xfa];
    let program = Program::new()?.gp_begins(&OLD)?.kernel(|a| {
        foreign_gp(a)?;
        wrmsr(a, 0xc001_0201, COUNT)?;
        rdpmc(a)?;
        program_counter(a)?;
        rdpmc(a)?;
        foreign_gp(a)?;
        exit(a)
    })?;
    let ran = lab.run(&setup(), &program.start(0))?;
    let log = [gp(KERNEL_CS), count(), count(), gp(KERNEL_CS)];
    ensure!(ran.log == log, "{:x?}", ran.log);
    ensure!(armed(&ran) == [Armed::Patch], "{:?}", armed(&ran));
    ensure!(handler_bytes(&ran)? == ENDBR64, "the old patch stays");
    Ok(())
}

/// More than six seconds after the last counter was stopped it reads at both rings, without
/// a write meanwhile.
fn idle(lab: &Lab) -> Result<()> {
    let khz = crate::cores::tsc_khz(lab)?;
    let program = Program::new()?.gp_begins(&ENDBR64)?.kernel(|a| {
        set_counter(a)?;
        rdpmc(a)?;
        spin_for(a, 6500 * khz)?;
        rdpmc(a)?;
        enter_user(a, 0)
    })?;
    let program = program.user(|a| {
        rdpmc(a)?;
        foreign_gp(a)?;
        a.ud2()
    })?;
    let setup = Setup {
        timeout: Duration::from_secs(60),
        ..setup()
    };
    let ran = lab.run(&setup, &program.start(PCE))?;
    let log = [count(), count(), count(), gp(USER_CS)];
    ensure!(ran.log == log, "{:x?}", ran.log);
    ensure!(armed(&ran) == [Armed::Patch], "{:?}", armed(&ran));
    ensure!(handler_bytes(&ran)? == ENDBR64, "the bytes at the end");
    Ok(())
}

/// A vCPU begins to run another kernel, with an IDT and a handler of its own, as one that saves
/// what a crashed kernel has left. It tells the PMU nothing, and reads the handler of before.
/// The other vCPU was stopped, or reads counters on as if nothing was.
fn another_kernel(lab: &Lab, stopped: bool) -> Result<()> {
    const SECOND: u64 = KERNEL_CODE + 0x1_0000;
    const THIRD: u64 = KERNEL_CODE + 0x2_0000;
    const READS: u64 = DATA + 0x108;
    const POINTER: u64 = DATA + 0x110;
    const IDT: u64 = DATA + 0x2000;
    const GATE: u64 = IDT + 16 * 13;
    let read = |a: &mut CodeAssembler| {
        let mut wrong = a.create_label();
        a.set_label(&mut wrong)?;
        a.xor(ecx, ecx)?;
        a.lea(r15, qword_ptr(wrong))?;
        a.rdpmc()?;
        a.cmp(eax, i32::try_from(COUNT & 0x7fff_ffff).unwrap_or(0))?;
        a.jne(wrong)?;
        a.inc(qword_ptr(READS))
    };
    let wait_for_more = |a: &mut CodeAssembler, more: i32| {
        let mut again = a.create_label();
        a.mov(rax, qword_ptr(READS))?;
        a.add(rax, more)?;
        a.set_label(&mut again)?;
        a.pause()?;
        a.cmp(qword_ptr(READS), rax)?;
        a.jb(again)
    };
    let begins = |a: &mut CodeAssembler| {
        let mut again = a.create_label();
        program_counter(a)?;
        rdpmc(a)?;
        a.set_label(&mut again)?;
        a.pause()?;
        a.cmp(qword_ptr(READS), 0)?;
        a.je(again)?;
        a.mov(rsi, 0x6000u64)?;
        a.mov(rdi, IDT)?;
        a.mov(ecx, 16 * 32)?;
        a.rep().movsb()?;
        a.mov(word_ptr(GATE), u32::try_from(THIRD & 0xffff).unwrap_or(0))?;
        a.mov(word_ptr(GATE + 6), u32::try_from(THIRD >> 16).unwrap_or(0))?;
        a.mov(word_ptr(POINTER), 16 * 32 - 1)?;
        a.mov(rax, IDT)?;
        a.mov(qword_ptr(POINTER + 2), rax)?;
        a.lidt(qword_ptr(POINTER))
    };
    let program = Program::new()?.gp_begins(&ENDBR64)?.kernel(|a| {
        begins(a)?;
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.pause()?;
        a.cmp(byte_ptr(GP), i32::from(ENDBR64[0].cast_signed()))?;
        a.jne(again)?;
        if !stopped {
            wait_for_more(a, 100)?;
        }
        // Still the guest's own, and a #GP finds the handler of this kernel.
        a.cmp(byte_ptr(GP), i32::from(ENDBR64[0].cast_signed()))?;
        a.jne(again)?;
        foreign_gp(a)?;
        exit(a)
    })?;
    let program = program.code(THIRD, |a| {
        a.db(&ENDBR64)?;
        guest_tests::micro::log_fault(a, 13, true)
    })?;
    let program = program.code(SECOND, |a| {
        program_counter(a)?;
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.pause()?;
        read(a)?;
        if stopped {
            a.cli()?;
            a.hlt()?;
        }
        a.jmp(again)
    })?;
    let first = Start {
        rdi: LOG,
        ..Start::at(KERNEL_CODE, 0)
    };
    let guest = program.guest().start(first).start(Start::at(SECOND, 0));
    let ran = lab.run(&setup(), &guest)?;
    ensure!(ran.log == [count(), gp(KERNEL_CS)], "{:x?}", ran.log);
    ensure!(handler_bytes(&ran)? == ENDBR64, "the byte stays");
    let reads = ran.word(READS)?;
    ensure!(reads == 1 || !stopped && reads > 100, "{reads} reads");
    Ok(())
}

/// The gate leads to another handler in each round. The patch follows 64 times; from then
/// on there is a breakpoint, which moves for nobody's CPUs but the guest's.
fn restless(lab: &Lab) -> Result<()> {
    const GATE: u64 = 0x6000 + 16 * 13;
    const ROUNDS: usize = 70;
    const LEFT: u64 = DATA + 0x100;
    let other = u32::try_from(GP ^ Program::handler_address(12))?;
    let program = Program::new()?.gp_begins(&ENDBR64)?.handler(12, |a| {
        a.db(&ENDBR64)?;
        guest_tests::micro::log_fault(a, 13, true)
    })?;
    let program = program.kernel(|a| {
        program_counter(a)?;
        a.mov(dword_ptr(LEFT), i32::try_from(ROUNDS).unwrap_or(0))?;
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.xor(dword_ptr(GATE), other.cast_signed())?;
        set_counter(a)?;
        rdpmc(a)?;
        a.dec(dword_ptr(LEFT))?;
        a.jne(again)?;
        foreign_gp(a)?;
        exit(a)
    })?;
    let ran = lab.run(&setup(), &program.start(0))?;
    let mut log = vec![count(); ROUNDS];
    log.push(gp(KERNEL_CS));
    ensure!(ran.log == log, "{:x?}", ran.log);
    let given_up = Armed::Breakpoint(Some(PatchRefusal::TooOften(64)));
    ensure!(armed(&ran) == [Armed::Patch, given_up], "{:?}", armed(&ran));
    ensure!(handler_bytes(&ran)? == ENDBR64, "the byte stays");
    Ok(())
}

/// Both vCPUs on one core, with the shortest slice there is.
const ONE_CORE: Option<CorePlan> = Some(CorePlan {
    cores: 1,
    slice: Duration::from_millis(1),
});

/// One vCPU reads all the time, the other writes to the handler's page now and then:
/// no RDPMC is lost, whether the handler is patched, watched, or on its way.
fn two_vcpus(lab: &Lab, cores: Option<CorePlan>) -> Result<()> {
    const SECOND: u64 = KERNEL_CODE + 0x1_0000;
    const STOP: u64 = DATA + 0x100;
    const READS: u64 = DATA + 0x108;
    const PAGE: u64 = GP & !0xfff;
    let program = Program::new()?.gp_begins(&ENDBR64)?.kernel(|a| {
        let mut again = a.create_label();
        program_counter(a)?;
        a.set_label(&mut again)?;
        let mut wrong = a.create_label();
        a.xor(ecx, ecx)?;
        a.lea(r15, qword_ptr(wrong))?;
        a.rdpmc()?;
        a.cmp(eax, i32::try_from(COUNT & 0x7fff_ffff).unwrap_or(0))?;
        a.jne(wrong)?;
        a.inc(qword_ptr(READS))?;
        a.cmp(qword_ptr(STOP), 0)?;
        a.je(again)?;
        a.set_label(&mut wrong)?;
        log_value(a)?;
        exit(a)
    })?;
    let program = program.code(SECOND, |a| {
        program_counter(a)?;
        for round in 0..12 {
            let mut unread = a.create_label();
            a.mov(rax, qword_ptr(READS))?;
            a.set_label(&mut unread)?;
            a.pause()?;
            a.cmp(qword_ptr(READS), rax)?;
            a.je(unread)?;
            a.mov(dword_ptr(PAGE + 0xf00), round)?;
            a.mov(dword_ptr(GP), u32::from_le_bytes(ENDBR64).cast_signed())?;
        }
        a.mov(qword_ptr(STOP), 1)?;
        let mut rest = a.create_label();
        a.set_label(&mut rest)?;
        a.pause()?;
        a.jmp(rest)
    })?;
    let first = Start {
        rdi: LOG,
        ..Start::at(KERNEL_CODE, 0)
    };
    let guest = program.guest().start(first).start(Start::at(SECOND, 0));
    let setup = Setup { cores, ..setup() };
    let ran = lab.run(&setup, &guest)?;
    ensure!(ran.log == [count()], "{:x?}", ran.log);
    ensure!(ran.word(READS)? >= 12, "{} reads", ran.word(READS)?);
    ensure!(ran.word(PAGE + 0xf00)? == 11, "a store is missing");
    ensure!(handler_bytes(&ran)? == ENDBR64, "the bytes at the end");
    Ok(())
}

/// NMIs hit RDPMCs, their handler, and each other's RDPMC.
fn nmis(lab: &Lab) -> Result<()> {
    const COUNTED: u64 = DATA + 0x200;
    let apic = crate::overflow::Apic::X;
    let program = Program::new()?.gp_begins(&ENDBR64)?.handler(2, |a| {
        for register in [rax, rcx, rdx] {
            a.push(register)?;
        }
        a.mov(ecx, 1)?;
        a.rdpmc()?;
        a.mov(qword_ptr(COUNTED + 8), rax)?;
        a.inc(qword_ptr(COUNTED))?;
        wrmsr(a, 0xc001_0201, (1 << 48) - 1_500_000)?;
        for register in [rdx, rcx, rax] {
            a.pop(register)?;
        }
        a.iretq()
    })?;
    let program = program.kernel(|a| {
        apic.enable(a)?;
        apic.route(a, 0x400)?;
        wrmsr(a, 0xc001_0203, 0x77)?;
        wrmsr(a, 0xc001_0201, (1 << 48) - 1_500_000)?;
        wrmsr(a, 0xc001_0200, 0x53_0076)?;
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.mov(ecx, 1)?;
        a.rdpmc()?;
        foreign_gp(a)?;
        a.mov(r12, LOG)?;
        a.cmp(qword_ptr(COUNTED), 20)?;
        a.jb(again)?;
        wrmsr(a, 0xc001_0200, 0)?;
        a.mov(ecx, 1)?;
        a.rdpmc()?;
        log_value(a)?;
        exit(a)
    })?;
    let ran = lab.run(&setup(), &program.start(0))?;
    let [last] = ran.log.as_slice() else {
        bail!("{:x?}", ran.log);
    };
    ensure!((last.a, last.b) == (0x77, 0), "{last:x?}");
    ensure!(
        ran.word(COUNTED + 8)? == 0x77,
        "the NMI's RDPMC read something else"
    );
    ensure!(armed(&ran) == [Armed::Patch], "{:?}", armed(&ran));
    Ok(())
}

/// RDPMC and a foreign #GP in both rings.
fn in_both_rings(
    lab: &Lab,
    program: Program,
    before: fn(&mut CodeAssembler) -> Written,
) -> Result<()> {
    let body = |a: &mut CodeAssembler| -> Written {
        rdpmc(a)?;
        foreign_gp(a)
    };
    let program = program.gp_begins(&ENDBR64)?.kernel(|a| {
        program_counter(a)?;
        before(a)?;
        body(a)?;
        enter_user(a, 0)
    })?;
    let program = program.user(|a| {
        body(a)?;
        a.ud2()
    })?;
    let ran = lab.run(&setup(), &program.start(PCE))?;
    let log = [count(), gp(KERNEL_CS), count(), gp(USER_CS)];
    ensure!(ran.log == log, "{:x?}", ran.log);
    ensure!(armed(&ran) == [Armed::Patch], "{:?}", armed(&ran));
    Ok(())
}

/// The gate names a stack of the TSS (IST).
fn own_stack(lab: &Lab) -> Result<()> {
    const IST1: u64 = 0x7000 + 0x24;
    const GATE_IST: u64 = 0x6000 + 16 * 13 + 4;
    let program = Program::new()?
        .data(IST1, 0x8_8000u64.to_le_bytes().to_vec())
        .data(GATE_IST, vec![1]);
    in_both_rings(lab, program, |_| Ok(()))
}

/// After the look at the handler the guest switches to another root, as a kernel does
/// that hides itself from its programs.
fn other_page_tables(lab: &Lab) -> Result<()> {
    const OTHER_ROOT: u64 = DATA + 0x4000;
    const PDPT: u64 = 0x2007;
    let program = Program::new()?.data(OTHER_ROOT, PDPT.to_le_bytes().to_vec());
    in_both_rings(lab, program, |a| {
        a.mov(rax, OTHER_ROOT)?;
        a.mov(cr3, rax)
    })
}

/// A #GP handler that is told in R13 that the next entry has no error code.
fn for_two(program: Program, vector: u8) -> Result<Program> {
    program.handler(13, |a| {
        let mut other = a.create_label();
        a.db(&ENDBR64)?;
        a.test(r13, r13)?;
        a.jne(other)?;
        guest_tests::micro::log_fault(a, 13, true)?;
        a.set_label(&mut other)?;
        a.xor(r13, r13)?;
        guest_tests::micro::log_fault(a, vector, false)
    })
}

/// #UD leads to the #GP handler, too, and has no error code. An RDPMC whose frame would
/// begin where the #UD's error code would be makes no difference.
fn shared_handler(lab: &Lab) -> Result<()> {
    let mut program = for_two(Program::new()?, 6)?.kernel(|a| {
        a.xor(r13, r13)?;
        program_counter(a)?;
        rdpmc(a)?;
        let (mut fault, mut next) = (a.create_label(), a.create_label());
        a.lea(r14, qword_ptr(fault))?;
        a.lea(r15, qword_ptr(next))?;
        a.mov(r13, 1u64)?;
        a.set_label(&mut fault)?;
        a.ud2()?;
        a.set_label(&mut next)?;
        rdpmc(a)?;
        exit(a)
    })?;
    program = program.data(0x6000 + 16 * 6, (GP & 0xffff).to_le_bytes()[..2].to_vec());
    program = program.data(0x6000 + 16 * 6 + 6, (GP >> 16).to_le_bytes()[..2].to_vec());
    let ran = lab.run(&setup(), &program.start(0))?;
    let undefined = Entry {
        kind: FAULT + 6,
        ..gp(KERNEL_CS)
    };
    ensure!(ran.log == [count(), undefined, count()], "{:x?}", ran.log);
    ensure!(armed(&ran) == [Armed::Patch], "{:?}", armed(&ran));
    Ok(())
}

/// INT 13 pushes no error code: foreign, and its frame stays as it is.
fn software_interrupt(lab: &Lab, cpl: u8) -> Result<()> {
    let body = |a: &mut CodeAssembler| -> Written {
        rdpmc(a)?;
        let mut next = a.create_label();
        a.lea(r14, qword_ptr(next))?;
        a.lea(r15, qword_ptr(next))?;
        a.mov(r13, 1u64)?;
        a.int(13)?;
        a.set_label(&mut next)?;
        rdpmc(a)
    };
    let begin = |a: &mut CodeAssembler| -> Written {
        a.xor(r13, r13)?;
        program_counter(a)
    };
    let program = for_two(Program::new()?, 77)?.at_cpl(cpl, begin, body)?;
    let ran = lab.run(&setup(), &program.start(PCE))?;
    let interrupt = Entry {
        kind: FAULT + 77,
        ..gp(cs(cpl))
    };
    ensure!(ran.log == [count(), interrupt, count()], "{:x?}", ran.log);
    ensure!(armed(&ran) == [Armed::Patch], "{:?}", armed(&ran));
    Ok(())
}

/// All four debug registers belong to the guest while it counts, and its breakpoints
/// on code at CPL 0 work as without a PMU.
fn debug_registers(lab: &Lab) -> Result<()> {
    /// Four breakpoints on execution, enabled globally.
    const DR7: u64 = 0x400 | 0b1010_1010;
    let program = Program::new()?.gp_begins(&ENDBR64)?.handler(1, |a| {
        // The slot that hit is not needed again.
        for register in [rax, rcx, rdx] {
            a.push(register)?;
        }
        a.mov(rax, dr6)?;
        a.and(eax, 0xf)?;
        a.xor(edx, edx)?;
        log_value(a)?;
        a.xor(eax, eax)?;
        a.mov(dr6, rax)?;
        a.mov(rax, dr7)?;
        a.bsf(ecx, eax)?;
        a.btr(eax, ecx)?;
        a.mov(dr7, rax)?;
        for register in [rdx, rcx, rax] {
            a.pop(register)?;
        }
        a.iretq()
    })?;
    let program = program.kernel(|a| {
        program_counter(a)?;
        let mut labels = [(); 4].map(|()| a.create_label());
        for (label, register) in labels.iter().zip([dr0, dr1, dr2, dr3]) {
            a.lea(rax, qword_ptr(*label))?;
            a.mov(register, rax)?;
        }
        a.mov(rax, DR7)?;
        a.mov(dr7, rax)?;
        for label in &mut labels {
            rdpmc(a)?;
            a.set_label(label)?;
            a.nop()?;
        }
        exit(a)
    })?;
    let ran = lab.run(&setup(), &program.start(0))?;
    let hit = |bit: u64| Entry::value(bit, 0);
    let log: Vec<Entry> = [1, 2, 4, 8]
        .iter()
        .flat_map(|bit| [count(), hit(*bit)])
        .collect();
    ensure!(ran.log == log, "{:x?}", ran.log);
    let full = ran.events(|event| *event == TrapEvent::DebugRegistersFull);
    ensure!(
        full.is_empty() && armed(&ran) == [Armed::Patch],
        "{:?}",
        armed(&ran)
    );
    Ok(())
}

/// The guest's breakpoint on the instruction behind an RDPMC hits each time.
fn right_behind(lab: &Lab, cpl: u8) -> Result<()> {
    /// A breakpoint on execution in slot 0, enabled globally.
    const DR7: u64 = 0x402;
    const TIMES: u32 = 50;
    const RF: i32 = 1 << 16;
    let called = if cpl == 3 { USER_CODE } else { KERNEL_CODE } + 0x1000;
    let program = Program::new()?.gp_begins(&ENDBR64)?.handler(1, |a| {
        a.inc(qword_ptr(DATA))?;
        a.or(qword_ptr(rsp + 16), RF)?;
        a.iretq()
    })?;
    let begin = |a: &mut CodeAssembler| -> Written {
        program_counter(a)?;
        a.mov(rax, called + 2)?;
        a.mov(dr0, rax)?;
        a.mov(rax, DR7)?;
        a.mov(dr7, rax)
    };
    let body = |a: &mut CodeAssembler| -> Written {
        a.mov(rbx, u64::from(TIMES))?;
        a.mov(r14, called)?;
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.xor(ecx, ecx)?;
        a.call(r14)?;
        a.dec(rbx)?;
        a.jne(again)?;
        a.xor(edx, edx)?;
        a.mov(rax, qword_ptr(DATA))?;
        log_value(a)
    };
    let program = program.at_cpl(cpl, begin, body)?.code(called, |a| {
        a.rdpmc()?;
        a.nop()?;
        a.ret()
    })?;
    let log = lab.run(&setup(), &program.start(PCE))?.log;
    let hits = Entry::value(TIMES.into(), 0);
    ensure!(log == [hits], "{log:x?}");
    Ok(())
}

/// A counter that needs single steps has the patch taken back for good.
fn stepped(lab: &Lab) -> Result<()> {
    let program = Program::new()?.gp_begins(&ENDBR64)?.kernel(|a| {
        set_counter(a)?;
        rdpmc(a)?;
        // Retired instructions.
        wrmsr(a, 0xc001_0204, 0x53_00c0)?;
        a.nop()?;
        a.movzx(eax, byte_ptr(GP))?;
        a.xor(edx, edx)?;
        log_value(a)?;
        rdpmc(a)?;
        foreign_gp(a)?;
        wrmsr(a, 0xc001_0204, 0)?;
        rdpmc(a)?;
        exit(a)
    })?;
    let ran = lab.run(&Setup::step("amd-core"), &program.start(0))?;
    let byte = Entry::value(ENDBR64[0].into(), 0);
    let log = [count(), byte, count(), gp(KERNEL_CS), count()];
    ensure!(ran.log == log, "{:x?}", ran.log);
    let expected = [Armed::Patch, Armed::Breakpoint(Some(PatchRefusal::Stepped))];
    ensure!(armed(&ran) == expected, "{:?}", armed(&ran));
    Ok(())
}

/// A guest that jumps to its handler with TF set has a #DB behind each instruction.
fn stepped_by_the_guest(lab: &Lab) -> Result<()> {
    /// Behind the ENDBR64 and a NOP.
    const LAST: i32 = 0x10_0000 + 0x8_0000 + 13 * 0x100 + 5;
    let program = Program::new()?.handler(1, |a| {
        let mut on = a.create_label();
        a.mov(rax, qword_ptr(rsp))?;
        a.xor(edx, edx)?;
        log_value(a)?;
        a.cmp(rax, LAST)?;
        a.jb(on)?;
        a.and(qword_ptr(rsp + 16), !0x100)?;
        a.set_label(&mut on)?;
        a.iretq()
    })?;
    let program = program.handler(13, |a| {
        a.db(&ENDBR64)?;
        a.nop()?;
        a.nop()?;
        exit(a)
    })?;
    let program = program.kernel(|a| {
        program_counter(a)?;
        a.mov(rbx, GP)?;
        a.pushfq()?;
        a.or(qword_ptr(rsp), 0x100)?;
        a.popfq()?;
        a.jmp(rbx)
    })?;
    let ran = lab.run(&setup(), &program.start(0))?;
    let at = |a| Entry::value(a, 0);
    ensure!(
        ran.log == [at(GP), at(GP + 4), at(GP + 5)],
        "{:x?}",
        ran.log
    );
    ensure!(armed(&ran) == [Armed::Patch], "{:?}", armed(&ran));
    Ok(())
}

/// Frames and accessed bits in the handler's page, whose stores no KVM need tell us:
/// such a handler is not patched.
fn beside_tables(lab: &Lab) -> Result<()> {
    const STACK: u64 = (GP & !0xfff) + 0xff0;
    const GDT: u64 = 0x5000;
    const IDT: u64 = 0x6000;
    const RSP0: u64 = 0x7004;
    let check = |name: &str, handler: u64, prepare: fn(&mut CodeAssembler) -> Written| {
        let program = Program::new()?.gp_begins(&ENDBR64)?.code(handler, |a| {
            a.db(&ENDBR64)?;
            guest_tests::micro::log_fault(a, 13, true)
        })?;
        let program = program.kernel(|a| {
            a.mov(rbx, IDT + 13 * 16)?;
            a.mov(word_ptr(rbx), i32::try_from(handler & 0xffff).unwrap_or(0))?;
            a.mov(word_ptr(rbx + 6), i32::try_from(handler >> 16).unwrap_or(0))?;
            prepare(a)?;
            program_counter(a)?;
            // A descriptor that was not accessed yet.
            a.mov(eax, 0x10)?;
            a.mov(iced_x86::code_asm::ds, eax)?;
            rdpmc(a)?;
            foreign_gp(a)?;
            enter_user(a, 0)
        })?;
        let program = program.user(|a| {
            rdpmc(a)?;
            a.ud2()
        })?;
        let ran = lab.run(&setup(), &program.start(PCE))?;
        let log = [count(), gp(KERNEL_CS), count()];
        ensure!(ran.log == log, "{name}: {:x?}", ran.log);
        let refused = Armed::Breakpoint(Some(PatchRefusal::ProcessorStores));
        ensure!(armed(&ran) == [refused], "{name}: {:?}", armed(&ran));
        Ok(())
    };
    check("the stack", GP, |a| a.mov(rsp, STACK))?;
    check("the stack of CPL 0", GP, |a| {
        a.mov(rax, STACK)?;
        a.mov(qword_ptr(RSP0), rax)
    })?;
    check("the GDT", GDT + 0x800, |a| {
        a.mov(rax, GDT + 0x10 + 5)?;
        a.and(byte_ptr(rax), -2)
    })
}
