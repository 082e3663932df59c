// CuTe's tensors, without its atoms of copies and products: those bring a table of every instruction of every GPU,
// which took half of a file's compile time. Used by everything that has tiles.
#pragma once

#include <cute/algorithm/clear.hpp>
#include <cute/pointer_flagged.hpp>
#include <cute/tensor_impl.hpp>
