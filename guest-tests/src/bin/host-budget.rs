//! Prints what counters this machine has, and who has them: in the tests a Linux guest, whose
//! PMU is a virtual one.
//!
//! Without arguments: a line for each CPU of each PMU with its budget, and one for each holder.
//! `events CPU CONFIG…`: how many of these raw events, in hexadecimal, can be pinned together.
//! `give-back FOLDER` and `restore FOLDER`: the NMI watchdog, whose old value is kept there.

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use umpire_arbiterd::budget::{
    self, Holder, Watchdog, can_be_had, discover, holders, measure, unexplained,
};

/// Where each call of the kernel ends in traps, all takes longer than on a host.
const MAX_TIME: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let root = Path::new("/");
    let result = match arguments[..] {
        [] => report(root),
        ["events", cpu, ref configs @ ..] => events(root, cpu, configs),
        ["give-back", folder] => Watchdog::new(root, folder.as_ref())
            .give_back()
            .map(|done| println!("{done:?}"))
            .map_err(Into::into),
        ["restore", folder] => Watchdog::recover(root, folder.as_ref())
            .map(|done| println!("{done:?}"))
            .map_err(Into::into),
        _ => Err(
            "usage: host-budget [events CPU CONFIG… | give-back FOLDER | restore FOLDER]".into(),
        ),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("host-budget: {error}");
            ExitCode::FAILURE
        }
    }
}

fn report(root: &Path) -> Result<(), Box<dyn Error>> {
    for pmu in discover(root)? {
        println!("pmu {} cpus {}", pmu.name, pmu.measured_on());
        for cpu in pmu.measured_on().iter() {
            let budget = match measure(&pmu, cpu, MAX_TIME) {
                Ok(budget) => budget,
                Err(why) => {
                    println!("cpu {cpu}: {why}");
                    continue;
                }
            };
            print!("cpu {cpu}: programmable {}", budget.programmable);
            for (fixed, state) in &budget.fixed {
                print!(", {fixed} {state}");
            }
            let waits = budget
                .flexible_waits
                .map_or("not seen", |waits| if waits { "waits" } else { "runs" });
            print!(", flexible {waits}");
            if let (Some(capacity), budget::Free::Exactly(free)) =
                (budget.capacity, budget.programmable)
            {
                let deficit = unexplained(capacity.programmable, free, 0, 0);
                print!(
                    ", of {} missing {}",
                    capacity.programmable, deficit.unexplained
                );
            }
            println!();
            eprintln!("took {:?}", budget.took);
        }
    }
    let seen = holders(root, &[std::process::id()])?;
    for holder in &seen.found {
        match holder {
            Holder::NmiWatchdog { cpus } => println!("holder nmi-watchdog cpus {cpus}"),
            Holder::Process {
                pid,
                ancestors: _,
                uid,
                comm,
                events,
                msr_cpus,
            } => {
                let msr = if msr_cpus.is_empty() {
                    "none".into()
                } else {
                    msr_cpus.to_string()
                };
                println!("holder {comm} uid {uid} events {events} msr {msr}");
                eprintln!("{comm} is {pid}");
            }
        }
    }
    println!("hidden {}", seen.hidden);
    Ok(())
}

fn events(root: &Path, cpu: &str, configs: &[&str]) -> Result<(), Box<dyn Error>> {
    let pmus = discover(root)?;
    let pmu = pmus.first().ok_or("there is no PMU")?;
    let configs: Result<Vec<u64>, _> = configs
        .iter()
        .map(|digits| u64::from_str_radix(digits, 16))
        .collect();
    let events: Vec<_> = configs?
        .into_iter()
        .map(|config| pmu.event(config))
        .collect();
    match can_be_had(pmu, cpu.parse()?, &events, MAX_TIME) {
        Ok(count) => println!("{count} of {}", events.len()),
        Err(why) => println!("{why}"),
    }
    Ok(())
}
