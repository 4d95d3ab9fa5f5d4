//! Scripts whose steps have names.

use super::{LinuxImage, Step, UnderUmpire};

/// How many lines of the kernel's log no kernel has that is well.
const TROUBLE: &str = "dmesg >>/tmp/log; \
     grep -cE 'WARNING|BUG|Oops|lockup|general protection|unchecked MSR' /tmp/log || true";

/// What the guest is to do.
#[derive(Debug, Clone, Default)]
pub struct Script {
    names: Vec<&'static str>,
    lines: Vec<String>,
}

/// What its steps printed.
#[derive(Debug, Clone)]
pub struct Log {
    names: Vec<&'static str>,
    steps: Vec<Step>,
    errors: String,
}

impl Script {
    /// Adds a step: one shell command.
    #[must_use]
    pub fn step(mut self, name: &'static str, line: impl Into<String>) -> Self {
        self.names.push(name);
        self.lines.push(line.into());
        self
    }

    /// Loads a module; its messages are the output.
    #[must_use]
    pub fn load(self, name: &'static str, module: &str, options: &str) -> Self {
        let line = format!(
            "dmesg -c >>/tmp/log; insmod /lib/modules/{module}.ko {options} && \
             dmesg | grep '{module}: PMC\\|{module}: CPU'"
        );
        self.step(name, line)
    }

    /// Boots, runs the steps, and looks whether the kernel is well.
    ///
    /// # Panics
    /// If L1, the guest or its kernel is not well.
    #[must_use]
    pub fn run(self, image: LinuxImage, flags: &[&str], options: &str) -> Log {
        self.run_on(&UnderUmpire::new(image, flags).with_kernel_options(options))
    }

    /// Boots `guest`, runs the steps, and looks whether the kernel is well.
    ///
    /// # Panics
    /// If L1, the guest or its kernel is not well.
    #[must_use]
    pub fn run_on(self, guest: &UnderUmpire) -> Log {
        let script = self.step("trouble", TROUBLE);
        let ran = guest.run(&script.lines.join("\n"));
        let log = Log {
            names: script.names,
            steps: ran.steps,
            errors: ran.errors,
        };
        for (name, step) in log.names.iter().zip(&log.steps) {
            println!("--- {name}: {:?}\n{}", step.status, step.output);
        }
        assert_eq!(log.of("trouble"), "0", "{}", log.errors);
        log
    }
}

impl Log {
    /// The step of that name.
    ///
    /// # Panics
    /// If the script has none.
    #[must_use]
    pub fn step(&self, name: &str) -> &Step {
        let at = self.names.iter().position(|found| *found == name);
        &self.steps[at.expect("a step of that name")]
    }

    /// What the step printed.
    #[must_use]
    pub fn of(&self, name: &str) -> &str {
        &self.step(name).output
    }

    /// What `umpire` itself printed on stderr.
    #[must_use]
    pub fn errors(&self) -> &str {
        &self.errors
    }

    /// Checks that each of `lines` is part of what the step printed.
    ///
    /// # Panics
    /// If one is not.
    pub fn has(&self, name: &str, lines: &[&str]) {
        let output = self.of(name);
        for line in lines {
            let errors = &self.errors;
            assert!(
                output.contains(line),
                "{name} has no {line:?}:\n{output}\n{errors}"
            );
        }
    }

    /// Whether the step succeeded.
    #[must_use]
    pub fn succeeded(&self, name: &str) -> bool {
        self.step(name).status == Some(0)
    }
}

/// The lines of an output that has `N`.
///
/// # Panics
/// If it has not.
#[must_use]
pub fn lines<const N: usize>(output: &str) -> [&str; N] {
    let found: Vec<&str> = output.lines().collect();
    found
        .try_into()
        .unwrap_or_else(|_| panic!("not {N} lines:\n{output}"))
}
