//! Playing a script: from steps to a trace.

use std::sync::Arc;

use arbiter::{
    Answer, Caller, Context, Control, Cookie, CounterId, Effects, Event, GuardLimits, Layer,
    NoEntropy, NoticeKind, Outcome, PcrConfig, PcrRegister, PcrUnit, PerKind, Phase, Policy,
    Reason, Reply, Request, Tsc, Wanted, abi,
};

use super::{Action, End, Row, Script, Setup, Step, Trace, What};

/// Layers that can hold counters.
const LAYERS: usize = Policy::LAYERS.len();

/// Plays a script. Layers read their notices when they come. After the last step
/// time passes until every request has its answer.
pub fn play(script: &Script, setup: &Setup) -> Trace {
    let mut player = Player::new(script, setup);
    for (index, step) in script.steps().iter().enumerate() {
        player.pass(step.at_ms);
        player.step(index, step);
    }
    while let Some(due) = player.waiting() {
        player.pass(due);
    }
    let bank = player.unit.bank();
    let owner = |counter| bank.reservation(counter).map(|held| held.owner);
    let owners = bank.counters().iter();
    Trace {
        owners: owners.map(|counter| (counter, owner(counter))).collect(),
        rows: player.rows,
        ends: player.ends,
    }
}

/// The one cookie of a layer. A script has no secrets.
fn cookie(layer: Layer) -> Cookie {
    Cookie::from_random(register(layer))
}

fn register(layer: Layer) -> u64 {
    1 + u64::from(layer.code())
}

struct Player {
    unit: PcrUnit,
    now: u32,
    rows: Vec<Row>,
    ends: Vec<End>,
    /// The last answer of each layer that has a row.
    reported: [Answer; LAYERS],
    /// The step whose request is each layer's last one.
    asking: [Option<usize>; LAYERS],
    /// The counter that each layer was asked for last.
    asked: [Option<CounterId>; LAYERS],
}

impl Player {
    fn new(script: &Script, setup: &Setup) -> Player {
        let unit = PcrUnit::new(PcrConfig {
            counters: setup.counters,
            widths: PerKind {
                programmable: 48,
                fixed: 48,
            },
            policy: setup.policy,
            scheme: setup.scheme,
            guard: GuardLimits::with_ticks_per_ms(1),
            ticks_per_ms: 1,
            phase: Arc::new(Phase::new(script.has_firmware())),
            legacy: None,
            smm: false,
        });
        Player {
            unit,
            now: 0,
            rows: Vec::new(),
            ends: Vec::new(),
            reported: Default::default(),
            asking: [None; LAYERS],
            asked: [None; LAYERS],
        }
    }

    /// When the arbiter next looks at a request that waits. `None` means that none
    /// waits.
    fn waiting(&self) -> Option<u32> {
        let waits = |layer: &Layer| self.unit.answer(*layer).outcome == Outcome::Pending;
        Policy::LAYERS.iter().find(|layer| waits(layer))?;
        u32::try_from(self.unit.deadline()?.0).ok()
    }

    /// Lets time pass, and ticks whenever something is due.
    fn pass(&mut self, until: u32) {
        while let Some(Tsc(due)) = self.unit.deadline()
            && due <= u64::from(until)
        {
            // It may have been due at the last step, which took no time.
            self.now = self.now.max(u32::try_from(due).unwrap_or(until));
            self.run(|unit, cx| {
                let _ = unit.tick(cx);
            });
        }
        self.now = self.now.max(until);
    }

    fn row(&mut self, layer: Option<Layer>, counter: Option<CounterId>, what: What) {
        self.rows.push(Row {
            at_ms: self.now,
            layer,
            counter,
            what,
        });
    }

    /// Runs something on the unit, and adds rows for decisions and new answers.
    fn run<T>(&mut self, run: impl FnOnce(&mut PcrUnit, &mut Context<'_>) -> T) -> T {
        // A script asks for no random numbers.
        let (mut records, mut entropy) = (Vec::new(), NoEntropy);
        let result = run(
            &mut self.unit,
            &mut Context {
                now: Tsc(self.now.into()),
                entropy: &mut entropy,
                audit: &mut records,
            },
        );
        for record in records {
            let what = What::Decided(record.event);
            self.row(Some(record.layer), record.counter, what);
        }
        for (index, layer) in Policy::LAYERS.into_iter().enumerate() {
            self.read_mailbox(index, layer);
        }
        result
    }

    /// Lets a layer read its notices and its answer.
    fn read_mailbox(&mut self, index: usize, layer: Layer) {
        while let Some(notice) = self.unit.next_notice(layer, Tsc(self.now.into())) {
            if notice.kind == NoticeKind::Asked {
                self.asked[index] = notice.counter;
            }
        }
        let answer = self.unit.answer(layer);
        if answer == self.reported[index] {
            return;
        }
        self.reported[index] = answer;
        self.row(Some(layer), None, What::Answered(answer));
        if let Some(step) = self.asking[index] {
            let outcome = match (self.ends[step], answer.outcome) {
                // A step that gives back several counters makes several requests.
                (
                    End::Answered {
                        outcome: Outcome::Granted(before),
                        ..
                    },
                    Outcome::Granted(now),
                ) => Outcome::Granted(before | now),
                (_, outcome) => outcome,
            };
            let at_ms = self.now;
            self.ends[step] = End::Answered { outcome, at_ms };
        }
    }

    fn step(&mut self, index: usize, step: &Step) {
        let Some(layer) = step.layer else {
            self.ends.push(End::Done);
            return;
        };
        self.ends.push(End::Done);
        let counter = match step.action {
            Action::Reserve {
                wanted: Wanted::This(counter),
                ..
            }
            | Action::Claim(counter)
            | Action::Renew(counter)
            | Action::Lend(counter, _) => Some(counter),
            Action::Release(counter) | Action::Reply { counter, .. } => counter,
            _ => None,
        };
        self.row(Some(layer), counter, What::Does(step.action));
        let done = self.act(index, layer, step.action);
        let end = match done {
            Ok(()) => return,
            Err(end) => end,
        };
        match end {
            End::Faulted(reason) => self.row(Some(layer), counter, What::Faulted(reason)),
            End::NotAsked => self.row(Some(layer), counter, What::NotAsked),
            End::Done | End::Answered { .. } => {}
        }
        self.ends[index] = end;
    }

    fn act(&mut self, index: usize, layer: Layer, action: Action) -> Result<(), End> {
        let cookie = cookie(layer);
        match action {
            Action::Reserve {
                wanted,
                lease_ms,
                event,
            } => {
                let request = Request::Reserve {
                    wanted,
                    cookie,
                    lease_ms,
                    event,
                };
                self.request(index, layer, request)
            }
            Action::Renew(counter) => {
                let request = Request::Reserve {
                    wanted: Wanted::This(counter),
                    cookie,
                    lease_ms: None,
                    event: None,
                };
                self.request(index, layer, request)
            }
            Action::Release(Some(counter)) => {
                self.request(index, layer, Request::Release { counter, cookie })
            }
            Action::Release(None) => {
                let mut held = self.unit.bank().held_by(layer).iter();
                held.try_for_each(|counter| {
                    self.request(index, layer, Request::Release { counter, cookie })
                })
            }
            Action::Withdraw => self.request(index, layer, Request::Withdraw { cookie }),
            Action::Claim(counter) => self.claim(layer, counter),
            Action::Lend(counter, lends) => {
                let control = Control::INITIAL.with_lend(lends).bits();
                let key = register(layer);
                self.write(layer, PcrRegister::Control(counter), control, key)
            }
            Action::Reply { yields, counter } => self.reply(layer, yields, counter),
            Action::EndPhase => self.write(layer, PcrRegister::Phase, abi::PHASE_END, 0),
            Action::Tick => Ok(()),
        }
    }

    fn claim(&mut self, layer: Layer, counter: CounterId) -> Result<(), End> {
        let key = register(layer);
        self.write(layer, PcrRegister::ManagementKey(counter), key, 0)?;
        self.write(layer, PcrRegister::AccessKey(counter), key, key)
    }

    fn reply(&mut self, layer: Layer, yields: bool, counter: Option<CounterId>) -> Result<(), End> {
        let slot = usize::from(layer.code());
        let counter = counter.or(self.asked[slot].take()).ok_or(End::NotAsked)?;
        let reply = Reply { counter, yields };
        self.run(|unit, cx| unit.reply(layer, reply, cx))
            .map(drop_effects)
            .map_err(End::Faulted)
    }

    /// Makes a request of the step `index`.
    fn request(&mut self, index: usize, layer: Layer, request: Request) -> Result<(), End> {
        let slot = usize::from(layer.code());
        let before = self.asking[slot];
        if !matches!(request, Request::Withdraw { .. }) {
            self.asking[slot] = Some(index);
        }
        let done = self.run(|unit, cx| unit.request(layer, request, cx));
        match done {
            Ok(_) => Ok(()),
            Err(reason) => {
                self.asking[slot] = before;
                Err(End::Faulted(reason))
            }
        }
    }

    fn write(
        &mut self,
        layer: Layer,
        register: PcrRegister,
        value: u64,
        presented: u64,
    ) -> Result<(), End> {
        let caller = Caller { layer, presented };
        let before = self.rows.len();
        let done = self.run(|unit, cx| unit.write(register, value, caller, cx));
        let refused = self.rows[before..]
            .iter()
            .rev()
            .find_map(|row| match row.what {
                What::Decided(Event::Refused(reason)) => Some(reason),
                _ => None,
            });
        match done {
            Some(effects) => {
                drop_effects(effects);
                Ok(())
            }
            None => Err(End::Faulted(refused.unwrap_or(Reason::Malformed))),
        }
    }
}

/// Forgets effects: a script has no PMU.
fn drop_effects(_effects: Effects) {}
