#include "proto/ctl/busy.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "proto/layout.h"

enum { TOKENS = 64, START_MS = 30000, STEP_MS = 2 };
enum busy_state { BUSY_SLEEPS, BUSY_STARTS, BUSY_WORKS, BUSY_FAILED };

struct busy_shared {
    _Atomic uint32_t state, stop;
    _Atomic uint64_t calls;
    kvs_err err; /* of FAILED */
};

static void step(void)
{
    (void)nanosleep(&(struct timespec){0, STEP_MS * 1000000L}, NULL);
}

/* ---- the other process ---- */

typedef struct loop {
    device *d;
    device_queue *q;
    device_mem *mem;
    int32_t *lens, *table;
    kvs_mla_decode_args args;
} loop;

static uint8_t *take(uint8_t **at, uint64_t bytes)
{
    uint8_t *p = *at;

    *at += (bytes + 255) / 256 * 256;
    return p;
}

/* All operands in one piece of device memory, which begins as zeros; each sequence has blocks from all over it. */
static kvs_status prepare(loop *l, const busy_shape *x, kvs_err *err)
{
    uint64_t rows = (uint64_t)x->n_seqs * x->heads, page = TOKENS * (KVS_MLA_LATENT + KVS_MLA_ROPE) * 2, had;
    uint64_t bytes = x->blocks * page + rows * (KVS_MLA_LATENT * 4 + KVS_MLA_ROPE * 2 + 4) + 8 * 256;
    uint32_t entries = x->n_seqs * x->blocks_a_seq;
    kvs_status s = l->d->ops->mem_create(l->d, bytes, &l->mem, err);
    uint8_t *at;

    if (s == KVS_OK)
        s = l->d->ops->queue_open(l->d, DEVICE_COMPUTE, &l->q, err);
    if (s != KVS_OK)
        return s;
    l->lens = calloc(x->n_seqs, sizeof *l->lens);
    l->table = calloc(entries, sizeof *l->table);
    if (l->lens == NULL || l->table == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "busy process: no memory for %u table entries", entries);
    for (uint32_t i = 0; i < entries; i++)
        l->table[i] = (int32_t)((uint64_t)i * 7919 % x->blocks);
    for (uint32_t i = 0; i < x->n_seqs; i++)
        l->lens[i] = (int32_t)(x->blocks_a_seq * TOKENS);
    at = l->d->ops->mem_base(l->mem, 0, &had);
    l->args = (kvs_mla_decode_args){
        .view = {take(&at, x->blocks * page), page, page, x->blocks, TOKENS, (uint32_t)page / TOKENS,
                 KVS_FORMAT_mla_bf16},
        .seq_len = l->lens,
        .block_table = l->table,
        .table_stride = x->blocks_a_seq,
        .n_seqs = x->n_seqs,
        .table_width = x->blocks_a_seq,
        .s_q = 1,
        .h_q = x->heads,
        .sm_scale = 0.04F,
    };
    l->args.q_nope = (kvs_strided){take(&at, rows * KVS_MLA_LATENT * 2), (uint64_t)x->heads * KVS_MLA_LATENT * 2,
                                   KVS_MLA_LATENT * 2};
    l->args.q_pe =
        (kvs_strided){take(&at, rows * KVS_MLA_ROPE * 2), (uint64_t)x->heads * KVS_MLA_ROPE * 2, KVS_MLA_ROPE * 2};
    l->args.out = (kvs_strided){take(&at, rows * KVS_MLA_LATENT * 2), (uint64_t)x->heads * KVS_MLA_LATENT * 2,
                                KVS_MLA_LATENT * 2};
    l->args.lse = (kvs_strided){take(&at, rows * 4), (uint64_t)x->heads * 4, 4};
    return KVS_OK;
}

static kvs_status call(loop *l, kvs_err *err)
{
    kvs_mla_decode_result r;
    uint64_t mark = 0;
    kvs_status s = l->d->ops->mla_decode(l->q, &l->args, &r, &mark, err);

    return s == KVS_OK ? l->d->ops->wait(l->q, mark, err) : s;
}

static kvs_status work(const busy_shape *x, busy_open open, void *ud, struct busy_shared *m, kvs_err *err)
{
    loop l = {0};
    kvs_status s = open(ud, &l.d, err);

    if (s == KVS_OK)
        s = prepare(&l, x, err);
    if (s == KVS_OK)
        s = call(&l, err);
    if (s == KVS_OK)
        atomic_store(&m->state, BUSY_WORKS);
    while (s == KVS_OK && !atomic_load(&m->stop)) {
        s = call(&l, err);
        (void)atomic_fetch_add(&m->calls, 1);
    }
    return s; /* the process ends, and what it has with it */
}

_Noreturn static void child(const busy_shape *x, busy_open open, void *ud, struct busy_shared *m, pid_t parent)
{
    kvs_err err = {.msg = ""};

    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(1); /* it died before the line above */
    while (atomic_load(&m->state) == BUSY_SLEEPS)
        step();
    if (work(x, open, ud, m, &err) != KVS_OK) {
        m->err = err;
        atomic_store(&m->state, BUSY_FAILED);
    }
    _exit(0);
}

/* ---- this process ---- */

kvs_status busy_start(busy *b, const busy_shape *shape, busy_open open, void *ud, kvs_err *err)
{
    pid_t parent = getpid();
    void *p;

    *b = (busy){0};
    if (shape->n_seqs == 0)
        return KVS_OK;
    p = mmap(NULL, sizeof *b->shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return kvs_fail(err, KVS_E_NO_MEMORY, "busy process: mmap: %s", strerror(errno));
    b->shared = p;
    b->pid = fork();
    if (b->pid == 0)
        child(shape, open, ud, b->shared, parent);
    if (b->pid < 0) {
        b->pid = 0;
        busy_stop(b);
        return kvs_fail(err, KVS_E_SYS, "busy process: fork: %s", strerror(errno));
    }
    return KVS_OK;
}

kvs_status busy_go(busy *b, kvs_err *err)
{
    atomic_store(&b->shared->state, BUSY_STARTS);
    for (int waited = 0; waited < START_MS; waited += STEP_MS) {
        uint32_t state = atomic_load(&b->shared->state);

        if (state == BUSY_WORKS)
            return KVS_OK;
        if (state == BUSY_FAILED)
            return kvs_fail(err, b->shared->err.status, "busy process: %.150s", b->shared->err.msg);
        if (waitpid(b->pid, NULL, WNOHANG) == b->pid) {
            b->pid = 0;
            return kvs_fail(err, KVS_E_SYS, "busy process: it has ended");
        }
        step();
    }
    return kvs_fail(err, KVS_E_DEADLINE, "busy process: not at work after %d s", START_MS / 1000);
}

uint64_t busy_calls(const busy *b)
{
    return atomic_load(&b->shared->calls);
}

void busy_stop(busy *b)
{
    if (b->pid > 0) {
        atomic_store(&b->shared->stop, 1);
        (void)kill(b->pid, SIGKILL);
        (void)waitpid(b->pid, NULL, 0);
    }
    if (b->shared != NULL)
        (void)munmap(b->shared, sizeof *b->shared);
    *b = (busy){0};
}
