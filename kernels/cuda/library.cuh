/* library.cuh: a library that is looked up when it is first used instead of linked, so that
 * programs which need none of it start where it is not installed. Private to kernels/cuda. */
// SPDX-License-Identifier: Apache-2.0
#ifndef KERNELS_CUDA_LIBRARY_CUH
#define KERNELS_CUDA_LIBRARY_CUH

#include <dlfcn.h>
#include <mutex>
#include <stdio.h>

// Any thread.
struct late_library {
    const char *file, *wanted, *package; // wanted: who wants it, before the loader's sentence
    char missing[512] = "";              // why there is none; "": nothing went wrong
    void *handle = NULL;
    std::once_flag once;

    late_library(const char *file, const char *wanted, const char *package)
        : file(file), wanted(wanted), package(package)
    {
    }

    // NULL, and a sentence in `missing`, where there is no such function.
    void *find(const char *name)
    {
        std::call_once(once, [&] {
            handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
            if (!handle)
                snprintf(missing, sizeof missing,
                         "%s%s (install %s, or put its folder into LD_LIBRARY_PATH)", wanted,
                         dlerror(), package);
        });
        void *function = handle ? dlsym(handle, name) : NULL;
        if (!function && !missing[0]) snprintf(missing, sizeof missing, "%s lacks %s", file, name);
        return function;
    }
};

// NAME(arguments) calls the library's own function `name`; FAILED where it is missing.
#define LATE_FUNCTION(NAME, name, library, FAILED)                                                 \
    template <typename... A> static decltype(auto) NAME(A... arguments)                            \
    {                                                                                              \
        static const auto function = (decltype(&name))(library).find(#name);                       \
        return function ? function(arguments...) : FAILED;                                         \
    }

#endif
