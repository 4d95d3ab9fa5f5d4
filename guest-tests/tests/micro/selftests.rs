//! What the selftests of the Linux kernel's KVM (tools/testing/selftests/kvm, `pmu_counters_test`,
//! `vmx_pmu_caps_test`) ask of a virtual PMU, asked of every model of ours.

use anyhow::{Context, Result, ensure};
use guest_tests::micro::Op::{Rdpmc, RdpmcGp, Read, ReadGp, ReadWithin, Spin, Write, WriteGp};
use guest_tests::micro::{Lab, Op, Script, Setup, Test, VALUE};
use pmu_virt::PmuModel;

const INTEL: &[&str] = &[
    "intel-v1",
    "intel-v2",
    "intel-v2,counters=3,fixed=2",
    "intel-v3",
    "intel-v4",
    "intel-v5",
    "intel-v5,counters=2,fixed=0x6",
];
const AMD: &[&str] = &["amd-k7", "amd-fam10h", "amd-core", "amd-perfmonv2"];

/// Programmable counters that the architecture has places for.
const PLACES: u8 = 8;
/// USR, OS, EN.
const ENABLED: u64 = 0x43_0000;
/// A value that no counter has by itself.
const MARK: u64 = 0xdead;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "selftests::counters_that_exist_and_no_others",
        run: there,
    },
    Test {
        name: "selftests::fixed_counters_that_exist_and_no_others",
        run: fixed,
    },
    Test {
        name: "selftests::a_disabled_counter_does_not_move",
        run: disabled,
    },
    Test {
        name: "selftests::known_code_is_counted_exactly",
        run: exact,
    },
    Test {
        name: "selftests::capabilities_cannot_be_written",
        run: capabilities,
    },
];

/// MSRs of programmable counter `n`, and of its select.
fn registers(model: &PmuModel, n: u8) -> (u32, u32) {
    let n = u32::from(n);
    match model.name() {
        name if name.starts_with("intel") => (0xc1 + n, 0x186 + n),
        "amd-k7" | "amd-fam10h" => (0xc001_0004 + n, 0xc001_0000 + n),
        _ => (0xc001_0201 + 2 * n, 0xc001_0200 + 2 * n),
    }
}

fn model(setup: &Setup) -> Result<PmuModel> {
    setup.guest_model()?.context("a PMU")
}

fn play(lab: &Lab, name: &str, setup: &Setup, ops: &[Op]) -> Result<Vec<u64>> {
    let script = Script {
        name,
        cr4: 0,
        kernel: ops,
        user: &[],
    };
    let ran = script.check(lab, setup)?;
    let values = ran.log.iter().map(|entry| match entry.kind {
        VALUE => entry.b << 32 | entry.a & 0xffff_ffff,
        _ => u64::MAX,
    });
    Ok(values.collect())
}

/// Each counter takes a value and shows it, by RDMSR and RDPMC; the next one is not there. RDPMC
/// has no bit 31 ("fast") on these processors.
fn there(lab: &Lab) -> Result<()> {
    for spec in INTEL.iter().chain(AMD) {
        let setup = Setup::clock(spec);
        let model = model(&setup)?;
        // RDPMC is looked for from the first control on (docs/internals/rdpmc.md).
        let (_, select) = registers(&model, 0);
        let mut ops = vec![Write(select, ENABLED), Write(select, 0)];
        for n in 0..PLACES {
            let (counter, _) = registers(&model, n);
            if n < model.programmable() {
                ops.extend([
                    Read(counter, 0),
                    Write(counter, MARK),
                    Read(counter, MARK),
                    Rdpmc(n.into(), MARK),
                ]);
            } else {
                // On AMD's processors with four counters these are other counters' places.
                if spec.starts_with("intel") {
                    ops.extend([ReadGp(counter), WriteGp(counter, MARK)]);
                }
                ops.push(RdpmcGp(n.into()));
            }
            ops.push(RdpmcGp(1 << 31 | u32::from(n)));
        }
        play(lab, "programmable", &setup, &ops)?;
    }
    Ok(())
}

/// The same of fixed-function counters, with their bits in the shared registers.
fn fixed(lab: &Lab) -> Result<()> {
    for spec in INTEL {
        let setup = Setup::clock(spec);
        let model = model(&setup)?;
        let has_global = model.version() >= 2;
        let mut ops = vec![Write(0x186, ENABLED), Write(0x186, 0)];
        for n in 0..4_u8 {
            let (msr, index) = (0x309 + u32::from(n), 1 << 30 | u32::from(n));
            let (control, enable) = (1 << (4 * n), 1 << (32 + n));
            if model.fixed_map() >> n & 1 == 1 {
                ops.extend([
                    Read(msr, 0),
                    Write(msr, MARK),
                    Read(msr, MARK),
                    Rdpmc(index, MARK),
                    Write(0x38d, control),
                    Write(0x38f, enable),
                    Write(0x38d, 0),
                    Write(0x38f, 0),
                ]);
                continue;
            }
            ops.extend([ReadGp(msr), WriteGp(msr, 0), RdpmcGp(index)]);
            if has_global {
                ops.extend([WriteGp(0x38d, control), WriteGp(0x38f, enable)]);
            }
        }
        if !has_global {
            ops.extend([ReadGp(0x38d), ReadGp(0x38e), ReadGp(0x38f), ReadGp(0x390)]);
        }
        play(lab, "fixed", &setup, &ops)?;
    }
    Ok(())
}

/// A counter moves while it is enabled, and not a bit afterwards.
fn disabled(lab: &Lab) -> Result<()> {
    for spec in INTEL.iter().chain(AMD) {
        let setup = Setup::clock(spec);
        let model = model(&setup)?;
        let cycles = if spec.starts_with("intel") {
            0x3c
        } else {
            0x76
        };
        let mut ops = Vec::new();
        let mut looks = Vec::new();
        for n in 0..model.programmable() {
            let (counter, select) = registers(&model, n);
            ops.extend([Write(select, ENABLED | cycles), Spin(1000)]);
            ops.extend([Write(select, 0), ReadWithin(counter, 1, 1 << 40)]);
            looks.push(ops.len() - 1);
            ops.extend([Spin(1000), ReadWithin(counter, 1, 1 << 40)]);
        }
        // `clock` counts no instructions, which are the first.
        let is_there = |n: &u8| model.version() >= 2 && model.fixed_map() >> n & 1 == 1;
        for n in (1..3_u8).filter(is_there) {
            let msr = 0x309 + u32::from(n);
            ops.extend([Write(0x38f, 1 << (32 + n)), Write(0x38d, 3 << (4 * n))]);
            ops.extend([Spin(1000), Write(0x38d, 0), ReadWithin(msr, 1, 1 << 40)]);
            looks.push(ops.len() - 1);
            ops.extend([Spin(1000), ReadWithin(msr, 1, 1 << 40)]);
        }
        let values = play(lab, "disabled", &setup, &ops)?;
        for at in looks {
            let (then, now) = (values[at], values[at + 2]);
            ensure!(then == now, "{spec}: {}: {then} became {now}", ops[at]);
        }
    }
    Ok(())
}

/// A loop of two instructions, one of them a branch: so many rounds more, so many events more.
fn exact(lab: &Lab) -> Result<()> {
    const MORE: u64 = 400;
    for spec in INTEL.iter().chain(AMD) {
        let setup = Setup::step(spec);
        let model = model(&setup)?;
        let (counter, select) = registers(&model, model.programmable() - 1);
        let intel = spec.starts_with("intel");
        let [instructions, branches] = if intel { [0xc0, 0xc4] } else { [0xc0, 0xc2] };
        let mut programs = vec![
            (
                vec![Write(select, ENABLED | instructions)],
                Write(select, 0),
                counter,
                2,
            ),
            (
                vec![Write(select, ENABLED | branches)],
                Write(select, 0),
                counter,
                1,
            ),
        ];
        if model.version() >= 2 && intel && model.fixed_map() & 1 == 1 {
            let on = vec![Write(0x38f, 1 << 32), Write(0x38d, 3)];
            programs.push((on, Write(0x38d, 0), 0x309, 2));
        }
        for (on, off, counter, of_round) in programs {
            let count = |rounds: u64| -> Result<u64> {
                let mut ops = on.clone();
                ops.push(Spin(u32::try_from(rounds)?));
                ops.extend([off, ReadWithin(counter, 1, 1 << 40)]);
                let values = play(lab, "exact", &setup, &ops)?;
                values.last().copied().context("a value")
            };
            let (few, many) = (count(100)?, count(100 + MORE)?);
            ensure!(
                many - few == of_round * MORE,
                "{spec}: {}: {few} of 100 rounds, {many} of {}",
                on[0],
                100 + MORE
            );
        }
    }
    Ok(())
}

/// IA32_PERF_CAPABILITIES: each bit of it is as it is.
fn capabilities(lab: &Lab) -> Result<()> {
    for spec in ["intel-v2", "intel-v3", "intel-v4", "intel-v5"] {
        let mut ops = vec![Read(0x345, 1 << 13)];
        ops.extend((0..64).map(|bit| WriteGp(0x345, 1 << 13 ^ 1 << bit)));
        ops.push(Read(0x345, 1 << 13));
        play(lab, "capabilities", &Setup::clock(spec), &ops)?;
    }
    Ok(())
}
