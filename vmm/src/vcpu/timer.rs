//! When the local APIC's timer of a halted vCPU will expire.
//!
//! KVM's local APIC keeps the timer and reports to nobody but the vCPU itself. Its
//! registers hold the time: the count that remains, or the deadline. That
//! saves a core from finding it out by probes, later.

use kvm_bindings::kvm_lapic_state;
use kvm_pmu::{Tsc, now};
use pmu_virt::Ticks;

use crate::kvm::{KvmVcpu, VcpuError};

/// `IA32_TIME_STAMP_COUNTER`: the guest's own TSC.
const TSC: u32 = 0x10;
/// `IA32_TSC_DEADLINE`.
const IA32_TSC_DEADLINE: u32 = 0x6e0;

/// Offsets of registers in the local APIC's page (SDM vol. 3A, table 12-1).
const LVT_TIMER: usize = 0x320;
const CURRENT_COUNT: usize = 0x390;
const DIVIDE: usize = 0x3e0;

/// LVT timer register (SDM vol. 3A, figure 12-8).
const MASKED: u32 = 1 << 16;
const MODE: u32 = 3 << 17;
const TSC_DEADLINE: u32 = 2 << 17;

/// KVM's APIC bus runs at 1 GHz (KVM API, `KVM_CAP_X86_APIC_BUS_CYCLES_NS`: 1 by
/// default).
const BUS_KHZ: u64 = 1_000_000;
/// KVM's timer and the TSC are not the same clock.
const MARGIN_US: u64 = 20;

/// The instant at which the timer of `kvm`'s local APIC will have expired, if it is set, on
/// a TSC of `tsc_khz`.
///
/// # Errors
/// The error of `KVM_GET_LAPIC` or `KVM_GET_MSRS`.
pub(super) fn due(kvm: &KvmVcpu, tsc_khz: u32) -> Result<Option<Tsc>, VcpuError> {
    let ticks = match expiry(&kvm.get_lapic()?) {
        Expiry::Never => None,
        Expiry::After(cycles) => Some(ticks(cycles, tsc_khz)),
        Expiry::AtDeadline => {
            let deadline = kvm.read_msr(IA32_TSC_DEADLINE)?.unwrap_or(0);
            let tsc = kvm.read_msr(TSC)?.unwrap_or(0);
            // 0 is "not set" (SDM vol. 3A, 12.5.4.1); one that has passed is
            // on its way.
            deadline.checked_sub(tsc).map(Ticks)
        }
    };
    Ok(ticks.map(|ticks| now() + ticks + margin(tsc_khz)))
}

/// What the timer of a vCPU will do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expiry {
    /// Nothing, as far as the registers show.
    Never,
    /// It expires after so many bus cycles.
    After(u64),
    /// It expires when the guest's TSC reaches the deadline register's value.
    AtDeadline,
}

/// Reads the timer's registers.
fn expiry(lapic: &kvm_lapic_state) -> Expiry {
    let register = |at: usize| {
        let bytes = lapic.regs[at..at + 4].iter().rev();
        bytes.fold(0u32, |value, byte| {
            value << 8 | u32::from(byte.cast_unsigned())
        })
    };
    let lvt = register(LVT_TIMER);
    if lvt & MASKED != 0 {
        return Expiry::Never;
    }
    if lvt & MODE == TSC_DEADLINE {
        return Expiry::AtDeadline;
    }
    match register(CURRENT_COUNT) {
        0 => Expiry::Never,
        count => Expiry::After(u64::from(count) << divide_shift(register(DIVIDE))),
    }
}

/// The timer counts every 2^N-th bus cycle (SDM vol. 3A, figure 12-10: bits 3, 1
/// and 0; 7 is "divide by 1").
fn divide_shift(divide: u32) -> u32 {
    let value = divide & 3 | divide >> 1 & 4;
    (value + 1) & 7
}

/// The time on a TSC of `tsc_khz` until the bus has made `cycles`.
fn ticks(cycles: u64, tsc_khz: u32) -> Ticks {
    let ticks = u128::from(cycles) * u128::from(tsc_khz) / u128::from(BUS_KHZ);
    Ticks(u64::try_from(ticks).unwrap_or(u64::MAX))
}

/// The time by which an expiry is asked about late rather than early.
fn margin(tsc_khz: u32) -> Ticks {
    Ticks(u64::from(tsc_khz) * MARGIN_US / 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_registers_say() {
        fn check(lvt: u32, count: u32, divide: u32, expected: Expiry) {
            let mut lapic = kvm_lapic_state::default();
            for (at, value) in [(LVT_TIMER, lvt), (CURRENT_COUNT, count), (DIVIDE, divide)] {
                for (byte, to) in value.to_le_bytes().iter().zip(&mut lapic.regs[at..]) {
                    *to = byte.cast_signed();
                }
            }
            assert_eq!(expiry(&lapic), expected, "{lvt:#x} {count:#x} {divide:#x}");
        }
        // One-shot and periodic, with each divider.
        check(0x20, 0x8000_0000, 0xb, Expiry::After(0x8000_0000));
        check(0x20, 1000, 0x0, Expiry::After(2000));
        check(0x20, 1000, 0x1, Expiry::After(4000));
        check(0x20, 1000, 0x2, Expiry::After(8000));
        check(0x20, 1000, 0x3, Expiry::After(16_000));
        check(0x20, 1000, 0x8, Expiry::After(32_000));
        check(0x2_0020, 1000, 0x9, Expiry::After(64_000));
        check(0x2_0020, 1000, 0xa, Expiry::After(128_000));
        // Not set, masked, and held by another register.
        check(0x20, 0, 0xb, Expiry::Never);
        check(0x1_0020, 1000, 0xb, Expiry::Never);
        check(0x4_0020, 1000, 0xb, Expiry::AtDeadline);
    }

    #[test]
    fn bus_cycles_are_nanoseconds() {
        assert_eq!(ticks(1_000_000, 2_500_000), Ticks(2_500_000));
        assert_eq!(ticks(u64::MAX, 2_000_000), Ticks(u64::MAX));
        assert_eq!(margin(2_500_000), Ticks(50_000));
    }
}
