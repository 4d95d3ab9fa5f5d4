//! What a profile file holds, and who takes its records in.

use std::io;

use perfmon_abi::compact::GuestPlace;
use perfmon_abi::wire::programs::Described;
use pmu_model::Provenance;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::numbers::Numbers;

/// What is known before the first sample: who was sampled, how, and by what.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Header {
    /// The version of Umpire that wrote the file.
    pub umpire: String,
    /// The VM that was asked for samples, by its number.
    pub vm: u32,
    /// Its name, or another word by which the user knows it. May be empty.
    #[serde(default)]
    pub vm_name: String,
    /// How many vCPUs the VM has.
    pub vcpus: u32,
    /// How many cores the vCPUs share.
    pub cores: u32,
    /// The machine: its processor and kernel, in words. May be empty.
    #[serde(default)]
    pub host: String,
    /// The command line that recorded, word by word, if it is known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// When sampling began, in nanoseconds since 1970 (UTC).
    pub start_unix_ns: u64,
    /// The TSC at that moment: the host's, or the VM's where time is virtual.
    pub start_tsc: u64,
    /// The frequency of this TSC in kHz.
    pub tsc_khz: u64,
    /// Times of samples and losses, and the duration, are virtual: of the VM's own clock. Absent:
    /// they are the host's.
    #[serde(default, skip_serializing_if = "is_false")]
    pub virtual_time: bool,
    /// The events, in the order in which samples refer to them.
    pub events: Vec<SampledEvent>,
    /// The guest's processes whose samples were taken in; with threads, where not all were.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(test, schemars(inner(range(min = 1))))]
    pub processes: Vec<u32>,
    /// The guest's threads whose samples were taken in, besides.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(test, schemars(inner(range(min = 1))))]
    pub threads: Vec<u32>,
}

/// An event that samples are taken of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct SampledEvent {
    /// Its name as the user gave it.
    pub name: String,
    /// How often a sample is taken.
    pub sampling: Sampling,
    /// How the number came about: `exact`, `hardware`, `derived`, `scaled`, `simulated`, or
    /// `unavailable`: nobody took it.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        serialize_with = "write_word",
        deserialize_with = "read_word"
    )]
    #[cfg_attr(test, schemars(with = "Option<String>", extend("enum" = crate::schema::PROVENANCE)))]
    pub provenance: Option<Provenance>,
}

impl SampledEvent {
    /// `the counts are hardware`, or that there are none.
    #[must_use]
    pub fn how(&self) -> String {
        match self.provenance {
            Some(provenance) => format!("the counts are {provenance}"),
            None => "it was never counted".to_owned(),
        }
    }
}

/// How often a sample is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Sampling {
    /// Each time the event took place so often.
    Period(
        /// Events between two samples.
        u64,
    ),
    /// So many times a second, by a period that is adapted.
    Frequency(
        /// Samples a second that were aimed at.
        u64,
    ),
}

/// The ring that the guest was in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Ring {
    /// CPL 0.
    Kernel,
    /// CPL 1 to 3.
    User,
}

impl Ring {
    /// `kernel` or `user`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::User => "user",
        }
    }
}

/// One sample.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Nanoseconds since sampling began.
    pub time_ns: u64,
    /// The guest's instruction pointer.
    pub ip: u64,
    /// How many events it stands for.
    pub period: u64,
    /// The guest's CR3, if it was asked for.
    pub cr3: Option<u64>,
    pub vm: u32,
    /// The vCPU, from 0.
    pub vcpu: u32,
    /// The core it ran on, from 0.
    pub core: u32,
    /// Which of [`Header::events`].
    pub event: u16,
    /// The event set that was active.
    pub set: u16,
    /// The ring, if it was asked for.
    pub ring: Option<Ring>,
    /// The guest's task, what it has mapped there, and the callers, as far as they are
    /// known. [`Record::Described`] says what the numbers stand for.
    pub guest: GuestPlace,
}

/// Something that could not be sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss {
    /// When it was noticed, in nanoseconds since sampling began.
    pub time_ns: u64,
    pub vm: u32,
    /// The vCPU; none where it is not known.
    pub vcpu: Option<u32>,
    /// What is missing, and why.
    pub kind: LossKind,
}

/// What is missing, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossKind {
    /// So many samples found no room in the sampling buffer.
    Full(u64),
    /// So many times overflows came too fast, and sampling was masked until the
    /// tool had it go on.
    Throttled(u64),
    /// For so many nanoseconds the counter was somebody else's.
    Blind(u64),
}

/// One record of a profile file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    Sample(Sample),
    /// Samples that are missing.
    Loss(Loss),
    /// What a number in samples stands for. It may come behind samples that have the
    /// number, and two numbers may stand for the same.
    Described(Described),
}

/// What a file holds altogether.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Totals {
    /// Samples.
    pub samples: u64,
    /// Samples that found no room.
    pub lost: u64,
    /// Times that overflows came too fast.
    pub throttled: u64,
    /// Time without a counter, in nanoseconds, summed over vCPUs.
    pub blind_ns: u64,
    /// Samples that were taken, and left out on purpose.
    #[serde(flatten)]
    pub left_out: LeftOut,
}

/// Samples that were taken and are not in the file, since nobody wanted them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct LeftOut {
    /// Samples that were taken and left out: of other tasks than were asked for. Absent: none.
    #[serde(rename = "left_out", skip_serializing_if = "is_zero")]
    #[cfg_attr(test, schemars(range(min = 1)))]
    pub others: u64,
    /// Samples that were taken and left out, since nobody knew whose they are. Absent: none.
    #[serde(rename = "left_out_unknown", skip_serializing_if = "is_zero")]
    #[cfg_attr(test, schemars(range(min = 1)))]
    pub unknown: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes it so")]
fn is_false(is: &bool) -> bool {
    !*is
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes it so")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl LeftOut {
    /// Takes more in. Sums stay at the greatest number there is.
    pub(super) fn add(&mut self, more: Self) {
        self.others = self.others.saturating_add(more.others);
        self.unknown = self.unknown.saturating_add(more.unknown);
    }

    /// `5 samples of others left out, 2 of unknown tasks`; none if none were.
    #[must_use]
    pub fn words(&self) -> Option<String> {
        match (self.others, self.unknown) {
            (0, 0) => None,
            (others, 0) => Some(format!("{others} samples of others left out")),
            (0, unknown) => Some(format!("{unknown} samples of unknown tasks left out")),
            (others, unknown) => Some(format!(
                "{others} samples of others and {unknown} of unknown tasks left out"
            )),
        }
    }
}

impl Totals {
    /// Takes `record` in. Sums stay at the greatest number there is.
    pub fn add(&mut self, record: &Record) {
        let (sum, more) = match record {
            Record::Sample(_) => (&mut self.samples, 1),
            Record::Loss(loss) => match loss.kind {
                LossKind::Full(samples) => (&mut self.lost, samples),
                LossKind::Throttled(times) => (&mut self.throttled, times),
                LossKind::Blind(ns) => (&mut self.blind_ns, ns),
            },
            Record::Described(_) => return,
        };
        *sum = sum.saturating_add(more);
    }
}

fn write_word<S: Serializer>(provenance: &Option<Provenance>, to: S) -> Result<S::Ok, S::Error> {
    match provenance {
        Some(provenance) => to.collect_str(provenance),
        None => to.serialize_none(),
    }
}

fn read_word<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Provenance>, D::Error> {
    const ALL: [Provenance; 5] = [
        Provenance::Exact,
        Provenance::Hardware,
        Provenance::Scaled,
        Provenance::Derived,
        Provenance::Simulated,
    ];
    let Some(word) = Option::<String>::deserialize(from)? else {
        return Ok(None);
    };
    let named = ALL.into_iter().find(|one| one.to_string() == word);
    let error = || serde::de::Error::custom(format!("'{word}' is no provenance"));
    named.map(Some).ok_or_else(error)
}

/// Which samples a report is about.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Those of these vCPUs; none for all.
    pub vcpus: Option<Numbers>,
    /// Those taken on these cores; none for all.
    pub cores: Option<Numbers>,
    /// Those of this event, by its number; none for all.
    pub event: Option<u16>,
}

impl Filter {
    /// `sample` is among them.
    #[must_use]
    pub fn takes(&self, sample: &Sample) -> bool {
        let of = |list: &Option<Numbers>, number| list.as_ref().is_none_or(|all| all.has(number));
        let event = self.event.is_none_or(|event| event == sample.event);
        event && of(&self.vcpus, sample.vcpu) && of(&self.cores, sample.core)
    }

    /// It leaves vCPUs or cores out.
    #[must_use]
    pub fn is_part(&self) -> bool {
        self.vcpus.is_some() || self.cores.is_some()
    }
}

/// Something that is made of records.
pub trait Sink {
    /// Takes the next record in.
    ///
    /// # Errors
    /// What it writes to takes no more.
    fn take(&mut self, record: &Record) -> io::Result<()>;

    /// A sample of a task or place that was not asked for; it counts in the whole that others
    /// are parts of.
    fn pass(&mut self, _sample: &Sample) {}
}
