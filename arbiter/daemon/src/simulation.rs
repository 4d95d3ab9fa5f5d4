//! The service played through: clients that come, go, and lose their answers; an arbiter that
//! crashes between any two steps, or while it writes; a disk that is full for a while; time that
//! jumps; control groups that are made, run in, emptied, and removed, of which others of their
//! names come, and threads that move between them; leases of parts of them, and for users that do
//! not ask themselves. After each step nobody believes that it holds
//! what another does, and nobody has lost what was acknowledged.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use arbiter::{CounterSet, Nanos};
use arbiter_host::{
    Asker, BootTime, Cause, CpuSet, Demand, Group, GroupId, HostArbiter, Lease, LeaseId,
    LeaseScope, Outcome, Owner, Part, PmuId, Scope, TenantId, Terms, ThreadId, Waits,
};
use proptest::prelude::*;
use serde_json::{Value, json};
use umpire_lease::{self as wire, INTERFACE};
use varlink::Request;

use crate::commit::{Committer, Journal};
use crate::config::{ArbiterConfig, Members, PmuConfig, WatchdogConfig};
use crate::group_watch::Groups;
use crate::journal::{self, Entry, HEADER, header, recall};
use crate::peer::Client;
use crate::played::{self, PlayedGroups};
use crate::service::{ConnectionId, Service};
use crate::task::Life;

const BOOT: &str = "0b5c6c3e-6f0b-4f6a-a5ae-3e6f5a1d2c3b";
const COUNTERS: u32 = 4;
const MS: u64 = 1_000_000;
const WINDOW: u64 = 200 * MS;
/// A user who runs nothing here.
const ABSENT: u32 = 12_345;

/// A disk that may be full, and may not take what the kernel has for it.
#[derive(Debug, Default)]
struct Disk {
    bytes: Vec<u8>,
    full: bool,
    fails: bool,
    /// It was written anew so many times.
    anew: usize,
}

impl Journal for Disk {
    fn append(&mut self, entries: &[Entry]) -> io::Result<()> {
        if self.full && !entries.is_empty() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        journal::write(entries, &mut self.bytes);
        Ok(())
    }

    fn compact(&mut self, entries: &[Entry]) -> io::Result<()> {
        if self.full {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.bytes = header(BOOT);
        self.anew += 1;
        self.append(entries)
    }

    fn is_long(&self) -> bool {
        self.bytes.len() > 20_000
    }

    fn sync(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.fails) {
            return Err(io::Error::other("the disk is broken"));
        }
        Ok(())
    }
}

/// The groups that there may be.
const GROUPS: [&str; 4] = ["/a", "/a/b", "/a/b/c", "/d"];
/// Threads that run in them.
const THREADS: usize = 3;

/// For whom a lease is to be.
#[derive(Clone, Copy, Debug)]
enum For {
    Cpu,
    Group(usize),
    Thread(usize),
    /// For whatever this thread, which is taken for a process that asks, has others run in the
    /// group in which it runs.
    Part(usize),
    /// For the user who runs all that runs here, or for one who runs nothing, by somebody else.
    Job {
        group: usize,
        absent: bool,
    },
}

#[derive(Clone, Debug)]
enum Step {
    Ask {
        of: For,
        counters: u32,
        at_least: u32,
        more: bool,
        waits_ms: Option<i64>,
        lasts_ms: Option<u64>,
        guaranteed: bool,
    },
    Release {
        which: usize,
        keep: u32,
    },
    Renew {
        which: usize,
    },
    Revoke {
        which: usize,
    },
    Gone {
        which: usize,
    },
    Pass {
        ms: u64,
    },
    Full {
        full: bool,
    },
    /// The disk has not taken what was written; the arbiter learns of it in the middle of a
    /// batch.
    Fails,
    /// The batch so far is decided, and perhaps written, so many percent of it; its answers never
    /// come.
    Crash {
        written: Option<usize>,
    },
    Make {
        group: usize,
    },
    Remove {
        group: usize,
    },
    /// A thread runs in a group from now on, or in none.
    Move {
        thread: usize,
        group: Option<usize>,
    },
    /// It is looked at what the kernel does not tell.
    Look,
    /// The CPU goes offline, or comes back.
    Cpu {
        online: bool,
    },
    /// The kernel's watchdog is wanted, or not any more.
    Watchdog {
        wanted: bool,
    },
    /// The batch so far is answered.
    Settle,
}

/// Somebody asks, and so many counters are enough for it at most.
fn asking(of: impl Strategy<Value = For>, enough: u32) -> impl Strategy<Value = Step> {
    let ask = (
        of,
        1u32..=COUNTERS,
        1u32..=enough,
        any::<bool>(),
        prop_oneof![Just(None), Just(Some(-1)), (1i64..300).prop_map(Some)],
        proptest::option::of(1u64..500),
        any::<bool>(),
    );
    ask.prop_map(
        |(of, counters, at_least, more, waits_ms, lasts_ms, guaranteed)| Step::Ask {
            of,
            counters,
            at_least: at_least.min(counters),
            more,
            waits_ms,
            lasts_ms,
            guaranteed,
        },
    )
}

fn crash() -> impl Strategy<Value = Step> {
    proptest::option::of(0usize..=100).prop_map(|written| Step::Crash { written })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => asking(Just(For::Cpu), COUNTERS),
        3 => (0usize..8, 0u32..3).prop_map(|(which, keep)| Step::Release { which, keep }),
        2 => (0usize..8).prop_map(|which| Step::Renew { which }),
        1 => (0usize..8).prop_map(|which| Step::Revoke { which }),
        2 => (0usize..8).prop_map(|which| Step::Gone { which }),
        3 => prop_oneof![0u64..20, 50u64..800].prop_map(|ms| Step::Pass { ms }),
        1 => any::<bool>().prop_map(|full| Step::Full { full }),
        1 => Just(Step::Fails),
        1 => crash(),
        1 => any::<bool>().prop_map(|online| Step::Cpu { online }),
        1 => any::<bool>().prop_map(|wanted| Step::Watchdog { wanted }),
        8 => Just(Step::Settle),
    ]
}

/// Mostly of groups and what runs in them.
fn step_in_groups() -> impl Strategy<Value = Step> {
    let of = prop_oneof![
        1 => Just(For::Cpu),
        5 => (0..GROUPS.len()).prop_map(For::Group),
        3 => (0..THREADS).prop_map(For::Thread),
        3 => (0..THREADS).prop_map(For::Part),
        2 => (0..GROUPS.len(), any::<bool>())
            .prop_map(|(group, absent)| For::Job { group, absent }),
    ];
    let moves = (0..THREADS, proptest::option::weighted(0.7, 0..GROUPS.len()));
    prop_oneof![
        9 => asking(of, 2),
        3 => (0usize..8, 0u32..3).prop_map(|(which, keep)| Step::Release { which, keep }),
        1 => (0usize..8).prop_map(|which| Step::Revoke { which }),
        1 => (0usize..8).prop_map(|which| Step::Gone { which }),
        2 => prop_oneof![0u64..20, 50u64..800].prop_map(|ms| Step::Pass { ms }),
        1 => any::<bool>().prop_map(|full| Step::Full { full }),
        3 => crash(),
        4 => (0..GROUPS.len()).prop_map(|group| Step::Make { group }),
        2 => (0..GROUPS.len()).prop_map(|group| Step::Remove { group }),
        4 => moves.prop_map(|(thread, group)| Step::Move { thread, group }),
        4 => Just(Step::Look),
        4 => Just(Step::Settle),
    ]
}

/// What a client was told of its lease.
#[derive(Clone, Copy, Debug)]
struct Belief {
    connection: ConnectionId,
    holds: u32,
    /// It may lose something by a revocation that it was told of, or by its time.
    certain: bool,
}

/// What a lease had when all was answered.
#[derive(Clone, Copy, Debug)]
struct Kept {
    holds: usize,
    uid: u32,
    by: Option<Asker>,
}

struct World {
    service: Service,
    committer: Committer<Disk>,
    now: BootTime,
    next: u64,
    beliefs: BTreeMap<LeaseId, Belief>,
    /// Connections that are closed: nobody hears what is said there.
    gone: BTreeSet<ConnectionId>,
    /// Somebody has turned the watchdog on, and not off.
    wanted: bool,
    /// The watchdog is on, and has a counter.
    watchdog: bool,
    online: bool,
    host: PlayedGroups,
    watch: Groups,
    /// Of leases in groups, those above of which they are parts.
    within: BTreeMap<LeaseId, BTreeSet<GroupId>>,
    /// What leases in groups were when all was answered last.
    acknowledged: BTreeMap<LeaseId, Kept>,
    /// Leases in whose groups something was seen to run, by this arbiter.
    ran: BTreeSet<LeaseId>,
}

/// The user and the group of this process.
fn own_ids() -> (u32, u32) {
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    (user.as_raw(), group.as_raw())
}

fn config(root: &Path) -> ArbiterConfig {
    ArbiterConfig {
        members: vec![Members {
            users: vec![own_ids().0, ABSENT],
            operator: true,
            for_others: true,
            ..Members::default()
        }],
        root: root.to_owned(),
        arrive: Nanos(300 * MS),
        pmus: vec![PmuConfig::stated(4, 0).expect("four counters")],
        claim_window: Nanos(WINDOW),
        state: Some("kept".into()),
        watchdog: WatchdogConfig {
            stated: true,
            keep: false,
            only: None,
        },
        ..ArbiterConfig::default()
    }
    .with_watchdog()
    .expect("there is a folder")
}

fn client() -> Client {
    let life = Life::of(std::process::id()).expect("it can be seen");
    Client {
        pid: std::process::id(),
        uid: own_ids().0,
        process: life.map(|life| life.id),
        is_inner: Some(false),
        ..Client::default()
    }
}

/// A thread, taken for a process that asks from the group in which it runs.
fn client_in_group(thread: u32) -> Client {
    let life = Life::of(thread).expect("it can be seen");
    Client {
        process: life.map(|life| life.id),
        cgroup: played::cgroup(thread),
        ..client()
    }
}

/// Threads of this process, which do nothing.
fn threads() -> [u32; THREADS] {
    static ALL: OnceLock<[u32; THREADS]> = OnceLock::new();
    *ALL.get_or_init(|| {
        std::array::from_fn(|_| {
            let (tells, number) = std::sync::mpsc::channel();
            std::thread::spawn(move || {
                let own = std::fs::read_link("/proc/thread-self").expect("it runs");
                tells.send(own).expect("it is waited for");
                loop {
                    std::thread::park();
                }
            });
            let own = number.recv().expect("it starts");
            let number = own.file_name().and_then(|name| name.to_str());
            number.and_then(|name| name.parse().ok()).expect("a number")
        })
    })
}

fn arbiter(config: &ArbiterConfig) -> HostArbiter {
    let pmus = config.host_pmus(&CpuSet::from_iter([0]));
    HostArbiter::new(pmus, config.policy.clone()).expect("the policy fits")
}

fn service(root: &Path) -> Service {
    let config = config(root);
    Service::new(arbiter(&config), config)
}

impl World {
    fn new() -> Self {
        let disk = Disk {
            bytes: header(BOOT),
            ..Disk::default()
        };
        let host = PlayedGroups::new(&threads());
        World {
            service: service(host.root()),
            watch: Groups::new(64, host.root()).expect("an epoll"),
            host,
            within: BTreeMap::new(),
            acknowledged: BTreeMap::new(),
            ran: BTreeSet::new(),
            committer: Committer::new(disk),
            now: BootTime(0),
            next: 1,
            beliefs: BTreeMap::new(),
            gone: BTreeSet::new(),
            wanted: false,
            watchdog: false,
            online: true,
        }
    }

    fn cpus(&self) -> CpuSet {
        CpuSet::from_iter(self.online.then_some(0))
    }

    fn set_watchdog(&mut self) {
        let cpus = self.wanted.then(|| CpuSet::from_iter([0]));
        self.service.set_watchdog(cpus, self.now);
    }

    fn call(&mut self, from: ConnectionId, method: &str, parameters: Value, more: bool) {
        self.call_by(&client(), from, (method, parameters), more);
    }

    fn call_by(
        &mut self,
        client: &Client,
        from: ConnectionId,
        (method, parameters): (&str, Value),
        more: bool,
    ) {
        let mut request = Request::create(format!("{INTERFACE}.{method}"), Some(parameters));
        request.more = more.then_some(true);
        self.service.call(from, client, &request, self.now);
    }

    fn connection(&mut self) -> ConnectionId {
        self.next += 1;
        ConnectionId(self.next)
    }

    fn pick(&self, which: usize) -> Option<(LeaseId, Belief)> {
        let count = self.beliefs.len().max(1);
        let (id, belief) = self.beliefs.iter().nth(which % count)?;
        Some((*id, *belief))
    }

    fn play(&mut self, step: Step) {
        match step {
            ask @ Step::Ask { .. } => self.ask(&ask),
            Step::Release { which, keep } => self.release(which, keep),
            Step::Renew { which } => {
                if let Some((id, _)) = self.pick(which) {
                    let from = self.connection();
                    self.call(from, "Renew", json!({ "lease": id.0 }), false);
                }
            }
            Step::Revoke { which } => self.revoke(which),
            Step::Gone { which } => {
                if let Some((_, belief)) = self.pick(which) {
                    self.beliefs
                        .retain(|_, other| other.connection != belief.connection);
                    self.gone.insert(belief.connection);
                    let held = self.of_groups();
                    self.service.gone(belief.connection, self.now);
                    let left = self.of_groups();
                    let ended = held.difference(&left).next();
                    assert_eq!(ended, None, "no connection holds a group's lease");
                }
            }
            Step::Pass { ms } => {
                self.now = self.now.after(Nanos(ms * MS));
                self.service.advance(self.now);
                self.set_watchdog();
                self.settle();
            }
            Step::Cpu { online } => {
                self.online = online;
                self.service.set_online(&self.cpus(), self.now);
            }
            Step::Watchdog { wanted } => {
                // Who turns it on where leases have its counter does so in vain.
                self.wanted = wanted;
                self.watchdog &= wanted;
                self.set_watchdog();
                self.settle();
            }
            Step::Full { full } => self.committer.journal_mut().full = full,
            Step::Fails => self.disk_fails(),
            Step::Crash { written } => self.crash(written),
            Step::Make { group } => self.host.make(GROUPS[group]),
            Step::Remove { group } => self.host.remove(GROUPS[group]),
            Step::Move { thread, group } => {
                let path = group.map_or("/", |group| GROUPS[group]);
                self.host.place(threads()[thread], path);
            }
            Step::Look => self.look_around(),
            Step::Settle => self.settle(),
        }
    }

    fn ask(&mut self, step: &Step) {
        let &Step::Ask {
            of,
            counters,
            at_least,
            more,
            waits_ms,
            lasts_ms,
            guaranteed,
        } = step
        else {
            return;
        };
        let from = self.connection();
        let of_group = |group: usize| wire::Request {
            scope: Some(LeaseScope::Cgroup),
            cgroup: Some(GROUPS[group].to_owned()),
            ..wire::Request::default()
        };
        let request = wire::Request {
            counters: vec![wire::Counters::programmable(counters)],
            at_least: Some(at_least),
            waits_ms,
            lasts_ms,
            guaranteed: Some(guaranteed),
            ..match of {
                For::Cpu => wire::Request::default(),
                For::Group(group) => of_group(group),
                For::Job { group, absent } => {
                    let (uid, gid) = own_ids();
                    wire::Request {
                        for_uid: Some(if absent { ABSENT } else { uid }),
                        for_gid: Some(if absent { ABSENT } else { gid }),
                        ..of_group(group)
                    }
                }
                For::Part(_) => wire::Request {
                    scope: Some(LeaseScope::Part),
                    ..wire::Request::default()
                },
                For::Thread(thread) => wire::Request {
                    scope: Some(LeaseScope::Thread),
                    threads: Some(vec![threads()[thread]]),
                    ..wire::Request::default()
                },
            }
        };
        let client = match of {
            For::Part(thread) => client_in_group(threads()[thread]),
            For::Cpu | For::Group(_) | For::Thread(_) | For::Job { .. } => client(),
        };
        let absent = |world: &Self| {
            let leases = world.service.arbiter().leases();
            let theirs = leases.filter(|lease| lease.owner.uid == ABSENT);
            theirs.map(|lease| lease.id).collect::<BTreeSet<_>>()
        };
        let before = absent(self);
        let parameters = json!({ "request": request });
        self.call_by(&client, from, ("Acquire", parameters), more);
        if let For::Job { group, .. } = of
            && self.host.runs(GROUPS[group])
        {
            let new = absent(self).difference(&before).next().copied();
            assert_eq!(new, None, "who runs there is somebody else");
        }
    }

    /// The leases of groups that hold something.
    fn of_groups(&self) -> BTreeSet<LeaseId> {
        let leases = self.service.arbiter().leases();
        let of_groups = leases.filter(|lease| lease.terms.scope.group().is_some());
        let hold = of_groups.filter(|lease| lease.holds > 0);
        hold.map(|lease| lease.id).collect()
    }

    fn release(&mut self, which: usize, keep: u32) {
        let Some((id, belief)) = self.pick(which) else {
            return;
        };
        let from = self.connection();
        // It stops using what it gives back before it says so.
        if keep == 0 {
            self.beliefs.remove(&id);
        } else {
            let left = Belief {
                holds: belief.holds.min(keep),
                certain: false,
                ..belief
            };
            self.beliefs.insert(id, left);
        }
        let parameters = json!({ "lease": id.0, "keep": keep });
        self.call(from, "Release", parameters, false);
    }

    fn revoke(&mut self, which: usize) {
        let Some((id, belief)) = self.pick(which) else {
            return;
        };
        // Whoever has no stream of events hears of it by its absence only.
        let doubted = Belief {
            certain: false,
            ..belief
        };
        self.beliefs.insert(id, doubted);
        let from = self.connection();
        let parameters = json!({ "lease": id.0, "grace_ms": 30 });
        self.call(from, "Revoke", parameters, false);
    }

    fn disk_fails(&mut self) {
        let disk = self.committer.journal_mut();
        disk.fails = true;
        if !disk.full {
            // What it has not taken is gone, whoever has it in memory.
            let kept = disk.bytes.len() - (disk.bytes.len() - HEADER) / 3;
            disk.bytes.truncate(kept);
        }
        self.committer.sync(&self.service);
        // Before anything else is answered the journal is whole again.
        self.settle();
    }

    /// Writes and answers until there is nothing left, as the service's thread does.
    fn settle(&mut self) {
        loop {
            if let Some(ended) = self.watch.take() {
                self.service.groups_ended(&ended, self.now);
            }
            let output = self.service.take();
            let tries = self
                .committer
                .due(&self.service)
                .is_some_and(|at| at <= self.now.0);
            if output.is_empty() && !tries {
                break;
            }
            self.watch.follow(&self.service, output.entries(), self.now);
            let output = self.committer.commit(&mut self.service, output, self.now);
            if self.service.stuck().is_some() {
                self.watch.follow_all(&self.service, self.now);
            }
            self.watch.follow(&self.service, output.entries(), self.now);
            if let Some(on) = self.service.watchdog_on() {
                self.watchdog = on;
            }
            for answer in output.answers() {
                let reply = serde_json::to_value(&answer.reply).expect("JSON");
                self.hear(answer.to, &reply);
            }
        }
        self.look();
        if self.service.stuck().is_none() {
            self.acknowledged = self.kept();
        }
    }

    /// What leases in groups have, and those for threads.
    fn kept(&self) -> BTreeMap<LeaseId, Kept> {
        let leases = self.service.arbiter().leases();
        let in_groups = leases.filter(|lease| lease.terms.scope != Scope::Cpu);
        let kept = in_groups.map(|lease| {
            let owner = &lease.owner;
            let kept = Kept {
                holds: lease.holds,
                uid: owner.uid,
                by: owner.by,
            };
            (lease.id, kept)
        });
        kept.collect()
    }

    /// Until nothing ends any more: an end may have others be what they were not.
    fn look_around(&mut self) {
        // What was not followed yet is not watched.
        self.settle();
        loop {
            self.watch.look(&self.service, self.now);
            let Some(ended) = self.watch.take() else {
                break;
            };
            self.service.groups_ended(&ended, self.now);
            self.settle();
        }
        let arbiter = self.service.arbiter();
        for lease in arbiter.leases() {
            if let Some(group) = lease.terms.scope.group() {
                let is_there = self.host.number(&group.path) == Some(group.id.0);
                assert!(is_there, "its group is gone: {lease:?}");
                if self.host.runs(&group.path) {
                    self.ran.insert(lease.id);
                } else {
                    assert!(
                        !self.ran.contains(&lease.id),
                        "nothing runs there: {lease:?}"
                    );
                }
            }
            let (of, with_others) = match &lease.terms.scope {
                Scope::Part(part) => (Some(part.of.id), part.with_others),
                Scope::Cpu | Scope::Thread(_) | Scope::Group(_) => (None, false),
            };
            for thread in lease.terms.scope.threads() {
                let mut chain = self.host.chain(thread.number).into_iter().map(GroupId);
                if with_others {
                    let is_in = chain.any(|group| Some(group) == of);
                    assert!(is_in, "its process is elsewhere: {lease:?}");
                    continue;
                }
                let leased = arbiter.leased_groups();
                let innermost = chain.rev().find(|group| leased.contains_key(group));
                assert_eq!(innermost, of, "its thread is elsewhere: {lease:?}");
            }
        }
    }

    /// A client gets a reply.
    fn hear(&mut self, connection: ConnectionId, reply: &Value) {
        if self.gone.contains(&connection) {
            return;
        }
        if !reply["error"].is_null() {
            // What it held by this connection it does not hold any more.
            self.beliefs
                .retain(|_, belief| belief.connection != connection);
            return;
        }
        let Ok(lease) = serde_json::from_value::<wire::Lease>(reply["parameters"]["lease"].clone())
        else {
            return;
        };
        let id = LeaseId(lease.id);
        if reply["parameters"]["event"]["what"] == "ended" {
            self.beliefs.remove(&id);
            return;
        }
        // What ends with a group or a thread ends without a word to who does not listen.
        let is_of_cpu = lease.scope == LeaseScope::Cpu && lease.within.is_none();
        let lasts = lease.left_ms.is_none() && lease.leaving.is_none() && lease.guaranteed;
        let certain = is_of_cpu && lasts;
        let holds = lease.holds;
        self.beliefs.insert(
            id,
            Belief {
                connection,
                holds,
                certain,
            },
        );
    }

    /// The arbiter dies, and is started anew. Everybody who holds something claims it.
    fn crash(&mut self, written: Option<usize>) {
        let before: Vec<(LeaseId, Belief)> = self
            .beliefs
            .iter()
            .map(|(id, belief)| (*id, *belief))
            .collect();
        let dying = self.kept();
        if let Some(percent) = written {
            let output = self.service.take();
            let disk = self.committer.journal_mut();
            let (length, anew) = (disk.bytes.len(), disk.anew);
            self.committer.commit(&mut self.service, output, self.now);
            let disk = self.committer.journal_mut();
            if disk.anew == anew {
                // What is written anew has its name when it is whole.
                let more = disk.bytes.len().saturating_sub(length);
                disk.bytes.truncate(length + more * percent / 100);
            }
        }
        let bytes = std::mem::take(&mut self.committer.journal_mut().bytes);
        let recalled = recall(&bytes, BOOT).expect("a journal");
        let whole = bytes[..recalled.length].to_vec();
        self.committer = Committer::new(Disk {
            bytes: whole,
            ..Disk::default()
        });
        self.service = service(self.host.root());
        self.service.set_online(&self.cpus(), self.now);
        let leases = recalled.leases.into_values().collect();
        self.service.restore(leases, recalled.next, self.now);
        let there = self.kept();
        for (id, kept) in &self.acknowledged {
            let least = dying.get(id).map_or(0, |dying| dying.holds.min(kept.holds));
            let now = there.get(id);
            let holds = now.map_or(0, |now| now.holds);
            assert!(holds >= least, "what was acknowledged is lost: {id:?}");
            let is_same = |now: &Kept| (now.uid, now.by) == (kept.uid, kept.by);
            assert!(now.is_none_or(is_same), "{id:?} is another's: {kept:?}");
        }
        // A number that nobody was told of may be another's now.
        let acknowledged = &self.acknowledged;
        self.within.retain(|id, _| acknowledged.contains_key(id));
        self.ran.clear();
        self.watch = Groups::new(64, self.host.root()).expect("an epoll");
        self.watch.follow_all(&self.service, self.now);
        self.set_watchdog();
        self.beliefs.clear();
        for (id, belief) in before {
            let lease = self.service.arbiter().lease(id);
            let holds = lease.map_or(0, |lease| lease.holds);
            assert!(
                !belief.certain || holds >= belief.holds as usize,
                "what was acknowledged is lost: {id:?} {belief:?} {lease:?}"
            );
            let from = self.connection();
            self.call(from, "Claim", json!({ "lease": id.0 }), true);
        }
        self.settle();
    }

    fn look(&mut self) {
        let leases = || self.service.arbiter().leases();
        let (held, outside) = needed(leases());
        let all = held + outside;
        assert!(all <= COUNTERS as usize, "more is held than there is");
        self.within
            .retain(|id, _| leases().any(|lease| lease.id == *id));
        let leased = self.service.arbiter().leased_groups();
        for lease in leases() {
            let is_leased = |group: &GroupId| leased.contains_key(group);
            let above = || lease.terms.scope.above().filter(is_leased).collect();
            let within = self.within.entry(lease.id).or_insert_with(above);
            let all = within.iter().all(is_leased);
            assert!(
                all,
                "what it was taken out of has ended: {lease:?} {within:?}"
            );
        }
        // Nothing is held that nobody was told of, but what waits to be claimed.
        for lease in self.service.arbiter().leases() {
            let is_groups = lease.terms.scope.group().is_some();
            let known = is_groups || self.beliefs.contains_key(&lease.id) || lease.owner.pid == 0;
            assert!(
                known || lease.holds == 0 || lease.claim_by.is_some(),
                "{lease:?}"
            );
        }
        // A client without a stream of events learns of the end of a lease by its own clock,
        // or not at all; with one it knows.
        let known = self.beliefs.iter().filter(|(_, belief)| belief.certain);
        let known: u32 = known.map(|(_, belief)| belief.holds).sum();
        assert!(
            known + u32::from(self.watchdog) <= COUNTERS,
            "two hold one counter: {:?}, watchdog {}",
            self.beliefs,
            self.watchdog
        );
        for (id, belief) in self.beliefs.iter().filter(|(_, belief)| belief.certain) {
            let lease = self.service.arbiter().lease(*id);
            let holds = lease.map_or(0, |lease| lease.holds);
            assert!(
                holds >= belief.holds as usize,
                "{id:?} {belief:?} {lease:?}"
            );
        }
    }
}

/// What leases for whole CPUs need together, and the neediest group or thread beside them, by what
/// is said of groups in words: along each path down from a leased one no more is held than it has.
fn needed<'a>(leases: impl Iterator<Item = &'a Lease>) -> (usize, usize) {
    let mut cpu = 0;
    let mut groups: BTreeMap<GroupId, (usize, Vec<GroupId>)> = BTreeMap::new();
    let mut outside: BTreeMap<ThreadId, usize> = BTreeMap::new();
    let mut inside: BTreeMap<(ThreadId, GroupId), (usize, Vec<GroupId>)> = BTreeMap::new();
    let mut parts: BTreeMap<GroupId, (usize, Vec<GroupId>)> = BTreeMap::new();
    for lease in leases.filter(|lease| lease.holds > 0) {
        let above = || (0, lease.terms.scope.above().collect());
        match &lease.terms.scope {
            Scope::Cpu => cpu += lease.holds,
            Scope::Group(group) => {
                groups.entry(group.id).or_insert_with(above).0 += lease.holds;
            }
            Scope::Thread(threads) => {
                for thread in threads {
                    *outside.entry(*thread).or_default() += lease.holds;
                }
            }
            Scope::Part(part) if part.with_others => {
                parts.entry(part.of.id).or_insert_with(above).0 += lease.holds;
            }
            Scope::Part(part) => {
                for thread in &part.threads {
                    let there = inside.entry((*thread, part.of.id));
                    there.or_insert_with(above).0 += lease.holds;
                }
            }
        }
    }
    let of = |all: &BTreeMap<GroupId, (usize, Vec<GroupId>)>, group: &GroupId| {
        all.get(group).map_or(0, |(holds, _)| *holds)
    };
    for of_part in parts.keys() {
        assert!(
            of(&groups, of_part) > 0,
            "a part of nothing, in {of_part:?}"
        );
    }
    // On the way down to each: what a group's parts run may be on any of these.
    let within = |of: &GroupId, above: &[GroupId]| [above, &[*of]].concat();
    let to_groups = groups.iter().map(|(of, (_, above))| (0, within(of, above)));
    let to_parts = parts.values().map(|(_, above)| (0, above.clone()));
    let to_threads = inside.values().cloned();
    for (mut path, way) in to_groups.chain(to_parts).chain(to_threads) {
        for group in way.iter().rev() {
            path += of(&parts, group);
            let has = of(&groups, group);
            assert!(
                has == 0 || path <= has,
                "{path} below {group:?}, which has {has}"
            );
            path += has;
        }
    }
    let is_outermost = |above: &[GroupId]| !above.iter().any(|group| groups.contains_key(group));
    let outermost = groups.values().filter(|(_, above)| is_outermost(above));
    let most = outermost.map(|(holds, _)| *holds);
    let most = most.chain(outside.into_values());
    (cpu, most.max().unwrap_or(0))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn nothing_acknowledged_is_lost(steps in proptest::collection::vec(step(), 1..60)) {
        let mut world = World::new();
        for step in steps {
            world.play(step);
        }
        world.settle();
    }

    #[test]
    fn nothing_of_groups_outlives_what_it_is_of(
        steps in proptest::collection::vec(step_in_groups(), 20..100),
    ) {
        let mut world = World::new();
        (0..GROUPS.len()).for_each(|group| world.play(Step::Make { group }));
        world.play(Step::Move { thread: 0, group: Some(1) });
        for step in steps {
            world.play(step);
        }
        world.look_around();
    }
}

/// Somebody asks for so many of the four counters of CPU 0.
fn asks(scope: Scope, counters: usize, lasts: Option<Nanos>) -> (Owner, Terms) {
    let owner = Owner {
        tenant: TenantId(0),
        uid: 7,
        pid: 1,
        label: String::new(),
        by: None,
    };
    let all = Demand {
        pmu: PmuId(0),
        counters: CounterSet::first(4, 0),
    };
    let terms = Terms {
        demands: vec![all; counters],
        at_least: 1,
        cpus: CpuSet::from_iter([0]),
        scope,
        guaranteed: true,
        priority: 0,
        preemptible: false,
        lasts,
        waits: Waits::Always,
    };
    (owner, terms)
}

fn group(id: u64, above: &[u64]) -> Scope {
    Scope::Group(Arc::new(Group {
        id: GroupId(id),
        above: above.iter().copied().map(GroupId).collect(),
        path: format!("/{id}"),
    }))
}

/// A part of a group for all that some process runs there.
fn part_of(id: u64, above: &[u64]) -> Scope {
    let Scope::Group(of) = group(id, above) else {
        unreachable!("it is a group");
    };
    Scope::Part(Box::new(Part {
        of,
        threads: vec![ThreadId {
            number: 7,
            started: 1,
        }],
        with_others: true,
    }))
}

/// The leases that an arbiter comes back with of which so much of its journal was written, and what
/// they hold.
fn after(bytes: &[u8]) -> Vec<(u64, usize)> {
    let mut service = service(Path::new("/"));
    let recalled = recall(bytes, BOOT).expect("a journal");
    let leases = recalled.leases.into_values().collect();
    service.restore(leases, recalled.next, BootTime(0));
    let leases = service.arbiter().leases();
    leases.map(|lease| (lease.id.0, lease.holds)).collect()
}

/// Has a service that gave these what they ask for come to `then`, and end at each byte of what it
/// writes of that. Returns what the next ones come back with, each once.
fn cut(
    asked: Vec<(Owner, Terms)>,
    then: impl FnOnce(&mut Service, &[LeaseId]),
) -> BTreeSet<Vec<(u64, usize)>> {
    let config = config(Path::new("/"));
    let mut arbiter = arbiter(&config);
    let mut leases = Vec::new();
    for (owner, terms) in asked {
        match arbiter.request(owner, terms, BootTime(0), &mut Vec::new()) {
            Ok(Outcome::Granted { lease, .. } | Outcome::Waits { lease, .. }) => leases.push(lease),
            Err(why) => panic!("{why:?}"),
        }
    }
    let mut service = Service::new(arbiter, config);
    let mut bytes = header(BOOT);
    journal::write(&service.all(), &mut bytes);
    let before = bytes.len();
    then(&mut service, &leases);
    journal::write(service.take().entries(), &mut bytes);
    let all = before..=bytes.len();
    all.map(|length| after(&bytes[..length])).collect()
}

/// What ends with the group above it is not there without it, as an outermost one.
#[test]
fn no_journal_has_a_group_below_without_the_one_above_it() {
    let asked = vec![
        asks(group(71, &[]), 4, None),
        asks(group(72, &[71]), 2, None),
        asks(part_of(72, &[71]), 1, None),
        asks(group(73, &[71, 72]), 1, None),
    ];
    let seen = cut(asked, |service, leases| {
        let ended = BTreeMap::from([(leases[0], Cause::GroupEmpty)]);
        service.groups_ended(&ended, BootTime(1));
    });
    let all = vec![(1, 4), (2, 2), (3, 1), (4, 1)];
    assert_eq!(seen, BTreeSet::from([vec![], all]));
}

/// An entry says what a lease came to by all that was decided in one go, and another may be yet to
/// come that says who has lost it.
#[test]
fn no_journal_has_more_held_than_there_is() {
    let lasts = |ms| Some(Nanos(ms * MS));
    let asked = vec![
        asks(Scope::Cpu, 2, lasts(10)),
        asks(Scope::Cpu, 2, lasts(20)),
        asks(Scope::Cpu, 4, None),
    ];
    // It waits for all four, has two when the first has ended, and then the others.
    let seen = cut(asked, |service, _| service.advance(BootTime(30 * MS)));
    let before = vec![(1, 2), (2, 2), (3, 0)];
    assert_eq!(seen, BTreeSet::from([before, vec![(3, 4)]]));
}

/// Somebody asks for so many, or nothing, and hears of them.
fn ask(of: For, counters: u32) -> Step {
    Step::Ask {
        of,
        counters,
        at_least: counters,
        more: true,
        waits_ms: None,
        lasts_ms: None,
        guaranteed: true,
    }
}

/// What is played of groups is what the service sees: leases of them are given, and end.
#[test]
fn leases_of_played_groups_come_and_go() {
    let mut world = World::new();
    let played = |world: &mut World, steps: Vec<Step>| {
        for step in steps {
            world.play(step);
            world.settle();
        }
        let leases = world.service.arbiter().leases();
        let leases = leases.map(|lease| (lease.id.0, lease.holds, lease.terms.scope.word()));
        leases.collect::<Vec<_>>()
    };
    let to = |group| Step::Move { thread: 0, group };
    let [make, inner] = [0, 1].map(|group| Step::Make { group });
    let steps = vec![make, inner, to(Some(0)), ask(For::Group(0), 3)];
    let outer = (1, 3, LeaseScope::Cgroup);
    assert_eq!(played(&mut world, steps), std::slice::from_ref(&outer));
    let of_thread = (2, 1, LeaseScope::Thread);
    let asked = played(&mut world, vec![ask(For::Thread(0), 1), Step::Look]);
    assert_eq!(asked, [outer.clone(), of_thread]);
    let inner = (3, 2, LeaseScope::Cgroup);
    let asked = played(&mut world, vec![ask(For::Group(1), 2)]);
    assert_eq!(asked, [outer.clone(), (2, 1, LeaseScope::Thread), inner]);
    // The thread runs in that one by now.
    let left = played(&mut world, vec![to(Some(1)), Step::Look]);
    assert_eq!(left, [outer, (3, 2, LeaseScope::Cgroup)]);
    let crash = Step::Crash { written: Some(50) };
    let left = played(&mut world, vec![crash, to(None), Step::Look]);
    assert_eq!(left, []);
}

/// The arbiter dies after each step of a story, with this much written of what it had decided.
#[test]
fn a_crash_after_any_step_loses_no_part_and_nobodys_name() {
    let to = |thread, group| Step::Move { thread, group };
    let job = For::Job {
        group: 0,
        absent: false,
    };
    let story = [
        Step::Make { group: 0 },
        Step::Make { group: 1 },
        to(0, Some(0)),
        to(1, Some(1)),
        ask(job, 4),
        Step::Settle,
        ask(For::Part(0), 1),
        ask(For::Group(1), 2),
        Step::Settle,
        // It is taken out of the inner group's, which has no other left.
        ask(For::Part(1), 1),
        ask(For::Thread(1), 2),
        Step::Settle,
        Step::Look,
    ];
    let ends = [
        to(0, Some(3)),
        Step::Look,
        to(1, None),
        to(0, None),
        Step::Look,
    ];
    for at in 0..=story.len() {
        for written in [None, Some(0), Some(30), Some(60), Some(100)] {
            let mut world = World::new();
            for step in &story[..at] {
                world.play(step.clone());
            }
            world.play(Step::Crash { written });
            for step in &story[at..] {
                world.play(step.clone());
            }
            world.settle();
            let owner = (own_ids().0, Some(own_ids().0));
            let leases = world.service.arbiter().leases();
            let leases = leases.map(|lease| {
                let by = lease.owner.by.map(|by| by.uid);
                (lease.terms.scope.word(), lease.holds, (lease.owner.uid, by))
            });
            let leases: Vec<_> = leases.collect();
            let outer = (LeaseScope::Cgroup, 4, owner);
            // What was asked for last has no answer yet, and may be lost.
            assert!(
                leases.contains(&outer) || at == 5,
                "{at} {written:?} {leases:?}"
            );
            let words = leases
                .iter()
                .map(|(word, holds, _)| (word.to_string(), *holds));
            let words: Vec<_> = words.collect();
            let all = [("cgroup", 4), ("part", 1), ("cgroup", 2), ("part", 1)];
            let all = all.map(|(word, holds)| (word.to_owned(), holds));
            assert!(at > 0 || words == all, "{words:?}");
            for step in &ends {
                world.play(step.clone());
            }
            assert_eq!(world.service.arbiter().leases().count(), 0);
        }
    }
}
