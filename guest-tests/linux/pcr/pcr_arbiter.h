/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What the three arbiters share: taking the counters that can be had on every
 * CPU, and following the kernel's four calls that reserve and release them.
 *
 * The calls are hooked by kretprobes. On x86 the handler of a return probe runs
 * with preemption off and with interrupts as the caller had them (the kernel's
 * Documentation/trace/kprobes.rst). All callers in 6.1 are in process context
 * with interrupts on, so the handler may send an IPI to every CPU and wait for
 * it. It has to wait: the caller programs the counter as soon as the call is
 * over. A work item would open the lock too late.
 *
 * As giving a counter back clears it, the module cannot be unloaded while the
 * kernel's users hold one.
 */
#ifndef PCR_ARBITER_H
#define PCR_ARBITER_H

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cpu.h>
#include <linux/kprobes.h>
#include <linux/module.h>
#include <linux/string.h>
#include <asm/nmi.h>

#include "pcr_keep.h"

/* Each arbiter's own: brings the lock of a counter in line with pcr_owner. */
static void pcr_update_lock(unsigned int counter);

static unsigned long pcr_owner[2];	/* by kind: positions that kernel users hold */
static bool pcr_ready;			/* all of the above is set up */

/* The control word of our counters: firmware is kept out. */
static u64 pcr_control = UMPIRE_PCR_CONTROL_INITIAL &
	~(UMPIRE_PCR_CONTROL_MANAGE_FIRMWARE | UMPIRE_PCR_CONTROL_ACCESS_FIRMWARE);

static bool fault;
module_param(fault, bool, 0444);
MODULE_PARM_DESC(fault, "an access with a wrong cookie raises #GP (default: it is dropped)");

/* Whether kernel users have reserved a counter and its event select. */
static inline bool pcr_is_owned(unsigned int counter)
{
	return READ_ONCE(pcr_owner[PCR_COUNTER]) & READ_ONCE(pcr_owner[PCR_SELECT]) & BIT(counter);
}

/*
 * Each reservation holds the module, so that it cannot go and clear the counter.
 * Once it is going there are no more reservations.
 */
static bool pcr_own(int kind, unsigned int n)
{
	if (!try_module_get(THIS_MODULE))
		return false;
	if (!test_and_set_bit(n, &pcr_owner[kind]))
		return true;
	module_put(THIS_MODULE);
	return false;
}

static void pcr_disown(int kind, unsigned int n)
{
	if (test_and_clear_bit(n, &pcr_owner[kind]))
		module_put(THIS_MODULE);
}

static bool pcr_is_release(struct kretprobe_instance *ri)
{
	return strstarts(get_kretprobe(ri)->kp.symbol_name, "release");
}

static int pcr_kind(struct kretprobe_instance *ri)
{
	return strstr(get_kretprobe(ri)->kp.symbol_name, "evntsel") ? PCR_SELECT : PCR_COUNTER;
}

/*
 * Before a call. A release is noted here, before the kernel's own bit is cleared:
 * from then on another CPU may reserve the counter.
 */
static int pcr_called(struct kretprobe_instance *ri, struct pt_regs *regs)
{
	unsigned int msr = regs_get_kernel_argument(regs, 0);
	int n = pcr_position(msr);

	*(unsigned int *)ri->data = msr;
	if (!pcr_ready || n == PCR_UNKNOWN)
		return 1;		/* leave this call alone */
	if (n >= 0 && pcr_is_release(ri))
		pcr_disown(pcr_kind(ri), n);
	return 0;
}

/*
 * After a call. What is not ours is refused by undoing the reservation, and so is
 * what has an owner by our books only: the kernel keeps none of IA32_A_PMCn. (A
 * call out of a handler does not meet the probes again.)
 */
static int pcr_returned(struct kretprobe_instance *ri, struct pt_regs *regs)
{
	unsigned int msr = *(unsigned int *)ri->data;
	int n = pcr_position(msr);

	if (!pcr_is_release(ri) && !regs_return_value(regs))
		return 0;		/* the kernel itself has refused */
	if (!pcr_is_release(ri) && (n < 0 || !pcr_own(pcr_kind(ri), n))) {
		(pcr_kind(ri) ? release_evntsel_nmi : release_perfctr_nmi)(msr);
		regs_set_return_value(regs, 0);
	} else if (n >= 0 && !WARN_ON_ONCE(irqs_disabled())) {
		pcr_update_lock(n);
	}
	return 0;
}

#define PCR_PROBE(call)									\
	(&(struct kretprobe) { .kp.symbol_name = call, .data_size = sizeof(unsigned int),	\
			       .entry_handler = pcr_called, .handler = pcr_returned })
static struct kretprobe *pcr_probes[] = {
	PCR_PROBE("reserve_perfctr_nmi"), PCR_PROBE("release_perfctr_nmi"),
	PCR_PROBE("reserve_evntsel_nmi"), PCR_PROBE("release_evntsel_nmi"),
};

/* Reserves counter n on every CPU, or else nowhere. */
static void pcr_take(unsigned int n)
{
	static const char *const layers[] = { "the firmware's", "the hypervisor's",
					      "the kernel's", "the user's" };
	unsigned int cpu;
	u64 status;

	cpumask_clear(&pcr_refused);
	pcr_write(cpu_online_mask, UMPIRE_PCR_MSR_MANAGEMENT_KEY, n, secret,
		  UMPIRE_PCR_DEFAULT_COOKIE);
	if (cpumask_empty(&pcr_refused)) {
		__set_bit(n, &pcr_lockable);
		pcr_manage(UMPIRE_PCR_MSR_CONTROL, n, pcr_control);
		/* A master grants with a cookie for accesses, too. */
		pcr_manage(UMPIRE_PCR_MSR_ACCESS_KEY, n, UMPIRE_PCR_DEFAULT_COOKIE);
		pr_info("PMC%u locked on %u CPUs\n", n, num_online_cpus());
		return;
	}
	for_each_online_cpu(cpu)
		if (!cpumask_test_cpu(cpu, &pcr_refused))
			pcr_write(cpumask_of(cpu), UMPIRE_PCR_MSR_MANAGEMENT_KEY, n,
				  UMPIRE_PCR_DEFAULT_COOKIE, secret);
		else if (!rdmsrl_safe_on_cpu(cpu, pcr.base + UMPIRE_PCR_MSR_STATUS + n, &status))
			pr_info("PMC%u is %s on CPU %u\n", n, status & UMPIRE_PCR_STATUS_RESERVED ?
				layers[status >> 1 & 3] : "not to be had", cpu);
}

static int pcr_init(void)
{
	unsigned int n;
	int err = pcr_find(&pcr);

	if (err) {
		pr_info("no counter reservations on this machine\n");
		return err;
	}
	if (!pcr_read_map()) {
		pr_err("legacy names differ between CPU %u and CPU %u\n",
		       cpumask_first(cpu_online_mask), cpumask_first(&pcr_refused));
		return -EXDEV;
	}
	err = register_kretprobes(pcr_probes, ARRAY_SIZE(pcr_probes));
	if (err)
		return err;
	secret = pcr_cookie();
	if (fault)
		pcr_control |= UMPIRE_PCR_CONTROL_FAULT;
	cpus_read_lock();
	for_each_set_bit(n, &pcr.counters, BITS_PER_LONG)
		pcr_take(n);
	pcr_keep_start();
	cpus_read_unlock();
	for (n = 0; n < pcr.programmable; n++)
		if (pcr_map[n] >= 0 && !test_bit(pcr_map[n], &pcr_lockable))
			pcr_map[n] = PCR_NOT_OURS;
	smp_store_mb(pcr_ready, true);
	/* Kernel users have both kinds. What they hold already shows by trying. */
	for (n = 0; n < pcr.programmable; n++)
		if (reserve_evntsel_nmi(pcr_msr(PCR_SELECT, n)))
			release_evntsel_nmi(pcr_msr(PCR_SELECT, n));
		else if (pcr_map[n] >= 0 && pcr_own(PCR_COUNTER, pcr_map[n]))
			pcr_own(PCR_SELECT, pcr_map[n]);
	for_each_set_bit(n, &pcr_lockable, PCR_PROGRAMMABLE)
		pcr_update_lock(n);
	return 0;
}

/*
 * Gives everything back. Nobody has reserved anything by now, and until the
 * probes are gone everybody is refused: what is cleared is nobody's.
 */
static void pcr_exit(void)
{
	unsigned int n;

	pcr_keep_stop();
	for_each_set_bit(n, &pcr_lockable, BITS_PER_LONG)
		pcr_manage(UMPIRE_PCR_MSR_MANAGEMENT_KEY, n, UMPIRE_PCR_DEFAULT_COOKIE);
	unregister_kretprobes(pcr_probes, ARRAY_SIZE(pcr_probes));
}

#endif /* PCR_ARBITER_H */
