// The Python module flash_dmattn._C. Importing it registers the operators; it has two functions of its own.
#define Py_LIMITED_API 0x030a0000  // Python 3.10
#include <Python.h>

#include <cuda_runtime_api.h>

#include "build_info.h"  // written by the build

namespace {

// One string, prefix and JSON: flash_dmattn/backends/cuda/extension.py searches the file for it before loading it.
__attribute__((used)) const char kBuildInfo[] = FLASH_DMATTN_BUILD_INFO_PREFIX FLASH_DMATTN_BUILD_INFO;

PyObject* build_info(PyObject*, PyObject*) {
  return PyUnicode_FromString(kBuildInfo + sizeof(FLASH_DMATTN_BUILD_INFO_PREFIX) - 1);
}

PyObject* cuda_versions(PyObject*, PyObject*) {
  int driver = 0, runtime = 0;
  // A failure leaves 0, older than every version.
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  if (cudaRuntimeGetVersion(&runtime) != cudaSuccess) runtime = 0;
  return Py_BuildValue("(ii)", driver, runtime);
}

PyMethodDef methods[] = {
    {"build_info", build_info, METH_NOARGS, "What this extension was built from and for, as JSON."},
    {"cuda_versions", cuda_versions, METH_NOARGS, "(driver, runtime), 13000 for 13.0; 0 where there is no driver."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "flash_dmattn._C", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() { return PyModuleDef_Init(&module); }
