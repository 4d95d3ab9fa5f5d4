//! The server: one thread, one epoll, nobody to wait for.

mod answer;
mod commands;
mod connections;
mod contexts;
mod create;
mod documents;
mod events;
mod jobs;
mod limits;
mod list;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use perfmon_abi::wire::MAX_PACKET;
use pmu_virt::perfmon::{FormatRegistry, LogicalPmu};
use thiserror::Error;

use super::buffer::Pool;
use super::closer::Closer;
use super::config::ControlConfig;
use super::dispatcher::{JobDispatcher, Work};
use super::notifier::Notifier;
use super::quantities::memory::MemoryProbe;
use super::socket::{Listener, SocketError};
use connections::Connections;
use contexts::{Attachment, Contexts};
use events::{Events, Token};
use limits::Limits;
use list::ListRequests;

/// How long tools may look at their contexts after the machine has ended.
const LINGER: Duration = Duration::from_secs(1);
/// How long the server's thread may take beside that.
const GRACE: Duration = Duration::from_secs(2);
/// How often it is looked whether it has ended.
const SHORT: Duration = Duration::from_millis(1);
/// How often waiting for that is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// The server could not be started.
#[derive(Debug, Error)]
pub enum ServerError {
    /// The socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// Descriptors, or the thread.
    #[error("host tools cannot be served: {0} (limit of open files: `ulimit -n`)")]
    Io(#[from] io::Error),
}

/// What is served.
#[derive(Debug)]
pub struct Machine {
    /// Name of what the guest boots.
    pub guest: String,
    /// Name of the counter backend.
    pub counters: String,
    /// The registers that tools see.
    pub pmu: Arc<LogicalPmu>,
    /// Sampling formats.
    pub formats: Arc<FormatRegistry>,
    /// TSC frequency.
    pub tsc_khz: u32,
    /// The way to the vCPUs.
    pub desk: JobDispatcher,
    pub(crate) memory: Option<MemoryProbe>,
}

/// The running server. When it is dropped, tools are told and it ends.
#[derive(Debug)]
pub struct Server {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Stop {
    asked: AtomicBool,
    notifier: Notifier,
}

impl Server {
    /// Serves `machine` as `config` says, from now on.
    ///
    /// # Errors
    /// The socket cannot be had, or the host has no descriptor or thread left.
    pub fn start(machine: Machine, config: &ControlConfig) -> Result<Self, ServerError> {
        let files = limits::raise_open_files();
        let listener = Listener::new(&config.socket, &config.access)?;
        let stop = Arc::new(Stop {
            asked: AtomicBool::new(false),
            notifier: Notifier::new()?,
        });
        let events = Events::new()?;
        events.add(&listener, Token::Listener)?;
        events.add(machine.desk.notifier(), Token::JobDispatcher)?;
        events.add(&stop.notifier, Token::Stop)?;
        let state = State {
            listener,
            events,
            limits: Limits::new(config, files, machine.desk.vcpus()),
            connections: Connections::default(),
            contexts: Contexts::default(),
            pool: Pool::default(),
            closer: Closer::new(),
            lists: ListRequests::default(),
            accept_paused_until: None,
            policy: config.policy.to_string(),
            machine,
            packet: None,
        };
        let asked = stop.clone();
        let thread = Builder::new()
            .name("control".to_owned())
            .spawn(move || state.run(&asked))?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }

    /// Every vCPU has ended: tools hear of it and may look at their contexts for
    /// a moment, then the socket goes.
    pub fn stop(&mut self) {
        self.stop.asked.store(true, Ordering::Release);
        self.stop.notifier.notify();
        if let Some(thread) = self.thread.take() {
            let began = Instant::now();
            while !thread.is_finished() && began.elapsed() < LINGER + GRACE {
                std::thread::sleep(SHORT);
            }
            if thread.is_finished() {
                // A panic was reported by the panic hook.
                let _ = thread.join();
            } else {
                log::warn!("the server of host tools does not end, and is left behind");
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// All that the server's thread has.
#[derive(Debug)]
struct State {
    listener: Listener,
    events: Events,
    limits: Limits,
    connections: Connections,
    contexts: Contexts,
    pool: Pool,
    closer: Closer,
    lists: ListRequests,
    /// No connection is taken in before.
    accept_paused_until: Option<Instant>,
    policy: String,
    machine: Machine,
    /// Where packets are taken in.
    packet: Option<Box<[u8; MAX_PACKET]>>,
}

/// However the thread ends: nobody could unload a context that stays behind, and
/// a vCPU that is blocked for its tool would never go on.
impl Drop for State {
    fn drop(&mut self) {
        for (id, entry) in self.contexts.iter() {
            if let Attachment::Attached(target) = entry.place {
                self.machine.desk.post(id, target, Work::Unload);
            }
        }
    }
}

impl State {
    fn run(mut self, stop: &Stop) {
        let mut until: Option<Instant> = None;
        loop {
            // Reports first: they may end what is waited for.
            self.take_reports();
            let now = Instant::now();
            self.end_look(now);
            self.resume_accept(now);
            if let Some(until) = until
                && (now >= until || !self.contexts.anybody_told())
            {
                return;
            }
            let due = [
                until.map(|_| now + LOOK),
                self.lists.due(),
                self.accept_paused_until,
            ];
            let due = due.into_iter().flatten().min();
            let most = due.map(|due| due.saturating_duration_since(now));
            let tokens = match self.events.wait(most) {
                Ok(tokens) => tokens,
                Err(error) => {
                    log::error!("host tools are served no longer: epoll failed: {error}");
                    return;
                }
            };
            for token in tokens {
                match token {
                    Token::Listener => self.accept(),
                    Token::JobDispatcher => self.machine.desk.notifier().drain(),
                    Token::Stop => {
                        stop.notifier.drain();
                        if stop.asked.load(Ordering::Acquire) && until.is_none() {
                            until = Some(Instant::now() + LINGER);
                        }
                    }
                    Token::Connection(id) => self.packet(id),
                    Token::Context(id) => self.abandoned(id),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
