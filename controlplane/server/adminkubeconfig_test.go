package server

import (
	"context"
	"crypto/x509"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/virtual"
)

// The administrator's kubeconfig of a machine is renewed at two thirds of its life, and not before. The replica of the test
// checks the certificate 24 times less often than a served one: an hourly check of two years costs more than a minute of CPU.
func TestAdminKubeconfigIsRenewedInTime(t *testing.T) {
	dir := t.TempDir()
	leaf := func(t *testing.T) *x509.Certificate {
		t.Helper()
		raw, err := os.ReadFile(filepath.Join(dir, datadir.AdminFile))
		if err != nil {
			t.Fatal(err)
		}
		c, err := clientcmd.Load(raw)
		if err != nil {
			t.Fatal(err)
		}
		cert, err := pki.DecodeCert(c.AuthInfos[c.Contexts[c.CurrentContext].AuthInfo].ClientCertificateData)
		if err != nil {
			t.Fatal(err)
		}
		return cert
	}
	virtual.Test(t, func(t *testing.T) {
		conf := Config{Name: "cp1", DataDir: dir, Advertise: "192.0.2.11"}
		if _, err := Init(conf, datadir.Cluster{}, Founding{}); err != nil {
			t.Fatal(err)
		}
		ca, err := pki.NewClusterCA(filepath.Join(dir, datadir.PKIFolder), time.Now)
		if err != nil {
			t.Fatal(err)
		}
		r := &Replica{cfg: conf, ca: ca, log: slog.New(slog.DiscardHandler)}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- r.keepAdmin(ctx, 24*adminEvery) }()
		defer func() { cancel(); <-ended }()
		first := leaf(t)
		pass := func(d time.Duration) {
			time.Sleep(d) // in a bubble
			virtual.Wait()
		}
		const day = 24 * time.Hour
		pass(240 * day)
		if now := leaf(t); !now.Equal(first) {
			t.Errorf("a certificate that is good until %s was renewed at %s", first.NotAfter, time.Now())
		}
		pass(5 * day)
		now := leaf(t)
		if now.Equal(first) || now.NotAfter.Sub(time.Now()) < 360*day || now.Subject.String() != first.Subject.String() || ca.Verifies(now) != nil {
			t.Errorf("at %s there is a certificate of %s that is good until %s: %v", time.Now(), now.Subject, now.NotAfter, ca.Verifies(now))
		}
		pass(500 * day) // and so on
		if now := leaf(t); time.Now().After(now.NotAfter) {
			t.Errorf("at %s it is good until %s", time.Now(), now.NotAfter)
		}
	})
}
