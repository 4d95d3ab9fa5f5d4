//! A frame on a screen of any size, or as text.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::Widget;

use super::frame::{Frame, Section};

/// Draws as much of a frame as there is room for.
pub(super) fn draw(frame: &Frame, area: Rect, buffer: &mut Buffer) {
    let mut pen = Pen { area, buffer, y: 0 };
    pen.line(&frame.head, Modifier::BOLD);
    let foot = !frame.foot.is_empty() && area.height >= 4;
    let room = usize::from(area.height).saturating_sub(1 + usize::from(foot));
    for (section, height) in frame.sections.iter().zip(heights(&frame.sections, room)) {
        pen.section(section, height);
    }
    if foot {
        pen.y = area.height - 1;
        pen.line(&frame.foot, Modifier::REVERSED);
    }
}

/// A frame as lines of at most `width` columns, all of it.
pub(super) fn text(frame: &Frame, width: u16) -> String {
    let lines = 1 + frame.sections.iter().map(lines_of).sum::<usize>();
    let height = u16::try_from(lines).unwrap_or(u16::MAX);
    let area = Rect::new(0, 0, width, height);
    let mut buffer = Buffer::empty(area);
    draw(frame, area, &mut buffer);
    let mut text = String::new();
    for y in 0..height {
        let row = (0..width).filter_map(|x| buffer.cell((x, y)));
        let row: String = row.map(|cell| cell.symbol()).collect();
        text.push_str(row.trim_end());
        text.push('\n');
    }
    text
}

/// Lines that a section has if there is room: a blank one before it, title, head and rows.
fn lines_of(section: &Section) -> usize {
    2 + usize::from(!section.head.is_empty()) + section.rows.len()
}

/// How many lines each section gets of `room`: all the same, and what one does not need goes
/// to the others.
fn heights(sections: &[Section], room: usize) -> Vec<usize> {
    let mut heights = vec![0; sections.len()];
    let mut left = room;
    loop {
        let mut grew = false;
        for (height, section) in heights.iter_mut().zip(sections) {
            if left > 0 && *height < lines_of(section) {
                *height += 1;
                left -= 1;
                grew = true;
            }
        }
        if !grew {
            return heights;
        }
    }
}

struct Pen<'a> {
    area: Rect,
    buffer: &'a mut Buffer,
    y: u16,
}

impl Pen<'_> {
    fn line(&mut self, text: &str, style: Modifier) {
        if self.y < self.area.height {
            let area = Rect {
                y: self.area.y + self.y,
                height: 1,
                ..self.area
            };
            let style = Style::default().add_modifier(style);
            Line::styled(text, style).render(area, self.buffer);
            self.y += 1;
        }
    }

    fn section(&mut self, section: &Section, height: usize) {
        let behind = usize::from(self.y) + height;
        let head = usize::from(!section.head.is_empty());
        // Room for a row is worth more than a blank line.
        let blank = usize::from(height > 1 + head + usize::from(!section.rows.is_empty()));
        let room = height.saturating_sub(blank + 1 + head);
        self.y += u16::from(blank > 0);
        if height > 0 {
            self.line(&section.title, Modifier::BOLD);
        }
        if head > 0 && height > 1 {
            self.line(&section.head, Modifier::UNDERLINED);
        }
        let rows = section.rows.len();
        let cut = rows > room && room > 0;
        let shown = if cut { room - 1 } else { room.min(rows) };
        // The chosen row is among those that are seen.
        let marked = section.marked.unwrap_or(0);
        let first = (marked + 1).saturating_sub(shown.max(1));
        for (index, row) in section.rows.iter().enumerate().skip(first).take(shown) {
            let style = if section.marked == Some(index) {
                Modifier::REVERSED
            } else {
                Modifier::empty()
            };
            self.line(row, style);
        }
        if cut {
            self.line(&format!("... {} more", rows - shown), Modifier::DIM);
        }
        self.y = u16::try_from(behind).unwrap_or(u16::MAX);
    }
}

#[cfg(test)]
mod tests;
