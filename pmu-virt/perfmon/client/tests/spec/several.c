/* Several contexts at once, waited for by poll, select and signals (3.3.7, 3.3.8). */
#include "spec.h"

#include <sys/select.h>

#define MOST 2

static volatile sig_atomic_t signalled[1024];

static void on_signal(int number, siginfo_t *info, void *context)
{
	(void)number;
	(void)context;
	if (info->si_fd >= 0 && info->si_fd < 1024)
		signalled[info->si_fd]++;
}

/* Takes the message that `fd` is ready with, and goes on. */
static void serve(int fd)
{
	message(fd, PFM_MSG_OVFL);
	CALL(pfm_restart(fd));
}

int main(void)
{
	struct pollfd polled[MOST];
	struct sigaction action;
	int fds[MOST], seen[MOST] = { 0 }, count, i, round;

	for (count = 0; count < MOST; count++) {
		pfarg_load_t target = { vcpu() + count, 0 };

		fds[count] = create(0);
		program(fds[count], 0, 0, PFM_REGFL_OVFL_NOTIFY);
		if (pfm_load_context(fds[count], &target) == -1) {
			MUST(errno == ESRCH && count > 0, "errno %d: %s", errno, pfm_strerror_last());
			break;
		}
	}
	for (i = 0; i < count; i++)
		CALL(pfm_start(fds[i], NULL));
	/* poll */
	for (round = 0; round < 1000 && !(seen[0] && seen[count - 1]); round++) {
		for (i = 0; i < count; i++) {
			polled[i].fd = fds[i];
			polled[i].events = POLLIN;
		}
		MUST(poll(polled, (nfds_t)count, 10000) > 0, "no message in 10 s");
		for (i = 0; i < count; i++)
			if (polled[i].revents & POLLIN) {
				seen[i]++;
				serve(fds[i]);
			}
	}
	for (i = 0; i < count; i++)
		MUST(seen[i], "context %d never was ready", i);
	/* select */
	for (round = 0; round < 3; round++) {
		struct timeval limit = { 10, 0 };
		fd_set ready;
		int highest = 0;

		FD_ZERO(&ready);
		for (i = 0; i < count; i++) {
			FD_SET(fds[i], &ready);
			highest = fds[i] > highest ? fds[i] : highest;
		}
		MUST(select(highest + 1, &ready, NULL, NULL, &limit) > 0, "no message in 10 s");
		for (i = 0; i < count; i++)
			if (FD_ISSET(fds[i], &ready))
				serve(fds[i]);
	}
	/* A signal that tells which one. */
	memset(&action, 0, sizeof(action));
	action.sa_sigaction = on_signal;
	action.sa_flags = SA_SIGINFO | SA_RESTART;
	MUST(sigaction(SIGRTMIN, &action, NULL) == 0, "errno %d", errno);
	for (i = 0; i < count; i++) {
		MUST(fcntl(fds[i], F_SETSIG, SIGRTMIN) == 0, "errno %d", errno);
		MUST(fcntl(fds[i], F_SETOWN, getpid()) == 0, "errno %d", errno);
		MUST(fcntl(fds[i], F_SETFL, fcntl(fds[i], F_GETFL) | O_ASYNC | O_NONBLOCK) == 0,
		     "errno %d", errno);
	}
	for (i = 0; i < count; i++) {
		pfm_msg_t msg;

		/* One that is there already may have come before there were signals. */
		if (read(fds[i], &msg, sizeof(msg)) == sizeof(msg)) {
			rest(50);
			signalled[fds[i]] = 0;
			CALL(pfm_restart(fds[i]));
		}
		for (round = 0; round < 1000 && !signalled[fds[i]]; round++)
			rest(10);
		MUST(signalled[fds[i]], "no signal from context %d", i);
		/* The message comes before its signal. */
		message(fds[i], PFM_MSG_OVFL);
	}
	printf("%d contexts, %d and %d messages by poll\n", count, seen[0], seen[count - 1]);
	return 0;
}
