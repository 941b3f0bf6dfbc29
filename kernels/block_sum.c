#include "kernels/block_sum.h"

#include <string.h>

#include "kernels/view_check.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are read as they lie in memory"
#endif

static uint64_t words_from(const uint8_t *p, uint64_t first, uint64_t n_words)
{
    uint64_t sum = 0, w;

    for (uint64_t i = first; i < n_words; i++) {
        memcpy(&w, p + i * sizeof w, sizeof w);
        sum += kvs_sum_term(w, i);
    }
    return sum;
}

static uint64_t words_plain(const uint8_t *p, uint64_t n_words)
{
    enum { LANES = 4 };
    uint64_t sum[LANES] = {0}, i = 0;

    for (; i + LANES <= n_words; i += LANES) {
        uint64_t w[LANES];

        memcpy(w, p + i * sizeof *w, sizeof w);
        for (int l = 0; l < LANES; l++)
            sum[l] += kvs_sum_term(w[l], i + (uint64_t)l);
    }
    return sum[0] + sum[1] + sum[2] + sum[3] + words_from(p, i, n_words);
}

#if defined(__x86_64__)
/* Sixteen words a turn; each lane's key goes on by sixteen steps. */
__attribute__((target("avx2"))) static uint64_t words_avx2(const uint8_t *p, uint64_t n_words)
{
    enum { REGISTERS = 4, LANES = 4, TURN = REGISTERS * LANES };
    const uint64_t turn_step = TURN * KVS_SUM_STEP;
    const __m256i step = _mm256_set1_epi64x((long long)turn_step);
    __m256i sum[REGISTERS], key[REGISTERS];
    uint64_t lane[LANES], i = 0;

    for (uint64_t r = 0; r < REGISTERS; r++) {
        sum[r] = _mm256_setzero_si256();
        for (uint64_t l = 0; l < LANES; l++)
            lane[l] = (r * LANES + l + 1) * KVS_SUM_STEP;
        key[r] = _mm256_loadu_si256((const __m256i *)(const void *)lane);
    }
    for (; i + TURN <= n_words; i += TURN) {
#pragma GCC unroll 4
        for (int r = 0; r < REGISTERS; r++) {
            const uint8_t *at = p + (i + (uint64_t)r * LANES) * sizeof *lane;
            const __m256i x = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(const void *)at), key[r]);
            const __m256i product = _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32));

            sum[r] = _mm256_add_epi64(sum[r], _mm256_add_epi64(product, x));
            key[r] = _mm256_add_epi64(key[r], step);
        }
    }
    sum[0] = _mm256_add_epi64(_mm256_add_epi64(sum[0], sum[1]), _mm256_add_epi64(sum[2], sum[3]));
    _mm256_storeu_si256((__m256i *)(void *)lane, sum[0]);
    return lane[0] + lane[1] + lane[2] + lane[3] + words_from(p, i, n_words);
}
#endif

static const kvs_sum_variant variants[] = {
#if defined(__x86_64__)
    {"avx2", words_avx2},
#endif
    {"plain", words_plain},
};

uint32_t kvs_sum_variants(const kvs_sum_variant **ret)
{
    uint32_t first = 0;

#if defined(__x86_64__)
    first = __builtin_cpu_supports("avx2") ? 0 : 1;
#endif
    *ret = &variants[first];
    return (uint32_t)(sizeof variants / sizeof variants[0]) - first;
}

uint64_t kvs_sum(const void *p, uint64_t bytes)
{
    const kvs_sum_variant *v;
    const uint64_t n_words = bytes / sizeof(uint64_t), rest = bytes % sizeof(uint64_t);
    uint64_t sum, last = 0;

    (void)kvs_sum_variants(&v);
    sum = v->words(p, n_words);
    if (rest > 0) {
        memcpy(&last, (const uint8_t *)p + bytes - rest, rest);
        sum += kvs_sum_term(last, n_words);
    }
    return kvs_sum_finish(sum, bytes);
}

kvs_status kvs_block_sum_check(const kvs_block_sum_args *a, kvs_err *err)
{
    kvs_status s = kvs_pages_check(&a->view, err);

    if (s == KVS_OK)
        s = kvs_rows_check("blocks", (const uint8_t *)a->blocks, a->n, sizeof *a->blocks, sizeof *a->blocks,
                           sizeof *a->blocks, err);
    if (s == KVS_OK)
        s = kvs_rows_check("sums", (const uint8_t *)a->sums, a->n, sizeof *a->sums, sizeof *a->sums, sizeof *a->sums,
                           err);
    return s;
}

kvs_status kvs_block_sum(const kvs_block_sum_args *a, uint32_t *ret_bad, kvs_err *err)
{
    kvs_status s = kvs_block_sum_check(a, err);
    uint32_t bad = 0;

    if (s != KVS_OK)
        return s;
    for (uint64_t i = 0; i < a->n; i++) {
        const int32_t block = a->blocks[i];

        a->sums[i] = 0;
        if (block >= 0 && (uint32_t)block >= a->view.n_blocks)
            bad++;
        else if (block >= 0)
            a->sums[i] = kvs_sum(kvs_view_page(&a->view, (uint32_t)block, KVS_SITE_BLOCK_SUM),
                                 kvs_view_length(&a->view, KVS_SITE_BLOCK_SUM));
    }
    *ret_bad = bad;
    return KVS_OK;
}
