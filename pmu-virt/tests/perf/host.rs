//! `perf` on the host's own kernel.

use crate::{Run, Verdict, ensure};
use pmu_virt::contract::{self, Driver, PerfDriver};
use pmu_virt::perf::{PerfBackend, note_overflow_signal, probe};
use pmu_virt::{
    BackendEnv, CountRequest, CounterBackend, EventCode, EventFamily, Progress, Provenance,
    Reading, Ring, SlotIndex, SlotSet, SoftwareEvent, Ticks, Tsc, Vendor,
};
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

pub(crate) const TESTS: &[(&str, Run)] = &[
    ("host::contract", contract_on_the_host),
    ("host::every_software_event_is_counted", software_events),
    (
        "host::the_overflow_signal_comes_at_the_very_event",
        signal_is_exact,
    ),
    ("host::a_full_signal_queue_is_survived", full_queue),
    (
        "host::task_clock_follows_the_time_on_the_cpu",
        clock_follows_time,
    ),
    (
        "host::a_user_without_rights_gets_the_task_clock",
        clock_of_a_user,
    ),
    ("host::hardware_events_leave_the_host_out", hardware_events),
];

const A: SlotIndex = SlotIndex(0);
const TSC_KHZ: u32 = 2_000_000;

/// Signals that stood in for one whose queue was full.
static SIGIOS: AtomicU32 = AtomicU32::new(0);

extern "C" fn on_signal(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    if signal == libc::SIGIO {
        SIGIOS.fetch_add(1, Ordering::Relaxed);
    }
    note_overflow_signal(sys::code(info));
}

mod sys {
    use std::io;

    /// `si_code` of what a handler was given.
    pub(super) fn code(info: *const libc::siginfo_t) -> i32 {
        // SAFETY: the kernel hands a valid siginfo_t to a handler that was
        // installed with SA_SIGINFO, for the duration of the handler.
        unsafe { (*info).si_code }
    }

    /// Gives up the calling thread's rights, and only its own: the system call
    /// itself knows threads alone, unlike the C library's function.
    pub(super) fn become_user(user: u32) -> io::Result<()> {
        // SAFETY: three integers; the thread ends with the test.
        match unsafe { libc::syscall(libc::SYS_setresuid, user, user, user) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Sets the soft limit of queued signals; returns what it was.
    pub(super) fn set_pending_signals(limit: u64) -> io::Result<u64> {
        let mut limits = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: the kernel writes one rlimit at the pointer.
        if unsafe { libc::getrlimit(libc::RLIMIT_SIGPENDING, &raw mut limits) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let kept = limits.rlim_cur;
        limits.rlim_cur = limit;
        // SAFETY: the kernel reads one rlimit at the pointer.
        if unsafe { libc::setrlimit(libc::RLIMIT_SIGPENDING, &raw const limits) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(kept)
    }
}

fn env() -> BackendEnv {
    BackendEnv {
        tsc_khz: TSC_KHZ,
        host_vendor: None,
        host_events: None,
        overflow_signal: SIGRTMIN(),
        steps_cpl3: true,
    }
}

/// What stands in the way of overflows of software events here.
fn obstacle() -> Option<String> {
    let support = probe();
    let software = support.software.err().and(support.limits().pop());
    support.refusal().or(software)
}

fn open() -> Result<PerfBackend, String> {
    for signal in [SIGRTMIN(), libc::SIGIO] {
        register_signal_handler(signal, on_signal).map_err(|error| error.to_string())?;
    }
    PerfBackend::new(&env()).map_err(|error| error.to_string())
}

fn contract_on_the_host() -> Result<Verdict, String> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    open()?;
    let factory = || -> Box<dyn CounterBackend> {
        Box::new(PerfBackend::new(&env()).expect("it was opened a moment ago"))
    };
    contract::check(factory, PerfDriver::default())
        .map_err(|violations| format!("{violations:#?}"))?;
    Ok(Verdict::Passed)
}

fn inside(backend: &mut dyn CounterBackend, work: impl FnOnce()) {
    backend.observe(&Progress::Entered { tsc: Tsc(0) });
    work();
    backend.observe(&Progress::Left {
        tsc: Tsc(0),
        halted: Ticks(0),
        ring: None,
    });
}

fn counted(backend: &dyn CounterBackend) -> Result<(u64, Provenance), String> {
    match backend.read(A) {
        Reading::Counted { value, provenance } => Ok((value, provenance)),
        Reading::Unavailable(reason) => Err(reason.to_string()),
    }
}

fn program(backend: &mut dyn CounterBackend, event: EventCode) -> Result<(), String> {
    let request = CountRequest::plain(event, true, true);
    backend
        .program(A, &request)
        .map_err(|unavailable| unavailable.to_string())?;
    backend.start(A);
    Ok(())
}

fn spin(time: Duration) {
    let begin = Instant::now();
    while begin.elapsed() < time {}
}

fn software_events() -> Result<Verdict, String> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    let mut backend = open()?;
    program(
        &mut backend,
        EventCode::Software(SoftwareEvent::ContextSwitches),
    )?;
    inside(&mut backend, || {
        for _ in 0..5 {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    std::thread::sleep(Duration::from_millis(1));
    let (value, provenance) = counted(&backend)?;
    ensure(value >= 5 && provenance == Provenance::Exact, || {
        format!("{value} context switches in five sleeps, {provenance}")
    })?;
    program(&mut backend, EventCode::Software(SoftwareEvent::TaskClock))?;
    inside(&mut backend, || {
        spin(Duration::from_millis(2));
        std::thread::sleep(Duration::from_millis(20));
    });
    let (value, _) = counted(&backend)?;
    // At least some of the 2 ms, and nothing of the 20 ms asleep.
    ensure((200_000..15_000_000).contains(&value), || {
        format!("{value} ns on the CPU in 2 ms of work")
    })?;
    program(
        &mut backend,
        EventCode::Software(SoftwareEvent::CpuMigrations),
    )?;
    inside(&mut backend, || spin(Duration::from_micros(50)));
    let (value, provenance) = counted(&backend)?;
    ensure(value <= 4 && provenance == Provenance::Exact, || {
        format!("{value} migrations in 50 us, {provenance}")
    })?;
    Ok(Verdict::Passed)
}

/// Lets a guest of the contract's driver fault.
fn fault(backend: &mut dyn CounterBackend, faults: u64) {
    PerfDriver::default().run(backend, Ring::User, faults);
}

fn signal_is_exact() -> Result<Verdict, String> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    let mut backend = open()?;
    program(&mut backend, EventCode::Software(SoftwareEvent::PageFaults))?;
    // Its own code and data are in memory after this.
    fault(&mut backend, 1_000);
    backend.take_overflows();
    let (before, _) = counted(&backend)?;
    backend.arm(A, NonZeroU64::new(300));
    let mut at = None;
    for _ in 0..40 {
        fault(&mut backend, 10);
        // No reading in between: the signal alone makes it look.
        if backend.take_overflows().contains(A) {
            at = Some(counted(&backend)?.0 - before);
            break;
        }
    }
    ensure(at.is_some_and(|at| (300..320).contains(&at)), || {
        format!("armed for 300 events, told at {at:?}")
    })?;
    Ok(Verdict::Passed)
}

fn full_queue() -> Result<Verdict, String> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    let mut backend = open()?;
    program(&mut backend, EventCode::Software(SoftwareEvent::PageFaults))?;
    fault(&mut backend, 100);
    backend.take_overflows();
    // With its queue full the kernel sends SIGIO in place of the signal.
    let kept = sys::set_pending_signals(0).map_err(|error| error.to_string())?;
    backend.arm(A, NonZeroU64::new(50));
    fault(&mut backend, 60);
    let told = backend.take_overflows();
    sys::set_pending_signals(kept).map_err(|error| error.to_string())?;
    let sigios = SIGIOS.load(Ordering::Relaxed);
    ensure(told == SlotSet::from_iter([A]) && sigios > 0, || {
        format!("told: {told}, SIGIOs: {sigios}")
    })?;
    Ok(Verdict::Passed)
}

fn clock_follows_time() -> Result<Verdict, String> {
    match obstacle() {
        Some(why) => Ok(Verdict::Skipped(why)),
        None => task_clock(false),
    }
}

/// A user without rights gets the time too; the VMM's timer has to look for the
/// overflow then.
fn clock_of_a_user() -> Result<Verdict, String> {
    const NOBODY: u32 = 65_534;
    let thread = std::thread::spawn(|| {
        sys::become_user(NOBODY).map_err(|error| error.to_string())?;
        let support = probe();
        if let Some(why) = support.refusal() {
            return Ok(Verdict::Skipped(why));
        }
        task_clock(support.software.is_err())
    });
    thread.join().map_err(|_| "it panicked".to_owned())?
}

/// 1 ms is armed and told, by a deadline or by a signal.
fn task_clock(by_deadline: bool) -> Result<Verdict, String> {
    let mut backend = open()?;
    program(&mut backend, EventCode::Software(SoftwareEvent::TaskClock))?;
    let after = 1_000_000;
    backend.arm(A, NonZeroU64::new(after));
    let begin = Instant::now();
    let tsc = || {
        let micros = u64::try_from(begin.elapsed().as_micros()).unwrap_or(0);
        micros * u64::from(TSC_KHZ / 1000)
    };
    let mut told = false;
    while !told && begin.elapsed() < Duration::from_secs(10) {
        backend.observe(&Progress::Entered { tsc: Tsc(tsc()) });
        let deadline = backend.deadline();
        ensure(deadline.is_some() == by_deadline, || {
            format!("{deadline:?}")
        })?;
        spin(Duration::from_micros(200));
        backend.observe(&Progress::Left {
            tsc: Tsc(tsc()),
            halted: Ticks(0),
            ring: None,
        });
        told = backend.take_overflows().contains(A);
    }
    let (value, provenance) = counted(&backend)?;
    ensure(
        told && value >= after && provenance == Provenance::Exact,
        || format!("armed for {after} ns: told {told} at {value}, {provenance}"),
    )?;
    Ok(Verdict::Passed)
}

fn hardware_events() -> Result<Verdict, String> {
    let support = probe();
    if let Err(errno) = support.hardware {
        return Ok(Verdict::Skipped(format!("no hardware events: {errno}")));
    }
    let mut backend = PerfBackend::new(&BackendEnv {
        host_vendor: Some(Vendor::Intel),
        host_events: None,
        ..env()
    })
    .map_err(|error| error.to_string())?;
    // No guest runs here, so a counter that leaves the host out stays at 0.
    let foreign = CountRequest::decode(EventFamily::AmdZen, 0x53_00c0);
    program(&mut backend, foreign.event)?;
    inside(&mut backend, || spin(Duration::from_millis(1)));
    let (value, provenance) = counted(&backend)?;
    ensure(value == 0 && provenance == Provenance::Hardware, || {
        format!("{value} instructions of a guest without one, {provenance}")
    })?;
    Ok(Verdict::Passed)
}
