// Meeting of ranks in shared host memory: a pad per rank, a barrier that spins briefly and then sleeps,
// and never waits for a rank that is dead, gone elsewhere, or too late.
#pragma once
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <type_traits>
#include <unistd.h>

namespace weft {

enum Outcome : int32_t { MET = 0, DEAD = 1, LATE = 2, DISAGREES = 3, REPORTED = 4 };

// One rank's page, mapped by all. Only `sleepers` and `verdict` are written by others; the verdict is rank 0's.
struct Pad {
  std::atomic<uint32_t> epoch;     // barriers entered so far; peers wait and sleep on it
  std::atomic<uint32_t> sleepers;  // peers asleep on `epoch`: a wake-up costs a system call only when this is not 0
  std::atomic<uint64_t> verdict;   // 0, or 1 + outcome + 16 * the rank to blame, and the op above: ends every wait
  std::atomic<uint32_t> ops[4];    // ops[e % 4] is the op for which barrier e was entered
};
static_assert(sizeof(Pad) <= 256, "the python side lays the rest of the page out after 256 bytes");

// One process's view of all pads.
struct World {
  int32_t rank, size, spins, timeout_ms;
  Pad **pads;
  const int32_t *pidfds;  // readable when the process has ended, even if nobody has collected it
  int32_t blamed, outcome;
  uint32_t op;            // op at which a failed wait stood
};

inline int64_t now_ms() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000 + t.tv_nsec / 1000000;
}

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

inline int32_t reported(World *w) {
  const uint64_t verdict = w->pads[0]->verdict.load();
  if (!verdict) return MET;
  const uint32_t low = uint32_t(verdict) - 1;
  w->blamed = low / 16, w->outcome = low % 16, w->op = uint32_t(verdict >> 32);
  return REPORTED;
}

// The first to find fault decides what all ranks will say.
inline int32_t fail(World *w, Outcome outcome, int32_t rank, uint32_t op) {
  uint64_t none = 0;
  w->pads[0]->verdict.compare_exchange_strong(none, (uint64_t(op) << 32) + 1 + outcome + 16 * rank);
  return reported(w);
}

inline bool ended(const World *w, int32_t r) {
  pollfd p{w->pidfds[r], POLLIN, 0};
  return w->pidfds[r] >= 0 && poll(&p, 1, 0) == 1;
}

inline bool reached(const Pad *pad, uint32_t epoch) {
  return int32_t(pad->epoch.load(std::memory_order_acquire) - epoch) >= 0;
}

// Sleep until rank r enters barrier `epoch`; look up every 20 ms for death, a verdict, or the deadline.
inline int32_t sleep_until(World *w, int32_t r, uint32_t epoch, uint32_t op) {
  Pad *pad = w->pads[r];
  const int64_t deadline = now_ms() + w->timeout_ms;
  int32_t outcome = MET;
  pad->sleepers.fetch_add(1);
  while (outcome == MET) {
    uint32_t seen = pad->epoch.load();
    if (int32_t(seen - epoch) >= 0) break;
    timespec nap{0, 20000000};
    syscall(SYS_futex, &pad->epoch, FUTEX_WAIT, seen, &nap, nullptr, 0);
    if (reached(pad, epoch)) break;
    if ((outcome = reported(w)) != MET) break;
    if (ended(w, r)) outcome = fail(w, DEAD, r, op);
    else if (now_ms() > deadline) outcome = fail(w, LATE, r, op);
  }
  pad->sleepers.fetch_sub(1);
  return outcome;
}

// Everyone's writes before it are seen by everyone after it.
inline int32_t barrier(World *w, uint32_t op) {
  Pad *mine = w->pads[w->rank];
  const uint32_t epoch = mine->epoch.load(std::memory_order_relaxed) + 1;
  mine->ops[epoch % 4].store(op, std::memory_order_relaxed);
  mine->epoch.store(epoch);  // sequentially consistent, so a sleeper is never missed
  if (mine->sleepers.load()) syscall(SYS_futex, &mine->epoch, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  for (int32_t r = 0; r < w->size; ++r) {
    for (int32_t s = 0; s < w->spins && !reached(w->pads[r], epoch); ++s) pause_cpu();
    if (!reached(w->pads[r], epoch))
      if (int32_t outcome = sleep_until(w, r, epoch, op)) return outcome;
    if (w->pads[r]->ops[epoch % 4].load(std::memory_order_relaxed) != op) return fail(w, DISAGREES, r, op);
  }
  return reported(w);
}

// Copy past the caches: for memory that this core will not read again, so it need not be fetched first. Written with what compilers have
// built in: to read <immintrin.h> takes longer than to compile most kernels.
#if defined(__AVX__)
#if defined(__AVX512F__)
typedef long long Wide __attribute__((vector_size(64)));
#else
typedef long long Wide __attribute__((vector_size(32)));
#endif
inline void stream_one(Wide *to, Wide x) {
#if defined(__clang__)
  __builtin_nontemporal_store(x, to);
#elif defined(__AVX512F__)
  __builtin_ia32_movntdq512(to, x);
#else
  __builtin_ia32_movntdq256(to, x);
#endif
}
inline void stream(void *to, const void *from, size_t bytes) {
  char *d = static_cast<char *>(to);
  const char *s = static_cast<const char *>(from);
  const size_t head = size_t(-reinterpret_cast<uintptr_t>(d)) & (sizeof(Wide) - 1);
  if (bytes < 4 * sizeof(Wide)) { memcpy(d, s, bytes); return; }
  memcpy(d, s, head), d += head, s += head, bytes -= head;
  size_t i = 0;
  for (; i + sizeof(Wide) <= bytes; i += sizeof(Wide)) {
    Wide x;
    memcpy(&x, s + i, sizeof(Wide));
    stream_one(reinterpret_cast<Wide *>(d + i), x);
  }
  memcpy(d + i, s + i, bytes - i);
}
#else
inline void stream(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }
#endif

inline void drain() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

// As torch does it: a NaN on either side wins.
template <class A, class B> inline std::common_type_t<A, B> larger(A a, B b) { return a > b || a != a ? a : b; }
template <class A, class B> inline std::common_type_t<A, B> smaller(A a, B b) { return a < b || a != a ? a : b; }

inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// In [0, 1), from the element's number in the whole tensor, the seed and the site: what weft's dropout draws everywhere.
inline float uniform(int64_t index, int64_t seed, int64_t site) {
  const uint64_t key = mix(uint64_t(seed) * 0x9e3779b97f4a7c15u + uint64_t(site));
  return float(uint32_t(mix(uint64_t(index) + key) >> 40)) / 16777216.0f;
}

inline float widen(uint16_t bits) {
  uint32_t wide = uint32_t(bits) << 16;
  float f;
  memcpy(&f, &wide, 4);
  return f;
}

inline uint16_t narrow(float f) {  // to bfloat16, nearest even; a NaN stays one
  uint32_t bits;
  memcpy(&bits, &f, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return f != f ? uint16_t(0x7fc0) : uint16_t(rounded);
}

}  // namespace weft
