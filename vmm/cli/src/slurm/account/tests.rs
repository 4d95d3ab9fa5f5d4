use std::fs;
use std::io::Write;

use serde_json::json;

use super::*;

const JOB: u32 = 12;
const OWN: &str = "umpire n1: 3 counters, nobody blind";
const OTHERS: &str = "umpire n2: 3 counters, nobody blind";

/// Accounts of one job, in a time of their own: a command takes 50 ms.
struct Told {
    /// The job's comment, once the accounts know of it.
    comment: String,
    known_after: Duration,
    nodes: u32,
    /// What others do to the comment before it is read for the so-maniest time.
    others: fn(u32, &mut String),
    is_refusing: bool,
    now: Duration,
    reads: u32,
    writes: u32,
}

impl Told {
    fn new(comment: &str, nodes: u32, others: fn(u32, &mut String)) -> Self {
        Told {
            comment: comment.to_owned(),
            known_after: Duration::ZERO,
            nodes,
            others,
            is_refusing: false,
            now: Duration::ZERO,
            reads: 0,
            writes: 0,
        }
    }

    /// Writes to them, and says what went wrong.
    fn write(&mut self) -> Option<String> {
        let account = JobAccount {
            counters: 3,
            ..JobAccount::default()
        };
        let written = write_comment(self, JOB, "n1", &account);
        written.err().map(|error| error.to_string())
    }
}

impl Accounts for Told {
    fn ask(&mut self, program: &str, words: &[&str]) -> Result<String, UserError> {
        self.now += Duration::from_millis(50);
        if program == "sacct" {
            self.reads += 1;
            (self.others)(self.reads, &mut self.comment);
            if self.now < self.known_after {
                return Ok(String::new());
            }
            let fields = [
                &JOB.to_string(),
                "12",
                &self.nodes.to_string(),
                &self.comment,
            ];
            let fields = fields.map(str::to_owned);
            return Ok(format!("{}\n", fields.join(&FIELDS_END.to_string())));
        }
        self.writes += 1;
        if self.is_refusing {
            return Err(UserError::bad_input("sacctmgr: access is denied"));
        }
        let ["-i", "modify", "job", "where", "jobid=12", "set", what] = words else {
            panic!("{program} {words:?}");
        };
        let comment = what.strip_prefix("AdminComment=").expect("a comment");
        comment.clone_into(&mut self.comment);
        Ok(String::new())
    }

    fn elapsed(&self) -> Duration {
        self.now
    }

    fn sleep(&mut self, time: Duration) {
        self.now += time;
    }
}

fn nobody(_: u32, _: &mut String) {}

#[test]
fn a_comment_is_written_once_and_looked_at() {
    let mut alone = Told::new("", 1, nobody);
    assert_eq!(alone.write(), None);
    assert_eq!(
        (alone.comment.as_str(), alone.writes, alone.reads),
        (OWN, 1, 2)
    );
    // With others who may have read before, it is looked at again a second later.
    let mut both = Told::new(OTHERS, 2, nobody);
    assert_eq!(both.write(), None);
    assert_eq!(both.comment, format!("{OTHERS}; {OWN}"));
    assert_eq!((both.writes, both.reads), (1, 3));
    assert!(both.now > Duration::from_secs(1), "{:?}", both.now);
    // What an epilog of before has written stays.
    let mut again = Told::new(OWN, 1, nobody);
    assert_eq!((again.write(), again.writes), (None, 0));
}

#[test]
fn what_another_node_writes_over_is_written_again() {
    // It had read when nothing was there yet, and writes after this one's first look.
    let over = |read: u32, comment: &mut String| {
        if read == 3 {
            OTHERS.clone_into(comment);
        }
    };
    let mut told = Told::new("", 2, over);
    assert_eq!(told.write(), None);
    assert_eq!(told.comment, format!("{OTHERS}; {OWN}"));
    assert_eq!(told.writes, 2);
    // One that does so each time is given up.
    let always = |_: u32, comment: &mut String| OTHERS.clone_into(comment);
    let mut told = Told::new("", 2, always);
    let why = told.write().expect("it is given up");
    assert!(why.contains("others write its AdminComment"), "{why}");
    assert!(
        told.now >= TRIES_WITHIN && told.now < GIVES_UP_AFTER,
        "{:?}",
        told.now
    );
}

#[test]
fn accounts_that_hear_late_are_waited_for() {
    let mut late = Told::new("", 1, nobody);
    late.known_after = Duration::from_secs(4);
    assert_eq!((late.write(), late.comment.as_str()), (None, OWN));
    // It was read to be there once, and there is no time for another look: whatever the pauses, 100
    // to 599 ms each, the first look is in time, and the second not, a second later.
    let mut last = Told::new("", 2, nobody);
    last.known_after = TRIES_WITHIN - Duration::from_millis(1300);
    assert_eq!((last.write(), last.comment.as_str()), (None, OWN));
    assert!(
        last.writes == 1 && last.now >= TRIES_WITHIN,
        "{:?}",
        last.now
    );
    let mut never = Told::new("", 1, nobody);
    never.known_after = Duration::from_secs(60);
    let why = never.write().expect("it is given up");
    assert!(why.contains("know no job 12"), "{why}");
    assert!(never.now < GIVES_UP_AFTER, "{:?}", never.now);
}

#[test]
fn what_cannot_be_written_is_said() {
    let mut refusing = Told::new("", 1, nobody);
    refusing.is_refusing = true;
    let why = refusing.write().expect("it is refused");
    assert!(
        why.contains("access is denied") && refusing.writes > 1,
        "{why}"
    );
    let mut quoted = Told::new("'of the site'", 1, nobody);
    let why = quoted.write().expect("it is left alone");
    assert!(
        why.contains("quotation marks") && quoted.writes == 0,
        "{why}"
    );
}

/// A record of a lease of the job's with two counters.
fn record(seq: u64, event: &str) -> String {
    let record = json!({
        "seq": seq, "time_ms": 1_000 * seq, "event": event, "why": "granted", "lease": 7,
        "label": "slurm 12.0", "tenant": "jobs", "uid": 1000, "asked_by_uid": 0, "holds": 2,
        "blind_ms": 0,
    });
    format!("{record}\n")
}

/// An audit in this folder, with one older file.
fn audit(folder: &Path) -> AuditConfig {
    AuditConfig {
        path: folder.join("audit"),
        size: 4096,
        keep: 1,
        age_ms: None,
    }
}

#[test]
fn files_of_before_the_job_are_not_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let audit = audit(folder.path());
    let older = audit.older(1);
    fs::write(&older, record(1, "holds")).expect("a file");
    fs::write(&audit.path, record(2, "ended")).expect("a file");
    let older = File::options().write(true).open(older).expect("a file");
    let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
    older.set_modified(at(100_000)).expect("it is ours");
    // By its start a part of the job is there, unless the file was written before that, whatever
    // the clocks say.
    for (begin, is_incomplete) in [
        (None, false),
        (Some(100_500), false),
        (Some(101_000), true),
        (Some(u64::MAX), false),
    ] {
        let mut files = AuditFiles::new(&audit, AccountReader::new(JOB), begin);
        files.read().expect("they can be read");
        let account = files.reader.finish(5_000).expect("it had counters");
        assert_eq!(account.counters, 2);
        assert_eq!(account.is_incomplete, is_incomplete, "{begin:?}");
    }
}

#[test]
fn a_record_that_is_half_there_is_read_when_it_is_whole() {
    let folder = tempfile::tempdir().expect("a folder");
    let audit = audit(folder.path());
    let ended = record(2, "ended");
    let (half, rest) = ended.split_at(ended.len() / 2);
    fs::write(&audit.path, record(1, "holds") + half).expect("a file");
    let mut files = AuditFiles::new(&audit, AccountReader::new(JOB), None);
    files.read().expect("it can be read");
    assert!(files.reader.goes_on());
    let mut file = File::options()
        .append(true)
        .open(&audit.path)
        .expect("a file");
    file.write_all(rest.as_bytes()).expect("it is ours");
    files.read().expect("it can be read");
    assert!(!files.reader.goes_on());
    assert!(
        !files
            .reader
            .finish(5_000)
            .expect("it had counters")
            .is_incomplete
    );
}
