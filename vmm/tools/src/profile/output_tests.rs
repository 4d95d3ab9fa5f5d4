//! What others read of folded stacks, drawings and profiles in their formats, whatever the
//! guest's programs call themselves and however much samples weigh.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use perfmon_abi::compact::{CallChain, ChainEnd};
use proptest::prelude::*;
use serde_json::Value;

use super::plain::NO_NAME;
use super::pprof::tests::{of_pprof, unzipped, values};
use super::program_tests::{CLEAR, Place, START, chain, kernel, mapped, thread, user};
use super::stacks::Weight;
use super::test_elf::{OFFSET, elf};
use super::*;

/// Stands for an empty name where [`NO_NAME`] may be a guest's own.
const EMPTY: &str = "nothing at all";

/// A name as bytes that a guest chose, read as the VM does, or made of what readers take for
/// structure.
pub(super) fn any_name() -> impl Strategy<Value = String> {
    let bytes = prop::collection::vec(any::<u8>(), 0..16);
    let words = prop::sample::select(vec![
        ";",
        " ",
        "  ",
        "\\",
        "x",
        "\\x3b",
        "1",
        "23",
        ".",
        ".5",
        "_[k]",
        "_[",
        "]",
        "[",
        "#",
        "-",
        "--",
        "\t",
        "\n",
        "\r",
        "\0",
        "\x1b",
        "\u{85}",
        "\u{a0}",
        "\u{2028}",
        "\u{fdd0}",
        "\u{fdd1}",
        "\u{feff}",
        "\u{ffff}",
        "é",
        "a",
        "main",
        "[unknown]",
        "[no name]",
        "<b>",
        "&",
        "\"",
        "(1 samples, 5%)",
        "_Z1fv",
    ]);
    prop_oneof![
        bytes.prop_map(|bytes| String::from_utf8_lossy(&bytes).into_owned()),
        prop::collection::vec(words, 0..5).prop_map(|words| words.concat()),
        any::<String>(),
    ]
}

/// A name as profiles may have it: recorders write `?` for control characters.
fn recorded() -> impl Strategy<Value = String> {
    any_name().prop_map(|name| name.replace(char::is_control, "?"))
}

/// The same of a symbol; one without a name is none.
fn symbol() -> impl Strategy<Value = String> {
    recorded().prop_map(|name| {
        if name.is_empty() {
            "f".to_owned()
        } else {
            name
        }
    })
}

/// The name that is written with `\xNN` for some of its bytes.
pub(super) fn unescaped(frame: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = frame;
    while let Some((before, behind)) = rest.split_once(r"\x") {
        bytes.extend(before.bytes());
        bytes.push(u8::from_str_radix(&behind[..2], 16).unwrap());
        rest = &behind[2..];
    }
    bytes.extend(rest.bytes());
    String::from_utf8(bytes).unwrap()
}

fn read_again(frame: &str) -> String {
    match frame {
        NO_NAME => EMPTY.to_owned(),
        frame => unescaped(frame),
    }
}

/// Tasks and functions by name, and samples: whose, and in which functions, the innermost
/// first, and whether the kernel works for that.
#[derive(Clone, Debug)]
struct Guest {
    comms: Vec<String>,
    symbols: Vec<String>,
    samples: Vec<(usize, Vec<usize>, bool)>,
}

pub(super) type Stacks = BTreeMap<Vec<String>, u64>;

impl Guest {
    fn any() -> impl Strategy<Value = Self> {
        let comms = prop::collection::vec(recorded(), 1..4);
        let symbols = prop::collection::vec(symbol(), 1..5);
        let frames = prop::collection::vec(0..4usize, 1..5);
        let samples = prop::collection::vec((0..3usize, frames, any::<bool>()), 1..8);
        (comms, symbols, samples).prop_map(|(comms, symbols, samples)| Self {
            comms,
            symbols,
            samples,
        })
    }

    fn comm(&self, task: usize) -> usize {
        task % self.comms.len()
    }

    fn symbol(&self, symbol: usize) -> usize {
        symbol % self.symbols.len()
    }

    /// Its profile; the first task has the number 0, as the kernel's idle task.
    fn place(&self) -> Place {
        let mut records = vec![mapped(11, "/usr/bin/prog", "")];
        for (number, comm) in (0u32..).zip(&self.comms) {
            records.push(thread(u64::from(number) + 1, number, number, comm));
        }
        for (task, symbols, in_kernel) in &self.samples {
            let at = |symbol: &usize| START + OFFSET + 16 * self.symbol(*symbol) as u64 + 3;
            let frames: Vec<u64> = symbols.iter().map(at).collect();
            let task = self.comm(*task) as u64 + 1;
            records.push(if *in_kernel {
                kernel(CLEAR, task, chain(&[CLEAR], &frames, ChainEnd::Outermost))
            } else {
                user(
                    frames[0],
                    task,
                    11,
                    chain(&[], &frames, ChainEnd::Outermost),
                )
            });
        }
        let place = Place::new(&records);
        let functions: Vec<(&str, u64, u64)> = (0u64..)
            .zip(&self.symbols)
            .map(|(index, name)| (name.as_str(), 0x1000 + 16 * index, 16))
            .collect();
        let program = elf(0x1000, &vec![0x90; 16 * functions.len()], &functions);
        fs::write(place.path("root/usr/bin/prog"), program).unwrap();
        place
    }

    /// What a reader has to find: a task and its functions, the outermost first, and how often.
    fn stacks(&self, empty: &str) -> Stacks {
        let mut stacks = Stacks::new();
        for (task, symbols, in_kernel) in &self.samples {
            let task = match self.comms[self.comm(*task)].as_str() {
                "" => empty,
                comm => comm,
            };
            let functions = symbols
                .iter()
                .rev()
                .map(|one| &self.symbols[self.symbol(*one)]);
            let mut stack = vec![task.to_owned()];
            stack.extend(functions.cloned());
            stack.extend(in_kernel.then(|| "clear_page".to_owned()));
            *stacks.entry(stack).or_default() += 1;
        }
        stacks
    }
}

/// Stack and number, as FlameGraph's regular expression has them.
fn counted(line: &str) -> Option<(&str, u64)> {
    let (stack, count) = line.rsplit_once(char::is_whitespace)?;
    let (whole, fraction) = count.split_once('.').unwrap_or((count, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let is_number = !whole.is_empty() && digits(whole) && digits(fraction);
    is_number.then(|| (stack, whole.parse().unwrap_or(u64::MAX)))
}

fn of_folded(text: &str) -> Stacks {
    let mut stacks = Stacks::new();
    for line in text.lines() {
        assert_eq!(line, line.trim());
        let is_odd = |c: char| c.is_control() || (c.is_whitespace() && c != ' ');
        assert!(!line.starts_with('#') && !line.contains(is_odd), "{line:?}");
        let (stack, count) = counted(line).unwrap();
        assert_eq!(counted(stack), None, "a second number in {line:?}");
        let frames = stack.split(';').map(|frame| {
            assert!(!frame.is_empty() && frame == frame.trim(), "{line:?}");
            read_again(frame.strip_suffix("_[k]").unwrap_or(frame))
        });
        *stacks.entry(frames.collect()).or_default() += count;
    }
    stacks
}

/// Name and number of each frame of a flame graph.
fn of_drawing(svg: &str) -> Vec<(String, u64)> {
    let is_xml = |c: char| matches!(c, '\t' | '\n' | '\r' | ' '..='\u{fffd}' | '\u{10000}'..);
    assert!(svg.chars().all(is_xml), "{svg}");
    let titles = svg.split("<title>").skip(1);
    let titles = titles.map(|rest| rest.split_once("</title>").unwrap().0);
    let frames = titles.map(|title| {
        let (name, amount) = title.rsplit_once(" (").unwrap();
        let (samples, part) = amount.split_once(" samples, ").unwrap();
        assert!(part.ends_with("%)") && !part.contains(';'), "{title}");
        let name = name.replace("&lt;", "<").replace("&gt;", ">");
        let name = name.replace("&quot;", "\"").replace("&apos;", "'");
        let name = name.replace("&amp;", "&");
        (read_again(&name), samples.replace(',', "").parse().unwrap())
    });
    frames.collect()
}

/// Numbers by name: inferno sorts lines by their bytes, and so draws some frames in pieces.
fn summed(frames: Vec<(String, u64)>) -> BTreeMap<String, u64> {
    let mut sums = BTreeMap::new();
    for (name, number) in frames {
        *sums.entry(name).or_default() += number;
    }
    sums
}

/// Each frame of a drawing once, with the number of all that begin so.
fn frames(stacks: &Stacks) -> Vec<(String, u64)> {
    let mut sums: BTreeMap<&[String], u64> = BTreeMap::new();
    for (stack, count) in stacks {
        for length in 1..=stack.len() {
            *sums.entry(&stack[..length]).or_default() += count;
        }
    }
    let all = ("all".to_owned(), stacks.values().sum());
    let frames = sums.iter();
    let frames = frames.map(|(stack, count)| (stack.last().unwrap().clone(), *count));
    frames.chain([all]).collect()
}

fn of_firefox(json: &Value) -> Stacks {
    let index = |value: &Value| usize::try_from(value.as_u64().unwrap()).unwrap();
    let mut stacks = Stacks::new();
    for thread in json["threads"].as_array().unwrap() {
        let strings = match thread.get("stringArray") {
            Some(strings) => strings,
            None => &json["shared"]["stringArray"],
        };
        let samples = thread["samples"]["stack"].as_array().unwrap().iter();
        for (stack, weight) in samples.zip(thread["samples"]["weight"].as_array().unwrap()) {
            let mut names = Vec::new();
            let mut stack = stack;
            while !stack.is_null() {
                let frame = index(&thread["stackTable"]["frame"][index(stack)]);
                let function = index(&thread["frameTable"]["func"][frame]);
                let name = index(&thread["funcTable"]["name"][function]);
                names.push(strings[name].as_str().unwrap().to_owned());
                stack = &thread["stackTable"]["prefix"][index(stack)];
            }
            names.push(thread["name"].as_str().unwrap().to_owned());
            names.reverse();
            *stacks.entry(names).or_default() += weight.as_u64().unwrap();
        }
    }
    stacks
}

impl Place {
    /// The report to standard output and to a file, with the names of files as they are.
    fn raw(&self, change: impl FnOnce(&mut ReportOptions, PathBuf)) -> (String, PathBuf) {
        let path = self.path("out");
        let text = self.report(|options| {
            options.profile.no_demangle = true;
            change(options, path.clone());
        });
        (text, path)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// All outputs have the same stacks, frame by frame, and inferno reads those that are for it.
    #[test]
    fn names_of_a_guest_are_no_structure(guest in Guest::any()) {
        let place = guest.place();
        let (folded, _) = place.raw(|options, _| options.folded = true);
        let expected = guest.stacks(EMPTY);
        prop_assert_eq!(&of_folded(&folded), &expected, "{}", folded);

        let mut twice = Vec::new();
        let options = inferno::differential::Options::default();
        inferno::differential::from_readers(options, folded.as_bytes(), folded.as_bytes(), &mut twice)
            .unwrap();
        let twice = String::from_utf8(twice).unwrap();
        let mut lines: Vec<&str> = twice.lines().collect();
        lines.sort_unstable();
        let mut wanted: Vec<String> = folded
            .lines()
            .map(|line| format!("{line} {}", line.rsplit_once(' ').unwrap().1))
            .collect();
        wanted.sort_unstable();
        prop_assert_eq!(lines, wanted);

        let mut wanted = frames(&expected);
        wanted.sort_unstable();
        let (_, path) = place.raw(|options, path| options.flamegraph = Some(path));
        let mut ours = of_drawing(&fs::read_to_string(path).unwrap());
        ours.sort_unstable();
        prop_assert_eq!(&ours, &wanted);
        let of_theirs = |reverse: bool| {
            let mut options = inferno::flamegraph::Options::default();
            options.reverse_stack_order = reverse;
            let mut svg = Vec::new();
            inferno::flamegraph::from_reader(&mut options, folded.as_bytes(), &mut svg).unwrap();
            summed(of_drawing(&String::from_utf8(svg).unwrap()))
        };
        prop_assert_eq!(of_theirs(false), summed(wanted));
        let reverse = |(stack, count): (&Vec<String>, &u64)| {
            (stack.iter().rev().cloned().collect(), *count)
        };
        let wanted = frames(&expected.iter().map(reverse).collect());
        prop_assert_eq!(of_theirs(true), summed(wanted));

        let expected = guest.stacks(NO_NAME);
        let (_, path) = place.raw(|options, path| options.pprof = Some(path));
        prop_assert_eq!(&of_pprof(&path), &expected);
        let (_, path) = place.raw(|options, path| options.firefox = Some(path));
        let json: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        prop_assert_eq!(&of_firefox(&json), &expected);
    }
}

/// Samples of one place that stand for so many events each; the later come first.
fn weighing(periods: &[u64]) -> Place {
    let mut records = vec![thread(1, 0, 0, "swapper/0")];
    for (time, period) in (0u64..).zip(periods) {
        let Record::Sample(mut sample) = kernel(CLEAR, 1, CallChain::default()) else {
            unreachable!();
        };
        sample.time_ns = 1_000_000 * (periods.len() as u64 - time);
        sample.period = *period;
        records.push(Record::Sample(sample));
    }
    Place::new(&records)
}

/// What is printed, and what is noted, or why nothing is written to `out`.
fn weighed(
    place: &Place,
    change: impl FnOnce(&mut ReportOptions, PathBuf),
) -> Result<(String, String), String> {
    let mut options = place.options();
    options.weight = Weight::Events;
    change(&mut options, place.path("out"));
    let (mut out, mut notes) = (Vec::new(), Vec::new());
    let text = |bytes| String::from_utf8(bytes).unwrap();
    match report(&options, &mut out, &mut notes) {
        Ok(()) => Ok((text(out), text(notes))),
        Err(error) => {
            assert!(out.is_empty() && !place.path("out").exists(), "{error}");
            Err(error.to_string())
        }
    }
}

#[test]
fn firefox_has_weights_as_large_as_samples() {
    let periods = [
        1,
        0x7fff_ffff,
        0x8000_0000,
        5_000_000_000,
        5_000_000_000,
        7,
        1 << 52,
    ];
    let place = weighing(&periods);
    let (_, notes) = weighed(&place, |options, path| options.firefox = Some(path)).unwrap();
    assert!(notes.is_empty(), "{notes}");
    let json = fs::read(place.path("out")).unwrap();
    let json: Value = serde_json::from_slice(&json).unwrap();
    let samples = &json["threads"][0]["samples"];
    let expected: Vec<u64> = periods.into_iter().rev().collect();
    assert_eq!(samples["weight"], serde_json::to_value(expected).unwrap());
    assert_eq!(samples["stack"].as_array().unwrap().len(), periods.len());
    // What the format has for what is missing is left.
    let addresses = json["threads"][0]["frameTable"]["address"]
        .as_array()
        .unwrap();
    assert!(addresses.iter().all(|one| *one == -1), "{addresses:?}");
}

/// JavaScript rounds what has more than 53 bits.
#[test]
fn numbers_that_readers_round_are_exact_and_said_to_be() {
    for periods in [&[u64::MAX][..], &[1 << 53, 1]] {
        let place = weighing(periods);
        let (_, notes) = weighed(&place, |options, path| options.firefox = Some(path)).unwrap();
        assert!(notes.contains("the Firefox Profiler rounds"), "{notes}");
        let json = fs::read_to_string(place.path("out")).unwrap();
        assert!(json.contains(&periods[0].to_string()), "{json}");
        let (_, notes) = weighed(&place, |options, path| options.flamegraph = Some(path)).unwrap();
        assert!(notes.contains("a flame graph rounds"), "{notes}");
        let (text, notes) = weighed(&place, |options, _| options.folded = true).unwrap();
        let sum: u64 = periods.iter().sum();
        assert_eq!(
            (text, notes),
            (format!("swapper/0;clear_page_[k] {sum}\n"), String::new())
        );
    }
}

#[test]
fn what_weighs_nothing_leaves_the_drawing_of_before() {
    let place = weighing(&[0, 0]);
    let error = weighed(&place, |options, path| options.flamegraph = Some(path)).unwrap_err();
    let end = "is not written; give --weight samples";
    assert!(
        error.contains("the samples of 'cycles' stand for no events") && error.ends_with(end),
        "{error}"
    );
    let (text, _) = weighed(&place, |options, _| options.folded = true).unwrap();
    assert_eq!(text, "swapper/0;clear_page_[k] 0\n");

    // Nothing else is begun that cannot be done either.
    let (profile, kept) = (
        place.path("umpire.data"),
        place.path("umpire.data.kallsyms"),
    );
    let before = fs::read(&profile).unwrap();
    fs::write(place.path("out.svg"), "before").unwrap();
    fs::write(&kept, "before").unwrap();
    let refused = |change: &dyn Fn(&mut ReportOptions)| {
        let mut options = place.options();
        options.weight = Weight::Events;
        change(&mut options);
        report(&options, &mut Vec::new(), &mut Vec::new()).unwrap_err();
    };
    refused(&|options| options.flamegraph = Some(place.path("out.svg")));
    refused(&|options| options.perf_data = Some(profile.clone()));
    refused(&|options| options.pprof = Some(profile.clone()));
    refused(&|options| {
        options.pprof = Some(place.path("out.svg"));
        options.profile.samples.vcpus = "1".parse().ok();
    });
    refused(&|options| {
        options.firefox = Some(place.path("out.svg"));
        options.profile.samples.vcpus = "1".parse().ok();
    });
    assert_eq!(fs::read(&profile).unwrap(), before);
    assert_eq!(fs::read(place.path("out.svg")).unwrap(), b"before");
    assert_eq!(fs::read(kept).unwrap(), b"before");
}

#[test]
fn what_is_too_much_for_a_format_is_refused() {
    let most = i64::MAX.unsigned_abs();
    let place = weighing(&[most - 1, 1]);
    weighed(&place, |options, path| options.pprof = Some(path)).unwrap();
    assert_eq!(values(&place.path("out")), [[2, i64::MAX]]);

    let place = weighing(&[most, 1]);
    let error = weighed(&place, |options, path| options.pprof = Some(path)).unwrap_err();
    assert!(
        error.contains("--pprof") && error.contains("9223372036854775807"),
        "{error}"
    );
    let (text, _) = weighed(&place, |options, _| options.folded = true).unwrap();
    assert_eq!(text, "swapper/0;clear_page_[k] 9223372036854775808\n");

    // The table has numbers for all.
    let place = weighing(&[1 << 63, 1 << 63, 1 << 62, 1 << 62]);
    let rows = place.rows(|options| options.show_total_period = true);
    let all = 3u128 << 63;
    let row = format!("100.00% 4 {all} swapper/0 [kernel.kallsyms] [k] clear_page");
    assert_eq!(rows, [row]);
    let text = place.report(|options| options.show_total_period = true);
    assert!(text.contains(&format!("(approx.): {all}\n")), "{text}");
    let text = place.report(|options| options.hierarchy = true);
    assert!(
        text.contains("  100.00%               4  swapper/0\n"),
        "{text}"
    );
    let json = place.report(|options| options.json = true);
    let number = format!("\"events\":{all},");
    assert_eq!(json.matches(&number).count(), 2, "{json}");

    let place = weighing(&[u64::MAX, 1]);
    for option in ["--folded", "--flamegraph"] {
        let error = weighed(&place, |options, path| match option {
            "--folded" => options.folded = true,
            _ => options.flamegraph = Some(path),
        });
        let error = error.unwrap_err();
        assert!(
            error.contains(option) && error.contains("18446744073709551615"),
            "{error}"
        );
        assert!(error.contains("--weight samples"), "{error}");
    }
}

/// The names that readers are tried with: task, and functions from the outermost.
fn odd() -> Guest {
    let comms = ["a;b 7", "", "# x", "[unknown]"];
    let symbols = ["f 123", "x\u{2028}y;", " [unknown] ", r"\x3b_[k]"];
    let all = [[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]];
    let samples = all.iter().enumerate();
    Guest {
        comms: comms.map(str::to_owned).to_vec(),
        symbols: symbols.map(str::to_owned).to_vec(),
        samples: samples
            .map(|(task, frames)| (task, frames.to_vec(), task == 2))
            .collect(),
    }
}

/// Speedscope's importer in node prints stacks and their numbers.
const SPEEDSCOPE: &str = r"
const fs = require('fs'), path = require('path'), vm = require('vm');
const release = 'node_modules/speedscope/dist/release';
const bundle = fs.readdirSync(release).find(name => /^speedscope-.*\.js$/.test(name));
// The importers are a module that the page asks for; the page itself fails without a browser.
const asked = /Promise\.resolve\(\)\.then\(\(\)=>\(([\w$]+)\(\),([\w$]+)\)\)/g;
globalThis.modules = [];
const code = fs.readFileSync(path.join(release, bundle), 'utf8')
  .replace(asked, (all, load, module) => `(modules.push(() => (${load}(), ${module})), ${all})`);
const print = console.log;
console.log = () => {};
// Numbers of 64 bits would be those of a package that is not there.
const none = ['Long', 'dcodeIO'];
const any = new Proxy(function () {}, {
  get: (_, key) => none.includes(key) ? undefined : key === Symbol.toPrimitive ? () => '' : any,
  apply: () => any, construct: () => any, set: () => true,
});
globalThis.window = globalThis.document = any;
process.on('unhandledRejection', () => {});
try { vm.runInThisContext(code); } catch {}
const importers = modules.map(load => { try { return load(); } catch { return {}; } })
  .find(module => module.importProfileGroupFromText);
async function read(name) {
  const bytes = fs.readFileSync(name);
  const group = name.endsWith('.txt')
    ? await importers.importProfileGroupFromText(name, bytes.toString())
    : await importers.importProfilesFromArrayBuffer(name, new Uint8Array(bytes).buffer);
  const stacks = [], stack = [];
  for (const profile of group.profiles) {
    let last = 0;
    profile.forEachCall((node, at) => { stack.push(node.frame.name); last = at; }, (_, at) => {
      if (at !== last) stacks.push([stack.slice(), at - last]);
      last = at;
      stack.pop();
    });
  }
  return stacks;
}
(async () => {
  print(JSON.stringify([await read('a.collapsedstack.txt'), await read('a.pb')]));
  process.exit(0);
})();
";

/// Why the package is not there.
fn install(package: &str, folder: &Path) -> Result<(), String> {
    let mut npm = Command::new("timeout");
    npm.args([
        "120",
        "npm",
        "install",
        "--silent",
        "--no-audit",
        "--no-fund",
        package,
    ]);
    let output = npm
        .current_dir(folder)
        .output()
        .map_err(|error| error.to_string())?;
    let errors = String::from_utf8_lossy(&output.stderr);
    let done = output.status.success();
    done.then_some(())
        .ok_or_else(|| format!("npm: {}", errors.trim()))
}

#[test]
fn speedscope_reads_all_frames() {
    let guest = odd();
    let place = guest.place();
    let folder = place.path("importer");
    fs::create_dir(&folder).unwrap();
    if let Err(why) = install("speedscope", &folder) {
        println!("skipped: speedscope_reads_all_frames: no speedscope for node: {why}");
        return;
    }
    let (folded, _) = place.raw(|options, _| options.folded = true);
    fs::write(folder.join("a.collapsedstack.txt"), folded).unwrap();
    let (_, path) = place.raw(|options, path| options.pprof = Some(path));
    fs::write(folder.join("a.pb"), unzipped(&path)).unwrap();
    let mut node = Command::new("timeout");
    let node = node
        .args(["60", "node", "-e", SPEEDSCOPE])
        .current_dir(&folder);
    let output = node.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    let read: [Vec<(Vec<String>, u64)>; 2] =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {errors}"));
    let [of_folded, of_pprof] = read;
    let mut stacks = Stacks::new();
    for (stack, count) in of_folded {
        let frames = stack
            .iter()
            .map(|name| read_again(name.strip_suffix("_[k]").unwrap_or(name)));
        *stacks.entry(frames.collect()).or_default() += count;
    }
    assert_eq!(stacks, guest.stacks(EMPTY));
    let expected: Vec<Vec<String>> = guest.stacks("").into_keys().collect();
    let mut found: Vec<Vec<String>> = of_pprof.into_iter().map(|(stack, _)| stack).collect();
    let mut expected: Vec<Vec<String>> = expected
        .into_iter()
        .map(|stack| stack[1..].to_vec())
        .collect();
    expected.sort();
    found.sort();
    assert_eq!(found, expected);
}

/// pprof itself has vCPU 0, process 0 and thread 0, and takes no part of a name away.
#[test]
fn pprof_keeps_labels_and_names() {
    let mut guest = odd();
    guest.symbols[0] = "f<int>(7)".to_owned();
    let place = guest.place();
    let (_, path) = place.raw(|options, path| options.pprof = Some(path));
    let pprof = |option: &str| {
        let mut go = Command::new("timeout");
        let go = go.args(["120", "go", "tool", "pprof", option]).arg(&path);
        let go = go
            .env("PPROF_TMPDIR", place.path(""))
            .env("HOME", place.path(""));
        let output = go.output().map_err(|error| error.to_string())?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() {
            Ok(text(&output.stdout))
        } else {
            Err(text(&output.stderr))
        }
    };
    let tags = match pprof("-tags") {
        Ok(tags) => tags,
        Err(why) => {
            println!(
                "skipped: pprof_keeps_labels_and_names: no pprof of Go: {}",
                why.trim()
            );
            return;
        }
    };
    let tags: Vec<String> = tags
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    for key in ["comm", "pid", "tid", "vcpu", "vm"] {
        let total = format!("{key}: Total 4.0");
        assert!(
            tags.iter().any(|line| line.starts_with(&total)),
            "{key}: {tags:?}"
        );
    }
    assert!(tags.contains(&"4.0 ( 100%): 0".to_owned()), "{tags:?}");
    assert!(
        tags.contains(&"1.0 (25.00%): [no name]".to_owned()),
        "{tags:?}"
    );
    let raw = pprof("-raw").unwrap();
    assert!(raw.contains("f<int>(7)"), "{raw}");
}
