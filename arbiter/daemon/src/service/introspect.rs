//! The interface that every varlink service has: which interfaces there are, and how they
//! are described.

use serde_json::{Value, json};
use umpire_lease::{DESCRIPTION, INTERFACE};

use super::said::{Denial, Said};

/// org.varlink.service: what every varlink service answers.
pub(super) fn introspect(method: &str, parameters: &Value) -> Result<Said, Denial> {
    match method {
        "org.varlink.service.GetInfo" => Ok(Said::Service(json!({
            "vendor": "Umpire",
            "product": "umpire arbiterd",
            "version": env!("CARGO_PKG_VERSION"),
            "url": "",
            "interfaces": ["org.varlink.service", INTERFACE],
        }))),
        "org.varlink.service.GetInterfaceDescription" => {
            let description = match parameters.get("interface").and_then(Value::as_str) {
                Some(INTERFACE) => DESCRIPTION,
                Some("org.varlink.service") => SERVICE_DESCRIPTION,
                Some(other) => return Err(Denial::NoInterface(other.to_owned())),
                None => return Err(Denial::InvalidParameter("interface".to_owned())),
            };
            Ok(Said::Service(json!({ "description": description })))
        }
        other if other.starts_with("org.varlink.service.") => {
            Err(Denial::NoMethod(other.to_owned()))
        }
        other => {
            let interface = other
                .rsplit_once('.')
                .map_or(other, |(interface, _)| interface);
            Err(Denial::NoInterface(interface.to_owned()))
        }
    }
}

/// The interface that every varlink service has (varlink.org, "Service").
const SERVICE_DESCRIPTION: &str = "\
# The interface that every varlink service has.
interface org.varlink.service

method GetInfo() -> (
  vendor: string,
  product: string,
  version: string,
  url: string,
  interfaces: []string
)

method GetInterfaceDescription(interface: string) -> (description: string)

error InterfaceNotFound (interface: string)
error MethodNotFound (method: string)
error MethodNotImplemented (method: string)
error InvalidParameter (parameter: string)
";
