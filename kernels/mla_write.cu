/* MLA write on a GPU: a thread block takes ROWS tokens of a layer; some of its threads find their rows, then all of
 * them move or convert 8 values at a time (16 bytes of a copy).
 *
 * A row of the cache starts at a multiple of 16 whatever the view is; the sources may start at any value, so they are
 * read value by value unless base and pitches are multiples of 16 too. */
#include "kernels/cuda_kernels.h"
#include "kernels/kernels_cuda.h"
#include "kernels/mla_check.h"
#include "kernels/rows.cuh"

namespace
{

using namespace kvs;

enum { ROWS = 8, UNDER_WAY = 3, EIGHT = 8, LATENT = KVS_MLA_LATENT, ROPE = KVS_MLA_ROPE };
enum { LATENT_UNITS = LATENT / EIGHT, UNITS = (LATENT + ROPE) / EIGHT };
enum { TILE = 128, TILE_LANES = TILE / EIGHT, SCALES_AT = LATENT, ROPE_AT = LATENT + LATENT / TILE * 4 };

enum kind { COPY, FP8, RECORD };

template <unsigned LAYERS> struct params {
    kvs_mla_write_args a;
    uint64_t kv_c_layer_stride, k_pe_layer_stride, slot_layer_stride;
    uint32_t *bad;
    uint32_t latent_whole, rope_whole; /* loads of 16 bytes */
    uint8_t *base[LAYERS];
};

/* Where the rows of this thread block come from. */
struct source {
    const uint8_t *kv_c, *k_pe;
    uint64_t kv_c_stride, k_pe_stride;
    bool latent_whole, rope_whole;
};

template <unsigned LAYERS> __device__ inline source source_of(const params<LAYERS> &p)
{
    const uint64_t layer = blockIdx.y, first = (uint64_t)blockIdx.x * ROWS;

    return {p.a.kv_c + layer * p.kv_c_layer_stride + first * p.a.kv_c_stride,
            p.a.k_pe + layer * p.k_pe_layer_stride + first * p.a.k_pe_stride,
            p.a.kv_c_stride,
            p.a.k_pe_stride,
            p.latent_whole != 0,
            p.rope_whole != 0};
}

template <unsigned LAYERS> __device__ inline void find_rows(const params<LAYERS> &p, uint8_t **row)
{
    constexpr kvs_site site = LAYERS == 1 ? KVS_SITE_MLA_WRITE : KVS_SITE_MLA_WRITE_LAYERS;
    const uint64_t layer = blockIdx.y, t = (uint64_t)blockIdx.x * ROWS + threadIdx.x;

    if (threadIdx.x < ROWS) {
        const int64_t slot = t < p.a.n_tokens ? p.a.slot_mapping[layer * p.slot_layer_stride + t] : -1;

        row[threadIdx.x] = nullptr;
        if (slot_of(p.a.view, slot, p.bad)) {
            kvs_view v = p.a.view;
            const kvs_view_place at = kvs_view_split(&v, (uint64_t)slot, site);

            v.base = p.base[layer];
            row[threadIdx.x] = kvs_view_row(&v, at.page, at.token, site);
        }
    }
    __syncthreads();
}

/* 16 bytes of a source: VALUE bytes a value. */
template <int VALUE> __device__ inline uint4 read16(const uint8_t *src, bool whole)
{
    union {
        uint4 all;
        uint32_t four[4];
        uint16_t two[8];
    } u;

    if (whole)
        return *reinterpret_cast<const uint4 *>(src);
#pragma unroll
    for (int i = 0; i < CHUNK / VALUE; i++)
        if (VALUE == 2)
            u.two[i] = reinterpret_cast<const uint16_t *>(src)[i];
        else
            u.four[i] = reinterpret_cast<const uint32_t *>(src)[i];
    return u.all;
}

template <int VALUE> __device__ inline void copy_rows(const source &s, uint8_t *const *row)
{
    constexpr uint32_t latent = LATENT * VALUE / CHUNK, all = (LATENT + ROPE) * VALUE / CHUNK;

    for_units<UNDER_WAY, uint4>(
        ROWS * all,
        [&](uint32_t i) {
            const uint32_t t = i / all, c = i % all;

            if (row[t] == nullptr)
                return uint4{};
            return c < latent ? read16<VALUE>(s.kv_c + t * s.kv_c_stride + c * CHUNK, s.latent_whole)
                              : read16<VALUE>(s.k_pe + t * s.k_pe_stride + (c - latent) * CHUNK, s.rope_whole);
        },
        [&](uint32_t i, const uint4 &v) {
            if (row[i / all] != nullptr)
                *reinterpret_cast<uint4 *>(row[i / all] + i % all * CHUNK) = v;
        });
}

__device__ inline uint2 quantised(float v[EIGHT], const divisor &d)
{
#pragma unroll
    for (int i = 0; i < EIGHT; i++)
        v[i] = divide(v[i], d);
    return pack8_e4m3(v);
}

template <uint32_t TYPE> __device__ inline void quantise_rows(const source &s, uint8_t *const *row, float scale)
{
    constexpr uint32_t bytes = EIGHT * (TYPE == KVS_VALUE_FP32 ? 4 : 2);
    const divisor d = divisor_of(scale);

    for_units<UNDER_WAY, eight>(
        ROWS * UNITS,
        [&](uint32_t i) {
            const uint32_t t = i / UNITS, c = i % UNITS;

            if (row[t] == nullptr)
                return eight{};
            return c < LATENT_UNITS
                       ? load8<TYPE>(s.kv_c + t * s.kv_c_stride + c * bytes, s.latent_whole)
                       : load8<TYPE>(s.k_pe + t * s.k_pe_stride + (c - LATENT_UNITS) * bytes, s.rope_whole);
        },
        [&](uint32_t i, const eight &e) {
            float v[EIGHT];

            if (row[i / UNITS] == nullptr)
                return;
            unpack8<TYPE>(e, v);
            *reinterpret_cast<uint2 *>(row[i / UNITS] + i % UNITS * EIGHT) = quantised(v, d);
        });
}

/* Half a warp has a tile.  A warp never has two rows. */
__device__ inline void put_tile(uint8_t *row, uint32_t c, const eight &e)
{
    float amax = 0, scale, v[EIGHT];

    unpack8<KVS_VALUE_BF16>(e, v);
#pragma unroll
    for (int i = 0; i < EIGHT; i++)
        amax = kvs_amax(amax, v[i]);
#pragma unroll
    for (int step = TILE_LANES / 2; step > 0; step /= 2)
        amax = kvs_amax(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
    if (row == nullptr)
        return;
    scale = kvs_fp8_record_scale(amax);
    *reinterpret_cast<uint2 *>(row + c * EIGHT) = quantised(v, divisor_of(scale));
    if (c % TILE_LANES == 0)
        *reinterpret_cast<float *>(row + SCALES_AT + c / TILE_LANES * 4) = scale;
}

__device__ inline void put_records(const source &s, uint8_t *const *row)
{
    constexpr uint32_t n = ROWS * LATENT_UNITS / ROWS_THREADS, rope = ROPE * 2 / CHUNK;
    eight e[n] = {};

#pragma unroll
    for (uint32_t u = 0; u < n; u++) {
        const uint32_t i = threadIdx.x + u * ROWS_THREADS, t = i / LATENT_UNITS;

        if (row[t] != nullptr)
            e[u] = load8<KVS_VALUE_BF16>(s.kv_c + t * s.kv_c_stride + i % LATENT_UNITS * CHUNK, s.latent_whole);
    }
    if (threadIdx.x < ROWS * rope && row[threadIdx.x / rope] != nullptr) {
        const uint32_t t = threadIdx.x / rope, c = threadIdx.x % rope * CHUNK;

        *reinterpret_cast<uint4 *>(row[t] + ROPE_AT + c) = read16<2>(s.k_pe + t * s.k_pe_stride + c, s.rope_whole);
    }
#pragma unroll
    for (uint32_t u = 0; u < n; u++) {
        const uint32_t i = threadIdx.x + u * ROWS_THREADS;

        put_tile(row[i / LATENT_UNITS], i % LATENT_UNITS, e[u]);
    }
}

template <kind KIND, uint32_t TYPE, unsigned LAYERS>
__global__ void __launch_bounds__(ROWS_THREADS) write_kernel(const __grid_constant__ params<LAYERS> p)
{
    __shared__ uint8_t *row[ROWS];
    const source s = source_of(p);

    find_rows(p, row);
    if constexpr (KIND == COPY)
        copy_rows<TYPE == KVS_VALUE_FP32 ? 4 : 2>(s, row);
    else if constexpr (KIND == FP8)
        quantise_rows<TYPE>(s, row, p.a.scale[blockIdx.y]);
    else
        put_records(s, row);
}

template <unsigned LAYERS> using write_kernel_ptr = void (*)(params<LAYERS>);

template <unsigned LAYERS> struct entry {
    kind k;
    uint32_t type;
    write_kernel_ptr<LAYERS> kernel;
};

/* Both 2-byte types are copied by one kernel. */
template <unsigned LAYERS>
const entry<LAYERS> KERNELS[] = {
    {COPY, KVS_VALUE_BF16, write_kernel<COPY, KVS_VALUE_BF16, LAYERS>},
    {COPY, KVS_VALUE_FP16, write_kernel<COPY, KVS_VALUE_BF16, LAYERS>},
    {COPY, KVS_VALUE_FP32, write_kernel<COPY, KVS_VALUE_FP32, LAYERS>},
    {FP8, KVS_VALUE_BF16, write_kernel<FP8, KVS_VALUE_BF16, LAYERS>},
    {FP8, KVS_VALUE_FP16, write_kernel<FP8, KVS_VALUE_FP16, LAYERS>},
    {FP8, KVS_VALUE_FP32, write_kernel<FP8, KVS_VALUE_FP32, LAYERS>},
    {RECORD, KVS_VALUE_BF16, write_kernel<RECORD, KVS_VALUE_BF16, LAYERS>},
};

kind kind_of(uint32_t format)
{
    return format == KVS_FORMAT_mla_fp8 ? FP8 : format == KVS_FORMAT_fp8_ds_mla ? RECORD : COPY;
}

template <unsigned LAYERS> kvs_status init(kvs_err *err)
{
    for (const entry<LAYERS> &e : KERNELS<LAYERS>) {
        const kvs_status s = rows_load(e.kernel, "cudaFuncGetAttributes(mla_write)", err);

        if (s != KVS_OK)
            return s;
    }
    return KVS_OK;
}

template <unsigned LAYERS>
kvs_status launch(const params<LAYERS> &p, uint32_t type, uint32_t n_layers, CUstream_st *stream, kvs_err *err)
{
    unsigned blocks = 0;
    const kvs_status s = rows_begin(p.a.n_tokens, ROWS, p.bad, stream, &blocks, err);

    if (s != KVS_OK || blocks == 0 || n_layers == 0)
        return s;
    for (const entry<LAYERS> &e : KERNELS<LAYERS>)
        if (e.k == kind_of(p.a.view.format) && e.type == type)
            e.kernel<<<dim3(blocks, n_layers), ROWS_THREADS, 0, stream>>>(p);
    return rows_end("mla_write launch", err);
}

} // namespace

extern "C" kvs_status kvs_mla_write_cuda_init(kvs_err *err)
{
    const kvs_status s = init<1>(err);

    return s == KVS_OK ? init<KVS_MLA_MAX_LAYERS>(err) : s;
}

extern "C" kvs_status kvs_mla_write_cuda(const kvs_mla_write_args *a, uint32_t *ret_bad, CUstream_st *stream,
                                         kvs_err *err)
{
    uint32_t type = 0;
    const kvs_status s = kvs_mla_write_check(a, &type, err);
    params<1> p = {};

    if (s != KVS_OK)
        return s;
    p.a = *a;
    p.bad = ret_bad;
    p.latent_whole = aligned(a->kv_c, a->kv_c_stride, CHUNK);
    p.rope_whole = aligned(a->k_pe, a->k_pe_stride, CHUNK);
    p.base[0] = a->view.base;
    return launch(p, type, 1, stream, err);
}

extern "C" kvs_status kvs_mla_write_layers_cuda(const kvs_mla_write_layers_args *a, uint32_t *ret_bad,
                                                CUstream_st *stream, kvs_err *err)
{
    uint32_t type = 0;
    const kvs_status s = kvs_mla_write_layers_check(a, &type, err);
    params<KVS_MLA_MAX_LAYERS> p = {};

    if (s != KVS_OK)
        return s;
    if (a->n_layers > 0)
        p.a = kvs_mla_write_layer(a, 0);
    p.kv_c_layer_stride = a->kv_c_layer_stride;
    p.k_pe_layer_stride = a->k_pe_layer_stride;
    p.slot_layer_stride = a->slot_layer_stride;
    p.bad = ret_bad;
    p.latent_whole = aligned(a->kv_c, a->kv_c_stride | a->kv_c_layer_stride, CHUNK);
    p.rope_whole = aligned(a->k_pe, a->k_pe_stride | a->k_pe_layer_stride, CHUNK);
    for (uint32_t layer = 0; layer < a->n_layers; layer++)
        p.base[layer] = a->base[layer];
    return launch(p, type, a->n_layers, stream, err);
}
