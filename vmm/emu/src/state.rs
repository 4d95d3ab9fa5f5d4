//! The registers of a processor.

use pmu_model::Ring;
use serde::{Deserialize, Serialize};

use crate::flags::{Flags, STATUS};

/// Single step.
pub(crate) const TF: u64 = 1 << 8;
/// Interrupts are taken.
pub(crate) const IF: u64 = 1 << 9;
/// Strings run downwards.
pub(crate) const DF: u64 = 1 << 10;
/// The I/O privilege level.
pub(crate) const IOPL: u64 = 3 << 12;
/// Nested task.
pub(crate) const NT: u64 = 1 << 14;
/// Instruction breakpoints are passed over once.
pub(crate) const RF: u64 = 1 << 16;
/// Virtual 8086 mode.
pub(crate) const VM: u64 = 1 << 17;
/// Alignment checks, or user pages are open to CPL 0 under SMAP.
pub(crate) const AC: u64 = 1 << 18;
/// CPUID is there.
pub(crate) const ID: u64 = 1 << 21;

/// DR7.GD: accesses to debug registers raise #DB.
pub(crate) const DR7_GD: u64 = 1 << 13;

/// CR0.PE.
pub(crate) const CR0_PE: u64 = 1;
/// CR0.MP.
pub(crate) const CR0_MP: u64 = 1 << 1;
/// CR0.EM.
pub(crate) const CR0_EM: u64 = 1 << 2;
/// CR0.TS.
pub(crate) const CR0_TS: u64 = 1 << 3;
/// CR0.ET, which is fixed.
pub(crate) const CR0_ET: u64 = 1 << 4;
/// CR0.NE.
pub(crate) const CR0_NE: u64 = 1 << 5;
/// CR0.WP.
pub(crate) const CR0_WP: u64 = 1 << 16;
/// CR0.NW.
pub(crate) const CR0_NW: u64 = 1 << 29;
/// CR0.CD.
pub(crate) const CR0_CD: u64 = 1 << 30;
/// CR0.AM.
pub(crate) const CR0_AM: u64 = 1 << 18;
/// CR0.PG.
pub(crate) const CR0_PG: u64 = 1 << 31;
/// CR4.VME.
pub(crate) const CR4_VME: u64 = 1;
/// CR4.PVI.
pub(crate) const CR4_PVI: u64 = 1 << 1;
/// CR4.PSE.
pub(crate) const CR4_PSE: u64 = 1 << 4;
/// CR4.MCE.
pub(crate) const CR4_MCE: u64 = 1 << 6;
/// CR4.TSD.
pub(crate) const CR4_TSD: u64 = 1 << 2;
/// CR4.DE.
pub(crate) const CR4_DE: u64 = 1 << 3;
/// CR4.PAE.
pub(crate) const CR4_PAE: u64 = 1 << 5;
/// CR4.PGE.
pub(crate) const CR4_PGE: u64 = 1 << 7;
/// CR4.PCE.
pub(crate) const CR4_PCE: u64 = 1 << 8;
/// CR4.OSFXSR.
pub(crate) const CR4_OSFXSR: u64 = 1 << 9;
/// CR4.OSXMMEXCPT.
pub(crate) const CR4_OSXMMEXCPT: u64 = 1 << 10;
/// CR4.FSGSBASE.
pub(crate) const CR4_FSGSBASE: u64 = 1 << 16;
/// CR4.SMEP.
pub(crate) const CR4_SMEP: u64 = 1 << 20;
/// CR4.SMAP.
pub(crate) const CR4_SMAP: u64 = 1 << 21;
/// EFER.SCE.
pub(crate) const EFER_SCE: u64 = 1;
/// EFER.LME.
pub(crate) const EFER_LME: u64 = 1 << 8;
/// EFER.LMA.
pub(crate) const EFER_LMA: u64 = 1 << 10;
/// EFER.NXE.
pub(crate) const EFER_NXE: u64 = 1 << 11;

/// Number of RSP.
pub(crate) const RSP: usize = 4;
/// Always 0: for an absent base or index.
pub(crate) const ZERO: u8 = 16;
/// FS's base, as an address in 64-bit code adds it.
pub(crate) const FS_BASE: u8 = 17;
/// GS's base likewise.
pub(crate) const GS_BASE: u8 = 18;
/// 0 as well: the stack segment of 64-bit code, whose faults are its own.
pub(crate) const STACK: u8 = 19;
/// RIP of the running block's first instruction.
pub(crate) const BLOCK: u8 = 20;

/// A segment register by its number in encodings, and the two of the system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Seg {
    /// ES.
    Es,
    /// CS.
    Cs,
    /// SS.
    Ss,
    /// DS.
    Ds,
    /// FS.
    Fs,
    /// GS.
    Gs,
    /// LDTR.
    Ldtr,
    /// TR.
    Tr,
}

/// A segment register with what was loaded from its descriptor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(C)]
pub struct Segment {
    /// Selector.
    pub selector: u16,
    /// Access rights as in bits 40 to 55 of a descriptor: type 0 to 3, S 4, DPL 5 and 6, P 7,
    /// AVL 12, L 13, D/B 14, G 15. 0 is a null selector's.
    pub attr: u16,
    /// Last byte, G applied.
    pub limit: u32,
    /// Base.
    pub base: u64,
}

impl Segment {
    /// D/B.
    pub fn is_big(self) -> bool {
        self.attr & 1 << 14 != 0
    }

    /// L.
    pub fn is_long(self) -> bool {
        self.attr & 1 << 13 != 0
    }

    /// DPL.
    pub fn dpl(self) -> u8 {
        (self.attr >> 5 & 3).to_le_bytes()[0]
    }

    /// The 16 bytes of descriptor that it stands for are not null.
    pub fn is_usable(self) -> bool {
        self.attr & 1 << 7 != 0
    }
}

/// GDTR or IDTR.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(C)]
pub struct Table {
    /// Linear address.
    pub base: u64,
    /// Last byte.
    pub limit: u16,
}

/// What the last instruction holds back for one more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum Shadow {
    /// Nothing.
    #[default]
    None,
    /// Interrupts: STI.
    Sti,
    /// Interrupts, NMIs and #DB: a load of SS.
    MovSs,
}

/// The registers. Fields lie where they are said to, so that generated code may use them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(C)]
pub struct State {
    /// RAX to R15 by their numbers; then `ZERO`, the bases, and room.
    pub r: [u64; 32],
    /// RIP.
    pub rip: u64,
    /// CF, PF, AF, ZF, SF, OF.
    pub flags: Flags,
    /// The rest of RFLAGS; bit 1 is set.
    pub system_flags: u64,
    /// ES, CS, SS, DS, FS, GS, LDTR, TR.
    pub segments: [Segment; 8],
    /// GDTR.
    pub gdtr: Table,
    /// IDTR.
    pub idtr: Table,
    /// CR0.
    pub cr0: u64,
    /// CR2.
    pub cr2: u64,
    /// CR3.
    pub cr3: u64,
    /// The four entries that PAE paging outside of long mode has loaded with CR3.
    pub pdptes: [u64; 4],
    /// CR4.
    pub cr4: u64,
    /// CR8.
    pub cr8: u64,
    /// EFER.
    pub efer: u64,
    /// XMM0 to XMM15.
    pub xmm: [[u64; 2]; 16],
    /// The x87 part of an FXSAVE image.
    pub x87: [u64; 20],
    /// MXCSR.
    pub mxcsr: u32,
    /// NMIs wait for an IRET.
    pub nmi_blocked: bool,
    /// What waits for one more instruction.
    pub shadow: Shadow,
    /// DR0 to DR3.
    pub dr: [u64; 4],
    /// DR6.
    pub dr6: u64,
    /// DR7.
    pub dr7: u64,
    /// The processor's own MSRs.
    pub msrs: Msrs,
    /// Ticks since reset: one an instruction, more for PAUSE and the like.
    pub time: u64,
}

/// MSRs that the processor's instructions use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(C)]
pub struct Msrs {
    /// STAR.
    pub star: u64,
    /// LSTAR.
    pub lstar: u64,
    /// CSTAR.
    pub cstar: u64,
    /// SFMASK.
    pub sfmask: u64,
    /// `KERNEL_GS_BASE`.
    pub kernel_gs_base: u64,
    /// `SYSENTER_CS`.
    pub sysenter_cs: u64,
    /// `SYSENTER_ESP`.
    pub sysenter_esp: u64,
    /// `SYSENTER_EIP`.
    pub sysenter_eip: u64,
    /// `TSC_AUX`.
    pub tsc_aux: u64,
    /// PAT; the types of memory mean nothing here.
    pub pat: u64,
    /// What RDTSC adds to the time.
    pub tsc_offset: u64,
}

impl Default for State {
    /// After a reset (SDM vol. 3A, table 11-1), but for CS:RIP, which is at 0.
    fn default() -> Self {
        let flat = |attr| Segment {
            selector: 0,
            attr,
            limit: 0xffff,
            base: 0,
        };
        let mut segments = [flat(0x93); 8];
        segments[Seg::Cs as usize] = flat(0x9b);
        segments[Seg::Ldtr as usize] = flat(0x82);
        segments[Seg::Tr as usize] = flat(0x8b);
        let table = Table {
            base: 0,
            limit: 0xffff,
        };
        let mut x87 = [0; 20];
        x87[0] = 0x037f;
        Self {
            r: [0; 32],
            rip: 0,
            flags: Flags::default(),
            system_flags: 2,
            segments,
            gdtr: table,
            idtr: table,
            cr0: CR0_ET,
            cr2: 0,
            cr3: 0,
            pdptes: [0; 4],
            cr4: 0,
            cr8: 0,
            efer: 0,
            xmm: [[0; 2]; 16],
            x87,
            mxcsr: 0x1f80,
            nmi_blocked: false,
            shadow: Shadow::None,
            dr: [0; 4],
            dr6: 0xffff_0ff0,
            dr7: 0x400,
            msrs: Msrs {
                pat: 0x0007_0406_0007_0406,
                ..Msrs::default()
            },
            time: 0,
        }
    }
}

impl State {
    /// 64-bit mode at CPL 0 or 3, flat, with the page tables at `cr3`; RIP, RSP and what tables
    /// there are remain to be set.
    #[must_use]
    pub fn long_mode(cr3: u64, cpl: u8) -> Self {
        let mut state = Self::default();
        let ring = u16::from(cpl & 3);
        let segment = |selector: u16, attr: u16| Segment {
            selector: selector | ring,
            attr: attr | ring << 5,
            limit: u32::MAX,
            base: 0,
        };
        state.segments = [segment(0x18, 0xc093); 8];
        state.segments[Seg::Cs as usize] = segment(0x10, 0xa09b);
        state.segments[Seg::Ldtr as usize] = Segment::default();
        state.segments[Seg::Tr as usize] = Segment {
            selector: 0x20,
            attr: 0x8b,
            limit: 0x67,
            base: 0,
        };
        state.cr0 = CR0_PE | CR0_MP | CR0_ET | CR0_NE | CR0_WP | CR0_AM | CR0_PG;
        state.cr3 = cr3;
        state.cr4 = CR4_PAE | CR4_PGE;
        state.efer = EFER_SCE | EFER_LME | EFER_LMA | EFER_NXE;
        state
    }

    /// A segment register.
    #[must_use]
    pub fn segment(&self, seg: Seg) -> Segment {
        self.segments[seg as usize]
    }

    /// Loads a segment register, and what addresses take of it.
    pub fn set_segment(&mut self, seg: Seg, value: Segment) {
        self.segments[seg as usize] = value;
        match seg {
            Seg::Fs => self.r[usize::from(FS_BASE)] = value.base,
            Seg::Gs => self.r[usize::from(GS_BASE)] = value.base,
            _ => {}
        }
    }

    /// The privilege level: the DPL of SS. CS's RPL is the same, but not where CR0.PE has just
    /// been set.
    #[must_use]
    pub fn cpl(&self) -> u8 {
        if self.cr0 & CR0_PE == 0 {
            return 0;
        }
        if self.system_flags & VM != 0 {
            return 3;
        }
        self.segment(Seg::Ss).dpl()
    }

    /// The ring as counts tell rings apart.
    #[must_use]
    pub fn ring(&self) -> Ring {
        Ring::from_cpl(self.cpl())
    }

    /// What known jumps are told apart by: bits of the code, and whether CPL is 3.
    pub(crate) fn mode(&self) -> u8 {
        let bits = match self.bits() {
            16 => 0,
            32 => 1,
            _ => 2,
        };
        bits | u8::from(self.cpl() == 3) << 2
    }

    /// EFER.LMA.
    #[must_use]
    pub fn is_long(&self) -> bool {
        self.efer & EFER_LMA != 0
    }

    /// Bits of the running code: 16, 32 or 64.
    #[must_use]
    pub fn bits(&self) -> u32 {
        let cs = self.segment(Seg::Cs);
        match (self.is_long() && cs.is_long(), cs.is_big()) {
            (true, _) => 64,
            (false, true) => 32,
            (false, false) => 16,
        }
    }

    /// RFLAGS.
    #[must_use]
    pub fn rflags(&self) -> u64 {
        self.system_flags & !STATUS | 2 | self.flags.bits()
    }

    /// Sets RFLAGS whole; reserved bits are dropped.
    pub fn set_rflags(&mut self, value: u64) {
        const KNOWN: u64 = TF | IF | DF | IOPL | NT | RF | VM | AC | ID | 3 << 19;
        self.flags = Flags::from_bits(value);
        self.system_flags = value & KNOWN | 2;
    }
}
