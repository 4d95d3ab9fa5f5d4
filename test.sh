#!/usr/bin/env bash
# Installs what the tests need, builds, and runs every test there is:
#   1. unit, property and documentation tests,
#   2. micro-guests on this machine's /dev/kvm, where there is one,
#   3. the same micro-guests in L1, a machine whose KVM is known (docs/internals/testing.md),
#   4. L1 itself, and an unmodified Debian kernel with `perf` and modules in it, end to end,
#   5. Debian's kernels, and tiny ones, on the processor in software, which needs no KVM.
# The last line is 'N passed, N failed, N skipped', summed over all of them. The
# status is 0 only if nothing failed. What cannot run is named, with what is
# missing, and counted as skipped; with CI=true a part that cannot run fails, and
# so does a test that lacks something which can be installed, or KVM. There is an
# end to a gate's time: on a slow machine CI=true leaves out the suites of Linux
# that have not begun after 50 minutes, says so, and counts them as skipped.
#
# ./test.sh --quick is for each change while one works: it installs nothing, builds, and runs 1 but
# for the examples of the documentation, of 2 a choice, and what else needs no L1. It says what it
# left out.
set -uo pipefail
cd "$(dirname "$0")" || exit 1
target=${CARGO_TARGET_DIR:-target}
logs=$target/test-logs
mkdir -p "$logs" || exit 1
rm -f "$logs/failures.txt"
# VMs of the tests are not among those of whoever runs them.
XDG_RUNTIME_DIR=$(mktemp -d) || exit 1
export XDG_RUNTIME_DIR
# The suites run without cargo, which would set it (.cargo/config.toml).
export LIBPFM_ENCODE_INACTIVE=1
# One build makes all that they use, libraries for C too.
export UMPIRE_TESTS_BUILT=1
# Of each suite: its time-out in seconds, its command, what of its tests it is asked for.
declare -A limits=() commands=() choices=()
# The suites that run, by their processes; and how many may, beside each other.
declare -A lanes=()
most=1
# What a first try came to, of suites that have a second one at the end.
declare -A first_tries=()
once_more=()
# Seconds after which CI=true begins no other suite, once those of Linux have begun, and after which
# none a second time: who runs a gate ends it at some time, and what it had seen by then is lost.
begin_by= again_by=4400
# What is fetched while the build runs.
installing= fetching=

leave() {
    local process
    # apt itself goes on: a package is not left half installed.
    kill $installing $fetching 2>/dev/null
    for process in "${!lanes[@]}"; do
        # Each has its time-out as its child, which ends the suite.
        kill $(cat "/proc/$process/task/$process/children" 2>/dev/null) 2>/dev/null
    done
    rm -rf "$XDG_RUNTIME_DIR"
}
trap leave EXIT
passed=0 failed=0 skipped=0
# Of the suites that failed, which tests and why; and a line for each, and for what else is to be known.
details=() trouble=()
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
    local line name
    lanes_for 1
    # With nothing beside it.
    for name in "${once_more[@]}"; do again "$name"; done
    lanes_for 1
    printf '\n'
    [ -z "$quick" ] || printf 'left out: %s\n' "${left_out[@]}"
    # The last lines are all that some who run this keep: so the failures are there once more. Who
    # has more to say behind them finds them in the file.
    [ ${#details[@]} -eq 0 ] || printf '\nwhat failed, in %s\n' "${details[@]}"
    for line in "${trouble[@]}"; do printf '%s\n' "$line"; done
    printf '%s\n' "${details[@]/#/what failed, in }" "${trouble[@]}" >"$logs/failures.txt"
    printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
    [ "$failed" -eq 0 ]
    exit
}

give_up() {
    trouble+=("FAILED: $1")
    failed=$((failed + 1))
    once_more=()
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
# umpire top, perf to open what umpire writes for it, Valgrind's count of instructions to compare
# with, Slurm and what it needs for a cluster. Where it cannot be installed, they are skipped.
install_for_tests() {
    local packages=() root=() package folder found=
    for folder in /usr/lib /usr/lib64 /usr/local/lib /usr/lib/x86_64-linux-gnu; do
        [ -e "$folder/libpfm.so.4" ] && found=yes
    done
    [ -n "$found" ] || packages+=(libpfm4)
    command -v tmux >/dev/null || packages+=(tmux)
    command -v perf >/dev/null || packages+=(linux-perf)
    command -v valgrind >/dev/null || packages+=(valgrind)
    # A cluster, with accounts and plugins of its own. Of MariaDB the program alone: its other
    # package is a service, which would run on here.
    [ -x /usr/sbin/slurmctld ] && [ -x /usr/sbin/slurmdbd ] && [ -e /usr/include/slurm/spank.h ] ||
        packages+=(slurmctld slurmd slurm-client munge libslurm-dev slurm-wlm-basic-plugins
            mariadb-server-core slurmdbd slurm-wlm-mysql-plugin)
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
        /^skipped: / && /\/dev\/kvm|libpfm|tmux|perf cannot be run|valgrind cannot be started|Slurm is not installed|a cluster of Slurm is started as root|x86_64-unknown-none/ && !/not possible here/ { missing++ }
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

# Of each test that failed: its name, and below it the first lines of its panic, or of what it says
# instead, with the least input that broke a property. A suite that broke off: its last lines.
failures_of() {
    awk -v most=6 -v tests=5 '
        function short(line) { return length(line) > 200 ? substr(line, 1, 200) " …" : line }
        # What is told of a test is between its panic and the stack.
        function tell(   first, i, told, input) {
            if (name == "") return
            first = 1
            for (i = lines; i >= 1; i--) if (line[i] ~ /^thread .* panicked at /) first = i
            for (i = first; i <= lines; i++) {
                if (line[i] ~ /^(stack backtrace:|note: )/) break
                if (line[i] ~ /^[ \t]*$/) continue
                if (told < most) { print "    | " short(line[i]); told++ }
                else if (input == "" && line[i] ~ /minimal failing input/) input = line[i]
            }
            if (input != "") print "    | " short(input)
            name = ""
        }
        function begin(of) {
            tell()
            if (of in seen || ++shown > tests) return
            seen[of]
            name = of
            lines = 0
            print "    " of
        }
        # Twice through the log: libtest says what failed before or behind what it printed.
        FNR == NR {
            if (/^test .* \.\.\. FAILED/) {
                of = $0
                sub(/^test /, "", of)
                sub(/ \.\.\. FAILED.*/, "", of)
                failed[of]
            }
            # Where a child wrote between name and verdict, the list at the end has the name.
            if (listed && /^    [^ ]+$/) failed[substr($0, 5)]
            else listed = /^failures:$/
            next
        }
        /[^ \t]/ { last[++all] = $0 }
        /^---- .* stdout ----$/ {
            of = substr($0, 6, length($0) - 17)
            if (of in failed) begin(of); else tell()
            next
        }
        # Micro-guests say why at once.
        /^test .* \.\.\. FAILED \(/ {
            of = $0
            sub(/^test /, "", of)
            sub(/ \.\.\. FAILED.*/, "", of)
            begin(of)
            next
        }
        /^(failures:|successes:|test result: |running [0-9]+ tests?)/ || /^(test |skipped: |failed: )/ { tell(); next }
        name != "" { line[++lines] = $0 }
        END {
            tell()
            for (of in failed) {
                if (of in seen) continue
                if (shown < tests) { print "    " of; shown++; seen[of] } else unseen++
            }
            if (unseen) print "    and " unseen " more"
            if (shown) exit
            for (i = all > 3 ? all - 2 : 1; i <= all; i++) print "    | " short(last[i])
        }
    ' "$1" "$1"
}

# What was skipped, a line for each reason; the names are in the logs.
skips_of() {
    grep -h '^skipped: ' "$@" | awk '
        { at = index(substr($0, 10), ": "); name = substr($0, 10, at - 1); why = substr($0, at + 11) }
        !(why in count) { order[++reasons] = why }
        !((why, name) in seen) { seen[why, name]; count[why]++; one[why] = name }
        END {
            for (i = 1; i <= reasons; i++) {
                why = order[i]
                print "    skipped: " (count[why] > 1 ? count[why] " tests" : one[why]) ": " why
            }
        }
    '
}

# suite NAME SECONDS COMMAND…: runs the command with the arguments in `chosen`, which may name
# tests, as soon as a lane is free.
chosen=()
suite() {
    local name=$1
    limits[$name]=$2
    shift 2
    commands[$name]=$(printf '%q ' "$@")
    choices[$name]=
    [ ${#chosen[@]} -eq 0 ] || choices[$name]=$(printf '%q ' "${chosen[@]}")
    while [ ${#lanes[@]} -ge "$most" ]; do take_one; done
    if is_late "$begin_by"; then
        skip "$name" "$(number "$name")" "this machine is slow: after $((SECONDS / 60)) minutes no other suite begins"
    else
        start "$name"
    fi
}

is_late() { [ "${CI:-}" = true ] && [ -n "$1" ] && [ "$SECONDS" -ge "$1" ]; }

# A second try, unless there is no time for it: then the first was the only one.
again() {
    lanes_for 1
    if is_late "$again_by"; then
        mv "$logs/$1.log.first" "$logs/$1.log"
        trouble+=("$1: no time for a second try, after $((SECONDS / 60)) minutes")
        # As if none of it had passed before: its log has all of it.
        first_tries[$1]="0 0 0 0 0 0 0"
        ended "$1"
    else
        start "$1"
    fi
}

start() {
    # With job control, for without it what runs beside the shell does not hear SIGINT.
    set -m
    play "$1" &
    set +m
    lanes[$!]=$1
}

# Waits for a suite to end, and says what it came to.
take_one() {
    local process name
    wait -n -p process "${!lanes[@]}"
    name=${lanes[$process]}
    unset "lanes[$process]"
    ended "$name"
}

# lanes_for N: from here on so many run beside each other.
lanes_for() {
    while [ ${#lanes[@]} -gt 0 ]; do take_one; done
    most=$1
}

# Runs a suite in a process of its own, and leaves status, seconds, and seconds of processor time:
# of what a suite takes, the rest is waiting.
play() {
    local name=$1 start=$SECONDS status folder=$XDG_RUNTIME_DIR/$1
    # VMs of a suite are not among those of its neighbour.
    mkdir -p "$folder"
    rm -f "$logs/$name.end"
    [ "$most" -eq 1 ] || export RUST_TEST_THREADS=1
    eval "XDG_RUNTIME_DIR=\$folder timeout ${limits[$name]} ${commands[$name]} ${choices[$name]}" \
        >"$logs/$name.log" 2>&1 </dev/null
    status=$?
    times >"$logs/$name.times"
    awk -F'[ms ]' -v status=$status -v took=$((SECONDS - start)) \
        'NR == 2 { printf "%d %d %d\n", status, took, $1 * 60 + $2 + $4 * 60 + $5 }' \
        "$logs/$name.times" >"$logs/$name.end"
}

# Counts a suite that has ended, and shows the end of its log if anything failed.
ended() {
    local name=$1 log=$logs/$1.log status took computed p f s missing why tests
    local again logs_of_it=("$log") first=(0 0 0 0 0 0) is_second=${first_tries[$1]:-}
    # A suite whose shell was ended has left nothing.
    read -r status took computed <"$logs/$name.end" || status=1 took=0 computed=0
    # What runs guests, or talks over sockets, depends on the machine's time: now and then a
    # neighbour takes it, or L1 ends for no reason (docs/internals/testing.md). What fails twice,
    # the second time with the machine to itself, is a failure; what failed once is told. An input
    # that broke a property may not come again, so it is a failure at once.
    if [ "$status" -ne 0 ] && [ -z "$is_second" ] && [ "$took" -lt "${limits[$name]}" ] &&
        [ "$name" != documentation ] && ! grep -q 'minimal failing input' "$log"; then
        mv "$log" "$log.first"
        grep -E '^(failed:|l1: |test .* FAILED|thread .* panicked)' "$log.first" | sed 's/^/    | /'
        mapfile -t again < <(failed_tests "$log.first")
        if [ ${#again[@]} -gt 0 ]; then
            # The others have passed, and are not run again.
            read -r -a first < <(count "$log.first")
            choices[$name]=$(printf '%q ' --exact "${again[@]}")
        fi
        first_tries[$name]="${first[*]:0:4} $took $computed ${#again[@]}"
        once_more+=("$name")
        echo "$name: at the end once more ${again[*]} (log of the first: $log.first)"
        return
    fi
    if [ -n "$is_second" ]; then
        read -r -a first <<<"$is_second"
        [ "${first[6]}" -eq 0 ] || logs_of_it+=("$log.first")
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
    printf '%-22s %4d passed, %d failed, %d skipped (%d s, processor %d s)\n' "$name" "$p" "$f" "$s" \
        $((took + first[4])) $((computed + first[5]))
    if [ "$s" -gt 0 ]; then skips_of "${logs_of_it[@]}"; fi
    if [ "$status" -ne 0 ]; then
        grep -vE '^test .* ok( |$)|^skipped: ' "$log" | tail -n 40 | sed 's/^/    | /'
        why=$(failures_of "$log")
        details+=("$name:"$'\n'"$why")
        tests=$(sed -n 's/^    \([^|].*\)/\1/p' <<<"$why" | paste -sd' ')
        case $status in
            124) trouble+=("FAILED: $name: stopped after ${limits[$name]} s (whole log: $log)") ;;
            *) trouble+=("FAILED: $name: ${tests:-status $status} (whole log: $log)") ;;
        esac
    fi
}

# skip NAME COUNT WHY
skip() {
    printf '%-22s %4d skipped: %s\n' "$1" "$2" "$3"
    skipped=$((skipped + $2))
    trouble+=("SKIPPED: $1: $3")
}

# leave_out NAME COUNT WHAT-IS-MISSING
leave_out() {
    skip "$@"
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
    # These are packages, and the build is processor time: one does not wait for the other.
    install_for_tests >"$logs/installing.log" 2>&1 &
    installing=$!
fi
check_rust
[ -n "$quick" ] || install_target
# Tests of crates, not optimised; and what runs guests, for them and for L1. A choice of packages
# is a choice of features, so all of the workspace is built for both, and what others wrote once.
build build --workspace --lib --bins --tests --examples
if [ -n "$quick" ]; then
    build guests --workspace --test suites --test micro
else
    # The second program of the name takes the place of the first.
    UMPIRE_NOT_OPTIMISED=$(cd "$logs" && pwd)/umpire
    export UMPIRE_NOT_OPTIMISED
    cp -f "$(built false "$logs/build.json" | awk '$2 == "bin" && $3 == "umpire" { print $4 }')" \
        "$UMPIRE_NOT_OPTIMISED" || give_up "umpire was not found in $logs/build.json"
    wait "$installing"
    installing=
    cat "$logs/installing.log"
    # A copy, for the second program of the name takes this one's place too.
    cp -f "$(built false "$logs/build.json" | awk '$2 == "bin" && $3 == "l1" { print $4 }')" \
        "$logs/l1" || give_up "l1 was not found in $logs/build.json"
    echo "fetching L1's packages, unless they are in the cache (log: $logs/fetch.log) …"
    timeout 900 "$logs/l1" --fetch-only >"$logs/fetch.log" 2>&1 </dev/null &
    fetching=$!
    build guests --config guest-tests/guests.toml --workspace --lib --bins \
        --test suites --test micro --test perfmon
fi
tests=$(built true "$logs/build.json")
guests=$PWD/guest-tests
binaries=$(built true "$logs/guests.json" | awk -v of="$guests" '$1 == of && $2 == "test" { print $3, $4 }')
l1=$(built false "$logs/guests.json" | awk '$3 == "l1" { print $4 }')
[ -n "$binaries" ] && [ -n "$quick$l1" ] || give_up "the tests were not found in $logs/guests.json"

# Tests of crates are a suite for each top folder.
rm -f "$logs"/unit-*.list "$logs/harness.list"
awk -v of="$guests" -v root="$PWD/" -v logs="$logs" '
    index($1 "/", of "/") == 1 { print >(logs "/harness.list"); next }
    { top = substr($1, length(root) + 1); sub("/.*", "", top); print >(logs "/unit-" top ".list") }
' <<<"$tests"
units=$(cd "$logs" && ls unit-*.list | sed 's/\.list$//')
micro=$(micro_suites)
is_micro() { grep -qx "$1" <<<"$micro"; }
# A module of the one program with libtest is a suite: a process of its own, a log, a time-out.
suites=$(awk '$1 == "suites" { print $2 }' <<<"$binaries")
listed=$("$suites" --list | sed -n 's/: test$//p')
modules=$(cut -d: -f1 <<<"$listed" | uniq)
[ -n "$modules" ] || give_up "$suites lists no test"

# The file of a program of micro-guests.
guests_of() { awk -v name="$1" '$1 == name { print $2 }' <<<"$binaries"; }

# L1, or what its cache has: Debian's kernels for those on the processor in software.
needs_l1() {
    case $1 in
        emu_hostile) false ;;
        l1 | linux* | emu_* | count | msr | perf_contract | *-in-l1*) ;;
        *) false ;;
    esac
}

# The tests of a suite of that program. Of `kernels` those of tiny kernels that ask for nothing which
# only KVM has run on emu too; what `linux_models` has there is a suite, for it needs no time in L1.
tests_of() {
    case $1 in
        kernels-on-emu) grep -E '^kernels::(boot|ends|machine|pmu|reservations|state)::' <<<"$listed" ;;
        linux_models-on-emu) grep '^linux_models::on_emu::' <<<"$listed" ;;
        linux_models) grep '^linux_models::' <<<"$listed" | grep -v '^linux_models::on_emu::' ;;
        *) grep "^$1::" <<<"$listed" ;;
    esac
}

# QEMU now and then ends an L1 of two processors, or stands still (docs/internals/testing.md,
# "Limits of L1"): so many of them have the micro-guests, and what breaks off is a part.
parts=6
# The tests of a suite in L1: of micro-in-l1.K, every sixth.
in_l1() {
    "$(guests_of "${1%%-in-l1*}")" --list | sed -n 's/: test$//p' |
        if [ "$1" = "${1%.*}" ]; then cat; else awk -v k="${1##*.}" -v of=$parts 'NR % of == k - 1'; fi
}

# How many tests a suite has.
number() {
    case $1 in
        *-in-l1*) in_l1 "$1" | grep -c . ;;
        *) tests_of "$1" | grep -c . ;;
    esac
}

# one NAME: starts this suite.
one() {
    local file processors=2
    if [ -n "$l1_missing" ] && needs_l1 "$1"; then
        leave_out "$1" "$(number "$1")" "$l1_missing"
        return
    fi
    case $1 in
        unit-* | harness)
            [ -z "$quick" ] || mapfile -t chosen < <(printf -- '--skip\n%s\n' "${quick_skips[@]}" "$quick_whole")
            suite "$1" 900 bash -c 'run_all --show-output "$@" <"$0"' "$logs/$1.list"
            chosen=()
            ;;
        documentation) suite documentation 900 cargo test --workspace --doc --no-fail-fast ;;
        *-in-l1*)
            file=$(guests_of "${1%%-in-l1*}")
            mapfile -t chosen < <(in_l1 "$1")
            chosen=(--exact "${chosen[@]}")
            # Its guests have two vCPUs, which QEMU's SVM does not run soundly on two
            # processors of L1 (docs/internals/testing.md, "Limits of L1").
            [ "$1" = perfmon-in-l1 ] && processors=1
            suite "$1" 900 "$l1" --smp "$processors" --timeout 300 -- "$file" --show-output
            chosen=()
            ;;
        kernels-on-emu)
            mapfile -t chosen < <(tests_of "$1")
            chosen=(--exact "${chosen[@]}")
            suite "$1" 600 env -C "$guests" UMPIRE_TEST_ENGINE=emu "$suites" --show-output
            chosen=()
            ;;
        *)
            if is_micro "$1"; then
                suite "$1" 600 env -C "$guests" "$(guests_of "$1")" --show-output
                return
            fi
            mapfile -t chosen < <(tests_of "$1")
            chosen=(--exact "${chosen[@]}")
            suite "$1" 1500 env -C "$guests" "$suites" --show-output
            chosen=()
            ;;
    esac
}

# Two of these run beside each other, each a test at a time: that is no more than two guests of
# Linux, or as many tests, as libtest runs at a time in one suite. What is not here has the machine
# to itself: it measures time with less room, or needs both processors. It runs behind the first of
# them; then come those of Linux, the longest last: on a slow machine these are left out.
beside="$units slurm arbiterd cpc documentation perfmon-in-l1 l1 perfmon kernels hostile emu_hostile
    kernels-on-emu golden harness events bad_input house docs pcr_lines"
beside_of_linux="linux_arbiter linux_test_vmm perf_contract linux_record msr count linux_ibs
    perfmon_tools linux_agent linux_pebs linux_view emu_linux linux_models-on-emu linux
    linux_debug linux_pcr linux_models"
# What a change breaks first, in the time that one waits for it: micro-guests of each kind of
# access, and the suites that start no Linux and wait for nobody.
quick_modules="golden events bad_input house docs pcr_lines"
quick_guests="amd intel overflow rdpmc vcpus pcr::reserve pcr::a_rogue"
# Walks through every state, and a build of another workspace.
quick_skips=(unit::model::every_state_under_an_administrator_is_sound
    unit::model::every_state_of_the_interacting_scheme_is_sound
    other_versions::a_vmm_with_other_versions_compiles_and_runs)
# So many random inputs for each property. Otherwise it has the 256 of proptest or a number of its
# own, which this variable overrides.
quick_cases=64
# But the rules of registers, which take seconds, are played as often as ever.
quick_whole=vcpu_prop::

l1_missing=
if [ -n "$quick" ]; then
    export PROPTEST_CASES=$quick_cases
    all_units=$(run_all --list < <(cat "$logs"/unit-*.list))
    for name in "${quick_skips[@]}"; do
        grep -qxF "$name: test" <<<"$all_units" || give_up "no test of a crate is called $name"
    done
    lanes_for 2
    for name in $units harness $quick_modules; do one "$name"; done
    suite vcpu_prop 300 env -u PROPTEST_CASES bash -c 'run_all --show-output "$@" <"$0"' \
        "$logs/unit-pmu-virt.list" "$quick_whole"
    lanes_for 1
    read -r -a chosen <<<"$quick_guests"
    file=$(guests_of micro)
    # Who lists into a pipe that is closed early fails.
    all_guests=$("$file" --list)
    for part in "${chosen[@]}"; do
        grep -qF "$part" <<<"$all_guests" || give_up "no micro-guest is called $part"
    done
    suite micro 600 env -C "$guests" "$file" --show-output
    left_out=("micro-guests but for $quick_guests"
        "${quick_skips[*]}, and all but $quick_cases random inputs of a property"
        "documentation, kernels-on-emu, linux_models-on-emu, $(grep -vx micro <<<"$micro" | tr '\n' ' ')and in L1: $(tr '\n' ' ' <<<"$micro")"
        "$(grep -vxF "$(tr ' ' '\n' <<<"$quick_modules")" <<<"$modules" | tr '\n' ' ')")
    finish
fi

wait "$fetching" || {
    tail -n 5 "$logs/fetch.log" | sed 's/^/    | /'
    l1_missing="L1 cannot be built here, see $logs/fetch.log; it needs apt with a Debian mirror"
}
fetching=
all=$(printf '%s\n' $units harness documentation $micro \
    $(sed "/^micro\$/d; s/\$/-in-l1/" <<<"$micro") $(seq -f 'micro-in-l1.%g' $parts) \
    kernels-on-emu linux_models-on-emu $modules)
for name in $beside $beside_of_linux; do
    grep -qxF "$name" <<<"$all" || give_up "no suite is called $name"
done
lanes_for 2
for name in $beside; do one "$name"; done
lanes_for 1
for name in $(grep -vxF "$(printf '%s\n' $beside $beside_of_linux)" <<<"$all"); do one "$name"; done
lanes_for 2
begin_by=3000
for name in $beside_of_linux; do one "$name"; done
finish
