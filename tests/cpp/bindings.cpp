// cutlass_ext_host: the host-side logic of csrc/fmha for pytest and hypothesis (tests/python/test_host_logic.py).
// Test-only.
#include <optional>
#include <tuple>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "fmha/decode/walk.hpp"
#include "fmha/sequence.hpp"
#include "host/heuristics.hpp"
#include "simt_banks.hpp"

namespace py = pybind11;
using namespace cutlass_ext;

namespace {

/// (first key, needs a mask) of the key tiles of one query tile, in the order in which the main loop visits them.
std::vector<std::pair<int, bool>> visible_tiles(int row0, int rows, int n_q, int len_kv, int start_pos, int window_left,
                                                int window_right, int block_c) {
  Visibility const visibility{n_q, len_kv, start_pos, window_left, window_right};
  Range const tiles = visibility.tiles_of(row0, rows, block_c);
  std::vector<std::pair<int, bool>> visited;
  for (int tile = tiles.end - 1; tile >= tiles.begin; --tile)
    visited.emplace_back(tile * block_c, visibility.needs_mask(tile, row0, rows, block_c));
  return visited;
}

/// (first row, needs a mask) of the query tiles that see the key tile that begins at `key0`.
std::vector<std::pair<int, bool>> seeing_tiles(int key0, int keys, int n_q, int len_kv, int start_pos, int window_left,
                                               int window_right, int block_r) {
  Visibility const visibility{n_q, len_kv, start_pos, window_left, window_right};
  Range const tiles = visibility.row_tiles_of(key0, keys, block_r);
  Range const unmasked = visibility.unmasked_row_tiles_of(key0, keys, block_r);
  std::vector<std::pair<int, bool>> seeing;
  for (int tile = tiles.begin; tile < tiles.end; ++tile) seeing.emplace_back(tile * block_r, !unmasked.contains(tile));
  return seeing;
}

std::vector<std::tuple<int, int, int, int>> schedule(int batch, int heads, int length, int block, int num_splits,
                                                     int section, bool over_keys) {
  Scheduler const scheduler(batch, heads, length, block, num_splits, section, over_keys ? Axis::Keys : Axis::Rows);
  std::vector<std::tuple<int, int, int, int>> items;
  for (unsigned i = 0; i < scheduler.size(); ++i) {
    WorkItem const w = scheduler(i);
    items.emplace_back(w.batch, w.head, w.row0, w.split);
  }
  return items;
}

/// (batch, q_row0, k_row0, n_q, len_kv, start_pos) of sequence `b` of packed ones; `start_pos` none is "end".
std::tuple<int, int, int, int, int, int> packed_sequence(int b, std::vector<int> const& cu_q,
                                                         std::vector<int> const& cu_k, int total_q, int total_k,
                                                         int max_seqlen_q, std::optional<std::vector<int>> used,
                                                         std::optional<std::vector<int>> leftpad,
                                                         std::optional<std::vector<int>> start_pos) {
  Params params;
  params.batch = int(cu_q.size()) - 1;
  params.n_q = max_seqlen_q;
  params.cu_seqlens_q = cu_q.data();
  params.cu_seqlens_k = cu_k.data();
  params.total_q = total_q;
  params.total_k = total_k;
  params.seqused_k = used ? used->data() : nullptr;
  params.leftpad_k = leftpad ? leftpad->data() : nullptr;
  params.start_pos_kind = start_pos ? StartPos::PerBatch : StartPos::End;
  params.start_positions = start_pos ? start_pos->data() : nullptr;
  Sequence const s = sequence_of(params, b);
  return {s.batch, s.q_row0, s.k_row0, s.visibility.n_q, s.visibility.len_kv, s.visibility.start_pos};
}

/// What each group of CTAs of a decode launch does: (group, sequence, first tile, end tile, part, parts, slot). With
/// `ends` the sequences are packed, and those of more than `most_q` rows another launch's.
std::vector<std::tuple<int, int, int, int, int, int, int>> decode_work(std::vector<int> const& lengths, int groups,
                                                                       int num_splits,
                                                                       std::optional<std::vector<int>> ends,
                                                                       int most_q) {
  constexpr int TileKeys = 16, MinChunk = 4;
  Params params;
  params.batch = static_cast<int>(lengths.size());
  params.n_q = params.heads_q = params.heads_kv = 1;
  params.n_kv = 1 << 20;
  params.seqused_k = lengths.data();
  params.start_pos_kind = StartPos::End;
  params.groups = groups;
  params.fixed_splits = num_splits > 0;
  params.num_splits = num_splits;
  if (ends) {
    params.cu_seqlens_q = ends->data();
    params.total_q = ends->back();
    params.n_q = params.most_q = most_q;
  }
  decode::Tokens const tokens = decode::Place(params, 0).tokens(params, 16);
  auto const tiles_of = [&](int b) {
    return unsigned(decode::tiles_of(params, sequence_of(params, b), tokens, TileKeys).size());
  };
  unsigned total = 0;
  for (int b = 0; b < params.batch; ++b) total += tiles_of(b);

  std::vector<std::tuple<int, int, int, int, int, int, int>> done;
  for (int g = 0; g < (num_splits > 0 ? params.batch * num_splits : groups); ++g) {
    decode::Partition const partition(total, groups, MinChunk);
    unsigned batch = 0, first = 0;
    if (partition.begin_of(g) < total) {
      while (first + tiles_of(batch) <= partition.begin_of(g)) first += tiles_of(batch++);
    }
    auto walk = num_splits > 0 ? decode::Walk<TileKeys>::of_split(params, g, tokens)
                               : decode::Walk<TileKeys>::of_chunk(params, partition, g, batch, first, tokens);
    for (bool once = num_splits > 0; once || !walk.done(); once = false) {
      decode::KeyShare const w = walk.share(params, g);
      done.emplace_back(g, w.batch, w.tiles.begin, w.tiles.end, w.part, w.parts, w.part == 0 && w.begins_inside);
      walk.next(params);
    }
  }
  return done;
}

}  // namespace

PYBIND11_MODULE(cutlass_ext_host, module) {
  auto const reports = simt::bank_reports();
  module.def("visible_tiles", &visible_tiles);
  module.def("seeing_tiles", &seeing_tiles);
  module.def("schedule", &schedule, py::arg("batch"), py::arg("heads"), py::arg("length"), py::arg("block"),
             py::arg("num_splits"), py::arg("section"), py::arg("over_keys") = false);
  module.def("packed_sequence", &packed_sequence);
  module.def("decode_work", &decode_work, py::arg("lengths"), py::arg("groups"), py::arg("num_splits"),
             py::arg("ends") = py::none(), py::arg("most_q") = 1);
  module.def("choose_num_splits", &choose_num_splits);
  module.def("split_range", [](int num_tiles, int num_splits, int split) {
    Range const range = split_range({0, num_tiles}, cutlass::FastDivmod(num_splits), split);
    return std::pair(range.begin, range.end);
  });
  module.def("kernel_configs", [reports] {
    std::vector<std::string> names;
    for (auto const& [name, report] : reports) names.push_back(name);
    return names;
  });
  module.def("bank_conflicts", [reports](std::string const& name) { return reports.at(name).conflicts; });
}
