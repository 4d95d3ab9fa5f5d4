//! Each arbiter is shorter than 200 executable lines, all that it uses counted,
//! and the documentation says how long.

use std::fs;
use std::path::PathBuf;

const LIMIT: usize = 200;
/// What every arbiter uses.
const SHARED: [&str; 5] = ["discovery", "error", "master", "pool", "port"];
/// Each arbiter is built on those before it.
const ARBITERS: [(&str, &str); 3] = [
    ("minimal", "minimal master"),
    ("enforcing", "minimal enforcing master"),
    ("full", "fully enforcing master"),
];

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Lines in the bodies of functions, as rustfmt leaves them, that hold more than
/// punctuation, and are no comments and no attributes.
fn executable(source: &str) -> usize {
    let mut lines = 0;
    let mut body: Option<&str> = None;
    let mut signature: Option<&str> = None;
    for line in source.lines() {
        let text = line.trim_start();
        let indent = &line[..line.len() - text.len()];
        match (body, signature) {
            (Some(outer), _) if indent == outer && text == "}" => body = None,
            (Some(_), _) => {
                let is_code = !text.starts_with("//") && !text.starts_with("#[");
                lines += usize::from(is_code && text.contains(char::is_alphanumeric));
            }
            (None, None) if is_function(text) => signature = Some(indent),
            (None, _) => (),
        }
        if let (None, Some(outer)) = (body, signature) {
            if line.ends_with('{') {
                (body, signature) = (Some(outer), None);
            } else if line.ends_with(';') || line.ends_with('}') {
                signature = None;
            }
        }
    }
    lines
}

fn is_function(text: &str) -> bool {
    let words = text.split_whitespace();
    let mut words = words.skip_while(|word| word.starts_with("pub") || *word == "const");
    words.next() == Some("fn")
}

fn count(file: &str) -> usize {
    let path = folder().join("src/guest").join(file).with_extension("rs");
    let source = fs::read_to_string(&path).expect("a file of the arbiters");
    executable(&source)
}

#[test]
fn the_count_counts() {
    let source = "use a::b;\n\n/// Text.\nfn one(\n    x: u8,\n) -> u8 {\n    // Why.\n    \
                  let y = match x {\n        0 => 1,\n        _ => 2,\n    };\n    y\n}\n\n\
                  trait T {\n    fn two();\n    fn three() {\n        one(1);\n    }\n}\n\
                  struct S {\n    a: u8,\n}\nfn four() {}\nfn five() {\n    2\n}\n";
    assert_eq!(executable(source), 6);
}

/// Every file is counted for somebody.
#[test]
fn no_file_is_left_out() {
    let files = fs::read_dir(folder().join("src/guest")).expect("the folder of the arbiters");
    for file in files {
        let path = file.expect("an entry").path();
        let name = path
            .file_stem()
            .and_then(|stem| stem.to_str())
            .expect("a name");
        let is_arbiter = ARBITERS.iter().any(|(file, _)| *file == name);
        assert!(
            is_arbiter || SHARED.contains(&name) || name == "mod",
            "{name}"
        );
    }
    assert_eq!(count("mod"), 0);
}

#[test]
fn each_arbiter_is_short() {
    let shared: usize = SHARED.iter().map(|file| count(file)).sum();
    let page = fs::read_to_string(folder().join("../docs/pcr.md")).expect("the page");
    let mut lines = shared;
    for (file, name) in ARBITERS {
        let own = count(file);
        lines += own;
        println!("{name}: {lines} executable lines, {own} of them its own");
        assert!(lines < LIMIT, "the {name} has {lines} lines");
        let row = format!("| {name} | {own} | {lines} |");
        assert!(page.contains(&row), "docs/pcr.md has to have the row {row}");
    }
}
