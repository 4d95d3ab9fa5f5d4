//! `umpire demo host`: an arbiter, three VMs of two tenants, a tool of the operator's and a
//! hog, each a process of its own, on the counters that the simulated PMU of the VMs has.
//!
//! Who asks is who was just started. All other lines are what the arbiter tells whoever
//! watches it. The simulated PMU counts one event in each tick of guest time, so a counter
//! must have counted as many events as ticks passed while its VM held it.

mod report;

pub(super) use report::write_report;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use iced_x86::code_asm::{eax, ecx, edx};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use umpire_lease::{Arbiter, Event, What};
use vmm::kvm::{Host, VmOptions};
use vmm::micro::{CodeError, ElfImage, KERNEL_CODE, MicroGuest, Start, assemble};

use super::DemoError;
use report::{Holder, HostReport, Line, Tool};

/// Nothing here takes as long.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long everybody counts between two acts.
const COUNTS: Duration = Duration::from_millis(300);
/// Programmable counters of each CPU.
const COUNTERS: u32 = 6;
/// Where the guest's code is.
const BASE: u32 = 0x10_0000;
/// `IA32_PERFEVTSEL0` and `IA32_PERF_GLOBAL_CTRL` (SDM vol. 4, table 2-2).
const SELECT: u32 = 0x186;
const GLOBAL_CONTROL: u32 = 0x38f;
/// Cycles in both rings, enabled.
const CYCLES: u32 = 0x43_003c;

/// Plays the scenario.
///
/// # Errors
/// A process could not be started, or something did not happen in its time.
pub(super) fn perform(host: &Host) -> Result<HostReport, DemoError> {
    let mut stage = Stage::new(tsc_khz(host)?)?;
    let blue = |label: &str| format!("tenant=blue,label={label}");
    let mut first = stage.vm("blue-1", 2, &blue("blue-1"))?;
    let mut second = stage.vm("blue-2", 2, &blue("blue-2"))?;
    let mut batch = stage.vm("green-1", 6, "tenant=green,label=green-1,preemptible")?;
    std::thread::sleep(COUNTS);

    let socket = stage.path("blue-1.sock").display().to_string();
    let counts = [
        "stat",
        "-j",
        "--log-fd",
        "1",
        "-e",
        "{cycles,instructions}",
        "--control",
    ];
    let words = [&counts[..], &[socket.as_str(), "--for", "2s"]].concat();
    let tool = stage.start("tool", &words)?;
    stage.asks("tool", "blue", "counts 2 events of blue-1 at once, for 2 s");
    // It tries first what can be counted, and has a lease for each try.
    stage.until("blue-1: tool", &What::Holds)?;
    std::thread::sleep(2 * COUNTS);
    let hog = [
        "hog",
        "3",
        "--wait",
        "--priority",
        "4",
        "--tenant",
        "agent",
        "--label",
        "hog",
    ];
    stage.asks("hog", "agent", "asks for 3 counters of every CPU, for good");
    let mut hog = stage.start("hog", &hog)?;
    let counted = stage.output(tool)?;
    let held = stage.until("hog", &What::Holds)?;
    std::thread::sleep(COUNTS);

    let lease = held.lease.id.to_string();
    stage.asks(
        "operator",
        "agent",
        &format!("revokes lease {lease}, the hog's"),
    );
    let revoke = stage.start("revoke", &["revoke", &lease])?;
    stage.output(revoke)?;
    stage.until("green-1", &What::Holds)?;
    hog.wait(&stage)?;
    std::thread::sleep(COUNTS);

    let mut holders = Vec::new();
    for vm in [&mut second, &mut batch, &mut first] {
        holders.push(stage.end(vm)?);
    }
    holders.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(HostReport {
        shown: true,
        counters: COUNTERS,
        lines: std::mem::take(&mut stage.lines),
        tool: tool_of(&counted),
        holders,
    })
}

/// How fast the TSC of a guest is here.
fn tsc_khz(host: &Host) -> Result<u32, DemoError> {
    let idle = MicroGuest::new().start(Start::at(KERNEL_CODE, 0));
    let (_vm, vcpus) = idle.build(host, &VmOptions::with_pmu(None))?;
    let first = vcpus.into_iter().next();
    let first = first.ok_or_else(|| DemoError::Guest("it has no vCPU".to_owned()))?;
    Ok(first.get_tsc_khz()?)
}

/// A guest that counts cycles on `counters` counters for ever.
fn kernel(counters: u32) -> Result<Vec<u8>, CodeError> {
    let bytes = assemble(BASE.into(), |a| {
        for n in 0..counters {
            a.mov(ecx, SELECT + n)?;
            a.mov(eax, CYCLES)?;
            a.mov(edx, 0)?;
            a.wrmsr()?;
        }
        a.mov(ecx, GLOBAL_CONTROL)?;
        a.mov(eax, (1 << counters) - 1)?;
        a.mov(edx, 0)?;
        a.wrmsr()?;
        let mut forever = a.create_label();
        a.set_label(&mut forever)?;
        a.jmp(forever)
    })?;
    let image = ElfImage {
        is_64: true,
        address: BASE,
        entry: BASE,
        size: u32::try_from(bytes.len()).unwrap_or(u32::MAX),
        bytes: &bytes,
        note: &[],
    };
    // A few bytes fit into any file.
    Ok(image.file().unwrap_or_default())
}

/// The two counts of the tool, which `umpire stat -j` printed.
fn tool_of(output: &Output) -> Tool {
    let text = String::from_utf8_lossy(&output.stdout);
    let count = |event: &str| {
        let lines = text.lines();
        let rows = lines.filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        let row = rows.into_iter().find(|row| row["event"] == event)?;
        row["counter-value"].as_str()?.parse::<f64>().ok()
    };
    Tool {
        cycles: count("cycles"),
        instructions: count("instructions"),
    }
}

/// A process, ended when this is dropped.
#[derive(Debug)]
struct Process {
    name: &'static str,
    child: Child,
}

impl Process {
    /// Waits for its end.
    fn wait(&mut self, stage: &Stage) -> Result<(), DemoError> {
        let until = Instant::now() + PATIENCE;
        while self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            if Instant::now() > until {
                return Err(stage.astray(&format!("{} does not end", self.name)));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // One that has ended is none of ours to end.
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// What is played, and where.
#[derive(Debug)]
struct Stage {
    program: PathBuf,
    began: Instant,
    events: Receiver<(Instant, Event)>,
    lines: Vec<Line>,
    // Ends before its folder goes.
    _arbiter: Process,
    folder: TempDir,
}

impl Stage {
    /// Starts the arbiter.
    fn new(tsc_khz: u32) -> Result<Self, DemoError> {
        let folder = tempfile::tempdir().map_err(files)?;
        let program = std::env::current_exe().map_err(files)?;
        let socket = folder.path().join("arbiter");
        let config = folder.path().join("arbiter.toml");
        let uid = rustix::process::getuid().as_raw();
        fs::write(&config, policy(uid)).map_err(files)?;
        // One event a tick, which six decimals say exactly.
        let rate = format!("{}.{:03}", tsc_khz / 1000, tsc_khz % 1000);
        let rates = format!(
            "counters = {COUNTERS}\n[event.cycles]\nrate = {rate}\n[event.instructions]\nrate = \
             {rate}\n"
        );
        fs::write(folder.path().join("rates.toml"), rates).map_err(files)?;
        let mut words = vec!["arbiterd".as_ref(), "--config".as_ref(), config.as_os_str()];
        words.extend(["--state".as_ref(), folder.path().as_os_str()]);
        let arbiter = process(&program, "arbiter", folder.path(), &words)?;
        let until = Instant::now() + PATIENCE;
        let mut watch = loop {
            match Arbiter::connect(&socket) {
                Ok(arbiter) => break arbiter,
                Err(_) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(error) => {
                    let log = log(folder.path(), "arbiter");
                    return Err(DemoError::Guest(format!("{error}: {log}")));
                }
            }
        };
        let failed = |error: umpire_lease::CallError| DemoError::Guest(error.to_string());
        watch.watch().map_err(failed)?;
        let (told, events) = channel();
        let began = Instant::now();
        std::thread::spawn(move || {
            while let Ok(Some(event)) = watch.next_event() {
                if told.send((Instant::now(), event)).is_err() {
                    break;
                }
            }
        });
        Ok(Stage {
            program,
            began,
            events,
            lines: Vec::new(),
            _arbiter: arbiter,
            folder,
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// What went wrong, with what the processes have said.
    fn astray(&self, what: &str) -> DemoError {
        let names = [
            "arbiter", "blue-1", "blue-2", "green-1", "tool", "hog", "revoke",
        ];
        let said: Vec<String> = names
            .into_iter()
            .map(|name| (name, log(self.folder.path(), name)))
            .filter(|(_, log)| !log.is_empty())
            .map(|(name, log)| format!("{name}: {log}"))
            .collect();
        DemoError::Guest(format!(
            "{what} within {} s; {}",
            PATIENCE.as_secs(),
            said.join("; ")
        ))
    }

    fn start(&self, name: &'static str, words: &[&str]) -> Result<Process, DemoError> {
        let words: Vec<_> = words.iter().map(std::ffi::OsStr::new).collect();
        process(&self.program, name, self.folder.path(), &words)
    }

    /// Waits for what a process prints.
    fn output(&self, mut process: Process) -> Result<Output, DemoError> {
        process.wait(self)?;
        let name = process.name;
        let status = process.child.wait().map_err(files)?;
        let stdout = fs::read(self.path(&format!("{name}.out"))).map_err(files)?;
        if !status.success() {
            return Err(self.astray(&format!("{name} does not do its work ({status})")));
        }
        Ok(Output {
            status,
            stdout,
            stderr: Vec::new(),
        })
    }

    /// Boots a VM, and waits until it has its lease.
    fn vm(&mut self, name: &'static str, counters: u32, terms: &str) -> Result<Process, DemoError> {
        let file = self.path(&format!("{name}.elf"));
        let kernel = kernel(counters).map_err(|error| DemoError::Guest(error.to_string()))?;
        fs::write(&file, kernel).map_err(files)?;
        let path = |name: String| self.path(&name).display().to_string();
        let pmu = format!("intel-v2,counters={counters},fixed=0");
        let state = path(format!("{name}.state"));
        let control = path(format!("{name}.sock"));
        let kernel = file.display().to_string();
        let words: [&[&str]; 4] = [
            &[
                "run",
                "--kernel",
                &kernel,
                "--memory",
                "16",
                "--timeout",
                "60",
            ],
            &[
                "--pmu",
                &pmu,
                "--cpu-vendor",
                "intel",
                "--oversubscribe",
                "refuse",
                "--counters",
            ],
            &[
                "sim=rates.toml",
                "--arbiter",
                "arbiter",
                "--arbiter-terms",
                terms,
                "--control",
            ],
            &[
                control.as_str(),
                "--save-on-exit",
                &state,
                "--arbiter-shortage",
                "fewer",
            ],
        ];
        let vm = self.start(name, &words.concat())?;
        let tenant = name.split('-').next().unwrap_or_default();
        let kind = if terms.contains("preemptible") {
            "preemptible"
        } else {
            "guaranteed"
        };
        let asks = format!("asks for {counters} counters while its vCPU runs, {kind}");
        self.asks(name, tenant, &asks);
        self.until(name, &What::Holds)?;
        Ok(vm)
    }

    /// Ends a VM. What it counted, and what it should have.
    fn end(&mut self, vm: &mut Process) -> Result<Holder, DemoError> {
        let pid = Pid::from_child(&vm.child);
        kill_process(pid, Signal::INT).map_err(|error| files(error.into()))?;
        vm.wait(self)?;
        let last = self.until(vm.name, &What::Ended)?.lease;
        let state = fs::read(self.path(&format!("{}.state", vm.name))).map_err(files)?;
        Holder::of(vm.name, &last, &state).ok_or_else(|| self.astray("a VM keeps no counts"))
    }

    fn asks(&mut self, who: &str, tenant: &str, what: &str) {
        let at = Instant::now();
        while let Ok((at, event)) = self.events.try_recv() {
            self.decided(at, &event);
        }
        self.tell(at, who, tenant, what.to_owned());
    }

    fn decided(&mut self, at: Instant, event: &Event) {
        let lease = &event.lease;
        self.tell(at, &lease.label, &lease.tenant, event.message.clone());
    }

    fn tell(&mut self, at: Instant, who: &str, tenant: &str, what: String) {
        self.lines.push(Line {
            ms: at.duration_since(self.began).as_secs_f64() * 1e3,
            who: who.to_owned(),
            tenant: tenant.to_owned(),
            what,
        });
    }

    /// Takes down what the arbiter decides until it tells `who` this.
    fn until(&mut self, who: &str, what: &What) -> Result<Event, DemoError> {
        let until = Instant::now() + PATIENCE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let Ok((at, event)) = self.events.recv_timeout(left) else {
                return Err(self.astray(&format!("the arbiter does not say that {who} {what}")));
            };
            self.decided(at, &event);
            if event.lease.label.starts_with(who) && event.what == *what {
                return Ok(event);
            }
        }
    }
}

/// The policy: who is who, and what the host has.
fn policy(uid: u32) -> String {
    format!(
        "grace-ms = 50\n[classes]\nproduction = 5\nbatch = 1\n\
         [[pmu]]\nname = \"cpu\"\nprogrammable = {COUNTERS}\n\
         [[tenant]]\nname = \"agent\"\nusers = [{uid}]\noperator = true\nclass = \"production\"\n\
         [[tenant]]\nname = \"blue\"\nusers = [{uid}]\nclass = \"production\"\n\
         [[tenant]]\nname = \"green\"\nusers = [{uid}]\nclass = \"batch\"\nkeeps = false\n"
    )
}

fn process(
    program: &Path,
    name: &'static str,
    folder: &Path,
    words: &[&std::ffi::OsStr],
) -> Result<Process, DemoError> {
    let out = fs::File::create(folder.join(format!("{name}.out"))).map_err(files)?;
    let log = fs::File::create(folder.join(format!("{name}.log"))).map_err(files)?;
    let child = Command::new(program)
        .args(words)
        .current_dir(folder)
        .env(umpire_lease::SOCKET_VARIABLE, folder.join("arbiter"))
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(log)
        .spawn()
        .map_err(files)?;
    Ok(Process { name, child })
}

/// What a process has said, on one line.
fn log(folder: &Path, name: &str) -> String {
    let text = fs::read_to_string(folder.join(format!("{name}.log"))).unwrap_or_default();
    umpire_events::one_line(&text)
}

fn files(error: io::Error) -> DemoError {
    DemoError::Guest(error.to_string())
}
