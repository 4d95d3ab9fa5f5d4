//! How a machine's vCPUs are spread over cores.

use std::time::Duration;

use super::cpulist::CpuList;
use crate::sys::pin_this_thread;
use crate::vcpu::VcpuFailure;

/// `--cores` and `--slice`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CorePlan {
    /// Number of cores, at least 1.
    pub cores: u8,
    /// For how long a vCPU runs while others wait for its core.
    pub slice: Duration,
}

impl CorePlan {
    /// Gives each core its vCPUs, in turn.
    #[must_use]
    pub fn deal<T>(&self, vcpus: Vec<T>) -> Vec<Vec<T>> {
        let cores = usize::from(self.cores.max(1));
        let mut hands: Vec<Vec<T>> = (0..cores).map(|_| Vec::new()).collect();
        for (index, vcpu) in vcpus.into_iter().enumerate() {
            hands[index % cores].push(vcpu);
        }
        hands
    }
}

/// Keeps the calling thread, number `index` of those that run vCPUs, on its host
/// CPU, if there is a list of them.
///
/// # Errors
/// [`VcpuFailure::Pin`].
pub fn pin(pinned: Option<&CpuList>, index: usize) -> Result<(), VcpuFailure> {
    match pinned.and_then(|list| list.of(index)) {
        Some(cpu) => pin_this_thread(cpu).map_err(|error| VcpuFailure::Pin { cpu, error }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vcpus_are_dealt_in_turn() {
        let plan = |cores| CorePlan {
            cores,
            slice: Duration::from_millis(5),
        };
        assert_eq!(plan(2).deal(vec![0, 1, 2]), [vec![0, 2], vec![1]]);
        assert_eq!(plan(3).deal(vec![0]), [vec![0], vec![], vec![]]);
    }
}
