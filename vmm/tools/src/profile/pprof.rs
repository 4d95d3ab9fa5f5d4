//! A profile for pprof: gzip-compressed `profile.proto`.

mod proto;
#[cfg(test)]
pub(super) mod tests;

use std::io::{self, Write};

use ahash::AHashMap;
use flate2::Compression;
use flate2::write::GzEncoder;
use perfmon_abi::compact::ChainEnd;
use prost::Message;

use self::proto::{Function, Label, Line, Location, Mapping, Profile, ValueType};
use super::facts::{Facts, event_name, how_often};
use super::location::CodeLocation;
use super::names::Names;
use super::plain::named;
use super::programs::TaskId;
use super::reader::Ending;
use super::record::{Filter, Record, Ring, Sample, Sampling, Sink};
use super::stacks::{TotalWeight, Weight};
use super::tally::Sum;

/// Stands for the kernel in place of a mapping.
const KERNEL: u64 = u64::MAX;
/// Where the kernel's half of memory begins.
const UPPER_HALF: u64 = 1 << 63;

/// What the samples of a stack have in common.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Stack {
    task: Option<TaskId>,
    vm: u32,
    vcpu: u32,
    /// Numbers of locations, the innermost first.
    frames: Box<[u64]>,
}

/// Samples by task, vCPU and the addresses of their callers.
#[derive(Debug)]
pub struct Pprof<'a> {
    filter: &'a Filter,
    names: &'a Names,
    profile: Profile,
    stacks: AHashMap<Stack, Sum>,
    texts: AHashMap<String, i64>,
    /// By address and the mapping's number in samples.
    places: AHashMap<(u64, u64), u64>,
    /// What is at no place that is always the same.
    others: AHashMap<(u64, CodeLocation), u64>,
    mappings: AHashMap<u64, u64>,
    functions: AHashMap<CodeLocation, u64>,
    /// The frames of the sample that is taken.
    frames: Vec<u64>,
    total: TotalWeight,
}

impl<'a> Pprof<'a> {
    /// The greatest number of the format.
    pub const MOST: u64 = i64::MAX.unsigned_abs();

    /// No samples yet.
    #[must_use]
    pub fn new(filter: &'a Filter, names: &'a Names) -> Self {
        let mut new = Self {
            filter,
            names,
            profile: Profile::default(),
            stacks: AHashMap::new(),
            texts: AHashMap::new(),
            places: AHashMap::new(),
            others: AHashMap::new(),
            mappings: AHashMap::new(),
            functions: AHashMap::new(),
            frames: Vec::new(),
            total: TotalWeight::default(),
        };
        // Number 0 is the empty text.
        new.text("");
        new
    }

    /// There are no samples.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.stacks.is_empty()
    }

    /// How many events all samples stand for. Unless that fits into [`MOST`](Self::MOST), the
    /// profile's sums are wrong.
    #[must_use]
    pub fn total(&self) -> TotalWeight {
        self.total
    }

    /// Writes the profile of `event` in the file with `facts`. Tools show `weight` first.
    ///
    /// # Errors
    /// `out` cannot be written to.
    pub fn write(
        mut self,
        facts: &Facts<'_>,
        event: u16,
        weight: Weight,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        self.describe(facts, event, weight);
        let mut stacks: Vec<(Stack, Sum)> = self.stacks.drain().collect();
        stacks.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        for (stack, sum) in stacks {
            let label = self.labels(&stack);
            self.profile.sample.push(proto::PprofSample {
                location_id: stack.frames.into_vec(),
                value: vec![signed(sum.samples), signed(sum.events)],
                label,
            });
        }
        let mut out = GzEncoder::new(out, Compression::default());
        out.write_all(&self.profile.encode_to_vec())?;
        out.finish()?.flush()
    }

    /// What is known of the whole.
    fn describe(&mut self, facts: &Facts<'_>, event: u16, weight: Weight) {
        let (samples, events) = (self.text("samples"), self.text("events"));
        let count = self.text("count");
        let value = |of| ValueType {
            r#type: of,
            unit: count,
        };
        let name = event_name(facts.header, event);
        let named = self.text(&name);
        self.profile.sample_type = vec![value(samples), value(events)];
        self.profile.period_type = Some(value(named));
        self.profile.default_sample_type = match weight {
            Weight::Samples => samples,
            Weight::Events => events,
        };
        self.profile.time_nanos = known(facts.header.start_unix_ns);
        if let Ending::Whole(ns) = facts.ending {
            self.profile.duration_nanos = known(ns);
        }
        let mut comments = Vec::new();
        if let Some(event) = facts.header.events.get(usize::from(event)) {
            if let Sampling::Period(events) = event.sampling {
                self.profile.period = known(events);
            }
            let often = how_often(event.sampling);
            comments.push(format!("{name}: sampled {often}; {}", event.how()));
        }
        comments.extend(facts.warnings().into_iter().chain(facts.losses()));
        for comment in comments {
            let comment = self.text(&comment);
            self.profile.comment.push(comment);
        }
    }

    fn labels(&mut self, stack: &Stack) -> Vec<Label> {
        let mut labels = Vec::new();
        let names = self.names;
        if let Some(info) = stack.task.and_then(|task| names.programs.task_info(task)) {
            labels.push(self.number("pid", info.pid));
            labels.push(self.number("tid", info.tid));
            labels.push(Label {
                key: self.text("comm"),
                str: self.text(named(&info.comm)),
                ..Label::default()
            });
        }
        labels.push(self.number("vm", stack.vm));
        labels.push(self.number("vcpu", stack.vcpu));
        labels
    }

    /// A label with a number. A number 0 without a unit is none for pprof; it takes a label's
    /// key for the unit where none is given, so this one changes nothing else.
    fn number(&mut self, key: &str, number: u32) -> Label {
        let key = self.text(key);
        Label {
            key,
            str: 0,
            num: Some(number.into()),
            num_unit: key,
        }
    }

    /// The number of a text.
    fn text(&mut self, text: &str) -> i64 {
        if let Some(known) = self.texts.get(text) {
            return *known;
        }
        let number = signed(self.profile.string_table.len() as u64);
        self.profile.string_table.push(text.to_owned());
        self.texts.insert(text.to_owned(), number);
        number
    }

    fn sample(&mut self, sample: &Sample) {
        let chain = &sample.guest.chain;
        self.frames.clear();
        let own = match sample.ring {
            Some(Ring::Kernel) => self.kernel(sample.ip),
            Some(Ring::User) => self.program(sample, sample.ip, sample.guest.mapping),
            None => match CodeLocation::of(sample, self.names) {
                CodeLocation::Symbol(_) => self.kernel(sample.ip),
                CodeLocation::Program(..) => self.program(sample, sample.ip, sample.guest.mapping),
                unknown => self.other(sample.ip, unknown),
            },
        };
        self.frames.push(own);
        for address in chain.kernel.iter().skip(1) {
            let frame = self.kernel(*address);
            self.frames.push(frame);
        }
        self.missing(chain.kernel_end);
        // The first frame is the sample's own.
        let own = usize::from(chain.kernel_end.is_none());
        for frame in chain.program.iter().skip(own) {
            let frame = self.program(sample, frame.address, frame.mapping);
            self.frames.push(frame);
        }
        if chain.program_end != Some(ChainEnd::Broken) {
            self.missing(chain.program_end);
        }
        let stack = Stack {
            task: self.names.task_of(sample),
            vm: sample.vm,
            vcpu: sample.vcpu,
            frames: self.frames.as_slice().into(),
        };
        self.total.add(sample.period);
        self.stacks.entry(stack).or_default().add(Sum::of(sample));
    }

    fn kernel(&mut self, address: u64) -> u64 {
        if let Some(known) = self.places.get(&(address, KERNEL)) {
            return *known;
        }
        let location = CodeLocation::kernel(address, self.names);
        let mapping = if address >= UPPER_HALF {
            self.kernel_mapping()
        } else {
            0
        };
        let new = self.location(address, mapping, location);
        self.places.insert((address, KERNEL), new);
        new
    }

    fn program(&mut self, sample: &Sample, address: u64, mapping: u64) -> u64 {
        if let Some(known) = self
            .places
            .get(&(address, mapping))
            .filter(|_| mapping != KERNEL)
        {
            return *known;
        }
        let location = CodeLocation::program(sample, address, mapping, self.names);
        // Another process may have made something else there.
        let is_made = match location {
            CodeLocation::Program(file, _) => self.names.is_made(file),
            _ => false,
        };
        match self.mapping(mapping) {
            Some(id) if mapping != KERNEL && !is_made => {
                let new = self.location(address, id, location);
                self.places.insert((address, mapping), new);
                new
            }
            _ => self.other(address, location),
        }
    }

    fn missing(&mut self, end: Option<ChainEnd>) {
        if let Some(end @ (ChainEnd::Depth | ChainEnd::Broken | ChainEnd::NoProgram)) = end {
            let frame = self.other(0, CodeLocation::Missing(end));
            self.frames.push(frame);
        }
    }

    /// What is in no mapping.
    fn other(&mut self, address: u64, location: CodeLocation) -> u64 {
        if let Some(known) = self.others.get(&(address, location)) {
            return *known;
        }
        let new = self.location(address, 0, location);
        self.others.insert((address, location), new);
        new
    }

    /// A new location.
    fn location(&mut self, address: u64, mapping: u64, location: CodeLocation) -> u64 {
        let named = match location {
            CodeLocation::Unknown(_) | CodeLocation::Program(_, None) => mapping == 0,
            _ => true,
        };
        let line = named.then(|| Line {
            function_id: self.function(location),
        });
        let id = self.profile.location.len() as u64 + 1;
        self.profile.location.push(Location {
            id,
            mapping_id: mapping,
            address,
            line: line.into_iter().collect(),
        });
        id
    }

    fn function(&mut self, location: CodeLocation) -> u64 {
        if let Some(known) = self.functions.get(&location) {
            return *known;
        }
        let names = self.names;
        let name = self.text(named(&location.name(names)));
        // pprof reads a name again that is the file's own: it takes `<b>` out of `a<b>`.
        let system_name = match location {
            CodeLocation::Program(file, Some(symbol)) => {
                match self.text(names.raw_program_symbol(file, symbol)) {
                    own if own == name => 0,
                    mangled => mangled,
                }
            }
            _ => 0,
        };
        let id = self.profile.function.len() as u64 + 1;
        self.profile.function.push(Function {
            id,
            name,
            system_name,
        });
        self.functions.insert(location, id);
        id
    }

    /// The number of the mapping with `number` in samples.
    fn mapping(&mut self, number: u64) -> Option<u64> {
        if let Some(known) = self.mappings.get(&number) {
            return Some(*known);
        }
        let names = self.names;
        let (info, file) = names.programs.mapping(number)?;
        let new = Mapping {
            id: 0,
            memory_start: info.start,
            memory_limit: info.end,
            file_offset: info.offset,
            filename: self.text(names.file(file).shown()),
            build_id: self.text(&names.file(file).build_id),
            // Else pprof takes names from a file of that name on its own host, unless the
            // build ids tell them apart.
            has_functions: names.program_file(file).is_some()
                || names.file(file).build_id.is_empty(),
        };
        Some(self.new_mapping(number, new))
    }

    fn kernel_mapping(&mut self) -> u64 {
        if let Some(known) = self.mappings.get(&KERNEL) {
            return *known;
        }
        let new = Mapping {
            memory_start: UPPER_HALF,
            memory_limit: u64::MAX,
            filename: self.text("[kernel.kallsyms]"),
            has_functions: !self.names.kernel.is_empty(),
            ..Mapping::default()
        };
        self.new_mapping(KERNEL, new)
    }

    fn new_mapping(&mut self, number: u64, mut mapping: Mapping) -> u64 {
        mapping.id = self.profile.mapping.len() as u64 + 1;
        self.profile.mapping.push(mapping);
        self.mappings.insert(number, mapping.id);
        mapping.id
    }
}

impl Sink for Pprof<'_> {
    fn take(&mut self, record: &Record) -> io::Result<()> {
        if let Record::Sample(sample) = record
            && self.filter.takes(sample)
        {
            self.sample(sample);
        }
        Ok(())
    }
}

/// A number of a stack or text. The total is known to fit.
fn signed(amount: impl TryInto<i64>) -> i64 {
    amount.try_into().unwrap_or(i64::MAX)
}

/// What is said of the whole; 0, which is what the format has for what is not known, where it
/// has no such number.
fn known(amount: u64) -> i64 {
    i64::try_from(amount).unwrap_or(0)
}
