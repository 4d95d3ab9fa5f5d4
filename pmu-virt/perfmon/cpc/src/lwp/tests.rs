//! The rules of the manual page, on counters that are made up.

use std::sync::{Arc, Mutex};

use libc::{EACCES, ENOTSUP};
use proptest::prelude::{Strategy, any, prop_assert_eq, prop_oneof, proptest};

use super::*;
use crate::spec::parse;
use umpire_events::{LibraryError, NoTables};

/// Counters of four LWPs; the third and the fourth have not started. The descriptor of LWP N is N.
#[derive(Debug, Default)]
struct Counters {
    /// What counts, and whether it signals.
    running: [Option<(Event, bool)>; 4],
    now: i64,
    /// Somebody counts system-wide.
    system_wide: bool,
    /// The next start of this LWP is refused with this.
    refuses: Option<(usize, i32)>,
}

struct Fake {
    model: PmuModel,
    counters: Arc<Mutex<Counters>>,
}

impl Counters {
    /// The LWP runs: each of its counters counts so many events.
    fn run(&mut self, lwp: usize, events: u64) -> bool {
        let Some((event, signals)) = &mut self.running[lwp] else {
            return false;
        };
        let mut overflows = false;
        for pic in event.used() {
            let (value, wraps) = event.pic[pic].overflowing_add(events);
            event.pic[pic] = value;
            overflows |= wraps;
        }
        overflows && *signals
    }

    fn open_system_wide(&mut self) {
        self.system_wide = true;
        self.running = [None; 4];
    }
}

impl Bed for Fake {
    fn model(&self) -> &PmuModel {
        &self.model
    }

    fn access(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    fn start(&mut self, lwp: usize, event: &Event, signals: bool) -> Result<(), Failure> {
        let mut counters = self.counters.lock().unwrap();
        assert!(counters.running[lwp].is_none(), "it was stopped before");
        if counters.system_wide {
            return Err(invalid());
        }
        if let Some((_, errno)) = counters.refuses.take_if(|(whose, _)| *whose == lwp) {
            return Err(fail(errno, Subcode::None, format_args!("refused")));
        }
        counters.running[lwp] = Some((*event, signals));
        Ok(())
    }

    fn read(&mut self, lwp: usize, event: &mut Event) -> Result<(), Failure> {
        let mut counters = self.counters.lock().unwrap();
        counters.now += 1;
        let (running, _) = counters.running[lwp].ok_or_else(invalid)?;
        for pic in running.used() {
            event.pic[pic] = running.pic[pic];
        }
        event.hrt = counters.now;
        Ok(())
    }

    fn stop(&mut self, lwp: usize) {
        self.counters.lock().unwrap().running[lwp] = None;
    }

    fn overflow(&mut self, descriptor: i32) -> Option<(usize, Option<u64>)> {
        Some((usize::try_from(descriptor).ok()?, Some(0x1000)))
    }

    fn later(&mut self) -> Result<Vec<usize>, Failure> {
        Ok(vec![2, 3])
    }

    fn signals_of_kernel(&self) -> bool {
        false
    }
}

fn bed() -> (Lwps, Arc<Mutex<Counters>>, Event) {
    let model = PmuModel::parse("amd-core").unwrap();
    let counters = Arc::new(Mutex::new(Counters::default()));
    let fake = Fake {
        model: model.clone(),
        counters: counters.clone(),
    };
    let names = NoTables(LibraryError::TooLate);
    let cpuver = processor::number(&model);
    let event = parse(cpuver, &model, &names, "pic0=cycles,pic1=instructions").unwrap();
    (Lwps::new(Box::new(fake), 4), counters, event)
}

fn errno<T: std::fmt::Debug>(result: Result<T, Failure>) -> i32 {
    result.expect_err("a failure").errno
}

#[test]
fn a_sample_needs_something_bound() {
    let (mut lwps, counters, event) = bed();
    assert_eq!(errno(lwps.sample(0)), EINVAL);
    lwps.bind(0, Some(&event), 0).unwrap();
    counters.lock().unwrap().run(0, 5);
    let sample = lwps.sample(0).unwrap();
    assert_eq!(sample.pic[..3], [5, 5, 0]);
    assert_eq!((sample.pes, sample.cpuver), (event.pes, event.cpuver));
    assert!(lwps.sample(0).unwrap().hrt > sample.hrt);
    // Another LWP's are its own.
    assert_eq!(errno(lwps.sample(1)), EINVAL);
    lwps.bind(0, None, 0).unwrap();
    assert_eq!(errno(lwps.sample(0)), EINVAL);
    lwps.release(0);
}

#[test]
fn a_bind_unbinds_what_was_bound() {
    let (mut lwps, counters, mut event) = bed();
    lwps.bind(0, Some(&event), 0).unwrap();
    counters.lock().unwrap().run(0, 5);
    event.pic[1] = 100;
    lwps.bind(0, Some(&event), 0).unwrap();
    assert_eq!(lwps.sample(0).unwrap().pic[..2], [0, 100]);
    counters.lock().unwrap().refuses = Some((0, EACCES));
    assert_eq!(errno(lwps.bind(0, Some(&event), 0)), EACCES);
    assert_eq!(errno(lwps.sample(0)), EINVAL, "nothing is bound now");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let (mut lwps, _, event) = bed();
    assert_eq!(errno(lwps.bind(0, Some(&event), 4)), EINVAL);
    assert_eq!(umpire_perfmon::c_calls::subcode(), Subcode::InvalidFlags);
    let nothing = Event {
        pes: [0; MAX_PIC],
        ..event
    };
    assert_eq!(errno(lwps.bind(0, Some(&nothing), 0)), EINVAL);
    let other = Event {
        cpuver: 99,
        ..event
    };
    assert_eq!(errno(lwps.bind(0, Some(&other), 0)), EINVAL);
    assert_eq!(umpire_perfmon::c_calls::subcode(), Subcode::InvalidEvent);
}

#[test]
fn an_overflow_signals_once_and_freezes() {
    let (mut lwps, counters, mut event) = bed();
    event.pic[0] = u64::MAX - 999;
    lwps.bind(0, Some(&event), SIGNAL).unwrap();
    assert!(!counters.lock().unwrap().run(0, 999));
    assert!(counters.lock().unwrap().run(0, 3));
    let signal = lwps.overflow(0).unwrap();
    assert_eq!((signal.lwp, signal.pc), (0, Some(0x1000)));
    assert_eq!(lwps.overflow(0), None, "one signal");
    counters.lock().unwrap().run(0, 50);
    assert_eq!(lwps.sample(0).unwrap().pic[..2], [2, 1002], "frozen");
    let mut again = lwps.sample(0).unwrap();
    again.pic = event.pic;
    lwps.bind(0, Some(&again), SIGNAL).unwrap();
    assert_eq!(lwps.sample(0).unwrap().pic[..2], [u64::MAX - 999, 0]);
    // What is not to signal does not.
    lwps.bind(0, Some(&again), 0).unwrap();
    assert_eq!(lwps.overflow(0), None);
}

#[test]
fn somebody_system_wide_invalidates() {
    let (mut lwps, counters, event) = bed();
    lwps.bind(0, Some(&event), 0).unwrap();
    counters.lock().unwrap().open_system_wide();
    assert_eq!(errno(lwps.sample(0)), EAGAIN);
    counters.lock().unwrap().system_wide = false;
    assert_eq!(errno(lwps.sample(0)), EAGAIN, "it never starts by itself");
    assert_eq!(errno(lwps.count_in(0, USR, true)), EAGAIN);
    lwps.release(0);
    lwps.bind(0, Some(&event), 0).unwrap();
    assert_eq!(lwps.sample(0).unwrap().pic[0], 0);
    counters.lock().unwrap().open_system_wide();
    assert_eq!(errno(lwps.bind(0, Some(&event), 0)), EAGAIN);
}

#[test]
fn lwps_that_start_later_inherit() {
    let (mut lwps, counters, mut event) = bed();
    event.pic[0] = 7;
    lwps.bind(0, Some(&event), INHERIT).unwrap();
    counters.lock().unwrap().run(2, 3);
    assert_eq!(lwps.sample(2).unwrap().pic[..2], [3, 3]);
    assert_eq!(errno(lwps.sample(1)), EINVAL, "it runs already");
    lwps.release(2);
    // With signals: the first event signals, and all is ones.
    lwps.bind(0, Some(&event), INHERIT | SIGNAL).unwrap();
    assert!(counters.lock().unwrap().run(2, 1));
    assert_eq!(lwps.overflow(2).unwrap().lwp, 2);
    assert_eq!(lwps.sample(2).unwrap().pic[..2], [u64::MAX; 2]);
    lwps.bind(2, Some(&event), SIGNAL).unwrap();
    assert_eq!(lwps.sample(2).unwrap().pic[..2], [7, 0]);
    // If one cannot, nobody does.
    lwps.release(2);
    lwps.release(3);
    counters.lock().unwrap().refuses = Some((3, EACCES));
    assert_eq!(errno(lwps.bind(0, Some(&event), INHERIT)), EACCES);
    for lwp in [0, 2, 3] {
        assert_eq!(errno(lwps.sample(lwp)), EINVAL, "LWP {lwp}");
        assert!(counters.lock().unwrap().running[lwp].is_none());
    }
}

#[test]
fn threads_inherit_as_they_start() {
    let (mut lwps, counters, event) = bed();
    assert_eq!(lwps.legacy(0), None);
    lwps.bind(0, Some(&event), 0).unwrap();
    assert_eq!(lwps.legacy(0), None, "without the flag");
    lwps.bind(0, Some(&event), INHERIT).unwrap();
    lwps.release(2);
    counters.lock().unwrap().run(0, 9);
    let legacy = lwps.legacy(0).unwrap();
    assert_eq!(lwps.inherit_now(1, legacy), None);
    assert_eq!(lwps.sample(1).unwrap().pic[..2], [0, 0]);
    lwps.release(1);
    let legacy = (legacy.0, INHERIT | SIGNAL);
    let signal = lwps.inherit_now(1, legacy).unwrap();
    assert_eq!(signal, Signal { lwp: 1, pc: None });
    assert!(counters.lock().unwrap().running[1].is_none(), "frozen");
    assert_eq!(lwps.sample(1).unwrap().pic[..2], [u64::MAX; 2]);
    lwps.release(1);
    counters.lock().unwrap().refuses = Some((1, ENOTSUP));
    lwps.inherit_now(1, (event, INHERIT));
    assert_eq!(errno(lwps.sample(1)), EAGAIN);
}

#[test]
fn rings_change_and_counts_stay() {
    let (mut lwps, counters, event) = bed();
    lwps.bind(0, Some(&event), 0).unwrap();
    counters.lock().unwrap().run(0, 5);
    lwps.count_in(0, USR, false).unwrap();
    counters.lock().unwrap().run(0, 100);
    assert_eq!(lwps.sample(0).unwrap().pic[..2], [5, 5], "nobody counts");
    lwps.count_in(0, OS, true).unwrap();
    counters.lock().unwrap().run(0, 2);
    let sample = lwps.sample(0).unwrap();
    assert_eq!(sample.pic[..2], [7, 7]);
    assert_eq!(sample.pes[0] & (USR | OS), OS);
    lwps.bind(0, Some(&event), SIGNAL).unwrap();
    assert_eq!(errno(lwps.count_in(0, OS, true)), EINVAL);
    lwps.count_in(0, USR, false).unwrap();
    lwps.release(0);
    assert_eq!(errno(lwps.count_in(0, USR, true)), EINVAL);
}

#[derive(Clone, Debug)]
enum Step {
    Bind(usize, i32, u64),
    Unbind(usize),
    Run(usize, u64),
    Sample(usize),
    SystemWide(bool),
}

fn steps() -> impl Strategy<Value = Step> {
    let lwp = 0usize..2;
    prop_oneof![
        (lwp.clone(), 0..2i32, any::<u64>())
            .prop_map(|(lwp, flag, value)| { Step::Bind(lwp, flag * SIGNAL, value) }),
        lwp.clone().prop_map(Step::Unbind),
        (lwp.clone(), any::<u64>()).prop_map(|(lwp, events)| Step::Run(lwp, events)),
        lwp.prop_map(Step::Sample),
        any::<bool>().prop_map(Step::SystemWide),
    ]
}

proptest! {
    /// Whatever happens, a sample is the bound value with all events since, up to the first
    /// overflow that signals; or it says why there is none.
    #[test]
    fn samples_are_what_was_counted(steps in proptest::collection::vec(steps(), 0..40)) {
        let (mut lwps, counters, event) = bed();
        // What a sample should be; none where nothing is bound; `Err` where it is invalid.
        let mut expected: [Option<Result<u64, ()>>; 2] = [None; 2];
        let mut frozen = [false; 2];
        let mut taken = false;
        for step in steps {
            match step {
                Step::Bind(lwp, flags, value) => {
                    let event = Event { pic: [value; MAX_PIC], ..event };
                    let bound = lwps.bind(lwp, Some(&event), flags);
                    prop_assert_eq!(bound.is_err(), taken);
                    expected[lwp] = (!taken).then_some(Ok(value));
                    frozen[lwp] = false;
                }
                Step::Unbind(lwp) => {
                    lwps.release(lwp);
                    expected[lwp] = None;
                }
                Step::Run(lwp, events) => {
                    let signals = counters.lock().unwrap().run(lwp, events);
                    let counts = !frozen[lwp];
                    if let (Some(Ok(value)), true) = (&mut expected[lwp], counts) {
                        *value = value.wrapping_add(events);
                    }
                    if signals {
                        let signal = lwps.overflow(i32::try_from(lwp).unwrap());
                        prop_assert_eq!(signal.is_some(), counts);
                        frozen[lwp] = true;
                    }
                }
                Step::Sample(lwp) => match expected[lwp] {
                    None => prop_assert_eq!(errno(lwps.sample(lwp)), EINVAL),
                    Some(Err(())) => prop_assert_eq!(errno(lwps.sample(lwp)), EAGAIN),
                    Some(Ok(value)) => prop_assert_eq!(lwps.sample(lwp).unwrap().pic[0], value),
                },
                Step::SystemWide(open) => {
                    taken = open;
                    counters.lock().unwrap().system_wide = open;
                    if open {
                        counters.lock().unwrap().open_system_wide();
                        for expected in expected.iter_mut().flatten() {
                            *expected = Err(());
                        }
                    }
                }
            }
        }
    }
}

/// The signal of an overflow is not lost where the rings change before it comes.
#[test]
fn an_overflow_before_the_rings_change_signals() {
    let (mut lwps, counters, mut event) = bed();
    event.pic[0] = u64::MAX;
    lwps.bind(0, Some(&event), SIGNAL).unwrap();
    assert!(counters.lock().unwrap().run(0, 3));
    lwps.count_in(0, USR, true).unwrap();
    assert!(counters.lock().unwrap().running[0].is_some());
    assert_eq!(lwps.overflow(0).unwrap().lwp, 0);
    assert_eq!(lwps.sample(0).unwrap().pic[0], 2);
}
