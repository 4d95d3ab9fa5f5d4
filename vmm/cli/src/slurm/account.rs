//! `umpire slurm account`: the audit's files are read, and the job's AdminComment is written.

use std::fs::{File, Metadata};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use umpire_arbiterd::{ArbiterConfig, AuditConfig, unix_ms};
use umpire_slurm::{AccountReader, AccountsRow, FIELDS_END, JobAccount};

use super::{ask_slurm, node, print};
use crate::exit::{ExitStatus, UserError};
use crate::flags::SlurmAccountFlags;

/// How long the arbiter has to see that nothing of a job runs any more.
const ENDS_WITHIN: Duration = Duration::from_secs(2);
/// How long it is tried, all in all: the accounts hear late of a job, and other nodes write, too.
const TRIES_WITHIN: Duration = Duration::from_secs(10);
/// When the last of Slurm's commands is given up: before the epilog gives up this program.
const GIVES_UP_AFTER: Duration = Duration::from_secs(12);
/// By how much the controller's clock, by which a job has begun, and the node's may differ.
const CLOCKS_DIFFER: Duration = Duration::from_secs(600);

/// `umpire slurm account`.
pub(super) fn run(flags: &SlurmAccountFlags) -> Result<ExitStatus, UserError> {
    let began = Instant::now();
    let node = node(flags.node.as_ref())?;
    let config = flags.config.to_string_lossy().replace("%n", &node);
    let config = ArbiterConfig::read(Path::new(&config)).map_err(UserError::bad_input)?;
    let audit = config.audit.ok_or_else(|| {
        UserError::bad_input("the arbiter writes no audit, so nobody knows what a job's counters came to; give it one (audit = \"FILE\")")
    })?;
    // Slurm 22.05 does not say it to an epilog, newer ones do.
    let begin = std::env::var("SLURM_JOB_START_TIME").ok();
    let begin = begin.and_then(|text| text.parse().ok());
    let mut files = AuditFiles::new(&audit, AccountReader::new(flags.job), begin);
    loop {
        let is_late = began.elapsed() >= ENDS_WITHIN;
        match files.read() {
            Ok(()) if is_late || !files.reader.goes_on() => break,
            Ok(()) => {}
            // It is renamed just now.
            Err(error) if error.kind() == io::ErrorKind::NotFound && !is_late => {}
            Err(error) => {
                let what = format!("the audit {}: {error}", audit.path.display());
                return Err(UserError::bad_input(what));
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    if let Some(account) = files.reader.finish(unix_ms()) {
        write_comment(&mut OfCluster(began), flags.job, &node, &account)?;
        print(&format!("{account}\n"))?;
    }
    Ok(ExitStatus::SUCCESS)
}

/// The files of an audit that grows, as far as they were read for a job.
struct AuditFiles<'a> {
    audit: &'a AuditConfig,
    reader: AccountReader,
    /// Before its first record nothing is of the job.
    has_begun: bool,
    /// The newest file's device and number, and how far it was read.
    newest: Option<((u64, u64), u64)>,
    /// What was not written since is of no use.
    since: Option<SystemTime>,
}

impl<'a> AuditFiles<'a> {
    /// `begin`: when the job did, in seconds since 1970, if that is known.
    fn new(audit: &'a AuditConfig, reader: AccountReader, begin: Option<u64>) -> Self {
        let begin = begin.and_then(|begin| UNIX_EPOCH.checked_add(Duration::from_secs(begin)));
        AuditFiles {
            audit,
            reader,
            has_begun: false,
            newest: None,
            since: begin.and_then(|begin| begin.checked_sub(CLOCKS_DIFFER)),
        }
    }

    /// Reads what is new: in the newest file alone, as long as that is the same.
    fn read(&mut self) -> io::Result<()> {
        let newest = File::open(&self.audit.path)?;
        let facts = newest.metadata()?;
        let file = (facts.dev(), facts.ino());
        let from = match self.newest {
            Some((of, from)) if of == file => from,
            // The reader passes over what it has read of the older ones.
            _ => {
                self.read_older()?;
                0
            }
        };
        let whole = self.read_file(newest, from)?;
        self.newest = Some((file, from + whole));
        Ok(())
    }

    /// No more than one file is in memory.
    fn read_older(&mut self) -> io::Result<()> {
        // From the newest on, so that one that is renamed meanwhile is opened twice and none is
        // missed.
        let mut files = Vec::new();
        for number in 1..=self.audit.keep {
            match File::open(self.audit.older(number)) {
                Ok(file) => files.push(file),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        for file in files.into_iter().rev() {
            if self.is_of_use(&file.metadata()?) {
                self.read_file(file, 0)?;
            }
        }
        Ok(())
    }

    fn is_of_use(&self, facts: &Metadata) -> bool {
        let written = facts.modified().ok();
        let is_older = self.since.zip(written).map(|(since, at)| at < since);
        is_older != Some(true)
    }

    /// Reads a file from there on, and says how much of that is whole lines.
    fn read_file(&mut self, mut file: File, from: u64) -> io::Result<u64> {
        file.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let end = bytes.iter().rposition(|byte| *byte == b'\n');
        bytes.truncate(end.map_or(0, |end| end + 1));
        let text = String::from_utf8_lossy(&bytes);
        self.has_begun |= self.reader.is_in(&text);
        if self.has_begun {
            self.reader.read(&text);
        }
        Ok(bytes.len() as u64)
    }
}

/// Slurm's accounts, and the time in which they are written.
trait Accounts {
    /// What one of Slurm's commands prints.
    fn ask(&mut self, program: &str, words: &[&str]) -> Result<String, UserError>;

    /// Since this program began.
    fn elapsed(&self) -> Duration;

    fn sleep(&mut self, time: Duration);
}

/// Those of the cluster. When this program began.
struct OfCluster(Instant);

impl Accounts for OfCluster {
    fn ask(&mut self, program: &str, words: &[&str]) -> Result<String, UserError> {
        ask_slurm(
            program,
            words,
            GIVES_UP_AFTER.saturating_sub(self.elapsed()),
        )
    }

    fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }

    fn sleep(&mut self, time: Duration) {
        std::thread::sleep(time);
    }
}

/// By the accounts, and not by the controller, which changes no job that has ended. Nobody can hold
/// a comment, so this is best effort: nodes that write in the same moment look again.
fn write_comment(
    accounts: &mut impl Accounts,
    job: u32,
    node: &str,
    account: &JobAccount,
) -> Result<(), UserError> {
    let number = job.to_string();
    let delimiter = format!("--delimiter={FIELDS_END}");
    let fields = AccountsRow::FIELDS;
    let asks = ["-n", "-X", "-P", &delimiter, "-j", &number, "-o", fields];
    let mut why = UserError::bad_input(format!("the accounts know no job {job}"));
    let mut is_written = false;
    for tries in 0.. {
        if tries > 0 && accounts.elapsed() >= TRIES_WITHIN {
            break;
        }
        if let Some(row) = AccountsRow::find(&accounts.ask("sacct", &asks)?, job) {
            let comment = account.comment(&row.comment, node);
            let comment =
                comment.map_err(|why| UserError::bad_input(format!("job {job}: {why}")))?;
            let is_there = comment == row.comment;
            if is_there && (is_written || row.is_alone) {
                return Ok(());
            }
            is_written = is_there;
            if is_there {
                // Another node that had read before this one wrote writes now.
                accounts.sleep(Duration::from_secs(1));
            } else {
                let (which, what) = (
                    format!("jobid={}", row.name),
                    format!("AdminComment={comment}"),
                );
                let asks = ["-i", "modify", "job", "where", &which, "set", &what];
                why = match accounts.ask("sacctmgr", &asks) {
                    // What others have written meanwhile is looked at, too.
                    Ok(_) => {
                        UserError::bad_input(format!("job {job}: others write its AdminComment"))
                    }
                    Err(error) => error,
                };
            }
        }
        accounts.sleep(pause(node, tries));
    }
    // It was there, and there is no time to look once more.
    if is_written { Ok(()) } else { Err(why) }
}

/// Nodes of one job that write at the same moment do not do so again.
fn pause(node: &str, tries: u32) -> Duration {
    let mut hasher = DefaultHasher::new();
    (node, std::process::id(), tries).hash(&mut hasher);
    Duration::from_millis(100 + hasher.finish() % 500)
}

#[cfg(test)]
mod tests;
