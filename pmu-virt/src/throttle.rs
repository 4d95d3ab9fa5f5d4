//! A floor under the distance between two PMIs.

/// What to do with a PMI that has become due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThrottleDecision {
    /// Inject it now.
    Deliver,
    /// Keep it and inject it at this TSC value.
    Late {
        /// Earliest TSC value for it.
        at: u64,
    },
}

/// Keeps two PMIs at least a floor apart, so that a guest with a tiny period
/// still makes progress. A PMI that comes too early is late and counted,
/// never lost. Pure: the caller brings the time, in TSC ticks.
#[derive(Clone, Debug)]
pub struct PmiThrottle {
    floor: u64,
    last: Option<u64>,
    waiting: Option<u64>,
    delivered: u64,
    late: u64,
}

impl PmiThrottle {
    /// A throttle that lets a PMI through every `floor_ticks` at most; 0
    /// never delays one.
    pub fn new(floor_ticks: u64) -> Self {
        PmiThrottle {
            floor: floor_ticks,
            last: None,
            waiting: None,
            delivered: 0,
            late: 0,
        }
    }

    /// A PMI is due at `now`. While one is waiting, others join it.
    pub fn request(&mut self, now: u64) -> ThrottleDecision {
        if let Some(at) = self.waiting {
            if now < at {
                return ThrottleDecision::Late { at };
            }
            self.deliver(now);
            return ThrottleDecision::Deliver;
        }
        match self.last.map(|last| last.saturating_add(self.floor)) {
            Some(at) if now < at => {
                self.late += 1;
                self.waiting = Some(at);
                ThrottleDecision::Late { at }
            }
            _ => {
                self.deliver(now);
                ThrottleDecision::Deliver
            }
        }
    }

    /// Whether a late PMI is to be injected at `now`; true once for each.
    pub fn due(&mut self, now: u64) -> bool {
        let due = self.waiting.is_some_and(|at| now >= at);
        if due {
            self.deliver(now);
        }
        due
    }

    /// TSC value at which a waiting PMI comes due: a deadline for a kick.
    pub fn deadline(&self) -> Option<u64> {
        self.waiting
    }

    /// PMIs let through so far, late ones included.
    pub fn delivered(&self) -> u64 {
        self.delivered
    }

    /// PMIs that had to wait so far, one still waiting included.
    pub fn late(&self) -> u64 {
        self.late
    }

    /// Forgets a waiting PMI and the time of the last one, as a vCPU reset does. The sums stay.
    pub fn reset(&mut self) {
        self.last = None;
        self.waiting = None;
    }

    fn deliver(&mut self, now: u64) {
        self.last = Some(now);
        self.waiting = None;
        self.delivered += 1;
    }
}
