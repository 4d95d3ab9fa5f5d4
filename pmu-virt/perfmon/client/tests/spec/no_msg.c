/* PFM_FL_OVFL_NO_MSG: overflows signal and wake, without a message (3.3.7, 3.4.3). */
#include "spec.h"

static volatile sig_atomic_t overflows, failures;
static int fd;

/* Restarts, as a program that samples itself would. */
static void on_signal(int number)
{
	int before = errno;

	(void)number;
	overflows++;
	if (overflows < 5 && pfm_restart(fd) == -1)
		failures++;
	errno = before;
}

int main(void)
{
	struct sigaction action;
	struct pollfd polled;
	pfm_msg_t msg;
	pfarg_pmd_t pmd;
	int i;

	memset(&action, 0, sizeof(action));
	memset(&pmd, 0, sizeof(pmd));
	action.sa_handler = on_signal;
	action.sa_flags = SA_RESTART;
	MUST(sigaction(SIGIO, &action, NULL) == 0, "errno %d", errno);
	fd = create(PFM_OVFL_NO_MSG);
	MUST(fcntl(fd, F_SETOWN, getpid()) == 0, "errno %d", errno);
	MUST(fcntl(fd, F_SETFL, O_ASYNC | O_NONBLOCK) == 0, "errno %d", errno);
	program(fd, 0, 0, PFM_REGFL_OVFL_NOTIFY);
	load(fd, vcpu());
	CALL(pfm_start(fd, NULL));
	/* Signals come in the middle of other calls, too. */
	for (i = 0; i < 10000 && overflows < 5; i++) {
		CALL(pfm_read_pmds(fd, &pmd, 1));
		if (i > 100)
			rest(1);
	}
	MUST(overflows == 5, "%d overflows", (int)overflows);
	MUST(!failures, "PFM_RESTART failed in the handler");
	/* Nobody has restarted after the fifth: it can be waited for, but not read. */
	polled.fd = fd;
	polled.events = POLLIN;
	i = poll(&polled, 1, 1000);
	MUST(i == 1, "an overflow does not wake: poll returns %d after %d overflows", i, (int)overflows);
	MUST(signal(SIGIO, SIG_IGN) != SIG_ERR, "errno %d", errno);
	CALL(pfm_stop(fd));
	MUST(read(fd, &msg, sizeof(msg)) == -1 && errno == EAGAIN, "a message, or errno %d", errno);
	MUST(poll(&polled, 1, 0) == 0, "still ready after reading");
	printf("%d overflows\n", (int)overflows);
	return 0;
}
