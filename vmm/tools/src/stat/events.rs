//! The events of `umpire stat`: what a name stands for in this VM.

use perfmon::VirtualPmd;
use perfmon_abi::wire::info::VirtualPmdInfo;
use pmu_model::{CountRequest, KnownEvent, PmuModel, Provenance};
use umpire_events::{
    EventError, Extras, Measured, NameTable, bare_name, extras, nearest, resolve, wants_one_ring,
};

use super::Unit;
use super::spec::EventList;

/// What an event is counted by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A counter that is asked for this.
    Counter(CountRequest),
    /// A PMD of the VMM.
    Quantity {
        pmd: u16,
        /// It is how much there is, not how often something took place.
        level: bool,
    },
    /// The clock on the wall, from the beginning to the end of counting.
    Elapsed,
    Nothing {
        /// Why: the VM's PMU has no such event, or it is none of a guest's.
        why: String,
    },
}

/// An event that was asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Asked {
    /// Its name as given.
    pub name: String,
    /// What it is counted by.
    pub source: Source,
    /// The unit to print it in.
    pub unit: Unit,
    /// What it says beside what is to be counted.
    pub said: Extras,
}

impl Asked {
    /// The request, if it is for a counter.
    #[must_use]
    pub fn request(&self) -> Option<&CountRequest> {
        match &self.source {
            Source::Counter(request) => Some(request),
            Source::Quantity { .. } | Source::Elapsed | Source::Nothing { .. } => None,
        }
    }

    /// The event that it is, if it is counted without a condition at both rings.
    #[must_use]
    pub fn plain(&self) -> Option<KnownEvent> {
        let request = self.request()?;
        let plain = !request.has_modifier() && request.usr && request.os;
        plain.then(|| request.event.known()).flatten()
    }

    /// It is this quantity.
    #[must_use]
    pub fn is(&self, which: VirtualPmd) -> bool {
        matches!(self.source, Source::Quantity { pmd, .. } if pmd == which.pmd())
    }

    /// How the VMM comes by it, if it is a quantity: it counts occurrences one by
    /// one, and computes times and bytes.
    #[must_use]
    pub fn reported(&self) -> Provenance {
        if self.unit == Unit::EVENTS {
            Provenance::Exact
        } else {
            Provenance::Derived
        }
    }

    /// It is how much there is, not how often something took place: of several contexts the
    /// most is meant, not the sum.
    #[must_use]
    pub fn is_level(&self) -> bool {
        matches!(
            self.source,
            Source::Elapsed | Source::Quantity { level: true, .. }
        )
    }
}

/// What is counted where nobody says: the events of `perf stat` as far as they
/// are a vCPU's.
pub const DEFAULT: &str = "vm-run-ns,vm-exits,vm-pmis,cycles,ref-cycles,instructions,branches,\
                           branch-misses";

/// Milliseconds for times, counts for all else.
const BYTES: Unit = Unit {
    name: "MB",
    scale: 1e-6,
};

/// As perf prints the time that it measures itself.
const NANOSECONDS: Unit = Unit {
    name: "ns",
    scale: 1.0,
};

const OF_NO_RING: &str = "the VMM reports it, and it is of no ring; leave u or k out";

/// What the names of a list stand for, group by group.
///
/// # Errors
/// One stands for nothing on any model, or is only for samples.
pub fn asked(
    list: &EventList,
    model: &PmuModel,
    quantities: &[VirtualPmdInfo],
    names: &dyn NameTable,
) -> Result<Vec<Vec<Asked>>, String> {
    let one = |name: &String| asked_one(name, model, quantities, names);
    let group = |group: &Vec<String>| group.iter().map(one).collect();
    list.groups.iter().map(group).collect()
}

fn asked_one(
    name: &str,
    model: &PmuModel,
    quantities: &[VirtualPmdInfo],
    names: &dyn NameTable,
) -> Result<Asked, String> {
    let said = extras(name);
    let event = |source, unit| Asked {
        name: said.label.clone().unwrap_or_else(|| name.to_owned()),
        source,
        unit,
        said: said.clone(),
    };
    let bare = bare_name(name);
    let reported = |name: &str| quantities.iter().find(|it| it.name == name);
    if let Some(quantity) = reported(bare) {
        let (source, unit) = of_quantity(quantity).ok_or_else(|| {
            format!(
                "'{bare}' is known at the moment of a sample only: umpire record has it in each \
                 one, and umpire script -F shows it"
            )
        })?;
        if wants_one_ring(name, model).map_err(|error| error.to_string())? {
            let why = OF_NO_RING.to_owned();
            return Ok(event(Source::Nothing { why }, Unit::EVENTS));
        }
        return Ok(event(source, unit));
    }
    match resolve(name, model, names) {
        Ok(named) => Ok(event(Source::Counter(named.request), Unit::EVENTS)),
        Err(error) => match measured(&error) {
            Some(Measured::WallTime) => Ok(event(Source::Elapsed, NANOSECONDS)),
            Some(Measured::RunTime)
                if let Some((source, unit)) =
                    reported(VirtualPmd::RunTime.name()).and_then(of_quantity) =>
            {
                Ok(event(source, unit))
            }
            _ if error.is_uncounted() => {
                let why = error.reason();
                Ok(event(Source::Nothing { why }, Unit::EVENTS))
            }
            _ => {
                // One hint is enough, and nobody mistakes a name for itself.
                let near = nearest(bare, quantities.iter().map(|it| &it.name));
                let mut near = near.iter().filter(|it| reported(it).is_some());
                let near = near.next().filter(|_| error.near().is_empty());
                let near = near.map_or(String::new(), |it| format!("; the VMM has '{it}'"));
                Err(format!("{error}{near}"))
            }
        },
    }
}

/// What has the figure of an event that no counter counts.
fn measured(error: &EventError) -> Option<Measured> {
    match error {
        EventError::Uncounted { measured, .. } => *measured,
        _ => None,
    }
}

/// None for what is known at the moment of a sample only.
fn of_quantity(quantity: &VirtualPmdInfo) -> Option<(Source, Unit)> {
    let level = quantity.unit == "bytes";
    let unit = match quantity.unit.as_str() {
        "ns" => Unit::MSEC_OF_NS,
        "bytes" => BYTES,
        "count" => Unit::EVENTS,
        _ => return None,
    };
    let pmd = quantity.pmd;
    Some((Source::Quantity { pmd, level }, unit))
}

#[cfg(test)]
mod tests {
    use super::*;
    use umpire_events::{LibraryError, NoTables};

    fn quantities() -> Vec<VirtualPmdInfo> {
        let info = |pmd: VirtualPmd, unit: &str| VirtualPmdInfo {
            pmd: pmd.pmd(),
            name: pmd.name().to_owned(),
            unit: unit.to_owned(),
            description: String::new(),
        };
        vec![
            info(VirtualPmd::Exits, "count"),
            info(VirtualPmd::RunTime, "ns"),
            info(VirtualPmd::GuestMemory, "bytes"),
            info(VirtualPmd::Ring, ""),
        ]
    }

    /// What comes of a list: `counter`, `quantity`, `level` or `nothing` for
    /// each event, or the error.
    fn check(model: &str, list: &str, expected: &str) {
        let model = PmuModel::parse(model).unwrap();
        let list: EventList = list.parse().unwrap();
        let word = |asked: &Asked| match asked.source {
            Source::Counter(_) => "counter",
            Source::Quantity { .. } if asked.reported() == Provenance::Exact => "exact",
            Source::Quantity { level: true, .. } => "level",
            Source::Quantity { level: false, .. } => "quantity",
            Source::Elapsed => "elapsed",
            Source::Nothing { .. } => "nothing",
        };
        let found = match asked(
            &list,
            &model,
            &quantities(),
            &NoTables(LibraryError::TooLate),
        ) {
            Ok(groups) => {
                let words: Vec<&str> = groups.iter().flatten().map(word).collect();
                words.join(" ")
            }
            Err(error) => error,
        };
        assert!(found.starts_with(expected), "{found}");
    }

    #[test]
    fn names_stand_for_counters_and_quantities() {
        check("amd-core", "cycles,vm-exits", "counter exact");
        check("amd-core", "{instructions:u,r5300c0}", "counter counter");
        check("amd-core", "vm-memory-bytes,vm-run-ns", "level quantity");
        check("amd-core", "ref-cycles", "nothing");
        check(
            "amd-core",
            "task-clock,cpu-clock/name=x/,duration_time,cs,LLC-loads,dTLB-load-misses,kvm:kvm_pio",
            "quantity quantity elapsed nothing nothing counter nothing",
        );
        check(
            "amd-core",
            "task-clock:k,duration_time:u",
            "nothing nothing",
        );
        check("amd-core", "cycles:D", "'cycles:D': D pins");
        // A quantity has the letters and names that other events have, but no ring.
        check(
            "amd-core",
            "vm-exits:k,vm-run-ns:up,vm-exits/name=x/,vm-exits:uk,vm-run-ns/name=y/p,vm-exits:GS",
            "nothing nothing exact exact quantity exact",
        );
        check(
            "amd-core",
            "{loads,vm-exits}:k,{stores,vm-run-ns}:W",
            "counter nothing counter quantity",
        );
        check(
            "amd-core",
            "{cpu/cycles/up,loads}:u,{cycles:ppp,stores:k}:pu",
            "counter counter counter counter",
        );
        check(
            "amd-core",
            "vm-exits:",
            "'vm-exits:': there is no letter behind",
        );
        check("amd-core", "vm-exits:q", "'vm-exits:q': 'q' is no modifier");
        check(
            "amd-core",
            "vm-exits/event=3/",
            "'vm-exits/event=3/': 'vm-exits' is no event of a counter",
        );
        check(
            "amd-core",
            "ring:u",
            "'ring' is known at the moment of a sample only",
        );
        check("intel-v2", "ref-cycles", "counter");
        check(
            "amd-core",
            "ring",
            "'ring' is known at the moment of a sample only",
        );
        check(
            "amd-core",
            "nonsense",
            "'nonsense' is no generic event name",
        );
    }

    #[test]
    fn an_event_is_called_what_its_name_says() {
        let model = PmuModel::parse("amd-core").unwrap();
        let list = "cpu/cycles,name=a/u,branches:k,cpu-clock/name=b/"
            .parse()
            .unwrap();
        let names = NoTables(LibraryError::TooLate);
        let groups = asked(&list, &model, &quantities(), &names).unwrap();
        let called: Vec<&str> = groups.iter().flatten().map(|it| it.name.as_str()).collect();
        assert_eq!(called, ["a", "branches:k", "b"]);
        assert!(groups[2][0].is(VirtualPmd::RunTime));
    }

    #[test]
    fn a_misspelt_quantity_is_named() {
        let model = PmuModel::parse("amd-core").unwrap();
        let names = NoTables(LibraryError::TooLate);
        for (list, hint) in [
            ("vm-exit", Some("; the VMM has 'vm-exits'")),
            ("vm-exist:u", Some("; the VMM has 'vm-exits'")),
            ("vm-exit/name=x/", Some("; the VMM has 'vm-exits'")),
            ("R1c2", None),
            ("cycels", None),
        ] {
            let parsed = list.parse().unwrap();
            let error = asked(&parsed, &model, &quantities(), &names).unwrap_err();
            match hint {
                Some(hint) => assert!(error.ends_with(hint), "{error}"),
                None => assert!(!error.contains("the VMM has"), "{error}"),
            }
        }
    }
}
