//! Which Slurm a SPANK plugin was built for: Slurm loads no plugin of another release.

use std::fmt;
use std::str::FromStr;

use object::{Object, ObjectSection, ObjectSymbol};

/// A release of Slurm: 22.05.8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlurmVersion {
    major: u8,
    minor: u8,
    micro: u8,
}

impl SlurmVersion {
    /// From `SLURM_VERSION_NUMBER` (slurm/slurm_version.h): a byte each.
    #[must_use]
    pub fn from_number(number: u32) -> Self {
        let [_, major, minor, micro] = number.to_be_bytes();
        SlurmVersion {
            major,
            minor,
            micro,
        }
    }

    /// Whether a plugin of this release is loaded by `other`: a maintenance release changes no ABI.
    #[must_use]
    pub fn fits(self, other: Self) -> bool {
        (self.major, self.minor) == (other.major, other.minor)
    }
}

impl fmt::Display for SlurmVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:02}.{}", self.major, self.minor, self.micro)
    }
}

impl FromStr for SlurmVersion {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        // A distribution may have added something of its own: 23.11.4-1.2ubuntu5.
        let text = text.split(['-', '+', '~', ' ']).next().unwrap_or_default();
        let mut numbers = text.split('.').map(|word| word.parse().map_err(|_| ()));
        let mut next = || numbers.next().unwrap_or(Ok(0));
        let [major, minor, micro] = [next()?, next()?, next()?];
        if major == 0 {
            return Err(());
        }
        Ok(SlurmVersion {
            major,
            minor,
            micro,
        })
    }
}

/// The release that a SPANK plugin was built for, from its `plugin_version`.
///
/// # Errors
/// The file is no SPANK plugin, and why.
pub fn plugin_version(file: &[u8]) -> Result<SlurmVersion, String> {
    let elf = object::File::parse(file).map_err(|error| format!("no library: {error}"))?;
    let mut symbols = elf.dynamic_symbols();
    let found = symbols.find(|symbol| symbol.name() == Ok("plugin_version"));
    let symbol = found.ok_or("no plugin of Slurm: it has no plugin_version")?;
    let section = symbol
        .section_index()
        .ok_or("its plugin_version is nowhere")?;
    let section = elf.section_by_index(section);
    let section = section.map_err(|error| format!("no library: {error}"))?;
    let bytes = section.data_range(symbol.address(), 4);
    let bytes = bytes.ok().flatten().and_then(|bytes| bytes.try_into().ok());
    let bytes: [u8; 4] = bytes.ok_or("its plugin_version is outside of the file")?;
    Ok(SlurmVersion::from_number(u32::from_le_bytes(bytes)))
}

#[cfg(test)]
mod tests {
    use super::{SlurmVersion, plugin_version};

    #[test]
    fn releases_fit_but_for_their_last_number() {
        let ours = SlurmVersion::from_number(0x16_05_08);
        assert_eq!(ours.to_string(), "22.05.8");
        for (text, fits) in [
            ("22.05.8", true),
            ("22.05.11", true),
            ("22.05.2-1+deb12u1", true),
            ("23.02.1", false),
            ("22.11.0", false),
        ] {
            let other: SlurmVersion = text.parse().expect(text);
            assert_eq!(ours.fits(other), fits, "{text}");
        }
        for text in ["", "slurm", "22.x", "0.1", "300.1.1"] {
            assert!(text.parse::<SlurmVersion>().is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_no_plugin_is_said() {
        assert!(
            plugin_version(b"#!/bin/sh\n")
                .expect_err("a script")
                .contains("no library")
        );
        let own = std::env::current_exe().expect("this test");
        let own = std::fs::read(own).expect("its file");
        assert!(
            plugin_version(&own)
                .expect_err("a program")
                .contains("plugin_version")
        );
    }
}
