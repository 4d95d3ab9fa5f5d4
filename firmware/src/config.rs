//! The configuration area: what the host writes for firmware, and what firmware
//! answers.
//!
//! [`Config`] is the part that the host writes; [`Config::write`] and
//! [`Config::parse`] are the only code that knows where its fields lie.
//! [`Report`] is the firmware's answer in the same area.

mod error;
mod fields;
mod page;
mod report;

pub use error::ConfigError;
pub use report::{Outcome, Report, State, Step};

use arbiter::Control;

/// Bytes of the area: a page for configuration and summary, one for results.
pub const SIZE: usize = 0x2000;
/// The most counters that can be asked for.
pub const MAX_COUNTERS: usize = 64;
/// The most CPUs.
pub const MAX_CPUS: usize = 64;
/// The first bytes of the area.
pub const MAGIC: [u8; 8] = *b"UMPIREFW";
/// Version of the layout.
pub const VERSION: u32 = 1;

/// The area as bytes.
pub type Area = [u8; SIZE];

/// The boot protocol of the kernel. It serves for messages; the registers hold
/// everything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Linux's 64-bit entry.
    Linux64,
    Pvh,
    /// Multiboot v1.
    Multiboot,
}

/// The mode of the kernel's first instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// 64-bit mode with paging.
    Long,
    /// 32-bit protected mode without paging.
    Protected,
}

/// How the kernel is entered: registers at its first instruction. General
/// registers that are not named are 0, RFLAGS is 2, the IDT is empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelEntry {
    /// For messages.
    pub protocol: Protocol,
    /// 64-bit or 32-bit.
    pub mode: Mode,
    /// Selector of the code segment in the kernel's descriptor table.
    pub code: u16,
    /// Selector for DS, ES, FS, GS and SS.
    pub data: u16,
    /// Address of the kernel's descriptor table.
    pub gdt_base: u64,
    /// Its last valid offset.
    pub gdt_limit: u16,
    /// First instruction, below 4 GiB.
    pub rip: u64,
    /// Stack pointer.
    pub rsp: u64,
    pub rax: u64,
    pub rbx: u64,
    pub rsi: u64,
    pub cr0: u64,
    pub cr3: u64,
    pub cr4: u64,
    pub efer: u64,
}

/// The position of a wanted counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// The counter at this position: 0 to 31 programmable, 32 to 63 fixed.
    At(u8),
    /// Any programmable counter.
    Any,
}

/// One counter that the firmware reserves on every vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterRequest {
    pub position: Position,
    /// Whether it gets an access cookie, so that nobody else can use it; else
    /// everybody can.
    pub private: bool,
    /// Whether the cookies stay in memory when the kernel is entered.
    pub keep: bool,
    /// Whether the firmware yields it to a layer that asks; else it refuses.
    pub yields: bool,
    /// The control word.
    pub control: Control,
    /// What a dropped read yields.
    pub drop_value: u64,
    /// The event select, or the four bits of a fixed-function counter's field.
    pub select: u64,
}

/// The host's part of the area.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Number of vCPUs, 1 to [`MAX_CPUS`]; their APIC ids count from 0.
    pub cpus: u8,
    /// Port of the ACPI power-management timer; 0 if there is none.
    pub pm_timer: u16,
    /// Milliseconds for which the firmware stays in its phase after it has reserved.
    pub delay_ms: u32,
    /// How the kernel is entered.
    pub kernel: KernelEntry,
    counters: [CounterRequest; MAX_COUNTERS],
    len: usize,
}

impl Config {
    /// A configuration without counters and delay.
    #[must_use]
    pub fn new(cpus: u8, pm_timer: u16, kernel: KernelEntry) -> Self {
        Self {
            cpus,
            pm_timer,
            delay_ms: 0,
            kernel,
            counters: [CounterRequest::UNUSED; MAX_COUNTERS],
            len: 0,
        }
    }

    /// Adds a counter.
    ///
    /// # Errors
    /// There are [`MAX_COUNTERS`] already.
    pub fn push(&mut self, counter: CounterRequest) -> Result<(), ConfigError> {
        let place = self.counters.get_mut(self.len);
        *place.ok_or(ConfigError::TooManyCounters)? = counter;
        self.len += 1;
        Ok(())
    }

    /// The counters, in order.
    #[must_use]
    pub fn counters(&self) -> &[CounterRequest] {
        self.counters.get(..self.len).unwrap_or_default()
    }
}

impl CounterRequest {
    const UNUSED: Self = Self {
        position: Position::Any,
        private: false,
        keep: false,
        yields: false,
        control: Control::INITIAL,
        drop_value: 0,
        select: 0,
    };
}
