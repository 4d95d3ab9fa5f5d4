/* Programs whose call chains are known, and have no frame pointers: `frameless compute` or
 * `frameless kernel`.
 *
 * They never end. `compute` stays in inner, which calls leaf; middle has called it, and outer
 * that. `kernel` has the kernel make random numbers for middle. The register of frame pointers
 * has numbers in it. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#pragma GCC optimize("O2", "omit-frame-pointer", "no-optimize-sibling-calls")

static char buffer[65536];
static volatile uint64_t sink;

#define APART __attribute__((noinline, noclone))

APART uint64_t leaf(uint64_t a, uint64_t b)
{
	uint64_t i;

	for (i = 0; i < 50; i++)
		sink = a * 3 + b;
	return sink;
}

APART uint64_t inner(uint64_t a, uint64_t b, uint64_t c)
{
	uint64_t d = a + b, e = b + c;

	for (;;) {
		d += leaf(a, e);
		e ^= leaf(b, d);
		a += leaf(c, d ^ e);
		sink = a + b + c + d + e;
	}
	return d;
}

APART uint64_t middle(int file, size_t bytes, uint64_t a)
{
	uint64_t b = a ^ bytes, c = a + bytes;

	if (file < 0)
		c += inner(a, b, c);
	for (;;) {
		b += (uint64_t)pread(file, buffer, bytes, 0x10);
		sink = a + b + c++;
	}
	return b;
}

APART uint64_t outer(int file, size_t bytes, uint64_t a)
{
	uint64_t b = a * 5, c = sink;

	return middle(file, bytes, a) + a * b + c;
}

int main(int argc, char **argv)
{
	const char *mode = argc == 2 ? argv[1] : "";
	int file = -1;

	if (strcmp(mode, "kernel") == 0)
		file = open("/dev/urandom", O_RDONLY);
	if (file < 0 && strcmp(mode, "compute") != 0) {
		fprintf(stderr, "usage: frameless compute|kernel\n");
		return 2;
	}
	sink = outer(file, sizeof(buffer), (uint64_t)argc) + 1;
	return 0;
}
