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
	gatewaysession "keelson.dev/keelson/controlplane/nodegateway/session"
	"keelson.dev/keelson/controlplane/pki"
)

// awaitAuthorities waits until is returns true for the reported authorities of every node.
func (b *testEnv) awaitAuthorities(what string, nodes []string, is func(gatewaysession.NodeAuthorities) bool) {
	b.t.Helper()
	b.awaitCondition(what, func() error {
		for _, n := range nodes {
			h := b.sessionHolder(n)
			if h == nil {
				return fmt.Errorf("%s has no session", n)
			}
			if a, ok := h.fleet.NodeAuthorities()[n]; !ok || a.Unreported || !is(a) {
				return fmt.Errorf("%s says %+v", n, a)
			}
		}
		return nil
	})
}

// changeTrust changes the trusted authorities, as a step of a rotation of the cluster CA does.
func (b *testEnv) changeTrust(since int64, change func(dir string) error) {
	b.t.Helper()
	if err := change(b.pki); err != nil {
		b.t.Fatal(err)
	}
	if err := b.trust.Reload(since); err != nil {
		b.t.Fatal(err)
	}
}

// Agents receive a new CA over their sessions, renew their certificates with it when it signs,
// including their server certificate, and drop the previous CA; sessions continue. An agent that is
// absent during the whole rotation can connect to no replica afterwards, and joins again with a
// token for its name. A restarted agent has stored its state. A token of the previous CA is
// accepted as long as that CA is trusted. F51
func TestAgentsFollowTheCA(t *testing.T) {
	b := newTestEnv(t, "cp1", "cp2")
	b.nodeIPs = []string{"127.0.0.1"}
	nodes := []string{"w1", "w2"}
	w1 := b.startAgent("w1", nil)
	b.startAgent("w2", nil)
	away := b.startAgent("away", nil)
	for _, n := range append(nodes, "away") {
		b.awaitReady(n, v1.ConditionTrue)
	}
	if err := away.stop(); err != nil {
		t.Fatal(err)
	}
	former := pki.CAID(b.trust.SigningCA().Cert)
	text, id, err := pki.NewClusterKey("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	with := func(do func(string, []byte) error) func(string) error {
		return func(dir string) error { return do(dir, text) }
	}
	b.awaitAuthorities("one CA", nodes, func(a gatewaysession.NodeAuthorities) bool {
		return slices.Equal(a.Trusted, []string{former})
	})

	b.changeTrust(10, with(pki.AddTrustedCA))
	b.awaitAuthorities("both CAs", nodes, func(a gatewaysession.NodeAuthorities) bool {
		return len(a.Trusted) == 2 && slices.Contains(a.Trusted, id) && !slices.Contains(a.Issuers, id)
	})
	b.changeTrust(20, with(pki.SetSigningCA))
	b.awaitAuthorities("certificates by the new CA", nodes, func(a gatewaysession.NodeAuthorities) bool {
		return slices.Equal(a.Issuers, []string{id, id}) // its own and its server's
	})
	b.startAgent("late", nil) // by a token of the former CA
	b.awaitReady("late", v1.ConditionTrue)
	b.awaitAuthorities("a new replica", []string{"late"}, func(a gatewaysession.NodeAuthorities) bool {
		return slices.Contains(a.Issuers, id)
	})

	b.changeTrust(30, pki.FinishServingCA)
	b.changeTrust(40, func(dir string) error { return pki.RemoveTrustedCA(dir, former) })
	b.awaitAuthorities("the new CA alone", append(nodes, "late"), func(a gatewaysession.NodeAuthorities) bool {
		return slices.Equal(a.Trusted, []string{id}) && slices.Equal(a.Issuers, []string{id, id})
	})
	if err := w1.stop(); err != nil {
		t.Fatal(err)
	}
	b.restartAgent(w1, nil, b.replicaAddresses())
	b.awaitAuthorities("restarted agent", []string{"w1"}, func(a gatewaysession.NodeAuthorities) bool {
		return slices.Equal(a.Trusted, []string{id})
	})

	b.checkReenrollment(away, former, id)
}

// checkReenrollment checks that a node with only the previous CA has no session until it receives a
// token.
func (b *testEnv) checkReenrollment(n *node, former, id string) {
	b.t.Helper()
	file := filepath.Join(b.t.TempDir(), "token")
	var log logBuffer
	again := session.New(session.Config{NodeName: n.name,
		Join: session.Join{Servers: b.replicaAddresses(), TokenFile: file}, Facts: &v1.Node{},
		StateDir: n.state, RunDir: n.run,
		Log: slog.New(slog.NewTextHandler(&log, nil))})
	ended := make(chan error, 1)
	ctx, cancel := context.WithCancel(b.ctx)
	go func() { ended <- again.Run(ctx) }()
	b.t.Cleanup(func() { cancel(); <-ended })
	b.awaitCondition("a server that is not believed", func() error {
		if !log.contains("signed by unknown authority") {
			return errors.New("none was met")
		}
		return nil
	})
	if b.sessionHolder(n.name) != nil {
		b.t.Errorf("a node that trusts only %s has a session", former)
	}
	tok := b.createToken(pki.Grant{Uses: 1, Names: []string{n.name}, Replace: true})
	if err := os.WriteFile(file, []byte(tok.String()), 0o600); err != nil {
		b.t.Fatal(err)
	}
	b.awaitAuthorities("a node that was away", []string{n.name}, func(a gatewaysession.NodeAuthorities) bool {
		return slices.Equal(a.Trusted, []string{id})
	})
}

// logBuffer collects log output.
type logBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

// Write implements io.Writer.
func (s *logBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *logBuffer) contains(what string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Contains(s.text.String(), what)
}
