//! The simulation: events in virtual time around the arbiter of each vCPU.
//!
//! Nothing here decides about a counter. Jobs ask by the mailbox, and the answers,
//! notices and audit records of the [`PcrUnit`] move them on.

mod agenda;
mod cores;
mod demands;

use std::sync::Arc;

use arbiter::{
    Caller, Context, Control, Cookie, CounterId, CounterSet, Event, GuardLimits, Layer, MAX_FIXED,
    MAX_PROGRAMMABLE, NoEntropy, NoticeKind, Outcome, PcrConfig, PcrRegister, PcrUnit, PerKind,
    Phase, Policy, Record, Reply, Request, Scheme, Tsc, Wanted, abi,
};

use crate::figures::{Class, Figures, jain};
use crate::job::{Desk, Job, JobId, Jobs, Stage};
use crate::plan::{Demand, Machine, Variant, Workload};
use crate::random::{Micros, Stream};
use agenda::Agenda;
use cores::Cores;
use demands::{Demands, Draw};

/// Layers that can hold counters.
const LAYERS: usize = Policy::LAYERS.len();

const MICROS_PER_MS: u64 = 1000;

/// Events from one word about the progress to the next.
const TELL_EVERY: u64 = 1 << 16;

/// What happens at a time.
#[derive(Clone, Copy, Debug)]
enum Happening {
    /// A class of a vCPU makes a demand. For the tools the number is that of a core.
    Demand(u32, Class),
    /// A job that was refused asks again.
    Retry(JobId),
    /// A job that has waited for long enough gives up.
    GiveUp(JobId),
    /// A job needs its counters no longer.
    End(JobId),
    /// The arbiter of a vCPU has a deadline.
    Tick(u32),
    /// A layer of a vCPU answers a question.
    Reply(u32, Layer, CounterId),
    /// A job renews its leases.
    Renew(JobId),
    /// A vCPU moves to another core.
    Migrate(u32),
}

/// One vCPU.
#[derive(Debug)]
struct Vcpu {
    unit: PcrUnit,
    desks: [Desk; LAYERS],
    /// The job that has each counter, by position.
    users: [Option<JobId>; 64],
    /// When the next tick is planned. `Micros::MAX` means that none is.
    tick: Micros,
    /// The jobs of the tools of its core.
    tools: Vec<JobId>,
    /// What its jobs held and wished for.
    work: f64,
    wish: f64,
}

/// Runs a workload under one scheme and policy.
///
/// The policy has to fit the machine ([`Policy::fits`]), and machine and workload have
/// to pass their checks.
pub fn simulate(machine: &Machine, workload: &Workload, variant: &Variant, seed: u64) -> Figures {
    simulate_watched(machine, workload, variant, seed, &|_| ())
}

/// [`simulate`], while `passed` hears now and then how much virtual time has passed since
/// it last heard.
pub(crate) fn simulate_watched(
    machine: &Machine,
    workload: &Workload,
    variant: &Variant,
    seed: u64,
    passed: &dyn Fn(Micros),
) -> Figures {
    let mut run = Run::new(machine, workload, variant, seed);
    run.boot();
    let mut told = 0;
    while let Some((at, what)) = run.agenda.next() {
        run.now = at;
        run.figures.events += 1;
        run.happen(what);
        if run.figures.events.is_multiple_of(TELL_EVERY) {
            passed(at - told);
            told = at;
        }
    }
    run.now = run.end;
    passed(run.end - told);
    run.finish()
}

/// A run that goes on.
#[derive(Debug)]
struct Run<'a> {
    machine: &'a Machine,
    workload: &'a Workload,
    scheme: Scheme,
    policy: Policy,
    now: Micros,
    end: Micros,
    agenda: Agenda,
    vcpus: Vec<Vcpu>,
    cores: Cores,
    jobs: Jobs,
    demands: Demands<'a>,
    moves: Stream,
    /// What claimants do about the arbiter's answers.
    conduct: Stream,
    figures: Figures,
    /// Kept for its room.
    records: Vec<Record>,
}

/// The cookie of a layer. A simulation has no secrets.
fn cookie(layer: Layer) -> (Cookie, u64) {
    let register = 1 + u64::from(layer.code());
    (Cookie::from_random(register), register)
}

fn slot(layer: Layer) -> usize {
    usize::from(layer.code())
}

/// The place of a counter among the users.
fn place(counter: CounterId) -> usize {
    counter.position().map_or(0, usize::from)
}

impl<'a> Run<'a> {
    fn new(machine: &'a Machine, workload: &'a Workload, variant: &Variant, seed: u64) -> Self {
        let end = workload.length();
        let capacity = [machine.counters, machine.fixed]
            .map(|counters| f64::from(machine.cores) * f64::from(counters) * end as f64);
        let mut run = Run {
            machine,
            workload,
            scheme: variant.scheme,
            policy: variant.policy,
            now: 0,
            end,
            agenda: Agenda::new(end),
            vcpus: Vec::new(),
            cores: Cores::new(machine.cores, machine.vcpus),
            jobs: Jobs::default(),
            demands: Demands::new(machine, workload, seed),
            moves: Stream::new(seed, 100, 0),
            conduct: Stream::new(seed, 101, 0),
            figures: Figures::new(capacity),
            records: Vec::new(),
        };
        run.vcpus = (0..machine.vcpus).map(|_| run.vcpu()).collect();
        run
    }

    fn vcpu(&self) -> Vcpu {
        let counters = PerKind {
            programmable: self.machine.counters,
            fixed: self.machine.fixed,
        };
        let Workload {
            boot,
            boot_fixed,
            smm,
            ..
        } = *self.workload;
        let has_firmware = boot > 0 || boot_fixed > 0 || smm;
        let unit = PcrUnit::new(PcrConfig {
            counters,
            widths: PerKind {
                programmable: 48,
                fixed: 48,
            },
            policy: self.policy,
            scheme: self.scheme,
            guard: GuardLimits::with_ticks_per_ms(MICROS_PER_MS),
            ticks_per_ms: MICROS_PER_MS,
            phase: Arc::new(Phase::new(has_firmware)),
            legacy: None,
            smm,
        });
        Vcpu {
            unit,
            desks: Default::default(),
            users: [None; 64],
            tick: Micros::MAX,
            tools: Vec::new(),
            work: 0.0,
            wish: 0.0,
        }
    }

    fn plan(&mut self, after: Micros, what: Happening) {
        self.agenda.plan(self.now.saturating_add(after), what);
    }

    fn happen(&mut self, what: Happening) {
        match what {
            Happening::Demand(number, class) => self.demand(number, class),
            Happening::Retry(id) => {
                let job = self.jobs.get(id);
                if let Some(job) = job.filter(|job| job.stage == Stage::Resting) {
                    job.stage = Stage::Queued;
                    let (vcpu, layer) = (job.vcpu, job.class.layer());
                    self.desk(vcpu, layer).queue.push_back(id);
                    self.serve(vcpu);
                }
            }
            Happening::GiveUp(id) => {
                if self.jobs.get(id).is_some_and(|job| !job.granted) {
                    self.end_job(id, true);
                }
            }
            Happening::End(id) => {
                // A tool that got nothing by its end was denied.
                let denied = self.jobs.get(id).is_some_and(|job| !job.granted);
                self.end_job(id, denied);
            }
            Happening::Tick(vcpu) => {
                self.vcpus[vcpu as usize].tick = Micros::MAX;
                self.arbitrate(vcpu, |unit, cx| {
                    let _ = unit.tick(cx);
                });
                self.serve(vcpu);
            }
            Happening::Reply(vcpu, layer, counter) => self.reply(vcpu, layer, counter),
            Happening::Renew(id) => self.renew(id),
            Happening::Migrate(vcpu) => self.migrate(vcpu),
        }
    }

    /// What a class wants.
    fn wants(&self, class: Class) -> &'a Demand {
        self.workload.of(class)
    }

    fn desk(&mut self, vcpu: u32, layer: Layer) -> &mut Desk {
        &mut self.vcpus[vcpu as usize].desks[slot(layer)]
    }

    /// Runs something on the arbiter of a vCPU, and has everyone hear of what it did.
    fn arbitrate<T>(
        &mut self,
        vcpu: u32,
        run: impl FnOnce(&mut PcrUnit, &mut Context<'_>) -> T,
    ) -> T {
        let mut records = std::mem::take(&mut self.records);
        records.clear();
        let done = run(
            &mut self.vcpus[vcpu as usize].unit,
            &mut Context {
                now: Tsc(self.now),
                entropy: &mut NoEntropy,
                audit: &mut records,
            },
        );
        self.hear(vcpu, &records);
        self.records = records;
        let unit = &self.vcpus[vcpu as usize];
        if let Some(Tsc(deadline)) = unit.unit.deadline()
            && deadline < unit.tick
        {
            self.vcpus[vcpu as usize].tick = deadline;
            self.plan(deadline.saturating_sub(self.now), Happening::Tick(vcpu));
        }
        done
    }

    /// Has the queues of a vCPU make their requests, until each waits for an answer or
    /// is empty.
    fn serve(&mut self, vcpu: u32) {
        loop {
            let mut went_on = false;
            for layer in Policy::LAYERS {
                while self.desk(vcpu, layer).asking.is_none() {
                    self.give_back_unused(vcpu, layer);
                    let Some(id) = self.desk(vcpu, layer).queue.pop_front() else {
                        break;
                    };
                    let Some(job) = self.jobs.get(id) else {
                        continue;
                    };
                    went_on = true;
                    let wanted = match job.wanted {
                        Wanted::This(counter) => Wanted::This(counter),
                        Wanted::Any(_) | Wanted::Held(_) => Wanted::Any(job.lacks()),
                    };
                    if self.is_used_within(vcpu, layer, wanted) {
                        self.rest(id);
                        continue;
                    }
                    if let Some(job) = self.jobs.get(id) {
                        job.stage = Stage::Asking;
                    }
                    self.desk(vcpu, layer).asking = Some(id);
                    self.figures.requests += 1;
                    let request = Request::Reserve {
                        wanted,
                        cookie: cookie(layer).0,
                        lease_ms: None,
                        event: None,
                    };
                    let asked = self.arbitrate(vcpu, |unit, cx| unit.request(layer, request, cx));
                    if asked.is_err() {
                        // The arbiter refuses to look at it: no answer will come.
                        self.desk(vcpu, layer).asking = None;
                        self.rest(id);
                    }
                }
            }
            if !went_on {
                debug_assert!(self.books_agree(vcpu));
                return;
            }
        }
    }

    /// Whether a layer has given the counter to another of its jobs. The arbiter would
    /// take the request for a renewal.
    fn is_used_within(&mut self, vcpu: u32, layer: Layer, wanted: Wanted) -> bool {
        let Wanted::This(counter) = wanted else {
            return false;
        };
        let user = self.vcpus[vcpu as usize].users[place(counter)];
        let user = user.and_then(|id| self.jobs.get(id));
        user.is_some_and(|job| job.class.layer() == layer)
    }

    /// Whether a counter is still this job's. Whatever its arbiter is asked to do for one
    /// counter, it ends leases whose time is over first: the next counter may be another's.
    fn is_used_by(&self, id: JobId, vcpu: u32, counter: CounterId) -> bool {
        self.vcpus[vcpu as usize].users[place(counter)] == Some(id)
    }

    /// Has a job that was refused wait before it asks again.
    fn rest(&mut self, id: JobId) {
        let retry = self.conduct.exponential(self.workload.retry_ms);
        if let Some(job) = self.jobs.get(id) {
            job.stage = Stage::Resting;
            self.plan(retry, Happening::Retry(id));
        }
    }

    /// Boots every vCPU, and plans the first demands and migrations.
    fn boot(&mut self) {
        for number in 0..self.machine.vcpus {
            self.run_firmware(number);
        }
        for class in Class::ALL {
            for number in 0..self.demands.numbers(class) {
                self.plan_demand(number, class);
            }
        }
        for number in 0..self.machine.vcpus {
            if let Some(gap) = self.moves.gap(self.machine.migrations) {
                self.plan(gap, Happening::Migrate(number));
            }
        }
    }

    fn plan_demand(&mut self, number: u32, class: Class) {
        if let Some(gap) = self.demands.gap(number, class) {
            self.plan(gap, Happening::Demand(number, class));
        }
    }

    /// A class makes a demand.
    fn demand(&mut self, number: u32, class: Class) {
        let Draw {
            hold,
            patience,
            wanted,
        } = self.demands.draw(number, class);
        self.plan_demand(number, class);
        if class == Class::Tools {
            self.start_tool(number, hold, wanted);
            return;
        }
        let id = self.start_job(number, class, hold, wanted);
        self.plan(patience, Happening::GiveUp(id));
        self.serve(number);
    }

    /// Makes a job and puts it into the queue of its layer.
    fn start_job(&mut self, number: u32, class: Class, hold: Micros, wanted: Wanted) -> JobId {
        let since = self.cores.ran(number, self.now);
        let job = Job {
            class,
            vcpu: number,
            stage: Stage::Queued,
            wanted,
            held: arbiter::CounterSet::EMPTY,
            born: self.now,
            hold,
            granted: false,
            misses: class == Class::Tools,
            since,
        };
        self.figures.tally_mut(class, job.kind()).demands += 1;
        let id = self.jobs.add(job);
        self.desk(number, class.layer()).queue.push_back(id);
        id
    }

    /// The firmware's phase: it asks for its counters one by one, keeps what it gets,
    /// and hands over.
    fn run_firmware(&mut self, number: u32) {
        let layer = Layer::Firmware;
        let beyond_the_end = self.end + 1;
        let programmable = (0..self.workload.boot).map(|_| Wanted::Any(1));
        let fixed = (0..self.workload.boot_fixed).map(|n| Wanted::This(CounterId::Fixed(n)));
        for wanted in programmable.chain(fixed) {
            let id = self.start_job(number, Class::Firmware, beyond_the_end, wanted);
            self.serve(number);
            // Firmware without SMM cannot wait.
            if self.jobs.get(id).is_some_and(|job| !job.granted) {
                self.end_job(id, true);
            }
        }
        if self.vcpus[number as usize].unit.phase().has_firmware() {
            let end = (PcrRegister::Phase, abi::PHASE_END, Caller::legacy(layer));
            let _ = self.arbitrate(number, |unit, cx| unit.write(end.0, end.1, end.2, cx));
        }
    }

    /// Renews the leases of a job, twice in the time of a lease.
    fn renew(&mut self, id: JobId) {
        let Some(job) = self.jobs.get(id).copied() else {
            return;
        };
        let (vcpu, layer) = (job.vcpu, job.class.layer());
        let (cookie, register) = cookie(layer);
        let mut renewed = true;
        for counter in job.held.iter() {
            if !self.is_used_by(id, vcpu, counter) {
                continue;
            }
            if self.desk(vcpu, layer).asking.is_none() {
                let request = Request::Reserve {
                    wanted: Wanted::This(counter),
                    cookie,
                    lease_ms: None,
                    event: None,
                };
                let _ = self.arbitrate(vcpu, |unit, cx| unit.request(layer, request, cx));
            } else {
                // The mailbox is taken. Under a single master there is no key.
                let key = PcrRegister::ManagementKey(counter);
                let caller = Caller {
                    layer,
                    presented: register,
                };
                let done = self.arbitrate(vcpu, |unit, cx| unit.write(key, register, caller, cx));
                renewed &= done.is_some();
            }
        }
        let share = self.policy.share(layer).and_then(|share| share.lease_ms);
        if let Some(lease_ms) = share {
            let lease = u64::from(lease_ms) * MICROS_PER_MS;
            self.plan(
                if renewed { lease / 2 } else { lease / 8 }.max(1),
                Happening::Renew(id),
            );
        }
        self.serve(vcpu);
    }

    /// Has everyone hear of what the arbiter of a vCPU did. Each answer, and each
    /// question, comes with a record of the layer that gets it.
    fn hear(&mut self, vcpu: u32, records: &[Record]) {
        let mut concerned = 0;
        for record in records {
            concerned |= 1_u64 << record.layer.code();
            if let (Event::Revoked(_) | Event::Yielded { .. }, Some(counter)) =
                (record.event, record.counter)
            {
                self.lose(vcpu, record.layer, counter);
            }
        }
        for layer in Policy::LAYERS {
            if concerned >> layer.code() & 1 == 0 {
                continue;
            }
            while let Some(notice) = {
                let now = Tsc(self.now);
                self.vcpus[vcpu as usize].unit.next_notice(layer, now)
            } {
                if let (NoticeKind::Asked, Some(counter)) = (notice.kind, notice.counter) {
                    self.plan_reply(vcpu, layer, counter);
                }
            }
            let outcome = self.vcpus[vcpu as usize].unit.answer(layer).outcome;
            if outcome != Outcome::Pending
                && let Some(id) = self.desk(vcpu, layer).asking
            {
                self.desk(vcpu, layer).asking = None;
                match outcome {
                    Outcome::Granted(counters) => self.granted(id, vcpu, counters),
                    _ => self.rest(id),
                }
            }
        }
    }

    fn granted(&mut self, id: JobId, vcpu: u32, counters: CounterSet) {
        self.account(id);
        let now = self.now;
        let Some(job) = self.jobs.get(id) else { return };
        job.held = job.held | counters;
        job.stage = Stage::Counting;
        let (class, kind) = (job.class, job.kind());
        let (first, hold, waited) = (!job.granted, job.hold, now - job.born);
        job.granted = true;
        job.misses = true;
        let lacks = job.lacks();
        for counter in counters.iter() {
            self.vcpus[vcpu as usize].users[place(counter)] = Some(id);
        }
        let layer = class.layer();
        if lacks > 0 {
            // It lost another counter while it asked for the first.
            self.queue(id);
        }
        if first {
            self.figures.tally_mut(class, kind).grant(waited);
            if class != Class::Tools {
                self.plan(hold, Happening::End(id));
            }
            let lives = class != Class::Firmware || self.workload.smm;
            let lease = self.policy.share(layer).and_then(|share| share.lease_ms);
            if let Some(lease_ms) = lease.filter(|_| lives) {
                let half = u64::from(lease_ms) * MICROS_PER_MS / 2;
                self.plan(half.max(1), Happening::Renew(id));
            }
        }
        let lends = self.wants(class).lends;
        if lends > 0.0 && self.conduct.chance(lends) {
            let caller = Caller {
                layer,
                presented: cookie(layer).1,
            };
            let control = Control::INITIAL.with_lend(true).bits();
            for counter in counters.iter() {
                if !self.is_used_by(id, vcpu, counter) {
                    continue;
                }
                let register = PcrRegister::Control(counter);
                let _ = self.arbitrate(vcpu, |unit, cx| unit.write(register, control, caller, cx));
            }
        }
    }

    fn queue(&mut self, id: JobId) {
        if let Some(job) = self.jobs.get(id) {
            job.stage = Stage::Queued;
            let (vcpu, layer) = (job.vcpu, job.class.layer());
            self.desk(vcpu, layer).queue.push_back(id);
        }
    }

    /// A holder has lost a counter: by revocation, by the end of its lease, or because
    /// it yielded.
    fn lose(&mut self, vcpu: u32, layer: Layer, counter: CounterId) {
        let user = self.vcpus[vcpu as usize].users[place(counter)].take();
        let Some(id) = user else {
            // Nobody used it any more.
            self.desk(vcpu, layer).unused.retain(|one| *one != counter);
            return;
        };
        self.account(id);
        let dead = layer == Layer::Firmware && !self.workload.smm;
        let Some(job) = self.jobs.get(id) else { return };
        job.held.remove(counter);
        let (class, kind, stage) = (job.class, job.kind(), job.stage);
        // If it is dead nobody is there to miss it.
        job.misses &= !dead;
        self.figures.tally_mut(class, kind).lost += 1;
        if !dead && stage == Stage::Counting {
            self.queue(id);
        }
    }

    fn plan_reply(&mut self, vcpu: u32, layer: Layer, counter: CounterId) {
        let mean = self.holder(vcpu, layer, counter);
        let mean = self.wants(mean).answer_ms;
        let delay = self.conduct.exponential(mean);
        self.plan(delay, Happening::Reply(vcpu, layer, counter));
    }

    /// The class that uses a counter of a layer. A counter that nobody uses any more
    /// counts as the layer's own.
    fn holder(&mut self, vcpu: u32, layer: Layer, counter: CounterId) -> Class {
        let user = self.vcpus[vcpu as usize].users[place(counter)];
        let class = user.and_then(|id| self.jobs.get(id)).map(|job| job.class);
        class.unwrap_or(match layer {
            Layer::Firmware => Class::Firmware,
            Layer::Hypervisor | Layer::HostTool => Class::Hypervisor,
            Layer::GuestKernel | Layer::GuestUser => Class::Kernel,
        })
    }

    fn reply(&mut self, vcpu: u32, layer: Layer, counter: CounterId) {
        let class = self.holder(vcpu, layer, counter);
        let unused = self.vcpus[vcpu as usize].desks[slot(layer)]
            .unused
            .contains(&counter);
        let yields = self.wants(class).yields;
        let yields = unused || self.conduct.chance(yields);
        let reply = Reply { counter, yields };
        // The question may no longer stand.
        let _ = self.arbitrate(vcpu, |unit, cx| unit.reply(layer, reply, cx));
        self.serve(vcpu);
    }

    /// Moves a vCPU to the emptier of two other cores. The counters of its guest go
    /// with it. Those of a core's tools stay behind.
    fn migrate(&mut self, number: u32) {
        let cores = self.machine.cores;
        let gap = self.moves.gap(self.machine.migrations);
        let (one, other) = (self.moves.below(cores), self.moves.below(cores));
        if let Some(gap) = gap {
            self.plan(gap, Happening::Migrate(number));
        }
        let Some(to) = self.cores.elsewhere(number, one, other) else {
            return;
        };
        for id in std::mem::take(&mut self.vcpus[number as usize].tools) {
            self.end_job(id, false);
        }
        for (until, wanted) in self.cores.migrate(number, to, self.now) {
            self.join_tool(number, until, wanted);
        }
        self.serve(number);
    }

    /// A tool begins to look at a core.
    fn start_tool(&mut self, core: u32, hold: Micros, wanted: Wanted) {
        let until = self.now.saturating_add(hold);
        for vcpu in self.cores.look_at(core, self.now, (until, wanted)) {
            self.join_tool(vcpu, until, wanted);
            self.serve(vcpu);
        }
    }

    /// A tool wants its counters on one vCPU.
    fn join_tool(&mut self, vcpu: u32, until: Micros, wanted: Wanted) {
        let hold = until.saturating_sub(self.now);
        let id = self.start_job(vcpu, Class::Tools, hold, wanted);
        self.plan(hold, Happening::End(id));
        let list = &mut self.vcpus[vcpu as usize].tools;
        list.push(id);
        if list.len() > 8 {
            let jobs = &mut self.jobs;
            list.retain(|id| jobs.get(*id).is_some());
        }
    }

    /// Ends a job: it gives back what it holds, and withdraws what it asks for.
    fn end_job(&mut self, id: JobId, denied: bool) {
        self.account(id);
        let Some(job) = self.jobs.get(id).copied() else {
            return;
        };
        let (vcpu, layer) = (job.vcpu, job.class.layer());
        if denied {
            let tally = self.figures.tally_mut(job.class, job.kind());
            tally.denied += 1;
            if !job.misses {
                let load = self.cores.load(vcpu);
                let wish = f64::from(job.wanted.count()) * job.hold as f64 / load;
                tally.wish += wish;
                self.vcpus[vcpu as usize].wish += wish;
            }
        }
        self.jobs.end(id);
        if self.desk(vcpu, layer).asking == Some(id) {
            self.desk(vcpu, layer).asking = None;
            let cookie = cookie(layer).0;
            let withdrawal = Request::Withdraw { cookie };
            let _ = self.arbitrate(vcpu, |unit, cx| unit.request(layer, withdrawal, cx));
        }
        for counter in job.held.iter() {
            if self.is_used_by(id, vcpu, counter) {
                self.give_back(vcpu, layer, counter);
            }
        }
        self.serve(vcpu);
    }

    /// Gives a counter back: by the mailbox, or by its key while a request of the layer
    /// is pending. Only the master has keys under a single one, so there it waits.
    fn give_back(&mut self, vcpu: u32, layer: Layer, counter: CounterId) {
        self.vcpus[vcpu as usize].users[place(counter)] = None;
        let (cookie, register) = cookie(layer);
        if self.desk(vcpu, layer).asking.is_none() {
            let release = Request::Release { counter, cookie };
            let _ = self.arbitrate(vcpu, |unit, cx| unit.request(layer, release, cx));
        } else if self.scheme == Scheme::SingleMaster {
            self.desk(vcpu, layer).unused.push(counter);
        } else {
            let (key, caller) = (
                PcrRegister::ManagementKey(counter),
                Caller {
                    layer,
                    presented: register,
                },
            );
            let _ = self.arbitrate(vcpu, |unit, cx| {
                unit.write(key, abi::DEFAULT_COOKIE, caller, cx)
            });
        }
    }

    fn give_back_unused(&mut self, vcpu: u32, layer: Layer) {
        while let Some(counter) = self.desk(vcpu, layer).unused.pop() {
            let bank = self.vcpus[vcpu as usize].unit.bank();
            // It may have been revoked meanwhile.
            let still = bank.held_by(layer).contains(counter);
            if still {
                self.give_back(vcpu, layer, counter);
            }
        }
    }

    /// Settles the work of a job up to now.
    fn account(&mut self, id: JobId) {
        let Some(job) = self.jobs.get(id) else { return };
        let ran = self.cores.ran(job.vcpu, self.now);
        let vcpu = &mut self.vcpus[job.vcpu as usize];
        let time = ran - job.since;
        job.since = ran;
        let held = f64::from(job.held.len()) * time;
        let lacks = f64::from(job.lacks()) * time;
        let tally = self.figures.tally_mut(job.class, job.kind());
        tally.work += held;
        tally.wish += held;
        vcpu.work += held;
        vcpu.wish += held;
        if job.misses {
            tally.blind += lacks;
            tally.wish += lacks;
            vcpu.wish += lacks;
        }
    }

    /// Whether each layer holds what its jobs hold, what they gave back too early, and
    /// what its request gathers; each counter is used by the job that holds it; and
    /// whoever waits for an answer has none yet.
    fn books_agree(&mut self, number: u32) -> bool {
        let vcpu = &self.vcpus[number as usize];
        let mut of_jobs = [CounterSet::EMPTY; LAYERS];
        for counter in CounterSet::first(MAX_PROGRAMMABLE, MAX_FIXED).iter() {
            let user = vcpu.users[place(counter)];
            if let Some(job) = user.and_then(|id| self.jobs.get(id)) {
                if !job.held.contains(counter) || job.vcpu != number {
                    return false;
                }
                of_jobs[slot(job.class.layer())].insert(counter);
            } else if user.is_some() {
                return false;
            }
        }
        Policy::LAYERS.iter().all(|layer| {
            let desk = &vcpu.desks[slot(*layer)];
            let unused: CounterSet = desk.unused.iter().copied().collect();
            let known = of_jobs[slot(*layer)] | unused;
            let held = vcpu.unit.bank().held_by(*layer);
            let pending = vcpu.unit.answer(*layer).outcome == Outcome::Pending;
            match desk.asking {
                None => known == held,
                Some(_) => pending && known & held == known,
            }
        })
    }

    fn finish(mut self) -> Figures {
        for id in self.jobs.alive() {
            self.account(id);
        }
        let shares = self.vcpus.iter().filter(|vcpu| vcpu.wish > 0.0);
        self.figures.fair_to_vcpus = jain(shares.map(|vcpu| vcpu.work / vcpu.wish));
        self.figures
    }
}
