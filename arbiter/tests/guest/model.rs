//! Random calls against a model that is nothing but bitmaps.

use arbiter::guest::{ArbiterError, DeniedAccess, FullMaster, Key, Master, Part, PcrPort, Private};
use arbiter::{Access, CounterId, CounterSet, Layer, Scheme, Verdict};
use proptest::collection::vec;
use proptest::prelude::*;

use super::machine::{Kind, Port, Shape, key};

#[derive(Clone, Debug)]
enum Call {
    Reserve(Part, CounterId),
    Release(Part, CounterId),
    Renew(CounterId),
    /// The first of these.
    Acquire(u64),
    /// One of those that are held, or that were.
    GiveUp(usize),
    /// The same with another key.
    Steal(usize, u64),
}

fn counter() -> impl Strategy<Value = CounterId> {
    prop_oneof![
        4 => (0u8..6).prop_map(CounterId::Programmable),
        1 => (0u8..3).prop_map(CounterId::Fixed),
    ]
}

fn part() -> impl Strategy<Value = Part> {
    prop_oneof![Just(Part::Perfctr), Just(Part::Evntsel)]
}

fn call() -> impl Strategy<Value = Call> {
    prop_oneof![
        6 => (part(), counter()).prop_map(|(part, counter)| Call::Reserve(part, counter)),
        4 => (part(), counter()).prop_map(|(part, counter)| Call::Release(part, counter)),
        1 => counter().prop_map(Call::Renew),
        2 => prop_oneof![Just(!0), any::<u64>()].prop_map(Call::Acquire),
        2 => (0usize..8).prop_map(Call::GiveUp),
        1 => (0usize..8, 1u64..1 << 48).prop_map(|(which, key)| Call::Steal(which, key)),
    ]
}

/// Firmware that holds this and that, and what legacy names there are.
fn machine() -> impl Strategy<Value = Port> {
    let taken = vec((0u32..3, counter()), 0..4);
    let shape = (
        1usize..=3,
        1u8..=5,
        0u8..=2,
        proptest::option::of((0u8..=5, 0u8..=2)),
        prop::sample::select(Scheme::ALL.to_vec()),
    );
    (shape, taken).prop_map(|((cpus, programmable, fixed, legacy, scheme), taken)| {
        let shape = Shape::new(cpus, programmable, fixed).under(scheme);
        let shape = match legacy {
            Some((names, fixed)) => shape.legacy(names.min(programmable), fixed),
            None => shape,
        };
        let mut port = Port::new(&shape);
        for (cpu, counter) in taken {
            // Some do not exist, or policy keeps them for the kernel.
            let _ = port.hold(cpu % port.cpus(), counter, key(0xf1));
        }
        port.end_phase()
    })
}

/// What the calls leave: the counters that exist for them, and who has reserved which.
#[derive(Debug, Default)]
struct Model {
    available: CounterSet,
    owners: [CounterSet; 2],
    private: CounterSet,
}

impl Model {
    /// Names behind which each CPU has a counter that the firmware leaves alone.
    fn new(port: &Port) -> Self {
        let is_free = |name: &CounterId| {
            (0..port.cpus()).all(|cpu| match port.behind(cpu, *name) {
                Some(counter) => !port.held(cpu).contains(counter),
                // Without a name, a fixed-function counter has its place still.
                None => matches!(name, CounterId::Fixed(_)) && !port.held(cpu).contains(*name),
            })
        };
        Model {
            available: port.discovery().counters().iter().filter(is_free).collect(),
            ..Model::default()
        }
    }

    fn reserve(&mut self, part: Part, name: CounterId) -> Result<(), ArbiterError> {
        if !self.available.contains(name) {
            return Err(ArbiterError::Unavailable(name));
        }
        if self.private.contains(name) || self.owners[part as usize].contains(name) {
            return Err(ArbiterError::InUse(name));
        }
        self.owners[part as usize].insert(name);
        Ok(())
    }

    fn release(&mut self, part: Part, name: CounterId) {
        self.owners[part as usize].remove(name);
    }

    fn acquire(&self, wanted: u64) -> Option<CounterId> {
        let used = self.owners[0] | self.owners[1] | self.private;
        (self.available & CounterSet::from_bits(wanted) & !used)
            .iter()
            .next()
    }

    /// The machine is as the model says, on every CPU.
    fn check(&self, port: &Port, kind: Kind, held: &[Private]) {
        let open = self.owners[0] & self.owners[1];
        for cpu in 0..port.cpus() {
            for name in self.available.iter() {
                let expected = if open.contains(name) {
                    Verdict::Permit
                } else {
                    kind.unreserved()
                };
                if let Some(verdict) = port.legacy(cpu, name, Access::Write) {
                    assert_eq!(verdict, expected, "{name} on CPU {cpu}");
                }
            }
            for one in held {
                let counter = port.behind(cpu, one.counter).unwrap_or(one.counter);
                let with = |key| port.verdict(cpu, counter, key, Access::Read);
                assert_eq!(with(one.key), Verdict::Permit);
                for other in held.iter().filter(|other| other.counter != one.counter) {
                    assert_eq!(with(other.key), kind.unreserved());
                }
            }
        }
    }
}

/// The calls that all arbiters know.
fn classic(master: &mut dyn Master, model: &mut Model, call: &Call) {
    match *call {
        Call::Reserve(part, name) => {
            assert_eq!(
                master.reserve(part, name),
                model.reserve(part, name),
                "{call:?}"
            );
        }
        Call::Release(part, name) => {
            master.release(part, name);
            model.release(part, name);
        }
        Call::Renew(name) => {
            let expected = if model.available.contains(name) {
                Ok(())
            } else {
                Err(ArbiterError::Unavailable(name))
            };
            assert_eq!(master.renew(name), expected);
        }
        Call::Acquire(_) | Call::GiveUp(_) | Call::Steal(..) => (),
    }
    assert_eq!(master.counters(), model.available);
}

fn firmwares(port: &Port) -> Vec<CounterSet> {
    let held = |cpu| port.held_by(cpu, Layer::Firmware);
    (0..port.cpus()).map(held).collect()
}

/// At the end the firmware has what it had, and nobody else has anything.
fn is_as_before(port: &Port, before: &[CounterSet]) {
    for (cpu, held) in (0..).zip(before) {
        assert_eq!(port.held(cpu), *held, "CPU {cpu}");
    }
    assert_eq!(port.wrong_cookies(), 0);
}

proptest! {
    #[test]
    fn classic_calls(port in machine(), calls in vec(call(), 0..60)) {
        for kind in Kind::ALL {
            let before = firmwares(&port);
            let mut model = Model::new(&port);
            let mut master = kind.claim(&port);
            for call in &calls {
                classic(&mut *master, &mut model, call);
                model.check(&port, kind, &[]);
            }
            master.finish();
            is_as_before(&port, &before);
        }
    }

    #[test]
    fn private_calls(port in machine(), calls in vec(call(), 0..60)) {
        for denial in [DeniedAccess::Drop, DeniedAccess::Fault] {
            let kind = Kind::Full(denial);
            let before = firmwares(&port);
            let mut model = Model::new(&port);
            let machine = port.discovery();
            let mut master = FullMaster::claim(port.clone(), machine, denial).expect("a kernel");
            // All that were ever handed out; those held now come first.
            let (mut held, mut past): (Vec<Private>, Vec<Private>) = (vec![], vec![]);
            for call in &calls {
                match *call {
                    Call::Acquire(wanted) => {
                        let got = master.acquire(CounterSet::from_bits(wanted));
                        let expected = model.acquire(wanted).ok_or(ArbiterError::NoneFree);
                        prop_assert_eq!(got.map(|one| one.counter), expected);
                        if let Ok(one) = got {
                            prop_assert!(one.key != Key::DEFAULT);
                            model.private.insert(one.counter);
                            held.push(one);
                        }
                    }
                    Call::GiveUp(which) if which < held.len() => {
                        let one = held.remove(which);
                        prop_assert_eq!(master.give_up(one), Ok(()));
                        model.private.remove(one.counter);
                        past.push(one);
                    }
                    Call::GiveUp(which) => if let Some(one) = past.get(which) {
                        let expected = Err(ArbiterError::NotYours(one.counter));
                        prop_assert_eq!(master.give_up(*one), expected);
                    },
                    Call::Steal(which, guess) => if let Some(one) = held.get(which) {
                        let other = Private { key: key(guess), ..*one };
                        if other != *one {
                            let expected = Err(ArbiterError::NotYours(one.counter));
                            prop_assert_eq!(master.give_up(other), expected);
                        }
                    },
                    Call::Reserve(..) | Call::Release(..) | Call::Renew(_) => {
                        classic(&mut master, &mut model, call);
                    }
                }
                model.check(&port, kind, &held);
            }
            master.finish();
            is_as_before(&port, &before);
        }
    }
}
