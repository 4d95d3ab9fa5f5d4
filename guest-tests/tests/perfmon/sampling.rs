//! Overflows: messages, masks, blocked vCPUs, samples in a buffer.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use guest_tests::micro::{Lab, Program, Test, exit};
use iced_x86::code_asm::{ecx, rax};
use perfmon_abi::consts::{
    DEFAULT_FORMAT, PFM_FL_NOTIFY_BLOCK, PFM_FL_SYSTEM_WIDE, PFM_MSG_OVFL, PFM_REGFL_OVFL_NOTIFY,
    PFM_SETFL_TIME_SWITCH,
};
use perfmon_abi::{
    DefaultArg, DefaultEntry, DefaultHeader, Message, PmcArg, PmdArg, Record, SetDesc, SetInfo,
    Timespec,
};
use pmu_virt::perfmon::VirtualPmd;
use umpire_perfmon::{Call, Client, ContextHandle, Event, Wait};
use vmm::micro::{KERNEL_CODE, MEMORY_SIZE};
use vmm::sched::CorePlan;

use crate::bed::{
    Bed, CYCLES, PATIENCE, RETURNS, clock, counter, eventually, gate, guest, load, pmc, pmd, read,
    step, two_hearts,
};
use crate::counting::ONE_CORE;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "sampling::a_vcpu_is_masked_until_restart",
        run: |lab| masked(lab, 0, None),
    },
    Test {
        name: "sampling::a_core_is_masked_until_restart",
        run: |lab| masked(lab, PFM_FL_SYSTEM_WIDE, None),
    },
    Test {
        name: "sampling::a_shared_core_is_masked_until_restart",
        run: |lab| masked(lab, PFM_FL_SYSTEM_WIDE, ONE_CORE),
    },
    Test {
        name: "sampling::a_blocked_vcpu_waits_and_another_goes_on",
        run: |lab| blocked(lab, None),
    },
    Test {
        name: "sampling::a_blocked_vcpu_leaves_its_core_to_another",
        run: |lab| blocked(lab, ONE_CORE),
    },
    Test {
        name: "sampling::a_core_is_idle_while_its_vcpu_is_blocked",
        run: idle_while_blocked,
    },
    Test {
        name: "sampling::samples_are_in_the_buffer",
        run: samples,
    },
    Test {
        name: "sampling::a_counted_return_is_sampled_where_it_leads",
        run: |lab| returns(lab, 0, None),
    },
    Test {
        name: "sampling::a_counted_return_is_sampled_where_it_leads_on_a_shared_core",
        run: |lab| returns(lab, 0, ONE_CORE),
    },
    Test {
        name: "sampling::a_return_counted_for_a_core_is_sampled_where_it_leads",
        run: |lab| returns(lab, PFM_FL_SYSTEM_WIDE, ONE_CORE),
    },
];

/// Ticks between two overflows: a millisecond or less on any host.
const PERIOD: u64 = 1_000_000;

fn every(period: u64) -> PmdArg {
    let from = period.wrapping_neg();
    PmdArg {
        long_reset: from,
        short_reset: from,
        ..pmd(0, from)
    }
}

/// A context whose counter notifies.
fn sampler(client: &Client, flags: u32, period: u64) -> Result<ContextHandle> {
    let context = client.create(flags, None, &[])?;
    let cycles = PmcArg {
        flags: PFM_REGFL_OVFL_NOTIFY,
        ..pmc(0, CYCLES)
    };
    client.call(&context, &mut Call::WritePmcs(vec![cycles]))?;
    client.call(&context, &mut Call::WritePmds(vec![every(period)]))?;
    Ok(context)
}

pub(crate) fn message(context: &ContextHandle) -> Result<Message> {
    match context.read_message(Wait::For(PATIENCE))? {
        Event::Message(message) => Ok(message),
        other => bail!("{other:?} instead of a message"),
    }
}

fn masked(lab: &Lab, flags: u32, cores: Option<CorePlan>) -> Result<()> {
    let mut bed = Bed::new(clock)?;
    bed.cores = cores;
    bed.run(lab, &guest(|a| gate(a, 2))?, |client, gates| {
        let context = sampler(client, flags, PERIOD)?;
        load(client, &context, 0)?;
        client.call(&context, &mut Call::Start(None))?;
        gates.open(1);
        let mut last = 0;
        for _ in 0..3 {
            let told = message(&context)?;
            ensure!(
                told.kind == PFM_MSG_OVFL && told.ovfl_pmds == [1, 0],
                "{told:?}"
            );
            ensure!(told.active_set == 0 && told.generation == 1, "{told:?}");
            // Nothing counts while it is masked.
            let first = read(client, &context, 0)?;
            std::thread::sleep(Duration::from_millis(5));
            let second = read(client, &context, 0)?;
            ensure!(first.value == second.value, "{first:?} {second:?}");
            let none = context.read_message(Wait::No)?;
            ensure!(matches!(none, Event::Nothing), "{none:?}");
            // Where it was is known without a sampling format.
            let tell = |which: VirtualPmd| {
                Ok::<_, anyhow::Error>(read(client, &context, which.pmd())?.value)
            };
            let (ip, tsc) = (tell(VirtualPmd::Ip)?, tell(VirtualPmd::Tsc)?);
            let code = KERNEL_CODE..KERNEL_CODE + 0x1000;
            ensure!(
                code.contains(&ip) && tsc > last,
                "{ip:#x} at {tsc} after {last}"
            );
            ensure!(tell(VirtualPmd::Ring)? == 0 && tell(VirtualPmd::Cr3)? != u64::MAX);
            last = tsc;
            client.call(&context, &mut Call::Restart)?;
        }
        Ok(())
    })?;
    Ok(())
}

fn blocked(lab: &Lab, cores: Option<CorePlan>) -> Result<()> {
    // A beat is an exit, which is half of a period where one takes 200 µs: there is to be time for
    // some beats before the vCPU is blocked again.
    const BETWEEN: u64 = 16;
    let mut bed = Bed::new(clock)?;
    bed.cores = cores;
    bed.run(lab, &two_hearts()?, |client, gates| {
        let context = sampler(client, PFM_FL_NOTIFY_BLOCK, PERIOD * BETWEEN)?;
        load(client, &context, 1)?;
        gates.alive(1)?;
        client.call(&context, &mut Call::Start(None))?;
        for _ in 0..3 {
            message(&context)?;
            let before = gates.beats(1);
            gates.alive(0)?;
            std::thread::sleep(Duration::from_millis(5));
            let after = gates.beats(1);
            // The beat that the guest was left for may still be on its way.
            ensure!(
                after <= before + 1,
                "a blocked vCPU went on: {before} to {after}"
            );
            client.call(&context, &mut Call::Restart)?;
            // It may be blocked again by now, but not without having run.
            eventually("the vCPU goes on", || Ok(gates.beats(1) > after))?;
        }
        message(&context)?;
        // Whoever is blocked goes on when its tool goes.
        drop(context);
        gates.alive(1)
    })?;
    Ok(())
}

/// The sets of the core's context take turns, and each gets its share.
fn idle_while_blocked(lab: &Lab) -> Result<()> {
    const BLOCKED: Duration = Duration::from_millis(300);
    let bed = Bed::new(clock)?;
    bed.run(lab, &guest(|a| gate(a, 2))?, |client, gates| {
        let core = counter(client, PFM_FL_SYSTEM_WIDE, CYCLES)?;
        let timeout = Timespec {
            sec: 0,
            nsec: 1_000_000,
        };
        let set = |id| SetDesc {
            id,
            flags: PFM_SETFL_TIME_SWITCH,
            timeout,
            ..SetDesc::default()
        };
        client.call(&core, &mut Call::CreateEvtsets(vec![set(0), set(1)]))?;
        load(client, &core, 0)?;
        client.call(&core, &mut Call::Start(None))?;
        let context = sampler(client, PFM_FL_NOTIFY_BLOCK, PERIOD)?;
        load(client, &context, 0)?;
        client.call(&context, &mut Call::Start(None))?;
        gates.open(1);
        message(&context)?;
        std::thread::sleep(BLOCKED);
        let info = |id| SetInfo {
            id,
            ..SetInfo::default()
        };
        let mut call = Call::GetinfoEvtsets(vec![info(0), info(1)]);
        client.call(&core, &mut call)?;
        let Call::GetinfoEvtsets(sets) = call else {
            bail!("another command came back");
        };
        for set in &sets {
            let active = Duration::new(
                u64::try_from(set.act_duration.sec)?,
                u32::try_from(set.act_duration.nsec)?,
            );
            ensure!(active > BLOCKED / 3, "{sets:?}");
        }
        Ok(())
    })?;
    Ok(())
}

fn samples(lab: &Lab) -> Result<()> {
    const SAMPLES: u64 = 20;
    let bed = Bed::new(clock)?;
    bed.run(lab, &guest(|a| gate(a, 2))?, |client, gates| {
        let arg = DefaultArg {
            buf_size: 1 << 16,
            buf_flags: 0,
        };
        let context = client.create(0, Some(DEFAULT_FORMAT), &arg.to_bytes())?;
        client.call(&context, &mut Call::WritePmcs(vec![pmc(0, CYCLES)]))?;
        client.call(&context, &mut Call::WritePmds(vec![every(PERIOD)]))?;
        let mapping = context.map_buffer()?;
        load(client, &context, 0)?;
        client.call(&context, &mut Call::Start(None))?;
        gates.open(1);
        let header = || -> Result<DefaultHeader> {
            let bytes = mapping.copy(0, DefaultHeader::SIZE);
            let bytes = bytes.ok_or_else(|| anyhow::anyhow!("a buffer without a header"))?;
            Ok(DefaultHeader::from_bytes(&bytes)?)
        };
        eventually("samples come", || Ok(header()?.count >= SAMPLES))?;
        client.call(&context, &mut Call::Stop)?;
        let mut last = 0;
        for number in 0..20 {
            let at = DefaultHeader::SIZE + number * DefaultEntry::SIZE;
            let Some(bytes) = mapping.copy(at, DefaultEntry::SIZE) else {
                bail!("sample {number} is outside of the buffer");
            };
            let entry = DefaultEntry::from_bytes(&bytes)?;
            ensure!(entry.pid.unsigned_abs() == std::process::id(), "{entry:?}");
            ensure!((entry.tid, entry.cpu, entry.set) == (0, 0, 0), "{entry:?}");
            ensure!(entry.last_reset_val == PERIOD.wrapping_neg(), "{entry:?}");
            let code = KERNEL_CODE..KERNEL_CODE + MEMORY_SIZE as u64;
            ensure!(code.contains(&entry.ip), "{entry:x?}");
            ensure!(entry.tstamp > last, "{entry:?} after {last}");
            last = entry.tstamp;
        }
        Ok(())
    })?;
    Ok(())
}

/// Every fifth return of 25 is sampled: each at the instruction behind its call.
fn returns(lab: &Lab, flags: u32, cores: Option<CorePlan>) -> Result<()> {
    const CALLS: u64 = KERNEL_CODE + 0x1_0000;
    const CALL_BYTES: u64 = 5;
    let mut bed = Bed::new(step)?;
    bed.cores = cores;
    let program = Program::new()?.kernel(|a| {
        gate(a, 1)?;
        a.mov(rax, CALLS)?;
        a.mov(ecx, 25)?;
        a.call(rax)?;
        gate(a, 2)?;
        gate(a, 3)?;
        exit(a)
    })?;
    let program = program.code(CALLS, |a| {
        let (mut again, mut function) = (a.create_label(), a.create_label());
        a.set_label(&mut again)?;
        a.call(function)?;
        a.dec(ecx)?;
        a.jne(again)?;
        a.set_label(&mut function)?;
        a.ret()
    })?;
    bed.run(lab, &program.start(0), |client, gates| {
        let arg = DefaultArg {
            buf_size: 1 << 16,
            buf_flags: 0,
        };
        let context = client.create(flags, Some(DEFAULT_FORMAT), &arg.to_bytes())?;
        client.call(&context, &mut Call::WritePmcs(vec![pmc(0, RETURNS)]))?;
        client.call(&context, &mut Call::WritePmds(vec![every(5)]))?;
        let mapping = context.map_buffer()?;
        load(client, &context, 0)?;
        client.call(&context, &mut Call::Start(None))?;
        gates.open(1);
        gates.reached(2)?;
        client.call(&context, &mut Call::Stop)?;
        let entry = |number: usize| -> Result<DefaultEntry> {
            let at = DefaultHeader::SIZE + number * DefaultEntry::SIZE;
            let bytes = mapping.copy(at, DefaultEntry::SIZE).context("a sample")?;
            Ok(DefaultEntry::from_bytes(&bytes)?)
        };
        let header = mapping.copy(0, DefaultHeader::SIZE).context("a header")?;
        let count = DefaultHeader::from_bytes(&header)?.count;
        ensure!(count == 5, "{count} samples");
        for number in 0..5 {
            let entry = entry(number)?;
            ensure!(entry.ip == CALLS + CALL_BYTES, "{number}: {entry:x?}");
        }
        Ok(())
    })?;
    Ok(())
}
