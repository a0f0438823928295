// Package forward queries other DNS servers over UDP, TCP or TLS, and caches their answers. It
// validates answers, and limits time, concurrency and memory.
package forward

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// Limits of one exchange with an upstream server.
const (
	tryTimeout      = 2 * time.Second // timeout of one attempt
	udpSize         = 1232            // maximum size of a UDP answer, in bytes
	maxStrayPackets = 64              // packets that do not answer the query; after this number, the attempt fails
	maxRecords      = 2048            // records that are processed of one answer
)

// Target is one upstream server and the way to reach it.
type Target struct {
	Address netip.AddrPort
	TLS     *tls.Config // nil = no TLS
}

func (t Target) String() string {
	if t.TLS != nil {
		return "tls://" + t.Address.String()
	}
	return t.Address.String()
}

// errNoAnswer is returned if a server sent only packets that do not answer the query.
var errNoAnswer = errors.New("received only packets that do not answer the query")

// Question is a question that is sent to upstream servers.
type Question struct {
	Name   string // in lower case, fully qualified
	Type   uint16
	DNSSEC bool // request DNSSEC records
	CD     bool // checking disabled: the client validates signatures itself
}

// newMessage returns a query message for the question, with an unpredictable ID.
func (q Question) newMessage() (*dns.Msg, error) {
	var id [2]byte
	if _, err := rand.Read(id[:]); err != nil {
		return nil, fmt.Errorf("creating the ID of a query: %w", err)
	}
	m := &dns.Msg{}
	m.SetQuestion(q.Name, q.Type)
	m.Id = binary.BigEndian.Uint16(id[:])
	m.CheckingDisabled = q.CD
	m.SetEdns0(udpSize, q.DNSSEC)
	return m, nil
}

// isAnswerTo reports whether the message m answers query.
func isAnswerTo(m, query *dns.Msg) bool {
	if m.Id != query.Id || !m.Response || m.Opcode != dns.OpcodeQuery {
		return false
	}
	if len(m.Question) == 0 { // servers omit the question in some error responses
		return m.Rcode == dns.RcodeFormatError || m.Rcode == dns.RcodeServerFailure || m.Rcode == dns.RcodeRefused ||
			m.Rcode == dns.RcodeNotImplemented
	}
	a, b := m.Question[0], query.Question[0]
	return len(m.Question) == 1 && a.Qtype == b.Qtype && a.Qclass == b.Qclass && strings.EqualFold(a.Name, b.Name)
}

// exchangeOnce sends one query to a server, over UDP or TCP, and returns the answer. If a UDP
// answer is truncated, it repeats the query over TCP.
func exchangeOnce(ctx context.Context, t Target, q Question, tcp bool) (*dns.Msg, error) {
	asked, err := q.newMessage()
	if err != nil {
		return nil, err
	}
	packed, err := asked.Pack()
	if err != nil {
		return nil, fmt.Errorf("question for %q: %w", q.Name, err)
	}
	ctx, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel()
	if t.TLS == nil && !tcp {
		m, err := overUDP(ctx, t, asked, packed)
		if err != nil || !m.Truncated {
			return m, err
		}
	}
	return overTCP(ctx, t, asked, packed)
}

// dialTarget connects to an upstream server for one query, with the deadline of ctx.
func dialTarget(ctx context.Context, network string, t Target) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, t.Address.String())
	if err != nil {
		return nil, err
	}
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// overUDP sends a query to a server over UDP and returns the answer. packed is the encoded query.
// Each query uses a new socket and thus a random port. The socket is connected, so that it receives
// only packets from the server.
func overUDP(ctx context.Context, t Target, query *dns.Msg, packed []byte) (*dns.Msg, error) {
	conn, err := dialTarget(ctx, "udp", t)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if _, err := conn.Write(packed); err != nil {
		return nil, err
	}
	buf := make([]byte, udpSize+1)
	for range maxStrayPackets {
		n, err := conn.Read(buf)
		if err != nil {
			return nil, err
		}
		m := &dns.Msg{}
		if n > udpSize || n < 12 || binary.BigEndian.Uint16(buf) != query.Id {
			continue
		}
		if err := m.Unpack(buf[:n]); err != nil {
			if !m.Truncated { // a truncated message may end anywhere
				continue
			}
		}
		if isAnswerTo(m, query) {
			return m, nil
		}
	}
	return nil, errNoAnswer
}

func overTCP(ctx context.Context, t Target, asked *dns.Msg, packed []byte) (*dns.Msg, error) {
	conn, err := dialTarget(ctx, "tcp", t)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if t.TLS != nil {
		conn = tls.Client(conn, t.TLS)
	}
	if _, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(packed))), packed...)); err != nil {
		return nil, err
	}
	var size [2]byte
	if _, err := io.ReadFull(conn, size[:]); err != nil {
		return nil, err
	}
	buf := make([]byte, binary.BigEndian.Uint16(size[:]))
	if _, err := io.ReadFull(conn, buf); err != nil {
		return nil, err
	}
	m := &dns.Msg{}
	if err := m.Unpack(buf); err != nil {
		return nil, err
	}
	if !isAnswerTo(m, asked) {
		return nil, errNoAnswer
	}
	m.Truncated = false
	return m, nil
}

// RemoveUnrelated removes the records of m that do not belong to the question. It keeps the records
// of the question's name, and of the names to which CNAME records lead from it. A client must not
// accept records that it did not request.
func RemoveUnrelated(m *dns.Msg, q Question) {
	wanted := map[string]struct{}{q.Name: {}}
	if len(m.Answer) > maxRecords {
		m.Answer = m.Answer[:maxRecords]
	}
	// An alias may follow its target in the message, so repeat until no more names are found.
	for before := 0; before != len(wanted); {
		before = len(wanted)
		for _, rr := range m.Answer {
			h := rr.Header()
			owner := strings.ToLower(h.Name)
			switch rr := rr.(type) {
			case *dns.CNAME:
				if _, ok := wanted[owner]; ok {
					wanted[strings.ToLower(rr.Target)] = struct{}{}
				}
			case *dns.DNAME:
				for name := range wanted {
					if name != owner && dns.IsSubDomain(owner, name) {
						wanted[owner] = struct{}{}
					}
				}
			}
		}
		if before > 32 {
			break
		}
	}
	m.Answer = slices.DeleteFunc(m.Answer, func(rr dns.RR) bool {
		_, ok := wanted[strings.ToLower(rr.Header().Name)]
		return !ok || rr.Header().Class != dns.ClassINET
	})
	if len(m.Ns) > maxRecords {
		m.Ns = m.Ns[:maxRecords]
	}
	m.Ns = slices.DeleteFunc(m.Ns, func(rr dns.RR) bool {
		switch rr.Header().Rrtype {
		case dns.TypeSOA, dns.TypeNS:
			for name := range wanted {
				if dns.IsSubDomain(rr.Header().Name, name) {
					return false
				}
			}
			return true
		case dns.TypeNSEC, dns.TypeNSEC3, dns.TypeRRSIG, dns.TypeDS:
			return !q.DNSSEC
		}
		return true
	})
	m.Extra = nil
}
