package provision

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// adminUntil is an administrator's kubeconfig of a cluster, good until a time.
func adminUntil(t *testing.T, ca, server string, until time.Time) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: until}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	c := clientcmdapi.NewConfig()
	c.CurrentContext = "prod"
	c.Clusters["prod"] = &clientcmdapi.Cluster{Server: "https://" + server + ":6443",
		CertificateAuthorityData: []byte(ca)}
	c.AuthInfos["admin"] = &clientcmdapi.AuthInfo{
		ClientCertificateData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
	c.Contexts["prod"] = &clientcmdapi.Context{Cluster: "prod", AuthInfo: "admin"}
	raw, err := clientcmd.Write(*c)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// A kubeconfig that a person has renewed is not replaced by a machine's older one; one that ends is, and another cluster's is kept beside.
func TestKubeconfigOfLongerUseStays(t *testing.T) {
	now := time.Now().Truncate(time.Second).UTC()
	machine := adminUntil(t, "CA", "192.0.2.12", now.Add(100*time.Hour))
	for name, c := range map[string]struct {
		mine   []byte
		stays  bool
		beside bool
	}{
		"expired":  {adminUntil(t, "CA", "192.0.2.11", now.Add(-time.Hour)), false, false},
		"the same": {machine, true, false},
		"as long":  {adminUntil(t, "CA", "192.0.2.11", now.Add(100*time.Hour)), false, false},
		"without a certificate": {[]byte("apiVersion: v1\nkind: Config\ncurrent-context: prod\nclusters:\n- {name: " +
			"prod, cluster: {certificate-authority-data: Q0E=}}\n"), false, false},
		"of another cluster":    {adminUntil(t, "other", "192.0.2.11", now.Add(200*time.Hour)), false, true},
		"what is no kubeconfig": {[]byte("{"), false, true},
	} {
		to := filepath.Join(t.TempDir(), "config")
		put(t, to, string(c.mine), 0o600)
		if err := writeKubeconfig(machine, to); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		is, err := os.ReadFile(to)
		if err != nil || (string(is) == string(c.mine)) != c.stays || !c.stays && string(is) != string(machine) {
			t.Errorf("%s: %v, stays: %v, there is\n%s", name, err, c.stays, is)
		}
		if _, err := os.Stat(to + ".before"); (err == nil) != c.beside {
			t.Errorf("%s: kept beside: %v", name, err)
		}
	}
	// Renewed: the user stays, and where the cluster is comes from the machine, since the one of before may be gone.
	renewed := filepath.Join(t.TempDir(), "config")
	put(t, renewed, string(adminUntil(t, "CA", "192.0.2.11", now.Add(200*time.Hour))), 0o600)
	for range 2 {
		if err := writeKubeconfig(machine, renewed); err != nil {
			t.Fatal(err)
		}
		is, err := os.ReadFile(renewed)
		if got := kubeconfigExpiry(is); err != nil || !got.Equal(now.Add(200*time.Hour)) ||
			!strings.Contains(string(is), "192.0.2.12") || strings.Contains(string(is), "192.0.2.11") {
			t.Errorf("renewed: good until %v (%v)\n%s", got.Sub(now), err, is)
		}
	}
	// In a file that has others too: where the cluster is comes from the machine, and what the user has stays.
	to := filepath.Join(t.TempDir(), "config")
	for _, c := range []struct{ until, want time.Duration }{{100, 100}, {200, 200}, {150, 200}} {
		if err := mergeKubeconfig(adminUntil(t, "CA", "192.0.2.12", now.Add(c.until*time.Hour)), to, "prod"); err !=
			nil {
			t.Fatal(err)
		}
		raw, err := os.ReadFile(to)
		if got := kubeconfigExpiry(raw); err != nil || !got.Equal(now.Add(c.want*time.Hour)) {
			t.Errorf("after one that is good for %dh it is good until %v (%v), want %dh", c.until,
				got.Sub(now), err, c.want)
		}
	}
}
