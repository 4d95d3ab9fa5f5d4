/*
 * What the programs in this folder share. Each one uses the interface as the
 * specification's own fragments do, prints what it found, and exits with 1 and
 * a line that says what, if the interface deviates; with 2 if it is not told
 * what to measure. From the environment:
 *
 * UMPIRE_PERFMON     the control socket
 * UMPIRE_TEST_EVENT  value of PMC 0: an event that the guest keeps going
 * UMPIRE_TEST_EVENT2 value of PMC 1 (as UMPIRE_TEST_EVENT)
 * UMPIRE_TEST_PERIOD events between two overflows (100000)
 * UMPIRE_TEST_VCPU   vCPU (0)
 * UMPIRE_TEST_CORE   core (0)
 * UMPIRE_TEST_ENDING vCPU that ends by itself (end.c only)
 */
#ifndef SPEC_H
#define SPEC_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <fcntl.h>
#include <perfmon.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Ends the program unless the interface does as it must. */
#define MUST(condition, ...) \
	do { \
		if (!(condition)) \
			deviates(__FILE__, __LINE__, #condition, __VA_ARGS__); \
	} while (0)

/* A call that must succeed. */
#define CALL(call) MUST((call) == 0, "errno %d: %s", errno, pfm_strerror_last())

/* A call that must fail with this error, and say why. */
#define FAILS(call, number) \
	do { \
		errno = 0; \
		MUST((call) == -1, "it did not fail with %s", #number); \
		MUST(errno == (number), "errno %d: %s", errno, pfm_strerror_last()); \
	} while (0)

#define UNUSED __attribute__((unused))

UNUSED __attribute__((format(printf, 4, 5), noreturn))
static void deviates(const char *file, int line, const char *what, const char *format, ...)
{
	va_list arguments;

	fprintf(stderr, "%s:%d: %s: ", file, line, what);
	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fputc('\n', stderr);
	_exit(1);
}

UNUSED static uint64_t setting(const char *name, const char *otherwise)
{
	const char *text = getenv(name);
	char *end;
	uint64_t value;

	if (!text)
		text = otherwise;
	if (!text) {
		fprintf(stderr, "%s is not set (pmu-virt/perfmon/client/tests/spec/spec.h)\n", name);
		exit(2);
	}
	value = strtoull(text, &end, 0);
	if (*end || end == text) {
		fprintf(stderr, "%s is no number: %s\n", name, text);
		exit(2);
	}
	return value;
}

UNUSED static uint64_t event(int counter)
{
	const char *first = getenv("UMPIRE_TEST_EVENT");

	return counter ? setting("UMPIRE_TEST_EVENT2", first) : setting("UMPIRE_TEST_EVENT", NULL);
}

UNUSED static uint64_t period(void)
{
	return setting("UMPIRE_TEST_PERIOD", "100000");
}

UNUSED static pid_t vcpu(void)
{
	return (pid_t)setting("UMPIRE_TEST_VCPU", "0");
}

UNUSED static void rest(long milliseconds)
{
	struct timespec time = { milliseconds / 1000, milliseconds % 1000 * 1000000 };

	while (nanosleep(&time, &time) == -1 && errno == EINTR)
		;
}

UNUSED static int create(uint32_t flags)
{
	pfarg_ctx_t context;

	memset(&context, 0, sizeof(context));
	context.ctx_flags = flags;
	CALL(perfmonctl(0, PFM_CREATE_CONTEXT, &context, 1));
	MUST(context.ctx_fd >= 0, "it is %d", context.ctx_fd);
	MUST(context.ctx_smpl_buf_size == 0, "a buffer of %zu bytes", context.ctx_smpl_buf_size);
	return context.ctx_fd;
}

/* Counter `counter` of a set counts its event, and overflows after each period. */
UNUSED static void program(int fd, uint16_t counter, uint16_t set, uint32_t flags)
{
	pfarg_pmc_t pmc;
	pfarg_pmd_t pmd;

	memset(&pmc, 0, sizeof(pmc));
	memset(&pmd, 0, sizeof(pmd));
	pmc.reg_num = pmd.reg_num = counter;
	pmc.reg_set = pmd.reg_set = set;
	pmc.reg_flags = flags;
	pmc.reg_value = event(counter);
	pmd.reg_value = pmd.reg_short_reset = pmd.reg_long_reset = -period();
	pmd.reg_ovflsw_thres = 1;
	CALL(perfmonctl(fd, PFM_WRITE_PMCS, &pmc, 1));
	CALL(perfmonctl(fd, PFM_WRITE_PMDS, &pmd, 1));
}

UNUSED static void load(int fd, pid_t target)
{
	pfarg_load_t load;

	memset(&load, 0, sizeof(load));
	load.load_pid = target;
	CALL(perfmonctl(fd, PFM_LOAD_CONTEXT, &load, 1));
}

/* The next message, which is to be of this type. */
UNUSED static pfm_msg_t message(int fd, uint32_t type)
{
	pfm_msg_t message;
	ssize_t size = read(fd, &message, sizeof(message));

	MUST(size == sizeof(message), "read returned %zd, errno %d", size, errno);
	MUST(message.msg_type == type, "type %u instead of %u", message.msg_type, type);
	return message;
}

/* Waits for a child, which is to exit with 0. */
UNUSED static void join(pid_t child)
{
	int status;

	MUST(waitpid(child, &status, 0) == child, "errno %d", errno);
	MUST(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with %#x", status);
}

#endif
