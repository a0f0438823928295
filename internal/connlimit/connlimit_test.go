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

// testLimiter is a limiter on a loopback address, with clients that connect from different
// addresses.
type testLimiter struct {
	t *testing.T
	*Limiter
	serverConns map[net.Conn]net.Conn // the server's end of a connection, by the client's end
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

// connect connects from 127.0.0.N. The connection counts as accepted age ago.
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

// isOpen reports whether the limiter has left the server's end of a connection open. The client's
// end cannot be checked: it observes the close later, and a read deadline may expire before the
// read starts.
func (b *testLimiter) isOpen(theirs net.Conn) bool {
	b.t.Helper()
	c := b.serverConns[theirs]
	return c != nil && c.SetDeadline(time.Time{}) == nil
}

// A source with too many connections loses its own oldest connections and no connection of others.
func TestStrangersOfOneSource(t *testing.T) {
	b := newTestLimiter(t, Limits{Total: 100, Unauthenticated: 20, UnauthenticatedPerSource: 4})
	other, _ := b.connect(9, time.Hour)
	var mine []net.Conn
	for range 10 {
		c, ours := b.connect(2, time.Minute)
		if ours == nil {
			// Old connections are closed, so that a user behind the same address can connect.
			t.Fatal("refused, although old unauthenticated connections could be closed")
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
		t.Errorf("%d connections, %d unauthenticated, %d shed", all, strangers, b.Shed())
	}
}

// New connections are not closed in favor of other connections of their source.
func TestYoungStrangersStay(t *testing.T) {
	b := newTestLimiter(t, Limits{Total: 100, Unauthenticated: 20, UnauthenticatedPerSource: 4})
	for range 4 {
		b.connect(2, 0)
	}
	if _, ours := b.connect(2, 0); ours != nil {
		t.Error("a fifth connection was accepted")
	}
	if all, _ := b.Len(); all != 4 {
		t.Errorf("%d connections", all)
	}
}

// Above the total limit, the source with the most unauthenticated connections loses its oldest one.
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
		t.Fatal("a connection from a new source was refused")
	}
	if b.isOpen(first) {
		t.Error("the oldest connection of the largest source is still open")
	}
	if all, strangers := b.Len(); all != 9 || strangers != 8 {
		t.Errorf("%d connections, %d strangers", all, strangers)
	}
}

// Many sources with one connection each are accepted one after the other.
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
		t.Error("a new connection was closed for another one")
	}
	first.MarkAuthenticated()
	if _, late := b.connect(9, 0); late == nil {
		t.Error("a connection was refused although the limit allows it")
	}
}

// A limiter that is full of authenticated connections accepts a new source by closing a connection
// of a source that has more than its share.
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
		t.Error("the source that has every connection got one more")
	}
	if _, ours := b.connect(3, 0); ours == nil {
		t.Error("another source was refused")
	}
	if b.isOpen(newest) {
		t.Error("no connection was closed for the new source")
	}
}

// Closed connections are no longer counted, whichever end closed them. Closing twice counts once.
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
		t.Errorf("%d connections, %d unauthenticated, %d sources", all, strangers, len(b.sources))
	}
}

// A write to a peer that does not read fails after WriteTimeout; a slow reader receives everything.
// The test runs in virtual time over a pipe, which buffers nothing.
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
		if _, err := deaf.Write(make([]byte, 2*writeChunk)); !errors.Is(err, os.ErrDeadlineExceeded) ||
			time.Since(began) != stall {
			t.Errorf("writing to a peer that does not read: %v after %v", err, time.Since(began))
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
			t.Errorf("writing to a peer that reads: %d %v", n, err)
			theirs.Close()
		}
		if n := <-read; n != much {
			t.Errorf("%d bytes arrived", n)
		}
		// The user's own deadline applies if it is earlier.
		if err := slow.SetDeadline(time.Now().Add(-time.Second)); err != nil {
			t.Fatal(err)
		}
		if _, err := slow.Write([]byte("x")); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("after the user's deadline: %v", err)
		}
	})
}

// The limit of unauthenticated connections depends on the memory limit.
func TestStrangersFollowMemory(t *testing.T) {
	for limit, want := range map[int64]int{0: 128, 256 << 20: 128, 2 << 30: 1024, 1 << 40: 4096} {
		n := UnauthenticatedLimit(limit)
		if n != want || limit > 256<<20 && int64(n)*unauthenticatedConnMemory > limit/16 {
			t.Errorf("with %d bytes: %d unauthenticated connections, want %d", limit, n, want)
		}
	}
	for strangers, want := range map[int]int{16: 16, 128: 32, 1024: 256} {
		if got := (Limits{Total: 1 << 16, Unauthenticated: strangers}).fillDefaults().UnauthenticatedPerSource; got !=
			want {
			t.Errorf("with %d unauthenticated connections, %d may come from one source, want %d", strangers, got, want)
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
