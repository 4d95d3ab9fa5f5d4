//! Clients that break the rules.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::micro::{Lab, Test};
use perfmon_abi::consts::{PFM_GET_CONFIG, PFM_LOAD_CONTEXT, PFM_READ_PMDS, PFM_STOP};
use perfmon_abi::wire::pcr::PCR;
use perfmon_abi::wire::{Errno, Extension, MAX_PACKET, Request};
use perfmon_abi::{LoadArg, Record};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use umpire_perfmon::Client;

use crate::bed::{Bed, CYCLES, clock, counter, eventually, guest, load};
use crate::raw::{Raw, request};

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "bad_input::malformed_packets",
        run: |lab| beside(lab, malformed),
    },
    Test {
        name: "bad_input::descriptors",
        run: |lab| beside(lab, descriptors),
    },
    Test {
        name: "bad_input::commands",
        run: |lab| beside(lab, commands),
    },
    Test {
        name: "bad_input::abandoned_and_interleaved",
        run: |lab| beside(lab, abandoned),
    },
    Test {
        name: "bad_input::a_client_that_never_reads",
        run: |lab| beside(lab, never_reads),
    },
    Test {
        name: "bad_input::two_thousand_connections",
        run: |lab| beside(lab, flood),
    },
    Test {
        name: "bad_input::no_descriptor_left",
        run: |lab| beside(lab, no_descriptor),
    },
];

/// Runs `tool` beside a guest; a well-behaved client is served all the time, and
/// no descriptor is left over.
fn beside(lab: &Lab, tool: fn(&Path, &Client) -> Result<()>) -> Result<()> {
    let bed = Bed::new(clock)?;
    bed.run(lab, &guest(|_| Ok(()))?, |client, gates| {
        // The server is there before the vCPU and its descriptors are.
        gates.reached(1)?;
        client.hello()?;
        let before = descriptors_open()?;
        tool(&bed.socket(), client)?;
        client.hello()?;
        eventually("descriptors are given back", || {
            Ok(descriptors_open()? <= before)
        })
    })?;
    Ok(())
}

fn descriptors_open() -> Result<usize> {
    Ok(fs::read_dir("/proc/self/fd")?.count())
}

fn errno(told: &crate::raw::Told) -> Option<Errno> {
    Errno::from_number(told.errno)
}

fn malformed(socket: &Path, _: &Client) -> Result<()> {
    let good = request(Extension::Hello.number(), 0).encode()?;
    let changed = |at: usize, byte: u8| {
        let mut packet = good.clone();
        packet[at] = byte;
        packet
    };
    let packets = [
        b"x".to_vec(),
        good[..good.len() - 1].to_vec(),
        changed(0, 0),
        changed(4, 99),
        changed(20, 1),
        [good.clone(), vec![0]].concat(),
        vec![0; MAX_PACKET + 1],
        vec![0xff; MAX_PACKET],
    ];
    for packet in packets {
        let raw = Raw::connect(socket)?;
        raw.send(&packet, &[])?;
        let told = raw.receive()?.context("an answer")?;
        let length = packet.len();
        ensure!(
            errno(&told) == Some(Errno::EPROTO),
            "{length} bytes: {told:?}"
        );
        ensure!(!told.reason.is_empty(), "{length} bytes: {told:?}");
        ensure!(raw.receive()?.is_none(), "{length} bytes: it stays open");
    }
    Ok(())
}

fn descriptors(socket: &Path, _: &Client) -> Result<()> {
    let raw = Raw::connect(socket)?;
    let file = fs::File::open("/dev/null")?;
    let fd = file.as_fd();
    let hello = request(Extension::Hello.number(), 0);
    let bind = request(Extension::Bind.number(), 0);
    let check = |request: &Request<'_>, count: usize, expected| -> Result<()> {
        let told = raw.ask(request, &vec![fd; count])?;
        ensure!(errno(&told) == expected, "{count}: {told:?}");
        Ok(())
    };
    for _ in 0..50 {
        check(&hello, 1, Some(Errno::EINVAL))?;
        check(&hello, 8, Some(Errno::EINVAL))?;
        check(&bind, 0, Some(Errno::EBADF))?;
        check(&bind, 1, Some(Errno::EBADF))?;
        check(&bind, 2, Some(Errno::EBADF))?;
        check(&bind, 8, Some(Errno::EBADF))?;
        check(&hello, 0, None)?;
    }
    Ok(())
}

fn commands(socket: &Path, _: &Client) -> Result<()> {
    let raw = Raw::connect(socket)?;
    let check = |request: &Request<'_>, expected| -> Result<()> {
        let told = raw.ask(request, &[])?;
        ensure!(errno(&told) == Some(expected), "{request:?}: {told:?}");
        Ok(())
    };
    check(&request(0, 0), Errno::EINVAL)?;
    check(&request(99, 0), Errno::EINVAL)?;
    check(&request(0x1ff, 0), Errno::EINVAL)?;
    check(&request(Extension::Hello.number(), 1), Errno::EINVAL)?;
    check(&request(PCR, 0), Errno::EINVAL)?;
    for (argument, errno) in [
        ("{", Errno::EINVAL),
        (r#"{"vcpu":0,"act":"destroy"}"#, Errno::EINVAL),
        (
            r#"{"vcpu":0,"act":{"bar":{"layer":"user"}}}"#,
            Errno::EINVAL,
        ),
        (
            r#"{"vcpu":0,"act":{"scheme":{"scheme":""}}}"#,
            Errno::EINVAL,
        ),
        (r#"{"vcpu":99,"act":"show"}"#, Errno::ESRCH),
    ] {
        let request = Request {
            nargs: 1,
            payload: argument.as_bytes(),
            ..request(PCR, 0)
        };
        check(&request, errno)?;
    }
    check(&request(PFM_STOP, 0), Errno::EBADF)?;
    let unknown = Request {
        context: 12,
        ..request(PFM_STOP, 0)
    };
    check(&unknown, Errno::EBADF)?;
    check(&request(Extension::GetBuffer.number(), 0), Errno::EBADF)?;
    check(&request(Extension::Unbind.number(), 0), Errno::EBADF)?;
    check(&request(PFM_GET_CONFIG, 2), Errno::EFAULT)?;
    check(&request(PFM_READ_PMDS, 0), Errno::EFAULT)?;
    check(&request(PFM_READ_PMDS, -1), Errno::EFAULT)?;
    check(&request(PFM_READ_PMDS, 1), Errno::EFAULT)?;
    check(&request(PFM_READ_PMDS, 1 << 20), Errno::EFAULT)
}

/// Connections that end at any time, and commands that are not waited for.
fn abandoned(socket: &Path, client: &Client) -> Result<()> {
    let context = counter(client, 0, CYCLES)?;
    let bind = request(Extension::Bind.number(), 0);
    let arg = LoadArg { pid: 0, set: 0 }.to_bytes();
    for _ in 0..20 {
        drop(Raw::connect(socket)?);
        let raw = Raw::connect(socket)?;
        let handle = raw.ask(&bind, &[context.as_fd()])?.context;
        let load = Request {
            context: handle,
            nargs: 1,
            payload: &arg,
            ..request(PFM_LOAD_CONTEXT, 1)
        };
        let unload = Request {
            context: handle,
            ..request(perfmon_abi::consts::PFM_UNLOAD_CONTEXT, 0)
        };
        // All at once; answers come in their order.
        for request in [&load, &load, &unload, &unload] {
            raw.send(&request.encode()?, &[])?;
        }
        for expected in [None, Some(Errno::EBUSY), None, Some(Errno::EBUSY)] {
            let told = raw.receive()?.context("an answer")?;
            ensure!(errno(&told) == expected, "{told:?}");
        }
        // And one whose answer nobody waits for.
        raw.send(&load.encode()?, &[])?;
        drop(raw);
        let raw = Raw::connect(socket)?;
        let handle = raw.ask(&bind, &[context.as_fd()])?.context;
        let unload = Request {
            context: handle,
            ..unload
        };
        let told = raw.ask(&unload, &[])?;
        ensure!(told.errno == 0, "{told:?}");
    }
    load(client, &context, 0)?;
    drop(context);
    eventually("the context is gone", || {
        Ok(client.list()?.contexts.is_empty())
    })
}

fn never_reads(socket: &Path, client: &Client) -> Result<()> {
    let before = resident()?;
    let raw = Raw::connect(socket)?;
    let hello = request(Extension::Model.number(), 0).encode()?;
    let mut sent = 0_u32;
    while raw.send(&hello, &[]).is_ok() {
        sent += 1;
        ensure!(sent < 100_000, "a client that never reads is still served");
    }
    client.hello()?;
    let grown = resident()?.saturating_sub(before);
    println!("  {sent} requests were taken, {} KiB more", grown >> 10);
    ensure!(grown < 16 << 20, "{grown} bytes more");
    Ok(())
}

fn flood(socket: &Path, client: &Client) -> Result<()> {
    const CONNECTIONS: usize = 2000;
    let before = resident()?;
    let mut open = Vec::new();
    let mut refused = 0;
    for _ in 0..CONNECTIONS {
        let raw = Raw::connect(socket)?;
        let hello = request(Extension::Hello.number(), 0).encode()?;
        // One that was refused may be closed already.
        let _ = raw.send(&hello, &[]);
        match raw.receive()? {
            Some(told) if told.errno == 0 => open.push(raw),
            Some(told) => {
                ensure!(errno(&told) == Some(Errno::EAGAIN), "{told:?}");
                ensure!(told.reason.contains("--control-connections"), "{told:?}");
                refused += 1;
            }
            None => anyhow::bail!("a connection was closed without a word"),
        }
    }
    client.hello()?;
    let grown = resident()?.saturating_sub(before);
    let served = open.len();
    println!(
        "  {served} served, {refused} refused, {} KiB more",
        grown >> 10
    );
    // This client is one of the 64.
    ensure!(served == 63 && refused == CONNECTIONS - 63);
    ensure!(grown < 16 << 20, "{grown} bytes more");
    Ok(())
}

/// Without a descriptor for it, a connection waits, and the server does not spin.
fn no_descriptor(socket: &Path, client: &Client) -> Result<()> {
    let server = Server::find()?;
    let kind = SocketType::SEQPACKET;
    let waiting = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    let before = getrlimit(Resource::Nofile);
    let none = Rlimit {
        // As many as `poll` is asked about at once.
        current: Some(3),
        ..before
    };
    setrlimit(Resource::Nofile, none)?;
    let ran = connect(&waiting, &SocketAddrUnix::new(socket)?)
        .map_err(anyhow::Error::from)
        .and_then(|()| {
            let began = server.ran()?;
            std::thread::sleep(Duration::from_millis(500));
            // Those that it has are served.
            client.hello()?;
            Ok(server.ran()? - began)
        });
    setrlimit(Resource::Nofile, before)?;
    let ran = ran?;
    ensure!(ran < Duration::from_millis(100), "it ran for {ran:?}");
    let raw = Raw::from(waiting);
    let told = raw.ask(&request(Extension::Hello.number(), 0), &[])?;
    ensure!(told.errno == 0, "{told:?}");
    Ok(())
}

/// The server's thread.
struct Server(fs::File);

impl Server {
    fn find() -> Result<Self> {
        for task in fs::read_dir("/proc/self/task")? {
            let task = task?.path();
            if fs::read_to_string(task.join("comm"))?.trim() == "control" {
                return Ok(Self(fs::File::open(task.join("schedstat"))?));
            }
        }
        anyhow::bail!("no thread is the server's")
    }

    /// CPU time that it has had.
    fn ran(&self) -> Result<Duration> {
        let mut text = [0; 128];
        let read = self.0.read_at(&mut text, 0)?;
        let text = str::from_utf8(&text[..read])?;
        let word = text.split_whitespace().next().context("a time")?;
        Ok(Duration::from_nanos(word.parse()?))
    }
}

/// Bytes of this process in memory.
fn resident() -> Result<u64> {
    let statm = fs::read_to_string("/proc/self/statm")?;
    let pages = statm.split(' ').nth(1).context("resident pages")?;
    Ok(pages.parse::<u64>()? * 4096)
}
