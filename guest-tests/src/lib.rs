//! Guests and machines for the tests.
