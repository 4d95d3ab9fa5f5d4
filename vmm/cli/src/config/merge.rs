//! From flags and a file to the configuration: flags over file over defaults.

use std::path::{Path, PathBuf};
use std::time::Duration;

use arbiter::Scheme;
use pmu_virt::perfmon::HostPolicy;
use pmu_virt::{EventFilters, EventProfile, Source, Sources};
use umpire_tools::stat::spec::EventList;
use vmm::config::{
    self, BootModule, BudgetChoice, CpuVendor, CyclesChoice, EngineChoice, EngineConfig,
    FirmwareConfig, FollowsGrants, HypervisorCounters, OversubscribeChoice, PcrChoice, PmuChoice,
    RunConfig, UnpackChoice,
};
use vmm::files::read_text;
use vmm::firmware::{CounterSpec, FirmwareChoice};
use vmm::sched::CorePlan;
use vmm_control::{ARG_SIZES, ControlConfig};

use super::error::{ConfigError, Origin, Place, SettingError};
use super::file::ConfigFile;
use super::policy;
use super::values::{
    appendable, choice, cpu_list, model, number, octal, on_or_off, readable, seconds, small, text,
    trap_mode, vm_name, writable,
};
use super::{
    BUFFERS_KIB, CONNECTIONS, CONTEXTS, CPUS, DEFAULT_CPUS, DEFAULT_MEMORY_MIB, DEFAULT_SLICE_MS,
    FIRMWARE_DELAY_MS, GRACE_MS, GROUPS, MEMORY_MIB, PMI_FLOOR_US, RATES, SEEDS, SLICE_MS,
    Settings, StartTools, VERBOSITY,
};
use crate::flags::RunFlags;
use crate::host::terms_of;
use crate::lease::{AUDIT_OF_HOST, ArbiterChoice, Whom};
use crate::logging::LogOptions;

/// Bytes of the largest file of filters.
const LARGEST_FILTER: u64 = 1 << 20;

/// Flags over a file.
#[derive(Debug)]
pub(super) struct Merge<'a> {
    pub(super) flags: &'a RunFlags,
    pub(super) file: ConfigFile,
    /// Where VMs have their sockets that were given none.
    pub(super) sockets: Option<PathBuf>,
}

/// A value that was given, and where.
struct Given<T> {
    value: T,
    place: Place,
}

impl<T> Given<T> {
    /// The value, checked; an error says where it was given.
    fn check<U>(self, check: impl FnOnce(T) -> Result<U, SettingError>) -> Result<U, ConfigError> {
        let Self { value, place } = self;
        check(value).map_err(|source| ConfigError::setting(place, source))
    }

    /// What is wrong although the value itself is possible.
    fn wrong(&self, source: SettingError) -> ConfigError {
        ConfigError::setting(self.place.clone(), source)
    }
}

/// What was given of an option: by its flag, or else by the file's key.
macro_rules! given {
    ($merge:ident, $option:ident) => {
        $merge.pick(
            stringify!($option),
            &$merge.flags.$option,
            &$merge.file.options.$option,
        )
    };
}

/// The checked value of an option, if it was given.
macro_rules! checked {
    ($merge:ident, $option:ident, $check:expr) => {
        given!($merge, $option)
            .map(|given| given.check($check))
            .transpose()
    };
}

/// The place of an option, if it was given.
macro_rules! place {
    ($merge:ident, $option:ident) => {
        given!($merge, $option).map(|given| given.place)
    };
}

impl Merge<'_> {
    /// Options that others depend on come first, then all others in the order of
    /// the help.
    pub(super) fn into_settings(self) -> Result<Settings, ConfigError> {
        let mut run = self.run_config()?;
        let tools = self.start_tools(run.control.is_some())?;
        run.paused = tools.paused || tools.count() > 0;
        if let Some(control) = &mut run.control {
            control.own_tools = tools.count() > 0;
        }
        Ok(Settings {
            tools,
            arbiter: self.arbiter(&run.pmu)?,
            run,
            log: self.log_options()?,
        })
    }

    fn run_config(&self) -> Result<RunConfig, ConfigError> {
        let cpus = checked!(self, cpus, |n| small(n, CPUS, "vCPUs"))?.unwrap_or(DEFAULT_CPUS);
        let pmu = checked!(self, pmu, model)?.unwrap_or_default();
        self.some_need_pmu(&pmu)?;
        let pcr = self.reservations(&pmu)?;
        let events = self.events(&pmu)?;
        let control = self.control(&pmu)?.map(|control| ControlConfig {
            events: events.clone(),
            ..control
        });
        let floor = checked!(self, pmi_floor, |n| number(n, PMI_FLOOR_US, "microseconds"))?;
        let kernel = given!(self, kernel).ok_or(ConfigError::NoKernel)?;
        Ok(RunConfig {
            engine: self.engine()?,
            kernel: self.anchored(kernel).check(readable)?,
            initrd: self.file_option(given!(self, initrd), readable)?,
            cmdline: checked!(self, cmdline, text)?,
            modules: self.modules()?,
            memory_mib: checked!(self, memory, |n| number(n, MEMORY_MIB, "MiB"))?
                .unwrap_or(DEFAULT_MEMORY_MIB),
            cpus,
            cores: self.core_plan(cpus)?,
            pin: checked!(self, pin, cpu_list)?,
            pmu,
            counters: self.sources()?,
            events,
            oversubscribe: checked!(self, oversubscribe, |word| {
                choice(
                    word,
                    OversubscribeChoice::parse,
                    OversubscribeChoice::ALLOWED,
                )
            })?
            .unwrap_or_default(),
            budget: checked!(self, budget, |words| {
                let parse = |words: &str| BudgetChoice::parse(words, true);
                choice(words, parse, BudgetChoice::ALLOWED_AT_START)
            })?,
            lease: None,
            cpu_vendor: checked!(self, cpu_vendor, |word| {
                choice(word, CpuVendor::parse, CpuVendor::ALLOWED)
            })?
            .unwrap_or_default(),
            cpu_model: checked!(self, cpu_model, |word| {
                choice(word, config::cpu_model, config::CPU_MODELS)
            })?
            .flatten(),
            hidden_features: checked!(self, hide_feature, |names| {
                let features = names.iter().map(|name| Ok(name.parse()?));
                features.collect::<Result<_, SettingError>>()
            })?
            .unwrap_or_default(),
            unpack: checked!(self, unpack, |word| {
                choice(word, UnpackChoice::parse, UnpackChoice::ALLOWED)
            })?
            .unwrap_or_default(),
            rdpmc_trap: checked!(self, rdpmc_trap, trap_mode)?.unwrap_or_default(),
            pmi_floor: floor.map(Duration::from_micros),
            pcr,
            audit: self.audit()?,
            audit_out: None,
            timeout: checked!(self, timeout, seconds)?,
            firmware: self.firmware()?,
            save_on_exit: self.file_option(given!(self, save_on_exit), writable)?,
            restore: self.file_option(given!(self, restore), readable)?,
            agent: checked!(self, agent, on_or_off)?.unwrap_or_default(),
            control,
            paused: false,
        })
    }

    /// What runs the guest, and how its processor is if it is one in software.
    fn engine(&self) -> Result<EngineConfig, ConfigError> {
        let seed = checked!(self, seed, |n| number(n, SEEDS, "(a seed)"))?;
        let real_time = checked!(self, real_time, on_or_off)?;
        if let (Some(_), Some(true), Some(place)) = (seed, real_time, place!(self, seed)) {
            return Err(ConfigError::setting(place, SettingError::SeedInRealTime));
        }
        Ok(EngineConfig {
            choice: checked!(self, engine, |word| {
                choice(word, EngineChoice::parse, EngineChoice::ALLOWED)
            })?
            .unwrap_or_default(),
            cycles: checked!(self, cycles, |word| {
                choice(word, CyclesChoice::parse, CyclesChoice::ALLOWED)
            })?
            .unwrap_or_default(),
            seed,
            real_time,
        })
    }

    /// What counts from the guest's first instruction on. All of it needs the control
    /// socket.
    fn start_tools(&self, served: bool) -> Result<StartTools, ConfigError> {
        let events = |words: String| -> Result<Vec<EventList>, SettingError> {
            let list = Some(words).filter(|words| !words.is_empty());
            let list = list.map(|words| words.parse().map_err(SettingError::Events));
            Ok(list.transpose()?.into_iter().collect())
        };
        let tools = StartTools {
            stat: checked!(self, stat, events)?,
            record: given!(self, record).map(|given| self.anchored(given).value),
            paused: checked!(self, paused, on_or_off)?.unwrap_or_default(),
        };
        let places = [
            place!(self, stat),
            place!(self, record),
            place!(self, paused).filter(|_| tools.paused),
        ];
        match places.into_iter().flatten().next() {
            Some(place) if !served => Err(ConfigError::setting(place, SettingError::NoControl)),
            _ => Ok(tools),
        }
    }

    /// A file, or the word for the host's audit.
    fn audit(&self) -> Result<Option<PathBuf>, ConfigError> {
        let given = given!(self, audit);
        if given
            .as_ref()
            .is_some_and(|given| given.value == Path::new(AUDIT_OF_HOST))
        {
            return Ok(Some(PathBuf::from(AUDIT_OF_HOST)));
        }
        self.file_option(given, appendable)
    }

    /// Whom the VM asks for physical counters, and how.
    fn arbiter(&self, pmu: &PmuChoice) -> Result<ArbiterChoice, ConfigError> {
        let word = |path: &PathBuf| Whom::named(path.clone());
        let whom = given!(self, arbiter).map(|given| match word(&given.value) {
            Whom::At(_) => Whom::At(self.anchored(given).value),
            word => word,
        });
        let whom = whom.unwrap_or_default();
        let beside = place!(self, arbiter_shortage).or_else(|| place!(self, arbiter_terms));
        match (&whom, pmu, place!(self, arbiter), beside) {
            (Whom::Nobody, _, _, Some(place)) => {
                return Err(ConfigError::setting(place, SettingError::NoArbiter));
            }
            (Whom::At(_), PmuChoice::None, Some(place), _)
            | (_, PmuChoice::None, _, Some(place)) => {
                return Err(ConfigError::setting(place, SettingError::LeaseWithoutPmu));
            }
            _ => {}
        }
        let fewer = checked!(self, arbiter_shortage, |word| {
            let parse = |word: &str| match word {
                "refuse" => Some(false),
                "fewer" => Some(true),
                _ => None,
            };
            choice(word, parse, "refuse or fewer")
        })?;
        let terms = checked!(self, arbiter_terms, |text| {
            terms_of(&text).map_err(SettingError::LeaseTerms)
        })?;
        Ok(ArbiterChoice {
            whom,
            fewer,
            terms: terms.unwrap_or_default(),
        })
    }

    /// `--verbose` and `--log-file`.
    fn log_options(&self) -> Result<LogOptions, ConfigError> {
        Ok(LogOptions {
            verbose: self.verbose()?,
            file: self.file_option(given!(self, log_file), Ok)?,
        })
    }

    fn pick<T: Clone>(&self, option: &str, flag: &Option<T>, file: &Option<T>) -> Option<Given<T>> {
        let key = option.replace('_', "-");
        if let Some(value) = flag.clone() {
            let origin = Origin::Flag;
            let place = Place { key, origin };
            return Some(Given { value, place });
        }
        file.clone().map(|value| Given {
            value,
            place: self.file.place(key),
        })
    }

    /// Paths of the file are relative to it, paths of flags to the current folder.
    fn anchor(&self, place: &Place, path: PathBuf) -> PathBuf {
        match place.origin {
            Origin::Flag => path,
            Origin::File { .. } => self.file.resolve(path),
        }
    }

    fn anchored(&self, given: Given<PathBuf>) -> Given<PathBuf> {
        Given {
            value: self.anchor(&given.place, given.value),
            place: given.place,
        }
    }

    fn file_option(
        &self,
        given: Option<Given<PathBuf>>,
        check: impl FnOnce(PathBuf) -> Result<PathBuf, SettingError>,
    ) -> Result<Option<PathBuf>, ConfigError> {
        given
            .map(|given| self.anchored(given).check(check))
            .transpose()
    }

    fn modules(&self) -> Result<Vec<BootModule>, ConfigError> {
        let Some(given) = given!(self, module) else {
            return Ok(Vec::new());
        };
        let place = given.place.clone();
        let one = |value: String| {
            let value = text(value)?;
            let Some(module) = BootModule::parse(&value) else {
                return Err(SettingError::EmptyModule { value });
            };
            let path = readable(self.anchor(&place, module.path))?;
            Ok(BootModule { path, ..module })
        };
        given.check(|modules| modules.into_iter().map(one).collect())
    }

    /// `--cores` and `--slice`: the latter means nothing without the former.
    fn core_plan(&self, cpus: u8) -> Result<Option<CorePlan>, ConfigError> {
        let slice = given!(self, slice);
        let Some(cores) = given!(self, cores) else {
            return match slice {
                None => Ok(None),
                Some(slice) => Err(slice.wrong(SettingError::SliceWithoutCores)),
            };
        };
        let cores = cores.check(|n| small(n, 1..=cpus, "cores, no more than --cpus"))?;
        let slice = checked!(self, slice, |n| number(n, SLICE_MS, "milliseconds"))?;
        let slice = Duration::from_millis(slice.unwrap_or(DEFAULT_SLICE_MS));
        Ok(Some(CorePlan { cores, slice }))
    }

    fn sources(&self) -> Result<Sources, ConfigError> {
        let Some(given) = given!(self, counters) else {
            return Ok(Sources::auto());
        };
        let place = given.place.clone();
        given.check(|list| {
            let sources = Sources::parse(&list)?.map_files(|path| self.anchor(&place, path));
            for source in sources.iter() {
                if let Source::Sim { rates } = source {
                    readable(rates.clone())?;
                }
            }
            Ok(sources)
        })
    }

    /// `--event-filter`: a profile, or a file.
    fn events(&self, pmu: &PmuChoice) -> Result<EventFilters, ConfigError> {
        let Some(given) = given!(self, event_filter) else {
            return Ok(EventFilters::default());
        };
        if matches!(pmu, PmuChoice::None) {
            return Err(given.wrong(SettingError::FilterWithoutPmu));
        }
        let place = given.place.clone();
        given.check(|name| {
            if let Some(profile) = name.to_str().and_then(EventProfile::parse) {
                return Ok(EventFilters::of(profile));
            }
            let path = readable(self.anchor(&place, name))?;
            let text = read_text(&path, LARGEST_FILTER).map_err(|cause| SettingError::Open {
                path: path.clone(),
                cause,
            })?;
            EventFilters::parse(&text).map_err(|error| SettingError::Filter { path, error })
        })
    }

    /// `--firmware` and what it is to do: counters want somebody to reserve them.
    fn firmware(&self) -> Result<FirmwareConfig, ConfigError> {
        let image = given!(self, firmware).map(|given| {
            let place = given.place.clone();
            given.check(|name| self.firmware_image(&place, name))
        });
        let image = image.transpose()?.unwrap_or_default();
        let counters = match given!(self, firmware_counter) {
            Some(given) if image == FirmwareChoice::None && !given.value.is_empty() => {
                return Err(given.wrong(SettingError::NoFirmware));
            }
            Some(given) => given.check(|specs| {
                let spec = |text: &String| Ok(CounterSpec::parse(text).map_err(Box::new)?);
                specs.iter().map(spec).collect()
            })?,
            None => Vec::new(),
        };
        if let (FirmwareChoice::None, Some(given)) = (&image, given!(self, firmware_delay)) {
            return Err(given.wrong(SettingError::NoFirmware));
        }
        let delay = checked!(self, firmware_delay, |n| {
            number(n, FIRMWARE_DELAY_MS, "milliseconds")
        })?;
        let delay_ms = delay.and_then(|ms| u32::try_from(ms).ok());
        Ok(FirmwareConfig {
            image,
            counters,
            delay_ms: delay_ms.unwrap_or_default(),
        })
    }

    fn firmware_image(&self, place: &Place, name: PathBuf) -> Result<FirmwareChoice, SettingError> {
        match name.to_str() {
            Some("none") => Ok(FirmwareChoice::None),
            Some("builtin") if firmware::image().is_none() => Err(SettingError::NoBuiltinFirmware),
            Some("builtin") => Ok(FirmwareChoice::Builtin),
            _ => readable(self.anchor(place, name)).map(FirmwareChoice::File),
        }
    }

    /// Without a PMU there is no state of one and no budget of counters.
    fn some_need_pmu(&self, pmu: &PmuChoice) -> Result<(), ConfigError> {
        let state = given!(self, save_on_exit).or_else(|| given!(self, restore));
        match (pmu, state, place!(self, budget)) {
            (PmuChoice::None, Some(given), _) => Err(given.wrong(SettingError::StateWithoutPmu)),
            (PmuChoice::None, _, Some(place)) => {
                let source = SettingError::BudgetWithoutPmu;
                Err(ConfigError::setting(place, source))
            }
            _ => Ok(()),
        }
    }

    /// How counters are reserved, if they are. What is asked for beside it means
    /// nothing without.
    fn reservations(&self, pmu: &PmuChoice) -> Result<Option<PcrChoice>, ConfigError> {
        let asked_on = place!(self, pcr);
        let on = checked!(self, pcr, on_or_off)?;
        let beside = [
            place!(self, scheme),
            place!(self, policy),
            place!(self, grace),
            place!(self, hypervisor_counters),
            place!(self, cpuid_follows_grants),
            place!(self, audit),
            place!(self, firmware_counter),
        ];
        let beside = beside.into_iter().flatten().next();
        let (why, beside) = match (pmu, on) {
            (PmuChoice::None, Some(true)) => ("--pmu none", beside.or(asked_on)),
            (PmuChoice::None, _) => ("--pmu none", beside),
            (_, Some(false)) => ("--pcr off", beside),
            _ => return self.reserved().map(Some),
        };
        match beside {
            Some(place) => {
                let source = SettingError::NoReservations { why };
                Err(ConfigError::setting(place, source))
            }
            None => Ok(None),
        }
    }

    fn reserved(&self) -> Result<PcrChoice, ConfigError> {
        let policy = checked!(self, policy, |texts| Ok(policy::parse(&texts)?))?;
        let mut policy = policy.unwrap_or_default();
        let grace = checked!(self, grace, |n| number(n, GRACE_MS, "milliseconds"))?;
        if let Some(grace) = grace.and_then(|ms| u32::try_from(ms).ok()) {
            policy.grace_ms = grace;
        }
        let default = PcrChoice::default();
        Ok(PcrChoice {
            policy,
            scheme: checked!(self, scheme, |word| {
                choice(word, Scheme::named, "single, independent or interacting")
            })?
            .unwrap_or_default(),
            hypervisor: checked!(self, hypervisor_counters, |list| {
                choice(list, HypervisorCounters::parse, HypervisorCounters::ALLOWED)
            })?
            .unwrap_or(default.hypervisor),
            follows_grants: checked!(self, cpuid_follows_grants, |word| {
                choice(word, FollowsGrants::parse, FollowsGrants::ALLOWED)
            })?
            .unwrap_or_default(),
        })
    }

    /// Where tools find the VM if nobody says.
    fn default_socket(&self, name: Option<String>) -> Option<PathBuf> {
        let name = name.unwrap_or_else(|| std::process::id().to_string());
        Some(self.sockets.as_ref()?.join(format!("{name}.sock")))
    }

    /// How host tools are served, if they are. Nothing about tools means anything
    /// without a socket, nor a socket without a PMU: tools count by the guest's
    /// model.
    fn control(&self, pmu: &PmuChoice) -> Result<Option<ControlConfig>, ConfigError> {
        let Some(socket) = self.control_socket(pmu)? else {
            return Ok(None);
        };
        let mut config = ControlConfig::at(socket);
        self.control_access(&mut config)?;
        self.control_limits(&mut config)?;
        Ok(Some(config))
    }

    /// Where tools are served, if they are; options beside it then mean something.
    fn control_socket(&self, pmu: &PmuChoice) -> Result<Option<PathBuf>, ConfigError> {
        let name = given!(self, name);
        let named = name.as_ref().map(|name| name.place.clone());
        let name = name.map(|name| name.check(vm_name)).transpose()?;
        let beside = [
            named.clone(),
            place!(self, control_mode),
            place!(self, control_group),
            place!(self, control_connections),
            place!(self, control_sys_gid),
            place!(self, control_thread_gid),
            place!(self, control_arg_size),
            place!(self, control_buffers),
            place!(self, host_policy),
            place!(self, sampling_rate_max),
            place!(self, contexts_per_vcpu),
        ];
        let given = given!(self, control);
        let is_off = given
            .as_ref()
            .is_some_and(|socket| socket.value == Path::new("none"));
        let has_pmu = !matches!(pmu, PmuChoice::None);
        let socket = match (given, named) {
            (Some(_), _) if is_off => None,
            (Some(socket), _) if !has_pmu => {
                return Err(socket.wrong(SettingError::ControlWithoutPmu));
            }
            (Some(_), Some(place)) => {
                return Err(ConfigError::setting(place, SettingError::NameWithSocket));
            }
            (Some(socket), None) => Some(self.anchored(socket).value),
            (None, _) => self.default_socket(name).filter(|_| has_pmu),
        };
        match beside.into_iter().flatten().next() {
            Some(place) if socket.is_none() => {
                Err(ConfigError::setting(place, SettingError::NoControl))
            }
            _ => Ok(socket),
        }
    }

    /// Who may connect, and who may do what.
    fn control_access(&self, config: &mut ControlConfig) -> Result<(), ConfigError> {
        let mode = |bits| choice(bits, octal, "permission bits in octal, as 600 or 660");
        if let Some(mode) = checked!(self, control_mode, mode)? {
            config.access.mode = mode;
        }
        let group = |n| {
            let group = number(n, GROUPS, "(a group)")?;
            Ok(u32::try_from(group).unwrap_or(u32::MAX))
        };
        config.access.group = checked!(self, control_group, group)?;
        config.sys_gid = checked!(self, control_sys_gid, group)?;
        config.thread_gid = checked!(self, control_thread_gid, group)?;
        Ok(())
    }

    /// How much of the VMM tools may take.
    fn control_limits(&self, config: &mut ControlConfig) -> Result<(), ConfigError> {
        let bytes = *ARG_SIZES.start() as u64..=*ARG_SIZES.end() as u64;
        let arg_size = checked!(self, control_arg_size, |n| number(n, bytes, "bytes"))?;
        if let Some(bytes) = arg_size.and_then(|bytes| usize::try_from(bytes).ok()) {
            config.arg_size = bytes;
        }
        let buffers = checked!(self, control_buffers, |n| number(n, BUFFERS_KIB, "KiB"))?;
        if let Some(kib) = buffers {
            config.buffers = kib << 10;
        }
        let connections = |n| number(n, CONNECTIONS, "connections");
        let connections = checked!(self, control_connections, connections)?;
        if let Some(most) = connections.and_then(|most| usize::try_from(most).ok()) {
            config.connections = most;
        }
        let policy = |word| {
            let allowed = "guest-first, host-first, shares, or shares:host=N with N from 0 to 255";
            choice(word, |text| text.parse::<HostPolicy>().ok(), allowed)
        };
        if let Some(policy) = checked!(self, host_policy, policy)? {
            config.policy = policy;
        }
        let rate = |n| number(n, RATES, "interrupts in a second");
        if let Some(rate) = checked!(self, sampling_rate_max, rate)? {
            config.rate = rate;
        }
        let contexts = |n| number(n, CONTEXTS, "contexts");
        let contexts = checked!(self, contexts_per_vcpu, contexts)?;
        if let Some(most) = contexts.and_then(|most| usize::try_from(most).ok()) {
            config.contexts_per_vcpu = most;
        }
        Ok(())
    }

    /// `-v` says how often, the file's key how much.
    fn verbose(&self) -> Result<u8, ConfigError> {
        let louder = self.flags.verbose.min(*VERBOSITY.end());
        let flag = (louder > 0).then_some(i64::from(louder));
        let given = self.pick("verbose", &flag, &self.file.options.verbosity);
        let level = |n| small(n, VERBOSITY, "(0 warnings, 3 everything)");
        Ok(given
            .map(|given| given.check(level))
            .transpose()?
            .unwrap_or(0))
    }
}
