//! What the main thread waits for while the guest runs.

use std::os::fd::AsRawFd;
use std::time::Duration;

use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use thiserror::Error;
use vmm_sys_util::errno;
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::timerfd::TimerFd;

use super::console::ConsoleInput;

/// How long the guest's full receiver is left alone.
const RETRY: Duration = Duration::from_millis(5);

/// The main thread cannot wait for what ends a run.
#[derive(Debug, Error)]
pub enum LoopError {
    /// No timer.
    #[error("no timer: {0}")]
    Timer(errno::Error),
    /// The event loop.
    #[error("the event loop failed: {0}")]
    Manager(event_manager::Error),
}

/// Why the loop ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wake {
    /// A vCPU ended.
    VcpuEnded,
    /// SIGINT, SIGTERM or SIGHUP.
    Signal,
    /// `--timeout` passed.
    Timeout,
}

/// Everything that the main thread serves.
#[derive(Debug)]
pub(super) struct Sources {
    pub(super) ended: EventFd,
    pub(super) signals: EventFd,
    /// Somebody else in this process wants the run to end.
    pub(super) asked: Option<EventFd>,
    pub(super) timeout: Option<Duration>,
    pub(super) console: ConsoleInput,
}

/// Serves the console until something ends the run.
pub(super) fn serve(sources: Sources) -> Result<Wake, LoopError> {
    let mut manager =
        EventManager::<Box<dyn MutEventSubscriber>>::new().map_err(LoopError::Manager)?;
    let subscriber = Subscriber::new(sources)?;
    let woken = subscriber.woken.clone();
    manager.add_subscriber(Box::new(subscriber));
    loop {
        manager.run().map_err(LoopError::Manager)?;
        if let Some(wake) = woken.get() {
            return Ok(wake);
        }
    }
}

struct Subscriber {
    sources: Sources,
    timeout: TimerFd,
    retry: TimerFd,
    woken: std::rc::Rc<std::cell::Cell<Option<Wake>>>,
}

impl Subscriber {
    fn new(sources: Sources) -> Result<Self, LoopError> {
        let timer = || TimerFd::new().map_err(LoopError::Timer);
        let (mut timeout, retry) = (timer()?, timer()?);
        if let Some(after) = sources.timeout {
            timeout.reset(after, None).map_err(LoopError::Timer)?;
        }
        Ok(Self {
            sources,
            timeout,
            retry,
            woken: std::rc::Rc::default(),
        })
    }

    fn console(&mut self, ops: &mut EventOps<'_>) {
        let console = &mut self.sources.console;
        console.serve();
        let stdin = Events::empty_raw(libc::STDIN_FILENO);
        if console.is_waiting() {
            // The terminal would wake us all the time meanwhile.
            let _ = ops.remove(stdin);
            if let Err(error) = self.retry.reset(RETRY, None) {
                log::warn!("console input stops, its timer failed: {error}");
            }
        } else if console.has_ended() {
            let _ = ops.remove(stdin);
        }
    }

    fn listen_to_stdin(&mut self, ops: &mut EventOps<'_>) {
        let stdin = Events::new_raw(libc::STDIN_FILENO, EventSet::IN);
        if ops.add(stdin).is_err() && !self.sources.console.has_ended() {
            // A plain file cannot be waited for; it can be read at any time.
            if let Err(error) = self.retry.reset(RETRY, None) {
                log::warn!("console input stops, its timer failed: {error}");
            }
        }
    }
}

impl MutEventSubscriber for Subscriber {
    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        let is = |fd: &dyn AsRawFd| -> bool { events.fd() == fd.as_raw_fd() };
        if is(&self.sources.ended) {
            self.woken.set(Some(Wake::VcpuEnded));
        } else if is(&self.sources.signals) || self.sources.asked.as_ref().is_some_and(|it| is(it))
        {
            self.woken.set(Some(Wake::Signal));
        } else if is(&self.timeout) {
            self.woken.set(Some(Wake::Timeout));
        } else if is(&self.retry) {
            // Readable by definition; the count does not matter.
            let _ = self.retry.wait();
            self.console(ops);
            if !self.sources.console.is_waiting() && !self.sources.console.has_ended() {
                self.listen_to_stdin(ops);
            }
        } else {
            self.console(ops);
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        let asked = self.sources.asked.as_ref();
        let always = [
            Events::new(&self.sources.ended, EventSet::IN),
            Events::new(&self.sources.signals, EventSet::IN),
            Events::new(&self.timeout, EventSet::IN),
            Events::new(&self.retry, EventSet::IN),
        ];
        let asked = asked.map(|asked| Events::new(asked, EventSet::IN));
        for source in always.into_iter().chain(asked) {
            if let Err(error) = ops.add(source) {
                log::error!("an event source cannot be served: {error}");
            }
        }
        self.listen_to_stdin(ops);
    }
}
