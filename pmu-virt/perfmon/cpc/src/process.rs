//! What this process has: LWPs and their bed, and whom a call of a thread is about.

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::sync::{Mutex, MutexGuard, PoisonError};

use libc::ESRCH;
use pmu_model::PmuModel;
use umpire_events::{LibraryError, NameTable, NoTables};
use umpire_perfmon::c_calls::{Undisturbed, undisturbed};

use super::event::Event;
use super::failure::{Failure, Subcode, fail};
use super::host::{Host, VcpuName};
use super::linux::Linux;
use super::lwp::{INHERIT, Lwps, Signal};
use super::processor;

/// The environment variable that names a vCPU.
const VCPU: &str = "UMPIRE_VCPU";
/// libpfm loads its tables only where this is set before it starts.
const TABLES: &str = "LIBPFM_ENCODE_INACTIVE";

/// LWPs of this process.
struct World {
    lwps: Lwps,
    /// The vCPU that was named; none where LWPs are threads.
    vcpu: Option<usize>,
    /// Threads that have ended, whose numbers are free.
    free: Vec<usize>,
}

static WORLD: Mutex<Option<World>> = Mutex::new(None);

thread_local! {
    /// The LWP that the thread's calls are about, where it is not the vCPU that was named.
    static LWP: Cell<Option<usize>> = const { Cell::new(None) };
    /// What it has bound may be inherited by threads that it starts.
    static INHERITS: Cell<bool> = const { Cell::new(false) };
    /// All that there is, while the thread forks.
    static FORKING: Cell<Option<ManuallyDrop<(Undisturbed, Locked)>>> = const { Cell::new(None) };
    /// Gives a thread's counters back as it ends.
    static END: End = const { End };
}

/// As a thread ends, its counters are released.
struct End;

impl Drop for End {
    fn drop(&mut self) {
        if let Ok(Some(lwp)) = LWP.try_with(Cell::get) {
            undisturbed(|| leave(lwp));
        }
    }
}

fn leave(lwp: usize) {
    if let Some(world) = lock().as_mut()
        && world.vcpu.is_none()
    {
        world.lwps.release(lwp);
        world.free.push(lwp);
    }
}

type Locked = MutexGuard<'static, Option<World>>;

fn lock() -> Locked {
    WORLD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The calling thread is about to fork: no other one is in the middle of anything.
pub(crate) fn before_fork() {
    let undisturbed = Undisturbed::begin();
    FORKING.set(Some(ManuallyDrop::new((undisturbed, lock()))));
}

/// It has forked. The child has nothing of what there is: its copies of descriptors are closed,
/// or counters would outlive the parent's.
pub(crate) fn after_fork(in_child: bool) {
    if let Some(held) = FORKING.take() {
        // The lock goes first.
        let (_undisturbed, mut world) = ManuallyDrop::into_inner(held);
        if in_child {
            *world = None;
        }
    }
}

/// Does `work` while no other thread does anything here, and no thread forks.
pub(crate) fn alone<R>(work: impl FnOnce() -> R) -> R {
    let _world = lock();
    work()
}

fn make() -> Result<World, Failure> {
    let free = Vec::new();
    if let Some(name) = std::env::var_os(VCPU) {
        // A name that is no text is none of a VM, and an error below.
        let name = name.to_string_lossy();
        let (host, vcpu) = Host::find(&VcpuName::parse(&name)?)?;
        let count = host.count();
        return Ok(World {
            lwps: Lwps::new(Box::new(host), count),
            vcpu: Some(vcpu),
            free,
        });
    }
    Ok(World {
        lwps: Lwps::new(Box::new(Linux::find()?), 0),
        vcpu: None,
        free,
    })
}

/// Does something with LWPs. Signals are blocked.
fn with<R>(work: impl FnOnce(&mut World) -> Result<R, Failure>) -> Result<R, Failure> {
    let mut world = lock();
    if world.is_none() {
        // In a child, that of the parent.
        LWP.set(None);
        *world = Some(make()?);
    }
    match world.as_mut() {
        Some(world) => work(world),
        None => Err(fail(
            ESRCH,
            Subcode::BindFailed,
            format_args!("no counters"),
        )),
    }
}

impl World {
    /// The LWP that the calling thread's calls are about.
    fn lwp(&mut self) -> usize {
        if let Some(lwp) = LWP.get().or(self.vcpu) {
            return lwp;
        }
        let lwp = self.free.pop().unwrap_or_else(|| self.lwps.grow());
        LWP.set(Some(lwp));
        END.with(|_| ());
        lwp
    }
}

/// The processor's number.
pub(crate) fn cpuver() -> Result<i32, Failure> {
    with(|world| Ok(processor::number(world.lwps.model())))
}

/// What is asked about the PMU of the processor with this number: with as many counters as
/// there are, if it is the one that counts.
pub(crate) fn about<R>(number: i32, work: impl FnOnce(&PmuModel) -> R) -> Option<R> {
    let world = lock();
    let own = world.as_ref().map(|world| world.lwps.model());
    match own.filter(|model| processor::number(model) == number) {
        Some(model) => Some(work(model)),
        None => Some(work(&processor::model(number)?)),
    }
}

/// Whether the counters can be used.
pub(crate) fn access() -> Result<(), Failure> {
    with(|world| world.lwps.access())
}

/// Binds `event` to the calling thread's LWP.
pub(crate) fn bind(event: Option<&Event>, flags: i32) -> Result<(), Failure> {
    with(|world| {
        let lwp = world.lwp();
        INHERITS.set(world.vcpu.is_none() && flags & INHERIT != 0);
        world.lwps.bind(lwp, event, flags)
    })
}

/// Samples it.
pub(crate) fn sample() -> Result<Event, Failure> {
    with(|world| {
        let lwp = world.lwp();
        world.lwps.sample(lwp)
    })
}

/// Releases it.
pub(crate) fn release() -> Result<(), Failure> {
    with(|world| {
        let lwp = world.lwp();
        world.lwps.release(lwp);
        Ok(())
    })
}

/// Has it count in a ring, or not any more.
pub(crate) fn count_in(ring: u64, on: bool) -> Result<(), Failure> {
    with(|world| {
        let lwp = world.lwp();
        world.lwps.count_in(lwp, ring, on)
    })
}

/// The LWP that the calling thread's calls are about.
pub(crate) fn lwp() -> Result<usize, Failure> {
    with(|world| Ok(world.lwp()))
}

/// The calling thread's calls are about this vCPU from now on.
pub(crate) fn switch_to(vcpu: usize) -> Result<(), Failure> {
    with(|world| {
        let count = world.lwps.count();
        if world.vcpu.is_none() || vcpu >= count {
            let reason = format_args!("there is no vCPU {vcpu}; UMPIRE_VCPU names a VM");
            return Err(fail(ESRCH, Subcode::BindFailed, reason));
        }
        LWP.set(Some(vcpu));
        Ok(())
    })
}

/// Calls of this thread are about `lwp` while `work` runs.
pub(crate) fn on_behalf_of(lwp: usize, work: impl FnOnce()) {
    let before = LWP.replace(Some(lwp));
    work();
    LWP.set(before);
}

/// A descriptor of ours tells of something: the signal for the calling thread, and whether it
/// is about one of many LWPs, and not about the thread.
pub(crate) fn overflow(descriptor: i32) -> Option<(Signal, bool)> {
    let mut world = lock();
    let world = world.as_mut()?;
    let signal = world.lwps.overflow(descriptor)?;
    Some((signal, world.vcpu.is_some()))
}

/// What a thread that the calling one starts will inherit.
pub(crate) fn legacy() -> Option<(Event, i32)> {
    // vCPUs inherit, not the tool's threads.
    if !INHERITS.get() {
        return None;
    }
    undisturbed(|| lock().as_ref()?.lwps.legacy(LWP.get()?))
}

/// The calling thread has just started, and inherits this.
pub(crate) fn inherit(legacy: (Event, i32)) -> Option<Signal> {
    let inherited = with(|world| {
        let lwp = world.lwp();
        INHERITS.set(true);
        Ok(world.lwps.inherit_now(lwp, legacy))
    });
    inherited.ok().flatten()
}

/// Tables of event names, where they can be had.
pub(crate) fn names() -> Box<dyn NameTable> {
    if std::env::var_os(TABLES).is_some() {
        umpire_events::names()
    } else {
        Box::new(NoTables(LibraryError::TooLate))
    }
}
