//! PROGRAMS: what the numbers of tasks and mappings in samples stand for. Argument and answer
//! are documents (JSON).

use serde::{Deserialize, Serialize};

/// The number of the command. It has one argument (`nargs` 1): a [`ProgramsRequest`]. It
/// answers with a [`ProgramsInfo`] at once.
pub const PROGRAMS: u16 = 0x118;

/// Which descriptions are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProgramsRequest {
    /// Those after this many: 0 at first, then [`ProgramsInfo::next`].
    pub since: u64,
}

/// Descriptions of what samples have met, in the order in which they were made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramsInfo {
    /// Some of them, the oldest first.
    pub described: Vec<Described>,
    /// To be asked for next.
    pub next: u64,
    /// There are, or will be, more of samples that were taken already: ask again.
    pub more: bool,
    /// How many between `since` and the first of these are not kept any more.
    pub lost: u64,
    /// Why nothing is known of the guest's tasks, if it is so, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unknown: Option<String>,
}

/// What a number stands for. Tasks and mappings share one row of numbers, from 1 on, and one
/// number never stands for two things.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Described {
    /// A thread of the guest.
    Task(TaskInfo),
    /// Part of a program's memory.
    Mapping(MappingInfo),
    /// Numbers of one sample, each of which stands for what an earlier one does.
    Moment(MomentInfo),
}

impl Described {
    /// Its number in samples, the last one if there are several.
    #[must_use]
    pub fn number(&self) -> u64 {
        match self {
            Self::Task(task) => task.number,
            Self::Mapping(mapping) => mapping.number,
            Self::Moment(moment) => {
                let further = moment.same.len().saturating_sub(1) as u64;
                moment.number.saturating_add(further)
            }
        }
    }
}

/// What is known later than a sample is taken: it has numbers of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MomentInfo {
    /// The first of its numbers; the others follow.
    pub number: u64,
    /// What each of them stands for: a number that was described before; 0: not known.
    pub same: Vec<u64>,
}

/// A thread of a program, or of the kernel. What has another name later has another number.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TaskInfo {
    /// Its number in samples.
    pub number: u64,
    /// The process in the guest; 0 for the idle threads.
    pub pid: u32,
    /// The thread.
    pub tid: u32,
    /// The thread's name. Control characters are replaced.
    pub comm: String,
    /// The name of the process's first thread.
    pub process: String,
    /// When the thread began, in ns since the guest's kernel did.
    pub started_ns: u64,
    /// It is one of the kernel's own.
    pub kernel: bool,
    /// The process's number in its own PID namespace, a container's; 0: it is the guest's, or it
    /// is not known.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub inner_pid: u32,
    /// The process's root directory, if that is not the one of the guest's first process: as
    /// [`MappingInfo::root`]. Empty: it is that root, or it is not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub root: String,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// What a program has mapped.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MappingInfo {
    /// Its number in samples.
    pub number: u64,
    /// Its first address.
    pub start: u64,
    /// Behind its last one.
    pub end: u64,
    /// Bytes from the start of the file to `start`.
    pub offset: u64,
    /// The file as the guest names it, or as perf names what is no file: `[vdso]`,
    /// `//anon`. Control characters are replaced. Empty: not known.
    pub name: String,
    /// The file has no name any more.
    pub deleted: bool,
    /// Its device as `MAJOR << 20 | MINOR`, and its inode there; 0 without a file.
    pub device: u32,
    pub inode: u64,
    /// Tells inodes that had the same number.
    pub generation: u32,
    /// The file's GNU build id, in hexadecimal digits; empty: not known.
    pub build_id: String,
    /// What `name` begins at, if that is not the root of the guest's first process but, say,
    /// a container's: a folder's name from that root on, `/var/lib/machines/web`, or the number
    /// of another device, with the folder's name there if it has one, `0:53`. Empty: it is
    /// that root, or it is not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub root: String,
}
