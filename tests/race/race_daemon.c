/* The real daemon and libkvstride under ThreadSanitizer, in a storm of engines that are killed, stopped and hostile.
 *
 * race_daemon [OPS [KILLS [SEED [DAEMON_KILLS [PAUSES [THREADS]]]]]]: longer storms by hand. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/support/storm.h"

static const char CONFIG[] =
    "{\"pool\": {\"max_bytes\": \"1MiB\", \"extent_bytes\": \"128KiB\"}, \"device\": {\"kind\": \"cpu\"}}";

static bool afterwards(daemon_fixture *d, unsigned fds, unsigned mappings, char *why, size_t cap)
{
    /* Six of the eight extents: each of the other layouts may keep one. */
    if (!storm_left_nothing(d, why, cap) ||
        !storm_refill(d, 2, 6 * (128 * 1024 / (uint32_t)storm_slot_bytes(2)), why, cap))
        return false;
    if (!daemon_wait_fds(d, fds, 5000))
        (void)snprintf(why, cap, "%u descriptors are left where %u were", daemon_fds(d), fds);
    else if (!storm_wait_mappings(d, mappings))
        (void)snprintf(why, cap, "%u mappings are left where %u were", storm_mappings(d), mappings);
    else if (daemon_log_count(d, "Sanitizer") != 0)
        (void)snprintf(why, cap, "a sanitizer has something to say about the daemon");
    else if (daemon_stop(d, SIGTERM) != 0)
        (void)snprintf(why, cap, "the daemon did not end well");
    else
        return true;
    return false;
}

int main(int argc, char **argv)
{
    storm_plan p = {.ops = argc > 1 ? strtoull(argv[1], NULL, 0) : 3000,
                    .kills = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 0) : 15,
                    .seed = argc > 3 ? strtoull(argv[3], NULL, 0) : 1,
                    .daemon_kills = argc > 4 ? (uint32_t)strtoul(argv[4], NULL, 0) : 0,
                    .pauses = argc > 5 ? (uint32_t)strtoul(argv[5], NULL, 0) : 5,
                    .threads = argc > 6 ? (uint32_t)strtoul(argv[6], NULL, 0) : 2,
                    .engines = 6,
                    .layouts = 3,
                    .chains = 12,
                    .hostile = true};
    storm_result r = {0};
    daemon_fixture d;
    unsigned fds, mappings;
    bool ok;

    daemon_init(&d);
    ok = daemon_start(&d, CONFIG);
    fds = daemon_fds(&d);
    mappings = storm_mappings(&d);
    ok = ok && storm_run(&d, &p, &r);
    ok = ok && afterwards(&d, fds, mappings, r.why, sizeof r.why);
    (void)printf("%llu operations, %llu blocks stored, %llu loaded and compared, %llu engines killed\n",
                 (unsigned long long)r.ops, (unsigned long long)r.stores, (unsigned long long)r.loads,
                 (unsigned long long)r.kills);
    if (!ok) {
        char cmd[128];

        (void)printf("FAIL: %s\n", r.why);
        (void)snprintf(cmd, sizeof cmd, "tail -n 60 %s", d.log);
        (void)!system(cmd);
    }
    daemon_fini(&d);
    (void)printf("%d passed, %d failed\n", ok, !ok);
    return ok ? 0 : 1;
}
