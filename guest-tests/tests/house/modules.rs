//! Cycles of modules inside a crate.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::root;

/// A module's path below its crate: `["vcpu", "run"]`; empty for the root.
type Name = Vec<String>;

/// The modules of a crate, and who uses whom.
struct Modules {
    texts: BTreeMap<Name, String>,
}

/// Source folders of the libraries and programs of this repository.
fn sources() -> Vec<PathBuf> {
    fn visit(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("a folder of the repository") {
            let path = entry.expect("an entry").path();
            let skipped = ["target", "fuzz", ".git", "tests", "benches", "examples"];
            if !path.is_dir() || skipped.iter().any(|name| path.ends_with(name)) {
                continue;
            }
            if path.ends_with("src") {
                found.push(path);
            } else {
                visit(&path, found);
            }
        }
    }
    let mut found = Vec::new();
    visit(&root(), &mut found);
    found.sort();
    found
}

/// The code of a file without comments, strings and tests.
pub(crate) fn code_of(text: &str) -> String {
    let mut code = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line.trim_start().starts_with("#[cfg(test)]") {
            // One item may be for tests alone; a module of tests stands at the end.
            if lines.next().is_some_and(|item| item.ends_with(';')) {
                continue;
            }
            break;
        }
        let line = line.split("//").next().unwrap_or("");
        // What is in a string is no path.
        for (index, part) in line.split('"').enumerate() {
            if index % 2 == 0 {
                code.push_str(part);
            }
        }
        code.push('\n');
    }
    code
}

/// The words and signs of code.
pub(crate) fn tokens(code: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = code;
    while let Some(first) = rest.chars().next() {
        let word = |letter: char| letter.is_alphanumeric() || letter == '_';
        let length = if word(first) {
            rest.find(|letter| !word(letter)).unwrap_or(rest.len())
        } else if rest.starts_with("::") {
            2
        } else {
            first.len_utf8()
        };
        let (token, after) = rest.split_at(length);
        if !token.trim().is_empty() {
            tokens.push(token);
        }
        rest = after;
    }
    tokens
}

/// Every path in code that begins at `crate`, `self` or `super`, groups in braces
/// written out.
fn paths(code: &str) -> Vec<Name> {
    let tokens = tokens(code);
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let begins = matches!(tokens[at], "crate" | "self" | "super");
        let goes_on = tokens.get(at + 1) == Some(&"::");
        if begins && goes_on && (at == 0 || tokens[at - 1] != "::") {
            at = path(&tokens, at, &[], &mut found);
        } else {
            at += 1;
        }
    }
    found
}

/// Reads a path at `at` behind `before`; gives where it ends.
fn path(tokens: &[&str], mut at: usize, before: &[String], found: &mut Vec<Name>) -> usize {
    let mut name = before.to_vec();
    loop {
        match tokens.get(at) {
            Some(&"{") => {
                at += 1;
                while tokens.get(at).is_some_and(|token| *token != "}") {
                    if tokens[at] == "," {
                        at += 1;
                    } else {
                        let next = path(tokens, at, &name, found);
                        // `as name` and the like.
                        at = next.max(at + 1);
                    }
                }
                return at + 1;
            }
            Some(word) if word.starts_with(|c: char| c.is_alphabetic() || c == '_') => {
                name.push((*word).to_owned());
                at += 1;
            }
            _ => {
                at += 1;
                break;
            }
        }
        if tokens.get(at) == Some(&"::") {
            at += 1;
        } else {
            break;
        }
    }
    found.push(name);
    at
}

impl Modules {
    fn read(source: &Path) -> Self {
        fn visit(folder: &Path, at: &[String], texts: &mut BTreeMap<Name, String>) {
            for entry in fs::read_dir(folder).expect("a folder of sources") {
                let path = entry.expect("an entry").path();
                let stem = path
                    .file_stem()
                    .and_then(|stem| stem.to_str())
                    .unwrap_or("");
                let is_test = stem == "tests" || stem.ends_with("_tests") || stem == "testing";
                if is_test {
                    continue;
                }
                let mut name = at.to_vec();
                if path.is_dir() {
                    name.push(stem.to_owned());
                    visit(&path, &name, texts);
                } else if path.extension().is_some_and(|ending| ending == "rs") {
                    let is_root = at.is_empty() && matches!(stem, "lib" | "main");
                    if !is_root && stem != "mod" {
                        name.push(stem.to_owned());
                    }
                    let text = fs::read_to_string(&path).expect("a source file");
                    texts.entry(name).or_default().push_str(&code_of(&text));
                }
            }
        }
        let mut texts = BTreeMap::new();
        visit(source, &[], &mut texts);
        Self { texts }
    }

    /// A path as seen from `module`, from the root on.
    fn absolute(&self, module: &Name, path: &Name) -> Name {
        let mut absolute: Name = match path.first().map(String::as_str) {
            Some("crate") => Vec::new(),
            _ => module.clone(),
        };
        for part in path {
            match part.as_str() {
                "crate" | "self" => {}
                "super" => {
                    absolute.pop();
                }
                part => absolute.push(part.to_owned()),
            }
        }
        absolute
    }

    /// The module that has what `path` names; a name that a module passes on is
    /// followed to where it comes from.
    fn owner(&self, path: &Name, depth: usize) -> Name {
        let mut module = path.clone();
        while !self.texts.contains_key(&module) && module.pop().is_some() {}
        let (Some(item), true) = (path.get(module.len()), depth < 4) else {
            return module;
        };
        let Some(code) = self.texts.get(&module) else {
            return module;
        };
        for line in code.split(';').filter(|line| line.contains("use ")) {
            let Some((_, used)) = line.rsplit_once("use ") else {
                continue;
            };
            // A child may be named without `self`.
            let first = tokens(used).first().map(|first| (*first).to_owned());
            let used = match first.as_deref() {
                Some("crate" | "self" | "super") => used.to_owned(),
                _ => format!("self::{used}"),
            };
            for found in paths(&used) {
                if found.last() == Some(item) {
                    let target = self.absolute(&module, &found);
                    if self
                        .texts
                        .keys()
                        .any(|name| !name.is_empty() && target.starts_with(name))
                    {
                        return self.owner(&target, depth + 1);
                    }
                }
            }
        }
        module
    }

    /// Who uses whom among the children of one module, with all that lies below
    /// each. A module and its parent may use each other.
    fn edges(&self) -> BTreeMap<Name, BTreeSet<Name>> {
        let mut edges: BTreeMap<Name, BTreeSet<Name>> = BTreeMap::new();
        for (module, code) in &self.texts {
            for path in paths(code) {
                let owner = self.owner(&self.absolute(module, &path), 0);
                let common = module
                    .iter()
                    .zip(&owner)
                    .take_while(|(a, b)| a == b)
                    .count();
                if common < module.len() && common < owner.len() {
                    let from = module[..=common].to_vec();
                    edges
                        .entry(from)
                        .or_default()
                        .insert(owner[..=common].to_vec());
                }
            }
        }
        edges
    }
}

/// Where one can get from `from`.
fn reached(edges: &BTreeMap<Name, BTreeSet<Name>>, from: &Name) -> BTreeSet<Name> {
    let mut reached = BTreeSet::new();
    let mut left = vec![from.clone()];
    while let Some(module) = left.pop() {
        for next in edges.get(&module).into_iter().flatten() {
            if reached.insert(next.clone()) {
                left.push(next.clone());
            }
        }
    }
    reached
}

/// Groups of modules each of which leads to every other one.
fn cycles(edges: &BTreeMap<Name, BTreeSet<Name>>) -> BTreeSet<BTreeSet<Name>> {
    let reached: BTreeMap<&Name, BTreeSet<Name>> = edges
        .keys()
        .map(|module| (module, reached(edges, module)))
        .collect();
    let mut found = BTreeSet::new();
    for (module, there) in &reached {
        if there.contains(*module) {
            let back = |other: &&Name| {
                reached
                    .get(*other)
                    .is_some_and(|there| there.contains(*module))
            };
            found.insert(there.iter().filter(back).cloned().collect());
        }
    }
    found
}

#[test]
fn modules_have_no_cycles() {
    let mut wrong = Vec::new();
    let mut crates = 0;
    for source in sources() {
        let modules = Modules::read(&source);
        crates += 1;
        for cycle in cycles(&modules.edges()) {
            let names: Vec<String> = cycle.iter().map(|name| name.join("::")).collect();
            let source = source.strip_prefix(root()).unwrap_or(&source);
            wrong.push(format!("{}: {}", source.display(), names.join(" <-> ")));
        }
    }
    assert!(crates > 8, "only {crates} crates were found");
    assert!(
        wrong.is_empty(),
        "{} cycles\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

#[test]
fn a_cycle_is_found() {
    let check = |files: &[(&str, &str)], expected: usize| {
        let name = |path: &str| {
            let parts = path.split("::").filter(|part| !part.is_empty());
            parts.map(str::to_owned).collect::<Name>()
        };
        let texts = files.iter().map(|(path, text)| (name(path), code_of(text)));
        let modules = Modules {
            texts: texts.collect(),
        };
        let found = cycles(&modules.edges());
        assert_eq!(found.len(), expected, "{files:?}: {found:?}");
    };
    check(
        &[("", "mod a; mod b;"), ("a", "use crate::b::B;"), ("b", "")],
        0,
    );
    check(
        &[
            ("", ""),
            ("a", "use crate::b::B;"),
            ("b", "fn f() { crate::a::g() }"),
        ],
        1,
    );
    check(
        &[
            ("", ""),
            ("a", "use crate::{b::B, c::{C, D}};"),
            ("b", ""),
            ("c", "use super::a;"),
        ],
        1,
    );
    // Through the root, which passes a name on.
    check(
        &[
            ("", "pub use a::A;\npub use b::B;"),
            ("a", "use crate::B;"),
            ("b", "use crate::A;"),
        ],
        1,
    );
    // A parent and its child.
    check(
        &[
            ("", ""),
            ("a", "use self::b::B;"),
            ("a::b", "use super::A;"),
        ],
        0,
    );
    check(
        &[
            ("", ""),
            ("a", ""),
            ("a::b", "use super::c::C;"),
            ("a::c", "use super::b::B;"),
        ],
        1,
    );
    // Two rooms that need each other, though no two files do.
    check(
        &[
            ("", ""),
            ("a::x", "use crate::b::z;"),
            ("a::y", ""),
            ("b::z", ""),
            ("b::w", "use crate::a::y;"),
        ],
        1,
    );
    // Comments, strings and tests are no code.
    check(
        &[
            ("", ""),
            ("a", "use crate::b::B;"),
            ("b", "// crate::a::A\nlet s = \"crate::a\";"),
        ],
        0,
    );
    check(
        &[
            ("", ""),
            ("a", "use crate::b::B;"),
            ("b", "#[cfg(test)]\nmod tests { use crate::a; }"),
        ],
        0,
    );
}
