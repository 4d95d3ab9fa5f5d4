/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Leases on the performance counters of this host, from its arbiter (umpire arbiterd):
 * docs/reference/arbiterd.md. Link with -lumpire_lease.
 *
 * A lease belongs to the process that took it and ends with it, however it ends. Functions
 * that fail return -1 or NULL and set errno; umpire_lease_error() says what is wrong and
 * what to do. A lease may be used by one thread at a time, different leases by different
 * threads. After fork() only the process that took a lease may use it.
 *
 * errno: EINVAL    what is asked for makes no sense, or is never to be had here
 *        E2BIG     a structure has more than this library knows
 *        EBUSY     others have the counters
 *        EPERM     the arbiter's policy does not allow it
 *        ENOENT    there is no such lease, or it has ended
 *        ESTALE    the lease has changed since
 *        ECONNRESET  the arbiter is gone; umpire_lease_claim() when it is back
 *        ETIMEDOUT the arbiter is there, and does not answer
 *        EPROTO    it answers what this library does not understand
 *        and those of connect(2), ECONNREFUSED and ENOENT among them: no arbiter runs
 */
#ifndef UMPIRE_LEASE_H
#define UMPIRE_LEASE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A lease, and the connection that it belongs to. */
typedef struct umpire_lease umpire_lease;

#define UMPIRE_LEASE_BEST_EFFORT 0x1 /* Flag: guaranteed leases may take its counters. */
#define UMPIRE_LEASE_PREEMPTIBLE 0x2 /* Flag: leases of higher priority may. */
#define UMPIRE_LEASE_FOR_OTHERS 0x4 /* Flag: for_uid and for_gid are meant though both are 0. */

/* For whom a lease is. */
#define UMPIRE_LEASE_SCOPE_CPU 1 /* whatever runs on the CPUs */
#define UMPIRE_LEASE_SCOPE_THREAD 2 /* `threads` */
#define UMPIRE_LEASE_SCOPE_CGROUP 3 /* `cgroup` */
#define UMPIRE_LEASE_SCOPE_PART 4 /* what the caller runs in the control group that it is in, out
				   * of the lease that this one has */

/*
 * What is asked for. Set everything to 0 and `size` to sizeof(struct umpire_lease_terms):
 * a program goes on working with later versions of this library, which may know more
 * fields. What is 0 or NULL is not asked for, or is as the arbiter has it.
 */
struct umpire_lease_terms {
	size_t size;
	uint32_t programmable;	/* programmable counters, on each CPU */
	uint32_t fixed;		/* fixed-function counters, on each CPU */
	const char *const *events;	/* names in the arbiter's table; a counter for each */
	size_t event_count;
	const char *pmu;	/* NULL: the host's first */
	const char *cpus;	/* as the kernel writes them, "0,2-3"; NULL: all, or those of
				 * the lease of the control group that the caller is in */
	const uint32_t *threads;	/* the caller's own: counters while one of them runs; */
	size_t thread_count;		/* without any: as `scope` says */
	uint32_t at_least;	/* be content with so many counters; 0: all or nothing */
	uint32_t flags;		/* UMPIRE_LEASE_... */
	uint32_t priority;	/* 0 to 255: more is more */
	uint32_t reserved;	/* 0 */
	uint64_t lasts_ms;	/* without a renewal; 0: no end */
	int64_t waits_ms;	/* for its turn; 0: not at all, -1: for ever */
	const char *tenant;	/* one of the user's tenants; NULL: the first */
	const char *label;	/* a name for people */
	const char *cgroup;	/* for what runs in this control group: the path of version 2 on
				 * the host, or from the caller's own group on without the
				 * first '/'. It keeps the lease when this is freed, and ends
				 * with what runs there; NULL: none */
	uint32_t for_uid;	/* whose the group is, */
	uint32_t for_gid;	/* if not the caller's; both 0: the caller's, or root's with
				 * UMPIRE_LEASE_FOR_OTHERS */
	uint32_t scope;		/* UMPIRE_LEASE_SCOPE_...; 0: `cgroup` or `threads` if there are
				 * any, else a part of what the caller's control group has, and
				 * for whatever runs on the CPUs if that has nothing */
	uint32_t reserved2;	/* 0 */
};

#define UMPIRE_LEASE_NO_TIME UINT64_MAX /* There is no such time. */

/* A lease as it was last heard of. Set `size` before it is filled in. */
struct umpire_lease_state {
	size_t size;
	uint64_t id;		/* its number in umpire leases */
	uint64_t generation;	/* grows with every change of what it holds */
	uint32_t wants;		/* counters on each CPU */
	uint32_t holds;		/* it holds the first so many of them */
	uint64_t left_ms;	/* until it ends without a renewal, or UMPIRE_LEASE_NO_TIME */
	uint64_t broken_ms;	/* somebody without a lease has had counters that it needs, for
				 * so long, or UMPIRE_LEASE_NO_TIME */
	uint64_t blind_ms;	/* counters times time that it lacked so far */
	uint64_t within;	/* the lease of a control group out of which it is taken; 0: none */
};

/* What happens to a lease. A later arbiter may tell of more: 0. */
#define UMPIRE_LEASE_WAITS 1	/* it has a place in the queue */
#define UMPIRE_LEASE_HOLDS 2	/* it holds more, or fewer, counters than before */
#define UMPIRE_LEASE_LEAVING 3	/* it will hold fewer: stop using the others by then */
#define UMPIRE_LEASE_SPARED 4	/* it keeps what it was about to lose */
#define UMPIRE_LEASE_RENEWED 5
#define UMPIRE_LEASE_CLAIMED 6	/* it was taken over after a restart of the arbiter */
#define UMPIRE_LEASE_BROKEN 7	/* somebody without a lease has counters that it needs */
#define UMPIRE_LEASE_MENDED 8	/* they are its own again */
#define UMPIRE_LEASE_ENDED 9	/* it holds nothing, for ever; free it */

/* An event. Set `size` before it is filled in. */
struct umpire_lease_event {
	size_t size;
	int32_t what;		/* UMPIRE_LEASE_..., or 0 */
	uint32_t holds;		/* counters that it holds now */
	uint32_t leaving_to;	/* so many are left after leaving_in_ms */
	uint32_t reserved;
	uint64_t leaving_in_ms;	/* or UMPIRE_LEASE_NO_TIME */
	const char *message;	/* in words; valid until the lease's next call */
};

/*
 * Asks the arbiter at `socket` (NULL: what UMPIRE_ARBITER names, else the system's) for a
 * lease. A lease that waits holds nothing yet: umpire_lease_wait().
 */
umpire_lease *umpire_lease_acquire(const char *socket, const struct umpire_lease_terms *terms);

/*
 * Waits until the lease holds something: 1; 0: not within timeout_ms (-1: for ever). Events
 * on the way there are taken in.
 */
int umpire_lease_wait(umpire_lease *lease, int timeout_ms);

/*
 * The next event: 1; 0: none within timeout_ms (0: look only; -1: for ever). `event` may be
 * NULL.
 */
int umpire_lease_next(umpire_lease *lease, int timeout_ms, struct umpire_lease_event *event);

/*
 * Can be read from when something happens to the lease (poll(2)); only
 * umpire_lease_next() may read. Call that until it returns 0 before you wait for this.
 */
int umpire_lease_fd(const umpire_lease *lease);

/* The lease as it was last heard of; no event is taken in. */
int umpire_lease_get(const umpire_lease *lease, struct umpire_lease_state *state);

/* Has the lease last for its time again. */
int umpire_lease_renew(umpire_lease *lease);

/* Gives back all but the first `keep` counters. With 0 the lease ends. */
int umpire_lease_release(umpire_lease *lease, uint32_t keep);

/* Takes the lease over again from an arbiter that was started anew (ECONNRESET). */
int umpire_lease_claim(umpire_lease *lease);

/* Gives everything back, but for what a control group has. NULL is nothing. */
void umpire_lease_free(umpire_lease *lease);

#define UMPIRE_PERF_ON_CPU	0x1 /* Flag: on `cpu` only. */
#define UMPIRE_PERF_OWN_EVENT	0x2 /* Flag: the fixed-function counter's own; config is 0. */
#define UMPIRE_PERF_GUEST	0x4 /* Flag: what guests of KVM do, and nothing of the host. */
#define UMPIRE_PERF_ALL		0x8 /* Flag: the kernel, too; for operators. */
#define UMPIRE_PERF_THREADS	0x10 /* Flag: of what `thread` starts, only its process's threads. */

/* A perf event of a lease. Set everything to 0 and `size` to sizeof(struct umpire_lease_perf). */
struct umpire_lease_perf {
	size_t size;
	uint64_t lease;		/* its id: umpire_lease_get(), or of whoever has it */
	uint64_t config;	/* the event, as the PMU has it */
	uint64_t period;	/* it overflows after so many; 0: it counts */
	uint32_t counter;	/* which of those that the lease holds, from 0 */
	uint32_t flags;		/* UMPIRE_PERF_... */
	uint32_t thread;	/* the caller's own, or one in the lease's control group, with what
				   that starts; 0: all that runs on the CPU, of the group if
				   the lease is for one */
	uint32_t cpu;
};

/*
 * Has the arbiter at `socket` (NULL as above) open an event of a lease: a descriptor of
 * perf_event_open(2), pinned, disabled, and closed when a program is executed. A read has three
 * words: the count, and the times it was enabled and counted. It cannot be taken back: whoever
 * enables it after it was lost pays for it, as docs/reference/arbiterd.md says.
 */
int umpire_lease_open(const char *socket, const struct umpire_lease_perf *perf);

/* Why the last call of this thread failed, in words; valid until its next call. */
const char *umpire_lease_error(void);

/* The arbiter's word for it ("held", "over-maximum"); "" if it did not refuse. As above. */
const char *umpire_lease_reason(void);

#ifdef __cplusplus
}
#endif

#endif
