//! One core: a thread that does what its run queue says.

use std::sync::Arc;
use std::time::Instant;

use kvm_pmu::now;
use pmu_virt::{CorePmu, Ticks, Tsc, VcpuPmu};
use vmm_control::{JobQueue, close_core};

use super::exchange::{CoreExchange, Others};
use super::pace::Pace;
use super::queue::{Action, RunQueue};
use super::report::CoreReport;
use super::residents::Residents;
use crate::control::VcpuThread;
use crate::cores::{CorePlan, CpuList};
use crate::kvm::VcpuId;
use crate::sys::{SignalMask, hold_pending_signal, pin_this_thread};
use crate::vcpu::{
    RunOutcome, Runnability, ThreadContext, Timeslice, Vcpu, VcpuControl, VcpuEnd, VcpuFailure,
};

/// A vCPU that runs no more.
#[derive(Debug)]
pub struct CoreEnd {
    /// It.
    pub vcpu: Vcpu,
    pub end: Result<VcpuEnd, VcpuFailure>,
    /// The counters of the core that it had to itself, on which it still is.
    pub own_core: Option<Box<CorePmu>>,
}

/// A core, on the thread that made it.
#[derive(Debug)]
pub struct CoreThread {
    index: usize,
    exchange: Arc<CoreExchange>,
    others: Arc<Others>,
    control: Arc<VcpuControl>,
    /// This thread, with the core's counters.
    thread: ThreadContext,
    mask: SignalMask,
    queue: RunQueue,
    residents: Residents,
    pace: Pace,
    tsc_khz: u32,
    /// Other cores are not asked before, as that interrupts them.
    ask_at: Tsc,
    attempt: usize,
    report: CoreReport,
    /// What the control socket wants done for the core.
    jobs: Option<JobQueue>,
}

impl CoreThread {
    /// The calling thread becomes core `index` of `exchange`. `control` is that of
    /// its vCPUs; `pmu` are the counters that they share, `None` where they have
    /// no PMU.
    ///
    /// # Errors
    /// [`VcpuFailure::Pmu`] or [`VcpuFailure::Signal`]: the process has no timer
    /// or no queued signal left.
    pub fn new(
        index: usize,
        plan: &CorePlan,
        tsc_khz: u32,
        exchange: Arc<CoreExchange>,
        control: Arc<VcpuControl>,
        pmu: Option<Box<CorePmu>>,
    ) -> Result<Self, VcpuFailure> {
        let thread = ThreadContext::new(tsc_khz)?
            .of_core(index)
            .with_counters(pmu);
        let tsc_khz = tsc_khz.max(1);
        let pace = Pace::new(plan.slice, tsc_khz);
        exchange.bind_thread(index, thread.target());
        let others = Others {
            exchange: exchange.clone(),
            core: index,
        };
        Ok(Self {
            index,
            others: Arc::new(others),
            exchange,
            control,
            thread,
            mask: hold_pending_signal().map_err(VcpuFailure::Signal)?,
            queue: RunQueue::new(pace),
            residents: Residents::new(index),
            pace,
            tsc_khz,
            ask_at: Tsc(0),
            attempt: index,
            report: CoreReport::default(),
            jobs: None,
        })
    }

    /// Serves the jobs for the core that `jobs` brings, on the calling thread.
    #[must_use]
    pub fn with_jobs(mut self, jobs: Option<JobQueue>) -> Self {
        if let Some(jobs) = &jobs {
            jobs.bind_thread(Box::new(VcpuThread(self.thread.target())));
            jobs.set_exchange(self.exchange.clone());
        }
        self.jobs = jobs;
        self
    }

    /// Runs `vcpus`, and those that come later, until the machine is stopped.
    /// `on_end` gets each vCPU as soon as it has ended; at last all others.
    pub fn run(mut self, vcpus: Vec<Vcpu>, mut on_end: impl FnMut(CoreEnd)) -> CoreReport {
        let began = Instant::now();
        for vcpu in vcpus {
            self.admit(vcpu, Ticks(0)).map(&mut on_end);
        }
        while !self.control.stopping() {
            for vcpu in self.exchange.collect(self.index) {
                self.arrive(vcpu).map(&mut on_end);
            }
            self.do_jobs(&mut on_end);
            self.make_moves();
            self.meet_others();
            let due = self.tick_held();
            self.act(due).map(&mut on_end);
        }
        for id in self.residents.which(|_| true) {
            self.end(id, Ok(VcpuEnd::Stopped)).map(&mut on_end);
        }
        if let Some(jobs) = self.jobs.take() {
            let values = self.residents.quantities();
            close_core(jobs, self.thread.counters_mut(), &values);
        }
        if let Some(pmu) = self.thread.counters() {
            self.report.counters = pmu.stats();
        }
        self.report.alive = began.elapsed();
        self.report
    }

    /// Lets take place what is due of vCPUs that may not run; when the next is due.
    fn tick_held(&mut self) -> Option<Tsc> {
        let thread = &mut self.thread;
        let vcpus = self.residents.iter_mut();
        vcpus.filter_map(|vcpu| vcpu.tick_held(thread, now())).min()
    }

    /// One step of the queue's, by `due` at the latest; a vCPU that ended in it.
    fn act(&mut self, due: Option<Tsc>) -> Option<CoreEnd> {
        let by = |until: Option<Tsc>| until.into_iter().chain(due).min();
        match self.queue.next(now()) {
            Action::Run { vcpu, until } => self.enter(vcpu, by(until)),
            Action::Probe(vcpu) => self.probe(vcpu),
            Action::Wait { until } => {
                let until = by(until);
                let rest = until.map(|until| (until - now()).duration(self.tsc_khz));
                let began = Instant::now();
                self.exchange.wait(self.index, rest);
                let core = self.thread.counters_mut();
                self.residents.pass_idle(core, began.elapsed());
                None
            }
        }
    }

    fn enter(&mut self, id: VcpuId, until: Option<Tsc>) -> Option<CoreEnd> {
        self.switch_to(id);
        let timeslice = Timeslice {
            until,
            attention: self.exchange.attention(self.index),
        };
        let vcpu = self.residents.get_mut(id)?;
        if let Some(pmu) = vcpu.pmu_mut() {
            pmu.claims_mut().set_other_cores(self.others.clone());
        }
        let outcome = vcpu.run_for(&mut self.thread, &timeslice);
        match outcome {
            Ok(RunOutcome::Paused(runnability)) => {
                self.report.locked_out +=
                    u64::from(matches!(runnability, Runnability::LockedOut { .. }));
                if self.queue.left(now(), runnability) {
                    self.report.halts += 1;
                    return self.expect_wake(id);
                }
                None
            }
            Ok(RunOutcome::Ended(end)) => self.end(id, Ok(end)),
            Err(failure) => self.end(id, Err(failure)),
        }
    }

    /// A timer that has expired is made an interrupt by one probe and seen by
    /// the next, so a vCPU whose timer is due is asked twice.
    fn probe(&mut self, id: VcpuId) -> Option<CoreEnd> {
        let began = Instant::now();
        let due = self.queue.is_due(now(), id);
        let vcpu = self.residents.get_mut(id)?;
        let mut outcome = vcpu.probe(&mut self.thread, self.mask);
        if due && matches!(outcome, Ok(RunOutcome::Paused(Runnability::Idle))) {
            outcome = vcpu.probe(&mut self.thread, self.mask);
        }
        self.report.probes += 1;
        self.report.probing += began.elapsed();
        match outcome {
            Ok(RunOutcome::Paused(runnability)) => {
                self.report.wakes += u64::from(runnability == Runnability::Runnable);
                self.queue.probed(now(), id, runnability);
                if due && runnability == Runnability::Idle {
                    self.expect_wake(id)
                } else {
                    None
                }
            }
            Ok(RunOutcome::Ended(end)) => self.end(id, Ok(end)),
            Err(failure) => self.end(id, Err(failure)),
        }
    }

    /// Looks when something that is foreseen will wake an idle vCPU.
    fn expect_wake(&mut self, id: VcpuId) -> Option<CoreEnd> {
        if self.queue.is_single() {
            return None;
        }
        match self.residents.get(id)?.wake_due() {
            Ok(Some(at)) => {
                self.queue.expect_wake(id, at);
                None
            }
            Ok(None) => None,
            Err(failure) => self.end(id, Err(failure)),
        }
    }

    /// Does the jobs for the core and its vCPUs; `on_end` gets a
    /// vCPU that failed in it.
    fn do_jobs(&mut self, on_end: &mut impl FnMut(CoreEnd)) {
        while let Some(job) = self.jobs.as_ref().and_then(JobQueue::take) {
            if let Err((id, failure)) = self.residents.serve(job, &mut self.thread) {
                self.end(id, Err(failure)).map(&mut *on_end);
            }
        }
        for id in self.residents.which(Vcpu::has_jobs) {
            // What a context may have is decided by the core that it is on.
            self.switch_to(id);
            let Some(vcpu) = self.residents.get_mut(id) else {
                continue;
            };
            let done = vcpu.do_jobs(&mut self.thread);
            if !vcpu.is_blocked() {
                self.queue.unblock(id);
            }
            if let Err(failure) = done {
                self.end(id, Err(failure)).map(&mut *on_end);
            }
        }
    }

    /// Gives the counters to `id`, which runs next.
    fn switch_to(&mut self, id: VcpuId) {
        let core = self.thread.counters_mut();
        self.report.switches += u64::from(self.residents.switch_to(id, core));
    }

    /// Takes a vCPU and all of its counts off this core.
    fn dismiss(&mut self, id: VcpuId) -> Option<Vcpu> {
        self.queue.remove(id);
        self.residents.dismiss(id, self.thread.counters_mut())
    }

    fn end(&mut self, id: VcpuId, end: Result<VcpuEnd, VcpuFailure>) -> Option<CoreEnd> {
        let core = self.thread.counters_mut();
        self.residents.get_mut(id)?.close_endpoint(core);
        let vcpu = self.dismiss(id)?;
        Some(CoreEnd {
            vcpu,
            end,
            own_core: None,
        })
    }

    /// A vCPU that nobody has run yet, or that another core has left.
    /// That has cost `cost`.
    fn admit(&mut self, mut vcpu: Vcpu, cost: Ticks) -> Option<CoreEnd> {
        match vcpu.runnability() {
            Ok(runnability) => {
                self.queue.admit(now(), vcpu.id(), runnability, cost);
                self.residents.admit(vcpu, runnability);
                None
            }
            Err(failure) => {
                vcpu.close_endpoint(None);
                Some(CoreEnd {
                    vcpu,
                    end: Err(failure),
                    own_core: None,
                })
            }
        }
    }

    /// A vCPU from another core.
    fn arrive(&mut self, mut vcpu: Vcpu) -> Option<CoreEnd> {
        let (began, tsc) = (Instant::now(), now());
        match vcpu.settle_in() {
            Ok(()) => {
                let (took, cost) = (began.elapsed(), now() - tsc);
                log::debug!("{} comes to core {} ({took:?})", vcpu.id(), self.index);
                self.report.migrations.add(took);
                let id = vcpu.id();
                let end = self.admit(vcpu, cost);
                self.look_for_room(id);
                end
            }
            Err(failure) => {
                vcpu.close_endpoint(None);
                Some(CoreEnd {
                    vcpu,
                    end: Err(failure),
                    own_core: None,
                })
            }
        }
    }

    /// A vCPU that has come for this core's room gets it now, or goes nowhere else: two
    /// cores would hand it to each other for as long as their rooms change.
    fn look_for_room(&mut self, id: VcpuId) {
        let waits = |core: &Self| {
            let pmu = core.residents.get(id).and_then(Vcpu::pmu);
            pmu.is_some_and(|pmu| pmu.claims().waits_for_room())
        };
        if waits(self) {
            self.switch_to(id);
            if waits(self) {
                self.refuse_move(id);
            }
        }
    }

    /// No core has room for what the guest of a vCPU has asked for.
    fn refuse_move(&mut self, id: VcpuId) {
        self.switch_to(id);
        if let Some(pmu) = self.residents.get_mut(id).and_then(Vcpu::pmu_mut) {
            pmu.stay(self.thread.counters_mut());
        }
    }

    /// Physical counters that are promised to a vCPU of this core.
    fn relies_on(&self, id: VcpuId) -> usize {
        let pmu = self.residents.get(id).and_then(Vcpu::pmu);
        let promised = pmu.zip(self.thread.counters());
        promised.map_or(0, |(pmu, core)| pmu.relies_on(core))
    }

    /// A vCPU waits here rather than lose on another core what it relies on.
    #[cold]
    fn stays(&mut self, id: VcpuId, taker: usize, room: usize) {
        self.report.stays += 1;
        let needs = self.relies_on(id);
        log::debug!(
            "{id} stays on core {}: it relies on {needs} counters, and core {taker} has room for \
             {room}",
            self.index
        );
    }

    /// Has vCPUs go to cores with room for what their guests have asked for.
    fn make_moves(&mut self) {
        let waits = |pmu: &VcpuPmu| pmu.claims().waits_for_room() || pmu.waits_for_core();
        for id in self.residents.which(|vcpu| vcpu.pmu().is_some_and(waits)) {
            self.make_move(id);
        }
    }

    #[cold]
    fn make_move(&mut self, id: VcpuId) {
        if self.looks_for_room(id) {
            return;
        }
        let pmu = self.residents.get(id).and_then(Vcpu::pmu);
        let needs = pmu.zip(self.thread.counters());
        let needs = needs.and_then(|(pmu, core)| pmu.needs_room(core));
        let other = needs.and_then(|needs| self.exchange.with_room(self.index, id, needs));
        match other {
            Some(other) => {
                log::debug!("{id} leaves core {} for one with room", self.index);
                if let Some(vcpu) = self.dismiss(id) {
                    self.exchange.hand_over(other, vcpu);
                }
            }
            None => self.refuse_move(id),
        }
    }

    /// Whether a vCPU's request had to be looked at on its core, and needs no move now.
    fn looks_for_room(&mut self, id: VcpuId) -> bool {
        let waits = self.residents.get(id).and_then(Vcpu::pmu);
        if !waits.is_some_and(VcpuPmu::waits_for_core) {
            return false;
        }
        self.switch_to(id);
        let Some(pmu) = self.residents.get_mut(id).and_then(Vcpu::pmu_mut) else {
            return true;
        };
        pmu.tick(self.thread.counters_mut(), now());
        !pmu.claims().waits_for_room()
    }

    /// Answers crowded cores, and asks another one where this one is crowded.
    fn meet_others(&mut self) {
        self.exchange.set_load(self.index, self.queue.runnable());
        let core = self.thread.counters();
        let room = core.map_or(usize::MAX, CorePmu::room);
        let refuses = core.map_or(0, CorePmu::refuses);
        self.exchange.set_room(self.index, room, refuses);
        self.exchange.answer(self.index);
        let taker = self.exchange.taker(self.index);
        let now = now();
        let fits = |id: VcpuId| {
            taker.is_none_or(|(taker, room)| {
                self.relies_on(id) <= room && !self.exchange.refuses(taker, id)
            })
        };
        let Some(id) = self.queue.surplus(now, fits) else {
            if let (Some((taker, room)), Some(id)) = (taker, self.queue.surplus(now, |_| true)) {
                self.stays(id, taker, room);
            }
            return;
        };
        let Some((taker, _)) = taker else {
            if now >= self.ask_at {
                self.ask_at = now + self.pace.patience;
                self.attempt = self.attempt.wrapping_add(1);
                self.exchange.ask(self.index, self.attempt);
            }
            return;
        };
        if let Some(vcpu) = self.dismiss(id) {
            // Who is left may run for long before this core looks up again.
            self.exchange.set_load(self.index, self.queue.runnable());
            self.exchange.hand_over(taker, vcpu);
        }
    }
}

/// Keeps the calling thread, number `index` of those that run vCPUs, on its host
/// CPU, if there is a list of them.
///
/// # Errors
/// [`VcpuFailure::Pin`].
pub fn pin(pinned: Option<&CpuList>, index: usize) -> Result<(), VcpuFailure> {
    match pinned.and_then(|list| list.of(index)) {
        Some(cpu) => pin_this_thread(cpu).map_err(|error| VcpuFailure::Pin { cpu, error }),
        None => Ok(()),
    }
}
