//! Counts events of a running VM for a second, as `umpire stat` does:
//!
//! ```text
//! cargo run -p umpire-tools --example count -- guest.sock cycles,instructions
//! ```

use std::error::Error;
use std::io;
use std::time::Duration;

use umpire_tools::command::Until;

use umpire_tools::find::VmChoice;
use umpire_tools::lifecycle::Starter;
use umpire_tools::stat::print::Form;
use umpire_tools::stat::tally::Scale;
use umpire_tools::stat::{self, StatOptions};
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
        interval: None,
        repeat: 1,
        form: Form::Table,
        apart: true,
        turn: Duration::from_millis(10),
        scale: Scale::Phases,
        starter: Starter::default(),
        until: Until::Passed(Duration::from_secs(1)),
    };
    stat::run(&options, &mut io::stdout().lock(), &mut io::stderr())?;
    Ok(())
}
