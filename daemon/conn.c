#include "daemon/conn.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "daemon/disposal.h"
#include "daemon/log.h"
#include "daemon/sockio.h"
#include "daemon/tenant.h"

enum {
    CHECK_STEP_MS = 50,   /* time-outs are this coarse, so that many connections share one look */
    HALF_CHECK_MS = 250,  /* no event tells that a half-closed peer has gone altogether */
    STALL_RETRY_MS = 100, /* after ETOOMANYREFS or ENOBUFS: no event tells when it is worth a try */
    /* Who has waited for readers' memory for so long makes those go that have it and do not come on: fewer bytes than these in
     * so many looks, CHECK_STEP_MS apart.  Short, since there may be a queue of such; looks and not a time, so that nobody goes
     * because the loop did not read; fewer bytes than a socket holds in so many turns. */
    MEMORY_WAIT_MS = 500,
    MEMORY_LOOKS = 3,
    MEMORY_LOOKS_BYTES = 256 << 10,
};

typedef struct conn_list { /* links of one list */
    conn *next, **at;      /* at: the pointer that points here; NULL: not in the list */
} conn_list;

struct conn {
    conn_host *host;
    conn_list all, later, waiting;
    uv_poll_t poll, pid_poll;
    int fd, pid_fd;
    int events;         /* asked of poll */
    unsigned n_handles; /* not yet closed by the loop */
    peer *peer;         /* NULL: never made, or closed */
    uint64_t id;        /* as operators see it */
    peer_info info;
    frame_reader reader;
    reply *out, **out_tail;
    size_t out_bytes;                                    /* that they take */
    size_t in_bytes;                                     /* that the reader takes for a large frame */
    size_t seen_bytes;                                   /* of that frame, when it last came on */
    unsigned n_looks;                                    /* since then, while others waited for memory */
    uint64_t waiting_us;                                 /* in the list of those since */
    uint64_t opened_us, partial_us, blocked_us, half_us; /* since when; 0: not */
    uint64_t answered_us;                                /* the latest reply went out; 0: none has */
    uint64_t unread_us;    /* bytes are in the socket since, when its tenant had had its time; 0: they are not */
    const char *farewell;  /* reason: nothing more is read, and closed when all replies are out; NULL: not */
    const char *condemned; /* reason; closed on the next turn, outside of any call from the peer */
    bool quick;            /* the latest request came soon after an answer */
    bool asking;           /* an answer is due; what goes out otherwise are events */
    bool more;             /* frames may be left in the reader */
    bool stalled;          /* sending failed for lack of kernel memory */
    bool closing;
};

uint64_t conn_now_us(void)
{
    return uv_hrtime() / 1000;
}

/* ---- lists ---- */
static void list_add(conn **list, conn *c, conn_list *(*of)(conn *))
{
    conn_list *l = of(c);

    if (l->at != NULL)
        return;
    l->next = *list;
    l->at = list;
    if (l->next != NULL)
        of(l->next)->at = &l->next;
    *list = c;
}

static void list_remove(conn *c, conn_list *(*of)(conn *))
{
    conn_list *l = of(c);

    if (l->at == NULL)
        return;
    *l->at = l->next;
    if (l->next != NULL)
        of(l->next)->at = l->at;
    l->at = NULL;
}

static conn_list *in_all(conn *c)
{
    return &c->all;
}

static conn_list *in_later(conn *c)
{
    return &c->later;
}

static conn_list *in_waiting(conn *c)
{
    return &c->waiting;
}

/* Behind those who are in it already. */
static void do_later(conn *c)
{
    conn_host *h = c->host;

    if (c->closing || c->later.at != NULL)
        return;
    c->later = (conn_list){NULL, h->later_end};
    *h->later_end = c;
    h->later_end = &c->later.next;
}

static void not_later(conn *c)
{
    if (c->later.at == NULL)
        return;
    if (c->host->later_end == &c->later.next)
        c->host->later_end = c->later.at;
    list_remove(c, in_later);
}

static void condemn(conn *c, const char *reason)
{
    if (c->condemned == NULL)
        c->condemned = reason;
    do_later(c);
}

static uint64_t ms(int64_t n)
{
    return (uint64_t)n * 1000;
}

/* Some time-out of this connection runs: see to it that conns_check comes. */
static void wait_until(conn_host *h, uint64_t due_us)
{
    if (due_us < h->due_us)
        h->due_us = due_us;
}

/* ---- memory of readers ---- */
static uint64_t equal_part(const conn_host *h)
{
    return (uint64_t)h->config->memory_bytes / ((uint64_t)h->n_clients + h->n_admins + h->n_strangers);
}

/* What the next bytes need is the reader's already, or its due whoever waits. */
static bool may_take(const conn *c)
{
    const size_t need = frame_need(&c->reader);

    return need <= FRAME_START_BYTES || need <= c->reader.cap || c->info.is_admin || need <= equal_part(c->host);
}

static bool is_room_for(const conn *c)
{
    const conn_host *h = c->host;

    return h->in_bytes == 0 ||
           h->in_bytes + frame_need(&c->reader) - FRAME_START_BYTES <= (uint64_t)h->config->memory_bytes;
}

/* Operators and strangers are of none. */
static uint32_t tenant_of(const conn *c)
{
    return c->info.is_admin || c->info.denied[0] != '\0' ? CONFIG_MAX_TENANTS : c->info.tenant;
}

/* Its tenant stays within an equal part of the tenants': then it waits for its own tenant's clients only. */
static bool is_room_in_tenant(const conn *c)
{
    const conn_host *h = c->host;

    return tenant_of(c) < CONFIG_MAX_TENANTS && h->n_tenants > 1 &&
           h->tenant_in_bytes[tenant_of(c)] + frame_need(&c->reader) - FRAME_START_BYTES <=
               (uint64_t)h->config->memory_bytes / h->n_tenants;
}

/* Who has to wait holds nothing that others wait for: a large frame, and it alone, is in memory of its own, which is given back
 * when the frame has been taken, or its time is over.  The memory goes to who has waited longest, so that who comes back again
 * and again is behind those who stay; in a tenant's part, to who has waited longest of that tenant. */
static bool may_read(const conn *c)
{
    const conn_host *h = c->host;

    return may_take(c) || (h->waiting == NULL && is_room_for(c)) ||
           (h->tenant_waiting[tenant_of(c)] == 0 && is_room_in_tenant(c));
}

static void begin_waiting(conn *c)
{
    conn_host *h = c->host;

    if (c->waiting.at != NULL)
        return;
    c->waiting = (conn_list){NULL, h->waiting_end};
    *h->waiting_end = c;
    h->waiting_end = &c->waiting.next;
    h->tenant_waiting[tenant_of(c)]++;
    c->waiting_us = conn_now_us();
    /* Nobody tells that it has gone meanwhile, nor that others stall. */
    wait_until(h, c->waiting_us + ms(CHECK_STEP_MS));
}

static void end_waiting(conn *c)
{
    if (c->waiting.at == NULL)
        return;
    if (c->waiting.next == NULL)
        c->host->waiting_end = c->waiting.at;
    list_remove(c, in_waiting);
    c->host->tenant_waiting[tenant_of(c)]--;
}

/* What its reader takes has changed.  False: it takes less. */
static bool count_in(conn *c)
{
    const size_t had = c->in_bytes;

    c->in_bytes = c->reader.cap > FRAME_START_BYTES ? c->reader.cap - FRAME_START_BYTES : 0;
    c->host->in_bytes += c->in_bytes - had;
    c->host->tenant_in_bytes[tenant_of(c)] += c->in_bytes - had;
    if (had == 0) {
        c->seen_bytes = c->reader.end - c->reader.start;
        c->n_looks = 0;
    }
    return c->in_bytes >= had;
}

/* Those who may go on take their memory here and now, before anyone else does; they read on their next turn. */
static void serve_waiting(conn_host *h)
{
    bool passed[CONFIG_MAX_TENANTS + 1] = {false}; /* somebody of it waits on */

    for (conn *w = h->waiting, *next; w != NULL; w = next) {
        next = w->waiting.next;
        if (!may_take(w) && (w != h->waiting || !is_room_for(w)) && (passed[tenant_of(w)] || !is_room_in_tenant(w))) {
            passed[tenant_of(w)] = true;
            continue;
        }
        end_waiting(w);
        if (frame_want(&w->reader).len == 0)
            condemn(w, "out_of_memory");
        (void)count_in(w);
        do_later(w);
    }
}

static void count_in_and_serve(conn *c)
{
    if (!count_in(c))
        serve_waiting(c->host);
}

static void rest(conn *c)
{
    frame_reader_rest(&c->reader);
    count_in_and_serve(c);
}

/* ---- the end ---- */
/* One more of its kind, or one less. */
static void count(conn_host *h, const peer_info *info, uint32_t by)
{
    if (info->denied[0] != '\0') {
        h->n_strangers += by;
    } else if (info->is_admin) {
        h->n_admins += by;
    } else {
        h->n_clients += by;
        h->n_tenants -= h->n_tenant[info->tenant] > 0;
        h->n_tenant[info->tenant] += by;
        h->n_tenants += h->n_tenant[info->tenant] > 0;
    }
}

static void maybe_free(conn *c)
{
    if (!c->closing || c->n_handles != 0 || c->peer != NULL)
        return;
    list_remove(c, in_all);
    count(c->host, &c->info, UINT32_MAX);
    free(c);
}

static void on_handle_closed(uv_handle_t *h)
{
    conn *c = h->data;

    c->n_handles--;
    maybe_free(c);
}

static void on_peer_closed(void *ud)
{
    conn *c = ud;

    c->peer = NULL;
    maybe_free(c);
}

static void drop_replies(conn *c)
{
    while (c->out != NULL) {
        reply *r = c->out;

        c->out = r->next;
        reply_destroy(r);
    }
    c->out_tail = &c->out;
    c->host->out_bytes -= c->out_bytes;
    c->out_bytes = 0;
}

/* The one way out; any number of times.  Not from inside a call of the peer: see condemn. */
static void conn_close(conn *c)
{
    if (c->closing)
        return;
    c->closing = true;
    not_later(c);
    end_waiting(c);
    drop_replies(c);
    frame_reader_fini(&c->reader);
    count_in_and_serve(c);
    if (c->pid_fd >= 0) {
        uv_close((uv_handle_t *)&c->pid_poll, on_handle_closed);
        (void)close(c->pid_fd);
    }
    uv_close((uv_handle_t *)&c->poll, on_handle_closed);
    sockio_close(c->fd);
    if (c->peer != NULL)
        peer_gone(c->peer, conn_now_us()); /* may end in on_peer_closed at once; the handles keep the memory */
}

/* A client that ended well or just went away. */
static void leave(conn *c, const char *reason)
{
    if (c->closing)
        return;
    log_event(LOG_LEVEL_DEBUG, "client_closed", " reason=%s conn=%" PRIu64 " uid=%u pid=%d", reason, c->id,
              (unsigned)c->info.uid, (int)c->info.pid);
    conn_close(c);
}

/* A client at fault: one line says so. */
static void drop(conn *c, const char *reason, const kvs_err *err)
{
    char text[2 * KVS_ERR_MSG_BYTES];

    if (c->closing)
        return;
    if (c->info.denied[0] != '\0') { /* the log knows since it came */
        leave(c, reason);
        return;
    }
    c->host->n_dropped++;
    if (c->host->edge != NULL)
        metrics_count(&c->host->edge->dropped, reason, 1);
    log_event(LOG_LEVEL_WARN, "client_dropped",
              " reason=%s conn=%" PRIu64 " uid=%u pid=%d in_flight=%u unsent_bytes=%zu%s%s", reason, c->id,
              (unsigned)c->info.uid, (int)c->info.pid, c->peer != NULL ? peer_in_flight(c->peer) : 0, c->out_bytes,
              err != NULL ? " msg=" : "", err != NULL ? log_quote(text, sizeof text, err->msg, strlen(err->msg)) : "");
    conn_close(c);
}

/* ---- what the loop is asked for ---- */
/* Who is paused has something to send, and is looked at again when that has gone. */
static bool is_paused(const conn *c)
{
    const conn_host *h = c->host;

    if (c->out_bytes >= (size_t)h->config->out_high_bytes)
        return true;
    return h->out_bytes >= (uint64_t)h->config->memory_bytes && c->out_bytes > 0 && c->out_bytes >= equal_part(h);
}

static void on_poll(uv_poll_t *h, int status, int events);

static void watch(conn *c)
{
    int events = 0;

    if (c->closing)
        return;
    if (c->half_us == 0 && !is_paused(c) && c->waiting.at == NULL)
        events |= UV_READABLE;
    if (c->out != NULL && !c->stalled)
        events |= UV_WRITABLE;
    if (events == c->events)
        return;
    c->events = events;
    if (events == 0)
        (void)uv_poll_stop(&c->poll);
    else
        (void)uv_poll_start(&c->poll, events, on_poll);
}

/* More of this client is likely to come: waking up would take it longer than a block of a few MB is on its way. */
static void stay_awake(const conn *c)
{
    if (c->quick)
        mailbox_stay_awake(c->host->mailbox, CONN_QUICK_US);
}

static void has_asked(conn *c)
{
    c->quick = c->answered_us != 0 && conn_now_us() - c->answered_us < CONN_QUICK_US;
    c->asking = true;
    stay_awake(c);
}

/* Something went out. */
static void was_answered(conn *c)
{
    if (!c->asking)
        return;
    c->asking = c->out != NULL || peer_in_flight(c->peer) > 0;
    c->answered_us = conn_now_us();
    stay_awake(c);
}

/* ---- replies ---- */
static void on_send(void *ud, reply *r)
{
    conn *c = ud;
    bool was_empty = c->out == NULL;

    if (c->closing || c->condemned != NULL) {
        reply_destroy(r);
        return;
    }
    r->next = NULL;
    r->sent = 0;
    *c->out_tail = r;
    c->out_tail = &r->next;
    c->out_bytes += r->held;
    c->host->out_bytes += r->held;
    if (!was_empty && c->out_bytes > (size_t)c->host->config->out_max_bytes)
        condemn(c, "unsent_replies");
    do_later(c);
}

static size_t on_out_bytes(const void *ud)
{
    return ((const conn *)ud)->out_bytes;
}

static bool on_is_behind(const void *ud)
{
    return is_paused(ud);
}

static void sent(conn *c, size_t n)
{
    while (c->out != NULL) {
        reply *r = c->out;
        size_t part = r->len - r->sent < n ? r->len - r->sent : n;

        r->sent += part;
        n -= part;
        if (r->sent < r->len)
            break;
        c->out = r->next;
        c->out_bytes -= r->held;
        c->host->out_bytes -= r->held;
        reply_destroy(r);
    }
    if (c->out == NULL)
        c->out_tail = &c->out;
}

/* Send until nothing is queued or the socket is full. */
static void flush(conn *c)
{
    c->stalled = false;
    while (!c->closing && c->out != NULL) {
        ssize_t n = sockio_send(c->fd, c->out);

        if (n >= 0) {
            sent(c, (size_t)n);
            c->blocked_us = 0;
            was_answered(c);
            continue;
        }
        if (errno == ETOOMANYREFS || errno == ENOBUFS || errno == ENOMEM)
            c->stalled = true;
        else if (errno != EAGAIN && errno != EWOULDBLOCK)
            leave(c, "peer_closed"); /* EPIPE, ECONNRESET: nobody is left who could read */
        break;
    }
    if (c->closing || c->out == NULL)
        return;
    if (c->blocked_us == 0)
        c->blocked_us = conn_now_us();
    wait_until(c->host,
               c->stalled ? conn_now_us() + ms(STALL_RETRY_MS) : c->blocked_us + ms(c->host->config->write_timeout_ms));
}

/* ---- requests ---- */
/* The stream has ended.  Gone altogether, or only done with asking? */
static void end_of_stream(conn *c)
{
    if (sockio_is_hung_up(c->fd)) {
        if (frame_is_partial(&c->reader))
            drop(c, "cut_frame", NULL);
        else
            leave(c, "peer_closed");
        return;
    }
    c->half_us = conn_now_us();
    wait_until(c->host, c->half_us + ms(HALF_CHECK_MS));
}

/* Out of step: what was asked before is still answered, as far as the socket takes it. */
static void fault(conn *c, const kvs_err *err)
{
    flush(c);
    drop(c, "protocol", err);
}

/* A stranger has been told. */
static void send_away(conn *c)
{
    flush(c);
    leave(c, "denied");
}

enum got { GOT_NOTHING, GOT_ALL, GOT_MORE }; /* ALL: the socket was empty afterwards */

static enum got receive(conn *c, size_t *bytes)
{
    int fds[SOCKIO_MAX_FDS];
    kvs_err err = {0};
    frame_span want;
    size_t n_fds;
    ssize_t n;

    rest(c);
    if (!may_read(c)) {
        begin_waiting(c);
        return GOT_NOTHING;
    }
    end_waiting(c);
    want = frame_want(&c->reader);
    (void)count_in(c);
    if (want.len == 0) {
        drop(c, "out_of_memory", NULL);
        return GOT_NOTHING;
    }
    n = sockio_receive(c->fd, want.base, want.len, fds, &n_fds);
    if (n <= 0) {
        if (n == 0)
            end_of_stream(c);
        else if (errno == EBADMSG)
            drop(c, "lost_descriptors", NULL);
        else if (errno != EAGAIN && errno != EWOULDBLOCK)
            leave(c, "peer_closed");
        return GOT_NOTHING;
    }
    *bytes += (size_t)n;
    has_asked(c);
    mailbox_drain(c->host->mailbox); /* before any request that came with these bytes */
    if (frame_got(&c->reader, (size_t)n, fds, n_fds, &err) != KVS_OK) {
        fault(c, &err);
        return GOT_NOTHING;
    }
    /* The kernel ends a read behind a message with descriptors: then a short read says nothing. */
    return (size_t)n < want.len && n_fds == 0 ? GOT_ALL : GOT_MORE;
}

/* What is left of a connection's turn. */
typedef struct allowance {
    int64_t budget; /* frames */
    uint64_t until_us;
} allowance;

/* Handle whole frames in the reader, as far as the turn goes.  False: stop reading this connection for now. */
static bool handle_frames(conn *c, allowance *t)
{
    uint64_t now_us = conn_now_us();
    kvs_err err = {0};
    frame f;

    while (t->budget > 0 && !c->closing && c->condemned == NULL && c->farewell == NULL && !is_paused(c)) {
        if (!frame_next(&c->reader, &f, &err)) {
            c->more = false;
            if (c->reader.broken != KVS_OK)
                fault(c, &err);
            return !c->closing;
        }
        c->partial_us = 0;
        if (peer_request(c->peer, &f, now_us, &err) == KVS_OK) {
            now_us = conn_now_us();
            t->budget = now_us < t->until_us ? t->budget - 1 : 0; /* one that took long was the last */
            continue;
        }
        if (c->info.denied[0] != '\0')
            send_away(c);
        else
            fault(c, &err);
    }
    return false;
}

/* All replies of a client that asks no more are out: good-bye. */
static void maybe_finish(conn *c)
{
    if (c->closing || c->half_us == 0 || c->more || c->out != NULL || peer_in_flight(c->peer) != 0)
        return;
    if (c->farewell != NULL)
        drop(c, c->farewell, NULL);
    else if (frame_is_partial(&c->reader))
        drop(c, "cut_frame", NULL);
    else
        leave(c, "end_of_stream");
}

static void settle(conn *c)
{
    if (!c->closing && c->condemned != NULL)
        drop(c, c->condemned, NULL);
    flush(c);
    maybe_finish(c);
    if (c->closing)
        return;
    rest(c);
    if (frame_is_partial(&c->reader) && !c->more && c->partial_us == 0 && c->farewell == NULL) {
        c->partial_us = conn_now_us();
        wait_until(c->host, c->partial_us + ms(c->host->config->frame_timeout_ms));
    }
    if ((c->more || c->unread_us != 0) && !is_paused(c))
        do_later(c); /* also after back-pressure: nothing else reminds us of frames that are in already */
    watch(c);
}

/* However many clients a tenant has, the others wait for one turn of it.  Operators' requests are few, and never wait. */
static bool had_its_time(const conn *c)
{
    return !c->info.is_admin && c->host->tenant_us[tenant_of(c)] >= CONN_TURN_US;
}

/* For so long it was we who did not read: that counts for no time-out of its own. */
static void was_unread(conn *c, uint64_t now_us)
{
    const uint64_t us = c->unread_us != 0 && now_us > c->unread_us ? now_us - c->unread_us : 0;

    c->opened_us += us;
    c->partial_us += c->partial_us != 0 ? us : 0;
    c->unread_us += us;
}

static void take_turn(conn *c, bool readable)
{
    const uint64_t began_us = conn_now_us();
    allowance t = {c->host->config->request_budget, began_us + CONN_TURN_US};
    enum got got = (readable || c->unread_us != 0) && c->half_us == 0 ? GOT_MORE : GOT_ALL;
    size_t bytes = 0;

    was_unread(c, began_us);
    c->unread_us = 0;
    while (handle_frames(c, &t)) { /* frames that are in first */
        if (got != GOT_MORE || bytes >= CONN_TURN_BYTES)
            break;
        got = receive(c, &bytes);
        if (got == GOT_NOTHING)
            break;
        c->more = true; /* until handle_frames finds none */
    }
    settle(c);
    if (!c->info.is_admin)
        c->host->tenant_us[tenant_of(c)] += conn_now_us() - began_us;
}

static void on_poll(uv_poll_t *h, int status, int events)
{
    conn *c = h->data;

    if (status < 0) { /* closed by the peer with replies unread; what it sent is still there, before the error */
        c->events = 0;
        events = UV_READABLE;
    }
    if (c->later.at != NULL && (c->more || c->unread_us != 0))
        events &= ~UV_READABLE; /* its turn comes with the others that have frames left */
    if ((events & UV_READABLE) != 0 && had_its_time(c)) {
        events &= ~UV_READABLE;
        c->unread_us = conn_now_us();
        do_later(c);
    }
    if (events == UV_WRITABLE && had_its_time(c))
        settle(c);
    else if (events != 0)
        take_turn(c, (events & UV_READABLE) != 0);
}

/* The process is dead, though a child of it may keep the socket open. */
static void on_process_end(uv_poll_t *h, int status, int events)
{
    conn *c = h->data;

    (void)status;
    (void)events;
    leave(c, "process_ended");
}

/* ---- beginning ---- */
static void watch_process(conn *c)
{
    struct rlimit lim;
    int pid_fd;

    if (getrlimit(RLIMIT_NOFILE, &lim) == 0 && (rlim_t)c->fd > lim.rlim_cur / 2)
        return; /* descriptors are getting scarce: clients need them more */
    pid_fd = sockio_peer_process(c->fd, c->info.pid);
    if (pid_fd < 0)
        return;
    if (uv_poll_init(c->host->loop, &c->pid_poll, pid_fd) != 0) {
        (void)close(pid_fd);
        return;
    }
    c->pid_fd = pid_fd;
    c->pid_poll.data = c;
    c->n_handles++;
    (void)uv_poll_start(&c->pid_poll, UV_READABLE, on_process_end);
}

static const peer_ops PEER_OPS = {on_send, on_out_bytes, on_is_behind, on_peer_closed};

kvs_status conn_open(conn_host *h, int fd, const peer_info *info, kvs_err *err)
{
    conn *c = calloc(1, sizeof *c);
    kvs_status s;
    int rc;

    if (c == NULL) {
        sockio_close(fd);
        return kvs_fail(err, KVS_E_NO_MEMORY, "connection: out of memory");
    }
    c->host = h;
    c->fd = fd;
    c->pid_fd = -1;
    c->info = *info;
    c->out_tail = &c->out;
    c->opened_us = conn_now_us();
    rc = uv_poll_init(h->loop, &c->poll, fd);
    if (rc != 0) {
        sockio_close(fd);
        free(c);
        return kvs_fail(err, KVS_E_SYS, "connection: %s", uv_strerror(rc));
    }
    c->poll.data = c;
    c->n_handles = 1;
    frame_reader_init(&c->reader, (uint32_t)h->config->max_body_bytes);
    c->reader.close_fd = disposal_close;
    list_add(&h->all, c, in_all);
    count(h, info, 1);
    s = peer_create(&c->peer, h->core, &PEER_OPS, c, info, c->opened_us, err);
    if (s != KVS_OK) {
        c->peer = NULL;
        conn_close(c);
        return s;
    }
    c->id = peer_conn_id(c->peer);
    if (h->edge != NULL && info->denied[0] == '\0')
        *(info->is_admin ? &h->edge->accepted_admins : &h->edge->accepted_clients) += 1;
    watch_process(c);
    watch(c);
    wait_until(h, c->opened_us + ms(h->config->frame_timeout_ms));
    return KVS_OK;
}

/* ---- all of them ---- */
void conn_host_init(conn_host *h, uv_loop_t *loop, core *c, mailbox *m, const config *cfg)
{
    *h = (conn_host){.loop = loop, .core = c, .mailbox = m, .config = cfg, .due_us = UINT64_MAX};
    h->waiting_end = &h->waiting;
    h->later_end = &h->later;
}

bool conns_turn(conn_host *h)
{
    conn *turn = h->later, *late = NULL, **late_end = &late; /* late: who waits on, in front of all who come now */

    memset(h->tenant_us, 0, sizeof h->tenant_us);
    h->later = NULL; /* what is added from here on waits for the next turn */
    h->later_end = &h->later;
    if (turn != NULL)
        turn->later.at = &turn;
    while (turn != NULL) {
        conn *c = turn;

        list_remove(c, in_later);
        if (!had_its_time(c)) {
            take_turn(c, false);
            continue;
        }
        settle(c);
        if (c->later.at == NULL)
            continue;
        not_later(c);
        c->later = (conn_list){NULL, late_end};
        *late_end = c;
        late_end = &c->later.next;
    }
    if (late != NULL) {
        *late_end = h->later;
        if (h->later != NULL)
            h->later->later.at = late_end;
        else
            h->later_end = late_end;
        h->later = late;
        late->later.at = &h->later;
    }
    return h->later != NULL;
}

/* The first time-out of the connection that has passed, or NULL; *ret_due: the next one to come. */
static const char *overdue(conn *c, uint64_t now_us, uint64_t *ret_due)
{
    uint64_t unfinished = ms(c->host->config->frame_timeout_ms), write = ms(c->host->config->write_timeout_ms);
    struct {
        uint64_t since, limit;
        const char *reason;
    } t[] = {{peer_said_hello(c->peer) ? 0 : c->opened_us, unfinished, "no_hello"},
             {c->partial_us, unfinished, "unfinished_frame"},
             {c->blocked_us, write, "reads_nothing"}};

    for (size_t i = 0; i < sizeof t / sizeof t[0]; i++) {
        if (t[i].since == 0)
            continue;
        if (now_us >= t[i].since + t[i].limit)
            return t[i].reason;
        if (t[i].since + t[i].limit < *ret_due)
            *ret_due = t[i].since + t[i].limit;
    }
    return NULL;
}

static void check_one(conn *c, uint64_t now_us)
{
    uint64_t due = UINT64_MAX;
    const char *reason;

    if (c->closing)
        return;
    if (c->partial_us != 0 && (is_paused(c) || c->waiting.at != NULL))
        c->partial_us = now_us; /* it is we who do not read */
    was_unread(c, now_us);
    reason = overdue(c, now_us, &due);
    if (reason != NULL) {
        drop(c, reason, NULL);
        return;
    }
    if ((c->half_us != 0 || c->waiting.at != NULL) && sockio_is_hung_up(c->fd)) {
        leave(c, "peer_closed");
        return;
    }
    if (c->stalled)
        do_later(c);
    if ((c->half_us != 0 || c->waiting.at != NULL) && now_us + ms(HALF_CHECK_MS) < due)
        due = now_us + ms(HALF_CHECK_MS);
    if (due != UINT64_MAX)
        wait_until(c->host, due < now_us + ms(CHECK_STEP_MS) ? now_us + ms(CHECK_STEP_MS) : due);
}

/* Has its large frame come on?  Bytes now and then are not enough. */
static void look_at(conn *c)
{
    const size_t got = c->reader.end - c->reader.start;

    if (c->host->waiting == NULL || got >= c->seen_bytes + MEMORY_LOOKS_BYTES) {
        c->seen_bytes = got;
        c->n_looks = 0;
    } else {
        c->n_looks++;
    }
}

/* Of those whose frames do not come on the one with the most memory, so that few have to go; or NULL. */
static conn *find_stalled(const conn_host *h)
{
    conn *found = NULL;

    for (conn *c = h->all; c != NULL; c = c->all.next)
        if (c->n_looks >= MEMORY_LOOKS && c->in_bytes > (found != NULL ? found->in_bytes : 0))
            found = c;
    return found;
}

static void drop_stalled(conn *c)
{
    kvs_err err = {0};

    (void)kvs_fail(&err, KVS_E_LIMIT, "frame: %zu of %zu bytes are there, %s; others waited for its memory",
                   c->reader.end - c->reader.start, c->reader.cap,
                   is_paused(c) ? "and its replies are not read" : "and few more came");
    drop(c, "stalled_frame", &err);
}

/* Readers' memory that goes unused while others wait for it.  Each drop serves those who wait. */
static void look_at_readers(conn_host *h, uint64_t now_us)
{
    conn *stalled;

    if (now_us >= h->look_us) {
        h->look_us = now_us + ms(CHECK_STEP_MS);
        for (conn *c = h->all; c != NULL; c = c->all.next)
            look_at(c);
        serve_waiting(h); /* an equal part may be more by now, or the limit */
        while (h->waiting != NULL && now_us >= h->waiting->waiting_us + ms(MEMORY_WAIT_MS) &&
               (stalled = find_stalled(h)) != NULL)
            drop_stalled(stalled);
    }
    if (h->waiting != NULL)
        wait_until(h, h->look_us);
}

void conns_check(conn_host *h, uint64_t now_us)
{
    conn *next;

    if (now_us < h->due_us)
        return;
    h->due_us = UINT64_MAX;
    for (conn *c = h->all; c != NULL; c = next) {
        next = c->all.next; /* a close frees nothing before the loop's next turn */
        check_one(c, now_us);
    }
    look_at_readers(h, now_us);
}

static void say_farewell(conn *c, const char *reason)
{
    c->farewell = reason;
    c->more = false;
    c->unread_us = 0;
    c->partial_us = 0;
    end_waiting(c);
    frame_reader_fini(&c->reader);
    count_in_and_serve(c);
    if (c->half_us == 0)
        c->half_us = conn_now_us();
    wait_until(c->host, c->half_us + ms(HALF_CHECK_MS));
    peer_dismiss(c->peer);
    do_later(c);
}

void conns_recheck(conn_host *h)
{
    for (conn *c = h->all; c != NULL; c = c->all.next) {
        if (c->closing || c->info.is_admin || c->info.denied[0] != '\0' || c->farewell != NULL)
            continue;
        if (tenant_is_gone(h->config, c->info.tenant))
            say_farewell(c, "tenant_removed");
        else if (!tenant_lets_in(h->config, c->info.tenant, c->info.uid))
            condemn(c, "no_longer_allowed");
    }
}

bool conns_flushed(const conn_host *h)
{
    for (const conn *c = h->all; c != NULL; c = c->all.next)
        if (!c->closing && c->out != NULL)
            return false;
    return true;
}

void conns_close(conn_host *h)
{
    conn *next;

    for (conn *c = h->all; c != NULL; c = next) {
        next = c->all.next;
        leave(c, "shutdown");
    }
}

bool conns_gone(const conn_host *h)
{
    return h->all == NULL;
}
