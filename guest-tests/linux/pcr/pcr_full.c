// SPDX-License-Identifier: GPL-2.0-only
/*
 * The fully enforcing master arbiter: as the minimal enforcing one, and kernel
 * users can have a counter for themselves. Its registers then take their cookie
 * only, legacy users are refused, and no global register reaches it.
 */
#include "pcr_arbiter.h"

static DEFINE_SPINLOCK(pcr_lock);
static u64 pcr_private[PCR_PROGRAMMABLE];	/* cookies of private counters; 0: not private */

static void pcr_update_lock(unsigned int counter)
{
	u64 key = secret, control = pcr_control;

	spin_lock(&pcr_lock);
	if (pcr_private[counter]) {
		key = pcr_private[counter];
		control &= ~UMPIRE_PCR_CONTROL_SHARED;
	} else if (pcr_is_owned(counter)) {
		key = UMPIRE_PCR_DEFAULT_COOKIE;
	}
	pcr_manage(UMPIRE_PCR_MSR_ACCESS_KEY, counter, key);
	pcr_manage(UMPIRE_PCR_MSR_CONTROL, counter, control);
	spin_unlock(&pcr_lock);
}

/**
 * pcr_acquire_counter() - take a counter on every CPU, for the caller alone
 * @grant: filled with the counter's position and a fresh access cookie
 *
 * Process context. While it is private, the kernel's calls refuse the counter.
 * Returns 0, or -EBUSY if every counter is reserved.
 */
int pcr_acquire_counter(struct pcr_grant *grant)
{
	int n = PCR_PROGRAMMABLE;	/* downwards, as Linux takes the lowest ones */

	while (--n >= 0) {
		if (!test_bit(n, &pcr_lockable) || !pcr_own(PCR_COUNTER, n))
			continue;
		*grant = (struct pcr_grant){ n, pcr_cookie() };
		pcr_private[n] = grant->cookie;
		pcr_update_lock(n);
		return 0;
	}
	return -EBUSY;
}
EXPORT_SYMBOL_GPL(pcr_acquire_counter);

/**
 * pcr_release_counter() - give a counter back and clear it
 * @grant: as pcr_acquire_counter() has filled it
 *
 * Process context. Returns 0, or -EPERM if the cookie is not the counter's.
 */
int pcr_release_counter(const struct pcr_grant *grant)
{
	unsigned int n = grant->counter;

	if (n >= PCR_PROGRAMMABLE || !grant->cookie || pcr_private[n] != grant->cookie)
		return -EPERM;
	/* The next owner is to find nothing of this one's. */
	pcr_write(cpu_online_mask, UMPIRE_PCR_MSR_SELECT, n, 0, grant->cookie);
	pcr_write(cpu_online_mask, UMPIRE_PCR_MSR_COUNTER, n, 0, grant->cookie);
	pcr_write(cpu_online_mask, UMPIRE_PCR_MSR_OVERFLOW, n, 1, grant->cookie);
	pcr_private[n] = 0;
	pcr_disown(PCR_COUNTER, n);
	pcr_update_lock(n);
	return 0;
}
EXPORT_SYMBOL_GPL(pcr_release_counter);

module_init(pcr_init);
module_exit(pcr_exit);
MODULE_DESCRIPTION("Fully enforcing master arbiter of performance counters");
MODULE_LICENSE("GPL");
