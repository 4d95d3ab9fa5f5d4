//! The agenda: what is to happen, in the order of time.
//!
//! The time of a run is cut into stretches. Only what falls into the present one is
//! sorted, so the heap stays in the processor's cache whatever is planned for later.
//! Times stay as they are: a stretch is a place to wait, not a slice of time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::Happening;
use crate::random::Micros;

/// The most stretches that a run has.
const STRETCHES: u64 = 1 << 16;

/// A happening with its time. Among those of one time the first that was planned comes
/// first.
#[derive(Debug)]
struct Due {
    at: Micros,
    order: u64,
    what: Happening,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// What is planned.
#[derive(Debug)]
pub(super) struct Agenda {
    end: Micros,
    /// A stretch is two to the power of this long, in microseconds.
    shift: u32,
    /// The number of the present stretch.
    present: usize,
    heap: BinaryHeap<Reverse<Due>>,
    /// What waits, by stretch.
    later: Vec<Vec<Reverse<Due>>>,
    planned: u64,
}

impl Agenda {
    /// The agenda of a run that ends at `end`.
    pub(super) fn new(end: Micros) -> Self {
        let shift = (end / STRETCHES).checked_ilog2().map_or(0, |log| log + 1);
        let mut agenda = Agenda {
            end,
            shift,
            present: 0,
            heap: BinaryHeap::new(),
            later: Vec::new(),
            planned: 0,
        };
        agenda.later.resize_with(agenda.stretch(end) + 1, Vec::new);
        agenda
    }

    fn stretch(&self, at: Micros) -> usize {
        usize::try_from(at >> self.shift).unwrap_or(usize::MAX)
    }

    /// Plans something that does not lie in the past. What comes after the end is
    /// forgotten.
    pub(super) fn plan(&mut self, at: Micros, what: Happening) {
        self.planned += 1;
        if at > self.end {
            return;
        }
        let order = self.planned;
        let due = Reverse(Due { at, order, what });
        let stretch = self.stretch(at);
        if stretch <= self.present {
            self.heap.push(due);
        } else {
            self.later[stretch].push(due);
        }
    }

    /// What comes next, and when.
    pub(super) fn next(&mut self) -> Option<(Micros, Happening)> {
        while self.heap.is_empty() {
            self.present += 1;
            let waiting = self.later.get_mut(self.present)?;
            self.heap = std::mem::take(waiting).into();
        }
        let Reverse(due) = self.heap.pop()?;
        Some((due.at, due.what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Planned while others come, over many stretches: the order is that of times, and
    /// of planning among equals.
    #[test]
    fn everything_comes_in_order() {
        for end in [0, 5, 70_000, 1 << 30] {
            let mut agenda = Agenda::new(end);
            let mut number = 0;
            let mut plan = |agenda: &mut Agenda, at| {
                agenda.plan(at, Happening::Tick(number));
                number += 1;
            };
            for n in 0..1000 {
                plan(&mut agenda, (n * 7919) % 1000 * end / 900);
            }
            let mut seen: Vec<(Micros, u32)> = Vec::new();
            while let Some((at, what)) = agenda.next() {
                let Happening::Tick(n) = what else {
                    panic!("{what:?}");
                };
                if n % 3 == 0 && seen.len() < 500 {
                    plan(&mut agenda, at);
                    plan(&mut agenda, at + end / 10);
                }
                seen.push((at, n));
            }
            assert!(seen.is_sorted(), "{end}");
            assert!(seen.iter().all(|(at, _)| *at <= end) && seen.len() > 900);
        }
    }
}
