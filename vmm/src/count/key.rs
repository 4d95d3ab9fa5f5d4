//! What a snapshot is one of, in one name.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What makes one snapshot another one than the next: everything of its [`Plan`](super::Plan), and the
/// machine. It is a name for a file, in 64 hexadecimal digits.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Key(pub(super) String);

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", self.0)
    }
}
