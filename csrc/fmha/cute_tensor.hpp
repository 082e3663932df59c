// CuTe's tensors without its atoms of copies and products: those bring every instruction of every GPU, 5 s of a
// compiler's time in each file. Used by everything that has tiles.
#pragma once

#include <cute/algorithm/clear.hpp>
#include <cute/pointer_flagged.hpp>
#include <cute/swizzle_layout.hpp>
#include <cute/tensor_impl.hpp>
