//! Which samples of a profile are asked about, as it is typed: perf's filters.

use std::fs;
use std::path::Path;
use std::str::FromStr;

use clap::Args;
use thiserror::Error;

use crate::numbers::Numbers;

/// Which samples are asked about; those of which all is true that is said here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub struct SampleChoice {
    /// Only this event [default: all]
    #[arg(long, value_name = "EVENT")]
    pub event: Option<String>,
    /// Only samples of these vCPUs: 0,2-3
    #[arg(
        short = 'C',
        long = "vcpu",
        id = "vcpu",
        value_name = "LIST",
        visible_alias = "cpu"
    )]
    pub vcpus: Option<Numbers>,
    /// Only samples taken on these cores: 0,2-3
    #[arg(long = "core", id = "core", value_name = "LIST")]
    pub cores: Option<Numbers>,
    /// Only samples of threads with one of these names; file://FILE has one a line
    #[arg(short, long, value_name = "NAME[,...]", visible_alias = "comm")]
    pub comms: Option<WordList>,
    /// Only samples of these processes of the guest: 40,50-59
    #[arg(long = "pid", id = "pid", value_name = "LIST")]
    pub pids: Option<Numbers>,
    /// Only samples of these threads of the guest: 40,50-59
    #[arg(long = "tid", id = "tid", value_name = "LIST")]
    pub tids: Option<Numbers>,
    /// Only samples in these files or kernel modules, as report shows them: libc.so.6,
    /// /bin/sh, [kernel.kallsyms]; file://FILE has one a line
    #[arg(short, long, value_name = "NAME[,...]", visible_alias = "dso")]
    pub dsos: Option<WordList>,
    /// Only samples in these symbols, or at these addresses: 0x401000; file://FILE has one a
    /// line
    #[arg(
        short = 'S',
        long = "symbol",
        id = "in_symbol",
        value_name = "NAME[,...]"
    )]
    pub symbols: Option<WordList>,
    /// Only samples in symbols with this in their name
    #[arg(long, value_name = "PART")]
    pub symbol_filter: Option<String>,
    /// Only samples of this time, in seconds since sampling began: 1.5,2 or 1.5, or ,2, several
    /// with blanks between; or in parts of the profile: 10%/2 (its second tenth), 0%-10%,
    /// several with commas between
    #[arg(long, value_name = "START,STOP")]
    pub time: Option<TimeChoice>,
}

/// Names with commas between; `file://PATH` stands for the lines of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WordList(Vec<String>);

/// A list of names that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum WordListError {
    /// It has nothing between two commas, or is empty.
    #[error("a name is empty; give names with commas between")]
    Empty,
    /// The file cannot be read.
    #[error("{file}: {error}")]
    File {
        file: String,
        /// Why not.
        error: String,
    },
}

impl FromStr for WordList {
    type Err = WordListError;

    fn from_str(text: &str) -> Result<Self, WordListError> {
        let mut words = Vec::new();
        for word in text.split(',') {
            match word.strip_prefix("file://") {
                Some(file) => words.extend(lines(file)?),
                None if word.is_empty() => return Err(WordListError::Empty),
                None => words.push(word.to_owned()),
            }
        }
        Ok(Self(words))
    }
}

/// The lines of a file that are not empty.
fn lines(file: &str) -> Result<Vec<String>, WordListError> {
    let bytes = fs::read(Path::new(file)).map_err(|error| WordListError::File {
        file: file.to_owned(),
        error: error.to_string(),
    })?;
    // The guest's names were read so, too.
    let text = String::from_utf8_lossy(&bytes);
    let lines = text.lines().filter(|line| !line.is_empty());
    Ok(lines.map(str::to_owned).collect())
}

impl WordList {
    /// The names, in their order.
    #[must_use]
    pub fn words(&self) -> &[String] {
        &self.0
    }
}

/// Parts of the time that a profile was recorded for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimeChoice(Windows);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Windows {
    /// First and last nanosecond since sampling began.
    Absolute(Vec<(u64, u64)>),
    /// From where to where of the profile, in millionths of a percent.
    Parts(Vec<(u64, u64)>),
}

/// A whole profile, in millionths of a percent.
const WHOLE: u64 = 100_000_000;

/// What is no part of a profile's time.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TimeChoiceError {
    /// It is nothing of what can be given.
    #[error(
        "'{0}' is no time; give START,STOP in seconds (1.5,2 or 1.5, or ,2), or a part like 10%/2 \
         or 0%-10%"
    )]
    Form(String),
    /// It ends before it begins.
    #[error("'{0}' ends before it begins")]
    Order(String),
    /// It is not within the profile.
    #[error("'{0}' is beyond 100 % of the profile")]
    Beyond(String),
}

impl FromStr for TimeChoice {
    type Err = TimeChoiceError;

    fn from_str(text: &str) -> Result<Self, TimeChoiceError> {
        let windows = if text.contains('%') {
            let parts = text.split(',').map(|word| part(word.trim()));
            Windows::Parts(parts.collect::<Result<_, _>>()?)
        } else {
            let words: Vec<&str> = text.split_whitespace().collect();
            if words.is_empty() {
                return Err(TimeChoiceError::Form(text.to_owned()));
            }
            let all = words.into_iter().map(seconds);
            Windows::Absolute(all.collect::<Result<_, _>>()?)
        };
        Ok(Self(windows))
    }
}

/// `1.5,2`, `1.5,`, `,2`, or `1.5`, which has no end as with perf.
fn seconds(word: &str) -> Result<(u64, u64), TimeChoiceError> {
    let form = || TimeChoiceError::Form(word.to_owned());
    let time = |text: &str, missing: u64| match text {
        "" => Ok(missing),
        text => decimal(text, 9).ok_or_else(form),
    };
    let (start, stop) = word.split_once(',').unwrap_or((word, ""));
    if start.is_empty() && stop.is_empty() {
        return Err(form());
    }
    let (start, stop) = (time(start, 0)?, time(stop, u64::MAX)?);
    if stop < start {
        return Err(TimeChoiceError::Order(word.to_owned()));
    }
    Ok((start, stop))
}

/// `10%/2`, `0%-10%`, or `10%`, which is the first such part.
fn part(word: &str) -> Result<(u64, u64), TimeChoiceError> {
    let form = || TimeChoiceError::Form(word.to_owned());
    let beyond = || TimeChoiceError::Beyond(word.to_owned());
    let percent = |text: &str| {
        let number = text.trim().strip_suffix('%');
        number
            .and_then(|number| decimal(number, 6))
            .ok_or_else(form)
    };
    let (from, to) = if let Some((size, number)) = word.split_once('/') {
        let size = percent(size)?;
        let number = decimal(number.trim(), 0).filter(|number| *number > 0);
        let number = number.filter(|_| size > 0).ok_or_else(form)?;
        let to = size.checked_mul(number).ok_or_else(beyond)?;
        (to - size, to)
    } else if let Some((from, to)) = word.split_once('-') {
        (percent(from)?, percent(to)?)
    } else {
        (0, percent(word)?)
    };
    if to > WHOLE {
        return Err(beyond());
    }
    if to <= from {
        return Err(TimeChoiceError::Order(word.to_owned()));
    }
    Ok((from, to))
}

/// A number with at most so many digits behind its point, in units of the last of these.
fn decimal(text: &str, digits: usize) -> Option<u64> {
    let (whole, rest) = text.split_once('.').unwrap_or((text, ""));
    let plain = |text: &str| text.bytes().all(|digit| digit.is_ascii_digit());
    if whole.is_empty() || rest.len() > digits || !plain(whole) || !plain(rest) {
        return None;
    }
    format!("{whole}{rest:0<digits$}").parse().ok()
}

impl TimeChoice {
    /// It is a part of the profile's own time, which has to be known first.
    #[must_use]
    pub fn is_relative(&self) -> bool {
        matches!(self.0, Windows::Parts(_))
    }

    /// First and last nanosecond of each part, of a profile whose first and last samples were
    /// taken at `first` and `last`. No two parts that are side by side have a sample in common.
    #[must_use]
    pub fn windows(&self, first: u64, last: u64) -> Vec<(u64, u64)> {
        let parts = match &self.0 {
            Windows::Absolute(windows) => return windows.clone(),
            Windows::Parts(parts) => parts,
        };
        let total = u128::from(last.saturating_sub(first));
        let at = |part: u64| {
            let behind = total * u128::from(part) / u128::from(WHOLE);
            first.saturating_add(u64::try_from(behind).unwrap_or(u64::MAX))
        };
        let windows = parts.iter().map(|&(from, to)| match to {
            WHOLE => Some((at(from), last)),
            to => Some((at(from), at(to).checked_sub(1)?)),
        });
        windows.flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_perfs_forms() {
        fn check(text: &str, expected: Result<&[(u64, u64)], &str>) {
            let found: Result<TimeChoice, _> = text.parse();
            // Of a profile from 1 to 2 seconds.
            let found = found.map(|choice| choice.windows(1_000_000_000, 2_000_000_000));
            let found = found.map_err(|error| error.to_string());
            match expected {
                Ok(windows) => assert_eq!(found.as_deref(), Ok(windows), "{text}"),
                Err(part) => assert!(found.unwrap_err().contains(part), "{text}"),
            }
        }
        let all = u64::MAX;
        check("1.5,2", Ok(&[(1_500_000_000, 2_000_000_000)]));
        check(",0.000000001", Ok(&[(0, 1)]));
        check("3,", Ok(&[(3_000_000_000, all)]));
        check("3", Ok(&[(3_000_000_000, all)]));
        check("0,1 2.25,", Ok(&[(0, 1_000_000_000), (2_250_000_000, all)]));
        check("10%/2", Ok(&[(1_100_000_000, 1_199_999_999)]));
        check("10%/10", Ok(&[(1_900_000_000, 2_000_000_000)]));
        check("0%-100%", Ok(&[(1_000_000_000, 2_000_000_000)]));
        check("12.5%", Ok(&[(1_000_000_000, 1_124_999_999)]));
        check(
            "0%-10%,30%-40%",
            Ok(&[
                (1_000_000_000, 1_099_999_999),
                (1_300_000_000, 1_399_999_999),
            ]),
        );
        for text in [
            "",
            ",",
            "x",
            "1,y",
            "-1,2",
            "1.,2x",
            "1e3",
            "10%/0",
            "0%/1",
            "10%/x",
            "%",
            "5-10%",
            "1.0000000001,",
            "99999999999999,",
        ] {
            check(text, Err("is no time; give START,STOP in seconds"));
        }
        check("2,1", Err("'2,1' ends before it begins"));
        check("20%-10%", Err("ends before it begins"));
        check("10%/11", Err("beyond 100 %"));
        check("0%-101%", Err("beyond 100 %"));
    }

    #[test]
    fn names_come_from_the_line_or_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("names");
        fs::write(&file, b"a b\n\nc,d\n\xff\n").unwrap();
        let list: WordList = format!("x,file://{},y z", file.display()).parse().unwrap();
        assert_eq!(list.words(), ["x", "a b", "c,d", "\u{fffd}", "y z"]);
        let error = "a,,b".parse::<WordList>().unwrap_err().to_string();
        assert!(error.contains("a name is empty"), "{error}");
        let error = "file://no/such".parse::<WordList>().unwrap_err();
        assert!(error.to_string().starts_with("no/such: "), "{error}");
    }
}
