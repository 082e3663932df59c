// WGMMA of 48, 80, 112, 144, 160 and 176 columns, and of 80 and 112 with P in registers. CuTe has them in a header with
// those of every other width, which takes a compiler 26 s. Used by wgmma.hpp.
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>
#include <cutlass/numeric_types.h>

namespace cutlass_ext::sm90 {

/// WGMMA of 64 rows, `Columns` columns and 16 steps, of operands in shared memory that lie along their columns:
/// `fma(a, b, sums, scale)` issues it.
template <int Columns, class Element>
struct InstructionOfOtherWidth;

/// The same of `a` in registers, and of `b` that lies along its rows.
template <int Columns, class Element>
struct InstructionOfRegisters;

#define CUTLASS_EXT_8_SUMS(I)                                                                                 \
  "+f"(c[I]), "+f"(c[I + 1]), "+f"(c[I + 2]), "+f"(c[I + 3]), "+f"(c[I + 4]), "+f"(c[I + 5]), "+f"(c[I + 6]), \
      "+f"(c[I + 7])
#define CUTLASS_EXT_SUMS_24 CUTLASS_EXT_8_SUMS(0), CUTLASS_EXT_8_SUMS(8), CUTLASS_EXT_8_SUMS(16)
#define CUTLASS_EXT_SUMS_40 CUTLASS_EXT_SUMS_24, CUTLASS_EXT_8_SUMS(24), CUTLASS_EXT_8_SUMS(32)
#define CUTLASS_EXT_SUMS_56 CUTLASS_EXT_SUMS_40, CUTLASS_EXT_8_SUMS(40), CUTLASS_EXT_8_SUMS(48)
#define CUTLASS_EXT_SUMS_72 CUTLASS_EXT_SUMS_56, CUTLASS_EXT_8_SUMS(56), CUTLASS_EXT_8_SUMS(64)
#define CUTLASS_EXT_SUMS_80 CUTLASS_EXT_SUMS_72, CUTLASS_EXT_8_SUMS(72)
#define CUTLASS_EXT_SUMS_88 CUTLASS_EXT_SUMS_80, CUTLASS_EXT_8_SUMS(80)
#define CUTLASS_EXT_NAMES_24 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23"
#define CUTLASS_EXT_NAMES_40 CUTLASS_EXT_NAMES_24 ",%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39"
#define CUTLASS_EXT_NAMES_56 CUTLASS_EXT_NAMES_40 ",%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55"
#define CUTLASS_EXT_NAMES_72 CUTLASS_EXT_NAMES_56 ",%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71"
#define CUTLASS_EXT_NAMES_80 CUTLASS_EXT_NAMES_72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define CUTLASS_EXT_NAMES_88 CUTLASS_EXT_NAMES_80 ",%80,%81,%82,%83,%84,%85,%86,%87"
/// `SUMS` is half of `COLUMNS`; `A`, `B` and `SCALE` are the numbers of the operands behind them.
#define CUTLASS_EXT_INSTRUCTION(COLUMNS, ELEMENT, TYPE, SUMS, A, B, SCALE)                                         \
  template <>                                                                                                      \
  struct InstructionOfOtherWidth<COLUMNS, ELEMENT> {                                                               \
    CUTE_DEVICE static void fma(uint64_t a, uint64_t b, float* c, cute::SM90::GMMA::ScaleOut scale) {              \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #SCALE ", 0; wgmma.mma_async.sync.aligned.m64n" #COLUMNS      \
                   "k16.f32." #TYPE "." #TYPE " {" CUTLASS_EXT_NAMES_##SUMS "}, %" #A ", %" #B ", p, 1, 1, 0, 0;}" \
                   : CUTLASS_EXT_SUMS_##SUMS                                                                       \
                   : "l"(a), "l"(b), "r"(static_cast<int>(scale)));                                                \
    }                                                                                                              \
  };
#define CUTLASS_EXT_INSTRUCTION_OF_REGISTERS(COLUMNS, ELEMENT, TYPE, SUMS, A0, A1, A2, A3, B, SCALE)               \
  template <>                                                                                                      \
  struct InstructionOfRegisters<COLUMNS, ELEMENT> {                                                                \
    CUTE_DEVICE static void fma(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, float* c,          \
                                cute::SM90::GMMA::ScaleOut scale) {                                                \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #SCALE ", 0; wgmma.mma_async.sync.aligned.m64n" #COLUMNS      \
                   "k16.f32." #TYPE "." #TYPE " {" CUTLASS_EXT_NAMES_##SUMS "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 \
                                                                            "}, %" #B ", p, 1, 1, 1;}"             \
                   : CUTLASS_EXT_SUMS_##SUMS                                                                       \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<int>(scale)));                    \
    }                                                                                                              \
  };
#define CUTLASS_EXT_INSTRUCTIONS_OF_REGISTERS(COLUMNS, SUMS, A0, A1, A2, A3, B, SCALE)             \
  CUTLASS_EXT_INSTRUCTION_OF_REGISTERS(COLUMNS, cute::half_t, f16, SUMS, A0, A1, A2, A3, B, SCALE) \
  CUTLASS_EXT_INSTRUCTION_OF_REGISTERS(COLUMNS, cute::bfloat16_t, bf16, SUMS, A0, A1, A2, A3, B, SCALE)
#define CUTLASS_EXT_INSTRUCTIONS(COLUMNS, SUMS, A, B, SCALE)             \
  CUTLASS_EXT_INSTRUCTION(COLUMNS, cute::half_t, f16, SUMS, A, B, SCALE) \
  CUTLASS_EXT_INSTRUCTION(COLUMNS, cute::bfloat16_t, bf16, SUMS, A, B, SCALE)
CUTLASS_EXT_INSTRUCTIONS(48, 24, 24, 25, 26)
CUTLASS_EXT_INSTRUCTIONS(80, 40, 40, 41, 42)
CUTLASS_EXT_INSTRUCTIONS(112, 56, 56, 57, 58)
CUTLASS_EXT_INSTRUCTIONS(144, 72, 72, 73, 74)
CUTLASS_EXT_INSTRUCTIONS(160, 80, 80, 81, 82)
CUTLASS_EXT_INSTRUCTIONS(176, 88, 88, 89, 90)
CUTLASS_EXT_INSTRUCTIONS_OF_REGISTERS(80, 40, 40, 41, 42, 43, 44, 45)
CUTLASS_EXT_INSTRUCTIONS_OF_REGISTERS(112, 56, 56, 57, 58, 59, 60, 61)
#undef CUTLASS_EXT_INSTRUCTIONS_OF_REGISTERS
#undef CUTLASS_EXT_INSTRUCTION_OF_REGISTERS
#undef CUTLASS_EXT_INSTRUCTIONS
#undef CUTLASS_EXT_INSTRUCTION
#undef CUTLASS_EXT_NAMES_88
#undef CUTLASS_EXT_NAMES_80
#undef CUTLASS_EXT_NAMES_72
#undef CUTLASS_EXT_NAMES_56
#undef CUTLASS_EXT_NAMES_40
#undef CUTLASS_EXT_NAMES_24
#undef CUTLASS_EXT_SUMS_88
#undef CUTLASS_EXT_SUMS_80
#undef CUTLASS_EXT_SUMS_72
#undef CUTLASS_EXT_SUMS_56
#undef CUTLASS_EXT_SUMS_40
#undef CUTLASS_EXT_SUMS_24
#undef CUTLASS_EXT_8_SUMS

}  // namespace cutlass_ext::sm90
