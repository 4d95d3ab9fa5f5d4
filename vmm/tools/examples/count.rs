//! Counts events of a running VM for a second, as `umpire stat` does:
//!
//! ```text
//! cargo run -p umpire-tools --example count -- guest.sock cycles,instructions
//! ```

use std::error::Error;
use std::time::Duration;

use umpire_tools::command::UntilOptions;
use umpire_tools::duration::Span;
use umpire_tools::find::VmChoice;
use umpire_tools::stat::{self, FormOptions, SinkOptions, StatOptions};
use umpire_tools::targets::Selection;

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let options = StatOptions {
        selection: Selection {
            // Without a socket it is the one that UMPIRE_PERFMON names, or the only one.
            vm: VmChoice {
                control: words.next().map(Into::into),
                vm: None,
            },
            ..Selection::default()
        },
        events: words.map(|list| list.parse()).collect::<Result<_, _>>()?,
        look: FormOptions {
            per_vcpu: true,
            ..FormOptions::default()
        },
        sink: SinkOptions {
            log_fd: Some(1),
            ..SinkOptions::default()
        },
        until: UntilOptions {
            time: Some(Span(Duration::from_secs(1))),
            ..UntilOptions::default()
        },
        ..StatOptions::default()
    };
    stat::run(&options)?;
    Ok(())
}
