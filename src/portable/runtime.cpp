// What the C and C++ runtimes of the manylinux_2_28 platform (glibc 2.28, libstdc++ of GCC 8) lack and newer compilers
// and headers ask for. Linked into kernels that are to run on that platform, and seen by nobody else: see exports.map.

#include <cmath>
#include <new>
#include <sstream>
#include <string>

#if !defined(__GLIBC__) || !defined(__GLIBCXX__)
#error "a portable build is made with glibc and libstdc++"
#endif

// Members that headers declare and newer releases of libstdc++ hold. What they are made of is in all releases.
template std::ostringstream::basic_ostringstream();
template std::stringstream::basic_stringstream();
template std::string std::stringbuf::str() const&;
template std::string std::stringbuf::str() &&;

namespace std {
void __throw_bad_array_new_length() {
  throw bad_array_new_length();
}
}  // namespace std

extern "C" {

// Reference counts are atomic, whether or not there is one thread only.
char __libc_single_threaded = 0;

// glibc 2.29 gave these a second version, which sets errno otherwise and computes the same.
#if defined(__x86_64__)
#define INPLACE_ABN_FIRST_GLIBC "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define INPLACE_ABN_FIRST_GLIBC "GLIBC_2.17"
#else
#error "which glibc was the first for this processor?"
#endif
double inplace_abn_first_exp(double);
double inplace_abn_first_log(double);
__asm__(".symver inplace_abn_first_exp, exp@" INPLACE_ABN_FIRST_GLIBC);
__asm__(".symver inplace_abn_first_log, log@" INPLACE_ABN_FIRST_GLIBC);
double exp(double x) {
  return inplace_abn_first_exp(x);
}
double log(double x) {
  return inplace_abn_first_log(x);
}

}  // extern "C"
