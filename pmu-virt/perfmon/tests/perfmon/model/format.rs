//! Sampling formats (§3.5, §3.6, §6.3.1, and `perfmon_abi::compact`), as lists and
//! bytes.

use super::puppet::Answer;
pub(crate) use super::ring::Compact;
use perfmon::Moment;
use perfmon_abi::consts as pfm;

/// PMDs that there are: counters and virtual ones.
pub(crate) const NUM_PMDS: usize = 23;
/// Bytes of `pfm_default_smpl_hdr_t` and of `pfm_default_smpl_entry_t`.
const DEFAULT_HEADER: usize = 40;
const ENTRY: usize = 40;
/// Bytes of the largest sample (§3.6.5).
pub(crate) const MOST: usize = ENTRY + 8 * NUM_PMDS;

/// What a handler is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) pmd: u16,
    pub(crate) set: u16,
    pub(crate) last: u64,
    pub(crate) value: u64,
    pub(crate) eventid: u64,
    pub(crate) notify: bool,
    pub(crate) values: Vec<(u16, u64)>,
}

/// A format and its buffer.
#[derive(Clone, Debug)]
pub(crate) enum Format {
    /// One that answers as a script says.
    Puppet(Vec<Answer>, usize),
    /// The default format: its buffer.
    Default(Vec<u8>),
    Double(Double),
    Compact(Compact),
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Double {
    pub(crate) size: usize,
    pub(crate) flags: u32,
    pub(crate) halves: [Half; 2],
    /// Where the next sample goes; none while the tool has both.
    pub(crate) active: Option<usize>,
    pub(crate) overflows: u64,
    pub(crate) lost: u64,
    fillings: u64,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Half {
    pub(crate) samples: Vec<Vec<u8>>,
    pub(crate) filling: u64,
    /// The tool has it.
    pub(crate) given: bool,
}

/// The buffer is full: masked, whoever wants to be notified is, and is waited for.
fn full(asked: &Asked) -> Answer {
    Answer {
        notify: true,
        block: asked.notify,
        mask: true,
        ..Answer::default()
    }
}

pub(super) const GO_ON: Answer = Answer {
    notify: false,
    reset: true,
    block: false,
    mask: false,
    fail: false,
};

impl Format {
    /// The default format's, with flags and a size of the buffer.
    pub(crate) fn default_format(flags: u32, size: usize) -> Self {
        let mut bytes = vec![0; size];
        put(&mut bytes, 8, DEFAULT_HEADER as u64);
        put(&mut bytes, 24, size as u64);
        put(&mut bytes, 32, 1 << 16 | u64::from(flags) << 32);
        Format::Default(bytes)
    }

    pub(crate) fn double(flags: u32, size: usize) -> Self {
        let mut double = Double {
            size,
            flags,
            active: Some(0),
            fillings: 1,
            ..Double::default()
        };
        double.halves[0].filling = 1;
        Format::Double(double)
    }

    pub(crate) fn compact(block: usize) -> Self {
        Format::Compact(Compact::new(block))
    }

    /// What becomes of an overflow.
    pub(crate) fn handle(&mut self, asked: &Asked, moment: &Moment) -> Answer {
        match self {
            Format::Puppet(answers, next) => Answer::next(answers, next),
            Format::Default(bytes) => default_handler(bytes, asked, moment),
            Format::Double(double) => double.handle(asked, moment),
            Format::Compact(compact) => compact.handle(asked, moment),
        }
    }

    /// What becomes of PFM_RESTART: resets and masks, or fails.
    pub(crate) fn restart(&mut self, active: bool) -> Answer {
        match self {
            Format::Puppet(answers, next) => return Answer::next(answers, next),
            Format::Default(bytes) => {
                put(bytes, 0, 0);
                put(bytes, 8, DEFAULT_HEADER as u64);
            }
            Format::Double(double) => double.restart(),
            Format::Compact(_) => {}
        }
        Answer {
            reset: !active,
            ..Answer::default()
        }
    }
}

fn get(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

fn put(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

/// A sample as bytes (§3.6.4).
fn sample(flags: u32, asked: &Asked, moment: &Moment) -> Vec<u8> {
    let mut words = Vec::new();
    if flags & pfm::PFM_DFL_SMPL_IIP_HDR != 0 {
        words.push(moment.ip);
    } else if flags & pfm::PFM_DFL_SMPL_NO_HDR == 0 {
        let ids = [moment.vm, moment.vcpu].map(|id| u64::from(id.cast_unsigned()));
        words.push(ids[0] | ids[1] << 32);
        let place = u64::from(moment.core) << 32;
        words.push(u64::from(asked.pmd) | u64::from(asked.set) << 16 | place);
        words.extend([asked.last, moment.tsc, moment.ip]);
    }
    words.extend(asked.values.iter().map(|&(_, value)| value));
    words.into_iter().flat_map(u64::to_le_bytes).collect()
}

fn default_handler(bytes: &mut [u8], asked: &Asked, moment: &Moment) -> Answer {
    let flags = u32::try_from(get(bytes, 32) >> 32).expect("32 bits");
    let at = usize::try_from(get(bytes, 8)).expect("an offset");
    let sample = sample(flags, asked, moment);
    let had_room = bytes.len() - at >= MOST;
    let end = at + sample.len();
    if end <= bytes.len() {
        bytes[at..end].copy_from_slice(&sample);
        let count = get(bytes, 0);
        put(bytes, 0, count + 1);
        put(bytes, 8, end as u64);
        if bytes.len() - end >= MOST {
            return GO_ON;
        }
        if had_room {
            let overflows = get(bytes, 16);
            put(bytes, 16, overflows + 1);
        }
    }
    full(asked)
}

impl Double {
    /// Bytes of the header, and of each half: multiples of 8.
    pub(crate) const HEADER: usize = 112;
    pub(crate) fn half_size(&self) -> usize {
        (self.size - Self::HEADER) / 2 / 8 * 8
    }

    fn room(&self, half: usize) -> usize {
        let used: usize = self.halves[half].samples.iter().map(Vec::len).sum();
        self.half_size() - used
    }

    fn begin(&mut self, half: usize) {
        self.fillings += 1;
        self.halves[half] = Half {
            samples: Vec::new(),
            filling: self.fillings,
            given: false,
        };
        self.active = Some(half);
    }

    /// The tool gets this half, if the other one is free to go on with.
    fn give(&mut self, half: usize) -> bool {
        let free = !self.halves[1 - half].given;
        if free {
            self.halves[half].given = true;
            self.begin(1 - half);
        }
        free
    }

    fn handle(&mut self, asked: &Asked, moment: &Moment) -> Answer {
        let Some(mut half) = self.active else {
            self.lost += 1;
            return full(asked);
        };
        let mut notify = false;
        if self.room(half) < MOST {
            // It waits since it was filled, as the tool had the other one.
            if self.give(half) {
                notify = true;
                half = 1 - half;
            } else {
                self.lost += self.halves[half].samples.len() as u64;
                self.begin(half);
            }
        }
        let sample = sample(self.flags, asked, moment);
        self.halves[half].samples.push(sample);
        if self.room(half) < MOST {
            self.overflows += 1;
            if self.give(half) {
                notify = true;
            } else if self.flags & pfm::PFM_DOUBLE_FMT_MASK_WHEN_FULL != 0 {
                self.halves[half].given = true;
                self.active = None;
                return full(asked);
            }
        }
        Answer { notify, ..GO_ON }
    }

    /// The half that the tool has had longest is free again.
    fn restart(&mut self) {
        let given = (0..2).filter(|&half| self.halves[half].given);
        let Some(oldest) = given.min_by_key(|&half| self.halves[half].filling) else {
            return;
        };
        self.halves[oldest].given = false;
        if self.active.is_none() {
            self.begin(oldest);
        }
    }
}
