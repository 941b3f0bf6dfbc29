/* Any bytes as a config file.  What is accepted must print as a file that means the same; what is refused
 * must leave the config alone and give one line of reason; json must read its own pretty text back. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/config.h"
#include "config/json.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void need(int truth, const char *what, const char *detail)
{
    if (truth)
        return;
    fprintf(stderr, "%s: %s\n", what, detail);
    abort();
}

static void check_reason(kvs_status st, const kvs_err *err)
{
    need(err->status == st, "status differs", err->msg);
    need(err->msg[0] != '\0', "no reason", "");
    need(strchr(err->msg, '\n') == NULL, "more than one line", err->msg);
}

static void try_json(const char *text, size_t size)
{
    kvs_err err = {0};
    json *j = NULL, *again = NULL;
    char *pretty = NULL;
    size_t len = 0;
    FILE *to;
    kvs_status st = json_parse(text, size, &j, &err);

    if (st != KVS_OK) {
        need(j == NULL, "a document beside a failure", err.msg);
        check_reason(st, &err);
        return;
    }
    to = open_memstream(&pretty, &len);
    need(to != NULL, "no memory", "");
    json_pretty(text, size, to);
    fclose(to);
    need(json_parse(pretty, len, &again, &err) == KVS_OK, "pretty text is refused", err.msg);
    need(json_type_of(json_root(j)) == json_type_of(json_root(again)), "pretty text differs", pretty);
    json_destroy(j);
    json_destroy(again);
    free(pretty);
}

static void try_config(const char *text, size_t size)
{
    kvs_err err = {0};
    config c, before, again;
    char *printed = NULL;
    size_t len = 0;
    FILE *to;
    kvs_status st;

    config_default(&c);
    before = again = c;
    st = config_parse(&c, text, size, &err);
    if (st != KVS_OK) {
        check_reason(st, &err);
        need(memcmp(&c, &before, sizeof c) == 0, "a refused text changed the config", err.msg);
        return;
    }
    to = open_memstream(&printed, &len);
    need(to != NULL, "no memory", "");
    need(config_print(&c, to) == KVS_OK, "not printed", "");
    fclose(to);
    need(config_parse(&again, printed, len, &err) == KVS_OK, "printed config is refused", err.msg);
    need(config_changed(&c, &again, NULL, NULL) == 0, "printed config differs", printed);
    free(printed);
}

static void try_size(const char *text, size_t size)
{
    kvs_err err = {0};
    int64_t v = -1;
    char *word = strndup(text, size);

    need(word != NULL, "no memory", "");
    need(config_size_parse(word, &v, &err) != KVS_OK || v >= 0, "negative size", word);
    free(word);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *text = (const char *)data;

    try_json(text, size);
    try_config(text, size);
    try_size(text, size);
    return 0;
}
