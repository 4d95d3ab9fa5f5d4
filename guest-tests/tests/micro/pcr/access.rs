//! Reserving a counter, and what others get of it.

use anyhow::{Result, ensure};
use arbiter::abi;
use guest_tests::micro::{Lab, Op, Script, Setup, Test};
use pmu_virt::{RateTable, SimBackend};
use vmm::micro::KERNEL_CODE;

use super::{
    ACCESS, CR4_PCE, KERNELS, KEY, OTHER_KEY, TAKE, access_key, alias, alias_select, control,
    counter, drop_value, key, rdpmc, select, setup, single, status, told,
};

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "pcr::reserve_lock_and_release",
        run: reserve,
    },
    Test {
        name: "pcr::a_rogue_access_is_dropped",
        run: dropped,
    },
    Test {
        name: "pcr::a_rogue_access_faults",
        run: faulted,
    },
    Test {
        name: "pcr::a_programs_rdpmc",
        run: programs,
    },
    Test {
        name: "pcr::registers_without_a_meaning",
        run: unknown,
    },
    Test {
        name: "pcr::what_nobody_counts_cannot_be_reserved",
        run: unbacked,
    },
    Test {
        name: "pcr::a_request_names_an_event",
        run: named,
    },
    Test {
        name: "pcr::a_sampler_is_reserved",
        run: sampler,
    },
    Test {
        name: "pcr::switched_off_there_is_nothing",
        run: switched_off,
    },
];

fn play(lab: &Lab, name: &str, kernel: &[Op], user: &[Op], expected: &str) -> Result<()> {
    let script = Script {
        name,
        cr4: CR4_PCE,
        kernel,
        user,
    };
    let ran = script.check(lab, &setup())?;
    let told = told(&ran);
    ensure!(told == expected, "'{name}': {told}");
    let seen = format!("{:x?}", ran.outcome.vcpus[0].events);
    for secret in [KEY, OTHER_KEY, ACCESS] {
        ensure!(!seen.contains(&format!("{secret:x}")), "a cookie in {seen}");
    }
    Ok(())
}

fn reserve(lab: &Lab) -> Result<()> {
    const OPS: &[Op] = &[
        Op::Read(status(1), 0),
        Op::Read(control(1), abi::CONTROL_INITIAL),
        Op::WriteGp(access_key(1), ACCESS),
        Op::Write(key(1), 0),
        Op::Write(select(1), 0x30076),
        Op::Write(key(1), KEY),
        Op::Read(status(1), KERNELS),
        // Only so can others find out.
        Op::WriteGp(key(1), OTHER_KEY),
        Op::With(OTHER_KEY, &Op::WriteGp(key(1), OTHER_KEY)),
        Op::With(1 << 48 | KEY, &Op::WriteGp(key(1), 0)),
        // Legacy accesses work until there is an access cookie.
        Op::Write(counter(1), 0x55),
        Op::Read(alias(1), 0x55),
        Op::ReadGp(key(1)),
        Op::With(KEY, &Op::Write(access_key(1), ACCESS)),
        Op::Read(status(1), KERNELS | abi::STATUS_PRIVATE),
        Op::With(ACCESS, &Op::Read(alias_select(1), 0x30076)),
        // Handed over, and given back clean.
        Op::With(KEY, &Op::Write(key(1), OTHER_KEY)),
        Op::With(KEY, &Op::WriteGp(key(1), 0)),
        Op::With(OTHER_KEY, &Op::Write(key(1), 0)),
        Op::Read(status(1), 0),
        Op::Read(select(1), 0),
        Op::Read(counter(1), 0),
    ];
    let expected = "refused unreserved, reserved, refused cookie x2, refused malformed, \
                    access-set, handed-over, refused cookie, released";
    play(lab, "reserve", OPS, &[], expected)
}

/// The op sampler of instruction-based sampling: shut to others, its owner samples.
fn sampler(lab: &Lab) -> Result<()> {
    const OP: u32 = abi::POSITION_IBS_OP;
    const CONTROL: u32 = 0xc001_1033;
    const RIP: u32 = 0xc001_1034;
    const OWN_CONTROL: u32 = abi::MSR_BASE + abi::MSR_IBS + 3;
    const OWN_RIP: u32 = OWN_CONTROL + 1;
    /// A period of 0x1000 cycles, enabled; and the bit of a sample.
    const START: u64 = 0x100 | 1 << 17;
    const VALID: u64 = 1 << 18;
    const OPS: &[Op] = &[
        Op::Read(status(OP), 0),
        Op::Write(key(OP), KEY),
        Op::With(KEY, &Op::Write(access_key(OP), ACCESS)),
        Op::Read(status(OP), KERNELS | abi::STATUS_PRIVATE),
        Op::With(ACCESS, &Op::Write(OWN_CONTROL, START)),
        Op::Wait(0x8_0000),
        // A legacy driver sees nothing and does nothing.
        Op::Read(CONTROL, 0),
        Op::Write(CONTROL, 0),
        Op::Read(RIP, 0),
        Op::With(ACCESS, &Op::Read(OWN_CONTROL, START | VALID)),
        Op::With(
            ACCESS,
            &Op::ReadWithin(OWN_RIP, KERNEL_CODE, KERNEL_CODE + 0x1_0000),
        ),
        // The other sampler is free, and counters have no register of it.
        Op::Write(0xc001_1030, 0x10),
        Op::Read(0xc001_1030, 0x10),
        Op::ReadGp(alias(OP)),
        Op::With(KEY, &Op::Write(key(OP), 0)),
        Op::Read(CONTROL, 0),
        Op::Read(RIP, 0),
    ];
    let script = Script {
        name: "sampler",
        cr4: 0,
        kernel: OPS,
        user: &[],
    };
    let ran = script.check(lab, &Setup::clock("amd-core,ibs=on"))?;
    let told = told(&ran);
    let expected = "reserved, access-set, dropped-read held, dropped-write held, \
                    dropped-read held, released";
    ensure!(told == expected, "{told}");
    Ok(())
}

fn dropped(lab: &Lab) -> Result<()> {
    const OPS: &[Op] = &[
        TAKE[0],
        TAKE[1],
        Op::With(KEY, &Op::Write(drop_value(1), 0x77)),
        Op::Read(drop_value(1), 0x77),
        Op::With(ACCESS, &Op::Write(alias_select(1), 0x30076)),
        Op::With(ACCESS, &Op::Write(alias(1), 0x1234)),
        Op::Write(counter(1), 5),
        Op::Write(select(1), 0),
        Op::Read(counter(1), 0x77),
        Op::Read(select(1), 0x77),
        Op::Rdpmc(1, 0x77),
        Op::With(ACCESS, &Op::Rdpmc(rdpmc(1), 0x1234)),
        Op::With(OTHER_KEY, &Op::Rdpmc(rdpmc(1), 0x77)),
        // The cookie counts in RDPMC's own form only.
        Op::With(ACCESS, &Op::Rdpmc(1, 0x77)),
        Op::With(ACCESS, &Op::Read(counter(1), 0x77)),
        Op::With(ACCESS, &Op::Read(alias(1), 0x1234)),
        Op::With(ACCESS, &Op::Read(alias_select(1), 0x30076)),
        Op::RdpmcGp(rdpmc(6)),
    ];
    let expected = "reserved, access-set, drop-value-set, dropped-write held x2, \
                    dropped-read held x3, dropped-read cookie, dropped-read held x2";
    play(lab, "drop", OPS, &[], expected)
}

const FAULTS: u64 = abi::CONTROL_INITIAL | abi::CONTROL_FAULT;

fn faulted(lab: &Lab) -> Result<()> {
    const OPS: &[Op] = &[
        TAKE[0],
        TAKE[1],
        Op::With(ACCESS, &Op::Write(alias_select(1), 0x30076)),
        Op::With(ACCESS, &Op::Write(alias(1), 0x1234)),
        Op::With(KEY, &Op::Write(control(1), FAULTS)),
        Op::WriteGp(counter(1), 5),
        Op::ReadGp(counter(1)),
        Op::ReadGp(select(1)),
        Op::With(OTHER_KEY, &Op::ReadGp(alias(1))),
        // A kernel's RDPMC is apart.
        Op::Rdpmc(1, 0),
        Op::With(
            KEY,
            &Op::Write(control(1), FAULTS | abi::CONTROL_FAULT_RDPMC),
        ),
        Op::RdpmcGp(1),
        Op::With(OTHER_KEY, &Op::RdpmcGp(rdpmc(1))),
        Op::With(1 << 63 | ACCESS, &Op::RdpmcGp(rdpmc(1))),
        Op::With(ACCESS, &Op::Rdpmc(rdpmc(1), 0x1234)),
        Op::With(ACCESS, &Op::Read(alias(1), 0x1234)),
        Op::With(KEY, &Op::WriteGp(control(1), 1 << 21)),
    ];
    let expected = "reserved, access-set, control-set, faulted held x3, faulted cookie, \
                    dropped-read held, control-set, faulted held, faulted cookie, \
                    faulted malformed, refused malformed";
    play(lab, "fault", OPS, &[], expected)
}

fn programs(lab: &Lab) -> Result<()> {
    const KERNEL: &[Op] = &[
        TAKE[0],
        TAKE[1],
        Op::With(KEY, &Op::Write(drop_value(1), 0x99)),
        Op::With(ACCESS, &Op::Write(alias_select(1), 0x30076)),
        Op::With(ACCESS, &Op::Write(alias(1), 0x1234)),
        Op::Write(counter(2), 0x22),
        Op::Write(key(3), KEY),
        Op::With(KEY, &Op::Write(access_key(3), ACCESS)),
        Op::With(KEY, &Op::Write(control(3), FAULTS)),
    ];
    const USER: &[Op] = &[
        Op::Rdpmc(2, 0x22),
        Op::Rdpmc(1, 0x99),
        Op::With(ACCESS, &Op::Rdpmc(rdpmc(1), 0x1234)),
        Op::With(KEY, &Op::Rdpmc(rdpmc(1), 0x99)),
        Op::RdpmcGp(3),
        Op::With(ACCESS, &Op::Rdpmc(rdpmc(3), 0)),
        // MSRs are the kernel's.
        Op::With(ACCESS, &Op::ReadGp(alias(1))),
    ];
    let expected = "reserved, access-set, drop-value-set, reserved, access-set, control-set, \
                    dropped-read held, dropped-read cookie, faulted held";
    play(lab, "program", KERNEL, USER, expected)
}

fn unknown(lab: &Lab) -> Result<()> {
    const OPS: &[Op] = &[
        Op::ReadGp(single(0x249)),
        Op::WriteGp(single(0x249), 0),
        Op::ReadGp(single(abi::MSR_COUNT - 1)),
        Op::ReadGp(single(abi::MSR_COUNT)),
        Op::WriteGp(single(abi::MSR_RANDOM), 1),
        Op::WriteGp(status(0), 0),
        Op::ReadGp(status(6)),
        Op::ReadGp(status(32)),
        Op::WriteGp(key(6), KEY),
        Op::Read(single(abi::MSR_PHASE), abi::LAYER_KERNEL),
        Op::WriteGp(single(abi::MSR_PHASE), abi::PHASE_END),
    ];
    play(
        lab,
        "unknown",
        OPS,
        &[],
        "refused no-counter, refused phase",
    )
}

/// `clock` counts cycles and no instructions, for which FIXED0 is.
fn unbacked(lab: &Lab) -> Result<()> {
    const FIXED0: u64 = 32;
    const FIXED1: u64 = 33;
    const ASK: u64 = abi::REQUEST_RESERVE | abi::REQUEST_POSITION;
    const NUMBER_1: u64 = 1 << abi::ANSWER_NUMBER_SHIFT;
    const OPS: &[Op] = &[
        Op::Read(single(abi::MSR_REFUSAL), abi::REASON_NONE),
        Op::WriteGp(key(32), KEY),
        Op::Read(single(abi::MSR_REFUSAL), abi::REASON_UNBACKED),
        Op::With(
            KEY,
            &Op::Write(
                single(abi::MSR_REQUEST),
                ASK | FIXED0 << abi::REQUEST_WHICH_SHIFT,
            ),
        ),
        Op::Read(
            single(abi::MSR_ANSWER),
            abi::ANSWER_REFUSED | abi::REASON_UNBACKED << abi::ANSWER_REASON_SHIFT | NUMBER_1,
        ),
        Op::With(
            KEY,
            &Op::Write(
                single(abi::MSR_REQUEST),
                ASK | FIXED1 << abi::REQUEST_WHICH_SHIFT,
            ),
        ),
        Op::Read(single(abi::MSR_GRANTED), 1 << FIXED1),
        Op::Write(key(1), KEY),
        // Somebody else's guess, which tells its reason too.
        Op::With(OTHER_KEY, &Op::WriteGp(key(1), 0)),
        Op::Read(single(abi::MSR_REFUSAL), abi::REASON_COOKIE),
    ];
    let script = Script {
        name: "unbacked",
        cr4: CR4_PCE,
        kernel: OPS,
        user: &[],
    };
    let intel = Setup {
        pcr: setup().pcr,
        ..Setup::clock("intel-v2")
    };
    let ran = script.check(lab, &intel)?;
    let expected = "refused unbacked x2, reserved x2, refused cookie";
    ensure!(told(&ran) == expected, "{}", told(&ran));
    Ok(())
}

/// Instructions are counted by one physical counter alone.
fn named(lab: &Lab) -> Result<()> {
    const INSTRUCTIONS: u64 = 0xc0;
    const FOR_INSTRUCTIONS: u64 = abi::REQUEST_RESERVE
        | 1 << abi::REQUEST_WHICH_SHIFT
        | INSTRUCTIONS << abi::REQUEST_SELECT_SHIFT
        | abi::REQUEST_EVENT;
    const SECOND: u64 = 1 << abi::REQUEST_WHICH_SHIFT;
    const REFUSED: u64 = abi::ANSWER_REFUSED | abi::REASON_UNBACKED << abi::ANSWER_REASON_SHIFT;
    const NUMBER: u64 = abi::ANSWER_NUMBER_SHIFT;
    const COUNTED: u64 = INSTRUCTIONS | 0x43_0000;
    const ANY: u64 = abi::REQUEST_RESERVE | SECOND;
    const OPS: &[Op] = &[
        Op::With(
            KEY,
            &Op::Write(single(abi::MSR_REQUEST), FOR_INSTRUCTIONS + SECOND),
        ),
        Op::Read(single(abi::MSR_ANSWER), REFUSED | 1 << NUMBER),
        Op::With(KEY, &Op::Write(single(abi::MSR_REQUEST), FOR_INSTRUCTIONS)),
        Op::Read(single(abi::MSR_GRANTED), 1 << 5),
        Op::With(KEY, &Op::Write(single(abi::MSR_REQUEST), ANY)),
        Op::Read(single(abi::MSR_GRANTED), 1 << 4),
        // The other one does not get the counter that is kept, though nobody uses it yet.
        Op::With(KEY, &Op::Write(alias_select(4), COUNTED)),
        Op::Read(
            single(abi::MSR_NOTICE),
            abi::NOTICE_TAKEN
                | 4 << abi::NOTICE_POSITION_SHIFT
                | abi::LAYER_KERNEL << abi::NOTICE_LAYER_SHIFT
                | abi::REASON_UNBACKED << abi::NOTICE_REASON_SHIFT,
        ),
        Op::With(KEY, &Op::Write(alias_select(5), COUNTED)),
        Op::Read(single(abi::MSR_NOTICE), abi::NOTICE_NONE),
        // Bits that mean nothing, and an event for who gives back.
        Op::With(
            KEY,
            &Op::WriteGp(single(abi::MSR_REQUEST), FOR_INSTRUCTIONS | 1 << 62),
        ),
        Op::With(
            KEY,
            &Op::WriteGp(
                single(abi::MSR_REQUEST),
                ANY | 1 << abi::REQUEST_SELECT_SHIFT,
            ),
        ),
    ];
    let script = Script {
        name: "named",
        cr4: CR4_PCE,
        kernel: OPS,
        user: &[],
    };
    let sim = Setup {
        backend: || {
            let text = "counters = 6\n[event.cycles]\nrate = 1000\n\
                        [event.instructions]\nrate = 100\nslots = [2]\n";
            let table = RateTable::parse(text, "rates").unwrap_or_else(|error| panic!("{error}"));
            Box::new(SimBackend::new(table, 1_000_000))
        },
        ..setup()
    };
    let ran = script.check(lab, &sim)?;
    let expected = "refused unbacked, reserved x2, refused unbacked, refused malformed x2";
    ensure!(told(&ran) == expected, "{}", told(&ran));
    Ok(())
}

fn switched_off(lab: &Lab) -> Result<()> {
    let script = Script {
        name: "off",
        cr4: CR4_PCE,
        kernel: &[
            Op::ReadGp(status(1)),
            Op::WriteGp(key(1), KEY),
            Op::ReadGp(single(abi::MSR_RANDOM)),
            Op::ReadGp(alias(1)),
            Op::Write(select(1), 0x30076),
            Op::RdpmcGp(rdpmc(1)),
            Op::Write(counter(1), 7),
            Op::Rdpmc(1, 7),
        ],
        user: &[],
    };
    let off = Setup {
        pcr: None,
        ..setup()
    };
    let ran = script.check(lab, &off)?;
    ensure!(told(&ran).is_empty());
    Ok(())
}
