//! `umpire report` and `umpire script` on files.

mod fixture;
mod readers;

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

use clap::FromArgMatches;
use serde_json::Value;
use tempfile::TempDir;
use umpire::exit::{ExitStatus, UserError};
use umpire::flags::{Cli, Command, command};
use umpire_tools::profile::{Record, Sample, report, script};

use fixture::{KALLSYMS, file, header, records, sample, two_events};

/// A folder with `umpire.data` and the guest's kallsyms.
struct Place(TempDir);

impl Place {
    fn new(profile: &[u8]) -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        fs::write(place.path("umpire.data"), profile).unwrap();
        fs::write(place.path("kallsyms"), KALLSYMS).unwrap();
        place
    }

    fn with(records: &[Record]) -> Self {
        Self::new(&file(&header(), records))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs a command; `@` stands for the folder. Its output, and its notes.
    fn run(&self, line: &str) -> Result<(String, String), UserError> {
        let folder = self.0.path().display().to_string();
        let line = line.replace('@', &folder);
        let words = ["umpire"].into_iter().chain(line.split_whitespace());
        let matches = command().try_get_matches_from(words).unwrap();
        let cli = Cli::from_arg_matches(&matches).unwrap();
        let (mut out, mut notes) = (Vec::new(), Vec::new());
        match cli.command {
            Command::Report(flags) => report(&flags, &mut out, &mut notes)?,
            Command::Script(flags) => script(&flags, &mut out, &mut notes)?,
            other => panic!("{other:?}"),
        }
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Ok((text(out), text(notes)))
    }

    fn output(&self, line: &str) -> String {
        self.run(line).unwrap().0
    }

    fn error(&self, line: &str) -> String {
        let error = self.run(line).unwrap_err();
        assert_eq!(error.status(), ExitStatus::BAD_INPUT, "{error}");
        let text = error.to_string();
        assert!(!text.contains('\n'), "{text}");
        text
    }
}

#[test]
fn a_report_tells_symbols_and_losses() {
    let place = Place::with(&records());
    let expected = "\
# VM 7 (web): 2 vCPUs on 1 cores; recorded 2023-11-14T22:13:20Z for 2.000 s by umpire 0.1.0
# Host: a processor, Linux 6.1
# Samples lost for want of room: 4; throttled: 2 times; time without a counter: 1.500 ms
#
# Samples: 7 of event 'cycles'
# Sampled: every 1000 events; the counts are hardware
# Event count (approx.): 7000
#
# Overhead  Samples  Symbol
# ........  .......  ..............................
#
    28.57%        2  clear_page
    14.29%        1  do_idle
    14.29%        1  nft_do_chain [nf_tables]
    14.29%        1  [unknown] 0xffffffffdeadbeef
    14.29%        1  [user cr3=0x200000]
    14.29%        1  [user cr3=0x300000]
";
    let shown = place.output("report -i @/umpire.data --symbols @/kallsyms");
    let dots = |text: &str| text.replace(['.'], "");
    assert_eq!(dots(&shown), dots(expected), "{shown}");
}

#[test]
fn a_report_sorts_by_what_it_is_asked_for() {
    let place = Place::with(&records());
    let rows = |line: &str| -> Vec<String> {
        let text = place.output(&format!("report -i @/umpire.data {line}"));
        let rows = text.lines().filter(|line| !line.starts_with('#'));
        rows.map(|row| row.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect()
    };
    assert_eq!(
        rows("--sort vcpu,core,ring"),
        ["71.43% 5 7/0 0 kernel", "28.57% 2 7/1 0 user"]
    );
    assert_eq!(
        rows("--sort cr3"),
        [
            "71.43% 5 0x100000",
            "14.29% 1 0x200000",
            "14.29% 1 0x300000"
        ]
    );
    assert_eq!(rows("--sort ring --vcpu 1-3"), ["100.00% 2 user"]);
    assert_eq!(rows("--sort ring --core 1"), [""; 0]);
    assert_eq!(
        rows("--kallsyms @/kallsyms --percent-limit 20"),
        ["28.57% 2 clear_page"]
    );
}

#[test]
fn rows_left_out_are_counted() {
    let text = Place::with(&records())
        .output("report -i @/umpire.data --symbols @/kallsyms --percent-limit 20");
    assert!(
        text.ends_with("# 5 more rows have less than 20 % each\n"),
        "{text}"
    );
}

#[test]
fn overhead_is_of_events_and_not_of_samples() {
    let long = Sample {
        period: 3000,
        ..sample(1, 0xffff_ffff_8100_2000)
    };
    let short = sample(2, 0xffff_ffff_8100_1000);
    let place = Place::with(&[Record::Sample(short), Record::Sample(long)]);
    let text = place.output("report -i @/umpire.data --symbols @/kallsyms");
    assert!(text.contains("    75.00%        1  do_idle\n"), "{text}");
    let folded = place.output("report -i @/umpire.data --folded --weight events");
    assert!(folded.contains(" 3000\n"), "{folded}");
}

#[test]
fn addresses_without_names_get_a_hint() {
    let place = Place::with(&records());
    let text = place.output("report -i @/umpire.data");
    assert!(text.contains("# Hint: give --symbols FILE"), "{text}");
    let text = place
        .output("report -i @/umpire.data --symbols @/kallsyms --kaslr-offset 0x7000000000 -s ring");
    assert!(text.contains("needs --kaslr-offset"), "{text}");
    let text = place.output("report -i @/umpire.data --symbols @/kallsyms --kaslr-offset -1000");
    assert!(!text.contains("Hint"), "{text}");
    assert!(
        text.contains("_etext") || text.contains("do_idle"),
        "{text}"
    );
}

#[test]
fn each_event_has_its_table() {
    let other = Sample {
        event: 1,
        ..sample(9, 0xffff_ffff_8100_2000)
    };
    let place = Place::new(&file(&two_events(), &[Record::Sample(other)]));
    let text = place.output("report -i @/umpire.data");
    assert!(text.contains("# Samples: 0 of event 'cycles'"), "{text}");
    assert!(
        text.contains("# Samples: 1 of event 'instructions:u'"),
        "{text}"
    );
    assert!(
        text.contains("# Sampled: 99 times a second; the counts are exact"),
        "{text}"
    );
    let text = place.output("report -i @/umpire.data --event instructions:u");
    assert!(!text.contains("'cycles'"), "{text}");
    let error = place.error("report -i @/umpire.data --event cycle");
    assert!(
        error.contains("no event 'cycle'; it has cycles, instructions:u"),
        "{error}"
    );
    let error = place.error("report -i @/umpire.data --folded");
    assert!(
        error.contains("--folded takes the samples of one event"),
        "{error}"
    );
    assert_eq!(
        place.output("report -i @/umpire.data --folded --event cycles"),
        ""
    );
}

#[test]
fn a_report_for_programs_has_it_all() {
    let place = Place::with(&records());
    let text =
        place.output("report -j -i @/umpire.data --symbols @/kallsyms -s symbol,vcpu,ring,cr3");
    let json: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["header"]["events"][0]["sampling"]["period"], 1000);
    assert_eq!(
        (&json["complete"], &json["totals"]["lost"]),
        (&true.into(), &4.into())
    );
    let event = &json["events"][0];
    assert_eq!(
        (&event["event"], &event["provenance"]),
        (&"cycles".into(), &"hardware".into())
    );
    let rows = event["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 6);
    assert_eq!(rows[0]["symbol"], "clear_page");
    assert_eq!(
        (&rows[0]["vm"], &rows[0]["vcpu"], &rows[0]["ring"]),
        (&7.into(), &0.into(), &"kernel".into())
    );
    assert!(rows[0].get("core").is_none());
    let sum: f64 = rows
        .iter()
        .map(|row| row["overhead"].as_f64().unwrap())
        .sum();
    assert!((sum - 100.0).abs() < 1e-9, "{sum}");
    let unknown = rows
        .iter()
        .find(|row| row["symbol"] == "[unknown]")
        .unwrap();
    assert_eq!(unknown["address"], "0xffffffffdeadbeef");
}

#[test]
fn what_was_not_sampled_is_said_so() {
    let bare = Sample {
        ring: None,
        cr3: None,
        ..sample(1, 0x1234)
    };
    let place = Place::with(&[Record::Sample(bare)]);
    let text = place.output("report -i @/umpire.data -s ring,cr3");
    assert!(text.contains("not sampled  not sampled"), "{text}");
    let json = place.output("report -j -i @/umpire.data -s ring,cr3");
    assert!(json.contains(r#""ring":null,"cr3":null"#), "{json}");
    let script = place.output("script -i @/umpire.data -F ring,cr3,ip,sym");
    assert_eq!(
        script.lines().last().unwrap(),
        "ring=? cr3=?              1234 [unknown]"
    );
}

#[test]
fn a_script_has_a_line_for_each_record() {
    let place = Place::with(&records());
    let expected = "\
\x20      [unknown]     0/0     [000]     0.001000:       1000 cycles:  ffffffff81001010 clear_page+0x10 ([kernel.kallsyms])
       [unknown]     0/0     [000]     0.002000:       1000 cycles:  ffffffff81001fff clear_page+0xfff ([kernel.kallsyms])
       [unknown]     0/0     [000]     0.003000:       1000 cycles:  ffffffff81002000 do_idle+0x0 ([kernel.kallsyms])
# time=0.003500 vm=7 vcpu=0 LOST samples=4: the buffer was full
       [unknown]     0/0     [000]     0.004000:       1000 cycles:  ffffffffc0000123 nft_do_chain+0x123 ([nf_tables])
       [unknown]     0/0     [000]     0.005000:       1000 cycles:  ffffffffdeadbeef [unknown] ([kernel.kallsyms])
# time=0.005500 vm=7 vcpu=? THROTTLED times=2
       [unknown]     0/0     [001]     0.006000:       1000 cycles:            401000 [unknown] ([unknown])
       [unknown]     0/0     [001]     1.234567:       1000 cycles:            402000 [unknown] ([unknown])
# time=1.300000 vm=7 vcpu=1 BLIND ns=1500000: the counter was taken away
";
    let (text, notes) = place
        .run("script -i @/umpire.data --symbols @/kallsyms")
        .unwrap();
    assert_eq!(text, expected);
    assert!(notes.contains("4 samples lost"), "{notes}");
    let fields = place.output("script -i @/umpire.data --vcpu 1 -F vcpu,set,ring,cr3");
    assert!(
        fields.contains("vcpu=1 set=0 ring=user cr3=0x200002\n"),
        "{fields}"
    );
}

#[test]
fn a_script_for_programs_has_an_object_for_each_record() {
    let place = Place::with(&records());
    let text = place.output("script -j -i @/umpire.data --symbols @/kallsyms");
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), 10);
    assert_eq!(lines[0]["kind"], "sample");
    assert_eq!(lines[0]["ip"], "0xffffffff81001010");
    assert_eq!(
        (&lines[0]["symbol"], &lines[0]["symbol_offset"]),
        (&"clear_page".into(), &16.into())
    );
    assert_eq!(
        (&lines[3]["kind"], &lines[3]["samples"]),
        (&"lost".into(), &4.into())
    );
    assert_eq!(
        (&lines[6]["kind"], &lines[6]["vcpu"]),
        (&"throttled".into(), &Value::Null)
    );
    assert_eq!(lines[7]["symbol"], Value::Null);
    assert_eq!(
        (&lines[9]["kind"], &lines[9]["ns"]),
        (&"blind".into(), &1_500_000.into())
    );
    assert_eq!(
        place
            .output("script -j -i @/umpire.data --vcpu 0 -F ip")
            .lines()
            .next()
            .unwrap(),
        r#"{"kind":"sample","ip":"0xffffffff81001010"}"#
    );
}

#[test]
fn stacks_collapse() {
    let place = Place::with(&records());
    let expected = "\
VM 7;vCPU 0;kernel;[unknown] 0xffffffffdeadbeef 1
VM 7;vCPU 0;kernel;clear_page 2
VM 7;vCPU 0;kernel;do_idle 1
VM 7;vCPU 0;kernel;nft_do_chain [nf_tables] 1
VM 7;vCPU 1;user;[user cr3=0x200000] 1
VM 7;vCPU 1;user;[user cr3=0x300000] 1
";
    let (text, notes) = place
        .run("report -i @/umpire.data --symbols @/kallsyms --folded")
        .unwrap();
    assert_eq!(text, expected);
    assert!(
        notes.contains("4 samples lost for want of room; throttled 2 times; 1.500 ms without"),
        "{notes}"
    );
}

#[test]
fn a_flame_graph_is_drawn() {
    let place = Place::with(&records());
    place.output("report -i @/umpire.data --symbols @/kallsyms --flamegraph @/a.svg");
    let svg = fs::read_to_string(place.path("a.svg")).unwrap();
    assert!(svg.starts_with("<?xml"), "{}", &svg[..100]);
    assert!(svg.trim_end().ends_with("</svg>"));
    for part in [
        "VM 7: cycles",
        "clear_page (2 samples, 28.57%)",
        "vCPU 1 (2 samples, 28.57%)",
        "sampled every 1000 events; the counts are hardware; 4 samples lost",
    ] {
        assert!(svg.contains(part), "{part}");
    }
    let error = place.error("report -i @/umpire.data --flamegraph @/b.svg --vcpu 9");
    assert!(
        error.contains("no sample of 'cycles' is left to draw"),
        "{error}"
    );
    assert!(!place.path("b.svg").exists());
    let error = place.error("report -i @/umpire.data --flamegraph @/no/such.svg");
    assert!(error.contains("cannot be written"), "{error}");
    let error = place.error("report -i @/umpire.data --flamegraph @/umpire.data");
    assert!(error.contains("it is the profile itself"), "{error}");
    assert_eq!(
        fs::read(place.path("umpire.data")).unwrap(),
        file(&header(), &records())
    );
}

/// What the processed profile format asks for (its documentation, and the
/// loader of profiler.firefox.com): tables whose columns are as long as they
/// say, and whose indices are within each other.
#[test]
fn a_firefox_profile_is_consistent() {
    let place = Place::with(&records());
    place.output("report -i @/umpire.data --symbols @/kallsyms --firefox @/a.json");
    let json: Value =
        serde_json::from_str(&fs::read_to_string(place.path("a.json")).unwrap()).unwrap();
    assert!(json["meta"]["preprocessedProfileVersion"].as_u64().unwrap() > 40);
    assert_eq!(json["meta"]["product"], "Umpire");
    assert_eq!(json["meta"]["startTime"], 1_700_000_000_123.0);
    let threads = json["threads"].as_array().unwrap();
    let names: Vec<&str> = threads
        .iter()
        .map(|one| one["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["all vCPUs", "vCPU 0", "vCPU 1"]);
    let mut found = Vec::new();
    for thread in threads {
        assert_eq!(thread["processName"], "VM 7 (web)");
        let strings = match thread.get("stringArray") {
            Some(strings) => strings,
            None => &json["shared"]["stringArray"],
        };
        let strings = strings.as_array().unwrap();
        let column = |table: &str, name: &str| {
            let table = &thread[table];
            let column = table[name].as_array().unwrap();
            assert_eq!(column.len() as u64, table["length"], "{name}");
            column.clone()
        };
        let index = |value: &Value| usize::try_from(value.as_u64().unwrap()).unwrap();
        let (funcs, frames) = (column("funcTable", "name"), column("frameTable", "func"));
        let stacks = column("stackTable", "frame");
        for stack in column("samples", "stack") {
            let frame = index(&stacks[index(&stack)]);
            let name = index(&funcs[index(&frames[frame])]);
            found.push(strings[name].as_str().unwrap().to_owned());
        }
        column("samples", "weight");
        for name in column("markers", "name") {
            found.push(format!(
                "marker {}",
                strings[index(&name)].as_str().unwrap()
            ));
        }
    }
    let expected = [
        "marker Throttled",
        "clear_page",
        "clear_page",
        "do_idle",
        "nft_do_chain [nf_tables]",
        "[unknown] 0xffffffffdeadbeef",
        "marker Lost",
        "[user cr3=0x200000]",
        "[user cr3=0x300000]",
        "marker Blind",
    ];
    assert_eq!(found, expected);
    let error = place.error("report -i @/umpire.data --firefox @/b.json --core 5");
    assert!(error.contains("left to draw"), "{error}");
}

#[test]
fn a_part_of_a_profile_is_used_with_a_warning() {
    let whole = file(&header(), &records());
    let place = Place::new(&whole[..whole.len() - 60]);
    let text = place.output("report -i @/umpire.data");
    assert!(
        text.contains("# Warning: the file ends without a trailer"),
        "{text}"
    );
    assert!(text.contains("# Samples: 7 "), "{text}");
    let (_, notes) = place.run("script -i @/umpire.data").unwrap();
    assert!(
        notes.starts_with("umpire: the file ends without a trailer"),
        "{notes}"
    );
    let (_, notes) = place.run("report -i @/umpire.data --folded").unwrap();
    assert!(notes.contains("without a trailer"), "{notes}");
    let json: Value = serde_json::from_str(&place.output("report -j -i @/umpire.data")).unwrap();
    assert_eq!(json["complete"], false);
    assert!(json["warnings"][0].as_str().unwrap().contains("trailer"));
}

#[test]
fn bad_files_are_named_with_what_to_do() {
    let place = Place::new(b"nothing of ours");
    let check = |line: &str, parts: &[&str]| {
        let error = place.error(line);
        for part in parts {
            assert!(error.contains(part), "{line}: {error}");
        }
    };
    check(
        "report -i @/none",
        &["none: there is no such file", "umpire record"],
    );
    check(
        "script -i @/umpire.data",
        &["umpire.data: it is no profile"],
    );
    check("report -i @", &["cannot be read"]);
    check(
        "report -i @/umpire.data --symbols @/umpire.data",
        &[
            "umpire.data: line 1: 'nothing of ours'",
            "address type name",
        ],
    );
}

/// A reader that goes away is no error, and one that is full is.
#[test]
fn an_output_that_takes_no_more() {
    struct Full(io::ErrorKind);
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let place = Place::with(&records());
    let input = place.path("umpire.data");
    let words = ["umpire", "script", "-i", input.to_str().unwrap()];
    let matches = command().try_get_matches_from(words).unwrap();
    let Command::Script(flags) = Cli::from_arg_matches(&matches).unwrap().command else {
        panic!("another command");
    };
    let run = |kind| {
        let end = script(&flags, &mut Full(kind), &mut Vec::new());
        end.map_err(UserError::from)
    };
    assert!(run(io::ErrorKind::BrokenPipe).is_ok());
    let error = run(io::ErrorKind::StorageFull).unwrap_err();
    assert_eq!(error.status(), ExitStatus::HOST_FAILURE);
}
