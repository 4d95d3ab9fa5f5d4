//! `--as callgrind`: the options of Valgrind that a harness gives its tool Callgrind.
//!
//! An option is served, or changes nothing of what is counted here, or is refused by its name.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::process;

use super::ended::failed;
use super::whole;
use crate::exit::UserError;
use crate::flags::{CollectFlags, CountFlags};

/// The one tool that is served.
const TOOL: &str = "callgrind";

/// What an option of Valgrind's asks for.
#[derive(Clone, Copy, Debug)]
enum Asks {
    /// Nothing that would change counts or files.
    Nothing,
    /// Nothing with this value; else what is not there, in words.
    NothingBut(&'static str, &'static str),
}

use Asks::{Nothing, NothingBut};

/// The options that name files.
pub(super) const PROFILE: &str = "--callgrind-out-file";
pub(super) const LOG: &str = "--log-file";

const NO_EVENTS: &str = "the only event is Ir";

/// Options that have a value, without those that are served.
const OPTIONS: [(&str, Asks); 26] = [
    // Of caches there are none: what asks for them is said in the log.
    ("--I1", Nothing),
    ("--D1", Nothing),
    ("--LL", Nothing),
    ("--compress-pos", Nothing),
    ("--dump-line", Nothing),
    ("--error-exitcode", Nothing),
    ("--fair-sched", Nothing),
    ("--num-callers", Nothing),
    ("--run-libc-freeres", Nothing),
    ("--run-cxx-freeres", Nothing),
    (
        "--separate-recs",
        NothingBut("1", "recursions are not told apart"),
    ),
    (
        "--separate-callers",
        NothingBut("0", "callers are not told apart"),
    ),
    ("--branch-sim", NothingBut("no", NO_EVENTS)),
    ("--cacheuse", NothingBut("no", NO_EVENTS)),
    ("--collect-bus", NothingBut("no", NO_EVENTS)),
    ("--collect-jumps", NothingBut("no", "jumps are not counted")),
    ("--collect-systime", NothingBut("no", NO_EVENTS)),
    ("--simulate-wb", NothingBut("no", NO_EVENTS)),
    ("--simulate-hwpref", NothingBut("no", NO_EVENTS)),
    ("--combine-dumps", NothingBut("no", "each dump is a file")),
    (
        "--demangle",
        NothingBut("yes", "names are those of the source"),
    ),
    (
        "--dump-every-bb",
        NothingBut("0", "dumps are made by client requests"),
    ),
    (
        "--dump-instr",
        NothingBut("no", "costs are those of functions, not of instructions"),
    ),
    ("--time-stamp", NothingBut("no", "the log has no times")),
    ("--vgdb", NothingBut("no", "no debugger can be attached")),
    ("--xml", NothingBut("no", "the log is text")),
];

/// What a harness asks for.
#[derive(Clone, Debug)]
pub(super) struct ValgrindOptions {
    /// The patterns of names of files, as Valgrind has them.
    pub(super) profile: OsString,
    /// None: the log goes to standard error.
    pub(super) log: Option<OsString>,
    pub(super) quiet: bool,
    pub(super) separate_threads: bool,
    pub(super) trace_children: bool,
    /// Names are not written by numbers.
    pub(super) plain_names: bool,
    /// What the log is to say of options that ask for more than there is.
    pub(super) notes: Vec<String>,
    collect: CollectFlags,
    command: Vec<OsString>,
}

/// What is to be done.
#[derive(Clone, Debug)]
pub(super) enum ValgrindAct {
    /// Say who this is: `--version`.
    Version,
    Run(Box<ValgrindOptions>),
}

impl ValgrindOptions {
    /// Of the words behind `--as`.
    pub(super) fn of(words: &[OsString]) -> Result<ValgrindAct, UserError> {
        let Some((tool, words)) = words.split_first() else {
            return Err(refused("--as: which tool? callgrind is served"));
        };
        if tool != TOOL {
            let tool = tool.to_string_lossy();
            return Err(refused(format!("--as {tool}: callgrind alone is served")));
        }
        let mut options = Self {
            profile: "callgrind.out.%p".into(),
            log: None,
            quiet: false,
            separate_threads: false,
            trace_children: false,
            plain_names: false,
            notes: Vec::new(),
            collect: CollectFlags::default(),
            command: Vec::new(),
        };
        let mut tool = None;
        let is_option = |word: &&OsString| word.as_bytes().starts_with(b"-") && *word != "--";
        let (given, program) = words.split_at(words.iter().take_while(is_option).count());
        // The first -- ends the options, as Valgrind's do; another one is the program's.
        let program = match program.split_first() {
            Some((word, program)) if word == "--" => program,
            _ => program,
        };
        for word in given {
            let text = word.to_str();
            match text.map(|text| text.split_once('=').unwrap_or((text, ""))) {
                Some(("--version", "")) => return Ok(ValgrindAct::Version),
                Some(("--tool", value)) => tool = Some(value),
                Some(("-q" | "--quiet", "")) => options.quiet = true,
                Some(("-v" | "--verbose", "")) => {}
                Some((name, value)) if !value.is_empty() => options.take(name, value)?,
                _ => return Err(unknown(word)),
            }
        }
        options.command = program.to_vec();
        match tool {
            Some(TOOL) => {}
            Some(other) => {
                return Err(refused(format!(
                    "--tool={other}: callgrind alone is served"
                )));
            }
            None => {
                return Err(refused(
                    "valgrind's tool is memcheck where no --tool=callgrind says otherwise",
                ));
            }
        }
        for pattern in [Some(&options.profile), options.log.as_ref()]
            .into_iter()
            .flatten()
        {
            expanded(pattern, 0)?;
        }
        if options.command.is_empty() {
            return Err(refused("no program specified"));
        }
        Ok(ValgrindAct::Run(Box::new(options)))
    }

    fn take(&mut self, name: &str, value: &str) -> Result<(), UserError> {
        let is = || match value {
            "yes" => Ok(true),
            "no" => Ok(false),
            _ => Err(refused(format!("{name}={value}: yes or no"))),
        };
        match name {
            PROFILE => self.profile = value.into(),
            LOG => self.log = Some(value.into()),
            "--separate-threads" => self.separate_threads = is()?,
            "--trace-children" => self.trace_children = is()?,
            "--compress-strings" => self.plain_names = !is()?,
            "--instr-atstart" => self.collect.instr_atstart = Some(is()?),
            "--collect-atstart" => self.collect.collect_atstart = Some(is()?),
            "--toggle-collect" => self.collect.toggle_collect.push(value.to_owned()),
            // Harnesses ask for it by default, and live without.
            "--cache-sim" => {
                if is()? {
                    self.notes.push(format!(
                        "{name}={value}: no cache is simulated, {NO_EVENTS}; {name}=no asks for that"
                    ));
                }
            }
            _ => {
                let known = OPTIONS.iter().find(|(known, _)| *known == name);
                match known {
                    None => return Err(unknown(OsStr::new(name))),
                    Some((_, NothingBut(served, why))) if *served != value => {
                        return Err(refused(format!("{name}={value} is not served: {why}")));
                    }
                    Some(_) => {}
                }
            }
        }
        Ok(())
    }

    /// Whether the files of the process that is started could be written, as far as can be told
    /// before.
    pub(super) fn may_write(&self) -> Result<(), UserError> {
        for (name, pattern) in [(PROFILE, Some(&self.profile)), (LOG, self.log.as_ref())] {
            if let Some(pattern) = pattern {
                let path = expanded(pattern, process::id().into())?;
                whole::may_write(name, Path::new(&path))?;
            }
        }
        Ok(())
    }

    /// Those of `umpire count` with what these say.
    pub(super) fn applied(&self, flags: &CountFlags) -> CountFlags {
        let mut flags = flags.clone();
        flags.command.clone_from(&self.command);
        flags.collect = self.collect.clone();
        // The program has the harness's variables, as it has under Valgrind.
        let mut variables: Vec<OsString> = env::vars_os()
            .filter(|(name, _)| !name.is_empty())
            .map(|(name, value)| {
                OsString::from_vec([name.as_bytes(), b"=", value.as_bytes()].concat())
            })
            .collect();
        variables.append(&mut flags.guest.variables);
        flags.guest.variables = variables;
        flags
    }
}

/// A name of Valgrind's pattern: `%p` is the process, `%q{NAME}` a variable, `%%` a percent sign.
pub(super) fn expanded(pattern: &OsStr, pid: u64) -> Result<OsString, UserError> {
    let whole = pattern.to_string_lossy();
    let mut name = Vec::new();
    let mut rest = pattern.as_bytes();
    while let Some(at) = rest.iter().position(|byte| *byte == b'%') {
        name.extend_from_slice(&rest[..at]);
        rest = &rest[at + 1..];
        let variable = rest.strip_prefix(b"q{");
        let end = variable.and_then(|rest| rest.iter().position(|byte| *byte == b'}'));
        match (rest.first(), variable.zip(end)) {
            (Some(b'p'), _) => name.extend(pid.to_string().bytes()),
            (Some(b'%'), _) => name.push(b'%'),
            (_, Some((variable, end))) => {
                let variable = OsStr::from_bytes(&variable[..end]);
                let value = env::var_os(variable).ok_or_else(|| {
                    let variable = variable.to_string_lossy();
                    refused(format!("{whole}: the variable {variable} is not set"))
                })?;
                name.extend_from_slice(value.as_bytes());
                rest = &rest[end + 2..];
            }
            _ => {
                return Err(refused(format!(
                    "{whole}: %p, %q{{NAME}} and %% are what may follow a percent sign"
                )));
            }
        }
        rest = &rest[1..];
    }
    name.extend_from_slice(rest);
    Ok(OsString::from_vec(name))
}

fn unknown(option: &OsStr) -> UserError {
    let option = option.to_string_lossy();
    refused(format!("Unknown option: {option}"))
}

fn refused(why: impl AsRef<str>) -> UserError {
    failed(format!("--as callgrind: {}", why.as_ref()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn options_of_harnesses_are_taken() {
        // gungraun 0.20's, without its files.
        let line = "callgrind --tool=callgrind --error-exitcode=0 --trace-children=yes \
            --fair-sched=try --vgdb=no --I1=32768,8,64 --D1=32768,8,64 --LL=8388608,16,64 \
            --cache-sim=yes --compress-strings=no --compress-pos=no --dump-line=yes \
            --dump-instr=no --combine-dumps=no --separate-threads=yes \
            --toggle-collect=*::__gungraun_wrapper_mod::* --callgrind-out-file=/t/a.out.#%p \
            --log-file=/t/a.log.#%p /t/bench --gungraun-run 1 -- a";
        let Ok(ValgrindAct::Run(found)) = ValgrindOptions::of(&words(line)) else {
            panic!("they are refused");
        };
        assert_eq!(found.command, words("/t/bench --gungraun-run 1 -- a"));
        assert_eq!(found.profile, "/t/a.out.#%p");
        assert_eq!(found.log.as_deref(), Some(OsStr::new("/t/a.log.#%p")));
        assert!(found.separate_threads && found.trace_children && found.plain_names);
        assert_eq!(
            found.collect.toggle_collect,
            ["*::__gungraun_wrapper_mod::*"]
        );
        let note = "--cache-sim=yes: no cache is simulated, the only event is Ir; --cache-sim=no \
            asks for that";
        assert_eq!(found.notes, [note]);
    }

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        flags: CountFlags,
    }

    #[test]
    fn a_program_may_stand_behind_two_hyphens() {
        let check = |line: &str, expected: &str| {
            let line = format!("count --as callgrind --tool=callgrind {line}");
            let Line { flags } = clap::Parser::parse_from(words(&line));
            let Ok(ValgrindAct::Run(found)) = ValgrindOptions::of(&flags.as_tool) else {
                panic!("it is refused: {line}");
            };
            assert_eq!(found.command, words(expected), "{line}");
        };
        check("/bin/echo a", "/bin/echo a");
        check("-- /bin/echo a", "/bin/echo a");
        check("-q -- -echo -- -a", "-echo -- -a");
        check("/bin/echo -- a", "/bin/echo -- a");
    }

    #[test]
    fn what_cannot_be_written_is_said_before() {
        let line = "callgrind --tool=callgrind --log-file=/no/such/x.%p a";
        let Ok(ValgrindAct::Run(found)) = ValgrindOptions::of(&words(line)) else {
            panic!("it is refused");
        };
        let error = found.may_write().expect_err("no such folder").to_string();
        let own = process::id();
        let expected =
            format!("--log-file /no/such/x.{own}: No such file or directory (os error 2)");
        assert_eq!(error, expected);
    }

    #[test]
    fn what_is_not_served_is_named() {
        let check = |line: &str, expected: &str| {
            let error = ValgrindOptions::of(&words(line)).expect_err("refused");
            assert_eq!(error.to_string(), format!("--as callgrind: {expected}"));
        };
        check("massif", "--as massif: callgrind alone is served");
        check("callgrind -x a", "Unknown option: -x");
        check("callgrind --bogus=1 a", "Unknown option: --bogus");
        check("callgrind --I1 a", "Unknown option: --I1");
        check(
            "callgrind --tool=dhat a",
            "--tool=dhat: callgrind alone is served",
        );
        check(
            "callgrind a",
            "valgrind's tool is memcheck where no --tool=callgrind says otherwise",
        );
        check("callgrind --tool=callgrind", "no program specified");
        check(
            "callgrind --dump-instr=yes a",
            "--dump-instr=yes is not served: costs are those of functions, not of instructions",
        );
        check(
            "callgrind --trace-children=maybe a",
            "--trace-children=maybe: yes or no",
        );
        check(
            "callgrind --tool=callgrind --log-file=a%n b",
            "a%n: %p, %q{NAME} and %% are what may follow a percent sign",
        );
        check(
            "callgrind --tool=callgrind --log-file=%q{NO_SUCH_ONE} b",
            "%q{NO_SUCH_ONE}: the variable NO_SUCH_ONE is not set",
        );
    }

    #[test]
    fn patterns_are_names() {
        let check = |pattern: &str, expected: &str| {
            let name = expanded(OsStr::new(pattern), 7).expect("a name");
            assert_eq!(name, expected, "{pattern}");
        };
        check("a", "a");
        check("a.#%p.b%%", "a.#7.b%");
        let path = std::env::var("PATH").expect("a path");
        check("%q{PATH}/%p", &format!("{path}/7"));
    }
}
