/* What a program may do around the calls: signals, threads that end, processes that fork:
 * `cpc_robust CHECK`. */
#include "cpc.h"

#include <dirent.h>
#include <pthread.h>
#include <sys/wait.h>

#define MOST_LWPS 8
/* Events until an overflow. */
#define FEW (UINT64_C(1) << 24)

/* The program's memory: nobody asks for any while a handler runs, for it may have interrupted
 * these functions. */
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *old, size_t size);
static volatile sig_atomic_t handling;

static void *unless_handling(void *(*get)(size_t), size_t size)
{
	if (handling)
		_exit(9);
	return get(size);
}

void *malloc(size_t size)
{
	return unless_handling(__libc_malloc, size);
}

void *calloc(size_t count, size_t size)
{
	if (handling)
		_exit(9);
	return __libc_calloc(count, size);
}

void *realloc(void *old, size_t size)
{
	if (handling)
		_exit(9);
	return __libc_realloc(old, size);
}

static volatile sig_atomic_t heard[MOST_LWPS];
static int flags = CPC_BIND_EMT_OVF;

/* So that the first counter overflows soon. */
static void preset(cpc_event_t *event)
{
	event->ce_pic[0] = -FEW;
	event->ce_pic[1] = 0;
}

/* The LWP that the calls are about is the one that has overflowed. */
static void on_signal(int sig, siginfo_t *info, void *context)
{
	int lwp = cpc_lwp_self();
	cpc_event_t sample;

	(void)sig;
	(void)context;
	handling++;
	if (info->si_code != EMT_CPCOVF || info->si_errno != lwp)
		_exit(3);
	if (cpc_take_sample(&sample) != 0)
		_exit(4);
	/* It has come to its end: it is not a counter on its way there. */
	if (sample.ce_pic[0] > UINT64_MAX / 2)
		_exit(5);
	preset(&sample);
	if (cpc_bind_event(&sample, flags) != 0)
		_exit(6);
	heard[lwp]++;
	handling--;
}

static void listen(void)
{
	struct sigaction action = { .sa_sigaction = on_signal, .sa_flags = SA_SIGINFO };

	CHECK(sigaction(SIGEMT, &action, NULL) == 0);
}

/* Three vCPUs overflow all the time, and the program blocks signals as it makes calls. */
static void several(void)
{
	cpc_event_t event = chosen(), sample;
	int lwp, tries;

	listen();
	preset(&event);
	for (lwp = 2; lwp >= 0; lwp--) {
		CHECK(cpc_lwp_switch(lwp) == 0);
		CHECK(cpc_bind_event(&event, flags) == 0);
	}
	for (tries = 0; heard[0] < 10 || heard[1] < 10 || heard[2] < 10; tries++) {
		CHECK(cpc_take_sample(&sample) == 0 && cpc_lwp_self() == 0);
		CHECK(tries < 20000);
	}
	printf("heard %d %d %d\n", heard[0], heard[1], heard[2]);
}

/* A bind in a handler is as any other one: it takes no memory of the program's. */
static void handler(void)
{
	cpc_event_t event = chosen();
	int tries;

	flags |= CPC_BIND_LWP_INHERIT;
	listen();
	preset(&event);
	CHECK(cpc_bind_event(&event, flags) == 0);
	for (tries = 0; heard[0] < 5 && tries < 2000; tries++)
		compute(1);
	CHECK(heard[0] >= 5);
	CHECK(cpc_rele() == 0);
}

static void block(int but)
{
	sigset_t set;

	sigfillset(&set);
	if (but)
		sigdelset(&set, but);
	CHECK(sigprocmask(SIG_SETMASK, &set, NULL) == 0);
}

/* A program that blocks all signals but SIGEMT hears of overflows. */
static void blocked(void)
{
	cpc_event_t event = chosen();
	int tries;

	block(SIGEMT);
	listen();
	preset(&event);
	CHECK(cpc_bind_event(&event, flags) == 0);
	for (tries = 0; heard[0] < 5 && tries < 2000; tries++)
		compute(1);
	CHECK(heard[0] >= 5);
}

/* One that blocks SIGEMT, too, can wait for it. */
static void waits(void)
{
	const struct timespec patience = { .tv_nsec = 100000000 };
	cpc_event_t event = chosen(), sample;
	siginfo_t info;
	sigset_t set;
	int tries, heard_of;

	block(0);
	sigemptyset(&set);
	sigaddset(&set, SIGEMT);
	preset(&event);
	for (heard_of = 0; heard_of < 5; heard_of++) {
		CHECK(cpc_bind_event(&event, flags) == 0);
		/* The library's own signal may interrupt it. */
		for (tries = 0; sigtimedwait(&set, &info, &patience) < 0; tries++) {
			CHECK((errno == EAGAIN || errno == EINTR) && tries < 200);
			compute(1);
		}
		CHECK(info.si_code == EMT_CPCOVF && info.si_errno == cpc_lwp_self());
		CHECK(cpc_take_sample(&sample) == 0 && sample.ce_pic[0] < UINT64_MAX / 2);
	}
}

static int descriptors(void)
{
	DIR *folder = opendir("/proc/self/fd");
	int count = 0;

	CHECK(folder != NULL);
	while (readdir(folder) != NULL)
		count++;
	closedir(folder);
	return count;
}

static volatile int over;

static void *nothing(void *argument)
{
	return argument;
}

static void *samples(void *argument)
{
	cpc_event_t event = chosen(), sample;

	(void)argument;
	while (!over) {
		CHECK(cpc_bind_event(&event, 0) == 0);
		CHECK(cpc_take_sample(&sample) == 0);
	}
	return NULL;
}

/* Children have nothing of the parent's, and all that they ask for, whatever another thread
 * was in the middle of. */
static void forks(void)
{
	int before = descriptors(), child, status, tries;
	cpc_event_t event = chosen(), sample;
	pthread_t thread, other;

	CHECK(cpc_bind_event(&event, 0) == 0);
	CHECK(pthread_create(&other, NULL, samples, NULL) == 0);
	for (tries = 0; tries < 40; tries++) {
		fflush(stdout);
		child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			/* It must not wait for anybody. */
			alarm(20);
			CHECK(descriptors() == before);
			CHECK(pthread_create(&thread, NULL, nothing, NULL) == 0);
			CHECK(pthread_join(thread, NULL) == 0);
			CHECK(cpc_take_sample(&sample) == -1 && errno == EINVAL);
			CHECK(cpc_getcpuver() == event.ce_cpuver);
			fflush(stdout);
			_exit(0);
		}
		CHECK(waitpid(child, &status, 0) == child);
		CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	}
	over = 1;
	CHECK(pthread_join(other, NULL) == 0);
	compute(3);
	CHECK(cpc_take_sample(&sample) == 0 && sample.ce_pic[0] > 0);
}

static void *until_cancelled(void *argument)
{
	cpc_event_t event = chosen(), sample;

	(void)argument;
	for (;;) {
		cpc_bind_event(&event, 0);
		cpc_take_sample(&sample);
		cpc_rele();
		pthread_testcancel();
	}
	return NULL;
}

/* No call is where a thread ends that is cancelled. */
static void cancelled(void)
{
	pthread_t thread;
	void *result;
	int tries;

	for (tries = 0; tries < 20; tries++) {
		CHECK(pthread_create(&thread, NULL, until_cancelled, NULL) == 0);
		usleep(3000);
		CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, &result) == 0);
		CHECK(result == PTHREAD_CANCELED);
	}
}

int main(int argc, char **argv)
{
	const char *check = argc > 1 ? argv[1] : "";

	if (!strcmp(check, "several"))
		several();
	else if (!strcmp(check, "handler"))
		handler();
	else if (!strcmp(check, "blocked"))
		blocked();
	else if (!strcmp(check, "waits"))
		waits();
	else if (!strcmp(check, "forks"))
		forks();
	else if (!strcmp(check, "cancelled"))
		cancelled();
	else
		return fprintf(stderr, "no such check: %s\n", check), 2;
	printf("%s: as it should be\n", check);
	return 0;
}
