//! What the numbers of tasks and mappings in samples stand for.

use std::borrow::Cow;
use std::collections::HashMap;

use perfmon_abi::compact::GuestPlace;
use perfmon_abi::wire::programs::{Described, MappingInfo, TaskInfo};

/// A thread of the guest; equal descriptions are one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TaskId(u32);

/// A file that programs have mapped, or what perf names so: `[vdso]`. The first is that of
/// which nothing is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(u32);

impl FileId {
    /// The one of which nothing is known.
    pub const UNKNOWN: Self = Self(0);
}

/// What is known of a mapped file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct FileInfo {
    /// As the guest names it; empty if it is not known.
    pub name: String,
    /// Its GNU build id in hexadecimal digits; empty: not known.
    pub build_id: String,
    /// The guest has no such file any more.
    pub deleted: bool,
    /// Device, inode and generation.
    pub inode: (u32, u64, u32),
    /// What its name begins at, where that is not the guest's root
    /// ([`MappingInfo::root`]); else empty.
    pub root: String,
    /// It is no file, but what the process with this number made while it ran, and has the
    /// name of the file with its names.
    pub made_by: Option<u32>,
}

impl FileInfo {
    /// The whole name as perf prints it.
    #[must_use]
    pub fn shown(&self) -> &str {
        match self.name.as_str() {
            "" => "[unknown]",
            name => name,
        }
    }

    /// The last part of its name, as perf prints it in a column; the whole of a name that is
    /// no file's.
    #[must_use]
    pub fn short(&self) -> Cow<'_, str> {
        if let Some(process) = self.made_by {
            return format!("[JIT] tid {process}").into();
        }
        if self.is_file() {
            let last = self.name.rsplit('/').find(|part| !part.is_empty());
            last.unwrap_or("/").into()
        } else {
            self.shown().into()
        }
    }

    /// The name from the guest's root on, or from a container's whose place is not known.
    #[must_use]
    pub fn whole_name(&self) -> String {
        format!("{}{}", self.root, self.name)
    }

    /// The number of its device, as `/proc/PID/mountinfo` has it.
    #[must_use]
    pub fn device(&self) -> String {
        let (device, ..) = self.inode;
        format!("{}:{}", device >> 20, device & 0xf_ffff)
    }

    /// It has the name of `other`, and is another file.
    fn is_rival(&self, other: &Self) -> bool {
        let id = |one: &Self| (one.inode.0, one.inode.1);
        let is_known = |one: &Self| id(one) != (0, 0) && !one.deleted;
        self.root == other.root && is_known(self) && is_known(other) && id(self) != id(other)
    }

    /// It is a file, not something that the kernel has mapped without one.
    #[must_use]
    pub fn is_file(&self) -> bool {
        self.name.starts_with('/') && !self.name.starts_with("//") && self.made_by.is_none()
    }

    /// It is memory in which a program may have made code, as perf takes it; a file without a
    /// name (memfd_create) is such, too.
    #[must_use]
    pub fn is_anonymous(&self) -> bool {
        const BEGINNINGS: [&str; 5] = ["/dev/zero", "/anon_hugepage", "/memfd:", "/SYSV", "[anon"];
        let is = |beginning: &&str| self.name.starts_with(*beginning);
        matches!(&*self.name, "//anon" | "[heap]") || BEGINNINGS.iter().any(is)
    }
}

/// Tasks and mappings of a profile.
#[derive(Clone, Debug)]
pub struct Programs {
    tasks: Vec<TaskInfo>,
    task_numbers: HashMap<u64, TaskId>,
    known_tasks: HashMap<TaskInfo, TaskId>,
    mappings: HashMap<u64, (MappingInfo, FileId)>,
    /// Numbers that stand for what others do.
    same: HashMap<u64, u64>,
    files: Vec<FileInfo>,
    known_files: HashMap<FileInfo, FileId>,
    named: HashMap<String, Vec<FileId>>,
}

impl Default for Programs {
    fn default() -> Self {
        Self {
            tasks: Vec::new(),
            task_numbers: HashMap::new(),
            known_tasks: HashMap::new(),
            mappings: HashMap::new(),
            same: HashMap::new(),
            files: vec![FileInfo::default()],
            known_files: HashMap::from([(FileInfo::default(), FileId::UNKNOWN)]),
            named: HashMap::new(),
        }
    }
}

impl Programs {
    /// Takes a description in. A number that has one keeps it.
    pub fn add(&mut self, described: Described) {
        match described {
            Described::Task(mut task) => {
                let number = std::mem::take(&mut task.number);
                let tasks = &mut self.tasks;
                let id = *self.known_tasks.entry(task).or_insert_with_key(|task| {
                    tasks.push(task.clone());
                    TaskId(index(tasks.len() - 1))
                });
                self.task_numbers.entry(number).or_insert(id);
            }
            Described::Mapping(mapping) => {
                let file = FileInfo {
                    name: mapping.name.clone(),
                    build_id: mapping.build_id.to_ascii_lowercase(),
                    deleted: mapping.deleted,
                    inode: (mapping.device, mapping.inode, mapping.generation),
                    root: mapping.root.clone(),
                    made_by: None,
                };
                let (files, named) = (&mut self.files, &mut self.named);
                let id = *self.known_files.entry(file).or_insert_with_key(|file| {
                    files.push(file.clone());
                    let id = FileId(index(files.len() - 1));
                    named.entry(file.name.clone()).or_default().push(id);
                    id
                });
                let number = mapping.number;
                self.mappings.entry(number).or_insert((mapping, id));
            }
            Described::Moment(moment) => {
                for (number, same) in (moment.number..).zip(moment.same) {
                    self.same.entry(number).or_insert(same);
                }
            }
        }
    }

    /// Adds what a process made while it ran.
    pub(super) fn add_made(&mut self, made: FileInfo) -> FileId {
        self.files.push(made);
        FileId(index(self.files.len() - 1))
    }

    /// Gives a sample's place the numbers of tasks and mappings in place of those that stand
    /// for them.
    pub fn settle(&self, place: &mut GuestPlace) {
        if self.same.is_empty() {
            return;
        }
        let settle = |number: &mut u64| *number = *self.same.get(number).unwrap_or(number);
        settle(&mut place.task);
        settle(&mut place.mapping);
        let frames = place.chain.program.iter_mut();
        frames.for_each(|frame| settle(&mut frame.mapping));
    }

    /// No task is described.
    #[must_use]
    pub fn has_no_tasks(&self) -> bool {
        self.tasks.is_empty()
    }

    /// The task with this number in samples.
    #[must_use]
    pub fn task(&self, number: u64) -> Option<TaskId> {
        self.task_numbers.get(&number).copied()
    }

    /// What is known of a task of this profile; its number is 0.
    #[must_use]
    pub fn task_info(&self, task: TaskId) -> Option<&TaskInfo> {
        self.tasks.get(task.0 as usize)
    }

    /// All tasks; their numbers are 0.
    #[must_use]
    pub fn tasks(&self) -> &[TaskInfo] {
        &self.tasks
    }

    /// The mapping with this number in samples, and its file.
    #[must_use]
    pub fn mapping(&self, number: u64) -> Option<(&MappingInfo, FileId)> {
        let found = self.mappings.get(&number);
        found.map(|(mapping, file)| (mapping, *file))
    }

    /// All mappings, in no order, and their files.
    pub fn mappings(&self) -> impl Iterator<Item = (&MappingInfo, FileId)> {
        self.mappings
            .values()
            .map(|(mapping, file)| (mapping, *file))
    }

    /// What is known of a file of this profile.
    #[must_use]
    pub fn file(&self, file: FileId) -> &FileInfo {
        &self.files[(file.0 as usize).min(self.files.len() - 1)]
    }

    /// What is known of a file, and of others that have its name.
    #[must_use]
    pub fn file_and_others(&self, file: FileId) -> (&FileInfo, Vec<&FileInfo>) {
        let info = self.file(file);
        let named = self.named.get(&info.name).into_iter().flatten();
        let others = named.map(|other| self.file(*other));
        (info, others.filter(|other| info.is_rival(other)).collect())
    }

    /// All files.
    pub fn files(&self) -> impl Iterator<Item = (FileId, &FileInfo)> {
        (0u32..).map(FileId).zip(&self.files)
    }
}

/// No profile has more than 2^32 descriptions in memory.
fn index(position: usize) -> u32 {
    u32::try_from(position).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use perfmon_abi::compact::{CallChain, ProgramFrame};
    use perfmon_abi::wire::programs::MomentInfo;

    #[test]
    fn numbers_of_a_moment_stand_for_others() {
        let mut programs = Programs::default();
        for (number, same) in [(5, vec![90, 91, 0, 91]), (5, vec![7])] {
            programs.add(Described::Moment(MomentInfo { number, same }));
        }
        let frame = |mapping| ProgramFrame {
            address: 1,
            mapping,
        };
        let place = |task, mapping, frames: [u64; 3]| GuestPlace {
            task,
            mapping,
            chain: CallChain {
                program: frames.map(frame).to_vec(),
                ..CallChain::default()
            },
            ..GuestPlace::default()
        };
        let mut found = place(5, 6, [7, 8, 9]);
        programs.settle(&mut found);
        assert_eq!(found, place(90, 91, [0, 91, 9]), "the first word counts");
        // It is done once.
        programs.settle(&mut found);
        assert_eq!(found, place(90, 91, [0, 91, 9]));
    }
}
