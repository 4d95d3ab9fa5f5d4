//! Instructions told apart by their kind: calls, returns, x87, MMX and SSE.

use super::amd::{check, stop};
use anyhow::Result;
use guest_tests::micro::{Lab, Program, Test, Written, wrmsr};
use iced_x86::code_asm::{CodeAssembler, cr4, eax, mm0, mm1, qword_ptr, rax, xmm0, xmm1};
use pmu_virt::Provenance;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "step::calls_and_returns",
        run: calls,
    },
    Test {
        name: "step::x87_mmx_and_sse",
        run: units,
    },
];

/// A model with the events that are to be counted.
struct Machine {
    model: &'static str,
    global_control: u32,
    /// Event select and counter of each.
    registers: &'static [(u32, u32)],
}

const INTEL: Machine = Machine {
    model: "intel-v2",
    global_control: 0x38f,
    registers: &[(0x186, 0xc1), (0x187, 0xc2), (0x188, 0xc3)],
};

const AMD: Machine = Machine {
    model: "amd-perfmonv2",
    global_control: 0xc000_0301,
    registers: &[
        (0xc001_0200, 0xc001_0201),
        (0xc001_0202, 0xc001_0203),
        (0xc001_0204, 0xc001_0205),
        (0xc001_0206, 0xc001_0207),
        (0xc001_0208, 0xc001_0209),
    ],
};

impl Machine {
    /// Counts `selects` in `region`, between the writes that start and stop them;
    /// the latter is three instructions of none of these kinds.
    fn check(
        &self,
        lab: &Lab,
        selects: &[u64],
        region: impl Fn(&mut CodeAssembler) -> Written,
        expected: &[(u64, Provenance)],
    ) -> Result<()> {
        let registers = || self.registers.iter().zip(selects);
        let program = Program::new()?.kernel(|a| {
            // OSFXSR: without it SSE raises #UD.
            a.mov(rax, cr4)?;
            a.or(eax, 1 << 9)?;
            a.mov(cr4, rax)?;
            wrmsr(a, self.global_control, 0)?;
            for ((register, _), select) in registers() {
                wrmsr(a, *register, *select)?;
            }
            wrmsr(a, self.global_control, (1 << selects.len()) - 1)?;
            region(a)?;
            let counters: Vec<u32> = registers().map(|((_, counter), _)| *counter).collect();
            stop(a, self.global_control, &counters)
        })?;
        check(lab, self.model, program, expected)
    }
}

/// Near calls (C4/02), near returns (C4/08), and branches, which both are.
fn calls(lab: &Lab) -> Result<()> {
    let region = |a: &mut CodeAssembler| {
        let (mut function, mut over) = (a.create_label(), a.create_label());
        a.jmp(over)?;
        a.set_label(&mut function)?;
        a.ret()?;
        a.set_label(&mut over)?;
        a.call(function)?;
        a.call(function)?;
        a.lea(rax, qword_ptr(function))?;
        a.call(rax)
    };
    let exact = |count| (count, Provenance::Exact);
    let expected = [exact(3), exact(3), exact(7)];
    INTEL.check(lab, &[0x43_02c4, 0x43_08c4, 0x43_00c4], region, &expected)
}

/// CB/07, CB/01, CB/02, CB/04 and C8: FNINIT and FLD1; PADDB and EMMS; three of
/// SSE; no return.
fn units(lab: &Lab) -> Result<()> {
    let region = |a: &mut CodeAssembler| {
        a.fninit()?;
        a.fld1()?;
        a.fninit()?;
        a.paddb(mm0, mm1)?;
        a.emms()?;
        a.xorps(xmm0, xmm0)?;
        a.addps(xmm0, xmm1)?;
        a.cvtpi2ps(xmm0, mm0)?;
        // No operand of theirs is a register of these.
        a.sfence()?;
        a.nop()
    };
    let selects = [0x43_07cb, 0x43_01cb, 0x43_02cb, 0x43_04cb, 0x43_00c8];
    let derived = |count| (count, Provenance::Derived);
    let expected = [
        derived(8),
        derived(3),
        derived(2),
        derived(3),
        (0, Provenance::Exact),
    ];
    AMD.check(lab, &selects, region, &expected)
}
