/* Example 2 of cpc_bind_event(3CPC): a signal each time a counter overflows. It asks for the
 * headers that the page's asks for, and for no other. */
#include <inttypes.h>
#include <stdlib.h>
#include <stdio.h>
#include <unistd.h>
#include <libcpc.h>

static void error(const char *format, ...);
static inline void compute(int milliseconds);
static inline cpc_event_t chosen(void);

#define PRESET0 (UINT64_MAX - UINT64_C(999))
#define PRESET1 0

static volatile sig_atomic_t signals;

static void emt_handler(int sig, siginfo_t *sip, void *arg)
{
	ucontext_t *uap = arg;
	cpc_event_t sample, again;

	if (sig != SIGEMT || sip->si_code != EMT_CPCOVF) {
		psignal(sig, "example");
		psiginfo(sip, "example");
		exit(1);
	}

	printf("lwp%d - si_addr %p ucontext: %%pc %p %%sp %p\n", _lwp_self(), sip->si_addr,
	       (void *)uap->uc_mcontext.gregs[PC], (void *)uap->uc_mcontext.gregs[USP]);

	if (cpc_take_sample(&sample) == -1)
		error("can't sample: %s", strerror(errno));

	printf("0x%" PRIx64 " 0x%" PRIx64 "\n", sample.ce_pic[0], sample.ce_pic[1]);
	fflush(stdout);

	/* Counting is disabled until the next bind. */
	if (cpc_take_sample(&again) != 0 || again.ce_pic[0] != sample.ce_pic[0] ||
	    again.ce_pic[1] != sample.ce_pic[1])
		error("it does not stand still");
	signals++;

	sample.ce_pic[0] = PRESET0;
	sample.ce_pic[1] = PRESET1;
	if (cpc_bind_event(&sample, CPC_BIND_EMT_OVF) == -1)
		error("cannot bind lwp%d: %s", _lwp_self(), strerror(errno));
}

int main(void)
{
	struct sigaction act;
	cpc_event_t event = chosen();
	int iter, until_now;

	act.sa_sigaction = emt_handler;
	bzero(&act.sa_mask, sizeof(act.sa_mask));
	act.sa_flags = SA_RESTART | SA_SIGINFO;
	if (sigaction(SIGEMT, &act, NULL) == -1)
		error("sigaction: %s", strerror(errno));
	event.ce_pic[0] = PRESET0;
	event.ce_pic[1] = PRESET1;
	if (cpc_bind_event(&event, CPC_BIND_EMT_OVF) == -1)
		error("cannot bind lwp%d: %s", _lwp_self(), strerror(errno));

	for (iter = 1; iter <= 20; iter++)
		compute(3);

	cpc_bind_event(NULL, 0); /* done */

	until_now = signals;
	compute(10);
	if (signals != until_now)
		error("a signal after the end");
	printf("signals: %d\n", (int)signals);
	return 0;
}

/* error() is the program's own, says the page. */
#include "cpc.h"
