#!/bin/busybox sh
# Init of the Linux guest. Every line of its script is one step: a shell command whose output appears
# on the console between two marker lines. Then the guest powers off.
# The script is /run.sh, or the file that `umpire_script=PATH` on the kernel's command line names.

/bin/busybox mkdir -p /proc /sys /dev /tmp /run /root
/bin/busybox --install -s /bin
export PATH=/usr/bin:/bin HOME=/root PAGER=cat TERM=dumb
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t debugfs debug /sys/kernel/debug
mount -t tracefs trace /sys/kernel/tracing
mount -t tmpfs tmp /tmp
mkdir -p /dev/shm
mount -t tmpfs shm /dev/shm
echo -1 >/proc/sys/kernel/perf_event_paranoid
echo 0 >/proc/sys/kernel/kptr_restrict
# Kernel messages must not fall between a step's lines; `dmesg` as a step shows them all.
dmesg -n 1
# The console otherwise turns each newline into two characters.
# What the host types is no output.
stty -onlcr -echo 2>/dev/null

step=0
while IFS= read -r line <&3; do
    case $line in
    '' | '#'*) continue ;;
    esac
    step=$((step + 1))
    echo "#### begin $step: $line"
    (exec sh -c "$line" </dev/null 2>&1 3<&-)
    # A step's last line may lack its newline; a marker always starts one.
    printf '\n#### end %s: status %s\n' "$step" "$?"
done 3<"${umpire_script:-/run.sh}"
echo "#### done"
poweroff -f
