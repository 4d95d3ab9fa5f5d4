use serde_json::json;

use super::{AccountReader, JobAccount, accounts_row, epilog};

/// A lease in the audit: its number, whose, and the uid that asked for it.
type Of<'a> = (u64, &'a str, &'a str, u32);

const JOB: Of<'_> = (7, "jobs", "slurm 12.0", 0);
const MONITOR: Of<'_> = (1, "monitor", "likwid", 900);

/// One record: when, of which lease, what happened, what it holds of three, and for whom it left.
fn record(seq: u64, time_ms: u64, of: Of<'_>, event: &str, holds: u32, by: Option<u64>) -> String {
    let (lease, tenant, label, asked) = of;
    let mut record = json!({
        "seq": seq, "time_ms": time_ms, "event": event, "lease": lease, "tenant": tenant,
        "label": label, "uid": 1000, "asked_by_uid": asked, "wants": 3, "holds": holds,
        "blind_ms": if lease == JOB.0 { 40 } else { 0 }, "message": "words", "cpus": "0-1",
    });
    if let Some(by) = by {
        record["by_lease"] = by.into();
    }
    format!("{record}\n")
}

fn account(records: &[(u64, Of<'_>, &str, u32, Option<u64>)], now_ms: u64) -> Option<JobAccount> {
    let mut reader = AccountReader::new(12);
    let lines = records.iter().zip(1..);
    let lines = lines
        .map(|((time, of, event, holds, by), seq)| record(seq, *time, *of, event, *holds, *by));
    let text: String = lines.collect();
    reader.read(&text);
    // What is read again, because a file was renamed meanwhile, counts once.
    reader.read(&text);
    reader.finish(now_ms)
}

fn blind(account: Option<JobAccount>) -> Vec<(String, u64)> {
    account
        .expect("it had counters")
        .blind_ms
        .into_iter()
        .collect()
}

#[test]
fn a_monitor_is_blind_from_the_loss_to_the_end_of_the_job() {
    let other = (8, "jobs", "slurm 13.0", 0);
    let begin = [
        (1_000, MONITOR, "holds", 3, None),
        (2_000, MONITOR, "leaving", 3, Some(7)),
        (2_000, JOB, "waits", 0, None),
        (2_100, MONITOR, "holds", 1, Some(7)),
        (2_100, JOB, "holds", 3, None),
    ];
    let with = |more: &[_], now_ms| blind(account(&[&begin[..], more].concat(), now_ms));
    let is = |ms| vec![("monitor".to_owned(), ms)];
    let ended = (5_100, JOB, "ended", 3, None);
    // It has them back at once.
    assert_eq!(
        with(&[ended, (5_100, MONITOR, "holds", 3, None)], 9_000),
        is(6_000)
    );
    // It waits for another's, or ends, and the job is not to blame any more.
    assert_eq!(
        with(&[ended, (8_000, MONITOR, "holds", 3, None)], 9_000),
        is(6_000)
    );
    assert_eq!(
        with(&[(3_100, MONITOR, "ended", 1, None), ended], 9_000),
        is(2_000)
    );
    // The arbiter has not said that it has ended.
    assert_eq!(with(&[], 4_100), is(4_000));
    // What another job takes besides is that one's; and who ends first gives back first.
    let took = (3_100, MONITOR, "holds", 0, Some(8));
    let back = (4_100, MONITOR, "holds", 1, None);
    let records = [took, (3_900, other, "ended", 1, None), back, ended];
    assert_eq!(with(&records, 9_000), is(6_000));
    // The job gives one back before it ends.
    assert_eq!(
        with(&[(3_100, MONITOR, "holds", 2, None), ended], 9_000),
        is(4_000)
    );
    // Another lease has the number after a restart without a journal.
    let again = (3_100, (7, "monitor", "other", 900), "holds", 3, None);
    assert_eq!(with(&[again], 9_000), is(2_000));
}

#[test]
fn only_what_root_asked_for_is_a_jobs() {
    let forged = (7, "jobs", "slurm 12.0", 1000);
    let of_another = (7, "jobs", "slurm 120.0", 0);
    for of in [forged, of_another] {
        let records = [
            (1_000, MONITOR, "holds", 3, None),
            (2_000, MONITOR, "holds", 1, Some(7)),
            (2_000, of, "holds", 3, None),
            (3_000, of, "ended", 3, None),
        ];
        assert_eq!(account(&records, 4_000), None);
    }
    // Who waited in vain had none.
    let records = [
        (1_000, JOB, "waits", 0, None),
        (2_000, JOB, "ended", 0, None),
    ];
    assert_eq!(account(&records, 4_000), None);
    // What is no record of a lease is passed over.
    let mut reader = AccountReader::new(12);
    reader.read("{\"event\":\"begins\"}\nno JSON \"holds\"\n{\"event\":\"vm\",\"holds\":1}\n");
    assert!(!reader.goes_on() && reader.finish(1).is_none());
}

#[test]
fn the_comment_has_one_part_for_a_node() {
    let records = [
        (1_000, (1, "a; umpire n2: b'", "", 900), "holds", 3, None),
        (2_000, (1, "a; umpire n2: b'", "", 900), "holds", 1, Some(7)),
        (2_000, JOB, "holds", 3, None),
        (3_050, JOB, "ended", 3, None),
    ];
    let blind = account(&records, 4_000).expect("it had counters");
    let whole = "umpire n1: 3 counters, lacked for 0.0 s, blind: a_ umpire n2_ b_ 2.1 s";
    let nobody = JobAccount {
        counters: 1,
        ..JobAccount::default()
    };
    for (before, expected) in [
        ("", whole.to_owned()),
        ("checked by me", format!("checked by me; {whole}")),
        ("umpire n1: of before; more", format!("{whole}; more")),
        (
            "umpire n10: 1 counter",
            format!("umpire n10: 1 counter; {whole}"),
        ),
        (whole, whole.to_owned()),
    ] {
        assert_eq!(blind.comment(before, "n1"), Ok(expected), "{before}");
    }
    assert_eq!(
        nobody.comment("", "n2").as_deref(),
        Ok("umpire n2: 1 counter, nobody blind")
    );
    assert!(nobody.comment("{\"of\": \"the site\"}", "n2").is_err());
}

#[test]
fn the_row_of_a_task_is_found_among_those_of_its_array() {
    let text = "4\u{1f}3_1\u{1f}first\n3\u{1f}3_2\u{1f}a|b\nc\n5\u{1f}5+0\u{1f}\n";
    let row = |name: &str, comment: &str| Some((name.to_owned(), comment.to_owned()));
    assert_eq!(accounts_row(text, 3), row("3_2", "a|b\nc"));
    assert_eq!(accounts_row(text, 4), row("3_1", "first"));
    assert_eq!(accounts_row(text, 5), row("5+0", ""));
    assert_eq!(accounts_row(text, 6), None);
    assert_eq!(accounts_row("", 6), None);
}

#[test]
fn the_epilog_ends_well_and_names_no_path_that_breaks_it() {
    let text = epilog("/usr/bin/umpire", "/etc/umpire/arbiter-%n.toml").expect("paths");
    assert!(
        text.ends_with("\nexit 0\n") && !text.contains('@'),
        "{text}"
    );
    assert!(text.contains("'/usr/bin/umpire' slurm account "), "{text}");
    assert!(epilog("/it's", "/etc/x").is_err() && epilog("/x", "/a\nb").is_err());
}
