package machines

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// What a machine calls itself is in its settings, or is its hostname; a node has the name of its certificate, whatever its settings say.
func TestNames(t *testing.T) {
	for _, c := range []struct {
		what          string
		facts         Facts
		replica, node string
		servers       string
	}{
		{"nothing", Facts{Hostname: "Box"}, "", "", ""},
		{"settings", Facts{Hostname: "Box", ControlPlane: "# name: x\nname: \"cp1\"\n",
			Agent: "node-name: w1\nserver: [\"192.0.2.11:6444\", '[2001:db8::1]:6444']\n"},
			"cp1", "w1", "192.0.2.11:6444 [2001:db8::1]:6444"},
		{"settings without names", Facts{Hostname: "Box", ControlPlane: "debug: true\n",
			Agent: "server: a:6444, b:6444\n"}, "Box", "box", "a:6444 b:6444"},
		{"a number", Facts{ControlPlane: "name: 007\n", Agent: "node-name: 1\n"}, "007", "1", ""},
		{"broken settings", Facts{Hostname: "Box", ControlPlane: "name: [", Agent: "\t"}, "", "", ""},
		{"a certificate", Facts{Agent: "node-name: web1\n", NodeName: "w1"}, "", "w1", ""},
	} {
		if r, n, s := c.facts.ReplicaName(), c.facts.AgentName(),
			strings.Join(c.facts.AgentServers(), " "); r != c.replica || n != c.node || s != c.servers {
			t.Errorf("%s: replica %q, node %q, servers %q; want %q, %q, %q", c.what, r, n, s, c.replica,
				c.node, c.servers)
		}
	}
}

// A node's name is read of its certificate; the key in the same file stays on the machine.
func TestNodeNameOfCertificate(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "system:node:w1"}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	parts := [][]byte{pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}),
		pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
	root := t.TempDir()
	at := filepath.Join(root, "var/lib/keelson/session")
	if err := os.MkdirAll(at, 0o755); err != nil {
		t.Fatal(err)
	}
	_, h := newSSHD(t, "w1", "PATH="+os.Getenv("PATH"), "DESTDIR="+root)
	m := connected(t, h)
	for range 2 {
		if err := os.WriteFile(filepath.Join(at, "node.pem"), slices.Concat(parts...), 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := m.Run(t.Context(), factsScript, nil)
		if err != nil {
			t.Fatal(err)
		}
		f, _, err := parseFacts(out)
		if err != nil || !f.Node || f.NodeName != "w1" {
			t.Errorf("the node is %v %q (%v)", f.Node, f.NodeName, err)
		}
		for line := range strings.Lines(out) {
			if rest, ok := strings.CutPrefix(line, "nodecert "); ok && strings.Contains(decoded(t, rest), "PRIVATE") {
				t.Errorf("the machine told its node's key")
			}
		}
		slices.Reverse(parts)
	}
}

func decoded(t *testing.T, text string) string {
	t.Helper()
	raw, err := base64.StdEncoding.DecodeString(strings.TrimSpace(text))
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}
