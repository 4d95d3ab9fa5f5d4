//! The first program of a guest that runs one program for `umpire count`.
//!
//! Until it says that it is ready, everything is the same for every job: modules, mounts, the
//! files that take output. Behind that it reads the job, runs it, carries its output to the host,
//! and says how it ended.
#![no_std]
#![no_main]
#![deny(unsafe_code)]

mod archive;
mod boot;
mod child;
mod job;
mod pump;
mod run;
#[allow(unsafe_code)]
mod sys;

use boot::Failure;
use count_init::Ending;
use sys::Errno;

/// Entered by [`sys`]; it never comes back, since Linux would panic.
fn start() -> ! {
    let host = match boot::boot() {
        Ok(host) => host,
        Err(failure) => {
            say_failed(&failure);
            sys::power_off();
        }
    };
    sys::tell(count_init::READY);
    let (end, archive) = run::run(&host);
    let ending = Ending {
        end,
        killed_for_memory: run::killed_for_memory(),
    };
    // If the host no longer takes it, it knows that without being told.
    let _ = sys::write_all(host.status.get(), &ending.encode());
    if archive {
        let _ = archive::send(host.changed.get(), host.files.get());
    }
    sys::tell(count_init::DONE);
    sys::power_off();
}

/// One line on the console, which the host shows.
fn say_failed(failure: &Failure) {
    let Errno(errno) = failure.errno;
    let mut digits = [0; 10];
    let mut at = digits.len();
    let mut rest = errno;
    loop {
        at -= 1;
        digits[at] = b'0' + u8::try_from(rest % 10).unwrap_or(0);
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    let parts = [
        b"count-init: ",
        failure.what.to_bytes(),
        b": error ",
        &digits[at..],
        b"\n",
    ];
    for part in parts {
        let _ = sys::write_all(1, part);
    }
}
