//! The specification's shapes of programs, and what else programs in C do with
//! the library, against a VM.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use guest_tests::micro::{Lab, Test};
use perfmon_abi::wire::info::ContextState;
use pmu_virt::perfmon::MAX_CONTEXTS;
use umpire_perfmon::Client;
use vmm::micro::BackendFactory;
use vmm::sched::CorePlan;

use crate::bed::{Bed, CYCLES, Gates, RETURNS, clock, counter, eventually, load, two_hearts};
use crate::cc::{Running, library};
use crate::counting::ONE_CORE;
use crate::known::{self, CYCLE_RATE, RETURN_RATE, sim};

macro_rules! shapes {
    ($($name:ident)*) => {&[
        $(
            Test {
                name: concat!("c_programs::", stringify!($name), "_with_clock"),
                run: |lab| shape(lab, CLOCK, stringify!($name)),
            },
            Test {
                name: concat!("c_programs::", stringify!($name), "_with_sim"),
                run: |lab| shape(lab, SIM, stringify!($name)),
            },
            Test {
                name: concat!("c_programs::", stringify!($name), "_on_a_shared_core"),
                run: |lab| shape(lab, SHARED, stringify!($name)),
            },
        )*
    ]};
}

/// The programs in `pmu-virt/perfmon/client/tests/spec`; [`all_shapes_are_played`] sees to it
/// that none is missing.
const SHAPES: &[&str] = &[
    "block",
    "calls",
    "cascade",
    "counting",
    "end",
    "exec",
    "mapping",
    "no_msg",
    "ovfl_switch",
    "sampling",
    "sets",
    "several",
    "share",
    "system",
];

pub(crate) const SPECIFICATION: &[Test] = shapes! {
    block calls cascade counting end exec mapping no_msg ovfl_switch sampling sets several share
    system
};

macro_rules! checks {
    ($program:literal: $($name:ident)*) => {&[$(
        Test {
            name: concat!("c_programs::", $program, "_", stringify!($name)),
            run: |lab| on(lab, CLOCK, |bed, client, _| {
                start(bed, CLOCK, $program, &[stringify!($name)])?.join()?;
                nothing_is_left(client)
            }),
        },
    )*]};
}

/// Checks of a context's descriptor.
pub(crate) const DESCRIPTORS: &[Test] =
    checks! { "descriptor": epoll signal nonblocking passed again_and_again beside };

/// The library's own checks, which need nothing of a server that a VM does not
/// do by itself.
pub(crate) const LIBRARY: &[Test] = checks! {
    "library": no_server others_are_left_alone reuse_of_numbers reuse_of_the_connection duplicates
    passed_on stale_messages many_messages signals threads fork_in_threads many_contexts
    no_allocation
};

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "c_programs::all_shapes_are_played",
        run: |_| all_shapes_are_played(),
    },
    Test {
        name: "c_programs::counts_are_what_the_rates_say",
        run: counts,
    },
    Test {
        name: "c_programs::names_become_registers",
        run: names,
    },
    Test {
        name: "c_programs::the_last_descriptor_is_the_contexts_end",
        run: last_close,
    },
    Test {
        name: "c_programs::counts_are_read_after_the_vms_end",
        run: after_the_end,
    },
    Test {
        name: "c_programs::a_killed_program_frees_a_blocked_vcpu",
        run: killed,
    },
];

/// What counts, on which cores, and events between two overflows.
#[derive(Clone, Copy)]
pub(crate) struct Source {
    backend: BackendFactory,
    cores: Option<CorePlan>,
    /// Most contexts of a vCPU.
    contexts: usize,
    pub(crate) period: u64,
}

pub(crate) const CLOCK: Source = Source {
    backend: clock,
    cores: None,
    contexts: MAX_CONTEXTS,
    // Some 400 us of a TSC of 2.5 GHz.
    period: 1_000_000,
};
const SIM: Source = Source {
    backend: sim,
    cores: None,
    contexts: MAX_CONTEXTS,
    period: 400 * CYCLE_RATE,
};
const SHARED: Source = Source {
    cores: ONE_CORE,
    ..CLOCK
};

/// Two busy vCPUs, and `tool` beside them. No context is left when it returns.
pub(crate) fn on(
    lab: &Lab,
    source: Source,
    tool: impl FnOnce(&Bed, &Client, &Gates) -> Result<()>,
) -> Result<()> {
    on_model(lab, source, "amd-core", tool)
}

/// The same with this PMU model.
fn on_model(
    lab: &Lab,
    source: Source,
    model: &'static str,
    tool: impl FnOnce(&Bed, &Client, &Gates) -> Result<()>,
) -> Result<()> {
    // Before the guest's time begins.
    library();
    let guest = two_hearts()?;
    known::measure(lab, &guest)?;
    let mut bed = Bed::new(source.backend)?;
    bed.model = model;
    bed.cores = source.cores;
    bed.control.contexts_per_vcpu = source.contexts;
    bed.timeout = Duration::from_secs(120);
    bed.run(lab, &guest, |client, gates| {
        gates.alive(0)?;
        gates.alive(1)?;
        tool(&bed, client, gates)
    })?;
    Ok(())
}

fn start(bed: &Bed, source: Source, name: &str, arguments: &[&str]) -> Result<Running> {
    let is_sim = source.backend as usize == sim as BackendFactory as usize;
    let second = if is_sim { RETURNS } else { CYCLES };
    let environment = [
        ("UMPIRE_PERFMON", bed.socket().display().to_string()),
        ("UMPIRE_TEST_EVENT", CYCLES.to_string()),
        ("UMPIRE_TEST_EVENT2", second.to_string()),
        ("UMPIRE_TEST_PERIOD", source.period.to_string()),
        ("UMPIRE_TEST_ENDING", "0".to_owned()),
        ("UMPIRE_TEST_REAL", "1".to_owned()),
        ("UMPIRE_TEST_RATE", CYCLE_RATE.to_string()),
        ("UMPIRE_TEST_RATE2", RETURN_RATE.to_string()),
    ];
    Running::start(name, arguments, &environment)
}

pub(crate) fn contexts(client: &Client) -> Result<usize> {
    Ok(client.list()?.contexts.len())
}

fn nothing_is_left(client: &Client) -> Result<()> {
    eventually("the program's contexts are gone", || {
        Ok(contexts(client)? == 0)
    })
}

fn shape(lab: &Lab, source: Source, name: &str) -> Result<()> {
    on(lab, source, |bed, client, gates| {
        let mut program = start(bed, source, name, &[])?;
        if name == "end" {
            // vCPU 0 ends once it is observed.
            eventually("the program starts", || {
                let ended = program.has_ended()?;
                let contexts = client.list()?.contexts;
                Ok(ended || contexts.iter().any(|context| context.started))
            })?;
            gates.open(3);
            program.join()?;
            return Ok(());
        }
        let said = program.join()?;
        if name == "counting" {
            check_counts(&said, source)?;
        }
        nothing_is_left(client)
    })
}

/// What `counting` has printed: "PMD 0: 123, counted by 5".
fn check_counts(said: &str, source: Source) -> Result<()> {
    let count = |number: u32| -> Result<(u64, u64)> {
        let begins = format!("PMD {number}: ");
        let line = said.lines().find_map(|line| line.strip_prefix(&begins));
        let (count, by) = line
            .and_then(|line| line.split_once(", counted by "))
            .with_context(|| format!("no line on PMD {number}: {said}"))?;
        Ok((count.parse()?, by.parse()?))
    };
    let ((first, by), (second, _)) = (count(0)?, count(1)?);
    ensure!(first > 0 && second > 0, "{said}");
    use perfmon_abi::consts::{PFM_PROV_DERIVED, PFM_PROV_SIMULATED};
    if source.backend as usize == sim as BackendFactory as usize {
        ensure!(by == u64::from(PFM_PROV_SIMULATED), "{said}");
        let expected = first * RETURN_RATE / CYCLE_RATE;
        ensure!(second.abs_diff(expected) <= 1, "{second}, not {expected}");
    } else {
        ensure!(by == u64::from(PFM_PROV_DERIVED), "{said}");
        ensure!(first == second, "the same event, counted twice: {said}");
    }
    Ok(())
}

fn all_shapes_are_played() -> Result<()> {
    let folder = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../pmu-virt/perfmon/client/tests/spec"
    );
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|it| it == "c") {
            let name = path.file_stem().context("a name")?;
            found.push(name.to_string_lossy().into_owned());
        }
    }
    found.sort();
    ensure!(found == SHAPES, "{found:?}");
    for (name, tests) in SHAPES.iter().zip(SPECIFICATION.chunks(3)) {
        let expected = format!("c_programs::{name}_with_clock");
        ensure!(tests[0].name == expected, "{name} is not played");
    }
    Ok(())
}

fn counts(lab: &Lab) -> Result<()> {
    on(lab, SIM, |bed, _, _| {
        let said = start(bed, SIM, "known", &[])?.join()?;
        println!("{said}");
        Ok(())
    })
}

/// Cycles on AMD are for six programmable counters, on Intel for a fixed one as well, which
/// comes first.
fn names(lab: &Lab) -> Result<()> {
    for (model, event, count, first) in [
        ("amd-core", "cycles:k", "6", "PMC 0: 0x420076"),
        ("intel-v2", "cycles:k", "5", "PMC 33: 0x10"),
    ] {
        on_model(lab, SIM, model, |bed, client, _| {
            let said = start(bed, SIM, "encode", &[event, count])?.join()?;
            ensure!(said.starts_with(first), "{said}");
            nothing_is_left(client)
        })?;
    }
    Ok(())
}

/// Waits until a program has said `word`.
fn hears(program: &mut Running, word: &str) -> Result<()> {
    let until = Instant::now() + crate::bed::PATIENCE;
    while !program.said()?.contains(word) {
        if program.has_ended()? || Instant::now() > until {
            bail!("it did not say {word:?}: {}", program.said()?);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// The program names vCPU 0 by its thread, and reads on when the VM is gone.
fn after_the_end(lab: &Lab) -> Result<()> {
    library();
    let mut program = None;
    let bed = Bed::new(CLOCK.backend)?;
    bed.run(lab, &two_hearts()?, |client, gates| {
        gates.alive(0)?;
        let list = client.list()?;
        let thread = list.cores[0].tid;
        let environment = [
            ("UMPIRE_PERFMON", bed.socket().display().to_string()),
            ("UMPIRE_TEST_EVENT", CYCLES.to_string()),
            ("UMPIRE_TEST_PERIOD", u64::from(u32::MAX).to_string()),
            ("UMPIRE_TEST_THREAD", thread.to_string()),
        ];
        let running = program.insert(Running::start("after", &[], &environment)?);
        hears(running, "counting")?;
        let list = client.list()?;
        ensure!(list.contexts[0].target == Some(0), "{list:?}");
        gates.alive(0)?;
        gates.open(3);
        Ok(())
    })?;
    program.context("the program")?.join()?;
    Ok(())
}

fn last_close(lab: &Lab) -> Result<()> {
    let strict = Source {
        contexts: 1,
        ..CLOCK
    };
    on(lab, strict, |bed, client, _| {
        let mut program = start(bed, CLOCK, "descriptor", &["last_close"])?;
        hears(&mut program, "the child has it")?;
        let others = counter(client, 0, CYCLES)?;
        let list = client.list()?;
        let its = list.contexts.iter().filter(|it| it.target == Some(0));
        ensure!(its.clone().count() == 1, "{list:?}");
        ensure!(
            its.clone().all(|it| it.state != ContextState::Unloaded),
            "{list:?}"
        );
        ensure!(
            load(client, &others, 0).is_err(),
            "vCPU 0 took a second one"
        );
        program.go_on();
        eventually("the context ends", || Ok(contexts(client)? == 1))?;
        ensure!(!program.has_ended()?, "it was to be destroyed by the close");
        load(client, &others, 0)?;
        program.join()?;
        Ok(())
    })
}

fn killed(lab: &Lab) -> Result<()> {
    for source in [CLOCK, SHARED] {
        on(lab, source, |bed, client, gates| {
            let mut program = start(bed, source, "descriptor", &["held"])?;
            hears(&mut program, "the vCPU is blocked")?;
            std::thread::sleep(Duration::from_millis(20));
            let before = gates.beats(0);
            gates.alive(1)?;
            ensure!(gates.beats(0) == before, "a blocked vCPU goes on");
            program.kill()?;
            nothing_is_left(client)?;
            gates.alive(0)?;
            let next = counter(client, 0, CYCLES)?;
            load(client, &next, 0)
        })?;
    }
    Ok(())
}
