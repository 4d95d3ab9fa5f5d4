//! `--header`: what the profile says of itself, in the form of `perf report --header`.

use std::io::{self, Write};

use crate::profile::facts::{Facts, began, of_time, scaled};
use crate::profile::reader::Ending;
use crate::profile::record::{SampledEvent, Sampling};
use crate::profile::wire::VERSION;

/// Writes it. What perf has, too, has perf's name: CPUs are the guest's, and `cmdline` is what
/// recorded.
///
/// # Errors
/// `out` cannot be written to.
pub fn write_header(facts: &Facts<'_>, out: &mut dyn Write) -> io::Result<()> {
    let header = facts.header;
    let name = match header.vm_name.as_str() {
        "" => String::new(),
        name => format!(" ({name})"),
    };
    let mut lines = vec![
        format!("captured on    : {}", began(header)),
        format!("header version : {VERSION}"),
        format!("vm : {}{name}", header.vm),
        format!("umpire version : {}", header.umpire),
        format!("nrcpus online : {}", header.vcpus),
        format!("nrcpus avail : {}", header.vcpus),
        format!("cores : {}", header.cores),
    ];
    if !header.host.is_empty() {
        lines.push(format!("host : {}", header.host));
    }
    if !header.command.is_empty() {
        lines.push(format!("cmdline : {}", header.command.join(" ")));
    }
    lines.extend(header.events.iter().map(event));
    if let Ending::Whole(ns) = facts.ending {
        let ms = scaled(ns, 1_000_000);
        lines.push(format!("sample duration : {ms:10.3} ms{}", of_time(header)));
    }
    writeln!(out, "# ========")?;
    for line in lines {
        writeln!(out, "# {line}")?;
    }
    writeln!(out, "# ========\n#")
}

fn event(event: &SampledEvent) -> String {
    let (number, by_time) = match event.sampling {
        Sampling::Period(events) => (events, 0),
        Sampling::Frequency(hz) => (hz, 1),
    };
    format!(
        "event : name = {}, {{ sample_period, sample_freq }} = {number}, freq = {by_time}, {}",
        event.name,
        event.how()
    )
}
