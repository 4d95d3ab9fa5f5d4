/* A client of the arbiter in C, by umpire_lease.h: each word is a test. */
#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "umpire_lease.h"

#undef assert
#define assert(what) \
	((what) ? (void)0 : (fprintf(stderr, "%s:%d: %s (%d: %s)\n", __FILE__, __LINE__, #what, \
				     errno, umpire_lease_error()), exit(1)))

static struct umpire_lease_terms counters(uint32_t count)
{
	struct umpire_lease_terms terms;

	memset(&terms, 0, sizeof terms);
	terms.size = sizeof terms;
	terms.programmable = count;
	terms.cpus = "0";
	terms.label = "from C";
	return terms;
}

static struct umpire_lease_state state_of(const umpire_lease *lease)
{
	struct umpire_lease_state state;

	memset(&state, 0, sizeof state);
	state.size = sizeof state;
	assert(umpire_lease_get(lease, &state) == 0);
	return state;
}

static struct umpire_lease_event next(umpire_lease *lease)
{
	struct umpire_lease_event event;

	memset(&event, 0, sizeof event);
	event.size = sizeof event;
	assert(umpire_lease_next(lease, 30000, &event) == 1);
	return event;
}

static void held(void)
{
	struct umpire_lease_terms terms = counters(3);
	umpire_lease *lease, *other;
	struct umpire_lease_state state;

	terms.fixed = 1;
	lease = umpire_lease_acquire(NULL, &terms);
	assert(lease != NULL);
	assert(strcmp(umpire_lease_error(), "") == 0);
	assert(umpire_lease_wait(lease, 0) == 1);
	state = state_of(lease);
	assert(state.wants == 4 && state.holds == 4 && state.id > 0);
	assert(state.left_ms == UMPIRE_LEASE_NO_TIME && state.broken_ms == UMPIRE_LEASE_NO_TIME);
	assert(umpire_lease_next(lease, 0, NULL) == 0);

	/* Who is refused learns why. */
	terms = counters(2);
	assert(umpire_lease_acquire(NULL, &terms) == NULL);
	assert(errno == EBUSY && strcmp(umpire_lease_reason(), "held") == 0);
	assert(strstr(umpire_lease_error(), "held by lease") != NULL);

	/* Who waits is served. */
	terms.waits_ms = -1;
	other = umpire_lease_acquire(NULL, &terms);
	assert(other != NULL && state_of(other).holds == 0);
	assert(umpire_lease_wait(other, 50) == 0);
	assert(umpire_lease_release(lease, 1) == 0);
	assert(umpire_lease_wait(other, -1) == 1 && state_of(other).holds == 2);
	umpire_lease_free(lease);
	umpire_lease_free(other);
	umpire_lease_free(NULL);
}

static void events(void)
{
	struct umpire_lease_terms terms = counters(4);
	umpire_lease *low, *high;
	struct umpire_lease_event event;
	struct pollfd ready;

	terms.flags = UMPIRE_LEASE_BEST_EFFORT;
	terms.lasts_ms = 60000;
	low = umpire_lease_acquire(NULL, &terms);
	assert(low != NULL && state_of(low).left_ms <= 60000);
	assert(umpire_lease_renew(low) == 0);
	event = next(low);
	assert(event.what == UMPIRE_LEASE_RENEWED && event.holds == 4);
	assert(event.leaving_in_ms == UMPIRE_LEASE_NO_TIME && event.leaving_to == 4);

	terms = counters(1);
	terms.waits_ms = -1;
	high = umpire_lease_acquire(NULL, &terms);
	ready.fd = umpire_lease_fd(low);
	ready.events = POLLIN;
	assert(poll(&ready, 1, 30000) == 1);
	event = next(low);
	assert(event.what == UMPIRE_LEASE_LEAVING && event.leaving_to < 4);
	assert(event.leaving_in_ms <= 100 && strlen(event.message) > 0);
	assert(umpire_lease_wait(high, 30000) == 1);

	assert(umpire_lease_release(high, 0) == 0);
	do {
		event = next(high);
	} while (event.what != UMPIRE_LEASE_ENDED);
	assert(umpire_lease_next(high, -1, NULL) == -1 && errno == ENOENT);
	assert(umpire_lease_renew(high) == -1 && errno == ENOENT);
	umpire_lease_free(high);
	umpire_lease_free(low);
}

/* A lease of the group that is named, whose thread has an event; the group's lease is the
 * group's. */
static void perf(const char *cgroup, const char *thread)
{
	struct umpire_lease_terms terms = counters(2);
	struct umpire_lease_perf perf;
	struct umpire_lease_state state;
	umpire_lease *lease;
	uint64_t words[3];
	int fd;

	terms.cgroup = cgroup;
	terms.cpus = NULL;
	lease = umpire_lease_acquire(NULL, &terms);
	assert(lease != NULL);
	state = state_of(lease);
	memset(&perf, 0, sizeof perf);
	assert(umpire_lease_open(NULL, &perf) == -1 && errno == EINVAL);
	perf.size = sizeof perf;
	assert(umpire_lease_open(NULL, &perf) == -1 && errno == ENOENT);
	perf.lease = state.id;
	perf.thread = (uint32_t)strtoul(thread, NULL, 10);
	perf.flags = 0x80;
	assert(umpire_lease_open(NULL, &perf) == -1 && errno == EINVAL);
	perf.flags = UMPIRE_PERF_GUEST | UMPIRE_PERF_ALL;
	assert(umpire_lease_open(NULL, &perf) == -1 && errno == EINVAL);
	perf.flags = 0;
	perf.counter = 2;
	assert(umpire_lease_open(NULL, &perf) == -1 && errno == EINVAL);
	perf.counter = 1;
	perf.flags = UMPIRE_PERF_THREADS;
	fd = umpire_lease_open(NULL, &perf);
	if (fd < 0 && strcmp(umpire_lease_reason(), "not-opened") == 0) {
		printf("skipped: perf: %s\n", umpire_lease_error());
		exit(0);
	}
	assert(fd >= 0 && read(fd, words, sizeof words) == sizeof words && words[0] == 0);
	perf.flags = UMPIRE_PERF_ON_CPU;
	perf.thread = 0;
	perf.counter = 0;
	fd = umpire_lease_open(NULL, &perf);
	assert(fd >= 0 || strcmp(umpire_lease_reason(), "not-opened") == 0);
	umpire_lease_free(lease);
}

/* Root's job, for which somebody else asks; and in it a part of what it has, by itself and by
 * name, and whole CPUs. */
static void within(const char *cgroup)
{
	const uint32_t scopes[] = { 0, UMPIRE_LEASE_SCOPE_PART, UMPIRE_LEASE_SCOPE_CPU };
	struct umpire_lease_terms terms = counters(3);
	umpire_lease *lease;
	uint64_t id;
	size_t i;

	terms.cgroup = cgroup;
	terms.cpus = NULL;
	terms.flags = UMPIRE_LEASE_FOR_OTHERS;
	lease = umpire_lease_acquire(NULL, &terms);
	assert(lease != NULL);
	id = state_of(lease).id;
	assert(state_of(lease).within == 0);
	umpire_lease_free(lease);
	for (i = 0; i < sizeof scopes / sizeof *scopes; i++) {
		terms = counters(1);
		terms.scope = scopes[i];
		lease = umpire_lease_acquire(NULL, &terms);
		assert(lease != NULL);
		assert(state_of(lease).within == (terms.scope == UMPIRE_LEASE_SCOPE_CPU ? 0 : id));
		umpire_lease_free(lease);
	}
}

static void wrong(void)
{
	struct umpire_lease_terms terms = counters(1);
	struct {
		struct umpire_lease_terms known;
		uint64_t more;
	} later;
	const char *events[] = { "no such event", NULL };
	umpire_lease *lease;

#define REFUSED(number, words) do { \
	assert(umpire_lease_acquire(NULL, &terms) == NULL && errno == number); \
	assert(strstr(umpire_lease_error(), words) != NULL); \
	terms = counters(1); \
} while (0)
	terms.size = 0;
	REFUSED(EINVAL, "size");
	terms.programmable = 0;
	REFUSED(EINVAL, "1");
	terms.programmable = 40;
	REFUSED(EINVAL, "CPU");
	terms.cpus = "0-";
	REFUSED(EINVAL, "0-");
	terms.cpus = "\xff";
	REFUSED(EINVAL, "UTF-8");
	terms.flags = 0x80;
	REFUSED(EINVAL, "flags");
	terms.reserved = 1;
	REFUSED(EINVAL, "reserved");
	terms.priority = 256;
	REFUSED(EINVAL, "priority");
	terms.thread_count = 1;
	REFUSED(EINVAL, "threads");
	terms.events = events;
	terms.event_count = 1;
	REFUSED(EINVAL, "no such event");
	terms.events = events;
	terms.event_count = 2;
	REFUSED(EINVAL, "NULL");
	terms.tenant = "nobody";
	REFUSED(EINVAL, "nobody");
	terms.cgroup = "/a/../b";
	REFUSED(EINVAL, "cgroup");
	terms.for_uid = 1;
	REFUSED(EPERM, "for-others");
	terms.flags = UMPIRE_LEASE_FOR_OTHERS;
	REFUSED(EPERM, "for-others");
	terms.scope = 5;
	REFUSED(EINVAL, "scope 5");
	terms.reserved2 = 1;
	REFUSED(EINVAL, "reserved");
	terms.scope = UMPIRE_LEASE_SCOPE_THREAD;
	REFUSED(EINVAL, "thread");
	terms.scope = UMPIRE_LEASE_SCOPE_CGROUP;
	REFUSED(EINVAL, "cgroup");
	terms.scope = UMPIRE_LEASE_SCOPE_PART;
	REFUSED(EINVAL, "group");
	assert(umpire_lease_acquire(NULL, NULL) == NULL && errno == EINVAL);
	assert(umpire_lease_acquire("/nowhere", &terms) == NULL && errno == ENOENT);
	assert(strstr(umpire_lease_error(), "umpire arbiterd") != NULL);
	assert(strcmp(umpire_lease_reason(), "") == 0);
	assert(umpire_lease_fd(NULL) == -1 && errno == EINVAL);
	assert(umpire_lease_wait(NULL, 0) == -1 && errno == EINVAL);

	/* A program of an earlier version has less, one of a later version may have more. */
	terms.size = offsetof(struct umpire_lease_terms, events);
	lease = umpire_lease_acquire(NULL, &terms);
	assert(lease != NULL && state_of(lease).wants == 1);
	{
		struct umpire_lease_state state;

		memset(&state, 0xff, sizeof state);
		state.size = offsetof(struct umpire_lease_state, wants);
		assert(umpire_lease_get(lease, &state) == 0);
		assert(state.id > 0 && state.id < 1000 && state.wants == UINT32_MAX);
		state.size = 1;
		assert(umpire_lease_get(lease, &state) == -1 && errno == EINVAL);
	}
	umpire_lease_free(lease);
	memset(&later, 0, sizeof later);
	later.known = counters(1);
	later.known.size = sizeof later;
	lease = umpire_lease_acquire(NULL, &later.known);
	assert(lease != NULL);
	umpire_lease_free(lease);
	later.more = 1;
	assert(umpire_lease_acquire(NULL, &later.known) == NULL && errno == E2BIG);
}

/* The arbiter is killed and started anew when this has said that it is ready. */
static void restart(void)
{
	struct umpire_lease_terms terms = counters(2);
	umpire_lease *lease = umpire_lease_acquire(NULL, &terms);
	const struct timespec a_while = { 0, 5000000 };
	struct umpire_lease_state before, after;

	assert(lease != NULL);
	before = state_of(lease);
	printf("ready\n");
	fflush(stdout);
	while (umpire_lease_next(lease, -1, NULL) == 1)
		;
	assert(errno == ECONNRESET);
	while (umpire_lease_claim(lease) != 0) {
		assert(errno == ECONNREFUSED || errno == ENOENT || errno == ECONNRESET);
		nanosleep(&a_while, NULL);
	}
	after = state_of(lease);
	assert(after.id == before.id && after.holds == 2);
	umpire_lease_free(lease);
}

int main(int argc, char **argv)
{
	const char *test = argc > 1 ? argv[1] : "";

	if (strcmp(test, "held") == 0)
		held();
	else if (strcmp(test, "events") == 0)
		events();
	else if (strcmp(test, "perf") == 0 && argc == 4)
		perf(argv[2], argv[3]);
	else if (strcmp(test, "within") == 0 && argc == 3)
		within(argv[2]);
	else if (strcmp(test, "wrong") == 0)
		wrong();
	else if (strcmp(test, "restart") == 0)
		restart();
	else
		return 2;
	return 0;
}
