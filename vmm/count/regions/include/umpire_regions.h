/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Marks parts of a program, which umpire count and Callgrind then count apart: Valgrind's client
 * requests, under their names, for C and C++. docs/guide/count.md says what becomes of them;
 * `umpire count --print-header` prints this file.
 *
 *     CALLGRIND_ZERO_STATS;                  a region begins
 *     work();
 *     CALLGRIND_DUMP_STATS_AT("work");       it ends, and is called so
 *
 * A request is some fifteen instructions that do nothing where nobody looks on. Nothing is to be
 * linked. There are none on other processors than x86-64, with other compilers than GCC and
 * Clang, and where NVALGRIND is defined. Include this file or Valgrind's own callgrind.h; where
 * that one comes first, its macros are left as they are.
 */
#ifndef UMPIRE_REGIONS_H
#define UMPIRE_REGIONS_H

#if defined(__x86_64__) && !defined(__ILP32__) && defined(__GNUC__) && !defined(NVALGRIND)

/* The answer of whoever looks on, or `otherwise`. */
static __inline__ unsigned long
umpire_regions_ask(unsigned long otherwise, unsigned long question, const char *text)
{
    unsigned long words[6];
    unsigned long answer = otherwise;

    words[0] = question;
    words[1] = (unsigned long)text;
    words[2] = words[3] = words[4] = words[5] = 0;
    /* RDI is turned by 128 bits, so it is what it was. */
    __asm__ __volatile__("rolq $3, %%rdi\n\t"
                         "rolq $13, %%rdi\n\t"
                         "rolq $61, %%rdi\n\t"
                         "rolq $51, %%rdi\n\t"
                         "xchgq %%rbx, %%rbx"
                         : "+d"(answer)
                         : "a"(&words[0])
                         : "cc", "memory");
    return answer;
}

#else

static __inline__ unsigned long
umpire_regions_ask(unsigned long otherwise, unsigned long question, const char *text)
{
    (void)question;
    (void)text;
    return otherwise;
}

#endif

/* 0 on a processor, and under umpire count. */
#ifndef RUNNING_ON_VALGRIND
#define RUNNING_ON_VALGRIND ((unsigned int)umpire_regions_ask(0, 0x1001ul, (const char *)0))
#endif

#ifndef CALLGRIND_DUMP_STATS

/* Callgrind's requests are `CT` and a number. */
#define UMPIRE_REGIONS_CALLGRIND(number, text) \
    ((void)umpire_regions_ask(0, 0x43540000ul + (number), (text)))

/* A region without a name ends, and the next one begins. */
#define CALLGRIND_DUMP_STATS UMPIRE_REGIONS_CALLGRIND(0, (const char *)0)
/* Forgets what was counted since the last region: one begins here. */
#define CALLGRIND_ZERO_STATS UMPIRE_REGIONS_CALLGRIND(1, (const char *)0)
/* Counts what this thread executes from now on, or does so no longer. */
#define CALLGRIND_TOGGLE_COLLECT UMPIRE_REGIONS_CALLGRIND(2, (const char *)0)
/* A region of this name ends, and the next one begins. */
#define CALLGRIND_DUMP_STATS_AT(name) UMPIRE_REGIONS_CALLGRIND(3, (name))
/* Begins to count, in all threads. */
#define CALLGRIND_START_INSTRUMENTATION UMPIRE_REGIONS_CALLGRIND(4, (const char *)0)
/* Counts no longer, in all threads. */
#define CALLGRIND_STOP_INSTRUMENTATION UMPIRE_REGIONS_CALLGRIND(5, (const char *)0)

#endif

#endif
