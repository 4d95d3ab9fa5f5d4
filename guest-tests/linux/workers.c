/* Three threads that wait until somebody writes to the FIFO ARGV[1], and then do one, two and three
   million turns of the same loop of two instructions. Without an argument: says by a port that the
   machine is ready. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/io.h>
#include <unistd.h>

#define THREADS 3
#define TURNS 1000000L

static int go[2];

static void *work(void *turns)
{
	long left = (long)turns;
	char byte;

	if (read(go[0], &byte, 1) != 1)
		return NULL;
	__asm__ volatile("1: dec %0\n\tjnz 1b" : "+r"(left));
	return NULL;
}

int main(int argc, char **argv)
{
	pthread_t threads[THREADS];

	if (argc == 1) {
		if (ioperm(0x7f0, 1, 1))
			return 1;
		outb(1, 0x7f0);
		return 0;
	}
	if (argc != 2 || pipe(go))
		return 1;
	for (long n = 0; n < THREADS; n++)
		if (pthread_create(&threads[n], NULL, work, (void *)((n + 1) * TURNS)))
			return 1;
	if (open(argv[1], O_RDONLY) < 0 || write(go[1], "abc", THREADS) != THREADS)
		return 1;
	for (int n = 0; n < THREADS; n++)
		pthread_join(threads[n], NULL);
	return 0;
}
