//! Boots the guest with `umpire run`, on KVM in L1 or here on the engine emu, and returns what
//! its script printed.

use std::ffi::OsString;
use std::fs;
use std::path::{self, Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tempfile::NamedTempFile;
use vmm::config::Engine;

use super::{COMMAND_LINE, Guest, LinuxImage, Step, steps};
use crate::l1::tool::last_lines;
use crate::l1::{End, GUEST_OUT, Machine, Output, Run};
use crate::umpire;

/// Guests whose time is measured closely write ([`UnderUmpire::alone`]): two emulated machines on
/// two processors would measure each other. Others read.
static ALONE: RwLock<()> = RwLock::new(());

/// For the guest, and what L1 takes around it.
const TIMEOUT: Duration = Duration::from_secs(300);
/// For one on this machine, whose neighbours take as much of that as they like.
const EMULATED: Duration = Duration::from_secs(900);
const AROUND: Duration = Duration::from_secs(60);

/// Plays the host beside the guest, with its socket in the folder $1, in the folder $2: a line
/// `host: ARGUMENTS` on the guest's console is a call of `umpire` with these arguments, made before
/// the next line is looked at. What it prints goes to stderr. The guest gets a line when it has
/// ended ([`on_host`](UnderUmpire::on_host)). One that begins with `host&` goes on beside the guest
/// until that says `host: end`, which is an interrupt from the keyboard for the call.
const HOST: &str = r#"
set -o pipefail
export UMPIRE_PERFMON=$1/guest.sock
mkfifo "$1/keys" && exec 3<>"$1/keys" && cd "$2" || exit 125
shift 2
"$@" --control "$UMPIRE_PERFMON" --audit audit.json <&3 | while IFS= read -r line; do
    printf '%s\n' "$line"
    case $line in
    'host& '*) "$1" ${line#host& } >&2 </dev/null 3>&- & continue ;;
    'host: end') kill -INT $!; wait $! ;;
    'host: '*) "$1" ${line#host: } >&2 </dev/null 3>&- ;;
    *) continue ;;
    esac
    echo done >&3
done
"#;

/// A guest that `umpire run` boots.
#[derive(Debug, Clone)]
pub struct UnderUmpire {
    image: LinuxImage,
    flags: Vec<String>,
    command_line: String,
    out: Option<PathBuf>,
    alone: bool,
    emulated: bool,
    timeout: Duration,
    /// Declares what its simulated events do, for as long as it may be booted.
    _rates: Option<Arc<NamedTempFile>>,
}

/// What is left of a guest that has powered off.
#[derive(Debug, Clone)]
pub struct LinuxRun {
    /// The script's steps, all of them.
    pub steps: Vec<Step>,
    /// What `umpire` itself printed on stderr.
    pub errors: String,
}

/// How `umpire` ended.
struct Booted {
    /// Its exit status; none if it had to be ended, or its machine ended before it.
    status: Option<i32>,
    /// The guest's console.
    out: String,
    errors: String,
    /// The last lines of the machine's, if it had one of its own.
    console: String,
}

impl UnderUmpire {
    /// A guest of `image`, with `flags` for `umpire run`: on KVM in L1, unless all guests are to
    /// be [`emulated`](Self::emulated) (`UMPIRE_TEST_ENGINE`).
    #[must_use]
    pub fn new(image: LinuxImage, flags: &[&str]) -> Self {
        Self {
            image,
            flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
            command_line: COMMAND_LINE.to_owned(),
            out: None,
            alone: false,
            emulated: umpire::on_emu(),
            timeout: if umpire::on_emu() { EMULATED } else { TIMEOUT },
            _rates: None,
        }
    }

    /// As [`new`](Self::new), on this engine.
    #[must_use]
    pub fn on(engine: Engine, image: LinuxImage, flags: &[&str]) -> Self {
        let guest = Self::new(image, flags);
        match engine {
            Engine::Kvm => guest,
            Engine::Emu => guest.emulated(),
        }
    }

    /// As [`new`](Self::new); cycles come from the TSC, and other events have these `rates`,
    /// the text of a table for `sim`. It runs [`alone`](Self::alone), and its kernel has no
    /// watchdog, which would use counters.
    ///
    /// # Panics
    /// There is no room for the table.
    #[must_use]
    pub fn with_rates(image: LinuxImage, flags: &[&str], rates: &str) -> Self {
        let file = tempfile::Builder::new().suffix(".toml").tempfile();
        let file = file.expect("a file");
        std::fs::write(file.path(), rates).expect("a file");
        let counters = format!("clock,sim={}", file.path().display());
        let flags = [flags, &["--counters", &counters]].concat();
        Self {
            _rates: Some(Arc::new(file)),
            alone: true,
            ..Self::new(image, &flags).with_kernel_options("nmi_watchdog=0")
        }
    }

    /// Runs while no other guest of this process does: its time is measured closely.
    #[must_use]
    pub fn alone(mut self) -> Self {
        self.alone = true;
        self
    }

    /// Runs on this machine by a processor in software, which needs no KVM and so no L1. What it
    /// counts and does depends on no neighbour. A seed makes two runs of it equal.
    #[must_use]
    pub fn emulated(mut self) -> Self {
        self.emulated = true;
        self.timeout = EMULATED;
        self
    }

    /// Gives up after this time only, which whole seconds are.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Calls `umpire` on the host where the guest's console has a line `host: ARGUMENTS`: for
    /// tools, which find the guest, and write to the folder `out`. So does the audit, to
    /// `audit.json`.
    #[must_use]
    pub fn with_host(mut self, out: impl Into<PathBuf>) -> Self {
        self.out = Some(out.into());
        self
    }

    /// For a script's line: calls `umpire` on the host with `arguments`, and goes on when it has
    /// ended. Both for guests that have a host, once for each call that was not waited for before.
    #[must_use]
    pub fn on_host(arguments: &str) -> String {
        format!("echo host: {arguments}; read -r answer </dev/console")
    }

    /// For a script's line: calls `umpire` on the host with `arguments`, and interrupts that as
    /// from a keyboard when the guest has run `command`. So it lasts for a time of the guest's.
    #[must_use]
    pub fn on_host_during(arguments: &str, command: &str) -> String {
        format!("echo 'host& {arguments}'; {command}; echo host: end; read -r answer </dev/console")
    }

    /// Adds words to the kernel's command line.
    #[must_use]
    pub fn with_kernel_options(mut self, words: &str) -> Self {
        self.command_line.push(' ');
        self.command_line.push_str(words);
        self
    }

    /// Runs `script`, whose lines are the steps. They may fail, the guest may not.
    ///
    /// # Panics
    /// If L1 or the guest fails, or does not come to the end of the script.
    #[must_use]
    pub fn run(&self, script: &str) -> LinuxRun {
        let Booted {
            status,
            out,
            errors,
            console,
        } = self.boot(script);
        assert_eq!(status, Some(0), "{out}\n{errors}\n{console}");
        let steps = steps(&out);
        let is_step = |line: &&str| !line.is_empty() && !line.starts_with('#');
        assert_eq!(
            steps.len(),
            script.lines().filter(is_step).count(),
            "{out}\n{errors}"
        );
        LinuxRun { steps, errors }
    }

    /// Runs `script` until the guest is gone, which may be in the middle of it, and gives the
    /// guest's console and what `umpire` printed on stderr.
    ///
    /// # Panics
    /// If L1 fails, or the guest has not ended in time.
    #[must_use]
    pub fn run_to_any_end(&self, script: &str) -> (String, String) {
        let Booted {
            status,
            out,
            errors,
            console,
        } = self.boot(script);
        let ended = status.is_some_and(|status| status != 124);
        assert!(ended, "{out}\n{errors}\n{console}");
        (out, errors)
    }

    /// Boots it and waits for its end.
    fn boot(&self, script: &str) -> Booted {
        let guest = self.image.with_script(script).expect("the initramfs");
        if self.emulated {
            return self.boot_here(&guest);
        }
        let output = self.boot_in_l1(&guest);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Booted {
            status: match output.outcome.end {
                End::Exited(status) => Some(status.into()),
                _ => None,
            },
            out: text(&output.stdout),
            errors: text(&output.stderr),
            console: last_lines(&output.outcome.console, 30),
        }
    }

    /// The arguments of `umpire` that depend on no place.
    fn arguments(&self, guest: &Guest) -> Vec<OsString> {
        let seconds = self.timeout.as_secs().to_string();
        let words = ["run", "--memory", "512", "--timeout", &seconds, "--cmdline"];
        let words = words.into_iter().chain([self.command_line.as_str()]);
        let flags = self.flags.iter().map(String::as_str);
        let mut arguments: Vec<OsString> = words.chain(flags).map(OsString::from).collect();
        let files = [
            OsString::from("--kernel"),
            absolute(guest.kernel()),
            "--initrd".into(),
            absolute(guest.initrd()),
        ];
        arguments.extend(files);
        arguments
    }

    fn boot_here(&self, guest: &Guest) -> Booted {
        let mut arguments = self.arguments(guest).into_iter();
        let run = arguments.next().expect("the word");
        // It ends by itself at its time, unless it hangs.
        let mut command = Command::new("timeout");
        command.arg((self.timeout + AROUND).as_secs().to_string());
        let folder = tempfile::tempdir().expect("a folder");
        if let Some(out) = &self.out {
            fs::create_dir_all(out).expect("a folder");
            command.args(["bash", "-c", HOST, "host"]);
            command.arg(folder.path()).arg(out);
        }
        command.arg(umpire::path()).arg(run);
        command.args(["--engine", "emu"]).args(arguments);
        command.stdin(Stdio::null());
        let output = command.output().expect("timeout(1) runs it");
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Booted {
            status: output.status.code(),
            out: text(output.stdout),
            errors: text(output.stderr),
            console: String::new(),
        }
    }

    fn boot_in_l1(&self, guest: &Guest) -> Output {
        let shared = (!self.alone).then(|| ALONE.read());
        let alone = self.alone.then(|| ALONE.write());
        let _shared = shared.map(|lock| lock.unwrap_or_else(PoisonError::into_inner));
        let _alone = alone.map(|lock| lock.unwrap_or_else(PoisonError::into_inner));
        let program = match &self.out {
            // `-c`'s next argument is a name, and the others are the command.
            Some(out) => Run::new("bash")
                .args(["-c", HOST, "host", "/tmp", GUEST_OUT])
                .arg(umpire::path())
                .out(out),
            None => Run::new(umpire::path()),
        };
        let run = program.args(self.arguments(guest));
        // With two, QEMU now and then mixes up L1 and its guest (docs/internals/testing.md,
        // "Limits of L1").
        let machine = Machine::new()
            .memory_mib(2048)
            .smp(1)
            .timeout(self.timeout + AROUND);
        machine.output(&run).expect("L1 works")
    }
}

/// The same file, wherever somebody is.
fn absolute(file: &Path) -> OsString {
    path::absolute(file).expect("a working directory").into()
}

impl LinuxRun {
    /// The steps, all of which must have succeeded.
    ///
    /// # Panics
    /// If one has not.
    #[must_use]
    pub fn successes(self) -> Vec<Step> {
        for step in &self.steps {
            assert_eq!(step.status, Some(0), "{}:\n{}", step.command, step.output);
        }
        self.steps
    }
}
