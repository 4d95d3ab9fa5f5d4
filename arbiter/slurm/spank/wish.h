/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* What --counters and --counters-wait say, and what plugstack.conf says of the plugin. No Slurm. */
#ifndef UMPIRE_WISH_H
#define UMPIRE_WISH_H

#include <stddef.h>

#define MOST_EVENTS 16
#define MOST_PROGRAMMABLE 64
#define MOST_FIXED 32
/*
 * Slurm cannot cancel a step that waits, and may drain the node of one that has not ended
 * UnkillableStepTimeout (60 s) after that was wanted. The calls besides take 4 s at most (ask.c).
 */
#define MOST_WAIT_S 45
#define MOST_REQUEUES 1000

/* Counters on each CPU. */
struct wish {
	unsigned programmable;
	unsigned fixed;
	unsigned event_count;
	char events[MOST_EVENTS][64];
};

/* What to do where others have the counters: both 0, refuse. */
struct patience {
	unsigned seconds;	/* in the arbiter's queue */
	unsigned requeues;	/* of a job of sbatch */
};

/* The arguments of plugstack.conf. */
struct site {
	const char *socket;	/* %n is the node's name */
	const char *library;
	const char *scontrol;
	const char *shared;	/* partitions whose CPUs jobs share, with commas between them */
	int by_cores;		/* tasks run on the cores that Slurm gave them alone */
};

/* Each returns 0, or -1 and in `why` what is wrong and what to give. */
int read_wish(const char *text, struct wish *wish, char *why, size_t size);
int read_patience(const char *text, struct patience *patience, char *why, size_t size);
int read_site(int argc, char **argv, struct site *site, char *why, size_t size);

/* Makes one line of what may have others' words in it. */
void one_line(char *text);

/* Whether `whole` has all counters that `part` has, and its events. */
int has_all(const struct wish *whole, const struct wish *part);

/* Whether `name` is in a list with commas. */
int is_listed(const char *list, const char *name);

/* `pattern` with the node's name for %n; -1: too long. */
int with_node(const char *pattern, const char *node, char *out, size_t size);

#endif
