/* A context survives exec, unless its descriptor is to be closed (3.1.1, 3.5.4). */
#include "spec.h"

typedef struct {
	pfarg_ctx_t ctx;
	pfm_default_smpl_arg_t format;
} context_arg_t;

static void run(char **argv, int fd, size_t size, const char *expected)
{
	char number[16], bytes[32];
	pid_t child = fork();

	if (child == 0) {
		char *arguments[] = { argv[0], number, bytes, (char *)expected, NULL };

		snprintf(number, sizeof(number), "%d", fd);
		snprintf(bytes, sizeof(bytes), "%zu", size);
		execv("/proc/self/exe", arguments);
		_exit(3);
	}
	join(child);
}

int main(int argc, char **argv)
{
	pfm_uuid_t uuid = PFM_DEFAULT_SMPL_UUID;
	context_arg_t arg;
	int fd;

	if (argc == 4) {
		size_t size = strtoul(argv[2], NULL, 10);

		fd = atoi(argv[1]);
		if (!strcmp(argv[3], "closed")) {
			FAILS(pfm_unload_context(fd), EBADF);
			return 0;
		}
		if (!strcmp(argv[3], "buffer")) {
			void *buffer = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);

			MUST(buffer != MAP_FAILED, "errno %d", errno);
			MUST(((pfm_default_smpl_hdr_t *)buffer)->hdr_buf_size == size, "no header");
		}
		CALL(pfm_stop(fd));
		MUST(lseek(fd, 0, SEEK_CUR) == -1 && errno == EINVAL, "errno %d", errno);
		return 0;
	}
	memset(&arg, 0, sizeof(arg));
	memcpy(arg.ctx.ctx_smpl_buf_id, uuid, sizeof(uuid));
	arg.format.buf_size = 8192;
	CALL(perfmonctl(0, PFM_CREATE_CONTEXT, &arg, 1));
	fd = arg.ctx.ctx_fd;
	load(fd, vcpu());
	run(argv, fd, arg.ctx.ctx_smpl_buf_size, "open");
	run(argv, fd, arg.ctx.ctx_smpl_buf_size, "buffer");
	MUST(fcntl(fd, F_SETFD, FD_CLOEXEC) == 0, "errno %d", errno);
	run(argv, fd, 0, "closed");
	CALL(pfm_unload_context(fd));
	puts("open after exec, and closed where it was to be");
	return 0;
}
