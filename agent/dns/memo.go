package dns

import (
	"bytes"
	"hash/maphash"
)

// memo remembers answers of one socket as they went out. A packet that differs from one before in its id alone gets the
// same answer, as long as neither the Corefile nor any Service has changed since. Only one goroutine uses it.
type memo struct {
	seed  maphash.Seed
	slots []remembered
}

// The bounds of a memo: half a megabyte at most.
const (
	memoSlots  = 1024
	memoPacket = 160 // bytes of a question
	memoReply  = 320 // bytes of an answer
)

type remembered struct {
	chain  *chain
	block  *block
	serial uint32
	kind   uint16
	rcode  int
	packet []byte // without its id
	reply  []byte
}

func newMemo() *memo { return &memo{seed: maphash.MakeSeed(), slots: make([]remembered, memoSlots)} }

func (m *memo) slot(packet []byte) *remembered {
	return &m.slots[maphash.Bytes(m.seed, packet)%memoSlots]
}

// find returns the answer to a packet; nil when there is none that is good.
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

// put remembers an answer that was made when chain and index were those given.
func (m *memo) put(packet, reply []byte, in *incoming, c *chain, serial uint32, rcode int) {
	if len(packet) > memoPacket || len(reply) > memoReply || !in.same {
		return
	}
	s := m.slot(packet[2:])
	s.chain, s.block, s.serial, s.kind, s.rcode = c, in.block, serial, in.ask.kind, rcode
	s.packet = append(s.packet[:0], packet[2:]...)
	s.reply = append(s.reply[:0], reply...)
}
