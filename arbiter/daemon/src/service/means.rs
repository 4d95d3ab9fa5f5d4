//! What the names in a request mean on this host: threads by their numbers, a control group by
//! its path. What was looked at is counted: it is paid for by who has asked.

use std::collections::BTreeMap;
use std::sync::Arc;

use arbiter_host::{Group, HostArbiter, LeaseId, Scope, ThreadId};

use super::call::Calling;
use crate::convert::Means;
use crate::groups::{
    DEEPEST, Job, LateTree, NamedGroup, NoGroup, Tree, absolute, innermost_leased, path_of,
};
use crate::peer::Client;
use crate::task::Task;

pub(super) struct Meant<'a> {
    client: &'a Client,
    operator: bool,
    arbiter: &'a HostArbiter,
    job: Job,
    tree: &'a LateTree,
    looks: &'a mut u64,
}

/// To look where the control groups are mounted costs as much as so many calls: there may be
/// thousands of mounts.
const MOUNTS: u64 = 200;

/// So many threads with leases are looked at one by one, which takes as long as to look through the
/// largest group.
const MOST_LEASED: usize = 4096;

impl Means for Meant<'_> {
    fn threads(&mut self, numbers: &[u32]) -> Result<(Vec<ThreadId>, Option<Arc<Group>>), String> {
        let threads = self.client.threads(numbers, self.operator, self.looks);
        let threads = threads.map_err(|why| why.to_string())?;
        let of = self.leased_group_of(&threads)?;
        // Of those of which none runs any more the end is told, whatever they were in.
        Ok((threads, of.flatten()))
    }

    fn own_group(&mut self) -> Result<Option<(ThreadId, Arc<Group>)>, String> {
        // Who is in namespaces that are not seen from here is in no group that has a lease.
        if self.arbiter.leased_groups().is_empty() || self.client.pid == 0 {
            return Ok(None);
        }
        // Whoever has its connection now may be in one of these.
        let ended = "the process that connected has ended, or cannot be looked at, so it cannot be \
                     told whether its control group has a lease; connect anew";
        let process = self.client.process.ok_or(ended)?;
        if self.client.cgroup.is_none() {
            return Ok(None);
        }
        let of = self.leased_group_of(&[process])?.ok_or(ended)?;
        Ok(of.map(|of| (process, of)))
    }

    fn group(&mut self, path: &str) -> Result<Group, String> {
        self.found(path).map_err(|why| why.to_string())
    }
}

impl<'a> Meant<'a> {
    /// What somebody means who calls. A control group is to be leased for `job`, in `tree`; `looks`
    /// grows by what was looked at.
    pub(super) fn new(
        calling: &Calling<'a>,
        arbiter: &'a HostArbiter,
        job: Job,
        tree: &'a LateTree,
        looks: &'a mut u64,
    ) -> Self {
        Meant {
            client: calling.client,
            operator: calling.caller.operator,
            arbiter,
            job,
            tree,
            looks,
        }
    }

    fn found(&mut self, path: &str) -> Result<Group, NoGroup> {
        let path = absolute(path, self.client.cgroup.as_deref())?;
        let named = self.find(&path)?;
        named.check(self.job, self.looks)?;
        self.has_no_leased_thread(&named)?;
        Ok(named.group)
    }

    /// The group of a path. What is looked at for it is counted also where there is none.
    fn find(&mut self, path: &str) -> Result<NamedGroup, NoGroup> {
        self.tree_for(path.as_bytes())?.find(path)
    }

    /// Where the control groups are, to look for one there. That is counted.
    fn tree_for(&mut self, path: &[u8]) -> Result<&Tree, NoGroup> {
        let tree = known(self.tree, self.looks)?;
        let names = path.split(|byte| *byte == b'/');
        *self.looks += names.take(DEEPEST).count() as u64;
        Ok(tree)
    }

    /// A thread counts for its lease and for that of its group at a time, which nobody has
    /// reckoned with.
    fn has_no_leased_thread(&mut self, named: &NamedGroup) -> Result<(), NoGroup> {
        let leases = self.arbiter.leases();
        let mut for_threads = leases.filter_map(|lease| match &lease.terms.scope {
            Scope::Part(part) if part.with_others => None,
            Scope::Thread(_) | Scope::Part(_) => Some((lease.id, lease.terms.scope.threads())),
            Scope::Cpu | Scope::Group(_) => None,
        });
        let Some(first) = for_threads.next() else {
            return Ok(());
        };
        let all = std::iter::once(first).chain(for_threads);
        let mut all = all.flat_map(|(id, threads)| threads.iter().map(move |one| (id, *one)));
        let leased = match named.threads(self.looks) {
            Ok(inside) => all.find(|(_, thread)| inside.contains(&thread.number)),
            // So it is the other way round: where does each run that has a lease?
            Err(NoGroup::TooMany(path)) => {
                let all: Vec<_> = all.take(MOST_LEASED + 1).collect();
                if all.len() > MOST_LEASED {
                    return Err(NoGroup::TooMany(path));
                }
                *self.looks += all.len() as u64;
                first_in(named, all)?
            }
            Err(why) => return Err(why),
        };
        match leased {
            None => Ok(()),
            Some((id, thread)) => Err(NoGroup::Leased {
                path: named.group.path.clone(),
                thread: thread.number,
                lease: id.0,
            }),
        }
    }

    /// The innermost control group with a lease in which these threads run, which has to be the
    /// same for all: that one's lease is what theirs is taken out of. `None`: none of them runs
    /// any more.
    fn leased_group_of(
        &mut self,
        threads: &[ThreadId],
    ) -> Result<Option<Option<Arc<Group>>>, String> {
        if self.arbiter.leased_groups().is_empty() {
            return Ok(Some(None));
        }
        let mut seen: BTreeMap<Vec<u8>, Option<Arc<Group>>> = BTreeMap::new();
        let mut first: Option<(ThreadId, Option<Arc<Group>>)> = None;
        for &thread in threads {
            *self.looks += 1;
            let path = path_of(thread).map_err(|error| {
                format!(
                    "the control group of thread {} cannot be told, and may have a lease: {error}",
                    thread.number
                )
            })?;
            // One that has ended runs nowhere, and its end is told of.
            let Some(path) = path else { continue };
            let of = match seen.get(&path) {
                Some(of) => of.clone(),
                None => self.leased(&path)?,
            };
            seen.insert(path, of.clone());
            let id = |of: &Option<Arc<Group>>| of.as_ref().map(|group| group.id);
            match &first {
                None => first = Some((thread, of)),
                Some((other, its)) if id(its) != id(&of) => {
                    return Err(format!(
                        "threads {} and {} do not run in the same control group with a lease; ask \
                         for each by itself",
                        other.number, thread.number
                    ));
                }
                Some(_) => {}
            }
        }
        Ok(first.map(|(_, of)| of))
    }

    /// The innermost with a lease of the groups that a path leads through.
    fn leased(&mut self, path: &[u8]) -> Result<Option<Arc<Group>>, String> {
        if path.is_empty() {
            return Ok(None);
        }
        match self.tree_for(path).and_then(|tree| tree.chain(path)) {
            // Removed since, with nothing in it.
            Err(NoGroup::NotThere(_)) => Ok(None),
            Ok(chain) => Ok(innermost_leased(self.arbiter, &chain)),
            Err(why) => Err(why.to_string()),
        }
    }
}

/// The first of some threads with leases that runs in a group or below it.
fn first_in(
    named: &NamedGroup,
    leased: Vec<(LeaseId, ThreadId)>,
) -> Result<Option<(LeaseId, ThreadId)>, NoGroup> {
    for (id, thread) in leased {
        let path = path_of(thread);
        let path = path.map_err(|error| NoGroup::Io(named.group.path.clone(), error))?;
        if path.is_some_and(|path| named.has(&path)) {
            return Ok(Some((id, thread)));
        }
    }
    Ok(None)
}

/// Where the control groups are. To look for that is counted.
fn known<'a>(tree: &'a LateTree, looks: &mut u64) -> Result<&'a Tree, NoGroup> {
    if !tree.is_known() {
        *looks += MOUNTS;
    }
    tree.get()
}

/// Whether a thread runs in a leased group or below it.
pub(super) fn runs_in(
    task: &Task,
    group: &Group,
    tree: &LateTree,
    looks: &mut u64,
) -> Result<bool, NoGroup> {
    *looks += 1 + DEEPEST as u64 / 4;
    known(tree, looks)?.runs_in(task.id.number, group)
}
