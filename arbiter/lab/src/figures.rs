//! The figures of a run: what is counted while it goes on, and the metrics made of it.

use core::fmt;

use arbiter::Layer;

use crate::random::Micros;

/// Who wants counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// The guest's firmware.
    Firmware,
    Hypervisor,
    /// Tools of the host, which ask as the hypervisor does.
    Tools,
    /// The guest's kernel.
    Kernel,
    /// Programs of the guest. Their kernel asks for them.
    Programs,
}

impl Class {
    /// All classes, in declaration order.
    pub const ALL: [Class; 5] = [
        Class::Firmware,
        Class::Hypervisor,
        Class::Tools,
        Class::Kernel,
        Class::Programs,
    ];

    /// The word of the class in files and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Class::Firmware => "firmware",
            Class::Hypervisor => "hypervisor",
            Class::Tools => "tools",
            Class::Kernel => "kernel",
            Class::Programs => "programs",
        }
    }

    /// The layer that asks for the class.
    pub const fn layer(self) -> Layer {
        match self {
            Class::Firmware => Layer::Firmware,
            Class::Hypervisor | Class::Tools => Layer::Hypervisor,
            Class::Kernel | Class::Programs => Layer::GuestKernel,
        }
    }
}

/// A kind of counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Counters whose event software selects. A demand wants some of them, whichever.
    Programmable,
    /// Counters bound to one event each. A demand wants one, by its position.
    Fixed,
}

impl Kind {
    /// Both kinds, in declaration order.
    pub const ALL: [Kind; 2] = [Kind::Programmable, Kind::Fixed];

    /// The word of the kind in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Programmable => "programmable",
            Kind::Fixed => "fixed",
        }
    }
}

/// Times in buckets: eight for each power of two, so a quantile is right to 7 %.
#[derive(Clone, Debug, PartialEq)]
struct Histogram(Vec<u64>);

const PER_OCTAVE: u32 = 8;

impl Histogram {
    fn note(&mut self, time: Micros) {
        let index = match time.checked_ilog2() {
            Some(octave) if octave >= 3 => {
                let fine = (time >> (octave - 3)) & 7;
                u64::from((octave - 2) * PER_OCTAVE) + fine
            }
            _ => time,
        };
        let index = usize::try_from(index).unwrap_or(0);
        if self.0.len() <= index {
            self.0.resize(index + 1, 0);
        }
        self.0[index] += 1;
    }

    /// The middle of the bucket that the quantile falls into.
    fn quantile(&self, share: f64) -> Option<f64> {
        let all: u64 = self.0.iter().sum();
        let mut left = share * all as f64;
        let bucket = self.0.iter().position(|count| {
            left -= *count as f64;
            *count > 0 && left <= 0.0
        })?;
        let bucket = u32::try_from(bucket).ok()?;
        let (octave, fine) = (bucket / PER_OCTAVE, f64::from(bucket % PER_OCTAVE));
        Some(match octave {
            0 => fine,
            _ => (8.5 + fine) * f64::from(octave - 1).exp2(),
        })
    }
}

/// What became of the demands of one class for counters of one kind.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tally {
    pub(crate) demands: u64,
    pub(crate) granted: u64,
    pub(crate) denied: u64,
    pub(crate) waited: u128,
    waits: Histogram,
    /// Counters that others took.
    pub(crate) lost: u64,
    /// Counters times microseconds of a running vCPU: held by a demand.
    pub(crate) work: f64,
    /// The same: lacked by a demand that had its counters before.
    pub(crate) blind: f64,
    /// The same: what all demands wanted that were granted or denied.
    pub(crate) wish: f64,
}

impl Tally {
    const fn new() -> Self {
        Tally {
            demands: 0,
            granted: 0,
            denied: 0,
            waited: 0,
            waits: Histogram(Vec::new()),
            lost: 0,
            work: 0.0,
            blind: 0.0,
            wish: 0.0,
        }
    }

    pub(crate) fn grant(&mut self, waited: Micros) {
        self.granted += 1;
        self.waited += u128::from(waited);
        self.waits.note(waited);
    }

    fn add(&mut self, other: &Tally) {
        self.demands += other.demands;
        self.granted += other.granted;
        self.denied += other.denied;
        self.waited += other.waited;
        self.lost += other.lost;
        self.work += other.work;
        self.blind += other.blind;
        self.wish += other.wish;
        let length = self.waits.0.len().max(other.waits.0.len());
        self.waits.0.resize(length, 0);
        for (sum, count) in self.waits.0.iter_mut().zip(&other.waits.0) {
            *sum += count;
        }
    }
}

/// The figures of one run.
#[derive(Clone, Debug, PartialEq)]
pub struct Figures {
    /// Requests for counters that the arbiters had to decide.
    pub requests: u64,
    /// Events of the simulation.
    pub events: u64,
    /// By class, then by kind.
    tallies: [[Tally; Kind::ALL.len()]; Class::ALL.len()],
    /// Counters of each kind times microseconds that all cores have.
    capacity: [f64; Kind::ALL.len()],
    pub(crate) fair_to_vcpus: Option<f64>,
}

/// What a figure is about: whose demands, for counters of which kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Who {
    /// The class. `None` means all together.
    pub class: Option<Class>,
    /// The kind. `None` means both together.
    pub kind: Option<Kind>,
}

impl Who {
    /// All demands.
    pub const ALL: Who = Who {
        class: None,
        kind: None,
    };

    /// The demands of one class.
    pub const fn one(class: Class) -> Who {
        Who {
            class: Some(class),
            kind: None,
        }
    }

    /// The same demands, but only those for counters of this kind.
    pub const fn of(self, kind: Kind) -> Who {
        Who {
            class: self.class,
            kind: Some(kind),
        }
    }

    /// All classes together, then each.
    pub fn every() -> impl Iterator<Item = Who> {
        [Who::ALL].into_iter().chain(Class::ALL.map(Who::one))
    }

    fn has(self, class: Class, kind: Kind) -> bool {
        self.class.is_none_or(|one| one == class) && self.kind.is_none_or(|one| one == kind)
    }
}

/// The word in reports: `all`, `kernel`, `all/fixed`, `kernel/fixed`.
impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.class.map_or("all", Class::name))?;
        self.kind
            .map_or(Ok(()), |kind| write!(f, "/{}", kind.name()))
    }
}

/// A figure of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Metric {
    /// Mean time from a demand to its grant, in milliseconds.
    TimeToGrant,
    /// The time that 95 % of the grants took at most, in milliseconds.
    TimeToGrant95,
    /// Part of the demands that were given up before they were granted.
    DeniedShare,
    /// Jain's index of what the classes got of what they wanted; 1 is equal.
    Fairness,
    /// The same over vCPUs.
    FairnessVcpus,
    /// Part of the counter time of all cores in which a claimant counted; of one kind, if
    /// the figure is about one.
    Work,
    /// Part of the time in which a claimant should have counted that it lacked the
    /// counter.
    BlindShare,
    /// Counters that were taken from their holders, for each 1000 grants.
    Revocations,
}

impl Metric {
    /// All metrics, in the order of reports.
    pub const ALL: [Metric; 8] = [
        Metric::TimeToGrant,
        Metric::TimeToGrant95,
        Metric::DeniedShare,
        Metric::Fairness,
        Metric::FairnessVcpus,
        Metric::Work,
        Metric::BlindShare,
        Metric::Revocations,
    ];

    /// The word in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Metric::TimeToGrant => "time-to-grant-ms",
            Metric::TimeToGrant95 => "time-to-grant-p95-ms",
            Metric::DeniedShare => "denied-share",
            Metric::Fairness => "fairness",
            Metric::FairnessVcpus => "fairness-vcpus",
            Metric::Work => "work",
            Metric::BlindShare => "blind-share",
            Metric::Revocations => "revocations",
        }
    }
}

/// `a` of `b`, where there is any `b`.
fn ratio(a: f64, b: f64) -> Option<f64> {
    (b > 0.0).then(|| a / b)
}

/// Jain's index: 1 if all are equal, 1/n if one has all. `None` if there is nobody, or
/// nobody has anything.
pub(crate) fn jain(shares: impl Iterator<Item = f64>) -> Option<f64> {
    let (mut count, mut sum, mut squares) = (0.0, 0.0, 0.0);
    for share in shares {
        count += 1.0;
        sum += share;
        squares += share * share;
    }
    ratio(sum * sum, count * squares)
}

impl Figures {
    pub(crate) fn new(capacity: [f64; Kind::ALL.len()]) -> Self {
        Figures {
            requests: 0,
            events: 0,
            tallies: [const { [const { Tally::new() }; Kind::ALL.len()] }; Class::ALL.len()],
            capacity,
            fair_to_vcpus: None,
        }
    }

    pub(crate) fn tally_mut(&mut self, class: Class, kind: Kind) -> &mut Tally {
        &mut self.tallies[class as usize][kind as usize]
    }

    fn tally(&self, who: Who) -> Tally {
        let mut sum = Tally::new();
        for class in Class::ALL {
            for kind in Kind::ALL {
                if who.has(class, kind) {
                    sum.add(&self.tallies[class as usize][kind as usize]);
                }
            }
        }
        sum
    }

    /// Demands of a class or of all, and how many of them were granted and denied. The
    /// rest was undecided when the run ended, or moved away with its vCPU.
    pub fn demands(&self, who: Who) -> (u64, u64, u64) {
        let tally = self.tally(who);
        (tally.demands, tally.granted, tally.denied)
    }

    /// The value of a metric. `None` means that the run has none: what nobody measured
    /// is not 0.
    pub fn value(&self, metric: Metric, who: Who) -> Option<f64> {
        let tally = self.tally(who);
        if tally.demands == 0 {
            return None;
        }
        let (granted, denied) = (tally.granted as f64, tally.denied as f64);
        match metric {
            Metric::TimeToGrant => ratio(tally.waited as f64 / 1000.0, granted),
            Metric::TimeToGrant95 => tally.waits.quantile(0.95).map(|micros| micros / 1000.0),
            Metric::DeniedShare => ratio(denied, granted + denied),
            Metric::Fairness => {
                let classes = Class::ALL.map(|class| {
                    let class = Some(class);
                    self.tally(Who { class, ..who })
                });
                let got = classes.iter().filter(|one| one.wish > 0.0);
                let got = jain(got.map(|one| one.work / one.wish));
                got.filter(|_| who.class.is_none())
            }
            Metric::FairnessVcpus => self.fair_to_vcpus.filter(|_| who == Who::ALL),
            Metric::Work => {
                let kinds = Kind::ALL.iter().zip(self.capacity);
                let kinds = kinds.filter(|(kind, _)| who.kind.is_none_or(|one| one == **kind));
                ratio(tally.work, kinds.map(|(_, capacity)| capacity).sum())
            }
            Metric::BlindShare => ratio(tally.blind, tally.work + tally.blind),
            Metric::Revocations => ratio(tally.lost as f64 * 1000.0, granted),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_close() {
        let mut histogram = Histogram(Vec::new());
        assert_eq!(histogram.quantile(0.95), None);
        for time in 0..100_000 {
            histogram.note(time);
        }
        let found = histogram.quantile(0.95).unwrap();
        assert!((found / 95_000.0 - 1.0).abs() < 0.07, "{found}");
        let mut small = Histogram(Vec::new());
        small.note(5);
        assert_eq!(small.quantile(0.95), Some(5.0));
    }

    #[test]
    fn jain_knows_equal_from_unequal() {
        assert_eq!(jain([].into_iter()), None);
        assert_eq!(jain([0.0, 0.0].into_iter()), None);
        assert_eq!(jain([0.5; 4].into_iter()), Some(1.0));
        assert_eq!(jain([1.0, 0.0, 0.0, 0.0].into_iter()), Some(0.25));
    }
}
