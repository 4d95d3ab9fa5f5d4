//! The server with vCPUs that the tests play.

use std::sync::Arc;
use std::time::{Duration, Instant};

use perfmon_abi::LoadArg;
use perfmon_abi::wire::Call;
use pmu_virt::PmuModel;
use pmu_virt::perfmon::{ContextId, FormatRegistry, LogicalPmu};
use umpire_perfmon::Client;

use super::{Machine, Server};
use crate::perfmon::config::ControlConfig;
use crate::perfmon::desk::{Desk, Done, Job, Tray, Trays, Work};

/// A machine of two vCPUs, with a server and a client.
struct Stage {
    server: Server,
    trays: Trays,
    client: Client,
    _folder: tempfile::TempDir,
}

impl Stage {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = ControlConfig::at(folder.path().join("control"));
        let (desk, trays) = Desk::new(2, None).unwrap();
        let pmu = LogicalPmu::new(PmuModel::parse("amd-core").unwrap());
        let machine = Machine {
            guest: String::new(),
            counters: String::new(),
            pmu: Arc::new(pmu),
            formats: Arc::new(FormatRegistry::with_builtin()),
            tsc_khz: 1_000_000,
            desk,
            memory: None,
        };
        let server = Server::start(machine, &config).unwrap();
        let client = Client::connect(&config.socket).unwrap();
        Self {
            server,
            trays,
            client,
            _folder: folder,
        }
    }
}

/// The next job of a vCPU.
fn job(tray: &Tray) -> Job {
    let began = Instant::now();
    loop {
        if let Some(job) = tray.take() {
            return job;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "no job comes");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_server_that_ends_leaves_no_context_behind() {
    let stage = Stage::new();
    let context = stage.client.create(0, None, &[]).unwrap();
    std::thread::scope(|scope| {
        let arg = LoadArg { pid: 1, set: 0 };
        let (client, context) = (&stage.client, &context);
        let load = scope.spawn(move || client.call(context, &mut Call::Load(arg)));
        // The vCPU has it from now on.
        job(&stage.trays.vcpus[1]).act(|_, work| match work {
            Work::Load(..) => Done::Loaded(Ok(())),
            other => Done::Undone(other),
        });
        load.join().unwrap().unwrap();
    });
    drop(stage.server);
    job(&stage.trays.vcpus[1]).act(|id, work| {
        assert_eq!(id, ContextId(1));
        assert!(matches!(work, Work::Unload), "{work:?}");
        Done::Unloaded(None)
    });
}
