//! The client against a control socket without a VM.

mod fake;

use std::os::fd::{AsFd, AsRawFd};
use std::thread;
use std::time::{Duration, Instant};

use perfmon_abi::{
    Config, DefaultArg, DefaultEntry, DefaultHeader, LoadArg, PmcArg, PmdArg, Record, consts as pfm,
};
use umpire_perfmon::{Call, CallError, Client, Errno, Event, Wait, WholeVm};

use fake::{Fake, Trick};

fn connect(fake: &Fake) -> Client {
    Client::with_timeout(fake.path(), Duration::from_secs(5)).expect("a connection")
}

fn load(vcpu: i32) -> Call {
    Call::Load(LoadArg { pid: vcpu, set: 0 })
}

fn notifying() -> Call {
    Call::WritePmcs(vec![PmcArg {
        flags: pfm::PFM_REGFL_OVFL_NOTIFY,
        ..PmcArg::default()
    }])
}

fn message(event: Event) -> perfmon_abi::Message {
    match event {
        Event::Message(message) => message,
        other => panic!("{other:?} instead of a message"),
    }
}

#[test]
fn a_counting_session() {
    let fake = Fake::start();
    let client = connect(&fake);
    assert_eq!(client.hello().unwrap().vcpus, 3);
    let context = client.create(0, None, &[]).unwrap();
    let event = PmcArg::default();
    client
        .call(&context, &mut Call::WritePmcs(vec![event]))
        .unwrap();
    client.call(&context, &mut load(0)).unwrap();
    client.call(&context, &mut Call::Start(None)).unwrap();
    let mut read = Call::ReadPmds(vec![PmdArg::default()]);
    client.call(&context, &mut read).unwrap();
    client.call(&context, &mut read).unwrap();
    let Call::ReadPmds(pmds) = read else {
        unreachable!()
    };
    assert_eq!(pmds[0].value, 2000);
    let mut config = Call::GetConfig(Config::default());
    client.ask(&mut config).unwrap();
    let Call::GetConfig(config) = config else {
        unreachable!()
    };
    assert_eq!(config.version, pfm::PFM_VERSION);
    client.call(&context, &mut notifying()).unwrap();
    client.call(&context, &mut Call::Start(None)).unwrap();
    let got = message(context.read_message(Wait::Forever).unwrap());
    assert_eq!(
        (got.kind, got.ovfl_pmds[0], got.generation),
        (pfm::PFM_MSG_OVFL, 1, 1)
    );
    assert_eq!(context.read_message(Wait::No).unwrap(), Event::Nothing);
    assert!(!fake.shared().contexts[0].is_closed());
    drop(context);
    assert!(fake.shared().contexts[0].is_closed());
}

#[test]
fn a_vm_as_a_whole_is_the_sum_of_its_vcpus() {
    let fake = Fake::start();
    let client = connect(&fake);
    let pmcs = [PmcArg::default()];
    let pmds = [PmdArg::default()];
    let whole = WholeVm::attach(&client, 0, (&pmcs, &pmds), &[]).unwrap();
    assert_eq!(whole.contexts().len(), 3);
    whole.start(&client).unwrap();
    let first = whole.sum(&client).unwrap();
    let next = whole.sum(&client).unwrap();
    let since = next.since(&first);
    assert_eq!(since.counts[0].provenance, pfm::PFM_PROV_EXACT);
    // 1,000 at each look; the last vCPU has ended, and keeps what it had.
    assert_eq!(since.counts[0].value, 2000);
    whole.stop(&client).unwrap();
    let bad = [PmcArg {
        num: 9,
        ..PmcArg::default()
    }];
    assert!(WholeVm::attach(&client, 0, (&bad, &pmds), &[]).is_err());
    let error = whole.of(&client, 3).unwrap_err();
    assert_eq!(error.errno, Errno::ESRCH);
    drop(whole);
    assert!(fake.shared().contexts.iter().all(fake::Context::is_closed));
}

#[test]
fn a_partial_vector_comes_back_with_its_flags() {
    let fake = Fake::start();
    let client = connect(&fake);
    let context = client.create(0, None, &[]).unwrap();
    let pmcs = [0, 9, 1].map(|num| PmcArg {
        num,
        ..PmcArg::default()
    });
    let mut call = Call::WritePmcs(pmcs.to_vec());
    let error = client.call(&context, &mut call).unwrap_err();
    assert_eq!(
        error,
        CallError::new(Errno::EINVAL, "there is no such register")
    );
    let Call::WritePmcs(pmcs) = call else {
        unreachable!()
    };
    let flags: Vec<_> = pmcs.iter().map(|pmc| pmc.flags).collect();
    assert_eq!(flags, [0, pfm::PFM_REG_RETFL_NOTAVAIL, 0]);
}

#[test]
fn documents_come_in_the_reply_or_in_a_file() {
    let fake = Fake::start();
    let client = connect(&fake);
    for files in [false, true] {
        fake.shared().files = files;
        assert_eq!(client.model().unwrap().programmable, 4);
        assert_eq!(
            client.formats().unwrap()[0].uuid_bytes(),
            Some(pfm::DEFAULT_FORMAT)
        );
        assert_eq!(client.list().unwrap().policy, "guest-first");
    }
}

#[test]
fn the_sampling_buffer_is_mapped_and_read() {
    let fake = Fake::start();
    let client = connect(&fake);
    let argument = DefaultArg {
        buf_size: 8192,
        buf_flags: 0,
    };
    let format = Some(pfm::DEFAULT_FORMAT);
    let context = client.create(0, format, &argument.to_bytes()).unwrap();
    let buffer = context.map_buffer().unwrap();
    assert_eq!(buffer.size(), 8192);
    client.call(&context, &mut notifying()).unwrap();
    client.call(&context, &mut load(0)).unwrap();
    client.call(&context, &mut Call::Start(None)).unwrap();
    message(context.read_message(Wait::Forever).unwrap());
    let header = DefaultHeader::get(&buffer.copy(0, DefaultHeader::SIZE).unwrap());
    assert_eq!((header.count, header.overflows), (3, 1));
    let second = DefaultHeader::SIZE + DefaultEntry::SIZE;
    let entry = DefaultEntry::get(&buffer.copy(second, DefaultEntry::SIZE).unwrap());
    assert_eq!(entry.ip, 0x1001);
    assert_eq!(
        buffer.copy(3, 8).unwrap(),
        buffer.copy(0, 16).unwrap()[3..11]
    );
    assert_eq!(buffer.copy(8192, 0), Some(vec![]));
    for (at, length) in [(8192, 1), (8191, 2), (usize::MAX, 2), (0, usize::MAX)] {
        assert_eq!(buffer.copy(at, length), None, "{length} bytes at {at}");
    }
    assert_eq!((buffer.word(4), buffer.word(8192)), (None, None));
    let none = client.create(0, None, &[]).unwrap();
    assert_eq!(none.map_buffer().unwrap_err().errno, Errno::EINVAL);
    let unknown = client.create(0, Some([7; 16]), &[]).unwrap_err();
    assert_eq!(unknown.errno, Errno::EINVAL);
}

/// With a context the VMM takes its buffer's memory away: nobody here reads it then.
#[test]
fn a_mapping_keeps_its_context() {
    let fake = Fake::start();
    let client = connect(&fake);
    let argument = DefaultArg {
        buf_size: 8192,
        buf_flags: 0,
    };
    let format = Some(pfm::DEFAULT_FORMAT);
    let context = client.create(0, format, &argument.to_bytes()).unwrap();
    let buffer = context.map_buffer().unwrap();
    // The other side has no copy of the descriptor any more when it answers again.
    client.hello().unwrap();
    drop(context);
    assert!(!fake.shared().contexts[0].is_closed());
    assert_eq!(buffer.word(0), Some(0));
    drop(buffer);
    assert!(fake.shared().contexts[0].is_closed());
}

#[test]
fn a_load_removes_the_messages_of_the_time_before() {
    let fake = Fake::start();
    let client = connect(&fake);
    let context = client.create(0, None, &[]).unwrap();
    client.call(&context, &mut notifying()).unwrap();
    client.call(&context, &mut load(0)).unwrap();
    client.call(&context, &mut Call::Start(None)).unwrap();
    client.call(&context, &mut Call::Unload).unwrap();
    client.call(&context, &mut load(0)).unwrap();
    assert_eq!(context.read_message(Wait::No).unwrap(), Event::Nothing);
    // A message that was under way.
    fake.shared().contexts[0].send(pfm::PFM_MSG_OVFL, 1, 1);
    fake.shared().contexts[0].send(pfm::PFM_MSG_OVFL, 2, 2);
    let got = message(context.read_message(Wait::No).unwrap());
    assert_eq!(got.ovfl_pmds[0], 2);
    // Another process loads it: the library learns so from the message.
    fake.shared().contexts[0].send(pfm::PFM_MSG_OVFL, 3, 4);
    fake.shared().contexts[0].send(pfm::PFM_MSG_OVFL, 2, 8);
    assert_eq!(
        message(context.read_message(Wait::No).unwrap()).ovfl_pmds[0],
        4
    );
    assert_eq!(context.read_message(Wait::No).unwrap(), Event::Nothing);
}

#[test]
fn a_context_without_messages_wakes() {
    let fake = Fake::start();
    let client = connect(&fake);
    let context = client.create(pfm::PFM_FL_OVFL_NO_MSG, None, &[]).unwrap();
    client.call(&context, &mut notifying()).unwrap();
    client.call(&context, &mut load(0)).unwrap();
    client.call(&context, &mut Call::Start(None)).unwrap();
    assert_eq!(
        context.read_message(Wait::Forever).unwrap(),
        Event::Overflow
    );
    let start = Instant::now();
    let wait = Wait::For(Duration::from_millis(20));
    assert_eq!(context.read_message(wait).unwrap(), Event::Nothing);
    assert!(start.elapsed() >= Duration::from_millis(20));
    // The next overflow comes before the reply to the restart.
    client.call(&context, &mut Call::Restart).unwrap();
    assert_eq!(context.read_message(Wait::No).unwrap(), Event::Overflow);
    assert_eq!(context.read_message(Wait::No).unwrap(), Event::Nothing);
    fake.shared().contexts[0].send_bytes(&[]);
    fake.shared().contexts[0].send(pfm::PFM_MSG_END, 1, 0);
    assert_eq!(context.read_message(Wait::No).unwrap(), Event::Overflow);
    assert_eq!(
        message(context.read_message(Wait::No).unwrap()).kind,
        pfm::PFM_MSG_END
    );
    fake.shared().contexts.clear();
    assert_eq!(context.read_message(Wait::Forever).unwrap(), Event::Gone);
}

#[test]
fn messages_that_are_left_come_before_the_end() {
    let fake = Fake::start();
    let client = connect(&fake);
    let context = client.create(0, None, &[]).unwrap();
    {
        let mut shared = fake.shared();
        shared.contexts[0].send_bytes(&[]);
        shared.contexts[0].send(pfm::PFM_MSG_END, 0, 0);
        shared.contexts.clear();
    }
    assert_eq!(context.read_message(Wait::No).unwrap(), Event::Overflow);
    assert_eq!(
        message(context.read_message(Wait::No).unwrap()).kind,
        pfm::PFM_MSG_END
    );
    assert_eq!(context.read_message(Wait::No).unwrap(), Event::Gone);
}

#[test]
fn a_descriptor_that_came_from_elsewhere_is_adopted() {
    let fake = Fake::start();
    let (first, second) = (connect(&fake), connect(&fake));
    let argument = DefaultArg {
        buf_size: 4096,
        buf_flags: 0,
    };
    let context = first
        .create(0, Some(pfm::DEFAULT_FORMAT), &argument.to_bytes())
        .unwrap();
    let copy = context.fd.try_clone().unwrap();
    let adopted = second.adopt(copy).unwrap();
    second.call(&adopted, &mut load(0)).unwrap();
    assert_eq!(adopted.map_buffer().unwrap().size(), 4096);
    drop(context);
    assert!(!fake.shared().contexts[0].is_closed());
    let file = std::fs::File::open("/dev/null").unwrap();
    assert_eq!(second.adopt(file.into()).unwrap_err().errno, Errno::EBADF);
}

#[test]
fn what_goes_wrong_has_a_name() {
    let fake = Fake::start();
    let client = Client::with_timeout(fake.path(), Duration::from_millis(200)).unwrap();
    let context = client.create(0, None, &[]).unwrap();
    let busy = CallError::new(Errno::EBUSY, "vCPU 0 has a context");
    let table = [
        (Trick::Refuse(busy), Errno::EBUSY),
        (Trick::HangUp, Errno::ECONNRESET),
        (
            Trick::Bytes(b"nonsense that is longer than a header".to_vec()),
            Errno::EPROTO,
        ),
        (Trick::OutOfStep, Errno::EPROTO),
        (Trick::Full, Errno::EAGAIN),
        (Trick::Silence, Errno::ETIMEDOUT),
    ];
    for (trick, errno) in table {
        let name = format!("{trick:?}");
        fake.trick(trick);
        let error = client.call(&context, &mut load(0)).unwrap_err();
        assert_eq!(error.errno, errno, "{name}: {error}");
        // The next command has a connection that works; who knows whether the
        // load was done.
        let next = client.call(&context, &mut Call::Unload);
        let errno = next.err().map_or(Errno::EBUSY, |error| error.errno);
        assert_eq!(errno, Errno::EBUSY, "{name}");
    }
}

#[test]
fn a_vmm_that_starts_again_is_found_again() {
    let fake = Fake::start();
    let client = connect(&fake);
    fake.trick(Trick::HangUp);
    assert_eq!(client.model().unwrap_err().errno, Errno::ECONNRESET);
    assert!(client.model().is_ok());
    std::fs::remove_file(fake.path()).unwrap();
    fake.trick(Trick::HangUp);
    assert_eq!(client.model().unwrap_err().errno, Errno::ECONNRESET);
    let gone = client.model().unwrap_err();
    assert_eq!(gone.errno, Errno::ENOSYS);
    assert!(gone.reason.contains("control"), "{gone}");
    fake.serve();
    assert!(client.model().is_ok());
}

#[test]
fn nobody_to_connect_to() {
    let folder = tempfile::tempdir().unwrap();
    let error = Client::connect(folder.path().join("none")).unwrap_err();
    assert_eq!(error.errno, Errno::ENOSYS);
    let plain = folder.path().join("file");
    std::fs::write(&plain, "").unwrap();
    assert_eq!(Client::connect(&plain).unwrap_err().errno, Errno::ENOSYS);
    let long = folder.path().join("x".repeat(200));
    assert_eq!(Client::connect(long).unwrap_err().errno, Errno::ENOSYS);
}

#[test]
fn threads_share_a_client() {
    let fake = Fake::start();
    let client = connect(&fake);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let context = client.create(0, None, &[]).unwrap();
                    client.call(&context, &mut load(0)).unwrap();
                    let again = client.call(&context, &mut load(0)).unwrap_err();
                    assert_eq!(again.errno, Errno::EBUSY);
                    assert!(context.as_fd().as_raw_fd() >= 0);
                }
            });
        }
    });
    assert_eq!(fake.shared().connections, 1);
}
