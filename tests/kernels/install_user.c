/* A program of someone else's: built by tests/kernels/install against what was installed. */
#include <kvstride/kernels.h>

#include <stdio.h>
#include <string.h>

enum { ROW = 1152, TOKENS = 4, PAGE = TOKENS * ROW, LAYERS = 3, BLOCKS = 2 };

int main(void)
{
    static uint64_t pool[BLOCKS * LAYERS * PAGE / 8 + 1], row[ROW / 8];
    const int64_t slot = 5;
    uint8_t *base = (uint8_t *)pool + (16 - (uintptr_t)pool % 16) % 16;
    kvs_mla_write_args a;
    uint32_t bad = 9;
    kvs_err err;

    memset(row, 0x5A, sizeof row);
    memset(&a, 0, sizeof a);
    a.view.base = base + PAGE; /* the middle layer */
    a.view.block_stride = LAYERS * PAGE;
    a.view.page_bytes = PAGE;
    a.view.n_blocks = BLOCKS;
    a.view.tokens_per_block = TOKENS;
    a.view.row_bytes = ROW;
    a.view.format = KVS_FORMAT_mla_bf16;
    a.kv_c = (const uint8_t *)row;
    a.k_pe = (const uint8_t *)row + 1024;
    a.kv_c_stride = a.k_pe_stride = ROW;
    a.slot_mapping = &slot;
    a.n_tokens = 1;
    if (kvs_mla_write(&a, &bad, &err) != KVS_OK || bad != 0)
        return 1;
    if (memcmp(base + LAYERS * PAGE + PAGE + ROW, row, ROW) != 0)
        return 2;
    a.view.format = KVS_FORMAT_raw;
    if (kvs_mla_write(&a, &bad, &err) != KVS_E_UNSUPPORTED)
        return 3;
    printf("%s: %s, sum %d\n", kvs_status_name(err.status), err.msg, kvs_sum(row, ROW) != 0);
#ifdef WITH_CUDA
    err.msg[0] = 0; /* without a GPU it says why */
    return kvs_kernels_init(&err) == KVS_OK || err.msg[0] != 0 ? 0 : 4;
#else
    return 0;
#endif
}
