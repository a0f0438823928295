package dns

import (
	"bytes"
	"hash/maphash"
)

// answerCache caches the encoded answers to the queries at one socket. A packet gets the answer of
// an earlier packet that differs only in its ID, unless the Corefile or a Service has changed
// since. It is not safe for concurrent use.
type answerCache struct {
	seed  maphash.Seed
	slots []cachedReply
}

// Limits of an answerCache. They bound its memory to half a megabyte.
const (
	answerCacheSlots = 1024
	maxCachedQuery   = 160 // bytes of a query
	maxCachedReply   = 320 // bytes of a reply
)

type cachedReply struct {
	chain  *serverChain
	block  *serverBlock
	serial uint32
	kind   uint16
	rcode  int
	packet []byte // query packet without its ID
	reply  []byte
}

func newAnswerCache() *answerCache {
	return &answerCache{seed: maphash.MakeSeed(), slots: make([]cachedReply, answerCacheSlots)}
}

func (m *answerCache) slotFor(packet []byte) *cachedReply {
	return &m.slots[maphash.Bytes(m.seed, packet)%answerCacheSlots]
}

// findReply returns the cached reply to a packet, or nil. c is the current chain, and serial the
// current serial number of the index. Replies that were computed with others are not returned.
func (m *answerCache) findReply(packet []byte, c *serverChain, serial uint32) *cachedReply {
	if len(packet) < 12 || len(packet) > maxCachedQuery {
		return nil
	}
	s := m.slotFor(packet[2:])
	if s.chain != c || s.serial != serial || !bytes.Equal(s.packet, packet[2:]) {
		return nil
	}
	return s
}

// storeReply caches the reply to a packet, if it is cacheable and small enough. c and serial are
// the chain and the serial number of the index with which the reply was computed.
func (m *answerCache) storeReply(packet, reply []byte, in *clientQuery, c *serverChain, serial uint32, rcode int) {
	if len(packet) > maxCachedQuery || len(reply) > maxCachedReply || !in.cacheable {
		return
	}
	s := m.slotFor(packet[2:])
	s.chain, s.block, s.serial, s.kind, s.rcode = c, in.block, serial, in.query.kind, rcode
	s.packet = append(s.packet[:0], packet[2:]...)
	s.reply = append(s.reply[:0], reply...)
}
