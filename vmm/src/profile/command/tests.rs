//! Tests of the commands on files.
