//! Who runs where, for how long: the same for every way to switch.

/// One vCPU on one core until the next slice of that core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slice {
    pub(super) core: usize,
    pub(super) vcpu: usize,
    /// Ticks of guest time.
    pub(super) ticks: u64,
}

/// vCPUs with their numbers of counters, and a schedule.
#[derive(Clone, Debug)]
pub(super) struct Scenario {
    pub(super) name: &'static str,
    pub(super) cores: usize,
    /// Counters of each vCPU.
    pub(super) counters: Vec<usize>,
    pub(super) slices: Vec<Slice>,
    /// Slices that one return of the vCPU in question takes.
    pub(super) per_return: u64,
    /// Highest number of operations for each return, if there is a target.
    pub(super) most: Option<f64>,
    /// Least factor by which the naive way needs more operations, if there is a target.
    pub(super) factor: Option<f64>,
}

/// About 5 ms of a TSC of 2.5 GHz.
const TICKS: u64 = 12_500_000;
/// One slice in this many is spent on another core than the vCPU's own.
const VISITS: u64 = 100;
/// Any number but 0.
const SEED: u64 = 0x9e37_79b9_7f4a_7c15;

/// The scenarios, each of about `slices` slices.
pub(super) fn all(slices: usize) -> [Scenario; 3] {
    [
        Scenario {
            name: "nothing counts",
            cores: 1,
            counters: vec![0; 4],
            slices: in_turn(4, slices),
            per_return: 1,
            most: Some(0.0),
            factor: None,
        },
        Scenario {
            name: "4 counters return, nobody counted",
            cores: 1,
            counters: vec![4, 0],
            slices: in_turn(2, slices),
            per_return: 2,
            most: Some(2.0),
            factor: None,
        },
        Scenario {
            name: "16 vCPUs on 2 cores: 0, 2, 4, 8",
            cores: 2,
            counters: (0..16).map(|vcpu| [0, 2, 4, 8][vcpu / 2 % 4]).collect(),
            slices: at_random(16, 2, slices),
            per_return: 1,
            most: None,
            factor: Some(3.0),
        },
    ]
}

/// One core, one vCPU after the other.
fn in_turn(vcpus: usize, slices: usize) -> Vec<Slice> {
    let slice = |n| Slice {
        core: 0,
        vcpu: n % vcpus,
        ticks: TICKS,
    };
    (0..slices).map(slice).collect()
}

/// Every vCPU has its own core, on which it runs but for a visit now and then.
/// No vCPU follows itself.
fn at_random(vcpus: usize, cores: usize, slices: usize) -> Vec<Slice> {
    let mut random = Random(SEED);
    let mut running = vec![usize::MAX; cores];
    let mut schedule = Vec::new();
    while schedule.len() < slices {
        let core = schedule.len() % cores;
        let mut vcpu = random.below(vcpus);
        let visits = random.next().is_multiple_of(VISITS);
        if (vcpu % cores == core) == visits {
            vcpu = (vcpu + 1) % vcpus;
        }
        if running.contains(&vcpu) {
            continue;
        }
        running[core] = vcpu;
        schedule.push(Slice {
            core,
            vcpu,
            ticks: TICKS / 2 + random.next() % TICKS,
        });
    }
    schedule
}

/// Xorshift (Marsaglia 2003), with the shifts 13, 7 and 17.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        let limit = u64::try_from(limit).unwrap_or(u64::MAX).max(1);
        usize::try_from(self.next() % limit).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_vcpus_have_each_number_of_counters_two_on_each_core() {
        let [.., crowd] = all(10_000);
        for counters in [0, 2, 4, 8] {
            let with = |core: usize| {
                let vcpus = crowd.counters.iter().enumerate();
                vcpus
                    .filter(|(vcpu, n)| vcpu % 2 == core && **n == counters)
                    .count()
            };
            assert_eq!([with(0), with(1)], [2, 2], "{counters} counters");
        }
        let visits = crowd
            .slices
            .iter()
            .filter(|slice| slice.vcpu % 2 != slice.core);
        let visits = visits.count();
        assert!((50..=200).contains(&visits), "{visits} visits");
    }

    #[test]
    fn no_vcpu_is_on_two_cores_or_follows_itself() {
        let [.., crowd] = all(2_000);
        for pair in crowd.slices.windows(2) {
            assert_ne!(pair[0].vcpu, pair[1].vcpu, "on two cores");
        }
        for pair in crowd.slices.windows(3) {
            assert_ne!(pair[0].vcpu, pair[2].vcpu, "after itself");
        }
        assert_eq!(crowd.slices, all(2_000)[2].slices, "the seed is fixed");
    }
}
