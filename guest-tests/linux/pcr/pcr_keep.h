/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Keeps what an arbiter has taken, on every CPU: renews leases before they end,
 * and brings CPUs that come up to where the others are. It decides nothing.
 *
 * A CPU that goes down keeps its counters. Perf lets go of a CPU later than it
 * is this module's turn, and giving a counter back clears it. No code runs there
 * that could renew, so a lease ends; then the counter is taken anew as the CPU
 * comes up. A CPU on which somebody else has got a counter by then stays down:
 * the kernel takes all CPUs for alike and would count wrong there.
 */
#ifndef PCR_KEEP_H
#define PCR_KEEP_H

#include <linux/cpuhotplug.h>
#include <linux/percpu.h>
#include <linux/workqueue.h>

#include "pcr_access.h"

static unsigned long pcr_lockable;	/* positions that are ours on every CPU */
static DEFINE_PER_CPU(unsigned long, pcr_lost);	/* those of them that are not on this one */
static DEFINE_PER_CPU(unsigned long, pcr_again);	/* jiffies; before, none of them is taken back */
static unsigned int pcr_lease;		/* ms that our leases last; 0: there are none */
static int pcr_state = -1;		/* our place among those told of CPUs */

static void pcr_keep(struct work_struct *work);
static DECLARE_DELAYED_WORK(pcr_keeper, pcr_keep);

static bool renew = true;
module_param(renew, bool, 0444);
MODULE_PARM_DESC(renew, "renew leases before they end (default: yes)");

/*
 * An arbiter that can do without a counter on some CPU has a function of this
 * name, which returns 0 once nobody can count wrong there.
 */
#ifndef pcr_do_without
#define pcr_do_without(cpu, n)	(-EBUSY)
#endif

/* An arbiter that has more to look after in time; returns the ms until then, or 0. */
#ifndef pcr_look_after
#define pcr_look_after()	0
#endif

/*
 * Holds counter n on this CPU: renews it, or takes it if it is nobody's. What is
 * in force is written if it may not be there. Interrupts are off, so that no
 * newer value comes between its being read and written.
 */
static void pcr_hold(unsigned int n, bool write)
{
	u32 regs[] = { UMPIRE_PCR_MSR_ACCESS_KEY, UMPIRE_PCR_MSR_CONTROL };
	struct pcr_write key = { pcr.base + UMPIRE_PCR_MSR_MANAGEMENT_KEY + n, secret, secret };
	unsigned long *lost = this_cpu_ptr(&pcr_lost);
	u64 status = 0;
	int i, err;

	if (test_bit(n, lost) && time_before(jiffies, this_cpu_read(pcr_again)))
		return;
	err = rdmsrl_safe(pcr.base + UMPIRE_PCR_MSR_STATUS + n, &status);
	if (!(status & UMPIRE_PCR_STATUS_RESERVED)) {
		key.cookie = UMPIRE_PCR_DEFAULT_COOKIE;
		write = true;
	} else if ((status >> UMPIRE_PCR_STATUS_OWNER_SHIFT & UMPIRE_PCR_STATUS_OWNER_MASK) !=
		   UMPIRE_PCR_LAYER_KERNEL) {
		err = -EBUSY;		/* a key of ours would be a guess */
	}
	err = err ?: pcr_write_one(&key);
	for (i = 1; i >= 0 && write && !err; i--)
		err = pcr_wrmsr_safe(pcr.base + regs[i] + n, READ_ONCE(pcr_in_force[i][n]), secret);
	if (err ? !test_and_set_bit(n, lost) : test_and_clear_bit(n, lost))
		pr_info("PMC%u is %s on CPU %u\n", n, err ? "lost" : "ours again",
			smp_processor_id());
	else if (!err && key.cookie == UMPIRE_PCR_DEFAULT_COOKIE)
		pr_info("PMC%u taken anew on CPU %u\n", n, smp_processor_id());
	if (!err && !rdmsrl_safe(pcr.base + UMPIRE_PCR_MSR_STATUS + n, &status) &&
	    status & UMPIRE_PCR_STATUS_LEASE)
		WRITE_ONCE(pcr_lease, status >> UMPIRE_PCR_STATUS_REST_SHIFT);
}

static void pcr_hold_all(void *write)
{
	unsigned long flags;
	unsigned int n;

	local_irq_save(flags);
	for_each_set_bit(n, &pcr_lockable, BITS_PER_LONG)
		pcr_hold(n, write);
	local_irq_restore(flags);
}

/* Renews everything, a third of a lease after the last time. */
static void pcr_keep(struct work_struct *work)
{
	unsigned int next;

	cpus_read_lock();
	pcr_lease = 0;
	if (renew)
		on_each_cpu(pcr_hold_all, NULL, true);
	next = pcr_look_after();
	cpus_read_unlock();
	next = min_not_zero(next, pcr_lease / 3);
	if (next)
		mod_delayed_work(system_highpri_wq, &pcr_keeper, msecs_to_jiffies(next));
}

static int pcr_cpu_comes(unsigned int cpu)
{
	unsigned int i;
	int err = 0;

	for (i = 0; i < pcr.programmable; i++)
		if (pcr_map[i] >= 0 && pcr_mapped(i) != pcr_map[i])
			return -EXDEV;
	pcr_hold_all((void *)true);
	for_each_set_bit(i, per_cpu_ptr(&pcr_lost, cpu), BITS_PER_LONG)
		err = err ?: pcr_do_without(cpu, i);
	if (err)
		pr_err("CPU %u stays down, as counters that others use are lost there\n", cpu);
	else
		mod_delayed_work(system_highpri_wq, &pcr_keeper, 0);
	return err;
}

/* CPUs neither come nor go meanwhile. */
static void pcr_keep_start(void)
{
	pcr_state = cpuhp_setup_state_nocalls_cpuslocked(CPUHP_AP_ONLINE_DYN, KBUILD_MODNAME ":online",
							 pcr_cpu_comes, NULL);
	if (pcr_state < 0)
		pr_err("CPUs that come up are not looked after: error %d\n", pcr_state);
	mod_delayed_work(system_highpri_wq, &pcr_keeper, 0);
}

static void pcr_keep_stop(void)
{
	if (pcr_state >= 0)
		cpuhp_remove_state_nocalls(pcr_state);
	cancel_delayed_work_sync(&pcr_keeper);
}

#endif /* PCR_KEEP_H */
