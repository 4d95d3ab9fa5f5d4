#!/bin/sh
# What a job's counters came to on this node goes into its AdminComment (docs/guide/slurm.md).
# For Epilog= of slurm.conf. Printed by: umpire slurm epilog
# Slurm drains a node whose epilog fails, and has the job's CPUs wait for one that goes on: this one
# ends with 0 whatever happens, within 15 s. What went wrong is in the system's log.
[ -n "$SLURM_JOB_ID" ] && [ -n "$SLURMD_NODENAME" ] || exit 0
PATH=${PATH:-/usr/bin:/bin}
export PATH
said=$(timeout -k 1 13 '@PROGRAM@' slurm account "$SLURM_JOB_ID" --node "$SLURMD_NODENAME" \
    --config '@CONFIG@' 2>&1 >/dev/null </dev/null) ||
    timeout -s KILL 1 logger -t umpire \
        "job $SLURM_JOB_ID: ${said:-umpire slurm account gave no answer}" >/dev/null 2>&1 </dev/null
exit 0
