//! On the processor of `emu`, at CPL 3, with page tables of its own, and with as much of Linux
//! behind SYSCALL as the programs ask for.

use std::time::Duration;

use emu::{Cpu, Cpuid, EventTotals, Ram, RamError, Ring, SlowPaths, State, VmExit};
use object::{Object, ObjectSegment};
use rustix::time::{ClockId, clock_gettime};
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::Program;

const SIZE: u64 = 16 << 20;
const TABLES: u64 = 0x1000;
/// Where SYSCALL goes: to a HLT, behind which is the system.
const SYSTEM_CALL: u64 = 0x2_0000;
const STACK: u64 = 0x10_0000;
/// Selectors of CPL 0, by which SYSCALL makes its segments without a look at any table.
const STAR: u64 = 0x10 << 32;

/// Ticks after which a program is no longer waited for: some minutes.
const PATIENCE: u64 = 100_000_000_000;

/// Linux's numbers.
const WRITE: u64 = 1;
const EXIT: u64 = 60;
const CLOCK_GETTIME: u64 = 228;

/// A program did not run.
#[derive(Debug, Error)]
pub enum GuestError {
    /// There is no memory for it.
    #[error("no memory for the guest: {0}")]
    Ram(#[from] RamError),
    /// The file has a segment elsewhere than in it.
    #[error("the guest's memory has no such place: {0}")]
    Place(#[from] GuestMemoryError),
    /// It is no such file.
    #[error("the programs' file cannot be read: {0}")]
    File(#[from] object::Error),
    /// The processor stopped.
    #[error("the processor stopped at {rip:#x}: {stop:?}")]
    Stopped {
        /// Where.
        rip: u64,
        /// Why.
        stop: VmExit,
    },
    /// It asked for a system call that there is not.
    #[error("the program asked for system call {0}")]
    Call(u64),
    /// It ended otherwise than well.
    #[error("the program ended with status {0}")]
    Status(u64),
}

/// How a program ran.
#[derive(Clone, Copy, Debug)]
pub struct GuestRun {
    /// What it found out.
    pub result: u64,
    /// What it did from its first instruction to its last.
    pub whole: EventTotals,
    /// What it did in its rounds.
    pub rounds: EventTotals,
    /// CPU time of this thread for these.
    pub time: Duration,
    /// What of all that took the slow path.
    pub slow_paths: SlowPaths,
    /// Bytes of decoded code at the end.
    pub code_bytes: usize,
}

/// Runs a program for so many rounds.
///
/// # Errors
/// Why it did not end well.
pub fn run_in_emu(image: &[u8], program: &Program, rounds: u64) -> Result<GuestRun, GuestError> {
    let mut machine = Machine::load(image, program, rounds)?;
    loop {
        let stop = machine.cpu.run(PATIENCE);
        let state = machine.cpu.state();
        if stop != VmExit::Halted || state.rip != SYSTEM_CALL + 1 {
            let rip = state.rip;
            return Err(GuestError::Stopped { rip, stop });
        }
        let done = machine.cpu.take_totals(Ring::User);
        machine.whole += done;
        machine.since += done;
        machine.cpu.take_totals(Ring::Kernel);
        if let Some(run) = machine.call()? {
            return Ok(run);
        }
    }
}

struct Machine {
    cpu: Cpu,
    /// As the program began.
    user: State,
    whole: EventTotals,
    /// Since it asked for the time.
    since: EventTotals,
    asked: Duration,
    rounds: (EventTotals, Duration),
    result: u64,
}

impl Machine {
    fn load(image: &[u8], program: &Program, rounds: u64) -> Result<Self, GuestError> {
        let ram = Ram::zeroed(SIZE)?;
        write_tables(&ram)?;
        let file = object::File::parse(image)?;
        for segment in file.segments() {
            let at = GuestAddress(segment.address());
            ram.memory().write_slice(segment.data()?, at)?;
        }
        const HLT: u8 = 0xf4;
        ram.memory().write_obj(HLT, GuestAddress(SYSTEM_CALL))?;
        let mut user = State::long_mode(TABLES, 3);
        user.rip = file.entry();
        user.r[4] = write_arguments(&ram, program, rounds)?;
        user.msrs.lstar = SYSTEM_CALL;
        user.msrs.star = STAR;
        // OSFXSR and OSXMMEXCPT.
        user.cr4 |= 3 << 9;
        let mut cpu = Cpu::new(ram, Cpuid::implemented());
        cpu.set_state(user.clone());
        Ok(Machine {
            cpu,
            user,
            whole: EventTotals::default(),
            since: EventTotals::default(),
            asked: processor_time(),
            rounds: (EventTotals::default(), Duration::ZERO),
            result: 0,
        })
    }

    /// Carries the system call out; the end if that was it.
    fn call(&mut self) -> Result<Option<GuestRun>, GuestError> {
        let r = self.cpu.state().r;
        let [number, argument, at, len] = [r[0], r[7], r[6], r[2]];
        let memory = self.cpu.ram().memory();
        let result = match number {
            WRITE => {
                self.result = memory.read_obj(GuestAddress(at))?;
                len
            }
            CLOCK_GETTIME => {
                memory.write_obj([0u64; 2], GuestAddress(at))?;
                self.cpu.written(at..at + 16);
                0
            }
            EXIT if argument == 0 => {
                let (rounds, time) = self.rounds;
                return Ok(Some(GuestRun {
                    result: self.result,
                    whole: self.whole,
                    rounds,
                    time,
                    slow_paths: self.cpu.slow_paths(),
                    code_bytes: self.cpu.code_bytes(),
                }));
            }
            EXIT => return Err(GuestError::Status(argument)),
            other => return Err(GuestError::Call(other)),
        };
        self.go_on(result);
        if number == CLOCK_GETTIME {
            let now = processor_time();
            self.rounds = (self.since, now - self.asked);
            self.since = EventTotals::default();
            self.asked = processor_time();
        }
        Ok(None)
    }

    /// Back behind the SYSCALL.
    fn go_on(&mut self, result: u64) {
        let before = self.cpu.state();
        let mut state = self.user.clone();
        state.r = before.r;
        state.r[0] = result;
        state.rip = before.r[1];
        state.set_rflags(before.r[11]);
        state.time = before.time;
        self.cpu.set_state(state);
    }
}

/// Identity, in pages of 4 KiB.
fn write_tables(ram: &Ram) -> Result<(), GuestMemoryError> {
    const USER: u64 = 7;
    let write = |at: u64, value: u64| ram.memory().write_obj(value, GuestAddress(at));
    write(TABLES, 0x2000 | USER)?;
    write(0x2000, 0x3000 | USER)?;
    for directory in 0..SIZE >> 21 {
        let table = 0x4000 + directory * 0x1000;
        write(0x3000 + 8 * directory, table | USER)?;
        for page in 0..512 {
            write(table + 8 * page, directory << 21 | page << 12 | USER)?;
        }
    }
    Ok(())
}

/// What Linux puts on a stack: argc, argv; where it is.
fn write_arguments(ram: &Ram, program: &Program, rounds: u64) -> Result<u64, GuestMemoryError> {
    let texts = format!("programs\0{}\0{rounds}\0", program.letter);
    let text = STACK - 256;
    ram.memory()
        .write_slice(texts.as_bytes(), GuestAddress(text))?;
    let stack = text - 64;
    let words = [3, text, text + 9, text + 11, 0, 0];
    for (n, word) in (0..).zip(words) {
        ram.memory()
            .write_obj::<u64>(word, GuestAddress(stack + 8 * n))?;
    }
    Ok(stack)
}

/// Of this thread: others may use the machine.
fn processor_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}
