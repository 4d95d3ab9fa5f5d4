//! The simulation: events in virtual time around the arbiter of each vCPU.
//!
//! Nothing here decides about a counter. Jobs ask by the mailbox, and the answers,
//! notices and audit records of the [`PcrUnit`] move them on.

mod agenda;
mod answers;
mod cores;
mod demands;
mod endings;

use std::sync::Arc;

use arbiter::{
    Context, Cookie, CounterId, GuardLimits, Layer, NoEntropy, PcrConfig, PcrUnit, PerKind, Phase,
    Policy, Record, Request, Scheme, Tsc, Wanted,
};

use crate::figures::{Class, Figures, jain};
use crate::job::{Desk, JobId, Jobs, Stage};
use crate::plan::{Demand, Machine, Variant, Workload};
use crate::random::{Micros, Stream};
use agenda::Agenda;
use cores::Core;

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
    core: u32,
    /// Its place in the list of its core.
    slot: usize,
    /// Its running time before it came to its core, less the core's clock then.
    ran: f64,
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
    seed: u64,
    now: Micros,
    end: Micros,
    agenda: Agenda,
    vcpus: Vec<Vcpu>,
    cores: Vec<Core>,
    jobs: Jobs,
    /// One stream for each class and vCPU, or core: demands do not depend on answers.
    demands: Vec<Stream>,
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
            seed,
            now: 0,
            end,
            agenda: Agenda::new(end),
            vcpus: Vec::new(),
            cores: (0..machine.cores).map(|_| Core::default()).collect(),
            jobs: Jobs::default(),
            demands: Vec::new(),
            moves: Stream::new(seed, 100, 0),
            conduct: Stream::new(seed, 101, 0),
            figures: Figures::new(capacity),
            records: Vec::new(),
        };
        run.vcpus = (0..machine.vcpus).map(|number| run.vcpu(number)).collect();
        run
    }

    fn vcpu(&mut self, number: u32) -> Vcpu {
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
        let core = number % self.machine.cores;
        let list = &mut self.cores[core as usize].vcpus;
        list.push(number);
        Vcpu {
            unit,
            core,
            slot: list.len() - 1,
            ran: 0.0,
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

    /// Has a job that was refused wait before it asks again.
    fn rest(&mut self, id: JobId) {
        let retry = self.conduct.exponential(self.workload.retry_ms);
        if let Some(job) = self.jobs.get(id) {
            job.stage = Stage::Resting;
            self.plan(retry, Happening::Retry(id));
        }
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
