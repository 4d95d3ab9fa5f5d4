//! One core: a thread that does what its run queue says.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pmu_virt::CorePmu;

use super::board::Board;
use super::pace::Pace;
use super::plan::CorePlan;
use super::queue::{Action, Rest, RunQueue};
use super::report::CoreReport;
use crate::kvm::VcpuId;
use crate::perfmon::{CoreTally, Tray, close_core};
use crate::sys::{SignalMask, hold_pending_signal, rdtsc};
use crate::vcpu::{Seat, Stay, Turn, Vcpu, VcpuControl, VcpuEnd, VcpuFailure};

/// A vCPU that runs no more.
#[derive(Debug)]
pub struct CoreEnd {
    /// It.
    pub vcpu: Vcpu,
    /// How it ended.
    pub end: Result<VcpuEnd, VcpuFailure>,
    /// The core that it had to itself, on which it still is.
    pub own_core: Option<Box<CorePmu>>,
}

/// A core, on the thread that made it.
#[derive(Debug)]
pub struct CoreThread {
    pub(super) index: usize,
    pub(super) board: Arc<Board>,
    control: Arc<VcpuControl>,
    /// This thread, with the core's counters.
    pub(super) seat: Seat,
    mask: SignalMask,
    pub(super) queue: RunQueue,
    pub(super) vcpus: BTreeMap<VcpuId, Vcpu>,
    /// Who ran last, and has the counters.
    pub(super) last: Option<VcpuId>,
    pace: Pace,
    tsc_khz: u32,
    /// Other cores are not asked before, as that interrupts them.
    ask_at: u64,
    attempt: usize,
    report: CoreReport,
    /// Where the server of host tools lays jobs down for the core.
    pub(super) tray: Option<Tray>,
    /// What vCPUs did here, for the virtual PMDs.
    pub(super) tally: CoreTally,
}

impl CoreThread {
    /// The calling thread becomes core `index` of `board`. `control` is that of
    /// its vCPUs; `pmu` are the counters that they share, `None` where they have
    /// no PMU.
    ///
    /// # Errors
    /// [`VcpuFailure::Timer`] or [`VcpuFailure::Signal`]: the process has no timer
    /// or no queued signal left.
    pub fn new(
        index: usize,
        plan: &CorePlan,
        tsc_khz: u32,
        board: Arc<Board>,
        control: Arc<VcpuControl>,
        pmu: Option<Box<CorePmu>>,
    ) -> Result<Self, VcpuFailure> {
        let seat = Seat::new(tsc_khz)?.of_core(index).with_pmu(pmu);
        let tsc_khz = tsc_khz.max(1);
        let pace = Pace::new(plan.slice, tsc_khz);
        board.sit_down(index, seat.target());
        Ok(Self {
            index,
            board,
            control,
            seat,
            mask: hold_pending_signal().map_err(VcpuFailure::Signal)?,
            queue: RunQueue::new(pace),
            vcpus: BTreeMap::new(),
            last: None,
            pace,
            tsc_khz,
            ask_at: 0,
            attempt: index,
            report: CoreReport::default(),
            tray: None,
            tally: CoreTally::default(),
        })
    }

    /// The same with a tray of its own.
    #[must_use]
    pub fn with_tray(mut self, tray: Option<Tray>) -> Self {
        if let Some(tray) = &tray {
            tray.sit_down();
            tray.meet_at(&self.board);
        }
        self.tray = tray;
        self
    }

    /// Runs `vcpus`, and those that come later, until the machine is stopped.
    /// `on_end` gets each vCPU as soon as it has ended; at last all others.
    pub fn run(mut self, vcpus: Vec<Vcpu>, mut on_end: impl FnMut(CoreEnd)) -> CoreReport {
        let began = Instant::now();
        for vcpu in vcpus {
            self.admit(vcpu, 0).map(&mut on_end);
        }
        while !self.control.stopping() {
            for vcpu in self.board.collect(self.index) {
                self.arrive(vcpu).map(&mut on_end);
            }
            self.do_jobs(&mut on_end);
            self.meet_others();
            self.act().map(&mut on_end);
        }
        let left: Vec<VcpuId> = self.vcpus.keys().copied().collect();
        for id in left {
            self.end(id, Ok(VcpuEnd::Stopped)).map(&mut on_end);
        }
        if let Some(tray) = self.tray.take() {
            let values = self.quantities();
            close_core(tray, self.seat.pmu.as_deref_mut(), &values);
        }
        if let Some(pmu) = &self.seat.pmu {
            self.report.counters = pmu.stats();
        }
        self.report.alive = began.elapsed();
        self.report
    }

    /// One step of the queue's; a vCPU that ended in it.
    fn act(&mut self) -> Option<CoreEnd> {
        match self.queue.next(rdtsc()) {
            Action::Run { vcpu, until } => self.enter(vcpu, until),
            Action::Probe(vcpu) => self.probe(vcpu),
            Action::Wait { until } => {
                let rest = until.map(|until| self.duration(until.saturating_sub(rdtsc())));
                let began = Instant::now();
                self.board.wait(self.index, rest);
                self.was_idle(began.elapsed());
                None
            }
        }
    }

    fn enter(&mut self, id: VcpuId, until: Option<u64>) -> Option<CoreEnd> {
        self.switch_to(id);
        let turn = Turn {
            until,
            attention: self.board.attention(self.index),
        };
        let stay = self.vcpus.get_mut(&id)?.run_for(&mut self.seat, &turn);
        match stay {
            Ok(Stay::Paused(rest)) => {
                self.report.barred += u64::from(matches!(rest, Rest::Barred { .. }));
                if self.queue.left(rdtsc(), rest) {
                    self.report.halts += 1;
                    return self.expect_wake(id);
                }
                None
            }
            Ok(Stay::Ended(end)) => self.end(id, Ok(end)),
            Err(failure) => self.end(id, Err(failure)),
        }
    }

    fn duration(&self, ticks: u64) -> Duration {
        let ns = u128::from(ticks) * 1_000_000 / u128::from(self.tsc_khz);
        Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
    }

    /// A timer that has expired is made an interrupt by one probe and seen by
    /// the next, so a vCPU whose timer is due is asked twice.
    fn probe(&mut self, id: VcpuId) -> Option<CoreEnd> {
        let began = Instant::now();
        let due = self.queue.is_due(rdtsc(), id);
        let vcpu = self.vcpus.get_mut(&id)?;
        let mut stay = vcpu.probe(&mut self.seat, self.mask);
        if due && matches!(stay, Ok(Stay::Paused(Rest::Idle))) {
            stay = vcpu.probe(&mut self.seat, self.mask);
        }
        self.report.probes += 1;
        self.report.probing += began.elapsed();
        match stay {
            Ok(Stay::Paused(rest)) => {
                self.report.wakes += u64::from(rest == Rest::Runnable);
                self.queue.probed(rdtsc(), id, rest);
                match due && rest == Rest::Idle {
                    true => self.expect_wake(id),
                    false => None,
                }
            }
            Ok(Stay::Ended(end)) => self.end(id, Ok(end)),
            Err(failure) => self.end(id, Err(failure)),
        }
    }

    /// Looks when something that is foreseen will wake an idle vCPU.
    fn expect_wake(&mut self, id: VcpuId) -> Option<CoreEnd> {
        if self.queue.is_single() {
            return None;
        }
        match self.vcpus.get(&id)?.wake_due() {
            Ok(Some(at)) => {
                self.queue.expect_wake(id, at);
                None
            }
            Ok(None) => None,
            Err(failure) => self.end(id, Err(failure)),
        }
    }

    /// Gives the counters to `id`, which runs next.
    pub(super) fn switch_to(&mut self, id: VcpuId) {
        if self.last == Some(id) {
            return;
        }
        self.park();
        self.last = Some(id);
        self.report.switches += 1;
        if let (Some(vcpu), Some(pmu)) = (self.vcpus.get_mut(&id), &mut self.seat.pmu) {
            vcpu.attach(pmu);
        }
    }

    /// Takes the counters back from who ran last.
    fn park(&mut self) {
        let last = self.last.take().and_then(|id| self.vcpus.get_mut(&id));
        if let (Some(vcpu), Some(pmu)) = (last, &mut self.seat.pmu) {
            vcpu.park(pmu);
        }
    }

    /// Takes a vCPU and all of its counts off this core.
    fn dismiss(&mut self, id: VcpuId) -> Option<Vcpu> {
        if self.last == Some(id) {
            self.park();
        }
        self.queue.remove(id);
        let mut vcpu = self.vcpus.remove(&id)?;
        // Somebody else may be on the core.
        self.park();
        if let Some(pmu) = &mut self.seat.pmu {
            vcpu.leave(pmu);
        }
        self.tally.leaves(id, &vcpu.quantities());
        Some(vcpu)
    }

    pub(super) fn end(&mut self, id: VcpuId, end: Result<VcpuEnd, VcpuFailure>) -> Option<CoreEnd> {
        let core = self.seat.pmu.as_deref_mut();
        self.vcpus.get_mut(&id)?.leave_desk(core);
        let vcpu = self.dismiss(id)?;
        Some(CoreEnd {
            vcpu,
            end,
            own_core: None,
        })
    }

    /// A vCPU that nobody has run yet, or that another core has left.
    /// That has cost `cost` ticks.
    fn admit(&mut self, mut vcpu: Vcpu, cost: u64) -> Option<CoreEnd> {
        match vcpu.rest() {
            Ok(rest) => {
                self.queue.admit(rdtsc(), vcpu.id(), rest, cost);
                vcpu.moves_to(self.index);
                self.tally.comes(vcpu.id(), vcpu.quantities());
                self.vcpus.insert(vcpu.id(), vcpu);
                None
            }
            Err(failure) => {
                vcpu.leave_desk(None);
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
        let (began, tsc) = (Instant::now(), rdtsc());
        match vcpu.settle_in() {
            Ok(()) => {
                let (took, ticks) = (began.elapsed(), rdtsc().saturating_sub(tsc));
                log::debug!("{} comes to core {} ({took:?})", vcpu.id(), self.index);
                self.report.migrations.add(took);
                self.admit(vcpu, ticks)
            }
            Err(failure) => {
                vcpu.leave_desk(None);
                Some(CoreEnd {
                    vcpu,
                    end: Err(failure),
                    own_core: None,
                })
            }
        }
    }

    /// Answers crowded cores, and asks another one where this one is crowded.
    fn meet_others(&mut self) {
        self.board.set_load(self.index, self.queue.runnable());
        self.board.answer(self.index);
        let taker = self.board.taker(self.index);
        let now = rdtsc();
        let Some(id) = self.queue.surplus(now) else {
            return;
        };
        let Some(taker) = taker else {
            if now >= self.ask_at {
                self.ask_at = now.saturating_add(self.pace.patience);
                self.attempt = self.attempt.wrapping_add(1);
                self.board.ask(self.index, self.attempt);
            }
            return;
        };
        if let Some(vcpu) = self.dismiss(id) {
            // Who is left may run for long before this core looks up again.
            self.board.set_load(self.index, self.queue.runnable());
            self.board.hand_over(taker, vcpu);
        }
    }
}
