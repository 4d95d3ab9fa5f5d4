//! Reading a script: from text to steps.

use std::fmt;
use std::str::FromStr;

use arbiter::{CounterId, Layer, NamedEvent, Wanted, abi};

use super::{Action, Script, Step};

/// A script that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScriptError {
    /// The number of the line, from 1.
    pub line: usize,
    /// The word that is wrong. It is empty if a word is missing.
    pub word: String,
    /// What is wrong with the word.
    pub problem: Problem,
}

/// What is wrong with a script. The variants name what the word should have been.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Problem {
    /// The word is no time in milliseconds.
    Time,
    /// The time is before that of the line above.
    Backwards,
    /// The word is no layer.
    Layer,
    /// The word is no action.
    Action,
    /// The word is no counter.
    Counter,
    /// The word is neither a number of counters nor a counter.
    Wanted,
    /// The word is no lease.
    Lease,
    /// The word is no event.
    Event,
    /// An event for a fixed-function counter.
    FixedEvent,
    /// The word is neither yield nor refuse.
    Reply,
    /// The line is complete before the word.
    TooMany,
    /// Another layer than the firmware ends the firmware's phase.
    PhaseOfOther,
    /// The firmware acts after its phase.
    PhaseOver,
    /// The kernel acts before the firmware's phase is over.
    PhaseNotOver,
    /// The script has no step.
    Empty,
}

impl Problem {
    const fn hint(self) -> &'static str {
        match self {
            Problem::Time => "give a time in whole milliseconds, up to 86400000 (a day)",
            Problem::Backwards => "time does not run backwards; put the line further up",
            Problem::Layer => "give firmware, hypervisor or kernel, or tick alone",
            Problem::Action => {
                "give reserve, claim, renew, release, lend, keep, reply, withdraw, end-phase or tick"
            }
            Problem::Counter => "give a counter, as PMC0 or FIXED1",
            Problem::Wanted => "give how many counters, 1 to 255, or one, as PMC0 or FIXED1",
            Problem::Lease => {
                "give lease and 10 to 655350 milliseconds, in tens, or event and a select"
            }
            Problem::Event => {
                "give event and the bits of an event select that name one, as 0x76 or 0x1000000c0"
            }
            Problem::FixedEvent => "a fixed-function counter has its event already",
            Problem::Reply => "give yield or refuse",
            Problem::TooMany => "the line is complete before it; # begins a comment",
            Problem::PhaseOfOther => "only the firmware ends its phase",
            Problem::PhaseOver => "the firmware's phase is over, and it does nothing any more",
            Problem::PhaseNotOver => {
                "the kernel does not run before a line with: firmware end-phase"
            }
            Problem::Empty => "the script has no step; one is: 0 kernel reserve 2",
        }
    }
}

impl fmt::Display for ScriptError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: ", self.line)?;
        match (self.word.as_str(), self.problem) {
            ("", Problem::Empty) => {}
            ("", _) => f.write_str("a word is missing at the end: ")?,
            (word, _) => write!(f, "'{word}': ")?,
        }
        f.write_str(self.problem.hint())
    }
}

impl std::error::Error for ScriptError {}

impl FromStr for Script {
    type Err = ScriptError;

    fn from_str(text: &str) -> Result<Script, ScriptError> {
        let mut steps: Vec<Step> = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.split('#').next().unwrap_or_default();
            let mut words = Words {
                line: number,
                words: line.split_whitespace(),
            };
            if let Some(step) = words.step(&steps)? {
                steps.push(step);
            }
        }
        let has_firmware = steps.iter().any(|step| step.layer == Some(Layer::Firmware));
        if steps.is_empty() {
            return Err(ScriptError {
                line: text.lines().count().max(1),
                word: String::new(),
                problem: Problem::Empty,
            });
        }
        check_phase(&steps, has_firmware)?;
        Ok(Script {
            steps,
            has_firmware,
        })
    }
}

/// Checks that firmware acts before its phase ends, and the kernel after that.
fn check_phase(steps: &[Step], has_firmware: bool) -> Result<(), ScriptError> {
    let mut over = !has_firmware;
    for step in steps {
        let problem = match step.layer {
            Some(Layer::Firmware) if over => Problem::PhaseOver,
            Some(Layer::GuestKernel) if !over => Problem::PhaseNotOver,
            _ => {
                over |= step.action == Action::EndPhase;
                continue;
            }
        };
        let word = match problem {
            Problem::PhaseOver => "firmware",
            _ => "kernel",
        };
        return Err(ScriptError {
            line: step.line,
            word: word.to_owned(),
            problem,
        });
    }
    Ok(())
}

/// The latest time in a script: a day.
const LONGEST_MS: u32 = 86_400_000;

/// The words of one line that are left.
struct Words<'a, I: Iterator<Item = &'a str>> {
    line: usize,
    words: I,
}

impl<'a, I: Iterator<Item = &'a str>> Words<'a, I> {
    fn error(&self, word: &str, problem: Problem) -> ScriptError {
        ScriptError {
            line: self.line,
            word: word.to_owned(),
            problem,
        }
    }

    /// Reads the next word by `read`.
    fn next<T>(
        &mut self,
        problem: Problem,
        read: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, ScriptError> {
        let word = self.words.next().unwrap_or_default();
        read(word).ok_or_else(|| self.error(word, problem))
    }

    fn end<T>(&mut self, value: T) -> Result<T, ScriptError> {
        match self.words.next() {
            None => Ok(value),
            Some(word) => Err(self.error(word, Problem::TooMany)),
        }
    }

    /// Reads the step of the line. `None` means that the line is empty.
    fn step(&mut self, before: &[Step]) -> Result<Option<Step>, ScriptError> {
        let Some(time) = self.words.next() else {
            return Ok(None);
        };
        let at_ms = time.parse().ok().filter(|ms| *ms <= LONGEST_MS);
        let at_ms = at_ms.ok_or_else(|| self.error(time, Problem::Time))?;
        if before.last().is_some_and(|step| step.at_ms > at_ms) {
            return Err(self.error(time, Problem::Backwards));
        }
        let line = self.line;
        let layer = self.next(Problem::Layer, |word| match word {
            "tick" => Some(None),
            word => layer(word).map(Some),
        })?;
        let action = match layer {
            None => self.end(Action::Tick)?,
            Some(layer) => self.action(layer)?,
        };
        Ok(Some(Step {
            line,
            at_ms,
            layer,
            action,
        }))
    }

    fn action(&mut self, layer: Layer) -> Result<Action, ScriptError> {
        let word = self.words.next().unwrap_or_default();
        let action = match word {
            "reserve" => {
                let wanted = self.next(Problem::Wanted, wanted)?;
                return self.reserve(wanted);
            }
            "claim" => Action::Claim(self.next(Problem::Counter, CounterId::named)?),
            "renew" => Action::Renew(self.next(Problem::Counter, CounterId::named)?),
            "release" => self.next(Problem::Counter, |word| match word {
                "all" => Some(Action::Release(None)),
                word => CounterId::named(word).map(|counter| Action::Release(Some(counter))),
            })?,
            "lend" => Action::Lend(self.next(Problem::Counter, CounterId::named)?, true),
            "keep" => Action::Lend(self.next(Problem::Counter, CounterId::named)?, false),
            "reply" => {
                let yields = self.next(Problem::Reply, |word| match word {
                    "yield" => Some(true),
                    "refuse" => Some(false),
                    _ => None,
                })?;
                let named = self.words.next();
                let counter = named.map(|word| {
                    CounterId::named(word).ok_or_else(|| self.error(word, Problem::Counter))
                });
                Action::Reply {
                    yields,
                    counter: counter.transpose()?,
                }
            }
            "withdraw" => Action::Withdraw,
            "end-phase" if layer == Layer::Firmware => Action::EndPhase,
            "end-phase" => return Err(self.error(word, Problem::PhaseOfOther)),
            "tick" => Action::Tick,
            _ => return Err(self.error(word, Problem::Action)),
        };
        self.end(action)
    }

    fn reserve(&mut self, wanted: Wanted) -> Result<Action, ScriptError> {
        let (mut lease_ms, mut named) = (None, None);
        while let Some(word) = self.words.next() {
            match word {
                "lease" if lease_ms.is_none() => lease_ms = Some(self.next(Problem::Lease, lease)?),
                "event" if named.is_none() => named = Some(self.next(Problem::Event, event)?),
                _ if lease_ms.is_some() || named.is_some() => {
                    return Err(self.error(word, Problem::TooMany));
                }
                _ => return Err(self.error(word, Problem::Lease)),
            }
        }
        if let (Wanted::This(CounterId::Fixed(_)), Some(_)) = (wanted, named) {
            return Err(self.error("event", Problem::FixedEvent));
        }
        self.end(Action::Reserve {
            wanted,
            lease_ms,
            event: named,
        })
    }
}

fn layer(word: &str) -> Option<Layer> {
    match word {
        "firmware" => Some(Layer::Firmware),
        "hypervisor" => Some(Layer::Hypervisor),
        "kernel" => Some(Layer::GuestKernel),
        _ => None,
    }
}

/// Reads an event that `REQUEST` can name, in hexadecimal: `0x76`.
fn event(word: &str) -> Option<NamedEvent> {
    let digits = word.strip_prefix("0x")?;
    NamedEvent::of_select(u64::from_str_radix(digits, 16).ok()?)
}

/// Reads a lease that `REQUEST` can carry.
fn lease(word: &str) -> Option<u32> {
    let ms: u32 = word.parse().ok()?;
    let units = u64::from(ms) / abi::REQUEST_LEASE_UNIT_MS;
    let is_whole = u64::from(ms) % abi::REQUEST_LEASE_UNIT_MS == 0;
    (is_whole && (1..=0xffff).contains(&units)).then_some(ms)
}

fn wanted(word: &str) -> Option<Wanted> {
    if let Some(count) = word.strip_prefix("held:") {
        let count = count.parse().ok().filter(|count| *count > 0);
        return count.map(Wanted::Held);
    }
    match word.parse() {
        Ok(0) => None,
        Ok(count) => Some(Wanted::Any(count)),
        Err(_) => CounterId::named(word).map(Wanted::This),
    }
}
