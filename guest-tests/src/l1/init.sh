#!/l1/busybox sh
# Init of the L1 machine. It runs /l1/run and reports on the virtio ports `stdout`, `stderr`, `files`
# and `status`; its own messages go to the console.
# Status lines: "ready", then "alive" every 2 s, "exit N", "files", "error TEXT".

/l1/busybox mkdir -p /proc /sys /dev /tmp /run /root /l1/bin
/l1/busybox --install -s /l1/bin
export PATH=/l1/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts pts /dev/pts
mount -t tmpfs shm /dev/shm
# No file system on /tmp: it may hold the command's files.
chmod 1777 /tmp /dev/shm
ln -s /proc/self/fd /dev/fd
ln -s /proc/self/fd/0 /dev/stdin
ln -s /proc/self/fd/1 /dev/stdout
ln -s /proc/self/fd/2 /dev/stderr
[ -e /bin/sh ] || ln -s /l1/busybox /bin/sh
ip link set lo up
hostname l1

# What stands still is told while it does: before the command's own time-out, which is a part of
# L1's time.
if [ "$L1_SECONDS" -gt 30 ]; then
    (
        sleep $((L1_SECONDS * 2 / 3))
        echo "l1: two thirds of the time are over; each thread, its state, where it waits, its system call:"
        for task in /proc/[0-9]*/task/*; do
            # What has no arguments is of the kernel.
            [ -n "$(tr -d '\0' <"${task%/task/*}/cmdline")" ] || continue
            read -r call rest <"$task/syscall"
            echo "$(cat "$task/comm") $(sed -n 's/^State:[[:space:]]*//p' "$task/status"), $(cat "$task/wchan"), $call"
        done
    ) 2>/dev/null &
fi

# The names arrive over the control queue some time after the ports.
port() {
    for tries in $(seq 500); do
        for folder in /sys/class/virtio-ports/*; do
            name=
            read -r name 2>/dev/null <"$folder/name"
            if [ "$name" = "$1" ] && [ -e "/dev/${folder##*/}" ]; then
                echo "/dev/${folder##*/}"
                return
            fi
        done
        usleep 10000
    done
    echo "l1: no virtio port $1" >&2
    poweroff -f
}

stop() {
    poweroff -f
    # Nothing follows a power-off; without ACPI this wait ends by the harness's time-out.
    sleep 1000
}

exec 7>"$(port status)"
for module in irqbypass kvm kvm-amd; do
    if ! insmod "/l1/$module.ko"; then
        echo "error the module $module.ko cannot be loaded" >&7
        stop
    fi
done
if ! [ -c /dev/kvm ]; then
    echo "error kvm-amd.ko made no /dev/kvm" >&7
    stop
fi

# Through pipes, so that the command can open /dev/stdout again, which a port does not allow.
mkfifo /l1/stdout /l1/stderr
cat /l1/stdout >"$(port stdout)" &
first=$!
cat /l1/stderr >"$(port stderr)" &
second=$!
echo ready >&7
# With virtual time of its own L1 would say so at any time, or seldom.
if [ -z "$L1_ICOUNT" ]; then
    while :; do sleep 2 || usleep 2000000; echo alive; done >&7 &
fi
# The subshell keeps the shell's own words about a killed command out of the command's stderr.
(exec sh /l1/run </dev/null >/l1/stdout 2>/l1/stderr 7>&-)
status=$?
# Both end with the last writer. A process that the command left behind may hold them open.
for tries in $(seq 100); do
    kill -0 "$first" 2>/dev/null || kill -0 "$second" 2>/dev/null || break
    usleep 20000
done
echo "exit $status" >&7
if [ -d /l1/out ]; then
    tar -cf - -C /l1/out . >"$(port files)"
    echo files >&7
fi
stop
