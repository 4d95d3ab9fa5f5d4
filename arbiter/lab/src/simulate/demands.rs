//! Demands: who wants counters from when on.

use arbiter::{Caller, CounterId, Layer, PcrRegister, Request, Wanted, abi};

use crate::figures::Class;
use crate::job::{Job, JobId, Stage};
use crate::random::{Micros, Stream};

use super::{Happening, Run, cookie};

impl Run<'_> {
    /// Boots every vCPU, and plans the first demands and migrations.
    pub(super) fn boot(&mut self) {
        for number in 0..self.machine.vcpus {
            self.run_firmware(number);
        }
        for class in Class::ALL {
            let sources = self.sources();
            for number in 0..sources {
                // The index of `demands` is (class, number).
                let stream = Stream::new(self.seed, class as u8, number);
                self.demands.push(stream);
                if number < self.numbers(class) {
                    self.plan_demand(number, class);
                }
            }
        }
        for number in 0..self.machine.vcpus {
            if let Some(gap) = self.moves.gap(self.machine.migrations) {
                self.plan(gap, Happening::Migrate(number));
            }
        }
    }

    /// The most sources of demands that a class has.
    fn sources(&self) -> u32 {
        self.machine.vcpus.max(self.machine.cores)
    }

    /// The sources of demands of a class: vCPUs, or cores.
    fn numbers(&self, class: Class) -> u32 {
        match class {
            Class::Tools => self.machine.cores,
            _ => self.machine.vcpus,
        }
    }

    fn stream(&mut self, number: u32, class: Class) -> &mut Stream {
        let index = class as usize * self.sources() as usize + number as usize;
        &mut self.demands[index]
    }

    fn plan_demand(&mut self, number: u32, class: Class) {
        let arrival = self.wants(class).arrival;
        if let Some(gap) = self.stream(number, class).gap(arrival) {
            self.plan(gap, Happening::Demand(number, class));
        }
    }

    /// A class makes a demand.
    pub(super) fn demand(&mut self, number: u32, class: Class) {
        let demand = *self.wants(class);
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
        self.plan_demand(number, class);
        if class == Class::Tools {
            self.start_tool(number, hold, wanted);
            return;
        }
        let id = self.start_job(number, class, hold, wanted);
        self.plan(patience, Happening::GiveUp(id));
        self.serve(number);
    }

    /// Makes a job and puts it into the queue of its layer.
    pub(super) fn start_job(
        &mut self,
        number: u32,
        class: Class,
        hold: Micros,
        wanted: Wanted,
    ) -> JobId {
        let vcpu = &self.vcpus[number as usize];
        let since = vcpu.ran + self.cores[vcpu.core as usize].clock(self.now);
        let job = Job {
            class,
            vcpu: number,
            stage: Stage::Queued,
            wanted,
            held: arbiter::CounterSet::EMPTY,
            born: self.now,
            hold,
            granted: false,
            misses: class == Class::Tools,
            since,
        };
        self.figures.tally_mut(class, job.kind()).demands += 1;
        let id = self.jobs.add(job);
        self.desk(number, class.layer()).queue.push_back(id);
        id
    }

    /// The firmware's phase: it asks for its counters one by one, keeps what it gets,
    /// and hands over.
    fn run_firmware(&mut self, number: u32) {
        let layer = Layer::Firmware;
        let beyond_the_end = self.end + 1;
        let programmable = (0..self.workload.boot).map(|_| Wanted::Any(1));
        let fixed = (0..self.workload.boot_fixed).map(|n| Wanted::This(CounterId::Fixed(n)));
        for wanted in programmable.chain(fixed) {
            let id = self.start_job(number, Class::Firmware, beyond_the_end, wanted);
            self.serve(number);
            // Firmware without SMM cannot wait.
            if self.jobs.get(id).is_some_and(|job| !job.granted) {
                self.end_job(id, true);
            }
        }
        if self.vcpus[number as usize].unit.phase().has_firmware() {
            let end = (PcrRegister::Phase, abi::PHASE_END, Caller::legacy(layer));
            let _ = self.arbitrate(number, |unit, cx| unit.write(end.0, end.1, end.2, cx));
        }
    }

    /// Renews the leases of a job, twice in the time of a lease.
    pub(super) fn renew(&mut self, id: JobId) {
        let Some(job) = self.jobs.get(id).copied() else {
            return;
        };
        let (vcpu, layer) = (job.vcpu, job.class.layer());
        let (cookie, register) = cookie(layer);
        let mut renewed = true;
        for counter in job.held.iter() {
            if self.desk(vcpu, layer).asking.is_none() {
                let request = Request::Reserve {
                    wanted: Wanted::This(counter),
                    cookie,
                    lease_ms: None,
                    event: None,
                };
                let _ = self.arbitrate(vcpu, |unit, cx| unit.request(layer, request, cx));
            } else {
                // The mailbox is taken. Under a single master there is no key.
                let key = PcrRegister::ManagementKey(counter);
                let caller = Caller {
                    layer,
                    presented: register,
                };
                let done = self.arbitrate(vcpu, |unit, cx| unit.write(key, register, caller, cx));
                renewed &= done.is_some();
            }
        }
        let share = self.policy.share(layer).and_then(|share| share.lease_ms);
        if let Some(lease_ms) = share {
            let lease = u64::from(lease_ms) * super::MICROS_PER_MS;
            self.plan(
                if renewed { lease / 2 } else { lease / 8 }.max(1),
                Happening::Renew(id),
            );
        }
        self.serve(vcpu);
    }
}
