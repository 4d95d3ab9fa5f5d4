//! The table of `umpire count`, as `perf stat` prints one.

use std::io::{self, Write};

use attribution::{Counts, Program};

use crate::event::{Chosen, Event, Side};
use crate::inputs::short;
use crate::number::grouped;
use crate::record::{Record, short_name};
use crate::regions;

/// Columns of perf: a count, the name of the program before it.
const VALUE: usize = 18;
const WHOSE: usize = 24;
/// Functions that are listed, the costliest: the last ones say little.
const MOST_FUNCTIONS: usize = 30;
/// Regions that are listed, the first: a loop may mark thousands.
const MOST_REGIONS: usize = 100;

/// What of a record is shown.
#[derive(Clone, Debug)]
pub struct Shown<'a> {
    /// What was run, as it was typed.
    pub title: &'a str,
    /// The events, a row each.
    pub events: &'a [Chosen],
    /// Rows for each program besides.
    pub per_program: bool,
    /// The system calls.
    pub syscalls: bool,
    /// The time that passed on the host, in seconds.
    pub elapsed: Option<f64>,
}

/// Writes all of it.
///
/// # Errors
/// `out` cannot be written to.
pub fn write(record: &Record, shown: &Shown<'_>, out: &mut dyn Write) -> io::Result<()> {
    let title = umpire_events::one_line(shown.title);
    let counts = &record.counts;
    writeln!(out, "\n Performance counter stats for '{title}':\n")?;
    for chosen in shown.events {
        writeln!(out, "{}", row(chosen.of(counts), *chosen))?;
    }
    if shown.per_program {
        write_programs(counts, shown.events, out)?;
    }
    if shown.syscalls {
        write_syscalls(counts, out)?;
    }
    if counts.functions.is_some() {
        write_functions(counts, out)?;
    }
    if !counts.regions.is_empty() {
        write_regions(counts, out)?;
    }
    writeln!(out)?;
    if let Some(seconds) = shown.elapsed {
        writeln!(
            out,
            "{seconds:>VALUE$.9} seconds time elapsed (the host's; counts do not depend on it)"
        )?;
    }
    writeln!(
        out,
        "{:>VALUE$} digest of all inputs\n",
        short(&record.digest)
    )
}

fn row(count: u64, chosen: Chosen) -> String {
    format!("{:>VALUE$}      {chosen}", grouped(count))
}

/// A program as perf names a thread: `gzip-101`.
fn whose(program: &Program) -> String {
    let name = umpire_events::one_line(short_name(&program.name));
    format!("{name}-{}", program.pid)
}

fn write_programs(counts: &Counts, events: &[Chosen], out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "\n By program:\n")?;
    for program in &counts.programs {
        let whose = whose(program);
        for chosen in events {
            let row = row(chosen.of_program(program), *chosen);
            writeln!(out, "{whose:>WHOSE$} {row}")?;
        }
    }
    Ok(())
}

/// System calls, and what else the kernel did: the sum is its instructions.
fn write_syscalls(counts: &Counts, out: &mut dyn Write) -> io::Result<()> {
    let rest = &counts.rest;
    writeln!(out, "\n System calls:\n")?;
    writeln!(
        out,
        "{:>VALUE$} {:>VALUE$}  system call",
        "calls", "instructions:k"
    )?;
    let mut write = |times: String, instructions: u64, name: &str| {
        let instructions = grouped(instructions);
        writeln!(out, "{times:>VALUE$} {instructions:>VALUE$}  {name}")
    };
    for one in &counts.syscalls {
        write(grouped(one.calls), one.instructions, &one.name)?;
    }
    let others = [
        (
            rest.exceptions,
            rest.exception_instructions,
            "(page faults and other exceptions)",
        ),
        (rest.interrupts, rest.interrupt_instructions, "(interrupts)"),
    ];
    for (times, instructions, name) in others {
        write(grouped(times), instructions, name)?;
    }
    write(
        String::new(),
        rest.start_instructions,
        "(before processes and threads first ran)",
    )
}

/// What programs have marked by Valgrind's client requests.
fn write_regions(counts: &Counts, out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        "\n Regions, in the order in which programs ended them:\n"
    )?;
    let all = regions::named(counts);
    for (name, one) in all.iter().take(MOST_REGIONS) {
        let program = short_name(&one.program);
        let mut name = if one.is_rest {
            name.to_string()
        } else {
            format!("{program}-{} {name}", one.pid)
        };
        if one.more > 0 {
            // It is the first of these.
            name.push_str(&format!(" ×{}", one.more.saturating_add(1)));
        }
        let name = umpire_events::one_line(&name);
        for (side, events) in [(Side::User, &one.user), (Side::Kernel, &one.kernel)] {
            let chosen = Chosen::new(Event::Instructions, side);
            let row = row(events.instructions, chosen);
            writeln!(out, "{name:>WHOSE$} {row}")?;
        }
    }
    match all.len().saturating_sub(MOST_REGIONS) {
        0 => Ok(()),
        rest => writeln!(out, "{:>WHOSE$} ({rest} more; --save and -j have all)", ""),
    }
}

fn write_functions(counts: &Counts, out: &mut dyn Write) -> io::Result<()> {
    let all: Vec<_> = counts.functions.iter().flatten().collect();
    writeln!(out, "\n Functions ({}:u):\n", Event::Instructions)?;
    writeln!(
        out,
        "{:>VALUE$} {:>VALUE$} {:>12}  function",
        "own", "inclusive", "calls"
    )?;
    for one in all.iter().take(MOST_FUNCTIONS) {
        let (own, inclusive) = (grouped(one.own), grouped(one.inclusive));
        let name = function_name(&one.object, &one.name);
        let calls = grouped(one.calls);
        writeln!(out, "{own:>VALUE$} {inclusive:>VALUE$} {calls:>12}  {name}")?;
    }
    let rest = all.len().saturating_sub(MOST_FUNCTIONS);
    if rest > 0 {
        let rest_of_own = all.iter().skip(MOST_FUNCTIONS).map(|one| one.own);
        let own = rest_of_own.fold(0u64, u64::saturating_add);
        writeln!(out, "{:>VALUE$} {:>31}  ({rest} more)", grouped(own), "")?;
    }
    Ok(())
}

/// `deflate (gzip)`.
pub(crate) fn function_name(object: &str, name: &str) -> String {
    let object = short_name(object);
    umpire_events::one_line(&format!("{name} ({object})"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::record;

    fn text(shown: &Shown<'_>) -> String {
        let mut out = Vec::new();
        write(&record(), shown, &mut out).expect("room");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn tables_are_as_perf_prints_them() {
        let events = Chosen::list("instructions:u,instructions:k").expect("events");
        let shown = Shown {
            title: "sh -c\n'gzip x'",
            events: &events,
            per_program: true,
            syscalls: true,
            elapsed: Some(0.25),
        };
        let digest = short(&record().digest).to_owned();
        let expected = format!(
            "
 Performance counter stats for 'sh -c 'gzip x'':

         1,200,000      instructions:u
           124,567      instructions:k

 By program:

                  sh-100            200,000      instructions:u
                  sh-100             90,000      instructions:k
                gzip-101          1,000,000      instructions:u
                gzip-101             34,567      instructions:k

 System calls:

             calls     instructions:k  system call
                12             34,000  read
                 2              4,000  write
                20             80,000  (page faults and other exceptions)
                 1                567  (interrupts)
                                6,000  (before processes and threads first ran)

 Functions (instructions:u):

               own          inclusive        calls  function
           900,000            980,000            1  deflate (gzip)
            80,000             80,000            1  longest_match (gzip)

       0.250000000 seconds time elapsed (the host's; counts do not depend on it)
      {digest} digest of all inputs

"
        );
        assert_eq!(text(&shown), expected);
    }
}
