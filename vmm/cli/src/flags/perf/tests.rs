//! The table against the options of perf, and against those of ours.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

use clap::CommandFactory;

use super::{Here, Row, names, row, rows, tables};
use crate::exit::ExitStatus;
use crate::flags::{Cli, command, parse};

/// The options of perf.
const OPTIONS: &str = include_str!("options.txt");
/// The commands of perf 6.1 to 7.3.
const COMMANDS: &str = "annotate archive bench buildid-cache buildid-list c2c check config daemon \
    data diff evlist ftrace help inject iostat kallsyms kmem kvm kwork list lock mem probe record \
    report sched script stat test timechart top trace version";
/// Options that a text names and that are still to come.
const SOON: [(&str, &str); 0] = [];

/// Whether an option of perf has a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    None,
    Optional,
    Required,
}

/// An option of perf.
#[derive(Clone, Debug)]
struct PerfOption {
    /// With their hyphens, the short one first.
    names: Vec<String>,
    value: Value,
}

/// The commands of perf that are here, with their options.
fn perf() -> Vec<(&'static str, Vec<PerfOption>)> {
    let mut all: Vec<(&str, Vec<PerfOption>)> = Vec::new();
    for line in OPTIONS.lines().filter(|line| !line.starts_with('#')) {
        if let Some(command) = line.strip_prefix("perf ") {
            all.push((command, Vec::new()));
            continue;
        }
        let (line, value) = match (line.strip_suffix("[=]"), line.strip_suffix('=')) {
            (Some(line), _) => (line, Value::Optional),
            (None, Some(line)) => (line, Value::Required),
            (None, None) => (line, Value::None),
        };
        let names = line.split(' ').map(str::to_owned).collect();
        let (_, options) = all.last_mut().expect("a command first");
        options.push(PerfOption { names, value });
    }
    all
}

/// The option of `command` in `cli` that has this name, with its hyphens.
fn ours<'a>(cli: &'a clap::Command, command: &str, name: &str) -> Option<&'a clap::Arg> {
    let command = cli.find_subcommand(command).expect("a command of ours");
    match name.strip_prefix("--") {
        Some(long) => command.get_arguments().find(|one| super::named(one, long)),
        None => {
            let short = name.chars().nth(1)?;
            let has = |one: &&clap::Arg| {
                one.get_short() == Some(short)
                    || one
                        .get_all_short_aliases()
                        .is_some_and(|all| all.contains(&short))
            };
            command.get_arguments().find(has)
        }
    }
}

/// What is wrong with names that perf has: those that are neither ours nor in the table.
fn unknown(cli: &clap::Command, command: &str, name: &str) -> Option<String> {
    let known =
        ours(cli, command, name).is_some() || matches!(row(command, name), Some((_, Here::No(_))));
    (!known).then(|| {
        format!(
            "perf {command} {name}: umpire {command} has no such option, and perf/rows.rs has \
             no row that says what to do instead"
        )
    })
}

fn none_of(wrong: &[String]) {
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn each_option_of_perf_is_ours_or_is_refused() {
    let cli = command();
    let mut wrong = Vec::new();
    for (command, options) in perf() {
        for name in options.iter().flat_map(|option| &option.names) {
            wrong.extend(unknown(&cli, command, name));
        }
    }
    none_of(&wrong);
}

/// Long names, and short ones with them, as `perf COMMAND -h` prints them.
fn listed(help: &str) -> BTreeSet<String> {
    let lines = help.lines().filter_map(|line| {
        let option = line.strip_prefix("    ")?;
        // Deeper lines are the text of an option.
        (option.starts_with('-') || option.starts_with("    --")).then_some(option.trim_start())
    });
    let words = lines.flat_map(|line| {
        let mut words = line.split(' ').take(2);
        let first = words.next().unwrap_or_default();
        let second = words.next().filter(|_| first.ends_with(','));
        [Some(first), second].into_iter().flatten()
    });
    let names = words.map(|word| {
        let end = word.find([',', '=', '[']).unwrap_or(word.len());
        word[..end].to_owned()
    });
    names.filter(|name| name.len() > 1).collect()
}

#[test]
fn the_list_of_perf_is_read() {
    let help = "\n Usage: perf stat [<options>]\n\n    -a, --all-cpus        system-wide\n    \
                -g                    enables\n    -x, --field-separator <separator>\n        \
                --iostat[=<default>]\n                          measure --this too\n\t\t--not\n";
    let expected = [
        "--all-cpus",
        "--field-separator",
        "--iostat",
        "-a",
        "-g",
        "-x",
    ];
    assert_eq!(listed(help), BTreeSet::from(expected.map(str::to_owned)));
}

#[test]
fn each_option_of_the_perf_that_is_installed_is_ours_or_is_refused() {
    let cli = command();
    let mut wrong = Vec::new();
    for (command, options) in perf() {
        let ask = |word| Command::new("perf").args([command, word]).output();
        let (help, long) = match (ask("-h"), ask("--list-opts")) {
            (Ok(help), Ok(long)) => (help, long),
            (Err(error), _) | (_, Err(error)) => {
                println!(
                    "skipped: each_option_of_the_perf_that_is_installed_is_ours_or_is_refused: \
                     perf cannot be run: {error}"
                );
                return;
            }
        };
        let text = [help.stdout, help.stderr].concat();
        let mut names = listed(&String::from_utf8_lossy(&text));
        let long = String::from_utf8_lossy(&long.stdout);
        names.extend(long.split_whitespace().map(str::to_owned));
        assert!(names.len() > options.len() / 2, "perf {command}: {names:?}");
        wrong.extend(names.iter().filter_map(|name| unknown(&cli, command, name)));
    }
    none_of(&wrong);
}

/// The commands for which a name of a row decides.
fn decided(of: &Row, name: &str) -> Vec<&'static str> {
    let commands = rows::COMMANDS.iter().map(|(command, _)| *command);
    commands
        .filter(|command| row(command, name).is_some_and(|found| std::ptr::eq(found, of)))
        .collect()
}

#[test]
fn each_row_is_needed() {
    // Without the names that rows give to options of ours.
    let (plain, cli) = (Cli::command(), command());
    let perf = perf();
    let of_perf = |command: &str, name: &str| {
        let (_, options) = perf
            .iter()
            .find(|(one, _)| *one == command)
            .expect("a command");
        let opposite = name.strip_prefix("--no-").map(|rest| format!("--{rest}"));
        let mut names = options.iter().flat_map(|option| &option.names);
        names.any(|one| one == name || opposite.as_ref() == Some(one))
    };
    let mut wrong = Vec::new();
    let mut seen = BTreeSet::new();
    for row in rows::COMMANDS
        .iter()
        .flat_map(|(_, tables)| *tables)
        .copied()
        .flatten()
    {
        for name in names(row) {
            let commands = decided(row, name);
            let mut say = |what: &str| {
                let text = format!(
                    "the row \"{}\" for {}: {name} {what}",
                    row.0,
                    commands.join(", ")
                );
                if seen.insert(text.clone()) {
                    wrong.push(text);
                }
            };
            if commands.is_empty() {
                say("is decided by another row: take it out");
            } else if !commands.iter().any(|command| of_perf(command, name)) {
                say("is no option of perf (perf/options.txt): take it out");
            }
            let has = |command: &&&str| ours(&plain, command, name).is_some();
            let all_have = commands.iter().all(|command| has(&command));
            match row.1 {
                Here::No(_) if all_have && !commands.is_empty() => {
                    say("is an option of ours now: take it out of the row, or REMOVE THIS ROW");
                }
                Here::Alias(_) if all_have => {
                    say("is a name of the option itself now: REMOVE THIS ROW");
                }
                Here::Alias(of) if commands.iter().any(|it| ours(&cli, it, of).is_none()) => {
                    say(&format!(
                        "is to be another name of {of}, which is no option of ours"
                    ));
                }
                Here::Otherwise(_) => {
                    let stale = commands.iter().find(|it| of_perf(it, name) && !has(it));
                    if let Some(command) = stale {
                        say(&format!(
                            "is no option of umpire {command}, so it is refused, not otherwise"
                        ));
                    }
                }
                Here::No(_) | Here::Alias(_) => {}
            }
        }
    }
    none_of(&wrong);
}

#[test]
fn a_name_that_both_have_means_the_same() {
    let cli = command();
    let mut wrong = Vec::new();
    for (command, options) in perf() {
        for option in options {
            let otherwise =
                |name: &&String| matches!(row(command, name), Some((_, Here::Otherwise(_))));
            let same: Vec<(&String, &clap::Arg)> = option
                .names
                .iter()
                .filter(|name| !otherwise(name))
                .filter_map(|name| Some((name, ours(&cli, command, name)?)))
                .collect();
            if let [(_, one), (_, other)] = same[..]
                && one.get_id() != other.get_id()
            {
                wrong.push(format!(
                    "perf {command} {}: one option of perf, and two of ours",
                    option.names.join(", ")
                ));
            }
            for (name, ours) in same {
                let takes = ours.get_action().takes_values();
                let least = ours.get_num_args().map_or(1, |range| range.min_values());
                let fits = match option.value {
                    Value::None => !takes || least == 0,
                    Value::Optional => takes && least == 0,
                    Value::Required => takes,
                };
                if !fits {
                    wrong.push(format!(
                        "perf {command} {name} and umpire {command} {name}: one has a value, the \
                         other has none: say so by a row Otherwise"
                    ));
                }
            }
        }
    }
    none_of(&wrong);
}

#[test]
fn texts_are_one_line_and_name_options_that_are_there() {
    let cli = command();
    let mut wrong = Vec::new();
    for (of, tables) in rows::COMMANDS {
        for (names, here) in tables.iter().copied().flatten() {
            let (Here::No(text) | Here::Otherwise(text)) = here else {
                continue;
            };
            if text.len() > 110 || text.contains('\n') || text.ends_with('.') || text.contains("  ")
            {
                wrong.push(format!("{of} {names}: not a short line: {text}"));
            }
            // A shared row is for several commands, and names the one whose option it means.
            let shared = rows::COMMANDS.iter().filter(|(_, tables)| {
                tables
                    .iter()
                    .any(|rows| rows.iter().any(|row| row.1 == *here))
            });
            let users: Vec<&str> = shared.map(|(command, _)| *command).collect();
            let mut meant: Option<Vec<&str>> = Some(users);
            let mut words = text.split(' ').peekable();
            while let Some(word) = words.next() {
                let word = word.trim_end_matches([',', ';', ':', ')']);
                match word {
                    "umpire" | "perf" | "sh" | "report" | "record" => {
                        let next = if word == "umpire" {
                            words.peek().copied()
                        } else {
                            Some(word)
                        };
                        let next = next.map(|it| it.trim_end_matches([',', ';', ':']));
                        let known = next.filter(|it| cli.find_subcommand(it).is_some());
                        if word == "perf" || word == "sh" {
                            meant = None;
                            words.next();
                        } else if let Some(known) = known {
                            meant = Some(vec![known]);
                        }
                    }
                    _ if word.starts_with('-') && word.len() > 1 && word != "--" => {
                        let name = word.split('=').next().unwrap_or(word);
                        let Some(commands) = &meant else { continue };
                        let there = commands
                            .iter()
                            .any(|it| ours(&cli, it, name).is_some() || SOON.contains(&(it, name)));
                        if !there {
                            wrong.push(format!(
                                "{of} {names}: no option {name} of {commands:?}: {text}"
                            ));
                        }
                    }
                    _ => {}
                }
            }
        }
    }
    for (command, name) in SOON {
        if ours(&cli, command, name).is_some() {
            wrong.push(format!(
                "umpire {command} {name} is there: take it out of SOON"
            ));
        }
    }
    none_of(&wrong);
}

#[test]
fn what_perf_has_and_we_do_not_is_refused_by_name() {
    let cli = command();
    for (command, options) in perf() {
        for name in options.iter().flat_map(|option| &option.names) {
            let Some((_, Here::No(text))) = row(command, name) else {
                continue;
            };
            if ours(&cli, command, name).is_some() {
                continue;
            }
            let check = |typed: &[&str], option: &str| {
                let all = ["umpire", command].into_iter().chain(typed.iter().copied());
                let exit = parse(all.map(OsString::from)).expect_err("it is no option of ours");
                assert_eq!(exit.status, ExitStatus::BAD_INPUT);
                let expected = format!("{command} has no option '{option}': {text}");
                assert_eq!(exit.text, expected, "{typed:?}");
            };
            check(&[name], name);
            check(&[name, "1"], name);
            check(&[&format!("{name}=1")], name);
            match name.strip_prefix("--") {
                None => check(&[&format!("{name}1")], name),
                Some(long) => {
                    let no = format!("--no-{long}");
                    let own = row(command, &no).is_some() || ours(&cli, command, &no).is_some();
                    if !own {
                        check(&[&no], &no);
                    }
                }
            }
        }
    }
}

/// The commands of perf among these that are neither ours nor in the table.
fn unknown_commands(commands: &str) -> Vec<String> {
    let cli = command();
    let missing = commands
        .split_whitespace()
        .filter(|word| cli.find_subcommand(word).is_none() && super::elsewhere(word).is_none());
    missing
        .map(|word| format!("perf {word}: no row of ELSEWHERE in perf/rows.rs"))
        .collect()
}

#[test]
fn each_command_of_perf_is_ours_or_is_refused() {
    none_of(&unknown_commands(COMMANDS));
    match Command::new("perf").arg("--list-cmds").output() {
        Ok(list) => none_of(&unknown_commands(&String::from_utf8_lossy(&list.stdout))),
        Err(error) => println!(
            "skipped: each_command_of_perf_is_ours_or_is_refused: perf cannot be run: {error}"
        ),
    }
    let cli = command();
    for (names, text) in rows::ELSEWHERE {
        for name in names.split(", ") {
            assert!(
                COMMANDS.split(' ').any(|one| one == name),
                "{name} is no command of perf"
            );
            assert!(
                cli.find_subcommand(name).is_none(),
                "{name} is ours: REMOVE THIS ROW"
            );
            let words = ["umpire", name, "--for", "x"].map(OsString::from);
            let exit = parse(words).expect_err("it is no command of ours");
            assert_eq!(exit.status, ExitStatus::BAD_INPUT);
            assert_eq!(exit.text, format!("there is no command '{name}': {text}"));
        }
    }
    let words = ["umpire", "lits"].map(OsString::from);
    assert!(
        parse(words)
            .expect_err("no command")
            .text
            .contains("'lits'")
    );
}

/// The page that says all of it.
fn page() -> String {
    let cli = command();
    let mut page = String::from(
        "# Options of perf\n\n\
         `umpire stat`, `record`, `report`, `script`, `annotate`, `diff` and `top` do for guests what \
         perf's commands of these names do, and take perf's options where they mean the same. This \
         page has every option of perf 6.1 to 7.3, and its other commands at the end. One that is not here is refused, and the line \
         that refuses it says what stands below; with `--no-` before it too.\n\n\
         Options are typed as for perf: of one that is given twice the last counts (`-e` and \
         other lists go on), a long name may be shortened as far as no other option of ours or \
         perf's begins so, and `--no-` before a long option takes it back. Commands below \
         `perf stat` (`record`, `report`) are refused; a program of such a name stands behind \
         `--`.\n\n\
         `UPDATE_GOLDEN=1 cargo test -p umpire perf` writes this page from the table in \
         `vmm/cli/src/flags/perf/rows.rs`.\n",
    );
    let mut line = |text: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(page, "{text}");
    };
    let quoted = |names: &[&str]| {
        let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
        names.join(", ")
    };
    for (command, options) in perf() {
        let is_no = |name: &&str| ours(&cli, command, name).is_none();
        let all: Vec<Vec<&str>> = options
            .iter()
            .map(|option| option.names.iter().map(String::as_str).collect())
            .collect();
        let same: Vec<String> = all
            .iter()
            .filter_map(|names| {
                let same = |name: &&&str| {
                    !is_no(name) && !matches!(row(command, name), Some((_, Here::Otherwise(_))))
                };
                let names: Vec<&str> = names.iter().filter(same).copied().collect();
                (!names.is_empty()).then(|| quoted(&names).replace("`, `", "`/`"))
            })
            .collect();
        line(format!("\n## `umpire {command}`\n"));
        line(format!("As in `perf {command}`: {}.\n", same.join(", ")));
        line("| option of perf | here |\n|---|---|".to_owned());
        let mut done: Vec<&Row> = Vec::new();
        for row in tables(command).iter().copied().flatten() {
            let meant = |name: &&str| {
                let opposite = name.replacen("--no-", "--", 1);
                all.iter()
                    .flatten()
                    .any(|one| one == name || *one == opposite)
                    && super::row(command, name).is_some_and(|found| std::ptr::eq(found, row))
            };
            let (names, text): (Vec<&str>, String) = match row.1 {
                Here::No(text) => (
                    names(row).filter(meant).filter(is_no).collect(),
                    text.to_owned(),
                ),
                Here::Otherwise(text) => (
                    names(row).filter(meant).collect(),
                    format!("here means: {text}"),
                ),
                Here::Alias(of) => (names(row).filter(meant).collect(), format!("is `{of}`")),
            };
            if !names.is_empty() && !done.contains(&row) {
                done.push(row);
                line(format!(
                    "| {} | {} |",
                    quoted(&names),
                    text.replace('|', "\\|")
                ));
            }
        }
    }
    line("\n## Other commands of perf\n\n| command of perf | here |\n|---|---|".to_owned());
    for (names, text) in rows::ELSEWHERE {
        let names: Vec<&str> = names.split(", ").collect();
        line(format!("| {} | {text} |", quoted(&names)));
    }
    page
}

#[test]
fn the_page_says_what_the_table_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/perf-options.md");
    let page = page();
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&path, &page).expect("the page can be written");
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == page,
        "docs/reference/perf-options.md is not what the table says; UPDATE_GOLDEN=1 cargo test -p umpire perf"
    );
}
