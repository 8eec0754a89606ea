// Metal's keywords and macros, spelled for clang's C++ for OpenCL.
#pragma once

#pragma OPENCL EXTENSION cl_khr_fp16 : enable

#define __METAL_VERSION__ 310
#define METAL_FUNC inline __attribute__((__always_inline__))

// The functions of these headers: inlined, and without debug lines, so that what they do is told of the line that
// calls them.
#define EMU_FUNC inline __attribute__((always_inline, nodebug))

// Several arguments as one of another macro.
#define EMU_LIST(...) __VA_ARGS__

// Ordinary names in Metal, keywords in OpenCL.
#define global emu_name_global
#define local emu_name_local
#define generic emu_name_generic
#define pipe emu_name_pipe
#define read_only emu_name_read_only
#define write_only emu_name_write_only
#define read_write emu_name_read_write
#define vec_step emu_name_vec_step
#define kernel

#define device __global
#define threadgroup __local
#define constant __constant
#define thread __private
