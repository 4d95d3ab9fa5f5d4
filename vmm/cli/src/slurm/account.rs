//! `umpire slurm account`: the audit's files are read, and the job's AdminComment is written.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use umpire_arbiterd::{ArbiterConfig, AuditConfig};
use umpire_slurm::{AccountReader, FIELDS_END, JobAccount, accounts_row};

use super::{ask_slurm, node, print};
use crate::exit::{ExitStatus, UserError};
use crate::flags::SlurmAccountFlags;

/// How long the arbiter has to see that nothing of a job runs any more.
const ENDS_WITHIN: Duration = Duration::from_secs(2);
/// How often it is tried: the accounts hear late of a job, and other nodes write, too.
const TRIES: u32 = 5;

/// `umpire slurm account`.
pub(super) fn run(flags: &SlurmAccountFlags) -> Result<ExitStatus, UserError> {
    let node = node(flags.node.as_ref())?;
    let config = flags.config.to_string_lossy().replace("%n", &node);
    let config = ArbiterConfig::read(Path::new(&config)).map_err(UserError::bad_input)?;
    let audit = config.audit.ok_or_else(|| {
        UserError::bad_input("the arbiter writes no audit, so nobody knows what a job's counters came to; give it one (audit = \"FILE\")")
    })?;
    let until = Instant::now() + ENDS_WITHIN;
    let account = loop {
        let mut reader = AccountReader::new(flags.job);
        read_audit(&audit, &mut reader).map_err(|error| {
            UserError::bad_input(format!("the audit {}: {error}", audit.path.display()))
        })?;
        if !reader.goes_on() || until <= Instant::now() {
            break reader.finish(unix_ms());
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    if let Some(account) = account {
        write_comment(flags.job, &node, &account)?;
        print(&format!("{account}\n"))?;
    }
    Ok(ExitStatus::SUCCESS)
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    })
}

/// Reads what the audit has of the job. No more than one of its files is in memory.
fn read_audit(audit: &AuditConfig, reader: &mut AccountReader) -> io::Result<()> {
    // From the newest on, so that one that is renamed meanwhile is opened twice and none is missed.
    let mut files = vec![File::open(&audit.path)?];
    for number in 1..=audit.keep {
        let mut name = audit.path.clone().into_os_string();
        name.push(format!(".{number}"));
        match File::open(PathBuf::from(name)) {
            Ok(file) => files.push(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    // Before its first record nothing is of the job.
    let mut has_begun = false;
    for mut file in files.into_iter().rev() {
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes);
        has_begun |= reader.is_in(&text);
        if has_begun {
            reader.read(&text);
        }
    }
    Ok(())
}

/// By the accounts, and not by the controller, which changes no job that has ended.
fn write_comment(job: u32, node: &str, account: &JobAccount) -> Result<(), UserError> {
    let number = job.to_string();
    let delimiter = format!("--delimiter={FIELDS_END}");
    let fields = "jobidraw,jobid,admincomment";
    let asks = ["-n", "-X", "-P", &delimiter, "-j", &number, "-o", fields];
    let mut why = UserError::bad_input(format!("the accounts know no job {job}"));
    for tries in 0..TRIES {
        if tries > 0 {
            // Nodes of one job that write at the same moment do not do so again.
            let own = u64::from(std::process::id() % 8);
            std::thread::sleep(Duration::from_millis(100 + 50 * own));
        }
        let Some((name, before)) = accounts_row(&ask_slurm("sacct", &asks)?, job) else {
            continue;
        };
        let comment = account.comment(&before, node);
        let comment = comment.map_err(|why| UserError::bad_input(format!("job {job}: {why}")))?;
        if comment == before {
            return Ok(());
        }
        let (which, what) = (format!("jobid={name}"), format!("AdminComment={comment}"));
        let asks = ["-i", "modify", "job", "where", &which, "set", &what];
        why = match ask_slurm("sacctmgr", &asks) {
            // What others have written meanwhile is looked at, too.
            Ok(_) => UserError::bad_input(format!("job {job}: others write its AdminComment")),
            Err(error) => error,
        };
    }
    Err(why)
}
