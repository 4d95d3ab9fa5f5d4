//! Firmware that goes on in SMM, before a kernel of our own.

use arbiter::abi;
use guest_tests::kernel::{Kernel, Protocol, count_low, exit, print};
use guest_tests::l1::{End, Machine, Run};
use guest_tests::micro::Written;
use guest_tests::umpire;
use iced_x86::code_asm::{
    CodeAssembler, dword_ptr, eax, ecx, edi, edx, qword_ptr, r8, r9, r10, rdi, rsi,
};

/// The kernel's cookie.
const OWN: u64 = 0x1234_5678;
/// Kept cookies of the first counter, in the firmware's answer.
const COOKIES: u32 = 0x9_6a00;
const APIC: u32 = 0xfee0_0000;

fn read(a: &mut CodeAssembler, offset: u32) -> Written {
    a.mov(ecx, abi::MSR_BASE + offset)?;
    a.rdmsr()
}

fn write(a: &mut CodeAssembler, offset: u32, value: u64) -> Written {
    a.mov(ecx, abi::MSR_BASE + offset)?;
    a.mov(eax, u32::try_from(value).expect("32 bits"))?;
    a.mov(edx, 0)?;
    a.wrmsr()
}

/// Asks for one counter.
fn request_counter(a: &mut CodeAssembler, position: u64) -> Written {
    let which = abi::REQUEST_POSITION | position << abi::REQUEST_WHICH_SHIFT;
    write(a, abi::MSR_REQUEST, abi::REQUEST_RESERVE | which)
}

/// The state of an answer, with the reason of a refusal.
fn answer(state: u64, reason: u64, number: u64) -> String {
    let word = state | reason << abi::ANSWER_REASON_SHIFT | number << abi::ANSWER_NUMBER_SHIFT;
    format!("{word:08x}")
}

/// The kernel reads PMC5 with the firmware's cookie. It asks for PMC5 and PMC4: the
/// firmware is called by an SMI, yields one and keeps the other before the kernel's next
/// instruction. An SMI of the kernel's own does nothing more. The firmware's management
/// cookie is nowhere but where it is kept, and the kernel cannot write code for SMM.
fn kernel() -> Kernel {
    let kernel = Kernel::new(Protocol::Linux64, |a, routines| {
        let say = |a: &mut CodeAssembler| {
            a.call(routines.hex)?;
            print(a, "\n")
        };
        let smi = |a: &mut CodeAssembler| {
            a.mov(edi, APIC)?;
            a.mov(dword_ptr(rdi + 0xf0), 0x1ff)?;
            a.mov(dword_ptr(rdi + 0x310), 0)?;
            a.mov(dword_ptr(rdi + 0x300), 0x200)?;
            (0..8).try_for_each(|_| a.nop())
        };
        // Management and access cookie.
        a.mov(edi, COOKIES)?;
        a.mov(r8, qword_ptr(rdi))?;
        a.mov(r9, qword_ptr(rdi + 8))?;
        a.mov(rsi, r9)?;
        read(a, abi::MSR_COUNTER + 5)?;
        say(a)?;
        for n in [5, 4] {
            a.mov(rsi, OWN)?;
            request_counter(a, n)?;
            read(a, abi::MSR_ANSWER)?;
            say(a)?;
        }
        smi(a)?;
        for n in [5, 4] {
            read(a, abi::MSR_STATUS + n)?;
            say(a)?;
        }
        // How often the management cookie is in memory below 640 KiB.
        count_low(a, 0, r8)?;
        say(a)?;
        // What the kernel writes at the entry of SMM is no code of SMM.
        a.mov(edi, 0x3_8000)?;
        a.mov(r10, 0xfeeb_feeb_feeb_feeb_u64)?;
        a.mov(qword_ptr(rdi), r10)?;
        smi(a)?;
        print(a, "alive\n")?;
        exit(a, 0)
    });
    kernel.expect("a kernel")
}

#[test]
fn firmware_in_smm_answers_for_what_it_holds() {
    let kernel = kernel();
    // The same cookie in the same layer: the mode bits alone tell the two runs apart.
    for (layer, reads_count) in [("firmware", false), ("any", true)] {
        let counter = format!("cycles,on=PMC5,layer={layer},read=0x77,yield,keep");
        let flags = [
            "run",
            "--memory",
            "64",
            "--timeout",
            "60",
            "--cpu-vendor",
            "amd",
            "--pmu",
            "amd-perfmonv2",
            "--scheme",
            "interacting",
            "--grace",
            "20000",
            "--firmware",
            "builtin",
            "--firmware-counter",
            &counter,
            "--firmware-counter",
            "cycles,on=PMC4,layer=firmware",
            "--kernel",
        ];
        let run = Run::new(umpire::path()).args(flags).arg(kernel.path());
        let output = Machine::new().output(&run).expect("L1 works");
        let told = String::from_utf8_lossy(&output.stderr);
        let printed = String::from_utf8_lossy(&output.stdout);
        let (read, answered) = printed
            .lines()
            .filter(|line| !line.starts_with("umpire-firmware: "))
            .collect::<Vec<_>>()
            .split_first()
            .map(|(read, rest)| ((*read).to_owned(), rest.join(" ")))
            .expect("lines");
        assert_eq!(read != "00000077", reads_count, "{layer}: {read}, {told}");
        let status = |layer: u64| {
            let word = abi::STATUS_RESERVED | abi::STATUS_PRIVATE;
            format!("{:08x}", word | layer << abi::STATUS_OWNER_SHIFT)
        };
        let expected = [
            answer(abi::ANSWER_GRANTED, 0, 1),
            answer(abi::ANSWER_REFUSED, abi::REASON_REFUSED, 2),
            status(abi::LAYER_KERNEL),
            status(abi::LAYER_FIRMWARE),
            "00000001".to_owned(),
            "alive".to_owned(),
        ];
        assert_eq!(answered, expected.join(" "), "{layer}: {told}");
        assert_eq!(output.outcome.end, End::Exited(1), "{told}");
    }
}
