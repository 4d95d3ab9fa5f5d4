//! A Linux guest on the processor in software, in this process: halted at chosen times, which are
//! the same in each run.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use guest_view::{GuestMemory, Mode, Registers};
use pmu_virt::Vendor;
use vm_memory::{Bytes, GuestAddress};
use vmm::boot::{self, BootRequest, InitialState, Unpack};
use vmm::devices::{PlatformParts, PortBus, SharedPlatform, TimerWidth, ports};
use vmm::emu::{
    EmuVcpuParts, Lines, Nobody, Outside, Room, RoomParts, VirtualClock, Waited, general,
    processor, special, starting_at,
};
use vmm::sync::lock;
use vmm::vcpu::{VcpuControl, VcpuEnd};

use super::{Guest, Halted};

const MEMORY_MIB: u64 = 512;
const CPUS: u8 = 2;
/// Between two halts, in nanoseconds: a prime, so that no loop of the guest's keeps step.
const BETWEEN: u64 = 3_000_017;
/// Between two looks at what it has said.
const SAYING: u64 = 100_000_000;

/// A guest whose memory and registers can be looked at between any two of its instructions.
#[derive(Debug)]
pub struct InSoftware {
    room: Room,
    control: Arc<VcpuControl>,
    until: Arc<AtomicU64>,
    console: Kept,
    said: Kept,
}

/// What came out of a serial port.
#[derive(Debug, Clone, Default)]
struct Kept(Arc<Mutex<Vec<u8>>>);

impl Kept {
    fn text(&self) -> String {
        String::from_utf8_lossy(&lock(&self.0)).into_owned()
    }
}

impl Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        lock(&self.0).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Stops the machine at a time. Idle time is skipped.
#[derive(Debug)]
struct Stops {
    control: Arc<VcpuControl>,
    until: Arc<AtomicU64>,
}

impl Outside for Stops {
    fn turn_over(&mut self, now: u64) -> u64 {
        if now >= self.until.load(Ordering::Relaxed) {
            self.control.stop();
        }
        now
    }

    fn idle(&mut self, now: u64, until: Option<u64>, held: bool) -> Waited {
        self.turn_over(now);
        Nobody.idle(now, until, held)
    }
}

impl InSoftware {
    /// Boots `guest` with `options` for the kernel. What it writes to `/dev/ttyS1` is
    /// [`said`](Halted::said).
    ///
    /// # Panics
    /// The kernel cannot be loaded, or there is no room for the guest's memory.
    #[must_use]
    pub fn start(guest: &Guest, options: &str) -> Self {
        let memory = boot::memory::create(MEMORY_MIB).expect("memory");
        let request = BootRequest {
            kernel: guest.kernel().to_owned(),
            initrd: Some(guest.initrd().to_owned()),
            cmdline: format!("console=ttyS0 loglevel=5 panic=-1 {options}"),
            modules: Vec::new(),
            cpus: CPUS.into(),
            unpack: Unpack::Always,
            pm_timer: true,
            virtio: None,
            rng_seed: Some([7; 32]),
            firmware: None,
        };
        let loaded = boot::load(&memory, &request).expect("a kernel");
        let (lines, control, until) = <(Arc<Lines>, Arc<VcpuControl>, Arc<AtomicU64>)>::default();
        let (console, said) = (Kept::default(), Kept::default());
        let clock = VirtualClock::beginning_at(1_767_225_600);
        let line = |pin: u32| Box::new(lines.to_pin(pin.to_le_bytes()[0]));
        let parts = PlatformParts {
            com1_irq: line(ports::COM1_GSI),
            console: Box::new(console.clone()),
            com2: Some((line(ports::COM2_GSI), Box::new(said.clone()))),
            time: Box::new(clock.clone()),
            timer_width: TimerWidth::default(),
        };
        let room = Room::new(RoomParts {
            memory,
            vcpus: vcpus(&loaded.state),
            platform: Arc::new(SharedPlatform::new(PortBus::new(parts))),
            control: control.clone(),
            lines,
            outside: Box::new(Stops {
                control: control.clone(),
                until: until.clone(),
            }),
            clock,
        });
        Self {
            room: room.expect("a machine"),
            control,
            until,
            console,
            said,
        }
    }

    /// Runs it for so many nanoseconds of its time.
    fn run_for(&mut self, time: u64) {
        self.until.store(self.room.now() + time, Ordering::Relaxed);
        self.control.resume();
        let end = self.room.run();
        assert_eq!(end.end, VcpuEnd::Stopped, "{}", self.console.text());
    }
}

/// Processors without a PMU; the first is about to begin, the others wait to be started.
fn vcpus(first: &InitialState) -> Vec<EmuVcpuParts> {
    let vcpu = |id: u8| {
        let cpuid = processor(Vendor::Intel, (id, CPUS), None).expect("a processor");
        EmuVcpuParts::alone(cpuid, (id == 0).then(|| starting_at(first)))
    };
    (0..CPUS).map(vcpu).collect()
}

impl Halted for InSoftware {
    fn memory_bytes(&self) -> u64 {
        MEMORY_MIB << 20
    }

    fn said(&mut self, end: &str, timeout: Duration) -> String {
        let start = Instant::now();
        while start.elapsed() < timeout {
            self.run_for(SAYING);
            let said = self.said.text();
            if said.ends_with(end) {
                return said;
            }
        }
        panic!("{}", self.console.text());
    }

    fn halt_later(&mut self) -> io::Result<Vec<Registers>> {
        self.run_for(BETWEEN);
        let of = |vcpu: &vmm::emu::EmuVcpu| {
            let state = vcpu.cpu().state();
            let (general, special) = (general(state), special(state, 0));
            Registers {
                rip: general.rip,
                rsp: general.rsp,
                rbp: general.rbp,
                rdx: general.rdx,
                rdi: general.rdi,
                r10: general.r10,
                r13: general.r13,
                cr3: special.cr3,
                mode: Mode::of_cs(special.cs.selector),
            }
        };
        Ok(self.room.vcpus().iter().map(of).collect())
    }
}

impl GuestMemory for InSoftware {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        let memory = self.room.memory();
        memory.read_slice(buffer, GuestAddress(address)).is_ok()
    }
}
