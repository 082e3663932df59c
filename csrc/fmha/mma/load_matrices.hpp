// Matrices of 8 x 8 numbers of 16 bits from shared memory to registers (ldmatrix). Used by the kernels of mma.sync and
// by those of Hopper.
#pragma once

#include <cstdint>

#include <cute/arch/util.hpp>

namespace cutlass_ext {

/// Four matrices, a row of one for each lane: of what begins at the lane's byte address in shared memory.
CUTE_DEVICE void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

/// The same the other way round in registers.
CUTE_DEVICE void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

template <class Element>
CUTE_DEVICE void load_matrices(uint32_t (&r)[4], Element const* smem) {
  load_matrices(r, cute::cast_smem_ptr_to_uint(smem));
}

template <class Element>
CUTE_DEVICE void load_matrices_transposed(uint32_t (&r)[4], Element const* smem) {
  load_matrices_transposed(r, cute::cast_smem_ptr_to_uint(smem));
}

}  // namespace cutlass_ext
