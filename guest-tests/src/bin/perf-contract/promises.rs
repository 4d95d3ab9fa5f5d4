//! What `perf` promises beyond the contract: overflows by signal, and a group that has
//! its counters or says that it has not.

use std::fs;
use std::num::NonZeroU64;

use guest_tests::passing::TimeDriver;
use pmu_virt::contract::Driver;
use pmu_virt::perf::PerfBackend;
use pmu_virt::{
    CounterBackend, OwnerId, Provenance, Reading, Ring, SlotIndex, SlotSet, UnavailableReason,
};

use super::Setup;
use super::other_user::OtherUser;

type Promise = fn(&Setup, usize) -> Result<(), String>;

const ALL: [(&str, Promise); 9] = [
    ("a guest's event leaves the host out", leaves_the_host_out),
    ("an overflow comes by its signal", signal_comes),
    ("a pinned user is no trouble while there is room", room),
    ("a user who is not pinned is no trouble", unpinned_user),
    ("a group whose counters are taken is lost", taken),
    ("so it is where a page does not tell", taken_without_page),
    ("a group that never has its counters is lost", never_had),
    ("a group counts anew when they are given back", given_back),
    ("a vCPU that is away loses nothing", away),
];

const A: SlotIndex = SlotIndex(0);
const B: SlotIndex = SlotIndex(1);
/// Counters of the group that the second user meets.
const GROUP: usize = 2;
/// Units of a run.
const RUN: u64 = 200;
/// Counted at most for the time that passes, in percent.
const MOST: u64 = 130;
const LOST: Reading = Reading::Unavailable(UnavailableReason::Lost { backend: "perf" });

/// Prints each promise; returns how many are broken.
pub(crate) fn hold(setup: &Setup, counters: usize) -> usize {
    let mut broken = 0;
    for (name, promise) in ALL {
        match promise(setup, counters) {
            Ok(()) => println!("promise kept: {name}"),
            Err(why) => {
                broken += 1;
                println!("PROMISE BROKEN: {name}: {why}");
            }
        }
    }
    println!("{broken} promises broken");
    broken
}

fn ensure(holds: bool, seen: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(seen()) }
}

/// A set of slots that counts from its start on, also what happens outside of a guest,
/// and what it has to have counted.
struct Course<'a> {
    setup: &'a Setup,
    driver: TimeDriver,
    backend: PerfBackend,
    slots: SlotSet,
    least: u64,
    /// Time that may have been counted, but for what passes from `since` on.
    most: u64,
    since: u64,
}

impl<'a> Course<'a> {
    fn start(setup: &'a Setup, backend: PerfBackend, slots: &[SlotIndex]) -> Result<Self, String> {
        let mut course = Course {
            setup,
            driver: setup.driver(),
            backend,
            slots: SlotSet::EMPTY,
            least: 0,
            most: 0,
            since: 0,
        };
        course.start_anew(slots)?;
        Ok(course)
    }

    /// Of `GROUP` counters.
    fn start_group(setup: &'a Setup) -> Result<Self, String> {
        Self::start(setup, setup.backend(), &[A, B])
    }

    /// Programs `slots` and starts them as one.
    fn start_anew(&mut self, slots: &[SlotIndex]) -> Result<(), String> {
        for slot in slots {
            let programmed = self.backend.program(*slot, &self.setup.request);
            programmed.map_err(|unavailable| format!("slot {}: {unavailable}", slot.0))?;
        }
        self.slots = slots.iter().copied().collect();
        (self.least, self.most) = (0, 0);
        self.resume();
        Ok(())
    }

    fn resume(&mut self) {
        self.since = (self.setup.clock)();
        self.backend.resume(self.slots);
    }

    fn pause(&mut self) {
        self.backend.pause(self.slots);
        self.most += (self.setup.clock)() - self.since;
    }

    /// From an entry to an exit.
    fn run(&mut self, units: u64) {
        let events = units * self.driver.unit();
        let counted = self.driver.run(&mut self.backend, Ring::User, events);
        // The other user's process takes its time from the run's.
        self.least += counted.start() / 2;
    }

    /// Every slot has counted all the time.
    fn is_whole(&self) -> Result<(), String> {
        for slot in self.slots.iter() {
            let reading = self.backend.read(slot);
            let most = self.most + (self.setup.clock)() - self.since;
            let expected = self.least..=most * MOST / 100;
            let whole = matches!(reading, Reading::Counted { value, provenance: Provenance::Hardware }
                if expected.contains(&value));
            ensure(whole, || {
                format!("slot {}: {reading:?}, not {expected:?}", slot.0)
            })?;
        }
        Ok(())
    }

    /// Every slot says so, at the exit that shows it, once, and as long as nobody programs it anew.
    fn is_lost(&mut self) -> Result<(), String> {
        let told = self.backend.take_overflows();
        let slots = self.slots;
        ensure(told == slots, || format!("{told} told of {slots}"))?;
        let told = self.backend.take_overflows();
        ensure(told.is_empty(), || format!("{told} told twice"))?;
        self.stays_lost()?;
        // To start it again does not help.
        self.backend.resume(slots);
        self.run(1);
        self.stays_lost()
    }

    fn stays_lost(&self) -> Result<(), String> {
        for slot in self.slots.iter() {
            let reading = self.backend.read(slot);
            ensure(reading == LOST, || format!("slot {}: {reading:?}", slot.0))?;
        }
        Ok(())
    }
}

/// The backend of every day: nothing here is a guest's.
fn leaves_the_host_out(setup: &Setup, _: usize) -> Result<(), String> {
    let backend = PerfBackend::new(&setup.env).map_err(|error| error.to_string())?;
    let mut course = Course::start(setup, backend, &[A])?;
    course.run(RUN);
    let none = Reading::Counted {
        value: 0,
        provenance: Provenance::Hardware,
    };
    let reading = course.backend.read(A);
    ensure(reading == none, || format!("{reading:?}"))
}

/// Nothing but a signal makes the backend look, for nobody reads. So it is told at the
/// look behind that, or at the next one.
fn signal_comes(setup: &Setup, _: usize) -> Result<(), String> {
    const STEPS: u64 = 10;
    let mut course = Course::start(setup, setup.backend(), &[A])?;
    let due = STEPS * RUN * course.driver.unit();
    course.backend.arm(A, NonZeroU64::new(due));
    let mut looks = vec![(setup.clock)(); 2];
    for _ in 0..4 * STEPS {
        course.run(RUN);
        let told = course.backend.take_overflows().contains(A);
        looks.push((setup.clock)());
        if told {
            course.is_whole()?;
            let reading = course.backend.read(A);
            let late = (setup.clock)() - looks[looks.len() - 3];
            return ensure(
                matches!(reading, Reading::Counted { value, .. }
                    if (due..=due + late * MOST / 100).contains(&value)),
                || format!("{reading:?}, due at {due}, two looks are {late}"),
            );
        }
    }
    Err(format!("none came: {:?}", course.backend.read(A)))
}

fn room(setup: &Setup, counters: usize) -> Result<(), String> {
    stays_whole_beside(setup, counters - GROUP, true)
}

fn unpinned_user(setup: &Setup, counters: usize) -> Result<(), String> {
    stays_whole_beside(setup, counters, false)
}

fn stays_whole_beside(setup: &Setup, counters: usize, pinned: bool) -> Result<(), String> {
    let mut course = Course::start_group(setup)?;
    course.run(RUN);
    let _other = OtherUser::start(setup.name, counters, pinned)?;
    course.run(RUN);
    course.is_whole()
}

fn taken(setup: &Setup, counters: usize) -> Result<(), String> {
    let mut course = Course::start_group(setup)?;
    course.run(RUN);
    course.is_whole()?;
    // An overflow that is far from due is none.
    let far = 1_000 * RUN * course.driver.unit();
    course.backend.arm(A, NonZeroU64::new(far));
    let _other = OtherUser::start(setup.name, counters - GROUP + 1, true)?;
    course.run(1);
    course.is_lost()
}

/// Without RDPMC for programs the page names no counter, and a system call has to tell.
fn taken_without_page(setup: &Setup, counters: usize) -> Result<(), String> {
    const RDPMC: &str = "/sys/bus/event_source/devices/cpu/rdpmc";
    let set = |value: &str| fs::write(RDPMC, value).map_err(|error| format!("{RDPMC}: {error}"));
    let before = fs::read_to_string(RDPMC).map_err(|error| format!("{RDPMC}: {error}"))?;
    set("0")?;
    let course = Course::start_group(setup);
    set(before.trim())?;
    let mut course = course?;
    course.run(RUN);
    course.is_whole()?;
    let _other = OtherUser::start(setup.name, counters - GROUP + 1, true)?;
    // As long as the backend goes without a look.
    course.run(5 * RUN);
    course.is_lost()
}

fn never_had(setup: &Setup, counters: usize) -> Result<(), String> {
    let _other = OtherUser::start(setup.name, counters - GROUP + 1, true)?;
    let mut course = Course::start_group(setup)?;
    course.run(1);
    course.is_lost()?;
    // There is one left.
    course.start_anew(&[A])?;
    course.run(RUN);
    course.is_whole()
}

fn given_back(setup: &Setup, counters: usize) -> Result<(), String> {
    let mut course = Course::start_group(setup)?;
    let other = OtherUser::start(setup.name, counters, true)?;
    course.run(1);
    course.is_lost()?;
    drop(other);
    course.stays_lost()?;
    course.start_anew(&[A, B])?;
    course.run(RUN);
    course.is_whole()
}

fn away(setup: &Setup, counters: usize) -> Result<(), String> {
    let mut course = Course::start_group(setup)?;
    course.run(RUN);
    course.pause();
    course.backend.attach(OwnerId(1));
    drop(OtherUser::start(setup.name, counters, true)?);
    course.backend.attach(OwnerId(0));
    course.resume();
    course.run(RUN);
    course.is_whole()
}
