// Tells where it is, what it has mapped and what its stack is, some calls deep.
#include <alloca.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define APART __attribute__((noinline, noclone))

static volatile long sink;

APART static long leaf(long seed)
{
    unsigned long ip, sp, bp;
    char text[256];
    ssize_t len;
    int maps = open("/proc/self/maps", O_RDONLY);
    __asm__ volatile("lea (%%rip), %0\n\tmov %%rsp, %1\n\tmov %%rbp, %2"
                     : "=r"(ip), "=r"(sp), "=r"(bp));
    dprintf(1, "%lx %lx %lx\n", ip, sp, bp);
    while ((len = read(maps, text, sizeof text)) > 0)
        write(1, text, (size_t)len);
    dprintf(1, "stack\n");
    for (unsigned long at = sp; at < sp + 8192 && write(1, (void *)at, 8) == 8; at += 8) {}
    sink = seed;
    return seed + text[seed & 255];
}

// Its frame has a size that only the frame pointer's register tells.
APART static long middle(long size)
{
    char *room = alloca((size_t)size);
    memset(room, 1, (size_t)size);
    return leaf(size) + room[size / 2];
}

static void handler(int number)
{
    sink = middle(number * 16);
}

// All registers that are kept are in use, that of the frame pointer, too.
APART static long outer(long a, long b, long c, long d, int how)
{
    long e = a * b, f = c * d, g = a ^ d;
    for (int i = 0; i < 3; i++) {
        e += sink;
        f ^= e;
        g += f;
    }
    if (how == 1) {
        raise(SIGUSR1);
        sink = 2;
    } else {
        sink = middle(a * 16);
    }
    return a + b + c + d + e + f + g;
}

APART static long again(long depth)
{
    return depth == 0 ? outer(1, 2, 3, 4, 0) : again(depth - 1) + sink;
}

int main(int argc, char **argv)
{
    long found;
    signal(SIGUSR1, handler);
    if (argc > 1 && strcmp(argv[1], "deep") == 0)
        found = again(300);
    else
        found = outer(3, 4, 5, 6, argc > 1);
    sink = found;
    return 0;
}
