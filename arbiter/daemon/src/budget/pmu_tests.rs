//! PMUs of made-up hosts, whole and damaged.

use std::fs;

use super::*;

/// Files below a root: path and content.
fn host(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().expect("a folder");
    for (path, content) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, content).expect("a file");
    }
    root
}

const ONLINE: (&str, &str) = ("sys/devices/system/cpu/online", "0-3\n");

macro_rules! pmu {
    ($name:literal, $file:literal) => {
        concat!("sys/bus/event_source/devices/", $name, "/", $file)
    };
}

macro_rules! topology {
    ($cpu:literal, $file:literal) => {
        concat!("sys/devices/system/cpu/cpu", $cpu, "/", $file)
    };
}

fn cpus(list: &str) -> CpuSet {
    list.parse().expect("a list")
}

fn core(name: &str, perf_type: u32, list: &str) -> Pmu {
    Pmu {
        name: name.into(),
        perf_type,
        scope: Scope::Core(cpus(list)),
    }
}

fn uncore(name: &str, perf_type: u32, domains: &[(u32, &str)]) -> Pmu {
    let domains = domains.iter().map(|(cpu, list)| Domain {
        cpu: *cpu,
        shared_by: cpus(list),
    });
    Pmu {
        name: name.into(),
        perf_type,
        scope: Scope::Uncore(domains.collect()),
    }
}

fn check(files: &[(&str, &str)], expected: &[Pmu]) {
    let root = host(files);
    assert_eq!(
        discover(root.path()).expect("a list"),
        expected,
        "{files:?}"
    );
}

const CPU: [(&str, &str); 3] = [
    ONLINE,
    (pmu!("cpu", "type"), "4\n"),
    (pmu!("cpu", "format/event"), "config:0-7\n"),
];

#[test]
fn core_pmus() {
    check(&[ONLINE], &[]);
    check(&CPU, &[core("cpu", 4, "0-3")]);
    // Hybrid, with a CPU offline.
    check(
        &[
            ("sys/devices/system/cpu/online", "0-1,3"),
            (pmu!("cpu_core", "type"), "4"),
            (pmu!("cpu_core", "format/event"), "config:0-7"),
            (pmu!("cpu_core", "cpus"), "0-1"),
            (pmu!("cpu_atom", "type"), "10"),
            (pmu!("cpu_atom", "format/event"), "config:0-7"),
            (pmu!("cpu_atom", "cpus"), "2-3"),
        ],
        &[core("cpu_atom", 10, "3"), core("cpu_core", 4, "0-1")],
    );
}

#[test]
fn what_has_no_counters_is_left_out() {
    let mut files = CPU.to_vec();
    files.extend([
        (pmu!("software", "type"), "1"),
        (pmu!("breakpoint", "type"), "5"),
        (pmu!("uprobe", "type"), "9"),
        (pmu!("uprobe", "format/ref_ctr_offset"), "config:32-63"),
        (pmu!("intel_pt", "type"), "11"),
        (pmu!("intel_pt", "format/tsc"), "config:10"),
        (pmu!("msr", "type"), "12"),
        (pmu!("msr", "format/event"), "config:0-63"),
        (pmu!("power", "type"), "13"),
        (pmu!("power", "format/event"), "config:0-7"),
        (pmu!("power", "cpumask"), "0"),
        (pmu!("cstate_core", "type"), "14"),
        (pmu!("cstate_core", "format/event"), "config:0-63"),
        (pmu!("cstate_core", "cpumask"), "0-3"),
        (pmu!("uncore_imc_free_running_0", "type"), "15"),
        (
            pmu!("uncore_imc_free_running_0", "format/event"),
            "config:0-7",
        ),
        (pmu!("uncore_imc_free_running_0", "cpumask"), "0"),
        // Nobody knows where to open its events.
        (pmu!("homeless", "type"), "16"),
        (pmu!("homeless", "format/event"), "config:0-7"),
    ]);
    check(&files, &[core("cpu", 4, "0-3")]);
}

const UNCORE: [(&str, &str); 3] = [
    ONLINE,
    (pmu!("uncore_imc_0", "type"), "20"),
    (pmu!("uncore_imc_0", "format/event"), "config:0-7"),
];

#[test]
fn uncore_domains() {
    let with = |more: &[(&'static str, &'static str)]| [UNCORE.as_slice(), more].concat();
    // A package each.
    let packages = with(&[
        (pmu!("uncore_imc_0", "cpumask"), "0,2"),
        (topology!("0", "topology/package_cpus_list"), "0-1"),
        (topology!("2", "topology/package_cpus_list"), "2-5"),
    ]);
    check(
        &packages,
        &[uncore("uncore_imc_0", 20, &[(0, "0-1"), (2, "2-3")])],
    );
    // An older kernel.
    let ids = with(&[
        (pmu!("uncore_imc_0", "cpumask"), "1,2"),
        (topology!("0", "topology/physical_package_id"), "0"),
        (topology!("1", "topology/physical_package_id"), "0"),
        (topology!("2", "topology/physical_package_id"), "-1"),
        (topology!("3", "topology/physical_package_id"), "-1"),
    ]);
    check(
        &ids,
        &[uncore("uncore_imc_0", 20, &[(1, "0-1"), (2, "2-3")])],
    );
    // Two caches in one package; and no topology for the last one.
    let caches = with(&[
        (pmu!("uncore_imc_0", "cpumask"), "0,2,3"),
        (topology!("0", "topology/package_cpus_list"), "0-3"),
        (topology!("0", "topology/die_cpus_list"), "0-3"),
        (topology!("0", "cache/index3/shared_cpu_list"), "0-1"),
        (topology!("2", "topology/package_cpus_list"), "0-3"),
        (topology!("2", "topology/die_cpus_list"), "2"),
    ]);
    let domains = [(0, "0-1"), (2, "2"), (3, "3")];
    let expected = uncore("uncore_imc_0", 20, &domains);
    check(&caches, std::slice::from_ref(&expected));
    assert_eq!(expected.measured_on(), cpus("0,2-3"));
    assert_eq!(
        [0, 1, 2, 4].map(|cpu| expected.pool_of(cpu)),
        [Some(0), Some(0), Some(2), None]
    );
}

#[test]
fn damaged_hosts() {
    let error = |files: &[(&str, &str)]| {
        let root = host(files);
        let error = discover(root.path()).expect_err("an error");
        error
            .path
            .strip_prefix(root.path())
            .expect("below the root")
            .to_owned()
    };
    let online = Path::new(ONLINE.0);
    assert_eq!(error(&[]), online);
    assert_eq!(error(&[(ONLINE.0, "0-")]), online);
    assert_eq!(error(&[(ONLINE.0, "zero")]), online);
    let devices = "sys/bus/event_source/devices";
    assert_eq!(error(&[ONLINE, (devices, "a file")]), Path::new(devices));
    // Each file of a PMU, damaged: the others are listed all the same.
    for (damaged, content) in [
        (pmu!("uncore_imc_0", "type"), "twenty"),
        (pmu!("uncore_imc_0", "type"), "-1"),
        (pmu!("uncore_imc_0", "type"), ""),
        (pmu!("uncore_imc_0", "format/event"), "\u{0}"),
        (pmu!("uncore_imc_0", "format/event/folder"), ""),
        (pmu!("uncore_imc_0", "cpumask"), "0-x"),
        (pmu!("uncore_imc_0", "cpumask"), "0-99999999"),
        (pmu!("uncore_imc_0", "cpus"), "9-0"),
        (topology!("0", "topology/package_cpus_list"), "?"),
        (topology!("0", "topology/physical_package_id"), "?"),
    ] {
        let mut files: Vec<_> = CPU.iter().chain(&UNCORE[1..]).copied().collect();
        files.push((pmu!("uncore_imc_0", "cpumask"), "0"));
        files.retain(|(path, _)| !damaged.starts_with(path));
        files.push((damaged, content));
        check(&files, &[core("cpu", 4, "0-3")]);
    }
}
