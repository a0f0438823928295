package server

import (
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/pki"
)

// Whom the peer port lets in, by what its replica knows. F51
func TestGateAdmits(t *testing.T) {
	for _, c := range []struct {
		what    string
		members []string
		settled bool
		who     string
		want    bool
		joins   bool
	}{
		{"a member", []string{"cp1", "cp2", "cp3"}, true, "cp2", true, false},
		{"a former member", []string{"cp1", "cp2"}, true, "cp3", false, false},
		{"a stranger while nobody leads: it may have been added meanwhile, and lead next", []string{"cp1", "cp2"}, false, "cp3", true, false},
		{"anybody at a newcomer, who knows nobody", nil, false, "cp3", true, false},
		{"anybody at one that was removed itself", []string{"cp2", "cp3"}, true, "cp4", true, false},
		{"a stranger at one that is alone: its group was restored or recovered", []string{"cp1"}, true, "cp2", false, false},
		{"the same before it leads", []string{"cp1"}, false, "cp2", false, false},
		{"the leader at the founder, who joins anew and has the first day's log", []string{"cp1"}, false, "cp2", true, true},
		{"a former member at one who has joined and has the whole log", []string{"cp1", "cp2"}, true, "cp3", false, true},
	} {
		var list []raftMember
		for _, m := range c.members {
			list = append(list, raftMember{ID: m})
		}
		g := newGate("cp1", func() []raftMember { return list }, func() bool { return c.settled }, slog.New(slog.DiscardHandler))
		g.joins = c.joins
		if err := g.admits(c.who); (err == nil) != c.want || err != nil && !errors.Is(err, errNotMember) {
			t.Errorf("%s: %v", c.what, err)
		}
	}
}

// A member that is removed loses the connections it has, and is refused new
// ones; the others keep theirs.
func TestGateCuts(t *testing.T) {
	trust, err := pki.NewTrust("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir() + "/pki"
	if err := trust.Save(dir); err != nil {
		t.Fatal(err)
	}
	list := []raftMember{{ID: "cp1"}, {ID: "cp2"}, {ID: "cp3"}}
	g := newGate("cp1", func() []raftMember { return list }, func() bool { return true }, slog.New(slog.DiscardHandler))
	side := func(name string) *pki.Peers {
		p, err := pki.NewPeers(dir, pki.ReplicaPeer(name), time.Now)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln := tls.NewListener(g.listen(plain), g.guard(side("cp1").Server()))
	defer ln.Close()
	go echo(ln)

	cp2, err := dial(plain, side("cp2"))
	if err != nil {
		t.Fatal(err)
	}
	defer cp2.Close()
	cp3, err := dial(plain, side("cp3"))
	if err != nil {
		t.Fatal(err)
	}
	defer cp3.Close()
	g.sweep()
	for name, c := range map[string]net.Conn{"cp2": cp2, "cp3": cp3} {
		if err := say(c); err != nil {
			t.Errorf("%s is a member: %v", name, err)
		}
	}
	list = list[:2]
	g.sweep()
	if err := say(cp3); err == nil {
		t.Error("a former member goes on speaking")
	}
	if err := say(cp2); err != nil {
		t.Errorf("a member was cut: %v", err)
	}
	if c, err := dial(plain, side("cp3")); err == nil {
		c.Close()
		t.Error("a former member was let in again")
	}
	cp2.Close()
	eventually(t, func() error {
		g.mu.Lock()
		defer g.mu.Unlock()
		if n := len(g.open); n > 0 {
			return errors.New("a connection that was closed is still in the book")
		}
		return nil
	})
}

// echo answers every byte on every connection.
func echo(ln net.Listener) {
	for {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			_, _ = io.Copy(c, c)
		}()
	}
}

func dial(to net.Listener, as *pki.Peers) (net.Conn, error) {
	c, err := tls.Dial("tcp", to.Addr().String(), as.Client())
	if err != nil {
		return nil, err
	}
	if err := say(c); err != nil { // with TLS 1.3 a refusal comes after the client's handshake
		c.Close()
		return nil, err
	}
	return c, nil
}

func say(c net.Conn) error {
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		return err
	}
	if _, err := c.Write([]byte{1}); err != nil {
		return err
	}
	_, err := c.Read(make([]byte, 1))
	return err
}
