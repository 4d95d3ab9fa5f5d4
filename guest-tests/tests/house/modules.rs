//! Cycles of modules inside a crate.

use std::collections::{BTreeMap, BTreeSet};

use super::sources::{code_of, sources, tokens};

/// A module's path below its crate: `["vcpu", "run"]`; empty for the root.
type Name = Vec<String>;

/// The modules of a crate, and who uses whom.
#[derive(Default)]
struct Modules {
    texts: BTreeMap<Name, String>,
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
    /// The crates of the repository by their `src`, each with its modules.
    fn of_crates() -> BTreeMap<String, Self> {
        let mut crates: BTreeMap<String, Self> = BTreeMap::new();
        for source in sources() {
            let parts: Vec<&str> = source.path.split('/').collect();
            let Some(root) = parts.iter().position(|part| *part == "src") else {
                continue;
            };
            let (folder, below) = parts.split_at(root + 1);
            let stems = below.iter().map(|part| part.trim_end_matches(".rs"));
            let mut name: Name = stems.map(str::to_owned).collect();
            if let ["lib.rs" | "main.rs"] | [.., "mod.rs"] = below {
                name.pop();
            }
            let modules = crates.entry(folder.join("/")).or_default();
            let code = modules.texts.entry(name).or_default();
            code.push_str(&source.code);
        }
        crates
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
    let crates = Modules::of_crates();
    assert!(crates.len() > 8, "only {} crates were found", crates.len());
    let mut wrong = Vec::new();
    for (folder, modules) in crates {
        for cycle in cycles(&modules.edges()) {
            let names: Vec<String> = cycle.iter().map(|name| name.join("::")).collect();
            wrong.push(format!("{folder}: {}", names.join(" <-> ")));
        }
    }
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
