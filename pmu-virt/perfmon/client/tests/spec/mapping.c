/* What may be done with the sampling buffer (3.5.4), and with a context's descriptor (3.3.3). */
#include "spec.h"

typedef struct {
	pfarg_ctx_t ctx;
	pfm_default_smpl_arg_t format;
} context_arg_t;

static int is_mapped(void *address, size_t size)
{
	unsigned char pages[64];

	return mincore(address, size, pages) == 0;
}

static void refuses(int fd, size_t size, int protection, int flags, off_t offset)
{
	void *mapped = mmap(NULL, size, protection, flags, fd, offset);

	MUST(mapped == MAP_FAILED, "size %zu, protection %d, flags %#x, offset %ld were accepted", size,
	     protection, (unsigned)flags, (long)offset);
	MUST(errno == EINVAL, "errno %d", errno);
}

int main(void)
{
	pfm_uuid_t uuid = PFM_DEFAULT_SMPL_UUID;
	context_arg_t arg;
	char byte[sizeof(pfm_msg_t) + 1];
	void *buffer;
	size_t size;
	pid_t child;
	int fd, copy, status;

	memset(&arg, 0, sizeof(arg));
	memcpy(arg.ctx.ctx_smpl_buf_id, uuid, sizeof(uuid));
	arg.format.buf_size = 3 * 4096;
	CALL(perfmonctl(0, PFM_CREATE_CONTEXT, &arg, 1));
	fd = arg.ctx.ctx_fd;
	size = arg.ctx.ctx_smpl_buf_size;

	refuses(fd, size, PROT_READ | PROT_WRITE, MAP_SHARED, 0);
	refuses(fd, size, PROT_WRITE, MAP_SHARED, 0);
	refuses(fd, size, PROT_READ | PROT_EXEC, MAP_SHARED, 0);
	refuses(fd, size, PROT_NONE, MAP_SHARED, 0);
	refuses(fd, size, PROT_READ, MAP_PRIVATE, 0);
	refuses(fd, size, PROT_READ, MAP_SHARED | MAP_LOCKED, 0);
	refuses(fd, size, PROT_READ, MAP_SHARED | MAP_GROWSDOWN, 0);
	refuses(fd, size, PROT_READ, MAP_SHARED | MAP_EXECUTABLE, 0);
	refuses(fd, size, PROT_READ, MAP_SHARED, 4096);
	refuses(fd, size - 4096, PROT_READ, MAP_SHARED, 0);
	refuses(fd, size + 4096, PROT_READ, MAP_SHARED, 0);
	refuses(create(0), 4096, PROT_READ, MAP_SHARED, 0);

	buffer = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
	MUST(buffer != MAP_FAILED, "errno %d", errno);
	refuses(fd, size, PROT_READ, MAP_SHARED, 0);
	MUST(((pfm_default_smpl_hdr_t *)buffer)->hdr_buf_size == size, "the header is not there");

	child = fork();
	if (child == 0) {
		/* Inherited, and read-only. */
		MUST(((pfm_default_smpl_hdr_t *)buffer)->hdr_buf_size == size, "not inherited");
		refuses(fd, size, PROT_READ, MAP_SHARED, 0);
		*(volatile char *)buffer = 1;
		_exit(0);
	}
	MUST(waitpid(child, &status, 0) == child, "errno %d", errno);
	MUST(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV, "a write ended with %#x", status);
	MUST(mprotect(buffer, size, PROT_READ | PROT_WRITE) == -1, "it can be made writable");

	MUST(munmap(buffer, size) == 0, "errno %d", errno);
	buffer = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
	MUST(buffer != MAP_FAILED, "once unmapped, it cannot be mapped again: errno %d", errno);

	/* The queue is read in whole messages, and nothing else. */
	MUST(read(fd, byte, sizeof(byte)) == -1 && errno == EINVAL, "errno %d", errno);
	MUST(read(fd, byte, 1) == -1 && errno == EINVAL, "errno %d", errno);
	MUST(write(fd, byte, sizeof(pfm_msg_t)) == -1 && errno == EINVAL, "errno %d", errno);
	MUST(lseek(fd, 0, SEEK_SET) == -1 && errno == EINVAL, "errno %d", errno);
	MUST(fcntl(fd, F_SETFL, O_NONBLOCK) == 0, "errno %d", errno);
	MUST(read(fd, byte, sizeof(pfm_msg_t)) == -1 && errno == EAGAIN, "errno %d", errno);

	copy = dup(fd);
	MUST(copy >= 0, "errno %d", errno);
	MUST(close(fd) == 0 && is_mapped(buffer, size), "a duplicate is open, but the mapping is gone");
	FAILS(perfmonctl(copy, PFM_UNLOAD_CONTEXT, NULL, 0), EBUSY);
	MUST(read(copy, byte, 1) == -1 && errno == EINVAL, "errno %d", errno);
	MUST(close(copy) == 0, "errno %d", errno);
	MUST(!is_mapped(buffer, size), "the mapping outlives the context");
	return 0;
}
