// What the C and C++ runtimes of the manylinux_2_28 platform (glibc 2.28, libstdc++ of GCC 8) lack and newer compilers
// and headers ask for. Linked into kernels that are to run on that platform, and seen by nobody else: see exports.map.

#include <new>
#include <sstream>
#include <string>

#if !defined(__GLIBC__) || !defined(__GLIBCXX__)
#error "a portable build is made with glibc and libstdc++"
#endif

// Members that headers declare and only newer releases of libstdc++ define.
template std::ostringstream::basic_ostringstream();
template std::stringstream::basic_stringstream();
template std::string std::stringbuf::str() const&;
template std::string std::stringbuf::str() &&;

namespace std {
void __throw_bad_array_new_length() {
  throw bad_array_new_length();
}
}  // namespace std

// Reference counts are atomic, whether or not there is one thread only.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;

// Functions of glibc with a newer version. Each is defined here as a jump to the first one.
#if defined(__x86_64__)
#define INPLACE_ABN_OLD(name, version)                                                                         \
  __asm__(".pushsection .text\n.symver first_" #name ", " #name "@" version "\n.globl " #name "\n.type " #name \
          ", @function\n" #name ": jmp first_" #name "@PLT\n.popsection");
#define INPLACE_ABN_FIRST(name) INPLACE_ABN_OLD(name, "GLIBC_2.2.5")
#elif defined(__aarch64__)
#define INPLACE_ABN_OLD(name, version)                                                                        \
  __asm__(".pushsection .text\n.symver first_" #name ", " #name "@GLIBC_2.17\n.globl " #name "\n.type " #name \
          ", %function\n" #name ": b first_" #name "\n.popsection");
#define INPLACE_ABN_FIRST(name) INPLACE_ABN_OLD(name, "")
#else
#error "which glibc was the first for this processor?"
#endif

// Their newer versions, of glibc 2.29, set errno otherwise and compute the same.
INPLACE_ABN_FIRST(exp)
INPLACE_ABN_FIRST(log)

// Torch's headers look for what later releases have. glibc 2.34 took libdl, libpthread and librt into libc and gave
// that version to what is in them; where they are apart, libtorch brings them.
INPLACE_ABN_FIRST(dlsym)

#if defined(INPLACE_ABN_WITH_CUDA)
// Those that CUDA's runtime, which is linked in, calls.
INPLACE_ABN_OLD(dlmopen, "GLIBC_2.3.4")
INPLACE_ABN_FIRST(dlclose)
INPLACE_ABN_FIRST(dlerror)
INPLACE_ABN_FIRST(dlopen)
INPLACE_ABN_FIRST(dlvsym)
INPLACE_ABN_FIRST(pthread_condattr_setpshared)
INPLACE_ABN_FIRST(pthread_create)
INPLACE_ABN_FIRST(pthread_detach)
INPLACE_ABN_FIRST(pthread_getspecific)
INPLACE_ABN_FIRST(pthread_join)
INPLACE_ABN_FIRST(pthread_key_create)
INPLACE_ABN_FIRST(pthread_key_delete)
INPLACE_ABN_FIRST(pthread_kill)
INPLACE_ABN_FIRST(pthread_mutex_trylock)
INPLACE_ABN_FIRST(pthread_mutexattr_destroy)
INPLACE_ABN_FIRST(pthread_mutexattr_init)
INPLACE_ABN_FIRST(pthread_mutexattr_setpshared)
INPLACE_ABN_FIRST(pthread_mutexattr_settype)
INPLACE_ABN_FIRST(pthread_once)
INPLACE_ABN_FIRST(pthread_rwlock_destroy)
INPLACE_ABN_FIRST(pthread_rwlock_init)
INPLACE_ABN_FIRST(pthread_rwlock_rdlock)
INPLACE_ABN_FIRST(pthread_rwlock_timedrdlock)
INPLACE_ABN_FIRST(pthread_rwlock_timedwrlock)
INPLACE_ABN_FIRST(pthread_rwlock_tryrdlock)
INPLACE_ABN_FIRST(pthread_rwlock_trywrlock)
INPLACE_ABN_FIRST(pthread_rwlock_unlock)
INPLACE_ABN_FIRST(pthread_rwlock_wrlock)
INPLACE_ABN_FIRST(pthread_rwlockattr_destroy)
INPLACE_ABN_FIRST(pthread_rwlockattr_init)
INPLACE_ABN_FIRST(pthread_rwlockattr_setpshared)
INPLACE_ABN_FIRST(pthread_setspecific)
INPLACE_ABN_FIRST(pthread_spin_destroy)
INPLACE_ABN_FIRST(pthread_spin_init)
INPLACE_ABN_FIRST(pthread_spin_lock)
INPLACE_ABN_FIRST(pthread_spin_trylock)
INPLACE_ABN_FIRST(pthread_spin_unlock)
INPLACE_ABN_FIRST(sem_destroy)
INPLACE_ABN_FIRST(sem_init)
INPLACE_ABN_FIRST(sem_post)
INPLACE_ABN_FIRST(sem_timedwait)
INPLACE_ABN_FIRST(sem_trywait)
INPLACE_ABN_FIRST(sem_wait)
INPLACE_ABN_FIRST(shm_open)
INPLACE_ABN_FIRST(shm_unlink)
#endif
