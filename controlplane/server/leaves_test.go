package server_test

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// Certificates expire within seconds. The raft cluster keeps running, new connections use new
// certificates, and a restarted replica is admitted. F51
func TestCertificatesRotate(t *testing.T) {
	const life = 6 * time.Second // a connection must succeed within a third of this time, also on a busy machine
	p := newPlane(t, 2, func(c *server.Config) { c.Timing.CertificateLife = life })
	began := time.Now()
	presentedCertificate := func() *x509.Certificate {
		peers, err := pki.NewPeers(recovery.TrustFolder(p.Members["cp2"].Config.Dir()),
			pki.ReplicaPeer("cp2"), time.Now)
		if err != nil {
			t.Fatal(err)
		}
		conf := peers.Client()
		conf.NextProtos = []string{"h2"}
		conn, err := tls.Dial("tcp", datadir.HostPort(p.Members["cp1"].Config.Advertise, p.Cluster.PeerPort), conf)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		return conn.ConnectionState().PeerCertificates[0]
	}
	first := presentedCertificate()
	n := 0
	servertest.Eventually(t, func() error {
		p.PutConfigMap([]string{"cp1", "cp2"}[n%2], fmt.Sprintf("c-%d", n))
		n++
		if time.Since(began) < life+life/2 {
			return errors.New("the first certificates are still valid")
		}
		return nil
	})
	if time.Now().Before(first.NotAfter) {
		t.Fatalf("the first certificate is valid until %s", first.NotAfter)
	}
	if now := presentedCertificate(); now.SerialNumber.Cmp(first.SerialNumber) == 0 {
		t.Error("a new connection presents the expired certificate")
	}
	p.StopReplica("cp2")
	p.Restart("cp2")
	p.PutConfigMap("cp2", "after")
	p.CheckConfigMaps("cp1", "after")
}
