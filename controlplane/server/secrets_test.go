package server

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/raftstore/disk"
)

// Certificates live for seconds here: the group goes on, new connections show
// new ones, and a replica that starts again is let in. F51
func TestCertificatesRotate(t *testing.T) {
	const life = 6 * time.Second // a connection is made within a third of it, on a busy machine too
	p := newPlane(t, 2, func(c *Config) { c.certificateLife = life })
	began := time.Now()
	shown := func() *x509.Certificate {
		peers, err := pki.NewPeers(recovery.TrustFolder(p.members["cp2"].cfg.Dir()), pki.ReplicaPeer("cp2"), time.Now)
		if err != nil {
			t.Fatal(err)
		}
		conf := peers.Client()
		conf.NextProtos = []string{"h2"}
		conn, err := tls.Dial("tcp", datadir.HostPort(p.members["cp1"].cfg.Advertise, p.cluster.PeerPort), conf)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		return conn.ConnectionState().PeerCertificates[0]
	}
	first := shown()
	n := 0
	eventually(t, func() error {
		p.put([]string{"cp1", "cp2"}[n%2], fmt.Sprintf("c-%d", n))
		n++
		if time.Since(began) < life+life/2 {
			return errors.New("the first certificates are still valid")
		}
		return nil
	})
	if time.Now().Before(first.NotAfter) {
		t.Fatalf("the first certificate is valid until %s", first.NotAfter)
	}
	if now := shown(); now.SerialNumber.Cmp(first.SerialNumber) == 0 {
		t.Error("a new connection shows the certificate that has expired")
	}
	p.stop("cp2")
	p.again("cp2")
	p.put("cp2", "after")
	p.holds("cp1", "after")
}

// The authority of the replicas is exchanged while they run: at each step both
// serve, and in the end a holder of the former keys is not let in. F51
func TestAuthorityExchanged(t *testing.T) {
	p := newPlane(t, 2, nil)
	former, err := pki.NewPeers(recovery.TrustFolder(p.members["cp2"].cfg.Dir()), pki.ReplicaPeer("cp2"), time.Now)
	if err != nil {
		t.Fatal(err)
	}
	stranger := former.Client()
	stranger.VerifyConnection = nil // it does not care whom it calls
	file := filepath.Join(t.TempDir(), "authority")
	if _, err := pki.MakePeerCA(file, "test", time.Now()); err != nil {
		t.Fatal(err)
	}
	read := func(name string) int {
		return strings.Count(p.members[name].log.String(), "authorities of the replicas read again")
	}
	for i, step := range []func(dir string) error{
		func(dir string) error { _, err := pki.TrustPeerCA(dir, file); return err },
		func(dir string) error { _, err := pki.UsePeerCA(dir, file); return err },
		pki.ForgetPeerCAs,
	} {
		if err := p.knock(t, "cp1", stranger); err != nil {
			t.Fatalf("before step %d: %v", i, err)
		}
		for _, name := range []string{"cp1", "cp2"} {
			was := read(name)
			if err := step(recovery.TrustFolder(p.members[name].cfg.Dir())); err != nil {
				t.Fatal(err)
			}
			if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
				t.Fatal(err)
			}
			eventually(t, func() error {
				if read(name) == was {
					return fmt.Errorf("step %d is unknown to %s", i, name)
				}
				return nil
			})
		}
		p.stop("cp2") // its connections are new ones afterwards
		p.again("cp2")
		p.put("cp2", fmt.Sprintf("step-%d", i))
	}
	if err := p.knock(t, "cp1", stranger); err == nil {
		t.Error("a holder of the former keys was let in")
	}
	p.holds("cp1", "step-0", "step-1", "step-2")
}

// Encryption at rest: begun with a key file, its keys exchanged while the
// replica runs, and nothing readable without them.
func TestEncryptionAtRest(t *testing.T) {
	keys := filepath.Join(t.TempDir(), "keys")
	if err := disk.NewKeyFile(keys, "first"); err != nil {
		t.Fatal(err)
	}
	p := newPlane(t, 1, func(c *Config) { c.Store.Keys = keys })
	const mark = "a-name-that-must-not-be-on-the-disk"
	p.put("cp1", mark)
	file := p.backup("cp1")
	if err := disk.AddKey(keys, "second"); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		if log := p.members["cp1"].log.String(); !strings.Contains(log, "encryption keys read again") || !strings.Contains(log, "current=second") {
			return errors.New("the new key is not in use")
		}
		return nil
	})
	// A file that is broken on its way does no harm.
	good, err := os.ReadFile(keys)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(keys, []byte("second half-a-ke"), 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		if !strings.Contains(p.members["cp1"].log.String(), "encryption keys not taken over, the former ones stay") {
			return errors.New("no complaint about a broken key file")
		}
		return nil
	})
	p.put("cp1", mark+"-2")
	if err := os.WriteFile(keys, good, 0o600); err != nil {
		t.Fatal(err)
	}
	p.stop("cp1")
	cfg := p.members["cp1"].cfg
	err = filepath.WalkDir(filepath.Join(cfg.DataDir, datadir.RaftFolder), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		raw, err := os.ReadFile(path)
		if bytes.Contains(raw, []byte(mark)) {
			t.Errorf("%s holds the name of an object in clear", path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	bare := cfg
	bare.Store.Keys, bare.Log = "", slog.New(slog.DiscardHandler)
	if err := Run(context.Background(), bare); !errors.Is(err, disk.ErrSealed) {
		t.Errorf("a start without keys: %v", err)
	}
	if _, err := recovery.Verify(bare.Store, file); !errors.Is(err, disk.ErrSealed) {
		t.Errorf("verifying a backup without keys: %v", err)
	}
	if i, err := recovery.Verify(cfg.Store, file); err != nil || !i.Sealed || i.KeyID != "first" {
		t.Errorf("verifying a backup with keys: %v %+v", err, i)
	}
	p.again("cp1")
	p.holds("cp1", mark, mark+"-2")
}
