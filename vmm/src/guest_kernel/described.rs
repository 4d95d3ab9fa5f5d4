//! What samples have met in the guest, described for tools.

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use guest_view::{BuildId, File, Inside, Mapping, Path, ProgramMemory, Task};
use perfmon_abi::wire::programs::{Described, MappingInfo, ProgramsInfo, TaskInfo};

use crate::sync::lock;

/// Descriptions that wait for the thread that makes them. A sample that finds no room says
/// that it does not know its task.
const WAITING: usize = 1024;
/// Descriptions that are kept for tools that have not asked yet, and most bytes of them.
const KEPT: usize = 1 << 16;
const KEPT_BYTES: usize = 16 << 20;
/// Most descriptions of one answer, and bytes of them, but for one. The thread that serves all
/// tools writes it: the others wait so long.
const ANSWER: usize = 1024;
const ANSWER_BYTES: usize = 256 << 10;
/// Files that are remembered.
const FILES: usize = 1 << 12;
/// The longest path that is told, in bytes: as for programs (`PATH_MAX`).
const LONGEST_PATH: usize = 4096;

/// What a vCPU has met for the first time.
#[derive(Debug)]
pub(super) enum News {
    /// A guest runs with this CR3, and its kernel is not the one that was shown, in this
    /// version.
    Kernel(u64, u64),
    /// vCPUs look, which they did not for a while.
    Looks,
    /// What runs is not where a kernel of Linux is.
    Elsewhere,
    Task(u64, Task),
    Mapping(u64, ProgramMemory, Mapping),
}

/// The descriptions of a VM.
#[derive(Debug)]
pub(super) struct Descriptions {
    news: SyncSender<News>,
    /// Of tasks and mappings, the last one that was given.
    number: AtomicU64,
    /// Tasks and mappings that are on their way.
    pending: AtomicU64,
    /// Numbers below are of descriptions that are not kept any more.
    floor: AtomicU64,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    /// Descriptions before the first of `list`.
    before: u64,
    list: VecDeque<Described>,
    /// What they take.
    bytes: usize,
    /// Why nothing is known.
    unknown: Option<String>,
    agent: AgentState,
}

/// What an agent in the guest has to say of why nothing is known.
#[derive(Debug, Default)]
pub(super) enum AgentState {
    /// None is expected.
    #[default]
    Unused,
    /// It answers.
    There,
    /// It does not, and why.
    Away(String),
}

impl Kept {
    fn why(&self) -> Option<String> {
        let unknown = self.unknown.as_ref()?;
        match &self.agent {
            AgentState::Unused => Some(unknown.clone()),
            AgentState::There => None,
            AgentState::Away(why) => Some(format!("{unknown}; {why}")),
        }
    }
}

impl Descriptions {
    pub(super) fn new() -> (Self, Receiver<News>) {
        let (news, receiver) = sync_channel(WAITING);
        let descriptions = Self {
            news,
            number: AtomicU64::new(0),
            pending: AtomicU64::new(0),
            floor: AtomicU64::new(0),
            kept: Mutex::default(),
        };
        (descriptions, receiver)
    }

    /// Tells what is no description.
    pub(super) fn tell(&self, news: News) {
        // Whoever finds no room tells it again.
        let _ = self.news.try_send(news);
    }

    /// A number for what `news` tells; none if there is no room.
    pub(super) fn announce(&self, news: impl FnOnce(u64) -> News) -> Option<u64> {
        self.reserve(1, |number| self.news.try_send(news(number)).is_ok())
    }

    /// The first of so many numbers that one description is of, if `tell` finds room for it.
    pub(super) fn reserve(&self, count: u64, tell: impl FnOnce(u64) -> bool) -> Option<u64> {
        // First, so that nobody who sees a later number takes this one for described.
        self.pending.fetch_add(1, Ordering::AcqRel);
        let number = self.number.fetch_add(count, Ordering::AcqRel) + 1;
        if tell(number) {
            return Some(number);
        }
        self.pending.fetch_sub(1, Ordering::AcqRel);
        None
    }

    /// Adds what has no number yet, and gives it one.
    pub(super) fn add_new(&self, describe: impl FnOnce(u64) -> Described) -> u64 {
        self.pending.fetch_add(1, Ordering::AcqRel);
        let number = self.number.fetch_add(1, Ordering::AcqRel) + 1;
        self.add(describe(number));
        number
    }

    pub(super) fn add(&self, described: Described) {
        let mut kept = lock(&self.kept);
        kept.bytes += bytes_of(&described);
        kept.list.push_back(described);
        while kept.list.len() > KEPT || kept.bytes > KEPT_BYTES {
            let Some(oldest) = kept.list.pop_front() else {
                break;
            };
            kept.bytes = kept.bytes.saturating_sub(bytes_of(&oldest));
            kept.before += 1;
            self.floor.fetch_max(oldest.number() + 1, Ordering::Relaxed);
        }
        drop(kept);
        self.pending.fetch_sub(1, Ordering::AcqRel);
    }

    /// What has this number is told to tools that ask now.
    pub(super) fn is_kept(&self, number: u64) -> bool {
        number >= self.floor.load(Ordering::Relaxed)
    }

    /// Why no task is known, or that there is no such reason.
    pub(super) fn set_unknown(&self, why: Option<String>) {
        lock(&self.kept).unknown = why;
    }

    /// What an agent in the guest has to say of it.
    pub(super) fn set_agent(&self, agent: AgentState) {
        lock(&self.kept).agent = agent;
    }

    /// The descriptions behind the first `since`.
    pub(super) fn after(&self, since: u64) -> ProgramsInfo {
        let pending = self.pending.load(Ordering::Acquire) > 0;
        let kept = lock(&self.kept);
        let lost = kept.before.saturating_sub(since);
        let skip = usize::try_from(since.saturating_sub(kept.before)).unwrap_or(usize::MAX);
        let mut bytes = 0;
        let fits = |one: &&Described| {
            let is_first = bytes == 0;
            bytes += bytes_of(one);
            is_first || bytes <= ANSWER_BYTES
        };
        let some = kept.list.iter().skip(skip).take(ANSWER);
        let described: Vec<_> = some.take_while(fits).cloned().collect();
        let all = kept.before + kept.list.len() as u64;
        let next = (since.max(kept.before) + described.len() as u64).min(all);
        ProgramsInfo {
            described,
            more: pending || next < all,
            next,
            lost,
            unknown: kept.why(),
        }
    }
}

/// What is known of a file, as far as it is.
#[derive(Clone, Debug, Default)]
pub(super) struct FileFacts {
    pub(super) path: Option<Path>,
    pub(super) build_id: Option<BuildId>,
}

/// Files that were looked at already.
#[derive(Debug, Default)]
pub(super) struct Files(HashMap<File, FileFacts>);

impl Files {
    /// What is known of `file`. `find` looks for what is not.
    pub(super) fn of(&mut self, file: &File, find: impl FnOnce(&mut FileFacts)) -> FileFacts {
        if self.0.len() >= FILES {
            self.0.clear();
        }
        let facts = self.0.entry(*file).or_default();
        if facts.path.is_none() || facts.build_id.is_none() {
            find(facts);
            let is_long = |path: &mut Path| path.name.len().max(path.root.len()) > LONGEST_PATH;
            facts.path.take_if(is_long);
        }
        facts.clone()
    }
}

/// What it takes, about.
fn bytes_of(described: &Described) -> usize {
    let names = match described {
        Described::Task(task) => task.comm.len() + task.process.len() + task.root.len(),
        Described::Mapping(mapping) => {
            mapping.name.len() + mapping.build_id.len() + mapping.root.len()
        }
        Described::Moment(moment) => size_of_val(moment.same.as_slice()),
    };
    size_of::<Described>() + names
}

pub(super) fn of_task(number: u64, task: &Task, inside: Inside) -> Described {
    let is_short = |root: &String| root.len() <= LONGEST_PATH;
    Described::Task(TaskInfo {
        number,
        pid: task.tgid,
        tid: task.pid,
        comm: task.comm.to_string(),
        process: task.process.to_string(),
        started_ns: task.started,
        kernel: task.is_kernel,
        inner_pid: inside.pid.unwrap_or(0),
        root: Some(inside.root).filter(is_short).unwrap_or_default(),
    })
}

pub(super) fn of_mapping(number: u64, mapping: &Mapping, facts: &FileFacts) -> Described {
    // As perf names what is no file.
    let name = match (&mapping.file, mapping.is_vdso) {
        (Some(_), _) => facts.path.as_ref().map_or("", |path| &path.name),
        (None, true) => "[vdso]",
        (None, false) => "//anon",
    };
    let file = mapping.file.as_ref();
    Described::Mapping(MappingInfo {
        number,
        start: mapping.start,
        end: mapping.end,
        offset: mapping.offset,
        name: name.to_owned(),
        deleted: facts.path.as_ref().is_some_and(|path| path.deleted),
        device: file.map_or(0, |file| file.device),
        inode: file.map_or(0, |file| file.inode),
        generation: file.map_or(0, |file| file.generation),
        build_id: facts.build_id.map_or(String::new(), digits),
        root: facts
            .path
            .as_ref()
            .map_or(String::new(), |path| path.root.clone()),
    })
}

fn digits(id: BuildId) -> String {
    id.bytes()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(number: u64) -> Described {
        Described::Task(TaskInfo {
            number,
            ..TaskInfo::default()
        })
    }

    fn numbers(info: &ProgramsInfo) -> Vec<u64> {
        info.described.iter().map(Described::number).collect()
    }

    #[test]
    fn answers_follow_each_other() {
        let (all, news) = Descriptions::new();
        assert_eq!(all.after(0), ProgramsInfo::default());
        for _ in 0..1500 {
            let number = all.announce(|number| News::Kernel(number, 0)).unwrap_or(0);
            let pending = all.after(0);
            assert!(pending.more, "it is on its way");
            all.add(task(number));
            assert!(news.try_recv().is_ok());
        }
        let first = all.after(0);
        assert_eq!((first.next, first.more, first.lost), (1024, true, 0));
        let second = all.after(first.next);
        assert_eq!((second.next, second.more), (1500, false));
        assert_eq!(numbers(&second), (1025..=1500).collect::<Vec<_>>());
        assert_eq!(all.after(1500).described, []);
        assert_eq!(
            all.after(u64::MAX).next,
            1500,
            "nobody has more than there are"
        );
    }

    #[test]
    fn old_ones_are_given_up_and_counted() {
        let (all, _news) = Descriptions::new();
        for number in 1..=KEPT as u64 + 5 {
            all.pending.fetch_add(1, Ordering::Relaxed);
            all.add(task(number));
        }
        let answer = all.after(2);
        assert_eq!(answer.lost, 3);
        assert_eq!(numbers(&answer).first(), Some(&6));
        assert!(all.is_kept(6) && !all.is_kept(5), "it is described anew");
    }

    #[test]
    fn long_names_take_no_more_room_than_short_ones() {
        let (all, _news) = Descriptions::new();
        let name = "x".repeat(LONGEST_PATH);
        for number in 1..=2 * (KEPT_BYTES / LONGEST_PATH) as u64 {
            all.pending.fetch_add(1, Ordering::Relaxed);
            all.add(Described::Mapping(MappingInfo {
                number,
                name: name.clone(),
                ..MappingInfo::default()
            }));
        }
        assert!(lock(&all.kept).bytes <= KEPT_BYTES);
        let answer = all.after(u64::MAX - 1);
        assert_eq!(answer.described, []);
        let answer = all.after(0);
        let names: usize = answer.described.iter().map(bytes_of).sum();
        assert!(answer.more && names <= ANSWER_BYTES && !answer.described.is_empty());
    }

    #[test]
    fn without_room_there_is_no_number() {
        let (all, _news) = Descriptions::new();
        let given = (0..2 * WAITING).filter_map(|_| all.announce(|number| News::Kernel(number, 0)));
        assert_eq!(given.count(), WAITING);
        assert_eq!(all.pending.load(Ordering::Relaxed), WAITING as u64);
    }
}
