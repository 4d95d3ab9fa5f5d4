//! Firmware, hypervisor and kernel beside each other.

use anyhow::{Result, ensure};
use arbiter::{CounterId, Event, Layer, Policy, Scheme, abi};
use guest_tests::micro::{DATA, Lab, Op, Program, Script, Setup, Test, exit, log_value, wrmsr};
use iced_x86::code_asm::{
    CodeAssembler, cx, dx, eax, ebp, ebx, ecx, edi, edx, esi, qword_ptr, r14, rax, rbx, rdi, rdx,
};
use pmu_virt::PmuModel;
use vmm::config::{FollowsGrants, HypervisorCounters, PcrChoice};
use vmm::firmware::SetAside;
use vmm::kvm::SMM_ENTRY;
use vmm::micro::{KERNEL_CODE, MicroPcr, Start, assemble_for};

use super::{
    ACCESS, CR4_PCE, KEY, access_key, alias, alias_select, counter, decisions, key, rdpmc, select,
    setup, single, status, told, with,
};
use crate::overflow::Apic;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "pcr::the_firmwares_phase_ends_once",
        run: phase,
    },
    Test {
        name: "pcr::an_unmodified_kernel_finds_what_is_left",
        run: legacy_map,
    },
    Test {
        name: "pcr::a_greedy_firmware_leaves_the_kernel_its_minimum",
        run: greedy,
    },
    Test {
        name: "pcr::smm_counts_as_firmware",
        run: smm,
    },
    Test {
        name: "pcr::each_vcpu_has_a_state_of_its_own_in_smm",
        run: smm_together,
    },
];

fn pmc(n: u8) -> CounterId {
    CounterId::Programmable(n)
}

/// The plan of `umpire run` with these options.
pub(super) fn planned(choice: &PcrChoice, firmware: &[CounterId]) -> Result<MicroPcr> {
    let model = PmuModel::parse(&setup().model)?;
    let aside = SetAside {
        named: firmware.iter().copied().collect(),
        any: 0,
    };
    Ok(MicroPcr {
        plan: choice.plan(&model, aside)?,
        firmware: !firmware.is_empty(),
    })
}

const FIRMWARES: u64 = abi::STATUS_RESERVED | abi::LAYER_FIRMWARE << abi::STATUS_OWNER_SHIFT;
const PHASE: u32 = single(abi::MSR_PHASE);

fn phase(lab: &Lab) -> Result<()> {
    const SCRIPT: Script<'_> = Script {
        name: "phase",
        cr4: CR4_PCE,
        kernel: &[
            Op::Read(PHASE, abi::LAYER_FIRMWARE),
            Op::Write(key(1), KEY),
            Op::With(KEY, &Op::Write(access_key(1), ACCESS)),
            Op::WriteGp(PHASE, 2),
            Op::Write(PHASE, abi::PHASE_END),
            Op::Read(PHASE, abi::LAYER_KERNEL),
            Op::WriteGp(PHASE, abi::PHASE_END),
            Op::Read(status(1), FIRMWARES | abi::STATUS_PRIVATE),
            Op::Read(status(0), 0),
        ],
        user: &[],
    };
    let firmware = MicroPcr {
        firmware: true,
        ..MicroPcr::default()
    };
    let ran = SCRIPT.check(lab, &with(firmware))?;
    let expected = "reserved, access-set, refused malformed, phase-ended, refused phase";
    ensure!(told(&ran) == expected, "{}", told(&ran));
    let holdings = &ran.outcome.vcpus[0].holdings;
    ensure!(
        holdings.len() == 1 && holdings[0].owner == Layer::Firmware && holdings[0].private,
        "{holdings:?}"
    );
    Ok(())
}

/// Firmware holds PMC0 and the hypervisor PMC3: four names are left, and they
/// reach PMC1, PMC2, PMC4 and PMC5.
fn legacy_map(lab: &Lab) -> Result<()> {
    const MAP: u32 = abi::MSR_BASE + abi::MSR_LEGACY_MAP;
    const SCRIPT: Script<'_> = Script {
        name: "map",
        cr4: CR4_PCE,
        kernel: &[
            Op::Read(MAP, 0),
            Op::Write(key(0), KEY),
            Op::With(KEY, &Op::Write(access_key(0), ACCESS)),
            Op::With(ACCESS, &Op::Write(alias(0), 0xf0)),
            Op::Write(PHASE, abi::PHASE_END),
            Op::Read(MAP, 1),
            Op::Read(MAP + 1, 2),
            Op::Read(MAP + 2, 4),
            Op::Read(MAP + 3, 5),
            Op::Read(MAP + 4, abi::LEGACY_NONE),
            Op::Write(select(0), 0x30076),
            Op::Write(counter(0), 0x11),
            Op::Write(counter(2), 0x44),
            Op::Read(alias(1), 0x11),
            Op::Read(alias(4), 0x44),
            Op::Read(alias_select(1), 0x30076),
            Op::Rdpmc(0, 0x11),
            Op::Rdpmc(2, 0x44),
            Op::With(ACCESS, &Op::Rdpmc(rdpmc(0), 0xf0)),
            // The hypervisor's own, under its own name.
            Op::Read(alias(3), 0),
            Op::Read(
                status(3),
                abi::STATUS_RESERVED
                    | abi::LAYER_HYPERVISOR << abi::STATUS_OWNER_SHIFT
                    | abi::STATUS_PRIVATE,
            ),
        ],
        user: &[],
    };
    let choice = PcrChoice {
        hypervisor: HypervisorCounters::These(vec![pmc(3)]),
        follows_grants: FollowsGrants::On,
        ..PcrChoice::default()
    };
    let ran = SCRIPT.check(lab, &with(planned(&choice, &[pmc(0)])?))?;
    let expected = "reserved x2, access-set, phase-ended, dropped-read held";
    ensure!(told(&ran) == expected, "{}", told(&ran));
    Ok(())
}

fn greedy(lab: &Lab) -> Result<()> {
    const SCRIPT: Script<'_> = Script {
        name: "greedy",
        cr4: 0,
        kernel: &[
            Op::Write(key(0), KEY),
            Op::Write(key(1), KEY),
            Op::Write(key(2), KEY),
            Op::Write(key(3), KEY),
            Op::WriteGp(key(4), KEY),
            Op::WriteGp(key(5), KEY),
            Op::Write(PHASE, abi::PHASE_END),
            Op::Write(key(4), KEY),
            Op::Write(key(5), KEY),
        ],
        user: &[],
    };
    let mut policy = Policy::default();
    policy.kernel.min.programmable = 2;
    let choice = PcrChoice {
        policy,
        scheme: Scheme::Independent,
        follows_grants: FollowsGrants::Off,
        ..PcrChoice::default()
    };
    let ran = SCRIPT.check(lab, &with(planned(&choice, &[pmc(0)])?))?;
    let expected = "reserved x4, refused minimum x2, phase-ended, reserved x2";
    ensure!(told(&ran) == expected, "{}", told(&ran));
    Ok(())
}

/// An SMI that the kernel sends itself leads to code that reserves as firmware.
fn smm(lab: &Lab) -> Result<()> {
    const PORT: u32 = 0x90;
    const ICR: u32 = 0x830;
    const SMI_TO_0: u64 = 2 << 8;
    let low = u32::try_from(KEY & 0xffff_ffff)?;
    let high = u32::try_from(KEY >> 32)?;
    let handler = assemble_for(16, SMM_ENTRY, |a| {
        a.mov(ecx, PHASE)?;
        a.rdmsr()?;
        a.mov(dx, PORT)?;
        a.out(dx, eax)?;
        // PMC2 is unreserved and expects 0; EDI over ESI.
        a.xor(esi, esi)?;
        a.xor(edi, edi)?;
        a.mov(ecx, key(2))?;
        a.mov(eax, low)?;
        a.mov(edx, high)?;
        a.wrmsr()?;
        // With the cookie in EDI and ESI.
        a.mov(esi, low)?;
        a.mov(edi, high)?;
        a.mov(ecx, access_key(2))?;
        a.mov(eax, 7)?;
        a.xor(edx, edx)?;
        a.wrmsr()?;
        a.mov(cx, 0)?;
        a.rsm()
    })?;
    let read = |a: &mut iced_x86::code_asm::CodeAssembler, msr: u32| {
        a.mov(ecx, msr)?;
        a.rdmsr()?;
        log_value(a)
    };
    let program = Program::new()?.kernel(|a| {
        Apic::X2.enable(a)?;
        read(a, PHASE)?;
        wrmsr(a, ICR, SMI_TO_0)?;
        for _ in 0..8 {
            a.nop()?;
        }
        read(a, PHASE)?;
        read(a, status(2))?;
        exit(a)
    })?;
    let setup = Setup {
        timeout: std::time::Duration::from_secs(10),
        ..setup()
    };
    let ran = lab.run(&setup, &program.start(0).smm(handler))?;
    let seen: Vec<u64> = ran.log.iter().map(|entry| entry.a).collect();
    let expected = [
        abi::LAYER_KERNEL,
        abi::LAYER_KERNEL,
        FIRMWARES | abi::STATUS_PRIVATE,
    ];
    ensure!(seen == expected, "{seen:x?} of {DATA:#x}");
    let port = u16::try_from(PORT)?;
    let inside = ran.outcome.written_to(port);
    ensure!(
        inside == [u32::try_from(abi::LAYER_FIRMWARE)?],
        "{inside:x?}"
    );
    let by: Vec<(Layer, Event)> = ran.outcome.vcpus[0]
        .decisions
        .iter()
        .map(|record| (record.layer, record.event))
        .collect();
    let reserved = (Layer::Firmware, Event::Reserved { lease_ms: None });
    let set = (Layer::Firmware, Event::AccessSet { private: true });
    ensure!(by == [reserved, set], "{:?}", decisions(&ran));
    Ok(())
}

/// Two vCPUs go into SMM again and again, also at the same time, since the code there exits
/// to the VMM. Each finds its registers when it is back.
fn smm_together(lab: &Lab) -> Result<()> {
    const OTHER: u64 = KERNEL_CODE + 0x1_0000;
    const READY: u64 = DATA + 0x100;
    const DONE: u64 = DATA + 0x108;
    const BAD: u64 = DATA + 0x110;
    const ROUNDS: u32 = 100;
    const ICR: u32 = 0x830;
    let handler = assemble_for(16, SMM_ENTRY, |a| {
        let mut again = a.create_label();
        a.mov(ebx, 8)?;
        a.set_label(&mut again)?;
        a.mov(ecx, PHASE)?;
        a.rdmsr()?;
        a.dec(ebx)?;
        a.jne(again)?;
        a.rsm()
    })?;
    let spin = |a: &mut CodeAssembler, id: u64| {
        let [mut together, mut again, mut whole] = [(); 3].map(|()| a.create_label());
        let pattern = 0x1111_2222_3333_4444 * (id + 1);
        Apic::X2.enable(a)?;
        a.lock().inc(qword_ptr(READY))?;
        a.set_label(&mut together)?;
        a.pause()?;
        a.cmp(qword_ptr(READY), 2)?;
        a.jne(together)?;
        a.mov(ebp, ROUNDS)?;
        a.set_label(&mut again)?;
        for register in [rbx, rdi, r14] {
            a.mov(register, pattern)?;
        }
        wrmsr(a, ICR, id << 32 | 2 << 8)?;
        (0..8).try_for_each(|_| a.nop())?;
        a.mov(rax, pattern)?;
        a.xor(rbx, rax)?;
        a.xor(rdi, rax)?;
        a.xor(r14, rax)?;
        a.or(rbx, rdi)?;
        a.or(rbx, r14)?;
        a.je(whole)?;
        a.lock().inc(qword_ptr(BAD))?;
        a.set_label(&mut whole)?;
        a.dec(ebp)?;
        a.jne(again)?;
        a.lock().inc(qword_ptr(DONE))
    };
    let program = Program::new()?.kernel(|a| {
        let mut wait = a.create_label();
        spin(a, 0)?;
        a.set_label(&mut wait)?;
        a.pause()?;
        a.cmp(qword_ptr(DONE), 2)?;
        a.jne(wait)?;
        a.mov(rax, qword_ptr(BAD))?;
        a.mov(rdx, qword_ptr(DONE))?;
        log_value(a)?;
        exit(a)
    })?;
    let program = program.code(OTHER, |a| {
        let mut rest = a.create_label();
        spin(a, 1)?;
        a.set_label(&mut rest)?;
        a.hlt()?;
        a.jmp(rest)
    })?;
    let setup = Setup {
        timeout: std::time::Duration::from_secs(60),
        ..setup()
    };
    let guest = program.start(0).start(Start::at(OTHER, 0)).smm(handler);
    let ran = lab.run(&setup, &guest)?;
    let seen: Vec<(u64, u64)> = ran.log.iter().map(|entry| (entry.a, entry.b)).collect();
    ensure!(
        seen == [(0, 2)],
        "{seen:?}: rounds with other registers, vCPUs"
    );
    Ok(())
}
