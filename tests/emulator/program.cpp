// See program.hpp. PTX ISA 9.0, sections 4 (syntax) and 5 (state spaces), as far as nvcc writes it.
#include "program.hpp"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <memory>
#include <sstream>

namespace cutlass_ext::emulator {
namespace {

std::string trimmed(std::string const& text) {
  size_t const begin = text.find_first_not_of(" \t\r\n"), end = text.find_last_not_of(" \t\r\n");
  return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
}

bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) || std::strchr("_$%.", c); }

/// At its commas outside of brackets.
std::vector<std::string> split(std::string const& text, char at = ',') {
  std::vector<std::string> parts;
  int depth = 0;
  std::string part;
  for (char c : text) {
    depth += (c == '{' || c == '[' || c == '(') - (c == '}' || c == ']' || c == ')');
    if (c == at && depth == 0) {
      parts.push_back(trimmed(part));
      part.clear();
    } else {
      part += c;
    }
  }
  if (!trimmed(part).empty()) parts.push_back(trimmed(part));
  return parts;
}

int bytes_of_type(std::string const& type) {
  if (type == "pred") return 0;
  int const bits = std::atoi(type.c_str() + type.find_first_of("0123456789"));
  return bits / 8;
}

Width width_of(int bytes) { return bytes == 0 ? Width::Predicate : bytes <= 4 ? Width::Word : Width::Long; }

/// A declaration of memory: `.align 16 .b8 name[32]`.
struct Variable {
  std::string name;
  size_t bytes, align = 1;
};

Variable variable_of(std::string const& text) {
  Variable variable;
  std::istringstream words(text.substr(0, text.find('=')));
  std::string word, type;
  while (words >> word) {
    if (word == ".align") {
      words >> variable.align;
    } else if (word[0] == '.') {
      if (std::isdigit(static_cast<unsigned char>(word.back()))) type = word.substr(1);
    } else {
      variable.name = word;
    }
  }
  size_t const bracket = variable.name.find('[');
  size_t const element = std::max(bytes_of_type(type), 1);
  size_t const count =
      bracket == std::string::npos ? 1 : std::strtoull(variable.name.c_str() + bracket + 1, nullptr, 10);
  variable.bytes = element * count;
  variable.align = std::max(variable.align, element);
  variable.name = variable.name.substr(0, bracket);
  return variable;
}

class KernelReader final : public Reader {
 public:
  KernelReader(Program& program, Declarations const& declared, Variables const& variables)
      : program_(program), declared_(declared), variables_(variables) {}

  void read(char const* text) {
    char const* const parameters = std::strchr(text, '(');
    char const* const end_of_parameters = std::strchr(parameters, ')');
    size_t offset = 0;
    for (auto const& part : split({parameters + 1, end_of_parameters})) {
      Variable const variable = variable_of(part);
      offset = (offset + variable.align - 1) / variable.align * variable.align;
      symbols_[variable.name] = offset;
      program_.parameters.push_back({offset, variable.bytes});
      offset += variable.bytes;
    }
    program_.parameter_bytes.resize(offset + 128);  // the copy engine's maps begin at multiples of 64
    for (auto& [name, place] : symbols_) place += reinterpret_cast<uint64_t>(program_.parameter_memory());
    std::string const whole(end_of_parameters, std::strstr(end_of_parameters, "\n}"));
    for (auto const& [name, declaration] : declared_.shared) {
      if (whole.find(name) != std::string::npos) declare_memory(declaration, program_.static_shared_bytes, false);
    }
    body(std::strchr(end_of_parameters, '{') + 1);
    for (auto const& [instruction, scope, name] : branches_)
      program_.code[instruction].target = find(scope, name, &Scope::labels);
  }

  Register value(std::string const& operand, int bytes, bool is_float) override {
    if (Register const* const found = known(operand)) return *found;
    if (operand[0] == '%') return special(operand, bytes);
    return constant(number(operand, bytes, is_float), bytes);
  }

  uint32_t predicate(std::string const& operand) override {
    Register const* const found = known(operand);
    if (!found || found->width != Width::Predicate) throw std::runtime_error("no predicate " + operand);
    return found->place;
  }

  uint32_t label(std::string const& name) override {
    branches_.push_back({program_.code.size(), scope_, name});
    return 0;
  }

  Register scratch(Width width) override { return fresh(width); }

 private:
  struct Scope {
    int parent;
    std::map<std::string, Register> registers;
    std::map<std::string, uint32_t> labels;
  };
  struct Branch {
    size_t instruction;
    int scope;
    std::string name;
  };

  Register fresh(Width width) {
    if (width == Width::Predicate) return {program_.predicates++, width};
    uint32_t const place = program_.register_bytes;
    program_.register_bytes += width == Width::Word ? 128 : 256;
    return {place, width};
  }

  template <class T>
  T find(int scope, std::string const& name, std::map<std::string, T> Scope::* of) const {
    for (; scope >= 0; scope = scopes_[scope].parent) {
      auto const& names = scopes_[scope].*of;
      if (auto const found = names.find(name); found != names.end()) return found->second;
    }
    throw std::runtime_error("unknown name " + name);
  }

  Register const* known(std::string const& name) {
    for (int scope = scope_; scope >= 0; scope = scopes_[scope].parent) {
      auto& registers = scopes_[scope].registers;
      if (auto const found = registers.find(name); found != registers.end()) return &found->second;
    }
    size_t const digits = name.find_last_not_of("0123456789") + 1;
    auto const family = families_.find(name.substr(0, digits));
    if (family == families_.end() || digits == name.size()) return nullptr;
    return &(scopes_[0].registers[name] = fresh(family->second));
  }

  Register special(std::string const& name, int bytes) {
    Register& found = specials_[name];
    if (found.width == Width::Predicate) {
      found = fresh(width_of(bytes));
      program_.specials.push_back({found.place, name});
    }
    return found;
  }

  Register constant(uint64_t value, int bytes) {
    Width const width = width_of(bytes);
    auto const [found, is_new] = constants_.try_emplace({value, width}, Register{});
    if (is_new) {
      found->second = fresh(width);
      program_.constants.push_back({found->second.place, width, value});
    }
    return found->second;
  }

  uint64_t number(std::string const& text, int bytes, bool is_float) const {
    if (text.size() > 2 && text[0] == '0' && (text[1] == 'f' || text[1] == 'F' || text[1] == 'd' || text[1] == 'D'))
      return std::strtoull(text.c_str() + 2, nullptr, 16);
    if (std::isdigit(static_cast<unsigned char>(text[0])) || text[0] == '-' || text[0] == '+') {
      if (is_float && text.find('.') != std::string::npos) throw std::runtime_error("a decimal float: " + text);
      uint64_t const value =
          text[0] == '-' ? -std::strtoull(text.c_str() + 1, nullptr, 0) : std::strtoull(text.c_str(), nullptr, 0);
      return bytes < 8 ? value & ((uint64_t(1) << 8 * std::max(bytes, 4)) - 1) : value;
    }
    if (auto const found = symbols_.find(text); found != symbols_.end()) return found->second;
    auto const& dynamic = declared_.dynamic_shared;
    if (std::find(dynamic.begin(), dynamic.end(), text) != dynamic.end()) return program_.dynamic_shared();
    if (auto const found = variables_.find(text); found != variables_.end())
      return reinterpret_cast<uint64_t>(found->second.get());
    throw std::runtime_error("unknown operand " + text);
  }

  void declare_registers(std::string const& text) {  // ".reg .b32 %r<10>, a"
    size_t const type = text.find('.', 4), end = text.find_first_of(" \t", type);
    Width const width = width_of(bytes_of_type(text.substr(type + 1, end - type - 1)));
    for (auto const& name : split(text.substr(end))) {
      size_t const many = name.find('<');
      if (many != std::string::npos) {
        families_[name.substr(0, many)] = width;
      } else {
        scopes_[scope_].registers[name] = fresh(width);
      }
    }
  }

  void declare_memory(std::string const& text, uint32_t& bytes, bool is_local) {
    Variable const variable = variable_of(text);
    bytes = (bytes + variable.align - 1) / variable.align * variable.align;
    if (is_local) {
      Register const base = fresh(Width::Long);
      program_.locals.push_back({base.place, bytes});
      scopes_[0].registers[variable.name] = base;
    } else {
      symbols_[variable.name] = bytes;
    }
    bytes += variable.bytes;
  }

  void body(char const* at) {
    scopes_.push_back({-1, {}, {}});
    uint32_t line = 0;
    for (;;) {
      while (std::isspace(static_cast<unsigned char>(*at))) line += *at++ == '\n';
      if (at[0] == '/' && at[1] == '/') {
        while (*at != '\n') ++at;
      } else if (*at == '{') {
        scopes_.push_back({scope_, {}, {}});
        scope_ = static_cast<int>(scopes_.size()) - 1;
        ++at;
      } else if (*at == '}') {
        if (scope_ == 0) return;
        scope_ = scopes_[scope_].parent;
        ++at;
      } else if (*at == ';') {
        ++at;
      } else {
        at = statement(at, line);
      }
    }
  }

  /// A label, a declaration, a directive or an instruction; where it ends.
  char const* statement(char const* at, uint32_t& line) {
    char const* name = at;
    while (is_name(*name)) ++name;
    char const* colon = name;
    while (*colon == ' ' || *colon == '\t') ++colon;
    if (colon[0] == ':' && colon[1] != ':' && name > at) {
      scopes_[scope_].labels[{at, name}] = static_cast<uint32_t>(program_.code.size());
      return colon + 1;
    }
    uint32_t const first_line = line;
    std::string text;
    bool const ends_with_line = !std::strncmp(at, ".pragma", 7) ? false : !std::strncmp(at, ".loc", 4) && at[4] != 'a';
    for (; *at != ';' && !(ends_with_line && *at == '\n'); ++at) {
      if (at[0] == '/' && at[1] == '/') {
        while (at[1] != '\n') ++at;
        continue;
      }
      line += *at == '\n';
      text += *at == '\n' || *at == '\t' ? ' ' : *at;
    }
    if (*at == ';') ++at;
    if (!text.compare(0, 4, ".reg")) {
      declare_registers(text);
    } else if (!text.compare(0, 7, ".shared")) {
      declare_memory(text, program_.static_shared_bytes, false);
    } else if (!text.compare(0, 6, ".local")) {
      declare_memory(text, program_.local_bytes, true);
    } else if (text[0] != '.') {
      instruction(text, first_line);
    }
    return at;
  }

  void instruction(std::string text, uint32_t line) {
    Instruction instruction;
    instruction.line = static_cast<uint32_t>(program_.lines.size());
    program_.lines.push_back(trimmed(text) + "  (line " + std::to_string(line) + " of the kernel)");
    if (text[0] == '@') {
      size_t const end = text.find_first_of(" \t");
      instruction.guard_negated = text[1] == '!';
      instruction.guard = static_cast<int32_t>(
          predicate(text.substr(1 + instruction.guard_negated, end - 1 - instruction.guard_negated)));
      text = trimmed(text.substr(end));
    }
    size_t const end = std::min(text.find_first_of(" \t"), text.size());
    auto opcode = split(text.substr(0, end), '.');
    for (size_t i = 0; i < opcode.size();) {  // "shared::cta" stays whole, "" between dots does not occur
      opcode[i].empty() ? void(opcode.erase(opcode.begin() + static_cast<long>(i))) : void(++i);
    }
    decode(instruction, opcode, split(text.substr(end)), *this);
    program_.code.push_back(std::move(instruction));
  }

  Program& program_;
  Declarations const& declared_;
  Variables const& variables_;
  std::map<std::string, uint64_t> symbols_;  // parameters and shared memory
  std::map<std::string, Width> families_;    // of registers, as `.reg .b32 %r<10>`
  std::map<std::string, Register> specials_;
  std::map<std::pair<uint64_t, Width>, Register> constants_;
  std::vector<Scope> scopes_;
  std::vector<Branch> branches_;
  int scope_ = 0;
};

}  // namespace

std::vector<std::string> members(std::string const& operand) {
  if (operand[0] != '{') return {operand};
  return split(operand.substr(1, operand.rfind('}') - 1));
}

Declarations declarations(std::string const& ptx) {
  Declarations declared;
  for (size_t at = ptx.find("\n."); at != std::string::npos; at = ptx.find("\n.", at + 1)) {
    std::string line = ptx.substr(at + 1, ptx.find('\n', at + 1) - at - 1);
    bool const is_dynamic = line.rfind(".extern .shared ", 0) == 0, is_shared = line.rfind(".shared ", 0) == 0;
    if (!is_dynamic && !is_shared && line.rfind(".global ", 0) != 0 && line.rfind(".visible .global ", 0) != 0)
      continue;
    if (line.find('=') != std::string::npos) throw std::runtime_error("a variable with a value: " + line);
    line = line.substr(0, line.rfind(';'));
    Variable const variable = variable_of(line);
    if (is_dynamic) {
      declared.dynamic_shared.push_back(variable.name);
    } else if (is_shared) {
      declared.shared[variable.name] = line;
    } else {
      declared.global[variable.name] = variable.bytes;
    }
  }
  return declared;
}

std::unique_ptr<Program> read_program(std::string const& name, std::string const& ptx, size_t begin,
                                      Declarations const& declared, Variables const& variables) {
  auto program = std::make_unique<Program>();
  program->name = name;
  KernelReader(*program, declared, variables).read(ptx.data() + begin);
  return program;
}

}  // namespace cutlass_ext::emulator
