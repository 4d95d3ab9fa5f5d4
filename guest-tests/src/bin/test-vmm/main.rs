//! A VMM that is not Umpire's, as somebody else would write it around `kvm-pmu`: from rust-vmm's
//! crates, with KVM's local APIC and an I/O APIC of its own, a system call filter, and snapshots.
//!
//! One call boots a Linux in a folder, or goes on with the one that was saved there, until the
//! guest ends (status 0) or is paused and saved (42). The guest's console is stdout. On stderr is
//! what its counters must have counted.

mod acpi;
mod boot;
mod devices;
mod filter;
mod ioapic;
mod memory;
mod snapshot;
mod sys;
mod truth;
mod vmm;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Parser;

use boot::Kernel;
use devices::Ending;
use memory::GuestRam;
use snapshot::Saved;
use vmm::{OneCpu, Pause, Stop};

const SAVED: u8 = 42;

/// Boots a Linux in FOLDER, or goes on with the one that was saved there.
#[derive(Debug, Parser)]
struct Choices {
    /// Where the guest's memory is, and its snapshot.
    folder: PathBuf,
    /// The kernel to boot, a bzImage; without it, the guest was saved.
    #[arg(long, requires = "initrd")]
    kernel: Option<PathBuf>,
    #[arg(long, requires = "kernel")]
    initrd: Option<PathBuf>,
    /// What the kernel is told.
    #[arg(long, default_value = "")]
    cmdline: String,
    /// Saves it: `at-once`, before it is entered; `at-enabling`, where it enables a counter; or
    /// when a counter has been enabled for so many milliseconds of this call.
    #[arg(long, value_parser = pause)]
    save: Option<Pause>,
}

fn pause(text: &str) -> Result<Pause, String> {
    match text {
        "at-once" => Ok(Pause::AtOnce),
        "at-enabling" => Ok(Pause::AtEnabling),
        _ => match text.parse() {
            Ok(ms) => Ok(Pause::After(Duration::from_millis(ms))),
            Err(_) => Err("give at-once, at-enabling, or a number of milliseconds".into()),
        },
    }
}

fn main() -> ExitCode {
    match run(&Choices::parse()) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("test-vmm: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(choices: &Choices) -> Result<u8> {
    let boots = choices.kernel.is_some();
    let memory = GuestRam::of(&choices.folder.join("memory"), boots)?;
    let file = choices.folder.join("machine");
    let machine = match (&choices.kernel, &choices.initrd) {
        (Some(kernel), Some(initrd)) => {
            let kernel = Kernel {
                kernel,
                initrd,
                command_line: &choices.cmdline,
            };
            OneCpu::boot(memory, &kernel)?
        }
        _ => OneCpu::restore(memory, &Saved::read(&file)?)?,
    };
    let stopped = machine.run(choices.save.unwrap_or(Pause::Never))?;
    let watch = stopped.watch();
    match stopped.left.stop {
        Stop::Ended(Ending::Off) => {
            let counted = stopped.counted();
            eprintln!("counted: {} read {}", counted.events, counted.read);
            Ok(0)
        }
        Stop::Ended(Ending::Reset) => bail!("the guest has reset itself"),
        Stop::Paused => {
            let counted = stopped.save(&file)?;
            let counts = if counted.is_enabled() {
                "enabled"
            } else {
                "disabled"
            };
            eprintln!("saved: {} {counts} {watch}", counted.events);
            Ok(SAVED)
        }
    }
}
