//! Who may reserve counters, and how layers come by each other's.

use core::fmt;

/// How the layers of a machine arbitrate among themselves: the three schemes of
/// the paper's section II.C. `docs/arbitration.md` describes what each does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// The hypervisor manages every counter for the life of the machine, and
    /// all layers ask it.
    SingleMaster,
    /// Each layer reserves for itself, and first come is first served.
    #[default]
    Independent,
    /// As independent, and a layer that is short has the others asked.
    Interacting,
}

impl Scheme {
    /// All schemes, in declaration order.
    pub const ALL: [Scheme; 3] = [
        Scheme::SingleMaster,
        Scheme::Independent,
        Scheme::Interacting,
    ];

    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            Scheme::SingleMaster => "single",
            Scheme::Independent => "independent",
            Scheme::Interacting => "interacting",
        }
    }

    /// The scheme that goes by this word.
    pub fn named(name: &str) -> Option<Scheme> {
        Self::ALL.into_iter().find(|scheme| scheme.name() == name)
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
