//! What tools read after the VM's end, and which threads and bells there are.

use perfmon_abi::consts as pfm;
use perfmon_abi::wire::Errno;
use perfmon_abi::wire::bell::BELL;
use perfmon_abi::{LoadArg, PmcArg, PmdArg, SetDesc, SetInfo, Timespec};
use pmu_virt::perfmon::VirtualPmd;
use umpire_perfmon::link::{Link, Packet, Question};

use super::*;
use crate::dispatcher::KickThread;

fn pmd(set: u16, num: u16, value: u64) -> PmdArg {
    PmdArg {
        num,
        set,
        value,
        ..PmdArg::default()
    }
}

/// Reads PMDs, and how each was counted.
fn read(
    client: &Client,
    context: &umpire_perfmon::ContextHandle,
    pmds: &[(u16, u16)],
) -> Vec<PmdArg> {
    let asked = pmds.iter().map(|&(set, num)| pmd(set, num, 7)).collect();
    let mut call = Call::ReadPmds(asked);
    client.call(context, &mut call).unwrap();
    match call {
        Call::ReadPmds(read) => read,
        other => panic!("{other:?}"),
    }
}

#[test]
fn counts_are_read_after_the_vms_end() {
    let stage = Stage::new();
    let client = &stage.client;
    let first = client.create(0, None, &[]).unwrap();
    let second = client.create(pfm::PFM_FL_SYSTEM_WIDE, None, &[]).unwrap();
    let forgotten = client.create(0, None, &[]).unwrap();
    let timed = SetDesc {
        id: 9,
        flags: pfm::PFM_SETFL_TIME_SWITCH,
        timeout: Timespec { sec: 3, nsec: 0 },
        ..SetDesc::default()
    };
    for mut call in [
        Call::CreateEvtsets(vec![timed]),
        Call::WritePmds(vec![pmd(0, 1, 4711), pmd(9, 0, u64::MAX), pmd(9, 15, 5)]),
    ] {
        client.call(&first, &mut call).unwrap();
    }
    client
        .call(&second, &mut Call::WritePmds(vec![pmd(0, 14, 12)]))
        .unwrap();
    drop(forgotten);
    let exits = VirtualPmd::Exits.pmd();
    let of_first = [
        (0, 0),
        (0, 1),
        (9, 0),
        (9, 1),
        (9, 15),
        (9, exits),
        (0, exits),
    ];
    let asked = |id| SetInfo {
        id,
        ..SetInfo::default()
    };
    let infos = |context: &umpire_perfmon::ContextHandle| {
        let mut call = Call::GetinfoEvtsets(vec![asked(9), asked(0)]);
        client.call(context, &mut call).unwrap();
        call
    };
    let before = (
        read(client, &first, &of_first),
        read(client, &second, &[(0, 14), (0, 15)]),
        infos(&first),
    );
    drop(stage.server);
    let after = || {
        (
            read(client, &first, &of_first),
            read(client, &second, &[(0, 14), (0, 15)]),
            infos(&first),
        )
    };
    assert_eq!(after(), before);
    assert_eq!(after(), before, "as often as one likes");
    // What is wrong is wrong as before, and marked so.
    for (bad, errno, flag) in [
        (pmd(5, 0, 0), Errno::EINVAL, pfm::PFM_REG_RETFL_NOSET),
        (pmd(0, 4, 0), Errno::EINVAL, pfm::PFM_REG_RETFL_NOTAVAIL),
        (pmd(9, 200, 0), Errno::EINVAL, pfm::PFM_REG_RETFL_NOTAVAIL),
    ] {
        let mut call = Call::ReadPmds(vec![pmd(0, 1, 0), bad, pmd(0, 0, 77)]);
        let refused = client.call(&first, &mut call).unwrap_err();
        assert_eq!(refused.errno, errno, "{refused}");
        let Call::ReadPmds(read) = call else {
            panic!("another command came back")
        };
        assert_eq!((read[0].value, read[1].flags), (4711, flag));
        assert_eq!(read[2].value, 77, "it ends at the bad element");
    }
    let reset = PmdArg {
        flags: pfm::PFM_REGFL_READ_RESET,
        ..pmd(0, 1, 0)
    };
    for (mut call, errno) in [
        (Call::ReadPmds(vec![reset]), Errno::EBUSY),
        (Call::GetinfoEvtsets(vec![asked(1)]), Errno::EINVAL),
        (Call::Start(None), Errno::EBUSY),
        (Call::Stop, Errno::EBUSY),
        (Call::Restart, Errno::EBUSY),
        (Call::Unload, Errno::EBUSY),
        (Call::Load(LoadArg { pid: 0, set: 0 }), Errno::ESRCH),
        (Call::WritePmds(vec![pmd(0, 0, 1)]), Errno::ENOSYS),
        (Call::WritePmcs(vec![PmcArg::default()]), Errno::ENOSYS),
    ] {
        let refused = client.call(&first, &mut call).unwrap_err();
        assert_eq!(refused.errno, errno, "{call:?}: {refused}");
        assert!(!refused.reason.is_empty());
    }
    assert_eq!(read(client, &first, &[(0, 1)])[0].value, 4711);
    // What needs the VM has none.
    assert_eq!(client.list().unwrap_err().errno, Errno::ENOSYS);
}

#[derive(Debug)]
struct Thread(i32);

impl KickThread for Thread {
    fn kick(&self) {}
    fn thread_id(&self) -> i32 {
        self.0
    }
}

/// 3.1.7: `load_pid` is the number of a thread, or that of a vCPU or core.
#[test]
fn a_load_names_a_vcpu_by_its_thread() {
    let stage = Stage::new();
    stage.queues.vcpus[1].bind_thread(Box::new(Thread(40_001)));
    for flags in [0, pfm::PFM_FL_SYSTEM_WIDE] {
        let context = stage.client.create(flags, None, &[]).unwrap();
        let (client, context) = (&stage.client, &context);
        for pid in [40_001, 1] {
            std::thread::scope(|scope| {
                let load = move || client.call(context, &mut Call::Load(LoadArg { pid, set: 0 }));
                let load = scope.spawn(load);
                job(&stage.queues.vcpus[1]).act(|_, work| match work {
                    Work::Load(hosted, _) => Done::Loaded(Err(pmu_virt::perfmon::NotLoaded::new(
                        hosted,
                        Errno::EBUSY.into(),
                    ))),
                    other => Done::Undone(other),
                });
                let refused = load.join().unwrap().unwrap_err();
                assert_eq!(refused.errno, Errno::EBUSY, "it went to vCPU 1");
            });
        }
        for pid in [2, -1, 40_000, i32::MAX] {
            let refused = client.call(context, &mut Call::Load(LoadArg { pid, set: 0 }));
            let refused = refused.unwrap_err();
            assert_eq!(refused.errno, Errno::ESRCH, "{refused}");
            assert!(refused.reason.contains(&pid.to_string()), "{refused}");
        }
    }
}

#[test]
fn a_bell_is_for_a_context_without_messages() {
    let stage = Stage::new();
    let path = stage._folder.path().join("control");
    let address = SocketAddrUnix::new(path).unwrap();
    let mut link = Link::connect(&address, Duration::from_secs(20)).unwrap();
    let mut packet: Box<Packet> = Box::new([0; MAX_PACKET]);
    let mut ask = |context, nargs| {
        let question = Question {
            context,
            nargs,
            ..Question::plain(BELL)
        };
        let answer = link.exchange(question, &mut packet).unwrap();
        let [bell, _] = answer.descriptors;
        (answer.reply.errno, bell)
    };
    let with_messages = stage.client.create(0, None, &[]).unwrap();
    let without = stage
        .client
        .create(pfm::PFM_FL_OVFL_NO_MSG, None, &[])
        .unwrap();
    drop(with_messages);
    assert_eq!(ask(NO_CONTEXT, 0).0, Errno::EBADF.number());
    assert_eq!(ask(9, 0).0, Errno::EBADF.number());
    assert_eq!(ask(NO_CONTEXT, 1).0, Errno::EINVAL.number());
    let bind = Question {
        descriptor: Some(without.fd.as_fd()),
        ..Question::plain(perfmon_abi::wire::Extension::Bind.number())
    };
    let handle = link.exchange(bind, &mut packet).unwrap().reply.context;
    let cookie = |socket: &OwnedFd| rustix::net::sockopt::socket_cookie(socket).unwrap();
    let mut bells = Vec::new();
    for _ in 0..2 {
        let question = Question {
            context: handle,
            ..Question::plain(BELL)
        };
        let answer = link.exchange(question, &mut packet).unwrap();
        answer.reply.result().unwrap();
        let [bell, _] = answer.descriptors;
        bells.push(cookie(&bell.unwrap()));
    }
    assert_eq!(bells[0], bells[1], "one for everybody");
    assert_ne!(bells[0], cookie(&without.fd));
}
