//! The columns of a report: `--fields`, by perf's names.

use std::str::FromStr;

use thiserror::Error;

use crate::profile::tally::{SortKey, SortKeys};

/// A column of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// The part of the events that were sampled in what is called from there, too.
    Children,
    /// The part of the events.
    Overhead,
    /// How many samples.
    Sample,
    /// How many events.
    Period,
    /// What the row's samples have in common.
    Key(SortKey),
}

impl Column {
    /// The one that perf calls `word`.
    fn named(word: &str) -> Option<Self> {
        match word {
            "overhead_children" | "children" => Some(Self::Children),
            "overhead" => Some(Self::Overhead),
            "sample" | "samples" => Some(Self::Sample),
            "period" => Some(Self::Period),
            _ => SortKey::named(word).map(Self::Key),
        }
    }

    /// It has numbers.
    #[must_use]
    pub fn is_number(self) -> bool {
        !matches!(self, Self::Key(_))
    }

    /// What is above it among `columns`.
    pub(super) fn title(self, columns: &[Self]) -> &'static str {
        match self {
            Self::Children => "Children",
            Self::Overhead if columns.contains(&Self::Children) => "Self",
            Self::Overhead => "Overhead",
            Self::Sample => "Samples",
            Self::Period => "Period",
            Self::Key(key) => title(key),
        }
    }
}

/// Those that perf has are named as there.
pub(in crate::profile) fn title(key: SortKey) -> &'static str {
    match key {
        SortKey::Comm => "Command",
        SortKey::Pid => "Pid:Command",
        SortKey::Tid => "Tid:Command",
        SortKey::Dso => "Shared Object",
        SortKey::Symbol => "Symbol",
        SortKey::Vcpu => "VM/vCPU",
        SortKey::Core => "Core",
        SortKey::Ring => "Ring",
        SortKey::Cr3 => "CR3",
    }
}

/// A word that is no column.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "'{0}' is no column; give overhead, overhead_children, sample, period, or what --sort takes: \
     comm, pid, tid, dso, sym, vcpu, core, ring, cr3"
)]
pub struct ColumnError(String);

/// The columns of `--fields`, each once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Columns {
    columns: Vec<Column>,
    /// They come to those of who gives none: `+period`.
    more: bool,
}

impl Columns {
    /// It gives the column, whatever else there is.
    #[must_use]
    pub fn has(&self, column: Column) -> bool {
        self.columns.contains(&column)
    }

    /// It gives all columns; if not, it adds some.
    #[must_use]
    pub fn is_all(&self) -> bool {
        !self.more
    }

    /// The columns that a report has: `numbers` and those of `keys` where `given` says nothing.
    /// It may add to these, or give all; `sorted` says that somebody asked for the keys, too.
    pub(super) fn settled(
        given: Option<&Self>,
        numbers: &[Column],
        keys: &SortKeys,
        sorted: bool,
    ) -> Vec<Column> {
        let keys = keys.keys().iter().map(|key| Column::Key(*key));
        let mut columns = Vec::new();
        let mut add = |column| {
            if !columns.contains(&column) {
                columns.push(column);
            }
        };
        let own = given.map_or(&[][..], |given| given.columns.as_slice());
        if given.is_none_or(|given| given.more) {
            numbers.iter().copied().for_each(&mut add);
            // As perf has it: what is added comes first, if it is a number.
            let own_numbers = own.iter().filter(|column| column.is_number());
            own_numbers.copied().for_each(&mut add);
            keys.for_each(&mut add);
            own.iter().copied().for_each(&mut add);
        } else {
            own.iter().copied().for_each(&mut add);
            keys.filter(|_| sorted).for_each(&mut add);
        }
        columns
    }
}

impl FromStr for Columns {
    type Err = ColumnError;

    fn from_str(text: &str) -> Result<Self, ColumnError> {
        let (more, words) = match text.strip_prefix('+') {
            Some(words) => (true, words),
            None => (false, text),
        };
        let mut columns = Vec::new();
        for word in words.split([',', ' ']).map(str::trim) {
            let column = Column::named(word).ok_or_else(|| ColumnError(word.to_owned()))?;
            if !columns.contains(&column) {
                columns.push(column);
            }
        }
        Ok(Self { columns, more })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The titles of a report with `--fields`, where somebody said `--sort` or not.
    fn check(fields: Option<&str>, sort: Option<&str>, expected: &[&str]) {
        let given: Option<Columns> = fields.map(|fields| fields.parse().unwrap());
        let usual: SortKeys = "comm,dso,sym".parse().unwrap();
        let sort: Option<SortKeys> = sort.map(|sort| sort.parse().unwrap());
        let numbers = [Column::Children, Column::Overhead, Column::Sample];
        let keys = usual.or(sort.as_ref());
        let columns = Columns::settled(given.as_ref(), &numbers, &keys, sort.is_some());
        let titles: Vec<&str> = columns.iter().map(|one| one.title(&columns)).collect();
        assert_eq!(titles, expected, "{fields:?} {sort:?}");
    }

    #[test]
    fn columns_are_those_of_perf() {
        let usual = ["Children", "Self", "Samples"];
        let with = |more: &[&'static str]| [&usual[..], more].concat();
        check(None, None, &with(&["Command", "Shared Object", "Symbol"]));
        check(None, Some("pid,cpu"), &with(&["Pid:Command", "VM/vCPU"]));
        let more = with(&["Command", "Shared Object", "Symbol", "VM/vCPU"]);
        check(None, Some("+cpu"), &more);
        check(Some("+vcpu"), None, &more);
        check(
            Some("overhead,sample,sym"),
            None,
            &["Overhead", "Samples", "Symbol"],
        );
        check(Some("sym,overhead"), None, &["Symbol", "Overhead"]);
        check(
            Some("overhead,comm"),
            Some("dso,comm"),
            &["Overhead", "Command", "Shared Object"],
        );
        let period = with(&["Period", "Command", "Shared Object", "Symbol"]);
        check(Some("+period,sample"), None, &period);
        check(
            Some("overhead_children,sym,period"),
            None,
            &["Children", "Symbol", "Period"],
        );
    }

    #[test]
    fn other_words_are_named() {
        let error = |text: &str| text.parse::<Columns>().unwrap_err().to_string();
        assert!(error("overhead,srcline").starts_with("'srcline' is no column; give overhead"));
        assert!(error("overhead_sys").starts_with("'overhead_sys' is no column"));
        assert!(error("").starts_with("'' is no column"));
        let error = |text: &str| text.parse::<SortKeys>().unwrap_err().to_string();
        assert!(error("sym,srcline").starts_with("'srcline' cannot be sorted by; give comm"));
        assert_eq!(
            error("overhead,sym"),
            "'overhead' is a column and no key: give it to --fields"
        );
        assert!(error("+").starts_with("'' cannot be sorted by"));
    }
}
