//! The same code, in one run or in many small ones: the same end, to the last count.

use emu::{EventClass, EventTotals, Ring, State, Stop};
use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind, Register};
use proptest::prelude::{ProptestConfig, proptest};

use crate::guest::{Guest, PAGES};
use crate::native::{CODE, DATA, DATA_LEN};
use crate::oracle::{self, Random};

/// Ticks of a run.
const TICKS: u64 = 600;

type End = (Stop, State, [EventTotals; 2], Vec<u8>);

/// Random code that mostly is code, ending in jumps back.
fn program(random: &mut Random) -> Vec<u8> {
    let mut code = Vec::new();
    while code.len() < 1500 {
        let bytes = oracle::bytes(random);
        let insn = Decoder::with_ip(64, &bytes, 0, DecoderOptions::NONE).decode();
        if is_quiet(&insn) || random.chance(400) {
            code.extend_from_slice(&bytes[..insn.len().max(1)]);
        }
    }
    code.resize(4096, 0xcc);
    code
}

/// Faults end a run: memory is addressed by RSI alone, which stays, and by the stack.
fn is_quiet(insn: &Instruction) -> bool {
    let kept = [Register::RSI, Register::RSP];
    let writes = kept.contains(&insn.op0_register().full_register())
        || kept.contains(&insn.op1_register().full_register());
    let memory = insn.op_kinds().any(|kind| kind == OpKind::Memory);
    let near = insn.memory_base() == Register::RSI
        && insn.memory_index() == Register::None
        && insn.memory_displacement64().wrapping_add(128) < 256;
    let faults = matches!(
        insn.mnemonic(),
        Mnemonic::Div | Mnemonic::Idiv | Mnemonic::Enter | Mnemonic::Leave | Mnemonic::Xlatb
    );
    let leaves = insn.flow_control() != FlowControl::Next && !insn.is_jcc_short();
    let far_bit = matches!(
        insn.mnemonic(),
        Mnemonic::Bt | Mnemonic::Btc | Mnemonic::Btr | Mnemonic::Bts
    );
    let strings = insn.is_string_instruction();
    !insn.is_invalid()
        && !insn.is_privileged()
        && oracle::not_compared(insn).is_none()
        && !writes
        && (!memory || near && !far_bit)
        && !(faults || leaves || strings)
}

fn load(guest: &mut Guest, seed: u64) {
    let mut random = Random(seed | 1);
    let code = program(&mut random);
    guest.bytes(PAGES, &code);
    let data: Vec<u8> = (0..DATA_LEN)
        .map(|_| random.next().to_le_bytes()[4])
        .collect();
    guest.bytes(PAGES + 0x1_0000, &data);
    let mut state = guest.state(3);
    for register in &mut state.r[..16] {
        *register = if random.chance(2) {
            DATA + random.below(DATA_LEN as u64)
        } else {
            random.value()
        };
    }
    state.r[4] = DATA + 4096;
    state.r[6] = DATA + 2048;
    state.rip = CODE;
    state.set_rflags(random.next() & 0xcd5 | 0x202);
    guest.cpu.set_state(state);
}

/// Runs with `budget` at a time; `forgets` code between runs.
fn run(seed: u64, budget: u64, forgets: bool) -> End {
    let mut guest = oracle::guest();
    load(&mut guest, seed);
    let stop = loop {
        let left = TICKS.saturating_sub(guest.cpu.time());
        if left == 0 {
            break Stop::Budget;
        }
        let stop = guest.cpu.run(budget.min(left));
        if stop != Stop::Budget {
            break stop;
        }
        if forgets {
            guest.cpu.forget_code();
        }
    };
    let totals = [Ring::Kernel, Ring::User].map(|ring| guest.cpu.take_totals(ring));
    let mut memory = vec![0; 0x1_0000 + DATA_LEN];
    guest.read(PAGES, &mut memory);
    (stop, guest.cpu.state().clone(), totals, memory)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn budgets_change_nothing(seed: u64) {
        let whole = run(seed, u64::MAX, false);
        for (budget, forgets) in [(1, false), (7, false), (13, true)] {
            let parts = run(seed, budget, forgets);
            assert_eq!(whole.0, parts.0);
            assert_eq!(whole.1, parts.1);
            assert_eq!(whole.2, parts.2);
            assert!(whole.3 == parts.3, "memory, budget {budget}");
        }
    }
}

#[test]
fn such_programs_run_for_a_while() {
    let count = |seed: u64| {
        let (_, _, totals, _) = run(seed, u64::MAX, false);
        totals[1].of(EventClass::Instructions)
    };
    let all: u64 = (1..60).map(|n| count(n * 0x1234_5677)).sum();
    assert!(all > 600, "{all} instructions in 59 programs");
}
