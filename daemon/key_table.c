#include "daemon/key_table.h"

#include <assert.h>
#include <string.h>
#include <sys/mman.h>

enum {
    MIN_BITS = 9, /* one page */
    PAGE_BYTES = 4096,
    GIVE_BACK = 1 << 15, /* entries: 256 KiB of the old table go back to the system at a time */
    READY_EVERY = 512,   /* changes; between 5/8 and 3/4 these are enough for all of the next table, twice */
    READY_BYTES = 1 << 17,
    MOVE_PER_CHANGE = 16, /* entries looked at with each insert or remove: done long before the new table is full */
};

static uint64_t part_cap(const key_table_part *p)
{
    return UINT64_C(1) << p->bits;
}

static uint64_t part_home(const key_table_part *p, uint32_t hash)
{
    return hash >> (32 - p->bits);
}

static kvs_status part_init(key_table_part *p, uint32_t bits)
{
    size_t bytes = sizeof(key_entry) << bits;
    void *m = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (m == MAP_FAILED)
        return KVS_E_NO_MEMORY;
    /* Clearing a huge page takes a while, and the first keys of a new table would touch them all. */
    (void)madvise(m, bytes, MADV_NOHUGEPAGE);
    (void)madvise(m, bytes, MADV_DONTDUMP); /* as the slot table: it grows with the pool, and names every block */
    *p = (key_table_part){.e = m, .bits = bits};
    return KVS_OK;
}

static void part_fini(key_table_part *p)
{
    if (p->e != NULL)
        (void)munmap(p->e, sizeof(key_entry) << p->bits);
    *p = (key_table_part){0};
}

static void part_insert(key_table_part *p, key_entry x)
{
    uint64_t mask = part_cap(p) - 1, i = part_home(p, x.hash);

    while (p->e[i].row1 != 0)
        i = (i + 1) & mask;
    p->e[i] = x;
    p->n++;
}

/* Empty entry i and close the gap with those behind it that may stand nearer to their home. */
static void part_remove_at(key_table_part *p, uint64_t i)
{
    uint64_t mask = part_cap(p) - 1;

    for (uint64_t j = (i + 1) & mask; p->e[j].row1 != 0; j = (j + 1) & mask) {
        uint64_t home = part_home(p, p->e[j].hash);

        if (((j - home) & mask) < ((j - i) & mask))
            continue;
        p->e[i] = p->e[j];
        i = j;
    }
    p->e[i] = (key_entry){0};
    p->n--;
}

static bool part_remove(key_table_part *p, uint32_t hash, uint32_t row)
{
    uint64_t mask, i;

    if (p->e == NULL)
        return false;
    mask = part_cap(p) - 1;
    for (i = part_home(p, hash); p->e[i].row1 != 0; i = (i + 1) & mask)
        if (p->e[i].row1 == row + 1) {
            part_remove_at(p, i);
            return true;
        }
    return false;
}

static uint32_t part_find(const key_table_part *p, uint32_t hash, key_table_match match, const void *ud)
{
    uint64_t mask = part_cap(p) - 1;

    for (uint64_t i = part_home(p, hash); p->e[i].row1 != 0; i = (i + 1) & mask)
        if (p->e[i].hash == hash && match(ud, p->e[i].row1 - 1))
            return p->e[i].row1 - 1;
    return KEY_TABLE_NONE;
}

kvs_status key_table_init(key_table *t)
{
    memset(t, 0, sizeof *t);
    return part_init(&t->now, MIN_BITS);
}

void key_table_fini(key_table *t)
{
    part_fini(&t->now);
    part_fini(&t->old);
    part_fini(&t->next);
    memset(t, 0, sizeof *t);
}

/* The entries in front of the cursor are moved.  Unmapping a large table in one go would take milliseconds.
 */
static void give_back(const key_table *t)
{
    uint64_t cap = part_cap(&t->old), passed = cap - t->left;
    uint64_t end = t->cursor == 0 ? cap : t->cursor;

    if (end % GIVE_BACK == 0 && passed >= GIVE_BACK)
        (void)madvise(t->old.e + end - GIVE_BACK, GIVE_BACK * sizeof(key_entry), MADV_DONTNEED);
}

bool key_table_step(key_table *t, uint32_t n)
{
    uint64_t mask;

    if (t->old.e == NULL)
        return false;
    mask = part_cap(&t->old) - 1;
    /* Never stop inside a run of entries: the rest of it would no longer be found from its home. */
    for (uint32_t i = 0; t->left > 0 && (i < n || t->old.e[t->cursor].row1 != 0); i++) {
        key_entry *x = &t->old.e[t->cursor];

        if (x->row1 != 0) {
            part_insert(&t->now, *x);
            *x = (key_entry){0};
            t->old.n--;
        }
        t->cursor = (t->cursor + 1) & mask;
        t->left--;
        give_back(t);
    }
    if (t->left == 0) {
        assert(t->old.n == 0);
        part_fini(&t->old);
    }
    return t->old.e != NULL;
}

static void drop_next(key_table *t)
{
    part_fini(&t->next);
    t->ready = 0;
}

/* There is no hurry, so a failure is none. */
static void prepare_next(key_table *t)
{
    uint64_t bytes, end;

    if (t->next.e == NULL && (t->old.e != NULL || t->now.bits == 32 || part_init(&t->next, t->now.bits + 1) != KVS_OK))
        return;
    bytes = sizeof(key_entry) << t->next.bits;
    end = t->ready + READY_BYTES < bytes ? t->ready + READY_BYTES : bytes;
    for (; t->ready < end; t->ready += PAGE_BYTES)
        *(volatile uint32_t *)((uint8_t *)t->next.e + t->ready) = 0;
}

static kvs_status start_moving(key_table *t, uint32_t bits)
{
    key_table_part fresh = t->next;
    uint64_t i = 0;

    if (fresh.e == NULL || fresh.bits != bits) {
        drop_next(t);
        if (part_init(&fresh, bits) != KVS_OK)
            return KVS_E_NO_MEMORY;
    }
    t->next = (key_table_part){0};
    t->ready = 0;
    while (t->now.e[i].row1 != 0) /* begin behind a gap: then no run is cut at the wrap-around */
        i++;
    t->old = t->now;
    t->now = fresh;
    t->cursor = i;
    t->left = part_cap(&t->old);
    return KVS_OK;
}

/* Room for one more entry.  A failed growth is no failure while entries are left. */
static kvs_status make_room(key_table *t)
{
    uint64_t cap = part_cap(&t->now);

    if (key_table_count(t) % READY_EVERY == 0 && key_table_count(t) > cap / 8 * 5)
        prepare_next(t);
    if (key_table_count(t) + 1 <= cap / 4 * 3)
        return KVS_OK;
    while (key_table_step(t, MOVE_PER_CHANGE))
        ;
    if (t->now.bits < 32 && start_moving(t, t->now.bits + 1) == KVS_OK)
        return KVS_OK;
    return t->now.n + 1 <= cap / 8 * 7 ? KVS_OK : KVS_E_NO_MEMORY;
}

kvs_status key_table_insert(key_table *t, uint32_t hash, uint32_t row)
{
    kvs_status s = make_room(t);

    if (s != KVS_OK)
        return s;
    part_insert(&t->now, (key_entry){.hash = hash, .row1 = row + 1});
    (void)key_table_step(t, MOVE_PER_CHANGE);
    return KVS_OK;
}

void key_table_remove(key_table *t, uint32_t hash, uint32_t row)
{
    bool found = part_remove(&t->now, hash, row) || part_remove(&t->old, hash, row);

    assert(found);
    (void)found;
    (void)key_table_step(t, MOVE_PER_CHANGE);
    if (t->next.e != NULL && key_table_count(t) < part_cap(&t->now) / 2)
        drop_next(t);
    /* Far too large now: give the memory back.  A failure only postpones it. */
    if (t->old.e == NULL && t->now.bits > MIN_BITS + 2 && t->now.n < part_cap(&t->now) / 16)
        (void)start_moving(t, t->now.bits - 2);
}

uint32_t key_table_find(const key_table *t, uint32_t hash, key_table_match match, const void *ud)
{
    uint32_t row = part_find(&t->now, hash, match, ud);

    return row == KEY_TABLE_NONE && t->old.e != NULL ? part_find(&t->old, hash, match, ud) : row;
}

void key_table_prefetch(const key_table *t, uint32_t hash)
{
    __builtin_prefetch(&t->now.e[part_home(&t->now, hash)]);
    if (t->old.e != NULL)
        __builtin_prefetch(&t->old.e[part_home(&t->old, hash)]);
}

static bool match_any(const void *ud, uint32_t row)
{
    (void)ud;
    (void)row;
    return true;
}

uint32_t key_table_guess(const key_table *t, uint32_t hash)
{
    return key_table_find(t, hash, match_any, NULL);
}
