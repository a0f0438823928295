package nodegateway_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent/session"
	"keelson.dev/keelson/controlplane/nodegateway"
	"keelson.dev/keelson/controlplane/pki"
)

// say waits until the replicas have heard of every one of the nodes that it is so.
func (b *bed) say(what string, nodes []string, is func(nodegateway.NodeAuthorities) bool) {
	b.t.Helper()
	b.eventually(what, func() error {
		for _, n := range nodes {
			h := b.holder(n)
			if h == nil {
				return fmt.Errorf("%s has no session", n)
			}
			if a, ok := h.fleet.NodeAuthorities()[n]; !ok || a.Silent || !is(a) {
				return fmt.Errorf("%s says %+v", n, a)
			}
		}
		return nil
	})
}

// trusts changes what is believed, as a step of the exchange of the CA does.
func (b *bed) trusts(since int64, change func(dir string) error) {
	b.t.Helper()
	if err := change(b.pki); err != nil {
		b.t.Fatal(err)
	}
	if err := b.trust.Reload(since); err != nil {
		b.t.Fatal(err)
	}
}

// Agents learn of a new CA over their sessions, have their certificates signed by it when it signs, that of their own
// server among them, and give the former up; sessions go on. One that is away all the while can speak to no replica
// afterwards, and comes back with a token that was made for it. One that was begun again knows what it knew. A token of the
// former CA lets in while that serves. F51
func TestAgentsFollowTheCA(t *testing.T) {
	b := newBed(t, "cp1", "cp2")
	b.nodeIPs = []string{"127.0.0.1"}
	nodes := []string{"w1", "w2"}
	w1 := b.join("w1", nil)
	b.join("w2", nil)
	away := b.join("away", nil)
	for _, n := range append(nodes, "away") {
		b.awaitReady(n, v1.ConditionTrue)
	}
	if err := away.stop(); err != nil {
		t.Fatal(err)
	}
	former := pki.CAID(b.trust.Signs().Cert)
	text, id, err := pki.NewClusterKey("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	with := func(do func(string, []byte) error) func(string) error {
		return func(dir string) error { return do(dir, text) }
	}
	b.say("one CA", nodes, func(a nodegateway.NodeAuthorities) bool { return slices.Equal(a.Believes, []string{former}) })

	b.trusts(10, with(pki.BelieveCA))
	b.say("both CAs", nodes, func(a nodegateway.NodeAuthorities) bool {
		return len(a.Believes) == 2 && slices.Contains(a.Believes, id) && !slices.Contains(a.Shows, id)
	})
	b.trusts(20, with(pki.SignCA))
	b.say("certificates by the new CA", nodes, func(a nodegateway.NodeAuthorities) bool {
		return slices.Equal(a.Shows, []string{id, id}) // its own and its server's
	})
	b.join("late", nil) // by a token of the former CA
	b.awaitReady("late", v1.ConditionTrue)
	b.say("a newcomer", []string{"late"}, func(a nodegateway.NodeAuthorities) bool { return slices.Contains(a.Shows, id) })

	b.trusts(30, pki.ServeCA)
	b.trusts(40, func(dir string) error { return pki.DropCA(dir, former) })
	b.say("the new CA alone", append(nodes, "late"), func(a nodegateway.NodeAuthorities) bool {
		return slices.Equal(a.Believes, []string{id}) && slices.Equal(a.Shows, []string{id, id})
	})
	if err := w1.stop(); err != nil {
		t.Fatal(err)
	}
	b.rejoin(w1, nil, b.addresses())
	b.say("one that was begun again", []string{"w1"}, func(a nodegateway.NodeAuthorities) bool { return slices.Equal(a.Believes, []string{id}) })

	b.comesBack(away, former, id)
}

// comesBack: a node that knows the former CA alone has no session until it is given a token.
func (b *bed) comesBack(n *node, former, id string) {
	b.t.Helper()
	file := filepath.Join(b.t.TempDir(), "token")
	var log said
	again := session.New(session.Config{NodeName: n.name, Servers: b.addresses(), TokenFile: file, Facts: &v1.Node{}, StateDir: n.state, RunDir: n.run,
		Log: slog.New(slog.NewTextHandler(&log, nil))})
	ended := make(chan error, 1)
	ctx, cancel := context.WithCancel(b.ctx)
	go func() { ended <- again.Run(ctx) }()
	b.t.Cleanup(func() { cancel(); <-ended })
	b.eventually("a server that is not believed", func() error {
		if !log.has("signed by unknown authority") {
			return errors.New("none was met")
		}
		return nil
	})
	if b.holder(n.name) != nil {
		b.t.Errorf("a node that knows %s alone has a session", former)
	}
	tok := b.grant(pki.Grant{Uses: 1, Names: []string{n.name}, Replace: true})
	if err := os.WriteFile(file, []byte(tok.String()), 0o600); err != nil {
		b.t.Fatal(err)
	}
	b.say("a node that was away", []string{n.name}, func(a nodegateway.NodeAuthorities) bool { return slices.Equal(a.Believes, []string{id}) })
}

// said keeps what is logged.
type said struct {
	mu   sync.Mutex
	text strings.Builder
}

// Write implements io.Writer.
func (s *said) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *said) has(what string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Contains(s.text.String(), what)
}
