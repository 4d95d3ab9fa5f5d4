//! A unit with all that it needs around it.

use std::sync::Arc;

use arbiter::{
    Auditor, Caller, Context, Cookie, CounterId, Effects, Entropy, Event, Layer, PcrConfig,
    PcrRegister, PcrUnit, Phase, Record, Tsc, Verdict, abi,
};

use super::script::{Op, Setup};

/// What the caller of an operation gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// #GP.
    Fault,
    Value(u64),
    Done(Effects),
    Checked(Verdict),
    /// Bits of counters, and those as names again.
    Names(u64, u64),
    Vector(Option<u8>),
    Nothing,
}

/// An operation's outcome, and its records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) outcome: Outcome,
    pub(crate) records: Vec<Record>,
}

/// Keeps every record.
#[derive(Debug, Default)]
pub(crate) struct Trail(pub(crate) Vec<Record>);

impl Auditor for Trail {
    fn record(&mut self, record: &Record) {
        self.0.push(*record);
    }
}

/// Numbers that repeat from run to run; each fifth time the source fails.
#[derive(Debug, Default)]
pub(crate) struct Numbers(u64);

impl Entropy for Numbers {
    fn bits(&mut self) -> Option<u64> {
        self.0 += 1;
        (!self.0.is_multiple_of(5)).then(|| self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }
}

/// A unit, its machine's phase, and time.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) unit: PcrUnit,
    pub(crate) phase: Arc<Phase>,
    pub(crate) now: u64,
    /// When the unit last looked at its deadlines.
    pub(crate) ticked: u64,
    /// Who was asked last, and for which counter.
    asked: (Layer, u8),
    entropy: Numbers,
}

impl World {
    pub(crate) fn new(setup: &Setup) -> Self {
        let phase = Arc::new(Phase::new(setup.has_firmware));
        let unit = PcrUnit::new(PcrConfig {
            counters: setup.counters,
            widths: setup.widths,
            policy: setup.policy,
            scheme: setup.scheme,
            guard: setup.guard,
            ticks_per_ms: setup.ticks_per_ms,
            phase: Arc::clone(&phase),
            legacy: setup.legacy,
            smm: false,
        });
        World {
            unit,
            phase,
            now: 1,
            ticked: 0,
            asked: (Layer::GuestKernel, 0),
            entropy: Numbers::default(),
        }
    }

    /// The deadline of the unit.
    pub(crate) fn deadline(&self) -> Option<u64> {
        self.unit.deadline().map(|due| due.0)
    }

    /// The end of the lock-out, if the vCPU must not run now.
    pub(crate) fn locked_out_until(&self) -> Option<u64> {
        let until = self.unit.locked_out_until(Tsc(self.now));
        until.map(|until| until.0)
    }

    pub(crate) fn step(&mut self, op: &Op) -> Step {
        let mut trail = Trail::default();
        let World {
            unit,
            phase,
            now,
            ticked,
            asked,
            entropy,
        } = self;
        if let Op::Wait { ticks } = op {
            *now += ticks;
            *ticked = *now;
        }
        let mut cx = Context {
            now: Tsc(*now),
            entropy,
            audit: &mut trail,
        };
        let outcome = match *op {
            Op::Read {
                index,
                layer,
                presented,
            } => PcrRegister::decode(index)
                .and_then(|register| unit.read(register, Caller { layer, presented }, &mut cx))
                .map_or(Outcome::Fault, Outcome::Value),
            Op::Write {
                index,
                value,
                layer,
                presented,
            } => PcrRegister::decode(index)
                .and_then(|register| {
                    unit.write(register, value, Caller { layer, presented }, &mut cx)
                })
                .map_or(Outcome::Fault, Outcome::Done),
            Op::Access {
                position,
                layer,
                cookie,
                access,
            } => {
                let counter = CounterId::at_position(position).expect("a counter");
                let cookie = Cookie::new(cookie).expect("48 bits");
                let verdict = unit.check((layer, cookie), counter, access, cx.now);
                if verdict != Verdict::Permit {
                    unit.denied((layer, cookie), counter, access, verdict, &mut cx);
                }
                Outcome::Checked(verdict)
            }
            Op::Wait { .. } => Outcome::Done(unit.tick(&mut cx)),
            Op::EndPhase => {
                phase.end();
                // What that makes due, the unit has not looked at.
                *ticked = 0;
                Outcome::Nothing
            }
            Op::Reset => {
                phase.restart();
                unit.reset();
                Outcome::Nothing
            }
            Op::SetAside { position, cookie } => {
                let counter = CounterId::at_position(position).expect("a position");
                let cookie = Cookie::new(cookie).expect("48 bits");
                let done = unit.reserve_for_hypervisor(counter, cookie, &mut cx);
                done.map_or(Outcome::Fault, Outcome::Done)
            }
            Op::Reply { yields, presented } => {
                let (layer, position) = *asked;
                let value = if yields { 1 } else { 2 } | u64::from(position) << 8;
                let caller = Caller { layer, presented };
                unit.write(PcrRegister::Reply, value, caller, &mut cx)
                    .map_or(Outcome::Fault, Outcome::Done)
            }
            Op::TakeNotice => Outcome::Vector(unit.take_notice()),
            Op::Names { bits } => {
                let counters = unit.map().to_counters(bits);
                Outcome::Names(counters, unit.map().to_names(counters))
            }
        };
        for record in &trail.0 {
            if let (Event::Asked { .. }, Some(counter)) = (record.event, record.counter) {
                *asked = (record.layer, counter.position().expect("a position"));
            }
        }
        Step {
            outcome,
            records: trail.0,
        }
    }
}

/// Indices of registers that show the state and leave it alone. The legacy map is
/// not among them, because a look may settle it.
pub(crate) fn registers() -> impl Iterator<Item = u32> {
    let row = |first: u32| (first..first + 0x40).filter(|offset| offset % 32 < 5);
    [abi::MSR_CONTROL, abi::MSR_DROP_VALUE, abi::MSR_STATUS]
        .into_iter()
        .flat_map(row)
        .chain([abi::MSR_PHASE, abi::MSR_NOTICE_VECTOR])
        .chain([abi::MSR_ANSWER, abi::MSR_GRANTED])
        .map(|offset| abi::MSR_BASE + offset)
}
