//! What a context's socket does by itself, without the library: the column "raw
//! socket" of the page on the wire. And what its buffer's memory file allows.

use std::os::fd::AsFd;

use anyhow::{Context, Result, ensure};
use guest_tests::micro::{Lab, Test};
use perfmon_abi::consts::{
    DEFAULT_FORMAT, PFM_FL_OVFL_NO_MSG, PFM_LOAD_CONTEXT, PFM_REGFL_OVFL_NOTIFY,
};
use perfmon_abi::wire::{Extension, Request};
use perfmon_abi::{DefaultArg, LoadArg, Message, PmcArg, PmdArg, Record};
use rustix::fs::{OFlags, SealFlags, fcntl_get_seals, ftruncate};
use umpire_perfmon::{Call, Client, ContextHandle};

use crate::bed::{CYCLES, eventually, load, pmc, pmd};
use crate::c_programs::{CLOCK, contexts, on};
use crate::raw::{Raw, request};

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "c_raw::what_the_socket_does",
        run: raw_socket,
    },
    Test {
        name: "c_raw::the_buffer_is_sealed",
        run: sealed,
    },
];

fn raw_socket(lab: &Lab) -> Result<()> {
    use rustix::io::{Errno, fcntl_dupfd_cloexec, read, write};
    on(lab, CLOCK, |bed, client, _| {
        let context = overflowing(client, 0)?;
        let fd = fcntl_dupfd_cloexec(&context.fd, 0)?;
        rustix::fs::fcntl_setfl(&fd, rustix::fs::OFlags::NONBLOCK)?;
        let mut bytes = [0; 100];
        let ready = || readable(&context);
        load(client, &context, 0)?;
        client.call(&context, &mut Call::Start(None))?;
        ready()?;
        ensure!(read(&fd, &mut bytes[..10]) == Ok(10), "a cut message");
        ensure!(
            read(&fd, &mut bytes) == Err(Errno::AGAIN),
            "the rest is lost"
        );
        client.call(&context, &mut Call::Restart)?;
        ready()?;
        // One that nobody has read stays over a load, and says of what time it is.
        client.call(&context, &mut Call::Unload)?;
        client.call(&context, &mut Call::WritePmds(vec![every()]))?;
        // The client would take it away.
        let raw = Raw::connect(&bed.socket())?;
        let bind = request(Extension::Bind.number(), 0);
        let payload = LoadArg { pid: 0, set: 0 }.to_bytes();
        let again = Request {
            context: raw.ask(&bind, &[context.as_fd()])?.context,
            payload: &payload,
            ..request(PFM_LOAD_CONTEXT, 1)
        };
        let told = raw.ask(&again, &[])?;
        ensure!(told.errno == 0, "{told:?}");
        ensure!(
            read(&fd, &mut bytes) == Ok(Message::SIZE),
            "a stale message"
        );
        let stale = Message::from_bytes(&bytes[..Message::SIZE])?;
        ensure!(stale.generation == 1, "{stale:?}");
        let written = write(&fd, &[7; 24]);
        ensure!(written == Err(Errno::PIPE), "{written:?}");
        let seek = rustix::fs::seek(&fd, rustix::fs::SeekFrom::Start(0));
        ensure!(seek == Err(Errno::SPIPE), "{seek:?}");
        ensure!(
            std::fs::File::from(fd.try_clone()?).set_len(0).is_err(),
            "it can be cut"
        );
        client.call(&context, &mut Call::Start(None))?;
        ready()?;
        ensure!(read(&fd, &mut bytes) == Ok(Message::SIZE), "a message");
        let fresh = Message::from_bytes(&bytes[..Message::SIZE])?;
        ensure!(fresh.generation == 2, "{fresh:?}");
        client.call(&context, &mut Call::Unload)?;

        let first = context;
        let context = overflowing(client, PFM_FL_OVFL_NO_MSG)?;
        load(client, &context, 0)?;
        client.call(&context, &mut Call::Start(None))?;
        readable(&context)?;
        ensure!(read(&context.fd, &mut bytes) == Ok(0), "an empty record");
        ensure!(contexts(client)? == 2, "two contexts");
        rustix::net::shutdown(&context.fd, rustix::net::Shutdown::Both)?;
        eventually("a context that is shut down ends", || {
            Ok(contexts(client)? == 1)
        })?;
        let gone = client.call(&context, &mut Call::Stop);
        let gone = gone.map_err(|error| error.errno);
        ensure!(gone == Err(umpire_perfmon::Errno::EBADF), "{gone:?}");
        drop(first);
        Ok(())
    })
}

/// A context whose counter notifies.
fn overflowing(client: &Client, flags: u32) -> Result<ContextHandle> {
    let context = client.create(flags, None, &[])?;
    let notify = PmcArg {
        flags: PFM_REGFL_OVFL_NOTIFY,
        ..pmc(0, CYCLES)
    };
    client.call(&context, &mut Call::WritePmcs(vec![notify]))?;
    client.call(&context, &mut Call::WritePmds(vec![every()]))?;
    Ok(context)
}

/// PMD 0 overflows after each period.
fn every() -> PmdArg {
    let from = CLOCK.period.wrapping_neg();
    PmdArg {
        long_reset: from,
        short_reset: from,
        ..pmd(0, from)
    }
}

/// Waits until there is something to be read.
fn readable(context: &ContextHandle) -> Result<()> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut polled = [PollFd::new(&context.fd, PollFlags::IN)];
    let most = Timespec::try_from(crate::bed::PATIENCE)?;
    ensure!(poll(&mut polled, Some(&most))? == 1, "no message");
    Ok(())
}

fn sealed(lab: &Lab) -> Result<()> {
    on(lab, CLOCK, |_, client, _| {
        let arg = DefaultArg {
            buf_size: 8192,
            buf_flags: 0,
        };
        let context = client.create(0, Some(DEFAULT_FORMAT), &arg.to_bytes())?;
        let buffer = context.buffer.as_ref().context("a buffer")?;
        // The VMM itself cuts it at the context's end.
        let wanted = SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        // Kernels from 6.3 on do not execute it.
        let seals = fcntl_get_seals(&buffer.fd)?;
        ensure!(seals.difference(SealFlags::EXEC) == wanted, "{seals:?}");
        let flags = rustix::fs::fcntl_getfl(&buffer.fd)?;
        let access = flags.intersection(OFlags::RWMODE);
        ensure!(access == OFlags::RDONLY, "{flags:?}");
        let stat = rustix::fs::fstat(&buffer.fd)?;
        ensure!(stat.st_mode & 0o777 == 0o400, "mode {:o}", stat.st_mode);
        ensure!(stat.st_blocks * 512 == 8192, "{} blocks", stat.st_blocks);
        for size in [0, 4096, 1 << 20] {
            ensure!(
                ftruncate(&buffer.fd, size).is_err(),
                "it can have {size} bytes"
            );
        }
        ensure!(
            rustix::io::pwrite(&buffer.fd, &[1], 0).is_err(),
            "it can be written"
        );
        // Opened anew by its name in /proc, it is the same memory.
        use std::os::fd::AsRawFd;
        let path = format!("/proc/self/fd/{}", buffer.fd.as_raw_fd());
        let again = std::fs::OpenOptions::new()
            .write(true)
            .read(true)
            .open(path);
        if let Ok(again) = again {
            ensure!(
                rustix::io::pwrite(&again, &[1], 0).is_err(),
                "it can be written"
            );
            ensure!(ftruncate(&again, 0).is_err(), "it can be cut");
        }
        let mapping = context.map_buffer()?;
        ensure!(mapping.size() >= 8192, "{} bytes", mapping.size());
        // Who keeps the file, and the context no more, keeps no memory.
        let kept = buffer.fd.try_clone()?;
        drop((mapping, context));
        let began = std::time::Instant::now();
        while rustix::fs::fstat(&kept)?.st_size > 0 {
            ensure!(began.elapsed() < crate::bed::PATIENCE, "it is not cut");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        Ok(())
    })
}
