//! What a report says about the file that it is of.

use super::chosen::Chosen;
use super::names::Names;
use super::reader::Ending;
use super::record::{Filter, Header, SampledEvent, Sampling, Totals};
use super::tally::Unknown;

/// A file that was read to its end, and how it was looked at.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    pub header: &'a Header,
    /// What it holds, whatever the filter lets through.
    pub totals: Totals,
    pub ending: Ending,
    /// Records of kinds that this version does not know.
    pub unknown_records: u64,
    /// Which samples the report is about.
    pub filter: &'a Filter,
    /// The same by task, code and time.
    pub(super) chosen: &'a Chosen,
    /// The names of the guest's kernel and programs, as far as they are known.
    pub names: &'a Names,
}

/// What is said behind a duration of virtual time.
pub(super) fn of_time(header: &Header) -> &'static str {
    if header.virtual_time {
        " of virtual time"
    } else {
        ""
    }
}

impl Facts<'_> {
    /// What a reader must know before believing the report; a line each.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if !matches!(self.ending, Ending::Whole(_)) {
            warnings.push(self.ending.to_string());
        }
        if self.unknown_records > 0 {
            warnings.push(format!(
                "{} records are of kinds that a later umpire writes, and were passed over",
                self.unknown_records
            ));
        }
        warnings.extend_from_slice(self.names.warnings());
        warnings.extend(self.chosen.missed(self.names));
        warnings
    }

    /// What is said of the samples that a table is of, behind the event's name.
    #[must_use]
    pub fn part(&self) -> &'static str {
        match (self.chosen.is_part(), self.filter.is_part()) {
            (true, _) => " that were chosen",
            (false, true) => " on the chosen vCPUs and cores",
            (false, false) => "",
        }
    }

    /// Whose samples the file has, where these are not all: `process 7, 8 and thread 9; 5 samples
    /// of others left out`.
    #[must_use]
    pub fn whose(&self) -> Option<String> {
        let list = |what, numbers: &[u32]| {
            let words: Vec<String> = numbers.iter().map(u32::to_string).collect();
            (!words.is_empty()).then(|| format!("{what} {}", words.join(", ")))
        };
        let processes = list("process", &self.header.processes);
        let whose = processes
            .into_iter()
            .chain(list("thread", &self.header.threads));
        let whose = whose.collect::<Vec<_>>().join(" and ");
        let left_out = self.totals.left_out.words();
        let left_out = left_out.map_or(String::new(), |words| format!("; {words}"));
        (!whose.is_empty()).then(|| format!("{whose}{left_out}"))
    }

    /// What was not sampled, in one line; none if nothing was lost.
    #[must_use]
    pub fn losses(&self) -> Option<String> {
        let totals = self.totals;
        let mut parts = Vec::new();
        if totals.lost > 0 {
            parts.push(format!("{} samples lost for want of room", totals.lost));
        }
        if totals.throttled > 0 {
            parts.push(format!("throttled {} times", totals.throttled));
        }
        if totals.blind_ns > 0 {
            let blind = scaled(totals.blind_ns, 1_000_000);
            parts.push(format!("{blind:.3} ms without a counter"));
        }
        parts.extend(totals.left_out.words());
        (!parts.is_empty()).then(|| parts.join("; "))
    }

    /// What to do about addresses without a name, if there is something to do.
    #[must_use]
    pub fn hint(&self, of: Unknown) -> Option<&'static str> {
        let no_kernel = of.kernel > 0 && of.kernel_unknown >= of.kernel;
        let no_program = of.program_unknown > 0 && self.names.symfs.is_none();
        if no_kernel && self.names.kernel.is_empty() {
            Some(
                "give --symbols FILE for names: the guest's vmlinux or System.map, or a copy of \
                 its /proc/kallsyms",
            )
        } else if no_kernel {
            Some(
                "no sample is within a symbol of the file: is it the guest's kernel? One that \
                 moved itself (KASLR) needs --kaslr-offset, or a copy of its /proc/kallsyms",
            )
        } else if no_program {
            Some(
                "give --symfs DIR for names in programs: the guest's root, or a copy of what it \
                 has of these files",
            )
        } else {
            None
        }
    }
}

/// `every 1000 events` or `99 times a second`.
#[must_use]
pub fn how_often(sampling: Sampling) -> String {
    match sampling {
        Sampling::Period(1) => "every event".to_owned(),
        Sampling::Period(events) => format!("every {events} events"),
        Sampling::Frequency(hz) => format!("{hz} times a second"),
    }
}

/// `cycles`, or `event 3` for one that the header does not have.
#[must_use]
pub fn event_name(header: &Header, event: u16) -> String {
    match header.events.get(usize::from(event)) {
        Some(SampledEvent { name, .. }) => name.clone(),
        None => format!("event {event}"),
    }
}

/// When sampling began, as in RFC 3339.
#[must_use]
pub fn began(header: &Header) -> String {
    let seconds = i64::try_from(header.start_unix_ns / 1_000_000_000).ok();
    let time = seconds.and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    time.map_or_else(|| "at an unknown time".to_owned(), |time| time.to_string())
}

/// Nanoseconds as seconds or milliseconds, which need not be exact.
#[expect(clippy::cast_precision_loss, reason = "rounded for people")]
pub(super) fn scaled(ns: u64, unit: u64) -> f64 {
    ns as f64 / unit as f64
}
