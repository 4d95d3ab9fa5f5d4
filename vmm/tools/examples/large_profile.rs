//! Writes a large profile, to measure how fast it is read:
//!
//! ```text
//! cargo run --release -p umpire-tools --example large_profile -- FILE SAMPLES FRAMES
//! ```
//!
//! With FILE alone it is reported on, as `umpire report` does; what that took is on standard
//! error: CPU time of user and system, time that passed, and most memory that was resident.
//!
//! It has 8 processes with 4 mapped files each, samples at half a million addresses each of
//! kernel and programs, few of them hot, and chains of FRAMES callers.

use std::env;
use std::error::Error;
use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::time::Instant;

use clap::Parser;
use perfmon_abi::compact::{CallChain, ChainEnd, GuestPlace, ProgramFrame};
use perfmon_abi::wire::programs::{Described, MappingInfo, TaskInfo};
use umpire_tools::profile::{
    Header, ProfileWriter, Record, ReportOptions, Ring, Sample, SampledEvent, Sampling, report,
};

const TASKS: u64 = 8;
const FILES: u64 = 4;
const KERNEL: u64 = 0xffff_ffff_8100_0000;
const ADDRESSES: u64 = 1 << 19;

/// A command line of `umpire report`.
#[derive(clap::Parser)]
struct Line {
    #[command(flatten)]
    options: ReportOptions,
}

fn read(file: &str) -> Result<(), Box<dyn Error>> {
    let words = ["report", "-i", file, "--percent-limit", "0.5"];
    let Line { options } = Line::try_parse_from(words)?;
    let begun = Instant::now();
    report(&options, &mut io::stdout(), &mut io::stderr())?;
    let passed = begun.elapsed().as_secs_f64();
    // Fields 14 and 15, in hundredths of a second; the name before them may have spaces.
    let stat = fs::read_to_string("/proc/self/stat")?;
    let (_, fields) = stat.rsplit_once(')').ok_or("no times of this process")?;
    let mut fields = fields.split_whitespace().skip(11).map(str::parse::<u32>);
    let mut seconds = || Ok::<_, Box<dyn Error>>(f64::from(fields.next().ok_or("")??) / 100.0);
    let (user, system) = (seconds()?, seconds()?);
    let status = fs::read_to_string("/proc/self/status")?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let peak = peak.unwrap_or("unknown").trim();
    eprintln!("{user:.2} s user + {system:.2} s system, {passed:.2} s passed, {peak} at most");
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = env::args().skip(1).collect();
    let [file, samples, frames] = words.as_slice() else {
        let [file] = words.as_slice() else {
            return Err("give FILE SAMPLES FRAMES, or FILE".into());
        };
        return read(file);
    };
    let (samples, frames): (u64, u64) = (samples.parse()?, frames.parse()?);
    let header = Header {
        vcpus: 4,
        cores: 4,
        events: vec![SampledEvent {
            name: "cycles".to_owned(),
            sampling: Sampling::Period(1000),
            provenance: None,
        }],
        ..Header::default()
    };
    let to = BufWriter::with_capacity(1 << 20, File::create(file)?);
    let mut writer = ProfileWriter::new(to, &header)?;
    for number in 1..=TASKS {
        let id = u32::try_from(100 + number)?;
        writer.write(&Record::Described(Described::Task(TaskInfo {
            number,
            pid: id,
            tid: id,
            comm: format!("task-{number}"),
            process: format!("task-{number}"),
            ..TaskInfo::default()
        })))?;
    }
    for number in 0..FILES {
        writer.write(&Record::Described(Described::Mapping(MappingInfo {
            number: 100 + number,
            start: number << 32,
            end: (number + 1) << 32,
            name: format!("/usr/lib/lib{number}.so"),
            ..MappingInfo::default()
        })))?;
    }
    // A generator of Lehmer's: the same file every time.
    let mut state: u64 = 42;
    let mut random = |below: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) % below
    };
    let frame = |at: u64| ProgramFrame {
        address: ((at % FILES) << 32) + at * 16 % (1 << 24),
        mapping: 100 + at % FILES,
    };
    for number in 0..samples {
        // A few places are hot, and most are not.
        let at = random(ADDRESSES) * random(ADDRESSES) / ADDRESSES * random(ADDRESSES) / ADDRESSES;
        let kernel = random(2) == 0;
        // Callers differ much less than places.
        let callers = random(64);
        let mut chain = CallChain::default();
        let own = if kernel {
            KERNEL + at * 16
        } else {
            frame(at).address
        };
        let rest = (1..frames).map(|depth| callers / depth * 7 + depth);
        if frames > 0 && kernel {
            chain.kernel = vec![own];
            chain.kernel.extend(rest.map(|at| KERNEL + at * 16));
            chain.kernel_end = Some(ChainEnd::Outermost);
        } else if frames > 0 {
            chain.program = vec![frame(at)];
            chain.program.extend(rest.map(frame));
            chain.program_end = Some(ChainEnd::Outermost);
        }
        writer.write(&Record::Sample(Sample {
            time_ns: number * 1000,
            ip: own,
            period: 1000,
            vcpu: u32::try_from(number % 4)?,
            ring: Some(if kernel { Ring::Kernel } else { Ring::User }),
            guest: GuestPlace {
                task: 1 + number / 64 % TASKS,
                mapping: if kernel { 0 } else { frame(at).mapping },
                chain,
                ..GuestPlace::default()
            },
            ..Sample::default()
        }))?;
    }
    let text: String = (0..ADDRESSES / 8)
        .map(|one| format!("{:016x} t function_{one}\n", KERNEL + one * 128))
        .collect();
    writer.write_symbols(&text)?;
    writer.finish(samples * 1000)?;
    Ok(())
}
