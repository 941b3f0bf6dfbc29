#include "proto/layout.h"

#include <string.h>

enum { PAGE_ALIGN = 16 };

static const struct {
    const char *name;
    uint32_t row_bytes;
} FORMATS[] = {
#define X(name, id, row) [id] = {#name, row},
    KVS_FORMAT_MAP(X)
#undef X
};
enum { N_FORMATS = sizeof FORMATS / sizeof *FORMATS }; /* number 0 is none and stays empty */

const char *kvs_format_name(uint32_t format)
{
    return format < N_FORMATS ? FORMATS[format].name : NULL;
}

uint32_t kvs_format_row_bytes(uint32_t format)
{
    return format < N_FORMATS ? FORMATS[format].row_bytes : 0;
}

uint32_t kvs_format_page_align(uint32_t format)
{
    return format == KVS_FORMAT_fp8_blk584 ? 576 : format == KVS_FORMAT_fp8_blk528 ? 512 : PAGE_ALIGN;
}

kvs_status kvs_format_parse(const char *name, uint32_t *ret, kvs_err *err)
{
    /* dtype names of engines, for MLA geometry */
    static const struct {
        const char *name;
        uint32_t format;
    } ALIASES[] = {
        {"bf16", KVS_FORMAT_mla_bf16},    {"bfloat16", KVS_FORMAT_mla_bf16}, {"fp16", KVS_FORMAT_mla_fp16},
        {"float16", KVS_FORMAT_mla_fp16}, {"half", KVS_FORMAT_mla_fp16},     {"fp8", KVS_FORMAT_mla_fp8},
    };

    if (ret == NULL)
        return kvs_fail(err, KVS_E_INVALID, "format_parse: ret is NULL");
    if (name == NULL)
        return kvs_fail(err, KVS_E_UNSUPPORTED, "format: none given");
    for (uint32_t i = 1; i < N_FORMATS; i++) {
        if (FORMATS[i].name != NULL && strcmp(name, FORMATS[i].name) == 0) {
            *ret = i;
            return KVS_OK;
        }
    }
    for (size_t i = 0; i < sizeof ALIASES / sizeof *ALIASES; i++) {
        if (strcmp(name, ALIASES[i].name) == 0) {
            *ret = ALIASES[i].format;
            return KVS_OK;
        }
    }
    if (strcmp(name, "auto") == 0)
        return kvs_fail(err, KVS_E_UNSUPPORTED, "format: \"auto\" names no bytes; resolve it before asking");
    return kvs_fail(err, KVS_E_UNSUPPORTED, "format: \"%.64s\" is not known", name);
}
