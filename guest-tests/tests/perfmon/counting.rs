//! Counting sessions.

use anyhow::{Context, Result, bail, ensure};
use guest_tests::micro::{Lab, Test, Written};
use iced_x86::code_asm::{CodeAssembler, ecx};
use perfmon_abi::consts::{
    PFM_FL_SYSTEM_WIDE, PFM_PROV_DERIVED, PFM_PROV_EXACT, PFM_PROV_NOT_COUNTED,
    PFM_REG_RETFL_NOTAVAIL, PFM_REG_RETFL_PROV_SHIFT,
};
use perfmon_abi::wire::Subcode;
use perfmon_abi::{LoadArg, PmdArg};
use pmu_virt::perfmon::VirtualPmd;
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;
use umpire_perfmon::{Call, Errno};
use vmm::sched::CorePlan;

use crate::bed::{
    Bed, CYCLES, RETURNS, a_heart_and_a_halted_one, clock, counter, eventually, guest, load, pmd,
    read, step, two_hearts,
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
        name: "counting::what_is_countable_counts_as_well_as_it_says",
        run: countable,
    },
    Test {
        name: "counting::the_clock_tells_when_registers_were_read",
        run: the_clock,
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

/// The word for how a PMD was counted.
fn provenance(read: &PmdArg) -> &'static str {
    match read.flags >> PFM_REG_RETFL_PROV_SHIFT & 0xf {
        PFM_PROV_EXACT => "exact",
        PFM_PROV_DERIVED => "derived",
        PFM_PROV_NOT_COUNTED => "not counted",
        _ => "something else",
    }
}

/// MODEL tells which events are counted, and how well: a context's counts have the same
/// provenance, and a load refuses an event that is not among them.
fn countable(lab: &Lab) -> Result<()> {
    const INSTRUCTIONS: u64 = 0x43_00c0;
    for (model, expected) in [
        ("amd-core", &[("core cycles", "derived")][..]),
        (
            "intel-v2",
            &[("core cycles", "derived"), ("reference cycles", "exact")],
        ),
    ] {
        let mut bed = Bed::new(clock)?;
        bed.model = model;
        bed.run(lab, &two_hearts()?, |client, _| {
            let told = client.model()?.countable;
            let words = told.iter();
            let words = words.map(|it| (it.event.as_str(), it.provenance.as_str()));
            ensure!(words.eq(expected.iter().copied()), "{model}: {told:?}");
            for event in &told {
                let select = event.select.context("an event select")?;
                let context = counter(client, 0, select)?;
                load(client, &context, 0)?;
                client.call(&context, &mut Call::Start(None))?;
                eventually("it counts", || Ok(read(client, &context, 0)?.value > 0))?;
                let read = read(client, &context, 0)?;
                ensure!(provenance(&read) == event.provenance, "{event:?}: {read:?}");
            }
            let context = counter(client, 0, INSTRUCTIONS)?;
            let refused = client.call(&context, &mut Call::Load(LoadArg { pid: 0, set: 0 }));
            let refused = refused.err().context("nobody counts instructions")?;
            let why = (refused.errno, refused.subcode);
            ensure!(
                why == (Errno::EINVAL, Subcode::PicNotCapable),
                "{refused:?}"
            );
            Ok(())
        })?;
    }
    Ok(())
}

/// PMD 80 is the host's monotonic clock as the vCPU's thread read the registers.
fn the_clock(lab: &Lab) -> Result<()> {
    let now = || {
        let now = clock_gettime(ClockId::Monotonic);
        u64::try_from(now.tv_sec * 1_000_000_000 + now.tv_nsec)
    };
    let bed = Bed::new(clock)?;
    bed.run(lab, &two_hearts()?, |client, _| {
        let number = VirtualPmd::Clock.pmd();
        let told = client.model()?.virtual_pmds;
        ensure!(told.iter().any(|it| it.pmd == number), "{told:?}");
        let context = counter(client, 0, CYCLES)?;
        // Nobody has read it for a vCPU yet.
        let never = read(client, &context, number)?;
        ensure!(never.value == u64::MAX && provenance(&never) == "not counted");
        load(client, &context, 0)?;
        let mut before = now()?;
        for _ in 0..5 {
            let read = read(client, &context, number)?;
            let after = now()?;
            // So two readings are as far apart as they were in time.
            ensure!((before..=after).contains(&read.value), "{read:?}");
            std::thread::sleep(Duration::from_millis(20));
            before = now()?;
            ensure!(before >= read.value + 20_000_000, "{before}: {read:?}");
        }
        // A VM without it answers as for any register that it lacks.
        let beyond = VirtualPmd::ALL.iter().map(|it| it.pmd()).max();
        let mut call = Call::ReadPmds(vec![pmd(beyond.unwrap_or(number) + 1, 0)]);
        let refused = client.call(&context, &mut call);
        let Call::ReadPmds(asked) = call else {
            bail!("another command came back");
        };
        let refused = refused.err().context("there is no such register")?;
        let why = (refused.errno, refused.subcode);
        ensure!(
            why == (Errno::EINVAL, Subcode::InvalidPicNumber),
            "{refused:?}"
        );
        ensure!(asked[0].flags & PFM_REG_RETFL_NOTAVAIL != 0, "{asked:?}");
        Ok(())
    })?;
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
