#!/usr/bin/env bash
# Installs what the tests need, builds, and runs every test there is:
#   1. unit, property and documentation tests,
#   2. micro-guests on this machine's /dev/kvm, where there is one,
#   3. the same micro-guests in L1, a machine whose KVM is known (docs/internals/testing.md),
#   4. L1 itself, and an unmodified Debian kernel with `perf` and modules in it, end to end.
# The last line is 'N passed, N failed, N skipped', summed over all of them. The
# status is 0 only if nothing failed. What cannot run is named, with what is
# missing, and counted as skipped; with CI=true a part that cannot run fails, and
# so does a test that lacks something which can be installed, or KVM.
#
# ./test.sh --quick is for each change while one works: it installs nothing, builds, and runs 1 but
# for the examples of the documentation, of 2 a choice, and what else needs no L1. It says what it
# left out.
set -uo pipefail
cd "$(dirname "$0")" || exit 1
target=${CARGO_TARGET_DIR:-target}
logs=$target/test-logs
mkdir -p "$logs" || exit 1
# VMs of the tests are not among those of whoever runs them.
XDG_RUNTIME_DIR=$(mktemp -d) || exit 1
export XDG_RUNTIME_DIR
# The suites run without cargo, which would set it (.cargo/config.toml).
export LIBPFM_ENCODE_INACTIVE=1
# One build makes all that they use, libraries for C too.
export UMPIRE_TESTS_BUILT=1
trap 'rm -rf "$XDG_RUNTIME_DIR"' EXIT
passed=0 failed=0 skipped=0
trouble=()
quick= left_out=()
case ${*:-} in
    '') ;;
    --quick) quick=yes ;;
    *)
        echo "usage: ./test.sh [--quick]" >&2
        exit 2
        ;;
esac

finish() {
    local line
    printf '\n'
    [ -z "$quick" ] || printf 'left out: %s\n' "${left_out[@]}"
    for line in "${trouble[@]}"; do printf '%s\n' "$line"; done
    printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
    [ "$failed" -eq 0 ]
    exit
}

give_up() {
    trouble+=("FAILED: $1")
    failed=$((failed + 1))
    finish
}

# --- what the build and the tests need ---------------------------------------

install_missing() {
    local packages=()
    command -v cc >/dev/null || packages+=(gcc)
    # perfmon.h is for C++ too.
    command -v c++ >/dev/null || packages+=(g++)
    printf '#include <stdio.h>\nint main(void) { return 0; }\n' |
        cc -x c -o /dev/null - 2>/dev/null || packages+=(libc6-dev)
    command -v make >/dev/null || packages+=(make)
    command -v strip >/dev/null || packages+=(binutils)
    command -v tar >/dev/null || packages+=(tar)
    [ ${#packages[@]} -eq 0 ] && return
    command -v apt-get >/dev/null ||
        give_up "missing: ${packages[*]}, and there is no apt-get to install them with"
    local root=()
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || give_up "missing: ${packages[*]}; install them as root"
        root=(sudo)
    fi
    echo "installing ${packages[*]} …"
    {
        "${root[@]}" apt-get update &&
            "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y "${packages[@]}"
    } >"$logs/apt.log" 2>&1 </dev/null || {
        tail -n 20 "$logs/apt.log"
        give_up "apt-get could not install ${packages[*]} (whole log: $logs/apt.log)"
    }
}

# What some tests need and Umpire does without: libpfm4 for names of events, a terminal of tmux for
# umpire top, perf to open what umpire writes for it. Where it cannot be installed, they are skipped.
install_for_tests() {
    local packages=() root=() package folder found=
    for folder in /usr/lib /usr/lib64 /usr/local/lib /usr/lib/x86_64-linux-gnu; do
        [ -e "$folder/libpfm.so.4" ] && found=yes
    done
    [ -n "$found" ] || packages+=(libpfm4)
    command -v tmux >/dev/null || packages+=(tmux)
    command -v perf >/dev/null || packages+=(linux-perf)
    [ ${#packages[@]} -eq 0 ] && return
    [ "$(id -u)" -eq 0 ] || root=(sudo -n)
    echo "installing ${packages[*]} …"
    "${root[@]}" apt-get update >"$logs/packages.log" 2>&1 </dev/null
    for package in "${packages[@]}"; do
        "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y "$package" \
            >>"$logs/packages.log" 2>&1 </dev/null ||
            echo "$package could not be installed (log: $logs/packages.log): its tests are skipped"
    done
}

check_rust() {
    local wanted found
    wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    command -v cargo >/dev/null || give_up "cargo is missing: install Rust $wanted or newer"
    found=$(rustc --version | cut -d' ' -f2)
    [ "$(printf '%s\n' "$wanted" "${found%%-*}" | sort -V | head -n 1)" = "$wanted" ] ||
        give_up "this is Rust $found, but Umpire needs $wanted or newer (try: rustup update stable)"
}

# The guest's firmware and freestanding guests are built for this target. Without
# it everything else is built all the same, and their tests are skipped.
install_target() {
    local target=x86_64-unknown-none
    [ -n "$(find "$(rustc --print=target-libdir --target $target)" -name 'libcore-*' 2>/dev/null)" ] && return
    echo "installing the Rust target $target …"
    rustup target add $target >"$logs/target.log" 2>&1 </dev/null ||
        echo "$target could not be installed (log: $logs/target.log): tests of firmware and of freestanding guests are skipped"
}

# --- running and counting ----------------------------------------------------

# Adds up the result lines of libtest and of the suites without it. Prints
# 'passed failed skipped missing'. A test under libtest that could not run, or not
# wholly, prints 'skipped: NAME: WHY' and returns, which libtest takes for a pass
# (and hides without --show-output). The last number is of lines whose reason is
# something that a machine with CI=true has to have: this script installs it, or
# it is KVM. Without KVM the micro-guests still run in L1.
count() {
    awk '
        /^test result: / {
            for (i = 2; i <= NF; i++) {
                if ($i ~ /^passed;/) passed += $(i - 1)
                if ($i ~ /^failed;/) failed += $(i - 1)
                if ($i ~ /^(ignored|skipped);/) skipped += $(i - 1)
                if ($i ~ /^ignored;/) { passed -= told; skipped += told }
            }
            told = 0
            split("", names)
        }
        /^skipped: all [0-9]+ tests/ { skipped += $3; next }
        /^skipped: / && /\/dev\/kvm|libpfm|tmux|perf cannot be run|x86_64-unknown-none/ && !/not possible here/ { missing++ }
        /^skipped: / && !($2 in names) { told++; names[$2] }
        END { print passed + 0, failed + 0, skipped + 0, missing + 0 }
    ' "$1"
}

# The tests that a whole run says have failed; none of a run that broke off.
failed_tests() {
    grep -q '^test result: FAILED' "$1" || return
    # A program that broke off has no result, and which of its tests failed is not known.
    [ "$(grep -cE '^running [^ ]+ \(' "$1")" -le "$(grep -c '^test result: ' "$1")" ] || return
    sed -nE 's/^test ([^ ]+) \.\.\. FAILED.*/\1/p' "$1"
}

# Sets `computed` to the seconds of processor time of all that has ended: of what a suite takes,
# the rest is waiting.
look_at_processor() {
    times >"$logs/times"
    computed=$(awk -F'[ms ]' 'NR == 2 { printf "%d", $1 * 60 + $2 + $4 * 60 + $5 }' "$logs/times")
}

# suite NAME SECONDS COMMAND…: runs the command with the arguments in `chosen`, which may name
# tests, counts, shows the end of the log if anything failed.
chosen=()
suite() {
    local name=$1 limit=$2 log=$logs/$1.log start=$SECONDS status p f s missing
    local again logs_of_it=("$log") first=(0 0 0 0) computed before
    shift 2
    look_at_processor
    before=$computed
    timeout "$limit" "$@" "${chosen[@]}" >"$log" 2>&1 </dev/null
    status=$?
    # What runs guests, or talks over sockets, depends on the machine's time: now and then a
    # neighbour takes it, or L1 ends for no reason (docs/internals/testing.md). What fails twice is a
    # failure; what failed once is told. An input that broke a property may not come again, so
    # it is a failure at once.
    if [ "$status" -ne 0 ] && [ $((SECONDS - start)) -lt "$limit" ] && [ "$name" != documentation ] &&
        ! grep -q 'minimal failing input' "$log"; then
        mv "$log" "$log.first"
        grep -E '^(failed:|l1: |test .* FAILED|thread .* panicked)' "$log.first" | sed 's/^/    | /'
        mapfile -t again < <(failed_tests "$log.first")
        if [ ${#again[@]} -gt 0 ]; then
            # The others have passed, and are not run again.
            read -r -a first < <(count "$log.first")
            logs_of_it+=("$log.first")
            echo "$name: once more ${again[*]} (log of the first: $log.first)"
            again=(--exact "${again[@]}")
        else
            echo "$name: once more (log of the first: $log.first)"
            again=("${chosen[@]}")
        fi
        timeout "$limit" "$@" "${again[@]}" >"$log" 2>&1 </dev/null
        status=$?
        [ "$status" -ne 0 ] || trouble+=("FAILED ONCE: $name: passed the second time (log of the first: $log.first)")
    fi
    read -r p f s missing < <(count "$log")
    p=$((p + first[0])) s=$((s + first[2])) missing=$((missing + first[3]))
    # A suite that broke off, or that was stopped, may not have said so itself.
    if [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; then f=1; fi
    # A suite in which nothing ran tests nothing.
    if [ "$status" -eq 0 ] && [ $((p + f + s)) -eq 0 ]; then
        status=1 f=1
        echo "no result line in this log" >>"$log"
    fi
    if [ "${CI:-}" = true ] && [ "$missing" -gt 0 ]; then
        f=$((f + 1))
        trouble+=("FAILED: $name: $missing times something was missing that CI=true asks for")
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    look_at_processor
    printf '%-22s %4d passed, %d failed, %d skipped (%d s, processor %d s)\n' "$name" "$p" "$f" "$s" \
        $((SECONDS - start)) $((computed - before))
    if [ "$s" -gt 0 ]; then grep -h '^skipped: ' "${logs_of_it[@]}" | sed 's/^/    /'; fi
    if [ "$status" -ne 0 ]; then
        grep -vE '^test .* ok( |$)|^skipped: ' "$log" | tail -n 40 | sed 's/^/    | /'
        case $status in
            124) trouble+=("FAILED: $name: stopped after $limit s (whole log: $log)") ;;
            *) trouble+=("FAILED: $name: status $status (whole log: $log)") ;;
        esac
    fi
}

# leave_out NAME COUNT WHAT-IS-MISSING
leave_out() {
    printf '%-22s %4d skipped: %s\n' "$1" "$2" "$3"
    skipped=$((skipped + $2))
    trouble+=("SKIPPED: $1: $3")
    if [ "${CI:-}" = true ]; then
        failed=$((failed + 1))
        trouble+=("FAILED: $1: with CI=true every part has to run")
    fi
}

# built TEST FILE: of each program that was built, as FILE says, its package's folder, kind, name
# and file. TEST is true for tests and false for programs. Whatever runs is of one of two builds:
# cargo would build what two choices of packages share once for each.
built() {
    local fields='.*"manifest_path":"\([^"]*\)\/Cargo.toml","target":{"kind":\["\([^"]*\)"\],.*"name":"\([^"]*\)"'
    sed -n "s/$fields.*\"test\":$1},\"features\".*\"executable\":\"\([^\"]*\)\".*/\1 \2 \3 \4/p" "$2"
}

# build NAME OPTIONS…
build() {
    local log=$logs/$1.log json=$logs/$1.json
    shift
    echo "building (log: $log) …"
    cargo build --message-format=json-render-diagnostics "$@" >"$json" 2>"$log" </dev/null || {
        tail -n 40 "$log"
        give_up "the build (whole log: $log)"
    }
}

# Runs test programs as cargo would, each in its package's folder, with these arguments.
run_all() {
    local folder kind name file status=0
    while read -r folder kind name file; do
        echo "running $name ($kind of $folder)"
        (cd "$folder" && "$file" "$@") || status=$?
    done
    return $status
}
export -f run_all

# Suites for either KVM: those without libtest hold micro-guests. Hostile guests
# are for a real one: some end the QEMU that L1 runs in (docs/internals/testing.md).
micro_suites() {
    awk -F'"' '/^\[/ { name = "" } /^name *=/ { name = $2 } /^harness *= *false/ { print name }' \
        guest-tests/Cargo.toml
}

# --- the tests ---------------------------------------------------------------

if [ -z "$quick" ]; then
    install_missing
    install_for_tests
fi
check_rust
[ -n "$quick" ] || install_target
# Tests of crates, not optimised; and what runs guests, for them and for L1. A choice of packages
# is a choice of features, so all of the workspace is built for the first, and for --quick too.
build build --workspace --lib --bins --tests --examples
if [ -n "$quick" ]; then
    build guests --workspace --test suites --test micro
else
    build guests --profile guests --lib --bins --test suites --test micro --test perfmon \
        -p guest-tests -p umpire -p umpire-agent -p umpire-cpc -p umpire-lease-c -p umpire-perfmon-c
fi
tests=$(built true "$logs/build.json")
guests=$PWD/guest-tests
binaries=$(built true "$logs/guests.json" | awk -v of="$guests" '$1 == of && $2 == "test" { print $3, $4 }')
l1=$(built false "$logs/guests.json" | awk '$3 == "l1" { print $4 }')
[ -n "$binaries" ] && [ -n "$quick$l1" ] || give_up "the tests were not found in $logs/guests.json"

awk -v of="$guests" '$1 != of' <<<"$tests" >"$logs/unit.list"
awk -v of="$guests" '$1 == of' <<<"$tests" >"$logs/harness.list"
micro=$(micro_suites)
is_micro() { grep -qx "$1" <<<"$micro"; }
# A module of the one program with libtest is a suite: a process of its own, a log, a time-out.
suites=$(awk '$1 == "suites" { print $2 }' <<<"$binaries")
listed=$("$suites" --list | sed -n 's/: test$//p')
modules=$(cut -d: -f1 <<<"$listed" | uniq)
[ -n "$modules" ] || give_up "$suites lists no test"

# module NAME
module() {
    mapfile -t chosen < <(grep "^$1::" <<<"$listed")
    chosen=(--exact "${chosen[@]}")
    suite "$1" 900 env -C "$guests" "$suites" --show-output
    chosen=()
}

# What a change breaks first, in the time that one waits for it: micro-guests of each kind of
# access, and the suites that start no Linux and wait for nobody.
quick_modules="bad_input docs events golden house pcr_lines"
quick_guests="amd intel overflow rdpmc vcpus pcr::reserve pcr::a_rogue"

suite unit 900 bash -c 'run_all --show-output "$@" <"$0"' "$logs/unit.list"
suite harness 600 bash -c 'run_all --show-output "$@" <"$0"' "$logs/harness.list"
if [ -n "$quick" ]; then
    for name in $quick_modules; do module "$name"; done
    read -r -a chosen <<<"$quick_guests"
    file=$(awk '$1 == "micro" { print $2 }' <<<"$binaries")
    for part in "${chosen[@]}"; do
        "$file" --list | grep -qF "$part" || give_up "no micro-guest is called $part"
    done
    suite micro 600 env -C "$guests" "$file" --show-output
    left_out=("micro-guests but for $quick_guests"
        "documentation, $(grep -vx micro <<<"$micro" | tr '\n' ' ')and in L1: $(tr '\n' ' ' <<<"$micro")"
        "$(grep -vxF "$(tr ' ' '\n' <<<"$quick_modules")" <<<"$modules" | tr '\n' ' ')")
    finish
fi
suite documentation 600 cargo test --workspace --doc --no-fail-fast

while read -r name file; do
    is_micro "$name" && suite "$name" 600 env -C "$guests" "$file" --show-output
done <<<"$binaries"

echo "fetching L1's packages, unless they are in the cache (log: $logs/fetch.log) …"
if timeout 600 "$l1" --fetch-only >"$logs/fetch.log" 2>&1 </dev/null; then
    l1_missing=
else
    tail -n 5 "$logs/fetch.log" | sed 's/^/    | /'
    l1_missing="L1 cannot be built here, see $logs/fetch.log; it needs apt with a Debian mirror"
fi
needs_l1() { [[ $1 == l1 || $1 == linux* || $1 == msr || $1 == perf_contract ]]; }
while read -r name file; do
    is_micro "$name" || continue
    if [ -n "$l1_missing" ]; then
        leave_out "$name-in-l1" "$("$file" --list | grep -c ': test$')" "$l1_missing"
        continue
    fi
    processors=2
    # Its guests have two vCPUs, which QEMU's SVM does not run soundly on two
    # processors of L1 (docs/internals/testing.md, "Limits of L1").
    [ "$name" = perfmon ] && processors=1
    suite "$name-in-l1" 900 "$l1" --smp "$processors" --timeout 300 -- "$file" --show-output
done <<<"$binaries"
for name in $modules; do
    if [ -n "$l1_missing" ] && needs_l1 "$name"; then
        leave_out "$name" "$(grep -c "^$name::" <<<"$listed")" "$l1_missing"
    else
        module "$name"
    fi
done
finish
