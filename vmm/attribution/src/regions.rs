//! Parts of a program that it has marked itself, with Callgrind's client requests (`callgrind.h`).

use std::collections::BTreeMap;

use emu::Sight;

use crate::counts::{Events, Region};
use crate::tree::{Number, Tree};

/// Regions that are kept. What is marked later is added to one of its name and program, as whoever
/// compares runs does; of other names, and without one, all is one region beside them.
const MOST: usize = 4_096;

/// Requests of Callgrind are `CT` and a number (`VG_USERREQ_TOOL_BASE`).
const CALLGRIND: u64 = 0x4354_0000;

/// What of a program is in regions, beside what it asks for itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Collect {
    /// As if it had started instrumentation: Callgrind's `--instr-atstart`.
    pub instrumented: bool,
    /// As if it had switched collection on: `--collect-atstart`.
    pub collected: bool,
    /// Functions, by names in which `*` is any text and `?` any letter, that switch collection
    /// over while a thread is in one of them: `--toggle-collect`. They are known where functions
    /// are told apart.
    pub toggles: Vec<String>,
}

impl Collect {
    /// It is not all of the program: functions have what is collected alone.
    pub(crate) fn is_limited(&self) -> bool {
        *self != Self::default()
    }
}

impl Default for Collect {
    /// As Callgrind does without options.
    fn default() -> Self {
        Self {
            instrumented: true,
            collected: true,
            toggles: Vec::new(),
        }
    }
}

/// What a program asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Request {
    /// Instrumentation, of all its threads.
    Start,
    Stop,
    /// Collection, of this thread.
    Toggle,
    Zero,
    /// The region ends, and another one begins.
    Dump(String),
}

impl Request {
    /// The request whose words RAX points to; none that concerns regions, mostly
    /// `RUNNING_ON_VALGRIND`.
    pub(crate) fn of(sight: &Sight<'_>, text: impl FnOnce(u64) -> Option<String>) -> Option<Self> {
        let mut words = [0; 16];
        if !sight.read_as_user(sight.state().r[0], &mut words) {
            return None;
        }
        let [request, argument] = [0, 8].map(|at| {
            let bytes = words[at..at + 8].try_into();
            u64::from_le_bytes(bytes.unwrap_or_default())
        });
        Some(match request.checked_sub(CALLGRIND)? {
            0 => Self::Dump(String::new()),
            1 => Self::Zero,
            2 => Self::Toggle,
            3 => Self::Dump(text(argument).unwrap_or_default()),
            4 => Self::Start,
            5 => Self::Stop,
            _ => return None,
        })
    }
}

/// Of a thread: kernel and user.
type Both = [Events; 2];

/// What of a thread is in the region.
#[derive(Debug, Clone, Copy, Default)]
struct Gathers {
    collects: bool,
    /// What it had executed when it began to be in the region; none while it is not.
    since: Option<Both>,
    gathered: Both,
    /// Instructions of user code in all regions up to then.
    all: u64,
}

impl Gathers {
    fn go_on(&mut self, on: bool, now: Both) {
        if let Some(since) = self.since {
            for ((sum, now), since) in self.gathered.iter_mut().zip(now).zip(since) {
                *sum += now.less(since);
            }
            self.all += now[1].less(since[1]).instructions;
        }
        self.since = on.then_some(now);
    }
}

#[derive(Debug, Default)]
struct MarkedProgram {
    instrumented: bool,
    threads: BTreeMap<Number, Gathers>,
}

/// The regions of all programs.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    at_start: Collect,
    /// Those that have asked for something, by their places in the tree.
    programs: BTreeMap<usize, MarkedProgram>,
    done: Vec<Region>,
    /// The places of those that have a name, by program and name: the last ones.
    places: BTreeMap<(String, String), usize>,
}

impl Regions {
    pub(crate) fn new(at_start: Collect) -> Self {
        Self {
            at_start,
            ..Self::default()
        }
    }

    pub(crate) fn at_start(&self) -> &Collect {
        &self.at_start
    }

    /// The instructions of user code that were collected of a thread, when it has executed `user`.
    pub(crate) fn collected(&self, tree: &Tree, thread: Number, user: u64) -> u64 {
        let Collect {
            instrumented,
            collected,
            ..
        } = self.at_start;
        let program = self.programs.get(&tree.place_of(thread));
        let instrumented = program.map_or(instrumented, |program| program.instrumented);
        match program.and_then(|program| program.threads.get(&thread)) {
            Some(gathers) => {
                let since = gathers.since.map_or(user, |[_, since]| since.instructions);
                gathers.all + user.saturating_sub(since)
            }
            None if instrumented && collected => user,
            None => 0,
        }
    }

    /// `parent` has forked `child`, which begins as its parent is.
    pub(crate) fn forks(&mut self, tree: &Tree, parent: Number, child: Number) {
        let [from, to] = [parent, child].map(|thread| tree.place_of(thread));
        let Some(marked) = self.programs.get(&from).filter(|_| from != to) else {
            return;
        };
        let instrumented = marked.instrumented;
        let known = marked.threads.get(&parent);
        let collects = known.map_or(self.at_start.collected, |known| known.collects);
        let gathers = Gathers {
            collects,
            since: (instrumented && collects).then_some(Both::default()),
            ..Gathers::default()
        };
        let threads = BTreeMap::from([(child, gathers)]);
        self.programs.insert(
            to,
            MarkedProgram {
                instrumented,
                threads,
            },
        );
    }

    /// `thread` asks for something, and has executed `untold` besides what the tree knows.
    pub(crate) fn asked(
        &mut self,
        tree: &Tree,
        (thread, untold): (Number, Events),
        request: Request,
    ) {
        let program = tree.place_of(thread);
        let Collect {
            instrumented,
            collected,
            ..
        } = self.at_start;
        let one = self
            .programs
            .entry(program)
            .or_insert_with(|| MarkedProgram {
                instrumented,
                threads: BTreeMap::new(),
            });
        let was_instrumented = one.instrumented;
        match request {
            Request::Start => one.instrumented = true,
            Request::Stop => one.instrumented = false,
            Request::Toggle | Request::Zero | Request::Dump(_) => {}
        }
        for number in tree.threads_of(program) {
            let on = was_instrumented && collected;
            // One that was not known has been as it began.
            let gathers = one.threads.entry(number).or_insert_with(|| Gathers {
                collects: collected,
                since: on.then_some(Both::default()),
                ..Gathers::default()
            });
            if number == thread && request == Request::Toggle {
                gathers.collects = !gathers.collects;
            }
            let mut now = now(tree, number);
            if number == thread {
                now[1] += untold;
            }
            gathers.go_on(one.instrumented && gathers.collects, now);
        }
        let name = match request {
            Request::Dump(name) => Some(name),
            Request::Zero => None,
            _ => return,
        };
        let mut sums = Both::default();
        for gathers in one.threads.values_mut() {
            let gathered = std::mem::take(&mut gathers.gathered);
            sums.iter_mut()
                .zip(gathered)
                .for_each(|(sum, more)| *sum += more);
        }
        if let Some(name) = name {
            self.add(tree, thread, name, sums);
        }
    }

    fn add(&mut self, tree: &Tree, thread: Number, name: String, [kernel, user]: Both) {
        let (program, pid) = tree.program(thread);
        let key = (program.to_owned(), name);
        let region = Region {
            name: key.1.clone(),
            program: key.0.clone(),
            pid,
            user,
            kernel,
            ..Region::default()
        };
        let is_full = self.done.len() >= MOST;
        let known = self.places.get(&key).copied().filter(|_| is_full);
        // The rest is behind all others, and none of its own number.
        let known = known.or_else(|| (self.done.len() > MOST).then_some(MOST));
        match known.and_then(|place| self.done.get_mut(place)) {
            Some(one) => {
                one.more += 1;
                one.kernel += kernel;
                one.user += user;
            }
            None if is_full => self.done.push(Region {
                name: String::new(),
                program: String::new(),
                is_rest: true,
                ..region
            }),
            None => {
                if !region.name.is_empty() {
                    self.places.insert(key, self.done.len());
                }
                self.done.push(region);
            }
        }
    }

    /// All of them; what a program has not dumped is its last one.
    pub(crate) fn counts(&self, tree: &Tree) -> Vec<Region> {
        let mut all = self.done.clone();
        for (program, one) in &self.programs {
            let mut sums = Both::default();
            let mut first = None;
            for number in tree.threads_of(*program) {
                first = first.or(Some(number));
                let on = one.instrumented && self.at_start.collected;
                let known = one.threads.get(&number).copied();
                let mut gathers = known.unwrap_or(Gathers {
                    since: on.then_some(Both::default()),
                    ..Gathers::default()
                });
                gathers.go_on(false, now(tree, number));
                sums.iter_mut()
                    .zip(gathers.gathered)
                    .for_each(|(sum, more)| *sum += more);
            }
            let Some(first) = first.filter(|_| sums != Both::default()) else {
                continue;
            };
            let (program, pid) = tree.program(first);
            let [kernel, user] = sums;
            all.push(Region {
                name: String::new(),
                program: program.to_owned(),
                pid,
                user,
                kernel,
                ..Region::default()
            });
        }
        all
    }
}

fn now(tree: &Tree, thread: Number) -> Both {
    tree.totals(thread).map(|totals| Events::from(&totals))
}

#[cfg(test)]
mod tests {
    use emu::{EventClass, EventTotals, Ring};

    use super::*;
    use crate::tree::Task;

    fn task(address: u64, tid: u32) -> Task {
        Task {
            address,
            tid,
            pid: 10,
            comm: String::new(),
        }
    }

    fn execute(tree: &mut Tree, thread: Number, user: u64, kernel: u64) {
        for (ring, count) in [(Ring::User, user), (Ring::Kernel, kernel)] {
            let done = EventTotals::default().with(EventClass::Instructions, count);
            tree.executed(thread, ring, &done);
        }
    }

    fn seen(regions: &Regions, tree: &Tree) -> Vec<(String, u64, u64)> {
        let all = regions.counts(tree).into_iter();
        all.map(|one| (one.name, one.user.instructions, one.kernel.instructions))
            .collect()
    }

    fn dump(name: &str) -> Request {
        Request::Dump(name.to_owned())
    }

    #[test]
    fn a_dump_ends_a_region() {
        let mut tree = Tree::default();
        let one = tree.executes(task(1, 10), "a".to_owned());
        let mut regions = Regions::default();
        execute(&mut tree, one, 100, 10);
        assert_eq!(seen(&regions, &tree), []);
        regions.asked(&tree, (one, Events::default()), Request::Zero);
        execute(&mut tree, one, 7, 1);
        regions.asked(&tree, (one, Events::default()), dump("first"));
        execute(&mut tree, one, 8, 2);
        regions.asked(&tree, (one, Events::default()), dump(""));
        execute(&mut tree, one, 9, 3);
        let expected = [("first", 7, 1), ("", 8, 2), ("", 9, 3)];
        let expected = expected.map(|(name, user, kernel)| (name.to_owned(), user, kernel));
        assert_eq!(seen(&regions, &tree), expected);
    }

    #[test]
    fn regions_without_number_are_added_by_name() {
        let mut tree = Tree::default();
        let one = tree.executes(task(1, 10), "a".to_owned());
        let mut regions = Regions::default();
        let mut turn = |tree: &mut Tree, user, name| {
            execute(tree, one, user, 0);
            regions.asked(tree, (one, Events::default()), dump(name));
        };
        for _ in 0..2_100 {
            turn(&mut tree, 80, "a");
            turn(&mut tree, 620, "b");
        }
        for (user, name) in [(5, "late"), (7, ""), (9, "late")] {
            turn(&mut tree, user, name);
        }
        let all = regions.counts(&tree);
        assert_eq!(all.len(), MOST + 1);
        let sum = |name: &str, is_rest: bool| {
            let of = all
                .iter()
                .filter(|it| it.name == name && it.is_rest == is_rest);
            of.fold((0, 0), |(times, sum), it| {
                (times + 1 + it.more, sum + it.user.instructions)
            })
        };
        assert_eq!(sum("a", false), (2_100, 168_000));
        assert_eq!(sum("b", false), (2_100, 1_302_000));
        assert_eq!(sum("", true), (3, 21));
    }

    #[test]
    fn what_is_switched_off_is_in_none() {
        let mut tree = Tree::default();
        let one = tree.executes(task(1, 10), "a".to_owned());
        let other = tree.begins(Some(one), task(2, 11)).expect("a thread");
        let mut regions = Regions::new(Collect {
            instrumented: false,
            ..Collect::default()
        });
        let both = |tree: &mut Tree| {
            execute(tree, one, 1, 0);
            execute(tree, other, 10, 0);
        };
        both(&mut tree);
        regions.asked(&tree, (one, Events::default()), Request::Start);
        both(&mut tree);
        // Of this thread alone.
        regions.asked(&tree, (one, Events::default()), Request::Toggle);
        both(&mut tree);
        regions.asked(&tree, (one, Events::default()), Request::Toggle);
        both(&mut tree);
        regions.asked(&tree, (other, Events::default()), Request::Stop);
        both(&mut tree);
        let late = tree.begins(Some(one), task(3, 12)).expect("a thread");
        execute(&mut tree, late, 1000, 0);
        regions.asked(&tree, (one, Events::default()), Request::Start);
        execute(&mut tree, late, 100, 0);
        assert_eq!(seen(&regions, &tree), [(String::new(), 132, 0)]);
        let all = [one, other, late].map(|thread| {
            let user = tree.user_instructions(thread);
            regions.collected(&tree, thread, user)
        });
        assert_eq!(all, [2, 30, 100]);
    }

    #[test]
    fn a_forked_process_begins_as_its_parent_is() {
        let mut tree = Tree::default();
        let one = tree.executes(task(1, 10), "a".to_owned());
        let mut regions = Regions::default();
        regions.asked(&tree, (one, Events::default()), Request::Stop);
        regions.asked(&tree, (one, Events::default()), Request::Zero);
        let forked = Task {
            pid: 11,
            ..task(2, 11)
        };
        let child = tree.begins(Some(one), forked).expect("a process");
        regions.forks(&tree, one, child);
        execute(&mut tree, child, 100, 20);
        regions.asked(&tree, (child, Events::default()), Request::Start);
        execute(&mut tree, child, 7, 1);
        regions.asked(&tree, (child, Events::default()), dump("child"));
        assert_eq!(seen(&regions, &tree), [("child".to_owned(), 7, 1)]);
    }

    #[test]
    fn programs_have_their_own() {
        let mut tree = Tree::default();
        let one = tree.executes(task(1, 10), "a".to_owned());
        let mut regions = Regions::default();
        execute(&mut tree, one, 5, 0);
        regions.asked(&tree, (one, Events::default()), dump("x"));
        let next = tree.executes(task(1, 10), "b".to_owned());
        execute(&mut tree, next, 50, 0);
        assert_eq!(seen(&regions, &tree), [("x".to_owned(), 5, 0)]);
    }
}
