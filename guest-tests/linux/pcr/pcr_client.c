// SPDX-License-Identifier: GPL-2.0-only
/*
 * A kernel user of pcr_full.ko: counts cycles on each CPU with a counter of its
 * own, for as long as it is loaded, and says what it and others can see of it.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/delay.h>
#include <linux/module.h>
#include <linux/smp.h>
#include <asm/perf_event.h>

#include "pcr.h"

#define CYCLES_INTEL	0x3c
#define CYCLES_AMD	0x76

static struct pcr_block pcr;
static struct pcr_grant grant;

static u64 client_read(u32 reg, u64 cookie)
{
	u64 value;

	return pcr_rdmsr_safe(pcr.base + reg + grant.counter, &value, cookie) ? ~0ULL : value;
}

static void client_start(void *unused)
{
	bool intel = boot_cpu_has(X86_FEATURE_ARCH_PERFMON);
	u64 select = ARCH_PERFMON_EVENTSEL_ENABLE | ARCH_PERFMON_EVENTSEL_OS |
		     ARCH_PERFMON_EVENTSEL_USR | (intel ? CYCLES_INTEL : CYCLES_AMD);

	if (pcr_wrmsr_safe(pcr.base + UMPIRE_PCR_MSR_COUNTER + grant.counter, 0, grant.cookie) ||
	    pcr_wrmsr_safe(pcr.base + UMPIRE_PCR_MSR_SELECT + grant.counter, select, grant.cookie))
		pr_err("CPU %u does not take our cookie\n", smp_processor_id());
}

static void client_show(void *unused)
{
	u64 first = client_read(UMPIRE_PCR_MSR_COUNTER, grant.cookie), second;

	mdelay(2);
	second = client_read(UMPIRE_PCR_MSR_COUNTER, grant.cookie);
	pr_info("CPU %u: PMC%u counted %llu cycles in 2 ms; with the default cookie it reads %llu\n",
		smp_processor_id(), grant.counter, second - first,
		client_read(UMPIRE_PCR_MSR_COUNTER, UMPIRE_PCR_DEFAULT_COOKIE));
}

static int __init client_init(void)
{
	int err = pcr_find(&pcr) ?: pcr_acquire_counter(&grant);

	if (err) {
		pr_info("no private counter: error %d\n", err);
		return err;
	}
	on_each_cpu(client_start, NULL, true);
	on_each_cpu(client_show, NULL, true);
	return 0;
}

static void __exit client_exit(void)
{
	struct pcr_grant forged = { grant.counter, grant.cookie ^ 1 };

	pr_info("release with a forged cookie: error %d\n", pcr_release_counter(&forged));
	pr_info("release: error %d\n", pcr_release_counter(&grant));
}

module_init(client_init);
module_exit(client_exit);
MODULE_DESCRIPTION("Kernel user of a private performance counter");
MODULE_LICENSE("GPL");
