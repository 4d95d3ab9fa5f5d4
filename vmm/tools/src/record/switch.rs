//! When a recording goes on in another file, and what its files are called.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use jiff::Zoned;
use signal_hook::consts::SIGUSR2;
use signal_hook::flag;
use signal_hook::low_level::pipe;

use super::options::{RecordOptions, SwitchOutput};
use super::place::rescue;
use crate::error::host;
use crate::private;
use crate::wait::Woken;
use crate::{ToolError, Waiter};

/// What a waiter calls the signal; whatever else a tool waits for has small numbers.
const SWITCH: usize = usize::MAX - 2;

/// The files of a recording that has several.
#[derive(Debug)]
pub(super) struct Files {
    path: PathBuf,
    when: SwitchOutput,
    /// Has a byte for each signal that came.
    signal: UnixStream,
    /// When the file that is being written began.
    began: Instant,
    done: VecDeque<PathBuf>,
    /// So many are kept.
    most: Option<usize>,
}

impl Files {
    /// As they are asked for; none if there is to be one file. From now on SIGUSR2 does not end
    /// the process.
    ///
    /// # Errors
    /// There cannot be several at this place, or the host refuses.
    pub(super) fn of(options: &RecordOptions, waiter: &Waiter) -> Result<Option<Self>, ToolError> {
        let Some(when) = options.switch_output else {
            return Ok(None);
        };
        if options.is_pipe() || private::is_special(&options.output) {
            return Err(ToolError::Input(format!(
                "--switch-output begins further files, and {} is none; name a file with -o",
                if options.is_pipe() {
                    "standard output".to_owned()
                } else {
                    options.output.display().to_string()
                }
            )));
        }
        let signal = listen(waiter).map_err(host("waiting for SIGUSR2"))?;
        Ok(Some(Self {
            path: options.output.clone(),
            when,
            signal,
            began: Instant::now(),
            done: VecDeque::new(),
            most: options
                .switch_max_files
                .and_then(|most| usize::try_from(most).ok()),
        }))
    }

    /// A file begins.
    pub(super) fn begin(&mut self, now: Instant) {
        self.began = now;
    }

    /// When [`Files::is_due`] is to be asked again, at the latest.
    pub(super) fn due(&self) -> Option<Instant> {
        match self.when {
            SwitchOutput::Time(time) => Some(self.began + time),
            SwitchOutput::Signal | SwitchOutput::Size(_) => None,
        }
    }

    /// Whether another file begins now; this one has so many bytes.
    pub(super) fn is_due(&mut self, woken: &Woken, bytes: u64, now: Instant) -> bool {
        let is_signalled = self.hear(woken);
        match self.when {
            SwitchOutput::Signal => is_signalled,
            SwitchOutput::Size(most) => bytes >= most,
            SwitchOutput::Time(_) => self.due().is_some_and(|due| due <= now),
        }
    }

    /// Whether SIGUSR2 has come.
    pub(super) fn hear(&mut self, woken: &Woken) -> bool {
        let is_signalled = woken.ready.contains(&SWITCH);
        if is_signalled {
            // Or the next wait would end at once.
            let _ = self.signal.read(&mut [0; 64]);
        }
        is_signalled
    }

    /// Gives the file that is done its own name, and removes the oldest one if there are too
    /// many. Returns what it is called now. One that was `lost`, since somebody else has
    /// removed or replaced it, is written anew.
    ///
    /// # Errors
    /// It cannot be renamed.
    pub(super) fn put_away(&mut self, lost: Option<&mut File>) -> Result<String, ToolError> {
        let named = put_away(&self.path, &Zoned::now(), self.done.back(), lost);
        let named = named.map_err(|error| ToolError::Host {
            what: format!("{}: cannot be renamed", self.path.display()),
            error,
        })?;
        let name = named.display().to_string();
        self.done.push_back(named);
        while self.most.is_some_and(|most| self.done.len() > most) {
            if let Some(oldest) = self.done.pop_front() {
                // Somebody else may have done so.
                let _ = fs::remove_file(oldest);
            }
        }
        Ok(name)
    }
}

/// Has SIGUSR2 end no recording that does not begin further files, as perf's.
///
/// # Errors
/// The host refuses.
pub(super) fn pass_over_signal() -> io::Result<()> {
    flag::register(SIGUSR2, Arc::new(AtomicBool::new(false))).map(drop)
}

/// Has SIGUSR2 wake `waiter`.
fn listen(waiter: &Waiter) -> io::Result<UnixStream> {
    let (signal, signalled) = UnixStream::pair()?;
    signal.set_nonblocking(true)?;
    pipe::register(SIGUSR2, signalled)?;
    waiter.add(&signal, SWITCH)?;
    Ok(signal)
}

/// Renames `path` to `PATH.TIME`, as perf names such files: local time to the hundredth of a
/// second. A name that is taken is passed over, and so are those up to the `last` one within
/// some seconds: names are in the order of the files.
fn put_away(
    path: &Path,
    now: &Zoned,
    last: Option<&PathBuf>,
    lost: Option<&mut File>,
) -> io::Result<PathBuf> {
    let mut hundredths = 0;
    loop {
        let time = now + Duration::from_millis(10 * hundredths);
        let part = time.subsec_nanosecond() / 10_000_000;
        let named = private::behind(
            path,
            &format!(".{}{part:02}", time.strftime("%Y%m%d%H%M%S")),
        );
        // The clock may have been set back, by an hour in autumn.
        let is_behind = hundredths > 1000 || last.is_none_or(|last| *last < named);
        if is_behind && named.symlink_metadata().is_err() {
            match lost {
                Some(lost) => rescue(lost, &mut private::create(&named)?)?,
                None => fs::rename(path, &named)?,
            }
            return Ok(named);
        }
        hundredths += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(output: &Path, when: SwitchOutput) -> RecordOptions {
        RecordOptions {
            output: output.to_owned(),
            switch_output: Some(when),
            switch_max_files: Some(2),
            ..RecordOptions::default()
        }
    }

    fn files(output: &Path, when: SwitchOutput) -> (Files, Waiter) {
        let waiter = Waiter::without_signals().expect("a waiter");
        let files = Files::of(&options(output, when), &waiter);
        (files.expect("files").expect("several"), waiter)
    }

    #[test]
    fn files_are_called_as_perf_calls_them() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.data");
        let now: Zoned = "2026-03-04T05:06:07.089+02:00[+02:00]"
            .parse()
            .expect("a time");
        for expected in [
            "a.data.2026030405060708",
            "a.data.2026030405060709",
            "a.data.2026030405060710",
        ] {
            fs::write(&path, expected).expect("a file");
            let named = put_away(&path, &now, None, None).expect("renamed");
            assert_eq!(named, folder.path().join(expected));
            assert_eq!(fs::read_to_string(named).expect("text"), expected);
        }
        assert!(put_away(&path, &now, None, None).is_err(), "there is none");
        // One that was removed meanwhile leaves no name that would be out of order.
        fs::write(&path, "last").expect("a file");
        let last = folder.path().join("a.data.2026030405060799");
        let named = put_away(&path, &now, Some(&last), None).expect("renamed");
        assert_eq!(named, folder.path().join("a.data.2026030405060800"));
        // One that somebody else has replaced is written anew, and that one stays.
        fs::write(&path, "ours").expect("a file");
        let mut ours = File::open(&path).expect("a file");
        fs::remove_file(&path).expect("removed");
        fs::write(&path, "foreign").expect("a file");
        let named = put_away(&path, &now, None, Some(&mut ours)).expect("written");
        assert_eq!(fs::read_to_string(named).expect("text"), "ours");
        assert_eq!(fs::read_to_string(&path).expect("text"), "foreign");
    }

    #[test]
    fn a_signal_that_nobody_waits_for_ends_nothing() {
        pass_over_signal().expect("a handler");
        signal_hook::low_level::raise(SIGUSR2).expect("a signal");
    }

    #[test]
    fn the_oldest_go() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.data");
        let (mut files, _waiter) = files(&path, SwitchOutput::Signal);
        let names: Vec<String> = (0..4)
            .map(|number| {
                fs::write(&path, number.to_string()).expect("a file");
                files.put_away(None).expect("renamed")
            })
            .collect();
        let there: Vec<bool> = names.iter().map(|name| Path::new(name).exists()).collect();
        assert_eq!(there, [false, false, true, true]);
    }

    #[test]
    fn a_signal_a_size_or_a_time_begins_another() {
        let (path, now) = (Path::new("a.data"), Instant::now());
        let nothing = Woken::default();
        let (mut by_size, _waiter) = files(path, SwitchOutput::Size(100));
        assert_eq!(by_size.due(), None);
        assert!(!by_size.is_due(&nothing, 99, now) && by_size.is_due(&nothing, 100, now));
        let second = Duration::from_secs(1);
        let (mut by_time, _waiter) = files(path, SwitchOutput::Time(second));
        by_time.begin(now);
        assert_eq!(by_time.due(), Some(now + second));
        assert!(!by_time.is_due(&nothing, u64::MAX, now));
        assert!(by_time.is_due(&nothing, 0, now + second));
        by_time.begin(now + second);
        assert!(!by_time.is_due(&nothing, 0, now + second));
        // All that listen hear it, and one that has is not woken again.
        let (mut by_signal, waiter) = files(path, SwitchOutput::Signal);
        assert!(!by_signal.is_due(&nothing, u64::MAX, now + second));
        signal_hook::low_level::raise(SIGUSR2).expect("a signal");
        let woken = waiter.wait(Some(Instant::now() + second)).expect("a wait");
        assert!(by_signal.is_due(&woken, 0, now));
        let woken = waiter.wait(Some(Instant::now())).expect("a wait");
        assert!(!by_signal.is_due(&woken, 0, now));
    }

    #[test]
    fn only_files_are_switched() {
        let waiter = Waiter::without_signals().expect("a waiter");
        for output in ["-", "/dev/null"] {
            let refused = Files::of(&options(Path::new(output), SwitchOutput::Signal), &waiter);
            let error = refused.expect_err(output).to_string();
            assert!(error.contains("name a file with -o"), "{error}");
        }
        let one = RecordOptions::default();
        assert!(Files::of(&one, &waiter).expect("no error").is_none());
    }
}
