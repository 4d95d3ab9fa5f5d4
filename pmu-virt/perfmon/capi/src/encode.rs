//! From an event's name to the PMCs that have a counter count it (`pfm_event_encode`).

use perfmon::LogicalPmu;
use perfmon::registers::program;
use perfmon_abi::wire::info::ModelInfo;
use perfmon_abi::wire::{Errno, Extension, Subcode};
use perfmon_abi::{PmcArg, Record};
use pmu_model::CounterId;
use umpire_events::{EventError, LibraryError, NoTables, resolve};

use crate::failure::{Failure, because, failure};
use crate::state::STATE;
use crate::sys::memory::User;

/// Writes what counts `event` into `room` elements, the best first, and says how many PMCs
/// there are for it. A fixed counter is better: it can count nothing else.
pub(crate) fn encode(event: &str, pmcs: User, room: i32) -> Result<i32, Failure> {
    let room = usize::try_from(room)
        .map_err(|_| failure(Errno::EFAULT, "the number of elements is negative"))?;
    let info: ModelInfo = STATE.with(|state| {
        state.ensure_link()?;
        state.document(Extension::Model)
    })?;
    let pmu = LogicalPmu::served(&info).map_err(|model| {
        let reason = format!("the VM has a PMU that this library does not know: {model}");
        failure(Errno::EOPNOTSUPP, &reason)
    })?;
    let found = candidates(event, &info, &pmu)?;
    for (index, pmc) in found.iter().take(room).enumerate() {
        pmcs.write(index * PmcArg::SIZE, &pmc.to_bytes())
            .map_err(|_| failure(Errno::EFAULT, "the PMCs cannot be written to"))?;
    }
    Ok(i32::try_from(found.len()).unwrap_or(i32::MAX))
}

fn candidates(event: &str, info: &ModelInfo, pmu: &LogicalPmu) -> Result<Vec<PmcArg>, Failure> {
    if let Some(quantity) = info.virtual_pmds.iter().find(|it| it.name == event) {
        let reason = format!("'{event}' is PMD {}, which needs no PMC", quantity.pmd);
        return Err(because(Errno::EINVAL, Subcode::PicNotCapable, &reason));
    }
    let named = resolve(event, pmu.model(), &NoTables(LibraryError::TooLate));
    let named = match named {
        // libpfm4 is big, and wants a variable in the environment: only who needs it gets it.
        Err(EventError::NoTables { .. }) => resolve(event, pmu.model(), &*umpire_events::names()),
        other => other,
    };
    let named =
        named.map_err(|error| because(Errno::EINVAL, subcode(&error), &error.to_string()))?;
    let mut found: Vec<_> = pmu
        .pmcs()
        .iter()
        .filter_map(|pmc| program(pmu, pmc.counter, &named.request))
        .collect();
    found.sort_by_key(|(pmc, _)| matches!(pmc.counter, CounterId::Programmable(_)));
    if found.is_empty() {
        let reason = format!("no counter of the VM's PMU counts '{event}'");
        return Err(because(Errno::EINVAL, Subcode::PicNotCapable, &reason));
    }
    let pmc = |(pmc, value): (&perfmon::PmcDescription, u64)| PmcArg {
        num: pmc.num,
        value,
        ..PmcArg::default()
    };
    Ok(found.into_iter().map(pmc).collect())
}

/// Whether the event or what is added to it was wrong.
fn subcode(error: &EventError) -> Subcode {
    match error {
        EventError::Attribute { .. }
        | EventError::AttributeSet { .. }
        | EventError::NeedsUnitMask { .. }
        | EventError::Modifier { .. }
        | EventError::PlainAttribute { .. }
        | EventError::NoSuchBits { .. }
        | EventError::FixedModifier { .. } => Subcode::InvalidAttribute,
        _ => Subcode::InvalidEvent,
    }
}
