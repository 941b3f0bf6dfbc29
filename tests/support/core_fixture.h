#ifndef KVS_TESTS_CORE_FIXTURE_H
#define KVS_TESTS_CORE_FIXTURE_H

/* Core fixture: the request layer with a simulated clock, real workers on the cpu device behind the faulty one, and
 * clients whose frames and replies never touch a socket.
 *
 * Knows request.h and the wire.  The test's thread plays the loop.
 * Ownership: the fixture owns core, device, sink and clients; answers own their reply. */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/request.h"
#include "proto/layout.h"
#include "tests/support/fault_device.h"
#include "tests/support/sink.h"

enum { FX_MAX_BODY = 1 << 20, FX_LAYERS = 2, FX_TOKENS = 4, FX_PAGE = FX_TOKENS * 1152, FX_SLOT = FX_LAYERS * FX_PAGE };

typedef struct fx {
    sink sink;
    device *dev;    /* the faulty one */
    device *second; /* a plain one besides, with fx_open_two; else NULL */
    device *third;  /* with fx_open_exchanging_three */
    bool all_faulty;
    config cfg;
    core *core;
    uint64_t now_us;
    uint32_t depth; /* batches that the first device says it likes to have queued; 0: as the cpu device */
    int fds_before;
} fx;

typedef struct fx_client {
    fx *f;
    peer *peer;
    reply *first, **last;
    uint64_t next_id;
    size_t out_bytes; /* what the sender claims to have queued */
    bool closed;
    uint8_t *counters; /* mapped in HELLO */
} fx_client;

typedef struct fx_answer {
    reply *reply;
    wire_header head;
    kvs_status status;
    char msg[KVS_ERR_MSG_BYTES];
    wire_in in; /* at the payload */
} fx_answer;

typedef struct fx_region {
    uint32_t id, n_slots;
    uint64_t bytes;
    uint8_t token[16];
    uint8_t *base; /* the client's mapping; NULL: imported */
    int fd;
} fx_region;

typedef struct fx_body {
    uint8_t bytes[FX_MAX_BODY];
    wire_out out;
} fx_body;

/* ---- the daemon ---- */
void fx_config(fx *f);        /* defaults for tests; change f->cfg, then fx_open */
void fx_open(fx *f);          /* returns when the arena is usable */
void fx_open_starting(fx *f); /* returns at once */
void fx_open_two(fx *f);      /* fx_open with a second device */
/* With a second faulty device; both keep two batches queued, of 64 KiB, and exchange what they load. */
void fx_open_exchanging(fx *f);
void fx_open_exchanging_three(fx *f); /* three of them */
void fx_close(fx *f);           /* clients must be gone; checks that no descriptor was leaked and fsck's law holds */
void fx_run(fx *f, unsigned n); /* run n completions */
void fx_advance(fx *f, uint64_t us); /* move the clock and tick */
int fx_count_fds(void);

/* ---- clients ---- */
void fx_connect(fx_client *c, fx *f, bool admin);             /* no HELLO */
void fx_connect_tenant(fx_client *c, fx *f, uint32_t tenant); /* below cfg.n_tenants */
void fx_client_open(fx_client *c, fx *f);                     /* with HELLO */
void fx_client_open_tenant(fx_client *c, fx *f, uint32_t tenant);
void fx_admin_open(fx_client *c, fx *f);
void fx_gone(fx_client *c);   /* peer_gone, then completions until closed */
void fx_forget(fx_client *c); /* closed otherwise: what is left of it in the test */

fx_body *fx_new(void);                                   /* an empty body; fx_send frees it */
uint64_t fx_send(fx_client *c, uint16_t op, fx_body *b); /* returns the id */
kvs_status fx_send_frame(fx_client *c, uint16_t op, uint64_t id, uint64_t deadline_us, fx_body *b, const int *fds,
                         uint32_t n_fds);
uint64_t fx_send_deadline(fx_client *c, uint16_t op, uint64_t deadline_us, fx_body *b);
bool fx_has_reply(const fx_client *c, uint64_t id);
fx_answer fx_wait(fx_client *c, uint64_t id); /* runs completions until the reply is there */
fx_answer fx_call(fx_client *c, uint16_t op, fx_body *b);
void fx_done(fx_answer *a);
kvs_status fx_status(fx_client *c, uint16_t op, fx_body *b); /* of the reply; the rest is dropped */

/* ---- the usual ---- */
void fx_key(uint8_t key[32], uint64_t n);
uint32_t fx_ns(fx_client *c, const char *model);
fx_region fx_slots(fx_client *c, uint32_t ns, uint32_t n_slots);
fx_region fx_scratch(fx_client *c, uint64_t bytes);
fx_region fx_slots_on(fx_client *c, uint32_t on, uint32_t ns, uint32_t n_slots);
fx_region fx_scratch_on(fx_client *c, uint32_t on, uint64_t bytes);
void fx_unmap(fx_region *g);
void fx_take(fx_client *c, const fx_region *g, uint32_t n, wire_slot_ref *ret);
void fx_fill(const fx_region *g, uint32_t slot, uint64_t key); /* the pattern of a key */
bool fx_holds(const fx_region *g, uint32_t slot, uint64_t key);

typedef struct fx_move { /* STORE or LOAD of keys first .. first + n - 1 */
    uint32_t ns, region, n, flags, first_depth;
    uint64_t first;
    const wire_slot_ref *slots;             /* NULL: NONE for each */
    uint32_t after_counter, signal_counter; /* 0: none; else counter plus one */
    uint64_t after_value, signal_value;
} fx_move;
fx_body *fx_store_body(const fx_move *m);
fx_body *fx_load_body(const fx_move *m);
kvs_status fx_store(fx_client *c, const fx_move *m, uint32_t *ret_status); /* ret_status: [n] or NULL */
kvs_status fx_load(fx_client *c, const fx_move *m, wire_load_result *ret);
uint32_t fx_lookup(fx_client *c, uint32_t ns, uint64_t first, uint32_t n);
fx_body *fx_keys_body(uint32_t ns, uint64_t first, uint32_t n);

uint64_t fx_counter(const fx_client *c, uint32_t i); /* of the daemon's half */
uint64_t fx_counter_error(const fx_client *c, uint32_t i);
void fx_raise(fx_client *c, uint32_t i, uint64_t value); /* of the client's half */

/* A member "a.b" of a STATUS section, or "a.1.b" with an element of an array, as a number; -1 if it is not there. */
double fx_number(fx_client *admin, uint32_t section, const char *path);

#endif
