// Linear passes over the vertices of a batch. Each but `seat` has a numpy twin in native.py, used where there is no compiler.
#include <algorithm>
#include <cstdint>
#include <vector>

typedef int64_t i64;

// The few names of CPython used below, declared here so that no header is needed to build.
struct PyObject { intptr_t count; void *type; };
extern "C" {
extern char PyTuple_Type, PyList_Type, PyLong_Type, _Py_NoneStruct;
intptr_t PyTuple_Size(PyObject *);
PyObject *PyTuple_GetItem(PyObject *, intptr_t);
intptr_t PyList_Size(PyObject *);
PyObject *PyList_GetItem(PyObject *, intptr_t);
long long PyLong_AsLongLong(PyObject *);
}

static inline bool is_tuple(PyObject *o) { return o->type == &PyTuple_Type; }
static inline bool is_list(PyObject *o) { return o->type == &PyList_Type; }
static inline intptr_t size(PyObject *o) { return is_tuple(o) ? PyTuple_Size(o) : is_list(o) ? PyList_Size(o) : 0; }
static inline PyObject *item(PyObject *o, intptr_t i) { return is_tuple(o) ? PyTuple_GetItem(o, i) : PyList_GetItem(o, i); }

struct Open { PyObject *node; intptr_t next, size; };

extern "C" {

// Vertices of a list of nested tuples; -1 when there are more than any sane batch has (a list that contains itself).
// Breadth first, so that many objects are on their way from memory at once: the pass after this one finds them in the cache.
i64 weft_count(PyObject *trees) {
    std::vector<PyObject *> queue;
    queue.reserve(4096);
    for (intptr_t s = 0, samples = size(trees); s < samples; ++s) {
        queue.push_back(item(trees, s));
        __builtin_prefetch(queue.back());
    }
    for (size_t i = 0; i < queue.size(); ++i) {
        if (queue.size() > (size_t)1 << 25) return -1;
        PyObject *node = queue[i];
        for (intptr_t k = 0, n = size(node); k < n; ++k) {
            queue.push_back(item(node, k));
            __builtin_prefetch(queue.back());
        }
    }
    return (i64)queue.size();
}

// Number the vertices children first; 0 when every leaf was an integer or None, else -1 and Python looks again.
i64 weft_flatten(PyObject *trees, i64 *first, i64 *child, i64 *row, i64 *sample, i64 *depth) {
    std::vector<Open> stack;
    std::vector<i64> done;  // numbers of finished vertices whose parent is still open
    i64 v = 0, e = 0;
    for (intptr_t s = 0, samples = size(trees); s < samples; ++s) {
        sample[s] = v;
        PyObject *node = item(trees, s);
        for (;;) {
            if (intptr_t n = size(node)) {
                stack.push_back({node, 1, n});
                node = item(node, 0);
                continue;
            }
            if (node->type == &PyLong_Type) {
                row[v] = PyLong_AsLongLong(node);
                if (row[v] < 0) return -1;
            } else if ((void *)node == (void *)&_Py_NoneStruct || is_tuple(node) || is_list(node)) row[v] = -1;
            else return -1;
            first[v] = e;
            depth[v] = 0;
            done.push_back(v++);
            while (!stack.empty() && stack.back().next == stack.back().size) {
                const intptr_t n = stack.back().size;
                first[v] = e;
                row[v] = -1;
                depth[v] = 0;
                for (intptr_t k = 0; k < n; ++k) {
                    child[e] = done[done.size() - n + k];
                    depth[v] = std::max(depth[v], depth[child[e++]] + 1);
                }
                done.resize(done.size() - n);
                done.push_back(v++);
                stack.pop_back();
            }
            if (stack.empty()) break;
            node = item(stack.back().node, stack.back().next++);
        }
        done.clear();
    }
    sample[size(trees)] = v;
    first[v] = e;
    return 0;
}

// Longest path below each vertex; -1 if all is well, else a vertex on a cycle.
i64 weft_depth(i64 n, const i64 *first, const i64 *child, i64 *depth) {
    std::vector<i64> next(first, first + n), stack;
    for (i64 v = 0; v < n; ++v) depth[v] = -1;  // -1 untouched, -2 open
    for (i64 root = 0; root < n; ++root) {
        if (depth[root] >= 0) continue;
        stack.push_back(root);
        depth[root] = -2;
        while (!stack.empty()) {
            const i64 v = stack.back();
            if (next[v] < first[v + 1]) {
                const i64 c = child[next[v]++];
                if (c < 0) continue;
                if (depth[c] == -2) return c;
                if (depth[c] == -1) { depth[c] = -2; stack.push_back(c); }
                continue;
            }
            i64 below = -1;
            for (i64 e = first[v]; e < first[v + 1]; ++e)
                if (child[e] >= 0 && depth[child[e]] > below) below = depth[child[e]];
            depth[v] = below + 1;
            stack.pop_back();
        }
    }
    return -1;
}

// Order the vertices of each round after their parents: children of the first parent first, roots last.
// start[r] .. start[r + 1] are the places of round r; vertex[place] is the answer.
void weft_order(i64 n, i64 rounds, const i64 *first, const i64 *child, const i64 *round, const i64 *start, i64 *vertex) {
    std::vector<i64> front(start, start + rounds), back(start + 1, start + rounds + 1);
    std::vector<char> seen(n, 0);
    for (i64 e = 0, edges = first[n]; e < edges; ++e)
        if (child[e] >= 0) seen[child[e]] = 1;
    for (i64 v = n - 1; v >= 0; --v)
        if (!seen[v]) vertex[--back[round[v]]] = v;
    std::fill(seen.begin(), seen.end(), 0);
    for (i64 r = rounds - 1; r >= 0; --r)
        for (i64 p = start[r]; p < start[r + 1]; ++p) {
            const i64 v = vertex[p];
            for (i64 e = first[v]; e < first[v + 1]; ++e)
                if (child[e] >= 0 && !seen[child[e]]) {
                    seen[child[e]] = 1;
                    vertex[front[round[child[e]]]++] = child[e];
                }
        }
}

// The children that each place reads together: degree[p] of them from number skip[p] on, by place; absent ones are place n.
void weft_edges(i64 n, const i64 *vertex, const i64 *first, const i64 *child, const i64 *skip, const i64 *degree, const i64 *place,
                i64 *edge_first, i64 *edge_child, i64 *edge_parent) {
    i64 e = 0;
    for (i64 p = 0; p < n; ++p) {
        const i64 *below = child + first[vertex[p]] + skip[p];
        edge_first[p] = e;
        for (i64 k = 0; k < degree[p]; ++k, ++e) {
            edge_child[e] = place[below[k] < 0 ? n : below[k]];
            edge_parent[e] = p;
        }
    }
    edge_first[n] = e;
}

// The edges that end in each place, in order: edge[first[p]] .. edge[first[p + 1]] have to[e] == p.
void weft_reverse(i64 edges, i64 places, const i64 *to, i64 *first, i64 *edge) {
    std::fill(first, first + places + 1, 0);
    for (i64 e = 0; e < edges; ++e) ++first[to[e] + 1];
    for (i64 p = 0; p < places; ++p) first[p + 1] += first[p];
    std::vector<i64> fill(first, first + places);
    for (i64 e = 0; e < edges; ++e) edge[fill[to[e]]++] = e;
}

// A whole schedule by depth in one pass after the other, for graphs whose levels hold one class each (class: type, has children).
// rounds holds (class, first place, size) of every level; range the lowest and highest input row of every class.
// Returns the number of levels; -1 where a level holds two classes, -2 where a vertex does not have the children its type reads.
i64 weft_schedule(i64 n, i64 kinds, const i64 *first, const i64 *child, const i64 *kind, const i64 *row, const i64 *depth,
                  const i64 *slots, const i64 *rest, i64 *klass, i64 *vertex, i64 *place, i64 *rounds, i64 *range, i64 *row_at,
                  i64 *edge_first, i64 *edge_child, i64 *edge_parent) {
    i64 levels = 0;
    for (i64 v = 0; v < n; ++v) {
        const i64 arity = first[v + 1] - first[v], k = kind[v];
        if ((arity > slots[k] && !rest[k]) || (arity && arity < slots[k])) return -2;
        for (i64 e = first[v]; e < first[v + 1]; ++e) if (child[e] < 0) return -2;
        klass[v] = 2 * k + (arity > 0);
        levels = std::max(levels, depth[v] + 1);
    }
    std::vector<i64> of(levels, -1), start(levels + 1, 0);
    for (i64 v = 0; v < n; ++v) {
        i64 &own = of[depth[v]];
        if (own >= 0 && own != klass[v]) return -1;
        own = klass[v];
        ++start[depth[v] + 1];
    }
    for (i64 r = 0; r < levels; ++r) start[r + 1] += start[r];
    std::vector<i64> by_round(n);
    weft_order(n, levels, first, child, depth, start.data(), by_round.data());
    i64 p = 0, e = 0;
    for (i64 k = 0; k < 2 * kinds; ++k) {
        i64 low = INT64_MAX, high = -1;
        for (i64 r = 0; r < levels; ++r) {
            if (of[r] != k) continue;
            rounds[3 * r] = k, rounds[3 * r + 1] = p, rounds[3 * r + 2] = start[r + 1] - start[r];
            for (i64 i = start[r]; i < start[r + 1]; ++i, ++p) {
                const i64 v = by_round[i];
                vertex[p] = v, place[v] = p, row_at[p] = row[v];
                low = std::min(low, row[v]), high = std::max(high, row[v]);
            }
        }
        range[2 * k] = low, range[2 * k + 1] = high;
    }
    place[n] = n;
    for (p = 0; p < n; ++p) {
        const i64 v = vertex[p], k = kind[v];
        edge_first[p] = e;
        for (i64 c = first[v] + slots[k]; rest[k] && c < first[v + 1]; ++c, ++e) edge_child[e] = place[child[c]], edge_parent[e] = p;
    }
    edge_first[n] = e;
    return levels;
}

// Vertices into rooms that run one after the other, each for one class: of those that wait for nothing, first the ones with the longest way up.
// room[v] is the answer; -1 where some vertex finds none. A room that is full has no edge left over: spare edges need a spare row.
i64 weft_seat(i64 n, i64 classes, const i64 *first, const i64 *child, const i64 *depth, const i64 *klass, const i64 *degree,
              i64 rooms, const i64 *of, const i64 *rows, const i64 *edges, i64 *room) {
    i64 levels = 0;
    for (i64 v = 0; v < n; ++v) levels = std::max(levels, depth[v] + 1);
    std::vector<i64> start(levels + 1, 0), by_depth(n), up(n, 0), waiting(n, 0), above_first(n + 1, 0);
    for (i64 v = 0; v < n; ++v) ++start[depth[v] + 1];
    for (i64 d = 0; d < levels; ++d) start[d + 1] += start[d];
    for (i64 v = 0; v < n; ++v) by_depth[start[depth[v]]++] = v;
    for (i64 i = n - 1; i >= 0; --i) {
        const i64 v = by_depth[i];
        for (i64 e = first[v]; e < first[v + 1]; ++e)
            if (child[e] >= 0) up[child[e]] = std::max(up[child[e]], up[v] + 1), ++waiting[v], ++above_first[child[e] + 1];
    }
    for (i64 v = 0; v < n; ++v) above_first[v + 1] += above_first[v];
    std::vector<i64> above(above_first[n]), fill(above_first.begin(), above_first.end() - 1);
    for (i64 v = 0; v < n; ++v)
        for (i64 e = first[v]; e < first[v + 1]; ++e)
            if (child[e] >= 0) above[fill[child[e]]++] = v;
    std::vector<std::vector<i64>> ready(classes * levels);
    std::vector<i64> woken, top(classes, -1);
    const auto wake = [&](i64 v) { ready[klass[v] * levels + up[v]].push_back(v), top[klass[v]] = std::max(top[klass[v]], up[v]); };
    for (i64 v = 0; v < n; ++v) if (!waiting[v]) wake(v);
    i64 seated = 0;
    for (i64 r = 0; r < rooms; ++r) {
        const i64 k = of[r];
        i64 used = 0, taken = 0;
        for (bool room_left = true; room_left && top[k] >= 0;) {
            std::vector<i64> &here = ready[k * levels + top[k]];
            if (here.empty()) { --top[k]; continue; }
            const i64 v = here.back(), more = taken + degree[v];
            room_left = used + 1 + (more < edges[r]) <= rows[r] && more <= edges[r];
            if (!room_left) break;
            here.pop_back(), room[v] = r, taken = more, ++used;
            for (i64 a = above_first[v]; a < above_first[v + 1]; ++a) if (!--waiting[above[a]]) woken.push_back(above[a]);
        }
        seated += used;
        for (const i64 v : woken) wake(v);
        woken.clear();
    }
    return seated == n ? 0 : -1;
}
}
