/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* A lease from the arbiter, in a bounded time. No Slurm. */
#ifndef UMPIRE_ASK_H
#define UMPIRE_ASK_H

#include <stdint.h>
#include <sys/types.h>

#include "wish.h"

/* Each call of the arbiter, and the library's loading: nobody waits longer for one of them. */
#define BOUND_MS 1000

struct question {
	const char *socket;
	const char *library;
	const char *group;	/* the control group's path */
	const char *own_procs;	/* the file by which one enters the caller's own; empty or NULL: none */
	const char *cpus;	/* NULL: all */
	const char *label;
	uid_t uid;		/* whose job it is */
	gid_t gid;
	unsigned wait_s;	/* in the arbiter's queue */
	const struct wish *wish;
};

/* What came of it. */
struct answer {
	int is_last;	/* else the one who asks says that it has got further */
	int is_granted;
	uint64_t lease;
	char text[1024];	/* the lease in a few words, or one line why there is none */
};

/*
 * Asks in a process of its own, which has the library and waits for the arbiter: what hangs there
 * is killed, and none of it is in slurmstepd.
 */
void ask(const struct question *question, struct answer *answer);

/* Since whenever, in microseconds. */
long long now_us(void);

/* Runs a program for `bound_ms` at most. Returns its status; -1: it did not end, or cannot run. */
int run(const char *const *words, int bound_ms);

#endif
