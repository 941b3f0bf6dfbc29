/* libkvstride on a GPU that is not there: a fake driver that fails and stands still where a test says so, and a fake daemon
 * that keeps blocks.  What a race leaves to chance on a real GPU is certain here. */
#include <criterion/criterion.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "proto/client/internal.h"
#include "tests/fake/fake_cuda.h"
#include "tests/support/fake_daemon.h"
#include "tests/support/random.h"

#define OK(call)            check((call), KVS_OK, #call)
#define FAILS(status, call) check((call), (status), #call)

enum {
    PLANES = 3,
    TOKENS = 4,
    BLOCKS = 40,
    CHUNK = 3,
    STAGING = 7,
    COUNTER = 30,
    ENTRIES = 2,
    KEEP = 512,
    DEVICE = 999
};

static kvs_err err;

static void check(kvs_status s, kvs_status want, const char *what)
{
    cr_assert_eq(s, want, "%s: %s (%s) where %s was due", what, kvs_status_name(s), s != KVS_OK ? err.msg : "",
                 kvs_status_name(want));
}

/* ---- the driver ---- */

static struct {
    void (*fail)(const char *call, uint32_t n, int code);
    uint32_t (*calls)(const char *call);
    void (*stall)(const char *call, atomic_int *gate);
    void (*gpus)(int n, int home);
    uint32_t (*contexts)(int gpu);
    void *(*memory)(uint64_t bytes);
    void (*memory_free)(void *p);
    void *(*stream)(void);
    void (*stream_free)(void *stream);
    void (*capture)(void *stream, bool on);
    bool (*idle)(void *stream);
    void (*hold)(void *stream, atomic_int *gate);
    void (*fill)(void *stream, void *p, int value, uint64_t bytes);
    void (*copy)(void *stream, void *dst, const void *src, uint64_t bytes);
} gpu;

static void find(void *lib, const char *name, void *to)
{
    void *f = dlsym(lib, name);

    cr_assert_not_null(f, "%s", name);
    memcpy(to, &f, sizeof f);
}

/* False: it was not built, or this build of the library has no CUDA. */
static bool load_driver(void)
{
    const char *build = getenv("KVS_BUILD");
    char path[512];
    void *lib;

    (void)snprintf(path, sizeof path, "%s/tests/fake/libcuda.so.1", build != NULL ? build : "build/release");
    lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (lib == NULL)
        return false;
    find(lib, "fake_cuda_fail", &gpu.fail);
    find(lib, "fake_cuda_calls", &gpu.calls);
    find(lib, "fake_cuda_stall", &gpu.stall);
    find(lib, "fake_cuda_gpus", &gpu.gpus);
    find(lib, "fake_cuda_contexts", &gpu.contexts);
    find(lib, "fake_cuda_memory", &gpu.memory);
    find(lib, "fake_cuda_memory_free", &gpu.memory_free);
    find(lib, "fake_cuda_stream", &gpu.stream);
    find(lib, "fake_cuda_stream_free", &gpu.stream_free);
    find(lib, "fake_cuda_capture", &gpu.capture);
    find(lib, "fake_cuda_idle", &gpu.idle);
    find(lib, "fake_cuda_hold", &gpu.hold);
    find(lib, "fake_cuda_fill", &gpu.fill);
    find(lib, "fake_cuda_copy", &gpu.copy);
    return true;
}

static void nap_ms(unsigned ms)
{
    struct timespec t = {.tv_nsec = (long)ms * 1000000};

    (void)nanosleep(&t, NULL);
}

/* ---- a daemon that keeps what it is given ---- */

typedef struct bank {
    uint64_t slot_bytes;
    uint8_t *slots[16]; /* of region i + 1 */
    uint32_t n_regions, n_kept;
    struct {
        uint8_t key[32], *bytes;
    } kept[KEEP];
    atomic_uint stores, loads;
    atomic_int gate; /* 0: answers neither STORE nor LOAD */
} bank;
static bank vault;

static int find_key(const uint8_t *key)
{
    for (uint32_t i = 0; i < vault.n_kept; i++)
        if (memcmp(vault.kept[i].key, key, 32) == 0)
            return (int)i;
    return -1;
}

/* A file that nobody takes for a memfd, so that it must be a GPU's memory: of a tmpfs, as /tmp may be, it would be one. */
static int plain_file(void)
{
    static const char *const folders[] = {".", "/var/tmp", "/tmp"};

    for (size_t i = 0; i < sizeof folders / sizeof folders[0]; i++) {
        int fd = open(folders[i], O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);

        if (fd >= 0 && fcntl(fd, F_GET_SEALS) < 0)
            return fd;
        if (fd >= 0)
            (void)close(fd);
    }
    cr_assert(false, "no folder here but on a tmpfs");
    return -1;
}

static void make_region(fake *f, fake_conn *c, frame *q)
{
    uint8_t body[WIRE_region_rep_BYTES] = {0};
    wire_out o = {.base = body, .cap = sizeof body};
    wire_in in = {.base = q->body, .len = q->head.body_len};
    wire_region_rep v = {.region = ++f->next_region, .n_pieces = 1};
    wire_region_create_req a;
    int fd = plain_file();

    wire_get_region_create_req(&in, &a);
    v.n_slots = a.n_slots;
    v.slot_stride = vault.slot_bytes;
    v.bytes = v.piece_bytes = a.n_slots * vault.slot_bytes;
    cr_assert_eq(ftruncate(fd, (off_t)v.bytes), 0);
    vault.slots[vault.n_regions++ % 16] = mmap(NULL, v.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    f->next_region = v.region = vault.n_regions;
    wire_put_region_rep(&o, &v);
    fake_reply_fds(c, q, body, o.len, &fd, 1);
    (void)close(fd);
}

static bool await_counter(const fake_conn *c, uint32_t counter, uint64_t value)
{
    for (int i = 0; counter != WIRE_NONE32 && i < 20000; i++) {
        if (__atomic_load_n((uint64_t *)(void *)(c->counters + counter * 16), __ATOMIC_ACQUIRE) >= value)
            return true;
        usleep(100);
    }
    return counter == WIRE_NONE32;
}

static void signal_counter(const fake_conn *c, uint32_t counter, uint64_t value)
{
    if (counter != WIRE_NONE32)
        __atomic_store_n((uint64_t *)(void *)(c->counters + WIRE_COUNTER_HALF_BYTES + counter * 16), value,
                         __ATOMIC_RELEASE);
}

/* False: it was killed meanwhile, and answers nothing any more. */
static bool await_gate(const fake *f)
{
    while (atomic_load(&vault.gate) == 0 && !atomic_load(&f->stopping))
        usleep(100);
    return !atomic_load(&f->stopping);
}

static void keep_blocks(fake *f, fake_conn *c, frame *q)
{
    uint8_t body[WIRE_key_rep_BYTES + 4096];
    wire_out o = {.base = body, .cap = sizeof body};
    wire_in in = {.base = q->body, .len = q->head.body_len};
    wire_store_req v;
    const uint8_t *keys, *slots;
    bool reached;

    wire_get_store_req(&in, &v);
    keys = wire_get_array(&in, v.n, 32);
    slots = wire_get_array(&in, v.n, WIRE_slot_ref_BYTES);
    if (!await_gate(f))
        return;
    reached = await_counter(c, v.after_counter, v.after_value);
    wire_put_key_rep(&o, &(wire_key_rep){v.n, reached ? v.n : 0});
    for (uint32_t i = 0; i < v.n; i++) {
        uint8_t *slot = vault.slots[(v.region - 1) % 16] + wire_at_u32(slots, 2 * (size_t)i) * vault.slot_bytes;

        wire_put_u32(&o, reached ? KVS_OK : KVS_E_DEADLINE);
        if (!reached || find_key(keys + (size_t)i * 32) >= 0 || vault.n_kept == KEEP)
            continue;
        memcpy(vault.kept[vault.n_kept].key, keys + (size_t)i * 32, 32);
        vault.kept[vault.n_kept].bytes = malloc(vault.slot_bytes);
        memcpy(vault.kept[vault.n_kept++].bytes, slot, vault.slot_bytes);
    }
    wire_put_pad8(&o);
    signal_counter(c, v.signal_counter, v.signal_value);
    atomic_fetch_add(&vault.stores, 1);
    fake_reply(c, q, reached ? KVS_OK : KVS_E_DEADLINE, body, o.len);
}

static void bring_blocks(fake *f, fake_conn *c, frame *q)
{
    uint8_t body[WIRE_load_rep_BYTES + 4096];
    wire_out o = {.base = body, .cap = sizeof body};
    wire_in in = {.base = q->body, .len = q->head.body_len};
    wire_load_req v;
    const uint8_t *keys, *slots;
    uint32_t n_ok = 0;

    wire_get_load_req(&in, &v);
    keys = wire_get_array(&in, v.n, 32);
    slots = wire_get_array(&in, v.n, WIRE_slot_ref_BYTES);
    if (!await_gate(f))
        return;
    (void)await_counter(c, v.after_counter, v.after_value);
    for (uint32_t i = 0; i < v.n; i++)
        n_ok += find_key(keys + (size_t)i * 32) >= 0;
    wire_put_load_rep(&o, &(wire_load_rep){v.n, n_ok});
    for (uint32_t i = 0; i < v.n; i++) {
        uint32_t slot = wire_at_u32(slots, 2 * (size_t)i);
        int at = find_key(keys + (size_t)i * 32);

        if (at >= 0)
            memcpy(vault.slots[(v.region - 1) % 16] + slot * vault.slot_bytes, vault.kept[at].bytes, vault.slot_bytes);
        wire_put_load_result(&o, &(wire_load_result){at >= 0 ? KVS_OK : KVS_E_NOT_FOUND, 0, slot, 10 + slot});
    }
    signal_counter(c, v.signal_counter, v.signal_value);
    atomic_fetch_add(&vault.loads, 1);
    fake_reply(c, q, n_ok == v.n ? KVS_OK : KVS_E_PARTIAL, body, o.len);
}

/* A region of the life before, offered with its memory. */
static void take_region(fake *f, fake_conn *c, frame *q)
{
    uint8_t body[WIRE_region_rep_BYTES + 4096] = {0};
    wire_out o = {.base = body, .cap = sizeof body};
    wire_in in = {.base = q->body, .len = q->head.body_len};
    wire_region_attach_req a;
    wire_region_rep v = {.n_pieces = 1, .slot_stride = vault.slot_bytes};

    wire_get_region_attach_req(&in, &a);
    vault.slots[vault.n_regions++ % 16] = mmap(NULL, a.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, q->fds[0], 0);
    f->next_region = v.region = vault.n_regions;
    v.n_slots = a.n_slots;
    v.bytes = v.piece_bytes = a.bytes;
    v.n_entries = a.n_entries;
    wire_put_region_rep(&o, &v);
    o.len += ((size_t)v.n_entries * 4 + 7) / 8 * 8; /* each of them OK */
    fake_reply_fds(c, q, body, o.len, q->fds, 1);
}

static bool bank_hook(fake *f, fake_conn *c, frame *q)
{
    switch (q->head.op) {
    case WIRE_REGION_ATTACH:
        take_region(f, c, q);
        return true;
    case WIRE_REGION_CREATE:
        make_region(f, c, q);
        return true;
    case WIRE_STORE:
        keep_blocks(f, c, q);
        return true;
    case WIRE_LOAD:
        bring_blocks(f, c, q);
        return true;
    default:
        return false;
    }
}

/* A fake that lacks what the library asks for is no reason to skip. */
static void skip_without_cuda(void)
{
    cr_assert(strstr(err.msg, "this build has no CUDA"), "%s", err.msg);
    cr_skip_test("%s", err.msg);
}

/* ---- an engine ---- */

typedef struct engine {
    fake f;
    kvs_client *c;
    kvs_ns *ns;
    kvs_pack *pack;
    kvs_plane planes[PLANES];
    kvs_pack_plane tensors[PLANES];
    void *stream;
    kvs_stream *ks;
    uint8_t keys[BLOCKS][32];
    uint32_t blocks[BLOCKS];
    kvs_status results[BLOCKS];
} engine;

static kvs_pack_args args_of(const engine *e)
{
    return (kvs_pack_args){.ns = e->ns,
                           .n_planes = PLANES,
                           .planes = e->tensors,
                           .n_blocks = BLOCKS,
                           .first_counter = 2,
                           .chunk = CHUNK,
                           .n_staging = STAGING};
}

static void connect_to(engine *e)
{
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_namespace desc;
    kvs_ns_info info;

    o.path = e->f.path;
    o.timeout_ms = 10000;
    o.backoff_min_ms = 5;
    o.backoff_max_ms = 40;
    OK(kvs_connect(&e->c, &o, &err));
    desc = (kvs_namespace){.model = "m", .tokens_per_block = TOKENS, .n_planes = PLANES, .planes = e->planes};
    for (uint32_t i = 0; i < PLANES; i++)
        e->planes[i] = (kvs_plane){.name = "latent",
                                   .layer = i,
                                   .format = KVS_FORMAT_raw,
                                   .row_bytes = 64 * (i + 1),
                                   .page_bytes = 64 * TOKENS * (i + 1)};
    OK(kvs_open(e->c, &desc, &e->ns, 0, &err));
    kvs_ns_get(e->ns, &info);
    vault.slot_bytes = info.slot_bytes;
}

/* False: skipped. */
static bool begin(engine *e)
{
    (void)alarm(60); /* a test of locks that fails would wait for ever */
    if (!load_driver())
        cr_skip_test("the fake driver was not built");
    atomic_store(&vault.gate, 1);
    fake_init(&e->f);
    e->f.hook = bank_hook;
    fake_start(&e->f);
    connect_to(e);
    for (uint32_t i = 0; i < PLANES; i++) {
        e->tensors[i].stride = e->planes[i].page_bytes + 32;
        e->tensors[i].base = gpu.memory(BLOCKS * e->tensors[i].stride);
    }
    e->stream = gpu.stream();
    if (kvs_stream_open(e->c, e->stream, COUNTER, ENTRIES, &e->ks, &err) != KVS_OK)
        skip_without_cuda();
    return true;
}

static bool begin_pack(engine *e)
{
    kvs_pack_args a;

    if (!begin(e))
        return false;
    a = args_of(e);
    OK(kvs_pack_open(e->c, &a, &e->pack, 0, &err));
    return true;
}

static void end(engine *e)
{
    atomic_store(&vault.gate, 1);
    kvs_close(e->c);
    gpu.stream_free(e->stream);
    for (uint32_t i = 0; i < PLANES; i++)
        gpu.memory_free(e->tensors[i].base);
    fake_stop(&e->f);
    fake_fini(&e->f);
    for (uint32_t i = 0; i < vault.n_kept; i++)
        free(vault.kept[i].bytes);
}

/* Keys id.. in blocks 0.. */
static kvs_pack_move move_of(engine *e, uint8_t id, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        memset(e->keys[i], id, 32);
        e->keys[i][1] = (uint8_t)i;
        e->blocks[i] = BLOCKS - 1 - i;
    }
    return (kvs_pack_move){.n = n, .keys = e->keys[0], .blocks = e->blocks, .results = e->results};
}

static void fill_now(const engine *e, uint8_t value)
{
    for (uint32_t p = 0; p < PLANES; p++)
        memset(e->tensors[p].base, value, BLOCKS * e->tensors[p].stride);
}

static void fill_later(const engine *e, uint8_t value)
{
    for (uint32_t p = 0; p < PLANES; p++)
        gpu.fill(e->stream, e->tensors[p].base, value, BLOCKS * e->tensors[p].stride);
}

/* Block i of the latest move is `value` all over. */
static bool is_pure(const engine *e, uint32_t i, uint8_t value)
{
    bool pure = true;

    for (uint32_t p = 0; p < PLANES; p++) {
        const uint8_t *page = (const uint8_t *)e->tensors[p].base + e->blocks[i] * e->tensors[p].stride;

        for (uint64_t k = 0; k < e->planes[p].page_bytes; k++)
            pure = pure && page[k] == value;
    }
    return pure;
}

static uint32_t count_of(const engine *e, uint32_t n, uint8_t value)
{
    uint32_t good = 0;

    for (uint32_t i = 0; i < n; i++)
        good += is_pure(e, i, value);
    return good;
}

static kvs_status finish(kvs_request *r)
{
    OK(kvs_wait(r, 0, &err));
    return kvs_request_end(r, &err);
}

static kvs_status run(engine *e, const kvs_pack_move *m, bool load)
{
    kvs_request *r = NULL;
    kvs_status s = load ? kvs_pack_load(e->pack, m, &r, 0, &err) : kvs_pack_store(e->pack, m, &r, 0, &err);

    return s == KVS_OK ? finish(r) : s;
}

static void drain(const engine *e)
{
    for (int i = 0; i < 5000 && !gpu.idle(e->stream); i++)
        nap_ms(1);
    cr_assert(gpu.idle(e->stream), "the engine's stream hangs");
}

/* ---- order ---- */

Test(client_gpu, pack_waits_for_the_stream_and_the_stream_for_the_load)
{
    static engine e;
    atomic_int gate = 0, second = 0;
    kvs_pack_move m;
    kvs_request *store, *load;

    if (!begin_pack(&e))
        return;
    m = move_of(&e, 1, 20);
    m.stream = e.ks;
    fill_now(&e, 0);
    gpu.hold(e.stream, &gate);
    fill_later(&e, 0x51);
    OK(kvs_pack_store(e.pack, &m, &store, 0, &err));
    nap_ms(60);
    cr_assert_not(kvs_done(store));
    cr_assert_eq(atomic_load(&vault.stores), 0, "nothing is kept before the pages are written");
    atomic_store(&gate, 1);
    OK(finish(store));
    drain(&e);
    gpu.hold(e.stream, &second);
    fill_later(&e, 0x11); /* a reset of the pages that is late */
    atomic_store(&vault.gate, 0);
    OK(kvs_pack_load(e.pack, &m, &load, 0, &err));
    atomic_store(&second, 1);
    nap_ms(60);
    cr_assert_not(gpu.idle(e.stream), "the stream waits for the load");
    cr_assert_eq(count_of(&e, 20, 0x11), 20);
    atomic_store(&vault.gate, 1);
    drain(&e);
    cr_assert_eq(count_of(&e, 20, 0x51), 20, "what follows on the stream sees what was loaded");
    OK(finish(load));
    end(&e);
}

static void *open_gate(void *gate)
{
    nap_ms(60);
    atomic_store((atomic_int *)gate, 1);
    return NULL;
}

/* The stream stands still, so the scatters do; the loads behind them want the same staging slots. */
Test(client_gpu, a_load_leaves_slots_alone_that_are_still_to_be_scattered)
{
    static engine e;
    atomic_int gate = 0;
    kvs_pack_move m;
    kvs_request *r;

    if (!begin_pack(&e))
        return;
    m = move_of(&e, 1, 20);
    for (uint32_t i = 0; i < 20; i++)
        for (uint32_t p = 0; p < PLANES; p++)
            memset((uint8_t *)e.tensors[p].base + e.blocks[i] * e.tensors[p].stride, (int)(0x10 + i),
                   e.planes[p].page_bytes);
    OK(run(&e, &m, false));
    fill_now(&e, 0);
    m.stream = e.ks;
    gpu.hold(e.stream, &gate);
    OK(kvs_pack_load(e.pack, &m, &r, 0, &err));
    nap_ms(60);
    cr_assert_eq(count_of(&e, 20, 0), 20);
    gate = 1;
    OK(finish(r));
    for (uint32_t i = 0; i < 20; i++)
        cr_assert(is_pure(&e, i, (uint8_t)(0x10 + i)), "block %u has the bytes of another", i);
    end(&e);
}

/* Every chunk costs an engine something, whatever its size.  The ring's end is no multiple of a chunk, and the first job's
 * end has company behind it: neither makes smaller ones.  Only the last job's end does, so that little is left to do when the
 * last bytes have come. */
Test(client_gpu, chunks_are_whole_for_as_long_as_there_is_more)
{
    static engine e;
    static kvs_status first[BLOCKS];
    kvs_pack_move m;
    kvs_request *a, *b;
    uint32_t before;

    if (!begin_pack(&e))
        return;
    m = move_of(&e, 1, 20);
    fill_now(&e, 0x33);
    OK(run(&e, &m, false));
    before = atomic_load(&vault.loads);
    atomic_store(&vault.gate, 0);
    m.results = first;
    OK(kvs_pack_load(e.pack, &m, &a, 0, &err));
    m.results = e.results;
    OK(kvs_pack_load(e.pack, &m, &b, 0, &err));
    atomic_store(&vault.gate, 1);
    OK(finish(a));
    OK(finish(b));
    cr_assert_eq(atomic_load(&vault.loads) - before, 7 + 9, "%u chunks, not 3 3 3 3 3 3 2 and 3 3 3 3 3 2 1 1 1",
                 atomic_load(&vault.loads) - before);
    cr_assert_eq(count_of(&e, 20, 0x33), 20);
    end(&e);
}

Test(client_gpu, without_a_stream_the_library_waits_for_the_gpu)
{
    static engine e;
    atomic_int gate = 0;
    kvs_pack_move m;
    pthread_t t;

    if (!begin_pack(&e))
        return;
    m = move_of(&e, 2, 20);
    fill_now(&e, 0);
    gpu.hold(e.stream, &gate);
    fill_later(&e, 0x52);
    (void)pthread_create(&t, NULL, open_gate, &gate);
    OK(run(&e, &m, false));
    (void)pthread_join(t, NULL);
    fill_now(&e, 0);
    OK(run(&e, &m, true));
    cr_assert_eq(count_of(&e, 20, 0x52), 20);
    gate = 0; /* the control: told not to wait, it stores what is there */
    m = move_of(&e, 3, 20);
    m.flags = KVS_PACK_NO_WAIT;
    fill_now(&e, 0x01);
    gpu.hold(e.stream, &gate);
    fill_later(&e, 0x53);
    OK(run(&e, &m, false));
    gate = 1;
    drain(&e);
    OK(run(&e, &m, true));
    cr_assert_eq(count_of(&e, 20, 0x01), 20);
    end(&e);
}

Test(client_gpu, a_captured_stream_is_refused)
{
    static engine e;
    kvs_pack_move m;
    kvs_request *r;
    kvs_stream *ks;
    kvs_mark mark = {.counter = 1, .value = 1};

    if (!begin_pack(&e))
        return;
    m = move_of(&e, 4, 2);
    m.stream = e.ks;
    gpu.capture(e.stream, true);
    FAILS(KVS_E_STATE, kvs_pack_store(e.pack, &m, &r, 0, &err));
    FAILS(KVS_E_STATE, kvs_pack_load(e.pack, &m, &r, 0, &err));
    FAILS(KVS_E_STATE, kvs_stream_signal(e.ks, &mark, &err));
    FAILS(KVS_E_STATE, kvs_stream_wait(e.ks, 0, mark, &err));
    FAILS(KVS_E_STATE, kvs_stream_open(e.c, e.stream, 100, 1, &ks, &err));
    cr_assert(strstr(err.msg, "captured"), "%s", err.msg);
    cr_assert_eq(gpu.calls("cuStreamWriteValue64_v2") + gpu.calls("cuStreamWaitValue64_v2"), 0);
    gpu.capture(e.stream, false);
    OK(run(&e, &m, false));
    end(&e);
}

/* ---- failures ---- */

/* The n-th call fails: the chunk that it was for is not kept, those before it are, and the next request is well. */
static void fail_store(engine *e, const char *name, uint32_t n, uint8_t id)
{
    kvs_pack_move m = move_of(e, id, 20);
    uint32_t good = 0;

    m.flags = KVS_PACK_NO_WAIT;
    fill_now(e, id);
    gpu.fail(name, n, DEVICE);
    FAILS(KVS_E_DEVICE, run(e, &m, false));
    while (good < 20 && e->results[good] == KVS_OK)
        good++;
    cr_assert_lt(good, 20);
    for (uint32_t i = 0; i < 20; i++) {
        cr_assert_eq(e->results[i], i < good ? KVS_OK : KVS_E_DEVICE, "block %u: %s", i,
                     kvs_status_name(e->results[i]));
        cr_assert_eq(find_key(e->keys[i]) >= 0, i < good, "block %u of %u", i, good);
    }
    OK(run(e, &m, false));
    fill_now(e, 0);
    OK(run(e, &m, true));
    cr_assert_eq(count_of(e, 20, id), 20);
}

Test(client_gpu, a_store_that_fails_keeps_nothing_it_has_not_gathered)
{
    static engine e;
    uint8_t id = 10;

    if (!begin_pack(&e))
        return;
    for (uint32_t n = 1; n <= 6; n += 2) {
        fail_store(&e, "cuLaunchKernel", n, id++);
        fail_store(&e, "cuStreamWriteValue64_v2", n, id++);
    }
    fail_store(&e, "cuMemHostGetDevicePointer_v2", 2, id++);
    end(&e);
}

Test(client_gpu, a_load_that_fails_says_so_of_each_block)
{
    static const char *const CALLS[] = {"cuLaunchKernel", "cuStreamWriteValue64_v2", "cuStreamSynchronize"};
    static engine e;
    kvs_pack_move m;

    if (!begin_pack(&e))
        return;
    m = move_of(&e, 5, 20);
    m.flags = KVS_PACK_NO_WAIT;
    fill_now(&e, 0x77);
    OK(run(&e, &m, false));
    for (unsigned i = 0; i < 3; i++)
        for (uint32_t n = 1; n <= (i == 2 ? 1 : 5); n += 2) {
            gpu.fail(CALLS[i], n, DEVICE);
            fill_now(&e, 0);
            FAILS(KVS_E_DEVICE, run(&e, &m, true));
            for (uint32_t k = 0; k < 20; k++)
                cr_assert(e.results[k] != KVS_OK || is_pure(&e, k, 0x77), "%s %u: block %u is said to be there",
                          CALLS[i], n, k);
            gpu.fail(CALLS[i], 0, 0);
            OK(run(&e, &m, true));
            cr_assert_eq(count_of(&e, 20, 0x77), 20);
        }
    end(&e);
}

Test(client_gpu, opening_a_pack_fails_at_every_call_and_leaves_nothing)
{
    static const char *const CALLS[] = {"cuDevicePrimaryCtxRetain",
                                        "cuCtxPushCurrent_v2",
                                        "cuPointerGetAttribute",
                                        "cuMemGetAddressRange_v2",
                                        "cuDeviceGetAttribute",
                                        "cuModuleLoadData",
                                        "cuModuleGetFunction",
                                        "cuMemAlloc_v2",
                                        "cuMemcpyAsync",
                                        "cuLaunchKernel",
                                        "cuStreamSynchronize",
                                        "cuStreamGetCtx",
                                        "cuStreamIsCapturing",
                                        "cuMemMap",
                                        "cuMemSetAccess",
                                        "cuMemAddressReserve",
                                        "cuMemImportFromShareableHandle",
                                        "cuStreamCreateWithPriority"};
    static engine e;
    kvs_pack_args a;

    if (!begin(&e))
        return;
    a = args_of(&e);
    for (unsigned i = 0; i < sizeof CALLS / sizeof *CALLS; i++)
        for (uint32_t n = 1; n <= 2; n++) {
            kvs_status s;

            gpu.fail(CALLS[i], n, DEVICE);
            s = kvs_pack_open(e.c, &a, &e.pack, 0, &err);
            cr_assert(s == KVS_E_DEVICE || s == KVS_E_RANGE || s == KVS_E_NO_SPACE, "%s %u: %s", CALLS[i], n,
                      kvs_status_name(s));
            gpu.fail(CALLS[i], 0, 0);
        }
    gpu.fail("cuMemAlloc_v2", 1, 2);
    FAILS(KVS_E_NO_SPACE, kvs_pack_open(e.c, &a, &e.pack, 0, &err));
    OK(kvs_pack_open(e.c, &a, &e.pack, 0, &err));
    end(&e);
}

Test(client_gpu, planes_must_lie_in_memory_that_is_there)
{
    static engine e;
    kvs_pack_args a;
    uint8_t *next;

    if (!begin(&e))
        return;
    a = args_of(&e);
    a.n_blocks = BLOCKS * 3;
    FAILS(KVS_E_RANGE, kvs_pack_open(e.c, &a, &e.pack, 0, &err));
    a.n_blocks = BLOCKS;
    next = e.tensors[1].base;
    e.tensors[1].base = (void *)(((uintptr_t)&e + 15) / 16 * 16);
    FAILS(KVS_E_RANGE, kvs_pack_open(e.c, &a, &e.pack, 0, &err));
    cr_assert(strstr(err.msg, "planes[1].base"), "%s", err.msg);
    e.tensors[1].base = next;
    OK(kvs_pack_open(e.c, &a, &e.pack, 0, &err));
    end(&e);
}

/* ---- requests on a stream ---- */

typedef struct place {
    kvs_region *region;
    kvs_slot slots[8];
    uint8_t *base;
    kvs_load_result results[8];
} place;

static place place_of(engine *e)
{
    place p = {0};
    void *base;

    OK(kvs_region_create(e->ns, 0, 8, &p.region, 0, &err));
    OK(kvs_region_map(p.region, &base, NULL, &err));
    OK(kvs_slot_take(p.region, 8, p.slots, 0, &err));
    p.base = base;
    return p;
}

static kvs_load_args load_of(engine *e, place *p, uint32_t slot)
{
    return (kvs_load_args){.ns = e->ns,
                           .region = p->region,
                           .n = 1,
                           .keys = e->keys[slot],
                           .slots = &p->slots[slot],
                           .results = &p->results[slot],
                           .stream = e->ks};
}

Test(client_gpu, a_stream_waits_for_its_load_and_goes_on)
{
    static engine e;
    atomic_int gate = 0;
    kvs_status stored[8];
    kvs_store_args st;
    kvs_load_args ld[3];
    kvs_request *r[3];
    place p;

    if (!begin(&e))
        return;
    p = place_of(&e);
    (void)move_of(&e, 6, 8);
    gpu.hold(e.stream, &gate);
    gpu.fill(e.stream, p.base, 0x61, 8 * vault.slot_bytes);
    st = (kvs_store_args){
        .ns = e.ns, .region = p.region, .n = 8, .keys = e.keys[0], .slots = p.slots, .results = stored, .stream = e.ks};
    OK(kvs_submit_store(&st, &r[0], 0, &err));
    nap_ms(40);
    cr_assert_not(kvs_done(r[0]));
    gate = 1;
    OK(finish(r[0]));
    drain(&e);
    memset(p.base, 0, 8 * vault.slot_bytes);
    atomic_store(&vault.gate, 0);
    for (uint32_t i = 0; i < 3; i++)
        ld[i] = load_of(&e, &p, i);
    OK(kvs_submit_load(&ld[0], &r[0], 0, &err));
    OK(kvs_submit_load(&ld[1], &r[1], 0, &err));
    FAILS(KVS_E_BUSY, kvs_submit_load(&ld[2], &r[2], 0, &err)); /* two entries, two loads */
    gpu.copy(e.stream, p.base + 4 * vault.slot_bytes, p.base, vault.slot_bytes);
    nap_ms(40);
    cr_assert_not(gpu.idle(e.stream));
    cr_assert_eq(p.base[4 * vault.slot_bytes], 0);
    atomic_store(&vault.gate, 1);
    drain(&e);
    cr_assert_eq(p.base[4 * vault.slot_bytes], 0x61);
    OK(finish(r[0]));
    OK(finish(r[1]));
    OK(kvs_load(&ld[2], 0, &err));
    ld[2].after = &(kvs_mark)KVS_MARK_NOW;
    FAILS(KVS_E_INVALID, kvs_load(&ld[2], 0, &err));
    st.after = &(kvs_mark)KVS_MARK_NOW;
    FAILS(KVS_E_INVALID, kvs_store(&st, 0, &err));
    end(&e);
}

Test(client_gpu, a_request_without_mark_or_stream_waits_for_the_gpu)
{
    enum { CAPTURE_UNSUPPORTED = 900, CAPTURE_IMPLICIT = 906 };
    static engine e;
    atomic_int gate = 0;
    const kvs_mark now = KVS_MARK_NOW;
    kvs_status stored[8], dropped;
    kvs_store_args a;
    kvs_load_args ld;
    pthread_t t;
    place p;
    uint32_t waits;

    if (!begin(&e))
        return;
    p = place_of(&e);
    (void)move_of(&e, 11, 8);
    a = (kvs_store_args){
        .ns = e.ns, .region = p.region, .n = 8, .keys = e.keys[0], .slots = p.slots, .results = stored};
    gpu.hold(e.stream, &gate);
    gpu.fill(e.stream, p.base, 0x71, 8 * vault.slot_bytes);
    (void)pthread_create(&t, NULL, open_gate, &gate);
    OK(kvs_store(&a, 0, &err));
    (void)pthread_join(t, NULL);
    cr_assert_eq(vault.kept[find_key(e.keys[7])].bytes[0], 0x71);
    waits = gpu.calls("cuCtxSynchronize");
    a.after = &now; /* the caller knows that nothing is under way */
    OK(kvs_store(&a, 0, &err));
    ld = load_of(&e, &p, 0);
    ld.stream = NULL;
    ld.slots = NULL; /* nobody has touched what the daemon will choose */
    e.keys[0][0] = 0;
    FAILS(KVS_E_PARTIAL, kvs_load(&ld, 0, &err)); /* there is no such key */
    cr_assert_eq(gpu.calls("cuCtxSynchronize"), waits);
    OK(kvs_slot_drop(p.region, p.slots, 1, NULL, &dropped, 0, &err));
    cr_assert_eq(gpu.calls("cuCtxSynchronize"), waits + 1);
    a.after = NULL;
    gpu.fail("cuCtxSynchronize", 1, CAPTURE_UNSUPPORTED);
    FAILS(KVS_E_STATE, kvs_store(&a, 0, &err));
    gpu.fail("cuStreamIsCapturing", 1, CAPTURE_IMPLICIT);
    FAILS(KVS_E_STATE, kvs_store(&a, 0, &err));
    gpu.fail("cuCtxSynchronize", 1, DEVICE);
    FAILS(KVS_E_DEVICE, kvs_store(&a, 0, &err));
    end(&e);
}

/* What it waits for shows by a wait that fails: nothing is sent then. */
Test(client_gpu, computing_without_a_mark_waits_for_the_gpu)
{
    static engine e;
    const kvs_mark now = KVS_MARK_NOW;
    kvs_call_result results[2];
    kvs_write_call rows = {0};
    kvs_decode_call calls[2] = {{.after = &now}, {.after = NULL}}; /* one of them has a mark: that is not enough */
    kvs_write_args w;
    kvs_decode_args d;
    kvs_extend_args x;
    place p;

    if (!begin(&e))
        return;
    p = place_of(&e);
    w = (kvs_write_args){.ns = e.ns, .region = p.region, .n_calls = 1, .calls = &rows, .results = results};
    gpu.fail("cuCtxSynchronize", 1, DEVICE);
    FAILS(KVS_E_DEVICE, kvs_write(&w, 0, &err));
    d = (kvs_decode_args){.ns = e.ns, .region = p.region, .n_calls = 2, .calls = calls, .results = results};
    gpu.fail("cuCtxSynchronize", 1, DEVICE);
    FAILS(KVS_E_DEVICE, kvs_decode(&d, 0, &err));
    x = (kvs_extend_args){.ns = e.ns,
                          .region = p.region,
                          .n_calls = 2,
                          .calls = calls,
                          .q_start = (const int32_t[]){0},
                          .results = results};
    gpu.fail("cuCtxSynchronize", 1, DEVICE);
    FAILS(KVS_E_DEVICE, kvs_extend(&x, 0, &err));
    cr_assert_eq(atomic_load(&e.f.ops[WIRE_WRITE]) + atomic_load(&e.f.ops[WIRE_DECODE]) +
                     atomic_load(&e.f.ops[WIRE_EXTEND]),
                 0, "it was sent all the same");
    end(&e);
}

Test(client_gpu, a_request_that_is_never_sent_lets_its_stream_go)
{
    static engine e;
    kvs_load_args a;
    kvs_request *r;
    place p;
    unsigned before;

    if (!begin(&e))
        return;
    p = place_of(&e);
    (void)move_of(&e, 7, 8);
    a = load_of(&e, &p, 0);
    for (int i = 0; i < 5; i++) {
        gpu.fail("cuStreamWaitValue64_v2", 1, DEVICE);
        before = atomic_load(&e.f.ops[WIRE_LOAD]);
        FAILS(KVS_E_DEVICE, kvs_submit_load(&a, &r, 0, &err));
        gpu.fail("cuStreamWriteValue64_v2", 1, DEVICE);
        FAILS(KVS_E_DEVICE, kvs_submit_load(&a, &r, 0, &err));
        cr_assert_eq(atomic_load(&e.f.ops[WIRE_LOAD]), before, "it was sent all the same");
        drain(&e);
    }
    end(&e);
}

Test(client_gpu, a_request_without_credit_lets_its_stream_go)
{
    static engine e;
    kvs_load_args a, b;
    kvs_request *first, *second;
    place p;

    e.f.credit_requests = 1;
    if (!load_driver())
        cr_skip_test("the fake driver was not built");
    atomic_store(&vault.gate, 1);
    fake_init(&e.f);
    e.f.hook = bank_hook;
    e.f.credit_requests = 1;
    fake_start(&e.f);
    connect_to(&e);
    for (uint32_t i = 0; i < PLANES; i++)
        e.tensors[i].base = gpu.memory(4096);
    e.stream = gpu.stream();
    if (kvs_stream_open(e.c, e.stream, COUNTER, ENTRIES, &e.ks, &err) != KVS_OK)
        skip_without_cuda();
    p = place_of(&e);
    (void)move_of(&e, 7, 8);
    a = load_of(&e, &p, 0);
    b = load_of(&e, &p, 1);
    a.stream = NULL;
    atomic_store(&vault.gate, 0);
    OK(kvs_submit_load(&a, &first, 0, &err));
    FAILS(KVS_E_BUSY, kvs_submit_load(&b, &second, 30, &err));
    drain(&e);
    atomic_store(&vault.gate, 1);
    FAILS(KVS_E_PARTIAL, finish(first));
    FAILS(KVS_E_PARTIAL, kvs_load(&b, 0, &err));
    drain(&e);
    end(&e);
}

Test(client_gpu, no_stream_hangs_when_the_daemon_dies)
{
    static engine e;
    kvs_load_args a;
    kvs_pack_move m;
    kvs_counters page;
    kvs_request *load, *packed, *late;
    kvs_mark mark = {.counter = 200, .value = 5};
    place p;

    if (!begin_pack(&e))
        return;
    p = place_of(&e);
    m = move_of(&e, 8, 20);
    m.stream = e.ks;
    a = load_of(&e, &p, 0);
    for (uint64_t life = 1; life <= 3; life++) {
        atomic_store(&vault.gate, 0);
        OK(kvs_counter_page(e.c, &page, &err));
        OK(kvs_submit_load(&a, &load, 0, &err));
        OK(kvs_pack_load(e.pack, &m, &packed, 0, &err));
        OK(kvs_stream_wait(e.ks, 0, mark, &err));
        nap_ms(30);
        cr_assert_not(gpu.idle(e.stream));
        fake_stop(&e.f);
        drain(&e);
        cr_assert_eq(page.daemon[200].error, KVS_E_AWAY);
        FAILS(KVS_E_AWAY, finish(load));
        FAILS(KVS_E_AWAY, finish(packed));
        for (uint32_t i = 0; i < 20; i++)
            cr_assert_eq(e.results[i], KVS_E_AWAY);
        FAILS(KVS_E_AWAY, kvs_stream_wait(e.ks, page.generation, mark, &err));
        FAILS(KVS_E_AWAY, kvs_submit_load(&a, &late, 0, &err));
        drain(&e);
        atomic_store(&vault.gate, 1);
        fake_start(&e.f);
        OK(kvs_wait_up(e.c, life, 0, &err));
        fill_now(&e, (uint8_t)(0x80 + life));
        m = move_of(&e, (uint8_t)(100 + life), 20);
        m.stream = e.ks;
        OK(run(&e, &m, false));
        fill_now(&e, 0);
        OK(run(&e, &m, true));
        drain(&e);
        cr_assert_eq(count_of(&e, 20, (uint8_t)(0x80 + life)), 20);
        m = move_of(&e, 8, 20);
        m.stream = e.ks;
    }
    end(&e);
}

Test(client_gpu, pages_of_many_lives_stay_where_a_stream_may_look_at_them)
{
    enum { LIVES = 20 }; /* more pages than a client without streams keeps */
    static engine e;
    atomic_int gate = 0;
    kvs_mark mark;

    if (!begin(&e))
        return;
    gpu.hold(e.stream, &gate);
    for (uint64_t life = 1; life <= LIVES; life++) {
        OK(kvs_stream_signal(e.ks, &mark, &err)); /* is still to come when the last page is made */
        cr_assert_eq(mark.value, life);
        fake_stop(&e.f);
        fake_start(&e.f);
        OK(kvs_wait_up(e.c, life, 0, &err));
    }
    cr_assert_eq(gpu.calls("cuMemHostRegister_v2"), LIVES);
    cr_assert_eq(gpu.calls("cuMemHostUnregister"), 0);
    gate = 1;
    drain(&e);
    kvs_close(e.c);
    e.c = NULL;
    cr_assert_eq(gpu.calls("cuMemHostUnregister"), LIVES);
    end(&e);
}

Test(client_gpu, closing_under_a_stream_that_stands_still_takes_no_memory_from_it)
{
    static engine e;
    atomic_int gate = 0;
    kvs_load_args a;
    kvs_request *r;
    place p;

    if (!begin(&e))
        return;
    p = place_of(&e);
    (void)move_of(&e, 9, 8);
    a = load_of(&e, &p, 0);
    gpu.hold(e.stream, &gate);
    OK(kvs_submit_load(&a, &r, 0, &err));
    kvs_close(e.c); /* after two seconds it gives the page up for lost */
    gate = 1;
    drain(&e); /* the signal and the wait are still to come: they must find their page */
    e.c = NULL;
    end(&e);
}

Test(client_gpu, streams_have_counters_of_their_own)
{
    static engine e;
    kvs_stream *a, *b;
    kvs_mark first, second;

    if (!begin(&e))
        return;
    FAILS(KVS_E_RANGE, kvs_stream_open(e.c, e.stream, 255, 2, &a, &err));
    FAILS(KVS_E_RANGE, kvs_stream_open(e.c, e.stream, 0, 0, &a, &err));
    FAILS(KVS_E_BUSY, kvs_stream_open(e.c, e.stream, COUNTER + ENTRIES - 1, 1, &a, &err));
    OK(kvs_stream_open(e.c, e.stream, COUNTER + ENTRIES, 1, &a, &err));
    gpu.fail("cuMemHostRegister_v2", 1, DEVICE);
    FAILS(KVS_E_DEVICE, kvs_stream_signal(a, &first, &err));
    gpu.fail("cuStreamGetCtx", 1, DEVICE);
    FAILS(KVS_E_DEVICE, kvs_stream_signal(a, &first, &err));
    OK(kvs_stream_signal(a, &first, &err));
    cr_assert_eq(first.value, 1, "what failed has used no number");
    drain(&e);
    kvs_stream_close(a);
    OK(kvs_stream_open(e.c, e.stream, COUNTER + ENTRIES, 1, &b, &err));
    OK(kvs_stream_signal(b, &second, &err));
    cr_assert_eq(first.counter, COUNTER + ENTRIES);
    cr_assert_eq(second.value, first.value + 1, "its numbers go on");
    end(&e);
}

/* ---- other GPUs, other handles, other processes ---- */

static void *map_it(void *region)
{
    kvs_err own = {0};
    uint64_t bytes = 0;
    void *base;

    (void)kvs_region_map(region, &base, &bytes, &own);
    return (void *)(uintptr_t)bytes;
}

/* A driver may wait for a stream that waits for a counter of this handle: whoever holds its lock meanwhile waits for itself. */
Test(client_gpu, a_driver_that_stands_still_while_a_region_is_mapped_holds_nobody_up)
{
    static engine e;
    atomic_int gate = 0;
    kvs_region *region;
    pthread_t thread;
    void *bytes;

    if (!begin(&e))
        return;
    OK(kvs_region_create(e.ns, 0, 8, &region, 0, &err));
    gpu.stall("cuMemSetAccess", &gate);
    cr_assert_eq(pthread_create(&thread, NULL, map_it, region), 0);
    while (gpu.calls("cuMemSetAccess") == 0)
        nap_ms(1);
    OK(kvs_ping(e.c, 0, &err));
    cr_assert_eq(kvs_generation(e.c), 1);
    gate = 1;
    cr_assert_eq(pthread_join(thread, &bytes), 0);
    cr_assert_eq((uintptr_t)bytes, 8 * vault.slot_bytes);
    end(&e);
}

/* Stands still in REGION_ATTACH until the gate is open, and takes no slot back. */
static bool forgetful_hook(fake *f, fake_conn *c, frame *q)
{
    uint8_t body[WIRE_region_rep_BYTES + 64];
    wire_out o = {.base = body, .cap = sizeof body};
    wire_in in = {.base = q->body, .len = q->head.body_len};
    wire_region_attach_req a;
    wire_region_rep v = {.n_pieces = 1};

    if (q->head.op != WIRE_REGION_ATTACH)
        return bank_hook(f, c, q);
    if (!await_gate(f))
        return true;
    wire_get_region_attach_req(&in, &a);
    v = (wire_region_rep){.region = vault.n_regions,
                          .n_slots = a.n_slots,
                          .slot_stride = vault.slot_bytes,
                          .bytes = a.bytes,
                          .piece_bytes = a.bytes,
                          .n_pieces = 1,
                          .n_entries = a.n_entries};
    wire_put_region_rep(&o, &v);
    for (uint32_t i = 0; i < (a.n_entries + 1) / 2 * 2; i++)
        wire_put_u32(&o, i < a.n_entries ? KVS_E_STALE : 0);
    fake_reply_fds(c, q, body, o.len, q->fds, 1);
    return true;
}

/* Closed while the keeper offers it to a new daemon, and so freed by that one. */
Test(client_gpu, a_driver_that_stands_still_while_a_closed_region_goes_holds_nobody_up)
{
    static engine e;
    atomic_int gate = 0;
    kvs_region *region;
    uint64_t bytes;
    uint32_t before;
    void *base;

    if (!begin(&e))
        return;
    OK(kvs_region_create(e.ns, 0, 8, &region, 0, &err));
    OK(kvs_region_map(region, &base, &bytes, &err));
    fake_stop(&e.f);
    e.f.hook = forgetful_hook;
    atomic_store(&vault.gate, 0);
    fake_start(&e.f);
    while (atomic_load(&e.f.ops[WIRE_REGION_ATTACH]) == 0)
        nap_ms(1);
    before = gpu.calls("cuMemUnmap");
    gpu.stall("cuMemUnmap", &gate);
    OK(kvs_region_close(region, 0, &err));
    cr_assert_eq(gpu.calls("cuMemUnmap"), before);
    atomic_store(&vault.gate, 1);
    while (gpu.calls("cuMemUnmap") == before)
        nap_ms(1);
    cr_assert_eq(kvs_generation(e.c), 2);
    OK(kvs_ping(e.c, 0, &err));
    gate = 1;
    end(&e);
}

static void *store_it(void *args)
{
    static kvs_err own;

    return (void *)(uintptr_t)kvs_store(args, 0, &own);
}

/* The GPU is waited for while the daemon goes and comes back: a slot of its earlier life is another one's by then. */
Test(client_gpu, a_slot_of_an_earlier_life_is_not_named_however_long_the_gpu_takes)
{
    static engine e;
    kvs_status stored;
    atomic_int gate = 0;
    kvs_slot slot;
    kvs_store_args a = {.n = 1, .slots = &slot, .results = &stored};
    pthread_t thread;
    void *s;

    if (!begin(&e))
        return;
    a.ns = e.ns;
    a.keys = e.keys[0];
    OK(kvs_region_create(e.ns, 0, 8, &a.region, 0, &err));
    OK(kvs_slot_take(a.region, 1, &slot, 0, &err));
    gpu.hold(e.stream, &gate);
    cr_assert_eq(pthread_create(&thread, NULL, store_it, &a), 0);
    while (gpu.calls("cuCtxSynchronize") == 0)
        nap_ms(1);
    fake_stop(&e.f);
    e.f.hook = forgetful_hook;
    fake_start(&e.f);
    OK(kvs_wait_up(e.c, 1, 0, &err));
    gate = 1;
    cr_assert_eq(pthread_join(thread, &s), 0);
    cr_assert_eq((uintptr_t)s, KVS_E_STALE, "%s", kvs_status_name((kvs_status)(uintptr_t)s));
    cr_assert_eq(atomic_load(&e.f.ops[WIRE_STORE]), 0);
    end(&e);
}

/* Rank 1 of several: its memory is on GPU 1, and GPU 0 is full of somebody else's. */
Test(client_gpu, a_context_is_made_on_no_gpu_that_the_program_does_not_use)
{
    static engine e;
    kvs_region *region;
    uint64_t offset, bytes;
    kvs_ipc handle;
    void *base;

    if (!begin(&e))
        return;
    gpu.gpus(2, 1);
    OK(kvs_region_create(e.ns, 0, 8, &region, 0, &err));
    OK(kvs_region_map(region, &base, &bytes, &err));
    (void)kvs_ipc_of(e.tensors[0].base, &handle, &offset, &bytes, &err);
    OK(kvs_region_close(region, 0, &err));
    cr_assert_gt(gpu.contexts(1), 0);
    cr_assert_eq(gpu.contexts(0), 0, "%u times", gpu.contexts(0));
    gpu.gpus(1, 0);
    end(&e);
}

/* Its kernel would run on GPU 0 and touch memory that only GPU 1 may. */
Test(client_gpu, a_pack_uses_no_slots_that_a_new_daemon_has_put_on_another_gpu)
{
    static engine e;
    uint32_t launched;
    kvs_pack_move m;

    if (!begin_pack(&e))
        return;
    m = move_of(&e, 1, 4);
    OK(run(&e, &m, false));
    fake_stop(&e.f);
    gpu.gpus(2, 1);
    fake_start(&e.f);
    OK(kvs_wait_up(e.c, 1, 0, &err));
    launched = gpu.calls("cuLaunchKernel");
    FAILS(KVS_E_STALE, run(&e, &m, false));
    FAILS(KVS_E_STALE, run(&e, &m, true));
    cr_assert_eq(gpu.calls("cuLaunchKernel"), launched);
    gpu.gpus(2, 0);
    m = move_of(&e, 2, 4);
    OK(run(&e, &m, false));
    end(&e);
}

/* The daemon's numbers are others in each life: it is the UUID that stays. */
static bool devices_hook(fake *f, fake_conn *c, frame *q)
{
    wire_region_create_req a;
    wire_in in = {.base = q->body, .len = q->head.body_len};

    if (q->head.op == WIRE_REGION_CREATE) {
        wire_get_region_create_req(&in, &a);
        if (f->uuids[a.device][0] != 0xa1) {
            fake_reply(c, q, KVS_E_RANGE, NULL, 0);
            return true;
        }
    }
    return bank_hook(f, c, q);
}

Test(client_gpu, a_pack_finds_its_device_again_by_its_uuid)
{
    static engine e;
    kvs_pack_args a;
    kvs_pack_move m;

    if (!begin(&e))
        return;
    fake_stop(&e.f);
    e.f.hook = devices_hook;
    e.f.n_uuids = 2;
    e.f.uuids[0][0] = 0xa1;
    e.f.uuids[1][0] = 0xb2;
    fake_start(&e.f);
    OK(kvs_wait_up(e.c, 1, 0, &err));
    a = args_of(&e);
    OK(kvs_pack_open(e.c, &a, &e.pack, 0, &err));
    fake_stop(&e.f);
    e.f.uuids[0][0] = 0xb2;
    e.f.uuids[1][0] = 0xa1;
    fake_start(&e.f);
    OK(kvs_wait_up(e.c, 2, 0, &err));
    m = move_of(&e, 1, 4);
    OK(run(&e, &m, false));
    fake_stop(&e.f);
    e.f.n_uuids = 1;
    fake_start(&e.f);
    OK(kvs_wait_up(e.c, 3, 0, &err));
    m = move_of(&e, 2, 4);
    FAILS(KVS_E_NOT_FOUND, run(&e, &m, false));
    end(&e);
}

/* Its counters are of another page: what it waits for nobody would ever raise. */
Test(client_gpu, a_pack_refuses_a_stream_of_another_handle)
{
    static engine e;
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_stream *foreign;
    kvs_client *other;
    kvs_pack_move m;

    if (!begin_pack(&e))
        return;
    o.path = e.f.path;
    OK(kvs_connect(&other, &o, &err));
    OK(kvs_stream_open(other, e.stream, 0, 2, &foreign, &err));
    m = move_of(&e, 1, 2);
    OK(run(&e, &m, false));
    m.stream = foreign;
    FAILS(KVS_E_INVALID, run(&e, &m, true));
    FAILS(KVS_E_INVALID, run(&e, &m, false));
    drain(&e);
    kvs_close(other);
    end(&e);
}

/* The mark behind the copy is on the page of a connection that is gone: no other one's counter ever reaches it. */
Test(client_gpu, a_chunk_is_sent_on_no_other_connection_than_its_mark_is_of)
{
    static engine e;
    atomic_int gate = 0;
    kvs_pack_move m;
    kvs_request *r;
    uint32_t before;

    if (!begin_pack(&e))
        return;
    m = move_of(&e, 1, 2);
    before = gpu.calls("cuStreamWriteValue64_v2");
    gpu.stall("cuStreamWriteValue64_v2", &gate);
    OK(kvs_pack_store(e.pack, &m, &r, 0, &err));
    while (gpu.calls("cuStreamWriteValue64_v2") == before)
        nap_ms(1);
    fake_stop(&e.f);
    fake_start(&e.f);
    OK(kvs_wait_up(e.c, 1, 0, &err));
    atomic_store(&e.f.ops[WIRE_STORE], 0);
    gate = 1;
    FAILS(KVS_E_AWAY, finish(r));
    cr_assert_eq(atomic_load(&e.f.ops[WIRE_STORE]), 0);
    m = move_of(&e, 2, 2);
    OK(run(&e, &m, false));
    end(&e);
}

/* Returns where it went wrong, or 0. */
static int try_all_in_child(engine *e, kvs_region *region)
{
    uint32_t pushed = gpu.calls("cuCtxPushCurrent_v2"), settled = gpu.calls("cuDevicePrimaryCtxGetState");
    kvs_slot slot = {0, 1};
    kvs_load_result loaded;
    kvs_status stored;
    kvs_load_args load = {
        .ns = e->ns, .region = region, .n = 1, .keys = e->keys[0], .slots = &slot, .results = &loaded};
    kvs_store_args store = {
        .ns = e->ns, .region = region, .n = 1, .keys = e->keys[0], .slots = &slot, .results = &stored};
    kvs_namespace desc = {.model = "m", .tokens_per_block = TOKENS, .n_planes = PLANES, .planes = e->planes};
    kvs_region_info info;
    kvs_pack_move m = move_of(e, 1, 1);
    kvs_request *r;
    kvs_ns *ns;
    kvs_server v;
    void *base;

    (void)alarm(10); /* whoever waits for a lock here waits for ever */
    kvs_server_get(e->c, &v);
    kvs_region_get(region, &info);
    if (v.up || kvs_generation(e->c) != 0 || info.n_slots != 8)
        return 1;
    if (kvs_device_find(e->c, v.boot_id, &v.version, NULL) != KVS_E_STATE)
        return 2;
    if (kvs_open(e->c, &desc, &ns, 0, NULL) != KVS_E_STATE || kvs_open_id(e->c, 1, &ns, NULL) != KVS_E_STATE)
        return 3;
    if (kvs_region_map(region, &base, NULL, NULL) != KVS_E_STATE)
        return 4;
    if (kvs_load(&load, 0, NULL) != KVS_E_STATE || kvs_store(&store, 0, NULL) != KVS_E_STATE ||
        kvs_slot_drop(region, &slot, 1, NULL, NULL, 0, NULL) != KVS_E_STATE)
        return 5;
    if (kvs_pack_store(e->pack, &m, &r, 0, NULL) != KVS_E_STATE || kvs_region_close(region, 0, NULL) != KVS_E_STATE)
        return 6;
    kvs_close(e->c);
    if (gpu.calls("cuCtxPushCurrent_v2") != pushed || gpu.calls("cuDevicePrimaryCtxGetState") != settled)
        return 7;
    return 0;
}

/* Another thread has the handle's lock at the moment of fork, and is not there afterwards. */
Test(client_gpu, a_child_of_fork_waits_for_nobody_and_calls_no_driver)
{
    static engine e;
    kvs_region *region;
    uint64_t bytes;
    void *base;
    int status;
    pid_t pid;

    if (!begin_pack(&e))
        return;
    OK(kvs_region_create(e.ns, 0, 8, &region, 0, &err));
    OK(kvs_region_map(region, &base, &bytes, &err));
    (void)pthread_mutex_lock(&e.c->mu);
    pid = fork();
    if (pid == 0)
        _exit(try_all_in_child(&e, region));
    (void)pthread_mutex_unlock(&e.c->mu);
    cr_assert_gt(pid, 0);
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_assert(WIFEXITED(status), "signal %d", WTERMSIG(status));
    cr_assert_eq(WEXITSTATUS(status), 0, "%d", WEXITSTATUS(status));
    end(&e);
}
