//! The largest experiment: 10,000 vCPUs on 512 cores, more than 10 million demands.
//!
//! `cargo run --release -p arbiter-experiment --example large`

use std::time::Instant;

use arbiter::{Policy, Scheme};
use arbiter_experiment::{Machine, Variant, Who, Workload, simulate};

fn main() {
    let machine = Machine {
        vcpus: 10_000,
        cores: 512,
        ..Machine::default()
    };
    let workload = Workload {
        seconds: 160.0,
        ..Workload::default()
    };
    for scheme in Scheme::ALL {
        let variant = Variant {
            scheme,
            name: "default".to_owned(),
            policy: Policy::default(),
        };
        let start = Instant::now();
        let figures = simulate(&machine, &workload, &variant, 1);
        let (demands, granted, denied) = figures.demands(Who::All);
        println!(
            "{scheme}: {demands} demands ({granted} granted, {denied} denied), {} requests, \
             {} events in {:.1} s",
            figures.requests,
            figures.events,
            start.elapsed().as_secs_f64()
        );
    }
}
