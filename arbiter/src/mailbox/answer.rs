//! What a layer reads about its last request: `ANSWER` and `GRANTED`.

use crate::CounterSet;
use crate::abi;
use crate::reason::Reason;

/// What became of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Nothing was asked yet.
    #[default]
    Nothing,
    /// It was done, with these counters.
    Granted(CounterSet),
    /// It was not.
    Refused(Reason),
    /// Another layer is asked, or told that it will lose a counter.
    Pending,
}

/// The answer to a layer's last request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Answer {
    /// The request's number: 1 to 65535, then 1 again; 0 if nothing was asked.
    pub number: u16,
    /// What became of it.
    pub outcome: Outcome,
}

impl Answer {
    /// The value of `ANSWER`.
    pub fn word(self) -> u64 {
        let state = match self.outcome {
            Outcome::Nothing => abi::ANSWER_NONE,
            Outcome::Granted(_) => abi::ANSWER_GRANTED,
            Outcome::Refused(reason) => {
                abi::ANSWER_REFUSED | reason.code() << abi::ANSWER_REASON_SHIFT
            }
            Outcome::Pending => abi::ANSWER_PENDING,
        };
        state | u64::from(self.number) << abi::ANSWER_NUMBER_SHIFT
    }

    /// The value of `GRANTED`.
    pub fn granted(self) -> CounterSet {
        match self.outcome {
            Outcome::Granted(counters) => counters,
            Outcome::Nothing | Outcome::Refused(_) | Outcome::Pending => CounterSet::EMPTY,
        }
    }
}
