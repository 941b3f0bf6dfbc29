#include "tests/gpu/gpu.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

bool gpu_fail(const char *where, int line, const char *fmt, ...)
{
    va_list ap;

    (void)printf("      %s:%d: ", where, line);
    va_start(ap, fmt);
    (void)vprintf(fmt, ap);
    va_end(ap);
    (void)printf("\n");
    return false;
}

bool gpu_subset(void)
{
    return getenv("KVS_GPU_SUBSET") != NULL;
}

double gpu_seconds(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static bool is_subset(const char *option)
{
    return strcmp(option, "--subset") == 0;
}

static bool wanted(const char *name, int argc, char **argv)
{
    bool any = false;

    for (int i = 1; i < argc; i++) {
        if (is_subset(argv[i]))
            i++; /* its word */
        if (i >= argc || argv[i][0] == '-' || is_subset(argv[i - 1]))
            continue;
        any = true;
        if (strstr(name, argv[i]) != NULL)
            return true;
    }
    return !any;
}

int gpu_run(const gpu_test *tests, size_t n, int argc, char **argv)
{
    unsigned passed = 0, failed = 0, skipped = 0;
    device *d = NULL;
    kvs_err err = {.status = KVS_OK};
    kvs_status s;

    (void)setvbuf(stdout, NULL, _IOLBF, 0);
    for (int i = 1; i < argc; i++) {
        if (!is_subset(argv[i]))
            continue;
        if (i + 1 == argc || strcmp(argv[i + 1], "sanitizer") != 0) {
            (void)fprintf(stderr, "--subset: the only one is \"sanitizer\"\n");
            return 2;
        }
        (void)setenv("KVS_GPU_SUBSET", "1", 1);
    }
    s = device_cuda_open(&d, 0, &err);
    if (s != KVS_OK)
        (void)printf("SKIP: %s\n", err.msg);
    for (size_t i = 0; i < n; i++) {
        double start = gpu_seconds();
        bool good;

        if (!wanted(tests[i].name, argc, argv))
            continue;
        if (s != KVS_OK) {
            skipped++;
            continue;
        }
        good = tests[i].run(d);
        (void)printf("%s  %s (%.0f ms)\n", good ? "ok  " : "FAIL", tests[i].name, (gpu_seconds() - start) * 1e3);
        passed += good;
        failed += !good;
    }
    if (d != NULL)
        d->ops->close(d);
    /* A driver that is there and refuses is not the same as none. */
    if (s != KVS_OK && s != KVS_E_UNSUPPORTED)
        failed++;
    (void)printf("%u passed, %u failed, %u skipped\n", passed, failed, skipped);
    return failed > 0;
}
