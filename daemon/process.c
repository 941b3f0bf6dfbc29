#include "daemon/process.h"

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/log.h"
#include "kernels/host_memory.h"

void process_raise_fds(void)
{
    struct rlimit lim;

    if (getrlimit(RLIMIT_NOFILE, &lim) != 0 || lim.rlim_cur >= lim.rlim_max)
        return;
    lim.rlim_cur = lim.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &lim);
}

uint32_t process_client_fds(void)
{
    struct rlimit lim;
    rlim_t reserve;

    if (getrlimit(RLIMIT_NOFILE, &lim) != 0 || lim.rlim_cur > INT32_MAX)
        return INT32_MAX;
    reserve = lim.rlim_cur / 8 < 64 ? lim.rlim_cur / 8 : 64;
    return (uint32_t)(lim.rlim_cur - reserve);
}

/* The journal says in the environment which stream is its own. */
bool process_logs_to_journal(void)
{
    const char *stream = getenv("JOURNAL_STREAM");
    unsigned long long dev, ino;
    struct stat st;

    return stream != NULL && sscanf(stream, "%llu:%llu", &dev, &ino) == 2 && fstat(STDERR_FILENO, &st) == 0 &&
           st.st_dev == dev && st.st_ino == ino;
}

/* Requests of some hundred keys come and go: what they free is for the next one, not for the kernel, which would clear each
 * page anew. */
void process_keep_memory(void)
{
    (void)mallopt(M_MMAP_THRESHOLD, 4 << 20);
    (void)mallopt(M_TRIM_THRESHOLD, 16 << 20);
    (void)mallopt(M_TOP_PAD, 1 << 20);
}

/* Some drivers count what they pin against this limit, and then say only that it failed. */
void process_check_lock_limit(const config *c)
{
    struct rlimit lim;

    if (getrlimit(RLIMIT_MEMLOCK, &lim) != 0)
        return;
    if (lim.rlim_cur < lim.rlim_max) {
        lim.rlim_cur = lim.rlim_max;
        (void)setrlimit(RLIMIT_MEMLOCK, &lim);
    }
    if (lim.rlim_cur != RLIM_INFINITY && lim.rlim_cur < (rlim_t)c->pool_max_bytes)
        log_event(LOG_LEVEL_WARN, "lock_limit",
                  " bytes=%llu pool_max_bytes=%lld hint=\"LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited\"",
                  (unsigned long long)lim.rlim_cur, (long long)c->pool_max_bytes);
}

/* It starts all the same: what does not fit is refused piece by piece, and STATUS says so; but only after minutes of pinning. */
void process_check_memory(const config *c)
{
    const uint64_t total = kvs_host_total();

    if ((uint64_t)c->pool_max_bytes > total)
        log_event(
            LOG_LEVEL_WARN, "pool_above_memory",
            " pool_max_bytes=%lld memory_bytes=%llu hint=\"this machine, or MemoryMax= of the unit, has less: lower "
            "pool.max_bytes\"",
            (long long)c->pool_max_bytes, (unsigned long long)total);
}
