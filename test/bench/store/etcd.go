package main

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"keelson.dev/keelson/raftstore/storetest"
	"keelson.dev/keelson/test/bench/store/drive"
)

// nameOfEtcd is the name of the reference's group.
const nameOfEtcd = "etcd"

// etcdVersion returns the version that the reference's program reports.
func etcdVersion(ctx context.Context, path string) (string, error) {
	out, err := exec.CommandContext(ctx, path, "-version").Output()
	if err != nil {
		return "", fmt.Errorf("-etcd %s: %w", path, err)
	}
	return strings.TrimSpace(string(out)), nil
}

// newEtcd prepares, but does not start, a group of three etcd members whose data is below dir. path
// is the reference program. The members use mutual TLS between them, as replicas do.
func newEtcd(path, dir string) (*group, error) {
	g, err := newGroup(nameOfEtcd, dir)
	if err != nil {
		return nil, err
	}
	g.programs.member, g.programs.load = program{path, drive.RoleMember}, program{path, drive.RoleLoad}
	cluster := make(map[string]string)
	for _, m := range g.members {
		cluster[m.setup.Name] = m.setup.Peer
	}
	authority, err := storetest.NewAuthority()
	if err != nil {
		return nil, err
	}
	for _, m := range g.members {
		m.setup.Cluster = cluster
		if err := writeCertificates(authority, filepath.Join(dir, "tls-"+m.setup.Name),
			&m.setup); err != nil {
			return nil, fmt.Errorf("certificates of etcd member %s: %w", m.setup.Name, err)
		}
	}
	return g, nil
}

// writeCertificates writes a member's certificate, its key and the CA certificate as PEM files,
// which etcd requires.
func writeCertificates(a *storetest.Authority, dir string, s *drive.Setup) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	server, _, err := a.Issue(s.Name)
	if err != nil {
		return err
	}
	pair := server.Certificates[0]
	key, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	if err != nil {
		return err
	}
	ca, err := authorityCertificate(a)
	if err != nil {
		return err
	}
	s.CertFile, s.KeyFile, s.CAFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem"),
		filepath.Join(dir, "ca.pem")
	for path, block := range map[string]*pem.Block{
		s.CertFile: {Type: "CERTIFICATE", Bytes: pair.Certificate[0]},
		s.KeyFile:  {Type: "PRIVATE KEY", Bytes: key},
		s.CAFile:   {Type: "CERTIFICATE", Bytes: ca},
	} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// authorityCertificate returns the CA certificate in DER form.
func authorityCertificate(a *storetest.Authority) ([]byte, error) {
	raw, err := a.Marshal()
	if err != nil {
		return nil, err
	}
	var parts struct{ Cert []byte }
	if err := json.Unmarshal(raw, &parts); err != nil {
		return nil, err
	}
	return parts.Cert, nil
}
