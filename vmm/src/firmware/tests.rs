//! Specifications and the plans that they give.

use arbiter::{Control, CounterId, abi};
use firmware::config::{CounterRequest, Position};
use pmu_virt::PmuModel;

use super::{CounterSpec, FirmwarePlan, PlanError};
use umpire_events::NoTables;

fn no_tables() -> NoTables {
    NoTables(umpire_events::LibraryError::Missing("absent".into()))
}

fn plan(model: &str, specs: &[&str]) -> Result<FirmwarePlan, String> {
    let specs = specs.iter().map(|text| CounterSpec::parse(text));
    let specs: Vec<_> = specs
        .collect::<Result<_, _>>()
        .map_err(|error| error.to_string())?;
    let model = PmuModel::parse(model).expect("a model");
    FirmwarePlan::resolve(&specs, Some(&model), &no_tables()).map_err(|error| error.to_string())
}

const COMPATIBLE: CounterRequest = CounterRequest {
    position: Position::Any,
    private: true,
    keep: false,
    yields: false,
    control: Control::INITIAL,
    drop_value: 0,
    select: 0x43_003c,
};

fn word(bits: u64) -> Control {
    Control::new(bits).expect("a control word")
}

#[test]
fn words_become_requests() {
    fn check(model: &str, spec: &str, expected: CounterRequest) {
        let plan = plan(model, &[spec]).expect(spec);
        assert_eq!(plan.counters(), [expected], "{spec}");
    }
    check("intel-v2", "cycles", COMPATIBLE);
    check(
        "intel-v2",
        "cycles,on=any,access=private,error=drop",
        COMPATIBLE,
    );
    check(
        "intel-v2",
        "cycles:k,on=PMC1,access=shared,keep,lend,yield",
        CounterRequest {
            position: Position::At(1),
            private: false,
            keep: true,
            yields: true,
            control: word(abi::CONTROL_INITIAL | abi::CONTROL_LEND),
            select: 0x42_003c,
            ..COMPATIBLE
        },
    );
    check(
        "intel-v2",
        "instructions:u,on=FIXED0,error=fault,isolate",
        CounterRequest {
            position: Position::At(32),
            control: word(0xff | abi::CONTROL_FAULT),
            select: 2,
            ..COMPATIBLE
        },
    );
    check(
        "intel-v2",
        "ref-cycles,error=fault-rdpmc,read=0x7fff",
        CounterRequest {
            position: Position::At(34),
            control: word(abi::CONTROL_INITIAL | abi::CONTROL_FAULT | abi::CONTROL_FAULT_RDPMC),
            drop_value: 0x7fff,
            select: 3,
            ..COMPATIBLE
        },
    );
    check(
        "intel-v2",
        "cycles,layer=firmware,isolate",
        CounterRequest {
            control: word(abi::CONTROL_MANAGE_FIRMWARE | abi::CONTROL_ACCESS_FIRMWARE),
            ..COMPATIBLE
        },
    );
    check(
        "amd-core",
        "r5300c0,on=PMC5,read=12,layer=any",
        CounterRequest {
            position: Position::At(5),
            drop_value: 12,
            select: 0x43_00c0,
            ..COMPATIBLE
        },
    );
}

#[test]
fn a_plan_says_what_is_set_aside() {
    let plan = plan(
        "intel-v2,counters=4",
        &["cycles,on=PMC3", "instructions,on=FIXED0", "r3c", "rc0"],
    )
    .expect("a plan");
    let aside = plan.set_aside();
    let named: Vec<_> = aside.named.iter().collect();
    assert_eq!(named, [CounterId::Programmable(3), CounterId::Fixed(0)]);
    assert_eq!((aside.any, aside.programmable()), (2, 3));
    assert!(!aside.is_empty());
    assert!(FirmwarePlan::default().set_aside().is_empty());
}

#[test]
fn named_counters_come_before_any() {
    let specs = ["r3c", "cycles,on=PMC3", "rc0", "cycles,on=PMC1"];
    let plan = plan("intel-v2,counters=4", &specs).expect("a plan");
    let order: Vec<_> = plan.counters().iter().map(|one| one.position).collect();
    let any = Position::Any;
    assert_eq!(order, [Position::At(3), Position::At(1), any, any]);
    let selects: Vec<_> = plan.counters().iter().map(|one| one.select).collect();
    assert_eq!(selects[2..], [0x43_003c, 0x43_00c0]);
}

#[test]
fn the_word_that_is_wrong_is_named() {
    fn check(model: &str, specs: &[&str], parts: &[&str]) {
        let error = plan(model, specs).expect_err(specs[0]);
        assert!(!error.contains('\n'), "{error}");
        for part in parts {
            assert!(error.contains(part), "{specs:?}: no {part:?} in: {error}");
        }
    }
    let v2 = "intel-v2,counters=2,width=40";
    check(v2, &[""], &["names no event"]);
    check(v2, &[",keep"], &["',keep'", "names no event"]);
    check(v2, &["cycles,kepe"], &["'kepe'", "keep"]);
    check(v2, &["cycles,"], &["''"]);
    check(v2, &["cycles,colour=red"], &["'colour=red'"]);
    check(v2, &["cycles,on=PMC"], &["'on=PMC'", "on=any"]);
    check(v2, &["cycles,on=PMC+1"], &["'on=PMC+1'"]);
    check(v2, &["cycles,on=PMC32"], &["'on=PMC32'"]);
    check(v2, &["cycles,on=FIXED256"], &["'on=FIXED256'"]);
    check(v2, &["cycles,on=3"], &["'on=3'"]);
    check(
        v2,
        &["cycles,access=all"],
        &["'access=all'", "access=shared"],
    );
    check(
        v2,
        &["cycles,error=gp"],
        &["'error=gp'", "error=fault-rdpmc"],
    );
    check(v2, &["cycles,read=0xg"], &["'read=0xg'"]);
    check(
        v2,
        &["cycles,layer=kernel"],
        &["'layer=kernel'", "layer=firmware"],
    );
    check(v2, &["cycles,read=-1"], &["'read=-1'"]);
    check(v2, &["cycles,read="], &["'read='"]);
    check(v2, &["cycles,keep,keep"], &["'keep'", "twice"]);
    check(v2, &["cycles,on=any,on=PMC0"], &["'on=PMC0'", "twice"]);
    check(v2, &["bicycles"], &["'bicycles'"]);
    check(
        v2,
        &["cycles,on=PMC2"],
        &["PMC2", "PMC0 to PMC1", "FIXED0 to FIXED2"],
    );
    check("amd-core", &["cycles,on=FIXED0"], &["FIXED0", "no FIXEDn"]);
    check(v2, &["cycles,on=FIXED0"], &["FIXED0", "'cycles'", "on=any"]);
    check(v2, &["r10043003c,on=FIXED1"], &["r10043003c"]);
    check(
        v2,
        &["cycles,on=PMC0", "rc0,on=PMC0"],
        &["'rc0,on=PMC0'", "twice"],
    );
    check(
        v2,
        &["cycles,on=PMC0", "cycles", "rc0"],
        &["'rc0'", "2 programmable counters"],
    );
    check(
        v2,
        &["cycles,read=0x10000000000"],
        &["read=0x10000000000", "40 bits"],
    );
}

#[test]
fn without_a_pmu_there_is_nothing_to_reserve() {
    let spec = CounterSpec::parse("cycles").expect("a specification");
    let error = FirmwarePlan::resolve(&[spec], None, &no_tables());
    assert!(matches!(error, Err(PlanError::NoPmu { .. })), "{error:?}");
    let nothing = FirmwarePlan::resolve(&[], None, &no_tables());
    assert_eq!(nothing, Ok(FirmwarePlan::default()));
}
