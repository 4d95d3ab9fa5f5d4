//! Where a vCPU's PMIs go (SDM vol. 3A, 12.5.1 "Local Vector Table"; APM vol. 2, 16.4).

use arbiter::CounterSet;

use crate::Vendor;

const LVT_MASKED: u32 = 1 << 16;
/// Of the spurious-interrupt vector register (SDM vol. 3A, figure 12-23).
const SVR_ENABLED: u32 = 1 << 8;

/// A performance monitoring interrupt to be raised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PmiRequest {
    /// Counters that overflowed.
    pub counters: CounterSet,
}

/// The way of a vCPU's PMIs to its guest: its local APIC, whoever has that. It is used on
/// the vCPU's own thread, while the guest does not run.
///
/// Hardware decides at the overflow: a PMI that finds the local vector table's entry masked
/// is gone, and one that finds it open is on its way, whatever the guest writes later. A
/// PMI that is held back must not make a difference to that.
pub trait PmiLine {
    /// The guest's local APIC could not be asked, or could not be given the PMI.
    type Error;

    /// Looks how the local APIC lets a PMI through, and keeps that for
    /// [`PmiLine::send`]. False: it lets none through.
    ///
    /// # Errors
    /// The local APIC could not be asked.
    fn latch(&mut self, request: PmiRequest) -> Result<bool, Self::Error>;

    /// Sends the PMI that was let through. False: nothing is known of how it was, and it is
    /// still pending.
    ///
    /// # Errors
    /// It could not be sent, and is still pending.
    fn send(&mut self, request: PmiRequest) -> Result<bool, Self::Error>;
}

/// What became of a vCPU's PMI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PmiForwarded {
    /// There is none, or one that was let through before and is still to be sent.
    Nothing,
    /// The local APIC lets none through.
    Dropped,
    /// It was let through, and is held back by the throttle.
    Late,
    Sent,
}

/// What LVTPC says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PmiRoute {
    /// Delivery mode 100b.
    Nmi,
    /// Delivery mode 000b, with a legal vector.
    Fixed(u8),
    /// The mask bit is set, or the APIC is off: hardware sends nothing.
    Masked,
    /// A mode (SMI, INIT, `ExtINT`, reserved) or a vector below 16 that carries no
    /// PMI, or an APIC ID that names no vCPU.
    Unusable(u32),
}

impl PmiRoute {
    /// Decodes LVTPC.
    #[must_use]
    pub fn decode(lvtpc: u32) -> Self {
        let vector = lvtpc.to_le_bytes()[0];
        match (lvtpc & LVT_MASKED != 0, lvtpc >> 8 & 7) {
            (true, _) => Self::Masked,
            (false, 0b100) => Self::Nmi,
            (false, 0b000) if vector >= 16 => Self::Fixed(vector),
            (false, _) => Self::Unusable(lvtpc),
        }
    }
}

/// What became of a PMI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PmiDelivery {
    /// Where it went.
    pub route: PmiRoute,
    /// LVTPC's mask bit was set afterwards, as Intel's processors do.
    pub masked_after: bool,
}

impl PmiDelivery {
    /// Of a PMI after which LVTPC is as it was.
    #[must_use]
    pub fn by(route: PmiRoute) -> Self {
        Self {
            route,
            masked_after: false,
        }
    }
}

/// LVTPC of a local APIC, the local vector table's entry for PMIs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lvtpc(u32);

impl Lvtpc {
    /// From the register and the spurious-interrupt vector register: a local APIC that is
    /// disabled by software has all entries masked (SDM vol. 3A, 12.4.7.2).
    #[must_use]
    pub fn of(register: u32, svr: u32) -> Self {
        Self(match svr & SVR_ENABLED {
            0 => register | LVT_MASKED,
            _ => register,
        })
    }

    /// From the register of a local APIC that is enabled.
    #[must_use]
    pub fn enabled(register: u32) -> Self {
        Self(register)
    }

    /// The register's value.
    #[must_use]
    pub fn value(self) -> u32 {
        self.0
    }

    /// Where a PMI goes.
    #[must_use]
    pub fn route(self) -> PmiRoute {
        PmiRoute::decode(self.0)
    }

    /// What a PMI that was sent leaves, if that is another value: Intel's processors set the
    /// mask bit (SDM vol. 3B, 21.5.1), AMD's do not.
    #[must_use]
    pub fn after_delivery(self, vendor: Vendor) -> Option<Self> {
        let masked = Self(self.0 | LVT_MASKED);
        (vendor == Vendor::Intel && masked != self).then_some(masked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disabled_apic_sends_nothing() {
        assert_eq!(Lvtpc::of(0x400, 0xff).route(), PmiRoute::Masked);
        assert_eq!(Lvtpc::of(0x400, 0x1ff).route(), PmiRoute::Nmi);
        assert_eq!(Lvtpc::of(0x400, 0x1ff).value(), 0x400);
    }

    #[test]
    fn a_delivery_masks_intels() {
        let open = Lvtpc::of(0xef, 0x1ff);
        let masked = Lvtpc::of(0x1_00ef, 0x1ff);
        assert_eq!(open.after_delivery(Vendor::Intel), Some(masked));
        assert_eq!(masked.after_delivery(Vendor::Intel), None);
        assert_eq!(open.after_delivery(Vendor::Amd), None);
    }

    #[test]
    fn lvtpc() {
        let check = |lvtpc: u32, expected| assert_eq!(PmiRoute::decode(lvtpc), expected);
        check(0x400, PmiRoute::Nmi);
        check(0x4ff, PmiRoute::Nmi);
        check(0x1_0400, PmiRoute::Masked);
        check(0x0_00ef, PmiRoute::Fixed(0xef));
        check(0x0_0010, PmiRoute::Fixed(0x10));
        check(0x0_000f, PmiRoute::Unusable(0xf));
        check(0x0_0200, PmiRoute::Unusable(0x200));
        check(0x0_0500, PmiRoute::Unusable(0x500));
        check(0x0_0700, PmiRoute::Unusable(0x700));
    }
}
