//! A Linux on the processor in software: `umpire run` as a process, with one of the programs as
//! the guest's first and only one.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use bench_programs::{NOTHING, PROGRAMS, Program, SYSTEM_CALLS, as_first_process};
use cpio::newc::{self, ModeFileType};
use serde::Serialize;
use tempfile::TempDir;
use vmm::machine::EngineFigures;

use super::{SlowPathRow, number};
use crate::error::BenchError;

/// Least millions of instructions a second while a kernel boots.
const BOOT: f64 = 80.0;
/// Likewise in a loop of system calls.
const CALLS: f64 = 40.0;
/// Most of the wall time without a recording.
const RECORD: f64 = 1.02;
/// Most MiB beyond the guest's RAM.
const BEYOND_RAM: u64 = 100;

const MEMORY_MIB: u64 = 256;
const PATIENCE_S: u32 = 600;
/// How often a process is looked at.
const LOOK: Duration = Duration::from_millis(20);
/// The program that is recorded: some ten million instructions for each round of `--length`.
const RECORDED: Program = PROGRAMS[6];

/// What a kernel does on the processor in software.
#[derive(Clone, Debug, Serialize)]
pub struct KernelReport {
    /// The kernel's file.
    pub kernel: PathBuf,
    /// From its first instruction to `/init`, and to the end of the machine.
    pub boot: KernelRow,
    /// A loop of system calls, without that boot.
    pub calls: KernelRow,
    /// Nanoseconds of the host for a system call.
    pub call_ns: u64,
    /// What of the boot took the slow path.
    pub slow: SlowPathRow,
    /// KiB of decoded code at its end.
    pub code_kib: u64,
    /// The most MiB that the process had during the boot beyond the guest's RAM.
    pub beyond_ram_mib: u64,
    /// Wall time of a computing guest with `umpire run --record`, which samples at 1 kHz of
    /// virtual time, over that without.
    pub record_ratio: f64,
    /// Whether all of that is as it should be.
    pub met: bool,
}

/// Some instructions of a kernel.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct KernelRow {
    pub instructions: u64,
    /// Millions of them a second of CPU time.
    pub speed: f64,
}

impl KernelRow {
    fn of(instructions: u64, cpu_ns: u64) -> Self {
        Self {
            instructions,
            speed: number(instructions) * 1e3 / number(cpu_ns.max(1)),
        }
    }
}

/// Boots `kernel` with `image`, the programs' file, as its first process, `turns` times; the
/// fastest counts.
///
/// # Errors
/// It does not boot, or there is no place for files.
pub(super) fn measure(
    kernel: &Path,
    image: &[u8],
    (length, turns): (u32, u32),
) -> Result<KernelReport, BenchError> {
    let bed = Bed::new(kernel, image)?;
    let rounds = RECORDED.rounds * u64::from(length) * 10;
    let once = || -> Result<[Ran; 4], BenchError> {
        Ok([
            bed.run(&NOTHING, NOTHING.rounds, false)?,
            bed.run(&SYSTEM_CALLS, SYSTEM_CALLS.rounds, false)?,
            bed.run(&RECORDED, rounds, false)?,
            bed.run(&RECORDED, rounds, true)?,
        ])
    };
    let mut best = once()?;
    for _ in 1..turns {
        for (best, next) in best.iter_mut().zip(once()?) {
            best.wall = best.wall.min(next.wall);
            if next.figures.cpu_ns < best.figures.cpu_ns {
                best.figures = next.figures;
            }
        }
    }
    let [boot, with_calls, plain, recorded] = best;
    let (booted, called) = (boot.figures, with_calls.figures);
    let boot_row = KernelRow::of(booted.instructions, booted.cpu_ns);
    let calls_ns = called.cpu_ns.saturating_sub(booted.cpu_ns);
    let calls_row = KernelRow::of(
        called.instructions.saturating_sub(booted.instructions),
        calls_ns,
    );
    let record_ratio = recorded.wall.as_secs_f64() / plain.wall.as_secs_f64();
    let beyond_ram_mib = boot.beyond_ram >> 20;
    Ok(KernelReport {
        kernel: kernel.to_owned(),
        met: boot_row.speed >= BOOT
            && calls_row.speed >= CALLS
            && record_ratio <= RECORD
            && beyond_ram_mib <= BEYOND_RAM,
        boot: boot_row,
        calls: calls_row,
        call_ns: calls_ns / SYSTEM_CALLS.rounds,
        slow: SlowPathRow::of(booted.instructions, |path| booted.slow(path)),
        code_kib: booted.code_bytes >> 10,
        beyond_ram_mib,
        record_ratio,
    })
}

impl KernelReport {
    /// For people; the slow path is told beside that of the programs.
    pub(super) fn text(&self, out: &mut dyn io::Write) -> io::Result<()> {
        let millions = |row: &KernelRow| row.instructions / 1_000_000;
        writeln!(out, "{} as a guest:", self.kernel.display())?;
        writeln!(
            out,
            "  boot to /init: {} million instructions, {:.0} million a second (at least {BOOT})",
            millions(&self.boot),
            self.boot.speed
        )?;
        writeln!(
            out,
            "  system calls: {:.0} million instructions a second (at least {CALLS}), {} ns each",
            self.calls.speed, self.call_ns
        )?;
        writeln!(
            out,
            "  memory beyond the guest's RAM: {} MiB (at most {BEYOND_RAM}), {} KiB of it code",
            self.beyond_ram_mib, self.code_kib
        )?;
        writeln!(
            out,
            "  recorded at 1 kHz: {:.3} of the time without (at most {RECORD})",
            self.record_ratio
        )
    }
}

/// How a guest ran.
struct Ran {
    figures: EngineFigures,
    wall: Duration,
    /// The most bytes that the process had beyond the guest's RAM.
    beyond_ram: u64,
}

/// Files for the guests.
struct Bed<'a> {
    kernel: &'a Path,
    folder: TempDir,
}

impl<'a> Bed<'a> {
    fn new(kernel: &'a Path, image: &[u8]) -> Result<Self, BenchError> {
        let folder = TempDir::new().map_err(BenchError::Folder)?;
        let bed = Self { kernel, folder };
        bed.write_initramfs(image).map_err(BenchError::Folder)?;
        Ok(bed)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write_initramfs(&self, image: &[u8]) -> io::Result<()> {
        let file = File::create(self.file("initrd"))?;
        let init = newc::Builder::new("init")
            .mode(0o755)
            .set_mode_file_type(ModeFileType::Regular);
        let length = u32::try_from(image.len()).map_err(io::Error::other)?;
        let mut entry = init.write(file, length);
        io::Write::write_all(&mut entry, image)?;
        newc::trailer(entry.finish()?)?;
        Ok(())
    }

    fn run(&self, program: &Program, rounds: u64, record: bool) -> Result<Ran, BenchError> {
        let log = self.file("log");
        let mut command = Command::new(std::env::current_exe().map_err(BenchError::Folder)?);
        let words = as_first_process(program, rounds);
        command
            .args(["run", "--engine", "emu", "--seed", "1", "--memory"])
            .arg(MEMORY_MIB.to_string())
            .args(["--timeout", &PATIENCE_S.to_string()])
            .arg("--kernel")
            .arg(self.kernel)
            .arg("--initrd")
            .arg(self.file("initrd"))
            .args(["--cmdline", &format!("console=ttyS0 quiet -- {words}")])
            .args(["--control".as_ref(), self.file("socket").as_os_str()])
            .args(["-v".as_ref(), "--log-file".as_ref(), log.as_os_str()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        if record {
            command.arg("--record").arg(self.file("profile"));
        }
        let began = Instant::now();
        let mut child = command.spawn().map_err(BenchError::Folder)?;
        let beyond_ram = watch(&mut child)?;
        let wall = began.elapsed();
        let output = child.wait_with_output().map_err(BenchError::Folder)?;
        let told = fs::read_to_string(&log).unwrap_or_default();
        let figures = told.lines().find_map(|line| line.parse().ok());
        match figures.filter(|_| output.status.success()) {
            Some(figures) => Ok(Ran {
                figures,
                wall,
                beyond_ram,
            }),
            None => Err(BenchError::Programs(format!(
                "the kernel did not run {} to its end ({}): {}",
                program.name,
                output.status,
                String::from_utf8_lossy(&output.stderr).trim()
            ))),
        }
    }
}

/// Waits for the end; the most memory that was seen beyond the guest's RAM, which is one mapping
/// of its size.
fn watch(child: &mut Child) -> Result<u64, BenchError> {
    let maps = format!("/proc/{}/smaps", child.id());
    let mut most = 0;
    while child.try_wait().map_err(BenchError::Memory)?.is_none() {
        // A process that ends meanwhile has none.
        let text = fs::read_to_string(&maps).unwrap_or_default();
        most = most.max(beyond_ram(&text, MEMORY_MIB << 10) << 10);
        sleep(LOOK);
    }
    Ok(most)
}

/// KiB in memory (proc_pid_smaps(5)) of all mappings but those of `ram` KiB.
fn beyond_ram(smaps: &str, ram: u64) -> u64 {
    let figure = |line: &str, name: &str| -> Option<u64> {
        let rest = line.strip_prefix(name)?.strip_prefix(':')?;
        rest.trim().strip_suffix("kB")?.trim().parse().ok()
    };
    let mut is_ram = false;
    let mut sum = 0;
    for line in smaps.lines() {
        if let Some(size) = figure(line, "Size") {
            is_ram = size == ram;
        } else if let Some(resident) = figure(line, "Rss").filter(|_| !is_ram) {
            sum += resident;
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guests_ram_does_not_count() {
        let smaps = "\
1000-2000 r-xp 00000000 08:01 12 /usr/bin/umpire
Size:              16384 kB
KernelPageSize:        4 kB
Rss:                9000 kB
Pss:                9000 kB
3000-4000 rw-s 00000000 00:01 13 /memfd:ram (deleted)
Size:             262144 kB
Rss:              200000 kB
5000-6000 rw-p 00000000 00:00 0
Size:                132 kB
Rss:                  24 kB
";
        assert_eq!(beyond_ram(smaps, 262_144), 9024);
        assert_eq!(beyond_ram("", 262_144), 0);
    }
}
