//! What the processors in software of a machine did, and what that took: one line of the log,
//! which whoever measures reads back.

use std::fmt;
use std::str::FromStr;

use emu::SlowPath;

/// Of all vCPUs, from the machine's first instruction to its end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineFigures {
    /// Instructions that retired.
    pub instructions: u64,
    /// CPU time of the thread that executed them, in nanoseconds.
    pub cpu_ns: u64,
    /// Bytes of decoded code at the end.
    pub code_bytes: u64,
    /// How often each slow path was taken, in the order of [`SlowPath::ALL`].
    pub(crate) slow: [u64; SlowPath::ALL.len()],
}

impl EngineFigures {
    /// How the line of the log begins.
    const BEGIN: &str = "engine emu: ";

    /// How often a slow path was taken.
    #[must_use]
    pub fn slow(&self, path: SlowPath) -> u64 {
        self.slow[path as usize]
    }

    /// Each figure by its name in the line.
    fn named(&mut self) -> impl Iterator<Item = (String, &mut u64)> {
        let slow = SlowPath::ALL.iter().zip(&mut self.slow);
        let first = [
            ("instructions", &mut self.instructions),
            ("cpu_ns", &mut self.cpu_ns),
            ("code_bytes", &mut self.code_bytes),
        ];
        first
            .into_iter()
            .map(|(name, figure)| (name.to_owned(), figure))
            .chain(slow.map(|(path, figure)| (format!("{path:?}").to_lowercase(), figure)))
    }
}

impl fmt::Display for EngineFigures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut figures = *self;
        let words: Vec<String> = figures
            .named()
            .map(|(name, figure)| format!("{name} {figure}"))
            .collect();
        write!(f, "{}{}", Self::BEGIN, words.join(", "))
    }
}

/// A line of the log, whatever comes before these figures in it.
impl FromStr for EngineFigures {
    type Err = NoFigures;

    fn from_str(line: &str) -> Result<Self, NoFigures> {
        let (_, words) = line.split_once(Self::BEGIN).ok_or(NoFigures)?;
        let mut figures = Self::default();
        let mut words = words.trim_end().split(", ");
        for (name, figure) in figures.named() {
            let word = words.next().and_then(|word| word.split_once(' '));
            let (_, number) = word.filter(|(one, _)| *one == name).ok_or(NoFigures)?;
            *figure = number.parse().map_err(|_| NoFigures)?;
        }
        words.next().is_none().then_some(figures).ok_or(NoFigures)
    }
}

/// A line of the log that is another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoFigures;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_comes_back() {
        let mut figures = EngineFigures::default();
        for (number, (_, figure)) in (1..).zip(figures.named()) {
            *figure = number * 1_000_003;
        }
        let line = format!("umpire: info: {figures}");
        assert!(
            line.contains("instructions 1000003, cpu_ns 2000006, "),
            "{line}"
        );
        assert_eq!(line.parse(), Ok(figures));
        assert_eq!(
            format!("{line}, more 1").parse::<EngineFigures>(),
            Err(NoFigures)
        );
        for short in ["", "engine emu: ", &line[..line.len() - 20]] {
            assert_eq!(short.parse::<EngineFigures>(), Err(NoFigures), "{short}");
        }
        assert_eq!(figures.slow(SlowPath::Decode), 16 * 1_000_003);
    }
}
