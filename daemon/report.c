#include "daemon/report.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "daemon/request.h"
#include "proto/text.h"
#include "proto/wire.h"

__attribute__((format(printf, 2, 3))) static void add(char line[REPORT_BYTES], const char *fmt, ...)
{
    size_t at = strlen(line);
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(line + at, REPORT_BYTES - at, fmt, ap);
    va_end(ap);
}

void report_reasons(char *buf, size_t cap, uint32_t reasons)
{
    static const struct {
        uint32_t bit;
        const char *text;
    } TEXTS[] = {
        {HEALTH_NO_PIECE, "no memory is usable yet"},
        {HEALTH_PIECE_FAILED, "the pool could not grow to its full size"},
        {HEALTH_STUCK, "a call of the device or the system takes more than 10 s"},
        {HEALTH_DEVICE_LOST, "the device is lost"},
        {HEALTH_DRAINS, "no new work is taken"},
        {HEALTH_OLD_CONFIG, "the configuration was refused, the last accepted one is in use"},
    };
    size_t at = 0;

    buf[0] = '\0';
    for (unsigned i = 0; i < sizeof TEXTS / sizeof TEXTS[0]; i++) {
        int n;

        if ((reasons & TEXTS[i].bit) == 0)
            continue;
        n = snprintf(buf + at, cap - at, "%s%s", at > 0 ? ", " : "", TEXTS[i].text);
        if (n < 0 || (size_t)n >= cap - at)
            return;
        at += (size_t)n;
    }
}

static void add_mib(char line[REPORT_BYTES], uint64_t bytes)
{
    add(line, bytes % (1 << 30) == 0 ? "%llu GiB" : "%llu MiB",
        (unsigned long long)(bytes % (1 << 30) == 0 ? bytes >> 30 : bytes >> 20));
}

static void compose(char line[REPORT_BYTES], const report_facts *f)
{
    static const char *const STATES[] = {"serving", "starting", "degraded", "draining"};
    char why[REPORT_BYTES];

    line[0] = '\0';
    add(line, "%s", f->health < sizeof STATES / sizeof STATES[0] ? STATES[f->health] : "unknown");
    report_reasons(why, sizeof why, f->reasons);
    add(line, "%s%s", why[0] != '\0' ? ": " : "", why);
    add(line, "; pool: ");
    if (f->usable_bytes < f->max_bytes) {
        add_mib(line, f->usable_bytes);
        add(line, " of ");
    }
    add_mib(line, f->max_bytes);
    add(line, f->usable_bytes < f->max_bytes ? " pinned so far" : " pinned");
    if (f->note[0] != '\0')
        add(line, "; %s", f->note);
    text_tame(line); /* a line break would be another message to the manager */
}

bool report_update(report *r, const report_facts *f, uint64_t now_us)
{
    char line[REPORT_BYTES];
    bool progress_only = f->usable_bytes < f->max_bytes && (f->reasons & HEALTH_PIECE_FAILED) == 0;

    compose(line, f);
    if (strcmp(line, r->line) == 0)
        return false;
    if (progress_only && r->told_us != 0 && now_us - r->told_us < REPORT_EVERY_US)
        return false;
    memcpy(r->line, line, sizeof line);
    r->told_us = now_us;
    return true;
}
