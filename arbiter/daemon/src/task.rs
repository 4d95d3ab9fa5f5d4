//! A thread of the host, as its folder in `/proc` has it. What is read is bytes: a name may be
//! any (`prctl(2)`, `PR_SET_NAME`), and nothing is decided by one.

use std::cell::Cell;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::str::FromStr;
use std::sync::OnceLock;

use arbiter_host::ThreadId;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, openat, statat};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

/// A tick of the clock by which proc_pid_stat(5) says when a thread was started, in nanoseconds
/// (`USER_HZ` is 100 on this architecture).
pub(crate) const TICK: u64 = 10_000_000;

/// What there is to know of a thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Task {
    pub(crate) id: ThreadId,
    /// The number of its process.
    pub(crate) process: u32,
    /// Its users: real, effective, saved, and that of file accesses.
    pub(crate) uids: Vec<u32>,
    /// The same of its groups of users.
    pub(crate) gids: Vec<u32>,
    /// Its number in its own PID namespace, if that is not this process's.
    pub(crate) inner: Option<u32>,
    /// It is ending, or runs no more and has its number until somebody has asked how it ended.
    pub(crate) ended: bool,
    /// Its user may look into it, by `PR_SET_DUMPABLE` of prctl(2): it runs no program with more
    /// rights than its user, and has not said so itself. Of root's processes that cannot be told.
    pub(crate) dumpable: bool,
}

/// Which thread has a number, and whether it is ending. That takes little time, whatever it is
/// like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Life {
    pub(crate) id: ThreadId,
    /// As [`Task::ended`].
    pub(crate) ended: bool,
}

impl Life {
    /// Of the thread that has this number now. `None`: there is none.
    ///
    /// # Errors
    /// It cannot be looked at.
    pub(crate) fn of(number: u32) -> io::Result<Option<Self>> {
        seen(number, |folder| {
            Self::parse(number, &read(folder, "stat")?).ok_or_else(|| odd(number))
        })
    }

    /// By proc_pid_stat(5).
    fn parse(number: u32, stat: &[u8]) -> Option<Self> {
        /// `PF_EXITING` of the kernel's `<linux/sched.h>`.
        const EXITING: u64 = 0x4;
        // The name, which may hold anything, is field 2; fields 3, 9 and 22 are these.
        let fields = stat.rsplit(|byte| *byte == b')').next()?;
        let mut fields = words(fields);
        let (state, flags) = (fields.next()?, parsed::<u64>(fields.nth(5)?)?);
        let started = parsed(fields.nth(12)?)?;
        Some(Life {
            id: ThreadId { number, started },
            ended: matches!(state, b"Z" | b"X") || flags & EXITING != 0,
        })
    }
}

/// How much of `status` files is read for one request. They have all groups of users that their
/// process is in, which may be 65,536; and the kernel takes as long, some milliseconds for each
/// such file, while everybody waits.
#[derive(Debug)]
pub(crate) struct Text {
    left: Cell<u64>,
    read: Cell<u64>,
}

impl Text {
    /// So much at least, and so much for each number that is looked at.
    const LEAST: u64 = 1 << 20;
    const OF_ONE: u64 = 4096;
    /// So much costs as much as a look.
    const OF_LOOK: u64 = 2048;

    /// For so many numbers.
    pub(crate) fn of(numbers: usize) -> Self {
        Text {
            left: Cell::new(Self::LEAST.max(Self::OF_ONE.saturating_mul(numbers as u64))),
            read: Cell::new(0),
        }
    }

    /// How many looks at usual processes it was as dear as.
    pub(crate) fn looks(&self) -> u64 {
        self.read.get() / Self::OF_LOOK
    }

    fn read(&self, folder: &OwnedFd) -> io::Result<Vec<u8>> {
        if self.left.get() == 0 {
            return Err(io::Error::other(
                "the processes to look at are in too many groups of users",
            ));
        }
        let status = read(folder, "status")?;
        let length = status.len() as u64;
        self.read.set(self.read.get() + length);
        self.left.set(self.left.get().saturating_sub(length));
        Ok(status)
    }
}

/// What is seen in the folder of the thread that has this number now. `None`: there is none.
fn seen<T>(number: u32, look: impl FnOnce(&OwnedFd) -> io::Result<T>) -> io::Result<Option<T>> {
    require_own_proc()?;
    // What `/proc/N/stat` has is summed over all threads of the process; this is its own. The
    // folder stays the thread's, whoever has its number later.
    let folder = folder(&format!("/proc/{number}/task/{number}"));
    match folder.and_then(|folder| look(&folder)) {
        Err(error) if is_none(&error) && is_hidden(number) => Err(io::Error::other(
            "/proc hides it from the arbiter (hidepid); give the arbiter CAP_SYS_PTRACE",
        )),
        Err(error) if is_none(&error) => Ok(None),
        task => task.map(Some),
    }
}

fn folder(path: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(openat(CWD, path, flags, Mode::empty())?)
}

fn odd(number: u32) -> io::Error {
    let what = format!("the stat or status of thread {number} is not as proc(5) has it");
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Whether a process is in another PID namespace than this one, by a descriptor of it. `None`:
/// the kernel does not say so.
///
/// # Errors
/// It cannot be looked at.
pub(crate) fn is_inner(process: &OwnedFd) -> io::Result<Option<bool>> {
    require_own_proc()?;
    let text = fs::read(format!("/proc/self/fdinfo/{}", process.as_raw_fd()))?;
    let numbers = line(&text, "NSpid:").map(|numbers| words(numbers).count());
    Ok(numbers.map(|numbers| numbers > 1))
}

impl Task {
    /// The thread that has this number now. `None`: there is none.
    ///
    /// # Errors
    /// It cannot be looked at.
    pub(crate) fn of(number: u32) -> io::Result<Option<Self>> {
        Self::within(number, &Text::of(1))
    }

    /// The same, one of many that are looked at for a request.
    ///
    /// # Errors
    /// It cannot be looked at, or too much was read.
    pub(crate) fn within(number: u32, text: &Text) -> io::Result<Option<Self>> {
        seen(number, |folder| Self::at(folder, number, text))
    }

    /// Whether it is of that user, and of that group of users, in each way.
    pub(crate) fn is_of(&self, uid: u32, gid: Option<u32>) -> bool {
        let has_group = |gid| self.gids.iter().all(|own| *own == gid);
        self.uids.iter().all(|own| *own == uid) && gid.is_none_or(has_group)
    }

    /// Whose it is: its real user, who has started it.
    pub(crate) fn user(&self) -> u32 {
        self.uids[0]
    }

    /// The numbers of a process's threads.
    ///
    /// # Errors
    /// They cannot be listed.
    pub(crate) fn numbers_of(process: u32) -> io::Result<impl Iterator<Item = u32>> {
        require_own_proc()?;
        let names = fs::read_dir(format!("/proc/{process}/task"))?.map_while(Result::ok);
        Ok(names.filter_map(|name| parsed(name.file_name().as_encoded_bytes())))
    }

    fn at(folder: &OwnedFd, number: u32, text: &Text) -> io::Result<Self> {
        let (stat, status) = (read(folder, "stat")?, text.read(folder)?);
        // What cannot be dumped has root for the owner of its files: proc(5).
        let owner = statat(folder, "status", AtFlags::empty())?.st_uid;
        Self::parse(number, &stat, &status, owner).ok_or_else(|| odd(number))
    }

    /// By proc_pid_stat(5) and proc_pid_status(5).
    fn parse(number: u32, stat: &[u8], status: &[u8], owner: u32) -> Option<Self> {
        let Life { id, ended } = Life::parse(number, stat)?;
        let numbers =
            |name| line(status, name).map(|line| words(line).filter_map(parsed).collect());
        let four =
            |name| -> Option<Vec<u32>> { numbers(name).filter(|ids: &Vec<u32>| ids.len() == 4) };
        let uids = four("Uid:")?;
        Some(Task {
            dumpable: uids.get(1) == Some(&owner),
            id,
            process: numbers("Tgid:")?.first().copied()?,
            uids,
            gids: four("Gid:")?,
            inner: inner(status),
            ended,
        })
    }
}

/// The last number in `NSpid`, which begins with that here.
fn inner(status: &[u8]) -> Option<u32> {
    let deeper = words(line(status, "NSpid:")?).skip(1);
    deeper.last().and_then(parsed)
}

/// The control group of a process in the unified hierarchy: cgroups(7), `0::PATH`.
///
/// # Errors
/// It cannot be read.
pub(crate) fn cgroup(pid: u32) -> io::Result<Option<Vec<u8>>> {
    #[cfg(test)]
    if let Some(path) = crate::played::cgroup(pid) {
        return Ok(Some(path));
    }
    require_own_proc()?;
    let text = fs::read(format!("/proc/{pid}/cgroup"))?;
    Ok(line(&text, "0::").map(<[u8]>::to_vec))
}

/// What numbers of users are told apart by: those of users, and those of their groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ids {
    Users,
    Groups,
}

/// The number that this process has for a user, or a group of users, which another process calls
/// by `number` in its own namespace: user_namespaces(7), "User and group ID mappings". `None`: it
/// has none.
///
/// # Errors
/// It cannot be told.
pub(crate) fn number_here(pid: u32, ids: Ids, number: u32) -> io::Result<Option<u32>> {
    require_own_proc()?;
    let file = match ids {
        Ids::Users => "uid_map",
        Ids::Groups => "gid_map",
    };
    let own = match fs::read(format!("/proc/self/{file}")) {
        // A kernel without user namespaces.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Some(number)),
        own => own?,
    };
    let theirs = fs::read(format!("/proc/{pid}/{file}"))?;
    Ok(mapped(&own, &theirs, number))
}

/// By the bytes of both maps. That of another namespace has the numbers of who reads it; that of
/// the reader's own has those of the namespace above, and says nothing here.
fn mapped(own: &[u8], theirs: &[u8], number: u32) -> Option<u32> {
    if own == theirs {
        return Some(number);
    }
    theirs.split(|byte| *byte == b'\n').find_map(|line| {
        let mut words = words(line).map(parsed::<u32>);
        let (inner, here, length) = (words.next()??, words.next()??, words.next()??);
        let at = number.checked_sub(inner).filter(|at| *at < length)?;
        // What has no number here is told as the last one.
        here.checked_add(at).filter(|here| *here != u32::MAX)
    })
}

fn read(folder: &OwnedFd, file: &str) -> io::Result<Vec<u8>> {
    let file = openat(
        folder,
        file,
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let mut bytes = Vec::new();
    io::Read::read_to_end(&mut fs::File::from(file), &mut bytes)?;
    Ok(bytes)
}

/// What follows `name` at the start of a line.
fn line<'a>(text: &'a [u8], name: &str) -> Option<&'a [u8]> {
    let mut lines = text.split(|byte| *byte == b'\n');
    lines.find_map(|line| line.strip_prefix(name.as_bytes()))
}

fn words(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    let words = text.split(u8::is_ascii_whitespace);
    words.filter(|word| !word.is_empty())
}

fn parsed<T: FromStr>(word: &[u8]) -> Option<T> {
    std::str::from_utf8(word).ok()?.parse().ok()
}

/// Whether the kernel says so of a thread that is not there, or has just ended.
pub(crate) fn is_none(error: &io::Error) -> bool {
    let gone = [Errno::NOENT, Errno::SRCH].map(|errno| Some(errno.raw_os_error()));
    gone.contains(&error.raw_os_error())
}

/// Whether a thread is there that `/proc` does not show.
fn is_hidden(number: u32) -> bool {
    let pid = i32::try_from(number).ok().and_then(Pid::from_raw);
    let found = pid.map(test_kill_process);
    // A signal 0 to one that may not be sent any is refused, not unknown.
    matches!(found, Some(Ok(()) | Err(Errno::PERM)))
        && fs::symlink_metadata(format!("/proc/{number}")).is_err()
}

/// Numbers are those of this process's PID namespace; a `/proc` of another one would show
/// strangers for them.
fn require_own_proc() -> io::Result<()> {
    static OWN: OnceLock<bool> = OnceLock::new();
    let own = OWN.get_or_init(|| {
        let me = std::process::id();
        let seen = folder("/proc/self");
        let seen = seen.and_then(|folder| Task::at(&folder, me, &Text::of(1)));
        seen.is_ok_and(|seen| seen.process == me && seen.inner.is_none())
    });
    if *own {
        return Ok(());
    }
    Err(io::Error::other(
        "/proc is not there, or is that of another PID namespace than the arbiter's; mount one of \
         its own (unshare --mount-proc)",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> u32 {
        u32::try_from(rustix::thread::gettid().as_raw_nonzero().get()).expect("an id")
    }

    fn text(names: &str) -> Vec<u8> {
        format!("Name:\tx\nUmask:\t0022\nTgid:\t7\nUid:\t1\t2\t3\t4\nGid:\t0\t0\t0\t0\n{names}")
            .into_bytes()
    }

    #[test]
    fn a_name_of_any_bytes_hides_nothing() {
        let after = " 1 1 1 0 -1 64 0 0 0 0 0 0 0 0 20 0 1 0 345 0 0\n";
        for name in [
            &b"x"[..],
            b"B\xfcro",
            b"",
            b"a) S 1 (b",
            b"x\ny) Z 1",
            b")",
            b"\xff\xfe) Z",
        ] {
            let stat = [b"9 (", name, b") S", after.as_bytes()].concat();
            let mut status = b"Name:\tB\xfcro \xd0\n".to_vec();
            status.extend(text("NSpid:\t9\n"));
            let task = Task::parse(9, &stat, &status, 2).expect("a thread");
            assert_eq!((task.id.number, task.id.started), (9, 345), "{name:?}");
            assert_eq!(
                (task.process, task.uids, task.ended),
                (7, vec![1, 2, 3, 4], false)
            );
        }
        // Its files are the effective user's, or root's if nobody may look into it.
        let [plain, hidden] = [2, 0].map(|owner| {
            let stat = [b"9 (x) S", after.as_bytes()].concat();
            let task = Task::parse(9, &stat, &text(""), owner).expect("a thread");
            task.dumpable
        });
        assert!(plain && !hidden);
        // Field 9 has the kernel's flags of it: one that is ending has 4 there.
        let ending = b"9 (x) R 1 1 1 0 -1 4210948 0 0 0 0 0 0 0 0 20 0 1 0 345 0 0\n";
        let ending = Task::parse(9, ending, &text(""), 2).expect("a thread");
        assert!(ending.ended && ending.id.started == 345);
        let zombie = [b"9 (S) Z".as_slice(), after.as_bytes()].concat();
        assert!(
            Task::parse(9, &zombie, &text(""), 2)
                .expect("a thread")
                .ended
        );
        assert_eq!(Task::parse(9, b"9 (x) S 1", &text(""), 2), None);
        assert_eq!(Task::parse(9, &zombie, b"Tgid:\t7\n", 2), None);
    }

    #[test]
    fn its_number_in_the_innermost_namespace_is_its_own() {
        let stat = b"9 (x) S 1 1 1 0 -1 64 0 0 0 0 0 0 0 0 20 0 1 0 345 0 0\n";
        for (line, inner) in [
            ("", None),
            ("NSpid:\t9\n", None),
            ("NSpid:\t9\t1\n", Some(1)),
            ("NSpid:\t9\t77\t3\n", Some(3)),
        ] {
            let task = Task::parse(9, stat, &text(line), 2).expect("a thread");
            assert_eq!(task.inner, inner, "{line:?}");
        }
    }

    #[test]
    fn a_number_of_another_namespace_is_the_one_that_is_meant_here() {
        let host = b"         0          0 4294967295\n";
        let inner = b"0 100000 1000\n1000 1000 1\n1001 101001 64535\n";
        let none = b"0 4294967295 10\n";
        for (own, theirs, number, right) in [
            (&host[..], &host[..], 1000, Some(1000)),
            (host, inner, 0, Some(100_000)),
            (host, inner, 999, Some(100_999)),
            (host, inner, 1000, Some(1000)),
            (host, inner, 1001, Some(101_001)),
            (host, inner, 65_536, None),
            (host, inner, u32::MAX, None),
            // Of the same namespace: its map has the numbers of the one above.
            (inner, inner, 7, Some(7)),
            (host, none, 0, None),
            (host, none, 5, None),
            (host, b"", 0, None),
            (host, b"0 x 1\n", 0, None),
        ] {
            assert_eq!(mapped(own, theirs, number), right, "{number}");
        }
        let me = std::process::id();
        for ids in [Ids::Users, Ids::Groups] {
            assert_eq!(number_here(me, ids, 77).expect("a map"), Some(77));
        }
    }

    #[test]
    fn threads_are_told_from_later_ones_of_the_same_number() {
        let task = Task::of(own())
            .expect("it can be looked at")
            .expect("it is there");
        assert_eq!(task.process, std::process::id());
        assert!(!task.ended && task.id.started > 0);
        assert_eq!(
            Task::of(own()).expect("it can be looked at"),
            Some(task.clone())
        );
        assert_eq!(Task::of(u32::MAX).expect("nothing to look at"), None);
        assert_eq!(Task::of(0).expect("nothing to look at"), None);
        // A thread is found by its own number, which is not that of its process.
        let other = std::thread::spawn(|| Task::of(own()).expect("it can be looked at"));
        let other = other.join().expect("it ends").expect("it was there");
        assert_eq!(other.process, std::process::id());
        assert_ne!(other.id.number, other.process);
        let mut all = Task::numbers_of(std::process::id()).expect("its threads");
        assert!(all.any(|one| one == task.id.number));
        let life = Life {
            id: task.id,
            ended: false,
        };
        assert_eq!(Life::of(own()).expect("it can be looked at"), Some(life));
        assert_eq!(Life::of(0).expect("nothing to look at"), None);
        // No more is read than for so many, however long each is.
        let text = Text {
            left: Cell::new(1),
            read: Cell::new(0),
        };
        assert_eq!(Task::within(own(), &text).expect("the first"), Some(task));
        assert!(text.read.get() > 100 && text.left.get() == 0);
        let error = Task::within(own(), &text).expect_err("it was too much");
        assert!(error.to_string().contains("too many groups"), "{error}");
        assert!(cgroup(std::process::id()).is_ok());
    }
}
