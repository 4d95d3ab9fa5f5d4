//! A profile for the Firefox Profiler (profiler.firefox.com), in its "processed
//! profile format".

#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap};
use std::io::{self, Write};
use std::time::Duration;

use fxprof_processed_profile::{
    CategoryColor, CategoryHandle, CpuDelta, Frame, FrameFlags, FrameInfo, MarkerFieldFlags,
    MarkerFieldFormat, MarkerTiming, ProcessHandle, Profile, ReferenceTimestamp, SamplingInterval,
    StackHandle, StaticSchemaMarker, StaticSchemaMarkerField, StringHandle, ThreadHandle,
    Timestamp,
};
use serde::Serialize;
use serde_json::ser::Formatter;

use super::location::CodeLocation;
use super::names::Names;
use super::paths::{Callers, PathId, Paths};
use super::plain::named;
use super::programs::TaskId;
use super::record::{Filter, Header, Loss, LossKind, Record, Ring, Sample, Sampling, Sink};
use super::stacks::{TotalWeight, Weight};

/// The profiler shows a main thread under its process's name.
const MAIN: bool = false;

/// Whose samples a thread of the profile has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Track {
    /// A thread of the guest, by its process's number, its own, and when it began: numbers are
    /// given again, and a thread that takes another name is the same one.
    Thread(u32, u32, u64),
    /// One of number 0, which the idle threads of all CPUs share.
    Idle(TaskId),
}

/// A process of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Process {
    /// By its number and when its first thread began.
    Began(u32, u64),
    /// By its number and name: of its first thread nothing is known.
    Named(u32, String),
}

/// A thread of the profile that is one of the guest's.
#[derive(Clone, Copy, Debug)]
struct Known {
    thread: ThreadHandle,
    process: ProcessHandle,
    /// What it was called at its newest sample.
    task: TaskId,
    newest_ns: u64,
}

/// Builds the profile: a process for each process of the guest, a thread for each of its
/// threads; for what is of no known task, a process for each VM and a thread for each vCPU;
/// and a marker for each loss.
#[derive(Debug)]
pub struct Firefox<'a> {
    filter: &'a Filter,
    paths: Paths<'a>,
    weight: Weight,
    profile: Profile,
    vm_name: String,
    vms: HashMap<u32, ProcessHandle>,
    processes: HashMap<Process, ProcessHandle>,
    /// When first threads of processes began, by numbers, ascending.
    first_threads: HashMap<u32, BTreeSet<u64>>,
    threads: HashMap<Track, Known>,
    vcpus: HashMap<(u32, Option<u32>), ThreadHandle>,
    stacks: HashMap<(ThreadHandle, Option<Ring>, PathId), Option<StackHandle>>,
    categories: [CategoryHandle; 3],
    samples: u64,
    total: TotalWeight,
    large: LargeWeights,
}

impl<'a> Firefox<'a> {
    /// No samples yet, of `sampling` in the file with `header`.
    #[must_use]
    pub fn new(
        header: &Header,
        sampling: Sampling,
        filter: &'a Filter,
        names: &'a Names,
        weight: Weight,
    ) -> Self {
        let began = Duration::from_nanos(header.start_unix_ns);
        let mut profile = Profile::new(
            "Umpire",
            ReferenceTimestamp::from_duration_since_unix_epoch(began),
            interval(sampling),
        );
        if !header.host.is_empty() {
            profile.set_os_name(&header.host);
        }
        profile.set_symbolicated(true);
        let categories = [
            profile.add_category("Kernel", CategoryColor::Orange),
            profile.add_category("User", CategoryColor::Yellow),
            profile.add_category("Ring not sampled", CategoryColor::Gray),
        ];
        let mut first_threads: HashMap<u32, BTreeSet<u64>> = HashMap::new();
        for task in names.programs.tasks() {
            if task.pid == task.tid && task.pid != 0 {
                let began = first_threads.entry(task.pid).or_default();
                began.insert(task.started_ns);
            }
        }
        Self {
            filter,
            paths: Paths::new(names),
            weight,
            profile,
            vm_name: header.vm_name.clone(),
            vms: HashMap::new(),
            processes: HashMap::new(),
            first_threads,
            threads: HashMap::new(),
            vcpus: HashMap::new(),
            stacks: HashMap::new(),
            categories,
            samples: 0,
            total: TotalWeight::default(),
            large: LargeWeights::default(),
        }
    }

    /// There are no samples.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.samples == 0
    }

    /// What all samples weigh: readers add up as JavaScript does.
    #[must_use]
    pub fn total(&self) -> TotalWeight {
        self.total
    }

    /// Writes the profile as JSON.
    ///
    /// # Errors
    /// `out` cannot be written to.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let weights = WithLarge(&self.large);
        let mut json = serde_json::Serializer::with_formatter(&mut *out, weights);
        self.profile.serialize(&mut json)?;
        writeln!(out)?;
        out.flush()
    }

    /// The thread of a vCPU of a VM: what is of no task; none for what is known of the VM alone.
    fn vcpu(&mut self, vm: u32, vcpu: Option<u32>) -> ThreadHandle {
        if let Some(thread) = self.vcpus.get(&(vm, vcpu)) {
            return *thread;
        }
        let name = match self.vm_name.as_str() {
            "" => format!("VM {vm}"),
            name => format!("VM {vm} ({name})"),
        };
        let profile = &mut self.profile;
        let new = || profile.add_process(&name, vm, start());
        let process = *self.vms.entry(vm).or_insert_with(new);
        let name = vcpu.map_or("all vCPUs".to_owned(), |vcpu| format!("vCPU {vcpu}"));
        let thread = profile.add_thread(process, vcpu.unwrap_or(u32::MAX), start(), MAIN);
        profile.set_thread_name(thread, &name);
        self.vcpus.insert((vm, vcpu), thread);
        thread
    }

    /// The thread that `task` is, with the name that it had last.
    fn task(&mut self, task: TaskId, time_ns: u64) -> ThreadHandle {
        let info = self.paths.names().programs.task_info(task);
        let info = info.cloned().unwrap_or_default();
        let track = match info.tid {
            0 => Track::Idle(task),
            tid => Track::Thread(info.pid, tid, info.started_ns),
        };
        let profile = &mut self.profile;
        if let Some(known) = self.threads.get_mut(&track) {
            if time_ns >= known.newest_ns {
                known.newest_ns = time_ns;
                if known.task != task {
                    known.task = task;
                    profile.set_thread_name(known.thread, named(&info.comm));
                    profile.set_process_name(known.process, named(&info.process));
                }
            }
            return known.thread;
        }
        let first = self.first_threads.get(&info.pid);
        let first = first.and_then(|began| began.range(..=info.started_ns).next_back());
        let process = match first {
            Some(began) => Process::Began(info.pid, *began),
            None => Process::Named(info.pid, info.process.clone()),
        };
        let new = || profile.add_process(named(&info.process), info.pid, start());
        let process = *self.processes.entry(process).or_insert_with(new);
        let thread = profile.add_thread(process, info.tid, start(), MAIN);
        profile.set_thread_name(thread, named(&info.comm));
        let known = Known {
            thread,
            process,
            task,
            newest_ns: time_ns,
        };
        self.threads.insert(track, known);
        thread
    }

    fn sample(&mut self, sample: &Sample) -> io::Result<()> {
        self.samples += 1;
        let names = self.paths.names();
        let thread = match names.task_of(sample) {
            Some(task) => self.task(task, sample.time_ns),
            None => self.vcpu(sample.vm, Some(sample.vcpu)),
        };
        let path = self.paths.of(sample, Callers::Kept);
        let [kernel, user, unknown] = self.categories;
        let (profile, paths) = (&mut self.profile, &self.paths);
        let stack = *self
            .stacks
            .entry((thread, sample.ring, path))
            .or_insert_with(|| {
                let mut frames = Vec::new();
                for location in paths.layers(path) {
                    let category = match location {
                        _ if sample.ring.is_none() => unknown,
                        CodeLocation::Symbol(_) | CodeLocation::Unknown(_) => kernel,
                        _ => user,
                    };
                    let name = location.name(names);
                    frames.push(FrameInfo {
                        frame: Frame::Label(profile.intern_string(named(&name))),
                        category_pair: category.into(),
                        flags: FrameFlags::empty(),
                    });
                }
                profile.intern_stack_frames(thread, frames.into_iter())
            });
        let time = Timestamp::from_nanos_since_reference(sample.time_ns);
        let weight = self.weight.of(sample);
        self.total.add(weight);
        let weight = match i32::try_from(weight) {
            Ok(weight) => weight,
            Err(_) => self.large.number(weight)?,
        };
        // Nobody took the CPU time between samples.
        profile.add_sample(thread, time, stack, CpuDelta::ZERO, weight);
        Ok(())
    }

    fn loss(&mut self, loss: &Loss) {
        let thread = self.vcpu(loss.vm, loss.vcpu);
        let (name, text) = match loss.kind {
            LossKind::Full(samples) => ("Lost", format!("{samples} samples found no room")),
            LossKind::Throttled(times) => ("Throttled", format!("{times} times")),
            LossKind::Blind(ns) => ("Blind", format!("no counter for {ns} ns")),
        };
        let marker = LossMarker {
            name: self.profile.intern_string(name),
            text: self.profile.intern_string(&text),
        };
        let at = Timestamp::from_nanos_since_reference;
        let timing = match loss.kind {
            LossKind::Blind(ns) => {
                MarkerTiming::Interval(at(loss.time_ns.saturating_sub(ns)), at(loss.time_ns))
            }
            _ => MarkerTiming::Instant(at(loss.time_ns)),
        };
        self.profile.add_marker(thread, timing, marker);
    }
}

impl Sink for Firefox<'_> {
    fn take(&mut self, record: &Record) -> io::Result<()> {
        match record {
            Record::Sample(sample) if self.filter.takes(sample) => self.sample(sample)?,
            Record::Sample(_) | Record::Described(_) => {}
            Record::Loss(loss) => self.loss(loss),
        }
        Ok(())
    }
}

/// Weights that are more than the profile's 32 bits hold: a negative number stands for each.
#[derive(Debug, Default)]
struct LargeWeights {
    weights: Vec<u64>,
    numbers: HashMap<u64, i32>,
}

impl LargeWeights {
    /// The number of the first; -1 is what the format has for a missing index.
    const FIRST: i32 = -2;

    fn number(&mut self, weight: u64) -> io::Result<i32> {
        if let Some(number) = self.numbers.get(&weight) {
            return Ok(*number);
        }
        let index = i32::try_from(self.weights.len()).ok();
        let number = index.and_then(|index| Self::FIRST.checked_sub(index));
        let number = number.ok_or_else(|| io::Error::other("too many different weights"))?;
        self.weights.push(weight);
        self.numbers.insert(weight, number);
        Ok(number)
    }

    fn weight(&self, number: i32) -> Option<u64> {
        let index = usize::try_from(i64::from(Self::FIRST) - i64::from(number)).ok()?;
        self.weights.get(index).copied()
    }
}

/// Writes JSON with large weights in place of their numbers.
struct WithLarge<'a>(&'a LargeWeights);

impl Formatter for WithLarge<'_> {
    /// Only weights and missing indices are written so.
    fn write_i32<W: ?Sized + Write>(&mut self, out: &mut W, value: i32) -> io::Result<()> {
        match self.0.weight(value) {
            Some(weight) => self.write_u64(out, weight),
            None => write!(out, "{value}"),
        }
    }
}

/// When threads and processes begin.
fn start() -> Timestamp {
    Timestamp::from_nanos_since_reference(0)
}

/// The distance of samples, of which the profiler only makes the height of its
/// graphs. A period in events is no time: a millisecond stands for it.
fn interval(sampling: Sampling) -> SamplingInterval {
    match sampling {
        Sampling::Frequency(hz) if hz > 0 => {
            SamplingInterval::from_nanos((1_000_000_000 / hz).max(1))
        }
        _ => SamplingInterval::from_millis(1),
    }
}

/// Something that could not be sampled.
#[derive(Clone, Debug)]
struct LossMarker {
    name: StringHandle,
    text: StringHandle,
}

impl StaticSchemaMarker for LossMarker {
    const UNIQUE_MARKER_TYPE_NAME: &'static str = "UmpireLoss";
    const TABLE_LABEL: Option<&'static str> = Some("{marker.name}: {marker.data.what}");
    const FIELDS: &'static [StaticSchemaMarkerField] = &[StaticSchemaMarkerField {
        key: "what",
        label: "Missing",
        format: MarkerFieldFormat::String,
        flags: MarkerFieldFlags::SEARCHABLE,
    }];

    fn name(&self, _: &mut Profile) -> StringHandle {
        self.name
    }

    fn category(&self, _: &mut Profile) -> CategoryHandle {
        CategoryHandle::OTHER
    }

    fn string_field_value(&self, _: u32) -> StringHandle {
        self.text
    }

    fn number_field_value(&self, _: u32) -> f64 {
        // The schema has no field of numbers.
        0.0
    }
}
