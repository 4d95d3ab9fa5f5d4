//! The conversation with an agent.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use perfmon_abi::wire::programs::{Described, MomentInfo};
use umpire_agent_wire::{self as wire, Ask, Frames, Item, MAGIC, MOMENTS, ToVmm, VERSION};

use super::Moment;
use super::known::{Known, clean};
use crate::guest_kernel::described::{AgentState, Descriptions};

/// Moments that wait for the agent.
const WAITING: usize = 1 << 14;
/// How long the first of them waits for others.
const TOGETHER: Duration = Duration::from_millis(50);
/// How long an agent may be silent, and how long an answer may take in all.
const PATIENCE: Duration = Duration::from_secs(3);
const LONGEST_ANSWER: Duration = Duration::from_secs(10);
/// How long the guest's full receiver is left alone.
const RETRY: Duration = Duration::from_millis(1);
/// Characters of the agent's own words.
const WORDS: usize = 200;
/// How often the log has that an agent came or went. A guest may play it as often as it likes.
const LOGGED: u32 = 16;

/// What is known of an agent, and asked of it.
#[derive(Debug, Default)]
pub(super) struct Link {
    frames: Frames,
    /// The one that answers, if one does, and when it said something last.
    session: Option<(u64, Instant)>,
    known: Known,
    /// The agent is to tell everything again.
    forget: bool,
    waiting: VecDeque<(Moment, Instant)>,
    asked: Option<Asked>,
    sequence: u32,
    /// For the guest, and when it is tried again.
    out: VecDeque<u8>,
    retry: Option<Instant>,
    /// What was logged last, and how often something was.
    logged: (String, u32),
}

/// A question.
#[derive(Debug)]
struct Asked {
    moments: Vec<Moment>,
    began: Instant,
    /// When a part of the answer came last, and which comes next.
    heard: Instant,
    part: u32,
}

impl Asked {
    fn ends(&self) -> Instant {
        (self.heard + PATIENCE).min(self.began + LONGEST_ANSWER)
    }
}

impl Link {
    /// The agent may be asked.
    pub(super) fn is_there(&self) -> bool {
        self.session.is_some()
    }

    /// There is no room for more moments.
    pub(super) fn is_full(&self) -> bool {
        self.waiting.len() >= WAITING
    }

    /// When there is something to do although nothing comes.
    pub(super) fn due(&self) -> Option<Instant> {
        let first = self.waiting.front().filter(|_| self.asked.is_none());
        let asks = first.map(|(_, since)| *since + TOGETHER);
        [asks, self.ends(), self.retry].into_iter().flatten().min()
    }

    /// When the agent is taken for gone, unless it says something before.
    fn ends(&self) -> Option<Instant> {
        let asked = self.asked.as_ref().map(Asked::ends);
        let silent = self.session.map(|(_, heard)| heard + PATIENCE);
        [asked, silent].into_iter().flatten().min()
    }

    /// Takes a moment of which the agent is to be asked.
    pub(super) fn add(&mut self, moment: Moment, to: &Descriptions, now: Instant) {
        if self.is_there() && !self.is_full() {
            self.waiting.push_back((moment, now));
        } else {
            unknown(&moment, to);
        }
    }

    /// Takes what came from the guest.
    pub(super) fn take(&mut self, bytes: &[u8], to: &Descriptions, now: Instant) {
        let mut frames = std::mem::take(&mut self.frames);
        frames.push(bytes, |message| self.hear(message, to, now));
        self.frames = frames;
    }

    fn hear(&mut self, message: ToVmm, to: &Descriptions, now: Instant) {
        if let Some((_, heard)) = &mut self.session {
            *heard = now;
        }
        match message {
            ToVmm::Hello { magic, .. } if magic != MAGIC => {}
            ToVmm::Hello { version, .. } if version != VERSION => {
                let why = format!(
                    "umpire-agent in the guest speaks version {version} of its protocol, \
                     this umpire version {VERSION}"
                );
                self.away(why, to);
            }
            ToVmm::Hello { session, .. } => self.hello(session, to, now),
            ToVmm::Bye(why) => {
                let why: String = clean(&why).chars().take(WORDS).collect();
                self.away(format!("umpire-agent in the guest has ended: {why}"), to);
            }
            ToVmm::Told {
                sequence,
                part,
                items,
            } if sequence == self.sequence => self.told(part, items, to, now),
            ToVmm::Told { .. } => {}
        }
    }

    fn hello(&mut self, session: u64, to: &Descriptions, now: Instant) {
        if self.session.is_none_or(|(known, _)| known != session) {
            self.give_up(to);
            self.log("umpire-agent is there in the guest");
            self.session = Some((session, now));
            self.out.clear();
            to.set_agent(AgentState::There);
        }
    }

    fn log(&mut self, what: &str) {
        let (last, count) = &mut self.logged;
        if *count < LOGGED && last != what {
            what.clone_into(last);
            *count += 1;
            log::info!("{what}");
        }
    }

    fn told(&mut self, part: u32, items: Vec<Item>, to: &Descriptions, now: Instant) {
        let Some(asked) = self.asked.as_mut() else {
            return;
        };
        if asked.part != part {
            // One is missing.
            log::debug!("part {} of the agent's answer is missing", asked.part);
            self.drop_question(to);
            return;
        }
        (asked.part, asked.heard) = (part.saturating_add(1), now);
        for item in items {
            match item {
                Item::Thread(thread) => self.known.add_thread(thread),
                Item::File(file) => self.known.add_file(file),
                Item::Mapping(mapping) => self.known.add_mapping(&mapping),
                Item::Threads(threads) => {
                    let Some(asked) = self.asked.take() else {
                        return;
                    };
                    if self.known.is_broken() {
                        self.asked = Some(asked);
                        self.drop_question(to);
                        return;
                    }
                    self.answered(&asked.moments, &threads, to);
                }
            }
        }
    }

    fn answered(&mut self, moments: &[Moment], threads: &[u32], to: &Descriptions) {
        let known = threads.iter().filter(|thread| **thread != 0).count();
        log::debug!("the agent knows {known} of {} threads", moments.len());
        let threads = threads.iter().copied().chain(std::iter::repeat(0));
        for (moment, thread) in moments.iter().zip(threads) {
            let same = self.known.numbers(thread, &moment.addresses, to);
            describe(moment.number, same, to);
        }
        self.forget |= self.known.is_full();
    }

    /// Does what it is time for.
    pub(super) fn step(&mut self, to: &Descriptions, now: Instant) {
        if self.ends().is_some_and(|end| now >= end) {
            self.away("umpire-agent in the guest does not answer".to_owned(), to);
        }
        let is_time = |(_, since): &(Moment, Instant)| now >= *since + TOGETHER;
        let asks = self.waiting.len() >= MOMENTS || self.waiting.front().is_some_and(is_time);
        if self.asked.is_none() && asks {
            self.ask(now);
        }
    }

    fn ask(&mut self, now: Instant) {
        let count = self.waiting.len().min(MOMENTS);
        let mut moments: Vec<_> = self.waiting.drain(..count).map(|(one, _)| one).collect();
        moments.sort_by_key(|moment| moment.tsc);
        self.sequence = self.sequence.wrapping_add(1);
        let forget = std::mem::take(&mut self.forget);
        if forget {
            self.known = Known::default();
        }
        let mut before = 0;
        let behind = moments.iter().map(|moment| {
            let tsc = moment.tsc - before;
            before = moment.tsc;
            let apic_id = moment.apic_id;
            wire::Moment { apic_id, tsc }
        });
        let moments_of = behind.collect();
        self.out.extend(wire::frame(&Ask {
            sequence: self.sequence,
            forget,
            moments: moments_of,
        }));
        self.asked = Some(Asked {
            moments,
            began: now,
            heard: now,
            part: 0,
        });
    }

    /// Hands `put` the bytes for the guest; it says how many it took.
    pub(super) fn send(&mut self, now: Instant, mut put: impl FnMut(&[u8]) -> usize) {
        loop {
            let taken = put(self.out.make_contiguous());
            if taken == 0 {
                break;
            }
            self.out.drain(..taken);
        }
        self.retry = (!self.out.is_empty()).then_some(now + RETRY);
    }

    /// Nobody answers.
    fn away(&mut self, why: String, to: &Descriptions) {
        self.log(&why);
        self.session = None;
        // First: whoever sees that nothing is known is to see why.
        to.set_agent(AgentState::Away(why));
        self.give_up(to);
        self.out.clear();
    }

    /// Nothing that was asked will be known.
    fn give_up(&mut self, to: &Descriptions) {
        self.drop_question(to);
        for (moment, _) in self.waiting.drain(..) {
            unknown(&moment, to);
        }
    }

    /// The agent has said what did not come, or another one begins.
    fn drop_question(&mut self, to: &Descriptions) {
        self.forget = true;
        for moment in self
            .asked
            .take()
            .into_iter()
            .flat_map(|asked| asked.moments)
        {
            unknown(&moment, to);
        }
    }
}

fn unknown(moment: &Moment, to: &Descriptions) {
    describe(moment.number, vec![0; 1 + moment.addresses.len()], to);
}

fn describe(number: u64, same: Vec<u64>, to: &Descriptions) {
    to.add(Described::Moment(MomentInfo { number, same }));
}

#[cfg(test)]
mod tests;
