/* A busy loop with a name: `spin SECONDS` or `spin -n ITERATIONS`.
 *
 * It prints what it did, so that a test can compare counts with time:
 *   spin: ITERATIONS iterations in SECONDS s
 * Nearly all of its time is spent in spin_hot, the symbol that a profile must show. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* About a millisecond on an emulated processor, less on a real one. */
#define CHUNK 200000UL

static unsigned long state = 1;

__attribute__((noinline)) void spin_hot(unsigned long iterations)
{
	unsigned long x = state;

	while (iterations--) {
		x = x * 2862933555777941757UL + 3037000493UL;
		__asm__ volatile("" : "+r"(x));
	}
	state = x;
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

int main(int argc, char **argv)
{
	int counted = argc == 3 && strcmp(argv[1], "-n") == 0;
	const char *text = counted ? argv[2] : argc == 2 ? argv[1] : "";
	char *rest;
	double amount = strtod(text, &rest), start = now();
	unsigned long done = 0;

	if (*text == '\0' || *rest != '\0' || !(amount > 0 && amount < 1e15)) {
		fprintf(stderr, "usage: spin SECONDS | spin -n ITERATIONS (both above 0)\n");
		return 2;
	}
	while (counted ? done < (unsigned long)amount : now() - start < amount) {
		unsigned long chunk = CHUNK;

		if (counted && (unsigned long)amount - done < chunk)
			chunk = (unsigned long)amount - done;
		spin_hot(chunk);
		done += chunk;
	}
	printf("spin: %lu iterations in %.6f s\n", done, now() - start);
	return 0;
}
