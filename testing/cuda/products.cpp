// Stands in for libcublasLt where there is no GPU: products of matrices in memory of the host, one
// sum after the other. For tests. What is checked: sizes, pitches, and that matrices are aligned as
// was promised when the algorithm was chosen.
#include <cstdint>
#include <cstring>

#include "faults.h"
#include "half.h"
#include "streams.h"

enum { OK = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { R_32F = 0, R_16F = 2, R_16BF = 14, COMPUTE_32F = 68 };

struct Product {
    int32_t turned[2];
};
struct Layout {
    int type;
    uint64_t rows, cols;
    int64_t pitch, step;
    int32_t batch;
};
struct Wish {
    uint64_t workspace;
    uint32_t scheme, aligned[4];
};
struct Algorithm {
    uint64_t data[8];
};
struct Result {
    Algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

static float element(const Layout* l, const void* at, int64_t i) {
    if (l->type == R_32F) return ((const float*)at)[i];
    const uint16_t half = ((const uint16_t*)at)[i];
    return l->type == R_16BF ? of_bf16(half) : of_f16(half);
}

static void put(const Layout* l, void* at, int64_t i, float x) {
    if (l->type == R_32F) {
        ((float*)at)[i] = x;
        return;
    }
    ((uint16_t*)at)[i] = l->type == R_16BF ? to_bf16(x) : to_f16(x);
}

extern "C" {

size_t cublasLtGetVersion() { return setting("STANDIN_CUBLASLT", 130100); }
int cublasLtMatmulAlgoConfigGetAttribute(const Algorithm*, int which, void* to, size_t bytes,
                                         size_t* written) {
    if (which != 0 || bytes != 4) return INVALID_VALUE;
    *(int32_t*)to = 66;
    *written = 4;
    return OK;
}
int cublasLtCreate(void** handle) {
    *handle = new int;
    return OK;
}
int cublasLtDestroy(void* handle) {
    delete (int*)handle;
    return OK;
}
int cublasLtMatmulDescCreate(Product** p, int compute, int scale) {
    if (compute != COMPUTE_32F || scale != R_32F) return NOT_SUPPORTED;
    *p = new Product{};
    return OK;
}
int cublasLtMatmulDescDestroy(Product* p) {
    delete p;
    return OK;
}
int cublasLtMatmulDescSetAttribute(Product* p, int which, const void* from, size_t bytes) {
    if ((which != 3 && which != 4) || bytes != 4) return INVALID_VALUE;
    memcpy(&p->turned[which - 3], from, 4);
    return OK;
}
int cublasLtMatrixLayoutCreate(Layout** l, int type, uint64_t rows, uint64_t cols, int64_t pitch) {
    if (type != R_32F && type != R_16BF && type != R_16F) return NOT_SUPPORTED;
    if (!rows || !cols || pitch < (int64_t)rows) return INVALID_VALUE;
    *l = new Layout{type, rows, cols, pitch, 0, 1};
    return OK;
}
int cublasLtMatrixLayoutDestroy(Layout* l) {
    delete l;
    return OK;
}
int cublasLtMatrixLayoutSetAttribute(Layout* l, int which, const void* from, size_t bytes) {
    if (which == 5 && bytes == 4) return memcpy(&l->batch, from, 4), OK;
    if (which == 6 && bytes == 8) return memcpy(&l->step, from, 8), OK;
    return INVALID_VALUE;
}
int cublasLtMatmulPreferenceCreate(Wish** w) {
    *w = new Wish{0, 7, {256, 256, 256, 256}};
    return OK;
}
int cublasLtMatmulPreferenceDestroy(Wish* w) {
    delete w;
    return OK;
}
int cublasLtMatmulPreferenceSetAttribute(Wish* w, int which, const void* from, size_t bytes) {
    if (which == 1 && bytes == 8) return memcpy(&w->workspace, from, 8), OK;
    if (which == 3 && bytes == 4) return memcpy(&w->scheme, from, 4), OK;
    if (which >= 5 && which <= 8 && bytes == 4) return memcpy(&w->aligned[which - 5], from, 4), OK;
    return INVALID_VALUE;
}

// Sizes as they are multiplied: rows and columns of the operand, transposed if so said.
static uint64_t rows(const Layout* l, int turned) { return turned ? l->cols : l->rows; }
static uint64_t cols(const Layout* l, int turned) { return turned ? l->rows : l->cols; }

static void multiply(Product p, float alpha, const void* a, Layout la, const void* b, Layout lb,
                     float beta, const void* c, void* d, Layout ld) {
    const int64_t depth = (int64_t)cols(&la, p.turned[0]);
    for (int64_t batch = 0; batch < ld.batch; batch++) {
        for (int64_t n = 0; n < (int64_t)ld.cols; n++) {
            for (int64_t m = 0; m < (int64_t)ld.rows; m++) {
                float sum = 0.0f;
                for (int64_t k = 0; k < depth; k++) {
                    const int64_t i = p.turned[0] ? k + m * la.pitch : m + k * la.pitch;
                    const int64_t j = p.turned[1] ? n + k * lb.pitch : k + n * lb.pitch;
                    sum += element(&la, a, batch * la.step + i) * element(&lb, b, batch * lb.step + j);
                }
                const int64_t to = batch * ld.step + m + n * ld.pitch;
                const float old = beta == 0.0f ? 0.0f : beta * element(&ld, c, to);
                put(&ld, d, to, alpha * sum + old);
            }
        }
    }
}

int cublasLtMatmulAlgoGetHeuristic(void*, const Product* p, const Layout* a, const Layout* b,
                                   const Layout* c, const Layout* d, const Wish* w, int wanted,
                                   Result* found, int* count) {
    *count = 0;
    const uint64_t k = cols(a, p->turned[0]);
    if (k != rows(b, p->turned[1]) || rows(a, p->turned[0]) != d->rows ||
        cols(b, p->turned[1]) != d->cols || c->rows != d->rows || c->cols != d->cols) {
        return INVALID_VALUE;
    }
    if (a->batch != b->batch || a->batch != d->batch || a->type != b->type) return INVALID_VALUE;
    if (wanted < 1 || w->scheme & 1) return NOT_SUPPORTED;
    // Some products there is no way to do.
    if (k == 2) return NOT_SUPPORTED;
    *found = Result{};
    for (int i = 0; i < 4; i++) found->algorithm.data[i] = w->aligned[i];
    *count = 1;
    return OK;
}

int cublasLtMatmul(void*, const Product* product, const float* scale, const void* a,
                   const Layout* left, const void* b, const Layout* right, const float* keep,
                   const void* c, const Layout*, void* d, const Layout* made, const Algorithm* how,
                   void* workspace, size_t, void* stream) {
    const void* all[] = {a, b, c, d};
    for (int i = 0; i < 4; i++) {
        if ((uintptr_t)all[i] % how->data[i]) return INVALID_VALUE;
    }
    if (!workspace) return INVALID_VALUE;
    const Product p = *product;
    const Layout la = *left, lb = *right, ld = *made;
    const float alpha = *scale, beta = *keep;
    put(stream, [=] { multiply(p, alpha, a, la, b, lb, beta, c, d, ld); });
    return OK;
}
}
