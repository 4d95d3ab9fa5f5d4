//! The PMUs that the kernel offers, and the CPUs that each counts for.

use std::fs;
use std::path::Path;

use crate::budget::file::{self, FileError};
use crate::budget::{CpuSet, EventSpec};

/// A PMU of the kernel with counters that can be programmed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pmu {
    /// Its name in sysfs, such as `cpu`, `cpu_atom` or `uncore_imc_0`.
    pub name: String,
    /// Its `type` for `perf_event_open(2)`.
    pub perf_type: u32,
    /// Who shares its counters.
    pub scope: Scope,
}

/// Who shares the counters of a PMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// A core PMU: each of these online CPUs has counters of its own.
    Core(CpuSet),
    /// An uncore PMU: counters of each domain are a pool of their own.
    Uncore(Vec<Domain>),
}

/// Part of an uncore PMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain {
    /// The CPU that the kernel designates for its events (`cpumask` in sysfs).
    pub cpu: u32,
    /// Online CPUs whose doings it counts, `cpu` among them.
    pub shared_by: CpuSet,
}

impl Pmu {
    /// An event of this PMU by the value of `config`.
    pub fn event(&self, config: u64) -> EventSpec {
        EventSpec {
            perf_type: self.perf_type,
            config,
            config1: 0,
            config2: 0,
        }
    }

    /// The CPUs to measure, one for each pool of counters.
    pub fn measured_on(&self) -> CpuSet {
        match &self.scope {
            Scope::Core(cpus) => cpus.clone(),
            Scope::Uncore(domains) => domains.iter().map(|domain| domain.cpu).collect(),
        }
    }

    /// The CPU to measure for what `cpu` does; `None` if the PMU does not count it.
    pub fn pool_of(&self, cpu: u32) -> Option<u32> {
        match &self.scope {
            Scope::Core(cpus) => cpus.contains(cpu).then_some(cpu),
            Scope::Uncore(domains) => {
                let domain = domains.iter().find(|one| one.shared_by.contains(cpu));
                domain.map(|domain| domain.cpu)
            }
        }
    }
}

/// PMUs whose format has an `event` but that have no counters to give: what they offer is
/// always there, for everybody at once.
const WITHOUT_COUNTERS: [&str; 5] = ["msr", "power", "cstate_", "i915", "xe_"];
/// In the names of uncore PMUs whose counters nobody programs.
const FREE_RUNNING: &str = "free_running";

/// The PMUs with counters below `root/sys/bus/event_source/devices`, by name.
///
/// A PMU is listed if its events have a field `event` in `config` (`format/event`; kernel,
/// Documentation/ABI/testing/sysfs-bus-event_source-devices-format). That leaves out software
/// PMUs (software, tracepoint, breakpoint, kprobe, uprobe) and tracers. A short list leaves out
/// what has such a field but no counters: msr, power, cstate, graphics, free-running.
/// It is a core PMU if it has a file `cpus` (hybrid processors) or the name `cpu`, and an uncore
/// PMU if it has a `cpumask`. Without either it is left out, since nobody knows where to open
/// its events. So is a PMU whose files are damaged; the log says why.
///
/// Call it again when CPUs come and go.
///
/// # Errors
/// `sys/devices/system/cpu/online` is missing or damaged, or the folder of PMUs exists and
/// cannot be read. Without that folder there are no PMUs.
pub fn discover(root: &Path) -> Result<Vec<Pmu>, FileError> {
    let online: CpuSet = file::value(&root.join("sys/devices/system/cpu/online"))?;
    let folder = root.join("sys/bus/event_source/devices");
    let entries = fs::read_dir(&folder).map_err(FileError::of(&folder, "read"));
    let mut names = Vec::new();
    for entry in file::optional(entries)?.into_iter().flatten() {
        let entry = entry.map_err(FileError::of(&folder, "read"))?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    let mut pmus = Vec::new();
    for name in names {
        match read(root, &folder.join(&name), &name, &online) {
            Ok(pmu) => pmus.extend(pmu),
            Err(error) => log::warn!("PMU {name} is left out: {error}"),
        }
    }
    Ok(pmus)
}

fn read(root: &Path, folder: &Path, name: &str, online: &CpuSet) -> Result<Option<Pmu>, FileError> {
    let listed = WITHOUT_COUNTERS.iter().any(|start| name.starts_with(start));
    let format = folder.join("format/event");
    let Some(field) = file::optional(file::text(&format))? else {
        return Ok(None);
    };
    if listed || name.contains(FREE_RUNNING) {
        return Ok(None);
    }
    if !field.starts_with("config") {
        return Err(FileError::damaged(&format, &field));
    }
    let perf_type = file::value(&folder.join("type"))?;
    let cpus_in = |file| file::optional(file::value::<CpuSet>(&folder.join(file)));
    let scope = if let Some(cpus) = cpus_in("cpus")? {
        Scope::Core(cpus.and(online))
    } else if name == "cpu" {
        Scope::Core(online.clone())
    } else if let Some(mask) = cpus_in("cpumask")? {
        Scope::Uncore(domains(root, &mask.and(online), online)?)
    } else {
        log::debug!("PMU {name} is left out: it names no CPUs");
        return Ok(None);
    };
    Ok(Some(Pmu {
        name: name.to_owned(),
        perf_type,
        scope,
    }))
}

/// The domain of a designated CPU is the largest part of the machine that has no other.
fn domains(root: &Path, designated: &CpuSet, online: &CpuSet) -> Result<Vec<Domain>, FileError> {
    let cpu_folder = |cpu: u32| root.join(format!("sys/devices/system/cpu/cpu{cpu}"));
    let list = |cpu, file: &str| file::optional(file::value::<CpuSet>(&cpu_folder(cpu).join(file)));
    let package = |cpu| -> Result<Option<CpuSet>, FileError> {
        if let Some(cpus) = list(cpu, "topology/package_cpus_list")? {
            return Ok(Some(cpus));
        }
        // Kernels before 5.3 have the number of the package only.
        let id = |cpu| {
            let path = cpu_folder(cpu).join("topology/physical_package_id");
            file::optional(file::value::<i32>(&path))
        };
        let Some(own) = id(cpu)? else {
            return Ok(None);
        };
        let mut cpus = Vec::new();
        for other in online.iter() {
            if id(other)? == Some(own) {
                cpus.push(other);
            }
        }
        Ok(Some(cpus.into_iter().collect()))
    };
    let mut found = Vec::new();
    for cpu in designated.iter() {
        let parts = [
            package(cpu)?,
            list(cpu, "topology/die_cpus_list")?,
            list(cpu, "cache/index3/shared_cpu_list")?,
        ];
        let alone = |part: &CpuSet| part.contains(cpu) && part.and(designated).len() == 1;
        let part = parts.into_iter().flatten().find(alone);
        let part = part.unwrap_or_else(|| CpuSet::from_iter([cpu]));
        found.push(Domain {
            cpu,
            shared_by: part.and(online),
        });
    }
    Ok(found)
}

#[cfg(test)]
#[path = "pmu_tests.rs"]
mod tests;
