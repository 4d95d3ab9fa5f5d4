//! `umpire count`: a program of this machine in a small virtual machine, and what it executed.
//!
//! What is run is [`job`], on which kernel [`kernel`], where that and the booted machine are kept
//! [`store`]; a run itself is [`session`], several to compare them [`repeated`], what is printed and
//! kept of it [`report`]. How the command ends, and who says so, is [`ended`].

mod ended;
mod job;
mod kernel;
mod repeated;
mod report;
mod session;
mod store;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use count_init::{End as ProgramEnd, NotRun};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag::register;
use umpire_count::{Outcome, Record};
use vmm::count::{End, Limits};

use crate::exit::{UserError, complain};
use crate::flags::{CountCommand, CountFlags};
use ended::{Ended, Who, failed};
use job::Errand;
use report::Report;
use session::{Ran, Ready, Shape};
use store::Store;

/// `umpire count`: the status to end with. What is wrong has been said.
#[must_use]
pub fn run(flags: &CountFlags) -> u8 {
    let ended = act(flags).unwrap_or_else(|error| {
        complain(&error);
        Ended::by(Who::Umpire)
    });
    ended.tell(flags.out.status_file.as_deref())
}

fn act(flags: &CountFlags) -> Result<Ended, UserError> {
    if let Some(CountCommand::Diff { before, now, json }) = &flags.act {
        report::diff(before, now, *json)?;
        return Ok(Ended::by_program(0));
    }
    let store = Store::of(&flags.store)?;
    if flags.store.fetch_kernel {
        kernel::fetch(&store)?;
        return Ok(Ended::by_program(0));
    }
    // What is wrong with these is to be said before a program runs for an hour.
    let report = Report::of(flags)?;
    let kernel = kernel::choose(&store, flags.store.kernel.as_deref())?;
    let errand = Errand::of(&flags.command, &flags.guest)?;
    let title = errand.title.clone();
    if flags.repeat > 1 {
        let record = repeated::run(flags, &kernel, &errand)?;
        return match record {
            Ok(record) => report.finish(&record, &title, None),
            Err(ended) => Ok(ended),
        };
    }
    let shape = Shape {
        kernel: &kernel,
        memory_mib: flags.guest.memory,
        functions: flags.by_function(),
    };
    let interrupted = interrupts().map_err(failed)?;
    let ready = match Ready::of(&store, &shape, &interrupted) {
        Err(_) if interrupted.load(Ordering::Relaxed) => {
            complain(&"interrupted");
            return Ok(Ended::by(Who::Interrupted));
        }
        ready => ready?,
    };
    let limits = Limits {
        time: flags.guest.timeout.map(|span| span.0),
        interrupted,
    };
    let ran = ready.run(errand, &shape, limits)?;
    for note in &ran.notes {
        complain(note);
    }
    match outcome(&ran)? {
        Ok(outcome) => {
            let elapsed = ran.elapsed;
            let record = Record::new(ran.inputs, outcome, ran.counts);
            report.finish(&record, &title, Some(elapsed))
        }
        Err(who) => {
            complain(&match who {
                Who::Timeout => "the program did not end in the time that --timeout gave it",
                _ => "interrupted",
            });
            Ok(Ended::by(who))
        }
    }
}

/// Set by the first signal that asks to end; the second one ends the process at once.
fn interrupts() -> io::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register_conditional_default(signal, flag.clone())?;
        register(signal, flag.clone())?;
    }
    Ok(flag)
}

/// How the program ended, or who ended it.
fn outcome(ran: &Ran) -> Result<Result<Outcome, Who>, UserError> {
    match &ran.end {
        End::TimedOut => return Ok(Err(Who::Timeout)),
        End::Interrupted => return Ok(Err(Who::Interrupted)),
        End::Done => {}
        other => return Err(failed(format!("the guest failed: {other}"))),
    }
    let ending = ran.ending.ok_or_else(|| {
        failed("the guest switched itself off before its program ended, and said nothing of it")
    })?;
    if ending.killed_for_memory > 0 {
        complain(
            &"the guest had too little memory, and its kernel killed a process; --memory gives it more",
        );
    }
    match ending.end {
        ProgramEnd::Exited(status) => Ok(Ok(Outcome::Exited(status))),
        ProgramEnd::Signalled(signal) => Ok(Ok(Outcome::Signalled(signal))),
        ProgramEnd::NotRun { why, errno } => Err(failed(not_run(why, errno))),
        ProgramEnd::Failed { step, errno } => {
            let error = io::Error::from_raw_os_error(errno.cast_signed());
            Err(failed(format!(
                "the guest could not be made ready ({step:?}): {error}"
            )))
        }
    }
}

/// Why a program could not be executed, and what to do about it.
fn not_run(why: NotRun, errno: u32) -> String {
    let text = match why {
        NotRun::Missing => "there is no such file in the guest; --with gives it folders",
        NotRun::Denied => "it may not be executed, or is a folder",
        NotRun::ScriptInterpreter => {
            "it is a script, and the interpreter that its first line names is not there"
        }
        NotRun::ElfInterpreter => {
            "the dynamic linker that it names is not there: it was built for another system"
        }
        NotRun::NoInterpreterLine => {
            "it is text without a line #!: run it by its interpreter, as sh FILE"
        }
        NotRun::OtherMachine => "it is damaged, or for another processor: x86-64 is needed",
        NotRun::Folder => "its working folder is not there",
        NotRun::TooLong => "its arguments and environment are too long",
        NotRun::Memory => "the guest has too little memory for it; --memory gives it more",
        NotRun::Other => {
            let error = io::Error::from_raw_os_error(errno.cast_signed());
            return format!("the program cannot be executed: {error}");
        }
    };
    format!("the program cannot be executed: {text}")
}
