//! Replay: the requests of a real run, played again under any scheme and policy.

use std::sync::Arc;

use arbiter::{
    Ask, AskRecord, AskResult, Caller, Context, Cookie, CounterId, GuardLimits, Layer, NoAudit,
    NoEntropy, NoticeKind, Outcome, PcrConfig, PcrRegister, PcrUnit, PerKind, Phase, Policy,
    Presented, Reason, Reply, Request, Scheme, Tsc, Wanted, abi,
};

/// What a layer of a vCPU asked for in a real run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recorded {
    /// Nanoseconds since the run began.
    pub at_ns: u64,
    /// The number of the vCPU.
    pub vcpu: u8,
    /// What the layer asked for, and what came of it.
    pub ask: AskRecord,
}

/// The machine of a real run, and what decides in the replay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReplaySetup {
    /// The number of vCPUs.
    pub vcpus: u8,
    pub counters: PerKind,
    pub policy: Policy,
    pub scheme: Scheme,
    /// The machine started in the firmware's phase.
    pub has_firmware: bool,
    /// The machine had SMM.
    pub smm: bool,
    /// The hypervisor yields what it is asked for, as Umpire does. Else it replies what
    /// it replied in the real run, which fits the scheme and policy of that run only.
    pub hypervisor_yields: bool,
    /// When the run ended.
    pub end_ns: u64,
}

/// What came of a request in the replay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Replayed {
    /// The last result. Where the run ended before the answer it is still pending.
    pub result: AskResult,
    /// When it came.
    pub at_ns: u64,
}

const NS_PER_MS: u64 = 1_000_000;
const LAYERS: usize = Policy::LAYERS.len();

/// Plays recorded requests. They have to be in the order of time, and their vCPUs below
/// the number of the setup. The results are in the order of the requests; an
/// [`Ask::Answer`] has that of the request that it answers.
pub fn replay(setup: &ReplaySetup, requests: &[Recorded]) -> Vec<Replayed> {
    let phase = Arc::new(Phase::new(setup.has_firmware));
    let seats = (0..setup.vcpus).map(|_| Seat::new(setup, phase.clone()));
    let mut seats: Vec<Seat> = seats.collect();
    let mut results: Vec<Replayed> = Vec::with_capacity(requests.len());
    for (index, recorded) in requests.iter().enumerate() {
        let Some(seat) = seats.get_mut(usize::from(recorded.vcpu)) else {
            continue;
        };
        seat.pass(recorded.at_ns, setup, &mut results);
        let result = seat.ask(&recorded.ask, setup, index);
        results.push(Replayed {
            result,
            at_ns: recorded.at_ns,
        });
        seat.note_answers(&mut results);
    }
    for seat in &mut seats {
        seat.pass(setup.end_ns, setup, &mut results);
    }
    results
}

/// One vCPU of a replay.
struct Seat {
    unit: PcrUnit,
    now: u64,
    /// The request of each layer that has no answer yet.
    pending: [Option<usize>; LAYERS],
    /// The last request of each layer, which its next answer is about.
    asked: [Option<usize>; LAYERS],
}

/// The cookie of a layer, and one that nothing has.
fn cookie(presented: Presented) -> u64 {
    match presented {
        Presented::Nothing => abi::DEFAULT_COOKIE,
        Presented::Of(layer) => 1 + u64::from(layer.code()),
        Presented::Wrong => abi::COOKIE_MASK,
    }
}

/// What a layer writes to the key of a counter that it takes or gives back.
fn key_of(layer: Layer, gives_back: bool) -> u64 {
    if gives_back {
        abi::DEFAULT_COOKIE
    } else {
        cookie(Presented::Of(layer))
    }
}

fn own(layer: Layer) -> Cookie {
    Cookie::from_random(cookie(Presented::Of(layer)))
}

impl Seat {
    fn new(setup: &ReplaySetup, phase: Arc<Phase>) -> Self {
        let widths = PerKind {
            programmable: 64,
            fixed: 64,
        };
        let unit = PcrUnit::new(PcrConfig {
            counters: setup.counters,
            widths,
            policy: setup.policy,
            scheme: setup.scheme,
            guard: GuardLimits::with_ticks_per_ms(NS_PER_MS),
            ticks_per_ms: NS_PER_MS,
            phase,
            legacy: None,
            smm: setup.smm,
        });
        Seat {
            unit,
            now: 0,
            pending: [None; LAYERS],
            asked: [None; LAYERS],
        }
    }

    fn run<T>(&mut self, run: impl FnOnce(&mut PcrUnit, &mut Context<'_>) -> T) -> T {
        let cx = &mut Context {
            now: Tsc(self.now),
            entropy: &mut NoEntropy,
            audit: &mut NoAudit,
        };
        run(&mut self.unit, cx)
    }

    /// Lets time pass, with all that is due meanwhile.
    fn pass(&mut self, until: u64, setup: &ReplaySetup, results: &mut [Replayed]) {
        while let Some(Tsc(due)) = self.unit.deadline()
            && due <= until
        {
            self.now = self.now.max(due);
            self.run(|unit, cx| {
                let _ = unit.tick(cx);
            });
            self.answer_for_the_hypervisor(setup);
            self.note_answers(results);
        }
        self.now = self.now.max(until);
    }

    fn ask(&mut self, record: &AskRecord, setup: &ReplaySetup, index: usize) -> AskResult {
        let replies = matches!(record.ask, Ask::Reply(_)) && record.layer == Layer::Hypervisor;
        let result = if replies && setup.hypervisor_yields {
            // It has answered what it was asked in this replay.
            record.result
        } else {
            self.act(record, index)
        };
        self.answer_for_the_hypervisor(setup);
        result
    }

    /// Whether a layer asks for a counter that it holds: a wrong cookie is wrong for that. A
    /// new reservation takes any.
    fn holds(&self, layer: Layer, wanted: Wanted) -> bool {
        match wanted {
            Wanted::This(counter) => self.unit.bank().held_by(layer).contains(counter),
            Wanted::Any(_) | Wanted::Held(_) => false,
        }
    }

    fn withdraw(&mut self, layer: Layer, cookie: Cookie) -> AskResult {
        match self.run(|unit, cx| unit.request(layer, Request::Withdraw { cookie }, cx)) {
            Ok(_) => AskResult::Done,
            Err(reason) => AskResult::Faulted(reason),
        }
    }

    /// Gives a counter back at the mailbox.
    fn release(&mut self, counter: CounterId, record: &AskRecord, index: usize) -> AskResult {
        // The default cookie gives nothing back.
        let cookie = if record.presented == Presented::Nothing {
            Cookie::DEFAULT
        } else {
            Cookie::from_random(cookie(record.presented))
        };
        self.request(record.layer, Request::Release { counter, cookie }, index)
    }

    fn act(&mut self, record: &AskRecord, index: usize) -> AskResult {
        let AskRecord {
            layer,
            ask,
            presented,
            ..
        } = *record;
        let shown = Cookie::from_random(cookie(presented));
        // Under another scheme somebody holds something else than when room was looked for.
        // What was told last is what is known.
        while self.unit.looks_for_room() && !matches!(ask, Ask::Backed(_)) {
            let _ = self.run(|unit, cx| unit.back(unit.backed(), cx));
        }
        match ask {
            Ask::Reserve {
                wanted,
                lease_ms,
                event,
            } => {
                let is_own = !self.holds(layer, wanted) || presented == Presented::Of(layer);
                let cookie = if is_own { own(layer) } else { shown };
                let request = Request::Reserve {
                    wanted,
                    cookie,
                    lease_ms,
                    event,
                };
                self.request(layer, request, index)
            }
            Ask::Release(counter) if layer == Layer::HostTool => {
                let cookie = own(layer);
                let _ = self.run(|unit, cx| unit.give_back(counter, cookie, cx));
                record.result
            }
            Ask::Release(counter) => self.release(counter, record, index),
            Ask::Withdraw if presented == Presented::Wrong => self.withdraw(layer, shown),
            Ask::Withdraw => self.withdraw(layer, own(layer)),
            Ask::Reply(reply) if presented == Presented::Of(layer) => {
                done(self.run(|unit, cx| unit.reply(layer, reply, cx)))
            }
            Ask::Reply(_) => AskResult::Faulted(Reason::Cookie),
            Ask::Key {
                counter,
                gives_back,
            } => {
                let value = key_of(layer, gives_back);
                self.write(PcrRegister::ManagementKey(counter), value, record)
            }
            Ask::Control(counter, control) => {
                self.write(PcrRegister::Control(counter), control.bits(), record)
            }
            Ask::EndPhase => self.write(PcrRegister::Phase, abi::PHASE_END, record),
            Ask::SetAside(counter) => {
                let cookie = own(Layer::Hypervisor);
                done(self.run(|unit, cx| unit.reserve_for_hypervisor(counter, cookie, cx)))
            }
            Ask::Backed(most) => {
                let _ = self.run(|unit, cx| unit.back(most, cx));
                AskResult::Done
            }
            // A trail with acts of the administrator is refused before it gets here.
            Ask::Administered => AskResult::Done,
            Ask::Answer => match self.asked[slot(layer)] {
                Some(_) => AskResult::Answered(self.unit.answer(layer)),
                None => AskResult::Done,
            },
        }
    }

    fn request(&mut self, layer: Layer, request: Request, index: usize) -> AskResult {
        match self.run(|unit, cx| unit.request(layer, request, cx)) {
            Ok((answer, _)) => {
                self.asked[slot(layer)] = Some(index);
                if answer.outcome == Outcome::Pending {
                    self.pending[slot(layer)] = Some(index);
                }
                AskResult::Answered(answer)
            }
            Err(reason) => AskResult::Faulted(reason),
        }
    }

    fn write(&mut self, register: PcrRegister, value: u64, record: &AskRecord) -> AskResult {
        let caller = Caller {
            layer: record.layer,
            presented: cookie(record.presented),
        };
        let mut why = FirstRefusal::default();
        let cx = &mut Context {
            now: Tsc(self.now),
            entropy: &mut NoEntropy,
            audit: &mut why,
        };
        match self.unit.write(register, value, caller, cx) {
            Some(_) => AskResult::Done,
            None => AskResult::Faulted(why.0.unwrap_or(Reason::Malformed)),
        }
    }

    /// Yields what the hypervisor is asked for, as Umpire does.
    fn answer_for_the_hypervisor(&mut self, setup: &ReplaySetup) {
        let now = Tsc(self.now);
        while let Some(notice) = self.unit.next_notice(Layer::Hypervisor, now) {
            if let (true, NoticeKind::Asked, Some(counter)) =
                (setup.hypervisor_yields, notice.kind, notice.counter)
            {
                let yields = true;
                let reply = Reply { counter, yields };
                // A question that was withdrawn needs no answer.
                let _ = self.run(|unit, cx| unit.reply(Layer::Hypervisor, reply, cx));
            }
        }
    }

    /// Gives requests that waited their answers.
    fn note_answers(&mut self, results: &mut [Replayed]) {
        for layer in Policy::LAYERS {
            let answer = self.unit.answer(layer);
            if answer.outcome != Outcome::Pending
                && let Some(index) = self.pending[slot(layer)].take()
                && let Some(result) = results.get_mut(index)
            {
                result.result = AskResult::Answered(answer);
                result.at_ns = self.now;
            }
        }
    }
}

fn slot(layer: Layer) -> usize {
    usize::from(layer.code())
}

fn done<T>(done: Result<T, Reason>) -> AskResult {
    match done {
        Ok(_) => AskResult::Done,
        Err(reason) => AskResult::Faulted(reason),
    }
}

/// The reason of a write's #GP.
#[derive(Debug, Default)]
struct FirstRefusal(Option<Reason>);

impl arbiter::Auditor for FirstRefusal {
    fn record(&mut self, _: &arbiter::Record) {}

    fn asked(&mut self, record: &AskRecord) {
        if let AskResult::Faulted(reason) = record.result {
            self.0 = self.0.or(Some(reason));
        }
    }
}

/// The results of recorded requests as the real run had them: those that waited have
/// their later answers.
pub fn recorded_results(requests: &[Recorded]) -> Vec<Replayed> {
    let mut waiting: Vec<((u8, Layer), usize)> = Vec::new();
    let mut results: Vec<Replayed> = Vec::with_capacity(requests.len());
    for (index, one) in requests.iter().enumerate() {
        let key = (one.vcpu, one.ask.layer);
        results.push(Replayed {
            result: one.ask.result,
            at_ns: one.at_ns,
        });
        let is_pending = matches!(
            one.ask.result,
            AskResult::Answered(answer) if answer.outcome == Outcome::Pending
        );
        if one.ask.ask == Ask::Answer {
            let place = waiting.iter().position(|(waiter, _)| *waiter == key);
            if let Some((_, first)) = place.map(|place| waiting.swap_remove(place)) {
                results[first] = results[index];
            }
        } else if is_pending {
            waiting.push((key, index));
        }
    }
    results
}
