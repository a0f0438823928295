package fleet_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent/session"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/pki"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// out waits until no replica has a session or a standby of the node, and checks that a connection with its
// certificate gets nothing and cannot renew.
func (b *bed) out(node string, raw fleetv1.FleetClient) {
	b.t.Helper()
	b.eventually("the end of the sessions of "+node, func() error {
		if h := b.holder(node); h != nil {
			return errors.New(h.name + " has one")
		}
		return nil
	})
	b.eventually("renewal to be refused", func() error {
		_, err := raw.RenewCertificate(b.ctx, &fleetv1.RenewRequest{})
		if status.Code(err) == codes.PermissionDenied && strings.Contains(err.Error(), "was revoked") {
			return nil
		}
		return fmt.Errorf("renewing: %v", err)
	})
	s, err := raw.Session(b.ctx)
	if err == nil {
		_, err = s.Recv()
	}
	if status.Code(err) != codes.PermissionDenied {
		b.t.Errorf("a session with a revoked certificate: %v", err)
	}
}

// A node that is revoked is out on every replica, and comes back with a token that was made for it only.
func TestRevoke(t *testing.T) {
	b := newBed(t, "cp1", "cp2")
	n := b.join("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	b.join("w2", nil)
	b.awaitReady("w2", v1.ConditionTrue)
	raws := []fleetv1.FleetClient{b.raw("w1", b.replicas["cp1"].address), b.raw("w1", b.replicas["cp2"].address)}
	if err := b.replicas["cp2"].fleet.Revoke(b.ctx, pki.Revocation{Node: "w1", At: time.Now(), Named: true}); err != nil {
		t.Fatal(err)
	}
	for _, raw := range raws {
		b.out("w1", raw)
	}
	if b.holder("w2") == nil {
		b.awaitReady("w2", v1.ConditionTrue)
	}
	// The token with which any node may join is none for it, not even once the Node is gone.
	if err := client.Delete[*v1.Node](b.ctx, b.client, "", "w1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := b.enroll(b.token, "w1", nil); status.Code(err) != codes.PermissionDenied {
		t.Errorf("enrolling a revoked name: %v", err)
	}
	if err := n.stop(); err != nil {
		t.Error(err)
	}
	// One that was made for it is found by the agent while it runs.
	file := filepath.Join(t.TempDir(), "token")
	again := session.New(session.Config{NodeName: "w1", Servers: b.addresses(), TokenFile: file, Facts: &v1.Node{}, StateDir: n.state, RunDir: n.run})
	ended := make(chan error, 1)
	ctx, cancel := context.WithCancel(b.ctx)
	go func() { ended <- again.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	tok := b.grant(pki.Grant{Uses: 1, Names: []string{"w1"}, Replace: true})
	if err := os.WriteFile(file, []byte(tok.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	b.awaitReady("w1", v1.ConditionTrue)
	if _, err := os.Stat(file); !os.IsNotExist(err) {
		t.Errorf("the token is still there: %v", err)
	}
}

// Deleting a Node revokes what it was given; it comes back by enrolling, with any token.
func TestDeletedNodeIsOut(t *testing.T) {
	b := newBed(t, "cp1", "cp2")
	n := b.join("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	raw := b.raw("w1", b.replicas["cp1"].address)
	if err := client.Delete[*v1.Node](b.ctx, b.client, "", "w1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.out("w1", raw)
	if err := n.stop(); err != nil {
		t.Error(err)
	}
	if _, err := client.Get[*v1.Node](b.ctx, b.client, "", "w1"); err == nil {
		t.Log("the node was written once more before it was out") // it is revoked all the same
	}
	if err := os.RemoveAll(n.state); err != nil {
		t.Fatal(err)
	}
	_ = client.Delete[*v1.Node](b.ctx, b.client, "", "w1", metav1.DeleteOptions{}) // it may be there
	b.rejoin(n, nil, b.addresses())
	b.awaitReady("w1", v1.ConditionTrue)
}
