/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Takes a counter of one CPU from perf core: by a pinned kernel event whose place
 * is that counter and no other, and which never touches it.
 *
 * Perf moves what counts there to another counter, with its count, or lets events
 * take turns and scales them. What it does not do for a module is to say which
 * counter an event gets. So the answer of its question "where may this event be?"
 * is replaced, for our events only, by a set of one counter. From then on perf's
 * own scheduler sees to it that no other event gets there.
 */
#ifndef PCR_PLACE_H
#define PCR_PLACE_H

#include <linux/bitops.h>
#include <linux/err.h>
#include <linux/kprobes.h>
#include <linux/perf_event.h>

/*
 * Perf's answer, as far as its scheduler reads it. No header for modules has it,
 * so a kernel's own answer is looked at before it is replaced: as many counters
 * as its weight says. A kernel with another one gets its own back, and then our
 * event is not where it should be, which pcr_place_take() finds out.
 */
struct pcr_place {
	u64 counters;			/* one bit for each index of perf's */
	u64 code, mask;
	int weight;			/* the number of counters: the least is placed first */
	int overlap, flags;
	unsigned int size;
};

/* Marks our events. A counter that is not ours to touch raises no interrupt for them. */
static void pcr_place_overflow(struct perf_event *event, struct perf_sample_data *data,
			       struct pt_regs *regs)
{
}

static int pcr_place_called(struct kretprobe_instance *ri, struct pt_regs *regs)
{
	struct perf_event *event = (void *)regs_get_kernel_argument(regs, 2);

	*(struct perf_event **)ri->data = event;
	return event->overflow_handler != pcr_place_overflow;
}

/*
 * Perf adds the event, with its lock and without interrupts. PERF_HES_ARCH is what
 * perf has for an event that is scheduled and not to be started: its counter is
 * neither written nor read.
 */
static int pcr_place_returned(struct kretprobe_instance *ri, struct pt_regs *regs)
{
	const struct pcr_place *perfs = (void *)regs_return_value(regs);
	struct perf_event *event = *(struct perf_event **)ri->data;

	event->hw.state |= PERF_HES_ARCH;
	if (perfs->weight == hweight64(perfs->counters))
		regs_set_return_value(regs, (unsigned long)event->overflow_handler_context);
	return 0;
}

/* Perf's question has a function for each family of processors. */
static struct kretprobe pcr_place_probes[] = {
	{ .kp.symbol_name = "amd_get_event_constraints" },
	{ .kp.symbol_name = "amd_get_event_constraints_f15h" },
	{ .kp.symbol_name = "amd_get_event_constraints_f17h" },
	{ .kp.symbol_name = "amd_get_event_constraints_f19h" },
	{ .kp.symbol_name = "intel_get_event_constraints" },
	{ .kp.symbol_name = "x86_get_event_constraints" },
};

static void pcr_place_exit(void)
{
	struct kretprobe *probe;

	for (probe = pcr_place_probes; probe < pcr_place_probes + ARRAY_SIZE(pcr_place_probes); probe++)
		if (probe->handler)
			unregister_kretprobe(probe);
}

/* Not every kernel has all of the functions; one that has none lets us take nothing. */
static void pcr_place_init(void)
{
	struct kretprobe *probe;

	for (probe = pcr_place_probes; probe < pcr_place_probes + ARRAY_SIZE(pcr_place_probes); probe++) {
		probe->entry_handler = pcr_place_called;
		probe->handler = pcr_place_returned;
		probe->data_size = sizeof(struct perf_event *);
		probe->maxactive = 2 * num_possible_cpus();
		if (register_kretprobe(probe))
			probe->handler = NULL;
	}
}

/*
 * Takes the counter that perf calls @index from perf on @cpu. @place lives as long
 * as the event. Process context. Returns the event, or an error: perf has pinned
 * events of others in all counters, or does not use them at all.
 */
static struct perf_event *pcr_place_take(unsigned int cpu, unsigned int index,
					 struct pcr_place *place)
{
	struct perf_event_attr attr = {
		.type = PERF_TYPE_HARDWARE,
		.config = PERF_COUNT_HW_CPU_CYCLES,
		.size = sizeof(attr),
		.pinned = 1,
	};
	struct perf_event *event;

	*place = (struct pcr_place){ .counters = BIT_ULL(index), .weight = 1 };
	event = perf_event_create_kernel_counter(&attr, cpu, NULL, pcr_place_overflow, place);
	if (IS_ERR(event) || (event->state == PERF_EVENT_STATE_ACTIVE && event->hw.idx == index))
		return event;
	perf_event_release_kernel(event);
	return ERR_PTR(-EBUSY);
}

#endif /* PCR_PLACE_H */
