/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Access to counter reservations (docs/reference/pcr.md): finding them, their MSRs with a
 * cookie, and what pcr_full.ko exports to kernel users of a private counter.
 */
#ifndef PCR_H
#define PCR_H

#include <linux/bits.h>
#include <linux/errno.h>
#include <linux/minmax.h>
#include <linux/types.h>
#include <asm/asm.h>
#include <asm/cpufeature.h>
#include <asm/processor.h>

#include "umpire_pcr.h"

#define PCR_PROGRAMMABLE 32		/* positions below are programmable counters */

/* What CPUID says of the reservations. */
struct pcr_block {
	u32 base;			/* first MSR */
	unsigned int programmable;	/* number of programmable counters */
	unsigned long counters;		/* a bit for each position that there is */
};

/* A private counter: its MSRs take this cookie and no other. */
struct pcr_grant {
	unsigned int counter;		/* position */
	u64 cookie;
};

int pcr_acquire_counter(struct pcr_grant *grant);
int pcr_release_counter(const struct pcr_grant *grant);

/*
 * The cookie travels in RSI of the very instruction: an interrupt before it
 * could neither see nor change it. Both return 0, or -EIO after a #GP.
 */
static inline int pcr_wrmsr_safe(u32 msr, u64 value, u64 cookie)
{
	int err;

	asm volatile("1: wrmsr; xor %[err], %[err]\n"
		     "2: " _ASM_EXTABLE_TYPE_REG(1b, 2b, EX_TYPE_WRMSR_SAFE, %[err])
		     : [err] "=a" (err)
		     : "c" (msr), "0" ((u32)value), "d" ((u32)(value >> 32)), "S" (cookie)
		     : "memory");
	return err;
}

static inline int pcr_rdmsr_safe(u32 msr, u64 *value, u64 cookie)
{
	u32 low, high;
	int err;

	asm volatile("1: rdmsr; xor %[err], %[err]\n"
		     "2: " _ASM_EXTABLE_TYPE_REG(1b, 2b, EX_TYPE_RDMSR_SAFE, %[err])
		     : [err] "=r" (err), "=a" (low), "=d" (high)
		     : "c" (msr), "S" (cookie));
	*value = (u64)high << 32 | low;
	return err;
}

/* Finds the reservations by CPUID; -ENODEV if there are none of this version. */
static inline int pcr_find(struct pcr_block *pcr)
{
	u32 version, features, sizes, fixed, block = 0;

	if (boot_cpu_has(X86_FEATURE_HYPERVISOR))
		block = hypervisor_cpuid_base("UmpireUmpire", 2);
	if (!block || !(cpuid_ecx(block + 1) & UMPIRE_PCR_CPUID_FEATURES_ECX_PCR))
		return -ENODEV;
	cpuid(block + 2, &version, &pcr->base, &features, &sizes);
	/* Both sizes have 8 bits; there are 32 positions for either kind. */
	pcr->programmable = min_t(u32, sizes & 0xff, PCR_PROGRAMMABLE);
	fixed = min_t(u32, sizes >> 8 & 0xff, BITS_PER_LONG - PCR_PROGRAMMABLE);
	pcr->counters = (BIT_ULL(pcr->programmable) - 1) | (BIT_ULL(fixed) - 1) << PCR_PROGRAMMABLE;
	return version == UMPIRE_PCR_VERSION ? 0 : -ENODEV;
}

#endif /* PCR_H */
