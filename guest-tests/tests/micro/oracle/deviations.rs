//! Where KVM's processor, which in L1 is QEMU's, does otherwise than the manuals say.

use super::system::Case;

/// The log of a case.
pub(super) type Log = [[u64; 4]];

/// A difference that the manual decides against KVM.
pub(super) struct Deviation {
    /// How the names of its cases begin, and what they have.
    pub(super) case: &'static str,
    pub(super) with: &'static str,
    /// The operands of which the manual says so: no other case is excused by this.
    pub(super) given: fn(&Given) -> bool,
    /// What the manual says, and where.
    pub(super) manual: &'static str,
    /// Whether the two logs, KVM's first, differ in that.
    pub(super) is_it: fn(&Log, &Log) -> bool,
}

/// A case, and the upper half of the descriptor of 16 bytes that it names, if that is ours.
pub(super) struct Given {
    pub(super) case: Case,
    pub(super) upper: Option<u64>,
}

const STATE: u64 = super::STATE as u64;
const UD: u64 = 0x106;
const SS: u64 = 0x10c;
const GP: u64 = 0x10d;
const PF: u64 = 0x10e;

/// Cases whose code would lie beyond the limit of its segment.
pub(super) const BEYOND: &str = "beyond its limit";

/// All that are known.
pub(super) const DEVIATIONS: &[Deviation] = &[
    Deviation {
        case: "Wrmsr(",
        with: "",
        given: is_reserved_in_msr,
        manual: "an address that is not canonical, and reserved bits as the upper half of \
                 IA32_FMASK, raise #GP(0) (SDM vol. 2D, WRMSR; vol. 4, table 2-2)",
        is_it: emu_alone_faults,
    },
    Deviation {
        case: "Cr0(",
        with: "",
        given: is_reserved_in_control,
        manual: "the upper half of CR0 is reserved: #GP(0) (SDM vol. 2B, MOV to control registers)",
        is_it: emu_alone_faults,
    },
    Deviation {
        case: "Cr4(1",
        with: "",
        given: is_reserved_in_control,
        manual: "the upper half of CR4 is reserved: #GP(0) (SDM vol. 2B, MOV to control registers)",
        is_it: emu_alone_faults,
    },
    Deviation {
        case: "Cr4(",
        with: "",
        given: any,
        manual: "MCE is as it was written (SDM vol. 3A, 2.5); KVM shows the host's",
        is_it: |kvm, emu| differ_by(kvm, emu, 1 << 6),
    },
    Deviation {
        case: "Dr7(",
        with: "",
        given: any,
        manual: "bit 11 is reserved and 0 (SDM vol. 3B, 19.2.4)",
        is_it: |kvm, emu| differ_by(kvm, emu, 1 << 11),
    },
    Deviation {
        case: "Lar(",
        with: "",
        given: any,
        manual: "bits 19:16 are undefined (SDM vol. 2A, LAR)",
        is_it: |kvm, emu| differ_by(kvm, emu, 0xf << 16),
    },
    Deviation {
        case: "Lsl(",
        with: "",
        given: any,
        manual: "a task of 16 bits is no valid type in IA-32e mode (SDM vol. 2A, LSL)",
        is_it: |kvm, emu| zero_flag(kvm) && !zero_flag(emu),
    },
    Deviation {
        case: "Load(4, ",
        with: "",
        given: is_null_of_another_ring,
        manual: "a null selector whose RPL is not CPL raises #GP(0) (SDM vol. 2B, MOV)",
        is_it: emu_alone_faults,
    },
    Deviation {
        case: "Read { at: 7ffffffffff",
        with: "",
        given: any,
        manual: "an access that reaches beyond the canonical addresses raises #GP(0) or #SS(0) \
                 (SDM vol. 1, 3.3.7.1)",
        is_it: |kvm, emu| fault(kvm) == Some((PF, 0)) && is_general(emu),
    },
    Deviation {
        case: "Interrupt(",
        with: "",
        given: any,
        manual: "what INT n raises itself, also for a gate to an address that is not canonical, \
                 is a fault: RIP is that of the instruction (SDM vol. 2A, INT n)",
        is_it: |kvm, emu| fault(kvm) == fault(emu) && at_the_instruction(emu),
    },
    Deviation {
        case: "Lar(",
        with: "",
        given: any,
        manual: "tasks of 16 bits and task gates are no valid types in IA-32e mode (SDM vol. 2A, \
                 LAR)",
        is_it: |kvm, emu| zero_flag(kvm) && !zero_flag(emu),
    },
    Deviation {
        case: "Ltr(",
        with: "",
        given: is_no_task,
        manual: "a null selector, and a descriptor whose upper half has a type, raise #GP (SDM \
                 vol. 2A, LTR; vol. 3A, 9.2.3)",
        is_it: emu_alone_faults,
    },
    Deviation {
        case: "Lldt(",
        with: "",
        given: has_typed_upper_half,
        manual: "a descriptor whose upper half has a type raises #GP (SDM vol. 3A, 9.2.3)",
        is_it: emu_alone_faults,
    },
    Deviation {
        case: "Retf {",
        with: BEYOND,
        given: any,
        manual: "an address beyond the limit of its segment raises #GP(0) (SDM vol. 2B, RET)",
        is_it: lands_beyond,
    },
    Deviation {
        case: "Jump {",
        with: BEYOND,
        given: any,
        manual: "a target beyond the limit of its segment raises #GP(0) before anything changes \
                 (SDM vol. 2A, CALL, JMP)",
        is_it: lands_beyond,
    },
];

fn any(_: &Given) -> bool {
    true
}

/// WRMSR of a value that the manual does not allow.
fn is_reserved_in_msr(given: &Given) -> bool {
    const FMASK: u32 = 0xc000_0084;
    const ADDRESSES: [u32; 5] = [0xc000_0082, 0xc000_0100, 0xc000_0101, 0xc000_0102, 0x176];
    match given.case {
        Case::Wrmsr(FMASK, value) => value >> 32 != 0,
        Case::Wrmsr(msr, value) if ADDRESSES.contains(&msr) => {
            let sign = value.cast_signed() >> 47;
            sign != 0 && sign != -1
        }
        _ => false,
    }
}

fn is_reserved_in_control(given: &Given) -> bool {
    matches!(given.case, Case::Cr0(value) | Case::Cr4(value) if value >> 32 != 0)
}

fn is_null_of_another_ring(given: &Given) -> bool {
    matches!(given.case, Case::Load(4, 1..=3))
}

fn is_no_task(given: &Given) -> bool {
    matches!(given.case, Case::Ltr(0..=3)) || has_typed_upper_half(given)
}

/// Bits 12:8 of the last double word are not 0.
fn has_typed_upper_half(given: &Given) -> bool {
    given.upper.is_some_and(|upper| upper >> 40 & 0x1f != 0)
}

/// Vector and error code of the first exception.
fn fault(log: &Log) -> Option<(u64, u64)> {
    let first = log.iter().find(|entry| entry[0] > 0x100)?;
    Some((first[0], first[1] & 0xffff_ffff))
}

fn is_general(log: &Log) -> bool {
    matches!(fault(log), Some((GP | SS, 0)))
}

/// KVM executes what raises #GP.
fn emu_alone_faults(kvm: &Log, emu: &Log) -> bool {
    fault(kvm).is_none() && fault(emu).is_some_and(|(vector, _)| vector == GP)
}

/// KVM goes to an UD2 that is beyond the limit.
fn lands_beyond(kvm: &Log, emu: &Log) -> bool {
    fault(kvm) == Some((UD, 0)) && fault(emu) == Some((GP, 0))
}

fn at_the_instruction(log: &Log) -> bool {
    log.iter().any(|entry| entry[0] > 0x100 && entry[2] == 0)
}

/// RAX behind the case, and the selectors.
fn state(log: &Log) -> Option<&[u64; 4]> {
    log.iter().find(|entry| entry[0] == STATE)
}

fn zero_flag(log: &Log) -> bool {
    state(log).is_some_and(|state| state[2] & 0x40 != 0)
}

/// The logs are the same but for these bits of RAX.
fn differ_by(kvm: &Log, emu: &Log, bits: u64) -> bool {
    let but = |log: &Log| -> Vec<[u64; 4]> {
        let mut log = log.to_vec();
        for entry in log.iter_mut().filter(|entry| entry[0] == STATE) {
            entry[1] &= !bits;
        }
        log
    };
    but(kvm) == but(emu)
}
