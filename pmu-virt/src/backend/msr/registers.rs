//! The registers of one CPU's counters: looked at, saved, taken, given back.

use std::io;

use pmu_model::{MsrIndex, Vendor};

use super::error::{MsrRefusal, errno};
use super::events::MERGE;
use super::layout::{HostCpuid, Layout};
use super::slot::Control;
use super::{MsrDevice, MsrOptions};

/// Enable bit of an event select.
pub(super) const ENABLE: u64 = 1 << 22;
/// `IA32_PERF_CAPABILITIES`, and its bit for full-width counter writes.
const CAPABILITIES: MsrIndex = MsrIndex(0x345);
const FULL_WIDTH: u64 = 1 << 13;
/// OS and USR of every field of `IA32_FIXED_CTR_CTRL`.
const FIXED_ENABLES: u64 = 0x3333_3333_3333_3333;
/// A count that no idle counter is likely to have, valid in every write form.
const PATTERN: u64 = 0x1234_5678;

/// The registers, from when they are taken until they are given back.
#[derive(Debug)]
pub(super) struct PmuMsrs {
    device: Box<dyn MsrDevice>,
    layout: Layout,
    saved: Vec<(MsrIndex, u64)>,
    /// Registers that somebody else uses by now: not ours to restore.
    foreign: Vec<MsrIndex>,
}

impl PmuMsrs {
    /// Finds the counters and takes them, stopped and with count 0.
    pub(super) fn take(
        device: Box<dyn MsrDevice>,
        cpuid: &HostCpuid,
        options: MsrOptions,
        watchdog: bool,
    ) -> Result<Self, MsrRefusal> {
        let (layout, saved) = look(device.as_ref(), cpuid)?;
        if !options.force {
            check_unused(&layout, &saved, watchdog)?;
        }
        // From here on dropping it restores everything.
        let mut registers = PmuMsrs {
            device,
            layout,
            saved,
            foreign: Vec::new(),
        };
        registers.clear()?;
        Ok(registers)
    }

    fn clear(&mut self) -> Result<(), MsrRefusal> {
        let mut all = self.layout.all();
        all.reverse();
        for msr in all {
            let refuse = |error| MsrRefusal::Write {
                msr,
                errno: errno(&error),
            };
            self.device.write(msr, 0).map_err(refuse)?;
        }
        // A hypervisor may take every write and drop it.
        for counter in &self.layout.counters {
            let msr = counter.value;
            let write = |error| MsrRefusal::Write {
                msr,
                errno: errno(&error),
            };
            let read = |error| MsrRefusal::Read {
                msr,
                errno: errno(&error),
            };
            self.device.write(msr, PATTERN).map_err(write)?;
            if self.device.read(msr).map_err(read)? != PATTERN {
                return Err(MsrRefusal::Dropped { msr });
            }
            self.device.write(msr, 0).map_err(write)?;
        }
        Ok(())
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Writes a counter's control, stopped. EBUSY: it counts for somebody, and nobody
    /// `forces` it.
    pub(super) fn set_control(&mut self, control: &Control, forces: bool) -> io::Result<()> {
        let busy = || io::Error::from_raw_os_error(libc::EBUSY);
        match *control {
            Control::Select {
                msr,
                outside,
                merge,
                ..
            } => {
                let merge = merge.map(|msr| (msr, MERGE | outside & ENABLE));
                for (msr, value) in [(msr, outside)].into_iter().chain(merge) {
                    if !forces && self.device.read(msr)? & ENABLE != 0 {
                        self.disown(msr);
                        return Err(busy());
                    }
                    self.write(msr, value)?;
                }
                Ok(())
            }
            Control::Fixed { field, bits } => {
                let msr = self.layout.fixed_control.ok_or_else(busy)?;
                let value = self.device.read(msr)?;
                if !forces && value & field != 0 {
                    return Err(busy());
                }
                self.write(msr, value & !field | bits)
            }
        }
    }

    /// Clears a counter's control as far as it is ours.
    pub(super) fn clear_control(&mut self, control: &Control) {
        match *control {
            Control::Select {
                msr,
                outside,
                inside,
                merge,
            } => {
                // One of the two holds; a register that is neither is left alone.
                let outside_now = self.holds(msr, outside);
                self.replace(msr, if outside_now { outside } else { inside }, 0);
                if let Some(msr) = merge {
                    self.replace(msr, MERGE | outside & ENABLE, 0);
                }
            }
            Control::Fixed { field, bits } => {
                let Some(msr) = self.layout.fixed_control else {
                    return;
                };
                match self.device.read(msr) {
                    Ok(value) if value & field == bits => {
                        self.replace(msr, value, value & !field);
                    }
                    _ => self.disown(msr),
                }
            }
        }
    }

    /// Starts or stops a counter by its own select, where there is no global control.
    /// False: it is somebody else's.
    pub(super) fn switch(&mut self, control: &Control, on: bool) -> bool {
        let Control::Select {
            msr,
            outside,
            inside,
            merge,
        } = *control
        else {
            return true;
        };
        let (from, to) = if on {
            (outside, inside)
        } else {
            (inside, outside)
        };
        let merged = merge.is_none_or(|msr| {
            let enable = |value| MERGE | value & ENABLE;
            self.replace(msr, enable(from), enable(to))
        });
        self.replace(msr, from, to) && merged
    }

    /// What a counter's register holds, if its control is still ours.
    pub(super) fn count(&self, control: &Control, register: MsrIndex) -> Option<u64> {
        let ours = match *control {
            Control::Select {
                msr,
                outside,
                inside,
                merge,
            } => {
                let value = self.device.read(msr).ok()?;
                let merged = |msr| self.holds(msr, MERGE | value & ENABLE);
                (value == outside || value == inside) && merge.is_none_or(merged)
            }
            Control::Fixed { field, bits } => {
                let msr = self.layout.fixed_control?;
                self.device.read(msr).ok()? & field == bits
            }
        };
        if !ours {
            return None;
        }
        self.device.read(register).ok()
    }

    pub(super) fn write(&mut self, msr: MsrIndex, value: u64) -> io::Result<()> {
        self.device.write(msr, value)
    }

    /// Writes `value` if the register still holds `expected`; false if it
    /// does not, or cannot be accessed. Then it is somebody else's.
    pub(super) fn replace(&mut self, msr: MsrIndex, expected: u64, value: u64) -> bool {
        let ours = self.holds(msr, expected) && self.device.write(msr, value).is_ok();
        if !ours {
            self.disown(msr);
        }
        ours
    }

    fn holds(&self, msr: MsrIndex, expected: u64) -> bool {
        self.device.read(msr).is_ok_and(|value| value == expected)
    }

    /// Leaves a register to whoever changed it.
    fn disown(&mut self, msr: MsrIndex) {
        if !self.foreign.contains(&msr) {
            self.foreign.push(msr);
        }
    }

    pub(super) fn on_cpu(&self) -> bool {
        self.device.on_cpu()
    }
}

impl Drop for PmuMsrs {
    fn drop(&mut self) {
        // Nothing may count with half of the registers restored.
        if let Some(global) = self.layout.global_control
            && !self.foreign.contains(&global)
        {
            let _ = self.device.write(global, 0);
        }
        for (msr, value) in &self.saved {
            if self.foreign.contains(msr) {
                continue;
            }
            if let Err(error) = self.device.write(*msr, *value) {
                log::warn!("msr: {msr} could not be restored to {value:#x}: {error}");
            }
        }
    }
}

/// Finds the counters and reads every register of theirs.
pub(super) fn look(
    device: &dyn MsrDevice,
    cpuid: &HostCpuid,
) -> Result<(Layout, Vec<(MsrIndex, u64)>), MsrRefusal> {
    let read = |msr| {
        let refuse = |error| MsrRefusal::Read {
            msr,
            errno: errno(&error),
        };
        device.read(msr).map_err(refuse)
    };
    let full_width = cpuid.has_capabilities() && read(CAPABILITIES)? & FULL_WIDTH != 0;
    let layout = Layout::of(cpuid.pmu(full_width)?);
    let saved = layout.all().into_iter().map(|msr| Ok((msr, read(msr)?)));
    let saved = saved.collect::<Result<_, _>>()?;
    Ok((layout, saved))
}

/// Refuses where a counter may be counting for somebody else. A select that is
/// enabled locally and not globally counts as in use, too: its user may only
/// pause.
pub(super) fn check_unused(
    layout: &Layout,
    saved: &[(MsrIndex, u64)],
    watchdog: bool,
) -> Result<(), MsrRefusal> {
    if watchdog {
        return Err(MsrRefusal::Watchdog);
    }
    let value = |msr| saved.iter().find(|(m, _)| *m == msr).map_or(0, |(_, v)| *v);
    let selects = layout.counters.iter().filter_map(|counter| counter.select);
    let enables = selects
        .map(|msr| (msr, ENABLE))
        .chain(layout.fixed_control.map(|msr| (msr, FIXED_ENABLES)));
    for (msr, enable) in enables {
        let value = value(msr);
        if value & enable != 0 {
            return Err(MsrRefusal::InUse { msr, value });
        }
    }
    Ok(())
}

/// Event selects of cycles and of instructions, both rings.
pub(super) fn self_test_codes(vendor: Vendor) -> [(u16, u8); 2] {
    match vendor {
        Vendor::Intel => [(0x3c, 0), (0xc0, 0)],
        Vendor::Amd => [(0x76, 0), (0xc0, 0)],
    }
}
