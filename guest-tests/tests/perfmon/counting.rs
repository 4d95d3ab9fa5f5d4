//! Counting sessions.

use anyhow::{Result, ensure};
use guest_tests::micro::{Lab, Test, Written};
use iced_x86::code_asm::{CodeAssembler, ecx};
use perfmon_abi::consts::{PFM_FL_SYSTEM_WIDE, PFM_PROV_EXACT, PFM_REG_RETFL_PROV_SHIFT};
use pmu_virt::perfmon::VirtualPmd;
use std::time::Duration;
use umpire_perfmon::Call;
use vmm::sched::CorePlan;

use crate::bed::{
    Bed, CYCLES, RETURNS, a_heart_and_a_halted_one, clock, counter, eventually, guest, load, read,
    step, two_hearts,
};

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "counting::returns_of_a_vcpu_are_exact",
        run: |lab| returns(lab, 0, None),
    },
    Test {
        name: "counting::returns_of_a_core_are_exact",
        run: |lab| returns(lab, PFM_FL_SYSTEM_WIDE, None),
    },
    Test {
        name: "counting::returns_of_a_vcpu_on_a_shared_core_are_exact",
        run: |lab| returns(lab, 0, ONE_CORE),
    },
    Test {
        name: "counting::returns_of_a_shared_core_are_exact",
        run: |lab| returns(lab, PFM_FL_SYSTEM_WIDE, ONE_CORE),
    },
    Test {
        name: "counting::exits_of_a_shared_core_are_those_of_all_its_vcpus",
        run: exits,
    },
    Test {
        name: "counting::a_halted_vcpu_of_a_shared_core_has_no_exits",
        run: no_exits,
    },
];

pub(crate) const ONE_CORE: Option<CorePlan> = Some(CorePlan {
    cores: 1,
    slice: Duration::from_millis(1),
});

/// Calls something `times` times that returns at once.
pub(crate) fn calls(a: &mut CodeAssembler, times: u32) -> Written {
    let (mut function, mut again, mut behind) =
        (a.create_label(), a.create_label(), a.create_label());
    a.mov(ecx, times)?;
    a.set_label(&mut again)?;
    a.call(function)?;
    a.dec(ecx)?;
    a.jne(again)?;
    a.jmp(behind)?;
    a.set_label(&mut function)?;
    a.ret()?;
    a.set_label(&mut behind)?;
    a.zero_bytes()
}

fn returns(lab: &Lab, flags: u32, cores: Option<CorePlan>) -> Result<()> {
    const RETURN_COUNT: u64 = 25;
    let mut bed = Bed::new(step)?;
    bed.cores = cores;
    let guest = guest(|a| calls(a, 25))?;
    let (read, _) = bed.run(lab, &guest, |client, gates| {
        let context = counter(client, flags, RETURNS)?;
        load(client, &context, 0)?;
        client.call(&context, &mut Call::Start(None))?;
        gates.open(1);
        gates.reached(2)?;
        let running = read(client, &context, 0)?;
        client.call(&context, &mut Call::Stop)?;
        client.call(&context, &mut Call::Unload)?;
        let at_the_end = read(client, &context, 0)?;
        ensure!(running.value == at_the_end.value, "{running:?}");
        Ok(at_the_end)
    })?;
    ensure!(read.value == RETURN_COUNT, "{read:?}");
    let provenance = read.flags >> PFM_REG_RETFL_PROV_SHIFT & 0xf;
    ensure!(provenance == PFM_PROV_EXACT, "{read:?}");
    Ok(())
}

fn exits(lab: &Lab) -> Result<()> {
    let mut bed = Bed::new(clock)?;
    bed.cores = ONE_CORE;
    bed.run(lab, &two_hearts()?, |client, gates| {
        let context = counter(client, PFM_FL_SYSTEM_WIDE, CYCLES)?;
        load(client, &context, 0)?;
        let exits =
            || -> Result<u64> { Ok(read(client, &context, VirtualPmd::Exits.pmd())?.value) };
        let beats = || gates.beats(0) + gates.beats(1);
        for _ in 0..20 {
            let before = exits()?;
            let first = beats();
            gates.alive(0)?;
            gates.alive(1)?;
            let beaten = beats() - first;
            let after = exits()?;
            // Each beat is an exit.
            ensure!(after >= before + beaten, "{before} {beaten} {after}");
        }
        Ok(())
    })?;
    Ok(())
}

/// A core looks again and again for what would wake a halted vCPU. No look is an exit.
fn no_exits(lab: &Lab) -> Result<()> {
    let mut bed = Bed::new(clock)?;
    bed.cores = ONE_CORE;
    bed.run(lab, &a_heart_and_a_halted_one()?, |client, gates| {
        let context = counter(client, 0, CYCLES)?;
        load(client, &context, 1)?;
        let exits =
            || -> Result<u64> { Ok(read(client, &context, VirtualPmd::Exits.pmd())?.value) };
        // It may not have halted yet.
        eventually("a halted vCPU has no exits", || {
            let before = exits()?;
            gates.alive(0)?;
            std::thread::sleep(Duration::from_millis(100));
            Ok(exits()? == before)
        })
    })?;
    Ok(())
}
