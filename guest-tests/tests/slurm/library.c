/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* A libumpire_lease.so that behaves badly, as the last word of the socket says. No arbiter. */
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <umpire_lease.h>

struct umpire_lease {
	const char *kind;
	int turns;	/* of its place in the queue */
};

static struct umpire_lease it;

static int is_kind(const char *kind)
{
	return !strcmp(strrchr(it.kind, '/') + 1, kind);
}

umpire_lease *umpire_lease_acquire(const char *socket, const struct umpire_lease_terms *terms)
{
	(void)terms;
	it.kind = socket;
	if (is_kind("hangs"))
		pause();
	return is_kind("silent") ? NULL : &it;
}

int umpire_lease_next(umpire_lease *lease, int timeout_ms, struct umpire_lease_event *event)
{
	struct timespec time = { timeout_ms / 1000, timeout_ms % 1000 * 1000000L };

	(void)event;
	nanosleep(&time, NULL);
	lease->turns++;
	return 0;
}

int umpire_lease_get(const umpire_lease *lease, struct umpire_lease_state *state)
{
	state->id = 7;
	state->wants = 2;
	/* More than a second of a call's, and more than one look whether the arbiter answers. */
	state->holds = is_kind("later") && lease->turns >= 10 ? 2 : 0;
	return 0;
}

int umpire_lease_renew(umpire_lease *lease)
{
	(void)lease;
	if (is_kind("stops"))
		pause();
	return -1;
}

void umpire_lease_free(umpire_lease *lease)
{
	(void)lease;
}

const char *umpire_lease_error(void)
{
	return "";
}
