// Compares Python lists of tensors with those of the last step. Needs neither torch's headers nor Python's: the functions
// of Python are in its stable interface, and torch passes the function that reads an address.

#include <cstdint>

struct _object;

extern "C" {

_object *PyList_GetItem(_object *list, intptr_t index);  // borrowed

// Whether these lists, of `count` elements each, have the same objects.
int same_objects(_object *some, _object *others, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        if (PyList_GetItem(some, i) != PyList_GetItem(others, i)) return 0;
    return 1;
}

// Whether the `count` tensors are at these addresses. `address_of` throws for a tensor without memory.
int same_addresses(_object *tensors, const uint64_t *addresses, int64_t count, void *(*address_of)(_object *)) {
    try {
        for (int64_t i = 0; i < count; ++i)
            if (reinterpret_cast<uint64_t>(address_of(PyList_GetItem(tensors, i))) != addresses[i]) return 0;
    } catch (...) {
        return 0;
    }
    return 1;
}
}
