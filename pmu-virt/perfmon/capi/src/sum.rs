//! Sums over contexts, of all vCPUs of a VM for instance (`pfm_read_pmds_sum`).

use perfmon_abi::consts::{PFM_READ_PMDS, PFM_REG_RETFL_PROV_SHIFT};
use perfmon_abi::wire::{Call, Errno, MAX_PAYLOAD};
use perfmon_abi::{PmdArg, Record};
use umpire_perfmon::Count;

use crate::calls;
use crate::failure::{Failure, failure, malformed};
use crate::sys::memory::User;

fn bad_address() -> Failure {
    failure(Errno::EFAULT, "an address is not valid")
}

/// Reads the PMDs in `nargs` elements of each of so many contexts, and writes their sums. If it
/// fails, the elements are as they were.
pub(crate) fn read(fds: User, contexts: i32, pmds: User, nargs: i32) -> Result<(), Failure> {
    let contexts = usize::try_from(contexts).ok().filter(|&count| count > 0);
    let contexts = contexts.ok_or_else(|| failure(Errno::EFAULT, "there is no context"))?;
    let mut asked = vec![0; Call::argument_bytes(PFM_READ_PMDS, nargs, MAX_PAYLOAD)?];
    pmds.read(0, &mut asked).map_err(|_| bad_address())?;
    let mut sums: Vec<PmdArg> = Vec::new();
    for index in 0..contexts {
        let mut fd = 0_i32.to_ne_bytes();
        fds.read(index * fd.len(), &mut fd)
            .map_err(|_| bad_address())?;
        let mut answer = asked.clone();
        let own = User::new(answer.as_mut_ptr().cast());
        calls::command(i32::from_ne_bytes(fd), PFM_READ_PMDS.into(), own, nargs)?;
        let read = PmdArg::vector_from_bytes(&answer).map_err(|_| malformed())?;
        if sums.is_empty() {
            sums = read;
            continue;
        }
        for (sum, more) in sums.iter_mut().zip(&read) {
            let count = Count::of(sum).and(Count::of(more));
            sum.value = count.value;
            sum.flags = count.provenance << PFM_REG_RETFL_PROV_SHIFT;
        }
    }
    pmds.write(0, &PmdArg::vector_to_bytes(&sums))
        .map_err(|_| bad_address())
}
