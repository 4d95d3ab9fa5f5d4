//! Lists of events as users write them: `cycles,{instructions,branches},r5300c0`.

use std::str::FromStr;

use thiserror::Error;
use umpire_events::{extras, with_letters};

/// Events by name. Those of a group are counted at the same time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventList {
    /// The groups; a single event is a group of one.
    pub groups: Vec<Vec<String>>,
    /// The numbers of groups that are broken up where they do not fit (`:W`).
    pub weak: Vec<usize>,
    /// A sample of the first event of a group is to have the counts of the others (`:S`). A
    /// tool that counts reads them together anyway.
    pub reads_at_samples: bool,
}

/// A list that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum EventListError {
    /// Nothing before or behind a comma.
    #[error(
        "'{text}': there is no event at character {at}; events stand between commas, as in a,b"
    )]
    Empty {
        /// The list.
        text: String,
        /// Where, from 1 on.
        at: usize,
    },
    /// Braces do not match, or something stands behind them.
    #[error(
        "'{text}': '{part}' at character {at} is out of place; a group is written as {{a,b}}, \
         without another one in it"
    )]
    Braces {
        /// The list.
        text: String,
        /// What is wrong.
        part: String,
        /// Where, from 1 on.
        at: usize,
    },
    /// A group without an end.
    #[error("'{text}': the group that begins at character {at} is not closed; add a }}")]
    Unclosed {
        /// The list.
        text: String,
        /// Where it begins, from 1 on.
        at: usize,
    },
    /// What stands behind a group are no letters.
    #[error("'{text}': ':{letters}' behind a group are no modifiers, as in {{a,b}}:u")]
    Letters {
        /// The list.
        text: String,
        /// What stands there.
        letters: String,
    },
    /// A quote that the shell has left.
    #[error(
        "'{text}': there is a quote ({quote}) at character {at}, which the shell takes away \
         unless it is quoted itself; leave it out"
    )]
    Quote {
        /// The list.
        text: String,
        quote: char,
        /// Where, from 1 on.
        at: usize,
    },
}

impl FromStr for EventList {
    type Err = EventListError;

    fn from_str(text: &str) -> Result<Self, EventListError> {
        let mut typed = Typed {
            text,
            all: text.trim_end(),
            list: Self::default(),
        };
        if let Some((offset, quote)) = stray_quote(typed.all) {
            return Err(EventListError::Quote {
                text: text.to_owned(),
                quote,
                at: typed.at(&typed.all[offset..]),
            });
        }
        let mut rest = typed.all;
        loop {
            let start = rest.trim_start();
            let behind = if start.starts_with('{') {
                typed.group(start)?
            } else {
                let (name, behind) = start.split_at(end_of_name(start));
                let name = typed.event(start, name)?;
                typed.push(vec![name]);
                behind
            };
            match behind.strip_prefix(',') {
                Some(next) => rest = next,
                None if behind.is_empty() => return Ok(typed.list),
                None => return Err(typed.braces(behind, behind)),
            }
        }
    }
}

/// A list as it was typed.
struct Typed<'a> {
    text: &'a str,
    /// Without blanks behind it: what is left to be read is an end of this.
    all: &'a str,
    /// What was read of it.
    list: EventList,
}

impl<'a> Typed<'a> {
    /// Where `rest` begins, for people.
    fn at(&self, rest: &str) -> usize {
        let length = self.all.len().saturating_sub(rest.len());
        let before = self.all.get(..length).unwrap_or(self.all);
        before.chars().count() + 1
    }

    /// `part`, with which `rest` begins, is out of place.
    fn braces(&self, rest: &str, part: &str) -> EventListError {
        EventListError::Braces {
            text: self.text.to_owned(),
            part: part.to_owned(),
            at: self.at(rest),
        }
    }

    /// The event `name`, with which `rest` begins.
    fn event(&self, rest: &str, name: &str) -> Result<String, EventListError> {
        if name.trim().is_empty() {
            return Err(EventListError::Empty {
                text: self.text.to_owned(),
                at: self.at(rest),
            });
        }
        match name.find(['{', '}']) {
            Some(brace) => Err(self.braces(&rest[brace..], &name[brace..=brace])),
            None => Ok(name.trim().to_owned()),
        }
    }

    /// Adds the group with which `start` begins; what is behind it is left.
    fn group(&mut self, start: &'a str) -> Result<&'a str, EventListError> {
        let inner = &start[1..];
        let end = inner.find('}').ok_or_else(|| EventListError::Unclosed {
            text: self.text.to_owned(),
            at: self.at(start),
        })?;
        let mut names = Vec::new();
        let mut at = 0;
        loop {
            let left = &inner[at..];
            let name = &left[..end_of_name(left).min(end - at)];
            names.push(self.event(left, name)?);
            at += name.len();
            if at == end {
                break;
            }
            // Behind the comma.
            at += 1;
        }
        let mut behind = inner[end + 1..].trim_start();
        if let Some(modified) = behind.strip_prefix(':') {
            let (letters, next) = modified.split_at(end_of_name(modified));
            self.modify(letters.trim(), &mut names)
                .ok_or_else(|| EventListError::Letters {
                    text: self.text.to_owned(),
                    letters: letters.to_owned(),
                })?;
            behind = next;
        }
        self.push(names);
        Ok(behind)
    }

    fn push(&mut self, names: Vec<String>) {
        let said: Vec<_> = names.iter().map(|name| extras(name)).collect();
        self.list.reads_at_samples |= said.iter().any(|it| it.reads);
        if said.iter().any(|it| it.weak) {
            self.be_weak();
        }
        self.list.groups.push(names);
    }

    /// The next group is weak.
    fn be_weak(&mut self) {
        let next = self.list.groups.len();
        if self.list.weak.last() != Some(&next) {
            self.list.weak.push(next);
        }
    }

    /// The modifiers behind a group's brace are those of each event in it, but for those that
    /// are of the group.
    fn modify(&mut self, letters: &str, names: &mut [String]) -> Option<()> {
        let plain = letters.replace(['S', 'W'], "");
        if letters.is_empty() || !letters.chars().all(|it| it.is_ascii_alphabetic()) {
            return None;
        }
        self.list.reads_at_samples |= letters.contains('S');
        if letters.contains('W') {
            self.be_weak();
        }
        if !plain.is_empty() {
            for name in names {
                *name = with_letters(name, &plain);
            }
        }
        Some(())
    }
}

impl EventList {
    /// Adds the events of another list.
    pub fn append(&mut self, other: &Self) {
        let before = self.groups.len();
        self.weak.extend(other.weak.iter().map(|it| before + it));
        self.groups.extend(other.groups.iter().cloned());
        self.reads_at_samples |= other.reads_at_samples;
    }

    /// The groups whose events are not together already, in a group of `others` or in another
    /// one of its own. For groups that are not weak.
    pub(super) fn each_once(&self, others: &[Self]) -> Self {
        let within = |one: &[String], other: &[String]| one.iter().all(|it| other.contains(it));
        let other = || others.iter().flat_map(|list| &list.groups);
        let mut found = Self::default();
        for (at, group) in self.groups.iter().enumerate() {
            let mut own = self.groups.iter().enumerate();
            let again = own.any(|(place, one)| {
                let earlier = place < at || one.len() > group.len();
                place != at && earlier && within(group, one)
            });
            if !again && !other().any(|one| within(group, one)) {
                found.groups.push(group.clone());
            }
        }
        found
    }
}

/// The first quote that holds no name of `cpu/…,name='…'/`, and where it is.
fn stray_quote(text: &str) -> Option<(usize, char)> {
    let mut between = false;
    text.char_indices().find(|(_, letter)| {
        between ^= *letter == '/';
        !between
            && [
                '\'', '"', '`', '\u{2018}', '\u{2019}', '\u{201c}', '\u{201d}',
            ]
            .contains(letter)
    })
}

/// Where the name ends with which `text` begins: at the first comma that is not between
/// slashes. The one slash of `mem:ADDRESS/LENGTH` parts nothing.
fn end_of_name(text: &str) -> usize {
    let parts = !text.trim_start().starts_with("mem:");
    let mut between = false;
    let ends = |letter: char| {
        between ^= parts && letter == '/';
        letter == ',' && !between
    };
    text.find(ends).unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{prop_assert, proptest};

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
        check(
            " a , { b, c } : u , d ",
            Some(&[&["a"], &["b:u", "c:u"], &["d"]]),
        );
        check(
            "{a:u,b:k,cpu/c,name='x,y'/,cpu/d/k}:ku,mem:0x10/8:rw,e",
            Some(&[
                &["a:uk", "b:ku", "cpu/c,name='x,y'/ku", "cpu/d/ku"],
                &["mem:0x10/8:rw"],
                &["e"],
            ]),
        );
        check(
            "{cpu/c/up,d:k,skl::E:F:u,skl::G:i,cpu/h/:u}:kp",
            Some(&[&[
                "cpu/c/upk",
                "d:kp",
                "skl::E:F:ukp",
                "skl::G:i:kp",
                "cpu/h/:ukp",
            ]]),
        );
        // A sample is as near as the event or its group asks.
        check(
            "{cycles:ppp,cycles:u,cycles:p,cycles/name='x:k'/}:pp",
            Some(&[&[
                "cycles:ppp",
                "cycles:upp",
                "cycles:pp",
                "cycles/name='x:k'/pp",
            ]]),
        );
        for bad in [
            "", ",", "a,", ",a", "a,,b", "{a", "a}", "{a,{b}}", "{}", "{a,}", "{a}b", "a{b}",
            "{a}:", "{a}:1", "{a}:u{b}",
        ] {
            check(bad, None);
        }
    }

    #[test]
    fn letters_of_a_group_are_the_lists() {
        let check = |text: &str, weak: &[usize], reads: bool| {
            let list: EventList = text.parse().expect(text);
            assert_eq!(
                (&list.weak[..], list.reads_at_samples),
                (weak, reads),
                "{text}"
            );
        };
        check("a,{b,c}:W,{d,e}:S", &[1], true);
        check("{a:W,b},{c}:WW", &[0, 1], false);
        check("a:S", &[], true);
        check("skl::A:SNOOP", &[], false);
        let mut list: EventList = "a,b".parse().unwrap();
        list.append(&"c,{d,e}:Wu".parse().unwrap());
        assert_eq!((list.groups.len(), &list.weak[..]), (4, &[3][..]));
        assert_eq!(list.groups[3], ["d:u", "e:u"]);
    }

    #[test]
    fn errors_say_where() {
        let check = |text: &str, expected: &str| {
            let error = text.parse::<EventList>().expect_err(text).to_string();
            assert!(error.contains(expected) && error.contains(text), "{error}");
        };
        check("loads,,stores", "no event at character 7");
        check("loads, ", "no event at character 7");
        check("{loads,,stores}", "no event at character 8");
        check("{loads,stores", "at character 1 is not closed; add a }");
        check("loads,{stores:u,é", "at character 7 is not closed");
        check("{loads,{stores}", "'{' at character 8 is out of place");
        check("é,loads}", "'}' at character 8");
        check("é, lo{ads", "'{' at character 6");
        check("{loads}stores", "'stores' at character 8");
        check("{loads}:4", "':4' behind a group");
        check("'loads'", "a quote (') at character 1");
        check("loads,\u{201c}stores", "at character 7");
    }

    proptest! {
        /// Whatever somebody types is answered, and a refusal says what it is about.
        #[test]
        fn a_refusal_names_what_was_typed(text in "(\\PC{0,12}|[a-zé{},:/'SW =]{0,24})") {
            match text.parse::<EventList>() {
                Ok(list) => prop_assert!(list.groups.iter().flatten().all(|it| !it.is_empty())),
                Err(error) => prop_assert!(error.to_string().contains(&text), "{error}"),
            }
        }
    }
}
