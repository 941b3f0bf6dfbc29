#include "proto/frame.h"

#include <criterion/criterion.h>
#include <dirent.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BODY_MAX = 65536, STREAM_MAX = 262144, MAX_FRAMES = 64 };

/* A recorded stream: bytes, and descriptors that belong to certain bytes (the first ones of frames). */
typedef struct stream {
    uint8_t bytes[STREAM_MAX];
    size_t len;
    struct {
        size_t at, n;
    } fds[MAX_FRAMES];
    size_t n_fds;
} stream;

/* What came out: headers, and a sum over each body. */
typedef struct outcome {
    size_t n_frames;
    uint64_t ids[MAX_FRAMES];
    uint8_t heads[MAX_FRAMES][WIRE_HEADER_BYTES]; /* encoded again: a struct has padding */
    uint64_t sums[MAX_FRAMES];
    kvs_status broken;
} outcome;

static stream in; /* too large for the stack */

static size_t open_descriptors(void)
{
    DIR *d = opendir("/proc/self/fd");
    size_t n = 0;

    cr_assert_not_null(d);
    while (readdir(d) != NULL)
        n++;
    closedir(d);
    return n;
}

static int new_descriptor(void)
{
    int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);

    cr_assert(fd >= 0);
    return fd;
}

/* Append a frame that claims `claims` descriptors and carries `carries`. */
static void add_frame(stream *s, uint64_t id, uint32_t body_len, uint16_t claims, size_t carries)
{
    wire_header h = {.op = WIRE_PING, .id = id, .body_len = body_len, .n_fds = claims, .deadline_us = id * 3};

    cr_assert(s->len + WIRE_HEADER_BYTES + body_len <= STREAM_MAX);
    if (carries != 0) {
        s->fds[s->n_fds].at = s->len;
        s->fds[s->n_fds++].n = carries;
    }
    wire_header_encode(&h, s->bytes + s->len);
    s->len += WIRE_HEADER_BYTES;
    for (uint32_t i = 0; i < body_len; i++)
        s->bytes[s->len++] = (uint8_t)(id * 31 + i * 7);
}

static void take_frames(frame_reader *r, outcome *o)
{
    frame f;

    while (frame_next(r, &f, NULL)) {
        uint64_t sum = 1469598103934665603U;

        cr_assert(o->n_frames < MAX_FRAMES);
        for (uint32_t i = 0; i < f.head.body_len; i++)
            sum = (sum ^ f.body[i]) * 1099511628211U;
        for (uint16_t i = 0; i < f.head.n_fds; i++)
            cr_assert_eq(close(f.fds[i]), 0);
        o->ids[o->n_frames] = f.head.id;
        wire_header_encode(&f.head, o->heads[o->n_frames]);
        o->sums[o->n_frames++] = sum;
    }
}

/* Hand over bytes [from, to) and their descriptors, in as many pieces as the reader offers room for. */
static void feed(frame_reader *r, const stream *s, size_t from, size_t to, outcome *o)
{
    while (from < to && r->broken == KVS_OK) {
        frame_span span = frame_want(r);
        size_t n = span.len < to - from ? span.len : to - from, n_fds = 0;
        int fds[256];

        cr_assert(n != 0);
        memcpy(span.base, s->bytes + from, n);
        for (size_t i = 0; i < s->n_fds; i++)
            if (s->fds[i].at >= from && s->fds[i].at < from + n)
                for (size_t k = 0; k < s->fds[i].n; k++)
                    fds[n_fds++] = new_descriptor();
        (void)frame_got(r, n, fds, n_fds, NULL);
        from += n;
        take_frames(r, o);
    }
}

static void play(const stream *s, size_t step, size_t cut, outcome *o)
{
    frame_reader r;

    memset(o, 0, sizeof *o);
    frame_reader_init(&r, BODY_MAX);
    if (step != 0) {
        for (size_t i = 0; i < s->len; i += step)
            feed(&r, s, i, i + step < s->len ? i + step : s->len, o);
    } else {
        feed(&r, s, 0, cut, o);
        feed(&r, s, cut, s->len, o);
    }
    o->broken = r.broken;
    if (r.broken == KVS_OK)
        cr_assert_eq(r.n_fds, 0, "descriptors are left in the queue");
    frame_reader_fini(&r);
}

static void expect_equal(const outcome *a, const outcome *b, size_t where)
{
    cr_assert_eq(a->n_frames, b->n_frames, "%zu frames, not %zu (split at %zu)", b->n_frames, a->n_frames, where);
    cr_assert_eq(a->broken, b->broken, "split at %zu", where);
    for (size_t i = 0; i < a->n_frames; i++) {
        cr_assert_eq(memcmp(a->heads[i], b->heads[i], WIRE_HEADER_BYTES), 0, "frame %zu, split at %zu", i, where);
        cr_assert_eq(a->sums[i], b->sums[i], "frame %zu, split at %zu", i, where);
    }
}

/* One gulp, byte by byte, other steps, and every place for a cut in two. */
static void every_split(const stream *s, outcome *whole)
{
    static const size_t STEPS[] = {1, 2, 7, 31, 32, 33, 1000};
    size_t before = open_descriptors();
    outcome o;

    play(s, 0, 0, whole);
    for (size_t i = 0; i < sizeof STEPS / sizeof *STEPS; i++) {
        play(s, STEPS[i], 0, &o);
        expect_equal(whole, &o, STEPS[i]);
    }
    for (size_t cut = 0; cut <= s->len; cut++) {
        play(s, 0, cut, &o);
        expect_equal(whole, &o, cut);
    }
    cr_assert_eq(open_descriptors(), before, "a descriptor leaks");
}

Test(frame, gives_equal_frames_for_every_split)
{
    outcome o;

    for (uint64_t id = 0; id < 50; id++) {
        static const size_t carries[] = {0, 0, 1, 0, 3, 0, 0, 2};
        size_t n = carries[id % 8];

        add_frame(&in, id, (uint32_t)(id * 5 % 90), (uint16_t)n, n);
    }
    every_split(&in, &o);
    cr_assert_eq(o.n_frames, 50);
    cr_assert_eq(o.broken, KVS_OK);
    for (uint64_t id = 0; id < 50; id++)
        cr_assert_eq(o.ids[id], id);
}

Test(frame, delivers_what_stood_before_a_bad_header_in_every_split)
{
    outcome o;

    add_frame(&in, 1, 40, 0, 0);
    add_frame(&in, 2, 0, 1, 1);
    add_frame(&in, 3, 8, 0, 0);
    in.bytes[in.len - 40] ^= 1; /* the magic of the third */
    every_split(&in, &o);
    cr_assert_eq(o.n_frames, 2);
    cr_assert_eq(o.broken, KVS_E_PROTO);
}

Test(frame, breaks_on_too_few_descriptors_in_every_split)
{
    outcome o;

    add_frame(&in, 1, 8, 1, 1);
    add_frame(&in, 2, 8, 3, 2);
    every_split(&in, &o);
    cr_assert_eq(o.n_frames, 1);
    cr_assert_eq(o.broken, KVS_E_PROTO);
}

Test(frame, breaks_on_descriptors_that_no_frame_claims_in_every_split)
{
    outcome o;

    add_frame(&in, 1, 8, 0, 0);
    add_frame(&in, 2, 8, 0, 2);
    every_split(&in, &o);
    cr_assert_eq(o.n_frames, 1);
    cr_assert_eq(o.broken, KVS_E_PROTO);
}

Test(frame, refuses_a_surplus_descriptor_of_a_ping)
{
    frame_reader r;
    outcome o = {0};
    kvs_err err = {0};
    size_t before = open_descriptors();
    int fd = new_descriptor();
    frame_span span;
    frame f;

    add_frame(&in, 1, 0, 0, 0);
    frame_reader_init(&r, BODY_MAX);
    span = frame_want(&r);
    memcpy(span.base, in.bytes, in.len);
    cr_assert_eq(frame_got(&r, in.len, &fd, 1, &err), KVS_E_PROTO);
    cr_assert_str_eq(err.msg, "descriptors: the frame claims 0 and 1 arrived");
    cr_assert_eq(open_descriptors(), before);
    cr_assert_not(frame_next(&r, &f, &err));
    take_frames(&r, &o);
    cr_assert_eq(o.n_frames, 0);
    frame_reader_fini(&r);
}

Test(frame, keeps_the_descriptors_of_a_later_frame_that_came_with_earlier_bytes)
{
    frame_reader r;
    frame f;
    int fd = new_descriptor();
    frame_span span;

    add_frame(&in, 1, 24, 0, 0);
    add_frame(&in, 2, 24, 1, 0);
    frame_reader_init(&r, BODY_MAX);
    span = frame_want(&r);
    /* One recvmsg: the first frame, one byte of the second, and the second's descriptor. */
    memcpy(span.base, in.bytes, 57);
    cr_assert_eq(frame_got(&r, 57, &fd, 1, NULL), KVS_OK);
    cr_assert(frame_next(&r, &f, NULL));
    cr_assert_eq(f.head.id, 1);
    cr_assert_not(frame_next(&r, &f, NULL));
    cr_assert(frame_is_partial(&r));
    span = frame_want(&r);
    memcpy(span.base, in.bytes + 57, in.len - 57);
    cr_assert_eq(frame_got(&r, in.len - 57, NULL, 0, NULL), KVS_OK);
    cr_assert(frame_next(&r, &f, NULL));
    cr_assert_eq(f.head.id, 2);
    cr_assert_eq(f.fds[0], fd);
    cr_assert_not(frame_is_partial(&r));
    cr_assert_eq(close(fd), 0);
    frame_reader_fini(&r);
}

/* Two frames of 64 descriptors each, the first one read in pieces: what is left of it must not come in one read with the
 * second one's first byte, or 128 descriptors would wait although no frame broke a rule. */
Test(frame, takes_two_full_loads_of_descriptors_in_a_row_when_the_first_comes_in_pieces)
{
    outcome o;

    add_frame(&in, 1, 40, WIRE_MAX_FDS, WIRE_MAX_FDS);
    add_frame(&in, 2, 40, WIRE_MAX_FDS, WIRE_MAX_FDS);
    for (size_t cut = 1; cut <= WIRE_HEADER_BYTES + 40; cut++) {
        play(&in, 0, cut, &o);
        cr_assert_eq(o.broken, KVS_OK, "split at %zu", cut);
        cr_assert_eq(o.n_frames, 2, "split at %zu", cut);
    }
}

Test(frame, asks_for_no_more_than_a_frame_whose_descriptors_wait_still_needs)
{
    int fd = new_descriptor();
    frame_reader r;
    frame f;

    add_frame(&in, 1, 24, 1, 0);
    frame_reader_init(&r, BODY_MAX);
    memcpy(frame_want(&r).base, in.bytes, 5);
    cr_assert_eq(frame_got(&r, 5, &fd, 1, NULL), KVS_OK);
    cr_assert_eq(frame_want(&r).len, WIRE_HEADER_BYTES - 5);
    memcpy(frame_want(&r).base, in.bytes + 5, 27);
    cr_assert_eq(frame_got(&r, 27, NULL, 0, NULL), KVS_OK);
    cr_assert_eq(frame_want(&r).len, 24);
    memcpy(frame_want(&r).base, in.bytes + 32, 24);
    cr_assert_eq(frame_got(&r, 24, NULL, 0, NULL), KVS_OK);
    cr_assert(frame_next(&r, &f, NULL));
    cr_assert_eq(close(f.fds[0]), 0);
    cr_assert(frame_want(&r).len > 24, "and as much as fits again");
    frame_reader_fini(&r);
}

/* The same through a real socket: the kernel joins bytes of one sendmsg and descriptors of the next. */
Test(frame, reads_joined_messages_of_a_unix_socket)
{
    union {
        char buf[CMSG_SPACE(sizeof(int) * WIRE_MAX_FDS)];
        struct cmsghdr align;
    } control = {0};
    int pair[2], sent = new_descriptor(), got[WIRE_MAX_FDS];
    struct stat a, b;
    struct iovec v;
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
    struct cmsghdr *c;
    frame_reader r;
    frame_span span;
    ssize_t n;
    frame f;

    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    add_frame(&in, 1, 16, 0, 0);
    add_frame(&in, 2, 16, 1, 0);
    cr_assert_eq(send(pair[0], in.bytes, 48, 0), 48);
    v = (struct iovec){in.bytes + 48, 48};
    m.msg_control = control.buf;
    m.msg_controllen = CMSG_SPACE(sizeof sent);
    c = CMSG_FIRSTHDR(&m);
    *c = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof sent), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(c), &sent, sizeof sent);
    cr_assert_eq(sendmsg(pair[0], &m, 0), 48);

    frame_reader_init(&r, BODY_MAX);
    for (size_t have = 0; have < 96; have += (size_t)n) {
        size_t n_fds = 0;

        span = frame_want(&r);
        v = (struct iovec){span.base, span.len};
        m.msg_controllen = sizeof control.buf;
        n = recvmsg(pair[1], &m, MSG_CMSG_CLOEXEC);
        cr_assert(n > 0);
        for (c = CMSG_FIRSTHDR(&m); c != NULL; c = CMSG_NXTHDR(&m, c)) {
            n_fds = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            memcpy(got, CMSG_DATA(c), n_fds * sizeof(int));
        }
        cr_assert_eq(frame_got(&r, (size_t)n, got, n_fds, NULL), KVS_OK);
    }
    cr_assert(frame_next(&r, &f, NULL));
    cr_assert_eq(f.head.n_fds, 0);
    cr_assert(frame_next(&r, &f, NULL));
    cr_assert_eq(f.head.n_fds, 1);
    cr_assert_eq(fstat(sent, &a), 0);
    cr_assert_eq(fstat(f.fds[0], &b), 0);
    cr_assert_eq(a.st_ino, b.st_ino);
    close(f.fds[0]);
    close(sent);
    close(pair[0]);
    close(pair[1]);
    frame_reader_fini(&r);
}

Test(frame, refuses_a_long_body_before_it_grows)
{
    frame_reader r;
    kvs_err err = {0};
    frame_span span;
    size_t cap;

    add_frame(&in, 1, 101, 0, 0);
    frame_reader_init(&r, 100);
    span = frame_want(&r);
    cap = r.cap;
    memcpy(span.base, in.bytes, 32);
    cr_assert_eq(frame_got(&r, 32, NULL, 0, &err), KVS_E_LIMIT);
    cr_assert_str_eq(err.msg, "header body_len: 101 is above 100 bytes");
    cr_assert_eq(r.cap, cap);
    cr_assert_eq(frame_want(&r).len, 0);
    cr_assert_not(frame_is_partial(&r));
    frame_reader_fini(&r);
}

Test(frame, grows_to_one_frame_of_the_largest_size_and_no_further)
{
    outcome o;
    frame_reader r;

    add_frame(&in, 1, BODY_MAX, 0, 0);
    add_frame(&in, 2, 10, 0, 0);
    add_frame(&in, 3, BODY_MAX, 0, 0);
    memset(&o, 0, sizeof o);
    frame_reader_init(&r, BODY_MAX);
    for (size_t i = 0; i < in.len; i += 4096)
        feed(&r, &in, i, i + 4096 < in.len ? i + 4096 : in.len, &o);
    cr_assert_eq(r.broken, KVS_OK);
    cr_assert_eq(o.n_frames, 3);
    cr_assert_eq(r.cap, WIRE_HEADER_BYTES + BODY_MAX);
    frame_reader_fini(&r);
}

Test(frame, offers_no_room_while_whole_frames_fill_it)
{
    frame_reader r;
    frame_span span;
    outcome o = {0};

    add_frame(&in, 1, 16384 - 32, 0, 0);
    frame_reader_init(&r, BODY_MAX);
    span = frame_want(&r);
    cr_assert_eq(span.len, in.len);
    memcpy(span.base, in.bytes, in.len);
    cr_assert_eq(frame_got(&r, in.len, NULL, 0, NULL), KVS_OK);
    cr_assert_eq(frame_want(&r).len, 0);
    take_frames(&r, &o);
    cr_assert_eq(o.n_frames, 1);
    cr_assert(frame_want(&r).len > 0);
    frame_reader_fini(&r);
}

Test(frame, closes_everything_when_too_many_descriptors_queue)
{
    frame_reader r;
    size_t before = open_descriptors();
    int fds[WIRE_MAX_FDS];
    kvs_err err = {0};
    int one;
    frame f;

    add_frame(&in, 1, 0, WIRE_MAX_FDS, 0);
    add_frame(&in, 2, 0, 1, 0);
    frame_reader_init(&r, BODY_MAX);
    memcpy(frame_want(&r).base, in.bytes, 32);
    for (size_t i = 0; i < WIRE_MAX_FDS; i++)
        fds[i] = new_descriptor();
    cr_assert_eq(frame_got(&r, 32, fds, WIRE_MAX_FDS, NULL), KVS_OK);
    memcpy(frame_want(&r).base, in.bytes + 32, 32);
    one = new_descriptor();
    cr_assert_eq(frame_got(&r, 32, &one, 1, &err), KVS_E_LIMIT);
    cr_assert_str_eq(err.msg, "descriptors: 65 in the queue is above 64");
    cr_assert_eq(open_descriptors(), before);
    cr_assert_not(frame_next(&r, &f, NULL));
    one = new_descriptor();
    cr_assert_eq(frame_got(&r, 0, &one, 1, NULL), KVS_E_LIMIT); /* still the reader's to close */
    cr_assert_eq(open_descriptors(), before);
    frame_reader_fini(&r);
}

Test(frame, carries_the_largest_number_of_descriptors)
{
    outcome o;

    add_frame(&in, 1, 3, WIRE_MAX_FDS, WIRE_MAX_FDS);
    add_frame(&in, 2, 3, WIRE_MAX_FDS, WIRE_MAX_FDS);
    play(&in, 1, 0, &o);
    cr_assert_eq(o.n_frames, 2);
    cr_assert_eq(o.broken, KVS_OK);
}

Test(frame, breaks_when_descriptors_come_without_a_frame)
{
    frame_reader r;
    size_t before = open_descriptors();
    int fd = new_descriptor();
    kvs_err err = {0};

    frame_reader_init(&r, BODY_MAX);
    cr_assert_eq(frame_got(&r, 0, &fd, 1, &err), KVS_E_PROTO);
    cr_assert_str_eq(err.msg, "descriptors: 1 arrived that no frame claims");
    cr_assert_eq(open_descriptors(), before);
    frame_reader_fini(&r);
}

Test(frame, closes_what_a_half_sent_frame_left_behind)
{
    frame_reader r;
    size_t before = open_descriptors();
    int fds[2] = {new_descriptor(), new_descriptor()};

    add_frame(&in, 1, 100, 2, 0);
    frame_reader_init(&r, BODY_MAX);
    memcpy(frame_want(&r).base, in.bytes, 60);
    cr_assert_eq(frame_got(&r, 60, fds, 2, NULL), KVS_OK);
    cr_assert(frame_is_partial(&r));
    frame_reader_fini(&r);
    frame_reader_fini(&r);
    cr_assert_eq(open_descriptors(), before);
}

Test(frame, refuses_more_bytes_than_it_offered)
{
    frame_reader r;

    frame_reader_init(&r, BODY_MAX);
    cr_assert_eq(frame_got(&r, frame_want(&r).len + 1, NULL, 0, NULL), KVS_E_LIMIT);
    frame_reader_fini(&r);
}

/* Symptom: 200 clients that had once sent a frame of 1 MiB held 200 MB while they were idle. */
Test(frame, gives_a_large_frames_memory_back_once_it_is_taken)
{
    frame_reader r;
    frame f;

    add_frame(&in, 1, 60000, 0, 0);
    frame_reader_init(&r, BODY_MAX);
    for (size_t at = 0; at < in.len;) {
        frame_span want = frame_want(&r);
        size_t n = want.len < in.len - at ? want.len : in.len - at;

        memcpy(want.base, in.bytes + at, n);
        at += n;
        cr_assert_eq(frame_got(&r, n, NULL, 0, NULL), KVS_OK);
        frame_reader_rest(&r); /* not while it is unfinished, nor before it is taken */
        cr_assert_eq(frame_is_partial(&r), at < in.len);
    }
    cr_assert(frame_next(&r, &f, NULL));
    cr_assert_eq(f.head.body_len, 60000);
    cr_assert_geq(r.cap, 60000);
    frame_reader_rest(&r);
    cr_assert_eq(r.cap, 0);
    memcpy(frame_want(&r).base, in.bytes, 40); /* and goes on as ever */
    cr_assert_eq(frame_got(&r, 40, NULL, 0, NULL), KVS_OK);
    cr_assert(frame_is_partial(&r));
    frame_reader_fini(&r);
}

/* So that what it grew to can be given back: nothing of the next frame is in it. */
Test(frame, a_large_frame_is_alone_in_its_memory)
{
    frame_reader r;
    frame_span want;

    add_frame(&in, 1, 60000, 0, 0);
    add_frame(&in, 2, 60000, 0, 0);
    frame_reader_init(&r, BODY_MAX);
    cr_assert_eq(frame_need(&r), FRAME_START_BYTES);
    want = frame_want(&r);
    cr_assert_eq(want.len, FRAME_START_BYTES);
    memcpy(want.base, in.bytes, 1000);
    cr_assert_eq(frame_got(&r, 1000, NULL, 0, NULL), KVS_OK);
    cr_assert_eq(frame_need(&r), WIRE_HEADER_BYTES + 60000);
    cr_assert_eq(r.cap, FRAME_START_BYTES, "not before it is wanted");
    cr_assert_eq(frame_want(&r).len, WIRE_HEADER_BYTES + 60000 - 1000);
    cr_assert_eq(frame_need(&r), r.cap);
    frame_reader_fini(&r);
}
