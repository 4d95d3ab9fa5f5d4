//! The server, with vCPUs that the tests play.

mod asking;
mod ending;
mod memory;

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use perfmon_abi::wire::info::{CountableInfo, VcpuState};
use perfmon_abi::wire::pcr::{PcrAct, PcrRequest};
use perfmon_abi::wire::{Call, Errno, MAX_PACKET, NO_CONTEXT, Reply, Request};
use perfmon_abi::{CtxArg, LoadArg, PmcInfo, Record, SetDesc};
use pmu_virt::perfmon::{ContextId, FormatRegistry, LogicalPmu};
use pmu_virt::{CountRequest, EventFilters, EventProfile, PmuModel};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use umpire_perfmon::Client;
use umpire_service::{ClientSocket, Closer, Rights, send_packet};

use super::contexts::table::MOST_SETS;
use super::{ServedVm, Server};
use crate::config::ControlConfig;
use crate::dispatcher::{JobDispatcher, JobQueue, JobQueues};
use crate::job::{Done, Job, VcpuView, View, Work};
use crate::kernel::GuestKernel;
use crate::serve::serve_inspection;

/// Bytes of all sampling buffers.
const MOST_BUFFERS: u64 = 1 << 20;

/// A machine of two vCPUs, with a server and a client.
struct Stage {
    server: Server,
    queues: JobQueues,
    client: Client,
    _folder: tempfile::TempDir,
}

impl Stage {
    fn new() -> Self {
        Self::of(2)
    }

    fn of(vcpus: usize) -> Self {
        Self::filtered(vcpus, EventFilters::default())
    }

    fn filtered(vcpus: usize, events: EventFilters) -> Self {
        Self::served(vcpus, events, None)
    }

    fn served(vcpus: usize, events: EventFilters, kernel: Option<Arc<dyn GuestKernel>>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut config = ControlConfig::at(folder.path().join("control"));
        config.buffers = MOST_BUFFERS;
        let (dispatcher, queues) = JobDispatcher::new(vcpus, None).unwrap();
        let model = PmuModel::parse("amd-core").unwrap();
        let countable = [("cycles", 0x43_0076), ("misses", 0x43_0964)].map(|(event, select)| {
            let info = CountableInfo {
                event: event.to_owned(),
                select: Some(select),
                provenance: "exact".to_owned(),
            };
            (CountRequest::decode(model.events(), select), info)
        });
        let pmu = LogicalPmu::new(model);
        let vm = ServedVm {
            lease_desk: None,
            events,
            guest: String::new(),
            counters: String::new(),
            pmu: Arc::new(pmu),
            formats: Arc::new(FormatRegistry::with_builtin()),
            tsc_khz: 1_000_000,
            virtual_time: false,
            core_cpus: Vec::new(),
            contexts_per_vcpu: 1,
            dispatcher,
            memory: None,
            kernel,
            countable: countable.to_vec(),
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

    fn socket(&self) -> std::path::PathBuf {
        self._folder.path().join("control")
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
fn what_may_not_be_counted_is_not_countable() {
    let countable = |profile| {
        let stage = Stage::filtered(1, EventFilters::of(profile));
        let model = stage.client.model().unwrap();
        let events = model.countable.into_iter().map(|it| it.event);
        events.collect::<Vec<_>>()
    };
    assert_eq!(countable(EventProfile::All), ["cycles", "misses"]);
    assert_eq!(countable(EventProfile::Architectural), ["cycles"]);
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

/// A connection whose requests are sent without waiting for answers.
struct Wire {
    socket: ClientSocket,
    /// What came with answers, contexts among it.
    files: Vec<Rights>,
}

impl Wire {
    fn new(stage: &Stage) -> Self {
        let flags = SocketFlags::CLOEXEC;
        let kind = SocketType::SEQPACKET;
        let socket = socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
        let path = stage._folder.path().join("control");
        connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        Self {
            socket: ClientSocket::new(socket, &Closer::new(1 << 20)),
            files: Vec::new(),
        }
    }

    fn send(&self, context: u32, call: &Call, fds: &[BorrowedFd<'_>]) {
        let request = Request {
            command: call.command(),
            id: 0,
            context,
            nargs: call.nargs(),
            payload: &call.encode(),
        };
        send_packet(self.socket.as_fd(), &request.encode().unwrap(), fds).unwrap();
    }

    /// The command and the context of the next answer, which is a success.
    fn answer(&mut self) -> (u16, u32) {
        let mut buffer = Box::new([0; MAX_PACKET]);
        let began = Instant::now();
        loop {
            if let Ok(packet) = self.socket.receive(&mut buffer[..]) {
                assert_ne!(packet.bytes, 0, "the server has hung up");
                let reply = Reply::decode(&buffer[..packet.bytes]).unwrap();
                reply.result().unwrap();
                self.files.push(packet.rights);
                return (reply.command, reply.context);
            }
            assert!(began.elapsed() < Duration::from_secs(20), "no answer comes");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A context of its own, loaded on vCPU 1 of `stage`.
    fn load(&mut self, stage: &Stage) -> u32 {
        let create = Call::Create(CtxArg::default(), Vec::new());
        self.send(NO_CONTEXT, &create, &[]);
        let (_, context) = self.answer();
        self.send(context, &Call::Load(LoadArg { pid: 1, set: 0 }), &[]);
        job(&stage.queues.vcpus[1]).act(|_, _| Done::Loaded(Ok(())));
        self.answer();
        context
    }
}

#[test]
fn a_request_waits_for_the_answer_to_the_one_before() {
    let stage = Stage::new();
    let mut wire = Wire::new(&stage);
    let context = wire.load(&stage);
    let first = Call::GetinfoPmcs(vec![PmcInfo::default()]);
    wire.send(context, &Call::Stop, &[]);
    wire.send(context, &first, &[]);
    wire.send(context, &Call::Unload, &[]);
    let stop = job(&stage.queues.vcpus[1]);
    // Others are served meanwhile.
    stage.client.hello().unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert!(stage.queues.vcpus[1].take().is_none());
    stop.act(|_, work| match work {
        Work::Call(call) => Done::Called(call, Ok(())),
        other => Done::Undone(other),
    });
    assert_eq!(wire.answer().0, Call::Stop.command());
    assert_eq!(wire.answer().0, first.command());
    job(&stage.queues.vcpus[1]).act(|_, _| Done::Unloaded(None));
    assert_eq!(wire.answer().0, Call::Unload.command());
    // A connection that ends during its request does not end the request.
    wire.send(context, &Call::Stop, &[]);
    wire.send(context, &first, &[]);
    let stop = job(&stage.queues.vcpus[1]);
    drop(wire);
    stop.act(|_, work| Done::Undone(work));
    stage.client.hello().unwrap();
}

/// A socket that takes so long to be closed: its peer reads nothing.
fn lingering(time: Duration) -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (other, _) = listener.accept().unwrap();
    one.set_nonblocking(true).unwrap();
    while one.write_all(&[0; 1 << 16]).is_ok() {}
    one.set_nonblocking(false).unwrap();
    rustix::net::sockopt::set_socket_linger(&one, Some(time)).unwrap();
    (one.into(), other)
}

/// A vCPU that waits for its tool goes on although a client's descriptor, in a packet
/// that nobody has read, takes long to close with its connection.
#[test]
fn contexts_are_unloaded_before_connections_are_closed() {
    let stage = Stage::new();
    let mut wire = Wire::new(&stage);
    let context = wire.load(&stage);
    let (slow, mut peer) = lingering(Duration::from_secs(60));
    // The vCPU does not do the first one, so the second one is not read.
    wire.send(context, &Call::Stop, &[]);
    let stop = job(&stage.queues.vcpus[1]);
    wire.send(context, &Call::Stop, &[slow.as_fd()]);
    drop(slow);
    let mut server = stage.server;
    let began = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(move || server.stop());
        let unload = job(&stage.queues.vcpus[1]);
        unload.act(|_, work| {
            assert!(matches!(work, Work::Unload), "{work:?}");
            Done::Unloaded(None)
        });
    });
    drop(stop);
    assert!(
        began.elapsed() < Duration::from_secs(30),
        "it was waited for"
    );
    // Its closing has begun, and ends as its peer reads: it is nobody's any more.
    peer.set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    std::io::copy(&mut peer, &mut std::io::sink()).unwrap();
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

#[test]
fn a_vcpu_is_asked_about_its_reservations_and_nobody_else() {
    let stage = Stage::new();
    let client = &stage.client;
    let ask = move |vcpu| {
        let act = PcrAct::Show;
        client.pcr(&PcrRequest { vcpu, act }).unwrap_err()
    };
    std::thread::scope(|scope| {
        let asked = scope.spawn(move || ask(1));
        let job = job(&stage.queues.vcpus[1]);
        assert!(job.is_administration() && !job.is_inspection());
        assert!(!stage.queues.vcpus[0].has_jobs());
        drop(job);
        let refusal = asked.join().unwrap();
        assert_eq!(refusal.errno, Errno::ESRCH);
        assert!(refusal.reason.contains("vCPU 1 has ended"), "{refusal}");
    });
    let refusal = ask(2);
    assert_eq!(refusal.errno, Errno::ESRCH);
    assert!(refusal.reason.contains("the VM has 2"), "{refusal}");
}
