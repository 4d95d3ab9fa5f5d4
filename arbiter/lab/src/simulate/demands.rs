//! Demands: who wants counters from when on. They do not depend on answers.

use arbiter::{CounterId, Wanted};

use crate::figures::Class;
use crate::plan::{Machine, Workload};
use crate::random::{Micros, Stream};

/// What one demand is for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Draw {
    pub(super) hold: Micros,
    pub(super) patience: Micros,
    pub(super) wanted: Wanted,
}

/// The demands of all classes: one stream for each class and vCPU, or core.
#[derive(Debug)]
pub(super) struct Demands<'a> {
    machine: &'a Machine,
    workload: &'a Workload,
    /// The index is (class, number).
    streams: Vec<Stream>,
}

impl<'a> Demands<'a> {
    pub(super) fn new(machine: &'a Machine, workload: &'a Workload, seed: u64) -> Self {
        let mut demands = Self {
            machine,
            workload,
            streams: Vec::new(),
        };
        for class in Class::ALL {
            let streams =
                (0..demands.sources()).map(|number| Stream::new(seed, class as u8, number));
            demands.streams.extend(streams);
        }
        demands
    }

    /// The most sources of demands that a class has.
    fn sources(&self) -> u32 {
        self.machine.vcpus.max(self.machine.cores)
    }

    /// The sources of demands of a class: vCPUs, or cores.
    pub(super) fn numbers(&self, class: Class) -> u32 {
        match class {
            Class::Tools => self.machine.cores,
            _ => self.machine.vcpus,
        }
    }

    fn stream(&mut self, number: u32, class: Class) -> &mut Stream {
        let index = class as usize * self.sources() as usize + number as usize;
        &mut self.streams[index]
    }

    /// After how long the next demand comes, if one does.
    pub(super) fn gap(&mut self, number: u32, class: Class) -> Option<Micros> {
        let arrival = self.workload.of(class).arrival;
        self.stream(number, class).gap(arrival)
    }

    /// A class makes a demand.
    pub(super) fn draw(&mut self, number: u32, class: Class) -> Draw {
        let demand = *self.workload.of(class);
        let fixed = u32::from(self.machine.fixed);
        let stream = self.stream(number, class);
        let hold = stream.exponential(demand.hold_ms);
        let patience = stream.exponential(demand.patience_ms);
        let below = stream.below(demand.greed.into());
        let mut wanted = Wanted::Any(1 + u8::try_from(below).unwrap_or(0));
        if demand.fixed_share > 0.0 && stream.chance(demand.fixed_share) {
            let position = stream.below(fixed);
            wanted = Wanted::This(CounterId::Fixed(u8::try_from(position).unwrap_or(0)));
        }
        Draw {
            hold,
            patience,
            wanted,
        }
    }
}
