#include "kernels/client_stream.h"

#ifndef KVS_CUDA

static kvs_status not_built(kvs_err *err)
{
    return kvs_fail(err, KVS_E_UNSUPPORTED,
                    "CUDA streams: this build has no CUDA (nvcc was not there when it was made)");
}

kvs_status client_words_open(client_words **ret, void *base, uint64_t bytes, void *stream, kvs_err *err)
{
    (void)ret;
    (void)base;
    (void)bytes;
    (void)stream;
    return not_built(err);
}

void client_words_close(client_words *w)
{
    (void)w;
}

void client_words_forget(client_words *w)
{
    (void)w;
}

kvs_status client_stream_write(client_words *w, void *stream, uint64_t offset, uint64_t value, kvs_err *err)
{
    (void)w;
    (void)stream;
    (void)offset;
    (void)value;
    return not_built(err);
}

kvs_status client_stream_wait(client_words *w, void *stream, uint64_t offset, uint64_t value, kvs_err *err)
{
    (void)w;
    (void)stream;
    (void)offset;
    (void)value;
    return not_built(err);
}

kvs_status client_stream_check(void *stream, kvs_err *err)
{
    (void)stream;
    return not_built(err);
}

bool client_stream_drain(void *stream, uint32_t timeout_ms)
{
    (void)stream;
    (void)timeout_ms;
    return true;
}

/* This library cannot have given a GPU anything, but its program can. */
kvs_status client_stream_settle(kvs_err *err)
{
    return kvs_fail(
        err, KVS_E_UNSUPPORTED,
        "GPU memory: this build has no CUDA and cannot wait for the GPU; do so and give a mark that says it");
}

kvs_status client_mark_open(client_mark **ret, void *stream, kvs_err *err)
{
    (void)ret;
    (void)stream;
    return not_built(err);
}

void client_mark_close(client_mark *m)
{
    (void)m;
}

#else

#include <stdlib.h>
#include <time.h>

#include "kernels/client_driver.h"
#include "kernels/client_stream_impl.h"

struct client_words {
    void *base;
    uint64_t bytes;
    CUcontext context; /* in which it was registered; the words can be reached from every other, too */
};

/* The driver, and the stream's context pushed; outside() pops it. */
static kvs_status inside(void *stream, kvs_err *err)
{
    kvs_status s = client_driver_load(err);
    CUcontext c = NULL;
    CUresult e;

    if (s != KVS_OK)
        return s;
    e = client_driver.cuStreamGetCtx(stream, &c);
    if (e == CUDA_ERROR_INVALID_CONTEXT && stream == NULL)
        return kvs_fail(err, KVS_E_INVALID, "stream: the default stream of a thread that has no current CUDA context");
    if (e != CUDA_SUCCESS)
        return client_driver_failed(err, "cuStreamGetCtx", e);
    e = client_driver.cuCtxPushCurrent(c);
    return e == CUDA_SUCCESS ? KVS_OK : client_driver_failed(err, "cuCtxPushCurrent", e);
}

static void outside(void)
{
    CUcontext c;

    (void)client_driver.cuCtxPopCurrent(&c);
}

/* The context is pushed. */
static kvs_status check_inside(void *stream, kvs_err *err)
{
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult e = client_driver.cuStreamIsCapturing(stream, &capture);

    if (e == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || (e == CUDA_SUCCESS && capture != CU_STREAM_CAPTURE_STATUS_NONE))
        return kvs_fail(
            err, KVS_E_STATE,
            "stream: it is being captured into a graph, which would repeat the same counter value each time "
            "it runs; make this call outside of the capture");
    return e == CUDA_SUCCESS ? KVS_OK : client_driver_failed(err, "cuStreamIsCapturing", e);
}

/* ---- words ---- */

kvs_status client_words_open(client_words **ret, void *base, uint64_t bytes, void *stream, kvs_err *err)
{
    client_words *w = calloc(1, sizeof *w);
    CUresult e;
    kvs_status s;

    if (w == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "counter page: no memory");
    s = inside(stream, err);
    if (s == KVS_OK) {
        e = client_driver.cuStreamGetCtx(stream, &w->context);
        if (e == CUDA_SUCCESS)
            e = client_driver.cuMemHostRegister(base, bytes,
                                                CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
        if (e != CUDA_SUCCESS)
            s = client_driver_failed(err, "counter page: cuMemHostRegister", e);
        outside();
    }
    if (s != KVS_OK) {
        free(w);
        return s;
    }
    w->base = base;
    w->bytes = bytes;
    *ret = w;
    return KVS_OK;
}

void client_words_close(client_words *w)
{
    if (w == NULL)
        return;
    /* Its context may be gone, and the registration with it: then the push fails, and there is nothing to do. */
    if (client_driver.cuCtxPushCurrent(w->context) == CUDA_SUCCESS) {
        (void)client_driver.cuMemHostUnregister(w->base);
        outside();
    }
    free(w);
}

void client_words_forget(client_words *w)
{
    free(w);
}

/* The context is pushed. */
static kvs_status address_of(const client_words *w, uint64_t offset, CUdeviceptr *ret, kvs_err *err)
{
    CUresult e;

    if (offset % 8 != 0 || w->bytes < 8 || offset > w->bytes - 8)
        return kvs_fail(err, KVS_E_RANGE, "word: offset %llu is no multiple of 8 in %llu bytes",
                        (unsigned long long)offset, (unsigned long long)w->bytes);
    e = client_driver.cuMemHostGetDevicePointer(ret, w->base, 0);
    *ret += offset;
    return e == CUDA_SUCCESS ? KVS_OK : client_driver_failed(err, "cuMemHostGetDevicePointer", e);
}

typedef CUresult stream_call(CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned flags);

static kvs_status do_word(stream_call *f, const char *name, unsigned flags, const client_words *w, void *stream,
                          uint64_t offset, uint64_t value, kvs_err *err)
{
    kvs_status s = inside(stream, err);
    CUdeviceptr at = 0;
    CUresult e;

    if (s != KVS_OK)
        return s;
    s = check_inside(stream, err);
    if (s == KVS_OK)
        s = address_of(w, offset, &at, err);
    if (s == KVS_OK) {
        e = f(stream, at, value, flags);
        if (e != CUDA_SUCCESS)
            s = client_driver_failed(err, name, e);
    }
    outside();
    return s;
}

kvs_status client_stream_write(client_words *w, void *stream, uint64_t offset, uint64_t value, kvs_err *err)
{
    kvs_status s = client_driver_load(err);

    /* The default flags: a fence before the write. */
    return s != KVS_OK ? s
                       : do_word(client_driver.cuStreamWriteValue64, "cuStreamWriteValue64",
                                 CU_STREAM_WRITE_VALUE_DEFAULT, w, stream, offset, value, err);
}

kvs_status client_stream_wait(client_words *w, void *stream, uint64_t offset, uint64_t value, kvs_err *err)
{
    kvs_status s = client_driver_load(err);

    return s != KVS_OK ? s
                       : do_word(client_driver.cuStreamWaitValue64, "cuStreamWaitValue64", CU_STREAM_WAIT_VALUE_GEQ, w,
                                 stream, offset, value, err);
}

/* ---- waiting for streams ---- */

kvs_status client_stream_check(void *stream, kvs_err *err)
{
    kvs_status s = inside(stream, err);

    if (s != KVS_OK)
        return s;
    s = check_inside(stream, err);
    outside();
    return s;
}

static bool event_comes(CUevent event, uint32_t timeout_ms)
{
    struct timespec nap = {.tv_nsec = 100000};
    CUresult e = client_driver.cuEventQuery(event);

    for (uint32_t i = 0; e == CUDA_ERROR_NOT_READY && i < timeout_ms * 10; i++) {
        (void)nanosleep(&nap, NULL);
        e = client_driver.cuEventQuery(event);
    }
    return e == CUDA_SUCCESS;
}

bool client_stream_drain(void *stream, uint32_t timeout_ms)
{
    client_mark *m = NULL;
    bool good;

    if (client_mark_open(&m, stream, NULL) != KVS_OK)
        return false;
    good = inside(stream, NULL) == KVS_OK;
    if (good) {
        good = event_comes(m->event, timeout_ms);
        outside();
    }
    client_mark_close(m);
    return good;
}

/* Only if this process has a context there: making one would cost memory and time. */
static kvs_status settle_one(int ordinal, kvs_err *err)
{
    unsigned flags;
    int active = 0;
    CUresult e = client_driver.cuDevicePrimaryCtxGetState(ordinal, &flags, &active);
    kvs_status s;

    if (e != CUDA_SUCCESS)
        return client_driver_failed(err, "cuDevicePrimaryCtxGetState", e);
    if (!active)
        return KVS_OK;
    s = client_driver_enter(ordinal, err);
    if (s != KVS_OK)
        return s;
    s = check_inside(NULL, err); /* synchronising would break the capture */
    if (s == KVS_OK) {
        e = client_driver.cuCtxSynchronize();
        if (e == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
            s = kvs_fail(
                err, KVS_E_STATE,
                "GPU %d: a stream is being captured, so that its context cannot be waited for; give a stream or "
                "a mark",
                ordinal);
        else if (e != CUDA_SUCCESS)
            s = client_driver_failed(err, "cuCtxSynchronize", e);
    }
    client_driver_leave(ordinal);
    return s;
}

kvs_status client_stream_settle(kvs_err *err)
{
    kvs_status s;
    int n = 0;
    CUresult e;

    if (!client_driver_is_used())
        return KVS_OK;
    s = client_driver_load(err);
    if (s == KVS_E_UNSUPPORTED)
        return KVS_OK; /* a driver that nothing can be done with has been given nothing */
    if (s != KVS_OK)
        return s;
    e = client_driver.cuDeviceGetCount(&n);
    if (e != CUDA_SUCCESS)
        return client_driver_failed(err, "cuDeviceGetCount", e);
    for (int i = 0; i < n && s == KVS_OK; i++)
        s = settle_one(i, err);
    return s;
}

/* ---- marks ---- */

kvs_status client_mark_open(client_mark **ret, void *stream, kvs_err *err)
{
    client_mark *m = calloc(1, sizeof *m);
    CUresult e;
    kvs_status s;

    if (m == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "mark: no memory");
    s = inside(stream, err);
    if (s == KVS_OK) {
        s = check_inside(stream, err);
        if (s == KVS_OK) {
            e = client_driver.cuEventCreate(&m->event, CU_EVENT_DISABLE_TIMING);
            if (e == CUDA_SUCCESS)
                e = client_driver.cuEventRecord(m->event, stream);
            if (e != CUDA_SUCCESS)
                s = client_driver_failed(err, "cuEventRecord", e);
        }
        outside();
    }
    if (s != KVS_OK) {
        client_mark_close(m);
        return s;
    }
    *ret = m;
    return KVS_OK;
}

void client_mark_close(client_mark *m)
{
    if (m == NULL)
        return;
    if (m->event != NULL)
        (void)client_driver.cuEventDestroy(m->event);
    free(m);
}
#endif
