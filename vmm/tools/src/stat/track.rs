//! `umpire track`: what each vCPU counts, a line an interval, as `cputrack` of Solaris has it.

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::command::count;
use super::print::Form;
use super::spec::EventList;
use super::{FormOptions, StatOptions};
use crate::command::UntilOptions;
use crate::duration::Span;
use crate::find::VmChoice;
use crate::numbers::Numbers;
use crate::targets::Selection;
use crate::{Completion, ToolError};

/// What is tracked: the options of `umpire track`, after those of `cputrack`.
#[derive(Clone, Debug, Default, Args)]
pub struct TrackOptions {
    /// The VM.
    #[command(flatten)]
    pub vm: VmChoice,
    /// Only these vCPUs: 0,2-3 [default: all, those that start later too]
    #[arg(long, value_name = "LIST")]
    pub vcpu: Option<Numbers>,
    /// What to count: a,b; repeatable. See: umpire events
    #[arg(short = 'c', value_name = "EVENTS", required = true)]
    pub events: Vec<EventList>,
    /// A line for each vCPU every so many seconds; 0: only those at the end
    #[arg(short = 'T', value_name = "SECONDS", default_value = "1", value_parser = interval)]
    pub interval: Duration,
    /// So many intervals [default: until Ctrl-C or the end of the VM]
    #[arg(short = 'N', value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub count: Option<u32>,
    /// Let a paused VM go on as soon as everything counts: with umpire run --paused, from the
    /// guest's first instruction
    #[arg(long)]
    pub resume: bool,
    /// No heading, and no line that says how events were counted
    #[arg(short = 'n')]
    pub no_header: bool,
    /// Where lines go [default: standard output]
    #[arg(short = 'o', value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Counts, and writes a line for each vCPU and interval.
///
/// # Errors
/// There is no VM, no such event or vCPU, or the lines cannot be written.
pub fn run(options: &TrackOptions) -> Result<Completion, ToolError> {
    let interval = Some(options.interval).filter(|interval| !interval.is_zero());
    let form = Form::Track {
        header: !options.no_header,
        shown: interval.is_some(),
    };
    // Seconds where there is no interval.
    let each = interval.unwrap_or(Duration::from_secs(1));
    let time = options.count.map(|count| Span(each.saturating_mul(count)));
    let measured = StatOptions {
        selection: Selection {
            vm: options.vm.clone(),
            vcpus: options.vcpu.clone(),
            ..Selection::default()
        },
        events: options.events.clone(),
        interval,
        summary: true,
        look: FormOptions {
            per_vcpu: true,
            ..FormOptions::default()
        },
        until: UntilOptions {
            time,
            command: Vec::new(),
        },
        resume: options.resume,
        ..StatOptions::default()
    };
    let mut out: Box<dyn Write> = match &options.output {
        None => Box::new(io::stdout().lock()),
        Some(path) => {
            let file = File::create(path);
            let failed = |error| ToolError::Input(format!("-o {}: {error}", path.display()));
            Box::new(file.map_err(failed)?)
        }
    };
    count(&measured, &form, &mut out, &mut io::stderr())
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds: Result<f64, _> = text.parse();
    let allowed = |seconds: &f64| *seconds == 0.0 || (0.01..=3600.0).contains(seconds);
    match seconds.ok().filter(allowed) {
        Some(seconds) => Ok(Duration::from_secs_f64(seconds)),
        None => Err("it is a number of seconds from 0.01 to 3600, or 0".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_seconds() {
        assert_eq!(interval("0"), Ok(Duration::ZERO));
        assert_eq!(interval("0.25"), Ok(Duration::from_millis(250)));
        assert_eq!(interval("60"), Ok(Duration::from_secs(60)));
        for text in ["", "-1", "0.001", "3601", "NaN", "1s", "inf"] {
            assert!(interval(text).is_err(), "{text}");
        }
    }
}
