//! What options make of a report, beside what perf makes of them.

use clap::Parser;

use crate::profile::program_tests::{ReportLine, with_callers};

/// The table that a command line prints, without what is known of the file.
fn table(words: &[&str]) -> String {
    let (text, _) = with_callers().printed(words);
    let (_, table) = text
        .split_once("# Event count (approx.): 4000\n#\n")
        .unwrap_or_else(|| panic!("{text}"));
    table.to_owned()
}

fn check(words: &[&str], expected: &str) {
    assert_eq!(table(words), expected, "{words:?}");
}

#[test]
fn fields_are_columns() {
    check(
        &["--no-children", "-F", "overhead,sym"],
        "\
# Overhead  Symbol
# ........  ..............
#
    50.00%  [k] clear_page
    50.00%  [.] main
",
    );
    check(
        &["-F", "+period", "-t,"],
        "\
# Children,Self,Samples,Period,Command,Shared Object,Symbol
100.00%,50.00%,2,2000,prog,prog,[.] main
75.00%,0.00%,0,0,prog,prog,[.] [unknown]
50.00%,50.00%,2,2000,prog,[kernel.kallsyms],[k] clear_page
50.00%,0.00%,0,0,prog,[kernel.kallsyms],[k] do_syscall_64
",
    );
    let period = table(&["-F", "+period", "-t,"]);
    check(&["--show-total-period", "-t", ","], &period);
    let samples = "# Samples,Symbol\n2,[k] clear_page\n2,[.] main\n";
    check(&["-F", "sample,sym", "-t,"], samples);
    check(
        &["-F", "overhead_children,sym", "-t,"],
        "\
# Children,Symbol
100.00%,[.] main
75.00%,[.] [unknown]
50.00%,[k] clear_page
50.00%,[k] do_syscall_64
",
    );
    check(
        &["-F", "overhead,sym", "-n", "-t,", "--stdio"],
        "# Overhead,Samples,Symbol\n50.00%,2,[k] clear_page\n50.00%,2,[.] main\n",
    );
    check(
        &["-F", "overhead", "-s", "cpu", "-t,"],
        "# Overhead,VM/vCPU\n100.00%,7/0\n",
    );
    check(
        &["--no-children", "-s", "+cpu", "-t,"],
        "\
# Overhead,Samples,Command,Shared Object,Symbol,VM/vCPU
50.00%,2,prog,[kernel.kallsyms],[k] clear_page,7/0
50.00%,2,prog,prog,[.] main,7/0
",
    );
}

#[test]
fn a_separator_is_in_no_name() {
    let words = ["--no-children", "-F", "overhead,sym", "-t", "_"];
    check(
        &words,
        "# Overhead_Symbol\n50.00%_[k] clear.page\n50.00%_[.] main\n",
    );
    let words = ["--no-children", "-F", "overhead,sym", "-t", "\\t"];
    check(
        &words,
        "# Overhead\tSymbol\n50.00%\t[k] clear_page\n50.00%\t[.] main\n",
    );
}

#[test]
fn no_separator_has_what_stands_for_it() {
    for text in [".", "..", ", .", "", "\n"] {
        let line = ["report", "-t", text];
        assert!(ReportLine::try_parse_from(line).is_err(), "{text:?}");
    }
}

#[test]
fn percentages_are_parts_of_all_tasks_and_places() {
    // Those of the chosen samples, and what they are parts of.
    fn check(words: &[&str], rows: &[&str], head: &str) {
        let own = ["--no-children", "-F", "overhead,sym", "-t,"];
        let (text, _) = with_callers().printed(&[&own[..], words].concat());
        let found: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(found, rows, "{words:?}");
        assert!(text.contains(head), "{words:?}: {text}");
    }
    let (half, whole) = (
        &["50.00%,[k] clear_page"][..],
        &["100.00%,[k] clear_page"][..],
    );
    let both = &["50.00%,[k] clear_page", "50.00%,[.] main"][..];
    let parts = "\
# Event count (approx.): 2000
# Percentages are parts of all 4 samples' events: 4000; of those that were chosen with \
                 --percentage relative
#
";
    let (two, four) = ("(approx.): 2000\n#\n", "(approx.): 4000\n#\n");
    for words in [
        &["-S", "clear_page"][..],
        &["--symbol-filter", "clear"],
        &["-d", "[kernel.kallsyms]"],
        &["-S", "clear_page", "--percent-limit", "50"],
        &["-S", "clear_page", "--percentage", "absolute"],
    ] {
        check(words, half, parts);
    }
    check(&["-S", "clear_page", "--percentage=relative"], whole, two);
    for words in [
        &["-c", "prog"][..],
        &["--pid", "40"],
        &["--tid", "40"],
        &["-C", "0"],
    ] {
        check(words, both, four);
    }
    check(
        &["--pid", "41"],
        &[],
        "# Event count (approx.): 0\n# Percentages are parts of all 4",
    );
    check(
        &["-C", "1", "-S", "clear_page"],
        &[],
        "# Event count (approx.): 0\n#\n",
    );
    check(
        &["--time", "100,", "-S", "main"],
        &[],
        "# Event count (approx.): 0\n#\n",
    );
    let (text, _) = with_callers().printed(&["-j", "-S", "main"]);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let event = &json["events"][0];
    assert_eq!(event["events"], 2000);
    assert_eq!(event["of_events"], 4000);
    let main = &event["rows"][0];
    assert_eq!(main["overhead"], 50.0);
    assert_eq!(main["children"], 50.0);
    let (text, _) = with_callers().printed(&["-S", "main", "--hierarchy"]);
    assert!(
        text.contains("\n    50.00%               2  prog\n"),
        "{text}"
    );
}

#[test]
fn small_rows_are_counted() {
    check(
        &[
            "-t,",
            "--percent-limit",
            "60",
            "-F",
            "overhead_children,sym",
        ],
        "\
# Children,Symbol
100.00%,[.] main
75.00%,[.] [unknown]
# 2 more rows have less than 60 % each
",
    );
}

#[test]
fn keys_stand_below_each_other() {
    let expected = "\
#       Overhead   Samples  Command / Shared Object / Symbol
# ..............  ........  ................................
#
   100.00%               4  prog
       50.00%            2     [kernel.kallsyms]
          50.00%         2        [k] clear_page
       50.00%            2     prog
          50.00%         2        [.] main
";
    check(&["--hierarchy"], expected);
    let none = format!("{}no entry >= 51.00%", " ".repeat(31));
    let text = table(&["--hierarchy", "--percent-limit", "51"]);
    let lines: Vec<&str> = text.lines().skip(3).collect();
    assert_eq!(lines, ["   100.00%               4  prog", &none]);
}

/// The lines of the tree below the row of `symbol`.
fn tree(words: &[&str], symbol: &str) -> Vec<String> {
    let words = [&["--no-children", "-F", "overhead,sym"], words].concat();
    let text = table(&words);
    let rows = text.lines().skip_while(|line| !line.ends_with(symbol));
    let tree = rows.skip(1).take_while(|line| !line.contains("] main"));
    tree.map(str::to_owned).collect()
}

#[test]
fn callers_are_written_as_perf_writes_them() {
    let flat = [
        "           25.00%",
        "                main",
        "                [unknown]",
        "",
        "           25.00%",
        "                main",
        "                [broken chain]",
        "",
    ];
    assert_eq!(tree(&["-g", "flat"], "[.] main"), flat);
    let folded = ["1 main;[unknown]", "1 main;[broken chain]"];
    assert_eq!(tree(&["-gfolded,count"], "[.] main"), folded);
    let period = ["2000 [unknown];main;do_syscall_64;clear_page"];
    let words = ["--call-graph=folded,period,caller"];
    assert_eq!(tree(&words, "clear_page"), period);
    let fractal = [
        "            |",
        "            ---main",
        "               |",
        "               |--50.00%--[unknown]",
        "               |",
        "                --50.00%--[broken chain]",
        "",
    ];
    assert_eq!(tree(&["-g", "fractal"], "[.] main"), fractal);
    let mut rest = fractal.map(str::to_owned);
    rest[5] = "                --50.00%--[...]".to_owned();
    assert_eq!(tree(&["-g", "fractal,0,1"], "[.] main"), rest);
    let counted = tree(&["-g", "count"], "[.] main");
    assert!(
        counted.contains(&"               |--1--[unknown]".to_owned()),
        "{counted:?}"
    );
    assert_eq!(tree(&["-g", "none"], "[.] main"), [""; 0]);
}

#[test]
fn where_samples_are_all_callers_lead_there() {
    let words = ["-F", "overhead_children,overhead,sym"];
    let table = |graph: &[&str]| table(&[&words[..], graph].concat());
    let tree = "\
   100.00%  50.00%  [.] main
            |
            |--50.00%--main
            |          do_syscall_64
            |          clear_page
            |
            |--25.00%--[unknown]
            |          main
            |
             --25.00%--[broken chain]
                       main

    75.00%   0.00%  [.] [unknown]
            |
            ---[unknown]
               main
               |
                --50.00%--do_syscall_64
                          clear_page

    50.00%  50.00%  [k] clear_page
            |
            ---[unknown]
               main
               do_syscall_64
               clear_page

    50.00%   0.00%  [k] do_syscall_64
            |
            ---do_syscall_64
               clear_page

";
    for words in [&["-g"][..], &["-G"], &["-g", "caller"]] {
        let text = table(words);
        assert!(text.ends_with(tree), "{words:?}: {text}");
    }
    let paths = table(&["-g", "folded,caller,count"]);
    assert!(
        paths.contains("clear_page\n2 [unknown];main;do_syscall_64;clear_page\n"),
        "{paths}"
    );
}

#[test]
fn the_order_and_the_least_part_are_as_with_perf() {
    let inverted = [
        "            |",
        "            ---[unknown]",
        "               main",
        "               do_syscall_64",
        "               clear_page",
        "",
    ];
    assert_eq!(tree(&["-G"], "clear_page"), inverted);
    assert_eq!(tree(&["-g", "graph,0.5,caller"], "clear_page"), inverted);
    let trunk = ["            |", "            ---main", ""];
    for words in [
        &["-g", "callee,26"][..],
        &["-g", "--percent-limit", "26"],
        &["--percent-limit", "26", "-g"],
    ] {
        assert_eq!(tree(words, "[.] main"), trunk, "{words:?}");
    }
    let all = tree(&["-g", "0.5", "--percent-limit", "26"], "[.] main");
    assert_eq!(all.len(), 7, "{all:?}");
}

#[test]
fn a_profile_says_when_and_how_it_was_recorded() {
    let header = "\
# ========
# captured on    : 2023-11-14T22:13:20Z
# header version : 1
# vm : 7 (web)
# umpire version : 0.1.0
# nrcpus online : 2
# nrcpus avail : 2
# cores : 2
# host : a processor, Linux 6.1
# cmdline : umpire record -a
# event : name = cycles, { sample_period, sample_freq } = 1000, freq = 0, the counts are hardware
# sample duration :      0.000 ms
# ========
#
";
    let place = with_callers();
    assert_eq!(place.printed(&["--header-only"]).0, header);
    let (text, _) = place.printed(&["--header"]);
    let (plain, _) = place.printed(&[]);
    assert_eq!(text, format!("{header}{plain}"));
}
