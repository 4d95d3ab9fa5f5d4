//! Reading the requests of an audit file. A file with a gap is refused: what is missing
//! may have taken a counter.

use std::path::Path;

use arbiter::{Ask, PerKind, Policy, Scheme};
use arbiter_lab::Recorded;
use serde::Deserialize;
use thiserror::Error;
use umpire_audit::{AskError, AskLine, FORMAT, Footer, Header, LineKind, VERSION};
use umpire_events::one_line;

use super::super::input::{self, InputError};
use crate::config::{PolicyTextError, parse_policy};

/// The longest audit file, in bytes.
const LONGEST: u64 = 256 << 20;

/// The requests of a run.
#[derive(Debug)]
pub(in super::super) struct Trail {
    pub(super) vcpus: u8,
    pub(super) counters: PerKind,
    pub(super) scheme: Scheme,
    pub(super) policy: Policy,
    pub(super) has_firmware: bool,
    pub(super) smm: bool,
    pub(super) end_ns: u64,
    /// By time, each with its line.
    pub(super) requests: Vec<(usize, Recorded)>,
}

/// An audit file that cannot be replayed.
#[derive(Debug, Error)]
pub(in super::super) enum TrailError {
    #[error(transparent)]
    Input(#[from] InputError),
    #[error("{name}, line {line}: {problem}")]
    Line {
        name: String,
        line: usize,
        problem: LineProblem,
    },
}

/// What is wrong with a line.
#[derive(Debug, Error)]
pub(in super::super) enum LineProblem {
    #[error("this is no line of an audit file: {0}")]
    Malformed(String),
    #[error("this is no audit file; give one that umpire run --audit wrote")]
    Format,
    #[error("version {0} of the file; this Umpire reads version 1")]
    Version(u64),
    #[error(
        "the file does not say who arbitrated; the run had no reservations, or an older Umpire"
    )]
    NoArbiter,
    #[error("'{0}' is no scheme")]
    Scheme(String),
    #[error("the policy of the run: {0}")]
    Policy(#[from] PolicyTextError),
    #[error("vCPU {vcpu} is none of the {vcpus} of the first line")]
    Vcpu { vcpu: u8, vcpus: u8 },
    #[error(
        "requests {from} to {to} of vCPU {vcpu} are missing; a trail with gaps cannot be replayed"
    )]
    Gap { vcpu: u8, from: u64, to: u64 },
    #[error("request {number} of vCPU {vcpu} comes again; the file is damaged")]
    Again { vcpu: u8, number: u64 },
    #[error(
        "the run had {said} requests and the file has {found}; a trail with gaps cannot be replayed"
    )]
    Sum { said: u64, found: u64 },
    #[error(transparent)]
    Ask(#[from] AskError),
    #[error(
        "an administrator changed reservations here (umpire pcr); replay plays what layers \
         did, so replay a run that nobody changed"
    )]
    Administered,
    #[error("the file ends here without its last line; it was cut off")]
    CutOff,
    #[error("the file goes on after its last line")]
    AfterEnd,
}

impl Trail {
    pub(super) fn read(path: &Path) -> Result<Self, TrailError> {
        let (name, text) = input::text(path, LONGEST)?;
        Self::parse(&text).map_err(|(line, problem)| TrailError::Line {
            name,
            line,
            problem,
        })
    }

    fn parse(text: &str) -> Result<Self, (usize, LineProblem)> {
        let mut lines = (1..).zip(text.lines());
        let (_, first) = lines.next().ok_or((1, LineProblem::Format))?;
        let mut trail = Self::begin(first).map_err(|problem| (1, problem))?;
        let mut numbers = vec![0_u64; usize::from(trail.vcpus)];
        let mut last = 1;
        let mut end = None;
        for (line, text) in lines {
            last = line;
            if end.is_some() {
                return Err((line, LineProblem::AfterEnd));
            }
            let at = |problem| (line, problem);
            // What a decision says is passed over, but for whether a run can have written it.
            let row: AskLine = json(text).map_err(at)?;
            match json(text).map_err(at)? {
                LineKind::Decided => {}
                LineKind::Asked => {
                    let request = trail.request(&row, &mut numbers).map_err(at)?;
                    trail.requests.push((line, request));
                }
                LineKind::End => {
                    let footer: Footer = json(text).map_err(at)?;
                    trail.end_ns = footer.time_ns;
                    end = Some((line, footer.requests));
                }
            }
        }
        let (line, said) = end.ok_or((last, LineProblem::CutOff))?;
        let found = numbers.iter().sum();
        let said = said.ok_or((line, LineProblem::NoArbiter))?;
        if said != found {
            return Err((line, LineProblem::Sum { said, found }));
        }
        // The requests of one vCPU are in their order.
        trail.requests.sort_by_key(|(_, request)| request.at_ns);
        Ok(trail)
    }

    fn begin(text: &str) -> Result<Self, LineProblem> {
        let header: Header = serde_json::from_str(text).map_err(|_| LineProblem::Format)?;
        if header.format != FORMAT {
            return Err(LineProblem::Format);
        }
        if header.version != VERSION {
            return Err(LineProblem::Version(header.version));
        }
        let arbitration = header.arbitration.ok_or(LineProblem::NoArbiter)?;
        let scheme = Scheme::named(&arbitration.scheme);
        let scheme = scheme.ok_or(LineProblem::Scheme(arbitration.scheme.into()))?;
        let mut policy = parse_policy(&arbitration.policy)?;
        policy.grace_ms = arbitration.grace_ms;
        Ok(Trail {
            vcpus: header.vcpus,
            counters: PerKind {
                programmable: header.programmable,
                fixed: header.fixed,
            },
            scheme,
            policy,
            has_firmware: arbitration.firmware,
            smm: arbitration.smm,
            end_ns: 0,
            requests: Vec::new(),
        })
    }

    /// Reads one request, the next of its vCPU.
    fn request(&self, row: &AskLine, numbers: &mut [u64]) -> Result<Recorded, LineProblem> {
        let (vcpu, vcpus) = (row.vcpu, self.vcpus);
        let before = numbers.get_mut(usize::from(vcpu));
        let before = before.ok_or(LineProblem::Vcpu { vcpu, vcpus })?;
        let (from, number) = (*before + 1, row.request);
        if number > from {
            let to = number - 1;
            return Err(LineProblem::Gap { vcpu, from, to });
        }
        if number < from {
            return Err(LineProblem::Again { vcpu, number });
        }
        *before = number;
        let ask = row.record()?;
        if ask.ask == Ask::Administered {
            return Err(LineProblem::Administered);
        }
        Ok(Recorded {
            at_ns: row.time_ns,
            vcpu,
            ask,
        })
    }
}

fn json<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, LineProblem> {
    let line = serde_json::from_str(text);
    line.map_err(|error| LineProblem::Malformed(one_line(&error.to_string())))
}
