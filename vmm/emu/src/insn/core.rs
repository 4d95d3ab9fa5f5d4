//! What instructions work on: registers and memory, and how they end.

use guest_exit::{Answer, VmExit};
use iced_x86::Instruction;
use instruction_facts::is_canonical;

use crate::code::CodePages;
use crate::cpuid::Cpuid;
use instruction_facts::EventClass;

use super::op::Op;
use crate::entry::Entry;
use crate::events::LANES;
use crate::paging::{Rules, walk};
use crate::slow_path::{SlowPath, SlowPaths};
use crate::state::{AC, BLOCK, CR0_AM, CR4_SMAP, RSP, STACK, Seg, Segment, State};
use crate::stop::{Missing, fits};
use crate::sys::ram::{Ram, Scalar};
use crate::tlb::{Kind, Set, Tlb};
use crate::unannounced::Unannounced;

/// How an instruction ended, if it did not just retire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Trap {
    /// It has retired, and the run loop has to look at what changed.
    Leave,
    /// It raised `Core::fault`, and changed nothing.
    Fault,
    /// A part of it is done (REP): it is to be executed again.
    Again,
    /// It is to be executed alone, and has changed nothing that it reads: it would write to a page
    /// with code, or could find out too late that it does, or reaches to the end of CS.
    CodeWrite,
    /// It needs `Core::stop` answered, and has changed nothing that it reads: but for an ENTER whose
    /// frames overlap and of whose words some are a device's.
    Stop,
}

pub(crate) type Exec<T = ()> = Result<T, Trap>;

/// An exception.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) vector: u8,
    pub(crate) code: Option<u32>,
    pub(crate) cr2: Option<u64>,
}

/// What decides about a single-step trap behind an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stepping {
    /// TF as it was before.
    Before,
    /// TF as it is now: SYSCALL and SYSRET.
    Now,
    /// None follows: INT n.
    Never,
}

/// An access to a device or a port that was answered, of the instruction that is being executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Done {
    Read { address: u64, value: u64 },
    Write { address: u64 },
    In { port: u16, width: u8, value: u64 },
}

/// Where the bytes of an address are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Spot {
    Ram(u64),
    Device(u64),
}

/// Integers by their width.
pub(crate) trait Width: Scalar + Eq {
    const BITS: u32;
    fn of(value: u64) -> Self;
    fn wide(self) -> u64;
    /// Sign-extended.
    fn signed(self) -> u64;
    /// As the new value of a register that was `old`.
    fn merge(self, old: u64) -> u64;
    fn rotated_left(self, by: u32) -> Self;
    fn rotated_right(self, by: u32) -> Self;
}

macro_rules! width {
    ($($one:ty, $signed:ty, $bits:literal, |$old:ident| $keep:expr;)*) => {$(
        impl Width for $one {
            const BITS: u32 = $bits;
            #[inline(always)]
            fn of(value: u64) -> Self {
                value as $one
            }
            #[inline(always)]
            fn wide(self) -> u64 {
                self as u64
            }
            #[inline(always)]
            fn signed(self) -> u64 {
                self as $signed as i64 as u64
            }
            #[inline(always)]
            fn merge(self, $old: u64) -> u64 {
                $keep | self as u64
            }
            #[inline(always)]
            fn rotated_left(self, by: u32) -> Self {
                self.rotate_left(by)
            }
            #[inline(always)]
            fn rotated_right(self, by: u32) -> Self {
                self.rotate_right(by)
            }
        }
    )*};
}

width! {
    u8, i8, 8, |old| old & !0xff;
    u16, i16, 16, |old| old & !0xffff;
    u32, i32, 32, |_old| 0;
    u64, i64, 64, |_old| 0;
}

/// A processor, without its blocks.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) state: State,
    pub(crate) ram: Ram,
    pub(crate) tlb: Tlb,
    pub(crate) code: CodePages,
    pub(crate) cpuid: Cpuid,
    /// Events since they were last added to the totals.
    pub(crate) lanes: [u16; LANES],
    /// Ticks of the budget that are left.
    pub(crate) left: i64,
    /// Time when the budget is used up.
    pub(crate) end: u64,
    pub(crate) fault: Fault,
    /// Why it has stopped last.
    stop: VmExit,
    /// What was missing at the last [`VmExit::Unimplemented`].
    pub(crate) missing: Option<Missing>,
    /// What was answered, and to what.
    answer: Option<(VmExit, Answer)>,
    /// The bytes of the last IN or OUT.
    io: [u8; 4],
    /// What the last OUT wrote.
    written: u32,
    done: Vec<Done>,
    replayed: usize,
    /// The processor's own access: no device answers it.
    internal: bool,
    /// HLT has retired.
    pub(crate) halted: bool,
    /// PAUSE ends a run.
    pub(crate) stops_at_pause: bool,
    /// PAUSE has retired, and is to end the run.
    pub(crate) paused: bool,
    /// CR8 has another value, which the local APIC has to know of, or the TSC, which its
    /// deadline goes by.
    pub(crate) look_at_once: bool,
    /// Instructions that operations name by number.
    pub(crate) kept: Vec<Instruction>,
    /// How often the fast path was left.
    pub(crate) slow_paths: SlowPaths,
    /// What CPUID does not announce and was executed.
    pub(crate) unannounced: Unannounced,
    /// Stores to pages with code are let through: the instruction runs alone.
    pub(crate) alone: bool,
    /// Somebody wants to know of requests to Valgrind.
    pub(crate) tells_requests: bool,
    /// What may be one has retired.
    pub(crate) requested: bool,
    /// How the last entry into a handler came about.
    pub(crate) entry: Entry,
    /// Data breakpoints that were met, as bits of DR6.
    pub(crate) hits: u64,
    /// What decides about a single-step trap behind the instruction in hand.
    pub(crate) stepping: Stepping,
    /// Translations of other code may be gone: who jumps has to look anew.
    pub(crate) flushed: bool,
    /// A page that was fetched from and has lost its place in the TLB to another.
    pub(crate) forgotten: Option<u64>,
    pub(crate) rules: Rules,
    read: Set,
    write: Set,
    slow_access: bool,
}

impl Core {
    pub(crate) fn new(ram: Ram, cpuid: Cpuid) -> Self {
        let state = State::default();
        let rules = Rules::of(&state, &cpuid);
        Self {
            code: CodePages::new(ram.bytes() >> 12),
            state,
            ram,
            tlb: Tlb::new(),
            cpuid,
            lanes: [0; LANES],
            left: 0,
            end: 0,
            fault: Fault {
                vector: 0,
                code: None,
                cr2: None,
            },
            stop: VmExit::Budget,
            missing: None,
            answer: None,
            io: [0; 4],
            written: 0,
            done: Vec::new(),
            replayed: 0,
            internal: false,
            halted: false,
            stops_at_pause: false,
            paused: false,
            look_at_once: false,
            kept: Vec::new(),
            slow_paths: SlowPaths::default(),
            unannounced: Unannounced::default(),
            alone: false,
            tells_requests: false,
            requested: false,
            entry: Entry::Other,
            hits: 0,
            stepping: Stepping::Before,
            flushed: false,
            forgotten: None,
            rules,
            read: Set::KernelRead,
            write: Set::KernelWrite,
            slow_access: false,
        }
    }

    /// To be called when CPL, AC, CR0, CR4 or DR7 have changed.
    pub(crate) fn refresh(&mut self) {
        let state = &self.state;
        let user = state.cpl() == 3;
        let open = state.cr4 & CR4_SMAP != 0 && state.system_flags & AC != 0;
        (self.read, self.write) = match (user, open) {
            (true, _) => (Set::UserRead, Set::UserWrite),
            (false, true) => (Set::OpenRead, Set::OpenWrite),
            (false, false) => (Set::KernelRead, Set::KernelWrite),
        };
        let aligned = user && state.system_flags & AC != 0 && state.cr0 & CR0_AM != 0;
        self.slow_access = aligned || self.watches();
    }

    /// To be called when CR0, CR3, CR4 or EFER have changed.
    pub(crate) fn refresh_paging(&mut self) {
        self.rules = Rules::of(&self.state, &self.cpuid);
        self.flushed = true;
        self.refresh();
    }

    /// Loads CS. Where its base and limit mean something, jumps that are known lead elsewhere now.
    pub(crate) fn load_code(&mut self, code: Segment) {
        let old = self.state.segment(Seg::Cs);
        let flat = self.state.is_long() && old.is_long() && code.is_long();
        if !flat && (old.base, old.limit) != (code.base, code.limit) {
            self.flushed = true;
        }
        self.state.set_segment(Seg::Cs, code);
    }

    /// Some data breakpoint is on.
    fn watches(&self) -> bool {
        (0..4).any(|n| {
            let on = self.state.dr7 >> (2 * n) & 3 != 0;
            on && self.state.dr7 >> (16 + 4 * n) & 1 != 0
        })
    }

    /// Virtual time.
    pub(crate) fn now(&self) -> u64 {
        self.end.wrapping_sub(self.left.cast_unsigned())
    }

    /// The instruction takes more time than one tick.
    pub(crate) fn spend(&mut self, ticks: i64) {
        self.left -= ticks;
    }

    #[inline(always)]
    pub(crate) fn count(&mut self, lane: usize) {
        let lane = &mut self.lanes[lane];
        *lane = lane.wrapping_add(1);
    }

    /// A conditional branch, near as all of them are, has been taken.
    #[inline(always)]
    pub(crate) fn taken(&mut self) {
        self.count(EventClass::TakenBranches as usize);
        self.count(EventClass::NearTakenBranches as usize);
    }

    // How instructions end.

    #[cold]
    pub(crate) fn raise<T>(&mut self, vector: u8, code: Option<u32>) -> Exec<T> {
        self.fault = Fault {
            vector,
            code,
            cr2: None,
        };
        Err(Trap::Fault)
    }

    #[cold]
    pub(crate) fn gp<T>(&mut self, code: u32) -> Exec<T> {
        self.raise(13, Some(code))
    }

    #[cold]
    pub(crate) fn ud<T>(&mut self) -> Exec<T> {
        self.raise(6, None)
    }

    #[cold]
    fn ask<T>(&mut self, stop: VmExit) -> Exec<T> {
        self.stop = stop;
        Err(Trap::Stop)
    }

    #[cold]
    pub(crate) fn missing<T>(&mut self, what: Missing) -> Exec<T> {
        self.missing = Some(what);
        // RIP is filled in by the run loop, which knows where the instruction begins.
        self.ask(VmExit::Unimplemented { rip: 0 })
    }

    /// The answer to a question, which is asked if there is none yet.
    pub(crate) fn answered(&mut self, stop: VmExit) -> Exec<u64> {
        // An answer to another question, which somebody has asked before registers were set, is
        // none to this one.
        match self.answer.take().filter(|(asked, _)| *asked == stop) {
            None => self.ask(stop),
            Some((_, Answer::MsrFault)) => self.gp(0),
            Some((_, Answer::Msr(value))) => Ok(value),
            Some((_, Answer::Mmio(bytes))) => Ok(u64::from_le_bytes(bytes)),
            Some((_, Answer::Done)) => Ok(0),
        }
    }

    /// What a port reads: whoever was asked has left it in `io`.
    pub(crate) fn port_in(&mut self, port: u16, width: u8) -> Exec<u64> {
        // INS may have stopped again since, to store at a device.
        if let Some(Done::In {
            port: from,
            width: bytes,
            value,
        }) = self.done.get(self.replayed).copied()
            && (from, bytes) == (port, width)
        {
            self.replayed += 1;
            return Ok(value);
        }
        let len = usize::from(width);
        self.answered(VmExit::IoIn { port, width, len })?;
        let mut value = [0; 4];
        value[..len].copy_from_slice(&self.io[..len]);
        let value = u32::from_le_bytes(value).into();
        self.done.push(Done::In { port, width, value });
        self.replayed = self.done.len();
        Ok(value)
    }

    /// Writes to a port.
    pub(crate) fn port_out(&mut self, port: u16, width: u8, value: u32) -> Exec {
        if self.written != value {
            // Something else was written; that it is done says nothing about this.
            self.answer = None;
        }
        let len = usize::from(width);
        let exit = VmExit::IoOut { port, width, len };
        if let Err(trap) = self.answered(exit) {
            self.written = value;
            self.io = value.to_le_bytes();
            return Err(trap);
        }
        Ok(())
    }

    /// The bytes of the IN or OUT that it has stopped at; none at another stop.
    pub(crate) fn io_data(&mut self) -> &mut [u8] {
        match self.stop {
            VmExit::IoIn { len, .. } | VmExit::IoOut { len, .. } => &mut self.io[..len],
            _ => &mut [],
        }
    }

    /// Takes an answer to the last stop; one that does not fit it is dropped.
    pub(crate) fn take_answer(&mut self, answer: Answer) {
        if fits(self.stop, answer) {
            self.answer = Some((self.stop, answer));
        }
    }

    /// The run stops here with what an instruction has asked for. It is to be executed from
    /// its beginning, and what needs no answer has one already.
    pub(crate) fn stopped(&mut self) -> VmExit {
        self.rewind();
        match &mut self.stop {
            VmExit::Unimplemented { rip } => *rip = self.state.rip,
            VmExit::IoIn { .. } | VmExit::IoOut { .. } | VmExit::MmioWrite { .. } => {
                self.answer = Some((self.stop, Answer::Done));
            }
            _ => {}
        }
        self.stop
    }

    /// The run has ended with something else than a question.
    pub(crate) fn stops_at(&mut self, exit: VmExit) {
        self.stop = exit;
    }

    /// The instruction is over: no access of it waits to be told again.
    pub(crate) fn settle(&mut self) {
        self.done.clear();
        self.replayed = 0;
        self.answer = None;
    }

    /// The instruction is to be executed from its beginning.
    pub(crate) fn rewind(&mut self) {
        self.replayed = 0;
    }

    /// An instruction has begun that waits for an answer or has had one.
    pub(crate) fn is_half_done(&self) -> bool {
        !self.done.is_empty() || self.answer.is_some()
    }

    // Registers.

    #[inline(always)]
    pub(crate) fn reg<W: Width>(&self, number: u8) -> W {
        W::of(self.state.r[usize::from(number & 31)])
    }

    #[inline(always)]
    pub(crate) fn set_reg<W: Width>(&mut self, number: u8, value: W) {
        let place = &mut self.state.r[usize::from(number & 31)];
        *place = value.merge(*place);
    }

    /// The linear address of an operation's memory operand.
    #[inline(always)]
    pub(crate) fn address(&self, op: &Op) -> u64 {
        self.offset(op)
            .wrapping_add(self.state.r[usize::from(op.seg & 31)])
    }

    /// Its offset in the segment.
    #[inline(always)]
    pub(crate) fn offset(&self, op: &Op) -> u64 {
        let r = &self.state.r;
        r[usize::from(op.base & 31)]
            .wrapping_add(r[usize::from(op.index & 31)] << (op.scale & 3))
            .wrapping_add(i64::from(op.disp) as u64)
    }

    // Memory, by the rights of the running code.

    #[inline(always)]
    pub(crate) fn load<W: Width>(&mut self, linear: u64, seg: u8) -> Exec<W> {
        match self.fast(self.read, linear, W::BITS) {
            Some(offset) => Ok(self.ram.load(offset)),
            None => self.load_slow(linear, W::BITS / 8, seg).map(W::of),
        }
    }

    #[inline(always)]
    pub(crate) fn store<W: Width>(&mut self, linear: u64, seg: u8, value: W) -> Exec {
        match self.fast(self.write, linear, W::BITS) {
            Some(offset) => {
                self.ram.store(offset, value);
                Ok(())
            }
            None => self.store_slow(linear, W::BITS / 8, seg, value.wide()),
        }
    }

    /// Reads, and writes what `change` makes of it. Whether it may write is known first.
    #[inline(always)]
    pub(crate) fn modify<W: Width>(
        &mut self,
        linear: u64,
        seg: u8,
        change: impl FnOnce(W) -> W,
    ) -> Exec<W> {
        match self.fast(self.write, linear, W::BITS) {
            Some(offset) => {
                let old = self.ram.load(offset);
                self.ram.store(offset, change(old));
                Ok(old)
            }
            None => {
                self.check_write(linear, W::BITS / 8, seg)?;
                let old = W::of(self.read_slow(self.write, linear, W::BITS / 8, seg)?);
                self.store_slow(linear, W::BITS / 8, seg, change(old).wide())?;
                Ok(old)
            }
        }
    }

    /// 16 bytes, the low half first.
    #[inline(always)]
    pub(crate) fn load_pair(&mut self, linear: u64, seg: u8) -> Exec<[u64; 2]> {
        match self.fast(self.read, linear, 128) {
            Some(offset) => {
                let value = self.ram.load::<u128>(offset);
                Ok([value as u64, (value >> 64) as u64])
            }
            None => self.load_pair_slow(linear, seg),
        }
    }

    #[inline(always)]
    pub(crate) fn store_pair(&mut self, linear: u64, seg: u8, value: [u64; 2]) -> Exec {
        match self.fast(self.write, linear, 128) {
            Some(offset) => {
                let value = u128::from(value[0]) | u128::from(value[1]) << 64;
                self.ram.store(offset, value);
                Ok(())
            }
            None => self.store_pair_slow(linear, seg, value),
        }
    }

    /// By halves, of which each asks for a boundary of 8 bytes where alignment is checked. Both
    /// are known to be there before a device is asked.
    #[cold]
    fn load_pair_slow(&mut self, linear: u64, seg: u8) -> Exec<[u64; 2]> {
        self.slow_paths.took(SlowPath::Memory);
        let high = self.beyond(linear, 8);
        for half in [linear, high] {
            self.check(self.read, half, 8, seg)?;
        }
        self.spot(self.read, linear)?;
        let last = self.beyond(linear, 15);
        if (linear ^ last) >> 12 != 0 {
            self.spot(self.read, last & !0xfff)?;
        }
        let low = self.read_slow(self.read, linear, 8, seg)?;
        Ok([low, self.read_slow(self.read, high, 8, seg)?])
    }

    #[cold]
    fn store_pair_slow(&mut self, linear: u64, seg: u8, value: [u64; 2]) -> Exec {
        self.slow_paths.took(SlowPath::Memory);
        let high = self.beyond(linear, 8);
        for half in [linear, high] {
            self.check_write(half, 8, seg)?;
        }
        self.write_as(self.write, linear, 8, seg, value[0])?;
        self.write_as(self.write, high, 8, seg, value[1])
    }

    #[inline(always)]
    fn fast(&self, set: Set, linear: u64, bits: u32) -> Option<u64> {
        let found = self.tlb.find(set, linear, u64::from(bits / 8))?;
        (!self.slow_access).then_some(found)
    }

    #[inline(always)]
    pub(crate) fn push<W: Width>(&mut self, value: W) -> Exec {
        let to = self.state.r[RSP].wrapping_sub(u64::from(W::BITS / 8));
        self.store(to, STACK, value)?;
        self.state.r[RSP] = to;
        Ok(())
    }

    /// What is on the stack; RSP stays, for what comes after may fault.
    #[inline(always)]
    pub(crate) fn top<W: Width>(&mut self) -> Exec<W> {
        self.load(self.state.r[RSP], STACK)
    }

    #[inline(always)]
    pub(crate) fn block_rip(&mut self, rip: u64) {
        self.state.r[usize::from(BLOCK)] = rip;
    }

    #[cold]
    fn load_slow(&mut self, linear: u64, bytes: u32, seg: u8) -> Exec<u64> {
        self.slow_paths.took(SlowPath::Memory);
        self.read_slow(self.read, linear, bytes, seg)
    }

    fn read_slow(&mut self, set: Set, linear: u64, bytes: u32, seg: u8) -> Exec<u64> {
        self.check(set, linear, bytes, seg)?;
        self.watch(linear, bytes, set.writes());
        let first = self.first_part(linear, bytes);
        let low = self.spot(set, linear)?;
        if first == bytes {
            return self.read_part(low, bytes);
        }
        let high = self.spot(set, self.beyond(linear, first))?;
        let low = self.read_part(low, first)?;
        let high = self.read_part(high, bytes - first)?;
        Ok(low | high << (8 * first))
    }

    /// How many bytes lie on the first page.
    fn first_part(&self, linear: u64, bytes: u32) -> u32 {
        let room = 4096 - (linear & 0xfff);
        u64::from(bytes).min(room) as u32
    }

    fn read_part(&mut self, spot: Spot, bytes: u32) -> Exec<u64> {
        match spot {
            Spot::Ram(offset) => Ok(match bytes {
                1 => self.ram.load::<u8>(offset).wide(),
                2 => self.ram.load::<u16>(offset).wide(),
                4 => self.ram.load::<u32>(offset).wide(),
                8 => self.ram.load::<u64>(offset),
                _ => (0..bytes).rev().fold(0, |value, byte| {
                    let at = offset + u64::from(byte);
                    value << 8 | self.ram.load::<u8>(at).wide()
                }),
            }),
            Spot::Device(address) => self.device_read(address, bytes),
        }
    }

    fn device_read(&mut self, address: u64, bytes: u32) -> Exec<u64> {
        if self.internal {
            return Ok(u64::MAX >> (64 - 8 * bytes));
        }
        if let Some(done) = self.done.get(self.replayed) {
            self.replayed += 1;
            if let Done::Read { address: at, value } = *done
                && at == address
            {
                return Ok(value);
            }
        }
        let len = bytes as usize;
        let value = self.answered(VmExit::MmioRead { address, len })?;
        let value = value & (u64::MAX >> (64 - 8 * bytes));
        self.done.push(Done::Read { address, value });
        self.replayed = self.done.len();
        Ok(value)
    }

    /// Whether a write would be let through; nothing is changed but A and D.
    #[cold]
    pub(crate) fn check_write(&mut self, linear: u64, bytes: u32, seg: u8) -> Exec {
        self.check(self.write, linear, bytes, seg)?;
        let first = self.first_part(linear, bytes);
        let low = self.spot(self.write, linear)?;
        self.code_write(low)?;
        if first != bytes {
            let high = self.spot(self.write, self.beyond(linear, first))?;
            self.code_write(high)?;
        }
        Ok(())
    }

    /// Whether the instruction may store there without being alone.
    pub(super) fn code_write(&self, spot: Spot) -> Exec {
        match spot {
            Spot::Ram(offset) if self.code.has((offset >> 12) as u32) && !self.alone => {
                Err(Trap::CodeWrite)
            }
            _ => Ok(()),
        }
    }

    #[cold]
    fn store_slow(&mut self, linear: u64, bytes: u32, seg: u8, value: u64) -> Exec {
        self.slow_paths.took(SlowPath::Memory);
        self.write_as(self.write, linear, bytes, seg, value)
    }

    fn write_as(&mut self, set: Set, linear: u64, bytes: u32, seg: u8, value: u64) -> Exec {
        self.check(set, linear, bytes, seg)?;
        self.watch(linear, bytes, true);
        let first = self.first_part(linear, bytes);
        let low = self.spot(set, linear)?;
        self.code_write(low)?;
        if first == bytes {
            return self.write_part(low, bytes, value);
        }
        let high = self.spot(set, self.beyond(linear, first))?;
        self.code_write(high)?;
        self.write_part(low, first, value)?;
        self.write_part(high, bytes - first, value >> (8 * first))
    }

    fn write_part(&mut self, spot: Spot, bytes: u32, value: u64) -> Exec {
        match spot {
            Spot::Ram(offset) => {
                match bytes {
                    1 => self.ram.store(offset, value as u8),
                    2 => self.ram.store(offset, value as u16),
                    4 => self.ram.store(offset, value as u32),
                    8 => self.ram.store(offset, value),
                    _ => (0..bytes).for_each(|byte| {
                        self.ram
                            .store(offset + u64::from(byte), (value >> (8 * byte)) as u8);
                    }),
                }
                self.code.write((offset >> 12) as u32);
                Ok(())
            }
            Spot::Device(address) => self.device_write(address, bytes, value),
        }
    }

    fn device_write(&mut self, address: u64, bytes: u32, value: u64) -> Exec {
        if self.internal {
            return Ok(());
        }
        if self.done.get(self.replayed) == Some(&Done::Write { address }) {
            self.replayed += 1;
            return Ok(());
        }
        let value = value & (u64::MAX >> (64 - 8 * bytes));
        self.answered(VmExit::MmioWrite {
            address,
            data: value.to_le_bytes(),
            len: bytes as usize,
        })?;
        self.done.push(Done::Write { address });
        self.replayed = self.done.len();
        Ok(())
    }

    /// Whether a byte would be loaded; nothing is changed but A, and no device is asked.
    pub(super) fn check_read(&mut self, linear: u64, seg: u8) -> Exec {
        self.check(self.read, linear, 1, seg)?;
        self.spot(self.read, linear).map(|_| ())
    }

    /// Canonical, and aligned where that is asked for.
    fn check(&mut self, set: Set, linear: u64, bytes: u32, seg: u8) -> Exec {
        let last = linear.wrapping_add(u64::from(bytes) - 1);
        if self.is_wide() && !(is_canonical(linear) && is_canonical(last)) {
            let vector = if seg == STACK { 12 } else { 13 };
            return self.raise(vector, Some(0));
        }
        let aligned = linear & (u64::from(bytes) - 1) == 0 || !bytes.is_power_of_two();
        if !aligned && set.is_user() {
            let on = self.state.system_flags & AC != 0 && self.state.cr0 & CR0_AM != 0;
            if on {
                return self.raise(17, Some(0));
            }
        }
        Ok(())
    }

    /// Linear addresses have 64 bits: in 64-bit code, and for the processor itself in long mode.
    fn is_wide(&self) -> bool {
        self.state.bits() == 64 || self.internal && self.state.is_long()
    }

    /// The address so many bytes on, for an access that crosses pages.
    pub(crate) fn beyond(&self, linear: u64, bytes: u32) -> u64 {
        let next = linear.wrapping_add(u64::from(bytes));
        if self.is_wide() {
            next
        } else {
            next & 0xffff_ffff
        }
    }

    /// Data breakpoints that an access meets (SDM vol. 3B, 19.2.5).
    fn watch(&mut self, linear: u64, bytes: u32, write: bool) {
        if !self.slow_access {
            return;
        }
        for n in 0..4 {
            let on = self.state.dr7 >> (2 * n) & 3 != 0;
            let control = self.state.dr7 >> (16 + 4 * n) & 15;
            let len = [1, 2, 8, 4][(control >> 2) as usize];
            let meets = control & 1 != 0 && (write || control & 2 != 0);
            let at = self.state.dr[n] & !(len - 1);
            let overlaps =
                at.wrapping_sub(linear) < u64::from(bytes) || linear.wrapping_sub(at) < len;
            if on && meets && overlaps {
                self.hits |= 1 << n;
            }
        }
    }

    /// Where a linear address leads to, by the rights of `set`.
    pub(crate) fn spot(&mut self, set: Set, linear: u64) -> Exec<Spot> {
        if let Some(offset) = self.tlb.find_any(set, linear) {
            if set.writes() && !self.code.has((offset >> 12) as u32) {
                self.tlb.quicken(set, linear);
            }
            return Ok(Spot::Ram(offset));
        }
        self.slow_paths.took(SlowPath::Walk);
        let mapped = match walk(&self.ram, &self.rules, linear, set) {
            Ok(mapped) => mapped,
            Err(code) => {
                self.fault = Fault {
                    vector: 14,
                    code: Some(code),
                    cr2: Some(linear),
                };
                return Err(Trap::Fault);
            }
        };
        for at in mapped.marked() {
            self.code_write(Spot::Ram(at))?;
        }
        mapped.mark(&mut self.ram);
        for at in mapped.marked() {
            self.code.write((at >> 12) as u32);
        }
        let Some(offset) = self.ram.offset_of(mapped.physical) else {
            return Ok(Spot::Device(mapped.physical));
        };
        let base = offset & !0xfff;
        let kind = Kind {
            global: mapped.global,
            large: mapped.large,
            slow: set.writes() && self.code.has((base >> 12) as u32),
        };
        let forgot = self.tlb.fill(set, linear, base, kind);
        if set.fetches() {
            self.forgotten = forgot;
        }
        Ok(Spot::Ram(offset))
    }

    /// The sets by which the running code reads and writes, if nothing watches each access.
    pub(crate) fn plain_sets(&self) -> Option<(Set, Set)> {
        (!self.slow_access).then_some((self.read, self.write))
    }

    /// The offset in RAM of an address, if it is RAM.
    pub(crate) fn page(&mut self, set: Set, linear: u64) -> Exec<Option<u64>> {
        self.check(set, linear, 1, 0)?;
        Ok(match self.spot(set, linear)? {
            Spot::Ram(offset) => Some(offset),
            Spot::Device(_) => None,
        })
    }

    // Memory, by the rights of the system: tables, and stacks of the handlers.

    pub(crate) fn system_load<W: Width>(&mut self, linear: u64) -> Exec<W> {
        let bytes = W::BITS / 8;
        let value = self.internally(|core| core.read_slow(Set::KernelRead, linear, bytes, 0));
        value.map(W::of)
    }

    pub(crate) fn system_store<W: Width>(&mut self, linear: u64, value: W) -> Exec {
        self.system_write(Set::KernelWrite, linear, W::BITS / 8, value.wide())
    }

    /// A store onto the stack of code at a privilege level.
    pub(crate) fn stack_store(&mut self, cpl: u8, linear: u64, value: u64) -> Exec {
        let set = if cpl == 3 {
            Set::UserWrite
        } else {
            Set::KernelWrite
        };
        self.system_write(set, linear, 8, value)
    }

    /// What the processor itself writes ends the block: pages with code may be written to.
    fn system_write(&mut self, set: Set, linear: u64, bytes: u32, value: u64) -> Exec {
        let alone = std::mem::replace(&mut self.alone, true);
        let written = self.internally(|core| core.write_as(set, linear, bytes, STACK, value));
        self.alone = alone;
        written
    }

    /// Does what the processor does itself, in no instruction: of its accesses no device is
    /// asked. What is written where no memory is goes nowhere.
    pub(super) fn internally<T>(&mut self, access: impl FnOnce(&mut Self) -> T) -> T {
        let internal = std::mem::replace(&mut self.internal, true);
        let done = access(self);
        self.internal = internal;
        done
    }

    /// The base of a data segment, as addresses of the running code add it.
    pub(crate) fn segment_base(&self, seg: Seg) -> u64 {
        match seg {
            Seg::Fs | Seg::Gs => self.state.segment(seg).base,
            _ if self.state.bits() == 64 => 0,
            _ => self.state.segment(seg).base,
        }
    }
}
