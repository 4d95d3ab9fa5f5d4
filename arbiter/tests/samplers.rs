//! Samplers of instruction-based sampling as positions that can be reserved.

use arbiter::abi::{FEATURE_IBS, POSITION_IBS_FETCH, POSITION_IBS_OP, REQUEST_EVENT};
use arbiter::{
    Backing, CounterId, CounterSet, IbsKind, Outcome, PcrRegister, PerKind, Policy, Reason,
    Request, Scheme, Wanted,
};

use crate::harness::{HV, Harness, KERNEL, bits, pmc, share};

const FETCH: CounterId = CounterId::Ibs(IbsKind::Fetch);
const OP: CounterId = CounterId::Ibs(IbsKind::Op);

/// Samplers beside so many programmable counters.
fn with(scheme: Scheme, counters: u8, policy: Policy) -> Harness {
    let mut harness = Harness::new(scheme, counters, policy);
    harness.unit = harness.unit.with_samplers();
    harness.end_phase();
    harness
}

#[test]
fn positions_and_names() {
    for (sampler, position) in [(FETCH, POSITION_IBS_FETCH), (OP, POSITION_IBS_OP)] {
        assert_eq!(sampler.global_bit(), Some(position));
        let position = u8::try_from(position).unwrap();
        assert_eq!(CounterId::at_position(position), Some(sampler));
        assert_eq!(CounterId::named(&sampler.to_string()), Some(sampler));
    }
    assert!(CounterSet::SAMPLERS.iter().eq([FETCH, OP]));
    let all = CounterSet::from_bits(u64::MAX);
    assert_eq!(
        PerKind::count(all),
        PerKind {
            programmable: 34,
            fixed: 30
        }
    );
    for name in [
        "", "PMC", "PMC+1", "PMC32", "FIXED30", "pmc0", "IBS", "PMC1 ",
    ] {
        assert_eq!(CounterId::named(name), None, "{name}");
    }
}

#[test]
fn where_there_are_none() {
    let mut harness = Harness::new(Scheme::Independent, 2, Policy::default());
    harness.end_phase();
    assert_eq!(harness.unit.features() & FEATURE_IBS, 0);
    assert_eq!(harness.read(KERNEL, PcrRegister::Status(OP)), None);
    assert!(!harness.write(KERNEL, PcrRegister::ManagementKey(OP), 5, 0));
    let answer = harness.reserve(KERNEL, Wanted::This(OP), None);
    assert!(matches!(answer.outcome, Outcome::Refused(_)));
}

#[test]
fn one_is_asked_for_by_its_position_only() {
    let mut harness = with(Scheme::Independent, 2, Policy::default());
    assert_ne!(harness.unit.features() & FEATURE_IBS, 0);
    let all = harness.any(KERNEL, 2).granted();
    assert_eq!(all, [pmc(0), pmc(1)].into_iter().collect());
    let more = harness.any(KERNEL, 1);
    assert_eq!(more.outcome, Outcome::Refused(Reason::NoneFree));
    let op = harness.reserve(KERNEL, Wanted::This(OP), None);
    assert!(op.granted().contains(OP));
    // It has its own event.
    let value = 0x3f11 | REQUEST_EVENT;
    assert!(matches!(Request::decode(value, 1), Err(Reason::Malformed)));
    // The register way, too, and a drop value of 64 bits.
    assert!(harness.write(KERNEL, PcrRegister::ManagementKey(FETCH), 5, 0));
    assert!(harness.write(KERNEL, PcrRegister::DropValue(FETCH), u64::MAX, 5));
    assert_eq!(harness.held(KERNEL).len(), 4);
    assert!(harness.write(KERNEL, PcrRegister::ManagementKey(OP), 0, bits(KERNEL)));
    assert!(!harness.held(KERNEL).contains(OP));
}

/// It counts against its owner's maximum, and is no counter that another's minimum asks for.
#[test]
fn shares() {
    let policy = Policy {
        hypervisor: share(0, 1, 0),
        kernel: share(2, 4, 0),
        ..Policy::default()
    };
    let mut harness = with(Scheme::Independent, 2, policy);
    let none_left = harness.any(HV, 1);
    assert_eq!(none_left.outcome, Outcome::Refused(Reason::Minimum));
    let op = harness.reserve(HV, Wanted::This(OP), None);
    assert!(op.granted().contains(OP));
    let second = harness.reserve(HV, Wanted::This(FETCH), None);
    assert_eq!(second.outcome, Outcome::Refused(Reason::Maximum));
}

/// Each needs a physical counter, of those that programmable ones need.
#[test]
fn backing() {
    let mut harness = with(Scheme::Independent, 2, Policy::default());
    let most = Backing {
        programmable: 1,
        ..Backing::whole()
    };
    let effects = harness.cx(|unit, cx| unit.back(most, cx));
    harness.note(effects);
    assert!(
        harness
            .reserve(KERNEL, Wanted::This(OP), None)
            .granted()
            .contains(OP)
    );
    let second = harness.any(KERNEL, 1);
    assert_eq!(second.outcome, Outcome::Refused(Reason::Unbacked));
    assert!(!harness.write(KERNEL, PcrRegister::ManagementKey(FETCH), 5, 0));
}

/// A minimum is one of counters: neither a free sampler nor a held one satisfies it.
#[test]
fn minima() {
    let policy = Policy {
        kernel: share(1, 255, 0),
        ..Policy::default()
    };
    let mut harness = with(Scheme::Independent, 2, policy);
    let op = harness.reserve(KERNEL, Wanted::This(OP), None);
    assert!(op.granted().contains(OP));
    let both = harness.any(HV, 2);
    assert_eq!(both.outcome, Outcome::Refused(Reason::Minimum));
    assert!(!harness.any(HV, 1).granted().is_empty());
    assert!(!harness.any(KERNEL, 1).granted().is_empty());
}

/// A layer of higher priority takes it, whatever minimum of counters its holder has; and
/// does not take the holder's last counter for it.
#[test]
fn forced() {
    let policy = Policy {
        hypervisor: share(0, 255, 9),
        kernel: share(1, 255, 0),
        grace_ms: 0,
        ..Policy::default()
    };
    let mut harness = with(Scheme::Interacting, 2, policy);
    harness.reserve(KERNEL, Wanted::This(OP), None);
    harness.this(KERNEL, 0);
    harness.this(KERNEL, 1);
    let op = harness.reserve(HV, Wanted::This(OP), None);
    harness.at(1000);
    assert_ne!(op.outcome, Outcome::Refused(Reason::Held));
    assert!(harness.held(HV).contains(OP), "{:?}", harness.events());
    harness.any(HV, 2);
    harness.at(2000);
    assert_eq!(harness.held(KERNEL).counters().len(), 2);
    harness.any(HV, 1);
    harness.at(3000);
    assert_eq!(harness.held(KERNEL).counters().len(), 1);
}
