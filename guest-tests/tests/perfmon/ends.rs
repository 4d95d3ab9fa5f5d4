//! Ends: of the guest, of a tool, of a context.

use std::os::fd::AsFd;
use std::process::{Command, Stdio};

use anyhow::{Result, bail, ensure};
use guest_tests::micro::{Lab, Test};
use perfmon_abi::consts::{PFM_FL_SYSTEM_WIDE, PFM_MSG_END};
use perfmon_abi::wire::info::{ContextState, Holder};
use pmu_virt::perfmon::VirtualPmd;
use umpire_perfmon::{Call, Client};
use vmm::sched::CorePlan;

use crate::bed::{Bed, RETURNS, clock, counter, eventually, guest, load, read, step};
use crate::counting::{ONE_CORE, calls};
use crate::sampling::message;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "ends::a_tool_hears_of_the_guests_end_and_reads_on",
        run: |lab| end_of_guest(lab, 0, None),
    },
    Test {
        name: "ends::so_does_that_of_a_core",
        run: |lab| end_of_guest(lab, PFM_FL_SYSTEM_WIDE, None),
    },
    Test {
        name: "ends::so_does_that_of_a_vcpu_on_a_shared_core",
        run: |lab| end_of_guest(lab, 0, ONE_CORE),
    },
    Test {
        name: "ends::so_does_that_of_a_shared_core",
        run: |lab| end_of_guest(lab, PFM_FL_SYSTEM_WIDE, ONE_CORE),
    },
    Test {
        name: "ends::a_killed_tool_leaves_nothing_behind",
        run: killed,
    },
    Test {
        name: "ends::who_holds_what_is_told",
        run: told,
    },
];

fn end_of_guest(lab: &Lab, flags: u32, cores: Option<CorePlan>) -> Result<()> {
    let mut bed = Bed::new(step)?;
    bed.cores = cores;
    bed.run(lab, &guest(|a| calls(a, 9))?, |client, gates| {
        let context = counter(client, flags, RETURNS)?;
        load(client, &context, 0)?;
        client.call(&context, &mut Call::Start(None))?;
        gates.open(3);
        let end = message(&context)?;
        ensure!(end.kind == PFM_MSG_END && end.generation == 1, "{end:?}");
        let last = read(client, &context, 0)?;
        ensure!(last.value == 9, "{last:?}");
        let exits = read(client, &context, VirtualPmd::Exits.pmd())?;
        ensure!(exits.value > 0 && exits.value != u64::MAX, "{exits:?}");
        let list = client.list()?;
        ensure!(list.contexts[0].state == ContextState::Unloaded, "{list:?}");
        // The VM goes, and its counts stay.
        eventually("the VM is gone", || Ok(client.hello().is_err()))?;
        let kept = [0, VirtualPmd::Exits.pmd()].map(|num| read(client, &context, num));
        let [Ok(kept), Ok(kept_exits)] = kept else {
            bail!("{kept:?}");
        };
        ensure!(kept == last && kept_exits == exits, "{kept:?}");
        Ok(())
    })?;
    Ok(())
}

/// A child has the only descriptor of a loaded context, and is killed.
fn killed(lab: &Lab) -> Result<()> {
    let mut bed = Bed::new(clock)?;
    bed.control.contexts_per_vcpu = 1;
    bed.run(lab, &guest(|_| Ok(()))?, |client, gates| {
        let context = counter(client, 0, crate::bed::CYCLES)?;
        load(client, &context, 0)?;
        client.call(&context, &mut Call::Start(None))?;
        let copy = context.as_fd().try_clone_to_owned()?;
        drop(context);
        let mut child = Command::new("sleep")
            .arg("1000")
            .stdin(Stdio::from(copy))
            .spawn()?;
        let others = counter(client, 0, crate::bed::CYCLES)?;
        let refused = load(client, &others, 0);
        child.kill()?;
        child.wait()?;
        ensure!(refused.is_err(), "a vCPU took a second context");
        eventually("the context is destroyed", || Ok(contexts(client)? == 1))?;
        load(client, &others, 0)?;
        gates.open(3);
        Ok(())
    })?;
    Ok(())
}

fn contexts(client: &Client) -> Result<usize> {
    Ok(client.list()?.contexts.len())
}

fn told(lab: &Lab) -> Result<()> {
    let bed = Bed::new(clock)?;
    bed.run(lab, &guest(|_| Ok(()))?, |client, _| {
        let context = counter(client, 0, crate::bed::CYCLES)?;
        load(client, &context, 0)?;
        client.call(&context, &mut Call::Start(None))?;
        let list = client.list()?;
        ensure!(
            list.pid == std::process::id() && list.vcpus.len() == 1,
            "{list:?}"
        );
        ensure!(
            list.vcpus[0].context == Some(list.contexts[0].id),
            "{list:?}"
        );
        ensure!(list.contexts[0].started, "{list:?}");
        let holds = Holder::Context(list.contexts[0].id);
        let mut counters = list.cores[0].counters.iter();
        ensure!(counters.any(|counter| counter.holder == holds), "{list:?}");
        let model = client.model()?;
        ensure!(
            model.model == "amd-core" && model.counters == "clock",
            "{model:?}"
        );
        let formats = client.formats()?;
        ensure!(formats.len() >= 3, "{formats:?}");
        Ok(())
    })?;
    Ok(())
}
