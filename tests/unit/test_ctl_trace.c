/* Prefix traces of kvstridectl: read, refused, generated. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "proto/ctl/trace.h"

static char path[] = "/tmp/kvs-trace-XXXXXX";
static kvs_err err;

static void begin(void)
{
    int fd = mkstemp(path);

    cr_assert(fd >= 0);
    (void)close(fd);
}

static void end(void)
{
    (void)unlink(path);
}

TestSuite(ctl_trace, .init = begin, .fini = end);

static kvs_status read_text(trace *t, const char *text, size_t len)
{
    FILE *f = fopen(path, "w");

    cr_assert(f != NULL && fwrite(text, 1, len, f) == len && fclose(f) == 0);
    memset(t, 0x5a, sizeof *t);
    return trace_read(t, path, &err);
}

Test(ctl_trace, reads_requests_in_order_with_what_else_a_line_says)
{
    static const char TEXT[] =
        "{\"timestamp\": 0, \"input_length\": 6755, \"output_length\": 500, \"hash_ids\": [0, 1, 2]}\n"
        "\n \t\r\n"
        "{\"hash_ids\": []}\r\n"
        "{\"hash_ids\": [9007199254740992, 7], \"hash_idz\": [3]}";
    static const uint64_t IDS[] = {0, 1, 2, UINT64_C(9007199254740992), 7};
    trace t;

    cr_assert_eq(read_text(&t, TEXT, sizeof TEXT - 1), KVS_OK, "%s", err.msg);
    cr_assert_eq(t.n_requests, 3);
    cr_assert_eq(t.longest, 3);
    cr_assert_eq(t.n_blocks, 5);
    cr_assert_eq(t.start[0], 0);
    cr_assert_eq(t.start[1], 3);
    cr_assert_eq(t.start[2], 3);
    cr_assert_eq(t.start[3], 5);
    for (int i = 0; i < 5; i++)
        cr_assert_eq(t.ids[i], IDS[i]);
    trace_free(&t);
    trace_free(&t);
}

Test(ctl_trace, reads_more_requests_than_its_first_guess)
{
    FILE *f = fopen(path, "w");
    trace t;

    cr_assert_not_null(f);
    for (int i = 0; i < 5000; i++)
        (void)fprintf(f, "{\"hash_ids\":[%d,%d]}\n", i, i + 1);
    cr_assert_eq(fclose(f), 0);
    cr_assert_eq(trace_read(&t, path, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(t.n_requests, 5000);
    for (uint32_t i = 0; i < 5000; i++) {
        cr_assert_eq(t.start[i + 1] - t.start[i], 2);
        cr_assert_eq(t.ids[t.start[i] + 1], i + 1);
    }
    trace_free(&t);
}

Test(ctl_trace, names_file_line_and_fault)
{
    static const struct {
        const char *text, *line, *why;
    } CASES[] = {
        {"{\"hash_ids\":[1]}\n{\"hash_ids\":[1}\n", "line 2", "column"},
        {"{\"hash_ids\":[1]}\n\n\n[1]\n", "line 4", "hash_ids"},
        {"{\"ids\":[1]}\n", "line 1", "\"hash_ids\""},
        {"{\"hash_ids\":{\"a\":1}}\n", "line 1", "\"hash_ids\""},
        {"{\"hash_ids\":[0,-1]}\n", "line 1", "hash_ids[1]"},
        {"{\"hash_ids\":[0,1,1.5]}\n", "line 1", "hash_ids[2]"},
        {"{\"hash_ids\":[\"1\"]}\n", "line 1", "hash_ids[0]"},
        {"{\"hash_ids\":[9007199254740993]}\n", "line 1", "hash_ids[0]"},
        {"{\"hash_ids\":[1],\"hash_ids\":[2]}\n", "line 1", "hash_ids"},
        {"{\"hash_ids\":[1]} {}\n", "line 1", "column"},
        {"garbage", "line 1: column 1: ", "expected"},
        {"{\"hash_ids\":[1]}\n\n{\"hash_ids\":[2", "line 3: column 15: ", "expected"},
    };

    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        trace t;

        cr_assert_eq(read_text(&t, CASES[i].text, strlen(CASES[i].text)), KVS_E_CONFIG, "%s", CASES[i].text);
        cr_assert_not_null(strstr(err.msg, path), "%s", err.msg);
        cr_assert_not_null(strstr(err.msg, CASES[i].line), "%s: %s", CASES[i].text, err.msg);
        cr_assert_not_null(strstr(err.msg, CASES[i].why), "%s: %s", CASES[i].text, err.msg);
    }
}

Test(ctl_trace, refuses_a_zero_byte_in_a_line)
{
    static const char TEXT[] = "{\"hash_ids\":[1]}\n{\"hash_ids\":[1]}\0{}\n";
    trace t;

    cr_assert_eq(read_text(&t, TEXT, sizeof TEXT - 1), KVS_E_CONFIG);
    cr_assert_not_null(strstr(err.msg, "line 2"), "%s", err.msg);
}

Test(ctl_trace, refuses_a_line_without_an_end)
{
    trace t;

    cr_assert_eq(trace_read(&t, "/dev/zero", &err), KVS_E_CONFIG);
    cr_assert_str_eq(err.msg, "/dev/zero, line 1: more than 33554432 bytes without an end");
    cr_assert_eq(read_text(&t, "{\"hash_ids\": [1]}", 17), KVS_OK, "the last line needs none");
    cr_assert_eq(t.n_blocks, 1);
    trace_free(&t);
}

Test(ctl_trace, refuses_what_has_no_requests)
{
    trace t;

    cr_assert_eq(read_text(&t, "", 0), KVS_E_CONFIG);
    cr_assert_not_null(strstr(err.msg, "no requests"), "%s", err.msg);
    cr_assert_eq(read_text(&t, "\n \n", 3), KVS_E_CONFIG);
    cr_assert_eq(trace_read(&t, "/tmp/kvs-no-such-trace", &err), KVS_E_CONFIG);
    cr_assert_not_null(strstr(err.msg, "/tmp/kvs-no-such-trace: No such file"), "%s", err.msg);
    cr_assert_eq(trace_read(&t, "/tmp", &err), KVS_E_CONFIG, "a folder is no trace");
}

static void generate(trace *t, uint32_t n, uint32_t longest, uint64_t seed)
{
    cr_assert_eq(trace_generate(t, n, longest, seed, &err), KVS_OK, "%s", err.msg);
}

Test(ctl_trace, generates_the_same_trace_from_the_same_seed)
{
    trace one, same, other;

    generate(&one, 300, 24, 5);
    generate(&same, 300, 24, 5);
    generate(&other, 300, 24, 6);
    cr_assert_eq(one.n_requests, 300);
    cr_assert_eq(one.n_blocks, same.n_blocks);
    cr_assert_eq(memcmp(one.ids, same.ids, one.n_blocks * sizeof *one.ids), 0);
    cr_assert_eq(memcmp(one.start, same.start, 301 * sizeof *one.start), 0);
    cr_assert(one.n_blocks != other.n_blocks || memcmp(one.ids, other.ids, one.n_blocks * sizeof *one.ids) != 0,
              "another seed, the same trace");
    trace_free(&one);
    trace_free(&same);
    trace_free(&other);
}

Test(ctl_trace, generates_chats_that_share_and_grow_within_the_limit)
{
    trace t;
    uint32_t repeats = 0;

    generate(&t, 500, 20, 1);
    cr_assert_leq(t.longest, 20);
    for (uint32_t r = 0; r < t.n_requests; r++) {
        const uint64_t *ids = t.ids + t.start[r];
        uint64_t n = t.start[r + 1] - t.start[r];

        cr_assert(n >= 1 && n <= 20);
        for (uint32_t q = 0; q < r; q++)
            if (t.start[q + 1] - t.start[q] > 4 && n > 4 && t.ids[t.start[q] + 4] == ids[4]) {
                repeats++; /* a later turn of the same chat begins as the earlier one */
                cr_assert_eq(memcmp(t.ids + t.start[q], ids, 5 * sizeof *ids), 0);
                break;
            }
    }
    cr_assert(repeats > 100, "only %u requests go on with a chat", repeats);
    trace_free(&t);
    generate(&t, 10, 1, 0); /* shorter than a system prompt; a seed of 0 */
    cr_assert_eq(t.longest, 1);
    cr_assert_eq(t.n_blocks, 10);
    trace_free(&t);
}
