//! Tests of the conversation, with an agent made of words.

use perfmon_abi::wire::programs::ProgramsInfo;
use proptest::prelude::*;
use umpire_agent_wire::{File, Mapping, Thread, frame};

use super::*;

/// The VMM's side, and what tools would be told.
struct Scene {
    link: Link,
    to: Descriptions,
    now: Instant,
    next: u64,
    asks: Frames,
}

impl Scene {
    fn new() -> Self {
        let (to, news) = Descriptions::new();
        // Nobody else describes.
        drop(news);
        to.set_unknown(Some("no BTF".to_owned()));
        Self {
            link: Link::default(),
            to,
            now: Instant::now(),
            next: 1,
            asks: Frames::default(),
        }
    }

    fn says(&mut self, message: &ToVmm) {
        self.link.take(&frame(message), &self.to, self.now);
    }

    fn hello(&mut self, session: u64) {
        self.says(&ToVmm::Hello {
            magic: MAGIC,
            version: VERSION,
            session,
        });
    }

    /// A sample at `tsc` with an address of the program, and the first of its numbers.
    fn sample(&mut self, tsc: u64) -> u64 {
        let moment = |number| Moment {
            number,
            apic_id: 0,
            tsc,
            addresses: vec![0x1234],
        };
        let mut told = None;
        let number = self.to.reserve(2, |number| {
            told = Some(moment(number));
            true
        });
        self.link.add(told.expect("told"), &self.to, self.now);
        number.expect("room")
    }

    /// Some time passes; the questions of it.
    fn wait(&mut self, time: Duration) -> Vec<Ask> {
        self.now += time;
        self.link.step(&self.to, self.now);
        let mut bytes = Vec::new();
        self.link.send(self.now, |some| {
            bytes.extend_from_slice(some);
            some.len()
        });
        let mut asks = Vec::new();
        self.asks.push(&bytes, |ask| asks.push(ask));
        asks
    }

    fn asked(&mut self) -> Ask {
        let mut asks = self.wait(TOGETHER);
        assert_eq!(asks.len(), 1, "{asks:?}");
        asks.remove(0)
    }

    fn answer(&mut self, ask: &Ask, part: u32, items: Vec<Item>) {
        let sequence = ask.sequence;
        self.says(&ToVmm::Told {
            sequence,
            part,
            items,
        });
    }

    /// What is described since the last time, which is all of it.
    fn described(&mut self) -> Vec<Described> {
        let ProgramsInfo {
            described,
            next,
            more,
            ..
        } = self.to.after(self.next - 1);
        assert!(!more, "{:?}", self.link);
        self.next = next + 1;
        described
    }

    fn why(&self) -> Option<String> {
        self.to.after(u64::MAX).unknown
    }
}

fn moment(number: u64, same: &[u64]) -> Described {
    let same = same.to_vec();
    Described::Moment(MomentInfo { number, same })
}

fn whole() -> Vec<Item> {
    vec![
        Item::Thread(Thread {
            number: 1,
            memory: 1,
            pid: 7,
            tid: 7,
            comm: "walk".to_owned(),
            ..Thread::default()
        }),
        Item::File(File {
            number: 1,
            name: "/bin/walk".to_owned(),
            ..File::default()
        }),
        Item::Mapping(Mapping {
            memory: 1,
            file: 1,
            start: 0x1000,
            length: 0x1000,
            offset: 0,
        }),
    ]
}

#[test]
fn samples_get_the_agents_threads() {
    let mut scene = Scene::new();
    assert_eq!(scene.sample(5), 1, "nobody is there");
    assert_eq!(scene.described(), [moment(1, &[0, 0])]);
    scene.hello(1);
    assert!(scene.link.is_there());
    assert_eq!(scene.why(), None);
    let (late, early) = (scene.sample(900), scene.sample(800));
    let ask = scene.asked();
    assert!(ask.forget, "this one has told nothing yet");
    let tscs: Vec<u64> = ask.moments.iter().map(|moment| moment.tsc).collect();
    assert_eq!(tscs, [800, 100]);
    scene.answer(&ask, 0, whole());
    scene.answer(&ask, 1, vec![Item::Threads(vec![1, 0])]);
    let described = scene.described();
    let numbers: Vec<u64> = described.iter().map(Described::number).collect();
    // The task and the mapping, then both samples.
    assert_eq!(described.len(), 4);
    assert_eq!(described[2], moment(early, &numbers[..2]));
    assert_eq!(described[3], moment(late, &[0, 0]));

    // What is known needs no description.
    let third = scene.sample(1000);
    let ask = scene.asked();
    assert!(!ask.forget);
    scene.answer(&ask, 0, vec![Item::Threads(vec![1])]);
    assert_eq!(scene.described(), [moment(third, &numbers[..2])]);
}

#[test]
fn one_question_at_a_time() {
    let mut scene = Scene::new();
    scene.hello(1);
    for tsc in 0..3 * MOMENTS as u64 {
        scene.sample(tsc);
    }
    for _ in 0..3 {
        let ask = scene.asked();
        assert_eq!(ask.moments.len(), MOMENTS);
        assert_eq!(scene.wait(TOGETHER), []);
        scene.answer(&ask, 0, vec![Item::Threads(Vec::new())]);
    }
    assert_eq!(scene.wait(TOGETHER), []);
    assert_eq!(scene.described().len(), 3 * MOMENTS);
    assert_eq!(
        scene.link.due(),
        Some(scene.now - TOGETHER + PATIENCE),
        "only if it is silent"
    );
}

#[test]
fn who_says_nothing_is_gone_without_a_question() {
    let mut scene = Scene::new();
    scene.hello(1);
    for _ in 0..9 {
        assert_eq!(scene.wait(PATIENCE / 2), []);
        scene.hello(1);
    }
    assert!(scene.link.is_there());
    assert_eq!(scene.link.due(), Some(scene.now + PATIENCE));
    scene.wait(PATIENCE);
    assert!(!scene.link.is_there());
    let why = scene.why().expect("a reason");
    assert_eq!(why, "no BTF; umpire-agent in the guest does not answer");
    assert_eq!(scene.link.due(), None);
}

#[test]
fn what_the_guest_plays_does_not_fill_the_log() {
    let mut scene = Scene::new();
    for session in 0..1000 {
        scene.hello(session);
        scene.says(&ToVmm::Bye(session.to_string()));
    }
    assert_eq!(scene.link.logged.1, LOGGED);
    let mut scene = Scene::new();
    for _ in 0..5 {
        scene.says(&ToVmm::Bye("no perf".to_owned()));
    }
    assert_eq!(scene.link.logged.1, 1);
}

#[test]
fn who_is_silent_is_asked_no_more() {
    let mut scene = Scene::new();
    scene.hello(1);
    let first = scene.sample(1);
    let ask = scene.asked();
    let second = scene.sample(2);
    // Its own clock does not matter, but that it says something.
    for part in 0..3 {
        assert_eq!(scene.wait(PATIENCE / 2), []);
        scene.answer(&ask, part, Vec::new());
    }
    assert_eq!(scene.wait(PATIENCE), []);
    let expected = [moment(first, &[0, 0]), moment(second, &[0, 0])];
    assert_eq!(scene.described(), expected);
    assert!(!scene.link.is_there());
    let why = scene.why().expect("a reason");
    assert_eq!(why, "no BTF; umpire-agent in the guest does not answer");
    // It comes back.
    scene.answer(&ask, 3, vec![Item::Threads(vec![1])]);
    scene.hello(1);
    let third = scene.sample(3);
    let ask = scene.asked();
    assert!(ask.forget);
    scene.answer(&ask, 0, vec![Item::Threads(vec![1])]);
    assert_eq!(scene.described(), [moment(third, &[0, 0])]);
}

#[test]
fn nobody_listens_for_ever() {
    let mut scene = Scene::new();
    scene.hello(1);
    scene.sample(1);
    let ask = scene.asked();
    let mut time = Duration::ZERO;
    let mut part = 0;
    while scene.link.is_there() {
        scene.wait(PATIENCE / 2);
        time += PATIENCE / 2;
        scene.answer(&ask, part, Vec::new());
        part += 1;
        assert!(time <= LONGEST_ANSWER + PATIENCE / 2, "{time:?}");
    }
    assert_eq!(scene.described().len(), 1);
}

#[test]
fn a_part_that_is_missing_spoils_the_answer() {
    let mut scene = Scene::new();
    scene.hello(1);
    let number = scene.sample(1);
    let ask = scene.asked();
    scene.answer(&ask, 1, vec![Item::Threads(vec![1])]);
    assert_eq!(scene.described(), [moment(number, &[0, 0])]);
    assert!(scene.link.is_there());
    scene.sample(2);
    let next = scene.asked();
    assert!(next.forget && next.sequence != ask.sequence);
    // The rest of the old answer is of no use.
    scene.answer(&ask, 2, vec![Item::Threads(vec![1])]);
    scene.answer(&next, 0, vec![Item::Threads(vec![1])]);
    assert_eq!(scene.described().len(), 1);
}

#[test]
fn another_agent_tells_everything_anew() {
    let mut scene = Scene::new();
    scene.hello(1);
    scene.sample(1);
    let ask = scene.asked();
    scene.hello(1);
    assert!(scene.link.asked.is_some(), "it is still the same");
    scene.hello(2);
    scene.answer(&ask, 0, vec![Item::Threads(vec![1])]);
    scene.sample(2);
    assert!(scene.asked().forget);
    assert_eq!(scene.described_at_least(), 1);
}

impl Scene {
    fn described_at_least(&self) -> usize {
        self.to.after(0).described.len()
    }
}

#[test]
fn it_says_why_it_is_gone() {
    for (message, expected) in [
        (
            ToVmm::Bye("no\x1b perf".to_owned()),
            "no BTF; umpire-agent in the guest has ended: no? perf",
        ),
        (
            ToVmm::Hello {
                magic: MAGIC,
                version: 9,
                session: 1,
            },
            "no BTF; umpire-agent in the guest speaks version 9 of its protocol, this umpire \
             version 1",
        ),
    ] {
        let mut scene = Scene::new();
        scene.hello(1);
        scene.sample(1);
        scene.says(&message);
        assert_eq!(scene.why().as_deref(), Some(expected));
        assert_eq!(scene.described().len(), 1);
        assert!(!scene.link.is_there());
    }
    let mut scene = Scene::new();
    scene.says(&ToVmm::Hello {
        magic: 0,
        version: VERSION,
        session: 1,
    });
    assert!(!scene.link.is_there(), "that is somebody else");
}

#[test]
fn a_flood_is_bounded() {
    let mut scene = Scene::new();
    scene.hello(1);
    for tsc in 0..2 * WAITING as u64 {
        scene.sample(tsc);
    }
    assert_eq!(scene.link.waiting.len(), WAITING);
    let ask = scene.asked();
    for part in 0..200 {
        let number = |place: u32| part * 500 + place;
        let items = (0..500).map(|place| {
            Item::Thread(Thread {
                number: number(place),
                ..Thread::default()
            })
        });
        scene.answer(&ask, part, items.collect());
    }
    assert!(scene.link.known.is_full());
    let before = scene.to.after(u64::MAX).next;
    scene.answer(&ask, 200, vec![Item::Threads(vec![1; MOMENTS])]);
    // The first thread is known, but what was refused may have been a part of its memory.
    let described = scene.to.after(before).described;
    assert_eq!(described.len(), MOMENTS);
    let known = described.iter().any(|one| match one {
        Described::Moment(one) => one.same[0] != 0,
        _ => true,
    });
    assert!(!known, "{described:?}");
    assert!(scene.asked().forget, "there is room again");
}

proptest! {
    #[test]
    fn any_agent_leaves_every_sample_described(
        steps in proptest::collection::vec((0..6u8, any::<u32>(), any::<u64>()), 0..80)
    ) {
        let mut scene = Scene::new();
        let mut samples = 0;
        for (kind, small, large) in steps {
            match kind {
                0 => scene.hello(large % 3),
                1 => {
                    scene.sample(large);
                    samples += 1;
                }
                2 => drop(scene.wait(Duration::from_millis(u64::from(small % 2000)))),
                3 => {
                    let sequence = scene.link.sequence;
                    let part = small % 3;
                    let item = match large % 4 {
                        0 => Item::Threads(vec![small % 4; 3]),
                        1 => Item::Thread(Thread { number: small % 4, memory: 1, ..Thread::default() }),
                        2 => Item::File(File { number: small % 4, ..File::default() }),
                        _ => Item::Mapping(Mapping {
                            memory: 1, file: small % 4, start: large, length: large, offset: large,
                        }),
                    };
                    scene.says(&ToVmm::Told { sequence, part, items: vec![item] });
                }
                4 => scene.link.take(&large.to_le_bytes(), &scene.to, scene.now),
                _ => scene.says(&ToVmm::Bye(small.to_string())),
            }
        }
        // Whatever it was: soon nothing is open.
        for _ in 0..4 {
            scene.wait(LONGEST_ANSWER);
        }
        let described = scene.to.after(0);
        prop_assert!(!described.more);
        let moments = described.described.iter().filter(|one| matches!(one, Described::Moment(_)));
        prop_assert_eq!(moments.count(), samples);
    }
}
