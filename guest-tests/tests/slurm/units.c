/* What of the plugin needs no Slurm, by tables. Its arguments: an empty folder, and library.c, built. */
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ask.h"
#include "group.h"
#include "wish.h"

static int failures;

static void check(int is_well, const char *what, const char *of)
{
	if (!is_well) {
		fprintf(stderr, "%s: %s\n", what, of);
		failures++;
	}
}

static void wishes(void)
{
	static const struct {
		const char *text;
		int is_well;
		unsigned programmable, fixed, events;
	} rows[] = {
		{ "3", 1, 3, 0, 0 },
		{ "64,fixed=32", 1, 64, 32, 0 },
		{ "fixed=1", 1, 0, 1, 0 },
		{ "0,fixed=1", 1, 0, 1, 0 },
		{ "2,fixed=1,events=cycles+l1d.replacement", 1, 2, 1, 2 },
		{ "events=r5300c0", 1, 0, 0, 1 },
		{ "0", 0, 0, 0, 0 },
		{ "", 0, 0, 0, 0 },
		{ "65", 0, 0, 0, 0 },
		{ "-1", 0, 0, 0, 0 },
		{ "3 ", 0, 0, 0, 0 },
		{ "99999999999999999999", 0, 0, 0, 0 },
		{ "3,4", 0, 0, 0, 0 },
		{ "3,,fixed=1", 0, 0, 0, 0 },
		{ "3,fixed=0", 0, 0, 0, 0 },
		{ "3,events=", 0, 0, 0, 0 },
		{ "3,events=+", 0, 0, 0, 0 },
		{ "3\n", 0, 0, 0, 0 },
		{ "3,events=a\033[2J", 0, 0, 0, 0 },
		{ "3,events=\302\233", 0, 0, 0, 0 },
		{ "3,events=a+b+c+d+e+f+g+h+i+j+k+l+m+n+o+p+q", 0, 0, 0, 0 },
		{ "3,events=xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", 0, 0, 0, 0 },
	};
	struct wish wish;
	char why[512];
	size_t at;

	for (at = 0; at < sizeof rows / sizeof *rows; at++) {
		int is_well = !read_wish(rows[at].text, &wish, why, sizeof why);

		check(is_well == rows[at].is_well, "wish", rows[at].text);
		if (is_well)
			check(wish.programmable == rows[at].programmable && wish.fixed == rows[at].fixed &&
				      wish.event_count == rows[at].events,
			      "wish's numbers", rows[at].text);
		else
			check(!strpbrk(why, "\n\033\302"), "wish's error", why);
	}
}

static void patiences(void)
{
	struct patience patience;
	char why[512];

	check(!read_patience("30", &patience, why, sizeof why) && patience.seconds == 30, "patience", "30");
	check(!read_patience("requeue=2", &patience, why, sizeof why) && patience.requeues == 2, "patience",
	      "requeue=2");
	check(!read_patience("45", &patience, why, sizeof why) && patience.seconds == 45, "patience", "45");
	check(read_patience("46", &patience, why, sizeof why) && strstr(why, "UnkillableStepTimeout") &&
		      strstr(why, "46 s are too long: 45 s at most"), "patience", why);
	check(read_patience("x\ny", &patience, why, sizeof why) && !strchr(why, '\n'), "patience", why);
	check(read_patience("requeue=1\n", &patience, why, sizeof why) && !strchr(why, '\n'), "patience", why);
	check(read_patience("requeue=0", &patience, why, sizeof why), "patience", "requeue=0");
	check(read_patience("", &patience, why, sizeof why), "patience", "nothing");
}

static void parts(void)
{
	struct wish whole, part;
	char why[512], text[16];

	read_wish("3,fixed=1", &whole, why, sizeof why);
	read_wish("2,events=cycles", &part, why, sizeof why);
	check(has_all(&whole, &part), "part", "an event is one of three");
	read_wish("3,events=cycles", &part, why, sizeof why);
	check(!has_all(&whole, &part), "part", "an event more than three");
	read_wish("1,fixed=2", &part, why, sizeof why);
	check(!has_all(&whole, &part), "part", "fixed");
	check(is_listed("a,bc,d", "bc") && !is_listed("a,bc,d", "b") && !is_listed("", ""), "listed", "bc");
	check(!with_node("/run/%n.s", "n1", text, sizeof text) && !strcmp(text, "/run/n1.s"), "node", text);
	check(with_node("/run/%n.s", "a-long-name", text, sizeof text), "node", "too long");
}

static void groups_of_slurm(void)
{
	static const char *const rows[][2] = {
		{ "/system.slice/slurmstepd.scope/job_7/step_0/slurm",
		  "/system.slice/slurmstepd.scope/job_7/step_0/user" },
		{ "/system.slice/n1_slurmstepd.scope/job_7/step_batch/slurm",
		  "/system.slice/n1_slurmstepd.scope/job_7/step_batch/user" },
		{ "/system.slice/slurmd.service", NULL },
		{ "/", NULL },
		{ "/slurm", NULL },
		{ "/step_0/slurm", NULL },
		{ "/job_7/other/slurm", NULL },
		{ "/job_7/step_0/slurm/x", NULL },
	};
	char out[256];
	size_t at;

	for (at = 0; at < sizeof rows / sizeof *rows; at++) {
		int found = !group_of_slurm(rows[at][0], out, sizeof out);

		check(found == (rows[at][1] != NULL), "group", rows[at][0]);
		if (found && rows[at][1])
			check(!strcmp(out, rows[at][1]), "group's name", out);
	}
	check(group_of_slurm(rows[0][0], out, 20), "group", "too long");
}

/* Of whoever is in these groups, which have limits. */
static void limits(const char *top)
{
	static const struct {
		const char *own;
		int with_controllers, without;
	} rows[] = {
		{ "/", 0, 0 },
		{ "/system.slice/slurmd.service", 1, 0 },
		{ "/system.slice/slurmstepd.scope/job_7/step_0/other", 1, 1 },
		{ "/elsewhere/job_7/step_0", 1, 1 },
	};
	char path[4096];
	size_t at;
	int has;

	check(has_limits("/system.slice/slurmd.service", top), "limits", "nothing is known");
	snprintf(path, sizeof path, "%s/cgroup.subtree_control", top);
	for (has = 0; has < 2; has++) {
		FILE *file = fopen(path, "w");

		if (!file)
			exit(2);
		fputs(has ? "cpuset memory\n" : "\n", file);
		fclose(file);
		for (at = 0; at < sizeof rows / sizeof *rows; at++)
			check(has_limits(rows[at].own, top) ==
				      (has ? rows[at].with_controllers : rows[at].without),
			      has ? "limits" : "limits without controllers", rows[at].own);
	}
}

/* Each call has a second, and the queue what it is given; a refusal has words. */
static void answers(const char *library)
{
	static const struct {
		const char *socket;
		unsigned wait_s;
		int is_granted;
		const char *text;
		unsigned least_ms, most_ms;
	} rows[] = {
		{ "/silent", 0, 0, "refused without a reason by the arbiter at /silent", 0, 1000 },
		{ "/hangs", 0, 0, "the arbiter at /hangs has not answered within 1 s", 1000, 3000 },
		{ "/hangs", 45, 0, "the arbiter at /hangs has not answered within 1 s", 1000, 3000 },
		{ "/stops", 45, 0, "the arbiter at /stops has not answered within 1 s", 2000, 6000 },
		{ "/full", 0, 0, "others have the counters; see umpire who", 700, 3000 },
		{ "/full", 1, 0, "others have the counters; see umpire who", 1700, 5000 },
		{ "/later", 20, 1, "lease 7: 2 counters on each CPU", 2400, 8000 },
	};
	struct wish wish = { .programmable = 2 };
	struct answer answer;
	long long began;
	long long took_ms;
	size_t at;

	for (at = 0; at < sizeof rows / sizeof *rows; at++) {
		struct question question = {
			.socket = rows[at].socket,
			.library = library,
			.wait_s = rows[at].wait_s,
			.wish = &wish,
		};

		began = now_us();
		ask(&question, &answer);
		took_ms = (now_us() - began) / 1000;
		check(answer.is_granted == rows[at].is_granted, "granted", rows[at].socket);
		check(!strcmp(answer.text, rows[at].text), rows[at].socket, answer.text);
		if (took_ms < rows[at].least_ms || took_ms > rows[at].most_ms) {
			fprintf(stderr, "%s: %lld ms\n", rows[at].socket, took_ms);
			failures++;
		}
	}
}

/* Waits for all processes that were left to this one. How many of them SIGTERM has ended. */
static int end_of_orphans(void)
{
	int terminated = 0;
	int status;

	while (waitpid(-1, &status, 0) > 0)
		terminated += WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM;
	return terminated;
}

/* Beside the one who asks, a process enters the caller's own group; it has nothing of the caller's. */
static void enters_own_group(const char *folder, const char *library)
{
	char path[4096];
	char text[4096] = "";
	struct wish wish = { .programmable = 2 };
	struct question question = {
		.socket = "/silent",
		.library = library,
		.own_procs = path,
		.wish = &wish,
	};
	struct answer answer;
	struct pollfd ready = { .events = POLLIN };
	sigset_t terms;
	int ends[2];
	int file;

	/* What is nobody's child becomes ours, and is one of our group's. */
	if (prctl(PR_SET_CHILD_SUBREAPER, 1) || setpgid(0, 0))
		exit(2);
	alarm(60);
	snprintf(path, sizeof path, "%s/procs", folder);
	file = open(path, O_RDWR | O_CREAT, 0600);
	ask(&question, &answer);
	check(end_of_orphans() == 0, "own group", "a signal");
	check(file >= 0 && read(file, text, sizeof text - 1) == 1 && text[0] == '0', "own group", text);
	close(file);

	/* A kernel that keeps it waiting: this one's file has no place for what it writes. */
	snprintf(path, sizeof path, "%s/full", folder);
	if (mkfifo(path, 0600) || pipe(ends))
		exit(2);
	file = open(path, O_RDWR | O_NONBLOCK);
	while (write(file, text, sizeof text) > 0)
		;
	/* As in slurmstepd. */
	sigemptyset(&terms);
	sigaddset(&terms, SIGTERM);
	sigprocmask(SIG_BLOCK, &terms, NULL);
	ask(&question, &answer);
	close(ends[1]);
	ready.fd = ends[0];
	check(poll(&ready, 1, 10000) == 1 && ready.revents == POLLHUP, "own group", "it has our pipe");
	kill(0, SIGTERM);
	/* Where that is not heard, it goes on. */
	if (!poll(NULL, 0, 500))
		while (read(file, text, sizeof text) > 0)
			;
	check(end_of_orphans() == 1, "own group", "it hears no signal");
	sigwaitinfo(&terms, NULL);
	sigprocmask(SIG_UNBLOCK, &terms, NULL);
	close(file);
	close(ends[0]);
	alarm(0);
	prctl(PR_SET_CHILD_SUBREAPER, 0);
}

static void write_line(const char *folder, int cpu, const char *name, const char *text)
{
	char path[4096];
	FILE *file;

	snprintf(path, sizeof path, "%s/cpu%d", folder, cpu);
	mkdir(path, 0755);
	snprintf(path, sizeof path, "%s/cpu%d/topology", folder, cpu);
	mkdir(path, 0755);
	snprintf(path, sizeof path, "%s/cpu%d/topology/%s", folder, cpu, name);
	file = fopen(path, "w");
	if (!file)
		exit(2);
	fprintf(file, "%s\n", text);
	fclose(file);
}

/* Two sockets of two cores of two threads, numbered as Linux does on most machines. */
static void cores(const char *folder)
{
	static const char *const siblings[] = { "0,4", "1,5", "2,6", "3,7" };
	static const char *const rows[][2] = {
		{ "0", "0,4" },	    { "1", "2,6" },	{ "2-3", "1,5,3,7" }, { "0,3", "0,4,3,7" },
		{ "4", NULL },	    { "0-9", NULL },	{ "", NULL },	      { "x", NULL },
		{ "3-2", NULL },    { "0,,1", NULL },	{ "99999999", NULL },
	};
	char out[64];
	size_t at;
	int cpu;

	for (cpu = 0; cpu < 8; cpu++) {
		write_line(folder, cpu, "physical_package_id", cpu % 2 ? "1" : "0");
		write_line(folder, cpu, "thread_siblings_list", siblings[cpu % 4]);
	}
	for (at = 0; at < sizeof rows / sizeof *rows; at++) {
		int found = !cpus_of_cores(rows[at][0], folder, out, sizeof out);

		check(found == (rows[at][1] != NULL), "cores", rows[at][0]);
		if (found && rows[at][1])
			check(!strcmp(out, rows[at][1]), "cores' CPUs", out);
	}
	check(cpus_of_cores("0-3", folder, out, 4), "cores", "too long");
}

int main(int argc, char **argv)
{
	if (argc != 3)
		return 2;
	wishes();
	patiences();
	parts();
	groups_of_slurm();
	limits(argv[1]);
	enters_own_group(argv[1], argv[2]);
	answers(argv[2]);
	cores(argv[1]);
	return failures != 0;
}
