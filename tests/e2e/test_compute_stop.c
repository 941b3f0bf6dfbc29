/* A call that takes a minute on the cpu device ends within itself when it is cancelled, when its time is up and when its
 * client dies, and the next client's call is answered at once. */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/mla.h"
#include "proto/client/kvstride.h"
#include "proto/ctl/clock.h"
#include "tests/support/daemon_fixture.h"

enum {
    TOKENS = 256,
    WIDTH = 16384, /* of the long call's table: 4 Mi tokens of one slot, over and over */
    HEADS = 128,
    CALL_MS = 20000,
    SOON_MS = 3000, /* a busy machine's; by itself it takes 1 ms */
    Q_BYTES = HEADS * KVS_MLA_LATENT * 2,
    PE_AT = Q_BYTES,
    OUT_AT = PE_AT + HEADS * KVS_MLA_ROPE * 2,
    LSE_AT = OUT_AT + Q_BYTES,
    SCRATCH_BYTES = LSE_AT + HEADS * 4,
};

typedef struct tenant {
    kvs_client *client;
    kvs_ns *ns;
    kvs_region *region, *scratch;
    int32_t slot, length, starts[2];
    int32_t *table;
    kvs_decode_call call;
    kvs_call_result result;
    kvs_decode_args decode;
    kvs_extend_args extend;
} tenant;

static daemon_fixture d;
static kvs_err err;

static void ok(kvs_status s, const char *what)
{
    cr_assert_eq(s, KVS_OK, "%s: %s (%s)", what, kvs_status_name(s), err.msg);
}

static void join(tenant *t, uint32_t width)
{
    kvs_plane plane = {.name = "latent", .format = KVS_FORMAT_mla_bf16, .row_bytes = 1152, .page_bytes = TOKENS * 1152};
    kvs_namespace desc = {.model = "long", .tokens_per_block = TOKENS, .n_planes = 1, .planes = &plane};
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_slot slot;
    uint64_t bytes;
    void *at;

    *t = (tenant){.length = (int32_t)(width * TOKENS), .starts = {0, 1}};
    o.path = d.socket;
    ok(kvs_connect(&t->client, &o, &err), "connect");
    ok(kvs_open(t->client, &desc, &t->ns, CALL_MS, &err), "open");
    ok(kvs_region_create(t->ns, 0, 1, &t->region, CALL_MS, &err), "region");
    ok(kvs_scratch_create(t->client, 0, SCRATCH_BYTES, &t->scratch, CALL_MS, &err), "scratch");
    ok(kvs_region_map(t->scratch, &at, &bytes, &err), "map");
    memset(at, 0, SCRATCH_BYTES);
    ok(kvs_slot_take(t->region, 1, &slot, CALL_MS, &err), "slot");
    t->table = calloc(width, sizeof *t->table);
    cr_assert(t->table != NULL);
    for (uint32_t i = 0; i < width; i++)
        t->table[i] = (int32_t)slot.slot;
    t->call = (kvs_decode_call){.parts = 1,
                                .scratch = t->scratch,
                                .sm_scale = 0.1f,
                                .q_nope = {0, Q_BYTES, KVS_MLA_LATENT * 2},
                                .q_pe = {PE_AT, HEADS * KVS_MLA_ROPE * 2, KVS_MLA_ROPE * 2},
                                .out = {OUT_AT, Q_BYTES, KVS_MLA_LATENT * 2},
                                .lse = {LSE_AT, HEADS * 4, 4}};
    t->decode = (kvs_decode_args){.ns = t->ns,
                                  .region = t->region,
                                  .n_seqs = 1,
                                  .table_width = width,
                                  .s_q = 1,
                                  .h_q = HEADS,
                                  .n_calls = 1,
                                  .seq_len = &t->length,
                                  .block_table = t->table,
                                  .calls = &t->call,
                                  .results = &t->result};
    t->extend = (kvs_extend_args){.ns = t->ns,
                                  .region = t->region,
                                  .n_seqs = 1,
                                  .table_width = width,
                                  .n_tokens = 1,
                                  .h_q = HEADS,
                                  .n_calls = 1,
                                  .q_start = t->starts,
                                  .seq_len = &t->length,
                                  .block_table = t->table,
                                  .calls = &t->call,
                                  .results = &t->result};
}

static void leave(tenant *t)
{
    kvs_close(t->client);
    free(t->table);
}

static uint64_t now_ms(void)
{
    return clock_ns() / 1000000;
}

/* Something runs on the decoder's thread. */
static bool is_computing(kvs_client *c)
{
    kvs_report_args a = KVS_REPORT_SUMMARY;
    const char *at;
    char *text = NULL;
    size_t len;
    bool runs;

    ok(kvs_report_alloc(c, &a, &text, &len, CALL_MS, &err), "report");
    at = strstr(text, "\"decode\":{");
    at = at != NULL ? strstr(at, "\"oldest_us\":") : NULL;
    cr_assert(at != NULL, "%s", text);
    runs = strtoull(at + strlen("\"oldest_us\":"), NULL, 10) > 0;
    kvs_free(text);
    return runs;
}

static void await_begun(kvs_client *c)
{
    uint64_t end = now_ms() + CALL_MS;

    while (!is_computing(c))
        cr_assert(now_ms() < end, "it does not begin");
}

/* The other's short call, behind what has just been given up. */
static void answered_soon(tenant *other, uint64_t since_ms)
{
    uint64_t ms;

    ok(kvs_decode(&other->decode, CALL_MS, &err), "the other's call");
    ms = now_ms() - since_ms;
    cr_assert(ms < SOON_MS, "the next call is answered after %llu ms", (unsigned long long)ms);
    cr_log_info("the next call is answered after %llu ms", (unsigned long long)ms);
    cr_assert_eq(other->result.status, KVS_OK);
}

static void setup(void)
{
    daemon_init(&d);
    cr_assert(daemon_start(&d, "{\"pool\": {\"max_bytes\": \"16MiB\"}, \"device\": {\"kind\": \"cpu\"},"
                               " \"drain\": {\"timeout_ms\": 300}}"));
}

static void teardown(void)
{
    cr_assert_eq(daemon_stop(&d, SIGTERM), 0);
    daemon_fini(&d);
}

TestSuite(compute_stop, .init = setup, .fini = teardown);

/* Of three calls the first is running: the answer speaks of that one. */
static void cancelled(bool is_extend)
{
    kvs_request *r = NULL;
    uint32_t outcome = 99;
    uint64_t since;
    tenant big, other;
    kvs_decode_call calls[3];
    kvs_call_result results[3];

    join(&big, WIDTH);
    join(&other, 1);
    calls[0] = calls[1] = calls[2] = big.call;
    big.decode.calls = big.extend.calls = calls;
    big.decode.results = big.extend.results = results;
    big.decode.n_calls = big.extend.n_calls = 3;
    ok(is_extend ? kvs_submit_extend(&big.extend, &r, 0, &err) : kvs_submit_decode(&big.decode, &r, 0, &err), "submit");
    await_begun(other.client);
    since = now_ms();
    ok(kvs_cancel(r, &outcome, CALL_MS, &err), "cancel");
    cr_assert(now_ms() - since < SOON_MS, "CANCEL took %llu ms", (unsigned long long)(now_ms() - since));
    cr_assert_eq(outcome, KVS_CANCEL_STOPPED, "%u", outcome);
    cr_assert_eq(kvs_request_end(r, &err), KVS_E_CANCELLED);
    cr_assert_not_null(strstr(err.msg, "stopped at sequence 0 of 1"), "%s", err.msg);
    for (int i = 0; i < 3; i++)
        cr_assert_eq(results[i].status, KVS_E_CANCELLED);
    answered_soon(&other, since);
    big.length = 5; /* its memory is its own again */
    ok(kvs_decode(&big.decode, CALL_MS, &err), "the same again");
    leave(&big);
    leave(&other);
}

Test(compute_stop, a_decode_is_cancelled_within_itself)
{
    cancelled(false);
}

Test(compute_stop, an_extend_is_cancelled_within_itself)
{
    cancelled(true);
}

Test(compute_stop, a_decode_ends_at_its_deadline)
{
    kvs_request *r = NULL;
    uint32_t outcome = 99;
    tenant big, other;
    uint64_t since;

    join(&big, WIDTH);
    join(&other, 1);
    ok(kvs_submit_decode(&big.decode, &r, 500, &err), "submit");
    await_begun(other.client);
    ok(kvs_wait(r, CALL_MS, &err), "an answer");
    since = now_ms();
    answered_soon(&other, since);
    ok(kvs_cancel(r, &outcome, CALL_MS, &err), "cancel: its memory");
    cr_assert_eq(kvs_request_end(r, &err), KVS_E_DEADLINE);
    cr_assert_eq(big.result.status, KVS_E_BUSY);
    leave(&big);
    leave(&other);
}

Test(compute_stop, a_decode_ends_with_its_client)
{
    pid_t pid = fork();
    uint64_t since;
    tenant other;
    int status;

    cr_assert(pid >= 0);
    if (pid == 0) {
        tenant big;

        join(&big, WIDTH);
        (void)kvs_decode(&big.decode, 0, &err);
        _exit(1); /* it is killed before */
    }
    join(&other, 1);
    await_begun(other.client);
    since = now_ms();
    cr_assert_eq(kill(pid, SIGKILL), 0);
    answered_soon(&other, since);
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_assert(WIFSIGNALED(status));
    leave(&other);
}

/* It is let run for drain.timeout_ms, and no longer. */
Test(compute_stop, a_decode_does_not_outlast_the_daemon)
{
    kvs_request *r = NULL;
    tenant big, other;
    uint64_t since;

    join(&big, WIDTH);
    join(&other, 1);
    ok(kvs_submit_decode(&big.decode, &r, 0, &err), "submit");
    await_begun(other.client);
    since = now_ms();
    (void)kill(d.pid, SIGTERM);
    cr_assert_eq(daemon_wait(&d, CALL_MS), 0);
    cr_assert(now_ms() - since < SOON_MS, "it ended after %llu ms", (unsigned long long)(now_ms() - since));
    (void)kvs_wait(r, CALL_MS, &err);
    cr_assert_neq(kvs_request_end(r, &err), KVS_OK);
    leave(&big);
    leave(&other);
    cr_assert(daemon_start(&d, NULL)); /* for the end of the test */
}
