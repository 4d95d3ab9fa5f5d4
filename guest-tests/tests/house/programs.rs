//! Which files are tests.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::crates::metadata;

/// Files beside tests that something else is made of.
const NO_TESTS: [&str; 1] = ["vmm/guest-view/tests/linux/deep.rs"];

/// A file that no program names is compiled by nobody, and passes.
#[test]
fn every_file_of_tests_is_in_a_program() {
    let mut programs = 0;
    let mut lost = Vec::new();
    for krate in metadata().into_values() {
        let tests = krate.folder.join("tests");
        let main = tests.join("main.rs");
        if !main.is_file() {
            continue;
        }
        programs += 1;
        let manifest = fs::read_to_string(krate.folder.join("Cargo.toml")).expect("a manifest");
        unnamed(&main, &tests, &own_programs(&manifest), &mut lost);
    }
    lost.retain(|path| !NO_TESTS.iter().any(|known| path.ends_with(known)));
    assert!(programs > 8, "only {programs} programs of tests were found");
    assert!(lost.is_empty(), "in no program: {lost:#?}");
}

/// The names of the `[[test]]` targets of a manifest.
fn own_programs(manifest: &str) -> BTreeSet<String> {
    let tables = manifest.split("\n[").skip(1);
    tables
        .filter(|table| table.starts_with("[test]]"))
        .filter_map(|table| {
            let name = table
                .lines()
                .find_map(|line| line.strip_prefix("name = "))?;
            Some(name.trim_matches('"').to_owned())
        })
        .collect()
}

/// Modules that `text` declares.
fn declared(text: &str) -> BTreeSet<String> {
    let file = syn::parse_file(text).expect("a file of tests");
    let modules = file.items.iter().filter_map(|item| match item {
        syn::Item::Mod(module) => Some(module.ident.to_string()),
        _ => None,
    });
    modules.collect()
}

/// Files of `folder` that neither `module`, whose folder it is, nor `programs` name, and those
/// below them.
fn unnamed(module: &Path, folder: &Path, programs: &BTreeSet<String>, lost: &mut Vec<String>) {
    let declared = declared(&fs::read_to_string(module).expect("a module"));
    let entries = fs::read_dir(folder).expect("a folder");
    for entry in entries.map(|entry| entry.expect("an entry").path()) {
        let Some(name) = entry.file_stem().and_then(|name| name.to_str()) else {
            continue;
        };
        let inner = if entry.is_dir() {
            let own = ["mod.rs", "main.rs"].map(|file| entry.join(file));
            let beside = entry.with_extension("rs");
            let mut all = own.into_iter().chain([beside]);
            match all.find(|file| file.is_file()) {
                Some(inner) => Some(inner),
                // Data.
                None => continue,
            }
        } else if entry.extension().is_none_or(|ending| ending != "rs") || entry == module {
            continue;
        } else {
            None
        };
        let known = declared.contains(name) || programs.contains(name);
        if !known && !["mod", "main"].contains(&name) {
            lost.push(entry.display().to_string());
        } else if let Some(inner) = inner {
            unnamed(&inner, &entry, &BTreeSet::new(), lost);
        }
    }
}

#[test]
fn a_file_without_a_program_is_found() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("deep")).expect("a folder");
    let files = [
        ("main.rs", "mod named;\nmod deep;\n// mod lost;\n"),
        ("named.rs", ""),
        ("lost.rs", ""),
        ("alone.rs", ""),
        ("bench.rs", ""),
        ("deep/mod.rs", "mod named;"),
        ("deep/named.rs", ""),
        ("deep/forgotten.rs", ""),
    ];
    for (name, text) in files {
        fs::write(at(name), text).expect("a file");
    }
    let manifest =
        "[package]\nname = \"x\"\n\n[[bench]]\nname = \"bench\"\n\n[[test]]\nname = \"alone\"\n";
    let mut lost = Vec::new();
    unnamed(
        &at("main.rs"),
        folder.path(),
        &own_programs(manifest),
        &mut lost,
    );
    lost.sort();
    let expected = ["bench.rs", "deep/forgotten.rs", "lost.rs"];
    assert_eq!(lost, expected.map(|name| at(name).display().to_string()));
}
