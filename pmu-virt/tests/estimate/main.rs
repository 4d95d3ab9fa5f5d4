//! Estimates of multiplexed counts.

mod workload;

use workload::{CONSTANT, Kind, PHASES, errors, quantile, run};

fn figures(kind: &Kind, seeds: std::ops::Range<u64>) -> Vec<(f64, f64)> {
    seeds.flat_map(|seed| errors(&run(kind, seed))).collect()
}

fn show(name: &str, pairs: &[(f64, f64)]) {
    let of = |which: fn(&(f64, f64)) -> f64, part| quantile(pairs.iter().map(which).collect(), part);
    let (l5, l9) = (of(|p| p.0, 0.5), of(|p| p.0, 0.9));
    let (e5, e9) = (of(|p| p.1, 0.5), of(|p| p.1, 0.9));
    println!(
        "{name:<24} {:>5} median {:.4} % of {:.4} % = {:.2}; p90 {:.4} % of {:.4} % = {:.2}; worse {:.2}",
        pairs.len(), e5 * 100.0, l5 * 100.0, e5 / l5, e9 * 100.0, l9 * 100.0, e9 / l9,
        pairs.iter().filter(|p| p.1 > p.0 * 1.05).count() as f64 / pairs.len() as f64,
    );
}

#[test]
fn explore() {
    show("20", &figures(&PHASES, 0..20));
    show("200", &figures(&PHASES, 1000..1200));
    for sets in 2..=4 {
        let kind = Kind { sets: (sets, sets), ..PHASES };
        show(&format!("sets {sets}"), &figures(&kind, 2000..2200));
    }
    for rounds in [0.1, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0] {
        let kind = Kind { phase_rounds: Some((rounds, rounds * 2.0)), ..PHASES };
        show(&format!("phases {rounds}..{}", rounds * 2.0), &figures(&kind, 3000..3200));
    }
    for apart in [0.0, 0.5, 1.0] {
        let kind = Kind { apart, ..PHASES };
        show(&format!("apart {apart}"), &figures(&kind, 4000..4200));
    }
    let kind = Kind { fixed: 1.0, ..PHASES };
    show("fixed", &figures(&kind, 5000..5200));
    show("constant", &figures(&CONSTANT, 0..200));
}
