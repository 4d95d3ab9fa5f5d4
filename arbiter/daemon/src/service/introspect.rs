//! The interface that every varlink service has: which interfaces there are, and how they
//! are described.

use serde_json::{Value, json};
use umpire_lease::{DESCRIPTION, INTERFACE};
use varlink::Reply;

use super::{Answered, invalid};

/// org.varlink.service: what every varlink service answers.
pub(super) fn introspect(method: &str, parameters: &Value) -> Answered {
    match method {
        "org.varlink.service.GetInfo" => Ok(Some(json!({
            "vendor": "Umpire",
            "product": "umpire arbiterd",
            "version": env!("CARGO_PKG_VERSION"),
            "url": "",
            "interfaces": ["org.varlink.service", INTERFACE],
        }))),
        "org.varlink.service.GetInterfaceDescription" => {
            match parameters.get("interface").and_then(Value::as_str) {
                Some(INTERFACE) => Ok(Some(json!({ "description": DESCRIPTION }))),
                Some("org.varlink.service") => {
                    Ok(Some(json!({ "description": SERVICE_DESCRIPTION })))
                }
                Some(other) => Err(Reply::error(
                    "org.varlink.service.InterfaceNotFound",
                    Some(json!({ "interface": other })),
                )),
                None => Err(invalid("interface")),
            }
        }
        other if other.starts_with("org.varlink.service.") => Err(Reply::error(
            "org.varlink.service.MethodNotFound",
            Some(json!({ "method": other })),
        )),
        other => {
            let interface = other
                .rsplit_once('.')
                .map_or(other, |(interface, _)| interface);
            Err(Reply::error(
                "org.varlink.service.InterfaceNotFound",
                Some(json!({ "interface": interface })),
            ))
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
