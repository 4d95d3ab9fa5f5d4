//! Runs the helper programs of the harness (apt, dpkg, strip, cc) and turns their failures into errors.

use std::process::Command;

use debian_packages::Tools;
pub(crate) use debian_packages::last_lines;

use super::error::L1Error;

/// How the harness has the programs run that fetch packages.
pub(crate) const FETCHING: Tools<'static> = Tools {
    say,
    advice: "the machines are built from Debian's packages by apt: check the network, apt's sources and the room in the cache folder, or point UMPIRE_CACHE at a cache filled on another machine (`cargo l1 --fetch-only` fills it)",
    interrupted: None,
};

/// Reports progress of long work on stderr.
pub(crate) fn say(text: &str) {
    eprintln!("l1: {text}");
}

/// Runs `command` to its end and returns its stdout; `advice` says what to do when it fails.
pub(crate) fn capture(
    command: &mut Command,
    label: &str,
    advice: &'static str,
) -> Result<String, L1Error> {
    let tools = Tools {
        say,
        advice,
        interrupted: None,
    };
    Ok(tools.capture(command, label)?)
}
