//! The same code, in one run or in many small ones: the same end, to the last count.

use emu::{EventClass, EventTotals, Ring, State, VmExit};
use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind, Register};
use proptest::prelude::{ProptestConfig, proptest};

use crate::guest::{Guest, PAGES};
use crate::native::{CODE, DATA, DATA_LEN};
use crate::observer::Recorder;
use crate::oracle::{self, Random};

/// Ticks of a run.
const TICKS: u64 = 600;

type End = (VmExit, State, [EventTotals; 2], Vec<u8>);

/// What a program may do.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// It computes, on pages of data.
    Quiet,
    /// It has strings too, and its data is its own code.
    Wild,
}

/// A string instruction of a few elements near RSI.
fn string(random: &mut Random) -> Vec<u8> {
    const OPCODES: [u8; 10] = [0xa4, 0xa5, 0xa6, 0xa7, 0xaa, 0xab, 0xac, 0xad, 0xae, 0xaf];
    let [away, count, ..] = random.next().to_le_bytes();
    // LEA RDI,[RSI+away]; MOV ECX,count; REP or REPNE.
    let mut code = vec![
        0x48,
        0x8d,
        0x7e,
        away,
        0xb9,
        count,
        random.below(2) as u8,
        0,
        0,
    ];
    code.push([0xf2, 0xf3][random.below(2) as usize]);
    code.push(OPCODES[random.below(10) as usize]);
    code
}

/// Two instructions that are one operation in a block that runs as a whole, or nearly: a move and
/// what changes its destination, or a comparison and its branch.
fn pair(random: &mut Random) -> Vec<u8> {
    /// All but RSP and RSI.
    const REGISTERS: [u8; 6] = [0, 1, 2, 3, 5, 7];
    let mut register = || REGISTERS[random.below(6) as usize];
    let [a, b, c] = [register(), register(), register()];
    let mut rex = || 0x40 | (random.below(2) as u8) << 3;
    let [first, second] = [rex(), rex()];
    let [imm, which, cc, ..] = random.next().to_le_bytes();
    let mov = [first, 0x89, 0xc0 | b << 3 | a];
    let binary = [0x01, 0x09, 0x11, 0x19, 0x21, 0x29, 0x31, 0x39, 0x85][usize::from(cc) % 9];
    let imms = [imm, which, cc, 0];
    match which % 7 {
        0 | 1 => [&mov[..], &[second, binary, 0xc0 | c << 3 | a]].concat(),
        2 => [&mov[..], &[second, 0xc1, 0xc0 | (cc & 7) << 3 | a, imm]].concat(),
        3 => [&mov[..], &[second, 0x81, 0xc0 | (cc & 7) << 3 | a], &imms].concat(),
        4 => {
            let unary = [[0xff, 0xc0], [0xff, 0xc8], [0xf7, 0xd0], [0xf7, 0xd8]];
            let [opcode, form] = unary[usize::from(cc) % 4];
            [&mov[..], &[second, opcode, form | a]].concat()
        }
        5 => {
            let compare = [0x38, 0x39, 0x84, 0x85][usize::from(cc >> 4) % 4];
            vec![first, compare, 0xc0 | b << 3 | a, 0x70 | cc & 15, imm & 3]
        }
        _ => {
            let branch = [0x70 | cc & 15, imm & 3];
            match cc >> 4 & 3 {
                0 => [&[first, 0x80, 0xf8 | a, imm][..], &branch].concat(),
                1 => [&[first, 0xf6, 0xc0 | a, imm][..], &branch].concat(),
                2 => [&[first, 0x81, 0xf8 | a][..], &imms, &branch].concat(),
                _ => [&[first, 0xf7, 0xc0 | a][..], &imms, &branch].concat(),
            }
        }
    }
}

/// Random code that mostly is code.
fn program(random: &mut Random, kind: Kind) -> Vec<u8> {
    let mut code = Vec::new();
    while code.len() < 1500 {
        let bytes = oracle::bytes(random);
        let insn = Decoder::with_ip(64, &bytes, 0, DecoderOptions::NONE).decode();
        if kind == Kind::Wild && random.chance(24) {
            code.extend(string(random));
        }
        if random.chance(4) {
            code.extend(pair(random));
        }
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

fn load(guest: &mut Guest, seed: u64, kind: Kind) {
    let mut random = Random(seed | 1);
    let code = program(&mut random, kind);
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
    if kind == Kind::Wild {
        // Stores land in code that has run, and in code that has not.
        state.r[1] = random.below(700);
        state.r[6] = CODE + random.below(1500);
        state.r[7] = [CODE, DATA][random.below(2) as usize] + random.below(4096);
        state.r[4] = CODE + 1400;
    }
    // SSE is switched on.
    state.cr4 |= 3 << 9;
    state.xmm = [[0; 2]; 16].map(|_| [random.lanes(), random.lanes()]);
    state.rip = CODE;
    state.set_rflags(random.next() & 0xcd5 | 0x202);
    guest.cpu.set_state(state);
}

/// Runs with `budget` at a time; `forgets` code between runs.
fn run(seed: u64, kind: Kind, budget: u64, forgets: bool) -> End {
    let mut guest = oracle::guest();
    load(&mut guest, seed, kind);
    run_on(guest, budget, forgets)
}

/// The same, with somebody who follows each block's end, and waits where code is.
fn run_looked_at(seed: u64, kind: Kind, budget: u64) -> End {
    let mut guest = oracle::guest();
    load(&mut guest, seed, kind);
    let (observer, told) = Recorder::of_all();
    guest.cpu.observe(Some(observer));
    guest.cpu.watch((0..64).map(|n| CODE + 5 * n).collect());
    let end = run_on(guest, budget, false);
    let told = told.lock().expect("nobody panics");
    let last = told.last().map_or(0, |(.., user)| *user);
    assert!(last <= end.2[1].of(EventClass::Instructions));
    end
}

fn run_on(mut guest: Guest, budget: u64, forgets: bool) -> End {
    let stop = loop {
        let left = TICKS.saturating_sub(guest.cpu.time());
        if left == 0 {
            break VmExit::Budget;
        }
        let stop = guest.cpu.run(budget.min(left));
        if stop != VmExit::Budget {
            break stop;
        }
        if forgets {
            guest.cpu.forget_code();
        }
    };
    let totals = [Ring::Kernel, Ring::User].map(|ring| guest.cpu.take_totals(ring));
    // The tables too, with A and D.
    let mut memory = vec![0; PAGES as usize + 0x1_0000 + DATA_LEN];
    guest.read(0, &mut memory);
    (stop, guest.cpu.state().clone(), totals, memory)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn budgets_change_nothing(seed: u64) {
        for kind in [Kind::Quiet, Kind::Wild] {
            check(seed, kind);
        }
    }
}

fn check(seed: u64, kind: Kind) {
    let whole = run(seed, kind, u64::MAX, false);
    let ticks: u64 = whole.2.iter().map(EventTotals::ticks).sum();
    assert_eq!(ticks, whole.1.time);
    for (budget, forgets) in [(1, false), (1, true), (7, false), (7, true), (13, true)] {
        let parts = run(seed, kind, budget, forgets);
        assert_eq!(whole.0, parts.0);
        assert_eq!(whole.1, parts.1);
        assert_eq!(whole.2, parts.2);
        assert!(whole.3 == parts.3, "memory, budget {budget}");
    }
    for budget in [u64::MAX, 1, 7] {
        assert!(
            whole == run_looked_at(seed, kind, budget),
            "looked at, {budget}"
        );
    }
}

/// A block that runs whole leaves out flags that are set again before anybody sees them: each of
/// these sees those of an ADD or of a shift, and then they are set again.
#[test]
fn flags_are_there_for_whoever_sees_them() {
    let seers: [(&str, &[u8]); 10] = [
        ("a load without memory", &[0x48, 0x8b, 0x0a]),
        ("a store without memory", &[0x89, 0x0a]),
        ("PUSHF", &[0x9c]),
        ("SETC CL", &[0x0f, 0x92, 0xc1]),
        ("ADC ECX,ECX", &[0x11, 0xc9]),
        ("CMOVC ECX,EBX", &[0x0f, 0x42, 0xcb]),
        ("INC ECX, then PUSHF", &[0xff, 0xc1, 0x9c]),
        ("ROR ECX,3, then PUSHF", &[0xc1, 0xc9, 0x03, 0x9c]),
        ("SHL ECX,0, then PUSHF", &[0xc1, 0xe1, 0x00, 0x9c]),
        ("DIV by nothing", &[0xf7, 0xf7]),
    ];
    let setters: [&[u8]; 3] = [&[0x01, 0xd8], &[0xc1, 0xe8, 0x02], &[0xc1, 0xc0, 0x03]];
    for setter in setters {
        for (seer, bytes) in seers {
            let code = [setter, bytes, &[0x31, 0xc0, 0x85, 0xc0, 0xcc]].concat();
            let run = |budget| {
                let mut guest = oracle::guest();
                guest.bytes(PAGES, &code);
                let mut state = guest.state(3);
                state.rip = CODE;
                state.r = [0; 32];
                (state.r[0], state.r[3], state.r[4]) = (u64::from(u32::MAX), 1, DATA + 4096);
                guest.cpu.set_state(state);
                run_on(guest, budget, false)
            };
            assert!(run(u64::MAX) == run(1), "{seer} behind {setter:x?}");
        }
    }
}

#[test]
fn such_programs_run_for_a_while() {
    let all = |kind: Kind, class: EventClass| -> u64 {
        let count = |seed: u64| run(seed, kind, u64::MAX, false).2[1].of(class);
        (1..60).map(|n| count(n * 0x1234_5677)).sum()
    };
    for kind in [Kind::Quiet, Kind::Wild] {
        let instructions = all(kind, EventClass::Instructions);
        assert!(
            instructions > 600,
            "{instructions} instructions in 59 programs"
        );
    }
    let strings = all(Kind::Wild, EventClass::Strings);
    assert!(strings > 20, "{strings} strings in 59 programs");
}
