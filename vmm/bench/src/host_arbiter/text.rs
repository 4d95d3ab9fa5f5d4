//! The report for people.

use std::io::{self, Write};

use super::{
    ArbiterReport, CoreRow, GroupsReport, LoadedTraps, RequestsRow, RestartReport, RevocationRow,
    decisions, groups, requests, restart, revocation, traps,
};
use crate::beside::{Compared, TARGET, write_compared};
use crate::perfmon::TrapsRow;
use crate::report::{Report, millis, pair, table, verdict};

impl Report for ArbiterReport {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let processor = self.processor.as_deref().unwrap_or("unknown processor");
        writeln!(out, "The host's arbiter\n{processor}")?;
        core(&self.core, out)?;
        requests(&self.requests, out)?;
        if let Some(sync) = self.sync {
            let sync = pair(sync);
            writeln!(out, "a sync of the disk by itself, p50 / p99 [us]: {sync}")?;
        }
        revocations(&self.revocation, out)?;
        self.restart.iter().try_for_each(|it| it.text(out))?;
        self.groups.iter().try_for_each(|it| it.text(out))?;
        self.traps.iter().try_for_each(|it| it.text(out))?;
        let failures = &self.failures;
        failures
            .iter()
            .try_for_each(|one| writeln!(out, "failed: {}: {}", one.part, one.reason))
    }
}

fn core(rows: &[CoreRow], out: &mut dyn Write) -> io::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    writeln!(out)?;
    let all_within = rows.iter().all(|row| row.within_growth);
    let rows = rows.iter().map(|row| {
        [
            row.leases.to_string(),
            row.cpus.to_string(),
            row.scope.to_owned(),
            format!("{:.0}", row.ns),
            format!("{:.0}", row.per_second),
            verdict(Some(row.met)).to_owned(),
        ]
    });
    let titles = ["leases", "CPUs", "scope", "decision [ns]", "per second", ""];
    table(titles, 0..=4, rows, out)?;
    writeln!(
        out,
        "one thread, no socket; wanted: {:.0} a second; growth by CPUs times log(leases) at most: {}",
        decisions::TARGET,
        verdict(Some(all_within))
    )
}

fn requests(rows: &[RequestsRow], out: &mut dyn Write) -> io::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    writeln!(out)?;
    let rows = rows.iter().map(|row| {
        [
            row.clients.to_string(),
            row.leases.to_string(),
            format!("{:.0}", row.per_second),
            pair(row.time),
            format!("{:.1}", row.arbiter_cpu_us),
            format!("{:.1}", row.clients_cpu_us),
            verdict(Some(row.met)).to_owned(),
        ]
    });
    let titles = [
        "clients",
        "leases",
        "requests/s",
        "p50 / p99 [us]",
        "arbiter's CPU [us]",
        "clients' CPU [us]",
        "",
    ];
    table(titles, 0..=5, rows, out)?;
    writeln!(
        out,
        "over the socket, each request in the journal before its answer; CPU for each request;\n\
         wanted: {:.0} a second, p99 <= {} ms",
        requests::TARGET,
        requests::TARGET_P99.as_millis()
    )
}

fn revocations(rows: &[RevocationRow], out: &mut dyn Write) -> io::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    writeln!(out)?;
    let rows = rows.iter().map(|row| {
        let what = if row.yields {
            "from the revocation, the holder gives back at the notice".to_owned()
        } else {
            format!("beyond the grace of {} ms", row.grace_ms)
        };
        [what, pair(row.time), verdict(Some(row.met)).to_owned()]
    });
    let titles = ["another holds what was revoked", "p50 / p99 [us]", ""];
    table(titles, 1..=1, rows, out)?;
    let target = revocation::TARGET.as_millis();
    writeln!(out, "wanted: p99 <= {target} ms")
}

impl RestartReport {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let in_ms = |times: crate::stats::Percentiles| {
            format!("{} / {}", millis(times.p50_ns), millis(times.p99_ns))
        };
        let memory = self.memory;
        writeln!(
            out,
            "\n{} leases, killed and started {} times, p50 / p99 [ms]:\n\
             from the start until a holder has its lease again: {}, {} (wanted: <= {} ms)\n\
             from there until all of them have: {}\n\
             resident memory: {} KiB without leases, {} KiB with all, {} KiB after a restart\n\
             memory of a lease: {} bytes",
            self.leases,
            self.starts,
            in_ms(self.answers),
            verdict(Some(self.met)),
            restart::TARGET.as_millis(),
            in_ms(self.all_back),
            memory.empty >> 10,
            memory.full >> 10,
            memory.restarted >> 10,
            memory.per_lease
        )
    }
}

impl GroupsReport {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out)?;
        let rows = self.core.iter().map(|row| {
            [
                row.groups.to_string(),
                row.cpus.to_string(),
                row.scope.to_owned(),
                format!("{:.0}", row.without_ns),
                format!("{:.0}", row.beside_ns),
                format!("{:.3}", row.ratio),
                verdict(Some(row.met)).to_owned(),
            ]
        });
        let titles = [
            "groups",
            "CPUs",
            "scope",
            "beside threads [ns]",
            "beside groups [ns]",
            "ratio",
            "",
        ];
        table(titles, 0..=5, rows, out)?;
        writeln!(
            out,
            "a decision beside so many leases of groups and as many of threads; one thread, no socket,\n\
             in turns; wanted: {:.2}",
            groups::TARGET_RATIO
        )?;
        if let Some(why) = &self.not_served {
            return writeln!(out, "no groups of this host were leased: {why}");
        }
        let rows = self.served.iter().map(|row| {
            [
                row.groups.to_string(),
                pair(row.lease),
                pair(row.end),
                verdict(Some(row.met)).to_owned(),
            ]
        });
        let titles = [
            "groups of this host with a lease",
            "one more and its release, p50 / p99 [us]",
            "its end with what ran there [us]",
            "",
        ];
        table(titles, 0..=2, rows, out)?;
        let target = groups::TARGET.as_millis();
        writeln!(out, "wanted: both medians together <= {target} ms")
    }
}

impl LoadedTraps {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let [arbiter, guest] = self.cpus;
        writeln!(
            out,
            "\nTrapped accesses without an arbiter and beside one that decides {:.0} times a second\n\
             arbiter and client on CPU {arbiter}, guest on CPU {guest}; {} accesses of each kind on each side",
            self.decisions_per_second, self.accesses
        )?;
        compared(["without", "beside"], &self.rows, out)?;
        writeln!(
            out,
            "wanted: ratio p50 <= {:.2}, p99 <= {TARGET:.2}\n\
             Half of the turns without it against the other half (this host's noise):",
            traps::TARGET_P50
        )?;
        compared(["one half", "other half"], &self.same, out)
    }
}

fn compared(names: [&str; 2], rows: &[TrapsRow], out: &mut dyn Write) -> io::Result<()> {
    let compared = |row: &TrapsRow| Compared {
        access: row.access,
        quiet: row.quiet,
        loaded: row.loaded,
        ratios: row.ratios,
    };
    write_compared(names, rows.iter().map(compared), out)
}
