package keyrotation_test

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
	"keelson.dev/keelson/controlplane/keyrotation/rotation"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// newForgedAdmin returns a function that calls the API with an administrator's certificate, which
// is signed with the keys of a replica.
func (p *plane) newForgedAdmin(t *testing.T, with *pki.Trust) func() error {
	t.Helper()
	issued, err := with.CA.Issue(pki.Client("nobody", api.GroupMasters), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return func() error {
		cfg := rest.AnonymousClientConfig(p.RESTConfig("cp1"))
		cfg.CertData, cfg.KeyData = issued.CertPEM, issued.KeyPEM
		_, err := servertest.NewClient(t, cfg).CoreV1().Secrets("kube-system").List(context.Background(),
			metav1.ListOptions{})
		return err
	}
}

// removeMember removes a replica with a request to that replica itself, and repeats the request.
func (p *plane) removeMember(t *testing.T, removed *servertest.Member) {
	t.Helper()
	name := removed.Config.Name
	servertest.Eventually(t, func() error { // it no longer requests membership
		_, err := os.Stat(filepath.Join(removed.Config.DataDir, datadir.PeersFile))
		if !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%s still requests membership: %v", name, err)
		}
		return nil
	})
	if err := p.Call(name, "DELETE", api.PathClusterMembers+"/"+name, nil, nil); err != nil {
		t.Fatalf("removing a replica through itself: %v", err)
	}
	// The response may be lost, because the connections of a removed member are closed. The removed
	// replica is notified by the other replicas and does not wait for a leader.
	servertest.Eventually(t, func() error {
		if !strings.Contains(removed.Log.String(), "this replica is no longer a member") {
			return fmt.Errorf("%s has not logged its removal", name)
		}
		return nil
	})
	if err := p.Call(name, "DELETE", api.PathClusterMembers+"/"+name, nil, nil); err != nil {
		t.Fatalf("repeating the removal through the removed replica: %v", err)
	}
}

// A replica is removed, and its disk was copied. Its own name is rejected. With the copied keys, a
// client can act as another member, sign tokens, and create an administrator. The cluster reports
// this until the keys are rotated. Afterwards the copied keys are invalid. F51
func TestKeysOfARemovedReplica(t *testing.T) {
	p := newPlane(t, 3, nil)
	ctx := context.Background()
	servertest.Eventually(t, func() error {
		_, err := p.Client("cp1").CoreV1().ServiceAccounts("default").Get(ctx, "default", metav1.GetOptions{})
		return err
	})
	account, err := p.Client("cp1").CoreV1().ServiceAccounts("default").Get(ctx, "default", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	removed := p.Members["cp3"]
	p.removeMember(t, removed)
	p.StopReplica("cp3")
	delete(p.Members, "cp3")
	stolen := filepath.Join(t.TempDir(), "pki")
	if err := os.CopyFS(stolen, os.DirFS(recovery.TrustFolder(removed.Config.Dir()))); err != nil {
		t.Fatal(err)
	}
	trust, err := pki.Load(stolen)
	if err != nil {
		t.Fatal(err)
	}
	dialAs := func(name string) error {
		t.Helper()
		peers, err := pki.NewPeers(stolen, pki.ReplicaPeer(name), time.Now)
		if err != nil {
			t.Fatal(err)
		}
		conf := peers.Client()
		conf.VerifyConnection = nil // the attacker accepts any server
		return p.DialPeer(t, "cp1", conf)
	}
	tokens, err := pki.NewServiceTokens(pki.DefaultIssuer, trust.ServiceKey)
	if err != nil {
		t.Fatal(err)
	}
	forged, _, err := tokens.Sign(pki.Claims{Namespace: "default",
		ServiceAccount: pki.Ref{Name: "default", UID: string(account.UID)}}, time.Hour, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	forge := p.newForgedAdmin(t, trust)
	if err := forge(); err != nil {
		t.Fatalf("the forged administrator is rejected before the rotation: %v", err)
	}
	if told := p.Keys("cp2").Removed; len(told) != 1 || told[0].Name != "cp3" ||
		strings.Join(told[0].Kinds, " ") != "cluster-ca cluster-secret encryption-key peers-ca service-account-key" {
		t.Errorf("removed replicas: %+v", told)
	}
	if err := dialAs("cp3"); err == nil {
		t.Error("a removed replica is accepted")
	}
	if err := dialAs("cp2"); err != nil {
		t.Fatalf("the forged member is rejected before the rotation: %v", err)
	}
	if err := p.authenticateWithToken("cp1", forged); err != nil {
		t.Fatalf("the forged token is rejected before the rotation: %v", err)
	}

	for _, q := range []api.ClusterRotate{{Kind: string(rotation.ClusterCA), Keep: "0s"},
		{Kind: string(rotation.EncryptionKey)}, {Kind: string(rotation.PeersCA)},
		{Kind: string(rotation.ServiceAccountKey), Keep: "0s"}} {
		if err := p.Call("cp1", "POST", api.PathClusterKeys, q, nil); err != nil {
			t.Fatal(err)
		}
		p.awaitRotation(t, "cp1", rotation.Kind(q.Kind))
	}
	for _, name := range []string{"cp2", "cp3"} {
		if err := dialAs(name); err == nil {
			t.Errorf("the copied keys are still accepted, as %s", name)
		}
	}
	if err := forge(); !apierrors.IsUnauthorized(err) {
		t.Errorf("a certificate that is signed with the copied key: %v", err)
	}
	// Data derived from the cluster's secret stays valid, and is reported until an operator
	// dismisses it.
	if told := p.Keys("cp2").Removed; len(told) != 1 || told[0].Name != "cp3" ||
		strings.Join(told[0].Kinds, " ") != "cluster-secret" {
		t.Errorf("removed replicas: %+v, want cp3 with the cluster's secret only", told)
	}
	if err := p.Call("cp1", "POST", api.PathClusterKeys, api.ClusterRotate{Dismiss: "cp3"}, nil); err != nil {
		t.Error(err)
	}
	if told := p.Keys("cp2").Removed; len(told) != 0 {
		t.Errorf("removed replicas after the dismissal: %+v", told)
	}
	for name := range p.Members {
		if err := p.authenticateWithToken(name, forged); err == nil {
			t.Errorf("%s accepts a token that is signed with the copied key", name)
		}
	}
	p.PutConfigMap("cp2", "after")
	p.CheckConfigMaps("cp1", "after")
}
