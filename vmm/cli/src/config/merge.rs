//! Flags over file over defaults, and the check of every value.

mod control;
mod reserve;

use std::fs;
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pmu_virt::{Source, Sources};
use toml::Spanned;

use super::error::{ConfigError, Origin, Place};
use super::file::ConfigFile;
use super::{
    CPUS, DEFAULT_CPUS, DEFAULT_MEMORY_MIB, DEFAULT_SLICE_MS, MEMORY_MIB, PMI_FLOOR_US, SLICE_MS,
    TIMEOUT_S, VERBOSITY,
};
use crate::flags::RunFlags;
use vmm::config::{
    BootModule, CpuVendor, DEFAULT_PMI_FLOOR_US, FirmwareConfig, OversubscribeChoice, PmuChoice,
    RunConfig, Unpack,
};
use vmm::files::no_file;
use vmm::firmware::{CounterSpec, FirmwareChoice};
use vmm::sched::{CorePlan, CpuList};
use vmm::sys::allowed_cpus;

use control::{ControlGiven, control};
use reserve::{place, reservations, reserves};

/// A file under flags.
#[derive(Debug)]
pub(super) struct Merge {
    file: ConfigFile,
}

/// A value that was given, and where.
struct Given<T> {
    value: T,
    place: Place,
}

/// Takes a setting from the flag if it was given, else from the file's key.
macro_rules! given {
    ($self:ident, $flags:ident, $field:ident, $key:literal) => {
        $self.choose($key, &$flags.$field, &$self.file.keys.$field)
    };
}

impl Merge {
    pub(super) fn new(file: ConfigFile) -> Self {
        Self { file }
    }

    /// One line per option, in the order of the help.
    pub(super) fn into_config(self, flags: &RunFlags) -> Result<RunConfig, ConfigError> {
        let kernel = self.path(given!(self, flags, kernel, "kernel"));
        let initrd = self.path(given!(self, flags, initrd, "initrd"));
        let cmdline = given!(self, flags, cmdline, "cmdline");
        let modules = given!(self, flags, module, "module");
        let memory = given!(self, flags, memory, "memory");
        let cpus = given!(self, flags, cpus, "cpus");
        let cores = given!(self, flags, cores, "cores");
        let slice = given!(self, flags, slice, "slice");
        let pin = given!(self, flags, pin, "pin");
        let pmu = given!(self, flags, pmu, "pmu");
        let counters = given!(self, flags, counters, "counters");
        let oversubscribe = given!(self, flags, oversubscribe, "oversubscribe");
        let cpu_vendor = given!(self, flags, cpu_vendor, "cpu-vendor");
        let hidden = given!(self, flags, hide_feature, "hide-feature");
        let unpack = given!(self, flags, unpack, "unpack");
        let pmi_floor = given!(self, flags, pmi_floor, "pmi-floor");
        let pcr = given!(self, flags, pcr, "pcr");
        let policy = given!(self, flags, policy, "policy");
        let scheme = given!(self, flags, scheme, "scheme");
        let grace = given!(self, flags, grace, "grace");
        let hypervisor = given!(self, flags, hypervisor_counters, "hypervisor-counters");
        let follows = given!(self, flags, cpuid_follows_grants, "cpuid-follows-grants");
        let audit = self.path(given!(self, flags, audit, "audit"));
        let timeout = given!(self, flags, timeout, "timeout");
        let firmware = given!(self, flags, firmware, "firmware");
        let firmware_counters = given!(self, flags, firmware_counter, "firmware-counter");
        let save = self.path(given!(self, flags, save_on_exit, "save-on-exit"));
        let restore = self.path(given!(self, flags, restore, "restore"));
        let tools = ControlGiven {
            socket: self.path(given!(self, flags, control, "control")),
            mode: given!(self, flags, control_mode, "control-mode"),
            group: given!(self, flags, control_group, "control-group"),
            connections: given!(self, flags, control_connections, "control-connections"),
            policy: given!(self, flags, host_policy, "host-policy"),
            rate: given!(self, flags, sampling_rate_max, "sampling-rate-max"),
        };
        let log_file = self.path(given!(self, flags, log_file, "log-file"));
        let louder = (flags.verbose > 0).then(|| flags.verbose.min(*VERBOSITY.end()).into());
        let verbose = self.choose("verbose", &louder, &self.file.keys.verbose);

        let cpus = or_default(cpus, |g| small(g, CPUS, "vCPUs"))?.unwrap_or(DEFAULT_CPUS);
        let pmu = or_default(pmu, model)?.unwrap_or_default();
        needs_pmu(&pmu, [&save, &restore])?;
        let asked = [
            place(&scheme),
            place(&policy),
            place(&grace),
            place(&hypervisor),
            place(&follows),
            place(&audit),
            place(&firmware_counters),
        ];
        let pcr = match reserves(&pmu, pcr, asked)? {
            true => Some(reservations((policy, grace), scheme, hypervisor, follows)?),
            false => None,
        };
        let tools = control(tools, &pmu)?;
        let floor = or_default(pmi_floor, |g| number(g, PMI_FLOOR_US, "microseconds"))?;
        Ok(RunConfig {
            kernel: kernel.map(readable).ok_or(ConfigError::NoKernel)??,
            initrd: initrd.map(readable).transpose()?,
            cmdline: cmdline.map(text).transpose()?,
            modules: or_default(modules, |g| self.modules(g))?.unwrap_or_default(),
            memory_mib: or_default(memory, |g| number(g, MEMORY_MIB, "MiB"))?
                .unwrap_or(DEFAULT_MEMORY_MIB),
            cpus,
            cores: core_plan(cpus, cores, slice)?,
            pin: or_default(pin, cpu_list)?,
            pmu,
            counters: or_default(counters, |g| self.sources(g))?.unwrap_or_else(Sources::auto),
            oversubscribe: or_default(oversubscribe, |g| {
                choice(g, OversubscribeChoice::parse, OversubscribeChoice::ALLOWED)
            })?
            .unwrap_or_default(),
            cpu_vendor: or_default(cpu_vendor, |g| {
                choice(g, CpuVendor::parse, CpuVendor::ALLOWED)
            })?
            .unwrap_or_default(),
            hidden_features: or_default(hidden, features)?.unwrap_or_default(),
            unpack: or_default(unpack, |g| choice(g, Unpack::parse, Unpack::ALLOWED))?
                .unwrap_or_default(),
            pmi_floor: Duration::from_micros(floor.unwrap_or(DEFAULT_PMI_FLOOR_US)),
            pcr,
            audit: audit.map(appendable).transpose()?,
            timeout: or_default(timeout, seconds)?,
            firmware: self.firmware(firmware, firmware_counters)?,
            save_on_exit: save.map(writable).transpose()?,
            restore: restore.map(readable).transpose()?,
            control: tools,
            verbose: or_default(verbose, |g| {
                small(g, VERBOSITY, "(0 warnings, 3 everything)")
            })?
            .unwrap_or(0),
            log_file: log_file.map(|g| g.value),
        })
    }

    fn choose<T: Clone>(
        &self,
        key: &'static str,
        flag: &Option<T>,
        file: &Option<Spanned<T>>,
    ) -> Option<Given<T>> {
        let flag = flag.as_ref().map(|value| Given {
            value: value.clone(),
            place: Place {
                key,
                origin: Origin::Flag,
            },
        });
        flag.or_else(|| {
            file.as_ref().map(|spanned| Given {
                value: spanned.get_ref().clone(),
                place: self.file.place(key, spanned.span().start),
            })
        })
    }

    /// Paths of the file are relative to it, paths of flags to the current folder.
    fn path(&self, given: Option<Given<PathBuf>>) -> Option<Given<PathBuf>> {
        given.map(|given| Given {
            value: self.anchor(&given.place, given.value),
            place: given.place,
        })
    }

    fn anchor(&self, place: &Place, path: PathBuf) -> PathBuf {
        match place.origin {
            Origin::Flag => path,
            Origin::File { .. } => self.file.resolve(path),
        }
    }

    fn sources(&self, given: Given<String>) -> Result<Sources, ConfigError> {
        let place = given.place;
        let sources = Sources::parse(&given.value).map_err(|source| ConfigError::Backend {
            place: place.clone(),
            source,
        })?;
        let sources = sources.map_files(|path| self.anchor(&place, path));
        for source in sources.iter() {
            if let Source::Sim { rates } = source {
                open(&place, rates)?;
            }
        }
        Ok(sources)
    }

    /// `--firmware` and `--firmware-counter`: counters want somebody to reserve them.
    fn firmware(
        &self,
        image: Option<Given<PathBuf>>,
        counters: Option<Given<Vec<String>>>,
    ) -> Result<FirmwareConfig, ConfigError> {
        let image = or_default(image, |g| self.firmware_image(g))?.unwrap_or_default();
        let counters = match counters {
            Some(given) if image == FirmwareChoice::None && !given.value.is_empty() => {
                return Err(ConfigError::NoFirmware { place: given.place });
            }
            Some(given) => counter_specs(&given)?,
            None => Vec::new(),
        };
        Ok(FirmwareConfig { image, counters })
    }

    fn firmware_image(&self, given: Given<PathBuf>) -> Result<FirmwareChoice, ConfigError> {
        match given.value.to_str() {
            Some("none") => Ok(FirmwareChoice::None),
            Some("builtin") if firmware::image().is_none() => {
                Err(ConfigError::NoBuiltinFirmware { place: given.place })
            }
            Some("builtin") => Ok(FirmwareChoice::Builtin),
            _ => {
                let path = self.anchor(&given.place, given.value);
                open(&given.place, &path)?;
                Ok(FirmwareChoice::File(path))
            }
        }
    }

    fn modules(&self, given: Given<Vec<String>>) -> Result<Vec<BootModule>, ConfigError> {
        let place = given.place;
        let one = |value: String| {
            no_nul(&place, &value)?;
            let Some(module) = BootModule::parse(&value) else {
                return Err(ConfigError::EmptyModule {
                    place: place.clone(),
                    value,
                });
            };
            let path = self.anchor(&place, module.path);
            open(&place, &path)?;
            Ok(BootModule { path, ..module })
        };
        given.value.into_iter().map(one).collect()
    }
}

fn or_default<T, U>(
    given: Option<Given<T>>,
    check: impl FnOnce(Given<T>) -> Result<U, ConfigError>,
) -> Result<Option<U>, ConfigError> {
    given.map(check).transpose()
}

fn number(
    given: Given<i64>,
    range: RangeInclusive<u64>,
    unit: &'static str,
) -> Result<u64, ConfigError> {
    u64::try_from(given.value)
        .ok()
        .filter(|value| range.contains(value))
        .ok_or_else(|| ConfigError::Range {
            place: given.place,
            value: given.value.to_string(),
            least: *range.start(),
            most: *range.end(),
            unit,
        })
}

/// As [`number`], in 8 bits.
fn small(
    given: Given<i64>,
    range: RangeInclusive<u8>,
    unit: &'static str,
) -> Result<u8, ConfigError> {
    let wide = u64::from(*range.start())..=u64::from(*range.end());
    number(given, wide, unit).map(|value| u8::try_from(value).unwrap_or(*range.end()))
}

/// `--cores` and `--slice`: the latter means nothing without the former.
fn core_plan(
    cpus: u8,
    cores: Option<Given<i64>>,
    slice: Option<Given<i64>>,
) -> Result<Option<CorePlan>, ConfigError> {
    let Some(cores) = cores else {
        return match slice {
            None => Ok(None),
            Some(slice) => Err(ConfigError::SliceWithoutCores { place: slice.place }),
        };
    };
    let cores = small(cores, 1..=cpus, "cores, no more than --cpus")?;
    let slice = or_default(slice, |g| number(g, SLICE_MS, "milliseconds"))?;
    let slice = Duration::from_millis(slice.unwrap_or(DEFAULT_SLICE_MS));
    Ok(Some(CorePlan { cores, slice }))
}

/// A list of host CPUs on which this process may run.
fn cpu_list(given: Given<String>) -> Result<CpuList, ConfigError> {
    let place = given.place;
    let allowed = allowed_cpus().unwrap_or_default();
    CpuList::parse(&given.value)
        .and_then(|list| list.check(&allowed).map(|()| list))
        .map_err(|source| ConfigError::CpuList { place, source })
}

fn seconds(given: Given<f64>) -> Result<Duration, ConfigError> {
    Duration::try_from_secs_f64(given.value)
        .ok()
        .filter(|d| !d.is_zero() && *d <= Duration::from_secs(*TIMEOUT_S.end()))
        .ok_or_else(|| ConfigError::Range {
            place: given.place,
            value: given.value.to_string(),
            least: *TIMEOUT_S.start(),
            most: *TIMEOUT_S.end(),
            unit: "seconds (more than 0)",
        })
}

fn choice<T>(
    given: Given<String>,
    parse: impl FnOnce(&str) -> Option<T>,
    allowed: &'static str,
) -> Result<T, ConfigError> {
    parse(&given.value).ok_or(ConfigError::Choice {
        place: given.place,
        value: given.value,
        allowed,
    })
}

fn model(given: Given<String>) -> Result<PmuChoice, ConfigError> {
    let place = given.place;
    if given.value.starts_with("auto,") || given.value.starts_with("none,") {
        return Err(ConfigError::Choice {
            place,
            value: given.value,
            allowed: "auto or none alone, or a model by name with its properties",
        });
    }
    PmuChoice::parse(&given.value).map_err(|source| ConfigError::Model {
        place,
        source: Box::new(source),
    })
}

fn counter_specs(given: &Given<Vec<String>>) -> Result<Vec<CounterSpec>, ConfigError> {
    let one = |text: &String| {
        CounterSpec::parse(text).map_err(|source| ConfigError::FirmwareCounter {
            place: given.place.clone(),
            source: Box::new(source),
        })
    };
    given.value.iter().map(one).collect()
}

fn features(given: Given<Vec<String>>) -> Result<Vec<vmm::cpuid::Feature>, ConfigError> {
    let one = |name: &String| {
        name.parse().map_err(|source| ConfigError::Feature {
            place: given.place.clone(),
            source,
        })
    };
    given.value.iter().map(one).collect()
}

fn text(given: Given<String>) -> Result<String, ConfigError> {
    no_nul(&given.place, &given.value)?;
    Ok(given.value)
}

fn no_nul(place: &Place, text: &str) -> Result<(), ConfigError> {
    if text.contains('\0') {
        return Err(ConfigError::NulInText {
            place: place.clone(),
        });
    }
    Ok(())
}

fn readable(given: Given<PathBuf>) -> Result<PathBuf, ConfigError> {
    open(&given.place, &given.value)?;
    Ok(given.value)
}

/// Checks that a file could be made, or replaced.
fn writable(given: Given<PathBuf>) -> Result<PathBuf, ConfigError> {
    match vmm::machine::probe_state_file(&given.value) {
        Ok(()) => Ok(given.value),
        Err(cause) => Err(ConfigError::Write {
            place: given.place,
            path: given.value,
            cause,
        }),
    }
}

/// Without a PMU there is no state of one.
fn needs_pmu(pmu: &PmuChoice, states: [&Option<Given<PathBuf>>; 2]) -> Result<(), ConfigError> {
    match (pmu, states.into_iter().flatten().next()) {
        (PmuChoice::None, Some(given)) => Err(ConfigError::StateWithoutPmu {
            place: given.place.clone(),
        }),
        _ => Ok(()),
    }
}

/// Checks that a file could be written to: it is there and open to us, or could
/// be made. It is not touched before the guest starts.
fn appendable(given: Given<PathBuf>) -> Result<PathBuf, ConfigError> {
    let path = &given.value;
    let there = match no_file(path) {
        Ok(Some(what)) => {
            return Err(ConfigError::NotAFile {
                place: given.place,
                path: given.value,
                what,
            });
        }
        Ok(None) => fs::OpenOptions::new().append(true).open(path).map(drop),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            vmm::machine::probe_state_file(path)
        }
        Err(error) => Err(error),
    };
    match there {
        Ok(()) => Ok(given.value),
        Err(cause) => Err(ConfigError::Write {
            place: given.place,
            path: given.value,
            cause,
        }),
    }
}

/// Checks that a file is there and can be read. Its kind is looked at before it
/// is opened: opening a FIFO would wait for a writer.
fn open(place: &Place, path: &Path) -> Result<(), ConfigError> {
    let failed = |cause| ConfigError::Open {
        place: place.clone(),
        path: path.to_owned(),
        cause,
    };
    if let Some(what) = no_file(path).map_err(failed)? {
        return Err(ConfigError::NotAFile {
            place: place.clone(),
            path: path.to_owned(),
            what,
        });
    }
    fs::File::open(path).map(drop).map_err(failed)
}
