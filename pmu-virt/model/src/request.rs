//! What a control register asks for, decoded once.

use std::fmt;

use crate::event::{EventCode, EventFamily, FixedFunction};
use crate::ids::{Ring, Vendor};

const USR: u64 = 1 << 16;
const OS: u64 = 1 << 17;
const EDGE: u64 = 1 << 18;
const PIN: u64 = 1 << 19;
const INT: u64 = 1 << 20;
const ANY: u64 = 1 << 21;
const ENABLE: u64 = 1 << 22;
const INVERT: u64 = 1 << 23;
const GUEST_ONLY: u64 = 1 << 40;
const HOST_ONLY: u64 = 1 << 41;

/// What a control register asks a counter to do.
///
/// Sources: SDM vol. 3B, "Layout of `IA32_PERFEVTSELx` MSRs" and "Layout of
/// `IA32_FIXED_CTR_CTRL` MSR"; APM vol. 2, section 13.2.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountRequest {
    pub event: EventCode,
    /// Count at CPL 1 to 3.
    pub usr: bool,
    /// Count at CPL 0.
    pub os: bool,
    /// Count transitions instead of occurrences.
    pub edge: bool,
    /// Pin control: a physical pin signals the event. Kept, without effect.
    pub pin: bool,
    /// Raise a PMI on overflow.
    pub int: bool,
    /// Count for all threads of the core.
    pub any_thread: bool,
    /// The counter is enabled locally.
    pub enabled: bool,
    /// Invert the comparison with `cmask`.
    pub invert: bool,
    /// Count cycles with at least this many events; 0 counts events.
    pub cmask: u8,
    /// Count only in a guest (AMD).
    pub guest_only: bool,
    /// Count only in the host (AMD).
    pub host_only: bool,
}

impl CountRequest {
    /// A request for `event` in the rings told, with no modifier.
    pub fn plain(event: EventCode, os: bool, usr: bool) -> Self {
        CountRequest {
            event,
            usr,
            os,
            edge: false,
            pin: false,
            int: false,
            any_thread: false,
            enabled: true,
            invert: false,
            cmask: 0,
            guest_only: false,
            host_only: false,
        }
    }

    /// Decodes an event select. Bits that `family` reserves are not looked at.
    pub fn decode(family: EventFamily, raw: u64) -> Self {
        let has = |bit: u64| raw & bit != 0;
        let byte = |shift: u32| (raw >> shift).to_le_bytes()[0];
        let high = match family {
            family if has_short_selects(family) => 0,
            _ => u16::from(byte(32) & 0xf) << 8,
        };
        let modern_amd = has_virtualization_bits(family);
        CountRequest {
            event: EventCode::Selected {
                family,
                select: high | u16::from(byte(0)),
                umask: byte(8),
            },
            usr: has(USR),
            os: has(OS),
            edge: has(EDGE),
            pin: has(PIN) && has_pin_control(family),
            int: has(INT),
            any_thread: has(ANY) && family.vendor() == Vendor::Intel,
            enabled: has(ENABLE),
            invert: has(INVERT),
            cmask: byte(24),
            guest_only: has(GUEST_ONLY) && modern_amd,
            host_only: has(HOST_ONLY) && modern_amd,
        }
    }

    /// Whether it is Intel's way to have PEBS of cycles: those in which fewer instructions
    /// or micro-operations retire than no processor retires in one (SDM's event tables,
    /// INST_RETIRED.TOTAL_CYCLES and UOPS_RETIRED.TOTAL_CYCLES: C0 and C2, inverted, with
    /// counter mask 16).
    pub fn is_every_cycle(&self) -> bool {
        const NEVER: u8 = 16;
        let EventCode::Selected { select, umask, .. } = self.event else {
            return false;
        };
        let retired = matches!((select, umask), (0xc0, 0..=1) | (0xc2, 1..=2));
        let plain = !self.edge && !self.any_thread;
        let intel = self.event.vendor() == Some(Vendor::Intel);
        intel && retired && plain && self.invert && self.cmask >= NEVER
    }

    /// The event select that decodes to this request. `None` for a request to
    /// a fixed-function counter, and for one that asks for what the family's
    /// register has no bits for: a longer event select, any-thread, pin
    /// control, guest-only or host-only.
    pub fn encode(&self) -> Option<u64> {
        let EventCode::Selected {
            family,
            select,
            umask,
        } = self.event
        else {
            return None;
        };
        let [low, high] = select.to_le_bytes();
        let bit = |on: bool, bit: u64| if on { bit } else { 0 };
        let raw = u64::from(low)
            | u64::from(umask) << 8
            | bit(self.usr, USR)
            | bit(self.os, OS)
            | bit(self.edge, EDGE)
            | bit(self.pin, PIN)
            | bit(self.int, INT)
            | bit(self.any_thread, ANY)
            | bit(self.enabled, ENABLE)
            | bit(self.invert, INVERT)
            | u64::from(self.cmask) << 24
            | u64::from(high) << 32
            | bit(self.guest_only, GUEST_ONLY)
            | bit(self.host_only, HOST_ONLY);
        (CountRequest::decode(family, raw) == *self).then_some(raw)
    }

    /// Decodes the field of fixed counter `function` in `IA32_FIXED_CTR_CTRL`:
    /// bits 1:0 enable per ring, bit 2 any-thread, bit 3 PMI.
    pub fn decode_fixed(function: FixedFunction, control: u64) -> Self {
        let field = control >> (4 * u32::from(function.index()));
        let (os, usr) = (field & 1 != 0, field & 2 != 0);
        CountRequest {
            int: field & 8 != 0,
            any_thread: field & 4 != 0,
            enabled: os || usr,
            ..CountRequest::plain(EventCode::Fixed(function), os, usr)
        }
    }

    /// The bits of `IA32_FIXED_CTR_CTRL` that decode to this request; `None`
    /// for a request to a programmable counter.
    pub fn encode_fixed(&self) -> Option<u64> {
        let EventCode::Fixed(function) = self.event else {
            return None;
        };
        let field = u64::from(self.os)
            | u64::from(self.usr) << 1
            | u64::from(self.any_thread) << 2
            | u64::from(self.int) << 3;
        Some(field << (4 * u32::from(function.index())))
    }

    /// Whether the request counts in `ring`.
    #[inline]
    pub fn counts_in(&self, ring: Ring) -> bool {
        match ring {
            Ring::Kernel => self.os,
            Ring::User => self.usr,
        }
    }

    /// Whether exactly one of the two rings is counted.
    pub fn is_ring_filtered(&self) -> bool {
        self.os != self.usr
    }

    /// Whether anything can make the counter advance: enabled, in some ring,
    /// and not for guests of this guest alone. Seen by itself the guest is a
    /// host, and it has no guests; so GuestOnly without HostOnly never counts.
    #[inline]
    pub fn can_advance(&self) -> bool {
        self.enabled && (self.os || self.usr) && (!self.guest_only || self.host_only)
    }

    /// What it asks for where a tool of the host asks, which stands outside of the guest:
    /// what that does is the guest's, in the words of APM vol. 2, 13.2.1, and nothing else
    /// is counted. GuestOnly asks for just that, and with HostOnly for that and more.
    /// HostOnly alone stays, see [`CountRequest::is_for_host_alone`].
    #[must_use]
    pub fn of_host_tool(self) -> Self {
        CountRequest {
            guest_only: false,
            host_only: self.is_for_host_alone(),
            ..self
        }
    }

    /// Whether it asks for nothing that a guest does, if a tool of the host asks.
    pub fn is_for_host_alone(&self) -> bool {
        self.host_only && !self.guest_only
    }

    /// Whether edge, invert, cmask or any-thread change what is counted.
    pub fn has_modifier(&self) -> bool {
        self.edge || self.invert || self.cmask != 0 || self.any_thread
    }

    /// Whether a counter programmed for `self` also serves `other`: they
    /// differ at most in enabling, in the interrupt and in the pin.
    #[inline]
    pub fn counts_like(&self, other: &CountRequest) -> bool {
        let CountRequest {
            int, pin, enabled, ..
        } = *other;
        let like = CountRequest {
            int,
            pin,
            enabled,
            ..*self
        };
        like == *other
    }
}

/// Bit 19 is pin control on Intel and on K7/K8, reserved on later AMD.
fn has_pin_control(family: EventFamily) -> bool {
    has_short_selects(family)
}

/// Whether an event select has 8 bits.
fn has_short_selects(family: EventFamily) -> bool {
    family.vendor() == Vendor::Intel || family == EventFamily::AmdK7
}

/// GuestOnly and HostOnly came with Family 10h.
fn has_virtualization_bits(family: EventFamily) -> bool {
    !has_short_selects(family)
}

impl fmt::Display for CountRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.event.fmt(f)?;
        match (self.os, self.usr) {
            (true, true) | (false, false) => Ok(()),
            (true, false) => f.write_str(":k"),
            (false, true) => f.write_str(":u"),
        }?;
        let modifiers: [(bool, &str); 5] = [
            (self.edge, " edge"),
            (self.invert, " inv"),
            (self.any_thread, " any"),
            (self.guest_only, " guest-only"),
            (self.host_only, " host-only"),
        ];
        for (on, name) in modifiers {
            if on {
                f.write_str(name)?;
            }
        }
        if self.cmask != 0 {
            write!(f, " cmask={}", self.cmask)?;
        }
        Ok(())
    }
}
