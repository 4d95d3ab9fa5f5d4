//! Who guesses cookies is kept off its core, and nobody else waits.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use guest_tests::micro::{
    DATA, LOG, Lab, Op, Program, Script, Setup, Test, Written, exit, tsc, wrmsr,
};
use iced_x86::code_asm::{CodeAssembler, ecx, esi, qword_ptr, r8, r10, r11, rax, rsi};
use vmm::micro::{KERNEL_CODE, MicroRun, Start};
use vmm::sched::{CorePlan, CoreReport};
use vmm::vcpu::{TrapEvent, VcpuEnd};

use super::{OTHER_KEY, TAKE, alias, key, setup, told};

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "pcr::guessing_has_a_penalty",
        run: penalty,
    },
    Test {
        name: "pcr::guesses_of_all_vcpus_count_together",
        run: together,
    },
    Test {
        name: "pcr::a_barred_vcpu_can_be_stopped",
        run: stopped,
    },
    Test {
        name: "pcr::a_guesser_leaves_its_core_to_others",
        run: on_one_core,
    },
    Test {
        name: "pcr::two_guessers_leave_their_core_empty",
        run: all_guess,
    },
];

/// Wrong cookies that cost nothing, and what the next one does.
const FREE: usize = 16;
const FIRST_PENALTY: Duration = Duration::from_millis(10);

/// One guess too many: the first penalty is 10 ms.
fn penalty(lab: &Lab) -> Result<()> {
    const WRONG: Op = Op::With(OTHER_KEY, &Op::WriteGp(key(1), OTHER_KEY));
    const AGAIN: Op = Op::With(OTHER_KEY, &Op::Read(alias(1), 0));
    let guesses = [&TAKE[..], &[WRONG; FREE], &[AGAIN]].concat();
    let script = Script {
        name: "guess",
        cr4: 0,
        kernel: &guesses[..],
        user: &[],
    };
    for (cores, guesses, expected) in [
        (None, FREE, false),
        (None, FREE + 1, true),
        (plan(), FREE + 1, true),
    ] {
        if lab.is_emulated() && cores.is_some() {
            continue;
        }
        let setup = Setup { cores, ..setup() };
        let kernel = &script.kernel[..TAKE.len() + guesses];
        let began = Instant::now();
        let ran = Script { kernel, ..script }.check(lab, &setup)?;
        let barred = ran.events(|event| matches!(event, TrapEvent::LockedOut { .. }));
        ensure!(barred.len() == usize::from(expected), "{barred:?}");
        // In virtual time it is skipped.
        let waits = expected && !lab.is_emulated();
        ensure!(!waits || began.elapsed() >= FIRST_PENALTY);
        let end = if expected {
            "refused cookie x16, dropped-read cookie, barred"
        } else {
            "refused cookie x16"
        };
        let all = format!("reserved, access-set, {end}");
        ensure!(told(&ran) == all, "{}", told(&ran));
    }
    Ok(())
}

/// What one vCPU guesses free of charge the others have guessed, too: a cookie may be the
/// same on each. The first guess of the second one locks it out, and the first one runs.
fn together(lab: &Lab) -> Result<()> {
    const READY: u64 = DATA + 0x100;
    const DONE: u64 = DATA + 0x108;
    let guess = |a: &mut CodeAssembler, times: usize| {
        wrmsr(a, key(1), super::KEY)?;
        a.mov(rsi, OTHER_KEY)?;
        a.mov(ecx, alias(1))?;
        (0..times).try_for_each(|_| a.rdmsr())
    };
    let await_one = |a: &mut CodeAssembler, at: u64| {
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.pause()?;
        a.cmp(qword_ptr(at), 1)?;
        a.jne(again)
    };
    let program = Program::new()?.kernel(|a| {
        guess(a, FREE)?;
        a.inc(qword_ptr(READY))?;
        await_one(a, DONE)?;
        exit(a)
    })?;
    let program = program.code(OTHERS, |a| {
        let mut rest = a.create_label();
        await_one(a, READY)?;
        guess(a, 1)?;
        a.inc(qword_ptr(DONE))?;
        a.set_label(&mut rest)?;
        a.pause()?;
        a.jmp(rest)
    })?;
    let guest = program.start(0).start(Start::at(OTHERS, 0));
    let ran = lab.run(&setup(), &guest)?;
    let barred = ran.outcome.vcpus.iter().map(|vcpu| {
        let events = vcpu.events.iter();
        events
            .filter(|event| matches!(event, TrapEvent::LockedOut { .. }))
            .count()
    });
    let barred: Vec<usize> = barred.collect();
    ensure!(barred == [0, 1], "{barred:?} lock-outs");
    Ok(())
}

fn plan() -> Option<CorePlan> {
    Some(CorePlan {
        cores: 1,
        slice: Duration::from_millis(5),
    })
}

/// Takes PMC1 and guesses for ever.
fn guesser(a: &mut CodeAssembler) -> Written {
    let mut again = a.create_label();
    wrmsr(a, key(1), super::KEY)?;
    a.mov(rsi, OTHER_KEY)?;
    a.mov(ecx, alias(1))?;
    a.set_label(&mut again)?;
    a.rdmsr()?;
    // A guess that would be right once is no reason to stop.
    a.inc(rsi)?;
    a.xor(esi, 0x55)?;
    a.jmp(again)
}

/// Waiting out a penalty of a second does not keep the run from its end.
fn stopped(lab: &Lab) -> Result<()> {
    for cores in [None, plan()] {
        let run = MicroRun {
            model: Some(pmu_virt::PmuModel::parse("amd-core")?),
            backend: setup().backend,
            quirks: lab.probe.quirks(),
            step: lab.probe.step_support(),
            trap: lab.probe.trap_plan(vmm::vcpu::TrapMode::Auto),
            pmi_floor_us: 100,
            timeout: Duration::from_secs(1),
            record: true,
            cores,
            pcr: setup().pcr,
        };
        let outcome = run.run(lab.engine(), &Program::new()?.kernel(guesser)?.start(0))?;
        ensure!(outcome.timed_out && outcome.vcpus[0].end == VcpuEnd::Stopped);
        let took = outcome.stopping;
        ensure!(took < Duration::from_millis(250), "{took:?} to stop");
        let events = &outcome.vcpus[0].events;
        let barred = |event: &&TrapEvent| matches!(event, TrapEvent::LockedOut { .. });
        let penalties = events.iter().filter(barred).count();
        // 10, 20, 40 ms and so on: no more than seven fit into a second.
        ensure!((4..=8).contains(&penalties), "{penalties} penalties");
    }
    Ok(())
}

/// Rounds of the busy vCPU's loop, and the longest of them in TSC ticks.
const ROUNDS: u64 = DATA + 0x100;
const LONGEST: u64 = DATA + 0x108;
const OTHERS: u64 = KERNEL_CODE + 0x1_0000;
/// How long it computes: the guesser is barred for 10, 20, 40, 80 and 160 ms
/// meanwhile, and once more.
const BUSY_MS: u64 = 500;
/// Shorter than the longest of these, and longer than a slice of the guesser and
/// what a busy host may take.
const MOST_MS: u64 = 140;

/// While a vCPU guesses as fast as it can, the other one of its core goes on
/// computing: none of its rounds takes as long as a penalty. Where other work on
/// this machine holds the core's thread up, another try may be luckier; a core that
/// waited for its guesser would fail each.
fn on_one_core(lab: &Lab) -> Result<()> {
    let khz = super::super::cores::tsc_khz(lab)?;
    let mut told = String::new();
    for _ in 0..4 {
        let (longest, core) = beside_a_guesser(lab, khz)?;
        ensure!(core.locked_out >= 5, "{core}");
        let longest = longest / khz;
        told = format!("  the longest round took {longest} ms; {core}");
        if longest < MOST_MS {
            println!("{told}");
            return Ok(());
        }
    }
    bail!("the other vCPU was held up: {told}")
}

fn beside_a_guesser(lab: &Lab, khz: u64) -> Result<(u64, CoreReport)> {
    let program = Program::new()?.kernel(|a| {
        tsc(a)?;
        a.mov(r8, rax)?;
        a.mov(r10, BUSY_MS * khz)?;
        a.add(r10, rax)?;
        let (mut again, mut shorter) = (a.create_label(), a.create_label());
        a.set_label(&mut again)?;
        a.inc(qword_ptr(ROUNDS))?;
        tsc(a)?;
        a.mov(r11, rax)?;
        a.sub(r11, r8)?;
        a.mov(r8, rax)?;
        a.cmp(r11, qword_ptr(LONGEST))?;
        a.jbe(shorter)?;
        a.mov(qword_ptr(LONGEST), r11)?;
        a.set_label(&mut shorter)?;
        a.cmp(rax, r10)?;
        a.jb(again)?;
        exit(a)
    })?;
    let program = program.code(OTHERS, guesser)?;
    let guest = program
        .guest()
        .start(Start {
            rdi: LOG,
            ..Start::at(KERNEL_CODE, 0)
        })
        .start(Start::at(OTHERS, 0));
    let setup = Setup {
        cores: plan(),
        timeout: Duration::from_secs(60),
        ..setup()
    };
    let ran = lab.run(&setup, &guest)?;
    ensure!(ran.word(ROUNDS)? > 100);
    let core = ran.outcome.cores.first().context("a core")?.clone();
    Ok((ran.word(LONGEST)?, core))
}

/// With nobody left to run, the core's thread sleeps.
fn all_guess(lab: &Lab) -> Result<()> {
    let program = Program::new()?.kernel(guesser)?.code(OTHERS, guesser)?;
    let guest = program
        .guest()
        .start(Start::at(KERNEL_CODE, 0))
        .start(Start::at(OTHERS, 0));
    let run = MicroRun {
        model: Some(pmu_virt::PmuModel::parse("amd-core")?),
        backend: setup().backend,
        quirks: lab.probe.quirks(),
        step: lab.probe.step_support(),
        trap: lab.probe.trap_plan(vmm::vcpu::TrapMode::Auto),
        pmi_floor_us: 100,
        timeout: Duration::from_secs(2),
        record: false,
        cores: plan(),
        pcr: setup().pcr,
    };
    let outcome = run.run(lab.engine(), &guest)?;
    let core = outcome.cores.first().context("a core")?;
    ensure!(core.locked_out >= 8, "{core}");
    ensure!(outcome.stopping < Duration::from_millis(250));
    Ok(())
}
