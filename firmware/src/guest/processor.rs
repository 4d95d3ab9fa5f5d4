//! The processor as [`firmware::reserve`] sees it, and what it tells on the console.

use arbiter::{Layer, Reason};
use firmware::config::Outcome;
use firmware::reserve::mailbox::{Happening, News};
use firmware::reserve::{Fault, Machine, Regs};

use super::console::say;
use super::outcomes;
use super::sys;
use super::timer::Timer;

/// The processor that this code runs on.
#[derive(Debug)]
pub(crate) struct Processor {
    cpu: usize,
    timer: Timer,
}

impl Processor {
    /// Processor `cpu`, which waits for so many milliseconds in all.
    pub(crate) fn waiting(cpu: usize, pm_timer: u16, ms: u32) -> Self {
        let timer = Timer::new(pm_timer, ms);
        Self { cpu, timer }
    }
}

impl Machine for Processor {
    fn cpuid(&mut self, leaf: u32, subleaf: u32) -> Regs {
        sys::cpuid(leaf, subleaf)
    }

    fn read(&mut self, msr: u32, cookie: u64) -> Result<u64, Fault> {
        sys::rdmsr(msr, cookie)
    }

    fn write(&mut self, msr: u32, cookie: u64, value: u64) -> Result<(), Fault> {
        sys::wrmsr(msr, cookie, value)
    }

    fn rdrand(&mut self) -> Option<u64> {
        sys::rdrand()
    }

    fn wait(&mut self) -> bool {
        sys::relax();
        !self.timer.is_over()
    }

    fn tell(&mut self, happening: Happening) {
        let Happening { number, what } = happening;
        let cpu = self.cpu;
        let layer = |layer: Option<Layer>| layer.map_or("an unknown layer", name);
        let reason = |reason: Option<Reason>| reason.map_or("unknown", Reason::name);
        match what {
            News::Granted { position, waited } => {
                let when = if waited {
                    "granted after a while"
                } else {
                    "granted"
                };
                say!("counter {number}: asked for on CPU {cpu}, position {position} {when}");
            }
            News::Denied(why) => {
                let why = reason(why);
                say!("counter {number}: asked for on CPU {cpu}, refused: {why}");
            }
            News::Yielded(who) => {
                say!(
                    "counter {number}: yielded on CPU {cpu} to the {}",
                    layer(who)
                );
                outcomes::set(cpu, usize::from(number), Outcome::Yielded);
            }
            News::Kept(who) => {
                say!(
                    "counter {number}: kept on CPU {cpu}, asked for by the {}",
                    layer(who)
                );
            }
            News::Lost(why) => {
                say!("counter {number}: lost on CPU {cpu}: {}", reason(why));
                outcomes::set(cpu, usize::from(number), Outcome::Lost);
            }
        }
    }
}

fn name(layer: Layer) -> &'static str {
    match layer {
        Layer::Firmware => "firmware",
        Layer::Hypervisor | Layer::HostTool => "hypervisor",
        Layer::GuestKernel => "kernel",
        Layer::GuestUser => "program",
    }
}
