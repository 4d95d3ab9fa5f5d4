//! A VM that is none, as it ends and is started again.

use pmu_model::CountRequest;

use super::*;
use crate::fake::{Fake, Trick};
use crate::lwp::{INHERIT, Lwps, SIGNAL};
use crate::spec::{OS, USR};
use umpire_perfmon::c_calls::{self, Undisturbed};

/// A VMM of before has no PMD for its clock: then the time is that of the program.
#[test]
fn without_a_clock_of_the_vm_the_time_is_ours() {
    let fake = Fake::start();
    let name = VcpuName::parse(&format!("{}:1", fake.path().display())).unwrap();
    let (mut host, vcpu) = Host::find(&name).unwrap();
    let mut event = Event::default();
    event.pes[0] = 0x43_0076;
    host.start(vcpu, &event, false).unwrap();
    for _ in 0..2 {
        let before = now();
        host.read(vcpu, &mut event).unwrap();
        assert!((before..=now()).contains(&event.hrt), "{event:?}");
        assert!(event.pic[0] > 0, "{event:?}");
    }
}

#[test]
fn refusals_of_the_vm_are_the_pages_errors() {
    for (errno, subcode, wanted) in [
        (
            Errno::EINVAL,
            Subcode::None,
            (ENOTSUP, Subcode::PicNotCapable),
        ),
        (
            Errno::EINVAL,
            Subcode::PicNotCapable,
            (ENOTSUP, Subcode::PicNotCapable),
        ),
        (
            Errno::EINVAL,
            Subcode::NoHypervisorAccess,
            (EACCES, Subcode::NoHypervisorAccess),
        ),
        (
            Errno::EINVAL,
            Subcode::InvalidPicNumber,
            (EINVAL, Subcode::InvalidPicNumber),
        ),
        (
            Errno::EBUSY,
            Subcode::None,
            (EAGAIN, Subcode::ResourceUnavailable),
        ),
        (
            Errno::EPERM,
            Subcode::None,
            (EACCES, Subcode::RequiresPrivilege),
        ),
    ] {
        let Failure {
            errno: number,
            subcode: exact,
        } = meaning(errno, subcode, "");
        assert_eq!((number, exact), wanted, "{errno:?} {subcode:?}");
    }
}

/// A VM of two vCPUs, and an event that it counts. The thread gets no signals, since nobody
/// has a handler for them.
fn served() -> (Fake, Lwps, Event) {
    std::mem::forget(Undisturbed::begin());
    let fake = Fake::start();
    let name = VcpuName::parse(&format!("{}:0", fake.path().display())).unwrap();
    let (host, _) = Host::find(&name).unwrap();
    let mut event = Event {
        cpuver: processor::number(host.model()),
        ..Event::default()
    };
    event.pes[0] = 0x43_0076;
    let lwps = Lwps::new(Box::new(host), 2);
    (fake, lwps, event)
}

/// The VM ends, and another one serves its socket.
fn start_again(fake: &Fake) {
    fake.shared().contexts.clear();
    fake.trick(Trick::HangUp);
}

fn lost<T: std::fmt::Debug>(result: Result<T, Failure>) {
    let failure = result.expect_err("what was bound is gone");
    assert_eq!(
        (failure.errno, failure.subcode),
        (EAGAIN, Subcode::BindFailed)
    );
    assert!(
        c_calls::text().contains("started again"),
        "{}",
        c_calls::text()
    );
}

#[test]
fn what_a_vm_of_before_counted_is_invalid_until_it_is_bound_again() {
    // What finds out first that the VM is another one.
    type Act = fn(&mut Lwps, &Event);
    let finds_out: [(&str, Act); 4] = [
        ("a sample", |lwps, _| lost(lwps.sample(1))),
        ("a bind", |lwps, event| {
            let bound = lwps.bind(1, Some(event), 0);
            bound.expect_err("the connection breaks");
            lwps.bind(1, Some(event), 0).expect("the VM that is there");
        }),
        ("an access", |lwps, _| {
            lwps.access().expect_err("the connection breaks");
            lwps.access().expect("the VM that is there");
        }),
        ("rings", |lwps, _| lost(lwps.count_in(1, OS, true))),
    ];
    for (what, find_out) in finds_out {
        for flags in [0, SIGNAL, INHERIT] {
            let (fake, mut lwps, mut event) = served();
            event.pic[0] = 7;
            for lwp in [0, 1] {
                lwps.bind(lwp, Some(&event), flags).expect("a bind");
                lwps.sample(lwp).expect("counts");
            }
            start_again(&fake);
            find_out(&mut lwps, &event);
            // The other vCPU has heard of nothing.
            println!("{what}, flags {flags}");
            lost(lwps.sample(0));
            lost(lwps.sample(0));
            lost(lwps.count_in(0, USR, false));
            lwps.bind(0, Some(&event), flags)
                .expect("it is there again");
            assert!(lwps.sample(0).expect("counts").pic[0] >= 7);
        }
    }
}

/// Events that count in no ring need no counters, and yet a VM.
#[test]
fn what_counts_nowhere_ends_with_its_vm() {
    let (fake, mut lwps, mut event) = served();
    event.pes[0] &= !(USR | OS);
    event.pic[0] = 5;
    for lwp in [0, 1] {
        lwps.bind(lwp, Some(&event), 0).expect("a bind");
        assert_eq!(lwps.sample(lwp).expect("counts").pic[0], 5);
    }
    start_again(&fake);
    lost(lwps.sample(1));
    lwps.bind(1, Some(&event), 0).expect("a bind");
    lwps.sample(1).expect("counts");
    lost(lwps.sample(0));
    lwps.bind(0, None, 0).expect("nothing is bound any more");
    assert_eq!(lwps.sample(0).expect_err("nothing").errno, EINVAL);
}

/// The last vCPU of the VM that is none ends as soon as it counts: its counts stand still, and
/// the VM still answers.
#[test]
fn a_vcpu_that_has_ended_takes_what_was_bound_along() {
    let (fake, mut lwps, event) = served();
    let last = usize::try_from(crate::fake::VCPUS - 1).unwrap();
    for _ in 0..last {
        lwps.grow();
    }
    let name = VcpuName::parse(&format!("{}:0", fake.path().display())).unwrap();
    let (mut host, _) = Host::find(&name).unwrap();
    host.vcpus.resize_with(last + 1, Vcpu::default);
    lwps.change_bed(Box::new(host));
    for flags in [0, SIGNAL] {
        lwps.bind(last, Some(&event), flags).expect("a bind");
        lost(lwps.sample(last));
        lwps.release(last);
        assert_eq!(lwps.sample(last).expect_err("nothing").errno, EINVAL);
    }
}

/// A program that becomes a daemon closes all descriptors, and opens files of its own: nobody
/// reads from these or closes them.
#[test]
fn a_descriptor_that_the_program_closed_is_the_programs() {
    let fake = Fake::start();
    let name = VcpuName::parse(&format!("{}:0", fake.path().display())).unwrap();
    let (mut host, vcpu) = Host::find(&name).unwrap();
    let mut event = Event::default();
    event.pes[0] = 0x43_0076;
    host.start(vcpu, &event, false).unwrap();
    let (own, other) = {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
        let flags = SocketFlags::CLOEXEC;
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    };
    let bound = host.vcpus[vcpu].bound.as_mut().unwrap();
    let context = bound.context.as_mut().unwrap().fd.as_mut().unwrap();
    rustix::io::dup2(&own, context).unwrap();
    rustix::net::send(&other, b"to the program", rustix::net::SendFlags::NOSIGNAL).unwrap();
    lost(host.read(vcpu, &mut event));
    let number = host.vcpus[vcpu].bound.as_ref().unwrap();
    let number = number.context.as_ref().unwrap().fd.as_ref().unwrap();
    let number = number.as_raw_fd();
    host.stop(vcpu);
    let path = format!("/proc/self/fd/{number}");
    let there = std::fs::read_link(path).expect("it is open");
    assert!(there.to_string_lossy().starts_with("socket:"), "{there:?}");
    let mut read = [0; 32];
    let (bytes, _) = rustix::net::recv(&own, &mut read, RecvFlags::DONTWAIT).unwrap();
    assert_eq!(&read[..bytes], b"to the program");
}

/// What becomes of each bit of a code of a tool's, from its name to what a context counts: it
/// is refused and named, or it means what docs/guide/events.md says.
#[test]
fn each_bit_of_a_code_is_counted_or_named() {
    for summary in PmuModel::names() {
        let pmu = LogicalPmu::new(PmuModel::parse(summary.name).unwrap());
        let model = pmu.model();
        let is_amd = model.vendor() == pmu_model::Vendor::Amd;
        for bit in 0..64 {
            let (code, what) = (0x3c_u64 ^ 1 << bit, format!("{} bit {bit}", summary.name));
            let named = match resolve(
                &format!("r{code:x}"),
                model,
                &NoTables(LibraryError::TooLate),
            ) {
                Ok(named) => named,
                Err(error) => {
                    let text = error.to_string();
                    let hex = format!("bits {:#x}", 1_u64 << bit);
                    let is_named = text.contains(&format!("bit {bit}")) || text.contains(&hex);
                    let range = is_amd && (32..36).contains(&bit) && text.contains("bits 35:32");
                    assert!(is_named || range, "{what}: {text}");
                    continue;
                }
            };
            let first = CounterId::Programmable(0);
            let (pmc, value) = program(&pmu, first, &named.request).expect(&what);
            let asked = pmu.request(pmc, pmc.accept(value)).expect(&what);
            assert!(asked.can_advance(), "{what}");
            assert_eq!(asked.is_for_host_alone(), is_amd && bit == 41, "{what}");
            let plain = CountRequest {
                guest_only: false,
                host_only: asked.host_only,
                int: asked.int,
                ..named.request
            };
            assert_eq!(asked, plain, "{what}");
            // PFM_WRITE_PMCS keeps reserved bits at their default; all others are the tool's.
            let kept = pmc.accept(code | 1 << 22) & (1 << bit) == (code | 1 << 22) & (1 << bit);
            let is_reserved = pmc.reserved & (1 << bit) != 0;
            assert!(
                kept || is_reserved || pmc.forced & (1 << bit) != 0,
                "{what}"
            );
        }
    }
}
