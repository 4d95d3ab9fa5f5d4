//! Threads of user 65534 that do their worst to a server, until they are stopped. They get the
//! processor only when nobody else wants it, and pause: what is measured beside them is how long
//! the server makes others wait, not how many processors there are.

use std::collections::VecDeque;
use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, sendmsg, socket_with, sockopt,
};
use rustix::process::setpriority_process;
use rustix::thread::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

/// Who attacks.
pub(crate) const NOBODY: u32 = 65534;
/// So long the kernel waits when it closes such a descriptor.
pub(crate) const LINGERS: Duration = Duration::from_secs(6);
/// Most descriptors of a message (SCM_MAX_FD).
const MOST: usize = 253;
/// Most sockets that an attacker has linger, or has open.
const MOST_OPEN: usize = 40;

/// Where they attack.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) path: PathBuf,
    pub(crate) kind: SocketType,
    /// Messages of each kind that the server takes, and some that it does not.
    pub(crate) messages: Vec<Vec<u8>>,
}

/// What an attacker does, again and again. Whether it could.
type Attack = fn(&Target, &mut Stock, u64) -> bool;

/// What an attacker keeps.
#[derive(Debug)]
pub(crate) struct Stock {
    listener: TcpListener,
    /// The peers of sockets that linger: nobody reads what was sent to them.
    peers: VecDeque<TcpStream>,
    open: VecDeque<OwnedFd>,
}

/// Attackers, who are stopped with this.
#[derive(Debug)]
pub(crate) struct Attackers {
    stop: Arc<AtomicBool>,
    threads: Vec<(&'static str, Arc<AtomicU64>, JoinHandle<()>)>,
}

impl Attackers {
    pub(crate) fn start(targets: &[Target]) -> Self {
        let attacks: [(&'static str, Attack); 5] = [
            ("descriptors", descriptors),
            ("descriptors that are not read", unread_descriptors),
            ("messages whose answers nobody reads", slow_reader),
            ("floods", flood),
            ("connections", connections),
        ];
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        for target in targets {
            for (name, attack) in attacks {
                let done = Arc::new(AtomicU64::new(0));
                let (target, stop, count) = (target.clone(), stop.clone(), done.clone());
                let body = move || attacker(&target, attack, &stop, &count);
                threads.push((name, done, std::thread::spawn(body)));
            }
        }
        Attackers { stop, threads }
    }

    /// Ends them, and does `beat` until they have ended. Each has attacked.
    pub(crate) fn end(self, beat: &mut dyn FnMut()) {
        self.stop.store(true, Ordering::Relaxed);
        for (name, done, thread) in self.threads {
            while !thread.is_finished() {
                beat();
                std::thread::sleep(Duration::from_millis(10));
            }
            thread.join().expect("an attacker");
            let done = done.load(Ordering::Relaxed);
            println!("{name}: {done}");
            assert!(done > 0, "nobody has attacked with {name}");
        }
    }
}

fn attacker(target: &Target, attack: Attack, stop: &AtomicBool, done: &AtomicU64) {
    setpriority_process(None, 19).expect("a lower priority");
    // Of this thread alone.
    let (user, group) = (Uid::from_raw(NOBODY), Gid::from_raw(NOBODY));
    set_thread_groups(&[]).expect("root");
    set_thread_res_gid(group, group, group).expect("root");
    set_thread_res_uid(user, user, user).expect("root");
    let mut stock = Stock::new();
    for turn in 0.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        if attack(target, &mut stock, turn) {
            done.fetch_add(1, Ordering::Relaxed);
        }
        while stock.peers.len() > MOST_OPEN {
            stock.peers.pop_front();
        }
        while stock.open.len() > MOST_OPEN {
            stock.open.pop_front();
        }
    }
}

fn dial(target: &Target) -> Option<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, target.kind, flags, None).ok()?;
    connect(&socket, &SocketAddrUnix::new(&target.path).ok()?).ok()?;
    Some(socket)
}

fn send(socket: &OwnedFd, bytes: &[u8], file: Option<(&OwnedFd, usize)>) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files: Vec<_> = file
        .into_iter()
        .flat_map(|(file, count)| std::iter::repeat_n(file.as_fd(), count))
        .collect();
    if !files.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&files));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags);
    if let (Err(error), Some((file, _))) = (&sent, file) {
        // It is still this thread's, which does not wait for it.
        let _ = sockopt::set_socket_linger(file, None);
        // The kernel refuses the descriptors: so they do not come.
        return *error == rustix::io::Errno::PERM && send(socket, bytes, None);
    }
    sent.is_ok()
}

impl Stock {
    pub(crate) fn new() -> Self {
        Stock {
            listener: TcpListener::bind("127.0.0.1:0").expect("a port"),
            peers: VecDeque::new(),
            open: VecDeque::new(),
        }
    }

    /// A socket that takes long to be closed, for its peer reads nothing.
    fn lingering(&mut self) -> Option<OwnedFd> {
        let mut one = TcpStream::connect(self.listener.local_addr().ok()?).ok()?;
        let (other, _) = self.listener.accept().ok()?;
        let _ = sockopt::set_socket_recv_buffer_size(&other, 4096);
        let _ = sockopt::set_socket_send_buffer_size(&one, 4096);
        one.set_nonblocking(true).ok()?;
        while one.write_all(&[0; 1 << 16]).is_ok() {}
        sockopt::set_socket_linger(&one, Some(LINGERS)).ok()?;
        self.peers.push_back(other);
        Some(one.into())
    }
}

/// One or as many descriptors as there may be, with messages of each kind and with a part of one.
pub(crate) fn descriptors(target: &Target, stock: &mut Stock, turn: u64) -> bool {
    std::thread::sleep(Duration::from_millis(20));
    let Some(file) = stock.lingering() else {
        return false;
    };
    let Some(socket) = dial(target) else {
        let _ = sockopt::set_socket_linger(&file, None);
        return false;
    };
    let at = usize::try_from(turn).expect("few turns") % (2 * target.messages.len());
    let message = &target.messages[at / 2];
    let part = if at.is_multiple_of(2) {
        message.len()
    } else {
        1
    };
    let count = if turn.is_multiple_of(3) { 1 } else { MOST };
    let sent = send(&socket, &message[..part], Some((&file, count)));
    // Whoever receives it has the last ones.
    drop(file);
    stock.open.push_back(socket);
    sent
}

/// The same behind calls that take long, or on a connection that is closed at once.
fn unread_descriptors(target: &Target, stock: &mut Stock, turn: u64) -> bool {
    std::thread::sleep(Duration::from_millis(20));
    let Some(file) = stock.lingering() else {
        return false;
    };
    let Some(socket) = dial(target) else {
        let _ = sockopt::set_socket_linger(&file, None);
        return false;
    };
    for message in target.messages.iter().rev().take(10) {
        send(&socket, message, None);
    }
    let sent = send(&socket, b"x", Some((&file, MOST)));
    drop(file);
    if turn.is_multiple_of(2) {
        std::thread::sleep(Duration::from_millis(60));
    }
    drop(socket);
    sent
}

/// Messages, and nobody who reads what is said to them.
fn slow_reader(target: &Target, stock: &mut Stock, turn: u64) -> bool {
    let Some(socket) = dial(target) else {
        std::thread::sleep(Duration::from_millis(5));
        return false;
    };
    let at = usize::try_from(turn).expect("few turns") % target.messages.len();
    let sent = (0..200).filter(|_| send(&socket, &target.messages[at], None));
    let sent = sent.count() > 0;
    stock.open.push_back(socket);
    std::thread::sleep(Duration::from_millis(20));
    sent
}

/// Messages, parts of some and noise, a thousand times a second.
fn flood(target: &Target, _: &mut Stock, turn: u64) -> bool {
    let Some(socket) = dial(target) else {
        std::thread::sleep(Duration::from_millis(1));
        return false;
    };
    std::thread::sleep(Duration::from_millis(1));
    let noise = [0xff; 4096];
    let sent = target.messages.iter().filter(|message| {
        send(&socket, message, None) && send(&socket, &message[..message.len() / 2], None)
    });
    let sent = sent.count() > 0;
    if turn.is_multiple_of(2) {
        send(&socket, &noise, None);
    }
    sent
}

/// Many connections: they come, stay for a while, and go.
fn connections(target: &Target, _: &mut Stock, _: u64) -> bool {
    let all: Vec<OwnedFd> = (0..100).filter_map(|_| dial(target)).collect();
    std::thread::sleep(Duration::from_millis(50));
    !all.is_empty()
}

/// Anybody may come to what is in this folder.
pub(crate) fn open_folder(folder: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let all = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(folder, all).expect("a folder");
}
