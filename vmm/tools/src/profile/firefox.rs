//! A profile for the Firefox Profiler (profiler.firefox.com), in its "processed
//! profile format".

use std::collections::HashMap;
use std::io::{self, Write};
use std::time::Duration;

use fxprof_processed_profile::{
    CategoryColor, CategoryHandle, CpuDelta, Frame, FrameFlags, FrameInfo, MarkerFieldFlags,
    MarkerFieldFormat, MarkerTiming, ProcessHandle, Profile, ReferenceTimestamp, SamplingInterval,
    StackHandle, StaticSchemaMarker, StaticSchemaMarkerField, StringHandle, ThreadHandle,
    Timestamp,
};

use super::location::CodeLocation;
use super::record::{Filter, Header, Loss, LossKind, Record, Ring, Sample, Sampling, Sink};
use super::stacks::Weight;
use super::symbols::SymbolTable;

/// Builds the profile: a process for each VM, a thread for each vCPU, and a
/// marker for each loss.
#[derive(Debug)]
pub struct Firefox<'a> {
    filter: &'a Filter,
    symbols: &'a SymbolTable,
    weight: Weight,
    profile: Profile,
    vm_name: String,
    processes: HashMap<u32, ProcessHandle>,
    threads: HashMap<(u32, Option<u32>), ThreadHandle>,
    stacks: HashMap<(ThreadHandle, Option<Ring>, CodeLocation), Option<StackHandle>>,
    categories: [CategoryHandle; 3],
    samples: u64,
}

impl<'a> Firefox<'a> {
    /// No samples yet, of `sampling` in the file with `header`.
    #[must_use]
    pub fn new(
        header: &Header,
        sampling: Sampling,
        filter: &'a Filter,
        symbols: &'a SymbolTable,
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
        Self {
            filter,
            symbols,
            weight,
            profile,
            vm_name: header.vm_name.clone(),
            processes: HashMap::new(),
            threads: HashMap::new(),
            stacks: HashMap::new(),
            categories,
            samples: 0,
        }
    }

    /// There are no samples.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.samples == 0
    }

    /// Writes the profile as JSON.
    ///
    /// # Errors
    /// `out` cannot be written to.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        serde_json::to_writer(&mut *out, &self.profile)?;
        writeln!(out)?;
        out.flush()
    }

    /// The thread of a vCPU; `None` stands for what is known of the VM alone.
    fn thread(&mut self, vm: u32, vcpu: Option<u32>) -> ThreadHandle {
        const START: u64 = 0;
        let start = Timestamp::from_nanos_since_reference(START);
        let profile = &mut self.profile;
        let name = match self.vm_name.as_str() {
            "" => format!("VM {vm}"),
            name => format!("VM {vm} ({name})"),
        };
        let process = *self
            .processes
            .entry(vm)
            .or_insert_with(|| profile.add_process(&name, vm, start));
        *self.threads.entry((vm, vcpu)).or_insert_with(|| {
            // The profiler shows a main thread under its process's name.
            let main = false;
            let thread = profile.add_thread(process, vcpu.unwrap_or(u32::MAX), start, main);
            let name = vcpu.map_or("all vCPUs".to_owned(), |vcpu| format!("vCPU {vcpu}"));
            profile.set_thread_name(thread, &name);
            thread
        })
    }

    fn sample(&mut self, sample: &Sample) {
        self.samples += 1;
        let thread = self.thread(sample.vm, Some(sample.vcpu));
        let location = CodeLocation::of(sample, self.symbols);
        let [kernel, user, unknown] = self.categories;
        let (profile, symbols) = (&mut self.profile, self.symbols);
        let stack = *self
            .stacks
            .entry((thread, sample.ring, location))
            .or_insert_with(|| {
                let name = profile.intern_string(&location.name(symbols));
                let category = match sample.ring {
                    Some(Ring::Kernel) => kernel,
                    Some(Ring::User) => user,
                    None => unknown,
                };
                let frame = FrameInfo {
                    frame: Frame::Label(name),
                    category_pair: category.into(),
                    flags: FrameFlags::empty(),
                };
                profile.intern_stack_frames(thread, [frame].into_iter())
            });
        let time = Timestamp::from_nanos_since_reference(sample.time_ns);
        let weight = i32::try_from(self.weight.of(sample)).unwrap_or(i32::MAX);
        // Nobody took the CPU time between samples.
        profile.add_sample(thread, time, stack, CpuDelta::ZERO, weight);
    }

    fn loss(&mut self, loss: &Loss) {
        let thread = self.thread(loss.vm, loss.vcpu);
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
            Record::Sample(sample) if self.filter.takes(sample) => self.sample(sample),
            Record::Sample(_) | Record::Described(_) => {}
            Record::Loss(loss) => self.loss(loss),
        }
        Ok(())
    }
}

/// The distance of samples, of which the profiler only makes the height of its
/// graphs. A period in events is no time: a millisecond stands for it.
fn interval(sampling: Sampling) -> SamplingInterval {
    match sampling {
        Sampling::Frequency(hz) if hz > 0 => SamplingInterval::from_nanos(1_000_000_000 / hz),
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
