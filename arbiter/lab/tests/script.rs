//! Scripts: what can be written, the errors of what cannot, and the traces of
//! playing one.

use arbiter::{
    CounterId, Event, Layer, NamedEvent, Outcome, PerKind, Policy, Reason, Scheme, Share, Wanted,
};
use arbiter_lab::script::{Action, End, Problem, Script, Setup, What, play};

fn pmc(n: u8) -> CounterId {
    CounterId::Programmable(n)
}

#[test]
fn actions() {
    let check = |text: &str, layer, action| {
        let script: Script = text.parse().unwrap();
        let step = script.steps().last().unwrap();
        assert_eq!((step.layer, step.action), (layer, action), "{text}");
    };
    let hv = Some(Layer::Hypervisor);
    let reserve = |wanted, lease_ms| Action::Reserve {
        wanted,
        lease_ms,
        event: None,
    };
    check("0 hypervisor reserve 3", hv, reserve(Wanted::Any(3), None));
    check(
        "0 hypervisor reserve PMC31",
        hv,
        reserve(Wanted::This(pmc(31)), None),
    );
    check("5 hypervisor reserve FIXED1 lease 500", hv, {
        reserve(Wanted::This(CounterId::Fixed(1)), Some(500))
    });
    let (wanted, event) = (Wanted::Any(2), NamedEvent::of_select(0x1_0000_00c0));
    for text in ["event 0x1000000c0 lease 20", "lease 20 event 0x1000000c0"] {
        let lease_ms = Some(20);
        check(
            &format!("5 hypervisor reserve 2 {text}"),
            hv,
            Action::Reserve {
                wanted,
                lease_ms,
                event,
            },
        );
    }
    check(
        "0 kernel claim PMC1 # by the key",
        Some(Layer::GuestKernel),
        Action::Claim(pmc(1)),
    );
    check("0 hypervisor renew PMC1", hv, Action::Renew(pmc(1)));
    check(
        "0 hypervisor release PMC1",
        hv,
        Action::Release(Some(pmc(1))),
    );
    check("0 hypervisor release all", hv, Action::Release(None));
    check("0 hypervisor lend PMC1", hv, Action::Lend(pmc(1), true));
    check("0 hypervisor keep PMC1", hv, Action::Lend(pmc(1), false));
    let reply = |yields, counter| Action::Reply { yields, counter };
    check("0 hypervisor reply yield", hv, reply(true, None));
    check(
        "0 hypervisor reply refuse PMC2",
        hv,
        reply(false, Some(pmc(2))),
    );
    check("0 hypervisor withdraw", hv, Action::Withdraw);
    check(
        "0 firmware end-phase",
        Some(Layer::Firmware),
        Action::EndPhase,
    );
    check("\n # nothing\n\n 9\ttick", None, Action::Tick);
    check("9 kernel tick", Some(Layer::GuestKernel), Action::Tick);
    check(
        "0 firmware end-phase\n0 kernel withdraw",
        Some(Layer::GuestKernel),
        Action::Withdraw,
    );
}

#[test]
fn errors_name_line_and_word() {
    let check = |text: &str, line, word: &str, problem| {
        let error = text.parse::<Script>().unwrap_err();
        assert_eq!(
            (error.line, &*error.word, error.problem),
            (line, word, problem),
            "{text}"
        );
        let shown = error.to_string();
        assert!(
            shown.starts_with(&format!("line {line}: ")) && shown.contains(word),
            "{shown}"
        );
        assert!(!shown.contains('\n'));
    };
    check("", 1, "", Problem::Empty);
    check("# only this\n\n", 2, "", Problem::Empty);
    check("soon kernel tick", 1, "soon", Problem::Time);
    check("-1 kernel tick", 1, "-1", Problem::Time);
    check("86400001 kernel tick", 1, "86400001", Problem::Time);
    check("5 tick\n4 tick", 2, "4", Problem::Backwards);
    check("5", 1, "", Problem::Layer);
    check("5 user tick", 1, "user", Problem::Layer);
    check("5 kernel", 1, "", Problem::Action);
    check("5 kernel grab PMC1", 1, "grab", Problem::Action);
    check("5 kernel reserve", 1, "", Problem::Wanted);
    check("5 kernel reserve 0", 1, "0", Problem::Wanted);
    check("5 kernel reserve 256", 1, "256", Problem::Wanted);
    check("5 kernel reserve PMC32", 1, "PMC32", Problem::Wanted);
    check("5 kernel reserve PMC", 1, "PMC", Problem::Wanted);
    check("5 kernel reserve 1 for", 1, "for", Problem::Lease);
    check("5 kernel reserve 1 lease", 1, "", Problem::Lease);
    check("5 kernel reserve 1 lease 15", 1, "15", Problem::Lease);
    check(
        "5 kernel reserve 1 lease 655360",
        1,
        "655360",
        Problem::Lease,
    );
    check("5 kernel reserve 1 lease 10 ms", 1, "ms", Problem::TooMany);
    check("5 kernel claim 1", 1, "1", Problem::Counter);
    check("5 kernel release", 1, "", Problem::Counter);
    check("5 kernel reply maybe", 1, "maybe", Problem::Reply);
    check("5 kernel reply yield 7", 1, "7", Problem::Counter);
    check("5 tick now", 1, "now", Problem::TooMany);
    check("5 kernel end-phase", 1, "end-phase", Problem::PhaseOfOther);
    check(
        "0 kernel tick\n0 firmware end-phase",
        1,
        "kernel",
        Problem::PhaseNotOver,
    );
    check(
        "0 firmware end-phase\n\n1 firmware withdraw",
        3,
        "firmware",
        Problem::PhaseOver,
    );
    check(
        "0 firmware end-phase\n1 firmware end-phase",
        2,
        "firmware",
        Problem::PhaseOver,
    );
}

fn setup(scheme: Scheme) -> Setup {
    let share = |priority| Share {
        priority,
        ..Share::FREE
    };
    Setup {
        counters: PerKind {
            programmable: 2,
            fixed: 0,
        },
        policy: Policy {
            firmware: share(0),
            hypervisor: share(1),
            kernel: share(2),
            grace_ms: 100,
        },
        scheme,
    }
}

fn ends(text: &str, scheme: Scheme) -> Vec<End> {
    play(&text.parse().unwrap(), &setup(scheme)).ends
}

fn granted(counters: &[u8], at_ms: u32) -> End {
    let outcome = Outcome::Granted(counters.iter().map(|n| pmc(*n)).collect());
    End::Answered { outcome, at_ms }
}

fn refused(reason: Reason, at_ms: u32) -> End {
    End::Answered {
        outcome: Outcome::Refused(reason),
        at_ms,
    }
}

#[test]
fn one_script_ends_differently_under_each_scheme() {
    let text = "0 firmware claim PMC0
                0 firmware reserve 1
                0 hypervisor reserve 2
                50 firmware reply refuse";
    let master = End::Faulted(Reason::Master);
    assert_eq!(
        ends(text, Scheme::SingleMaster),
        // Only one is held, the other is free.
        [
            master,
            granted(&[1], 0),
            granted(&[0, 1], 100),
            End::NotAsked
        ]
    );
    assert_eq!(
        ends(text, Scheme::Independent),
        [
            End::Done,
            granted(&[1], 0),
            refused(Reason::NoneFree, 0),
            End::NotAsked
        ]
    );
    // The one refusal leads to the next question, which nobody answers; then
    // both are taken by priority, 50 + 100 + 100.
    assert_eq!(
        ends(text, Scheme::Interacting),
        [
            End::Done,
            granted(&[1], 0),
            granted(&[0, 1], 250),
            End::Done
        ]
    );
}

#[test]
fn a_trace_has_every_decision_at_its_time() {
    let text = "0 hypervisor reserve PMC1 lease 30
                100 tick
                100 hypervisor release PMC1
                100 hypervisor reply yield PMC0";
    let trace = play(&text.parse().unwrap(), &setup(Scheme::Independent));
    let decided: Vec<_> = trace
        .rows
        .iter()
        .filter_map(|row| match row.what {
            What::Decided(event) => Some((row.at_ms, event)),
            _ => None,
        })
        .collect();
    assert_eq!(
        decided,
        [
            (0, Event::Reserved { lease_ms: Some(30) }),
            (30, Event::Revoked(Reason::Expired)),
            (100, Event::Refused(Reason::Unreserved)),
        ]
    );
    assert_eq!(trace.ends[2], refused(Reason::Unreserved, 100));
    assert_eq!(trace.ends[3], End::Faulted(Reason::Malformed));
    assert_eq!(trace.owners, [(pmc(0), None), (pmc(1), None)]);
}

#[test]
fn every_trace_ends_with_every_answer() {
    for scheme in Scheme::ALL {
        let text = "0 hypervisor reserve 2\n0 kernel reserve 2";
        let trace = play(&text.parse().unwrap(), &setup(scheme));
        let pending = trace.ends.iter().any(|end| {
            matches!(
                end,
                End::Answered {
                    outcome: Outcome::Pending,
                    ..
                }
            )
        });
        assert!(!pending, "{scheme}: {:?}", trace.ends);
    }
}
