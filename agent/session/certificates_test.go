package session

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
)

// While a renewed certificate cannot be stored, the node reports the expiry of the old one, to
// replicas and in its metrics. Once it is stored, the node reports the new expiry, and that of its
// server's certificate. F51
func TestCertificatesAreTold(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		const life = 90 * time.Hour
		by := newAuthority(t, "ca")
		s := newIdentifiedSession(t, by, life)
		says := func() string {
			var out strings.Builder
			if err := s.WriteMetrics(&out); err != nil {
				t.Fatal(err)
			}
			return out.String()
		}
		check := func(when string, ends time.Time) {
			t.Helper()
			told := s.creds.authoritiesReport().Certificates
			if len(told) != 1 || told[0].Use != useAgent || told[0].ExpiresUnix != ends.Unix() ||
				told[0].BeginsUnix >= ends.Unix() || len(told[0].Key) != 16 {
				t.Fatalf("%s: replicas are told %v, want one that ends %v", when, told, ends)
			}
			want := fmt.Sprintf("keelson_certificate_expiration_timestamp_seconds{key=%q,kind=\"certificate\","+
				"use=\"agent\"} %d\n", told[0].Key, ends.Unix())
			if got := says(); !strings.HasSuffix(got, want) || strings.Count(got, "\n") != 3 {
				t.Errorf("%s: the metrics are\n%swant\n%s", when, got, want)
			}
		}
		first := s.creds.id.currentCertificate().Leaf.NotAfter
		check("at first", first)

		file := filepath.Join(s.cfg.StateDir, nodeFile)
		if err := os.Rename(file, file+".away"); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Join(file, "in the way"), 0o700); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			ended <- s.creds.runRenewals(ctx, s.creds.id, time.Now, func(_ context.Context, id *identity) error {
				return id.replaceCertificate(s.cfg.StateDir, by.nodePEM(life))
			})
		}()
		time.Sleep(70 * time.Hour) // virtual time
		virtual.Wait()
		check("while it cannot be stored", first)
		if err := os.RemoveAll(file); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Minute)
		virtual.Wait()
		next := s.creds.id.currentCertificate().Leaf.NotAfter
		if !next.After(first) {
			t.Fatalf("it was not renewed: it ends %v", next)
		}
		check("renewed", next)
		cancel()
		<-ended

		if _, err := s.creds.installServingCertificate(by.nodePEM(time.Hour), time.Now()); err != nil {
			t.Fatal(err)
		}
		if told := s.creds.authoritiesReport().Certificates; len(told) != 2 || told[1].Use != useServing ||
			!strings.Contains(says(), `use="serving"`) {
			t.Errorf("with a certificate of its server replicas are told %v, and the metrics are\n%s", told, says())
		}
	})
}

// A node without an identity reports no certificates. A self-signed certificate of its server does
// not count. F51
func TestCertificatesBeforeEnrolment(t *testing.T) {
	s := New(Config{NodeName: "w1", StateDir: t.TempDir()})
	if _, err := s.ServingCertificate(); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := s.WriteMetrics(&out); err != nil || out.Len() > 0 {
		t.Errorf("%v, %q", err, out.String())
	}
}
