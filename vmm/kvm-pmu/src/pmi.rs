//! PMIs: from an overflow to the guest's interrupt (SDM vol. 3A, 12.5.1 "Local
//! Vector Table"; APM vol. 2, 16.4).

use kvm_bindings::{kvm_lapic_state, kvm_msi, kvm_sregs};
use kvm_ioctls::VmFd;
use pmu_virt::{PmiRoute, Vendor};

use crate::error::{PmiError, VcpuError};
use crate::vcpu::VcpuAccess;

const APIC_ID: usize = 0x20;
const APIC_SVR: usize = 0xf0;
const APIC_LVTPC: usize = 0x340;
const X2APIC_LVTPC: u32 = 0x834;

const APIC_BASE_ENABLED: u64 = 1 << 11;
const APIC_BASE_X2APIC: u64 = 1 << 10;
const SVR_ENABLED: u32 = 1 << 8;
const LVT_MASKED: u32 = 1 << 16;
/// Delivery mode 100b.
const DELIVER_NMI: u32 = 0x400;

/// What became of a PMI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PmiDelivery {
    /// Where it went.
    pub route: PmiRoute,
    /// LVTPC's mask bit was set afterwards, as Intel's processors do.
    pub masked_after: bool,
}

/// The local APIC's part in a PMI, as it was when a counter overflowed.
///
/// Hardware decides at the overflow: a PMI that found LVTPC masked is gone, and
/// one that found it open is on its way, whatever the guest writes later. A
/// throttled PMI must not make a difference to that.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lvtpc {
    id: u32,
    value: u32,
    x2apic: bool,
}

/// Sends a fixed interrupt to `vcpu` itself; false if its local APIC takes none.
pub(crate) fn interrupt(vcpu: VcpuAccess<'_>, vm: &VmFd, vector: u8) -> Result<bool, PmiError> {
    let Some(Lvtpc { id, .. }) = Lvtpc::read(vcpu)? else {
        return Ok(false);
    };
    message(vm, id, vector.into())
}

/// Sends an edge-triggered interrupt to the local APIC with ID `apic_id` (SDM vol.
/// 3A, 12.11 "Message Signalled Interrupts"); false if no vCPU has it. `data` has
/// delivery mode and vector where LVTPC has them.
fn message(vm: &VmFd, apic_id: u32, data: u32) -> Result<bool, PmiError> {
    let Some(address_lo) = message_address(apic_id) else {
        return Ok(false);
    };
    let msi = kvm_msi {
        address_lo,
        // KVM reads destination bits 31:8 from here, but only where the VMM has asked
        // for that (KVM_X2APIC_API_USE_32BIT_IDS).
        address_hi: 0,
        data,
        ..Default::default()
    };
    match vm.signal_msi(msi) {
        Ok(delivered) => Ok(delivered > 0),
        // KVM's -1 for "no destination" reads as this error number.
        Err(error) if error.errno() == libc::EPERM => Ok(false),
        Err(error) => Err(PmiError::SignalMsi(error)),
    }
}

/// Where a message for a local APIC goes; 255 is all of them.
fn message_address(apic_id: u32) -> Option<u32> {
    (apic_id < 255).then_some(0xfee0_0000 | apic_id << 12)
}

/// Whether the local APIC is in x2APIC mode.
pub(crate) fn is_x2apic(sregs: &kvm_sregs) -> bool {
    const MODE: u64 = APIC_BASE_ENABLED | APIC_BASE_X2APIC;
    sregs.apic_base & MODE == MODE
}

/// Sends what an entry of the extended vector table says, which let it through: bits 10:8
/// have the delivery mode, bits 7:0 the vector. Modes that carry nothing here send nothing.
pub(crate) fn send_extended(vcpu: VcpuAccess<'_>, vm: &VmFd, vector: u32) -> Result<(), PmiError> {
    let Some(Lvtpc { id, .. }) = Lvtpc::read(vcpu)? else {
        return Ok(());
    };
    match PmiRoute::decode(vector) {
        PmiRoute::Nmi => nmi(vcpu, vm, id),
        PmiRoute::Fixed(vector) => message(vm, id, vector.into()).map(|_| ()),
        PmiRoute::Masked | PmiRoute::Unusable(_) => Ok(()),
    }
}

/// Sends an NMI to `vcpu` itself. A message is an ioctl of the VM's, and spares KVM
/// loading the vCPU's state and storing it again, which takes longer than the rest;
/// it serves as long as the guest has left the vCPU its APIC ID.
fn nmi(vcpu: VcpuAccess<'_>, vm: &VmFd, apic_id: u32) -> Result<(), PmiError> {
    if apic_id == u32::from(vcpu.id().0) && message(vm, apic_id, DELIVER_NMI)? {
        return Ok(());
    }
    Ok(vcpu.nmi()?)
}

impl Lvtpc {
    /// Reads it; `None` where the APIC is switched off.
    pub(crate) fn read(vcpu: VcpuAccess<'_>) -> Result<Option<Self>, VcpuError> {
        let base = vcpu.get_sregs()?.apic_base;
        if base & APIC_BASE_ENABLED == 0 {
            return Ok(None);
        }
        let registers = Lapic::of(&vcpu.get_lapic()?);
        Ok(Some(Self {
            id: registers.id,
            value: registers.lvtpc,
            x2apic: base & APIC_BASE_X2APIC != 0,
        }))
    }

    fn route(self) -> PmiRoute {
        PmiRoute::decode(self.value)
    }
}

/// What becomes of a PMI that overflowed under `lvtpc`, if it cannot be sent.
pub(crate) fn refusal(lvtpc: Option<Lvtpc>) -> Option<PmiDelivery> {
    match lvtpc.map_or(PmiRoute::Masked, Lvtpc::route) {
        PmiRoute::Nmi | PmiRoute::Fixed(_) => None,
        route => Some(delivery(route)),
    }
}

/// Sends one PMI the way the guest's LVTPC asked, on the vCPU's own thread.
///
/// Intel's processors set LVTPC's mask bit on delivery (SDM vol. 3B, 21.5.1).
/// That is done through the x2APIC register only: `KVM_SET_LAPIC` would write
/// back IRR and the timer as they were a moment ago and could lose an IPI. A
/// guest in xAPIC mode finds its LVTPC unmasked; `docs/internals/pmi.md` says so.
pub(crate) fn send(
    vcpu: VcpuAccess<'_>,
    vm: &VmFd,
    vendor: Vendor,
    lvtpc: Lvtpc,
) -> Result<PmiDelivery, PmiError> {
    let route = lvtpc.route();
    match route {
        PmiRoute::Nmi => nmi(vcpu, vm, lvtpc.id)?,
        PmiRoute::Fixed(vector) => {
            if !message(vm, lvtpc.id, vector.into())? {
                // The guest has changed its APIC's ID or mode in the meantime.
                return Ok(delivery(PmiRoute::Unusable(lvtpc.value)));
            }
        }
        PmiRoute::Masked | PmiRoute::Unusable(_) => return Ok(delivery(route)),
    }
    let masks = vendor == Vendor::Intel && lvtpc.x2apic;
    let masked_after = match masks.then(|| vcpu.read_msr(X2APIC_LVTPC)).transpose()? {
        Some(Some(now)) => vcpu.write_msr(X2APIC_LVTPC, now | u64::from(LVT_MASKED))?,
        _ => false,
    };
    Ok(PmiDelivery {
        route,
        masked_after,
    })
}

fn delivery(route: PmiRoute) -> PmiDelivery {
    PmiDelivery {
        route,
        masked_after: false,
    }
}

struct Lapic {
    id: u32,
    lvtpc: u32,
}

impl Lapic {
    /// From what `KVM_GET_LAPIC` gives in both modes of the APIC.
    fn of(lapic: &kvm_lapic_state) -> Self {
        let word = |at: usize| {
            let bytes = std::array::from_fn(|byte| lapic.regs[at + byte].cast_unsigned());
            u32::from_le_bytes(bytes)
        };
        // A software-disabled APIC has all LVT entries masked (SDM vol. 3A, 12.4.7.2).
        let masked = if word(APIC_SVR) & SVR_ENABLED == 0 {
            LVT_MASKED
        } else {
            0
        };
        let id = word(APIC_ID);
        Self {
            // In bits 31:24 in both modes, but below in x2APIC mode if the VMM has asked
            // for 32-bit IDs (KVM_X2APIC_API_USE_32BIT_IDS).
            id: if id >> 24 == 0 { id } else { id >> 24 },
            lvtpc: word(APIC_LVTPC) | masked,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_go_to_one_apic() {
        assert_eq!(message_address(5), Some(0xfee0_5000));
        assert_eq!(message_address(254), Some(0xfeef_e000));
        assert_eq!((message_address(255), message_address(261)), (None, None));
    }

    #[test]
    fn a_disabled_apic_sends_nothing() {
        let mut state = kvm_lapic_state::default();
        state.regs[APIC_LVTPC + 1] = 4;
        state.regs[APIC_ID + 3] = 5;
        let off = Lapic::of(&state);
        assert_eq!(PmiRoute::decode(off.lvtpc), PmiRoute::Masked);
        state.regs[APIC_SVR + 1] = 1;
        let on = Lapic::of(&state);
        assert_eq!((on.id, PmiRoute::decode(on.lvtpc)), (5, PmiRoute::Nmi));
    }
}
