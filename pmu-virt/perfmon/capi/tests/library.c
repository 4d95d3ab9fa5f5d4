/* What the library does beside the specification's calls: one check per argument. */
#include "spec.h"

#include <pthread.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

typedef struct {
	pfarg_ctx_t ctx;
	pfm_default_smpl_arg_t format;
} context_arg_t;

static int create_sampling(size_t size)
{
	pfm_uuid_t uuid = PFM_DEFAULT_SMPL_UUID;
	context_arg_t arg;

	memset(&arg, 0, sizeof(arg));
	memcpy(arg.ctx.ctx_smpl_buf_id, uuid, sizeof(uuid));
	arg.format.buf_size = size;
	CALL(perfmonctl(0, PFM_CREATE_CONTEXT, &arg, 1));
	MUST(arg.ctx.ctx_smpl_buf_size == size, "%zu bytes", arg.ctx.ctx_smpl_buf_size);
	return arg.ctx.ctx_fd;
}

static void no_server(void)
{
	pfarg_config_t config;
	char *socket = strdup(getenv("UMPIRE_PERFMON"));

	unsetenv("UMPIRE_PERFMON");
	FAILS(pfm_get_config(&config), ENOSYS);
	MUST(strstr(pfm_strerror_last(), "UMPIRE_PERFMON"), "%s", pfm_strerror_last());
	setenv("UMPIRE_PERFMON", "/nonexistent/socket", 1);
	FAILS(pfm_get_config(&config), ENOSYS);
	MUST(strstr(pfm_strerror_last(), "no such control socket"), "%s", pfm_strerror_last());
	setenv("UMPIRE_PERFMON", "/dev/null", 1);
	FAILS(pfm_get_config(&config), ENOSYS);
	setenv("UMPIRE_PERFMON", socket, 1);
	CALL(pfm_get_config(&config));
	free(socket);
}

/* Files, pipes and sockets of the program behave as ever, with contexts open or not. */
static void others_are_left_alone(void)
{
	char text[100], name[] = "/tmp/umpire-perfmon-XXXXXX";
	int round, ends[2], file, copy, context = -1;
	void *pages;

	for (round = 0; round < 2; round++) {
		file = mkstemp(name);
		MUST(file >= 0, "errno %d", errno);
		unlink(name);
		strcpy(name, "/tmp/umpire-perfmon-XXXXXX");
		MUST(write(file, "hello, world", 12) == 12, "errno %d", errno);
		MUST(lseek(file, 7, SEEK_SET) == 7, "errno %d", errno);
		MUST(read(file, text, sizeof(text)) == 5 && !memcmp(text, "world", 5), "errno %d", errno);
		MUST(ftruncate(file, 4096) == 0, "errno %d", errno);
		pages = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
		MUST(pages != MAP_FAILED && !memcmp(pages, "hello", 5), "errno %d", errno);
		copy = fcntl(file, F_DUPFD_CLOEXEC, 50);
		MUST(copy >= 50 && fcntl(copy, F_GETFD) == FD_CLOEXEC, "errno %d", errno);
		MUST(dup2(file, 60) == 60 && dup3(file, 61, O_CLOEXEC) == 61, "errno %d", errno);
		MUST(close(60) == 0 && close(61) == 0 && close(copy) == 0, "errno %d", errno);
		MUST(close(file) == 0 && !memcmp(pages, "hello", 5), "errno %d", errno);
		MUST(munmap(pages, 4096) == 0, "errno %d", errno);
		MUST(close(file) == -1 && errno == EBADF, "errno %d", errno);
		MUST(read(file, text, 1) == -1 && errno == EBADF, "errno %d", errno);
		MUST(write(-1, text, 1) == -1 && errno == EBADF, "errno %d", errno);
		MUST(dup(-1) == -1 && errno == EBADF, "errno %d", errno);
		MUST(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0, "errno %d", errno);
		MUST(write(ends[0], "odd", 3) == 3, "errno %d", errno);
		MUST(read(ends[1], text, sizeof(text)) == 3, "errno %d", errno);
		pages = mmap(NULL, 4096, PROT_READ, MAP_SHARED, ends[0], 0);
		MUST(pages == MAP_FAILED && errno == ENODEV, "errno %d", errno);
		FAILS(pfm_stop(ends[0]), EBADF);
		MUST(lseek(ends[0], 0, SEEK_SET) == -1 && errno == ESPIPE, "errno %d", errno);
		close(ends[0]);
		close(ends[1]);
		pages = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		MUST(pages != MAP_FAILED, "errno %d", errno);
		context = create_sampling(4096);
	}
	close(context);
}

/* A number that was closed is whatever is opened next. */
static void reuse_of_numbers(void)
{
	char text[10];
	int fd = create_sampling(4096), ends[2];
	void *buffer = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);

	MUST(buffer != MAP_FAILED, "errno %d", errno);
	MUST(close(fd) == 0, "errno %d", errno);
	MUST(pipe(ends) == 0 && ends[0] == fd, "the number is not used again");
	MUST(write(ends[1], "odd", 3) == 3 && read(ends[0], text, sizeof(text)) == 3, "errno %d", errno);
	FAILS(pfm_stop(ends[0]), EBADF);
	close(ends[0]);
	close(ends[1]);

	/* Closed where the library does not see it. */
	fd = create(0);
	MUST(close_range((unsigned)fd, (unsigned)fd, 0) == 0, "errno %d", errno);
	MUST(pipe(ends) == 0 && ends[0] == fd, "the number is not used again");
	MUST(write(ends[1], "odd", 3) == 3 && read(ends[0], text, sizeof(text)) == 3, "errno %d", errno);
	FAILS(pfm_stop(ends[0]), EBADF);
	MUST(lseek(ends[0], 0, SEEK_SET) == -1 && errno == ESPIPE, "errno %d", errno);
	MUST(dup2(ends[1], ends[0]) == ends[0], "errno %d", errno);
	close(ends[0]);
	close(ends[1]);
	fd = create(0);
	FAILS(pfm_unload_context(fd), EBUSY);
	/* A context takes the number of another one. */
	MUST(dup2(create(0), fd) == fd, "errno %d", errno);
	FAILS(pfm_unload_context(fd), EBUSY);
}

/* A program that closes all that it does not know closes the library's connection. */
static void reuse_of_the_connection(void)
{
	pfarg_config_t config;
	int fd = create(0), file, number;

	for (number = 3; number < 100; number++)
		if (number != fd)
			close(number);
	file = open("/dev/null", O_RDWR);
	MUST(file >= 0, "errno %d", errno);
	while (open("/dev/null", O_RDWR) < 20)
		;
	CALL(pfm_get_config(&config));
	FAILS(pfm_unload_context(fd), EBUSY);
	MUST(write(file, "x", 1) == 1, "the library closed a file of the program: errno %d", errno);
	for (number = 3; number <= 20; number++)
		MUST(fcntl(number, F_GETFD) != -1, "descriptor %d is gone", number);
}

static void duplicates(void)
{
	char byte;
	int fd = create_sampling(4096), copies[4], i;
	void *buffer;

	copies[0] = dup(fd);
	copies[1] = dup2(fd, 70);
	copies[2] = dup3(fd, 71, O_CLOEXEC);
	copies[3] = fcntl(fd, F_DUPFD, 80);
	MUST(close(fd) == 0, "errno %d", errno);
	for (i = 0; i < 4; i++) {
		MUST(copies[i] >= 0, "duplicate %d", i);
		MUST(read(copies[i], &byte, 1) == -1 && errno == EINVAL, "duplicate %d: errno %d", i, errno);
		FAILS(pfm_unload_context(copies[i]), EBUSY);
	}
	buffer = mmap(NULL, 4096, PROT_READ, MAP_SHARED, copies[3], 0);
	MUST(buffer != MAP_FAILED, "errno %d", errno);
	MUST(mmap(NULL, 4096, PROT_READ, MAP_SHARED, copies[0], 0) == MAP_FAILED, "mapped twice");
	for (i = 0; i < 3; i++)
		close(copies[i]);
	MUST(mincore(buffer, 4096, (unsigned char *)&byte) == 0, "the mapping is gone too early");
	/* The last one is not closed, but becomes something else. */
	MUST(dup2(0, copies[3]) == copies[3], "errno %d", errno);
	MUST(mincore(buffer, 4096, (unsigned char *)&byte) == -1, "the mapping is left");
}

/* A context comes by SCM_RIGHTS from a process that goes. */
static void passed_on(void)
{
	char control[CMSG_SPACE(sizeof(int))], byte = 0;
	struct iovec iov = { &byte, 1 };
	struct msghdr header;
	struct cmsghdr *rights;
	int ends[2], fd;
	pid_t child;
	void *buffer;

	memset(&header, 0, sizeof(header));
	memset(control, 0, sizeof(control));
	header.msg_iov = &iov;
	header.msg_iovlen = 1;
	header.msg_control = control;
	header.msg_controllen = sizeof(control);
	MUST(socketpair(AF_UNIX, SOCK_DGRAM, 0, ends) == 0, "errno %d", errno);
	child = fork();
	if (child == 0) {
		fd = create_sampling(8192);
		load(fd, vcpu());
		rights = CMSG_FIRSTHDR(&header);
		rights->cmsg_level = SOL_SOCKET;
		rights->cmsg_type = SCM_RIGHTS;
		rights->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(rights), &fd, sizeof(int));
		MUST(sendmsg(ends[0], &header, 0) == 1, "errno %d", errno);
		_exit(0);
	}
	MUST(recvmsg(ends[1], &header, 0) == 1, "errno %d", errno);
	join(child);
	rights = CMSG_FIRSTHDR(&header);
	MUST(rights && rights->cmsg_type == SCM_RIGHTS, "no descriptor came");
	memcpy(&fd, CMSG_DATA(rights), sizeof(int));
	/* The first use of it is to map its buffer. */
	buffer = mmap(NULL, 8192, PROT_READ, MAP_SHARED, fd, 0);
	MUST(buffer != MAP_FAILED, "errno %d", errno);
	CALL(pfm_unload_context(fd));
	MUST(close(fd) == 0, "errno %d", errno);
	MUST(mincore(buffer, 8192, (unsigned char *)control) == -1, "the mapping is left");
}

static void stale_messages(void)
{
	struct pollfd polled;
	pfm_msg_t msg;
	int fd = create(0);

	program(fd, 0, 0, PFM_REGFL_OVFL_NOTIFY);
	load(fd, vcpu());
	CALL(pfm_start(fd, NULL));
	polled.fd = fd;
	polled.events = POLLIN;
	MUST(poll(&polled, 1, 10000) == 1, "no message in 10 s");
	CALL(pfm_unload_context(fd));
	/* Unloading keeps messages, loading does not (3.1.7, 3.1.8). */
	MUST(poll(&polled, 1, 0) == 1, "PFM_UNLOAD_CONTEXT loses a message");
	load(fd, vcpu());
	MUST(poll(&polled, 1, 0) == 0, "a message of the time before is left");
	MUST(fcntl(fd, F_SETFL, O_NONBLOCK) == 0, "errno %d", errno);
	MUST(read(fd, &msg, sizeof(msg)) == -1 && errno == EAGAIN, "errno %d", errno);
	/* The load has forgotten the reset, too: it would count on from the wrap. */
	program(fd, 0, 0, PFM_REGFL_OVFL_NOTIFY);
	CALL(pfm_start(fd, NULL));
	MUST(poll(&polled, 1, 10000) == 1, "no message in 10 s");
	msg = message(fd, PFM_MSG_OVFL);
	MUST(msg.pfm_ovfl_msg.msg_generation == 2, "generation %u", msg.pfm_ovfl_msg.msg_generation);
}

static void many_messages(void)
{
	struct pollfd polled;
	pfm_msg_t msgs[8];
	int fd = create(0), i, round;
	void *volatile nowhere = (void *)16;
	ssize_t size;

	program(fd, 0, 0, PFM_REGFL_OVFL_NOTIFY);
	load(fd, vcpu());
	CALL(pfm_start(fd, NULL));
	/* Each restart has a message of its own, which is not read. */
	for (i = 0; i < 5; i++) {
		for (round = 0; pfm_restart(fd) == -1; round++) {
			MUST(errno == EBUSY && round < 10000, "errno %d: %s", errno, pfm_strerror_last());
			rest(1);
		}
	}
	CALL(pfm_stop(fd));
	size = read(fd, msgs, 2 * sizeof(msgs[0]));
	MUST(size == 2 * sizeof(msgs[0]), "%zd bytes", size);
	/* The next overflow may have come before the stop. */
	size = read(fd, msgs, sizeof(msgs));
	MUST(size == 3 * sizeof(msgs[0]) || size == 4 * sizeof(msgs[0]), "%zd bytes", size);
	MUST(read(fd, msgs, 0) == -1 && errno == EINVAL, "errno %d", errno);
	if (pfm_restart(fd) == -1)
		MUST(errno == EBUSY, "errno %d: %s", errno, pfm_strerror_last());
	CALL(pfm_start(fd, NULL));
	polled.fd = fd;
	polled.events = POLLIN;
	MUST(poll(&polled, 1, 10000) == 1, "no message in 10 s");
	MUST(read(fd, nowhere, sizeof(msgs[0])) == -1 && errno == EFAULT, "errno %d", errno);
}

/* The program's own allocator: tells whether something allocates that must not. */
extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static volatile int forbidden;

static void allocates(void)
{
	static const char text[] = "a call allocates\n";

	if (forbidden) {
		forbidden = 0;
		if (write(2, text, sizeof(text) - 1) < 0)
			_exit(2);
		abort();
	}
}

void *malloc(size_t size)
{
	allocates();
	return __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
	allocates();
	return __libc_calloc(count, size);
}

void *realloc(void *old, size_t size)
{
	allocates();
	return __libc_realloc(old, size);
}

int posix_memalign(void **result, size_t alignment, size_t size)
{
	allocates();
	*result = __libc_memalign(alignment, size);
	return *result ? 0 : ENOMEM;
}

void free(void *old)
{
	allocates();
	__libc_free(old);
}

/* What a signal handler may call allocates nothing, whether it succeeds or not. */
static void no_allocation(void)
{
	int fd = create_sampling(4096), message_only = create(PFM_FL_OVFL_NO_MSG), copy, tries;
	pfarg_load_t target = { 0, 0 }, another = { 1, 0 };
	pfm_msg_t msg;
	pfarg_pmd_t pmd;
	void *buffer;

	program(fd, 0, 0, PFM_REGFL_OVFL_NOTIFY);
	program(message_only, 0, 0, PFM_REGFL_OVFL_NOTIFY);
	memset(&pmd, 0, sizeof(pmd));
	forbidden = 1;
	CALL(pfm_load_context(fd, &target));
	CALL(pfm_load_context(message_only, &another));
	FAILS(pfm_load_context(fd, &target), EBUSY);
	CALL(pfm_start(fd, NULL));
	CALL(pfm_start(message_only, NULL));
	MUST(read(fd, &msg, sizeof(msg)) == sizeof(msg), "errno %d", errno);
	MUST(read(fd, &msg, 1) == -1, "a part of a message");
	CALL(pfm_restart(fd));
	for (tries = 0; pfm_restart(message_only) == -1; tries++) {
		MUST(errno == EBUSY && tries < 10000, "errno %d, no overflow in 10 s", errno);
		rest(1);
	}
	CALL(pfm_read_pmds(fd, &pmd, 1));
	FAILS(pfm_read_pmds(fd, &pmd, 0), EFAULT);
	FAILS(pfm_read_pmds(fd, NULL, 1), EFAULT);
	FAILS(pfm_stop(0), EBADF);
	FAILS(pfm_stop(-1), EBADF);
	FAILS(perfmonctl(fd, 99, NULL, 0), EINVAL);
	pmd.reg_num = PFM_MAX_PMDS;
	FAILS(pfm_read_pmds(fd, &pmd, 1), EINVAL);
	CALL(pfm_unload_context(fd));
	buffer = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
	MUST(buffer != MAP_FAILED, "errno %d", errno);
	copy = dup(fd);
	MUST(copy >= 0 && close(copy) == 0 && close(fd) == 0, "errno %d", errno);
	forbidden = 0;
}

static int shared_fd;
static volatile sig_atomic_t handled, failed;

static void on_signal(int number)
{
	pfarg_pmd_t pmd;
	int before = errno;

	(void)number;
	memset(&pmd, 0, sizeof(pmd));
	handled++;
	if (pfm_read_pmds(shared_fd, &pmd, 1) == -1)
		failed++;
	errno = before;
}

/* Commands in a signal handler, in the middle of commands of all threads. */
static void *reads(void *rounds)
{
	pfarg_pmd_t pmd;
	long i;

	for (i = 0; i < (long)rounds; i++) {
		memset(&pmd, 0, sizeof(pmd));
		CALL(pfm_read_pmds(shared_fd, &pmd, 1));
		pmd.reg_num = PFM_MAX_PMDS;
		FAILS(pfm_read_pmds(shared_fd, &pmd, 1), EINVAL);
	}
	return NULL;
}

static void signals(void)
{
	struct sigaction action;
	timer_t timer;
	struct itimerspec time = { { 0, 300000 }, { 0, 300000 } };
	pthread_t other;

	shared_fd = create(0);
	memset(&action, 0, sizeof(action));
	action.sa_handler = on_signal;
	action.sa_flags = SA_RESTART;
	MUST(sigaction(SIGALRM, &action, NULL) == 0, "errno %d", errno);
	MUST(timer_create(CLOCK_MONOTONIC, NULL, &timer) == 0, "errno %d", errno);
	MUST(timer_settime(timer, 0, &time, NULL) == 0, "errno %d", errno);
	MUST(pthread_create(&other, NULL, reads, (void *)2000L) == 0, "no thread");
	reads((void *)2000L);
	pthread_join(other, NULL);
	while (handled < 20)
		rest(1);
	MUST(!failed, "%d calls failed in the handler", (int)failed);
}

static void *creates(void *unused)
{
	int i;

	(void)unused;
	for (i = 0; i < 100; i++) {
		int fd = create_sampling(4096), copy = dup(fd);
		void *buffer = mmap(NULL, 4096, PROT_READ, MAP_SHARED, copy, 0);

		MUST(buffer != MAP_FAILED, "errno %d", errno);
		FAILS(pfm_unload_context(copy), EBUSY);
		MUST(close(fd) == 0 && close(copy) == 0, "errno %d", errno);
	}
	return NULL;
}

static void threads(void)
{
	pthread_t all[8];
	int i;

	for (i = 0; i < 8; i++)
		MUST(pthread_create(&all[i], NULL, creates, NULL) == 0, "no thread");
	for (i = 0; i < 8; i++)
		pthread_join(all[i], NULL);
}

static volatile int stop;

static void *reads_on(void *unused)
{
	while (!stop)
		reads((void *)1L);
	return unused;
}

/* The child of a fork in the middle of other threads' commands can go on. */
static void fork_in_threads(void)
{
	pthread_t all[2];
	int i;

	shared_fd = create(0);
	for (i = 0; i < 2; i++)
		MUST(pthread_create(&all[i], NULL, reads_on, NULL) == 0, "no thread");
	for (i = 0; i < 100; i++) {
		pid_t child = fork();

		if (child == 0) {
			alarm(10);
			reads((void *)3L);
			_exit(0);
		}
		join(child);
	}
	stop = 1;
	for (i = 0; i < 2; i++)
		pthread_join(all[i], NULL);
}

static void many_contexts(void)
{
	int fds[600], i;

	for (i = 0; i < 600; i++)
		fds[i] = create(0);
	for (i = 0; i < 600; i++)
		FAILS(pfm_unload_context(fds[i]), EBUSY);
	MUST(dup2(fds[0], 1019) == 1019, "errno %d", errno);
	FAILS(pfm_unload_context(1019), EBUSY);
	for (i = 0; i < 600; i += 2)
		MUST(close(fds[i]) == 0, "errno %d", errno);
	for (i = 1; i < 600; i += 2)
		FAILS(pfm_unload_context(fds[i]), EBUSY);
}

/* Leads a read out of the kernel. */
static void interrupts(int number)
{
	(void)number;
}

static void *reads_in_vain(void *fd)
{
	pfm_msg_t msg;

	MUST(read(*(int *)fd, &msg, sizeof(msg)) == -1 && errno == EINTR, "errno %d", errno);
	return NULL;
}

/* A context is closed while another thread reads from it: the next one, which may
 * have its place in the library, loses nothing by that thread's return. It has empty
 * records, at a server of before. */
static void closed_while_read(void)
{
	struct sigaction action;
	struct pollfd polled;
	pthread_t reader;
	int first = create(0), fd, records = 0;
	char byte;

	memset(&action, 0, sizeof(action));
	action.sa_handler = interrupts;
	MUST(sigaction(SIGUSR1, &action, NULL) == 0, "errno %d", errno);
	MUST(pthread_create(&reader, NULL, reads_in_vain, &first) == 0, "no thread");
	rest(200);
	MUST(close(first) == 0, "errno %d", errno);
	fd = create(PFM_FL_OVFL_NO_MSG);
	MUST(pthread_kill(reader, SIGUSR1) == 0, "no signal");
	pthread_join(reader, NULL);
	program(fd, 0, 0, PFM_REGFL_OVFL_NOTIFY);
	load(fd, vcpu());
	CALL(pfm_start(fd, NULL));
	polled.fd = fd;
	polled.events = POLLIN;
	MUST(poll(&polled, 1, 10000) == 1, "no overflow in 10 s");
	/* Takes the record away, and brings another one. */
	CALL(pfm_restart(fd));
	MUST(poll(&polled, 1, 10000) == 1, "no overflow in 10 s");
	CALL(pfm_stop(fd));
	while (recv(fd, &byte, 1, MSG_DONTWAIT) == 0)
		records++;
	MUST(records == 1, "%d records", records);
}

/* What was read before the bad address is told. */
static void half_a_buffer(void)
{
	pfm_msg_t *last;
	char *pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int fd = create(0), i;
	ssize_t size;

	MUST(pages != MAP_FAILED && munmap(pages + 4096, 4096) == 0, "errno %d", errno);
	last = (pfm_msg_t *)(pages + 4096) - 1;
	program(fd, 0, 0, PFM_REGFL_OVFL_NOTIFY);
	load(fd, vcpu());
	CALL(pfm_start(fd, NULL));
	for (i = 0; i < 3; i++)
		CALL(pfm_restart(fd));
	CALL(pfm_stop(fd));
	size = read(fd, last, 2 * sizeof(*last));
	MUST(size == sizeof(*last), "%zd bytes, errno %d", size, errno);
	MUST(last->pfm_ovfl_msg.msg_type == PFM_MSG_OVFL, "no overflow");
}

/* The sampling formats (3.5.2). */
static void formats(void)
{
	pfm_uuid_t uuid = PFM_DEFAULT_SMPL_UUID;
	pfarg_fmtinfo_t some[8], none;

	memset(some, 1, sizeof(some));
	memset(&none, 0, sizeof(none));
	CALL(pfm_getinfo_fmts(some, 8));
	MUST(!memcmp(some[0].fmt_uuid, uuid, sizeof(uuid)), "%s is first", some[0].fmt_name);
	MUST(!strcmp(some[0].fmt_name, "default"), "%s", some[0].fmt_name);
	MUST(some[0].fmt_arg_size == sizeof(pfm_default_smpl_arg_t), "%llu bytes",
	     (unsigned long long)some[0].fmt_arg_size);
	MUST(some[0].fmt_queue_depth == 4, "%u messages", some[0].fmt_queue_depth);
	MUST(!memcmp(&some[7], &none, sizeof(none)), "there are 8 formats");
	CALL(perfmonctl(-1, PFM_GETINFO_FMTS, some, 8));
	FAILS(pfm_getinfo_fmts(some, 0), EFAULT);
	FAILS(pfm_getinfo_fmts(NULL, 1), EFAULT);
}

/* An event's name, for the four counters of this PMU. */
static void events(void)
{
	pfarg_pmc_t pmcs[8];
	int i, n;

	memset(pmcs, 1, sizeof(pmcs));
	n = pfm_event_encode("instructions:u", pmcs, 8);
	MUST(n == 4, "%d PMCs, %s", n, pfm_strerror_last());
	for (i = 0; i < n; i++)
		MUST(pmcs[i].reg_num == i && pmcs[i].reg_value == 0x4100c0 && !pmcs[i].reg_flags,
		     "PMC %u: %#llx", pmcs[i].reg_num, (unsigned long long)pmcs[i].reg_value);
	MUST(pmcs[4].reg_num == 0x101, "an element behind the last was written");
	MUST(pfm_event_encode("r5300c0", pmcs, 1) == 4, "%s", pfm_strerror_last());
	MUST(pmcs[0].reg_value == 0x4300c0, "%#llx", (unsigned long long)pmcs[0].reg_value);
	MUST(pfm_event_encode("cpu/event=0xc0/k", pmcs, 1) == 4, "%s", pfm_strerror_last());
	MUST(pmcs[0].reg_value == 0x4200c0, "%#llx", (unsigned long long)pmcs[0].reg_value);
	MUST(pfm_event_encode("cycles", NULL, 0) == 4, "%s", pfm_strerror_last());
	MUST(pfm_subcode_last() == PFM_SUBCODE_NONE, "%d", pfm_subcode_last());
	/* There may be no libpfm4. */
	n = pfm_event_encode("amd64_k7::CPU_CLK_UNHALTED", pmcs, 1);
	MUST(n == 4 ? pmcs[0].reg_value == 0x430076 : !!strstr(pfm_strerror_last(), "cannot be loaded"),
	     "%s", pfm_strerror_last());

	FAILS(pfm_event_encode("no-such-event", pmcs, 8), EINVAL);
	MUST(pfm_subcode_last() == PFM_SUBCODE_INVALID_EVENT, "%d", pfm_subcode_last());
	MUST(strstr(pfm_strerror_last(), "no-such-event") != NULL, "%s", pfm_strerror_last());
	FAILS(pfm_event_encode("", pmcs, 8), EINVAL);
	FAILS(pfm_event_encode("\xff", pmcs, 8), EINVAL);
	FAILS(pfm_event_encode("topdown-slots", pmcs, 8), EINVAL);
	FAILS(pfm_event_encode("cycles:x", pmcs, 8), EINVAL);
	MUST(pfm_subcode_last() == PFM_SUBCODE_INVALID_ATTRIBUTE, "%d", pfm_subcode_last());
	FAILS(pfm_event_encode("r10000000000000c0", pmcs, 8), EINVAL);
	MUST(pfm_subcode_last() == PFM_SUBCODE_INVALID_ATTRIBUTE, "%d", pfm_subcode_last());
	FAILS(pfm_event_encode(NULL, pmcs, 8), EFAULT);
	FAILS(pfm_event_encode("cycles", NULL, 1), EFAULT);
	FAILS(pfm_event_encode("cycles", pmcs, -1), EFAULT);
}

/* PMDs of several contexts are added. */
static void sums(void)
{
	int fds[2] = { create(0), create(0) }, i;
	pfarg_pmd_t pmd, sum;
	uint64_t each = 0;

	for (i = 0; i < 2; i++) {
		program(fds[i], 0, 0, 0);
		load(fds[i], i);
		CALL(pfm_start(fds[i], NULL));
		memset(&pmd, 0, sizeof(pmd));
		CALL(pfm_stop(fds[i]));
		CALL(pfm_read_pmds(fds[i], &pmd, 1));
		each += pmd.reg_value;
	}
	memset(&sum, 0, sizeof(sum));
	CALL(pfm_read_pmds_sum(fds, 2, &sum, 1));
	MUST(sum.reg_value == each, "%llu", (unsigned long long)sum.reg_value);
	MUST(PFM_REG_PROV(sum.reg_flags) == PFM_PROV_EXACT, "flags %#x", sum.reg_flags);
	MUST(close(fds[1]) == 0, "errno %d", errno);
	FAILS(pfm_read_pmds_sum(fds, 2, &sum, 1), EBADF);
	MUST(sum.reg_value == each, "it was changed");
	FAILS(pfm_read_pmds_sum(fds, 0, &sum, 1), EFAULT);
	FAILS(pfm_read_pmds_sum(NULL, 1, &sum, 1), EFAULT);
	FAILS(pfm_read_pmds_sum(fds, 1, NULL, 1), EFAULT);
	FAILS(pfm_read_pmds_sum(fds, 1, &sum, 0), EFAULT);
	sum.reg_num = PFM_MAX_PMDS;
	FAILS(pfm_read_pmds_sum(fds, 1, &sum, 1), EINVAL);
}

/* The question after a load is refused; the load was done. */
static void load_alone(void)
{
	int fd = create(0);

	load(fd, vcpu());
	CALL(pfm_unload_context(fd));
}

/* The first call fails with this error, the next one works. */
static void fails_once(int number)
{
	pfarg_config_t config;

	FAILS(pfm_get_config(&config), number);
	MUST(*pfm_strerror_last(), "there is no reason");
	puts(pfm_strerror_last());
	CALL(pfm_get_config(&config));
}

/* A system-wide context for the core on the caller's one CPU: the load gives this error, or 0. */
static void by_affinity(int number)
{
	pfarg_load_t target = { 0, 0 };
	cpu_set_t allowed, one;
	size_t cpu = 0;
	int fd = create(PFM_FL_SYSTEM_WIDE);

	MUST(sched_getaffinity(0, sizeof(allowed), &allowed) == 0, "errno %d", errno);
	while (!CPU_ISSET(cpu, &allowed))
		cpu++;
	CPU_ZERO(&one);
	CPU_SET(cpu, &one);
	MUST(sched_setaffinity(0, sizeof(one), &one) == 0, "errno %d", errno);
	target.load_pid = (pid_t)syscall(SYS_gettid);
	if (number) {
		FAILS(pfm_load_context(fd, &target), number);
		puts(pfm_strerror_last());
	} else {
		CALL(pfm_load_context(fd, &target));
	}
}

/* A load that begins with this set would wait for the owners of counters. */
static void does_not_wait(void)
{
	pfarg_load_t target = { .load_pid = vcpu(), .load_set = 77 };
	int fd = create(0);

	FAILS(pfm_load_context(fd, &target), EINVAL);
	MUST(fcntl(fd, F_SETFL, O_NONBLOCK) == 0, "errno %d", errno);
	FAILS(pfm_load_context(fd, &target), EAGAIN);
	target.load_set = 0;
	CALL(pfm_load_context(fd, &target));
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*check)(void);
	} checks[] = {
#define CHECK(name) { #name, name }
		CHECK(no_server), CHECK(others_are_left_alone), CHECK(reuse_of_numbers),
		CHECK(reuse_of_the_connection), CHECK(duplicates), CHECK(passed_on),
		CHECK(stale_messages), CHECK(many_messages), CHECK(signals), CHECK(threads),
		CHECK(fork_in_threads), CHECK(many_contexts), CHECK(no_allocation),
		CHECK(closed_while_read), CHECK(half_a_buffer), CHECK(load_alone), CHECK(formats),
		CHECK(does_not_wait), CHECK(events), CHECK(sums),
	};
	size_t i;

	if (argc == 3 && !strcmp(argv[1], "fails_once")) {
		fails_once(atoi(argv[2]));
		return 0;
	}
	if (argc == 3 && !strcmp(argv[1], "by_affinity")) {
		by_affinity(atoi(argv[2]));
		return 0;
	}
	for (i = 0; argc == 2 && i < sizeof(checks) / sizeof(checks[0]); i++)
		if (!strcmp(argv[1], checks[i].name)) {
			checks[i].check();
			return 0;
		}
	fputs("there is no such check\n", stderr);
	return 2;
}
