//! What clients have of the VMM's memory, and for how long.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};

use perfmon_abi::consts::DEFAULT_FORMAT;
use perfmon_abi::wire::kernel::{KernelInfo, KernelRequest};
use perfmon_abi::wire::programs::ProgramsInfo;
use perfmon_abi::{DefaultArg, DefaultHeader};
use rustix::fs::fstat;
use umpire_perfmon::ContextHandle;

use super::*;

/// Bytes that the kernel has for a file.
fn held(file: &OwnedFd) -> u64 {
    u64::try_from(fstat(file).unwrap().st_blocks).unwrap() * 512
}

/// A context with a buffer of so many bytes.
fn sampling(client: &Client, bytes: u64) -> Result<ContextHandle, umpire_perfmon::CallError> {
    let argument = DefaultArg {
        buf_size: bytes,
        ..DefaultArg::default()
    };
    client.create(0, Some(DEFAULT_FORMAT), &argument.to_bytes())
}

/// Until it is so, or some seconds have passed.
fn await_that(mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The limit holds for what clients keep of contexts that they have closed.
#[test]
fn buffers_go_with_their_contexts_whoever_keeps_them() {
    let stage = Stage::new();
    let mut kept = Vec::new();
    for round in 0..5 {
        let context = sampling(&stage.client, MOST_BUFFERS).unwrap();
        let refused = sampling(&stage.client, 4096).unwrap_err();
        assert_eq!(refused.errno, Errno::ENOMEM, "round {round}");
        let buffer = context.buffer.as_ref().unwrap();
        assert_eq!(
            held(&buffer.fd),
            MOST_BUFFERS,
            "it is there from the beginning"
        );
        kept.push(buffer.fd.try_clone().unwrap());
        // At once: what goes comes back before the next one is made.
        drop(context);
    }
    let last = sampling(&stage.client, MOST_BUFFERS).unwrap();
    let left: Vec<u64> = kept.iter().map(held).collect();
    assert_eq!(left, [0; 5]);
    // A mapping keeps its context, or its reader would be ended by SIGBUS.
    let mapping = last.map_buffer().unwrap();
    drop(last);
    let refused = sampling(&stage.client, 4096).unwrap_err();
    assert_eq!(refused.errno, Errno::ENOMEM);
    assert_eq!(mapping.word(0), Some(0));
    drop(mapping);
    await_that(|| sampling(&stage.client, MOST_BUFFERS).is_ok());
}

/// What the host does not have is refused, and not found missing as samples come.
#[test]
fn memory_that_there_is_not_is_an_error() {
    let stage = Stage::new();
    let mut config = Call::GetConfig(perfmon_abi::Config::default());
    stage.client.ask(&mut config).unwrap();
    if let Call::GetConfig(config) = config {
        let config = perfmon_abi::Config {
            smpl_buf_size_max: u64::MAX,
            ..config
        };
        stage.client.ask(&mut Call::SetConfig(config)).unwrap();
    }
    for bytes in [1 << 43, 1 << 50, u64::MAX / 2] {
        let refused = sampling(&stage.client, bytes).unwrap_err();
        assert_eq!(refused.errno, Errno::ENOMEM, "{refused:?}");
    }
    sampling(&stage.client, MOST_BUFFERS * 2).unwrap();
}

/// A client that goes away while its buffer is made leaves nothing behind.
#[test]
fn buffers_of_clients_that_are_gone_go() {
    let stage = Stage::new();
    for _ in 0..50 {
        let address = SocketAddrUnix::new(stage.socket()).unwrap();
        let kind = SocketType::SEQPACKET;
        let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        connect(&socket, &address).unwrap();
        let argument = DefaultArg {
            buf_size: MOST_BUFFERS,
            ..DefaultArg::default()
        };
        let wanted = CtxArg {
            format: DEFAULT_FORMAT,
            ..CtxArg::default()
        };
        let call = Call::Create(wanted, argument.to_bytes());
        let payload = call.encode();
        let request = Request {
            command: call.command(),
            id: 1,
            context: NO_CONTEXT,
            nargs: call.nargs(),
            payload: &payload,
        };
        let packet = [&request.header()[..], &payload].concat();
        send_packet(socket.as_fd(), &packet, &[]).unwrap();
    }
    await_that(|| sampling(&stage.client, MOST_BUFFERS).is_ok());
}

/// Whoever looks at the last samples of a VM that ends finds them.
#[test]
fn the_last_samples_outlive_the_server() {
    let mut stage = Stage::new();
    let context = sampling(&stage.client, 8192).unwrap();
    let mapping = context.map_buffer().unwrap();
    stage.server.stop();
    let size = mapping.copy(24, 8).unwrap();
    assert_eq!(u64::from_ne_bytes(size.try_into().unwrap()), 8192);
    assert!(mapping.size() >= DefaultHeader::SIZE);
    assert_eq!(held(&context.buffer.as_ref().unwrap().fd), 8192);
}

/// A kernel with many symbols, which counts how often it was searched for.
#[derive(Debug, Default)]
struct Symbols(AtomicUsize);

impl GuestKernel for Symbols {
    fn find(&self, _: u64) -> Result<KernelInfo, String> {
        let searched = self.0.fetch_add(1, Ordering::Relaxed);
        Ok(KernelInfo {
            release: searched.to_string(),
            kallsyms: "ffffffff81000000 T symbol\n".repeat(100_000),
        })
    }

    fn programs(&self, _: u64) -> ProgramsInfo {
        ProgramsInfo {
            described: Vec::new(),
            more: false,
            next: 0,
            lost: 0,
            unknown: Some("x".repeat(100_000)),
        }
    }
}

/// The file that KERNEL, or another command with a document for its argument, is answered with.
fn file_of(stage: &Stage, command: u16, argument: &[u8]) -> OwnedFd {
    file_at(&stage.socket(), command, argument)
}

fn file_at(socket: &std::path::Path, command: u16, argument: &[u8]) -> OwnedFd {
    let address = SocketAddrUnix::new(socket).unwrap();
    let address = &address;
    let mut link = umpire_perfmon::link::Link::connect(address, Duration::from_secs(20)).unwrap();
    let mut packet = Box::new([0; MAX_PACKET]);
    let at = umpire_perfmon::link::ARGUMENT;
    packet[at..at + argument.len()].copy_from_slice(argument);
    let question = umpire_perfmon::link::Question {
        nargs: i32::from(!argument.is_empty()),
        length: argument.len(),
        ..umpire_perfmon::link::Question::plain(command)
    };
    let answer = link.exchange(question, &mut packet).unwrap();
    let [file, _] = answer.descriptors;
    file.expect("a document that fills more than a packet")
}

#[test]
fn a_kernel_is_one_file_for_all_who_ask() {
    use perfmon_abi::wire::kernel::KERNEL;
    let symbols = Arc::new(Symbols::default());
    let stage = Stage::served(1, EventFilters::default(), Some(symbols.clone()));
    let argument = serde_json::to_vec(&KernelRequest { cr3: 1 }).unwrap();
    let files: Vec<OwnedFd> = (0..8).map(|_| file_of(&stage, KERNEL, &argument)).collect();
    let inode = |file: &OwnedFd| fstat(file).unwrap().st_ino;
    let distinct: std::collections::BTreeSet<u64> = files.iter().map(inode).collect();
    // As often as it was searched for: answers serve for two seconds.
    let searched = symbols.0.load(Ordering::Relaxed);
    assert!(
        distinct.len() <= searched && searched < files.len(),
        "{searched}"
    );
    // Each reads it from its beginning, and nobody writes it.
    for file in &files[6..] {
        let mut text = String::new();
        let mut file = std::fs::File::from(file.try_clone().unwrap());
        std::io::Read::read_to_string(&mut file, &mut text).unwrap();
        let kernel: KernelInfo = serde_json::from_str(&text).unwrap();
        assert_eq!(kernel.kallsyms.len(), 2_600_000);
        assert!(rustix::io::pwrite(&file, b"x", 0).is_err());
        assert!(rustix::fs::ftruncate(&file, 0).is_err());
    }
}

/// A list of thousands of contexts is written once for all who ask meanwhile, and anew once
/// nobody has it any more.
#[test]
fn a_list_is_one_file_for_all_who_ask() {
    let list = perfmon_abi::wire::Extension::List.number();
    let stage = Stage::new();
    let contexts: Vec<ContextHandle> = (0..600)
        .map(|_| stage.client.create(0, None, &[]).unwrap())
        .collect();
    let inode = |file: &OwnedFd| fstat(file).unwrap().st_ino;
    let (queues, socket) = (&stage.queues.vcpus, stage.socket());
    let ask = move || file_at(&socket, list, &[]);
    std::thread::scope(|scope| {
        let asked = scope.spawn(move || {
            let began = Instant::now();
            let mut last = ask();
            // On a busy machine few requests come within one answer's time.
            loop {
                let next = ask();
                if inode(&last) == inode(&next) {
                    return next;
                }
                assert!(began.elapsed() < Duration::from_secs(20), "never the same");
                last = next;
            }
        });
        while !asked.is_finished() {
            inspect(&queues[0], 0);
            inspect(&queues[1], 1);
            std::thread::yield_now();
        }
        let file = asked.join().unwrap();
        let machine: perfmon_abi::wire::info::MachineInfo =
            serde_json::from_reader(std::fs::File::from(file)).unwrap();
        assert_eq!(machine.contexts.len(), contexts.len());
    });
}

/// What its readers kept too many of was cut, and is not handed out again.
#[test]
fn a_document_that_was_cut_is_not_whole() {
    let document = crate::document::Document::of(&"x".repeat(100_000)).unwrap();
    assert!(document.is_whole());
    let mut handed = super::super::handed::Handed::default();
    let mut hand = |document: &crate::document::Document| match document {
        crate::document::Document::Long(file) => handed.add(7, file),
        crate::document::Document::Short(_) => unreachable!("it is long"),
    };
    hand(&document);
    for _ in 0..16 {
        hand(&crate::document::Document::of(&"y".repeat(100_000)).unwrap());
    }
    assert!(!document.is_whole());
}

/// Answers that are made for one request take no more memory than they may, whoever keeps them.
#[test]
fn answers_that_are_kept_are_cut() {
    use perfmon_abi::wire::programs::PROGRAMS;
    let stage = Stage::served(
        1,
        EventFilters::default(),
        Some(Arc::new(Symbols::default())),
    );
    let argument = br#"{"since":0}"#;
    let files: Vec<OwnedFd> = (0..40)
        .map(|_| file_of(&stage, PROGRAMS, argument))
        .collect();
    let there = files.iter().filter(|file| held(file) > 0).count();
    assert!((1..=16).contains(&there), "{there} are there");
    assert!(held(&files[39]) > 0, "the last one is");
}
