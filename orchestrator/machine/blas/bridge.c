/* The matrix product that MLX calls, by the OpenBLAS of NumPy's wheels, whose sizes have 64 bits.
 *
 * For each PROCESSOR, x86_64 and aarch64, with ziglang 0.17.1 from the package index, byte for byte:
 *
 *   python -m ziglang cc -target PROCESSOR-linux-gnu.2.17 -shared -nostdlib -Os -s -Wl,--build-id=none \
 *       -o bridge-PROCESSOR.so bridge.c
 */
#include <stdint.h>

extern void scipy_cblas_sgemm64_(int order, int transpose_a, int transpose_b, int64_t m, int64_t n, int64_t k,
                                 float alpha, const float *a, int64_t lda, const float *b, int64_t ldb,
                                 float beta, float *c, int64_t ldc);

void cblas_sgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
    scipy_cblas_sgemm64_(order, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
