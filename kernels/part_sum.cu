/* Part sums: a warp takes a part.  Of each KiB (16 stripes of 64 bytes) a lane has the same 16 bytes of two stripes, so that loads
 * are whole lines and the two words that exchange their values are with one lane; eight KiB are on their way at once, and the
 * next eight while these are added up.  All eight lanes that have the same place in a stripe keep the same accumulators. */
#include <cinttypes>

#include <cuda_runtime.h>

#include "kernels/cuda_error.h"
#include "kernels/cuda_kernels.h"
#include "kernels/part_sum.h"

namespace
{

enum { WARPS = 4, LANES = 32, PAIRS = 4 /* of words, in a stripe */, AHEAD = 8 /* KiB */ };
enum { STRIPE = 64, STRIPES = 16, KIB = STRIPE * STRIPES, CHUNK = 16, WORD = 8 };
/* Where the secret is used from, in bytes. */
enum { SCRAMBLE_AT = 128, LAST_AT = 121, MERGE_AT = 11 };

#define P32_1 UINT64_C(0x9E3779B1)
#define P32_2 UINT64_C(0x85EBCA77)
#define P32_3 UINT64_C(0xC2B2AE3D)
#define P64_1 UINT64_C(0x9E3779B185EBCA87)
#define P64_2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define P64_3 UINT64_C(0x165667B19E3779F9)
#define P64_4 UINT64_C(0x85EBCA77C2B2AE63)
#define P64_5 UINT64_C(0x27D4EB2F165667C5)
#define MIX   UINT64_C(0x165667919E3779F9)

__device__ const uint64_t SECRET[24] = {
    UINT64_C(0xBE4BA423396CFEB8), UINT64_C(0x1CAD21F72C81017C), UINT64_C(0xDB979083E96DD4DE),
    UINT64_C(0x1F67B3B7A4A44072), UINT64_C(0x78E5C0CC4EE679CB), UINT64_C(0x2172FFCC7DD05A82),
    UINT64_C(0x8E2443F7744608B8), UINT64_C(0x4C263A81E69035E0), UINT64_C(0xCB00C391BB52283C),
    UINT64_C(0xA32E531B8B65D088), UINT64_C(0x4EF90DA297486471), UINT64_C(0xD8ACDEA946EF1938),
    UINT64_C(0x3F349CE33F76FAA8), UINT64_C(0x1D4F0BC7C7BBDCF9), UINT64_C(0x3159B4CD4BE0518A),
    UINT64_C(0x647378D9C97E9FC8), UINT64_C(0xC3EBD33483ACC5EA), UINT64_C(0xEB6313FAFFA081C5),
    UINT64_C(0x49DAF0B751DD0D17), UINT64_C(0x9E68D429265516D3), UINT64_C(0xFCA1477D58BE162B),
    UINT64_C(0xCE31D07AD1B8F88F), UINT64_C(0x280416958F3ACB45), UINT64_C(0x7E404BBBCAFBD7AF),
};

struct params {
    const uint8_t *blocks[KVS_PART_SUM_BLOCKS];
    uint64_t bytes, part_bytes;
    uint64_t *parts;
    uint32_t n, n_parts;
};
static_assert(sizeof(params) <= 4096, "parameters of every driver");

struct pair {
    uint64_t a, b; /* words 2 p and 2 p + 1 of a stripe, for lane p of four */
};

/* Eight bytes from any place. */
__device__ uint64_t secret_at(uint32_t byte)
{
    const uint32_t word = byte / WORD, shift = byte % WORD * 8;

    return shift == 0 ? SECRET[word] : SECRET[word] >> shift | SECRET[word + 1] << (64 - shift);
}

__device__ pair secrets_at(uint32_t byte)
{
    return {secret_at(byte), secret_at(byte + WORD)};
}

__device__ uint64_t low_times_high(uint64_t x)
{
    return (uint64_t)(uint32_t)x * (uint32_t)(x >> 32);
}

/* One lane's 16 bytes of a stripe. */
__device__ void add(pair *acc, const uint4 &v, const pair &secret)
{
    const uint64_t a = (uint64_t)v.y << 32 | v.x, b = (uint64_t)v.w << 32 | v.z;

    acc->a += b + low_times_high(a ^ secret.a);
    acc->b += a + low_times_high(b ^ secret.b);
}

/* Over the lanes with the same place in a stripe. */
__device__ pair over_stripes(pair x)
{
#pragma unroll
    for (int step = PAIRS; step < LANES; step *= 2) {
        x.a += __shfl_xor_sync(0xFFFFFFFFu, x.a, step);
        x.b += __shfl_xor_sync(0xFFFFFFFFu, x.b, step);
    }
    return x;
}

__device__ uint64_t scramble(uint64_t acc, uint64_t secret)
{
    return (acc ^ acc >> 47 ^ secret) * P32_1;
}

__device__ void mix(pair *acc, const pair &sum, const pair &secret)
{
    acc->a = scramble(acc->a + sum.a, secret.a);
    acc->b = scramble(acc->b + sum.b, secret.b);
}

/* Up to AHEAD KiB, of which `left` are there; a KiB is two chunks a lane. */
__device__ void fetch(uint4 v[2 * AHEAD], const uint4 *p, uint32_t left)
{
#pragma unroll
    for (uint32_t i = 0; i < 2 * AHEAD; i++)
        if (i / 2 < left)
            v[i] = __ldcs(p + i * LANES);
}

__device__ void take(pair *acc, const uint4 v[2 * AHEAD], uint32_t left, const pair secret[2], const pair &scrambler)
{
    pair sum[AHEAD];

#pragma unroll
    for (uint32_t i = 0; i < AHEAD; i++) {
        sum[i] = {0, 0};
        if (i < left) {
            add(&sum[i], v[2 * i], secret[0]);
            add(&sum[i], v[2 * i + 1], secret[1]);
            sum[i] = over_stripes(sum[i]);
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < AHEAD; i++)
        if (i < left)
            mix(acc, sum[i], scrambler);
}

/* What is behind the last whole KiB, one byte at least: its whole stripes, and the last 64 bytes once more. */
__device__ void take_rest(pair *acc, const uint4 *p, uint64_t bytes, uint32_t lane, const pair secret[2])
{
    const uint32_t stripes = (uint32_t)((bytes - 1) % KIB / STRIPE);
    const uint8_t *last = reinterpret_cast<const uint8_t *>(p) + bytes - STRIPE;
    pair sum = {0, 0};

    p += (bytes - 1) / KIB * (KIB / CHUNK);
    for (uint32_t i = 0; i < 2; i++)
        if (lane / PAIRS + i * (LANES / PAIRS) < stripes)
            add(&sum, __ldcs(p + lane + i * LANES), secret[i]);
    sum = over_stripes(sum);
    acc->a += sum.a;
    acc->b += sum.b;
    add(acc, __ldcs(reinterpret_cast<const uint4 *>(last) + lane % PAIRS), secrets_at(LAST_AT + lane % PAIRS * CHUNK));
}

__device__ uint64_t fold(uint64_t a, uint64_t b)
{
    return a * b ^ __umul64hi(a, b);
}

__device__ uint64_t finish(const pair &acc, uint64_t bytes, uint32_t lane)
{
    const pair secret = secrets_at(MERGE_AT + lane % PAIRS * CHUNK);
    uint64_t h = fold(acc.a ^ secret.a, acc.b ^ secret.b);

#pragma unroll
    for (int step = 1; step < PAIRS; step *= 2)
        h += __shfl_xor_sync(0xFFFFFFFFu, h, step);
    h += bytes * P64_1;
    h = (h ^ h >> 37) * MIX;
    return h ^ h >> 32;
}

__device__ pair first_accumulators(uint32_t place)
{
    const pair start[PAIRS] = {{P32_3, P64_1}, {P64_2, P64_3}, {P64_4, P32_2}, {P64_5, P32_1}};
    pair x = start[0];

#pragma unroll
    for (uint32_t i = 1; i < PAIRS; i++)
        if (place == i)
            x = start[i];
    return x;
}

__device__ uint64_t sum_part(const uint8_t *at, uint64_t bytes, uint32_t lane)
{
    const uint32_t place = lane % PAIRS, stripe = lane / PAIRS, n = (uint32_t)((bytes - 1) / KIB);
    const pair secret[2] = {secrets_at((stripe + 2 * place) * WORD),
                            secrets_at((stripe + LANES / PAIRS + 2 * place) * WORD)};
    const pair scrambler = secrets_at(SCRAMBLE_AT + place * CHUNK);
    const uint4 *p = reinterpret_cast<const uint4 *>(at);
    pair acc = first_accumulators(place);
    uint4 v[2 * AHEAD], next[2 * AHEAD];

    fetch(v, p + lane, n);
    for (uint32_t k = 0; k < n; k += AHEAD) {
        const uint32_t left = n - k;

        fetch(next, p + lane + (uint64_t)(k + AHEAD) * (KIB / CHUNK), left > AHEAD ? left - AHEAD : 0);
        take(&acc, v, left, secret, scrambler);
#pragma unroll
        for (uint32_t i = 0; i < 2 * AHEAD; i++)
            v[i] = next[i];
    }
    take_rest(&acc, p, bytes, lane, secret);
    return finish(acc, bytes, lane);
}

__global__ void __launch_bounds__(WARPS *LANES) part_sum_kernel(const __grid_constant__ params p)
{
    const uint32_t i = blockIdx.x * WARPS + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const uint32_t block = i / p.n_parts, part = i % p.n_parts;
    uint64_t first, left, sum;

    if (block >= p.n)
        return;
    first = part * p.part_bytes;
    left = p.bytes - first;
    sum = sum_part(p.blocks[block] + first, left < p.part_bytes ? left : p.part_bytes, lane);
    if (lane == 0)
        p.parts[i] = sum;
}

} // namespace

extern "C" kvs_status kvs_part_sum_cuda_init(kvs_err *err)
{
    cudaFuncAttributes attributes;
    const cudaError_t e = cudaFuncGetAttributes(&attributes, part_sum_kernel);

    return e == cudaSuccess ? KVS_OK : kvs_cuda_fail(err, "cudaFuncGetAttributes(part_sum)", e);
}

extern "C" kvs_status kvs_part_sum_cuda(const void *const *blocks, uint32_t n, uint64_t bytes, uint64_t part_bytes,
                                        uint64_t *parts, CUstream_st *stream, kvs_err *err)
{
    const uint64_t n_parts = kvs_part_sum_fits(bytes, part_bytes) ? kvs_part_sum_parts(bytes, part_bytes) : 0;
    params p = {{}, bytes, part_bytes, parts, n, (uint32_t)n_parts};
    cudaError_t e;

    if (n == 0 || n > KVS_PART_SUM_BLOCKS)
        return kvs_fail(err, KVS_E_INVALID, "part_sum: %" PRIu32 " blocks are not 1..%d", n, KVS_PART_SUM_BLOCKS);
    if (n_parts == 0 || n_parts > INT32_MAX / KVS_PART_SUM_BLOCKS || part_bytes > UINT32_MAX)
        return kvs_fail(err, KVS_E_INVALID,
                        "part_sum: blocks of %" PRIu64 " bytes in parts of %" PRIu64
                        ": multiples of 16 are wanted, no part "
                        "shorter than %d",
                        bytes, part_bytes, KVS_PART_SUM_SHORTEST);
    for (uint32_t i = 0; i < n; i++) {
        p.blocks[i] = static_cast<const uint8_t *>(blocks[i]);
        if (reinterpret_cast<uintptr_t>(blocks[i]) % CHUNK != 0)
            return kvs_fail(err, KVS_E_INVALID, "part_sum: block %" PRIu32 " at %p is no multiple of 16", i, blocks[i]);
    }
    part_sum_kernel<<<(unsigned)((n * n_parts + WARPS - 1) / WARPS), WARPS * LANES, 0, stream>>>(p);
    e = cudaGetLastError();
    return e == cudaSuccess ? KVS_OK : kvs_cuda_fail(err, "part_sum launch", e);
}
