//! Counts what stands between two `KVM_RUN` of a WRMSR of an event select: the named
//! functions of this repository that it passes, the instructions, and the system calls.
//!
//! ```text
//! cargo run --config profile.dev.package.arbiter.opt-level=0 -p guest-tests --bin trap-path [list]
//! cargo run --release -p guest-tests --bin trap-path [list]
//! ```
//!
//! A guest on this machine's KVM does nothing but write a select, which starts and stops its
//! counter in turn; its thread is single-stepped from one `KVM_RUN` to the next. Without
//! optimisation nothing is inlined, and each function that the source names is counted,
//! operators and derived ones among them; those that call others of ours are counted again
//! by themselves. In a release build only those are left that the compiler has not inlined:
//! places that the processor goes to. A function counts once, however often it is called; a
//! closure belongs to the function that it stands in. Functions of other crates are none of
//! ours to leave out.
//!
//! Stepping takes thousands of times as long as running, and what depends on time would go
//! other ways. So the thread gets a TSC that stands still meanwhile, and no signals.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use guest_tests::micro::{ENDBR64, Lab, Setup, wrmsr};
use iced_x86::code_asm::{CodeAssembler, eax, ecx, edx};
use nix::errno::Errno;
use nix::sys::ptrace;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use object::read::elf::ElfFile64;
use object::{Endianness, Object, ObjectSymbol, SymbolKind};
use pmu_virt::{EventCode, KnownEvent, MsrIndex, PmuModel, Register};
use vmm::cpuid::host_vendor;
use vmm::devices::{DeviceOutcome, Platform};
use vmm::kvm::VmOptions;
use vmm::micro::{KERNEL_CODE, MicroGuest, Solo, SoloParts, Start, assemble};
use vmm::vcpu::{Silent, TrapMode};

/// Has this program play the guest.
const GUEST: &str = "guest";
/// `KVM_RUN` that go by before the guest is stepped: the first write finds the #GP handler.
const WARM: u32 = 64;
/// Stretches that are stepped; of each kind more than one, which must not differ.
const STRETCHES: usize = 6;
/// A stretch has some ten thousand.
const MOST_STEPS: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(600);

const GP_VECTOR: u8 = 13;
const GP_HANDLER: u64 = KERNEL_CODE + 0x2000;
const HLT: [u8; 1] = [0xf4];

const SYS_IOCTL: u64 = 16;
const KVM_RUN: u64 = 0xae80;
/// RAX of a system call that failed is above.
const LARGEST_RESULT: u64 = u64::MAX - 4095;

fn main() -> Result<()> {
    let list = match std::env::args().nth(1).as_deref() {
        None => false,
        Some("list") => true,
        Some(GUEST) => return play_guest(),
        Some(_) => bail!("usage: trap-path [list]"),
    };
    let mut child = Command::new(std::env::current_exe()?)
        .arg(GUEST)
        .stdout(Stdio::piped())
        .spawn()?;
    let measured = measure(&mut child);
    let _ = child.kill();
    child.wait()?;
    let (stretches, symbols) = measured?;
    for stretch in &stretches[STRETCHES - 2..] {
        report(stretch, &symbols, list);
    }
    Ok(())
}

/// The WRMSR in turn starts and stops the counter.
fn play_guest() -> Result<()> {
    let lab = Lab::open()?;
    let vendor = host_vendor(&lab.host()?.supported_cpuid()?)?;
    let model = PmuModel::default_for(vendor);
    // A #GP handler as that of Linux, whose first instruction can be displaced.
    let handler = [&ENDBR64[..], &HLT].concat();
    let guest = MicroGuest::new()
        .code(KERNEL_CODE, assemble(KERNEL_CODE, |a| toggle(a, &model))?)
        .code(GP_HANDLER, handler)
        .handler(GP_VECTOR, GP_HANDLER)
        .start(Start::at(KERNEL_CODE, 0));
    let options = VmOptions::with_pmu(Some(&model)).trapping(lab.probe.trap_plan(TrapMode::Auto));
    let (vm, vcpus) = guest.build(lab.host()?, &options)?;
    let vcpu = vcpus.into_iter().next().context("the guest has a vCPU")?;
    let setup = Setup::clock(model.name());
    let parts = SoloParts {
        model,
        backend: (setup.backend)(),
        quirks: lab.probe.quirks(),
        step: lab.probe.step_support(),
        pmi_floor_us: setup.pmi_floor_us,
        platform: Arc::new(Nothing),
        observer: Box::new(Silent),
        reservations: None,
    };
    let mut solo = Solo::new(vcpu, vm, parts)?;
    println!("ready");
    std::io::stdout().flush()?;
    solo.run(PATIENCE)?;
    Ok(())
}

/// Has no devices.
#[derive(Debug)]
struct Nothing;

impl Platform for Nothing {
    fn port_read(&self, _: u16, _: u8, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn port_write(&self, _: u16, _: u8, _: &[u8]) -> DeviceOutcome {
        DeviceOutcome::Continue
    }

    fn mmio_read(&self, _: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn mmio_write(&self, _: u64, _: &[u8]) {}
}

fn toggle(a: &mut CodeAssembler, model: &PmuModel) -> Result<(), iced_x86::IcedError> {
    /// USR, OS and INT of an event select, and the bit that enables it.
    const FLAGS: u32 = 1 << 16 | 1 << 17 | 1 << 20;
    const ENABLE: i32 = 1 << 22;
    let msrs = model.msr_ranges().into_iter();
    let msrs: Vec<u32> = msrs.flat_map(|(first, last)| first..=last).collect();
    let find = |wanted: Register| {
        let mut msrs = msrs.iter().copied();
        msrs.find(|msr| model.decode(MsrIndex(*msr)) == Some(wanted))
    };
    if let Some(control) = find(Register::GlobalControl) {
        wrmsr(a, control, 1)?;
    }
    let event = match EventCode::of(model.events(), KnownEvent::CoreCycles) {
        Some(EventCode::Selected { select, umask, .. }) => {
            u32::from(umask) << 8 | u32::from(select) & 0xff
        }
        _ => 0,
    };
    a.mov(ecx, find(Register::Select(0)).unwrap_or_default())?;
    a.mov(eax, event | FLAGS)?;
    a.xor(edx, edx)?;
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    a.xor(eax, ENABLE)?;
    a.wrmsr()?;
    a.jmp(again)
}

/// What was passed from one `KVM_RUN` to the next.
#[derive(Debug, Default, PartialEq, Eq)]
struct Stretch {
    /// Addresses of all instructions, in their order.
    passed: Vec<u64>,
    /// Numbers of the system calls between the two `KVM_RUN`.
    calls: Vec<u64>,
}

impl Stretch {
    fn instructions(&self) -> u64 {
        u64::try_from(self.passed.len()).unwrap_or(u64::MAX)
    }
}

/// What an instruction is, as far as the stepper cares.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Syscall,
    Rdtsc,
    Other,
}

fn measure(child: &mut Child) -> Result<(Vec<Stretch>, Symbols)> {
    let mut line = String::new();
    let out = child.stdout.take().context("its output is a pipe")?;
    BufReader::new(out).read_line(&mut line)?;
    ensure!(line == "ready\n", "the guest could not be made");
    let pid = Pid::from_raw(child.id().cast_signed());
    ptrace::attach(pid)?;
    let mut stepper = Stepper {
        pid,
        kinds: HashMap::new(),
        clock: StandingClock::default(),
    };
    stepper.wait()?;
    ptrace::setoptions(pid, ptrace::Options::PTRACE_O_TRACESYSGOOD)?;
    stepper.skip(WARM)?;
    let stretches: Vec<Stretch> = (0..STRETCHES)
        .map(|_| stepper.stretch())
        .collect::<Result<_>>()?;
    Ok((stretches, Symbols::of(pid)?))
}

/// Single-steps one thread.
struct Stepper {
    pid: Pid,
    kinds: HashMap<u64, Kind>,
    clock: StandingClock,
}

impl Stepper {
    /// Lets `runs` calls of `KVM_RUN` go by, and stops after the last.
    fn skip(&mut self, runs: u32) -> Result<()> {
        // Each has two stops.
        let mut left = 2 * runs;
        while left > 0 {
            ptrace::syscall(self.pid, None)?;
            if self.wait()? == Stop::Syscall {
                let regs = ptrace::getregs(self.pid)?;
                left -= u32::from(is_kvm_run(regs.orig_rax, regs.rsi));
            }
        }
        Ok(())
    }

    /// From the end of one `KVM_RUN` to the end of the next.
    fn stretch(&mut self) -> Result<Stretch> {
        let mut stretch = Stretch::default();
        self.clock.stop();
        for _ in 0..MOST_STEPS {
            let mut regs = ptrace::getregs(self.pid)?;
            let kind = self.kind(regs.rip)?;
            let enters = kind == Kind::Syscall && is_kvm_run(regs.rax, regs.rsi);
            if enters {
                self.clock.go_on(stretch.instructions());
            } else {
                stretch.passed.push(regs.rip);
                if kind == Kind::Syscall {
                    stretch.calls.push(regs.rax);
                }
            }
            ptrace::step(self.pid, None)?;
            self.wait()?;
            if kind == Kind::Rdtsc || enters {
                regs = ptrace::getregs(self.pid)?;
            }
            if enters {
                ensure!(regs.rax < LARGEST_RESULT, "KVM_RUN was interrupted");
                return Ok(stretch);
            }
            if kind == Kind::Rdtsc {
                let now = self.clock.now(stretch.instructions());
                (regs.rax, regs.rdx) = (now & 0xffff_ffff, now >> 32);
                ptrace::setregs(self.pid, regs)?;
            }
        }
        bail!("{MOST_STEPS} instructions without a KVM_RUN")
    }

    fn kind(&mut self, rip: u64) -> Result<Kind> {
        if let Some(kind) = self.kinds.get(&rip) {
            return Ok(*kind);
        }
        let word = ptrace::read(self.pid, rip as ptrace::AddressType)?;
        let kind = match word.to_le_bytes() {
            [0x0f, 0x05, ..] => Kind::Syscall,
            [0x0f, 0x31, ..] => Kind::Rdtsc,
            _ => Kind::Other,
        };
        self.kinds.insert(rip, kind);
        Ok(kind)
    }

    /// Waits until the thread stops. Its signals are not handed on.
    fn wait(&self) -> Result<Stop> {
        match waitpid(self.pid, None) {
            Ok(WaitStatus::PtraceSyscall(_)) => Ok(Stop::Syscall),
            Ok(WaitStatus::Stopped(..)) => Ok(Stop::Other),
            // A kick: nix has no name for a real-time signal.
            Err(Errno::EINVAL) => Ok(Stop::Other),
            other => bail!("the guest's thread does not stop: {other:?}"),
        }
    }
}

/// Why a thread stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stop {
    /// At the entry or the exit of a system call.
    Syscall,
    Other,
}

fn is_kvm_run(call: u64, request: u64) -> bool {
    call == SYS_IOCTL && request == KVM_RUN
}

/// What a `KVM_RUN` of this guest takes on the software KVM, in ticks of a TSC of some GHz:
/// ten microseconds. The stops around one take longer than what the PMU calls a long absence,
/// at whose end it asks the host whether its thread had been off the CPU.
const RUN_TICKS: u64 = 30_000;

/// A TSC that goes on by a tick an instruction, and by [`RUN_TICKS`] a `KVM_RUN`: what the
/// thread takes while it is stepped is none of its time.
#[derive(Default)]
struct StandingClock {
    /// When the present stretch began; 0 before the first.
    since: u64,
}

impl StandingClock {
    fn stop(&mut self) {
        if self.since == 0 {
            self.since = vmm::sys::rdtsc();
        }
    }

    /// After so many instructions of the stretch, of one tick each.
    fn now(&self, instructions: u64) -> u64 {
        self.since + instructions
    }

    fn go_on(&mut self, instructions: u64) {
        self.since += instructions + RUN_TICKS;
    }
}

/// Crates whose functions are counted.
const OURS: [&str; 6] = [
    "arbiter",
    "kvm_pmu",
    "perfmon",
    "pmu_model",
    "pmu_virt",
    "vmm",
];

/// The functions of this repository that a stretch passes.
#[derive(Debug, Default, PartialEq, Eq)]
struct Functions {
    all: BTreeSet<String>,
    /// Those that go on to others of them; the rest are accessors, operators and the like.
    steps: BTreeSet<String>,
}

impl Functions {
    fn of(stretch: &Stretch, symbols: &Symbols) -> Self {
        let mut found = Self::default();
        let mut callers: Vec<&str> = Vec::new();
        let mut last = None;
        for at in &stretch.passed {
            let Some((begin, name)) = symbols.function(*at) else {
                continue;
            };
            if last == Some(name) && *at != begin {
                continue;
            }
            if *at == begin {
                // Called by the function of ours that was passed last.
                if let Some(caller) = callers.last().filter(|caller| **caller != name) {
                    found.steps.insert((*caller).to_owned());
                }
                callers.push(name);
                found.all.insert(name.to_owned());
            } else {
                // Back in one that was called before, or in that of the `KVM_RUN`.
                while callers.last().is_some_and(|caller| *caller != name) {
                    callers.pop();
                }
                if callers.is_empty() {
                    callers.push(name);
                }
                found.all.insert(name.to_owned());
            }
            last = Some(name);
        }
        found
    }
}

/// The function of this repository that the symbol `name` is of.
fn ours(name: &str) -> Option<String> {
    let name = format!("{:#}", rustc_demangle::demangle(name));
    // A closure is part of the function that it stands in.
    let name = name
        .split("::{{closure}}")
        .next()
        .unwrap_or(&name)
        .to_owned();
    let krate = name.trim_start_matches('<').split("::").next()?;
    OURS.contains(&krate).then_some(name)
}

/// Where the functions of a process lie: from where, to where, and the name.
struct Symbols {
    ours: BTreeMap<u64, (u64, String)>,
}

impl Symbols {
    fn of(pid: Pid) -> Result<Self> {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let program = std::env::current_exe()?;
        let path = program.to_str().context("a path of readable letters")?;
        let first = maps.lines().find(|line| line.ends_with(path));
        let base = first.and_then(|line| line.split('-').next());
        let base = u64::from_str_radix(base.context("the program is mapped")?, 16)?;
        let bytes = std::fs::read(&program)?;
        let file = ElfFile64::<Endianness>::parse(&*bytes)?;
        let functions = file
            .symbols()
            .filter(|symbol| symbol.kind() == SymbolKind::Text);
        let ours = functions.filter_map(|symbol| {
            let (at, name) = (base + symbol.address(), ours(symbol.name().ok()?)?);
            Some((at, (at + symbol.size(), name)))
        });
        Ok(Self {
            ours: ours.collect(),
        })
    }

    fn function(&self, at: u64) -> Option<(u64, &str)> {
        let (begin, (end, name)) = self.ours.range(..=at).next_back()?;
        (at < *end).then_some((*begin, name))
    }
}

fn report(stretch: &Stretch, symbols: &Symbols, list: bool) {
    let Functions { all, steps } = Functions::of(stretch, symbols);
    println!(
        "{} functions, {} of which call others; {} instructions; system calls {:?}",
        all.len(),
        steps.len(),
        stretch.passed.len(),
        stretch.calls
    );
    for name in all.iter().filter(|_| list) {
        println!("{} {name}", if steps.contains(name) { "*" } else { " " });
    }
}
