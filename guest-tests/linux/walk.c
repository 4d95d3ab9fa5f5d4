/* Programs whose call chains are known: `walk compute`, `walk kernel` or `walk module`.
 *
 * Each prints where its functions are, and never ends:
 *   walk: leaf 0x... inner 0x... middle 0x... outer 0x...
 * `compute` stays in inner, which calls leaf; middle has called it, and outer that. `kernel` has the kernel
 * make random numbers, and `module` reads an MSR through msr.ko. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#pragma GCC optimize("no-omit-frame-pointer", "no-optimize-sibling-calls")

static char buffer[65536];
static volatile uint64_t sink;

#define APART __attribute__((noinline, noclone, section(".text.walk")))

APART void leaf(void)
{
	sink = sink * 3 + 1;
}

/* It calls another: a function that calls none has no frame. */
APART void inner(void)
{
	for (;;)
		leaf();
}

APART void middle(int file, size_t bytes)
{
	if (file < 0)
		inner();
	for (;;)
		sink += pread(file, buffer, bytes, 0x10);
}

APART void outer(int file, size_t bytes)
{
	middle(file, bytes);
	sink++;
}

int main(int argc, char **argv)
{
	const char *mode = argc == 2 ? argv[1] : "";
	int file = -1;
	size_t bytes = 0;

	if (strcmp(mode, "kernel") == 0) {
		file = open("/dev/urandom", O_RDONLY);
		bytes = sizeof(buffer);
	} else if (strcmp(mode, "module") == 0) {
		file = open("/dev/cpu/0/msr", O_RDONLY);
		bytes = 8;
	}
	if (file < 0 && strcmp(mode, "compute") != 0) {
		fprintf(stderr, "usage: walk compute|kernel|module\n");
		return 2;
	}
	printf("walk: leaf %p inner %p middle %p outer %p\n", (void *)leaf, (void *)inner,
	       (void *)middle, (void *)outer);
	fflush(stdout);
	outer(file, bytes);
	return 0;
}
