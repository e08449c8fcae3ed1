// Compares tensors with those of the last step. Reads torch's tensors directly, and Python's objects by functions of the
// stable interface, so that Python's headers are not needed.

#include <ATen/core/Tensor.h>

#include <cstdint>

struct _object;

extern "C" {
intptr_t PyList_Size(_object *);                         // -1 and an exception for other objects
_object *PyList_GetItem(_object *list, intptr_t index);  // borrowed
void PyErr_Clear();
int PyDict_Next(_object *dict, intptr_t *position, _object **key, _object **value);  // borrowed
}

using Impl = c10::TensorImpl *;

static bool is_list_of(_object *object, int64_t count) {
    const auto size = PyList_Size(object);
    if (size < 0) PyErr_Clear();
    return size == count;
}

// How a tensor is found in a Python object. Subclasses may store their elements in other tensors.
struct Objects {
    int64_t type_word, word;      // indices of the pointers to its type, and to the tensor in objects of these types
    _object *tensor, *parameter;  // the types
};

// Whose gradients are compared, and which other tensors.
struct Lists {
    _object *first;  // gradients, or parameters, whose gradients are then compared as well
    int64_t num_first;
    _object *others;
    int64_t num_others;
    bool reads_grads;  // whether `first` has parameters
    Objects objects;
};

static Impl impl_of(_object *object, const Objects &objects) {
    const _object *type = reinterpret_cast<_object **>(object)[objects.type_word];
    if (type != objects.tensor && type != objects.parameter) return nullptr;
    return reinterpret_cast<Impl *>(object)[objects.word];
}

// Pass each tensor to `take`, with its number: gradients have the first ones. Until it returns false.
template <class Take>
static bool each(const Lists &lists, Take take) {
    if (!is_list_of(lists.first, lists.num_first) || !is_list_of(lists.others, lists.num_others)) return false;
    for (int64_t i = 0; i < lists.num_first; ++i) {
        Impl impl = impl_of(PyList_GetItem(lists.first, i), lists.objects);
        if (!impl) return false;
        if (lists.reads_grads) {
            const at::Tensor &grad = impl->grad();
            if (!grad.defined() || !take(lists.num_first + i, impl)) return false;
            impl = grad.unsafeGetTensorImpl();
        }
        if (!take(i, impl)) return false;
    }
    const int64_t num_before = lists.reads_grads ? 2 * lists.num_first : lists.num_first;
    for (int64_t i = 0; i < lists.num_others; ++i) {
        Impl impl = impl_of(PyList_GetItem(lists.others, i), lists.objects);
        if (!impl || !take(num_before + i, impl)) return false;
    }
    return true;
}

// Pass all that describes a tensor, except its address, to `take` as integers, until it returns false. Throws for a
// tensor without memory.
template <class Take>
static bool describe(Impl impl, Take take) {
    const auto sizes = impl->sizes(), strides = impl->strides();
    bool goes_on = take(impl->key_set().raw_repr()) && take(static_cast<int64_t>(impl->dtype().toScalarType()))
        && take(int64_t(impl->device().type()) << 32 | uint32_t(impl->device().index())) && take(sizes.size());
    for (size_t dim = 0; goes_on && dim < sizes.size(); ++dim) goes_on = take(sizes[dim]) && take(strides[dim]);
    return goes_on;
}

extern "C" {

// Write addresses and descriptions, `room` integers at most. Returns 0 if there are tensors that cannot be compared.
int record(_object *first, int64_t num_first, _object *others, int64_t num_others, int reads_grads, const Objects *objects,
           uint64_t *addresses, int64_t *descriptions, int64_t room) {
    try {
        return each({first, num_first, others, num_others, reads_grads != 0, *objects}, [&](int64_t i, Impl impl) {
            addresses[i] = reinterpret_cast<uint64_t>(impl->data());
            return describe(impl, [&](int64_t value) { return room-- > 0 && (*descriptions++ = value, true); });
        });
    } catch (...) {
        return 0;
    }
}

// Returns 0 if anything has changed, 2 if only addresses of gradients have, which are then written, and 1 if nothing has.
int compare(_object *first, int64_t num_first, _object *others, int64_t num_others, int reads_grads, const Objects *objects,
            uint64_t *addresses, const int64_t *descriptions) {
    bool have_moved = false;
    try {
        const bool is_same = each({first, num_first, others, num_others, reads_grads != 0, *objects}, [&](int64_t i, Impl impl) {
            const auto address = reinterpret_cast<uint64_t>(impl->data());
            if (address != addresses[i]) {
                if (i >= num_first) return false;
                addresses[i] = address;
                have_moved = true;
            }
            return describe(impl, [&](int64_t value) { return *descriptions++ == value; });
        });
        return is_same ? 1 + have_moved : 0;
    } catch (...) {
        return 0;
    }
}

// Count a write to each tensor, as `torch.autograd.graph.increment_version` does, and write the new counts. Stops at an
// object that is not a plain tensor, and at a tensor whose writes are not counted. Returns the number of those before it.
int64_t count_writes(_object *tensors, int64_t count, const Objects *objects, uint32_t *versions) {
    if (!is_list_of(tensors, count)) return 0;
    for (int64_t i = 0; i < count; ++i) {
        Impl impl = impl_of(PyList_GetItem(tensors, i), *objects);
        if (!impl || impl->is_inference()) return i;
        impl->bump_version();
        versions[i] = impl->version_counter().current_version();
    }
    return count;
}

// Whether the counts of writes to the tensors are these.
int same_versions(_object *tensors, int64_t count, const Objects *objects, const uint32_t *versions) {
    if (!is_list_of(tensors, count)) return 0;
    for (int64_t i = 0; i < count; ++i) {
        Impl impl = impl_of(PyList_GetItem(tensors, i), *objects);
        if (!impl || impl->is_inference() || impl->version_counter().current_version() != versions[i]) return 0;
    }
    return 1;
}

// Whether two lists of `count` elements have the same objects.
int same_objects(_object *some, _object *others, int64_t count) {
    if (!is_list_of(some, count) || !is_list_of(others, count)) return 0;
    for (int64_t i = 0; i < count; ++i)
        if (PyList_GetItem(some, i) != PyList_GetItem(others, i)) return 0;
    return 1;
}

// Whether the dicts have these keys and values, in order: the same objects, `num_values` in all.
int same_entries(_object *dicts, int64_t count, _object *keys, _object *values, int64_t num_values) {
    if (!is_list_of(dicts, count)) return 0;
    int64_t at = 0;
    for (int64_t i = 0; i < count; ++i) {
        _object *dict = PyList_GetItem(dicts, i), *key, *value;
        for (intptr_t position = 0; PyDict_Next(dict, &position, &key, &value); ++at)
            if (at == num_values || PyList_GetItem(keys, at) != key || PyList_GetItem(values, at) != value) return 0;
    }
    return at == num_values;
}
}
