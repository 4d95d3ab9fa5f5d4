//! What a recording of a guest says, through `umpire`, and what a test makes of it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use super::own_program;
use crate::umpire;

/// A folder with recordings, and with the guest's programs below `root`.
#[derive(Debug)]
pub struct Recordings(TempDir);

impl Recordings {
    /// A folder without recordings, with `program` of `guest-tests/linux`.
    ///
    /// # Panics
    /// The program cannot be built, or there is no room.
    #[must_use]
    pub fn of(program: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let programs = folder.path().join("root/usr/bin");
        fs::create_dir_all(&programs).expect("a folder");
        let built = own_program(program).expect("a program");
        fs::write(programs.join(program), built).expect("a file");
        Self(folder)
    }

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// What `umpire` prints of a recording.
    ///
    /// # Panics
    /// It fails.
    #[must_use]
    pub fn umpire(&self, file: &str, arguments: &[&str]) -> String {
        let output = Command::new(umpire::path())
            .args(arguments)
            .args(["-i", file, "--symfs", "root"])
            .current_dir(self.path())
            .output();
        let output = output.expect("umpire");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {errors}");
        String::from_utf8(output.stdout).expect("text")
    }

    /// These fields of a recording's samples.
    ///
    /// # Panics
    /// `umpire script` fails, or what it prints is no JSON.
    #[must_use]
    pub fn samples(&self, file: &str, fields: &str) -> Vec<Sample> {
        let text = self.umpire(file, &["script", "-j", "-F", fields]);
        let records = text
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"));
        let samples = records.filter(|record: &Value| record["kind"] == "sample");
        samples.map(Sample).collect()
    }
}

/// A sample, as `umpire script -j` prints it.
#[derive(Debug)]
pub struct Sample(pub Value);

impl Sample {
    /// It was taken in the kernel.
    #[must_use]
    pub fn in_kernel(&self) -> bool {
        self.0["ring"] == "kernel"
    }

    /// It was taken in a program.
    #[must_use]
    pub fn in_program(&self) -> bool {
        self.0["ring"] == "user"
    }

    /// Where it was taken.
    ///
    /// # Panics
    /// It has no `ip`.
    #[must_use]
    pub fn ip(&self) -> u64 {
        address(self.0["ip"].as_str().expect("an address"))
    }

    /// The symbol that it is in; empty where none is known.
    #[must_use]
    pub fn symbol(&self) -> &str {
        self.0["symbol"].as_str().unwrap_or_default()
    }

    /// The functions of its chain, the innermost first.
    #[must_use]
    pub fn chain(&self) -> Vec<&str> {
        let frames = self.0["callchain"].as_array().into_iter().flatten();
        frames
            .filter_map(|frame| frame["symbol"].as_str())
            .collect()
    }
}

/// A number in hexadecimal digits.
///
/// # Panics
/// It is none.
#[must_use]
pub fn address(text: &str) -> u64 {
    u64::from_str_radix(text.trim_start_matches("0x"), 16).expect("an address")
}

/// The word behind the first that is `name`.
///
/// # Panics
/// There is none.
#[must_use]
pub fn word<'a>(text: &'a str, name: &str) -> &'a str {
    let mut words = text.split_whitespace().skip_while(|word| *word != name);
    words
        .nth(1)
        .unwrap_or_else(|| panic!("no {name} in {text}"))
}

/// How many of what was judged are right, and how many there are.
#[derive(Debug, Default)]
pub struct Tally(BTreeMap<&'static str, (u32, u32)>);

impl Tally {
    /// One of `what` is right, or is not.
    pub fn judge(&mut self, what: &'static str, is_right: bool) {
        let (right, all) = self.0.entry(what).or_default();
        *right += u32::from(is_right);
        *all += 1;
    }

    /// Right ones of `what`, and all of them.
    #[must_use]
    pub fn of(&self, what: &str) -> (u32, u32) {
        self.0.get(what).copied().unwrap_or_default()
    }

    /// At least so many percent of `what` are right, and there are enough of them.
    ///
    /// # Panics
    /// It is not so.
    pub fn at_least(&self, percent: u32, what: &str) {
        let (right, all) = self.of(what);
        assert!(
            all >= 20 && right * 100 >= all * percent,
            "{what}: {right} of {all}"
        );
    }
}
