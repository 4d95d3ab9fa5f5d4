//! INIT and start-up IPIs, by the local APIC in its xAPIC mode, in which
//! processors start (SDM vol. 3A, 10.6.1).

use core::ptr;

const SVR: *mut u32 = ptr::without_provenance_mut(0xfee0_00f0);
const ICR_LOW: *mut u32 = ptr::without_provenance_mut(0xfee0_0300);
const ICR_HIGH: *mut u32 = ptr::without_provenance_mut(0xfee0_0310);
/// Delivery mode INIT, level assert.
const INIT: u32 = 0x4500;
/// Delivery mode start-up, level assert.
const START_UP: u32 = 0x4600;

/// Spurious-interrupt vector register: the APIC is enabled by software.
const ENABLED: u32 = 1 << 8;

/// Runs `work` with the local APIC enabled by software, without which KVM
/// delivers no IPI. Afterwards the APIC is as the kernel expects it.
pub(crate) fn with_apic<T>(work: impl FnOnce() -> T) -> T {
    // SAFETY: a register of the local APIC, at its address after reset, which the
    // identity map covers; interrupts are off, so none comes of it.
    let before = unsafe { SVR.read_volatile() };
    // SAFETY: as above.
    unsafe { SVR.write_volatile(before | ENABLED) };
    let result = work();
    // SAFETY: as above.
    unsafe { SVR.write_volatile(before) };
    result
}

/// Puts a processor into its wait for a start-up IPI.
pub(crate) fn send_init(apic_id: u8) {
    send(apic_id, INIT);
}

/// Starts a processor in real mode at page `vector`.
pub(crate) fn send_start_up(apic_id: u8, vector: u8) {
    send(apic_id, START_UP | u32::from(vector));
}

fn send(apic_id: u8, command: u32) {
    // SAFETY: the identity map covers the local APIC at its address after reset,
    // which nobody has moved; both are its registers, and no memory. The command
    // reaches another processor, whose code the trampoline is.
    unsafe {
        ICR_HIGH.write_volatile(u32::from(apic_id) << 24);
        ICR_LOW.write_volatile(command);
    }
}
