/* SPDX-License-Identifier: Apache-2.0 OR MIT */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "group.h"

#define MOST_CPUS 4096

/* Where all of version 2 is mounted. */
static int find_top(char *out, size_t size)
{
	FILE *mounts = fopen("/proc/self/mountinfo", "re");
	char line[8192];
	int found = -1;

	if (!mounts)
		return -1;
	while (found && fgets(line, sizeof line, mounts)) {
		char root[PATH_MAX];
		char at[PATH_MAX];
		const char *kind = strstr(line, " - ");

		if (!kind || strncmp(kind, " - cgroup2 ", 11))
			continue;
		if (sscanf(line, "%*d %*d %*s %4095s %4095s", root, at) == 2 && !strcmp(root, "/") &&
		    strlen(at) < size) {
			strcpy(out, at);
			found = 0;
		}
	}
	fclose(mounts);
	return found;
}

/* This process's group of version 2. */
static int find_own(char *out, size_t size)
{
	FILE *groups = fopen("/proc/self/cgroup", "re");
	char line[PATH_MAX + 8];
	int found = -1;

	if (!groups)
		return -1;
	while (found && fgets(line, sizeof line, groups)) {
		line[strcspn(line, "\n")] = 0;
		if (!strncmp(line, "0::/", 4) && strlen(line + 3) < size) {
			strcpy(out, line + 3);
			found = 0;
		}
	}
	fclose(groups);
	return found;
}

int group_of_slurm(const char *own, char *out, size_t size)
{
	const char *end = strrchr(own, '/');
	const char *step = end;

	if (!end || strcmp(end, "/slurm"))
		return -1;
	while (step > own && *--step != '/')
		;
	if (strncmp(step, "/step_", 6) || !memmem(own, step - own, "/job_", 5))
		return -1;
	if ((size_t)snprintf(out, size, "%.*s/user", (int)(end - own), own) >= size)
		return -1;
	return 0;
}

int has_limits(const char *own, const char *top)
{
	char path[PATH_MAX];
	FILE *file;
	int first;

	if (!strcmp(own, "/"))
		return 0;
	/* By these Slurm itself limits, kills and accounts, whatever else it calls them. */
	if (strstr(own, "slurmstepd.scope") || strstr(own, "/job_") ||
	    (size_t)snprintf(path, sizeof path, "%s/cgroup.subtree_control", top) >= sizeof path)
		return 1;
	/* Where version 1 has the controllers, the top of version 2 hands none down. */
	file = fopen(path, "re");
	if (!file)
		return 1;
	do
		first = fgetc(file);
	while (first == '\n' || first == ' ');
	fclose(file);
	return first != EOF;
}

/* What the plugin makes on this node is below this folder. */
static int find_ours(const char *node, char *folder, size_t size)
{
	char top[PATH_MAX];

	if (find_top(top, sizeof top) ||
	    (size_t)snprintf(folder, size, "%s/umpire-slurm-%s", top, node) >= size)
		return -1;
	return 0;
}

static int make_group(struct group *group, const char *node, const char *step, char *why, size_t size)
{
	char above[PATH_MAX - 256];
	int tries;

	if (find_ours(node, above, sizeof above)) {
		snprintf(why, size, "the name of a control group for node %.64s is too long", node);
		return -1;
	}
	group->is_ours = 1;
	/* Whoever kills a slurmstepd leaves its folder: the number tells whose it was. */
	snprintf(group->path, sizeof group->path, "/umpire-slurm-%s/%s-%d", node, step, (int)getpid());
	snprintf(group->folder, sizeof group->folder, "%s/%s-%d", above, step, (int)getpid());
	for (tries = 0; tries < 10; tries++) {
		/* The last step of a node takes the folder above away, perhaps just now. */
		if (mkdir(above, 0755) && errno != EEXIST)
			break;
		if (!mkdir(group->folder, 0755))
			return 0;
		if (errno != ENOENT)
			break;
	}
	snprintf(why, size, "the control group %.200s cannot be made: %s", group->folder, strerror(errno));
	return -1;
}

int find_group(struct group *group, const char *node, const char *step, char *why, size_t size)
{
	char top[PATH_MAX / 2];
	char own[PATH_MAX / 2];
	struct stat seen;

	memset(group, 0, sizeof *group);
	if (find_top(top, sizeof top) || find_own(own, sizeof own)) {
		snprintf(why, size, "no hierarchy of control groups of version 2 is mounted whole here, and a "
				    "lease for a job needs one");
		return -1;
	}
	if (!group_of_slurm(own, group->path, sizeof group->path)) {
		if ((size_t)snprintf(group->folder, sizeof group->folder, "%s%s", top, group->path) <
			    sizeof group->folder &&
		    !stat(group->folder, &seen))
			return 0;
		snprintf(why, size, "Slurm's control group %.200s is not there", group->path);
		return -1;
	}
	if (has_limits(own, top)) {
		snprintf(why, size,
			 "slurmstepd is in the control group %.200s, which is not known as Slurm's, and tasks "
			 "are not taken out of its limits for a lease; use proctrack/cgroup with cgroup/v2",
			 own);
		return -1;
	}
	if ((size_t)snprintf(group->own_procs, sizeof group->own_procs, "%s%s/cgroup.procs", top, own) >=
	    sizeof group->own_procs)
		group->own_procs[0] = 0;
	return make_group(group, node, step, why, size);
}

int enter_group(const struct group *group)
{
	char path[PATH_MAX + 16];
	int file;
	int failed;

	/* Slurm moves its tasks itself. */
	if (!group->is_ours)
		return 0;
	snprintf(path, sizeof path, "%s/cgroup.procs", group->folder);
	file = open(path, O_WRONLY | O_CLOEXEC);
	if (file < 0)
		return -1;
	failed = write(file, "0", 1) == 1 ? 0 : errno;
	close(file);
	errno = failed;
	return failed ? -1 : 0;
}

void leave_group(const struct group *group, const char *node)
{
	const struct timespec moment = { 0, 5000000 };
	char above[PATH_MAX - 256];
	int tries;

	if (!group->is_ours)
		return;
	/* A process that has ended leaves its group a moment later. */
	for (tries = 0; tries < 20 && rmdir(group->folder) && errno == EBUSY; tries++)
		nanosleep(&moment, NULL);
	if (!find_ours(node, above, sizeof above))
		rmdir(above);
}

void sweep_groups(const char *node)
{
	char above[PATH_MAX - 256];
	struct dirent *entry;
	DIR *folder;

	if (find_ours(node, above, sizeof above) || !(folder = opendir(above)))
		return;
	while ((entry = readdir(folder))) {
		const char *number = strrchr(entry->d_name, '-');
		char *end = NULL;
		long pid = number ? strtol(number + 1, &end, 10) : 0;

		if (pid <= 0 || *end || !kill((pid_t)pid, 0) || errno != ESRCH)
			continue;
		/* Not empty: its tasks go on. */
		unlinkat(dirfd(folder), entry->d_name, AT_REMOVEDIR);
	}
	closedir(folder);
	rmdir(above);
}

/* Sets what a list like "0,2-3" names; -1: it is none, or names more than `most`. */
static int read_list(const char *text, unsigned char *set, long most)
{
	while (*text) {
		char *end;
		long first = strtol(text, &end, 10);
		long last = first;

		if (end == text || first < 0)
			return -1;
		if (*end == '-') {
			text = end + 1;
			last = strtol(text, &end, 10);
			if (end == text)
				return -1;
		}
		if (last < first || last >= most || (*end && *end != ','))
			return -1;
		memset(set + first, 1, (size_t)(last - first + 1));
		text = *end ? end + 1 : end;
	}
	return 0;
}

/* A CPU, with the first CPU of its core, and its socket. */
struct place {
	long socket;
	long core;
	long cpu;
};

static int read_line(const char *sysfs, long cpu, const char *what, char *line, int size)
{
	char path[PATH_MAX];
	FILE *file;
	int is_read;

	snprintf(path, sizeof path, "%s/cpu%ld/topology/%s", sysfs, cpu, what);
	file = fopen(path, "re");
	if (!file)
		return -1;
	is_read = fgets(line, size, file) != NULL;
	fclose(file);
	return is_read ? 0 : -1;
}

static int in_order(const void *left, const void *right)
{
	const struct place *a = left;
	const struct place *b = right;

	if (a->socket != b->socket)
		return a->socket < b->socket ? -1 : 1;
	if (a->core != b->core)
		return a->core < b->core ? -1 : 1;
	return (a->cpu > b->cpu) - (a->cpu < b->cpu);
}

/* All of this machine's CPUs: a step waits, so none is asked for that is not there. */
static long read_places(const char *sysfs, struct place *places)
{
	DIR *folder = opendir(sysfs);
	struct dirent *entry;
	char line[4096];
	long count = 0;

	while (folder && (entry = readdir(folder)) && count < MOST_CPUS) {
		char *end = entry->d_name;
		long cpu = strncmp(entry->d_name, "cpu", 3) ? -1 : strtol(entry->d_name + 3, &end, 10);

		if (cpu < 0 || end == entry->d_name + 3 || *end || cpu >= MOST_CPUS ||
		    read_line(sysfs, cpu, "physical_package_id", line, sizeof line))
			continue;
		places[count].cpu = cpu;
		places[count].socket = strtol(line, NULL, 10);
		if (read_line(sysfs, cpu, "thread_siblings_list", line, sizeof line)) {
			count = -1;
			break;
		}
		places[count++].core = strtol(line, NULL, 10);
	}
	if (folder)
		closedir(folder);
	if (count > 0)
		qsort(places, (size_t)count, sizeof *places, in_order);
	return count;
}

int cpus_of_cores(const char *cores, const char *sysfs, char *out, size_t size)
{
	static struct place places[MOST_CPUS];
	unsigned char wanted[MOST_CPUS] = { 0 };
	long count = read_places(sysfs, places);
	long number = -1;
	size_t used = 0;
	long at;

	if (read_list(cores, wanted, MOST_CPUS))
		return -1;
	for (at = 0; at < count; at++) {
		int length;

		if (!at || places[at].core != places[at - 1].core)
			number++;
		if (!wanted[number])
			continue;
		length = snprintf(out + used, size - used, "%s%ld", used ? "," : "", places[at].cpu);
		if (length < 0 || (size_t)length >= size - used)
			return -1;
		used += (size_t)length;
	}
	/* A core that the machine does not have: Slurm counts otherwise here. */
	for (at = number + 1; at < MOST_CPUS; at++)
		if (wanted[at])
			return -1;
	return used ? 0 : -1;
}
