//! KVM as an oracle for the processor in software: the same random code of CPL 0 on both, the
//! same page tables, the same counts. Where KVM's own processor is wrong, the manual decides
//! ([`deviations`]).

mod counts;
mod deviations;
mod paging;
mod permutations;
mod system;

use anyhow::{Result, ensure};
use guest_tests::hostile::Rng;
use guest_tests::micro::{Lab, Program, Setup, Test, Written};
use iced_x86::code_asm::{
    CodeAssembler, CodeLabel, ax, cr2, cr3, ds, es, fs, gs, qword_ptr, r12, r14, r15, rax, rsp, ss,
};
use vmm::micro::{KERNEL_SS, KERNEL_STACK};

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "oracle::counts_of_random_code",
        run: counts::random,
    },
    Test {
        name: "oracle::rights_of_pages",
        run: paging::random,
    },
    Test {
        name: "oracle::every_permutation_of_rights",
        run: permutations::all,
    },
    Test {
        name: "oracle::system_instructions",
        run: system::random,
    },
];

/// Where the guest's own log is: memory that CPL 3 does not see, so that SMAP may be on.
const LOG: u64 = 0x1c_0000;
const LOG_LEN: u64 = 0x2_0000;
/// Bytes of an entry: what it is, and three words.
const ENTRY: i32 = 32;
/// The entry in the page directory of the lowest 2 MiB.
const LOW_PAGES: u64 = 0x3000;

/// Vectors that have an error code.
const WITH_CODE: [u8; 7] = [8, 10, 11, 12, 13, 14, 17];
/// Those that a case may raise.
const VECTORS: [u8; 14] = [0, 1, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 17];

/// Kinds of entries.
const CASE: i32 = 1;
const STATE: i32 = 2;
const FAULT: i32 = 0x100;

/// The same guests everywhere.
struct Random(Rng);

impl Random {
    fn new(seed: u64) -> Self {
        Self(Rng::new(seed))
    }

    fn next(&mut self) -> u64 {
        self.0.bits64()
    }

    fn below(&mut self, limit: u64) -> u64 {
        ((self.next() >> 32) * limit) >> 32
    }

    fn chance(&mut self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        let at = self.below(all.len() as u64);
        all[usize::try_from(at).unwrap_or(0)]
    }
}

/// A guest with handlers that log what they get and go on at R15, at CPL 0.
fn program(vectors: impl IntoIterator<Item = u8>) -> Result<Program> {
    let mut program = Program::new()?;
    for vector in vectors {
        program = program.handler(vector, |a| log_and_go_on(a, vector))?;
    }
    Ok(program)
}

fn imm(value: u64) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

/// [`FAULT`] and the vector: error code and CS, the distance of RIP to R14, RFLAGS; of a page
/// fault CR2 as well, in another entry.
fn log_and_go_on(a: &mut CodeAssembler, vector: u8) -> Written {
    if !WITH_CODE.contains(&vector) {
        a.push(0)?;
    }
    a.push(rax)?;
    a.mov(qword_ptr(r12), FAULT + i32::from(vector))?;
    a.mov(rax, qword_ptr(rsp + 24))?;
    a.shl(rax, 32)?;
    a.or(rax, qword_ptr(rsp + 8))?;
    a.mov(qword_ptr(r12 + 8), rax)?;
    a.mov(rax, qword_ptr(rsp + 16))?;
    a.sub(rax, r14)?;
    a.mov(qword_ptr(r12 + 16), rax)?;
    a.mov(rax, qword_ptr(rsp + 32))?;
    a.mov(qword_ptr(r12 + 24), rax)?;
    a.add(r12, ENTRY)?;
    if vector == 14 {
        a.mov(qword_ptr(r12), FAULT)?;
        a.mov(rax, cr2)?;
        a.mov(qword_ptr(r12 + 8), rax)?;
        a.add(r12, ENTRY)?;
    }
    a.pop(rax)?;
    a.jmp(r15)
}

/// The lowest 2 MiB become the system's, and the log begins.
fn begin(a: &mut CodeAssembler) -> Written {
    a.mov(r12, LOG)?;
    a.and(qword_ptr(LOW_PAGES), !4)?;
    a.mov(rax, cr3)?;
    a.mov(cr3, rax)
}

/// The stack and the data segments as they were, and the number of a case in the log.
fn begin_case(a: &mut CodeAssembler, number: usize) -> Written {
    a.mov(rsp, KERNEL_STACK - 0x800)?;
    a.mov(ax, u32::from(KERNEL_SS))?;
    a.mov(ss, ax)?;
    a.mov(ds, ax)?;
    a.mov(es, ax)?;
    a.mov(fs, ax)?;
    a.mov(gs, ax)?;
    a.mov(qword_ptr(r12), CASE)?;
    a.mov(qword_ptr(r12 + 8), imm(number as u64))?;
    a.add(r12, ENTRY)
}

/// R14 is where the instruction under test is, R15 where it goes on.
fn announce(a: &mut CodeAssembler, at: CodeLabel, after: CodeLabel) -> Written {
    a.lea(r14, qword_ptr(at))?;
    a.lea(r15, qword_ptr(after))
}

/// Runs a guest on this KVM and on a processor in software; the words of both logs.
fn both(lab: &Lab, program: &Program, cr4: u64) -> Result<[Vec<u64>; 2]> {
    let emulated = Lab::emulated();
    let log = |lab: &Lab| -> Result<Vec<u64>> {
        let ran = lab.run(&Setup::clock("none"), &program.clone().start(cr4))?;
        (LOG..LOG + LOG_LEN)
            .step_by(8)
            .map(|at| ran.word(at))
            .collect()
    };
    Ok([log(lab)?, log(&emulated)?])
}

/// A log by its cases.
fn cases(log: &[u64]) -> Vec<Vec<[u64; 4]>> {
    let mut cases: Vec<Vec<[u64; 4]>> = Vec::new();
    for entry in log.chunks_exact(4) {
        let Ok(entry) = <[u64; 4]>::try_from(entry) else {
            continue;
        };
        match entry[0] {
            0 => break,
            1 => cases.push(vec![entry]),
            _ => {
                if let Some(case) = cases.last_mut() {
                    case.push(entry);
                }
            }
        }
    }
    cases
}

/// Fails with the first differences between two logs, by what `names` calls their cases;
/// `deviates` gets the number of a case and what it left in both.
fn compare(
    [kvm, emu]: &[Vec<u64>; 2],
    names: &[String],
    deviates: impl Fn(usize, &[[u64; 4]], &[[u64; 4]]) -> bool,
) -> Result<usize> {
    let (kvm, emu) = (cases(kvm), cases(emu));
    let mut wrong = Vec::new();
    for (number, name) in names.iter().enumerate() {
        let (Some(kvm), Some(emu)) = (kvm.get(number), emu.get(number)) else {
            wrong.push(format!("{name}: not reached"));
            break;
        };
        if kvm != emu && !deviates(number, kvm, emu) {
            wrong.push(format!("{name}\n  KVM {kvm:x?}\n  emu {emu:x?}"));
        }
    }
    let shown = wrong.len().min(40);
    ensure!(
        wrong.is_empty(),
        "{} of {} cases differ:\n{}",
        wrong.len(),
        names.len(),
        wrong[..shown].join("\n")
    );
    Ok(names.len())
}
