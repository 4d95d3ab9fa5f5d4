//! `umpire budget`: how many physical counters the guests of a running VM may use, and
//! what they do not get.

use std::io::{self, Write};
use std::path::PathBuf;

pub use perfmon_abi::wire::budget::{ALL, BudgetChange, BudgetInfo, BudgetRequest, KindBudget};
use serde::Serialize;
use umpire_events::one_line;

use crate::find::VmChoice;
use crate::pcr::{each, print, refused_on};
use crate::table::indented;
use crate::{ToolError, vm};

/// What is to be shown or changed, and where.
#[derive(Clone, Debug)]
pub struct BudgetOptions {
    pub vm: VmChoice,
    /// JSON: one object.
    pub json: bool,
    /// What changes on every vCPU; `None`: nothing.
    pub change: Option<BudgetChange>,
}

/// The budgets of a VM.
#[derive(Clone, Debug, Serialize)]
pub struct BudgetListing {
    pub socket: PathBuf,
    /// The VM's process.
    pub pid: u32,
    /// Its vCPUs, as they are after a change. Those that have ended are not there.
    pub vcpus: Vec<BudgetInfo>,
}

/// Makes the change that is asked for, if any, and prints on `out` what there is then.
///
/// # Errors
/// There is no VM, it refuses, or `out` cannot be written to.
pub fn run(options: &BudgetOptions, out: &mut dyn Write) -> Result<(), ToolError> {
    let (socket, client, hello) = vm::meet(&options.vm)?;
    let change = options.change;
    let vcpus: Vec<u32> = (0..hello.vcpus).collect();
    let vcpus = each(
        &vcpus,
        |vcpu| client.budget(&BudgetRequest { vcpu, change }),
        |vcpu, refusal| {
            let what = match change {
                None => "asking for the budget",
                Some(_) => "setting the budget",
            };
            refused_on(vcpu, what, refusal)
        },
    )?;
    let listing = BudgetListing {
        socket,
        pid: hello.pid,
        vcpus,
    };
    print(&listing, options.json, out, |out| text(&listing, out))
}

fn text(vm: &BudgetListing, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "VM {} at {}", vm.pid, vm.socket.display())?;
    let kinds = |info: &BudgetInfo| {
        [
            ("programmable", info.programmable.clone()),
            ("fixed", info.fixed.clone()),
        ]
    };
    let rows = vm.vcpus.iter().flat_map(|info| {
        let there = kinds(info).into_iter().filter(|(_, kind)| kind.there > 0);
        there.map(|(name, kind)| row(info.vcpu, name, &kind))
    });
    let heads = ["VCPU", "COUNTERS", "MAY USE", "COUNTING", "RESERVED"];
    indented(&heads, rows.collect(), out)?;
    for info in &vm.vcpus {
        let vcpu = info.vcpu;
        for (_, kind) in kinds(info) {
            for lacking in &kind.lacking {
                let (counter, reason) = (one_line(&lacking.counter), one_line(&lacking.reason));
                writeln!(out, "  vCPU {vcpu}: {counter} does not count: {reason}")?;
            }
            for leaving in &kind.leaving {
                let (counter, ms) = (one_line(&leaving.counter), leaving.in_ms);
                writeln!(out, "  vCPU {vcpu}: {counter} is revoked in {ms} ms")?;
            }
        }
        let leased = kinds(info).into_iter();
        let leased: Vec<String> = leased
            .filter_map(|(name, kind)| Some(format!("{} {name}", kind.leased?)))
            .collect();
        if !leased.is_empty() {
            let leased = leased.join(", ");
            writeln!(
                out,
                "  vCPU {vcpu}: the VM's lease on the host's counters holds {leased}"
            )?;
        }
        if let Some(ms) = info.ends_in_ms {
            let later = |kind: &KindBudget| most(kind.later, kind.there);
            let programmable = later(&info.programmable);
            let fixed = later(&info.fixed);
            writeln!(
                out,
                "  vCPU {vcpu}: programmable {programmable}, fixed {fixed} again in {ms} ms"
            )?;
        }
    }
    Ok(())
}

fn row(vcpu: u32, name: &str, kind: &KindBudget) -> Vec<String> {
    vec![
        vcpu.to_string(),
        name.to_owned(),
        most(kind.most, kind.there),
        kind.counting.to_string(),
        kind.reserved.to_string(),
    ]
}

/// A limit that is none below what is there says so.
fn most(most: Option<u8>, there: u8) -> String {
    let all = format!("all {there}");
    most.map_or(all, |most| format!("{most} of {there}"))
}

#[cfg(test)]
mod tests {
    use perfmon_abi::wire::budget::{LackingCounter, LeavingCounter};

    use super::*;

    #[test]
    fn budgets_in_words() {
        let programmable = KindBudget {
            most: Some(2),
            leased: Some(2),
            later: None,
            there: 4,
            counting: 2,
            reserved: 1,
            lacking: vec![LackingCounter {
                counter: "PMC2".to_owned(),
                reason: "it waits for its turn on a physical counter".to_owned(),
            }],
            leaving: vec![LeavingCounter {
                counter: "PMC3".to_owned(),
                in_ms: 40,
            }],
        };
        let fixed = KindBudget {
            there: 3,
            ..KindBudget::default()
        };
        let info = |vcpu, programmable, ends_in_ms| BudgetInfo {
            vcpu,
            generation: 3,
            programmable,
            fixed: fixed.clone(),
            ends_in_ms,
        };
        let vm = BudgetListing {
            socket: "vm1.sock".into(),
            pid: 71,
            vcpus: vec![
                info(0, programmable, Some(900)),
                info(1, KindBudget::default(), None),
            ],
        };
        let mut out = Vec::new();
        text(&vm, &mut out).unwrap();
        let expected = "\
VM 71 at vm1.sock
  VCPU  COUNTERS      MAY USE  COUNTING  RESERVED
  0     programmable  2 of 4   2         1
  0     fixed         all 3    0         0
  1     fixed         all 3    0         0
  vCPU 0: PMC2 does not count: it waits for its turn on a physical counter
  vCPU 0: PMC3 is revoked in 40 ms
  vCPU 0: the VM's lease on the host's counters holds 2 programmable
  vCPU 0: programmable all 4, fixed all 3 again in 900 ms
";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }
}
