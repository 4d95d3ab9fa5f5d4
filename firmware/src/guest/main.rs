//! The firmware as a program: what the boot processor does from the first
//! instruction to the kernel's, and what the others do in between.
//!
//! Some KVMs interpret CPL 0 code of a guest, and lack SSE, XSAVE and most new
//! instructions. The target has none of them, and the assembly in [`sys`] uses
//! none.
#![no_std]
#![no_main]
#![deny(unsafe_code)]

mod console;
mod outcomes;
mod processor;
mod secondary_cpus;
#[allow(unsafe_code)]
mod sys;
mod timer;

use arbiter::abi;
use firmware::config::{Area, Config, Outcome, Position, Report, State};
use firmware::layout::{EXIT_CRASHED, EXIT_MALFORMED};
use firmware::reserve::mailbox::{Held, answer_notices};
use firmware::reserve::{self, Cookies, Machine, Pcr};
use firmware::smm;

use console::say;
use processor::Processor;
use secondary_cpus::Work;

/// Entered by [`sys`] on the boot processor, with the configuration area.
fn boot(area: &mut Area) -> ! {
    let config = match Config::parse(area) {
        Ok(config) => config,
        Err(error) => {
            say!("the configuration is malformed: {error}");
            sys::exit(EXIT_MALFORMED);
        }
    };
    let mut report = Report::of(area);
    report.set_state(State::Running);
    let state = phase(&config, &mut report);
    report.set_state(state);
    sys::enter_kernel(&config.kernel);
}

/// Entered by [`sys`] on every other processor.
fn start_secondary() {
    secondary_cpus::start();
}

/// Entered by [`sys`] after an exception that nobody expects.
fn exception(vector: u64, error: u64, rip: u64) -> ! {
    say!("exception {vector}, error code {error:#x}, at {rip:#x}");
    sys::exit(EXIT_CRASHED);
}

/// Everything between the configuration and the kernel.
fn phase(config: &Config, report: &mut Report<&mut Area>) -> State {
    let wanted = !config.counters().is_empty();
    // Nothing here waits.
    let mut boot = Processor::waiting(0, config.pm_timer, 0);
    let Some(pcr) = Pcr::find(&mut boot) else {
        if wanted {
            say!("CPUID shows no counter reservations; no counter is reserved");
        }
        return State::NoPcr;
    };
    let (state, end) = if wanted {
        reserve_all(config, pcr, report)
    } else {
        linger(config, &pcr, &mut Held::nothing());
        (State::Done, abi::PHASE_END)
    };
    if !reserve::end_phase(&mut boot, &pcr, end) {
        say!("the firmware's phase cannot be ended");
    }
    state
}

/// Returns the value that is to end the phase as well.
fn reserve_all(config: &Config, pcr: Pcr, report: &mut Report<&mut Area>) -> (State, u64) {
    let mut boot = Processor::waiting(0, config.pm_timer, 0);
    for (number, counter) in config.counters().iter().enumerate() {
        let Some(cookies) = Cookies::draw(&mut boot, &pcr, counter.private) else {
            secondary_cpus::wipe_cookies();
            say!("there is no source of random numbers; no counter is reserved");
            return (State::NoRandom, abi::PHASE_END);
        };
        secondary_cpus::set_cookies(number, cookies);
    }
    let work = Work {
        pcr,
        config: config.clone(),
    };
    let mut held = work.perform(0);
    let answered = secondary_cpus::wake_all(work, || answer_notices(&mut boot, &pcr, &mut held));
    for number in 0..config.counters().len() {
        print_result(config, number, answered);
    }
    linger(config, &pcr, &mut held);
    for cpu in (0..usize::from(config.cpus)).filter(|cpu| answered & 1 << cpu != 0) {
        report.set_answered(cpu);
        for number in 0..config.counters().len() {
            report.set_outcome(cpu, number, outcomes::get(cpu, number));
        }
    }
    for (number, counter) in config.counters().iter().enumerate() {
        let cookies = secondary_cpus::cookies(number);
        if counter.keep {
            report.set_cookies(number, cookies.management, cookies.access);
        }
    }
    let end = if pcr.has_smram() {
        fill_smram(config, &pcr, answered)
    } else {
        abi::PHASE_END
    };
    secondary_cpus::wipe_cookies();
    (State::Done, end)
}

/// Has an SMI answer for the counters once the phase is over. Returns the value that ends
/// the phase so.
fn fill_smram(config: &Config, pcr: &Pcr, answered: u64) -> u64 {
    let mut fits = false;
    let address = sys::lay_smm(|pages, code| {
        fits = smm::begin(pages, code, pcr.base());
        for (number, counter) in (0u8..).zip(config.counters()) {
            let management = secondary_cpus::cookies(number.into()).management;
            smm::put_counter(pages, number.into(), management, counter.yields);
            for cpu in (0..usize::from(config.cpus)).filter(|cpu| answered & 1 << cpu != 0) {
                let outcome = outcomes::get(cpu, number.into());
                if let Outcome::Granted(position) = outcome {
                    smm::put_position(pages, cpu, position, number);
                }
            }
        }
    });
    assert!(fits, "the code has its place");
    smm::end_of_phase(address)
}

/// Answers who asks for counters on this processor, for as long as the phase is to last.
fn linger(config: &Config, pcr: &Pcr, held: &mut Held) {
    let mut boot = Processor::waiting(0, config.pm_timer, config.delay_ms);
    loop {
        answer_notices(&mut boot, pcr, held);
        if !boot.wait() {
            break;
        }
    }
}

/// Prints one line on the result for a counter.
fn print_result(config: &Config, number: usize, answered: u64) {
    let Some(counter) = config.counters().get(number) else {
        return;
    };
    let cpus = (0..usize::from(config.cpus)).filter(|cpu| answered & 1 << cpu != 0);
    let outcomes = cpus.map(|cpu| outcomes::get(cpu, number));
    let (mut granted, mut place, mut failed) = (0u32, None, None);
    for outcome in outcomes {
        match outcome {
            Outcome::Granted(position) => (granted, place) = (granted + 1, Some(position)),
            other => failed = Some(other),
        }
    }
    let asked = match counter.position {
        Position::At(position) => Some(position),
        Position::Any => None,
    };
    let who = if counter.control.bits() & abi::CONTROL_FAULT != 0 {
        "others fault"
    } else {
        "others are dropped"
    };
    let who = if counter.private { who } else { "shared" };
    let cpus = config.cpus;
    match (place.or(asked), failed) {
        (Some(position), None) if granted == u32::from(cpus) => say!(
            "counter {number}: position {position} reserved on {granted} of {cpus} CPUs, {who}"
        ),
        (Some(position), _) => say!(
            "counter {number}: position {position} reserved on {granted} of {cpus} CPUs, \
             refused elsewhere"
        ),
        (None, _) => say!("counter {number}: no counter was granted"),
    }
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    match info.location() {
        Some(place) => say!("panic at {}:{}", place.file(), place.line()),
        None => say!("panic"),
    }
    sys::exit(EXIT_CRASHED);
}
