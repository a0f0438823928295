package storetest

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
)

// wired returns the two ends of a connection from a to b.
func wired(n *Network) (a *wire, b net.Conn) {
	x, y := net.Pipe()
	return &wire{Conn: x, net: n, from: "a", to: "b", closed: make(chan struct{})}, y
}

// What was sent during a cut arrives when TCP sends it again: up to about as long
// after the cut as it lasted. What is sent behind it waits for it.
func TestHeldBackArrivesAsTCPBringsIt(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNetwork()
		a, b := wired(n)
		defer a.Close()
		n.Cut("a", "b")
		began := time.Now()
		put := func(s string) {
			if _, err := a.Write([]byte(s)); err != nil {
				t.Fatal(err)
			}
		}
		put("x")
		time.Sleep(7 * time.Second)
		n.Mend("a", "b")
		put("y")
		got := make([]byte, 2)
		if _, err := io.ReadFull(b, got); err != nil || string(got) != "xy" {
			t.Fatalf("got %q, %v", got, err)
		}
		// 200 ms, 400, 800 ... after the one before.
		if after := time.Since(began); after != 12600*time.Millisecond {
			t.Errorf("it arrived after %s", after)
		}
		if n.GivenUp("a", "b") != 0 {
			t.Error("it was given up though nobody had asked for it")
		}
	})
}

// A connection whose dialer has asked for it breaks when the other end is
// unheard for too long, whichever direction is cut; and not before.
func TestUnheardConnectionBreaks(t *testing.T) {
	for _, cut := range [][2]string{{"a", "b"}, {"b", "a"}} {
		virtual.Test(t, func(t *testing.T) {
			n := newNetwork()
			a, b := wired(n)
			defer a.Close()
			go func() { _, _ = io.Copy(io.Discard, b) }()
			if err := a.SetUnheardTimeout(2 * time.Second); err != nil {
				t.Fatal(err)
			}
			write := func() {
				if _, err := a.Write([]byte("x")); err != nil {
					t.Fatal(err)
				}
			}
			n.CutOneWay(cut[0], cut[1])
			write()
			time.Sleep(1300 * time.Millisecond)
			n.Heal()
			time.Sleep(10 * time.Second)
			n.CutOneWay(cut[0], cut[1])
			time.Sleep(10 * time.Second) // nothing is due: it lasts
			if n.GivenUp("a", "b") != 0 {
				t.Fatal("it broke although it was heard in time")
			}
			began := time.Now()
			write()
			_, err := a.Read(make([]byte, 1))
			if after := time.Since(began); err == nil || after != 2*time.Second {
				t.Errorf("reading ended after %s with %v", after, err)
			}
			if _, err := a.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
				t.Errorf("writing after it broke: %v", err)
			}
			if n.GivenUp("a", "b") != 1 {
				t.Error("nobody has noted it")
			}
		})
	}
}
