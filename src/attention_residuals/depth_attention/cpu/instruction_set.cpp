// The kernel for one instruction set. Compiled once for each, with INSTRUCTION_SET its name, WIDTH its number of
// float lanes, and the compiler's flags for it.

#include "kernel_types.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

namespace JOIN(in_, INSTRUCTION_SET) {
#include "kernel_body.h"
}

extern const Kernels JOIN(kernels_, INSTRUCTION_SET) = {JOIN(in_, INSTRUCTION_SET)::forward_range,
                                                         JOIN(in_, INSTRUCTION_SET)::backward_range,
                                                         JOIN(in_, INSTRUCTION_SET)::difference_range};
