//! The Umpire VMM.
