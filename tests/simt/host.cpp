#include "backward_case.h"
#include "compare.h"

namespace simt {

SIMT_HOST_TYPES()
SIMT_HOST_BACKWARD_TYPES()

}  // namespace simt
