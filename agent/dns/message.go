package dns

import (
	"context"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// The maximum sizes of replies, in bytes.
const (
	plainUDP = 512  // without EDNS
	mostUDP  = 1232 // with EDNS, even if the client accepts more: larger packets may be fragmented (DNS flag day 2020)
	mostTCP  = 65535
)

// The maximum number of endpoint records in an answer. More records would not fit.
const (
	fewRecords  = 100  // over UDP; the client can retry over TCP
	manyRecords = 2000 // over TCP
)

// incoming is a message of a client that is being answered.
type incoming struct {
	msg   dns.Msg
	ask   ask
	size  int // maximum size of the reply
	tcp   bool
	began time.Time
	bytes int
	block *block
	zone  string
	same  bool // the same packet gets the same reply as long as nothing changes
}

// read parses a message. ok is false for packets that get no reply: replies, and packets without a
// complete header. refused is a reply for a message that is not answered otherwise.
func (c *chain) read(packet []byte, tcp bool, in *incoming) (refused *dns.Msg, ok bool) {
	if len(packet) < 12 || packet[2]&0x80 != 0 {
		return nil, false
	}
	in.tcp, in.bytes = tcp, len(packet)
	m := &in.msg
	if err := m.Unpack(packet); err != nil {
		return refusal(packet, dns.RcodeFormatError), true
	}
	in.size = plainUDP
	opt := m.IsEdns0()
	if opt != nil {
		in.size = min(max(int(opt.UDPSize()), plainUDP), mostUDP)
		if opt.Version() != 0 {
			r := refusal(packet, dns.RcodeSuccess)
			r.SetEdns0(mostUDP, false)
			r.IsEdns0().SetExtendedRcode(dns.RcodeBadVers)
			r.Rcode = dns.RcodeBadVers
			return r, true
		}
		in.ask.do = opt.Do()
	}
	in.ask.most = fewRecords
	if tcp {
		in.size, in.ask.most = mostTCP, manyRecords
	}
	if m.Opcode != dns.OpcodeQuery {
		return refusal(packet, dns.RcodeNotImplemented), true
	}
	if len(m.Question) != 1 || len(m.Answer) > 0 || len(m.Ns) > 0 {
		return refusal(packet, dns.RcodeFormatError), true
	}
	q := m.Question[0]
	in.ask.owner, in.ask.kind, in.ask.cd = q.Name, q.Qtype, m.CheckingDisabled
	in.ask.name = lower(q.Name)
	if in.block, in.zone = c.find(in.ask.name); in.block == nil {
		return in.reply(result{rcode: dns.RcodeRefused}), true
	}
	if n := in.block.cfg.BufferSize; n > 0 && !tcp {
		in.size = min(in.size, max(n, plainUDP))
	}
	switch {
	case q.Qclass != dns.ClassINET, q.Qtype == dns.TypeAXFR, q.Qtype == dns.TypeIXFR, q.Qtype == dns.TypeOPT:
		return in.reply(result{rcode: dns.RcodeRefused}), true
	case q.Qtype == dns.TypeANY: // RFC 8482: ANY queries are mainly used in amplification attacks
		return in.reply(result{answer: []dns.RR{&dns.HINFO{Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypeHINFO, Class: dns.ClassINET, Ttl: 3600}, Cpu: "RFC8482"}}}), true
	}
	return nil, true
}

// refusal returns an error reply to a packet, using only its header.
func refusal(packet []byte, rcode int) *dns.Msg {
	m := &dns.Msg{}
	m.Id = uint16(packet[0])<<8 | uint16(packet[1])
	m.Response, m.Rcode = true, rcode
	m.Opcode = int(packet[2]>>3) & 0xf
	m.RecursionDesired = packet[2]&1 != 0
	return m
}

// lower returns the name in lower case. It does not allocate if the name already is.
func lower(name string) string {
	for i := range len(name) {
		if c := name[i]; c >= 'A' && c <= 'Z' {
			return strings.ToLower(name)
		}
	}
	return name
}

// reply returns the reply to a message, or a function that obtains the reply, which takes time.
func (c *chain) reply(in *incoming) (reply *dns.Msg, later func(context.Context) *dns.Msg) {
	r, then := c.answer(in.block, in.ask)
	if then == nil {
		return in.reply(r), nil
	}
	return nil, func(ctx context.Context) *dns.Msg { return in.reply(then(ctx)) }
}

// reply places a response in a reply to the client's message.
func (in *incoming) reply(r result) *dns.Msg {
	in.same = r.authoritative && len(r.answer) < 2 && in.block != nil && !in.block.cfg.Log
	m := &dns.Msg{}
	m.Id, m.Opcode, m.Response = in.msg.Id, in.msg.Opcode, true
	m.RecursionDesired, m.RecursionAvailable = in.msg.RecursionDesired, true
	m.CheckingDisabled = in.msg.CheckingDisabled
	m.Authoritative, m.Rcode = r.authoritative, r.rcode
	m.Question = in.msg.Question
	m.Answer, m.Ns, m.Extra = r.answer, r.ns, r.extra
	m.Truncated = r.cut && !in.tcp
	if in.msg.IsEdns0() != nil {
		m.Extra = append(m.Extra[:len(m.Extra):len(m.Extra)], edns(in.ask.do))
	}
	return m
}

func edns(do bool) *dns.OPT {
	o := &dns.OPT{Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeOPT}}
	o.SetUDPSize(mostUDP)
	if do {
		o.SetDo()
	}
	return o
}

// pack packs a message into buf and truncates it to size. Names are compressed only if there are
// more than two records; for fewer, compression costs more time than it saves.
func pack(m *dns.Msg, size int, buf []byte) ([]byte, error) {
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
