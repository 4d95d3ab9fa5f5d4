//! `umpire arbiterd`, and the ways into the tools that ask it: `lease`, `leases`, `who`,
//! `revoke`, `pardon` and `hog`.

use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};

use arbiter_host::{BootTime, CpuSet, HostArbiter, Owner, TenantId};
use umpire_arbiterd::budget::{self, Follows, Handed, HandedEvent, NotMeasured, Rings};
use umpire_arbiterd::{ArbiterConfig, Arbiterd, PmuConfig, ServeError, hierarchies};
use umpire_lease::{Counters, LeaseScope, Request};
use umpire_tools::host::{self, HoldOptions, HostOptions};
use vmm::config::BudgetChoice;
use vmm_control::Access;

use crate::exit::{ExitStatus, UserError};
use crate::flags::{
    ArbiterFlag, ArbiterdFlags, HogFlags, HolderFlags, LeaseFlags, LeaseTerms, LeasesFlags,
    PardonFlags, RevokeFlags,
};
use crate::logging::{self, LogOptions};

/// `umpire arbiterd`.
///
/// # Errors
/// The configuration or the socket cannot be used.
pub fn arbiterd(flags: &ArbiterdFlags) -> Result<ExitStatus, UserError> {
    logging::start(&LogOptions {
        verbose: flags.verbose,
        file: None,
    })?;
    let mut config = match &flags.config {
        None => ArbiterConfig::default(),
        Some(path) => ArbiterConfig::read(path).map_err(UserError::bad_input)?,
    };
    if let Some(words) = &flags.budget {
        config.pmus.insert(0, stated(words)?);
    }
    if let Some(state) = &flags.state {
        config.state = Some(state.clone());
    }
    if let Some(text) = &flags.metrics {
        let address = text.parse();
        config.metrics =
            Some(address.map_err(|wrong| UserError::bad_input(format!("--metrics {wrong}")))?);
    }
    if let Some(root) = &flags.host_root {
        config.root.clone_from(root);
    }
    let socket = flags
        .socket
        .clone()
        .unwrap_or_else(umpire_lease::default_socket);
    if flags.check_config {
        check(&config)?;
    }
    if let Some(file) = &flags.config {
        for warning in config.warnings() {
            if flags.check_config {
                eprintln!("umpire: warning: {}: {warning}", file.display());
            } else {
                log::warn!("{}: {warning}", file.display());
            }
        }
    }
    if flags.check_config {
        return Ok(ExitStatus::SUCCESS);
    }
    if let Some(text) = &flags.explain {
        return explain(flags, &config, socket, text);
    }
    let mode = u32::from_str_radix(&flags.socket_mode, 8)
        .ok()
        .filter(|mode| *mode <= 0o777);
    let access = Access {
        mode: mode.ok_or_else(|| {
            let given = &flags.socket_mode;
            UserError::bad_input(format!(
                "--socket-mode {given}: give permission bits like 660"
            ))
        })?,
        group: flags.socket_group,
    };
    let service = Arbiterd::start(config, flags.config.as_deref(), &socket, &access);
    let service = service.map_err(start_error)?;
    service
        .run()
        .map_err(|error| UserError::with_status(error, ExitStatus::HOST_FAILURE))?;
    Ok(ExitStatus::SUCCESS)
}

fn start_error(error: ServeError) -> UserError {
    let status = match &error {
        ServeError::Io { .. } => ExitStatus::HOST_FAILURE,
        _ => ExitStatus::BAD_INPUT,
    };
    UserError::with_status(error, status)
}

/// The PMU of `--budget`.
fn stated(words: &str) -> Result<PmuConfig, UserError> {
    let choice = BudgetChoice::parse(words, false).ok_or_else(|| {
        let right = "give numbers like programmable=4,fixed=3";
        UserError::bad_input(format!("--budget {words}: {right}"))
    })?;
    stated_pmu(choice)
}

/// A PMU with so many counters.
pub(crate) fn stated_pmu(choice: BudgetChoice) -> Result<PmuConfig, UserError> {
    let pmu = PmuConfig::stated(choice.programmable.unwrap_or(0), choice.fixed.unwrap_or(0));
    pmu.ok_or_else(|| {
        let right = "give at least one counter, and at most 32 of each kind";
        UserError::bad_input(format!("a budget that no PMU has; {right}"))
    })
}

/// An arbiter of `config` that nobody has asked yet.
fn fresh(config: &ArbiterConfig) -> Result<HostArbiter, UserError> {
    const ONLINE: &str = "sys/devices/system/cpu/online";
    let path = config.root.join(ONLINE);
    let wrong = |why: &dyn std::fmt::Display| {
        UserError::bad_input(format!(
            "the host's CPUs cannot be read: {}: {why}",
            path.display()
        ))
    };
    let online = std::fs::read_to_string(&path).map_err(|error| wrong(&error))?;
    let online: CpuSet = online.trim().parse().map_err(|error| wrong(&error))?;
    if config.pmus.is_empty() {
        return Err(start_error(ServeError::NoPmu));
    }
    HostArbiter::new(config.host_pmus(&online), config.policy.clone()).map_err(UserError::bad_input)
}

fn check(config: &ArbiterConfig) -> Result<(), UserError> {
    let whole = config.clone().with_watchdog();
    whole.map_err(UserError::bad_input)?;
    // A policy for a host whose kernel shows its PMU cannot be held against it here.
    if !config.pmus.is_empty() {
        fresh(config)?;
    }
    Ok(())
}

fn explain(
    flags: &ArbiterdFlags,
    config: &ArbiterConfig,
    socket: PathBuf,
    text: &str,
) -> Result<ExitStatus, UserError> {
    let request = request_of(text)?;
    let mut out = BufWriter::new(io::stdout().lock());
    let options = HostOptions {
        socket: Some(socket.clone()),
        json: flags.json,
    };
    if std::os::unix::net::UnixStream::connect(&socket).is_ok() {
        host::explain(&options, request, &mut out)?;
        return Ok(ExitStatus::SUCCESS);
    }
    let arbiter = fresh(config)?;
    let tenant = match &request.tenant {
        None => Some(TenantId(0)),
        Some(name) => config.policy.named(name),
    };
    let Some(tenant) = tenant else {
        let known: Vec<&str> = config
            .policy
            .tenants
            .iter()
            .map(|tenant| tenant.name.as_str())
            .collect();
        let known = known.join(", ");
        let what = format!("--explain: there is no such tenant; the policy has: {known}");
        return Err(UserError::bad_input(what));
    };
    let owner = Owner {
        tenant,
        uid: 0,
        pid: std::process::id(),
        label: request.label.clone().unwrap_or_default(),
        by: None,
    };
    let answer = umpire_arbiterd::explain(&arbiter, config, owner, &request, BootTime(0));
    let answer = answer.map_err(|wrong| UserError::bad_input(format!("--explain: {wrong}")))?;
    host::print_explained(&answer, flags.json, &mut out)?;
    Ok(ExitStatus::SUCCESS)
}

/// The parts of a list `KEY=VALUE,…`; a comma inside a list of CPUs is one before a digit.
fn parts_of(text: &str) -> Vec<String> {
    let mut parts: Vec<String> = Vec::new();
    for part in text.split(',') {
        match parts.last_mut() {
            Some(last) if !part.contains('=') && part.starts_with(|c: char| c.is_ascii_digit()) => {
                last.push(',');
                last.push_str(part);
            }
            _ => parts.push(part.to_owned()),
        }
    }
    parts
}

fn number_of(part: &str, value: &str) -> Result<u64, String> {
    let number = value.parse();
    number.map_err(|_| format!("'{value}' is no number, in '{part}'"))
}

/// What a lease is to be like, by one part of a list. Returns whether it is about that.
fn set_term(request: &mut Request, part: &str) -> Result<bool, String> {
    let (key, value) = part.split_once('=').unwrap_or((part, "yes"));
    let yes = || match value {
        "yes" | "true" => Ok(true),
        "no" | "false" => Ok(false),
        _ => Err(format!("give yes or no, in '{part}'")),
    };
    match key {
        "tenant" => request.tenant = Some(value.to_owned()),
        "label" => request.label = Some(value.to_owned()),
        "priority" => {
            let priority = number_of(part, value)?;
            request.priority = Some(u8::try_from(priority).unwrap_or(u8::MAX));
        }
        "best-effort" => request.guaranteed = Some(!yes()?),
        "preemptible" => request.preemptible = Some(yes()?),
        "wait" => request.waits_ms = yes()?.then_some(-1),
        "for-ms" => request.lasts_ms = Some(number_of(part, value)?),
        _ => return Ok(false),
    }
    Ok(true)
}

/// What the lease of a VM is to be like (`--arbiter-terms`).
pub(crate) fn terms_of(text: &str) -> Result<Request, String> {
    let mut request = Request::default();
    for part in parts_of(text) {
        if !set_term(&mut request, &part)? {
            let key = part.split('=').next().unwrap_or_default();
            return Err(format!(
                "'{key}' is not said of a VM's lease; it has tenant, label, priority, for-ms, \
                 best-effort, preemptible and wait"
            ));
        }
    }
    Ok(request)
}

/// The request of `--explain`.
fn request_of(text: &str) -> Result<Request, UserError> {
    let wrong = |what: String| UserError::bad_input(format!("--explain {text}: {what}"));
    let mut request = Request::default();
    for part in parts_of(text) {
        if set_term(&mut request, &part).map_err(wrong)? {
            continue;
        }
        let (key, value) = part.split_once('=').unwrap_or((part.as_str(), "yes"));
        let number = || number_of(&part, value).map_err(wrong);
        let small = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        match key {
            "counters" => request
                .counters
                .push(Counters::programmable(small(number()?))),
            "fixed" => request.counters.push(Counters::fixed(small(number()?))),
            "event" => request.counters.push(event(value)),
            "at-least" => request.at_least = Some(small(number()?)),
            "cpus" => request.cpus = Some(value.to_owned()),
            "cgroup" => {
                request.scope = Some(LeaseScope::Cgroup);
                request.cgroup = Some(value.to_owned());
            }
            _ => {
                return Err(wrong(format!(
                    "'{key}' is no part of a request; it has counters, fixed, event, at-least, \
                     cpus, cgroup, tenant, label, priority, for-ms, best-effort, preemptible and wait"
                )));
            }
        }
    }
    if request.counters.is_empty() {
        request.counters.push(Counters::programmable(1));
    }
    Ok(request)
}

fn event(name: &str) -> Counters {
    Counters {
        event: Some(name.to_owned()),
        ..Counters::default()
    }
}

fn options(flag: &ArbiterFlag, json: bool) -> HostOptions {
    HostOptions {
        socket: flag.arbiter.clone(),
        json,
    }
}

fn request(terms: &LeaseTerms, mut counters: Vec<Counters>) -> Request {
    let ms = |time: std::time::Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1);
    for one in &mut counters {
        one.pmu = terms.pmu.clone();
    }
    Request {
        counters,
        cpus: terms.cpus.clone(),
        guaranteed: terms.best_effort.then_some(false),
        priority: terms.priority,
        preemptible: terms.preemptible.then_some(true),
        lasts_ms: terms.duration.map(|span| ms(span.0)),
        waits_ms: terms
            .wait
            .map(|most| most.map_or(-1, |span| i64::try_from(ms(span.0)).unwrap_or(i64::MAX))),
        tenant: terms.tenant.clone(),
        label: terms.label.clone(),
        ..Request::default()
    }
}

/// `umpire lease`. The status may be the command's.
///
/// # Errors
/// There is no arbiter, it refuses, or the command cannot be started.
pub fn lease(flags: &LeaseFlags) -> Result<u8, UserError> {
    let command = flags.command().map_err(UserError::bad_input)?;
    let mut counters: Vec<Counters> = flags
        .counters
        .map(Counters::programmable)
        .into_iter()
        .collect();
    counters.extend(flags.fixed.map(Counters::fixed));
    counters.extend(flags.event.iter().map(|name| event(name)));
    if counters.is_empty() {
        counters.push(Counters::programmable(1));
    }
    let label = flags.terms.label.clone().or_else(|| {
        let program = command.first()?.to_string_lossy();
        program.rsplit('/').next().map(str::to_owned)
    });
    let request = Request {
        at_least: flags.at_least,
        label,
        ..request(&flags.terms, counters)
    };
    if flags.cgroup.is_some() {
        let request = Request {
            scope: Some(LeaseScope::Cgroup),
            cgroup: flags.cgroup.clone(),
            for_uid: flags.for_user,
            for_gid: flags.for_group,
            ..request
        };
        let options = options(&flags.arbiter, false);
        host::lease_group(&options, &request, &mut io::stdout().lock())?;
        if flags.cgroup.as_deref().is_some_and(is_empty_group) {
            eprintln!(
                "umpire: nothing runs in that control group yet: the lease ends unless something \
                 comes to run there within the arbiter's arrive-ms (10 s, if its configuration \
                 says no other time)"
            );
        }
        return Ok(0);
    }
    let options = HoldOptions {
        host: options(&flags.arbiter, false),
        request,
        renew: flags.renew,
        command: command.to_vec(),
    };
    Ok(host::hold(&options, &mut io::stderr())?)
}

/// Whether nothing runs in a control group, as far as it is seen from here.
fn is_empty_group(path: &str) -> bool {
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = own.lines().find_map(|line| line.strip_prefix("0::"));
    let from = if path.starts_with('/') {
        "/"
    } else {
        own.unwrap_or("/")
    };
    let below = Path::new(from.trim_start_matches('/')).join(path.trim_start_matches('/'));
    let tops = hierarchies(Path::new("/")).unwrap_or_default();
    let events = |top: &PathBuf| std::fs::read_to_string(top.join(&below).join("cgroup.events"));
    let mut seen = tops.iter().filter_map(|top| events(top).ok());
    seen.any(|events| events.lines().any(|line| line == "populated 0"))
}

/// `umpire hog`.
///
/// # Errors
/// There is no arbiter, or it refuses.
pub fn hog(flags: &HogFlags) -> Result<u8, UserError> {
    if flags.no_lease {
        return hog_without_lease(flags);
    }
    let label = flags
        .terms
        .label
        .clone()
        .unwrap_or_else(|| "hog".to_owned());
    let options = HoldOptions {
        host: options(&flags.arbiter, false),
        request: Request {
            label: Some(label),
            ..request(&flags.terms, vec![Counters::programmable(flags.counters)])
        },
        renew: false,
        command: Vec::new(),
    };
    Ok(host::hold(&options, &mut io::stderr())?)
}

/// An event that each programmable counter counts, and no fixed-function counter: retired
/// branches on Intel's processors, taken ones on AMD's.
const ANY_COUNTER: u64 = 0xc4;

/// `umpire hog --no-lease`: pins perf events, and keeps them until Ctrl-C or `--for`.
fn hog_without_lease(flags: &HogFlags) -> Result<u8, UserError> {
    let wrong = |what: String| UserError::bad_input(format!("--no-lease: {what}"));
    let pmus = budget::discover(Path::new("/")).map_err(UserError::bad_input)?;
    let name = flags.terms.pmu.as_deref();
    let pmu = pmus
        .iter()
        .find(|pmu| name.is_none_or(|name| pmu.name == name));
    let pmu = pmu.ok_or_else(|| wrong("the kernel shows no such hardware PMU".to_owned()))?;
    let cpus = match &flags.terms.cpus {
        None => pmu.measured_on(),
        Some(list) => list
            .parse()
            .map_err(|error| wrong(format!("--cpus {list}: {error}")))?,
    };
    let mut events = Vec::new();
    for cpu in cpus.iter() {
        for number in 0..flags.counters {
            let event = HandedEvent {
                spec: pmu.event(ANY_COUNTER),
                thread: None,
                cpu: Some(cpu),
                rings: Rings::All,
                period: None,
                follows: Follows::Nothing,
            };
            let opened = Handed::open(&event).and_then(|event| {
                event.enable()?;
                Ok((event.enabled()?, event))
            });
            match opened {
                Ok((Some(_), event)) => events.push(event),
                Ok((None, _)) => {
                    return Err(wrong(format!(
                        "CPU {cpu} has {number} free counters, and {} were asked for; see: umpire \
                         who {cpu}",
                        flags.counters
                    )));
                }
                Err(errno) => {
                    let why = NotMeasured::from(errno);
                    return Err(wrong(format!("an event on CPU {cpu}: {why}")));
                }
            }
        }
    }
    let count = flags.counters;
    eprintln!("umpire: {count} events are pinned on each of the CPUs {cpus}, without a lease");
    host::pass_time(flags.terms.duration.map(|span| span.0))?;
    Ok(0)
}

/// `umpire leases`.
///
/// # Errors
/// There is no arbiter, or standard output cannot be written to.
pub fn leases(flags: &LeasesFlags) -> Result<ExitStatus, UserError> {
    let mut out = BufWriter::new(io::stdout().lock());
    host::leases(&options(&flags.arbiter, flags.json), &mut out)?;
    Ok(ExitStatus::SUCCESS)
}

/// `umpire who`.
///
/// # Errors
/// There is no arbiter, or nobody of that name.
pub fn who(flags: &HolderFlags) -> Result<ExitStatus, UserError> {
    let mut out = BufWriter::new(io::stdout().lock());
    host::who(
        &options(&flags.arbiter, flags.json),
        flags.whose.as_deref(),
        &mut out,
    )?;
    Ok(ExitStatus::SUCCESS)
}

/// `umpire revoke`.
///
/// # Errors
/// There is no arbiter or no such lease, or the caller may not revoke it.
pub fn revoke(flags: &RevokeFlags) -> Result<ExitStatus, UserError> {
    let mut out = BufWriter::new(io::stdout().lock());
    host::revoke(
        &options(&flags.arbiter, flags.json),
        flags.lease,
        flags.grace,
        &mut out,
    )?;
    Ok(ExitStatus::SUCCESS)
}

/// `umpire pardon`.
///
/// # Errors
/// There is no arbiter, the user is not barred, or the caller is no operator.
pub fn pardon(flags: &PardonFlags) -> Result<ExitStatus, UserError> {
    let mut out = BufWriter::new(io::stdout().lock());
    host::pardon(&options(&flags.arbiter, false), flags.uid, &mut out)?;
    Ok(ExitStatus::SUCCESS)
}
