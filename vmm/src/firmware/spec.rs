//! The syntax of `--firmware-counter`:
//! `EVENT[,on=PMCn|FIXEDn|any][,access=private|shared][,error=drop|fault|fault-rdpmc]
//! [,layer=any|firmware][,read=VALUE][,lend][,yield][,keep][,isolate]`.

use arbiter::{CounterId, MAX_FIXED, MAX_PROGRAMMABLE};
use thiserror::Error;

/// The possible words behind the event.
const WORDS: &str = "on=PMCn, on=FIXEDn, on=any, access=private, access=shared, error=drop, \
                     error=fault, error=fault-rdpmc, layer=any, layer=firmware, read=VALUE, lend, yield, keep or isolate";

/// A specification that cannot be used; the text names the word that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SpecError {
    /// Nothing before the first comma.
    #[error("'{0}' names no event; give EVENT[,WORD...], e.g. cycles,on=any")]
    NoEvent(String),
    /// A word that means nothing.
    #[error("'{word}' in '{spec}' is not possible; give {WORDS}")]
    Word {
        /// All of it.
        spec: String,
        word: String,
    },
    /// A value that its key does not have.
    #[error("'{word}' in '{spec}': give {allowed}")]
    Value {
        /// All of it.
        spec: String,
        /// Key and value.
        word: String,
        /// The possible ones.
        allowed: &'static str,
    },
    /// A key that is there twice.
    #[error("'{word}' in '{spec}': it is given twice; leave one out")]
    Twice {
        /// All of it.
        spec: String,
        /// The second one.
        word: String,
    },
}

/// The counter that is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WantedCounter {
    /// Any that can count the event.
    #[default]
    Any,
    /// This one.
    At(CounterId),
}

/// The result of an access with a wrong cookie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ErrorMode {
    /// Reads give the read value, writes vanish.
    #[default]
    Drop,
    /// #GP, but RDPMC of the kernel is dropped.
    Fault,
    /// #GP.
    FaultRdpmc,
}

/// One counter that the firmware is asked to reserve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CounterSpec {
    /// As it was given.
    pub text: String,
    /// The event's name.
    pub event: String,
    pub place: WantedCounter,
    /// Whether only the owner may use it; else all may.
    pub private: bool,
    /// The result of accesses by others.
    pub error: ErrorMode,
    /// Whether its cookies are valid in the firmware's layer alone.
    pub firmware_only: bool,
    /// What a dropped read yields.
    pub read: u64,
    /// Whether it may be revoked when another layer is short.
    pub lend: bool,
    /// Whether the firmware yields it to a layer that asks; else it refuses.
    pub yields: bool,
    /// Whether the cookies stay in the firmware's memory.
    pub keep: bool,
    /// Whether registers that several counters share are kept from it.
    pub isolate: bool,
}

impl CounterSpec {
    /// Reads one specification. The event's name is not looked up.
    ///
    /// # Errors
    /// The first word that is wrong.
    pub fn parse(text: &str) -> Result<Self, SpecError> {
        let mut words = text.split(',');
        let event = words.next().unwrap_or_default();
        if event.is_empty() {
            return Err(SpecError::NoEvent(text.to_owned()));
        }
        let mut spec = Self {
            text: text.to_owned(),
            event: event.to_owned(),
            place: WantedCounter::Any,
            private: true,
            error: ErrorMode::Drop,
            firmware_only: false,
            read: 0,
            lend: false,
            yields: false,
            keep: false,
            isolate: false,
        };
        let mut seen = Vec::new();
        for word in words {
            let key = word.split_once('=').map_or(word, |(key, _)| key);
            if seen.contains(&key) {
                return Err(SpecError::Twice {
                    spec: text.to_owned(),
                    word: word.to_owned(),
                });
            }
            seen.push(key);
            spec.take(word)?;
        }
        Ok(spec)
    }

    fn take(&mut self, word: &str) -> Result<(), SpecError> {
        let bad = |allowed| SpecError::Value {
            spec: self.text.clone(),
            word: word.to_owned(),
            allowed,
        };
        match word.split_once('=') {
            None => match word {
                "lend" => self.lend = true,
                "yield" => self.yields = true,
                "keep" => self.keep = true,
                "isolate" => self.isolate = true,
                _ => return Err(self.unknown(word)),
            },
            Some(("on", value)) => {
                let allowed = "on=PMC0 to on=PMC31, on=FIXED0 to on=FIXED31 or on=any";
                self.place = place(value).ok_or_else(|| bad(allowed))?;
            }
            Some(("access", value)) => {
                self.private = match value {
                    "private" => true,
                    "shared" => false,
                    _ => return Err(bad("access=private or access=shared")),
                }
            }
            Some(("error", value)) => {
                self.error = match value {
                    "drop" => ErrorMode::Drop,
                    "fault" => ErrorMode::Fault,
                    "fault-rdpmc" => ErrorMode::FaultRdpmc,
                    _ => return Err(bad("error=drop, error=fault or error=fault-rdpmc")),
                }
            }
            Some(("layer", value)) => {
                self.firmware_only = match value {
                    "any" => false,
                    "firmware" => true,
                    _ => return Err(bad("layer=any or layer=firmware")),
                }
            }
            Some(("read", value)) => {
                let allowed = "a number, decimal or hexadecimal with 0x";
                self.read = number(value).ok_or_else(|| bad(allowed))?;
            }
            Some(_) => return Err(self.unknown(word)),
        }
        Ok(())
    }

    fn unknown(&self, word: &str) -> SpecError {
        SpecError::Word {
            spec: self.text.clone(),
            word: word.to_owned(),
        }
    }
}

fn place(text: &str) -> Option<WantedCounter> {
    let index = |digits: &str, limit: u8| {
        let plain = digits.bytes().all(|digit| digit.is_ascii_digit());
        let index: u8 = digits.parse().ok()?;
        (plain && index < limit).then_some(index)
    };
    if text == "any" {
        return Some(WantedCounter::Any);
    }
    let counter = if let Some(digits) = text.strip_prefix("PMC") {
        CounterId::Programmable(index(digits, MAX_PROGRAMMABLE)?)
    } else {
        CounterId::Fixed(index(text.strip_prefix("FIXED")?, MAX_FIXED)?)
    };
    Some(WantedCounter::At(counter))
}

fn number(text: &str) -> Option<u64> {
    let (digits, radix) = match text.strip_prefix("0x") {
        Some(digits) => (digits, 16),
        None => (text, 10),
    };
    // `from_str_radix` would also take a sign.
    let plain = digits.chars().all(|digit| digit.is_digit(radix));
    plain
        .then(|| u64::from_str_radix(digits, radix).ok())
        .flatten()
}
