#include "kernels/host_node.h"

#include <errno.h>
#include <inttypes.h>
#include <linux/mempolicy.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

bool kvs_host_node_in(const char *list, int32_t node, uint32_t *ret_n)
{
    bool found = false;

    *ret_n = 0;
    while (*list >= '0' && *list <= '9') {
        char *end;
        unsigned long first = strtoul(list, &end, 10), last = first;

        if (*end == '-')
            last = strtoul(end + 1, &end, 10);
        if (last < first || last >= KVS_NODES_MAX)
            return false;
        *ret_n += (uint32_t)(last - first + 1);
        found = found || (node >= 0 && (unsigned long)node >= first && (unsigned long)node <= last);
        list = *end == ',' ? end + 1 : end;
    }
    return found;
}

/* True: there are several, and `node` is among them.  list: [64] for a message. */
static bool is_choice(int32_t node, char list[64], uint32_t *ret_n)
{
    FILE *f = fopen("/sys/devices/system/node/has_memory", "re");

    list[0] = '\0';
    if (f != NULL) {
        if (fgets(list, 64, f) == NULL)
            list[0] = '\0';
        (void)fclose(f);
    }
    list[strcspn(list, "\n")] = '\0';
    return kvs_host_node_in(list, node, ret_n) && *ret_n > 1;
}

kvs_status kvs_host_node_check(int32_t node, kvs_err *err)
{
    char list[64];
    uint32_t n;

    if (is_choice(node, list, &n) || node < 0 || n < 2)
        return KVS_OK;
    return kvs_fail(err, KVS_E_CONFIG, "node %" PRId32 " has no memory here, nodes %s have", node, list);
}

kvs_status kvs_host_node_place(void *p, uint64_t bytes, int32_t node, kvs_err *err)
{
    unsigned long mask[KVS_NODES_MAX / (8 * sizeof(unsigned long))] = {0};
    const uint32_t word = 8 * sizeof mask[0];
    char list[64];
    uint32_t n;

    if (!is_choice(node, list, &n))
        return KVS_OK;
    mask[(uint32_t)node / word] = 1ul << (uint32_t)node % word;
    if (syscall(SYS_mbind, p, bytes, MPOL_PREFERRED, mask, (unsigned long)KVS_NODES_MAX + 1, 0) == 0)
        return KVS_OK;
    return kvs_fail(err, KVS_E_SYS, "mbind: %" PRIu64 " bytes on node %" PRId32 ": %s", bytes, node, strerror(errno));
}
