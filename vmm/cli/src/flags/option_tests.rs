//! Every option of every command in each of its spellings, by clap's own definition: an option
//! that is new is in these tests by itself.

use std::any::TypeId;
use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::Resettable;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, Id};

use super::{CliExit, command, parse, perf};
use crate::exit::ExitStatus;

/// Values for options whose parsers take none of [`COMMON`].
const SAMPLES: &[(&str, &str)] = &[];

/// Values that one or the other parser takes.
const COMMON: &[&str] = &[
    "4", "100", "1000", "5s", "0,2-3", "cycles", "symbol", "comm,ip", "fp", "0.5",
];

/// A value with whatever else means something on a command line, for options that take any text.
const TEXT: &str = ";x,=-y";

/// The commands, each with what is typed for it, and without what ties options together, so that
/// each can be given alone.
fn commands() -> Vec<(Vec<String>, Command)> {
    fn visit(path: &[String], command: &Command, found: &mut Vec<(Vec<String>, Command)>) {
        for below in command.get_subcommands() {
            let mut path = path.to_vec();
            path.push(below.get_name().to_owned());
            visit(&path, below, found);
        }
        found.push((path.to_vec(), untied(command.clone())));
    }
    let mut found = Vec::new();
    let mut program = command();
    // So that each command has the options that one above it lends it.
    program.build();
    visit(&[], &program, &mut found);
    assert!(found.len() > 40, "only {} commands", found.len());
    found
}

fn untied(command: Command) -> Command {
    let groups: Vec<Id> = command
        .get_groups()
        .map(|one| one.get_id().clone())
        .collect();
    let command = command
        .subcommand_required(false)
        .arg_required_else_help(false)
        .mut_args(|option| {
            option
                .required(false)
                .required_unless_present(Resettable::Reset)
                .requires(Resettable::Reset)
                .conflicts_with(Resettable::Reset)
        });
    groups.into_iter().fold(command, |command, group| {
        command.mut_group(group, |group| {
            group
                .required(false)
                .multiple(true)
                .conflicts_with(Resettable::Reset)
        })
    })
}

/// Its options, but for those that print a text and end.
fn options(command: &Command) -> impl Iterator<Item = &Arg> {
    let ends = |option: &Arg| {
        use ArgAction::{Help, HelpLong, HelpShort, Version};
        matches!(option.get_action(), Help | HelpLong | HelpShort | Version)
    };
    let all = command.get_arguments();
    all.filter(move |one| !one.is_positional() && !ends(one))
}

/// How many values an option has at least, and at most.
fn values(option: &Arg) -> (usize, usize) {
    let (least, most) = match option.get_num_args() {
        Some(range) => (range.min_values(), range.max_values()),
        None => (1, 1),
    };
    if option.get_action().takes_values() {
        (least, most)
    } else {
        (0, 0)
    }
}

/// Its names as they are typed, long ones and short ones.
fn names(option: &Arg) -> (Vec<String>, Vec<char>) {
    let mut longs: Vec<String> = option.get_long().map(str::to_owned).into_iter().collect();
    longs.extend(
        option
            .get_all_aliases()
            .into_iter()
            .flatten()
            .map(str::to_owned),
    );
    let mut shorts: Vec<char> = option.get_short().into_iter().collect();
    shorts.extend(option.get_all_short_aliases().into_iter().flatten());
    (longs, shorts)
}

fn matches(command: &Command, words: &[String]) -> Result<ArgMatches, clap::Error> {
    let all = ["umpire".to_owned()]
        .into_iter()
        .chain(words.iter().cloned());
    command.clone().try_get_matches_from(all)
}

/// What an option was given, `None` where it was not on the command line.
fn given(matches: &ArgMatches, option: &Arg) -> Option<Vec<String>> {
    let id = option.get_id().as_str();
    let typed = matches.value_source(id) == Some(ValueSource::CommandLine);
    let values = matches.get_raw(id).into_iter().flatten();
    typed.then(|| {
        values
            .map(|value| value.to_string_lossy().into_owned())
            .collect()
    })
}

/// A value that the option takes.
fn sample(path: &str, command: &Command, option: &Arg) -> String {
    let id = option.get_id().as_str();
    let parser = option.get_value_parser();
    let named = SAMPLES.iter().filter(|(name, _)| *name == id);
    let mut candidates: Vec<String> = named.map(|(_, value)| (*value).to_owned()).collect();
    if let Some(known) = parser.possible_values() {
        candidates.extend(known.map(|value| value.get_name().to_owned()));
    }
    let text = [
        TypeId::of::<String>(),
        TypeId::of::<PathBuf>(),
        TypeId::of::<OsString>(),
    ];
    if text.iter().any(|text| parser.type_id() == *text) {
        candidates.push(TEXT.to_owned());
    }
    candidates.extend(COMMON.iter().map(|value| (*value).to_owned()));
    let (longs, shorts) = names(option);
    let takes = |value: &String| {
        let word = match (longs.first(), shorts.first()) {
            (Some(long), _) => format!("--{long}={value}"),
            (None, Some(short)) => format!("-{short}={value}"),
            (None, None) => panic!("{path}: {id} has no name"),
        };
        matches(command, &[word]).is_ok()
    };
    let found = candidates.iter().find(|value| takes(value));
    found.cloned().unwrap_or_else(|| {
        panic!("umpire {path}: no sample value for the option {id}: add one to SAMPLES")
    })
}

/// Ways to give an option: the words, and the values that it has then.
fn spellings(path: &str, command: &Command, option: &Arg) -> Vec<(Vec<String>, Vec<String>)> {
    let (longs, shorts) = names(option);
    let (least, most) = values(option);
    let mut all = Vec::new();
    if least == 0 {
        let words = longs.iter().map(|long| format!("--{long}"));
        let words = words.chain(shorts.iter().map(|short| format!("-{short}")));
        // The values that clap has for an option without one are its own affair.
        all.extend(words.map(|word| (vec![word], Vec::new())));
    }
    if most > 0 {
        let value = sample(path, command, option);
        let apart = !option.is_require_equals_set();
        let mut add = |words: Vec<String>| all.push((words, vec![value.clone()]));
        for long in &longs {
            add(vec![format!("--{long}={value}")]);
            if apart {
                add(vec![format!("--{long}"), value.clone()]);
            }
        }
        for short in &shorts {
            add(vec![format!("-{short}={value}")]);
            add(vec![format!("-{short}{value}")]);
            if apart {
                add(vec![format!("-{short}"), value.clone()]);
            }
            // Behind others that have no value.
            let alone = options(command).filter(|one| values(one).1 == 0);
            for before in alone.filter_map(Arg::get_short) {
                if !shorts.contains(&before) {
                    add(vec![format!("-{before}{short}{value}")]);
                }
            }
        }
    }
    all
}

/// The option that takes the command to start, if there is one.
fn started(command: &Command) -> Option<&Arg> {
    let mut positionals = command.get_positionals();
    positionals.find(|one| one.is_trailing_var_arg_set() || one.is_last_set())
}

/// Whatever is behind it is its own: `--as callgrind` and the words of that tool.
fn has_the_rest(option: &Arg) -> bool {
    let most = option.get_num_args().map(|args| args.max_values());
    option.is_allow_hyphen_values_set() && most == Some(usize::MAX)
}

fn joined(parts: &[&[String]]) -> Vec<String> {
    parts.iter().flat_map(|part| part.iter().cloned()).collect()
}

fn words(text: &[&str]) -> Vec<String> {
    text.iter().map(|&word| word.to_owned()).collect()
}

#[test]
fn each_option_is_taken_in_each_spelling() {
    for (path, command) in commands() {
        let path = path.join(" ");
        for option in options(&command) {
            for (typed, expected) in spellings(&path, &command, option) {
                let found = matches(&command, &typed);
                let found =
                    found.unwrap_or_else(|error| panic!("umpire {path} {typed:?}: {error}"));
                let found = given(&found, option);
                let found = found.unwrap_or_else(|| panic!("umpire {path} {typed:?}: not given"));
                if !expected.is_empty() {
                    let parts = option.get_value_delimiter().map(String::from);
                    let found = found.join(&parts.unwrap_or_default());
                    assert_eq!(found, expected.concat(), "umpire {path} {typed:?}");
                }
            }
        }
    }
}

#[test]
fn a_command_begins_at_hyphens_or_at_the_first_word_and_has_all_behind_it() {
    let mut tried = Vec::new();
    for (path, command) in commands() {
        let path = path.join(" ");
        let Some(started) = started(&command) else {
            continue;
        };
        tried.push(path.clone());
        let check = |typed: &[String], option: Option<&Arg>, expected: &[String]| {
            let found = matches(&command, typed);
            let found = found.unwrap_or_else(|error| panic!("umpire {path} {typed:?}: {error}"));
            let behind = given(&found, started).unwrap_or_default();
            assert_eq!(behind, expected, "umpire {path} {typed:?}");
            for one in options(&command) {
                let is_meant = option.is_some_and(|option| option.get_id() == one.get_id());
                // Several short ones in one word.
                let cluster = typed[0].len() > 2 && !typed[0].starts_with("--");
                let is_given = given(&found, one).is_some();
                assert!(
                    is_meant == is_given || (is_given && cluster),
                    "umpire {path} {typed:?}: {one}"
                );
            }
        };
        let program = words(&["prog"]);
        let rest = words(&["-x", "--bogus=1", "--", "-y", "word"]);
        let hyphens = words(&["--"]);
        check(
            &joined(&[&program, &rest]),
            None,
            &joined(&[&program, &rest]),
        );
        check(
            &joined(&[&hyphens, &program, &rest]),
            None,
            &joined(&[&program, &rest]),
        );
        check(&joined(&[&hyphens, &words(&["-x"])]), None, &words(&["-x"]));
        for option in options(&command) {
            for (typed, _) in spellings(&path, &command, option) {
                let own = joined(&[&program, &typed, &rest]);
                check(&own, None, &own);
                check(&joined(&[&hyphens, &own]), None, &own);
                // Not where its value is in the same word.
                if has_the_rest(option) && typed.len() > 1 {
                    check(&joined(&[&typed, &own]), Some(option), &[]);
                    continue;
                }
                check(&joined(&[&typed, &own]), Some(option), &own);
                check(&joined(&[&typed, &hyphens, &own]), Some(option), &own);
            }
        }
    }
    tried.sort();
    assert_eq!(tried, ["count", "lease", "record", "stat"]);
}

/// Why a command line is refused, in one line.
fn refused(path: &[String], typed: &[String]) -> String {
    let all = ["umpire".to_owned()]
        .into_iter()
        .chain(joined(&[path, typed]));
    let Err(CliExit { text, status }) = parse(all.map(OsString::from)) else {
        panic!("{path:?} {typed:?} is taken");
    };
    let expected = if path.first().is_some_and(|word| word == "count") {
        ExitStatus::COUNT_FAILED
    } else {
        ExitStatus::BAD_INPUT
    };
    assert_eq!(status, expected, "{path:?} {typed:?}: {text}");
    assert!(!text.contains('\n'), "{path:?} {typed:?}: {text}");
    text
}

/// Whether a text has `--word`, and not only as the beginning of a longer one.
fn says(text: &str, option: &str) -> bool {
    let letter = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    text.match_indices(option).any(|(at, _)| {
        !text[at + option.len()..].starts_with(letter) && !text[..at].ends_with(letter)
    })
}

#[test]
fn a_misspelled_option_is_refused_by_name_with_the_one_that_is_meant() {
    for (path, command) in commands().into_iter().filter(|(path, _)| !path.is_empty()) {
        let known: Vec<String> = options(&command).flat_map(|one| names(one).0).collect();
        let is_free = perf::free_commands().any(|name| path == [name]);
        for option in options(&command).filter(|one| !one.is_hide_set()) {
            let (longs, _) = names(option);
            for long in longs.iter().filter(|long| long.len() > 3) {
                let middle = long.len() / 2;
                let (front, back) = long.split_at(middle);
                let wrong = [
                    format!("{front}{}{back}", &front[middle - 1..]),
                    format!("{front}{}", &back[1..]),
                    format!("{front}x{}", &back[1..]),
                ];
                let ways = [&[""][..], &["", "4"], &["=4"]];
                for (wrong, way) in wrong.iter().zip(ways) {
                    let begins = |name: &String| name.starts_with(wrong.as_str());
                    if known.contains(wrong) || (is_free && known.iter().any(begins)) {
                        continue;
                    }
                    let mut typed = words(way);
                    typed[0].insert_str(0, &format!("--{wrong}"));
                    let text = refused(&path, &typed);
                    assert!(text.contains(&format!("'--{wrong}'")), "{text}");
                    let named = longs.iter().any(|name| says(&text, &format!("--{name}")));
                    assert!(named, "--{long}: {text}");
                }
            }
        }
    }
}

#[test]
fn an_unknown_option_is_refused_by_name() {
    for (path, command) in commands().into_iter().filter(|(path, _)| !path.is_empty()) {
        let known: Vec<char> = options(&command).flat_map(|one| names(one).1).collect();
        for letter in ('a'..='z')
            .chain('A'..='Z')
            .filter(|it| *it != 'h' && !known.contains(it))
        {
            for typed in [format!("-{letter}"), format!("-{letter};4")] {
                let text = refused(&path, &[typed]);
                assert!(text.contains(&format!("'-{letter}'")), "{path:?}: {text}");
                let name = path.join(" ");
                assert!(
                    (text.contains(" has no option ") || text.contains(" stands behind "))
                        && text.contains(&name),
                    "{text}"
                );
            }
        }
        let text = refused(&path, &["--no-such-thing=4".to_owned()]);
        assert!(
            text.contains("'--no-such-thing'") && text.ends_with("--help lists those that it has"),
            "{text}"
        );
    }
}

#[test]
fn an_option_without_value_takes_none() {
    for (path, command) in commands().into_iter().filter(|(path, _)| !path.is_empty()) {
        for option in options(&command).filter(|one| values(one).1 == 0) {
            for long in names(option).0 {
                let text = refused(&path, &[format!("--{long}=4")]);
                let named = names(option)
                    .0
                    .iter()
                    .any(|name| says(&text, &format!("--{name}")));
                assert!(named && text.contains("'4'"), "{path:?} --{long}: {text}");
            }
        }
    }
}

#[test]
fn an_option_with_a_value_says_that_it_is_missing() {
    for (path, command) in commands() {
        let path = path.join(" ");
        for option in options(&command).filter(|one| values(one).0 > 0) {
            let (longs, shorts) = names(option);
            let typed = longs.iter().map(|long| format!("--{long}"));
            for typed in typed.chain(shorts.iter().map(|short| format!("-{short}"))) {
                let error = matches(&command, std::slice::from_ref(&typed))
                    .expect_err("a value is missing");
                let text = super::help::one_line_of(&error.render().to_string());
                let (longs, shorts) = (names(option).0, names(option).1);
                let named = longs.iter().any(|long| says(&text, &format!("--{long}")))
                    || shorts.iter().any(|short| says(&text, &format!("-{short}")));
                assert!(
                    named && text.contains("value is required"),
                    "umpire {path} {typed}: {text}"
                );
            }
        }
    }
}

#[test]
fn a_refusal_says_what_to_do() {
    let check = |typed: &[&str], expected: &str| {
        assert_eq!(refused(&[], &words(typed)), expected);
    };
    check(
        &["stat", "--vpcu", "0"],
        "stat has no option '--vpcu'; did you mean --vcpu?",
    );
    check(
        &["report", "-vcpu", "0"],
        "report has no option '-vcpu'; did you mean --vcpu?",
    );
    check(
        &["stat", "--bogus", "true"],
        "stat has no option '--bogus'; umpire stat --help lists those that it has",
    );
    check(
        &["stat", "-vcpu", "0", "true"],
        "stat has no option '-vcpu'; did you mean --vcpu?",
    );
    check(
        &["stat", "-vcpus", "0"],
        "stat has no option '-vcpus'; did you mean --vcpu?",
    );
    check(
        &["stat", "-c", "true"],
        "stat has no option '-c'; did you mean -C?",
    );
    check(&["stat", "-V"], "stat has no option '-V'; did you mean -v?");
    check(
        &["ls", "-d"],
        "ls has no option '-d'; umpire ls --help lists those that it has",
    );
    check(
        &["ls", "--no-json"],
        "ls has no option '--no-json': leave --json away",
    );
    check(
        &["stat", "--no-detaled"],
        "stat has no option '--no-detaled'; umpire stat --help lists those that it has",
    );
    check(
        &["stat", "--per", "1"],
        "stat has no option '--per'; did you mean --per-core?",
    );
    check(
        &["leases", "-J"],
        "leases has no option '-J'; did you mean -j?",
    );
    check(
        &["who", "--grace=5"],
        "who has no option '--grace', which is one of umpire run, umpire arbitrate or umpire pcr \
         revoke; see umpire who --help",
    );
    check(
        &["bench", "-j", "traps"],
        "'-j' stands behind the word of which it is an option: umpire bench traps -j",
    );
    check(
        &["bench", "--rounds=3", "slowdown"],
        "'--rounds' stands behind the word of which it is an option: umpire bench slowdown --rounds",
    );
    check(
        &["--vm", "web1", "stat"],
        "'--vm' stands behind the word of which it is an option: umpire stat --vm",
    );
    check(
        &["--bogus"],
        "there is no option '--bogus'; umpire --help lists the commands",
    );
    check(
        &["stat", "--pid", "1"],
        "stat has no option '--pid': --vm chooses the VM, --vcpu its vCPUs; a process of the \
         guest: umpire record -p",
    );
}

/// What a command line means, as the program has it.
fn meaning(path: &str, typed: &[&str]) -> String {
    let all = ["umpire", path].into_iter().chain(typed.iter().copied());
    let parsed = parse(all.map(OsString::from));
    let parsed = parsed.unwrap_or_else(|exit| panic!("umpire {path} {typed:?}: {}", exit.text));
    format!("{:?}", parsed.command)
}

#[test]
fn of_an_option_that_is_given_twice_the_last_counts_where_perf_has_the_command() {
    for (path, _) in commands().iter().filter(|(path, _)| path.len() == 1) {
        let name = path[0].as_str();
        let program = perf::free(command(), Some(name));
        let command = untied(program.find_subcommand(name).expect("it is there").clone());
        let is_free = perf::free_commands().any(|free| free == name);
        // With their hidden ones.
        for option in options(&command).filter(|one| !has_the_rest(one)) {
            let appends = matches!(option.get_action(), ArgAction::Append | ArgAction::Count);
            for (typed, expected) in spellings(name, &command, option) {
                let twice = joined(&[&typed, &typed]);
                let alone = matches(&command, &twice).map(|found| given(&found, option));
                match alone {
                    Ok(found) => {
                        assert!(is_free || appends, "umpire {name} {twice:?} is taken");
                        let times = if appends { 2 } else { 1 };
                        let parts = option.get_value_delimiter().map(String::from);
                        let found = found
                            .expect("it is given")
                            .join(&parts.clone().unwrap_or_default());
                        let all = vec![expected.concat(); times].join(&parts.unwrap_or_default());
                        if !expected.is_empty() {
                            assert_eq!(found, all, "umpire {name} {twice:?}");
                        }
                    }
                    Err(error) => assert!(!is_free, "umpire {name} {twice:?}: {error}"),
                }
            }
        }
    }
    for (path, typed, same) in [
        (
            "stat",
            "-x, -x ; -r 2 -r 3 -B -B -a -a -ddd true",
            "-x; -r3 -B -a -d true",
        ),
        (
            "stat",
            "-o a -o b -C 0 -C 1 -e cycles -e branches -vv",
            "-ob -C1 -e cycles -e branches -v -v",
        ),
        (
            "record",
            "-F 99 -F 999 -o a -o b -g -g -vv",
            "-F 999 -o b -g -v",
        ),
        ("top", "-d 1 -d 2", "-d 2"),
        ("report", "-i a -i b -s comm -s dso", "-i b -s dso"),
    ] {
        let [typed, same] = [typed, same].map(|text| text.split(' ').collect::<Vec<_>>());
        assert_eq!(meaning(path, &typed), meaning(path, &same));
    }
    let text = refused(
        &words(&["run"]),
        &words(&["--kernel", "a", "--kernel", "b"]),
    );
    assert!(text.contains("multiple times"), "{text}");
}

#[test]
fn a_long_option_of_perf_is_taken_back_and_shortened() {
    for (path, typed, same) in [
        ("stat", "--null --no-null", ""),
        ("stat", "--no-null -n", "-n"),
        ("stat", "-d --no-detailed", ""),
        ("stat", "-ddd --no-detailed -vv --no-verbose", ""),
        ("stat", "-I 100 --no-interval-print", ""),
        (
            "stat",
            "--all-user --no-all-user --all-kernel",
            "--all-kernel",
        ),
        ("stat", "-x, --no-csv-summary --csv-summary", "-x,"),
        ("stat", "-e cycles --no-event -e branches", "-e branches"),
        ("stat", "--field-sep , --rep 2 true", "-x, -r2 true"),
        ("stat", "--det --interval-p=50 --fie=;", "-d -I50 -x;"),
        ("record", "--call-graph fp --no-call-graph", ""),
        ("record", "--out x --verb", "-o x -v"),
        ("top", "--no-samples --samples", ""),
        ("script", "--no-ns", ""),
    ] {
        let [typed, same] = [typed, same].map(|text| text.split_whitespace().collect::<Vec<_>>());
        assert_eq!(
            meaning(path, &typed),
            meaning(path, &same),
            "{path} {typed:?}"
        );
    }
}

#[test]
fn commands_of_perf_stat_are_no_programs() {
    for (typed, part) in [
        (
            &["stat", "record", "true"][..],
            "umpire record takes samples",
        ),
        (&["stat", "-e", "cycles", "report"], "umpire report shows"),
        (&["stat", "record", "--", "true"], "umpire stat -- record"),
    ] {
        let text = refused(&[], &words(typed));
        assert!(
            text.starts_with("stat has no command 're") && text.contains(part),
            "{text}"
        );
    }
    for typed in [
        &["--", "record", "x"][..],
        &["-d", "--", "report"],
        &["./record"],
    ] {
        meaning("stat", typed);
    }
}

#[test]
fn a_lease_is_held_while_a_command_runs_and_not_while_a_number_does() {
    let lease = |typed: &[&str]| {
        let all = [&["umpire", "lease"], typed].concat();
        match parse(all.into_iter().map(OsString::from)).unwrap().command {
            super::Command::Lease(flags) => flags.command().map(<[OsString]>::to_vec),
            other => panic!("{other:?}"),
        }
    };
    let check = |typed: &[&str], expected: &[&str]| assert_eq!(lease(typed).unwrap(), expected);
    check(
        &["--counters", "2", "perf", "stat", "-a"],
        &["perf", "stat", "-a"],
    );
    check(&["--wait", "--", "sh", "--", "-x"], &["sh", "--", "-x"]);
    check(&["--wait=5s"], &[]);
    let refused = |typed: &[&str], parts: &[&str]| {
        let text = lease(typed).unwrap_err();
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    };
    refused(
        &["--wait", "5s", "perf"],
        &["'5s'", "--wait=5s", "--for 5s"],
    );
    refused(&["2"], &["'2'", "--counters 2"]);
}
