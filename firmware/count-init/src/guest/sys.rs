//! Entry, and the system calls of Linux for x86-64.

use core::arch::{asm, global_asm};
use core::ffi::CStr;
use core::marker::PhantomData;
use core::panic::PanicInfo;

use count_init::{End, PORT};

/// An error's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) u32);

pub(crate) const EPERM: Errno = Errno(1);
pub(crate) const ENOENT: Errno = Errno(2);
pub(crate) const E2BIG: Errno = Errno(7);
pub(crate) const ENOEXEC: Errno = Errno(8);
const ECHILD: Errno = Errno(10);
pub(crate) const ENOMEM: Errno = Errno(12);
pub(crate) const EACCES: Errno = Errno(13);
pub(crate) const EEXIST: Errno = Errno(17);
pub(crate) const ENOTDIR: Errno = Errno(20);
pub(crate) const EINVAL: Errno = Errno(22);
const EFBIG: Errno = Errno(27);

const READ: u64 = 0;
const WRITE: u64 = 1;
const CLOSE: u64 = 3;
const POLL: u64 = 7;
const MMAP: u64 = 9;
const SIGPROCMASK: u64 = 14;
const IOCTL: u64 = 16;
const ACCESS: u64 = 21;
const DUP2: u64 = 33;
const SOCKET: u64 = 41;
const CLONE: u64 = 56;
const EXECVE: u64 = 59;
const WAIT4: u64 = 61;
const KILL: u64 = 62;
const CHDIR: u64 = 80;
const MKDIR: u64 = 83;
const SYMLINK: u64 = 88;
const FCHOWN: u64 = 93;
const UMASK: u64 = 95;
const SETUID: u64 = 105;
const SETGID: u64 = 106;
const SETSID: u64 = 112;
const SETGROUPS: u64 = 116;
const SETRLIMIT: u64 = 160;
const CHROOT: u64 = 161;
const MOUNT: u64 = 165;
const REBOOT: u64 = 169;
const SETHOSTNAME: u64 = 170;
const IOPL: u64 = 172;
const GETDENTS64: u64 = 217;
const EXIT_GROUP: u64 = 231;
const OPENAT: u64 = 257;
const NEWFSTATAT: u64 = 262;
const READLINKAT: u64 = 267;
const SIGNALFD4: u64 = 289;
const PIPE2: u64 = 293;
const FINIT_MODULE: u64 = 313;

/// How a file is opened; nothing that is open outlives an `execve`.
pub(crate) type OpenFlags = u64;
pub(crate) const READ_ONLY: OpenFlags = 0;
pub(crate) const WRITE_ONLY: OpenFlags = 1;
pub(crate) const DIRECTORY: OpenFlags = 0o200_000;
pub(crate) const NO_FOLLOW: OpenFlags = 0o400_000;
const READ_WRITE: OpenFlags = 2;
const NO_CONTROL: OpenFlags = 0o400;
const CLOSE_ON_EXEC: OpenFlags = 0o2_000_000;

pub(crate) const NO_ATIME: u64 = 1024;
const MOVE: u64 = 8192;

/// `AT_FDCWD`, -100.
const HERE: u64 = 100u64.wrapping_neg();
const NOT_THROUGH_LINKS: u64 = 0x100;

const SIGCHLD: u64 = 17;
const SIGKILL: u64 = 9;
const BLOCK: u64 = 0;
const SET_MASK: u64 = 2;
const NO_HANG: u64 = 1;

/// The most that [`read_whole`] reads, and a page more.
const LONGEST: usize = (8 << 20) + 4096;

// RSP is where the kernel has put argc (System V ABI for x86-64, 3.4.1).
global_asm!(
    ".global init_entry",
    "init_entry:",
    "and rsp, -16",
    "call {begin}",
    begin = sym begin,
);

extern "C" fn begin() -> ! {
    // A kernel without a console starts its first program with nothing open, and then 0, 1 and 2
    // would be something else's.
    while let Ok(file) = open(c"/", DIRECTORY) {
        if file.0 > 2 {
            break;
        }
        core::mem::forget(file);
    }
    crate::start()
}

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    let _ = write_all(1, b"count-init: a mistake of its own\n");
    power_off();
}

/// # Safety
/// What the system call does to memory is what its caller borrows for it.
unsafe fn call(number: u64, arguments: [u64; 6]) -> Result<u64, Errno> {
    let result: u64;
    // SAFETY: RCX and R11 are what SYSCALL changes, and RAX has the result; the caller answers
    // for memory.
    unsafe {
        asm!(
            "syscall",
            inout("rax") number => result,
            in("rdi") arguments[0],
            in("rsi") arguments[1],
            in("rdx") arguments[2],
            in("r10") arguments[3],
            in("r8") arguments[4],
            in("r9") arguments[5],
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    match u32::try_from(result.wrapping_neg()) {
        Ok(error @ 1..=4095) => Err(Errno(error)),
        _ => Ok(result),
    }
}

/// A call that takes numbers alone.
fn plain(number: u64, arguments: [u64; 4]) -> Result<u64, Errno> {
    let [a, b, c, d] = arguments;
    // SAFETY: those who call this pass numbers, no addresses.
    unsafe { call(number, [a, b, c, d, 0, 0]) }
}

fn text(text: &CStr) -> u64 {
    text.as_ptr() as u64
}

fn number(file: i32) -> u64 {
    // -1 and what the kernel gives: only the lower half counts.
    u64::from(file.cast_unsigned())
}

fn descriptor(result: u64) -> Result<i32, Errno> {
    i32::try_from(result).map_err(|_| EINVAL)
}

/// An open file, which is closed with this.
#[derive(Debug)]
pub(crate) struct Fd(i32);

impl Fd {
    pub(crate) fn get(&self) -> i32 {
        self.0
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        let _ = plain(CLOSE, [number(self.0), 0, 0, 0]);
    }
}

pub(crate) fn open(path: &CStr, flags: OpenFlags) -> Result<Fd, Errno> {
    open_from(HERE, path, flags)
}

pub(crate) fn open_at(folder: i32, path: &CStr, flags: OpenFlags) -> Result<Fd, Errno> {
    open_from(number(folder), path, flags)
}

fn open_from(folder: u64, path: &CStr, flags: OpenFlags) -> Result<Fd, Errno> {
    let flags = flags | CLOSE_ON_EXEC;
    // SAFETY: the kernel reads the text as far as its 0.
    let opened = unsafe { call(OPENAT, [folder, text(path), flags, 0, 0, 0]) };
    Ok(Fd(descriptor(opened?)?))
}

/// How many bytes were read; 0 at the end.
pub(crate) fn read(file: i32, into: &mut [u8]) -> Result<usize, Errno> {
    let (at, len) = (into.as_mut_ptr() as u64, into.len() as u64);
    // SAFETY: the kernel writes at most this slice, which is borrowed.
    let read = unsafe { call(READ, [number(file), at, len, 0, 0, 0]) }?;
    usize::try_from(read).map_err(|_| EINVAL)
}

pub(crate) fn write_all(file: i32, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        let (at, len) = (bytes.as_ptr() as u64, bytes.len() as u64);
        // SAFETY: the kernel reads this slice.
        let written = unsafe { call(WRITE, [number(file), at, len, 0, 0, 0]) }?;
        let written = usize::try_from(written).map_err(|_| EINVAL)?;
        bytes = bytes.get(written..).unwrap_or(&[]);
    }
    Ok(())
}

/// Memory that is 0, for good.
fn map(len: usize) -> Result<u64, Errno> {
    const READ_AND_WRITE: u64 = 3;
    const PRIVATE_ANONYMOUS: u64 = 0x22;
    let arguments = [
        0,
        len as u64,
        READ_AND_WRITE,
        PRIVATE_ANONYMOUS,
        u64::MAX,
        0,
    ];
    // SAFETY: no address is asked for, so nothing of ours is replaced.
    unsafe { call(MMAP, arguments) }
}

/// All of a file, of at most 8 MiB, for good.
pub(crate) fn read_whole(file: &Fd) -> Result<&'static [u8], Errno> {
    let at = map(LONGEST)? as *mut u8;
    // SAFETY: these are bytes of a mapping of ours that nobody else has and nobody ends.
    let bytes = unsafe { core::slice::from_raw_parts_mut(at, LONGEST) };
    let mut used = 0;
    loop {
        if used == LONGEST {
            return Err(EFBIG);
        }
        match read(file.0, &mut bytes[used..])? {
            0 => return Ok(&bytes[..used]),
            read => used += read,
        }
    }
}

/// Texts as `execve` takes them: their addresses, and a 0 behind.
pub(crate) struct Pointers {
    memory: &'static mut [u64],
    used: usize,
}

impl Pointers {
    /// Room for so many.
    pub(crate) fn new(most: usize) -> Result<Self, Errno> {
        let len = most + 1;
        let at = map(len * 8)? as *mut u64;
        // SAFETY: a mapping of this size that nobody else has and nobody ends; it begins a page.
        let memory = unsafe { core::slice::from_raw_parts_mut(at, len) };
        Ok(Self { memory, used: 0 })
    }

    /// One more; the last place stays 0.
    pub(crate) fn push(&mut self, of: &'static CStr) {
        if self.used + 1 < self.memory.len() {
            self.memory[self.used] = text(of);
            self.used += 1;
        }
    }

    fn address(&self) -> u64 {
        self.memory.as_ptr() as u64
    }
}

/// Comes back only with an error.
pub(crate) fn execute(path: &CStr, arguments: &Pointers, environment: &Pointers) -> Errno {
    let vectors = [arguments.address(), environment.address()];
    // SAFETY: the kernel reads the path, and texts that live for good, as far as the 0 behind
    // them.
    let outcome = unsafe { call(EXECVE, [text(path), vectors[0], vectors[1], 0, 0, 0]) };
    outcome.err().unwrap_or(EINVAL)
}

pub(crate) fn exit(status: u64) -> ! {
    loop {
        let _ = plain(EXIT_GROUP, [status, 0, 0, 0]);
    }
}

/// A file system, and where it is to be.
pub(crate) struct Mount<'a> {
    pub(crate) kind: &'a CStr,
    pub(crate) from: &'a CStr,
    pub(crate) to: &'a CStr,
    pub(crate) flags: u64,
    pub(crate) options: &'a CStr,
}

pub(crate) fn mount(of: &Mount<'_>) -> Result<(), Errno> {
    let (from, to, kind) = (text(of.from), text(of.to), text(of.kind));
    // SAFETY: the kernel reads four texts.
    unsafe { call(MOUNT, [from, to, kind, of.flags, text(of.options), 0]) }.map(drop)
}

/// Makes what is mounted at `path` the root.
pub(crate) fn change_root(path: &CStr) -> Result<(), Errno> {
    change_folder(path)?;
    mount(&Mount {
        kind: c"",
        from: c".",
        to: c"/",
        flags: MOVE,
        options: c"",
    })?;
    // SAFETY: the kernel reads the text.
    unsafe { call(CHROOT, [text(c"."), 0, 0, 0, 0, 0]) }?;
    change_folder(c"/")
}

pub(crate) fn change_folder(path: &CStr) -> Result<(), Errno> {
    // SAFETY: the kernel reads the text.
    unsafe { call(CHDIR, [text(path), 0, 0, 0, 0, 0]) }.map(drop)
}

pub(crate) fn mkdir(path: &CStr, mode: u32) -> Result<(), Errno> {
    // SAFETY: the kernel reads the text.
    unsafe { call(MKDIR, [text(path), u64::from(mode), 0, 0, 0, 0]) }.map(drop)
}

pub(crate) fn symlink(target: &CStr, path: &CStr) -> Result<(), Errno> {
    // SAFETY: the kernel reads both texts.
    unsafe { call(SYMLINK, [text(target), text(path), 0, 0, 0, 0]) }.map(drop)
}

pub(crate) fn exists(path: &CStr) -> bool {
    // SAFETY: the kernel reads the text.
    unsafe { call(ACCESS, [text(path), 0, 0, 0, 0, 0]) }.is_ok()
}

pub(crate) fn load_module(file: &Fd) -> Result<(), Errno> {
    // SAFETY: the kernel reads the text.
    unsafe { call(FINIT_MODULE, [number(file.0), text(c""), 0, 0, 0, 0]) }.map(drop)
}

pub(crate) fn set_host_name(name: &str) -> Result<(), Errno> {
    let (at, len) = (name.as_ptr() as u64, name.len() as u64);
    // SAFETY: the kernel reads this text.
    unsafe { call(SETHOSTNAME, [at, len, 0, 0, 0, 0]) }.map(drop)
}

pub(crate) fn umask(mask: u64) {
    let _ = plain(UMASK, [mask, 0, 0, 0]);
}

/// The interface `lo` goes up, with its address 127.0.0.1.
pub(crate) fn loopback_up() -> Result<(), Errno> {
    const INET: u64 = 2;
    const DATAGRAM: u64 = 2;
    const SET_FLAGS: u64 = 0x8914;
    const UP: u8 = 1;
    let socket = plain(SOCKET, [INET, DATAGRAM | CLOSE_ON_EXEC, 0, 0])?;
    let socket = Fd(descriptor(socket)?);
    // `struct ifreq`: a name of 16 bytes, and behind it the flags.
    let mut request = [0u8; 40];
    request[..2].copy_from_slice(b"lo");
    request[16] = UP;
    control_with(&socket, SET_FLAGS, &mut request).map(drop)
}

/// An `ioctl` about `memory`, which is as large as the request says.
fn control_with(file: &Fd, request: u64, memory: &mut [u8]) -> Result<u64, Errno> {
    let at = memory.as_mut_ptr() as u64;
    // SAFETY: the callers pass as many bytes as the request's structure has; they are borrowed.
    unsafe { call(IOCTL, [number(file.0), request, at, 0, 0, 0]) }
}

/// Ports may be written to from now on, by this process and its children.
pub(crate) fn allow_ports() -> Result<(), Errno> {
    plain(IOPL, [3, 0, 0, 0]).map(drop)
}

/// Children may no longer.
fn forbid_ports() -> Result<(), Errno> {
    plain(IOPL, [0, 0, 0, 0]).map(drop)
}

/// Tells the machine something by the port that belongs to this program.
pub(crate) fn tell(what: u8) {
    // SAFETY: `allow_ports` has been called, the port is no device's that touches memory, and no
    // register changes.
    unsafe { asm!("out dx, al", in("dx") PORT, in("al") what, options(nostack, preserves_flags)) };
}

pub(crate) fn power_off() -> ! {
    const MAGIC: [u64; 2] = [0xfee1_dead, 672_274_793];
    const POWER_OFF: u64 = 0x4321_fedc;
    loop {
        let _ = plain(REBOOT, [MAGIC[0], MAGIC[1], POWER_OFF, 0]);
    }
}

/// Whoever ends is told by the file that this gives. SIGCHLD is blocked for it.
pub(crate) fn watch_children() -> Result<Fd, Errno> {
    const MASK: u64 = 1 << (SIGCHLD - 1);
    mask_signals(BLOCK, MASK)?;
    let (mask, none) = (&raw const MASK_WORD, u64::MAX);
    static MASK_WORD: u64 = MASK;
    // SAFETY: the kernel reads eight bytes.
    let file = unsafe { call(SIGNALFD4, [none, mask as u64, 8, CLOSE_ON_EXEC, 0, 0]) }?;
    Ok(Fd(descriptor(file)?))
}

pub(crate) fn unblock_signals() -> Result<(), Errno> {
    mask_signals(SET_MASK, 0)
}

fn mask_signals(how: u64, mask: u64) -> Result<(), Errno> {
    let at = &raw const mask;
    // SAFETY: the kernel reads eight bytes, which live until it comes back.
    unsafe { call(SIGPROCMASK, [how, at as u64, 0, 8, 0, 0]) }.map(drop)
}

pub(crate) fn take_signal(from: &Fd) -> Result<(), Errno> {
    let mut one = [0; 128];
    read(from.0, &mut one).map(drop)
}

/// The end to read from, and the one to write to.
pub(crate) fn pipe() -> Result<(Fd, Fd), Errno> {
    let mut ends = [0i32; 2];
    // SAFETY: the kernel writes two descriptors, which is what `ends` is.
    unsafe { call(PIPE2, [ends.as_mut_ptr() as u64, CLOSE_ON_EXEC, 0, 0, 0, 0]) }?;
    Ok((Fd(ends[0]), Fd(ends[1])))
}

/// Gives what is open to the program's user: a pipe too is opened anew by its name in `/proc`.
pub(crate) fn give_to_user(file: &Fd, group: u32) -> Result<(), Errno> {
    let (user, group) = (u64::from(count_init::USER), u64::from(group));
    plain(FCHOWN, [number(file.0), user, group, 0]).map(drop)
}

/// Our end of a terminal, and the program's.
pub(crate) fn terminal() -> Result<(Fd, Fd), Errno> {
    const UNLOCK: u64 = 0x4004_5431;
    const PEER: u64 = 0x5441;
    const SET_SIZE: u64 = 0x5414;
    const GET_MODES: u64 = 0x5401;
    const SET_MODES: u64 = 0x5402;
    const TTY_GROUP: u32 = 5;
    let master = open(c"/dev/ptmx", READ_WRITE | NO_CONTROL)?;
    control_with(&master, UNLOCK, &mut [0; 4])?;
    let flags = READ_WRITE | NO_CONTROL | CLOSE_ON_EXEC;
    let slave = plain(IOCTL, [number(master.0), PEER, flags, 0])?;
    let slave = Fd(descriptor(slave)?);
    give_to_user(&slave, TTY_GROUP)?;
    // `struct winsize`: rows and columns.
    control_with(&slave, SET_SIZE, &mut [24, 0, 80, 0, 0, 0, 0, 0])?;
    // `struct termios`. The terminal at the other end makes CR LF of LF, and there is no echo.
    let mut modes = [0; 36];
    control_with(&slave, GET_MODES, &mut modes)?;
    modes[4] &= !1;
    modes[12] &= !8;
    control_with(&slave, SET_MODES, &mut modes)?;
    Ok((master, slave))
}

/// The terminal becomes that of the session.
pub(crate) fn control(slave: &Fd) -> Result<(), Errno> {
    const SET_CONTROLLING: u64 = 0x540e;
    plain(IOCTL, [number(slave.0), SET_CONTROLLING, 0, 0]).map(drop)
}

pub(crate) fn new_session() -> Result<(), Errno> {
    plain(SETSID, [0, 0, 0, 0]).map(drop)
}

pub(crate) fn duplicate(file: &Fd, to: u64) -> Result<(), Errno> {
    plain(DUP2, [number(file.0), to, 0, 0]).map(drop)
}

/// Limit of a resource by its number.
pub(crate) fn limit(resource: usize, soft: u64, hard: u64) -> Result<(), Errno> {
    let limit = [soft, hard];
    let at = limit.as_ptr() as u64;
    // SAFETY: the kernel reads two words, which are these.
    unsafe { call(SETRLIMIT, [resource as u64, at, 0, 0, 0, 0]) }.map(drop)
}

/// User and group, and no rights beside theirs.
pub(crate) fn become_user(user: u32) -> Result<(), Errno> {
    forbid_ports()?;
    let at = &raw const user;
    // SAFETY: the kernel reads one group, four bytes.
    unsafe { call(SETGROUPS, [1, at as u64, 0, 0, 0, 0]) }?;
    plain(SETGID, [u64::from(user), 0, 0, 0])?;
    plain(SETUID, [u64::from(user), 0, 0, 0]).map(drop)
}

/// A process that this one started.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Child(u64);

/// Who goes on behind [`fork`].
pub(crate) enum Split {
    Parent(Child),
    Child,
}

/// The child has a copy of all memory, and the same files.
pub(crate) fn fork() -> Result<Split, Errno> {
    Ok(match plain(CLONE, [SIGCHLD, 0, 0, 0])? {
        0 => Split::Child,
        child => Split::Parent(Child(child)),
    })
}

/// A process that has ended.
pub(crate) struct Reaped {
    pub(crate) who: Child,
    pub(crate) status: End,
}

/// One that has ended, if there is one.
pub(crate) fn reap() -> Result<Option<Reaped>, Errno> {
    match wait(NO_HANG) {
        Ok((0, _)) | Err(ECHILD) => Ok(None),
        Ok((who, status)) => Ok(Some(Reaped {
            who: Child(who),
            status: ended(status),
        })),
        Err(errno) => Err(errno),
    }
}

/// Waits until one has ended; an error if there is none.
pub(crate) fn reap_one_waiting() -> Result<(), Errno> {
    wait(0).map(drop)
}

fn wait(options: u64) -> Result<(u64, u32), Errno> {
    let mut status = 0u32;
    let at = &raw mut status;
    // SAFETY: the kernel writes four bytes, which are `status`.
    let who = unsafe { call(WAIT4, [u64::MAX, at as u64, options, 0, 0, 0]) }?;
    Ok((who, status))
}

/// A wait status: the lower seven bits are a signal, or the second byte what was given to exit.
fn ended(status: u32) -> End {
    let [low, high, ..] = status.to_le_bytes();
    match low & 0x7f {
        0 => End::Exited(high),
        signal => End::Signalled(signal),
    }
}

/// Kills every process but this one, which is the first.
pub(crate) fn kill_all() {
    let _ = plain(KILL, [u64::MAX, SIGKILL, 0, 0]);
}

/// `struct pollfd`, for reading.
#[repr(C)]
pub(crate) struct Poll<'a> {
    file: i32,
    events: u16,
    came: u16,
    open: PhantomData<&'a Fd>,
}

impl<'a> Poll<'a> {
    /// Of a file; nothing comes of none.
    pub(crate) fn read(file: Option<&'a Fd>) -> Self {
        const IN: u16 = 1;
        Self {
            file: file.map_or(-1, Fd::get),
            events: IN,
            came: 0,
            open: PhantomData,
        }
    }

    /// There is something to read, or nobody writes any more.
    pub(crate) fn is_ready(&self) -> bool {
        self.came != 0
    }
}

/// Waits until something can be read.
pub(crate) fn poll(of: &mut [Poll<'_>]) -> Result<(), Errno> {
    let (at, len) = (of.as_mut_ptr() as u64, of.len() as u64);
    // SAFETY: the kernel writes the last member of each, which are borrowed.
    unsafe { call(POLL, [at, len, u64::MAX, 0, 0, 0]) }.map(drop)
}

/// What a file is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileKind {
    Regular,
    Folder,
    Link,
    Other,
}

/// As much of a file's status as an archive needs.
pub(crate) struct Status {
    pub(crate) kind: FileKind,
    /// Permission bits, with those for another user's rights.
    pub(crate) mode: u32,
    pub(crate) size: u64,
}

/// Of a name in a folder; links are not followed.
pub(crate) fn status_at(folder: i32, name: &CStr) -> Result<Status, Errno> {
    // `struct stat` of x86-64: 144 bytes, the mode in the second half of the fourth word, the
    // size in the seventh.
    let mut words = [0u64; 18];
    let at = words.as_mut_ptr() as u64;
    let arguments = [number(folder), text(name), at, NOT_THROUGH_LINKS, 0, 0];
    // SAFETY: the kernel reads the text, and writes the structure.
    unsafe { call(NEWFSTATAT, arguments) }?;
    let mode = u32::try_from(words[3] & 0xffff_ffff).unwrap_or(0);
    let kind = match mode & 0o170_000 {
        0o100_000 => FileKind::Regular,
        0o040_000 => FileKind::Folder,
        0o120_000 => FileKind::Link,
        _ => FileKind::Other,
    };
    Ok(Status {
        kind,
        mode: mode & 0o7777,
        size: words[6],
    })
}

pub(crate) fn read_link_at(folder: i32, name: &CStr, into: &mut [u8]) -> Result<usize, Errno> {
    let (at, len) = (into.as_mut_ptr() as u64, into.len() as u64);
    // SAFETY: the kernel reads the text, and writes at most this slice.
    let read = unsafe { call(READLINKAT, [number(folder), text(name), at, len, 0, 0]) }?;
    usize::try_from(read).map_err(|_| EINVAL)
}

/// What is in a folder, without `.` and `..`.
pub(crate) struct Listing {
    folder: i32,
    bytes: [u8; 2048],
    filled: usize,
    at: usize,
}

/// A name in a folder.
pub(crate) struct Entry {
    bytes: [u8; 256],
}

impl Entry {
    pub(crate) fn name(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or(c"")
    }
}

impl Listing {
    pub(crate) fn new(folder: i32) -> Self {
        Self {
            folder,
            bytes: [0; 2048],
            filled: 0,
            at: 0,
        }
    }

    pub(crate) fn next(&mut self) -> Result<Option<Entry>, Errno> {
        loop {
            if self.at >= self.filled {
                self.fill()?;
                if self.filled == 0 {
                    return Ok(None);
                }
            }
            let entry = self.take().ok_or(EINVAL)?;
            if !matches!(entry.name().to_bytes(), b"." | b"..") {
                return Ok(Some(entry));
            }
        }
    }

    fn fill(&mut self) -> Result<(), Errno> {
        let (at, len) = (self.bytes.as_mut_ptr() as u64, self.bytes.len() as u64);
        // SAFETY: the kernel writes at most these bytes.
        let filled = unsafe { call(GETDENTS64, [number(self.folder), at, len, 0, 0, 0]) }?;
        self.filled = usize::try_from(filled).map_err(|_| EINVAL)?;
        self.at = 0;
        Ok(())
    }

    /// `struct linux_dirent64`: two words, the length of all, a type, a name with a 0.
    fn take(&mut self) -> Option<Entry> {
        let entry = self.bytes.get(self.at..self.filled)?;
        let len = usize::from(u16::from_le_bytes([*entry.get(16)?, *entry.get(17)?]));
        let name = entry.get(19..len)?;
        let mut bytes = [0; 256];
        let end = name.iter().position(|byte| *byte == 0)?;
        bytes.get_mut(..end)?.copy_from_slice(&name[..end]);
        self.at += len;
        Some(Entry { bytes })
    }
}
