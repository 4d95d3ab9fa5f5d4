//! One emulated vCPU: from one reason to stop to the next.

use std::convert::Infallible;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use arbiter::Caller;
use emu::{Cpu, Cpuid, EventClass, Missing, State};
use instruction_facts::InstructionInfoFactory;
use irqchip::{Activity, Answer as ChipAnswer, Delivery};
use kvm_pmu::{Answer, MsrHolder, MsrTraps, TrapEvent, TrapObserver, Tsc, VcpuId, VmExit};
use pmu_virt::cpuid::Leaves;
use pmu_virt::{
    CorePmu, MsrIndex, PmuState, Progress, ReadOutcome, Ring, StateError, Ticks, VcpuPmu, Vendor,
};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use vmm_control::{ControlEndpoint, HaltTimes, Halted, KickThread, OffCoreReason, VcpuQuantities};

use super::common::Common;
use super::moment::{Standing, Stopped, Watched};
use super::msrs::{MsrFacts, Msrs, Written};
use super::paravirt::GuestTime;
use super::pmi::PmiSender;
use super::schedule::{Doing, budget, earliest};
use crate::audit::Holding;
use crate::control::exit_kind;
use crate::guest_kernel::{VcpuLook, VmKernel};
use crate::reservations::{answer_questions, holdings};
use crate::vcpu::{Handled, Hosted, Observer, Reports, Silent, VcpuEnd, VcpuFacts, handle};

/// `IA32_TSC_DEADLINE`.
const TSC_DEADLINE: u32 = 0x6e0;
/// Its bits for x2APIC mode.
const X2APIC: u64 = 3 << 10;
/// CPUID's leaf of the architectural PMU.
const PERFMON_LEAF: u32 = 0xa;

/// What an emulated vCPU is made of.
#[derive(Debug)]
pub struct EmuVcpuParts {
    /// The answers to CPUID.
    pub cpuid: Cpuid,
    /// Its registers; none: it waits for INIT and a start-up IPI.
    pub state: Option<State>,
    /// Its PMU, attached to `core`.
    pub pmu: Option<VcpuPmu>,
    /// The counters that it has to itself.
    pub core: Option<Box<CorePmu>>,
    /// Receives reports.
    pub observer: Box<dyn Observer>,
    /// The way to the server of host tools, where there is one.
    pub host: Option<ControlEndpoint>,
    /// Its guest's kernel, where host tools may ask for it.
    pub(crate) guest: Option<Arc<VmKernel>>,
}

impl EmuVcpuParts {
    /// A processor that answers CPUID so, without a PMU, and of which nobody is told. Without a
    /// state it waits to be started.
    #[must_use]
    pub fn alone(cpuid: Leaves, state: Option<State>) -> Self {
        Self {
            cpuid: Cpuid::new(cpuid),
            state,
            pmu: None,
            core: None,
            observer: Box::new(Silent),
            host: None,
            guest: None,
        }
    }
}

/// Where the loop goes on.
pub(super) enum Step {
    /// With the next step of the same turn.
    On,
    /// Its turn is over.
    Over,
    Ended(VcpuEnd),
}

/// One vCPU.
#[derive(Debug)]
pub struct EmuVcpu {
    id: VcpuId,
    cpu: Cpu,
    pmu: Option<VcpuPmu>,
    core: Option<Box<CorePmu>>,
    hosted: Hosted,
    msr_traps: MsrTraps,
    msrs: Msrs,
    reports: Reports,
    pmis: PmiSender,
    /// HLT has retired, and nothing has ended it.
    halted: bool,
    /// PAUSE gives others their turn.
    yields: bool,
    /// What the guest's TSC adds to virtual time, as its clock page has it.
    tsc_offset: u64,
    /// Up to when it has run, or its idle time was accounted for.
    accounted: u64,
    /// The deadline that the guest has set, in its TSC.
    deadline: u64,
    /// Instructions that it has executed, of the kernel and of programs, whatever counts them.
    executed: [u64; 2],
    /// The instruction that may complete an overflow, while instructions are sampled.
    watched: Option<Box<Watched>>,
    factory: InstructionInfoFactory,
}

/// The state is none of this machine's.
#[derive(Debug, Error)]
pub enum NotRestored {
    /// Another number of vCPUs, other PMUs, or another beginning of time.
    #[error("the state is one of a machine of other parts")]
    Parts,
    /// A PMU cannot take it.
    #[error(transparent)]
    Pmu(#[from] StateError),
}

/// What is kept of a vCPU, so that another one goes on where it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct EmuVcpuState {
    cpu: State,
    msrs: Msrs,
    halted: bool,
    accounted: u64,
    deadline: u64,
    pmu: Option<PmuState>,
}

impl EmuVcpuState {
    pub(super) fn registers(&self) -> &State {
        &self.cpu
    }
}

/// Accesses to devices that one instruction makes, at most: of strings each element is one.
const ACCESSES: u32 = 64;

/// A vCPU that is halted has no thread that sleeps for it: its time is its turns'.
#[derive(Debug)]
struct NeverAsleep;

impl HaltTimes for NeverAsleep {
    fn halted(&mut self) -> Option<Halted> {
        Some(Halted::default())
    }

    /// Idle time is skipped, but with `--real-time`.
    fn take_time(&self) -> bool {
        false
    }
}

/// The processor's own part of MSRs that are a PMU's in part.
struct Holder<'a> {
    cpu: &'a Cpu,
    msrs: &'a mut Msrs,
    time: GuestTime,
    x2apic: bool,
}

impl MsrHolder for Holder<'_> {
    type Error = Infallible;

    fn in_smm(&self) -> bool {
        false
    }

    fn is_x2apic(&self) -> Result<bool, Infallible> {
        Ok(self.x2apic)
    }

    fn presented(&self) -> Result<u64, Infallible> {
        Ok(presented(self.cpu.state()))
    }

    fn read_own(&self, msr: MsrIndex) -> Result<Option<u64>, Infallible> {
        Ok(self.msrs.read(msr.0))
    }

    fn write_own(&mut self, msr: MsrIndex, value: u64) -> Result<bool, Infallible> {
        // None of the shared ones fills memory.
        Ok(self.msrs.write(msr.0, value, self.time) == Written::Done)
    }
}

/// The cookie that registers present (`docs/reference/pcr.md`, "Presenting a cookie").
fn presented(state: &State) -> u64 {
    const LOW: u64 = 0xffff_ffff;
    let (rsi, rdi) = (state.r[6], state.r[7]);
    match state.bits() {
        64 => rsi,
        _ => (rdi & LOW) << 32 | rsi & LOW,
    }
}

impl EmuVcpu {
    pub(super) fn new(id: VcpuId, mut cpu: Cpu, parts: EmuVcpuParts, yields: bool) -> Self {
        let facts = MsrFacts {
            vendor: if parts.cpuid.is_amd() {
                Vendor::Amd
            } else {
                Vendor::Intel
            },
            perfmon: parts.cpuid.answer(PERFMON_LEAF, 0).eax & 0xff != 0,
            pebs: parts
                .pmu
                .as_ref()
                .is_some_and(|pmu| pmu.model().pebs().is_some()),
        };
        if let Some(state) = parts.state {
            cpu.set_state(state);
        }
        cpu.stop_at_pause(yields);
        let look = parts.guest.map(|guest| VcpuLook::new(guest, id.0));
        let tally = parts
            .host
            .as_ref()
            .map_or_else(VcpuQuantities::default, |host| {
                host.quantities(Some(Box::new(NeverAsleep)))
            });
        Self {
            id,
            msr_traps: MsrTraps::new(),
            msrs: Msrs::new(facts),
            reports: Reports::new(parts.observer, tally, look),
            hosted: Hosted::new(parts.host),
            pmis: PmiSender::default(),
            halted: false,
            yields,
            tsc_offset: cpu.state().msrs.tsc_offset,
            accounted: 0,
            deadline: 0,
            executed: [0; 2],
            watched: None,
            factory: InstructionInfoFactory::new(),
            cpu,
            pmu: parts.pmu,
            core: parts.core,
        }
    }

    /// Which vCPU this is.
    #[must_use]
    pub fn id(&self) -> VcpuId {
        self.id
    }

    /// The processor, while it does not run.
    #[must_use]
    pub fn cpu(&self) -> &Cpu {
        &self.cpu
    }

    pub(super) fn cpu_mut(&mut self) -> &mut Cpu {
        &mut self.cpu
    }

    /// The PMU, while the guest does not run.
    #[must_use]
    pub fn pmu(&self) -> Option<&VcpuPmu> {
        self.pmu.as_ref()
    }

    /// The counters that it counts on.
    #[must_use]
    pub fn core(&self) -> Option<&CorePmu> {
        self.core.as_deref()
    }

    /// The PMU on its counters.
    fn on_core(&mut self) -> Option<(&mut VcpuPmu, &mut CorePmu)> {
        self.pmu.as_mut().zip(self.core.as_deref_mut())
    }

    /// What the guest could ever notice of it.
    pub(super) fn hash_state(&self, hash: &mut impl Hasher) {
        (self.cpu.state(), &self.msrs, self.halted).hash(hash);
    }

    /// Instructions that it has executed in a ring since it was made.
    #[must_use]
    pub fn executed(&self, ring: Ring) -> u64 {
        self.executed[ring as usize]
    }

    /// Whether it has executed HLT and waits for an interrupt.
    #[must_use]
    pub fn is_halted(&self) -> bool {
        self.halted
    }

    /// The exits that tools are told of.
    #[cfg(test)]
    pub(super) fn exits(&self) -> Option<u64> {
        pmu_virt::perfmon::Quantities::read(
            &self.reports.tally,
            pmu_virt::perfmon::VirtualPmd::Exits,
        )
    }

    /// Whether it waits for INIT or a start-up IPI.
    pub(super) fn awaits_startup(&self, room: &Common) -> bool {
        room.chips().activity(self.number()) == Activity::WaitsForStartup
    }

    // Host tools, and the hypervisor's own layer.

    /// Its jobs are done by this thread from now on, whose waits `thread` ends.
    pub(super) fn comes_to(&self, thread: impl KickThread + 'static) {
        self.hosted.comes_to(self.id().index(), thread);
    }

    /// Does the jobs of host tools, if there are any.
    #[inline]
    pub(super) fn serve(&mut self, room: &mut Common) {
        let served = self.hosted.has_jobs();
        if served {
            self.do_jobs(room);
        }
        // One that is halted has no turn in which this would take place.
        if served || self.due().is_some_and(|due| due <= room.now()) {
            self.tick(Tsc(room.now()));
            self.answer_questions();
            self.forward(room);
        }
    }

    #[cold]
    fn do_jobs(&mut self, room: &mut Common) {
        let facts = VcpuFacts {
            id: self.id(),
            awaits_startup: self.awaits_startup(room),
            halted: self.is_halted(),
        };
        let now = Tsc(room.now());
        if let Some((pmu, core)) = self.pmu.as_mut().zip(self.core.as_deref_mut()) {
            let tally = &self.reports.tally;
            tally.note_virtual_time(now.0);
            let facts = || Ok::<_, Infallible>(facts);
            // Its clock stood still with it, so it is told nothing after a pause.
            let Ok(_) = self.hosted.do_jobs(facts, (pmu, core), tally, || now);
        }
        self.answer_questions();
        // A job may have found an overflow.
        self.take_samples(room);
    }

    /// Answers what the hypervisor was asked, and passes on what it was answered.
    #[inline]
    pub(super) fn answer_questions(&mut self) {
        let mut core = self.core.as_deref_mut();
        if let Some(pmu) = self.pmu.as_mut()
            && answer_questions(pmu, core.as_deref_mut())
        {
            self.hosted.hear_owners(pmu, core);
        }
    }

    /// Its turn begins, or another one's does.
    #[inline]
    pub(super) fn note_turn(&mut self, begins: bool, room: &Common) {
        if !self.hosted.is_served() {
            return;
        }
        let tally = &self.reports.tally;
        if begins {
            tally.on_thread();
        } else if self.is_halted() || self.awaits_startup(room) {
            tally.off_thread(OffCoreReason::Idle);
        } else if self.held(room.now()).is_some() {
            tally.off_thread(OffCoreReason::Held);
        } else {
            tally.off_thread(OffCoreReason::Runnable);
        }
    }

    /// It has ended: tools get their contexts back. What is left of its PMU, and who holds its
    /// counters.
    pub(super) fn close(&mut self, now: Tsc) -> (Vec<Holding>, Option<PmuState>) {
        let (pmu, core) = (self.pmu.as_mut(), self.core.as_deref_mut());
        self.reports.tally.note_virtual_time(now.0);
        self.hosted.close(pmu, core, &self.reports.tally);
        let Some(pmu) = &mut self.pmu else {
            return (Vec::new(), None);
        };
        let mut core = self.core.as_deref_mut();
        pmu.tick(core.as_deref_mut(), now);
        let held = holdings(pmu, core.as_deref());
        (held, settled(pmu, core))
    }

    // Snapshots.

    /// What is kept of it; none if the instruction in hand ends the machine.
    pub(super) fn save(&mut self, room: &mut Common) -> Option<EmuVcpuState> {
        // What a device has answered is not asked again: the instruction in hand retires.
        for _ in 0..ACCESSES {
            if !self.cpu.is_half_done() {
                break;
            }
            if let Step::Ended(_) = self.step(room, room.now() + 1) {
                return None;
            }
        }
        if self.cpu.is_half_done() {
            return None;
        }
        let core = self.core.as_deref_mut();
        Some(EmuVcpuState {
            cpu: self.cpu.state().clone(),
            msrs: self.msrs.clone(),
            halted: self.halted,
            accounted: self.accounted,
            deadline: self.deadline,
            pmu: self.pmu.as_mut().and_then(|pmu| settled(pmu, core)),
        })
    }

    /// Goes on from there.
    pub(super) fn restore(&mut self, saved: &EmuVcpuState) -> Result<(), NotRestored> {
        match (&mut self.pmu, &saved.pmu) {
            (Some(pmu), Some(state)) => pmu.restore(self.core.as_deref_mut(), state)?,
            (None, None) => {}
            _ => return Err(NotRestored::Parts),
        }
        self.tsc_offset = saved.cpu.msrs.tsc_offset;
        self.cpu.set_state(saved.cpu.clone());
        self.msrs = saved.msrs.clone();
        self.halted = saved.halted;
        self.accounted = saved.accounted;
        self.deadline = saved.deadline;
        Ok(())
    }

    // Turns.

    fn number(&self) -> usize {
        self.id.index()
    }

    /// What it does, for whoever chooses the next one.
    pub(super) fn doing(&self, room: &Common) -> Doing {
        if let Some(held) = self.held(room.now()) {
            return held;
        }
        let startup = self.awaits_startup(room);
        if (self.halted || startup) && !self.wakes(room) {
            Doing::Waits
        } else {
            Doing::Runs
        }
    }

    /// Whether it is kept out of its guest.
    pub(super) fn held(&self, now: u64) -> Option<Doing> {
        let pmu = self.pmu.as_ref()?;
        let until = pmu
            .claims()
            .locked_out_until()
            .filter(|until| now < until.0);
        match until {
            Some(until) => Some(Doing::Held(Some(until.0))),
            None => pmu.hosts().is_blocked().then_some(Doing::Held(None)),
        }
    }

    /// Whether something has come that ends its wait.
    fn wakes(&self, room: &Common) -> bool {
        let mut pending = room.chips().pending(self.number());
        pending.any(|delivery| match delivery {
            Delivery::Init | Delivery::Sipi(_) => true,
            Delivery::Smi => false,
            Delivery::Nmi => self.cpu.can_nmi(),
            Delivery::Vector(_) => self.cpu.can_interrupt(),
        })
    }

    /// When something of its PMU's is due although it may not run.
    pub(super) fn due(&self) -> Option<u64> {
        let pmu = self.pmu.as_ref()?;
        earliest([
            pmu.interrupt_due().map(|due| due.0),
            pmu.claims().due().map(|due| due.0),
        ])
    }

    /// Time has passed in which no vCPU ran.
    pub(super) fn pass(&mut self, room: &mut Common) {
        let now = room.now();
        self.pass_idle(now);
        self.tick(Tsc(now));
        self.answer_questions();
        self.forward(room);
    }

    /// It has not run since it was accounted for last, and waited for something to happen, not
    /// for its turn.
    fn pass_idle(&mut self, now: u64) {
        // A tick is a nanosecond.
        let time = Duration::from_nanos(now.saturating_sub(self.accounted));
        self.accounted = now;
        if let Some((pmu, core)) = self.on_core() {
            pmu.with_core(core, |core| core.pass_idle(time));
        }
    }

    /// What is due in the reservations by `now` takes place.
    pub(super) fn tick(&mut self, now: Tsc) {
        if let Some((pmu, core)) = self.on_core() {
            pmu.tick(Some(core), now);
        }
    }

    /// Begins a turn.
    pub(super) fn begin(&mut self, room: &Common) {
        if self.halted || self.awaits_startup(room) {
            self.pass_idle(room.now());
        }
        self.cpu.pass_to(room.now());
    }

    /// Its turn is over.
    pub(super) fn end(&mut self, room: &Common) {
        self.accounted = room.now();
    }

    /// One run of its processor, with what comes before and behind it; its turn ends at
    /// `end`.
    pub(super) fn step(&mut self, room: &mut Common, end: u64) -> Step {
        room.advance();
        self.answer_questions();
        loop {
            self.forward(room);
            match self.deliver(room) {
                // A delivery is an event, which may be one too many for a counter.
                Ok(true) => self.count(),
                Ok(false) => break,
                Err(stop) => return Step::Ended(self.end_of(stop)),
            }
        }
        let startup = self.awaits_startup(room);
        if self.halted || startup || room.now() >= end || self.held(room.now()).is_some() {
            return Step::Over;
        }
        let exit = self.run(room, end);
        self.settle(room);
        self.follow_tsc(room);
        self.answer(room, exit)
    }

    /// Sends interrupts that its PMU raises.
    fn forward(&mut self, room: &mut Common) {
        let (now, number) = (Tsc(room.now()), self.number());
        let Some(pmu) = self.pmu.as_mut().filter(|pmu| pmu.has_interrupt()) else {
            return;
        };
        let (reports, id) = (&mut self.reports, self.id);
        let mut report = |event| reports.event(id, event);
        self.pmis
            .forward((room.chips_mut(), number), pmu, now, &mut report);
    }

    /// Gives it what its local APIC has for it, as far as it takes that now; whether it took
    /// something. A stop is a triple fault, or what the emulator lacks.
    fn deliver(&mut self, room: &mut Common) -> Result<bool, VmExit> {
        let number = self.number();
        let mut took = false;
        let (mut window, mut nmi_window) = (false, false);
        for delivery in room.chips().pending(number) {
            let taken = match delivery {
                Delivery::Init | Delivery::Sipi(_) | Delivery::Smi => true,
                Delivery::Nmi => self.cpu.can_nmi(),
                Delivery::Vector(_) => self.cpu.can_interrupt(),
            };
            if taken {
                let delivery = room.chips_mut().acknowledge(number, delivery);
                let stop = delivery.and_then(|delivery| self.take(delivery));
                room.set_now(self.cpu.time());
                if let Some(stop) = stop {
                    return Err(stop);
                }
                took = true;
            } else if delivery == Delivery::Nmi {
                nmi_window = true;
            } else {
                window = true;
            }
        }
        self.cpu.want_window(window);
        self.cpu.want_nmi_window(nmi_window);
        Ok(took)
    }

    fn take(&mut self, delivery: Delivery) -> Option<VmExit> {
        match delivery {
            Delivery::Init => {
                self.halted = false;
                self.cpu.init();
                None
            }
            Delivery::Sipi(vector) => {
                self.cpu.start_up(vector);
                None
            }
            // There is no system management mode.
            Delivery::Smi => None,
            Delivery::Nmi => {
                self.halted = false;
                self.cpu.nmi()
            }
            Delivery::Vector(vector) => {
                self.halted = false;
                self.cpu.interrupt(vector)
            }
        }
    }

    /// Runs it, to the end of its turn at most.
    fn run(&mut self, room: &mut Common, end: u64) -> VmExit {
        let (now, number) = (room.now(), self.number());
        let (mut due, mut horizon) = (room.next_deadline(), None);
        if let Some((pmu, core)) = self.on_core() {
            pmu.observe(core, Progress::Entered { tsc: Tsc(now) });
            let deadline = pmu.deadline(core).map(|due| due.0);
            due = earliest([due, deadline, pmu.interrupt_due().map(|due| due.0)]);
            horizon = pmu.horizon(core);
        }
        self.watch(horizon);
        self.cpu.set_cr8(room.chips().cr8(number));
        let exit = self
            .cpu
            .run(budget(now, end, due, horizon).min(room.most()));
        room.set_now(self.cpu.time());
        let cr8 = self.cpu.state().cr8.to_le_bytes()[0];
        if cr8 != room.chips().cr8(number) {
            room.chips_mut().set_cr8(number, cr8);
        }
        // The ends of its pieces are ours, and a tool that samples makes more of them.
        if !matches!(exit, VmExit::Budget | VmExit::Window | VmExit::Paused) {
            self.reports.tally.count_exit(exit_kind(exit));
        }
        exit
    }

    /// Tells the PMU what was executed, and that the guest has stopped.
    fn settle(&mut self, room: &mut Common) {
        let left = Progress::Left {
            tsc: Tsc(room.now()),
            halted: Ticks(0),
            ring: Some(Ring::from_cpl(self.cpu.state().cpl())),
        };
        // Before others get counters, as some may when the guest has stopped.
        self.count();
        if let Some((pmu, core)) = self.on_core() {
            pmu.observe(core, left);
        }
        self.take_samples(room);
    }

    /// Looks at the next instruction, if it may be one that is sampled.
    fn watch(&mut self, horizon: Option<u64>) {
        let samples = |pmu: &VcpuPmu| pmu.has_pebs() || pmu.ibs_runs();
        self.watched = None;
        if horizon == Some(1) && self.pmu.as_ref().is_some_and(samples) {
            self.watched = Watched::next(&self.cpu, &mut self.factory).map(Box::new);
        }
    }

    /// Tells the PMU what was executed.
    fn count(&mut self) {
        for ring in [Ring::Kernel, Ring::User] {
            let done = self.cpu.take_totals(ring);
            self.executed[ring as usize] += done.of(EventClass::Instructions);
            if let Some(watched) = &mut self.watched
                && done.of(EventClass::Instructions) == 1
            {
                watched.retired(self.cpu.state().rip);
            }
            if let Some((pmu, core)) = self.pmu.as_mut().zip(self.core.as_deref_mut())
                && done != emu::EventTotals::default()
            {
                pmu.observe(core, Progress::Executed { ring, done });
            }
        }
    }

    /// Takes the samples that are due.
    pub(super) fn take_samples(&mut self, room: &mut Common) {
        let Some((pmu, core)) = self.pmu.as_mut().zip(self.core.as_deref_mut()) else {
            return;
        };
        if !pmu.has_samples(Some(core)) {
            return;
        }
        let standing = Standing {
            id: self.id,
            apic_base: room.apic_base(self.id),
            now: room.now(),
            process: room.process(),
        };
        let watched = (self.watched.as_deref(), &mut self.factory);
        let mut moment = Stopped::new(&self.cpu, standing, &mut self.reports, watched);
        let Ok(()) = pmu.take_samples(Some(core), &mut moment);
        moment
            .into_written()
            .into_iter()
            .for_each(|range| room.note_written(range));
    }

    /// The guest may have set its TSC: its clock page goes by that.
    fn follow_tsc(&mut self, room: &mut Common) {
        let offset = self.cpu.state().msrs.tsc_offset;
        if offset == self.tsc_offset {
            return;
        }
        self.tsc_offset = offset;
        if let Some(write) = self.msrs.refresh(room.guest_time(offset)) {
            room.fill(&write);
        }
        let armed = room.chips_rdmsr(self.id, TSC_DEADLINE);
        if armed.is_some_and(|armed| armed != ChipAnswer::Value(0)) {
            let deadline = deadline_of(self.deadline, room.now(), offset);
            room.chips_wrmsr(self.id, TSC_DEADLINE, deadline);
        }
    }

    /// What an exit leads to.
    fn answer(&mut self, room: &mut Common, exit: VmExit) -> Step {
        let answer = match exit {
            VmExit::Budget | VmExit::Window | VmExit::Interrupted => return Step::On,
            VmExit::Paused if self.yields => return Step::Over,
            VmExit::Paused => return Step::On,
            VmExit::Halted => {
                self.halted = true;
                return Step::On;
            }
            VmExit::Rdmsr { index } => self.rdmsr(room, index),
            VmExit::Wrmsr { index, value } => self.wrmsr(room, index, value),
            VmExit::Rdpmc { index } => self.rdpmc(index),
            VmExit::IoIn { port, len, .. } => {
                if room.chips_read(port, &mut self.cpu.io_data()[..len]) {
                    return Step::On;
                }
                None
            }
            VmExit::IoOut { port, len, .. } => {
                if room.chips_write(port, &self.cpu.io_data()[..len]) {
                    return Step::On;
                }
                None
            }
            VmExit::MmioRead { address, len } => room.chips_load(self.id, address, len),
            VmExit::MmioWrite { address, data, len } => {
                if room.chips_store(self.id, address, &data[..len]) {
                    return Step::On;
                }
                None
            }
            _ => None,
        };
        let handled = match answer {
            Some(answer) => Handled::Answered(answer),
            None => {
                let handled = handle(exit, self.cpu.io_data(), room.platform());
                room.take_lines();
                room.take_platform_writes();
                handled
            }
        };
        match handled {
            Handled::RunsOn => Step::On,
            Handled::Answered(answer) => {
                self.cpu.answer(answer);
                let exit = match exit {
                    VmExit::Wrmsr { .. } => self.finish(room),
                    _ => None,
                };
                exit.map_or(Step::On, |exit| Step::Ended(self.end_of(exit)))
            }
            Handled::Ended(end) => {
                self.finish(room);
                Step::Ended(end)
            }
            Handled::Engine => Step::Ended(self.end_of(exit)),
        }
    }

    /// Has the instruction behind the last exit retire, before the guest is entered again:
    /// what it has started does not count it. A stop is an end, of a fault of its.
    fn finish(&mut self, room: &mut Common) -> Option<VmExit> {
        if !self.cpu.is_half_done() {
            return None;
        }
        let exit = self.cpu.run(1);
        room.set_now(self.cpu.time());
        self.count();
        self.take_samples(room);
        matches!(exit, VmExit::Shutdown | VmExit::Unimplemented { .. }).then_some(exit)
    }

    fn end_of(&self, exit: VmExit) -> VcpuEnd {
        match exit {
            VmExit::Shutdown => VcpuEnd::TripleFault {
                rip: Some(self.cpu.state().rip),
            },
            VmExit::Unimplemented { rip } => VcpuEnd::Unimplemented {
                rip,
                what: what(self.cpu.missing()),
            },
            other => VcpuEnd::Stuck(format!("{other:?} is no exit of the emulator's")),
        }
    }

    fn rdmsr(&mut self, room: &mut Common, index: u32) -> Option<Answer> {
        let offset = self.cpu.state().msrs.tsc_offset;
        let holder = Holder {
            cpu: &self.cpu,
            msrs: &mut self.msrs,
            time: room.guest_time(offset),
            x2apic: room.apic_base(self.id) & X2APIC == X2APIC,
        };
        let was_locked_out = self.pmu.as_ref().and_then(locked_out);
        let pmu = self.pmu.as_mut().zip(self.core.as_deref_mut());
        let Ok(access) = self.msr_traps.rdmsr(&holder, pmu, index);
        if let Some(access) = access {
            self.reports.event(self.id, access.event);
            self.note_lockout(was_locked_out);
            self.take_samples(room);
            return Some(access.answer);
        }
        match room.chips_rdmsr(self.id, index) {
            // Deadlines are in the time of the chips, and 0 is none.
            Some(ChipAnswer::Value(value)) if index == TSC_DEADLINE && value != 0 => {
                Some(Answer::Msr(self.deadline))
            }
            Some(ChipAnswer::Value(value)) => Some(Answer::Msr(value)),
            Some(_) => Some(Answer::MsrFault),
            None => self.msrs.read(index).map(Answer::Msr),
        }
    }

    fn wrmsr(&mut self, room: &mut Common, index: u32, value: u64) -> Option<Answer> {
        let offset = self.cpu.state().msrs.tsc_offset;
        let time = room.guest_time(offset);
        let mut holder = Holder {
            cpu: &self.cpu,
            msrs: &mut self.msrs,
            time,
            x2apic: room.apic_base(self.id) & X2APIC == X2APIC,
        };
        let was_locked_out = self.pmu.as_ref().and_then(locked_out);
        let pmu = self.pmu.as_mut().zip(self.core.as_deref_mut());
        let Ok(access) = self.msr_traps.wrmsr(&mut holder, pmu, index, value);
        if let Some(access) = access {
            self.reports.event(self.id, access.event);
            self.note_lockout(was_locked_out);
            self.take_samples(room);
            return Some(access.answer);
        }
        let written = match index {
            TSC_DEADLINE if value != 0 => {
                self.deadline = value;
                deadline_of(value, room.now(), offset)
            }
            _ => value,
        };
        match room.chips_wrmsr(self.id, index, written) {
            Some(ChipAnswer::Gp) => return Some(Answer::MsrFault),
            Some(_) => return Some(Answer::Done),
            None => {}
        }
        match self.msrs.write(index, value, time) {
            Written::Done => Some(Answer::Done),
            Written::Fills(write) => {
                room.fill(&write);
                Some(Answer::Done)
            }
            Written::Gp => None,
        }
    }

    fn rdpmc(&mut self, index: u32) -> Option<Answer> {
        let ring = Ring::from_cpl(self.cpu.state().cpl());
        let presented = presented(self.cpu.state());
        let (pmu, core) = self.pmu.as_mut().zip(self.core.as_deref_mut())?;
        let was_locked_out = locked_out(pmu);
        let caller = Caller {
            layer: pmu.claims().layer(ring, false),
            presented,
        };
        let outcome = pmu.rdpmc(core, index, caller);
        let event = TrapEvent::Rdpmc {
            index,
            ring,
            outcome,
        };
        self.reports.event(self.id, event);
        self.note_lockout(was_locked_out);
        match outcome {
            ReadOutcome::Value(value) => Some(Answer::Msr(value)),
            ReadOutcome::Merge { .. } | ReadOutcome::Gp | ReadOutcome::NotHandled => None,
        }
    }

    /// Reports that it may not run for some time from now on.
    fn note_lockout(&mut self, before: Option<Tsc>) {
        let until = self.pmu.as_ref().and_then(locked_out);
        if let Some(until) = until
            && before != Some(until)
        {
            self.reports.event(self.id, TrapEvent::LockedOut { until });
        }
    }
}

/// The state of a PMU that has its core to itself, on which it stays.
fn settled(pmu: &mut VcpuPmu, core: Option<&mut CorePmu>) -> Option<PmuState> {
    pmu.settle(core).ok()?;
    pmu.save().ok()
}

/// Until when it may not run, for having presented too many wrong cookies.
fn locked_out(pmu: &VcpuPmu) -> Option<Tsc> {
    pmu.claims().locked_out_until()
}

/// When a TSC that is `offset` before virtual time `now` comes to a deadline: at once, if it
/// has (SDM vol. 3A, 12.5.4.1).
fn deadline_of(deadline: u64, now: u64, offset: u64) -> u64 {
    let tsc = now.wrapping_add(offset);
    // 0 is "not set".
    now.saturating_add(deadline.saturating_sub(tsc)).max(1)
}

/// What the emulator lacks, in words.
fn what(missing: Option<Missing>) -> String {
    let of_kvm = |what| format!("{what}, for kernels of 16 and 32 bits: give --engine kvm");
    match missing {
        Some(Missing::Instruction(code)) => format!(
            "the instruction {code:?}, which its CPUID announces: a bug of Umpire's; please report \
             this line, and which program or kernel has the instruction"
        ),
        Some(Missing::TaskGate) => of_kvm("task gates and task switches"),
        Some(Missing::LegacySyscall) => of_kvm("AMD's SYSCALL outside of long mode"),
        Some(Missing::Virtual8086) => of_kvm("virtual 8086 mode"),
        None => "something: a bug of Umpire's; please report this line".to_owned(),
    }
}
