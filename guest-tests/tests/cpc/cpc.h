/* What the programs for libcpc share. */
#ifndef CPC_TEST_H
#define CPC_TEST_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <inttypes.h>
#include <libcpc.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

static void error(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vprintf(format, arguments);
	va_end(arguments);
	printf(" (sub-code %d: %s)\n", cpc_last_subcode(), cpc_last_error());
	exit(1);
}

#define CHECK(what) \
	((what) ? (void)0 : error("line %d: %s does not hold; errno %d", __LINE__, #what, errno))

/* The computation that is measured. A vCPU computes by itself meanwhile. It takes so many
 * milliseconds times CPC_TEST_SLOWER: a source that samples rings may miss a short one. */
static inline void compute(int milliseconds)
{
	struct timespec begin, now;
	volatile unsigned long work;

	if (getenv("CPC_TEST_SLOWER"))
		milliseconds *= atoi(getenv("CPC_TEST_SLOWER"));
	clock_gettime(CLOCK_MONOTONIC, &begin);
	do {
		for (work = 0; work < 20000; work++)
			;
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while ((now.tv_sec - begin.tv_sec) * 1000 + (now.tv_nsec - begin.tv_nsec) / 1000000 <
		 milliseconds);
}

/* The event that the environment names. */
static inline cpc_event_t chosen(void)
{
	const char *setting = getenv("PERFEVENTS");
	cpc_event_t event;
	int cpuver = cpc_getcpuver();

	if (cpuver == -1)
		error("no performance counter hardware!");
	if (setting == NULL)
		setting = "pic0=cycles,pic1=instructions";
	if (cpc_strtoevent(cpuver, setting, &event) != 0)
		error("can't measure '%s' on this processor", setting);
	return event;
}

#endif
