//! The connection to a VM.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use perfmon_abi::CtxArg;
use perfmon_abi::wire::budget::{BUDGET, BudgetInfo, BudgetRequest};
use perfmon_abi::wire::info::{FormatInfo, MachineInfo, ModelInfo};
use perfmon_abi::wire::kernel::{KERNEL, KernelInfo, KernelRequest};
use perfmon_abi::wire::pause::{PAUSE, PauseInfo, PauseRequest};
use perfmon_abi::wire::pcr::{PCR, PcrInfo, PcrRequest};
use perfmon_abi::wire::programs::{PROGRAMS, ProgramsInfo, ProgramsRequest};
use perfmon_abi::wire::{Bound, Call, Errno, Extension, Hello, MAX_PACKET, NO_CONTEXT, Refusal};
use rustix::net::SocketAddrUnix;
use rustix::net::UCred;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::context::{Buffer, ContextHandle};
use crate::document::document;
use crate::last::LastCounts;
use crate::link::{self, ARGUMENT, Answer, Link, LinkError, Packet, Question};
use crate::messages;

/// The environment variable that names the control socket.
pub const ENVIRONMENT: &str = "UMPIRE_PERFMON";

/// Where a VM of this user that was given no socket serves one, as `NAME.sock`:
/// `umpire` in `XDG_RUNTIME_DIR`, for root without one `/run/umpire`. `None`: nowhere.
#[must_use]
pub fn socket_folder() -> Option<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty());
    let own = runtime.map(|path| PathBuf::from(path).join("umpire"));
    own.or_else(|| {
        rustix::process::geteuid()
            .is_root()
            .then(|| ROOTS_FOLDER.into())
    })
}

/// Where sockets of VMs are looked for: this user's folder, then root's.
#[must_use]
pub fn socket_folders() -> Vec<PathBuf> {
    let own = socket_folder();
    let roots = Some(PathBuf::from(ROOTS_FOLDER)).filter(|roots| own.as_ref() != Some(roots));
    own.into_iter().chain(roots).collect()
}

const ROOTS_FOLDER: &str = "/run/umpire";

/// How long the VMM may take for a reply, unless [`Client::with_timeout`] says
/// otherwise. It answers in microseconds, but for a target that has to leave the
/// guest first.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// A VM's perfmon2 interface. Threads may share it: their commands are done one
/// after the other. A process that inherits it by `fork` gets a connection of
/// its own at its first command. A connection that breaks is replaced once,
/// provided that the command has not been sent.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    timeout: Duration,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    link: Option<Link>,
    /// The process that made the connection.
    pid: u32,
    /// Handles on this connection, by the number of the context's socket.
    handles: HashMap<u64, u32>,
    /// What a VM that has ended has left on the connection before, with its handles.
    last: Option<(OwnedFd, HashMap<u64, u32>)>,
    packet: Box<Packet>,
}

impl Client {
    /// Connects to a control socket.
    ///
    /// # Errors
    /// ENOSYS: there is no such socket, or nobody serves it. EPERM: its mode
    /// does not let this user in. EPROTO: it is no control socket, or one of
    /// another version. EAGAIN: the VM has as many connections as it allows.
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, Refusal> {
        Self::with_timeout(path, TIMEOUT)
    }

    /// Connects, with a limit for each command's reply.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn with_timeout(path: impl AsRef<Path>, timeout: Duration) -> Result<Self, Refusal> {
        let client = Client {
            path: path.as_ref().to_owned(),
            timeout,
            state: Mutex::new(State {
                link: None,
                pid: 0,
                handles: HashMap::new(),
                last: None,
                packet: Box::new([0; MAX_PACKET]),
            }),
        };
        client.hello()?;
        Ok(client)
    }

    /// Who serves.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn hello(&self) -> Result<Hello, Refusal> {
        let question = Question::plain(Extension::Hello.number());
        let mut state = self.state();
        let answer = self.exchange(&mut state, question, &[])?;
        answer.reply.result()?;
        Hello::from_bytes(answer.reply.payload).map_err(malformed)
    }

    /// The process that serves the socket, as this process's own namespaces number it and
    /// its user.
    ///
    /// # Errors
    /// Nobody is connected, or the kernel refuses.
    pub fn server(&self) -> std::io::Result<UCred> {
        let state = self.state();
        let link = state.link.as_ref();
        link.ok_or(std::io::ErrorKind::NotConnected)?.server()
    }

    /// Creates a context. `format` is the UUID of a sampling format, `argument`
    /// what that format wants to know.
    ///
    /// # Errors
    /// 3.1.1: EINVAL, ENOMEM, E2BIG, EPERM; and those of the connection.
    pub fn create(
        &self,
        flags: u32,
        format: Option<[u8; 16]>,
        argument: &[u8],
    ) -> Result<ContextHandle, Refusal> {
        let wanted = CtxArg {
            flags,
            format: format.unwrap_or_default(),
            ..CtxArg::default()
        };
        let mut call = Call::Create(wanted, argument.to_vec());
        let mut state = self.state();
        let answer = self.exchange_call(&mut state, NO_CONTEXT, &mut call)?;
        answer.reply.result()?;
        let [context, buffer] = answer.descriptors;
        let (handle, fd) = (answer.reply.context, context.ok_or_else(no_descriptor)?);
        let Call::Create(made, _) = call else {
            return Err(Errno::EPROTO.into());
        };
        let inode = link::inode(fd.as_fd()).ok_or(Errno::EBADF)?;
        state.handles.insert(inode, handle);
        Ok(ContextHandle {
            fd,
            buffer: buffer_of(buffer, made.buffer_size)?,
            flags,
            inode,
            generation: AtomicU16::new(0),
        })
    }

    /// Makes a descriptor that came from elsewhere (inherited, or passed by
    /// `SCM_RIGHTS`) a context again.
    ///
    /// # Errors
    /// EBADF: it is no context of this VM.
    pub fn adopt(&self, fd: OwnedFd) -> Result<ContextHandle, Refusal> {
        let inode = link::inode(fd.as_fd()).ok_or(Errno::EBADF)?;
        let mut state = self.state();
        let (handle, bound) = self.bind(&mut state, fd.as_fd())?;
        state.handles.insert(inode, handle);
        let buffer = if bound.buffer_size == 0 {
            None
        } else {
            let question = Question {
                context: handle,
                ..Question::plain(Extension::GetBuffer.number())
            };
            let answer = self.exchange(&mut state, question, &[])?;
            answer.reply.result()?;
            let [buffer, _] = answer.descriptors;
            buffer_of(buffer, bound.buffer_size)?
        };
        Ok(ContextHandle {
            fd,
            buffer,
            flags: bound.flags,
            inode,
            generation: AtomicU16::new(bound.generation),
        })
    }

    /// Does a command on a context. Its vectors come back as the command left
    /// them, also when it fails: elements before the bad one are done, the bad
    /// one has a return flag.
    ///
    /// # Errors
    /// Those of the command (3.1), and of the connection: ECONNRESET, ETIMEDOUT
    /// and EPROTO leave open whether it was done.
    pub fn call(&self, context: &ContextHandle, call: &mut Call) -> Result<(), Refusal> {
        let mut state = self.state();
        let done = self.call_served(&mut state, context, call);
        done.or_else(|refusal| state.after_the_end(context, call, refusal))
    }

    fn call_served(
        &self,
        state: &mut State,
        context: &ContextHandle,
        call: &mut Call,
    ) -> Result<(), Refusal> {
        let handle = match state.handles.get(&context.inode) {
            Some(&handle) if self.is_current(state) => handle,
            _ => {
                let (handle, _) = self.bind(state, context.as_fd())?;
                state.handles.insert(context.inode, handle);
                handle
            }
        };
        let answer = self.exchange_call(state, handle, call)?;
        answer.reply.result()?;
        if let Call::Load(_) | Call::TryLoad(_) = call {
            let (_, bound) = self.bind(state, context.as_fd())?;
            context
                .generation
                .store(bound.generation, Ordering::Relaxed);
            messages::drain(context.as_fd(), bound.generation);
        }
        Ok(())
    }

    /// Does a command that is for no context: getinfo of registers, get and set
    /// config.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn ask(&self, call: &mut Call) -> Result<(), Refusal> {
        let mut state = self.state();
        let answer = self.exchange_call(&mut state, NO_CONTEXT, call)?;
        answer.reply.result()
    }

    /// The sampling formats.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn formats(&self) -> Result<Vec<FormatInfo>, Refusal> {
        self.document(Extension::Formats)
    }

    /// What there is and who holds what.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn list(&self) -> Result<MachineInfo, Refusal> {
        self.document(Extension::List)
    }

    /// The PMU as contexts see it.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn model(&self) -> Result<ModelInfo, Refusal> {
        self.document(Extension::Model)
    }

    /// Shows or administers the counter reservations of a vCPU.
    ///
    /// # Errors
    /// EINVAL: the act makes no sense. EPERM: this user may not. ESRCH: there is no
    /// such vCPU, or it has ended. EOPNOTSUPP: the VM has no reservations. And those of
    /// the connection.
    pub fn pcr(&self, request: &PcrRequest) -> Result<PcrInfo, Refusal> {
        self.administer(PCR, request)
    }

    /// Shows or sets how many physical counters the guest of a vCPU may use at a time.
    ///
    /// # Errors
    /// EBUSY: host contexts rely on what the guest would get. EPERM: this user may not.
    /// ESRCH: there is no such vCPU, or it has ended. And those of the connection.
    pub fn budget(&self, request: &BudgetRequest) -> Result<BudgetInfo, Refusal> {
        self.administer(BUDGET, request)
    }

    /// Keeps a vCPU out of its guest, lets it go on, or asks which of both it is.
    ///
    /// # Errors
    /// EPERM: this user may not. ESRCH: there is no such vCPU, or it has ended. And those
    /// of the connection.
    pub fn pause(&self, request: &PauseRequest) -> Result<PauseInfo, Refusal> {
        self.administer(PAUSE, request)
    }

    /// What the guest's kernel is, with its symbols.
    ///
    /// # Errors
    /// ENOENT: none can be found, or it says too little of itself. And those of the
    /// connection.
    pub fn kernel(&self, request: &KernelRequest) -> Result<KernelInfo, Refusal> {
        self.administer(KERNEL, request)
    }

    /// What the numbers of tasks and mappings in samples stand for.
    ///
    /// # Errors
    /// EOPNOTSUPP: this VMM does not look into its guest. And those of the connection.
    pub fn programs(&self, request: &ProgramsRequest) -> Result<ProgramsInfo, Refusal> {
        self.administer(PROGRAMS, request)
    }

    fn administer<Q, A>(&self, command: u16, request: &Q) -> Result<A, Refusal>
    where
        Q: Serialize,
        A: DeserializeOwned,
    {
        let argument = serde_json::to_vec(request)
            .map_err(|error| Refusal::new(Errno::EINVAL, error.to_string()))?;
        let question = Question {
            nargs: 1,
            length: argument.len(),
            ..Question::plain(command)
        };
        let mut state = self.state();
        let answer = self.exchange(&mut state, question, &argument)?;
        answer.reply.result()?;
        let [file, _] = answer.descriptors;
        document(answer.reply.payload, file)
    }

    fn document<T: DeserializeOwned>(&self, extension: Extension) -> Result<T, Refusal> {
        let mut state = self.state();
        let answer = self.exchange(&mut state, Question::plain(extension.number()), &[])?;
        answer.reply.result()?;
        let [file, _] = answer.descriptors;
        document(answer.reply.payload, file)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the connection, and with it the handles, are this process's own.
    fn is_current(&self, state: &State) -> bool {
        state.pid == std::process::id() && state.link.as_ref().is_some_and(Link::is_usable)
    }

    fn bind(&self, state: &mut State, context: BorrowedFd<'_>) -> Result<(u32, Bound), Refusal> {
        let question = Question {
            descriptor: Some(context),
            ..Question::plain(Extension::Bind.number())
        };
        let answer = self.exchange(state, question, &[])?;
        answer.reply.result()?;
        let bound = Bound::from_bytes(answer.reply.payload).map_err(malformed)?;
        Ok((answer.reply.context, bound))
    }

    fn exchange_call<'s>(
        &self,
        state: &'s mut State,
        context: u32,
        call: &mut Call,
    ) -> Result<Answer<'s>, Refusal> {
        let argument = call.encode();
        let question = Question {
            context,
            nargs: call.nargs(),
            length: argument.len(),
            ..Question::plain(call.command())
        };
        let answer = self.exchange(state, question, &argument)?;
        call.take_reply(answer.reply.payload).map_err(malformed)?;
        Ok(answer)
    }

    fn exchange<'s>(
        &self,
        state: &'s mut State,
        question: Question<'_>,
        argument: &[u8],
    ) -> Result<Answer<'s>, Refusal> {
        let place = ARGUMENT..ARGUMENT + argument.len();
        if place.end > MAX_PACKET {
            return Err(Refusal::new(
                Errno::EFAULT,
                "the argument is larger than a packet can be",
            ));
        }
        if !self.is_current(state) {
            if question.context != NO_CONTEXT {
                // On another connection the handle could be another context's.
                return Err(LinkError::Closed.into());
            }
            self.reconnect(state)?;
        }
        state.packet[place].copy_from_slice(argument);
        let State { link, packet, .. } = state;
        let link = link.as_mut().ok_or(LinkError::Closed)?;
        Ok(link.exchange(question, packet)?)
    }

    fn reconnect(&self, state: &mut State) -> Result<(), Refusal> {
        state.end_link();
        let failed = |error| {
            let Refusal { errno, reason, .. } = LinkError::Connect(error).into();
            Refusal::new(errno, format!("{}: {reason}", self.path.display()))
        };
        let address = SocketAddrUnix::new(&self.path).map_err(failed)?;
        let link = Link::connect(&address, self.timeout).map_err(|error| match error {
            LinkError::Connect(error) => failed(error),
            other => other.into(),
        })?;
        state.link = Some(link);
        state.pid = std::process::id();
        Ok(())
    }
}

impl State {
    /// The connection is of no use any more; what the VM has left there is.
    fn end_link(&mut self) {
        let handles = std::mem::take(&mut self.handles);
        let own = self.pid == std::process::id();
        if let Some(file) = self.link.take().filter(|_| own).and_then(Link::last_words) {
            self.last = Some((file, handles));
        }
    }

    /// Answers a command that `refusal` says nobody does, from what the context's VM has
    /// left as it ended.
    fn after_the_end(
        &mut self,
        context: &ContextHandle,
        call: &mut Call,
        refusal: Refusal,
    ) -> Result<(), Refusal> {
        if !is_of_the_end(refusal.errno) {
            return Err(refusal);
        }
        if !self.link.as_ref().is_some_and(Link::is_usable) {
            self.end_link();
        }
        let left = self
            .last
            .as_ref()
            .and_then(|(file, handles)| LastCounts::of(file, *handles.get(&context.inode)?));
        let Some(left) = left else {
            return Err(refusal);
        };
        let mut vector = call.encode();
        let done = left.answer(call.command(), &mut vector);
        if matches!(call, Call::ReadPmds(_) | Call::GetinfoEvtsets(_)) {
            call.take_reply(&vector).map_err(malformed)?;
        }
        done
    }
}

/// Whether this is what becomes of commands whose VM has ended: nobody serves, another VM
/// does, or the connection broke.
#[must_use]
pub fn is_of_the_end(errno: Errno) -> bool {
    matches!(errno, Errno::ENOSYS | Errno::EBADF | Errno::ECONNRESET)
}

fn malformed(error: perfmon_abi::BadLength) -> Refusal {
    Refusal::new(Errno::EPROTO, format!("the reply is malformed: {error}"))
}

fn no_descriptor() -> Refusal {
    Refusal::new(Errno::EPROTO, "no descriptor came with the reply")
}

fn buffer_of(file: Option<OwnedFd>, size: u64) -> Result<Option<Buffer>, Refusal> {
    if size == 0 {
        return Ok(None);
    }
    let size = usize::try_from(size).map_err(|_| Errno::EOVERFLOW)?;
    let fd = file.ok_or_else(no_descriptor)?;
    Ok(Some(Buffer { fd, size }))
}
