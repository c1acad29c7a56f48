// The compiled CPU kernel of depth attention: forward and backward over a list of sources, without stacking.
//
//   r_i = 1 / sqrt(mean(v_i^2) + eps)   t_i = <u, v_i>   score_i = scale * r_i * t_i      (u = query * key weight)
//   alpha = softmax(score)              h = gain * sum_i alpha_i v_i
//   q = 1 / sqrt(mean(h^2) + norm_eps)  y = q * h * n
//
// Backward as in lean.py; docs/math.md derives it. Shapes: sources v_i and h [tokens, D], each row contiguous;
// alpha [N, tokens]; saved [2N + 1, tokens] holds r, t and q. Nothing of size N x tokens x D is kept.
//
// It is plain C++ behind Python's stable ABI: no PyTorch is needed to build it, and one binary holds the code
// for several instruction sets and chooses when it is loaded. Threads are PyTorch's own: the OpenMP runtime
// that libtorch_cpu uses is looked up in the running process, so that there is one pool of threads.

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <dlfcn.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#include "kernel_types.h"
#include "tensor_view.h"

#include <vector>

static const Kernels* kernels = &kernels_baseline;
static const char* instruction_set = "baseline";

static void choose_instruction_set() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        kernels = &kernels_avx2, instruction_set = "avx2";
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && kernels == &kernels_avx2)
        kernels = &kernels_avx512, instruction_set = "avx512";
#endif
}

// PyTorch's OpenMP runtime, or null where it has none that is known.
static void (*gomp_parallel)(void (*)(void*), void*, unsigned, unsigned);
static int (*omp_thread)(), (*omp_threads)();

// A worker's elements below which a second thread costs more than it saves.
static const int64_t SERIAL_ELEMENTS = 32 * 1024;

struct Team {
    void (*work)(void*, int id, int of);
    void* call;
};

// A weight far from the top is so small that its products are denormal, each of which x86 computes 100 times
// slower. Inside the kernel such a product is 0, unless there is one source, which is returned as it is.
struct FlushDenormalResults {
#if defined(__x86_64__)
    const unsigned before = _mm_getcsr();
    explicit FlushDenormalResults(int64_t num_sources) { _mm_setcsr(num_sources > 1 ? before | 0x8000 : before); }
    ~FlushDenormalResults() { _mm_setcsr(before); }
#else
    explicit FlushDenormalResults(int64_t) {}
#endif
};

static void enter(void* team) {
    ((Team*)team)->work(((Team*)team)->call, omp_thread(), omp_threads());
}

// One thread for small calls, else all of PyTorch's: a team of another size would rebuild its pool.
static void run_team(void (*work)(void*, int, int), void* call, int64_t elements, int threads) {
    Team team = {work, call};
    if (threads > 1 && elements > SERIAL_ELEMENTS && gomp_parallel) gomp_parallel(enter, &team, threads, 0);
    else work(call, 0, 1);
}

// Asks for 2 MiB pages where a large result is about to be written. Memory that is new to the process then costs
// one page fault in place of 512; memory that is mapped already costs one system call.
static void prefer_large_pages(void* begin, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    const intptr_t page = 4096, least = 4 << 20;
    if (!begin || bytes < least) return;
    intptr_t first = (intptr_t)begin & -page;
    madvise((void*)first, (size_t)((intptr_t)begin + bytes - first), MADV_HUGEPAGE);  // advice: may be refused
#else
    (void)begin, (void)bytes;
#endif
}

static int64_t result_bytes(DType dtype, int64_t tokens, int64_t width) {
    return tokens * width * (dtype == FLOAT32 ? 4 : 2);
}

static float* scratch(int64_t floats) {
    static thread_local std::vector<float> buffer;
    if ((int64_t)buffer.size() < floats) buffer.resize(floats);
    return buffer.data();
}

static void forward_work(void* call, int id, int of) {
    const Forward& f = *(const Forward*)call;
    const FlushDenormalResults flush(f.num_sources);
    int64_t begin = f.tokens * id / of, end = f.tokens * (id + 1) / of;
    if (begin < end) kernels->forward(f, begin, end, scratch(scratch_floats(f.num_sources, f.width)));
}

struct BackwardCall {
    Backward f;
    double* sums;  // per thread: du [D], dn [D]
};

static void backward_work(void* call, int id, int of) {
    const BackwardCall& c = *(const BackwardCall*)call;
    const Backward& f = c.f;
    const FlushDenormalResults flush(f.num_sources);
    int64_t begin = f.tokens * id / of, end = f.tokens * (id + 1) / of;
    double* du = c.sums + 2 * f.width * id;
    if (begin < end)
        kernels->backward(f, begin, end, scratch(scratch_floats(f.num_sources, f.width)), du, du + f.width);
}

static void difference_work(void* call, int id, int of) {
    const Difference& f = *(const Difference*)call;
    kernels->difference_norms(f, f.tokens * id / of, f.tokens * (id + 1) / of);
}

// Reads Python's arguments in order; the first failure is kept as a Python error.
struct Arguments {
    PyObject* const* next;
    PyObject* const* end;

    PyObject* take() {
        if (next < end) return *next++;
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "too few arguments");
        return Py_None;
    }
    int64_t integer() {
        PyObject* o = take();
        return PyErr_Occurred() ? 0 : PyLong_AsLongLong(o);
    }
    float number() {
        PyObject* o = take();
        return PyErr_Occurred() ? 0 : (float)PyFloat_AsDouble(o);
    }
    template <class P>
    P* pointer() { return (P*)(intptr_t)integer(); }
    template <class V>
    void list(std::vector<V>& values) {
        PyObject* o = take();
        if (PyErr_Occurred()) return;
        Py_ssize_t size = PyList_Size(o);
        for (Py_ssize_t i = 0; i < size; i++) values.push_back((V)(intptr_t)PyLong_AsLongLong(PyList_GetItem(o, i)));
    }
    bool failed() {
        if (!PyErr_Occurred() && next != end) PyErr_SetString(PyExc_TypeError, "too many arguments");
        return PyErr_Occurred() != nullptr;
    }
};

// u = query * key weight, or the query itself where there is no key weight
static const float* key_vector(const float* query, const float* key_weight, int64_t width, std::vector<float>& u) {
    if (!key_weight) return query;
    u.resize(width);
    for (int64_t d = 0; d < width; d++) u[d] = query[d] * key_weight[d];
    return u.data();
}

// What forward and backward begin with: dtype, sources, strides, tokens, width, query, key_weight, norm_weight.
struct Inputs {
    std::vector<void*> sources;
    std::vector<int64_t> strides;
    std::vector<float> u;
    const float *query, *key_weight;

    template <class Call>
    void read(Arguments& a, Call& f) {
        f.dtype = (DType)a.integer();
        a.list(sources);
        a.list(strides);
        f.num_sources = sources.size(), f.tokens = a.integer(), f.width = a.integer();
        f.sources = sources.data(), f.strides = strides.data();
        query = a.pointer<float>(), key_weight = a.pointer<float>();
        f.norm_weight = a.pointer<float>();
    }

    const float* key_vector(int64_t width) { return ::key_vector(query, key_weight, width, u); }
};

static void run_forward(const Forward& f, int threads) {
    prefer_large_pages(f.out, result_bytes(f.dtype, f.tokens, f.width));
    run_team(forward_work, (void*)&f, f.num_sources * f.tokens * f.width, threads);
}

// forward(dtype, sources, strides, tokens, width, query, key_weight, norm_weight, out, alpha, saved,
//         norms, eps, scale, norm_eps, gain, threads): pointers as integers, 0 for what is not given
static PyObject* py_forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Arguments a = {args, args + count};
    Forward f;
    Inputs in;
    in.read(a, f);
    f.out = a.pointer<void>(), f.alpha = a.pointer<float>(), f.saved = a.pointer<float>();
    f.norms = a.pointer<float>();
    f.eps = a.number(), f.scale = a.number(), f.norm_eps = a.number(), f.gain = a.number();
    int threads = (int)a.integer();
    if (a.failed()) return nullptr;
    Py_BEGIN_ALLOW_THREADS
    f.u = in.key_vector(f.width);
    run_forward(f, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static Torch torch;

// A vector [D] in float32: the tensor's own memory, or a copy in `converted`; null where it is not plain.
static const float* plain_vector(PyObject* o, const TensorView& like, std::vector<float>& converted) {
    TensorView v;
    DType dtype;
    if (!torch.plain(o, &v) || v.ndim != 1 || v.shape[0] != like.width() || !v.has_dtype(&dtype)) return nullptr;
    if (dtype == FLOAT32) return (const float*)v.address();
    const uint16_t* bits = (const uint16_t*)v.address();
    const int64_t width = v.shape[0];
    converted.resize(width);
    float* to = converted.data();
    if (dtype == BFLOAT16)
        for (int64_t d = 0; d < width; d++) to[d] = bfloat_to_float(bits[d]);
    else
        for (int64_t d = 0; d < width; d++) to[d] = half_to_float(bits[d]);
    return to;
}

// read(sources, query, key_weight, norm_weight, eps, scale, norm_eps, norm_offset, sum, threads, alpha, norms) -> h, or
// None where a tensor is not plain, or does not fit the others: the caller then takes the way that copies, or says
// what is wrong. alpha and norms: addresses, 0 for what is not wanted. Nothing is kept for a backward. Here so that a small read costs no Python per source.
static PyObject* py_read(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Arguments a = {args, args + count};
    PyObject *sources = a.take(), *vectors[3] = {a.take(), a.take(), a.take()};
    Forward f = {};
    f.eps = a.number(), f.scale = a.number(), f.norm_eps = a.number();
    float norm_offset = (float)a.number();
    bool sum = a.integer();
    int threads = (int)a.integer();
    f.alpha = a.pointer<float>(), f.norms = a.pointer<float>();
    if (a.failed()) return nullptr;
    bool tuple = PyTuple_CheckExact(sources);
    if (!tuple && !PyList_CheckExact(sources)) Py_RETURN_NONE;
    f.num_sources = tuple ? PyTuple_Size(sources) : PyList_Size(sources);
    std::vector<void*> rows(f.num_sources);
    TensorView first, other;
    for (int64_t i = 0; i < f.num_sources; i++) {
        PyObject* source = tuple ? PyTuple_GetItem(sources, i) : PyList_GetItem(sources, i);
        TensorView& v = i ? other : first;
        if (!torch.plain(source, &v) || !v.has_dtype(&f.dtype) || !v.same_as(first)) Py_RETURN_NONE;
        rows[i] = v.address();
    }
    if (!f.num_sources || !first.width()) Py_RETURN_NONE;
    f.width = first.width(), f.tokens = first.numel() / f.width;
    f.gain = sum ? f.num_sources : 1;
    std::vector<float> u, converted[3];
    const float* found[3];
    for (int i = 0; i < 3; i++) {
        found[i] = vectors[i] == Py_None ? nullptr : plain_vector(vectors[i], first, converted[i]);
        if (!found[i] && (i == 0 || vectors[i] != Py_None)) Py_RETURN_NONE;
    }
    f.u = key_vector(found[0], found[1], f.width, u), f.norm_weight = found[2];
    if (found[2] && norm_offset) {
        if (converted[2].empty()) converted[2].assign(found[2], found[2] + f.width);
        for (float& weight : converted[2]) weight += norm_offset;
        f.norm_weight = converted[2].data();
    }
    PyObject* out = PyObject_CallFunctionObjArgs(
        torch.empty_like, tuple ? PyTuple_GetItem(sources, 0) : PyList_GetItem(sources, 0), nullptr);
    if (!out || torch.view(out, &other)) {
        Py_XDECREF(out);
        return nullptr;
    }
    std::vector<int64_t> strides(f.num_sources, f.width);
    f.sources = rows.data(), f.strides = strides.data(), f.out = other.address();
    Py_BEGIN_ALLOW_THREADS
    run_forward(f, threads);
    Py_END_ALLOW_THREADS
    return out;
}

// difference_norms(after, before, norms, threads) -> whether the tensors are plain and alike, and norms, an address,
// is written: the L2 norm of after - before per token, in float32
static PyObject* py_difference_norms(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Arguments a = {args, args + count};
    PyObject *after = a.take(), *before = a.take();
    Difference f = {};
    f.norms = a.pointer<float>();
    int threads = (int)a.integer();
    if (a.failed()) return nullptr;
    TensorView x, y;
    if (!torch.plain(after, &x) || !torch.plain(before, &y) || !x.has_dtype(&f.dtype) || !y.same_as(x) || !x.width())
        Py_RETURN_FALSE;
    f.width = x.width(), f.tokens = x.numel() / f.width, f.after = x.address(), f.before = y.address();
    Py_BEGIN_ALLOW_THREADS
    run_team(difference_work, &f, 2 * f.tokens * f.width, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_TRUE;
}

static PyObject* py_connect(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 5) return PyErr_Format(PyExc_TypeError, "connect takes 5 arguments, got %d", (int)count);
    if (!torch.connect(args)) return nullptr;
    Py_RETURN_NONE;
}

// backward(dtype, sources, strides, tokens, width, query, key_weight, norm_weight, d_out, d_alpha, alpha, saved,
//          d_sources, d_query, d_key_weight, d_norm_weight, scale, gain, threads)
static PyObject* py_backward(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Arguments a = {args, args + count};
    BackwardCall c;
    Backward& f = c.f;
    Inputs in;
    std::vector<void*> d_sources;
    in.read(a, f);
    f.d_out = a.pointer<void>(), f.d_alpha = a.pointer<float>();
    f.alpha = a.pointer<float>(), f.saved = a.pointer<float>();
    a.list(d_sources);
    f.d_sources = d_sources.data();
    float* d_query = a.pointer<float>();
    float* d_key_weight = a.pointer<float>();
    float* d_norm_weight = a.pointer<float>();
    f.scale = a.number(), f.gain = a.number();
    int threads = (int)a.integer();
    if (a.failed()) return nullptr;
    Py_BEGIN_ALLOW_THREADS
    f.u = in.key_vector(f.width);
    std::vector<double> sums(2 * f.width * (threads > 1 ? threads : 1));
    c.sums = sums.data();
    for (void* d : d_sources) prefer_large_pages(d, result_bytes(f.dtype, f.tokens, f.width));
    run_team(backward_work, &c, f.num_sources * f.tokens * f.width, threads);
    for (size_t t = 1; t < sums.size() / (2 * f.width); t++)
        for (int64_t d = 0; d < 2 * f.width; d++) sums[d] += sums[2 * f.width * t + d];
    for (int64_t d = 0; d < f.width; d++) {
        if (d_query) d_query[d] = (float)(in.key_weight ? sums[d] * in.key_weight[d] : sums[d]);
        if (d_key_weight) d_key_weight[d] = (float)(sums[d] * in.query[d]);
        if (d_norm_weight) d_norm_weight[d] = (float)sums[f.width + d];
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

// share_threads(path of libtorch_cpu) -> whether PyTorch's OpenMP runtime was found in this process
static PyObject* py_share_threads(PyObject*, PyObject* path) {
    PyObject* encoded = PyUnicode_AsUTF8String(path);
    if (!encoded) return nullptr;
    void* library = dlopen(PyBytes_AsString(encoded), RTLD_LAZY | RTLD_NOLOAD);
    Py_DECREF(encoded);
    if (library) {  // looks into the library and what it depends on
        *(void**)&omp_thread = dlsym(library, "omp_get_thread_num");
        *(void**)&omp_threads = dlsym(library, "omp_get_num_threads");
        *(void**)&gomp_parallel = omp_thread && omp_threads ? dlsym(library, "GOMP_parallel") : nullptr;
    }
    return PyBool_FromLong(gomp_parallel != nullptr);
}

// use_instruction_set(name): for tests; raises ValueError for one that this machine lacks
static PyObject* py_use(PyObject*, PyObject* name) {
    choose_instruction_set();
    if (PyUnicode_CompareWithASCIIString(name, instruction_set) == 0) Py_RETURN_NONE;
#if defined(__x86_64__)
    if (PyUnicode_CompareWithASCIIString(name, "avx2") == 0 && kernels != &kernels_baseline) {
        kernels = &kernels_avx2, instruction_set = "avx2";
        Py_RETURN_NONE;
    }
#endif
    if (PyUnicode_CompareWithASCIIString(name, "baseline") == 0) {
        kernels = &kernels_baseline, instruction_set = "baseline";
        Py_RETURN_NONE;
    }
    return PyErr_Format(PyExc_ValueError, "instruction set %R is not available here; the best is %s", name,
                        instruction_set);
}

static PyObject* py_instruction_set(PyObject*, PyObject*) { return PyUnicode_FromString(instruction_set); }

static PyMethodDef methods[] = {
    {"forward", (PyCFunction)(void (*)(void))py_forward, METH_FASTCALL, "depth attention forward"},
    {"backward", (PyCFunction)(void (*)(void))py_backward, METH_FASTCALL, "depth attention backward"},
    {"read", (PyCFunction)(void (*)(void))py_read, METH_FASTCALL, "depth attention forward of plain tensors"},
    {"difference_norms", (PyCFunction)(void (*)(void))py_difference_norms, METH_FASTCALL, "norms of after - before"},
    {"connect", (PyCFunction)(void (*)(void))py_connect, METH_FASTCALL, "how to look into PyTorch's tensors"},
    {"share_threads", py_share_threads, METH_O, "run on PyTorch's OpenMP threads"},
    {"use_instruction_set", py_use, METH_O, "choose among what this machine has"},
    {"instruction_set", py_instruction_set, METH_NOARGS, "name of the instruction set in use"},
    {nullptr, nullptr, 0, nullptr}};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernel", "Compiled depth attention for CPUs.", -1, methods,
                             nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit__kernel() {
    choose_instruction_set();
    return PyModule_Create(&module);
}
