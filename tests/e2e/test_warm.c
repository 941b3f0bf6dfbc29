/* The real daemon, killed under load and started again on the memory that it left. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "proto/client/kvstride.h"
#include "proto/ctl/pattern.h"
#include "tests/support/daemon_fixture.h"
#include "tests/support/raw_client.h"

#define OK(call) check((call), KVS_OK, #call)

enum {
    TOKENS = 64,
    LAYERS = 4,
    BLOCK = TOKENS * LAYERS * 1152, /* 288 KiB: a kill often comes in the middle of a copy */
    SLOTS = 4,
    WRITERS = 2,
    KEEP = 40,       /* blocks that a writer has at most */
    HISTORY = 1024,  /* ids that a writer remembers */
    LIFE_ACKS = 150, /* at most, between two kills */
    DEADLINE_MS = 20000,
};

static kvs_err err;

static void check(kvs_status s, kvs_status want, const char *what)
{
    cr_assert_eq(s, want, "%s: %s (%s) where %s was due", what, kvs_status_name(s), s != KVS_OK ? err.msg : "",
                 kvs_status_name(want));
}

/* ---- a folder on a tmpfs ---- */

static char pool_dir[64];

static void make_pool_dir(void)
{
    (void)snprintf(pool_dir, sizeof pool_dir, "/dev/shm/kvs-warm-XXXXXX");
    cr_assert_not_null(mkdtemp(pool_dir));
}

static void file_in_pool(const char *name, char *ret, size_t cap)
{
    (void)snprintf(ret, cap, "%s/%s", pool_dir, name);
}

static void remove_pool_dir(void)
{
    char path[96];

    file_in_pool("kvs-arena", path, sizeof path);
    (void)unlink(path);
    file_in_pool("kvs-table", path, sizeof path);
    (void)unlink(path);
    (void)rmdir(pool_dir);
}

static void configure(const daemon_fixture *d, const char *max_bytes, bool dir, bool checksum)
{
    char text[512];

    (void)snprintf(text, sizeof text,
                   "{\"pool\": {\"max_bytes\": \"%s\", \"path\": \"%s\", \"checksum\": %s}, \"device\": {\"kind\": "
                   "\"cpu\"}, \"drain\": {\"timeout_ms\": 2000}}",
                   max_bytes, dir ? pool_dir : "", checksum ? "true" : "false");
    daemon_configure(d, text);
}

/* ---- a client with a few slots ---- */

typedef struct engine {
    kvs_client *c;
    kvs_ns *ns;
    kvs_region *region;
    kvs_slot slots[SLOTS];
    uint8_t *base;
    kvs_region_info info;
} engine;

static kvs_status engine_try(engine *e, const daemon_fixture *d, kvs_err *ret)
{
    kvs_plane planes[LAYERS];
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_namespace desc;
    uint64_t bytes;
    void *base;
    kvs_status s;

    o.path = d->socket;
    o.name = "warm";
    o.timeout_ms = 10000;
    memset(e, 0, sizeof *e);
    s = kvs_namespace_mla("m", "r", KVS_FORMAT_mla_bf16, LAYERS, TOKENS, planes, &desc, ret);
    if (s == KVS_OK)
        s = kvs_connect(&e->c, &o, ret);
    if (s == KVS_OK)
        s = kvs_open(e->c, &desc, &e->ns, 0, ret);
    if (s == KVS_OK)
        s = kvs_region_create(e->ns, 0, SLOTS, &e->region, 0, ret);
    if (s == KVS_OK)
        s = kvs_region_map(e->region, &base, &bytes, ret);
    if (s == KVS_OK)
        s = kvs_slot_take(e->region, SLOTS, e->slots, 0, ret);
    if (s != KVS_OK)
        return s;
    e->base = base;
    kvs_region_get(e->region, &e->info);
    return KVS_OK;
}

static void engine_open(engine *e, const daemon_fixture *d)
{
    OK(engine_try(e, d, &err));
}

static uint8_t *slot_at(const engine *e, uint32_t i)
{
    return e->base + e->slots[i].slot * e->info.slot_stride;
}

static kvs_status store_ids(engine *e, const uint64_t *ids, uint32_t n, kvs_status *results, kvs_err *ret)
{
    uint8_t keys[SLOTS][32];
    kvs_store_args a = {
        .ns = e->ns, .region = e->region, .n = n, .keys = keys[0], .slots = e->slots, .results = results};

    for (uint32_t i = 0; i < n; i++) {
        pattern_key(ids[i], keys[i]);
        pattern_fill(keys[i], slot_at(e, i), BLOCK);
    }
    return kvs_store(&a, 0, ret);
}

/* E_CORRUPT also if the daemon thinks that it is right and the bytes are not the key's. */
static kvs_status load_id(engine *e, uint64_t id, kvs_err *ret)
{
    uint8_t key[32];
    kvs_load_result result = {0};
    kvs_load_args a = {.ns = e->ns, .region = e->region, .n = 1, .keys = key, .slots = e->slots, .results = &result};
    kvs_status s;

    pattern_key(id, key);
    memset(slot_at(e, 0), 0, BLOCK);
    s = kvs_load(&a, 0, ret);
    if (s == KVS_E_PARTIAL)
        return result.status;
    return s == KVS_OK && pattern_verify(key, slot_at(e, 0), BLOCK) != BLOCK ? KVS_E_CORRUPT : s;
}

static uint64_t status_number(engine *e, const char *name)
{
    kvs_report_args summary = KVS_REPORT_SUMMARY;
    unsigned long long v = 0;
    char *text, wanted[64];
    const char *at;
    size_t len;

    OK(kvs_report_alloc(e->c, &summary, &text, &len, 0, &err));
    (void)snprintf(wanted, sizeof wanted, "\"%s\":", name);
    at = strstr(text, wanted);
    cr_assert_not_null(at, "%s is not in %s", name, text);
    cr_assert_eq(sscanf(at + strlen(wanted), "%llu", &v), 1);
    kvs_free(text);
    return v;
}

/* ---- writers that remember what they were told ---- */

enum fate { NOTHING, PRESENT, EITHER, GONE };

typedef struct writer {
    const daemon_fixture *d;
    pthread_t thread;
    uint64_t first, x;
    uint32_t n, n_present; /* ids first .. first + n - 1 have been used */
    enum fate fate[HISTORY];
    _Atomic uint32_t *acks;
    bool wrong;
} writer;

static uint64_t draw(writer *w, uint64_t n)
{
    w->x = w->x * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (w->x >> 33) % n;
}

static bool store_some(writer *w, engine *e)
{
    uint32_t n = 1 + (uint32_t)draw(w, SLOTS);
    kvs_status results[SLOTS], s;
    uint64_t ids[SLOTS];

    if (w->n + n > HISTORY)
        n = HISTORY - w->n;
    for (uint32_t i = 0; i < n; i++) {
        ids[i] = w->first + w->n + i;
        w->fate[w->n + i] = EITHER;
    }
    s = store_ids(e, ids, n, results, NULL);
    w->n += n;
    if (s != KVS_OK)
        return false;
    for (uint32_t i = 0; i < n; i++)
        w->fate[w->n - n + i] = PRESENT;
    w->n_present += n;
    return true;
}

static uint32_t pick_present(writer *w)
{
    uint32_t at = (uint32_t)draw(w, w->n);

    while (w->fate[at] != PRESENT)
        at = (at + 1) % w->n;
    return at;
}

static bool drop_one(writer *w, engine *e)
{
    uint32_t at = pick_present(w);
    uint8_t key[32];

    pattern_key(w->first + at, key);
    w->fate[at] = EITHER;
    w->n_present--;
    if (kvs_drop(e->ns, key, 1, NULL, 0, NULL) != KVS_OK)
        return false;
    w->fate[at] = GONE;
    return true;
}

static void *writer_main(void *arg)
{
    writer *w = arg;
    engine e;
    bool good = engine_try(&e, w->d, NULL) == KVS_OK;

    while (good && w->n < HISTORY) {
        uint64_t what = draw(w, 8);
        kvs_status s;

        if (w->n_present >= KEEP - SLOTS || (what == 0 && w->n_present > 0)) {
            good = drop_one(w, &e);
        } else if (what < 6 || w->n_present == 0) {
            good = store_some(w, &e);
        } else {
            s = load_id(&e, w->first + pick_present(w), NULL);
            w->wrong = w->wrong || s == KVS_E_CORRUPT || s == KVS_E_NOT_FOUND;
            good = s == KVS_OK;
        }
        (void)atomic_fetch_add(w->acks, good);
    }
    kvs_close(e.c);
    return NULL;
}

/* After a restart: each block as it must be; what was open is known now.  How many are there. */
static uint64_t verify_writer(writer *w, engine *e, unsigned life)
{
    uint64_t found = 0;

    w->n_present = 0;
    for (uint32_t i = 0; i < w->n; i++) {
        kvs_status s = w->fate[i] == NOTHING ? KVS_E_NOT_FOUND : load_id(e, w->first + i, &err);

        cr_assert(s == KVS_OK || s == KVS_E_NOT_FOUND, "life %u: block %u: %s", life, i, kvs_status_name(s));
        cr_assert(w->fate[i] != PRESENT || s == KVS_OK, "life %u: block %u was acknowledged and is gone", life, i);
        cr_assert(w->fate[i] != GONE || s != KVS_OK, "life %u: block %u was dropped and is back", life, i);
        w->fate[i] = s == KVS_OK ? PRESENT : GONE;
        w->n_present += s == KVS_OK;
        found += s == KVS_OK;
    }
    return found;
}

/* Ids that are settled need not be asked for again and again. */
static void writer_forget(writer *w, engine *e)
{
    for (uint32_t i = 0; i < w->n; i++) {
        uint8_t key[32];

        pattern_key(w->first + i, key);
        if (w->fate[i] == PRESENT)
            OK(kvs_drop(e->ns, key, 1, NULL, 0, &err));
    }
    w->first += HISTORY;
    w->n = w->n_present = 0;
    memset(w->fate, 0, sizeof w->fate);
}

static void run_life(daemon_fixture *d, writer *w, uint32_t target, int signum)
{
    _Atomic uint32_t acks = 0;
    uint64_t end = raw_now_ms() + DEADLINE_MS;

    for (int i = 0; i < WRITERS; i++) {
        w[i].acks = &acks;
        cr_assert_eq(pthread_create(&w[i].thread, NULL, writer_main, &w[i]), 0);
    }
    while (atomic_load(&acks) < target && raw_now_ms() < end)
        (void)sched_yield();
    cr_assert_geq(atomic_load(&acks), target, "no load");
    cr_assert_eq(daemon_stop(d, signum), signum == SIGKILL ? 128 + SIGKILL : 0);
    for (int i = 0; i < WRITERS; i++)
        cr_assert_eq(pthread_join(w[i].thread, NULL), 0);
    for (int i = 0; i < WRITERS; i++)
        cr_assert_not(w[i].wrong, "a block was wrong or missing before the kill");
}

/* KVS_WARM_KILLS: how many; 20 with files and 10 with descriptors unless told otherwise. */
static void kill_again_and_again(bool with_dir)
{
    const char *text = getenv("KVS_WARM_KILLS");
    unsigned kills = text != NULL ? (unsigned)atoi(text) : with_dir ? 20 : 10, terms = 0;
    static writer w[WRITERS];
    uint64_t adopted = 0, slowest = 0, x = 7;
    daemon_fixture d;
    int stored[] = {-1, -1};
    engine e;

    daemon_init(&d);
    d.stored_fd = stored;
    make_pool_dir();
    configure(&d, "40MiB", with_dir, true);
    for (int i = 0; i < WRITERS; i++)
        w[i] = (writer){.d = &d, .first = 1 + (uint64_t)i * 1000000, .x = 77 + (uint64_t)i};
    cr_assert(daemon_start(&d, NULL));
    for (unsigned life = 1; life <= kills; life++) {
        bool term = life % 10 == 0;
        uint64_t found = 0, start;

        x = x * UINT64_C(6364136223846793005) + 1;
        run_life(&d, w, 1 + (uint32_t)((x >> 33) % LIFE_ACKS), term ? SIGTERM : SIGKILL);
        terms += term;
        start = raw_now_ms();
        cr_assert(daemon_start(&d, NULL), "life %u", life);
        engine_open(&e, &d);
        for (int i = 0; i < WRITERS; i++)
            found += verify_writer(&w[i], &e, life);
        slowest = raw_now_ms() - start > slowest ? raw_now_ms() - start : slowest;
        cr_assert_eq(status_number(&e, "adopted"), found, "life %u: each adopted block was read", life);
        cr_assert_eq(status_number(&e, "unverified"), 0);
        adopted += found;
        for (int i = 0; i < WRITERS; i++)
            if (w[i].n > HISTORY / 2)
                writer_forget(&w[i], &e);
        kvs_close(e.c);
    }
    cr_assert_gt(adopted, kills); /* else nothing was proven */
    (void)fprintf(
        stderr, "warm: %u kills (%u of them SIGTERM) %s, %lu blocks adopted and verified, at most %lu ms each\n", kills,
        terms, with_dir ? "with pool.path" : "with stored descriptors", (unsigned long)adopted, (unsigned long)slowest);
    cr_assert_eq(daemon_stop(&d, SIGTERM), 0);
    cr_assert_eq(stored[0] >= 0 && stored[1] >= 0, !with_dir, "what lies in a file is not stored besides");
    daemon_fini(&d);
    for (int i = 0; i < 2; i++)
        if (stored[i] >= 0)
            (void)close(stored[i]);
    remove_pool_dir();
}

Test(warm, keeps_every_acknowledged_block_over_kills_under_load)
{
    kill_again_and_again(true);
}

Test(warm, keeps_every_acknowledged_block_in_descriptors_that_the_service_manager_stores)
{
    kill_again_and_again(false);
}

/* ---- one thing at a time ---- */

typedef struct bench {
    daemon_fixture d;
    engine e;
} bench;

static void begin(bench *b, const char *max_bytes, bool checksum)
{
    daemon_init(&b->d);
    make_pool_dir();
    configure(&b->d, max_bytes, true, checksum);
    cr_assert(daemon_start(&b->d, NULL));
    engine_open(&b->e, &b->d);
}

static void store_range(bench *b, uint64_t first, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        kvs_status result;
        uint64_t id = first + i;

        OK(store_ids(&b->e, &id, 1, &result, &err));
    }
}

/* A clean stop and another start. */
static void restart(bench *b)
{
    kvs_close(b->e.c);
    cr_assert_eq(daemon_stop(&b->d, SIGTERM), 0);
    cr_assert(daemon_start(&b->d, NULL));
    engine_open(&b->e, &b->d);
}

static void finish(bench *b)
{
    kvs_close(b->e.c);
    cr_assert_eq(daemon_stop(&b->d, SIGTERM), 0);
    daemon_fini(&b->d);
    remove_pool_dir();
}

static uint32_t readable(bench *b, uint64_t first, uint32_t n)
{
    uint32_t good = 0;

    for (uint32_t i = 0; i < n; i++) {
        kvs_status s = load_id(&b->e, first + i, &err);

        cr_assert(s == KVS_OK || s == KVS_E_NOT_FOUND, "block %u: %s", i, kvs_status_name(s));
        good += s == KVS_OK;
    }
    return good;
}

/* A wild pointer of the life before has written into a block. */
Test(warm, drops_an_adopted_block_whose_bytes_are_wrong)
{
    static bench b;
    char path[96];
    uint8_t key[32], word[8];
    uint64_t off = UINT64_MAX;
    int fd;

    begin(&b, "16MiB", true);
    store_range(&b, 1, 10);
    kvs_close(b.e.c);
    cr_assert_eq(daemon_stop(&b.d, SIGKILL), 128 + SIGKILL);
    file_in_pool("kvs-arena", path, sizeof path);
    fd = open(path, O_RDWR | O_CLOEXEC);
    pattern_key(4, key);
    pattern_fill(key, word, sizeof word);
    for (uint64_t at = 0; at < 16 << 20; at += 16) {
        uint8_t have[8];

        cr_assert_eq(pread(fd, have, sizeof have, (off_t)at), (ssize_t)sizeof have);
        if (memcmp(have, word, sizeof word) == 0)
            off = at;
    }
    cr_assert_neq(off, UINT64_MAX, "block 4 is in the file");
    cr_assert_eq(pwrite(fd, "x", 1, (off_t)(off + BLOCK - 3)), 1);
    (void)close(fd);
    cr_assert(daemon_start(&b.d, NULL));
    engine_open(&b.e, &b.d);
    cr_assert_eq(status_number(&b.e, "unverified"), 10);
    cr_assert_eq(load_id(&b.e, 4, &err), KVS_E_CORRUPT);
    cr_assert_eq(load_id(&b.e, 4, &err), KVS_E_NOT_FOUND);
    cr_assert_eq(readable(&b, 1, 10), 9);
    cr_assert_eq(status_number(&b.e, "unverified"), 0);
    store_range(&b, 4, 1);
    cr_assert_eq(readable(&b, 1, 10), 10);
    finish(&b);
}

Test(warm, brings_no_block_back_that_was_stored_without_a_checksum)
{
    static bench b;

    begin(&b, "16MiB", false);
    store_range(&b, 1, 3);
    restart(&b);
    cr_assert_eq(readable(&b, 1, 3), 0);
    cr_assert_eq(status_number(&b.e, "adopted_no_checksum"), 3);
    cr_assert_eq(daemon_log_count(&b.d, "without_checksum=3"), 1);
    finish(&b);
}

static uint64_t file_mib(const char *name)
{
    char path[96];
    struct stat st;

    file_in_pool(name, path, sizeof path);
    cr_assert_eq(stat(path, &st), 0);
    return (uint64_t)st.st_blocks >> 11;
}

Test(warm, keeps_blocks_in_a_larger_pool_and_starts_cold_in_a_smaller_one)
{
    static bench b;

    begin(&b, "24MiB", true);
    store_range(&b, 1, 5);
    configure(&b.d, "48MiB", true, true);
    restart(&b);
    cr_assert_eq(readable(&b, 1, 5), 5);
    cr_assert_eq(file_mib("kvs-arena"), 48);
    configure(&b.d, "8MiB", true, true);
    restart(&b);
    cr_assert_eq(readable(&b, 1, 5), 0);
    cr_assert_eq(daemon_log_count(&b.d, "table_refused"), 1);
    cr_assert_eq(file_mib("kvs-arena"), 8, "what it no longer needs was given back");
    store_range(&b, 1, 5);
    restart(&b);
    cr_assert_eq(readable(&b, 1, 5), 5);
    finish(&b);
}

Test(warm, refuses_to_run_beside_another_daemon_on_the_same_memory)
{
    static bench b;
    char out[2048], socket[128], admin[128];
    const char *args[] = {"--config", b.d.config, "--socket", socket, "--admin-socket", admin, NULL};

    begin(&b, "8MiB", true);
    store_range(&b, 1, 2);
    (void)snprintf(socket, sizeof socket, "%s/other.sock", b.d.dir);
    (void)snprintf(admin, sizeof admin, "%s/other-admin.sock", b.d.dir);
    cr_assert_eq(daemon_run(&b.d, args, out, sizeof out), 75, "%s", out);
    cr_assert_not_null(strstr(out, "/kvs-table: process "), "%s", out);
    cr_assert_not_null(strstr(out, " writes it; each daemon needs a folder of its own"), "%s", out);
    cr_assert_eq(readable(&b, 1, 2), 2);
    finish(&b);
}

Test(warm, says_what_is_wrong_with_a_folder_that_is_no_tmpfs)
{
    static bench b;
    char out[2048];
    const char *args[] = {"--config",       b.d.config, "--set", "pool.path=/proc", "--socket", b.d.socket,
                          "--admin-socket", b.d.admin,  NULL};

    daemon_init(&b.d);
    cr_assert_eq(daemon_run(&b.d, args, out, sizeof out), 78, "%s", out);
    cr_assert_not_null(strstr(out, "tmpfs"), "%s", out);
    daemon_fini(&b.d);
}

Test(warm, says_that_the_tmpfs_is_too_small_for_the_pool)
{
    static bench b;
    char out[2048], path[128];
    const char *args[] = {"--config", b.d.config, "--set",          path,      "--set", "pool.max_bytes=64MiB",
                          "--socket", b.d.socket, "--admin-socket", b.d.admin, NULL};

    daemon_init(&b.d);
    (void)snprintf(path, sizeof path, "pool.path=%s", b.d.dir);
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("kvs", b.d.dir, "tmpfs", 0, "size=8m,mode=0700") != 0) {
        daemon_fini(&b.d);
        cr_skip_test("needs root to mount a small tmpfs");
    }
    daemon_configure(&b.d, "{}");
    cr_assert_eq(daemon_run(&b.d, args, out, sizeof out), 71, "%s", out);
    cr_assert_not_null(strstr(out, "pool.path: 67108864 bytes do not fit its tmpfs of 8388608, of which 8"), "%s", out);
    cr_assert_null(strstr(out, "Bad address"), "%s", out);
    cr_assert_eq(umount(b.d.dir), 0);
    daemon_fini(&b.d);
}

static uint64_t bytes_left(const char *dir)
{
    struct statvfs v;

    cr_assert_eq(statvfs(dir, &v), 0);
    return (uint64_t)v.f_bavail * v.f_bsize;
}

static void write_size(const daemon_fixture *d, const char *size, int max_clients)
{
    char json[512];

    (void)snprintf(
        json, sizeof json,
        "{\"pool\": {\"path\": \"%s\", \"max_bytes\": \"%s\", \"extent_bytes\": \"1MiB\", \"reserve_bytes\": "
        "\"64MiB\"}, \"device\": {\"kind\": \"cpu\"}, \"limits\": {\"max_clients\": %d}}",
        pool_dir, size, max_clients);
    daemon_configure(d, json);
}

/* Starts it, if it does not run. */
static void set_size(daemon_fixture *d, const char *size)
{
    write_size(d, size, 64);
    if (d->pid != 0)
        cr_assert_eq(kill(d->pid, SIGHUP), 0);
    else
        daemon_spawn(d, NULL);
}

static bool has_grown(engine *e, uint64_t mib)
{
    for (int i = 0; i < 250 && status_number(e, "arena_bytes") != mib << 20; i++)
        (void)usleep(20000);
    return status_number(e, "arena_bytes") == mib << 20;
}

/* Symptom: what a failed piece had taken of the tmpfs was kept, so that it was full: no namespace could be opened, a size that
 * would have fitted did not, and nothing but a restart made the pool try again. */
Test(warm, a_pool_that_cannot_grow_takes_nothing_and_grows_once_it_can)
{
    static bench b;
    engine e;

    daemon_init(&b.d);
    (void)snprintf(pool_dir, sizeof pool_dir, "%.50s/pool", b.d.dir);
    cr_assert_eq(mkdir(pool_dir, 0700), 0);
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("kvs", pool_dir, "tmpfs", 0, "size=24m,mode=0700") != 0) {
        (void)rmdir(pool_dir);
        daemon_fini(&b.d);
        cr_skip_test("needs root to mount a small tmpfs");
    }
    set_size(&b.d, "4MiB");
    cr_assert(daemon_wait_notified(&b.d, "READY=1", 5000));
    engine_open(&e, &b.d);
    set_size(&b.d, "48MiB");
    cr_assert(daemon_wait_log(&b.d, "arena_piece_failed", 1, 5000));
    cr_assert_geq(bytes_left(pool_dir), UINT64_C(18) << 20);
    set_size(&b.d, "12MiB");
    cr_assert(has_grown(&e, 12));
    set_size(&b.d, "48MiB");
    cr_assert(daemon_wait_log(&b.d, "arena_piece_failed", 2, 5000));
    cr_assert_eq(mount("kvs", pool_dir, "tmpfs", MS_REMOUNT, "size=64m,mode=0700"), 0);
    cr_assert_eq(kill(b.d.pid, SIGHUP), 0);
    cr_assert(has_grown(&e, 48), "the operator has made room");
    kvs_close(e.c);
    cr_assert_eq(daemon_stop(&b.d, SIGTERM), 0);
    cr_assert_eq(umount(pool_dir), 0);
    cr_assert_eq(rmdir(pool_dir), 0);
    daemon_fini(&b.d);
}

static bool copy_has(const char *copy, const char *text)
{
    char all[16384] = "";
    FILE *f = fopen(copy, "re");

    if (f != NULL) {
        all[fread(all, 1, sizeof all - 1, f)] = '\0';
        (void)fclose(f);
    }
    return strstr(all, text) != NULL;
}

static bool comes_to_have(const char *copy, const char *text)
{
    for (int i = 0; i < 250 && !copy_has(copy, text); i++)
        (void)usleep(20000);
    return copy_has(copy, text);
}

/* Symptom: the copy had a size that no start came up with, so that none did after a kill. */
Test(warm, a_size_that_was_not_reached_is_not_what_a_start_falls_back_on)
{
    static bench b;
    static char copy[128];
    const char *more[] = {"--accepted", copy, NULL};
    engine e;

    daemon_init(&b.d);
    (void)snprintf(copy, sizeof copy, "%s/accepted.json", b.d.dir);
    (void)snprintf(pool_dir, sizeof pool_dir, "%.50s/pool", b.d.dir);
    cr_assert_eq(mkdir(pool_dir, 0700), 0);
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("kvs", pool_dir, "tmpfs", 0, "size=24m,mode=0700") != 0) {
        (void)rmdir(pool_dir);
        daemon_fini(&b.d);
        cr_skip_test("needs root to mount a small tmpfs");
    }
    write_size(&b.d, "4MiB", 9);
    daemon_spawn(&b.d, more);
    cr_assert(daemon_wait_notified(&b.d, "READY=1", 5000));
    cr_assert(comes_to_have(copy, "\"max_bytes\": \"4MiB\""));
    write_size(&b.d, "48MiB", 10);
    for (unsigned i = 1; i <= 2; i++) {
        (void)kill(b.d.pid, SIGHUP);
        cr_assert(daemon_wait_notified(&b.d, "could not grow", 5000));
        cr_assert_eq(daemon_stop(&b.d, SIGKILL), 128 + SIGKILL);
        cr_assert(copy_has(copy, "\"max_bytes\": \"4MiB\"") && copy_has(copy, "\"max_clients\": 9"));
        daemon_spawn(&b.d, more);
        if (i == 1) { /* from then on it is known not to come up */
            cr_assert_eq(daemon_wait(&b.d, 10000), 71);
            cr_assert_eq(daemon_log_count(&b.d, "config_put_aside"), 1);
            daemon_spawn(&b.d, more);
        }
        cr_assert(daemon_wait_notified(&b.d, "READY=1", 5000));
        cr_assert_eq(daemon_log_count(&b.d, " old_config "), i);
    }
    engine_open(&e, &b.d);
    write_size(&b.d, "12MiB", 11); /* one that fits comes in when it is there */
    (void)kill(b.d.pid, SIGHUP);
    cr_assert(has_grown(&e, 12));
    cr_assert(comes_to_have(copy, "\"max_bytes\": \"12MiB\"") && copy_has(copy, "\"max_clients\": 11"));
    write_size(&b.d, "12MiB", 12); /* so does what has nothing to do with the size */
    (void)kill(b.d.pid, SIGHUP);
    cr_assert(comes_to_have(copy, "\"max_clients\": 12"));
    write_size(&b.d, "48MiB", 12);
    (void)kill(b.d.pid, SIGHUP);
    cr_assert(daemon_wait_notified(&b.d, "could not grow", 5000));
    cr_assert(copy_has(copy, "\"max_bytes\": \"12MiB\""));
    write_size(&b.d, "6MiB", 13); /* and a smaller size at once */
    (void)kill(b.d.pid, SIGHUP);
    cr_assert(comes_to_have(copy, "\"max_bytes\": \"6MiB\"") && copy_has(copy, "\"max_clients\": 13"));
    kvs_close(e.c);
    cr_assert_eq(daemon_stop(&b.d, SIGTERM), 0);
    cr_assert_eq(umount(pool_dir), 0);
    cr_assert_eq(rmdir(pool_dir), 0);
    daemon_fini(&b.d);
}

/* ---- a large pool: KVS_WARM_GIB=16 asks for it, for it takes that much memory ---- */

enum { LARGE_HITS = 256, LARGE_LIMIT_MS = 2000, LARGE_SPARE_GIB = 3 };

static uint64_t available_gib(void)
{
    FILE *f = fopen("/proc/meminfo", "re");
    char line[128];
    unsigned long long kib = 0;

    cr_assert_not_null(f);
    while (kib == 0 && fgets(line, sizeof line, f) != NULL)
        (void)sscanf(line, "MemAvailable: %llu kB", &kib);
    (void)fclose(f);
    return kib >> 20;
}

static void wait_grown(engine *e, uint64_t bytes)
{
    while (status_number(e, "arena_bytes") < bytes)
        (void)usleep(20000);
}

/* From the start of the process on: a first hit, then many of them anywhere, each with all its bytes. */
static void serve_hits(daemon_fixture *d, engine *e, uint32_t n_blocks, const char *after)
{
    uint64_t begin = raw_now_ms(), ready, first, end, x = 11;

    cr_assert(daemon_start(d, NULL));
    ready = raw_now_ms() - begin;
    engine_open(e, d);
    OK(load_id(e, n_blocks, &err));
    first = raw_now_ms() - begin;
    for (uint32_t i = 0; i < LARGE_HITS; i++) {
        x = x * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        OK(load_id(e, 1 + (x >> 33) % n_blocks, &err));
    }
    end = raw_now_ms() - begin;
    (void)fprintf(stderr,
                  "warm: after %s: READY %lu ms, first hit %lu ms, %d hits verified %lu ms, %lu blocks adopted, %lu of "
                  "%lu MiB pinned by then\n",
                  after, (unsigned long)ready, (unsigned long)first, LARGE_HITS, (unsigned long)end,
                  (unsigned long)status_number(e, "adopted"), (unsigned long)(status_number(e, "arena_bytes") >> 20),
                  (unsigned long)(status_number(e, "max_bytes") >> 20));
    cr_assert_geq(status_number(e, "adopted"), n_blocks);
    cr_assert_leq(ready, 1000);
    cr_assert_leq(end, LARGE_LIMIT_MS);
}

Test(warm, serves_hits_of_a_large_pool_within_two_seconds_of_its_start, .timeout = 600)
{
    const char *text = getenv("KVS_WARM_GIB");
    uint64_t gib = text != NULL ? strtoull(text, NULL, 10) : 0;
    uint32_t n_blocks = (uint32_t)((gib << 30) / BLOCK / 100 * 98); /* extents have a rest each */
    int stored[] = {-1, -1};
    char size[32];
    static bench b;

    if (gib == 0)
        cr_skip_test("KVS_WARM_GIB=16 runs it, with as much memory and 3 GiB to spare");
    cr_assert_geq(available_gib(), gib + LARGE_SPARE_GIB, "not enough memory is free");
    daemon_init(&b.d);
    b.d.stored_fd = stored;
    (void)snprintf(size, sizeof size, "%luGiB", (unsigned long)gib);
    configure(&b.d, size, false, true);
    cr_assert(daemon_start(&b.d, NULL));
    engine_open(&b.e, &b.d);
    wait_grown(&b.e, gib << 30);
    for (uint32_t i = 0; i < n_blocks; i += SLOTS) {
        kvs_status results[SLOTS];
        uint64_t ids[SLOTS];

        for (uint32_t k = 0; k < SLOTS; k++)
            ids[k] = 1 + i + k;
        OK(store_ids(&b.e, ids, SLOTS, results, &err));
    }
    n_blocks = n_blocks / SLOTS * SLOTS;
    kvs_close(b.e.c);
    cr_assert_eq(daemon_stop(&b.d, SIGKILL), 128 + SIGKILL);
    serve_hits(&b.d, &b.e, n_blocks, "SIGKILL");
    kvs_close(b.e.c);
    cr_assert_eq(daemon_stop(&b.d, SIGTERM), 0);
    serve_hits(&b.d, &b.e, n_blocks, "SIGTERM");
    kvs_close(b.e.c);
    cr_assert_eq(daemon_stop(&b.d, SIGTERM), 0);
    daemon_fini(&b.d);
    for (int i = 0; i < 2; i++)
        (void)close(stored[i]);
}
