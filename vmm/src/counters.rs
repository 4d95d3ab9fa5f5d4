//! From the words of `--counters` to backends that count.
//!
//! [`CounterPlan::prepare`] asks the host and reads files, once, before the
//! guest starts; [`CounterPlan::open`] makes the backend of one core.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use pmu_virt::{
    BackendEnv, BackendError, ClockBackend, CombinedBackend, CountRequest, CounterBackend,
    EmuBackend, EmuCycles, EventFamily, MsrBackend, MsrOptions, RateError, RateTable, SimBackend,
    SimClocks, Source, Sources, StepBackend, Vendor, perf,
};
use thiserror::Error;
use umpire_events::BackendUse;

use crate::files::{no_file, read_text};
use crate::host::CpuFacts;
use crate::sys::{allowed_cpus, kick_signal, while_on_cpu};
use crate::vcpu::StepSupport;

/// Bytes of the largest table of rates: some thousand events.
const LARGEST_TABLE: u64 = 1 << 20;

/// Counters cannot be had as asked.
#[derive(Debug, Error)]
pub enum CounterError {
    /// A table of rates cannot be read.
    #[error("cannot read the table of rates {}: {cause}", path.display())]
    ReadRates {
        path: PathBuf,
        /// Why; in the text already, so no source.
        cause: std::io::Error,
    },
    /// A name for a table of rates that is something else.
    #[error("the table of rates {} is {what}, not a file", path.display())]
    NotAFile {
        /// The name.
        path: PathBuf,
        /// What is there.
        what: &'static str,
    },
    /// Nobody writes such a table.
    #[error("the table of rates {} is larger than {} KiB", path.display(), LARGEST_TABLE >> 10)]
    LargeRates { path: PathBuf },
    /// A table of rates makes no sense.
    #[error(transparent)]
    Rates(#[from] RateError),
    /// A backend cannot be used.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The physical registers belong to one CPU.
    #[error(
        "--counters msr: the registers are those of one host CPU, and {cores} threads run vCPUs; \
         give --cores 1"
    )]
    OneCore {
        /// Threads that run vCPUs.
        cores: usize,
    },
    /// The thread is to be on another CPU than its registers.
    #[error("--counters msr={msr}: --pin keeps the vCPUs on host CPU {pinned}; give both the same")]
    Elsewhere {
        /// The CPU whose registers are asked for.
        msr: u32,
        /// The CPU of `--pin`.
        pinned: usize,
    },
    /// The CPU of the registers cannot be run on.
    #[error(
        "--counters msr: a thread cannot be kept on host CPU {cpu}: {error} (see `taskset -p $$`)"
    )]
    Pin {
        cpu: usize,
        error: vmm_sys_util::errno::Error,
    },
    /// There is no CPU to run on.
    #[error("sched_getaffinity failed: {0}")]
    Affinity(vmm_sys_util::errno::Error),
}

/// A source that is ready to be opened.
#[derive(Clone, Debug)]
enum Ready {
    Perf,
    Clock,
    Step,
    Emu(EmuCycles),
    Sim(SimClocks),
    Msr(MsrOptions),
}

/// Which sources count, in order of preference, on this host.
///
/// The backends that one plan opens are those of one machine's cores: where
/// counts are made up, they share the virtual time of its vCPUs.
#[derive(Clone, Debug)]
pub struct CounterPlan {
    sources: Sources,
    ready: Vec<Ready>,
    env: BackendEnv,
}

impl CounterPlan {
    /// Looks at the host and at the files that `sources` name. `cores` threads
    /// will run vCPUs; the first of them on host CPU `pinned`, if there is one.
    ///
    /// # Errors
    /// [`CounterError`] says what is wrong and what to do.
    pub fn prepare(
        sources: &Sources,
        env: BackendEnv,
        cores: usize,
        pinned: Option<usize>,
    ) -> Result<Self, CounterError> {
        let sources = on_this_host(sources);
        let mut ready = Vec::new();
        for source in sources.iter() {
            ready.push(match source {
                // `on_this_host` leaves no `auto`.
                Source::Auto | Source::Clock => Ready::Clock,
                Source::Perf => Ready::Perf,
                Source::Step => Ready::Step,
                Source::Emu => return Err(of_other_engine(source).into()),
                Source::Sim { rates } => sim(rates, &env)?,
                Source::Msr { cpu, force } => {
                    let cpu = msr_cpu(*cpu, cores, pinned)?;
                    Ready::Msr(MsrOptions { cpu, force: *force })
                }
            });
        }
        Ok(Self {
            sources,
            ready,
            env,
        })
    }

    /// The same for a machine whose vCPUs are processors in software, which count `cycles` so.
    /// What the host counts, it counts of Umpire there and of no guest.
    ///
    /// # Errors
    /// A source is the host's, or its file cannot be read.
    pub fn emulated(
        sources: &Sources,
        env: BackendEnv,
        cycles: EmuCycles,
    ) -> Result<Self, CounterError> {
        let mut ready = Vec::new();
        for source in sources.iter() {
            ready.push(match source {
                Source::Auto | Source::Emu => Ready::Emu(cycles),
                Source::Sim { rates } => sim(rates, &env)?,
                Source::Perf | Source::Clock | Source::Step | Source::Msr { .. } => {
                    return Err(of_other_engine(source).into());
                }
            });
        }
        Ok(Self {
            sources: sources.emulated(),
            ready,
            env,
        })
    }

    /// This plan for another machine, whose vCPUs have run for no time yet.
    #[must_use]
    pub fn anew(&self) -> Self {
        let source = |source: &Ready| match source {
            Ready::Sim(clocks) => Ready::Sim(clocks.anew()),
            other => other.clone(),
        };
        Self {
            sources: self.sources.clone(),
            ready: self.ready.iter().map(source).collect(),
            env: self.env,
        }
    }

    /// The backend of one core, which may be moved to the core's thread until it
    /// counts: some sources count for the thread that programs them.
    ///
    /// # Errors
    /// The host does not let us use a source that was asked for.
    pub fn open(&self) -> Result<Box<dyn CounterBackend>, CounterError> {
        match self.needs_cpu() {
            Some(cpu) => while_on_cpu(cpu, || self.open_here())
                .map_err(|error| CounterError::Pin { cpu, error })?,
            None => self.open_here(),
        }
    }

    fn open_here(&self) -> Result<Box<dyn CounterBackend>, CounterError> {
        let one = |source: &Ready| -> Result<Box<dyn CounterBackend>, BackendError> {
            Ok(match source {
                Ready::Perf => Box::new(perf::PerfBackend::new(&self.env)?),
                Ready::Clock => Box::new(ClockBackend::new()),
                Ready::Step => Box::new(StepBackend::on(&self.env)),
                Ready::Emu(cycles) => Box::new(EmuBackend::new(*cycles)),
                Ready::Sim(clocks) => Box::new(SimBackend::of(clocks)),
                Ready::Msr(options) => Box::new(MsrBackend::open(*options, &self.env)?),
            })
        };
        match self.ready.as_slice() {
            [only] => Ok(one(only)?),
            several => {
                let backends = several
                    .iter()
                    .map(one)
                    .collect::<Result<_, BackendError>>()?;
                Ok(Box::new(CombinedBackend::new(backends)))
            }
        }
    }

    /// The sources that count on this host.
    #[must_use]
    pub fn sources(&self) -> &Sources {
        &self.sources
    }

    /// The host CPU on which the core must stay, if a source wants that.
    #[must_use]
    pub fn needs_cpu(&self) -> Option<usize> {
        self.ready.iter().find_map(|source| match source {
            Ready::Msr(options) => usize::try_from(options.cpu).ok(),
            _ => None,
        })
    }
}

/// What a backend must know of this host: the guest's TSC frequency, the vendor
/// of the processor, and what single steps do.
#[must_use]
pub fn backend_env(tsc_khz: u32, host_vendor: Option<Vendor>, step: StepSupport) -> BackendEnv {
    BackendEnv {
        tsc_khz,
        host_vendor,
        host_events: host_vendor.and_then(host_events),
        overflow_signal: kick_signal(),
        steps_cpl3: step.user,
    }
}

/// Vendor of this host's processor, if it is one whose PMU we know.
#[must_use]
pub fn host_vendor() -> Option<Vendor> {
    match CpuFacts::read(Path::new("/")).vendor.as_deref() {
        Some("GenuineIntel") => Some(Vendor::Intel),
        Some("AuthenticAMD") => Some(Vendor::Amd),
        _ => None,
    }
}

/// Whose event codes this host's processor, which is `vendor`'s, takes.
fn host_events(vendor: Vendor) -> Option<EventFamily> {
    let (family, model) = CpuFacts::read(Path::new("/")).signature?;
    EventFamily::of_processor(vendor, family, model)
}

/// The names of what `auto` stands for on this host.
pub fn auto_names() -> Vec<&'static str> {
    on_this_host(&Sources::auto())
        .iter()
        .map(Source::name)
        .collect()
}

/// The backends that can be made without anything but this host and that can
/// count `request`. The physical registers are not among them: looking at them
/// would mean to take them.
#[must_use]
pub fn backends_for(request: &CountRequest) -> Vec<BackendUse> {
    let use_of = |backend| {
        let provenance = plain(backend)?.plan(request).ok()?.provenance.to_string();
        Some(BackendUse {
            backend,
            provenance,
        })
    };
    ["clock", "step", "emu", "perf"]
        .into_iter()
        .filter_map(use_of)
        .collect()
}

/// The backend called `name`, if it can be had. Whether it can count something
/// does not depend on the TSC's frequency. What KVM's single steps can do is not
/// looked for here: `umpire doctor` tells.
fn plain(name: &str) -> Option<Box<dyn CounterBackend>> {
    const ANY_KHZ: u32 = 1_000_000;
    if name == "emu" {
        return Some(Box::new(EmuBackend::new(EmuCycles::Unavailable)));
    }
    let sources = Sources::parse(name).ok()?;
    let env = backend_env(ANY_KHZ, host_vendor(), StepSupport::FULL);
    CounterPlan::prepare(&sources, env, 1, None)
        .ok()?
        .open()
        .ok()
}

/// What the words stand for on this host.
#[must_use]
pub fn on_this_host(sources: &Sources) -> Sources {
    sources.on_host(|| perf::probe().hardware.is_ok())
}

/// A source of the other engine.
fn of_other_engine(source: &Source) -> BackendError {
    let reason = match source {
        Source::Emu => "it counts what the processor of --engine emu executes; give that as well",
        Source::Step => "--engine emu executes each instruction itself; give --counters emu",
        _ => {
            "it counts what the host's processor does, and --engine emu has its own; give \
             --counters emu"
        }
    };
    BackendError::Cannot {
        backend: source.name(),
        reason: reason.to_owned(),
    }
}

fn sim(rates: &Path, env: &BackendEnv) -> Result<Ready, CounterError> {
    Ok(Ready::Sim(SimClocks::new(read_rates(rates)?, env.tsc_khz)))
}

/// Reads a table of rates. What is at `path` is looked at before it is opened:
/// opening a FIFO would wait for a writer, and a device may have no end.
fn read_rates(path: &Path) -> Result<RateTable, CounterError> {
    let failed = |cause| CounterError::ReadRates {
        path: path.to_owned(),
        cause,
    };
    if let Some(what) = no_file(path).map_err(failed)? {
        let path = path.to_owned();
        return Err(CounterError::NotAFile { path, what });
    }
    let text = read_text(path, LARGEST_TABLE).map_err(|cause| match cause.kind() {
        ErrorKind::FileTooLarge => CounterError::LargeRates {
            path: path.to_owned(),
        },
        _ => failed(cause),
    })?;
    Ok(RateTable::parse(&text, &path.display().to_string())?)
}

/// The CPU whose registers count.
fn msr_cpu(asked: Option<u32>, cores: usize, pinned: Option<usize>) -> Result<u32, CounterError> {
    if cores != 1 {
        return Err(CounterError::OneCore { cores });
    }
    let here = match pinned {
        Some(cpu) => Some(cpu),
        None => allowed_cpus()
            .map_err(CounterError::Affinity)?
            .first()
            .copied(),
    };
    let here = here.and_then(|cpu| u32::try_from(cpu).ok()).unwrap_or(0);
    match (asked, pinned) {
        (Some(msr), Some(pinned)) if here != msr => Err(CounterError::Elsewhere { msr, pinned }),
        (Some(msr), _) => Ok(msr),
        (None, _) => Ok(here),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pmu_virt::{
        EventCode, EventFamily, FixedFunction, OwnerId, Progress, Reading, SlotIndex, Ticks, Tsc,
    };

    fn prepare(text: &str, cores: usize, pinned: Option<usize>) -> Result<CounterPlan, String> {
        let sources = Sources::parse(text).map_err(|error| error.to_string())?;
        let env = backend_env(1_000_000, None, StepSupport::FULL);
        CounterPlan::prepare(&sources, env, cores, pinned).map_err(|error| error.to_string())
    }

    #[test]
    fn several_sources_are_opened_as_one() {
        let plan = prepare("clock,step", 2, None).unwrap();
        assert_eq!(plan.open().unwrap().name(), "combined");
        let plan = prepare("step", 2, None).unwrap();
        assert_eq!(plan.open().unwrap().name(), "step");
    }

    #[test]
    fn auto_always_has_the_clock_and_never_steps() {
        let plan = prepare("auto", 1, None).unwrap();
        let names: Vec<_> = plan.sources().iter().map(Source::name).collect();
        assert_eq!(names, auto_names());
        assert!(names.ends_with(&["clock"]), "{names:?}");
        assert!(!names.contains(&"step"), "{names:?}");
    }

    /// Whatever the host's kernel counts, a guest has cycles.
    #[test]
    fn perf_counts_cycles_if_it_can_be_opened() {
        let plan = prepare("perf", 1, None).unwrap();
        let hardware = perf::probe().hardware.is_ok();
        let expected = if hardware { "perf" } else { "perf,clock" };
        assert_eq!(plan.sources().to_string(), expected);
        match plan.open() {
            Ok(backend) => {
                let cycles = CountRequest::decode(EventFamily::Intel, 0x53_003c);
                assert!(backend.plan(&cycles).is_ok(), "{backend:?}");
            }
            // The word means that the kernel counts what it can: without it there is
            // no plain clock.
            Err(error) => assert_eq!(
                error.to_string(),
                perf::PerfBackend::new(&plan.env).unwrap_err().to_string()
            ),
        }
    }

    #[test]
    fn a_table_of_rates_that_cannot_be_used_is_named() {
        let error = prepare("sim=/no/such/table.toml", 1, None).unwrap_err();
        assert!(error.contains("/no/such/table.toml"), "{error}");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "counters = 4\nnonsense = 1\n").unwrap();
        let error = prepare(&format!("sim={}", file.path().display()), 1, None).unwrap_err();
        assert!(error.contains(":2: "), "{error}");
    }

    /// A FIFO without a writer, and a file without an end, are not waited for.
    #[test]
    fn only_a_plain_file_is_read_as_a_table_of_rates() {
        let error = prepare("sim=/dev/zero", 1, None).unwrap_err();
        assert!(
            error.ends_with("/dev/zero is a device, not a file"),
            "{error}"
        );
        let folder = tempfile::tempdir().unwrap();
        let error = prepare(&format!("sim={}", folder.path().display()), 1, None).unwrap_err();
        assert!(error.ends_with("is a folder, not a file"), "{error}");
        let long = tempfile::NamedTempFile::new().unwrap();
        long.as_file().set_len(LARGEST_TABLE + 1).unwrap();
        let error = prepare(&format!("sim={}", long.path().display()), 1, None).unwrap_err();
        assert!(error.ends_with("is larger than 1024 KiB"), "{error}");
    }

    #[test]
    fn cores_of_one_machine_share_the_time_of_its_vcpus() {
        let file = tempfile::NamedTempFile::new().unwrap();
        // The first microsecond of a second counts, the rest does not.
        let phases = "[{ us = 1, rate = 7 }, { us = 999999, rate = 0 }]";
        let table = format!("[event.instructions]\nphases = {phases}\n");
        std::fs::write(file.path(), table).unwrap();
        let plan = prepare(&format!("sim={}", file.path().display()), 2, None).unwrap();
        let first_us = |plan: &CounterPlan| {
            let mut backend = plan.open().unwrap();
            let event = EventCode::Fixed(FixedFunction::Instructions);
            let request = CountRequest::plain(event, true, true);
            backend.attach(OwnerId(3));
            backend.program(SlotIndex(0), &request).unwrap();
            backend.start(SlotIndex(0));
            backend.observe(&Progress::Entered { tsc: Tsc(0) });
            backend.observe(&Progress::Left {
                tsc: Tsc(1_000),
                halted: Ticks(0),
                ring: None,
            });
            match backend.read(SlotIndex(0)) {
                Reading::Counted { value, .. } => value,
                Reading::Unavailable(reason) => panic!("{reason}"),
            }
        };
        assert_eq!(first_us(&plan), 7);
        assert_eq!(first_us(&plan), 0, "another core");
        assert_eq!(first_us(&plan.anew()), 7, "another machine");
    }

    #[test]
    fn physical_registers_serve_one_core_on_their_cpu() {
        let cpu = |text: &str, pinned| prepare(text, 1, pinned).unwrap().needs_cpu();
        assert_eq!(cpu("msr=3", None), Some(3));
        assert_eq!(cpu("msr", Some(5)), Some(5));
        assert_eq!(cpu("msr=5", Some(5)), Some(5));
        assert_eq!(cpu("clock", Some(5)), None);
        let error = prepare("msr", 2, None).unwrap_err();
        assert!(error.contains("--cores 1"), "{error}");
        let error = prepare("msr=3", 1, Some(5)).unwrap_err();
        assert!(error.contains("host CPU 5"), "{error}");
    }
}
