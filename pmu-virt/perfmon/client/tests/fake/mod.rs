//! A control socket without a VM: enough of one to test clients against.
//!
//! Its vCPUs count as no real one does: a counter that runs has gone on by 1000 at
//! each look. A PMC with PFM_REGFL_OVFL_NOTIFY overflows once at each start and
//! restart.

// Each test program uses a part of it.
#![allow(dead_code, unreachable_pub, unused_imports)]

mod machine;
mod properties;

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use perfmon_abi::consts;
use perfmon_abi::wire::bell::BELL;
use perfmon_abi::wire::{
    Bound, Buffer, Call, Errno, Extension, Hello, MAX_PACKET, MAX_PAYLOAD, Refusal, Request,
    SystemWide,
};
use rustix::fs::{fstat, ftruncate};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept, bind, listen,
    recvmsg, sendmsg, socket_with,
};
use serde_json::json;

pub use machine::{Context, VCPUS};

/// What to do with the next command in place of doing it.
#[derive(Debug)]
pub enum Trick {
    /// None yet: do it.
    Pass,
    /// Refuse it.
    Refuse(Refusal),
    /// Close the connection without a reply.
    HangUp,
    /// Reply with these bytes.
    Bytes(Vec<u8>),
    /// Reply to another request.
    OutOfStep,
    /// Do not reply, and keep the connection.
    Silence,
    /// Refuse the connection itself.
    Full,
}

#[derive(Debug, Default)]
pub struct Shared {
    pub contexts: Vec<Context>,
    pub tricks: VecDeque<Trick>,
    /// Commands that came, with their numbers of elements.
    pub log: Vec<(u16, i32)>,
    pub connections: usize,
    /// Whether documents come in a file.
    pub files: bool,
    /// Whether it knows no BELL, as servers of before.
    pub no_bells: bool,
    /// The host CPUs that cores are kept on.
    pub core_cpus: Vec<u32>,
}

#[derive(Debug)]
pub struct Fake {
    folder: tempfile::TempDir,
    shared: Arc<Mutex<Shared>>,
}

impl Fake {
    pub fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let fake = Fake {
            folder,
            shared: Arc::default(),
        };
        fake.serve();
        fake
    }

    /// Listens (again) on the socket.
    pub fn serve(&self) {
        let _ = std::fs::remove_file(self.path());
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let socket = socket.expect("a socket");
        bind(
            &socket,
            &SocketAddrUnix::new(self.path()).expect("an address"),
        )
        .expect("bound");
        listen(&socket, 64).expect("listening");
        let shared = self.shared.clone();
        thread::spawn(move || {
            while let Ok(connection) = accept(&socket) {
                let shared = shared.clone();
                lock(&shared).connections += 1;
                thread::spawn(move || converse(&connection, &shared));
            }
        });
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("control")
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn shared(&self) -> MutexGuard<'_, Shared> {
        lock(&self.shared)
    }

    pub fn trick(&self, trick: Trick) {
        self.shared().tricks.push_back(trick);
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared
        .lock()
        .expect("no test failed while it held the lock")
}

/// What goes back.
struct Outcome {
    result: Result<(), Refusal>,
    payload: Vec<u8>,
    context: u32,
    descriptors: Vec<OwnedFd>,
}

impl Outcome {
    fn of(result: Result<(), Refusal>) -> Self {
        Outcome {
            result,
            payload: Vec::new(),
            context: 0,
            descriptors: Vec::new(),
        }
    }
}

fn converse(connection: &OwnedFd, shared: &Mutex<Shared>) {
    let mut packet = vec![0; MAX_PACKET];
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut iov = [IoSliceMut::new(&mut packet)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let length = match recvmsg(connection, &mut iov, &mut control, flags) {
            Ok(received) if received.bytes > 0 => received.bytes,
            _ => return,
        };
        let came = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
            _ => None,
        });
        let request = Request::decode(&packet[..length]).expect("a request");
        let mut shared = lock(shared);
        shared.log.push((request.command, request.nargs));
        let is_trick = request.command != Extension::Hello.number();
        let trick = is_trick.then(|| shared.tricks.pop_front()).flatten();
        let mut outcome = Outcome::of(Ok(()));
        match trick {
            None | Some(Trick::Pass) => outcome = answer(&mut shared, request, came),
            Some(Trick::Refuse(refusal)) => outcome.result = Err(refusal),
            Some(Trick::HangUp) => return,
            Some(Trick::Silence) => continue,
            Some(Trick::Bytes(bytes)) => {
                let _ = rustix::net::send(connection, &bytes, SendFlags::NOSIGNAL);
                continue;
            }
            Some(Trick::OutOfStep) => {
                let mut reply = request.reply(&[], None);
                reply.id = reply.id.wrapping_add(1);
                let bytes = reply.encode().expect("a packet");
                let _ = rustix::net::send(connection, &bytes, SendFlags::NOSIGNAL);
                continue;
            }
            Some(Trick::Full) => {
                let refusal = Refusal::new(Errno::EAGAIN, "too many connections");
                let mut reply = request.reply(&[], Some(&refusal));
                (reply.id, reply.command) = (0, 0);
                let bytes = reply.encode().expect("a packet");
                let _ = rustix::net::send(connection, &bytes, SendFlags::NOSIGNAL);
                return;
            }
        }
        drop(shared);
        let mut reply = request.reply(&outcome.payload, outcome.result.as_ref().err());
        if outcome.context != 0 {
            reply.context = outcome.context;
        }
        let bytes = reply.encode().expect("a packet");
        let rights: Vec<_> = outcome.descriptors.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !rights.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&rights));
        }
        let iov = [IoSlice::new(&bytes)];
        let _ = sendmsg(connection, &iov, &mut control, SendFlags::NOSIGNAL);
    }
}

/// A load that begins with this set would wait for the owners of counters.
const ASKING_SET: u16 = 77;

fn answer(shared: &mut Shared, request: Request<'_>, came: Option<OwnedFd>) -> Outcome {
    if request.command == BELL && !shared.no_bells {
        let index = usize::try_from(request.context).expect("an index");
        let context = shared.contexts.get_mut(index.wrapping_sub(1));
        let mut outcome = Outcome::of(Ok(()));
        match context.map(Context::bell) {
            Some(Ok(bell)) => outcome.descriptors = vec![bell],
            Some(Err(refusal)) => outcome.result = Err(refusal),
            None => outcome.result = Err(Errno::EBADF.into()),
        }
        return outcome;
    }
    if request.command >= 0x100 && request.command != consts::PFM_TRY_LOAD {
        let decoded = Extension::decode(request.command, request.nargs, request.payload);
        return match decoded {
            Ok(extension) => extend(shared, extension, request.context, came),
            Err(refusal) => Outcome::of(Err(refusal)),
        };
    }
    let decoded = Call::decode(request.command, request.nargs, request.payload, MAX_PAYLOAD);
    let mut call = match decoded {
        Ok(call) => call,
        Err(refusal) => return Outcome::of(Err(refusal)),
    };
    if let Call::TryLoad(arg) = call {
        if arg.set == ASKING_SET {
            return Outcome::of(Err(Errno::EAGAIN.into()));
        }
        call = Call::Load(arg);
    }
    let mut outcome = Outcome::of(Ok(()));
    if let Call::Create(wanted, argument) = &mut call {
        match Context::create(wanted, argument) {
            Ok((context, descriptors)) => {
                shared.contexts.push(context);
                outcome.context = u32::try_from(shared.contexts.len()).expect("few contexts");
                outcome.descriptors = descriptors;
            }
            Err(refusal) => outcome.result = Err(refusal),
        }
    } else if Call::needs_context(request.command) {
        let index = usize::try_from(request.context)
            .expect("an index")
            .wrapping_sub(1);
        outcome.result = match shared.contexts.get_mut(index) {
            Some(context) => context.command(&mut call),
            None => Err(Errno::EBADF.into()),
        };
    } else {
        outcome.result = properties::ask(&mut call);
    }
    outcome.payload = call.encode_reply();
    outcome
}

fn extend(
    shared: &mut Shared,
    extension: Extension,
    handle: u32,
    came: Option<OwnedFd>,
) -> Outcome {
    let mut outcome = Outcome::of(Ok(()));
    match extension {
        Extension::Hello => {
            let hello = Hello {
                pid: std::process::id(),
                version: consts::PFM_VERSION,
                max_packet: u32::try_from(MAX_PACKET).expect("a small number"),
                vcpus: 3,
                cores: 3,
            };
            outcome.payload = hello.to_bytes();
        }
        Extension::Bind => {
            let inode = came.map(|fd| fstat(fd).expect("a status").st_ino);
            let mut contexts = shared.contexts.iter();
            match contexts.position(|context| Some(context.inode) == inode) {
                Some(index) => {
                    let context = &shared.contexts[index];
                    outcome.context = u32::try_from(index + 1).expect("few contexts");
                    let bound = Bound {
                        flags: context.flags,
                        generation: context.generation,
                        buffer_size: context.buffer_size(),
                    };
                    outcome.payload = bound.to_bytes();
                }
                None => outcome.result = Err(Errno::EBADF.into()),
            }
        }
        Extension::Unbind => {}
        Extension::GetBuffer => {
            let index = usize::try_from(handle).expect("an index").wrapping_sub(1);
            match shared.contexts.get(index).and_then(Context::buffer) {
                Some(buffer) => {
                    outcome.payload = Buffer {
                        size: shared.contexts[index].buffer_size(),
                    }
                    .to_bytes();
                    outcome.descriptors = vec![buffer];
                }
                None => outcome.result = Err(Errno::EINVAL.into()),
            }
        }
        Extension::SystemWide => outcome.payload = SystemWide::default().to_bytes(),
        Extension::Formats => document(shared, &mut outcome, &properties::formats()),
        Extension::Model => document(shared, &mut outcome, &properties::model(&shared.core_cpus)),
        Extension::List => {
            let list = json!({
                "pid": 1, "guest": "none", "counters": "none", "policy": "guest-first",
                "vcpus": [], "cores": [], "contexts": [],
            });
            document(shared, &mut outcome, &list);
        }
    }
    outcome
}

fn document(shared: &Shared, outcome: &mut Outcome, value: &serde_json::Value) {
    let text = value.to_string().into_bytes();
    if shared.files {
        let file = machine::memory_file("document");
        ftruncate(&file, text.len() as u64).expect("a size");
        rustix::io::pwrite(&file, &text, 0).expect("written");
        outcome.descriptors = vec![file];
    } else {
        outcome.payload = text;
    }
}
