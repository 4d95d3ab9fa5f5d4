/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * libcpc for programs that were written for Solaris, after its manual pages cpc_bind_event(3CPC),
 * cpc_strtoevent(3CPC), cpc_getcpuver(3CPC), cpc_event(3CPC) and their kin: docs/guide/libcpc.md. Link
 * with -lumpire_cpc.
 *
 * An LWP is a vCPU of the VM that the environment variable UMPIRE_VCPU names (SOCKET:VCPU,
 * NAME:VCPU or PID:VCPU); where there is no such variable, it is the calling thread, counted by
 * the kernel's perf events.
 *
 * Functions that fail return -1 (cpc_strtoevent: 1; cpc_eventtostr: NULL) and set errno;
 * cpc_last_subcode() and cpc_last_error() say more.
 */
#ifndef LIBCPC_H
#define LIBCPC_H

/* The pages' examples count on errno, strerror() and bzero() without asking for them. */
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <strings.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What Linux does not have. Define CPC_NO_SOLARIS_TYPES if the program has its own. */
#ifndef CPC_NO_SOLARIS_TYPES
typedef unsigned int uint_t;
typedef long long hrtime_t;
/* Where gregs[] of a mcontext_t has the program counter and the stack pointer (x86-64). */
#ifndef PC
#define PC 16
#endif
#ifndef USP
#define USP 15
#endif
/* cpc_lwp_self(), which leaves errno and cpc_last_error() as they are. */
#ifndef _lwp_self
int _lwp_self(void);
#endif
#endif

#define CPC_VER_NONE 0
#define CPC_VER_CURRENT 1

/* Flags of cpc_bind_event(). */
#define CPC_BIND_LWP_INHERIT 0x1 /* LWPs that start later get the same, from 0 on. */
#define CPC_BIND_EMT_OVF 0x2	 /* One SIGEMT at the first overflow; counters then stand still. */

/*
 * Linux has no SIGEMT: this is a real-time signal. The library keeps signal 62 for itself.
 * si_addr is the program counter at the overflow: the guest's where an LWP is a vCPU.
 */
#ifndef SIGEMT
#define SIGEMT 63
#endif
#define EMT_CPCOVF 1

/* Most counters; cpc_getnpic() says how many of them a processor has. */
#define CPC_MAX_PIC 8

/* What is counted, and what was counted. */
typedef struct {
	int ce_cpuver;			/* the processor it is for */
	hrtime_t ce_hrt;		/* when it was read: ns of CLOCK_MONOTONIC */
	uint64_t ce_tsc;		/* ticks of the time stamp counter that the LWP ran for */
	uint64_t ce_pic[CPC_MAX_PIC];	/* counters, 64 bits each */
	uint64_t ce_pes[CPC_MAX_PIC];	/* what each counts, an event select; 0: nothing */
} cpc_event_t;

/* What cpc_last_subcode() returns. */
#define CPC_NO_SUBCODE 0
#define CPC_INVALID_EVENT 1		/* the processor does not have the event */
#define CPC_INVALID_PICNUM 2		/* there is no such counter */
#define CPC_INVALID_ATTRIBUTE 3		/* there is no such attribute, or not for this event */
#define CPC_ATTRIBUTE_OUT_OF_RANGE 4	/* an attribute's value is not possible */
#define CPC_RESOURCE_UNAVAIL 5		/* no counter is left, or somebody has taken them */
#define CPC_PIC_NOT_CAPABLE 6		/* nothing here counts the event */
#define CPC_REQ_INVALID_FLAGS 7		/* flags that there are not */
#define CPC_CONFLICTING_REQS 8		/* what was asked for does not go together */
#define CPC_ATTR_REQUIRES_PRIVILEGE 9	/* the user may not */
#define CPC_PBIND_FAILED 10		/* there is no such LWP, or it cannot be reached */
#define CPC_HV_NO_ACCESS 11		/* the VM's event filter denies the event */

uint_t cpc_version(uint_t version);

/* The processor; -1: it has no counters, or is not known. */
int cpc_getcpuver(void);
const char *cpc_getcciname(int cpuver);
const char *cpc_getcpuref(int cpuver);
const char *cpc_getusage(int cpuver);
uint_t cpc_getnpic(int cpuver);
void cpc_walk_names(int cpuver, int regno, void *arg,
		    void (*action)(void *arg, int regno, const char *name, uint8_t bits));

/* ENOSYS: there are no counters. EAGAIN: somebody counts system-wide. */
int cpc_access(void);

int cpc_strtoevent(int cpuver, const char *spec, cpc_event_t *event);
/* To be freed by free(3). */
char *cpc_eventtostr(cpc_event_t *event);

/*
 * Binds, after it has unbound what was bound; NULL only unbinds.
 * EAGAIN: somebody counts system-wide, or has the counters. EACCES: the event filter, or the
 * user's rights. ENOTSUP: this processor does not count the event, nobody here does, or not
 * with this flag. EINVAL: flags or event make no sense. The sub-code says which.
 */
int cpc_bind_event(cpc_event_t *event, int flags);
/*
 * EINVAL: nothing is bound. EAGAIN: what was bound is invalid, as somebody counts system-wide or
 * the VM has ended, until cpc_rele() or the next bind.
 */
int cpc_take_sample(cpc_event_t *event);
int cpc_rele(void);

int cpc_count_usr_events(int enable);
int cpc_count_sys_events(int enable);

void cpc_event_accum(cpc_event_t *accum, cpc_event_t *event);
void cpc_event_diff(cpc_event_t *diff, cpc_event_t *after, cpc_event_t *before);

/* Where messages go; NULL: to stderr, as at first. */
typedef void(cpc_errfn_t)(const char *fn, const char *fmt, va_list ap);
void cpc_seterrfn(cpc_errfn_t *errfn);

/* Umpire's own. */

/* Why the calling thread's last call failed: one line, and CPC_... */
const char *cpc_last_error(void);
int cpc_last_subcode(void);
/* The LWP that the calling thread's calls are about: a vCPU, or a number for the thread. */
int cpc_lwp_self(void);
/* The calling thread's calls are about this vCPU from now on. */
int cpc_lwp_switch(int vcpu);

#ifdef __cplusplus
}
#endif

#endif
