//! Cores: vCPUs share the time of their core equally, and move between cores.

use arbiter::Wanted;

use crate::random::Micros;

/// A core.
#[derive(Debug, Default)]
struct Core {
    vcpus: Vec<u32>,
    /// The running time that each vCPU had that was here from the start, up to `at`.
    /// Differences of this clock are what any vCPU of the core ran.
    shared: f64,
    at: Micros,
    /// Tools that look at this core: until when, and which counters each wants.
    tools: Vec<(Micros, Wanted)>,
}

impl Core {
    /// vCPUs that share the core, at least 1.
    fn load(&self) -> f64 {
        self.vcpus.len().max(1) as f64
    }

    fn clock(&self, now: Micros) -> f64 {
        self.shared + now.saturating_sub(self.at) as f64 / self.load()
    }

    /// Moves the clock on. To be called before the number of vCPUs changes.
    fn settle(&mut self, now: Micros) {
        self.shared = self.clock(now);
        self.at = now;
    }
}

/// Where a vCPU is.
#[derive(Debug)]
struct Placement {
    core: u32,
    /// Its place in the list of its core.
    slot: usize,
    /// Its running time before it came to its core.
    ran: f64,
    /// The core's clock when it came.
    came: f64,
}

/// All cores, and which vCPU is on which.
#[derive(Debug)]
pub(super) struct Cores {
    cores: Vec<Core>,
    seats: Vec<Placement>,
}

impl Cores {
    /// The vCPUs one after the other on the cores.
    pub(super) fn new(cores: u32, vcpus: u32) -> Self {
        let mut all = Self {
            cores: (0..cores).map(|_| Core::default()).collect(),
            seats: Vec::new(),
        };
        for number in 0..vcpus {
            let core = number % cores;
            let list = &mut all.cores[core as usize].vcpus;
            list.push(number);
            let slot = list.len() - 1;
            all.seats.push(Placement {
                core,
                slot,
                ran: 0.0,
                came: 0.0,
            });
        }
        all
    }

    fn of(&self, vcpu: u32) -> (&Placement, &Core) {
        let seat = &self.seats[vcpu as usize];
        (seat, &self.cores[seat.core as usize])
    }

    /// For how long a vCPU has run. It is the same to the last bit before and after a move:
    /// what is held for no time must not count as less than nothing.
    pub(super) fn ran(&self, vcpu: u32, now: Micros) -> f64 {
        let (seat, core) = self.of(vcpu);
        seat.ran + (core.clock(now) - seat.came)
    }

    /// vCPUs that share the core of this one.
    pub(super) fn load(&self, vcpu: u32) -> f64 {
        self.of(vcpu).1.load()
    }

    /// The emptier of two cores, unless the vCPU is there already.
    pub(super) fn elsewhere(&self, vcpu: u32, one: u32, other: u32) -> Option<u32> {
        let load = |core: u32| self.cores[core as usize].vcpus.len();
        let to = if load(other) < load(one) { other } else { one };
        (to != self.of(vcpu).0.core).then_some(to)
    }

    /// Moves a vCPU. The tools that look at its new core: until when, and what each wants.
    pub(super) fn migrate(&mut self, vcpu: u32, to: u32, now: Micros) -> Vec<(Micros, Wanted)> {
        let Placement {
            core: from, slot, ..
        } = self.seats[vcpu as usize];
        for core in [from, to] {
            self.cores[core as usize].settle(now);
        }
        let ran = self.ran(vcpu, now);
        let list = &mut self.cores[from as usize].vcpus;
        list.swap_remove(slot);
        if let Some(moved) = list.get(slot).copied() {
            self.seats[moved as usize].slot = slot;
        }
        let core = &mut self.cores[to as usize];
        core.vcpus.push(vcpu);
        core.tools.retain(|(until, _)| *until > now);
        let seat = &mut self.seats[vcpu as usize];
        seat.core = to;
        seat.slot = core.vcpus.len() - 1;
        (seat.ran, seat.came) = (ran, core.shared);
        core.tools.clone()
    }

    /// A tool begins to look at a core. The vCPUs there.
    pub(super) fn look_at(
        &mut self,
        core: u32,
        now: Micros,
        (until, wanted): (Micros, Wanted),
    ) -> Vec<u32> {
        let core = &mut self.cores[core as usize];
        core.tools.retain(|(until, _)| *until > now);
        core.tools.push((until, wanted));
        core.vcpus.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Stream;

    #[test]
    fn a_vcpus_time_stands_still_while_it_moves() {
        let mut chance = Stream::new(1, 0, 0);
        let mut cores = Cores::new(3, 7);
        let mut now = 0;
        for _ in 0..10_000 {
            now += Micros::from(chance.below(1_000));
            let vcpu = chance.below(7);
            let before: Vec<f64> = (0..7).map(|one| cores.ran(one, now)).collect();
            if let Some(to) = cores.elsewhere(vcpu, chance.below(3), chance.below(3)) {
                let _ = cores.migrate(vcpu, to, now);
            }
            let after: Vec<f64> = (0..7).map(|one| cores.ran(one, now)).collect();
            assert_eq!(before, after, "at {now}");
        }
        // Cores are all that there is to run on.
        let all: f64 = (0..7).map(|one| cores.ran(one, now)).sum();
        assert!(all <= 3.0 * now as f64 + 1.0, "{all} of {now}");
    }
}
