//! What is typed behind `umpire stat`.

use std::ffi::OsStr;
use std::time::Duration;

use clap::builder::TypedValueParser as _;
use clap::{ArgGroup, Args};

use super::events::DEFAULT;
use super::metrics;
use super::print::Form;
use super::sink::SinkOptions;
use super::spec::{EventList, EventListError};
use super::tally::Scale;
use crate::ToolError;
use crate::command::{Until, UntilOptions};
use crate::lifecycle::Starter;
use crate::targets::{Selection, Target};

/// How long a set of events has the counters unless somebody says otherwise.
const TURN: Duration = Duration::from_millis(10);

/// A time, or none; an option of this type is turned off by 0, as those of perf are. (A plain
/// `Option` would be clap's own, whose parser cannot say none.)
type MaybeTime = Option<Duration>;
/// A number, or none: as [`MaybeTime`].
type MaybeCount = Option<u32>;

/// What is counted, and how it is shown: the options of `umpire stat`, by perf stat's names
/// where perf has them.
#[derive(Clone, Debug, Default, Args)]
#[command(group = ArgGroup::new("ends").args(["time", "command", "timeout"]).multiple(true))]
pub struct StatOptions {
    /// The VM, and what of it.
    #[command(flatten)]
    pub selection: Selection,
    /// What to count: a,b,{c,d}; the events of a group {} are counted at the same time;
    /// repeatable [default: times, exits, cycles, instructions, branches]
    #[arg(short = 'e', long = "event", value_name = "EVENTS")]
    pub events: Vec<EventList>,
    /// Count what these numbers follow from: ipc, branch-miss-ratio, cache-miss-ratio, ghz,
    /// exits, cpus
    #[arg(short = 'M', long, value_name = "METRICS", value_delimiter = ',')]
    pub metrics: Vec<String>,
    /// Count references and misses of the cache besides
    #[arg(short, long)]
    pub detailed: bool,
    /// Count user rings alone, where an event does not say itself which (:u, :k)
    #[arg(long, conflicts_with = "all_kernel")]
    pub all_user: bool,
    /// Count ring 0 alone, where an event does not say itself which
    #[arg(long)]
    pub all_kernel: bool,
    /// Count nothing, whatever else is asked for, and print how much time passed
    #[arg(short = 'n', long, conflicts_with = "metric_only")]
    pub null: bool,
    /// How counts look.
    #[command(flatten)]
    pub look: FormOptions,
    /// Where they go.
    #[command(flatten)]
    pub sink: SinkOptions,
    /// Print what was counted every so many milliseconds, 10 to 3600000; 0: do not
    #[arg(short = 'I', long, visible_alias = "interval-print", value_name = "MS",
          default_value = "0", hide_default_value = true,
          value_parser = |text: &str| time_or_off(text, 3_600_000))]
    pub interval: MaybeTime,
    /// So many intervals; a command that goes on then is waited for; 0: any number
    #[arg(long, value_name = "N", requires = "interval",
          default_value = "0", hide_default_value = true,
          value_parser = clap::value_parser!(u32).map(|count| Some(count).filter(|it| *it > 0)))]
    pub interval_count: MaybeCount,
    /// After the intervals of -I, print what was counted altogether
    #[arg(long, overrides_with = "no_summary")]
    pub summary: bool,
    /// No such sum, which is the default
    #[arg(long, hide = true, overrides_with = "summary")]
    pub no_summary: bool,
    /// Measure so many times and print means; 0: again and again, and print each time; needs
    /// --for, --timeout or a command [default: 1]
    #[arg(short, long, value_name = "N", requires = "ends",
          value_parser = clap::value_parser!(u32).range(0..=10_000))]
    pub repeat: Option<u32>,
    /// Begin to count so many milliseconds after the command was started, or from now
    #[arg(short = 'D', long, value_name = "MS", allow_negative_numbers = true,
          value_parser = delay)]
    pub delay: Option<Duration>,
    /// Stop after so many milliseconds, 10 or more; a command that still runs is ended by
    /// SIGTERM; 0: do not
    #[arg(long, value_name = "MS",
          default_value = "0", hide_default_value = true,
          value_parser = |text: &str| time_or_off(text, 1_000_000_000))]
    pub timeout: MaybeTime,
    /// How long a set of events has the counters if there are more events than counters,
    /// in milliseconds, 1 to 1000 [default: 10]
    #[arg(long, value_name = "MS",
          value_parser = clap::value_parser!(u64).range(1..=1000).map(Duration::from_millis))]
    pub turn: Option<Duration>,
    /// How counts of a part of the time become counts of the whole
    #[arg(long, value_enum, default_value_t)]
    pub scale: Scale,
    /// Let a paused VM go on as soon as everything counts
    #[arg(long)]
    pub resume: bool,
    /// Say on standard error which counter each event has, and what it has counted with the
    /// times; twice: vCPU by vCPU
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// How long.
    #[command(flatten)]
    pub until: UntilOptions,
    /// Who lets a paused VM go on, where several tools of this process have to be ready.
    #[arg(skip)]
    pub starter: Starter,
}

/// How counts look.
#[derive(Clone, Debug, Default, Args)]
pub struct FormOptions {
    /// Print fields with this between them; \t is a tab
    #[arg(short = 'x', long, value_name = "SEP", conflicts_with = "json",
          value_parser = separator)]
    pub field_separator: Option<String>,
    /// With -x, one field more at the end of each line: how the count was obtained
    #[arg(long, requires = "field_separator")]
    pub provenance: bool,
    /// With -x, -I and --summary, no word "summary" in the place of the time
    #[arg(long)]
    pub no_csv_summary: bool,
    /// Print JSON: one object per line
    #[arg(short, long, visible_alias = "json-output")]
    pub json: bool,
    /// Print what follows from the counts, and not the counts
    #[arg(long)]
    pub metric_only: bool,
    /// Rows for each vCPU, or for each core
    #[arg(short = 'A', long, visible_aliases = ["per-core", "no-aggr"])]
    pub per_vcpu: bool,
    /// Print commas between thousands in the table [default: unless LC_ALL, LC_NUMERIC or LANG
    /// says C, or none is set]
    #[arg(short = 'B', long, overrides_with = "no_big_num")]
    pub big_num: bool,
    /// Print no commas between thousands
    #[arg(long, overrides_with = "big_num")]
    pub no_big_num: bool,
}

impl FormOptions {
    /// The form that this is.
    pub(super) fn form(&self) -> Form {
        let form = match &self.field_separator {
            _ if self.json => Form::Json,
            Some(separator) => Form::Csv {
                separator: separator.clone(),
                provenance: self.provenance,
            },
            None => Form::Table {
                grouped: self.big_num || !self.no_big_num && locale_groups(),
            },
        };
        if self.metric_only {
            Form::MetricOnly(Box::new(form))
        } else {
            form
        }
    }
}

impl StatOptions {
    /// How long a set has the counters.
    pub(super) fn turn(&self) -> Duration {
        self.turn.unwrap_or(TURN)
    }

    /// How long to count, `timeout` aside.
    ///
    /// # Errors
    /// Two options exclude each other. One that 0 turns off excludes none, as with perf.
    pub(super) fn until(&self) -> Result<Until, ToolError> {
        let until = self.until.until()?;
        let is_time = matches!(until, Until::Passed(_));
        let excluded = match (self.timeout, self.interval, self.repeat) {
            (Some(_), Some(_), _) => "--timeout cannot be used with -I",
            (Some(_), _, _) if is_time => "--timeout cannot be used with --for",
            (_, Some(_), Some(_)) => "-r cannot be used with -I",
            (Some(timeout), ..) if until == Until::Stopped => return Ok(Until::Passed(timeout)),
            _ => return Ok(until),
        };
        Err(ToolError::Input(excluded.to_owned()))
    }

    /// The targets, of a VM with so many vCPUs and cores.
    pub(super) fn targets(&self, vcpus: u32, cores: u32) -> Result<Vec<Target>, ToolError> {
        self.selection.targets(vcpus, cores)
    }

    /// What `-e`, `-M` and `-d` name; the usual events where nobody says, and none with `-n`.
    pub(super) fn list(&self) -> Result<EventList, ToolError> {
        let parse = |words: &str| {
            let list: Result<EventList, EventListError> = words.parse();
            list.map_err(|error| ToolError::Input(error.to_string()))
        };
        if self.null {
            return Ok(EventList::default());
        }
        let mut lists = self.events.clone();
        let mut of_metrics = EventList::default();
        for metric in &self.metrics {
            let events = metrics::events_of(metric).map_err(ToolError::Input)?;
            of_metrics.append(&parse(events)?);
        }
        if !self.metrics.is_empty() {
            lists.push(of_metrics.each_once(&lists));
        }
        if lists.is_empty() {
            lists.push(parse(DEFAULT)?);
        }
        if self.detailed {
            lists.push(parse("cache-references,cache-misses")?);
        }
        let mut all = EventList::default();
        lists.iter().for_each(|list| all.append(list));
        Ok(all)
    }
}

/// Whether the language of the user's terminal has a sign between thousands. perf asks the
/// same, and `LC_ALL=C` is how scripts get plain numbers from it.
fn locale_groups() -> bool {
    let words = ["LC_ALL", "LC_NUMERIC", "LANG"];
    let mut set = words.iter().filter_map(std::env::var_os);
    groups(set.find(|word| !word.is_empty()).as_deref())
}

fn groups(locale: Option<&OsStr>) -> bool {
    let language = locale.map(|locale| locale.to_string_lossy());
    let language = language.as_deref().and_then(|it| it.split('.').next());
    !matches!(language, None | Some("C" | "POSIX"))
}

fn separator(text: &str) -> Result<String, String> {
    match text {
        "" => Err("fields need something between them, such as a comma".to_owned()),
        "\\t" => Ok("\t".to_owned()),
        other => Ok(other.to_owned()),
    }
}

/// 0 for none, or milliseconds from 10 to `most`.
fn time_or_off(text: &str, most: u64) -> Result<MaybeTime, String> {
    let ms: Option<u64> = text.parse().ok();
    match ms.filter(|ms| *ms == 0 || (10..=most).contains(ms)) {
        Some(0) => Ok(None),
        Some(ms) => Ok(Some(Duration::from_millis(ms))),
        None => Err(format!("give milliseconds, 10..={most}, or 0 for none")),
    }
}

fn delay(text: &str) -> Result<Duration, String> {
    if text == "-1" {
        return Err(
            "-1 is for perf's --control, which lets counting begin later and is not there; \
                    give milliseconds"
                .to_owned(),
        );
    }
    let ms: Option<u64> = text.parse().ok().filter(|ms| *ms <= 1_000_000_000);
    let ms = ms.ok_or_else(|| "it is a number of milliseconds".to_owned())?;
    Ok(Duration::from_millis(ms))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Typed {
        #[command(flatten)]
        options: StatOptions,
    }

    fn typed(words: &str) -> Result<StatOptions, String> {
        let words = std::iter::once("stat").chain(words.split_whitespace());
        let typed = Typed::try_parse_from(words);
        typed
            .map(|typed| typed.options)
            .map_err(|error| error.to_string())
    }

    /// What a script for perf stat gives is what it means here, attached, apart or with `=`.
    #[test]
    fn options_are_those_of_perf() {
        type Check = fn(&StatOptions) -> bool;
        let separated = |by: &'static str| {
            move |it: &StatOptions| it.look.field_separator.as_deref() == Some(by)
        };
        let comma = separated(",");
        for words in ["-x,", "-x ,", "--field-separator ,", "--field-separator=,"] {
            assert!(comma(&typed(words).unwrap()), "{words}");
        }
        assert!(separated("\t")(&typed("-x\\t").unwrap()));
        let ms = Duration::from_millis;
        let checks: &[(&str, Check)] = &[
            ("-I100", |it| {
                it.interval == Some(Duration::from_millis(100))
            }),
            ("--interval-print 50", |it| {
                it.interval == Some(Duration::from_millis(50))
            }),
            ("-r2 sleep 1", |it| {
                it.repeat == Some(2) && it.until.command.len() == 2
            }),
            ("-r 0 true", |it| it.repeat == Some(0)),
            ("-r 3 --timeout 10", |it| it.repeat == Some(3)),
            ("-C0-1", |it| it.targets(4, 2).unwrap().len() == 2),
            ("-a --cpu=1", |it| {
                it.targets(4, 2).unwrap() == [Target::Vcpu(1)]
            }),
            ("-D10", |it| it.delay == Some(Duration::from_millis(10))),
            ("-n", |it| it.list().unwrap().groups.is_empty()),
            ("--null -e cycles", |it| {
                it.list().unwrap().groups.is_empty()
            }),
            ("-ecycles", |it| it.list().unwrap().groups == [["cycles"]]),
            ("-M ipc,ghz,cpus", |it| {
                let events = [&["instructions", "cycles"][..], &["vm-run-ns"]];
                it.list().unwrap().groups == events
            }),
            ("-M cpus,ghz,ipc,ipc", |it| {
                let events = [&["vm-run-ns"][..], &["instructions", "cycles"]];
                it.list().unwrap().groups == events
            }),
            ("-M ghz -e loads,cycles", |it| {
                it.list().unwrap().groups == [["loads"], ["cycles"], ["vm-run-ns"]]
            }),
            ("-e cycles,cycles -M ipc", |it| {
                let both = &["instructions", "cycles"][..];
                it.list().unwrap().groups == [&["cycles"][..], &["cycles"], both]
            }),
            ("--json-output", |it| it.look.form() == Form::Json),
            ("--no-aggr", |it| it.look.per_vcpu),
            ("-B", |it| it.look.form() == Form::Table { grouped: true }),
            ("-B --no-big-num", |it| {
                it.look.form() == Form::Table { grouped: false }
            }),
            ("--no-big-num --big-num", |it| {
                it.look.form() == Form::Table { grouped: true }
            }),
            ("-I 10 --summary --no-summary", |it| !it.summary),
            ("-I 10 --interval-count 3", |it| {
                it.interval_count == Some(3)
            }),
            ("-vv", |it| it.verbose == 2),
            ("-I 10 --interval-count 0", |it| it.interval_count.is_none()),
            ("-n", |it| it.interval_count.is_none()),
            ("-I 0", |it| it.interval.is_none()),
            ("--timeout 0", |it| it.timeout.is_none()),
            ("-x, --no-csv-summary", |it| it.look.no_csv_summary),
            ("--summary", |it| it.summary && it.interval.is_none()),
            ("-n", |it| it.interval.is_none() && it.timeout.is_none()),
            ("--log-fd 1", |it| it.sink.log_fd == Some(1)),
        ];
        for (words, check) in checks {
            let options = typed(words).unwrap_or_else(|error| panic!("{words}: {error}"));
            assert!(check(&options), "{words}: {options:?}");
        }
        let second = Until::Passed(Duration::from_secs(1));
        let command = Until::CommandEnds(vec!["true".into()]);
        for (words, until) in [
            ("--timeout 100", Until::Passed(ms(100))),
            ("--timeout 100 -I 0", Until::Passed(ms(100))),
            ("--timeout 0 -I 100", Until::Stopped),
            ("--timeout 0 --for 1s", second),
            ("-r 2 -I 0 true", command),
        ] {
            assert_eq!(typed(words).unwrap().until().unwrap(), until, "{words}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (words, reason) in [
            ("-x=", "fields need something"),
            ("-D -1", "perf's --control"),
            ("-D -2", "a number of milliseconds"),
            ("--timeout 9", "10..="),
            ("--timeout 100 -I 100", "cannot be used with -I"),
            ("--timeout 100 --for 1s", "cannot be used with --for"),
            ("--interval-count 2", "--interval <MS>"),
            ("--provenance", "--field-separator"),
            ("-r 2", "--timeout <MS>"),
            ("-r 2 -I 100 true", "cannot be used with -I"),
            ("--all-user --all-kernel", "cannot be used with"),
            ("-o f --log-fd 1", "cannot be used with"),
            ("--log-fd -1", "unexpected argument"),
            ("-C 0 --core 0", "cannot be used with"),
            ("-I 5", "10..=3600000"),
            ("-x , -j", "cannot be used with"),
        ] {
            let words = words.replace("-x=", "--field-separator=");
            let until = |it: StatOptions| it.until().map_err(|error| error.to_string());
            let error = typed(&words).and_then(until).expect_err(&words);
            assert!(error.contains(reason), "{words}: {error}");
        }
    }

    #[test]
    fn thousands_are_apart_in_languages_that_do_so() {
        for (locale, expected) in [
            (None, false),
            (Some("C"), false),
            (Some("C.UTF-8"), false),
            (Some("POSIX"), false),
            (Some("en_US.UTF-8"), true),
            (Some("de_DE"), true),
        ] {
            assert_eq!(groups(locale.map(OsStr::new)), expected, "{locale:?}");
        }
    }
}
