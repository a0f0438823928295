package dns

import (
	"bytes"
	"hash/maphash"
)

// memo caches the packed answers of one socket. A packet that differs from an earlier one only in
// its ID gets the same answer, as long as neither the Corefile nor a Service has changed. It is not
// safe for concurrent use.
type memo struct {
	seed  maphash.Seed
	slots []remembered
}

// The limits of an memo: at most half a megabyte.
const (
	memoSlots  = 1024
	memoPacket = 160 // bytes of a query
	memoReply  = 320 // bytes of a reply
)

type remembered struct {
	chain  *chain
	block  *block
	serial uint32
	kind   uint16
	rcode  int
	packet []byte // without the ID
	reply  []byte
}

func newMemo() *memo { return &memo{seed: maphash.MakeSeed(), slots: make([]remembered, memoSlots)} }

func (m *memo) slot(packet []byte) *remembered {
	return &m.slots[maphash.Bytes(m.seed, packet)%memoSlots]
}

// find returns the cached reply to a packet, or nil if there is none that is valid.
func (m *memo) find(packet []byte, c *chain, serial uint32) *remembered {
	if len(packet) < 12 || len(packet) > memoPacket {
		return nil
	}
	s := m.slot(packet[2:])
	if s.chain != c || s.serial != serial || !bytes.Equal(s.packet, packet[2:]) {
		return nil
	}
	return s
}

// put caches a reply that was computed with the given chain and index serial.
func (m *memo) put(packet, reply []byte, in *incoming, c *chain, serial uint32, rcode int) {
	if len(packet) > memoPacket || len(reply) > memoReply || !in.same {
		return
	}
	s := m.slot(packet[2:])
	s.chain, s.block, s.serial, s.kind, s.rcode = c, in.block, serial, in.ask.kind, rcode
	s.packet = append(s.packet[:0], packet[2:]...)
	s.reply = append(s.reply[:0], reply...)
}
