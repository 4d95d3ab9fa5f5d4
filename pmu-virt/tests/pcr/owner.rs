//! A counter that somebody holds: who is let through, what the others see, and
//! what is left when it is given back.

use arbiter::{Verdict, abi};
use pmu_virt::{CounterId, Denial, Grant};

use super::machine::Op::{As, P, PGp, Pmi, R, RGp, Run, Told, W, WGp};
use super::machine::*;
use crate::limited::Limited;
use crate::seated::Seated;

const REF: u64 = 0x43_013c;
const CYCLES: u64 = 0x43_003c;

fn then(start: &[Op], rest: &[Op]) -> Vec<Op> {
    [start, rest].concat()
}

#[test]
fn a_wrong_cookie_is_dropped() {
    let ops = [
        W(0x186, REF),
        W(0xc1, 100),
        R(0xc1, 0),
        R(0x186, 0),
        P(0, 0),
        R(counter(0), 0),
        As(USER, 0),
        P(0, 0),
        Told(&[
            "guest kernel PMC0 reserved",
            "guest kernel PMC0 access-set",
            "guest kernel PMC0 dropped-write held",
            "guest kernel PMC0 dropped-write held",
            "guest kernel PMC0 dropped-read held",
            "guest kernel PMC0 dropped-read held",
            "guest kernel PMC0 dropped-read held",
            "guest kernel PMC0 dropped-read held",
            "guest user PMC0 dropped-read held",
        ]),
        As(KERNEL, X),
        R(counter(0), 0),
        W(select(0), REF),
        R(overflow(0), 0),
        P(abi::RDPMC_COOKIE, 0),
        Told(&[
            "guest kernel PMC0 dropped-read cookie",
            "guest kernel PMC0 dropped-write cookie",
            "guest kernel PMC0 dropped-read cookie",
            "guest kernel PMC0 dropped-read cookie",
        ]),
        // Nothing of that took place.
        As(KERNEL, A),
        R(select(0), 0),
        R(counter(0), 0),
        W(select(0), REF),
        W(counter(0), 7),
        Run(5),
        R(counter(0), 12),
        P(abi::RDPMC_COOKIE, 12),
        As(USER, A),
        P(abi::RDPMC_COOKIE, 12),
        P(0, 0),
        // Other counters are not concerned; an unreserved one drops cookies.
        As(KERNEL, A),
        W(0x187, REF),
        R(0x187, REF),
        R(select(1), 0),
        W(select(1), 0),
        R(0x187, REF),
        Told(&[
            "guest user PMC0 dropped-read held",
            "guest kernel PMC1 dropped-read unreserved",
            "guest kernel PMC1 dropped-write unreserved",
        ]),
    ];
    let machine = check(&Setup::of("intel-v2"), &then(&private(0), &ops));
    let unit = machine.pmu.claims().unit().expect("it has reservations");
    assert_eq!(unit.wrong_cookies(), 4);
}

#[test]
fn a_dropped_read_yields_the_drop_value() {
    let ops = [
        As(KERNEL, M),
        W(drop_value(32), 0xd0),
        WGp(drop_value(32), 1 << 48),
        As(KERNEL, 0),
        R(drop_value(32), 0xd0),
        R(0x309, 0xd0),
        R(counter(32), 0xd0),
        R(select(32), 0xd0),
        R(overflow(32), 0xd0),
        P(0x4000_0000, 0xd0),
        P(abi::RDPMC_COOKIE + 32, 0xd0),
    ];
    check(&Setup::of("intel-v2"), &then(&private(32), &ops));
}

#[test]
fn a_fault_raises_gp_and_an_rdpmc_at_cpl_0_only_if_asked_for() {
    let faults = [
        RGp(0xc1),
        WGp(0xc1, 1),
        RGp(0x186),
        WGp(0x186, REF),
        RGp(0x4c1),
        RGp(counter(0)),
        WGp(select(0), REF),
        RGp(overflow(0)),
        As(USER, 0),
        PGp(0),
        PGp(abi::RDPMC_COOKIE),
        As(KERNEL, 0),
    ];
    let mut machine = check(&Setup::of("intel-v2"), &private(0));
    play(&mut machine, &controlled(0, 0xff | abi::CONTROL_FAULT));
    play(&mut machine, &faults);
    let dropped = [P(0, 0), P(abi::RDPMC_COOKIE, 0)];
    play(&mut machine, &dropped);
    let both = 0xff | abi::CONTROL_FAULT | abi::CONTROL_FAULT_RDPMC;
    play(&mut machine, &controlled(0, both));
    play(&mut machine, &faults);
    play(&mut machine, &[PGp(0), PGp(abi::RDPMC_COOKIE)]);
    // And nothing has changed.
    let unchanged = [As(KERNEL, A), R(select(0), 0), R(counter(0), 0)];
    play(&mut machine, &unchanged);
}

#[test]
fn a_cookie_counts_only_in_the_layers_that_its_owner_names() {
    let manage = abi::CONTROL_MANAGE_KERNEL;
    let mut machine = check(&Setup::of("intel-v2"), &private(2));
    // The access cookie for programs only.
    play(
        &mut machine,
        &controlled(2, manage | abi::CONTROL_ACCESS_USER),
    );
    let ops = [
        As(KERNEL, A),
        R(counter(2), 0),
        W(select(2), REF),
        As(USER, A),
        P(abi::RDPMC_COOKIE + 2, 0),
        Told(&[
            "guest kernel PMC2 reserved",
            "guest kernel PMC2 access-set",
            "guest kernel PMC2 control-set",
            "guest kernel PMC2 dropped-read layer",
            "guest kernel PMC2 dropped-write layer",
        ]),
        As(FIRMWARE, M),
        WGp(control(2), abi::CONTROL_INITIAL),
        Told(&["firmware PMC2 refused layer"]),
    ];
    play(&mut machine, &ops);
}

fn read_as_hypervisor(
    machine: &mut Machine,
    counter: CounterId,
    presented: u64,
) -> Option<Result<u64, Verdict>> {
    let (pmu, core) = machine.pmu.parts();
    pmu.read_as_hypervisor(Some(core), counter, presented)
}

/// The hypervisor reads a counter of the kernel's: the right cookie opens it where the
/// mode bit of its layer is set, and nothing does where it is clear.
#[test]
fn the_hypervisors_reads_are_judged_as_the_hypervisors() {
    const HYPERVISOR: u64 = abi::CONTROL_ACCESS_HYPERVISOR;
    let drops = Err(Verdict::Drop { read_as: 0xd0 });
    for (mode, fault, presented, expected, told) in [
        (HYPERVISOR, 0, A, Ok(7), None),
        (HYPERVISOR, 0, X, drops, Some("dropped-read cookie")),
        (HYPERVISOR, 0, 0, drops, Some("dropped-read held")),
        (0, 0, A, drops, Some("dropped-read layer")),
        (0, 0, X, drops, Some("dropped-read layer")),
        (HYPERVISOR, abi::CONTROL_FAULT, A, Ok(7), None),
        (
            0,
            abi::CONTROL_FAULT,
            A,
            Err(Verdict::Fault),
            Some("faulted layer"),
        ),
    ] {
        let mut machine = check(&Setup::of("intel-v2"), &private(2));
        let layers = abi::CONTROL_MANAGE_KERNEL | abi::CONTROL_ACCESS_KERNEL;
        let owned = [
            As(KERNEL, M),
            W(drop_value(2), 0xd0),
            As(KERNEL, A),
            W(counter(2), 7),
        ];
        play(&mut machine, &owned);
        play(&mut machine, &controlled(2, layers | mode | fault));
        let _ = machine.told();
        // However often: the guest does not pay for the host's wrong cookies.
        for _ in 0..40 {
            let pmc2 = CounterId::Programmable(2);
            let read = read_as_hypervisor(&mut machine, pmc2, presented);
            assert_eq!(
                read,
                Some(expected),
                "{mode:#x}, {fault:#x}, {presented:#x}"
            );
            let expected = told.map(|told| format!("hypervisor PMC2 {told}"));
            assert_eq!(machine.told(), Vec::from_iter(expected));
        }
        let unit = machine.pmu.claims().unit().expect("it has reservations");
        let wrong = told.is_some_and(|told| told.ends_with("cookie"));
        assert_eq!(unit.wrong_cookies(), if wrong { 40 } else { 0 });
        assert_eq!(machine.pmu.claims().locked_out_until(), None);
    }
    let mut machine = check(&Setup::of("intel-v2"), &[W(0xc1, 9)]);
    let mut read = |counter, cookie| read_as_hypervisor(&mut machine, counter, cookie);
    let pmc0 = CounterId::Programmable(0);
    assert_eq!(read(pmc0, 0), Some(Ok(9)), "nobody has reserved it");
    assert_eq!(read(pmc0, 1), Some(Err(Verdict::Drop { read_as: 0 })));
    assert_eq!(read(pmc0, 1 << 48), None);
    assert_eq!(read(CounterId::Programmable(31), 0), None);
}

#[test]
fn what_is_given_back_holds_nothing_of_its_owner() {
    // Both kinds, with every control of the owner's choice.
    for (n, msr, ecx) in [(1, 0xc2, 1), (34, 0x30b, 0x4000_0002)] {
        let enable = if n < 32 { 0x53_013c } else { 0xb };
        let mut machine = check(&Setup::of("intel-v2"), &private(n));
        let ops = [
            W(0x38f, 0x7_0000_000f),
            As(KERNEL, A),
            W(select(n), enable),
            W(counter(n), (1 << 48) - 1),
            Run(40),
            R(overflow(n), 1),
            R(SNAPSHOT, 1),
            As(KERNEL, M),
            W(management(n), 0),
            As(KERNEL, 0),
            R(status(n), 0),
            R(control(n), abi::CONTROL_INITIAL),
            R(drop_value(n), 0),
            R(select(n), 0),
            R(counter(n), 0),
            R(overflow(n), 0),
            R(msr, 0),
            P(ecx, 0),
            R(0x38e, 0),
            Pmi(0),
            R(word(n, 0), 0),
            R(word(n, 1), 0),
            R(word(n, 2), 0),
            R(word(n, 3), 0),
            Run(10),
            R(msr, 0),
            // Global control is not the owner's, and stays.
            R(0x38f, 0x7_0000_000f),
        ];
        play(&mut machine, &ops);
        assert!(machine.pmu.report().is_empty(), "nothing is in use");
        assert!(!machine.pmu.needs().counting);
    }
}

#[test]
fn a_lease_that_ends_takes_the_counter_away() {
    let mut setup = Setup::of("intel-v2");
    setup.policy.kernel.lease_ms = Some(5);
    let mut machine = check(&setup, &private(0));
    let ops = [
        As(KERNEL, A),
        W(select(0), REF),
        Run(4 * MS),
        R(counter(0), 4 * MS),
        Told(&["guest kernel PMC0 reserved", "guest kernel PMC0 access-set"]),
    ];
    play(&mut machine, &ops);
    assert!(machine.pmu.deadline().is_some(), "somebody has to wake it");
    let ops = [
        Run(2 * MS),
        Told(&["guest kernel PMC0 revoked expired"]),
        As(KERNEL, 0),
        R(status(0), 0),
        R(0xc1, 0),
        R(0x186, 0),
        Run(MS),
        R(0xc1, 0),
    ];
    play(&mut machine, &ops);
    assert_eq!(machine.pmu.deadline(), None);
    // The accounting page tells it, until another event is selected.
    let ops = [
        R(SNAPSHOT, 1),
        R(word(0, 0), 0x06_0000),
        W(0x186, REF),
        Run(MS),
        R(SNAPSHOT, 2),
        R(word(0, 0), 0x06_0012),
        W(0x186, CYCLES),
        Run(MS),
        R(SNAPSHOT, 3),
        R(word(0, 0), 0x42),
    ];
    play(&mut machine, &ops);
}

#[test]
fn too_many_wrong_cookies_bar_the_vcpu() {
    let mut machine = check(&Setup::of("intel-v2"), &private(0));
    machine.act_as(KERNEL, X);
    for n in 0..17 {
        assert_eq!(machine.pmu.claims().locked_out_until(), None, "after {n}");
        machine.read(counter(0));
    }
    let until = machine
        .pmu
        .claims()
        .locked_out_until()
        .expect("the 17th costs");
    machine.run(MS);
    assert_eq!(machine.pmu.claims().locked_out_until(), Some(until));
    machine.run(20 * MS);
    assert_eq!(machine.pmu.claims().locked_out_until(), None);
    // Guesses without a cookie cost nothing: everybody's kernel makes them.
    machine.act_as(KERNEL, 0);
    for _ in 0..100 {
        machine.read(0xc1);
    }
    assert_eq!(machine.pmu.claims().locked_out_until(), None);
}

#[test]
fn the_hosts_grant_comes_first() {
    let held = [CounterId::Programmable(0), CounterId::Fixed(0)];
    let cases = [
        (Denial::Fault, RGp(counter(1)), RGp(0xc2), PGp(1)),
        (
            Denial::Drop { read_as: 5 },
            R(counter(1), 5),
            R(0xc2, 5),
            P(1, 5),
        ),
    ];
    for (denial, alias, legacy, rdpmc) in cases {
        let setup = Setup {
            grant: Grant::of(held, denial),
            ..Setup::of("intel-v2")
        };
        let ops = [
            As(KERNEL, 0),
            alias,
            legacy,
            rdpmc,
            // The block does not have it.
            WGp(management(1), M),
            RGp(status(1)),
            RGp(control(1)),
            W(management(0), M),
            // What the host withholds is no reservation's business.
            Told(&["guest kernel PMC0 reserved"]),
        ];
        check(&setup, &ops);
    }
}

#[test]
fn the_accounting_page_answers_by_the_same_verdict() {
    let mut machine = check(&Setup::of("intel-v2"), &private(0));
    let ops = [
        As(KERNEL, A),
        W(select(0), REF),
        Run(30),
        As(KERNEL, 0),
        R(SNAPSHOT, 1),
        // Unavailable: not granted. Not 0, and not the drop value.
        R(word(0, 0), 0x0404),
        R(word(0, 1), 0),
        R(word(0, 2), 0),
        R(word(0, 3), 0),
        Told(&[
            "guest kernel PMC0 reserved",
            "guest kernel PMC0 access-set",
            "guest kernel PMC0 dropped-read held",
            "guest kernel PMC0 dropped-read held",
            "guest kernel PMC0 dropped-read held",
        ]),
    ];
    play(&mut machine, &ops);
    play(&mut machine, &controlled(0, 0xff | abi::CONTROL_FAULT));
    play(
        &mut machine,
        &[RGp(word(0, 0)), RGp(word(0, 3)), R(SNAPSHOT, 2)],
    );
    // Reserved without an access cookie: open as ever.
    let ops = [
        As(KERNEL, 0),
        W(management(1), M),
        W(0x187, REF),
        Run(8),
        R(SNAPSHOT, 3),
        R(word(1, 3), 8),
    ];
    play(&mut machine, &ops);
}

/// The hypervisor reserves a counter, with `A` for both cookies.
fn set_aside(machine: &mut Machine, n: u8) {
    let cookie = arbiter::Cookie::new(A).expect("48 bits");
    let reserved = machine.pmu.arbitrate(|unit, cx| {
        match unit.reserve_for_hypervisor(CounterId::Programmable(n), cookie, cx) {
            Ok(effects) => (Ok(()), effects),
            Err(reason) => (Err(reason), arbiter::Effects::NONE),
        }
    });
    assert_eq!(reserved, Some(Ok(())));
}

/// Its former owner's count must not come back with the vCPU.
#[test]
fn a_counter_can_be_taken_while_the_vcpu_is_off_its_core() {
    use pmu_virt::{CorePmu, OwnerId};
    for (leaves, evicted) in [(false, false), (false, true), (true, false), (true, true)] {
        let few = Box::new(Limited::clock(8));
        let mut machine = Machine::on(&Setup::of("intel-v2"), few);
        play(&mut machine, &[W(0x187, REF), W(0x188, REF), Run(18)]);
        let mut core = machine.pmu.park().expect("it is on one");
        if evicted {
            // Another vCPU wants every place.
            let model = pmu_virt::PmuModel::parse("intel-v2,counters=8").expect("a model");
            let mut other = Seated::detached(OwnerId(7), model, Grant::everything());
            other.attach(core);
            let kernel = pmu_virt::Caller::legacy(KERNEL);
            for n in 0..8 {
                other.wrmsr(pmu_virt::MsrIndex(0x186 + n), 0x41_003c, kernel);
            }
            core = other.depart().expect("it is on one");
        }
        set_aside(&mut machine, 1);
        if leaves {
            machine.pmu.leave(&mut core);
            core = Box::new(CorePmu::new(Box::new(pmu_virt::ClockBackend::new())));
        }
        machine.pmu.attach(core);
        let ops = [
            As(HYPERVISOR, A),
            R(counter(1), 0),
            Run(5),
            R(counter(1), 0),
            W(select(1), REF),
            Run(6),
            R(counter(1), 6),
            As(KERNEL, 0),
            R(0xc3, 29),
        ];
        play(&mut machine, &ops);
    }
}

#[test]
fn the_host_sets_counters_aside_for_itself() {
    let mut machine = Machine::new(&Setup::of("intel-v2"));
    play(&mut machine, &[W(0x187, REF), Run(9), R(0xc2, 9)]);
    set_aside(&mut machine, 1);
    let ops = [
        As(HYPERVISOR, A),
        R(select(1), 0),
        W(select(1), REF),
        As(KERNEL, A),
        R(counter(1), 0),
        W(select(1), 0),
        As(KERNEL, 0),
        W(0x38f, 0),
        Run(6),
        R(0xc2, 0),
        As(HYPERVISOR, A),
        R(counter(1), 6),
        // It outlives the guest's reset, with nothing in it.
        Op::Reset,
        R(counter(1), 0),
        R(select(1), 0),
        As(KERNEL, 0),
        R(status(1), 0x13),
    ];
    play(&mut machine, &ops);
}
