//! tmp
use iced_x86::code_asm::*;
use std::time::Duration;
use vmm::micro::*;
fn main() {
    env_logger::init();
    let host = vmm::kvm::Host::open().unwrap();
    let rep = vmm::probe::ProbeReport::gather(&host).unwrap();
    println!("{rep:#?}");
    let out = |a: &mut CodeAssembler, port: u32| {
        a.mov(edx, port)?;
        a.out(dx, eax)
    };
    let code = assemble(KERNEL_CODE, |a| {
        // perf: evtsel0 = cycles usr+os+en+int
        a.mov(ecx, 0xc0010201u32)?;
        a.mov(eax, 0xfff00000u32)?;
        a.mov(edx, 0xffffu32)?;
        a.wrmsr()?;
        a.mov(ecx, 0xc0010200u32)?;
        a.mov(eax, 0x530076u32)?;
        a.xor(edx, edx)?;
        a.wrmsr()?;
        a.mov(ecx, 1000u32)?;
        let mut l = a.create_label();
        a.set_label(&mut l)?;
        a.dec(ecx)?;
        a.jne(l)?;
        a.mov(ecx, 0xc0010201u32)?;
        a.rdmsr()?;
        out(a, 0xe5)?;
        a.xor(ecx, ecx)?;
        a.rdpmc()?;
        out(a, 0xe6)?;
        a.mov(ecx, 77)?;
        a.rdpmc()?;
        out(a, 0xe7)
    })
    .unwrap();
    let gp = assemble(KERNEL_CODE + 0x1000, |a| {
        a.nop()?;
        out(a, 0xe9)?;
        a.add(rsp, 8)?;
        a.add(qword_ptr(rsp), 2)?;
        a.iretq()
    })
    .unwrap();
    let nmi = assemble(KERNEL_CODE + 0x2000, |a| {
        out(a, 0xea)?;
        a.iretq()
    })
    .unwrap();
    let mut end = KERNEL_CODE;
    end += code.len() as u64;
    let tail = assemble(end, |a| {
        a.mov(eax, 3)?;
        out(a, 0xf4)
    })
    .unwrap();
    let g = MicroGuest::new()
        .code(KERNEL_CODE, code)
        .code(end, tail)
        .code(KERNEL_CODE + 0x1000, gp)
        .code(KERNEL_CODE + 0x2000, nmi)
        .handler(13, KERNEL_CODE + 0x1000)
        .handler(2, KERNEL_CODE + 0x2000)
        .start(Start::at(KERNEL_CODE, 0));
    let run = MicroRun {
        model: Some(pmu_virt::PmuModel::parse("amd-core").unwrap()),
        backend: || pmu_virt::backend("clock").unwrap(),
        quirks: rep.quirks(),
        pmi_floor_us: 100,
        timeout: Duration::from_secs(5),
        record: true,
    };
    let o = run.run(&host, &g).unwrap();
    println!("{:#x?}", o.writes);
    for v in &o.vcpus {
        println!(
            "{:?} {:x?}\n{:#?}\n{:?}",
            v.end, v.regs, v.events, v.counters
        );
    }
    println!("{}", o.timed_out);
}
