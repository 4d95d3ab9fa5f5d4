//! One vCPU's unit with a clock of milliseconds and a record of everything.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::sync::Arc;

use arbiter::{
    Answer, Auditor, Bank, Caller, Context, Cookie, CounterId, CounterSet, Effects, Entropy, Event,
    GuardLimits, Layer, Notice, PcrConfig, PcrRegister, PcrUnit, PerKind, Phase, Policy, Reason,
    Record, Reply, Request, Scheme, Share, Tsc, Wanted,
};

#[derive(Debug, Default)]
pub(crate) struct Records(pub(crate) Vec<Record>);

impl Auditor for Records {
    fn record(&mut self, record: &Record) {
        self.0.push(*record);
    }
}

#[derive(Debug)]
pub(crate) struct Counting(pub(crate) u64);

impl Entropy for Counting {
    fn bits(&mut self) -> Option<u64> {
        self.0 += 1;
        Some(self.0)
    }
}

pub(crate) const FW: Layer = Layer::Firmware;
pub(crate) const HV: Layer = Layer::Hypervisor;
pub(crate) const KERNEL: Layer = Layer::GuestKernel;

#[derive(Debug)]
pub(crate) struct Harness {
    pub(crate) unit: PcrUnit,
    pub(crate) now: u64,
    pub(crate) records: Records,
    pub(crate) cleared: CounterSet,
    entropy: Counting,
}

pub(crate) fn pmc(n: u8) -> CounterId {
    CounterId::Programmable(n)
}

pub(crate) fn set(counters: impl IntoIterator<Item = u8>) -> CounterSet {
    counters.into_iter().map(pmc).collect()
}

/// Each layer's cookie.
pub(crate) fn cookie(layer: Layer) -> Cookie {
    Cookie::new(bits(layer)).unwrap()
}

pub(crate) fn bits(layer: Layer) -> u64 {
    0x1000 + u64::from(layer.code())
}

pub(crate) fn share(min: u8, max: u8, priority: u8) -> Share {
    Share {
        min: PerKind {
            programmable: min,
            fixed: 0,
        },
        max: PerKind {
            programmable: max,
            fixed: max,
        },
        priority,
        lease_ms: None,
    }
}

/// No minima and no maxima; the kernel comes before the hypervisor before the
/// firmware.
pub(crate) fn plain() -> Policy {
    Policy {
        firmware: share(0, 255, 0),
        hypervisor: share(0, 255, 1),
        kernel: share(0, 255, 2),
        grace_ms: 100,
    }
}

/// A machine without SMM and legacy names, whose ticks are milliseconds.
pub(crate) fn config(
    scheme: Scheme,
    counters: PerKind,
    policy: Policy,
    firmware: bool,
) -> PcrConfig {
    PcrConfig {
        counters,
        widths: PerKind {
            programmable: 48,
            fixed: 48,
        },
        policy,
        scheme,
        guard: GuardLimits::with_ticks_per_ms(1),
        ticks_per_ms: 1,
        phase: Arc::new(Phase::new(firmware)),
        legacy: None,
        smm: false,
    }
}

impl Harness {
    pub(crate) fn new(scheme: Scheme, counters: u8, policy: Policy) -> Harness {
        Harness::with(
            scheme,
            PerKind {
                programmable: counters,
                fixed: 0,
            },
            policy,
            true,
        )
    }

    pub(crate) fn with(
        scheme: Scheme,
        counters: PerKind,
        policy: Policy,
        firmware: bool,
    ) -> Harness {
        policy.fits(counters.programmable, counters.fixed).unwrap();
        Harness::of(config(scheme, counters, policy, firmware))
    }

    pub(crate) fn of(config: PcrConfig) -> Harness {
        Harness {
            unit: PcrUnit::new(config),
            now: 0,
            records: Records::default(),
            cleared: CounterSet::EMPTY,
            entropy: Counting(0),
        }
    }

    pub(crate) fn end_phase(&mut self) -> &mut Harness {
        assert!(self.write(FW, PcrRegister::Phase, 1, 0));
        self
    }

    pub(crate) fn cx<T>(&mut self, run: impl FnOnce(&mut PcrUnit, &mut Context<'_>) -> T) -> T {
        let mut cx = Context {
            now: Tsc(self.now),
            entropy: &mut self.entropy,
            audit: &mut self.records,
        };
        run(&mut self.unit, &mut cx)
    }

    pub(crate) fn note(&mut self, effects: Effects) {
        self.cleared = self.cleared | effects.cleared;
    }

    /// False is #GP.
    pub(crate) fn write(
        &mut self,
        layer: Layer,
        register: PcrRegister,
        value: u64,
        cookie: u64,
    ) -> bool {
        let caller = Caller {
            layer,
            presented: cookie,
        };
        let done = self.cx(|unit, cx| unit.write(register, value, caller, cx));
        done.map(|effects| self.note(effects)).is_some()
    }

    pub(crate) fn read(&mut self, layer: Layer, register: PcrRegister) -> Option<u64> {
        let caller = Caller {
            layer,
            presented: 0,
        };
        self.cx(|unit, cx| unit.read(register, caller, cx))
    }

    pub(crate) fn request(&mut self, layer: Layer, request: Request) -> Result<Answer, Reason> {
        let (answer, effects) = self.cx(|unit, cx| unit.request(layer, request, cx))?;
        self.note(effects);
        Ok(answer)
    }

    pub(crate) fn any(&mut self, layer: Layer, count: u8) -> Answer {
        self.reserve(layer, Wanted::Any(count), None)
    }

    pub(crate) fn this(&mut self, layer: Layer, n: u8) -> Answer {
        self.reserve(layer, Wanted::This(pmc(n)), None)
    }

    pub(crate) fn reserve(
        &mut self,
        layer: Layer,
        wanted: Wanted,
        lease_ms: Option<u32>,
    ) -> Answer {
        let cookie = cookie(layer);
        let request = Request::Reserve {
            wanted,
            cookie,
            lease_ms,
            event: None,
        };
        self.request(layer, request).unwrap()
    }

    pub(crate) fn release(&mut self, layer: Layer, n: u8) -> Answer {
        let (counter, cookie) = (pmc(n), cookie(layer));
        self.request(layer, Request::Release { counter, cookie })
            .unwrap()
    }

    /// Gives a counter back that the hypervisor has for a tool, with the cookie of `layer`.
    pub(crate) fn give_back(&mut self, layer: Layer, n: u8) {
        let effects = self.cx(|unit, cx| unit.give_back(pmc(n), cookie(layer), cx));
        self.note(effects);
    }

    /// Withdraws the pending request, if there is one.
    pub(crate) fn withdraw(&mut self, layer: Layer) -> Answer {
        let cookie = cookie(layer);
        self.request(layer, Request::Withdraw { cookie }).unwrap()
    }

    pub(crate) fn reply(&mut self, layer: Layer, n: u8, yields: bool) -> Result<(), Reason> {
        let reply = Reply {
            counter: pmc(n),
            yields,
        };
        let effects = self.cx(|unit, cx| unit.reply(layer, reply, cx))?;
        self.note(effects);
        Ok(())
    }

    /// Marks a counter of the layer as one that it lends.
    pub(crate) fn lend(&mut self, layer: Layer, n: u8) {
        let lends = arbiter::Control::INITIAL.with_lend(true).bits();
        assert!(self.write(layer, PcrRegister::Control(pmc(n)), lends, bits(layer)));
    }

    pub(crate) fn deadline(&self) -> Option<u64> {
        self.unit.deadline().map(|due| due.0)
    }

    /// Goes to a time, and ticks on the way whenever something is due.
    pub(crate) fn at(&mut self, now: u64) -> &mut Harness {
        loop {
            let due = self.deadline().filter(|due| *due <= now);
            self.now = due.unwrap_or(now).max(self.now);
            let effects = self.cx(|unit, cx| unit.tick(cx));
            self.note(effects);
            if due.is_none() {
                return self;
            }
        }
    }

    pub(crate) fn held(&self, layer: Layer) -> CounterSet {
        self.unit.bank().held_by(layer)
    }

    pub(crate) fn last_answer(&self, layer: Layer) -> Answer {
        self.unit.answer(layer)
    }

    pub(crate) fn bank(&self) -> &Bank {
        self.unit.bank()
    }

    pub(crate) fn notices(&mut self, layer: Layer) -> Vec<Notice> {
        let now = Tsc(self.now);
        std::iter::from_fn(|| self.unit.next_notice(layer, now)).collect()
    }

    pub(crate) fn events_so_far(
        &self,
    ) -> impl Iterator<Item = (Layer, Option<CounterId>, Event)> + '_ {
        let records = self.records.0.iter();
        records.map(|record| (record.layer, record.counter, record.event))
    }

    pub(crate) fn events(&mut self) -> Vec<(Layer, Option<CounterId>, Event)> {
        let records = std::mem::take(&mut self.records.0);
        records
            .into_iter()
            .map(|record| (record.layer, record.counter, record.event))
            .collect()
    }
}
