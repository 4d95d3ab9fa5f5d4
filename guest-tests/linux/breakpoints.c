/* A user of the debug registers, and a debugger for it:
 *
 *   breakpoints where NAME       address of one of its symbols: called, stored, rdpmc
 *   breakpoints run N            N rounds, each of which calls `called` and writes `stored` twice
 *   breakpoints late N           the same after 50 ms
 *   breakpoints count N          N rounds with an RDPMC, of a program that counts its own cycles
 *   breakpoints debug N          debugs itself through ptrace(2), N times each, as gdb does:
 *                                hardware breakpoint, watchpoints, all four slots, single step
 *   breakpoints rdpmc N          debugs `count`: steps over N RDPMCs, with breakpoints at them
 *
 * Every line that it prints is exact: the same on every machine whose debug registers work.
 * It is linked statically at a fixed address, so `where` holds for every process. */
#include <errno.h>
#include <linux/perf_event.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SLOTS 4
/* DR7: kinds of breakpoints, with the length of 8 bytes for data. */
#define EXECUTE 0x0UL
#define WRITE 0x9UL
#define ACCESS 0xbUL
/* DR6. */
#define SINGLE_STEP (1UL << 14)
volatile uint64_t stored[2];

__attribute__((noinline)) void called(void)
{
	__asm__ volatile("");
}

__attribute__((noinline)) static void round_of_target(uint64_t number)
{
	called();
	stored[0] = number;
	stored[1] = stored[0];
	stored[0] = ~number;
}

/* A straight line to step through, with an RDPMC in it. */
void line(uint32_t index);
extern char rdpmc[], after_rdpmc[], last[];
__asm__(".globl line, rdpmc, after_rdpmc, last\n"
	"line:\n"
	"	mov %edi, %ecx\n"
	"	xor %eax, %eax\n"
	"	xor %edx, %edx\n"
	"rdpmc:\n"
	"	rdpmc\n"
	"after_rdpmc:\n"
	"	nop\n"
	"	nop\n"
	"last:\n"
	"	ret\n");

/* The same without it. */
void plain(void);
extern char plain_end[];
__asm__(".globl plain, plain_end\n"
	"plain:\n"
	"	.rept 16\n"
	"	nop\n"
	"	.endr\n"
	"plain_end:\n"
	"	ret\n");

static void fail(const char *what)
{
	printf("%s: %s\n", what, strerror(errno));
	exit(1);
}

/* --- the debugger's side ------------------------------------------------------ */

static pid_t child;

static void poke(int reg, unsigned long value)
{
	size_t offset = offsetof(struct user, u_debugreg) + sizeof(long) * (size_t)reg;

	if (ptrace(PTRACE_POKEUSER, child, offset, value))
		fail("PTRACE_POKEUSER");
}

static unsigned long take_dr6(void)
{
	unsigned long found;

	errno = 0;
	found = (unsigned long)ptrace(PTRACE_PEEKUSER, child, offsetof(struct user, u_debugreg[6]), 0);
	if (errno)
		fail("PTRACE_PEEKUSER");
	poke(6, 0);
	return found;
}

static struct user_regs_struct registers(void)
{
	struct user_regs_struct found;

	if (ptrace(PTRACE_GETREGS, child, 0, &found))
		fail("PTRACE_GETREGS");
	return found;
}

/* Lets the child go on; the signal that stops it, or 0 at its end. */
static int go_on(int request)
{
	int status;

	if (ptrace(request, child, 0, 0))
		fail("ptrace");
	if (waitpid(child, &status, 0) != child)
		fail("waitpid");
	if (WIFSTOPPED(status))
		return WSTOPSIG(status);
	if (!WIFEXITED(status) || WEXITSTATUS(status)) {
		printf("the program ended with status 0x%x\n", (unsigned)status);
		exit(1);
	}
	return 0;
}

/* Forks a child that stops before it runs `body`. */
static void start(void (*body)(unsigned long), unsigned long rounds)
{
	int status;

	fflush(stdout);
	child = fork();
	if (child < 0)
		fail("fork");
	if (child == 0) {
		if (ptrace(PTRACE_TRACEME, 0, 0, 0))
			fail("PTRACE_TRACEME");
		raise(SIGSTOP);
		body(rounds);
		fflush(stdout);
		_exit(0);
	}
	if (waitpid(child, &status, 0) != child || !WIFSTOPPED(status))
		fail("the program did not start");
}

static void set(int slot, const volatile void *address, unsigned long kind)
{
	static unsigned long control;

	if (slot == 0)
		control = 0;
	control |= 1UL << (2 * slot) | kind << (16 + 4 * slot);
	poke(slot, (unsigned long)address);
	poke(7, control);
}

/* Runs the child to its end and prints the hits of each slot. */
static void count_hits(const char *what, int slots)
{
	unsigned long hits[SLOTS] = {0}, strange = 0, dr6;
	int slot, signal;

	while ((signal = go_on(PTRACE_CONT))) {
		dr6 = take_dr6();
		for (slot = 0; slot < SLOTS; slot++)
			hits[slot] += dr6 >> slot & 1;
		strange += signal != SIGTRAP || !(dr6 & 0xf);
	}
	printf("%s:", what);
	for (slot = 0; slot < slots; slot++)
		printf(" %lu", hits[slot]);
	printf(strange ? ", %lu of no breakpoint\n" : "\n", strange);
}

/* --- what it debugs ----------------------------------------------------------- */

static void target(unsigned long rounds)
{
	while (rounds--)
		round_of_target(rounds);
}

static void late_target(unsigned long rounds)
{
	struct timespec start, now;

	clock_gettime(CLOCK_MONOTONIC, &start);
	do
		clock_gettime(CLOCK_MONOTONIC, &now);
	while ((now.tv_sec - start.tv_sec) * 1000000000L + now.tv_nsec - start.tv_nsec < 50000000L);
	target(rounds);
}

static void step_target(unsigned long rounds)
{
	while (rounds--)
		plain();
}

static void debug(unsigned long rounds)
{
	unsigned long steps = 0, wrong = 0, expected;

	start(target, rounds);
	set(0, (void *)called, EXECUTE);
	count_hits("hardware breakpoint", 1);

	start(target, rounds);
	set(0, &stored[0], WRITE);
	count_hits("write watchpoint", 1);

	start(target, rounds);
	set(0, &stored[0], ACCESS);
	count_hits("access watchpoint", 1);

	start(target, rounds);
	set(0, (void *)called, EXECUTE);
	set(1, &stored[0], WRITE);
	set(2, &stored[1], ACCESS);
	set(3, (void *)round_of_target, EXECUTE);
	count_hits("four slots", SLOTS);

	/* From a breakpoint through a straight line, one instruction at a time; the last
	 * one has another breakpoint. */
	start(step_target, rounds);
	set(0, (void *)plain, EXECUTE);
	set(1, plain_end, EXECUTE);
	while (go_on(PTRACE_CONT)) {
		take_dr6();
		expected = registers().rip;
		wrong += expected != (unsigned long)plain;
		while (expected < (unsigned long)plain_end) {
			if (go_on(PTRACE_SINGLESTEP) != SIGTRAP)
				fail("single step");
			steps++;
			expected++;
			wrong += !(take_dr6() & SINGLE_STEP) || registers().rip != expected;
		}
		if (go_on(PTRACE_CONT) != SIGTRAP)
			fail("the breakpoint behind the steps");
		wrong += !(take_dr6() & 2) || registers().rip != expected;
	}
	printf("single step: %lu, wrong %lu\n", steps, wrong);
}

/* --- RDPMC -------------------------------------------------------------------- */

/* Counts its own cycles; the counter's index for RDPMC. Exits if there is none. */
static uint32_t counter(void)
{
	struct perf_event_attr attr = {
		.type = PERF_TYPE_HARDWARE,
		.size = sizeof(attr),
		.config = PERF_COUNT_HW_CPU_CYCLES,
	};
	volatile struct perf_event_mmap_page *page;
	int event = (int)syscall(SYS_perf_event_open, &attr, 0, -1, -1, 0);

	if (event < 0) {
		printf("no counter\n");
		fflush(stdout);
		_exit(0);
	}
	page = mmap(NULL, (size_t)sysconf(_SC_PAGESIZE), PROT_READ, MAP_SHARED, event, 0);
	if (page == MAP_FAILED)
		fail("mmap");
	if (!page->cap_user_rdpmc || page->index == 0)
		fail("a counter that programs cannot read");
	return page->index - 1;
}

static void count_and_read(unsigned long rounds)
{
	uint32_t index = counter();

	while (rounds--)
		line(index);
}

/* A breakpoint on the RDPMC, one behind it, and single step over both. */
static void step_over_rdpmc(unsigned long rounds)
{
	unsigned long over = 0, behind = 0, wrong = 0, counted = 0;
	struct user_regs_struct regs;

	start(count_and_read, rounds);
	set(0, rdpmc, EXECUTE);
	set(1, last, EXECUTE);
	while (go_on(PTRACE_CONT)) {
		wrong += !(take_dr6() & 1) || registers().rip != (unsigned long)rdpmc;
		wrong += go_on(PTRACE_SINGLESTEP) != SIGTRAP;
		wrong += !(take_dr6() & SINGLE_STEP);
		regs = registers();
		over += regs.rip == (unsigned long)after_rdpmc;
		counted += (regs.rax | regs.rdx << 32) != 0;
		wrong += go_on(PTRACE_SINGLESTEP) != SIGTRAP;
		wrong += !(take_dr6() & SINGLE_STEP) || registers().rip != regs.rip + 1;
		wrong += go_on(PTRACE_CONT) != SIGTRAP;
		behind += take_dr6() & 2 && registers().rip == (unsigned long)last;
	}
	printf("single step over RDPMC: %lu, with a count %lu, breakpoint behind it %lu, wrong %lu\n",
	       over, counted, behind, wrong);
	/* The debugger does not look in between. */
	start(count_and_read, rounds);
	set(0, rdpmc, EXECUTE);
	set(1, after_rdpmc + 1, EXECUTE);
	count_hits("breakpoints on RDPMC and behind it", 2);
}

static void print_address(const char *name)
{
	static const struct {
		const char *name;
		const volatile void *address;
	} symbols[] = {{"called", (void *)called}, {"stored", stored}, {"rdpmc", rdpmc}};
	size_t at;

	for (at = 0; at < sizeof(symbols) / sizeof(*symbols); at++)
		if (strcmp(symbols[at].name, name) == 0)
			printf("%p\n", (void *)symbols[at].address);
}

int main(int argc, char **argv)
{
	unsigned long rounds = argc == 3 ? strtoul(argv[2], NULL, 10) : 0;

	if (argc == 3 && strcmp(argv[1], "where") == 0)
		print_address(argv[2]);
	else if (rounds && strcmp(argv[1], "run") == 0)
		target(rounds);
	else if (rounds && strcmp(argv[1], "late") == 0)
		late_target(rounds);
	else if (rounds && strcmp(argv[1], "count") == 0)
		count_and_read(rounds);
	else if (rounds && strcmp(argv[1], "debug") == 0)
		debug(rounds);
	else if (rounds && strcmp(argv[1], "rdpmc") == 0)
		step_over_rdpmc(rounds);
	else {
		fprintf(stderr,
			"usage: breakpoints where NAME | run N | late N | count N | debug N | rdpmc N\n");
		return 2;
	}
	return 0;
}
