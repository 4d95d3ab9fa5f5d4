//! What perf writes that is neither a name nor a raw code: `cpu/event=0x3c,umask=0/u`, and
//! the modifiers behind a colon.
//!
//! Fields and their bits: `/sys/bus/event_source/devices/cpu/format` of Linux, for Intel and
//! AMD; meanings of modifiers: perf-list(1).

use pmu_model::{PmuModel, Vendor};

use super::error::EventError;
use super::generic;

/// How perf calls the PMU of the processor's cores.
const CPU: &str = "cpu/";

/// A field of a code, with its bits: a value's lower ones and, on AMD, the upper ones of an
/// event select.
struct Field {
    name: &'static str,
    shift: u32,
    bits: u32,
}

const FIELDS: [Field; 6] = [
    Field {
        name: "umask",
        shift: 8,
        bits: 8,
    },
    Field {
        name: "edge",
        shift: 18,
        bits: 1,
    },
    Field {
        name: "any",
        shift: 21,
        bits: 1,
    },
    Field {
        name: "inv",
        shift: 23,
        bits: 1,
    },
    Field {
        name: "cmask",
        shift: 24,
        bits: 8,
    },
    Field {
        name: "config",
        shift: 0,
        bits: 64,
    },
];

/// What `cpu/…/` stands for.
#[derive(Clone, Debug)]
pub(super) enum Inside {
    /// A code, with fields of an event select.
    Code(u64),
    /// A name that perf knows by itself.
    Generic(&'static generic::Generic),
}

/// Whether `text` is written like this.
pub(super) fn is_form(text: &str) -> bool {
    text.starts_with(CPU)
}

/// What `text` says, and the modifiers behind it; none if it is no such form.
pub(super) fn split<'a>(
    text: &'a str,
    model: &PmuModel,
) -> Result<Option<(Inside, &'a str)>, EventError> {
    let Some(rest) = text.strip_prefix(CPU) else {
        return Ok(None);
    };
    let wrong = |why: String| EventError::PerfForm {
        name: text.to_owned(),
        why,
    };
    let Some((fields, modifiers)) = rest.split_once('/') else {
        return Err(wrong("there is no second '/'".to_owned()));
    };
    let modifiers = modifiers.strip_prefix(':').unwrap_or(modifiers);
    if let Some(generic) = generic::find(fields) {
        return Ok(Some((Inside::Generic(generic), modifiers)));
    }
    let mut code = 0;
    for field in fields.split(',') {
        code |= bits(field, model).map_err(wrong)?;
    }
    Ok(Some((Inside::Code(code), modifiers)))
}

fn bits(field: &str, model: &PmuModel) -> Result<u64, String> {
    let (name, value) = field.split_once('=').unwrap_or((field, "1"));
    let number = value.strip_prefix("0x").map_or_else(
        || value.parse().ok(),
        |digits| u64::from_str_radix(digits, 16).ok(),
    );
    let value = number.ok_or_else(|| format!("'{value}' is no number"))?;
    let most = |bits: u32| u64::MAX >> (64 - bits);
    let wide = |bits| format!("{name}={value:#x} has more than {bits} bits");
    if name == "event" {
        let bits = match model.vendor() {
            Vendor::Intel => 8,
            Vendor::Amd => 12,
        };
        if value > most(bits) {
            return Err(wide(bits));
        }
        return Ok(value & 0xff | (value >> 8) << 32);
    }
    let Some(field) = FIELDS.iter().find(|field| field.name == name) else {
        return Err(format!(
            "'{name}' is no field: there are event, umask, edge, any, inv, cmask and config, \
             and generic names alone"
        ));
    };
    if value > most(field.bits) {
        return Err(wide(field.bits));
    }
    Ok(value << field.shift)
}

/// `text` without those of perf's modifiers that change nothing here, and `None` if it has
/// none of these: all that is counted is the guest's (`G`).
pub(super) fn without_modifiers(text: &str) -> Result<Option<String>, EventError> {
    let (head, last) = match text.rsplit_once([':', '/']) {
        Some((head, last)) if !head.ends_with(':') => (head, last),
        _ => return Ok(None),
    };
    let is_perfs = |letter| "ukGHp".contains(letter);
    if !last.chars().all(is_perfs) || !last.contains(['G', 'H', 'p']) {
        return Ok(None);
    }
    let refused = |why: &'static str| EventError::Modifier {
        name: text.to_owned(),
        why,
    };
    if last.contains('H') {
        let why = "H counts the host, and only the guest is counted here; on the host, use perf";
        return Err(refused(why));
    }
    if last.contains('p') {
        let why = "p asks for precise samples, and only the source of counts decides how precise \
                   they are: those of step are exact; leave it out";
        return Err(refused(why));
    }
    let separator = &text[head.len()..=head.len()];
    let rings: String = last
        .chars()
        .filter(|letter| "uk".contains(*letter))
        .collect();
    Ok(Some(match (separator, rings.is_empty()) {
        ("/", _) => format!("{head}/{rings}"),
        (_, true) => head.to_owned(),
        (_, false) => format!("{head}:{rings}"),
    }))
}
