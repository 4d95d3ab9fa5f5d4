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
mod vcpu;
mod vmm;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Parser;

use boot::Kernel;
use devices::Ending;
use memory::GuestRam;
use snapshot::Saved;
use vmm::{Pause, StoppedVm, TestVm};

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
    /// The vCPUs that it boots with; their APIC IDs are 0, 1 …
    #[arg(long, requires = "kernel", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    cpus: u8,
    /// Takes so many resets, in place: the kernel is booted again, and told `reset=1`. It is saved
    /// after the last of them.
    #[arg(long, requires = "kernel", default_value_t = 0)]
    resets: u32,
    /// Saves it: `at-once`, before it is entered; `at-enabling`, where it enables a counter; when
    /// RDPMC has been trapped for so many milliseconds of this call, because a counter is enabled;
    /// or, as `alone-MS`, with the first vCPU alone entered.
    #[arg(long, value_parser = pause)]
    save: Option<Pause>,
}

fn pause(text: &str) -> Result<Pause, String> {
    let ms = |text: &str| text.parse().map(Duration::from_millis);
    let pause = match (text, text.strip_prefix("alone-")) {
        ("at-once", _) => Ok(Pause::AtOnce),
        ("at-enabling", _) => Ok(Pause::AtEnabling),
        (_, Some(time)) => ms(time).map(Pause::Alone),
        _ => ms(text).map(Pause::After),
    };
    pause.map_err(|_| "give at-once, at-enabling, or a number of milliseconds, or alone-MS".into())
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
    let kernel = (choices.kernel.as_deref()).zip(choices.initrd.as_deref());
    let memory = GuestRam::of(&choices.folder.join("memory"), kernel.is_some())?;
    let file = choices.folder.join("machine");
    let pause = choices.save.unwrap_or(Pause::Never);
    sys::handle_kicks()?;
    let stopped = match kernel {
        Some(images) => boot(choices, images, memory, pause)?,
        None => TestVm::restore(memory, &Saved::read(&file)?)?.run(pause)?,
    };
    match stopped.ending() {
        Some(Ending::Off) => {
            for (n, (counted, _)) in stopped.told().enumerate() {
                eprintln!("counted: {n} {} read {}", counted.events, counted.read);
            }
            Ok(0)
        }
        Some(Ending::Reset) => bail!("the guest has reset itself"),
        None => {
            stopped.save(&file)?;
            tell("saved", &stopped);
            Ok(SAVED)
        }
    }
}

/// What each vCPU was at when the machine stopped for this.
fn tell(what: &str, stopped: &StoppedVm) {
    for (n, (counted, watch)) in stopped.told().enumerate() {
        let counts = if counted.is_enabled() {
            "enabled"
        } else {
            "disabled"
        };
        eprintln!("{what}: {n} {} {counts} {watch}", counted.events);
    }
}

/// Boots it, again after each reset that is to be taken, until it ends otherwise or is paused.
fn boot(
    choices: &Choices,
    (kernel, initrd): (&Path, &Path),
    memory: GuestRam,
    pause: Pause,
) -> Result<StoppedVm> {
    let first = Kernel {
        kernel,
        initrd,
        command_line: &choices.cmdline,
    };
    let command_line = &format!("{} reset=1", choices.cmdline);
    let again = Kernel {
        command_line,
        ..first
    };
    let mut machine = TestVm::boot(choices.cpus, memory, &first)?;
    for _ in 0..choices.resets {
        let stopped = machine.run(Pause::Never)?;
        if stopped.ending() != Some(Ending::Reset) {
            return Ok(stopped);
        }
        tell("reset", &stopped);
        machine = stopped.reset(&again)?;
    }
    machine.run(pause)
}
