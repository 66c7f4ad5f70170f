// Stands for CANN's libacl_op_compiler.so: options of the operator compiler, kept as they were set.
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>

#include <cstring>
#include <map>
#include <string>

namespace {

std::map<int, std::string> options;

}  // namespace

extern "C" {

aclError aclSetCompileopt(aclCompileOpt option, const char* value) {
  options[option] = value;
  return 0;
}

// One more for the end, and room for "enable" where nothing was set.
size_t aclGetCompileoptSize(aclCompileOpt option) {
  return options[option].size() + 1 + (option == ACL_OP_JIT_COMPILE ? strlen("enable") : 0);
}

// Unset is "enable", so that code which forgets to switch compilation off reaches the aclop path and fails.
aclError aclGetCompileopt(aclCompileOpt option, char* value, size_t bytes) {
  const auto found = options.find(option);
  const bool is_set = found != options.end() && !found->second.empty();
  strncpy(value, is_set ? found->second.c_str() : "enable", bytes);
  return 0;
}

}  // extern "C"
