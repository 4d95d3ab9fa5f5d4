//! The end of a job: it gives back what it holds, and its work is accounted. And the
//! check of the books.

use arbiter::{
    Caller, CounterId, CounterSet, Layer, MAX_FIXED, MAX_PROGRAMMABLE, Outcome, PcrRegister,
    Policy, Request, Scheme, abi,
};

use crate::job::JobId;

use super::{LAYERS, Run, cookie, place, slot};

impl Run<'_> {
    /// Ends a job: it gives back what it holds, and withdraws what it asks for.
    pub(super) fn end_job(&mut self, id: JobId, denied: bool) {
        self.account(id);
        let Some(job) = self.jobs.get(id).copied() else {
            return;
        };
        let (vcpu, layer) = (job.vcpu, job.class.layer());
        if denied {
            let tally = self.figures.tally_mut(job.class, job.kind());
            tally.denied += 1;
            if !job.misses {
                let core = &self.cores[self.vcpus[vcpu as usize].core as usize];
                let wish = f64::from(job.wanted.count()) * job.hold as f64 / core.load();
                tally.wish += wish;
                self.vcpus[vcpu as usize].wish += wish;
            }
        }
        self.jobs.end(id);
        if self.desk(vcpu, layer).asking == Some(id) {
            self.desk(vcpu, layer).asking = None;
            let cookie = cookie(layer).0;
            let withdrawal = Request::Withdraw { cookie };
            let _ = self.arbitrate(vcpu, |unit, cx| unit.request(layer, withdrawal, cx));
        }
        for counter in job.held.iter() {
            self.give_back(vcpu, layer, counter);
        }
        self.serve(vcpu);
    }

    /// Gives a counter back: by the mailbox, or by its key while a request of the layer
    /// is pending. Only the master has keys under a single one, so there it waits.
    fn give_back(&mut self, vcpu: u32, layer: Layer, counter: CounterId) {
        self.vcpus[vcpu as usize].users[place(counter)] = None;
        let (cookie, register) = cookie(layer);
        if self.desk(vcpu, layer).asking.is_none() {
            let release = Request::Release { counter, cookie };
            let _ = self.arbitrate(vcpu, |unit, cx| unit.request(layer, release, cx));
        } else if self.scheme == Scheme::SingleMaster {
            self.desk(vcpu, layer).unused.push(counter);
        } else {
            let (key, caller) = (
                PcrRegister::ManagementKey(counter),
                Caller {
                    layer,
                    presented: register,
                },
            );
            let _ = self.arbitrate(vcpu, |unit, cx| {
                unit.write(key, abi::DEFAULT_COOKIE, caller, cx)
            });
        }
    }

    pub(super) fn give_back_unused(&mut self, vcpu: u32, layer: Layer) {
        while let Some(counter) = self.desk(vcpu, layer).unused.pop() {
            let bank = self.vcpus[vcpu as usize].unit.bank();
            // It may have been revoked meanwhile.
            let still = bank.held_by(layer).contains(counter);
            if still {
                self.give_back(vcpu, layer, counter);
            }
        }
    }

    /// Settles the work of a job up to now.
    pub(super) fn account(&mut self, id: JobId) {
        let Some(job) = self.jobs.get(id) else { return };
        let vcpu = &mut self.vcpus[job.vcpu as usize];
        let ran = vcpu.ran + self.cores[vcpu.core as usize].clock(self.now);
        let time = ran - job.since;
        job.since = ran;
        let held = f64::from(job.held.len()) * time;
        let lacks = f64::from(job.lacks()) * time;
        let tally = self.figures.tally_mut(job.class, job.kind());
        tally.work += held;
        tally.wish += held;
        vcpu.work += held;
        vcpu.wish += held;
        if job.misses {
            tally.blind += lacks;
            tally.wish += lacks;
            vcpu.wish += lacks;
        }
    }

    /// Whether each layer holds what its jobs hold, what they gave back too early, and
    /// what its request gathers; each counter is used by the job that holds it; and
    /// whoever waits for an answer has none yet.
    pub(super) fn books_agree(&mut self, number: u32) -> bool {
        let vcpu = &self.vcpus[number as usize];
        let mut of_jobs = [CounterSet::EMPTY; LAYERS];
        for counter in CounterSet::first(MAX_PROGRAMMABLE, MAX_FIXED).iter() {
            let user = vcpu.users[place(counter)];
            if let Some(job) = user.and_then(|id| self.jobs.get(id)) {
                if !job.held.contains(counter) || job.vcpu != number {
                    return false;
                }
                of_jobs[slot(job.class.layer())].insert(counter);
            } else if user.is_some() {
                return false;
            }
        }
        Policy::LAYERS.iter().all(|layer| {
            let desk = &vcpu.desks[slot(*layer)];
            let unused: CounterSet = desk.unused.iter().copied().collect();
            let known = of_jobs[slot(*layer)] | unused;
            let held = vcpu.unit.bank().held_by(*layer);
            let pending = vcpu.unit.answer(*layer).outcome == Outcome::Pending;
            match desk.asking {
                None => known == held,
                Some(_) => pending && known & held == known,
            }
        })
    }
}
