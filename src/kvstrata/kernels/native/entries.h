// Entries written behind those stored.
#pragma once

#include "arena.h"

namespace kvstrata {

// New entries k [B, H, Q, D] and v [B, H, Q, Dv] of which the last tokens[b] are taken.
struct NewEntries {
  Array k, v;
};

// Checked against the format; `heads` 0 stands for any.
NewEntries new_entries(nb::handle k, nb::handle v, const Format& format, int64_t segments, int64_t heads);

// How many of `queries` each row brings: `tokens` int32 [B], or all where it is None. -> [B]
std::vector<int32_t> tokens_of(nb::handle tokens, int64_t batch, int64_t queries);

// The same for each segment.
std::vector<int32_t> for_segments(const std::vector<int32_t>& tokens, int64_t heads);

// Copy into the last slots of `to`, which was resolved with the new entries counted.
void write(const NewEntries& from, const std::vector<int32_t>& tokens, const Resolved& to);

}  // namespace kvstrata
