#include "proto/ctl/trace.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/json.h"

enum { MAX_REQUESTS = 10000000, MAX_IDS_A_REQUEST = 1 << 20, MAX_LINE_BYTES = MAX_IDS_A_REQUEST * 32 };

typedef struct builder {
    trace *t;
    uint64_t cap_ids;
    uint32_t cap_requests;
} builder;

static kvs_status add_id(builder *b, uint64_t id, kvs_err *err)
{
    if (b->t->n_blocks == b->cap_ids) {
        uint64_t cap = b->cap_ids ? b->cap_ids * 2 : 4096;
        uint64_t *p = realloc(b->t->ids, cap * sizeof *p);

        if (p == NULL)
            return kvs_fail(err, KVS_E_NO_MEMORY, "no memory for a trace of more than %llu blocks",
                            (unsigned long long)b->cap_ids);
        b->t->ids = p;
        b->cap_ids = cap;
    }
    b->t->ids[b->t->n_blocks++] = id;
    return KVS_OK;
}

/* Ends the request whose ids were just added. */
static kvs_status end_request(builder *b, kvs_err *err)
{
    trace *t = b->t;
    uint64_t n;

    if (t->start == NULL || t->n_requests + 1 >= b->cap_requests) {
        uint32_t cap = b->cap_requests ? b->cap_requests * 2 : 1024;
        uint64_t *p = realloc(t->start, cap * sizeof *p);

        if (p == NULL)
            return kvs_fail(err, KVS_E_NO_MEMORY, "no memory for a trace of more than %u requests", b->cap_requests);
        if (t->start == NULL)
            p[0] = 0;
        t->start = p;
        b->cap_requests = cap;
    }
    n = t->n_blocks - t->start[t->n_requests];
    if (n > t->longest)
        t->longest = (uint32_t)n;
    t->start[++t->n_requests] = t->n_blocks;
    return KVS_OK;
}

/* Of a text of one line, whose number in the file is said elsewhere. */
static void drop_line_number(kvs_err *err)
{
    static const char FIRST[] = "line 1, ";
    const size_t n = sizeof FIRST - 1;

    if (strncmp(err->msg, FIRST, n) == 0)
        memmove(err->msg, err->msg + n, strlen(err->msg + n) + 1);
}

static kvs_status add_line(builder *b, const char *line, size_t len, kvs_err *err)
{
    json *doc = NULL;
    const json_node *list;
    kvs_status s = json_parse(line, len, &doc, err);
    uint32_t n = 0;

    if (s != KVS_OK) {
        drop_line_number(err);
        return s;
    }
    list = json_type_of(json_root(doc)) == JSON_OBJECT ? json_member(json_root(doc), "hash_ids") : NULL;
    if (list == NULL || json_type_of(list) != JSON_ARRAY)
        s = kvs_fail(err, KVS_E_CONFIG, "want an object with an array \"hash_ids\"");
    for (const json_node *i = s == KVS_OK ? json_first(list) : NULL; i != NULL && s == KVS_OK; i = json_next(i)) {
        int64_t id;

        if (!json_whole(i, &id) || id < 0)
            s = kvs_fail(err, KVS_E_CONFIG, "hash_ids[%u]: want a whole number of 0..2^53", n);
        else if (++n > MAX_IDS_A_REQUEST)
            s = kvs_fail(err, KVS_E_CONFIG, "hash_ids: more than %d blocks", MAX_IDS_A_REQUEST);
        else
            s = add_id(b, (uint64_t)id, err);
    }
    json_destroy(doc);
    return s == KVS_OK ? end_request(b, err) : s;
}

/* As getline, but a file that is no trace may be one line without an end.  *ret_len 0: the end of the file, or ferror. */
static kvs_status read_line(FILE *f, char **line, size_t *cap, size_t *ret_len, kvs_err *err)
{
    size_t len = 0;
    int c = 0;

    while (c != '\n' && (c = getc_unlocked(f)) != EOF) {
        if (len == *cap) {
            size_t more = *cap != 0 ? *cap * 2 : 4096;
            char *p = more <= MAX_LINE_BYTES ? realloc(*line, more) : NULL;

            if (p == NULL)
                return kvs_fail(err, KVS_E_CONFIG, "more than %zu bytes without an end", len);
            *line = p;
            *cap = more;
        }
        (*line)[len++] = (char)c;
    }
    *ret_len = len;
    return KVS_OK;
}

static bool is_blank(const char *line, size_t len)
{
    size_t i = 0;

    while (i < len && strchr(" \t\r\n", line[i]) != NULL && line[i] != '\0')
        i++;
    return i == len;
}

kvs_status trace_read(trace *ret, const char *path, kvs_err *err)
{
    trace t = {0};
    builder b = {&t, 0, 0};
    kvs_err why = {0};
    kvs_status s = KVS_OK;
    char *line = NULL;
    size_t cap = 0, len = 0;
    unsigned long n = 0;
    FILE *f = fopen(path, "r");

    if (f == NULL)
        return kvs_fail(err, KVS_E_CONFIG, "%.120s: %s", path, strerror(errno));
    while (s == KVS_OK) {
        n++;
        s = read_line(f, &line, &cap, &len, &why);
        if (s == KVS_OK && len == 0)
            break;
        if (s != KVS_OK || is_blank(line, len))
            continue;
        s = b.t->n_requests < MAX_REQUESTS ? add_line(&b, line, len, &why)
                                           : kvs_fail(&why, KVS_E_CONFIG, "more than %d requests", MAX_REQUESTS);
    }
    if (s == KVS_OK && ferror(f))
        s = kvs_fail(&why, KVS_E_CONFIG, "%s", strerror(errno));
    free(line);
    (void)fclose(f);
    if (s != KVS_OK) {
        trace_free(&t);
        return kvs_fail(err, s, "%.100s, line %lu: %.120s", path, n, why.msg);
    }
    if (t.n_requests == 0)
        return kvs_fail(err, KVS_E_CONFIG, "%.120s: no requests in it", path);
    *ret = t;
    return KVS_OK;
}

/* xorshift64*: small and repeatable; nothing here needs better. */
static uint32_t draw(uint64_t *seed, uint32_t below)
{
    *seed ^= *seed >> 12;
    *seed ^= *seed << 25;
    *seed ^= *seed >> 27;
    return (uint32_t)((*seed * UINT64_C(2685821657736338717)) >> 33) % below;
}

/* A chat is a system prompt (one of 4) and its own blocks; each of its requests repeats all so far and adds a
 * few. */
kvs_status trace_generate(trace *ret, uint32_t n_requests, uint32_t longest, uint64_t seed, kvs_err *err)
{
    enum { CHATS = 16, SYSTEM_PROMPTS = 4, SYSTEM_BLOCKS = 3 };
    struct {
        uint64_t id;
        uint32_t prompt, len;
    } chat[CHATS] = {{0}};
    trace t = {0};
    builder b = {&t, 0, 0};
    uint64_t next_chat = 1;
    kvs_status s = KVS_OK;

    seed = seed ? seed : 1;
    for (uint32_t r = 0; r < n_requests && s == KVS_OK; r++) {
        uint32_t c = draw(&seed, CHATS);

        if (chat[c].id == 0 || chat[c].len >= longest) {
            chat[c].id = next_chat++;
            chat[c].prompt = draw(&seed, SYSTEM_PROMPTS);
            chat[c].len = SYSTEM_BLOCKS;
        }
        chat[c].len += 1 + draw(&seed, 3);
        if (chat[c].len > longest)
            chat[c].len = longest;
        for (uint32_t i = 0; i < chat[c].len && s == KVS_OK; i++)
            s = add_id(&b, i < SYSTEM_BLOCKS ? (uint64_t)chat[c].prompt * SYSTEM_BLOCKS + i : (chat[c].id << 20) + i,
                       err);
        if (s == KVS_OK)
            s = end_request(&b, err);
    }
    if (s != KVS_OK)
        trace_free(&t);
    else
        *ret = t;
    return s;
}

void trace_free(trace *t)
{
    free(t->start);
    free(t->ids);
    *t = (trace){0};
}
