# What vLLM's CPU extension needs of an installed PyTorch. PyPI's torch for x86-64 is a CUDA build, whose own TorchConfig.cmake
# refuses a machine without the CUDA toolkit, although nothing of it is wanted here. setup.sh leads CMake to this file by Torch_ROOT.
execute_process(COMMAND python -c "import torch, os; print(os.path.dirname(torch.__file__), end='')"
                OUTPUT_VARIABLE TORCH_INSTALL_PREFIX COMMAND_ERROR_IS_FATAL ANY)
set(TORCH_INCLUDE_DIRS "${TORCH_INSTALL_PREFIX}/include" "${TORCH_INSTALL_PREFIX}/include/torch/csrc/api/include")
set(TORCH_CXX_FLAGS "")
set(TORCH_LIBRARIES torch)
add_library(torch INTERFACE IMPORTED)
set_target_properties(torch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${TORCH_INCLUDE_DIRS}"
    INTERFACE_LINK_LIBRARIES "${TORCH_INSTALL_PREFIX}/lib/libtorch.so;${TORCH_INSTALL_PREFIX}/lib/libtorch_cpu.so;${TORCH_INSTALL_PREFIX}/lib/libc10.so"
    INTERFACE_COMPILE_FEATURES cxx_std_17)
set(TORCH_FOUND TRUE)
