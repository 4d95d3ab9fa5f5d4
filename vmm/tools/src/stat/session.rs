//! A context that counts, and its registers.

use std::time::Duration;

use perfmon::VirtualPmd;
use perfmon_abi::consts::{PFM_REGFL_READ_RESET, PFM_SETFL_TIME_SWITCH};
use perfmon_abi::wire::{Errno, Refusal};
use perfmon_abi::{PmcArg, PmdArg, SetDesc, SetInfo, Timespec};
use umpire_perfmon::{Call, ContextHandle};

use super::events::{Asked, Source};
use super::reading::{Count, How, Reading, SetReading};
use super::schedule::Place;
use crate::targets::Target;
use crate::{ToolError, Vm, refused, registers};

/// What a context is to count.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job<'a> {
    pub(super) vm: &'a Vm,
    pub(super) events: &'a [Asked],
    /// The sets; none if only quantities are asked for.
    pub(super) sets: &'a [Vec<Place>],
    /// How long a set is active, if there are several.
    pub(super) turn: Duration,
    /// Of its contexts, beside those of their targets.
    pub(super) flags: u32,
}

/// So long may a set count between its time and its counts without standing out among
/// turns of a millisecond.
const STEADY_NS: u64 = 100_000;

/// Times that both are read, at most, where the guest runs on for longer than that.
const MOST_READS: usize = 5;

/// A register and the event that it counts.
type Register = (usize, PmdArg);

/// A context that is attached.
#[derive(Debug)]
pub(super) struct CountingSession {
    pub(super) target: Target,
    pub(super) handle: ContextHandle,
    /// Registers of each set.
    sets: Vec<Vec<Register>>,
    quantities: Vec<Register>,
    /// The vCPU's run time, if the VM reports it.
    run_time: Option<PmdArg>,
    /// What the registers of the sets had before they were reset, one after
    /// the other.
    before: Vec<u64>,
}

impl CountingSession {
    /// Attaches a context to `target`; it does not count yet.
    ///
    /// # Errors
    /// What the VM says. EBUSY: it has no counters for it, or another context is
    /// attached there. EINVAL: an event cannot be counted.
    pub(super) fn open(job: &Job<'_>, target: Target, quantities: bool) -> Result<Self, Refusal> {
        let vm = job.vm;
        let handle = vm.client.create(target.flags() | job.flags, None, &[])?;
        let several = job.sets.len() > 1;
        let sets: Vec<SetDesc> = (0..if several { job.sets.len() } else { 0 })
            .map(|index| set_of(index, job.turn))
            .collect();
        for part in sets.chunks(vm.at_once::<SetDesc>()) {
            let mut call = Call::CreateEvtsets(part.to_vec());
            vm.client.call(&handle, &mut call)?;
        }
        let mut session = Self {
            target,
            handle,
            sets: Vec::new(),
            quantities: Vec::new(),
            run_time: run_time(vm, target),
            before: Vec::new(),
        };
        let mut pmcs = Vec::new();
        for (index, set) in job.sets.iter().enumerate() {
            session.sets.push(program(job, index, set, &mut pmcs)?);
        }
        session.before = vec![0; session.sets.iter().map(Vec::len).sum()];
        for part in pmcs.chunks(vm.at_once::<PmcArg>()) {
            let mut call = Call::WritePmcs(part.to_vec());
            vm.client.call(&session.handle, &mut call)?;
        }
        if quantities {
            let each = job.events.iter().enumerate();
            session.quantities = each.filter_map(quantity).collect();
        }
        let mut load = Call::Load(target.load());
        vm.client.call(&session.handle, &mut load)?;
        Ok(session)
    }

    /// Begins to count.
    pub(super) fn start(&self, vm: &Vm) -> Result<(), ToolError> {
        let mut call = Call::Start(None);
        vm.client
            .call(&self.handle, &mut call)
            .map_err(refused(format!("starting to count on {}", self.target)))
    }

    /// Stops counting; the registers stay as they are.
    pub(super) fn stop(&self, vm: &Vm) -> Result<(), Refusal> {
        vm.client.call(&self.handle, &mut Call::Stop)
    }

    /// Leaves the target to others. One that has ended, or is gone, is left
    /// already.
    pub(super) fn detach(&self, vm: &Vm) {
        let _ = vm.client.call(&self.handle, &mut Call::Unload);
    }

    /// The registers now. `reset` makes the VMM say anew from then on how they are
    /// counted; their values go on.
    pub(super) fn read(&mut self, vm: &Vm, reset: bool) -> Result<Reading, Refusal> {
        let times = |session: &mut Self| session.active_times(vm);
        let counts = |session: &mut Self, times: &[u64]| session.read_counts(vm, times, reset);
        // What was reset would not say again how it was counted.
        let tries = if reset || self.sets.len() < 2 {
            1
        } else {
            MOST_READS
        };
        read_at_once(self, tries, times, counts)
    }

    /// Nanoseconds that each set was active.
    fn active_times(&self, vm: &Vm) -> Result<Vec<u64>, Refusal> {
        let mut times = Vec::new();
        let asked: Vec<SetInfo> = (0..self.sets.len()).map(info_of).collect();
        for part in asked.chunks(vm.at_once::<SetInfo>()) {
            let mut call = Call::GetinfoEvtsets(part.to_vec());
            vm.client.call(&self.handle, &mut call)?;
            if let Call::GetinfoEvtsets(part) = call {
                let active_ns = |info: &SetInfo| info.act_duration.to_ns().unwrap_or(0);
                times.extend(part.iter().map(active_ns));
            }
        }
        Ok(times)
    }

    /// The registers now, with the sets' `times` from just before.
    fn read_counts(&mut self, vm: &Vm, times: &[u64], reset: bool) -> Result<Reading, Refusal> {
        let flags = if reset { PFM_REGFL_READ_RESET } else { 0 };
        let counter = |(_, register): &Register| PmdArg { flags, ..*register };
        let quantities = self.quantities.iter().map(|(_, register)| *register);
        let registers = self.sets.iter().flatten().map(counter);
        let registers = registers.chain(quantities).chain(self.run_time);
        let registers: Vec<PmdArg> = registers.collect();
        let mut values = Vec::new();
        for part in registers.chunks(vm.at_once::<PmdArg>()) {
            let mut call = Call::ReadPmds(part.to_vec());
            vm.client.call(&self.handle, &mut call)?;
            if let Call::ReadPmds(part) = call {
                values.extend(part);
            }
        }
        for (value, before) in values.iter_mut().zip(&mut self.before) {
            value.value = value.value.wrapping_add(*before);
            if reset {
                *before = value.value;
            }
        }
        let mut values = values.iter();
        let mut count = |(event, _): &Register| {
            let register = values.next()?;
            Some(Count {
                event: *event,
                value: register.value,
                how: How::of(register.flags),
            })
        };
        let mut sets = Vec::new();
        for (set, active_ns) in self.sets.iter().zip(times) {
            sets.push(SetReading {
                active_ns: *active_ns,
                counts: set.iter().filter_map(&mut count).collect(),
            });
        }
        let quantities = self.quantities.iter().filter_map(&mut count).collect();
        let run_time = self.run_time.and_then(|_| values.next());
        let run_time = run_time.filter(|register| How::of(register.flags) == How::Known);
        Ok(Reading {
            sets,
            quantities,
            run_ns: run_time.map(|register| register.value),
        })
    }
}

/// Times and counts come in two answers, and the guest runs on between them. A set that
/// counted there for long has a rate that is no phase of the program's, so both are read
/// again, up to so many `tries` in all.
fn read_at_once<S, R>(
    from: &mut S,
    tries: usize,
    times: impl Fn(&mut S) -> Result<Vec<u64>, Refusal>,
    counts: impl Fn(&mut S, &[u64]) -> Result<R, Refusal>,
) -> Result<R, Refusal> {
    let mut before = times(from)?;
    let mut found = counts(from, &before)?;
    for _ in 1..tries {
        let after = times(from)?;
        let between = after.iter().sum::<u64>().abs_diff(before.iter().sum());
        if between <= STEADY_NS {
            break;
        }
        before = after;
        found = counts(from, &before)?;
    }
    Ok(found)
}

/// A vCPU's run time: the measure of its sets' times.
fn run_time(vm: &Vm, target: Target) -> Option<PmdArg> {
    let num = VirtualPmd::RunTime.pmd();
    let reported = vm.model.virtual_pmds.iter().any(|it| it.pmd == num);
    let register = PmdArg {
        num,
        ..PmdArg::default()
    };
    (reported && matches!(target, Target::Vcpu(_))).then_some(register)
}

/// The PMDs of a set, whose PMCs go to `pmcs`.
fn program(
    job: &Job<'_>,
    index: usize,
    set: &[Place],
    pmcs: &mut Vec<PmcArg>,
) -> Result<Vec<Register>, Refusal> {
    let id = u16::try_from(index).unwrap_or(u16::MAX);
    let mut registers = Vec::new();
    for (event, counter) in set {
        let request = job.events.get(*event).and_then(Asked::request);
        let programmed = request.and_then(|it| registers::program(&job.vm.pmu, *counter, it));
        let Some((pmc, value)) = programmed else {
            return Err(Refusal::new(
                Errno::EINVAL,
                "no register can ask for the event",
            ));
        };
        pmcs.push(PmcArg {
            num: pmc.num,
            set: id,
            value,
            ..PmcArg::default()
        });
        let register = PmdArg {
            num: pmc.pmd,
            set: id,
            ..PmdArg::default()
        };
        registers.push((*event, register));
    }
    Ok(registers)
}

fn quantity((event, asked): (usize, &Asked)) -> Option<Register> {
    let Source::Quantity { pmd, .. } = asked.source else {
        return None;
    };
    let register = PmdArg {
        num: pmd,
        ..PmdArg::default()
    };
    Some((event, register))
}

fn set_of(index: usize, turn: Duration) -> SetDesc {
    SetDesc {
        id: u16::try_from(index).unwrap_or(u16::MAX),
        flags: PFM_SETFL_TIME_SWITCH,
        timeout: Timespec {
            sec: i64::try_from(turn.as_secs()).unwrap_or(i64::MAX),
            nsec: turn.subsec_nanos().into(),
        },
        ..SetDesc::default()
    }
}

fn info_of(index: usize) -> SetInfo {
    SetInfo {
        id: u16::try_from(index).unwrap_or(u16::MAX),
        ..SetInfo::default()
    }
}

#[cfg(test)]
mod tests {
    use super::read_at_once;

    /// A set that is active for so long while nobody reads, `gaps` between its time and
    /// its counts. What is read: its time, its count, and how often both were.
    fn check(gaps: &[u64], tries: usize, expected: (u64, u64, usize)) {
        let mut now = (0, 0);
        let found = read_at_once(
            &mut now,
            tries,
            |(time, _)| Ok(vec![*time]),
            |(time, reads), times| {
                *time += gaps[*reads];
                *reads += 1;
                Ok((times[0], *time, *reads))
            },
        );
        assert_eq!(found, Ok(expected), "{gaps:?}");
    }

    #[test]
    fn times_and_counts_are_of_one_moment() {
        check(&[100_000, 7], 5, (0, 100_000, 1));
        check(&[20_000_000, 30_000], 5, (20_000_000, 20_030_000, 2));
        check(&[200_000, 200_000, 10], 5, (400_000, 400_010, 3));
        // A machine that has no time for it does not keep the tool for ever.
        check(&[200_000; 3], 3, (400_000, 600_000, 3));
        check(&[200_000; 3], 1, (0, 200_000, 1));
    }
}
