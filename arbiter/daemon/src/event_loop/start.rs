//! How the service starts: what it finds, what it takes over, and where it listens.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use crate::budget::Handed;
use arbiter_host::{HostArbiter, HostPolicyError, LeaseId, Tenant};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use thiserror::Error;
use umpire_service::{
    Access, ClientSocket, Closer, Kind, Listener, SocketError, Wording, raise_open_files,
};

use super::desk::Desk;
use super::doors::{Doors, Incoming};
use super::held::HeldBack;
use super::reload::Reloads;
use super::turns::Turns;
use super::{Arbiterd, FIRST, GROUPS, HANGUP, OPENED, REREAD, SIGHTS, STOP, THREADS, now};
use crate::audit::{Trail, unix_ms};
use crate::broker::{Broker, PREFIX};
use crate::config::{ArbiterConfig, ConfigError, Members};
use crate::connections::{Complaints, Rates, Table};
use crate::group_watch::Groups;
use crate::host::HostFiles;
use crate::journal::Recalled;
use crate::manager::Manager;
use crate::probe::{self, Found};
use crate::room::Room;
use crate::scrape::Scrapers;
use crate::service::Service;
use crate::store::{Store, StoreError};
use crate::threads::Threads;

const WORDING: Wording = Wording {
    option: "--socket",
    server: "arbiter",
};

/// What the service manager has given.
#[derive(Debug, Default)]
pub(super) struct Given {
    socket: Option<UnixListener>,
    /// Events that it has kept since an arbiter before, with their names.
    events: Vec<(String, Handed)>,
    /// It may keep some again.
    managed: bool,
}

impl Given {
    /// `LISTEN_FDS` and `LISTEN_FDNAMES`: sd_listen_fds(3).
    fn from_manager() -> Self {
        let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
        let mut names = names.split(':');
        let mut all = listenfd::ListenFd::from_env();
        let mut given = Given {
            managed: true,
            ..Given::default()
        };
        for at in 0..all.len() {
            let name = names.next().unwrap_or_default();
            if !name.starts_with(PREFIX) {
                let socket = all.take_unix_listener(at).ok().flatten();
                given.socket = given.socket.or(socket);
                continue;
            }
            let event = all.take_raw_fd(at).ok().flatten();
            match event.map(Handed::given) {
                Some(Ok(event)) => given.events.push((name.to_owned(), event)),
                Some(Err(why)) => log::warn!("{name}, of the service manager: {why}"),
                None => {}
            }
        }
        given
    }
}

/// By whom the service hears what it is to do.
#[derive(Debug)]
pub(super) struct Ends {
    /// Can be read from when it is to end.
    pub(super) stop: UnixStream,
    /// Can be read from when the configuration is to be read again.
    pub(super) hangup: UnixStream,
    /// Is told of both.
    pub(super) manager: Manager,
}

/// The service could not start, or had to end.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The socket cannot be had.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The journal cannot be kept.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The policy does not fit the host.
    #[error("{0}")]
    Policy(#[from] HostPolicyError),
    /// The configuration cannot be used here.
    #[error("{0}")]
    Config(#[from] ConfigError),
    /// The audit cannot be kept.
    #[error("audit {}: {error}; give another file, or none", .path.display())]
    Audit { path: PathBuf, error: io::Error },
    /// There is nothing to give.
    #[error(
        "this host shows no PMU, and the configuration states none: give --budget \
         programmable=N[,fixed=N], or a [[pmu]] in the --config file"
    )]
    NoPmu,
    /// The kernel shows PMUs, and this process may not measure them.
    #[error("{0}")]
    NotMeasured(String),
    /// The kernel did not do what it always does.
    #[error("{what}: {error}")]
    Io {
        /// What was tried.
        what: &'static str,
        error: io::Error,
    },
}

pub(crate) fn failed(what: &'static str) -> impl FnOnce(io::Error) -> ServeError {
    move |error| ServeError::Io { what, error }
}

impl Arbiterd {
    /// Starts the service at `socket`, or at the one that the service manager gave.
    /// `config_file` is read again at SIGHUP.
    ///
    /// # Errors
    /// The socket or the journal cannot be had, or the policy does not fit the host.
    pub fn start(
        config: ArbiterConfig,
        config_file: Option<&Path>,
        socket: &Path,
        access: &Access,
    ) -> Result<Self, ServeError> {
        let stop = signal_pipe(&[SIGINT, SIGTERM]).map_err(failed("signals"))?;
        let hangup = signal_pipe(&[SIGHUP]).map_err(failed("signals"))?;
        let ends = Ends {
            stop,
            hangup,
            manager: Manager::of_environment(),
        };
        let given = Given::from_manager();
        Self::start_until(ends, given, config, config_file, socket, access)
    }

    /// The same, at the socket that was `given` if one was, with the events.
    pub(super) fn start_until(
        ends: Ends,
        mut given: Given,
        config: ArbiterConfig,
        config_file: Option<&Path>,
        socket: &Path,
        access: &Access,
    ) -> Result<Self, ServeError> {
        let Ends {
            stop,
            hangup,
            mut manager,
        } = ends;
        let files = raise_open_files();
        let ground = Ground::find(config, &mut manager)?;
        let found = ground.found.clone();
        let told = ground.told();
        let mut desk = ground.desk(files)?;
        if let Some(folder) = socket.parent() {
            let _ = fs::create_dir_all(folder);
        }
        let closer = Closer::new(files);
        // Who finds the socket finds these, too.
        let scrapers = desk.service().config().metrics.as_ref();
        let scrapers = scrapers.map(|address| Scrapers::listen(address, access, &closer));
        let scrapers = scrapers.transpose()?;
        let broker = broker(&mut desk, socket, access, &closer, files, &mut given)?;
        desk.set_trail(trail(desk.service().config())?);
        // Without a journal this one does not know what an arbiter before it has given. That one
        // has left its socket; whose socket is another's may have had one.
        let follows = socket.exists() || given.socket.is_some();
        let incoming = incoming(given.socket, socket, access, closer)?;
        if !desk.keeps_journal() && follows {
            desk.service_mut().wait_for_holders(now());
        }
        let (looked, tells) = UnixStream::pair().map_err(failed("socketpair"))?;
        looked.set_nonblocking(true).map_err(failed("socketpair"))?;
        let sights = if found.is_empty() {
            None
        } else {
            Some(probe::watch(found, tells).map_err(failed("the probe's thread"))?)
        };
        let per_second = desk.service().config().requests_per_second;
        let arbiterd = Arbiterd {
            desk,
            doors: Doors::new(incoming).map_err(failed("epoll"))?,
            stop,
            hangup,
            looked,
            sights,
            reloads: Reloads::new(config_file).map_err(failed("socketpair"))?,
            manager,
            scrapers,
            held_back: HeldBack::restored(told, broker.as_ref().map_or(0, Broker::last_order)),
            broker,
            connections: Table::new(),
            next: FIRST,
            rates: Rates::new(per_second),
            renewals: Rates::new(per_second),
            room: Room::new(),
            complaints: Complaints::default(),
            turns: Turns::default(),
            held: None,
            is_free: false,
            gone: Vec::new(),
        };
        arbiterd.watch_all().map_err(failed("epoll"))?;
        Ok(arbiterd)
    }

    /// Has all that it waits for reported.
    fn watch_all(&self) -> io::Result<()> {
        self.watch_incoming(true)?;
        let opened = self.broker.as_ref().map(|all| (all.opened_fd(), OPENED));
        let all = [
            (self.desk.threads_fd(), THREADS),
            (self.desk.groups_fd(), GROUPS),
            (self.stop.as_fd(), STOP),
            (self.hangup.as_fd(), HANGUP),
            (self.looked.as_fd(), SIGHTS),
            (self.reloads.as_fd(), REREAD),
        ];
        let mut all = all.into_iter().chain(opened);
        all.try_for_each(|(fd, token)| self.doors.watch(fd, token))
    }
}

/// What the service stands on: the journal of before, and the host with its counters.
struct Ground {
    config: ArbiterConfig,
    host: HostFiles,
    store: Option<Store>,
    recalled: Option<Recalled>,
    /// The PMUs that were measured; none, where they are stated.
    found: Vec<Found>,
}

impl Ground {
    fn find(config: ArbiterConfig, manager: &mut Manager) -> Result<Self, ServeError> {
        let config = config.with_watchdog()?;
        let host = HostFiles::new(&config).map_err(failed("reading the CPUs of this host"))?;
        let (store, recalled) = match &config.state {
            None => (None, None),
            Some(folder) => {
                let boot_id = boot_id().map_err(failed("reading the id of this boot"))?;
                let (store, recalled) = Store::open(folder, &boot_id)?;
                (Some(store), Some(recalled))
            }
        };
        // What is stated is taken at its word; else what the kernel shows is measured.
        let found = if config.pmus.is_empty() {
            let recorded = recalled.as_ref().map(Recalled::counters);
            let recorded = recorded.unwrap_or_default();
            manager.starts("Measures the counters of the host.");
            probe::found(host.present(), None, &recorded).map_err(ServeError::NotMeasured)?
        } else {
            Vec::new()
        };
        Ok(Ground {
            config,
            host,
            store,
            recalled,
            found,
        })
    }

    /// What was told of the leases of before, or was going to be: they may hold more as soon as they
    /// are known again.
    fn told(&self) -> BTreeMap<LeaseId, usize> {
        let leases = self.recalled.iter().flat_map(|recalled| &recalled.leases);
        let told = leases.map(|(id, lease)| (LeaseId(*id), lease.holds));
        told.collect()
    }

    /// Tenants that the policy does not name any more keep what they hold.
    fn keep_tenants(&mut self) {
        let recalled = self.recalled.iter();
        for lease in recalled.flat_map(|recalled| recalled.leases.values()) {
            let tenants = &mut self.config.policy.tenants;
            if tenants.iter().all(|tenant| tenant.name != lease.tenant) {
                tenants.push(Tenant {
                    retired: true,
                    ..Tenant::open(&lease.tenant)
                });
                self.config.members.push(Members::default());
            }
        }
    }

    /// The service on it, with the leases of before. `files`: the most that this process may have
    /// open.
    fn desk(mut self, files: u64) -> Result<Desk, ServeError> {
        let pmus = if self.found.is_empty() {
            self.config.host_pmus(self.host.present())
        } else {
            self.found.iter().map(|found| found.host.clone()).collect()
        };
        if pmus.is_empty() {
            return Err(ServeError::NoPmu);
        }
        self.keep_tenants();
        let arbiter = HostArbiter::new(pmus, self.config.policy.clone())?;
        self.host.expect_watchdog(&self.config, self.found.first());
        let named = self.found.iter();
        let named = named.map(|found| (found.host.name.clone(), found.perf_type()));
        self.config.perf_types = named.collect();
        let most = usize::try_from(files / 4).unwrap_or(usize::MAX);
        let threads = Threads::new(most).map_err(failed("epoll"))?;
        let groups = Groups::new(most / 2, &self.config.root).map_err(failed("epoll"))?;
        let service = Service::new(arbiter, self.config);
        let mut desk = Desk::new(service, self.store, self.host, threads, groups);
        desk.follow_cpus(now());
        if let Some(recalled) = self.recalled {
            desk.restore(recalled, now());
        }
        desk.look_at_host(now());
        Ok(desk)
    }
}

/// The companion socket, if a tenant may have events, with the events of before. Those are looked
/// at also if no tenant may have any now.
fn broker(
    desk: &mut Desk,
    socket: &Path,
    access: &Access,
    closer: &Closer,
    files: u64,
    given: &mut Given,
) -> Result<Option<Broker>, ServeError> {
    if !desk.service().config().opens_events() && given.events.is_empty() {
        return Ok(None);
    }
    let listener = Broker::listen(socket, access, closer)?;
    let root = desk.service().config().root.clone();
    let broker = Broker::new(listener, (files, closer), given.managed, &root);
    let mut broker = broker.map_err(failed("the companion socket"))?;
    broker.restore(std::mem::take(&mut given.events), desk.service(), now().0);
    let service = desk.service_mut();
    broker
        .take_told()
        .into_iter()
        .for_each(|told| service.hear(told));
    Ok(Some(broker))
}

fn trail(config: &ArbiterConfig) -> Result<Option<Trail>, ServeError> {
    let trail = config.audit.clone().map(|audit| {
        let path = audit.path.clone();
        Trail::open(audit, unix_ms()).map_err(|error| ServeError::Audit { path, error })
    });
    trail.transpose()
}

/// The socket that was given, or one of this process's.
fn incoming(
    given: Option<UnixListener>,
    socket: &Path,
    access: &Access,
    closer: Closer,
) -> Result<Incoming, ServeError> {
    let Some(given) = given else {
        let listener = Listener::new(socket, Kind::Stream, access, WORDING, &closer)?;
        return Ok(Incoming::Own(listener));
    };
    given
        .set_nonblocking(true)
        .map_err(failed("the socket that was given"))?;
    // Who has connected already may send descriptors, or has.
    let given = ClientSocket::new(given.into(), &closer);
    given.refuse_rights();
    Ok(Incoming::Given(given, closer))
}

/// Without it a journal of another boot would pass for one of this.
fn boot_id() -> io::Result<String> {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(id.trim().to_owned())
}

/// What can be read from once one of `signals` has come.
fn signal_pipe(signals: &[i32]) -> io::Result<UnixStream> {
    let (receiver, sender) = UnixStream::pair()?;
    receiver.set_nonblocking(true)?;
    for &signal in signals {
        signal_hook::low_level::pipe::register(signal, sender.try_clone()?)?;
    }
    Ok(receiver)
}
