/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* The control group of a step on a node, and the CPUs of its cores. No Slurm. */
#ifndef UMPIRE_GROUP_H
#define UMPIRE_GROUP_H

#include <limits.h>
#include <stddef.h>
#include <sys/types.h>

struct group {
	char folder[PATH_MAX];	/* where it is in the file system */
	char path[PATH_MAX];	/* as /proc/PID/cgroup has it */
	int is_ours;		/* made here, and entered by each task */
	char own_procs[PATH_MAX];	/* the file by which one enters the caller's own, if is_ours */
};

/*
 * The group of a step: Slurm's own, where this process is in Slurm's hierarchy of version 2,
 * else one that is made, where no limit is left by entering it. 0, or -1 and why.
 */
int find_group(struct group *group, const char *node, const char *step, char *why, size_t size);

/* This process goes into the group. 0, or -1 and errno. */
int enter_group(const struct group *group);

/* The group goes, if it was made here and nobody is in it any more. */
void leave_group(const struct group *group, const char *node);

/* Groups of slurmstepds that were killed go, as far as nobody is in them. */
void sweep_groups(const char *node);

/*
 * Slurm's own group of a step's tasks, where `own` is that of its slurmstepd
 * (.../step_0/slurm); -1: `own` is none of Slurm's.
 */
int group_of_slurm(const char *own, char *out, size_t size);

/*
 * Whether a process that leaves the group `own` may leave limits on memory, CPUs or the like, in the
 * hierarchy that is mounted at `top`.
 */
int has_limits(const char *own, const char *top);

/*
 * The CPUs of these cores, as Slurm numbers them, socket by socket; in both, lists like "0,2-3".
 * -1: that cannot be told, because the machine has no cores of these numbers.
 */
int cpus_of_cores(const char *cores, const char *sysfs, char *out, size_t size);

#endif
