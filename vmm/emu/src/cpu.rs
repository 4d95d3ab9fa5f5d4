//! The processor: fetches, runs blocks, stops where it is told to.
#![allow(
    clippy::cast_possible_truncation,
    reason = "offsets in a page, and numbers of pages"
)]

mod outside;

use std::fmt;
use std::ops::Range;

use guest_exit::{Answer, VmExit};
use iced_x86::{Instruction, InstructionInfoFactory};
use instruction_facts::is_canonical;
use pmu_model::{EventTotals, Ring};

use crate::block::{Blocks, Decoded, Key, NOWHERE};
use crate::cpuid::Cpuid;
use crate::decode::{self, Short, Source};
use crate::events::{self, LANES};
use crate::insn::Op;
use crate::insn::{Core, Delivery, Fault, Spot, Stepping, Trap, deliver, execute};
use crate::observer::{Event, Looks, Observer, is_request};
use crate::slow_path::{SlowPath, SlowPaths};
use crate::state::{IF, RF, STACK, Seg, Shadow, State, TF, ZERO};
use crate::stop::Missing;
use crate::sys::ram::Ram;
use crate::tlb::Set;
use crate::unannounced::NotAnnounced;

/// Ticks after which events are added to the totals at the latest: no lane of 16 bits can
/// overflow by then, the most an instruction counts for being 32.
const FOLD: i64 = 1900;

/// Bytes that are looked at for a block.
const WINDOW: usize = 1024;

/// How a run of blocks ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// The budget is used up.
    Budget,
    /// The instruction asked for has retired, or one after which all has to be looked at.
    Retired,
    /// Likewise, but it is to be executed again.
    Repeats,
    Fault,
    CodeWrite,
    Stop,
}

/// A processor in software.
pub struct Cpu {
    core: Core,
    factory: InstructionInfoFactory,
    blocks: Blocks,
    totals: [EventTotals; 2],
    /// The time up to which these have the ticks.
    folded: u64,
    wants_window: bool,
    wants_nmi: bool,
    looks: Looks,
}

impl fmt::Debug for Cpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cpu")
            .field("state", &self.core.state)
            .finish_non_exhaustive()
    }
}

impl Cpu {
    /// A processor after reset, with this memory and these answers to CPUID.
    #[must_use]
    pub fn new(ram: Ram, cpuid: Cpuid) -> Self {
        Self {
            core: Core::new(ram, cpuid),
            factory: InstructionInfoFactory::new(),
            blocks: Blocks::new(),
            totals: [EventTotals::default(); 2],
            folded: 0,
            wants_window: false,
            wants_nmi: false,
            looks: Looks::default(),
        }
    }

    /// The registers.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.core.state
    }

    /// Sets all registers; translations are dropped.
    pub fn set_state(&mut self, state: State) {
        self.core.state = state;
        for seg in [Seg::Fs, Seg::Gs] {
            let one = self.core.state.segment(seg);
            self.core.state.set_segment(seg, one);
        }
        self.core.state.r[usize::from(ZERO)] = 0;
        self.core.state.r[usize::from(STACK)..].fill(0);
        self.core.tlb.clear();
        self.core.refresh_paging();
        self.core.settle();
    }

    /// The memory.
    #[must_use]
    pub fn ram(&self) -> &Ram {
        &self.core.ram
    }

    /// Somebody else has written to guest-physical addresses: code decoded from there is
    /// dropped.
    pub fn written(&mut self, physical: Range<u64>) {
        let mut at = physical.start & !0xfff;
        while at < physical.end {
            if let Some(offset) = self.core.ram.offset_of(at) {
                self.core.code.write((offset >> 12) as u32);
            }
            at += 4096;
        }
        self.drop_written();
    }

    /// All decoded code is dropped; nothing else changes.
    pub fn forget_code(&mut self) {
        self.blocks.clear();
        self.core.kept.clear();
        self.core.code.clear();
    }

    /// Instructions that raised #UD because CPUID does not announce them: each code once in the
    /// life of the processor, with where it was met first.
    pub fn take_unannounced(&mut self) -> Vec<NotAnnounced> {
        self.core.unannounced.take()
    }

    /// How often the fast path was left since the processor was made, by reason.
    #[must_use]
    pub fn slow_paths(&self) -> SlowPaths {
        self.core.slow_paths
    }

    /// What instructions counted for in a ring since it was last taken, with the ticks that
    /// they took.
    pub fn take_totals(&mut self, ring: Ring) -> EventTotals {
        std::mem::take(&mut self.totals[ring as usize])
    }

    /// Puts who looks on in the place of who did.
    pub fn observe(&mut self, by: Option<Box<dyn Observer>>) -> Option<Box<dyn Observer>> {
        self.core.tells_requests = by.is_some();
        self.looks.swap(by)
    }

    /// The observer is told when the kernel comes to one of these addresses by a branch, or runs
    /// into it.
    pub fn watch(&mut self, places: Vec<u64>) {
        self.looks.set_places(places);
        // Code that is decoded already may lead there unseen.
        self.forget_code();
    }

    /// Bytes that decoded code takes, beside the guest's RAM.
    #[must_use]
    pub fn code_bytes(&self) -> usize {
        self.blocks.bytes() + self.core.kept.capacity() * size_of::<Instruction>()
    }

    /// Ticks since reset.
    #[must_use]
    pub fn time(&self) -> u64 {
        self.core.state.time
    }

    /// Answers the last stop; the instruction goes on when the processor runs. If it asks for
    /// something else then, because registers were set, the answer is dropped, and so is one
    /// that does not fit the stop. A load, RDMSR, WRMSR or RDPMC without an answer asks again;
    /// IN, OUT and stores to devices are done when the processor runs on.
    pub fn answer(&mut self, answer: Answer) {
        self.core.take_answer(answer);
    }

    /// The bytes of the IN or OUT that it has stopped at; what is left there for an IN is what
    /// it reads. None for another stop.
    pub fn io_data(&mut self) -> &mut [u8] {
        self.core.io_data()
    }

    /// What was missing when it stopped with [`VmExit::Unimplemented`] last.
    #[must_use]
    pub fn missing(&self) -> Option<Missing> {
        self.core.missing
    }

    /// Whether an interrupt would be taken now.
    #[must_use]
    pub fn can_interrupt(&self) -> bool {
        let state = &self.core.state;
        state.system_flags & IF != 0 && state.shadow == Shadow::None && !self.core.is_half_done()
    }

    /// Whether an NMI would be taken now.
    #[must_use]
    pub fn can_nmi(&self) -> bool {
        let state = &self.core.state;
        !state.nmi_blocked && state.shadow != Shadow::MovSs && !self.core.is_half_done()
    }

    /// From now on [`VmExit::Window`] says when an interrupt can be taken.
    pub fn want_window(&mut self, wants: bool) {
        self.wants_window = wants;
    }

    /// Delivers an interrupt, which [`Cpu::can_interrupt`] allows. A stop is a triple fault.
    pub fn interrupt(&mut self, vector: u8) -> Option<VmExit> {
        self.inject(Delivery::Interrupt(vector))
    }

    /// Delivers an NMI, which [`Cpu::can_nmi`] allows.
    pub fn nmi(&mut self) -> Option<VmExit> {
        self.inject(Delivery::Nmi)
    }

    fn inject(&mut self, delivery: Delivery) -> Option<VmExit> {
        self.begin(0);
        let stop = self.deliver(delivery);
        if let Some(stop) = stop {
            self.core.stops_at(stop);
        }
        self.end();
        stop
    }

    fn begin(&mut self, budget: u64) {
        self.core.left = i64::try_from(budget).unwrap_or(i64::MAX);
        self.core.end = self
            .core
            .state
            .time
            .wrapping_add(self.core.left.cast_unsigned());
        self.folded = self.core.state.time;
    }

    /// Runs until `budget` ticks have passed, at least one an instruction, or something stops
    /// it. The last instruction may take it beyond.
    pub fn run(&mut self, budget: u64) -> VmExit {
        self.begin(budget);
        let stop = loop {
            if let Some(stop) = self.step() {
                break stop;
            }
        };
        self.core.stops_at(stop);
        self.end();
        stop
    }

    /// What only the loop needs is not left in the state: it depends on budgets.
    fn end(&mut self) {
        self.core.state.time = self.core.now();
        self.core.block_rip(0);
    }

    /// Something until all has to be looked at again.
    fn step(&mut self) -> Option<VmExit> {
        if self.core.halted {
            self.core.halted = false;
            return Some(VmExit::Halted);
        }
        if std::mem::take(&mut self.core.paused) {
            return Some(VmExit::Paused);
        }
        let window = std::mem::take(&mut self.core.look_at_once)
            || self.wants_window && self.can_interrupt()
            || self.wants_nmi && self.can_nmi();
        if window {
            return Some(VmExit::Window);
        }
        if self.core.left <= 0 {
            return Some(VmExit::Budget);
        }
        if self.looks.is_place(self.core.state.rip) && self.core.state.ring() == Ring::Kernel {
            self.looks.tell(Event::Reached, &self.core);
        }
        self.drop_written();
        if std::mem::take(&mut self.core.flushed) {
            self.blocks.flush();
        }
        if is_special(&self.core) {
            return self.single(false);
        }
        self.core.stepping = Stepping::Before;
        self.core.hits = 0;
        match self.run_blocks(false) {
            Ended::Budget => Some(VmExit::Budget),
            // TF was clear, and no breakpoint on.
            Ended::Retired | Ended::Repeats => self.debug_trap(0),
            Ended::Fault => self.deliver(Delivery::Fault(self.core.fault)),
            Ended::CodeWrite => self.single(true),
            Ended::Stop => Some(self.core.stopped()),
        }
    }

    /// One instruction, with what may come before and behind it.
    fn single(&mut self, alone: bool) -> Option<VmExit> {
        if let Some(hits) = self.breakpoints() {
            self.core.state.dr6 = self.core.state.dr6 & !0xf | hits;
            return self.deliver(Delivery::Debug);
        }
        let before = self.core.state.system_flags;
        let shadow = self.core.state.shadow;
        self.core.state.shadow = Shadow::None;
        self.core.state.system_flags &= !RF;
        self.core.stepping = Stepping::Before;
        if shadow != Shadow::MovSs {
            self.core.hits = 0;
        }
        self.core.alone = alone;
        self.core.slow_paths.took(SlowPath::Alone);
        let mut ended = self.run_blocks(true);
        if ended == Ended::CodeWrite {
            self.core.rewind();
            self.core.alone = true;
            ended = self.run_blocks(true);
        }
        self.core.alone = false;
        match ended {
            Ended::Retired | Ended::Repeats => {
                self.core.settle();
                self.debug_trap(before)
            }
            Ended::Fault => {
                self.core.settle();
                self.deliver(Delivery::Fault(self.core.fault))
            }
            Ended::Budget | Ended::Stop | Ended::CodeWrite => {
                self.core.state.shadow = shadow;
                self.core.state.system_flags |= before & RF;
                Some(if ended == Ended::Stop {
                    self.core.stopped()
                } else {
                    VmExit::Budget
                })
            }
        }
    }

    /// Instruction breakpoints at RIP, as bits of DR6.
    fn breakpoints(&self) -> Option<u64> {
        let state = &self.core.state;
        let held_back = state.shadow == Shadow::MovSs;
        if state.system_flags & RF != 0 || held_back || self.core.is_half_done() {
            return None;
        }
        let linear = self.linear_rip();
        let hit = |n: usize| {
            let on = state.dr7 >> (2 * n) & 3 != 0;
            on && state.dr7 >> (16 + 4 * n) & 15 == 0 && state.dr[n] == linear
        };
        let hits: u64 = (0..4).filter(|n| hit(*n)).map(|n| 1 << n).sum();
        (hits != 0).then_some(hits)
    }

    /// #DB behind an instruction: of a step, and of data. A load of SS puts it off by one
    /// instruction. A step's is lost then, and one of data if that instruction faults: processors
    /// hold it or lose it (SDM vol. 3C, 28.7.3), and no handler wants it at its first instruction.
    fn debug_trap(&mut self, before: u64) -> Option<VmExit> {
        const SINGLE_STEP: u64 = 1 << 14;
        if self.core.state.shadow == Shadow::MovSs {
            return None;
        }
        let mut bits = self.core.hits;
        let stepped = match self.core.stepping {
            Stepping::Before => before & TF != 0,
            Stepping::Now => self.core.state.system_flags & TF != 0,
            Stepping::Never => false,
        };
        if stepped {
            bits |= SINGLE_STEP;
        }
        if bits == 0 {
            return None;
        }
        self.core.state.dr6 = self.core.state.dr6 & !0xf | bits;
        self.deliver(Delivery::Debug)
    }

    /// Delivers, with what comes of faults on the way (SDM vol. 3A, table 6-5).
    fn deliver(&mut self, delivery: Delivery) -> Option<VmExit> {
        // The handler runs, whatever waits for one.
        self.core.halted = false;
        // Nobody raises exceptions for ever without time passing.
        self.core.spend(1);
        let ring = self.core.state.ring();
        let alone = std::mem::replace(&mut self.core.alone, true);
        let mut current = delivery;
        let stop = loop {
            match deliver(&mut self.core, current) {
                Ok(()) => break None,
                Err(Trap::Fault) => match after(current, self.core.fault) {
                    Some(next) => current = next,
                    None => break Some(VmExit::Shutdown),
                },
                Err(Trap::Stop) => break Some(self.core.stopped()),
                Err(Trap::Leave | Trap::Again | Trap::CodeWrite) => break Some(VmExit::Shutdown),
            }
        };
        self.core.alone = alone;
        self.tell(ring);
        stop
    }

    /// Out of the loop's way: within it, it takes registers of what is done for each block.
    #[inline(never)]
    fn fold(&mut self, ring: Ring) {
        let now = self.core.now();
        let ticks = now.wrapping_sub(self.folded);
        if self.looks.is_on() {
            let mut done = EventTotals::default();
            events::add(&mut done, &self.core.lanes, ticks);
            self.looks.executed(ring, &done);
        }
        events::add(&mut self.totals[ring as usize], &self.core.lanes, ticks);
        self.core.lanes = [0; LANES];
        self.folded = now;
    }

    fn drop_written(&mut self) {
        let pages = self.core.code.take_written();
        if !pages.is_empty() {
            self.blocks.drop_pages(&pages);
        }
    }

    fn run_blocks(&mut self, single: bool) -> Ended {
        let ring = self.core.state.ring();
        let follows = self.looks.begins(ring);
        self.blocks.hide(follows);
        let first = self.find(single).and_then(|first| self.followed(first));
        let ended = match first {
            Ok(first) => {
                self.looks.goes_on(first, self.core.left);
                self.run_from(first, single, ring)
            }
            Err(trap) => ended(trap),
        };
        let looked_at = matches!(ended, Ended::Budget) || single && ended == Ended::Retired;
        if follows && looked_at {
            self.looks.stops(&self.blocks, &self.core, single);
        }
        self.tell(ring);
        ended
    }

    /// Some code of a ring is over, or a delivery that began in it: adds it up, and tells who looks
    /// on what came of it.
    fn tell(&mut self, ring: Ring) {
        self.fold(ring);
        if !self.looks.is_on() {
            return;
        }
        match (ring, self.core.state.ring()) {
            (Ring::User, Ring::Kernel) => {
                let event = Event::Entered(self.core.entry);
                self.looks.tell(event, &self.core);
            }
            (Ring::Kernel, Ring::User) => self.looks.tell(Event::Left, &self.core),
            _ => {}
        }
        if std::mem::take(&mut self.core.requested) && ring == Ring::User && is_request(&self.core)
        {
            self.looks.tell(Event::Requested, &self.core);
        }
    }

    /// The hot loop.
    fn run_from(&mut self, first: u32, single: bool, ring: Ring) -> Ended {
        let mut tag = self.blocks.shown_tag(self.core.state.mode());
        let mut id = first;
        let mut floor = least_left(&self.core, single);
        loop {
            let mut block = self.blocks.get(id);
            let left = self.core.left - i64::from(block.count);
            let mut part = None;
            let ops = if left >= floor {
                add(&mut self.core.lanes, &block.sum);
                self.core.state.rip = block.rip().wrapping_add(u64::from(block.len));
                self.core.left = left;
                self.blocks.quick(block)
            } else {
                if self.core.left <= 0 {
                    return Ended::Budget;
                }
                self.fold(ring);
                floor = least_left(&self.core, single);
                if left >= floor {
                    continue;
                }
                let count = self.begin_part(id, single);
                part = Some(count);
                block = self.blocks.get(id);
                self.blocks.ops(block, count)
            };
            self.core.block_rip(block.rip());
            if let Some((op, trap)) = run_ops(&mut self.core, ops) {
                let (at, count) = self.blocks.place(id, part, op);
                return self.trapped(id, count, at, trap);
            }
            if part.is_some() {
                return if single {
                    Ended::Retired
                } else {
                    Ended::Budget
                };
            }
            let rip = self.core.state.rip;
            id = match self.blocks.after(block, rip, tag) {
                Some(next) => next,
                // What comes next is not even fetched.
                None if self.core.left <= 0 => return Ended::Budget,
                None => match self.follow(id) {
                    Ok(next) => {
                        tag = self.blocks.shown_tag(self.core.state.mode());
                        next
                    }
                    Err(trap) => return ended(trap),
                },
            };
        }
    }

    /// The first operations of a block are to be run, as many as ticks are left: counts them.
    #[inline(never)]
    fn begin_part(&mut self, id: u32, single: bool) -> u32 {
        let block = self.blocks.get(id);
        let most = if single { 1 } else { self.core.left };
        let count = block.count.min(u32::try_from(most).unwrap_or(u32::MAX));
        let ops = self.blocks.ops(block, count);
        for op in ops {
            take(
                &mut self.core.lanes,
                self.blocks.vector(op),
                u16::wrapping_add,
            );
        }
        self.core.state.rip = block.rip().wrapping_add(length(ops));
        self.core.left -= i64::from(count);
        count
    }

    /// An instruction of `count` did not just retire: those behind it have not been run.
    #[cold]
    fn trapped(&mut self, id: u32, count: u32, at: usize, trap: Trap) -> Ended {
        let block = self.blocks.get(id);
        let ops = self.blocks.ops(block, count);
        let retired = if trap == Trap::Leave { at + 1 } else { at };
        for op in &ops[retired..] {
            take(
                &mut self.core.lanes,
                self.blocks.vector(op),
                u16::wrapping_sub,
            );
        }
        self.core.left += (ops.len() - retired) as i64;
        if trap != Trap::Leave || retired < ops.len() {
            self.core.state.rip = block.rip().wrapping_add(length(&ops[..retired]));
        }
        if trap == Trap::Again {
            self.core.spend(1);
            // Who comes back to it passes over the breakpoint that was met before it began
            // (SDM vol. 3B, 19.3.1.1).
            self.core.state.system_flags |= RF;
        }
        ended(trap)
    }

    fn tag(&self) -> u64 {
        self.blocks.tag(self.core.state.mode())
    }

    /// Where the next instruction is: RIP, with CS's base outside of 64-bit code.
    #[must_use]
    pub fn linear_rip(&self) -> u64 {
        let state = &self.core.state;
        if state.bits() == 64 {
            state.rip
        } else {
            state.segment(Seg::Cs).base.wrapping_add(state.rip) & 0xffff_ffff
        }
    }

    /// The block at RIP, after another one.
    #[cold]
    fn follow(&mut self, before: u32) -> Result<u32, Trap> {
        let tag = self.tag();
        let follows = self.looks.is_following();
        if follows {
            self.looks.block_over(self.blocks.get(before), &self.core);
            let rip = self.core.state.rip;
            if let Some(next) = self.blocks.known_after(before, rip, tag) {
                let next = self.followed(next)?;
                self.looks.goes_on(next, self.core.left);
                return Ok(next);
            }
        } else if self.looks.is_place(self.core.state.rip) {
            // It is told before its instruction is run.
            return Err(Trap::Leave);
        }
        let next = self.find(false)?;
        let next = self.followed(next)?;
        if self.tag() == tag {
            self.blocks.chain(before, next);
        }
        if follows {
            self.looks.goes_on(next, self.core.left);
        }
        Ok(next)
    }

    /// A block at RIP as who follows it wants it: it ends where the range does.
    fn followed(&mut self, id: u32) -> Result<u32, Trap> {
        let too_long = |cpu: &Self, id| cpu.looks.begins_beyond(&cpu.blocks, cpu.blocks.get(id));
        if !self.looks.is_following() || !too_long(self, id) {
            return Ok(id);
        }
        let key = self.blocks.get(id).key;
        let cut = match self.blocks.find(&key) {
            Some(cut) if !too_long(self, cut) => cut,
            // It stands on one page, of which it was decoded before.
            _ => self.decode(key)?,
        };
        if !self.looks.is_place(key.rip) {
            let tag = self.tag();
            self.blocks.learn(key.rip, tag, cut);
        }
        Ok(cut)
    }

    /// The block at RIP.
    fn find(&mut self, single: bool) -> Result<u32, Trap> {
        let rip = self.core.state.rip;
        if let Some(id) = self.blocks.jump(rip, self.tag()) {
            return Ok(id);
        }
        let bits = self.core.state.bits();
        let limit = u64::from(self.core.state.segment(Seg::Cs).limit);
        let outside = if bits == 64 {
            !is_canonical(rip)
        } else {
            rip > limit
        };
        if outside {
            return self.core.gp(0);
        }
        let Spot::Ram(offset) = self.fetch(self.linear_rip())? else {
            // Where nothing is, all bits are ones, which is no instruction.
            return self.core.ud();
        };
        let key = Key {
            offset,
            rip,
            bits: bits as u8,
        };
        self.core.slow_paths.took(SlowPath::Lookup);
        let found = match self.blocks.find(&key) {
            Some(id) if self.still_there(id)? => id,
            _ => self.decode(key)?,
        };
        let found = if self.core.code.is_written() {
            // Its page holds a page table too, which the fetch has marked.
            self.drop_written();
            self.decode(key)?
        } else {
            found
        };
        let block = self.blocks.get(found);
        if bits != 64 && limit - rip < u64::from(block.len.max(1)) - 1 {
            return self.at_the_limit(found, single);
        }
        // Who comes to a place has to look for it each time.
        if block.second != Some(NOWHERE) && !self.looks.is_place(rip) {
            let tag = self.tag();
            self.blocks.learn(rip, tag, found);
        }
        Ok(found)
    }

    /// A block reaches over the end of CS: its instructions are executed one by one.
    fn at_the_limit(&mut self, id: u32, single: bool) -> Result<u32, Trap> {
        let block = self.blocks.get(id);
        let first = length(self.blocks.ops(block, 1));
        let limit = u64::from(self.core.state.segment(Seg::Cs).limit);
        if limit - block.rip() < first - 1 {
            return self.core.gp(0);
        }
        if single { Ok(id) } else { Err(Trap::CodeWrite) }
    }

    fn fetch(&mut self, linear: u64) -> Result<Spot, Trap> {
        let set = if self.core.state.cpl() == 3 {
            Set::UserFetch
        } else {
            Set::KernelFetch
        };
        let spot = self.core.spot(set, linear);
        // Whoever takes a known jump does not fetch. When tables are walked must not depend on
        // which jumps are known: those to a page go when its translation does.
        if let Some(page) = self.core.forgotten.take() {
            match self.linear_rip().wrapping_sub(self.core.state.rip) {
                0 => self.blocks.forget_jumps(page),
                _ => self.blocks.flush(),
            }
        }
        spot
    }

    /// Whether a block that reaches into another page still does into the same.
    fn still_there(&mut self, id: u32) -> Result<bool, Trap> {
        let Some(second) = self.blocks.get(id).second else {
            return Ok(true);
        };
        Ok(self.fetch_next()? == Spot::Ram(second))
    }

    /// The page behind the one of RIP, which an instruction reaches into.
    fn fetch_next(&mut self) -> Result<Spot, Trap> {
        let next = (self.linear_rip() | 0xfff).wrapping_add(1);
        match self.core.state.bits() {
            64 if !is_canonical(next) => self.core.gp(0),
            64 => self.fetch(next),
            _ => self.fetch(next & 0xffff_ffff),
        }
    }

    fn decode(&mut self, key: Key) -> Result<u32, Trap> {
        self.core.slow_paths.took(SlowPath::Decode);
        if self.blocks.is_full(self.core.kept.len()) {
            self.forget_code();
        }
        let mut bytes = [0; WINDOW];
        let room = ((4096 - (key.offset & 0xfff)) as usize).min(WINDOW);
        self.core.ram.bytes_at(key.offset, &mut bytes[..room]);
        let mut second = None;
        let mut len = room;
        let decoded = loop {
            let source = Source {
                bytes: &bytes[..len],
                rip: key.rip,
                bits: u32::from(key.bits),
            };
            let Core { cpuid, kept, .. } = &mut self.core;
            match decode::block(source, cpuid, &mut self.blocks, kept, &mut self.factory) {
                Ok(decoded) => break decoded,
                Err(Short::NextPage) => {
                    let spot = self.fetch_next()?;
                    // One instruction: what comes behind begins on the other page.
                    let rest = &mut bytes[room..room + 15];
                    match spot {
                        Spot::Ram(offset) => {
                            self.core.ram.bytes_at(offset, rest);
                            second = Some(offset);
                        }
                        Spot::Device(_) => {
                            rest.fill(0xff);
                            second = Some(NOWHERE);
                        }
                    }
                    len = room + 15;
                }
            }
        };
        Ok(self.keep(key, decoded, second, room))
    }

    fn keep(&mut self, key: Key, mut decoded: Decoded, second: Option<u64>, room: usize) -> u32 {
        if second.is_some() {
            let crossing = decoded.ops.first().map_or(0, |op| u32::from(op.len));
            decoded.cut(crossing.into());
            if crossing as usize > room {
                decoded.second = second;
            }
        }
        if let Some(bytes) = self.looks.bytes_within(key.rip, decoded.len.into()) {
            decoded.cut(bytes);
        }
        for page in decoded.pages(key) {
            if self.core.code.set((page >> 12) as u32) {
                self.core.tlb.protect(page & !0xfff);
            }
        }
        self.blocks.add(key, decoded)
    }
}

/// Runs operations until one does not just retire. Where that is nobody counts on the way.
#[inline(always)]
fn run_ops<'a>(core: &mut Core, ops: &'a [Op]) -> Option<(&'a Op, Trap)> {
    for op in ops {
        if let Err(trap) = execute(core, op) {
            return Some((op, trap));
        }
    }
    None
}

#[inline(always)]
fn add(lanes: &mut [u16; LANES], sum: &[u16; LANES]) {
    // All are read before one is written: with what might overlap each would be added by itself.
    *lanes = std::array::from_fn(|lane| lanes[lane].wrapping_add(sum[lane]));
}

fn take(lanes: &mut [u16; LANES], vector: [u8; LANES], change: fn(u16, u16) -> u16) {
    for (lane, count) in lanes.iter_mut().zip(vector) {
        *lane = change(*lane, u16::from(count));
    }
}

fn length(ops: &[Op]) -> u64 {
    ops.iter().map(|op| u64::from(op.len)).sum()
}

fn ended(trap: Trap) -> Ended {
    match trap {
        Trap::Leave => Ended::Retired,
        Trap::Again => Ended::Repeats,
        Trap::Fault => Ended::Fault,
        Trap::CodeWrite => Ended::CodeWrite,
        Trap::Stop => Ended::Stop,
    }
}

/// What is delivered when `second` was raised while `first` was; `None` is a triple fault.
fn after(first: Delivery, second: Fault) -> Option<Delivery> {
    const DOUBLE: u8 = 8;
    const PAGE: u8 = 14;
    let contributory = |vector: u8| matches!(vector, 0 | 10..=13);
    let Delivery::Fault(first) = first else {
        return Some(Delivery::Fault(second));
    };
    let serious = contributory(second.vector) || second.vector == PAGE;
    let double = match first.vector {
        DOUBLE if serious => return None,
        PAGE => serious,
        vector if contributory(vector) => contributory(second.vector),
        _ => false,
    };
    let next = if double {
        Fault {
            vector: DOUBLE,
            code: Some(0),
            // A page fault has set CR2, whatever comes of it.
            cr2: second.cr2,
        }
    } else {
        second
    };
    Some(Delivery::Fault(next))
}

/// The ticks that have to be left behind a block that is run as a whole: of one instruction
/// alone, more than there are.
fn least_left(core: &Core, single: bool) -> i64 {
    if single {
        i64::MAX
    } else {
        core.left.saturating_sub(FOLD).max(0)
    }
}

/// The next instruction is not one of many.
fn is_special(core: &Core) -> bool {
    const BREAKPOINTS: u64 = 0xff;
    let state = &core.state;
    state.system_flags & (TF | RF) != 0
        || state.shadow != Shadow::None
        || state.dr7 & BREAKPOINTS != 0
        || core.is_half_done()
}
