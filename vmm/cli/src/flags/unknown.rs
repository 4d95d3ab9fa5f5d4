//! What is said of an option that a command does not have.

use std::ffi::OsString;

use umpire_events::likeness;

use super::perf;

/// At most so many options are proposed.
const MOST: usize = 3;

/// One line about `option`, which stands among `words`, the arguments behind the program's name:
/// its name, and what to do instead.
pub(super) fn explain(program: &clap::Command, words: &[OsString], option: &str) -> String {
    let path = commands(program, words, option);
    let command = path.last().copied().unwrap_or(program);
    let names: Vec<&str> = path.iter().skip(1).map(|one| one.get_name()).collect();
    let name = names.join(" ");
    if name.is_empty() {
        return behind(program, words, option, "").unwrap_or_else(|| {
            format!("there is no option '{option}'; umpire --help lists the commands")
        });
    }
    let meant = spelled(command, words, option);
    let exact = meant
        .as_ref()
        .is_some_and(|(word, near)| near[0] == format!("-{word}"));
    if !exact && let Some(instead) = perf::instead(&name, option) {
        return format!("{name} has no option '{option}': {instead}");
    }
    let (said, near) = match &meant {
        Some((word, near)) => (word.as_str(), near.clone()),
        None => (option, nearest(command, option)),
    };
    if !near.is_empty() {
        let near = listed(near);
        return format!("{name} has no option '{said}'; did you mean {near}?");
    }
    if let Some(text) = behind(command, words, option, &name) {
        return text;
    }
    if let Some(long) = option.strip_prefix("--no-")
        && command.get_arguments().any(|one| perf::named(one, long))
    {
        return format!("{name} has no option '{option}': leave --{long} away");
    }
    let mut others = having(program, option);
    others.truncate(MOST);
    // A letter has as many meanings as there are commands.
    if others.is_empty() || !option.starts_with("--") {
        format!("{name} has no option '{option}'; umpire {name} --help lists those that it has")
    } else {
        let others = listed(others.into_iter().map(|other| format!("umpire {other}")));
        format!(
            "{name} has no option '{option}', which is one of {others}; see umpire {name} --help"
        )
    }
}

/// Where an option of a command below this one stands: of the one that was typed, if it has it.
fn behind(command: &clap::Command, words: &[OsString], option: &str, name: &str) -> Option<String> {
    let below = having(command, option);
    let typed = below
        .iter()
        .find(|below| words.iter().any(|word| word == below.as_str()));
    let below = typed.or(below.first())?;
    let path = format!("umpire {name}");
    let path = path.trim_end();
    Some(format!(
        "'{option}' stands behind the word of which it is an option: {path} {below} {option}"
    ))
}

/// The program, its command that is meant, and that one's: what stands in front of the option.
fn commands<'a>(
    program: &'a clap::Command,
    words: &[OsString],
    option: &str,
) -> Vec<&'a clap::Command> {
    let mut path = vec![program];
    let mut command = program;
    for word in words.iter().filter_map(|word| word.to_str()) {
        if word == "--" || is_in(word, option) {
            break;
        }
        let named = |one: &&clap::Command| {
            one.get_name() == word || one.get_all_aliases().any(|alias| alias == word)
        };
        if let Some(found) = command.get_subcommands().find(named) {
            path.push(found);
            command = found;
        }
    }
    path
}

/// Whether a word is this option, with a value or among other letters.
fn is_in(word: &str, option: &str) -> bool {
    let letter = option.chars().nth(1).filter(|letter| *letter != '-');
    match letter {
        Some(letter) => word.starts_with('-') && !word.starts_with("--") && word.contains(letter),
        None => word.split('=').next() == Some(option),
    }
}

/// The word in which a short option stands, if it looks like a long one with a hyphen too few
/// (`-vcpu`), and the options that are nearest to it. Where its first letters are options of the
/// command, few letters of it may be wrong.
fn spelled(
    command: &clap::Command,
    words: &[OsString],
    option: &str,
) -> Option<(String, Vec<String>)> {
    let letter = option
        .strip_prefix('-')
        .filter(|rest| !rest.starts_with('-'))?;
    let words = words.iter().filter_map(|word| word.to_str());
    let mut words = words.take_while(|word| *word != "--");
    words.find_map(|word| {
        let word = word.split('=').next().unwrap_or(word);
        let name = word.strip_prefix('-')?;
        let plain = |letter: char| letter.is_ascii_alphabetic() || letter == '-';
        let is_long = name.len() > 2 && name.chars().all(plain) && !name.starts_with('-');
        if !is_long || !name.contains(letter) {
            return None;
        }
        let near = nearest_long(command, name, name.starts_with(letter));
        (!near.is_empty()).then(|| (word.to_owned(), near))
    })
}

/// The options of a command that are nearest to an unknown one, best first. Of a letter that is
/// only the same in the other case: with which letter an option begins says too little.
fn nearest(command: &clap::Command, option: &str) -> Vec<String> {
    let wanted = option.trim_start_matches('-');
    if wanted.chars().count() > 1 {
        return nearest_long(command, wanted, true);
    }
    let options = command.get_arguments().filter(|one| !one.is_hide_set());
    let shorts = options.flat_map(|one| one.get_short_and_visible_aliases().unwrap_or_default());
    let same = shorts.filter(|short| short.to_string().eq_ignore_ascii_case(wanted));
    same.map(|short| format!("-{short}")).collect()
}

/// Whether one of two names is the other with `no-` before it, or they only differ so and by few
/// letters: what somebody types who does not want the one is not answered with it.
fn are_opposite(one: &str, other: &str) -> bool {
    one.starts_with("no-") && !other.starts_with("no-")
        || other.strip_prefix("no-").is_some_and(|rest| rest == one)
}

/// Long options of which few letters differ or, with `parts`, one is a part of the other.
fn nearest_long(command: &clap::Command, wanted: &str, parts: bool) -> Vec<String> {
    let options = command.get_arguments().filter(|one| !one.is_hide_set());
    let wanted = wanted.to_ascii_lowercase();
    let mut found: Vec<(usize, String)> = Vec::new();
    for option in options {
        let names = option.get_long_and_visible_aliases().unwrap_or_default();
        let names = names
            .into_iter()
            .filter(|name| !are_opposite(&wanted, name));
        let distances = names.filter_map(|name| {
            let like = likeness(&wanted, name);
            let is_near = like.few_differ || parts && like.is_part;
            is_near.then(|| (like.distance, format!("--{name}")))
        });
        // Of an option's names the nearest.
        found.extend(distances.min());
    }
    found.sort();
    let best = found.first().map_or(0, |(distance, _)| *distance);
    let other = usize::from(best > 0);
    found.retain(|(distance, _)| *distance <= best + other);
    found.truncate(MOST);
    found.into_iter().map(|(_, name)| name).collect()
}

/// The commands below this one that have an option, as they are typed behind it.
fn having(command: &clap::Command, option: &str) -> Vec<String> {
    let has = |one: &clap::Arg| match option.strip_prefix("--") {
        Some(long) => perf::named(one, long),
        None => one.get_short().is_some_and(|it| option == format!("-{it}")),
    };
    let mut found = Vec::new();
    for below in command.get_subcommands() {
        let name = below.get_name();
        if below.get_arguments().any(has) {
            found.push(name.to_owned());
        } else {
            found.extend(
                having(below, option)
                    .into_iter()
                    .map(|one| format!("{name} {one}")),
            );
        }
    }
    found
}

/// `a, b or c`.
fn listed(words: impl IntoIterator<Item = String>) -> String {
    let words: Vec<String> = words.into_iter().collect();
    match words.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => words.concat(),
    }
}
