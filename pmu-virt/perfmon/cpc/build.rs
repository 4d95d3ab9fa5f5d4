//! Gives the library its name, so that programs find it wherever it is installed, however
//! they were linked. Its code stays where it is after dlclose(3): handlers of signals and
//! threads that have begun lead into it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libumpire_cpc.so");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
