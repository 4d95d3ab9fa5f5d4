//! Whether there is firmware to test.

/// Says why `test` is skipped where the firmware could not be built, and whether
/// it is.
#[must_use]
pub fn skipped_without_image(test: &str) -> bool {
    let missing = firmware::image().is_none();
    if missing {
        println!(
            "skipped: {test}: the Rust target x86_64-unknown-none is missing; run \
             `rustup target add x86_64-unknown-none`"
        );
    }
    missing
}
