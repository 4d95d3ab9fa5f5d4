//! What is printed of a sample.

use std::str::FromStr;

use thiserror::Error;

use crate::profile::names::Names;

/// Something that is printed of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// The name of the guest's thread.
    Comm,
    /// The guest's process.
    Pid,
    /// The guest's thread.
    Tid,
    /// The guest's CPU, as perf prints one: the vCPU.
    Cpu,
    /// Seconds since sampling began.
    Time,
    /// The VM.
    Vm,
    /// The vCPU.
    Vcpu,
    /// The core.
    Core,
    /// The event set.
    Set,
    /// Kernel or user.
    Ring,
    /// CR3 as it was.
    Cr3,
    /// How many events the sample stands for.
    Period,
    /// The event.
    Event,
    /// The instruction pointer.
    Ip,
    /// The symbol.
    Sym,
    /// How far behind the symbol's beginning.
    Symoff,
    /// What the symbol is in.
    Dso,
    /// The callers, a line each.
    Callchain,
}

impl Field {
    const ALL: [(Self, &'static str); 18] = [
        (Self::Comm, "comm"),
        (Self::Pid, "pid"),
        (Self::Tid, "tid"),
        (Self::Cpu, "cpu"),
        (Self::Time, "time"),
        (Self::Vm, "vm"),
        (Self::Vcpu, "vcpu"),
        (Self::Core, "core"),
        (Self::Set, "set"),
        (Self::Ring, "ring"),
        (Self::Cr3, "cr3"),
        (Self::Period, "period"),
        (Self::Event, "event"),
        (Self::Ip, "ip"),
        (Self::Sym, "sym"),
        (Self::Symoff, "symoff"),
        (Self::Dso, "dso"),
        (Self::Callchain, "callchain"),
    ];

    /// It is printed of each place of a chain.
    fn is_of_place(self) -> bool {
        matches!(self, Self::Ip | Self::Sym | Self::Dso)
    }
}

/// Fields that perf has, and no profile of a guest.
const OF_PERF: &[&str] = &[
    "trace",
    "addr",
    "srcline",
    "iregs",
    "uregs",
    "brstack",
    "brstacksym",
    "brstackoff",
    "brstackinsn",
    "brstackinsnlen",
    "flags",
    "data_src",
    "weight",
    "bpf-output",
    "callindent",
    "insn",
    "insnlen",
    "synth",
    "phys_addr",
    "metric",
    "misc",
    "srccode",
    "ipc",
    "tod",
    "data_page_size",
    "code_page_size",
    "ins_lat",
    "machine_pid",
    "cgroup",
    "retire_lat",
];

/// One `-F`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FieldChoice {
    /// These, and no others.
    Only(Vec<Field>),
    /// Those of before with some more or without some.
    Changed(Vec<(Change, Field)>),
}

/// What becomes of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It is printed.
    Added,
    /// It is not printed.
    Removed,
}

/// Fields that cannot be printed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum FieldsError {
    /// A word is no field.
    #[error("'{word}' is no field{hint}; give some of {ALL} with commas between")]
    Unknown {
        /// The word.
        word: String,
        /// What may have been meant.
        hint: String,
    },
    /// It is one of perf's, and samples of guests have no such thing.
    #[error("'{0}' is a field of perf's that samples of a guest do not have; there are {ALL}")]
    OfPerf(String),
    /// Some have a sign and others none.
    #[error(
        "'{0}': fields with + or - change what is printed, and others say it: not both in one -F"
    )]
    Mixed(String),
    /// There is none.
    #[error("no field is given; give some of {ALL} with commas between")]
    Empty,
}

const ALL: &str = "comm,pid,tid,cpu,time,vm,vcpu,core,set,ring,cr3,period,event,ip,sym,symoff,\
                   dso,callchain";

impl FromStr for FieldChoice {
    type Err = FieldsError;

    fn from_str(text: &str) -> Result<Self, FieldsError> {
        let words = text
            .split(',')
            .map(str::trim)
            .filter(|word| !word.is_empty());
        let (mut only, mut changed) = (Vec::new(), Vec::new());
        for word in words {
            let added = word.strip_prefix('+').map(|rest| (Change::Added, rest));
            let removed = || word.strip_prefix('-').map(|rest| (Change::Removed, rest));
            match added.or_else(removed) {
                Some((change, word)) => changed.push((change, field(word)?)),
                None => only.push(field(word)?),
            }
        }
        match (only.is_empty(), changed.is_empty()) {
            (true, true) => Err(FieldsError::Empty),
            (false, true) => Ok(Self::Only(only)),
            (true, false) => Ok(Self::Changed(changed)),
            (false, false) => Err(FieldsError::Mixed(text.to_owned())),
        }
    }
}

fn field(word: &str) -> Result<Field, FieldsError> {
    if let Some((field, _)) = Field::ALL.into_iter().find(|(_, name)| *name == word) {
        return Ok(field);
    }
    if OF_PERF.contains(&word) {
        return Err(FieldsError::OfPerf(word.to_owned()));
    }
    let distance = |name| strsim::damerau_levenshtein(word, name);
    let near = Field::ALL
        .into_iter()
        .map(|(_, name)| (distance(name), name));
    let near = near
        .min()
        .filter(|(distance, _)| *distance <= (word.len() / 3).max(1));
    Err(FieldsError::Unknown {
        word: word.to_owned(),
        hint: near.map_or_else(String::new, |(_, name)| format!("; is it {name}?")),
    })
}

/// What is printed; it comes in one order, whatever the order here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fields(Vec<Field>);

impl Fields {
    /// What perf prints, and the process beside the thread.
    pub(super) fn usual(chains: bool) -> Self {
        let fields = [
            Field::Comm,
            Field::Pid,
            Field::Tid,
            Field::Cpu,
            Field::Time,
            Field::Period,
            Field::Event,
            Field::Ip,
            Field::Sym,
            Field::Symoff,
            Field::Dso,
        ];
        let callers = chains.then_some(Field::Callchain);
        Self(fields.into_iter().chain(callers).collect())
    }

    /// Those of JSON; more of them where tasks are known.
    pub(super) fn usual_json(names: &Names) -> Self {
        let task = [Field::Comm, Field::Pid, Field::Tid, Field::Dso];
        let all = [
            Field::Vm,
            Field::Vcpu,
            Field::Core,
            Field::Time,
            Field::Period,
            Field::Event,
            Field::Ip,
            Field::Sym,
            Field::Callchain,
        ];
        let task = task.into_iter().filter(|_| names.has_tasks());
        Self(all.into_iter().chain(task).collect())
    }

    /// These after each `-F`, in turn. With `callers`, places that are asked for bring their
    /// callers, as with perf.
    pub(super) fn changed(mut self, choices: &[FieldChoice], callers: bool) -> Self {
        for choice in choices {
            match choice {
                FieldChoice::Only(fields) => {
                    self.0.clone_from(fields);
                    if callers && self.has_place() {
                        self.0.push(Field::Callchain);
                    }
                }
                FieldChoice::Changed(changes) => {
                    for (change, field) in changes {
                        self.remove(*field);
                        if *change == Change::Added {
                            self.0.push(*field);
                        }
                    }
                }
            }
        }
        self
    }

    pub(super) fn remove(&mut self, field: Field) {
        self.0.retain(|one| *one != field);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(|field| *field == Field::Callchain)
    }

    pub(super) fn has(&self, field: Field) -> bool {
        self.0.contains(&field)
    }

    /// Something of where the sample was taken is printed.
    pub(super) fn has_place(&self) -> bool {
        self.0.iter().any(|field| field.is_of_place())
    }

    /// A line has more than perf's.
    pub(super) fn has_own(&self) -> bool {
        use Field::{Core, Cr3, Ring, Set, Vcpu, Vm};
        [Vm, Vcpu, Core, Set, Ring, Cr3]
            .into_iter()
            .any(|field| self.has(field))
    }

    /// Places have lines of their own.
    pub(super) fn has_lines(&self) -> bool {
        self.has(Field::Callchain) && self.has_place()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_said_or_changed_as_with_perf() {
        fn check(words: &[&str], expected: &str) {
            let parsed: Result<Vec<FieldChoice>, _> = words.iter().map(|one| one.parse()).collect();
            let fields = parsed.map(|choices| Fields::usual(true).changed(&choices, true));
            let found = match fields {
                Ok(fields) => {
                    let all = Field::ALL.into_iter();
                    let has = all.filter(|(field, _)| fields.has(*field));
                    has.map(|(_, name)| name).collect::<Vec<_>>().join(",")
                }
                Err(error) => error.to_string(),
            };
            assert!(found.starts_with(expected), "{words:?}: {found}");
        }
        let usual = "comm,pid,tid,cpu,time,period,event,ip,sym,symoff,dso,callchain";
        check(&[], usual);
        check(&["+pid"], usual);
        check(
            &["-cpu,+vm", "-callchain"],
            "comm,pid,tid,time,vm,period,event,ip,sym,symoff,dso",
        );
        check(&["comm, ip,,sym"], "comm,ip,sym,callchain");
        check(&["comm,time"], "comm,time");
        check(&["+vm", "time", "+comm"], "comm,time");
        check(&["colour"], "'colour' is no field; give some of comm,pid,");
        check(&["+evnt"], "'evnt' is no field; is it event?");
        check(&["-srcline"], "'srcline' is a field of perf's that");
        check(&["comm,+ip"], "'comm,+ip': fields with + or -");
        check(&[""], "no field is given");
    }
}
