// A GPU that is a program: it runs kernels' PTX on the CPU, a warp's 32 lanes at a time, with warps, CTAs and clusters
// in an order drawn at random, copies of the copy engine that land when it is drawn, and every address looked at. Used
// by runtime.cpp.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>

namespace cutlass_ext::emulator {

struct Launch {
  std::string kernel;  // its mangled name
  std::array<unsigned, 3> grid, block, cluster;
  unsigned dynamic_shared_bytes;
  void const* const* arguments;  // as cudaLaunchKernel has them: a pointer to each
};

struct Declarations;
struct Program;

/// One text of PTX. A kernel is read when it is first launched.
class Module {
 public:
  explicit Module(std::string ptx);
  ~Module();

  bool has_kernel(std::string const& name) const { return entries_.count(name); }
  /// The compute capability that it is compiled for; 90 for 9.0.
  int target() const;
  bool has_variable(std::string const& name) const { return variables_.count(name); }
  /// A variable in global memory, which is the host's.
  void* address_of(std::string const& variable) const { return variables_.at(variable).get(); }
  /// As if it were loaded again.
  void zero_variables();
  /// Runs a kernel to its end. std::runtime_error says what went wrong, and where.
  void launch(Launch const&);

 private:
  std::string const ptx_;
  std::unique_ptr<Declarations const> const declared_;
  std::map<std::string, size_t> entries_;  // where their texts begin
  std::map<std::string, std::unique_ptr<char[]>> variables_;
  std::map<std::string, std::unique_ptr<Program>> programs_;
};

}  // namespace cutlass_ext::emulator
