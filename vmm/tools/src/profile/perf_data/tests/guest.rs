//! A guest whose threads begin, end, rename themselves and map files at few addresses, so that
//! numbers and addresses come again; and what a profile of it has.

use std::collections::BTreeMap;
use std::fs;

use perfmon_abi::compact::{CallChain, ChainEnd, GuestPlace, ProgramFrame};
use perfmon_abi::wire::programs::{MappingInfo, TaskInfo};
use proptest::prelude::*;

use super::super::super::program_tests::Place;
use super::super::super::record::{Record, Ring, Sample};
use super::{OFFSET, elf, mapping, task};

/// What happens; numbers choose among what there is.
#[derive(Clone, Debug)]
pub(super) enum Step {
    Rename(usize, usize),
    /// All mappings and other threads go, and the name changes.
    Exec(usize, usize),
    Fork(usize),
    Clone(usize),
    Exit(usize),
    Map(usize, usize, usize),
    Unmap(usize, usize),
    /// Of a thread on a vCPU, in a slot, with callers in others.
    Sample {
        thread: usize,
        vcpu: u32,
        slots: Vec<usize>,
        kernel: Option<usize>,
        known: bool,
    },
    Wait(u64),
    /// What was sampled on a vCPU is written.
    Drain(u32),
}

const COMMS: [&str; 5] = ["idle", "busy", "a b", "x:y/z", "kworker/0:1"];
/// Names of what is mapped, whether they are deleted, and build ids.
const FILES: [(&str, bool, &str); 13] = [
    ("/usr/bin/prog", false, ""),
    ("/lib/a.so", false, ""),
    (
        "/lib/b.so",
        false,
        "00112233445566778899aabbccddeeff00112233",
    ),
    ("/lib/nowhere.so", false, ""),
    ("//anon", false, ""),
    ("[heap]", false, ""),
    ("[stack]", false, ""),
    ("[vdso]", false, ""),
    ("/dev/zero", true, ""),
    ("/memfd:doublemapper", true, ""),
    ("/SYSV00000000", true, ""),
    ("[anon:arena]", false, ""),
    ("", false, ""),
];
/// In kernels: with names, in a module, and without a name; in the module alone; in the module,
/// and in front of it without a name.
const KERNELS: [[u64; 6]; 3] = [
    [
        0xffff_ffff_8100_1010,
        0xffff_ffff_8100_2020,
        0xffff_ffff_c000_0123,
        0xffff_ffff_8100_5000,
        0xffff_ffff_8000_0007,
        0xffff_ffff_8100_3010,
    ],
    [
        0xffff_ffff_c000_0123,
        0xffff_ffff_c000_0010,
        0xffff_ffff_c000_0fff,
        0xffff_ffff_c000_0000,
        0xffff_ffff_c000_0124,
        0xffff_ffff_c000_0456,
    ],
    [
        0xffff_ffff_c000_0123,
        0xffff_ffff_c000_0010,
        0xffff_ffff_bfff_f800,
        0xffff_ffff_bfff_fffe,
        0xffff_ffff_8100_5000,
        0xffff_ffff_c000_0456,
    ],
];
const NUMBERS: u32 = 7;
const SLOTS: usize = 4;
const VCPUS: u32 = 2;
/// Where a mapping may begin: at a multiple of this.
pub(super) const SLOT: u64 = 0x10_0000;

/// A guest, and which of its samples are exported.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    steps: Vec<Step>,
    kernel: usize,
    words: &'static [&'static str],
}

impl Plan {
    /// Of a command line.
    pub(super) fn words(&self) -> &'static [&'static str] {
        self.words
    }
}

pub(super) fn plans() -> impl Strategy<Value = Plan> {
    let kernel = prop_oneof![2 => Just(0), 1 => Just(1), 1 => Just(2)];
    let words: [&'static [&'static str]; 5] = [
        &[],
        &["--dsos", "[nf_tables]"],
        &["--dsos", "[kernel.kallsyms]"],
        &["--dsos", "a.so"],
        &["--vcpu", "1"],
    ];
    let words = prop_oneof![
        1 => Just(words[0]),
        1 => proptest::sample::select(words.to_vec()),
    ];
    (steps(), kernel, words).prop_map(|(steps, kernel, words)| Plan {
        steps,
        kernel,
        words,
    })
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let any = 0..64usize;
    let sample = (
        any.clone(),
        0..VCPUS,
        proptest::collection::vec(0..SLOTS, 1..4),
        proptest::option::weighted(0.25, 0..KERNELS[0].len()),
        proptest::bool::weighted(0.9),
    );
    let sample = sample.prop_map(|(thread, vcpu, slots, kernel, known)| Step::Sample {
        thread,
        vcpu,
        slots,
        kernel,
        known,
    });
    let two = (any.clone(), any.clone());
    let step = prop_oneof![
        12 => sample,
        2 => two.clone().prop_map(|(a, b)| Step::Rename(a, b)),
        1 => two.clone().prop_map(|(a, b)| Step::Exec(a, b)),
        2 => any.clone().prop_map(Step::Fork),
        2 => any.clone().prop_map(Step::Clone),
        2 => any.clone().prop_map(Step::Exit),
        4 => (any.clone(), 0..SLOTS, any.clone()).prop_map(|(a, b, c)| Step::Map(a, b, c)),
        2 => (any, 0..SLOTS).prop_map(|(a, b)| Step::Unmap(a, b)),
        4 => (0..1500u64).prop_map(Step::Wait),
        1 => (0..VCPUS).prop_map(Step::Drain),
    ];
    proptest::collection::vec(step, 1..80)
}

#[derive(Clone)]
struct Thread {
    pid: u32,
    comm: String,
    started_ns: u64,
}

struct Guest {
    threads: BTreeMap<u32, Thread>,
    /// Of processes: numbers of mappings.
    spaces: BTreeMap<u32, [u64; SLOTS]>,
    kernel: [u64; 6],
    records: Vec<Record>,
    queues: Vec<Vec<Record>>,
    next: u64,
    now_ns: u64,
}

/// The profile of a guest that does what `plan` says.
pub(super) fn records(plan: &Plan) -> Vec<Record> {
    let init = Thread {
        pid: 1,
        comm: "init".to_owned(),
        started_ns: 0,
    };
    let mut guest = Guest {
        threads: BTreeMap::from([(1, init)]),
        spaces: BTreeMap::from([(1, [0; SLOTS])]),
        kernel: KERNELS[plan.kernel],
        records: Vec::new(),
        queues: vec![Vec::new(); VCPUS as usize],
        next: 1,
        now_ns: 1000,
    };
    for step in &plan.steps {
        guest.step(step);
    }
    for vcpu in 0..VCPUS {
        guest.step(&Step::Drain(vcpu));
    }
    guest.records
}

impl Guest {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    fn tid(&self, choice: usize) -> u32 {
        let all: Vec<u32> = self.threads.keys().copied().collect();
        all[choice % all.len()]
    }

    fn pid(&self, choice: usize) -> u32 {
        self.threads[&self.tid(choice)].pid
    }

    /// The least number that nobody has, as a kernel that has come round gives it.
    fn free(&self) -> Option<u32> {
        (1..NUMBERS).find(|number| !self.threads.contains_key(number))
    }

    fn begin(&mut self, parent: u32, pid: Option<u32>) {
        let Some(tid) = self.free() else {
            return;
        };
        let thread = Thread {
            pid: pid.unwrap_or(tid),
            comm: self.threads[&parent].comm.clone(),
            started_ns: self.now_ns + self.next,
        };
        self.next += 1;
        if pid.is_none() {
            let space = self.spaces[&self.threads[&parent].pid];
            self.spaces.insert(tid, space);
        }
        self.threads.insert(tid, thread);
    }

    fn end(&mut self, tid: u32) {
        let pid = self.threads[&tid].pid;
        // With its first thread all of a process end; somebody is always there.
        let rest = |one: &Thread| one.pid != pid;
        if tid != pid {
            self.threads.remove(&tid);
        } else if self.threads.values().any(rest) {
            self.threads.retain(|_, one| one.pid != pid);
            self.spaces.remove(&pid);
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Rename(thread, comm) => {
                let tid = self.tid(*thread);
                let comm = COMMS[comm % COMMS.len()].to_owned();
                self.threads.get_mut(&tid).unwrap().comm = comm;
            }
            Step::Exec(thread, comm) => {
                let pid = self.pid(*thread);
                self.threads
                    .retain(|tid, one| one.pid != pid || *tid == pid);
                self.spaces.insert(pid, [0; SLOTS]);
                self.threads.get_mut(&pid).unwrap().comm = COMMS[comm % COMMS.len()].to_owned();
            }
            Step::Fork(thread) => self.begin(self.tid(*thread), None),
            Step::Clone(thread) => {
                let tid = self.tid(*thread);
                self.begin(tid, Some(self.threads[&tid].pid));
            }
            Step::Exit(thread) => self.end(self.tid(*thread)),
            Step::Map(thread, slot, file) => self.map(self.pid(*thread), *slot, *file),
            Step::Unmap(thread, slot) => {
                let pid = self.pid(*thread);
                self.spaces.get_mut(&pid).unwrap()[*slot] = 0;
            }
            Step::Sample {
                thread,
                vcpu,
                slots,
                kernel,
                known,
            } => {
                let tid = self.tid(*thread);
                let sample = self.sample(
                    tid,
                    *vcpu,
                    slots,
                    kernel.map(|one| self.kernel[one]),
                    *known,
                );
                self.queues[*vcpu as usize].push(sample);
            }
            Step::Wait(ns) => self.now_ns += ns,
            Step::Drain(vcpu) => {
                let queue = std::mem::take(&mut self.queues[*vcpu as usize]);
                self.records.extend(queue);
            }
        }
    }

    fn map(&mut self, pid: u32, slot: usize, file: usize) {
        let number = self.number();
        let (name, deleted, build_id) = FILES[file % FILES.len()];
        let start = SLOT * (slot as u64 + 1);
        // Some are longer than their slot, and so cover the next one.
        let length = if file.is_multiple_of(3) {
            2 * SLOT
        } else {
            SLOT
        };
        self.records.push(mapping(MappingInfo {
            number,
            start,
            end: start + length,
            offset: 0,
            name: name.to_owned(),
            deleted,
            device: 8 << 20 | 1,
            inode: (file % FILES.len()) as u64 + 1,
            build_id: build_id.to_owned(),
            ..MappingInfo::default()
        }));
        let space = self.spaces.get_mut(&pid).unwrap();
        space[slot] = number;
        if length > SLOT && slot + 1 < SLOTS {
            space[slot + 1] = number;
        }
    }

    fn sample(
        &mut self,
        tid: u32,
        vcpu: u32,
        slots: &[usize],
        kernel: Option<u64>,
        known: bool,
    ) -> Record {
        let thread = self.threads[&tid].clone();
        let number = self.number();
        let process = self
            .threads
            .get(&thread.pid)
            .map(|first| first.comm.clone());
        self.records.push(task(TaskInfo {
            number,
            pid: thread.pid,
            tid,
            comm: thread.comm,
            process: process.unwrap_or_default(),
            started_ns: thread.started_ns,
            kernel: false,
            inner_pid: 0,
            root: String::new(),
        }));
        let space = self.spaces[&thread.pid];
        let place = |slot: &usize| ProgramFrame {
            address: SLOT * (*slot as u64 + 1) + OFFSET + *slot as u64,
            mapping: space[*slot],
        };
        let frames: Vec<ProgramFrame> = slots.iter().map(place).collect();
        let chain = match (kernel, frames.len()) {
            (None, 1) => CallChain::default(),
            (None, _) => CallChain {
                program: frames.clone(),
                program_end: Some(ChainEnd::Outermost),
                ..CallChain::default()
            },
            (Some(address), _) => CallChain {
                kernel: vec![address, self.kernel[1]],
                kernel_end: Some(ChainEnd::Entry),
                program: frames.clone(),
                program_end: Some(ChainEnd::Broken),
            },
        };
        Record::Sample(Sample {
            time_ns: self.now_ns,
            ip: kernel.unwrap_or(frames[0].address),
            period: 1000 + number,
            vm: 7,
            vcpu,
            core: vcpu,
            event: u16::from(number.is_multiple_of(3)),
            ring: Some(if kernel.is_some() {
                Ring::Kernel
            } else {
                Ring::User
            }),
            guest: GuestPlace {
                task: if known { number } else { 0 },
                mapping: if kernel.is_some() {
                    0
                } else {
                    frames[0].mapping
                },
                chain,
                ..GuestPlace::default()
            },
            ..Sample::default()
        })
    }
}

/// Files of the guest with symbols of their own.
pub(super) fn put_files(place: &Place) {
    fs::create_dir_all(place.path("root/lib")).unwrap();
    for (name, symbol) in [
        ("usr/bin/prog", "of_prog"),
        ("lib/a.so", "of_a"),
        // Of another build than the guest ran.
        ("lib/b.so", "of_another_b"),
    ] {
        let file = elf(0x40_1000, &[0xc3; 8], &[(symbol, 0x40_1000, 8)]);
        fs::write(place.path("root").join(name), file).unwrap();
    }
}
