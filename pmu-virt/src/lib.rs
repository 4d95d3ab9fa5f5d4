//! Virtual PMUs.
