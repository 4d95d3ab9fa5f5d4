//! Lists of events as users write them: `cycles,{instructions,branches},r5300c0`.

use std::str::FromStr;

use thiserror::Error;

/// Events by name. Those of a group are counted at the same time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventList {
    /// The groups; a single event is a group of one.
    pub groups: Vec<Vec<String>>,
    /// A sample of the first event of a group is to have the counts of the others (`:S`). A
    /// tool that counts reads them together anyway.
    pub reads_at_samples: bool,
}

/// A list that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum EventListError {
    /// Nothing between two commas.
    #[error("'{0}' has a comma with no event before or behind it")]
    Empty(String),
    /// Braces do not match.
    #[error("'{0}': a group is written as {{a,b}}, without another one in it")]
    Braces(String),
}

impl FromStr for EventList {
    type Err = EventListError;

    fn from_str(text: &str) -> Result<Self, EventListError> {
        let braces = || EventListError::Braces(text.to_owned());
        let mut list = Self::default();
        let mut rest = text.trim();
        loop {
            let (group, behind) = match rest.strip_prefix('{') {
                Some(inner) => inner.split_once('}').ok_or_else(braces)?,
                None => rest.split_at(end_of_name(rest)),
            };
            if group.contains(['{', '}']) {
                return Err(braces());
            }
            let mut names: Vec<String> = split(group).map(|it| it.trim().to_owned()).collect();
            if names.iter().any(String::is_empty) {
                return Err(EventListError::Empty(text.to_owned()));
            }
            let mut behind = behind.trim_start();
            if let Some(modified) = behind.strip_prefix(':') {
                let (letters, next) = modified.split_at(end_of_name(modified));
                list.modify(letters.trim(), &mut names).ok_or_else(braces)?;
                behind = next;
            }
            list.groups.push(names);
            match behind.strip_prefix(',') {
                Some(next) => rest = next.trim_start(),
                None if behind.is_empty() => return Ok(list),
                None => return Err(braces()),
            }
        }
    }
}

impl EventList {
    /// The modifiers behind a group's brace are those of each event in it, but for `S`.
    fn modify(&mut self, letters: &str, names: &mut [String]) -> Option<()> {
        let plain = letters.replace('S', "");
        let all = plain.chars().all(|letter| letter.is_ascii_alphabetic());
        if letters.is_empty() || !all {
            return None;
        }
        self.reads_at_samples |= plain.len() < letters.len();
        if !plain.is_empty() {
            for name in names {
                let separator = if name.ends_with('/') { "" } else { ":" };
                name.push_str(separator);
                name.push_str(&plain);
            }
        }
        Some(())
    }
}

/// The names of a group; a comma between the slashes of `cpu/…/` is the name's.
fn split(group: &str) -> impl Iterator<Item = &str> {
    let mut rest = Some(group);
    std::iter::from_fn(move || {
        let text = rest?;
        let (name, behind) = text.split_at(end_of_name(text));
        rest = behind.strip_prefix(',');
        Some(name)
    })
}

/// Where the name ends with which `text` begins: at the first comma that is not between
/// slashes.
fn end_of_name(text: &str) -> usize {
    let mut between = false;
    let ends = |letter: char| {
        between ^= letter == '/';
        letter == ',' && !between
    };
    text.find(ends).unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_groups() {
        let check = |text: &str, expected: Option<&[&[&str]]>| {
            let list = text.parse::<EventList>().ok();
            let groups = list.map(|list| list.groups);
            let expected = expected.map(|groups| {
                let owned = |names: &&[&str]| names.iter().map(|it| (*it).to_owned()).collect();
                groups.iter().map(owned).collect::<Vec<Vec<String>>>()
            });
            assert_eq!(groups, expected, "{text}");
        };
        check("cycles", Some(&[&["cycles"]]));
        check("a, b:u", Some(&[&["a"], &["b:u"]]));
        check(
            "{a,b},skl::C:D:c=1,{e}",
            Some(&[&["a", "b"], &["skl::C:D:c=1"], &["e"]]),
        );
        check("{a,b}:u,d", Some(&[&["a:u", "b:u"], &["d"]]));
        check(
            "cpu/event=1,umask=2/u,{cpu/event=3,inv/,a}:Sk",
            Some(&[&["cpu/event=1,umask=2/u"], &["cpu/event=3,inv/k", "a:k"]]),
        );
        for bad in [
            "", ",", "a,", ",a", "a,,b", "{a", "a}", "{a,{b}}", "{}", "{a,}", "{a}b", "a{b}",
            "{a}:", "{a}:1", "{a}:u{b}",
        ] {
            check(bad, None);
        }
    }
}
