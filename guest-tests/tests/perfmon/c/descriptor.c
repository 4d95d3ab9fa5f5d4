/* What a context's descriptor does as a descriptor (3.1.1, 3.1.15, 3.3), one check per argument. */
#include "spec.h"

#include <sys/epoll.h>
#include <sys/socket.h>

/* A context of `vcpu()` that counts and notifies. */
static int notifier(uint32_t flags)
{
	int fd = create(flags);

	program(fd, 0, 0, PFM_REGFL_OVFL_NOTIFY);
	load(fd, vcpu());
	return fd;
}

/* Tells the test that starts this program, and waits until it closes our input. */
static void tell(const char *word)
{
	puts(word);
	fflush(stdout);
	while (getchar() != EOF)
		;
}

static void by_epoll(void)
{
	struct epoll_event wanted = { .events = EPOLLIN }, got;
	int fd = notifier(0), set = epoll_create1(EPOLL_CLOEXEC), round;

	for (round = 0; round < 2; round++) {
		wanted.data.fd = fd;
		MUST(epoll_ctl(set, round ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &wanted) == 0, "errno %d",
		     errno);
		MUST(epoll_wait(set, &got, 1, 0) == 0, "ready before an overflow");
		CALL(pfm_start(fd, NULL));
		MUST(epoll_wait(set, &got, 1, 10000) == 1, "no message in 10 s");
		MUST(got.data.fd == fd && got.events == EPOLLIN, "events %#x", got.events);
		/* By level it is told again, by edge it is not. */
		MUST(epoll_wait(set, &got, 1, 50) == !round, "round %d", round);
		message(fd, PFM_MSG_OVFL);
		MUST(epoll_wait(set, &got, 1, 50) == 0, "masked, and ready again");
		CALL(pfm_stop(fd));
		CALL(pfm_restart(fd));
		wanted.events = EPOLLIN | EPOLLET;
	}
	CALL(pfm_start(fd, NULL));
	MUST(epoll_wait(set, &got, 1, 10000) == 1, "no edge");
	message(fd, PFM_MSG_OVFL);
	CALL(pfm_restart(fd));
	MUST(epoll_wait(set, &got, 1, 10000) == 1, "no second edge");
}

static volatile sig_atomic_t signals, signalled_fd;

static void on_signal(int number, siginfo_t *info, void *context)
{
	(void)number;
	(void)context;
	signalled_fd = info->si_fd;
	signals++;
}

static void by_signal(void)
{
	struct sigaction action;
	int fd = notifier(0), round, i, numbers[] = { SIGIO, SIGRTMIN + 3, SIGUSR1 };

	memset(&action, 0, sizeof(action));
	action.sa_sigaction = on_signal;
	action.sa_flags = SA_SIGINFO | SA_RESTART;
	MUST(fcntl(fd, F_SETOWN, getpid()) == 0, "errno %d", errno);
	MUST(fcntl(fd, F_GETOWN) == getpid(), "owner %d", fcntl(fd, F_GETOWN));
	MUST(fcntl(fd, F_SETFL, O_ASYNC) == 0, "errno %d", errno);
	MUST(fcntl(fd, F_GETFL) & O_ASYNC, "flags %#x", fcntl(fd, F_GETFL));
	for (round = 0; round < 3; round++) {
		MUST(sigaction(numbers[round], &action, NULL) == 0, "errno %d", errno);
		if (round)
			MUST(fcntl(fd, F_SETSIG, numbers[round]) == 0, "errno %d", errno);
		else
			MUST(fcntl(fd, F_GETSIG) == 0, "another signal than SIGIO");
		if (round)
			CALL(pfm_restart(fd));
		else
			CALL(pfm_start(fd, NULL));
		for (i = 0; i < 1000 && !signals; i++)
			rest(10);
		MUST(signals == 1, "%d signals number %d", (int)signals, numbers[round]);
		if (round)
			MUST(signalled_fd == fd, "descriptor %d", (int)signalled_fd);
		message(fd, PFM_MSG_OVFL);
		rest(30);
		/* One for each message; none for what is read. */
		MUST(signals == 1, "%d signals for one overflow", (int)signals);
		signals = 0;
	}
	/* Without the flag it is quiet. */
	MUST(fcntl(fd, F_SETFL, 0) == 0, "errno %d", errno);
	CALL(pfm_restart(fd));
	message(fd, PFM_MSG_OVFL);
	rest(30);
	MUST(signals == 0, "a signal without O_ASYNC");
}

static void nonblocking(void)
{
	struct pollfd polled = { 0 };
	pfm_msg_t messages[3];
	int fd = notifier(0), copy = dup(fd);

	MUST(fcntl(fd, F_SETFL, O_NONBLOCK) == 0, "errno %d", errno);
	MUST(fcntl(copy, F_GETFL) & O_NONBLOCK, "a duplicate has flags of its own");
	MUST(read(copy, messages, sizeof(messages)) == -1 && errno == EAGAIN, "errno %d", errno);
	CALL(pfm_start(copy, NULL));
	polled.fd = copy;
	polled.events = POLLIN;
	MUST(poll(&polled, 1, 10000) == 1 && polled.revents == POLLIN, "events %#x", polled.revents);
	MUST(read(fd, messages, sizeof(messages)) == sizeof(messages[0]), "errno %d", errno);
	MUST(messages[0].msg_type == PFM_MSG_OVFL, "type %u", messages[0].msg_type);
	MUST(read(copy, messages, sizeof(messages)) == -1 && errno == EAGAIN, "errno %d", errno);
	MUST(close(fd) == 0, "errno %d", errno);
	CALL(pfm_restart(copy));
	MUST(poll(&polled, 1, 10000) == 1, "no message in 10 s");
}

/* The process that a context is passed to: it has seen nothing of it. */
static void receiver(int channel)
{
	char byte, space[CMSG_SPACE(sizeof(int))];
	struct iovec part = { &byte, 1 };
	struct msghdr header = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = space,
				 .msg_controllen = sizeof(space) };
	pfarg_pmd_t pmd;
	int fd;

	MUST(recvmsg(channel, &header, 0) == 1, "errno %d", errno);
	MUST(CMSG_FIRSTHDR(&header), "no descriptor came");
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&header)), sizeof(fd));
	memset(&pmd, 0, sizeof(pmd));
	CALL(pfm_read_pmds(fd, &pmd, 1));
	message(fd, PFM_MSG_OVFL);
	CALL(pfm_restart(fd));
	message(fd, PFM_MSG_OVFL);
	/* It ends with the context loaded, which nobody has then. */
}

static void passed(char *program)
{
	char space[CMSG_SPACE(sizeof(int))], number[16];
	struct iovec part = { "x", 1 };
	struct msghdr header = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = space,
				 .msg_controllen = sizeof(space) };
	int ends[2], fd;
	pid_t child;

	MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "errno %d", errno);
	snprintf(number, sizeof(number), "%d", ends[1]);
	child = fork();
	if (child == 0) {
		char *arguments[] = { program, "receiver", number, NULL };

		execv("/proc/self/exe", arguments);
		_exit(3);
	}
	close(ends[1]);
	fd = notifier(0);
	CALL(pfm_start(fd, NULL));
	memset(space, 0, sizeof(space));
	CMSG_FIRSTHDR(&header)->cmsg_level = SOL_SOCKET;
	CMSG_FIRSTHDR(&header)->cmsg_type = SCM_RIGHTS;
	CMSG_FIRSTHDR(&header)->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(CMSG_FIRSTHDR(&header)), &fd, sizeof(fd));
	MUST(sendmsg(ends[0], &header, 0) == 1, "errno %d", errno);
	MUST(close(fd) == 0, "errno %d", errno);
	FAILS(pfm_stop(fd), EBADF);
	join(child);
	/* Its end was the context's: the vCPU is free. */
	notifier(0);
}

/* Closing is done when it returns: what was attached is free for the next one. */
static void again_and_again(void)
{
	int round;

	for (round = 0; round < 200; round++) {
		int fd = notifier(round % 3 ? 0 : PFM_FL_NOTIFY_BLOCK);

		CALL(pfm_start(fd, NULL));
		if (round % 2)
			message(fd, PFM_MSG_OVFL);
		MUST(close(fd) == 0, "errno %d", errno);
	}
}

static void last_close(void)
{
	int fd = notifier(0), copy = dup(fd), ends[2];
	char byte;
	pid_t child;

	CALL(pfm_start(fd, NULL));
	MUST(pipe(ends) == 0, "errno %d", errno);
	child = fork();
	if (child == 0) {
		close(ends[1]);
		MUST(read(ends[0], &byte, 1) == 0, "errno %d", errno);
		MUST(close(fd) == 0 && close(copy) == 0, "errno %d", errno);
		/* This process goes on, and has nothing to do with it any more. */
		rest(300);
		_exit(0);
	}
	MUST(close(fd) == 0 && close(copy) == 0, "errno %d", errno);
	tell("the child has it");
	close(ends[1]);
	join(child);
}

static void held(void)
{
	pfm_uuid_t uuid = PFM_DEFAULT_SMPL_UUID;
	struct {
		pfarg_ctx_t ctx;
		pfm_default_smpl_arg_t format;
	} arg;
	int fd;

	memset(&arg, 0, sizeof(arg));
	memcpy(arg.ctx.ctx_smpl_buf_id, uuid, sizeof(uuid));
	arg.ctx.ctx_flags = PFM_FL_NOTIFY_BLOCK;
	arg.format.buf_size = 1 << 16;
	CALL(perfmonctl(0, PFM_CREATE_CONTEXT, &arg, 1));
	fd = arg.ctx.ctx_fd;
	MUST(mmap(NULL, arg.ctx.ctx_smpl_buf_size, PROT_READ, MAP_SHARED, fd, 0) != MAP_FAILED,
	     "errno %d", errno);
	program(fd, 0, 0, PFM_REGFL_OVFL_NOTIFY);
	load(fd, vcpu());
	CALL(pfm_start(fd, NULL));
	/* The buffer is full, and the vCPU blocked. */
	message(fd, PFM_MSG_OVFL);
	tell("the vCPU is blocked");
	MUST(0, "it was to be killed");
}

/* Two vCPUs, a core and some that are attached to nothing, at the same time. */
static void beside(void)
{
	struct pollfd polled[3];
	int loose[50], i, round, seen[3] = { 0 };

	for (i = 0; i < 50; i++)
		loose[i] = create(i % 2 ? PFM_FL_SYSTEM_WIDE : 0);
	for (i = 0; i < 3; i++) {
		int fd = create(i == 2 ? PFM_FL_SYSTEM_WIDE : 0);

		program(fd, 0, 0, PFM_REGFL_OVFL_NOTIFY);
		load(fd, i == 2 ? 0 : i);
		CALL(pfm_start(fd, NULL));
		polled[i].fd = fd;
		polled[i].events = POLLIN;
	}
	for (round = 0; round < 1000 && !(seen[0] && seen[1] && seen[2]); round++) {
		MUST(poll(polled, 3, 10000) > 0, "no message in 10 s");
		for (i = 0; i < 3; i++)
			if (polled[i].revents) {
				message(polled[i].fd, PFM_MSG_OVFL);
				CALL(pfm_restart(polled[i].fd));
				seen[i]++;
			}
	}
	MUST(seen[0] && seen[1] && seen[2], "%d, %d, %d messages", seen[0], seen[1], seen[2]);
	for (i = 0; i < 50; i++)
		MUST(close(loose[i]) == 0, "errno %d", errno);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*check)(void);
	} checks[] = {
		{ "epoll", by_epoll },	       { "signal", by_signal },
		{ "nonblocking", nonblocking }, { "again_and_again", again_and_again },
		{ "last_close", last_close },  { "held", held },
		{ "beside", beside },
	};
	size_t i;

	if (argc == 3 && !strcmp(argv[1], "receiver")) {
		receiver(atoi(argv[2]));
		return 0;
	}
	if (argc == 2 && !strcmp(argv[1], "passed")) {
		passed(argv[0]);
		return 0;
	}
	for (i = 0; argc == 2 && i < sizeof(checks) / sizeof(*checks); i++)
		if (!strcmp(argv[1], checks[i].name)) {
			checks[i].check();
			return 0;
		}
	fprintf(stderr, "%s: no such check\n", argc > 1 ? argv[1] : "");
	return 2;
}
