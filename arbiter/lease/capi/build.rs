//! Gives the library its name, so that programs find it wherever it is installed, however
//! they were linked.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libumpire_lease.so");
}
