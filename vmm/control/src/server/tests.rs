//! The server, with vCPUs that the tests play.

use std::sync::Arc;
use std::time::{Duration, Instant};

use perfmon_abi::wire::info::VcpuState;
use perfmon_abi::wire::{Call, Errno};
use perfmon_abi::{LoadArg, Record, SetDesc};
use pmu_virt::PmuModel;
use pmu_virt::perfmon::{ContextId, FormatRegistry, LogicalPmu};
use umpire_perfmon::Client;

use super::contexts::table::MOST_SETS;
use super::{ServedVm, Server};
use crate::config::ControlConfig;
use crate::dispatcher::{JobDispatcher, JobQueue, JobQueues};
use crate::job::{Done, Job, VcpuView, View, Work};
use crate::serve::serve_inspection;

/// A machine of two vCPUs, with a server and a client.
struct Stage {
    server: Server,
    queues: JobQueues,
    client: Client,
    _folder: tempfile::TempDir,
}

impl Stage {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = ControlConfig::at(folder.path().join("control"));
        let (dispatcher, queues) = JobDispatcher::new(2, None).unwrap();
        let pmu = LogicalPmu::new(PmuModel::parse("amd-core").unwrap());
        let vm = ServedVm {
            guest: String::new(),
            counters: String::new(),
            pmu: Arc::new(pmu),
            formats: Arc::new(FormatRegistry::with_builtin()),
            tsc_khz: 1_000_000,
            dispatcher,
            memory: None,
        };
        let server = Server::start(vm, &config).unwrap();
        let client = Client::connect(&config.socket).unwrap();
        Self {
            server,
            queues,
            client,
            _folder: folder,
        }
    }
}

/// The next job of a vCPU.
fn job(queue: &JobQueue) -> Job {
    let began = Instant::now();
    loop {
        if let Some(job) = queue.take() {
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
        job(&stage.queues.vcpus[1]).act(|_, work| match work {
            Work::Load(..) => Done::Loaded(Ok(())),
            other => Done::Undone(other),
        });
        load.join().unwrap().unwrap();
    });
    drop(stage.server);
    job(&stage.queues.vcpus[1]).act(|id, work| {
        assert_eq!(id, ContextId(1));
        assert!(matches!(work, Work::Unload), "{work:?}");
        Done::Unloaded(None)
    });
}

/// Answers all inspections that wait, and returns how many there were.
fn inspect(queue: &JobQueue, vcpu: usize) -> usize {
    let jobs = std::iter::from_fn(|| queue.take());
    jobs.map(|job| {
        let view = View {
            cores: Vec::new(),
            vcpus: vec![VcpuView::of(vcpu, None, VcpuState::Running)],
        };
        serve_inspection(job, view);
    })
    .count()
}

#[test]
fn a_thread_that_does_not_answer_holds_nobody_up() {
    let stage = Stage::new();
    let began = Instant::now();
    std::thread::scope(|scope| {
        let client = &stage.client;
        let listed = scope.spawn(move || client.list());
        serve_inspection(job(&stage.queues.vcpus[0]), View::default());
        let listed = listed.join().unwrap().unwrap();
        assert_eq!(listed.vcpus[0].state, VcpuState::Ended, "nobody has it");
        assert_eq!(listed.vcpus[1].state, VcpuState::Running, "it is busy");
    });
    assert!(began.elapsed() >= Duration::from_millis(200));
    // A thread that has not answered is not asked again.
    let client = &stage.client;
    std::thread::scope(|scope| {
        let listed = scope.spawn(move || client.list());
        serve_inspection(job(&stage.queues.vcpus[0]), View::default());
        assert_eq!(inspect(&stage.queues.vcpus[1], 1), 1);
        listed.join().unwrap().unwrap();
    });
}

#[test]
fn whoever_lists_all_the_time_does_not_disturb_all_the_time() {
    let stage = Stage::new();
    let (client, queues) = (&stage.client, &stage.queues.vcpus);
    let began = Instant::now();
    let inspections = std::thread::scope(|scope| {
        let listed = scope.spawn(move || {
            while began.elapsed() < Duration::from_millis(300) {
                client.list().unwrap();
            }
        });
        let mut inspections = 0;
        while !listed.is_finished() {
            inspections += inspect(&queues[0], 0);
            inspect(&queues[1], 1);
            std::thread::yield_now();
        }
        listed.join().unwrap();
        inspections
    });
    let most = began.elapsed().as_millis() / 20 + 1;
    assert!(
        inspections > 1 && (inspections as u128) <= most,
        "{inspections} of {most}"
    );
}

#[test]
fn event_sets_of_all_contexts_have_one_limit() {
    let stage = Stage::new();
    let client = &stage.client;
    let sets = |from: usize, count: usize| -> Vec<SetDesc> {
        let set = |id: usize| SetDesc {
            id: u16::try_from(id).unwrap(),
            ..SetDesc::default()
        };
        (from..from + count).map(set).collect()
    };
    // As many as a vector may have.
    let chunk = 4096 / SetDesc::SIZE;
    let mut contexts = Vec::new();
    let mut made = 0;
    let refused = 'full: loop {
        let context = client.create(0, None, &[]).unwrap();
        contexts.push(context);
        let context = contexts.last().unwrap();
        for from in (1..1024 - chunk).step_by(chunk) {
            match client.call(context, &mut Call::CreateEvtsets(sets(from, chunk))) {
                Ok(()) => made += chunk,
                Err(error) => break 'full error,
            }
        }
        assert!(made < 2 * MOST_SETS, "there is no limit");
    };
    assert_eq!(refused.errno, Errno::ENOMEM, "{refused}");
    // Each context has set 0.
    let all = made + contexts.len();
    assert!(all <= MOST_SETS && all + chunk > MOST_SETS, "{all}");
    let call = &mut Call::DeleteEvtsets(sets(1, chunk));
    client.call(&contexts[0], call).unwrap();
    let call = &mut Call::CreateEvtsets(sets(1, chunk));
    client.call(&contexts[0], call).unwrap();
    // The sets of a destroyed context leave room for others.
    contexts.remove(1);
    let call = &mut Call::CreateEvtsets(sets(1, chunk));
    let last = client.create(0, None, &[]).unwrap();
    let began = Instant::now();
    while let Err(error) = client.call(&last, call) {
        assert!(began.elapsed() < Duration::from_secs(5), "{error}");
    }
}
