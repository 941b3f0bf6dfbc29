#ifndef KVS_TESTS_GPU_GPU_H
#define KVS_TESTS_GPU_GPU_H

/* What every GPU test program begins and ends with: open the device, run the tests by name, print a sum that
 * tests/run reads.  Without a usable GPU all tests count as skipped, and one line says why.
 *
 * Knows device_cuda.h.  Single thread.  The device is the program's until gpu_run returns. */

#include <stdbool.h>
#include <stddef.h>

#include "kernels/device_cuda.h"

typedef struct gpu_test {
    const char *name;
    bool (*run)(device *d);
} gpu_test;

/* Arguments: parts of names; a test runs if one of them fits, or if there is none.  "--subset sanitizer" is
 * KVS_GPU_SUBSET; other arguments that begin with '-' are for others.  Returns main's status. */
int gpu_run(const gpu_test *tests, size_t n, int argc, char **argv);

/* Print where and why, and return false. */
#define GPU_FAIL(...) gpu_fail(__func__, __LINE__, __VA_ARGS__)
__attribute__((format(printf, 3, 4))) bool gpu_fail(const char *where, int line, const char *fmt, ...);

/* KVS_GPU_SUBSET is set: few and small cases, for runs under a sanitizer.  Its timing hides races: a control run need not
 * corrupt anything then. */
bool gpu_subset(void);

double gpu_seconds(void); /* of a clock that never goes back */

#endif
