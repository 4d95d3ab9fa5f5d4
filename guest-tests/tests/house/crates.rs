//! Crates and the directions between them, from cargo's own metadata.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::root;

/// A crate, its folder, and the crates that it builds on. What these build on is
/// open to it as well. A crate that is not named may not be used.
struct Room {
    name: &'static str,
    folder: &'static str,
    uses: &'static [&'static str],
}

const fn room(name: &'static str, folder: &'static str, uses: &'static [&'static str]) -> Room {
    Room { name, folder, uses }
}

const HOUSE: [Room; 43] = [
    room("arbiter", "arbiter", &[]),
    room("arbiter-lab", "arbiter/lab", &["arbiter"]),
    room("arbiter-host", "arbiter/host", &["arbiter"]),
    room("umpire-audit", "arbiter/audit", &["arbiter"]),
    room("pmu-model", "pmu-virt/model", &["arbiter"]),
    room("perfmon-abi", "pmu-virt/perfmon/abi", &[]),
    room(
        "umpire-perfmon",
        "pmu-virt/perfmon/client",
        &["perfmon-abi"],
    ),
    room(
        "umpire-perfmon-c",
        "pmu-virt/perfmon/capi",
        // Programs in C name events (`pfm_event_encode`), as those in Rust do by umpire-events.
        &["umpire-events", "perfmon", "umpire-perfmon"],
    ),
    room(
        "umpire-cpc",
        "pmu-virt/perfmon/cpc",
        &["umpire-events", "perfmon", "umpire-perfmon"],
    ),
    room("perfmon", "pmu-virt/perfmon", &["pmu-model", "perfmon-abi"]),
    room("instruction-facts", "pmu-virt/instructions", &["pmu-model"]),
    room(
        "pmu-virt",
        "pmu-virt",
        &["pmu-model", "perfmon", "arbiter", "instruction-facts"],
    ),
    room(
        "emu",
        "vmm/emu",
        &["emu-fpu", "guest-exit", "instruction-facts"],
    ),
    room("emu-fpu", "vmm/emu/fpu", &[]),
    room("guest-exit", "vmm/guest-exit", &[]),
    room("umpire-regions", "vmm/count/regions", &[]),
    room("guest-files", "vmm/guest-files", &["count-init"]),
    room("count-init", "firmware/count-init", &["freestanding"]),
    room("irqchip", "vmm/irqchip", &[]),
    room("guest-view", "vmm/guest-view", &["guest-exit"]),
    room(
        "attribution",
        "vmm/attribution",
        &["emu", "guest-view", "symbol-names"],
    ),
    room("symbol-names", "vmm/symbol-names", &[]),
    room("umpire-agent-wire", "vmm/guest-view/wire", &[]),
    room("umpire-agent", "vmm/agent", &["umpire-agent-wire"]),
    room("kvm-pmu", "vmm/kvm-pmu", &["pmu-virt", "guest-exit"]),
    room("umpire-events", "pmu-virt/events", &["pmu-model"]),
    room("umpire-service", "arbiter/service", &[]),
    room("umpire-lease", "arbiter/lease", &["arbiter-host"]),
    room("umpire-lease-c", "arbiter/lease/capi", &["umpire-lease"]),
    room("umpire-slurm", "arbiter/slurm", &["umpire-lease"]),
    room(
        "umpire-arbiterd",
        "arbiter/daemon",
        &["arbiter-host", "umpire-lease", "umpire-service"],
    ),
    room(
        "vmm-control",
        "vmm/control",
        &["pmu-virt", "perfmon", "umpire-service"],
    ),
    room("firmware", "firmware", &["arbiter", "freestanding"]),
    room(
        "vmm",
        "vmm",
        &[
            "kvm-pmu",
            "emu",
            "irqchip",
            "vmm-control",
            "umpire-events",
            "guest-view",
            "umpire-agent-wire",
            "umpire-audit",
            "firmware",
            "umpire-lease",
            "arbiter-host",
        ],
    ),
    room(
        "umpire-tools",
        "vmm/tools",
        &[
            "umpire-events",
            "perfmon",
            "umpire-perfmon",
            "umpire-lease",
            "symbol-names",
        ],
    ),
    room("debian-packages", "vmm/packages", &[]),
    room(
        "umpire-count",
        "vmm/count",
        &["attribution", "umpire-events"],
    ),
    room(
        "umpire-bench",
        "vmm/bench",
        &[
            "vmm",
            "bench-programs",
            "umpire-perfmon",
            "umpire-lease",
            "arbiter-host",
        ],
    ),
    room(
        "bench-programs",
        "vmm/bench/programs",
        &["emu", "freestanding"],
    ),
    room(
        "umpire",
        "vmm/cli",
        &[
            "vmm",
            "umpire-tools",
            "umpire-bench",
            "umpire-count",
            "debian-packages",
            "guest-files",
            "umpire-events",
            "arbiter-lab",
            "umpire-audit",
            "umpire-lease",
            "umpire-arbiterd",
            "umpire-slurm",
        ],
    ),
    room(
        "micro-guests",
        "guest-tests/guests",
        &["arbiter", "freestanding"],
    ),
    room(
        "guest-tests",
        "guest-tests",
        &[
            "umpire",
            "micro-guests",
            "umpire-perfmon-c",
            "umpire-arbiterd",
        ],
    ),
    room("freestanding", "firmware/freestanding", &[]),
];

/// A crate of this repository, as cargo knows it.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) folder: PathBuf,
    /// Crates of this repository that its library, its programs and its build
    /// script use.
    uses: BTreeSet<String>,
    /// All crates that these use.
    pub(crate) all: BTreeSet<String>,
}

pub(crate) fn metadata() -> BTreeMap<String, Found> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args([
            "metadata",
            "--no-deps",
            "--offline",
            "--format-version",
            "1",
        ])
        .current_dir(root())
        .output()
        .expect("cargo can be started");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let all: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let text = |value: &Value| value.as_str().expect("a string").to_owned();
    let packages = all["packages"].as_array().expect("packages");
    let ours: BTreeSet<String> = packages
        .iter()
        .map(|package| text(&package["name"]))
        .collect();
    let found = packages.iter().map(|package| {
        let manifest = PathBuf::from(text(&package["manifest_path"]));
        let dependencies = package["dependencies"].as_array().expect("dependencies");
        // Tests may look at whatever they test together.
        let all: BTreeSet<String> = dependencies
            .iter()
            .filter(|dependency| dependency["kind"] != "dev")
            .map(|dependency| text(&dependency["name"]))
            .collect();
        let found = Found {
            folder: manifest.parent().expect("a folder").to_owned(),
            uses: all.intersection(&ours).cloned().collect(),
            all,
        };
        (text(&package["name"]), found)
    });
    found.collect()
}

/// What a crate may use: what it builds on, and what that builds on.
fn open_to(name: &str) -> BTreeSet<&'static str> {
    let mut open = BTreeSet::new();
    let mut left = vec![name.to_owned()];
    while let Some(name) = left.pop() {
        let room = HOUSE.iter().find(|room| room.name == name);
        for used in room.into_iter().flat_map(|room| room.uses) {
            if open.insert(*used) {
                left.push((*used).to_owned());
            }
        }
    }
    open
}

#[test]
fn crates_use_only_what_is_below_them() {
    let found = metadata();
    let mut wrong = Vec::new();
    for (name, found) in &found {
        let Some(room) = HOUSE.iter().find(|room| room.name == name) else {
            wrong.push(format!("{name} is no crate of the house"));
            continue;
        };
        let expected = root().join(room.folder);
        let same = |a: &Path, b: &Path| a.canonicalize().ok() == b.canonicalize().ok();
        if !same(&expected, &found.folder) {
            wrong.push(format!(
                "{name} is in {}, not in {}",
                found.folder.display(),
                room.folder
            ));
        }
        let open = open_to(name);
        for used in found
            .uses
            .iter()
            .filter(|used| !open.contains(used.as_str()))
        {
            wrong.push(format!("{name} may not use {used}"));
        }
    }
    for room in HOUSE.iter().filter(|room| !found.contains_key(room.name)) {
        wrong.push(format!("there is no crate {}", room.name));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The table itself has one direction.
#[test]
fn no_crate_is_below_itself() {
    for room in HOUSE {
        assert!(!open_to(room.name).contains(room.name), "{}", room.name);
    }
}

/// Which top folders the crates of a top folder may use: what is above stays replaceable.
const FOLDERS: [(&str, &[&str]); 5] = [
    ("arbiter", &[]),
    ("firmware", &["arbiter"]),
    ("pmu-virt", &["arbiter"]),
    ("vmm", &["arbiter", "firmware", "pmu-virt"]),
    ("guest-tests", &["arbiter", "firmware", "pmu-virt", "vmm"]),
];

#[test]
fn no_arrow_runs_up_between_top_folders() {
    let found = metadata();
    let house = root().canonicalize().expect("the house");
    let top = |name: &str| -> String {
        let folder = found[name].folder.canonicalize().expect("a folder");
        let below = folder.strip_prefix(&house).expect("a folder of the house");
        let first = below.iter().next().expect("a top folder");
        first.to_string_lossy().into_owned()
    };
    let mut wrong = Vec::new();
    for (name, one) in &found {
        let from = top(name);
        let Some((_, open)) = FOLDERS.iter().find(|(folder, _)| *folder == from) else {
            wrong.push(format!("{name} is in {from}, which is no top folder"));
            continue;
        };
        for used in &one.uses {
            let to = top(used);
            if to != from && !open.contains(&to.as_str()) {
                wrong.push(format!("{name} ({from}) may not use {used} ({to})"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The map of the crates in architecture.md is the one that people read.
#[test]
fn the_map_has_every_crate() {
    let page = root().join("docs/internals/architecture.md");
    let page = std::fs::read_to_string(page).expect("the map");
    // Two that stand in the row of the folder above them.
    let below = ["freestanding", "micro-guests"];
    for room in HOUSE.iter().filter(|room| !below.contains(&room.name)) {
        let row = format!("| `{}` | `{}` | ", room.name, room.folder);
        assert!(page.contains(&row), "no row begins {row:?}");
    }
}

/// The packages that a crate gets which depends on `kvm-pmu` with no feature on. The workspace
/// has features on, and gets more.
fn of_an_embedder() -> BTreeSet<(String, String)> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["tree", "--offline", "--locked", "-p", "kvm-pmu"])
        .args(["-e", "normal,build", "--prefix", "none", "--format", "{p}"])
        .current_dir(root())
        .output()
        .expect("cargo can be started");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let lines = String::from_utf8(output.stdout).expect("text");
    let package = |line: &str| {
        let mut words = line.split_whitespace().map(str::to_owned);
        words.next().zip(words.next())
    };
    lines.lines().filter_map(package).collect()
}

/// Whoever only gives a guest a PMU gets nothing that serves tools or reads files; the page says
/// how much he gets.
#[test]
fn an_embedder_gets_what_the_page_says() {
    let found = of_an_embedder();
    let names: BTreeSet<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
    for absent in ["perfmon", "perfmon-abi", "toml", "kvm-ioctls", "vm-memory"] {
        assert!(!names.contains(absent), "kvm-pmu brings {absent}");
    }
    let ours = HOUSE.iter().filter(|room| names.contains(room.name));
    let expected = format!(
        "a VMM gets {} packages, `kvm-pmu` itself counted, {} of which are Umpire's",
        found.len(),
        ours.count()
    );
    let page = root().join("docs/guide/embedding.md");
    let page = std::fs::read_to_string(page).expect("the page");
    assert!(page.contains(&expected), "{expected}: {found:#?}");
}
