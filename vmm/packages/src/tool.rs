//! Runs helper programs (apt, dpkg, and those of whoever uses this) and turns their failures into errors.

use std::io::{self, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::error::PackagesError;

/// How helper programs are run.
#[derive(Clone, Copy, Debug)]
pub struct Tools<'a> {
    /// Where progress of long work goes, a line each.
    pub say: fn(&str),
    /// What to do when a program fails.
    pub advice: &'static str,
    /// A program is ended as soon as this is set, if there is one.
    pub interrupted: Option<&'a AtomicBool>,
}

impl Tools<'_> {
    /// Runs `command` to its end and returns its stdout. `label` is said again every ten seconds,
    /// so that long work does not look like a hang.
    ///
    /// # Errors
    /// The program is missing or fails, or was ended.
    pub fn capture(self, command: &mut Command, label: &str) -> Result<String, PackagesError> {
        let advice = self.advice;
        let name = command.get_program().to_string_lossy().into_owned();
        let shown = shown(command);
        let start = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = start.map_err(|error| start_error(&name, error, advice))?;
        let stdout = child.stdout.take().map(collect);
        let stderr = child.stderr.take().map(collect);
        let status = self.wait(&mut child, label);
        let status = status.map_err(PackagesError::file("wait for", &name))?;
        let Some(status) = status else {
            return Err(PackagesError::Interrupted);
        };
        let text = |reader: Option<thread::JoinHandle<Vec<u8>>>| {
            let bytes = reader.and_then(|thread| thread.join().ok());
            String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned()
        };
        let (stdout, stderr) = (text(stdout), text(stderr));
        if status.success() {
            return Ok(stdout);
        }
        let printed = if stderr.trim().is_empty() {
            &stdout
        } else {
            &stderr
        };
        Err(PackagesError::ToolFailed {
            command: shown,
            status: status.to_string(),
            tail: last_lines(printed, 6),
            advice,
        })
    }

    /// How it ended; none if it was not given the time to.
    fn wait(self, child: &mut Child, label: &str) -> io::Result<Option<ExitStatus>> {
        let start = Instant::now();
        let mut told = Duration::ZERO;
        // Most take some milliseconds, and some minutes.
        let mut pause = Duration::from_millis(1);
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(Some(status));
            }
            if self
                .interrupted
                .is_some_and(|it| it.load(Ordering::Relaxed))
            {
                // It may have ended meanwhile.
                let _ = child.kill();
                child.wait()?;
                return Ok(None);
            }
            thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(50));
            if start.elapsed() >= told + Duration::from_secs(10) {
                told = start.elapsed();
                (self.say)(&format!("still {label} ({} s)", told.as_secs()));
            }
        }
    }
}

/// The last `count` lines of `text` that hold something.
#[must_use]
pub fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

fn start_error(name: &str, error: io::Error, advice: &'static str) -> PackagesError {
    if error.kind() == io::ErrorKind::NotFound {
        return PackagesError::ToolMissing {
            tool: name.to_owned(),
            advice,
        };
    }
    PackagesError::file("start", name)(error)
}

/// The command as a person would type it, cut to a readable length.
fn shown(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(
        command
            .get_args()
            .map(|arg| arg.to_string_lossy().into_owned()),
    );
    if words.len() > 12 {
        words.truncate(12);
        words.push("…".to_owned());
    }
    words.join(" ")
}

fn collect(mut stream: impl Read + Send + 'static) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // A read error ends the text early; the exit status still decides.
        let _ = stream.read_to_end(&mut bytes);
        bytes
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOOLS: Tools<'static> = Tools {
        say: |_| {},
        advice: "be brave",
        interrupted: None,
    };

    #[test]
    fn results_of_tools() {
        fn check(script: &str, expected: Result<&str, &str>) {
            let result = TOOLS.capture(Command::new("sh").args(["-c", script]), "testing");
            match (result, expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected),
                (Err(found), Err(expected)) => {
                    let found = found.to_string();
                    assert!(
                        found.contains(expected) && found.contains("be brave"),
                        "{found}"
                    );
                }
                (found, expected) => panic!("{found:?}, expected {expected:?}"),
            }
        }
        check("echo out; echo err >&2", Ok("out\n"));
        check(
            "echo out; echo why >&2; exit 3",
            Err("(exit status: 3): why"),
        );
        check("echo only; exit 1", Err("only"));
    }

    #[test]
    fn a_missing_tool_is_named() {
        let error = TOOLS.capture(&mut Command::new("no-such-tool-here"), "testing");
        let text = error.expect_err("not there").to_string();
        assert_eq!(text, "no-such-tool-here was not found on PATH; be brave");
    }

    #[test]
    fn who_is_interrupted_ends_the_tool() {
        let began = Instant::now();
        let interrupted = AtomicBool::new(false);
        let tools = Tools {
            interrupted: Some(&interrupted),
            ..TOOLS
        };
        thread::scope(|threads| {
            threads.spawn(|| interrupted.store(true, Ordering::Relaxed));
            let ended = tools.capture(Command::new("sleep").arg("100"), "sleeping");
            assert!(matches!(ended, Err(PackagesError::Interrupted)));
        });
        assert!(began.elapsed() < Duration::from_secs(50));
    }

    #[test]
    fn tails() {
        fn check(text: &str, expected: &str) {
            assert_eq!(last_lines(text, 2), expected);
        }
        check("", "");
        check("a", "a");
        check("a\n\nb\nc\n\n", "b\nc");
    }
}
