//! Invariants of docs/internals/architecture.md that say what is absent.

use std::fs;
use std::path::Path;

use super::crates::metadata;
use super::sources::{Source, sources, tokens};

/// Fails with the places at which `wrong` finds something.
fn none_of(wrong: impl Iterator<Item = String>) {
    let wrong: Vec<String> = wrong.collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Files below any of these folders.
fn below<'a>(sources: &'a [Source], folders: &'a [&str]) -> impl Iterator<Item = &'a Source> {
    sources
        .iter()
        .filter(|source| folders.iter().any(|folder| source.path.starts_with(folder)))
}

fn has(source: &Source, word: &str) -> bool {
    tokens(&source.code).contains(&word)
}

#[test]
fn unsafe_code_is_in_sys_modules_only() {
    let sources = sources();
    let outside = sources.iter().filter(|source| {
        let in_sys = Path::new(&source.path)
            .components()
            .any(|part| matches!(part.as_os_str().to_str(), Some("sys" | "sys.rs")));
        !in_sys && has(source, "unsafe")
    });
    none_of(outside.map(|source| format!("{}: unsafe", source.path)));
}

#[test]
fn every_library_denies_unsafe_code() {
    let roots = metadata()
        .into_values()
        .map(|found| found.folder.join("src/lib.rs"));
    let lax = roots.filter(|path| {
        fs::read_to_string(path).is_ok_and(|text| {
            !text.contains("#![deny(unsafe_code)]") && !text.contains("#![forbid(unsafe_code)]")
        })
    });
    none_of(lax.map(|path| format!("{}: no deny(unsafe_code)", path.display())));
}

#[test]
fn only_the_vmm_knows_kvm() {
    let kvm = ["kvm-ioctls", "kvm-bindings"];
    let may = ["kvm-pmu", "vmm", "umpire-bench", "guest-tests"];
    let found = metadata();
    let others = found.iter().filter(|(name, found)| {
        !may.contains(&name.as_str()) && kvm.iter().any(|kvm| found.all.contains(*kvm))
    });
    none_of(others.map(|(name, _)| format!("{name} depends on KVM's crates")));
}

#[test]
fn one_crate_says_what_an_instruction_is() {
    // emu decodes what it executes. The others write guests with its assembler, or print
    // instructions.
    let may = [
        "instruction-facts",
        "emu",
        "vmm",
        "umpire-bench",
        "umpire-tools",
        "umpire",
        "guest-tests",
    ];
    let found = metadata();
    let others = found
        .iter()
        .filter(|(name, found)| !may.contains(&name.as_str()) && found.all.contains("iced-x86"));
    none_of(others.map(|(name, _)| format!("{name} depends on iced-x86")));
    let sources = sources();
    let elsewhere = sources.iter().filter(|source| {
        let is_theirs = source.path.starts_with("pmu-virt/instructions/src");
        !is_theirs && (has(source, "UsedMemory") || has(source, "OpAccess"))
    });
    none_of(elsewhere.map(|source| format!("{}: judges instructions", source.path)));
}

#[test]
fn only_programs_read_a_command_line() {
    let found = metadata();
    let others = found.iter().filter(|(name, found)| {
        // The options of a tool are the structure that its code takes; only umpire is linked
        // with the tools.
        !["umpire", "umpire-tools", "umpire-agent", "guest-tests"].contains(&name.as_str())
            && found.all.contains("clap")
    });
    none_of(others.map(|(name, _)| format!("{name} depends on clap")));
}

#[test]
fn the_pmu_reads_no_clock_and_blocks_on_nothing() {
    let sources = sources();
    let pure = [
        "arbiter/src",
        "arbiter/host/src",
        "pmu-virt/src",
        "pmu-virt/instructions/src",
        "pmu-virt/model/src",
        "pmu-virt/perfmon/src",
        "vmm/emu/fpu/src",
        "vmm/emu/src",
        "vmm/irqchip/src",
    ];
    let wrong = below(&sources, &pure).flat_map(|source| {
        let words = [
            "Instant",
            "SystemTime",
            "_rdtsc",
            "sleep",
            "Condvar",
            "TcpStream",
        ];
        let found = words.into_iter().filter(|word| has(source, word));
        found
            .map(|word| format!("{}: {word}", source.path))
            .collect::<Vec<_>>()
    });
    none_of(wrong);
}

/// A guest's floating point is integer code and the host's instructions that `emu_fpu::sse` lists:
/// what the compiler makes of floats follows the host's MXCSR.
#[test]
fn the_processor_in_software_has_no_floats() {
    let sources = sources();
    let wrong = below(&sources, &["vmm/emu/src", "vmm/emu/fpu/src"])
        .filter(|source| has(source, "f32") || has(source, "f64"));
    none_of(wrong.map(|source| format!("{}: a float", source.path)));
}

/// It would write back IRR and the timer as they were a moment ago.
#[test]
fn nobody_sets_the_local_apic() {
    // A vCPU that is restored has not run, so that there is nothing newer to write over; of one that
    // is reset, that is what is wanted.
    let restores = "guest-tests/src/bin/test-vmm/snapshot.rs";
    let sources = sources();
    let wrong = sources
        .iter()
        .filter(|source| has(source, "set_lapic") && source.path != restores);
    none_of(wrong.map(|source| format!("{}: set_lapic", source.path)));
}

#[test]
fn modules_have_one_style() {
    let sources = sources();
    let wrong = sources
        .iter()
        .filter(|source| source.path.ends_with("/mod.rs"));
    none_of(wrong.map(|source| format!("{}: should be NAME.rs beside NAME/", source.path)));
}

/// Each source file says at its head what it is.
#[test]
fn every_file_says_what_it_is() {
    let sources = sources();
    let wrong = sources
        .iter()
        .filter(|source| !source.whole.trim_start().starts_with("//!"));
    none_of(wrong.map(|source| format!("{}: no sentence at its head", source.path)));
}
