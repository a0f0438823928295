package keyrotation_test

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
	"keelson.dev/keelson/controlplane/keyrotation/rotation"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// clientFor returns a client with a kubeconfig for the API of a replica.
func (p *plane) clientFor(t *testing.T, kubeconfig []byte, name string) *kubernetes.Clientset {
	t.Helper()
	cfg, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Host = p.RESTConfig(name).Host
	cfg.Timeout = 10 * time.Second
	cfg.Dial = (&net.Dialer{}).DialContext // a new connection, in which the API presents its current certificate
	return servertest.NewClient(t, cfg)
}

// withAuthoritiesOf returns a kubeconfig with the certificate authorities of another kubeconfig.
func withAuthoritiesOf(t *testing.T, kubeconfig, like []byte) []byte {
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

// awaitStep waits until the current rotation is at a step and reports a reason for waiting.
func (p *plane) awaitStep(t *testing.T, at string, step rotation.Step, what string) {
	t.Helper()
	servertest.Eventually(t, func() error {
		all := p.Keys(at)
		if all.Rotation == nil || all.Rotation.Step != string(step) ||
			!strings.Contains(strings.Join(all.Waiting, "\n"), what) {
			return fmt.Errorf("%+v, waiting for %q, want %s and %q", all.Rotation, all.Waiting, step, what)
		}
		return nil
	})
}

// requestRotation starts, forces or aborts a rotation. It waits until the cluster has reached the
// feature level that rotations need.
func (p *plane) requestRotation(t *testing.T, at string, q api.ClusterRotate) {
	t.Helper()
	var refused error
	servertest.Eventually(t, func() error {
		err := p.Call(at, "POST", api.PathClusterKeys, q, nil)
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

// readKubeconfig returns the current administrator's kubeconfig in the data directory of cp1.
func (p *plane) readKubeconfig(t *testing.T) []byte {
	t.Helper()
	raw, err := os.ReadFile(p.Founded.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// The cluster CA is rotated while three replicas serve writes and watches. A Node without a session
// blocks the rotation in the steps trust and wait, and is named. The previous administrator's
// kubeconfig is valid, and reported as in use, until the previous CA is removed. The file in the
// data directory is renewed. Afterwards no replica trusts the previous CA or its certificates,
// including a restarted replica and a new replica. F51
func TestClusterCARotates(t *testing.T) {
	p := newPlane(t, 3, nil)
	ctx := context.Background()
	old := p.readKubeconfig(t)
	former := p.Trust.CA.Cert
	admin := p.Client("cp1")
	if _, err := admin.CoreV1().Nodes().Create(ctx, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "paper"}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	p.requestRotation(t, "cp2", api.ClusterRotate{Kind: "cluster-ca", Keep: "1h"})
	p.awaitStep(t, "cp3", rotation.Trust, "node paper: it is away")
	p.requestRotation(t, "cp1", api.ClusterRotate{Abort: true})
	servertest.Eventually(t, func() error {
		for _, h := range p.Keys("cp1").Replicas {
			if k := h.Keys[0]; k.Kind != "cluster-ca" || k.Signs != pki.CAID(former) || len(k.Believes) != 1 {
				return fmt.Errorf("%s after the abort: %+v", h.Name, k)
			}
		}
		return nil
	})
	if err := admin.CoreV1().Nodes().Delete(ctx, "paper", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}

	work := p.startTraffic(t)
	p.requestRotation(t, "cp2", api.ClusterRotate{Kind: "cluster-ca", Keep: "1h"})
	p.awaitStep(t, "cp3", rotation.Wait, "until ")
	both := p.readKubeconfig(t)
	for name := range p.Members {
		for what, kubeconfig := range map[string][]byte{"former": old, "renewed": both,
			"previous with new authorities": withAuthoritiesOf(t, old, both)} {
			if _, err := p.clientFor(t, kubeconfig, name).CoreV1().Namespaces().Get(ctx, "default",
				metav1.GetOptions{}); err != nil {
				t.Errorf("the %s kubeconfig at %s: %v", what, name, err)
			}
		}
	}
	p.awaitStep(t, "cp1", rotation.Wait, "user keelson-admin: a certificate of the previous CA")
	p.awaitRootCertificates(t, 2)
	p.requestRotation(t, "cp3", api.ClusterRotate{Force: true})
	done := p.awaitRotation(t, "cp1", rotation.ClusterCA)
	if err := work.end(); err != nil && !causedByOldCA(err) {
		t.Errorf("during the rotation: %v", err)
	}
	if done.Old != pki.CAID(former) {
		t.Errorf("replaced %s, want %s", done.Old, pki.CAID(former))
	}
	p.awaitRootCertificates(t, 1)
	now := p.readKubeconfig(t)
	p.StopReplica("cp2")
	p.Restart("cp2")
	late := p.NewConfig(4)
	p.Founded.ControlPlaneToken = p.createReplicaToken(t, "cp1")
	p.Join(late)
	p.StartReplica(late)
	p.AwaitReady("cp4")
	for name := range p.Members {
		if _, err := p.clientFor(t, now, name).CoreV1().Namespaces().Get(ctx, "default", metav1.GetOptions{}); err !=
			nil {
			t.Errorf("the current kubeconfig at %s: %v", name, err)
		}
		if _, err := p.clientFor(t, withAuthoritiesOf(t, old, now), name).CoreV1().Namespaces().Get(ctx, "default",
			metav1.GetOptions{}); err == nil {
			t.Errorf("%s accepts a certificate of the previous CA", name)
		}
		var unknown x509.UnknownAuthorityError
		if _, err := p.clientFor(t, old, name).CoreV1().Namespaces().Get(ctx, "default",
			metav1.GetOptions{}); !errors.As(err, &unknown) {
			t.Errorf("a client that trusts only the previous CA got %v at %s", err, name)
		}
		p.checkNoRotationFiles(t, name)
	}
}

// checkNoRotationFiles checks that the rotation has left no temporary files on a replica.
func (p *plane) checkNoRotationFiles(t *testing.T, name string) {
	t.Helper()
	for _, f := range []string{pki.FileCATrusted, pki.FileCAFormer, pki.FileCANext} {
		if _, err := os.Stat(filepath.Join(recovery.TrustFolder(p.Members[name].Config.Dir()), f)); err == nil {
			t.Errorf("%s still exists at %s", f, name)
		}
	}
}

// causedByOldCA reports whether all errors of the load result from the removal of the previous CA.
// The load uses the previous kubeconfig, so that its requests, watches and connections fail after
// the last step.
func causedByOldCA(err error) bool {
	expected := []string{"signed by unknown authority", "Unauthorized", "the watch at", "EOF",
		"connection reset by peer"}
	for line := range strings.Lines(err.Error()) {
		if !slices.ContainsFunc(expected, func(e string) bool { return strings.Contains(line, e) }) {
			return false
		}
	}
	return true
}

// awaitRootCertificates waits until the ConfigMaps with root certificates contain n certificates.
func (p *plane) awaitRootCertificates(t *testing.T, n int) {
	t.Helper()
	servertest.Eventually(t, func() error {
		for _, ns := range []string{"default", "kube-system"} {
			cm, err := p.Client("cp1").CoreV1().ConfigMaps(ns).Get(context.Background(), "kube-root-ca.crt",
				metav1.GetOptions{})
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

func (p *plane) createReplicaToken(t *testing.T, at string) string {
	t.Helper()
	var out api.ClusterTokenResult
	if err := p.Call(at, "POST", api.PathClusterTokens, api.ClusterToken{Role: "controlplane", Uses: 10}, &out); err !=
		nil {
		t.Fatal(err)
	}
	return out.Token
}
