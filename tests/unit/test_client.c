/* libkvstride against a fake daemon that answers well, badly, late or never. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "proto/client/kvstride.h"
#include "tests/support/fake_daemon.h"

#define OK(call)            check_ok((call), &err, #call)
#define FAILS(status, call) check_fails((call), (status), &err, #call)

static kvs_err err;

static void check_ok(kvs_status s, const kvs_err *e, const char *what)
{
    cr_assert_eq(s, KVS_OK, "%s: %s: %s", what, kvs_status_name(s), e->msg);
}

static void check_fails(kvs_status s, kvs_status want, const kvs_err *e, const char *what)
{
    cr_assert_eq(s, want, "%s: %s (%s) where %s was due", what, kvs_status_name(s), s != KVS_OK ? e->msg : "",
                 kvs_status_name(want));
}

static int64_t now_ms(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static kvs_options options(const fake *f)
{
    kvs_options o = KVS_OPTIONS_INIT;

    o.path = f->path;
    o.timeout_ms = 10000;
    o.backoff_min_ms = 5;
    o.backoff_max_ms = 40;
    return o;
}

static kvs_client *client_of(fake *f)
{
    kvs_options o = options(f);
    kvs_client *c = NULL;

    OK(kvs_connect(&c, &o, &err));
    return c;
}

static kvs_client *start(fake *f, fake_hook *hook)
{
    fake_init(f);
    f->hook = hook;
    fake_start(f);
    return client_of(f);
}

static void finish(fake *f, kvs_client *c)
{
    kvs_close(c);
    fake_stop(f);
    fake_fini(f);
}

static kvs_ns *ns_of(kvs_client *c, const char *model)
{
    static kvs_plane planes[1];
    kvs_namespace desc;
    kvs_ns *ns = NULL;

    OK(kvs_namespace_mla(model, "r1", KVS_FORMAT_mla_bf16, 1, 1, planes, &desc, &err));
    OK(kvs_open(c, &desc, &ns, 0, &err));
    return ns;
}

static unsigned open_fds(void)
{
    DIR *d = opendir("/proc/self/fd");
    unsigned n = 0;

    while (readdir(d) != NULL)
        n++;
    (void)closedir(d);
    return n;
}

static void keys_fill(uint8_t *keys, uint32_t n, uint8_t first)
{
    memset(keys, 0, (size_t)n * 32);
    for (uint32_t i = 0; i < n; i++)
        keys[(size_t)i * 32] = first;
}

/* Wait for something that another thread brings about. */
static void await_count(atomic_uint *p, unsigned n)
{
    int64_t end = now_ms() + 10000;

    while (atomic_load(p) < n) {
        struct timespec t = {0, 1000000};

        cr_assert_lt(now_ms(), end, "waited in vain for %u, there are %u", n, atomic_load(p));
        (void)nanosleep(&t, NULL);
    }
}

/* ---- connecting ---- */

Test(client, pings_and_leaves_no_descriptor_behind)
{
    unsigned before = open_fds();
    fake f;
    kvs_client *c = start(&f, NULL);
    kvs_server v;

    for (int i = 0; i < 100; i++)
        OK(kvs_ping(c, 0, &err));
    kvs_server_get(c, &v);
    cr_assert(v.up);
    cr_assert_eq(v.generation, 1);
    cr_assert_eq(v.boot_id[0], 1);
    cr_assert_eq(v.credit_requests, 64);
    finish(&f, c);
    cr_assert_eq(open_fds(), before);
}

Test(client, refuses_a_path_of_108_bytes_and_names_the_limit)
{
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_client *c = NULL;
    char path[4097];
    const size_t lengths[] = {108, 109, 1000, 4096};

    for (unsigned i = 0; i < 4; i++) {
        memset(path, 'x', lengths[i]);
        path[lengths[i]] = '\0';
        o.path = path;
        FAILS(KVS_E_LIMIT, kvs_connect(&c, &o, &err));
        cr_assert(strstr(err.msg, "107") != NULL, "%s", err.msg);
    }
    path[107] = '\0'; /* one that fits: only nobody is there */
    FAILS(KVS_E_AWAY, kvs_connect(&c, &o, &err));
    cr_assert_null(c);
}

Test(client, connects_by_a_path_of_107_bytes)
{
    fake f;
    size_t n;
    char folder[200], file[108];
    kvs_client *c;

    fake_init(&f);
    n = strlen(f.path);
    (void)snprintf(folder, sizeof folder, "%s", f.path);
    memset(f.path + n, 'y', 107 - n);
    f.path[107] = '\0';
    (void)snprintf(file, sizeof file, "%s", f.path);
    fake_start(&f);
    c = client_of(&f);
    OK(kvs_ping(c, 0, &err));
    finish(&f, c);
}

Test(client, takes_its_path_from_the_environment)
{
    kvs_client *c = NULL;
    fake f;

    fake_init(&f);
    fake_start(&f);
    (void)setenv("KVSTRIDE_SOCKET", f.path, 1);
    OK(kvs_connect(&c, NULL, &err));
    OK(kvs_ping(c, 0, &err));
    finish(&f, c);
}

Test(client, refuses_options_of_a_future_it_does_not_know)
{
    struct {
        kvs_options o;
        uint64_t more;
    } big = {KVS_OPTIONS_INIT, 1};
    kvs_client *c = NULL;

    big.o.size = sizeof big;
    FAILS(KVS_E_UNSUPPORTED, kvs_connect(&c, &big.o, &err));
    big.more = 0;
    big.o.path = "/nonexistent/kvs";
    FAILS(KVS_E_AWAY, kvs_connect(&c, &big.o, &err));
    big.o.size = 0;
    FAILS(KVS_E_INVALID, kvs_connect(&c, &big.o, &err));
    big.o.size = sizeof big.o;
    big.o.reserved = 7;
    FAILS(KVS_E_INVALID, kvs_connect(&c, &big.o, &err));
    cr_assert_str_eq(err.msg, "options.reserved: 7 is not 0");
    big.o.reserved = 0;
    big.o.flags = 6;
    FAILS(KVS_E_INVALID, kvs_connect(&c, &big.o, &err));
    cr_assert_str_eq(err.msg, "options.flags: 0x6 has bits that mean nothing");
}

Test(client, calls_a_full_backlog_busy_in_time)
{
    kvs_options o = KVS_OPTIONS_INIT;
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0), others[64], n = 0;
    char folder[] = "/tmp/kvs-full-XXXXXX";
    int64_t begin;
    kvs_client *c = NULL;

    cr_assert_not_null(mkdtemp(folder));
    (void)snprintf(a.sun_path, sizeof a.sun_path, "%s/s", folder);
    cr_assert_eq(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    cr_assert_eq(listen(fd, 1), 0);
    for (; n < 64; n++) {
        others[n] = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
        if (connect(others[n], (struct sockaddr *)&a, sizeof a) != 0)
            break;
    }
    cr_assert_lt(n, 64);
    o.path = a.sun_path;
    o.connect_timeout_ms = 100;
    begin = now_ms();
    FAILS(KVS_E_BUSY, kvs_connect(&c, &o, &err));
    cr_assert_geq(now_ms() - begin, 100);
    cr_assert_lt(now_ms() - begin, 2000);
    cr_assert(strstr(err.msg, "backlog") != NULL, "%s", err.msg);
    for (int i = 0; i <= n; i++)
        (void)close(others[i]);
    (void)close(fd);
    (void)unlink(a.sun_path);
    (void)rmdir(folder);
}

static bool say_nothing(fake *f, fake_conn *c, frame *q)
{
    (void)f, (void)c, (void)q;
    return true;
}

Test(client, calls_a_daemon_busy_that_does_not_answer_hello)
{
    kvs_client *c = NULL;
    kvs_options o;
    fake f;

    fake_init(&f);
    f.hook = say_nothing;
    fake_start(&f);
    o = options(&f);
    o.connect_timeout_ms = 50;
    FAILS(KVS_E_BUSY, kvs_connect(&c, &o, &err));
    finish(&f, NULL);
}

static bool refuse_hello(fake *f, fake_conn *c, frame *q)
{
    (void)f;
    fake_reply(c, q, KVS_E_VERSION, NULL, 0);
    return true;
}

Test(client, hands_on_the_reason_of_a_refused_hello)
{
    kvs_client *c = NULL;
    kvs_options o;
    fake f;

    fake_init(&f);
    f.hook = refuse_hello;
    fake_start(&f);
    o = options(&f);
    FAILS(KVS_E_VERSION, kvs_connect(&c, &o, &err));
    cr_assert_neq(err.msg[0], '\0');
    finish(&f, NULL);
}

static bool bad_page(fake *f, fake_conn *c, frame *q)
{
    uint8_t body[WIRE_hello_rep_BYTES];
    wire_out o = {.base = body, .cap = sizeof body};
    wire_hello_rep v = {.version = 1,
                        .n_counters = 256,
                        .max_body = 65536,
                        .max_keys = 100,
                        .credit_requests = 1,
                        .control_requests = 1,
                        .credit_bytes = 1};
    unsigned variant = *(unsigned *)f->ud;
    int fd = variant == 2 ? dup(0) : fake_memfd(variant == 1 ? 4096 : 8192, variant != 0);

    if (variant == 4)
        v.n_counters = 257;
    if (variant == 5)
        v.credit_requests = 0;
    wire_put_hello_rep(&o, &v);
    fake_reply_fds(c, q, body, o.len, &fd, variant == 3 ? 0 : 1);
    (void)close(fd);
    return true;
}

Test(client, believes_no_hello_that_would_hurt_later)
{
    unsigned before = open_fds();

    for (unsigned variant = 0; variant < 6;
         variant++) { /* unsealed, short, no memfd, none, too many counters, no credit */
        kvs_client *c = NULL;
        kvs_options o;
        fake f;

        fake_init(&f);
        f.hook = bad_page;
        f.ud = &variant;
        fake_start(&f);
        o = options(&f);
        cr_assert_eq(kvs_connect(&c, &o, &err), KVS_E_PROTO, "variant %u: %s", variant, err.msg);
        finish(&f, NULL);
    }
    cr_assert_eq(open_fds(), before);
}

Test(client, says_clearly_that_it_has_no_descriptors_left)
{
    struct rlimit old, tight;
    kvs_client *c = NULL;
    kvs_options o;
    fake f;
    int fd;

    fake_init(&f);
    fake_start(&f);
    o = options(&f);
    fd = dup(0);
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &old), 0);
    tight = (struct rlimit){(rlim_t)fd, old.rlim_max};
    (void)close(fd);
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &tight), 0);
    FAILS(KVS_E_SYS, kvs_connect(&c, &o, &err));
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &old), 0);
    cr_assert(strstr(err.msg, "open files") != NULL, "%s", err.msg);
    c = client_of(&f);
    OK(kvs_ping(c, 0, &err));
    finish(&f, c);
}

Test(client, starts_without_a_daemon_when_told_so_and_finds_it_later)
{
    uint32_t hits = 9;
    kvs_counters page;
    kvs_client *c;
    kvs_options o;
    fake f;

    fake_init(&f);
    o = options(&f);
    o.flags = KVS_CONNECT_LAZY;
    OK(kvs_connect(&c, &o, &err));
    FAILS(KVS_E_AWAY, kvs_ping(c, 0, &err));
    FAILS(KVS_E_AWAY, kvs_counter_page(c, &page, &err));
    FAILS(KVS_E_DEADLINE, kvs_wait_up(c, 0, 20, &err));
    cr_assert_eq(hits, 9);
    fake_start(&f);
    OK(kvs_wait_up(c, 0, 0, &err));
    OK(kvs_ping(c, 0, &err));
    cr_assert_eq(kvs_generation(c), 1);
    finish(&f, c);
}

/* ---- time ---- */

static bool only_hello(fake *f, fake_conn *c, frame *q)
{
    (void)f, (void)c;
    return q->head.op != WIRE_HELLO;
}

Test(client, never_waits_past_its_deadline)
{
    fake f;
    kvs_client *c = start(&f, only_hello);
    int64_t begin = now_ms();

    FAILS(KVS_E_DEADLINE, kvs_ping(c, 60, &err));
    cr_assert_geq(now_ms() - begin, 60);
    cr_assert_lt(now_ms() - begin, 3000);
    FAILS(KVS_E_DEADLINE, kvs_settle(c, 20, &err));
    finish(&f, c);
}

static bool echo_deadline(fake *f, fake_conn *c, frame *q)
{
    (void)c;
    if (q->head.op == WIRE_PING)
        *(uint64_t *)f->ud = q->head.deadline_us;
    return false;
}

Test(client, gives_the_daemon_a_little_less_time_than_it_has)
{
    uint64_t seen = 0;
    kvs_client *c;
    fake f;

    fake_init(&f);
    f.hook = echo_deadline;
    f.ud = &seen;
    fake_start(&f);
    c = client_of(&f);
    OK(kvs_ping(c, 1000, &err));
    cr_assert(seen > 500000 && seen < 1000000, "%llu", (unsigned long long)seen);
    finish(&f, c);
}

static bool one_byte_at_a_time(fake *f, fake_conn *c, frame *q)
{
    uint8_t bytes[WIRE_HEADER_BYTES + 16] = {0};
    wire_header h = {.op = WIRE_PING, .id = q->head.id, .body_len = 16};

    (void)f;
    if (q->head.op != WIRE_PING)
        return false;
    wire_header_encode(&h, bytes);
    memcpy(bytes + WIRE_HEADER_BYTES + 8, q->body, 8);
    for (size_t i = 0; i < sizeof bytes; i++)
        fake_bytes(c, bytes + i, 1);
    return true;
}

Test(client, puts_a_reply_together_from_single_bytes)
{
    fake f;
    kvs_client *c = start(&f, one_byte_at_a_time);

    for (int i = 0; i < 20; i++)
        OK(kvs_ping(c, 0, &err));
    finish(&f, c);
}

static bool half_a_reply(fake *f, fake_conn *c, frame *q)
{
    uint8_t bytes[WIRE_HEADER_BYTES];
    wire_header h = {.op = WIRE_PING, .id = q->head.id, .body_len = 16};

    (void)f;
    if (q->head.op != WIRE_PING)
        return false;
    wire_header_encode(&h, bytes);
    fake_bytes(c, bytes, sizeof bytes);
    return true;
}

Test(client, gives_up_on_half_a_reply_in_time)
{
    fake f;
    kvs_client *c = start(&f, half_a_reply);

    FAILS(KVS_E_DEADLINE, kvs_ping(c, 50, &err));
    finish(&f, c);
}

Test(client, finishes_a_frame_whose_sender_ran_out_of_time)
{
    enum { N = 30000 };
    uint8_t *keys = malloc((size_t)N * 32);
    uint32_t hits = 1;
    kvs_ns *ns;
    fake f;
    kvs_client *c = start(&f, NULL);

    keys_fill(keys, N, 1);
    ns = ns_of(c, "m");
    atomic_store(&f.deaf, true);
    FAILS(KVS_E_DEADLINE, kvs_lookup(ns, keys, N, &hits, NULL, 50, &err)); /* more than a socket holds */
    FAILS(KVS_E_DEADLINE, kvs_lookup(ns, keys, N, &hits, NULL, 50, &err));
    cr_assert_eq(hits, 0);
    atomic_store(&f.deaf, false);
    OK(kvs_lookup(ns, keys, N, &hits, NULL, 0, &err));
    cr_assert_eq(hits, N);
    cr_assert_eq(kvs_generation(c), 1);
    finish(&f, c);
    free(keys);
}

static void *look_up_late(void *ud)
{
    uint8_t key[32] = {1};
    uint32_t hits = 1;

    (void)kvs_lookup(ud, key, 1, &hits, NULL, 8000, NULL); /* behind the rest of a frame */
    cr_assert_eq(hits, 0);
    return NULL;
}

/* Symptom: it spun until its deadline, and the connection could not be made anew before. */
Test(client, does_not_wait_behind_half_a_frame_for_a_daemon_that_is_gone)
{
    enum { N = 30000 };
    uint8_t *keys = malloc((size_t)N * 32);
    uint32_t hits;
    pthread_t late;
    kvs_ns *ns;
    fake f;
    kvs_client *c = start(&f, NULL);
    int64_t begin;

    keys_fill(keys, N, 1);
    ns = ns_of(c, "m");
    atomic_store(&f.deaf, true);
    FAILS(KVS_E_DEADLINE, kvs_lookup(ns, keys, N, &hits, NULL, 50, &err));
    cr_assert_eq(pthread_create(&late, NULL, look_up_late, ns), 0);
    (void)nanosleep(&(struct timespec){.tv_sec = 1, .tv_nsec = 300000000},
                    NULL); /* the library's own CANCEL gives up before */
    begin = now_ms();
    fake_stop(&f);
    atomic_store(&f.deaf, false);
    fake_start(&f);
    OK(kvs_wait_up(c, 1, 0, &err));
    (void)pthread_join(late, NULL);
    cr_assert_lt(now_ms() - begin, 4000);
    finish(&f, c);
    free(keys);
}

/* ---- pipelined ---- */

typedef struct held {
    frame q[16];
    uint8_t body[16][64];
    unsigned n, until;
} held;

static bool backwards(fake *f, fake_conn *c, frame *q)
{
    held *h = f->ud;

    if (q->head.op != WIRE_PING)
        return false;
    memcpy(h->body[h->n], q->body, q->head.body_len);
    h->q[h->n] = *q;
    h->q[h->n].body = h->body[h->n];
    if (++h->n < h->until)
        return true;
    while (h->n > 0) {
        h->n--;
        (void)fake_serve(f, c, &h->q[h->n]);
    }
    return true;
}

Test(client, matches_replies_that_come_in_another_order)
{
    kvs_request *r[8], *done[8] = {0};
    held h = {.until = 8};
    uint32_t n = 0;
    kvs_client *c;
    fake f;

    fake_init(&f);
    f.hook = backwards;
    f.ud = &h;
    fake_start(&f);
    c = client_of(&f);
    for (unsigned i = 0; i < 8; i++) {
        OK(kvs_submit_ping(c, &r[i], 0, &err));
        kvs_request_set_tag(r[i], i);
    }
    OK(kvs_wait(r[3], 0, &err));
    while (n < 8) {
        uint32_t k = kvs_poll(c, done + n, 8 - n, 5000);

        cr_assert_gt(k, 0);
        n += k;
    }
    for (unsigned i = 0; i < 8; i++) {
        cr_assert_eq(kvs_request_tag(done[i]), 7 - i);
        cr_assert(kvs_done(done[i]));
        OK(kvs_request_end(done[i], &err));
    }
    cr_assert_eq(kvs_poll(c, done, 8, 0), 0);
    finish(&f, c);
}

Test(client, blocks_for_credit_within_the_deadline)
{
    kvs_request *r[3];
    held h = {.until = 2};
    kvs_client *c;
    fake f;

    fake_init(&f);
    f.hook = backwards;
    f.ud = &h;
    f.control_requests = 2;
    fake_start(&f);
    c = client_of(&f);
    h.until = 3; /* holds both */
    OK(kvs_submit_ping(c, &r[0], 0, &err));
    OK(kvs_submit_ping(c, &r[1], 0, &err));
    FAILS(KVS_E_BUSY, kvs_submit_ping(c, &r[2], 40, &err));
    cr_assert_eq(atomic_load(&f.ops[WIRE_PING]), 2);
    FAILS(KVS_E_BUSY, kvs_request_end(r[0], NULL));
    finish(&f, c);
}

Test(client, sends_more_than_the_credit_by_waiting_for_replies)
{
    kvs_request *r[200];
    uint8_t keys[4 * 32];
    uint32_t hits[200];
    kvs_client *c;
    kvs_ns *ns;
    fake f;

    fake_init(&f);
    f.credit_requests = 3;
    fake_start(&f);
    c = client_of(&f);
    ns = ns_of(c, "m");
    keys_fill(keys, 4, 1);
    for (unsigned i = 0; i < 200; i++)
        OK(kvs_submit_lookup(ns, keys, 4, &hits[i], NULL, &r[i], 0, &err));
    for (unsigned i = 0; i < 200; i++) {
        OK(kvs_wait(r[i], 0, &err));
        OK(kvs_request_end(r[i], &err));
        cr_assert_eq(hits[i], 4);
    }
    finish(&f, c);
}

Test(client, refuses_blocks_that_no_credit_could_ever_carry)
{
    uint8_t keys[4 * 32];
    kvs_status results[4];
    kvs_slot slots[4] = {{0, 1}, {1, 1}, {2, 1}, {3, 1}};
    kvs_store_args a = {.n = 4, .keys = keys, .slots = slots, .results = results};
    kvs_region *region;
    kvs_client *c;
    fake f;

    fake_init(&f);
    f.credit_bytes = 3 * 1152;
    fake_start(&f);
    c = client_of(&f);
    a.ns = ns_of(c, "m");
    keys_fill(keys, 4, 1);
    OK(kvs_region_create(a.ns, 0, 8, &region, 0, &err));
    a.region = region;
    FAILS(KVS_E_LIMIT, kvs_store(&a, 0, &err));
    cr_assert_eq(results[3], KVS_E_LIMIT);
    a.n = 3;
    OK(kvs_store(&a, 0, &err));
    finish(&f, c);
}

Test(client, refuses_a_body_above_the_daemons_limit)
{
    uint8_t *keys = calloc(40000, 32);
    uint32_t hits;
    fake f;
    kvs_client *c = start(&f, NULL);

    FAILS(KVS_E_LIMIT, kvs_lookup(ns_of(c, "m"), keys, 40000, &hits, NULL, 0, &err));
    cr_assert(strstr(err.msg, "limit of 1048576; send fewer items at a time") != NULL, "%s", err.msg);
    finish(&f, c);
    free(keys);
}

/* ---- threads ---- */

typedef struct user {
    kvs_client *c;
    kvs_ns *ns;
    unsigned rounds, bad;
} user;

static void *use(void *ud)
{
    user *u = ud;
    uint8_t keys[8 * 32];

    keys_fill(keys, 8, 1);
    for (unsigned i = 0; i < u->rounds; i++) {
        uint32_t hits = 99, want = i % 9;

        if (want < 8)
            keys[want * 32] = 2;
        if (kvs_lookup(u->ns, keys, 8, &hits, NULL, 0, NULL) != KVS_OK || hits != want)
            u->bad++;
        if (want < 8)
            keys[want * 32] = 1;
        if (kvs_ping(u->c, 0, NULL) != KVS_OK)
            u->bad++;
    }
    return NULL;
}

Test(client, serves_many_threads_on_one_handle)
{
    enum { N = 8 };
    pthread_t t[N];
    user u[N];
    fake f;
    kvs_client *c;
    kvs_ns *ns;

    fake_init(&f);
    f.credit_requests = 3; /* and they contend for it */
    fake_start(&f);
    c = client_of(&f);
    ns = ns_of(c, "m");
    for (unsigned i = 0; i < N; i++) {
        u[i] = (user){c, ns, 200, 0};
        cr_assert_eq(pthread_create(&t[i], NULL, use, &u[i]), 0);
    }
    for (unsigned i = 0; i < N; i++) {
        (void)pthread_join(t[i], NULL);
        cr_assert_eq(u[i].bad, 0);
    }
    finish(&f, c);
}

/* ---- the daemon goes and comes ---- */

Test(client, goes_to_miss_only_mode_and_no_wait_hangs)
{
    uint8_t keys[2 * 32], states[2] = {7, 7};
    uint32_t hits = 7;
    kvs_request *r;
    kvs_counters page;
    kvs_ns *ns;
    int64_t begin;
    fake f;
    kvs_client *c = start(&f, NULL);

    keys_fill(keys, 2, 1);
    ns = ns_of(c, "m");
    OK(kvs_counter_page(c, &page, &err));
    f.hook = say_nothing;
    OK(kvs_submit_ping(c, &r, 0, &err));
    fake_stop(&f);
    OK(kvs_wait(r, 0, &err));
    FAILS(KVS_E_AWAY, kvs_request_end(r, &err));
    begin = now_ms();
    OK(kvs_lookup(ns, keys, 2, &hits, states, 0, &err));
    cr_assert_eq(hits, 0);
    cr_assert_eq(states[1], KVS_KEY_ABSENT);
    FAILS(KVS_E_AWAY, kvs_ping(c, 0, &err));
    cr_assert_lt(now_ms() - begin, 1000);
    for (uint32_t i = 0; i < page.n; i++) {
        cr_assert_eq(page.daemon[i].value, (uint64_t)KVS_COUNTER_ABORT);
        cr_assert_eq(page.daemon[i].error, KVS_E_AWAY);
    }
    FAILS(KVS_E_AWAY, kvs_counter_wait(c, page.generation, (kvs_mark){3, 0, 1000}, 0, &err));
    kvs_close(c);
    fake_fini(&f);
}

static bool hang_up_on_ping(fake *f, fake_conn *c, frame *q)
{
    (void)f;
    if (q->head.op != WIRE_PING)
        return false;
    fake_drop(c);
    return true;
}

Test(client, survives_a_peer_that_is_gone_when_it_writes)
{
    fake f;
    kvs_client *c = start(&f, hang_up_on_ping);

    for (int i = 0; i < 50; i++) { /* no SIGPIPE, or the test would be over */
        kvs_status s = kvs_ping(c, 0, &err);

        cr_assert_eq(s, KVS_E_AWAY, "%s: %s", kvs_status_name(s), err.msg);
        if (i % 10 == 0)
            OK(kvs_wait_up(c, (uint64_t)i / 10, 0, &err));
    }
    finish(&f, c);
}

static bool refuse_second_entry(fake *f, fake_conn *c, frame *q)
{
    uint8_t body[WIRE_region_rep_BYTES + 64] = {0};
    wire_in in = {.base = q->body, .len = q->head.body_len};
    wire_out o = {.base = body, .cap = sizeof body};
    wire_region_attach_req a;
    wire_region_rep v;

    if (q->head.op != WIRE_REGION_ATTACH)
        return false;
    wire_get_region_attach_req(&in, &a);
    atomic_fetch_add(&f->entries, a.n_entries);
    v = (wire_region_rep){.region = ++f->next_region,
                          .n_slots = a.n_slots,
                          .slot_stride = a.n_slots ? 4096 : 0,
                          .bytes = a.bytes,
                          .piece_bytes = a.bytes,
                          .n_entries = a.n_entries};
    wire_put_region_rep(&o, &v);
    for (uint32_t i = 0; i < a.n_entries; i++)
        wire_put_u32(&o, i == 1 ? KVS_E_EXISTS : KVS_OK);
    wire_put_pad8(&o);
    fake_reply(c, q, KVS_OK, body, o.len);
    return true;
}

Test(client, tells_a_restarted_daemon_all_that_it_knew)
{
    unsigned before = open_fds();
    int fd = fake_memfd(65536, true);
    kvs_plane_map map = {.stride = 4096};
    kvs_import in = {.n_slots = 4, .n_fds = 1, .fds = &fd, .n_maps = 1, .maps = &map};
    uint8_t keys[3 * 32];
    kvs_slot slots[3];
    kvs_load_result loaded[3];
    kvs_status results[3];
    kvs_region *region, *scratch, *import;
    kvs_region_info info;
    kvs_ns_info ni;
    kvs_load_args load = {.n = 3, .keys = keys, .results = loaded};
    kvs_store_args store = {.n = 1, .keys = keys, .results = results};
    kvs_counters page;
    kvs_server v;
    void *base;
    uint64_t bytes;
    fake f;
    kvs_client *c = start(&f, NULL);
    kvs_ns *ns = ns_of(c, "m");

    (void)ns_of(c, "other");
    keys_fill(keys, 3, 1);
    OK(kvs_region_create(ns, 0, 8, &region, 0, &err));
    OK(kvs_scratch_create(c, 0, 4096, &scratch, 0, &err));
    OK(kvs_region_import(ns, &in, &import, 0, &err));
    OK(kvs_region_map(region, &base, &bytes, &err));
    cr_assert_eq(bytes, 8 * 4096);
    memset(base, 0x77, bytes);
    OK(kvs_watch(c, 7, 0, &err));
    OK(kvs_counter_set(c, 5, 1234, &err));
    load.ns = store.ns = ns;
    load.region = store.region = region;
    OK(kvs_load(&load, 0, &err)); /* three shared slots 0, 1, 2 */
    cr_assert_eq(loaded[2].slot.gen, 102);
    cr_assert_eq(atomic_load(&f.fds), 1);

    fake_stop(&f);
    memset(base, 0x78, bytes); /* the mapping outlives the daemon */
    f.hook = refuse_second_entry;
    fake_start(&f);
    OK(kvs_wait_up(c, 1, 0, &err));

    kvs_server_get(c, &v);
    cr_assert_eq(v.generation, 2);
    cr_assert_eq(v.boot_id[0], 2);
    cr_assert_eq(atomic_load(&f.ops[WIRE_OPEN]), 4);
    cr_assert_eq(atomic_load(&f.ops[WIRE_REGION_ATTACH]), 2);
    cr_assert_eq(atomic_load(&f.ops[WIRE_REGION_IMPORT]), 2);
    cr_assert_eq(atomic_load(&f.ops[WIRE_WATCH]), 2);
    cr_assert_eq(atomic_load(&f.entries), 3);
    kvs_region_get(region, &info);
    cr_assert_eq(info.state, KVS_OK);
    cr_assert_geq(info.id, 140);
    kvs_ns_get(ns, &ni);
    cr_assert_geq(ni.id, 80);
    OK(kvs_counter_page(c, &page, &err));
    cr_assert_eq(page.generation, 2);
    cr_assert_eq(page.client[5].value, 1234);
    cr_assert_eq(page.daemon[5].value, 0);

    for (unsigned i = 0; i < 3; i++)
        slots[i] = loaded[i].slot;
    store.slots = &slots[1]; /* the one that was not taken back */
    FAILS(KVS_E_STALE, kvs_store(&store, 0, &err));
    cr_assert_eq(results[0], KVS_E_STALE);
    store.slots = &slots[2];
    OK(kvs_store(&store, 0, &err));
    OK(kvs_slot_drop(region, &slots[0], 1, NULL, results, 0, &err));
    OK(kvs_region_close(scratch, 0, &err));
    finish(&f, c);
    (void)close(fd);
    cr_assert_eq(open_fds(), before);
}

static bool refuse_regions(fake *f, fake_conn *c, frame *q)
{
    (void)f;
    if (q->head.op != WIRE_REGION_ATTACH)
        return false;
    fake_reply(c, q, KVS_E_NO_SPACE, NULL, 0);
    return true;
}

/* Who has two holds of a slot ends two; a region of 8 slots is offered with 8 entries at most. */
Test(client, tells_a_restarted_daemon_of_each_hold_as_far_as_it_takes_them)
{
    uint8_t keys[3 * 32];
    kvs_load_result loaded[3];
    kvs_slot slots[3];
    kvs_status results[3];
    kvs_region *region;
    kvs_load_args load = {.n = 3, .keys = keys, .results = loaded};
    fake f;
    kvs_client *c = start(&f, NULL);

    keys_fill(keys, 3, 1);
    load.ns = ns_of(c, "m");
    OK(kvs_region_create(load.ns, 0, 8, &region, 0, &err));
    load.region = region;
    for (uint64_t life = 1; life <= 3; life++) { /* one hold more of each in each life */
        static const unsigned entries[] = {0, 3, 3 + 6, 3 + 6 + 8};

        OK(kvs_load(&load, 0, &err));
        fake_stop(&f);
        fake_start(&f);
        OK(kvs_wait_up(c, life, 0, &err));
        cr_assert_eq(atomic_load(&f.entries), entries[life], "%u in life %u", atomic_load(&f.entries), (unsigned)life);
    }
    for (unsigned i = 0; i < 3; i++)
        slots[i] = loaded[i].slot;
    for (unsigned i = 0; i < 2; i++)
        OK(kvs_slot_drop(region, slots, 3, NULL, results, 0, &err));
    fake_stop(&f);
    fake_start(&f);
    OK(kvs_wait_up(c, 4, 0, &err));
    cr_assert_eq(atomic_load(&f.entries), 3 + 6 + 8 + 2, "two holds of three were granted to two slots");
    finish(&f, c);
}

/* 1.0 to 1.5 s. */
Test(client, pauses_once_before_it_connects_again)
{
    fake f;
    kvs_options o;
    kvs_client *c;
    int64_t begin;

    fake_init(&f);
    fake_start(&f);
    o = options(&f);
    o.backoff_min_ms = 1000;
    o.backoff_max_ms = 20000;
    OK(kvs_connect(&c, &o, &err));
    begin = now_ms();
    fake_stop(&f);
    fake_start(&f);
    OK(kvs_wait_up(c, 1, 0, &err));
    cr_assert_geq(now_ms() - begin, 990);
    cr_assert_lt(now_ms() - begin, 1900, "%d ms", (int)(now_ms() - begin));
    finish(&f, c);
}

Test(client, calls_a_region_stale_that_the_new_daemon_refuses)
{
    kvs_slot slot;
    kvs_region *region;
    kvs_region_info info;
    fake f;
    kvs_client *c = start(&f, NULL);

    OK(kvs_region_create(ns_of(c, "m"), 0, 8, &region, 0, &err));
    fake_stop(&f);
    f.hook = refuse_regions;
    fake_start(&f);
    OK(kvs_wait_up(c, 1, 0, &err));
    FAILS(KVS_E_STALE, kvs_slot_take(region, 1, &slot, 0, &err));
    kvs_region_get(region, &info);
    cr_assert_eq(info.state, KVS_E_STALE);
    OK(kvs_region_close(region, 0, &err));
    OK(kvs_ping(c, 0, &err));
    finish(&f, c);
}

static bool refuse_namespaces(fake *f, fake_conn *c, frame *q)
{
    (void)f;
    if (q->head.op != WIRE_OPEN)
        return false;
    fake_reply(c, q, KVS_E_NO_SPACE, NULL, 0);
    return true;
}

/* An import of many handles is too long for the stack: what was allocated for it goes, too, when it is not sent. */
Test(client, calls_a_namespace_stale_that_the_new_daemon_refuses)
{
    static const kvs_ipc ipc[KVS_REGION_MAX_FDS];
    static const kvs_plane_map map = {.stride = 4096};
    const kvs_import in = {.n_slots = 4,
                           .memory = KVS_MEMORY_CUDA_IPC,
                           .n_maps = 1,
                           .maps = &map,
                           .n_ipc = KVS_REGION_MAX_FDS,
                           .ipc = ipc};
    kvs_region *region;
    fake f;
    kvs_client *c = start(&f, NULL);
    kvs_ns *ns = ns_of(c, "m");
    size_t used;

    fake_stop(&f);
    f.hook = refuse_namespaces;
    fake_start(&f);
    OK(kvs_wait_up(c, 1, 0, &err));
    used = mallinfo2().uordblks;
    for (int i = 0; i < 1000; i++)
        FAILS(KVS_E_STALE, kvs_region_import(ns, &in, &region, 0, &err));
    cr_assert_lt(mallinfo2().uordblks, used + (1 << 20), "5 KiB of each are kept");
    FAILS(KVS_E_STALE, kvs_region_create(ns, 0, 8, &region, 0, &err));
    OK(kvs_ping(c, 0, &err));
    finish(&f, c);
}

Test(client, comes_back_ten_times_without_a_call_and_without_a_busy_loop)
{
    unsigned before = open_fds();
    fake f;
    kvs_client *c = start(&f, NULL);

    (void)ns_of(c, "m");
    for (unsigned i = 1; i <= 10; i++) {
        fake_stop(&f);
        fake_start(&f);
        await_count(&f.ops[WIRE_OPEN], i + 1); /* nobody calls into the library */
    }
    OK(kvs_wait_up(c, 10, 0, &err));
    cr_assert_lt(atomic_load(&f.attempts), 60);
    finish(&f, c);
    cr_assert_eq(open_fds(), before);
}

/* ---- a daemon that must not be believed ---- */

enum {
    BAD_N,
    BAD_HITS,
    BAD_STATE,
    BAD_SHORT,
    BAD_LONG,
    BAD_MSG,
    BAD_ID,
    BAD_OP,
    BAD_MAGIC,
    BAD_HUGE,
    BAD_FDS,
    BAD_FRAMES
};

static void send_lookup(fake_conn *c, const frame *q, uint32_t hits, uint32_t n, size_t len)
{
    uint8_t body[64] = {0};
    wire_out o = {.base = body, .cap = sizeof body};
    wire_lookup_rep v = {hits, n};

    wire_put_lookup_rep(&o, &v);
    fake_reply(c, q, KVS_OK, body, len);
}

static void send_raw(fake_conn *c, uint32_t magic, uint64_t id, uint16_t op, uint32_t body_len, uint32_t first)
{
    uint8_t bytes[WIRE_HEADER_BYTES + 8] = {0};
    wire_header h = {.op = op, .id = id, .body_len = body_len};
    wire_out o = {.base = bytes, .cap = 4};

    wire_header_encode(&h, bytes);
    wire_put_u32(&o, magic);
    o = (wire_out){.base = bytes + WIRE_HEADER_BYTES, .cap = 4};
    wire_put_u32(&o, first);
    fake_bytes(c, bytes, sizeof bytes);
}

static bool malformed(fake *f, fake_conn *c, frame *q)
{
    static const uint8_t body[24];
    int fd;

    if (q->head.op != WIRE_LOOKUP)
        return false;
    switch (*(unsigned *)f->ud) {
    case BAD_N:
        send_lookup(c, q, 0, 3, 16);
        return true;
    case BAD_HITS:
        send_lookup(c, q, 9, 2, 16);
        return true;
    case BAD_STATE: /* hits whose states say absent */
        send_lookup(c, q, 2, 2, 16);
        return true;
    case BAD_SHORT:
        send_lookup(c, q, 0, 2, 8);
        return true;
    case BAD_LONG:
        send_lookup(c, q, 0, 2, 24);
        return true;
    case BAD_MSG:
        send_raw(c, WIRE_MAGIC, q->head.id, WIRE_LOOKUP, 8, 0xfffffff0);
        return true;
    case BAD_ID:
        send_raw(c, WIRE_MAGIC, q->head.id + 1, WIRE_LOOKUP, 8, 0);
        return true;
    case BAD_OP:
        send_raw(c, WIRE_MAGIC, q->head.id, WIRE_PING, 8, 0);
        return true;
    case BAD_MAGIC:
        send_raw(c, 0x12345678, q->head.id, WIRE_LOOKUP, 8, 0);
        return true;
    case BAD_HUGE:
        send_raw(c, WIRE_MAGIC, q->head.id, WIRE_LOOKUP, 0xffffffff, 0);
        return true;
    default:
        fd = dup(0);
        fake_reply_fds(c, q, body, 16, &fd, 1);
        (void)close(fd);
        return true;
    }
}

Test(client, hangs_up_on_replies_that_do_not_add_up)
{
    unsigned before = open_fds();

    for (unsigned variant = 0; variant < BAD_FRAMES; variant++) {
        uint8_t keys[2 * 32], states[2] = {7, 7};
        uint32_t hits = 7;
        kvs_ns *ns;
        kvs_client *c;
        kvs_status s;
        fake f;

        keys_fill(keys, 2, 1);
        fake_init(&f);
        f.hook = malformed;
        f.ud = &variant;
        fake_start(&f);
        c = client_of(&f);
        ns = ns_of(c, "m");
        s = kvs_lookup(ns, keys, 2, &hits, states, 0, &err);
        cr_assert(s == KVS_OK || s == KVS_E_PROTO, "variant %u: %s", variant, kvs_status_name(s)); /* OK: a miss */
        cr_assert_eq(hits, 0, "variant %u", variant);
        cr_assert_eq(states[0], KVS_KEY_ABSENT, "variant %u", variant);
        OK(kvs_wait_up(c, 1, 0, &err)); /* it hung up, and came back */
        OK(kvs_ping(c, 0, &err));
        finish(&f, c);
    }
    cr_assert_eq(open_fds(), before);
}

static bool bad_region(fake *f, fake_conn *c, frame *q)
{
    uint8_t body[WIRE_region_rep_BYTES];
    wire_out o = {.base = body, .cap = sizeof body};
    wire_region_rep v = {
        .region = 1, .n_slots = 8, .slot_stride = 4096, .bytes = 32768, .piece_bytes = 32768, .n_pieces = 1};
    unsigned variant = *(unsigned *)f->ud;
    int fd = fake_memfd(variant == 0 ? 4096 : 32768, variant != 1);

    if (q->head.op != WIRE_REGION_CREATE) {
        (void)close(fd);
        return false;
    }
    if (variant == 2)
        v.slot_stride = 16; /* below the block */
    if (variant == 3)
        v.n_slots = 9;
    if (variant == 4)
        v.slot_stride = UINT64_C(1) << 62; /* times 8 wraps */
    if (variant == 5)
        v.n_pieces = 2;
    if (variant == 6)
        v.bytes = UINT64_MAX;
    if (variant == 7)
        v.slot_stride = 4088; /* a kernel takes 16 bytes at a time */
    wire_put_region_rep(&o, &v);
    fake_reply_fds(c, q, body, o.len, &fd, 1);
    (void)close(fd);
    return true;
}

Test(client, maps_no_region_that_is_not_what_it_says)
{
    unsigned before = open_fds();

    for (unsigned variant = 0; variant < 8; variant++) {
        kvs_region *region = NULL;
        uint64_t bytes;
        void *base;
        kvs_client *c;
        kvs_status s;
        fake f;

        fake_init(&f);
        f.hook = bad_region;
        f.ud = &variant;
        fake_start(&f);
        c = client_of(&f);
        s = kvs_region_create(ns_of(c, "m"), 0, 8, &region, 0, &err);
        if (s == KVS_OK) /* short or unsealed memory is found when it is mapped */
            s = kvs_region_map(region, &base, &bytes, &err);
        cr_assert_eq(s, KVS_E_PROTO, "variant %u: %s", variant, kvs_status_name(s));
        finish(&f, c);
    }
    cr_assert_eq(open_fds(), before);
}

/* ---- what comes too late ---- */

typedef struct late {
    frame q;
    uint8_t body[64];
    fake_conn *c;
    uint16_t op; /* whose answer waits for a PING */
    atomic_uint held;
} late;

static bool hold_until_ping(fake *f, fake_conn *c, frame *q)
{
    late *l = f->ud;

    if (q->head.op == l->op && atomic_load(&l->held) == 0) {
        memcpy(l->body, q->body, q->head.body_len < 64 ? q->head.body_len : 64);
        l->q = *q;
        l->q.body = l->body;
        atomic_store(&l->held, 1);
        return true;
    }
    if (q->head.op == WIRE_PING && atomic_load(&l->held) == 1) {
        atomic_store(&l->held, 2);
        (void)fake_serve(f, c, &l->q);
    }
    return false;
}

Test(client, gives_back_slots_that_came_too_late)
{
    late l = {.op = WIRE_SLOT_TAKE};
    kvs_region *region;
    kvs_slot slots[3];
    kvs_client *c;
    fake f;

    fake_init(&f);
    f.hook = hold_until_ping;
    f.ud = &l;
    fake_start(&f);
    c = client_of(&f);
    OK(kvs_region_create(ns_of(c, "m"), 0, 8, &region, 0, &err));
    FAILS(KVS_E_DEADLINE, kvs_slot_take(region, 3, slots, 30, &err));
    await_count(&f.ops[WIRE_CANCEL], 1); /* it told the daemon */
    OK(kvs_ping(c, 0, &err));
    await_count(&f.ops[WIRE_SLOT_DROP], 1); /* and gave them back */
    OK(kvs_settle(c, 0, &err));
    finish(&f, c);
}

Test(client, closes_a_region_that_came_too_late)
{
    late l = {.op = WIRE_REGION_CREATE};
    unsigned before = open_fds();
    kvs_region *region;
    kvs_client *c;
    kvs_ns *ns;
    fake f;

    fake_init(&f);
    f.hook = hold_until_ping;
    f.ud = &l;
    fake_start(&f);
    c = client_of(&f);
    ns = ns_of(c, "m");
    FAILS(KVS_E_DEADLINE, kvs_region_create(ns, 0, 8, &region, 30, &err));
    OK(kvs_ping(c, 0, &err));
    await_count(&f.ops[WIRE_REGION_CLOSE], 1);
    finish(&f, c);
    cr_assert_eq(open_fds(), before);
}

/* A LOAD whose copy runs on: E_DEADLINE with BUSY items; the CANCEL is answered only after a PING. */
static bool copy_runs_on(fake *f, fake_conn *c, frame *q)
{
    late *l = f->ud;
    uint8_t body[64];
    wire_out o = {.base = body, .cap = sizeof body};
    wire_load_rep v = {1, 0};
    wire_load_result one = {KVS_E_BUSY, 0, 3, 1};

    if (q->head.op == WIRE_LOAD) {
        wire_put_load_rep(&o, &v);
        wire_put_load_result(&o, &one);
        fake_reply(c, q, KVS_E_DEADLINE, body, o.len);
        return true;
    }
    return q->head.op == WIRE_CANCEL || q->head.op == WIRE_PING ? hold_until_ping(f, c, q) || q->head.op == l->op
                                                                : false;
}

Test(client, settles_only_when_the_hardware_has_stopped)
{
    late l = {.op = WIRE_CANCEL};
    uint8_t key[32] = {1};
    kvs_slot slot = {3, 1};
    kvs_load_result result;
    kvs_load_args a = {.n = 1, .keys = key, .slots = &slot, .results = &result};
    kvs_client *c;
    fake f;

    fake_init(&f);
    f.hook = copy_runs_on;
    f.ud = &l;
    fake_start(&f);
    c = client_of(&f);
    a.ns = ns_of(c, "m");
    OK(kvs_region_create(a.ns, 0, 8, &a.region, 0, &err));
    FAILS(KVS_E_DEADLINE, kvs_load(&a, 0, &err));
    cr_assert_eq(result.status, KVS_E_BUSY);
    FAILS(KVS_E_DEADLINE, kvs_settle(c, 30, &err));
    await_count(&l.held, 1);
    OK(kvs_ping(c, 0, &err));
    OK(kvs_settle(c, 0, &err));
    finish(&f, c);
}

/* The same of a STORE whose caller wants no results. */
static bool store_runs_on(fake *f, fake_conn *c, frame *q)
{
    uint8_t body[64] = {0};
    wire_out o = {.base = body, .cap = sizeof body};
    wire_key_rep v = {1, 0};

    if (q->head.op != WIRE_STORE)
        return copy_runs_on(f, c, q);
    wire_put_key_rep(&o, &v);
    wire_put_u32(&o, KVS_E_BUSY);
    fake_reply(c, q, KVS_E_DEADLINE, body, 16);
    return true;
}

Test(client, settles_a_store_without_results_only_when_the_hardware_has_stopped)
{
    late l = {.op = WIRE_CANCEL};
    uint8_t key[32] = {1};
    kvs_slot slot = {3, 1};
    kvs_store_args a = {.n = 1, .keys = key, .slots = &slot};
    kvs_client *c;
    fake f;

    fake_init(&f);
    f.hook = store_runs_on;
    f.ud = &l;
    fake_start(&f);
    c = client_of(&f);
    a.ns = ns_of(c, "m");
    OK(kvs_region_create(a.ns, 0, 8, &a.region, 0, &err));
    FAILS(KVS_E_DEADLINE, kvs_store(&a, 0, &err));
    FAILS(KVS_E_DEADLINE, kvs_settle(c, 30, &err));
    await_count(&l.held, 1);
    OK(kvs_ping(c, 0, &err));
    OK(kvs_settle(c, 0, &err));
    finish(&f, c);
}

/* Holds LOAD and REGION_CLOSE until a PING comes, and answers then. */
typedef struct slow {
    frame load, close;
    bool has_load, has_close;
} slow;

static bool slow_hook(fake *f, fake_conn *c, frame *q)
{
    slow *x = f->ud;

    if (q->head.op == WIRE_LOAD) {
        x->load = *q;
        x->has_load = true;
        return true;
    }
    if (q->head.op == WIRE_REGION_CLOSE && !x->has_close) {
        x->close = *q;
        return x->has_close = true;
    }
    if (q->head.op == WIRE_PING && x->has_load) {
        uint8_t body[64];
        wire_out o = {.base = body, .cap = sizeof body};
        wire_load_rep v = {1, 1};
        wire_load_result one = {KVS_OK, WIRE_LOADED_SHARED, 3, 1};

        wire_put_load_rep(&o, &v);
        wire_put_load_result(&o, &one);
        fake_reply(c, &x->load, KVS_OK, body, o.len);
        x->has_load = false;
    }
    return false;
}

/* The reply is written to the region's table of slots. */
Test(client, keeps_a_region_while_a_reply_may_speak_of_it)
{
    slow x = {.has_close = true};
    uint8_t key[32] = {1};
    kvs_load_result result;
    kvs_load_args a = {.n = 1, .keys = key, .results = &result};
    kvs_region_info info;
    kvs_request *r;
    kvs_client *c;
    fake f;

    fake_init(&f);
    f.hook = slow_hook;
    f.ud = &x;
    fake_start(&f);
    c = client_of(&f);
    a.ns = ns_of(c, "m");
    OK(kvs_region_create(a.ns, 0, 8, &a.region, 0, &err));
    OK(kvs_submit_load(&a, &r, 0, &err));
    FAILS(KVS_E_BUSY, kvs_region_close(a.region, 0, &err));
    cr_assert_eq(atomic_load(&f.ops[WIRE_REGION_CLOSE]), 0, "the daemon has it, too");
    OK(kvs_ping(c, 0, &err));
    OK(kvs_wait(r, 0, &err));
    OK(kvs_request_end(r, &err));
    kvs_region_get(a.region, &info);
    cr_assert_eq(info.n_slots, 8);
    OK(kvs_region_close(a.region, 0, &err));
    finish(&f, c);
}

Test(client, tells_the_daemon_of_a_closed_region_in_the_end_if_not_in_time)
{
    slow x = {.has_close = false};
    kvs_region *region;
    kvs_client *c;
    fake f;

    fake_init(&f);
    f.hook = slow_hook;
    f.ud = &x;
    fake_start(&f);
    c = client_of(&f);
    OK(kvs_region_create(ns_of(c, "m"), 0, 8, &region, 0, &err));
    FAILS(KVS_E_DEADLINE, kvs_region_close(region, 30, &err));
    await_count(&f.ops[WIRE_REGION_CLOSE], 2); /* the first one may have been cancelled */
    finish(&f, c);
}

/* Copies that run on, of as many LOADs as there are.  Their CANCELs are answered when a LOOKUP has come. */
typedef struct stuck {
    frame q[16];
    unsigned n;
    bool over;
} stuck;

static bool copies_run_on(fake *f, fake_conn *c, frame *q)
{
    static const uint8_t stopped[WIRE_cancel_rep_BYTES];
    stuck *x = f->ud;

    if (q->head.op == WIRE_LOAD)
        return copy_runs_on(f, c, q);
    if (q->head.op == WIRE_CANCEL && !x->over) {
        x->q[x->n++] = *q;
        return true;
    }
    x->over = x->over || q->head.op == WIRE_LOOKUP;
    while (x->over && x->n > 0)
        fake_reply(c, &x->q[--x->n], KVS_OK, stopped, sizeof stopped);
    return false;
}

/* Symptom: what was not cancelled within a second, because so many others waited for their CANCELs' answers, was never settled. */
Test(client, settles_however_many_run_on_at_once)
{
    enum { N = 5 };
    static stuck x;
    uint8_t key[32] = {1};
    uint32_t hits;
    kvs_slot slot = {3, 1};
    kvs_load_result result;
    kvs_load_args a = {.n = 1, .keys = key, .slots = &slot, .results = &result};
    kvs_client *c;
    fake f;

    fake_init(&f);
    f.control_requests = 2;
    f.hook = copies_run_on;
    f.ud = &x;
    fake_start(&f);
    c = client_of(&f);
    a.ns = ns_of(c, "m");
    OK(kvs_region_create(a.ns, 0, 8, &a.region, 0, &err));
    for (int i = 0; i < N; i++)
        FAILS(KVS_E_DEADLINE, kvs_load(&a, 0, &err));
    FAILS(KVS_E_DEADLINE, kvs_settle(c, 2500, &err));
    OK(kvs_lookup(a.ns, key, 1, &hits, NULL, 0, &err));
    OK(kvs_settle(c, 0, &err));
    cr_assert_eq(atomic_load(&f.ops[WIRE_CANCEL]), N);
    finish(&f, c);
}

Test(client, cancels_a_request_and_gets_both_answers)
{
    late l = {.op = WIRE_LOOKUP};
    uint8_t key[32] = {1};
    uint32_t hits = 5, outcome = 9;
    kvs_request *r;
    kvs_client *c;
    kvs_ns *ns;
    fake f;

    fake_init(&f);
    f.hook = hold_until_ping;
    f.ud = &l;
    fake_start(&f);
    c = client_of(&f);
    ns = ns_of(c, "m");
    OK(kvs_submit_lookup(ns, key, 1, &hits, NULL, &r, 0, &err));
    cr_assert_not(kvs_done(r));
    OK(kvs_ping(c, 0, &err));
    OK(kvs_cancel(r, &outcome, 0, &err));
    cr_assert_eq(outcome, KVS_CANCEL_GONE);
    OK(kvs_request_end(r, &err));
    cr_assert_eq(hits, 1);
    finish(&f, c);
}

/* ---- the rest of the calls ---- */

static bool send_events(fake *f, fake_conn *c, frame *q)
{
    uint8_t body[256] = {0};
    wire_out o = {.base = body, .cap = sizeof body};
    wire_event e = {.seq = 1, .lost = 4, .n = 2};
    frame as = *q;

    if (q->head.op != WIRE_WATCH)
        return false;
    (void)fake_serve(f, c, q);
    wire_put_event(&o, &e);
    for (uint32_t i = 0; i < 2; i++) {
        wire_event_item item = {.type = WIRE_EVENT_STORED, .ns = 3, .depth = i, .key = {(uint8_t)(i + 1)}};

        wire_put_event_item(&o, &item);
    }
    as.head.op = WIRE_EVENT;
    fake_reply(c, &as, KVS_OK, body, o.len);
    return true;
}

Test(client, hands_out_events_and_counts_lost_ones)
{
    kvs_event e[4];
    uint32_t n;
    uint64_t lost;
    fake f;
    kvs_client *c = start(&f, send_events);

    OK(kvs_watch(c, 7, 0, &err));
    OK(kvs_events(c, e, 1, &n, &lost, 0, &err));
    cr_assert_eq(n, 1);
    cr_assert_eq(lost, 4);
    cr_assert_eq(e[0].key[0], 1);
    OK(kvs_events(c, e, 4, &n, &lost, 0, &err));
    cr_assert_eq(n, 1);
    cr_assert_eq(lost, 0);
    cr_assert_eq(e[0].depth, 1);
    FAILS(KVS_E_DEADLINE, kvs_events(c, e, 4, &n, &lost, 20, &err));
    finish(&f, c);
}

/* The reply and an event as one piece: a reader has both or none. */
static bool send_event_with_reply(fake *f, fake_conn *c, frame *q)
{
    uint8_t both[256] = {0};
    wire_out o = {.base = both, .cap = sizeof both};
    wire_header h = {.op = WIRE_WATCH, .id = q->head.id, .body_len = 8};
    wire_event e = {.seq = 1, .n = 1};
    wire_event_item item = {.type = WIRE_EVENT_STORED, .ns = 3};

    (void)f;
    if (q->head.op != WIRE_WATCH)
        return false;
    o.len = WIRE_HEADER_BYTES + 8 + WIRE_HEADER_BYTES;
    wire_put_event(&o, &e);
    wire_put_event_item(&o, &item);
    wire_header_encode(&h, both);
    h = (wire_header){.op = WIRE_EVENT, .body_len = (uint32_t)(o.len - WIRE_HEADER_BYTES - 8 - WIRE_HEADER_BYTES)};
    wire_header_encode(&h, both + WIRE_HEADER_BYTES + 8);
    fake_bytes(c, both, o.len);
    return true;
}

Test(client, hands_out_an_event_that_came_with_the_last_reply_of_a_reconnect)
{
    kvs_event e[4];
    int64_t begin;
    uint32_t n;
    fake f;
    kvs_client *c = start(&f, send_event_with_reply);

    OK(kvs_watch(c, 7, 0, &err));
    OK(kvs_events(c, e, 4, &n, NULL, 0, &err));
    cr_assert_eq(n, 1);
    fake_stop(&f);
    fake_start(&f);
    OK(kvs_wait_up(c, 1, 0, &err));
    begin = now_ms();
    OK(kvs_events(c, e, 4, &n, NULL, 3000, &err));
    cr_assert_eq(n, 1);
    cr_assert_lt(now_ms() - begin, 1500, "nothing told of what had been read already");
    finish(&f, c);
}

Test(client, runs_every_other_call_once)
{
    kvs_report_args summary = KVS_REPORT_SUMMARY;
    uint8_t key[32] = {1};
    char text[64], *own;
    size_t len;
    kvs_health_info health;
    kvs_reset_result reset;
    kvs_status result;
    kvs_lease lease;
    kvs_ns *ns;
    kvs_region *attached;
    kvs_region_info info;
    uint8_t token[16] = {0x5a};
    fake f;
    kvs_client *c = start(&f, NULL);
    kvs_reserve_args reserve = {.n_ns = 1, .n = 1, .keys = key, .max_loads = 1};

    ns = ns_of(c, "m");
    cr_assert_eq(ns_of(c, "m"), ns);
    reserve.ns = &ns;
    OK(kvs_report(c, &summary, text, sizeof text, &len, 0, &err));
    cr_assert_str_eq(text, "{\"fake\":  1}");
    FAILS(KVS_E_LIMIT, kvs_report(c, &summary, text, 12, &len, 0, &err));
    cr_assert_eq(len, 12);
    OK(kvs_report_alloc(c, &summary, &own, &len, 0, &err));
    kvs_free(own);
    OK(kvs_health(c, &health, 0, &err));
    OK(kvs_reset(c, NULL, 0, &reset, 0, &err));
    OK(kvs_reset(c, ns, 0, NULL, 0, &err));
    OK(kvs_pin(ns, key, 1, &result, 0, &err));
    OK(kvs_unpin(ns, key, 1, NULL, 0, &err));
    OK(kvs_drop(ns, key, 1, &result, 0, &err));
    OK(kvs_reserve(&reserve, &lease, 0, &err));
    OK(kvs_release(c, &lease, 0, &err));
    OK(kvs_region_attach(c, ns, token, &attached, 0, &err));
    kvs_region_get(attached, &info);
    cr_assert_eq(info.n_slots, 8);
    cr_assert_geq(kvs_region_fd(attached, 0), 0);
    cr_assert_eq(kvs_region_fd(attached, 1), -1);
    FAILS(KVS_E_RANGE, kvs_counter_set(c, 256, 1, &err));
    FAILS(KVS_E_RANGE, kvs_counter_set(c, 0, UINT64_C(1) << 62, &err));
    finish(&f, c);
}

static bool signal_on_store(fake *f, fake_conn *c, frame *q)
{
    wire_in in = {.base = q->body, .len = q->head.body_len};
    wire_store_req v;

    (void)f;
    if (q->head.op != WIRE_STORE)
        return false;
    wire_get_store_req(&in, &v);
    uint64_t *entry = (uint64_t *)(void *)(c->counters + WIRE_COUNTER_HALF_BYTES + 16 * v.signal_counter);

    __atomic_store_n(&entry[1], KVS_E_DEVICE, __ATOMIC_RELAXED);
    __atomic_store_n(&entry[0], v.signal_value, __ATOMIC_RELEASE);
    return true; /* and no reply yet */
}

Test(client, sees_a_counter_before_the_reply_and_returns_its_error)
{
    uint8_t key[32] = {1};
    kvs_slot slot = {0, 1};
    kvs_status result;
    kvs_mark signal = {9, 0, 77};
    kvs_store_args a = {.n = 1, .keys = key, .slots = &slot, .results = &result, .signal = &signal};
    kvs_request *r;
    fake f;
    kvs_client *c = start(&f, signal_on_store);

    a.ns = ns_of(c, "m");
    OK(kvs_region_create(a.ns, 0, 8, &a.region, 0, &err));
    FAILS(KVS_E_DEADLINE, kvs_counter_wait(c, 0, signal, 20, &err));
    OK(kvs_submit_store(&a, &r, 0, &err));
    FAILS(KVS_E_DEVICE, kvs_counter_wait(c, 0, signal, 0, &err));
    FAILS(KVS_E_BUSY, kvs_request_end(r, &err));
    finish(&f, c);
}

Test(client, refuses_to_work_in_a_forked_child)
{
    fake f;
    kvs_client *c = start(&f, NULL);
    int status;
    pid_t pid = fork();

    cr_assert_geq(pid, 0);
    if (pid == 0) {
        kvs_status s = kvs_ping(c, 0, NULL);

        kvs_close(c);
        _exit(s == KVS_E_STATE ? 0 : 1);
    }
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    OK(kvs_ping(c, 0, &err)); /* the parent's connection is untouched */
    cr_assert_eq(kvs_generation(c), 1);
    finish(&f, c);
}

/* In a child without privileges, for those are excused from the limit.  The daemon reads nothing meanwhile. */
static int send_too_many(fake *f)
{
    struct rlimit tight = {24, 24};
    kvs_plane_map map = {.stride = 4096};
    kvs_import in = {.n_slots = 1, .n_fds = 12, .n_maps = 1, .maps = &map};
    kvs_client *c = client_of(f);
    kvs_ns *ns = ns_of(c, "m");
    kvs_region *r;
    kvs_status s = KVS_OK;
    int fds[12], before;

    for (int i = 0; i < 12; i++)
        fds[i] = 0;
    in.fds = fds;
    tight.rlim_cur = tight.rlim_max = open_fds() + 16;
    if (setrlimit(RLIMIT_NOFILE, &tight) != 0 || (geteuid() == 0 && setuid(65534) != 0))
        return 2;
    before = (int)open_fds();
    atomic_store(&f->deaf, true);
    (void)kvs_ping(c, 40, &err); /* wakes it once more: now it notices */
    for (int i = 0; i < 40 && s != KVS_E_LIMIT; i++) {
        int64_t begin = now_ms();

        s = kvs_region_import(ns, &in, &r, 40, &err);
        if (s == KVS_OK || now_ms() - begin > 2000)
            return 3;
    }
    if (s != KVS_E_LIMIT || strstr(err.msg, "RLIMIT_NOFILE") == NULL)
        return 4;
    if ((int)open_fds() != before)
        return 5;
    atomic_store(&f->deaf, false);
    s = kvs_region_import(ns, &in, &r, 0, &err);
    kvs_close(c);
    return s == KVS_OK ? 0 : 6;
}

Test(client, says_clearly_that_too_many_descriptors_are_in_flight)
{
    fake *f = mmap(NULL, sizeof *f, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    char folder[108], go = 0;
    int status, gate[2];
    pid_t pid;

    cr_assert_neq(f, MAP_FAILED);
    fake_init(f);
    cr_assert_eq(pipe(gate), 0);
    pid =
        fork(); /* before there are threads: one may hold a lock of the allocator, and under a sanitizer keep it in the child */
    cr_assert_geq(pid, 0);
    if (pid == 0)
        _exit(read(gate[0], &go, 1) == 1 ? send_too_many(f) : 1);
    fake_start(f);
    (void)snprintf(folder, sizeof folder, "%s", f->path);
    *strrchr(folder, '/') = '\0';
    (void)chmod(folder, 0755);
    (void)chmod(f->path, 0777);
    cr_assert_eq(write(gate[1], &go, 1), 1);
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_assert(WIFEXITED(status));
    cr_assert_eq(WEXITSTATUS(status), 0, "step %d", WEXITSTATUS(status));
    finish(f, NULL);
    (void)munmap(f, sizeof *f);
}

Test(client, memory_of_no_gpu_has_no_handle)
{
    uint64_t offset = 7, bytes = 8;
    kvs_ipc ipc;
    kvs_status s = kvs_ipc_of(&err, &ipc, &offset, &bytes, &err);

    /* Without a driver nothing can be said; with one, that this is host memory. */
    cr_assert(s == KVS_E_UNSUPPORTED || s == KVS_E_INVALID, "%s", kvs_status_name(s));
    cr_assert(strstr(err.msg, "memory") != NULL, "%s", err.msg);
    cr_assert(offset == 7 && bytes == 8, "results are written on success only");
}
