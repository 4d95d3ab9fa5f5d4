/* Counts with a perf event that the host's arbiter has opened: `event-holder SOCKET LEASE CONFIG`
 * asks for one of the lease's counters for its own thread, and works for a while. With a CPU as
 * the fourth word it asks for what runs there in the lease's control group, and sleeps. It prints
 *   counted COUNT, whole|in part
 * or what the arbiter has answered instead. It needs no right of its own. */
#define _GNU_SOURCE
#include <linux/perf_event.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static int fail(const char *what)
{
	perror(what);
	return 1;
}

int main(int argc, char **argv)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	char request[256], reply[4096], of[32];
	char control[CMSG_SPACE(sizeof(int))];
	struct iovec part = { .iov_base = reply, .iov_len = sizeof(reply) - 1 };
	struct msghdr message = {
		.msg_iov = &part, .msg_iovlen = 1,
		.msg_control = control, .msg_controllen = sizeof(control),
	};
	/* The count, and how long the event was enabled and counted. */
	unsigned long long words[3];
	volatile unsigned long work;
	struct cmsghdr *handed;
	ssize_t length;
	int peer, event;

	if (argc != 4 && argc != 5)
		return fprintf(stderr, "usage: event-holder SOCKET LEASE CONFIG [CPU]\n"), 2;
	if (argc == 5)
		snprintf(of, sizeof(of), "\"cpu\": %s", argv[4]);
	else
		snprintf(of, sizeof(of), "\"thread\": %d", gettid());
	snprintf(address.sun_path, sizeof(address.sun_path), "%s.events", argv[1]);
	peer = socket(AF_UNIX, SOCK_SEQPACKET, 0);
	if (peer < 0 || connect(peer, (struct sockaddr *)&address, sizeof(address)))
		return fail(address.sun_path);
	length = snprintf(request, sizeof(request),
			  "{\"lease\": %s, \"counter\": 0, %s, \"config\": %s}",
			  argv[2], of, argv[3]);
	if (send(peer, request, length, 0) != length)
		return fail("send");
	length = recvmsg(peer, &message, 0);
	if (length <= 0)
		return fail("recvmsg");
	reply[length] = 0;
	handed = CMSG_FIRSTHDR(&message);
	if (!handed || handed->cmsg_type != SCM_RIGHTS)
		return puts(reply), 1;
	memcpy(&event, CMSG_DATA(handed), sizeof(event));
	if (ioctl(event, PERF_EVENT_IOC_ENABLE, 0))
		return fail("ioctl");
	if (argc == 5)
		sleep(2);
	else
		for (work = 0; work < 3000000; work++)
			;
	if (read(event, words, sizeof(words)) != sizeof(words))
		return puts("not counted"), 1;
	printf("counted %llu, %s\n", words[0], words[1] == words[2] ? "whole" : "in part");
	return 0;
}
