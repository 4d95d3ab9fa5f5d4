use std::time::Duration;

use super::super::reading::{HolderRow, HotPlace, HotRow, Program, Rate, SampleReading};
use super::super::view::text;
use super::*;
use crate::profile::Totals;

pub(in crate::top) fn rate(event: &str, rate: Result<f64, Missing>) -> Rate {
    Rate {
        event: event.to_owned(),
        per_second: rate.ok(),
        missing: rate.err(),
        provenance: rate.is_ok().then(|| "simulated".to_owned()),
    }
}

/// A VM with two vCPUs, of which one does not run, a holder and samples.
pub(in crate::top) fn reading() -> VmReading {
    let vcpu = |vcpu, rates| VcpuReading {
        vcpu,
        state: "running".to_owned(),
        core: (vcpu == 0).then_some(0),
        rates,
    };
    let unsupported = || rate("cache-misses", Err(Missing::NotSupported));
    VmReading {
        pid: 4711,
        guest: "vmlinuz".to_owned(),
        model: "amd-core".to_owned(),
        counters: "sim".to_owned(),
        policy: "host-first".to_owned(),
        seconds: Some(1.0),
        vcpus: vec![
            vcpu(
                0,
                vec![
                    rate(CYCLES, Ok(2e9)),
                    rate(INSTRUCTIONS, Ok(5e8)),
                    unsupported(),
                    rate(EXITS, Err(Missing::NotCounted)),
                    rate(RUN_TIME, Ok(9.99e8)),
                ],
            ),
            vcpu(
                1,
                vec![
                    rate(CYCLES, Err(Missing::Idle)),
                    rate(INSTRUCTIONS, Err(Missing::Idle)),
                    unsupported(),
                    rate(EXITS, Ok(7.25)),
                    rate(RUN_TIME, Ok(0.0)),
                ],
            ),
        ],
        holders: vec![HolderRow {
            place: "core 0".to_owned(),
            holder: "nobody".to_owned(),
            counters: vec!["8 free".to_owned()],
        }],
        samples: Some(SampleReading {
            event: CYCLES.to_owned(),
            hz: 99,
            totals: Totals {
                samples: 4,
                lost: 2,
                ..Totals::default()
            },
            rows: vec![
                HotRow {
                    place: HotPlace {
                        symbol: "hot_loop".to_owned(),
                        program: None,
                    },
                    samples: 3,
                    events: 300,
                },
                HotRow {
                    place: HotPlace {
                        symbol: "[unknown] 0xfff0".to_owned(),
                        program: None,
                    },
                    samples: 1,
                    events: 100,
                },
            ],
        }),
        notes: vec!["vCPU 1 is not sampled".to_owned()],
        ..VmReading::default()
    }
}

pub(in crate::top) fn state() -> State {
    let mut state = State::new(Duration::from_secs(2));
    state.answer(1, "web1", reading(), Duration::ZERO);
    state.end(2, "db", Standing::Ended);
    state
}

#[test]
fn one_frame_has_it_all() {
    let expected = "\
umpire top - noon, 2 VMs

VMs
NAME   PID  GUEST      VCPUS  %CPU  CYCLES/s   IPC      EXITS/s
db       -  has ended
web1  4711  vmlinuz        2  99.9    2.000G  0.25  not counted

vCPUs of web1: amd-core, counts from sim, host-first
VCPU  STATE    CORE  %CPU   IPC  CYCLES/s  INSTRUCTIONS/s      EXITS/s
   0  running     0  99.9  0.25    2.000G          500.0M  not counted
   1  running     -   0.0     -         -               -          7.2

Counters of web1
WHERE   HOLDER  COUNTERS
core 0  nobody  8 free

Notes on web1
not supported: cache-misses
vCPU 1 is not sampled
counts: cycles, instructions, vm-run-ns, vm-exits: simulated

Symbols of web1: 4 samples of cycles in 1 s, at most 99 a second, 2 lost
OVERHEAD  SAMPLES  SYMBOL
  75.00%        3  hot_loop
  25.00%        1  [unknown] 0xfff0
";
    let found = text(&Frame::whole(&state(), "noon"), 120);
    assert_eq!(found, expected, "{found}");
}

#[test]
fn tasks_have_columns_where_they_are_known() {
    let mut known = reading();
    if let Some(samples) = &mut known.samples {
        samples.rows[0].place.program = Some(Program {
            comm: "make\u{1b}".to_owned(),
            dso: "libc.so.6".to_owned(),
        });
    }
    let mut state = State::new(Duration::from_secs(2));
    state.answer(1, "web1", known, Duration::ZERO);
    let found = text(&Frame::whole(&state, "noon"), 120);
    let expected = "\
OVERHEAD  SAMPLES  COMMAND  OBJECT     SYMBOL
  75.00%        3  make\u{fffd}    libc.so.6  hot_loop
  25.00%        1                      [unknown] 0xfff0
";
    assert!(found.ends_with(expected), "{found}");
}

#[test]
fn before_the_first_count_nothing_is_said() {
    let mut first = reading();
    first.seconds = None;
    first.samples = None;
    first.vcpus.iter_mut().for_each(|vcpu| vcpu.rates.clear());
    let mut state = State::new(Duration::from_secs(2));
    state.answer(1, "web1", first, Duration::ZERO);
    let found = text(&Frame::whole(&state, "noon"), 120);
    assert!(
        found.contains("vmlinuz      2     -         -    -        -"),
        "{found}"
    );
    assert!(
        found.contains("   0  running     0     -    -\n"),
        "{found}"
    );
    assert!(!found.contains("not counted"), "{found}");
}

#[test]
fn a_vcpu_that_takes_no_context_is_not_counted() {
    let mut odd = reading();
    odd.vcpus[1].rates.clear();
    let mut state = State::new(Duration::from_secs(2));
    state.answer(1, "web1", odd, Duration::ZERO);
    let found = text(&Frame::whole(&state, "noon"), 120);
    let row = found
        .lines()
        .find(|line| line.starts_with("   1  "))
        .unwrap();
    assert_eq!(row.matches("not counted").count(), 3, "{found}");
}

#[test]
fn the_screen_shows_the_chosen_vm_and_the_keys() {
    let mut state = state();
    state.answer(3, "x", reading(), Duration::ZERO);
    let frame = Frame::of_screen(&state, "noon");
    assert_eq!(frame.sections.len(), 1, "one that has ended has no details");
    assert_eq!(frame.sections[0].marked, Some(0));
    state.key(super::super::keys::KeyPress::Next);
    let frame = Frame::of_screen(&state, "noon");
    assert_eq!(frame.sections[0].marked, Some(1));
    assert!(frame.sections[1].title.starts_with("vCPUs of web1"));
    assert!(frame.foot.starts_with("q quit"));
    for (key, expected) in [('d', "Seconds between frames"), ('5', "3600): 5_")] {
        state.key(super::super::keys::KeyPress::Char(key));
        let foot = Frame::of_screen(&state, "noon").foot;
        assert!(foot.contains(expected), "{foot}");
    }
    state.key(super::super::keys::KeyPress::Escape);
    state.key(super::super::keys::KeyPress::Char('?'));
    let frame = Frame::of_screen(&state, "noon");
    assert_eq!(frame.sections[0].title, "Keys");
}

#[test]
fn numbers_are_short() {
    let check = |rate: f64, expected: &str| assert_eq!(short(rate), expected, "{rate}");
    check(0.0, "0");
    check(0.25, "0.2");
    check(9.96, "10");
    check(664.0, "664");
    check(999.4, "999");
    check(999.9, "1.000K");
    check(1234.0, "1.234K");
    check(12_345.0, "12.35K");
    check(123_456.0, "123.5K");
    check(999_999.0, "1.000M");
    check(1.874e9, "1.874G");
    check(2.5e15, "2500.0T");
}
