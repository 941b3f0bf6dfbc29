#include "daemon/region.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/backend.h"
#include "tests/support/random.h"

/* Slot states, holds and maps of a region without memory. */

static region *make(uint32_t n)
{
    region *g = NULL;

    cr_assert_eq(region_create(&g, WIRE_REGION_SLOTS, false, n, 7), KVS_OK);
    return g;
}

static region_seat *sit(region *g)
{
    region_seat *s = NULL;

    cr_assert_eq(region_sit(g, &s), KVS_OK);
    return s;
}

static void set_key(uint8_t key[32], uint64_t n)
{
    memset(key, 0, 32);
    memcpy(key, &n, sizeof(n));
}

Test(region, a_slot_goes_round_and_counts_its_lives)
{
    region *g = make(1);
    region_seat *s = sit(g);
    uint32_t slot, gen;

    cr_assert_eq(region_take(s, &slot), KVS_OK);
    cr_assert_eq(region_take(s, &slot), KVS_E_NO_SPACE);
    gen = g->slots[0].gen;
    cr_assert_eq(region_drop(s, 0, gen + 1), KVS_E_STALE);
    cr_assert_eq(region_drop(s, 1, gen), KVS_E_RANGE);
    cr_assert_eq(region_drop(s, 0, gen), KVS_OK);
    cr_assert_eq(region_drop(s, 0, gen), KVS_E_STALE);
    cr_assert_eq(region_drop(s, 0, gen + 1), KVS_E_STATE);
    cr_assert_eq(region_take(s, &slot), KVS_OK);
    cr_assert_eq(g->slots[0].gen, gen + 1);
    cr_assert(region_leave(s));
    region_destroy(g);
}

static double cpu_seconds(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void take_all(region_seat *s)
{
    uint32_t slot;

    for (uint32_t i = 0; i < s->region->n_slots; i++)
        cr_assert(region_take(s, &slot) == KVS_OK && slot == i);
}

Test(region, of_a_million_slots_costs_what_is_used_of_it)
{
    double began = cpu_seconds(), all;
    region *g = make(REGION_MAX_SLOTS);
    region_seat *s = sit(g);

    take_all(s);
    all = cpu_seconds() - began;
    began = cpu_seconds();
    cr_assert(region_leave(s));
    cr_assert_lt(cpu_seconds() - began, all / 4, "who leaves last frees no slot for others");
    region_destroy(g);
    began = cpu_seconds();
    for (int i = 0; i < 10; i++) {
        g = make(REGION_MAX_SLOTS);
        s = sit(g);
        cr_assert_not(region_leave(sit(g)));
        cr_assert(region_leave(s));
        region_destroy(g);
    }
    cr_assert_lt(cpu_seconds() - began, 3 * all, "it was as much, each time");
}

Test(region, a_slot_that_was_never_used_has_a_generation_and_its_place)
{
    region *g = make(5);
    region_seat *a = sit(g), *b = sit(g);
    wire_region_entry e = {.slot = 3, .gen = 9};
    uint32_t gen, slot;

    cr_assert_eq(region_check(g, NULL), KVS_OK);
    cr_assert_eq(region_readopt(a, &e), KVS_OK, "out of the middle");
    cr_assert_eq(region_check(g, NULL), KVS_OK);
    cr_assert_eq(region_take(a, &slot), KVS_OK);
    cr_assert_eq(slot, 0);
    gen = g->slots[0].gen;
    cr_assert_neq(gen, 0);
    cr_assert_eq(region_drop(a, 4, gen), KVS_E_STATE, "the same one, but nobody's");
    cr_assert_eq(region_drop(a, 4, gen + 1), KVS_E_STALE);
    cr_assert_eq(region_drop(a, 4, 0), KVS_E_STALE);
    cr_assert_eq(region_drop(a, 0, gen), KVS_OK);
    cr_assert_eq(region_check(g, NULL), KVS_OK);
    for (uint32_t i = 0; i < 4; i++) {
        cr_assert_eq(region_take(b, &slot), KVS_OK);
        cr_assert_eq(slot, i < 3 ? i : 4);
        cr_assert_eq(g->slots[slot].gen, i == 0 ? gen + 1 : gen);
        cr_assert_eq(region_check(g, NULL), KVS_OK);
    }
    cr_assert_eq(region_take(b, &slot), KVS_E_NO_SPACE);
    cr_assert_not(region_leave(a));
    cr_assert_eq(region_available(g), 1);
    cr_assert(region_leave(b));
    region_destroy(g);
}

/* Regions may be large, and the loop serves everybody. */
Test(region, all_keys_are_forgotten_in_parts)
{
    enum { SLOTS = 20, SHARED = 10 };
    region *g = make(SLOTS);
    region_seat *s = sit(g);
    uint32_t slot, from = 0, budget, left = SHARED;
    uint8_t key[32];

    for (uint32_t i = 0; i < SHARED; i++) {
        set_key(key, i);
        cr_assert_eq(region_take(s, &slot), KVS_OK);
        cr_assert(region_share(s, slot, key, i));
    }
    for (budget = 4; region_forget_some(g, &from, &budget); budget = 4) {
        cr_assert_eq(budget, 0);
        left -= 4;
        cr_assert_eq(g->n_keys, left);
        cr_assert_eq(region_check(g, NULL), KVS_OK);
    }
    cr_assert(budget == 2 && g->n_keys == 0, "it does not look behind the last one");
    set_key(key, 99);
    cr_assert_eq(region_drop(s, 0, g->slots[0].gen), KVS_OK);
    cr_assert_eq(region_take(s, &slot), KVS_OK);
    cr_assert(slot < from && region_share(s, slot, key, 0));
    cr_assert_not(region_forget_some(g, &from, &(uint32_t){100}));
    cr_assert_eq(g->n_keys, 1, "what comes where it has been stays");
    cr_assert(region_leave(s));
    region_destroy(g);
}

Test(region, a_shared_slot_is_evicted_only_without_holds_and_oldest_first)
{
    region *g = make(2);
    region_seat *a = sit(g), *b = sit(g);
    uint32_t slot[2], other;
    uint8_t key[2][32];

    for (int i = 0; i < 2; i++) {
        set_key(key[i], 100 + i);
        cr_assert_eq(region_take(a, &slot[i]), KVS_OK);
        cr_assert(region_share(a, slot[i], key[i], i));
    }
    region_hold(b, slot[0]);
    cr_assert_eq(region_take(b, &other), KVS_E_NO_SPACE);
    cr_assert_eq(region_drop(a, slot[0], g->slots[slot[0]].gen), KVS_OK);
    cr_assert_eq(region_drop(a, slot[1], g->slots[slot[1]].gen), KVS_OK);
    cr_assert_eq(region_available(g), 1, "the other seat still holds one");
    cr_assert_eq(region_find(g, key[1]), slot[1]);
    cr_assert_eq(region_take(b, &other), KVS_OK);
    cr_assert_eq(other, slot[1]);
    cr_assert_eq(region_find(g, key[1]), REGION_NONE);
    cr_assert(!region_leave(a));
    cr_assert_eq(region_find(g, key[0]), slot[0]);
    cr_assert_eq(region_check(g, NULL), KVS_OK);
    cr_assert(region_leave(b));
    region_destroy(g);
}

Test(region, one_key_is_attached_to_one_slot)
{
    region *g = make(2);
    region_seat *s = sit(g);
    uint32_t slot[2];
    uint8_t key[32];

    set_key(key, 5);
    for (int i = 0; i < 2; i++)
        cr_assert_eq(region_take(s, &slot[i]), KVS_OK);
    cr_assert(region_share(s, slot[0], key, 0));
    cr_assert(!region_share(s, slot[1], key, 0));
    cr_assert_eq(g->slots[slot[1]].state, REGION_PRIVATE);
    region_leave(s);
    region_destroy(g);
}

Test(region, a_slot_in_use_by_a_job_is_freed_when_the_job_is_back)
{
    region *g = make(1);
    region_seat *s = sit(g);
    uint32_t slot;

    cr_assert_eq(region_take(s, &slot), KVS_OK);
    g->use[slot].stores = 1;
    cr_assert_eq(region_may_load(s, slot, g->slots[slot].gen), KVS_E_BUSY);
    cr_assert_eq(region_may_write(s, slot), KVS_E_BUSY);
    cr_assert_eq(region_may_read(s, slot), KVS_OK);
    cr_assert_eq(region_drop(s, slot, g->slots[slot].gen), KVS_OK);
    cr_assert_eq(region_available(g), 0);
    g->use[slot].stores = 0;
    region_rest(g, slot);
    cr_assert_eq(region_available(g), 1);
    cr_assert_eq(region_check(g, NULL), KVS_OK);
    region_leave(s);
    region_destroy(g);
}

Test(region, a_slot_that_was_not_named_yet_is_nobodys)
{
    region *g = make(1);
    region_seat *s = sit(g);
    uint32_t slot, gen;

    cr_assert_eq(region_take_unnamed(s, &slot), KVS_OK);
    cr_assert_eq(region_take_unnamed(s, &slot), KVS_E_NO_SPACE);
    gen = g->slots[slot].gen;
    cr_assert_eq(region_drop(s, slot, gen), KVS_E_STATE);
    cr_assert_eq(region_may_load(s, slot, gen), KVS_E_STATE);
    cr_assert_eq(region_may_store(s, slot, gen, true), KVS_E_STATE);
    cr_assert_eq(region_may_write(s, slot), KVS_E_STATE);
    cr_assert_eq(region_may_read(s, slot), KVS_E_STATE);
    region_named(g, slot);
    cr_assert_eq(region_may_read(s, slot), KVS_OK);
    cr_assert_eq(region_drop(s, slot, gen), KVS_OK);
    cr_assert_eq(region_take_unnamed(s, &slot), KVS_OK);
    cr_assert(region_leave(s), "it goes with its seat all the same");
    region_destroy(g);
}

Test(region, a_suspect_slot_is_refused_until_it_rests)
{
    region *g = make(1);
    region_seat *s = sit(g);
    uint32_t slot;

    cr_assert_eq(region_take(s, &slot), KVS_OK);
    g->use[slot].loading = true;
    g->use[slot].suspect = true;
    cr_assert_eq(region_may_read(s, slot), KVS_E_BUSY);
    cr_assert_eq(region_may_store(s, slot, g->slots[slot].gen, false), KVS_E_BUSY);
    g->use[slot].loading = false;
    g->use[slot].bad = true;
    region_rest(g, slot);
    cr_assert_eq(region_may_read(s, slot), KVS_OK);
    cr_assert_eq(region_may_store(s, slot, g->slots[slot].gen, false), KVS_E_STATE, "its bytes are undefined");
    cr_assert_eq(region_may_store(s, slot, g->slots[slot].gen, true), KVS_OK, "the client filled it");
    region_leave(s);
    region_destroy(g);
}

Test(region, a_forgotten_key_leaves_its_holders_in_peace)
{
    region *g = make(2);
    region_seat *s = sit(g);
    uint32_t slot;
    uint8_t key[32];

    set_key(key, 5);
    cr_assert_eq(region_take(s, &slot), KVS_OK);
    cr_assert(region_share(s, slot, key, 0));
    cr_assert(region_forget(g, key));
    cr_assert(!region_forget(g, key));
    cr_assert_eq(region_find(g, key), REGION_NONE);
    cr_assert_eq(region_may_read(s, slot), KVS_OK);
    cr_assert_eq(region_drop(s, slot, g->slots[slot].gen), KVS_OK);
    cr_assert_eq(g->n_free, 2);
    cr_assert_eq(g->n_cached, 0);
    cr_assert_eq(region_check(g, NULL), KVS_OK);
    region_leave(s);
    region_destroy(g);
}

Test(region, readopted_slots_are_as_the_client_left_them)
{
    region *g = make(8);
    region_seat *a = sit(g), *b = sit(g);
    wire_region_entry e = {.slot = 5, .gen = 77, .flags = WIRE_ENTRY_SHARED, .depth = 3};

    set_key(e.key, 9);
    cr_assert_eq(region_readopt(a, &e), KVS_OK);
    cr_assert_eq(region_find(g, e.key), 5);
    cr_assert_eq(g->slots[5].gen, 77);
    cr_assert_eq(region_readopt(b, &e), KVS_OK, "two clients held it");
    cr_assert_eq(g->slots[5].holds, 2);
    e.slot = 6;
    cr_assert_eq(region_readopt(a, &e), KVS_E_EXISTS);
    e.flags = 0;
    cr_assert_eq(region_readopt(a, &e), KVS_OK);
    cr_assert_eq(region_readopt(b, &e), KVS_E_BUSY);
    e.slot = 8;
    cr_assert_eq(region_readopt(a, &e), KVS_E_RANGE);
    e.slot = 1;
    e.flags = 2;
    cr_assert_eq(region_readopt(a, &e), KVS_E_INVALID);
    e.flags = 0;
    e.gen = 0;
    cr_assert_eq(region_readopt(a, &e), KVS_E_INVALID);
    cr_assert_eq(region_check(g, NULL), KVS_OK);
    region_leave(a);
    region_leave(b);
    region_destroy(g);
}

/* Keys are whatever a client likes: a common prefix, or one chosen to stand in the way of others.  Symptom: a re-offer of some
 * ten thousand such slots stopped the daemon for minutes. */
Test(region, keys_that_begin_alike_are_found_as_fast_as_others)
{
    enum { N = 1 << 17 };
    region *g = make(N);
    region_seat *s = sit(g);
    wire_region_entry e = {.gen = 1, .flags = WIRE_ENTRY_SHARED};
    clock_t began = clock();

    for (uint32_t i = 0; i < N; i++) {
        e.slot = i;
        memcpy(e.key + 28, &i, sizeof i);
        cr_assert_eq(region_readopt(s, &e), KVS_OK);
        cr_assert_lt(clock() - began, 5 * CLOCKS_PER_SEC, "after %u of %d keys", i, (int)N);
    }
    for (uint32_t i = 0; i < N; i += 1000) {
        memcpy(e.key + 28, &i, sizeof i);
        cr_assert_eq(region_find(g, e.key), i);
    }
    cr_assert_eq(region_check(g, NULL), KVS_OK);
    region_leave(s);
    region_destroy(g);
}

Test(region, a_random_life_keeps_the_lists_right)
{
    rnd r = rnd_open("region", 11);
    region *g = make(16);
    region_seat *last, *s[2] = {sit(g), sit(g)};
    kvs_err err = {0};
    uint32_t slot;
    uint8_t key[32];

    for (int i = 0; i < 20000; i++) {
        region_seat *me = s[rnd_below(&r, 2)];

        set_key(key, rnd_below(&r, 24));
        slot = (uint32_t)rnd_below(&r, 16);
        switch (rnd_below(&r, 7)) {
        case 0:
            (void)region_take(me, &slot);
            break;
        case 1:
            (void)region_drop(me, slot, g->slots[slot].gen);
            break;
        case 2:
            (void)region_share(me, slot, key, 0);
            break;
        case 3:
            if (region_find(g, key) != REGION_NONE)
                region_hold(me, region_find(g, key));
            break;
        case 4:
            (void)region_forget(g, key);
            break;
        case 5:
            if (region_may_read(me, slot) == KVS_OK)
                g->use[slot].stores++;
            break;
        default:
            if (g->use[slot].stores > 0) {
                g->use[slot].stores--;
                region_rest(g, slot);
            }
        }
        if (i % 64 == 0)
            cr_assert_eq(region_check(g, &err), KVS_OK, "%s", err.msg);
    }
    for (slot = 0; slot < 16; slot++) {
        g->use[slot].stores = 0;
        region_rest(g, slot);
    }
    last = sit(g);
    region_leave(s[0]);
    region_leave(s[1]);
    cr_assert_eq(region_check(g, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(region_available(g), 16);
    cr_assert(region_leave(last));
    region_destroy(g);
}

/* ---- plane maps ---- */

static kvs_plane planes[2];
static kvs_namespace ns;

static void setup(void)
{
    (void)kvs_namespace_mla("m", "", KVS_FORMAT_mla_bf16, 2, 4, planes, &ns, NULL);
}

typedef struct map_case {
    const char *what;
    uint32_t n_maps, n_slots, n_fds;
    wire_plane_map map;
    kvs_status right;
} map_case;

static const map_case cases[] = {
    {"one map, gaps", 1, 3, 1, {0, 0, 16, 9216 + 4096}, KVS_OK},
    {"one slot needs no stride", 1, 1, 1, {0, 0, 0, 0}, KVS_OK},
    {"neither one nor all planes", 3, 3, 1, {0, 0, 0, 9216}, KVS_E_INVALID},
    {"no slot", 1, 0, 1, {0, 0, 0, 9216}, KVS_E_RANGE},
    {"too many slots", 1, REGION_MAX_SLOTS + 1, 1, {0, 0, 0, 9216}, KVS_E_RANGE},
    {"no descriptor", 1, 3, 0, {0, 0, 0, 9216}, KVS_E_INVALID},
    {"descriptor that nobody names", 1, 3, 2, {0, 0, 0, 9216}, KVS_E_INVALID},
    {"more descriptors than a frame has", 1, 3, 65, {64, 0, 0, 9216}, KVS_E_INVALID},
    {"descriptor that did not come", 1, 3, 1, {1, 0, 0, 9216}, KVS_E_RANGE},
    {"base off 16", 1, 3, 1, {0, 0, 8, 9216}, KVS_E_INVALID},
    {"stride off 16", 1, 3, 1, {0, 0, 0, 9217}, KVS_E_INVALID},
    {"stride below the page", 1, 3, 1, {0, 0, 0, 9200}, KVS_E_INVALID},
    {"base of 2^40", 1, 3, 1, {0, 0, UINT64_C(1) << 40, 9216}, KVS_E_INVALID},
    {"stride of 2^40", 1, 3, 1, {0, 0, 0, UINT64_C(1) << 40}, KVS_E_INVALID},
    {"stride of -16", 1, 3, 1, {0, 0, 0, UINT64_MAX - 15}, KVS_E_INVALID},
    {"verified backend, whole blocks", 1, 3, 1, {0, KVS_BACKEND_FLASHMLA, 0, 9216}, KVS_OK},
    {"another backend, whole blocks", 1, 3, 1, {0, KVS_BACKEND_OTHER, 0, 9216}, KVS_E_UNSUPPORTED},
    {"another backend, overridden", 1, 3, 1, {0, KVS_BACKEND_OTHER | KVS_BACKEND_OVERRIDE, 0, 9216}, KVS_OK},
    {"another backend, one tensor a layer", 2, 3, 1, {0, KVS_BACKEND_OTHER, 0, 4608}, KVS_OK},
    {"another backend, layers of whole blocks", 2, 3, 1, {0, KVS_BACKEND_OTHER, 0, 9216}, KVS_E_UNSUPPORTED},
    {"no backend of that number", 1, 3, 1, {0, KVS_BACKEND_OTHER + 1, 0, 9216}, KVS_E_INVALID},
};

Test(region, plane_maps_out_of_range_are_refused_with_the_map_named, .init = setup)
{
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const map_case *c = &cases[i];
        wire_plane_map maps[3] = {c->map, c->map, c->map};
        kvs_err err = {0};

        cr_assert_eq(region_maps_check(&ns, c->n_slots, maps, c->n_maps, c->n_fds, false, &err), c->right, "%s: %s",
                     c->what, err.msg);
    }
}

Test(region, an_unverified_backend_is_named_with_its_plane_and_numbers, .init = setup)
{
    wire_plane_map maps[2] = {{0, KVS_BACKEND_OTHER, 0, 4608}, {0, KVS_BACKEND_OTHER, 4608, 9216}};
    kvs_err err = {0};

    cr_assert_eq(region_maps_check(&ns, 3, maps, 2, 1, false, &err), KVS_E_UNSUPPORTED);
    cr_assert_str_eq(err.msg,
                     "map 1: backend OTHER: plane latent of layer 1: stride 9216, page 4608: not verified across "
                     "layers; one tensor a layer, or override");
}

Test(region, a_contiguous_map_puts_planes_behind_one_another, .init = setup)
{
    uint8_t *base = (uint8_t *)0x10000;
    region_map *m = NULL;

    cr_assert_eq(region_map_contiguous(&ns, base, 5, &m, NULL), KVS_OK);
    cr_assert(m->cross_layer);
    cr_assert_eq(m->slot_bytes, 9216);
    cr_assert_eq(m->planes[1].base, base + 4608);
    cr_assert_eq(m->planes[1].stride, 9216);
    cr_assert_eq(region_map_view(m, 1).n_blocks, 5);
    cr_assert_eq(region_map_view(m, 1).tokens_per_block, 4);
    free(m);
}

/* Three pieces of one page each, the third apart from the others. */
static uint8_t *pieces[] = {(uint8_t *)0x10000, (uint8_t *)0x11000, (uint8_t *)0x20000};

static uint32_t fake_pieces(const device_mem *mem)
{
    (void)mem;
    return 3;
}

static uint8_t *fake_base(const device_mem *mem, uint32_t piece, uint64_t *ret_bytes)
{
    (void)mem;
    *ret_bytes = 0x1000;
    return pieces[piece];
}

static kvs_status map_at(uint32_t piece, uint64_t base, bool joined)
{
    const device_ops ops = {.mem_pieces = fake_pieces, .mem_base = fake_base};
    device d = {&ops};
    device_mem mem = {&d};
    wire_plane_map maps[2] = {{piece, 0, base, 4608}, {piece, 0, base, 4608}};
    region_map *m = NULL;
    kvs_status s = region_map_imported(&ns, 1, maps, 2, &mem, joined, &m, NULL);

    if (s == KVS_OK)
        cr_assert_eq(m->planes[1].base, pieces[piece] + base);
    free(m);
    return s;
}

Test(region, a_plane_may_run_on_into_the_next_piece_only_where_they_are_joined, .init = setup)
{
    cr_assert_eq(map_at(0, 0, false), KVS_E_RANGE, "4,608 bytes in a piece of 4,096");
    cr_assert_eq(map_at(0, 0, true), KVS_OK);
    cr_assert_eq(map_at(0, 8192 - 4608, true), KVS_OK, "to the last byte");
    cr_assert_eq(map_at(0, 8192 - 4608 + 16, true), KVS_E_RANGE, "beyond it");
    cr_assert_eq(map_at(1, 0, true), KVS_E_RANGE, "the third piece does not follow");
    cr_assert_eq(map_at(3, 0, true), KVS_E_RANGE, "there is no fourth one");
}
