//! Conditional branches by each processor's own code, which other processors read as something
//! else.

use anyhow::{Context, Result, ensure};
use guest_tests::micro::{
    Lab, LabRun, Program, Setup, Test, Written, enter_user, exit, log_value, wrmsr,
};
use iced_x86::code_asm::{CodeAssembler, eax, ecx, edx, rax, rcx};
use pmu_virt::{CounterId, EventCode, KnownEvent, PmuModel, Provenance, Reading, Register};
use vmm::cpuid::Identity;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "step::conditional_branches_at_cpl_0",
        run: |lab| on_every_processor(lab, 0),
    },
    Test {
        name: "step::conditional_branches_at_cpl_3",
        run: |lab| on_every_processor(lab, 3),
    },
    Test {
        name: "step::codes_of_other_processors_stand_still",
        run: foreign_codes,
    },
];

/// What some processor has as its code: event select and unit mask.
const CODES: [(u16, u8); 3] = [(0xc4, 0x01), (0xc4, 0x11), (0xd1, 0x00)];
const ENABLED: u64 = 0x40_0000;
const USR: u64 = 0x1_0000;
const OS: u64 = 0x2_0000;

/// Those of [`region`]: JNE three times, JE and JNE not taken, LOOP three times, JRCXZ.
const CONDITIONAL: u64 = 3 + 2 + 3 + 1;

/// Every kind of conditional branch, taken or not, among branches that are none.
fn region(a: &mut CodeAssembler) -> Written {
    let (mut again, mut function, mut over) =
        (a.create_label(), a.create_label(), a.create_label());
    let (mut round, mut end) = (a.create_label(), a.create_label());
    a.mov(ecx, 3)?;
    a.set_label(&mut again)?;
    a.dec(ecx)?;
    // Taken twice.
    a.jne(again)?;
    a.jmp(over)?;
    a.set_label(&mut function)?;
    a.ret()?;
    a.set_label(&mut over)?;
    a.call(function)?;
    a.xor(eax, eax)?;
    a.jne(again)?;
    a.inc(eax)?;
    a.je(again)?;
    a.cmovne(rax, rcx)?;
    a.mov(ecx, 3)?;
    a.set_label(&mut round)?;
    a.nop()?;
    // Taken twice.
    a.loop_(round)?;
    a.jrcxz(end)?;
    a.set_label(&mut end)?;
    a.nop()
}

/// The MSRs of the first selects and counters, and of the common enable register.
struct Registers {
    selects: Vec<u32>,
    counters: Vec<u32>,
    global: Option<u32>,
}

impl Registers {
    fn of(model: &PmuModel) -> Self {
        let find = |wanted: &dyn Fn(&Register) -> bool| {
            let mut all = model.registers();
            all.find(|(_, register)| wanted(register))
                .map(|(msr, _)| msr)
        };
        let select = |n| find(&|register| *register == Register::Select(n));
        let counter = |n| {
            let id = CounterId::Programmable(n);
            find(
                &|register| matches!(register, Register::Counter { counter, .. } if *counter == id),
            )
        };
        Self {
            selects: (0..4).filter_map(select).collect(),
            counters: (0..4).filter_map(counter).collect(),
            global: find(&|register| *register == Register::GlobalControl),
        }
    }

    /// Counters of `selects` are on, the global register last.
    fn start(&self, a: &mut CodeAssembler, selects: &[u64]) -> Written {
        for (msr, select) in self.selects.iter().zip(selects) {
            wrmsr(a, *msr, *select)?;
        }
        match self.global {
            Some(msr) => wrmsr(a, msr, (1 << selects.len()) - 1),
            None => Ok(()),
        }
    }

    /// Logs what `count` counters have: moves and WRMSR, no branch of any kind before.
    fn log(&self, a: &mut CodeAssembler, count: usize) -> Written {
        for msr in self.counters.iter().take(count) {
            a.mov(ecx, *msr)?;
            a.xor(edx, edx)?;
            a.rdmsr()?;
            log_value(a)?;
        }
        exit(a)
    }
}

/// Counts `selects` in [`region`] at CPL `cpl`: what the guest read.
fn counted(lab: &Lab, model: &PmuModel, cpl: u8, selects: &[u64]) -> Result<(LabRun, Vec<u64>)> {
    let registers = Registers::of(model);
    let stop = |a: &mut CodeAssembler| registers.log(a, selects.len());
    let program = Program::new()?.handler(6, stop)?.kernel(|a| {
        registers.start(a, selects)?;
        if cpl == 3 {
            return enter_user(a, 0);
        }
        region(a)?;
        stop(a)
    })?;
    let program = program.user(|a| {
        region(a)?;
        a.ud2()
    })?;
    let ran = lab.run(&Setup::step(&model.to_string()), &program.start(0))?;
    let values = ran
        .log
        .iter()
        .map(|entry| entry.b << 32 | entry.a)
        .collect();
    Ok((ran, values))
}

fn code_of(model: &PmuModel) -> Option<(u16, u8)> {
    match EventCode::of(model.events(), KnownEvent::ConditionalBranches)? {
        EventCode::Selected { select, umask, .. } => Some((select, umask)),
        _ => None,
    }
}

fn select(code: (u16, u8), rings: u64) -> u64 {
    u64::from(code.0) | u64::from(code.1) << 8 | rings | ENABLED
}

/// At both rings, at CPL 0 alone, at CPL 1 to 3 alone.
fn on_every_processor(lab: &Lab, cpl: u8) -> Result<()> {
    let mut processors = 0;
    for identity in Identity::all() {
        let model = identity.pmu()?;
        let Some(code) = code_of(&model) else {
            continue;
        };
        processors += 1;
        let selects = [OS | USR, OS, USR].map(|rings| select(code, rings));
        // Where CPL 3 is not stepped, a counter of it alone is unavailable.
        let used = if cpl == 3 { 3 } else { 2 };
        let (ran, values) = counted(lab, &model, cpl, &selects[..used])?;
        let expected = match cpl {
            0 => vec![CONDITIONAL, CONDITIONAL],
            _ => vec![CONDITIONAL, 0, CONDITIONAL],
        };
        let name = identity.name();
        ensure!(values == expected, "{name}: {values:?}, not {expected:?}");
        for counter in (0u8..).take(used).map(CounterId::Programmable) {
            let report = ran.report(0, counter)?;
            let exact = matches!(
                report.reading,
                Reading::Counted {
                    provenance: Provenance::Exact,
                    ..
                }
            );
            ensure!(exact && report.loss.is_none(), "{name}: {report:?}");
        }
    }
    ensure!(processors == 8, "{processors} processors have such a code");
    Ok(())
}

/// What the processor has not under this code is not counted as conditional branches.
fn foreign_codes(lab: &Lab) -> Result<()> {
    let plain = ["intel-v2", "intel-v5"].map(PmuModel::parse);
    let own = Identity::all().map(Identity::pmu);
    for model in own.chain(plain) {
        let model = model.context("a model")?;
        // AMD's C4 means taken branches, whatever its unit mask.
        let others = CODES.into_iter().filter(|(select, umask)| {
            let event = EventCode::Selected {
                family: model.events(),
                select: *select,
                umask: *umask,
            };
            event.known().is_none()
        });
        let selects: Vec<u64> = others.map(|code| select(code, OS | USR)).collect();
        let (ran, values) = counted(lab, &model, 0, &selects)?;
        ensure!(
            values.iter().all(|value| *value == 0),
            "{model}: {values:?}"
        );
        for counter in (0u8..).take(selects.len()).map(CounterId::Programmable) {
            let report = ran.report(0, counter)?;
            let nobody = matches!(report.reading, Reading::Unavailable(_));
            ensure!(nobody, "{model}: {report:?}");
        }
    }
    Ok(())
}
