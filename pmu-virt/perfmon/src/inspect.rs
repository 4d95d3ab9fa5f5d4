//! PFM_GETINFO_PMCS and PFM_GETINFO_PMDS.

use perfmon_abi::consts::{PFM_REG_RETFL_EINVAL, PFM_REG_RETFL_MASK};
use perfmon_abi::wire::Refusal;
use perfmon_abi::{PmcInfo, PmdInfo};

use super::context::{Bad, UNKNOWN};
use super::description::{LogicalPmu, PmdKind};

impl LogicalPmu {
    /// Tells what PMCs are (3.1.13). Their interrupt bit counts as reserved, with
    /// 1 as its default: an overflow has to interrupt, whatever is written.
    ///
    /// # Errors
    /// EINVAL: there is no such PMC, or `reg_flags` is not 0 apart from return
    /// flags; the element has PFM_REG_RETFL_EINVAL, those before it are done.
    pub fn getinfo_pmcs(&self, vector: &mut [PmcInfo]) -> Result<(), Refusal> {
        for info in vector {
            info.flags &= !PFM_REG_RETFL_MASK;
            let name = format!("PMC{}", info.num);
            let pmc = checked(self.pmc(info.num), info.flags, &name)
                .map_err(|bad| bad.mark(&mut info.flags))?;
            *info = PmcInfo {
                num: pmc.num,
                kind: pmc.kind,
                flags: 0,
                def_value: pmc.accept(pmc.default),
                rsvd_mask: pmc.reserved | pmc.forced,
                index: pmc.index,
            };
        }
        Ok(())
    }

    /// Tells what PMDs are (3.1.14). A counter starts at 0 and has no reserved
    /// bits, as its 64 bits are emulated. Of a sampler only the count can be written, and
    /// what describes a sample is reserved as a whole. So is a virtual PMD,
    /// and all ones, which stands for an unknown value, before a context with it
    /// is attached.
    ///
    /// # Errors
    /// As [`LogicalPmu::getinfo_pmcs`].
    pub fn getinfo_pmds(&self, vector: &mut [PmdInfo]) -> Result<(), Refusal> {
        for info in vector {
            info.flags &= !PFM_REG_RETFL_MASK;
            let name = format!("PMD{}", info.num);
            let pmd = checked(self.pmd(info.num), info.flags, &name)
                .map_err(|bad| bad.mark(&mut info.flags))?;
            let (def_value, rsvd_mask) = match pmd.what {
                PmdKind::Counter { .. } => (0, 0),
                PmdKind::Sampler { count, .. } => (0, !count),
                PmdKind::Sample { .. } => (0, u64::MAX),
                PmdKind::Virtual(_) => (UNKNOWN, u64::MAX),
            };
            *info = PmdInfo {
                num: pmd.num,
                kind: pmd.kind,
                flags: 0,
                def_value,
                rsvd_mask,
                index: pmd.index,
            };
        }
        Ok(())
    }
}

/// The register that an element asks about.
fn checked<'a, T>(found: Option<&'a T>, flags: u32, name: &str) -> Result<&'a T, Bad> {
    if flags != 0 {
        let reason = format!("{name}: reg_flags {flags:#x} are none of this command's");
        return Err(Bad::new(PFM_REG_RETFL_EINVAL, reason));
    }
    let missing = || Bad::new(PFM_REG_RETFL_EINVAL, format!("this PMU has no {name}"));
    found.ok_or_else(missing)
}
