// Package nodecidr assigns to each node its block of the pod network (spec.podCIDRs).
package nodecidr

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"net/netip"
)

// Range is a prefix of the pod network that is divided into blocks of equal size, one per node.
type Range struct {
	cluster netip.Prefix
	bits    int // prefix length of each block
}

// NewRange returns the Range that divides prefix cluster into blocks of prefix length nodeBits.
func NewRange(cluster netip.Prefix, nodeBits int) (Range, error) {
	cluster = cluster.Masked()
	switch {
	case !cluster.IsValid():
		return Range{}, fmt.Errorf("pod network %s is not valid", cluster)
	case nodeBits < cluster.Bits() || nodeBits > cluster.Addr().BitLen():
		return Range{}, fmt.Errorf("blocks of /%d do not fit into pod network %s", nodeBits, cluster)
	case nodeBits-cluster.Bits() > 24:
		return Range{}, fmt.Errorf("pod network %s has more than 16 million blocks of /%d", cluster, nodeBits)
	}
	return Range{cluster: cluster, bits: nodeBits}, nil
}

// String returns the prefix and the size of the blocks for messages.
func (r Range) String() string { return fmt.Sprintf("%s in blocks of /%d", r.cluster, r.bits) }

// Size returns the number of blocks.
func (r Range) Size() int { return 1 << (r.bits - r.cluster.Bits()) }

// Block returns the block at position i.
func (r Range) Block(i int) netip.Prefix {
	a := r.cluster.Addr().As16()
	// The position occupies the bits directly above those inside a block.
	shift := 128 - r.bits
	if r.cluster.Addr().Is4() {
		shift = 32 - r.bits
	}
	hi, lo := binary.BigEndian.Uint64(a[:8]), binary.BigEndian.Uint64(a[8:])
	addHi, addLo := shiftLeft(uint64(i), shift)
	lo, carry := bits.Add64(lo, addLo, 0)
	hi, _ = bits.Add64(hi, addHi, carry)
	binary.BigEndian.PutUint64(a[:8], hi)
	binary.BigEndian.PutUint64(a[8:], lo)
	addr := netip.AddrFrom16(a)
	if r.cluster.Addr().Is4() {
		addr = addr.Unmap()
	}
	return netip.PrefixFrom(addr, r.bits)
}

// shiftLeft returns n, shifted left by count bits, as a number of 128 bits.
func shiftLeft(n uint64, count int) (hi, lo uint64) {
	if count >= 64 {
		return n << (count - 64), 0
	}
	if count == 0 {
		return 0, n
	}
	return n >> (64 - count), n << count
}

// Next returns the first free block at or after position start; it wraps around at the end of the
// range. taken reports whether a node has the block at a position. wide are prefixes of nodes that
// span several blocks. ok is false if no block is free. Callers pass the position after the newest
// allocation, so that a freed block is reused late: routes to its previous node may still exist.
func (r Range) Next(taken func(position int) bool, wide []netip.Prefix, start int) (
	block netip.Prefix, position int, ok bool,
) {
	under := func(i int) bool {
		for _, w := range wide {
			if first, last, in := r.positionSpan(w); in && first <= i && i <= last {
				return true
			}
		}
		return false
	}
	for n := range r.Size() {
		if i := (start + n) % r.Size(); !under(i) && !taken(i) {
			return r.Block(i), i, true
		}
	}
	return netip.Prefix{}, 0, false
}

// prefixPosition returns the position of the first block that prefix p overlaps. wide reports that
// p overlaps several blocks. ok is false if p does not overlap the range.
func (r Range) prefixPosition(p netip.Prefix) (position int, wide, ok bool) {
	first, last, ok := r.positionSpan(p)
	return first, last > first, ok
}

// positionSpan returns the positions of the first and last block that prefix p overlaps. ok is
// false if p does not overlap the range.
func (r Range) positionSpan(p netip.Prefix) (first, last int, ok bool) {
	if !p.IsValid() || !p.Masked().Overlaps(r.cluster) {
		return 0, 0, false
	}
	if p.Bits() <= r.cluster.Bits() {
		return 0, r.Size() - 1, true
	}
	first = r.blockOf(p.Masked().Addr())
	if p.Bits() >= r.bits {
		return first, first, true
	}
	return first, first + 1<<(r.bits-p.Bits()) - 1, true
}

// blockOf returns the position of the block that contains address a.
func (r Range) blockOf(a netip.Addr) int {
	b, c := a.As16(), r.cluster.Addr().As16()
	hi, lo := binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])
	chi, clo := binary.BigEndian.Uint64(c[:8]), binary.BigEndian.Uint64(c[8:])
	lo, borrow := bits.Sub64(lo, clo, 0)
	hi, _ = bits.Sub64(hi, chi, borrow)
	shift := a.BitLen() - r.bits
	if shift >= 64 {
		return int(hi >> (shift - 64))
	}
	return int(hi<<(64-shift) | lo>>shift)
}
