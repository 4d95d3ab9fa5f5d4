/* Prints where the counts of this guest's PMU come from, for people and for scripts:
 *
 *   pmu-accounting [-a] [-x SEPARATOR] [CPU...]
 *
 * It reads Umpire's accounting page (docs/reference/guest-abi.md) through /dev/cpu/N/msr, so it needs
 * root and the module msr. One snapshot for each CPU, all of them without an argument; a line
 * for each counter that was ever used, with -a for every one.
 *
 * perf gives a counter back when its command ends, and has it only while the command runs. So
 * let perf run this program:
 *
 *   perf stat -e instructions -- pmu-accounting
 *
 * cc -static -O1 -o pmu-accounting pmu-accounting.c */
#include <cpuid.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The ABI, as docs/reference/guest-abi.md has it; a test compares these tables with that page's. */
#define CPUID_FIRST 0x40000100
#define CPUID_LAST 0x4000ff00
#define ABI_VERSION 1
#define FEATURE_ACCOUNTING (1u << 0)
#define FEATURE_RESERVATIONS (1u << 8)
#define SNAPSHOT 0x0
#define SEQUENCE 0x1
#define WORDS(n) (0x100 + 4 * (n))
#define FIXED 32
#define POSITIONS 64

static const char *const state_codes[16] = {
	[0] = "unused: its control was not written, or no snapshot was taken",
	[1] = "stopped: not enabled, it keeps its value",
	[2] = "counting",
	[3] = "waiting: enabled, but others use the physical counters at present",
	[4] = "unavailable: enabled, but nobody can count it; the value means nothing",
};

static const char *const provenance_codes[16] = {
	[0] = "none: there is no count",
	[1] = "exact: every event was seen",
	[2] = "hardware: counted by a physical counter",
	[3] = "scaled: events were missed, or extrapolated",
	[4] = "derived: computed from another quantity",
	[5] = "simulated: made up, by a declared rate or as ticks of virtual time",
};

static const char *const reason_codes[256] = {
	[0] = "none: the counter is not unavailable",
	[1] = "no source of the host counts the event",
	[2] = "edge, invert, counter mask or any-thread cannot be counted",
	[3] = "every physical counter is taken",
	[4] = "the counter is not granted to this guest",
	[5] = "the host refused",
	[6] = "the host took the physical counter away",
	[7] = "the host uses the physical counters itself",
	[8] = "counters compete for too few physical ones",
	[9] = "it has not had its turn on a physical counter yet",
	[10] = "the event is counted in both rings together only",
	[11] = "the host cannot see the only ring that is asked for",
	[12] = "the host lets the guest use fewer counters at a time than it has enabled",
	[13] = "the VM's event filter denies the event",
	[255] = "an error of the hypervisor",
};

static const char *const loss_codes[256] = {
	[0] = "none is known",
	[1] = "the guest ran without being stepped",
	[2] = "an event handler was entered unseen",
	[3] = "a system call was entered unseen",
	[4] = "an instruction could not be decoded",
	[5] = "the hypervisor cannot step the guest's ring or mode",
	[6] = "its reservation ended while it counted, which cleared the counter",
};

/* Reservations (docs/reference/pcr.md): the position that the legacy registers of position i reach, in
 * every version of their ABI up to this one. */
#define LEGACY_MAP(i) (0x200 + (i))
#define RESERVATIONS_LEGACY_MAP (1u << 3)
#define RESERVATIONS_VERSION 3

/* What the processor has, and where Umpire's page is. */
static struct {
	uint32_t page, map;
	unsigned programmable, fixed;
	int intel, core;
} pmu;

static int file;

static void find_page(void)
{
	uint32_t leaf, a, b, c, d;

	__cpuid(0, a, b, c, d);
	pmu.intel = b == signature_INTEL_ebx;
	__cpuid(0x80000001, a, b, c, d);
	pmu.core = !pmu.intel && c >> 23 & 1;
	__cpuid(1, a, b, c, d);
	if (!(c >> 31))
		goto none;
	for (leaf = CPUID_FIRST; leaf <= CPUID_LAST; leaf += 0x100) {
		uint32_t name[3];

		__cpuid(leaf, a, name[0], name[1], name[2]);
		if (a > leaf && a < leaf + 0x100 && memcmp(name, "UmpireUmpire", 12) == 0)
			break;
	}
	if (leaf > CPUID_LAST)
		goto none;
	__cpuid(leaf + 1, a, pmu.page, c, d);
	if (a != ABI_VERSION || !(c & FEATURE_ACCOUNTING))
		goto none;
	pmu.programmable = d & 0xff;
	pmu.fixed = d >> 8 & 0xff;
	if (c & FEATURE_RESERVATIONS) {
		__cpuid(leaf + 2, a, b, c, d);
		if (a <= RESERVATIONS_VERSION && c & RESERVATIONS_LEGACY_MAP)
			pmu.map = b;
	}
	return;
none:
	fprintf(stderr, "pmu-accounting: this is no guest of Umpire's with a PMU\n");
	exit(1);
}

/* The register of the CPU whose device is open; 0 if reading it raises #GP. */
static int read_msr(uint32_t index, uint64_t *value)
{
	if (pread(file, value, sizeof(*value), index) == sizeof(*value))
		return 1;
	if (errno != EIO) {
		fprintf(stderr, "pmu-accounting: register 0x%x: %s\n", index, strerror(errno));
		exit(1);
	}
	*value = 0;
	return 0;
}

struct counter {
	int readable;
	uint64_t status, enabled, running, count;
};

/* All words of one moment: another snapshot in between, by a driver, starts it anew. */
static uint64_t snapshot(struct counter *counters)
{
	uint64_t number, sequence;
	unsigned n, tries;

	for (tries = 0; tries < 1000; tries++) {
		read_msr(pmu.page + SNAPSHOT, &number);
		for (n = 0; n < POSITIONS; n++) {
			struct counter *counter = &counters[n];
			uint32_t words = pmu.page + WORDS(n);

			counter->readable = 0;
			if (n >= (n < FIXED ? pmu.programmable : FIXED + pmu.fixed))
				continue;
			counter->readable = read_msr(words, &counter->status) &&
					    read_msr(words + 1, &counter->enabled) &&
					    read_msr(words + 2, &counter->running) &&
					    read_msr(words + 3, &counter->count);
		}
		read_msr(pmu.page + SEQUENCE, &sequence);
		if (sequence == number)
			return number;
	}
	fprintf(stderr, "pmu-accounting: others take snapshots all the time\n");
	exit(1);
}

/* The legacy name of a position; -1 if it has none. */
static int legacy_name(unsigned position)
{
	uint64_t reached;
	int i;

	if (!pmu.map || position >= FIXED)
		return (int)position;
	for (i = 0; i < (int)pmu.programmable; i++)
		if (read_msr(pmu.map + LEGACY_MAP(i), &reached) && reached == position)
			return i;
	return -1;
}

/* Event and rings of a counter's control, in the words of perf: a raw event's code
 * (perf stat -e rCODE), or the fixed counter's number. */
static void describe(unsigned position, char *event, size_t size, const char **rings)
{
	static const char *const names[4] = {"-", "k", "u", "uk"};
	int name = legacy_name(position);
	uint64_t control = 0;
	int known;

	*rings = "-";
	if (position >= FIXED) {
		known = read_msr(0x38d, &control);
		control >>= 4 * (position - FIXED);
		snprintf(event, size, "fixed%u", position - FIXED);
		if (known)
			*rings = names[control & 3];
		return;
	}
	snprintf(event, size, "-");
	if (name < 0)
		return;
	if (pmu.intel)
		known = read_msr(0x186 + (uint32_t)name, &control);
	else
		known = read_msr(pmu.core ? 0xc0010200 + 2 * (uint32_t)name :
					    0xc0010000 + (uint32_t)name, &control);
	if (!known)
		return;
	*rings = names[(control >> 16 & 1) << 1 | (control >> 17 & 1)];
	/* All but the enable bits, the rings and the interrupt, and PEBS's Adaptive_Record: what
	 * perf takes. */
	control &= pmu.intel ? ~0x400530000ULL : ~0x30000530000ULL;
	snprintf(event, size, "r%llx", (unsigned long long)control);
}

/* The first word of a code's text; its number if a later version has added it. */
static const char *word(const char *text, unsigned code)
{
	static char buffer[2][32];
	static int turn;
	char *place = buffer[turn ^= 1];

	if (text)
		snprintf(place, sizeof(*buffer), "%.*s", (int)strcspn(text, ":"), text);
	else
		snprintf(place, sizeof(*buffer), "code %u", code);
	return place;
}

static void print_counter(const char *cpu, unsigned n, const struct counter *counter,
			  const char *separator)
{
	unsigned state = counter->status & 0xf, provenance = counter->status >> 4 & 0xf;
	unsigned reason = counter->status >> 8 & 0xff, loss = counter->status >> 16 & 0xff;
	const char *rings, *why = "", *s = separator;
	char event[24], name[16], value[24];

	describe(n, event, sizeof(event), &rings);
	snprintf(name, sizeof(name), n < FIXED ? "PMC%u" : "FIXED%u", n < FIXED ? n : n - FIXED);
	if (reason)
		why = reason_codes[reason] ? reason_codes[reason] : "a reason of a later version";
	else if (loss)
		why = loss_codes[loss] ? loss_codes[loss] : "a loss of a later version";
	if (s) {
		printf("%s%s%s%s%s%s%s%s%s%s", cpu, s, name, s, event, s, rings, s,
		       word(state_codes[state], state), s);
		printf("%s%s%llu%s%llu%s%llu%s%s\n", word(provenance_codes[provenance], provenance),
		       s, (unsigned long long)counter->count, s,
		       (unsigned long long)counter->enabled, s,
		       (unsigned long long)counter->running, s, why);
		return;
	}
	/* A count that nobody has counted is not a number, 0 least of all. */
	if (counter->enabled && !counter->running)
		snprintf(value, sizeof(value), "<not counted>");
	else
		snprintf(value, sizeof(value), "%llu", (unsigned long long)counter->count);
	printf("%-3s %-7s %-10s %-5s %-11s %20s ", cpu, name, event, rings,
	       word(state_codes[state], state), value);
	if (counter->enabled)
		printf("%6.2f %%", 100.0 * (double)counter->running / (double)counter->enabled);
	else
		printf("%8s", "-");
	printf("  %-9s  %s\n", word(provenance_codes[provenance], provenance), why);
}

static void print_cpu(const char *cpu, int all, const char *separator)
{
	struct counter counters[POSITIONS];
	char path[64];
	unsigned n;

	snprintf(path, sizeof(path), "/dev/cpu/%s/msr", cpu);
	file = open(path, O_RDONLY);
	if (file < 0) {
		fprintf(stderr, "pmu-accounting: %s: %s (it needs root, and: modprobe msr)\n", path,
			strerror(errno));
		exit(1);
	}
	snapshot(counters);
	for (n = 0; n < POSITIONS; n++)
		if (counters[n].readable && (all || counters[n].status & 0xf))
			print_counter(cpu, n, &counters[n], separator);
	close(file);
}

int main(int argc, char **argv)
{
	const char *separator = NULL;
	int all = 0, option, cpu;

	while ((option = getopt(argc, argv, "ax:")) != -1) {
		if (option == 'a') {
			all = 1;
		} else if (option == 'x') {
			separator = optarg;
		} else {
			fprintf(stderr, "usage: pmu-accounting [-a] [-x SEPARATOR] [CPU...]\n");
			return 2;
		}
	}
	find_page();
	if (!separator)
		printf("%-3s %-7s %-10s %-5s %-11s %20s %8s  %-9s  %s\n", "cpu", "counter", "event",
		       "rings", "state", "count", "counted", "by", "why");
	for (; optind < argc; optind++) {
		print_cpu(argv[optind], all, separator);
		if (optind == argc - 1)
			return 0;
	}
	for (cpu = 0; cpu < sysconf(_SC_NPROCESSORS_ONLN); cpu++) {
		char text[16];

		snprintf(text, sizeof(text), "%d", cpu);
		print_cpu(text, all, separator);
	}
	return 0;
}
