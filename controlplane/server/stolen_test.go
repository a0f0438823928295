package server

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server/rotation"
)

// forger makes an administrator's certificate with the keys of a replica, and calls the API with it.
func (p *plane) forger(t *testing.T, with *pki.Trust) func() error {
	t.Helper()
	issued, err := with.CA.Issue(pki.Client("nobody", api.GroupMasters), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return func() error {
		cfg := rest.AnonymousClientConfig(p.rest("cp1"))
		cfg.CertData, cfg.KeyData = issued.CertPEM, issued.KeyPEM
		_, err := mustClient(t, cfg).CoreV1().Secrets("kube-system").List(context.Background(), metav1.ListOptions{})
		return err
	}
}

// leaves has a replica be asked for its own removal.
func (p *plane) leaves(t *testing.T, gone *running) {
	t.Helper()
	name := gone.cfg.Name
	eventually(t, func() error { // it asks to be taken in no more
		if _, err := os.Stat(filepath.Join(gone.cfg.DataDir, datadir.PeersFile)); !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%s is being taken in: %v", name, err)
		}
		return nil
	})
	if err := p.call(name, "DELETE", api.PathClusterMembers+"/"+name, nil, nil); err != nil {
		t.Fatalf("the replica that is removed is the one that is asked: %v", err)
	}
	// The answer may be lost with the connection, which is cut from who is no member any more: that one hears from the others that
	// it is done, and does not wait for a leader in vain.
	eventually(t, func() error {
		if !strings.Contains(gone.log.String(), "this replica is no member any more") {
			return fmt.Errorf("%s does not know that it was removed", name)
		}
		return nil
	})
	if err := p.call(name, "DELETE", api.PathClusterMembers+"/"+name, nil, nil); err != nil {
		t.Fatalf("the replica that was removed is asked again: %v", err)
	}
}

// A replica is removed and its disk is copied: its own name opens nothing from then on, but with its keys one can take
// the name of a member, sign tokens and make an administrator, which is told of until these keys are exchanged; then they are
// worthless. F51
func TestKeysOfARemovedReplica(t *testing.T) {
	p := newPlane(t, 3, nil)
	ctx := context.Background()
	eventually(t, func() error {
		_, err := p.client("cp1").CoreV1().ServiceAccounts("default").Get(ctx, "default", metav1.GetOptions{})
		return err
	})
	account, err := p.client("cp1").CoreV1().ServiceAccounts("default").Get(ctx, "default", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	gone := p.members["cp3"]
	p.leaves(t, gone)
	p.stop("cp3")
	delete(p.members, "cp3")
	stolen := filepath.Join(t.TempDir(), "pki")
	if err := os.CopyFS(stolen, os.DirFS(recovery.TrustFolder(gone.cfg.Dir()))); err != nil {
		t.Fatal(err)
	}
	trust, err := pki.Load(stolen)
	if err != nil {
		t.Fatal(err)
	}
	as := func(name string) error {
		t.Helper()
		peers, err := pki.NewPeers(stolen, pki.ReplicaPeer(name), time.Now)
		if err != nil {
			t.Fatal(err)
		}
		conf := peers.Client()
		conf.VerifyConnection = nil // the thief does not care whom he calls
		return p.knock(t, "cp1", conf)
	}
	forger, err := pki.NewServiceTokens(pki.DefaultIssuer, trust.ServiceKey)
	if err != nil {
		t.Fatal(err)
	}
	forged, _, err := forger.Sign(pki.Claims{Namespace: "default", ServiceAccount: pki.Ref{Name: "default", UID: string(account.UID)}}, time.Hour, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	forge := p.forger(t, trust)
	if err := forge(); err != nil {
		t.Fatalf("with the keys of a replica one makes an administrator, or this test shows nothing: %v", err)
	}
	if told := p.keys("cp2").Removed; len(told) != 1 || told[0].Name != "cp3" ||
		strings.Join(told[0].Kinds, " ") != "cluster-ca cluster-secret encryption-key peers-ca service-account-key" {
		t.Errorf("of removed replicas is told %+v", told)
	}
	if err := as("cp3"); err == nil {
		t.Error("a removed replica is let in")
	}
	if err := as("cp2"); err != nil {
		t.Fatalf("with the keys of a replica one passes for a member, or this test shows nothing: %v", err)
	}
	if err := p.asToken("cp1", forged); err != nil {
		t.Fatalf("with the keys of a replica one signs tokens, or this test shows nothing: %v", err)
	}

	for _, q := range []api.ClusterRotate{{Kind: string(rotation.ClusterCA), Keep: "0s"}, {Kind: string(rotation.EncryptionKey)}, {Kind: string(rotation.PeersCA)}, {Kind: string(rotation.ServiceAccountKey), Keep: "0s"}} {
		if err := p.call("cp1", "POST", api.PathClusterKeys, q, nil); err != nil {
			t.Fatal(err)
		}
		p.rotated(t, "cp1", rotation.Kind(q.Kind))
	}
	for _, name := range []string{"cp2", "cp3"} {
		if err := as(name); err == nil {
			t.Errorf("the copied keys open the store still, as %s", name)
		}
	}
	if err := forge(); !apierrors.IsUnauthorized(err) {
		t.Errorf("a certificate that the copied key has signed: %v", err)
	}
	// What follows from the cluster's secret is good still, and nothing says otherwise until a person does.
	if told := p.keys("cp2").Removed; len(told) != 1 || told[0].Name != "cp3" || strings.Join(told[0].Kinds, " ") != "cluster-secret" {
		t.Errorf("of removed replicas is told %+v, want cp3 with the cluster's secret alone", told)
	}
	if err := p.call("cp1", "POST", api.PathClusterKeys, api.ClusterRotate{Dismiss: "cp3"}, nil); err != nil {
		t.Error(err)
	}
	if told := p.keys("cp2").Removed; len(told) != 0 {
		t.Errorf("after it was dismissed is told of %+v", told)
	}
	for name := range p.members {
		if err := p.asToken(name, forged); err == nil {
			t.Errorf("%s believes a token that the copied key has signed", name)
		}
	}
	p.put("cp2", "after")
	p.holds("cp1", "after")
}
