//! Lines as perf prints them.

use std::fmt::Write as _;
use std::io;

use super::fields::Field;
use super::frames::FrameAt;
use super::{Script, words};
use crate::profile::facts::{self, event_name};
use crate::profile::location::CodeLocation;
use crate::profile::record::{Loss, LossKind, Ring, Sample};

impl Script<'_> {
    /// `comm pid/tid [cpu] time: period event:`, then the place on the same line, or a line for
    /// each place and an empty one.
    pub(super) fn sample_text(&mut self, sample: &Sample) -> io::Result<()> {
        let mut line = self.head(sample);
        let frames = FrameAt::of(sample, self.names);
        if self.fields.has_lines() {
            writeln!(self.out, "{}", line.trim_end())?;
            for frame in frames {
                // What is missing is a comment, for readers take any other line for a place.
                match frame.location {
                    CodeLocation::Missing(_) => {
                        let missing = frame.location.symbol(self.names);
                        writeln!(self.out, "#{:>17}{missing}", "")?;
                    }
                    _ => writeln!(self.out, "\t{}", self.place(frame))?,
                }
            }
            return writeln!(self.out);
        }
        if self.fields.has_place()
            && let Some(own) = frames.first()
        {
            let _ = write!(line, " {}", self.place(*own));
        }
        writeln!(self.out, "{}", line.trim_end())
    }

    /// The line up to the place, with a blank at its end.
    fn head(&self, sample: &Sample) -> String {
        let has = |field| self.fields.has(field);
        let mut parts = vec![self.task(sample), self.own(sample)];
        if has(Field::Cpu) {
            parts.push(format!("[{:03}] ", sample.vcpu));
        }
        if has(Field::Time) {
            parts.push(format!("{}: ", self.seconds(sample.time_ns)));
        }
        if has(Field::Period) {
            parts.push(format!("{:>10} ", sample.period));
        }
        if has(Field::Event) {
            let name = event_name(self.header, sample.event);
            parts.push(format!("{}: ", words::event(&name)));
        }
        parts.concat()
    }

    /// Name and numbers of the task: 0/0 where it is not known, which readers need as well.
    fn task(&self, sample: &Sample) -> String {
        let has = |field| self.fields.has(field);
        let task = self.names.task_of(sample);
        let (pid, tid) = self.names.ids(task);
        let mut text = String::new();
        if has(Field::Comm) {
            let comm = words::comm(self.names.comm(task));
            // Readers begin a sample at the first column, and a name has two letters at least.
            text = if self.fields.has_lines() {
                format!("{comm:<2} ")
            } else {
                format!("{comm:>16} ")
            };
        }
        // Text takes all that it is given.
        let _ = match (has(Field::Pid), has(Field::Tid)) {
            (true, true) => write!(text, "{pid:>5}/{tid:<5} "),
            (true, false) => write!(text, "{pid:>5} "),
            (false, true) => write!(text, "{tid:>5} "),
            (false, false) => Ok(()),
        };
        text
    }

    /// What perf does not have, where perf itself has VM and vCPU: `vm=1 vcpu=0 `. No part is a
    /// number alone.
    fn own(&self, sample: &Sample) -> String {
        let ring = sample.ring.map_or("?", Ring::name);
        let cr3 = sample.cr3.map(|cr3| format!("{cr3:#x}"));
        let parts = [
            (Field::Vm, format!("vm={}", sample.vm)),
            (Field::Vcpu, format!("vcpu={}", sample.vcpu)),
            (Field::Core, format!("core={}", sample.core)),
            (Field::Set, format!("set={}", sample.set)),
            (Field::Ring, format!("ring={ring}")),
            (Field::Cr3, format!("cr3={}", cr3.as_deref().unwrap_or("?"))),
        ];
        let chosen = parts
            .into_iter()
            .filter(|(field, _)| self.fields.has(*field));
        let chosen: Vec<String> = chosen.map(|(_, text)| text).collect();
        chosen.iter().map(|text| format!("{text} ")).collect()
    }

    /// `ffffffff81000010 clear_page+0x1d ([kernel.kallsyms])`, as far as it was chosen.
    fn place(&self, frame: FrameAt) -> String {
        let has = |field| self.fields.has(field);
        let mut parts = Vec::new();
        if has(Field::Ip) {
            parts.push(format!("{:>16x}", frame.address));
        }
        if has(Field::Sym) {
            let found = frame.symbol(self.names);
            let name = found.symbol.filter(|name| !name.is_empty());
            let mut text = name.map_or_else(|| "[unknown]".to_owned(), |name| words::symbol(&name));
            if let Some(offset) = found.symbol_offset.filter(|_| has(Field::Symoff)) {
                let _ = write!(text, "+{offset:#x}");
            }
            parts.push(text);
        }
        if has(Field::Dso) {
            let object = frame.location.whole_object(self.names);
            parts.push(format!("({})", words::object(&object)));
        }
        parts.join(" ")
    }

    /// What perf prints in front with `--header`, as far as a guest has it. Firefox tells by it
    /// what it reads where a line has more than perf's.
    pub(super) fn header(&mut self) -> io::Result<()> {
        let (vm, began) = (self.header.vm, facts::began(self.header));
        let out = &mut self.out;
        writeln!(out, "# ========\n# captured on    : {began}\n# VM : {vm}")?;
        if self.header.virtual_time {
            writeln!(out, "# times : virtual, by the clock of the VM")?;
        }
        for event in &self.header.events {
            let name = words::event(&event.name);
            let often = facts::how_often(event.sampling);
            writeln!(out, "# event : name = {name}, sampled {often}")?;
        }
        writeln!(out, "# ========\n#")
    }

    /// A comment, in which no number stands alone.
    pub(super) fn loss_text(&mut self, loss: &Loss) -> io::Result<()> {
        let vcpu = loss.vcpu.map_or("?".to_owned(), |vcpu| vcpu.to_string());
        let what = match loss.kind {
            LossKind::Full(samples) => format!("LOST samples={samples}: the buffer was full"),
            LossKind::Throttled(times) => format!("THROTTLED times={times}"),
            LossKind::Blind(ns) => format!("BLIND ns={ns}: the counter was taken away"),
        };
        let time = self.seconds(loss.time_ns);
        let time = time.trim_start();
        writeln!(self.out, "# time={time} vm={} vcpu={vcpu} {what}", loss.vm)?;
        if self.fields.has_lines() {
            // A paragraph of its own, as each sample is.
            writeln!(self.out)?;
        }
        Ok(())
    }

    /// Seconds and microseconds, as perf writes time; or nanoseconds.
    fn seconds(&self, ns: u64) -> String {
        let (whole, rest) = (ns / 1_000_000_000, ns % 1_000_000_000);
        if self.ns {
            format!("{whole:>5}.{rest:09}")
        } else {
            format!("{whole:>5}.{:06}", rest / 1000)
        }
    }
}
