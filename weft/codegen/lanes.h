// Scalar functions that compilers turn into vector code: no branches, no calls. Errors below 2 ulp in float.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

typedef int64_t i64;

namespace weft {

static inline float exp(float x) {
    x = std::min(std::max(x, -87.33654f), 88.72283f);
    const float n = (x * 1.44269504f + 12582912.f) - 12582912.f;  // rounded to an integer
    const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
    const int32_t half = (int32_t)n >> 1, rest = (int32_t)n - half;  // in two steps, so that 2^128 is never needed
    const int32_t a = (half + 127) << 23, b = (rest + 127) << 23;
    float fa, fb;
    std::memcpy(&fa, &a, 4);
    std::memcpy(&fb, &b, 4);
    return p * fa * fb;
}

static inline float tanh(float x) {
    const float a = std::fabs(x), z = x * x;
    float p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z + -5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z + -3.33332819422e-1f;
    const float small = p * z * x + x;
    const float big = std::copysign(1.f - 2.f / (exp(2.f * a) + 1.f), x);
    return a < 0.625f ? small : big;
}

static inline float sigmoid(float x) { return 1.f / (1.f + exp(-x)); }
static inline double exp(double x) { return std::exp(x); }
static inline double tanh(double x) { return std::tanh(x); }
static inline double sigmoid(double x) { return 1. / (1. + std::exp(-x)); }

// NaN must stay NaN, as in torch, so these are not std::max and std::min.
template <class T> static inline T larger(T a, T b) { return a > b || a != a ? a : b; }
template <class T> static inline T smaller(T a, T b) { return a < b || a != a ? a : b; }

}  // namespace weft
