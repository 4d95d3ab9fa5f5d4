//! The process that becomes the program.

use core::ffi::CStr;

use count_init::{End, NotRun, USER};

use crate::job::Task;
use crate::sys::{self, Errno, Fd};

/// What the program writes to.
pub(crate) enum Streams {
    Pipes(Fd, Fd),
    Terminal(Fd),
}

/// Limits of resources that the program has, in the order of Linux's numbers, soft and hard: they
/// do not depend on the guest's memory, as the kernel's own do.
const LIMITS: [(u64, u64); 16] = {
    const NONE: (u64, u64) = (u64::MAX, u64::MAX);
    [
        NONE,                // CPU
        NONE,                // FSIZE
        NONE,                // DATA
        (8 << 20, u64::MAX), // STACK
        (0, u64::MAX),       // CORE
        NONE,                // RSS
        (4096, 4096),        // NPROC
        (1024, 1 << 20),     // NOFILE
        (8 << 20, 8 << 20),  // MEMLOCK
        NONE,                // AS
        NONE,                // LOCKS
        (4096, 4096),        // SIGPENDING
        (819_200, 819_200),  // MSGQUEUE
        (0, 0),              // NICE
        (0, 0),              // RTPRIO
        NONE,                // RTTIME
    ]
};

/// Becomes the program; says by `says` why not.
pub(crate) fn become_program(job: &Task, stdin: &Fd, streams: &Streams, says: &Fd) -> ! {
    let (why, Errno(errno)) = try_program(job, stdin, streams);
    let [a, b, c, d] = errno.to_le_bytes();
    let _ = sys::write_all(says.get(), &[code(why), a, b, c, d]);
    sys::exit(127);
}

/// Why the child did not become the program, if it said so.
pub(crate) fn not_run(said: &Fd) -> Option<End> {
    let mut bytes = [0; 5];
    let read = sys::read(said.get(), &mut bytes);
    if read != Ok(bytes.len()) {
        return None;
    }
    let [code, errno @ ..] = bytes;
    let errno = u32::from_le_bytes(errno);
    let why = WHYS.into_iter().find(|why| self::code(*why) == code)?;
    Some(End::NotRun { why, errno })
}

const WHYS: [NotRun; 10] = [
    NotRun::Missing,
    NotRun::Denied,
    NotRun::ScriptInterpreter,
    NotRun::ElfInterpreter,
    NotRun::NoInterpreterLine,
    NotRun::OtherMachine,
    NotRun::Folder,
    NotRun::TooLong,
    NotRun::Memory,
    NotRun::Other,
];

fn code(why: NotRun) -> u8 {
    let before = WHYS.iter().take_while(|one| **one != why);
    before.fold(0, |count, _| count + 1)
}

type Refused = (NotRun, Errno);

fn try_program(job: &Task, stdin: &Fd, streams: &Streams) -> Refused {
    if let Err(errno) = prepare(stdin, streams) {
        return (NotRun::Other, errno);
    }
    if let Err(errno) = sys::change_folder(job.folder) {
        return (NotRun::Folder, errno);
    }
    // As a shell goes through PATH: what may not be executed is passed over, and told only if
    // nothing else is found.
    let mut refused = (NotRun::Missing, sys::ENOENT);
    for path in job.programs() {
        let errno = sys::execute(path, &job.arguments, &job.environment);
        match explain(path, errno) {
            (NotRun::Missing, _) => {}
            (NotRun::Denied, errno) => refused = (NotRun::Denied, errno),
            found => return found,
        }
    }
    refused
}

/// Descriptors, session, limits, user.
fn prepare(stdin: &Fd, streams: &Streams) -> Result<(), Errno> {
    sys::new_session()?;
    let (stdout, stderr) = match streams {
        Streams::Pipes(stdout, stderr) => (stdout, stderr),
        Streams::Terminal(slave) => {
            sys::control(slave)?;
            (slave, slave)
        }
    };
    sys::duplicate(stdin, 0)?;
    sys::duplicate(stdout, 1)?;
    sys::duplicate(stderr, 2)?;
    for (number, (soft, hard)) in LIMITS.into_iter().enumerate() {
        sys::limit(number, soft, hard)?;
    }
    sys::become_user(USER)?;
    sys::unblock_signals()
}

/// What an error of `execve` means for this file.
fn explain(path: &CStr, errno: Errno) -> Refused {
    let why = match errno {
        sys::ENOENT if sys::exists(path) => match first_bytes(path) {
            Some([b'#', b'!', ..]) => NotRun::ScriptInterpreter,
            Some(_) => NotRun::ElfInterpreter,
            None => NotRun::Other,
        },
        sys::ENOENT | sys::ENOTDIR => NotRun::Missing,
        sys::EACCES | sys::EPERM => NotRun::Denied,
        sys::ENOEXEC => match first_bytes(path) {
            Some([0x7f, b'E', b'L', b'F']) => NotRun::OtherMachine,
            _ => NotRun::NoInterpreterLine,
        },
        sys::E2BIG => NotRun::TooLong,
        sys::ENOMEM => NotRun::Memory,
        _ => NotRun::Other,
    };
    (why, errno)
}

fn first_bytes(path: &CStr) -> Option<[u8; 4]> {
    let file = sys::open(path, sys::READ_ONLY).ok()?;
    let mut bytes = [0; 4];
    sys::read(file.get(), &mut bytes).ok()?;
    Some(bytes)
}
