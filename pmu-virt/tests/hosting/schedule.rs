//! Random schedules: nothing is lost, nothing is counted twice, whoever runs
//! where and whatever is loaded, started, stopped and unloaded in between.

use std::time::Duration;

use super::private::Private;
use super::rig::{Mail, Nothing, Rig, Spot, context, reading, was_read};
use super::truth::{EVENTS, Truth, clocks};
use perfmon_abi::consts::{PFM_FL_PREEMPTIBLE, PFM_FL_SYSTEM_WIDE, PFM_PROV_LOST};
use perfmon_abi::wire::Call;
use pmu_virt::perfmon::{ContextId, HostPolicy};
use pmu_virt::{CounterBackend, Progress, Ring, SimBackend, Ticks, Tsc};
use proptest::collection::vec;
use proptest::prelude::{
    Just, ProptestConfig, Strategy, prop_assert, prop_assert_eq, prop_oneof, proptest,
};
use proptest::test_runner::TestCaseError;

const VCPUS: usize = 3;
const CORES: usize = 2;
/// Timeout of each set of a context that has several, in nanoseconds.
const TIMEOUT: u64 = 100_000;

/// A context of a vCPU or core: this one of those that are there, counted round.
type Who = (Spot, usize);

#[derive(Clone, Debug)]
enum Step {
    /// A vCPU runs on a core, and its guest writes selects and reads counts.
    Run {
        vcpu: usize,
        core: usize,
        ring: Ring,
        ticks: u64,
        halted: u64,
        writes: Vec<(u32, u64)>,
    },
    /// Nobody runs on a core.
    Idle {
        core: usize,
        ticks: u64,
    },
    Load {
        spot: Spot,
        sets: Vec<Vec<usize>>,
    },
    Unload(Who),
    Start(Who),
    Stop(Who),
    Read(Who),
    Park {
        core: usize,
    },
}

fn spot() -> impl Strategy<Value = Spot> {
    prop_oneof![
        2 => (0..VCPUS).prop_map(Spot::Vcpu),
        1 => (0..CORES).prop_map(Spot::Core),
    ]
}

fn who() -> impl Strategy<Value = Who> {
    (spot(), 0usize..4)
}

fn step() -> impl Strategy<Value = Step> {
    let ring = prop_oneof![Just(Ring::Kernel), Just(Ring::User)];
    let ticks = prop_oneof![1 => 0u64..2, 4 => 0u64..2_000, 2 => 0u64..250_000];
    let write = (0u32..6, proptest::sample::select(EVENTS.to_vec()));
    let run = (
        0..VCPUS,
        0..CORES,
        ring,
        ticks.clone(),
        prop_oneof![3 => 0u64..1, 1 => 0u64..1_000],
        vec(write, 0..3),
    );
    let run = run.prop_map(|(vcpu, core, ring, ticks, halted, writes)| Step::Run {
        vcpu,
        core,
        ring,
        ticks,
        halted: halted.min(ticks),
        writes,
    });
    let sets = vec(vec(0..EVENTS.len(), 0..5), 1..4);
    prop_oneof![
        8 => run,
        1 => (0..CORES, ticks).prop_map(|(core, ticks)| Step::Idle { core, ticks }),
        3 => (spot(), sets).prop_map(|(spot, sets)| Step::Load { spot, sets }),
        1 => who().prop_map(Step::Unload),
        3 => who().prop_map(Step::Start),
        1 => who().prop_map(Step::Stop),
        1 => who().prop_map(Step::Read),
        1 => (0..CORES).prop_map(|core| Step::Park { core }),
    ]
}

/// What a context has to have counted.
#[derive(Debug)]
struct Expected {
    /// Events of each set, by its counters.
    sets: Vec<Vec<usize>>,
    counts: Vec<Vec<u64>>,
    started: bool,
    active: usize,
    /// What is left of the active set's time.
    left: u64,
    /// Of a core's context: TSC until which its time has passed, and of that as much as
    /// it was told.
    until: Option<u64>,
}

impl Expected {
    fn new(sets: Vec<Vec<usize>>) -> Self {
        let counts = sets.iter().map(|set| vec![0; set.len()]).collect();
        Expected {
            sets,
            counts,
            started: false,
            active: 0,
            left: TIMEOUT,
            until: None,
        }
    }

    fn start(&mut self) {
        if !self.started && self.active != 0 {
            (self.active, self.left) = (0, TIMEOUT);
        }
        self.started = true;
    }

    fn count(&mut self, events: &[u64]) {
        if self.started {
            let set = &self.sets[self.active];
            for (count, event) in self.counts[self.active].iter_mut().zip(set) {
                *count += events[*event];
            }
        }
    }

    /// Compares with what is read, by set and counter.
    fn check(
        &self,
        scarce: bool,
        mut read: impl FnMut(u16, usize) -> (u64, u32),
    ) -> Result<(), TestCaseError> {
        for (set, counts) in (0..).zip(&self.counts) {
            for (n, count) in counts.iter().enumerate() {
                let (value, how) = read(set, n);
                match how {
                    PFM_PROV_LOST => prop_assert!(scarce && value <= *count),
                    _ => prop_assert_eq!(value, *count, "set {} counter {}, how {}", set, n, how),
                }
            }
        }
        Ok(())
    }

    /// The sets take turns. Time in which events are counted is all the active
    /// set's, however late the switch; idle time goes from set to set.
    fn pass(&mut self, run: u64, mut idle: u64) {
        if !self.started || self.sets.len() < 2 {
            return;
        }
        self.left = self.left.saturating_sub(run);
        while idle >= self.left {
            idle -= self.left;
            self.left = TIMEOUT;
            self.active = (self.active + 1) % self.sets.len();
        }
        self.left -= idle;
    }
}

/// The contexts of a vCPU or core, the oldest first.
type Loaded = Vec<(ContextId, Expected)>;

/// A machine, and what has to come of it.
struct World {
    rig: Rig,
    truths: Vec<Truth>,
    vcpus: Vec<Loaded>,
    cores: Vec<Loaded>,
    /// The guests' counters: event, and events since it was written.
    guests: Vec<[Option<(usize, u64)>; 6]>,
    /// Most contexts of a vCPU, and of a core.
    most: usize,
    /// There may be too few counters; whether contexts are preemptible then.
    scarce: Option<bool>,
}

impl World {
    fn new((slots, private): (usize, bool), most: usize, policy: HostPolicy) -> Self {
        let clocks_here = clocks(slots);
        let backend = || -> Box<dyn CounterBackend> {
            let counters = SimBackend::of(&clocks_here);
            if private {
                Box::new(Private::new(counters))
            } else {
                Box::new(counters)
            }
        };
        let elsewhere = clocks(64);
        let truth = |vcpu: u32| Truth::new(&elsewhere, vcpu);
        let mut rig = Rig::new((3, CORES), policy, backend);
        rig.limit(most);
        World {
            rig,
            most,
            truths: (0..3).map(truth).collect(),
            vcpus: (0..VCPUS).map(|_| Vec::new()).collect(),
            cores: (0..CORES).map(|_| Vec::new()).collect(),
            guests: vec![[None; 6]; VCPUS],
            scarce: None,
        }
    }

    fn spots(&self) -> Vec<Spot> {
        let vcpus = (0..VCPUS).map(Spot::Vcpu);
        vcpus.chain((0..CORES).map(Spot::Core)).collect()
    }

    fn loaded(&mut self, spot: Spot) -> &mut Loaded {
        match spot {
            Spot::Vcpu(vcpu) => &mut self.vcpus[vcpu],
            Spot::Core(core) => &mut self.cores[core],
        }
    }

    /// The context that is meant, as its place among those that are there.
    fn index(&mut self, (spot, which): Who) -> Option<usize> {
        which.checked_rem(self.loaded(spot).len())
    }

    /// A command for it, or for one that does not exist.
    fn call(&mut self, who: Who, mut call: Call) -> Result<(), TestCaseError> {
        let spot = who.0;
        let index = self.index(who);
        let id = index.map_or(ContextId(0), |index| self.loaded(spot)[index].0);
        let called = self.rig.call_one(spot, id, &mut call);
        prop_assert_eq!(called.is_ok(), index.is_some());
        Ok(())
    }

    fn carry_out(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match step {
            Step::Run {
                vcpu,
                core,
                ring,
                ticks,
                halted,
                writes,
            } => {
                let left = Progress::Left {
                    tsc: Tsc(self.rig.tsc + ticks),
                    halted: Ticks(*halted),
                    ring: Some(*ring),
                };
                self.run(*vcpu, *core, left, ticks - halted)?;
                for (n, value) in writes {
                    self.guest_writes(*vcpu, *n, *value)?;
                }
            }
            Step::Idle { core, ticks } => {
                self.rig.clear(*core);
                self.rig.tsc += ticks;
                self.idle(*core, *ticks);
            }
            Step::Load { spot, sets } => {
                if self.load(*spot, sets)? && self.scarce.is_some() {
                    let youngest = self.loaded(*spot).len() - 1;
                    self.carry_out(&Step::Start((*spot, youngest)))?;
                }
            }
            Step::Unload(who) => {
                let spot = who.0;
                let Some(index) = self.index(*who) else {
                    prop_assert!(self.rig.unload_one(spot, ContextId(0)).is_none());
                    return Ok(());
                };
                let (id, expected) = self.loaded(spot).remove(index);
                let context = self.rig.unload_one(spot, id);
                prop_assert!(context.is_some());
                let scarce = self.scarce.is_some();
                if let Some(mut context) = context {
                    expected.check(scarce, |set, n| {
                        let mut call = reading(set, n);
                        let read = context.call(&mut call, &Nothing);
                        assert_eq!(read, Ok(()));
                        was_read(&call)
                    })?;
                }
            }
            Step::Start(who) => {
                // From set 0 on, unless it goes on already.
                self.call(*who, Call::Start(Some(perfmon_abi::StartArg { set: 0 })))?;
                if let Some(index) = self.index(*who) {
                    self.loaded(who.0)[index].1.start();
                }
            }
            Step::Stop(who) => {
                self.call(*who, Call::Stop)?;
                if let Some(index) = self.index(*who) {
                    self.loaded(who.0)[index].1.started = false;
                }
            }
            Step::Read(who) => {
                if let Some(index) = self.index(*who) {
                    self.check_one(who.0, index)?;
                }
            }
            Step::Park { core } => self.rig.clear(*core),
        }
        Ok(())
    }

    fn run(
        &mut self,
        vcpu: usize,
        core: usize,
        left: Progress,
        ran: u64,
    ) -> Result<(), TestCaseError> {
        let entered = self.rig.tsc;
        self.rig.run(vcpu, core, left);
        let events = self.truths[vcpu].run(entered, &left);
        for (counter, now) in self.guests[vcpu].iter_mut().enumerate() {
            if let Some((event, count)) = now {
                *count += events[*event];
                let msr = 0xc001_0201 + 2 * u32::try_from(counter).unwrap_or(0);
                let (value, count) = (self.rig.value(vcpu, msr), *count & ((1 << 48) - 1));
                match self.scarce {
                    None => prop_assert_eq!(value, count),
                    Some(_) => prop_assert!(value <= count, "{value} of {count}"),
                }
            }
        }
        for (_, expected) in &mut self.vcpus[vcpu] {
            expected.count(&events);
            expected.pass(ran, 0);
        }
        let idle = match left {
            Progress::Left { halted, .. } => halted.0.min(self.rig.tsc - entered),
            _ => 0,
        };
        for (_, expected) in &mut self.cores[core] {
            let since = expected.until.replace(self.rig.tsc).unwrap_or(entered);
            expected.count(&events);
            expected.pass(self.rig.tsc - since - idle, idle);
        }
        self.rig.tsc += 7;
        Ok(())
    }

    fn idle(&mut self, core: usize, ticks: u64) {
        let time = Duration::from_nanos(ticks);
        self.rig.core(core, |core| core.pass_idle(time));
        for (_, expected) in &mut self.cores[core] {
            expected.pass(0, ticks);
            if let Some(until) = &mut expected.until {
                *until += ticks;
            }
        }
    }

    fn guest_writes(&mut self, vcpu: usize, n: u32, value: u64) -> Result<(), TestCaseError> {
        let event = EVENTS.iter().position(|event| *event == value);
        self.rig.write(vcpu, 0xc001_0200 + 2 * n, value);
        self.rig.write(vcpu, 0xc001_0201 + 2 * n, 0);
        self.guests[vcpu][usize::try_from(n).unwrap_or(0)] = event.map(|event| (event, 0));
        Ok(())
    }

    /// True if there was room.
    fn load(&mut self, spot: Spot, sets: &[Vec<usize>]) -> Result<bool, TestCaseError> {
        let registers = |set: &Vec<usize>| {
            let events = set.iter().map(|event| EVENTS[*event]);
            events.enumerate().collect::<Vec<_>>()
        };
        // Time stands still for one that is preempted, so that sets would not
        // switch when they are expected to.
        let sets = if self.scarce.is_some() {
            &sets[..1]
        } else {
            sets
        };
        let registers: Vec<_> = sets.iter().map(registers).collect();
        let mut flags = match spot {
            Spot::Vcpu(_) => 0,
            Spot::Core(_) => PFM_FL_SYSTEM_WIDE,
        };
        if self.scarce == Some(true) {
            flags |= PFM_FL_PREEMPTIBLE;
        }
        let context = context(flags, &registers, TIMEOUT);
        let loaded = self.rig.load(spot, context, &Mail::default());
        // A place for each, and room for everybody, unless counters are few.
        let is_free = self.loaded(spot).len() < self.most;
        if self.scarce.is_none() || !is_free {
            prop_assert_eq!(loaded.is_ok(), is_free, "{:?}", loaded);
        }
        if let Ok(id) = loaded {
            self.loaded(spot).push((id, Expected::new(sets.to_vec())));
        }
        Ok(loaded.is_ok())
    }

    fn check_one(&mut self, spot: Spot, index: usize) -> Result<(), TestCaseError> {
        let (id, expected) = self.loaded(spot).remove(index);
        let scarce = self.scarce.is_some();
        expected.check(scarce, |set, n| self.rig.read_one((spot, id), set, n))?;
        self.loaded(spot).insert(index, (id, expected));
        Ok(())
    }

    fn check_all(&mut self) -> Result<(), TestCaseError> {
        for spot in self.spots() {
            for index in 0..self.loaded(spot).len() {
                self.check_one(spot, index)?;
            }
        }
        Ok(())
    }
}

fn check(slots: (usize, bool), most: usize, steps: &[Step]) -> Result<(), TestCaseError> {
    let mut world = World::new(slots, most, HostPolicy::GuestFirst);
    for step in steps {
        world.carry_out(step)?;
    }
    world.check_all()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// With fewer counters than everybody wants: whatever is said to be counted
    /// is, and nobody is told more than took place.
    #[test]
    fn what_is_told_has_taken_place(
        slots in (1usize..14, proptest::bool::ANY),
        policy in proptest::sample::select(vec![
            HostPolicy::GuestFirst,
            HostPolicy::HostFirst,
            HostPolicy::Shares { host: None },
        ]),
        soft in proptest::bool::ANY,
        most in 1usize..5,
        steps in vec(step(), 0..80),
    ) {
        let mut world = World::new(slots, most, policy);
        world.scarce = Some(soft);
        for step in &steps {
            world.carry_out(step)?;
        }
        world.check_all()?;
    }

    /// Six for the guest, four for each of the contexts; more make fewer moves.
    #[test]
    fn nothing_is_lost_and_nothing_counted_twice(
        (most, more, private) in (1usize..5, 0usize..16, proptest::bool::ANY),
        steps in vec(step(), 0..120),
    ) {
        check((6 + 8 * most + more, private), most, &steps)?;
    }
}
