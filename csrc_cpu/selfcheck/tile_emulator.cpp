// Runs the tile instructions of AMX on x86-64 processors that lack them: a library to preload, for tests alone.
//
//     c++ -std=c++20 -O2 -shared -fPIC tile_emulator.cpp -o libtile_emulator.so -ldl
//     LD_PRELOAD=./libtile_emulator.so PROGRAM
//
// The processor traps on each such instruction (SIGILL); the handler carries it out on tiles of the thread and goes on
// behind it, so a program runs as it was compiled, encodings and order of memory accesses included. An instruction
// that AMX would refuse ends the process with a reason. The kernels' library finds octavo_tiles_are_emulated and then
// counts the instruction set as usable; nothing else asks for it.

#include <asm/prctl.h>
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "tile_decode.h"
#include "tile_machine.h"

namespace octavo_tiles {
namespace {

std::atomic<int64_t> num_instructions{0}, num_products{0}, num_configs{0}, num_configured{0};

// What others wish to be done on SIGILL: they get what is no tile instruction.
struct sigaction others = {};

// By pointer, and made at the first instruction: a handler must not allocate by malloc, and a library that is loaded
// late has little room for variables of threads. Never freed; a thread has one.
Machine& machine() {
    static thread_local Machine* mine __attribute__((tls_model("initial-exec"))) = nullptr;
    if (mine == nullptr) {
        void* const memory =
            mmap(nullptr, sizeof(Machine), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) std::abort();
        mine = new (memory) Machine();
    }
    return *mine;
}

Registers registers_of(const ucontext_t& context) {
    static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    Registers registers = {};
    const auto& values = context.uc_mcontext.gregs;
    for (int i = 0; i < 16; ++i) registers.general[i] = uint64_t(values[order[i]]);
    registers.rip = uint64_t(values[REG_RIP]);
    return registers;
}

uint64_t segment_base(int which) {
    uint64_t base = 0;
    syscall(SYS_arch_prctl, which, &base);
    return base;
}

Instruction read_instruction(const ucontext_t& context) {
    Registers registers = registers_of(context);
    const auto* code = reinterpret_cast<const uint8_t*>(registers.rip);
    if (*code == 0x64) registers.fs = segment_base(ARCH_GET_FS);
    if (*code == 0x65) registers.gs = segment_base(ARCH_GET_GS);
    return Decoder(code, registers).decode();
}

Complaint run(Machine& tiles, const Instruction& i) {
    const auto at = [&](int row) { return reinterpret_cast<void*>(i.row_address(row)); };
    switch (i.kind) {
        case Kind::kLoadConfig: return tiles.load_config(at(0));
        case Kind::kStoreConfig: return tiles.store_config(at(0)), nullptr;
        case Kind::kRelease: return tiles.release(), nullptr;
        case Kind::kZero: return tiles.zero(i.tile);
        case Kind::kLoad:
        case Kind::kLoadOnce: return tiles.load(i.tile, at);
        case Kind::kStore: return tiles.store(i.tile, at);
        case Kind::kDotBf16: return tiles.dot_bf16(i.tile, i.first, i.second);
        case Kind::kDotSigned: return tiles.dot_bytes<int8_t, int8_t>(i.tile, i.first, i.second);
        case Kind::kDotSignedUnsigned: return tiles.dot_bytes<int8_t, uint8_t>(i.tile, i.first, i.second);
        case Kind::kDotUnsignedSigned: return tiles.dot_bytes<uint8_t, int8_t>(i.tile, i.first, i.second);
        case Kind::kDotUnsigned: return tiles.dot_bytes<uint8_t, uint8_t>(i.tile, i.first, i.second);
        case Kind::kNone: break;
    }
    return "it is none";
}

void count(const Instruction& i, bool was_configured, bool is_configured) {
    num_instructions.fetch_add(1, std::memory_order_relaxed);
    if (i.kind >= Kind::kDotBf16) num_products.fetch_add(1, std::memory_order_relaxed);
    if (i.kind == Kind::kLoadConfig) num_configs.fetch_add(1, std::memory_order_relaxed);
    num_configured.fetch_add(int(is_configured) - int(was_configured), std::memory_order_relaxed);
}

[[noreturn]] void refuse(const Instruction& i, uint64_t rip, Complaint complaint) {
    char text[256];
    const int length = std::snprintf(text, sizeof text, "tile emulator: %s (tiles %d, %d, %d) at %#llx: %s\n",
                                     name_of(i.kind), i.tile, i.first, i.second,
                                     static_cast<unsigned long long>(rip), complaint);
    [[maybe_unused]] const auto written = write(STDERR_FILENO, text, size_t(length));
    signal(SIGABRT, SIG_DFL);
    std::abort();
}

void pass_on(int number, siginfo_t* info, void* context);

// Aligns its stack: some emulators of processors (qemu 7) call handlers on one that is not.
__attribute__((force_align_arg_pointer)) void on_illegal_instruction(int number, siginfo_t* info, void* where) {
    const int saved_errno = errno;
    auto& context = *static_cast<ucontext_t*>(where);
    auto& rip = context.uc_mcontext.gregs[REG_RIP];
    Instruction instruction = read_instruction(context);
    if (instruction.kind == Kind::kNone) return pass_on(number, info, where);
    Machine& tiles = machine();
    do {  // those that follow are run by the same trap, which costs far more than they do
        const bool was_configured = tiles.configured();
        if (const Complaint complaint = run(tiles, instruction)) refuse(instruction, uint64_t(rip), complaint);
        count(instruction, was_configured, tiles.configured());
        rip += instruction.length;
        instruction = read_instruction(context);
    } while (instruction.kind != Kind::kNone);
    errno = saved_errno;
}

// The C library's own, which this library's stands before.
int real_sigaction(int number, const struct sigaction* action, struct sigaction* before) {
    using Function = int(int, const struct sigaction*, struct sigaction*);
    static auto* const function = reinterpret_cast<Function*>(dlsym(RTLD_NEXT, "sigaction"));
    return function(number, action, before);
}

void pass_on(int number, siginfo_t* info, void* context) {
    if (others.sa_flags & SA_SIGINFO) return others.sa_sigaction(number, info, context);
    if (others.sa_handler != SIG_DFL && others.sa_handler != SIG_IGN) return others.sa_handler(number);
    struct sigaction standard = {};
    standard.sa_handler = SIG_DFL;
    real_sigaction(number, &standard, nullptr);  // the instruction is tried again, and ends the process
}

__attribute__((constructor)) void install() {
    struct sigaction action = {};
    action.sa_sigaction = on_illegal_instruction;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    real_sigaction(SIGILL, &action, &others);
}

}  // namespace
}  // namespace octavo_tiles

using namespace octavo_tiles;

extern "C" {

int octavo_tiles_are_emulated() { return 1; }
// Of all threads, since the start: instructions run, products among them, configurations loaded.
int64_t octavo_tile_instructions() { return num_instructions.load(); }
int64_t octavo_tile_products() { return num_products.load(); }
int64_t octavo_tile_configs() { return num_configs.load(); }
// Threads whose tiles are configured now.
int64_t octavo_tile_threads() { return num_configured.load(); }

// Whoever else wants SIGILL (Python's faulthandler does) gets it behind this handler.
int sigaction(int number, const struct sigaction* action, struct sigaction* before) noexcept {
    if (number != SIGILL) return real_sigaction(number, action, before);
    const struct sigaction last = others;
    if (action != nullptr) others = *action;
    if (before != nullptr) *before = last;
    return 0;
}

sighandler_t signal(int number, sighandler_t handler) noexcept {
    struct sigaction action = {}, before = {};
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;
    if (sigaction(number, &action, &before) != 0) return SIG_ERR;
    return before.sa_handler;
}

}  // extern "C"
