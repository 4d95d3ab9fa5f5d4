/* Example 1 of cpc_bind_event(3CPC): events of twenty computations, each for itself. It asks for
 * the headers that the page's asks for, and for no other. */
#include <inttypes.h>
#include <stdlib.h>
#include <stdio.h>
#include <unistd.h>
#include <libcpc.h>

static void error(const char *format, ...);
static inline void compute(int milliseconds);

int main(void)
{
	int cpuver, iter;
	char *setting = NULL;
	cpc_event_t event;

	if (cpc_version(CPC_VER_CURRENT) != CPC_VER_CURRENT)
		error("application:library cpc version mismatch!");

	if ((cpuver = cpc_getcpuver()) == -1)
		error("no performance counter hardware!");

	if ((setting = getenv("PERFEVENTS")) == NULL)
		setting = "pic0=cycles,pic1=instructions";

	if (cpc_strtoevent(cpuver, setting, &event) != 0)
		error("can't measure '%s' on this processor", setting);
	setting = cpc_eventtostr(&event);
	printf("event: %s\n", setting);

	if (cpc_access() == -1)
		error("can't access perf counters: %s", strerror(errno));

	if (cpc_bind_event(&event, 0) == -1)
		error("can't bind lwp%d: %s", _lwp_self(), strerror(errno));

	for (iter = 1; iter <= 20; iter++) {
		cpc_event_t before, after;

		if (cpc_take_sample(&before) == -1)
			break;

		compute(3);

		if (cpc_take_sample(&after) == -1)
			break;
		printf("%3d: %" PRId64 " %" PRId64 "\n", iter,
		       (int64_t)(after.ce_pic[0] - before.ce_pic[0]),
		       (int64_t)(after.ce_pic[1] - before.ce_pic[1]));
		if (after.ce_hrt <= before.ce_hrt)
			error("no time has passed");
	}

	if (iter != 21)
		error("can't sample '%s': %s", setting, strerror(errno));

	free(setting);
	return 0;
}

/* error() is the program's own, says the page. */
#include "cpc.h"
