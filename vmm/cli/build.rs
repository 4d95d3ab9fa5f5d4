//! Has the linker lay the code of an exit together, as `exit_path.ld` says.

fn main() {
    println!("cargo::rerun-if-changed=exit_path.ld");
    println!("cargo::rerun-if-changed=build.rs");
    let here = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    println!("cargo::rustc-link-arg-bins=-Wl,-T,{here}/exit_path.ld");
}
