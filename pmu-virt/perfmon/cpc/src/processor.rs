//! Numbers of processors (`cpc_getcpuver`): one for each PMU model and vocabulary of events.

use std::ffi::CString;
use std::sync::{Mutex, PoisonError};

use pmu_model::{EventFamily, PmuModel};

use super::event::MAX_PIC;

/// Numbers of models are below this; above it come the vocabularies.
const MODELS: i32 = 256;

/// What is said of a processor.
#[derive(Debug)]
pub(crate) struct Description {
    pics: usize,
    number: i32,
    /// `cpc_getcciname`.
    pub(crate) name: CString,
    /// `cpc_getcpuref`.
    pub(crate) reference: CString,
    /// `cpc_getusage`.
    pub(crate) usage: CString,
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

/// What is said of a processor with this PMU. It stays for good.
pub(crate) fn description(model: &PmuModel) -> &'static Description {
    static ALL: Mutex<Vec<&'static Description>> = Mutex::new(Vec::new());
    let (number, pics) = (number(model), pics(model));
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let known = |it: &&&Description| (it.number, it.pics) == (number, pics);
    if let Some(description) = all.iter().find(known) {
        return description;
    }
    let description = Box::leak(Box::new(describe(number, pics, model)));
    all.push(description);
    description
}

fn describe(number: i32, pics: usize, model: &PmuModel) -> Description {
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
    let counters: Vec<String> = (0..pics)
        .map(|pic| format!("[pic{pic}=]<eventspec>"))
        .collect();
    let usage = format!(
        "{} [,sys[N]] [,nouser[N]] [,edge[N]] [,noedge[N]] [,inv[N]] [,int[N]] \
         [,cmask[N]=<maskspec>] [,umask[N]=<maskspec>]",
        counters.join(" ,")
    );
    Description {
        pics,
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
            let name = description(&again).name.to_str().unwrap();
            assert!(name.contains(again.name()), "{name}");
        }
        for number in [0, -1, 255, 256, i32::MAX, i32::MIN] {
            assert!(super::model(number).is_none());
        }
    }

    #[test]
    fn usage_names_the_counters_that_there_are() {
        let usage = |spec: &str| {
            let model = PmuModel::parse(spec).unwrap();
            description(&model).usage.to_str().unwrap().to_owned()
        };
        assert!(usage("amd-core").contains("pic5="));
        assert!(!usage("intel-v2,counters=2,fixed=0").contains("pic2="));
        assert!(usage("intel-v2,counters=4,fixed=1").contains("pic4="));
    }
}
