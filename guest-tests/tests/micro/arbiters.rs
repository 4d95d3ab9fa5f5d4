//! The guest-side arbiters in a guest of two vCPUs, whose program is
//! `guest-tests/guests/src/arbiters`. It writes down what each step came to; the
//! tables here say what it has to come to.

use anyhow::{Context, Result, ensure};
use arbiter::{Event, Layer};
use guest_tests::micro::{Lab, LabRun, MicroImage, Setup, Test};
use vmm::micro::{MicroPcr, SCRATCH, Start};

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "arbiters::minimal",
        run: |lab| play(lab, Arbiter::Minimal),
    },
    Test {
        name: "arbiters::enforcing",
        run: |lab| play(lab, Arbiter::Enforcing),
    },
    Test {
        name: "arbiters::full",
        run: |lab| play(lab, Arbiter::Full),
    },
];

/// Which of them; the number is the guest's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arbiter {
    Minimal,
    Enforcing,
    Full,
}

/// How the kernel wants denied accesses to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Denial {
    Drop,
    Fault,
}

/// A step and its outcome.
type Finding = (&'static str, u64);

/// #GP.
const FAULT: u64 = u64::MAX;
// What an arbiter answers, in the guest's numbers.
const OK: u64 = 0;
const NOT_KERNEL: u64 = 1;
const UNAVAILABLE: u64 = 3;
const IN_USE: u64 = 4;
const NONE_FREE: u64 = 5;
const NOT_YOURS: u64 = 7;

// The layers' codes, and the status of the firmware's private counters.
const FIRMWARE: u64 = 0;
const KERNEL: u64 = 2;
const RESERVED_PRIVATE: u64 = 0x11;

/// What the rogue writes, and what the owners leave.
const CLOBBER: u64 = 0x99;
const OWNERS: u64 = 0x1234;
const HOLDERS: u64 = 0x77;
const FIRMWARES: u64 = 0x55;

/// The rogue at a counter that is open to it.
const ROGUE_PERMITTED: [Finding; 5] = rogue(OK, CLOBBER, 0, CLOBBER, CLOBBER);

/// The rogue at a counter that is locked.
const fn rogue_denied(denial: Denial) -> [Finding; 5] {
    match denial {
        Denial::Drop => rogue(OK, 0, 0, 0, 0),
        // A kernel's RDPMC does not fault.
        Denial::Fault => rogue(FAULT, FAULT, FAULT, 0, FAULT),
    }
}

const fn rogue(write: u64, read: u64, other: u64, rdpmc: u64, program: u64) -> [Finding; 5] {
    [
        ("rogue writes", write),
        ("rogue reads", read),
        ("rogue reads, vCPU 1", other),
        ("rogue's RDPMC", rdpmc),
        ("program's RDPMC", program),
    ]
}

const BEFORE: &[Finding] = &[
    ("counters that there are", 3 << 8 | 4),
    ("layer", FIRMWARE),
    ("firmware reserves", OK),
    ("firmware reserves", OK),
    ("firmware reserves", OK),
    ("claim too early", NOT_KERNEL),
    ("phase ends", OK),
    ("phase ends again", FAULT),
    ("layer", KERNEL),
];

const AFTER: &[Finding] = &[
    ("firmware's status", RESERVED_PRIVATE),
    ("firmware's count", FIRMWARES),
    ("firmware's status", RESERVED_PRIVATE),
    ("firmware's count", FIRMWARES),
    ("firmware's status", RESERVED_PRIVATE),
    ("firmware's count", FIRMWARES),
    ("others' status", 0),
];

/// The classic calls.
fn classic(arbiter: Arbiter, denial: Denial) -> Vec<Finding> {
    let (rogue, left, fixed) = match arbiter {
        Arbiter::Minimal => (ROGUE_PERMITTED, CLOBBER, 0x333),
        // Nobody can hold FIXED0.
        Arbiter::Enforcing | Arbiter::Full => (rogue_denied(denial), OWNERS, 0x3),
    };
    let mut findings = vec![
        // PMC1, PMC2 and the two fixed-function counters that `clock` can count for.
        ("counters", 6 << 32 | 0b0110),
        ("reserve a taken one", UNAVAILABLE),
        ("reserve a taken one", UNAVAILABLE),
    ];
    findings.extend(rogue);
    findings.extend([
        ("reserve counter", OK),
        ("reserve it again", IN_USE),
        ("reserve select", OK),
        ("owner programs", OK),
        ("owner programs", OK),
        ("it counts", 1),
        ("owner stops", OK),
        ("owner stops", OK),
        ("program's RDPMC", OWNERS),
    ]);
    findings.extend(rogue);
    findings.extend([
        ("reserve select", OK),
        ("owner reads", left),
        // The rogue has written on vCPU 0 alone.
        ("owner reads", OWNERS),
        ("rogue starts fixed", OK),
        ("fixed control", fixed),
        ("rogue stops fixed", OK),
    ]);
    findings
}

/// A private counter.
fn private(denial: Denial) -> Vec<Finding> {
    let denied = match denial {
        Denial::Drop => 0,
        Denial::Fault => FAULT,
    };
    let mut findings = vec![
        ("acquire", 1),
        ("acquire it again", NONE_FREE),
        ("acquire no counter", NONE_FREE),
        ("reserve it", IN_USE),
    ];
    findings.extend(rogue_denied(denial));
    findings.extend([
        ("stop all", OK),
        ("holder starts", OK),
        ("it counts", 1),
        ("holder stops", OK),
        ("holder writes", OK),
        ("holder writes", OK),
        ("holder's RDPMC", HOLDERS),
        ("its program's RDPMC", HOLDERS),
        ("program's RDPMC", denied),
        ("another key reads", denied),
        ("another key gives up", NOT_YOURS),
        ("holder reads", HOLDERS),
        ("holder gives up", OK),
        ("holder gives up again", NOT_YOURS),
        ("an old key reads", denied),
    ]);
    findings
}

fn expected(arbiter: Arbiter) -> Vec<Finding> {
    let mut findings = BEFORE.to_vec();
    for denial in [Denial::Drop, Denial::Fault] {
        findings.push(("claim", OK));
        if arbiter == Arbiter::Full {
            findings.extend(private(denial));
        }
        findings.extend(classic(arbiter, denial));
        findings.push(("counters at the end", 0));
    }
    findings.extend(AFTER);
    findings
}

fn play(lab: &Lab, arbiter: Arbiter) -> Result<()> {
    const PCE: u64 = 1 << 8;
    let image = micro_guests::arbiters().context("the guest program was not built")?;
    let image = MicroImage::parse(image)?;
    let mut guest = image.guest();
    for (vector, handler) in [(13, "guest_gp"), (6, "guest_ud")] {
        guest = guest.handler(vector, image.symbol(handler)?);
    }
    for vcpu in 0..2 {
        guest = guest.start(Start {
            cr4: PCE,
            rdi: vcpu << 8 | arbiter as u64,
            ..Start::at(image.entry(), 0)
        });
    }
    let setup = Setup {
        pcr: Some(MicroPcr {
            firmware: true,
            ..MicroPcr::default()
        }),
        ..Setup::clock("intel-v2")
    };
    let ran = lab.run(&setup, &guest)?;
    compare(&ran, &expected(arbiter))?;
    audit(&ran, arbiter)
}

/// The hypervisor has seen that the rogue was kept out, or was not.
fn audit(ran: &LabRun, arbiter: Arbiter) -> Result<()> {
    let enforces = arbiter != Arbiter::Minimal;
    let denied: [fn(&Event) -> bool; 3] = [
        |event| matches!(event, Event::DroppedRead(_)),
        |event| matches!(event, Event::DroppedWrite(_)),
        |event| matches!(event, Event::Faulted(_)),
    ];
    for layer in [Layer::GuestKernel, Layer::GuestUser] {
        let decisions = ran.outcome.vcpus[0].decisions.iter();
        let its: Vec<Event> = decisions
            .filter(|record| record.layer == layer)
            .map(|record| record.event)
            .collect();
        let kinds = denied.map(|is_it| its.iter().any(is_it));
        // RDPMC, which is all that a program has, does not write.
        let expected = [enforces, enforces && layer == Layer::GuestKernel, enforces];
        ensure!(kinds == expected, "decisions about the {layer}: {its:?}");
    }
    Ok(())
}

fn compare(ran: &LabRun, expected: &[Finding]) -> Result<()> {
    let mut found = Vec::new();
    for entry in 0..ran.word(SCRATCH)? {
        let word = |n: u64| ran.word(SCRATCH + 8 + 8 * (4 * entry + n));
        let text: Vec<u8> = [word(0)?, word(1)?, word(2)?]
            .into_iter()
            .flat_map(u64::to_le_bytes)
            .take_while(|byte| *byte != 0)
            .collect();
        found.push((String::from_utf8(text)?, word(3)?));
    }
    for (n, (what, value)) in expected.iter().enumerate() {
        let found = found.get(n).map(|(what, value)| (what.as_str(), *value));
        ensure!(
            found == Some((*what, *value)),
            "step {n} is {found:x?}, and should be {what} {value:#x}"
        );
    }
    let more = found.get(expected.len());
    ensure!(more.is_none(), "a step more than expected: {more:x?}");
    Ok(())
}
