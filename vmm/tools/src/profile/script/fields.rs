//! What is printed of a sample.

use std::str::FromStr;

use thiserror::Error;
use umpire_events::likeness;

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
    Vm,
    /// The vCPU.
    Vcpu,
    Core,
    /// The event set.
    Set,
    /// Kernel or user.
    Ring,
    /// CR3 as it was.
    Cr3,
    /// How many events the sample stands for.
    Period,
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

/// Fields that samples of hardware's events do not have: perf says so, and prints the others.
const OF_OTHERS: [&str; 3] = ["trace", "bpf-output", "synth"];

/// The kinds of events that fields may be said for, as perf names them. A guest's are `hw`.
const KINDS: [&str; 6] = ["hw", "sw", "trace", "raw", "break", "synth"];

/// Fields that perf has, and no profile of a guest.
const OF_PERF: &[&str] = &[
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
    "callindent",
    "insn",
    "insnlen",
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
pub struct FieldChoice {
    /// What it makes of the fields before.
    pub change: FieldChange,
    /// What of it stands for nothing, as with perf: a line each.
    pub ignored: Vec<String>,
}

/// What a `-F` makes of the fields before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FieldChange {
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
        word: String,
        /// What may have been meant.
        hint: String,
    },
    /// It is one of perf's, and samples of guests have no such thing.
    #[error("'{0}' is a field of perf's that samples of a guest do not have; there are {ALL}")]
    OfPerf(String),
    /// It is said of events that perf does not have either.
    #[error(
        "'{0}:' is no kind of events; give hw:FIELD[,...], or the fields alone: a guest's events \
         are hw"
    )]
    Kind(String),
    /// Some have a sign and others none.
    #[error(
        "'{0}': fields with + or - change what is printed, and others say it: not both in one -F"
    )]
    Mixed(String),
    #[error("no field is given; give some of {ALL} with commas between")]
    Empty,
}

const ALL: &str = "comm,pid,tid,cpu,time,vm,vcpu,core,set,ring,cr3,period,event,ip,sym,symoff,\
                   dso,callchain";

impl FromStr for FieldChoice {
    type Err = FieldsError;

    fn from_str(text: &str) -> Result<Self, FieldsError> {
        let (kind, list) = match text.split_once(':') {
            Some((kind, list)) => (Some(kind.trim()), list),
            None => (None, text),
        };
        if let Some(kind) = kind.filter(|kind| !KINDS.contains(kind)) {
            return Err(FieldsError::Kind(kind.to_owned()));
        }
        let words = list
            .split(',')
            .map(str::trim)
            .filter(|word| !word.is_empty());
        let (mut only, mut changed) = (Vec::new(), Vec::new());
        let mut ignored = Vec::new();
        let (mut is_only, mut is_changed) = (false, false);
        for word in words {
            let added = word.strip_prefix('+').map(|rest| (Change::Added, rest));
            let removed = || word.strip_prefix('-').map(|rest| (Change::Removed, rest));
            let change = added.or_else(removed);
            is_only |= change.is_none();
            is_changed |= change.is_some();
            let word = change.map_or(word, |(_, word)| word);
            if OF_OTHERS.contains(&word) {
                ignored.push(format!(
                    "-F: '{word}' is not valid for hardware events, and is ignored"
                ));
                continue;
            }
            let field = field(word)?;
            match change {
                Some((change, _)) => changed.push((change, field)),
                None => only.push(field),
            }
        }
        let change = match (is_only, is_changed) {
            (false, false) => return Err(FieldsError::Empty),
            (true, true) => return Err(FieldsError::Mixed(text.to_owned())),
            (true, false) => FieldChange::Only(only),
            (false, true) => FieldChange::Changed(changed),
        };
        match kind {
            None | Some("hw") => Ok(Self { change, ignored }),
            // It says nothing of the events that there are.
            Some(kind) => Ok(Self {
                change: FieldChange::Changed(Vec::new()),
                ignored: vec![format!(
                    "-F: a guest's events are hw and none is {kind}, so '{text}' is ignored"
                )],
            }),
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
    let all = Field::ALL.into_iter().map(|(_, name)| name);
    let near = all.filter_map(|name| {
        let like = likeness(word, name);
        like.few_differ.then_some((like.distance, name))
    });
    let near = near.min();
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
            match &choice.change {
                FieldChange::Only(fields) => {
                    self.0.clone_from(fields);
                    if callers && self.has_place() {
                        self.0.push(Field::Callchain);
                    }
                }
                FieldChange::Changed(changes) => {
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
        // Of other kinds of events.
        check(&["comm,tid,trace,ip"], "comm,tid,ip,callchain");
        check(
            &["+trace,-bpf-output", "-synth,+vm"],
            &usual.replace("time,", "time,vm,"),
        );
        check(&["trace"], "");
        check(&["hw:comm,tid,time"], "comm,tid,time");
        check(&["hw:-cpu"], &usual.replace(",cpu", ""));
        check(&["comm,time", "trace:ip", "sw:+pid"], "comm,time");
        for kind in ["raw", "break", "synth"] {
            check(&[&format!("{kind}:comm,time")], usual);
        }
        check(&["foo:comm"], "'foo:' is no kind of events; give hw:");
        check(&["+hw:comm"], "'+hw:' is no kind of events");
        check(&["sw:colour"], "'colour' is no field");
        check(&["sw:"], "no field is given");
        check(&["hw:"], "no field is given");
        check(&["hw:comm,+trace"], "'hw:comm,+trace': fields with + or -");
        let ignored = |text: &str| text.parse::<FieldChoice>().unwrap().ignored;
        let line = "-F: 'trace' is not valid for hardware events, and is ignored";
        assert_eq!(ignored("comm,trace,ip"), [line]);
        assert_eq!(ignored("+trace"), [line]);
        let line = "-F: a guest's events are hw and none is sw, so 'sw:comm,trace' is ignored";
        assert_eq!(ignored("sw:comm,trace"), [line]);
        assert_eq!(ignored("hw:comm"), [""; 0]);
    }
}
