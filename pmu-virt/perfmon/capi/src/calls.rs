//! The commands.

use std::iter;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd};
use std::sync::atomic::Ordering::SeqCst;

use perfmon_abi::consts::{
    PFM_CREATE_CONTEXT, PFM_FL_OVFL_NO_MSG, PFM_FL_SYSTEM_WIDE, PFM_GETINFO_FMTS, PFM_LOAD_CONTEXT,
    PFM_RESTART, PFM_START, PFM_TRY_LOAD,
};
use perfmon_abi::wire::info::FormatInfo;
use perfmon_abi::wire::{Call, Errno, Extension, MAX_PAYLOAD, NO_CONTEXT};
use perfmon_abi::{CtxArg, FmtInfo, LoadArg, Record};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::thread::{CpuSet, gettid, sched_getaffinity};
use umpire_perfmon::c_calls;
use umpire_perfmon::link::Question;
use umpire_perfmon::threads::in_its_own_space;

use crate::failure::{Failure, accepted, failure, malformed};
use crate::reading;
use crate::state::{STATE, State, no_context};
use crate::sys::borrow;
use crate::sys::memory::User;
use crate::table::Slot;

/// A command of a program's, as far as it can be checked without the VM.
#[derive(Clone, Copy, Debug)]
struct Command {
    number: u16,
    argument: User,
    /// Elements of the argument.
    nargs: i32,
    /// Bytes of the argument.
    length: usize,
}

impl Command {
    fn check(number: i32, argument: User, nargs: i32) -> Result<Self, Failure> {
        let none = || failure(Errno::EINVAL, "there is no such command");
        let number = u16::try_from(number).map_err(|_| none())?;
        let length = Call::argument_bytes(number, nargs, MAX_PAYLOAD)?;
        if number == PFM_START && nargs == 0 && !argument.is_null() {
            let reason = "with an argument, the number of elements is 1";
            return Err(failure(Errno::EFAULT, reason));
        }
        Ok(Command {
            number,
            argument,
            nargs,
            length,
        })
    }

    /// The same for a context; the argument lies in the packet.
    fn question(&self, context: u32) -> Question<'static> {
        Question {
            context,
            nargs: self.nargs,
            length: self.length,
            ..Question::plain(self.number)
        }
    }
}

/// Does a command. The argument's elements come back as it left them.
pub(crate) fn command(fd: i32, number: i32, argument: User, nargs: i32) -> Result<(), Failure> {
    if number == i32::from(PFM_GETINFO_FMTS) {
        return STATE.with(|state| formats(state, argument, nargs));
    }
    let checked = Command::check(number, argument, nargs);
    STATE.with(|state| match checked {
        // Where nobody serves the interface there are no commands (ENOSYS), and
        // so no mistakes in them.
        Err(failure) => state.ensure_link().and(Err(failure)),
        Ok(command) if command.number == PFM_CREATE_CONTEXT => create(state, argument),
        Ok(command) if !Call::needs_context(command.number) => {
            state.ensure_link()?;
            exchange(state, NO_CONTEXT, &command)
        }
        Ok(command) => {
            let Some(open) = borrow(fd) else {
                return state.ensure_link().and(Err(no_context()));
            };
            let done = on_context(state, open, &command);
            done.or_else(|failure| after_the_end(state, open, &command, failure))
        }
    })
}

/// Answers a command that nobody does any more from what the context's VM has left as it
/// ended; else its failure stays.
fn after_the_end(
    state: &mut State,
    open: BorrowedFd<'_>,
    command: &Command,
    before: Failure,
) -> Result<(), Failure> {
    if !Errno::from_number(before.number).is_some_and(umpire_perfmon::is_of_the_end) {
        return Err(before);
    }
    let Some((left, packet)) = state.last_counts(open) else {
        return Err(before);
    };
    let vector = &mut packet[..command.length];
    read(command.argument, vector)?;
    let done = left.answer(command.number, vector);
    write(command.argument, 0, vector)?;
    done.map_err(Failure::from)?;
    c_calls::forget();
    Ok(())
}

fn on_context(state: &mut State, open: BorrowedFd<'_>, command: &Command) -> Result<(), Failure> {
    let (slot, handle) = state.context(open)?;
    match command.number {
        PFM_LOAD_CONTEXT | PFM_TRY_LOAD => {
            let is_blocking = !fcntl_getfl(open)?.contains(OFlags::NONBLOCK);
            let number = if is_blocking {
                command.number
            } else {
                PFM_TRY_LOAD
            };
            let mut bytes = [0; LoadArg::SIZE];
            read(command.argument, &mut bytes)?;
            let mut load = LoadArg::get(&bytes);
            load.pid = match slot.flags.load(SeqCst) & PFM_FL_SYSTEM_WIDE {
                0 => of_vmm(state, load.pid),
                _ => core(state, load.pid)?,
            };
            load.put(state.argument(LoadArg::SIZE));
            let command = Command { number, ..*command };
            accepted(&state.exchange(command.question(handle))?.reply)?;
            // The new generation tells which messages are stale. The context is
            // loaded, whatever becomes of this question: a reader learns the
            // generation from the first new message as well.
            if let Ok((slot, _)) = state.bind(open) {
                reading::drain(open, slot);
            }
            Ok(())
        }
        PFM_RESTART if slot.flags.load(SeqCst) & PFM_FL_OVFL_NO_MSG != 0 => {
            // Before, for the next overflow may come at once.
            reading::take_empty(open, slot);
            exchange(state, handle, command)
        }
        _ => exchange(state, handle, command),
    }
}

/// A thread of the VMM's by the VMM's own number, if it is one; else the number as it is,
/// which a vCPU or core has.
fn of_vmm(state: &State, pid: i32) -> i32 {
    let thread = state.vmm().and_then(|vmm| in_its_own_space(vmm, pid));
    thread.unwrap_or(pid)
}

/// The core that a system-wide context is for: a number as it is, or, as the
/// specification has it, the caller's thread, which runs on one CPU alone.
fn core(state: &mut State, pid: i32) -> Result<i32, Failure> {
    if pid != gettid().as_raw_nonzero().get() {
        return Ok(of_vmm(state, pid));
    }
    let allowed = sched_getaffinity(None)?;
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
    let (Some(cpu), None) = (cpus.next(), cpus.next()) else {
        return Err(failure(
            Errno::EINVAL,
            "the calling thread may run on more than one CPU: its affinity says which core is meant",
        ));
    };
    let known = state.core_cpus()?;
    let mut here = (0..)
        .zip(known)
        .filter(|&(_, &at)| Ok(at) == cpu.try_into());
    match (here.next(), here.next()) {
        // Cores that move have nothing to do with a CPU: its number is the core's.
        _ if known.is_empty() => Ok(i32::try_from(cpu).unwrap_or(i32::MAX)),
        (Some((core, _)), None) => Ok(core),
        (None, _) => Err(failure(
            Errno::EINVAL,
            "no core of the VM is on the calling thread's CPU: umpire run --pin says where they \
             are, and load_pid takes a core's number as well",
        )),
        (Some(_), Some(_)) => Err(failure(
            Errno::EINVAL,
            "several cores of the VM are on the calling thread's CPU: give load_pid the number of \
             one",
        )),
    }
}

fn read(from: User, to: &mut [u8]) -> Result<(), Failure> {
    from.read(0, to)
        .map_err(|_| failure(Errno::EFAULT, "the argument's address is not valid"))
}

fn write(to: User, offset: usize, from: &[u8]) -> Result<(), Failure> {
    to.write(offset, from)
        .map_err(|_| failure(Errno::EFAULT, "the argument cannot be written to"))
}

/// A command whose argument goes and comes back as it is, also with an error.
fn exchange(state: &mut State, handle: u32, command: &Command) -> Result<(), Failure> {
    read(command.argument, state.argument(command.length))?;
    let reply = state.exchange(command.question(handle))?.reply;
    if !reply.payload.is_empty() && reply.payload.len() != command.length {
        return Err(malformed());
    }
    write(command.argument, 0, reply.payload)?;
    accepted(&reply)
}

/// After `fcntl` has changed who is signalled for a context, or how (3.3.7).
pub(crate) fn signals_changed(open: BorrowedFd<'_>, slot: &Slot) {
    if slot.flags.load(SeqCst) & PFM_FL_OVFL_NO_MSG == 0 {
        return;
    }
    STATE.with(|state| {
        if let Ok((_, handle)) = state.context(open) {
            state.follow_bell(open, handle);
        }
    });
}

/// Creates a context. Its descriptor survives exec, as the specification wants
/// it (3.1.1).
fn create(state: &mut State, argument: User) -> Result<(), Failure> {
    let mut wanted = [0; CtxArg::SIZE];
    read(argument, &mut wanted)?;
    let wanted = CtxArg::get(&wanted);
    state.ensure_link()?;
    let format = match wanted.format {
        none if none == [0; 16] => 0,
        uuid => state.format_argument(uuid)?,
    };
    if wanted.flags & PFM_FL_SYSTEM_WIDE != 0 {
        // A load may come in a signal handler, which must not allocate.
        state.core_cpus()?;
    }
    let length = CtxArg::SIZE + format;
    if length > MAX_PAYLOAD {
        return Err(failure(
            Errno::E2BIG,
            "the sampling format's argument is too big",
        ));
    }
    read(argument, state.argument(length))?;
    let answer = state.exchange(Question {
        nargs: 1,
        length,
        ..Question::plain(PFM_CREATE_CONTEXT)
    })?;
    accepted(&answer.reply)?;
    let (handle, [fd, _]) = (answer.reply.context, answer.descriptors);
    let mut made = CtxArg::from_bytes(answer.reply.payload).map_err(|_| malformed())?;
    let mut fd = fd.ok_or_else(malformed)?;
    if wanted.flags & PFM_FL_OVFL_NO_MSG != 0 {
        state.hang_bell(&mut fd, handle)?;
    }
    fcntl_setfd(&fd, FdFlags::empty())?;
    made.flags = wanted.flags;
    made.fd = fd.as_raw_fd();
    let slot = state.register(fd.as_fd(), handle)?;
    slot.flags.store(made.flags, SeqCst);
    slot.buffer_size.store(made.buffer_size, SeqCst);
    write(argument, 0, &made.to_bytes())?;
    let _ = fd.into_raw_fd();
    Ok(())
}

/// The sampling formats, into `nargs` elements.
fn formats(state: &mut State, argument: User, nargs: i32) -> Result<(), Failure> {
    state.ensure_link()?;
    let room = usize::try_from(nargs).ok().filter(|&room| room > 0);
    let room = room.ok_or_else(|| failure(Errno::EFAULT, "there is no element"))?;
    let formats: Vec<FormatInfo> = state.document(Extension::Formats)?;
    let told = formats.iter().map(format_info);
    for (index, info) in told
        .chain(iter::repeat(FmtInfo::default()))
        .take(room)
        .enumerate()
    {
        write(argument, index * FmtInfo::SIZE, &info.to_bytes())?;
    }
    if formats.len() > room {
        let reason = "there are more sampling formats than elements; give more elements";
        return Err(failure(Errno::E2BIG, reason));
    }
    Ok(())
}

fn format_info(format: &FormatInfo) -> FmtInfo {
    let mut info = FmtInfo {
        uuid: format.uuid_bytes().unwrap_or_default(),
        flags: format.flags,
        queue_depth: format.queue_depth,
        arg_size: format.arg_size,
        ..FmtInfo::default()
    };
    // The last byte stays 0.
    let room = info.name.len() - 1;
    info.name
        .iter_mut()
        .zip(format.name.bytes().take(room))
        .for_each(|(to, from)| *to = from);
    info
}
