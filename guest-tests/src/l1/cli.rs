//! The command line of `cargo l1`.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

use super::cache::Cache;
use super::error::L1Error;
use super::initramfs::file_argument;
use super::machine::Machine;
use super::packages::Set;
use super::run::Run;
use super::session::{End, Outcome};
use super::tool::{last_lines, say};

/// Exit status when the time is over, as timeout(1) gives it.
const TIMED_OUT: u8 = 124;
/// Exit status when the L1 machine itself failed.
const FAILED: u8 = 125;

/// Runs a command inside the L1 machine: a Linux with a faithful KVM on an emulated AMD processor.
///
/// Standard output and standard error are forwarded live, the exit status is the command's own; 124
/// when the time is over, 125 when the machine itself fails. Files that arguments name, libraries
/// and the variables RUST_*, PROPTEST_*, UMPIRE_* and LD_LIBRARY_PATH travel along.
#[derive(Debug, Parser)]
#[command(name = "l1", bin_name = "cargo l1", version)]
pub struct Options {
    /// Stop the machine after this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86400))]
    timeout: u64,
    /// Memory of the machine in MiB
    #[arg(long, value_name = "MIB", default_value_t = 1536, value_parser = clap::value_parser!(u32).range(256..=65536))]
    memory: u32,
    /// Number of its processors
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    smp: u32,
    /// Make virtual time repeatable (one processor; slower)
    #[arg(long, conflicts_with = "smp")]
    icount: bool,
    /// Set a variable of the command's environment
    #[arg(long, value_name = "K=V", value_parser = parse_variable)]
    env: Vec<(String, String)>,
    /// Add a file or directory, under its own name or another one
    #[arg(long, value_name = "HOST[:GUEST]", value_parser = file_argument)]
    file: Vec<(PathBuf, PathBuf)>,
    /// Bring what the command writes below $UMPIRE_OUT back into this directory
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Keep initramfs and console log, and say where
    #[arg(long)]
    keep: bool,
    /// Show the machine's console and times on stderr
    #[arg(long, short)]
    verbose: bool,
    /// Only fill the cache, for work without a network
    #[arg(long, conflicts_with = "command")]
    fetch_only: bool,
    /// List what the cache holds
    #[arg(long, conflicts_with = "command")]
    list_cache: bool,
    /// The command: a path, or a name on PATH; and its arguments
    #[arg(last = true, value_name = "COMMAND", required_unless_present_any = ["fetch_only", "list_cache"])]
    command: Vec<OsString>,
}

/// Carries the options out and gives the exit status.
pub fn main(options: &Options) -> ExitCode {
    match carry_out(options) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            say(&error.to_string());
            ExitCode::from(FAILED)
        }
    }
}

fn carry_out(options: &Options) -> Result<u8, L1Error> {
    let cache = Cache::of_user();
    if options.fetch_only {
        cache.fetch(&Set::ALL)?;
    }
    if options.fetch_only || options.list_cache {
        return list(&cache).map(|()| 0);
    }
    let machine = Machine::new()
        .timeout(Duration::from_secs(options.timeout))
        .memory_mib(options.memory)
        .smp(options.smp)
        .icount(options.icount)
        .verbose(options.verbose)
        .keep(options.keep)
        .cache(cache);
    let outcome = machine.run(&run(options), &mut io::stdout(), &mut io::stderr())?;
    Ok(report(options, &outcome))
}

fn report(options: &Options, outcome: &Outcome) -> u8 {
    let seconds = |time: Duration| format!("{:.1} s", time.as_secs_f64());
    if options.verbose {
        let ready = outcome.ready.map_or_else(
            || "never".to_owned(),
            |time| format!("after {}", seconds(time)),
        );
        say(&format!(
            "KVM ready {ready}, ended after {}",
            seconds(outcome.total)
        ));
    }
    match outcome.end {
        End::Exited(status) => status,
        End::TimedOut => {
            let console = last_lines(&outcome.console, 15);
            let limit = options.timeout;
            say(&format!(
                "stopped after {limit} s (--timeout); the console's last lines:\n{console}"
            ));
            TIMED_OUT
        }
    }
}

fn run(options: &Options) -> Run {
    let mut words = options.command.iter().cloned();
    let mut run = Run::new(words.next().unwrap_or_default()).args(words);
    for (name, value) in &options.env {
        run = run.env(name, value);
    }
    for (host, guest) in &options.file {
        run = run.file_as(host, guest);
    }
    match &options.out {
        Some(out) => run.out(out),
        None => run,
    }
}

fn list(cache: &Cache) -> Result<(), L1Error> {
    println!("{}", cache.folder().display());
    for set in cache.list()? {
        println!("  {}", set.name);
        for package in set.packages {
            println!("    {} {}", package.name, package.version);
        }
    }
    Ok(())
}

/// Splits `K=V`; K must be a name that a shell can export.
fn parse_variable(value: &str) -> Result<(String, String), L1Error> {
    let refuse = |reason| L1Error::Argument {
        value: value.to_owned(),
        reason,
    };
    let (name, text) = value
        .split_once('=')
        .ok_or_else(|| refuse("expected NAME=VALUE"))?;
    let letters = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    if name.is_empty()
        || !name.chars().all(letters)
        || name.starts_with(|letter: char| letter.is_ascii_digit())
    {
        return Err(refuse(
            "a variable's name has only letters, digits and `_`, and starts with no digit",
        ));
    }
    Ok((name.to_owned(), text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines() {
        fn check(line: &str, expected: Result<&[&str], &str>) {
            let words = ["l1"].into_iter().chain(line.split_whitespace());
            match (Options::try_parse_from(words), expected) {
                (Ok(options), Ok(expected)) => assert_eq!(options.command, expected, "{line}"),
                (Err(error), Err(expected)) => {
                    let text = error.to_string();
                    assert!(text.contains(expected), "{line}: {text}");
                }
                (found, expected) => panic!("{line}: {found:?}, expected {expected:?}"),
            }
        }
        check("-- true", Ok(&["true"]));
        check(
            "--timeout 5 -- ls -l --timeout 7",
            Ok(&["ls", "-l", "--timeout", "7"]),
        );
        check("--icount --env A=b=c --file x:/y -- true", Ok(&["true"]));
        check("--fetch-only", Ok(&[]));
        check("--list-cache", Ok(&[]));
        check("", Err("<COMMAND>"));
        check("true", Err("unexpected argument 'true'"));
        check("--timeout 0 -- true", Err("0 is not in 1..=86400"));
        check("--memory 64 -- true", Err("64 is not in 256..=65536"));
        check("--smp 2 --icount -- true", Err("cannot be used with"));
        check("--env A -- true", Err("expected NAME=VALUE"));
        check("--env 1A=x -- true", Err("starts with no digit"));
        check("--file a:b -- true", Err("must start with `/`"));
    }
}
