//! Against models that are too simple to be wrong.

use irqchip::Delivery;
use proptest::prelude::*;

use crate::board::*;

#[derive(Debug, Clone)]
enum Step {
    Raise(u8),
    Take,
    End,
    Priority(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => any::<u8>().prop_map(Step::Raise),
        3 => Just(Step::Take),
        2 => Just(Step::End),
        1 => any::<u8>().prop_map(Step::Priority),
    ]
}

/// Lists of what is requested and what is in service.
#[derive(Default)]
struct Lists {
    requested: Vec<u8>,
    serving: Vec<u8>,
    tpr: u8,
}

impl Lists {
    fn next(&self) -> Option<u8> {
        let vector = *self.requested.iter().max()?;
        let busy = self.serving.iter().copied().max().unwrap_or(0) >> 4;
        (vector >> 4 > busy && vector >> 4 > self.tpr >> 4).then_some(vector)
    }

    fn step(&mut self, step: &Step) -> Option<u8> {
        match *step {
            Step::Raise(vector) if vector < 16 || self.requested.contains(&vector) => {}
            Step::Raise(vector) => self.requested.push(vector),
            Step::Take => {
                let vector = self.next()?;
                self.requested.retain(|other| *other != vector);
                self.serving.push(vector);
                return Some(vector);
            }
            Step::End => {
                let ended = self.serving.iter().copied().max();
                self.serving.retain(|vector| Some(*vector) != ended);
            }
            Step::Priority(tpr) => self.tpr = tpr,
        }
        None
    }
}

fn words(vectors: &[u8]) -> [u32; 8] {
    let mut words = [0; 8];
    for vector in vectors {
        words[usize::from(vector / 32)] |= 1 << (vector % 32);
    }
    words
}

fn shown(board: &mut Board, first: u8) -> [u32; 8] {
    std::array::from_fn(|at| board.load(0, first + u8::try_from(at).unwrap()))
}

/// A timer as somebody with a pencil would run it: expiries until `end`.
fn expiries(start: u64, ticks: u64, periodic: bool, end: u64) -> Vec<u64> {
    let all = (1..).map(|period| start + period * ticks);
    let most = if periodic { usize::MAX } else { 1 };
    all.take(most).take_while(|at| *at <= end).collect()
}

proptest! {
    #[test]
    fn requests_are_served_in_order(steps in prop::collection::vec(step(), 0..200)) {
        let mut board = Board::new(1);
        let mut lists = Lists::default();
        for step in &steps {
            let expected = lists.step(step);
            let taken = match *step {
                Step::Raise(vector) => { board.chips.raise(0, vector); None }
                Step::Take => board.vector(0),
                Step::End => { board.store(0, EOI, 0); None }
                Step::Priority(tpr) => { board.store(0, TPR, tpr.into()); None }
            };
            prop_assert_eq!(taken, expected);
            prop_assert_eq!(shown(&mut board, IRR), words(&lists.requested));
            prop_assert_eq!(shown(&mut board, ISR), words(&lists.serving));
            let pending = lists.next().map(Delivery::Vector);
            prop_assert_eq!(board.pending(0), Vec::from_iter(pending));
        }
    }

    /// From deadline to deadline, a timer expires as often as it should, at the same times
    /// whatever looks lie between.
    #[test]
    fn timers_expire_when_they_should(
        start in 0u64..5000,
        count in 1u32..500,
        divide in 0u32..16,
        periodic: bool,
        looks in prop::collection::vec(1u64..20_000, 0..30),
    ) {
        let mut board = Board::new(1);
        board.advance(start);
        board.store(0, DIVIDE, divide);
        board.store(0, LVT_TIMER, 0x40 | u32::from(periodic) << 17);
        board.store(0, INITIAL, count);
        let by = [2, 4, 8, 16, 32, 64, 128, 1];
        let by = by[usize::try_from(divide >> 1 & 4 | divide & 3).unwrap()];
        let mut seen = Vec::new();
        let mut last = 0;
        for ticks in looks {
            let end = board.now + ticks;
            while let Some(next) = board.chips.next_deadline().filter(|next| *next <= end) {
                prop_assert!(next > last, "{next} after {last}");
                last = board.sleep();
                prop_assert_eq!(board.vector(0), Some(0x40));
                board.store(0, EOI, 0);
                seen.push(next);
            }
            board.advance(end - board.now);
            prop_assert_eq!(board.pending(0), []);
            prop_assert!(board.load(0, CURRENT) <= count);
        }
        let expected = expiries(start, 2 * by * u64::from(count), periodic, board.now);
        prop_assert_eq!(seen, expected);
    }

    /// Who looks more often sees nothing else.
    #[test]
    fn looking_changes_nothing(
        count in 1u32..500,
        reload in 1u16..2000,
        looks in prop::collection::vec(1u64..20_000, 1..30),
    ) {
        let mut board = Board::new(1);
        board.store(0, DIVIDE, 0xb);
        board.store(0, LVT_TIMER, 0x2_0040);
        board.store(0, INITIAL, count);
        board.wire(2, 0, 0x30);
        board.set_port(0x43, 0x34);
        let [low, high] = reload.to_le_bytes();
        board.set_port(0x40, low);
        board.set_port(0x40, high);
        let mut rare = Board { chips: board.chips.clone(), now: 0 };
        for ticks in looks {
            board.advance(ticks);
        }
        rare.advance(board.now);
        prop_assert_eq!(board.chips, rare.chips);
    }
}
