/*
 * A plugin of QEMU's translator (docs/devel/tcg-plugins.rst of QEMU): counts the instructions
 * that a guest has executed and the blocks that were translated for it.
 *
 * Argument: out=FILE. FILE: numbers of 64 bits in the order of the host; first that of the blocks,
 * then the executed instructions of each block, in any order.
 * The header of the interface is not packaged by Debian, so its four functions are declared here.
 * Counters are added to without a lock; since each block has its own, two processors meet at one
 * too rarely to matter.
 */
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

struct qemu_plugin_tb;
typedef void (*translated)(uint64_t id, struct qemu_plugin_tb *block);
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, translated call);
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *block, int operation,
                                              void *counter, uint64_t added);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *block);

int qemu_plugin_version = 1;

static const int ADD_U64 = 0;
/* Some times as many blocks as a boot has; later ones share the counters of the first. */
static const size_t SLOTS = 1 << 21;
static uint64_t *counters;

static void count(uint64_t id, struct qemu_plugin_tb *block)
{
    (void)id;
    uint64_t number = __atomic_fetch_add(&counters[0], 1, __ATOMIC_RELAXED);
    qemu_plugin_register_vcpu_tb_exec_inline(block, ADD_U64, &counters[1 + number % (SLOTS - 1)],
                                             qemu_plugin_tb_n_insns(block));
}

int qemu_plugin_install(uint64_t id, const void *info, int argc, char **argv)
{
    const size_t skipped = sizeof("out=") - 1;
    (void)info;
    if (argc != 1)
        return 1;
    int file = open(argv[0] + skipped, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (file < 0 || ftruncate(file, SLOTS * sizeof(*counters)) != 0)
        return 1;
    counters = mmap(0, SLOTS * sizeof(*counters), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (counters == MAP_FAILED)
        return 1;
    qemu_plugin_register_vcpu_tb_trans_cb(id, count);
    return 0;
}
