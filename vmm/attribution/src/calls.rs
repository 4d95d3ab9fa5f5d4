//! System calls by their numbers and names.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use emu::State;
use syscalls::x86_64::Sysno;

use crate::counts::Syscall;

/// Of numbers of x32's table (`__X32_SYSCALL_BIT`).
const X32: u32 = 0x4000_0000;
/// System calls that are told apart; Linux has fewer than 500. A number that is none is one of
/// these until there are so many.
const MOST: usize = 4096;

/// A system call, by the table that its number is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Call {
    /// x86-64's.
    Native(u32),
    X32(u32),
    /// INT 80h, and SYSENTER.
    I386(u32),
    /// One of those that are not told apart any more.
    Another,
}

impl Call {
    /// As SYSCALL has entered the kernel with these registers.
    pub(crate) fn native(state: &State) -> Self {
        match low(state) {
            number if number & X32 != 0 => Self::X32(number & !X32),
            number => Self::Native(number),
        }
    }

    /// As an entry of i386 has.
    pub(crate) fn i386(state: &State) -> Self {
        Self::I386(low(state))
    }

    fn number(self) -> u32 {
        match self {
            Self::Native(number) | Self::I386(number) => number,
            Self::X32(number) => number | X32,
            Self::Another => u32::MAX,
        }
    }

    fn name(self) -> String {
        match self {
            Self::Native(number) => match Sysno::new(number as usize) {
                Some(known) => known.name().to_owned(),
                None => format!("syscall_{number}"),
            },
            Self::X32(number) => format!("x32:{number}"),
            Self::I386(number) => format!("i386:{number}"),
            Self::Another => "others".to_owned(),
        }
    }
}

/// EAX.
fn low(state: &State) -> u32 {
    let [a, b, c, d, ..] = state.r[0].to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// How often each was called, and what the kernel executed for it.
#[derive(Debug, Default)]
pub(crate) struct Calls(BTreeMap<Call, (u64, u64)>);

impl Calls {
    pub(crate) fn entered(&mut self, call: Call) {
        self.of(call).0 += 1;
    }

    pub(crate) fn took(&mut self, call: Call, instructions: u64) {
        self.of(call).1 += instructions;
    }

    fn of(&mut self, call: Call) -> &mut (u64, u64) {
        let full = self.0.len() >= MOST && !self.0.contains_key(&call);
        self.0
            .entry(if full { Call::Another } else { call })
            .or_default()
    }

    /// The costliest first.
    pub(crate) fn counts(&self) -> Vec<Syscall> {
        let mut all: Vec<(&Call, &(u64, u64))> = self.0.iter().collect();
        all.sort_by_key(|(call, (_, instructions))| (Reverse(*instructions), **call));
        let all = all
            .into_iter()
            .map(|(call, (calls, instructions))| Syscall {
                number: call.number(),
                name: call.name(),
                calls: *calls,
                instructions: *instructions,
            });
        all.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_table() {
        let check = |call: Call, number, name: &str| {
            assert_eq!((call.number(), call.name().as_str()), (number, name));
        };
        check(Call::Native(0), 0, "read");
        check(Call::Native(59), 59, "execve");
        check(Call::Native(435), 435, "clone3");
        check(Call::Native(9999), 9999, "syscall_9999");
        check(Call::I386(4), 4, "i386:4");
        check(Call::X32(514), 0x4000_0202, "x32:514");
    }

    #[test]
    fn numbers_without_end_are_bounded() {
        let mut calls = Calls::default();
        for number in 0..10_000 {
            calls.entered(Call::Native(number));
        }
        let counts = calls.counts();
        assert_eq!(counts.len(), MOST + 1);
        assert_eq!(counts.iter().map(|call| call.calls).sum::<u64>(), 10_000);
    }
}
