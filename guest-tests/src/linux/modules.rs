//! Builds the kernel modules of `guest-tests/linux/pcr` against the guest's own kernel.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::l1::tool::capture;
use crate::l1::{HEADERS, L1Error};

/// The modules, without `.ko`; `pcr_client` needs `pcr_full`.
pub const MODULES: [&str; 4] = ["pcr_minimal", "pcr_enforcing", "pcr_full", "pcr_client"];

macro_rules! source {
    ($name:literal) => {
        ($name, include_str!(concat!("../../linux/pcr/", $name)))
    };
}

const SOURCES: [(&str, &str); 8] = [
    source!("Kbuild"),
    source!("pcr.h"),
    source!("pcr_arbiter.h"),
    source!("pcr_minimal.c"),
    source!("pcr_enforcing.c"),
    source!("pcr_full.c"),
    source!("pcr_client.c"),
    (
        "umpire_pcr.h",
        include_str!("../../../arbiter/include/umpire_pcr.h"),
    ),
];
const ADVICE: &str = "GNU make and a C compiler are needed, gcc-12 as for Debian's kernel if there is one (Debian: make and gcc)";

/// Builds all modules; `kernel` is the cached set of the guest's kernel. Names and contents.
pub(super) fn build(kernel: &Path) -> Result<Vec<(String, Vec<u8>)>, L1Error> {
    let folder = tempfile::Builder::new().prefix("modules-").tempdir();
    let folder = folder.map_err(L1Error::file("create a folder in", std::env::temp_dir()))?;
    for (name, text) in SOURCES {
        let path = folder.path().join(name);
        fs::write(&path, text).map_err(L1Error::file("write", &path))?;
    }
    let mut make = Command::new("make");
    make.arg("-C")
        .arg(kernel.join(HEADERS))
        .arg(format!("M={}", folder.path().display()))
        .args(["modules", "KCFLAGS=-Werror"]);
    if !on_path("gcc-12") {
        make.arg("CC=gcc");
    }
    // Options of a make or cargo above are not for this one.
    for variable in ["MAKEFLAGS", "MAKELEVEL", "MFLAGS", "ARCH", "CROSS_COMPILE"] {
        make.env_remove(variable);
    }
    capture(&mut make, "building the guest's modules", ADVICE)?;
    MODULES
        .iter()
        .map(|name| Ok((format!("{name}.ko"), small(folder.path(), name)?)))
        .collect()
}

/// The module without its debug information, which is nine tenths of it.
fn small(folder: &Path, name: &str) -> Result<Vec<u8>, L1Error> {
    let path = folder.join(format!("{name}.ko"));
    let mut strip = Command::new("strip");
    strip.arg("--strip-debug").arg(&path);
    capture(&mut strip, "stripping a module", ADVICE)?;
    fs::read(&path).map_err(L1Error::file("read", &path))
}

fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let files = std::env::split_paths(&path).map(|folder: PathBuf| folder.join(program));
    files.into_iter().any(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines with code: without comments, blank lines, preprocessor directives and lone braces.
    fn lines_of_code(text: &str) -> usize {
        let mut code = String::new();
        let mut rest = text;
        while let Some((before, comment)) = rest.split_once("/*") {
            code.push_str(before);
            rest = comment.split_once("*/").map_or("", |(_, after)| after);
        }
        code.push_str(rest);
        let mut continued = false;
        let mut count = 0;
        for line in code.lines().map(str::trim) {
            let directive = continued || line.starts_with('#');
            continued = directive && line.ends_with('\\');
            let braces = line.chars().all(|letter| "{};,".contains(letter));
            count += usize::from(!directive && !braces && !line.starts_with("//"));
        }
        count
    }

    /// `text` without the function `name`.
    fn without(text: &str, name: &str) -> String {
        let at = text.find(name).expect("the function is there");
        let start = text[..at].rfind("\n\n").expect("a line before it");
        let end = at + text[at..].find("\n}\n").expect("its end") + 3;
        format!("{}{}", &text[..start], &text[end..])
    }

    #[test]
    fn lines() {
        fn check(text: &str, expected: usize) {
            assert_eq!(lines_of_code(text), expected, "{text}");
        }
        check("", 0);
        check("#include <x>\n#define A \\\n\tb\nint a;\n", 1);
        check(
            "/* one\n * two */\nint f(void)\n{\n\treturn 1; /* x */\n}\n",
            2,
        );
        check("// no\n};\n\n\tf();\n", 1);
    }

    /// The paper's claim (III.C), with room for what its prototype left out.
    #[test]
    fn each_arbiter_has_less_than_200_lines() {
        let text = |wanted: &str| {
            let found = SOURCES.iter().find(|(name, _)| *name == wanted);
            found.expect("a source").1
        };
        // No arbiter reads a register that takes a cookie; the client does.
        let access = without(text("pcr.h"), "pcr_rdmsr_safe(");
        let shared = lines_of_code(&access) + lines_of_code(text("pcr_arbiter.h"));
        for name in ["pcr_minimal.c", "pcr_enforcing.c", "pcr_full.c"] {
            let all = shared + lines_of_code(text(name));
            println!("{name}: {all} lines of code, {shared} of them shared");
            assert!(all < 200, "{name}: {all} lines");
        }
    }
}
