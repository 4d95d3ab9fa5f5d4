//! Tests of the forms. The columns of the expected texts were taken from output
//! of perf 6.1; what stands behind the metric is in one column in all rows, as
//! in perf since 6.2.

use super::print::{Form, Interval, Whole, write_interval, write_whole};
use super::*;

fn row(event: &str, value: Value) -> Row {
    let counted = matches!(value, Value::Counted(_));
    Row {
        event: event.to_owned(),
        unit: Unit::EVENTS,
        value,
        provenance: counted.then_some(Provenance::Hardware),
        enabled_ns: 1_000_000,
        running_ns: if counted { 1_000_000 } else { 0 },
        variance: None,
        whose: None,
        metric: None,
    }
}

fn metric(value: f64, unit: &str) -> Option<Metric> {
    let digits = if unit == "insn per cycle" { 2 } else { 3 };
    let unit = unit.to_owned();
    Some(Metric {
        value,
        unit,
        digits,
    })
}

fn run_time() -> Row {
    Row {
        unit: Unit::MSEC_OF_NS,
        provenance: Some(Provenance::Exact),
        metric: metric(0.346, "CPUs utilized"),
        enabled_ns: 1_234_560_000,
        running_ns: 1_234_560_000,
        ..row("run-time", Value::Counted(1_234_560_000))
    }
}

/// One row of every kind.
fn rows() -> Vec<Row> {
    vec![
        run_time(),
        row("cycles", Value::Counted(1_234_567_890)),
        Row {
            metric: metric(0.81, "insn per cycle"),
            provenance: Some(Provenance::Scaled),
            running_ns: 498_700,
            ..row("instructions", Value::Counted(1_000_000_123))
        },
        Row {
            provenance: Some(Provenance::Derived),
            ..row("branches:u", Value::Counted(7))
        },
        row("cache-misses", Value::NotCounted),
        Row {
            enabled_ns: 0,
            ..row("LLC-loads", Value::NotSupported)
        },
    ]
}

fn once(seconds: f64) -> Runs {
    let mut runs = Runs::default();
    runs.add(seconds);
    runs
}

fn twice() -> Runs {
    let mut runs = once(1.0);
    runs.add(1.0);
    runs
}

/// Fields with this between, and with `provenance` one more.
fn fields(separator: &str, provenance: bool) -> Form {
    let separator = separator.to_owned();
    Form::Csv {
        separator,
        provenance,
    }
}

#[test]
fn whose_time_has_elapsed_is_said_where_the_guests_is_virtual() {
    let said = |virtual_time| {
        let mut out = Vec::new();
        let whole = Whole {
            title: "VM 7",
            rows: &[],
            elapsed: &once(1.5),
            virtual_time,
            repeated: false,
            summary: false,
        };
        write_whole(&whole, &Form::Table { grouped: true }, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let line = text.lines().find(|line| line.contains("elapsed"));
        line.unwrap().trim().to_owned()
    };
    assert_eq!(said(false), "1.500000000 seconds time elapsed");
    assert_eq!(
        said(true),
        "1.500000000 seconds time elapsed (the host's; the guest's time is virtual)"
    );
}

fn whole(rows: &[Row], elapsed: &Runs, form: &Form) -> String {
    let mut out = Vec::new();
    let whole = Whole {
        title: "VM 7 (web)",
        rows,
        elapsed,
        virtual_time: false,
        repeated: elapsed.count() > 1,
        summary: false,
    };
    write_whole(&whole, form, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

fn interval(rows: &[Row], first: bool, form: &Form) -> String {
    let mut out = Vec::new();
    let interval = Interval {
        end_ns: 100_203_576,
        rows,
        first,
    };
    write_interval(&interval, form, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

#[test]
fn the_table_is_that_of_perf() {
    let expected = "
 Performance counter stats for 'VM 7 (web)':

          1,234.56 msec = run-time                       #    0.346 CPUs utilized
     1,234,567,890      h cycles
     1,000,000,123      ~ instructions                   #    0.81  insn per cycle           (49.87%)
                 7      d branches:u
     <not counted>        cache-misses                                                       (0.00%)
   <not supported>        LLC-loads

       1.001603849 seconds time elapsed

 Counts: = exact (every event was seen); h hardware (by a physical counter); d derived (computed from another quantity); ~ scaled (extrapolated from a part)

";
    assert_eq!(
        whole(
            &rows(),
            &once(1.001_603_849),
            &Form::Table { grouped: true }
        ),
        expected
    );
}

#[test]
fn the_points_of_metrics_are_in_one_column() {
    let with = |digits| Row {
        metric: Some(Metric {
            value: 12.3456,
            unit: "of it".to_owned(),
            digits,
        }),
        ..row("e", Value::Counted(1))
    };
    let rows: Vec<Row> = (0..4).map(with).collect();
    let text = whole(&rows, &once(1.0), &Form::Table { grouped: true });
    let metrics: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split_once('#').map(|(_, metric)| metric))
        .collect();
    assert_eq!(
        metrics,
        [
            "   12     of it",
            "   12.3   of it",
            "   12.35  of it",
            "   12.346 of it",
        ]
    );
}

#[test]
fn several_runs_show_their_spread() {
    let mut elapsed = Runs::default();
    for seconds in [0.000_903, 0.001_401, 0.000_903] {
        elapsed.add(seconds);
    }
    let rows = [
        Row {
            unit: Unit::MSEC_OF_NS,
            variance: Some(36.04),
            metric: metric(0.389, "CPUs utilized"),
            ..row("task-clock", Value::Counted(420_854))
        },
        Row {
            variance: Some(0.0),
            enabled_ns: 0,
            ..row("cycles", Value::NotSupported)
        },
        Row {
            variance: Some(0.685),
            ..row("faults", Value::Counted(48))
        },
        Row {
            variance: Some(1.23),
            running_ns: 498_700,
            ..row("both", Value::Counted(48))
        },
    ];
    let expected = "
 Performance counter stats for 'VM 7 (web)' (3 runs):

              0.42 msec h task-clock                     #    0.389 CPUs utilized            ( +- 36.04% )
   <not supported>        cycles
                48      h faults                                                             ( +-  0.69% )
                48      h both                                                               ( +-  1.23% )  (49.87%)

          0.001069 +- 0.000166 seconds time elapsed  ( +- 15.53% )

 Counts: h hardware (by a physical counter)

";
    assert_eq!(
        whole(&rows, &elapsed, &Form::Table { grouped: true }),
        expected
    );
}

#[test]
fn intervals_and_vcpus_come_first() {
    let rows = [
        Row {
            whose: Some(Target::Vcpu(0)),
            ..run_time()
        },
        Row {
            whose: Some(Target::Core(12)),
            ..row("cycles", Value::Counted(80))
        },
    ];
    let text = interval(&rows, true, &Form::Table { grouped: true });
    let expected = "\
# Counts: = exact (every event was seen); h hardware (by a physical counter); \
d derived (computed from another quantity); ~ scaled (extrapolated from a part); \
s simulated (made up, by a declared rate or as ticks of virtual time)
#           time             counts unit   events
     0.100203576 vCPU0                1,234.56 msec = run-time                       #    0.346 CPUs utilized
     0.100203576 core12                     80      h cycles
";
    assert_eq!(text, expected);
    let later = interval(&rows, false, &Form::Table { grouped: true });
    assert_eq!(
        later,
        expected.split_inclusive('\n').skip(2).collect::<String>()
    );
    assert_eq!(
        interval(&rows, false, &fields(",", true)),
        "     0.100203576,vCPU0,1234.56,msec,run-time,1234560000,100.00,0.346,CPUs utilized,exact\n     \
         0.100203576,core12,80,,cycles,1000000,100.00,,,hardware\n"
    );
}

#[test]
fn csv_has_the_fields_of_perf() {
    let expected = "\
1234.56,msec,run-time,1234560000,100.00,0.346,CPUs utilized,exact
1234567890,,cycles,1000000,100.00,,,hardware
1000000123,,instructions,498700,49.87,0.81,insn per cycle,scaled
7,,branches:u,1000000,100.00,,,derived
<not counted>,,cache-misses,0,0.00,,,
<not supported>,,LLC-loads,0,0.00,,,
";
    let csv = fields(",", true);
    assert_eq!(whole(&rows(), &once(1.0), &csv), expected);
    let of_runs = Row {
        variance: Some(0.684),
        ..row("faults", Value::Counted(49))
    };
    assert_eq!(
        whole(&[of_runs, row("cycles", Value::NotCounted)], &twice(), &csv),
        "49,,faults,0.68%,1000000,100.00,,,hardware\n<not counted>,,cycles,,0,0.00,,,\n"
    );
    // The fields are those of -r, whatever was counted.
    assert_eq!(
        whole(&[row("cycles", Value::NotCounted)], &twice(), &csv),
        "<not counted>,,cycles,,0,0.00,,,\n"
    );
    assert_eq!(
        whole(
            &[row("a:\"b\":u", Value::Counted(1))],
            &once(1.0),
            &fields(":", true)
        ),
        "1::\"a:\"\"b\"\":u\":1000000:100.00:::hardware\n"
    );
}

/// Readers count fields: seven, and one more for each of the time, whose count it is, and the
/// variance.
#[test]
fn lines_have_as_many_fields_as_perf_prints() {
    let counted = |text: &str| -> Vec<usize> {
        let each = text.lines();
        each.map(|line| line.split(';').count()).collect()
    };
    let form = fields(";", false);
    assert_eq!(counted(&whole(&rows(), &once(1.0), &form)), [7; 6]);
    assert_eq!(counted(&whole(&rows(), &twice(), &form)), [8; 6]);
    assert_eq!(counted(&interval(&rows(), true, &form)), [8; 6]);
    let apart: Vec<Row> = rows()
        .into_iter()
        .map(|row| Row {
            whose: Some(Target::Vcpu(1)),
            ..row
        })
        .collect();
    assert_eq!(counted(&interval(&apart, true, &form)), [9; 6]);
    assert_eq!(
        whole(&[row("cycles", Value::Counted(9))], &once(1.0), &form),
        "9;;cycles;1000000;100.00;;\n"
    );
}

/// A sum below intervals says so where those have their time.
#[test]
fn a_sum_below_intervals_is_called_so() {
    let summary = |form: &Form| {
        let mut out = Vec::new();
        let rows = [Row {
            metric: metric(0.5, "GHz"),
            ..row("cycles", Value::Counted(9))
        }];
        let whole = Whole {
            title: "VM 7",
            rows: &rows,
            elapsed: &once(1.0),
            virtual_time: false,
            repeated: false,
            summary: true,
        };
        write_whole(&whole, form, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    };
    let csv = fields(",", false);
    let line = "         summary,9,,cycles,1000000,100.00,0.500,GHz\n";
    assert_eq!(summary(&csv), line);
    let only = Form::MetricOnly(Box::new(csv));
    assert_eq!(summary(&only), "         summary,0.500\n");
    assert!(summary(&Form::Json).starts_with("{\"counter-value\":"));
    let table = summary(&Form::Table { grouped: false });
    assert!(table.contains("counter stats for 'VM 7':"), "{table}");
}

/// perf has no signs between thousands in the C locale, which is how scripts get numbers.
#[test]
fn thousands_are_apart_in_the_table_alone() {
    let plain = whole(&rows(), &once(1.0), &Form::Table { grouped: false });
    assert!(
        plain.contains("\n        1234567890      h cycles\n"),
        "{plain}"
    );
    assert!(
        plain.contains("\n           1234.56 msec = run-time"),
        "{plain}"
    );
    let csv = whole(&rows(), &once(1.0), &fields(";", false));
    assert!(!csv.contains(','), "{csv}");
}

#[test]
fn json_has_the_keys_of_perf() {
    let rows = [
        Row {
            whose: Some(Target::Vcpu(3)),
            ..run_time()
        },
        Row {
            whose: Some(Target::Core(1)),
            variance: Some(4.408),
            running_ns: 498_712,
            ..row("cycles", Value::Counted(u64::MAX))
        },
        row("cache-misses", Value::NotCounted),
    ];
    assert_eq!(
        whole(&rows, &once(1.0), &Form::Json),
        concat!(
            r#"{"vcpu":3,"counter-value":"1234.560000","unit":"msec","event":"run-time","event-runtime":1234560000,"pcnt-running":100.0,"metric-value":0.346,"metric-unit":"CPUs utilized","provenance":"exact"}"#,
            "\n",
            r#"{"core":1,"counter-value":"18446744073709551615.000000","unit":"","event":"cycles","variance":4.41,"event-runtime":498712,"pcnt-running":49.87,"provenance":"hardware"}"#,
            "\n",
            r#"{"counter-value":"<not counted>","unit":"","event":"cache-misses","event-runtime":0,"pcnt-running":0.0}"#,
            "\n",
        )
    );
    assert!(interval(&rows, true, &Form::Json).starts_with(r#"{"interval":0.100203576,"vcpu":3,"#));
}

/// A count that nobody took has neither metric, mark nor provenance, whatever
/// the row says; and a metric that is no number is none.
#[test]
fn nothing_is_said_of_what_was_not_counted() {
    let odd = Row {
        provenance: Some(Provenance::Exact),
        metric: metric(1.0, "insn per cycle"),
        variance: Some(1.0),
        ..row("cycles", Value::NotCounted)
    };
    let broken = Row {
        metric: metric(f64::NAN, "insn per cycle"),
        ..row("instructions", Value::Counted(0))
    };
    for form in [Form::Table { grouped: true }, fields(",", true), Form::Json] {
        let text = whole(&[odd.clone(), broken.clone()], &once(1.0), &form);
        assert!(!text.contains("insn"), "{text}");
        assert!(!text.contains("exact"), "{text}");
        assert!(!text.contains("NaN") && !text.contains("1.00%"), "{text}");
        assert!(
            !text.contains("metric") && !text.contains("variance"),
            "{text}"
        );
    }
}

#[test]
fn percent_running() {
    let check = |value, enabled_ns, running_ns, expected: f64| {
        let row = Row {
            enabled_ns,
            running_ns,
            ..row("e", value)
        };
        assert_eq!(row.percent_running(), expected);
    };
    check(Value::Counted(1), 0, 0, 100.0);
    check(Value::Counted(1), 4, 1, 25.0);
    check(Value::Counted(1), 4, 5, 100.0);
    check(Value::NotCounted, 0, 0, 0.0);
    check(Value::NotCounted, 4, 0, 0.0);
}

#[test]
fn runs_have_mean_and_error() {
    let mut runs = Runs::default();
    assert_eq!(
        (runs.mean(), runs.error(), runs.percent()),
        (None, None, None)
    );
    runs.add(2.0);
    assert_eq!((runs.mean(), runs.error()), (Some(2.0), None));
    runs.add(4.0);
    runs.add(6.0);
    // Standard deviation 2, of three runs.
    let error = 2.0 / 3.0f64.sqrt();
    assert_eq!(runs.mean(), Some(4.0));
    assert!((runs.error().unwrap() - error).abs() < 1e-12);
    assert!((runs.percent().unwrap() - error / 4.0 * 100.0).abs() < 1e-12);
    let mut zero = Runs::default();
    zero.add(0.0);
    zero.add(0.0);
    assert_eq!(zero.percent(), Some(0.0));
}

#[test]
fn metrics_alone() {
    let only = |form: Form| Form::MetricOnly(Box::new(form));
    let mut rows = rows();
    let expected = "
 Performance counter stats for 'VM 7 (web)':

 CPUs utilized  insn per cycle
         0.346            0.81

       1.000000000 seconds time elapsed

";
    assert_eq!(
        whole(&rows, &once(1.0), &only(Form::Table { grouped: true })),
        expected
    );
    let csv = only(fields(",", true));
    let expected = "CPUs utilized,insn per cycle\n0.346,0.81\n";
    assert_eq!(whole(&rows, &once(1.0), &csv), expected);
    let expected = "{\"metrics\":{\"CPUs utilized\":0.346,\"insn per cycle\":0.81}}\n";
    assert_eq!(whole(&rows, &once(1.0), &only(Form::Json)), expected);
    // Of two vCPUs, one of which lost its counter.
    for row in &mut rows {
        row.whose = Some(Target::Vcpu(0));
    }
    rows.push(Row {
        whose: Some(Target::Vcpu(1)),
        ..run_time()
    });
    let expected = "vCPU 0,0.346,0.81\nvCPU 1,0.346,<not counted>\n";
    let found = interval(&rows, false, &csv);
    assert_eq!(found.replace("     0.100203576,", ""), expected);
    // And one whose counter nobody has.
    let expected = "vCPU 0,0.346,<not supported>\nvCPU 1,0.346,<not counted>\n";
    for row in rows.iter_mut().filter(|row| row.event == "instructions") {
        row.value = Value::NotSupported;
    }
    let found = interval(&rows, false, &csv);
    assert_eq!(found.replace("     0.100203576,", ""), expected);
}
