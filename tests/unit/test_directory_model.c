/* Random mixed operations against a model that is too simple to be wrong. */
#include <criterion/criterion.h>
#include <string.h>

#include "tests/support/dir_fixture.h"

enum { N_NS = 3, N_IDS = 48, N_OPEN = 64, N_LEASES = 16 };

/* What the model knows of a key. */
typedef struct known {
    bool ready, writing, pinned;
    uint32_t holds, leases;
} known;

typedef struct copy {
    pool_slot slot;
    uint32_t ns;
    uint64_t id;
    bool doomed; /* writes; of a read: the key was dropped */
} copy;

typedef struct held_lease {
    uint8_t id[16];
    uint64_t owner, ends_us;
    uint32_t ns, first, n;
} held_lease;

typedef struct model {
    fixture f;
    uint64_t seed, x, step, seen_events;
    uint32_t ns[N_NS];
    known k[N_NS][N_IDS + 1];
    copy write[N_OPEN], read[N_OPEN], suspect[N_OPEN];
    uint32_t n_write, n_read, n_suspect, n_lease;
    held_lease lease[N_LEASES];
} model;

static model m;

static uint32_t dice(uint32_t sides)
{
    m.x = m.x * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (uint32_t)(m.x >> 33) % sides;
}

#define WANT(cond, ...) cr_assert(cond, "seed %lu step %lu: " #cond, (unsigned long)m.seed, (unsigned long)m.step)

static known *known_of(uint32_t ns, uint64_t id)
{
    return &m.k[ns][id];
}

/* Evictions are not foretold but judged: only ready blocks that nobody keeps may go. */
static void read_events(void)
{
    WANT(m.f.n_events - m.seen_events <= 64);
    for (; m.seen_events < m.f.n_events; m.seen_events++) {
        const fixture_event *e = &m.f.last[m.seen_events % 64];
        known *k;

        if (e->type != WIRE_EVENT_REMOVED || e->cause == WIRE_CAUSE_DROPPED)
            continue;
        k = known_of(e->ns, e->id);
        WANT(k->ready && !k->pinned && k->leases == 0 && (k->holds == 0 || e->cause == WIRE_CAUSE_REBOUND));
        k->ready = false;
    }
}

static void op_admit(uint32_t ns)
{
    uint64_t first = 1 + dice(N_IDS - 8);
    uint32_t n = 1 + dice(8);
    bool full = false;

    if (m.n_write + n > N_OPEN)
        return;
    fixture_admit(&m.f, m.ns[ns], first, n, (uint32_t)first, first > 1 ? first - 1 : 0);
    for (uint32_t i = 0; i < n; i++) {
        known *k = known_of(ns, first + i);
        bool was_ready = k->ready, was_writing = k->writing;

        if (was_writing) {
            WANT(m.f.status[i] == KVS_E_BUSY);
        } else if (was_ready) {
            WANT(m.f.status[i] == KVS_E_EXISTS);
        } else if (m.f.status[i] == KVS_OK) {
            WANT(!full);
            k->writing = true;
            m.write[m.n_write++] = (copy){.slot = m.f.slot[i], .ns = ns, .id = first + i};
        } else {
            WANT(m.f.status[i] == KVS_E_NO_SPACE);
            full = true;
        }
    }
}

static void op_end_write(void)
{
    uint32_t at, how = dice(8);
    copy c;

    if (m.n_write == 0)
        return;
    at = dice(m.n_write);
    c = m.write[at];
    m.write[at] = m.write[--m.n_write];
    if (!c.doomed)
        known_of(c.ns, c.id)->writing = false;
    if (how == 0) {
        directory_abort(m.f.dir, c.slot);
    } else if (how == 1 && m.n_suspect < 8) {
        directory_suspect(m.f.dir, c.slot);
        m.suspect[m.n_suspect++] = c;
    } else {
        WANT(directory_commit(m.f.dir, c.slot, 0) == (c.doomed ? KVS_E_CANCELLED : KVS_OK));
        if (!c.doomed)
            known_of(c.ns, c.id)->ready = true;
    }
}

static void op_hold(uint32_t ns)
{
    uint64_t first = 1 + dice(N_IDS - 4);
    uint32_t n = 1 + dice(4);

    if (m.n_read + n > N_OPEN)
        return;
    directory_hold(m.f.dir, m.ns[ns], fixture_keys(first, n), n, m.f.status, m.f.slot);
    for (uint32_t i = 0; i < n; i++) {
        known *k = known_of(ns, first + i);

        WANT(m.f.status[i] == (k->ready ? KVS_OK : k->writing ? KVS_E_BUSY : KVS_E_NOT_FOUND));
        if (m.f.status[i] != KVS_OK)
            continue;
        WANT(fixture_id(pool_row_of(m.f.pool, m.f.slot[i])->key) == first + i);
        k->holds++;
        m.read[m.n_read++] = (copy){.slot = m.f.slot[i], .ns = ns, .id = first + i};
    }
}

static void op_unhold(void)
{
    uint32_t at;

    if (m.n_read == 0)
        return;
    at = dice(m.n_read);
    if (!m.read[at].doomed)
        known_of(m.read[at].ns, m.read[at].id)->holds--;
    directory_unhold(m.f.dir, m.read[at].slot);
    m.read[at] = m.read[--m.n_read];
}

static void op_settle(void)
{
    if (m.n_suspect > 0)
        directory_settle(m.f.dir, m.suspect[--m.n_suspect].slot);
}

static void op_lookup(uint32_t ns)
{
    uint8_t states[N_IDS];
    uint32_t lead = 0;
    uint32_t got = directory_lookup(m.f.dir, m.ns[ns], fixture_keys(1, N_IDS), N_IDS, states);

    for (uint32_t i = 0; i < N_IDS; i++) {
        const known *k = known_of(ns, 1 + i);

        WANT(states[i] == (k->ready ? WIRE_KEY_READY : k->writing ? WIRE_KEY_WRITING : WIRE_KEY_ABSENT));
        lead += lead == i && k->ready;
    }
    WANT(got == lead);
}

static void op_pin(uint32_t ns)
{
    uint64_t id = 1 + dice(N_IDS);
    known *k = known_of(ns, id);
    bool unpin = dice(3) > 0;
    kvs_status s = unpin ? directory_unpin(m.f.dir, m.ns[ns], fixture_keys(id, 1))
                         : directory_pin(m.f.dir, m.ns[ns], fixture_keys(id, 1));

    WANT(s == (k->ready ? KVS_OK : KVS_E_NOT_FOUND));
    if (s == KVS_OK)
        k->pinned = !unpin;
}

/* The key goes: reads go on with a block that has no name, writes end in vain. */
static void forget(uint32_t ns, uint64_t id)
{
    known *k = known_of(ns, id);

    for (uint32_t i = 0; i < m.n_read; i++)
        if (m.read[i].ns == ns && m.read[i].id == id)
            m.read[i].doomed = true;
    for (uint32_t i = 0; i < m.n_write; i++)
        if (m.write[i].ns == ns && m.write[i].id == id)
            m.write[i].doomed = true;
    *k = (known){0};
}

static void op_drop(uint32_t ns)
{
    uint64_t id = 1 + dice(N_IDS);
    known *k = known_of(ns, id);
    kvs_status want = !k->ready && !k->writing ? KVS_E_NOT_FOUND : k->pinned || k->leases > 0 ? KVS_E_BUSY : KVS_OK;

    WANT(directory_drop(m.f.dir, m.ns[ns], fixture_keys(id, 1)) == want);
    if (want == KVS_OK)
        forget(ns, id);
}

static void op_reserve(uint32_t ns)
{
    uint64_t first = 1 + dice(N_IDS - 6), owner = dice(4);
    uint32_t ttl_ms = 1 + dice(300), lead = 0;
    directory_lease l;

    if (m.n_lease == N_LEASES)
        return;
    while (lead < 6 && known_of(ns, first + lead)->ready)
        lead++;
    WANT(fixture_reserve(&m.f, m.ns[ns], first, 6, owner, ttl_ms, &l) == KVS_OK);
    WANT(l.n_leased == lead);
    if (lead == 0)
        return;
    for (uint32_t i = 0; i < lead; i++)
        known_of(ns, first + i)->leases++;
    m.lease[m.n_lease] = (held_lease){
        .owner = owner, .ends_us = m.f.now_us + ttl_ms * UINT64_C(1000), .ns = ns, .first = (uint32_t)first, .n = lead};
    memcpy(m.lease[m.n_lease++].id, l.id, 16);
}

static void lease_ended(uint32_t at)
{
    for (uint32_t i = 0; i < m.lease[at].n; i++)
        known_of(m.lease[at].ns, m.lease[at].first + i)->leases--;
    m.lease[at] = m.lease[--m.n_lease];
}

static void op_lease_load(void)
{
    uint32_t at = m.n_lease > 0 ? dice(m.n_lease) : 0;
    const held_lease *l = &m.lease[at];
    kvs_status s;

    if (m.n_lease == 0 || m.n_read + l->n > N_OPEN)
        return;
    s = directory_lease_hold(m.f.dir, 1, l->id, m.ns[l->ns], 0, l->n, m.f.slot, NULL);
    WANT(s == KVS_OK || s == KVS_E_STATE);
    for (uint32_t i = 0; s == KVS_OK && i < l->n; i++) {
        known_of(l->ns, l->first + i)->holds++;
        m.read[m.n_read++] = (copy){.slot = m.f.slot[i], .ns = l->ns, .id = l->first + i};
    }
}

static void op_end_leases(void)
{
    uint64_t owner = dice(4), next = UINT64_MAX;
    uint32_t how = dice(8);

    if (how == 0) {
        directory_owner_gone(m.f.dir, owner);
        for (uint32_t i = m.n_lease; i-- > 0;)
            if (m.lease[i].owner == owner)
                lease_ended(i);
    } else if (how < 4 && m.n_lease > 0) {
        WANT(directory_release(m.f.dir, 1, m.lease[0].id, NULL) == KVS_OK);
        lease_ended(0);
    } else {
        m.f.now_us += dice(50000);
        for (uint32_t i = m.n_lease; i-- > 0;)
            if (m.lease[i].ends_us <= m.f.now_us)
                lease_ended(i);
        for (uint32_t i = 0; i < m.n_lease; i++)
            next = m.lease[i].ends_us < next ? m.lease[i].ends_us : next;
        WANT(directory_expire(m.f.dir, m.f.now_us) == next);
    }
}

static void op_reset(uint32_t ns, bool all, bool pinned_too)
{
    directory_reset_result r;
    uint64_t dropped = 0, aborted = 0, kept = 0, leases = 0;

    for (uint32_t i = m.n_lease; i-- > 0;)
        if (all || m.lease[i].ns == ns) {
            lease_ended(i);
            leases++;
        }
    for (uint32_t j = 0; j < N_NS; j++)
        for (uint64_t id = 1; (all || j == ns) && id <= N_IDS; id++) {
            const known *k = known_of(j, id);

            kept += k->pinned && !pinned_too;
            dropped += k->ready && (!k->pinned || pinned_too);
            aborted += k->writing;
            if (!k->pinned || pinned_too)
                forget(j, id);
        }
    fixture_reset(m.f.dir, 1, all ? WIRE_NONE32 : m.ns[ns], pinned_too, &r);
    WANT(r.dropped == dropped && r.aborted == aborted && r.kept == kept && r.leases == leases);
    m.seen_events = m.f.n_events; /* more than the ring holds, and all foretold */
}

static void one_step(void)
{
    uint32_t ns = dice(N_NS), what = dice(200);

    if (what < 50)
        op_admit(ns);
    else if (what < 100)
        op_end_write();
    else if (what < 120)
        op_hold(ns);
    else if (what < 145)
        op_unhold();
    else if (what < 155)
        op_lookup(ns);
    else if (what < 163)
        op_pin(ns);
    else if (what < 172)
        op_drop(ns);
    else if (what < 180)
        op_reserve(ns);
    else if (what < 184)
        op_lease_load();
    else if (what < 194)
        op_end_leases();
    else if (what < 197)
        op_settle();
    else if (what < 199)
        (void)directory_step(m.f.dir);
    else if (dice(4) == 0)
        op_reset(ns, dice(4) == 0, dice(2) == 0);
    read_events();
}

/* At rest: nothing is left over, and the whole pool can be filled again. */
static void come_to_rest(uint32_t n_slots)
{
    directory_stats st;

    while (m.n_read > 0)
        op_unhold();
    while (m.n_write > 0)
        op_end_write();
    while (m.n_suspect > 0)
        op_settle();
    op_reset(0, true, true);
    st = fixture_stats(&m.f);
    WANT(st.n_ready == 0 && st.n_pinned == 0 && st.n_held == 0 && st.n_leased == 0 && st.n_leases == 0);
    WANT(fixture_store(&m.f, m.ns[0], 1000, 1000, 0, 0) == n_slots);
}

/* Returns how many blocks went with their extent. */
static uint64_t play(uint64_t seed, uint32_t n_steps, const pool_config *c, uint32_t n_slots)
{
    directory_stats st;

    memset(&m, 0, sizeof m);
    m.seed = m.x = seed;
    fixture_init_with(&m.f, c);
    m.ns[0] = m.f.ns;
    m.ns[1] = fixture_open(&m.f, 1, "other", 2);
    m.ns[2] = fixture_open(&m.f, 1, "larger", 4);
    for (m.step = 0; m.step < n_steps; m.step++) {
        one_step();
        if (m.step % 50 == 0)
            fixture_check(&m.f);
    }
    st = fixture_stats(&m.f);
    WANT(st.evicted > 100 && st.no_space > 100); /* the walk went everywhere */
    come_to_rest(n_slots);
    fixture_fini(&m.f);
    return st.rebound;
}

/* Case 027. */
Test(directory_model, agrees_with_a_plain_model_in_a_pool_of_small_extents)
{
    uint64_t rebound = 0;

    for (uint64_t seed = 1; seed <= 5; seed++)
        rebound += play(seed, 50000, &(pool_config){.max_bytes = 8 * 12288, .extent_bytes = 12288}, 8 * 5);
    cr_assert_gt(rebound, 0);
}

Test(directory_model, agrees_with_a_plain_model_in_one_extent)
{
    uint64_t rebound = 0;

    for (uint64_t seed = 11; seed <= 12; seed++)
        rebound += play(seed, 50000, &(pool_config){.max_bytes = 16384, .extent_bytes = 16384}, 7);
    cr_assert_gt(rebound, 0);
}

Test(directory_model, agrees_with_a_plain_model_under_a_cap_of_slots)
{
    uint64_t rebound = 0;

    for (uint64_t seed = 21; seed <= 22; seed++)
        rebound +=
            play(seed, 50000, &(pool_config){.max_bytes = 11 * 16384, .extent_bytes = 16384, .max_slots = 33}, 33);
    cr_assert_gt(rebound, 0);
}
