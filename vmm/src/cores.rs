//! Cores that vCPUs share, and lists of host CPUs as the kernel writes them: `0,2-3`.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

/// No host has more.
const MOST: usize = 1 << 16;

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

/// Host CPUs in the order given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuList(Vec<usize>);

/// What is wrong with a list of CPUs.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CpuListError {
    /// A part is neither a number nor a range.
    #[error("'{0}' is no CPU and no range of CPUs; give a list like 0,2-3")]
    Part(String),
    /// A range ends before it begins.
    #[error("the range {0} ends before it begins; give a list like 0,2-3")]
    Backwards(String),
    /// CPUs that this process cannot run on.
    #[error(
        "host CPU {cpu} does not exist or is not allowed to this process; it may use {allowed}"
    )]
    NotAllowed {
        /// The first one.
        cpu: usize,
        /// What it may use.
        allowed: CpuList,
    },
}

impl CpuList {
    /// Reads a list like `0,2-3`.
    ///
    /// # Errors
    /// [`CpuListError`] names the part that cannot be used.
    pub fn parse(text: &str) -> Result<Self, CpuListError> {
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let number = |digits: &str| -> Result<usize, CpuListError> {
                let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
                let number = plain.then(|| digits.parse().ok()).flatten();
                number
                    .filter(|&cpu| cpu < MOST)
                    .ok_or_else(|| CpuListError::Part(part.to_owned()))
            };
            let part_trimmed = part.trim();
            match part_trimmed.split_once('-') {
                None => cpus.push(number(part_trimmed)?),
                Some((first, last)) => {
                    let (first, last) = (number(first)?, number(last)?);
                    if first > last {
                        return Err(CpuListError::Backwards(part_trimmed.to_owned()));
                    }
                    cpus.extend(first..=last);
                }
            }
        }
        Ok(Self(cpus))
    }

    /// A list of these CPUs.
    #[must_use]
    pub fn new(cpus: Vec<usize>) -> Self {
        Self(cpus)
    }

    /// Checks that all are among `allowed`.
    ///
    /// # Errors
    /// [`CpuListError::NotAllowed`] names the first that is not.
    pub fn check(&self, allowed: &[usize]) -> Result<(), CpuListError> {
        match self.0.iter().find(|cpu| !allowed.contains(cpu)) {
            None => Ok(()),
            Some(&cpu) => Err(CpuListError::NotAllowed {
                cpu,
                allowed: Self(allowed.to_vec()),
            }),
        }
    }

    /// The CPUs.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().copied()
    }

    /// The CPU of the thread number `index`: with fewer CPUs than threads, they
    /// take turns. `None` for an empty list.
    #[must_use]
    pub fn of(&self, index: usize) -> Option<usize> {
        self.0.get(index % self.0.len().max(1)).copied()
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0.as_slice();
        let mut comma = "";
        while let Some(&first) = rest.first() {
            let run = rest.iter().zip(first..).take_while(|(cpu, n)| **cpu == *n);
            let run = run.count();
            match run {
                1 => write!(f, "{comma}{first}")?,
                _ => write!(f, "{comma}{first}-{}", first + run - 1)?,
            }
            comma = ",";
            rest = &rest[run..];
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists() {
        fn check(text: &str, expected: Result<&str, &str>) {
            let read = CpuList::parse(text);
            let read = read.map(|list| list.to_string());
            let read = read.map_err(|error| error.to_string());
            match (read, expected) {
                (Ok(read), Ok(expected)) => assert_eq!(read, expected, "{text:?}"),
                (Err(read), Err(part)) => assert!(read.contains(part), "{text:?}: {read}"),
                (read, _) => panic!("{text:?}: {read:?}"),
            }
        }
        check("0", Ok("0"));
        check("0,2-3", Ok("0,2-3"));
        check("3,2,1", Ok("3,2,1"));
        check(" 0 , 1", Ok("0-1"));
        check("", Err("''"));
        check("0,", Err("''"));
        check("-1", Err("'-1'"));
        check("1-", Err("'1-'"));
        check("3-1", Err("ends before it begins"));
        check("a", Err("'a'"));
        check("+1", Err("'+1'"));
        check("0-99999999", Err("'0-99999999'"));
        check("99999999999999999999", Err("no CPU"));
    }

    #[test]
    fn what_is_not_allowed_is_named() {
        let list = CpuList::parse("0,5").unwrap();
        let error = list.check(&[0, 1, 2]).unwrap_err().to_string();
        assert!(error.contains("CPU 5") && error.contains("0-2"), "{error}");
        assert_eq!(list.check(&[0, 5]), Ok(()));
    }

    #[test]
    fn threads_share_a_short_list() {
        let list = CpuList::parse("4,6").unwrap();
        assert_eq!(
            [0, 1, 2].map(|index| list.of(index)),
            [Some(4), Some(6), Some(4)]
        );
    }

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
