//! A machine to run a few instructions in: page tables, GDT, IDT and TSS, a handler per vector.

use emu::{Cpu, Cpuid, Ram, Ring, Seg, Segment, State, Table, VmExit};
use pmu_model::CpuidRegs;
use pmu_model::cpuid::Leaves;
use vm_memory::{Bytes, GuestAddress};

/// The system's own memory, mapped here for CPL 0 at [`SYSTEM`].
const TABLES: u64 = 0x1000;
pub(crate) const GDT: u64 = 0x8_0000;
pub(crate) const IDT: u64 = 0x8_1000;
pub(crate) const TSS: u64 = 0x8_3000;
/// Top of the handlers' stack.
pub(crate) const STACK_TOP: u64 = 0x8_6000;
/// A handler has 16 bytes, all of them HLT.
pub(crate) const HANDLERS: u64 = 0x8_7000;
/// Linear address of guest-physical 0.
pub(crate) const SYSTEM: u64 = 0xffff_8000_0000_0000;
/// Where pages of tests are.
pub(crate) const PAGES: u64 = 0x10_0000;
const SIZE: u64 = 0x40_0000;

pub(crate) const PRESENT: u64 = 1;
pub(crate) const WRITABLE: u64 = 2;
pub(crate) const USER: u64 = 4;

pub(crate) const KERNEL_CODE: u16 = 0x10;
pub(crate) const KERNEL_DATA: u16 = 0x18;
pub(crate) const USER_DATA: u16 = 0x28;
pub(crate) const USER_CODE: u16 = 0x30;
const TASK: u16 = 0x40;

/// A processor with its tables.
pub(crate) struct Guest {
    pub(crate) cpu: Cpu,
    next_table: u64,
}

/// What is implemented, with leaves changed.
pub(crate) fn announcing(change: impl Fn(u32, &mut CpuidRegs)) -> Cpuid {
    let all = Cpuid::implemented();
    let mut leaves = Leaves::default();
    for one in [0, 1, 7, 0x8000_0000, 0x8000_0001, 0x8000_0008] {
        let mut regs = all.answer(one, 0);
        change(one, &mut regs);
        leaves.set(one, 0, regs);
    }
    Cpuid::new(leaves)
}

/// What happened to one instruction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Happened {
    Retired,
    /// Vector, error code, CR2.
    Fault(u8, u64, u64),
    Stopped(VmExit),
}

impl Guest {
    pub(crate) fn new() -> Self {
        Self::with(Cpuid::implemented())
    }

    pub(crate) fn with(cpuid: Cpuid) -> Self {
        let ram = Ram::zeroed(SIZE).expect("memory");
        let mut guest = Guest {
            cpu: Cpu::new(ram, cpuid),
            next_table: TABLES + 0x1000,
        };
        for page in (0..SIZE).step_by(4096) {
            guest.map(SYSTEM + page, page, PRESENT | WRITABLE);
        }
        let gdt = [
            0,
            0,
            0x00af_9b00_0000_ffff,
            0x00cf_9300_0000_ffff,
            0,
            0x00cf_f300_0000_ffff,
            0x00af_fb00_0000_ffff,
            0x00cf_fb00_0000_ffff,
        ];
        for (slot, descriptor) in gdt.into_iter().enumerate() {
            guest.write(GDT + 8 * slot as u64, descriptor);
        }
        let base = SYSTEM + TSS;
        let low = 0x67 | (base & 0xff_ffff) << 16 | 0x89 << 40 | (base >> 24 & 0xff) << 56;
        guest.write(GDT + u64::from(TASK), low);
        guest.write(GDT + u64::from(TASK) + 8, base >> 32);
        for vector in 0..256u64 {
            guest.gate(vector, SYSTEM + HANDLERS + 16 * vector, 0);
        }
        // The map of ports is beyond the limit.
        guest.write(TSS + 0x60, 0x68 << 48);
        guest.write(TSS + 4, SYSTEM + STACK_TOP);
        guest.bytes(HANDLERS, &[0xf4; 4096]);
        guest
    }

    /// An interrupt gate.
    pub(crate) fn gate(&mut self, vector: u64, to: u64, stack: u64) {
        let low = to & 0xffff
            | u64::from(KERNEL_CODE) << 16
            | stack << 32
            | 0xee << 40
            | (to >> 16 & 0xffff) << 48;
        self.write(IDT + 16 * vector, low);
        self.write(IDT + 16 * vector + 8, to >> 32);
    }

    pub(crate) fn bytes(&mut self, physical: u64, bytes: &[u8]) {
        let memory = self.cpu.ram().memory();
        memory
            .write_slice(bytes, GuestAddress(physical))
            .expect("memory");
        self.cpu.written(physical..physical + bytes.len() as u64);
    }

    pub(crate) fn write(&mut self, physical: u64, value: u64) {
        self.bytes(physical, &value.to_le_bytes());
    }

    pub(crate) fn read(&self, physical: u64, bytes: &mut [u8]) {
        let memory = self.cpu.ram().memory();
        memory
            .read_slice(bytes, GuestAddress(physical))
            .expect("memory");
    }

    pub(crate) fn word(&self, physical: u64) -> u64 {
        let mut bytes = [0; 8];
        self.read(physical, &mut bytes);
        u64::from_le_bytes(bytes)
    }

    /// Maps a page of 4 KiB.
    pub(crate) fn map(&mut self, linear: u64, physical: u64, rights: u64) {
        let mut table = TABLES;
        for shift in [39, 30, 21] {
            let slot = table + 8 * (linear >> shift & 0x1ff);
            let entry = self.word(slot);
            table = if entry & 1 == 0 {
                let new = self.next_table;
                self.next_table += 0x1000;
                assert!(new < GDT, "room for tables");
                self.write(slot, new | PRESENT | WRITABLE | USER);
                new
            } else {
                entry & !0xfff
            };
        }
        self.write(table + 8 * (linear >> 12 & 0x1ff), physical | rights);
    }

    /// Registers of code at a privilege level, with interrupts on.
    pub(crate) fn state(&self, cpl: u8) -> State {
        let mut state = State::long_mode(TABLES, cpl);
        let (code, data) = if cpl == 3 {
            (USER_CODE | 3, USER_DATA | 3)
        } else {
            (KERNEL_CODE, KERNEL_DATA)
        };
        for seg in [Seg::Es, Seg::Ss, Seg::Ds, Seg::Fs, Seg::Gs] {
            let mut one = state.segment(seg);
            one.selector = data;
            state.set_segment(seg, one);
        }
        let mut one = state.segment(Seg::Cs);
        one.selector = code;
        state.set_segment(Seg::Cs, one);
        let task = Segment {
            selector: TASK,
            attr: 0x8b,
            limit: 0x67,
            base: SYSTEM + TSS,
        };
        state.set_segment(Seg::Tr, task);
        state.gdtr = Table {
            base: SYSTEM + GDT,
            limit: 0x4f,
        };
        state.idtr = Table {
            base: SYSTEM + IDT,
            limit: 0xfff,
        };
        state.set_rflags(0x202);
        state
    }

    /// Executes the instruction at RIP, as often as it wants to be.
    pub(crate) fn one(&mut self) -> Happened {
        let start = self.cpu.state().clone();
        for _ in 0..100_000 {
            let stop = self.cpu.run(1);
            let totals = [Ring::Kernel, Ring::User].map(|ring| self.cpu.take_totals(ring));
            if let Some(vector) = self.handler()
                && start.rip != self.cpu.state().rip
            {
                return self.fault(vector);
            }
            if stop != VmExit::Budget {
                return Happened::Stopped(stop);
            }
            let retired: u64 = totals
                .iter()
                .map(|totals| totals.of(emu::EventClass::Instructions))
                .sum();
            if retired > 0 {
                return Happened::Retired;
            }
        }
        panic!("an instruction without an end at {:#x}", start.rip);
    }

    /// The vector at whose handler RIP is.
    fn handler(&self) -> Option<u8> {
        let away = self.cpu.state().rip.wrapping_sub(SYSTEM + HANDLERS);
        (away < 4096).then_some((away / 16) as u8)
    }

    fn fault(&self, vector: u8) -> Happened {
        let state = self.cpu.state();
        let has_code = matches!(vector, 8 | 10..=14 | 17);
        let code = if has_code {
            self.word(state.r[4] - SYSTEM)
        } else {
            0
        };
        Happened::Fault(vector, code, state.cr2)
    }

    /// RIP, RFLAGS and RSP of the frame that the handler has got.
    pub(crate) fn frame(&self, vector: u8) -> [u64; 3] {
        let has_code = matches!(vector, 8 | 10..=14 | 17);
        let at = self.cpu.state().r[4] - SYSTEM + if has_code { 8 } else { 0 };
        [self.word(at), self.word(at + 16), self.word(at + 24)]
    }
}
