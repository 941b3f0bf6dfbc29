#ifndef KVS_CONFIG_CONFIG_H
#define KVS_CONFIG_CONFIG_H

/* Configuration: one table of options that drives the parser, the defaults, --print-config, --check-config,
 * the README table and the JSON schema.
 *
 * Knows keys, types, ranges and help.  Does not know what a value is used for.  One thread at a time; a
 * config is a plain value that its holder may copy.
 *
 * The file is one JSON object; "pool.max_bytes" is key max_bytes of object pool.  Sizes are whole numbers of
 * bytes or strings like "64GiB"; a key starting with "_" is no exception, unknown keys are refused. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "proto/status.h"

enum {
    CONFIG_PATH_BYTES = 4096,
    CONFIG_WORD_BYTES = 64,
    CONFIG_SOCKET_BYTES = 108, /* a socket's path and its final zero */
    CONFIG_NAME_BYTES = 32,    /* a tenant's name and its final zero */
    CONFIG_MAX_TENANTS = 64,   /* "default" is one of them */
    CONFIG_MAX_UIDS = 64,      /* of one tenant */
};

/* SIZE(field, key, default, min, max, reloadable, help)    bytes
 * INT (field, key, default, min, max, unit, reloadable, help)
 * BOOL(field, key, default, reloadable, help)
 * PATH(field, key, default, reloadable, help)              a path of at most 107 bytes (a socket's limit)
 * WORD(field, key, default, choices, reloadable, help)     choices: "a|b|c"
 * MODE(field, key, default, reloadable, help)              octal file mode as a string */
#define CONFIG_KIB(n) (INT64_C(n) << 10)
#define CONFIG_MIB(n) (INT64_C(n) << 20)
#define CONFIG_GIB(n) (INT64_C(n) << 30)
#define CONFIG_TIB(n) (INT64_C(n) << 40)

#define CONFIG_OPTIONS(SIZE, INT, BOOL, PATH, WORD, MODE)                                                              \
    PATH(socket_path, "socket.path", "/run/kvstrided/kvstrided.sock", false, "socket for engines")                     \
    MODE(socket_mode, "socket.mode", 0660, false, "file mode of the engines' socket")                                  \
    PATH(admin_path, "admin.path", "/run/kvstrided/admin.sock", false,                                                 \
         "socket for kvstridectl and admin operations; its mode is always 0600")                                       \
    SIZE(pool_max_bytes, "pool.max_bytes", CONFIG_GIB(1), CONFIG_KIB(4), CONFIG_GIB(4095), true,                       \
         "host memory of the pool, in all; rounded down to whole extents")                                             \
    SIZE(pool_reserve_bytes, "pool.reserve_bytes", 0, 0, CONFIG_GIB(4095), false,                                      \
         "address space, up to which pool.max_bytes may grow by a reload; 0 = four times pool.max_bytes")              \
    SIZE(pool_extent_bytes, "pool.extent_bytes", 0, 0, CONFIG_GIB(1), false,                                           \
         "memory that belongs to one layout at a time; 0 = an eighth of the pool, 64MiB..256MiB")                      \
    INT(pool_max_slots, "pool.max_slots", 0, 0, 4294967294, "blocks", false,                                           \
        "exact number of blocks of each layout; 0 = as many as fit")                                                   \
    INT(pool_numa_node, "pool.numa_node", -1, -1, 1023, "node", false,                                                 \
        "memory node of the pool; -1 = the one next to the device; without effect where there is one node")            \
    PATH(                                                                                                              \
        pool_path, "pool.path", "", false,                                                                             \
        "folder on a tmpfs for the pool's memory, which then outlives the daemon; none = the service manager's store") \
    BOOL(pool_checksum, "pool.checksum", true, true,                                                                   \
         "checksum every block when it is stored; only such blocks come back after a restart")                         \
    WORD(device_kind, "device.kind", "auto", "auto|cpu|cuda", false,                                                   \
         "where regions live and kernels run; auto = cuda where it works, else cpu")                                   \
    SIZE(device_max_region_bytes, "device.max_region_bytes", CONFIG_GIB(4), CONFIG_KIB(4), CONFIG_TIB(4), true,        \
         "daemon regions (device slots and scratch), all clients together")                                            \
    SIZE(device_max_import_bytes, "device.max_import_bytes", CONFIG_GIB(64), 0, CONFIG_TIB(4), true,                   \
         "engine memory that one client may import")                                                                   \
    WORD(mover_path, "mover.path", "auto", "auto|engine|kernel", true,                                                 \
         "what copies blocks on a GPU: its copy engines, a kernel, or for each size what the calibration says")        \
    INT(mover_kernel_blocks, "mover.kernel_blocks", 0, 0, 1024, "thread blocks", true,                                 \
        "most that a copy by kernel takes at once; 0 = what the calibration found to be enough")                       \
    SIZE(mover_batch_bytes, "mover.batch_bytes", CONFIG_MIB(16), CONFIG_KIB(64), CONFIG_GIB(1), true,                  \
         "bytes that are handed to a device at once; more urgent work waits for one or two such batches.  Four times " \
         "that where only one tenant has clients, but for stores whose checksums processors make")                     \
    WORD(mover_sums, "mover.sums", "auto", "auto|cpu", true,                                                           \
         "what makes the checksums of stored blocks: a kernel on the GPU that holds them, while nothing else runs "    \
         "there, or always processors")                                                                                \
    WORD(mover_exchange, "mover.exchange", "auto", "auto|on|off", true,                                                \
         "two GPUs that load the same blocks for one tenant each load half and copy the rest from each other; auto = " \
         "where the calibration shows a gain.  A reload turns it off, and on only where it was on at the start")       \
    PATH(mover_calibration, "mover.calibration", "/var/lib/kvstrided", true,                                           \
         "folder of the tables that kvstridectl calibrate makes")                                                      \
    INT(max_clients, "limits.max_clients", 256, 1, 65536, "connections", true,                                         \
        "client connections of each tenant; the admin socket has 8 places besides")                                    \
    SIZE(max_body_bytes, "limits.max_body_bytes", CONFIG_MIB(1), CONFIG_KIB(4), CONFIG_MIB(16), false,                 \
         "largest request body")                                                                                       \
    INT(credit_requests, "limits.credit_requests", 256, 1, 65536, "requests", true,                                    \
        "requests that one client may have in flight")                                                                 \
    SIZE(credit_bytes, "limits.credit_bytes", CONFIG_GIB(4), CONFIG_MIB(1), CONFIG_TIB(4), true,                       \
         "block bytes that one client may have in flight")                                                             \
    SIZE(out_high_bytes, "limits.out_high_bytes", CONFIG_MIB(1), CONFIG_KIB(4), CONFIG_GIB(1), true,                   \
         "unsent reply bytes at which a client's requests are no longer read")                                         \
    SIZE(out_max_bytes, "limits.out_max_bytes", CONFIG_MIB(32), CONFIG_KIB(64), CONFIG_GIB(1), true,                   \
         "unsent reply bytes at which a client is dropped; at least out_high_bytes and max_body_bytes")                \
    SIZE(memory_bytes, "limits.memory_bytes", CONFIG_MIB(512), CONFIG_MIB(16), CONFIG_TIB(1), true,                    \
         "of all clients together: memory of requests in flight, of unsent replies and of large requests being read, " \
         "for each; above it those with more than an equal part are refused more, or not read.  Large requests that "  \
         "stall while others wait for their memory are dropped.  At least 8 times max_body_bytes, and twice for each " \
         "tenant")                                                                                                     \
    INT(write_timeout_ms, "limits.write_timeout_ms", 30000, 10, 3600000, "ms", true,                                   \
        "a client that reads nothing for this long is dropped")                                                        \
    INT(frame_timeout_ms, "limits.frame_timeout_ms", 10000, 10, 3600000, "ms", true,                                   \
        "a client that leaves HELLO or a frame unfinished for this long is dropped; sooner, see limits.memory_bytes")  \
    INT(request_budget, "limits.request_budget", 32, 1, 4096, "requests", true,                                        \
        "requests read from one client before the next client's turn")                                                 \
    INT(default_deadline_ms, "deadline.default_ms", 30000, 1, 3600000, "ms", true,                                     \
        "deadline of a request that names none")                                                                       \
    INT(max_deadline_ms, "deadline.max_ms", 600000, 1, 86400000, "ms", true,                                           \
        "longest deadline; longer ones are cut to it")                                                                 \
    INT(lease_max_ms, "lease.max_ms", 60000, 1, 86400000, "ms", true,                                                  \
        "longest life of a lease; longer ones are cut to it")                                                          \
    INT(lease_max_percent, "lease.max_percent", 50, 0, 100, "% of the pool", true,                                     \
        "bytes that the leases of one tenant may hold")                                                                \
    BOOL(metrics_enabled, "metrics.enabled", true, false, "serve metrics, health and a status page over HTTP")         \
    PATH(metrics_path, "metrics.path", "/run/kvstrided/metrics.sock", false, "socket for them")                        \
    MODE(metrics_mode, "metrics.mode", 0660, false, "file mode of that socket")                                        \
    INT(metrics_port, "metrics.port", 0, 0, 65535, "", false,                                                          \
        "TCP port for them on 127.0.0.1 and ::1 besides; 0 = none")                                                    \
    INT(drain_timeout_ms, "drain.timeout_ms", 10000, 0, 3600000, "ms", true,                                           \
        "on SIGTERM, how long copies in flight may take to finish")                                                    \
    WORD(log_level, "log.level", "info", "error|warn|info|debug", true, "least severe line that is logged")

/* A tenant: who comes in by its socket, what they may do, and what they pay with.  `tenants` is an array of objects of
 * these keys.  Tenant 0 is always "default", who comes in by socket.path; an entry of that name gives it limits.
 *
 * NAME (field, key, reloadable, help)                      1..31 of a-z 0-9 _ -, beginning with a letter
 * UIDS (field, key, reloadable, help)                      array of user numbers, or names that are looked up once
 * FLAGS(field, key, default, choices, reloadable, help)    array of words of "a|b|c", kept as bits in that order */
#define CONFIG_TENANT_OPTIONS(NAME, PATH, MODE, UIDS, FLAGS, SIZE, INT)                                                \
    NAME(name, "tenants.name", true, "who this is, also the socket's FileDescriptorName; \"default\" = socket.path")   \
    PATH(path, "tenants.path", "", false, "its listening socket; needed, but not for \"default\"")                     \
    MODE(mode, "tenants.mode", 0660, false, "file mode of its socket; not for \"default\"")                            \
    UIDS(uids, "tenants.uids", true,                                                                                   \
         "users that may come in, by number or as /etc/passwd names them; none = all whom the file mode lets in")      \
    FLAGS(ops, "tenants.ops", CONFIG_OPS_ALL, "cache|compute|pin|reset", true,                                         \
          "what its clients may ask for; DROP is part of reset")                                                       \
    SIZE(quota_bytes, "tenants.quota_bytes", 0, 0, CONFIG_TIB(4), true,                                                \
         "most bytes that its blocks may have in the pool; 0 = no limit of its own")                                   \
    SIZE(floor_bytes, "tenants.floor_bytes", 0, 0, CONFIG_TIB(4), true,                                                \
         "bytes of its blocks that no other tenant evicts")                                                            \
    SIZE(region_bytes, "tenants.region_bytes", 0, 0, CONFIG_TIB(4), true,                                              \
         "most bytes of its daemon regions; 0 = no limit of its own")                                                  \
    SIZE(import_bytes, "tenants.import_bytes", 0, 0, CONFIG_TIB(4), true,                                              \
         "most bytes that its clients may import together; 0 = no limit of its own")                                   \
    INT(lease_max_percent, "tenants.lease_max_percent", 100, 0, 100, "% of the quota or the pool", true,               \
        "bytes that its leases may hold; lease.max_percent applies besides")                                           \
    INT(link_share, "tenants.link_share", 100, 1, 10000, "weight", true,                                               \
        "its part of a busy link, against the other tenants'")

enum config_ops { CONFIG_OPS_CACHE = 1, CONFIG_OPS_COMPUTE = 2, CONFIG_OPS_PIN = 4, CONFIG_OPS_RESET = 8 };
enum { CONFIG_OPS_ALL = 15 };

typedef struct config_uids {
    uint32_t n, uid[CONFIG_MAX_UIDS]; /* rising; those behind n are 0 */
} config_uids;

#define CONFIG_FIELD_NAME(f, k, r, h)              char f[CONFIG_NAME_BYTES];
#define CONFIG_FIELD_SOCKET(f, k, d, r, h)         char f[CONFIG_SOCKET_BYTES];
#define CONFIG_FIELD_UIDS(f, k, r, h)              config_uids f;
#define CONFIG_FIELD_FLAGS(f, k, d, c, r, h)       int64_t f;
#define CONFIG_FIELD_SIZE(f, k, d, lo, hi, r, h)   int64_t f;
#define CONFIG_FIELD_INT(f, k, d, lo, hi, u, r, h) int64_t f;
#define CONFIG_FIELD_BOOL(f, k, d, r, h)           bool f;
#define CONFIG_FIELD_PATH(f, k, d, r, h)           char f[CONFIG_PATH_BYTES];
#define CONFIG_FIELD_WORD(f, k, d, c, r, h)        char f[CONFIG_WORD_BYTES];
#define CONFIG_FIELD_MODE(f, k, d, r, h)           int64_t f;
typedef struct config_tenant {
    CONFIG_TENANT_OPTIONS(CONFIG_FIELD_NAME, CONFIG_FIELD_SOCKET, CONFIG_FIELD_MODE, CONFIG_FIELD_UIDS,
                          CONFIG_FIELD_FLAGS, CONFIG_FIELD_SIZE, CONFIG_FIELD_INT)
    bool gone; /* a reload has taken it out: nobody comes in, it has no limits, and its name keeps its number */
} config_tenant;

typedef struct config {
    CONFIG_OPTIONS(CONFIG_FIELD_SIZE, CONFIG_FIELD_INT, CONFIG_FIELD_BOOL, CONFIG_FIELD_PATH, CONFIG_FIELD_WORD,
                   CONFIG_FIELD_MODE)
    uint32_t n_tenants; /* at least 1 */
    config_tenant tenants[CONFIG_MAX_TENANTS];
} config;

void config_default(config *c);

/* Parse `len` bytes of JSON over *c (start from config_default).  All or nothing: on failure *c is untouched
 * and err says key, value and range, or line and column.  E_CONFIG, or E_NO_MEMORY. */
kvs_status config_parse(config *c, const char *text, size_t len, kvs_err *err);

/* The same for a regular file of at most 1 MiB; messages start with its name.  E_CONFIG also for a file that
 * cannot be read. */
kvs_status config_load(config *c, const char *path, kvs_err *err);

/* Rules between keys (deadline.default_ms <= deadline.max_ms and the like); called by config_parse. */
kvs_status config_check(const config *c, kvs_err *err);

/* The number of the tenant with this name; CONFIG_MAX_TENANTS: there is none, or it is gone. */
uint32_t config_find_tenant(const config *c, const char *name);

/* "64GiB", "512KiB", "4096" -> bytes.  Units B KiB MiB GiB TiB only; E_CONFIG says what is wrong. */
kvs_status config_size_parse(const char *text, int64_t *ret, kvs_err *err);

/* One key that differs between two configs, with both values as people write them ("64GiB", "0660"). Borrowed
 * during the call. */
typedef struct config_change {
    const char *key; /* "pool.max_bytes", "tenants.NAME.quota_bytes", "tenants.NAME" if all of it is new or gone */
    bool reloadable; /* false: takes a restart */
    const char *from, *to;
} config_change;
typedef void config_on_change(void *ud, const config_change *change);

/* Take over into *live what of `fresh` may change while the daemon runs.  A tenant's name keeps its number for as long as
 * *live lives, also while it is gone: with CONFIG_MAX_TENANTS names used up, another new one waits for a restart.  The
 * mixture has still to pass config_check. */
void config_take_reloadable(config *live, const config *fresh);

/* Call on_change (may be NULL) for each key that differs, in table order; returns how many do. */
size_t config_changed(const config *from, const config *to, config_on_change *on_change, void *ud);

/* Effective values as a config file; the option table in Markdown; the JSON schema (draft 2020-12).
 * E_NO_MEMORY with nothing printed; E_SYS if `to` has failed. */
kvs_status config_print(const config *c, FILE *to);
kvs_status config_print_table(FILE *to);
kvs_status config_print_schema(FILE *to);

#endif
