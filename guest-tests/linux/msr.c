/* Reads or writes a register of one CPU through msr.ko, as any program of root's can:
 *   msr CPU REGISTER [VALUE]
 *
 * It prints the value, "written", or "fault" if the instruction raised #GP; only what
 * is wrong with the device or the arguments is an error. */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	char path[64];
	uint64_t value;
	ssize_t done;
	off_t reg;
	int file;

	if (argc < 3 || argc > 4) {
		fprintf(stderr, "usage: msr CPU REGISTER [VALUE]\n");
		return 2;
	}
	snprintf(path, sizeof(path), "/dev/cpu/%s/msr", argv[1]);
	file = open(path, argc == 4 ? O_RDWR : O_RDONLY);
	if (file < 0) {
		fprintf(stderr, "msr: %s: %s\n", path, strerror(errno));
		return 1;
	}
	reg = (off_t)strtoull(argv[2], NULL, 0);
	if (argc == 4) {
		value = strtoull(argv[3], NULL, 0);
		done = pwrite(file, &value, sizeof(value), reg);
	} else {
		done = pread(file, &value, sizeof(value), reg);
	}
	if (done == sizeof(value))
		printf(argc == 4 ? "written\n" : "0x%llx\n", (unsigned long long)value);
	else if (done < 0 && errno == EIO)
		printf("fault\n");
	else {
		fprintf(stderr, "msr: register %s: %s\n", argv[2], strerror(errno));
		return 1;
	}
	return 0;
}
