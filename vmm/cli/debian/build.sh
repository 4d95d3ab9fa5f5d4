#!/bin/sh
# Builds the Debian package of Umpire: vmm/cli/debian/build.sh [OPTIONS OF cargo deb].
# cargo-deb (cargo install cargo-deb) packs what vmm/cli/Cargo.toml lists; what is made from
# the program itself, manual pages and completions, has to be there before. With
# UMPIRE_BUILT=1 programs and libraries are taken as they are in the target folder.
set -eu
cd "$(dirname "$0")/../../.."
target=${CARGO_TARGET_DIR:-target}
if [ "${UMPIRE_BUILT:-}" != 1 ]; then
    cargo build --release -p umpire -p umpire-lease-c -p umpire-perfmon-c -p umpire-cpc
    # For guests, whatever their C library.
    cargo rustc --release -p umpire-agent --bin umpire-agent -- -C target-feature=+crt-static
fi
made=$target/release/package
rm -rf "$made"
mkdir -p "$made"
"$target/release/umpire" man "$made/man"
gzip -9n "$made"/man/*.1
for shell in bash zsh fish; do
    "$target/release/umpire" completions "$shell" >"$made/umpire.$shell"
done
[ "${1:-}" = --stage ] || cargo deb --no-build --strip -p umpire "$@"
