//! Who looks on while a processor runs, and what it is told. Nothing of the guest depends on it.

use std::any::Any;
use std::fmt::Debug;

use pmu_model::{EventClass, EventTotals, Ring};

use crate::block::{Block, Blocks, Flow};
use crate::entry::Entry;
use crate::events;
use crate::insn::Core;
use crate::paging::walk;
use crate::state::State;
use crate::sys::ram::Ram;
use crate::tlb::Set;

/// The instructions before `xchg rbx, rbx` by which programs ask Valgrind for something: `rol rdi`
/// by 3, 13, 61 and 51, which together do nothing (`valgrind.h`, "AMD64").
const PREAMBLE: [u8; 16] = [
    0x48, 0xc1, 0xc7, 0x03, 0x48, 0xc1, 0xc7, 0x0d, 0x48, 0xc1, 0xc7, 0x3d, 0x48, 0xc1, 0xc7, 0x33,
];
/// `xchg rbx, rbx`.
const REQUEST: [u8; 3] = [0x48, 0x87, 0xdb];

/// What an observer is told of. All that was executed before has been told by then
/// ([`Observer::executed`]), but for what [`Sight::untold`] says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// User code has entered the kernel: its first instruction there is the next one.
    Entered(Entry),
    /// The kernel has left for user code, whose instruction is the next one.
    Left,
    /// The kernel is at one of the places that were asked for, whose instruction is the next one.
    /// It may be told twice, where that instruction faults and is executed again.
    Reached,
    /// User code that is followed has called; the call returns to `next`.
    Called {
        /// Behind the call.
        next: u64,
    },
    /// User code that is followed has returned.
    Returned,
    /// User code that is followed is outside of what [`Follow`] said, and has neither called nor
    /// returned.
    Moved,
    /// User code has asked Valgrind for something: RAX has the address of the request's six
    /// words, RDX what it is answered without Valgrind.
    Requested,
}

/// What is to be told of user code from now on. Code that runs on over the end of the range is
/// told of there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Follow {
    /// Calls, returns, and jumps out of the range below are told.
    pub on: bool,
    /// Of the range.
    pub start: u64,
    /// Its bytes.
    pub len: u64,
}

/// Looks on. What it does changes nothing for the guest.
pub trait Observer: Any + Debug + Send {
    /// From now on it is told of this processor of the machine.
    fn comes_to(&mut self, processor: usize) {
        let _ = processor;
    }

    /// `done` was executed in `ring` since this was told last.
    fn executed(&mut self, ring: Ring, done: &EventTotals);

    /// Something has happened.
    fn event(&mut self, event: Event, sight: &Sight<'_>);

    /// What it wants to be told of the user code that runs: asked for after each event.
    fn follow(&self) -> Follow {
        Follow::default()
    }
}

/// A processor between two instructions.
#[derive(Debug, Clone, Copy)]
pub struct Sight<'a>(&'a Core);

impl Sight<'_> {
    /// The registers, but for the time.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.0.state
    }

    /// The memory.
    #[must_use]
    pub fn ram(&self) -> &Ram {
        &self.0.ram
    }

    /// Instructions of this ring that were executed and not told of yet: while user code is
    /// followed these are told later.
    #[must_use]
    pub fn untold(&self) -> u64 {
        self.0.lanes[EventClass::Instructions as usize].into()
    }

    /// All that these did.
    #[must_use]
    pub fn untold_events(&self) -> EventTotals {
        let mut totals = EventTotals::default();
        events::add(&mut totals, &self.0.lanes, 0);
        totals
    }

    /// Fills `to` from a linear address, whoever may get at it; false where some of it is not
    /// RAM. It sets no A.
    #[must_use]
    pub fn read(&self, linear: u64, to: &mut [u8]) -> bool {
        // Nothing that is mapped is closed to the kernel under AC.
        self.read_by(Set::OpenRead, linear, to)
    }

    /// The same, of what user code may read.
    #[must_use]
    pub fn read_as_user(&self, linear: u64, to: &mut [u8]) -> bool {
        self.read_by(Set::UserRead, linear, to)
    }

    fn read_by(&self, set: Set, linear: u64, to: &mut [u8]) -> bool {
        let mut at = linear;
        let mut rest = to;
        while !rest.is_empty() {
            let room = 4096 - (at & 0xfff);
            let len = usize::try_from(room).unwrap_or(0).min(rest.len());
            let Ok(mapped) = walk(&self.0.ram, &self.0.rules, at, set) else {
                return false;
            };
            let Some(offset) = self.0.ram.offset_of(mapped.physical) else {
                return false;
            };
            let (part, after) = rest.split_at_mut(len);
            self.0.ram.bytes_at(offset, part);
            rest = after;
            at = at.wrapping_add(len as u64);
        }
        true
    }
}

/// The observer of a processor, and what it wants to know.
#[derive(Debug, Default)]
pub(crate) struct Looks {
    observer: Option<Box<dyn Observer>>,
    /// Where the kernel is waited for, in ascending order.
    places: Vec<u64>,
    follow: Follow,
    /// User code runs and is followed.
    following: bool,
    /// Of that the block which is run, and the ticks that were left when it began.
    last: (u32, i64),
}

impl Looks {
    /// Puts an observer in the place of another.
    pub(crate) fn swap(&mut self, by: Option<Box<dyn Observer>>) -> Option<Box<dyn Observer>> {
        self.follow = by.as_ref().map(|by| by.follow()).unwrap_or_default();
        std::mem::replace(&mut self.observer, by)
    }

    pub(crate) fn set_places(&mut self, mut places: Vec<u64>) {
        places.sort_unstable();
        self.places = places;
    }

    pub(crate) fn is_on(&self) -> bool {
        self.observer.is_some()
    }

    /// Whether the kernel is waited for at `rip`.
    #[inline]
    pub(crate) fn is_place(&self, rip: u64) -> bool {
        !self.places.is_empty() && self.places.binary_search(&rip).is_ok()
    }

    /// How many of so many bytes of code lie before the first place behind `rip`, and in the
    /// range that is followed, if they do not all.
    pub(crate) fn bytes_within(&self, rip: u64, len: u64) -> Option<u64> {
        let behind = self.places.partition_point(|place| *place <= rip);
        let place = self.places.get(behind).map(|place| *place - rip);
        let bytes = place.into_iter().chain(self.bytes_followed(rip)).min()?;
        (bytes < len).then_some(bytes)
    }

    /// Whether instructions of a block begin where it should have ended.
    pub(crate) fn begins_beyond(&self, blocks: &Blocks, block: &Block) -> bool {
        let most = self.bytes_within(block.rip(), block.len.into());
        most.is_some_and(|bytes| {
            let ops = blocks.ops(block, block.count);
            let last = ops.last().map_or(0, |op| u32::from(op.len));
            block.count > 1 && bytes <= u64::from(block.len - last)
        })
    }

    /// Bytes from `rip` to the end of the range that is followed.
    fn bytes_followed(&self, rip: u64) -> Option<u64> {
        let Follow { start, len, .. } = self.follow;
        let before = rip.wrapping_sub(start);
        (self.following && before < len).then(|| len - before)
    }

    pub(crate) fn executed(&mut self, ring: Ring, done: &EventTotals) {
        if let Some(observer) = &mut self.observer {
            observer.executed(ring, done);
        }
    }

    pub(crate) fn tell(&mut self, event: Event, core: &Core) {
        if let Some(observer) = &mut self.observer {
            observer.event(event, &Sight(core));
            self.follow = observer.follow();
        }
    }

    /// Code of a ring is about to run; whether it is followed.
    pub(crate) fn begins(&mut self, ring: Ring) -> bool {
        self.following = self.follow.on && ring == Ring::User && self.observer.is_some();
        self.following
    }

    pub(crate) fn is_following(&self) -> bool {
        self.following
    }

    /// This block is run next, and followed.
    pub(crate) fn goes_on(&mut self, block: u32, left: i64) {
        self.last = (block, left);
    }

    /// The run has ended, at the budget or behind one instruction. Its last block may be over,
    /// and nobody has looked at its end.
    pub(crate) fn stops(&mut self, blocks: &Blocks, core: &Core, single: bool) {
        let (id, left) = self.last;
        let block = blocks.get(id);
        let whole = if single {
            block.count == 1
        } else {
            left - core.left >= i64::from(block.count)
        };
        if whole && core.state.ring() == Ring::User {
            self.block_over(block, core);
        }
    }

    /// A block that is followed is over.
    pub(crate) fn block_over(&mut self, block: &Block, core: &Core) {
        let outside = core.state.rip.wrapping_sub(self.follow.start) >= self.follow.len;
        let event = match block.flow {
            Flow::Call => Event::Called {
                next: block.rip().wrapping_add(block.len.into()),
            },
            Flow::Return => Event::Returned,
            Flow::Other if outside => Event::Moved,
            Flow::Other => return,
        };
        self.tell(event, core);
    }
}

/// Whether the request of a program to Valgrind stands before RIP, whole.
pub(crate) fn is_request(core: &Core) -> bool {
    let mut bytes = [0; PREAMBLE.len() + REQUEST.len()];
    let start = core.state.rip.wrapping_sub(bytes.len() as u64);
    Sight(core).read(start, &mut bytes)
        && bytes[..PREAMBLE.len()] == PREAMBLE
        && bytes[PREAMBLE.len()..] == REQUEST
}
