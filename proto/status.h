#ifndef KVS_PROTO_STATUS_H
#define KVS_PROTO_STATUS_H

/* Result codes for the whole tree: functions return them, replies carry them, clients see them unchanged.
 *
 * Knows nothing of sockets, devices or the daemon.  Any thread.  Plain values: no ownership.
 * The numbers are protocol; append, never renumber. */

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default) /* part of libkvstride */

#define KVS_STATUS_MAP(X)                                                                                              \
    X(OK, 0, "ok")                                                                                                     \
    X(E_PROTO, 1, "malformed frame or body")                                                                           \
    X(E_LIMIT, 2, "request exceeds a limit")                                                                           \
    X(E_NOT_FOUND, 3, "not found")                                                                                     \
    X(E_NO_SPACE, 4, "no free slot and nothing may be evicted")                                                        \
    X(E_CONFIG, 5, "invalid configuration")                                                                            \
    X(E_SYS, 6, "system call failed")                                                                                  \
    X(E_DEVICE, 7, "device call failed")                                                                               \
    X(E_DEVICE_LOST, 8, "device context lost; the daemon restarts")                                                    \
    X(E_VERSION, 9, "no protocol version in common")                                                                   \
    X(E_UNSUPPORTED, 10, "operation, format or option not supported here")                                             \
    X(E_DENIED, 11, "not allowed on this socket")                                                                      \
    X(E_INVALID, 12, "a field has a value outside its range")                                                          \
    X(E_RANGE, 13, "an id, slot, length or index is out of range")                                                     \
    X(E_STATE, 14, "object is not in the state that the request needs")                                                \
    X(E_EXISTS, 15, "key is already stored; nothing was moved")                                                        \
    X(E_BUSY, 16, "in use, being written, or over the granted credit")                                                 \
    X(E_DEADLINE, 17, "deadline passed")                                                                               \
    X(E_CANCELLED, 18, "cancelled")                                                                                    \
    X(E_AWAY, 19, "the daemon is not reachable")                                                                       \
    X(E_PARTIAL, 20, "some items failed; see the status of each")                                                      \
    X(E_CORRUPT, 21, "checksum does not match")                                                                        \
    X(E_NO_MEMORY, 22, "out of memory")                                                                                \
    X(E_STALE, 23, "id or generation of an earlier life of the object")

typedef enum kvs_status {
#define X(name, value, text) KVS_##name = (value),
    KVS_STATUS_MAP(X)
#undef X
} kvs_status;

enum { KVS_ERR_MSG_BYTES = 256 };

/* Filled once, by the function that sees the failure: what, value, limit.  Never on success. */
typedef struct kvs_err {
    kvs_status status;
    char msg[KVS_ERR_MSG_BYTES]; /* zero-terminated UTF-8 */
} kvs_err;

/* Record `fmt` in `err` (may be NULL) and return `s`: one line explains and leaves. */
__attribute__((format(printf, 3, 4))) kvs_status kvs_fail(kvs_err *err, kvs_status s, const char *fmt, ...);
#ifdef __clang_analyzer__ /* it does not look into status.c: let it know that the result is `s` */
#define kvs_fail(err, s, ...) ((kvs_fail)((err), (s), __VA_ARGS__), (s))
#endif

/* Name ("E_LIMIT") and sentence of a status; "E_UNKNOWN" and its sentence for a number that is none. */
const char *kvs_status_name(kvs_status s);
const char *kvs_status_text(kvs_status s);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
