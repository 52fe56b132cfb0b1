// The inner loops of the assignment solver. `loops.py` says the same in Python, step for step; the two agree to the last bit,
// so sums keep their order here (no -ffast-math, no contraction) and every tie goes to the lowest number.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

using Int = std::int64_t;
using Real = double;
constexpr Real INF = std::numeric_limits<Real>::infinity();
constexpr Int CLAIM = 256;  // the work of moving a claim, against reading one entry of a table

// Mirrors `Kernel` in kernel.py. Edges and claims of node v are at[v] .. at[v + 1] of their lists.
struct Problem {
    Int nodes, edges, times;
    const Int *k, *c_at, *tail, *head, *w_at;
    const Real *w;
    const Int *near_at, *near;                       // edges at each node
    const Int *claim_at, *start, *stop, *m_at;       // claims of each node, none overlapping
    const Real *m, *limit;
    const Int *tail_at, *head_at;                    // where an edge's two messages lie

    Int other(Int e, Int v) const { return tail[e] == v ? head[e] : tail[e]; }
    Int message(Int e, Int v) const { return tail[e] == v ? tail_at[e] : head_at[e]; }
    Real between(Int e, Int v, Int a, Int b) const {  // w of edge e when v takes a and its other end b
        return tail[e] == v ? w[w_at[e] + a * k[head[e]] + b] : w[w_at[e] + b * k[head[e]] + a];
    }
    void add_row(Int e, Int v, Int b, Real *out) const {  // out[a] += w when v takes a and the other end b
        const Int columns = k[head[e]];
        const Real *table = w + w_at[e];
        if (tail[e] == v)
            for (Int a = 0; a < k[v]; a++) out[a] += table[a * columns + b];
        else
            for (Int a = 0; a < k[v]; a++) out[a] += table[b * columns + a];
    }
};

// out[a] = min_b w(v takes a, other end takes b) + h[b]
static void min_sum(const Problem &p, Int e, Int v, const Real *h, Real *out) {
    const Int rows = p.k[p.tail[e]], columns = p.k[p.head[e]];
    const Real *table = p.w + p.w_at[e];
    if (p.tail[e] == v) {
        for (Int a = 0; a < rows; a++, table += columns) {
            Real least = INF;
#pragma omp simd reduction(min : least)
            for (Int b = 0; b < columns; b++) {
                const Real sum = table[b] + h[b];
                least = sum < least ? sum : least;
            }
            out[a] = least;
        }
    } else {
        std::fill(out, out + columns, INF);
        for (Int b = 0; b < rows; b++, table += columns) {
            const Real shift = h[b];
            for (Int a = 0; a < columns; a++) {
                const Real sum = table[a] + shift;
                out[a] = sum < out[a] ? sum : out[a];
            }
        }
    }
}

static Int widest(const Problem &p) { return p.nodes ? *std::max_element(p.k, p.k + p.nodes) : 0; }

// Room left at every time: a tree of minima, each with what is still to be added to all below it.
class Room {
    Int width = 1;
    std::vector<Real> least, owed;

    void take(Int i, Int lo, Int hi, Int start, Int stop, Real amount) {
        if (start <= lo && hi <= stop) { least[i] -= amount; owed[i] -= amount; return; }
        const Int middle = (lo + hi) / 2;
        if (start < middle) take(2 * i, lo, middle, start, stop, amount);
        if (stop > middle) take(2 * i + 1, middle, hi, start, stop, amount);
        least[i] = std::min(least[2 * i], least[2 * i + 1]) + owed[i];
    }
    Real minimum(Int i, Int lo, Int hi, Int start, Int stop) const {
        if (start <= lo && hi <= stop) return least[i];
        const Int middle = (lo + hi) / 2;
        Real found = INF;
        if (start < middle) found = minimum(2 * i, lo, middle, start, stop);
        if (stop > middle) found = std::min(found, minimum(2 * i + 1, middle, hi, start, stop));
        return found + owed[i];
    }

    const Problem &p;

  public:
    explicit Room(const Problem &p) : p(p) {
        while (width < p.times) width *= 2;
        least.assign(2 * width, INF);
        owed.assign(2 * width, 0);
        std::copy(p.limit, p.limit + p.times, least.begin() + width);
        for (Int i = width - 1; i > 0; i--) least[i] = std::min(least[2 * i], least[2 * i + 1]);
    }
    void claim(Int v, Int a, Real sign) {
        for (Int q = p.claim_at[v]; q < p.claim_at[v + 1]; q++)
            if (const Real amount = p.m[p.m_at[q] + a]; amount != 0) take(1, 0, width, p.start[q], p.stop[q], sign * amount);
    }
    bool fits(Int v, Int a) const {
        for (Int q = p.claim_at[v]; q < p.claim_at[v + 1]; q++)
            if (const Real amount = p.m[p.m_at[q] + a]; amount > 0 && minimum(1, 0, width, p.start[q], p.stop[q]) < amount) return false;
        return true;
    }
    // The cheapest strategy of v that fits, or -1. Spoils `score`.
    Int cheapest(Int v, Real *score) const {
        for (Int tries = 0; tries < p.k[v]; tries++) {
            const Int a = std::min_element(score, score + p.k[v]) - score;
            if (score[a] == INF) return -1;
            if (fits(v, a)) return a;
            score[a] = INF;
        }
        return -1;
    }
};

struct Random {  // xorshift64
    std::uint64_t &state;
    std::uint64_t next() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return state >> 11;
    }
    Int below(Int n) { return Int(next() % std::uint64_t(n)); }
    Real unit() { return Real(next()) / 9007199254740992.0; }
};

// Local search by trees: see search.py.
class Walk {
    const Problem &p;
    const Real *c, *price;
    Int *x;
    Random random;
    Room room;
    Int tick = 0;
    std::vector<Int> reached, chosen, oriented;  // the tick at which a node was last met
    std::vector<Int> region, forest, order, up, above, before;
    std::vector<Real> score, row;

    Int root(Int v) {
        while (up[v] != v) v = up[v] = up[up[v]];
        return v;
    }

    void grow(Int size) {  // nodes around a random one, breadth first
        region.clear();
        Int first = random.below(p.nodes);
        if (p.edges && random.below(2)) {
            const Int e = random.below(p.edges);
            first = random.below(2) ? p.tail[e] : p.head[e];
        }
        region.push_back(first);
        reached[first] = tick;
        for (Int i = 0; i < Int(region.size()) && Int(region.size()) < size; i++) {
            const Int v = region[i], degree = p.near_at[v + 1] - p.near_at[v];
            const Int turn = degree ? random.below(degree) : 0;
            for (Int j = 0; j < degree && Int(region.size()) < size; j++) {
                const Int u = p.other(p.near[p.near_at[v] + (j + turn) % degree], v);
                if (reached[u] != tick) { reached[u] = tick; region.push_back(u); }
            }
        }
        if (random.below(2))
            for (Int i = Int(region.size()) - 1; i > 0; i--) std::swap(region[i], region[random.below(i + 1)]);
    }

    void thin() {  // those of the region that close no cycle
        forest.clear();
        std::vector<Int> roots;
        for (const Int v : region) {
            roots.clear();
            bool cycle = false;
            for (Int j = p.near_at[v]; j < p.near_at[v + 1] && !cycle; j++) {
                const Int u = p.other(p.near[j], v);
                if (chosen[u] != tick) continue;
                const Int r = root(u);
                cycle = std::find(roots.begin(), roots.end(), r) != roots.end();
                roots.push_back(r);
            }
            if (cycle) continue;
            up[v] = v;
            for (const Int r : roots) up[r] = v;
            chosen[v] = tick;
            forest.push_back(v);
        }
    }

    void orient() {  // every tree from a root down, `above` the edge to the parent
        order.clear();
        for (const Int f : forest) {
            if (oriented[f] == tick) continue;
            oriented[f] = tick;
            above[f] = -1;
            order.push_back(f);
            for (std::size_t i = order.size() - 1; i < order.size(); i++) {
                const Int v = order[i];
                for (Int j = p.near_at[v]; j < p.near_at[v + 1]; j++) {
                    const Int u = p.other(p.near[j], v);
                    if (chosen[u] != tick || oriented[u] == tick) continue;
                    oriented[u] = tick;
                    above[u] = p.near[j];
                    order.push_back(u);
                }
            }
        }
    }

    Real held() const {  // cost of the forest's nodes and of every edge at them
        Real sum = 0;
        for (const Int v : forest) {
            sum += c[p.c_at[v] + x[v]];
            for (Int j = p.near_at[v]; j < p.near_at[v + 1]; j++) {
                const Int e = p.near[j], u = p.other(e, v);
                if (chosen[u] != tick || p.tail[e] == v) sum += p.between(e, v, x[v], x[u]);
            }
        }
        return sum;
    }

    void gather(Real scale) {  // score[a] of each node: its best with all below it, the rest of the graph as it is
        for (const Int v : forest) {
            Real *out = &score[p.c_at[v]];
            for (Int a = 0; a < p.k[v]; a++) out[a] = c[p.c_at[v] + a] + scale * price[p.c_at[v] + a];
            for (Int j = p.near_at[v]; j < p.near_at[v + 1]; j++) {
                const Int u = p.other(p.near[j], v);
                if (chosen[u] != tick) p.add_row(p.near[j], v, x[u], out);
            }
            work += p.k[v] * (p.near_at[v + 1] - p.near_at[v] + 1) + CLAIM * (p.claim_at[v + 1] - p.claim_at[v]);
        }
        for (Int i = Int(order.size()) - 1; i >= 0; i--) {
            const Int v = order[i], e = above[v];
            if (e < 0) continue;
            const Int u = p.other(e, v);
            min_sum(p, e, u, &score[p.c_at[v]], row.data());
            for (Int a = 0; a < p.k[u]; a++) score[p.c_at[u] + a] += row[a];
            work += p.k[u] * p.k[v];
        }
    }

    Int settle() {  // choose from the roots down what fits; how many nodes found something
        for (const Int v : forest) { before[v] = x[v]; room.claim(v, x[v], -1); }
        Int done = 0;
        for (const Int v : order) {
            std::copy(&score[p.c_at[v]], &score[p.c_at[v]] + p.k[v], row.data());
            if (above[v] >= 0) p.add_row(above[v], v, x[p.other(above[v], v)], row.data());
            const Int a = room.cheapest(v, row.data());
            if (a < 0) break;
            x[v] = a;
            room.claim(v, a, 1);
            done++;
        }
        return done;
    }

    void undo(Int done) {
        for (Int i = 0; i < done; i++) room.claim(order[i], x[order[i]], -1);
        for (const Int v : forest) { x[v] = before[v]; room.claim(v, x[v], 1); }
    }

  public:
    Int work = 0;

    Walk(const Problem &p, const Real *c, const Real *price, Int *x, std::uint64_t &seed)
        : p(p), c(c), price(price), x(x), random{seed}, room(p), reached(p.nodes), chosen(p.nodes), oriented(p.nodes), up(p.nodes),
          above(p.nodes), before(p.nodes), score(p.c_at[p.nodes]), row(widest(p)) {
        for (Int v = 0; v < p.nodes; v++) room.claim(v, x[v], 1);
    }

    Real move(Real heat) {  // the change in cost of one move; zero when it was taken back
        tick++;
        const Real low = std::log(4.0), high = std::log(1.5 * Real(p.nodes) + 4.0);
        grow(std::min(p.nodes, Int(std::exp(low + random.unit() * (high - low)))));
        const Real scale = 1.25 * random.unit(), patience = heat > 0 ? -std::log(1.0 - random.unit()) * heat : 0.0;
        thin();
        orient();
        const Real was = held();
        gather(scale);
        const Int done = settle();
        if (done == Int(order.size()))
            if (const Real change = held() - was; change <= patience) return change;
        undo(done);
        return 0;
    }
};

extern "C" {

// One pass of messages over the nodes, up or down their numbers: see bound.py.
void sweep(const Problem *problem, const Real *c, Real *messages, Real *beliefs, Int up) {
    const Problem &p = *problem;
    std::vector<Real> back(widest(p));
    for (Int i = 0; i < p.nodes; i++) {
        const Int v = up ? i : p.nodes - 1 - i, k = p.k[v];
        Real *theta = beliefs + p.c_at[v];
        std::copy(c + p.c_at[v], c + p.c_at[v] + k, theta);
        Int behind = 0, ahead = 0;
        for (Int j = p.near_at[v]; j < p.near_at[v + 1]; j++) {
            const Int e = p.near[j], u = p.other(e, v);
            Real *own = messages + p.message(e, v);
            if ((u < v) == bool(up)) {
                const Real *theirs = messages + p.message(e, u);
                for (Int b = 0; b < p.k[u]; b++) back[b] = -theirs[b];
                min_sum(p, e, v, back.data(), own);
                behind++;
            } else {
                ahead++;
            }
            for (Int a = 0; a < k; a++) theta[a] += own[a];
        }
        const Real share = 1.0 / Real(std::max<Int>(std::max(behind, ahead), 1));
        for (Int j = p.near_at[v]; j < p.near_at[v + 1]; j++) {
            const Int e = p.near[j];
            if ((p.other(e, v) < v) == bool(up)) continue;
            Real *own = messages + p.message(e, v);
            for (Int a = 0; a < k; a++) own[a] -= share * theta[a];
        }
    }
}

Real bound(const Problem *problem, const Real *c, const Real *messages) {
    const Problem &p = *problem;
    std::vector<Real> back(widest(p)), out(widest(p));
    Real sum = 0;
    for (Int e = 0; e < p.edges; e++) {
        const Int u = p.tail[e], v = p.head[e];
        for (Int a = 0; a < p.k[u]; a++) back[a] = -messages[p.tail_at[e] + a];
        min_sum(p, e, v, back.data(), out.data());
        for (Int b = 0; b < p.k[v]; b++) out[b] -= messages[p.head_at[e] + b];
        sum += *std::min_element(out.begin(), out.begin() + p.k[v]);
    }
    for (Int v = 0; v < p.nodes; v++) {
        std::copy(c + p.c_at[v], c + p.c_at[v] + p.k[v], out.begin());
        for (Int j = p.near_at[v]; j < p.near_at[v + 1]; j++) {
            const Real *own = messages + p.message(p.near[j], v);
            for (Int a = 0; a < p.k[v]; a++) out[a] += own[a];
        }
        sum += *std::min_element(out.begin(), out.begin() + p.k[v]);
    }
    return sum;
}

// Choose node after node, up or down, by its cost, its chosen neighbours and the messages of the others, what fits.
Int decode(const Problem *problem, const Real *c, const Real *messages, Int up, Int *x) {
    const Problem &p = *problem;
    Room room(p);
    std::vector<Real> score(widest(p));
    std::fill(x, x + p.nodes, -1);
    for (Int i = 0; i < p.nodes; i++) {
        const Int v = up ? i : p.nodes - 1 - i;
        std::copy(c + p.c_at[v], c + p.c_at[v] + p.k[v], score.begin());
        for (Int j = p.near_at[v]; j < p.near_at[v + 1]; j++) {
            const Int e = p.near[j], u = p.other(e, v);
            if (x[u] >= 0) { p.add_row(e, v, x[u], score.data()); continue; }
            const Real *own = messages + p.message(e, v);
            for (Int a = 0; a < p.k[v]; a++) score[a] += own[a];
        }
        x[v] = room.cheapest(v, score.data());
        if (x[v] < 0) return 0;
        room.claim(v, x[v], 1);
    }
    return 1;
}

// Walk until `work` table entries were read. x goes along; the best x met is left in `best`, its gain is returned.
Real walk(const Problem *problem, const Real *c, const Real *price, Int *x, Int *best, std::uint64_t *seed, Real heat, Int work) {
    Walk w(*problem, c, price, x, *seed);
    Real gain = 0, most = 0;
    while (w.work < work) {
        gain -= w.move(heat);
        w.work += 1;
        if (gain > most) {
            most = gain;
            std::copy(x, x + problem->nodes, best);
        }
    }
    return most;
}
}
