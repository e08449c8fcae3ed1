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

// Where the parts of a tensor were in the last step. They are fetched into the cache before the loop reaches the tensor,
// because a backward pass has displaced them. A stale address only costs time: nothing is read from it.
struct Seen {
    const void *impl, *storage, *autograd;
    const void *start;  // of its memory
    int64_t offset;     // in it
};

static const int64_t AHEAD = 6;  // tensors between a fetch and its use

[[gnu::always_inline]] static inline void fetch(const void *start, int offset) {
    __builtin_prefetch(static_cast<const char *>(start) + offset);
}

// The fields that are read are in these lines of torch's objects. If another version moves them, too little is fetched.
[[gnu::always_inline]] static inline void fetch(const Seen &seen) {
    fetch(seen.impl, 16);
    fetch(seen.impl, 80);
    fetch(seen.impl, 160);
    fetch(seen.storage, 16);
    if (seen.autograd) fetch(seen.autograd, 40);
}

static void note(Impl impl, Seen &seen) {
    const auto *storage = impl->unsafe_storage().unsafeGetStorageImpl();
    seen.impl = impl;
    seen.storage = storage;
    seen.start = storage->data();
    seen.offset = impl->storage_offset();
}

// The tensors of a snapshot: gradients have the first numbers.
struct Tensors {
    int64_t num_first;  // gradients, or parameters, whose gradients are then compared as well
    int64_t num_others;
    int64_t reads_grads;  // whether the first ones are parameters
    Objects objects;
    uint64_t *addresses;
    int64_t *descriptions;
    int64_t room;  // for descriptions
    Seen *seen;
};

static Impl impl_of(_object *object, const Objects &objects) {
    const _object *type = reinterpret_cast<_object **>(object)[objects.type_word];
    if (type != objects.tensor && type != objects.parameter) return nullptr;
    return reinterpret_cast<Impl *>(object)[objects.word];
}

// Pass each tensor to `take`, with its number, until it returns false.
template <class Take>
static bool each(_object *first, _object *others, const Tensors &all, Take take) {
    if (!is_list_of(first, all.num_first) || !is_list_of(others, all.num_others)) return false;
    const int64_t num_before = all.reads_grads ? 2 * all.num_first : all.num_first;
    for (int64_t i = 0; i < all.num_first; ++i) {
        if (i + AHEAD < all.num_first) {
            fetch(all.seen[i + AHEAD]);
            if (all.reads_grads) fetch(all.seen[all.num_first + i + AHEAD]);
        }
        Impl impl = impl_of(PyList_GetItem(first, i), all.objects);
        if (!impl) return false;
        if (all.reads_grads) {
            const at::Tensor &grad = impl->grad();
            if (!grad.defined() || !take(all.num_first + i, impl)) return false;
            impl = grad.unsafeGetTensorImpl();
        }
        if (!take(i, impl)) return false;
    }
    for (int64_t i = 0; i < all.num_others; ++i) {
        if (i + AHEAD < all.num_others) fetch(all.seen[num_before + i + AHEAD]);
        Impl impl = impl_of(PyList_GetItem(others, i), all.objects);
        if (!impl || !take(num_before + i, impl)) return false;
    }
    return true;
}

// Pass all that describes a tensor, except its address, to `take` as integers, until it returns false. Throws for a
// tensor without memory.
template <class Take>
[[gnu::always_inline]] static inline bool describe(Impl impl, Take take) {
    const auto sizes = impl->sizes(), strides = impl->strides();
    bool goes_on = take(impl->key_set().raw_repr()) && take(static_cast<int64_t>(impl->dtype().toScalarType()))
        && take(int64_t(impl->device().type()) << 32 | uint32_t(impl->device().index())) && take(sizes.size());
    for (size_t dim = 0; goes_on && dim < sizes.size(); ++dim) goes_on = take(sizes[dim]) && take(strides[dim]);
    return goes_on;
}

// Tensors whose writes are counted.
struct Counted {
    int64_t count;
    Objects objects;
    uint32_t *versions;  // the numbers of writes
    Seen *seen;
};

// Pass each tensor to `take`, with its number, until it returns false. Stops at an object that is not a plain tensor, and
// at a tensor whose writes are not counted. Returns the number of those before it.
template <class Take>
static int64_t each_counted(_object *tensors, const Counted &all, Take take) {
    if (!is_list_of(tensors, all.count)) return 0;
    for (int64_t i = 0; i < all.count; ++i) {
        if (i + AHEAD < all.count) {
            const auto &later = all.seen[i + AHEAD];
            fetch(later.impl, 40);
            fetch(later.impl, 160);
            fetch(later.storage, 16);
        }
        Impl impl = impl_of(PyList_GetItem(tensors, i), all.objects);
        if (!impl || impl->is_inference() || !take(i, impl)) return i;
    }
    return all.count;
}

extern "C" {

// Write addresses and descriptions. Returns 0 if there are tensors that cannot be compared.
int record(_object *first, _object *others, const Tensors *all) {
    auto *descriptions = all->descriptions;
    auto room = all->room;
    try {
        return each(first, others, *all, [&](int64_t i, Impl impl) {
            all->addresses[i] = reinterpret_cast<uint64_t>(impl->data());
            const bool has_grad = all->reads_grads && i >= all->num_first && i < 2 * all->num_first;
            all->seen[i].autograd = has_grad ? impl->autograd_meta() : nullptr;
            note(impl, all->seen[i]);
            return describe(impl, [&](int64_t value) { return room-- > 0 && (*descriptions++ = value, true); });
        });
    } catch (...) {
        return 0;
    }
}

// Returns 0 if anything has changed, 2 if only addresses of gradients have, which are then written, and 1 if nothing has.
int compare(_object *first, _object *others, const Tensors *all) {
    const auto *descriptions = all->descriptions;
    bool have_moved = false;
    try {
        const bool is_same = each(first, others, *all, [&](int64_t i, Impl impl) {
            auto &seen = all->seen[i];
            const auto *storage = impl->unsafe_storage().unsafeGetStorageImpl();
            if (!storage || storage->data() != seen.start || impl->storage_offset() != seen.offset) {
                const auto address = reinterpret_cast<uint64_t>(impl->data());
                if (address != all->addresses[i]) {
                    if (i >= all->num_first) return false;
                    all->addresses[i] = address;
                    have_moved = true;
                }
                note(impl, seen);
            }
            seen.impl = impl;
            seen.storage = storage;
            return describe(impl, [&](int64_t value) { return *descriptions++ == value; });
        });
        return is_same ? 1 + have_moved : 0;
    } catch (...) {
        return 0;
    }
}

// Count a write to each tensor, as `torch.autograd.graph.increment_version` does, and write the new counts. Returns the
// number of tensors until one whose writes cannot be counted here.
int64_t count_writes(_object *tensors, const Counted *all) {
    return each_counted(tensors, *all, [&](int64_t i, Impl impl) {
        impl->bump_version();
        all->versions[i] = impl->version_counter().current_version();
        const auto counter = *reinterpret_cast<const void *const *>(&impl->version_counter());
        all->seen[i].impl = impl;
        all->seen[i].storage = counter;
        return true;
    });
}

// Whether the counts of writes to the tensors are these.
int same_versions(_object *tensors, const Counted *all) {
    return all->count == each_counted(tensors, *all, [&](int64_t i, Impl impl) {
        return impl->version_counter().current_version() == all->versions[i];
    });
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
