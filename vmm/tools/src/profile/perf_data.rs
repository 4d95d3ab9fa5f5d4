//! A profile as a file of perf's, so that `perf report` opens it. Guest processes are its
//! processes, vCPUs its CPUs.

mod format;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, Seek, SeekFrom, Write};

use format::{Attributes, Chain, Mapped, Stamp};

use super::names::Names;
use super::programs::TaskId;
use super::record::{Filter, Header, Record, Ring, Sample, Sampling, Sink};

/// The process of samples whose task is not known: no kernel gives that number.
pub const NOBODY: u32 = (1 << 30) - 1;

const PAGE: u64 = 4096;
/// Addresses of the kernel's half.
const UPPER_HALF: u64 = 1 << 63;

/// What has to be known before the first sample is written: whose samples there are, since
/// when, and where in the kernel.
#[derive(Debug)]
pub struct PerfSurvey<'a> {
    filter: &'a Filter,
    names: &'a Names,
    /// Since when a task runs.
    tasks: HashMap<TaskId, u64>,
    /// Since when a process has a mapping, by its number.
    mappings: HashMap<(u32, u64), u64>,
    nobody: bool,
    kernel: BTreeSet<u64>,
    chains: bool,
}

impl<'a> PerfSurvey<'a> {
    /// Nothing is known yet.
    #[must_use]
    pub fn new(filter: &'a Filter, names: &'a Names) -> Self {
        Self {
            filter,
            names,
            tasks: HashMap::new(),
            mappings: HashMap::new(),
            nobody: false,
            kernel: BTreeSet::new(),
            chains: false,
        }
    }

    /// The names of the kernel in the form of `/proc/kallsyms`: those that samples need, and
    /// `_text`, from which perf sees that the kernel has not moved.
    #[must_use]
    pub fn kallsyms(&self) -> String {
        let text = match self.kernel_range() {
            Some((start, _)) => format!("{start:016x} T _text\n"),
            None => String::new(),
        };
        text + &self.names.kernel.of_addresses(&self.kernel)
    }

    /// The kernel itself, with a page in front, for `_text`, in which there is nothing else.
    fn kernel_range(&self) -> Option<(u64, u64)> {
        let mut range: Option<(u64, u64)> = None;
        for &address in &self.kernel {
            let (start, module) = self.symbol_at(address);
            if module.is_none() {
                let (low, high) = range.unwrap_or((start, address));
                range = Some((low.min(start), high.max(address)));
            }
        }
        let (low, high) = range?;
        let start = (low & !(PAGE - 1)).saturating_sub(PAGE);
        Some((start, page_behind(high)))
    }

    fn modules(&self) -> BTreeMap<String, (u64, u64)> {
        let mut modules: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        for &address in &self.kernel {
            let (start, module) = self.symbol_at(address);
            if let Some(module) = module {
                let new = (start & !(PAGE - 1), page_behind(address));
                let range = modules.entry(format!("[{module}]")).or_insert(new);
                *range = (range.0.min(new.0), range.1.max(new.1));
            }
        }
        modules
    }

    /// Where the symbol at an address begins, and its module; the address itself without one.
    fn symbol_at(&self, address: u64) -> (u64, Option<&str>) {
        match self.names.kernel.find(address) {
            Some(found) => (
                address - found.offset,
                self.names.kernel.module(found.index),
            ),
            None => (address, None),
        }
    }

    fn sample(&mut self, sample: &Sample) {
        let task = self.names.task_of(sample);
        let since = |map: Option<&mut u64>| map.map(|at| *at = (*at).min(sample.time_ns));
        match task {
            Some(task) => {
                if since(self.tasks.get_mut(&task)).is_none() {
                    self.tasks.insert(task, sample.time_ns);
                }
            }
            None => self.nobody = true,
        }
        let (pid, _) = ids(self.names, task);
        let guest = &sample.guest;
        let frames = guest.chain.program.iter().map(|frame| frame.mapping);
        for mapping in frames.chain([guest.mapping]).filter(|one| *one != 0) {
            let key = (pid, mapping);
            if since(self.mappings.get_mut(&key)).is_none() {
                self.mappings.insert(key, sample.time_ns);
            }
        }
        if in_kernel(sample) {
            self.add_kernel(sample.ip);
        }
        for address in &guest.chain.kernel {
            self.add_kernel(*address);
        }
        self.chains |= !guest.chain.is_empty();
    }

    fn add_kernel(&mut self, address: u64) {
        // What has no name gets none by being here.
        if self.names.kernel.find(address).is_some() {
            self.kernel.insert(address);
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

/// Writes the file: its beginning, then each sample as it is taken in, then its end.
#[derive(Debug)]
pub struct PerfData<'a, W> {
    survey: &'a PerfSurvey<'a>,
    header: &'a Header,
    out: W,
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
        let mut data = Self {
            survey,
            header,
            out,
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
        data.put_tasks()?;
        data.put_mappings()?;
        Ok(data)
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
        let stamp = stamp((u32::MAX, 0), 0);
        if let Some((start, end)) = self.survey.kernel_range() {
            let kernel = Mapped {
                start,
                length: end - start,
                offset: start,
                name: "[kernel.kallsyms]_text",
            };
            format::put_kernel(&kernel, &stamp, &mut self.record);
        }
        for (name, (start, end)) in self.survey.modules() {
            let module = Mapped {
                start,
                length: end - start,
                offset: 0,
                name: &name,
            };
            format::put_kernel(&module, &stamp, &mut self.record);
        }
        self.put()
    }

    fn put_tasks(&mut self) -> io::Result<()> {
        let survey = self.survey;
        if survey.nobody {
            let stamp = stamp((NOBODY, NOBODY), 0);
            format::put_comm("[unknown]", &stamp, &mut self.record);
        }
        let mut tasks: Vec<(u64, TaskId)> = survey.tasks.iter().map(|(&a, &b)| (b, a)).collect();
        tasks.sort_unstable();
        for (since, task) in tasks {
            let Some(info) = survey.names.programs.task_info(task) else {
                continue;
            };
            if info.pid != info.tid {
                let stamp = stamp((info.pid, info.pid), since);
                format::put_comm(&info.process, &stamp, &mut self.record);
            }
            let stamp = stamp((info.pid, info.tid), since);
            format::put_comm(&info.comm, &stamp, &mut self.record);
        }
        self.put()
    }

    fn put_mappings(&mut self) -> io::Result<()> {
        let survey = self.survey;
        let mut mappings: Vec<(u64, (u32, u64))> =
            survey.mappings.iter().map(|(&a, &b)| (b, a)).collect();
        mappings.sort_unstable();
        for (since, (pid, number)) in mappings {
            let Some((mapping, file)) = survey.names.programs.mapping(number) else {
                continue;
            };
            let (file, others) = survey.names.programs.file_and_others(file);
            // perf would take the root's file for a container's.
            let is_elsewhere = file.build_id.is_empty() && file.is_file();
            let name = match file.name.as_str() {
                "" => continue,
                _ if is_elsewhere && !file.root.is_empty() => file.whole_name(),
                name if is_elsewhere && !others.is_empty() => format!("{}{name}", file.device()),
                // perf would take its own.
                "[vdso]" => "[guest.vdso]".to_owned(),
                name if file.deleted => format!("{name} (deleted)"),
                name => name.to_owned(),
            };
            let mapped = Mapped {
                start: mapping.start,
                length: mapping.end - mapping.start,
                offset: mapping.offset,
                name: &name,
            };
            let id = bytes_of(&file.build_id);
            let stamp = stamp((pid, pid), since);
            format::put_program(&mapped, &id, file.inode, &stamp, &mut self.record);
        }
        self.put()
    }

    fn put_sample(&mut self, sample: &Sample) -> io::Result<()> {
        let (survey, guest) = (self.survey, &sample.guest);
        let kernel = in_kernel(sample);
        let (pid, tid) = ids(survey.names, survey.names.task_of(sample));
        let stamp = Stamp {
            pid,
            tid,
            time_ns: sample.time_ns,
            cpu: sample.vcpu,
            id: u64::from(sample.event) + 1,
        };
        // perf has return addresses, and ours are within the calls; the first is the sample's.
        let caller = |address: u64| address.wrapping_add(1);
        let own = usize::from(guest.chain.kernel_end.is_none());
        let mut chain = Chain {
            kernel: guest
                .chain
                .kernel
                .iter()
                .skip(1)
                .map(|&one| caller(one))
                .collect(),
            program: Vec::new(),
        };
        let frames = guest.chain.program.iter().skip(own);
        chain
            .program
            .extend(frames.map(|frame| caller(frame.address)));
        let first = if kernel {
            &mut chain.kernel
        } else {
            &mut chain.program
        };
        first.insert(0, sample.ip);
        let chain = survey.chains.then_some(&chain);
        let place = (sample.ip, sample.period, kernel);
        format::put_sample(place, chain, &stamp, &mut self.record);
        self.put()
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
        let mut features: Vec<(u32, Vec<u8>)> = Vec::new();
        let string = |text: &str| {
            let mut bytes = Vec::new();
            format::put_string(text, &mut bytes);
            bytes
        };
        let header = self.header;
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
            Record::Sample(sample) if self.survey.filter.takes(sample) => self.put_sample(sample),
            _ => Ok(()),
        }
    }
}

fn stamp((pid, tid): (u32, u32), time_ns: u64) -> Stamp {
    Stamp {
        pid,
        tid,
        time_ns,
        cpu: 0,
        id: 1,
    }
}

fn ids(names: &Names, task: Option<TaskId>) -> (u32, u32) {
    match task {
        Some(_) => names.ids(task),
        None => (NOBODY, NOBODY),
    }
}

/// Where the ring was not sampled, the address tells.
fn in_kernel(sample: &Sample) -> bool {
    match sample.ring {
        Some(ring) => ring == Ring::Kernel,
        None => sample.ip >= UPPER_HALF,
    }
}

fn page_behind(address: u64) -> u64 {
    (address | (PAGE - 1)).saturating_add(1)
}

fn bytes_of(digits: &str) -> Vec<u8> {
    let pairs = digits.as_bytes().chunks_exact(2);
    let byte = |pair: &[u8]| {
        let pair = std::str::from_utf8(pair).ok()?;
        u8::from_str_radix(pair, 16).ok()
    };
    pairs.map_while(byte).collect()
}
