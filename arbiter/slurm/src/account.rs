//! What the counters of a job came to on a node, from the audit of the arbiter there: how many it
//! had, and how long others were blind for it. And how its AdminComment says so.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::{self, Display};

use serde::Deserialize;

/// Between the fields of what `sacct` is asked for: in nobody's comment.
pub const FIELDS_END: char = '\u{1f}';
/// As whom slurmd asks for the leases of jobs.
const ROOT: u32 = 0;

/// What every record of the audit has, whatever it says.
#[derive(Debug, Deserialize)]
struct Numbered {
    seq: u64,
    event: String,
}

/// A record of the audit, as far as it says what a lease holds.
#[derive(Debug, Deserialize)]
struct AuditLine {
    seq: u64,
    time_ms: u64,
    event: String,
    why: Option<String>,
    lease: u64,
    label: String,
    tenant: String,
    uid: u32,
    asked_by_uid: Option<u32>,
    holds: u32,
    blind_ms: u64,
    by_lease: Option<u64>,
}

/// Counters that one lease lost to another.
#[derive(Debug)]
struct Loss {
    by: u64,
    count: u32,
    /// The record that says so.
    seq: u64,
    since_ms: u64,
    /// The lease that took them has ended, and they are not back: nobody is blind for it any more.
    is_over: bool,
}

/// A lease that is there, whoever's.
#[derive(Debug)]
struct Standing {
    tenant: String,
    holds: u32,
    losses: Vec<Loss>,
}

/// Reads an audit for one job, record by record.
#[derive(Debug)]
pub struct AccountReader {
    label: String,
    last: u64,
    /// Records are missing behind one of the job: before its end, or after it.
    lacks_some: bool,
    has_begun: bool,
    /// The job's leases that have not ended, with the time that they lacked counters.
    own: BTreeMap<u64, u64>,
    others: BTreeMap<u64, Standing>,
    account: JobAccount,
}

/// What the counters of a job came to on a node. Times are counters times time, as all of the
/// arbiter's are: two counters for a second are two seconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobAccount {
    /// The most counters that a step of it had on a CPU.
    pub counters: u32,
    /// How long it lacked some of them itself, in milliseconds.
    pub lacked_ms: u64,
    /// How long tenants were blind for it, in milliseconds.
    pub blind_ms: BTreeMap<String, u64>,
    /// The audit lacks records of the job's time: it is that much at least.
    pub is_incomplete: bool,
}

impl AccountReader {
    /// Reads for this job.
    #[must_use]
    pub fn new(job: u32) -> Self {
        AccountReader {
            label: format!("slurm {job}."),
            last: 0,
            lacks_some: false,
            has_begun: false,
            own: BTreeMap::new(),
            others: BTreeMap::new(),
            account: JobAccount::default(),
        }
    }

    /// Whether a part of the audit has anything of the job: cheaper than to read it.
    #[must_use]
    pub fn is_in(&self, text: &str) -> bool {
        text.contains(&self.label)
    }

    /// Reads records, the oldest first; those that were read before are passed over.
    pub fn read(&mut self, text: &str) {
        for text in text.lines() {
            // A record of what a lease holds is parsed once. One of something else, such as a VM's
            // own line (`vm`), lacks a field of that, and is parsed again for its number.
            if let Ok(line) = serde_json::from_str::<AuditLine>(text) {
                if self.advance(line.seq, &line.event) {
                    self.note(&line);
                }
            } else if let Ok(other) = serde_json::from_str::<Numbered>(text) {
                self.advance(other.seq, &other.event);
            }
            // What is not written to its end yet is no record.
        }
    }

    /// Whether a record is new; if so, whether it is the next one is noted.
    fn advance(&mut self, seq: u64, event: &str) -> bool {
        let is_new = seq > self.last;
        if is_new {
            let is_gap = self.last > 0 && seq > self.last + 1;
            self.lacks_some |= self.has_begun && (is_gap || event == "lost");
            self.last = seq;
        }
        is_new
    }

    /// Whether a lease of the job has not ended by what was read.
    #[must_use]
    pub fn goes_on(&self) -> bool {
        !self.own.is_empty()
    }

    /// What it comes to at `now_ms`, since 1970. `None`: the job had no counters here.
    #[must_use]
    pub fn finish(mut self, now_ms: u64) -> Option<JobAccount> {
        self.account.is_incomplete |= self.lacks_some && self.goes_on();
        while let Some((&lease, _)) = self.own.first_key_value() {
            self.end(lease, now_ms);
        }
        (self.account.counters > 0).then_some(self.account)
    }

    fn note(&mut self, line: &AuditLine) {
        // Anybody may call a lease like that; only slurmd's plugin asks as root, for a job.
        let is_own =
            line.label.starts_with(&self.label) && line.asked_by_uid.unwrap_or(line.uid) == ROOT;
        if is_own {
            self.account.counters = self.account.counters.max(line.holds);
            let is_granted = line.event == "holds" && line.why.as_deref() == Some("granted");
            let is_begin = line.event == "waits" || is_granted;
            let is_known = self.own.contains_key(&line.lease);
            self.account.is_incomplete |= self.lacks_some || !(is_known || is_begin);
            self.has_begun = true;
            // Of one that is lost at a restart the journal may have less than the audit.
            let lacked_ms = self.own.entry(line.lease).or_default();
            *lacked_ms = line.blind_ms.max(*lacked_ms);
        } else {
            // An arbiter without a journal gives the number of one of before to another.
            self.end(line.lease, line.time_ms);
            self.note_other(line);
        }
        if line.event == "ended" {
            self.end(line.lease, line.time_ms);
            self.end_of_taker(line.lease, false, line.time_ms);
            self.others.remove(&line.lease);
        }
    }

    /// A lease of the job has ended, if it is one.
    fn end(&mut self, lease: u64, now_ms: u64) {
        if let Some(lacked_ms) = self.own.remove(&lease) {
            self.account.lacked_ms += lacked_ms;
            self.end_of_taker(lease, true, now_ms);
        }
    }

    /// What became of a lease that is not the job's.
    fn note_other(&mut self, line: &AuditLine) {
        // Of what it had before its first record nothing is known, so that one is no loss.
        let is_new = !self.others.contains_key(&line.lease);
        let by_own = line.by_lease.is_some_and(|by| self.own.contains_key(&by));
        self.account.is_incomplete |= is_new && by_own && line.event == "holds";
        let standing = self.others.entry(line.lease).or_insert_with(|| Standing {
            tenant: line.tenant.clone(),
            holds: line.holds,
            losses: Vec::new(),
        });
        let before = std::mem::replace(&mut standing.holds, line.holds);
        let has_ended = line.event == "ended";
        if has_ended || line.holds > before {
            let mut back = if has_ended {
                u32::MAX
            } else {
                line.holds - before
            };
            // What those had who have ended is free first, and then what was taken last.
            standing
                .losses
                .sort_by_key(|loss| (!loss.is_over, Reverse(loss.seq)));
            let mut left = Vec::new();
            for mut loss in std::mem::take(&mut standing.losses) {
                let count = loss.count.min(back);
                back -= count;
                if !loss.is_over && self.own.contains_key(&loss.by) {
                    let time_ms = line.time_ms.saturating_sub(loss.since_ms);
                    self.account.add(&standing.tenant, count, time_ms);
                }
                loss.count -= count;
                left.extend((loss.count > 0).then_some(loss));
            }
            standing.losses = left;
        } else if let (Some(by), true) = (line.by_lease, line.holds < before) {
            standing.losses.push(Loss {
                by,
                count: before - line.holds,
                seq: line.seq,
                since_ms: line.time_ms,
                is_over: false,
            });
        }
    }

    /// A lease that took counters of others has ended.
    fn end_of_taker(&mut self, lease: u64, is_own: bool, now_ms: u64) {
        for standing in self.others.values_mut() {
            let losses = standing.losses.iter_mut();
            for loss in losses.filter(|loss| loss.by == lease && !loss.is_over) {
                loss.is_over = true;
                if is_own {
                    let time_ms = now_ms.saturating_sub(loss.since_ms);
                    self.account.add(&standing.tenant, loss.count, time_ms);
                }
            }
        }
    }
}

impl JobAccount {
    fn add(&mut self, tenant: &str, count: u32, time_ms: u64) {
        if count > 0 {
            let sum = self.blind_ms.entry(tenant.to_owned()).or_default();
            *sum += u64::from(count) * time_ms;
        }
    }

    /// What a job's AdminComment is to be: what it is, and this of the node in place of what it had
    /// of that before.
    ///
    /// # Errors
    /// It cannot be written without changing what others wrote.
    pub fn comment(&self, before: &str, node: &str) -> Result<String, &'static str> {
        // Of sacctmgr's arguments, quotation marks come out as others.
        if before.contains(['\'', '"']) {
            return Err(
                "its AdminComment has quotation marks, which sacctmgr would change, so nothing is \
                 added to it",
            );
        }
        let own = format!("umpire {node}: ");
        let mut parts: Vec<String> = before.split("; ").map(str::to_owned).collect();
        parts.retain(|part| !part.is_empty());
        // Where it is, so that the nodes of a job do not write for ever who is the last.
        let place = parts.iter().position(|part| part.starts_with(&own));
        let part = format!("{own}{self}");
        match place {
            Some(place) => parts[place] = part,
            None => parts.push(part),
        }
        Ok(parts.join("; "))
    }
}

impl Display for JobAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = |ms: u64| format!("{}.{} s", ms / 1000, ms % 1000 / 100);
        let s = if self.counters == 1 { "" } else { "s" };
        write!(f, "{} counter{s}", self.counters)?;
        if self.lacked_ms > 0 {
            write!(f, ", lacked for {}", seconds(self.lacked_ms))?;
        }
        if self.is_incomplete {
            f.write_str(", audit incomplete")?;
        } else if self.blind_ms.is_empty() {
            return f.write_str(", nobody blind");
        }
        let at_least = if self.is_incomplete { " at least" } else { "" };
        for (number, (tenant, ms)) in self.blind_ms.iter().enumerate() {
            // A tenant's name is what the site likes; the line stays one, with its parts.
            let is_plain = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.' | ' ');
            let name: String = tenant
                .chars()
                .map(|c| if is_plain(c) { c } else { '_' })
                .collect();
            if number == 0 {
                write!(f, ", blind{at_least}: ")?;
            } else {
                f.write_str(", ")?;
            }
            write!(f, "{name} {}", seconds(*ms))?;
        }
        Ok(())
    }
}

/// A job, as the accounts have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccountsRow {
    /// The job, or the task of an array: `1`, `3_2`.
    pub name: String,
    /// It has one node, so nobody else writes its comment at its end.
    pub is_alone: bool,
    /// Its AdminComment.
    pub comment: String,
}

impl AccountsRow {
    /// What `sacct` is to print.
    pub const FIELDS: &str = "jobidraw,jobid,nnodes,admincomment";

    /// Of what it printed: the job's row, since for an array or a heterogeneous job others come
    /// along.
    #[must_use]
    pub fn find(text: &str, job: u32) -> Option<Self> {
        let mut rows: Vec<String> = Vec::new();
        for line in text.lines() {
            match rows.last_mut() {
                // A comment of several lines.
                Some(row) if !line.contains(FIELDS_END) => *row = format!("{row}\n{line}"),
                _ => rows.push(line.to_owned()),
            }
        }
        let mut rows = rows.iter().map(|row| row.splitn(4, FIELDS_END));
        rows.find_map(|mut fields| {
            let number: u32 = fields.next()?.parse().ok()?;
            let row = AccountsRow {
                name: fields.next()?.to_owned(),
                is_alone: fields.next()? == "1",
                comment: fields.next()?.to_owned(),
            };
            (number == job).then_some(row)
        })
    }
}

/// The epilog of slurmd, which says at a job's end what its counters came to: `program` is
/// `umpire`, `config` the arbiter's file, with `%n` for the node's name.
///
/// # Errors
/// A path that cannot stand in a script.
pub fn epilog(program: &str, config: &str) -> Result<String, String> {
    for path in [program, config] {
        if path.contains('\'') || path.chars().any(char::is_control) {
            return Err(format!(
                "{path:?} cannot stand in a script; give another path"
            ));
        }
    }
    let text = include_str!("epilog.sh").replace("@PROGRAM@", program);
    Ok(text.replace("@CONFIG@", config))
}

#[cfg(test)]
mod tests;
