package dns

import (
	"context"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// Maximum sizes of DNS replies, in bytes.
const (
	maxPlainUDP = 512 // without EDNS
	// with EDNS, even if the client accepts more: larger packets may be fragmented (DNS flag day
	// 2020)
	maxUDP = 1232
	maxTCP = 65535
)

// Maximum numbers of endpoint records in an answer. More records would not fit in the reply.
const (
	maxUDPRecords = 100  // over UDP; the client can retry over TCP
	maxTCPRecords = 2000 // over TCP
)

// clientQuery is a message from a client that is being answered.
type clientQuery struct {
	msg        dns.Msg
	query      query
	size       int // maximum size of the reply
	tcp        bool
	receivedAt time.Time
	bytes      int
	block      *serverBlock
	zone       string
	cacheable  bool // the same packet gets the same reply as long as nothing changes
}

// parseQuery parses a message from a client into parsed. ok is false for packets that get no reply:
// replies, and packets without a complete header. refused is an error reply if the message cannot
// be answered.
func (c *serverChain) parseQuery(packet []byte, tcp bool, parsed *clientQuery) (refused *dns.Msg, ok bool) {
	if len(packet) < 12 || packet[2]&0x80 != 0 {
		return nil, false
	}
	parsed.tcp, parsed.bytes = tcp, len(packet)
	m := &parsed.msg
	if err := m.Unpack(packet); err != nil {
		return errorReply(packet, dns.RcodeFormatError), true
	}
	parsed.size = maxPlainUDP
	opt := m.IsEdns0()
	if opt != nil {
		parsed.size = min(max(int(opt.UDPSize()), maxPlainUDP), maxUDP)
		if opt.Version() != 0 {
			r := errorReply(packet, dns.RcodeSuccess)
			r.SetEdns0(maxUDP, false)
			r.IsEdns0().SetExtendedRcode(dns.RcodeBadVers)
			r.Rcode = dns.RcodeBadVers
			return r, true
		}
		parsed.query.do = opt.Do()
	}
	parsed.query.maxRecords = maxUDPRecords
	if tcp {
		parsed.size, parsed.query.maxRecords = maxTCP, maxTCPRecords
	}
	if m.Opcode != dns.OpcodeQuery {
		return errorReply(packet, dns.RcodeNotImplemented), true
	}
	if len(m.Question) != 1 || len(m.Answer) > 0 || len(m.Ns) > 0 {
		return errorReply(packet, dns.RcodeFormatError), true
	}
	q := m.Question[0]
	parsed.query.owner, parsed.query.kind, parsed.query.cd = q.Name, q.Qtype, m.CheckingDisabled
	parsed.query.name = lowerName(q.Name)
	if parsed.block, parsed.zone = c.findBlock(parsed.query.name); parsed.block == nil {
		return parsed.newReply(response{rcode: dns.RcodeRefused}), true
	}
	if n := parsed.block.cfg.BufferSize; n > 0 && !tcp {
		parsed.size = min(parsed.size, max(n, maxPlainUDP))
	}
	switch {
	case q.Qclass != dns.ClassINET, q.Qtype == dns.TypeAXFR, q.Qtype == dns.TypeIXFR, q.Qtype == dns.TypeOPT:
		return parsed.newReply(response{rcode: dns.RcodeRefused}), true
	case q.Qtype == dns.TypeANY: // RFC 8482: ANY queries are mainly used in amplification attacks
		return parsed.newReply(
			response{answer: []dns.RR{&dns.HINFO{Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypeHINFO,
				Class: dns.ClassINET, Ttl: 3600}, Cpu: "RFC8482"}}}), true
	}
	return nil, true
}

// errorReply returns a reply with the response code rcode to a packet. It reads only the packet's
// header.
func errorReply(packet []byte, rcode int) *dns.Msg {
	m := &dns.Msg{}
	m.Id = uint16(packet[0])<<8 | uint16(packet[1])
	m.Response, m.Rcode = true, rcode
	m.Opcode = int(packet[2]>>3) & 0xf
	m.RecursionDesired = packet[2]&1 != 0
	return m
}

// lowerName returns the name in lower case. It does not allocate if the name is already in lower
// case.
func lowerName(name string) string {
	for i := range len(name) {
		if c := name[i]; c >= 'A' && c <= 'Z' {
			return strings.ToLower(name)
		}
	}
	return name
}

// answerMessage returns the reply to a client's message. If another server must be asked, it
// instead returns a function, later, that obtains the reply.
func (c *serverChain) answerMessage(in *clientQuery) (reply *dns.Msg, later func(context.Context) *dns.Msg) {
	r, then := c.answerQuery(in.block, in.query)
	if then == nil {
		return in.newReply(r), nil
	}
	return nil, func(ctx context.Context) *dns.Msg { return in.newReply(then(ctx)) }
}

// newReply returns the reply to the client's message that contains the response r.
func (in *clientQuery) newReply(r response) *dns.Msg {
	in.cacheable = r.authoritative && len(r.answer) < 2 && in.block != nil && !in.block.cfg.Log
	m := &dns.Msg{}
	m.Id, m.Opcode, m.Response = in.msg.Id, in.msg.Opcode, true
	m.RecursionDesired, m.RecursionAvailable = in.msg.RecursionDesired, true
	m.CheckingDisabled = in.msg.CheckingDisabled
	m.Authoritative, m.Rcode = r.authoritative, r.rcode
	m.Question = in.msg.Question
	m.Answer, m.Ns, m.Extra = r.answer, r.ns, r.extra
	m.Truncated = r.truncated && !in.tcp
	if in.msg.IsEdns0() != nil {
		m.Extra = append(m.Extra[:len(m.Extra):len(m.Extra)], newOPT(in.query.do))
	}
	return m
}

func newOPT(do bool) *dns.OPT {
	o := &dns.OPT{Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeOPT}}
	o.SetUDPSize(maxUDP)
	if do {
		o.SetDo()
	}
	return o
}

// packMessage encodes a message into buf and truncates it to size. Names are compressed only if
// there are more than two records. For fewer records, compression costs more time than it saves.
func packMessage(m *dns.Msg, size int, buf []byte) ([]byte, error) {
	if len(m.Answer)+len(m.Ns)+len(m.Extra) > 2 {
		m.Compress = true
	}
	if m.Len() > size {
		cut := m.Truncated
		m.Truncate(size)
		m.Truncated = m.Truncated || cut
	}
	return m.PackBuffer(buf)
}
