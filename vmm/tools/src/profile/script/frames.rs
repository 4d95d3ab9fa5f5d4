//! The lines of a sample's chain, and what is at each.

use std::borrow::Cow;

use perfmon_abi::compact::ChainEnd;
use serde::Serialize;

use crate::profile::location::CodeLocation;
use crate::profile::names::Names;
use crate::profile::record::Sample;

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct SymbolOf<'a> {
    /// Null for an address that no symbol covers.
    pub(super) symbol: Option<Cow<'a, str>>,
    /// Bytes from the symbol's begin.
    pub(super) symbol_offset: Option<u64>,
    /// Module of the guest's kernel that has the symbol; null for the kernel itself.
    pub(super) module: Option<&'a str>,
}

/// A line of a chain.
#[derive(Clone, Copy, Debug)]
pub(super) struct FrameAt {
    pub(super) location: CodeLocation,
    pub(super) address: u64,
    pub(super) mapping: u64,
}

impl FrameAt {
    /// Where the sample was taken, and its callers.
    pub(super) fn of(sample: &Sample, names: &Names) -> Vec<Self> {
        let mut frames = vec![FrameAt {
            location: CodeLocation::of(sample, names),
            address: sample.ip,
            mapping: sample.guest.mapping,
        }];
        let chain = &sample.guest.chain;
        let missing = |end: Option<ChainEnd>| match end? {
            end @ (ChainEnd::Depth | ChainEnd::Broken | ChainEnd::NoProgram) => Some(FrameAt {
                location: CodeLocation::Missing(end),
                address: 0,
                mapping: 0,
            }),
            ChainEnd::Outermost | ChainEnd::Entry => None,
        };
        // The first frame is the sample's own.
        let own = usize::from(chain.kernel_end.is_none());
        frames.extend(chain.kernel.iter().skip(1).map(|&address| FrameAt {
            location: CodeLocation::kernel(address, names),
            address,
            mapping: 0,
        }));
        frames.extend(missing(chain.kernel_end));
        frames.extend(chain.program.iter().skip(own).map(|frame| FrameAt {
            location: CodeLocation::program(sample, frame.address, frame.mapping, names),
            address: frame.address,
            mapping: frame.mapping,
        }));
        frames.extend(missing(chain.program_end));
        frames
    }

    pub(super) fn symbol(self, names: &Names) -> SymbolOf<'_> {
        match self.location {
            CodeLocation::Symbol(index) => SymbolOf {
                symbol: Some(names.kernel.name(index).into()),
                symbol_offset: names.kernel.find(self.address).map(|found| found.offset),
                module: names.kernel.module(index),
            },
            CodeLocation::Program(file, _) => {
                let found = names.found(file, self.mapping, self.address);
                let found = found.map(|found| (file, found));
                SymbolOf {
                    symbol: found
                        .map(|(file, found)| names.program_symbol(file, found.index).into()),
                    symbol_offset: found.map(|(_, found)| found.offset),
                    module: None,
                }
            }
            _ => SymbolOf {
                symbol: None,
                symbol_offset: None,
                module: None,
            },
        }
    }
}
