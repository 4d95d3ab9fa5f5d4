//! Machine code as text, with the part of the events at each instruction.

use std::collections::BTreeMap;
use std::io::{self, Write};

use iced_x86::{
    Decoder, DecoderOptions, FlowControl, Formatter, GasFormatter, Instruction, IntelFormatter,
};

use super::Syntax;
use crate::profile::code::Code;
use crate::profile::tally::Sum;

/// An instruction.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct InstructionLine {
    /// Its address in the file.
    pub(super) address: u64,
    /// What was sampled there.
    pub(super) sum: Sum,
    /// As an assembler has it.
    pub(super) text: String,
}

/// The instructions of `code`. Samples are by how far they are behind its beginning; one within
/// an instruction is that instruction's. `name` names the targets of branches.
pub(super) fn lines(
    code: &Code,
    samples: &BTreeMap<u64, Sum>,
    syntax: Syntax,
    name: impl Fn(u64) -> Option<String>,
) -> Vec<InstructionLine> {
    let mut formatter: Box<dyn Formatter> = match syntax {
        Syntax::Att => Box::new(GasFormatter::new()),
        Syntax::Intel => Box::new(IntelFormatter::new()),
    };
    let options = formatter.options_mut();
    options.set_branch_leading_zeros(false);
    options.set_uppercase_hex(false);
    options.set_hex_prefix("0x");
    options.set_hex_suffix("");
    options.set_space_after_operand_separator(false);
    options.set_first_operand_char_index(7);
    let mut decoder = Decoder::with_ip(
        code.bitness,
        &code.bytes,
        code.address,
        DecoderOptions::NONE,
    );
    let mut lines = Vec::new();
    let mut instruction = Instruction::default();
    while decoder.can_decode() {
        decoder.decode_out(&mut instruction);
        let mut text = String::new();
        formatter.format(&instruction, &mut text);
        let target = branches(&instruction).then(|| instruction.near_branch_target());
        if let Some(target) = target.and_then(&name) {
            text.push_str(&format!(" <{target}>"));
        }
        let at = instruction.ip().wrapping_sub(code.address);
        let mut sum = Sum::default();
        for (_, one) in samples.range(at..at.saturating_add(instruction.len() as u64)) {
            sum.add(*one);
        }
        lines.push(InstructionLine {
            address: instruction.ip(),
            sum,
            text,
        });
    }
    lines
}

/// It goes to an address that it names.
fn branches(instruction: &Instruction) -> bool {
    instruction.near_branch_target() != 0
        && matches!(
            instruction.flow_control(),
            FlowControl::Call | FlowControl::ConditionalBranch | FlowControl::UnconditionalBranch
        )
}

/// What is printed of a symbol.
pub(super) struct Listing<'a> {
    /// Its name.
    pub(super) symbol: &'a str,
    /// What it is in.
    pub(super) object: &'a str,
    pub(super) event: &'a str,
    /// All that was sampled in it.
    pub(super) sum: Sum,
    /// Its part of all events, in percent.
    pub(super) percent: f64,
    pub(super) lines: &'a [InstructionLine],
}

impl Listing<'_> {
    /// Writes it as `perf annotate --stdio` does.
    pub(super) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let head = format!(
            " Percent |      Disassembly of {} for {} ({} samples, {:.2}% of all events, percent: local \
             period)",
            self.object, self.event, self.sum.samples, self.percent,
        );
        writeln!(out, "{head}\n{}", "-".repeat(head.chars().count()))?;
        let first = self.lines.first().map_or(0, |line| line.address);
        writeln!(
            out,
            "         :\n         : {first:016x} <{}>:",
            self.symbol
        )?;
        let mut shown = 0;
        for line in self.lines {
            let percent = line.sum.percent(self.sum);
            writeln!(out, "{percent:8.2} : {:>8x}:  {}", line.address, line.text)?;
            shown += line.sum.samples;
        }
        match self.sum.samples - shown.min(self.sum.samples) {
            0 => writeln!(out),
            more => writeln!(out, "# {more} samples are behind the code that is shown\n"),
        }
    }
}
