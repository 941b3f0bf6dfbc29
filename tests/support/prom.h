#ifndef KVS_TESTS_SUPPORT_PROM_H
#define KVS_TESTS_SUPPORT_PROM_H

/* A strict reader of Prometheus' text format 0.0.4, and the HTTP client that fetches it.
 *
 * Knows the format and its conventions.  Does not know what the daemon counts.  One thread.  Owns what it read. */

#include <stdbool.h>
#include <stddef.h>

/* GET `path` by a UNIX socket; the body, to be freed, zero-terminated.  NULL: no answer.  *ret_code: 200, ... */
char *http_get(const char *socket, const char *path, int *ret_code);
/* Send `request` as it is; the whole answer, head and body. */
char *http_say(const char *socket, const char *request, size_t len);

typedef struct prom_sample {
    char name[128];   /* with the suffix */
    char labels[512]; /* as written: a="b",c="d" */
    double value;
} prom_sample;

typedef struct prom {
    prom_sample *samples;
    size_t n, bytes;
    char why[256]; /* of a refusal */
} prom;

/* False: ret->why.  Checked: each family has one HELP and one TYPE before its samples and is in one piece; names, labels
 * and escapes; UTF-8; no series twice; no value that is not finite; counters end in _total; buckets grow, end with +Inf
 * and agree with _count. */
bool prom_parse(prom *ret, const char *text);
void prom_free(prom *p);
/* Sum of the samples of `name` whose labels contain each of up to two words (NULL: any); -1: there is none. */
double prom_get(const prom *p, const char *name, const char *label, const char *label2);
/* Fetch and parse; false: p->why. */
bool prom_scrape(prom *p, const char *socket);

#endif
