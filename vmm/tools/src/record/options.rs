//! What `umpire record` can be asked for, and the words that ask for it.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::Args;

use crate::ToolError;
use crate::command::UntilOptions;
use crate::profile::Sampling;
use crate::stat::spec::EventList;
use crate::targets::Selection;

/// What is sampled, and where samples go.
#[derive(Clone, Debug, Args)]
pub struct RecordOptions {
    /// The VM, and what of it.
    #[command(flatten)]
    pub who: Selection,
    /// Take in only samples of these processes of the guest, as its kernel numbers them; also
    /// of threads that they start later
    #[arg(short, long = "pid", value_name = "PID[,PID]", value_delimiter = ',',
          value_parser = clap::value_parser!(u32).range(1..))]
    pub processes: Vec<u32>,
    /// Take in only samples of these threads of the guest; with -p, of both
    #[arg(short, long = "tid", value_name = "TID[,TID]", value_delimiter = ',',
          value_parser = clap::value_parser!(u32).range(1..))]
    pub threads: Vec<u32>,
    /// What to sample; several events are sampled at once [default: cycles, or
    /// instructions where the VM counts no cycles]
    #[arg(short, long, value_name = "EVENTS")]
    pub event: Vec<EventList>,
    /// Take a sample every so many events
    #[arg(short = 'c', long, value_name = "N", conflicts_with = "freq",
          value_parser = clap::value_parser!(u64).range(1..=1 << 47))]
    pub count: Option<u64>,
    /// Take so many samples a second of a vCPU's time, by a period that adapts; max is 100000
    /// [default: 1000]
    #[arg(short = 'F', long, value_name = "HZ", value_parser = frequency)]
    pub freq: Option<u64>,
    /// Record the callers of each sample, too: the kernel's by its own unwind tables (ORC), a
    /// program's by its frame pointers
    #[arg(short = 'g')]
    pub callers: bool,
    /// The same with a program's callers by fp, its frame pointers, or by dwarf, the unwind
    /// tables of its files, with 8192 bytes of its stack; dwarf,4096 keeps 4096 (8 to 65528)
    #[arg(long, value_name = "HOW")]
    pub call_graph: Option<CallGraphMode>,
    /// Where --call-graph dwarf finds the guest's programs: a folder of this host that is the
    /// guest's root, or has copies of its programs and libraries; PATH=DIR is a container's, as
    /// in umpire report
    #[arg(long, value_name = "DIR")]
    pub symfs: Vec<PathBuf>,
    /// Vary each period at random by so many of its low bits, which breaks the step with
    /// loops
    #[arg(long, value_name = "BITS", default_value_t = 0,
          value_parser = clap::value_parser!(u32).range(0..=32))]
    pub random: u32,
    /// Where samples go, a file for this user alone; what is there is kept as FILE.old. - is
    /// standard output, for umpire report -i -
    #[arg(short, long, value_name = "FILE", default_value = RecordOptions::OUTPUT)]
    pub output: PathBuf,
    /// Begin to sample so many milliseconds after everything is ready, and the command was
    /// started; --for counts from then on
    #[arg(short = 'D', long, value_name = "MS", default_value = "0",
          allow_hyphen_values = true, value_parser = delay)]
    pub delay: Duration,
    /// End when the file has so many bytes: a number, with K, M or G kibibytes and so on
    #[arg(long, value_name = "N[BKMG]", value_parser = size)]
    pub max_size: Option<u64>,
    /// Begin another file at each SIGUSR2, or whenever a file has so many bytes (100M: B, K, M,
    /// G) or is so old (30s: s, m, h, d); each is whole, and is called FILE.TIME when it is
    /// done, by its time of day
    #[arg(long, value_name = "signal|SIZE|TIME", num_args = 0..=1, require_equals = true,
          default_missing_value = "signal")]
    pub switch_output: Option<SwitchOutput>,
    /// Keep the newest so many of these files, and remove older ones [default: all]
    #[arg(long, value_name = "N", requires = "switch_output",
          value_parser = clap::value_parser!(u32).range(1..))]
    pub switch_max_files: Option<u32>,
    /// Memory for the samples of a vCPU or core that were not fetched yet, in KiB, 64 to
    /// 65536
    #[arg(long, value_name = "KIB", default_value_t = RecordOptions::BUFFER_KIB,
          value_parser = clap::value_parser!(u64).range(64..=65_536))]
    pub buffer: u64,
    /// Let a paused VM go on as soon as everything counts
    #[arg(long)]
    pub resume: bool,
    /// Say nothing but what went wrong
    #[arg(short, long, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Say what is sampled, on which counters
    #[arg(short, long)]
    pub verbose: bool,
    /// How long.
    #[command(flatten)]
    pub until: UntilOptions,
}

impl Default for RecordOptions {
    fn default() -> Self {
        Self {
            who: Selection::default(),
            processes: Vec::new(),
            threads: Vec::new(),
            event: Vec::new(),
            count: None,
            freq: None,
            callers: false,
            call_graph: None,
            symfs: Vec::new(),
            random: 0,
            output: Self::OUTPUT.into(),
            delay: Duration::ZERO,
            max_size: None,
            switch_output: None,
            switch_max_files: None,
            buffer: Self::BUFFER_KIB,
            resume: false,
            quiet: false,
            verbose: false,
            until: UntilOptions::default(),
        }
    }
}

/// Most samples a second of a vCPU's time.
const MOST_HZ: u64 = 100_000;
/// The longest delay in milliseconds, as the longest time.
const LONGEST_DELAY: u64 = 1_000_000_000;

impl RecordOptions {
    /// Where samples go if nobody says.
    const OUTPUT: &str = "umpire.data";
    /// Samples a second where nobody says.
    const DEFAULT_HZ: u64 = 1000;
    /// Memory for samples if nobody says.
    const BUFFER_KIB: u64 = 1024;

    /// How far apart samples are.
    pub(super) fn sampling(&self) -> Sampling {
        match self.count {
            Some(period) => Sampling::Period(period),
            None => Sampling::Frequency(self.freq.unwrap_or(Self::DEFAULT_HZ)),
        }
    }

    /// How callers of programs are found by their files, if they are.
    ///
    /// # Errors
    /// One of two options is missing.
    pub(super) fn dwarf(&self) -> Result<Option<Dwarf>, ToolError> {
        match (self.call_graph, self.symfs.as_slice()) {
            (Some(CallGraphMode::Dwarf(_)), []) => Err(ToolError::Input(
                "--call-graph dwarf finds callers in the files of the guest's programs: give \
                 --symfs DIR, the guest's root or copies of what it runs"
                    .to_owned(),
            )),
            (Some(CallGraphMode::Dwarf(stack)), symfs) => Ok(Some(Dwarf {
                stack,
                symfs: symfs.to_vec(),
            })),
            (_, []) => Ok(None),
            (_, _) => Err(ToolError::Input(
                "--symfs is for --call-graph dwarf here; names are found when the profile is \
                 read: umpire report --symfs DIR"
                    .to_owned(),
            )),
        }
    }

    /// Samples go to standard output.
    pub(super) fn is_pipe(&self) -> bool {
        self.output == Path::new("-")
    }
}

/// How callers of programs are found by the unwind tables of their files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Dwarf {
    /// Bytes of the stack that each sample brings, a multiple of 8.
    pub(super) stack: u16,
    /// The guest's root, or a copy of what it has of the programs, and those of containers.
    pub(super) symfs: Vec<PathBuf>,
}

/// How callers of programs are found, as `--call-graph` of perf says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallGraphMode {
    FramePointers,
    /// By the unwind tables of their files, and so many bytes of the stack.
    Dwarf(u16),
}

impl CallGraphMode {
    /// Bytes of the stack where nobody says: as with perf.
    const STACK: u16 = 8192;
}

impl FromStr for CallGraphMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (how, bytes) = match text.split_once(',') {
            Some((how, bytes)) => (how, Some(bytes)),
            None => (text, None),
        };
        match (how, bytes) {
            ("fp", None) => Ok(Self::FramePointers),
            ("dwarf", None) => Ok(Self::Dwarf(Self::STACK)),
            ("dwarf", Some(bytes)) => {
                let bytes: Option<u16> = bytes.parse().ok();
                let bytes = bytes.filter(|bytes| *bytes > 0 && bytes.is_multiple_of(8));
                let wrong = "the bytes of the stack are a multiple of 8 from 8 to 65528";
                bytes.map(Self::Dwarf).ok_or_else(|| wrong.to_owned())
            }
            _ => Err(
                "callers are found by fp (frame pointers) or by dwarf[,BYTES] (the files of \
                 --symfs)"
                    .to_owned(),
            ),
        }
    }
}

/// When another file begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwitchOutput {
    /// At SIGUSR2.
    Signal,
    /// When one has so many bytes.
    Size(u64),
    /// So long after it began.
    Time(Duration),
}

impl FromStr for SwitchOutput {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "signal" {
            return Ok(Self::Signal);
        }
        let seconds = match text.chars().last() {
            Some('B' | 'K' | 'M' | 'G') => return size(text).map(Self::Size),
            Some('s') => 1,
            Some('m') => 60,
            Some('h') => 60 * 60,
            Some('d') => 24 * 60 * 60,
            _ => 0,
        };
        let number = digits(text.strip_suffix(['s', 'm', 'h', 'd']).unwrap_or_default());
        let seconds = number.and_then(|number| number.checked_mul(seconds));
        let seconds = seconds.filter(|seconds| (1..=LONGEST_DELAY / 1000).contains(seconds));
        seconds.map(Duration::from_secs).map(Self::Time).ok_or_else(|| {
            "give signal, a size with B, K, M or G (100M), or a time with s, m, h or d (30s), at \
             most 1000000s"
                .to_owned()
        })
    }
}

/// A number without a sign.
fn digits(text: &str) -> Option<u64> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| plain)
}

/// Bytes: a number with B, K, M or G behind it, or with nothing.
fn size(text: &str) -> Result<u64, String> {
    let shift = match text.chars().last() {
        Some('K') => 10,
        Some('M') => 20,
        Some('G') => 30,
        _ => 0,
    };
    let number = text.strip_suffix(['B', 'K', 'M', 'G']).unwrap_or(text);
    let bytes = digits(number).filter(|number| (1..1 << 34).contains(number));
    bytes.map(|number| number << shift).ok_or_else(|| {
        "give a number of bytes, with K, M or G behind it kibibytes and so on: 100M".to_owned()
    })
}

fn frequency(text: &str) -> Result<u64, String> {
    let hz = match text {
        "max" => Some(MOST_HZ),
        number => digits(number).filter(|hz| (1..=MOST_HZ).contains(hz)),
    };
    hz.ok_or_else(|| format!("give 1 to {MOST_HZ} samples a second, or max, which is {MOST_HZ}"))
}

fn delay(text: &str) -> Result<Duration, String> {
    if text == "-1" {
        return Err(
            "-1 waits for somebody who lets events count later, perf's --control, which umpire \
             record does not have; give milliseconds, or start it when sampling is to begin"
                .to_owned(),
        );
    }
    if text.contains('-') && text.bytes().all(|byte| b"0123456789-,".contains(&byte)) {
        return Err(
            "umpire record has one delay, not ranges of time; give milliseconds, and --for how \
             long to sample"
                .to_owned(),
        );
    }
    let ms = digits(text).filter(|ms| *ms <= LONGEST_DELAY);
    ms.map(Duration::from_millis)
        .ok_or_else(|| format!("give milliseconds, 0 to {LONGEST_DELAY}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_are_found_as_perf_says_it() {
        let check =
            |text: &str, expected: Result<CallGraphMode, &str>| match (text.parse(), expected) {
                (Err(error), Err(part)) => {
                    let error: String = error;
                    assert!(error.contains(part), "{error}");
                }
                (how, expected) => assert_eq!(how.ok(), expected.ok(), "{text}"),
            };
        check("fp", Ok(CallGraphMode::FramePointers));
        check("dwarf", Ok(CallGraphMode::Dwarf(8192)));
        check("dwarf,16", Ok(CallGraphMode::Dwarf(16)));
        check("dwarf,65528", Ok(CallGraphMode::Dwarf(65_528)));
        for wrong in ["dwarf,65536", "dwarf,0", "dwarf,12", "dwarf,", "dwarf,-8"] {
            check(wrong, Err("a multiple of 8 from 8 to 65528"));
        }
        for wrong in ["", "lbr", "fp,8", "DWARF"] {
            check(wrong, Err("fp (frame pointers) or by dwarf[,BYTES]"));
        }
    }

    /// Attached, apart and with `=`; a word without a hyphen begins the command.
    #[test]
    fn options_are_typed_as_for_perf() {
        use clap::FromArgMatches as _;
        let parse = |text: &str| {
            let words = std::iter::once("record").chain(text.split(' '));
            let command = RecordOptions::augment_args(clap::Command::new("record"));
            let matches = command.try_get_matches_from(words);
            let options = matches.and_then(|it| RecordOptions::from_arg_matches(&it));
            options.map_err(|error| error.to_string())
        };
        let options = parse("-Fmax -p7,8 -t 9 -D250 -ox.data --max-size=4K sleep -D 1").unwrap();
        assert_eq!(options.sampling(), Sampling::Frequency(100_000));
        assert_eq!((options.processes, options.threads), (vec![7, 8], vec![9]));
        assert_eq!(options.delay, Duration::from_millis(250));
        assert_eq!(options.output, Path::new("x.data"));
        assert_eq!(options.max_size, Some(4096));
        assert_eq!(options.until.command, ["sleep", "-D", "1"]);
        let options = parse("-c1000 --switch-output true").unwrap();
        assert_eq!(options.sampling(), Sampling::Period(1000));
        assert_eq!(options.switch_output, Some(SwitchOutput::Signal));
        assert_eq!(options.until.command, ["true"], "its value has a =");
        // What a caller of the library has is what nobody says.
        let (typed, own) = (parse("-q").unwrap(), RecordOptions::default());
        let shown = |options: RecordOptions| format!("{options:?}");
        let quiet = RecordOptions { quiet: true, ..own };
        assert_eq!(shown(typed), shown(quiet));
        for wrong in [
            "-p x",
            "-c1 -F1",
            "--switch-max-files 2",
            "-q -v",
            "-p 1,,2",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn files_are_switched_at_a_signal_a_size_or_a_time() {
        let time = |seconds| Some(SwitchOutput::Time(Duration::from_secs(seconds)));
        let check = |text: &str, expected: Option<SwitchOutput>| {
            assert_eq!(text.parse().ok(), expected, "{text}");
        };
        check("signal", Some(SwitchOutput::Signal));
        check("7B", Some(SwitchOutput::Size(7)));
        check("3K", Some(SwitchOutput::Size(3 << 10)));
        check("5M", Some(SwitchOutput::Size(5 << 20)));
        check("2G", Some(SwitchOutput::Size(2 << 30)));
        check("9s", time(9));
        check("4m", time(240));
        check("2h", time(7200));
        check("1d", time(86_400));
        for wrong in [
            "",
            "s",
            "M",
            "5",
            "0s",
            "0M",
            "-3s",
            "+3s",
            "1.5s",
            "5 s",
            "5k",
            "5x",
            "99d",
            "SIGNAL",
            "99999999999999999999G",
            "18446744073709551615d",
            "5ß",
        ] {
            check(wrong, None);
        }
    }

    #[test]
    fn sizes_are_numbers_of_bytes() {
        for (text, expected) in [
            ("1", Some(1)),
            ("4096", Some(4096)),
            ("12B", Some(12)),
            ("12K", Some(12 << 10)),
            ("16G", Some(16 << 30)),
            ("0", None),
            ("K", None),
            ("1KB", None),
            ("1k", None),
            ("-1M", None),
            ("17179869184G", None),
        ] {
            assert_eq!(size(text).ok(), expected, "{text}");
        }
    }

    #[test]
    fn frequencies_and_delays_say_what_they_take() {
        assert_eq!(frequency("max"), Ok(100_000));
        assert_eq!(frequency("997"), Ok(997));
        for wrong in ["0", "100001", "MAX", "-5", "1k", ""] {
            let error = frequency(wrong).expect_err(wrong);
            assert!(
                error.contains("1 to 100000") && error.contains("max"),
                "{error}"
            );
        }
        assert_eq!(delay("0"), Ok(Duration::ZERO));
        assert_eq!(delay("250"), Ok(Duration::from_millis(250)));
        for (wrong, part) in [
            ("-1", "does not have"),
            ("10-20,30-40", "not ranges"),
            ("-5", "not ranges"),
            ("1s", "give milliseconds"),
            ("", "give milliseconds"),
            ("1000000001", "give milliseconds"),
        ] {
            let error = delay(wrong).expect_err(wrong);
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn callers_by_files_need_the_files() {
        let options = |call_graph, symfs: &[&str]| RecordOptions {
            call_graph,
            symfs: symfs.iter().map(PathBuf::from).collect(),
            ..RecordOptions::default()
        };
        let refused = |options: RecordOptions, part: &str| {
            let error = options.dwarf().expect_err(part).to_string();
            assert!(error.contains(part), "{error}");
        };
        refused(
            options(Some(CallGraphMode::Dwarf(8)), &[]),
            "give --symfs DIR",
        );
        refused(options(None, &["d"]), "umpire report --symfs");
        refused(
            options(Some(CallGraphMode::FramePointers), &["d"]),
            "umpire report --symfs",
        );
        assert_eq!(options(None, &[]).dwarf().expect("none"), None);
        let dwarf = options(Some(CallGraphMode::Dwarf(8)), &["d"]).dwarf();
        assert_eq!(dwarf.expect("one").map(|one| one.stack), Some(8));
    }
}
