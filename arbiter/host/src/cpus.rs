//! Sets of host CPUs, written as the kernel writes them: `0,2-3`.

use std::fmt;
use std::str::FromStr;

/// A set of host CPUs.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CpuSet(Vec<u64>);

/// What is wrong with the text of a set of CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CpuSetError {
    /// A part is neither a number nor a range.
    Part(String),
    /// A range ends before it begins.
    Backwards(String),
}

impl std::error::Error for CpuSetError {}

impl fmt::Display for CpuSetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CpuSetError::Part(part) => write!(f, "'{part}' is no CPU and no range of CPUs")?,
            CpuSetError::Backwards(part) => write!(f, "the range {part} ends before it begins")?,
        }
        f.write_str("; give a list like 0,2-3")
    }
}

impl CpuSet {
    /// CPUs have numbers below this one: the most that Linux is built for on x86
    /// (`NR_CPUS`, arch/x86/Kconfig).
    pub const LIMIT: u32 = 8192;

    /// Adds a CPU. A number from [`CpuSet::LIMIT`] on is not added.
    pub fn insert(&mut self, cpu: u32) {
        if cpu >= CpuSet::LIMIT {
            return;
        }
        let word = cpu as usize / 64;
        if word >= self.0.len() {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= 1 << (cpu % 64);
    }

    /// Removes a CPU.
    pub fn remove(&mut self, cpu: u32) {
        if let Some(word) = self.0.get_mut(cpu as usize / 64) {
            *word &= !(1 << (cpu % 64));
        }
        // Equal sets have equal words.
        while self.0.last() == Some(&0) {
            self.0.pop();
        }
    }

    /// Whether `cpu` is a member.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0
            .get(cpu as usize / 64)
            .is_some_and(|word| word & (1 << (cpu % 64)) != 0)
    }

    /// The members in order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0u32..).zip(&self.0).flat_map(|(index, &word)| {
            let mut left = word;
            std::iter::from_fn(move || {
                let bit = (left != 0).then(|| left.trailing_zeros())?;
                left &= left - 1;
                Some(index * 64 + bit)
            })
        })
    }

    /// Number of members.
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether there is no member.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether both have a member in common.
    pub fn meets(&self, other: &CpuSet) -> bool {
        self.0.iter().zip(&other.0).any(|(a, b)| a & b != 0)
    }

    /// The CPUs that are in both.
    #[must_use]
    pub fn and(&self, other: &CpuSet) -> CpuSet {
        self.iter().filter(|&cpu| other.contains(cpu)).collect()
    }

    /// The members that `other` lacks.
    #[must_use]
    pub fn without(&self, other: &CpuSet) -> CpuSet {
        self.iter().filter(|&cpu| !other.contains(cpu)).collect()
    }

    /// The first member that `other` lacks.
    pub fn first_beyond(&self, other: &CpuSet) -> Option<u32> {
        // Each request asks this of some hundred CPUs.
        let others = other.0.iter().copied().chain(std::iter::repeat(0));
        let mut beyond = (0u32..).zip(self.0.iter().zip(others));
        beyond.find_map(|(index, (word, other))| {
            let word = word & !other;
            (word != 0).then(|| index * 64 + word.trailing_zeros())
        })
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        let mut set = CpuSet::default();
        for cpu in cpus {
            set.insert(cpu);
        }
        set
    }
}

impl FromStr for CpuSet {
    type Err = CpuSetError;

    fn from_str(text: &str) -> Result<Self, CpuSetError> {
        let mut set = CpuSet::default();
        if text.trim().is_empty() {
            return Ok(set);
        }
        for part in text.split(',').map(str::trim) {
            let number = |digits: &str| {
                let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
                plain
                    .then(|| digits.parse().ok())
                    .flatten()
                    .filter(|&cpu: &u32| cpu < CpuSet::LIMIT)
                    .ok_or_else(|| CpuSetError::Part(part.to_string()))
            };
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(CpuSetError::Backwards(part.to_string()));
            }
            (first..=last).for_each(|cpu| set.insert(cpu));
        }
        Ok(set)
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.iter().peekable();
        let mut comma = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while let Some(next) = cpus.next_if_eq(&(last + 1)) {
                last = next;
            }
            match last - first {
                0 => write!(f, "{comma}{first}")?,
                _ => write!(f, "{comma}{first}-{last}")?,
            }
            comma = ",";
        }
        Ok(())
    }
}

impl fmt::Debug for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_come_back() {
        for text in ["", "0", "0,2-3", "63-64,127", "5-6"] {
            let set: CpuSet = text.parse().expect("a list of CPUs");
            assert_eq!(set.to_string(), text);
            assert_eq!(set.len(), set.iter().count());
        }
        let set: CpuSet = "3, 1-2 ,2".parse().expect("spaces and doubles");
        assert_eq!(set.to_string(), "1-3");
    }

    #[test]
    fn wrong_texts_are_named() {
        for (text, wrong) in [
            ("a", CpuSetError::Part("a".into())),
            ("1,,2", CpuSetError::Part("".into())),
            ("0,-1", CpuSetError::Part("-1".into())),
            ("+1", CpuSetError::Part("+1".into())),
            ("8192", CpuSetError::Part("8192".into())),
            ("0-99999999", CpuSetError::Part("0-99999999".into())),
            ("0-1-2", CpuSetError::Part("0-1-2".into())),
            ("5-4", CpuSetError::Backwards("5-4".into())),
        ] {
            assert_eq!(text.parse::<CpuSet>(), Err(wrong), "{text}");
        }
    }

    #[test]
    fn members_come_and_go() {
        let mut set: CpuSet = "0,200".parse().expect("a list");
        let beyond = |others: &str| set.first_beyond(&others.parse().expect("a list"));
        let found = ["", "1-9", "0", "0,199", "0-300"].map(beyond);
        assert_eq!(found, [Some(0), Some(0), Some(200), Some(200), None]);
        set.remove(200);
        set.remove(9);
        assert_eq!(set, "0".parse().expect("a list"));
        assert!(set.meets(&"0-5".parse().expect("a list")));
        assert!(!set.meets(&"64".parse().expect("a list")));
        assert_eq!(
            "0-5".parse::<CpuSet>().expect("a list").first_beyond(&set),
            Some(1)
        );
        set.insert(CpuSet::LIMIT);
        assert_eq!(set.len(), 1);
    }
}
