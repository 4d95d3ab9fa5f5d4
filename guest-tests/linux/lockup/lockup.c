// SPDX-License-Identifier: GPL-2.0-only
/* Disables interrupts on its processor and spins: only an NMI gets through. */
#include <linux/irqflags.h>
#include <linux/module.h>
#include <linux/processor.h>

static int __init lockup_init(void)
{
	pr_info("lockup: no interrupts from here on\n");
	local_irq_disable();
	for (;;)
		cpu_relax();
	return 0;
}

module_init(lockup_init);
MODULE_DESCRIPTION("A hard lockup");
MODULE_LICENSE("GPL");
