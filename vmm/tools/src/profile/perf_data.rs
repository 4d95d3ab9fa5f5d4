//! A profile as a file of perf's, so that `perf report` opens it. Guest processes are its
//! processes, vCPUs its CPUs.

mod format;
mod kallsyms;
mod layout;
mod objects;
mod replay;
#[cfg(test)]
mod tests;

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Seek, SeekFrom, Write};

use format::{Attributes, Chain, Mapped, Stamp};
use layout::KernelLayout;
use objects::{BuildId, Objects};
use replay::{Extent, Replay, Wanted, Who};

use super::location::CodeLocation;
use super::names::Names;
use super::record::{Filter, Header, Record, Ring, Sample, Sampling, Sink};

/// The process of samples whose task is not known: no kernel gives that number.
pub const NOBODY: u32 = (1 << 30) - 1;

const PAGE: u64 = 4096;
/// Addresses of the kernel's half.
const UPPER_HALF: u64 = 1 << 63;
/// What perf calls the kernel.
const KERNEL: &str = "[kernel.kallsyms]";
/// What perf would otherwise take from its own process.
const VDSO: [&str; 2] = ["[vdso]", "[vdso32]"];

/// What has to be known before the first sample is written: where in the kernel samples are,
/// and how far they are from the order of time.
#[derive(Debug)]
pub struct PerfSurvey<'a> {
    filter: &'a Filter,
    names: &'a Names,
    /// Addresses with a name.
    kernel: BTreeSet<u64>,
    /// Addresses in the kernel's half that have none.
    nameless: BTreeSet<u64>,
    chains: bool,
    newest_ns: u64,
    /// By how much a sample is older than one in front of it.
    late_ns: u64,
    /// Made of all that, when it is asked for.
    layout: OnceCell<KernelLayout>,
}

impl<'a> PerfSurvey<'a> {
    /// Nothing is known yet.
    #[must_use]
    pub fn new(filter: &'a Filter, names: &'a Names) -> Self {
        Self {
            filter,
            names,
            kernel: BTreeSet::new(),
            nameless: BTreeSet::new(),
            chains: false,
            newest_ns: 0,
            late_ns: 0,
            layout: OnceCell::new(),
        }
    }

    /// The names of the kernel in the form of `/proc/kallsyms`: those that samples need, and
    /// `_text`, from which perf sees that the kernel has not moved.
    #[must_use]
    pub fn kallsyms(&self) -> &str {
        &self.layout().text
    }

    fn layout(&self) -> &KernelLayout {
        let new = || KernelLayout::new(&self.names.kernel, &self.kernel, &self.nameless);
        self.layout.get_or_init(new)
    }

    fn sample(&mut self, sample: &Sample) {
        self.layout.take();
        self.late_ns = self
            .late_ns
            .max(self.newest_ns.saturating_sub(sample.time_ns));
        self.newest_ns = self.newest_ns.max(sample.time_ns);
        if in_kernel(sample, self.names) {
            self.add_kernel(sample.ip);
        }
        let chain = &sample.guest.chain;
        for address in chain.kernel.iter().skip(1) {
            self.add_kernel(*address);
        }
        self.chains |= !chain.is_empty();
    }

    fn add_kernel(&mut self, address: u64) {
        if self.names.kernel.find(address).is_some() {
            self.kernel.insert(address);
        } else if address >= UPPER_HALF {
            self.nameless.insert(address);
        }
    }
}

impl Sink for PerfSurvey<'_> {
    fn take(&mut self, record: &Record) -> io::Result<()> {
        if let Record::Sample(sample) = record
            && self.filter.takes(sample)
        {
            self.sample(sample);
        }
        Ok(())
    }
}

/// Writes the file: its beginning, then the samples in the order of time, then its end.
#[derive(Debug)]
pub struct PerfData<'a, W> {
    survey: &'a PerfSurvey<'a>,
    header: &'a Header,
    out: W,
    /// The kernel and its modules, and their build ids.
    kernel: BTreeMap<String, BuildId>,
    objects: Objects,
    replay: Replay,
    /// Samples that older ones may follow, by time and place.
    waiting: BTreeMap<(u64, u64), Sample>,
    taken: u64,
    newest_ns: u64,
    /// When the first sample of the file was taken, and the last one.
    sampled_ns: Option<(u64, u64)>,
    record: Vec<u8>,
    attributes: (u64, u64),
    data: (u64, u64),
}

impl<'a, W: Write + Seek> PerfData<'a, W> {
    /// Writes everything in front of the samples.
    ///
    /// # Errors
    /// `out` cannot be written to.
    pub fn new(survey: &'a PerfSurvey<'a>, header: &'a Header, out: W) -> io::Result<Self> {
        let kernel = kernel_ids(survey);
        let others = kernel.keys().cloned().collect();
        let mut data = Self {
            survey,
            header,
            out,
            kernel,
            objects: Objects::new(survey.names, &others),
            replay: Replay::default(),
            waiting: BTreeMap::new(),
            taken: 0,
            newest_ns: 0,
            sampled_ns: None,
            record: Vec::new(),
            attributes: (0, 0),
            data: (0, 0),
        };
        let mut start = Vec::new();
        data.attributes = format::put_attributes(&data.events(), &mut start);
        data.data.0 = format::HEADER + start.len() as u64;
        // The header is written again when the sizes are known.
        let empty = format::header(data.attributes, data.data, &[]);
        data.out.write_all(&empty)?;
        data.out.write_all(&start)?;
        data.put_kernel()?;
        Ok(data)
    }

    /// How many files of the guest have no build id that is known, so that perf is kept from
    /// looking for them, and the name of one of them.
    #[must_use]
    pub fn nowhere(&self) -> Option<(usize, &str)> {
        self.objects.nowhere()
    }

    fn events(&self) -> Vec<Attributes<'a>> {
        let events = (1u64..).zip(&self.header.events);
        let one = |(id, event): (u64, &'a super::record::SampledEvent)| Attributes {
            name: &event.name,
            id,
            period: match event.sampling {
                Sampling::Period(period) => period,
                Sampling::Frequency(_) => 1,
            },
            chains: self.survey.chains,
        };
        events.map(one).collect()
    }

    fn put_kernel(&mut self) -> io::Result<()> {
        let stamp = Stamp {
            pid: u32::MAX,
            tid: 0,
            time_ns: 0,
            cpu: 0,
            id: 1,
        };
        let layout = self.survey.layout();
        if let Some((start, end)) = layout.kernel {
            let kernel = Mapped {
                start,
                length: end - start,
                offset: start,
                name: "[kernel.kallsyms]_text",
            };
            format::put_kernel(&kernel, &stamp, &mut self.record);
        }
        for (name, (start, end)) in &layout.modules {
            let module = Mapped {
                start: *start,
                length: end - start,
                offset: 0,
                name,
            };
            format::put_kernel(&module, &stamp, &mut self.record);
        }
        if let Some((start, _)) = layout.kernel {
            // perf reads all names when it first needs one of the kernel's, and gives modules
            // theirs unless it has looked for those before. Here it needs one of the kernel's.
            format::put_poke(start, &stamp, &mut self.record);
        }
        self.put()
    }

    /// What perf has to know first of whose a sample is, and of what is mapped where it is and
    /// where its callers are.
    fn put_changes(&mut self, sample: &Sample, program: &[(u64, u64)], stamp: &Stamp) {
        let names = self.survey.names;
        let task = names.task_of(sample);
        let info = task.and_then(|task| names.programs.task_info(task));
        let comm = names.comm(task);
        let who = Who {
            pid: stamp.pid,
            tid: stamp.tid,
            comm,
            process: info.map_or(comm, |info| &info.process),
            started_ns: info.map_or(0, |info| info.started_ns),
        };
        self.replay.thread(&who, stamp, &mut self.record);
        // What one of them says may reach over where another is; then pages are told.
        for extent in [Extent::Whole, Extent::Page] {
            for &(address, mapping) in program {
                let mapped = names.programs.mapping(mapping);
                let wanted = mapped.map(|(mapping, file)| Wanted {
                    file,
                    start: mapping.start,
                    end: mapping.end,
                    offset: mapping.offset,
                });
                let place = (address, wanted, extent);
                self.replay
                    .address(place, &self.objects, stamp, &mut self.record);
            }
        }
    }

    fn put_sample(&mut self, sample: &Sample) -> io::Result<()> {
        let (survey, guest) = (self.survey, &sample.guest);
        let kernel = in_kernel(sample, survey.names);
        let task = survey.names.task_of(sample);
        let (pid, tid) = match task {
            Some(_) => survey.names.ids(task),
            None => (NOBODY, NOBODY),
        };
        let stamp = Stamp {
            pid,
            tid,
            time_ns: sample.time_ns,
            cpu: sample.vcpu,
            id: u64::from(sample.event) + 1,
        };
        // The first frame is the sample's own.
        let own = usize::from(guest.chain.kernel_end.is_none());
        // Ours are within the calls, where perf has return addresses: both look for the symbol
        // at the very address, and who goes back by one is still within the call.
        let inside = guest.chain.kernel.iter().skip(1).copied();
        let outside = guest.chain.program.iter().skip(own);
        let mut program: Vec<(u64, u64)> = outside
            .map(|frame| (frame.address, frame.mapping))
            .collect();
        let mut chain = Chain {
            kernel: inside.collect(),
            program: program.iter().map(|(address, _)| *address).collect(),
        };
        if kernel {
            chain.kernel.insert(0, sample.ip);
        } else {
            chain.program.insert(0, sample.ip);
            program.insert(0, (sample.ip, guest.mapping));
        }
        self.put_changes(sample, &program, &stamp);
        let chain = survey.chains.then_some(&chain);
        let place = (sample.ip, sample.period, kernel);
        format::put_sample(place, chain, &stamp, &mut self.record);
        let (first, _) = self.sampled_ns.unwrap_or((stamp.time_ns, 0));
        self.sampled_ns = Some((first, stamp.time_ns));
        self.put()
    }

    /// Takes a sample in, and writes those that none can come in front of any more.
    fn take_sample(&mut self, sample: &Sample) -> io::Result<()> {
        let place = (sample.time_ns, self.taken);
        self.taken += 1;
        self.newest_ns = self.newest_ns.max(sample.time_ns);
        self.waiting.insert(place, sample.clone());
        while let Some(first) = self.waiting.first_entry()
            && first.key().0.saturating_add(self.survey.late_ns) < self.newest_ns
        {
            let sample = first.remove();
            self.put_sample(&sample)?;
        }
        Ok(())
    }

    /// Writes what is waiting.
    fn put(&mut self) -> io::Result<()> {
        self.out.write_all(&self.record)?;
        self.data.1 += self.record.len() as u64;
        self.record.clear();
        Ok(())
    }

    /// Writes the end, and what the header has to say of it.
    ///
    /// # Errors
    /// The file cannot be written to.
    pub fn finish(mut self) -> io::Result<()> {
        for sample in std::mem::take(&mut self.waiting).values() {
            self.put_sample(sample)?;
        }
        if self.data.1 == 0 {
            // perf refuses a file without a record.
            let stamp = Stamp {
                pid: NOBODY,
                tid: NOBODY,
                time_ns: 0,
                cpu: 0,
                id: 1,
            };
            format::put_comm((NOBODY, NOBODY), "[unknown]", &stamp, &mut self.record);
            self.put()?;
        }
        let mut features: Vec<(u32, Vec<u8>)> = Vec::new();
        let string = |text: &str| {
            let mut bytes = Vec::new();
            format::put_string(text, &mut bytes);
            bytes
        };
        let header = self.header;
        let mut ids = Vec::new();
        let kernel = self.kernel.iter().map(|(name, id)| (name.as_str(), *id));
        let nobodys = |name| (name, BuildId::of_nothing_else(name));
        let vdso = VDSO.into_iter().map(nobodys);
        let programs = self.objects.known().into_iter();
        format::put_build_ids(kernel, vdso.chain(programs), &mut ids);
        features.push((format::BUILD_IDS, ids));
        let name = match header.vm_name.as_str() {
            "" => format!("VM {}", header.vm),
            name => name.to_owned(),
        };
        features.push((format::HOSTNAME, string(&name)));
        features.push((format::ARCH, string("x86_64")));
        let cpus = [header.vcpus.to_le_bytes(), header.vcpus.to_le_bytes()].concat();
        features.push((format::NRCPUS, cpus));
        let mut events = Vec::new();
        format::put_event_desc(&self.events(), &mut events);
        features.push((format::EVENT_DESC, events));
        if let Some((first, last)) = self.sampled_ns {
            let times = [first.to_le_bytes(), last.to_le_bytes()].concat();
            features.push((format::SAMPLE_TIME, times));
        }
        let table = self.data.0 + self.data.1;
        let mut offset = table + 16 * features.len() as u64;
        for (_, bytes) in &features {
            self.out.write_all(&offset.to_le_bytes())?;
            self.out.write_all(&(bytes.len() as u64).to_le_bytes())?;
            offset += bytes.len() as u64;
        }
        for (_, bytes) in &features {
            self.out.write_all(bytes)?;
        }
        let bits: Vec<u32> = features.iter().map(|(bit, _)| *bit).collect();
        self.out.seek(SeekFrom::Start(0))?;
        let header = format::header(self.attributes, self.data, &bits);
        self.out.write_all(&header)?;
        self.out.flush()
    }
}

impl<W: Write + Seek> Sink for PerfData<'_, W> {
    fn take(&mut self, record: &Record) -> io::Result<()> {
        match record {
            Record::Sample(sample) if self.survey.filter.takes(sample) => self.take_sample(sample),
            _ => Ok(()),
        }
    }
}

/// The kernel and its modules with build ids that no others have: perf takes names of the
/// running kernel for one without, and names of a module's file.
fn kernel_ids(survey: &PerfSurvey<'_>) -> BTreeMap<String, BuildId> {
    // A digest of the text: there may be many modules.
    let symbols = BuildId::of_nothing_else(survey.kallsyms());
    let modules = survey.layout().modules.keys();
    let all = modules.map(String::as_str).chain([KERNEL]);
    all.map(|name| (name.to_owned(), symbols.with(name)))
        .collect()
}

/// Where the ring was not sampled, names and the address tell.
fn in_kernel(sample: &Sample, names: &Names) -> bool {
    match sample.ring {
        Some(ring) => ring == Ring::Kernel,
        None => CodeLocation::of(sample, names).is_kernel(),
    }
}
