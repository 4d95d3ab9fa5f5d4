//! What passes between a VMM and firmware: the VMM writes the configuration area,
//! firmware parses it, reserves counters and answers in the same area.
//!
//! `cargo run -p firmware --example configuration`

use arbiter::Control;
use firmware::config::{
    Config, ConfigError, CounterRequest, KernelEntry, Mode, Outcome, Position, Protocol, Report,
    SIZE, State,
};
use firmware::layout;

fn main() -> Result<(), ConfigError> {
    let mut area = Box::new([0; SIZE]);

    // The VMM, before the guest starts.
    let mut config = Config::new(2, 0x608, linux_entry());
    config.push(CounterRequest {
        position: Position::At(0),
        private: true,
        keep: false,
        yields: false,
        control: Control::INITIAL,
        drop_value: 0,
        // Cycles at every ring, enabled.
        select: 0x43_0076,
    })?;
    config.write(&mut area);
    println!(
        "the area lies at {:#x}, the firmware at {:#x}",
        layout::CONFIG,
        layout::IMAGE
    );

    // Firmware, on the boot processor. Its reservations are `firmware::reserve`.
    let config = Config::parse(&area)?;
    let mut report = Report::of(&mut *area);
    report.set_state(State::Running);
    for cpu in 0..usize::from(config.cpus) {
        for (number, counter) in config.counters().iter().enumerate() {
            if let Position::At(position) = counter.position {
                report.set_outcome(cpu, number, Outcome::Granted(position));
            }
        }
        report.set_answered(cpu);
    }
    report.set_state(State::Done);

    // The VMM again. It trusts nothing in the answer: a guest may write there.
    let report = Report::of(&*area);
    println!("state {:?}, CPUs {:#b}", report.state(), report.answered());
    for cpu in 0..usize::from(config.cpus) {
        println!("CPU {cpu}: {:?}", report.outcome(cpu, 0));
    }

    // A damaged area is named.
    area[0] ^= 1;
    if let Err(error) = Config::parse(&area) {
        println!("refused: {error}");
    }
    Ok(())
}

/// How a 64-bit Linux kernel is entered.
fn linux_entry() -> KernelEntry {
    KernelEntry {
        protocol: Protocol::Linux64,
        mode: Mode::Long,
        code: 0x10,
        data: 0x18,
        gdt_base: 0x500,
        gdt_limit: 0x2f,
        rip: 0x100_0200,
        rsp: 0x1_0000,
        rax: 0,
        rbx: 0,
        rsi: 0x7000,
        cr0: 0x8000_0031,
        cr3: 0x9000,
        cr4: 0x20,
        efer: 0x500,
    }
}
