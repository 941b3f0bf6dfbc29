#include "tests/gpu/gpu_engine.h"

#ifdef KVS_CUDA
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "proto/ctl/clock.h"
#include "proto/ctl/pattern.h"

daemon_fixture engine_daemon;
const kvs_mark engine_now = KVS_MARK_NOW;
static bool has_daemon;
static const char *mover_settings = "{}";
static bool checksum_setting = true, opens_twice;

void engine_set_mover(const char *json)
{
    engine_end_daemon(false);
    mover_settings = json;
}

void engine_opens_twice(void)
{
    opens_twice = true;
}

void engine_set_checksum(bool on)
{
    engine_end_daemon(false);
    checksum_setting = on;
}

bool engine_start_daemon(void)
{
    if (!has_daemon) {
        char text[512];

        (void)snprintf(text, sizeof text,
                       "{\"device\": {\"kind\": \"cuda\", \"max_region_bytes\": \"16GiB\"}, \"mover\": %s,"
                       " \"pool\": {\"max_bytes\": \"3GiB\", \"checksum\": %s}, \"limits\": {\"max_clients\": 64}}",
                       opens_twice && gpu_subset() ? "{\"sums\": \"cpu\"}" : mover_settings,
                       checksum_setting ? "true" : "false");
        daemon_init(&engine_daemon);
        has_daemon = true;
        daemon_configure(&engine_daemon, text);
    }
    if (engine_daemon.pid != 0)
        return true;
    if (!daemon_start(&engine_daemon, NULL))
        return GPU_FAIL("the daemon does not start");
    return true;
}

void engine_end_daemon(bool show)
{
    char line[1024];
    FILE *f = has_daemon && show ? fopen(engine_daemon.log, "re") : NULL;

    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        (void)printf("      %s", line);
    if (f != NULL)
        (void)fclose(f);
    if (has_daemon)
        daemon_fini(&engine_daemon);
    has_daemon = false;
}

bool engine_open_tokens(engine *e, const char *socket, uint32_t layers, uint32_t tokens)
{
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_namespace desc;
    kvs_err err = {.msg = ""};

    *e = (engine){.layers = layers};
    o.path = socket;
    o.timeout_ms = CALL_MS;
    if (kvs_connect(&e->client, &o, &err) != KVS_OK ||
        kvs_namespace_mla("gpu", "", KVS_FORMAT_mla_bf16, layers, tokens, e->planes, &desc, &err) != KVS_OK ||
        kvs_open(e->client, &desc, &e->ns, 0, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    e->slot_bytes = kvs_namespace_slot_bytes(&desc);
    return true;
}

bool engine_open(engine *e, const char *socket, uint32_t layers)
{
    return engine_open_tokens(e, socket, layers, TOKENS);
}

bool engine_begin(engine *e, uint32_t layers)
{
    return engine_start_daemon() && engine_open(e, engine_daemon.socket, layers);
}

bool engine_region(engine *e, uint32_t n, kvs_region **ret, kvs_slot *ret_slots, uint8_t **ret_base)
{
    kvs_err err = {.msg = ""};
    uint64_t bytes;
    void *base;

    if (kvs_region_create(e->ns, 0, n, ret, 0, &err) != KVS_OK || kvs_region_map(*ret, &base, &bytes, &err) != KVS_OK ||
        kvs_slot_take(*ret, n, ret_slots, 0, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    *ret_base = base;
    return true;
}

kvs_status engine_store(engine *e, kvs_region *r, uint64_t id, const kvs_slot *slots, uint32_t n, const kvs_mark *after,
                        kvs_err *err)
{
    static uint8_t keys[MANY][KVS_KEY_BYTES];
    static kvs_status results[MANY];
    kvs_store_args a = {.ns = e->ns, .region = r, .n = n, .keys = keys[0], .slots = slots, .after = after};

    for (uint32_t i = 0; i < n; i++)
        pattern_key(id + i, keys[i]);
    a.results = results;
    return kvs_store(&a, CALL_MS, err);
}

kvs_status engine_load(engine *e, kvs_region *r, uint64_t id, const kvs_slot *slots, uint32_t n, kvs_err *err)
{
    static uint8_t keys[MANY][KVS_KEY_BYTES];
    static kvs_load_result results[MANY];
    kvs_load_args a = {.ns = e->ns, .region = r, .n = n, .keys = keys[0], .slots = slots};

    for (uint32_t i = 0; i < n; i++)
        pattern_key(id + i, keys[i]);
    a.results = results;
    return kvs_load(&a, CALL_MS, err);
}

static void flight_fill(flight *f, uint64_t id, const kvs_slot *slots, uint32_t n)
{
    f->request = NULL;
    for (uint32_t i = 0; i < n; i++) {
        pattern_key(id + i, f->keys[i]);
        f->slots[i] = slots[i];
    }
}

bool flight_store(flight *f, engine *e, kvs_region *r, uint64_t id, const kvs_slot *slots, uint32_t n,
                  const kvs_mark *after)
{
    kvs_err err = {.msg = ""};

    flight_fill(f, id, slots, n);
    f->store = (kvs_store_args){
        .ns = e->ns, .region = r, .n = n, .keys = f->keys[0], .slots = f->slots, .after = after, .results = f->stored};
    return kvs_submit_store(&f->store, &f->request, CALL_MS, &err) == KVS_OK || GPU_FAIL("store: %s", err.msg);
}

bool flight_load(flight *f, engine *e, kvs_region *r, uint64_t id, const kvs_slot *slots, uint32_t n,
                 const kvs_mark *after, const kvs_mark *signal)
{
    kvs_err err = {.msg = ""};

    flight_fill(f, id, slots, n);
    f->load = (kvs_load_args){.ns = e->ns,
                              .region = r,
                              .n = n,
                              .keys = f->keys[0],
                              .slots = f->slots,
                              .after = after,
                              .signal = signal,
                              .results = f->loaded};
    return kvs_submit_load(&f->load, &f->request, CALL_MS, &err) == KVS_OK || GPU_FAIL("load: %s", err.msg);
}

kvs_status flight_end(flight *f, kvs_err *err)
{
    kvs_status s = kvs_wait(f->request, CALL_MS, err);

    return s == KVS_OK ? kvs_request_end(f->request, err) : s;
}

void nap_ms(long ms)
{
    (void)nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

uint64_t free_bytes(device *d)
{
    device_cuda_info info = {0};

    (void)device_cuda_get_info(d, &info, NULL);
    return info.free_bytes;
}

bool cuda_ok(int error, const char *what)
{
    return error == cudaSuccess ? true : GPU_FAIL("%s: %s", what, cudaGetErrorString((cudaError_t)error));
}

bool to_device(void *dst, const void *src, uint64_t n)
{
    return cuda_ok(cudaMemcpy(dst, src, n, cudaMemcpyHostToDevice), "copy to the device");
}

bool from_device(void *dst, const void *src, uint64_t n)
{
    return cuda_ok(cudaMemcpy(dst, src, n, cudaMemcpyDeviceToHost), "copy from the device");
}

bool set_device(void *dst, int value, uint64_t n)
{
    return cuda_ok(cudaMemset(dst, value, n), "memset") && cuda_ok(cudaDeviceSynchronize(), "synchronise");
}

bool own_ipc_handle(void *p, kvs_ipc *ret)
{
    struct cudaDeviceProp prop;
    cudaIpcMemHandle_t h;

    if (!cuda_ok(cudaGetDeviceProperties(&prop, 0), "cudaGetDeviceProperties") ||
        !cuda_ok(cudaIpcGetMemHandle(&h, p), "cudaIpcGetMemHandle"))
        return false;
    memcpy(ret->uuid, prop.uuid.bytes, 16);
    memcpy(ret->handle, &h, 64);
    return true;
}

bool ipc_handle(device *d, void *p, kvs_ipc *ret)
{
    device_cuda_info info;

    if (device_cuda_get_info(d, &info, NULL) != KVS_OK || !own_ipc_handle(p, ret))
        return false;
    memcpy(ret->uuid, info.uuid, 16);
    return true;
}

pid_t spawn_client(const char *kind)
{
    char self[4096];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    const char *argv[] = {"client", "-client", kind, engine_daemon.socket, NULL};
    pid_t pid = n > 0 ? fork() : -1;

    if (pid == 0) {
        self[n] = '\0';
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        (void)execv(self, (char *const *)(uintptr_t)argv);
        _exit(127);
    }
    return pid;
}

/* ---- health ---- */

static void *ask(void *arg)
{
    asker *a = arg;

    while (!atomic_load(&a->stop) && a->status == KVS_OK && a->n < MAX_ASKED) {
        kvs_health_info h;
        uint64_t at = clock_ns();

        a->status = kvs_health(a->client, &h, CALL_MS, NULL);
        a->us[a->n++] = (double)(clock_ns() - at) / 1e3;
        nap_ms(a->pause_ms);
    }
    return NULL;
}

bool asker_start(asker *a, long pause_ms)
{
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_err err = {.msg = ""};

    o.path = engine_daemon.socket;
    a->n = 0;
    a->status = KVS_OK;
    a->pause_ms = pause_ms;
    atomic_store(&a->stop, false);
    if (!engine_start_daemon() || kvs_connect(&a->client, &o, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    return pthread_create(&a->thread, NULL, ask, a) == 0 || GPU_FAIL("no thread");
}

bool asker_end(asker *a, const char *while_what, double p99_ms, double most_ms)
{
    double p99, most;

    atomic_store(&a->stop, true);
    (void)pthread_join(a->thread, NULL);
    kvs_close(a->client);
    if (a->status != KVS_OK || a->n == 0)
        return GPU_FAIL("health: %s after %u calls", kvs_status_name(a->status), a->n);
    p99 = clock_percentile(a->us, a->n, 99) / 1e3;
    most = clock_percentile(a->us, a->n, 100) / 1e3;
    (void)printf("      %s: health of %u calls: p99 %.2f ms, most %.2f ms\n", while_what, a->n, p99, most);
    return (p99 <= p99_ms && most <= most_ms) || GPU_FAIL("more than %.0f and %.0f ms", p99_ms, most_ms);
}

/* ---- streams and counters ---- */

static PFN_cuStreamWriteValue64_v11070 write_value;
static PFN_cuStreamWaitValue64_v11070 wait_value;

static bool find_stream_calls(void)
{
    enum cudaDriverEntryPointQueryResult q;
    void *w = NULL, *v = NULL;

    if (cudaGetDriverEntryPointByVersion("cuStreamWriteValue64", &w, 11070, cudaEnableDefault, &q) != cudaSuccess ||
        cudaGetDriverEntryPointByVersion("cuStreamWaitValue64", &v, 11070, cudaEnableDefault, &q) != cudaSuccess ||
        w == NULL || v == NULL)
        return GPU_FAIL("the driver has no stream memory operations");
    memcpy(&write_value, &w, sizeof w);
    memcpy(&wait_value, &v, sizeof v);
    return true;
}

static CUdeviceptr counter_at(const racer *x, uint32_t counter, uint64_t half)
{
    void *at = NULL;

    (void)cuda_ok(cudaHostGetDevicePointer(&at, x->page.client, 0), "cudaHostGetDevicePointer");
    return (CUdeviceptr)(uintptr_t)at + half + counter * sizeof(kvs_counter_entry);
}

bool racer_open(racer *x)
{
    kvs_err err = {.msg = ""};
    cudaStream_t stream = NULL;

    *x = (racer){.stream = NULL};
    if (!find_stream_calls() || !engine_begin(&x->e, DEEP) ||
        !engine_region(&x->e, RACE_BLOCKS, &x->region, x->slots, &x->base))
        return false;
    if (kvs_counter_page(x->e.client, &x->page, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    x->bytes = RACE_BLOCKS * x->e.slot_bytes;
    x->seen = malloc(x->bytes);
    if (x->seen == NULL)
        return GPU_FAIL("no memory");
    if (!cuda_ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream"))
        return false;
    x->stream = stream;
    return cuda_ok(cudaHostRegister(x->page.client, 8192, cudaHostRegisterPortable | cudaHostRegisterMapped),
                   "registering the counter page");
}

void racer_close(racer *x)
{
    (void)cudaStreamDestroy(x->stream);
    (void)cudaHostUnregister(x->page.client);
    kvs_close(x->e.client);
    free(x->seen);
}

bool racer_fetch(racer *x, const void *from)
{
    return from_device(x->seen, from, x->bytes);
}

uint32_t racer_pure(const racer *x, uint8_t value)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < RACE_BLOCKS; i++) {
        const uint8_t *p = x->seen + i * x->e.slot_bytes;

        n += p[0] == value && memcmp(p, p + 1, x->e.slot_bytes - 1) == 0;
    }
    return n;
}

bool racer_raise(racer *x, uint32_t counter, uint64_t value)
{
    CUresult e = write_value(x->stream, counter_at(x, counter, 0), value, CU_STREAM_WRITE_VALUE_DEFAULT);

    return e == CUDA_SUCCESS || GPU_FAIL("cuStreamWriteValue64: %d", (int)e);
}

bool racer_await(racer *x, uint32_t counter, uint64_t value)
{
    CUresult e = wait_value(x->stream, counter_at(x, counter, 4096), value, CU_STREAM_WAIT_VALUE_GEQ);

    return e == CUDA_SUCCESS || GPU_FAIL("cuStreamWaitValue64: %d", (int)e);
}

static void CUDART_CB sleep_on_stream(void *ms)
{
    nap_ms((long)(intptr_t)ms);
}

bool racer_sleep(racer *x, long ms)
{
    return cuda_ok(cudaLaunchHostFunc(x->stream, sleep_on_stream, (void *)(intptr_t)ms), "cudaLaunchHostFunc");
}

bool racer_synchronise(racer *x)
{
    return cuda_ok(cudaStreamSynchronize(x->stream), "synchronise");
}
#else
typedef int no_gpu_engine; /* a translation unit holds a declaration */
#endif
