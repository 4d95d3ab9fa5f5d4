//! The records of all processors that are online, whenever they come and go.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::proc;
use crate::records;
use crate::session::Session;
use crate::sys::{self, NoEvent, Ring};

/// A tick of `/proc` in ns: `USER_HZ` is 100 on x86-64.
const TICK_NS: u64 = 10_000_000;

const ONLINE: &str = "/sys/devices/system/cpu/online";

/// The rings of the processors.
#[derive(Debug)]
pub(crate) struct Processors {
    all: Vec<Processor>,
    /// The kernel's list of those that are online, when each of them had a ring.
    online: Option<Vec<u8>>,
}

#[derive(Debug)]
struct Processor {
    cpu: u32,
    apic_id: u32,
    ring: Ring,
}

impl Processors {
    /// Begins with those that are online; none, if `/proc` does not tell them.
    ///
    /// # Errors
    /// The first of them that has no records, and why.
    pub(crate) fn open(session: &mut Session) -> Result<Self, (u32, NoEvent)> {
        let mut processors = Self {
            all: Vec::new(),
            online: None,
        };
        match processors.open_others(session) {
            None => Ok(processors),
            Some(refused) => Err(refused),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(crate) fn rings(&self) -> impl Iterator<Item = &Ring> {
        self.all.iter().map(|processor| &processor.ring)
    }

    /// Hands `session` all that was recorded.
    pub(crate) fn drain(&mut self, session: &mut Session) {
        let mut lost = Vec::new();
        for Processor { cpu, apic_id, ring } in &mut self.all {
            let had_room = ring.drain(|bytes| {
                if let Some(record) = records::record(bytes) {
                    session.take(*apic_id, record);
                }
            });
            // The kernel says so with its next record only, which may come in an hour.
            if !had_room {
                session.lost(*apic_id);
                lost.push(*cpu);
            }
        }
        show_up(&lost);
    }

    /// Looks for processors that came, and for those that went: Linux takes the event from one
    /// that goes offline, and does not give it back.
    pub(crate) fn check(&mut self, session: &mut Session) {
        self.drain(session);
        let before = self.all.len();
        self.all.retain_mut(|processor| {
            let runs = processor.ring.has_run();
            if !runs {
                session.lost(processor.apic_id);
            }
            runs
        });
        let is_same = self.online.is_some() && self.online == fs::read(ONLINE).ok();
        if self.all.len() != before || !is_same {
            self.open_others(session);
        }
    }

    /// Opens the rings that are missing. One that cannot be opened, and why.
    fn open_others(&mut self, session: &mut Session) -> Option<(u32, NoEvent)> {
        let (mut opened, mut refused) = (Vec::new(), None);
        let online = fs::read(ONLINE).ok();
        let cpuinfo = fs::read("/proc/cpuinfo").unwrap_or_default();
        // The hypervisor names the processor, in whatever bytes it likes.
        for (cpu, apic_id) in proc::processors(&String::from_utf8_lossy(&cpuinfo)) {
            if self.all.iter().any(|processor| processor.cpu == cpu) {
                continue;
            }
            match Ring::open(cpu) {
                Ok(ring) => {
                    session.opened(apic_id, sys::now().ns);
                    self.all.push(Processor { cpu, apic_id, ring });
                    opened.push(cpu);
                }
                Err(why) => refused = refused.or(Some((cpu, why))),
            }
        }
        self.online = online.filter(|_| refused.is_none());
        show_up(&opened);
        refused
    }

    /// Has the session begin with what runs now. How long that took.
    pub(crate) fn begin_again(&mut self, session: &mut Session) -> Duration {
        let (began, since) = (Instant::now(), sys::now().ns);
        let guest = proc::guest(Path::new("/proc"), TICK_NS, || self.drain(session));
        let until = sys::now().ns;
        self.drain(session);
        session.begin_again(guest, since, until);
        began.elapsed()
    }
}

/// Runs on each of these processors once, so that the kernel records who runs there.
fn show_up(cpus: &[u32]) {
    let Some(all) = sched_getaffinity(None).ok().filter(|_| !cpus.is_empty()) else {
        return;
    };
    for cpu in cpus {
        let cpu = usize::try_from(*cpu).unwrap_or(usize::MAX);
        if cpu < CpuSet::MAX_CPU {
            let mut one = CpuSet::new();
            one.set(cpu);
            // Of a processor where it may not run the first switch tells.
            let _ = sched_setaffinity(None, &one);
        }
    }
    let _ = sched_setaffinity(None, &all);
}
