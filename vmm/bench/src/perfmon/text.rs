//! The report for people.

use std::io::{self, Write};

use super::{
    CallersRow, CommandRow, FloodReport, ManyReport, ObserverRow, PerfmonReport, SampleRow, SetRow,
    SlowRow, Spent, TrapsRow,
};
use crate::beside::{Compared, TARGET, write_compared};
use crate::report::{Report, micros, millis, pair, table, verdict, where_it_ran};
use crate::sources::LeftOut;

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
        callers(&self.callers, out)?;
        slowdown(&self.slowdown, out)?;
        sets(&self.sets, out)?;
        observers(&self.observers, out)?;
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
    writeln!(out)?;
    let rows = rows.iter().map(|row| {
        [
            row.command.to_string(),
            format!("{:.0}", row.per_second),
            pair(row.time),
        ]
    });
    let titles = ["command, one client", "per second", "p50 / p99 [us]"];
    table(titles, 1..=2, rows, out)
}

fn samples(rows: &[SampleRow], out: &mut dyn Write) -> io::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    writeln!(out)?;
    let rows = rows.iter().map(|row| {
        [
            row.backend.to_string(),
            row.format.name().to_owned(),
            row.wanted.to_string(),
            format!("{:.0}", row.per_second),
            row.samples.to_string(),
            row.due.to_string(),
            row.stretched.to_string(),
            row.dropped.to_string(),
            row.throttled.to_string(),
            if row.lossless { "" } else { "not all" }.to_owned(),
        ]
    });
    let titles = [
        "backend",
        "format",
        "asked Hz",
        "samples/s",
        "samples",
        "due",
        "stretched",
        "dropped",
        "throttled",
        "",
    ];
    table(titles, 2..=8, rows, out)?;
    writeln!(
        out,
        "due: periods in what another counter on the same event counted; stretched: of these, those\n\
         without a sample of their own, as an overflow is handled after it took place and only then\n\
         the next period starts; not all: samples were dropped, or monitoring was masked"
    )
}

fn callers(rows: &[CallersRow], out: &mut dyn Write) -> io::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    writeln!(out)?;
    let rows = rows.iter().map(|row| {
        let caches = if row.cold { "cold" } else { "warm" };
        [
            caches.to_owned(),
            row.samples.to_string(),
            pair(row.without),
            pair(row.with),
            pair(row.more),
            format!("{} {}", micros(row.target_ns), verdict(Some(row.met))),
        ]
    });
    let titles = [
        "caches",
        "samples",
        "without p50 / p99 [us]",
        "task, 16 callers",
        "more",
        "wanted p50",
    ];
    table(titles, 1..=4, rows, out)?;
    writeln!(
        out,
        "a sample in the compact format with ring and CR3, and the same with the guest's task, 8\n\
         callers in its kernel and 8 in its program: the look into the memory of a toy Linux, and\n\
         the record; no exit. Cold: 4 MiB of other memory were touched before each"
    )
}

fn slowdown(rows: &[SlowRow], out: &mut dyn Write) -> io::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    writeln!(out)?;
    let rows = rows.iter().map(|row| {
        [
            row.backend.to_string(),
            match row.hz {
                0 => "no context".to_owned(),
                hz => format!("{} events in {} set(s), {hz} Hz", row.events, row.sets),
            },
            millis(row.loop_ns),
            format!("{:.2} %", row.slowdown),
            format!("{:.0}", row.samples_per_second),
        ]
    });
    let titles = [
        "backend",
        "CPL 3 loop",
        "loop [ms]",
        "slower by",
        "samples/s",
    ];
    table(titles, 2..=4, rows, out)?;
    writeln!(
        out,
        "every event is sampled that often while its set is active, none together with another"
    )
}

fn sets(rows: &[SetRow], out: &mut dyn Write) -> io::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    writeln!(out)?;
    let rows = rows.iter().map(|row| {
        let (one, other) = (row.switching, row.staying);
        let switch = i128::from(one.mean_ns) - i128::from(other.mean_ns);
        [
            row.backend.to_string(),
            row.counters.to_string(),
            format!("{} / {}", one.p50_ns, one.mean_ns),
            format!("{} / {}", other.p50_ns, other.mean_ns),
            switch.to_string(),
            format!("{:.2} ({:.2})", one.operations, other.operations),
        ]
    });
    let titles = [
        "backend",
        "counters",
        "switching p50/mean ns",
        "staying p50/mean ns",
        "switch",
        "operations (staying)",
    ];
    table(titles, 1..=5, rows, out)?;
    writeln!(
        out,
        "an entry and an exit with a switch of sets at its end, and without; switch: difference of the means"
    )
}

fn observers(rows: &[ObserverRow], out: &mut dyn Write) -> io::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    writeln!(out)?;
    let rows = rows.iter().map(|row| {
        let spent = |it: Spent| format!("{} / {}", it.p50_ns, it.mean_ns);
        [
            row.backend.to_string(),
            row.contexts.to_string(),
            spent(row.exit),
            spent(row.read),
            spent(row.load),
        ]
    });
    let titles = [
        "backend",
        "contexts",
        "exit p50/mean ns",
        "read p50/mean ns",
        "load p50/mean ns",
    ];
    table(titles, 1..=4, rows, out)?;
    writeln!(
        out,
        "contexts of one vCPU with two counters each; exit: an entry and an exit; read: both\n\
         counters of one; load: the last one is unloaded, made anew, loaded and started"
    )
}

fn traps(rows: &[TrapsRow], names: [&str; 2], out: &mut dyn Write) -> io::Result<()> {
    writeln!(out)?;
    let compared = |row: &TrapsRow| Compared {
        access: row.access,
        quiet: row.quiet,
        loaded: row.loaded,
        ratios: row.ratios,
    };
    write_compared(names, rows.iter().map(compared), out)?;
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
        writeln!(
            out,
            "Without contexts at the end, against the beginning (this host's noise):"
        )?;
        traps(&self.same, ["before", "after"], out)?;
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
