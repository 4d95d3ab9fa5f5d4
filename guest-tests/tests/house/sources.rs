//! Source files of the repository, and the words in them.

use std::fs;
use std::path::{Path, PathBuf};

use super::root;

/// A source file by its path in the repository, and its code without comments,
/// strings and tests.
pub(crate) struct Source {
    pub(crate) path: String,
    pub(crate) code: String,
    pub(crate) whole: String,
}

/// Source files of libraries and programs; their tests, benches and examples
/// may do what they like.
pub(crate) fn sources() -> Vec<Source> {
    fn visit(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("a folder of the repository") {
            let path = entry.expect("an entry").path();
            let skipped = [
                "target", "fuzz", ".git", "tests", "benches", "examples", "build",
            ];
            let stem = path
                .file_stem()
                .and_then(|stem| stem.to_str())
                .unwrap_or("");
            if stem == "tests" || stem.ends_with("_tests") || stem == "testing" {
                continue;
            }
            if path.is_dir() {
                if !skipped.iter().any(|name| path.ends_with(name)) {
                    visit(&path, found);
                }
            } else if path.extension().is_some_and(|ending| ending == "rs") {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    visit(&root(), &mut found);
    found.sort();
    let source = |path: PathBuf| {
        let whole = fs::read_to_string(&path).expect("a source file");
        let path = path
            .strip_prefix(root())
            .unwrap_or(&path)
            .display()
            .to_string();
        Source {
            path,
            code: code_of(&whole),
            whole,
        }
    };
    let found: Vec<Source> = found.into_iter().map(source).collect();
    assert!(found.len() > 200, "only {} files were found", found.len());
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
