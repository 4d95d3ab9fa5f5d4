/* PFM_FL_OVFL_NO_MSG: overflows signal, and leave nothing to be read (3.3.7, 3.4.3). */
#include "spec.h"

#include <sys/epoll.h>
#include <sys/select.h>

static volatile sig_atomic_t overflows, failures, others;
static int fd;

/* Restarts, as a program that samples itself would. */
static void on_signal(int number, siginfo_t *info, void *context)
{
	int before = errno;

	(void)context;
	overflows++;
	if (number == SIGRTMIN + 2 && info->si_fd != fd)
		others++;
	if (overflows % 5 && pfm_restart(fd) == -1)
		failures++;
	errno = before;
}

/* Nothing is ready, whoever asks. */
static void nothing_to_read(void)
{
	struct timeval now = { 0, 0 };
	struct pollfd polled;
	struct epoll_event event;
	pfm_msg_t msg;
	fd_set set;
	int epoll = epoll_create1(0);

	polled.fd = fd;
	polled.events = POLLIN;
	MUST(poll(&polled, 1, 20) == 0, "poll finds it ready: %#x", polled.revents);
	FD_ZERO(&set);
	FD_SET(fd, &set);
	MUST(select(fd + 1, &set, NULL, NULL, &now) == 0, "select finds it ready");
	memset(&event, 0, sizeof(event));
	event.events = EPOLLIN;
	MUST(epoll >= 0 && epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0, "errno %d", errno);
	MUST(epoll_wait(epoll, &event, 1, 0) == 0, "epoll finds it ready");
	close(epoll);
	MUST(read(fd, &msg, sizeof(msg)) == -1 && errno == EAGAIN, "a message, or errno %d", errno);
}

/* Signals come in the middle of other calls, too. */
static void until(int count)
{
	pfarg_pmd_t pmd;
	int i;

	memset(&pmd, 0, sizeof(pmd));
	for (i = 0; i < 10000 && overflows < count; i++) {
		CALL(pfm_read_pmds(fd, &pmd, 1));
		if (i > 100)
			rest(1);
	}
	MUST(overflows == count, "%d overflows", (int)overflows);
	MUST(!failures, "PFM_RESTART failed in the handler");
}

int main(void)
{
	struct sigaction action;
	int flags;

	memset(&action, 0, sizeof(action));
	action.sa_sigaction = on_signal;
	action.sa_flags = SA_RESTART | SA_SIGINFO;
	MUST(sigaction(SIGIO, &action, NULL) == 0, "errno %d", errno);
	MUST(sigaction(SIGRTMIN + 2, &action, NULL) == 0, "errno %d", errno);
	fd = create(PFM_OVFL_NO_MSG);
	flags = fcntl(fd, F_GETFL);
	MUST(!(flags & O_ASYNC) && !(fcntl(fd, F_GETFD) & FD_CLOEXEC), "flags %#x", flags);
	program(fd, 0, 0, PFM_REGFL_OVFL_NOTIFY);
	load(fd, vcpu());
	/* An owner alone is not signalled. */
	MUST(fcntl(fd, F_SETOWN, getpid()) == 0, "errno %d", errno);
	MUST(fcntl(fd, F_SETFL, O_NONBLOCK) == 0, "errno %d", errno);
	CALL(pfm_start(fd, NULL));
	for (flags = 0; pfm_restart(fd) == -1; flags++) {
		MUST(errno == EBUSY && flags < 10000, "errno %d", errno);
		rest(1);
	}
	CALL(pfm_stop(fd));
	MUST(!overflows, "a signal that nobody asked for");
	nothing_to_read();
	MUST(fcntl(fd, F_SETFL, O_ASYNC | O_NONBLOCK) == 0, "errno %d", errno);
	/* It may have overflowed once more, and the next load forgets that. */
	CALL(pfm_unload_context(fd));
	program(fd, 0, 0, PFM_REGFL_OVFL_NOTIFY);
	load(fd, vcpu());
	CALL(pfm_start(fd, NULL));
	until(5);
	/* Nobody has restarted after the fifth. */
	nothing_to_read();
	/* With another signal, which tells the descriptor. */
	MUST(fcntl(fd, F_SETSIG, SIGRTMIN + 2) == 0, "errno %d", errno);
	CALL(pfm_restart(fd));
	until(10);
	MUST(!others, "%d signals name another descriptor", (int)others);
	nothing_to_read();
	/* Nobody any more. */
	MUST(fcntl(fd, F_SETFL, O_NONBLOCK) == 0, "errno %d", errno);
	CALL(pfm_restart(fd));
	rest(20);
	CALL(pfm_stop(fd));
	MUST(overflows == 10, "%d overflows", (int)overflows);
	nothing_to_read();
	printf("%d overflows\n", (int)overflows);
	return 0;
}
