package nodegateway_test

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
	coordinationv1 "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
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
	// The revocation also closes connections: a stream on one that is being closed is Unavailable.
	b.eventually("a session to be refused", func() error {
		s, err := raw.Session(b.ctx)
		if err == nil {
			_, err = s.Recv()
		}
		switch status.Code(err) {
		case codes.PermissionDenied:
			return nil
		case codes.Unavailable:
			return err
		}
		b.t.Errorf("a session with a revoked certificate: %v", err)
		return nil
	})
}

// A node that is revoked is out on every replica, and comes back with a token that was made for it only.
func TestRevoke(t *testing.T) {
	b := newBed(t, "cp1", "cp2")
	n := b.join("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	b.join("w2", nil)
	b.awaitReady("w2", v1.ConditionTrue)
	raws := []fleetv1.FleetClient{b.raw("w1", b.replicas["cp1"].address), b.raw("w1", b.replicas["cp2"].address)}
	if err := b.replicas["cp2"].fleet.Revoke(b.ctx, "w1"); err != nil {
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

// What a replica whose clock is ahead signs in the moment of a revocation is revoked as well; what is given to the node
// afterwards is good at once, is renewed by replicas whose clocks are behind, and falls to the next revocation.
func TestRevocationAndClocks(t *testing.T) {
	for name, revoke := range map[string]func(*bed) error{
		"by its name": func(b *bed) error { return b.replicas["cp1"].fleet.Revoke(b.ctx, "w1") },
		"by deleting it": func(b *bed) error {
			return client.Delete[*v1.Node](b.ctx, b.client, "", "w1", metav1.DeleteOptions{})
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBedWith(t, steady, "cp1")
			address := b.replicas["cp1"].address
			if _, err := client.Create(b.ctx, b.client, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}); err != nil {
				t.Fatal(err)
			}
			renew := func(from fleetv1.FleetClient) fleetv1.FleetClient {
				key := newKey(t)
				got, err := from.RenewCertificate(b.ctx, &fleetv1.RenewRequest{CsrDer: request(t, "w1", key)})
				if err != nil {
					t.Fatal(err)
				}
				return b.shows(got.CertificatePem, key, address)
			}
			b.ahead.Store(int64(time.Minute))
			thief := renew(b.raw("w1", address))
			b.ahead.Store(int64(-time.Minute))
			token := b.grant(pki.Grant{Uses: 2, Names: []string{"w1"}, Replace: true})
			for range 2 {
				if err := revoke(b); err != nil {
					t.Fatal(err)
				}
				b.out("w1", thief)
				key := newKey(t)
				cert, err := b.enrolled(address, token.String(), "w1", key)
				if err != nil {
					t.Fatal(err)
				}
				thief = renew(renew(b.shows(cert, key, address)))
				s, _ := hello(b, thief, "w1") // which makes its Node
				if _, err := s.Recv(); err != nil {
					t.Fatal(err)
				}
				b.awaitReady("w1", v1.ConditionTrue)
			}
		})
	}
}

// The Lease of a node belongs to its Node, with which garbage collection removes it.
func TestLeaseBelongsToItsNode(t *testing.T) {
	b := newBed(t, "cp1")
	b.join("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	b.awaitLeaseOwned("w1")
}

// awaitLeaseOwned waits until the Lease of a node belongs to its Node: the last that is written when a node joins.
func (b *bed) awaitLeaseOwned(node string) {
	b.t.Helper()
	n, err := client.Get[*v1.Node](b.ctx, b.client, "", node)
	if err != nil {
		b.t.Fatal(err)
	}
	b.eventually("the owner of the Lease", func() error {
		l, err := client.Get[*coordinationv1.Lease](b.ctx, b.client, v1.NamespaceNodeLease, node)
		if err != nil {
			return err
		}
		if len(l.OwnerReferences) != 1 || l.OwnerReferences[0] != (metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: node, UID: n.UID}) {
			return fmt.Errorf("its owners: %+v", l.OwnerReferences)
		}
		return nil
	})
}

// A Node is deleted and revoked by one commit: no replica needs to live on for it.
func TestDeletionRevokes(t *testing.T) {
	b := newBed(t) // no replica of the fleet is there
	made, err := client.Create(b.ctx, b.client, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := client.Delete[*v1.Node](b.ctx, b.client, "", "w1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	s, err := client.Get[*v1.Secret](b.ctx, b.client, pki.TokenNamespace, pki.RevocationName("w1"))
	if err != nil {
		t.Fatal(err)
	}
	if r, ok := pki.RevocationOf(s); !ok || r.Node != "w1" || r.UID != string(made.UID) || r.Named || time.Since(r.At) > time.Minute {
		t.Errorf("%+v", r)
	}
	// That somebody revoked it by its name outlives its deletion.
	other := pki.Revocation{Node: "w2", At: time.Now().Add(time.Minute), Named: true}.Record()
	b.create(other)
	if _, err := client.Create(b.ctx, b.client, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w2"}}); err != nil {
		t.Fatal(err)
	}
	if err := client.Delete[*v1.Node](b.ctx, b.client, "", "w2", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if s, err = client.Get[*v1.Secret](b.ctx, b.client, pki.TokenNamespace, other.Name); err != nil {
		t.Fatal(err)
	}
	if r, ok := pki.RevocationOf(s); !ok || !r.Named || r.UID == "" || time.Until(r.At) < 50*time.Second {
		t.Errorf("%+v", r)
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
	if _, err := client.Get[*v1.Node](b.ctx, b.client, "", "w1"); !apierrors.IsNotFound(err) {
		t.Errorf("the Node was written once more: %v", err)
	}
	if err := os.RemoveAll(n.state); err != nil {
		t.Fatal(err)
	}
	b.rejoin(n, nil, b.addresses())
	b.awaitReady("w1", v1.ConditionTrue)
}
