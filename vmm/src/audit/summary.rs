//! The summary of a run: who held which counter at the end, and how many decisions
//! there were.

use std::collections::BTreeMap;
use std::fmt;

use arbiter::{CounterId, Layer};

use super::decisions::{Denied, Totals};
use crate::kvm::VcpuId;

/// A counter that somebody held when its vCPU ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    pub counter: CounterId,
    pub owner: Layer,
    /// Legacy accesses were shut out.
    pub private: bool,
    /// The event for which it was programmed, if it was.
    pub event: Option<String>,
}

/// The audit of a whole run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Summary {
    vcpus: Vec<VcpuTable>,
    totals: Totals,
}

/// One vCPU's counters that were held at its end, or denied accesses.
#[derive(Debug, Clone, PartialEq, Eq)]
struct VcpuTable {
    vcpu: VcpuId,
    rows: Vec<CounterRow>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct CounterRow {
    counter: CounterId,
    holding: Option<Holding>,
    denied: Denied,
}

impl Summary {
    /// Of `totals` by vCPU, from vCPU 0 on, and of what vCPUs held at their ends.
    pub(super) fn new(totals: Vec<Totals>, mut holdings: BTreeMap<VcpuId, Vec<Holding>>) -> Self {
        let mut summary = Self::default();
        for (vcpu, totals) in (0..).map(VcpuId).zip(&totals) {
            summary.totals.add(totals);
            let rows = rows(holdings.remove(&vcpu).unwrap_or_default(), totals);
            if !rows.is_empty() {
                summary.vcpus.push(VcpuTable { vcpu, rows });
            }
        }
        summary
    }

    /// The number of all decisions.
    #[must_use]
    pub fn decisions(&self) -> u64 {
        self.totals.decisions()
    }

    /// Decisions by layer and event, and denied accesses by counter, of all vCPUs.
    #[must_use]
    pub fn totals(&self) -> &Totals {
        &self.totals
    }
}

fn rows(holdings: Vec<Holding>, totals: &Totals) -> Vec<CounterRow> {
    let mut rows: BTreeMap<CounterId, CounterRow> = BTreeMap::new();
    for (&counter, &denied) in &totals.denied {
        let row = CounterRow {
            counter,
            holding: None,
            denied,
        };
        rows.insert(counter, row);
    }
    for holding in holdings {
        let counter = holding.counter;
        let row = rows.entry(counter).or_insert(CounterRow {
            counter,
            holding: None,
            denied: Denied::default(),
        });
        row.holding = Some(holding);
    }
    rows.into_values().collect()
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "counter reservations: {} decisions", self.decisions())?;
        // The vCPUs of a machine mostly end alike.
        for alike in self.vcpus.chunk_by(|a, b| a.rows == b.rows) {
            match alike {
                [] => continue,
                [one] => writeln!(f, "  {}:", one.vcpu)?,
                [first, .., last] => writeln!(
                    f,
                    "  vCPUs {} to {}, each of {}:",
                    first.vcpu.0,
                    last.vcpu.0,
                    alike.len()
                )?,
            }
            for row in alike.first().iter().flat_map(|table| &table.rows) {
                writeln!(f, "    {row}")?;
            }
        }
        for layer in Layer::ALL {
            let events = self.totals.events.iter();
            let of_layer = events.filter(|((of, _), _)| *of == layer);
            let counts: Vec<String> = of_layer
                .map(|((_, event), count)| format!("{event} {count}"))
                .collect();
            if !counts.is_empty() {
                writeln!(f, "  {:<10}  {}", layer.word(), counts.join(", "))?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for CounterRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Denied { dropped, faulted } = self.denied;
        let (owner, sharing, event) = match &self.holding {
            Some(holding) => (
                holding.owner.word(),
                if holding.private { "private" } else { "shared" },
                holding.event.as_deref().unwrap_or("not programmed"),
            ),
            None => ("nobody", "", ""),
        };
        let counter = self.counter.to_string();
        write!(
            f,
            "{counter:<7} {owner:<10} {sharing:<7}  dropped {dropped}, faulted {faulted}"
        )?;
        if event.is_empty() {
            return Ok(());
        }
        write!(f, "  ({event})")
    }
}

#[cfg(test)]
mod tests {
    use arbiter::{Event, Reason, Record};

    use super::super::decisions::{AuditTime, DecisionTable};
    use super::*;

    #[test]
    fn what_it_prints() {
        let pmc = CounterId::Programmable;
        let mut table = DecisionTable::totals_only();
        let mut note = |layer, counter, event| {
            let counter = Some(counter);
            table.note(
                AuditTime(0),
                0,
                &Record {
                    layer,
                    counter,
                    event,
                },
            );
        };
        let lease_ms = None;
        note(Layer::Firmware, pmc(3), Event::Reserved { lease_ms });
        note(
            Layer::GuestKernel,
            pmc(3),
            Event::DroppedWrite(Reason::Held),
        );
        note(Layer::GuestKernel, pmc(3), Event::DroppedRead(Reason::Held));
        note(Layer::GuestKernel, pmc(1), Event::Faulted(Reason::Cookie));
        let totals = vec![table.totals().clone(); 3];
        let holding = Holding {
            counter: pmc(3),
            owner: Layer::Firmware,
            private: true,
            event: Some("core cycles".to_owned()),
        };
        let holdings = (0..3).map(|id| (VcpuId(id), vec![holding.clone()]));
        let mut holdings: BTreeMap<_, _> = holdings.collect();
        holdings.insert(VcpuId(2), Vec::new());
        assert_eq!(
            Summary::new(totals, holdings).to_string(),
            "\
counter reservations: 12 decisions
  vCPUs 0 to 1, each of 2:
    PMC1    nobody              dropped 0, faulted 1
    PMC3    firmware   private  dropped 2, faulted 0  (core cycles)
  vCPU 2:
    PMC1    nobody              dropped 0, faulted 1
    PMC3    nobody              dropped 2, faulted 0
  firmware    reserved 3
  kernel      dropped-read 3, dropped-write 3, faulted 3
"
        );
    }
}
