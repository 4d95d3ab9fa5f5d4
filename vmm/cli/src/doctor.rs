//! `umpire doctor`: whether a guest with a virtual PMU can run here, and what
//! this host's KVM is like, as text or JSON.

mod text;

#[cfg(test)]
mod tests;

use std::io::{self, Write};

use vmm::doctor::Diagnosis;

use crate::exit::{ExitStatus, UserError, written};

/// Prints the report on standard output; the status says whether a guest with a
/// virtual PMU can run here.
///
/// # Errors
/// Standard output cannot be written to.
pub fn run(json: bool) -> Result<ExitStatus, UserError> {
    let diagnosis = Diagnosis::gather();
    written(report(&diagnosis, json, &mut io::stdout().lock()))?;
    Ok(status(&diagnosis))
}

/// What the command ends with.
fn status(diagnosis: &Diagnosis) -> ExitStatus {
    if diagnosis.verdict.can_run {
        ExitStatus::SUCCESS
    } else {
        ExitStatus::BAD_INPUT
    }
}

/// Writes `diagnosis` to `out`.
///
/// # Errors
/// `out` cannot be written to.
pub fn report(diagnosis: &Diagnosis, json: bool, out: &mut dyn Write) -> io::Result<()> {
    if json {
        serde_json::to_writer_pretty(&mut *out, diagnosis)?;
        writeln!(out)?;
    } else {
        text::write(diagnosis, out)?;
    }
    out.flush()
}
