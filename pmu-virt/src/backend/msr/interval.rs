//! From entry to exit: counters start, stop, and are looked at.

use pmu_model::{SlotIndex, SlotSet, Tsc};

use super::MsrBackend;
use super::events::MERGE;
use super::registers::{ENABLE, global_bit};
use super::slot::{Control, MsrSlot};

impl MsrBackend {
    /// Makes a counter somebody else's.
    pub(super) fn lose(&mut self, index: SlotIndex) {
        self.active.remove(index);
        let Some(slot) = self.get_mut(index).filter(|slot| !slot.lost) else {
            return;
        };
        slot.lost = true;
        slot.target = None;
        let value = slot.value;
        // A guest that has its counters placed again and again is told of once.
        let level = if std::mem::replace(&mut self.warned, true) {
            log::Level::Debug
        } else {
            log::Level::Warn
        };
        log::log!(
            level,
            "msr: {value} was taken by somebody else; its count is not known any more"
        );
        // Should the registers still be ours, they are cleared at `release`.
    }

    pub(super) fn lose_all(&mut self, slots: SlotSet) {
        for slot in slots.iter() {
            self.lose(slot);
        }
    }

    /// The global control register's bits of `slots`.
    pub(super) fn global_bits(&self, slots: SlotSet) -> u64 {
        let counters = &self.registers.layout.counters;
        let counter = |slot: SlotIndex| counters.get(usize::from(slot.0));
        let merged = |slot: SlotIndex| match self.get(slot).map(|slot| slot.control) {
            Some(Control::Select { merge: Some(_), .. }) => counter(SlotIndex(slot.0 + 1)),
            _ => None,
        };
        let bits = |slot| counter(slot).into_iter().chain(merged(slot));
        let bits = slots.iter().flat_map(bits);
        bits.fold(0, |all, counter| all | global_bit(counter.id))
    }

    pub(super) fn enter(&mut self, tsc: Tsc) {
        self.entered = Some(tsc);
        let wanted = self.running.iter();
        let wanted = wanted.filter(|slot| self.get(*slot).is_some_and(|slot| !slot.lost));
        self.active = wanted.collect();
        if self.active.is_empty() {
            return;
        }
        if !self.registers.on_cpu() {
            return self.lose_all(self.active);
        }
        match self.registers.layout.global_control {
            Some(msr) => {
                let bits = self.global_bits(self.active);
                if !self.registers.replace(msr, 0, bits) {
                    self.lose_all(self.active);
                }
            }
            None => self.switch_each(true),
        }
    }

    /// Starts or stops the active counters by their own selects.
    pub(super) fn switch_each(&mut self, on: bool) {
        for index in self.active.iter() {
            let Some(Control::Select {
                msr,
                outside,
                inside,
                merge,
            }) = self.get(index).map(|slot| slot.control)
            else {
                continue;
            };
            let (from, to) = if on {
                (outside, inside)
            } else {
                (inside, outside)
            };
            let merged = merge.is_none_or(|msr| {
                let enable = |value| MERGE | value & ENABLE;
                self.registers.replace(msr, enable(from), enable(to))
            });
            if !self.registers.replace(msr, from, to) || !merged {
                self.lose(index);
            }
        }
    }

    pub(super) fn leave(&mut self, tsc: Tsc) {
        let Some(entered) = self.entered.take() else {
            return;
        };
        let stopped = self.active;
        if stopped.is_empty() {
            return;
        }
        match self.registers.layout.global_control {
            Some(msr) => {
                let bits = self.global_bits(stopped);
                if !self.registers.replace(msr, bits, 0) {
                    self.lose_all(stopped);
                }
            }
            None => self.switch_each(false),
        }
        if !self.registers.on_cpu() {
            self.lose_all(stopped);
        }
        let ticks = tsc - entered;
        for index in std::mem::take(&mut self.active).iter() {
            let Some(slot) = self.get_mut(index) else {
                continue;
            };
            slot.pass(ticks);
            if slot.is_due() && self.fold(index) {
                self.overflowed.insert(index);
            }
        }
    }

    /// Takes in a counter's register; true when its armed overflow came.
    pub(super) fn fold(&mut self, index: SlotIndex) -> bool {
        let now = self.get(index).and_then(|slot| self.current(slot));
        match (now, self.get_mut(index)) {
            (Some(now), Some(slot)) => {
                slot.fold(now);
                slot.take_overflow()
            }
            _ => {
                self.lose(index);
                false
            }
        }
    }

    /// What a counter's register holds, if it is still ours.
    pub(super) fn current(&self, slot: &MsrSlot) -> Option<u64> {
        if slot.lost || slot.is_ambiguous() {
            return None;
        }
        let ours = match slot.control {
            Control::Select {
                msr,
                outside,
                inside,
                merge,
            } => {
                let value = self.registers.read(msr).ok()?;
                let merged = |msr| self.registers.holds(msr, MERGE | value & ENABLE);
                (value == outside || value == inside) && merge.is_none_or(merged)
            }
            Control::Fixed { field, bits } => {
                let msr = self.registers.layout.fixed_control?;
                self.registers.read(msr).ok()? & field == bits
            }
        };
        if !ours {
            return None;
        }
        self.registers.read(slot.value).ok()
    }
}
