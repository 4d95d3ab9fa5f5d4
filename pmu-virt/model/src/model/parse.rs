//! From the text of `--pmu` to a model.

use thiserror::Error;

use super::{Family, Numbers, PmuModel, Properties, first_bits, table};
use crate::event::EventFamily;
use crate::ids::Vendor;
use crate::pebs::{Pebs, PebsFormat, PebsPrecision};

/// What is wrong with the text of a model.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ModelError {
    /// No model has this name.
    #[error("no PMU model is called '{name}'; known are {}", known_models())]
    UnknownModel {
        /// The name given.
        name: String,
    },
    /// No model has this property.
    #[error(
        "PMU model {model} has no property '{property}'; known are {}",
        PROPERTIES.join(", ")
    )]
    UnknownProperty {
        /// The model's name.
        model: &'static str,
        /// The property given.
        property: String,
    },
    /// A property without a value.
    #[error("property '{property}' of PMU model {model} needs a value: {property}=VALUE")]
    MissingValue {
        /// The model's name.
        model: &'static str,
        /// The property given.
        property: String,
    },
    /// The property is given twice.
    #[error("property '{property}' of PMU model {model} is given twice; keep one")]
    Repeated {
        /// The model's name.
        model: &'static str,
        /// The property given.
        property: String,
    },
    /// The property exists, but this model fixes its value.
    #[error("property '{property}' of PMU model {model} cannot be changed: it is always {fixed}")]
    NotConfigurable {
        /// The model's name.
        model: &'static str,
        /// The property given.
        property: String,
        /// The model's own value.
        fixed: String,
    },
    /// The value is no number or out of range, or neither on nor off.
    #[error("'{property}={value}' of PMU model {model} is not possible; give {allowed}")]
    BadValue {
        /// The model's name.
        model: &'static str,
        /// The property given.
        property: String,
        /// The value given.
        value: String,
        /// What would be accepted.
        allowed: String,
    },
}

const PROPERTIES: [&str; 11] = [
    "counters",
    "fixed",
    "width",
    "fixed-width",
    "full-width",
    "perf-capabilities",
    "ibs",
    "freeze",
    "events",
    "pebs",
    "pebs-format",
];

fn known_models() -> String {
    let names: Vec<_> = PmuModel::names().iter().map(|model| model.name).collect();
    names.join(", ")
}

/// The family that is named, and the properties of this PMU.
pub(super) fn parse(spec: &str) -> Result<(&'static Family, Properties), ModelError> {
    let mut parts = spec.split(',').map(str::trim);
    let name = parts.next().unwrap_or_default();
    let family = table::FAMILIES
        .iter()
        .find(|family| family.summary.name == name)
        .ok_or_else(|| ModelError::UnknownModel {
            name: name.to_owned(),
        })?;
    let mut chosen = Properties::of(family);
    let mut seen = Vec::new();
    let mut format = None;
    for part in parts {
        let (property, value) = part
            .split_once('=')
            .map_or((part, None), |(p, v)| (p, Some(v)));
        if seen.contains(&property) {
            return Err(ModelError::Repeated {
                model: family.summary.name,
                property: property.to_owned(),
            });
        }
        seen.push(property);
        set(family, &mut chosen, &mut format, property, value)?;
    }
    let impossible = |property: &str, value: &str, allowed: &str| ModelError::BadValue {
        model: family.summary.name,
        property: property.to_owned(),
        value: value.to_owned(),
        allowed: allowed.to_owned(),
    };
    match (&mut chosen.pebs, format) {
        (Some(pebs), Some(format)) => pebs.format = format,
        (None, Some(format)) => {
            let number = format.number().to_string();
            return Err(impossible(
                "pebs-format",
                &number,
                "pebs=exact or pebs=skid with it",
            ));
        }
        (_, None) => {}
    }
    if !seen.contains(&"perf-capabilities") {
        // It is there that PEBS says which records it writes.
        chosen.capabilities = chosen.full_width || chosen.pebs.is_some();
    } else if !chosen.capabilities && (chosen.full_width || chosen.pebs.is_some()) {
        let allowed = match chosen.pebs {
            Some(_) => "on, or pebs=off and full-width=off with it",
            None => "on, or full-width=off with it",
        };
        return Err(impossible("perf-capabilities", "off", allowed));
    }
    Ok((family, chosen))
}

fn set(
    family: &Family,
    chosen: &mut Properties,
    format: &mut Option<PebsFormat>,
    property: &str,
    value: Option<&str>,
) -> Result<(), ModelError> {
    let name = family.summary.name;
    if !PROPERTIES.contains(&property) {
        return Err(ModelError::UnknownProperty {
            model: name,
            property: property.to_owned(),
        });
    }
    let Some(value) = value.filter(|value| !value.is_empty()) else {
        return Err(ModelError::MissingValue {
            model: name,
            property: property.to_owned(),
        });
    };
    let or = match property {
        "fixed" if family.has_fixed_map() => ", or a bit for each counter as 0x0 to 0x7",
        _ => "",
    };
    let number = |allowed| parse_number(name, (property, value), allowed, or);
    match property {
        "counters" => chosen.programmable = number(family.programmable)?,
        "fixed" => {
            (chosen.fixed, chosen.fixed_map) = match fixed_map(family, value) {
                Some(map) => (bits_up_to(map), map),
                None => {
                    let fixed = number(family.fixed)?;
                    (fixed, first_bits(fixed))
                }
            }
        }
        "width" => chosen.width = number(family.width)?,
        "fixed-width" => chosen.fixed_width = number(family.fixed_width)?,
        "full-width" => chosen.full_width = parse_switch(family, property, value)?,
        "ibs" => {
            let on = parse_on_off(name, property, value)?;
            if on && family.ibs == 0 {
                return Err(ModelError::NotConfigurable {
                    model: name,
                    property: property.to_owned(),
                    fixed: "off".to_owned(),
                });
            }
            chosen.ibs = if on { family.ibs } else { 0 };
        }
        "freeze" => {
            let on = parse_on_off(name, property, value)?;
            // Intel's goes with IA32_PERF_CAPABILITIES.
            if on && !(family.has_global && family.summary.vendor == Vendor::Amd) {
                return Err(ModelError::NotConfigurable {
                    model: name,
                    property: property.to_owned(),
                    fixed: "off".to_owned(),
                });
            }
            chosen.freeze = on;
        }
        "events" => chosen.events = parse_events(family, value)?,
        "pebs" => chosen.pebs = parse_pebs(family, property, value)?,
        "pebs-format" => *format = Some(parse_pebs_format(family, property, value)?),
        _ => chosen.capabilities = parse_switch(family, property, value)?,
    }
    Ok(())
}

/// The fixed-function counters that a bitmap such as `0x6` names.
fn fixed_map(family: &Family, value: &str) -> Option<u8> {
    let digits = value
        .strip_prefix("0x")
        .filter(|_| family.has_fixed_map())?;
    let map = u8::from_str_radix(digits, 16).ok()?;
    (map & !first_bits(family.fixed.most) == 0).then_some(map)
}

/// The number of bits up to the highest one that is set.
fn bits_up_to(map: u8) -> u8 {
    let bits = u8::BITS - map.leading_zeros();
    bits.to_le_bytes()[0]
}

fn parse_number(
    model: &'static str,
    (property, value): (&str, &str),
    allowed: Numbers,
    or: &str,
) -> Result<u8, ModelError> {
    let number = value.parse::<u8>().ok();
    if let Some(number) = number.filter(|n| (allowed.least..=allowed.most).contains(n)) {
        return Ok(number);
    }
    if allowed.least == allowed.most {
        return Err(ModelError::NotConfigurable {
            model,
            property: property.to_owned(),
            fixed: allowed.default.to_string(),
        });
    }
    Err(ModelError::BadValue {
        model,
        property: property.to_owned(),
        value: value.to_owned(),
        allowed: format!("a number from {} to {}{}", allowed.least, allowed.most, or),
    })
}

/// Whose event codes, of those with event selects like the model's.
fn parse_events(family: &Family, value: &str) -> Result<EventFamily, ModelError> {
    let fits = |events: &EventFamily| family.events.has_selects_of(*events);
    let words: Vec<_> = EventFamily::ALL.into_iter().filter(fits).collect();
    if let Some(events) = words.iter().find(|events| events.name() == value) {
        return Ok(*events);
    }
    let words: Vec<_> = words.into_iter().map(EventFamily::name).collect();
    Err(match words.as_slice() {
        [only] => ModelError::NotConfigurable {
            model: family.summary.name,
            property: "events".to_owned(),
            fixed: (*only).to_owned(),
        },
        several => ModelError::BadValue {
            model: family.summary.name,
            property: "events".to_owned(),
            value: value.to_owned(),
            allowed: several.join(", "),
        },
    })
}

/// The least version with PEBS: its overflow is a bit of the global status.
const PEBS_VERSION: u8 = 2;

fn parse_pebs(family: &Family, property: &str, value: &str) -> Result<Option<Pebs>, ModelError> {
    let precision = match value {
        "off" => return Ok(None),
        "exact" => PebsPrecision::Exact,
        "skid" => PebsPrecision::Skid,
        _ => {
            return Err(ModelError::BadValue {
                model: family.summary.name,
                property: property.to_owned(),
                value: value.to_owned(),
                allowed: "exact, skid or off".to_owned(),
            });
        }
    };
    can_have_pebs(family, property)?;
    Ok(Some(Pebs {
        format: PebsFormat::Four,
        precision,
    }))
}

fn parse_pebs_format(
    family: &Family,
    property: &str,
    value: &str,
) -> Result<PebsFormat, ModelError> {
    can_have_pebs(family, property)?;
    match value {
        "3" => Ok(PebsFormat::Three),
        "4" => Ok(PebsFormat::Four),
        _ => Err(ModelError::BadValue {
            model: family.summary.name,
            property: property.to_owned(),
            value: value.to_owned(),
            allowed: "3 or 4".to_owned(),
        }),
    }
}

fn can_have_pebs(family: &Family, property: &str) -> Result<(), ModelError> {
    if family.version >= PEBS_VERSION {
        return Ok(());
    }
    let fixed = match property {
        "pebs" => "off",
        _ => "none, as there is no PEBS",
    };
    Err(ModelError::NotConfigurable {
        model: family.summary.name,
        property: property.to_owned(),
        fixed: fixed.to_owned(),
    })
}

fn parse_switch(family: &Family, property: &str, value: &str) -> Result<bool, ModelError> {
    let on = parse_on_off(family.summary.name, property, value)?;
    if on != family.full_width.default && !family.full_width.settable {
        return Err(ModelError::NotConfigurable {
            model: family.summary.name,
            property: property.to_owned(),
            fixed: "off".to_owned(),
        });
    }
    Ok(on)
}

fn parse_on_off(model: &'static str, property: &str, value: &str) -> Result<bool, ModelError> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(ModelError::BadValue {
            model,
            property: property.to_owned(),
            value: value.to_owned(),
            allowed: "on or off".to_owned(),
        }),
    }
}
