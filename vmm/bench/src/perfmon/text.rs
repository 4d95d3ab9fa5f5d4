//! The report for people.

use std::io::{self, Write};

use super::{
    CommandRow, FloodReport, ManyReport, PerfmonReport, SampleRow, SetRow, SlowRow, TrapsRow,
};
use crate::beside::{TARGET, heading, pair};
use crate::report::{Report, where_it_ran};
use crate::sources::LeftOut;

/// Of a column of times.
const WIDTH: usize = 30;

impl Report for PerfmonReport {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "Host tools, measured by one of them through the control socket\n{}, model {}",
            where_it_ran(self.processor.as_deref(), self.slow_cpl0),
            self.model
        )?;
        for events in &self.events {
            let names = events.names.join(", ");
            writeln!(
                out,
                "events of {}, again from the first where they end: {names}",
                events.backend
            )?;
        }
        commands(&self.commands, out)?;
        samples(&self.samples, out)?;
        slowdown(&self.slowdown, out)?;
        sets(&self.sets, out)?;
        self.many.iter().try_for_each(|many| many.text(out))?;
        self.flood.iter().try_for_each(|flood| flood.text(out))?;
        LeftOut::text(&self.left_out, out)?;
        let failures = &self.failures;
        failures
            .iter()
            .try_for_each(|one| writeln!(out, "failed: {}: {}", one.part, one.reason))
    }
}

fn commands(rows: &[CommandRow], out: &mut dyn Write) -> io::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "\n{:<36} {:>10} {:>22}",
        "command, one client", "per second", "p50 / p99 [us]"
    )?;
    rows.iter().try_for_each(|row| {
        writeln!(
            out,
            "{:<36} {:>10.0} {:>22}",
            row.command,
            row.per_second,
            pair(row.time)
        )
    })
}

fn samples(rows: &[SampleRow], out: &mut dyn Write) -> io::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "\n{:<8} {:<8} {:>9} {:>11} {:>9} {:>9} {:>9} {:>8} {:>10}",
        "backend",
        "format",
        "asked Hz",
        "samples/s",
        "samples",
        "due",
        "stretched",
        "dropped",
        "throttled"
    )?;
    for row in rows {
        let verdict = if row.lossless { "" } else { "not all" };
        writeln!(
            out,
            "{:<8} {:<8} {:>9} {:>11.0} {:>9} {:>9} {:>9} {:>8} {:>10}  {verdict}",
            row.backend,
            row.format.name(),
            row.wanted,
            row.per_second,
            row.samples,
            row.due,
            row.stretched,
            row.dropped,
            row.throttled
        )?;
    }
    writeln!(
        out,
        "due: periods in what another counter on the same event counted; stretched: of these, those\n\
         without a sample of their own, as an overflow is handled after it took place and only then\n\
         the next period starts; not all: samples were dropped, or monitoring was masked"
    )
}

fn slowdown(rows: &[SlowRow], out: &mut dyn Write) -> io::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "\n{:<8} {:<32} {:>12} {:>11} {:>11}",
        "backend", "CPL 3 loop", "loop [ms]", "slower by", "samples/s"
    )?;
    for row in rows {
        let what = match row.hz {
            0 => "no context".to_owned(),
            hz => format!("{} events in {} set(s), {hz} Hz", row.events, row.sets),
        };
        let loop_ms = format!(
            "{}.{:03}",
            row.loop_ns / 1_000_000,
            row.loop_ns / 1000 % 1000
        );
        writeln!(
            out,
            "{:<8} {what:<32} {loop_ms:>12} {:>9.2} % {:>11.0}",
            row.backend, row.slowdown, row.samples_per_second
        )?;
    }
    writeln!(
        out,
        "every event is sampled that often while its set is active, none together with another"
    )
}

fn sets(rows: &[SetRow], out: &mut dyn Write) -> io::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "\n{:<8} {:>9} {:>22} {:>22} {:>8} {:>22}",
        "backend",
        "counters",
        "switching p50/mean ns",
        "staying p50/mean ns",
        "switch",
        "operations (staying)"
    )?;
    for row in rows {
        let (one, other) = (row.switching, row.staying);
        let switch = i128::from(one.mean_ns) - i128::from(other.mean_ns);
        writeln!(
            out,
            "{:<8} {:>9} {:>22} {:>22} {switch:>8} {:>22}",
            row.backend,
            row.counters,
            format!("{} / {}", one.p50_ns, one.mean_ns),
            format!("{} / {}", other.p50_ns, other.mean_ns),
            format!("{:.2} ({:.2})", one.operations, other.operations),
        )?;
    }
    writeln!(
        out,
        "an entry and an exit with a switch of sets at its end, and without; switch: difference of the means"
    )
}

fn traps(rows: &[TrapsRow], names: [&str; 2], out: &mut dyn Write) -> io::Result<()> {
    writeln!(out)?;
    heading(out, names, WIDTH)?;
    for row in rows {
        let times = [row.quiet, row.loaded];
        row.ratios.write(out, row.access, times, WIDTH)?;
    }
    writeln!(out, "wanted: ratio p99 <= {TARGET:.2}")
}

impl ManyReport {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "\n{} contexts unloaded and {} loaded on 64 vCPUs of 2 cores, 4 counters each\n\
             creating one p50 / p99 [us]: {}; loading one: {}\n\
             resident memory of VMM and tool together: {} KiB, then {} KiB, then {} KiB\n\
             memory of a context: {} bytes; loaded: {} bytes more",
            self.unloaded,
            self.loaded,
            pair(self.creation),
            pair(self.loading),
            self.memory_before >> 10,
            self.memory_unloaded >> 10,
            self.memory_loaded >> 10,
            self.per_unloaded,
            self.per_loaded
        )?;
        commands(&self.commands, out)?;
        traps(&self.traps, ["without", "with"], out)?;
        writeln!(out, "{} accesses of each kind with contexts", self.accesses)
    }
}

impl FloodReport {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let [server, guest] = self.cpus;
        writeln!(
            out,
            "\nA flood of the control socket: {} connections ({} not queued by the host), {} malformed packets\n\
             server and client on CPU {server}, guest on CPU {guest}; quiet: the client computes",
            self.connections, self.not_queued, self.packets
        )?;
        traps(&self.traps, ["quiet", "flooded"], out)?;
        writeln!(
            out,
            "{} accesses of each kind beside each client",
            self.accesses
        )
    }
}
