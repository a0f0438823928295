package connlimit

import (
	"errors"
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
)

// testLimiter is a door on a loopback address and those who come to it from addresses of their own.
type testLimiter struct {
	t *testing.T
	*Limiter
	serverConns map[net.Conn]net.Conn // by the other end
}

func newTestLimiter(t *testing.T, l Limits) *testLimiter {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d := New(ln, l)
	t.Cleanup(func() { d.Close() })
	return &testLimiter{t, d, map[net.Conn]net.Conn{}}
}

// connect connects from 127.0.0.N; age is since when the connection is taken to be there.
func (b *testLimiter) connect(n int, age time.Duration) (theirs net.Conn, ours *Conn) {
	b.t.Helper()
	dial := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(n))}}
	theirs, err := dial.Dial("tcp", b.Addr().String())
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { theirs.Close() })
	inner, err := b.Listener.Accept()
	if err != nil {
		b.t.Fatal(err)
	}
	b.serverConns[theirs] = inner
	c := &Conn{Conn: inner, limiter: b.Limiter, source: sourcePrefix(inner.RemoteAddr()), since: time.Now().Add(-age)}
	b.t.Cleanup(func() { c.Close() })
	out, ok := b.admitConn(c)
	for _, o := range out {
		o.Close()
	}
	if !ok {
		inner.Close()
		return theirs, nil
	}
	return theirs, c
}

// isOpen says whether the door has left its end of a connection open. The other end hears of it a moment later, and no read
// with a deadline tells for sure: the deadline may be over before the read has begun.
func (b *testLimiter) isOpen(theirs net.Conn) bool {
	b.t.Helper()
	c := b.serverConns[theirs]
	return c != nil && c.SetDeadline(time.Time{}) == nil
}

// A source that comes too often loses its own oldest connections, and nobody else's.
func TestStrangersOfOneSource(t *testing.T) {
	b := newTestLimiter(t, Limits{Total: 100, Unauthenticated: 20, UnauthenticatedPerSource: 4})
	other, _ := b.connect(9, time.Hour)
	var mine []net.Conn
	for range 10 {
		c, ours := b.connect(2, time.Minute)
		if ours == nil {
			// Old ones make way, so that a user behind the same address gets in.
			t.Fatal("refused, though there were old strangers")
		}
		mine = append(mine, c)
	}
	for i, c := range mine {
		if want := i >= 6; b.isOpen(c) != want {
			t.Errorf("connection %d of the source is open: %v", i, !want)
		}
	}
	if !b.isOpen(other) {
		t.Error("the connection of another source was closed")
	}
	if all, strangers := b.Len(); all != 5 || strangers != 5 || b.Shed() != 6 {
		t.Errorf("%d connections, %d strangers, %d shed", all, strangers, b.Shed())
	}
}

// Those that have just come are not driven out by others of their source.
func TestYoungStrangersStay(t *testing.T) {
	b := newTestLimiter(t, Limits{Total: 100, Unauthenticated: 20, UnauthenticatedPerSource: 4})
	for range 4 {
		b.connect(2, 0)
	}
	if _, ours := b.connect(2, 0); ours != nil {
		t.Error("a fifth was taken")
	}
	if all, _ := b.Len(); all != 4 {
		t.Errorf("%d connections", all)
	}
}

// When there are too many strangers in all, the source with the most of them gives way.
func TestStrangersOfManySources(t *testing.T) {
	b := newTestLimiter(t, Limits{Total: 100, Unauthenticated: 8, UnauthenticatedPerSource: 6})
	_, friend := b.connect(5, time.Hour)
	friend.MarkAuthenticated()
	var first net.Conn
	for i := range 5 {
		c, _ := b.connect(2, time.Hour-time.Duration(i)*time.Minute)
		if i == 0 {
			first = c
		}
	}
	for range 3 {
		b.connect(3, 0)
	}
	late, ours := b.connect(4, 0)
	if ours == nil || !b.isOpen(late) {
		t.Fatal("a source of its own is not taken in")
	}
	if b.isOpen(first) {
		t.Error("the oldest of the largest source is still there")
	}
	if all, strangers := b.Len(); all != 9 || strangers != 8 {
		t.Errorf("%d connections, %d strangers", all, strangers)
	}
}

// A crowd in which each comes from a place of its own is let in one after the other.
func TestCrowdOfSources(t *testing.T) {
	b := newTestLimiter(t, Limits{Total: 100, Unauthenticated: 4, UnauthenticatedPerSource: 2})
	var first *Conn
	for n := range 4 {
		_, c := b.connect(2+n, 0)
		if n == 0 {
			first = c
		}
	}
	if _, late := b.connect(9, 0); late != nil {
		t.Error("one who has just come was sent away for another")
	}
	first.MarkAuthenticated()
	if _, late := b.connect(9, 0); late == nil {
		t.Error("there is room now")
	}
}

// Full of connections that are known, a door has room for another source, as long as one has more than its share.
func TestFullOfKnown(t *testing.T) {
	b := newTestLimiter(t, Limits{Total: 10, PerSource: 10, Unauthenticated: 8, UnauthenticatedPerSource: 8})
	var newest net.Conn
	for range 10 {
		c, ours := b.connect(2, 0)
		ours.MarkAuthenticated()
		ours.MarkAuthenticated()
		newest = c
	}
	if _, ours := b.connect(2, 0); ours != nil {
		t.Error("the source that has everything got more")
	}
	if _, ours := b.connect(3, 0); ours == nil {
		t.Error("another source was refused")
	}
	if b.isOpen(newest) {
		t.Error("nobody made way for it")
	}
}

// What has left is forgotten, whoever closed it, and closing twice counts once.
func TestForgets(t *testing.T) {
	b := newTestLimiter(t, Limits{})
	for i := range 20 {
		_, c := b.connect(2+i%3, 0)
		if i%2 == 0 {
			c.MarkAuthenticated()
		}
		c.Close()
		c.Close()
		c.MarkAuthenticated()
	}
	if all, strangers := b.Len(); all != 0 || strangers != 0 || len(b.sources) != 0 {
		t.Errorf("%d connections, %d strangers, %d sources", all, strangers, len(b.sources))
	}
}

// A reader that does not read fails the write after a Stall; one that reads slowly gets everything. In virtual time, over a
// pipe, which takes nothing that is not read.
func TestStall(t *testing.T) {
	const stall = 200 * time.Millisecond
	virtual.Test(t, func(t *testing.T) {
		d := New(nil, Limits{WriteTimeout: stall})
		pair := func() (theirs net.Conn, ours *Conn) {
			theirs, inner := net.Pipe()
			t.Cleanup(func() { theirs.Close(); inner.Close() })
			return theirs, &Conn{Conn: inner, limiter: d}
		}
		_, deaf := pair()
		began := time.Now()
		if _, err := deaf.Write(make([]byte, 2*writeChunk)); !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(began) != stall {
			t.Errorf("writing to one that does not read: %v after %v", err, time.Since(began))
		}
		theirs, slow := pair()
		const much = 20 * writeChunk
		read := make(chan int)
		go func() {
			n := 0
			for buf := make([]byte, writeChunk); n < much; {
				time.Sleep(stall * 3 / 4)
				m, err := theirs.Read(buf)
				if n += m; err != nil {
					break
				}
			}
			read <- n
		}()
		if err := slow.SetWriteDeadline(time.Time{}); err != nil {
			t.Fatal(err)
		}
		if n, err := slow.Write(make([]byte, much)); n != much || err != nil {
			t.Errorf("writing to one that reads: %d %v", n, err)
			theirs.Close()
		}
		if n := <-read; n != much {
			t.Errorf("%d bytes arrived", n)
		}
		// The user's own deadline counts when it is earlier.
		if err := slow.SetDeadline(time.Now().Add(-time.Second)); err != nil {
			t.Fatal(err)
		}
		if _, err := slow.Write([]byte("x")); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("after the user's deadline: %v", err)
		}
	})
}

// How many strangers there may be follows the memory there is.
func TestStrangersFollowMemory(t *testing.T) {
	for limit, want := range map[int64]int{0: 128, 256 << 20: 128, 2 << 30: 1024, 1 << 40: 4096} {
		n := UnauthenticatedLimit(limit)
		if n != want || limit > 256<<20 && int64(n)*unauthenticatedConnMemory > limit/16 {
			t.Errorf("of %d bytes: %d strangers, want %d", limit, n, want)
		}
	}
	for strangers, want := range map[int]int{16: 16, 128: 32, 1024: 256} {
		if got := (Limits{Total: 1 << 16, Unauthenticated: strangers}).fillDefaults().UnauthenticatedPerSource; got != want {
			t.Errorf("of %d strangers %d may be of one source, want %d", strangers, got, want)
		}
	}
}

func TestSource(t *testing.T) {
	for in, want := range map[string]string{
		"192.0.2.1:80": "192.0.2.1/32", "[::ffff:192.0.2.1]:80": "192.0.2.1/32",
		"[2001:db8:1:2:3:4:5:6]:80": "2001:db8:1:2::/64", "[fe80::1%eth0]:80": "fe80::/64", "pipe": "invalid Prefix",
	} {
		if got := sourcePrefix(stringAddr(in)); fmt.Sprint(got) != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}

type stringAddr string

func (n stringAddr) Network() string { return "" }
func (n stringAddr) String() string  { return string(n) }
