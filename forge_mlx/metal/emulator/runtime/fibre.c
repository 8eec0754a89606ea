// Threads of a group as fibres: each has its own stack, and a switch saves what the platform's calling convention keeps over a call.
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>

#include "state.h"

#ifdef __APPLE__
#define SYMBOL(name) "_" name
#define HIDE(name) ".private_extern _" name "\n"
#define CODE ".text\n.p2align 4\n"
#else
#define SYMBOL(name) name
#define HIDE(name) ".hidden " name "\n"
#define CODE ".text\n.p2align 4\n"
#endif

// emu_switch(save, load): stores the stack pointer in *save and goes on where the stack `load` was left.
// emu_fibre_start: first thing of a new fibre: entry(arguments, ids), then finished(), with an empty chain of frames.
void emu_fibre_start(void);
#if defined(__x86_64__)
__asm__(CODE ".globl " SYMBOL("emu_switch") "\n" HIDE("emu_switch") SYMBOL("emu_switch") ":\n"
        "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
        "  movq %rsp, (%rdi)\n"
        "  movq %rsi, %rsp\n"
        "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
        "  retq\n"
        ".globl " SYMBOL("emu_fibre_start") "\n" HIDE("emu_fibre_start") SYMBOL("emu_fibre_start") ":\n"
        "  xorl %ebp, %ebp\n"
        "  movq %r12, %rdi\n  movq %r13, %rsi\n"
        "  callq *%rbx\n"
        "  callq *%r14\n"
        "  ud2\n");
// r15, r14, r13, r12, rbx, rbp, return address: once they are popped, the stack is at a multiple of 16 again.
enum { SAVED_WORDS = 7 };
static void fill_frame(uintptr_t* words, uintptr_t arguments, uintptr_t ids, uintptr_t entry, uintptr_t finished) {
  words[1] = finished;
  words[2] = ids;
  words[3] = arguments;
  words[4] = entry;
  words[5] = 0;
  words[6] = (uintptr_t)emu_fibre_start;
}
#elif defined(__aarch64__)
__asm__(CODE ".globl " SYMBOL("emu_switch") "\n" HIDE("emu_switch") SYMBOL("emu_switch") ":\n"
        "  sub sp, sp, #160\n"
        "  stp x19, x20, [sp]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n  stp x25, x26, [sp, #48]\n"
        "  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
        "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
        "  mov x9, sp\n  str x9, [x0]\n"
        "  mov sp, x1\n"
        "  ldp x19, x20, [sp]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n  ldp x25, x26, [sp, #48]\n"
        "  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
        "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
        "  add sp, sp, #160\n"
        "  ret\n"
        ".globl " SYMBOL("emu_fibre_start") "\n" HIDE("emu_fibre_start") SYMBOL("emu_fibre_start") ":\n"
        "  mov x29, #0\n"
        "  mov x0, x19\n  mov x1, x20\n"
        "  blr x21\n"
        "  blr x22\n"
        "  brk #1\n");
enum { SAVED_WORDS = 20 };
static void fill_frame(uintptr_t* words, uintptr_t arguments, uintptr_t ids, uintptr_t entry, uintptr_t finished) {
  words[0] = arguments;
  words[1] = ids;
  words[2] = entry;
  words[3] = finished;
  words[10] = 0;
  words[11] = (uintptr_t)emu_fibre_start;
}
#else
#error "The emulator runs on x86-64 and arm64."
#endif

static void* scheduler_sp;
struct fibre* emu_current;

static void finished(void) {
  emu_current->state = FIBRE_FINISHED;
  emu_suspend();
}

// One block of `count` stacks; below each lies a guard that no thread may touch. Returns 0 where there is no memory.
EMU_EXPORT uint64_t emu_map_stacks(uint32_t count, uint32_t bytes) {
  uint64_t pitch = (uint64_t)bytes + EMU_STACK_GUARD;
  char* block = emu_map(count * pitch, 0);
  if (!block) return 0;
  for (uint32_t i = 0; i < count; i++)
    if (mprotect(block + i * pitch + EMU_STACK_GUARD, bytes, PROT_READ | PROT_WRITE)) {
      munmap(block, count * pitch);
      return 0;
    }
  return (uint64_t)block;
}

EMU_EXPORT void emu_unmap_stacks(uint64_t block, uint32_t count, uint32_t bytes) {
  munmap((void*)block, count * ((uint64_t)bytes + EMU_STACK_GUARD));
}

// Makes a fibre start anew. Its ids and the kernel's arguments lie on its own stack, where it may read without a check.
void emu_fibre_prepare(struct fibre* fibre, const struct emu_ids* ids) {
  const struct emu_launch* launch = emu_launched;
  fibre->stack_low = launch->stacks + fibre->index * ((uint64_t)launch->stack_bytes + EMU_STACK_GUARD) + EMU_STACK_GUARD;
  // Neighbouring stacks begin in different cache lines of a page: else all of them compete for the same few sets.
  uintptr_t top = fibre->stack_low + launch->stack_bytes - (fibre->index * 320u) % 4096;
  struct emu_ids* own = (struct emu_ids*)((top - sizeof *own) & ~(uintptr_t)15);
  *own = *ids;
  void** arguments = (void**)(((uintptr_t)own - launch->buffer_count * sizeof(void*)) & ~(uintptr_t)15);
  for (uint32_t i = 0; i < launch->buffer_count; i++) arguments[i] = (char*)launch->buffers[i].address + launch->buffers[i].offset;
  uintptr_t* words = (uintptr_t*)arguments - SAVED_WORDS;
  fill_frame(words, (uintptr_t)arguments, (uintptr_t)own, (uintptr_t)emu_entry, (uintptr_t)finished);
  fibre->sp = words;
  fibre->state = FIBRE_READY;
  emu_place_begin(fibre);
  fibre->steps_left = launch->max_steps;
}

// Runs a fibre until it waits, finishes or stops the launch.
void emu_resume(struct fibre* fibre) {
  emu_current = fibre;
  emu_now.stack_low = fibre->stack_low;
  emu_now.who[0] = fibre->who[0];
  emu_now.who[1] = fibre->who[1];
  emu_now.steps_left = fibre->steps_left;
  emu_switch(&scheduler_sp, fibre->sp);
  emu_settle_write();
  fibre->steps_left = emu_now.steps_left;
  emu_current = NULL;
}

// Back to the scheduler; returns when the fibre is resumed.
void emu_suspend(void) { emu_switch(&emu_current->sp, scheduler_sp); }

// Back to the scheduler for good.
_Noreturn void emu_abandon(void) {
  emu_suspend();
  __builtin_unreachable();
}
