//! What is run: the program, its arguments, its environment, and what of this machine it is given.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, IsTerminal};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

use count_init::Job;
use guest_files::Given;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::time::Timespec;
use umpire_count::Inputs;
use umpire_count::inputs::{digest, printable};
use vmm::count::Patience;

use super::ended::{Who, failed};
use crate::exit::{UserError, complain};
use crate::flags::GuestFlags;

/// What each program has of an environment.
const ENVIRONMENT: [(&str, &str); 4] = [
    (
        "PATH",
        "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    ),
    ("HOME", count_init::HOME),
    ("LANG", "C.UTF-8"),
    ("TERM", "dumb"),
];

/// The longest standard input: it is kept in memory.
const LONGEST_STDIN: usize = 1 << 30;
/// Bytes of it that are read at once.
const PIECE: usize = 1 << 16;
/// How long it is waited for before somebody looks whether that is over.
const TICK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};
/// After so many of these it is said that standard input is waited for.
const SILENT: u32 = 20;

/// A program to run.
#[derive(Debug)]
pub(super) struct Errand {
    pub(super) job: Job,
    pub(super) given: Given,
    pub(super) stdin: Vec<u8>,
    /// As it was typed.
    pub(super) title: String,
}

impl Errand {
    /// The one of the command line, without standard input.
    pub(super) fn of(command: &[OsString], flags: &GuestFlags) -> Result<Self, UserError> {
        let Some(name) = command.first() else {
            return Err(failed(
                "run what? give a program: umpire count -- gzip -k file",
            ));
        };
        let here = env::current_dir()
            .map_err(|error| failed(format!("this folder cannot be named: {error}")))?;
        let folder = match &flags.chdir {
            Some(folder) => absolute(folder, &here),
            None => here.clone(),
        };
        if !folder.is_dir() {
            let folder = folder.display();
            return Err(failed(format!("--chdir: {folder} is no folder")));
        }
        let program = find(name, &folder)?;
        let mut variables = flags.variables.clone();
        if let Some(path) = &flags.env_file {
            let bytes = fs::read(path)
                .map_err(|error| failed(format!("--env-file {}: {error}", path.display())))?;
            let lines = bytes
                .split(|byte| *byte == 0)
                .filter(|line| !line.is_empty());
            variables.extend(lines.map(|line| OsString::from_vec(line.to_vec())));
        }
        let with = flags.with.iter().map(|path| absolute(path, &here));
        let arguments: Vec<Vec<u8>> = command
            .iter()
            .map(|word| word.as_bytes().to_vec())
            .collect();
        let job = Job {
            programs: vec![program.as_os_str().as_bytes().to_vec()],
            arguments,
            environment: environment(&variables, &env::vars_os().collect())?,
            folder: folder.as_os_str().as_bytes().to_vec(),
            terminal: flags.tty,
            bring_back: flags.out.is_some(),
            tmp_is_given: false,
        };
        let given = Given {
            folder,
            program: Some(program),
            with: with.collect(),
        };
        let words: Vec<_> = command
            .iter()
            .map(|word| printable(word.as_bytes()))
            .collect();
        Ok(Errand {
            job,
            given,
            stdin: Vec::new(),
            title: words.join(" "),
        })
    }

    /// The same, with standard input, or who ended it before all of that was read.
    pub(super) fn with_stdin(
        mut self,
        patience: &Patience,
    ) -> Result<Result<Self, Who>, UserError> {
        match standard_input(patience)? {
            Ok(stdin) => {
                self.stdin = stdin;
                Ok(Ok(self))
            }
            Err(who) => Ok(Err(who)),
        }
    }

    /// What to try where the program has failed under cargo, whose tests may look for what it has
    /// set.
    pub(super) fn advice(&self) -> Option<&'static str> {
        const NAME: &str = "CARGO_MANIFEST_DIR";
        let start = format!("{NAME}=");
        let mut all = self.job.environment.iter();
        let is_given = all.any(|line| line.starts_with(start.as_bytes()));
        (env::var_os(NAME).is_some() && !is_given).then_some(
            "cargo's variables were not handed on to the program; --env CARGO_* does that",
        )
    }

    /// What of it a run depends on.
    pub(super) fn inputs(&self, inputs: &mut Inputs) {
        let text = printable;
        for (number, argument) in self.job.arguments.iter().enumerate() {
            inputs.add(format!("argument {number}"), text(argument));
        }
        for variable in &self.job.environment {
            let variable = text(variable);
            let (name, value) = variable.split_once('=').unwrap_or((&variable, ""));
            inputs.add(format!("environment {name}"), value);
        }
        inputs.add("folder", text(&self.job.folder));
        inputs.add("standard input", digest(&self.stdin));
        let output = if self.job.terminal {
            "a terminal"
        } else {
            "a pipe"
        };
        inputs.add("output", output);
    }
}

/// Without `.` and `..`, as the guest reads a path: a link is followed by nobody here.
fn absolute(path: &Path, here: &Path) -> PathBuf {
    let mut all = PathBuf::new();
    for part in here.join(path).components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                all.pop();
            }
            part => all.push(part),
        }
    }
    all
}

/// The program's file: a path, or a name that this shell's PATH knows.
fn find(name: &OsStr, folder: &Path) -> Result<PathBuf, UserError> {
    if name.as_bytes().contains(&b'/') {
        return Ok(absolute(Path::new(name), folder));
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let mut places = env::split_paths(&path).map(|place| absolute(&place.join(name), folder));
    let found = places.find(|place| {
        let metadata = fs::metadata(place);
        metadata.is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    });
    found.ok_or_else(|| {
        let name = name.to_string_lossy();
        failed(format!(
            "there is no program '{name}', neither a file nor a name on PATH"
        ))
    })
}

/// The environment: what each program has, and what `--env` says, by name.
fn environment(
    variables: &[OsString],
    here: &BTreeMap<OsString, OsString>,
) -> Result<Vec<Vec<u8>>, UserError> {
    let mut all: Vec<(OsString, OsString)> = ENVIRONMENT
        .map(|(name, value)| (name.into(), value.into()))
        .into();
    for variable in variables {
        let bytes = variable.as_bytes();
        if let Some(start) = bytes.strip_suffix(b"*").filter(|it| !it.contains(&b'=')) {
            let named = here.iter();
            let named = named.filter(|(name, _)| name.as_bytes().starts_with(start));
            let before = all.len();
            all.extend(named.map(|(name, value)| (name.clone(), value.clone())));
            if all.len() == before {
                let shown = variable.to_string_lossy();
                return Err(failed(format!(
                    "--env {shown}: no variable is set here whose name begins so"
                )));
            }
            continue;
        }
        let (name, value) = match bytes.iter().position(|byte| *byte == b'=') {
            Some(end) => (
                &bytes[..end],
                Some(OsStr::from_bytes(&bytes[end + 1..]).to_owned()),
            ),
            None => (bytes, here.get(variable).cloned()),
        };
        let shown = variable.to_string_lossy();
        if name.is_empty() {
            return Err(failed(format!("--env {shown}: a variable has a name")));
        }
        let name = OsString::from_vec(name.to_vec());
        let value = value.ok_or_else(|| {
            failed(format!(
                "--env {shown}: it is not set here; give it a value: {shown}=..."
            ))
        })?;
        all.push((name, value));
    }
    // Of one name the last one counts.
    let all: BTreeMap<OsString, OsString> = all.into_iter().collect();
    let line =
        |(name, value): (OsString, OsString)| [name.as_bytes(), b"=", value.as_bytes()].concat();
    Ok(all.into_iter().map(line).collect())
}

/// Standard input, whole, unless somebody ends it before. Nothing of a terminal, since a run takes
/// nothing while it goes on.
fn standard_input(patience: &Patience) -> Result<Result<Vec<u8>, Who>, UserError> {
    let stdin = io::stdin();
    let mut bytes = Vec::new();
    if stdin.is_terminal() {
        return Ok(Ok(bytes));
    }
    let unreadable = |error: Errno| failed(format!("standard input cannot be read: {error}"));
    let mut piece = vec![0; PIECE];
    let mut silent = 0;
    loop {
        if let Some(met) = patience.is_over() {
            return Ok(Err(met.into()));
        }
        let mut waits = [PollFd::new(&stdin, PollFlags::IN)];
        match poll(&mut waits, Some(&TICK)) {
            Ok(0) => {
                silent += 1;
                if silent == SILENT {
                    complain(
                        &"reading standard input to its end before the program starts; </dev/null \
                          gives it none",
                    );
                }
                continue;
            }
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(unreadable(error)),
        }
        match rustix::io::read(&stdin, &mut piece) {
            // A program that is started without one has none.
            Ok(0) | Err(Errno::BADF) => return Ok(Ok(bytes)),
            Ok(read) => bytes.extend_from_slice(piece.get(..read).unwrap_or_default()),
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(error) => return Err(unreadable(error)),
        }
        if bytes.len() > LONGEST_STDIN {
            return Err(failed(
                "standard input has more than 1 GiB: give the program a file",
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environments() {
        fn check(variables: &[&str], expected: Result<&[&str], &str>) {
            let variables: Vec<OsString> = variables.iter().map(OsString::from).collect();
            let here = [("THERE", "x=y"), ("THEN", "z")];
            let here = here.map(|(name, value)| (name.into(), value.into())).into();
            match (environment(&variables, &here), expected) {
                (Ok(found), Ok(expected)) => {
                    let mut all = vec![
                        "HOME=/user",
                        "LANG=C.UTF-8",
                        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                        "TERM=dumb",
                    ];
                    let name = |line: &str| line.split('=').next().map(str::to_owned);
                    all.retain(|line| expected.iter().all(|it| name(it) != name(line)));
                    all.extend(expected);
                    all.sort_unstable();
                    let expected: Vec<Vec<u8>> = all
                        .into_iter()
                        .map(|line| line.as_bytes().to_vec())
                        .collect();
                    assert_eq!(found, expected, "{variables:?}");
                }
                (Err(error), Err(part)) => {
                    assert!(error.to_string().contains(part), "{variables:?}: {error}");
                }
                (found, _) => panic!("{variables:?}: {found:?}"),
            }
        }
        check(&[], Ok(&[]));
        check(&["A=1", "A=2", "THERE"], Ok(&["A=2", "THERE=x=y"]));
        check(&["HOME=/x"], Ok(&["HOME=/x"]));
        check(&["THE*", "THEN=a*"], Ok(&["THEN=a*", "THERE=x=y"]));
        check(&["GONE_*"], Err("no variable is set here"));
        check(&["E="], Ok(&["E="]));
        check(&["GONE"], Err("it is not set here"));
        check(&["=1"], Err("a variable has a name"));
    }

    #[test]
    fn paths() {
        fn check(path: &str, expected: &str) {
            let found = absolute(Path::new(path), Path::new("/a/b"));
            assert_eq!(found, Path::new(expected), "{path}");
        }
        check("x", "/a/b/x");
        check("./x/../y", "/a/b/y");
        check("../../../x", "/x");
        check("/x/./y", "/x/y");
    }

    #[test]
    fn programs_are_found_by_path_and_by_name() {
        let found = |name: &str| find(OsStr::new(name), Path::new("/a"));
        assert_eq!(found("./x").expect("a path"), Path::new("/a/x"));
        assert!(found("sh").expect("a shell").is_absolute());
        let error = found("no-such-program-here").expect_err("none");
        assert!(
            error
                .to_string()
                .contains("there is no program 'no-such-program-here'")
        );
    }
}
