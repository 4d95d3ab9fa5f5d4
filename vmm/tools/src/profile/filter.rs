//! Which samples a report is about.

use super::record::Sample;
use crate::numbers::Numbers;

/// Which samples a report is about.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Those of these vCPUs; none for all.
    pub vcpus: Option<Numbers>,
    /// Those taken on these cores; none for all.
    pub cores: Option<Numbers>,
    /// Those of this event, by its number; none for all.
    pub event: Option<u16>,
}

impl Filter {
    /// `sample` is among them.
    #[must_use]
    pub fn takes(&self, sample: &Sample) -> bool {
        let of = |list: &Option<Numbers>, number| list.as_ref().is_none_or(|all| all.has(number));
        let event = self.event.is_none_or(|event| event == sample.event);
        event && of(&self.vcpus, sample.vcpu) && of(&self.cores, sample.core)
    }

    /// It leaves vCPUs or cores out.
    #[must_use]
    pub fn is_part(&self) -> bool {
        self.vcpus.is_some() || self.cores.is_some()
    }
}
