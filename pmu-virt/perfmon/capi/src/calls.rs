//! The commands.

use std::iter;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd};
use std::sync::atomic::Ordering::SeqCst;

use perfmon_abi::consts::{
    PFM_CREATE_CONTEXT, PFM_FL_OVFL_NO_MSG, PFM_FL_SYSTEM_WIDE, PFM_GETINFO_FMTS, PFM_LOAD_CONTEXT,
    PFM_RESTART, PFM_START, PFM_TRY_LOAD,
};
use perfmon_abi::wire::info::{FormatInfo, ModelInfo};
use perfmon_abi::wire::{Call, Errno, Extension, MAX_PAYLOAD, NO_CONTEXT, Reply, Subcode};
use perfmon_abi::{CtxArg, FmtInfo, LoadArg, Record};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::thread::{CpuSet, gettid, sched_getaffinity};
use serde::de::DeserializeOwned;
use umpire_perfmon::link::{ARGUMENT, Question};
use umpire_perfmon::threads::in_its_own_space;

use crate::bell;
use crate::failure::{Failure, because, failure};
use crate::reading;
use crate::state::{STATE, State, no_context};
use crate::sys::memory::User;
use crate::sys::{borrow, last};
use crate::table::Slot;

/// Does a command. The argument's elements come back as it left them.
pub(crate) fn command(fd: i32, command: i32, argument: User, nargs: i32) -> Result<(), Failure> {
    if command == i32::from(PFM_GETINFO_FMTS) {
        return STATE.with(|state| formats(state, argument, nargs));
    }
    let checked = check(command, argument, nargs);
    STATE.with(|state| match checked {
        // Where nobody serves the interface there are no commands (ENOSYS), and
        // so no mistakes in them.
        Err(failure) => state.ensure_link().and(Err(failure)),
        Ok((PFM_CREATE_CONTEXT, _)) => create(state, argument),
        Ok((command, length)) if !Call::needs_context(command) => {
            state.ensure_link()?;
            exchange(state, NO_CONTEXT, command, argument, (nargs, length))
        }
        Ok((command, length)) => {
            let Some(open) = borrow(fd) else {
                return state.ensure_link().and(Err(no_context()));
            };
            let context = state.context(fd, open);
            let size = (nargs, length);
            let done = context.and_then(|context| {
                on_context(state, (fd, open), context, command, argument, size)
            });
            done.or_else(|failure| {
                after_the_end(state, (fd, open), command, (argument, length), failure)
            })
        }
    })
}

/// The command's number, and bytes of its argument.
fn check(command: i32, argument: User, nargs: i32) -> Result<(u16, usize), Failure> {
    let none = || failure(Errno::EINVAL, "there is no such command");
    let command = u16::try_from(command).map_err(|_| none())?;
    let length = Call::argument_bytes(command, nargs, MAX_PAYLOAD)?;
    if command == PFM_START && nargs == 0 && !argument.is_null() {
        let reason = "with an argument, the number of elements is 1";
        return Err(failure(Errno::EFAULT, reason));
    }
    Ok((command, length))
}

/// Answers a command that nobody does any more from what the context's VM has left as it
/// ended; else its failure stays.
fn after_the_end(
    state: &mut State,
    (fd, open): (i32, BorrowedFd<'_>),
    command: u16,
    (argument, length): (User, usize),
    before: Failure,
) -> Result<(), Failure> {
    if !Errno::from_number(before.number).is_some_and(umpire_perfmon::is_of_the_end) {
        return Err(before);
    }
    let Some((left, packet)) = state.last_counts(fd, open) else {
        return Err(before);
    };
    let vector = &mut packet[..length];
    read(argument, vector)?;
    let done = left.answer(command, vector);
    let written = argument.write(0, vector);
    written.map_err(|_| failure(Errno::EFAULT, "the argument cannot be written to"))?;
    done.map_err(Failure::from)?;
    last::set(Subcode::None, "");
    Ok(())
}

fn on_context(
    state: &mut State,
    (fd, open): (i32, BorrowedFd<'_>),
    (slot, handle): (&'static Slot, u32),
    command: u16,
    argument: User,
    size: (i32, usize),
) -> Result<(), Failure> {
    match command {
        PFM_LOAD_CONTEXT | PFM_TRY_LOAD => {
            let is_blocking = !fcntl_getfl(open)?.contains(OFlags::NONBLOCK);
            let command = if is_blocking { command } else { PFM_TRY_LOAD };
            let mut bytes = [0; LoadArg::SIZE];
            read(argument, &mut bytes)?;
            let mut load = LoadArg::get(&bytes);
            load.pid = match slot.flags.load(SeqCst) & PFM_FL_SYSTEM_WIDE {
                0 => of_vmm(state, load.pid),
                _ => core(state, load.pid)?,
            };
            load.put(&mut state.packet[ARGUMENT..]);
            ask(state, handle, command, size, |_| Ok(()))?;
            // The new generation tells which messages are stale. The context is
            // loaded, whatever becomes of this question: a reader learns the
            // generation from the first new message as well.
            if let Ok((slot, _)) = state.bind(fd, open) {
                reading::drain(open, slot);
            }
            Ok(())
        }
        PFM_RESTART if slot.flags.load(SeqCst) & PFM_FL_OVFL_NO_MSG != 0 => {
            // Before, for the next overflow may come at once.
            reading::take_empty(open, slot);
            exchange(state, handle, command, argument, size)
        }
        _ => exchange(state, handle, command, argument, size),
    }
}

/// A thread of the VMM's by the VMM's own number, if it is one; else the number as it is,
/// which a vCPU or core has.
fn of_vmm(state: &State, pid: i32) -> i32 {
    let server = state.link.as_ref().and_then(|link| link.server().ok());
    let thread = server
        .map(|server| server.pid.as_raw_nonzero().get())
        .and_then(|vmm| in_its_own_space(vmm, pid));
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
    let known = core_cpus(state)?;
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

/// The host CPU that each core of the VM is kept on; none if they are on none.
fn core_cpus(state: &mut State) -> Result<&[u32], Failure> {
    if state.core_cpus.is_none() {
        let model: ModelInfo = document(state, Extension::Model)?;
        state.core_cpus = Some(model.core_cpus);
    }
    Ok(state.core_cpus.as_deref().unwrap_or_default())
}

/// What the VM tells of itself. This allocates.
pub(crate) fn document<T: DeserializeOwned>(
    state: &mut State,
    what: Extension,
) -> Result<T, Failure> {
    let Some(link) = &mut state.link else {
        return Err(no_context());
    };
    let answer = link.exchange(Question::plain(what.number()), &mut state.packet)?;
    let [file, _] = answer.descriptors;
    answer.reply.result()?;
    Ok(umpire_perfmon::document(answer.reply.payload, file)?)
}

fn read(from: User, to: &mut [u8]) -> Result<(), Failure> {
    from.read(0, to)
        .map_err(|_| failure(Errno::EFAULT, "the argument's address is not valid"))
}

/// A command whose argument goes and comes back as it is.
fn exchange(
    state: &mut State,
    handle: u32,
    command: u16,
    argument: User,
    size: (i32, usize),
) -> Result<(), Failure> {
    let (_, length) = size;
    read(argument, &mut state.packet[ARGUMENT..][..length])?;
    ask(state, handle, command, size, |payload| {
        if !payload.is_empty() && payload.len() != length {
            return Err(failure(Errno::EPROTO, "the reply is malformed"));
        }
        argument
            .write(0, payload)
            .map_err(|_| failure(Errno::EFAULT, "the argument cannot be written to"))
    })
}

/// Asks with the argument that lies in the packet, and hands what comes back to
/// `take`, also with an error.
fn ask(
    state: &mut State,
    handle: u32,
    command: u16,
    (nargs, length): (i32, usize),
    take: impl FnOnce(&[u8]) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let question = Question {
        context: handle,
        nargs,
        length,
        ..Question::plain(command)
    };
    let Some(link) = &mut state.link else {
        return Err(no_context());
    };
    let answer = link.exchange(question, &mut state.packet)?;
    take(answer.reply.payload)?;
    match answer.reply.errno {
        0 => Ok(()),
        _ => Err(refused(&answer.reply)),
    }
}

fn refused(reply: &Reply<'_>) -> Failure {
    match Errno::from_number(reply.errno) {
        Some(errno) if reply.reason.is_empty() => because(errno, reply.subcode, errno.text()),
        Some(errno) => because(errno, reply.subcode, reply.reason),
        None => failure(Errno::EPROTO, "the VM answered with an unknown error"),
    }
}

/// After `fcntl` has changed who is signalled for a context, or how (3.3.7).
pub(crate) fn signals_changed(number: i32, open: BorrowedFd<'_>, slot: &Slot) {
    if slot.flags.load(SeqCst) & PFM_FL_OVFL_NO_MSG == 0 {
        return;
    }
    STATE.with(|state| {
        if let Ok((_, handle)) = state.context(number, open)
            && let Some(link) = &mut state.link
        {
            bell::follow(link, &mut state.packet, open, handle);
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
        uuid => format_argument(state, uuid)?,
    };
    if wanted.flags & PFM_FL_SYSTEM_WIDE != 0 {
        // A load may come in a signal handler, which must not allocate.
        core_cpus(state)?;
    }
    let length = CtxArg::SIZE + format;
    if length > MAX_PAYLOAD {
        return Err(failure(
            Errno::E2BIG,
            "the sampling format's argument is too big",
        ));
    }
    read(argument, &mut state.packet[ARGUMENT..][..length])?;
    let question = Question {
        nargs: 1,
        length,
        ..Question::plain(PFM_CREATE_CONTEXT)
    };
    let Some(link) = &mut state.link else {
        return Err(no_context());
    };
    let answer = link.exchange(question, &mut state.packet)?;
    if answer.reply.errno != 0 {
        return Err(refused(&answer.reply));
    }
    let malformed = || failure(Errno::EPROTO, "the reply is malformed");
    let (handle, [fd, _]) = (answer.reply.context, answer.descriptors);
    let mut made = CtxArg::from_bytes(answer.reply.payload).map_err(|_| malformed())?;
    let mut fd = fd.ok_or_else(malformed)?;
    if wanted.flags & PFM_FL_OVFL_NO_MSG != 0 {
        bell::hang(link, &mut state.packet, &mut fd, handle)?;
    }
    fcntl_setfd(&fd, FdFlags::empty())?;
    made.flags = wanted.flags;
    made.fd = fd.as_raw_fd();
    let slot = state.register(made.fd, fd.as_fd(), handle)?;
    slot.flags.store(made.flags, SeqCst);
    slot.buffer_size.store(made.buffer_size, SeqCst);
    argument
        .write(0, &made.to_bytes())
        .map_err(|_| failure(Errno::EFAULT, "the argument cannot be written to"))?;
    let _ = fd.into_raw_fd();
    Ok(())
}

/// The sampling formats, into `nargs` elements.
fn formats(state: &mut State, argument: User, nargs: i32) -> Result<(), Failure> {
    state.ensure_link()?;
    let room = usize::try_from(nargs).ok().filter(|&room| room > 0);
    let room = room.ok_or_else(|| failure(Errno::EFAULT, "there is no element"))?;
    let formats: Vec<FormatInfo> = document(state, Extension::Formats)?;
    let told = formats.iter().map(format_info);
    for (index, info) in told
        .chain(iter::repeat(FmtInfo::default()))
        .take(room)
        .enumerate()
    {
        argument
            .write(index * FmtInfo::SIZE, &info.to_bytes())
            .map_err(|_| failure(Errno::EFAULT, "the argument cannot be written to"))?;
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

/// Bytes of the argument that a sampling format takes; 0 for one that the VM
/// does not have, and will say so.
fn format_argument(state: &mut State, uuid: [u8; 16]) -> Result<usize, Failure> {
    if let Some(size) = known_format(state, uuid) {
        return Ok(size);
    }
    let formats: Vec<FormatInfo> = document(state, Extension::Formats)?;
    let sizes = formats.iter().filter_map(|format| {
        let uuid = format.uuid_bytes()?;
        Some((uuid, usize::try_from(format.arg_size).ok()?))
    });
    state
        .formats
        .iter_mut()
        .zip(sizes.clone())
        .for_each(|(place, size)| *place = Some(size));
    let found = sizes.into_iter().find(|(id, _)| *id == uuid);
    Ok(found.map_or(0, |(_, size)| size))
}

fn known_format(state: &State, uuid: [u8; 16]) -> Option<usize> {
    let mut known = state.formats.iter().flatten();
    known.find(|(id, _)| *id == uuid).map(|(_, size)| *size)
}
