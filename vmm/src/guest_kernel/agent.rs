//! What an agent in the guest says of threads and mappings, where the guest's kernel does not
//! describe them: `umpire-agent` at the second serial port.
//!
//! A vCPU leaves a [`Moment`], and its sample has numbers for what the moment is about. A
//! thread of the VM asks the agent, and says what these numbers stand for. All that the agent
//! says is the guest's: what makes no sense is not known, and nobody waits for it for long.

mod known;
mod link;

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::Builder;
use std::time::{Duration, Instant};

use self::link::Link;
use super::VmKernel;
use super::described::AgentState;
use crate::devices::SharedPlatform;
use crate::sync::lock;

/// Moments that wait for the thread. A sample that finds no room knows no task.
const WAITING: usize = 1024;
/// Most bytes of the guest that wait for the thread. What comes then is lost, which shows.
const BYTES: usize = 1 << 20;
/// How often the thread makes sure that there is a VM: it keeps the VM's devices, and with them
/// the other end of its channel.
const CHECK: Duration = Duration::from_secs(1);

/// A sample whose thread and mappings the agent knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Moment {
    /// That of the task; each address has the next one.
    pub(super) number: u64,
    pub(super) apic_id: u32,
    /// The guest's TSC.
    pub(super) tsc: u64,
    /// Of its program.
    pub(super) addresses: Vec<u64>,
}

/// What the thread is woken for.
#[derive(Debug)]
enum AgentNews {
    Bytes,
    Moment(Moment),
}

/// Between vCPUs and the thread. Nothing here blocks.
#[derive(Debug)]
pub(crate) struct AgentPort {
    news: SyncSender<AgentNews>,
    /// What the guest has written and the thread has not read.
    bytes: Mutex<Vec<u8>>,
    /// It answers, as far as is known.
    there: AtomicBool,
}

impl AgentPort {
    /// The agent can be asked.
    pub(super) fn is_there(&self) -> bool {
        self.there.load(Ordering::Relaxed)
    }

    /// Has the agent asked; false if there is no room.
    pub(super) fn ask(&self, moment: Moment) -> bool {
        self.news.try_send(AgentNews::Moment(moment)).is_ok()
    }
}

/// What the guest writes to the agent's port.
#[derive(Debug)]
pub(crate) struct FromGuest(Arc<AgentPort>);

impl Write for FromGuest {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut waiting = lock(&self.0.bytes);
        let is_first = waiting.is_empty();
        let room = BYTES.saturating_sub(waiting.len()).min(bytes.len());
        waiting.extend_from_slice(&bytes[..room]);
        drop(waiting);
        if is_first {
            // Without room the thread is awake, and looks here anyway.
            let _ = self.0.news.try_send(AgentNews::Bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The agent's line, until a thread serves it.
#[derive(Debug)]
pub(crate) struct AgentLine {
    pub(super) port: Arc<AgentPort>,
    news: Receiver<AgentNews>,
    platform: Arc<SharedPlatform>,
}

impl AgentPort {
    /// A port, and what takes the guest's bytes.
    pub(crate) fn pair() -> (AgentEnd, FromGuest) {
        let (news, receiver) = sync_channel(WAITING);
        let port = Arc::new(Self {
            news,
            bytes: Mutex::default(),
            there: AtomicBool::new(false),
        });
        let end = AgentEnd {
            port: port.clone(),
            news: receiver,
        };
        (end, FromGuest(port))
    }
}

/// The VMM's end of a port that the guest has not got yet.
#[derive(Debug)]
pub(crate) struct AgentEnd {
    port: Arc<AgentPort>,
    news: Receiver<AgentNews>,
}

impl AgentEnd {
    /// The guest has the port on `platform`.
    pub(crate) fn on(self, platform: Arc<SharedPlatform>) -> AgentLine {
        AgentLine {
            port: self.port,
            news: self.news,
            platform,
        }
    }
}

impl AgentLine {
    /// Starts the thread, which ends with the VM.
    pub(super) fn serve(self, kernel: &Arc<VmKernel>) -> io::Result<()> {
        let why = "umpire-agent has not been started in the guest";
        kernel.descriptions.set_agent(AgentState::Away(why.into()));
        let kernel = Arc::downgrade(kernel);
        Builder::new()
            .name("guest-agent".into())
            .spawn(move || serve(&self, &kernel))?;
        Ok(())
    }
}

fn serve(line: &AgentLine, kernel: &Weak<VmKernel>) {
    let mut link = Link::default();
    loop {
        let told = next(&line.news, link.due());
        let Some(kernel) = kernel.upgrade() else {
            return;
        };
        let descriptions = &kernel.descriptions;
        let mut first = match told {
            Ok(news) => Some(news),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        while let Some(news) = first.take().or_else(|| line.news.try_recv().ok()) {
            if let AgentNews::Moment(moment) = news {
                link.add(moment, descriptions, Instant::now());
            }
            if link.is_full() {
                break;
            }
        }
        let bytes = std::mem::take(&mut *lock(&line.port.bytes));
        let now = Instant::now();
        link.take(&bytes, descriptions, now);
        link.step(descriptions, now);
        line.port.there.store(link.is_there(), Ordering::Relaxed);
        link.send(now, |bytes| line.platform.ports().enqueue_agent(bytes));
    }
}

/// The next news, before `due` and before it is time to look after the VM.
fn next(news: &Receiver<AgentNews>, due: Option<Instant>) -> Result<AgentNews, RecvTimeoutError> {
    let wait = due.map_or(CHECK, |due| due.saturating_duration_since(Instant::now()));
    news.recv_timeout(wait.min(CHECK))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_waits_for_a_vm_that_is_gone() {
        let (end, _from_guest) = AgentPort::pair();
        for due in [None, Some(Instant::now() + 9 * CHECK), Some(Instant::now())] {
            let began = Instant::now();
            let told = next(&end.news, due);
            assert!(matches!(told, Err(RecvTimeoutError::Timeout)), "{told:?}");
            assert!(began.elapsed() < 5 * CHECK);
        }
    }
}
