// Tensors as a call sees them: address, shape and strides, borrowed while the call runs.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <string>

#include "format.h"

namespace kvstrata {

namespace nb = nanobind;

enum class Scalar : uint8_t { f32, bf16, f16, i32, i8, u8, other };

constexpr Scalar scalar_of(DType dtype) {
  return dtype == DType::f32 ? Scalar::f32 : dtype == DType::bf16 ? Scalar::bf16 : Scalar::f16;
}

struct Array {
  static constexpr int MAX_DIMS = 6;
  char* data = nullptr;
  int dims = 0;
  int64_t shape[MAX_DIMS] = {};
  int64_t stride[MAX_DIMS] = {};  // in elements
  Scalar scalar = Scalar::other;
  int item = 0;  // bytes of an element

  int64_t size() const;
  bool contiguous() const;
  std::string describe() const;  // "float32 [2, 3]"

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data);
  }
};

// A view of any CPU tensor or array that speaks DLPack. `name` stands in errors. TypeError if it is none, ValueError if
// it is on another device.
Array view(nb::handle object, const char* name);

// The same of an array that outlives the call.
Array view(const nb::ndarray<>& array, const char* name);

// Raise ValueError unless the array has this element type and shape; -1 in `shape` stands for any size.
void expect(const Array& array, const char* name, Scalar scalar, std::initializer_list<int64_t> shape);
void expect_contiguous(const Array& array, const char* name);
void expect_dense_rows(const Array& array, const char* name);

// The dtype of a cache that the array has; ValueError for others.
DType dtype_of(const Array& array, const char* name);

const char* name_of(Scalar scalar);

[[noreturn]] void fail(const std::string& message);  // ValueError

}  // namespace kvstrata
