//! What to run in L1: a program with its arguments, environment and files.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::error::L1Error;

/// Where files for `--out` are written in L1; `UMPIRE_OUT` names it to the command.
pub(crate) const GUEST_OUT: &str = "/l1/out";
/// Set to 1 in L1.
const MARK: &str = "UMPIRE_L1";
/// Variables with these prefixes travel into L1.
const PASSED: [&str; 4] = ["RUST_", "PROPTEST_", "UMPIRE_", "LD_LIBRARY_PATH"];

/// Whether this process runs inside the L1 machine.
pub fn inside() -> bool {
    env::var_os(MARK).is_some()
}

/// A command for the L1 machine.
///
/// The program, its shared libraries, the files that its arguments name and the added files appear in
/// L1 under the names that they have here; so does the working directory, which is otherwise empty.
/// Of the environment, `RUST_*`, `PROPTEST_*`, `UMPIRE_*` and `LD_LIBRARY_PATH` travel along.
#[derive(Debug, Clone)]
pub struct Run {
    pub(crate) program: OsString,
    pub(crate) args: Vec<OsString>,
    pub(crate) environment: BTreeMap<OsString, OsString>,
    pub(crate) files: Vec<(PathBuf, PathBuf)>,
    pub(crate) out: Option<PathBuf>,
}

impl Run {
    /// A run of `program`: a path, or a name to be found on `PATH`.
    pub fn new(program: impl Into<OsString>) -> Self {
        Self {
            program: program.into(),
            args: Vec::new(),
            environment: passed(env::vars_os()),
            files: Vec::new(),
            out: None,
        }
    }

    /// Runs the calling test again in L1: the one test called `name` of this executable. There
    /// [`inside`] is true, by which the test tells its two sides apart.
    ///
    /// # Errors
    /// The executable of this process cannot be found.
    pub fn this_test(name: &str) -> Result<Self, L1Error> {
        let program = env::current_exe().map_err(L1Error::file("find", "this executable"))?;
        Ok(Self::new(program).args(["--exact", name, "--nocapture", "--test-threads=1"]))
    }

    /// Adds one argument.
    #[must_use]
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Sets a variable of the command's environment.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.environment.insert(name.into(), value.into());
        self
    }

    /// Adds a file or a directory of this machine, under its own name.
    #[must_use]
    pub fn file(self, host: impl Into<PathBuf>) -> Self {
        let host = host.into();
        self.file_as(host.clone(), host)
    }

    /// Adds a file or a directory of this machine under the name `guest` in L1.
    #[must_use]
    pub fn file_as(mut self, host: impl Into<PathBuf>, guest: impl Into<PathBuf>) -> Self {
        self.files.push((host.into(), guest.into()));
        self
    }

    /// Brings what the command writes below `$UMPIRE_OUT` back into the directory `out`.
    #[must_use]
    pub fn out(mut self, out: impl Into<PathBuf>) -> Self {
        self.out = Some(out.into());
        self
    }

    /// The program as an absolute path.
    pub(crate) fn resolve(&self) -> Result<PathBuf, L1Error> {
        let paths = env::var_os("PATH").unwrap_or_default();
        find_program(&self.program, &paths)
    }

    /// The files of this machine that arguments name (`FILE`, or `--option=FILE`), as absolute paths.
    pub(crate) fn named_files(&self) -> Vec<PathBuf> {
        let value = |arg: &OsString| {
            let bytes = arg.as_bytes();
            let after = bytes.iter().position(|byte| *byte == b'=');
            let after = after.map(|at| OsStr::from_bytes(&bytes[at + 1..]).to_owned());
            [Some(arg.clone()), after]
        };
        let values = self.args.iter().flat_map(value).flatten();
        let files = values.filter(|value| Path::new(value).is_file());
        files
            .filter_map(|file| std::path::absolute(file).ok())
            .collect()
    }

    /// The shell script that runs the command in L1.
    pub(crate) fn script(&self, program: &Path, cwd: &Path) -> Vec<u8> {
        let mut script =
            b"export PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin:/l1/bin HOME=/root\n"
                .to_vec();
        script.extend(format!("export {MARK}=1\n").into_bytes());
        if self.out.is_some() {
            script.extend(format!("export UMPIRE_OUT={GUEST_OUT}\n").into_bytes());
        }
        for (name, value) in &self.environment {
            script.extend(b"export ");
            script.extend(name.as_bytes());
            script.push(b'=');
            script.extend(quoted(value));
            script.push(b'\n');
        }
        script.extend(b"cd ");
        script.extend(quoted(cwd.as_os_str()));
        script.extend(b" || exit 125\nexec ");
        script.extend(quoted(program.as_os_str()));
        for arg in &self.args {
            script.push(b' ');
            script.extend(quoted(arg));
        }
        script.push(b'\n');
        script
    }
}

/// Finds `program` as a shell does: a name with a slash is a path, another one is looked for on `paths`.
pub(crate) fn find_program(program: &OsStr, paths: &OsStr) -> Result<PathBuf, L1Error> {
    let executable = |path: &PathBuf| {
        path.metadata()
            .is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
    };
    let found = if program.as_bytes().contains(&b'/') {
        Some(PathBuf::from(program)).filter(executable)
    } else {
        let candidates = env::split_paths(paths).map(|folder| folder.join(program));
        candidates.into_iter().find(executable)
    };
    let found = found.and_then(|path| std::path::absolute(path).ok());
    found.ok_or_else(|| L1Error::NoProgram {
        program: program.to_string_lossy().into_owned(),
    })
}

fn passed(variables: impl Iterator<Item = (OsString, OsString)>) -> BTreeMap<OsString, OsString> {
    let own = |name: &OsString| {
        ["UMPIRE_CACHE", "UMPIRE_OUT", MARK]
            .iter()
            .any(|own| name == own)
    };
    let wanted = |name: &OsString| {
        PASSED
            .iter()
            .any(|prefix| name.as_bytes().starts_with(prefix.as_bytes()))
            && !own(name)
    };
    let shell_name = |name: &OsString| {
        name.as_bytes()
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_')
    };
    variables
        .filter(|(name, _)| wanted(name) && shell_name(name))
        .collect()
}

/// Quotes for the shell: everything between single quotes is literal, except a single quote.
fn quoted(text: &OsStr) -> Vec<u8> {
    let mut quoted = vec![b'\''];
    for byte in text.as_bytes() {
        match byte {
            b'\'' => quoted.extend(br"'\''"),
            _ => quoted.push(*byte),
        }
    }
    quoted.push(b'\'');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(bytes: &[u8]) -> String {
        String::from_utf8_lossy(bytes).into_owned()
    }

    #[test]
    fn quoting() {
        fn check(input: &str, expected: &str) {
            assert_eq!(text(&quoted(OsStr::new(input))), expected);
        }
        check("", "''");
        check("a b$c", "'a b$c'");
        check("it's", r"'it'\''s'");
    }

    #[test]
    fn scripts() {
        let mut run = Run::new("tool").arg("a b").env("K", "v'w").out("x");
        run.environment.retain(|name, _| name == "K");
        let script = text(&run.script(Path::new("/t/tool"), Path::new("/w d")));
        let expected = "export UMPIRE_L1=1\nexport UMPIRE_OUT=/l1/out\nexport K='v'\\''w'\ncd '/w d' || exit 125\nexec '/t/tool' 'a b'\n";
        assert!(script.ends_with(expected), "{script}");
    }

    #[test]
    fn programs() {
        fn check(program: &str, paths: &str, expected: Option<&str>) {
            let found = find_program(OsStr::new(program), OsStr::new(paths)).ok();
            assert_eq!(found, expected.map(PathBuf::from), "{program}");
        }
        check("sh", "/nowhere:/bin", Some("/bin/sh"));
        check("sh", "/nowhere", None);
        check("/bin/sh", "", Some("/bin/sh"));
        check("/etc/passwd", "", None);
        check("/bin", "", None);
    }

    #[test]
    fn environment_that_travels() {
        fn check(name: &str, expected: bool) {
            let found = passed([(OsString::from(name), OsString::from("x"))].into_iter());
            assert_eq!(!found.is_empty(), expected, "{name}");
        }
        check("RUST_LOG", true);
        check("UMPIRE_COUNTERS", true);
        check("LD_LIBRARY_PATH", true);
        check("UMPIRE_CACHE", false);
        check("UMPIRE_L1", false);
        check("PATH", false);
        check("RUST_a-b", false);
    }

    #[test]
    fn arguments_that_name_files() {
        let this = std::env::current_exe().expect("a test has a file");
        let option = format!("--kernel={}", this.display());
        let run = Run::new("x")
            .args(["-v", "/nowhere", "/", &option])
            .arg(&this);
        assert_eq!(run.named_files(), [this.clone(), this]);
    }
}
