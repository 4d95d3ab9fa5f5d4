//! One core: a thread that does what its run queue says.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use super::board::Board;
use super::pace::Pace;
use super::plan::CorePlan;
use super::queue::{Action, Rest, RunQueue};
use super::report::CoreReport;
use crate::kvm::VcpuId;
use crate::sys::{SignalMask, hold_pending_signal, rdtsc};
use crate::vcpu::{Seat, Stay, Turn, Vcpu, VcpuControl, VcpuEnd, VcpuFailure};

/// A vCPU that runs no more.
#[derive(Debug)]
pub struct CoreEnd {
    /// It.
    pub vcpu: Vcpu,
    /// How it ended.
    pub end: Result<VcpuEnd, VcpuFailure>,
}

/// A core, on the thread that made it.
#[derive(Debug)]
pub struct CoreThread {
    index: usize,
    board: Arc<Board>,
    control: Arc<VcpuControl>,
    seat: Seat,
    mask: SignalMask,
    queue: RunQueue,
    vcpus: BTreeMap<VcpuId, Vcpu>,
    last: Option<VcpuId>,
    report: CoreReport,
}

impl CoreThread {
    /// The calling thread becomes core `index` of `board`. `control` is that of
    /// its vCPUs.
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
    ) -> Result<Self, VcpuFailure> {
        let seat = Seat::new(tsc_khz)?;
        board.sit_down(index, seat.target());
        Ok(Self {
            index,
            board,
            control,
            seat,
            mask: hold_pending_signal().map_err(VcpuFailure::Signal)?,
            queue: RunQueue::new(Pace::new(plan.slice, tsc_khz.max(1))),
            vcpus: BTreeMap::new(),
            last: None,
            report: CoreReport::default(),
        })
    }

    /// Runs `vcpus`, and those that come later, until the machine is stopped.
    /// `on_end` gets each vCPU as soon as it has ended; at last all others.
    pub fn run(mut self, vcpus: Vec<Vcpu>, mut on_end: impl FnMut(CoreEnd)) -> CoreReport {
        let began = Instant::now();
        for vcpu in vcpus {
            self.admit(vcpu).map(&mut on_end);
        }
        while !self.control.stopping() {
            for vcpu in self.board.collect(self.index) {
                self.arrive(vcpu).map(&mut on_end);
            }
            self.meet_others();
            self.act().map(&mut on_end);
        }
        for vcpu in self.vcpus.into_values() {
            let end = Ok(VcpuEnd::Stopped);
            on_end(CoreEnd { vcpu, end });
        }
        self.report.alive = began.elapsed();
        self.report
    }

    /// One step of the queue's; a vCPU that ended in it.
    fn act(&mut self) -> Option<CoreEnd> {
        match self.queue.next(rdtsc()) {
            Action::Run { vcpu, until } => self.enter(vcpu, until),
            Action::Probe(vcpu) => self.probe(vcpu),
            Action::Empty => {
                self.board.wait(self.index);
                None
            }
        }
    }

    fn enter(&mut self, id: VcpuId, until: Option<u64>) -> Option<CoreEnd> {
        if self.last != Some(id) {
            self.last = Some(id);
            self.report.switches += 1;
        }
        let turn = Turn {
            until,
            attention: self.board.attention(self.index),
        };
        let stay = self.vcpus.get_mut(&id)?.run_for(&mut self.seat, &turn);
        match stay {
            Ok(Stay::Paused(rest)) => {
                self.report.halts += u64::from(rest == Rest::Idle);
                self.queue.left(rdtsc(), rest);
                None
            }
            Ok(Stay::Ended(end)) => self.end(id, Ok(end)),
            Err(failure) => self.end(id, Err(failure)),
        }
    }

    fn probe(&mut self, id: VcpuId) -> Option<CoreEnd> {
        let began = Instant::now();
        let stay = self.vcpus.get_mut(&id)?.probe(self.mask);
        self.report.probes += 1;
        self.report.probing += began.elapsed();
        match stay {
            Ok(Stay::Paused(rest)) => {
                self.report.wakes += u64::from(rest == Rest::Runnable);
                self.queue.probed(rdtsc(), id, rest);
                None
            }
            Ok(Stay::Ended(end)) => self.end(id, Ok(end)),
            Err(failure) => self.end(id, Err(failure)),
        }
    }

    fn end(&mut self, id: VcpuId, end: Result<VcpuEnd, VcpuFailure>) -> Option<CoreEnd> {
        self.queue.remove(id);
        let vcpu = self.vcpus.remove(&id)?;
        Some(CoreEnd { vcpu, end })
    }

    /// A vCPU that nobody has run yet, or that another core has left.
    fn admit(&mut self, vcpu: Vcpu) -> Option<CoreEnd> {
        match vcpu.rest() {
            Ok(rest) => {
                self.queue.admit(rdtsc(), vcpu.id(), rest);
                self.vcpus.insert(vcpu.id(), vcpu);
                None
            }
            Err(failure) => Some(CoreEnd {
                vcpu,
                end: Err(failure),
            }),
        }
    }

    /// A vCPU from another core.
    fn arrive(&mut self, mut vcpu: Vcpu) -> Option<CoreEnd> {
        let began = Instant::now();
        match vcpu.settle_in() {
            Ok(()) => {
                let took = began.elapsed();
                log::debug!("{} comes to core {} ({took:?})", vcpu.id(), self.index);
                self.report.migrations.add(took);
                self.admit(vcpu)
            }
            Err(failure) => Some(CoreEnd {
                vcpu,
                end: Err(failure),
            }),
        }
    }

    /// Answers crowded cores, and asks an idle one where this one is crowded.
    fn meet_others(&mut self) {
        let idle = self.queue.is_idle();
        self.board.set_idle(self.index, idle);
        self.board.answer(self.index, idle);
        let taker = self.board.taker(self.index);
        let Some(id) = self.queue.surplus(rdtsc()) else {
            return;
        };
        let Some(taker) = taker else {
            return self.board.ask(self.index);
        };
        if let Some(vcpu) = self.vcpus.remove(&id) {
            self.queue.remove(id);
            self.board.hand_over(taker, vcpu);
        }
    }
}
