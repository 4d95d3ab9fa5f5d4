//! The server's thread: it takes in packets and reports, and has each answered.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use perfmon_abi::CtxArg;
use perfmon_abi::consts::{PFM_TRY_LOAD, PFM_VERSION};
use perfmon_abi::wire::bell::BELL;
use perfmon_abi::wire::budget::BUDGET;
use perfmon_abi::wire::kernel::KERNEL;
use perfmon_abi::wire::pause::PAUSE;
use perfmon_abi::wire::pcr::PCR;
use perfmon_abi::wire::programs::PROGRAMS;
use perfmon_abi::wire::{Call, Errno, Extension, FrameError, Hello, MAX_PACKET, Refusal, Request};
use pmu_virt::perfmon::ContextId;

use super::administration::AdminRequests;
use super::answer::{Answer, ConnectionId, RequestId};
use super::connections::{Connections, PacketBuffer};
use super::contexts::{Contexts, Created, Wanted};
use super::events::{Events, Token};
use super::inventory::{self, ListAnswer, ListRequests};
use super::kernel::{KernelRequests, programs};
use super::limits::{CONTEXT_FILES, Limits};
use super::{LINGER, ServedVm, Stop};
use crate::config::ControlConfig;
use crate::job::{Ask, Done, Report, Work};
use crate::socket::FileId;
use umpire_service::{Listener, Received};

/// How often the server looks whether tools have closed their contexts, once the
/// machine has ended.
const END_POLL: Duration = Duration::from_millis(20);
/// The first number of the protocol's own commands.
const EXTENSIONS: u16 = 0x100;

/// All that the server's thread has.
#[derive(Debug)]
pub(super) struct EventLoop {
    events: Arc<Events>,
    limits: Limits,
    /// Dropped before the connections: a vCPU that waits for its tool goes on even
    /// where a client's descriptor takes long to close.
    contexts: Contexts,
    connections: Connections,
    lists: ListRequests,
    administration: AdminRequests,
    kernel: KernelRequests,
}

impl EventLoop {
    /// # Errors
    /// The process has no descriptor left, or `stop` cannot be waited for.
    pub(super) fn new(
        vm: ServedVm,
        config: &ControlConfig,
        limits: Limits,
        listener: Listener,
        stop: &Stop,
    ) -> io::Result<Self> {
        let events = Arc::new(Events::new()?);
        let connections = Connections::new(listener, events.clone(), config.connections)?;
        events.add(vm.dispatcher.notifier(), Token::Reports)?;
        events.add(&stop.notifier, Token::Stop)?;
        Ok(Self {
            limits,
            connections,
            contexts: Contexts::new(vm, events.clone()),
            lists: ListRequests::new(config.policy.to_string()),
            administration: AdminRequests::default(),
            kernel: KernelRequests::default(),
            events,
        })
    }

    /// Serves until `stop` is requested and no tool looks at its context any more. What
    /// contexts counted can be read from then on, too.
    pub(super) fn run(mut self, stop: &Stop) {
        self.serve(stop);
        let contexts = &mut self.contexts;
        self.connections.leave(|id| contexts.last_counts(id));
    }

    fn serve(&mut self, stop: &Stop) {
        let mut buffer: PacketBuffer = Box::new([0; MAX_PACKET]);
        let mut until: Option<Instant> = None;
        loop {
            // Reports first: they may end what is waited for.
            self.take_reports();
            let now = Instant::now();
            let overdue = self.lists.end_overdue(now, &self.contexts);
            self.answer_lists(overdue);
            self.connections.resume_accept(now);
            self.settle();
            if let Some(until) = until
                && (now >= until || !self.contexts.table().is_any_ended())
            {
                return;
            }
            let poll_end = until.map(|_| now + END_POLL);
            let paused = self.connections.accept_paused_until();
            let due = [poll_end, self.lists.due(), paused];
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
                    Token::Listener => self.connections.accept(),
                    Token::Reports => self.contexts.vm().dispatcher.notifier().drain(),
                    Token::Stop => {
                        stop.notifier.drain();
                        if stop.requested.load(Ordering::Acquire) && until.is_none() {
                            until = Some(Instant::now() + LINGER);
                        }
                    }
                    Token::Connection(id) => {
                        if let Some(packet) = self.connections.receive(id, &mut buffer) {
                            self.request(id, &buffer, packet);
                        }
                    }
                    Token::Context(id) => self.contexts.abandoned(id),
                }
                self.settle();
            }
        }
    }

    /// Takes in what the threads of vCPUs have reported.
    fn take_reports(&mut self) {
        while let Some(report) = self.contexts.vm().dispatcher.report() {
            match report {
                Report::Job(_, target, Done::Inspected(view)) => {
                    let answer = self.lists.inspected(target, Some(view), &self.contexts);
                    self.answer_lists(answer);
                }
                Report::Job(_, target, Done::Undone(Work::Inspect)) => {
                    let answer = self.lists.inspected(target, None, &self.contexts);
                    self.answer_lists(answer);
                }
                Report::Job(_, target, Done::Administered(number, result)) => {
                    self.lists.outdated();
                    let answer = self.administration.done(number, target, Some(result));
                    self.answer_pcr(answer);
                }
                Report::Job(_, target, Done::Undone(Work::Administer(number, _))) => {
                    let answer = self.administration.done(number, target, None);
                    self.answer_pcr(answer);
                }
                Report::Job(id, target, Done::Asked(answer)) => {
                    self.lists.outdated();
                    self.contexts.owners_answered(id, target, answer);
                }
                // It has ended, and keeps nothing.
                Report::Job(id, target, Done::Undone(Work::Ask(Ask::KeepTo { .. }))) => {
                    self.contexts.owners_answered(id, target, Ok(None));
                }
                Report::Job(_, _, Done::Settled | Done::Undone(Work::Ask(_) | Work::Lease(_))) => {}
                Report::Job(id, _, done) => {
                    self.lists.outdated();
                    self.contexts.job_done(id, done);
                }
                Report::Kernel(found) => {
                    let answer = self.kernel.done(found);
                    self.answer_lists(Some(answer));
                }
                Report::Buffer(number, made) => {
                    let created = self.contexts.buffer_made(number, made, &self.limits);
                    if let Some((request, created)) = created {
                        let answer = self.created(request, created);
                        self.connections.reply(request, &answer);
                    }
                }
                Report::Ended(target, contexts) => {
                    self.lists.outdated();
                    self.contexts.ended(target, contexts);
                }
            }
            self.settle();
        }
    }

    fn answer_lists(&mut self, answer: Option<ListAnswer>) {
        let Some((requests, answer)) = answer else {
            return;
        };
        for request in requests {
            self.connections.reply(request, &answer);
        }
    }

    fn answer_pcr(&mut self, answer: Option<(RequestId, Answer)>) {
        if let Some((request, answer)) = answer {
            self.connections.reply(request, &answer);
        }
    }

    /// Brings together what the last step has left: answers go to connections,
    /// abandoned contexts lose their handles, and ended connections their requests.
    fn settle(&mut self) {
        while let Some((request, answer)) = self.contexts.take_answer() {
            self.connections.reply(request, &answer);
        }
        for context in self.contexts.take_abandoned() {
            self.connections.forget(context);
        }
        for connection in self.connections.take_ended() {
            self.lists.forget(connection);
            self.administration.forget(connection);
            self.kernel.forget(connection);
            self.contexts.forget(connection);
        }
    }

    /// A packet of a connection: a request, if it is one of the protocol.
    fn request(&mut self, id: ConnectionId, buffer: &PacketBuffer, packet: Received) {
        if !packet.rights.is_empty() && self.connections.is_overdrawn(id) {
            log::debug!("a connection is closed, as too many descriptors wait to be closed");
            self.discard(packet);
            self.connections.hang_up(id);
            return;
        }
        let decoded = match buffer.get(..packet.bytes) {
            Some(bytes) => Request::decode(bytes),
            None => Err(FrameError::Long(packet.bytes)),
        };
        let request = match decoded {
            Ok(request) => request,
            Err(error) => {
                // Whoever sends this does not speak the protocol.
                log::debug!("a connection is closed: {error}");
                let refusal = Refusal::new(Errno::EPROTO, error.to_string());
                self.discard(packet);
                self.connections.turn_away(id, &refusal);
                return;
            }
        };
        let number = RequestId {
            connection: id,
            command: request.command,
            id: request.id,
            context: request.context,
        };
        let answer = self.command(number, &request, &packet);
        self.discard(packet);
        if let Some(answer) = answer.unwrap_or_else(|refusal| Some(refusal.into())) {
            self.connections.reply(number, &answer);
        }
    }

    /// Closes what came with a packet. The descriptor of a context is closed at
    /// once: nobody is to find it open whose client has closed it. Whatever else
    /// it is, this thread does not wait for its end.
    fn discard(&mut self, mut packet: Received) {
        packet.rights.keep(|fd| {
            let file = FileId::of(fd).ok();
            let context = file.and_then(|file| self.contexts.table().of_file(file));
            context.is_none()
        });
    }

    /// The answer to a request; `None` if it comes later.
    fn command(
        &mut self,
        id: RequestId,
        request: &Request<'_>,
        packet: &Received,
    ) -> Result<Option<Answer>, Refusal> {
        let wants = usize::from(request.command == Extension::Bind.number());
        if packet.rights.len() != wants || packet.cut {
            return Err(if wants == 0 {
                let reason = "the command takes no descriptor; those that came are closed";
                Refusal::new(Errno::EINVAL, reason)
            } else {
                let reason = "BIND takes one descriptor, that of a context";
                Refusal::new(Errno::EBADF, reason)
            });
        }
        if request.command < EXTENSIONS || request.command == PFM_TRY_LOAD {
            self.specified(id, request)
        } else if matches!(request.command, KERNEL | PROGRAMS) {
            // What samples have met, and where the kernel is, is for those who may sample.
            let connection = self.connections.get(id.connection);
            let peer = &connection.ok_or(Errno::ECONNRESET)?.peer;
            self.limits.admit(peer, false)?;
            if request.command == PROGRAMS {
                return programs(request, self.contexts.vm().kernel.as_ref()).map(Some);
            }
            let vm = self.contexts.vm();
            let guest = vm.kernel.as_ref();
            self.kernel.request(id, request, guest, &vm.dispatcher)
        } else if matches!(request.command, PCR | BUDGET | PAUSE) {
            let connection = self.connections.get(id.connection);
            let peer = &connection.ok_or(Errno::ECONNRESET)?.peer;
            let dispatcher = &self.contexts.vm().dispatcher;
            let may = self.limits.admit_administrator(peer);
            self.administration.request(id, request, may, dispatcher)?;
            Ok(None)
        } else if request.command == BELL {
            if request.nargs != 0 || !request.payload.is_empty() {
                let reason = "BELL takes no argument";
                return Err(Refusal::new(Errno::EINVAL, reason));
            }
            let context = self.context_of(id, request)?;
            let files = self.limits.contexts * CONTEXT_FILES;
            self.contexts.bell(context, files).map(Some)
        } else {
            self.extension(id, request, &packet.rights)
        }
    }

    /// The context that a request is about.
    fn context_of(&self, id: RequestId, request: &Request<'_>) -> Result<ContextId, Refusal> {
        let connection = self.connections.get(id.connection);
        let handles = &connection.ok_or(Errno::ECONNRESET)?.handles;
        handles.get(request.context)
    }

    /// A command of the specification.
    fn specified(
        &mut self,
        id: RequestId,
        request: &Request<'_>,
    ) -> Result<Option<Answer>, Refusal> {
        let Request {
            command,
            nargs,
            payload,
            context,
            ..
        } = *request;
        let mut call = Call::decode(command, nargs, payload, self.limits.arg_size)?;
        let connection = self.connections.get(id.connection);
        let connection = connection.ok_or(Errno::ECONNRESET)?;
        let pmu = &self.contexts.vm().pmu;
        let result = match &mut call {
            Call::Create(arg, format_arg) => {
                return Ok(self.create(id, *arg, std::mem::take(format_arg)));
            }
            Call::GetinfoPmcs(vector) => pmu.getinfo_pmcs(vector),
            Call::GetinfoPmds(vector) => pmu.getinfo_pmds(vector),
            Call::GetConfig(config) => {
                *config = self.limits.get(pmu);
                Ok(())
            }
            Call::SetConfig(config) => self.limits.set(&connection.peer, config),
            _ => match connection.handles.get(context) {
                Ok(context) => return Ok(self.contexts.call(context, id, call)),
                Err(refusal) => Err(refusal),
            },
        };
        Ok(Some(Answer::of_call(&call, result)))
    }

    /// The answer to a request that makes a context; `None` if it comes later.
    fn create(&mut self, id: RequestId, arg: CtxArg, format_arg: Vec<u8>) -> Option<Answer> {
        let Some(connection) = self.connections.get(id.connection) else {
            return Some(Refusal::from(Errno::ECONNRESET).into());
        };
        let wanted = Wanted {
            creator: connection.peer.clone(),
            arg,
            format_arg,
        };
        let created = self.contexts.create(id, &self.limits, wanted)?;
        Some(self.created(id, created))
    }

    fn created(&mut self, id: RequestId, (context, answer): Created) -> Answer {
        Answer {
            context: context.and_then(|context| self.handle(id, context)),
            ..answer
        }
    }

    /// The handle of a context on the connection of a request.
    fn handle(&mut self, id: RequestId, context: ContextId) -> Option<u32> {
        let connection = self.connections.get_mut(id.connection)?;
        Some(connection.handles.bind(context))
    }

    /// A command of the protocol's own.
    fn extension(
        &mut self,
        id: RequestId,
        request: &Request<'_>,
        fds: &[OwnedFd],
    ) -> Result<Option<Answer>, Refusal> {
        let extension = Extension::decode(request.command, request.nargs, request.payload)?;
        let vm = self.contexts.vm();
        Ok(Some(match extension {
            Extension::List => return Ok(self.lists.request(id, &self.contexts)),
            Extension::Hello => Answer::done(hello(vm).to_bytes()),
            Extension::SystemWide => Answer::done(self.contexts.system_wide().to_bytes()),
            Extension::Formats => Answer::json(&inventory::formats(&vm.formats)),
            Extension::Model => {
                let connection = self.connections.get(id.connection);
                let peer = &connection.ok_or(Errno::ECONNRESET)?.peer;
                let filter = vm.events.tool(peer.uid, &peer.groups);
                Answer::json(&inventory::model(vm, filter))
            }
            Extension::Bind => {
                let (context, mut answer) = self.contexts.bind(fds)?;
                answer.context = Some(self.handle(id, context).ok_or(Errno::ECONNRESET)?);
                answer
            }
            Extension::Unbind => {
                let connection = self.connections.get_mut(id.connection);
                let connection = connection.ok_or(Errno::ECONNRESET)?;
                connection.handles.unbind(request.context)?;
                Answer::default()
            }
            Extension::GetBuffer => {
                let context = self.context_of(id, request)?;
                self.contexts.buffer(context)?
            }
        }))
    }
}

fn hello(vm: &ServedVm) -> Hello {
    Hello {
        pid: std::process::id(),
        version: PFM_VERSION,
        max_packet: inventory::number(MAX_PACKET),
        vcpus: inventory::number(vm.dispatcher.vcpus()),
        cores: inventory::number(vm.dispatcher.cores()),
    }
}
