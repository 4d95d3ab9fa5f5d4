//! Names of descriptors: what is in them comes back.

use proptest::prelude::*;

use super::*;

/// The clock of this thread: PERF_TYPE_SOFTWARE, PERF_COUNT_SW_TASK_CLOCK.
pub(in crate::broker) fn thread_clock() -> HandedEvent {
    HandedEvent {
        spec: EventSpec {
            perf_type: 1,
            config: 1,
            config1: 0,
            config2: 0,
        },
        thread: Some(0),
        cpu: None,
        rings: Rings::User,
        period: None,
        follows: Follows::Nothing,
    }
}

/// An event of this thread. `None`: the kernel opens none here.
fn event() -> Option<Handed> {
    Handed::open(&thread_clock()).ok()
}

fn allowed() -> impl Strategy<Value = Allowed> {
    let small = || proptest::option::of(any::<u32>());
    let what = (any::<u64>(), 0usize..128, any::<u64>(), any::<u32>());
    let event = (0u64..1 << 36, small(), small(), 0usize..3);
    let group = proptest::option::of((0u64..1 << 48, 0usize..3));
    let of = (proptest::option::of(any::<u64>()), group);
    (what, event, of).prop_map(|(what, event, (period, group))| {
        let follows = [Follows::Nothing, Follows::Threads, Follows::Children];
        let follows = group.map_or(Follows::Nothing, |(_, follows_at)| follows[follows_at]);
        // Events of groups do not overflow.
        let period = period.filter(|_| group.is_none());
        let ((lease, counter, counters, perf_type), (config, thread, cpu, rings)) = (what, event);
        Allowed {
            lease: LeaseId(lease),
            counter,
            pmu: PmuId(3),
            counters: CounterSet::from_bits(counters),
            group: group.map(|(number, _)| Group {
                id: GroupId(number),
                above: Vec::new(),
                path: String::new(),
            }),
            event: HandedEvent {
                spec: EventSpec {
                    perf_type,
                    config,
                    config1: 0,
                    config2: 0,
                },
                thread,
                cpu,
                rings: [Rings::User, Rings::Guest, Rings::All][rings],
                period,
                follows,
            },
        }
    })
}

proptest! {
    #[test]
    fn what_is_in_a_name_comes_back(
        allowed in allowed(),
        who in (any::<u32>(), any::<u32>()),
        process in proptest::option::of(any::<u64>()),
        life in (any::<u32>(), proptest::option::of(any::<u64>())),
        number in any::<u64>(),
        asked in 0u64..1 << 40,
    ) {
        let life = (life.0, life.1.map(Started));
        let whose = Whose { uid: who.0, pid: who.1, process: process.map(Started), life, asked: Started(asked) };
        let text = name(&allowed, &whose, number);
        // sd_notify(3): what a name may be.
        prop_assert!(text.len() <= 255, "{}", text);
        prop_assert!(text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b':'));
        let Some(event) = event() else { return Ok(()) };
        let perf_type = allowed.event.spec.perf_type;
        let pmu = |other| (other == perf_type).then_some(PmuId(3));
        let (known, open) = named(&text, event, pmu, &Closer::new(1 << 20)).expect("it is one of ours");
        prop_assert_eq!(known, number);
        prop_assert_eq!(&open.allowed, &allowed);
        prop_assert_eq!(((open.uid, open.pid), open.life), (who, life));
        prop_assert_eq!(open.process, process.map(Started));
        let follows = allowed.event.follows != Follows::Nothing;
        prop_assert_eq!(open.root.map(|root| root.since), follows.then_some(Started(asked)));
    }
}

#[test]
fn other_names_are_nobodys() {
    let whole = "umpire-event-1.9.7.0.15.1000.41.42.99.42.-.user.-.1.1";
    let check = |name: &str, expected: bool| {
        let Some(event) = event() else {
            println!("skipped: other_names_are_nobodys: no events");
            return;
        };
        let pmu = |perf_type| (perf_type == 1).then_some(PmuId(0));
        assert_eq!(
            named(name, event, pmu, &Closer::new(1 << 20)).is_some(),
            expected,
            "{name}"
        );
    };
    check(whole, true);
    check("", false);
    check("stored", false);
    check(&whole.replace("event-1", "event-2"), false);
    // With the start of the process, which names of before do not have.
    check(&format!("{whole}.1"), true);
    check(&format!("{whole}.-"), true);
    check(&format!("{whole}.x"), false);
    check(&format!("{whole}.1.1"), false);
    // With a control group, what follows its thread, and since when.
    for (of_group, expected) in [
        ("99.c.5", true),
        ("99.t.5", true),
        ("99.-.5", true),
        ("99.x.5", false),
        ("x.c.5", false),
        ("99.c.-", false),
        ("99.c", false),
    ] {
        check(&format!("{whole}.1.{of_group}"), expected);
    }
    check(
        &whole.replace(".user.", ".ring.").replace(".1000.", ".-."),
        false,
    );
    check(&whole.replace(".1000.", ".4294967296."), false);
    check(&whole.replace(".-.1.1", ".-.2.1"), false);
    for end in 0..whole.len() {
        let cut = &whole[..end];
        // A number that was cut is still a number.
        check(
            cut,
            cut.ends_with(|one: char| one.is_ascii_digit()) && cut.len() > whole.len(),
        );
    }
}

/// The service manager gives all names to an arbiter that it starts in one string.
#[test]
fn names_are_kept_that_fit_in_one_variable() {
    /// Of the kernel: `MAX_ARG_STRLEN`.
    const LONGEST: usize = 128 << 10;
    let name = "umpire-event-1.1234567.1234567.0.18446744073709551615.1000.12345.12346.123456789.\
                12346.-.user.-.4.196.123456789";
    let mut kept: Vec<(u32, &str)> = Vec::new();
    let has_room = |kept: &[(u32, &str)], uid| has_room(kept.iter().copied(), uid, name);
    let mut of_user = Vec::new();
    for uid in 0..9 {
        let before = kept.len();
        while has_room(&kept, uid) {
            kept.push((uid, name));
            assert!(kept.len() < LONGEST, "there is no end");
        }
        of_user.push(kept.len() - before);
    }
    // One user leaves as much to others.
    let own = of_user[0];
    assert!(own > 400 && of_user[1].abs_diff(own) <= 1 && of_user[2..].iter().sum::<usize>() <= 1);
    let names: Vec<&str> = kept.iter().map(|(_, name)| *name).collect();
    let variable = format!("LISTEN_FDNAMES={}", names.join(":"));
    assert!(variable.len() < LONGEST - (16 << 10), "{}", kept.len());
    // There is room again when one is forgotten.
    kept.remove(0);
    assert!(has_room(&kept, 0) && !has_room(&kept, 1));
    let mut command = std::process::Command::new("true");
    let status = command.env("LISTEN_FDNAMES", names.join(":")).status();
    assert!(status.expect("true starts").success());
}
