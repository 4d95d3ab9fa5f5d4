use serde_json::json;

use super::{AccountReader, AccountsRow, JobAccount, epilog};

/// A lease in the audit: its number, whose, and the uid that asked for it.
type Of<'a> = (u64, &'a str, &'a str, u32);

const JOB: Of<'_> = (7, "jobs", "slurm 12.0", 0);
const MONITOR: Of<'_> = (1, "monitor", "likwid", 900);

/// One record: when, of which lease, what happened, what it holds of three, and for whom it left.
fn record(seq: u64, time_ms: u64, of: Of<'_>, event: &str, holds: u32, by: Option<u64>) -> String {
    let (lease, tenant, label, asked) = of;
    let mut record = json!({
        "seq": seq, "time_ms": time_ms, "event": event, "lease": lease, "tenant": tenant,
        "label": label, "uid": 1000, "why": if by.is_some() { "preempted" } else { "granted" }, "asked_by_uid": asked, "wants": 3, "holds": holds,
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
fn a_job_pays_for_what_it_took_alone() {
    let ended = (4_000, JOB, "ended", 3, None);
    let is = |ms| vec![("monitor".to_owned(), ms)];
    // The monitor, which wants three, had two when the job came: another has had one for long.
    let one_of_two = [
        (2_000, MONITOR, "leaving", 2, Some(7)),
        (2_000, JOB, "holds", 3, None),
        (2_000, MONITOR, "holds", 1, Some(7)),
        ended,
    ];
    let account_of = |records: &[_]| account(records, 9_000).expect("it had counters");
    let of_two = account_of(&one_of_two);
    assert!(!of_two.is_incomplete);
    assert_eq!(of_two.blind_ms.into_iter().collect::<Vec<_>>(), is(2_000));
    // Of one that had lost before the first record that is there, it is not known how much.
    let unknown = account_of(&[one_of_two[1], one_of_two[2], ended]);
    assert!(unknown.is_incomplete && unknown.blind_ms.is_empty());
    // What was taken last is back first, also of two that are there.
    let other = (8, "jobs", "slurm 13.0", 0);
    let two = |first: Of<'_>, second: Of<'_>| {
        blind(account(
            &[
                (1_000, MONITOR, "holds", 3, None),
                (1_000, JOB, "holds", 1, None),
                (1_000, other, "holds", 1, None),
                (2_000, MONITOR, "holds", 2, Some(first.0)),
                (2_000, MONITOR, "holds", 1, Some(second.0)),
                (3_000, MONITOR, "holds", 2, None),
                ended,
            ],
            9_000,
        ))
    };
    assert_eq!(two(JOB, other), is(2_000));
    assert_eq!(two(other, JOB), is(1_000));
}

#[test]
fn a_lease_that_is_lost_at_a_restart_ends_the_account() {
    let mut reader = AccountReader::new(12);
    reader.read(&record(1, 1_000, JOB, "holds", 3, None));
    assert!(reader.goes_on());
    // As the arbiter writes it: nobody asked in another's place, nothing lacked.
    let lost = json!({
        "seq": 2, "time_ms": 5_000, "event": "ended", "why": "no-such-counters", "lease": 7,
        "tenant": "jobs", "uid": 1000, "pid": 1, "label": "slurm 12.0", "cpus": "0-1",
        "asked_by": "site", "asked_by_uid": 0, "wants": 3, "holds": 0, "blind_ms": 0,
    });
    reader.read(&lost.to_string());
    assert!(!reader.goes_on());
    let account = reader.finish(9_000).expect("it had counters");
    let found = (account.counters, account.lacked_ms, account.is_incomplete);
    assert_eq!(found, (3, 40, false));
}

#[test]
fn an_audit_with_gaps_does_not_say_that_nobody_was_blind() {
    let began = record(5, 1_000, JOB, "holds", 3, None);
    let ended = |seq| record(seq, 2_000, JOB, "ended", 3, None);
    let lost = "{\"seq\":6,\"time_ms\":1,\"event\":\"lost\",\"records\":4}\n";
    let plain = "{\"seq\":6,\"time_ms\":1,\"event\":\"begins\"}\n";
    let far = record(9, 3_000, MONITOR, "holds", 3, None);
    let whole = "3 counters, lacked for 0.0 s, nobody blind";
    let gap = "3 counters, lacked for 0.0 s, audit incomplete";
    for (text, expected) in [
        (format!("{began}{plain}{}", ended(7)), whole),
        // Before the job, and after its end.
        (
            format!(
                "{}{began}{}{far}",
                record(1, 1, MONITOR, "holds", 3, None),
                ended(6)
            ),
            whole,
        ),
        (format!("{began}{lost}{}", ended(7)), gap),
        (format!("{began}{}", ended(8)), gap),
        // Its end is among what is missing, or its begin is.
        (format!("{began}{far}"), gap),
        (ended(8), gap),
    ] {
        let mut reader = AccountReader::new(12);
        reader.read(&text);
        let account = reader.finish(3_000).expect("it had counters");
        assert_eq!(account.to_string(), expected, "{text}");
    }
    let blind = JobAccount {
        counters: 1,
        blind_ms: [("monitor".to_owned(), 1_500)].into(),
        is_incomplete: true,
        ..JobAccount::default()
    };
    let said = "1 counter, audit incomplete, blind at least: monitor 1.5 s";
    assert_eq!(blind.to_string(), said);
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
    let text =
        "4\u{1f}3_1\u{1f}1\u{1f}first\n3\u{1f}3_2\u{1f}2\u{1f}a|b\nc\n5\u{1f}5+0\u{1f}1\u{1f}\n";
    let row = |name: &str, is_alone, comment: &str| {
        Some(AccountsRow {
            name: name.to_owned(),
            is_alone,
            comment: comment.to_owned(),
        })
    };
    let find = AccountsRow::find;
    assert_eq!(find(text, 3), row("3_2", false, "a|b\nc"));
    assert_eq!(find(text, 4), row("3_1", true, "first"));
    assert_eq!(find(text, 5), row("5+0", true, ""));
    assert_eq!(find(text, 6), None);
    assert_eq!(find("", 6), None);
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
