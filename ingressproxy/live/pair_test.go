package live

import (
	"os"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/ingressproxy/pairs"
	"keelson.dev/keelson/test/testenv/keypair"
)

// writePair writes a key pair in the form that the control plane provides to a proxy.
func writePair(t *testing.T, dir, namespace, name string) {
	t.Helper()
	data := keypair.Data(t, "a.example")
	certificate, key := pairs.FileNames(namespace, name)
	for file, pem := range map[string][]byte{certificate: data[corev1.TLSCertKey], key: data[corev1.TLSPrivateKeyKey]} {
		if err := os.WriteFile(filepath.Join(dir, file), pem, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
