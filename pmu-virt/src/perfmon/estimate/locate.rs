//! When within a blind gap a rate jumped: what the other events' jumps tell.

use super::jumps::Jump;

/// How sure it is beforehand that two events with jumps at about the same time
/// jumped together, and how many observed jumps that belief outweighs.
const BELIEF: f64 = 0.8;
const BELIEF_WEIGHT: f64 = 2.0;
/// No two events are taken for inseparable.
const MOST: f64 = 0.98;

/// A jump with its place in time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Boundary {
    pub(super) at: f64,
    /// See [`Jump::within`].
    pub(super) within: Option<usize>,
}

/// Places all jumps of `event` in a window of `span` nanoseconds.
pub(super) fn boundaries(all: &[Vec<Jump>], event: usize, span: f64) -> Vec<Boundary> {
    let Some(own) = all.get(event) else {
        return Vec::new();
    };
    let others: Vec<(&[Jump], f64)> = all
        .iter()
        .enumerate()
        .filter(|(other, jumps)| *other != event && !jumps.is_empty())
        .map(|(_, jumps)| (jumps.as_slice(), together(own, jumps, span)))
        .filter(|(_, sure)| *sure > 0.0)
        .collect();
    own.iter()
        .map(|jump| Boundary {
            at: place(jump, &others),
            within: jump.within,
        })
        .collect()
}

/// How likely it is that a jump of `own` which meets one of `other` is the same
/// change of phase: how much more often they meet than chance has them meet.
fn together(own: &[Jump], other: &[Jump], span: f64) -> f64 {
    let count = own.len() as f64;
    if own.is_empty() || span <= 0.0 {
        return 0.0;
    }
    let met = own.iter().filter(|jump| other.iter().any(|o| o.meets(jump)));
    let share = (met.count() as f64 + BELIEF * BELIEF_WEIGHT) / (count + BELIEF_WEIGHT);
    let width = own.iter().map(Jump::width).sum::<f64>() / count;
    let covered: f64 = other.iter().map(|jump| jump.width() + width).sum();
    let chance = (covered / span).min(1.0);
    if chance >= 1.0 {
        return 0.0;
    }
    ((share - chance) / (1.0 - chance)).clamp(0.0, MOST)
}

/// The mean of where the jump may have been, each place weighted by how well
/// it explains the others' jumps.
fn place(jump: &Jump, others: &[(&[Jump], f64)]) -> f64 {
    let width = jump.width();
    let middle = jump.low + width / 2.0;
    if width <= 0.0 {
        return middle;
    }
    let least = width * 1e-6;
    let near: Vec<(Vec<Jump>, f64)> = others
        .iter()
        .map(|(jumps, sure)| {
            let meets = jumps.iter().filter(|other| other.meets(jump));
            let wide = |other: &Jump| Jump {
                low: other.low - least,
                high: other.high + least,
                ..*other
            };
            (meets.map(wide).collect::<Vec<_>>(), *sure)
        })
        .filter(|(jumps, _)| !jumps.is_empty())
        .collect();
    let mut edges = vec![jump.low, jump.high];
    let ends = near.iter().flat_map(|(jumps, _)| jumps).flat_map(|j| [j.low, j.high]);
    edges.extend(ends.filter(|edge| jump.low < *edge && *edge < jump.high));
    edges.sort_by(f64::total_cmp);
    let (mut weights, mut moments) = (0.0, 0.0);
    for pair in edges.windows(2) {
        let (length, middle) = (pair[1] - pair[0], (pair[0] + pair[1]) / 2.0);
        let fits = near.iter().map(|(jumps, sure)| {
            let here = jumps.iter().filter(|j| j.low <= middle && middle <= j.high);
            let density: f64 = here.map(|j| width / j.width()).sum();
            1.0 - sure + sure * density / jumps.len() as f64
        });
        let weight = length * fits.product::<f64>();
        weights += weight;
        moments += weight * middle;
    }
    match weights > 0.0 && weights.is_finite() {
        true => (moments / weights).clamp(jump.low, jump.high),
        false => middle,
    }
}
