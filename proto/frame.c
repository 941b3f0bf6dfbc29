#include "proto/frame.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What stands at r->start.  Only FRAME_BROKEN changes the reader. */
enum frame_at { FRAME_NONE, FRAME_UNFINISHED, FRAME_WHOLE, FRAME_BROKEN };

static void close_all(const frame_reader *r, const int *fds, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (r->close_fd != NULL)
            r->close_fd(fds[i]);
        else
            (void)close(fds[i]);
    }
}

static kvs_status break_off(frame_reader *r, kvs_status why)
{
    close_all(r, r->fds, r->n_fds);
    r->n_fds = 0;
    r->broken = why;
    return why;
}

void frame_reader_init(frame_reader *r, uint32_t body_max)
{
    *r = (frame_reader){.body_max = body_max};
}

void frame_reader_fini(frame_reader *r)
{
    close_all(r, r->fds, r->n_fds);
    free(r->buf);
    r->buf = NULL;
    r->cap = r->start = r->end = r->n_fds = 0;
    r->broken = KVS_E_STATE; /* nothing more is taken in until the next init */
}

static size_t frame_bytes(const wire_header *h)
{
    return (size_t)WIRE_HEADER_BYTES + h->body_len;
}

/* Decode what stands at the start and compare it with the descriptors in the queue.  They come with a frame's
 * first byte, so once its header is there all of its own are, and more than that can only belong to a frame
 * behind it. */
static enum frame_at examine(frame_reader *r, wire_header *h, kvs_err *err)
{
    size_t have = r->end - r->start;
    kvs_status s;
    bool last;

    if (r->broken != KVS_OK) {
        kvs_fail(err, r->broken, "the stream broke before: %s", kvs_status_text(r->broken));
        return FRAME_BROKEN;
    }
    if (have == 0 && r->n_fds == 0)
        return FRAME_NONE;
    if (have == 0) {
        kvs_fail(err, KVS_E_PROTO, "descriptors: %zu arrived that no frame claims", r->n_fds);
        break_off(r, KVS_E_PROTO);
        return FRAME_BROKEN;
    }
    if (have < WIRE_HEADER_BYTES)
        return FRAME_UNFINISHED;
    s = wire_header_decode(r->buf + r->start, r->body_max, h, err);
    if (s != KVS_OK) {
        break_off(r, s);
        return FRAME_BROKEN;
    }
    last = have <= frame_bytes(h);
    if (h->n_fds > r->n_fds || (last && h->n_fds < r->n_fds)) {
        kvs_fail(err, KVS_E_PROTO, "descriptors: the frame claims %u and %zu arrived", h->n_fds, r->n_fds);
        break_off(r, KVS_E_PROTO);
        return FRAME_BROKEN;
    }
    return have < frame_bytes(h) ? FRAME_UNFINISHED : FRAME_WHOLE;
}

/* Room for the whole frame at the start; its header has been checked, so body_max bounds this. */
static bool grow(frame_reader *r, size_t need)
{
    uint8_t *p;

    if (need <= r->cap)
        return true;
    p = realloc(r->buf, need);
    if (p == NULL) {
        break_off(r, KVS_E_NO_MEMORY);
        return false;
    }
    r->buf = p;
    r->cap = need;
    return true;
}

frame_span frame_want(frame_reader *r)
{
    size_t need = FRAME_START_BYTES, whole = WIRE_HEADER_BYTES, room;
    wire_header h;

    /* A frame is moved at most once: afterwards it starts at 0 until it has been taken. */
    if (r->start != 0) {
        memmove(r->buf, r->buf + r->start, r->end - r->start);
        r->end -= r->start;
        r->start = 0;
    }
    if (r->broken == KVS_OK && r->end >= WIRE_HEADER_BYTES && examine(r, &h, NULL) == FRAME_UNFINISHED)
        need = whole = frame_bytes(&h);
    if (r->broken != KVS_OK || !grow(r, need))
        return (frame_span){NULL, 0};
    room = r->cap - r->end;
    /* The queue is this frame's until the frame is taken.  Bytes behind it could bring the next frame's descriptors,
     * and both together may be above the limit although the client kept to it. */
    if ((r->n_fds != 0 || whole > FRAME_START_BYTES) && r->end < whole)
        room = whole - r->end;
    return (frame_span){r->buf + r->end, room};
}

size_t frame_need(const frame_reader *r)
{
    size_t need = FRAME_START_BYTES;
    wire_header h;

    if (r->broken == KVS_OK && r->end - r->start >= WIRE_HEADER_BYTES &&
        wire_header_decode(r->buf + r->start, r->body_max, &h, NULL) == KVS_OK && frame_bytes(&h) > need)
        need = frame_bytes(&h);
    return need > r->cap ? need : r->cap;
}

kvs_status frame_got(frame_reader *r, size_t n, const int *fds, size_t n_fds, kvs_err *err)
{
    wire_header h;

    if (r->broken == KVS_OK && n > r->cap - r->end) {
        kvs_fail(err, KVS_E_LIMIT, "frame: %zu bytes do not fit the %zu that were offered", n, r->cap - r->end);
        break_off(r, KVS_E_LIMIT);
    } else if (r->broken == KVS_OK && n_fds > WIRE_MAX_FDS - r->n_fds) {
        kvs_fail(err, KVS_E_LIMIT, "descriptors: %zu in the queue is above %d", r->n_fds + n_fds, WIRE_MAX_FDS);
        break_off(r, KVS_E_LIMIT);
    }
    if (r->broken != KVS_OK) {
        close_all(r, fds, n_fds);
        return r->broken;
    }
    if (n_fds != 0)
        memcpy(r->fds + r->n_fds, fds, n_fds * sizeof *fds);
    r->n_fds += n_fds;
    r->end += n;
    (void)examine(r, &h, err); /* fail as soon as it is known, not when the last byte has come */
    return r->broken;
}

bool frame_next(frame_reader *r, frame *ret, kvs_err *err)
{
    wire_header h;

    if (examine(r, &h, err) != FRAME_WHOLE)
        return false;
    ret->head = h;
    ret->body = r->buf + r->start + WIRE_HEADER_BYTES;
    if (h.n_fds != 0) {
        memcpy(ret->fds, r->fds, h.n_fds * sizeof *r->fds);
        memmove(r->fds, r->fds + h.n_fds, (r->n_fds - h.n_fds) * sizeof *r->fds);
        r->n_fds -= h.n_fds;
    }
    r->start += frame_bytes(&h);
    return true;
}

void frame_reader_rest(frame_reader *r)
{
    if (r->start != r->end || r->cap <= FRAME_START_BYTES)
        return;
    free(r->buf);
    r->buf = NULL;
    r->cap = r->start = r->end = 0;
}

bool frame_is_partial(const frame_reader *r)
{
    size_t have = r->end - r->start;
    wire_header h;

    if (r->broken != KVS_OK || have == 0)
        return false;
    if (have < WIRE_HEADER_BYTES || wire_header_decode(r->buf + r->start, r->body_max, &h, NULL) != KVS_OK)
        return true;
    return have < frame_bytes(&h);
}
