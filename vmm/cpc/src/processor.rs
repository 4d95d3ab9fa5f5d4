//! Numbers of processors (`cpc_getcpuver`): one for each PMU model and vocabulary of events.

use std::ffi::{CStr, CString};
use std::sync::OnceLock;

use pmu_model::{EventFamily, PmuModel};

use super::event::MAX_PIC;

/// Numbers of models are below this; above it come the vocabularies.
const MODELS: i32 = 256;

/// A processor that the library knows.
#[derive(Debug)]
struct Known {
    number: i32,
    name: CString,
    reference: CString,
    usage: CString,
}

/// The number of a processor with this PMU.
pub(crate) fn number(model: &PmuModel) -> i32 {
    let mut names = (1..).zip(PmuModel::names());
    let base = names.find(|(_, summary)| summary.name == model.name());
    let base = base.map_or(0, |(number, _)| number);
    if model.has_usual_events() {
        return base;
    }
    let mut families = (1..).zip(EventFamily::ALL);
    let family = families.find(|(_, family)| *family == model.events());
    base + MODELS * family.map_or(0, |(number, _)| number)
}

/// The PMU of the processor with this number.
pub(crate) fn model(number: i32) -> Option<PmuModel> {
    let at = |index: i32| usize::try_from(index - 1).ok();
    let name = PmuModel::names().get(at(number % MODELS)?)?.name;
    let model = PmuModel::parse(name).ok()?;
    match number / MODELS {
        0 => Some(model),
        family => model.with_events(*EventFamily::ALL.get(at(family)?)?),
    }
}

/// How many values of `ce_pic` it has.
pub(crate) fn pics(model: &PmuModel) -> usize {
    let fixed = model.fixed_map().count_ones() as usize;
    (usize::from(model.programmable()) + fixed).min(MAX_PIC)
}

fn known(number: i32) -> Option<&'static Known> {
    static ALL: OnceLock<Vec<Known>> = OnceLock::new();
    let all = ALL.get_or_init(|| {
        let families = i32::try_from(EventFamily::ALL.len()).unwrap_or(0);
        let numbers =
            (0..=families).flat_map(|family| (1..MODELS).map(move |n| family * MODELS + n));
        let named = |number| Some((number, model(number)?));
        numbers.filter_map(named).map(describe).collect()
    });
    all.iter().find(|known| known.number == number)
}

fn describe((number, model): (i32, PmuModel)) -> Known {
    let text = |text: String| CString::new(text).unwrap_or_default();
    let mut summaries = PmuModel::names().iter();
    let summary = summaries.find(|summary| summary.name == model.name());
    let events = if model.has_usual_events() {
        String::new()
    } else {
        format!(", events of {}", model.events().name())
    };
    let reference = match model.vendor() {
        pmu_model::Vendor::Intel => {
            "Intel 64 and IA-32 Architectures Software Developer's Manual, volume 3B, \
             \"Performance Monitoring\", and https://perfmon-events.intel.com"
        }
        pmu_model::Vendor::Amd => {
            "AMD64 Architecture Programmer's Manual, volume 2, \"Performance Monitoring \
             Counters\", and the Processor Programming Reference of the processor"
        }
    };
    let pics: Vec<String> = (0..pics(&model))
        .map(|pic| format!("[pic{pic}=]<eventspec>"))
        .collect();
    let usage = format!(
        "{} [,sys[N]] [,nouser[N]] [,edge[N]] [,noedge[N]] [,inv[N]] [,int[N]] \
         [,cmask[N]=<maskspec>] [,umask[N]=<maskspec>]",
        pics.join(" ,")
    );
    Known {
        number,
        name: text(format!(
            "{}{events}: {}",
            model.name(),
            summary.map_or("", |summary| summary.summary)
        )),
        reference: text(reference.to_owned()),
        usage: text(usage),
    }
}

/// `cpc_getcciname`.
pub(crate) fn name(number: i32) -> Option<&'static CStr> {
    Some(&known(number)?.name)
}

/// `cpc_getcpuref`.
pub(crate) fn reference(number: i32) -> Option<&'static CStr> {
    Some(&known(number)?.reference)
}

/// `cpc_getusage`.
pub(crate) fn usage(number: i32) -> Option<&'static CStr> {
    Some(&known(number)?.usage)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_model_has_a_number_of_its_own() {
        let names = PmuModel::names().iter().map(|summary| summary.name);
        let others = ["intel-v4,events=skylake", "intel-v5,events=ice-lake"];
        let mut numbers = Vec::new();
        for spec in names.chain(others) {
            let model = PmuModel::parse(spec).unwrap();
            let number = number(&model);
            assert!(number > 0 && !numbers.contains(&number), "{spec}: {number}");
            numbers.push(number);
            let again = super::model(number).unwrap();
            assert_eq!(again.name(), model.name());
            assert_eq!(again.events(), model.events());
            assert!(
                name(number)
                    .unwrap()
                    .to_str()
                    .unwrap()
                    .contains(again.name())
            );
            assert!(reference(number).is_some() && usage(number).is_some());
        }
        for number in [0, -1, 255, 256, i32::MAX, i32::MIN] {
            assert!(super::model(number).is_none() && name(number).is_none());
        }
    }
}
