/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The arbiters' way to the registers: MSRs of the reservations on some CPUs or
 * on all, and the counter behind a legacy register. It decides nothing.
 */
#ifndef PCR_ACCESS_H
#define PCR_ACCESS_H

#include <linux/cpumask.h>
#include <linux/random.h>
#include <linux/smp.h>
#include <asm/msr.h>
#include <asm/perf_event.h>

#include "pcr.h"

enum { PCR_COUNTER, PCR_SELECT };	/* the kernel's two kinds of reservation */

#define PCR_NOT_OURS	(-1)		/* of a counter that a lower layer has */
#define PCR_UNKNOWN	(-2)		/* of a register that is not a counter's */

static struct pcr_block pcr;
static u64 secret;			/* management cookie of all our counters */
static int pcr_map[PCR_PROGRAMMABLE];	/* legacy index to position */
static struct cpumask pcr_refused;	/* CPUs that answered a write by #GP */

/* A fresh cookie, never the default one. */
static u64 pcr_cookie(void)
{
	return 1 + get_random_u64() % UMPIRE_PCR_COOKIE_MASK;
}

/* The register that this kernel has for a legacy index. */
static unsigned int pcr_msr(int kind, unsigned int index)
{
	if (boot_cpu_has(X86_FEATURE_ARCH_PERFMON))
		return index + (kind ? MSR_ARCH_PERFMON_EVENTSEL0 : MSR_ARCH_PERFMON_PERFCTR0);
	if (boot_cpu_has(X86_FEATURE_PERFCTR_CORE))
		return 2 * index + (kind ? MSR_F15H_PERF_CTL : MSR_F15H_PERF_CTR);
	return index + (kind ? MSR_K7_EVNTSEL0 : MSR_K7_PERFCTR0);
}

/* The counter that a register belongs to, by any of its names. */
static int pcr_position(unsigned int msr)
{
	unsigned int i;

	for (i = 0; i < pcr.programmable; i++)
		if (msr == pcr_msr(PCR_COUNTER, i) || msr == pcr_msr(PCR_SELECT, i) ||
		    msr == MSR_IA32_PMC0 + i ||
		    (i < 4 && (msr == MSR_K7_EVNTSEL0 + i || msr == MSR_K7_PERFCTR0 + i)))
			return pcr_map[i];
	return PCR_UNKNOWN;
}

/* The position that a legacy index stands for on this CPU. */
static int pcr_mapped(unsigned int index)
{
	u64 value;

	if (rdmsrl_safe(pcr.base + UMPIRE_PCR_MSR_LEGACY_MAP + index, &value) ||
	    value >= PCR_PROGRAMMABLE)
		return PCR_NOT_OURS;
	return value;
}

/* Reads the map of the first CPU; notes another one that has a different one. */
static void pcr_map_here(void *first)
{
	unsigned int i;

	for (i = 0; i < pcr.programmable; i++) {
		int position = pcr_mapped(i);

		if (first)
			pcr_map[i] = position;
		else if (pcr_map[i] != position)
			cpumask_set_cpu(smp_processor_id(), &pcr_refused);
	}
}

/* Fills pcr_map, unless a name stands for another counter on another CPU. */
static bool pcr_read_map(void)
{
	cpumask_clear(&pcr_refused);
	smp_call_function_single(cpumask_first(cpu_online_mask), pcr_map_here, pcr_map, true);
	on_each_cpu(pcr_map_here, NULL, true);
	return cpumask_empty(&pcr_refused);
}

struct pcr_write {
	u32 msr;
	u64 value, cookie;
};

/*
 * What a master alone may do with a lock it does when asked: it takes the cookie
 * that was to be set, or gives back for the one that was presented. Of a counter
 * that is free or our own it has its answer at once; nothing else is waited for.
 */
static int pcr_ask_master(const struct pcr_write *write)
{
	u64 n = write->msr - (pcr.base + UMPIRE_PCR_MSR_MANAGEMENT_KEY);
	u64 cookie = write->value ?: write->cookie;
	u64 op = write->value ? UMPIRE_PCR_REQUEST_RESERVE : UMPIRE_PCR_REQUEST_RELEASE;
	u64 reason, answer;

	if (n >= UMPIRE_PCR_MSR_ACCESS_KEY - UMPIRE_PCR_MSR_MANAGEMENT_KEY ||
	    rdmsrl_safe(pcr.base + UMPIRE_PCR_MSR_REFUSAL, &reason) ||
	    reason != UMPIRE_PCR_REASON_MASTER)
		return -EIO;
	op |= UMPIRE_PCR_REQUEST_POSITION | n << UMPIRE_PCR_REQUEST_WHICH_SHIFT;
	if (pcr_wrmsr_safe(pcr.base + UMPIRE_PCR_MSR_REQUEST, op, cookie) ||
	    rdmsrl_safe(pcr.base + UMPIRE_PCR_MSR_ANSWER, &answer))
		return -EIO;
	answer &= UMPIRE_PCR_ANSWER_STATE_MASK;
	if (answer == UMPIRE_PCR_ANSWER_PENDING)
		pcr_wrmsr_safe(pcr.base + UMPIRE_PCR_MSR_REQUEST, UMPIRE_PCR_REQUEST_WITHDRAW, cookie);
	return answer == UMPIRE_PCR_ANSWER_GRANTED ? 0 : -EBUSY;
}

/* Writes on this CPU. */
static int pcr_write_one(const struct pcr_write *write)
{
	return pcr_wrmsr_safe(write->msr, write->value, write->cookie) ? pcr_ask_master(write) : 0;
}

static void pcr_write_here(void *data)
{
	if (pcr_write_one(data))
		cpumask_set_cpu(smp_processor_id(), &pcr_refused);
}

/* Writes a register of counter n on some CPUs. */
static void pcr_write(const struct cpumask *cpus, u32 reg, unsigned int n, u64 value, u64 cookie)
{
	struct pcr_write write = { pcr.base + reg + n, value, cookie };

	on_each_cpu_mask(cpus, pcr_write_here, &write, true);
}

/*
 * What is in force of our counters: CONTROL and ACCESS_KEY. It is noted before it
 * is written, as CPUs come up by it at any time (pcr_keep.h).
 */
static u64 pcr_in_force[2][BITS_PER_LONG];

static void pcr_manage(u32 reg, unsigned int n, u64 value)
{
	if (reg != UMPIRE_PCR_MSR_MANAGEMENT_KEY)
		WRITE_ONCE(pcr_in_force[reg == UMPIRE_PCR_MSR_CONTROL][n], value);
	pcr_write(cpu_online_mask, reg, n, value, secret);
}

#endif /* PCR_ACCESS_H */
