//! Lists of events as users write them: `cycles,{instructions,branches},r5300c0`.

use std::str::FromStr;

use thiserror::Error;

/// Events by name. Those of a group are counted at the same time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventList {
    /// The groups; a single event is a group of one.
    pub groups: Vec<Vec<String>>,
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
        let mut groups = Vec::new();
        let mut rest = text.trim();
        loop {
            let (group, behind) = match rest.strip_prefix('{') {
                Some(inner) => inner.split_once('}').ok_or_else(braces)?,
                None => rest.split_at(rest.find(',').unwrap_or(rest.len())),
            };
            if group.contains(['{', '}']) {
                return Err(braces());
            }
            let names: Vec<String> = group.split(',').map(|it| it.trim().to_owned()).collect();
            if names.iter().any(String::is_empty) {
                return Err(EventListError::Empty(text.to_owned()));
            }
            groups.push(names);
            let behind = behind.trim_start();
            match behind.strip_prefix(',') {
                Some(next) => rest = next.trim_start(),
                None if behind.is_empty() => return Ok(Self { groups }),
                None => return Err(braces()),
            }
        }
    }
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
        for bad in [
            "", ",", "a,", ",a", "a,,b", "{a", "a}", "{a,{b}}", "{}", "{a,}", "{a}b", "a{b}",
            "{a}:u",
        ] {
            check(bad, None);
        }
    }
}
