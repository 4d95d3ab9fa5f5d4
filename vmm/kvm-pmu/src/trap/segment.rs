//! Loading a segment register from its descriptor (SDM vol. 3A, 3.4.5).

use kvm_bindings::kvm_segment;

use super::context::{CpuContext, descriptor_base};

/// What `selector` would load into a code or stack segment register at
/// privilege `cpl`; `None` if no present descriptor is there.
///
/// In 64-bit mode a null SS is legal at CPL 0 to 2 and loads an unusable
/// segment that carries the CPL (SDM vol. 3A, 7.14.4).
#[must_use]
pub(crate) fn load(context: &CpuContext<'_>, selector: u16, cpl: u8) -> Option<kvm_segment> {
    if selector & !3 == 0 {
        return Some(kvm_segment {
            selector,
            dpl: cpl,
            unusable: 1,
            ..Default::default()
        });
    }
    let descriptor = context.descriptor(selector)?;
    let bit = |at: u32| u8::from(descriptor >> at & 1 != 0);
    if bit(47) == 0 || bit(44) == 0 {
        return None;
    }
    let limit = (descriptor & 0xffff) | (descriptor >> 32 & 0xf_0000);
    let limit = u32::try_from(limit).unwrap_or(0);
    let granular = bit(55);
    // The accessed bit is set by every load.
    let kind = u8::try_from(descriptor >> 40 & 0xf).unwrap_or(0) | 1;
    Some(kvm_segment {
        base: descriptor_base(descriptor),
        limit: if granular == 1 {
            limit << 12 | 0xfff
        } else {
            limit
        },
        selector,
        type_: kind,
        present: 1,
        dpl: u8::try_from(descriptor >> 45 & 3).unwrap_or(0),
        db: bit(54),
        s: 1,
        // Reserved outside IA-32e mode, where KVM_SET_SREGS refuses it.
        l: if context.long_mode() { bit(53) } else { 0 },
        g: granular,
        avl: bit(52),
        unusable: 0,
        padding: 0,
    })
}
