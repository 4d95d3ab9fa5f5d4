//! The documentation names only what exists: files, links, and symbols of the code.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

/// First parts of paths in the documentation that are paths of this repository.
const FOLDERS: [&str; 7] = [
    ".ci",
    "arbiter",
    "docs",
    "firmware",
    "guest-tests",
    "pmu-virt",
    "vmm",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Files below `folder` with the ending `extension`.
fn files(folder: &Path, extension: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder of the repository") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            files(&path, extension, found);
        } else if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
    }
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|letter: char| !letter.is_alphanumeric() && letter != '_')
        .filter(|word| !word.is_empty())
}

/// Every word of the code; one that is nowhere in it is no symbol.
fn code_words(root: &Path) -> HashSet<String> {
    let mut sources = Vec::new();
    for folder in ["arbiter", "firmware", "guest-tests", "pmu-virt", "vmm"] {
        files(&root.join(folder), "rs", &mut sources);
    }
    // Names in these very checks prove nothing.
    sources.retain(|path| !path.ends_with("tests/docs.rs"));
    let texts = sources
        .iter()
        .map(|path| fs::read_to_string(path).expect("a source file"));
    texts
        .flat_map(|text| words(&text).map(str::to_owned).collect::<Vec<_>>())
        .collect()
}

/// Text between single backticks, code blocks left out.
fn code_spans(text: &str) -> Vec<&str> {
    let outside = text.split("```").step_by(2);
    outside
        .flat_map(|part| part.split('`').skip(1).step_by(2))
        .collect()
}

/// Targets of links to files.
fn links(text: &str) -> Vec<&str> {
    let targets = text.split("](").skip(1);
    targets
        .filter_map(|rest| rest.split([')', '#']).next())
        .filter(|target| !target.is_empty() && !target.contains("://"))
        .collect()
}

/// The names that GitHub gives to a page's headings.
fn anchors(text: &str) -> HashSet<String> {
    let outside = text.split("\n```").step_by(2).flat_map(str::lines);
    let headings = outside.filter_map(|line| {
        let title = line.trim_start_matches('#');
        (title.len() < line.len())
            .then(|| title.strip_prefix(' '))
            .flatten()
    });
    let mut found = HashSet::new();
    for title in headings {
        let mut name = String::new();
        for letter in title.trim().chars().flat_map(char::to_lowercase) {
            match letter {
                ' ' => name.push('-'),
                _ if letter.is_alphanumeric() || "-_".contains(letter) => name.push(letter),
                _ => {}
            }
        }
        // A second heading of the same words has a number behind it.
        let mut last = name.clone();
        for number in 1.. {
            if found.insert(last.clone()) {
                break;
            }
            last = format!("{name}-{number}");
        }
    }
    found
}

/// Links to headings of pages, as page and heading; the page is empty for this one.
fn heading_links(text: &str) -> Vec<(&str, &str)> {
    let targets = text.split("](").skip(1);
    targets
        .filter_map(|rest| rest.split(')').next()?.split_once('#'))
        .filter(|(page, _)| !page.contains("://"))
        .collect()
}

/// A path of this repository, or `None` if `span` is something else.
fn as_path(span: &str) -> Option<&str> {
    let plain = span
        .chars()
        .all(|letter| letter.is_ascii_alphanumeric() || "._-/".contains(letter));
    let first = span.split('/').next()?;
    (plain && span.contains('/') && FOLDERS.contains(&first)).then_some(span)
}

/// A symbol of the code: `path::name`, or a type's name in camel case.
fn as_symbol(span: &str) -> Option<&str> {
    let name = span.strip_suffix("()").unwrap_or(span);
    let plain = name
        .chars()
        .all(|letter| letter.is_ascii_alphanumeric() || letter == '_' || letter == ':');
    let camel = name.starts_with(|first: char| first.is_ascii_uppercase())
        && name.contains(|letter: char| letter.is_ascii_lowercase())
        && !name.contains('_');
    (plain && (name.contains("::") || camel)).then_some(name)
}

/// Programs that commands in `text` test by name.
fn test_programs(text: &str) -> impl Iterator<Item = &str> {
    let names = text.split("--test ").skip(1);
    names.filter_map(|rest| {
        let named = |letter: char| letter.is_alphanumeric() || letter == '_';
        rest.split(|letter| !named(letter)).next()
    })
}

/// The test programs of this repository.
fn programs(root: &Path) -> HashSet<String> {
    let mut manifests = Vec::new();
    for folder in FOLDERS.iter().filter(|folder| !folder.contains('.')) {
        files(&root.join(folder), "toml", &mut manifests);
    }
    let mut found = HashSet::new();
    for manifest in manifests.iter().filter(|path| path.ends_with("Cargo.toml")) {
        let text = fs::read_to_string(manifest).expect("a manifest");
        for table in text
            .split("\n[")
            .filter(|table| table.starts_with("[test]]"))
        {
            let name = table.lines().find_map(|line| line.strip_prefix("name = "));
            found.extend(name.map(|name| name.trim_matches('"').to_owned()));
        }
        // Programs that cargo finds by itself.
        let tests = manifest.with_file_name("tests");
        if text.contains("autotests = false") || !tests.is_dir() {
            continue;
        }
        for entry in fs::read_dir(tests).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.join("main.rs").is_file() || path.extension().is_some_and(|end| end == "rs") {
                found.extend(
                    path.file_stem()
                        .map(|name| name.to_string_lossy().into_owned()),
                );
            }
        }
    }
    found
}

/// What `text`, a file in `folder`, names and is not there.
fn missing(root: &Path, folder: &Path, text: &str, code: &HashSet<String>) -> Vec<String> {
    let mut missing = Vec::new();
    let programs = programs(root);
    for link in links(text) {
        if !folder.join(link).exists() {
            missing.push(format!("link {link}"));
        }
    }
    for (link, heading) in heading_links(text) {
        let page = folder.join(link);
        let there = if link.is_empty() {
            anchors(text).contains(heading)
        } else {
            fs::read_to_string(page).is_ok_and(|page| anchors(&page).contains(heading))
        };
        if !there {
            missing.push(format!("heading {link}#{heading}"));
        }
    }
    for program in test_programs(text) {
        if !programs.contains(program) {
            missing.push(format!("test program {program}"));
        }
    }
    for span in code_spans(text) {
        if let Some(path) = as_path(span) {
            if !root.join(path).exists() {
                missing.push(format!("path {path}"));
            }
        } else if let Some(symbol) = as_symbol(span)
            && let Some(part) = words(symbol).find(|part| !code.contains(*part))
        {
            missing.push(format!("symbol {symbol} ({part})"));
        }
    }
    missing
}

#[test]
fn documentation_names_what_exists() {
    let root = root();
    let code = code_words(&root);
    let mut pages = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
        .map(|page| root.join(page))
        .to_vec();
    for folder in FOLDERS.iter().filter(|folder| !folder.contains('.')) {
        pages.push(root.join(folder).join("README.md"));
    }
    files(&root.join("docs"), "md", &mut pages);
    assert!(pages.len() > 3, "docs/ is empty");
    let mut wrong = Vec::new();
    for page in &pages {
        let text = fs::read_to_string(page).expect("a page");
        let folder = page.parent().expect("a folder");
        for one in missing(&root, folder, &text, &code) {
            wrong.push(format!("{}: {one}", page.display()));
        }
    }
    assert!(wrong.is_empty(), "not there:\n{}", wrong.join("\n"));
}

#[test]
fn what_is_gone_is_found() {
    let root = root();
    let code = HashSet::from(["Vcpu".to_owned(), "run".to_owned()]);
    let check = |text: &str, expected: &[&str]| {
        assert_eq!(missing(&root, &root, text, &code), expected, "{text}");
    };
    check("`Vcpu::run` and `Vcpu`", &[]);
    check("`Vcpu::walk`", &["symbol Vcpu::walk (walk)"]);
    check("`VcpuOfOld`", &["symbol VcpuOfOld (VcpuOfOld)"]);
    check("`vmm/src/lib.rs` `--pmu` `KVM_RUN` `0x186`", &[]);
    check("`vmm/src/gone.rs`", &["path vmm/src/gone.rs"]);
    check("[b](https://x.test/y#z)", &[]);
    check("# A `b`, c\n[a](#a-b-c)", &[]);
    check("[a](#gone)", &["heading #gone"]);
    check("[a](docs/internals/testing.md#micro-guests)", &[]);
    check(
        "[a](docs/internals/testing.md#gone)",
        &["heading docs/internals/testing.md#gone"],
    );
    check("`cargo test -p x --test all -- a`", &[]);
    check("`cargo test --test gone`", &["test program gone"]);
    check("[a](docs/gone.md)", &["link docs/gone.md"]);
    check("```\n`Gone::gone`\n```\n`Vcpu`", &[]);
}

/// Whoever opens docs/ finds each page by its index.
#[test]
fn the_index_lists_every_page() {
    let docs = root().join("docs");
    let index = fs::read_to_string(docs.join("README.md")).expect("the index");
    let listed: HashSet<PathBuf> = links(&index).iter().map(|link| docs.join(link)).collect();
    let mut pages = Vec::new();
    files(&docs, "md", &mut pages);
    let lost: Vec<_> = pages
        .iter()
        .filter(|page| !page.ends_with("docs/README.md") && !listed.contains(*page))
        .collect();
    assert!(lost.is_empty(), "not in docs/README.md: {lost:?}");
}

/// The README is read to its end only if it is short.
#[test]
fn the_readme_is_short() {
    let length = fs::read(root().join("README.md"))
        .expect("the README")
        .len();
    assert!(length <= 7168, "README.md has {length} bytes");
}
