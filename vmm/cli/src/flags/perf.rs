//! Options of perf: what the same command here makes of those that it does not have.
//!
//! An option of ours is never looked for here, so a row is only for a name that clap does not
//! know, except [`Here::Otherwise`]. The tests hold the table against the options of perf
//! (`options.txt`, and the perf that is installed), and write `docs/perf-options.md` from it.

mod rows;

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

/// Whether an option has this long name.
pub(super) fn named(option: &clap::Arg, name: &str) -> bool {
    option.get_long() == Some(name)
        || option
            .get_all_aliases()
            .is_some_and(|all| all.contains(&name))
}

#[cfg(test)]
mod tests;
