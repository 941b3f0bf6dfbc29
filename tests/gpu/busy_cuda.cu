#include "tests/gpu/busy_cuda.h"

#include <atomic>
#include <cstdlib>
#include <pthread.h>

#include <cuda_runtime.h>

namespace
{

enum { COMPUTE_THREADS = 512, SUMS = 112, MEMORY_THREADS = 256, DEEP = 4, QUEUED = 8 };
const uint64_t MEMORY_BYTES = UINT64_C(256) << 20;

/* 512 threads of 128 registers are all registers of an SM. */
__global__ void __launch_bounds__(COMPUTE_THREADS, 1)
    compute(float *out, int rounds, volatile uint64_t *done, uint64_t n)
{
    float sum[SUMS], x = threadIdx.x * 1e-6f;

#pragma unroll
    for (int i = 0; i < SUMS; i++)
        sum[i] = (float)i;
    for (int r = 0; r < rounds; r++) {
#pragma unroll
        for (int i = 0; i < SUMS; i++)
            sum[i] = fmaf(sum[i], 0.999f, x);
    }
#pragma unroll
    for (int i = 1; i < SUMS; i++)
        sum[0] += sum[i];
    out[blockIdx.x * COMPUTE_THREADS + threadIdx.x] = sum[0];
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0)
        *done = n;
}

__global__ void __launch_bounds__(MEMORY_THREADS)
    memory(uint4 *to, const uint4 *from, uint64_t count, volatile uint64_t *done, uint64_t n)
{
    uint64_t step = (uint64_t)gridDim.x * MEMORY_THREADS;

    for (uint64_t i = (uint64_t)blockIdx.x * MEMORY_THREADS + threadIdx.x; i + (DEEP - 1) * step < count;
         i += DEEP * step) {
        uint4 v[DEEP];

#pragma unroll
        for (int k = 0; k < DEEP; k++)
            v[k] = from[i + k * step];
#pragma unroll
        for (int k = 0; k < DEEP; k++)
            to[i + k * step] = v[k];
    }
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0)
        *done = n;
}

} // namespace

struct busy {
    busy_kind kind;
    cudaStream_t stream;
    cudaEvent_t ends[QUEUED];
    uint4 *a, *b;
    volatile uint64_t *done; /* pinned */
    std::atomic<bool> stop;
    pthread_t thread;
    int sms;
    bool has_thread;
};

static void launch(busy *b, uint64_t n)
{
    if (b->kind == BUSY_COMPUTE)
        compute<<<8 * b->sms, COMPUTE_THREADS, 0, b->stream>>>(reinterpret_cast<float *>(b->a), 150, b->done, n);
    else
        memory<<<MEMORY_BYTES / sizeof(uint4) / DEEP / MEMORY_THREADS, MEMORY_THREADS, 0, b->stream>>>(
            b->b, b->a, MEMORY_BYTES / sizeof(uint4), b->done, n);
}

static void *run(void *arg)
{
    busy *b = static_cast<busy *>(arg);

    for (uint64_t n = 1; !b->stop; n++) {
        if (n > QUEUED)
            (void)cudaEventSynchronize(b->ends[n % QUEUED]);
        launch(b, n);
        (void)cudaEventRecord(b->ends[n % QUEUED], b->stream);
    }
    (void)cudaStreamSynchronize(b->stream);
    return nullptr;
}

extern "C" bool busy_start(busy **ret, busy_kind kind, int priority)
{
    busy *b = new busy{};
    bool good;

    b->kind = kind;
    good = cudaDeviceGetAttribute(&b->sms, cudaDevAttrMultiProcessorCount, 0) == cudaSuccess &&
           cudaStreamCreateWithPriority(&b->stream, cudaStreamNonBlocking, priority) == cudaSuccess &&
           cudaMalloc(reinterpret_cast<void **>(&b->a), MEMORY_BYTES) == cudaSuccess &&
           cudaMalloc(reinterpret_cast<void **>(&b->b), MEMORY_BYTES) == cudaSuccess &&
           cudaHostAlloc(const_cast<void **>(reinterpret_cast<volatile void **>(&b->done)), 64, cudaHostAllocMapped) ==
               cudaSuccess;
    for (int i = 0; i < QUEUED && good; i++)
        good = cudaEventCreateWithFlags(&b->ends[i], cudaEventBlockingSync | cudaEventDisableTiming) == cudaSuccess;
    if (good) {
        *b->done = 0;
        launch(b, 0); /* loaded before anybody measures */
        good = cudaStreamSynchronize(b->stream) == cudaSuccess && pthread_create(&b->thread, nullptr, run, b) == 0;
        b->has_thread = good;
    }
    if (!good) {
        busy_stop(b);
        return false;
    }
    *ret = b;
    return true;
}

extern "C" uint64_t busy_progress(const busy *b)
{
    return *b->done;
}

extern "C" void busy_stop(busy *b)
{
    if (b == nullptr)
        return;
    b->stop = true;
    if (b->has_thread)
        (void)pthread_join(b->thread, nullptr);
    for (int i = 0; i < QUEUED; i++)
        if (b->ends[i] != nullptr)
            (void)cudaEventDestroy(b->ends[i]);
    if (b->stream != nullptr)
        (void)cudaStreamDestroy(b->stream);
    (void)cudaFree(b->a);
    (void)cudaFree(b->b);
    (void)cudaFreeHost(const_cast<uint64_t *>(b->done));
    delete b;
}
