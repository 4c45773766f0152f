// A call cut into items that threads take in turn, and put together again.
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>

#include "attend.h"
#include "dispatch.h"
#include "pool.h"

namespace kvstrata {
namespace {

constexpr int ROWS_TOGETHER = 32;  // queries x group that go over a page at once: their scores stay in the first cache
constexpr int64_t FEWEST_PAGES = 8;  // of an item, where a segment is split: starting one costs about a page
constexpr int ITEMS_PER_THREAD = 4;  // so that uneven segments and threads that start late even out
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f, INF = std::numeric_limits<float>::infinity();

// Memory that grows and stays, one for each Python thread: what a step needs, the next needs again.
class Buffer {
 public:
  ~Buffer() { std::free(data_); }

  char* take(int64_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      data_ = static_cast<char*>(std::aligned_alloc(64, size_t(round_up(bytes, 64))));
      if (!data_) throw std::bad_alloc();
      size_ = round_up(bytes, 64);
    }
    return data_;
  }

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
};

// Queries of every row that share one pass over the pages: columns first .. last - 1 of q.
struct Piece {
  int64_t first, last;
  bool opens;  // the first piece: it clears what the others add to
};

class Plan {
 public:
  Plan(const Call& call, Piece piece);
  void run();

 private:
  struct Part {
    int64_t segment, first, last;  // pages
  };
  struct Rows {
    int count;           // real queries x group
    int64_t first;       // column in q of the first of them
    int oldest_age;
  };

  Rows rows_of(int64_t segment) const;
  int64_t pages_of(int64_t segment) const;
  void cut();
  void lay_out();
  void attend(int64_t part, int thread);
  void finish(int64_t segment, int thread);
  void add_mass(int64_t segment, const Rows& rows, const float* lse, int thread);
  void clear(int64_t segment, const Rows& rows);
  float* p_of(int64_t segment, int thread) const;
  int64_t entries_seen(int64_t segment, int64_t age) const;

  float* acc(int64_t part) const { return results_ + part * result_size_; }
  float* max(int64_t part) const { return acc(part) + max_rows_ * acc_stride_; }
  float* sum(int64_t part) const { return max(part) + max_rows_; }

  const Call& call_;
  const Kernels& kernels_;
  const Piece piece_;
  const int max_rows_;
  const int64_t acc_stride_;
  bool keep_p_ = false;
  std::vector<Part> parts_;
  std::vector<int64_t> first_part_;  // [S + 1]
  std::vector<std::atomic<int>> left_;  // parts of a segment still to do
  int64_t longest_ = 0;                 // pages of a segment
  int64_t result_size_ = 0, scratch_size_ = 0, p_size_ = 0;
  float *results_ = nullptr, *shared_p_ = nullptr;
  std::vector<int64_t> shared_p_at_;    // [S] where a split segment keeps its p; -1: in its thread's scratch
  char* scratch_ = nullptr;
};

Plan::Plan(const Call& call, Piece piece)
    : call_(call),
      kernels_(*isa().attention),
      piece_(piece),
      max_rows_(int((piece.last - piece.first) * call.group)),
      acc_stride_(round_up(call.v_dim, ACC_ALIGN)),
      left_(call.segments()) {
  const int64_t youngest = call.queries - piece.last;
  keep_p_ = call.mass && youngest < int64_t(call.weights.size());
  cut();
  lay_out();
}

Plan::Rows Plan::rows_of(int64_t segment) const {
  const int64_t first = std::max(piece_.first, call_.queries - call_.tokens[segment / call_.heads]);
  const int64_t queries = std::max<int64_t>(0, piece_.last - first);
  return {int(queries * call_.group), first, int(call_.queries - 1 - first)};
}

int64_t Plan::pages_of(int64_t segment) const {
  int64_t pages = 0;
  for (const Resolved& tier : call_.tiers) pages += tier.start[segment + 1] - tier.start[segment];
  return pages;
}

// One part for each segment, or several for long ones where there are threads to share them.
void Plan::cut() {
  int64_t total = 0;
  for (int64_t s = 0; s < call_.segments(); ++s) total += pages_of(s);
  int64_t size = std::max<int64_t>(FEWEST_PAGES, total / (int64_t(call_.threads) * ITEMS_PER_THREAD));
  if (call_.threads == 1) size = std::max<int64_t>(total, 1);
  first_part_.push_back(0);
  for (int64_t s = 0; s < call_.segments(); ++s) {
    const int64_t pages = pages_of(s), count = std::max<int64_t>(1, (pages + size - 1) / size);
    for (int64_t i = 0; i < count; ++i) parts_.push_back({s, pages * i / count, pages * (i + 1) / count});
    first_part_.push_back(int64_t(parts_.size()));
    left_[s].store(int(count), std::memory_order_relaxed);
    longest_ = std::max(longest_, pages);
  }
}

void Plan::lay_out() {
  static thread_local Buffer results, shared, scratch;
  result_size_ = round_up(max_rows_ * (acc_stride_ + 2), 16);
  results_ = reinterpret_cast<float*>(results.take(int64_t(parts_.size()) * result_size_ * 4));
  const int64_t page = max_rows_ * int64_t(PAGE + 1);  // p and p_max
  int64_t shared_size = 0, longest_whole = 0;
  shared_p_at_.assign(call_.segments(), -1);
  for (int64_t s = 0; keep_p_ && s < call_.segments(); ++s) {
    if (first_part_[s + 1] - first_part_[s] > 1) {
      shared_p_at_[s] = shared_size;
      shared_size += round_up(pages_of(s) * page, 16);
    } else {
      longest_whole = std::max(longest_whole, pages_of(s));
    }
  }
  shared_p_ = reinterpret_cast<float*>(shared.take(shared_size * 4));
  const int64_t q_size = round_up(int64_t(max_rows_) * call_.k_dim * 4, 64);
  p_size_ = round_up(longest_whole * page * 4, 64);
  scratch_size_ = q_size + p_size_ + round_up(kernels_.scratch_bytes(max_rows_, call_.k_dim, call_.v_dim), 64);
  scratch_ = scratch.take(scratch_size_ * call_.threads);
}

float* Plan::p_of(int64_t segment, int thread) const {
  if (!keep_p_) return nullptr;
  if (shared_p_at_[segment] >= 0) return shared_p_ + shared_p_at_[segment];
  return reinterpret_cast<float*>(scratch_ + thread * scratch_size_);
}

void Plan::run() {
  parallel(call_.threads, int64_t(parts_.size()), [this](int64_t part, int thread) {
    const int64_t segment = parts_[part].segment;
    attend(part, thread);
    if (left_[segment].fetch_sub(1, std::memory_order_acq_rel) == 1) finish(segment, thread);
  });
}

void Plan::attend(int64_t part, int thread) {
  const Part& p = parts_[part];
  const Rows rows = rows_of(p.segment);
  if (rows.count == 0) return;
  const int64_t b = p.segment / call_.heads, h = p.segment % call_.heads;
  char* scratch = scratch_ + thread * scratch_size_ + p_size_;
  float* q = reinterpret_cast<float*>(scratch);
  const float factor = call_.softcap > 0 ? call_.scale / call_.softcap : call_.scale * LOG2E;
  for (int r = 0; r < rows.count; ++r) {
    const int64_t query = rows.first + r / call_.group, head = h * call_.group + r % call_.group;
    const Array& a = call_.q;
    const char* from = a.data + (b * a.stride[0] + head * a.stride[1] + query * a.stride[2]) * a.item;
    kernels_.load(from, call_.dtype, call_.k_dim, factor, q + int64_t(r) * call_.k_dim);
  }
  Entries tiers[MAX_TIERS];
  const int32_t* positions = call_.positions_of(p.segment);
  for (size_t i = 0; i < call_.tiers.size(); ++i) {
    const Resolved& tier = call_.tiers[i];
    tiers[i] = {tier.format, tier.of(p.segment), tier.lengths[p.segment],
                positions ? positions + call_.offsets[i] : nullptr};
  }
  int32_t after[MAX_ROWS];
  for (int i = 0; positions && i < rows.count / call_.group; ++i) {
    const int64_t own = tiers[0].positions[tiers[0].length - 1 - (rows.oldest_age - i)];
    after[i] = int32_t(std::max<int64_t>(own - call_.window, std::numeric_limits<int32_t>::min()));
  }
  float* kept = p_of(p.segment, thread);
  const int64_t all_pages = pages_of(p.segment);
  Item item{};
  item.tiers = tiers;
  item.tier_count = int(call_.tiers.size());
  item.first = p.first;
  item.last = p.last;
  item.rows = rows.count;
  item.group = int(call_.group);
  item.oldest_age = rows.oldest_age;
  item.q = q;
  item.softcap = call_.softcap * LOG2E;
  item.after = positions ? after : nullptr;
  item.acc = acc(part);
  item.acc_stride = acc_stride_;
  item.max = max(part);
  item.sum = sum(part);
  if (kept) {
    item.p = kept + p.first * rows.count * PAGE;
    item.p_max = kept + all_pages * rows.count * PAGE + p.first * rows.count;
  }
  item.scratch = scratch + round_up(int64_t(max_rows_) * call_.k_dim * 4, 64);
  kernels_.attend(item);
}

// Merge the parts of a segment in their order, whoever was last to end: results do not depend on timing.
void Plan::finish(int64_t segment, int thread) {
  const Rows rows = rows_of(segment);
  clear(segment, rows);
  const int64_t b = segment / call_.heads, h = segment % call_.heads;
  const int64_t begin = first_part_[segment], end = first_part_[segment + 1];
  float lse[MAX_ROWS];  // base 2
  for (int r = 0; r < rows.count; ++r) {
    const int64_t query = rows.first + r / call_.group, head = h * call_.group + r % call_.group;
    const float sink = call_.sinks ? call_.sinks[head] * LOG2E : -INF;
    float top = sink, total = 0.0f;
    for (int64_t part = begin; part < end; ++part) top = std::max(top, max(part)[r]);
    if (call_.sinks && top != -INF) total = std::exp2(sink - top);
    float* merged = acc(begin) + r * acc_stride_;
    for (int64_t part = begin; part < end && top != -INF; ++part) {
      const float factor = std::exp2(max(part)[r] - top);
      total += sum(part)[r] * factor;
      const float* from = acc(part) + r * acc_stride_;
      for (int64_t d = 0; d < call_.v_dim; ++d) merged[d] = (part == begin ? 0.0f : merged[d]) + from[d] * factor;
    }
    lse[r] = top == -INF ? -INF : top + std::log2(total);
    const Array& a = call_.out;
    char* to = a.data + (b * a.stride[0] + head * a.stride[1] + query * a.stride[2]) * a.item;
    kernels_.store(merged, top == -INF ? 0.0f : 1.0f / total, call_.v_dim, call_.dtype, to);
    if (call_.lse) call_.lse[(b * call_.heads * call_.group + head) * call_.queries + query] = lse[r] * LN2;
  }
  if (keep_p_ && rows.count) add_mass(segment, rows, lse, thread);
}

// Results of queries that are not real, and mass where the first piece begins.
void Plan::clear(int64_t segment, const Rows& rows) {
  const int64_t b = segment / call_.heads, h = segment % call_.heads;
  for (int64_t query = piece_.first; query < std::min(rows.first, piece_.last); ++query) {
    for (int64_t g = 0; g < call_.group; ++g) {
      const int64_t head = h * call_.group + g;
      const Array& a = call_.out;
      std::memset(a.data + (b * a.stride[0] + head * a.stride[1] + query * a.stride[2]) * a.item, 0,
                  call_.v_dim * a.item);
      if (call_.lse) call_.lse[(b * call_.heads * call_.group + head) * call_.queries + query] = -INF;
    }
  }
  if (call_.mass && piece_.opens) std::memset(call_.mass + segment * call_.width, 0, call_.width * sizeof(float));
}

int64_t Plan::entries_seen(int64_t segment, int64_t age) const {
  const int32_t* positions = call_.positions_of(segment);
  const int64_t own = call_.tiers[0].lengths[segment];
  int64_t seen = 0;
  for (size_t i = 0; i < call_.tiers.size(); ++i) {
    const Resolved& tier = call_.tiers[i];
    if (!positions) {
      seen += std::max<int64_t>(0, tier.stored[segment] - (i ? 0 : age));
      continue;
    }
    const int64_t length = tier.lengths[segment], open = std::max<int64_t>(0, length - (i ? 0 : age));
    const int64_t after = int64_t(positions[call_.offsets[0] + own - 1 - age]) - call_.window;
    for (int64_t t = 0; t < open; ++t) {
      seen += t % PAGE < tier.of(segment)[t / PAGE].entries && positions[call_.offsets[i] + t] > after;
    }
  }
  return seen;
}

void Plan::add_mass(int64_t segment, const Rows& rows, const float* lse, int thread) {
  float weights[MAX_ROWS], seen[MAX_ROWS];
  for (int i = 0; i < rows.count / call_.group; ++i) {
    const size_t age = size_t(rows.oldest_age - i);
    weights[i] = age < call_.weights.size() ? call_.weights[age] : 0.0f;
    if (call_.counts) seen[i] = float(entries_seen(segment, int64_t(age)));
  }
  const float* p = p_of(segment, thread);
  const float* p_max = p + pages_of(segment) * rows.count * PAGE;
  float* mass = call_.mass + segment * call_.width;
  for (size_t i = 0; i < call_.tiers.size(); ++i) {
    const int64_t length = call_.tiers[i].lengths[segment];
    for (int64_t t = 0; t < length; t += PAGE) {
      kernels_.mass({p, p_max, lse, weights, call_.counts ? seen : nullptr, rows.count, int(call_.group),
                     call_.tiers[i].of(segment)[t / PAGE].entries, mass + call_.offsets[i] + t});
      p += rows.count * PAGE;
      p_max += rows.count;
    }
  }
}

}  // namespace

void run(const Call& call) {
  const int64_t step = std::max<int64_t>(1, ROWS_TOGETHER / call.group);
  for (int64_t first = 0; first < call.queries; first += step) {
    Plan(call, {first, std::min(call.queries, first + step), first == 0}).run();
  }
}

}  // namespace kvstrata
