//! The accounting page, read by a guest.

use anyhow::{Result, ensure};
use guest_tests::micro::Op::{Read, ReadGp, ReadWithin, Spin, Write, WriteGp};
use guest_tests::micro::{Lab, Op, Script, Setup, Test};
use pmu_virt::accounting::MSR_BASE;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "accounting::a_snapshot_stands_still",
        run: stands_still,
    },
    Test {
        name: "accounting::why_a_counter_is_unavailable",
        run: unavailable,
    },
    Test {
        name: "accounting::fixed_counters_come_at_32",
        run: fixed,
    },
    Test {
        name: "accounting::what_is_not_there_faults",
        run: faults,
    },
];

const SNAPSHOT: u32 = MSR_BASE;
const SEQUENCE: u32 = MSR_BASE + 1;
/// Core cycles at every CPL, enabled; never disabled until the event changes.
const CYCLES: u64 = 0x43_0076;
/// Retired instructions.
const INSTRUCTIONS: u64 = 0x43_00c0;

const fn word(position: u32, word: u32) -> u32 {
    MSR_BASE + 0x100 + 4 * position + word
}

fn check(lab: &Lab, name: &str, setup: &Setup, ops: &[Op]) -> Result<()> {
    let script = Script {
        name,
        cr4: 0,
        kernel: ops,
        user: &[],
    };
    script.check(lab, setup).map(drop)
}

fn stands_still(lab: &Lab) -> Result<()> {
    let ops = [
        Read(SEQUENCE, 0),
        Read(word(0, 0), 0),
        Write(0xc001_0201, 5),
        Write(0xc001_0200, CYCLES),
        Spin(200),
        Read(word(0, 1), 0),
        Read(SNAPSHOT, 1),
        // Counting, derived.
        Read(word(0, 0), 0x42),
        ReadWithin(word(0, 1), 1, 1 << 40),
        ReadWithin(word(0, 2), 1, 1 << 40),
        ReadWithin(word(0, 3), 6, 1 << 40),
        Read(SEQUENCE, 1),
        Write(0xc001_0200, 0x03_0076),
        Read(SNAPSHOT, 2),
        Read(word(0, 0), 0x41),
        Read(word(1, 0), 0),
    ];
    let script = Script {
        name: "one counter",
        cr4: 0,
        kernel: &ops,
        user: &[],
    };
    let ran = script.check(lab, &Setup::clock("amd-core"))?;
    // An entry of the log for each operation.
    let value = |index: usize| ran.log[index].a | ran.log[index].b << 32;
    let reads: Vec<u64> = (0..)
        .zip(&ops)
        .filter(|(_, op)| matches!(op, ReadWithin(..)))
        .map(|(index, _)| value(index))
        .collect();
    let [enabled, running, count] = reads[..] else {
        anyhow::bail!("three words, not {reads:?}");
    };
    ensure!(
        enabled == running,
        "{enabled} ticks enabled, {running} running"
    );
    ensure!(
        count == running + 5,
        "{count} cycles in {running} ticks, from 5 on"
    );
    Ok(())
}

fn unavailable(lab: &Lab) -> Result<()> {
    let ops = [
        Write(0xc001_0200, INSTRUCTIONS),
        Write(0xc001_0202, CYCLES | 1 << 23),
        Spin(10),
        Read(SNAPSHOT, 1),
        Read(word(0, 0), 0x0104),
        ReadWithin(word(0, 1), 1, 1 << 40),
        Read(word(0, 2), 0),
        Read(word(0, 3), 0),
        Read(word(1, 0), 0x0204),
    ];
    check(
        lab,
        "clock counts no instructions",
        &Setup::clock("amd-core"),
        &ops,
    )
}

fn fixed(lab: &Lab) -> Result<()> {
    let ops = [
        Write(0x38f, 4 << 32),
        Write(0x38d, 0x300),
        Spin(10),
        Read(SNAPSHOT, 1),
        // Reference cycles: counting, exact.
        Read(word(34, 0), 0x12),
        ReadWithin(word(34, 3), 1, 1 << 40),
        Read(word(32, 0), 0x01),
        ReadGp(word(35, 0)),
        ReadGp(word(4, 0)),
    ];
    check(lab, "fixed counter 2", &Setup::clock("intel-v2"), &ops)
}

fn faults(lab: &Lab) -> Result<()> {
    let ops = [
        ReadGp(MSR_BASE + 2),
        ReadGp(MSR_BASE + 0xff),
        ReadGp(word(6, 0)),
        ReadGp(word(32, 0)),
        ReadGp(MSR_BASE + 0xfff),
        WriteGp(SNAPSHOT, 0),
        WriteGp(SEQUENCE, 1),
        WriteGp(word(0, 0), 0),
        WriteGp(MSR_BASE + 2, 0),
        Read(SEQUENCE, 0),
    ];
    check(lab, "amd-core has six", &Setup::clock("amd-core"), &ops)
}
