//! A client that does its worst, in a process of its own: `umpire bench perfmon`
//! starts it, tells it by its standard input what to do, and hears on its
//! standard output that it does.

use std::io::{BufRead, Write, stdin, stdout};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use perfmon_abi::wire::{Extension, MAX_PACKET, NO_CONTEXT, Request};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};

use crate::error::BenchError;

/// It computes, and lets the server be.
pub(super) const QUIET: &str = "quiet";
/// It floods the server.
pub(super) const HOSTILE: &str = "hostile";
/// Connections that it keeps open, so that no more are served.
const KEPT: usize = 64;
/// Connections between two looks at what to do.
const BURST: u32 = 32;

const ENDED: u8 = 0;
const COMPUTES: u8 = 1;
const FLOODS: u8 = 2;

/// Does as its input says until it ends. Each answer is a line: what it does
/// from now on, and how many connections, packets and failures to connect there
/// were so far.
pub(crate) fn run(socket: &Path) -> Result<(), BenchError> {
    let address = SocketAddrUnix::new(socket).map_err(|error| BenchError::Client(error.into()))?;
    let wanted = Arc::new(AtomicU8::new(COMPUTES));
    let asked = wanted.clone();
    std::thread::spawn(move || {
        for line in stdin().lock().lines().map_while(Result::ok) {
            match line.as_str() {
                QUIET => asked.store(COMPUTES, Ordering::Release),
                HOSTILE => asked.store(FLOODS, Ordering::Release),
                _ => break,
            }
        }
        asked.store(ENDED, Ordering::Release);
    });
    let mut storm = Storm::new(address);
    let mut does = ENDED;
    loop {
        let now = wanted.load(Ordering::Acquire);
        if now != does {
            if now == ENDED {
                return Ok(());
            }
            storm.kept.clear();
            does = now;
            let mut out = stdout().lock();
            let Storm {
                connections,
                packets,
                refused,
                ..
            } = storm;
            writeln!(out, "{now} {connections} {packets} {refused}")
                .and_then(|()| out.flush())
                .map_err(BenchError::Client)?;
        }
        match now {
            FLOODS => storm.burst(),
            _ => compute(),
        }
    }
}

/// Keeps the host CPU busy without a system call.
fn compute() {
    let mut word = 1_u64;
    for n in 0..100_000 {
        word = std::hint::black_box(word.rotate_left(7) ^ n);
    }
}

struct Storm {
    address: SocketAddrUnix,
    kept: Vec<OwnedFd>,
    packet: Vec<u8>,
    connections: u64,
    packets: u64,
    refused: u64,
    /// Which malformed packet is next.
    next: usize,
}

impl Storm {
    fn new(address: SocketAddrUnix) -> Self {
        Self {
            address,
            kept: Vec::new(),
            packet: vec![0xa5; MAX_PACKET + 64],
            connections: 0,
            packets: 0,
            refused: 0,
            next: 0,
        }
    }

    /// Connections and packets.
    fn burst(&mut self) {
        for _ in 0..BURST {
            let Some(socket) = self.connect() else {
                continue;
            };
            self.malformed(&socket);
            if self.kept.len() < KEPT {
                self.kept.push(socket);
            }
        }
        // Those that the server closed make room for others.
        let mut rest = [0; 64];
        self.kept
            .retain(|socket| !matches!(recv(socket, &mut rest, RecvFlags::DONTWAIT), Ok((0, _))));
    }

    fn connect(&mut self) -> Option<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let made = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).ok()?;
        self.connections += 1;
        match connect(&made, &self.address) {
            Ok(()) => Some(made),
            Err(_) => {
                // The queue of connections is full: the server is behind.
                self.refused += 1;
                None
            }
        }
    }

    /// One packet that makes no sense, or none at all.
    fn malformed(&mut self, socket: &OwnedFd) {
        self.next = (self.next + 1) % 6;
        let hello = Request {
            command: Extension::Hello.number(),
            id: 1,
            context: NO_CONTEXT,
            nargs: 0,
            payload: &[],
        };
        let header = hello.header();
        let mut lies = header;
        // Command, context and count are anything.
        lies[8..].fill(0xff);
        let packet: &[u8] = match self.next {
            0 => return,
            1 => &header[..header.len() / 2],
            2 => &lies,
            3 => &self.packet[..512],
            4 => &self.packet,
            // Never looked at: its answer stays unread.
            _ => &header,
        };
        let sent = send(socket, packet, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        self.packets += u64::from(sent.is_ok());
    }
}
