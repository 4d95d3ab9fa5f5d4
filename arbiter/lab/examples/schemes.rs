//! One script under the three schemes of arbitration: a kernel holds three of four
//! counters, and the hypervisor wants two.
//!
//! `cargo run -p arbiter-lab --example schemes`

use arbiter::{PerKind, Policy, Scheme};
use arbiter_lab::script::{self, Script, ScriptError, Setup, What};

const SCRIPT: &str = "\
0   kernel     reserve 3
10  hypervisor reserve 2
20  kernel     reply yield   # nobody asks under two of the schemes
";

fn main() -> Result<(), ScriptError> {
    let script: Script = SCRIPT.parse()?;
    // A layer of higher priority can have counters revoked where the scheme has
    // revocations.
    let mut policy = Policy::default();
    policy.hypervisor.priority = 1;
    for scheme in Scheme::ALL {
        let setup = Setup {
            counters: PerKind {
                programmable: 4,
                fixed: 0,
            },
            policy,
            scheme,
        };
        println!("{scheme}:");
        let trace = script::play(&script, &setup);
        for row in trace.rows {
            let layer = row.layer.map_or(String::new(), |layer| layer.to_string());
            let counter = row.counter.map_or(String::new(), |one| one.to_string());
            let what = match row.what {
                What::Decided(event) => event.name().to_owned(),
                other => format!("{other:?}"),
            };
            println!("  {:4} ms  {layer:12} {counter:5} {what}", row.at_ms);
        }
        for (counter, owner) in trace.owners {
            let owner = owner.map_or("nobody".to_owned(), |owner| owner.to_string());
            println!("  in the end {counter} is held by: {owner}");
        }
    }
    Ok(())
}
