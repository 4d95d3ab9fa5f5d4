/* SPDX-License-Identifier: Apache-2.0 OR MIT */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "wish.h"

#define FORM "give --counters=N[,fixed=N][,events=NAME+NAME], as in --counters=3,fixed=1"

void one_line(char *text)
{
	for (; *text; text++)
		if ((unsigned char)*text < ' ' || *text == 127)
			*text = '?';
}

/*
 * In slurmstepd the options come out of the job's environment, where nobody has looked at them, and
 * errors about them go to slurmd's log.
 */
static int is_plain(const char *text)
{
	for (; *text; text++)
		if (*text < ' ' || *text > '~')
			return 0;
	return 1;
}

/* A number of decimal digits alone, from `least` to `most`. */
static int read_number(const char *text, unsigned least, unsigned most, unsigned *number)
{
	size_t digits = strspn(text, "0123456789");
	unsigned long value;

	if (digits == 0 || digits > 9 || text[digits])
		return -1;
	value = strtoul(text, NULL, 10);
	if (value < least || value > most)
		return -1;
	*number = (unsigned)value;
	return 0;
}

static int read_events(char *names, struct wish *wish, char *why, size_t size)
{
	char *rest = NULL;
	char *name;

	if (!*names || names[strlen(names) - 1] == '+' || *names == '+' || strstr(names, "++")) {
		snprintf(why, size, "a name is missing in 'events=%s'; " FORM, names);
		return -1;
	}
	for (name = strtok_r(names, "+", &rest); name; name = strtok_r(NULL, "+", &rest)) {
		if (wish->event_count == MOST_EVENTS) {
			snprintf(why, size, "more than %d events", MOST_EVENTS);
			return -1;
		}
		if (strlen(name) >= sizeof wish->events[0]) {
			snprintf(why, size, "'%.32s...' is too long for an event's name", name);
			return -1;
		}
		strcpy(wish->events[wish->event_count++], name);
	}
	return 0;
}

static int read_part(char *part, int is_first, struct wish *wish, char *why, size_t size)
{
	const char *value = strchr(part, '=');

	if (is_first && !value) {
		if (!read_number(part, 0, MOST_PROGRAMMABLE, &wish->programmable))
			return 0;
		snprintf(why, size, "'%.64s' is no number from 0 to %d; " FORM, part, MOST_PROGRAMMABLE);
		return -1;
	}
	if (!strncmp(part, "fixed=", 6)) {
		if (!read_number(part + 6, 1, MOST_FIXED, &wish->fixed))
			return 0;
		snprintf(why, size, "'%.64s' is no number from 1 to %d; " FORM, part + 6, MOST_FIXED);
		return -1;
	}
	if (!strncmp(part, "events=", 7))
		return read_events(part + 7, wish, why, size);
	snprintf(why, size, "'%.64s' is not understood; " FORM, part);
	return -1;
}

int read_wish(const char *text, struct wish *wish, char *why, size_t size)
{
	char copy[1024];
	char *at = copy;
	int is_first = 1;

	memset(wish, 0, sizeof *wish);
	if (!text || !*text || strlen(text) >= sizeof copy) {
		snprintf(why, size, "no counters are given, or too many; " FORM);
		return -1;
	}
	if (!is_plain(text)) {
		snprintf(why, size, "there are characters in it that no counters have; " FORM);
		return -1;
	}
	strcpy(copy, text);
	while (at) {
		char *part = strsep(&at, ",");

		if (read_part(part, is_first, wish, why, size))
			return -1;
		is_first = 0;
	}
	if (!wish->programmable && !wish->fixed && !wish->event_count) {
		snprintf(why, size, "0 counters are none; leave --counters out, or " FORM);
		return -1;
	}
	return 0;
}

int read_patience(const char *text, struct patience *patience, char *why, size_t size)
{
	unsigned seconds;

	memset(patience, 0, sizeof *patience);
	if (text && !is_plain(text))
		text = NULL;
	if (text && !read_number(text, MOST_WAIT_S + 1, UINT_MAX, &seconds)) {
		snprintf(why, size,
			 "%u s are too long: %d s at most, since Slurm's UnkillableStepTimeout may drain nodes "
			 "of steps that wait longer when they are cancelled; sbatch has "
			 "--counters-wait=requeue=N",
			 seconds, MOST_WAIT_S);
		return -1;
	}
	if (text && !strncmp(text, "requeue=", 8)) {
		if (!read_number(text + 8, 1, MOST_REQUEUES, &patience->requeues))
			return 0;
	} else if (text && !read_number(text, 1, MOST_WAIT_S, &patience->seconds)) {
		return 0;
	}
	snprintf(why, size,
		 "'%.64s' is not understood; give --counters-wait=SECONDS (1 to %d, in the arbiter's "
		 "queue), or for sbatch --counters-wait=requeue=N (1 to %d times)",
		 text ? text : "", MOST_WAIT_S, MOST_REQUEUES);
	return -1;
}

int read_site(int argc, char **argv, struct site *site, char *why, size_t size)
{
	int at;

	site->socket = "/run/umpire/arbiter";
	site->library = "libumpire_lease.so";
	site->scontrol = "/usr/bin/scontrol";
	site->shared = "";
	site->by_cores = 0;
	for (at = 0; at < argc; at++) {
		const char *word = argv[at];

		if (!strncmp(word, "socket=", 7) && word[7] == '/')
			site->socket = word + 7;
		else if (!strncmp(word, "library=", 8) && word[8])
			site->library = word + 8;
		else if (!strncmp(word, "scontrol=", 9) && word[9] == '/')
			site->scontrol = word + 9;
		else if (!strncmp(word, "shared=", 7))
			site->shared = word + 7;
		else if (!strcmp(word, "cpus=cores"))
			site->by_cores = 1;
		else if (strcmp(word, "cpus=all")) {
			snprintf(why, size,
				 "plugstack.conf: '%.128s' is not understood; the plugin has "
				 "socket=/PATH, library=PATH, scontrol=/PATH, shared=PARTITION,... "
				 "and cpus=all or cpus=cores",
				 word);
			return -1;
		}
	}
	return 0;
}

int has_all(const struct wish *whole, const struct wish *part)
{
	/* An event needs a counter of its own, which may be any programmable one. */
	return part->programmable + part->event_count <= whole->programmable + whole->event_count &&
	       part->fixed <= whole->fixed;
}

int is_listed(const char *list, const char *name)
{
	size_t length = strlen(name);

	while (length && *list) {
		size_t word = strcspn(list, ",");

		if (word == length && !strncmp(list, name, length))
			return 1;
		list += word + (list[word] == ',');
	}
	return 0;
}

int with_node(const char *pattern, const char *node, char *out, size_t size)
{
	size_t used = 0;

	while (*pattern) {
		int is_name = pattern[0] == '%' && pattern[1] == 'n';
		const char *from = is_name ? node : pattern;
		size_t length = is_name ? strlen(node) : 1;

		if (used + length >= size)
			return -1;
		memcpy(out + used, from, length);
		used += length;
		pattern += is_name ? 2 : 1;
	}
	out[used] = 0;
	return 0;
}
