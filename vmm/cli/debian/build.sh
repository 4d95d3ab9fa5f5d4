#!/bin/sh
# Builds the Debian package of Umpire: vmm/cli/debian/build.sh [OPTIONS OF cargo deb].
# cargo-deb (cargo install cargo-deb) packs what vmm/cli/Cargo.toml lists; what is made from
# the program itself, manual pages and completions, has to be there before. With
# UMPIRE_BUILT=1 program and library are taken as they are in the target folder.
set -eu
cd "$(dirname "$0")/../../.."
target=${CARGO_TARGET_DIR:-target}
[ "${UMPIRE_BUILT:-}" = 1 ] || cargo build --release -p umpire -p umpire-lease-c
made=$target/release/package
rm -rf "$made"
mkdir -p "$made"
"$target/release/umpire" man "$made/man"
gzip -9n "$made"/man/*.1
for shell in bash zsh fish; do
    "$target/release/umpire" completions "$shell" >"$made/umpire.$shell"
done
[ "${1:-}" = --stage ] || cargo deb --no-build --strip -p umpire "$@"
