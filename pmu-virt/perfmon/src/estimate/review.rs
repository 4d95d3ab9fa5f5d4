//! A second look at samples that were taken for mixtures of two phases.

use super::jumps::{Jump, Span, Track, Within};
use super::locate::{Other, others};

/// What the others have to tell for a busy event's sample to be a mixture.
const SUPPORT: f64 = 0.3;

/// The jumps of all events, with those samples split from their neighbours that
/// are phases of their own rather: the other events' jumps were about the blind
/// times around the sample, not within it.
pub(super) fn reviewed(tracks: &[Track], length: f64) -> Vec<Vec<Jump>> {
    let jumps: Vec<&[Jump]> = tracks.iter().map(|track| &*track.jumps).collect();
    let one = |(event, track): (usize, &Track)| {
        let others = others(&jumps, event, length);
        let doubt = if track.busy { SUPPORT } else { 0.0 };
        let look = |jump: &Jump| match jump.within {
            Some(within) if against(&within, &others) + doubt > 0.0 => {
                within.around.map(Jump::blind).to_vec()
            }
            _ => vec![*jump],
        };
        track.jumps.iter().flat_map(look).collect()
    };
    tracks.iter().enumerate().map(one).collect()
}

/// How much more of the others' jumps is around a sample than within it.
fn against(within: &Within, others: &[Other<'_>]) -> f64 {
    let [before, after] = within.around;
    let one = |other: &Other<'_>| {
        let most = |span: &Span| {
            let parts = other.jumps.iter().map(|jump| part(&jump.span, span));
            parts.fold(0.0, f64::max)
        };
        // One wide jump that covers both is not two jumps.
        let around = |jump: &&Jump| part(&jump.span, &before) + part(&jump.span, &after) > 0.0;
        let both = match other.jumps.iter().filter(around).count() {
            0 | 1 => 0.0,
            _ => most(&before).min(most(&after)),
        };
        other.sure * (both - most(&within.sample))
    };
    others.iter().map(one).sum()
}

/// The part of a jump's span that is in another, from 0 to 1.
fn part(jump: &Span, of: &Span) -> f64 {
    let common = jump.high.min(of.high) - jump.low.max(of.low);
    match jump.width() > 0.0 {
        true => common.max(0.0) / jump.width(),
        false if of.low <= jump.low && jump.low <= of.high => 1.0,
        false => 0.0,
    }
}
