//! From a code to what a counter is asked to do.

use pmu_model::{CountRequest, CounterId, EventCode, FixedFunction, PmuModel, Vendor};

use super::error::EventError;

/// USR and OS of an event select.
pub(super) const RINGS: u64 = 0b11 << 16;
/// Interrupt and enable, which libpfm sets in every code.
const INT: u64 = 1 << 20;
const ENABLE: u64 = 1 << 22;

/// Intel's codes with event select 0 and unit mask N + 1 select nothing: by
/// convention (Linux and libpfm) they stand for fixed counter N.
pub(super) fn pseudo_fixed(code: u64) -> Option<u8> {
    let [select, umask, ..] = code.to_le_bytes();
    (select == 0 && umask > 0).then(|| umask - 1)
}

/// `r`, `0x` or `r0x`, and hexadecimal digits, with an `X` of either case; none if it is something else.
pub(super) fn raw_code(text: &str) -> Result<Option<u64>, EventError> {
    let digits = ["r0x", "r0X", "r", "0x", "0X"]
        .iter()
        .find_map(|sign| text.strip_prefix(sign));
    let Some(digits) = digits else {
        return Ok(None);
    };
    if digits.is_empty() || !digits.chars().all(|digit| digit.is_ascii_hexdigit()) {
        return Ok(None);
    }
    match u64::from_str_radix(digits, 16) {
        Ok(code) => Ok(Some(code)),
        Err(_) => Err(EventError::RawTooLong(text.to_owned())),
    }
}

/// The request for `code`, an event select as `model` reads it. Without USR and
/// OS it is for both rings. INT and EN of the code are not taken over: the
/// request is enabled and asks for no PMI.
pub(super) fn request(name: &str, code: u64, model: &PmuModel) -> Result<CountRequest, EventError> {
    let missing = code & !model.event_bits();
    if missing != 0 {
        return Err(EventError::NoSuchBits {
            name: name.to_owned(),
            code,
            bits: in_words(missing, model.vendor()),
            model: model.name(),
        });
    }
    let code = match code & RINGS {
        0 => code | RINGS,
        _ => code,
    };
    let request = CountRequest {
        enabled: true,
        int: false,
        ..CountRequest::decode(model.events(), code)
    };
    match pseudo_fixed(code) {
        Some(counter) if model.vendor() == Vendor::Intel => {
            on_fixed(name, counter, &request, model)
        }
        _ => Ok(request),
    }
}

fn on_fixed(
    name: &str,
    counter: u8,
    request: &CountRequest,
    model: &PmuModel,
) -> Result<CountRequest, EventError> {
    let function = FixedFunction::of(counter).filter(|_| model.has(CounterId::Fixed(counter)));
    let Some(function) = function else {
        return Err(EventError::NoFixedCounter {
            name: name.to_owned(),
            counter,
            model: model.name(),
            fixed: model.fixed(),
        });
    };
    if request.edge || request.invert || request.cmask != 0 || request.pin {
        return Err(EventError::FixedModifier {
            name: name.to_owned(),
        });
    }
    Ok(CountRequest::plain(
        EventCode::Fixed(function),
        request.os,
        request.usr,
    ))
}

/// The code of `request` as libpfm prints one: with INT and EN, a fixed counter
/// by its pseudo code.
#[must_use]
pub fn printed(request: &CountRequest) -> u64 {
    let rings = u64::from(request.usr) << 16 | u64::from(request.os) << 17;
    let code = match request.event {
        EventCode::Fixed(function) => (u64::from(function.index()) + 1) << 8 | rings,
        _ => request.encode().unwrap_or(0),
    };
    code | INT | ENABLE
}

/// The bits of an event select that `bits` has, as the vendor names them.
fn in_words(bits: u64, vendor: Vendor) -> String {
    const BOTH: [(u64, &str); 4] = [
        (1 << 19, "pin control (bit 19)"),
        (1 << 21, "any-thread (bit 21)"),
        (1 << 40, "guest-only (bit 40)"),
        (1 << 41, "host-only (bit 41)"),
    ];
    const INTEL: [(u64, &str); 3] = [
        (
            1 << 32,
            "in_tx (bit 32; event selects above 0xff are AMD's)",
        ),
        (1 << 33, "in_tx_cp (bit 33)"),
        (1 << 34, "adaptive PEBS record (bit 34)"),
    ];
    const AMD: [(u64, &str); 1] = [(0xf << 32, "bits 35:32 (event select above 0xff)")];
    let own: &[_] = match vendor {
        Vendor::Intel => &INTEL,
        Vendor::Amd => &AMD,
    };
    let mut rest = bits;
    let mut words = Vec::new();
    for (mask, name) in BOTH.iter().chain(own) {
        if rest & mask != 0 {
            words.push((*name).to_owned());
            rest &= !mask;
        }
    }
    if rest != 0 {
        words.push(format!("bits {rest:#x}"));
    }
    super::text::one_of(&words)
}
