/*
 * Prints the error that each command has, one "COMMAND errno" a line: with the
 * argument "nobody" as things are; with "closed" for a context that is closed,
 * "file" for a descriptor that is no context, "address" for an argument where
 * no memory is, "stranger" as a user who is neither root nor the VM's.
 */
#include "spec.h"

#include <grp.h>

static const struct {
	const char *name;
	int number;
	int nargs;
} commands[] = {
#define COMMAND(name, nargs) { #name, name, nargs }
	COMMAND(PFM_CREATE_CONTEXT, 1),	 COMMAND(PFM_WRITE_PMCS, 1),
	COMMAND(PFM_WRITE_PMDS, 1),	 COMMAND(PFM_READ_PMDS, 1),
	COMMAND(PFM_START, 1),		 COMMAND(PFM_STOP, 0),
	COMMAND(PFM_LOAD_CONTEXT, 1),	 COMMAND(PFM_UNLOAD_CONTEXT, 0),
	COMMAND(PFM_RESTART, 0),	 COMMAND(PFM_CREATE_EVTSETS, 1),
	COMMAND(PFM_DELETE_EVTSETS, 1),	 COMMAND(PFM_GETINFO_EVTSETS, 1),
	COMMAND(PFM_GETINFO_PMCS, 1),	 COMMAND(PFM_GETINFO_PMDS, 1),
	COMMAND(PFM_SET_CONFIG, 1),	 COMMAND(PFM_GET_CONFIG, 1),
};

int main(int argc, char **argv)
{
	static char zeros[4096] __attribute__((aligned(16)));
	const char *how = argc == 2 ? argv[1] : "";
	pfarg_config_t config;
	void *argument = zeros;
	int fd = -1;
	size_t i;

	memset(&config, 0, sizeof(config));
	if (!strcmp(how, "closed")) {
		int low = create(0);

		/* A number that the next context does not get. */
		fd = fcntl(low, F_DUPFD, 500);
		MUST(close(low) == 0 && close(fd) == 0, "errno %d", errno);
	} else if (!strcmp(how, "file")) {
		fd = open("/dev/null", O_RDONLY);
	} else if (!strcmp(how, "address")) {
		fd = create(0);
		argument = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		MUST(argument != MAP_FAILED, "errno %d", errno);
	} else if (!strcmp(how, "stranger")) {
		MUST(setgroups(0, NULL) == 0, "errno %d", errno);
		MUST(setresgid(65534, 65534, 65534) == 0, "errno %d", errno);
		MUST(setresuid(65534, 65534, 65534) == 0, "errno %d", errno);
	} else if (strcmp(how, "nobody")) {
		fprintf(stderr, "%s: no such way\n", how);
		return 2;
	}
	for (i = 0; i < sizeof(commands) / sizeof(*commands); i++) {
		int result;

		memset(zeros, 0, sizeof(zeros));
		if (commands[i].number == PFM_SET_CONFIG && !pfm_get_config(&config))
			memcpy(zeros, &config, sizeof(config));
		result = perfmonctl(fd, commands[i].number, argument, commands[i].nargs);
		printf("%s %d\n", commands[i].name, result == -1 ? errno : 0);
	}
	return 0;
}
