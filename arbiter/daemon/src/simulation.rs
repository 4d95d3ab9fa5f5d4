//! The service played through: clients that come, go, and lose their answers; an arbiter that
//! crashes between any two steps; a disk that is full for a while; time that jumps. After
//! each step nobody believes that it holds what another does, and nobody has lost what was
//! acknowledged.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use arbiter::{CounterSet, Nanos};
use arbiter_host::{
    BootTime, Cause, CpuSet, Demand, Group, GroupId, HostArbiter, LeaseId, Outcome, Owner, PmuId,
    Scope, TenantId, Terms, Waits,
};
use proptest::prelude::*;
use serde_json::{Value, json};
use umpire_lease::{self as wire, INTERFACE};
use varlink::Request;

use crate::commit::{Committer, Journal};
use crate::config::{ArbiterConfig, PmuConfig, WatchdogConfig};
use crate::journal::{self, Entry, HEADER, header, recall};
use crate::peer::Client;
use crate::service::{ConnectionId, Service};

const BOOT: &str = "0b5c6c3e-6f0b-4f6a-a5ae-3e6f5a1d2c3b";
const COUNTERS: u32 = 4;
const MS: u64 = 1_000_000;
const WINDOW: u64 = 200 * MS;

/// A disk that may be full, and may not take what the kernel has for it.
#[derive(Debug, Default)]
struct Disk {
    bytes: Vec<u8>,
    full: bool,
    fails: bool,
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

#[derive(Clone, Debug)]
enum Step {
    Ask {
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
    /// The batch so far is decided, and perhaps written; its answers never come.
    Crash {
        written: bool,
    },
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

fn step() -> impl Strategy<Value = Step> {
    let ask = (
        1u32..=COUNTERS,
        1u32..=COUNTERS,
        any::<bool>(),
        prop_oneof![Just(None), Just(Some(-1)), (1i64..300).prop_map(Some)],
        proptest::option::of(1u64..500),
        any::<bool>(),
    );
    prop_oneof![
        6 => ask.prop_map(|(counters, at_least, more, waits_ms, lasts_ms, guaranteed)| Step::Ask {
            counters,
            at_least: at_least.min(counters),
            more,
            waits_ms,
            lasts_ms,
            guaranteed,
        }),
        3 => (0usize..8, 0u32..3).prop_map(|(which, keep)| Step::Release { which, keep }),
        2 => (0usize..8).prop_map(|which| Step::Renew { which }),
        1 => (0usize..8).prop_map(|which| Step::Revoke { which }),
        2 => (0usize..8).prop_map(|which| Step::Gone { which }),
        3 => prop_oneof![0u64..20, 50u64..800].prop_map(|ms| Step::Pass { ms }),
        1 => any::<bool>().prop_map(|full| Step::Full { full }),
        1 => Just(Step::Fails),
        1 => any::<bool>().prop_map(|written| Step::Crash { written }),
        1 => any::<bool>().prop_map(|online| Step::Cpu { online }),
        1 => any::<bool>().prop_map(|wanted| Step::Watchdog { wanted }),
        8 => Just(Step::Settle),
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
}

fn config() -> ArbiterConfig {
    ArbiterConfig {
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
    Client {
        pid: 1,
        uid: rustix::process::geteuid().as_raw(),
        ..Client::default()
    }
}

fn arbiter() -> HostArbiter {
    let config = config();
    let pmus = config.host_pmus(&CpuSet::from_iter([0]));
    HostArbiter::new(pmus, config.policy).expect("the policy fits")
}

fn service() -> Service {
    Service::new(arbiter(), config())
}

impl World {
    fn new() -> Self {
        let disk = Disk {
            bytes: header(BOOT),
            ..Disk::default()
        };
        World {
            service: service(),
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
        let mut request = Request::create(format!("{INTERFACE}.{method}"), Some(parameters));
        request.more = more.then_some(true);
        self.service.call(from, &client(), &request, self.now);
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
                    self.service.gone(belief.connection, self.now);
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
            Step::Settle => self.settle(),
        }
    }

    fn ask(&mut self, step: &Step) {
        let &Step::Ask {
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
        let request = wire::Request {
            counters: vec![wire::Counters::programmable(counters)],
            at_least: Some(at_least),
            waits_ms,
            lasts_ms,
            guaranteed: Some(guaranteed),
            ..wire::Request::default()
        };
        self.call(from, "Acquire", json!({ "request": request }), more);
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
            let output = self.service.take();
            let tries = self
                .committer
                .due(&self.service)
                .is_some_and(|at| at <= self.now.0);
            if output.is_empty() && !tries {
                break;
            }
            let output = self.committer.commit(&mut self.service, output, self.now);
            if let Some(on) = self.service.watchdog_on() {
                self.watchdog = on;
            }
            for answer in output.answers() {
                let reply = serde_json::to_value(&answer.reply).expect("JSON");
                self.hear(answer.to, &reply);
            }
        }
        self.look();
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
        let certain = lease.left_ms.is_none() && lease.leaving.is_none() && lease.guaranteed;
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
    fn crash(&mut self, written: bool) {
        let before: Vec<(LeaseId, Belief)> = self
            .beliefs
            .iter()
            .map(|(id, belief)| (*id, *belief))
            .collect();
        if written {
            let output = self.service.take();
            self.committer.commit(&mut self.service, output, self.now);
        }
        let bytes = std::mem::take(&mut self.committer.journal_mut().bytes);
        let recalled = recall(&bytes, BOOT).expect("a journal");
        let whole = bytes[..recalled.length].to_vec();
        self.committer = Committer::new(Disk {
            bytes: whole,
            ..Disk::default()
        });
        self.service = service();
        self.service.set_online(&self.cpus(), self.now);
        let leases = recalled.leases.into_values().collect();
        self.service.restore(leases, recalled.next, self.now);
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

    fn look(&self) {
        let held: usize = self
            .service
            .arbiter()
            .leases()
            .map(|lease| lease.holds)
            .sum();
        assert!(held <= COUNTERS as usize, "more is held than there is");
        // Nothing is held that nobody was told of, but what waits to be claimed.
        for lease in self.service.arbiter().leases() {
            let known = self.beliefs.contains_key(&lease.id) || lease.owner.pid == 0;
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

/// The leases that an arbiter comes back with of which so much of its journal was written, and what
/// they hold.
fn after(bytes: &[u8]) -> Vec<(u64, usize)> {
    let mut service = service();
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
    let mut arbiter = arbiter();
    let mut leases = Vec::new();
    for (owner, terms) in asked {
        match arbiter.request(owner, terms, BootTime(0), &mut Vec::new()) {
            Ok(Outcome::Granted { lease, .. } | Outcome::Waits { lease, .. }) => leases.push(lease),
            Err(why) => panic!("{why:?}"),
        }
    }
    let mut service = Service::new(arbiter, config());
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
        asks(group(71, &[]), 3, None),
        asks(group(72, &[71]), 2, None),
        asks(group(73, &[71, 72]), 1, None),
    ];
    let seen = cut(asked, |service, leases| {
        let ended = BTreeMap::from([(leases[0], Cause::GroupEmpty)]);
        service.groups_ended(&ended, BootTime(1));
    });
    let all = vec![(1, 3), (2, 2), (3, 1)];
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
