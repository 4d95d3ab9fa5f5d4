//! When within a blind gap a rate jumped: what the other events' jumps tell.

use super::jumps::{Jump, Span};

/// How sure it is beforehand that two events which jump at about the same time
/// jump together; as much as one jump seen tells.
const BELIEF: f64 = 0.8;
/// No two events are taken for inseparable.
const MOST: f64 = 0.98;
/// A jump's place is never known better than to this part of a gap.
const FINEST: f64 = 1e-6;

/// A jump with its place in time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Boundary {
    /// In nanoseconds from the begin of the window.
    pub(super) at: f64,
    /// The slice that the event was counted in and that has it, if any.
    pub(super) within: Option<usize>,
}

/// Another event.
#[derive(Clone, Copy, Debug)]
pub(super) struct Other<'a> {
    pub(super) jumps: &'a [Jump],
    /// How likely it is that a jump of this one that meets one of the event's
    /// is the same change of phase: above 0, below 1.
    pub(super) sure: f64,
}

/// The events that have something to say of the jumps of `event`, in a window
/// of `length` nanoseconds.
pub(super) fn others<'a>(all: &[&'a [Jump]], event: usize, length: f64) -> Vec<Other<'a>> {
    let Some(own) = all.get(event) else {
        return Vec::new();
    };
    let each = all.iter().enumerate();
    each.filter(|(other, jumps)| *other != event && !jumps.is_empty())
        .map(|(_, jumps)| Other {
            jumps,
            sure: together(own, jumps, length),
        })
        .filter(|other| other.sure > 0.0)
        .collect()
}

/// Places the jumps of `event`.
pub(super) fn boundaries(all: &[&[Jump]], event: usize, length: f64) -> Vec<Boundary> {
    let others = others(all, event, length);
    let own = all.get(event).copied().unwrap_or_default();
    let place = |jump: &Jump| Boundary {
        at: place(&jump.span, &others),
        within: jump.within.map(|within| within.slice),
    };
    own.iter().map(place).collect()
}

/// How much more often jumps of `own` meet some of `other` than chance has
/// them meet, from 0 for no more to 1 for always.
fn together(own: &[Jump], other: &[Jump], length: f64) -> f64 {
    let count = own.len() as f64;
    let meets = |jump: &&Jump| other.iter().any(|other| other.span.meets(&jump.span));
    let met = own.iter().filter(meets).count() as f64;
    let share = (met + BELIEF) / (count + 1.0);
    let mean = own.iter().map(|jump| jump.span.width()).sum::<f64>() / count.max(1.0);
    let covered: f64 = other.iter().map(|jump| jump.span.width() + mean).sum();
    let chance = covered / length;
    if chance < 1.0 {
        ((share - chance) / (1.0 - chance)).clamp(0.0, MOST)
    } else {
        0.0
    }
}

/// The mean of the times at which the jump may have been, each weighted by how
/// well it explains the others' jumps. The middle if they tell nothing.
fn place(jump: &Span, others: &[Other<'_>]) -> f64 {
    let width = jump.width();
    let middle = (jump.low + jump.high) / 2.0;
    let near: Vec<(Vec<Span>, f64)> = others
        .iter()
        .map(|other| (near(jump, other.jumps), other.sure))
        .filter(|(spans, _)| !spans.is_empty())
        .collect();
    let ends = near.iter().flat_map(|(spans, _)| spans);
    let ends = ends.flat_map(|span| [span.low, span.high]);
    let mut edges = vec![jump.low, jump.high];
    edges.extend(ends.filter(|edge| jump.low < *edge && *edge < jump.high));
    edges.sort_by(f64::total_cmp);
    let (mut weights, mut moments) = (0.0, 0.0);
    for pair in edges.windows(2) {
        let middle = (pair[0] + pair[1]) / 2.0;
        let fit = |(spans, sure): &(Vec<Span>, f64)| {
            let here = spans.iter().filter(|s| s.low <= middle && middle <= s.high);
            let density: f64 = here.map(|span| width / span.width()).sum();
            // Together, its jump is as likely anywhere in its span; apart, it
            // is as likely anywhere.
            sure * density / spans.len() as f64 + (1.0 - sure)
        };
        let weight = (pair[1] - pair[0]) * near.iter().map(fit).product::<f64>();
        weights += weight;
        moments += weight * middle;
    }
    if weights > 0.0 && weights.is_finite() {
        (moments / weights).clamp(jump.low, jump.high)
    } else {
        middle
    }
}

/// The spans that meet that of a jump, none of them a mere point.
fn near(jump: &Span, others: &[Jump]) -> Vec<Span> {
    let least = jump.width() * FINEST;
    let meets = others.iter().filter(|other| other.span.meets(jump));
    let wide = |other: &Jump| Span {
        low: other.span.low - least,
        high: other.span.high + least,
    };
    meets.map(wide).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jumps(spans: &[(f64, f64)]) -> Vec<Jump> {
        let jump = |&(low, high): &(f64, f64)| Jump::blind(Span { low, high });
        spans.iter().map(jump).collect()
    }

    /// Where the first event's jumps are placed, of a window of 10,000 ns.
    fn check(events: &[&[(f64, f64)]], expected: &[(f64, f64)]) {
        let all: Vec<Vec<Jump>> = events.iter().map(|spans| jumps(spans)).collect();
        let all: Vec<&[Jump]> = all.iter().map(Vec::as_slice).collect();
        let found = boundaries(&all, 0, 10_000.0);
        assert_eq!(found.len(), expected.len(), "{events:?}");
        for (boundary, (low, high)) in found.iter().zip(expected) {
            let at = boundary.at;
            assert!(*low <= at && at <= *high, "{events:?}: {at}");
        }
    }

    #[test]
    fn a_jump_is_where_others_jumped() {
        // Nobody knows: the middle.
        check(&[&[(100.0, 200.0)]], &[(150.0, 150.0)]);
        check(&[&[(100.0, 200.0)], &[(300.0, 301.0)]], &[(150.0, 150.0)]);
        check(&[&[(100.0, 100.0)], &[(90.0, 110.0)]], &[(100.0, 100.0)]);
        // One that knows it well, and two that narrow it down.
        let own = &[(100.0, 200.0), (900.0, 1000.0)][..];
        check(
            &[own, &[(110.0, 112.0), (990.0, 992.0)]],
            &[(110.0, 118.0), (970.0, 992.0)],
        );
        check(
            &[own, &[(0.0, 130.0)], &[(120.0, 300.0)]],
            &[(120.0, 148.0), (950.0, 950.0)],
        );
    }

    #[test]
    fn an_event_that_jumps_all_the_time_tells_nothing() {
        let often: Vec<(f64, f64)> = (0..100)
            .map(|at| (f64::from(at) * 100.0, f64::from(at) * 100.0 + 60.0))
            .collect();
        check(&[&[(100.0, 200.0)], &often], &[(150.0, 150.0)]);
    }
}
