//! Random guests.
