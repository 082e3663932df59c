// The shared-memory accesses of the CUDA-core kernels, lane by lane: where the kernel's hand-written offsets put them,
// where the CuTe layouts say they belong, and on which banks they fall. Used by layouts_test.cpp and bindings.cpp.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>

#include "fmha/backward/simt_traits.hpp"

namespace cutlass_ext::simt {

struct BankReport {
  std::map<std::string, int> conflicts;  // access -> extra passes over the banks, summed over all of its instructions
  int misplaced = 0;                     // accesses whose offset is not the layout's
};

/// Extra passes of one warp instruction. A pass serves each bank once, lanes of one word together; 16-byte accesses go
/// a quarter warp at a time.
inline int extra_passes(std::array<int, 32> const& offset, int width) {
  int const lanes = 32 / width;
  int extra = 0;
  for (int first = 0; first < 32; first += lanes) {
    std::map<int, std::set<int>> words_of_bank;
    for (int lane = first; lane < first + lanes; ++lane) {
      for (int e = 0; e < width; ++e) words_of_bank[(offset[lane] + e) % 32].insert(offset[lane] + e);
    }
    for (auto const& [bank, words] : words_of_bank) extra = std::max(extra, int(words.size()) - 1);
  }
  return extra;
}

/// What of a kernel's traits its accesses follow from: the forward's names, and those that only the backward tells
/// apart.
template <class Traits>
struct Accesses;

template <int B_r, int B_c, int HeadDim, class Element, int Threads, int ColWarps>
struct Accesses<Traits<B_r, B_c, HeadDim, Element, Threads, ColWarps>>
    : Traits<B_r, B_c, HeadDim, Element, Threads, ColWarps> {
  static constexpr int RowWarps = Threads / 32 / ColWarps, PieceCols = HeadDim, WarpCols = 0,  // apart: none
      DqRows = 0, DqColWarps = 1;
};

template <Kind Kind_, int B_r, int B_c, int HeadDim, class Element, int Threads, class Way>
struct Accesses<BackwardTraits<Kind_, B_r, B_c, HeadDim, Element, Threads, Way>>
    : BackwardTraits<Kind_, B_r, B_c, HeadDim, Element, Threads, Way>::Products {
  using Kernel = BackwardTraits<Kind_, B_r, B_c, HeadDim, Element, Threads, Way>;
  using LayoutQ = typename Kernel::LayoutOwn;
  using LayoutKV = typename Kernel::LayoutWalked;
  using LayoutP = typename Kernel::LayoutP;
  static constexpr int RowWarps = Kernel::RowWarps, PieceCols = Kernel::PieceCols, WarpKeys = Kernel::WarpWalked,
                       WarpCols = Kernel::WarpPieceCols, DqRows = Kernel::DqRows, DqColWarps = Kernel::DqColWarps;
};

template <class KernelTraits>
BankReport bank_report() {
  using namespace cute;
  using Traits = Accesses<KernelTraits>;
  constexpr typename Traits::LayoutQ layout_q;
  constexpr typename Traits::LayoutKV layout_kv;
  constexpr typename Traits::LayoutP layout_p;
  constexpr int RowsAPass = Traits::Threads / kPanelChunks, PieceChunks = Traits::PieceCols / kVector;
  BankReport report;

  // One instruction of every warp: `offset` is the kernel's, `expected` the layout's, both of a thread.
  auto access = [&](char const* name, int width, auto offset, auto expected) {
    for (int warp = 0; warp < Traits::Threads / 32; ++warp) {
      std::array<int, 32> offsets;
      for (int lane = 0; lane < 32; ++lane) {
        offsets[lane] = offset(warp * 32 + lane);
        report.misplaced += offsets[lane] != int(expected(warp * 32 + lane));
      }
      report.conflicts[name] += extra_passes(offsets, width);
    }
  };
  // Warps that share rows differ in their part of the keys, and of the columns.
  auto place_of = [](int thread) { return LanePlace(thread % (Traits::RowWarps * 32)); };
  auto part_of = [](int thread) { return thread / (Traits::RowWarps * 32); };
  auto first_row = [&](int thread, int h) {
    LanePlace const place = place_of(thread);
    return (place.panel + h * Traits::PanelsApart) * kPanel + place.row_chunk * kVector;
  };
  auto first_key = [&](int thread) { return part_of(thread) * Traits::WarpKeys + place_of(thread).col * kVector; };

  for (int panel = 0; panel < Traits::HeadDim / kPanel; ++panel) {  // copy_q
    auto col = [&](int t) { return panel * kPanel + t % kPanelChunks * kVector; };
    for (int pass = 0; pass < Traits::B_r / RowsAPass; ++pass) {
      auto row = [&](int t) { return pass * RowsAPass + t / kPanelChunks; };
      for (int e = 0; e < kVector; ++e) {
        access(
            "Q store", 1, [&](int t) { return query_store_offset<Traits::HeadDim>(row(t), col(t)) + e * kPanel; },
            [&](int t) { return layout_q(col(t) + e, row(t)); });
      }
    }
  }
  for (int panel = 0; panel < Traits::PieceCols / kPanel; ++panel) {  // copy_tile
    auto col = [&](int t) { return panel * kPanel + t % kPanelChunks * kVector; };
    for (int pass = 0; pass < Traits::B_c / RowsAPass; ++pass) {
      auto row = [&](int t) { return pass * RowsAPass + t / kPanelChunks; };
      for (char const* name : {"K store", "V store"}) {
        access(
            name, 4,
            [&](int t) {
              return row(t) * kPanel + chunk_offset(t % kPanelChunks, row(t) / 4) + panel * Traits::B_c * kPanel;
            },
            [&](int t) { return layout_kv(row(t), col(t)); });
      }
    }
  }
  for (int chunk = 0; chunk < PieceChunks; ++chunk) {  // gemm_qk
    for (int j = 0; j < Traits::Keys; ++j) {
      int const key = j / kVector * kPanel + j % kVector;
      access(
          "K load", 4,
          [&](int t) {
            return part_of(t) * Traits::WarpKeys * kPanel + key_offset<Traits::B_c>(place_of(t), chunk) + key * kPanel;
          },
          [&](int t) { return layout_kv(first_key(t) + key, chunk * kVector); });
    }
    for (int piece = 0; piece < Traits::HeadDim / Traits::PieceCols; ++piece) {
      for (int e = 0; e < kVector; ++e) {
        for (int h = 0; h < Traits::Halves; ++h) {
          access(
              "Q load", 4,
              [&](int t) {
                return piece * Traits::PieceCols * kPanel + rows_offset<Traits::HeadDim>(place_of(t), chunk, e) +
                       h * Traits::PanelsApart * Traits::HeadDim * kPanel;
              },
              [&](int t) { return layout_q(piece * Traits::PieceCols + chunk * kVector + e, first_row(t, h)); });
        }
      }
    }
  }
  for (int h = 0; h < Traits::Halves; ++h) {  // store_p
    for (int j = 0; j < Traits::Keys; ++j) {
      int const key = j / kVector * kPanel + j % kVector;
      access(
          "P store", 4,
          [&](int t) {
            return part_of(t) * Traits::WarpKeys * kPanel + rows_offset<Traits::B_c>(place_of(t), place_of(t).col, 0) +
                   (h * Traits::PanelsApart * Traits::B_c + key) * kPanel;
          },
          [&](int t) { return layout_p(first_key(t) + key, first_row(t, h)); });
    }
  }
  // Of P V warps that share rows have keys of their own, or all keys and columns of their own.
  auto first_value = [&](int thread) { return Traits::WarpCols > 0 ? 0 : part_of(thread) * Traits::WarpKeys; };
  for (int key = 0; key < Traits::ProductKeys; ++key) {  // gemm_pv
    for (int h = 0; h < Traits::Halves; ++h) {
      access(
          "P load", 4,
          [&](int t) {
            return first_value(t) * kPanel + rows_offset<Traits::B_c>(place_of(t), key / 4, key % 4) +
                   h * Traits::PanelsApart * Traits::B_c * kPanel;
          },
          [&](int t) { return layout_p(first_value(t) + key, first_row(t, h)); });
    }
    for (int j = 0; j < Traits::OutCols / kVector; ++j) {
      access(
          "V load", 4,
          [&](int t) {
            return (first_value(t) + part_of(t) * (Traits::WarpCols / kPanel) * Traits::B_c) * kPanel +
                   value_offset(place_of(t), key / 4, key % 4) + j * Traits::B_c * kPanel;
          },
          [&](int t) {
            return layout_kv(first_value(t) + key,
                             part_of(t) * Traits::WarpCols + place_of(t).col * kVector + j * kPanel);
          });
    }
  }
  for (int chunk = 0; Traits::DqRows > 0 && chunk < Traits::B_r / kVector; ++chunk) {  // add_dq
    for (int j = 0; j < Traits::DqRows; ++j) {
      auto const row = [&](int t) {
        return (t / 32 / Traits::DqColWarps * Traits::DqRows + j / kVector * kVector) * kLaneRows + dq_row(t);
      };
      access(
          "dS load", 4, [&](int t) { return own_chunk_offset<Traits::B_c>(chunk, row(t)) + j % kVector * kPanel; },
          [&](int t) { return layout_p(row(t) + j % kVector, chunk * kVector); });
    }
    for (int i = 0; i < kVector; ++i) {
      auto const col = [&](int t) { return t / 32 % Traits::DqColWarps * kPanel + dq_col(t); };
      access(
          "own load", 4, [&](int t) { return own_chunk_offset<Traits::HeadDim>(chunk, col(t)) + i * kPanel; },
          [&](int t) { return layout_q(col(t) + i, chunk * kVector); });
    }
  }
  return report;
}

/// The report of every tile shape that the library compiles (csrc/kernels) and of the sweep's extremes.
inline std::map<std::string, BankReport> bank_reports() {
  std::map<std::string, BankReport> reports;
  auto add = [&](auto traits, std::string const& name = "simt") {
    using T = decltype(traits);
    reports[name + "_Br" + std::to_string(T::B_r) + "_Bc" + std::to_string(T::B_c) + "_d" + std::to_string(T::HeadDim) +
            "_threads" + std::to_string(T::Threads)] = bank_report<T>();
  };
  add(Traits<32, 64, 32, float, 128, 2>{}), add(Traits<32, 64, 64, float, 128, 2>{}),
      add(Traits<32, 64, 128, float, 128, 2>{});
  add(Traits<128, 64, 32, float, 128>{}), add(Traits<64, 32, 32, float, 128>{});
  add(Traits<128, 64, 64, float, 128>{}), add(Traits<64, 32, 64, float, 128>{}), add(Traits<64, 64, 64, float, 128>{}),
      add(Traits<32, 64, 64, float, 64>{});
  add(Traits<64, 64, 96, float, 128>{}), add(Traits<64, 32, 96, float, 128>{});
  add(Traits<64, 64, 128, float, 128>{}), add(Traits<64, 32, 128, float, 128>{}),
      add(Traits<128, 96, 128, float, 256>{});
  add(Traits<64, 32, 192, float, 128>{}), add(Traits<32, 32, 192, float, 64>{});
  add(Traits<32, 32, 224, float, 64>{}), add(Traits<128, 32, 256, float, 256>{}),
      add(Traits<64, 32, 256, float, 128>{});
  add(Traits<128, 128, 64, float, 256>{}), add(Traits<32, 128, 64, float, 64>{});
  auto add_backward = [&](auto of_keys, auto of_rows) { add(of_keys, "simt_keys"), add(of_rows, "simt_rows"); };
  add_backward(BackwardTraits<Kind::KeyGradients, 32, 128, 32, float, 128, Walk<32>>{},
               BackwardTraits<Kind::QueryGradients, 128, 64, 32, float, 128, Walk<32>>{});
  add_backward(BackwardTraits<Kind::KeyGradients, 32, 128, 64, float, 128, Walk<64>>{},
               BackwardTraits<Kind::QueryGradients, 128, 32, 64, float, 128, Walk<64>>{});
  add_backward(BackwardTraits<Kind::KeyGradients, 64, 64, 128, float, 128, Walk<64>>{},
               BackwardTraits<Kind::QueryGradients, 64, 64, 128, float, 128, Walk<64>>{});
  add_backward(BackwardTraits<Kind::KeyGradients, 32, 64, 128, float, 128, Walk<64>>{},
               BackwardTraits<Kind::QueryGradients, 64, 32, 128, float, 128, Walk<64>>{});
  add_backward(BackwardTraits<Kind::KeyGradients, 64, 64, 256, float, 256, Walk<128, 2, 2>>{},
               BackwardTraits<Kind::QueryGradients, 64, 64, 256, float, 256, Walk<128, 2, 2>>{});
  add_backward(BackwardTraits<Kind::KeyGradients, 64, 32, 256, float, 128, Walk<64, 1, 2>>{},
               BackwardTraits<Kind::QueryGradients, 32, 64, 256, float, 128, Walk<64, 1, 2>>{});
  add(BackwardTraits<Kind::AllGradients, 64, 128, 32, float, 128, Walk<32>>{}, "simt_all");
  add(BackwardTraits<Kind::AllGradients, 32, 128, 64, float, 128, Walk<64>>{}, "simt_all");
  add(BackwardTraits<Kind::AllGradients, 64, 64, 32, float, 128, Walk<32>>{}, "simt_all");
  add(BackwardTraits<Kind::AllGradients, 32, 64, 64, float, 128, Walk<64>>{}, "simt_all");
  add(BackwardTraits<Kind::AllGradients, 64, 64, 128, float, 128, Walk<64>>{}, "simt_all");
  add(BackwardTraits<Kind::AllGradients, 32, 64, 128, float, 128, Walk<64>>{}, "simt_all");
  return reports;
}

}  // namespace cutlass_ext::simt
