/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Counters as a resource of Slurm: --counters of srun, sbatch and salloc (docs/guide/slurm.md).
 *
 * In srun, sbatch and salloc the options are checked; job_submit.lua turns them into GRES. In
 * slurmstepd a step with --counters gets one lease of its control group on this node, and each of
 * its tasks enters that group. Nothing here fails for a step without --counters, and no error is
 * returned to slurmstepd before its tasks are there: that would drain the node.
 */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <slurm/slurm.h>
#include <slurm/spank.h>

#include "ask.h"
#include "group.h"
#include "wish.h"

/*
 * What Slurm looks up; the rest is hidden, so that nothing of slurmstepd's is meant by it. Nothing of
 * a prolog or epilog: slurmd would load the plugin for every job's begin or end, and drain the node
 * where that fails.
 */
#pragma GCC visibility push(default)
SPANK_PLUGIN(umpire, 1)
int slurm_spank_init(spank_t spank, int argc, char **argv);
int slurm_spank_init_post_opt(spank_t spank, int argc, char **argv);
int slurm_spank_task_init_privileged(spank_t spank, int argc, char **argv);
int slurm_spank_task_init(spank_t spank, int argc, char **argv);
int slurm_spank_exit(spank_t spank, int argc, char **argv);
#pragma GCC visibility pop

#define SCONTROL_MS 5000
/* In the environment of a job: what it asked for. */
#define OF_JOB "UMPIRE_JOB_COUNTERS"

/* What is asked for by this command, or for this step. */
static struct site site;
static char asked_for[1024];
static struct wish wish;
static struct patience patience;
static int is_asked;
static int is_patient;

/* In slurmstepd: why no task may run; empty: all is well. */
static char refused[1280];
static struct group group;
static int is_member;

/* One line to whoever reads, whatever the words in it are that others chose. */
__attribute__((format(printf, 1, 2))) static void complain(const char *format, ...)
{
	char line[2048];
	va_list words;

	va_start(words, format);
	vsnprintf(line, sizeof line, format, words);
	va_end(words);
	one_line(line);
	slurm_error("%s", line);
}

static const char *node_name(void)
{
	static char name[256];
	const char *given = getenv("SLURMD_NODENAME");

	if (given && *given && strlen(given) < sizeof name && !strchr(given, '/'))
		return given;
	if (gethostname(name, sizeof name - 1))
		return "node";
	name[strcspn(name, ".")] = 0;
	return name;
}

static int hear_counters(int number, const char *text, int is_remote)
{
	char why[512];

	(void)number;
	is_asked = 1;
	snprintf(asked_for, sizeof asked_for, "%s", text ? text : "");
	if (!read_wish(text, &wish, why, sizeof why))
		return 0;
	if (is_remote) {
		snprintf(refused, sizeof refused, "--counters: %s", why);
		return 0;
	}
	complain("--counters: %s", why);
	return -1;
}

static int hear_wait(int number, const char *text, int is_remote)
{
	char why[512];

	(void)number;
	is_patient = 1;
	if (!read_patience(text, &patience, why, sizeof why))
		return 0;
	if (is_remote) {
		snprintf(refused, sizeof refused, "--counters-wait: %s", why);
		return 0;
	}
	complain("--counters-wait: %s", why);
	return -1;
}

static struct spank_option options[] = {
	{ "counters", "N[,fixed=N][,events=NAME+NAME]",
	  "performance counters on each CPU of the job: programmable ones, fixed-function ones, and one "
	  "for each event (Umpire)",
	  1, 0, hear_counters },
	{ "counters-wait", "SECONDS|requeue=N",
	  "if others have the counters: wait so long on the node, or (sbatch) be requeued at most N times",
	  1, 0, hear_wait },
	SPANK_OPTIONS_TABLE_END
};

int slurm_spank_init(spank_t spank, int argc, char **argv)
{
	spank_context_t context = spank_context();
	char why[512];
	int at;

	if (context != S_CTX_LOCAL && context != S_CTX_ALLOCATOR && context != S_CTX_REMOTE)
		return 0;
	/* A mistake in plugstack.conf is of those who ask for counters, and of nobody else. */
	if (read_site(argc, argv, &site, why, sizeof why))
		snprintf(refused, sizeof refused, "%s", why);
	for (at = 0; options[at].name; at++)
		if (spank_option_register(spank, &options[at]) != ESPANK_SUCCESS)
			complain("umpire: --%s cannot be registered; another plugin may have it",
				    options[at].name);
	return 0;
}

/*
 * A step in a job of a partition where jobs share CPUs: Slurm gives GRES to jobs, and a step has
 * what its job has. It is the user's own mistake that is caught here: nothing rests on it.
 */
static int check_step(const char *job, const char *partition)
{
	const char *of_job = getenv(OF_JOB);
	struct wish whole;
	char why[512];

	if (!is_listed(site.shared, partition) ||
	    (of_job && !read_wish(of_job, &whole, why, sizeof why) && has_all(&whole, &wish)))
		return 0;
	complain("--counters: in partition %s jobs share CPUs, so Slurm counts their counters for a whole "
		    "job, and job %s has asked for %s%s: give --counters to sbatch or salloc",
		    partition, job, of_job ? "--counters=" : "none", of_job ? of_job : "");
	return -1;
}

/* In srun, sbatch and salloc. */
static int check_command(void)
{
	const char *job = getenv("SLURM_JOB_ID");
	const char *partition = getenv("SLURM_JOB_PARTITION");
	int is_step = spank_context() == S_CTX_LOCAL && job && partition;

	if (is_patient && !is_asked) {
		complain("--counters-wait says how long to wait for counters, but none are asked for: give "
			    "--counters=N, too");
		return -1;
	}
	if (is_asked && refused[0]) {
		complain("umpire: %s", refused);
		return -1;
	}
	if (is_step)
		return is_asked ? check_step(job, partition) : 0;
	/* The steps of the job that this command asks for are told what it has. */
	if (is_asked)
		setenv(OF_JOB, asked_for, 1);
	else
		unsetenv(OF_JOB);
	return 0;
}

/* One of Slurm's numbers of this step, or 0. */
static uint32_t number_of(spank_t spank, spank_item_t item)
{
	uint32_t number = 0;

	return spank_get_item(spank, item, &number) == ESPANK_SUCCESS ? number : 0;
}

static void name_step(uint32_t job, uint32_t step, char *out, size_t size)
{
	if (step == SLURM_BATCH_SCRIPT)
		snprintf(out, size, "%u.batch", job);
	else if (step == SLURM_INTERACTIVE_STEP)
		snprintf(out, size, "%u.interactive", job);
	else
		snprintf(out, size, "%u.%u", job, step);
}

/* The CPUs of the step; NULL: all, which is true of every step. */
static const char *cpus_of(spank_t spank, uint32_t step)
{
	static char cpus[4096];
	char *cores = NULL;
	spank_item_t item = step == SLURM_BATCH_SCRIPT ? S_JOB_ALLOC_CORES : S_STEP_ALLOC_CORES;

	if (!site.by_cores || spank_get_item(spank, item, &cores) != ESPANK_SUCCESS || !cores ||
	    cpus_of_cores(cores, "/sys/devices/system/cpu", cpus, sizeof cpus))
		return NULL;
	return cpus;
}

/*
 * The batch script goes back to the queue, unless it was there often enough. Returns how often it
 * has been there with this time; 0: it does not go. By a task, because Slurm 22.05 says nowhere
 * earlier how often that was; as the job's user, who may do so.
 */
static unsigned requeue(spank_t spank)
{
	char number[16];
	char count[16];
	const char *words[] = { site.scontrol, "requeue", number, NULL };
	unsigned before = 0;

	if (number_of(spank, S_JOB_STEPID) != SLURM_BATCH_SCRIPT)
		return 0;
	if (spank_getenv(spank, "SLURM_RESTART_COUNT", count, sizeof count) == ESPANK_SUCCESS)
		before = (unsigned)strtoul(count, NULL, 10);
	snprintf(number, sizeof number, "%u", number_of(spank, S_JOB_ID));
	if (before >= patience.requeues || run(words, SCONTROL_MS) != 0)
		return 0;
	return before + 1;
}

static void take_lease(spank_t spank, uint32_t job, uint32_t step)
{
	char socket[108];
	char name[64];
	char label[96];
	char why[512];
	long long began = now_us();
	struct answer answer;
	struct question question = {
		.socket = socket,
		.library = site.library,
		.group = group.path,
		.own_procs = group.own_procs,
		.label = label,
		.wait_s = patience.seconds,
		.wish = &wish,
	};

	name_step(job, step, name, sizeof name);
	snprintf(label, sizeof label, "slurm %s", name);
	if (with_node(site.socket, node_name(), socket, sizeof socket)) {
		snprintf(refused, sizeof refused, "plugstack.conf: socket=%.64s... is too long for a socket",
			 site.socket);
		return;
	}
	sweep_groups(node_name());
	if (find_group(&group, node_name(), name, why, sizeof why)) {
		snprintf(refused, sizeof refused, "%s", why);
		return;
	}
	question.cpus = cpus_of(spank, step);
	if (spank_get_item(spank, S_JOB_UID, &question.uid) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_GID, &question.gid) != ESPANK_SUCCESS) {
		snprintf(refused, sizeof refused, "Slurm does not say whose job this is");
		leave_group(&group, node_name());
		return;
	}
	ask(&question, &answer);
	if (answer.is_granted) {
		is_member = 1;
		/* With the control group, and the process that asked. */
		slurm_info("umpire: step %s: %s, in %lld us", name, answer.text, now_us() - began);
		return;
	}
	leave_group(&group, node_name());
	/* It always has words: what is empty would let the tasks run. */
	snprintf(refused, sizeof refused, "%s", answer.text);
}

int slurm_spank_init_post_opt(spank_t spank, int argc, char **argv)
{
	uint32_t job;
	uint32_t step;

	(void)argc;
	(void)argv;
	if (spank_context() == S_CTX_LOCAL || spank_context() == S_CTX_ALLOCATOR)
		return check_command();
	if (spank_context() != S_CTX_REMOTE || !is_asked)
		return 0;
	job = number_of(spank, S_JOB_ID);
	step = number_of(spank, S_JOB_STEPID);
	/* No program of the job runs in this one. */
	if (step == SLURM_EXTERN_CONT)
		return 0;
	if (!refused[0])
		take_lease(spank, job, step);
	if (refused[0])
		complain("umpire: %s: no counters for job %u: %s", node_name(), job, refused);
	return 0;
}

int slurm_spank_task_init_privileged(spank_t spank, int argc, char **argv)
{
	(void)spank;
	(void)argc;
	(void)argv;
	if (is_member && enter_group(&group))
		snprintf(refused, sizeof refused, "the control group %.200s cannot be entered: %m", group.path);
	return 0;
}

int slurm_spank_task_init(spank_t spank, int argc, char **argv)
{
	int task = 0;
	unsigned times;

	(void)argc;
	(void)argv;
	if (!is_asked || !refused[0])
		return 0;
	/* One line, of the first of the node's tasks; who fails are all of them. */
	if (spank_get_item(spank, S_TASK_ID, &task) == ESPANK_SUCCESS && task != 0)
		return -1;
	complain("umpire: %s: no counters: %s", node_name(), refused);
	times = requeue(spank);
	if (times)
		slurm_info("umpire: job %u is requeued, time %u of %u", number_of(spank, S_JOB_ID), times,
			   patience.requeues);
	return -1;
}

int slurm_spank_exit(spank_t spank, int argc, char **argv)
{
	(void)spank;
	(void)argc;
	(void)argv;
	if (spank_context() == S_CTX_REMOTE && is_member)
		leave_group(&group, node_name());
	return 0;
}
