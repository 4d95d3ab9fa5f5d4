//! How fast the processor in software is: thirteen programs, the same bytes on the host's processor,
//! on `emu`, which counts all that instructions do, and under Callgrind, which counts
//! instructions. The three take turns, so that noise hits them alike; times are those of their
//! threads on a CPU. What a counter's register costs there, and what a kernel does.

mod kernel;
mod registers;

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bench_programs::{
    Callgrind, FLOATING, GuestRun, HostRun, PROGRAMS, Program, ProgramFile, SlowPath, image,
    run_in_emu,
};
use pmu_virt::EventClass;
use serde::Serialize;
use vmm::host::CpuFacts;

use super::error::BenchError;
use super::report::{Report, table, verdict};
pub use kernel::{KernelReport, KernelRow};
pub use registers::RegisterRow;

/// The least that each program may have of Callgrind's speed.
const EACH: f64 = 0.4;
/// Likewise their geometric mean.
const MEAN: f64 = 0.85;

/// How long it is measured.
#[derive(Clone, Debug)]
pub struct EmuOptions {
    /// Times some ten million instructions of each program.
    pub length: u32,
    /// How often each way runs each program; the fastest counts.
    pub turns: u32,
    /// Callgrind too.
    pub valgrind: bool,
    /// A bzImage or vmlinux of Linux to boot.
    pub kernel: Option<PathBuf>,
}

/// Speed of the processor in software.
#[derive(Clone, Debug, Serialize)]
pub struct EmuReport {
    /// The host's.
    pub processor: Option<String>,
    /// One for each program.
    pub programs: Vec<EmuRow>,
    /// Those of doubles, without a bound.
    pub floating: Vec<EmuRow>,
    /// Geometric means of the others.
    pub mean: EmuSpeeds,
    /// Why there is nothing of Callgrind.
    pub without_callgrind: Option<String>,
    /// Whether the speeds are at least the parts of Callgrind's that they should be.
    pub met: Option<bool>,
    /// What an access to a counter costs.
    pub registers: Vec<RegisterRow>,
    /// What a kernel does.
    pub kernel: Option<KernelReport>,
    /// Why there is none.
    pub without_kernel: Option<&'static str>,
}

/// One program.
#[derive(Clone, Debug, Serialize)]
pub struct EmuRow {
    pub program: &'static str,
    /// Instructions of its rounds.
    pub instructions: u64,
    /// Loads and stores for each thousand of them.
    pub accesses_per_1000: u64,
    /// Branches for each thousand of them.
    pub branches_per_1000: u64,
    /// What took the slow path, from the program's first instruction to its last.
    pub slow: SlowPathRow,
    /// KiB of decoded code at the end.
    pub code_kib: usize,
    #[serde(flatten)]
    pub speeds: EmuSpeeds,
}

/// How often something took the slow path, for each million of instructions.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SlowPathRow {
    /// Integer instructions without a row of their own in the table.
    pub integer: u64,
    /// Steps of string instructions.
    pub string: u64,
    /// Instructions of the system.
    pub system: u64,
    /// XMM registers in code of 16 or 32 bits.
    pub sse: u64,
    /// MMX.
    pub mmx: u64,
    /// FXSAVE, FXRSTOR, LDMXCSR and STMXCSR.
    pub image: u64,
    /// x87.
    pub x87: u64,
    /// Instructions that 64-bit code does not have.
    pub legacy: u64,
    /// Accesses that the TLB did not answer.
    pub memory: u64,
    /// Instructions that were executed alone.
    pub alone: u64,
    /// Walks of page tables.
    pub walk: u64,
    /// Blocks that no jump had found before.
    pub lookup: u64,
    /// Blocks that were decoded.
    pub decode: u64,
}

impl SlowPathRow {
    fn of(instructions: u64, taken: impl Fn(SlowPath) -> u64) -> Self {
        let slow = |path| taken(path) * 1_000_000 / instructions.max(1);
        SlowPathRow {
            integer: slow(SlowPath::Integer),
            string: slow(SlowPath::String),
            system: slow(SlowPath::System),
            sse: slow(SlowPath::Sse),
            mmx: slow(SlowPath::Mmx),
            image: slow(SlowPath::Image),
            x87: slow(SlowPath::X87),
            legacy: slow(SlowPath::Legacy),
            memory: slow(SlowPath::Memory),
            alone: slow(SlowPath::Alone),
            walk: slow(SlowPath::Walk),
            lookup: slow(SlowPath::Lookup),
            decode: slow(SlowPath::Decode),
        }
    }

    /// Those that programs and kernels take.
    fn cells(&self) -> [String; 9] {
        [
            self.integer,
            self.string,
            self.system,
            self.sse,
            self.memory,
            self.alone,
            self.walk,
            self.lookup,
            self.decode,
        ]
        .map(|times| times.to_string())
    }
}

/// Millions of instructions a second.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct EmuSpeeds {
    /// On the host's processor.
    pub native: f64,
    pub emu: f64,
    pub callgrind: Option<f64>,
    /// How much slower emu is than the host's processor.
    pub slower: f64,
    /// Speed of emu over that of Callgrind.
    pub of_callgrind: Option<f64>,
}

impl EmuSpeeds {
    fn of(native: f64, emu: f64, callgrind: Option<f64>) -> Self {
        EmuSpeeds {
            native,
            emu,
            callgrind,
            slower: native / emu,
            of_callgrind: callgrind.map(|callgrind| emu / callgrind),
        }
    }
}

/// Measures.
///
/// # Errors
/// There are no programs, or one did not run, or not as everywhere.
pub(super) fn measure(options: &EmuOptions) -> Result<EmuReport, BenchError> {
    // Before minutes of other figures.
    if let Some(file) = &options.kernel {
        File::open(file).map_err(|error| BenchError::Kernel {
            file: file.clone(),
            error,
        })?;
    }
    let image = image().ok_or_else(|| {
        BenchError::Programs("this umpire was built without them (x86_64-unknown-none)".to_owned())
    })?;
    let file = ProgramFile::new(image).map_err(failed)?;
    let without_callgrind = why_not(&file, options.valgrind);
    let with = (options, without_callgrind.is_none());
    let rows = |programs: &[Program]| -> Result<Vec<EmuRow>, BenchError> {
        let one = |program| Ok(row(program, &run(image, &file, program, with)?));
        programs.iter().map(one).collect()
    };
    let (programs, floating) = (rows(&PROGRAMS)?, rows(&FLOATING)?);
    let mean = EmuSpeeds::of(
        mean(programs.iter().map(|row| Some(row.speeds.native))).unwrap_or_default(),
        mean(programs.iter().map(|row| Some(row.speeds.emu))).unwrap_or_default(),
        mean(programs.iter().map(|row| row.speeds.callgrind)),
    );
    let enough = |row: &EmuRow| Some(row.speeds.of_callgrind? >= EACH);
    let each: Option<Vec<bool>> = programs.iter().map(enough).collect();
    let met = mean
        .of_callgrind
        .zip(each)
        .map(|(mean, each)| mean >= MEAN && each.iter().all(|met| *met));
    let boot = |kernel: &PathBuf| kernel::measure(kernel, image, (options.length, options.turns));
    let kernel = options.kernel.as_ref().map(boot).transpose()?;
    Ok(EmuReport {
        without_kernel: kernel.is_none().then_some("it needs --kernel FILE"),
        kernel,
        registers: registers::measure()?,
        processor: CpuFacts::read(Path::new("/")).model_name,
        programs,
        floating,
        mean,
        without_callgrind,
        met,
    })
}

/// Why Callgrind is left out.
fn why_not(file: &ProgramFile, wanted: bool) -> Option<String> {
    if !wanted {
        return Some("it was not asked for".to_owned());
    }
    let once = file.run_in_callgrind(&PROGRAMS[0], 1);
    once.err().map(|error| error.to_string())
}

/// The fastest of all turns.
struct Best {
    guest: GuestRun,
    host: HostRun,
    callgrind: Option<Callgrind>,
}

fn run(
    image: &[u8],
    file: &ProgramFile,
    program: &Program,
    (options, callgrind): (&EmuOptions, bool),
) -> Result<Best, BenchError> {
    let rounds = program.rounds * u64::from(options.length);
    let once = || -> Result<Best, BenchError> {
        let host = file.run(program, rounds).map_err(failed)?;
        let guest = run_in_emu(image, program, rounds).map_err(failed)?;
        let callgrind = callgrind
            .then(|| file.run_in_callgrind(program, rounds))
            .transpose()
            .map_err(failed)?;
        let results = [Some(host.result), callgrind.map(|all| all.run.result)];
        if results.iter().flatten().any(|other| *other != guest.result) {
            let name = program.name;
            return Err(BenchError::Programs(format!(
                "{name} came to another result"
            )));
        }
        Ok(Best {
            guest,
            host,
            callgrind,
        })
    };
    let mut best = once()?;
    for _ in 1..options.turns {
        let next = once()?;
        best.guest.time = best.guest.time.min(next.guest.time);
        best.host.time = best.host.time.min(next.host.time);
        if let (Some(best), Some(next)) = (&mut best.callgrind, next.callgrind) {
            best.run.time = best.run.time.min(next.run.time);
        }
    }
    Ok(best)
}

fn row(program: &Program, best: &Best) -> EmuRow {
    let counts = &best.guest.rounds;
    let instructions = counts.of(EventClass::Instructions);
    let speed = |time: Duration| number(instructions) / time.as_secs_f64() / 1e6;
    let part = |events: u64| events * 1000 / instructions.max(1);
    EmuRow {
        program: program.name,
        instructions,
        accesses_per_1000: part(counts.of(EventClass::Loads) + counts.of(EventClass::Stores)),
        branches_per_1000: part(counts.of(EventClass::Branches)),
        slow: SlowPathRow::of(best.guest.whole.of(EventClass::Instructions), |path| {
            best.guest.slow_paths.of(path)
        }),
        code_kib: best.guest.code_bytes >> 10,
        speeds: EmuSpeeds::of(
            speed(best.host.time),
            speed(best.guest.time),
            best.callgrind.map(|all| speed(all.run.time)),
        ),
    }
}

#[allow(clippy::cast_precision_loss, reason = "it is far below 2^52")]
fn number(events: u64) -> f64 {
    events as f64
}

/// The geometric mean; none if one is missing.
fn mean(values: impl Iterator<Item = Option<f64>>) -> Option<f64> {
    let logarithms: Vec<f64> = values
        .map(|value| value.map(f64::ln))
        .collect::<Option<_>>()?;
    let sum: f64 = logarithms.iter().sum();
    (!logarithms.is_empty()).then(|| (sum / number(logarithms.len() as u64)).exp())
}

fn failed(error: impl std::error::Error) -> BenchError {
    BenchError::Programs(error.to_string())
}

impl Report for EmuReport {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let processor = self.processor.as_deref().unwrap_or("unknown processor");
        writeln!(out, "Processor in software on {processor}")?;
        writeln!(out, "Millions of instructions a second:")?;
        let all = || self.programs.iter().chain(&self.floating);
        let rows = all().map(|row| {
            let millions = row.instructions / 1_000_000;
            let [native, emu, slower, callgrind, ratio] = cells(&row.speeds);
            let name = row.program.to_owned();
            [
                name,
                millions.to_string(),
                native,
                emu,
                slower,
                callgrind,
                ratio,
            ]
        });
        let [native, emu, slower, callgrind, ratio] = cells(&self.mean);
        let name = "geometric mean".to_owned();
        let mean = [name, String::new(), native, emu, slower, callgrind, ratio];
        let titles = [
            "program",
            "millions",
            "native",
            "emu",
            "slower",
            "callgrind",
            "emu/callgrind",
        ];
        table(titles, 1..=6, rows.chain([mean]), out)?;
        writeln!(out, "Slow path, for each million of instructions:")?;
        let boot = self.kernel.iter().map(|kernel| ("boot", &kernel.slow));
        let rows = all().map(|row| (row.program, &row.slow)).chain(boot);
        let rows = rows.map(|(name, slow)| {
            let [
                integer,
                string,
                system,
                sse,
                memory,
                alone,
                walk,
                lookup,
                decode,
            ] = slow.cells();
            let name = name.to_owned();
            [
                name, integer, string, system, sse, memory, alone, walk, lookup, decode,
            ]
        });
        let titles = [
            "program", "integer", "string", "system", "sse", "memory", "alone", "walk", "lookup",
            "decode",
        ];
        table(titles, 1..=9, rows, out)?;
        self.rest(out)
    }
}

impl EmuReport {
    /// What comes behind the tables.
    fn rest(&self, out: &mut dyn Write) -> io::Result<()> {
        match &self.without_callgrind {
            Some(why) => writeln!(out, "Without Callgrind: {why}")?,
            None => writeln!(
                out,
                "At least {EACH} of Callgrind's speed each, {MEAN} on the mean: {}",
                verdict(self.met)
            )?,
        }
        for row in &self.registers {
            let RegisterRow {
                access,
                guest_ticks,
                host_ns,
            } = row;
            writeln!(
                out,
                "{access}: {host_ns} ns of the host, {guest_ticks} ticks of the guest"
            )?;
        }
        if let Some(why) = self.without_kernel {
            writeln!(out, "Boot, system calls, memory and recordings: {why}")?;
        }
        self.kernel.iter().try_for_each(|kernel| {
            kernel.text(out)?;
            let met = verdict(Some(kernel.met));
            writeln!(out, "  all of these: {met}")
        })
    }
}

fn cells(speeds: &EmuSpeeds) -> [String; 5] {
    let whole = |speed: f64| format!("{speed:.0}");
    [
        whole(speeds.native),
        whole(speeds.emu),
        format!("{:.1}", speeds.slower),
        speeds.callgrind.map(whole).unwrap_or_default(),
        speeds
            .of_callgrind
            .map(|ratio| format!("{ratio:.2}"))
            .unwrap_or_default(),
    ]
}
