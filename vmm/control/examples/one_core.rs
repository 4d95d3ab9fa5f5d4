//! A machine without a guest, whose one core serves host tools.
//!
//! A thread stands for a core: it pretends to run a vCPU that exits all the time, and
//! does its jobs between two exits, as a VMM does. Beside it a tool connects to the
//! socket, attaches a context to the core and reads how many exits there were.
//!
//!     cargo run -p vmm-control --example one_core

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Thread};
use std::time::Duration;

use perfmon_abi::consts::PFM_FL_SYSTEM_WIDE;
use perfmon_abi::wire::Call;
use perfmon_abi::{LoadArg, PmdArg};
use pmu_virt::perfmon::VirtualPmd;
use pmu_virt::{CorePmu, PmuModel, RateTable, SimBackend};
use umpire_perfmon::Client;
use vmm_control::{
    ControlConfig, CoreView, ExitKind, GuestMemoryUse, JobQueue, KickThread, ServerSetup,
    VcpuQuantities, View, WakeCore, close_core, serve_core, serve_inspection,
};

const TSC_KHZ: u32 = 1_000_000;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let config = ControlConfig::at(folder.path().join("control"));

    // One core, with counters whose rates are declared.
    let rates = RateTable::parse("[event.cycles]\nrate = 1000\n", "example")?;
    let mut core = CorePmu::new(Box::new(SimBackend::new(rates, TSC_KHZ)));
    let model = PmuModel::parse("intel-v2")?;
    let mut setup = ServerSetup::new(&config, model, Box::new(NoMemory), TSC_KHZ);
    setup.enable_hosting([&mut core]);
    let mut connected = setup.connect(1, Some(1))?;
    let queue = connected.cores.remove(0);
    let server = connected.server.start("example".to_owned())?;

    let stop = Arc::new(AtomicBool::new(false));
    let stopping = stop.clone();
    let core = thread::spawn(move || run_core(core, queue, &stopping));
    let told = ask(&config);
    stop.store(true, Ordering::Release);
    core.join().map_err(|_| "the core has panicked")?;
    drop(server);
    told
}

/// The core's thread. A VMM enters and leaves its guests here.
fn run_core(mut core: CorePmu, queue: JobQueue, stop: &AtomicBool) {
    let waker = Waker(thread::current(), rustix::thread::gettid());
    queue.set_exchange(Arc::new(waker.clone()));
    queue.bind_thread(Box::new(waker));
    let mut quantities = VcpuQuantities::default();
    while !stop.load(Ordering::Acquire) {
        quantities.count_exit(ExitKind::Msr);
        // One relaxed load, where there is no job.
        while let Some(job) = queue.take() {
            if job.is_inspection() {
                let view = View {
                    cores: vec![CoreView::of(0, None, Some(&core))],
                    vcpus: Vec::new(),
                };
                serve_inspection(job, view);
            } else {
                serve_core(job, &mut core, &quantities);
            }
        }
        thread::park_timeout(Duration::from_micros(100));
    }
    close_core(queue, Some(&mut core), &quantities);
}

/// A tool: it reads how many exits there were on core 0, and once more.
fn ask(config: &ControlConfig) -> Result<(), Box<dyn Error>> {
    let client = Client::connect(&config.socket)?;
    println!("{}", client.list()?.counters);
    let context = client.create(PFM_FL_SYSTEM_WIDE, None, &[])?;
    client.call(&context, &mut Call::Load(LoadArg { pid: 0, set: 0 }))?;
    for _ in 0..2 {
        thread::sleep(Duration::from_millis(10));
        let exits = PmdArg {
            num: VirtualPmd::Exits.pmd(),
            ..PmdArg::default()
        };
        let mut call = Call::ReadPmds(vec![exits]);
        client.call(&context, &mut call)?;
        if let Call::ReadPmds(exits) = call {
            println!("{} exits", exits[0].value);
        }
    }
    Ok(())
}

/// Wakes the core's thread. A VMM sends a signal that makes `KVM_RUN` return.
#[derive(Clone, Debug)]
struct Waker(Thread, rustix::thread::Pid);

impl WakeCore for Waker {
    fn wake(&self, _core: usize) {
        self.0.unpark();
    }
}

impl KickThread for Waker {
    fn kick(&self) {
        self.0.unpark();
    }

    fn thread_id(&self) -> i32 {
        self.1.as_raw_nonzero().get()
    }
}

/// There is no guest, so nothing is known of its memory.
#[derive(Debug)]
struct NoMemory;

impl GuestMemoryUse for NoMemory {
    fn resident_bytes(&mut self) -> Option<u64> {
        None
    }
}
