//! The file of an experiment: a TOML table in which everything has a default.

use std::num::NonZero;
use std::path::Path;

use arbiter::{Policy, PolicyError, Scheme};
use arbiter_lab::{Machine, PlanError, Variant, Workload};
use serde::Deserialize;
use thiserror::Error;
use toml::Spanned;

use super::super::input::{self, InputError};
use crate::config::{PolicyTextError, describe, parse_policy, position};

/// An experiment that can be simulated.
#[derive(Debug)]
pub(in super::super) struct Experiment {
    pub(in super::super) machine: Machine,
    pub(in super::super) workload: Workload,
    pub(in super::super) schemes: Vec<Scheme>,
    policies: Vec<(String, Policy)>,
    pub(in super::super) seeds: NonZero<u32>,
    pub(in super::super) first_seed: u64,
    pub(in super::super) cookies: Cookies,
    /// The file as it is, for the report.
    pub(in super::super) text: String,
}

/// The file.
#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct Keys {
    seeds: Spanned<u32>,
    first_seed: u64,
    schemes: Spanned<Vec<Spanned<String>>>,
    machine: Machine,
    workload: Workload,
    policy: Vec<Spanned<PolicyKeys>>,
    cookies: Cookies,
}

/// One policy of the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct PolicyKeys {
    name: String,
    #[serde(default)]
    rules: Vec<String>,
    #[serde(default = "grace")]
    grace_ms: u32,
}

fn grace() -> u32 {
    Policy::default().grace_ms
}

/// The sweep over widths of cookies.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(in super::super) struct Cookies {
    /// Widths in bits.
    pub(in super::super) bits: Vec<u8>,
    /// What one guess costs, in microseconds.
    pub(in super::super) guess_us: u64,
}

impl Default for Cookies {
    fn default() -> Self {
        Cookies {
            bits: Vec::new(),
            guess_us: 10,
        }
    }
}

impl Default for Keys {
    fn default() -> Self {
        let schemes = Scheme::ALL.map(|scheme| Spanned::new(0..0, scheme.name().to_owned()));
        Keys {
            seeds: Spanned::new(0..0, 20),
            first_seed: 1,
            schemes: Spanned::new(0..0, schemes.to_vec()),
            machine: Machine::default(),
            workload: Workload::default(),
            policy: Vec::new(),
            cookies: Cookies::default(),
        }
    }
}

/// An experiment that cannot be simulated.
#[derive(Debug, Error)]
pub(in super::super) enum ExperimentError {
    #[error(transparent)]
    Input(#[from] InputError),
    #[error("{name}, line {line}, column {column}: {message}")]
    Malformed {
        name: String,
        line: usize,
        column: usize,
        message: String,
    },
    #[error("{name}: {error}")]
    Plan { name: String, error: PlanError },
    #[error("{name}, line {line}: {problem}")]
    Value {
        name: String,
        line: usize,
        problem: ValueProblem,
    },
}

/// What is wrong with a value.
#[derive(Debug, Error)]
pub(in super::super) enum ValueProblem {
    #[error("'{0}' is no scheme; give single, independent or interacting")]
    Scheme(String),
    #[error("schemes: give one at least: single, independent, interacting")]
    NoScheme,
    #[error("scheme '{0}' is there already")]
    SchemeTwice(Scheme),
    #[error("seeds = {0}: give 1 to 10000; 20 or more for intervals that mean something")]
    Seeds(u32),
    #[error("policy '{0}' is there already; give each policy a name of its own")]
    PolicyTwice(String),
    #[error("policy '{0}', grace-ms = {1}: give 1 to 60000 milliseconds")]
    Grace(String, u32),
    #[error("policy '{0}': {1}")]
    Policy(String, PolicyTextError),
    #[error("policy '{0}': {1}")]
    Machine(String, PolicyError),
    #[error("cookies.bits: {0}: give 1 to 48 bits, which is what the registers take")]
    Bits(u8),
    #[error("cookies.guess-us = 0: give 1 to 1000000 microseconds; no guess is for nothing")]
    GuessTime,
}

impl Experiment {
    pub(super) fn read(path: &Path) -> Result<Self, ExperimentError> {
        let (name, text) = input::text(path, input::LONGEST)?;
        Self::parse(name, text)
    }

    fn parse(name: String, text: String) -> Result<Self, ExperimentError> {
        let keys: Keys = toml::from_str(&text).map_err(|error| {
            let start = error.span().map_or(0, |span| span.start);
            let (line, column) = position(&text, start);
            ExperimentError::Malformed {
                name: name.clone(),
                line,
                column,
                message: describe(error, &text),
            }
        })?;
        let wrong = |at: usize, problem| ExperimentError::Value {
            name: name.clone(),
            line: position(&text, at).0,
            problem,
        };
        let checked = keys
            .machine
            .check()
            .and_then(|()| keys.workload.check(&keys.machine));
        checked.map_err(|error| ExperimentError::Plan {
            name: name.clone(),
            error,
        })?;
        let cookies = &keys.cookies;
        let at = text.find("[cookies]").unwrap_or(0);
        if let Some(bits) = cookies.bits.iter().find(|bits| !(1..=48).contains(*bits)) {
            return Err(wrong(at, ValueProblem::Bits(*bits)));
        }
        if !(1..=1_000_000).contains(&cookies.guess_us) {
            return Err(wrong(at, ValueProblem::GuessTime));
        }
        let count = *keys.seeds.get_ref();
        let seeds = NonZero::new(count).filter(|count| count.get() <= 10_000);
        let seeds =
            seeds.ok_or_else(|| wrong(keys.seeds.span().start, ValueProblem::Seeds(count)))?;
        let mut schemes = Vec::new();
        for word in keys.schemes.get_ref() {
            let scheme = Scheme::named(word.get_ref());
            let problem = || ValueProblem::Scheme(word.get_ref().clone());
            let scheme = scheme.ok_or_else(|| wrong(word.span().start, problem()))?;
            if schemes.contains(&scheme) {
                return Err(wrong(word.span().start, ValueProblem::SchemeTwice(scheme)));
            }
            schemes.push(scheme);
        }
        if schemes.is_empty() {
            return Err(wrong(keys.schemes.span().start, ValueProblem::NoScheme));
        }
        let mut policies: Vec<(String, Policy)> = Vec::new();
        for policy in &keys.policy {
            let there = policies.iter().map(|(name, _)| name.as_str());
            let read = policy_of(policy.get_ref(), there, &keys.machine);
            policies.push(read.map_err(|problem| wrong(policy.span().start, problem))?);
        }
        if policies.is_empty() {
            policies.push(("default".to_owned(), Policy::default()));
        }
        Ok(Experiment {
            machine: keys.machine,
            workload: keys.workload,
            schemes,
            policies,
            seeds,
            first_seed: keys.first_seed,
            cookies: keys.cookies,
            text,
        })
    }

    /// Each policy under each scheme.
    pub(super) fn variants(&self) -> Vec<Variant> {
        let variants = self.policies.iter().flat_map(|(name, policy)| {
            self.schemes.iter().map(|scheme| Variant {
                scheme: *scheme,
                name: name.clone(),
                policy: *policy,
            })
        });
        variants.collect()
    }
}

fn policy_of<'a>(
    keys: &PolicyKeys,
    mut there: impl Iterator<Item = &'a str>,
    machine: &Machine,
) -> Result<(String, Policy), ValueProblem> {
    let name = keys.name.clone();
    if there.any(|other| other == name) {
        return Err(ValueProblem::PolicyTwice(name));
    }
    if !(1..=60_000).contains(&keys.grace_ms) {
        return Err(ValueProblem::Grace(name, keys.grace_ms));
    }
    let parsed = parse_policy(&keys.rules);
    let mut policy = parsed.map_err(|error| ValueProblem::Policy(name.clone(), error))?;
    policy.grace_ms = keys.grace_ms;
    let fits = policy.fits(machine.counters, machine.fixed);
    fits.map_err(|error| ValueProblem::Machine(name.clone(), error))?;
    Ok((name, policy))
}
