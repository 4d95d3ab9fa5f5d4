//! The synthetic MSRs of `docs/reference/pcr.md`, RDPMC with a cookie, and the hypervisor's reads.

use arbiter::{
    Access, AskedEvents, Caller, Cookie, CounterId, Event, Layer, PcrRegister, PcrUnit, Reason,
    Record, Request, Verdict,
};
use pmu_model::{MsrIndex, WriteForm, ibs};

use super::access::{Part, part_of};
use super::{Here, MsrRead, MsrWrite, ReadOutcome, VcpuPmu, WriteOutcome};
use crate::core_pmu::CorePmu;

impl VcpuPmu {
    /// A read of a counter by the hypervisor, on its own behalf or for a tool of the host,
    /// with the cookie `presented`: judged as a guest's reads are, by the cookie and by the
    /// mode bits of the hypervisor's layer. What is denied is recorded. `None`: there is no
    /// such counter, there are no reservations, or the cookie has too many bits.
    pub fn read_as_hypervisor(
        &mut self,
        core: Option<&mut CorePmu>,
        counter: CounterId,
        presented: u64,
    ) -> Option<Result<u64, Verdict>> {
        let (layer, part) = (Layer::Hypervisor, Part::Count(WriteForm::FullWidth));
        let caller = Caller { layer, presented };
        let cookie = self.alias_cookie(counter, part, caller)?;
        let verdict = self.verdict((layer, cookie), counter, Access::Read);
        if verdict != Verdict::Permit {
            return Some(Err(verdict));
        }
        let here = &mut self.here(core);
        match self.read_part(here, verdict, counter, part) {
            ReadOutcome::Value(value) => Some(Ok(value)),
            _ => None,
        }
    }

    /// A read of one counter with a cookie.
    pub(super) fn read_alias(
        &mut self,
        here: &mut Here<'_>,
        counter: CounterId,
        part: Part,
        caller: Caller,
        access: Access,
    ) -> ReadOutcome {
        let Some(cookie) = self.alias_cookie(counter, part, caller) else {
            return ReadOutcome::Gp;
        };
        let verdict = self.verdict((caller.layer, cookie), counter, access);
        self.read_part(here, verdict, counter, part)
    }

    fn write_alias(
        &mut self,
        here: &mut Here<'_>,
        counter: CounterId,
        part: Part,
        value: u64,
        caller: Caller,
    ) -> WriteOutcome {
        let Some(cookie) = self.alias_cookie(counter, part, caller) else {
            return WriteOutcome::Gp;
        };
        let verdict = self.verdict((caller.layer, cookie), counter, Access::Write);
        self.write_part(here, verdict, counter, part, value)
    }

    fn has_alias(&self, counter: CounterId, part: Part) -> bool {
        let exists = self.reservations.is_some() && self.model.has(counter);
        exists
            && match (part, counter) {
                (Part::Sampler(_), _) => true,
                // It has registers of its own.
                (_, CounterId::Ibs(_)) => false,
                (Part::Overflow, _) => self.model.has_status(),
                (Part::Count(_) | Part::Control, _) => true,
            }
    }

    /// What an alias register is another name of.
    fn alias(&self, register: PcrRegister) -> Option<(CounterId, Part)> {
        match register {
            PcrRegister::Counter(counter) => Some((counter, Part::Count(WriteForm::FullWidth))),
            PcrRegister::Select(counter) => Some((counter, Part::Control)),
            PcrRegister::Overflow(counter) => Some((counter, Part::Overflow)),
            PcrRegister::Ibs(n) => {
                let msr = MsrIndex(ibs::MSR_BASE + u32::from(n));
                part_of(self.model.decode(msr)?)
            }
            PcrRegister::ManagementKey(_)
            | PcrRegister::AccessKey(_)
            | PcrRegister::Control(_)
            | PcrRegister::DropValue(_)
            | PcrRegister::Status(_)
            | PcrRegister::LegacyMap(_)
            | PcrRegister::Random
            | PcrRegister::Phase
            | PcrRegister::NoticeVector
            | PcrRegister::Request
            | PcrRegister::Answer
            | PcrRegister::Granted
            | PcrRegister::Notice
            | PcrRegister::Reply
            | PcrRegister::Refusal => None,
        }
    }

    /// The cookie that is presented to an alias; `None` if there is no such alias,
    /// and, with a record, if the cookie has too many bits.
    fn alias_cookie(&mut self, counter: CounterId, part: Part, caller: Caller) -> Option<Cookie> {
        if !self.has_alias(counter, part) {
            return None;
        }
        let cookie = Cookie::new(caller.presented);
        if let (None, Some(reservations)) = (cookie, &mut self.reservations) {
            reservations.audit.record(&Record {
                layer: caller.layer,
                counter: Some(counter),
                event: Event::Faulted(Reason::Malformed),
            });
        }
        cookie
    }

    /// RDMSR of an index of the block.
    pub(super) fn read_block(
        &mut self,
        here: &mut Here<'_>,
        msr: MsrIndex,
        caller: Caller,
    ) -> MsrRead {
        let register = PcrRegister::decode(msr.0);
        MsrRead {
            outcome: register.map_or(ReadOutcome::Gp, |register| {
                self.read_register(here, register, caller)
            }),
            secret: matches!(register, Some(PcrRegister::Random)),
        }
    }

    fn read_register(
        &mut self,
        here: &mut Here<'_>,
        register: PcrRegister,
        caller: Caller,
    ) -> ReadOutcome {
        if let Some((counter, part)) = self.alias(register) {
            return self.read_alias(here, counter, part, caller, Access::Read);
        }
        if !self.may_manage(register, caller.layer) {
            return ReadOutcome::Gp;
        }
        let Some(reservations) = &mut self.reservations else {
            return ReadOutcome::Gp;
        };
        let (unit, mut context) = reservations.parts(self.left);
        match unit.read(register, caller, &mut context) {
            Some(value) => ReadOutcome::Value(value),
            None => ReadOutcome::Gp,
        }
    }

    /// WRMSR of an index of the block.
    pub(super) fn write_block(
        &mut self,
        here: &mut Here<'_>,
        msr: MsrIndex,
        value: u64,
        caller: Caller,
    ) -> MsrWrite {
        let register = PcrRegister::decode(msr.0);
        let outcome = register.map_or(WriteOutcome::Gp, |register| {
            self.write_register(here, register, value, caller)
        });
        MsrWrite {
            starts_counting: outcome == WriteOutcome::Done && starts_counting(register),
            sets_count: outcome == WriteOutcome::Done
                && matches!(register, Some(PcrRegister::Counter(_))),
            secret: is_key(register),
            ..outcome.into()
        }
    }

    fn write_register(
        &mut self,
        here: &mut Here<'_>,
        register: PcrRegister,
        value: u64,
        caller: Caller,
    ) -> WriteOutcome {
        if let Some((counter, part)) = self.alias(register) {
            return self.write_alias(here, counter, part, value, caller);
        }
        if !self.may_manage(register, caller.layer) {
            return WriteOutcome::Gp;
        }
        // Only these can take a counter.
        let takes = matches!(
            register,
            PcrRegister::Request | PcrRegister::ManagementKey(_) | PcrRegister::Reply
        );
        if takes {
            let asked = self.asked_with(register, value, caller);
            self.look_for_room_of(here, asked);
        }
        let handed = match register {
            PcrRegister::ManagementKey(counter) => Some((counter, self.owner_of(counter))),
            _ => None,
        };
        // One that lends its counter need not be the one that asks.
        let others = self.held() & !self.held_by(caller.layer);
        let Some(reservations) = &mut self.reservations else {
            return WriteOutcome::Gp;
        };
        let (unit, mut context) = reservations.parts(self.left);
        match unit.write(register, value, caller, &mut context) {
            Some(effects) => {
                // If that was the end of the firmware's phase, legacy names are
                // those of this moment.
                unit.map();
                self.take_from(here, effects, others);
                if let Some((counter, before)) = handed
                    && before.is_some()
                    && before != self.owner_of(counter)
                {
                    self.tell_new_owner(counter);
                }
                if self.is_frozen() {
                    // It may reach other counters than before.
                    self.take_freeze(here);
                }
                self.look_again(here);
                WriteOutcome::Done
            }
            None => WriteOutcome::Gp,
        }
    }

    /// What layers ask for together with what a write asks for.
    fn asked_with(&self, register: PcrRegister, value: u64, caller: Caller) -> AskedEvents {
        let asked = self.reservations().map(PcrUnit::asked_events);
        let mut asked = asked.unwrap_or_default();
        if let PcrRegister::Request = register
            && let Ok(Request::Reserve { event, .. }) = Request::decode(value, caller.presented)
            && let Some(of_layer) = asked.get_mut(usize::from(caller.layer.code()))
        {
            // Of a request that is pending already it is not one more.
            of_layer.get_or_insert(event);
        }
        asked
    }

    fn is_left_out(&self, counter: CounterId) -> bool {
        let (CounterId::Programmable(n) | CounterId::Fixed(n)) = counter else {
            return false;
        };
        n < self.model.counts().of(counter) && !self.model.has(counter)
    }

    /// A counter that the host did not grant is absent from the block, as is a fixed one that
    /// the model's bitmap leaves out. What is beyond the model's counters the arbiter refuses.
    fn may_manage(&self, register: PcrRegister, layer: Layer) -> bool {
        match register {
            PcrRegister::ManagementKey(counter)
            | PcrRegister::AccessKey(counter)
            | PcrRegister::Control(counter)
            | PcrRegister::DropValue(counter)
            | PcrRegister::Status(counter) => {
                let given = self.grant.check(layer, counter, Access::Read);
                given == Verdict::Permit && !self.is_left_out(counter)
            }
            PcrRegister::Counter(_)
            | PcrRegister::Select(_)
            | PcrRegister::Overflow(_)
            | PcrRegister::Ibs(_)
            | PcrRegister::LegacyMap(_)
            | PcrRegister::Random
            | PcrRegister::Phase
            | PcrRegister::NoticeVector
            | PcrRegister::Request
            | PcrRegister::Answer
            | PcrRegister::Granted
            | PcrRegister::Notice
            | PcrRegister::Reply
            | PcrRegister::Refusal => true,
        }
    }
}

/// Whether the register takes a cookie as its value.
pub(super) fn is_key(register: Option<PcrRegister>) -> bool {
    matches!(
        register,
        Some(PcrRegister::ManagementKey(_) | PcrRegister::AccessKey(_))
    )
}

/// Whether a guest writes the register before it reads counts.
fn starts_counting(register: Option<PcrRegister>) -> bool {
    matches!(
        register,
        Some(
            PcrRegister::Select(_)
                | PcrRegister::AccessKey(_)
                | PcrRegister::Phase
                | PcrRegister::Request
        )
    )
}
