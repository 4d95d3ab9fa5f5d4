//! Every access to a counter in every state, with every cookie.

use arbiter::{Access, Bank, CounterId, Layer, Verdict};

use super::fixture::{ACCESS, MANAGEMENT, OTHER, PMC0, control, cookie, reserve};

const DROP_VALUE: u64 = 0x0dd;

/// How far the owner has gone.
#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Unreserved,
    /// Reserved, and legacy accesses still work.
    Shared,
    /// With an access cookie.
    Private,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    state: State,
    /// Mode bits of the access cookie.
    modes: u64,
    fault: bool,
    fault_rdpmc: bool,
    presented: u64,
    layer: Layer,
    access: Access,
}

fn check(bank: &Bank, case: Case, expected: Verdict) {
    let Case {
        presented,
        layer,
        access,
        ..
    } = case;
    let verdict = bank.check(layer, cookie(presented), PMC0, access);
    assert_eq!(verdict, expected, "{case:?}");
}

/// The verdict by the words of the page: "An access that presents the right cookie, in
/// a layer in which it is valid, is permitted."
fn expected(case: Case) -> Verdict {
    let right = match case.state {
        State::Unreserved | State::Shared => 0,
        State::Private => ACCESS,
    };
    // One letter each, in the order of the mode bits.
    let mode = match case.layer {
        Layer::Firmware => 0b0001,
        Layer::Hypervisor | Layer::HostTool => 0b0010,
        Layer::GuestKernel => 0b0100,
        Layer::GuestUser => 0b1000,
    };
    let reserved = case.state != State::Unreserved;
    let valid = !reserved || case.modes & mode != 0;
    let kernels_rdpmc = case.access == Access::Rdpmc
        && (case.layer == Layer::GuestKernel || case.layer == Layer::Firmware);
    let fault = if kernels_rdpmc {
        case.fault_rdpmc
    } else {
        case.fault
    };
    match (case.presented == right && valid, reserved, fault) {
        (true, _, _) => Verdict::Permit,
        (false, false, _) => Verdict::Drop { read_as: 0 },
        (false, true, true) => Verdict::Fault,
        (false, true, false) => Verdict::Drop {
            read_as: DROP_VALUE,
        },
    }
}

fn bank(state: State, modes: u64, fault: bool, fault_rdpmc: bool) -> Bank {
    let mut bank = Bank::new(2, 1);
    let access = match state {
        State::Unreserved => return bank,
        State::Shared => 0,
        State::Private => ACCESS,
    };
    let errors = u64::from(fault) << 8 | u64::from(fault_rdpmc) << 9;
    reserve(
        &mut bank,
        PMC0,
        Layer::Firmware,
        access,
        control(0xf_000f | modes << 4 | errors),
    );
    let drops = arbiter::Operation::SetDropValue(DROP_VALUE);
    let plan = bank.plan(Layer::Firmware, cookie(MANAGEMENT), PMC0, drops);
    let _ = bank.apply(plan.expect("the owner may"));
    bank
}

#[test]
fn every_access_in_every_state() {
    let mut cases = 0;
    for state in [State::Unreserved, State::Shared, State::Private] {
        for bits in 0..64 {
            let (modes, fault, fault_rdpmc) = (bits & 0xf, bits & 16 != 0, bits & 32 != 0);
            let bank = bank(state, modes, fault, fault_rdpmc);
            for presented in [0, ACCESS, MANAGEMENT, OTHER] {
                for layer in Layer::ALL {
                    for access in [Access::Read, Access::Write, Access::Rdpmc] {
                        let case = Case {
                            state,
                            modes,
                            fault,
                            fault_rdpmc,
                            presented,
                            layer,
                            access,
                        };
                        check(&bank, case, expected(case));
                        cases += 1;
                    }
                }
            }
        }
    }
    assert_eq!(cases, 3 * 64 * 4 * 5 * 3);
}

#[test]
fn a_cookie_that_differs_in_one_bit_is_wrong() {
    let bank = bank(State::Private, 0xf, false, false);
    let access = Access::Read;
    let check = |presented| bank.check(Layer::GuestKernel, cookie(presented), PMC0, access);
    assert_eq!(check(ACCESS), Verdict::Permit);
    for bit in 0..48 {
        let dropped = Verdict::Drop {
            read_as: DROP_VALUE,
        };
        assert_eq!(check(ACCESS ^ 1 << bit), dropped, "bit {bit}");
    }
}

#[test]
fn other_counters_stay_unreserved() {
    let bank = bank(State::Private, 0, true, true);
    for counter in [CounterId::Programmable(1), CounterId::Fixed(0)] {
        for layer in Layer::ALL {
            let verdict = bank.check(layer, cookie(0), counter, Access::Write);
            assert_eq!(verdict, Verdict::Permit, "{layer} {counter}");
        }
    }
}

#[test]
fn a_counter_that_there_is_not_faults_whoever_asks() {
    let bank = Bank::new(2, 1);
    let absent = (2..=40).chain([255]).map(CounterId::Programmable);
    for counter in absent.chain((1..=40).chain([255]).map(CounterId::Fixed)) {
        for presented in [0, ACCESS] {
            for layer in Layer::ALL {
                let verdict = bank.check(layer, cookie(presented), counter, Access::Read);
                assert_eq!(verdict, Verdict::Fault, "{layer} {counter}");
            }
        }
    }
}
