//! A plot of one metric: a group of bars for each variant, a bar for each class.

use arbiter_lab::{Cell, Estimate, Metric, Who};
use plotters::coord::Shift;
use plotters::drawing::DrawingAreaErrorKind;
use plotters::prelude::{
    BLACK, ChartBuilder, Color, DrawingArea, ErrorBar, IntoDrawingArea, IntoFont, Palette,
    Palette99, Rectangle, SVGBackend, SeriesLabelPosition, WHITE,
};

use super::rows::Report;

type Drawn<T> = Result<T, DrawingAreaErrorKind<std::io::Error>>;

const HEIGHT: u32 = 340;
/// Part of a group's place that its bars take.
const FILLED: f64 = 0.84;

/// One bar: its class, its left and right edge, and its value.
type Bar = (usize, f64, f64, Estimate);

/// The plot as an SVG element.
pub(super) fn of_metric(report: &Report, metric: Metric) -> Drawn<String> {
    let mut svg = String::new();
    let groups = u32::try_from(report.cells.len()).unwrap_or(u32::MAX);
    let width = groups.saturating_mul(150).clamp(500, 4000);
    let area = SVGBackend::with_string(&mut svg, (width, HEIGHT)).into_drawing_area();
    draw(&area, report, metric)?;
    area.present()?;
    drop(area);
    Ok(svg)
}

fn draw(area: &DrawingArea<SVGBackend<'_>, Shift>, report: &Report, metric: Metric) -> Drawn<()> {
    let cells = &report.cells;
    area.fill(&WHITE)?;
    let classes: Vec<Who> = report.summed().collect();
    let mut bars: Vec<Bar> = Vec::new();
    for (group, cell) in (0_u32..).zip(cells) {
        let known = classes.iter().enumerate();
        let known = known.filter_map(|(class, who)| Some((class, cell.estimate(metric, *who)?)));
        let known: Vec<_> = known.collect();
        let width = FILLED / known.len().max(1) as f64;
        let left = f64::from(group) + (1.0 - FILLED) / 2.0;
        for (place, (class, estimate)) in known.into_iter().enumerate() {
            let from = left + place as f64 * width;
            bars.push((class, from, from + width, estimate));
        }
    }
    let high = |(.., one): &Bar| one.mean + one.half.unwrap_or(0.0);
    let top = bars.iter().map(high).fold(0.0_f64, f64::max);
    let top = if top > 0.0 { top * 1.1 } else { 1.0 };
    let mut chart = ChartBuilder::on(area)
        .margin(8)
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..cells.len().max(1) as f64, 0.0..top)?;
    let name = |x: &f64| group_name(cells, *x);
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(2 * cells.len() + 1)
        .x_label_formatter(&name)
        .label_style(("sans-serif", 12).into_font())
        .draw()?;
    for (class, who) in classes.iter().enumerate() {
        let color = Palette99::pick(class).to_rgba();
        let of_class = bars.iter().filter(|bar| bar.0 == class);
        if of_class.clone().next().is_none() {
            continue;
        }
        let boxes = of_class.clone().map(|(_, from, to, one)| {
            Rectangle::new([(*from, 0.0), (*to, one.mean)], color.filled())
        });
        chart
            .draw_series(boxes)?
            .label(who.to_string())
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 10, y + 5)], color.filled()));
        let whiskers = of_class.filter_map(|(_, from, to, one)| {
            let half = one.half?;
            let low = (one.mean - half).max(0.0);
            let middle = f64::midpoint(*from, *to);
            Some(ErrorBar::new_vertical(
                middle,
                low,
                one.mean,
                one.mean + half,
                BLACK,
                6,
            ))
        });
        chart.draw_series(whiskers)?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .label_font(("sans-serif", 12).into_font())
        .draw()
}

/// The name of the variant in whose middle `x` is, else nothing.
fn group_name(cells: &[Cell], x: f64) -> String {
    let middle = (0_u32..).zip(cells);
    let mut middle = middle.filter(|(group, _)| (x - f64::from(*group) - 0.5).abs() < 0.01);
    middle.next().map_or(String::new(), |(_, cell)| {
        format!("{} {}", cell.variant.scheme, cell.variant.name)
    })
}
