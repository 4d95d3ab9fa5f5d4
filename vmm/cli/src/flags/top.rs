//! The flags of `umpire top`, after those of top and `perf top`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use umpire_tools::find::VmChoice;
use umpire_tools::profile::symbols::offset;
use umpire_tools::stat::spec::EventList;
use umpire_tools::top::TopOptions;

/// The flags of `umpire top`.
#[derive(Clone, Debug, Args)]
pub struct TopFlags {
    /// The VM.
    #[command(flatten)]
    pub vm: VmChoice,
    /// Seconds from frame to frame, 0.1 to 3600
    #[arg(short, long, value_name = "SECONDS", default_value = TopOptions::SECONDS,
          value_parser = delay)]
    pub delay: Duration,
    /// End after so many frames [default: q or Ctrl-C ends it]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub frames: Option<u64>,
    /// Print one frame as text, of COLUMNS columns or 120, after one delay, and after up to 10 s
    /// for the names in it; needs no terminal
    #[arg(long, conflicts_with = "frames")]
    pub once: bool,
    /// With --once, print JSON: one object for each VM, a line each
    #[arg(short, long, requires = "once")]
    pub json: bool,
    /// The event that is sampled for the symbols, and has a column [default: cycles]
    #[arg(short, long, value_name = "EVENT")]
    pub event: Option<EventList>,
    /// Take so many samples a second of a vCPU's time
    #[arg(short = 'F', long, value_name = "HZ", default_value_t = TopOptions::HZ,
          value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub freq: u64,
    /// Sample nothing, and show no symbols
    #[arg(long, conflicts_with_all = ["event", "freq", "symbols"])]
    pub no_samples: bool,
    /// Names for the guest's kernel, of one VM: vmlinux, System.map, or a copy of the guest's
    /// /proc/kallsyms [default: what the guest's kernel has in its memory]
    #[arg(long, value_name = "FILE", visible_aliases = ["vmlinux", "kallsyms", "system-map"])]
    pub symbols: Option<PathBuf>,
    /// How far the kernel moved itself from the addresses in vmlinux or System.map, in
    /// hexadecimal
    #[arg(long, value_name = "HEX", requires = "symbols", allow_hyphen_values = true,
          value_parser = offset)]
    pub kaslr_offset: Option<u64>,
}

fn delay(text: &str) -> Result<Duration, String> {
    let seconds: Result<f64, _> = text.parse();
    match seconds.ok().filter(|it| (0.1..=3600.0).contains(it)) {
        Some(seconds) => Ok(Duration::from_secs_f64(seconds)),
        None => Err("it is a number of seconds from 0.1 to 3600".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_are_seconds() {
        assert_eq!(delay("0.1"), Ok(Duration::from_millis(100)));
        assert_eq!(delay("60"), Ok(Duration::from_secs(60)));
        for text in ["", "0", "-1", "0.05", "3601", "NaN", "1s", "inf"] {
            assert!(delay(text).is_err(), "{text}");
        }
    }
}
