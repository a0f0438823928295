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

// requireNoAccess waits until no replica has a session or a standby connection of the node. It
// checks that a connection with the node's certificate receives nothing and cannot renew.
func (b *testEnv) requireNoAccess(node string, raw fleetv1.FleetClient) {
	b.t.Helper()
	b.awaitCondition("the end of the sessions of "+node, func() error {
		if h := b.sessionHolder(node); h != nil {
			return errors.New(h.name + " has one")
		}
		return nil
	})
	b.awaitCondition("renewal to be refused", func() error {
		_, err := raw.RenewCertificate(b.ctx, &fleetv1.RenewRequest{})
		if status.Code(err) == codes.PermissionDenied && strings.Contains(err.Error(), "was revoked") {
			return nil
		}
		return fmt.Errorf("renewing: %v", err)
	})
	// The revocation also closes connections: a stream on a closing connection gets Unavailable.
	b.awaitCondition("a session to be refused", func() error {
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

// A revoked node has no access at any replica, and joins again only with a token for its name.
func TestRevoke(t *testing.T) {
	b := newTestEnv(t, "cp1", "cp2")
	n := b.startAgent("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	b.startAgent("w2", nil)
	b.awaitReady("w2", v1.ConditionTrue)
	raws := []fleetv1.FleetClient{b.rawClient("w1", b.replicas["cp1"].address),
		b.rawClient("w1", b.replicas["cp2"].address)}
	if err := b.replicas["cp2"].fleet.RevokeNode(b.ctx, "w1"); err != nil {
		t.Fatal(err)
	}
	for _, raw := range raws {
		b.requireNoAccess("w1", raw)
	}
	if b.sessionHolder("w2") == nil {
		b.awaitReady("w2", v1.ConditionTrue)
	}
	// A token for any node is not accepted, not even when the Node is deleted.
	if err := client.Delete[*v1.Node](b.ctx, b.client, "", "w1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := b.enrollNode(b.token, "w1", nil); status.Code(err) != codes.PermissionDenied {
		t.Errorf("enrolling a revoked name: %v", err)
	}
	if err := n.stop(); err != nil {
		t.Error(err)
	}
	// A token for its name is found by the running agent.
	file := filepath.Join(t.TempDir(), "token")
	again := session.New(session.Config{NodeName: "w1",
		Join: session.Join{Servers: b.replicaAddresses(), TokenFile: file}, Facts: &v1.Node{}, StateDir: n.state,
		RunDir: n.run})
	ended := make(chan error, 1)
	ctx, cancel := context.WithCancel(b.ctx)
	go func() { ended <- again.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	tok := b.createToken(pki.Grant{Uses: 1, Names: []string{"w1"}, Replace: true})
	if err := os.WriteFile(file, []byte(tok.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	b.awaitReady("w1", v1.ConditionTrue)
	if _, err := os.Stat(file); !os.IsNotExist(err) {
		t.Errorf("the token is still there: %v", err)
	}
}

// A certificate that a replica with a fast clock signs at the moment of a revocation is revoked as
// well. A certificate issued afterwards is valid at once, is renewed by replicas with slow clocks,
// and is revoked by the next revocation.
func TestRevocationAndClocks(t *testing.T) {
	for name, revoke := range map[string]func(*testEnv) error{
		"by its name": func(b *testEnv) error { return b.replicas["cp1"].fleet.RevokeNode(b.ctx, "w1") },
		"by deleting it": func(b *testEnv) error {
			return client.Delete[*v1.Node](b.ctx, b.client, "", "w1", metav1.DeleteOptions{})
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newTestEnvWith(t, steady, "cp1")
			address := b.replicas["cp1"].address
			if _, err := client.Create(b.ctx, b.client, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}); err !=
				nil {
				t.Fatal(err)
			}
			renew := func(from fleetv1.FleetClient) fleetv1.FleetClient {
				key := newKey(t)
				got, err := from.RenewCertificate(b.ctx,
					&fleetv1.RenewRequest{CsrDer: certificateRequest(t, "w1", key)})
				if err != nil {
					t.Fatal(err)
				}
				return b.certificateClient(got.CertificatePem, key, address)
			}
			b.signerAhead.Store(int64(time.Minute))
			thief := renew(b.rawClient("w1", address))
			b.signerAhead.Store(int64(-time.Minute))
			token := b.createToken(pki.Grant{Uses: 2, Names: []string{"w1"}, Replace: true})
			for range 2 {
				if err := revoke(b); err != nil {
					t.Fatal(err)
				}
				b.requireNoAccess("w1", thief)
				key := newKey(t)
				cert, err := b.enrollCertificate(address, token.String(), "w1", key)
				if err != nil {
					t.Fatal(err)
				}
				thief = renew(renew(b.certificateClient(cert, key, address)))
				s, _ := startSession(b, thief, "w1") // which makes its Node
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
	b := newTestEnv(t, "cp1")
	b.startAgent("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	b.awaitLeaseOwned("w1")
}

// awaitLeaseOwned waits until the Lease of a node is owned by its Node, which is the last write
// when a node joins.
func (b *testEnv) awaitLeaseOwned(node string) {
	b.t.Helper()
	n, err := client.Get[*v1.Node](b.ctx, b.client, "", node)
	if err != nil {
		b.t.Fatal(err)
	}
	b.awaitCondition("the owner of the Lease", func() error {
		l, err := client.Get[*coordinationv1.Lease](b.ctx, b.client, v1.NamespaceNodeLease, node)
		if err != nil {
			return err
		}
		if len(l.OwnerReferences) != 1 || l.OwnerReferences[0] !=
			(metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: node, UID: n.UID}) {
			return fmt.Errorf("its owners: %+v", l.OwnerReferences)
		}
		return nil
	})
}

// A Node is deleted and revoked by one commit: no replica needs to live on for it.
func TestDeletionRevokes(t *testing.T) {
	b := newTestEnv(t) // no replica of the fleet is there
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
	if r, ok := pki.ParseRevocation(s); !ok || r.Node != "w1" || r.UID != string(made.UID) || r.Named ||
		time.Since(r.At) > time.Minute {
		t.Errorf("%+v", r)
	}
	// The revocation by name survives the deletion of the Node.
	other := pki.Revocation{Node: "w2", At: time.Now().Add(time.Minute), Named: true}.Record()
	b.createObject(other)
	if _, err := client.Create(b.ctx, b.client, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w2"}}); err != nil {
		t.Fatal(err)
	}
	if err := client.Delete[*v1.Node](b.ctx, b.client, "", "w2", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if s, err = client.Get[*v1.Secret](b.ctx, b.client, pki.TokenNamespace, other.Name); err != nil {
		t.Fatal(err)
	}
	if r, ok := pki.ParseRevocation(s); !ok || !r.Named || r.UID == "" || time.Until(r.At) < 50*time.Second {
		t.Errorf("%+v", r)
	}
}

// Deleting a Node revokes its certificates; it joins again with any token.
func TestDeletedNodeIsOut(t *testing.T) {
	b := newTestEnv(t, "cp1", "cp2")
	n := b.startAgent("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	raw := b.rawClient("w1", b.replicas["cp1"].address)
	if err := client.Delete[*v1.Node](b.ctx, b.client, "", "w1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.requireNoAccess("w1", raw)
	if err := n.stop(); err != nil {
		t.Error(err)
	}
	if _, err := client.Get[*v1.Node](b.ctx, b.client, "", "w1"); !apierrors.IsNotFound(err) {
		t.Errorf("the Node was written once more: %v", err)
	}
	if err := os.RemoveAll(n.state); err != nil {
		t.Fatal(err)
	}
	b.restartAgent(n, nil, b.replicaAddresses())
	b.awaitReady("w1", v1.ConditionTrue)
}
