// SPDX-License-Identifier: GPL-2.0-only
/*
 * The arbiter for the scheme of interacting arbiters: a minimal master that
 * answers. When another layer is short of a counter and asks for one of ours, or
 * one is about to be revoked, it takes the counter from perf core first, and only
 * then gives it away. So what perf counts is right all along, in fewer counters.
 * What was given away is taken back once it is nobody's.
 */
static int pcr_do_without(unsigned int cpu, unsigned int n);
#define pcr_do_without pcr_do_without
static unsigned int pcr_look_after(void);
#define pcr_look_after pcr_look_after

#include "pcr_arbiter.h"
#include "pcr_place.h"

#include <asm/irq.h>
#include <asm/irq_vectors.h>

/* What is to be done on a CPU, and what keeps perf out of its lost counters. */
struct pcr_cpu {
	struct work_struct work;
	unsigned int cpu;
	bool told;			/* notices raise an interrupt */
	bool gone;			/* a counter has been lost */
	unsigned long asked, doomed;	/* positions that are wanted, or to be revoked */
	struct perf_event *event[BITS_PER_LONG];
	struct pcr_place place[BITS_PER_LONG];
};
static DEFINE_PER_CPU(struct pcr_cpu, pcr_cpu);

static unsigned int keep = 1;
module_param(keep, uint, 0644);
MODULE_PARM_DESC(keep, "refuse to yield a programmable counter that leaves a CPU fewer (default: 1)");

static bool stopping;

static unsigned int poll;
module_param(poll, uint, 0444);
MODULE_PARM_DESC(poll, "look for notices every so many ms (default: 0, by interrupt)");

static void pcr_update_lock(unsigned int counter)
{
}

/*
 * Reads what there is for this CPU. Interrupts are off. Modules get no vector of
 * their own; this one is KVM's, for guests of a guest, and KVM's if it is loaded.
 */
static void pcr_read_notices(void *unused)
{
	struct pcr_cpu *cpu = this_cpu_ptr(&pcr_cpu);
	u64 notice;

	if (!poll && !cpu->told)
		cpu->told = !wrmsrl_safe(pcr.base + UMPIRE_PCR_MSR_NOTICE_VECTOR,
					 POSTED_INTR_WAKEUP_VECTOR);
	while (!rdmsrl_safe(pcr.base + UMPIRE_PCR_MSR_NOTICE, &notice) && notice) {
		u64 n = notice >> UMPIRE_PCR_NOTICE_POSITION_SHIFT & (BITS_PER_LONG - 1);
		u64 kind = notice & UMPIRE_PCR_NOTICE_KIND_MASK;

		if (kind < UMPIRE_PCR_NOTICE_ASKED || kind > UMPIRE_PCR_NOTICE_CANCELLED ||
		    kind == UMPIRE_PCR_NOTICE_GRANTED || kind == UMPIRE_PCR_NOTICE_REFUSED)
			continue;	/* says nothing of who holds a counter */
		clear_bit(n, &cpu->asked);
		clear_bit(n, &cpu->doomed);
		if (kind == UMPIRE_PCR_NOTICE_ASKED)
			set_bit(n, &cpu->asked);
		else if (kind == UMPIRE_PCR_NOTICE_REVOKING)
			set_bit(n, &cpu->doomed);
		else
			cpu->gone |= kind != UMPIRE_PCR_NOTICE_CANCELLED;
	}
}

/* What perf calls the counter at position n. */
static int pcr_perf_index(unsigned int n)
{
	unsigned int i;

	for (i = 0; i < pcr.programmable; i++)
		if (pcr_map[i] == n)
			return i;
	return n < PCR_PROGRAMMABLE ? -1 : n;
}

static void pcr_use_again(struct pcr_cpu *here, unsigned int n)
{
	if (here->event[n])
		perf_event_release_kernel(here->event[n]);
	here->event[n] = NULL;
}

/* Keeps perf core out of a counter; 0 if it is out. */
static int pcr_do_without(unsigned int cpu, unsigned int n)
{
	struct pcr_cpu *here = per_cpu_ptr(&pcr_cpu, cpu);
	int index = pcr_perf_index(n);
	struct perf_event *event;

	if (index < 0)
		return 0;		/* no name: perf does not know it */
	if (here->event[n] && here->event[n]->state > PERF_EVENT_STATE_OFF)
		return 0;
	/* A CPU that goes down loses its events. */
	pcr_use_again(here, n);
	event = pcr_place_take(cpu, index, &here->place[n]);
	if (!IS_ERR(event))
		here->event[n] = event;
	/* Without such a PMU, perf uses no counter. */
	return event == ERR_PTR(-ENOENT) ? 0 : PTR_ERR_OR_ZERO(event);
}

/* A write to a register of @cpu, which this work is bound to. */
struct pcr_told {
	struct pcr_write write;
	int err;
};

static void pcr_tell(void *data)
{
	struct pcr_told *told = data;

	told->err = pcr_write_one(&told->write);
}

/* Gives counter n away on a CPU, once perf is out of it. */
static void pcr_give(struct pcr_cpu *here, unsigned int n, bool asked)
{
	unsigned long *lost = per_cpu_ptr(&pcr_lost, here->cpu);
	unsigned long left = pcr_lockable & ~*lost & (BIT_ULL(PCR_PROGRAMMABLE) - 1);
	struct pcr_told told = { .write.cookie = secret };
	int err = 0;

	if (asked && n < PCR_PROGRAMMABLE && hweight_long(left) <= READ_ONCE(keep))
		err = -EPERM;
	err = err ?: pcr_do_without(here->cpu, n);
	if (asked) {
		told.write.msr = pcr.base + UMPIRE_PCR_MSR_REPLY;
		told.write.value = n << UMPIRE_PCR_REPLY_POSITION_SHIFT |
				   (err ? UMPIRE_PCR_REPLY_REFUSE : UMPIRE_PCR_REPLY_YIELD);
	} else {
		told.write.msr = pcr.base + UMPIRE_PCR_MSR_MANAGEMENT_KEY + n;
		told.write.value = UMPIRE_PCR_DEFAULT_COOKIE;
	}
	if (!err) {
		/* From now on the keeper lets it be. */
		*per_cpu_ptr(&pcr_again, here->cpu) = jiffies + HZ;
		set_bit(n, lost);
	}
	if (asked || !err)
		smp_call_function_single(here->cpu, pcr_tell, &told, true);
	if (err)
		pr_info("PMC%u %s on CPU %u: error %d\n", n,
			asked ? "refused" : "will be lost", here->cpu, err);
	else if (!told.err)
		pr_info("PMC%u %s on CPU %u\n", n, asked ? "yielded" : "given back", here->cpu);
	else
		clear_bit(n, lost);	/* nobody wants it any more, or it is gone already */
}

/*
 * Does what notices of a CPU are about, and has perf out of counters that are
 * lost there and of no others. It runs on that CPU, so that it waits for none: the
 * grace may be short.
 */
static void pcr_attend(struct work_struct *work)
{
	struct pcr_cpu *here = container_of(work, struct pcr_cpu, work);
	unsigned long *lost = per_cpu_ptr(&pcr_lost, here->cpu);
	unsigned int n;

	cpus_read_lock();
	if (smp_call_function_single(here->cpu, pcr_read_notices, NULL, true))
		goto unlock;		/* it is down */
	for_each_set_bit(n, &pcr_lockable, BITS_PER_LONG) {
		if (test_and_clear_bit(n, &here->asked) && !test_bit(n, lost))
			pcr_give(here, n, true);
		if (test_and_clear_bit(n, &here->doomed) && !test_bit(n, lost))
			pcr_give(here, n, false);
		if (!test_bit(n, lost))
			pcr_use_again(here, n);
		else if (pcr_do_without(here->cpu, n))
			pr_warn_ratelimited("PMC%u: perf counts wrong with it on CPU %u\n",
					    n, here->cpu);
	}
	if (READ_ONCE(stopping))
		goto unlock;		/* nobody would wait for the keeper */
	if (xchg(&here->gone, false))
		mod_delayed_work(system_highpri_wq, &pcr_keeper, 0);
	else if (*lost)
		queue_delayed_work(system_highpri_wq, &pcr_keeper, HZ);
unlock:
	cpus_read_unlock();
}

/* The interrupt for notices. */
static void pcr_notified(void)
{
	struct pcr_cpu *here = this_cpu_ptr(&pcr_cpu);

	queue_work_on(here->cpu, system_highpri_wq, &here->work);
}

static unsigned int pcr_look_after(void)
{
	unsigned int cpu, next = 0;

	for_each_online_cpu(cpu) {
		queue_work_on(cpu, system_highpri_wq, &per_cpu_ptr(&pcr_cpu, cpu)->work);
		if (*per_cpu_ptr(&pcr_lost, cpu))
			next = 1000;
	}
	return next;
}

static void pcr_poll(struct work_struct *work);
static DECLARE_DELAYED_WORK(pcr_poller, pcr_poll);

/* Looks for notices where there is no interrupt for them. */
static void pcr_poll(struct work_struct *work)
{
	cpus_read_lock();
	pcr_look_after();
	cpus_read_unlock();
	mod_delayed_work(system_highpri_wq, &pcr_poller, msecs_to_jiffies(poll));
}

static void pcr_stop_notices(void *unused)
{
	wrmsrl_safe(pcr.base + UMPIRE_PCR_MSR_NOTICE_VECTOR, 0);
}

static void pcr_forget(void)
{
	unsigned int cpu;

	WRITE_ONCE(stopping, true);
	kvm_set_posted_intr_wakeup_handler(NULL);
	for_each_possible_cpu(cpu)
		cancel_work_sync(&per_cpu(pcr_cpu, cpu).work);
	/* One that ran meanwhile may have queued it again. */
	cancel_delayed_work_sync(&pcr_keeper);
	pcr_place_exit();
}

static int __init interacting_init(void)
{
	unsigned int cpu;
	int err;

	for_each_possible_cpu(cpu) {
		per_cpu(pcr_cpu, cpu).cpu = cpu;
		INIT_WORK(&per_cpu(pcr_cpu, cpu).work, pcr_attend);
	}
	pcr_place_init();
	if (!poll)
		kvm_set_posted_intr_wakeup_handler(pcr_notified);
	err = pcr_init();
	if (err)
		pcr_forget();
	else if (poll)
		mod_delayed_work(system_highpri_wq, &pcr_poller, 0);
	return err;
}

/*
 * A counter that is given away has an event, which is a user of the kernel's. So
 * there is none here, and perf may have all counters.
 */
static void __exit interacting_exit(void)
{
	cancel_delayed_work_sync(&pcr_poller);
	on_each_cpu(pcr_stop_notices, NULL, true);
	pcr_exit();
	pcr_forget();
}

module_init(interacting_init);
module_exit(interacting_exit);
MODULE_DESCRIPTION("Arbiter of performance counters that answers other layers");
MODULE_LICENSE("GPL");
