//! A guest that a tool looks at. Both wait for each other at numbered gates.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use guest_tests::micro::{Lab, Program, Written, exit};
use iced_x86::code_asm::{CodeAssembler, al, dx, edx};
use perfmon_abi::{LoadArg, PmcArg, PmdArg};
use pmu_virt::{ClockBackend, CounterBackend, PmuModel, StepBackend};
use umpire_perfmon::{Call, Client, ContextHandle};
use vmm::devices::Platform;
use vmm::devices::{DeviceOutcome, GuestEnd, ports};
use vmm::micro::{BackendFactory, KERNEL_CODE, MicroGuest, MicroOutcome, MicroRun, Start};
use vmm::sched::CorePlan;
use vmm_control::ControlConfig;

/// How long anybody waits for anything.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// The port at which a guest reads how far the tool is.
const TOOL: u32 = 0x80;
/// The port at which it says how far it is.
const GUEST: u32 = 0x81;

/// The ports at which the hearts of vCPUs 0 and 1 beat.
const BEATS: u16 = 0x82;

/// AMD event selects: enabled, for both rings.
pub(crate) const CYCLES: u64 = 0x43_0076;
pub(crate) const RETURNS: u64 = 0x43_00c8;

/// Where tool and guest have got to.
#[derive(Debug, Default)]
pub(crate) struct Gates {
    tool: AtomicU8,
    guest: AtomicU8,
    /// Beats of vCPUs 0 and 1, which a guest sends if it is made so.
    beats: [AtomicU64; 2],
}

impl Gates {
    /// The guest may go on past this gate.
    pub(crate) fn open(&self, gate: u8) {
        self.tool.store(gate, Ordering::Release);
    }

    /// How often a vCPU's heart has beaten.
    pub(crate) fn beats(&self, vcpu: usize) -> u64 {
        self.beats[vcpu].load(Ordering::Acquire)
    }

    /// Waits until it beats again, several times.
    pub(crate) fn alive(&self, vcpu: usize) -> Result<()> {
        let before = self.beats(vcpu);
        eventually("a vCPU goes on", || Ok(self.beats(vcpu) > before + 3))
    }

    /// Waits until the guest has come to this gate.
    pub(crate) fn reached(&self, gate: u8) -> Result<()> {
        eventually("the guest comes to its gate", || {
            Ok(self.guest.load(Ordering::Acquire) >= gate)
        })
    }
}

/// Opens every gate when it is dropped, also by a panic.
struct OpenAtLast<'a>(&'a Gates);

impl Drop for OpenAtLast<'_> {
    fn drop(&mut self) {
        self.0.open(u8::MAX);
    }
}

impl Platform for Gates {
    fn port_read(&self, _: u16, _: u8, data: &mut [u8]) {
        data.fill(self.tool.load(Ordering::Acquire));
    }

    fn port_write(&self, port: u16, _: u8, data: &[u8]) -> DeviceOutcome {
        let value = data.first().copied().unwrap_or(0);
        if u32::from(port) == GUEST {
            self.guest.fetch_max(value, Ordering::AcqRel);
        }
        if let Some(beats) = port
            .checked_sub(BEATS)
            .and_then(|n| self.beats.get(usize::from(n)))
        {
            beats.fetch_add(1, Ordering::AcqRel);
        }
        match port {
            ports::TEST_EXIT | vmm::micro::UNEXPECTED_VECTOR_PORT => {
                DeviceOutcome::Exit(GuestEnd::TestExit(value.into()))
            }
            _ => DeviceOutcome::Continue,
        }
    }

    fn mmio_read(&self, _: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn mmio_write(&self, _: u64, _: &[u8]) {}
}

/// Waits until `is_so`.
pub(crate) fn eventually(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let began = Instant::now();
    while !is_so()? {
        if began.elapsed() > PATIENCE {
            bail!("in vain: {what}");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// The guest says that it has come to `gate`, and waits until it is opened: no
/// stores, no returns, and a branch now and then.
pub(crate) fn gate(a: &mut CodeAssembler, gate: u8) -> Written {
    a.mov(al, u32::from(gate))?;
    a.mov(edx, GUEST)?;
    a.out(dx, al)?;
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    a.mov(edx, TOOL)?;
    a.in_(al, dx)?;
    a.cmp(al, i32::from(gate))?;
    a.jb(again)
}

/// A guest that does `work` between gates 1 and 2, and ends at gate 3.
pub(crate) fn guest(work: impl FnOnce(&mut CodeAssembler) -> Written) -> Result<MicroGuest> {
    Ok(Program::new()?
        .kernel(|a| {
            gate(a, 1)?;
            work(a)?;
            gate(a, 2)?;
            gate(a, 3)?;
            exit(a)
        })?
        .start(0))
}

fn beat(a: &mut CodeAssembler, vcpu: u16) -> Written {
    a.mov(edx, u32::from(BEATS + vcpu))?;
    a.out(dx, al)
}

/// Two vCPUs whose hearts beat, until gate 3 is opened.
pub(crate) fn two_hearts() -> Result<MicroGuest> {
    beside_a_heart(|a| {
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        beat(a, 1)?;
        a.jmp(again)
    })
}

/// One vCPU whose heart beats, until gate 3 is opened, and one that has halted for good.
pub(crate) fn a_heart_and_a_halted_one() -> Result<MicroGuest> {
    beside_a_heart(|a| {
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.cli()?;
        a.hlt()?;
        a.jmp(again)
    })
}

/// vCPU 0 has a heart that beats, until gate 3 is opened; vCPU 1 does `other`.
fn beside_a_heart(other: impl FnOnce(&mut CodeAssembler) -> Written) -> Result<MicroGuest> {
    const SECOND: u64 = KERNEL_CODE + 0x1_0000;
    let program = Program::new()?.kernel(|a| {
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        beat(a, 0)?;
        a.mov(edx, TOOL)?;
        a.in_(al, dx)?;
        a.cmp(al, 3)?;
        a.jb(again)?;
        exit(a)
    })?;
    let program = program.code(SECOND, other)?;
    let starts = [KERNEL_CODE, SECOND].map(|at| Start::at(at, 0));
    Ok(starts.into_iter().fold(program.guest(), MicroGuest::start))
}

/// How a guest is run beside its tool.
#[derive(Debug, Clone)]
pub(crate) struct Bed {
    pub(crate) model: &'static str,
    pub(crate) backend: BackendFactory,
    pub(crate) cores: Option<CorePlan>,
    pub(crate) timeout: Duration,
    folder: Arc<tempfile::TempDir>,
    pub(crate) control: ControlConfig,
}

pub(crate) fn clock() -> Box<dyn CounterBackend> {
    Box::new(ClockBackend::new())
}

pub(crate) fn step() -> Box<dyn CounterBackend> {
    Box::new(StepBackend::new())
}

impl Bed {
    pub(crate) fn new(backend: BackendFactory) -> Result<Self> {
        let folder = Arc::new(tempfile::tempdir()?);
        let control = ControlConfig::at(folder.path().join("control"));
        Ok(Self {
            model: "amd-core",
            backend,
            cores: None,
            timeout: Duration::from_secs(60),
            folder,
            control,
        })
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("control")
    }

    /// Runs `guest`, and `tool` beside it. The guest is expected to end by
    /// itself.
    pub(crate) fn run<T: Send>(
        &self,
        lab: &Lab,
        guest: &MicroGuest,
        tool: impl FnOnce(&Client, &Gates) -> Result<T>,
    ) -> Result<(T, MicroOutcome)> {
        let run = MicroRun {
            model: Some(PmuModel::parse(self.model)?),
            backend: self.backend,
            quirks: lab.probe.quirks(),
            step: lab.probe.step_support(),
            trap: lab.probe.trap_plan(vmm::vcpu::TrapMode::Auto),
            pmi_floor_us: 100,
            timeout: self.timeout,
            record: false,
            cores: self.cores,
            pcr: None,
        };
        let host = lab.host()?;
        let gates = Arc::new(Gates::default());
        let platform = gates.clone();
        std::thread::scope(|scope| {
            let guest =
                scope.spawn(|| run.run_served(host, guest, Some(&self.control), |_| Ok(platform)));
            let told = {
                // Whatever the tool meets, the guest comes to its end.
                let _open = OpenAtLast(&gates);
                self.connect().and_then(|client| tool(&client, &gates))
            };
            let outcome = guest.join();
            let told = told?;
            let outcome = outcome.map_err(|_| anyhow::anyhow!("the guest's thread panicked"))??;
            ensure!(!outcome.timed_out, "the guest did not end");
            Ok((told, outcome))
        })
    }

    fn connect(&self) -> Result<Client> {
        let mut client = None;
        eventually("the server comes up", || {
            client = Client::connect(self.socket()).ok();
            Ok(client.is_some())
        })?;
        client.context("a client")
    }
}

/// A PMC of set 0.
pub(crate) fn pmc(num: u16, value: u64) -> PmcArg {
    PmcArg {
        num,
        value,
        ..PmcArg::default()
    }
}

/// A PMD of set 0.
pub(crate) fn pmd(num: u16, value: u64) -> PmdArg {
    PmdArg {
        num,
        value,
        ..PmdArg::default()
    }
}

/// Loads `context` on vCPU or core `number`.
pub(crate) fn load(client: &Client, context: &ContextHandle, number: i32) -> Result<()> {
    let arg = LoadArg {
        pid: number,
        set: 0,
    };
    Ok(client.call(context, &mut Call::Load(arg))?)
}

/// A context with one counter.
pub(crate) fn counter(client: &Client, flags: u32, event: u64) -> Result<ContextHandle> {
    let context = client.create(flags, None, &[])?;
    client.call(&context, &mut Call::WritePmcs(vec![pmc(0, event)]))?;
    client.call(&context, &mut Call::WritePmds(vec![pmd(0, 0)]))?;
    Ok(context)
}

/// Value and flags of a PMD of set 0.
pub(crate) fn read(client: &Client, context: &ContextHandle, num: u16) -> Result<PmdArg> {
    let mut call = Call::ReadPmds(vec![pmd(num, 0)]);
    client.call(context, &mut call)?;
    let Call::ReadPmds(read) = call else {
        bail!("another command came back");
    };
    read.first().copied().context("a PMD")
}
