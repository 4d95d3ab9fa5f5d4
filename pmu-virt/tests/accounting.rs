//! The accounting page: its layout, its words, and the page that documents it.

use std::path::Path;

use pmu_virt::accounting::{
    self, ABI_VERSION, CPUID_BASE, FEATURE_ACCOUNTING, MSR_BASE, MSR_COUNT, PAGE, PageRegister,
    SIGNATURE, Word, decode,
};
use pmu_virt::{
    Caller, ClockBackend, CounterId, Denial, Grant, Layer, MsrIndex, PmuModel, Progress,
    ReadOutcome, StepBackend, Ticks, Tsc, WriteOutcome, all_pmu_msr_ranges,
};

use crate::seated::Seated;

const KERNEL: Caller = Caller::legacy(Layer::GuestKernel);
const GP: ReadOutcome = ReadOutcome::Gp;

fn intel() -> PmuModel {
    PmuModel::default_for(pmu_virt::Vendor::Intel)
}

fn read(pmu: &mut Seated, offset: u32) -> ReadOutcome {
    pmu.rdmsr(MsrIndex(MSR_BASE + offset), KERNEL)
}

fn words(pmu: &mut Seated, position: u32) -> [u64; 4] {
    [0, 1, 2, 3].map(|word| match read(pmu, 0x100 + 4 * position + word) {
        ReadOutcome::Value(value) => value,
        other => panic!("{other:?}"),
    })
}

fn run(pmu: &mut Seated, from: u64, ticks: u64, halted: u64) {
    pmu.observe(Progress::Entered { tsc: Tsc(from) });
    pmu.observe(Progress::Left {
        tsc: Tsc(from + ticks),
        halted: Ticks(halted),
        ring: None,
    });
}

#[test]
fn every_index_leads_to_at_most_one_register() {
    fn check(offset: u32, expected: Option<PageRegister>) {
        assert_eq!(
            decode(MsrIndex(MSR_BASE.wrapping_add(offset))),
            expected,
            "{offset:#x}"
        );
    }
    check(0, Some(PageRegister::Snapshot));
    check(1, Some(PageRegister::Sequence));
    check(2, None);
    check(0xff, None);
    check(
        0x100,
        Some(PageRegister::Word(CounterId::Programmable(0), Word::Status)),
    );
    check(
        0x10d,
        Some(PageRegister::Word(
            CounterId::Programmable(3),
            Word::Enabled,
        )),
    );
    check(
        0x182,
        Some(PageRegister::Word(CounterId::Fixed(0), Word::Running)),
    );
    check(
        0x1ff,
        Some(PageRegister::Word(CounterId::Fixed(31), Word::Count)),
    );
    check(0x200, None);
    check(u32::MAX, None);
    let (first, last) = (MSR_BASE, MSR_BASE + MSR_COUNT - 1);
    let mut ranges = all_pmu_msr_ranges().into_iter();
    assert!(
        ranges.any(|range| range.0 <= first && last <= range.1),
        "every MSR of the page has to exit"
    );
}

#[test]
fn cpuid_tells_where_the_page_is() {
    let [(base, head), (features, regs)] = pmu_model::accounting_leaves(&intel());
    assert_eq!(
        (base, features, head.eax),
        (CPUID_BASE, CPUID_BASE + 1, CPUID_BASE + 1)
    );
    let text = [head.ebx, head.ecx, head.edx]
        .map(u32::to_le_bytes)
        .concat();
    assert_eq!(text, SIGNATURE);
    let expected = (ABI_VERSION, MSR_BASE, FEATURE_ACCOUNTING, 0x0304);
    assert_eq!((regs.eax, regs.ebx, regs.ecx, regs.edx), expected);
}

#[test]
fn a_snapshot_stands_still_until_the_next() {
    let mut pmu = Seated::new(intel(), Box::new(ClockBackend::new()), Grant::everything());
    assert_eq!(read(&mut pmu, 1), ReadOutcome::Value(0));
    assert_eq!(words(&mut pmu, 0), [0; 4]);
    assert_eq!(
        pmu.wrmsr(MsrIndex(0x186), 0x53_003c, KERNEL),
        WriteOutcome::Done
    );
    run(&mut pmu, 1_000, 500, 100);
    assert_eq!(words(&mut pmu, 0), [0; 4], "nobody took a snapshot yet");
    assert_eq!(read(&mut pmu, 0), ReadOutcome::Value(1));
    // Counting, derived: core cycles of the clock.
    assert_eq!(words(&mut pmu, 0), [0x42, 400, 400, 400]);
    assert_eq!(words(&mut pmu, 1), [0; 4], "never programmed");
    run(&mut pmu, 2_000, 50, 0);
    assert_eq!(words(&mut pmu, 0), [0x42, 400, 400, 400]);
    assert_eq!(read(&mut pmu, 1), ReadOutcome::Value(1));
    assert_eq!(read(&mut pmu, 0), ReadOutcome::Value(2));
    assert_eq!(words(&mut pmu, 0), [0x42, 450, 450, 450]);
    // Stopped: times and count stand still.
    pmu.wrmsr(MsrIndex(0x186), 0x13_003c, KERNEL);
    run(&mut pmu, 3_000, 50, 0);
    read(&mut pmu, 0);
    assert_eq!(words(&mut pmu, 0), [0x41, 450, 450, 450]);
    pmu.reset();
    assert_eq!(read(&mut pmu, 1), ReadOutcome::Value(0));
}

#[test]
fn an_unavailable_counter_says_why() {
    let mut pmu = Seated::new(intel(), Box::new(ClockBackend::new()), Grant::everything());
    // Instructions: no source of `clock`. Invert: cannot be counted.
    pmu.wrmsr(MsrIndex(0x186), 0x53_00c0, KERNEL);
    pmu.wrmsr(MsrIndex(0x187), 0xd3_003c, KERNEL);
    run(&mut pmu, 0, 70, 0);
    read(&mut pmu, 0);
    assert_eq!(words(&mut pmu, 0), [0x0104, 70, 0, 0]);
    assert_eq!(words(&mut pmu, 1), [0x0204, 70, 0, 0]);
}

#[test]
fn a_lost_label_is_told() {
    let mut pmu = Seated::new(intel(), Box::new(StepBackend::new()), Grant::everything());
    pmu.wrmsr(MsrIndex(0x186), 0x53_00c0, KERNEL);
    let reason = pmu_virt::LossReason::EventDelivery;
    pmu.observe(Progress::Lost { reason });
    read(&mut pmu, 0);
    assert_eq!(words(&mut pmu, 0)[0], 0x02_0032);
}

#[test]
fn what_is_not_there_faults() {
    let mut pmu = Seated::new(intel(), Box::new(ClockBackend::new()), Grant::everything());
    for offset in [2, 0xff, 0x110, 0x17f, 0x18c, 0x1ff, 0x200, MSR_COUNT - 1] {
        assert_eq!(read(&mut pmu, offset), GP, "{offset:#x}");
    }
    for offset in [0, 1, 2, 0x100, 0x200] {
        let written = pmu.wrmsr(MsrIndex(MSR_BASE + offset), 0, KERNEL);
        assert_eq!(written, WriteOutcome::Gp, "{offset:#x}");
    }
    let before = pmu.rdmsr(MsrIndex(MSR_BASE - 1), KERNEL);
    assert_eq!(before, ReadOutcome::NotHandled);
    // What follows is the block of the reservations.
    assert_eq!(read(&mut pmu, MSR_COUNT), GP);
    assert_eq!(read(&mut pmu, 2 * MSR_COUNT), ReadOutcome::NotHandled);
}

#[test]
fn a_counter_that_is_not_granted_is_hidden_here_too() {
    let held = || [CounterId::Programmable(1)];
    let of = |denial| {
        let grant = Grant::of(held(), denial);
        let mut pmu = Seated::new(intel(), Box::new(ClockBackend::new()), grant);
        read(&mut pmu, 0);
        [0x100, 0x103, 0x104, 0x107].map(|offset| read(&mut pmu, offset))
    };
    let zero = ReadOutcome::Value(0);
    assert_eq!(of(Denial::Fault), [GP, GP, zero, zero]);
    let dropped = Denial::Drop { read_as: 7 };
    // The status tells that it is not granted.
    let [status, count] = [0x0404, 7].map(ReadOutcome::Value);
    assert_eq!(of(dropped), [status, count, zero, zero]);
}

/// `docs/reference/guest-abi.md` holds the tables; `UPDATE_DOCS=1` writes them there.
#[test]
fn the_page_documents_every_register_and_code() {
    const BEGIN: &str = "<!-- tables: begin -->\n";
    const END: &str = "<!-- tables: end -->";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/guest-abi.md");
    let page = std::fs::read_to_string(&path).expect("docs/reference/guest-abi.md can be read");
    let (head, rest) = page
        .split_once(BEGIN)
        .expect("the page marks the tables' begin");
    let (tables, tail) = rest
        .split_once(END)
        .expect("the page marks the tables' end");
    let expected = documented();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        let page = format!("{head}{BEGIN}{expected}{END}{tail}");
        std::fs::write(&path, page).expect("docs/reference/guest-abi.md can be written");
        return;
    }
    assert_eq!(
        tables, expected,
        "out of date; run this test with UPDATE_DOCS=1"
    );
}

fn documented() -> String {
    let mut text = format!(
        "### MSRs\n\nFrom {MSR_BASE:#x}, {MSR_COUNT:#x} indices. All others of these raise #GP.\n\n\
         | offset | name | meaning |\n|---|---|---|\n"
    );
    for row in PAGE {
        let offset = match row.count {
            1 => format!("{:#x}", row.offset),
            _ => format!("{:#x} + {}n", row.offset, row.stride),
        };
        text.push_str(&format!(
            "| {offset} | `{}` | {} |\n",
            row.name, row.meaning
        ));
    }
    for (title, codes) in [
        ("State, bits 3:0", accounting::STATE_CODES),
        ("Provenance, bits 7:4", accounting::PROVENANCE_CODES),
        ("Reason, bits 15:8", accounting::REASON_CODES),
        (
            "Loss, bits 23:16: why the count is no longer exact",
            accounting::LOSS_CODES,
        ),
    ] {
        text.push_str(&format!("\n### {title}\n\n| code | meaning |\n|---|---|\n"));
        for (code, meaning) in codes {
            text.push_str(&format!("| {code} | {meaning} |\n"));
        }
    }
    text.push('\n');
    text
}
