//! Where counts and notes go.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::{ArgGroup, Args};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

use super::print::{Form, write_header};
use crate::ToolError;

/// Where counts go: standard error, as perf's do, if nobody says.
#[derive(Clone, Debug, Default, Args)]
#[command(group = ArgGroup::new("sink").args(["output", "log_fd"]))]
pub struct SinkOptions {
    /// Print counts into this file [default: standard error]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Print behind what the file has already
    #[arg(long, requires = "sink")]
    pub append: bool,
    /// Print counts to this open file descriptor; 1 is standard output
    #[arg(long, value_name = "N")]
    pub log_fd: Option<u16>,
    /// Print neither counts nor notes
    #[arg(long)]
    pub quiet: bool,
}

/// The two streams of a tool that counts.
pub(super) struct Sink {
    /// Counts.
    pub(super) out: Box<dyn Write>,
    /// What has no place among them, a line each.
    pub(super) notes: Box<dyn Write>,
}

impl SinkOptions {
    /// Opens what is to be written to. Notes among counts that programs read are comments.
    ///
    /// # Errors
    /// The file cannot be written, or no such descriptor is open for writing.
    pub(super) fn open(&self, form: &Form) -> Result<Sink, ToolError> {
        if self.quiet {
            return Ok(Sink {
                out: Box::new(io::sink()),
                notes: Box::new(io::sink()),
            });
        }
        let file: Option<Box<dyn Write>> = match (&self.output, self.log_fd) {
            // For perf this is where counts go anyway.
            (Some(path), _) if path.as_os_str() == "-" => None,
            (Some(path), _) => Some(Box::new(CountFile::open(path, self.append, form)?)),
            (None, Some(1)) => {
                return Ok(Sink {
                    out: Box::new(BufWriter::new(io::stdout())),
                    notes: Box::new(io::stderr()),
                });
            }
            (None, None | Some(2)) => None,
            (None, Some(number)) => Some(Box::new(descriptor(number)?)),
        };
        Ok(match file {
            Some(file) => Sink {
                out: Box::new(BufWriter::new(file)),
                notes: Box::new(io::stderr()),
            },
            None => Sink {
                out: Box::new(BufWriter::new(io::stderr())),
                notes: if form.is_read_by_programs() {
                    Box::new(Commented::new(io::stderr()))
                } else {
                    Box::new(io::stderr())
                },
            },
        })
    }
}

/// The file that counts go to, as perf begins one: but what it had stays until there is a
/// count, for nothing may come of what was asked for.
struct CountFile {
    file: File,
    append: bool,
    /// Goes before the first count; nothing once it has.
    header: Option<Vec<u8>>,
}

impl CountFile {
    fn open(path: &Path, append: bool, form: &Form) -> Result<Self, ToolError> {
        let failed = |error: io::Error| ToolError::Input(format!("-o {}: {error}", path.display()));
        let mut options = OpenOptions::new();
        let options = options.create(true).write(true).append(append);
        let file = options.truncate(false).open(path).map_err(failed)?;
        let mut header = Vec::new();
        write_header(form, &mut header).map_err(failed)?;
        Ok(Self {
            file,
            append,
            header: Some(header),
        })
    }
}

impl Write for CountFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(header) = self.header.take() {
            // A pipe or a device has no length.
            if !self.append && self.file.metadata()?.is_file() {
                self.file.set_len(0)?;
            }
            self.file.write_all(&header)?;
        }
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// The file behind a descriptor that whoever started this program has left open. It is asked
/// for before anything else is opened, which would have the number.
fn descriptor(number: u16) -> Result<File, ToolError> {
    let refused = |why: String| ToolError::Input(format!("--log-fd {number}: {why}"));
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{number}"));
    let info = info.map_err(|_| {
        refused(format!(
            "no such descriptor is open; a shell opens one by {number}>FILE"
        ))
    })?;
    if !is_writable(&info) {
        return Err(refused("it is not open for writing".to_owned()));
    }
    // The same open file, so that what others write there comes behind.
    let own = pidfd_open(getpid(), PidfdFlags::empty());
    let same = own.and_then(|own| pidfd_getfd(own, number.into(), PidfdGetfdFlags::empty()));
    match same {
        Ok(same) => Ok(same.into()),
        // Some containers forbid this; a file is opened once more then.
        Err(_) => OpenOptions::new()
            .append(true)
            .open(format!("/proc/self/fd/{number}"))
            .map_err(|error| refused(error.to_string())),
    }
}

/// Whether a descriptor with this `/proc/PID/fdinfo/FD` can be written to.
fn is_writable(info: &str) -> bool {
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    // O_WRONLY or O_RDWR.
    flags.is_some_and(|flags| matches!(flags & 0o3, 1 | 2))
}

/// Puts a comment's sign before each line.
struct Commented<W> {
    inner: W,
    begins: bool,
}

impl<W: Write> Commented<W> {
    fn new(inner: W) -> Self {
        Self {
            inner,
            begins: true,
        }
    }
}

impl<W: Write> Write for Commented<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            if self.begins {
                self.inner.write_all(b"# ")?;
            }
            self.inner.write_all(line)?;
            self.begins = line.ends_with(b"\n");
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_among_fields_are_comments() {
        let mut out = Vec::new();
        let mut notes = Commented::new(&mut out);
        write!(notes, "a").unwrap();
        write!(notes, "b\nc\n").unwrap();
        writeln!(notes, "d").unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "# ab\n# c\n# d\n");
    }

    #[test]
    fn a_file_stays_as_it_was_until_there_is_a_count() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        let check = |append: bool, text: &str, expected: &str| {
            std::fs::write(&path, "before\n").unwrap();
            let options = SinkOptions {
                output: Some(path.clone()),
                append,
                ..SinkOptions::default()
            };
            let form = Form::Table { grouped: false };
            let mut sink = options.open(&form).unwrap();
            sink.out.write_all(text.as_bytes()).unwrap();
            drop(sink);
            let found = std::fs::read_to_string(&path).unwrap();
            let lines = found.lines().map(|line| line.get(..9).unwrap_or(line));
            assert_eq!(lines.collect::<Vec<_>>().join("|"), expected);
        };
        check(false, "", "before");
        check(true, "", "before");
        check(false, "1\n2\n", "# started|1|2");
        check(true, "1\n", "before|# started|1");
    }

    #[test]
    fn a_descriptor_is_looked_at_before_it_is_used() {
        assert!(is_writable("pos:\t0\nflags:\t0100001\nmnt_id:\t1\n"));
        assert!(is_writable("pos:\t0\nflags:\t02\n"));
        assert!(!is_writable("pos:\t0\nflags:\t0100000\n"));
        assert!(!is_writable(""));
        let error = descriptor(60_000).expect_err("it is closed").to_string();
        assert!(
            error.contains("--log-fd 60000: no such descriptor is open"),
            "{error}"
        );
        // What is written by the copy comes behind what was, and before what will be.
        let mut file = tempfile::tempfile().unwrap();
        let number = u16::try_from(std::os::fd::AsRawFd::as_raw_fd(&file)).unwrap();
        file.write_all(b"one ").unwrap();
        descriptor(number).unwrap().write_all(b"two ").unwrap();
        file.write_all(b"three").unwrap();
        io::Seek::rewind(&mut file).unwrap();
        assert_eq!(io::read_to_string(file).unwrap(), "one two three");
    }
}
