//! Runs the job.

use count_init::{End, Step};

use crate::boot::Host;
use crate::child::{self, Streams};
use crate::job::Task;
use crate::pump;
use crate::sys::{self, Errno, Fd, Mount, Split};

/// How the program ended, and whether what it changed is to come back.
pub(crate) fn run(host: &Host) -> (End, bool) {
    match Task::read(host) {
        Ok(job) => match run_job(host, &job) {
            Ok(end) | Err(end) => (end, job.bring_back),
        },
        Err(end) => (end, false),
    }
}

fn run_job(host: &Host, job: &Task) -> Result<End, End> {
    let failed = |step| move |Errno(errno)| End::Failed { step, errno };
    if !job.tmp_is_given {
        let tmp = Mount {
            kind: c"tmpfs",
            from: c"tmp",
            to: c"/tmp",
            flags: sys::NO_ATIME,
            options: c"mode=1777",
        };
        sys::mount(&tmp).map_err(failed(Step::Tmp))?;
    }
    let stdin = sys::open_at(host.root.get(), c"stdin", sys::READ_ONLY);
    let stdin = stdin.map_err(failed(Step::Stdin))?;
    let children = sys::watch_children().map_err(failed(Step::Pipes))?;
    let (ours, theirs) = streams(job.terminal)?;
    let (said, says) = sys::pipe().map_err(failed(Step::Pipes))?;
    let child = match sys::fork().map_err(failed(Step::Process))? {
        Split::Child => {
            // What the parent holds is closed when the program is executed.
            child::become_program(job, &stdin, &theirs, &says);
        }
        Split::Parent(child) => child,
    };
    drop((stdin, theirs, says));
    let ended = pump::carry(host, ours, &children, child);
    let ended = ended.map_err(failed(Step::Wait))?;
    // Nothing was said where the program was executed.
    Ok(child::not_run(&said).unwrap_or(ended))
}

/// Our ends of what the program writes to, and its own.
fn streams(terminal: bool) -> Result<([Option<Fd>; 2], Streams), End> {
    let failed = |step| move |Errno(errno)| End::Failed { step, errno };
    if terminal {
        let (master, slave) = sys::terminal().map_err(failed(Step::Terminal))?;
        return Ok(([Some(master), None], Streams::Terminal(slave)));
    }
    let (out, stdout) = sys::pipe().map_err(failed(Step::Pipes))?;
    let (error, stderr) = sys::pipe().map_err(failed(Step::Pipes))?;
    for pipe in [&stdout, &stderr] {
        sys::give_to_user(pipe, count_init::USER).map_err(failed(Step::Pipes))?;
    }
    Ok(([Some(out), Some(error)], Streams::Pipes(stdout, stderr)))
}

/// How many processes the kernel has killed for want of memory.
pub(crate) fn killed_for_memory() -> u32 {
    let Ok(file) = sys::open(c"/proc/vmstat", sys::READ_ONLY) else {
        return 0;
    };
    let Ok(text) = sys::read_whole(&file) else {
        return 0;
    };
    let mut lines = text.split(|byte| *byte == b'\n');
    let Some(number) = lines.find_map(|line| line.strip_prefix(b"oom_kill ")) else {
        return 0;
    };
    let digits = number.iter().take_while(|byte| byte.is_ascii_digit());
    digits.fold(0u32, |number, digit| {
        number
            .wrapping_mul(10)
            .wrapping_add(u32::from(digit - b'0'))
    })
}
