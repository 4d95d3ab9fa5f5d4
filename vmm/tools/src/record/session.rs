//! A context that samples, and its buffer.

use std::os::fd::OwnedFd;

use perfmon::VirtualPmd;
use perfmon_abi::compact::Cursor;
use perfmon_abi::consts::{
    COMPACT_FORMAT, PFM_FL_NO_ASK, PFM_FL_PREEMPTIBLE, PFM_MSG_END, PFM_MSG_PREEMPTED,
    PFM_MSG_RESTORED, PFM_MSG_THROTTLED, PFM_SETFL_EXCL_IDLE, UMPIRE_COMPACT_FL_CHAIN,
    UMPIRE_COMPACT_FL_STACK_SHIFT, UMPIRE_COMPACT_FL_TASK,
};
use perfmon_abi::wire::{Errno, Refusal};
use perfmon_abi::{CompactArg, Message, PmdArg, Record as _, SetDesc, SetInfo};
use pmu_model::Provenance;
use umpire_perfmon::{Call, ContextHandle, Event, Mapping, Wait};

use super::frequency::Control;
use super::plan::SamplingPlan;
use super::samples::{Clock, record};
use crate::profile::{Loss, LossKind, Record};
use crate::stat::reading::How;
use crate::targets::{PREEMPTIBLE_HINT, Target};
use crate::{ToolError, Vm, is_gone, refused};

/// What to do where a VM has no stacks.
const STACK_HINT: &str = "; this VM records no stacks, since its umpire is older than this one: \
                          record with -g, or start the guest with this umpire";

/// What the records of a context are made with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scene<'a> {
    pub(super) vm: &'a Vm,
    pub(super) plan: &'a SamplingPlan,
    pub(super) clock: Clock,
    /// Of contexts, beside those of their targets.
    pub(super) flags: u32,
    /// Samples tell their callers.
    pub(super) chains: bool,
    /// Bytes of the program's stack that samples have.
    pub(super) stack: u16,
    /// Bytes of a sampling buffer.
    pub(super) buffer: u64,
}

/// An event's period, and what has been seen of it.
#[derive(Clone, Copy, Debug)]
struct Pace {
    control: Option<Control>,
    period: u64,
    /// Events in samples since the last look.
    sampled: u64,
    /// Events since the last sample, at the last look.
    partial: u64,
}

/// When others took the counters.
#[derive(Clone, Copy, Debug)]
struct Taken {
    /// By the TSC, which is a core's time.
    tsc: u64,
    /// By the vCPU's run time, as far as that is known.
    run_ns: Option<u64>,
}

/// A context that is attached.
#[derive(Debug)]
pub(super) struct SamplingSession {
    target: Target,
    handle: ContextHandle,
    mapping: Mapping,
    cursor: Cursor,
    paces: Vec<Pace>,
    active_ns: u64,
    /// TSC of the last sample.
    latest: u64,
    /// What the VM said last of its clock, where time is virtual.
    heard: u64,
    /// Others have the counters.
    taken: Option<Taken>,
    /// Nothing more will come.
    over: bool,
}

impl SamplingSession {
    /// Attaches a context to `target`; it does not sample yet.
    ///
    /// # Errors
    /// The VM refuses.
    pub(super) fn open(scene: &Scene<'_>, target: Target) -> Result<Self, ToolError> {
        let opened = Self::try_open(scene, target);
        opened.map_err(|refusal| {
            let hint = match refusal.errno {
                Errno::EBUSY if Self::preemptible_helps(scene, target) => PREEMPTIBLE_HINT,
                Errno::EINVAL if Self::works_without_stack(scene, target) => STACK_HINT,
                _ => "",
            };
            let refusal = Refusal::new(refusal.errno, format!("{}{hint}", refusal.reason));
            ToolError::refused(format!("{target} cannot be sampled"), refusal)
        })
    }

    /// Whether a context that others may take counters from would be admitted: there
    /// are further reasons for EBUSY than counters.
    fn preemptible_helps(scene: &Scene<'_>, target: Target) -> bool {
        if scene.flags & PFM_FL_PREEMPTIBLE != 0 {
            return false;
        }
        let trial = Scene {
            flags: scene.flags | PFM_FL_PREEMPTIBLE | PFM_FL_NO_ASK,
            ..*scene
        };
        let opened = Self::try_open(&trial, target);
        opened.is_ok_and(|mut session| {
            session.stop(&trial);
            true
        })
    }

    /// Whether the VM would be content without stacks: it is of before there were any.
    fn works_without_stack(scene: &Scene<'_>, target: Target) -> bool {
        let trial = Scene { stack: 0, ..*scene };
        let opened = (scene.stack > 0).then(|| Self::try_open(&trial, target));
        opened.is_some_and(|opened| {
            opened.is_ok_and(|mut session| {
                session.stop(&trial);
                true
            })
        })
    }

    fn try_open(scene: &Scene<'_>, target: Target) -> Result<Self, Refusal> {
        let Scene { vm, plan, .. } = scene;
        let flags = target.flags() | scene.flags;
        let chains = if scene.chains {
            UMPIRE_COMPACT_FL_CHAIN
        } else {
            0
        };
        let argument = CompactArg {
            buf_size: scene.buffer,
            block_size: 0,
            flags: UMPIRE_COMPACT_FL_TASK
                | chains
                | u32::from(scene.stack) << UMPIRE_COMPACT_FL_STACK_SHIFT,
        };
        let argument = argument.to_bytes();
        let handle = vm.client.create(flags, Some(COMPACT_FORMAT), &argument)?;
        if let Target::Core(_) = target {
            // Periods adapt to the time of vCPUs. By an idle core's own time the event
            // would seem rare, the period would shrink, and the few events that a look
            // causes would be sampled, which causes more of them.
            let mut call = Call::CreateEvtsets(vec![SetDesc {
                flags: PFM_SETFL_EXCL_IDLE,
                ..SetDesc::default()
            }]);
            vm.client.call(&handle, &mut call)?;
        }
        let mapping = handle.map_buffer()?;
        let mut call = Call::WritePmcs(plan.pmcs());
        vm.client.call(&handle, &mut call)?;
        let pace = |_: &super::plan::Sampled| {
            let control = plan.control(vm.model.tsc_khz);
            let period = match (plan.sampling, control) {
                (crate::profile::Sampling::Period(period), _) => period,
                (_, Some(control)) => control.period(),
                (_, None) => 1,
            };
            Pace {
                control,
                period,
                sampled: 0,
                partial: 0,
            }
        };
        let session = Self {
            target,
            handle,
            mapping,
            cursor: Cursor::default(),
            paces: plan.events.iter().map(pace).collect(),
            active_ns: 0,
            latest: scene.clock.start,
            heard: scene.clock.start,
            taken: None,
            over: false,
        };
        let all: Vec<usize> = (0..session.paces.len()).collect();
        session.write_periods(scene, &all)?;
        let mut load = Call::Load(target.load());
        vm.client.call(&session.handle, &mut load)?;
        Ok(session)
    }

    pub(super) fn fd(&self) -> &OwnedFd {
        &self.handle.fd
    }

    pub(super) fn is_over(&self) -> bool {
        self.over
    }

    /// Begins to sample.
    pub(super) fn start(&self, vm: &Vm) -> Result<(), ToolError> {
        let mut call = Call::Start(None);
        vm.client
            .call(&self.handle, &mut call)
            .map_err(refused(format!("starting to sample {}", self.target)))
    }

    /// Samples nothing until it is started again. One that has ended in this moment samples
    /// nothing either.
    pub(super) fn pause(&self, scene: &Scene<'_>) {
        let _ = scene.vm.client.call(&self.handle, &mut Call::Stop);
    }

    fn write_periods(&self, scene: &Scene<'_>, events: &[usize]) -> Result<(), Refusal> {
        let (Target::Vcpu(number) | Target::Core(number)) = self.target;
        let pmds = events.iter().filter_map(|event| {
            let (sampled, pace) = (scene.plan.events.get(*event)?, self.paces.get(*event)?);
            // Carta's generator stands still at 0.
            Some(
                scene
                    .plan
                    .pmd(sampled, pace.period, number.saturating_add(1)),
            )
        });
        let mut call = Call::WritePmds(pmds.collect());
        scene.vm.client.call(&self.handle, &mut call)
    }

    /// The samples since the last time.
    ///
    /// # Errors
    /// The buffer makes no sense.
    pub(super) fn drain(&mut self, scene: &Scene<'_>) -> Result<Vec<Record>, ToolError> {
        let mapping = &self.mapping;
        let mut copy = |at: usize, to: &mut [u8]| match mapping.copy(at, to.len()) {
            Some(bytes) => {
                to.copy_from_slice(&bytes);
                true
            }
            None => false,
        };
        let batch = self.cursor.follow(&mut copy).map_err(|error| {
            ToolError::Input(format!("the sampling buffer of {}: {error}", self.target))
        })?;
        let periods: Vec<u64> = self.paces.iter().map(|pace| pace.period).collect();
        let mut records = Vec::with_capacity(batch.samples.len());
        for sample in batch.samples {
            if let Some(entry) = &sample.entry {
                self.latest = self.latest.max(entry.tstamp);
            }
            let Some(record) = record(sample, &scene.clock, &periods) else {
                continue;
            };
            if let Record::Sample(sample) = &record
                && let Some(pace) = self.paces.get_mut(usize::from(sample.event))
            {
                pace.sampled = pace.sampled.saturating_add(sample.period);
            }
            records.push(record);
        }
        if batch.lost > 0 {
            // They were to come before the next ones.
            records.push(self.loss(scene, self.latest, LossKind::Full(batch.lost)));
        }
        Ok(records)
    }

    /// What was lost until the TSC was `end`.
    fn loss(&self, scene: &Scene<'_>, end: u64, kind: LossKind) -> Record {
        Record::Loss(Loss {
            time_ns: scene.clock.ns(end),
            vm: scene.vm.machine.pid,
            vcpu: match self.target {
                Target::Vcpu(number) => Some(number),
                Target::Core(_) => None,
            },
            kind,
        })
    }

    /// Takes in the messages that have come, and the losses that they report.
    ///
    /// # Errors
    /// The VM refuses to go on.
    pub(super) fn messages(&mut self, scene: &Scene<'_>) -> Result<Vec<Record>, ToolError> {
        let mut losses = Vec::new();
        while !self.over {
            match self.handle.read_message(Wait::No) {
                Ok(Event::Message(message)) => losses.extend(self.message(scene, &message)?),
                Ok(Event::Overflow) => {}
                Ok(Event::Nothing) => break,
                Ok(Event::Gone) => self.over = true,
                // The VM has ended, maybe before it had read all.
                Err(refusal) if is_gone(&refusal) => self.over = true,
                Err(refusal) => {
                    return Err(ToolError::refused(
                        format!("sampling {}", self.target),
                        refusal,
                    ));
                }
            }
        }
        Ok(losses)
    }

    /// The moment by the clock that samples have: the host's TSC, or the VM's where time is
    /// virtual. Of a VM that says nothing any more it is the last that was heard of it.
    pub(super) fn now(&mut self, scene: &Scene<'_>) -> u64 {
        if !scene.vm.model.virtual_time {
            return crate::sys::rdtsc();
        }
        let heard = self.quantity(scene, VirtualPmd::Tsc).unwrap_or(0);
        self.heard = self.heard.max(heard).max(self.latest);
        self.heard
    }

    /// The vCPU's run time, if it is known.
    fn run_ns(&self, scene: &Scene<'_>) -> Option<u64> {
        self.quantity(scene, VirtualPmd::RunTime)
    }

    /// A quantity of the VMM, if it is known.
    fn quantity(&self, scene: &Scene<'_>, which: VirtualPmd) -> Option<u64> {
        let mut call = Call::ReadPmds(vec![PmdArg {
            num: which.pmd(),
            ..PmdArg::default()
        }]);
        scene.vm.client.call(&self.handle, &mut call).ok()?;
        let Call::ReadPmds(values) = call else {
            return None;
        };
        let known = values.first().filter(|it| How::of(it.flags) == How::Known);
        known.map(|register| register.value)
    }

    /// It is the end, and others still have the counters: for how long nothing
    /// was sampled, or that nobody knows.
    pub(super) fn unrestored(&mut self, scene: &Scene<'_>) -> Option<Result<Record, String>> {
        let taken = self.taken.take()?;
        let now = self.now(scene);
        let ns = match self.target {
            Target::Core(_) => Some(scene.clock.span(now.saturating_sub(taken.tsc))),
            Target::Vcpu(_) => blind_ns(taken.run_ns, self.run_ns(scene)),
        };
        let record = |ns| self.loss(scene, now, LossKind::Blind(ns));
        let note = || {
            let target = self.target;
            format!("{target}: others still have its counters; nobody reports for how long")
        };
        Some(ns.map(record).ok_or_else(note))
    }

    fn message(&mut self, scene: &Scene<'_>, message: &Message) -> Result<Vec<Record>, ToolError> {
        let now = self.now(scene);
        Ok(match message.kind {
            PFM_MSG_END => {
                self.over = true;
                Vec::new()
            }
            PFM_MSG_RESTORED => {
                self.taken = None;
                let [blind_ns, _] = message.ovfl_pmds;
                vec![self.loss(scene, now, LossKind::Blind(blind_ns))]
            }
            PFM_MSG_THROTTLED => {
                match scene.vm.client.call(&self.handle, &mut Call::Restart) {
                    // It was not masked after all, or has ended.
                    Ok(()) => {}
                    Err(refusal) if is_gone(&refusal) => self.over = true,
                    Err(refusal) if refusal.errno == Errno::EBUSY => {}
                    Err(refusal) => {
                        let what = format!("going on with {}", self.target);
                        return Err(ToolError::refused(what, refusal));
                    }
                }
                let now = self.now(scene);
                let mut losses = vec![self.loss(scene, now, LossKind::Throttled(1))];
                // The last sample came right before. For a vCPU nobody knows how
                // much of this it ran, and other blind times are in run time.
                if matches!(self.target, Target::Core(_)) {
                    let ns = scene.clock.span(now.saturating_sub(self.latest));
                    losses.push(self.loss(scene, now, LossKind::Blind(ns)));
                }
                losses
            }
            // RESTORED will say for how long, if it comes.
            PFM_MSG_PREEMPTED => {
                if self.taken.is_none() {
                    self.taken = Some(Taken {
                        tsc: now,
                        run_ns: self.run_ns(scene),
                    });
                }
                Vec::new()
            }
            _ => Vec::new(),
        })
    }

    /// Looks at the counters: how they are counted, and whether the periods are
    /// right. Returns what was learned.
    ///
    /// # Errors
    /// The VM refuses.
    pub(super) fn look(
        &mut self,
        scene: &Scene<'_>,
    ) -> Result<Vec<(usize, Provenance)>, ToolError> {
        match self.try_look(scene) {
            Ok(learned) => Ok(learned),
            // The message that says so comes, or has come.
            Err(refusal) if is_gone(&refusal) => {
                self.over = true;
                Ok(Vec::new())
            }
            Err(refusal) => Err(ToolError::refused(
                format!("looking at the counters of {}", self.target),
                refusal,
            )),
        }
    }

    fn try_look(&mut self, scene: &Scene<'_>) -> Result<Vec<(usize, Provenance)>, Refusal> {
        let mut info = Call::GetinfoEvtsets(vec![SetInfo::default()]);
        scene.vm.client.call(&self.handle, &mut info)?;
        let registers = scene.plan.events.iter().map(|event| PmdArg {
            num: event.pmd,
            ..PmdArg::default()
        });
        let mut read = Call::ReadPmds(registers.collect());
        scene.vm.client.call(&self.handle, &mut read)?;
        let (Call::GetinfoEvtsets(info), Call::ReadPmds(values)) = (info, read) else {
            return Ok(Vec::new());
        };
        let active = info.first().and_then(|info| info.act_duration.to_ns());
        let active = active.unwrap_or(self.active_ns);
        let passed = active.saturating_sub(self.active_ns);
        self.active_ns = active;
        let mut learned = Vec::new();
        let mut changed = Vec::new();
        for ((event, pace), value) in self.paces.iter_mut().enumerate().zip(&values) {
            if let How::Counted(provenance) = How::of(value.flags) {
                learned.push((event, provenance));
            }
            // Since the last sample: the counter began at its last reset value.
            let partial = value.value.wrapping_sub(value.last_reset_val);
            let events = (pace.sampled + partial).saturating_sub(pace.partial);
            (pace.sampled, pace.partial) = (0, partial);
            let adjusted = pace
                .control
                .as_mut()
                .and_then(|it| it.adjust(events, passed));
            if let Some(period) = adjusted {
                pace.period = period;
                // A period begins anew.
                pace.partial = 0;
                changed.push(event);
            }
        }
        if !changed.is_empty() {
            self.write_periods(scene, &changed)?;
        }
        Ok(learned)
    }

    /// Sampling is over; what is in the buffer stays there.
    pub(super) fn stop(&mut self, scene: &Scene<'_>) {
        if !self.over {
            // One that has ended in this moment takes no more samples either.
            let _ = scene.vm.client.call(&self.handle, &mut Call::Stop);
            let _ = scene.vm.client.call(&self.handle, &mut Call::Unload);
        }
    }
}

/// What a vCPU ran between two times, if both are known.
fn blind_ns(from: Option<u64>, to: Option<u64>) -> Option<u64> {
    Some(to?.saturating_sub(from?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blind_time_is_the_difference_of_known_times() {
        assert_eq!(blind_ns(Some(30), Some(100)), Some(70));
        assert_eq!(blind_ns(Some(30), Some(20)), Some(0));
        assert_eq!(blind_ns(None, Some(20)), None);
        assert_eq!(blind_ns(Some(30), None), None);
    }
}
