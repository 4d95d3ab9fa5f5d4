//! Options of perf: what the same command here makes of those that it does not have.
//!
//! An option of ours is never looked for here, so a row is only for a name that clap does not
//! know, except [`Here::Otherwise`]. The tests hold the table against the options of perf
//! (`options.txt`, and the perf that is installed), and write `docs/reference/perf-options.md` from it.

mod rows;

use std::ffi::OsString;

/// What an option of perf is here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Here {
    /// Another name for this option of ours, which means the same.
    Alias(&'static str),
    /// Nothing; the text says why, or what to do instead, and follows a colon.
    No(&'static str),
    /// An option of ours that has this name and means something else: what.
    Otherwise(&'static str),
}

/// Names of one option of perf, as `-p, --pid`, and what it is here.
pub(super) type Row = (&'static str, Here);

/// The names of a row.
pub(super) fn names(row: &Row) -> impl Iterator<Item = &'static str> {
    row.0.split(", ")
}

/// The tables of a command, of which the first that has a name decides.
pub(super) fn tables(command: &str) -> &'static [&'static [Row]] {
    let found = rows::COMMANDS.iter().find(|(name, _)| *name == command);
    found.map_or(&[], |(_, tables)| tables)
}

/// The row of an option, which is named with its hyphens.
pub(super) fn row(command: &str, option: &str) -> Option<&'static Row> {
    let mut rows = tables(command).iter().copied().flatten();
    rows.find(|row| names(row).any(|name| name == option))
}

/// What to do instead of an option of perf. perf takes a `--no-` before each of its options,
/// and takes it away from those that have one; both are about the same thing.
pub(super) fn instead(command: &str, option: &str) -> Option<&'static str> {
    let opposite = || match option.strip_prefix("--no-") {
        Some(rest) => format!("--{rest}"),
        None => option.replacen("--", "--no-", 1),
    };
    let row = row(command, option).or_else(|| row(command, &opposite()))?;
    match row.1 {
        Here::No(text) => Some(text),
        Here::Alias(_) | Here::Otherwise(_) => None,
    }
}

/// What to do instead of a command of perf.
pub(super) fn elsewhere(command: &str) -> Option<&'static str> {
    let mut rows = rows::ELSEWHERE.iter();
    let found = rows.find(|(names, _)| names.split(", ").any(|name| name == command));
    found.map(|(_, text)| *text)
}

/// What to do instead of a command of perf below one of its own, of which ours would make a
/// program to start; one that stands behind `--` is a program.
pub(super) fn below(command: &super::Command, words: &[OsString]) -> Option<String> {
    let super::Command::Stat(options) = command else {
        return None;
    };
    let started = &options.until.command;
    let name = started.first()?.to_str()?;
    let (_, text) = rows::BELOW_STAT.iter().find(|(word, _)| *word == name)?;
    let before = words.len().checked_sub(started.len() + 1)?;
    let is_meant = words.get(before).is_some_and(|word| word == "--");
    (!is_meant).then(|| {
        format!(
            "stat has no command '{name}': {text}; a program of this name stands behind --: \
             umpire stat -- {name}"
        )
    })
}

/// Gives the options of ours the names that they have in perf.
pub(super) fn attach(command: clap::Command) -> clap::Command {
    rows::COMMANDS.iter().fold(command, |command, (name, _)| {
        command.mut_subcommand(name, |command| {
            let rows = tables(name).iter().copied().flatten();
            rows.fold(command, |command, row| match row.1 {
                Here::Alias(ours) => also_named(command, ours, row),
                Here::No(_) | Here::Otherwise(_) => command,
            })
        })
    })
}

fn also_named(command: clap::Command, ours: &str, row: &'static Row) -> clap::Command {
    let ours = ours.trim_start_matches('-');
    let known = command.get_arguments().find(|one| named(one, ours));
    let Some(id) = known.map(|one| one.get_id().clone()) else {
        return command;
    };
    let missing: Vec<&str> = names(row)
        .map(|name| name.trim_start_matches('-'))
        .filter(|name| !command.get_arguments().any(|one| named(one, name)))
        .collect();
    command.mut_arg(id, |option| option.visible_aliases(missing))
}

/// The commands whose options can be typed as freely as perf's.
pub(super) fn free_commands() -> impl Iterator<Item = &'static str> {
    let names = rows::COMMANDS.iter().map(|(name, _)| *name);
    names.chain(["track"])
}

/// Lets options of the command that was typed be as free as perf's option parser lets them: of
/// one that is given twice the last counts (lists go on), a long name may be as short as it is
/// unique, and `--no-` before a long option takes it back, or away from one that begins so. Only
/// for reading a command line:
/// help, manual pages and completions would show each option many times.
pub(super) fn free(command: clap::Command, name: Option<&str>) -> clap::Command {
    let Some(name) = free_commands().find(|one| Some(*one) == name) else {
        return command;
    };
    command.mut_subcommand(name, |command| {
        let opposites = opposites(name, &command);
        shortened(name, command)
            .args_override_self(true)
            .args(opposites)
    })
}

/// Gives the options the beginnings of their long names that no other option of ours or perf's
/// has: what perf means by one is not taken for something else.
fn shortened(name: &str, command: clap::Command) -> clap::Command {
    let longs = |option: &clap::Arg| -> Vec<String> {
        let others = option.get_all_aliases().into_iter().flatten();
        let all = option.get_long().into_iter().chain(others);
        all.map(str::to_owned).collect()
    };
    let ours: Vec<Vec<String>> = command.get_arguments().map(longs).collect();
    let rows = tables(name).iter().copied().flatten();
    let perfs: Vec<&str> = rows
        .flat_map(names)
        .filter_map(|name| name.strip_prefix("--"))
        .collect();
    command.mut_args(|option| {
        let own = longs(&option);
        let mut short: Vec<String> = Vec::new();
        for long in &own {
            for part in (1..long.len()).filter_map(|end| long.get(..end)) {
                let mut others = ours.iter().filter(|names| **names != own).flatten();
                let is_taken = own.iter().any(|name| name == part)
                    || short.iter().any(|one| one == part)
                    || others.any(|name| name.starts_with(part))
                    || perfs
                        .iter()
                        .any(|name| name.starts_with(part) && !own.iter().any(|one| one == name));
                if !is_taken {
                    short.push(part.to_owned());
                }
            }
        }
        option.aliases(short)
    })
}

/// What takes back the options of a command, under each of their long names.
fn opposites(name: &str, command: &clap::Command) -> Vec<clap::Arg> {
    let mut all: Vec<clap::Arg> = Vec::new();
    let options = command.get_arguments();
    for option in options.filter(|one| !one.is_positional() && !one.is_required_set()) {
        for long in option.get_long_and_visible_aliases().unwrap_or_default() {
            let opposite = match long.strip_prefix("no-") {
                Some(rest) => rest.to_owned(),
                None => format!("no-{long}"),
            };
            let is_there = command.get_arguments().any(|one| named(one, &opposite))
                || all.iter().any(|one| named(one, &opposite))
                || row(name, &format!("--{opposite}")).is_some();
            if !is_there {
                let arg = clap::Arg::new(opposite.clone()).long(opposite);
                let arg = arg.action(clap::ArgAction::SetTrue).hide(true);
                all.push(arg.overrides_with(option.get_id()));
            }
        }
    }
    all
}

/// Whether an option has this long name.
pub(super) fn named(option: &clap::Arg, name: &str) -> bool {
    option.get_long() == Some(name)
        || option
            .get_all_aliases()
            .is_some_and(|all| all.contains(&name))
}

#[cfg(test)]
mod tests;
