//! The check of single values, wherever they were given.

use std::fs;
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use vmm::config::{self, PmuChoice};
use vmm::files::no_file;
use vmm::sched::CpuList;
use vmm::sys::allowed_cpus;
use vmm::vcpu::TrapMode;

use super::TIMEOUT_S;
use super::error::SettingError;

/// A number within `range`, which counts `unit`.
pub(super) fn number(
    value: i64,
    range: RangeInclusive<u64>,
    unit: &'static str,
) -> Result<u64, SettingError> {
    let within = u64::try_from(value).ok().filter(|it| range.contains(it));
    within.ok_or_else(|| SettingError::Range {
        value: value.to_string(),
        least: *range.start(),
        most: *range.end(),
        unit,
    })
}

/// A [`number`] in 8 bits.
pub(super) fn small(
    value: i64,
    range: RangeInclusive<u8>,
    unit: &'static str,
) -> Result<u8, SettingError> {
    let wide = u64::from(*range.start())..=u64::from(*range.end());
    number(value, wide, unit).map(|value| u8::try_from(value).unwrap_or(*range.end()))
}

/// What a word stands for; `allowed` names the words that there are.
pub(super) fn choice<T>(
    value: String,
    parse: impl FnOnce(&str) -> Option<T>,
    allowed: &'static str,
) -> Result<T, SettingError> {
    parse(&value).ok_or(SettingError::Choice { value, allowed })
}

pub(super) fn on_or_off(value: String) -> Result<bool, SettingError> {
    let parse = |word: &str| match word {
        "on" => Some(true),
        "off" => Some(false),
        _ => None,
    };
    choice(value, parse, "on or off")
}

pub(super) fn trap_mode(value: String) -> Result<TrapMode, SettingError> {
    choice(value, config::trap_mode, config::TRAP_MODES)
}

pub(super) fn seconds(value: f64) -> Result<Duration, SettingError> {
    Duration::try_from_secs_f64(value)
        .ok()
        .filter(|d| !d.is_zero() && *d <= Duration::from_secs(*TIMEOUT_S.end()))
        .ok_or_else(|| SettingError::Range {
            value: value.to_string(),
            least: *TIMEOUT_S.start(),
            most: *TIMEOUT_S.end(),
            unit: "seconds (more than 0)",
        })
}

/// A list of host CPUs on which this process may run.
pub(super) fn cpu_list(value: String) -> Result<CpuList, SettingError> {
    let allowed = allowed_cpus().unwrap_or_default();
    let list = CpuList::parse(&value)?;
    list.check(&allowed)?;
    Ok(list)
}

pub(super) fn model(value: String) -> Result<PmuChoice, SettingError> {
    if value.starts_with("auto,") || value.starts_with("none,") {
        return Err(SettingError::Choice {
            value,
            allowed: "auto or none alone, or a model by name with its properties",
        });
    }
    Ok(PmuChoice::parse(&value).map_err(Box::new)?)
}

/// Permission bits that let the owner in.
pub(super) fn octal(text: &str) -> Option<u32> {
    let digits = (3..=4).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
    let mode = u32::from_str_radix(text, 8).ok().filter(|_| digits)?;
    (mode <= 0o777 && mode & 0o600 == 0o600).then_some(mode)
}

/// A name by which tools find a VM: it is part of a file's name.
pub(super) fn vm_name(value: String) -> Result<String, SettingError> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let begins = value.starts_with(|first: char| first.is_ascii_alphanumeric());
    if begins && value.len() <= 64 && value.bytes().all(is_plain) && value != "none" {
        Ok(value)
    } else {
        Err(SettingError::VmName { value })
    }
}

/// A text for the kernel's command line.
pub(super) fn text(value: String) -> Result<String, SettingError> {
    if value.contains('\0') {
        return Err(SettingError::NulInText);
    }
    Ok(value)
}

/// A file that is there and can be read. Its kind is looked at before it is
/// opened: opening a FIFO would wait for a writer.
pub(super) fn readable(path: PathBuf) -> Result<PathBuf, SettingError> {
    let kind = no_file(&path);
    let opened = match kind {
        Ok(Some(what)) => return Err(SettingError::NotAFile { path, what }),
        Ok(None) => fs::File::open(&path).map(drop),
        Err(cause) => Err(cause),
    };
    match opened {
        Ok(()) => Ok(path),
        Err(cause) => Err(SettingError::Open { path, cause }),
    }
}

/// A file that could be made, or replaced.
pub(super) fn writable(path: PathBuf) -> Result<PathBuf, SettingError> {
    could_write(vmm::machine::probe_state_file, path)
}

/// A file that could be written to: it is there and open to us, or could be made.
/// It is not touched before the guest starts.
pub(super) fn appendable(path: PathBuf) -> Result<PathBuf, SettingError> {
    match no_file(&path) {
        Ok(Some(what)) => Err(SettingError::NotAFile { path, what }),
        Ok(None) => could_write(
            |path| fs::OpenOptions::new().append(true).open(path).map(drop),
            path,
        ),
        Err(error) if error.kind() == io::ErrorKind::NotFound => writable(path),
        Err(cause) => Err(SettingError::Write { path, cause }),
    }
}

fn could_write(
    probe: impl FnOnce(&Path) -> io::Result<()>,
    path: PathBuf,
) -> Result<PathBuf, SettingError> {
    match probe(&path) {
        Ok(()) => Ok(path),
        Err(cause) => Err(SettingError::Write { path, cause }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permission_bits() {
        fn check(text: &str, expected: Option<u32>) {
            assert_eq!(octal(text), expected, "{text}");
        }
        check("600", Some(0o600));
        check("0660", Some(0o660));
        check("777", Some(0o777));
        check("060", None);
        check("1777", None);
        check("888", None);
        check("+60", None);
        check("", None);
    }
}
