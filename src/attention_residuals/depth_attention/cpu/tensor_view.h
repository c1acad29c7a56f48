// PyTorch's tensors seen from plain C++, through the table that torch.Tensor.__dlpack_c_exchange_api__ holds
// (DLPack 1.3, PyTorch 2.10 and later). Without that table no tensor is ever `plain`, and callers take the way
// through Python that hands over addresses.
#pragma once

#include <Python.h>

#include "kernel_types.h"

// DLPack's DLTensor: a view of memory, owned by the tensor it was taken from.
struct TensorView {
    void* data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;

    char* address() const { return (char*)data + byte_offset; }
    int64_t width() const { return shape[ndim - 1]; }
    int64_t numel() const {
        int64_t n = 1;
        for (int i = 0; i < ndim; i++) n *= shape[i];
        return n;
    }
    bool contiguous() const {
        int64_t expected = 1;
        for (int i = ndim - 1; i >= 0; i--) {
            if (shape[i] != 1 && strides[i] != expected) return false;
            expected *= shape[i];
        }
        return true;
    }
    bool same_as(const TensorView& o) const {
        if (ndim != o.ndim || code != o.code || bits != o.bits) return false;
        return memcmp(shape, o.shape, ndim * sizeof *shape) == 0;
    }
    // Whether the kernel takes this dtype, and which it is.
    bool has_dtype(DType* dtype) const {
        const int FLOAT = 2, BFLOAT = 4;
        if (code == FLOAT && bits == 32) *dtype = FLOAT32;
        else if (code == BFLOAT && bits == 16) *dtype = BFLOAT16;
        else if (code == FLOAT && bits == 16) *dtype = FLOAT16;
        else return false;
        return true;
    }
};

struct Torch {
    PyObject *tensor = nullptr, *parameter = nullptr, *empty_like = nullptr, *is_neg = nullptr;
    int (*view)(void*, TensorView*) = nullptr;

    // connect(torch.Tensor, torch.nn.Parameter, torch.empty_like, torch.Tensor.is_neg, the table's capsule)
    bool connect(PyObject* const* args) {
        struct Table {
            uint32_t major, minor;
            void *older, *allocate, *take, *give;
            int (*view)(void*, TensorView*);
        };
        const Table* table = (const Table*)PyCapsule_GetPointer(args[4], "dlpack_exchange_api");
        if (!table) return false;
        if (table->major != 1) {
            PyErr_Format(PyExc_ValueError, "DLPack's major version must be 1, got %d", (int)table->major);
            return false;
        }
        for (int i = 0; i < 4; i++) Py_INCREF(args[i]);
        tensor = args[0], parameter = args[1], empty_like = args[2], is_neg = args[3];
        view = table->view;
        return true;
    }

    // True for a contiguous tensor on the CPU whose memory holds its values. Never leaves an error behind.
    bool plain(PyObject* o, TensorView* v) const {
        if (!view || ((PyObject*)Py_TYPE(o) != tensor && (PyObject*)Py_TYPE(o) != parameter)) return false;
        const int CPU = 1;
        PyObject* negative = nullptr;  // a lazily negated view has other bits than values
        bool good = view(o, v) == 0 && v->device_type == CPU && v->lanes == 1 && v->ndim > 0 && v->contiguous() &&
                    (negative = PyObject_CallFunctionObjArgs(is_neg, o, nullptr)) == Py_False;
        Py_XDECREF(negative);
        PyErr_Clear();
        return good;
    }
};
