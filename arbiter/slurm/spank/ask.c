/* SPDX-License-Identifier: Apache-2.0 OR MIT */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <umpire_lease.h>

#include "ask.h"

/* Of the bound, what is left for starting, loading and answering: others are told meanwhile. */
#define REST_MS 250
/* Who waits in the queue says so as often, */
#define BEAT_MS 250
/* and has this many calls besides, with the loading. */
#define MOST_CALLS 4

/* The functions of the library that are used. */
struct library {
	umpire_lease *(*acquire)(const char *, const struct umpire_lease_terms *);
	int (*next)(umpire_lease *, int, struct umpire_lease_event *);
	int (*get)(const umpire_lease *, struct umpire_lease_state *);
	int (*renew)(umpire_lease *);
	void (*free)(umpire_lease *);
	const char *(*error)(void);
};

static void say(struct answer *answer, const char *format, ...)
{
	va_list words;

	va_start(words, format);
	vsnprintf(answer->text, sizeof answer->text, format, words);
	va_end(words);
	/* Whatever others have called themselves. */
	one_line(answer->text);
}

long long now_us(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000LL + now.tv_nsec / 1000;
}

static long long now_ms(void)
{
	return now_us() / 1000;
}

static int load(const char *path, struct library *library, struct answer *answer)
{
	/* POSIX has a function behind such a pointer. */
	struct {
		const char *name;
		void *to;
	} functions[] = {
		{ "umpire_lease_acquire", &library->acquire },
		{ "umpire_lease_next", &library->next },
		{ "umpire_lease_get", &library->get },
		{ "umpire_lease_renew", &library->renew },
		{ "umpire_lease_free", &library->free },
		{ "umpire_lease_error", &library->error },
	};
	void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	size_t at;

	if (!handle) {
		say(answer, "Umpire's library cannot be used: %s; library=PATH in plugstack.conf names it",
		    dlerror());
		return -1;
	}
	for (at = 0; at < sizeof functions / sizeof *functions; at++) {
		void *found = dlsym(handle, functions[at].name);

		if (!found) {
			say(answer, "%s is none of Umpire's libraries: it has no %s", path, functions[at].name);
			return -1;
		}
		memcpy(functions[at].to, &found, sizeof found);
	}
	return 0;
}

/* A call has come back: the next one has its own time. */
static void beat(int to)
{
	static const struct answer further;

	if (write(to, &further, sizeof further) != sizeof further)
		_exit(1);
}

/* Waits until the lease holds what it asked for. 0: it does not; what is wrong is said, if anything is. */
static int follow(const struct library *library, umpire_lease *lease, long long until, int to,
		  struct answer *answer)
{
	long long asks = now_ms() + BOUND_MS;
	struct umpire_lease_state state = { .size = sizeof state };
	struct umpire_lease_event event = { .size = sizeof event };

	for (;;) {
		long long left = until - now_ms();
		int happened;

		if (library->get(lease, &state)) {
			say(answer, "%s", library->error());
			return 0;
		}
		if (state.wants && state.holds >= state.wants) {
			answer->is_granted = 1;
			answer->lease = state.id;
			say(answer, "lease %llu: %u counters on each CPU", (unsigned long long)state.id,
			    state.holds);
			return 1;
		}
		if (left <= 0)
			return 0;
		happened = library->next(lease, left < BEAT_MS ? (int)left : BEAT_MS, &event);
		if (happened < 0) {
			say(answer, "%s", library->error());
			return 0;
		}
		if (happened && event.what == UMPIRE_LEASE_ENDED)
			return 0;
		beat(to);
		if (now_ms() < asks)
			continue;
		/* A queue is silent: whether the arbiter still answers is seen by a call. */
		library->renew(lease);
		beat(to);
		asks = now_ms() + BOUND_MS;
	}
}

static void take(const struct question *question, int to, struct answer *answer)
{
	const struct wish *wish = question->wish;
	struct umpire_lease_terms terms = { .size = sizeof terms };
	const char *events[MOST_EVENTS];
	struct library library;
	umpire_lease *lease;
	long long most = BOUND_MS - REST_MS + question->wait_s * 1000LL;
	unsigned at;

	for (at = 0; at < wish->event_count; at++)
		events[at] = wish->events[at];
	if (load(question->library, &library, answer))
		return;
	beat(to);
	terms.programmable = wish->programmable;
	terms.fixed = wish->fixed;
	terms.events = events;
	terms.event_count = wish->event_count;
	terms.cpus = question->cpus;
	terms.cgroup = question->group;
	terms.label = question->label;
	terms.for_uid = question->uid;
	terms.for_gid = question->gid;
	/* Who is preemptible leaves after a notice. */
	terms.waits_ms = most;
	lease = library.acquire(question->socket, &terms);
	beat(to);
	if (lease && !follow(&library, lease, now_ms() + most, to, answer) && !answer->text[0]) {
		/* Who does not wait is told who has the counters; or has them, after all. */
		library.free(lease);
		terms.waits_ms = 0;
		beat(to);
		lease = library.acquire(question->socket, &terms);
		if (lease && !follow(&library, lease, now_ms(), to, answer) && !answer->text[0])
			say(answer, "others have the counters; see umpire who");
	}
	if (!lease)
		say(answer, "%s", library.error());
	/* The lease is the group's, and this process ends. */
}

/* Reads all of the answer until then. */
static int receive(int from, struct answer *answer, long long until)
{
	size_t have = 0;

	while (have < sizeof *answer) {
		struct pollfd ready = { .fd = from, .events = POLLIN };
		long long left = until - now_ms();
		ssize_t count;

		if (left <= 0)
			return -1;
		if (poll(&ready, 1, (int)left) <= 0)
			continue;
		count = read(from, (char *)answer + have, sizeof *answer - have);
		if (count < 0 && errno == EINTR)
			continue;
		if (count <= 0)
			return 0;
		have += (size_t)count;
	}
	return 1;
}

/* The status of a child that ends by then; else it is killed. -1: it did not end. */
static int reap(pid_t child, long long until)
{
	/* Most end at once, and a step waits for this one: it is looked at often at first. */
	struct timespec moment = { 0, 50000 };
	int status = 0;

	while (waitpid(child, &status, WNOHANG) == 0) {
		if (now_ms() >= until) {
			kill(child, SIGKILL);
			/* What the kernel does not let go is left: nobody waits for it. */
			moment.tv_nsec = 2000000;
			nanosleep(&moment, NULL);
			waitpid(child, NULL, WNOHANG);
			return -1;
		}
		nanosleep(&moment, NULL);
		if (moment.tv_nsec < 2000000)
			moment.tv_nsec *= 2;
	}
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* A child that ends with its parent, and hears signals as usual. */
static pid_t begin(void)
{
	pid_t parent = getpid();
	pid_t child = fork();
	sigset_t none;

	if (child)
		return child;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(1);
	signal(SIGPIPE, SIG_IGN);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	return 0;
}

/* All descriptors but the first are closed. -1: which there are cannot be told. */
static int close_others(void)
{
	/* close_range(2) is not of every kernel on which Slurm runs. */
	DIR *folder = opendir("/proc/self/fd");
	struct dirent *entry;

	if (!folder)
		return -1;
	while ((entry = readdir(folder))) {
		int file = atoi(entry->d_name);

		/* "." and ".." are 0, too. */
		if (file > 0 && file != dirfd(folder))
			close(file);
	}
	return closedir(folder);
}

/*
 * Whoever enters a control group waits for the kernel first (an RCU grace period, ten milliseconds),
 * unless that has just been waited for, whoever did so. A process that enters the group in which it
 * is moves nowhere, but the wait is over for the next: so that passes while the arbiter is asked,
 * and not when tasks begin. Like each who enters a group it holds the host's lock on control groups
 * meanwhile. Its parent ends at once, so that whoever has orphans here waits for it, and no step.
 */
static void wait_for_kernel(const char *own_procs)
{
	pid_t child;
	int file;

	if (!own_procs || !*own_procs)
		return;
	child = begin();
	if (child) {
		if (child > 0)
			reap(child, now_ms() + 100);
		return;
	}
	/* What goes on does not end with slurmstepd, and has nothing of it that others wait for. */
	if (fork())
		_exit(0);
	file = open(own_procs, O_WRONLY | O_CLOEXEC);
	if (file < 0 || dup2(file, 0) < 0 || close_others())
		_exit(1);
	_exit(write(0, "0", 1) != 1);
}

void ask(const struct question *question, struct answer *answer)
{
	long long most = now_ms() + MOST_CALLS * BOUND_MS + question->wait_s * 1000LL;
	int ends[2];
	pid_t child;
	int received;

	memset(answer, 0, sizeof *answer);
	if (pipe2(ends, O_CLOEXEC)) {
		say(answer, "no pipe: %s", strerror(errno));
		return;
	}
	child = begin();
	if (child == 0) {
		close(ends[0]);
		take(question, ends[1], answer);
		answer->is_last = 1;
		if (write(ends[1], answer, sizeof *answer) != sizeof *answer)
			_exit(1);
		_exit(0);
	}
	close(ends[1]);
	if (child < 0) {
		say(answer, "no process can be started: %s", strerror(errno));
	} else {
		wait_for_kernel(question->own_procs);
		do {
			long long until = now_ms() + BOUND_MS;

			received = receive(ends[0], answer, until < most ? until : most);
		} while (received > 0 && !answer->is_last);
		/* Who has answered ends, who has not is killed. */
		reap(child, received > 0 ? now_ms() + 100 : 0);
		if (received <= 0) {
			memset(answer, 0, sizeof *answer);
			if (received < 0)
				say(answer, "the arbiter at %s has not answered within %d s",
				    question->socket, BOUND_MS / 1000);
			else
				say(answer, "Umpire's library %s has ended the process that asked",
				    question->library);
		}
	}
	close(ends[0]);
	answer->text[sizeof answer->text - 1] = 0;
	if (!answer->is_granted && !answer->text[0])
		say(answer, "refused without a reason by the arbiter at %s", question->socket);
}

int run(const char *const *words, int bound_ms)
{
	pid_t child = begin();

	if (child == 0) {
		int nowhere = open("/dev/null", O_RDWR);

		dup2(nowhere, 0);
		dup2(nowhere, 1);
		dup2(nowhere, 2);
		execv(words[0], (char *const *)words);
		_exit(127);
	}
	return child < 0 ? -1 : reap(child, now_ms() + bound_ms);
}
