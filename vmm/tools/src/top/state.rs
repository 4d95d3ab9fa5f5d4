//! The VMs that are or were there, and what the user wants to see of them.

use std::time::Duration;

use super::keys::KeyPress;
use super::reading::{CYCLES, EXITS, Missing, VcpuReading, VmReading, Window};

/// VMs that have ended of which a line is kept.
const ENDED: usize = 5;
/// The least and the longest time between two frames, in seconds.
pub(super) const INTERVALS: std::ops::RangeInclusive<f64> = 0.1..=3600.0;

/// How it stands with a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// It answers.
    Live,
    /// It has not answered for so many seconds.
    Silent(u64),
    Ended,
    /// Nothing can be shown, for this reason.
    Failed(String),
}

/// A VM.
#[derive(Clone, Debug)]
pub(super) struct VmLine {
    /// Never used twice.
    pub(super) id: u64,
    pub(super) name: String,
    pub(super) standing: Standing,
    pub(super) reading: VmReading,
    pub(super) samples: Window,
    /// When it answered last.
    answered: Duration,
}

impl VmLine {
    /// What an event comes to on all vCPUs, in a second.
    pub(super) fn per_second(&self, event: &str) -> Option<f64> {
        let rates = self.reading.vcpus.iter().map(|vcpu| {
            let found = vcpu.rates.iter().find(|rate| rate.event == event)?;
            let idle = found.missing == Some(Missing::Idle);
            found.per_second.or(idle.then_some(0.0))
        });
        rates.sum()
    }
}

/// What comes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Sort {
    /// VMs by name, vCPUs by number.
    #[default]
    Name,
    /// Who runs most.
    Cpu,
    Cycles,
    Exits,
}

impl Sort {
    fn next(self) -> Self {
        match self {
            Self::Name => Self::Cpu,
            Self::Cpu => Self::Cycles,
            Self::Cycles => Self::Exits,
            Self::Exits => Self::Name,
        }
    }

    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Cpu => "CPU",
            Self::Cycles => "cycles",
            Self::Exits => "exits",
        }
    }

    /// The event whose rate decides.
    fn event(self) -> Option<&'static str> {
        match self {
            Self::Name => None,
            Self::Cpu => Some(super::reading::RUN_TIME),
            Self::Cycles => Some(CYCLES),
            Self::Exits => Some(EXITS),
        }
    }
}

/// What a key asks of who runs the loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Quit,
    /// The time between frames is another one.
    Interval(Duration),
    Suspend,
    Redraw,
}

/// All that a frame is made of.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    vms: Vec<VmLine>,
    /// The VM whose details are shown, by its id.
    selected: Option<u64>,
    sort: Sort,
    /// What is shown stays as it is.
    paused: bool,
    help: bool,
    /// What was typed of a new interval.
    typed: Option<String>,
    interval: Duration,
}

impl State {
    pub(super) fn sort(&self) -> Sort {
        self.sort
    }

    pub(super) fn paused(&self) -> bool {
        self.paused
    }

    pub(super) fn help(&self) -> bool {
        self.help
    }

    pub(super) fn typed(&self) -> Option<&str> {
        self.typed.as_deref()
    }

    pub(super) fn interval(&self) -> Duration {
        self.interval
    }

    /// Nothing yet; a frame every `interval`.
    pub(super) fn new(interval: Duration) -> Self {
        Self {
            interval,
            ..Self::default()
        }
    }

    /// A VM is there that has not answered yet.
    pub(super) fn expect(&mut self, id: u64, name: &str) {
        self.end(id, name, Standing::Silent(0));
    }

    /// A VM has answered at `now`, of the program's own clock.
    pub(super) fn answer(&mut self, id: u64, name: &str, reading: VmReading, now: Duration) {
        let line = match self.vms.iter().position(|line| line.id == id) {
            Some(index) => &mut self.vms[index],
            None => {
                self.vms.push(VmLine {
                    id,
                    name: name.to_owned(),
                    standing: Standing::Live,
                    reading: reading.clone(),
                    samples: Window::default(),
                    answered: now,
                });
                let last = self.vms.len() - 1;
                &mut self.vms[last]
            }
        };
        line.answered = now;
        line.standing = Standing::Live;
        if self.paused && line.reading.seconds.is_some() {
            return;
        }
        if let (Some(seconds), Some(samples)) = (reading.seconds, &reading.samples) {
            line.samples.push(seconds, samples.clone());
        }
        line.reading = reading;
    }

    /// A VM has ended, or cannot be looked at.
    pub(super) fn end(&mut self, id: u64, name: &str, standing: Standing) {
        match self.vms.iter_mut().find(|line| line.id == id) {
            Some(line) => line.standing = standing,
            None => self.vms.push(VmLine {
                id,
                name: name.to_owned(),
                standing,
                reading: VmReading::default(),
                samples: Window::default(),
                answered: Duration::ZERO,
            }),
        }
        let over = |line: &VmLine| !matches!(line.standing, Standing::Live | Standing::Silent(_));
        let ended = self.vms.iter().filter(|line| over(line)).count();
        if ended > ENDED
            && let Some(oldest) = self.vms.iter().position(over)
        {
            self.vms.remove(oldest);
        }
    }

    /// Those that have not answered for longer than they should are said to be silent.
    pub(super) fn pass_time(&mut self, now: Duration) {
        let patience = self.interval * 2 + Duration::from_secs(2);
        for line in &mut self.vms {
            if matches!(line.standing, Standing::Live | Standing::Silent(_)) {
                let since = now.saturating_sub(line.answered);
                line.standing = if since > patience {
                    Standing::Silent(since.as_secs())
                } else {
                    Standing::Live
                };
            }
        }
    }

    /// The VMs in their order.
    pub(super) fn vms(&self) -> Vec<&VmLine> {
        let mut vms: Vec<&VmLine> = self.vms.iter().collect();
        vms.sort_by(|a, b| a.name.cmp(&b.name).then(a.id.cmp(&b.id)));
        if let Some(event) = self.sort.event() {
            let rate = |line: &VmLine| line.per_second(event).unwrap_or(-1.0);
            vms.sort_by(|a, b| rate(b).total_cmp(&rate(a)));
        }
        vms
    }

    /// The vCPUs of a VM in their order.
    pub(super) fn vcpus<'a>(&self, reading: &'a VmReading) -> Vec<&'a VcpuReading> {
        let mut vcpus: Vec<&VcpuReading> = reading.vcpus.iter().collect();
        if let Some(event) = self.sort.event() {
            let rate = |vcpu: &VcpuReading| vcpu.per_second(event).unwrap_or(-1.0);
            vcpus.sort_by(|a, b| rate(b).total_cmp(&rate(a)));
        }
        vcpus
    }

    /// The place of the selected VM among [`State::vms`]; the first one if it is gone.
    pub(super) fn selected(&self) -> usize {
        let vms = self.vms();
        let found = vms.iter().position(|line| Some(line.id) == self.selected);
        found.unwrap_or(0)
    }

    fn select(&mut self, step: isize) {
        let vms = self.vms();
        let next = self.selected().checked_add_signed(step);
        let next = next.unwrap_or(0).min(vms.len().saturating_sub(1));
        self.selected = vms.get(next).map(|line| line.id);
    }

    /// A key was pressed.
    pub(super) fn key(&mut self, key: KeyPress) -> Option<Action> {
        if key == KeyPress::Interrupt {
            return Some(Action::Quit);
        }
        if let Some(typed) = &mut self.typed {
            match key {
                KeyPress::Char(digit @ ('0'..='9' | '.')) if typed.len() < 8 => typed.push(digit),
                KeyPress::Backspace => drop(typed.pop()),
                KeyPress::Enter => {
                    let seconds: Result<f64, _> = typed.parse();
                    self.typed = None;
                    let seconds = seconds.ok().filter(|it| INTERVALS.contains(it))?;
                    self.interval = Duration::from_secs_f64(seconds);
                    return Some(Action::Interval(self.interval));
                }
                KeyPress::Escape | KeyPress::Char('q') => self.typed = None,
                _ => {}
            }
            return None;
        }
        match key {
            KeyPress::Char('q') if !self.help => return Some(Action::Quit),
            KeyPress::Char('h' | '?') => self.help = !self.help,
            KeyPress::Escape | KeyPress::Char('q') => self.help = false,
            KeyPress::Char('p' | ' ') => self.paused = !self.paused,
            KeyPress::Char('s') => self.sort = self.sort.next(),
            KeyPress::Char('d') => self.typed = Some(String::new()),
            KeyPress::Before | KeyPress::Char('k') => self.select(-1),
            KeyPress::Next | KeyPress::Char('j') => {
                // Past the last one comes the first.
                if self.selected() + 1 == self.vms.len() {
                    self.selected = self.vms().first().map(|line| line.id);
                } else {
                    self.select(1);
                }
            }
            KeyPress::Suspend => return Some(Action::Suspend),
            KeyPress::Redraw => return Some(Action::Redraw),
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::super::reading::Rate;
    use super::*;

    fn reading(rates: &[Option<f64>]) -> VmReading {
        let vcpu = |(number, rate): (u32, &Option<f64>)| VcpuReading {
            vcpu: number,
            rates: vec![Rate {
                event: EXITS.to_owned(),
                per_second: *rate,
                missing: rate.is_none().then_some(Missing::NotCounted),
                provenance: None,
            }],
            ..VcpuReading::default()
        };
        VmReading {
            seconds: Some(1.0),
            vcpus: (0u32..).zip(rates).map(vcpu).collect(),
            ..VmReading::default()
        }
    }

    fn three() -> State {
        let mut state = State::new(Duration::from_secs(1));
        for (id, name, rate) in [(1, "c", Some(5.0)), (2, "a", None), (3, "b", Some(9.0))] {
            state.answer(id, name, reading(&[rate]), Duration::ZERO);
        }
        state
    }

    fn order(state: &State) -> String {
        state.vms().iter().map(|line| line.name.as_str()).collect()
    }

    #[test]
    fn keys_choose_and_sort() {
        let mut state = three();
        assert_eq!((order(&state).as_str(), state.selected()), ("abc", 0));
        let steps = [
            (KeyPress::Next, 1),
            (KeyPress::Char('j'), 2),
            (KeyPress::Next, 0),
            (KeyPress::Before, 0),
            (KeyPress::Next, 1),
        ];
        for (key, expected) in steps {
            assert_eq!(state.key(key), None);
            assert_eq!(state.selected(), expected, "{key:?}");
        }
        for _ in 0..3 {
            state.key(KeyPress::Char('s'));
        }
        // Nobody counted those of a; b stays selected.
        assert_eq!((order(&state).as_str(), state.selected()), ("bca", 0));
        let many = reading(&[Some(1.0), None, Some(3.0)]);
        let sorted: Vec<u32> = state.vcpus(&many).iter().map(|vcpu| vcpu.vcpu).collect();
        assert_eq!(sorted, [2, 0, 1]);
        assert_eq!(state.key(KeyPress::Char('q')), Some(Action::Quit));
        assert_eq!(state.key(KeyPress::Suspend), Some(Action::Suspend));
    }

    #[test]
    fn an_interval_is_typed() {
        let check = |typed: &str, expected: Option<f64>| {
            let mut state = three();
            state.key(KeyPress::Char('d'));
            for letter in typed.chars() {
                assert_eq!(state.key(KeyPress::Char(letter)), None);
            }
            let expected = expected.map(|it| Action::Interval(Duration::from_secs_f64(it)));
            assert_eq!(state.key(KeyPress::Enter), expected, "{typed}");
            assert_eq!(state.typed, None);
        };
        check("0.5", Some(0.5));
        check("12", Some(12.0));
        check("", None);
        check("0.01", None);
        check("9999", None);
        check("1.2.3", None);
        // Letters do not count.
        check("3x", Some(3.0));
    }

    #[test]
    fn a_pause_shows_what_was_there() {
        let mut state = three();
        state.key(KeyPress::Char('p'));
        state.answer(1, "c", reading(&[Some(7.0)]), Duration::from_secs(1));
        assert_eq!(state.vms()[2].per_second(EXITS), Some(5.0));
        state.end(1, "c", Standing::Ended);
        assert_eq!(state.vms()[2].standing, Standing::Ended);
        state.key(KeyPress::Char('p'));
        state.answer(3, "b", reading(&[Some(8.0)]), Duration::from_secs(1));
        assert_eq!(state.vms()[1].per_second(EXITS), Some(8.0));
    }

    #[test]
    fn what_one_vcpu_did_not_count_has_no_sum() {
        let mut state = three();
        let both = |a, b| reading(&[a, b]);
        for (rates, expected) in [
            (both(Some(1.0), Some(2.0)), Some(3.0)),
            (both(Some(1.0), None), None),
        ] {
            state.answer(2, "a", rates, Duration::ZERO);
            assert_eq!(state.vms()[0].per_second(EXITS), expected);
        }
        let mut idle = both(Some(1.0), None);
        idle.vcpus[1].rates[0].missing = Some(Missing::Idle);
        state.answer(2, "a", idle, Duration::ZERO);
        assert_eq!(state.vms()[0].per_second(EXITS), Some(1.0));
    }

    #[test]
    fn ends_and_silence_are_told() {
        let mut state = three();
        state.answer(3, "b", reading(&[]), Duration::from_secs(9));
        state.pass_time(Duration::from_secs(10));
        let standing = |state: &State| -> Vec<Standing> {
            state
                .vms()
                .iter()
                .map(|line| line.standing.clone())
                .collect()
        };
        let (live, silent) = (Standing::Live, Standing::Silent(10));
        assert_eq!(standing(&state), [silent.clone(), live.clone(), silent]);
        state.answer(1, "c", reading(&[]), Duration::from_secs(10));
        assert_eq!(standing(&state)[2], live);
        for id in 4..10 {
            state.end(id, "x", Standing::Ended);
        }
        let ended = standing(&state);
        assert_eq!(ended.iter().filter(|it| **it == Standing::Ended).count(), 5);
    }
}
