//! Which backends count: the words of `--counters`, and what they open.

use std::fmt;
use std::path::PathBuf;

use super::BackendError;

/// Sources of counts in order of preference, as given to `--counters`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sources(Vec<Source>);

/// One source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The best that the host has.
    Auto,
    /// The host's kernel.
    Perf,
    /// The TSC.
    Clock,
    /// Single steps.
    Step,
    /// A processor in software.
    Emu,
    /// Declared rates.
    Sim {
        /// The table of rates.
        rates: PathBuf,
    },
    /// The physical registers.
    Msr {
        /// Host CPU whose registers are used; the first that the process may
        /// run on if none is given.
        cpu: Option<u32>,
        /// Also if somebody else seems to use them.
        force: bool,
    },
}

/// What an option that a source does not take may look like.
const MSR_FORM: &str = "give msr, msr=CPU or msr=CPU:force, where CPU is the number of a host CPU";

impl Sources {
    /// Reads a list of sources: names separated by commas, `sim=FILE`,
    /// `msr[=CPU][:force]`.
    ///
    /// # Errors
    /// A name is unknown, an option makes no sense, or a source is named twice.
    pub fn parse(list: &str) -> Result<Self, BackendError> {
        let mut sources: Vec<Source> = Vec::new();
        for word in list.split(',') {
            let source = Source::parse(word)?;
            if sources.iter().any(|other| other.name() == source.name()) {
                return Err(BackendError::Options {
                    text: list.to_owned(),
                    problem: format!("{} is named twice", source.name()),
                });
            }
            sources.push(source);
        }
        if sources.len() > 1 && sources.contains(&Source::Auto) {
            return Err(BackendError::Options {
                text: list.to_owned(),
                problem: "auto stands for a whole list and cannot be part of one".to_owned(),
            });
        }
        Ok(Sources(sources))
    }

    /// The best that the host has.
    pub fn auto() -> Self {
        Sources(vec![Source::Auto])
    }

    /// The sources, in order of preference.
    pub fn iter(&self) -> impl Iterator<Item = &Source> {
        self.0.iter()
    }

    /// What the words stand for where the kernel has `hardware` events of guests, or
    /// not: the best for `auto`, never what slows a guest down or makes counts up;
    /// for `perf` without them the TSC behind it, so that cycles are counted.
    #[must_use]
    pub fn on_host(&self, hardware: impl Fn() -> bool) -> Self {
        let with_clock = |source: &Source| match source {
            Source::Auto if !hardware() => vec![Source::Clock],
            Source::Auto => vec![Source::Perf, Source::Clock],
            Source::Perf if !self.0.contains(&Source::Clock) && !hardware() => {
                vec![Source::Perf, Source::Clock]
            }
            other => vec![other.clone()],
        };
        Sources(self.0.iter().flat_map(with_clock).collect())
    }

    /// What the words stand for where a processor in software runs the guest.
    #[must_use]
    pub fn emulated(&self) -> Self {
        let own = |source: &Source| match source {
            Source::Auto => Source::Emu,
            other => other.clone(),
        };
        Sources(self.0.iter().map(own).collect())
    }

    /// The same with each file name changed by `change`.
    #[must_use]
    pub fn map_files(self, change: impl Fn(PathBuf) -> PathBuf) -> Self {
        let sources = self.0.into_iter().map(|source| match source {
            Source::Sim { rates } => Source::Sim {
                rates: change(rates),
            },
            other => other,
        });
        Sources(sources.collect())
    }
}

impl Source {
    fn parse(word: &str) -> Result<Self, BackendError> {
        let options = |problem: &str| BackendError::Options {
            text: word.to_owned(),
            problem: problem.to_owned(),
        };
        let (body, force) = match word.strip_suffix(":force") {
            Some(body) => (body, true),
            None => (word, false),
        };
        let (name, value) = match body.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (body, None),
        };
        let source = match (name, value) {
            ("sim", Some(file)) if !file.is_empty() && !force => Source::Sim {
                rates: PathBuf::from(file),
            },
            ("sim", _) => return Err(options("give its table of rates: sim=FILE.toml")),
            ("msr", None) => Source::Msr { cpu: None, force },
            ("msr", Some(cpu)) => Source::Msr {
                cpu: Some(cpu.parse().map_err(|_| options(MSR_FORM))?),
                force,
            },
            (name, _) if name.starts_with("msr:") => return Err(options(MSR_FORM)),
            (name, value) => {
                let plain = match name {
                    "auto" => Source::Auto,
                    "perf" => Source::Perf,
                    "clock" => Source::Clock,
                    "step" => Source::Step,
                    "emu" => Source::Emu,
                    _ => {
                        return Err(BackendError::Unknown {
                            name: word.to_owned(),
                        });
                    }
                };
                if value.is_some() || force {
                    return Err(options("it takes no options"));
                }
                plain
            }
        };
        Ok(source)
    }

    /// The backend's name.
    pub fn name(&self) -> &'static str {
        match self {
            Source::Auto => "auto",
            Source::Perf => "perf",
            Source::Clock => "clock",
            Source::Step => "step",
            Source::Emu => "emu",
            Source::Sim { .. } => "sim",
            Source::Msr { .. } => "msr",
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Source::Sim { rates } => write!(f, "={}", rates.display()),
            Source::Msr { cpu, force } => {
                if let Some(cpu) = cpu {
                    write!(f, "={cpu}")?;
                }
                f.write_str(if *force { ":force" } else { "" })
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Sources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, source) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{source}")?;
        }
        Ok(())
    }
}
