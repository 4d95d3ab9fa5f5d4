#!/bin/sh
# What a benchmark does with perf: counts and rates of a command, a profile, its report, stacks.
# usage: PERF=perf bench.sh FOLDER COMMAND...
set -eu
perf=${PERF:-perf}
out=$1
shift

# Counts, as a spreadsheet takes them: value,unit,event,time,percent
"$perf" stat -x, -ecycles,instructions,branches -o "$out/counts.csv" -- "$@"
cycles=$(awk -F, '$3 ~ /^cycles/ { print $1 }' "$out/counts.csv")
instructions=$(awk -F, '$3 ~ /^instructions/ { print $1 }' "$out/counts.csv")
case $cycles$instructions in
*[!0-9]*) echo "no counts: $cycles $instructions" >&2; exit 1 ;;
esac
echo "$cycles $instructions" | awk '{ printf "ipc %.2f\n", $2 / $1 }'

# How it goes on, every 100 ms; the command's own output stays apart on standard output.
"$perf" stat -x, -I100 -e cycles "$@" >"$out/said" 2>"$out/intervals.csv"
awk -F, '!/^#/ && NF { n++; sum += $2 } END { printf "intervals %d\n", n; exit !(n > 1 && sum > 0) }' \
    "$out/intervals.csv"

# Where the time goes.
"$perf" record -F99 -g -o "$out/perf.data" -- "$@" >/dev/null 2>"$out/told"
"$perf" report -i "$out/perf.data" --stdio --no-children -g none --percent-limit 1 \
    >"$out/report.txt" 2>/dev/null
"$perf" script -i "$out/perf.data" >"$out/stacks.txt" 2>/dev/null
hottest=$(grep -v '^#' "$out/report.txt" | grep -m 1 % | awk '{ print $1 }')
echo "hottest $hottest"
