// The launches that make fp16 parts of a call's q, k and v in fp32, and of a backward call's dout. Called by plan.cpp
// and backward.cpp.
#pragma once

#include "../fmha/backward/params.hpp"
#include "kernel_table.hpp"

namespace cutlass_ext {

/// Bytes of workspace that the parts take for a kernel of `head_dim` columns, of v and dout of `head_dim_v`.
size_t bytes_of_parts(Params const& params, int head_dim, int head_dim_v);
size_t bytes_of_parts(BackwardParams const& params, int head_dim, int head_dim_v);

/// Makes them there, aligned to 256 bytes; gives the call as a kernel that multiplies parts is to be told of it.
Params make_parts(Params const& params, int head_dim, int head_dim_v, void* workspace, cudaStream_t stream);
BackwardParams make_parts(BackwardParams const& params, int head_dim, int head_dim_v, void* workspace,
                          cudaStream_t stream);

}  // namespace cutlass_ext
