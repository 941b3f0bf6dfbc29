#include "proto/ctl/progress.h"

#include <stdio.h>
#include <unistd.h>

#include "proto/ctl/clock.h"

bool progress_wanted(bool quiet)
{
    return !quiet && isatty(STDERR_FILENO);
}

void progress_show(const char *what, uint64_t done, uint64_t of)
{
    static uint64_t last;
    uint64_t now = clock_ns();

    if (now - last < 100000000 && done != of)
        return;
    last = now;
    (void)fprintf(stderr, "\r%s: %llu of %llu (%llu %%)\033[K", what, (unsigned long long)done, (unsigned long long)of,
                  (unsigned long long)(of ? done * 100 / of : 100));
    (void)fflush(stderr);
}

void progress_end(void)
{
    (void)fprintf(stderr, "\r\033[K");
}
