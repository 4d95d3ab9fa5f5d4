/*
 * A plugin for QEMU's emulator: how many instructions each run of one program of the guest
 * executes. The program is who executes addresses FIRST to LAST, which nobody else does, and a run
 * begins at ENTRY. Without QEMU's header, whose declarations these are as far as they are used
 * (QEMU's manual, "QEMU TCG Plugins", API versions 2 and on).
 *
 *   -plugin FILE,first=HEX,last=HEX,entry=HEX,out=FILE
 *
 * A line for each run goes to the file at the end. One processor.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
struct qemu_info;
enum qemu_plugin_cb_flags { QEMU_PLUGIN_CB_NO_REGS };
typedef void (*on_execution)(unsigned int vcpu, void *data);

size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *tb, size_t at);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *tb);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *insn);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id,
                                           void (*call)(qemu_plugin_id_t, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *tb, on_execution call,
                                          enum qemu_plugin_cb_flags flags, void *data);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *insn, on_execution call,
                                            enum qemu_plugin_cb_flags flags, void *data);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t id, void (*call)(qemu_plugin_id_t, void *),
                                    void *data);

#define EXPORT __attribute__((visibility("default")))
EXPORT int qemu_plugin_version = 2;

#define RUNS 256
static uint64_t first, last, entry;
static char out[4096];
static uint64_t counts[RUNS];
static unsigned runs;
static uint64_t previous;
static int kernel_since;

/*
 * Called before the instruction is executed, so also for one that faults. The kernel then has it
 * executed again: that is the same instruction. None of the program's follows itself.
 */
static void on_program(unsigned int vcpu, void *data)
{
    uint64_t at = (uintptr_t)data;
    int again = kernel_since && at == previous;

    (void)vcpu;
    kernel_since = 0;
    previous = at;
    if (again)
        return;
    if (at == entry && runs < RUNS)
        runs++;
    if (runs)
        counts[runs - 1]++;
}

static void on_kernel(unsigned int vcpu, void *data)
{
    (void)vcpu;
    (void)data;
    kernel_since = 1;
}

static void on_translation(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
    size_t count = qemu_plugin_tb_n_insns(tb);

    (void)id;
    if (qemu_plugin_tb_vaddr(tb) >> 63) {
        qemu_plugin_register_vcpu_tb_exec_cb(tb, on_kernel, QEMU_PLUGIN_CB_NO_REGS, NULL);
        return;
    }
    for (size_t at = 0; at < count; at++) {
        struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, at);
        uint64_t address = qemu_plugin_insn_vaddr(insn);

        if (address >= first && address <= last)
            qemu_plugin_register_vcpu_insn_exec_cb(insn, on_program, QEMU_PLUGIN_CB_NO_REGS,
                                                   (void *)(uintptr_t)address);
    }
}

static void at_the_end(qemu_plugin_id_t id, void *data)
{
    FILE *file = fopen(out, "w");

    (void)id;
    (void)data;
    if (!file)
        return;
    for (unsigned run = 0; run < runs; run++)
        fprintf(file, "%llu\n", (unsigned long long)counts[run]);
    fclose(file);
}

/* Hexadecimal digits; strtoull of newer C libraries is not in older ones. */
static uint64_t number(const char *text)
{
    uint64_t sum = 0;

    for (; *text; text++)
        sum = sum << 4 | (uint64_t)(*text <= '9' ? *text - '0' : (*text | 32) - 'a' + 10);
    return sum;
}

EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const struct qemu_info *info, int argc,
                               char **argv)
{
    (void)info;
    for (int at = 0; at < argc; at++) {
        char *value = strchr(argv[at], '=');

        if (!value)
            return -1;
        *value++ = 0;
        if (!strcmp(argv[at], "first"))
            first = number(value);
        else if (!strcmp(argv[at], "last"))
            last = number(value);
        else if (!strcmp(argv[at], "entry"))
            entry = number(value);
        else if (!strcmp(argv[at], "out"))
            snprintf(out, sizeof out, "%s", value);
        else
            return -1;
    }
    qemu_plugin_register_vcpu_tb_trans_cb(id, on_translation);
    qemu_plugin_register_atexit_cb(id, at_the_end, NULL);
    return 0;
}
