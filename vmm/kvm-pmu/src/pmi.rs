//! PMIs by KVM's local APIC: where its registers are, and how an interrupt gets in. What
//! they say is `pmu-virt`'s ([`Lvtpc`]).

use kvm_bindings::{kvm_lapic_state, kvm_msi, kvm_sregs};
use pmu_virt::{Lvtpc, PmiDelivery, PmiRoute, Vendor};

use crate::error::{Errno, PmiError, VcpuError, VcpuId};
use crate::vcpu::KvmVcpu;

const APIC_ID: usize = 0x20;
const APIC_SVR: usize = 0xf0;
const APIC_LVTPC: usize = 0x340;
const X2APIC_LVTPC: u32 = 0x834;

const APIC_BASE_ENABLED: u64 = 1 << 11;
const APIC_BASE_X2APIC: u64 = 1 << 10;
/// Delivery mode 100b.
const DELIVER_NMI: u32 = 0x400;

/// The local APIC's part in a PMI, as it was when a counter overflowed.
///
/// Hardware decides at the overflow: a PMI that found LVTPC masked is gone, and
/// one that found it open is on its way, whatever the guest writes later. A
/// throttled PMI must not make a difference to that.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ApicPmi {
    /// Its ID, if a message can name it ([`address_of`]).
    id: Option<u32>,
    lvtpc: Lvtpc,
    x2apic: bool,
}

/// Sends a fixed interrupt to `vcpu` itself; false if its local APIC takes none.
pub(crate) fn interrupt(vcpu: &KvmVcpu, vector: u8) -> Result<bool, PmiError> {
    let Some(ApicPmi { id, .. }) = ApicPmi::read(vcpu)? else {
        return Ok(false);
    };
    message(vcpu, id, vector.into())
}

/// Sends an edge-triggered interrupt to the local APIC of `vcpu`, with ID `apic_id` (SDM vol.
/// 3A, 12.11 "Message Signalled Interrupts"); false if no vCPU has it. `data` has
/// delivery mode and vector where LVTPC has them.
fn message(vcpu: &KvmVcpu, apic_id: Option<u32>, data: u32) -> Result<bool, PmiError> {
    let apic_id = apic_id.ok_or(PmiError::LargeApicId(vcpu.id()))?;
    let Some((address_lo, address_hi)) = message_address(apic_id) else {
        return Ok(false);
    };
    let msi = kvm_msi {
        address_lo,
        address_hi,
        data,
        ..Default::default()
    };
    match vcpu.vm().signal_msi(&msi) {
        Ok(delivered) => Ok(delivered > 0),
        // KVM's -1 for "no destination" reads as this error number.
        Err(Errno(libc::EPERM)) => Ok(false),
        Err(error) => Err(PmiError::SignalMsi(error)),
    }
}

/// Where a message for a local APIC goes, and the upper half of that; 255 is all of them, in
/// x2APIC mode as well.
/// KVM reads destination bits 31:8 from the upper half only where the VMM has asked for that
/// (KVM_X2APIC_API_USE_32BIT_IDS): only then does KVM tell an ID that has such bits.
fn message_address(apic_id: u32) -> Option<(u32, u32)> {
    let low = 0xfee0_0000 | (apic_id & 0xff) << 12;
    (apic_id != 255).then_some((low, apic_id & !0xff))
}

/// Whether the local APIC is in x2APIC mode.
pub(crate) fn is_x2apic(sregs: &kvm_sregs) -> bool {
    const MODE: u64 = APIC_BASE_ENABLED | APIC_BASE_X2APIC;
    sregs.apic_base & MODE == MODE
}

/// Sends what an entry of the extended vector table says, which let it through: bits 10:8
/// have the delivery mode, bits 7:0 the vector. Modes that carry nothing here send nothing.
pub(crate) fn send_extended(vcpu: &KvmVcpu, vector: u32) -> Result<(), PmiError> {
    let Some(ApicPmi { id, .. }) = ApicPmi::read(vcpu)? else {
        return Ok(());
    };
    match PmiRoute::decode(vector) {
        PmiRoute::Nmi => nmi(vcpu, id),
        PmiRoute::Fixed(vector) => message(vcpu, id, vector.into()).map(|_| ()),
        PmiRoute::Masked | PmiRoute::Unusable(_) => Ok(()),
    }
}

/// Sends an NMI to `vcpu` itself. A message is an ioctl of the VM's, and spares KVM
/// loading the vCPU's state and storing it again, which takes longer than the rest;
/// it serves as long as the guest has left the vCPU its APIC ID.
fn nmi(vcpu: &KvmVcpu, apic_id: Option<u32>) -> Result<(), PmiError> {
    if apic_id == Some(vcpu.id().0) && message(vcpu, apic_id, DELIVER_NMI)? {
        return Ok(());
    }
    Ok(vcpu.nmi()?)
}

impl ApicPmi {
    /// Reads it; `None` where the APIC is switched off.
    pub(crate) fn read(vcpu: &KvmVcpu) -> Result<Option<Self>, VcpuError> {
        let base = vcpu.get_sregs()?.apic_base;
        if base & APIC_BASE_ENABLED == 0 {
            return Ok(None);
        }
        let (id, lvtpc) = registers(&vcpu.get_lapic()?);
        let x2apic = base & APIC_BASE_X2APIC != 0;
        Ok(Some(Self {
            id: address_of(vcpu.id(), id, x2apic),
            lvtpc,
            x2apic,
        }))
    }

    /// Sends one PMI the way the guest's LVTPC asked, on the vCPU's own thread.
    ///
    /// Where a delivery masks LVTPC, that is done through the x2APIC register only:
    /// `KVM_SET_LAPIC` would write back IRR and the timer as they were a moment ago and
    /// could lose an IPI. A guest in xAPIC mode finds its LVTPC unmasked;
    /// `docs/internals/pmi.md` says so.
    pub(crate) fn send(self, vcpu: &KvmVcpu, vendor: Vendor) -> Result<PmiDelivery, PmiError> {
        let route = self.lvtpc.route();
        match route {
            PmiRoute::Nmi => nmi(vcpu, self.id)?,
            PmiRoute::Fixed(vector) => {
                if !message(vcpu, self.id, vector.into())? {
                    // The guest has changed its APIC's ID or mode in the meantime.
                    let unusable = PmiRoute::Unusable(self.lvtpc.value());
                    return Ok(PmiDelivery::by(unusable));
                }
            }
            PmiRoute::Masked | PmiRoute::Unusable(_) => return Ok(PmiDelivery::by(route)),
        }
        let masks = self.x2apic && self.lvtpc.after_delivery(vendor).is_some();
        let masked_after = masks && mask_now(vcpu, vendor)?;
        Ok(PmiDelivery {
            route,
            masked_after,
        })
    }
}

/// Sets the mask bit in LVTPC as it is now, which may not be what it was at the overflow.
/// False if KVM refuses.
fn mask_now(vcpu: &KvmVcpu, vendor: Vendor) -> Result<bool, VcpuError> {
    let Some(now) = vcpu.read_msr(X2APIC_LVTPC)? else {
        return Ok(false);
    };
    // The upper half is reserved and reads as zero.
    let now = Lvtpc::enabled(u32::try_from(now).unwrap_or(0));
    let masked = now.after_delivery(vendor).unwrap_or(now);
    vcpu.write_msr(X2APIC_LVTPC, masked.value().into())
}

/// What becomes of a PMI that overflowed while the local APIC was as `apic` says, if it
/// cannot be sent.
pub(crate) fn refusal(apic: Option<ApicPmi>) -> Option<PmiDelivery> {
    match apic.map_or(PmiRoute::Masked, |apic| apic.lvtpc.route()) {
        PmiRoute::Nmi | PmiRoute::Fixed(_) => None,
        route => Some(PmiDelivery::by(route)),
    }
}

/// The APIC ID by which a message reaches vCPU `id`, whose APIC's register of it reads as `word`.
/// In xAPIC mode it is in bits 31:24, where the guest may write. In x2APIC mode it is the vCPU's
/// number, and nobody writes it; KVM shows bits 31:8, and takes them in messages, only if the VMM
/// has asked for them (KVM_X2APIC_API_USE_32BIT_IDS): without, a message would reach another vCPU.
fn address_of(VcpuId(id): VcpuId, word: u32, x2apic: bool) -> Option<u32> {
    if x2apic {
        (id <= 0xff || word == id).then_some(id)
    } else {
        Some(word >> 24)
    }
}

/// The register of the ID, and LVTPC, from what `KVM_GET_LAPIC` gives.
fn registers(lapic: &kvm_lapic_state) -> (u32, Lvtpc) {
    let word = |at: usize| {
        let bytes = std::array::from_fn(|byte| lapic.regs[at + byte].cast_unsigned());
        u32::from_le_bytes(bytes)
    };
    (word(APIC_ID), Lvtpc::of(word(APIC_LVTPC), word(APIC_SVR)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_go_to_one_apic() {
        assert_eq!(message_address(5), Some((0xfee0_5000, 0)));
        assert_eq!(message_address(254), Some((0xfeef_e000, 0)));
        assert_eq!(message_address(255), None);
        assert_eq!(message_address(0x105), Some((0xfee0_5000, 0x100)));
    }

    #[test]
    fn a_disabled_apic_sends_nothing() {
        let mut state = kvm_lapic_state::default();
        state.regs[APIC_LVTPC + 1] = 4;
        state.regs[APIC_ID + 3] = 5;
        assert_eq!(registers(&state).1.route(), PmiRoute::Masked);
        state.regs[APIC_SVR + 1] = 1;
        let (id, lvtpc) = registers(&state);
        assert_eq!((id, lvtpc.route()), (5 << 24, PmiRoute::Nmi));
    }

    #[test]
    fn a_message_never_names_another_vcpu() {
        let check = |id, word, x2apic, expected| {
            let address = address_of(VcpuId(id), word, x2apic);
            assert_eq!(address, expected, "{id:#x} {word:#x} {x2apic}");
        };
        // The guest may change it.
        check(5, 7 << 24, false, Some(7));
        for word in [5, 5 << 24] {
            check(5, word, true, Some(5));
        }
        check(0x101, 0x101, true, Some(0x101));
        // Without 32-bit IDs.
        check(0x101, 1 << 24, true, None);
        check(0x500, 0, true, None);
    }
}
