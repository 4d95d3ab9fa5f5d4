//! The contract that every counter backend has to keep.
