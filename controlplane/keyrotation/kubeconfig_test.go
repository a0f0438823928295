package keyrotation_test

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
	"keelson.dev/keelson/controlplane/keyrotation"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/internal/virtual"
)

// The administrator's kubeconfig is renewed at two thirds of its certificate's life, and not
// before. The test checks the certificate once a day: hourly checks for two years would take more
// than a minute of CPU.
func TestAdminKubeconfigIsRenewedInTime(t *testing.T) {
	dir := t.TempDir()
	readCertificate := func(t *testing.T) *x509.Certificate {
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
		conf := server.Config{Name: "cp1", DataDir: dir, Advertise: "192.0.2.11"}
		if _, err := server.Init(conf, datadir.Cluster{}, server.InitOptions{}); err != nil {
			t.Fatal(err)
		}
		ca, err := pki.NewClusterCA(filepath.Join(dir, datadir.PKIFolder), time.Now)
		if err != nil {
			t.Fatal(err)
		}
		trust, err := pki.Load(filepath.Join(dir, datadir.PKIFolder))
		if err != nil {
			t.Fatal(err)
		}
		log := slog.New(slog.DiscardHandler)
		r, err := keyrotation.New(keyrotation.Config{Name: conf.Name, DataDir: dir, Trust: trust, CA: ca, Log: log,
			Secrets: keyrotation.NewSecretFiles(datadir.StoreOptions{}, nil, nil, nil, log),
			Store:   struct{ keyrotation.Store }{}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- r.RenewKubeconfig(ctx, 24*keyrotation.KubeconfigInterval) }()
		defer func() { cancel(); <-ended }()
		first := readCertificate(t)
		advanceTime := func(d time.Duration) {
			time.Sleep(d) // in a bubble
			virtual.Wait()
		}
		const day = 24 * time.Hour
		advanceTime(240 * day)
		if now := readCertificate(t); !now.Equal(first) {
			t.Errorf("a certificate that expires %s was renewed at %s", first.NotAfter, time.Now())
		}
		advanceTime(5 * day)
		now := readCertificate(t)
		if now.Equal(first) || now.NotAfter.Sub(time.Now()) < 360*day ||
			now.Subject.String() != first.Subject.String() || ca.VerifyClient(now) != nil {
			t.Errorf("at %s the certificate of %s expires %s: %v", time.Now(), now.Subject, now.NotAfter,
				ca.VerifyClient(now))
		}
		advanceTime(500 * day) // several renewals
		if now := readCertificate(t); time.Now().After(now.NotAfter) {
			t.Errorf("at %s the certificate has been expired since %s", time.Now(), now.NotAfter)
		}
	})
}
