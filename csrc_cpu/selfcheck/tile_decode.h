// Reads one tile instruction of AMX as it stands in memory: VEX with three bytes, map 0F38, W and L zero.
#pragma once

#include <cstdint>
#include <cstring>

namespace octavo_tiles {

enum class Kind {
    kNone,  // no tile instruction, or one that is not emulated
    kLoadConfig,
    kStoreConfig,
    kRelease,
    kZero,
    kLoad,
    kLoadOnce,  // tileloaddt1: the same with a hint
    kStore,
    kDotBf16,
    kDotSigned,          // tdpbssd
    kDotSignedUnsigned,  // tdpbsud
    kDotUnsignedSigned,  // tdpbusd
    kDotUnsigned         // tdpbuud
};

inline const char* name_of(Kind kind) {
    static const char* const names[] = {"no tile instruction", "ldtilecfg",  "sttilecfg",   "tilerelease", "tilezero",
                                        "tileloadd",           "tileloaddt1", "tilestored", "tdpbf16ps",   "tdpbssd",
                                        "tdpbsud",             "tdpbusd",     "tdpbuud"};
    return names[int(kind)];
}

// What an address is made of.
struct Registers {
    uint64_t general[16];  // rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8 to r15: as instructions number them
    uint64_t rip;          // of the instruction
    uint64_t fs, gs;       // bases of segments
};

struct Instruction {
    Kind kind = Kind::kNone;
    int length = 0;
    int tile = 0;               // loaded, stored, zeroed, or summed to
    int first = 0, second = 0;  // factors of a product
    uint64_t offset = 0, stride = 0, segment = 0;
    uint64_t offset_mask = ~uint64_t(0);

    uint64_t row_address(int row) const { return segment + ((offset + uint64_t(row) * stride) & offset_mask); }
};

class Decoder {
public:
    Decoder(const uint8_t* code, const Registers& registers) : code_(code), registers_(registers) {}

    Instruction decode() {
        prefixes();
        if (next() != 0xc4) return {};
        const uint8_t extensions = next(), vector = next();
        reg_high_ = !(extensions & 0x80);
        index_high_ = !(extensions & 0x40);
        base_high_ = !(extensions & 0x20);
        vvvv_ = ~(vector >> 3) & 15;
        prefix_ = vector & 3;
        if ((extensions & 31) != 2 || (vector & 0x84)) return {};
        const uint8_t opcode = next(), modrm = next();
        mod_ = modrm >> 6;
        reg_ = modrm >> 3 & 7;
        rm_ = modrm & 7;
        out_.kind = kind_of(opcode);
        if (out_.kind == Kind::kNone) return {};
        out_.length = at_;
        return out_;
    }

private:
    enum Prefix { kNoPrefix, k66, kF3, kF2 };

    uint8_t next() { return code_[at_++]; }
    template <class T>
    int64_t next_signed() {
        T value;
        std::memcpy(&value, code_ + at_, sizeof value);
        at_ += int(sizeof value);
        return value;
    }

    void prefixes() {
        for (;; ++at_) {
            switch (code_[at_]) {
                case 0x67: out_.offset_mask = 0xffffffffu; break;
                case 0x64: out_.segment = registers_.fs; break;
                case 0x65: out_.segment = registers_.gs; break;
                case 0x26:
                case 0x2e:
                case 0x36:
                case 0x3e: break;  // segments that start at 0
                default: return;
            }
        }
    }

    Kind kind_of(uint8_t opcode) {
        switch (opcode) {
            case 0x49: return mod_ == 3 ? of_state() : of_config();
            case 0x4b: return of_memory();
            case 0x5c: return prefix_ == kF3 ? of_product(Kind::kDotBf16) : Kind::kNone;
            case 0x5e: {
                static const Kind kinds[] = {Kind::kDotUnsigned, Kind::kDotUnsignedSigned, Kind::kDotSignedUnsigned,
                                             Kind::kDotSigned};
                return of_product(kinds[prefix_]);
            }
            default: return Kind::kNone;
        }
    }

    Kind of_state() {
        out_.tile = reg_;
        if (vvvv_ != 0 || reg_high_ || rm_ != 0) return Kind::kNone;
        if (prefix_ == kNoPrefix && reg_ == 0) return Kind::kRelease;
        return prefix_ == kF2 ? Kind::kZero : Kind::kNone;
    }

    Kind of_config() {
        if (vvvv_ != 0 || reg_ != 0 || (prefix_ != kNoPrefix && prefix_ != k66)) return Kind::kNone;
        read_address(false);
        return prefix_ == k66 ? Kind::kStoreConfig : Kind::kLoadConfig;
    }

    Kind of_memory() {
        if (vvvv_ != 0 || reg_high_ || mod_ == 3 || rm_ != 4 || prefix_ == kNoPrefix) return Kind::kNone;
        out_.tile = reg_;
        read_address(true);
        return prefix_ == kF2 ? Kind::kLoad : prefix_ == k66 ? Kind::kLoadOnce : Kind::kStore;
    }

    Kind of_product(Kind kind) {
        if (mod_ != 3 || reg_high_ || base_high_ || vvvv_ > 7) return Kind::kNone;
        out_.tile = reg_;
        out_.first = rm_;
        out_.second = vvvv_;
        return kind;
    }

    // Rows of tiles lie `index * scale` apart; a configuration has that in its address.
    void read_address(bool rows) {
        uint64_t base = 0, index = 0;
        bool relative = false, far = mod_ == 2;
        if (rm_ == 4) {
            const uint8_t sib = next();
            const int index_register = (sib >> 3 & 7) | index_high_ << 3;
            if (index_register != 4) index = registers_.general[index_register] << (sib >> 6);
            if ((sib & 7) == 5 && mod_ == 0) {
                far = true;
            } else {
                base = registers_.general[(sib & 7) | base_high_ << 3];
            }
        } else if (rm_ == 5 && mod_ == 0) {
            relative = far = true;
        } else {
            base = registers_.general[rm_ | base_high_ << 3];
        }
        const int64_t displacement = far ? next_signed<int32_t>() : mod_ == 1 ? next_signed<int8_t>() : 0;
        if (relative) base = registers_.rip + uint64_t(at_);
        out_.offset = base + uint64_t(displacement) + (rows ? 0 : index);
        out_.stride = rows ? index : 0;
    }

    const uint8_t* code_;
    const Registers& registers_;
    int at_ = 0;
    int reg_high_ = 0, index_high_ = 0, base_high_ = 0, vvvv_ = 0, prefix_ = 0, mod_ = 0, reg_ = 0, rm_ = 0;
    Instruction out_;
};

}  // namespace octavo_tiles
