//! `umpire count`: a program of this machine in a small virtual machine, and what it executed.
//!
//! What is run is `job`, on which kernel `kernel`, where that and the booted machine are kept
//! `store`; a run itself is `session`, several to compare them `repeated`, what is printed and
//! kept of it `report`, with `perf_data` for perf and `whole` for files. `--as callgrind` is options,
//! `valgrind`, and files, `profiles`. How the command ends, and who says so, is `ended`.

mod ended;
mod files;
mod job;
mod kernel;
mod partial;
mod perf_data;
mod profiles;
mod repeated;
mod report;
mod session;
mod store;
mod valgrind;
mod whole;

use std::fmt::Display;
use std::io::{self, Seek, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use count_init::{End as ProgramEnd, NotRun};
use guest_files::unpack;
use rustix::process::{Resource, Rlimit, setrlimit};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag::register;
use tempfile::SpooledTempFile;
use umpire_count::{Outcome, Record};
use vmm::count::{End, Limits};

use crate::exit::{UserError, complain, written};
use crate::flags::{CountCommand, CountFlags};
use ended::{Ended, Who, failed, with_advice};
use job::Errand;
use report::RunReport;
use session::{Ran, ReadyMachine, Shape};
use store::Store;
use valgrind::{ValgrindAct, ValgrindOptions};

/// By which programs mark regions.
const HEADER: &[u8] = include_bytes!("../../count/regions/include/umpire_regions.h");

/// `umpire count`: the status to end with. What is wrong has been said.
#[must_use]
pub fn run(flags: &CountFlags) -> u8 {
    // A panic has printed where: it is no status of the program's.
    let signal = Arc::new(AtomicUsize::new(0));
    let done = catch_unwind(AssertUnwindSafe(|| act_as(flags, &signal)));
    let bug = |_| Err(failed("this is a bug of Umpire's: please report it"));
    let ended = done.unwrap_or_else(bug).unwrap_or_else(|error| {
        complain(&error);
        Ended::by(Who::Umpire)
    });
    let ended = ended.after_signal(signal.load(Ordering::Relaxed));
    let status = ended.tell(flags.out.status_file.as_deref());
    if ended.who == Who::Signal && !flags.as_tool.is_empty() {
        dies_by(status);
    }
    status
}

/// By the options of `umpire count`, or by those of the tool that it is taken for.
fn act_as(flags: &CountFlags, signal: &Arc<AtomicUsize>) -> Result<Ended, UserError> {
    if flags.as_tool.is_empty() {
        return act(flags, None, signal);
    }
    match ValgrindOptions::of(&flags.as_tool)? {
        ValgrindAct::Version => {
            let version = env!("CARGO_PKG_VERSION");
            let told = writeln!(io::stdout(), "umpire count {version}, as callgrind");
            written(told).map_err(failed)?;
            Ok(Ended::by_program(0))
        }
        ValgrindAct::Run(options) => act(&options.applied(flags), Some(&options), signal),
    }
}

/// Ends this process by the signal that has ended the program, as Valgrind does: a harness may
/// wait for it.
fn dies_by(status: u8) {
    // None is no limit, which a job that has one may not ask for.
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    // The memory of the guest is nobody's to look at.
    if setrlimit(Resource::Core, none).is_ok() {
        let signal = i32::from(status.saturating_sub(128));
        // Where that is none which ends a process the status says the same.
        let _ = signal_hook::low_level::emulate_default_handler(signal);
    }
}

fn act(
    flags: &CountFlags,
    as_tool: Option<&ValgrindOptions>,
    signal: &Arc<AtomicUsize>,
) -> Result<Ended, UserError> {
    if let Some(CountCommand::Diff { before, now, json }) = &flags.act {
        report::diff(before, now, *json)?;
        return Ok(Ended::by_program(0));
    }
    if flags.print_header {
        written(io::stdout().write_all(HEADER)).map_err(failed)?;
        return Ok(Ended::by_program(0));
    }
    let store = Store::of(&flags.store)?;
    let interrupted = interrupts(signal).map_err(failed)?;
    if flags.store.fetch_kernel {
        return fetched(&store, &interrupted);
    }
    run_program(flags, as_tool, &store, interrupted)
}

fn run_program(
    flags: &CountFlags,
    as_tool: Option<&ValgrindOptions>,
    store: &Store,
    interrupted: Arc<AtomicBool>,
) -> Result<Ended, UserError> {
    // What is wrong with these is to be said before a program runs for an hour.
    let report = RunReport::of(flags, as_tool)?;
    let kernel = kernel::choose(store, flags.store.kernel.as_deref())?;
    let errand = Errand::of(&flags.command, &flags.guest)?;
    let (title, advice) = (errand.title.clone(), errand.advice());
    let time = flags.guest.timeout.map(|span| span.0);
    let limits = Limits {
        interrupted,
        ..time.map_or_else(Limits::default, Limits::within)
    };
    let patience = limits.patience();
    let errand = match errand.with_stdin(&patience)? {
        Ok(errand) => errand,
        Err(who) => return Ok(ended_by(who)),
    };
    if flags.repeat > 1 {
        let record = repeated::run(flags, store, &kernel, &errand, &limits.interrupted)?;
        return match record {
            Ok(record) => report.finish(&record, &title, None),
            Err(ended) => Ok(ended),
        };
    }
    let shape = Shape {
        kernel: &kernel,
        memory_mib: flags.guest.memory,
        functions: flags.by_function(),
        contexts: flags.by_context(),
        collect: flags.collect.collect(),
    };
    let ready = match ReadyMachine::of(store, &shape, &limits) {
        Err(error) => {
            let met = patience.is_over().map(Who::from);
            return met.map(ended_by).ok_or(error);
        }
        Ok(ready) => ready,
    };
    let mut ran = ready.run(errand, &shape, &limits)?;
    if let (Some(folder), End::Done) = (flags.guest.out.as_deref(), &ran.end) {
        let files = ran.files.take();
        ran.notes
            .extend(bring_back(files, folder, flags.guest.memory)?);
    }
    for note in &ran.notes {
        complain(note);
    }
    match outcome(&ran, &title)? {
        Ok(outcome) => {
            if let Some(advice) = advice.filter(|_| outcome != Outcome::Exited(0)) {
                complain(&advice);
            }
            let elapsed = ran.elapsed;
            let record = Record::new(ran.inputs, outcome, ran.counts);
            report.finish(&record, &title, Some(elapsed))
        }
        Err(who) => Ok(ended_by(who)),
    }
}

/// `--fetch-kernel`. Where it is interrupted, what it had fetched so far is gone again.
fn fetched(store: &Store, interrupted: &AtomicBool) -> Result<Ended, UserError> {
    match kernel::fetch(store, interrupted) {
        Err(_) if interrupted.load(Ordering::Relaxed) => Ok(ended_by(Who::Interrupted)),
        done => done.map(|()| Ended::by_program(0)),
    }
}

/// Ended by somebody else than the program, which is said.
fn ended_by(who: Who) -> Ended {
    complain(&match who {
        Who::Timeout => "the program did not end in the time that --timeout gave it",
        _ => "interrupted",
    });
    Ended::by(who)
}

/// Unpacks what the program changed. What was left out of it is told.
fn bring_back(
    archive: Option<SpooledTempFile>,
    folder: &Path,
    memory_mib: u64,
) -> Result<Option<String>, UserError> {
    let folder_name = folder.display();
    let unpacked = |error: &dyn Display| failed(format!("--out {folder_name}: {error}"));
    let mut archive = archive.ok_or_else(|| unpacked(&"the guest has sent no files"))?;
    archive.rewind().map_err(|error| unpacked(&error))?;
    // It was all in the guest's memory, files with holes as well.
    let limit = memory_mib << 20;
    let done = unpack(archive, folder, limit);
    let done = done.map_err(|error| unpacked(&with_advice(&error)))?;
    if done.left_out.is_empty() {
        return Ok(None);
    }
    let names = done.left_out.iter().map(|(name, why)| {
        let name = String::from_utf8_lossy(name);
        format!("{name} ({why})")
    });
    let names: Vec<String> = names.collect();
    let more = match done.more {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    Ok(Some(format!(
        "not brought back into {folder_name}: {}{more}",
        names.join(", ")
    )))
}

/// Set by the first signal that asks to end, which `which` says; the second one ends the process at
/// once.
fn interrupts(which: &Arc<AtomicUsize>) -> io::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register_conditional_default(signal, flag.clone())?;
        let number = usize::try_from(signal).unwrap_or_default();
        signal_hook::flag::register_usize(signal, which.clone(), number)?;
        register(signal, flag.clone())?;
    }
    Ok(flag)
}

/// How the program ended, or who ended it.
fn outcome(ran: &Ran, title: &str) -> Result<Result<Outcome, Who>, UserError> {
    match &ran.end {
        End::TimedOut => return Ok(Err(Who::Timeout)),
        End::Interrupted => return Ok(Err(Who::Interrupted)),
        End::Done => {}
        other => return Err(failed(format!("the guest failed: {other}"))),
    }
    let ending = ran.ending.ok_or_else(|| {
        failed("the guest switched itself off before its program ended, and said nothing of it")
    })?;
    let has_run = matches!(ending.end, ProgramEnd::Exited(_) | ProgramEnd::Signalled(_));
    // A count that nobody took is no 0.
    if has_run && ran.counts.programs.is_empty() {
        return Err(failed("the program ran, and nobody saw what it executed"));
    }
    match ending.end {
        ProgramEnd::Exited(status) => Ok(Ok(Outcome::Exited(status))),
        ProgramEnd::Signalled(signal) => Ok(Ok(Outcome::Signalled(signal))),
        ProgramEnd::NotRun { why, errno } => {
            Err(failed(format!("{title}: {}", not_run(why, errno))))
        }
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
        NotRun::Denied => "it is a folder, or no file to execute (chmod +x makes it one)",
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
