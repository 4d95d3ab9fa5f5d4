//! The Umpire VMM.
pub mod kvm;
pub mod sys;
