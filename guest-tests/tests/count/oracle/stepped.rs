//! What a program executes on this machine's processor, one instruction after the other.

use std::collections::HashMap;
use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use iced_x86::{Decoder, DecoderOptions};
use nix::sys::ptrace::{self, AddressType, Options};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::{ENVIRONMENT, NO_AVX, Spots};

/// What was stepped through.
#[derive(Default)]
pub(super) struct Stepped {
    /// Instructions, a repeated one as one.
    pub(super) spots: Spots,
    /// Further iterations of repeated instructions. Under the trap flag each is a step.
    pub(super) iterations: Spots,
    pub(super) stdout: Vec<u8>,
}

/// Steps through a program of one thread, from its exec to its end.
#[expect(
    clippy::zombie_processes,
    reason = "waitpid takes it in, as its tracer"
)]
pub(super) fn run(here: &Path, program: &[&str]) -> Stepped {
    // Who steps and who is stepped take turns: on two processors each wakes the other up.
    let processors = sched_getaffinity(None).expect("processors");
    let mut one = CpuSet::new();
    one.set(
        (0..CpuSet::MAX_CPU)
            .find(|cpu| processors.is_set(*cpu))
            .expect("one"),
    );
    sched_setaffinity(None, &one).expect("a processor");
    // The shell waits until it is traced, and becomes the program.
    let mut shell = Command::new("/bin/sh")
        .args(["-c", "read go; exec \"$@\"", "sh"])
        .args(program)
        .current_dir(here)
        .env_clear()
        .envs(ENVIRONMENT)
        .envs([NO_AVX])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a shell");
    let pid = Pid::from_raw(shell.id().try_into().expect("a process"));
    let options = Options::PTRACE_O_TRACEEXEC | Options::PTRACE_O_EXITKILL;
    ptrace::seize(pid, options).expect("a child may be traced");
    let mut stdin = shell.stdin.take().expect("a pipe");
    stdin.write_all(b"\n").expect("the shell reads");
    drop(stdin);
    loop {
        let event = waitpid(pid, None).expect("an exec");
        assert!(matches!(event, WaitStatus::PtraceEvent(..)), "{event:?}");
        let words = fs::read(format!("/proc/{pid}/cmdline")).expect("a process");
        if words.starts_with(program[0].as_bytes()) {
            break;
        }
        // The shell's own, which may come as late as this.
        ptrace::cont(pid, None).expect("it is stopped");
    }
    // The call returns to the program's first instruction, before which the first step ends.
    let mut steps = Steps::new(pid);
    let mut signal = None;
    loop {
        ptrace::step(pid, signal.take()).expect("it is stopped");
        match waitpid(pid, None).expect("a child") {
            WaitStatus::Stopped(_, Signal::SIGTRAP) => steps.at(pid),
            WaitStatus::Stopped(_, other) => signal = Some(other),
            WaitStatus::Exited(_, 0) => break,
            end => panic!("{program:?}: {end:?}"),
        }
    }
    sched_setaffinity(None, &processors).expect("its processors");
    let mut stepped = steps.done();
    // It was less than a pipe has room for, or the program would not have ended.
    let mut stdout = shell.stdout.take().expect("a pipe");
    stdout.read_to_end(&mut stepped.stdout).expect("its output");
    stepped
}

/// By addresses, with what is mapped there.
struct Steps {
    pid: Pid,
    counts: HashMap<u64, u64>,
    iterations: HashMap<u64, u64>,
    last: u64,
    maps: Vec<Mapped>,
}

/// A part of a file in memory.
struct Mapped {
    begin: u64,
    end: u64,
    offset: u64,
    name: String,
}

impl Steps {
    fn new(pid: Pid) -> Self {
        Self {
            pid,
            counts: HashMap::new(),
            iterations: HashMap::new(),
            last: 0,
            maps: Vec::new(),
        }
    }

    /// It is about to execute an instruction.
    fn at(&mut self, pid: Pid) {
        let rip = ptrace::getregs(pid).expect("it is stopped").rip;
        let again = self.last == rip && self.is_repeated(rip);
        self.last = rip;
        let counts = if again {
            &mut self.iterations
        } else {
            &mut self.counts
        };
        let count = counts.entry(rip).or_default();
        *count += 1;
        // What is mapped there is seen while it is mapped.
        if *count == 1 && !self.maps.iter().any(|map| map.has(rip)) {
            self.maps = mapped(pid, std::mem::take(&mut self.maps));
        }
    }

    /// Whether a string instruction with a prefix stands there.
    fn is_repeated(&self, rip: u64) -> bool {
        let word = |at: u64| {
            // It is an address of the other process.
            let word = ptrace::read(self.pid, at as AddressType);
            word.map_or([0; 8], i64::to_ne_bytes)
        };
        let bytes = [word(rip), word(rip + 8)].concat();
        let instruction = Decoder::new(64, &bytes, DecoderOptions::NONE).decode();
        let has_prefix = instruction.has_rep_prefix() || instruction.has_repne_prefix();
        has_prefix && instruction.is_string_instruction()
    }

    fn done(self) -> Stepped {
        let spots = |counts: HashMap<u64, u64>| {
            let spots = counts.into_iter().map(|(address, count)| {
                let map = self.maps.iter().find(|map| map.has(address));
                let map = map.expect("it was mapped");
                let place = address - map.begin + map.offset;
                ((map.name.clone(), place), count)
            });
            spots.collect()
        };
        Stepped {
            spots: spots(self.counts),
            iterations: spots(self.iterations),
            stdout: Vec::new(),
        }
    }
}

impl Mapped {
    fn has(&self, address: u64) -> bool {
        (self.begin..self.end).contains(&address)
    }
}

/// What can be executed, with what was known of it before.
fn mapped(pid: Pid, mut known: Vec<Mapped>) -> Vec<Mapped> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("a process");
    for line in maps.lines() {
        let mut words = line.split_ascii_whitespace();
        let mut word = || words.next().unwrap_or_default();
        let (range, rights, offset) = (word(), word(), word());
        let name = line.split_ascii_whitespace().nth(5).unwrap_or_default();
        let number = |text: &str| u64::from_str_radix(text, 16).expect("a number");
        let (begin, end) = range.split_once('-').expect("two addresses");
        let map = Mapped {
            begin: number(begin),
            end: number(end),
            offset: number(offset),
            name: name.to_owned(),
        };
        if rights.contains('x') && !known.iter().any(|old| old.has(map.begin)) {
            known.push(map);
        }
    }
    known
}
