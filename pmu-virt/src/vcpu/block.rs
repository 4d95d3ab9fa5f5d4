//! The synthetic MSRs of `docs/pcr.md`, and RDPMC with a cookie.

use arbiter::{
    Access, Caller, Cookie, CounterId, Event, Layer, PcrRegister, Reason, Record, Verdict,
};
use pmu_model::{MsrIndex, WriteForm};

use super::access::Part;
use super::{Here, MsrRead, MsrWrite, ReadOutcome, VcpuPmu, WriteOutcome};

impl VcpuPmu {
    /// A read of one counter with a cookie.
    pub(super) fn read_alias(
        &mut self,
        here: &mut Here<'_>,
        counter: CounterId,
        part: Part,
        caller: Caller,
        access: Access,
    ) -> ReadOutcome {
        match self.alias_cookie(counter, part, caller) {
            Some(cookie) => self.read_as(here, (caller.layer, cookie), counter, part, access),
            None => ReadOutcome::Gp,
        }
    }

    fn write_alias(
        &mut self,
        here: &mut Here<'_>,
        counter: CounterId,
        part: Part,
        value: u64,
        caller: Caller,
    ) -> WriteOutcome {
        match self.alias_cookie(counter, part, caller) {
            Some(cookie) => self.write_as(here, (caller.layer, cookie), counter, part, value),
            None => WriteOutcome::Gp,
        }
    }

    fn has_alias(&self, counter: CounterId, part: Part) -> bool {
        let exists = self.reservations.is_some() && self.model.has(counter);
        exists && (self.model.has_status() || !matches!(part, Part::Overflow))
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
        if let Some((counter, part)) = alias(register) {
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
        if let Some((counter, part)) = alias(register) {
            return self.write_alias(here, counter, part, value, caller);
        }
        if !self.may_manage(register, caller.layer) {
            return WriteOutcome::Gp;
        }
        let Some(reservations) = &mut self.reservations else {
            return WriteOutcome::Gp;
        };
        let (unit, mut context) = reservations.parts(self.left);
        match unit.write(register, value, caller, &mut context) {
            Some(effects) => {
                // If that was the end of the firmware's phase, legacy names are
                // those of this moment.
                unit.map();
                self.take_effects(here, effects);
                WriteOutcome::Done
            }
            None => WriteOutcome::Gp,
        }
    }

    /// A counter that the host did not grant is absent from the block.
    fn may_manage(&self, register: PcrRegister, layer: Layer) -> bool {
        match register {
            PcrRegister::ManagementKey(counter)
            | PcrRegister::AccessKey(counter)
            | PcrRegister::Control(counter)
            | PcrRegister::DropValue(counter)
            | PcrRegister::Status(counter) => {
                self.grant.check(layer, counter, Access::Read) == Verdict::Permit
            }
            PcrRegister::Counter(_)
            | PcrRegister::Select(_)
            | PcrRegister::Overflow(_)
            | PcrRegister::LegacyMap(_)
            | PcrRegister::Random
            | PcrRegister::Phase
            | PcrRegister::NoticeVector
            | PcrRegister::Request
            | PcrRegister::Answer
            | PcrRegister::Granted
            | PcrRegister::Notice
            | PcrRegister::Reply => true,
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

/// What an alias register is another name of.
fn alias(register: PcrRegister) -> Option<(CounterId, Part)> {
    match register {
        PcrRegister::Counter(counter) => Some((counter, Part::Count(WriteForm::FullWidth))),
        PcrRegister::Select(counter) => Some((counter, Part::Control)),
        PcrRegister::Overflow(counter) => Some((counter, Part::Overflow)),
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
        | PcrRegister::Reply => None,
    }
}
