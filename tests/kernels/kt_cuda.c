#include "tests/kernels/kt_device.h"

#include <stdio.h>

#ifdef KVS_CUDA
#include <cuda_runtime_api.h>

#include "kernels/kernels_cuda.h"

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        cudaError_t try_ = (call);                                                                                     \
        if (try_ != cudaSuccess)                                                                                       \
            kt_die("%s: %s", #call, cudaGetErrorString(try_));                                                         \
    } while (0)

bool kt_cuda_open(kt *k, char *why, size_t cap)
{
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    kvs_err err = {.msg = ""};

    if (e != cudaSuccess || n == 0) {
        (void)snprintf(why, cap, "no CUDA device: %s", e != cudaSuccess ? cudaGetErrorString(e) : "none");
        return false;
    }
    if (kvs_kernels_init(&err) != KVS_OK)
        kt_die("kvs_kernels_init: %s", err.msg);
    TRY(cudaStreamCreateWithFlags(&k->stream, cudaStreamNonBlocking));
    return true;
}

void kt_cuda_close(kt *k)
{
    TRY(cudaStreamDestroy(k->stream));
}

void *kt_cuda_alloc(uint64_t bytes)
{
    void *p = NULL;

    TRY(cudaMalloc(&p, bytes));
    return p;
}

void kt_cuda_free(void *p)
{
    TRY(cudaFree(p));
}

void kt_cuda_fill(void *p, int byte, uint64_t bytes)
{
    TRY(cudaMemset(p, byte, bytes));
    TRY(cudaDeviceSynchronize());
}

void kt_cuda_put(void *dev, const void *host, uint64_t bytes)
{
    TRY(cudaMemcpy(dev, host, bytes, cudaMemcpyHostToDevice));
    /* A copy from pageable memory may still be on its way, and k->stream waits for nobody. */
    TRY(cudaDeviceSynchronize());
}

void kt_cuda_get(const kt *k, void *host, const void *dev, uint64_t bytes)
{
    TRY(cudaStreamSynchronize(k->stream));
    TRY(cudaMemcpy(host, dev, bytes, cudaMemcpyDeviceToHost));
}

kvs_status kt_cuda_wait(const kt *k, kvs_err *err)
{
    cudaError_t e = cudaStreamSynchronize(k->stream);

    return e == cudaSuccess ? KVS_OK : kvs_fail(err, KVS_E_DEVICE, "running: %s", cudaGetErrorString(e));
}

void kt_cuda_capture_begin(const kt *k)
{
    TRY(cudaStreamBeginCapture(k->stream, cudaStreamCaptureModeGlobal));
}

void *kt_cuda_capture_end(const kt *k, bool keep)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;

    TRY(cudaStreamEndCapture(k->stream, &graph));
    if (keep)
        TRY(cudaGraphInstantiate(&exec, graph, 0));
    TRY(cudaGraphDestroy(graph));
    return exec;
}

void kt_cuda_replay(const kt *k, void *exec)
{
    TRY(cudaGraphLaunch(exec, k->stream));
}

void kt_cuda_graph_free(void *exec)
{
    TRY(cudaGraphExecDestroy(exec));
}
#else
bool kt_cuda_open(kt *k, char *why, size_t cap)
{
    (void)k;
    (void)snprintf(why, cap, "built without CUDA");
    return false;
}

#define NONE kt_die("built without CUDA")
void kt_cuda_close(kt *k)
{
    (void)k;
}

void *kt_cuda_alloc(uint64_t bytes)
{
    (void)bytes;
    NONE;
}

void kt_cuda_free(void *p)
{
    (void)p;
    NONE;
}

void kt_cuda_fill(void *p, int byte, uint64_t bytes)
{
    (void)p, (void)byte, (void)bytes;
    NONE;
}

void kt_cuda_put(void *dev, const void *host, uint64_t bytes)
{
    (void)dev, (void)host, (void)bytes;
    NONE;
}

void kt_cuda_get(const kt *k, void *host, const void *dev, uint64_t bytes)
{
    (void)k, (void)host, (void)dev, (void)bytes;
    NONE;
}

kvs_status kt_cuda_wait(const kt *k, kvs_err *err)
{
    (void)k, (void)err;
    NONE;
}

void kt_cuda_capture_begin(const kt *k)
{
    (void)k;
    NONE;
}

void *kt_cuda_capture_end(const kt *k, bool keep)
{
    (void)k, (void)keep;
    NONE;
}

void kt_cuda_replay(const kt *k, void *exec)
{
    (void)k, (void)exec;
    NONE;
}

void kt_cuda_graph_free(void *exec)
{
    (void)exec;
    NONE;
}
#endif
