//! The event select for each name on a PMU model:
//!
//! ```text
//! cargo run -p umpire-events --example event_codes -- intel-v2 cycles:u skl::INST_RETIRED:ANY_P
//! ```

use std::process::ExitCode;

use pmu_model::PmuModel;
use umpire_events::{names, resolve};

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let model = words.next().unwrap_or_else(|| "intel-v2".to_owned());
    let model = match PmuModel::parse(&model) {
        Ok(model) => model,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let mut events: Vec<String> = words.collect();
    if events.is_empty() {
        events = ["cycles", "instructions:u", "branches:k"]
            .map(str::to_owned)
            .to_vec();
    }
    // The tables of libpfm4, if it is installed. Generic names and raw codes need none.
    let tables = names();
    let mut status = ExitCode::SUCCESS;
    for event in &events {
        match resolve(event, &model, tables.as_ref()) {
            Ok(named) => println!("{event}: r{:x}, {}", named.code, named.request),
            Err(error) => {
                println!("{event}: {error}");
                status = ExitCode::FAILURE;
            }
        }
    }
    status
}
