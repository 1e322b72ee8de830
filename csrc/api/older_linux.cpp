// Functions that headers of a newer libstdc++ call, and that an older one does not have. With definitions of its own the
// extension needs no more than GLIBCXX_3.4.21, whichever Linux it is built on.
#include <new>
#include <sstream>

#define FLASH_DMATTN_OWN extern "C" __attribute__((visibility("hidden")))

// glibc 2.32: whether counters may be plain. 0 stands for "other threads may run", and keeps them atomic.
FLASH_DMATTN_OWN char __libc_single_threaded;
char __libc_single_threaded = 0;

// GLIBCXX_3.4.29: std::__throw_bad_array_new_length()
FLASH_DMATTN_OWN void _ZSt28__throw_bad_array_new_lengthv() { throw std::bad_array_new_length(); }

// GLIBCXX_3.4.26: std::ostringstream() and std::stringstream(); those with a mode are older.
FLASH_DMATTN_OWN void _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev(void* stream) {
  new (stream) std::ostringstream(std::ios_base::out);
}
FLASH_DMATTN_OWN void _ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev(void* stream) {
  new (stream) std::stringstream(std::ios_base::in | std::ios_base::out);
}

// GLIBCXX_3.4.32: sets up std::cout and its kind, for each file that includes <iostream>; nothing here writes to them.
FLASH_DMATTN_OWN void _ZSt21ios_base_library_initv() {}
