// SPDX-License-Identifier: GPL-2.0-only
/*
 * The minimal enforcing master arbiter: a counter can be used while kernel users
 * have reserved it and its event select, and not before or after.
 */
#include "pcr_arbiter.h"

static DEFINE_SPINLOCK(pcr_lock);

static void pcr_update_lock(unsigned int counter)
{
	spin_lock(&pcr_lock);
	if (pcr_is_owned(counter))	/* unlock counter */
		pcr_manage(UMPIRE_PCR_MSR_ACCESS_KEY, counter, UMPIRE_PCR_DEFAULT_COOKIE);
	else				/* lock counter */
		pcr_manage(UMPIRE_PCR_MSR_ACCESS_KEY, counter, secret);
	spin_unlock(&pcr_lock);
}

module_init(pcr_init);
module_exit(pcr_exit);
MODULE_DESCRIPTION("Minimal enforcing master arbiter of performance counters");
MODULE_LICENSE("GPL");
