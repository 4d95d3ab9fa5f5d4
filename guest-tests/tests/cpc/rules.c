/* What cpc_bind_event(3CPC) and the pages beside it promise: `cpc_rules CHECK`. */
#include "cpc.h"

#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

static int says(const char *word)
{
	return strstr(cpc_last_error(), word) != NULL;
}

/* Calls in their order, and out of it. */
static void states(void)
{
	cpc_event_t event = chosen(), sample, later;

	CHECK(cpc_access() == 0);
	CHECK(cpc_take_sample(&sample) == -1 && errno == EINVAL);
	CHECK(cpc_count_usr_events(1) == -1 && errno == EINVAL);
	CHECK(cpc_bind_event(&event, 4) == -1 && errno == EINVAL);
	CHECK(cpc_last_subcode() == CPC_REQ_INVALID_FLAGS && says("0x4"));
	CHECK(cpc_bind_event(&event, 0) == 0);
	CHECK(cpc_last_subcode() == CPC_NO_SUBCODE && says(""));
	compute(3);
	CHECK(cpc_take_sample(&sample) == 0 && sample.ce_pic[0] > 0);
	CHECK(memcmp(sample.ce_pes, event.ce_pes, sizeof(event.ce_pes)) == 0);
	compute(3);
	CHECK(cpc_take_sample(&later) == 0);
	CHECK(later.ce_pic[0] > sample.ce_pic[0] && later.ce_hrt > sample.ce_hrt);
	CHECK(later.ce_tsc > sample.ce_tsc);
	/* A bind unbinds what was bound: counters are what it says. */
	event.ce_pic[0] = UINT64_C(1) << 60;
	CHECK(cpc_bind_event(&event, 0) == 0);
	CHECK(cpc_take_sample(&sample) == 0 && sample.ce_pic[0] >= UINT64_C(1) << 60);
	CHECK(cpc_rele() == 0);
	CHECK(cpc_take_sample(&sample) == -1 && errno == EINVAL);
	CHECK(cpc_bind_event(&event, 0) == 0);
	CHECK(cpc_bind_event(NULL, 0) == 0);
	CHECK(cpc_take_sample(&sample) == -1 && errno == EINVAL);
	event.ce_cpuver += 1000;
	CHECK(cpc_bind_event(&event, 0) == -1 && errno == EINVAL);
	CHECK(cpc_last_subcode() == CPC_INVALID_EVENT);
}

/* Rings are switched on and off, and counts stay. */
static void rings(void)
{
	cpc_event_t event = chosen(), off, still, on;

	CHECK(cpc_bind_event(&event, 0) == 0);
	compute(3);
	CHECK(cpc_count_usr_events(0) == 0 && cpc_count_sys_events(0) == 0);
	CHECK(cpc_take_sample(&off) == 0 && off.ce_pic[0] > 0);
	compute(3);
	CHECK(cpc_take_sample(&still) == 0 && still.ce_pic[0] == off.ce_pic[0]);
	if (getenv("UMPIRE_VCPU"))
		CHECK(cpc_count_sys_events(1) == 0);
	else
		CHECK(cpc_count_usr_events(1) == 0);
	compute(3);
	CHECK(cpc_take_sample(&on) == 0 && on.ce_pic[0] > still.ce_pic[0]);
	CHECK(cpc_rele() == 0);
}

static char message[512];

static void keep(const char *function, const char *format, va_list arguments)
{
	int length = snprintf(message, sizeof(message), "%s: ", function);

	vsnprintf(message + length, sizeof(message) - length, format, arguments);
}

static void count_names(void *arg, int regno, const char *name, uint8_t bits)
{
	(void)bits;
	CHECK(regno == 1 && strlen(name) > 2);
	++*(int *)arg;
}

/* What is known of the processor, and what is reported. */
static void words(void)
{
	cpc_event_t event, sum, diff;
	int cpuver = cpc_getcpuver(), names = 0;
	char *text;

	CHECK(cpuver > 0 && cpc_version(CPC_VER_NONE) == CPC_VER_CURRENT);
	CHECK(cpc_version(CPC_VER_CURRENT + 1) == CPC_VER_NONE);
	CHECK(cpc_getnpic(cpuver) >= 2 && cpc_getnpic(cpuver) <= CPC_MAX_PIC);
	CHECK(cpc_getnpic(-1) == 0 && cpc_getcciname(-1) == NULL);
	CHECK(strlen(cpc_getcciname(cpuver)) > 0 && strlen(cpc_getcpuref(cpuver)) > 0);
	if (getenv("CPC_TEST_PICS"))
		CHECK(cpc_getnpic(cpuver) == (uint_t)atoi(getenv("CPC_TEST_PICS")));
	CHECK(strstr(cpc_getusage(cpuver), "pic1") != NULL);
	cpc_walk_names(cpuver, 1, &names, count_names);
	CHECK(names > 3);
	cpc_walk_names(cpuver, CPC_MAX_PIC, &names, count_names);

	cpc_seterrfn(keep);
	CHECK(cpc_strtoevent(cpuver, "pic0=EC_ref,pic1=EC_hit", &event) != 0);
	CHECK(strncmp(message, "strtoevent: 'pic0=EC_ref'", 25) == 0);
	CHECK(message[strlen(message) - 1] == '\n');
	CHECK(cpc_last_subcode() == CPC_INVALID_EVENT);
	CHECK(cpc_strtoevent(-1, "pic0=cycles", &event) != 0);
	CHECK(cpc_strtoevent(cpuver, "pic9=cycles", &event) != 0);
	CHECK(cpc_last_subcode() == CPC_INVALID_PICNUM);
	cpc_seterrfn(NULL);

	CHECK(cpc_strtoevent(cpuver, "cycles,instructions,sys1", &event) == 0);
	text = cpc_eventtostr(&event);
	CHECK(strcmp(text, "pic0=cycles,pic1=instructions,sys1") == 0);
	free(text);
	CHECK(cpc_eventtostr(NULL) == NULL && errno == EINVAL);

	sum = event;
	sum.ce_pic[0] = 7, sum.ce_hrt = 5, sum.ce_tsc = 1;
	event.ce_pic[0] = 10, event.ce_hrt = 9, event.ce_tsc = 4;
	cpc_event_diff(&diff, &event, &sum);
	CHECK(diff.ce_pic[0] == 3 && diff.ce_hrt == 9 && diff.ce_tsc == 3);
	cpc_event_accum(&sum, &diff);
	CHECK(sum.ce_pic[0] == 10 && sum.ce_hrt == 9 && sum.ce_tsc == 4);
}

/* Somebody counts system-wide: what the page says a robust program does. It says how far it
 * is, and waits for its input to end. */
static void system_wide(void)
{
	cpc_event_t event = chosen(), sample;
	int tries;

	CHECK(cpc_bind_event(&event, 0) == 0 && cpc_take_sample(&sample) == 0);
	puts("bound");
	fflush(stdout);
	while (getchar() != EOF)
		;
	for (tries = 0; cpc_take_sample(&sample) == 0 && tries < 2000; tries++)
		compute(1);
	CHECK(cpc_take_sample(&sample) == -1 && errno == EAGAIN);
	CHECK(cpc_last_subcode() == CPC_RESOURCE_UNAVAIL);
	CHECK(cpc_count_usr_events(1) == -1 && errno == EAGAIN);
	CHECK(cpc_rele() == 0);
	CHECK(cpc_bind_event(&event, 0) == -1 && errno == EAGAIN);
	puts("invalid");
	fflush(stdout);
	for (tries = 0; cpc_bind_event(&event, 0) == -1 && tries < 2000; tries++) {
		CHECK(errno == EAGAIN);
		CHECK(cpc_rele() == 0);
		usleep(5000);
	}
	compute(3);
	CHECK(cpc_take_sample(&sample) == 0 && sample.ce_pic[0] > 0);
	puts("again");
}

/* The VM ends, and another one is there later: of the same PMU, or not. */
static void restarted(int same)
{
	cpc_event_t event = chosen(), sample;
	int tries;

	CHECK(cpc_bind_event(&event, 0) == 0);
	puts("bound");
	fflush(stdout);
	while (cpc_take_sample(&sample) == 0)
		usleep(5000);
	CHECK(errno == EAGAIN && says("ended"));
	CHECK(cpc_take_sample(&sample) == -1 && errno == EAGAIN);
	CHECK(cpc_rele() == 0);
	CHECK(cpc_bind_event(&event, 0) == -1 && errno == ESRCH);
	puts("lost");
	fflush(stdout);
	for (tries = 0; cpc_bind_event(&event, 0) == -1; tries++) {
		CHECK(errno == ESRCH && tries < 4000);
		if (!same && says("another PMU"))
			return;
		usleep(5000);
	}
	CHECK(same);
	compute(3);
	CHECK(cpc_take_sample(&sample) == 0 && sample.ce_pic[0] > 0);
}

/* The VM is started again; the program hears of it by one vCPU, and the other one has nothing
 * bound there. */
static void others_restarted(void)
{
	cpc_event_t event = chosen(), sample;
	int lwp, tries;

	for (lwp = 0; lwp < 2; lwp++) {
		CHECK(cpc_lwp_switch(lwp) == 0 && cpc_bind_event(&event, 0) == 0);
		CHECK(cpc_take_sample(&sample) == 0);
	}
	puts("bound");
	fflush(stdout);
	while (cpc_take_sample(&sample) == 0)
		usleep(5000);
	CHECK(errno == EAGAIN && says("ended"));
	puts("lost");
	fflush(stdout);
	for (tries = 0; cpc_bind_event(&event, 0) == -1; tries++) {
		CHECK(errno == ESRCH && tries < 4000);
		usleep(5000);
	}
	CHECK(cpc_take_sample(&sample) == 0);
	CHECK(cpc_lwp_switch(0) == 0);
	for (tries = 0; tries < 3; tries++) {
		errno = 0;
		CHECK(cpc_take_sample(&sample) == -1 && errno == EAGAIN && says("started again"));
		CHECK(cpc_count_sys_events(1) == -1 && errno == EAGAIN);
		/* A message has both: asking for the LWP leaves errno and the reason. */
		CHECK(_lwp_self() == 0 && errno == EAGAIN && says("started again"));
	}
	CHECK(cpc_bind_event(&event, 0) == 0);
	compute(3);
	CHECK(cpc_take_sample(&sample) == 0 && sample.ce_pic[0] > 0);
	CHECK(cpc_rele() == 0);
	CHECK(cpc_take_sample(&sample) == -1 && errno == EINVAL);
}

static volatile sig_atomic_t fresh, overflows, about;
static cpc_event_t first;

static void on_signal(int sig, siginfo_t *info, void *context)
{
	cpc_event_t sample;

	(void)sig;
	(void)context;
	if (info->si_code != EMT_CPCOVF || cpc_take_sample(&sample) != 0)
		_exit(3);
	about = cpc_lwp_self();
	if (sample.ce_pic[0] == UINT64_MAX && sample.ce_pic[1] == UINT64_MAX) {
		fresh++;
		sample.ce_pic[0] = 0;
		sample.ce_pic[1] = 0;
		if (cpc_bind_event(&sample, 0) != 0)
			_exit(4);
	} else {
		first = sample;
		overflows++;
	}
}

static void listen(void)
{
	struct sigaction action = { .sa_sigaction = on_signal, .sa_flags = SA_SIGINFO };

	CHECK(sigaction(SIGEMT, &action, NULL) == 0);
}

static void *child(void *expected)
{
	cpc_event_t sample;

	if (expected == NULL) {
		CHECK(cpc_take_sample(&sample) == -1 && errno == EINVAL);
		return NULL;
	}
	CHECK(cpc_take_sample(&sample) == 0);
	/* The parent has counted for longer. */
	CHECK(sample.ce_pic[0] < *(uint64_t *)expected);
	compute(3);
	CHECK(cpc_take_sample(&sample) == 0 && sample.ce_pic[0] > 0);
	pthread_exit(NULL);
}

/* Threads inherit; with signals they are signalled first. */
static void threads(void)
{
	cpc_event_t event = chosen(), sample;
	pthread_t thread;

	listen();
	CHECK(cpc_bind_event(&event, 0) == 0);
	CHECK(pthread_create(&thread, NULL, child, NULL) == 0 && pthread_join(thread, NULL) == 0);
	CHECK(cpc_bind_event(&event, CPC_BIND_LWP_INHERIT) == 0);
	compute(30);
	CHECK(cpc_take_sample(&sample) == 0);
	CHECK(pthread_create(&thread, NULL, child, &sample.ce_pic[0]) == 0);
	CHECK(pthread_join(thread, NULL) == 0 && fresh == 0);
	event.ce_pic[0] = 0;
	CHECK(cpc_bind_event(&event, CPC_BIND_LWP_INHERIT | CPC_BIND_EMT_OVF) == 0);
	CHECK(pthread_create(&thread, NULL, child, &sample.ce_pic[0]) == 0);
	CHECK(pthread_join(thread, NULL) == 0);
	CHECK(fresh == 1 && overflows == 0);
	CHECK(about != cpc_lwp_self());
	CHECK(cpc_rele() == 0);
}

/* vCPUs that start later inherit. Argument: 0, or 1 with signals. It says when it has bound,
 * and waits for its input to end: then the other vCPU runs. */
static void later(const char *signals)
{
	cpc_event_t event = chosen(), sample;
	int flags = CPC_BIND_LWP_INHERIT, tries;

	listen();
	if (atoi(signals))
		flags |= CPC_BIND_EMT_OVF;
	CHECK(cpc_bind_event(&event, flags) == 0);
	puts("bound");
	fflush(stdout);
	while (getchar() != EOF)
		;
	for (tries = 0; atoi(signals) && !fresh && tries < 2000; tries++)
		compute(1);
	if (atoi(signals))
		CHECK(fresh == 1 && about == 1 && overflows == 0);
	CHECK(cpc_lwp_self() == 0 && cpc_lwp_switch(1) == 0 && cpc_lwp_self() == 1);
	CHECK(cpc_take_sample(&sample) == 0);
	for (tries = 0; sample.ce_pic[0] == 0 && tries < 2000; tries++) {
		compute(1);
		CHECK(cpc_take_sample(&sample) == 0);
	}
	CHECK(sample.ce_pic[0] > 0 && sample.ce_pic[0] < UINT64_MAX);
	CHECK(cpc_lwp_switch(99) == -1 && errno == ESRCH);
}

/* Which errno and sub-code a bind has: `refused EVENTS ERRNO SUBCODE`. */
static void refused(char **words)
{
	cpc_event_t event;

	CHECK(cpc_strtoevent(cpc_getcpuver(), words[0], &event) == 0);
	CHECK(cpc_bind_event(&event, 0) == -1);
	printf("errno %d, sub-code %d: %s\n", errno, cpc_last_subcode(), cpc_last_error());
	CHECK(errno == atoi(words[1]) && cpc_last_subcode() == atoi(words[2]));
}

/* In a Linux, overflows of system events are not signalled. A bind says so, and so does a change
 * of what is bound, which counts on. */
static void system_overflows(void)
{
	cpc_event_t event, sample;

	listen();
	CHECK(cpc_strtoevent(cpc_getcpuver(), "pic0=cycles,pic1=instructions,sys1", &event) == 0);
	CHECK(cpc_bind_event(&event, CPC_BIND_EMT_OVF) == -1 && errno == ENOTSUP);
	CHECK(cpc_last_subcode() == CPC_CONFLICTING_REQS);
	CHECK(cpc_take_sample(&sample) == -1 && errno == EINVAL);
	CHECK(cpc_bind_event(&event, 0) == 0);
	event = chosen();
	CHECK(cpc_bind_event(&event, CPC_BIND_EMT_OVF) == 0);
	CHECK(cpc_count_sys_events(1) == -1 && errno == EINVAL);
	CHECK(cpc_last_subcode() == CPC_CONFLICTING_REQS);
	CHECK(cpc_take_sample(&event) == 0);
	compute(3);
	CHECK(cpc_take_sample(&sample) == 0 && sample.ce_pic[0] > event.ce_pic[0]);
	CHECK(cpc_count_sys_events(0) == 0);
	CHECK(overflows == 0 && cpc_rele() == 0);
}

/* Where /proc/sys/kernel/perf_event_paranoid is 2, a user without rights counts user events. */
static void unprivileged(void)
{
	cpc_event_t event = chosen(), system;

	CHECK(cpc_strtoevent(event.ce_cpuver, "pic0=cycles,sys", &system) == 0);
	CHECK(setgroups(0, NULL) == 0 && setresgid(65534, 65534, 65534) == 0);
	CHECK(setresuid(65534, 65534, 65534) == 0);
	CHECK(cpc_bind_event(&system, 0) == -1 && errno == EACCES);
	CHECK(cpc_last_subcode() == CPC_ATTR_REQUIRES_PRIVILEGE && says("perf_event_paranoid"));
	CHECK(cpc_bind_event(&event, 0) == 0);
}

/* What a bind makes of an error of the kernel's: `kernel_says ERRNO ERRNO SUBCODE`. */
static void kernel_says(char **numbers)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_perf_event_open, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | atoi(numbers[0])),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof(filter) / sizeof(*filter), filter };
	cpc_event_t event = chosen();

	CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
	CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
	CHECK(cpc_bind_event(&event, 0) == -1 && errno == atoi(numbers[1]));
	CHECK(cpc_last_subcode() == atoi(numbers[2]));
}

/* There is nobody to count: `nobody ERRNO`. */
static void nobody(const char *number)
{
	cpc_event_t event;

	memset(&event, 0, sizeof(event));
	CHECK(cpc_access() == -1 && errno == atoi(number) && says(""));
	CHECK(cpc_bind_event(&event, 0) == -1);
}

int main(int argc, char **argv)
{
	const char *check = argc > 1 ? argv[1] : "";

	if (!strcmp(check, "states"))
		states();
	else if (!strcmp(check, "rings"))
		rings();
	else if (!strcmp(check, "words"))
		words();
	else if (!strcmp(check, "system_wide"))
		system_wide();
	else if (!strcmp(check, "restarted") && argc == 3)
		restarted(atoi(argv[2]));
	else if (!strcmp(check, "others_restarted"))
		others_restarted();
	else if (!strcmp(check, "threads"))
		threads();
	else if (!strcmp(check, "later") && argc == 3)
		later(argv[2]);
	else if (!strcmp(check, "refused") && argc == 5)
		refused(argv + 2);
	else if (!strcmp(check, "system_overflows"))
		system_overflows();
	else if (!strcmp(check, "unprivileged"))
		unprivileged();
	else if (!strcmp(check, "kernel_says") && argc == 5)
		kernel_says(argv + 2);
	else if (!strcmp(check, "nobody") && argc == 3)
		nobody(argv[2]);
	else
		return fprintf(stderr, "no such check: %s\n", check), 2;
	printf("%s: as the page says\n", check);
	return 0;
}
