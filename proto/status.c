#include "proto/status.h"

#include <stdarg.h>
#include <stdio.h>

kvs_status(kvs_fail)(kvs_err *err, kvs_status s, const char *fmt, ...)
{
    va_list ap;

    if (err == NULL)
        return s;
    err->status = s;
    va_start(ap, fmt);
    (void)vsnprintf(err->msg, sizeof err->msg, fmt, ap);
    va_end(ap);
    return s;
}

const char *kvs_status_name(kvs_status s)
{
    switch (s) {
#define X(name, value, text)                                                                                           \
    case KVS_##name:                                                                                                   \
        return #name;
        KVS_STATUS_MAP(X)
#undef X
    }
    return "E_UNKNOWN";
}

const char *kvs_status_text(kvs_status s)
{
    switch (s) {
#define X(name, value, text)                                                                                           \
    case KVS_##name:                                                                                                   \
        return text;
        KVS_STATUS_MAP(X)
#undef X
    }
    return "a status of a newer protocol";
}
