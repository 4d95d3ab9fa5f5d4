//! Answers: what jobs make of the arbiter's decisions, notices and answers.

use arbiter::{
    Caller, Control, CounterId, CounterSet, Event, Layer, NoticeKind, Outcome, PcrRegister, Policy,
    Record, Reply, Tsc,
};

use crate::figures::Class;
use crate::job::{JobId, Stage};

use super::{Happening, Run, cookie, place, slot};

impl Run<'_> {
    /// Has everyone hear of what the arbiter of a vCPU did. Each answer, and each
    /// question, comes with a record of the layer that gets it.
    pub(super) fn hear(&mut self, vcpu: u32, records: &[Record]) {
        let mut concerned = 0;
        for record in records {
            concerned |= 1_u64 << record.layer.code();
            if let (Event::Revoked(_) | Event::Yielded { .. }, Some(counter)) =
                (record.event, record.counter)
            {
                self.lose(vcpu, record.layer, counter);
            }
        }
        for layer in Policy::LAYERS {
            if concerned >> layer.code() & 1 == 0 {
                continue;
            }
            while let Some(notice) = {
                let now = Tsc(self.now);
                self.vcpus[vcpu as usize].unit.next_notice(layer, now)
            } {
                if let (NoticeKind::Asked, Some(counter)) = (notice.kind, notice.counter) {
                    self.plan_reply(vcpu, layer, counter);
                }
            }
            let outcome = self.vcpus[vcpu as usize].unit.answer(layer).outcome;
            if outcome != Outcome::Pending
                && let Some(id) = self.desk(vcpu, layer).asking
            {
                self.desk(vcpu, layer).asking = None;
                match outcome {
                    Outcome::Granted(counters) => self.granted(id, vcpu, counters),
                    _ => self.rest(id),
                }
            }
        }
    }

    fn granted(&mut self, id: JobId, vcpu: u32, counters: CounterSet) {
        self.account(id);
        let now = self.now;
        let Some(job) = self.jobs.get(id) else { return };
        job.held = job.held | counters;
        job.stage = Stage::Counting;
        let (class, kind) = (job.class, job.kind());
        let (first, hold, waited) = (!job.granted, job.hold, now - job.born);
        job.granted = true;
        job.misses = true;
        let lacks = job.lacks();
        for counter in counters.iter() {
            self.vcpus[vcpu as usize].users[place(counter)] = Some(id);
        }
        let layer = class.layer();
        if lacks > 0 {
            // It lost another counter while it asked for the first.
            self.queue(id);
        }
        if first {
            self.figures.tally_mut(class, kind).grant(waited);
            if class != Class::Tools {
                self.plan(hold, Happening::End(id));
            }
            let lives = class != Class::Firmware || self.workload.smm;
            let lease = self.policy.share(layer).and_then(|share| share.lease_ms);
            if let Some(lease_ms) = lease.filter(|_| lives) {
                let half = u64::from(lease_ms) * super::MICROS_PER_MS / 2;
                self.plan(half.max(1), Happening::Renew(id));
            }
        }
        let lends = self.wants(class).lends;
        if lends > 0.0 && self.conduct.chance(lends) {
            let caller = Caller {
                layer,
                presented: cookie(layer).1,
            };
            let control = Control::INITIAL.with_lend(true).bits();
            for counter in counters.iter() {
                let register = PcrRegister::Control(counter);
                let _ = self.arbitrate(vcpu, |unit, cx| unit.write(register, control, caller, cx));
            }
        }
    }

    fn queue(&mut self, id: JobId) {
        if let Some(job) = self.jobs.get(id) {
            job.stage = Stage::Queued;
            let (vcpu, layer) = (job.vcpu, job.class.layer());
            self.desk(vcpu, layer).queue.push_back(id);
        }
    }

    /// A holder has lost a counter: by revocation, by the end of its lease, or because
    /// it yielded.
    fn lose(&mut self, vcpu: u32, layer: Layer, counter: CounterId) {
        let user = self.vcpus[vcpu as usize].users[place(counter)].take();
        let Some(id) = user else {
            // Nobody used it any more.
            self.desk(vcpu, layer).unused.retain(|one| *one != counter);
            return;
        };
        self.account(id);
        let dead = layer == Layer::Firmware && !self.workload.smm;
        let Some(job) = self.jobs.get(id) else { return };
        job.held.remove(counter);
        let (class, kind, stage) = (job.class, job.kind(), job.stage);
        // If it is dead nobody is there to miss it.
        job.misses &= !dead;
        self.figures.tally_mut(class, kind).lost += 1;
        if !dead && stage == Stage::Counting {
            self.queue(id);
        }
    }

    fn plan_reply(&mut self, vcpu: u32, layer: Layer, counter: CounterId) {
        let mean = self.holder(vcpu, layer, counter);
        let mean = self.wants(mean).answer_ms;
        let delay = self.conduct.exponential(mean);
        self.plan(delay, Happening::Reply(vcpu, layer, counter));
    }

    /// The class that uses a counter of a layer. A counter that nobody uses any more
    /// counts as the layer's own.
    fn holder(&mut self, vcpu: u32, layer: Layer, counter: CounterId) -> Class {
        let user = self.vcpus[vcpu as usize].users[place(counter)];
        let class = user.and_then(|id| self.jobs.get(id)).map(|job| job.class);
        class.unwrap_or(match layer {
            Layer::Firmware => Class::Firmware,
            Layer::Hypervisor | Layer::HostTool => Class::Hypervisor,
            Layer::GuestKernel | Layer::GuestUser => Class::Kernel,
        })
    }

    pub(super) fn reply(&mut self, vcpu: u32, layer: Layer, counter: CounterId) {
        let class = self.holder(vcpu, layer, counter);
        let unused = self.vcpus[vcpu as usize].desks[slot(layer)]
            .unused
            .contains(&counter);
        let yields = self.wants(class).yields;
        let yields = unused || self.conduct.chance(yields);
        let reply = Reply { counter, yields };
        // The question may no longer stand.
        let _ = self.arbitrate(vcpu, |unit, cx| unit.reply(layer, reply, cx));
        self.serve(vcpu);
    }
}
