#include "arrays.h"

#include <limits>

namespace kvstrata {
namespace {

// The C interface of DLPack 1.2 and later, which torch offers from 2.10 on: a twentieth of the time of __dlpack__().
struct ExchangeHeader {
  uint32_t major, minor;
  ExchangeHeader* previous;
};

struct Exchange {
  ExchangeHeader header;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, nb::dlpack::dltensor* out);
};

// What the type of `object` offers, or null. Remembers the last type: a call's arrays are nearly always of one.
Exchange* exchange_of(nb::handle object) {
  static PyTypeObject* last_type = nullptr;
  static Exchange* last = nullptr;
  PyTypeObject* type = Py_TYPE(object.ptr());
  if (type == last_type) return last;
  Exchange* found = nullptr;
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule) {
    found = static_cast<Exchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    Py_DECREF(capsule);
    if (found && found->header.major != 1) found = nullptr;
  }
  PyErr_Clear();
  if (found) {
    Py_INCREF(type);  // its address must not be given to another type while it is remembered
    Py_XDECREF(last_type);
    last_type = type;
    last = found;
  }
  return found;
}

// a * b, or the largest number where that overflows: expanded views can have any shape.
int64_t times(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<int64_t>::max() : product;
}

Scalar scalar_from(uint8_t code, int bits) {
  using Code = nb::dlpack::dtype_code;
  switch (Code(code)) {
    case Code::Float: return bits == 32 ? Scalar::f32 : bits == 16 ? Scalar::f16 : Scalar::other;
    case Code::Bfloat: return bits == 16 ? Scalar::bf16 : Scalar::other;
    case Code::Int: return bits == 32 ? Scalar::i32 : bits == 8 ? Scalar::i8 : Scalar::other;
    case Code::UInt: return bits == 8 ? Scalar::u8 : Scalar::other;
    default: return Scalar::other;
  }
}

Array from_dlpack(const nb::dlpack::dltensor& t, const char* name) {
  if (t.device.device_type != nb::device::cpu::value) fail(std::string(name) + " is not on the CPU");
  if (t.ndim > Array::MAX_DIMS) fail(std::string(name) + " has " + std::to_string(t.ndim) + " dimensions");
  Array a;
  a.dims = t.ndim;
  a.scalar = t.dtype.lanes == 1 ? scalar_from(t.dtype.code, t.dtype.bits) : Scalar::other;
  a.item = (t.dtype.bits + 7) / 8;
  int64_t dense = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    a.shape[i] = t.shape[i];
    a.stride[i] = t.strides ? t.strides[i] : dense;
    dense = times(dense, t.shape[i]);
  }
  a.data = static_cast<char*>(t.data) + t.byte_offset;
  if (a.size() > 0 && !t.data) fail(std::string(name) + " has no memory");
  return a;
}

}  // namespace

void fail(const std::string& message) { throw nb::value_error(message.c_str()); }

const char* name_of(Scalar scalar) {
  switch (scalar) {
    case Scalar::f32: return "float32";
    case Scalar::bf16: return "bfloat16";
    case Scalar::f16: return "float16";
    case Scalar::i32: return "int32";
    case Scalar::i8: return "int8";
    case Scalar::u8: return "uint8";
    default: return "another type";
  }
}

int64_t Array::size() const {
  int64_t n = 1;
  for (int i = 0; i < dims; ++i) n = times(n, shape[i]);
  return n;
}

bool Array::contiguous() const {
  if (size() == 0) return true;
  int64_t dense = 1;
  for (int i = dims - 1; i >= 0; --i) {
    if (shape[i] != 1 && stride[i] != dense) return false;
    dense = times(dense, shape[i]);
  }
  return true;
}

std::string Array::describe() const {
  std::string text = std::string(name_of(scalar)) + " [";
  for (int i = 0; i < dims; ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

Array view(nb::handle object, const char* name) {
  if (Exchange* exchange = exchange_of(object)) {
    nb::dlpack::dltensor tensor;
    if (exchange->tensor_from_object(object.ptr(), &tensor) != 0) {
      const nb::python_error error;  // takes Python's
      fail(std::string(name) + " has no memory to look at: " + error.what());
    }
    return from_dlpack(tensor, name);
  }
  nb::ndarray<> array;
  if (!nb::try_cast(object, array)) {
    throw nb::type_error((std::string(name) + " is no tensor or writable array").c_str());
  }
  return view(array, name);  // the caller's reference to `object` keeps its memory
}

Array view(const nb::ndarray<>& array, const char* name) {
  if (array.device_type() != nb::device::cpu::value) fail(std::string(name) + " is not on the CPU");
  if (array.ndim() > size_t(Array::MAX_DIMS)) fail(std::string(name) + " has too many dimensions");
  Array a;
  a.dims = int(array.ndim());
  a.scalar = array.dtype().lanes == 1 ? scalar_from(array.dtype().code, array.dtype().bits) : Scalar::other;
  a.item = (array.dtype().bits + 7) / 8;
  for (int i = 0; i < a.dims; ++i) {
    a.shape[i] = int64_t(array.shape(i));
    a.stride[i] = array.stride(i);
  }
  a.data = static_cast<char*>(array.data());
  if (a.size() > 0 && !a.data) fail(std::string(name) + " has no memory");
  return a;
}

void expect(const Array& array, const char* name, Scalar scalar, std::initializer_list<int64_t> shape) {
  bool fits = array.scalar == scalar && array.dims == int(shape.size());
  int i = 0;
  for (int64_t wanted : shape) {
    fits = fits && (wanted == -1 || array.shape[i] == wanted);
    ++i;
  }
  if (fits) return;
  std::string text = std::string(name) + " must be " + name_of(scalar) + " [";
  i = 0;
  for (int64_t wanted : shape) {
    text += (i++ ? ", " : "") + (wanted == -1 ? std::string("any") : std::to_string(wanted));
  }
  fail(text + "], not " + array.describe());
}

void expect_contiguous(const Array& array, const char* name) {
  if (!array.contiguous()) fail(std::string(name) + " must be contiguous");
}

void expect_dense_rows(const Array& array, const char* name) {
  const int last = array.dims - 1;
  if (array.shape[last] > 1 && array.stride[last] != 1) fail(std::string(name) + " must be dense along its last axis");
  for (int i = 0; i < last; ++i) {
    const int64_t s = array.stride[i];
    if (s < 0 || s > std::numeric_limits<int64_t>::max() / 64 / std::max<int64_t>(1, array.shape[i])) {
      fail(std::string(name) + " has strides out of range");
    }
  }
}

DType dtype_of(const Array& array, const char* name) {
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    if (array.scalar == scalar_of(dtype)) return dtype;
  }
  fail(std::string(name) + " must be float32, bfloat16 or float16, not " + array.describe());
}

}  // namespace kvstrata
