// Signals of a kernel that does what no hook could stop, such as overflowing its stack: they end the launch, never the process.
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <string.h>
#ifdef __APPLE__
#include <sys/ucontext.h>
#else
#include <ucontext.h>
#endif

#include "state.h"

enum { SIGNALS = 5, STACK_BYTES = 65536 };
static const int signals[SIGNALS] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
static struct sigaction previous[SIGNALS];
static stack_t previous_stack;
static pthread_t running;

static _Alignas(16) unsigned char handler_stack[STACK_BYTES];
static _Alignas(16) unsigned char emergency_stack[STACK_BYTES];

// What the handler leaves for emu_fault, which runs after it.
static int fault_signal, fault_code;
static uintptr_t fault_address, fault_pc, fault_sp, fault_frame;

#if defined(__APPLE__) && defined(__aarch64__)
#define CONTEXT_PC(c) ((c)->uc_mcontext->__ss.__pc)
#define CONTEXT_SP(c) ((c)->uc_mcontext->__ss.__sp)
#define CONTEXT_FRAME(c) ((c)->uc_mcontext->__ss.__fp)
#elif defined(__APPLE__)
#define CONTEXT_PC(c) ((c)->uc_mcontext->__ss.__rip)
#define CONTEXT_SP(c) ((c)->uc_mcontext->__ss.__rsp)
#define CONTEXT_FRAME(c) ((c)->uc_mcontext->__ss.__rbp)
#elif defined(__aarch64__)
#define CONTEXT_PC(c) ((c)->uc_mcontext.pc)
#define CONTEXT_SP(c) ((c)->uc_mcontext.sp)
#define CONTEXT_FRAME(c) ((c)->uc_mcontext.regs[29])
#else
#define CONTEXT_PC(c) ((c)->uc_mcontext.gregs[REG_RIP])
#define CONTEXT_SP(c) ((c)->uc_mcontext.gregs[REG_RSP])
#define CONTEXT_FRAME(c) ((c)->uc_mcontext.gregs[REG_RBP])
#endif

// The guard below the thread's stack was touched, or its frame is so large that it begins beyond.
static int stack_is_full(void) {
  return emu_current->stack_low - fault_address <= EMU_STACK_GUARD || fault_sp < emu_current->stack_low;
}

static enum finding_kind kind_of_fault(struct emu_finding* finding) {
  if (fault_signal == SIGFPE) return FINDING_DIVISION;
  if (fault_signal == SIGILL || fault_signal == SIGTRAP) return FINDING_FAULT;
  if (stack_is_full()) return FINDING_STACK;
#if defined(__linux__) && defined(__x86_64__)
  // A general protection fault, which has no address: of a vector that is not aligned, or of an impossible address.
  if (fault_code == SI_KERNEL) return FINDING_ALIGNMENT;
#endif
  return emu_describe(fault_address, finding) ? FINDING_OUTSIDE : FINDING_WILD;
}

// Runs on the emergency stack in place of the kernel's thread, outside of any signal handler.
static _Noreturn void report(void) {
  struct emu_finding* finding = emu_begin_finding(FINDING_FAULT);
  finding->address = fault_address;
  finding->kind = kind_of_fault(finding);
  finding->number[2] = fault_signal;
  emu_add_party(finding, emu_group, emu_current->index, ACCESS_NONE, fault_pc);
  emu_add_frames(&finding->party[0], emu_current, fault_frame);
  emu_stop();
}

static void pass_on(int index, int number, siginfo_t* info, void* context) {
  const struct sigaction* action = &previous[index];
  if (action->sa_flags & SA_SIGINFO) {
    action->sa_sigaction(number, info, context);
  } else if (action->sa_handler == SIG_DFL || action->sa_handler == SIG_IGN) {
    // The instruction faults again, now without this handler.
    sigaction(number, action, NULL);
  } else {
    action->sa_handler(number);
  }
}

static void handle(int number, siginfo_t* info, void* opaque) {
  int index = 0;
  while (signals[index] != number) index++;
  // Another thread's, or one that somebody sent.
  if (!emu_current || !pthread_equal(pthread_self(), running) || info->si_code == SI_USER || info->si_code <= 0) {
    pass_on(index, number, info, opaque);
    return;
  }
  ucontext_t* context = opaque;
  fault_signal = number;
  fault_code = info->si_code;
  fault_address = (uintptr_t)info->si_addr;
  fault_pc = (uintptr_t)CONTEXT_PC(context);
  fault_sp = (uintptr_t)CONTEXT_SP(context);
  fault_frame = (uintptr_t)CONTEXT_FRAME(context);
  uintptr_t top = (uintptr_t)(emergency_stack + STACK_BYTES);
  // As after a call: on x86-64 the return address, which nothing uses, lies on top.
#if defined(__x86_64__)
  top -= sizeof(uintptr_t);
#endif
  CONTEXT_PC(context) = (__typeof__(CONTEXT_PC(context)))(uintptr_t)report;
  CONTEXT_SP(context) = (__typeof__(CONTEXT_SP(context)))top;
}

void emu_install_handlers(void) {
  stack_t stack = {.ss_sp = handler_stack, .ss_size = sizeof handler_stack};
  sigaltstack(&stack, &previous_stack);
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  running = pthread_self();
  for (int i = 0; i < SIGNALS; i++) sigaction(signals[i], &action, &previous[i]);
}

void emu_restore_handlers(void) {
  for (int i = 0; i < SIGNALS; i++) sigaction(signals[i], &previous[i], NULL);
  // macOS refuses to set back a stack that is disabled and has no size.
  if (previous_stack.ss_flags & SS_DISABLE) previous_stack.ss_size = sizeof handler_stack;
  sigaltstack(&previous_stack, NULL);
}
