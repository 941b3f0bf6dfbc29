#include "tests/fake/fake_cuda.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "kernels/client_pack_params.h"

enum { OK, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_READY = 600, MEMORIES = 4096, NAMES = 64, GPUS = 16 };

typedef enum op_kind { OP_WRITE, OP_WAIT, OP_HOLD, OP_FILL, OP_COPY, OP_PACK, OP_RECORD, OP_AFTER } op_kind;

typedef struct event {
    pthread_mutex_t mu;
    uint64_t asked, reached; /* recordings */
    struct event *next;      /* of those that were destroyed */
} event;

typedef struct op {
    struct op *next;
    op_kind kind;
    uint8_t *at;
    const uint8_t *from;
    uint64_t value, bytes;
    atomic_int *gate;
    event *e;
    client_pack_params pack;
} op;

typedef struct stream {
    pthread_t thread;
    pthread_mutex_t mu;
    pthread_cond_t wake, idle;
    op *head, **tail;
    bool busy, closing, captured;
    struct stream *next;
} stream;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* everything here */
static stream *streams;
static struct {
    uint8_t *base;
    uint64_t bytes;
} memories[MEMORIES];
static struct {
    char name[40];
    uint32_t calls, fail_at;
    int code;
    atomic_int *gate;
} names[NAMES];
static atomic_int gpus = 1, home;
static atomic_uint contexts[GPUS];

/* ---- failures ---- */

static unsigned name_find(const char *call)
{
    unsigned i = 0;

    while (i < NAMES - 1 && names[i].name[0] != '\0' && strcmp(names[i].name, call) != 0)
        i++;
    if (names[i].name[0] == '\0')
        (void)strncpy(names[i].name, call, sizeof names[i].name - 1);
    return i;
}

void fake_cuda_fail(const char *call, uint32_t n, int code)
{
    unsigned i;

    (void)pthread_mutex_lock(&lock);
    i = name_find(call);
    names[i].fail_at = n == 0 ? 0 : names[i].calls + n;
    names[i].code = code;
    (void)pthread_mutex_unlock(&lock);
}

uint32_t fake_cuda_calls(const char *call)
{
    uint32_t n;

    (void)pthread_mutex_lock(&lock);
    n = names[name_find(call)].calls;
    (void)pthread_mutex_unlock(&lock);
    return n;
}

void fake_cuda_stall(const char *call, atomic_int *gate)
{
    (void)pthread_mutex_lock(&lock);
    names[name_find(call)].gate = gate;
    (void)pthread_mutex_unlock(&lock);
}

void fake_cuda_gpus(int n, int home_)
{
    atomic_store(&gpus, n);
    atomic_store(&home, home_);
}

uint32_t fake_cuda_contexts(int gpu)
{
    return atomic_load(&contexts[gpu]);
}

static void nap(void)
{
    struct timespec t = {.tv_nsec = 50000};

    (void)nanosleep(&t, NULL);
}

static int called(const char *call)
{
    atomic_int *gate;
    unsigned i;
    int code;

    (void)pthread_mutex_lock(&lock);
    i = name_find(call);
    code = ++names[i].calls == names[i].fail_at ? names[i].code : OK;
    gate = names[i].gate;
    (void)pthread_mutex_unlock(&lock);
    while (gate != NULL && atomic_load(gate) == 0)
        nap();
    return code;
}
#define CALLED()                                                                                                       \
    do {                                                                                                               \
        int code_ = called(__func__);                                                                                  \
                                                                                                                       \
        if (code_ != OK)                                                                                               \
            return code_;                                                                                              \
    } while (0)

/* ---- streams ---- */

static void pack(const client_pack_params *p)
{
    for (uint32_t i = 0; i < p->n_pairs; i++)
        for (uint32_t k = 0; k < p->n_planes; k++) {
            const client_pack_plane *plane = &p->planes[k];
            uint8_t *page = (uint8_t *)(uintptr_t)(plane->base + p->pairs[i].block * plane->stride);
            uint8_t *slot = (uint8_t *)(uintptr_t)(p->staging + p->pairs[i].slot * p->slot_stride + plane->offset);

            memcpy(p->gather ? slot : page, p->gather ? page : slot, plane->bytes);
        }
}

static void event_reach(event *e, uint64_t n)
{
    (void)pthread_mutex_lock(&e->mu);
    if (e->reached < n)
        e->reached = n;
    (void)pthread_mutex_unlock(&e->mu);
}

static bool event_has(event *e, uint64_t n)
{
    bool has;

    (void)pthread_mutex_lock(&e->mu);
    has = e->reached >= n;
    (void)pthread_mutex_unlock(&e->mu);
    return has;
}

static void run(op *o)
{
    switch (o->kind) {
    case OP_WRITE:
        __atomic_store_n((uint64_t *)(void *)o->at, o->value, __ATOMIC_RELEASE);
        break;
    case OP_WAIT:
        while ((int64_t)(__atomic_load_n((uint64_t *)(void *)o->at, __ATOMIC_ACQUIRE) - o->value) < 0)
            nap();
        break;
    case OP_HOLD:
        while (atomic_load(o->gate) == 0)
            nap();
        break;
    case OP_FILL:
        memset(o->at, (int)o->value, o->bytes);
        break;
    case OP_COPY:
        memcpy(o->at, o->from, o->bytes);
        break;
    case OP_PACK:
        pack(&o->pack);
        break;
    case OP_RECORD:
        event_reach(o->e, o->value);
        break;
    case OP_AFTER:
        while (!event_has(o->e, o->value))
            nap();
        break;
    }
}

static void *stream_main(void *arg)
{
    stream *s = arg;

    (void)pthread_mutex_lock(&s->mu);
    for (;;) {
        op *o = s->head;

        if (o == NULL && s->closing)
            break;
        if (o == NULL) {
            s->busy = false;
            (void)pthread_cond_broadcast(&s->idle);
            (void)pthread_cond_wait(&s->wake, &s->mu);
            continue;
        }
        s->head = o->next;
        if (s->head == NULL)
            s->tail = &s->head;
        (void)pthread_mutex_unlock(&s->mu);
        run(o);
        free(o);
        (void)pthread_mutex_lock(&s->mu);
    }
    (void)pthread_mutex_unlock(&s->mu);
    return NULL;
}

static void give(stream *s, const op *o)
{
    op *mine = malloc(sizeof *mine);

    if (mine == NULL)
        abort();
    *mine = *o;
    mine->next = NULL;
    (void)pthread_mutex_lock(&s->mu);
    s->busy = true;
    *s->tail = mine;
    s->tail = &mine->next;
    (void)pthread_cond_signal(&s->wake);
    (void)pthread_mutex_unlock(&s->mu);
}

static void wait_idle(stream *s)
{
    (void)pthread_mutex_lock(&s->mu);
    while (s->busy)
        (void)pthread_cond_wait(&s->idle, &s->mu);
    (void)pthread_mutex_unlock(&s->mu);
}

void *fake_cuda_stream(void)
{
    stream *s = calloc(1, sizeof *s);

    if (s == NULL)
        abort();
    s->tail = &s->head;
    (void)pthread_mutex_init(&s->mu, NULL);
    (void)pthread_cond_init(&s->wake, NULL);
    (void)pthread_cond_init(&s->idle, NULL);
    if (pthread_create(&s->thread, NULL, stream_main, s) != 0)
        abort();
    (void)pthread_mutex_lock(&lock);
    s->next = streams;
    streams = s;
    (void)pthread_mutex_unlock(&lock);
    return s;
}

void fake_cuda_stream_free(void *stream_)
{
    stream *s = stream_;

    wait_idle(s);
    (void)pthread_mutex_lock(&lock);
    for (stream **p = &streams; *p != NULL; p = &(*p)->next)
        if (*p == s) {
            *p = s->next;
            break;
        }
    (void)pthread_mutex_unlock(&lock);
    (void)pthread_mutex_lock(&s->mu);
    s->closing = true;
    (void)pthread_cond_signal(&s->wake);
    (void)pthread_mutex_unlock(&s->mu);
    (void)pthread_join(s->thread, NULL);
    free(s);
}

void fake_cuda_capture(void *stream_, bool on)
{
    ((stream *)stream_)->captured = on;
}

bool fake_cuda_idle(void *stream_)
{
    stream *s = stream_;
    bool busy;

    (void)pthread_mutex_lock(&s->mu);
    busy = s->busy;
    (void)pthread_mutex_unlock(&s->mu);
    return !busy;
}

void fake_cuda_hold(void *s, atomic_int *gate)
{
    give(s, &(op){.kind = OP_HOLD, .gate = gate});
}

void fake_cuda_fill(void *s, void *p, int value, uint64_t bytes)
{
    give(s, &(op){.kind = OP_FILL, .at = p, .value = (uint64_t)value, .bytes = bytes});
}

void fake_cuda_copy(void *s, void *dst, const void *src, uint64_t bytes)
{
    give(s, &(op){.kind = OP_COPY, .at = dst, .from = src, .bytes = bytes});
}

/* ---- memory ---- */

static void memory_note(void *base, uint64_t bytes)
{
    unsigned i = 0;

    (void)pthread_mutex_lock(&lock);
    while (i < MEMORIES - 1 && memories[i].base != NULL)
        i++;
    memories[i].base = base;
    memories[i].bytes = bytes;
    (void)pthread_mutex_unlock(&lock);
}

/* Of the memory that holds p; false: it is none of ours. */
static bool memory_find(uint64_t p, uint64_t *ret_base, uint64_t *ret_bytes, bool forget)
{
    bool found = false;

    (void)pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < MEMORIES && !found; i++) {
        uint64_t base = (uint64_t)(uintptr_t)memories[i].base;

        if (memories[i].base == NULL || p < base || p - base >= memories[i].bytes)
            continue;
        found = true;
        *ret_base = base;
        *ret_bytes = memories[i].bytes;
        if (forget)
            memories[i].base = NULL;
    }
    (void)pthread_mutex_unlock(&lock);
    return found;
}

void *fake_cuda_memory(uint64_t bytes)
{
    void *p = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);

    if (p == NULL)
        abort();
    memory_note(p, bytes);
    return p;
}

void fake_cuda_memory_free(void *p)
{
    uint64_t base, bytes;

    (void)memory_find((uint64_t)(uintptr_t)p, &base, &bytes, true);
    free(p);
}

/* ---- the driver's own names ---- */

typedef int CUresult;
typedef uint64_t CUdeviceptr;
#define DRIVER FAKE_API CUresult

DRIVER cuInit(unsigned flags);
DRIVER cuInit(unsigned flags)
{
    (void)flags;
    CALLED();
    return OK;
}

DRIVER cuGetErrorName(CUresult e, const char **ret);
DRIVER cuGetErrorName(CUresult e, const char **ret)
{
    *ret = e == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OF_THE_FAKE";
    return OK;
}

DRIVER cuDeviceGetCount(int *ret);
DRIVER cuDeviceGetCount(int *ret)
{
    CALLED();
    *ret = atomic_load(&gpus);
    return OK;
}

DRIVER cuDeviceGetAttribute(int *ret, int attribute, int device);
DRIVER cuDeviceGetAttribute(int *ret, int attribute, int device)
{
    (void)attribute;
    (void)device;
    CALLED();
    *ret = 1;
    return OK;
}

DRIVER cuDeviceGetUuid_v2(void *ret, int device);
DRIVER cuDeviceGetUuid_v2(void *ret, int device)
{
    (void)device;
    CALLED();
    memset(ret, 0x55, 16);
    return OK;
}

/* The handle of memory is its address. */
DRIVER cuIpcGetMemHandle(void *ret, CUdeviceptr p);
DRIVER cuIpcGetMemHandle(void *ret, CUdeviceptr p)
{
    uint64_t base, bytes;

    CALLED();
    if (!memory_find(p, &base, &bytes, false))
        return INVALID_VALUE;
    memset(ret, 0, 64);
    memcpy(ret, &base, sizeof base);
    return OK;
}

DRIVER cuDevicePrimaryCtxRetain(void **ret, int device);
DRIVER cuDevicePrimaryCtxRetain(void **ret, int device)
{
    CALLED();
    if (device < 0 || device >= atomic_load(&gpus))
        return INVALID_VALUE;
    atomic_fetch_add(&contexts[device], 1);
    *ret = names;
    return OK;
}

DRIVER cuDevicePrimaryCtxRelease_v2(int device);
DRIVER cuDevicePrimaryCtxRelease_v2(int device)
{
    (void)device;
    return OK;
}

DRIVER cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active);
DRIVER cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    CALLED();
    *flags = 0;
    *active = device == atomic_load(&home);
    return OK;
}

DRIVER cuCtxPushCurrent_v2(void *c);
DRIVER cuCtxPushCurrent_v2(void *c)
{
    (void)c;
    CALLED();
    return OK;
}

DRIVER cuCtxPopCurrent_v2(void **ret);
DRIVER cuCtxPopCurrent_v2(void **ret)
{
    *ret = names;
    return OK;
}

DRIVER cuCtxSynchronize(void);
DRIVER cuCtxSynchronize(void)
{
    CALLED();
    for (;;) {
        stream *busy = NULL;

        (void)pthread_mutex_lock(&lock);
        for (stream *s = streams; s != NULL && busy == NULL; s = s->next)
            busy = fake_cuda_idle(s) ? NULL : s;
        (void)pthread_mutex_unlock(&lock);
        if (busy == NULL)
            return OK;
        nap();
    }
}

DRIVER cuCtxGetStreamPriorityRange(int *least, int *greatest);
DRIVER cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return OK;
}

/* A handle is a descriptor, with one added so that none is 0. */
DRIVER cuMemImportFromShareableHandle(uint64_t *ret, void *fd, int type);
DRIVER cuMemImportFromShareableHandle(uint64_t *ret, void *fd, int type)
{
    (void)type;
    CALLED();
    *ret = (uint64_t)(uintptr_t)fd + 1;
    return OK;
}

DRIVER cuMemGetAllocationPropertiesFromHandle(void *prop, uint64_t handle);
DRIVER cuMemGetAllocationPropertiesFromHandle(void *prop, uint64_t handle)
{
    int *p = prop; /* type, requestedHandleTypes, location: {type, id} */

    (void)handle;
    CALLED();
    p[2] = 1; /* of a device */
    p[3] = atomic_load(&home);
    return OK;
}

DRIVER cuMemAddressReserve(CUdeviceptr *ret, size_t bytes, size_t align, CUdeviceptr at, unsigned long long flags);
DRIVER cuMemAddressReserve(CUdeviceptr *ret, size_t bytes, size_t align, CUdeviceptr at, unsigned long long flags)
{
    void *p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    (void)align;
    (void)at;
    (void)flags;
    CALLED();
    *ret = (uint64_t)(uintptr_t)p;
    return p == MAP_FAILED ? OUT_OF_MEMORY : OK;
}

DRIVER cuMemAddressFree(CUdeviceptr p, size_t bytes);
DRIVER cuMemAddressFree(CUdeviceptr p, size_t bytes)
{
    (void)munmap((void *)(uintptr_t)p, bytes);
    return OK;
}

DRIVER cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags);
DRIVER cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags)
{
    void *p = (void *)(uintptr_t)at;

    (void)flags;
    CALLED();
    p = mmap(p, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, (int)(handle - 1), (off_t)offset);
    return p == MAP_FAILED ? INVALID_VALUE : OK;
}

DRIVER cuMemUnmap(CUdeviceptr p, size_t bytes);
DRIVER cuMemUnmap(CUdeviceptr p, size_t bytes)
{
    CALLED();
    return mmap((void *)(uintptr_t)p, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED;
}

DRIVER cuMemSetAccess(CUdeviceptr p, size_t bytes, const void *desc, size_t n);
DRIVER cuMemSetAccess(CUdeviceptr p, size_t bytes, const void *desc, size_t n)
{
    (void)p;
    (void)bytes;
    (void)desc;
    (void)n;
    CALLED();
    return OK;
}

DRIVER cuMemRelease(uint64_t handle);
DRIVER cuMemRelease(uint64_t handle)
{
    (void)handle;
    return OK;
}

DRIVER cuMemAlloc_v2(CUdeviceptr *ret, size_t bytes);
DRIVER cuMemAlloc_v2(CUdeviceptr *ret, size_t bytes)
{
    CALLED();
    *ret = (uint64_t)(uintptr_t)fake_cuda_memory(bytes);
    return OK;
}

DRIVER cuMemFree_v2(CUdeviceptr p);
DRIVER cuMemFree_v2(CUdeviceptr p)
{
    fake_cuda_memory_free((void *)(uintptr_t)p);
    return OK;
}

DRIVER cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr p);
DRIVER cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr p)
{
    uint64_t b, n;

    CALLED();
    if (!memory_find(p, &b, &n, false))
        return INVALID_VALUE;
    *base = b;
    *bytes = n;
    return OK;
}

DRIVER cuPointerGetAttribute(void *ret, int attribute, CUdeviceptr p);
DRIVER cuPointerGetAttribute(void *ret, int attribute, CUdeviceptr p)
{
    enum { MEMORY_TYPE = 2, ORDINAL = 9, DEVICE_MEMORY = 2 };
    uint64_t b, n;

    CALLED();
    if (!memory_find(p, &b, &n, false))
        return INVALID_VALUE;
    *(int *)ret = attribute == MEMORY_TYPE ? DEVICE_MEMORY : attribute == ORDINAL ? atomic_load(&home) : 0;
    return OK;
}

DRIVER cuMemHostAlloc(void **ret, size_t bytes, unsigned flags);
DRIVER cuMemHostAlloc(void **ret, size_t bytes, unsigned flags)
{
    (void)flags;
    CALLED();
    *ret = malloc(bytes);
    return *ret == NULL ? OUT_OF_MEMORY : OK;
}

DRIVER cuMemFreeHost(void *p);
DRIVER cuMemFreeHost(void *p)
{
    free(p);
    return OK;
}

DRIVER cuMemHostRegister_v2(void *p, size_t bytes, unsigned flags);
DRIVER cuMemHostRegister_v2(void *p, size_t bytes, unsigned flags)
{
    (void)p;
    (void)bytes;
    (void)flags;
    CALLED();
    return OK;
}

DRIVER cuMemHostUnregister(void *p);
DRIVER cuMemHostUnregister(void *p)
{
    (void)p;
    CALLED();
    return OK;
}

DRIVER cuMemHostGetDevicePointer_v2(CUdeviceptr *ret, void *p, unsigned flags);
DRIVER cuMemHostGetDevicePointer_v2(CUdeviceptr *ret, void *p, unsigned flags)
{
    (void)flags;
    CALLED();
    *ret = (uint64_t)(uintptr_t)p;
    return OK;
}

DRIVER cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, void *s);
DRIVER cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, void *s)
{
    CALLED();
    fake_cuda_copy(s, (void *)(uintptr_t)dst, (void *)(uintptr_t)src, bytes);
    return OK;
}

DRIVER cuStreamCreate(void **ret, unsigned flags);
DRIVER cuStreamCreate(void **ret, unsigned flags)
{
    (void)flags;
    CALLED();
    *ret = fake_cuda_stream();
    return OK;
}

DRIVER cuStreamCreateWithPriority(void **ret, unsigned flags, int priority);
DRIVER cuStreamCreateWithPriority(void **ret, unsigned flags, int priority)
{
    (void)flags;
    (void)priority;
    CALLED();
    *ret = fake_cuda_stream();
    return OK;
}

DRIVER cuStreamDestroy_v2(void *s);
DRIVER cuStreamDestroy_v2(void *s)
{
    fake_cuda_stream_free(s);
    return OK;
}

DRIVER cuStreamSynchronize(void *s);
DRIVER cuStreamSynchronize(void *s)
{
    CALLED();
    wait_idle(s);
    return OK;
}

DRIVER cuStreamGetCtx(void *s, void **ret);
DRIVER cuStreamGetCtx(void *s, void **ret)
{
    (void)s;
    CALLED();
    *ret = names;
    return OK;
}

DRIVER cuStreamIsCapturing(void *s, int *ret);
DRIVER cuStreamIsCapturing(void *s, int *ret)
{
    CALLED();
    *ret = s != NULL && ((stream *)s)->captured;
    return OK;
}

DRIVER cuStreamWriteValue64_v2(void *s, CUdeviceptr at, uint64_t value, unsigned flags);
DRIVER cuStreamWriteValue64_v2(void *s, CUdeviceptr at, uint64_t value, unsigned flags)
{
    (void)flags;
    CALLED();
    give(s, &(op){.kind = OP_WRITE, .at = (uint8_t *)(uintptr_t)at, .value = value});
    return OK;
}

DRIVER cuStreamWaitValue64_v2(void *s, CUdeviceptr at, uint64_t value, unsigned flags);
DRIVER cuStreamWaitValue64_v2(void *s, CUdeviceptr at, uint64_t value, unsigned flags)
{
    (void)flags;
    CALLED();
    give(s, &(op){.kind = OP_WAIT, .at = (uint8_t *)(uintptr_t)at, .value = value});
    return OK;
}

DRIVER cuEventCreate(void **ret, unsigned flags);
DRIVER cuEventCreate(void **ret, unsigned flags)
{
    event *e = calloc(1, sizeof *e);

    (void)flags;
    if (e == NULL)
        return OUT_OF_MEMORY;
    (void)pthread_mutex_init(&e->mu, NULL);
    *ret = e;
    return OK;
}

DRIVER cuEventRecord(void *event_, void *s);
DRIVER cuEventRecord(void *event_, void *s)
{
    event *e = event_;
    uint64_t n;

    CALLED();
    (void)pthread_mutex_lock(&e->mu);
    n = ++e->asked;
    (void)pthread_mutex_unlock(&e->mu);
    give(s, &(op){.kind = OP_RECORD, .e = e, .value = n});
    return OK;
}

DRIVER cuEventQuery(void *event_);
DRIVER cuEventQuery(void *event_)
{
    event *e = event_;
    bool reached;

    CALLED();
    (void)pthread_mutex_lock(&e->mu);
    reached = e->reached == e->asked;
    (void)pthread_mutex_unlock(&e->mu);
    return reached ? OK : NOT_READY;
}

/* Ops may still name it: it stays. */
static event *kept;
DRIVER cuEventDestroy_v2(void *e);
DRIVER cuEventDestroy_v2(void *event_)
{
    event *e = event_;

    (void)pthread_mutex_lock(&lock);
    e->next = kept;
    kept = e;
    (void)pthread_mutex_unlock(&lock);
    return OK;
}

DRIVER cuStreamWaitEvent(void *s, void *event_, unsigned flags);
DRIVER cuStreamWaitEvent(void *s, void *event_, unsigned flags)
{
    event *e = event_;

    (void)flags;
    CALLED();
    give(s, &(op){.kind = OP_AFTER, .e = e, .value = e->asked});
    return OK;
}

DRIVER cuModuleLoadData(void **ret, const void *image);
DRIVER cuModuleLoadData(void **ret, const void *image)
{
    (void)image;
    CALLED();
    *ret = names;
    return OK;
}

DRIVER cuModuleUnload(void *m);
DRIVER cuModuleUnload(void *m)
{
    (void)m;
    return OK;
}

DRIVER cuModuleGetFunction(void **ret, void *m, const char *name);
DRIVER cuModuleGetFunction(void **ret, void *m, const char *name)
{
    (void)m;
    CALLED();
    *ret = names;
    return strcmp(name, "kvs_client_pack") == 0 ? OK : INVALID_VALUE;
}

DRIVER cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void *s, void **args, void **extra);
DRIVER cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void *s, void **args, void **extra)
{
    op o = {.kind = OP_PACK};

    (void)f, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)extra;
    CALLED();
    o.pack = *(const client_pack_params *)args[0];
    give(s, &o);
    return OK;
}
