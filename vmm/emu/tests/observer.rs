//! Who looks on is told of what happens, where it happens, and changes nothing.

use std::sync::{Arc, Mutex};

use emu::{Entry, Event, EventClass, EventTotals, Follow, Observer, Ring, Sight, VmExit};
use iced_x86::IcedError;
use iced_x86::code_asm::{CodeAssembler, rax, rbx, rcx, rdi, rdx};

use crate::guest::{Guest, PAGES, PRESENT, SYSTEM, USER, WRITABLE};

/// Where user code and its stack are.
pub(crate) const CODE: u64 = 0x40_0000;
const STACK: u64 = 0x50_0000;
/// The entry of system calls.
const LSTAR: u64 = SYSTEM + PAGES + 0x8000;

/// What was told: the event, RIP, RSP, and instructions of user code up to there.
pub(crate) type Told = (Event, u64, u64, u64);

/// Follows user code, and writes down what it is told.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    told: Arc<Mutex<Vec<Told>>>,
    user: u64,
    follow: Follow,
    /// What is followed when RIP is there: start and bytes.
    ranges: Vec<(u64, u64)>,
}

impl Recorder {
    /// Everything is followed: each block's end is told of.
    pub(crate) fn of_all() -> (Box<dyn Observer>, Arc<Mutex<Vec<Told>>>) {
        Self::within(0, 0)
    }

    fn within(start: u64, len: u64) -> (Box<dyn Observer>, Arc<Mutex<Vec<Told>>>) {
        Self::among(vec![(start, len)])
    }

    /// The first range is followed first, and from each event on the one of them that has RIP.
    fn among(ranges: Vec<(u64, u64)>) -> (Box<dyn Observer>, Arc<Mutex<Vec<Told>>>) {
        let (start, len) = ranges[0];
        let recorder = Recorder {
            follow: Follow {
                on: true,
                start,
                len,
            },
            ranges,
            ..Recorder::default()
        };
        let told = recorder.told.clone();
        (Box::new(recorder), told)
    }
}

impl Observer for Recorder {
    fn executed(&mut self, ring: Ring, done: &EventTotals) {
        if ring == Ring::User {
            self.user += done.of(EventClass::Instructions);
        }
    }

    fn event(&mut self, event: Event, sight: &Sight<'_>) {
        let state = sight.state();
        let user = match event {
            Event::Called { .. } | Event::Returned | Event::Moved => self.user + sight.untold(),
            _ => self.user,
        };
        let told = (event, state.rip, state.r[4], user);
        let within = |range: &&(u64, u64)| state.rip.wrapping_sub(range.0) < range.1;
        if let Some((start, len)) = self.ranges.iter().find(within) {
            (self.follow.start, self.follow.len) = (*start, *len);
        }
        self.told.lock().expect("nobody panics").push(told);
    }

    fn follow(&self) -> Follow {
        self.follow
    }
}

/// A guest with this user code, and with a system call that returns at once.
fn guest(write: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> Guest {
    let mut guest = Guest::new();
    for page in (0..0x4000).step_by(4096) {
        guest.map(CODE + page, PAGES + page, PRESENT | WRITABLE | USER);
        guest.map(
            STACK + page,
            PAGES + 0x4000 + page,
            PRESENT | WRITABLE | USER,
        );
    }
    let mut code = CodeAssembler::new(64).expect("an assembler");
    write(&mut code).expect("code");
    guest.bytes(PAGES, &code.assemble(CODE).expect("code"));
    // NOP; SYSRETQ.
    guest.bytes(PAGES + 0x8000, &[0x90, 0x48, 0x0f, 0x07]);
    let mut state = guest.state(3);
    state.r[4] = STACK + 0x3000;
    state.rip = CODE;
    state.msrs.lstar = LSTAR;
    state.msrs.star = 0x23 << 48 | 0x10 << 32;
    state.msrs.sfmask = 0x200;
    guest.cpu.set_state(state);
    guest
}

/// Runs to a HLT that faults, in pieces of `budget`.
fn told(mut guest: Guest, observer: Box<dyn Observer>, budget: u64) -> Guest {
    guest.cpu.observe(Some(observer));
    for _ in 0..10_000 {
        match guest.cpu.run(budget) {
            VmExit::Budget => {}
            VmExit::Halted => return guest,
            other => panic!("{other:?}"),
        }
    }
    panic!("it goes on");
}

fn program(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut function = a.create_label();
    let mut behind = a.create_label();
    let mut again = a.create_label();
    a.mov(rcx, 3u64)?;
    a.set_label(&mut again)?;
    a.dec(rcx)?;
    a.jne(again)?;
    a.call(function)?;
    a.syscall()?;
    a.jmp(behind)?;
    // From 64 on is other code.
    a.nops_with_size(64 - 24)?;
    a.set_label(&mut function)?;
    a.nop()?;
    a.ret()?;
    a.set_label(&mut behind)?;
    a.nop()?;
    a.hlt()
}

#[test]
fn calls_and_rings_are_told_of_at_the_very_instruction() {
    const TOP: u64 = STACK + 0x3000;
    for budget in [u64::MAX, 1, 2, 3, 5] {
        let (observer, list) = Recorder::within(CODE, 64);
        told(guest(program), observer, budget);
        let list = list.lock().expect("nobody panics").clone();
        let places: Vec<(Event, u64, u64)> = list
            .iter()
            .map(|(event, _, rsp, user)| (*event, *rsp, *user))
            .collect();
        // MOV of 10 bytes, DEC and JNE of 5, CALL of 5.
        let next = CODE + 20;
        let expected = [
            (Event::Called { next }, TOP - 8, 8),
            (Event::Returned, TOP, 10),
            (Event::Entered(Entry::SystemCall), TOP, 11),
            (Event::Left, TOP, 11),
            (Event::Moved, TOP, 12),
        ];
        assert_eq!(places[..5], expected, "pieces of {budget}");
        let (event, ..) = places[5];
        // HLT is the kernel's.
        assert_eq!(event, Event::Entered(Entry::Exception(13)));
        assert_eq!(list.len(), 6, "{list:?}");
    }
}

fn two_functions(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut first = a.create_label();
    let mut second = a.create_label();
    a.set_label(&mut first)?;
    a.mov(rcx, 3u64)?;
    // MOV of 10 bytes is all of the first one.
    a.set_label(&mut second)?;
    a.dec(rcx)?;
    a.jne(second)?;
    a.dec(rbx)?;
    a.jne(first)?;
    a.hlt()
}

/// Code that runs on into another function belongs to that from its first instruction on.
#[test]
fn who_runs_over_the_end_of_the_range_is_told_of_there() {
    for budget in [u64::MAX, 1, 2, 3, 5] {
        let mut guest = guest(two_functions);
        let mut state = guest.cpu.state().clone();
        state.r[3] = 2;
        // All of it is decoded already, and known as what follows what.
        guest.cpu.set_state(state.clone());
        while guest.cpu.run(u64::MAX) != VmExit::Halted {}
        guest.cpu.take_totals(Ring::User);
        guest.cpu.set_state(state);
        let (observer, list) = Recorder::among(vec![(CODE, 10), (CODE + 10, 100)]);
        told(guest, observer, budget);
        let list = list.lock().expect("nobody panics").clone();
        let told: Vec<(Event, u64, u64)> = list
            .iter()
            .map(|(event, rip, _, user)| (*event, *rip, *user))
            .collect();
        let expected = [
            (Event::Moved, CODE + 10, 1),
            (Event::Moved, CODE, 9),
            (Event::Moved, CODE + 10, 10),
        ];
        assert_eq!(told[..3], expected, "pieces of {budget}");
        let (event, _, user) = told[3];
        assert_eq!((event, user), (Event::Entered(Entry::Exception(13)), 18));
    }
}

#[test]
fn the_kernel_is_met_where_it_is_waited_for() {
    for (budget, at) in [
        (u64::MAX, LSTAR),
        (1, LSTAR),
        (u64::MAX, LSTAR + 1),
        (2, LSTAR + 1),
    ] {
        let (observer, list) = Recorder::within(0, u64::MAX);
        let mut guest = guest(program);
        guest.cpu.watch(vec![at, 0xffff_8000_dead_0000]);
        told(guest, observer, budget);
        let list = list.lock().expect("nobody panics").clone();
        let met: Vec<u64> = list
            .iter()
            .filter(|(event, ..)| *event == Event::Reached)
            .map(|(_, rip, ..)| *rip)
            .collect();
        assert_eq!(met, [at], "pieces of {budget}");
    }
}

fn request(a: &mut CodeAssembler) -> Result<(), IcedError> {
    for by in [3u32, 13, 61, 51] {
        a.rol(rdi, by)?;
    }
    a.xchg(rbx, rbx)
}

#[test]
fn a_request_to_valgrind_is_one_with_all_before_it() {
    // The second one goes over the end of a page.
    let before = 4096 - 32;
    let write = |a: &mut CodeAssembler| {
        a.mov(rax, 0x1001u64)?;
        request(a)?;
        a.xchg(rbx, rbx)?;
        let mut on = a.create_label();
        a.jmp(on)?;
        // MOV, the request and XCHG have 29 bytes, JMP five.
        for _ in 0..before - 34 + 20 {
            a.nop()?;
        }
        a.set_label(&mut on)?;
        request(a)?;
        a.mov(rdx, rdi)?;
        a.hlt()
    };
    for budget in [u64::MAX, 1] {
        let (observer, list) = Recorder::within(0, u64::MAX);
        let guest = told(guest(write), observer, budget);
        let list = list.lock().expect("nobody panics").clone();
        let asked: Vec<u64> = list
            .iter()
            .filter(|(event, ..)| *event == Event::Requested)
            .map(|(_, _, _, user)| *user)
            .collect();
        // It counts the five instructions; XCHG alone asks nothing.
        assert_eq!(asked, [6, 13], "pieces of {budget}");
        assert_eq!(guest.cpu.state().r[2], 0, "RDX is as it was");
    }
}
