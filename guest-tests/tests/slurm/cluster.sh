#!/bin/bash
# A cluster of two nodes, n1 and n2, on this machine, for the tests: munge, MariaDB, slurmdbd, the
# controller and two slurmd, all in one folder and on ports of their own. It prints `ready`, and
# ends with all that it started when its standard input ends: so whoever started it may die. The
# folder goes, too, unless the cluster did not come up.
#
# cluster.sh DIR PORT,PORT,PORT,PORT PLUGIN-LINE linuxproc|cgroup
set -u
dir=$1 plugin=$3 kind=$4
IFS=, read -r ctld_port n1_port n2_port dbd_port <<<"$2"
host=$(hostname -s)
export SLURM_CONF=$dir/etc/slurm.conf
mkdir -p "$dir"/{etc,log,state,db/mysql}
exec 2>>"$dir/log/cluster"
ours=()

# Whoever has this cluster's configuration is of this cluster: daemons, slurmstepds and tasks.
members() {
    local environment process
    for environment in /proc/[0-9]*/environ; do
        process=${environment#/proc/}
        process=${process%/environ}
        [ "$process" = "$$" ] && continue
        # Whoever has ended meanwhile has none.
        { tr '\0' '\n' <"$environment"; } 2>/dev/null | grep -qxF "SLURM_CONF=$SLURM_CONF" || continue
        # Commands of this script are, too, and end by themselves.
        grep -q "^PPid:[[:space:]]*$$\$" "/proc/$process/status" 2>/dev/null &&
            [[ " ${ours[*]} " != *" $process "* ]] && continue
        echo "$process"
    done
}

finish() {
    local process signal tries=0
    trap - EXIT
    # In the order in which each can still say goodbye to the next.
    for ((at = ${#ours[@]} - 1; at >= 0; at--)); do
        kill "${ours[at]}" 2>/dev/null
        for ((tries = 0; tries < 30; tries++)); do
            kill -0 "${ours[at]}" 2>/dev/null || break
            sleep 0.1
        done
        kill -9 "${ours[at]}" 2>/dev/null
    done
    for process in $(members); do kill -9 "$process" 2>/dev/null; done
    for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/*; do
        for node in n1 n2; do
            [ "$kind" = cgroup ] && [ -d "$hierarchy/slurm_$node" ] &&
                find "$hierarchy/slurm_$node" -depth -type d -exec rmdir {} \;
        done
    done
    [ -n "${1:-}" ] || rm -rf "$dir"
    exit "${1:-0}"
}
trap finish EXIT

# start COMMAND…
start() {
    "$@" </dev/null >>"$dir/log/out" 2>&1 &
    ours+=($!)
}

# until_well SECONDS COMMAND…: until the command succeeds.
until_well() {
    local until=$((SECONDS + $1))
    shift
    while ! "$@" >>"$dir/log/tries" 2>&1; do
        if [ $SECONDS -ge $until ]; then
            echo "failed: $* (see $dir/log)"
            tail -qn 5 "$dir"/log/*
            finish 1
        fi
        sleep 0.1
    done
}

head -c 1024 /dev/urandom >"$dir/etc/munge.key"
chmod 400 "$dir/etc/munge.key"
start munged --foreground --force --key-file="$dir/etc/munge.key" --socket="$dir/munge" \
    --pid-file="$dir/munged.pid" --log-file="$dir/log/munged" --seed-file="$dir/munged.seed"
# Without tables of rights it looks at none.
start mariadbd --no-defaults --user=root --datadir="$dir/db" --socket="$dir/db.sock" \
    --skip-networking --skip-grant-tables --pid-file="$dir/mariadbd.pid" \
    --innodb-buffer-pool-size=16M --innodb-log-file-size=8M

cat >"$dir/etc/slurmdbd.conf" <<END
AuthType=auth/munge
AuthInfo=socket=$dir/munge
DbdHost=$host
DbdAddr=127.0.0.1
DbdPort=$dbd_port
SlurmUser=root
PidFile=$dir/slurmdbd.pid
LogFile=$dir/log/slurmdbd
StorageType=accounting_storage/mysql
StorageUser=root
StorageLoc=slurm
END
chmod 600 "$dir/etc/slurmdbd.conf"

tracking=linuxproc tasks=task/affinity
echo "CgroupAutomount=no" >"$dir/etc/cgroup.conf"
if [ "$kind" = cgroup ]; then
    tracking=cgroup tasks=task/cgroup,task/affinity
    cat >"$dir/etc/cgroup.conf" <<END
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
CgroupAutomount=no
ConstrainCores=yes
END
fi
cat >"$dir/etc/slurm.conf" <<END
ClusterName=umpire
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket=$dir/munge,cred_expire=5
SlurmctldPort=$ctld_port
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld
SlurmdLogFile=$dir/log/slurmd-%n
SlurmctldDebug=verbose
SlurmdDebug=verbose
ProctrackType=proctrack/$tracking
TaskPlugin=$tasks
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
PlugStackConfig=$dir/etc/plugstack.conf
Epilog=$dir/etc/epilog
JobSubmitPlugins=lua
GresTypes=pmc,pmcfixed
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$dbd_port
AccountingStoragePass=$dir/munge
AccountingStorageTRES=gres/pmc,gres/pmcfixed
ReturnToService=2
KillWait=2
CompleteWait=0
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$n1_port CPUs=2 Gres=pmc:4,pmcfixed:2
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$n2_port CPUs=2 Gres=pmc:4,pmcfixed:2
PartitionName=own Nodes=n1,n2 Default=YES OverSubscribe=NO State=UP
PartitionName=shared Nodes=n1,n2 OverSubscribe=FORCE:4 State=UP
END
printf 'Name=pmc Count=4\nName=pmcfixed Count=2\n' >"$dir/etc/gres.conf"
echo "$plugin" >"$dir/etc/plugstack.conf"

until_well 30 test -S "$dir/munge"
until_well 30 test -S "$dir/db.sock"
start env MYSQL_UNIX_PORT="$dir/db.sock" slurmdbd -D
until_well 60 timeout 5 sacctmgr -i add cluster umpire
start slurmctld -D
start slurmd -D -N n1
start slurmd -D -N n2
idle() { [ "$(timeout 5 sinfo -h -N -p own -o %T | sort | uniq -c | tr -s ' ')" = " 2 idle" ]; }
until_well 60 idle
echo ready
# Restarts a slurmd that a test has killed.
while read -r word node; do
    if [ "$word" = slurmd ]; then
        start slurmd -D -N "$node"
        echo ready
    fi
done
