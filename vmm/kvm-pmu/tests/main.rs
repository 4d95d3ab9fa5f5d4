//! The integration tests of this crate: one program, because each one more is linked with all that
//! it tests once more. A file or folder beside this one is a module here.

mod embedded;
mod minimal_vmm;
mod other_versions;
