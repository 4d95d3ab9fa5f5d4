//! A run beside the one before: the gate of a job.

use std::fmt;
use std::io::{self, Write};
use std::str::FromStr;

use crate::diff::{self, FunctionChange};
use crate::event::{Chosen, Event, Side};
use crate::inputs::{InputChange, Inputs};
use crate::number::{grouped, percent, signed};
use crate::record::Record;
use crate::regions::{self, RegionPair, RegionSum};

/// Inputs that are told by name.
const MOST_INPUTS: usize = 20;
/// Regions that are shown, those that are over the threshold first.
const MOST_REGIONS: usize = 20;
/// Counts that a line on a failure has.
const MOST_OVER: usize = 5;

/// How much more a count may be, in percent of the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threshold {
    /// In [`Threshold::PARTS`] of a percent: nothing is rounded.
    parts: u64,
}

/// A threshold that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no threshold: give a percentage of at most 6 digits behind the point, as 0.5%")]
pub struct ThresholdError(String);

impl Threshold {
    const DIGITS: usize = 6;
    const PARTS: u64 = 1_000_000;

    /// Nothing more at all.
    pub const NONE: Threshold = Threshold { parts: 0 };

    /// Whether a count is more than this allows.
    #[must_use]
    pub fn is_exceeded(self, before: u64, now: u64) -> bool {
        let more = u128::from(now.saturating_sub(before));
        // more / before > parts / PARTS / 100; what was 0 may not become anything.
        more * 100 * u128::from(Self::PARTS) > u128::from(before) * u128::from(self.parts)
    }
}

impl FromStr for Threshold {
    type Err = ThresholdError;

    fn from_str(text: &str) -> Result<Self, ThresholdError> {
        let bad = || ThresholdError(text.to_owned());
        let number = text.strip_suffix('%').unwrap_or(text).trim_end();
        let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
        let plain = |digits: &str| {
            let is_plain = digits.bytes().all(|digit| digit.is_ascii_digit());
            is_plain && !digits.is_empty()
        };
        if !plain(whole) || !plain(part) || part.len() > Self::DIGITS {
            return Err(bad());
        }
        let part: u64 = format!("{part:0<width$}", width = Self::DIGITS)
            .parse()
            .map_err(|_| bad())?;
        let whole: u64 = whole.parse().map_err(|_| bad())?;
        let parts = whole
            .checked_mul(Self::PARTS)
            .and_then(|it| it.checked_add(part));
        Ok(Threshold {
            parts: parts.ok_or_else(bad)?,
        })
    }
}

impl fmt::Display for Threshold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, part) = (self.parts / Self::PARTS, self.parts % Self::PARTS);
        let part = format!("{part:06}");
        match part.trim_end_matches('0') {
            "" => write!(f, "{whole} %"),
            part => write!(f, "{whole}.{part} %"),
        }
    }
}

/// What is compared, and what may not grow.
#[derive(Clone, Debug)]
pub struct Gate<'a> {
    /// The events: an event without a side is compared on both, each apart.
    pub events: &'a [Chosen],
    /// None: nothing is judged, both runs are only shown.
    pub threshold: Option<Threshold>,
    /// The kernel's counts may not grow either.
    pub kernel: bool,
    /// Regions alone may not grow; the whole program may.
    pub regions_alone: bool,
}

impl Gate<'_> {
    /// What is compared where nobody asked for events.
    pub const DEFAULT: [Chosen; 1] = [Chosen {
        event: Event::Instructions,
        side: None,
    }];
}

/// What becomes of a count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is not more than the threshold allows.
    Within,
    /// It is.
    Over,
    /// It may be whatever it is.
    Shown,
}

impl Verdict {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Verdict::Within => "within",
            Verdict::Over => "over",
            Verdict::Shown => "shown",
        }
    }
}

/// A count beside the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountChange {
    pub chosen: Chosen,
    pub before: u64,
    pub now: u64,
    pub verdict: Verdict,
}

/// A region beside the one of its name before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionChange<'a> {
    /// What the region is, and what was counted of it in both runs.
    pub pair: RegionPair<'a>,
    /// Its counts. They are judged where both runs have it; one that has none has 0 here.
    pub counts: Vec<CountChange>,
}

impl RegionChange<'_> {
    /// Both runs have it.
    #[must_use]
    pub fn is_in_both(&self) -> bool {
        self.pair.sums.iter().all(Option::is_some)
    }

    /// Its program and its name, in one line.
    #[must_use]
    pub fn label(&self) -> String {
        let RegionPair { program, name, .. } = &self.pair;
        umpire_events::one_line(format!("{program} {name}").trim_start())
    }

    /// What there is to say beside its counts.
    #[must_use]
    pub fn note(&self) -> String {
        match self.pair.sums.map(|sum| sum.map(|sum| sum.times)) {
            [None, _] => "only now".to_owned(),
            [_, None] => "only before".to_owned(),
            [Some(before), Some(now)] if before != now => {
                format!("×{before} before, ×{now} now")
            }
            _ => String::new(),
        }
    }

    /// Whether there is anything to say of it.
    #[must_use]
    pub fn has_changed(&self) -> bool {
        self.counts.iter().any(|one| one.before != one.now) || !self.note().is_empty()
    }

    fn is_over(&self) -> bool {
        self.counts.iter().any(|one| one.verdict == Verdict::Over)
    }
}

/// Two runs side by side.
#[derive(Clone, Debug)]
pub struct Comparison<'a> {
    /// Inputs that are not the same.
    pub inputs: Vec<InputChange<'a>>,
    /// The counts.
    pub counts: Vec<CountChange>,
    /// Those of regions, in the order in which programs ended them.
    pub regions: Vec<RegionChange<'a>>,
    /// Functions whose counts are not the same, if both runs have them.
    pub functions: Vec<FunctionChange<'a>>,
    /// How the program ended before and now, if not in the same way.
    pub outcomes: Option<[u8; 2]>,
    threshold: Option<Threshold>,
}

impl<'a> Comparison<'a> {
    /// Compares two runs.
    #[must_use]
    pub fn of(before: &'a Record, now: &'a Record, gate: &Gate<'_>) -> Self {
        let counts = |of: &dyn Fn(Chosen) -> [u64; 2], judged: bool| {
            let counts = apart(gate.events).into_iter().map(|chosen| {
                let [before, now] = of(chosen);
                let judged = judged && (chosen.side != Some(Side::Kernel) || gate.kernel);
                let verdict = match gate.threshold.filter(|_| judged) {
                    None => Verdict::Shown,
                    Some(threshold) if threshold.is_exceeded(before, now) => Verdict::Over,
                    Some(_) => Verdict::Within,
                };
                CountChange {
                    chosen,
                    before,
                    now,
                    verdict,
                }
            });
            counts.collect::<Vec<_>>()
        };
        let whole = |chosen: Chosen| [before, now].map(|record| chosen.of(&record.counts));
        let pairs = regions::pairs(&before.counts, &now.counts).into_iter();
        let regions = pairs.map(|pair| {
            let of = |chosen: Chosen| {
                pair.sums.map(|sum| {
                    let RegionSum { user, kernel, .. } = sum.unwrap_or_default();
                    chosen.among(user, kernel)
                })
            };
            let is_in_both = pair.sums.iter().all(Option::is_some);
            let counts = counts(&of, is_in_both && !pair.is_rest);
            RegionChange { pair, counts }
        });
        let outcomes = [before, now].map(|record| record.outcome.status());
        Comparison {
            inputs: input_changes(&before.inputs, &now.inputs),
            counts: counts(&whole, !gate.regions_alone),
            regions: regions.collect(),
            functions: diff::functions(before, now).unwrap_or_default(),
            outcomes: (outcomes[0] != outcomes[1]).then_some(outcomes),
            threshold: gate.threshold,
        }
    }

    /// Whether a count is over the threshold.
    #[must_use]
    pub fn fails(&self) -> bool {
        self.all().any(|(_, one)| one.verdict == Verdict::Over)
    }

    /// Whether a count was held against the threshold.
    #[must_use]
    pub fn judges(&self) -> bool {
        self.all().any(|(_, one)| one.verdict != Verdict::Shown)
    }

    /// Whether counts differ though no input does.
    #[must_use]
    pub fn is_unexplained(&self) -> bool {
        self.inputs.is_empty() && self.all().any(|(_, one)| one.before != one.now)
    }

    /// The regions of which there is something to say, those over the threshold first.
    #[must_use]
    pub fn changed_regions(&self) -> Vec<&RegionChange<'a>> {
        let changed = self.regions.iter().filter(|one| one.has_changed());
        let mut changed: Vec<_> = changed.collect();
        changed.sort_by_key(|one| !one.is_over());
        changed
    }

    /// Each count, with the region that it is of.
    fn all(&self) -> impl Iterator<Item = (Option<&RegionChange<'a>>, &CountChange)> {
        let regions = self.regions.iter();
        let regions =
            regions.flat_map(|region| region.counts.iter().map(move |one| (Some(region), one)));
        self.counts.iter().map(|one| (None, one)).chain(regions)
    }

    /// Writes it for people. `before` names the other run, a file say.
    ///
    /// # Errors
    /// `out` cannot be written to.
    pub fn write(&self, before: &str, out: &mut dyn Write) -> io::Result<()> {
        let before = umpire_events::one_line(before);
        self.write_inputs(&before, out)?;
        if let Some([was, is]) = self.outcomes {
            writeln!(out, " The program's status was {was}, and is {is} now.\n")?;
        }
        match self.threshold {
            Some(threshold) => {
                writeln!(out, " Against {before} (at most {threshold} more):\n")?;
            }
            None => writeln!(out, " Against {before}:\n")?,
        }
        writeln!(out, "{:>18} {:>18} {:>12}", "before", "now", "change")?;
        for one in &self.counts {
            self.write_count(one, None, out)?;
        }
        self.write_regions(out)?;
        if !self.functions.is_empty() {
            writeln!(out)?;
            diff::write(&self.functions, out)?;
        }
        writeln!(out)
    }

    /// A row of a region has its name behind the event, and what else there is to say.
    fn write_count(
        &self,
        one: &CountChange,
        region: Option<&RegionChange<'_>>,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let sums = region.map_or([true; 2], |region| {
            region.pair.sums.map(|sum| sum.is_some())
        });
        // What a run does not have is no 0.
        let shown = |count, is_there: bool| {
            if is_there {
                grouped(count)
            } else {
                "-".to_owned()
            }
        };
        let (was, is) = (shown(one.before, sums[0]), shown(one.now, sums[1]));
        let change = match sums {
            [true, true] => percent(one.before, one.now),
            _ => String::new(),
        };
        let name = region.map_or_else(String::new, |region| format!("  {}", region.label()));
        let mut notes = Vec::new();
        match one.verdict {
            Verdict::Shown if self.threshold.is_some() => notes.push("not in the gate".to_owned()),
            Verdict::Within | Verdict::Shown => {}
            Verdict::Over => notes.push("OVER".to_owned()),
        }
        notes.extend(
            region
                .map(RegionChange::note)
                .filter(|note| !note.is_empty()),
        );
        let notes = match &notes[..] {
            [] => String::new(),
            [one] if one == "OVER" => "  OVER".to_owned(),
            notes => format!("  ({})", notes.join("; ")),
        };
        writeln!(
            out,
            "{was:>18} {is:>18} {change:>12}  {}{name}{notes}",
            one.chosen
        )
    }

    fn write_regions(&self, out: &mut dyn Write) -> io::Result<()> {
        if self.regions.is_empty() {
            return Ok(());
        }
        let changed = self.changed_regions();
        let same = self.regions.len() - changed.len();
        writeln!(
            out,
            "\n Regions ({same} of {} as before):\n",
            self.regions.len()
        )?;
        for region in changed.iter().take(MOST_REGIONS) {
            for one in &region.counts {
                self.write_count(one, Some(region), out)?;
            }
        }
        match changed.len().saturating_sub(MOST_REGIONS) {
            0 => Ok(()),
            more => writeln!(out, "{:>38} ({more} more)", ""),
        }
    }

    fn write_inputs(&self, before: &str, out: &mut dyn Write) -> io::Result<()> {
        if self.is_unexplained() {
            return writeln!(
                out,
                " No input differs from {before}, yet counts do, which must not be: please report \
                 it.\n"
            );
        }
        if self.inputs.is_empty() {
            return writeln!(out, " Every input is that of {before}.\n");
        }
        writeln!(out, " Inputs that differ from {before}:")?;
        for change in self.inputs.iter().take(MOST_INPUTS) {
            writeln!(out, "   {}", change.line())?;
        }
        match self.inputs.len().saturating_sub(MOST_INPUTS) {
            0 => {}
            more => writeln!(out, "   and {more} more")?,
        }
        writeln!(out)
    }

    /// One line on what is over the threshold.
    #[must_use]
    pub fn failure(&self) -> String {
        self.failure_with(str::to_owned)
    }

    /// The same, with the names of regions as `write` has them: programs have chosen these.
    pub(crate) fn failure_with(&self, write: impl Fn(&str) -> String) -> String {
        let over = self.all().filter(|(_, one)| one.verdict == Verdict::Over);
        let texts = over.map(|(region, one)| {
            let (more, part) = (signed(one.before, one.now), percent(one.before, one.now));
            let of = region.map_or_else(String::new, |it| format!(" of {}", write(&it.label())));
            format!("{}{of} {more} ({part})", one.chosen)
        });
        let mut texts: Vec<String> = texts.collect();
        if let Some(more @ 1..) = texts.len().checked_sub(MOST_OVER) {
            texts.truncate(MOST_OVER);
            texts.push(format!("and {more} more"));
        }
        let threshold = self.threshold.unwrap_or(Threshold::NONE);
        format!("more than {threshold} more: {}", texts.join(", "))
    }
}

/// Inputs that differ: what was given and read first, since names that were looked for change with
/// them, and are many.
fn input_changes<'a>(before: &'a Inputs, now: &'a Inputs) -> Vec<InputChange<'a>> {
    let mut changes = before.changes(now);
    changes.sort_by_key(|change| {
        change.name.starts_with("name ") || change.name.starts_with("names ")
    });
    changes
}

/// Each event on one side.
fn apart(events: &[Chosen]) -> Vec<Chosen> {
    let mut found = Vec::new();
    for chosen in events {
        let sides = match chosen.side {
            Some(side) => vec![side],
            None => vec![Side::User, Side::Kernel],
        };
        for side in sides {
            let one = Chosen::new(chosen.event, side);
            if !found.contains(&one) {
                found.push(one);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::record::tests::{function, record, region, tally};

    fn threshold(text: &str) -> Threshold {
        text.parse().expect("a threshold")
    }

    #[test]
    fn the_rest_is_shown() {
        let (mut before, mut now) = (record(), record());
        before.counts.regions = vec![region("", "", 1000)];
        now.counts.regions = vec![region("", "", 2000)];
        for record in [&mut before, &mut now] {
            record.counts.regions[0].is_rest = true;
        }
        let gate = Gate {
            events: &Gate::DEFAULT,
            threshold: Some(Threshold::NONE),
            kernel: true,
            regions_alone: true,
        };
        let comparison = Comparison::of(&before, &now, &gate);
        assert!(!comparison.fails() && !comparison.judges());
        let mut text = Vec::new();
        comparison.write("base", &mut text).expect("room");
        let text = String::from_utf8_lossy(&text);
        let row = "instructions:u  (the rest)  (not in the gate)\n";
        assert!(text.contains(row), "{text}");
    }

    #[test]
    fn thresholds() {
        fn check(text: &str, expected: Option<&str>) {
            let found = text.parse::<Threshold>().ok().map(|it| it.to_string());
            assert_eq!(found.as_deref(), expected, "{text}");
        }
        check("0.5%", Some("0.5 %"));
        check("0.5", Some("0.5 %"));
        check("12 %", Some("12 %"));
        check("0", Some("0 %"));
        check("0.000001%", Some("0.000001 %"));
        check("250%", Some("250 %"));
        for bad in [
            "",
            "%",
            "-1",
            "+1",
            "1e3",
            ".5",
            "5.",
            "0.0000001",
            "half",
            "1,5",
            "99999999999999999999",
        ] {
            check(bad, None);
        }
    }

    #[test]
    fn what_is_over() {
        fn check(text: &str, before: u64, now: u64, expected: bool) {
            let found = threshold(text).is_exceeded(before, now);
            assert_eq!(found, expected, "{text}: {before} to {now}");
        }
        check("0.5", 1_000, 1_005, false);
        check("0.5", 1_000, 1_006, true);
        check("0", 1_000, 1_000, false);
        check("0", 1_000_000, 1_000_001, true);
        check("0", 5, 4, false);
        // From nothing to something is more than any percentage.
        check("1000000", 0, 1, true);
        check("1000000", 0, 0, false);
        check("100", u64::MAX / 2, u64::MAX, true);
        check("101", u64::MAX / 2, u64::MAX, false);
    }

    fn written(comparison: &Comparison<'_>) -> String {
        let mut out = Vec::new();
        comparison.write("base.json", &mut out).expect("room");
        String::from_utf8(out).expect("text")
    }

    fn gate(text: &str, kernel: bool) -> Gate<'static> {
        Gate {
            events: &Gate::DEFAULT,
            threshold: Some(threshold(text)),
            kernel,
            regions_alone: false,
        }
    }

    #[test]
    fn growth_is_named_with_inputs_and_functions() {
        let (before, mut now) = (record(), record());
        now.inputs.add("program", crate::inputs::digest(b"other"));
        now.counts.programs[1].threads[0].user = tally(1_012_000);
        now.counts.programs[1].threads[0].kernel = tally(40_000);
        now.counts.functions = Some(vec![
            function("deflate", 912_000, 992_000),
            function("longest_match", 80_000, 80_000),
        ]);
        let comparison = Comparison::of(&before, &now, &gate("0.5%", false));
        assert!(comparison.fails());
        assert_eq!(
            comparison.failure(),
            "more than 0.5 % more: instructions:u +12,000 (+1.000 %)"
        );
        let [was, is] =
            [&before, &now].map(|it| crate::inputs::short(it.inputs.get("program").expect("one")));
        let expected = format!(
            " Inputs that differ from base.json:
   program: {was} → {is}

 Against base.json (at most 0.5 % more):

            before                now       change
         1,200,000          1,212,000     +1.000 %  instructions:u  OVER
           124,567            130,000     +4.362 %  instructions:k  (not in the gate)

               own          inclusive  function (change; now)
           +12,000            +12,000  deflate (gzip): own 912,000, inclusive 992,000

"
        );
        assert_eq!(written(&comparison), expected);
        // By request the kernel's counts are in the gate.
        let comparison = Comparison::of(&before, &now, &gate("2%", true));
        assert_eq!(
            comparison.failure(),
            "more than 2 % more: instructions:k +5,433 (+4.362 %)"
        );
        let comparison = Comparison::of(&before, &now, &gate("2%", false));
        assert!(!comparison.fails());
    }

    #[test]
    fn regions_are_judged_by_name_and_those_of_one_run_are_told() {
        let (mut before, mut now) = (record(), record());
        let gzip = |name: &str, user| region("/usr/bin/gzip", name, user);
        before.counts.regions = vec![
            gzip("parse", 1_000),
            gzip("", 2_000),
            gzip("old", 5),
            gzip("same", 7),
        ];
        now.inputs.add("program", crate::inputs::digest(b"other"));
        now.counts.regions = vec![
            gzip("parse", 500),
            gzip("new", 9),
            gzip("parse", 600),
            gzip("same", 7),
            gzip("", 2_000),
        ];
        let comparison = Comparison::of(&before, &now, &gate("5%", true));
        assert!(comparison.fails() && comparison.judges());
        assert_eq!(
            comparison.failure(),
            "more than 5 % more: instructions:u of gzip parse +100 (+10.000 %), \
             instructions:k of gzip parse +10 (+10.000 %)"
        );
        let text = written(&comparison);
        let (_, regions) = text.split_once("\n Regions").expect("regions");
        assert_eq!(
            regions,
            " (2 of 5 as before):

             1,000              1,100    +10.000 %  instructions:u  gzip parse  (OVER; ×1 before, ×2 now)
               100                110    +10.000 %  instructions:k  gzip parse  (OVER; ×1 before, ×2 now)
                 -                  9               instructions:u  gzip new  (not in the gate; only now)
                 -                  0               instructions:k  gzip new  (not in the gate; only now)
                 5                  -               instructions:u  gzip old  (not in the gate; only before)
                 0                  -               instructions:k  gzip old  (not in the gate; only before)

"
        );
    }

    #[test]
    fn regions_alone_may_be_in_the_gate() {
        let (mut before, mut now) = (record(), record());
        now.counts.programs[1].threads[0].user = tally(1_100_000);
        let alone = Gate {
            regions_alone: true,
            ..gate("0", false)
        };
        // There is none that could be.
        assert!(!Comparison::of(&before, &now, &alone).judges());
        before.counts.regions = vec![region("a", "x", 10)];
        now.counts.regions = vec![region("a", "y", 10)];
        assert!(!Comparison::of(&before, &now, &alone).judges());
        now.counts.regions.push(region("a", "x", 10));
        let comparison = Comparison::of(&before, &now, &alone);
        assert!(comparison.judges() && !comparison.fails());
        now.counts.regions[1] = region("a", "x", 11);
        let comparison = Comparison::of(&before, &now, &alone);
        assert_eq!(
            comparison.failure(),
            "more than 0 % more: instructions:u of a x +1 (+10.000 %)"
        );
        // Without any other change that is no more explained than a change of the whole.
        now.counts.programs = before.counts.programs.clone();
        assert!(Comparison::of(&before, &now, &alone).is_unexplained());
    }

    #[test]
    fn names_that_were_looked_for_come_last_and_not_all() {
        let (before, mut now) = (record(), record());
        now.inputs.add("program", crate::inputs::digest(b"other"));
        for number in 0..30 {
            now.inputs.add(format!("name /usr/lib/{number}"), "nothing");
        }
        now.inputs.add("names in /usr/lib", "x");
        let text = written(&Comparison::of(&before, &now, &gate("0", true)));
        let told: Vec<&str> = text
            .lines()
            .skip(1)
            .take_while(|line| !line.is_empty())
            .collect();
        assert_eq!(told.len(), MOST_INPUTS + 1, "{text}");
        assert!(told[0].starts_with("   program: "), "{text}");
        assert_eq!(told[1], "   name /usr/lib/0: only now");
        assert_eq!(told[MOST_INPUTS], "   and 12 more");
    }

    #[test]
    fn equal_inputs_with_other_counts_are_told() {
        let (before, mut now) = (record(), record());
        let same = Comparison::of(&before, &now, &gate("0", true));
        assert!(!same.fails() && !same.is_unexplained());
        assert!(written(&same).starts_with(" Every input is that of base.json.\n"));
        now.counts.programs[0].threads[0].user = tally(200_001);
        now.outcome = crate::Outcome::Signalled(11);
        let comparison = Comparison::of(&before, &now, &gate("0", true));
        assert!(comparison.is_unexplained() && comparison.fails());
        let text = written(&comparison);
        assert!(text.contains("yet counts do"), "{text}");
        assert!(text.contains("status was 0, and is 139 now"), "{text}");
    }

    #[test]
    fn without_a_threshold_nothing_is_judged() {
        let (before, mut now) = (record(), record());
        now.counts.programs[0].threads[0].user = tally(900_000);
        let gate = Gate {
            events: &Gate::DEFAULT,
            threshold: None,
            kernel: true,
            regions_alone: false,
        };
        let comparison = Comparison::of(&before, &now, &gate);
        assert!(!comparison.fails());
        let text = written(&comparison);
        let expected = " Against base.json:

            before                now       change
         1,200,000          1,900,000    +58.333 %  instructions:u
           124,567            124,567          0 %  instructions:k
";
        assert!(text.contains(expected), "{text}");
    }

    proptest! {
        /// As in exact fractions, by another way of calculating.
        #[test]
        fn a_threshold_is_exact(before in 0..100_000u64, now in 0..200_000u64, parts in 0..3_000_000u64) {
            let text = format!("{}.{:06}", parts / 1_000_000, parts % 1_000_000);
            let most = u128::from(before) * (100_000_000 + u128::from(parts));
            let over = u128::from(now) * 100_000_000 > most;
            prop_assert_eq!(threshold(&text).is_exceeded(before, now), over);
        }

        /// A larger threshold never finds more, and a larger count is never found less.
        #[test]
        fn a_threshold_is_monotonous(before: u64, now: u64, more: u64, parts in 0..u64::MAX / 2) {
            let (tight, loose) = (Threshold { parts }, Threshold { parts: parts * 2 });
            prop_assert!(!loose.is_exceeded(before, now) || tight.is_exceeded(before, now));
            let larger = now.saturating_add(more);
            prop_assert!(!tight.is_exceeded(before, now) || tight.is_exceeded(before, larger));
            prop_assert!(!tight.is_exceeded(now, now));
        }

        /// What is printed of a threshold is that threshold.
        #[test]
        fn thresholds_are_read_as_printed(parts: u64) {
            let one = Threshold { parts };
            prop_assert_eq!(one.to_string().parse(), Ok(one));
        }

        /// The gate fails exactly where a gated count is over the threshold.
        #[test]
        fn the_gate_is_its_counts(user in 0..5_000u64, kernel in 0..5_000u64, parts in 0..2_000_000u64, gated: bool) {
            let (mut before, mut now) = (record(), record());
            before.counts.programs.truncate(1);
            now.counts.programs.truncate(1);
            let thread = &mut now.counts.programs[0].threads[0];
            (thread.user, thread.kernel) = (tally(197_500 + user), tally(87_500 + kernel));
            let threshold = Threshold { parts };
            let gate = Gate { events: &Gate::DEFAULT, threshold: Some(threshold), kernel: gated, regions_alone: false };
            let comparison = Comparison::of(&before, &now, &gate);
            let over = threshold.is_exceeded(200_000, 197_500 + user)
                || gated && threshold.is_exceeded(90_000, 87_500 + kernel);
            prop_assert_eq!(comparison.fails(), over);
        }
    }
}
