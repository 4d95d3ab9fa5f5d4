//! Names of counters, and sets of counters.

use core::fmt;
use core::ops::{BitAnd, BitOr, Not};

/// Programmable counters that a set can hold: indices 0 to 31.
pub const MAX_PROGRAMMABLE: u8 = 32;
/// Fixed-function counters that a set can hold: indices 0 to 29.
pub const MAX_FIXED: u8 = 30;
/// Positions of the samplers: behind those of all counters.
const SAMPLERS: u8 = 62;

/// What instruction-based sampling samples (AMD; APM vol. 2, section 13.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IbsKind {
    /// Instruction fetches.
    Fetch,
    /// Ops.
    Op,
}

impl IbsKind {
    /// Both.
    pub const ALL: [IbsKind; 2] = [IbsKind::Fetch, IbsKind::Op];
}

/// One counter of a PMU, by its architectural name.
///
/// The order is: programmable counters by index, then fixed ones by index, then samplers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CounterId {
    /// A counter whose event software selects (Intel `IA32_PMCx`, AMD `PerfCtrX`).
    Programmable(u8),
    /// A counter bound to one event (Intel `IA32_FIXED_CTRx`).
    Fixed(u8),
    /// A sampler (AMD `IbsFetchCtl`, `IbsOpCtl`): it counts up to its maximum, on a physical
    /// counter. Where counters of a kind are numbered or limited, it is a programmable one.
    Ibs(IbsKind),
}

impl CounterId {
    /// Position in the Intel global registers (`IA32_PERF_GLOBAL_CTRL`):
    /// programmable counters from bit 0, fixed ones from bit 32. `None` for
    /// an index that has no bit there. Samplers have bits 62 and 63 in sets, and none in
    /// any register.
    #[inline]
    pub fn global_bit(self) -> Option<u32> {
        match self {
            CounterId::Programmable(n) if n < MAX_PROGRAMMABLE => Some(u32::from(n)),
            CounterId::Fixed(n) if n < MAX_FIXED => Some(32 + u32::from(n)),
            CounterId::Ibs(kind) => Some(u32::from(SAMPLERS) + kind as u32),
            _ => None,
        }
    }

    /// The counter of this name, as it is displayed.
    pub fn named(name: &str) -> Option<CounterId> {
        // Else `parse` would take a sign.
        let number = |digits: &str| {
            let plain = digits.bytes().all(|byte| byte.is_ascii_digit());
            digits.parse().ok().filter(|_| plain)
        };
        let counter = match (name.strip_prefix("PMC"), name.strip_prefix("FIXED")) {
            (Some(digits), _) => CounterId::Programmable(number(digits)?),
            (_, Some(digits)) => CounterId::Fixed(number(digits)?),
            _ if name == "IBSFETCH" => CounterId::Ibs(IbsKind::Fetch),
            _ if name == "IBSOP" => CounterId::Ibs(IbsKind::Op),
            _ => return None,
        };
        counter.position().map(|_| counter)
    }

    /// Whether both are fixed-function ones, or neither is.
    pub const fn is_like(self, other: CounterId) -> bool {
        matches!(self, CounterId::Fixed(_)) == matches!(other, CounterId::Fixed(_))
    }

    /// The counter at a position of the reservation ABI. Positions are those of
    /// the Intel global registers.
    pub fn at_position(position: u8) -> Option<CounterId> {
        match position {
            0..32 => Some(CounterId::Programmable(position)),
            32..SAMPLERS => Some(CounterId::Fixed(position - 32)),
            SAMPLERS..64 => {
                let kind = IbsKind::ALL.get(usize::from(position - SAMPLERS))?;
                Some(CounterId::Ibs(*kind))
            }
            _ => None,
        }
    }

    /// The position of the counter, 0 to 63, as [`CounterId::at_position`] takes it.
    pub fn position(self) -> Option<u8> {
        u8::try_from(self.global_bit()?).ok()
    }
}

impl fmt::Display for CounterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CounterId::Programmable(n) => write!(f, "PMC{n}"),
            CounterId::Fixed(n) => write!(f, "FIXED{n}"),
            CounterId::Ibs(IbsKind::Fetch) => f.write_str("IBSFETCH"),
            CounterId::Ibs(IbsKind::Op) => f.write_str("IBSOP"),
        }
    }
}

/// A set of counters, laid out as in `IA32_PERF_GLOBAL_STATUS`: programmable
/// counter n is bit n, fixed counter n is bit 32 + n. Samplers are bits 62 and 63.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct CounterSet(u64);

impl CounterSet {
    /// The set without members.
    pub const EMPTY: CounterSet = CounterSet(0);
    /// Both samplers.
    pub const SAMPLERS: CounterSet = CounterSet(0b11 << SAMPLERS);

    /// The set whose members are the set bits of `bits`.
    pub const fn from_bits(bits: u64) -> Self {
        CounterSet(bits)
    }

    /// The members as bits of a global register.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Whether the set has no member.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Number of members.
    pub const fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Adds `counter`. Returns false if the set cannot hold its index.
    pub fn insert(&mut self, counter: CounterId) -> bool {
        match counter.global_bit() {
            Some(bit) => {
                self.0 |= 1 << bit;
                true
            }
            None => false,
        }
    }

    /// Whether `counter` is a member.
    pub fn contains(self, counter: CounterId) -> bool {
        counter
            .global_bit()
            .is_some_and(|bit| self.0 & (1 << bit) != 0)
    }

    /// The members without samplers.
    #[must_use]
    pub const fn counters(self) -> Self {
        CounterSet(self.0 & !Self::SAMPLERS.0)
    }

    /// The members, programmable counters first.
    pub fn iter(self) -> impl Iterator<Item = CounterId> + Clone {
        let mut rest = self.0;
        core::iter::from_fn(move || {
            let bit = u8::try_from(rest.trailing_zeros()).ok()?;
            rest &= rest.checked_sub(1)?;
            CounterId::at_position(bit)
        })
    }

    /// The set of the first `programmable` programmable and the first `fixed`
    /// fixed-function counters.
    pub fn first(programmable: u8, fixed: u8) -> Self {
        (0..programmable)
            .map(CounterId::Programmable)
            .chain((0..fixed).map(CounterId::Fixed))
            .collect()
    }

    /// Adds or removes `counter`.
    pub fn set(&mut self, counter: CounterId, member: bool) {
        if member {
            self.insert(counter);
        } else {
            self.remove(counter);
        }
    }

    /// Removes `counter`.
    pub fn remove(&mut self, counter: CounterId) {
        if let Some(bit) = counter.global_bit() {
            self.0 &= !(1 << bit);
        }
    }
}

impl BitOr for CounterSet {
    type Output = CounterSet;

    fn bitor(self, other: CounterSet) -> CounterSet {
        CounterSet(self.0 | other.0)
    }
}

impl BitAnd for CounterSet {
    type Output = CounterSet;

    fn bitand(self, other: CounterSet) -> CounterSet {
        CounterSet(self.0 & other.0)
    }
}

impl Not for CounterSet {
    type Output = CounterSet;

    fn not(self) -> CounterSet {
        CounterSet(!self.0)
    }
}

impl FromIterator<CounterId> for CounterSet {
    fn from_iter<I: IntoIterator<Item = CounterId>>(counters: I) -> Self {
        let mut set = CounterSet::EMPTY;
        for counter in counters {
            set.insert(counter);
        }
        set
    }
}

impl fmt::Debug for CounterSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

/// A number for each kind of counter; a sampler counts as a programmable one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PerKind {
    /// The number for programmable counters.
    pub programmable: u8,
    /// The number for fixed-function counters.
    pub fixed: u8,
}

impl PerKind {
    /// At least as many counters of each kind as any PMU has.
    pub const ALL: PerKind = PerKind {
        programmable: u8::MAX,
        fixed: u8::MAX,
    };

    /// The number of counters of each kind in a set.
    pub fn count(set: CounterSet) -> PerKind {
        let bits = |bits: u64| u8::try_from(bits.count_ones()).unwrap_or(u8::MAX);
        PerKind {
            programmable: bits(set.bits() & (u64::from(u32::MAX) | CounterSet::SAMPLERS.0)),
            fixed: bits(set.counters().bits() >> 32),
        }
    }

    /// The lesser of both, of each kind.
    #[must_use]
    pub fn min_of_each(self, other: PerKind) -> PerKind {
        PerKind {
            programmable: self.programmable.min(other.programmable),
            fixed: self.fixed.min(other.fixed),
        }
    }

    /// The number for the kind of `counter`.
    pub fn of(self, counter: CounterId) -> u8 {
        match counter {
            CounterId::Programmable(_) | CounterId::Ibs(_) => self.programmable,
            CounterId::Fixed(_) => self.fixed,
        }
    }
}

/// As `--budget` takes it.
impl fmt::Display for PerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |f: &mut fmt::Formatter<'_>, number| match number {
            u8::MAX => f.write_str("all"),
            number => write!(f, "{number}"),
        };
        f.write_str("programmable=")?;
        number(f, self.programmable)?;
        f.write_str(",fixed=")?;
        number(f, self.fixed)
    }
}
