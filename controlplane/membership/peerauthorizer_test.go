package membership

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/raftstore"
)

// The peer port admits members. It admits other replicas only if the list of members may be out of
// date. F51
func TestPeerAuthorizerAdmitsMembers(t *testing.T) {
	for _, c := range []struct {
		name          string
		members       []string
		listIsCurrent bool
		peer          string
		admitted      bool
		joining       bool
	}{
		{"a member", []string{"cp1", "cp2", "cp3"}, true, "cp2", true, false},
		{"a removed member", []string{"cp1", "cp2"}, true, "cp3", false, false},
		{"an unknown replica without a leader: it may have been added meanwhile, and may be the next leader",
			[]string{"cp1", "cp2"},
			false, "cp3", true, false},
		{"any replica at a joining replica without a list", nil, false, "cp3", true, false},
		{"any replica at a replica that was removed itself", []string{"cp2", "cp3"}, true, "cp4", true, false},
		{"an unknown replica at the only member, which was restored or recovered", []string{"cp1"}, true,
			"cp2", false, false},
		{"an unknown replica at the only member before it is the leader", []string{"cp1"}, false, "cp2", false, false},
		{"the leader at the first replica of the cluster, which joins again and has only the start of the log",
			[]string{"cp1"}, false,
			"cp2", true, true},
		{"a removed member at a joining replica that has caught up", []string{"cp1", "cp2"}, true,
			"cp3", false, true},
	} {
		var list []raftstore.Member
		for _, m := range c.members {
			list = append(list, raftstore.Member{ID: m})
		}
		g := newPeerAuthorizer("cp1", func() []raftstore.Member {
			return list
		}, func() bool { return c.listIsCurrent }, slog.New(slog.DiscardHandler))
		g.joining = c.joining
		if err := g.admitMember(c.peer); (err == nil) != c.admitted || err != nil && !errors.Is(err, errNotMember) {
			t.Errorf("%s: admission of %s: %v, want admitted %v", c.name, c.peer, err, c.admitted)
		}
	}
}

// A removed member loses its connections, and new connections of it are refused. The other members
// keep their connections.
func TestPeerAuthorizerClosesRemoved(t *testing.T) {
	trust, err := pki.NewTrust("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir() + "/pki"
	if err := trust.Save(dir); err != nil {
		t.Fatal(err)
	}
	list := []raftstore.Member{{ID: "cp1"}, {ID: "cp2"}, {ID: "cp3"}}
	g := newPeerAuthorizer("cp1", func() []raftstore.Member {
		return list
	}, func() bool { return true }, slog.New(slog.DiscardHandler))
	newPeers := func(name string) *pki.Peers {
		p, err := pki.NewPeers(dir, pki.ReplicaPeer(name), time.Now)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln := tls.NewListener(g.wrapListener(listener), g.guardTLS(newPeers("cp1").Server()))
	defer ln.Close()
	go serveEcho(ln)

	cp2, err := dialPeer(listener, newPeers("cp2"))
	if err != nil {
		t.Fatal(err)
	}
	defer cp2.Close()
	cp3, err := dialPeer(listener, newPeers("cp3"))
	if err != nil {
		t.Fatal(err)
	}
	defer cp3.Close()
	g.closeRemoved()
	for name, c := range map[string]net.Conn{"cp2": cp2, "cp3": cp3} {
		if err := exchangeByte(c); err != nil {
			t.Errorf("the connection of member %s: %v", name, err)
		}
	}
	list = list[:2]
	g.closeRemoved()
	if err := exchangeByte(cp3); err == nil {
		t.Error("the connection of the removed member cp3 is still open")
	}
	if err := exchangeByte(cp2); err != nil {
		t.Errorf("the connection of member cp2 was closed: %v", err)
	}
	if c, err := dialPeer(listener, newPeers("cp3")); err == nil {
		c.Close()
		t.Error("a new connection of the removed member cp3 was admitted")
	}
	cp2.Close()
	await.Until(t.Context(), t, await.Patience, 20*time.Millisecond,
		"the removal of the closed connection", func() error {
			g.mu.Lock()
			defer g.mu.Unlock()
			if n := len(g.connections); n > 0 {
				return fmt.Errorf("%d closed connections are still registered", n)
			}
			return nil
		})
}

// serveEcho accepts connections until the listener is closed, and sends back every byte.
func serveEcho(ln net.Listener) {
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

// dialPeer connects to a listener with the certificate of a replica, and exchanges a byte.
func dialPeer(to net.Listener, identity *pki.Peers) (net.Conn, error) {
	c, err := tls.Dial("tcp", to.Addr().String(), identity.Client())
	if err != nil {
		return nil, err
	}
	if err := exchangeByte(c); err != nil { // with TLS 1.3 a refusal arrives after the handshake of the client
		c.Close()
		return nil, err
	}
	return c, nil
}

// exchangeByte writes a byte to a connection and reads a byte from it.
func exchangeByte(c net.Conn) error {
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		return err
	}
	if _, err := c.Write([]byte{1}); err != nil {
		return err
	}
	_, err := c.Read(make([]byte, 1))
	return err
}
