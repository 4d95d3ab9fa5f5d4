//! From the text of `--pmu` to a model.

use thiserror::Error;

use super::{Family, Numbers, PmuModel, table};

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

const PROPERTIES: [&str; 5] = ["counters", "fixed", "width", "fixed-width", "full-width"];

fn known_models() -> String {
    let names: Vec<_> = PmuModel::names().iter().map(|model| model.name).collect();
    names.join(", ")
}

pub(super) fn parse(spec: &str) -> Result<PmuModel, ModelError> {
    let mut parts = spec.split(',').map(str::trim);
    let name = parts.next().unwrap_or_default();
    let family = table::FAMILIES
        .iter()
        .find(|family| family.summary.name == name)
        .ok_or_else(|| ModelError::UnknownModel {
            name: name.to_owned(),
        })?;
    let mut model = PmuModel::of(family);
    let mut seen = Vec::new();
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
        set(&mut model, family, property, value)?;
    }
    Ok(model.completed())
}

fn set(
    model: &mut PmuModel,
    family: &'static Family,
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
    let number = |allowed| parse_number(name, property, value, allowed);
    match property {
        "counters" => model.programmable = number(family.programmable)?,
        "fixed" => model.fixed = number(family.fixed)?,
        "width" => model.width = number(family.width)?,
        "fixed-width" => model.fixed_width = number(family.fixed_width)?,
        _ => model.full_width = parse_switch(family, property, value)?,
    }
    Ok(())
}

fn parse_number(
    model: &'static str,
    property: &str,
    value: &str,
    allowed: Numbers,
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
        allowed: format!("a number from {} to {}", allowed.least, allowed.most),
    })
}

fn parse_switch(family: &Family, property: &str, value: &str) -> Result<bool, ModelError> {
    let on = match value {
        "on" => true,
        "off" => false,
        _ => {
            return Err(ModelError::BadValue {
                model: family.summary.name,
                property: property.to_owned(),
                value: value.to_owned(),
                allowed: "on or off".to_owned(),
            });
        }
    };
    if on != family.full_width.default && !family.full_width.settable {
        return Err(ModelError::NotConfigurable {
            model: family.summary.name,
            property: property.to_owned(),
            fixed: "off".to_owned(),
        });
    }
    Ok(on)
}
