//! Jobs: one demand each, from its arrival to its end. And the desks at which they wait.

use std::collections::VecDeque;

use arbiter::{CounterId, CounterSet, Wanted};

use crate::figures::{Class, Kind};
use crate::random::Micros;

/// A job, or one that has ended: its place may have another by now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JobId {
    index: u32,
    generation: u32,
}

/// Where a job is on its way to its counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// In the queue of its layer.
    Queued,
    /// Its request is before the arbiter.
    Asking,
    /// It was refused, and will ask again.
    Resting,
    /// It has what it wants.
    Counting,
}

/// One demand for counters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) class: Class,
    pub(crate) vcpu: u32,
    pub(crate) stage: Stage,
    pub(crate) wanted: Wanted,
    pub(crate) held: CounterSet,
    pub(crate) born: Micros,
    /// For how long counters are wanted, from the grant on.
    pub(crate) hold: Micros,
    /// It has had all its counters once.
    pub(crate) granted: bool,
    /// What it lacks counts as blind. True from the start for a tool, whose core runs on.
    pub(crate) misses: bool,
    /// The vCPU's running time up to which work is accounted.
    pub(crate) since: f64,
}

impl Job {
    pub(crate) fn lacks(&self) -> u8 {
        let held = u8::try_from(self.held.len()).unwrap_or(u8::MAX);
        self.wanted.count().saturating_sub(held)
    }

    pub(crate) fn kind(&self) -> Kind {
        match self.wanted {
            Wanted::This(CounterId::Fixed(_)) => Kind::Fixed,
            _ => Kind::Programmable,
        }
    }
}

/// All jobs.
#[derive(Debug, Default)]
pub(crate) struct Jobs {
    places: Vec<(u32, Option<Job>)>,
    free: Vec<u32>,
}

impl Jobs {
    pub(crate) fn add(&mut self, job: Job) -> JobId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.places.push((0, None));
            u32::try_from(self.places.len() - 1).unwrap_or(u32::MAX)
        });
        let place = &mut self.places[index as usize];
        place.1 = Some(job);
        JobId {
            index,
            generation: place.0,
        }
    }

    /// The job, unless it has ended.
    pub(crate) fn get(&mut self, id: JobId) -> Option<&mut Job> {
        let (generation, job) = self.places.get_mut(id.index as usize)?;
        job.as_mut().filter(|_| *generation == id.generation)
    }

    pub(crate) fn end(&mut self, id: JobId) {
        if self.get(id).is_some() {
            let place = &mut self.places[id.index as usize];
            *place = (place.0.wrapping_add(1), None);
            self.free.push(id.index);
        }
    }

    pub(crate) fn alive(&self) -> Vec<JobId> {
        let places = (0..).zip(&self.places);
        let alive = places.filter(|(_, (_, job))| job.is_some());
        alive
            .map(|(index, (generation, _))| JobId {
                index,
                generation: *generation,
            })
            .collect()
    }
}

/// Where the jobs of one layer of one vCPU wait: the layer has one request before the
/// arbiter at a time.
#[derive(Debug, Default)]
pub(crate) struct Desk {
    pub(crate) queue: VecDeque<JobId>,
    pub(crate) asking: Option<JobId>,
    /// Counters that nobody of the layer uses any more, and that it cannot give back
    /// while its request is pending.
    pub(crate) unused: Vec<CounterId>,
}
