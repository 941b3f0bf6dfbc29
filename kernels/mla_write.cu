/* MLA write on a GPU.  Copies: a thread block takes a few tokens of a layer, some of its threads find their rows, then
 * all of them move chunks of 16 bytes.  Conversions: a warp takes a few tokens and has all of their values in registers
 * before it stores the first one.
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

enum { LATENT = KVS_MLA_LATENT, ROPE = KVS_MLA_ROPE, TILE = 128 };
enum { SCALES_AT = LATENT, ROPE_AT = LATENT + LATENT / TILE * 4 }; /* in a record */

/* Copies. */
enum { ROWS = 8, UNDER_WAY = 3 };

/* Conversions: a lane has 8 values of each half of a latent, and 8 rope values of one of the warp's rows. */
enum { EIGHT = 8, LANES = 32, WARPS = 4, HALVES = 2, HALF = LATENT / HALVES, ROPE_LANES = ROPE / EIGHT };
static_assert(HALF == LANES * EIGHT && HALF % TILE == 0, "a warp has half of a row, and whole tiles of it");

enum kind { COPY, FP8, RECORD };

/* Tokens of a warp: as many as there are rope values for, fewer of the wide type, which needs twice the registers. */
__host__ __device__ constexpr uint32_t warp_rows(uint32_t type)
{
    return type == KVS_VALUE_FP32 ? 2 : LANES / ROPE_LANES;
}

template <unsigned LAYERS> struct params {
    kvs_mla_write_args a;
    uint64_t kv_c_layer_stride, k_pe_layer_stride, slot_layer_stride;
    uint32_t *bad;
    uint32_t latent_whole, rope_whole; /* loads of 16 bytes */
    uint8_t *base[LAYERS];
};

/* Where rows come from: those of this thread block's layer. */
struct source {
    const uint8_t *kv_c, *k_pe;
    uint64_t kv_c_stride, k_pe_stride;
    bool latent_whole, rope_whole;
};

template <unsigned LAYERS> __device__ inline source source_of(const params<LAYERS> &p)
{
    const uint64_t layer = blockIdx.y;

    return {p.a.kv_c + layer * p.kv_c_layer_stride,
            p.a.k_pe + layer * p.k_pe_layer_stride,
            p.a.kv_c_stride,
            p.a.k_pe_stride,
            p.latent_whole != 0,
            p.rope_whole != 0};
}

/* Where token t goes; null: nowhere. */
template <unsigned LAYERS> __device__ inline uint8_t *find_row(const params<LAYERS> &p, uint64_t t)
{
    constexpr kvs_site site = LAYERS == 1 ? KVS_SITE_MLA_WRITE : KVS_SITE_MLA_WRITE_LAYERS;
    const uint64_t layer = blockIdx.y;
    const int64_t slot = t < p.a.n_tokens ? p.a.slot_mapping[layer * p.slot_layer_stride + t] : -1;

    if (!slot_of(p.a.view, slot, p.bad))
        return nullptr;
    kvs_view v = p.a.view;
    const kvs_view_place at = kvs_view_split(&v, (uint64_t)slot, site);

    v.base = p.base[layer];
    return kvs_view_row(&v, at.page, at.token, site);
}

/* ---- copies ---- */

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

template <int VALUE, unsigned LAYERS>
__global__ void __launch_bounds__(ROWS_THREADS) copy_kernel(const __grid_constant__ params<LAYERS> p)
{
    constexpr uint32_t latent = LATENT * VALUE / CHUNK, all = (LATENT + ROPE) * VALUE / CHUNK;
    const uint64_t first = (uint64_t)blockIdx.x * ROWS;
    const source s = source_of(p);
    __shared__ uint8_t *row[ROWS];

    if (threadIdx.x < ROWS)
        row[threadIdx.x] = find_row(p, first + threadIdx.x);
    __syncthreads();
    for_units<UNDER_WAY, uint4>(
        ROWS * all,
        [&](uint32_t i) {
            const uint64_t t = first + i / all;
            const uint32_t c = i % all;

            if (row[i / all] == nullptr)
                return uint4{};
            return c < latent ? read16<VALUE>(s.kv_c + t * s.kv_c_stride + c * CHUNK, s.latent_whole)
                              : read16<VALUE>(s.k_pe + t * s.k_pe_stride + (c - latent) * CHUNK, s.rope_whole);
        },
        [&](uint32_t i, const uint4 &v) {
            if (row[i / all] != nullptr)
                *reinterpret_cast<uint4 *>(row[i / all] + i % all * CHUNK) = v;
        });
}

/* ---- conversions ---- */

template <uint32_t TYPE> __device__ inline uint2 quantised(const eight &e, const divisor &d)
{
    float v[EIGHT];

    unpack8<TYPE>(e, v);
#pragma unroll
    for (int i = 0; i < EIGHT; i++)
        v[i] = divide(v[i], d);
    return pack8_e4m3(v);
}

/* The scale of the tile that this lane has a part of; by all lanes. */
__device__ inline float tile_scale(const eight &e)
{
    float amax = 0, v[EIGHT];

    unpack8<KVS_VALUE_BF16>(e, v);
#pragma unroll
    for (int i = 0; i < EIGHT; i++)
        amax = kvs_amax(amax, v[i]);
#pragma unroll
    for (int step = TILE / EIGHT / 2; step > 0; step /= 2)
        amax = kvs_amax(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
    return kvs_fp8_record_scale(amax);
}

/* Half h of the latent of a row (null: of none; the other lanes want this one in tile_scale all the same). */
template <kind KIND, uint32_t TYPE>
__device__ inline void put_half(uint8_t *row, int h, const eight &e, const divisor &whole)
{
    const uint32_t lane = threadIdx.x % LANES, at = h * HALF + lane * EIGHT;

    if constexpr (KIND == FP8) {
        if (row != nullptr)
            *reinterpret_cast<uint2 *>(row + at) = quantised<TYPE>(e, whole);
    } else {
        const float scale = tile_scale(e);

        if (row == nullptr)
            return;
        *reinterpret_cast<uint2 *>(row + at) = quantised<TYPE>(e, divisor_of(scale));
        if (at % TILE == 0)
            *reinterpret_cast<float *>(row + SCALES_AT + at / TILE * sizeof scale) = scale;
    }
}

__device__ inline uint8_t *row_of_lane(uint8_t *mine, uint32_t lane)
{
    return reinterpret_cast<uint8_t *>(__shfl_sync(0xFFFFFFFFu, reinterpret_cast<uint64_t>(mine), (int)lane));
}

template <kind KIND, uint32_t TYPE, unsigned LAYERS>
__global__ void __launch_bounds__(WARPS *LANES) convert_kernel(const __grid_constant__ params<LAYERS> p)
{
    constexpr uint32_t N = warp_rows(TYPE), bytes = EIGHT * (TYPE == KVS_VALUE_FP32 ? 4 : 2);
    const uint32_t lane = threadIdx.x % LANES, rope_row = lane / ROPE_LANES, c = lane % ROPE_LANES;
    const uint64_t first = ((uint64_t)blockIdx.x * WARPS + threadIdx.x / LANES) * N;
    const source s = source_of(p);
    uint8_t *const mine = lane < N ? find_row(p, first + lane) : nullptr;
    uint8_t *row[N], *const rope_to = row_of_lane(mine, rope_row);
    eight latent[N][HALVES] = {}, rope = {};

#pragma unroll
    for (uint32_t r = 0; r < N; r++) {
        row[r] = row_of_lane(mine, r);
#pragma unroll
        for (int h = 0; h < HALVES; h++)
            if (row[r] != nullptr)
                latent[r][h] =
                    load8<TYPE>(s.kv_c + (first + r) * s.kv_c_stride + (h * LANES + lane) * bytes, s.latent_whole);
    }
    if (rope_to != nullptr)
        rope = load8<TYPE>(s.k_pe + (first + rope_row) * s.k_pe_stride + c * bytes, s.rope_whole);
    const divisor whole = divisor_of(KIND == FP8 ? p.a.scale[blockIdx.y] : 1.0f);

#pragma unroll
    for (uint32_t r = 0; r < N; r++)
#pragma unroll
        for (int h = 0; h < HALVES; h++)
            put_half<KIND, TYPE>(row[r], h, latent[r][h], whole);
    if (rope_to != nullptr && KIND == FP8)
        *reinterpret_cast<uint2 *>(rope_to + LATENT + c * EIGHT) = quantised<TYPE>(rope, whole);
    if (rope_to != nullptr && KIND == RECORD)
        *reinterpret_cast<uint4 *>(rope_to + ROPE_AT + c * CHUNK) = rope.low;
}

/* ---- launch ---- */

template <unsigned LAYERS> struct entry {
    kind k;
    uint32_t type, threads, rows; /* of a thread block */
    void (*kernel)(params<LAYERS>);
};

#define COPY_OF(type, value)                                                                                           \
    {                                                                                                                  \
        COPY, KVS_VALUE_##type, ROWS_THREADS, ROWS, copy_kernel<value, LAYERS>                                         \
    }
#define CONVERT(kind, type)                                                                                            \
    {                                                                                                                  \
        kind, KVS_VALUE_##type, WARPS *LANES, WARPS *warp_rows(KVS_VALUE_##type),                                      \
            convert_kernel<kind, KVS_VALUE_##type, LAYERS>                                                             \
    }
template <unsigned LAYERS>
const entry<LAYERS> KERNELS[] = {COPY_OF(BF16, 2),   COPY_OF(FP16, 2),   COPY_OF(FP32, 4),     CONVERT(FP8, BF16),
                                 CONVERT(FP8, FP16), CONVERT(FP8, FP32), CONVERT(RECORD, BF16)};

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

template <unsigned LAYERS> const entry<LAYERS> &entry_of(uint32_t format, uint32_t type)
{
    const entry<LAYERS> *e = KERNELS<LAYERS>;

    while (e->k != kind_of(format) || e->type != type) /* the check let nothing else through */
        e++;
    return *e;
}

template <unsigned LAYERS>
kvs_status launch(const params<LAYERS> &p, uint32_t type, uint32_t n_layers, CUstream_st *stream, kvs_err *err)
{
    const entry<LAYERS> &e = entry_of<LAYERS>(p.a.view.format, type);
    unsigned blocks = 0;
    const kvs_status s = rows_begin(p.a.n_tokens, e.rows, p.bad, stream, &blocks, err);

    if (s != KVS_OK || blocks == 0 || n_layers == 0)
        return s;
    e.kernel<<<dim3(blocks, n_layers), e.threads, 0, stream>>>(p);
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
