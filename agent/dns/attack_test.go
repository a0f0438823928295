package dns

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"keelson.dev/keelson/agent/fake"
)

func (r *rig) stillServes() {
	r.Helper()
	r.expect("web.default.svc.cluster.local.", dns.TypeA, "NOERROR, web.default.svc.cluster.local. A 10.96.0.7")
}

// Clients that send invalid messages, that hold connections, or that come from other hosts do not
// prevent others from being answered.
func TestHostileClients(t *testing.T) {
	r := start(t)
	udp, err := net.Dial("udp", r.at)
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	for _, p := range [][]byte{{}, {1}, make([]byte, 11), make([]byte, 12), make([]byte, 60000),
		[]byte(strings.Repeat("\xc0\x0c", 300)), []byte(strings.Repeat("\xff", 512))} {
		_, _ = udp.Write(p)
	}
	answer := make([]byte, 12)
	answer[2] = 0x80 // a reply is not answered; otherwise two servers would exchange messages forever
	if _, err := udp.Write(answer); err != nil {
		t.Fatal(err)
	}
	r.stillServes()

	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	for i := range 2 * maxConnections {
		c, err := net.Dial("tcp", r.at)
		if err != nil {
			break
		}
		conns = append(conns, c)
		switch i % 3 {
		case 0: // starts a query and does not continue
			_, _ = c.Write([]byte{0, 40, 1})
		case 1: // announces a length above the maximum
			_, _ = c.Write([]byte{0xff, 0xff, 0})
		}
	}
	r.stillServes()
	r.until(func() error {
		if got, err := r.try("tcp", "web.default.svc.cluster.local.", dns.TypeA); err != nil ||
			got.Rcode != dns.RcodeSuccess {
			return fmt.Errorf("over TCP beside %d that wait: %v %v", len(conns), got, err)
		}
		return nil
	})
}

// A client that the server does not serve gets no answer, so that it cannot be used for
// amplification.
func TestStrangers(t *testing.T) {
	objects := fake.NewCluster()
	s := New(Config{Local: LinkLocal})
	c := s.permittedClients(objects)
	for a, want := range map[string]bool{"10.88.3.4": true, "127.0.0.1": true, "::1": true, "192.0.2.1": false,
		"10.99.0.1": false, "2001:db8::1": false} {
		if got := c.isAllowed(netip.MustParseAddr(a)); got != want {
			t.Errorf("%s: %v", a, got)
		}
	}
	s = New(Config{ForeignNetwork: func() bool { return true }})
	if c := s.permittedClients(objects); !c.isAllowed(netip.MustParseAddr("10.99.0.1")) ||
		c.isAllowed(netip.MustParseAddr("192.0.2.1")) {
		t.Error("with a network product, its pods' addresses are served, and public ones are not")
	}
}

// An upstream server may send wrong answers, be slow, or not exist.
func TestHostileUpstreams(t *testing.T) {
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer pc.Close()
	go lie(pc)
	r := start(t, coreDNS(fmt.Sprintf(".:53 {\n kubernetes cluster.local\n forward . %s\n cache 30\n}\n",
		pc.LocalAddr()), nil))
	if got := r.ask("udp", "www.example.", dns.TypeA); got != "NOERROR, www.example. A 192.0.2.1" {
		t.Errorf("among forged answers: %s", got)
	}
	if got := r.ask("udp", "silent.example.", dns.TypeA); got != "SERVFAIL" {
		t.Errorf("of one that is silent: %s", got)
	}
	r.stillServes()
}

// lie first sends packets with another ID, another question and garbage, and then more records than
// were requested.
func lie(pc net.PacketConn) {
	buf := make([]byte, 4096)
	for {
		n, from, err := pc.ReadFrom(buf)
		if err != nil {
			return
		}
		q := &dns.Msg{}
		if q.Unpack(buf[:n]) != nil || q.Question[0].Name == "silent.example." {
			continue
		}
		send := func(change func(*dns.Msg)) {
			m := &dns.Msg{}
			m.SetReply(q)
			a, _ := dns.NewRR(q.Question[0].Name + " 60 IN A 203.0.113.66")
			m.Answer = []dns.RR{a}
			change(m)
			if b, err := m.Pack(); err == nil {
				_, _ = pc.WriteTo(b, from)
			}
		}
		send(func(m *dns.Msg) { m.Id++ })
		send(func(m *dns.Msg) { m.Question[0].Name = "bank.example." })
		send(func(m *dns.Msg) { m.Response = false })
		_, _ = pc.WriteTo([]byte{buf[0], buf[1], 0x80, 0, 0, 1}, from)
		send(func(m *dns.Msg) {
			good, _ := dns.NewRR("www.example. 60 IN A 192.0.2.1")
			bank, _ := dns.NewRR("bank.example. 60 IN A 203.0.113.66")
			m.Answer, m.Extra, m.Ns = []dns.RR{good, bank}, []dns.RR{bank}, []dns.RR{bank}
		})
	}
}

// The number of waiting queries is limited per client and in total; other queries are answered in
// the meantime.
func TestWaitingIsBounded(t *testing.T) {
	w := waitLimiter{perClient: map[netip.Addr]int{}}
	a, b := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	n := 0
	for w.acquireSlot(a) {
		n++
	}
	if n != maxWaitingEach || !w.acquireSlot(b) {
		t.Errorf("one client has %d on their way", n)
	}
	for range n {
		w.releaseSlot(a)
	}
	w.releaseSlot(b)
	if w.all != 0 || len(w.perClient) != 0 {
		t.Errorf("%d are left", w.all)
	}
}

// askedOnce is the time during which an upstream server is queried only once; it is queried again
// after two seconds.
const askedOnce = 1900 * time.Millisecond

// Identical concurrent queries are one upstream query, and queries for nonexistent names do not
// fill the memory.
func TestSameQuestionsAreOne(t *testing.T) {
	for !sameQuestionsAreOne(t) && !t.Failed() {
	}
}

// sameQuestionsAreOne returns false if the machine was so slow that the upstream query timed out
// before all clients had sent theirs.
func sameQuestionsAreOne(t *testing.T) bool {
	var asked atomic.Int64
	release := make(chan struct{})
	up := upstream(t, func(w dns.ResponseWriter, q *dns.Msg) {
		asked.Add(1)
		<-release
		m := &dns.Msg{}
		m.SetReply(q)
		m.Answer = records(t, "www.example. 60 IN A 192.0.2.1")
		_ = w.WriteMsg(m)
	})
	r := start(t, coreDNS(fmt.Sprintf(".:53 {\n kubernetes cluster.local\n forward . %s\n cache 30\n}\n", up), nil))
	done := make(chan string, 50)
	began := time.Now()
	late := func() bool { return time.Since(began) > askedOnce }
	for range cap(done) {
		go func() {
			m, err := r.try("udp", "www.example.", dns.TypeA)
			if err != nil {
				done <- err.Error()
				return
			}
			done <- short(m)
		}()
	}
	r.until(func() error {
		if r.s.waitingQueries() != cap(done) && !late() {
			return fmt.Errorf("%d wait", r.s.waitingQueries())
		}
		return nil
	})
	close(release)
	var answers []string
	for range cap(done) {
		answers = append(answers, <-done)
	}
	if late() {
		return false
	}
	for _, got := range answers {
		if got != "NOERROR, www.example. A 192.0.2.1" {
			t.Error(got)
		}
	}
	if asked.Load() != 1 {
		t.Errorf("%d questions reached the other server", asked.Load())
	}
	return true
}

// All queries of a connection are answered, one after the other.
func TestPipelined(t *testing.T) {
	r := start(t)
	c, err := net.Dial("tcp", r.at)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	m := &dns.Msg{}
	m.SetQuestion("web.default.svc.cluster.local.", dns.TypeA)
	p, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	one := append(binary.BigEndian.AppendUint16(nil, uint16(len(p))), p...)
	if _, err := c.Write([]byte(strings.Repeat(string(one), 20))); err != nil {
		t.Fatal(err)
	}
	for i := range 20 {
		var size [2]byte
		if _, err := io.ReadFull(c, size[:]); err != nil {
			t.Fatalf("answer %d: %v", i, err)
		}
		if _, err := io.CopyN(io.Discard, c, int64(binary.BigEndian.Uint16(size[:]))); err != nil {
			t.Fatal(err)
		}
	}
}

// No packet causes a panic.
func FuzzPacket(f *testing.F) {
	m := &dns.Msg{}
	m.SetQuestion("web.default.svc.cluster.local.", dns.TypeA)
	m.SetEdns0(4096, true)
	p, err := m.Pack()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(p)
	f.Add(p[:20])
	s := New(Config{StateDir: f.TempDir(), Addresses: []netip.Addr{}})
	objects := fake.NewCluster()
	objects.Put(service("default", "web", "10.96.0.7"))
	s.index.Sync(objects.Services(), nil)
	s.configure(objects, objects)
	f.Fuzz(func(t *testing.T, p []byte) {
		in := &clientQuery{receivedAt: time.Now()}
		reply, later := s.handleMessage(s.chain.Load(), p, false, in)
		if s.panics.Load() > 0 {
			t.Fatalf("%x made a fault", p)
		}
		if later != nil || reply == nil {
			return
		}
		if out := s.packAndCount(in, reply, netip.MustParseAddr("127.0.0.1"), nil); len(out) > maxUDP {
			t.Errorf("%x: an answer of %d bytes", p, len(out))
		}
	})
}
