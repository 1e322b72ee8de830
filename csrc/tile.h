// The sizes of a packed mask. Includes no CUDA, no torch.
#pragma once

namespace flash_dmattn {

constexpr int kTile = 128;  // a mask tile is kTile queries by kTile keys
constexpr int kWord = 32;   // keys in a word of mask bits
constexpr int kTileWords = kTile / kWord;

}  // namespace flash_dmattn
