//! The figures of an experiment as one HTML file: tables, plots and the experiment
//! itself. It loads nothing.

use std::io::{self, Write};

use arbiter_lab::Metric;

use super::file::Experiment;
use super::plot;
use super::rows::{self, Report};

const STYLE: &str = "body{font:15px sans-serif;max-width:72em;margin:2em auto;padding:0 1em}\
table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .7em;text-align:right;\
border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}\
pre{background:#f4f4f4;padding:1em;overflow:auto}";

pub(super) fn write(
    experiment: &Experiment,
    report: &Report,
    out: &mut dyn Write,
) -> io::Result<()> {
    let title = "Umpire: an experiment in arbitration";
    writeln!(
        out,
        "<!DOCTYPE html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\
         <style>{STYLE}</style></head><body><h1>{title}</h1><p>{}.</p>\
         <p>Bars are means over seeds, whiskers their 95 % intervals by Student's t. A class \
         without a bar has no such figure.</p>",
        escape(&rows::summary(experiment, report))
    )?;
    for metric in Metric::ALL {
        writeln!(out, "<h2>{}</h2>", metric.name())?;
        writeln!(
            out,
            "{}",
            plot::of_metric(report, metric).map_err(io::Error::other)?
        )?;
    }
    for cell in &report.cells {
        let (scheme, policy) = (cell.variant.scheme, escape(&cell.variant.name));
        writeln!(out, "<h2>Scheme {scheme}, policy {policy}</h2>")?;
        table(rows::cells(report, cell), out)?;
    }
    if !report.guesses.is_empty() {
        writeln!(out, "<h2>Guessing cookies</h2>")?;
        table(rows::guess_cells(report), out)?;
    }
    writeln!(
        out,
        "<h2>The experiment</h2><pre>{}</pre></body></html>",
        escape(&experiment.text)
    )
}

fn table(rows: Vec<Vec<String>>, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "<table>")?;
    for (number, row) in rows.into_iter().enumerate() {
        let tag = if number == 0 { "th" } else { "td" };
        write!(out, "<tr>")?;
        for cell in row {
            write!(out, "<{tag}>{}</{tag}>", escape(&cell))?;
        }
        writeln!(out, "</tr>")?;
    }
    writeln!(out, "</table>")
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}
