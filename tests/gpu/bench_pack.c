/* bench_pack: client pack beside an engine in its own process, with other settings than the library's own.
 *
 *   bench_pack [-r ROUNDS] [CHUNK_MIB:CHUNKS:CTAS]...     0: as the library likes it; without any: 0:0:0
 *
 * For each setting the rows of `kvstridectl bench` about packed pages, a line each: GB/s, of one raw copy of the same run, and
 * the engine's speed meanwhile, of its speed alone.  kvstrided must lie beside this program or in the PATH. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/ctl/bench_list.h"
#include "proto/ctl/bench_side.h"
#include "proto/ctl/bench_user.h"
#include "proto/ctl/private.h"

static const char *const SETTINGS[] = {"pool.max_bytes=5GiB", "pool.reserve_bytes=6GiB",
                                       "device.max_region_bytes=16GiB"};

static void print(const bench_list *l, const char *setting)
{
    for (uint32_t i = 0; i + 1 < l->n; i += 2) {
        const bench_figure *speed = &l->figures[i], *rate = &l->figures[i + 1];

        (void)printf("%-12s %-66s %6.2f GB/s  %.4f of raw  engine %.4f%s\n", setting, rate->name, rate->value,
                     rate->judged, speed->judged, bench_met(speed) && bench_met(rate) ? "" : "  MISSED");
    }
    (void)fflush(stdout);
}

static kvs_status one(const char *setting, const char *socket, int rounds, const double gbs[2], kvs_err *err)
{
    static bench_list l;
    bench_tune t = {0};
    unsigned long mib = 0, chunks = 0, ctas = 0;
    kvs_status s;

    if (sscanf(setting, "%lu:%lu:%lu", &mib, &chunks, &ctas) != 3)
        return kvs_fail(err, KVS_E_INVALID, "%.40s: is not CHUNK_MIB:CHUNKS:CTAS", setting);
    t = (bench_tune){mib << 20, (uint32_t)chunks, (uint32_t)ctas};
    memset(&l, 0, sizeof l);
    s = bench_packed(&l, socket, &t, rounds, gbs, err);
    print(&l, setting);
    return s;
}

static kvs_status run(int argc, char **argv, kvs_err *err)
{
    static const char *const OWN[] = {"0:0:0"};
    private_daemon d = {0};
    bench_raw raw = {0};
    double gbs[2] = {0, 0};
    int rounds = 3;
    kvs_status s = private_start(&d, SETTINGS, 3, err);

    if (argc > 1 && strcmp(argv[0], "-r") == 0) {
        rounds = atoi(argv[1]);
        argv += 2;
        argc -= 2;
    }
    if (s == KVS_OK)
        s = bench_raw_open(&raw, err);
    for (int load = 0; load < 2 && s == KVS_OK; load++)
        s = bench_raw_gbs(&raw, load != 0, &gbs[load], err);
    (void)printf("raw: store %.2f, load %.2f GB/s\n", gbs[0], gbs[1]);
    for (int i = 0; i < (argc > 0 ? argc : 1) && s == KVS_OK; i++)
        s = one(argc > 0 ? argv[i] : OWN[0], d.socket, rounds, gbs, err);
    bench_raw_close(&raw);
    private_stop(&d);
    return s;
}

int main(int argc, char **argv)
{
    kvs_err err = {.msg = ""};
    kvs_status s = run(argc - 1, argv + 1, &err);

    if (s == KVS_E_UNSUPPORTED) {
        (void)printf("SKIP: %s\n", err.msg);
        return 0;
    }
    if (s != KVS_OK)
        (void)printf("bench_pack: %s\n", err.msg);
    return s == KVS_OK ? 0 : 1;
}
