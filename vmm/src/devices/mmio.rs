//! Guest-physical addresses with neither memory nor a device behind them.

/// The MMIO space. All devices of this machine that live in it (local APIC,
/// I/O APIC) are KVM's, so everything that reaches the VMM is a hole: reads are
/// all ones and writes vanish, as on a bus without a device.
#[derive(Debug, Default)]
pub struct MmioBus {
    unclaimed: u64,
}

/// How many accesses are logged before the rest is only counted: a guest must
/// not be able to fill the host's log.
const LOGGED: u64 = 16;

impl MmioBus {
    /// An empty space.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads `data.len()` bytes at guest-physical `address`.
    pub fn read(&mut self, address: u64, data: &mut [u8]) {
        self.note("read", address, data.len());
        data.fill(0xff);
    }

    /// Writes `data` at guest-physical `address`.
    pub fn write(&mut self, address: u64, data: &[u8]) {
        self.note("write", address, data.len());
    }

    /// How many accesses found nothing.
    pub fn unclaimed(&self) -> u64 {
        self.unclaimed
    }

    fn note(&mut self, verb: &str, address: u64, len: usize) {
        if self.unclaimed < LOGGED {
            log::debug!("{verb} of {len} bytes at {address:#x}: nothing is there");
        }
        self.unclaimed = self.unclaimed.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_are_all_ones_and_every_access_is_counted() {
        let mut bus = MmioBus::new();
        let mut data = [0; 8];
        bus.read(u64::MAX, &mut data);
        bus.write(0, &[]);
        assert_eq!((data, bus.unclaimed()), ([0xff; 8], 2));
    }
}
