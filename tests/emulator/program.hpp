// A kernel's PTX, read: its instructions with the places of their operands. Made by program.cpp, with the functions of
// instructions.cpp; run by machine.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace cutlass_ext::emulator {

struct Warp;
struct Instruction;
using Lanes = uint32_t;  // a bit each
using Function = void (*)(Warp&, Instruction const&, Lanes);

/// Who of a warp has to have come to an instruction before it is carried out.
enum class Together : uint8_t { Nobody, Named, Everyone };

enum class Control : uint8_t { None, Branch, Exit };

struct Instruction {
  Function run = nullptr, then = nullptr;
  uint32_t operands[6] = {};         // of a register the byte where lane 0 lies, of a predicate its index
  std::vector<uint32_t> many;        // of operands in braces, one after the other
  int64_t offset = 0, offset_2 = 0;  // added to addresses; immediate numbers
  int32_t guard = -1;                // a predicate
  uint32_t target = 0;               // of a branch
  uint32_t line = 0;                 // of the kernel's text
  uint16_t bytes = 0, count = 0;     // of an element of memory; of elements, or of what `many` has
  uint8_t space = 0, kind = 0;
  bool guard_negated = false, flag = false;
  Together together = Together::Nobody;
  Control control = Control::None;
};

enum Space : uint8_t { Generic, Global, Shared, Local, Parameter };

/// How wide a lane's part of a register is.
enum class Width : uint8_t { Predicate, Word, Long };

struct Register {
  uint32_t place;
  Width width;
};

struct Parameters {
  size_t offset, bytes;
};

struct Program {
  std::string name;
  std::vector<std::string> lines;  // of the text, for messages
  std::vector<Instruction> code;
  uint32_t register_bytes = 0, predicates = 0;
  uint32_t static_shared_bytes = 0, local_bytes = 0;
  std::vector<Parameters> parameters;
  std::vector<char> parameter_bytes;  // of the launch under way

  /// Where they begin: at a multiple of 128, as the copy engine's maps want.
  char* parameter_memory() {
    return reinterpret_cast<char*>((reinterpret_cast<uint64_t>(parameter_bytes.data()) + 127) / 128 * 128);
  }
  /// Shared memory that the launch sizes lies behind what the kernel declares.
  uint32_t dynamic_shared() const { return (static_shared_bytes + 1023) / 1024 * 1024; }

  struct Constant {
    uint32_t place;
    Width width;
    uint64_t value;
  };
  std::vector<Constant> constants;                         // registers that every warp begins with
  std::vector<std::pair<uint32_t, std::string>> specials;  // and %tid.x and the like
  std::vector<std::pair<uint32_t, uint32_t>> locals;       // registers with addresses in local memory: place, offset
};

using Variables = std::map<std::string, std::unique_ptr<char[]>>;  // of a module, in global memory

/// What a module declares outside of its kernels.
struct Declarations {
  std::map<std::string, size_t> global;       // bytes of each
  std::map<std::string, std::string> shared;  // the text of each
  std::vector<std::string> dynamic_shared;    // whose size is the launch's
};
Declarations declarations(std::string const& ptx);

/// Reads the kernel whose text begins at `begin` of its module's.
std::unique_ptr<Program> read_program(std::string const& name, std::string const& ptx, size_t begin,
                                      Declarations const&, Variables const&);

/// What an operand is, as program.cpp reads it for instructions.cpp.
class Reader {
 public:
  virtual ~Reader() = default;
  /// The place of a register, of a constant of so many bytes, or of an address's base.
  virtual Register value(std::string const& operand, int bytes, bool is_float) = 0;
  virtual uint32_t predicate(std::string const& operand) = 0;
  virtual uint32_t label(std::string const& name) = 0;
  virtual Register scratch(Width) = 0;
};

/// `opcode` split at its dots.
void decode(Instruction&, std::vector<std::string> const& opcode, std::vector<std::string> const& operands, Reader&);

/// "{a, b}" as "a", "b"; anything else as itself.
std::vector<std::string> members(std::string const& operand);

}  // namespace cutlass_ext::emulator
