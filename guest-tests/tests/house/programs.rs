//! Which files are tests.

use std::fs;
use std::path::{Path, PathBuf};

use super::crates::metadata;

/// A file that no program names is compiled by nobody, and passes.
#[test]
fn every_file_of_tests_is_in_a_program() {
    let mut programs = 0;
    for krate in metadata().into_values() {
        let folder = krate.folder;
        let tests = folder.join("tests");
        let Ok(main) = fs::read_to_string(tests.join("main.rs")) else {
            continue;
        };
        programs += 1;
        let manifest = fs::read_to_string(folder.join("Cargo.toml")).expect("a manifest");
        for entry in fs::read_dir(&tests).expect("a folder") {
            let path = entry.expect("an entry").path();
            let Some(name) = module(&path) else { continue };
            assert!(
                main.lines()
                    .any(|line| line.ends_with(&format!("mod {name};")))
                    || manifest.contains(&format!("name = \"{name}\"")),
                "{} is in no program: name it in main.rs beside it",
                path.display()
            );
        }
    }
    assert!(programs > 8, "only {programs} programs of tests were found");
}

/// Programs that cargo does not build as tests have none.
#[test]
fn programs_without_tests_have_none() {
    let root = super::root();
    let own = root.join("guest-tests/src/bin");
    let mut files: Vec<PathBuf> = vec![root.join("vmm/cli/src/main.rs")];
    for folder in [own.clone(), own.join("perf-contract")] {
        let entries = fs::read_dir(folder).expect("a folder");
        files.extend(entries.map(|entry| entry.expect("an entry").path()));
    }
    files.retain(|path| path.is_file());
    assert!(files.len() > 5, "{files:?}");
    for path in files {
        let text = fs::read_to_string(&path).expect("a source file");
        assert!(!text.contains("#[test]"), "{}", path.display());
    }
}

/// What a file or a folder of tests is called as a module.
fn module(path: &Path) -> Option<&str> {
    let name = path.file_stem()?.to_str()?;
    let is_module = match path.extension() {
        Some(ending) => ending == "rs" && name != "main",
        None => path.join("mod.rs").is_file() || path.join("main.rs").is_file(),
    };
    is_module.then_some(name)
}
