//! PEBS where every instruction is seen: whose records they are; and whatever a guest
//! makes of its debug store area.

use std::cell::RefCell;

use instruction_facts::{Operand, OperandKind};
use pmu_virt::{
    Caller, ClockBackend, CodePlace, CounterBackend, Grant, Layer, LinearMemory, MsrIndex,
    PmuModel, Progress, ReadOutcome, Retirement, Ring, SampledInstruction, StepBackend, Ticks, Tsc,
    WriteOutcome,
};
use proptest::collection::vec;
use proptest::prelude::{
    ProptestConfig, Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest,
};
use proptest::sample::select;

use crate::seated::{Seated, Snapshot};

const KERNEL: Caller = Caller::legacy(Layer::GuestKernel);
const SIZE: usize = 0x4000;
const AREA: u64 = 0x100;
const BUFFER: u64 = 0x1000;
const FULL: u64 = 0xffff_ffff_ffff;
const OVF_BUFFER: u64 = 1 << 62;

/// Memory from address 0 on, of which each byte can be read and written, or nothing.
struct Memory(RefCell<Vec<u8>>);

impl Memory {
    fn new() -> Self {
        Memory(RefCell::new(vec![0; SIZE]))
    }

    fn put(&self, address: u64, word: u64) {
        assert!(self.write(address, &word.to_le_bytes()));
    }

    fn word(&self, address: u64) -> u64 {
        let mut bytes = [0; 8];
        assert!(self.read(address, &mut bytes));
        u64::from_le_bytes(bytes)
    }

    fn prepare(&self, records: u64, threshold: u64, reset: u64) {
        self.put(AREA + 0x20, BUFFER);
        self.put(AREA + 0x28, BUFFER);
        self.put(AREA + 0x30, BUFFER + 32 * records);
        self.put(AREA + 0x38, BUFFER + 32 * threshold);
        self.put(AREA + 0x40, reset);
    }
}

fn range(address: u64, len: usize) -> Option<std::ops::Range<usize>> {
    let first = usize::try_from(address).ok()?;
    let end = first.checked_add(len)?;
    (end <= SIZE).then_some(first..end)
}

impl LinearMemory for Memory {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        let Some(range) = range(address, bytes.len()) else {
            return false;
        };
        bytes.copy_from_slice(&self.0.borrow()[range]);
        true
    }

    fn write(&self, address: u64, bytes: &[u8]) -> bool {
        let Some(range) = range(address, bytes.len()) else {
            return false;
        };
        self.0.borrow_mut()[range].copy_from_slice(bytes);
        true
    }

    fn locate(&self, _: u64) -> Option<(u64, u32)> {
        None
    }
}

fn guest(model: &str, backend: Box<dyn CounterBackend>) -> Seated {
    let model = PmuModel::parse(model).unwrap_or_else(|error| panic!("{error}"));
    Seated::new(model, backend, Grant::everything())
}

fn write(pmu: &mut Seated, msr: u32, value: u64) {
    let outcome = pmu.wrmsr(MsrIndex(msr), value, KERNEL);
    assert_eq!(outcome, WriteOutcome::Done, "{msr:#x} {value:#x}");
}

fn read(pmu: &mut Seated, msr: u32) -> u64 {
    match pmu.rdmsr(MsrIndex(msr), KERNEL) {
        ReadOutcome::Value(value) => value,
        outcome => panic!("{msr:#x}: {outcome:?}"),
    }
}

/// Retires one instruction at `rip`, and writes the record that is due then.
fn retire(pmu: &mut Seated, memory: &Memory, rip: u64, branch: bool) {
    let insn = Retirement {
        branch,
        ..Retirement::default()
    };
    let ring = Ring::Kernel;
    pmu.observe(Progress::Retired { ring, insn });
    if pmu.pebs_due() {
        let mut moment = Snapshot::of(memory);
        let at = CodePlace::flat(rip);
        moment.registers.instruction = SampledInstruction::Executed { at, did: insn };
        pmu.take_samples(&mut moment);
    }
}

/// Addresses of the records so far.
fn addresses(memory: &Memory) -> Vec<u64> {
    let end = memory.word(AREA + 0x28);
    let records = (BUFFER..end).step_by(32);
    records.map(|record| memory.word(record + 8)).collect()
}

const INSTRUCTIONS: u64 = 0x43_00c0;
const BRANCHES: u64 = 0x43_00c4;

proptest! {
    /// Of every `period` events and one more, the last one makes a record, and its
    /// address is that of the instruction that caused it.
    #[test]
    fn each_record_is_of_the_event_after_the_overflow(
        branches in vec(any::<bool>(), 1..400),
        period in 1u64..20,
        event in select(vec![INSTRUCTIONS, BRANCHES]),
    ) {
        let memory = Memory::new();
        memory.prepare(400, 400, FULL + 1 - period);
        let mut pmu = guest("intel-v4,pebs=exact", Box::new(StepBackend::new()));
        write(&mut pmu, 0x600, AREA);
        write(&mut pmu, 0x3f1, 1);
        write(&mut pmu, 0x4c1, FULL + 1 - period);
        write(&mut pmu, 0x186, event);
        let mut expected = Vec::new();
        let mut events = 0;
        for (rip, branch) in (0x4000u64..).zip(&branches) {
            retire(&mut pmu, &memory, rip, *branch);
            events += u64::from(*branch || event == INSTRUCTIONS);
            if (*branch || event == INSTRUCTIONS) && events % (period + 1) == 0 {
                expected.push(rip);
            }
        }
        prop_assert_eq!(addresses(&memory), expected);
        prop_assert_eq!(read(&mut pmu, 0x38e), 0);
        prop_assert_eq!(pmu.take_pmi(), None);
    }
}

#[test]
fn an_armed_counter_waits_while_pebs_is_off() {
    let memory = Memory::new();
    memory.prepare(9, 1, 0);
    let mut pmu = guest("intel-v4,pebs=exact", Box::new(StepBackend::new()));
    write(&mut pmu, 0x600, AREA);
    write(&mut pmu, 0x3f1, 1);
    write(&mut pmu, 0x4c1, FULL);
    write(&mut pmu, 0x186, INSTRUCTIONS);
    retire(&mut pmu, &memory, 0x10, false);
    // A driver that programs another counter switches PEBS off and on.
    write(&mut pmu, 0x3f1, 0);
    retire(&mut pmu, &memory, 0x11, false);
    write(&mut pmu, 0x3f1, 1);
    let saved = pmu.save();
    assert!(addresses(&memory).is_empty());
    retire(&mut pmu, &memory, 0x12, false);
    assert_eq!(addresses(&memory), [0x12]);
    assert_eq!(read(&mut pmu, 0x38e), OVF_BUFFER);
    assert_eq!(pmu.take_pmi().map(|pmi| pmi.counters.bits()), Some(1));

    // The state has it all.
    let json = serde_json::to_string(&saved).expect("a state in JSON");
    let saved = serde_json::from_str(&json).expect("the same state");
    let mut again = guest("intel-v4,pebs=exact", Box::new(StepBackend::new()));
    again.restore(&saved).expect("its own state");
    assert_eq!(again.save(), saved);
    memory.prepare(9, 9, 0);
    retire(&mut again, &memory, 0x20, false);
    assert_eq!(addresses(&memory), [0x20]);

    // A counter that is written starts over.
    write(&mut again, 0x4c1, FULL);
    retire(&mut again, &memory, 0x21, false);
    write(&mut again, 0x4c1, 0);
    retire(&mut again, &memory, 0x22, false);
    assert_eq!(addresses(&memory), [0x20]);
}

/// Both counters are armed, and have a record together once they are restored.
#[test]
fn armed_counters_and_their_registers_are_restored() {
    const MODEL: &str = "intel-v4,pebs=exact";
    let memory = Memory::new();
    memory.prepare(30, 30, 0);
    let mut pmu = guest(MODEL, Box::new(StepBackend::new()));
    let written = [
        (0x600, AREA),
        (0x3f2, 3),
        (0x3f1, 0x1_0000_0001),
        (0x186, INSTRUCTIONS | 1 << 34),
        (0x38d, 0x3),
        (0x38f, 0x1_0000_0001),
    ];
    for (msr, value) in written {
        write(&mut pmu, msr, value);
    }
    for msr in [0x309, 0x4c1] {
        write(&mut pmu, msr, FULL);
    }
    retire(&mut pmu, &memory, 0x10, false);
    assert!(addresses(&memory).is_empty());

    let json = serde_json::to_value(pmu.save()).expect("a state in JSON");
    let expected = serde_json::json!({
        "enable": "0x100000001",
        "data-config": "0x3",
        "ds-area": "0x100",
        "armed": ["PMC0", "FIXED0"],
    });
    assert_eq!(json["pebs"], expected);
    let mut again = guest(MODEL, Box::new(StepBackend::new()));
    let state = serde_json::from_value(json.clone()).expect("the same state");
    again.restore(&state).expect("its own state");
    for (msr, value) in written {
        assert_eq!(read(&mut again, msr), value, "{msr:#x}");
    }
    retire(&mut again, &memory, 0x20, false);
    // Basic, memory and general registers.
    assert_eq!(memory.word(AREA + 0x28), BUFFER + 208);
    assert_eq!(memory.word(BUFFER + 8), 0x20);
    assert_eq!(memory.word(BUFFER + 0x10), 0x1_0000_0001);

    // Without its section it is the state after reset.
    let mut without = json;
    without.as_object_mut().expect("an object").remove("pebs");
    let state = serde_json::from_value(without).expect("a state");
    again.restore(&state).expect("a state of before");
    for msr in [0x600, 0x3f1, 0x3f2] {
        assert_eq!(read(&mut again, msr), 0, "{msr:#x}");
    }
    let before = addresses(&memory);
    retire(&mut again, &memory, 0x30, false);
    retire(&mut again, &memory, 0x31, false);
    assert_eq!(addresses(&memory), before);
}

const PERIOD: u64 = 1000;

/// A guest whose clock has overflowed `late` cycles ago, at an exit in SMM: its record waits.
fn waiting(late: u64) -> (Seated, Memory) {
    let memory = Memory::new();
    memory.prepare(30, 30, FULL + 1 - PERIOD);
    let mut pmu = guest("intel-v4,pebs=skid", Box::new(ClockBackend::new()));
    write(&mut pmu, 0x600, AREA);
    write(&mut pmu, 0x3f1, 1);
    write(&mut pmu, 0x4c1, FULL + 1 - PERIOD);
    write(&mut pmu, 0x186, 0x43_003c);
    run(&mut pmu, 0, PERIOD + late);
    assert!(pmu.pebs_due());
    (pmu, memory)
}

fn run(pmu: &mut Seated, from: u64, ticks: u64) {
    pmu.observe(Progress::Entered { tsc: Tsc(from) });
    let ring = Some(Ring::Kernel);
    pmu.observe(Progress::Left {
        tsc: Tsc(from + ticks),
        halted: Ticks(0),
        ring,
    });
}

fn write_record(pmu: &mut Seated, memory: &Memory) {
    pmu.take_samples(&mut Snapshot::of(memory));
}

/// Whatever the vCPU does meanwhile, there is one record, and the counter goes on as if it
/// had been reloaded at its overflow.
#[test]
fn a_record_that_waits_for_the_end_of_smm_is_made_once() {
    for (late, more) in [(0, 10), (5, 0), (300, 300), (999, 1), (700, 5_000)] {
        let (mut pmu, memory) = waiting(late);
        assert_eq!(read(&mut pmu, 0x4c1), late);
        run(&mut pmu, 1 << 20, more);
        assert!(pmu.pebs_due());
        assert_eq!(pmu.deadline(), None, "it waits for no overflow");
        write_record(&mut pmu, &memory);
        assert_eq!(addresses(&memory).len(), 1);
        assert!(!pmu.pebs_due());
        let expected = FULL + 1 - PERIOD + (late + more) % PERIOD;
        assert_eq!(read(&mut pmu, 0x4c1), expected, "{late} and {more} cycles");
    }
}

#[test]
fn a_record_does_not_outlive_what_it_was_for() {
    let check = |name: &str, then: &dyn Fn(&mut Seated)| {
        let (mut pmu, memory) = waiting(5);
        then(&mut pmu);
        assert!(!pmu.pebs_due(), "{name}");
        run(&mut pmu, 1 << 20, 100);
        assert!(!pmu.pebs_due(), "{name}");
        assert!(addresses(&memory).is_empty(), "{name}");
    };
    check("PEBS is off", &|pmu| write(pmu, 0x3f1, 0));
    check("the counter is written", &|pmu| write(pmu, 0x4c1, 0));
    check("it counts something else", &|pmu| {
        write(pmu, 0x186, 0x43_013c);
    });
    check("a reset", &|pmu| pmu.reset());
    let (mut pmu, _) = waiting(5);
    write(&mut pmu, 0x3f1, 3);
    assert!(pmu.pebs_due(), "another counter's PEBS");
}

/// A state has it as a counter that is armed: the next event makes the record.
#[test]
fn a_record_that_waits_is_in_the_state() {
    let (mut pmu, memory) = waiting(5);
    let state = pmu.save();
    let json = serde_json::to_value(&state).expect("a state in JSON");
    assert_eq!(json["pebs"]["armed"], serde_json::json!(["PMC0"]));
    let mut again = guest("intel-v4,pebs=skid", Box::new(ClockBackend::new()));
    again.restore(&state).expect("a state of this model");
    run(&mut again, 0, 7);
    assert!(again.pebs_due());
    write_record(&mut again, &memory);
    assert_eq!(read(&mut again, 0x4c1), FULL + 1 - PERIOD + 12);
}

#[test]
fn a_model_without_pebs_has_nothing_of_it_in_its_state() {
    let mut pmu = guest("intel-v4", Box::new(StepBackend::new()));
    let json = serde_json::to_value(pmu.save()).expect("a state in JSON");
    assert!(json.get("pebs").is_none(), "{json}");
}

#[test]
fn a_state_with_impossible_pebs_registers_is_refused() {
    let mut pmu = guest(
        "intel-v4,pebs=skid,pebs-format=3",
        Box::new(ClockBackend::new()),
    );
    let good = serde_json::to_value(pmu.save()).expect("a state in JSON");
    let mut check = |member: &str, value: serde_json::Value, taken: bool| {
        let mut state = good.clone();
        state["pebs"][member] = value;
        let state = serde_json::from_value(state).expect("a state");
        assert_eq!(pmu.restore(&state).is_ok(), taken, "{member}");
    };
    check("enable", "0xf".into(), true);
    check("enable", "0x10".into(), false);
    check("data-config", "0x1".into(), false);
    check("ds-area", "0xffff800000000000".into(), true);
    check("ds-area", "0x800000000000".into(), false);
    check("armed", serde_json::json!(["PMC7"]), false);
}

/// Of an instruction that loads and stores: what it loads where loads are sampled, what it
/// stores where stores are, and the first operand with any other event or with both.
#[test]
fn a_record_has_the_address_that_its_events_are_about() {
    const LOADS: u64 = 0x43_81d0;
    const STORES: u64 = 0x43_82d0;
    const LOADED: u64 = 0x1_1000;
    const STORED: u64 = 0x2_2000;
    let check = |format: u8, selects: &[u64], expected: u64| {
        let memory = Memory::new();
        memory.prepare(30, 30, 0);
        let model = format!("intel-v4,pebs=exact,pebs-format={format}");
        let mut pmu = guest(&model, Box::new(StepBackend::new()));
        write(&mut pmu, 0x600, AREA);
        write(&mut pmu, 0x3f1, (1 << selects.len()) - 1);
        // Memory, and the address in it.
        let (group, adaptive, at) = match format {
            3 => (None, 0, 0x98),
            _ => (Some(1), 1 << 34, 0x20),
        };
        if let Some(group) = group {
            write(&mut pmu, 0x3f2, group);
        }
        for (n, select) in (0..).zip(selects) {
            write(&mut pmu, 0x4c1 + n, FULL);
            write(&mut pmu, 0x186 + n, select | adaptive);
        }
        for _ in 0..2 {
            let insn = Retirement {
                loads: 1,
                stores: 1,
                ..Retirement::default()
            };
            let ring = Ring::Kernel;
            pmu.observe(Progress::Retired { ring, insn });
        }
        let operand = |linear, load, store| {
            let bytes = 8;
            Some(Operand {
                linear,
                bytes,
                load,
                store,
            })
        };
        let mut moment = Snapshot {
            operands: [operand(LOADED, true, false), operand(STORED, false, true)],
            ..Snapshot::of(&memory)
        };
        pmu.take_samples(&mut moment);
        let words = [0, 8, 16].map(|more| memory.word(BUFFER + at + more));
        assert_eq!(
            words,
            [expected, 0, 0],
            "address, source and latency with {selects:x?}"
        );
        assert!(!moment.asked.1, "no XMM registers in it");
        moment.asked.0
    };
    for format in [3, 4] {
        assert_eq!(check(format, &[LOADS], LOADED), [OperandKind::Load]);
        assert_eq!(check(format, &[STORES], STORED), [OperandKind::Store]);
        for selects in [&[INSTRUCTIONS][..], &[LOADS, STORES]] {
            assert_eq!(check(format, selects, LOADED), [OperandKind::Any]);
        }
        let beside = [INSTRUCTIONS, STORES];
        assert_eq!(check(format, &beside, STORED), [OperandKind::Store]);
    }
}

/// Pointers into and around the memory, and any.
fn pointer() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0u64..0x5000,
        2 => (0u64..0x80).prop_map(|more| BUFFER + more),
        1 => (0u64..0x200).prop_map(|less| u64::MAX - less),
        1 => any::<u64>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    /// Whatever the area holds: a record goes between base and maximum and into memory,
    /// the index moves, and nothing else changes.
    #[test]
    fn nothing_but_a_record_in_bounds_is_written(
        area in prop_oneof![3 => 0u64..0x4100, 1 => 0xffff_8000_0000_0000u64..],
        pointers in (pointer(), pointer(), pointer(), pointer()),
        reset in any::<u64>(),
        groups in 0u64..8,
        format in 3..=4,
    ) {
        let memory = Memory::new();
        let (base, index, maximum, threshold) = pointers;
        for (word, at) in [base, index, maximum, threshold, reset].iter().zip((0x20..).step_by(8)) {
            let _ = memory.write(area.wrapping_add(at), &word.to_le_bytes());
        }
        let before = memory.0.borrow().clone();
        let is_there = area.checked_add(0x20).is_some_and(|at| range(at, 40).is_some());
        let word = |at: u64| if is_there { memory.word(area + at) } else { 0 };
        let (base, index, maximum) = (word(0x20), word(0x28), word(0x30));
        let (threshold, reset) = (word(0x38), word(0x40));

        let model = format!("intel-v4,pebs=skid,pebs-format={format}");
        let mut pmu = guest(&model, Box::new(ClockBackend::new()));
        write(&mut pmu, 0x600, area);
        write(&mut pmu, 0x3f1, 1);
        let length = match format {
            3 => 200,
            _ => {
                write(&mut pmu, 0x3f2, groups);
                let sizes = [(1, 32), (2, 144), (4, 256)];
                let asked = sizes.iter().filter(|(bit, _)| groups & bit != 0);
                32 + asked.map(|(_, size)| size).sum::<u64>()
            }
        };
        let adaptive = if format == 4 { 1 << 34 } else { 0 };
        write(&mut pmu, 0x186, 0x43_013c | adaptive);
        write(&mut pmu, 0x4c1, FULL);
        pmu.observe(Progress::Entered { tsc: Tsc(10) });
        pmu.observe(Progress::Left { tsc: Tsc(13), halted: Ticks(0), ring: Some(Ring::Kernel) });
        prop_assert!(pmu.pebs_due());
        let mut moment = Snapshot::of(&memory);
        moment.registers.next = CodePlace::flat(0x1234);
        pmu.take_samples(&mut moment);
        prop_assert!(!pmu.pebs_due());

        let end = index.checked_add(length).filter(|end| {
            let fits = range(index, usize::try_from(length).unwrap_or(SIZE)).is_some();
            is_there && index >= base && *end <= maximum && fits
        });
        let after = memory.0.borrow().clone();
        match end {
            None => {
                prop_assert!(before == after);
                prop_assert_eq!(read(&mut pmu, 0x4c1), 2);
                prop_assert_eq!(read(&mut pmu, 0x38e), 0);
            }
            Some(end) => {
                for (at, (before, after)) in (0..).zip(before.iter().zip(&after)) {
                    let in_record = (index..end).contains(&at);
                    let in_index = (area + 0x28..area + 0x30).contains(&at);
                    prop_assert!(in_record || in_index || before == after, "{:#x}", at);
                }
                prop_assert_eq!(memory.word(area + 0x28), end);
                // Two ticks since the overflow.
                let period = FULL - (reset & FULL) + 1;
                prop_assert_eq!(read(&mut pmu, 0x4c1), (reset & FULL) + 2 % period);
                let full = end >= threshold;
                prop_assert_eq!(read(&mut pmu, 0x38e), if full { OVF_BUFFER } else { 0 });
                prop_assert_eq!(pmu.take_pmi().is_some(), full);
            }
        }
    }
}
