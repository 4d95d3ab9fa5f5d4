//! The NMI watchdog's counter: given back for as long as somebody needs it, restored also after
//! a crash.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::budget::CpuSet;
use crate::budget::file::{self, FileError};

/// What [`Watchdog::give_back`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivenBack {
    /// The watchdog is off, and its counters are free.
    Freed,
    /// It was off already. A value that an earlier call kept is kept on.
    WasOff,
    /// The kernel has none.
    NoWatchdog,
}

/// What [`Watchdog::restore`] or [`Watchdog::recover`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restored {
    /// The old value is in force again.
    Done,
    /// No value was kept.
    Nothing,
    /// Somebody else turned the watchdog on since; that value stays.
    OnAlready,
    /// The value was kept in an earlier boot of the kernel. It is forgotten.
    EarlierBoot,
    /// What was kept is damaged, as no crash leaves it. It is forgotten, the log says so, and
    /// the watchdog is as it was found.
    Damaged,
}

/// Turns the NMI watchdog off and on again (`/proc/sys/kernel/nmi_watchdog`; kernel,
/// Documentation/admin-guide/sysctl/kernel.rst, "nmi_watchdog").
///
/// The old value is in a file before the change is made, with the kernel's boot id. So it
/// survives the process, and is not applied to another boot. Who nests uses counts them.
#[derive(Clone, Debug)]
pub struct Watchdog {
    switch: PathBuf,
    cpus: PathBuf,
    boot_id: PathBuf,
    state_dir: PathBuf,
}

const STATE: &str = "nmi-watchdog";
const TEMPORARY: &str = "nmi-watchdog.new";
/// First word of the state file, with its version.
const MAGIC: &str = "umpire-nmi-watchdog-1";

impl Watchdog {
    /// The watchdog of the kernel below `root`; its old value is kept in the folder
    /// `state_dir`, which exists.
    pub fn new(root: &Path, state_dir: &Path) -> Self {
        Watchdog {
            switch: root.join("proc/sys/kernel/nmi_watchdog"),
            cpus: root.join("proc/sys/kernel/watchdog_cpumask"),
            boot_id: root.join("proc/sys/kernel/random/boot_id"),
            state_dir: state_dir.to_owned(),
        }
    }

    /// Restores what a process before this one gave back and did not restore. To be called at
    /// start, before anything else.
    ///
    /// # Errors
    /// As for [`Watchdog::restore`].
    pub fn recover(root: &Path, state_dir: &Path) -> Result<Restored, FileError> {
        Watchdog::new(root, state_dir).restore()
    }

    /// The CPUs of the watchdog, if it is on; `None`: it is off, or the kernel has none.
    ///
    /// # Errors
    /// Its files are damaged.
    pub fn on(&self) -> Result<Option<CpuSet>, FileError> {
        match file::optional(file::value::<u32>(&self.switch))? {
            None | Some(0) => Ok(None),
            Some(_) => file::value(&self.cpus).map(Some),
        }
    }

    /// The CPUs of the watchdog, if this boot's value of it is kept: somebody who gave it back
    /// has not restored it.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn given_back(&self) -> Result<Option<CpuSet>, FileError> {
        let kept = file::optional(file::text(&self.state_dir.join(STATE)))?;
        let boot = file::text(&self.boot_id);
        match kept.map(|kept| kept + "\n") {
            Some(kept) if parse(&kept).is_some_and(|(_, of)| boot.is_ok_and(|boot| of == boot)) => {
                file::value(&self.cpus).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Turns the watchdog off, on all CPUs.
    ///
    /// # Errors
    /// The value cannot be kept, and the watchdog is untouched; or it cannot be turned off
    /// (`EACCES` and `EROFS`: that takes root, outside of a container), and is on still.
    pub fn give_back(&self) -> Result<GivenBack, FileError> {
        match file::optional(file::value::<u32>(&self.switch))? {
            None => Ok(GivenBack::NoWatchdog),
            Some(0) => Ok(GivenBack::WasOff),
            Some(value) => {
                let boot = file::text(&self.boot_id)?;
                self.keep(&format!("{MAGIC} {value} {boot}\n"))?;
                match self.set(0) {
                    Ok(()) => Ok(GivenBack::Freed),
                    Err(error) => {
                        // The error says more than what comes of this.
                        let _ = self.restore();
                        Err(error)
                    }
                }
            }
        }
    }

    /// Brings the old value back into force, if one is kept, and forgets it.
    ///
    /// # Errors
    /// A file cannot be read, written or removed. The old value is kept on, for another try.
    pub fn restore(&self) -> Result<Restored, FileError> {
        let path = self.state_dir.join(STATE);
        // As it is: white space at its end tells that it is whole.
        let kept = fs::read_to_string(&path).map_err(FileError::of(&path, "read"));
        let kept = match file::optional(kept) {
            Ok(None) => return Ok(Restored::Nothing),
            Ok(Some(kept)) => kept,
            Err(error) if error.why.kind() == io::ErrorKind::InvalidData => String::new(),
            Err(error) => return Err(error),
        };
        let restored = if let Some((value, boot)) = parse(&kept) {
            if boot != file::text(&self.boot_id)? {
                Restored::EarlierBoot
            } else if file::value::<u32>(&self.switch)? != 0 {
                Restored::OnAlready
            } else {
                self.set(value)?;
                Restored::Done
            }
        } else {
            let damaged = FileError::damaged(&path, &kept);
            log::warn!("{damaged}; if nmi_watchdog was on, turn it on again");
            Restored::Damaged
        };
        self.forget()?;
        Ok(restored)
    }

    /// Writes the value and looks whether it is in force.
    fn set(&self, value: u32) -> Result<(), FileError> {
        let write = |path| {
            let mut file = OpenOptions::new().write(true).open(path)?;
            file.write_all(format!("{value}\n").as_bytes())
        };
        write(&self.switch).map_err(FileError::of(&self.switch, "write"))?;
        let found = file::text(&self.switch)?;
        if found.parse() == Ok(value) {
            Ok(())
        } else {
            Err(FileError::damaged(&self.switch, &found))
        }
    }

    /// The state is there as a whole or not at all, whenever the host stops.
    fn keep(&self, state: &str) -> Result<(), FileError> {
        let (temporary, path) = (self.state_dir.join(TEMPORARY), self.state_dir.join(STATE));
        let write = || {
            let mut file = File::create(&temporary)?;
            file.write_all(state.as_bytes())?;
            file.sync_all()?;
            fs::rename(&temporary, &path)?;
            File::open(&self.state_dir)?.sync_all()
        };
        write().map_err(FileError::of(&path, "write"))
    }

    fn forget(&self) -> Result<(), FileError> {
        let path = self.state_dir.join(STATE);
        let remove = || {
            fs::remove_file(&path)?;
            File::open(&self.state_dir)?.sync_all()
        };
        remove().map_err(FileError::of(&path, "remove"))
    }
}

/// Value and boot id, of a whole state file only.
fn parse(state: &str) -> Option<(u32, &str)> {
    let line = state.strip_suffix('\n')?;
    let [MAGIC, value, boot] = line.split(' ').collect::<Vec<_>>()[..] else {
        return None;
    };
    Some((value.parse().ok()?, boot))
}

#[cfg(test)]
#[path = "watchdog_tests.rs"]
mod tests;
