/* The matrix product that MLX calls on a Linux processor: this file's own for a few rows, else the OpenBLAS of NumPy's
 * wheels, whose sizes have 64 bits. And attention (`bridge_attention`), whole layers (`bridge_layers`), a head
 * (`bridge_head`), and the noise that tokens are sampled with (`bridge_noise`).
 *
 * A forward over a few tokens multiplies a few rows with each weight matrix. OpenBLAS copies the matrix into its own
 * order first, which takes as long as reading it two more times. Here each weight is read once, for all rows. Each
 * number is summed in the same order however many rows there are, so a row does not depend on those beside it.
 *
 * Reading them is most of the time. Weights that 16 bits hold without loss, as most files store them, are kept in that
 * form too (`bridge_narrow_weights`) and read from there: the same numbers, from half the memory.
 *
 * For each PROCESSOR, x86_64 and aarch64, with ziglang 0.17.1 from the package index, byte for byte:
 *
 *   python -m ziglang cc -target PROCESSOR-linux-gnu.2.17 -shared -nostdlib -O3 -ffp-contract=fast -s \
 *       -Wl,--build-id=none -o bridge-PROCESSOR.so bridge.c
 */
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
enum { ROW_MAJOR = 101, AS_IT_IS = 111, TRANSPOSED = 112 };             /* CBLAS */
enum { FUTEX_WAIT_PRIVATE = 128, FUTEX_WAKE_PRIVATE = 129 };             /* futex(2) */
enum { LANES = 16, MOST_ROWS = 32, CHUNK = 64, WIDEST = 512, LEAST_SHARED = 1 << 14, SPINS = 4000, MOST_THREADS = 64 };
/* Rows: beyond, copying the matrix pays. Chunk: columns that a thread takes at once. Widest: columns of a matrix that is
 * not transposed; beyond, its rows are too far from each other. Least shared: numbers of a matrix that several threads
 * share. Spins: turns in which a thread waits for the next product before it sleeps, about 0.1 ms: the time between two
 * products of a forward, and no longer, because another worker may need the core. */
enum { AHEAD = 1024, MOST_STRIPS = 4, MOST_TILED = 8, MOST_COPIED = 1 << 15, SHORT = 1024, DEPTH = 256, MOST_VECTORS = 4 };
/* Ahead: numbers between those that are multiplied and those that are fetched from memory meanwhile. Strips: rows up to
 * which one column at a time may pay. Tiled: rows of a tile, at most. Copied: numbers of the rows that are put on whole lines of the cache. Short:
 * summands up to which every few rows fetch the next columns, not only the first ones. Depth: numbers of a column that
 * are multiplied by all rows in turn, which the nearest cache holds. */

extern void scipy_cblas_sgemm64_(int order, int transpose_a, int transpose_b, int64_t m, int64_t n, int64_t k,
                                 float alpha, const float *a, int64_t lda, const float *b, int64_t ldb,
                                 float beta, float *c, int64_t ldc);
extern int scipy_openblas_get_num_threads64_(void);
extern int pthread_create(unsigned long *thread, const void *attributes, void *(*run)(void *), void *argument);
extern int pthread_detach(unsigned long thread);
extern long syscall(long number, ...);

enum Form { SINGLE, HALF, BFLOAT }; /* Of stored weights: IEEE 754's 32 and 16 bits, and the upper 16 of 32 bits. */

/* c (m, n) = alpha a (m, k) B + beta c, where B is b (n, k)^T, such as a weight matrix or an attention's keys, or
 * b (k, n), such as its values. Narrow: the numbers of b in another form than SINGLE. */
typedef struct {
    const float *a, *b;
    const uint16_t *narrow;
    float *c;
    int64_t lda, ldb, ldc;
    int m, n, k, transposed;
    enum Form form;
    float alpha, beta;
} Product;
typedef void Part(const Product *product, int first, int last); /* Computes these columns. */
typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));
typedef uint16_t Narrow __attribute__((vector_size(2 * LANES), aligned(2)));
typedef _Float16 Halves __attribute__((vector_size(2 * LANES)));
typedef float Half __attribute__((vector_size(2 * LANES)));
typedef float Quarter __attribute__((vector_size(LANES)));

INLINE float sum_of(Lanes lanes) {
    union { Lanes all; Half half[2]; } a = {lanes};
    union { Half all; Quarter quarter[2]; } b = {a.half[0] + a.half[1]};
    Quarter c = b.quarter[0] + b.quarter[1];
    return (c[0] + c[2]) + (c[1] + c[3]);
}

INLINE Lanes widened(Narrow narrow, const enum Form form) {
    if (form == HALF) return __builtin_convertvector((Halves)narrow, Lanes);
    return (Lanes)(__builtin_convertvector(narrow, Bits) << 16);
}

/* LANES weights from number `at` of b on, while those at `next` begin to come from memory if it `fetches` them: into the
 * second cache, which can wait for more lines at once than the first one. */
INLINE Lanes weights_at(const Product *p, int64_t at, int64_t next, const enum Form form, const int fetches) {
    if (form == SINGLE) {
        if (fetches) __builtin_prefetch(p->b + next, 0, 2);
        return *(const Lanes *)(p->b + at);
    }
    if (fetches) __builtin_prefetch(p->narrow + next, 0, 2);
    return widened(*(const Narrow *)(p->narrow + at), form);
}

INLINE void tile(const Product *p, int row, int column, const int rows, const int columns, const enum Form form,
                 const int fetches) {
    const float *a = p->a + row * p->lda, *b = p->b + column * p->ldb;
    Lanes sums[MOST_TILED][4] = {0};
    int done = 0;
    for (; done + LANES <= p->k; done += LANES) {
        Lanes weights[4];
        /* The next tile's weights come from memory while this one is computed. */
        for (int j = 0; j < columns; j++)
            weights[j] =
                weights_at(p, (column + j) * p->ldb + done, (column + columns + j) * p->ldb + done, form, fetches);
        for (int i = 0; i < rows; i++) {
            Lanes inputs = *(const Lanes *)(a + i * p->lda + done);
            for (int j = 0; j < columns; j++) sums[i][j] += inputs * weights[j];
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) {
            float total = sum_of(sums[i][j]), *c = p->c + (row + i) * p->ldc + column + j;
            for (int k = done; k < p->k; k++) total += a[i * p->lda + k] * b[j * p->ldb + k];
            *c = p->alpha * total + (p->beta == 0 ? 0 : p->beta * *c);
        }
}

/* The same for one column and up to MOST_STRIPS rows: b is read from its beginning to its end, as fast as the memory
 * gives it. */
INLINE void strip(const Product *p, int row, int column, const int rows, const int columns, const enum Form form,
                  const int fetches) {
    const float *a = p->a + row * p->lda, *b = p->b + column * p->ldb;
    const int64_t ahead = form == SINGLE ? AHEAD : 2 * AHEAD, begin = column * p->ldb;
    Lanes sums[MOST_STRIPS] = {0};
    int done = 0;
    for (; done + LANES <= p->k; done += LANES) {
        Lanes weights = weights_at(p, begin + done, begin + done + ahead, form, fetches);
        for (int i = 0; i < rows; i++) sums[i] += *(const Lanes *)(a + i * p->lda + done) * weights;
    }
    float totals[MOST_STRIPS];
#pragma unroll
    for (int i = 0; i < rows; i++) totals[i] = sum_of(sums[i]);
#pragma unroll
    for (int i = 0; i < rows; i++) {
        float total = totals[i], *c = p->c + (row + i) * p->ldc + column;
        for (int k = done; k < p->k; k++) total += a[i * p->lda + k] * b[k];
        *c = p->alpha * total + (p->beta == 0 ? 0 : p->beta * *c);
    }
}

/* Adds to the sums the products of these rows with `depth` rows of b, of `vectors` times LANES columns. */
INLINE void wide_tile(const Product *p, const float *a, const float *b, int64_t ldb, int depth, Lanes *sums,
                      const int rows, const int vectors) {
    Lanes own[6][MOST_VECTORS];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) own[i][j] = sums[i * vectors + j];
    for (int k = 0; k < depth; k++, b += ldb) {
        Lanes values[MOST_VECTORS];
        for (int j = 0; j < vectors; j++) values[j] = *(const Lanes *)(b + j * LANES);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < vectors; j++) own[i][j] += a[i * p->lda + k] * values[j];
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) sums[i * vectors + j] = own[i][j];
}

/* The same for b (k, n) and `vectors` times LANES columns. Rows of b that are a power of two apart displace each other
 * in the cache: if it `packs`, each piece of the columns is copied together first, for all rows. */
INLINE void wide_columns(const Product *p, int column, const int rows, const int vectors, const int packs) {
    Lanes sums[MOST_ROWS * MOST_VECTORS] = {0};
    float packed[packs ? DEPTH * vectors * LANES : 1] __attribute__((aligned(4 * LANES)));
    const int pieces = packs && p->m > rows, most = pieces ? DEPTH : p->k;
    for (int begin = 0; begin < p->k; begin += most) {
        const int depth = p->k - begin < most ? p->k - begin : most;
        const float *b = p->b + begin * p->ldb + column;
        if (pieces)
            for (int k = 0; k < depth; k++)
                for (int j = 0; j < vectors; j++)
                    *(Lanes *)(packed + (k * vectors + j) * LANES) = *(const Lanes *)(b + k * p->ldb + j * LANES);
        for (int row = 0; row < p->m; row += rows) {
            const float *a = p->a + row * p->lda + begin, *from = pieces ? packed : b;
            const int64_t ldb = pieces ? vectors * LANES : p->ldb;
            Lanes *own = sums + row * vectors;
            switch (p->m - row < rows ? p->m - row : rows) {
                case 1: wide_tile(p, a, from, ldb, depth, own, 1, vectors); break;
                case 2: wide_tile(p, a, from, ldb, depth, own, 2, vectors); break;
                case 3: wide_tile(p, a, from, ldb, depth, own, 3, vectors); break;
                case 4: wide_tile(p, a, from, ldb, depth, own, 4, vectors); break;
                case 5: wide_tile(p, a, from, ldb, depth, own, 5, vectors); break;
                default: wide_tile(p, a, from, ldb, depth, own, rows, vectors);
            }
        }
    }
    for (int row = 0; row < p->m; row++)
        for (int j = 0; j < vectors; j++) {
            Lanes *c = (Lanes *)(p->c + row * p->ldc + column + j * LANES), total = p->alpha * sums[row * vectors + j];
            *c = p->beta == 0 ? total : total + p->beta * *c;
        }
}

INLINE void column_of_wide(const Product *p, int column) {
    for (int row = 0; row < p->m; row++) {
        float total = 0, *c = p->c + row * p->ldc + column;
        for (int k = 0; k < p->k; k++) total += p->a[row * p->lda + k] * p->b[k * p->ldb + column];
        *c = p->alpha * total + (p->beta == 0 ? 0 : p->beta * *c);
    }
}

typedef void Tile(const Product *p, int row, int column, const int rows, const int columns, const enum Form form,
                  const int fetches);

INLINE void some_rows(const Product *p, int row, int column, Tile *tile, const int rows, const int columns,
                      const enum Form form, const int fetches) {
    switch (p->m - row < rows ? p->m - row : rows) {
        case 1: tile(p, row, column, 1, columns, form, fetches); break;
        case 2: tile(p, row, column, 2, columns, form, fetches); break;
        case 3: tile(p, row, column, 3, columns, form, fetches); break;
        case 4: tile(p, row, column, 4, columns, form, fetches); break;
        case 5: tile(p, row, column, 5, columns, form, fetches); break;
        case 6: tile(p, row, column, 6, columns, form, fetches); break;
        case 7: tile(p, row, column, 7, columns, form, fetches); break;
        default: tile(p, row, column, rows, columns, form, fetches);
    }
}

/* `once`: of long columns, the first rows alone fetch the next ones. */
INLINE void all_rows(const Product *p, int column, Tile *tile, const int rows, const int columns,
                     const enum Form form, const int once) {
    for (int row = 0; row < p->m; row += rows)
        if (once && row > 0 && p->k > SHORT) some_rows(p, row, column, tile, rows, columns, form, 0);
        else some_rows(p, row, column, tile, rows, columns, form, 1);
}

/* How a kind of processor multiplies. */
typedef struct {
    int rows, columns;      /* How many sums, vectors of LANES numbers, fit into its registers: for b (n, k)^T, */
    int wide_rows, vectors; /* and for b (k, n). */
    int strips;             /* Up to how many rows one column at a time is faster. */
    int packs;              /* Whether `wide_columns` packs, and long columns are fetched once. */
} Way;

INLINE void transposed_part(const Product *p, int first, int last, const Way way, const enum Form form) {
    int column = first;
    if (p->m <= way.strips && (int64_t)p->m * p->k <= MOST_COPIED) {
        for (; column < last; column++) all_rows(p, column, strip, way.strips, 1, form, 0);
    } else {
        for (; column + way.columns <= last; column += way.columns)
            all_rows(p, column, tile, way.rows, way.columns, form, way.packs);
        for (; column < last; column++) all_rows(p, column, tile, way.rows, 1, form, way.packs);
    }
}

INLINE void part(const Product *p, int first, int last, const Way way) {
    if (!p->transposed) {
        int column = first;
        for (; column + way.vectors * LANES <= last; column += way.vectors * LANES)
            wide_columns(p, column, way.wide_rows, way.vectors, way.packs);
        for (; column + LANES <= last; column += LANES) wide_columns(p, column, way.wide_rows, 1, way.packs);
        for (; column < last; column++) column_of_wide(p, column);
    } else switch (p->form) {
            case SINGLE: transposed_part(p, first, last, way, SINGLE); break;
            case HALF: transposed_part(p, first, last, way, HALF); break;
            case BFLOAT: transposed_part(p, first, last, way, BFLOAT);
        }
}

/* Whether all numbers fit into this form; they are then in `narrow`. */
INLINE int narrowed(const float *from, int64_t count, uint16_t *narrow, const enum Form form) {
    int64_t done = 0;
    for (; done + LANES <= count; done += LANES) {
        Lanes lanes = *(const Lanes *)(from + done);
        Narrow found = form == HALF ? (Narrow)__builtin_convertvector(lanes, Halves)
                                    : __builtin_convertvector((Bits)lanes >> 16, Narrow);
        Bits lost = (Bits)widened(found, form) ^ (Bits)lanes;
        uint32_t any = 0;
#pragma unroll
        for (int i = 0; i < LANES; i++) any |= lost[i];
        if (any) return 0;
        *(Narrow *)(narrow + done) = found;
    }
    return done == count;
}

INLINE enum Form narrow_form(const float *from, int64_t count, uint16_t *narrow) {
    return narrowed(from, count, narrow, HALF) ? HALF : narrowed(from, count, narrow, BFLOAT) ? BFLOAT : SINGLE;
}

INLINE Lanes larger(Lanes a, Lanes b) {
    Bits larger = (Bits)(a > b);
    return (Lanes)(((Bits)a & larger) | ((Bits)b & ~larger));
}

/* e^x for x <= 0, within 2 units of the last place; 0 below -87.3, where the smallest usual number is. Cephes' expf. */
INLINE Lanes exponential(Lanes x) {
    const float shift = 12582912; /* 1.5 * 2^23: the sum's last bits are the next whole number. */
    Lanes shifted = x * 1.44269504f + shift, n = shifted - shift, r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Lanes y = 1.9875691500e-4f * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1;
    Lanes power = (Lanes)(((Bits)shifted - 0x4b400000u + 127u) << 23);
    return (Lanes)((Bits)(y * power) & ~(Bits)(x < -87.3f));
}

/* x := e^(x - `largest`); returns the sum. x, `count` numbers and room up to whole lines, may be -INFINITY: that is 0,
 * also where all are. Zeros behind the others don't change the sum. */
INLINE float exponentials(float *x, int count, float *largest) {
    for (int i = count; i % LANES; i++) x[i] = -__builtin_inff();
    Lanes *lines = (Lanes *)x, most = lines[0], none = {0}, sums = {0};
    for (int i = 1; i * LANES < count; i++) most = larger(lines[i], most);
    *largest = most[0];
#pragma unroll
    for (int i = 1; i < LANES; i++) *largest = most[i] > *largest ? most[i] : *largest;
    for (int i = 0; i * LANES < count; i++) {
        lines[i] = *largest == -__builtin_inff() ? none : exponential(lines[i] - *largest);
        sums += lines[i];
    }
    return sum_of(sums);
}

/* gate := gate / (1 + e^-gate) * up, of whole lines. */
INLINE void gated(float *gate, const float *up, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        Lanes g = *(Lanes *)(gate + i), e = exponential(-larger(g, -g)), one = e * 0 + 1;
        Bits negative = (Bits)(g < 0);
        Lanes above = (Lanes)(((Bits)e & negative) | ((Bits)one & ~negative));
        *(Lanes *)(gate + i) = g * above / (1 + e) * *(const Lanes *)(up + i);
    }
}

/* ln x of usual numbers above 0, within 2 units of the last place. Cephes' logf. */
INLINE Lanes logarithm(Lanes x) {
    const Bits power = ((Bits)x - 0x3f3504f3u) & 0xff800000u; /* x divided by it lies between the roots of 1/2 and 2. */
    Lanes e = __builtin_convertvector((Whole)power >> 23, Lanes), r = (Lanes)((Bits)x - power) - 1;
    Lanes y = 7.0376836292e-2f * r - 1.1514610310e-1f;
    y = y * r + 1.1676998740e-1f;
    y = y * r - 1.2420140846e-1f;
    y = y * r + 1.4249322787e-1f;
    y = y * r - 1.6668057665e-1f;
    y = y * r + 2.0000714765e-1f;
    y = y * r - 2.4999993993e-1f;
    y = y * r + 3.3333331174e-1f;
    y = y * r * r * r - e * 2.12194440e-4f - r * r * 0.5f;
    return r + y + e * 0.693359375f;
}

/* -ln(-ln u) of u strictly inside (0, 1), from the 23 high bits. */
INLINE Lanes gumbel(Bits bits) {
    Lanes uniform = (__builtin_convertvector((Whole)(bits >> 9), Lanes) + 0.5f) * 0x1p-23f;
    return -logarithm(-logarithm(uniform));
}

/* The noise of 2 `half` tokens, see `protocol/sampling/threefry.py`. `half`: whole lines. */
INLINE void noise(uint32_t seed, uint32_t position, uint32_t half, float *out) {
    static const int rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
    const uint32_t keys[3] = {seed, position, seed ^ position ^ 0x1bd11bdau};
    Bits lanes;
#pragma unroll
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    for (uint32_t block = 0; block < half; block += LANES) {
        Bits a = lanes + (block + keys[0]), b = lanes + (block + half + keys[1]);
#pragma unroll
        for (int group = 0; group < 5; group++) {
#pragma unroll
            for (int round = 0; round < 4; round++) {
                const int left = rotations[group % 2][round];
                a += b, b = (b << left | b >> (32 - left)) ^ a;
            }
            a += keys[(group + 1) % 3], b += keys[(group + 2) % 3] + group + 1;
        }
        *(Lanes *)(out + block) = gumbel(a), *(Lanes *)(out + half + block) = gumbel(b);
    }
}

typedef float Exponentials(float *x, int count, float *largest);
typedef void Gated(float *gate, const float *up, int64_t count);
typedef void Noise(uint32_t seed, uint32_t position, uint32_t half, float *out);
typedef struct {
    Part *part;
    Exponentials *exponentials;
    Gated *gated;
    Noise *noise;
} Kernels; /* For one kind of processor. */

#ifdef __x86_64__
#include <cpuid.h>

#define FOR_AVX512 __attribute__((target("avx512f,fma,f16c"))) static
#define FOR_AVX2 __attribute__((target("avx2,fma,f16c"))) static

FOR_AVX512 void part_avx512(const Product *p, int first, int last) {
    part(p, first, last, (Way){MOST_TILED, 3, 4, 4, MOST_STRIPS, 0});
}
FOR_AVX512 float exponentials_avx512(float *x, int count, float *largest) { return exponentials(x, count, largest); }
FOR_AVX512 void gated_avx512(float *gate, const float *up, int64_t count) { gated(gate, up, count); }
FOR_AVX512 void noise_avx512(uint32_t seed, uint32_t position, uint32_t half, float *out) {
    noise(seed, position, half, out);
}
static const Kernels avx512 = {part_avx512, exponentials_avx512, gated_avx512, noise_avx512};

FOR_AVX2 void part_avx2(const Product *p, int first, int last) { part(p, first, last, (Way){3, 2, 6, 1, 4, 1}); }
FOR_AVX2 float exponentials_avx2(float *x, int count, float *largest) { return exponentials(x, count, largest); }
FOR_AVX2 void gated_avx2(float *gate, const float *up, int64_t count) { gated(gate, up, count); }
FOR_AVX2 void noise_avx2(uint32_t seed, uint32_t position, uint32_t half, float *out) {
    noise(seed, position, half, out);
}
static const Kernels avx2 = {part_avx2, exponentials_avx2, gated_avx2, noise_avx2};

FOR_AVX2 enum Form best_form(const float *from, int64_t count, uint16_t *narrow) {
    return narrow_form(from, count, narrow);
}

static const long SYS_FUTEX = 202;
static void pause_turn(void) { __builtin_ia32_pause(); }

/* NULL for a processor without vectors that multiply and add at once, or a system that does not save them. */
static const Kernels *best_kernels(void) {
    unsigned a, b, c, d, saved, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_FMA) || !(c & bit_OSXSAVE)) return 0;
    if (!(c & bit_F16C)) return 0;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (saved & 0x06) != 0x06) return 0;
    if ((b & bit_AVX512F) && (saved & 0xe6) == 0xe6) return &avx512;
    return b & bit_AVX2 ? &avx2 : 0;
}
#else
static void part_neon(const Product *p, int first, int last) { part(p, first, last, (Way){2, 2, 2, 2, 0, 0}); }
static float exponentials_neon(float *x, int count, float *largest) { return exponentials(x, count, largest); }
static void gated_neon(float *gate, const float *up, int64_t count) { gated(gate, up, count); }
static void noise_neon(uint32_t seed, uint32_t position, uint32_t half, float *out) {
    noise(seed, position, half, out);
}
static const Kernels neon = {part_neon, exponentials_neon, gated_neon, noise_neon};
static enum Form best_form(const float *from, int64_t count, uint16_t *narrow) {
    return narrow_form(from, count, narrow);
}
static const long SYS_FUTEX = 98;
static void pause_turn(void) { __asm__ volatile("yield"); }
static const Kernels *best_kernels(void) { return &neon; }
#endif

static const Kernels *known_kernels(void) {
    static const Kernels *best;
    static int known;
    if (!__atomic_load_n(&known, __ATOMIC_ACQUIRE)) {
        best = best_kernels();
        __atomic_store_n(&known, 1, __ATOMIC_RELEASE);
    }
    return best;
}

typedef void Chunk(const void *work, int number); /* Does one of the chunks of some work. */

/* The threads that share one work at a time. */
static struct {
    const void *work;
    Chunk *chunk;
    int chunks;
    int next;         /* The first chunk that nobody has taken. */
    uint32_t gate;    /* The number of threads that compute beside the caller, and CLOSED once no more may begin. */
    uint32_t serial;  /* Counts works; sleeping threads wait for a change. */
    int sleeping, started, busy;
} pool;
static const uint32_t CLOSED = 1u << 31;

static void compute_chunks(void) {
    int chunk;
    while ((chunk = __atomic_fetch_add(&pool.next, 1, __ATOMIC_RELAXED)) < pool.chunks) pool.chunk(pool.work, chunk);
}

static int enter(void) {
    uint32_t gate = __atomic_load_n(&pool.gate, __ATOMIC_ACQUIRE);
    while (!(gate & CLOSED))
        if (__atomic_compare_exchange_n(&pool.gate, &gate, gate + 1, 1, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return 1;
    return 0;
}

static void *help(void *unused) {
    for (uint32_t seen = 0;;) {
        for (int turn = 0; turn < SPINS && __atomic_load_n(&pool.serial, __ATOMIC_ACQUIRE) == seen; turn++) pause_turn();
        while (__atomic_load_n(&pool.serial, __ATOMIC_ACQUIRE) == seen) {
            __atomic_fetch_add(&pool.sleeping, 1, __ATOMIC_SEQ_CST);
            syscall(SYS_FUTEX, &pool.serial, FUTEX_WAIT_PRIVATE, seen, 0, 0, 0);
            __atomic_fetch_sub(&pool.sleeping, 1, __ATOMIC_SEQ_CST);
        }
        seen = __atomic_load_n(&pool.serial, __ATOMIC_ACQUIRE);
        if (enter()) {
            compute_chunks();
            __atomic_fetch_sub(&pool.gate, 1, __ATOMIC_RELEASE);
        }
    }
    return unused;
}

/* The calling thread never waits for one that has not begun, so a forked process without the others computes too. */
static void compute_together(const void *work, Chunk *chunk, int chunks, int threads) {
    unsigned long thread;
    while (pool.started < threads - 1 && !pthread_create(&thread, 0, help, 0)) {
        pthread_detach(thread);
        pool.started++;
    }
    pool.work = work, pool.chunk = chunk, pool.chunks = chunks, pool.next = 0;
    __atomic_store_n(&pool.gate, 0, __ATOMIC_RELEASE);
    __atomic_fetch_add(&pool.serial, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool.sleeping, __ATOMIC_SEQ_CST))
        syscall(SYS_FUTEX, &pool.serial, FUTEX_WAKE_PRIVATE, threads - 1, 0, 0, 0);
    compute_chunks();
    __atomic_fetch_or(&pool.gate, CLOSED, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(&pool.gate, __ATOMIC_ACQUIRE) != CLOSED) pause_turn();
}

/* All chunks, by several threads if they read `numbers` enough and no other work has them. */
static void compute(const void *work, Chunk *chunk, int chunks, int64_t numbers) {
    int threads = numbers < LEAST_SHARED ? 1 : scipy_openblas_get_num_threads64_();
    if (threads > 1 && !__atomic_exchange_n(&pool.busy, 1, __ATOMIC_ACQUIRE)) {
        compute_together(work, chunk, chunks, threads < MOST_THREADS ? threads : MOST_THREADS);
        __atomic_store_n(&pool.busy, 0, __ATOMIC_RELEASE);
    } else {
        for (int number = 0; number < chunks; number++) chunk(work, number);
    }
}

/* Weights that are kept in 16 bits too. An entry is never used again, so that a product finds none half changed. */
static struct {
    const float *first, *end; /* NULL, NULL once they are forgotten. */
    const uint16_t *narrow;
    enum Form form;
} kept[4096];
static int kept_count;

/* Read these `count` numbers from `narrow`, whose memory the caller gives, until they are forgotten. False if they need
 * 32 bits or there are too many arrays. Both arrays stay as they are meanwhile. Called by one thread at a time. */
int bridge_narrow_weights(const float *from, int64_t count, uint16_t *narrow) {
    if (kept_count == sizeof kept / sizeof *kept || !known_kernels()) return 0;
    enum Form form = best_form(from, count, narrow);
    if (form == SINGLE) return 0;
    kept[kept_count].first = from, kept[kept_count].end = from + count;
    kept[kept_count].narrow = narrow, kept[kept_count].form = form;
    __atomic_store_n(&kept_count, kept_count + 1, __ATOMIC_RELEASE);
    return 1;
}

void bridge_forget_weights(const float *from) {
    for (int i = 0; i < kept_count; i++)
        if (kept[i].first == from) __atomic_store_n(&kept[i].end, 0, __ATOMIC_RELEASE), kept[i].first = 0;
}

static void find_narrow(Product *product) {
    int count = __atomic_load_n(&kept_count, __ATOMIC_ACQUIRE);
    const float *last = product->b + (product->n - 1) * product->ldb + product->k;
    for (int i = 0; i < count; i++)
        if (product->b >= kept[i].first && last <= __atomic_load_n(&kept[i].end, __ATOMIC_ACQUIRE)) {
            product->narrow = kept[i].narrow + (product->b - kept[i].first), product->form = kept[i].form;
            return;
        }
}

static int columns_of(const Product *product) { return (product->n + CHUNK - 1) / CHUNK; }

static void products_chunk(const void *work, int number) {
    const Product *product = work;
    for (; number >= columns_of(product); product++) number -= columns_of(product);
    int first = number * CHUNK, last = first + CHUNK;
    known_kernels()->part(product, first, last < product->n ? last : product->n);
}

static void multiply_many_rows(const Product *p) {
    scipy_cblas_sgemm64_(ROW_MAJOR, AS_IT_IS, TRANSPOSED, p->m, p->n, p->k, p->alpha, p->a, p->lda, p->b, p->ldb, p->beta,
                         p->c, p->ldc);
}

/* Threads share the columns of all these products, which have the same rows. */
static void multiply(Product *products, int count) {
    int chunks = 0;
    int64_t numbers = 0;
    for (int i = 0; i < count; i++) {
        if (products[i].m > MOST_ROWS) {
            multiply_many_rows(products + i);
            continue;
        }
        if (products[i].transposed) find_narrow(products + i);
        chunks += columns_of(products + i), numbers += (int64_t)products[i].n * products[i].k;
    }
    if (chunks) compute(products, products_chunk, chunks, numbers);
}

void cblas_sgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
    int own = order == ROW_MAJOR && transpose_a == AS_IT_IS && m <= MOST_ROWS &&
              (transpose_b == TRANSPOSED || (transpose_b == AS_IT_IS && n <= WIDEST));
    if (!own || !known_kernels()) {
        scipy_cblas_sgemm64_(order, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
        return;
    }
    Product product = {a, b, 0, c, lda, ldb, ldc, m, n, k, transpose_b == TRANSPOSED, SINGLE, alpha, beta};
    /* Each column reads all rows, and at half the speed what lies across two lines of the cache. */
    float copied[MOST_COPIED] __attribute__((aligned(4 * LANES)));
    int length = (k + LANES - 1) / LANES * LANES;
    if (m > 1 && (int64_t)m * length <= MOST_COPIED && product.transposed) {
        for (int row = 0; row < m; row++)
            for (int i = 0; i < k; i++) copied[row * length + i] = a[(int64_t)row * lda + i];
        product.a = copied, product.lda = length;
    }
    multiply(&product, 1);
}

/* Rows of all heads of one group, which share keys k (keys, width) and values v (keys, size), attend to KEYS keys at a
 * time: FlashAttention's partial sums (arXiv 2205.14135), which `bridge_attention` adds up. Distances are in numbers. */
typedef struct {
    const float *q, *k, *v;  /* q: (heads, rows, width) */
    const uint8_t *seen;     /* 0 where a row does not see a key; NULL: it sees what `causal` leaves. */
    const float *added;      /* To the scores; NULL: nothing. As far apart as what is seen. */
    int64_t k_group, k_row, v_group, v_row, mask_head, mask_row;
    int heads, groups, rows, keys, width, size, causal;
    float scale;
    float *sums, *weights, *largest; /* (heads, rows, chunks, size); (heads, rows, chunks): of the exponentials. */
} Attention;
enum { KEYS = 256 };

static int chunks_of(const Attention *a) { return (a->keys + KEYS - 1) / KEYS; }

/* Keys of the chunk in columns: many rows read them so without sums across a vector. */
INLINE const float *in_columns(const float *keys, int64_t distance, int count, int width, float *columns) {
    for (int key = 0; key < count; key++)
        for (int i = 0; i < width; i++) columns[i * KEYS + key] = keys[key * distance + i];
    return columns;
}

static void attention_chunk(const void *work, int number) {
    const Attention *a = work;
    const Kernels *kernels = known_kernels();
    const int chunks = chunks_of(a), group = number / chunks, chunk = number % chunks, first = chunk * KEYS;
    const int keys = a->keys - first < KEYS ? a->keys - first : KEYS, all = a->heads / a->groups * a->rows;
    const float *k = a->k + group * a->k_group + first * a->k_row, *v = a->v + group * a->v_group + first * a->v_row;
    float scores[MOST_ROWS * KEYS] __attribute__((aligned(4 * LANES)));
    const int many = a->rows > MOST_ROWS && a->width <= WIDEST / 2;
    float columns[many ? KEYS * a->width : 1] __attribute__((aligned(4 * LANES)));
    if (many) k = in_columns(k, a->k_row, keys, a->width, columns);
    for (int begin = 0, m; begin < all; begin += m) {
        /* Of one head, where they are many. */
        const int64_t at = (int64_t)group * all + begin, rest = a->rows > MOST_ROWS ? a->rows - at % a->rows : all - begin;
        m = rest < MOST_ROWS ? rest : MOST_ROWS;
        const int64_t behind = a->keys - a->rows + (a->rows > MOST_ROWS ? at % a->rows + m : a->rows) - first;
        const int count = !a->causal || behind > keys ? keys : behind < 0 ? 0 : behind; /* The last row sees so many. */
        Product product = {a->q + at * a->width, k, 0, scores, a->width, many ? KEYS : a->k_row, KEYS, m, count,
                           a->width, !many, SINGLE, a->scale, 0};
        kernels->part(&product, 0, count);
        for (int row = 0; row < m; row++) {
            float *own = scores + row * KEYS;
            const int64_t head = (at + row) / a->rows, place = (at + row) % a->rows, to = (at + row) * chunks + chunk;
            const int64_t mask = head * a->mask_head + place * a->mask_row + first;
            const int64_t last = a->causal ? a->keys - a->rows + place - first : count;
            for (int i = 0; a->added && i < count; i++) own[i] += a->added[mask + i];
            for (int i = 0; a->seen && i < count; i++)
                if (!a->seen[mask + i]) own[i] = -__builtin_inff();
            for (int i = last < 0 ? 0 : last + 1; i < count; i++) own[i] = -__builtin_inff();
            if (!count) own[0] = -__builtin_inff();
            a->weights[to] = kernels->exponentials(own, count ? count : 1, a->largest + to);
        }
        product = (Product){scores, v, 0, a->sums + (at * chunks + chunk) * a->size, KEYS, a->v_row,
                            (int64_t)chunks * a->size, m, a->size, count, 0, SINGLE, 1, 0};
        kernels->part(&product, 0, a->size);
    }
}

/* out (heads, rows, size) = softmax(scale q k^T) v, with room for the partial sums behind `a.sums`. */
static void attend(Attention a, float *out) {
    const Kernels *kernels = known_kernels();
    const int chunks = chunks_of(&a), room = (chunks + LANES - 1) / LANES * LANES;
    const int64_t rows = (int64_t)a.heads * a.rows;
    a.weights = a.sums + rows * chunks * a.size, a.largest = a.weights + rows * chunks;
    compute(&a, attention_chunk, a.groups * chunks, (int64_t)a.groups * a.keys * (a.width + a.size));
    float *shares = a.largest + rows * chunks;
    for (int64_t row = 0; row < rows; row++) {
        float total = 0, largest;
        for (int i = 0; i < chunks; i++) shares[i] = a.largest[row * chunks + i];
        kernels->exponentials(shares, chunks, &largest);
        for (int i = 0; i < chunks; i++) total += shares[i] * a.weights[row * chunks + i];
        Product product = {shares, a.sums + row * chunks * a.size, 0, out + row * a.size, room, a.size, a.size, 1,
                           a.size, chunks, 0, SINGLE, 1 / total, 0};
        kernels->part(&product, 0, a.size);
    }
}

/* The same, as in `Attention`, of whose last three `scratch` has the room. A row does not depend on those beside it, nor
 * on keys behind those that it sees. False, and nothing is written, on a processor without vectors. */
int bridge_attention(const float *q, const float *k, const float *v, const uint8_t *seen, const float *added,
                     const int64_t *distances, const int32_t *sizes, float scale, float *scratch, float *out) {
    if (!known_kernels()) return 0;
    attend((Attention){q, k, v, seen, added,
                       distances[0], distances[1], distances[2], distances[3], distances[4], distances[5],
                       sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], scale, scratch, 0, 0},
           out);
    return 1;
}

/* Every row of x divided by the root of its mean square. */
static void normalise(const float *x, const float *weights, int rows, int width, float epsilon, float *out) {
    for (int row = 0; row < rows; row++, x += width, out += width) {
        Lanes squares = {0};
        for (int i = 0; i < width; i += LANES) squares += *(const Lanes *)(x + i) * *(const Lanes *)(x + i);
        Lanes root = __builtin_elementwise_sqrt(squares * 0 + (sum_of(squares) / width + epsilon));
        for (int i = 0; i < width; i += LANES)
            *(Lanes *)(out + i) = *(const Lanes *)(x + i) / root * *(const Lanes *)(weights + i);
    }
}

/* Pairs half a head apart, turned by an angle each: `turns` are all cosines, then all sines. */
static void turn(const float *x, const float *turns, int size, float *out) {
    for (int i = 0, half = size / 2; i < half; i++) {
        out[i] = x[i] * turns[i] - x[half + i] * turns[half + i];
        out[half + i] = x[half + i] * turns[i] + x[i] * turns[half + i];
    }
}

static float *taken(float **scratch, int64_t numbers) {
    float *begin = *scratch;
    *scratch += (numbers + LANES - 1) / LANES * LANES;
    return begin;
}

/* Rows of one sequence. Their keys and values go behind the first `begin` ones, which they see too. */
typedef struct {
    float *keys, *values; /* (groups, slots, size), the groups `distance` numbers apart */
    int64_t distance, begin, rows;
    const uint8_t *seen; /* (rows, begin + rows); NULL: each row sees those before it. */
} Rows;
enum { TOGETHER = 64 }; /* Rows that attend at once: each has partial sums. */

/* out (heads * size a row) = attention(turned q, turned k, v). `turned` has the room of TOGETHER such rows, `found` too. */
static void attend_rows(const Rows *r, const int32_t *sizes, float scale, const float *turns, const float *q,
                        const float *k, const float *v, float *turned, float *found, float *scratch, float *out) {
    const int heads = sizes[1], groups = sizes[2], size = sizes[3], all = r->begin + r->rows;
    for (int row = 0; row < r->rows; row++)
        for (int group = 0; group < groups; group++) {
            const int64_t from = ((int64_t)row * groups + group) * size;
            const int64_t to = group * r->distance + (r->begin + row) * size;
            turn(k + from, turns + row * size, size, r->keys + to);
            for (int i = 0; i < size; i++) r->values[to + i] = v[from + i];
        }
    for (int begin = 0, rows; begin < r->rows; begin += rows) {
        rows = r->rows - begin < TOGETHER ? r->rows - begin : TOGETHER;
        for (int head = 0; head < heads; head++)
            for (int row = 0; row < rows; row++)
                turn(q + ((int64_t)(begin + row) * heads + head) * size, turns + (begin + row) * size, size,
                     turned + (head * rows + row) * size);
        attend((Attention){turned, r->keys, r->values, r->seen ? r->seen + (int64_t)begin * all : 0, 0, r->distance, size,
                           r->distance, size, 0, all, heads, groups, rows, r->seen ? all : r->begin + begin + rows, size,
                           size, !r->seen, scale, scratch, 0, 0}, found);
        for (int head = 0; head < heads; head++)
            for (int row = 0; row < rows; row++)
                for (int i = 0; i < size; i++)
                    out[((int64_t)(begin + row) * heads + head) * size + i] = found[(head * rows + row) * size + i];
    }
}

/* x (rows, hidden) := h + D (silu(G m) * U m), where m = norm(h), h = x + O attention(turned Q n, turned K n, V n) and
 * n = norm(x): a layer as Llama's. `weights`: of the first norm, Q, K, V, O, of the second norm, G, U, D. `numbers`:
 * what both norms add, and the scale of scores. `sizes`: of a row, heads, groups, of a head, and of G n. Those of a row,
 * of a head and of G n are whole lines. `turns`: (rows, size). Up to MOST_ROWS, a row does not depend on those beside
 * it. */
static void layer(const float *const *weights, const float *numbers, const int32_t *sizes, float *x, const float *turns,
                  int rows, const Rows *parts, float *scratch) {
    const int hidden = sizes[0], size = sizes[3], inner = sizes[4], wide = sizes[1] * size, narrow = sizes[2] * size;
    scratch = (float *)(((uintptr_t)scratch + 4 * LANES - 1) & -(uintptr_t)(4 * LANES));
    float *n = taken(&scratch, (int64_t)rows * hidden), *q = taken(&scratch, (int64_t)rows * wide);
    float *k = taken(&scratch, (int64_t)rows * narrow), *v = taken(&scratch, (int64_t)rows * narrow);
    float *gate = taken(&scratch, (int64_t)rows * inner), *up = taken(&scratch, (int64_t)rows * inner);
    float *turned = taken(&scratch, TOGETHER * wide), *found = taken(&scratch, TOGETHER * wide);
#define PRODUCT(a, b, c, n, k, beta) (Product){a, b, 0, c, k, k, n, rows, n, k, 1, SINGLE, 1, beta}
    normalise(x, weights[0], rows, hidden, numbers[0], n);
    multiply((Product[]){PRODUCT(n, weights[1], q, wide, hidden, 0), PRODUCT(n, weights[2], k, narrow, hidden, 0),
                         PRODUCT(n, weights[3], v, narrow, hidden, 0)}, 3);
    for (int64_t row = 0; row < rows; row += parts->rows, parts++)
        attend_rows(parts, sizes, numbers[2], turns + row * size, q + row * wide, k + row * narrow, v + row * narrow,
                    turned, found, scratch, q + row * wide);
    multiply(&PRODUCT(q, weights[4], x, hidden, wide, 1), 1);
    normalise(x, weights[5], rows, hidden, numbers[1], n);
    multiply((Product[]){PRODUCT(n, weights[6], gate, inner, hidden, 0), PRODUCT(n, weights[7], up, inner, hidden, 0)}, 2);
    known_kernels()->gated(gate, up, (int64_t)rows * inner);
    multiply(&PRODUCT(gate, weights[8], x, hidden, inner, 1), 1);
}

/* So many layers behind one another, each with WEIGHTS arrays, NUMBERS numbers and `sequences` of the `parts`. */
void bridge_layers(const float *const *weights, const float *numbers, const int32_t *sizes, float *x, const float *turns,
                   int rows, const Rows *parts, float *scratch, int layers, int sequences) {
    enum { WEIGHTS = 9, NUMBERS = 3 };
    for (int i = 0; i < layers; i++)
        layer(weights + i * WEIGHTS, numbers + i * NUMBERS, sizes, x, turns, rows, parts + i * sequences, scratch);
}

/* `normalise`, of whole lines. */
void bridge_norm(const float *x, const float *weights, int rows, int width, float epsilon, float *out) {
    normalise(x, weights, rows, width, epsilon, out);
}

/* out (rows, all columns) = norm(x) B^T, where so many `matrices` (columns, width) make up B. `scratch`: room for x, and
 * a line. */
void bridge_head(const float *weights, float epsilon, const float *const *matrices, const int64_t *columns, int count,
                 const float *x, int rows, int width, float *scratch, float *out) {
    scratch = (float *)(((uintptr_t)scratch + 4 * LANES - 1) & -(uintptr_t)(4 * LANES));
    normalise(x, weights, rows, width, epsilon, scratch);
    Product products[count];
    int64_t all = 0;
    for (int i = 0; i < count; i++) {
        products[i] = (Product){scratch, matrices[i], 0, out + all, width, width, 0, rows, columns[i], width, 1, SINGLE,
                                1, 0};
        all += columns[i];
    }
    for (int i = 0; i < count; i++) products[i].ldc = all;
    multiply(products, count);
}

/* False, and nothing is written, on a processor without vectors. */
int bridge_noise(uint32_t seed, uint32_t position, uint32_t half, float *out) {
    if (!known_kernels()) return 0;
    known_kernels()->noise(seed, position, half, out);
    return 1;
}
