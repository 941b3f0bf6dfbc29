/* Compiles as it is; with any of the three mistakes it must not (make check). */
#include "kernels/mla_sparse.h"

kvs_logical_index list[4];
kvs_physical_row rows[4];

int64_t use(const kvs_view *v, kvs_mla_sparse_args *a);

int64_t use(const kvs_view *v, kvs_mla_sparse_args *a)
{
    kvs_logical_index i = {3};
    kvs_physical_row r = kvs_physical_of_logical(v, i);

    a->indices = list;
#if MISTAKE == 1
    a->indices = rows;
#elif MISTAKE == 2
    i = r;
#elif MISTAKE == 3
    r = kvs_physical_of_logical(v, 3);
#endif
    return r.at + i.at;
}
