//! A counter's control registers: written for a request, and cleared.

use std::io;

use pmu_model::{CountRequest, SlotIndex, UnavailableReason};

use super::error::errno;
use super::events::{MERGE, MsrPlan, plan};
use super::registers::ENABLE;
use super::slot::{Control, MsrSlot};
use super::{MsrBackend, NAME};

impl MsrBackend {
    pub(super) fn lay_out(&self, request: &CountRequest) -> Result<MsrPlan, UnavailableReason> {
        // Any-thread ends with architectural version 5 and never was AMD's.
        if request.any_thread {
            return Err(UnavailableReason::Modifier { backend: NAME });
        }
        let plan = plan(&self.cpuid, &self.registers.layout, request);
        plan.ok_or(UnavailableReason::Event {
            backend: NAME,
            event: request.event,
        })
    }

    /// Writes a counter's registers: stopped, with count 0.
    pub(super) fn write(
        &mut self,
        index: SlotIndex,
        plan: &MsrPlan,
    ) -> Result<MsrSlot, UnavailableReason> {
        let misplaced = UnavailableReason::Misplaced {
            backend: NAME,
            slot: index,
        };
        let refused = |error: io::Error| UnavailableReason::Refused {
            backend: NAME,
            errno: errno(&error),
        };
        let counters = &self.registers.layout.counters;
        let counter = *counters
            .get(usize::from(index.0))
            .ok_or(UnavailableReason::NoSuchSlot {
                backend: NAME,
                slot: index,
            })?;
        let partner = SlotIndex(index.0 ^ 1);
        let paired =
            |slot: &MsrSlot| matches!(slot.control, Control::Select { merge: Some(_), .. });
        let merged_away = index.0 % 2 == 1 && self.get(partner).is_some_and(paired);
        let partner_taken = plan.constraint.paired && self.get(partner).is_some();
        let free = plan.constraint.slots;
        if merged_away || partner_taken || !plan.constraint.allows(index, free) {
            return Err(misplaced);
        }
        let global = self.registers.layout.global_control.is_some();
        let merge = counters
            .get(usize::from(partner.0))
            .and_then(|counter| counter.select);
        let control = match (counter.select, plan.select) {
            (Some(msr), Some(select)) => Control::Select {
                msr,
                outside: select | if global { ENABLE } else { 0 },
                inside: select | ENABLE,
                merge: merge.filter(|_| plan.constraint.paired),
            },
            (Some(_), None) => return Err(misplaced),
            (None, _) => {
                let arbiter::CounterId::Fixed(n) = counter.id else {
                    return Err(misplaced);
                };
                Control::Fixed {
                    field: 0b1111 << (4 * n),
                    bits: plan.fixed << (4 * n),
                }
            }
        };
        self.set_control(control).map_err(refused)?;
        self.registers.write(counter.value, 0).map_err(refused)?;
        Ok(MsrSlot::new(control, counter.value, counter.mask))
    }

    pub(super) fn set_control(&mut self, control: Control) -> io::Result<()> {
        let busy = || io::Error::from_raw_os_error(libc::EBUSY);
        match control {
            Control::Select {
                msr,
                outside,
                merge,
                ..
            } => {
                let merge = merge.map(|msr| (msr, MERGE | outside & ENABLE));
                for (msr, value) in [(msr, outside)].into_iter().chain(merge) {
                    if !self.options.force && self.registers.read(msr)? & ENABLE != 0 {
                        self.registers.disown(msr);
                        return Err(busy());
                    }
                    self.registers.write(msr, value)?;
                }
                Ok(())
            }
            Control::Fixed { field, bits } => {
                let msr = self.registers.layout.fixed_control.ok_or_else(busy)?;
                let value = self.registers.read(msr)?;
                if !self.options.force && value & field != 0 {
                    return Err(busy());
                }
                self.registers.write(msr, value & !field | bits)
            }
        }
    }

    /// Clears a counter's registers as far as they are ours.
    pub(super) fn clear(&mut self, slot: &MsrSlot) {
        match slot.control {
            Control::Select {
                msr,
                outside,
                inside,
                merge,
            } => {
                // One of the two holds; a register that is neither is left alone.
                let outside_now = self.registers.holds(msr, outside);
                self.registers
                    .replace(msr, if outside_now { outside } else { inside }, 0);
                if let Some(msr) = merge {
                    self.registers.replace(msr, MERGE | outside & ENABLE, 0);
                }
            }
            Control::Fixed { field, bits } => {
                let Some(msr) = self.registers.layout.fixed_control else {
                    return;
                };
                match self.registers.read(msr) {
                    Ok(value) if value & field == bits => {
                        self.registers.replace(msr, value, value & !field);
                    }
                    _ => self.registers.disown(msr),
                }
            }
        }
    }
}
