#ifdef KVS_CUDA
/* Memory of the cuda device.
 *
 *   VMM (ours, or a client's):  | handle 0 | handle 1 | .. |   one reservation, mapped side by side, access set once
 *   CUDA IPC:                   | allocation 0 |  | allocation 1 |   wherever the driver maps them
 *
 * The runtime counts how often an IPC allocation was opened, so opening one twice maps it once. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/cuda_device.h"
#include "kernels/cuda_error.h"
#include "proto/wire.h"

enum { MAX_PIECES = 1024, MAX_TRIES = 1 << 16 };
#define PIECE_BYTES (UINT64_C(1) << 30)
#define MAX_PROBE   (UINT64_C(1) << 40) /* no GPU has an allocation above this */

typedef struct cuda_piece {
    uint64_t at, bytes;
    CUmemGenericAllocationHandle handle;
    bool has_handle, mapped; /* VMM */
    void *opened;            /* CUDA IPC: what the runtime gave */
    int fd;
} cuda_piece;

typedef struct cuda_mem {
    device_mem base;
    CUdeviceptr range; /* VMM: the reservation */
    uint64_t range_bytes;
    bool is_read[CUDA_MAX_READERS]; /* by which of the device's readers it can be */
    uint32_t n_pieces;
    cuda_piece pieces[];
} cuda_mem;

static cuda_device *device_of(const cuda_mem *m)
{
    return (cuda_device *)m->base.dev;
}

/* Nothing runs on the GPU in calls that make, export, import and map memory.  So a code that they do not share with others (what
 * they say when this process has no descriptors left, or of a client's odd handle) is a loss only if the context is gone. */
static bool is_gone(cuda_device *d)
{
    size_t available, total;
    cudaError_t e;

    (void)cudaGetLastError();
    e = cudaMemGetInfo(&available, &total);
    if (e == cudaSuccess)
        return false;
    return cuda_failed(d, NULL, "cudaMemGetInfo", e) == KVS_E_DEVICE_LOST;
}

/* What is made of a status that such a call has had; *err holds its words. */
static kvs_status of_memory(cuda_device *d, kvs_status s, kvs_err *err)
{
    if (s != KVS_E_DEVICE_LOST || is_gone(d))
        return s;
    if (err != NULL)
        err->status = KVS_E_DEVICE;
    return KVS_E_DEVICE;
}

static kvs_status mem_alloc(cuda_device *d, uint64_t n_pieces, cuda_mem **ret, kvs_err *err)
{
    cuda_mem *m;

    if (n_pieces < 1 || n_pieces > MAX_PIECES)
        return kvs_fail(err, KVS_E_LIMIT, "device memory: %" PRIu64 " pieces are outside 1..%d", n_pieces,
                        (int)MAX_PIECES);
    m = calloc(1, sizeof *m + n_pieces * sizeof m->pieces[0]);
    if (m == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "device memory: no memory for %" PRIu64 " pieces", n_pieces);
    m->base.dev = &d->base;
    m->n_pieces = (uint32_t)n_pieces;
    for (uint32_t i = 0; i < m->n_pieces; i++)
        m->pieces[i].fd = -1;
    *ret = m;
    return KVS_OK;
}

/* Also for half-built memory.  Errors are dropped: there is nothing else to do with what cannot be unmapped. */
void cuda_mem_close(device_mem *dm)
{
    cuda_mem *m = (cuda_mem *)dm;
    cuda_device *d;

    if (m == NULL)
        return;
    d = device_of(m);
    if (cuda_enter(d, NULL) == KVS_OK) {
        for (uint32_t i = 0; i < m->n_pieces; i++) {
            cuda_piece *p = &m->pieces[i];

            if (p->mapped)
                (void)d->driver.cuMemUnmap(p->at, p->bytes);
            if (p->has_handle)
                (void)d->driver.cuMemRelease(p->handle);
            if (p->opened != NULL)
                (void)cudaIpcCloseMemHandle(p->opened);
        }
        if (m->range != 0)
            (void)d->driver.cuMemAddressFree(m->range, m->range_bytes);
        (void)cudaGetLastError();
    }
    for (uint32_t i = 0; i < m->n_pieces; i++)
        if (m->pieces[i].fd >= 0)
            (void)close(m->pieces[i].fd);
    free(m);
}

/* Reserve addresses for all pieces, whose handles and sizes are known, and map them side by side. */
static kvs_status map_pieces(cuda_mem *m, kvs_err *err)
{
    cuda_device *d = device_of(m);
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = d->ordinal},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    uint64_t bytes = 0, at;
    CUresult e;

    for (uint32_t i = 0; i < m->n_pieces; i++)
        bytes += m->pieces[i].bytes;
    e = d->driver.cuMemAddressReserve(&m->range, bytes, 0, 0, 0);
    if (e != CUDA_SUCCESS) {
        m->range = 0;
        return of_memory(d, kvs_cuda_fail_bytes(err, "cuMemAddressReserve", bytes, (int)e), err);
    }
    m->range_bytes = bytes;
    at = m->range;
    for (uint32_t i = 0; i < m->n_pieces; i++) {
        cuda_piece *p = &m->pieces[i];

        e = d->driver.cuMemMap(at, p->bytes, 0, p->handle, 0);
        if (e != CUDA_SUCCESS)
            return of_memory(d, kvs_cuda_fail_bytes(err, "cuMemMap", p->bytes, (int)e), err);
        p->at = at;
        p->mapped = true;
        at += p->bytes;
    }
    e = d->driver.cuMemSetAccess(m->range, bytes, &access, 1);
    if (e != CUDA_SUCCESS)
        return of_memory(d, kvs_cuda_fail_bytes(err, "cuMemSetAccess", bytes, (int)e), err);
    cuda_grant(d, m->range, bytes, m->is_read);
    return KVS_OK;
}

static kvs_status piece_create(cuda_device *d, cuda_piece *p, uint64_t bytes, kvs_err *err)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = d->ordinal}};
    CUresult e = d->driver.cuMemCreate(&p->handle, bytes, &prop, 0);

    if (e != CUDA_SUCCESS)
        return of_memory(d, kvs_cuda_fail_bytes(err, "cuMemCreate", bytes, (int)e), err);
    p->has_handle = true;
    p->bytes = bytes;
    e = d->driver.cuMemExportToShareableHandle(&p->fd, p->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (e != CUDA_SUCCESS) {
        p->fd = -1;
        return of_memory(d, kvs_cuda_fail_bytes(err, "cuMemExportToShareableHandle", bytes, (int)e), err);
    }
    if (fcntl(p->fd, F_SETFD, FD_CLOEXEC) != 0)
        return kvs_fail(err, KVS_E_SYS, "F_SETFD: %s", strerror(errno));
    return KVS_OK;
}

/* What another process left in these pages must not be seen. */
static kvs_status zero(cuda_mem *m, kvs_err *err)
{
    cuda_device *d = device_of(m);
    cudaStream_t stream;
    cudaError_t e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaError_t end;

    if (e != cudaSuccess)
        return cuda_failed(d, err, "cudaStreamCreateWithFlags", e);
    e = cudaMemsetAsync((void *)(uintptr_t)m->range, 0, m->range_bytes, stream);
    end = cudaStreamSynchronize(stream);
    e = e != cudaSuccess ? e : end;
    (void)cudaStreamDestroy(stream);
    return e == cudaSuccess ? KVS_OK : cuda_failed_bytes(d, err, "cudaMemsetAsync", m->range_bytes, e);
}

kvs_status cuda_mem_create(device *base, uint64_t bytes, device_mem **ret, kvs_err *err)
{
    cuda_device *d = (cuda_device *)base;
    const uint64_t unit = d->granularity, most = (uint64_t)MAX_PIECES * PIECE_BYTES;
    cuda_mem *m = NULL;
    kvs_status s = cuda_enter(d, err);

    if (s == KVS_OK && (bytes == 0 || bytes > most))
        s = kvs_fail(err, KVS_E_INVALID, "mem_create: %" PRIu64 " bytes is outside 1..%" PRIu64, bytes, most);
    if (s == KVS_OK)
        s = mem_alloc(d, (bytes + PIECE_BYTES - 1) / PIECE_BYTES, &m, err);
    if (s != KVS_OK)
        return s;
    for (uint32_t i = 0; i < m->n_pieces && s == KVS_OK; i++) {
        uint64_t left = bytes - i * PIECE_BYTES, want = left < PIECE_BYTES ? left : PIECE_BYTES;

        s = piece_create(d, &m->pieces[i], (want + unit - 1) / unit * unit, err);
    }
    if (s == KVS_OK)
        s = map_pieces(m, err);
    if (s == KVS_OK)
        s = zero(m, err);
    if (s != KVS_OK) {
        cuda_mem_close(&m->base);
        return s;
    }
    *ret = &m->base;
    return KVS_OK;
}

/* --- imports ------------------------------------------------------------------------------------------------ */

/* Can `units` of an allocation be mapped?  Drivers that want it whole say "not supported" to less of it and "invalid" to
 * more. */
typedef enum fit { FITS, TOO_SMALL, TOO_LARGE } fit;

static fit try_map(cuda_device *d, CUdeviceptr at, uint64_t units, CUmemGenericAllocationHandle h)
{
    CUresult e = d->driver.cuMemMap(at, units * d->granularity, 0, h, 0);

    if (e != CUDA_SUCCESS)
        return e == CUDA_ERROR_NOT_SUPPORTED ? TOO_SMALL : TOO_LARGE;
    (void)d->driver.cuMemUnmap(at, units * d->granularity);
    return FITS;
}

/* Units of the allocation: the most that is not too large.  If that cannot be mapped after all, the driver's answers
 * mean something else, and every size is tried in turn.  0: none fits below `most`. */
static uint64_t measure(cuda_device *d, CUdeviceptr at, uint64_t most, CUmemGenericAllocationHandle h)
{
    uint64_t low = 0, high = most + 1;

    while (high - low > 1) {
        uint64_t middle = low + (high - low) / 2;

        if (try_map(d, at, middle, h) != TOO_LARGE)
            low = middle;
        else
            high = middle;
    }
    if (low > 0 && try_map(d, at, low, h) == FITS)
        return low;
    for (uint64_t units = 1; units <= most && units <= MAX_TRIES; units++)
        if (try_map(d, at, units, h) == FITS)
            return units;
    return 0;
}

/* The driver does not tell how large a client's allocation is, but it refuses to map more than there is.  Without
 * access set nothing can reach the memory meanwhile. */
static kvs_status piece_measure(cuda_device *d, cuda_piece *p, uint32_t i, uint64_t room, kvs_err *err)
{
    uint64_t most = (room < MAX_PROBE ? room : MAX_PROBE) / d->granularity + 1, units;
    CUdeviceptr at = 0;
    CUresult e = d->driver.cuMemAddressReserve(&at, most * d->granularity, 0, 0, 0);

    if (e != CUDA_SUCCESS)
        return of_memory(d, kvs_cuda_fail_bytes(err, "cuMemAddressReserve", most * d->granularity, (int)e), err);
    units = measure(d, at, most, p->handle);
    (void)d->driver.cuMemAddressFree(at, most * d->granularity);
    if (units == 0 && is_gone(d))
        return kvs_fail(err, KVS_E_DEVICE_LOST, "descriptor %" PRIu32 ": the GPU was lost while it was looked at", i);
    if (units == 0 || units * d->granularity > room)
        return kvs_fail(err, KVS_E_LIMIT, "descriptor %" PRIu32 ": larger than the %" PRIu64 " bytes that are left", i,
                        room);
    p->bytes = units * d->granularity;
    return KVS_OK;
}

/* A client's handle was refused: its fault, unless there is no room for it, or the context is gone as well. */
static kvs_status import_refused(cuda_device *d, int error)
{
    if (error == cudaErrorMemoryAllocation)
        return KVS_E_NO_SPACE;
    return is_gone(d) ? KVS_E_DEVICE_LOST : KVS_E_INVALID;
}

static kvs_status piece_import(cuda_device *d, cuda_piece *p, int fd, uint32_t i, uint64_t room, kvs_err *err)
{
    CUmemAllocationProp prop;
    CUresult e;

    e = d->driver.cuMemImportFromShareableHandle(&p->handle, (void *)(uintptr_t)fd,
                                                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (e != CUDA_SUCCESS)
        return kvs_fail(err, import_refused(d, (int)e),
                        "descriptor %" PRIu32 ": not device memory exported as a descriptor (%s)", i,
                        cudaGetErrorName((cudaError_t)e));
    p->has_handle = true;
    /* Only now: what is no device memory may be a file whose close, which is ours to do then, takes as long as a client likes. */
    p->fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (p->fd < 0)
        return kvs_fail(err, KVS_E_SYS, "descriptor %" PRIu32 ": F_DUPFD_CLOEXEC: %s", i, strerror(errno));
    e = d->driver.cuMemGetAllocationPropertiesFromHandle(&prop, p->handle);
    if (e != CUDA_SUCCESS)
        return of_memory(d, kvs_cuda_fail(err, "cuMemGetAllocationPropertiesFromHandle", (int)e), err);
    if (prop.location.type != CU_MEM_LOCATION_TYPE_DEVICE || prop.location.id != d->ordinal)
        return kvs_fail(err, KVS_E_INVALID,
                        "descriptor %" PRIu32 ": memory of location type %d, number %d, not of GPU %d", i,
                        (int)prop.location.type, prop.location.id, d->ordinal);
    return piece_measure(d, p, i, room, err);
}

static kvs_status import_vmm(cuda_device *d, cuda_mem *m, const device_import *in, kvs_err *err)
{
    uint64_t room = in->max_bytes;
    kvs_status s = KVS_OK;

    for (uint32_t i = 0; i < in->n_fds && s == KVS_OK; i++) {
        s = piece_import(d, &m->pieces[i], in->fds[i], i, room, err);
        room -= s == KVS_OK ? m->pieces[i].bytes : 0;
    }
    return s == KVS_OK ? map_pieces(m, err) : s;
}

static kvs_status open_ipc(cuda_device *d, cuda_piece *p, const uint8_t handle[64], uint32_t i, uint64_t room,
                           kvs_err *err)
{
    cudaIpcMemHandle_t h;
    cudaError_t e;
    CUresult r;
    CUdeviceptr base = 0;
    size_t bytes = 0;

    _Static_assert(sizeof h == 64, "the wire's IPC handle is CUDA's");
    memcpy(&h, handle, sizeof h);
    e = cudaIpcOpenMemHandle(&p->opened, h, cudaIpcMemLazyEnablePeerAccess);
    if (e != cudaSuccess) {
        p->opened = NULL;
        (void)cudaGetLastError();
        return kvs_fail(err, import_refused(d, (int)e),
                        "IPC handle %" PRIu32 ": the driver does not open it (%s); VMM memory has none, its owner must "
                        "live and be another process",
                        i, cudaGetErrorName(e));
    }
    r = d->driver.cuMemGetAddressRange(&base, &bytes, (CUdeviceptr)(uintptr_t)p->opened);
    if (r != CUDA_SUCCESS)
        return of_memory(d, kvs_cuda_fail(err, "cuMemGetAddressRange", (int)r), err);
    p->at = (uint64_t)(uintptr_t)p->opened;
    p->bytes = bytes - (p->at - base);
    if (p->bytes > room)
        return kvs_fail(err, KVS_E_LIMIT, "IPC handle %" PRIu32 ": %" PRIu64 " bytes, %" PRIu64 " are left", i,
                        p->bytes, room);
    return KVS_OK;
}

static kvs_status import_ipc(cuda_device *d, cuda_mem *m, const device_import *in, kvs_err *err)
{
    uint64_t room = in->max_bytes;
    kvs_status s = KVS_OK;

    for (uint32_t i = 0; i < in->n_ipc && s == KVS_OK; i++) {
        s = open_ipc(d, &m->pieces[i], in->ipc[i], i, room, err);
        room -= s == KVS_OK ? m->pieces[i].bytes : 0;
    }
    return s;
}

static kvs_status import_check(const cuda_device *d, const device_import *in, kvs_err *err)
{
    char its[KVS_UUID_TEXT_BYTES], own[KVS_UUID_TEXT_BYTES];

    if (in->memory != WIRE_MEMORY_CUDA_IPC && in->memory != WIRE_MEMORY_CUDA_VMM)
        return kvs_fail(err, KVS_E_UNSUPPORTED,
                        "memory: kind %" PRIu32 ", the cuda device takes %d (IPC handle) and %d (VMM descriptor)",
                        in->memory, (int)WIRE_MEMORY_CUDA_IPC, (int)WIRE_MEMORY_CUDA_VMM);
    if (in->uuid == NULL || memcmp(in->uuid, d->uuid, sizeof d->uuid) == 0)
        return KVS_OK;
    kvs_cuda_uuid_text(in->uuid, its);
    kvs_cuda_uuid_text(d->uuid, own);
    return kvs_fail(err, KVS_E_INVALID, "memory: on the GPU with UUID %s, this one is %s", its, own);
}

kvs_status cuda_mem_import(device *base, const device_import *in, device_mem **ret, kvs_err *err)
{
    cuda_device *d = (cuda_device *)base;
    bool ipc = in->memory == WIRE_MEMORY_CUDA_IPC;
    cuda_mem *m = NULL;
    kvs_status s = cuda_enter(d, err);

    if (s == KVS_OK)
        s = import_check(d, in, err);
    if (s == KVS_OK)
        s = mem_alloc(d, ipc ? in->n_ipc : in->n_fds, &m, err);
    if (s != KVS_OK)
        return s;
    s = ipc ? import_ipc(d, m, in, err) : import_vmm(d, m, in, err);
    if (s != KVS_OK) {
        cuda_mem_close(&m->base);
        return s;
    }
    *ret = &m->base;
    return KVS_OK;
}

uint32_t cuda_mem_pieces(const device_mem *m)
{
    return ((const cuda_mem *)m)->n_pieces;
}

uint8_t *cuda_mem_base(const device_mem *dm, uint32_t piece, uint64_t *ret_bytes)
{
    const cuda_mem *m = (const cuda_mem *)dm;

    if (piece >= m->n_pieces)
        return NULL;
    *ret_bytes = m->pieces[piece].bytes;
    return (uint8_t *)(uintptr_t)m->pieces[piece].at;
}

/* Between VMM memory only: from and to allocations that were opened by their IPC handles the driver went by way of the host on the
 * machine that this was tried on, at 30 GB/s. */
bool cuda_mem_reached(const device_mem *dm, const device_mem *dm_to)
{
    const cuda_mem *m = (const cuda_mem *)dm, *to = (const cuda_mem *)dm_to;
    const cuda_device *d = device_of(m);

    if (dm_to->dev->ops != d->base.ops || m->range == 0 || to->range == 0)
        return false;
    for (uint32_t i = 0; i < d->n_readers; i++)
        if (d->readers[i] == device_of(to)->ordinal)
            return m->is_read[i];
    return false;
}

int cuda_mem_fd(const device_mem *dm, uint32_t piece)
{
    const cuda_mem *m = (const cuda_mem *)dm;

    return piece < m->n_pieces ? m->pieces[piece].fd : -1;
}
#else
typedef int kvs_no_cuda_memory; /* a translation unit holds a declaration */
#endif
