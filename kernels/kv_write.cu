/* Reshape and cache on a GPU: a thread block takes ROWS tokens of K or of V, 16 bytes of the cache at a time where
 * every address is aligned to them, else one value at a time. */
#include "kernels/kv_write.h"

#include "kernels/cuda_kernels.h"
#include "kernels/rows.cuh"
#include "proto/layout.h"

namespace
{

using namespace kvs;

enum { ROWS = 8 };

struct params {
    kvs_kv_write_args a;
    uint32_t *bad;
    uint32_t wide[2];                  /* K, V: 8 values at a time */
    fast_divisor n_heads, per_head[2]; /* units of a head */
};

/* Where a unit of a thread block is, and its values as they came: 8 that are copied, 16 that become e4m3. */
struct unit {
    uint32_t token, head, value;
    sixteen values;
};

template <uint32_t TYPE, bool FP8, bool WIDE> __device__ inline sixteen read_unit(const uint8_t *src)
{
    uint32_t bits;

    if (WIDE && FP8)
        return load16<TYPE>(src, true);
    if (WIDE)
        return {{load8<TYPE>(src, true), eight{}}};
    bits = TYPE == KVS_VALUE_FP32 ? *reinterpret_cast<const uint32_t *>(src) : *reinterpret_cast<const uint16_t *>(src);
    return {{{make_uint4(bits, 0, 0, 0), uint4{}}, eight{}}};
}

template <uint32_t TYPE, bool WIDE>
__device__ inline void put_e4m3(uint8_t *dst, const sixteen &values, const divisor &d)
{
    float v[16];

    unpack16<TYPE>(values, v);
    if (WIDE) {
        divide<TYPE, false>(v, d);
        *reinterpret_cast<uint4 *>(dst) = pack16_e4m3(v);
    } else {
        float one[1] = {v[0]};

        divide<TYPE, false>(one, d);
        *dst = (uint8_t)f32_to_e4m3x2(one[0], 0);
    }
}

template <uint32_t TYPE, bool FP8, bool WIDE>
__device__ inline void move(const params &p, const kvs_kv_side &d, const fast_divisor &per_head, uint8_t *const *row)
{
    constexpr uint32_t VALUES = !WIDE ? 1 : FP8 ? 16 : 8, UNDER_WAY = FP8 ? 2 : 4;
    const uint32_t first = blockIdx.x * ROWS;
    const divisor all = FP8 ? divisor_of(d.scale[0]) : divisor{};

    for_units<UNDER_WAY, unit>(
        ROWS * p.a.n_heads * per_head.by,
        [&](uint32_t i) {
            unit u = {};
            const uint8_t *src;

            u.token = fast_divide(fast_divide(i, per_head, &u.value), p.n_heads, &u.head);
            u.value *= VALUES;
            src = d.src.base + (uint64_t)(first + u.token) * d.src.token_stride + u.head * d.src.head_stride +
                  u.value * (TYPE == KVS_VALUE_FP32 ? 4 : 2);
            if (row[u.token] != nullptr)
                u.values = read_unit<TYPE, FP8, WIDE>(src);
            return u;
        },
        [&](uint32_t, const unit &u) {
            uint8_t *dst = row[u.token] + u.head * d.head_stride + u.value * (FP8 ? 1 : 2);

            if (row[u.token] == nullptr)
                return;
            if (FP8)
                put_e4m3<TYPE, WIDE>(dst, u.values, p.a.head_scales ? divisor_of(d.scale[u.head]) : all);
            else if (WIDE)
                *reinterpret_cast<uint4 *>(dst) = u.values.half[0].low;
            else
                *reinterpret_cast<uint16_t *>(dst) = (uint16_t)u.values.half[0].low.x;
        });
}

template <uint32_t TYPE, bool FP8>
__device__ inline void write_side(const params &p, const kvs_kv_side &d, int side, kvs_site site, uint32_t *bad)
{
    __shared__ uint8_t *row[ROWS];
    const uint32_t t = blockIdx.x * ROWS + threadIdx.x;

    if (threadIdx.x < ROWS) {
        const int64_t slot = t < p.a.n_tokens ? p.a.slot_mapping[t] : -1;

        row[threadIdx.x] = nullptr;
        if (slot_of(d.view, slot, bad)) {
            const kvs_view_place at = kvs_view_split(&d.view, (uint64_t)slot, site);

            row[threadIdx.x] = kvs_view_row(&d.view, at.page, at.token, site);
        }
    }
    __syncthreads();
    if (p.wide[side])
        move<TYPE, FP8, true>(p, d, p.per_head[side], row);
    else
        move<TYPE, FP8, false>(p, d, p.per_head[side], row);
}

template <uint32_t TYPE, bool K_FP8, bool V_FP8>
__global__ void __launch_bounds__(ROWS_THREADS) write_kernel(const __grid_constant__ params p)
{
    if (blockIdx.y == 0)
        write_side<TYPE, K_FP8>(p, p.a.k, 0, KVS_SITE_KV_WRITE_KEY, p.bad);
    else
        write_side<TYPE, V_FP8>(p, p.a.v, 1, KVS_SITE_KV_WRITE_VALUE, nullptr);
}

bool is_fp8(const kvs_kv_side &d)
{
    return d.view.format == KVS_FORMAT_kv_fp8;
}

/* Values of a unit: 16 bytes of the cache, or one. */
uint32_t values_of(const kvs_kv_side &d)
{
    const uint32_t values = is_fp8(d) ? 16 : 8;

    return d.dim % values == 0 && d.head_stride % CHUNK == 0 &&
                   aligned(d.src.base, d.src.token_stride | d.src.head_stride, CHUNK)
               ? values
               : 1;
}

using kernel = void (*)(params);

/* NULL: a pair of types that the checks refuse. */
kernel kernel_for(uint32_t type, bool k_fp8, bool v_fp8)
{
    switch (type * 4 + k_fp8 * 2 + v_fp8) {
    case KVS_VALUE_BF16 * 4:
        return write_kernel<KVS_VALUE_BF16, false, false>;
    case KVS_VALUE_BF16 * 4 + 1:
        return write_kernel<KVS_VALUE_BF16, false, true>;
    case KVS_VALUE_BF16 * 4 + 2:
        return write_kernel<KVS_VALUE_BF16, true, false>;
    case KVS_VALUE_BF16 * 4 + 3:
        return write_kernel<KVS_VALUE_BF16, true, true>;
    case KVS_VALUE_FP16 *
        4: /* not the kernel of bf16, whose copies have the same bits: fp8 of the other side differs */
        return write_kernel<KVS_VALUE_FP16, false, false>;
    case KVS_VALUE_FP16 * 4 + 1:
        return write_kernel<KVS_VALUE_FP16, false, true>;
    case KVS_VALUE_FP16 * 4 + 2:
        return write_kernel<KVS_VALUE_FP16, true, false>;
    case KVS_VALUE_FP16 * 4 + 3:
        return write_kernel<KVS_VALUE_FP16, true, true>;
    case KVS_VALUE_FP32 * 4 + 3:
        return write_kernel<KVS_VALUE_FP32, true, true>;
    default:
        return nullptr;
    }
}

} // namespace

extern "C" kvs_status kvs_kv_write_cuda_init(kvs_err *err)
{
    for (uint32_t i = KVS_VALUE_BF16 * 4; i <= KVS_VALUE_FP32 * 4 + 3; i++) {
        const kernel k = kernel_for(i / 4, (i & 2) != 0, (i & 1) != 0);
        const kvs_status s = k != nullptr ? rows_load(k, "cudaFuncGetAttributes(kv_write)", err) : KVS_OK;

        if (s != KVS_OK)
            return s;
    }
    return KVS_OK;
}

extern "C" kvs_status kvs_kv_write_cuda(const kvs_kv_write_args *a, uint32_t *ret_bad, CUstream_st *stream,
                                        kvs_err *err)
{
    params p = {*a, ret_bad, {values_of(a->k) > 1, values_of(a->v) > 1}, {}, {}};
    unsigned blocks = 0;
    kvs_status s = kvs_kv_write_check(a, err);

    if (s == KVS_OK)
        s = rows_begin(a->n_tokens, ROWS, ret_bad, stream, &blocks, err);
    if (s != KVS_OK || blocks == 0)
        return s;
    p.n_heads = fast_divisor_of(a->n_heads);
    p.per_head[0] = fast_divisor_of(a->k.dim / values_of(a->k));
    p.per_head[1] = fast_divisor_of(a->v.dim / values_of(a->v));
    kernel_for(a->src_type, is_fp8(a->k), is_fp8(a->v))<<<dim3(blocks, 2), ROWS_THREADS, 0, stream>>>(p);
    return rows_end("kv_write launch", err);
}
