//! Each of the Linux modules that arbitrate counters is shorter than 200
//! executable lines, with what it uses of the headers that they share. Those in
//! Rust are counted by `arbiter/tests/guest/lines.rs`.
//!
//! A line counts unless it is blank, a comment, a directive of the preprocessor,
//! nothing but punctuation, metadata of the module (`MODULE_*`), or a prototype.
//! A macro with arguments is code, so its lines count. Of a header everything
//! counts except functions that the module never calls. The constants of the
//! ABI, which are generated, are preprocessor directives all.

use std::fs;
use std::path::{Path, PathBuf};

const LIMIT: usize = 200;
const HEADERS: [&str; 2] = ["pcr.h", "pcr_arbiter.h"];
const ARBITERS: [&str; 3] = ["pcr_minimal.c", "pcr_enforcing.c", "pcr_full.c"];
/// A user of a private counter, and no arbiter.
const CLIENT: &str = "pcr_client.c";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("linux/pcr")
}

fn read(file: &str) -> String {
    let path = folder().join(file);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Comments become what they are for the compiler: nothing. Line breaks stay.
fn without_comments(source: &str) -> String {
    let mut code = String::new();
    let mut rest = source;
    while let Some(start) = rest.find("/*") {
        let length = rest[start..].find("*/").expect("the comment ends") + 2;
        code.push_str(&rest[..start]);
        code.extend(rest[start..start + length].matches('\n'));
        rest = &rest[start + length..];
    }
    code.push_str(rest);
    let lines = code.lines().map(|line| match line.split_once("//") {
        Some((code, _)) => code,
        None => line,
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// A function, or a run of lines outside of any.
#[derive(Debug, Default)]
struct Item {
    /// The function's.
    name: Option<String>,
    lines: Vec<String>,
}

/// The items of a file, with the lines that count.
fn items(source: &str) -> Vec<Item> {
    let mut items = Vec::new();
    let mut item = Item::default();
    let (mut depth, mut directive, mut open) = (0_usize, None, String::new());
    for line in without_comments(source).lines() {
        let text = line.trim();
        // A directive goes on after a backslash.
        let is_macro = *directive.get_or_insert_with(|| is_macro(text));
        let in_directive = is_macro.is_some();
        if !(in_directive && text.ends_with('\\')) {
            directive = None;
        }
        if is_macro == Some(false) {
            continue;
        }
        if depth == 0 && !in_directive {
            open.push_str(text);
            open.push(' ');
        }
        if text.contains(char::is_alphanumeric) {
            item.lines.push(text.to_owned());
        }
        if in_directive {
            continue;
        }
        let opens_function = depth == 0 && text == "{";
        if opens_function {
            item.name = function_name(&open);
        }
        depth += text.matches('{').count();
        depth -= text.matches('}').count();
        let ends = depth == 0 && text.ends_with(['}', ';']);
        if ends {
            let ended = std::mem::take(&mut item);
            let open = std::mem::take(&mut open);
            if !is_metadata(&open) && !is_prototype(&open) {
                items.push(ended);
            }
        }
    }
    assert_eq!(depth, 0, "braces match");
    items.push(item);
    items
}

/// `None`: no directive; else whether it defines a macro with arguments.
fn is_macro(text: &str) -> Option<bool> {
    let directive = text.strip_prefix('#')?;
    let Some(definition) = directive.trim_start().strip_prefix("define") else {
        return Some(false);
    };
    let is_name = |letter: char| letter.is_alphanumeric() || letter == '_';
    Some(
        definition
            .trim_start()
            .trim_start_matches(is_name)
            .starts_with('('),
    )
}

/// The name before the first bracket of `static int f(void) { `.
fn function_name(open: &str) -> Option<String> {
    words(open.split_once('(')?.0).last().map(str::to_owned)
}

fn is_metadata(open: &str) -> bool {
    open.starts_with("MODULE_")
}

/// `int f(struct s *x);`: two words at least before the bracket, and no value.
fn is_prototype(open: &str) -> bool {
    let Some((before, _)) = open.split_once('(') else {
        return false;
    };
    let is_declaration = words(before).count() >= 2 && !before.contains('=');
    is_declaration && open.trim_end().ends_with(");") && !before.contains("DEFINE_")
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|letter: char| !letter.is_alphanumeric() && letter != '_')
        .filter(|word| !word.is_empty())
}

/// Lines of a module with what it uses of the headers.
fn count(module: &str, headers: &[&str]) -> usize {
    let mut used = items(module);
    let mut unused: Vec<Item> = headers.iter().flat_map(|header| items(header)).collect();
    // Until nothing is found any more: what is used uses others.
    loop {
        let is_used = |item: &Item| match &item.name {
            Some(name) => used
                .iter()
                .flat_map(|item| &item.lines)
                .any(|line| words(line).any(|word| word == name)),
            None => true,
        };
        let (more, rest): (Vec<_>, Vec<_>) = unused.into_iter().partition(is_used);
        unused = rest;
        if more.is_empty() {
            return used.iter().map(|item| item.lines.len()).sum();
        }
        used.extend(more);
    }
}

#[test]
fn the_count_counts() {
    let header = "#ifndef H\n#define H\n/* One\n * f(); two */\n#define ONE 1\n\
                  #define TWO(x) \\\n\tf(x); \\\n\tg(x)\n\
                  struct s { // three\n\tint a;\n};\n\nstatic int f(int a)\n{\n\treturn a;\n}\n\
                  static int unused(int a)\n{\n\treturn f(a);\n}\nint later(int a);\n#endif\n";
    // The macro's three lines, the structure's two, and f's two.
    assert_eq!(
        count("int x;\nvoid m(void)\n{\n\n\tf(1);\n}\n", &[header]),
        3 + 7
    );
    // The macro calls f, whoever uses the macro.
    assert_eq!(count("", &[header]), 7);
    assert_eq!(count("", &["static int f(void)\n{\n\treturn 1;\n}\n"]), 0);
    assert_eq!(count("MODULE_LICENSE(\"X\");\nmodule_init(m);\n", &[]), 1);
    assert_eq!(count("static DEFINE_SPINLOCK(lock);\n", &[]), 1);
    assert_eq!(count("static int a[] = {\n\t1,\n};\n", &[]), 2);
    assert_eq!(
        count("int f(void)\n{\n\tif (a) {\n\t\tb();\n\t}\n}\n", &[]),
        3
    );
}

#[test]
fn each_module_is_short() {
    let headers = HEADERS.map(read);
    let headers = headers.each_ref().map(String::as_str);
    for file in ARBITERS {
        let lines = count(&read(file), &headers);
        println!("{file}: {lines} executable lines, headers included");
        assert!(lines > 50, "{file} is not counted right: {lines}");
        assert!(lines < LIMIT, "{file} has {lines} lines");
    }
}

/// Every file is counted for somebody.
#[test]
fn no_file_is_left_out() {
    let files = fs::read_dir(folder()).expect("the folder of the modules");
    let known = [&HEADERS[..], &ARBITERS, &[CLIENT]].concat();
    let mut sources = 0;
    for file in files {
        let name = file.expect("an entry").file_name();
        let name = name.to_str().expect("a name");
        if name.ends_with(".c") || name.ends_with(".h") {
            assert!(known.contains(&name), "{name}");
            sources += 1;
        }
    }
    assert_eq!(sources, known.len());
}
