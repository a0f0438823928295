package server

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server/rotation"
)

// of is a client by a kubeconfig at a replica.
func (p *plane) of(t *testing.T, kubeconfig []byte, name string) *kubernetes.Clientset {
	t.Helper()
	cfg, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Host = p.rest(name).Host
	cfg.Timeout = 10 * time.Second
	cfg.Dial = (&net.Dialer{}).DialContext // a connection of its own, which meets the certificate of now
	return mustClient(t, cfg)
}

// believing is a kubeconfig with the authorities of another one.
func believing(t *testing.T, kubeconfig, like []byte) []byte {
	t.Helper()
	a, errA := clientcmd.Load(kubeconfig)
	b, errB := clientcmd.Load(like)
	if err := errors.Join(errA, errB); err != nil {
		t.Fatal(err)
	}
	for name := range a.Clusters {
		a.Clusters[name].CertificateAuthorityData = b.Clusters[name].CertificateAuthorityData
	}
	out, err := clientcmd.Write(*a)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// waitsFor waits until the exchange that is under way is at a step and waits for something.
func (p *plane) waitsFor(t *testing.T, at string, step rotation.Step, what string) {
	t.Helper()
	eventually(t, func() error {
		all := p.keys(at)
		if all.Rotation == nil || all.Rotation.Step != string(step) || !strings.Contains(strings.Join(all.Waiting, "\n"), what) {
			return fmt.Errorf("%+v, waiting for %q, want %s and %q", all.Rotation, all.Waiting, step, what)
		}
		return nil
	})
}

// begins begins with an exchange, or ends one, as soon as the cluster is at the feature level for it, which rises by itself.
func (p *plane) begins(t *testing.T, at string, q api.ClusterRotate) {
	t.Helper()
	var refused error
	eventually(t, func() error {
		err := p.call(at, "POST", api.PathClusterKeys, q, nil)
		if err != nil && strings.Contains(err.Error(), "needs feature level") {
			return err
		}
		refused = err
		return nil
	})
	if refused != nil {
		t.Fatal(refused)
	}
}

// kubeconfig is the administrator's of cp1's folder, as it is now.
func (p *plane) kubeconfig(t *testing.T) []byte {
	t.Helper()
	raw, err := os.ReadFile(p.founded.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// The cluster's CA is exchanged while three replicas serve a load of writes and watches. A Node that is away holds the
// exchange up by name, at the step trust and at the step wait. The administrator's kubeconfig of before is good until the
// former CA goes, and named until then; the one in the folder is renewed. Afterwards neither is the former CA believed nor
// what it has signed, a replica that starts again and one that joins know the new one alone. F51
func TestClusterCARotates(t *testing.T) {
	p := newPlane(t, 3, nil)
	ctx := context.Background()
	old := p.kubeconfig(t)
	former := p.ca.CA.Cert
	admin := p.client("cp1")
	if _, err := admin.CoreV1().Nodes().Create(ctx, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "paper"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	p.begins(t, "cp2", api.ClusterRotate{Kind: "cluster-ca", Keep: "1h"})
	p.waitsFor(t, "cp3", rotation.Trust, "node paper: it is away")
	p.begins(t, "cp1", api.ClusterRotate{Abort: true})
	eventually(t, func() error {
		for _, h := range p.keys("cp1").Replicas {
			if k := h.Keys[0]; k.Kind != "cluster-ca" || k.Signs != pki.CAID(former) || len(k.Believes) != 1 {
				return fmt.Errorf("%s after the abort: %+v", h.Name, k)
			}
		}
		return nil
	})
	if err := admin.CoreV1().Nodes().Delete(ctx, "paper", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}

	work := p.traffic(t)
	p.begins(t, "cp2", api.ClusterRotate{Kind: "cluster-ca", Keep: "1h"})
	p.waitsFor(t, "cp3", rotation.Wait, "until ")
	both := p.kubeconfig(t)
	for name := range p.members {
		for what, kubeconfig := range map[string][]byte{"former": old, "renewed": both, "former with new authorities": believing(t, old, both)} {
			if _, err := p.of(t, kubeconfig, name).CoreV1().Namespaces().Get(ctx, "default", metav1.GetOptions{}); err != nil {
				t.Errorf("the %s kubeconfig at %s: %v", what, name, err)
			}
		}
	}
	p.waitsFor(t, "cp1", rotation.Wait, "user keelson-admin: a certificate by the former CA")
	p.rootsHave(t, 2)
	p.begins(t, "cp3", api.ClusterRotate{Force: true})
	done := p.rotated(t, "cp1", rotation.ClusterCA)
	if err := work.end(); err != nil && !onlyTheFormer(err) {
		t.Errorf("during the exchange: %v", err)
	}
	if done.Old != pki.CAID(former) {
		t.Errorf("replaced %s, want %s", done.Old, pki.CAID(former))
	}
	p.rootsHave(t, 1)
	now := p.kubeconfig(t)
	p.stop("cp2")
	p.again("cp2")
	late := p.config(4)
	p.founded.ControlPlaneToken = p.replicaToken(t, "cp1")
	p.join(late)
	p.start(late)
	p.ready("cp4")
	for name := range p.members {
		if _, err := p.of(t, now, name).CoreV1().Namespaces().Get(ctx, "default", metav1.GetOptions{}); err != nil {
			t.Errorf("the kubeconfig of now at %s: %v", name, err)
		}
		if _, err := p.of(t, believing(t, old, now), name).CoreV1().Namespaces().Get(ctx, "default", metav1.GetOptions{}); err == nil {
			t.Errorf("%s believes a certificate of the former CA", name)
		}
		var unknown x509.UnknownAuthorityError
		if _, err := p.of(t, old, name).CoreV1().Namespaces().Get(ctx, "default", metav1.GetOptions{}); !errors.As(err, &unknown) {
			t.Errorf("who knows the former CA alone meets %v at %s", err, name)
		}
		p.trustFiles(t, name)
	}
}

// trustFiles: nothing of an exchange is left in the folder of a replica.
func (p *plane) trustFiles(t *testing.T, name string) {
	t.Helper()
	for _, f := range []string{pki.FileCATrusted, pki.FileCAFormer, pki.FileCANext} {
		if _, err := os.Stat(filepath.Join(recovery.TrustFolder(p.members[name].cfg.Dir()), f)); err == nil {
			t.Errorf("%s is left at %s", f, name)
		}
	}
}

// onlyTheFormer: the load's clients have the former kubeconfig; they are refused from the last step on, and their
// connections end then, with their watches and a write that is under way.
func onlyTheFormer(err error) bool {
	expected := []string{"signed by unknown authority", "Unauthorized", "the watch at", "EOF", "connection reset by peer"}
	for line := range strings.Lines(err.Error()) {
		if !slices.ContainsFunc(expected, func(e string) bool { return strings.Contains(line, e) }) {
			return false
		}
	}
	return true
}

// rootsHave waits until what pods read has so many certificates.
func (p *plane) rootsHave(t *testing.T, n int) {
	t.Helper()
	eventually(t, func() error {
		for _, ns := range []string{"default", "kube-system"} {
			cm, err := p.client("cp1").CoreV1().ConfigMaps(ns).Get(context.Background(), "kube-root-ca.crt", metav1.GetOptions{})
			if err != nil {
				return err
			}
			if got := strings.Count(cm.Data["ca.crt"], "BEGIN CERTIFICATE"); got != n {
				return fmt.Errorf("the ConfigMap of %s has %d certificates, want %d", ns, got, n)
			}
		}
		return nil
	})
}

func (p *plane) replicaToken(t *testing.T, at string) string {
	t.Helper()
	var out api.ClusterTokenResult
	if err := p.call(at, "POST", api.PathClusterTokens, api.ClusterToken{Role: "controlplane", Uses: 10}, &out); err != nil {
		t.Fatal(err)
	}
	return out.Token
}

// A removed replica is told of until each key that it has had is exchanged; the cluster's secret never is. F51
func TestRemovedIsToldOf(t *testing.T) {
	had := []api.ClusterKeyHeld{{Kind: "cluster-ca", Signs: "a", Believes: []string{"a"}}, {Kind: "service-account-key", Signs: "s", Believes: []string{"s", "s2"}}}
	m := removedMember{Name: "cp3", Keys: idsByKind(had)}
	older := m // as a release wrote it down that did not name the secret
	secret := func(id string) api.ClusterKeyHeld { return api.ClusterKeyHeld{Kind: "cluster-secret", Signs: id} }
	named := removedMember{Name: "cp3", Keys: idsByKind(append(slices.Clone(had), secret("x")))}
	for _, c := range []struct {
		m    removedMember
		now  []api.ClusterKeyHeld
		want []string
	}{
		{m, had, []string{"cluster-ca", "service-account-key"}},
		{m, []api.ClusterKeyHeld{{Kind: "cluster-ca", Signs: "b", Believes: []string{"b", "a"}}, {Kind: "service-account-key", Signs: "t"}}, []string{"cluster-ca"}},
		{m, []api.ClusterKeyHeld{{Kind: "cluster-ca", Signs: "b", Believes: []string{"b"}}, {Kind: "service-account-key", Signs: "t", Believes: []string{"t", "s2"}}}, []string{"service-account-key"}},
		{m, []api.ClusterKeyHeld{{Kind: "cluster-ca", Signs: "b", Believes: []string{"b"}}, {Kind: "peers-ca", Signs: "a"}}, nil},
		{named, []api.ClusterKeyHeld{{Kind: "cluster-ca", Signs: "b"}, secret("x")}, []string{"cluster-secret"}},
		{older, []api.ClusterKeyHeld{{Kind: "cluster-ca", Signs: "b"}, secret("x")}, []string{"cluster-secret"}},
		{named, []api.ClusterKeyHeld{{Kind: "cluster-ca", Signs: "b"}, secret("y")}, nil}, // of another cluster, which has restored a backup of that one
	} {
		if got := stillGood(c.m, c.now); !slices.Equal(got, c.want) {
			t.Errorf("%+v: %q, want %q", c.now, got, c.want)
		}
	}
}
