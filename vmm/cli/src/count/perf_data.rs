//! Who called whom as a file of perf's, by the writer of `umpire report --perf-data`.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter};

use attribution::{Context, Contexts, Counts, PartEnd};
use perfmon_abi::compact::{CallChain, ChainEnd, GuestPlace, ProgramFrame};
use perfmon_abi::wire::programs::{Described, MappingInfo, TaskInfo};
use pmu_virt::Provenance;
use umpire_tools::profile::names::Names;
use umpire_tools::profile::perf_data::{PerfData, PerfSurvey};
use umpire_tools::profile::programs::Programs;
use umpire_tools::profile::symbols::SymbolTable;
use umpire_tools::profile::{Filter, Header, Record, Ring, Sample, SampledEvent, Sampling, Sink};

/// The numbers of what samples refer to: of threads, by program and place in it, and of what is
/// mapped, by program and object.
#[derive(Default)]
struct Numbers<'a> {
    tasks: HashMap<(usize, usize), u64>,
    mappings: HashMap<(usize, &'a str), (u64, u64)>,
}

/// Writes a sample for each function and the calls that led to it, whose period is what it executed
/// itself there. It is at the beginning of the function, and so is each caller; it has no time.
pub(super) fn write(counts: &Counts, title: &str, file: &mut File) -> io::Result<()> {
    let mut programs = Programs::default();
    let none = Contexts::default();
    let contexts = counts.contexts.as_ref().unwrap_or(&none);
    let numbers = described(counts, contexts, &mut programs);
    let names = Names::new(SymbolTable::default(), programs, None);
    let header = Header {
        umpire: env!("CARGO_PKG_VERSION").to_owned(),
        vm_name: "umpire count".to_owned(),
        vcpus: 1,
        cores: 1,
        command: vec![title.to_owned()],
        virtual_time: true,
        events: vec![SampledEvent {
            name: "instructions:u".to_owned(),
            sampling: Sampling::Period(1),
            provenance: Some(Provenance::Exact),
        }],
        ..Header::default()
    };
    let filter = Filter::default();
    let mut survey = PerfSurvey::new(&filter, &names);
    each(counts, contexts, &numbers, &mut survey)?;
    let mut data = PerfData::new(&survey, &header, BufWriter::new(file))?;
    each(counts, contexts, &numbers, &mut data)?;
    data.finish()
}

/// Describes threads, and the files that programs had mapped.
fn described<'a>(counts: &Counts, contexts: &'a Contexts, programs: &mut Programs) -> Numbers<'a> {
    let mut numbers = Numbers::default();
    let mut number = 0;
    for (of, program) in counts.programs.iter().enumerate() {
        let first = program.threads.first();
        for (place, thread) in program.threads.iter().enumerate() {
            number += 1;
            numbers.tasks.insert((of, place), number);
            programs.add(Described::Task(TaskInfo {
                number,
                pid: program.pid,
                tid: thread.tid,
                comm: thread.comm.clone(),
                process: first.map_or_else(String::new, |first| first.comm.clone()),
                ..TaskInfo::default()
            }));
        }
    }
    for mapped in &contexts.mapped {
        number += 1;
        let base = mapped.start.wrapping_sub(mapped.offset);
        let key = (mapped.program, mapped.object.as_str());
        numbers.mappings.insert(key, (number, base));
        programs.add(Described::Mapping(MappingInfo {
            number,
            start: mapped.start,
            end: mapped.end,
            offset: mapped.offset,
            name: mapped.object.clone(),
            build_id: mapped.build_id.clone(),
            ..MappingInfo::default()
        }));
    }
    numbers
}

/// Tells `sink` of all samples.
fn each(
    counts: &Counts,
    contexts: &Contexts,
    numbers: &Numbers<'_>,
    sink: &mut dyn Sink,
) -> io::Result<()> {
    for node in contexts.nodes.iter().filter(|node| node.own > 0) {
        let Some(root) = contexts.roots.get(node.root) else {
            continue;
        };
        let part = contexts.parts.get(root.part);
        let Some(part) = part.filter(|part| part.end != PartEnd::Dropped) else {
            continue;
        };
        let callers = std::iter::successors(Some(node), |at| contexts.nodes.get(at.caller?));
        let frame = |node: &Context| at(counts, numbers, (part.program, node));
        let frames: Vec<ProgramFrame> = callers.map(frame).collect();
        let first = frames.first().cloned().unwrap_or_default();
        let task = numbers.tasks.get(&(part.program, root.thread));
        let sample = Sample {
            ip: first.address,
            period: node.own,
            ring: Some(Ring::User),
            guest: GuestPlace {
                task: task.copied().unwrap_or(0),
                mapping: first.mapping,
                chain: CallChain {
                    program: frames,
                    program_end: Some(ChainEnd::Outermost),
                    ..CallChain::default()
                },
                ..GuestPlace::default()
            },
            ..Sample::default()
        };
        sink.take(&Record::Sample(sample))?;
    }
    Ok(())
}

/// Where a program has a function; 0 where that is not known.
fn at(counts: &Counts, numbers: &Numbers<'_>, (program, node): (usize, &Context)) -> ProgramFrame {
    let function = counts
        .functions
        .as_ref()
        .and_then(|all| all.get(node.function));
    let mapping = function.and_then(|function| {
        let key = (program, function.object.as_str());
        numbers.mappings.get(&key)
    });
    mapping.map_or_else(ProgramFrame::default, |(mapping, base)| ProgramFrame {
        address: base.wrapping_add(node.offset),
        mapping: *mapping,
    })
}
