// Compares Python lists of tensors with those of the last step. Needs neither torch's headers nor Python's: the functions
// of Python are in its stable interface, and torch passes the functions that read a tensor.

#include <cstdint>

struct _object;

// The `DLTensor` of DLPack 1, https://dmlc.github.io/dlpack/latest/c_api.html
struct Description {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

using AddressOf = void *(*)(_object *);             // throws for a tensor without memory
using Describe = int (*)(_object *, Description *);  // sets a Python exception if it does not return 0

extern "C" {

_object *PyList_GetItem(_object *list, intptr_t index);  // borrowed
_object *PyObject_Type(_object *);                       // a new reference
void Py_DecRef(_object *);
void PyErr_Clear();

// Whether these lists, of `count` elements each, have the same objects.
int same_objects(_object *some, _object *others, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        if (PyList_GetItem(some, i) != PyList_GetItem(others, i)) return 0;
    return 1;
}

// Whether the `count` tensors are at these addresses.
int same_addresses(_object *tensors, const uint64_t *addresses, int64_t count, AddressOf address_of) {
    try {
        for (int64_t i = 0; i < count; ++i)
            if (reinterpret_cast<uint64_t>(address_of(PyList_GetItem(tensors, i))) != addresses[i]) return 0;
    } catch (...) {
        return 0;
    }
    return 1;
}
}

// Pass type, address, device, dtype and layout of each tensor to `take`, as integers, until it returns false.
template <class Take>
static bool each(_object *tensors, int64_t count, Describe describe, Take take) {
    for (int64_t i = 0; i < count; ++i) {
        _object *tensor = PyList_GetItem(tensors, i), *type = PyObject_Type(tensor);
        Py_DecRef(type);  // the tensor keeps it alive
        if (!take(reinterpret_cast<int64_t>(type))) return false;  // maybe not even a tensor
        Description d;
        if (describe(tensor, &d)) {
            PyErr_Clear();
            return false;
        }
        bool goes_on = take(reinterpret_cast<int64_t>(d.data) + d.byte_offset)
            && take(int64_t(d.device_type) << 32 | uint32_t(d.device_id)) && take(d.code << 24 | d.bits << 16 | d.lanes)
            && take(d.ndim);
        for (int32_t dim = 0; goes_on && dim < d.ndim; ++dim) goes_on = take(d.shape[dim]) && take(d.strides[dim]);
        if (!goes_on) return false;
    }
    return true;
}

extern "C" {

// Write what `same_places` compares, at most `room` integers. Returns 0 if a tensor cannot be described.
int record_places(_object *tensors, int64_t count, int64_t *record, int64_t room, Describe describe) {
    return each(tensors, count, describe, [&](int64_t value) { return room-- > 0 && (*record++ = value, true); });
}

// Whether type, address, device, dtype and layout of each tensor are as recorded.
int same_places(_object *tensors, int64_t count, const int64_t *record, Describe describe) {
    return each(tensors, count, describe, [&](int64_t value) { return *record++ == value; });
}
}
